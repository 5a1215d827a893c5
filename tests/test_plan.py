"""Which layers go where, what that takes, and how passes flow: plans against brute force and against what is loaded."""

import dataclasses
import functools
import gc
import io
import itertools
import math
import operator
import random
import re
import sys

import numpy as np
import pytest

import qengine
from benchmarks import figures
from cli.options import build_parser
from engine import expert_store, plan
from engine.plan import LEAST_CHECKPOINTS, Demand, Planner, Work, best_split, most, most_drafts, schedule
from engine.weights import Loader, PaperLoader, Weights
from kernels import probe
from kernels.card import CardError, Lent, Memory, OutOfMemory, PlannedCard
from kernels.emulated.card import EmulatedCard
from kernels.emulated.cards import CMP_100_210, H100, T4, V100
from kernels.open import open_cards
from qengine import PlannedModel, make_planner, open_model
from tests.costs import costs_of_27b
from tests.oracle import oracle_path
from tests.tiny import ROOT
from tests.vision_files import SMALL, write_tower

pytestmark = pytest.mark.usefixtures("compiled_when_launched")

MB = 1 << 20


opened_once = functools.cache(open_model)


def planner(model, cards, **demand):
    opened = opened_once(model)
    return Planner(PlannedModel(opened.config, opened.weights), cards, Demand(**{"n_ctx": 4096} | demand))


def typed(*models, **settings):
    return [EmulatedCard(number, like=model, **settings) for number, model in enumerate(models)]


def counts(plan):
    return [len(layers) for layers in plan.layers]


# ---- where layers go ---------------------------------------------------------------------------------------

def test_best_split_is_that_of_brute_force():
    rng = random.Random(1)
    for _ in range(200):
        n_layers, n_stages = rng.randint(1, 9), rng.randint(1, 4)
        table = {(stage, i, j): rng.choice([rng.random(), math.inf]) if rng.random() < 0.2 else rng.random() * (j - i)
                 for stage in range(n_stages) for i in range(n_layers) for j in range(i + 1, n_layers + 1)}
        costs = np.array([[[table.get((stage, i, j), -1) for j in range(n_layers + 1)] for i in range(n_layers + 1)]
                          for stage in range(n_stages)])        # -1: of no layers
        worst = [max(table[stage, i, j] for stage, (i, j) in enumerate(zip((0, *cut), (*cut, n_layers))))
                 for cut in itertools.combinations(range(1, n_layers), n_stages - 1)]
        found = best_split(costs)
        if min(worst, default=math.inf) == math.inf:
            assert found is None
        else:
            assert [found[0].start, *(r.stop for r in found)] == [0, *(r.start for r in found[1:]), n_layers]
            assert max(table[stage, r.start, r.stop] for stage, r in enumerate(found)) == min(worst)


def test_equal_cards_share_the_work_and_unlike_ones_by_their_speed():
    assert counts(planner("synthetic:27b", typed(*[CMP_100_210] * 3)).plan) == [22, 21, 21]
    cmp_card, v100, t4 = counts(planner("synthetic:27b", typed(CMP_100_210, V100, T4)).plan)
    assert v100 > cmp_card > t4 > 0


def test_head_counts_where_prompts_do_not_care():
    """Of splits whose slowest pass takes equally long, the one with fewer layers beside the head is chosen."""
    first, last = counts(planner("synthetic:9b", typed(V100, V100), n_ctx=64).plan)
    assert first == last == 16
    assert counts(planner("synthetic:27b", typed(*[V100] * 5), n_ctx=64).plan)[-1] == 12


def test_a_card_with_less_memory_has_fewer_layers():
    small = EmulatedCard(1, like=CMP_100_210, memory_bytes=5 << 30)
    first, last = counts(planner("synthetic:9b", [*typed(CMP_100_210), small], n_ctx=131072).plan)
    assert first > last


def test_split_by_hand():
    cards = typed(*[CMP_100_210] * 3)
    assert counts(planner("synthetic:27b", cards, split=(20, 24, 20)).plan) == [20, 24, 20]
    for wrong in (22, 22), (22, 22, 21), (64, 0, 0), (32, 16, 8, 8):
        with pytest.raises(qengine.RequestError, match="must be 3 numbers from 1 on, one per card, with the sum 64"):
            planner("synthetic:27b", cards, split=wrong)


def test_default_is_one_card_where_that_suffices(monkeypatch):
    cards = [EmulatedCard(number, memory_bytes=100 * MB) for number in range(3)]
    monkeypatch.setattr(qengine, "open_cards", lambda name: cards)
    opened = open_model("synthetic:tiny")
    weights = planner("synthetic:tiny", cards[:1]).plan.stages[0].weights
    for memory, used in (100 * MB, 1), (weights, 3):
        for card in cards:
            card.memory_bytes = memory
        assert len(make_planner(opened, None, Demand(4096)).cards) == used
        assert len(make_planner(opened, "cuda", Demand(4096)).cards) == 3
    assert len(make_planner(opened, None, Demand(4096, split=(2, 2))).cards) == 2


# ---- what that takes ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("model, n_cards, options", [
    (str(ROOT / "tests" / "data" / "tiny-Q8_0.gguf"), 1, {}),
    ("synthetic:tiny", 1, {"slots": 5, "ctx": 1000, "chunk": 128}),
    ("synthetic:tiny", 3, {"slots": 2, "draft": "off"}),
    ("synthetic:tiny", 2, {"slots": 3, "chunk": 128, "split": (3, 1)}),
    (str(ROOT / "tests" / "data" / "tiny-Q8_0.gguf"), 2, {"slots": 2}),        # with a draft block on the last card
    ("synthetic:tiny", 1, {"kv_tokens": 20000, "checkpoint_memory": 10 * MB, "ctx": 64}),
    ("synthetic:tiny-moe+mtp", 2, {"slots": 3, "chunk": 128}),
], ids=str)
def test_plan_says_what_is_allocated(model, n_cards, options):
    opened, cards = open_model(model), [EmulatedCard(n, memory_bytes=700 * MB) for n in range(n_cards)]
    demand = options | {"n_ctx": opened.n_ctx(options.get("ctx")), "drafts": most_drafts("auto")}
    demand.pop("ctx", None)
    demand["drafts"] = most_drafts(demand.pop("draft", "auto"))
    plan = make_planner(opened, cards, Demand(**demand)).plan
    assert [card.free_bytes for card in cards] == [700 * MB] * n_cards     # a plan takes nothing
    engine = qengine.load(opened, card=cards, progress=False, **options)
    gc.collect()
    for card, stage, loaded in zip(cards, plan.stages, engine.pipeline.stages):
        assert stage.total == 700 * MB - card.free_bytes
        assert stage.weights <= loaded.weight_bytes <= stage.weights + stage.drafts     # of a draft block, too
        assert stage.kv <= plan.sizes.n_pages * loaded.page_bytes <= stage.kv + stage.drafts
        n_states, state = plan.sizes.n_slots, loaded.state_bytes
        assert stage.layers == loaded.layers and stage.states == n_states * state
        assert stage.checkpoints == plan.sizes.n_checkpoints * state and stage.scratch > 0
    assert engine.stats()["kv_pages"] == plan.sizes.n_pages and engine.chunk == plan.chunk
    engine.close()


class Granular(EmulatedCard):
    """Its memory comes in granules, as that of drivers."""

    granule = 64 << 10


def test_weights_share_an_allocation_as_planned(tmp_path):
    """Those of the eyes, too, on cards whose memory comes in granules: a plan is of what is taken, and the tokens are
    the same."""
    opened, text = open_model("synthetic:tiny"), dict(max_tokens=5, ignore_eos=True)
    options = {"ctx": 1024, "mmproj": write_tower(tmp_path / "eyes.gguf", dataclasses.replace(SMALL, hidden_dim=256))}
    plain, card = EmulatedCard(memory_bytes=700 * MB), Granular(memory_bytes=700 * MB)
    want = qengine.load(opened, card=plain, progress=False, **options)
    stage = make_planner(opened, [card], opened.demand(**options)).plan.stages[0]
    engine = qengine.load(opened, card=card, progress=False, **options)
    gc.collect()
    assert stage.total - card.granule <= 700 * MB - card.free_bytes <= stage.total     # small arrays share granules
    assert 0 <= stage.weights - want.pipeline.last.weight_bytes < card.granule
    stage = engine.pipeline.last
    weights = [matrix.values for layer in stage.model.layers for matrix in qengine.matrices(layer.mixer)]
    weights += [block.qkv.w for block in stage.sight.tower.blocks]
    assert n_allocations(weights) == 1
    assert engine.generate([7] * 100, **text) == want.generate([7] * 100, **text)
    for each in engine, want:
        each.close()


def n_allocations(arrays):
    """How many allocations hold all these arrays, each of which lies in one that it may share."""
    return len({id(array.memory.backing) for array in arrays})


@pytest.mark.parametrize("model, n_cards, options", [
    ("synthetic:tiny", 1, {"kv": "q8+3"}),
    ("synthetic:tiny-moe+mtp", 2, {"draft": 3}),            # with the pages of a draft block on the last card
    ("synthetic:qwen3-tiny-embedding", 2, {}),
], ids=str)
def test_the_cache_of_a_stage_shares_an_allocation_as_planned(model, n_cards, options):
    """Keys, values and states of all layers, on cards whose memory comes in granules: a plan is of what is taken."""
    opened = open_model(model).keeping(options.pop("kv", None))
    cards = [Granular(n, memory_bytes=700 * MB) for n in range(n_cards)]
    plan = make_planner(opened, cards, opened.demand(ctx=1024, **options)).plan
    engine = qengine.load(opened, card=cards, ctx=1024, progress=False, **options)
    gc.collect()
    for card, planned, stage in zip(cards, plan.stages, engine.pipeline.stages):
        assert planned.total - card.granule <= 700 * MB - card.free_bytes <= planned.total
        kept = [array for pages in stage.cache.pages.values() for array in (pages.k, pages.v)]
        assert n_allocations([*kept, *stage.cache.states]) == 1
    engine.close()


@pytest.mark.parametrize("n_cards", [1, 2])
def test_what_is_spared_where_a_context_lacks_memory(n_cards):
    """First the table of token embeddings, unless the card multiplies with it; then a checkpoint. Both are in host
    memory, and no token changes."""
    opened = open_model("synthetic:tiny")
    cards = [EmulatedCard(n, memory_bytes=700 * MB) for n in range(n_cards)]
    options = {"ctx": 2048, "kv_tokens": 2048, "checkpoint_memory": 0, "draft": "off"}
    full = make_planner(opened, cards, opened.demand(**options)).plan
    state, table = full.on_paper[0].state_bytes, full.on_paper[0].table_bytes
    assert state and bool(table) == (n_cards == 2) and not sum(each.state_bytes for each in full.on_paper[1:])

    def lacking(n):
        return [EmulatedCard(number, memory_bytes=stage.total - (0 if number else n))
                for number, stage in enumerate(full.stages)]

    texts, answers = [[7 + n] * 200 for n in range(2)], []
    for n, n_checkpoints in (0, 2), (table, 2), (table + 256, 1), (table + state, 1):
        plan = make_planner(opened, lacking(n), opened.demand(**options)).plan
        assert plan.fits and plan.layers == full.layers and plan.sizes.n_checkpoints == n_checkpoints
        assert plan.demand.table_on_host == (n > 0) and len(plan.spared) == (n and table > 0) + (n_checkpoints == 1)
        cards = lacking(n)
        engine = qengine.load(opened, card=cards, progress=False, **options)
        gc.collect()
        assert cards[0].free_bytes == plan.stages[0].free - plan.stages[0].total
        answers += [[engine.generate(text, max_tokens=30, ignore_eos=True) for text in texts] for _ in range(2)]
        assert engine.stats()["cache_hits"] == 2 and engine.scheduler.cache.n_checkpoints == n_checkpoints
        engine.close()
    assert all(answer == answers[0] for answer in answers)
    plan = make_planner(opened, lacking(table + state + 256), opened.demand(**options)).plan
    assert plan.stages[0].total - plan.stages[0].free == 256        # what is missing though all is spared


def test_drafts_of_a_model_whose_token_embeddings_are_in_host_memory():
    """Its draft block reads them, too."""
    opened, found = open_model(oracle_path("gguf/dense_mtp-Q8_0.gguf")), []
    options = {"ctx": 512, "kv_tokens": 512, "checkpoint_memory": 0, "draft": 2}
    full = make_planner(opened, [EmulatedCard(memory_bytes=700 * MB)], opened.demand(**options)).plan.stages[0].total
    for memory, kind in (full, Memory), (full - 256, Lent):
        engine = qengine.load(opened, card=EmulatedCard(memory_bytes=memory), progress=False, **options)
        model = engine.pipeline.last.model
        assert model.block and type(model.embeddings.values.memory) is type(model.embeddings.scales.memory) is kind
        found.append(engine.generate([5, 300, 77] * 40, max_tokens=60, ignore_eos=True))
        assert sum(engine.stats()["drafts_checked"]) > 0
        engine.close()
    assert found[0] == found[1]


def test_host_memory_that_cannot_be_page_locked_for_token_embeddings(monkeypatch):
    """Is told in a sentence."""
    opened = open_model("synthetic:tiny")
    cards = [EmulatedCard(n, memory_bytes=700 * MB) for n in range(2)]
    options = {"ctx": 2048, "kv_tokens": 2048, "checkpoint_memory": 0, "draft": "off"}
    stages = make_planner(opened, cards, opened.demand(**options)).plan.stages
    cards = [EmulatedCard(n, memory_bytes=stage.total - (256 if not n else 0)) for n, stage in enumerate(stages)]
    monkeypatch.setattr(expert_store, "page_locked", lambda card, n: (np.empty(n, np.uint8), "out of memory"))
    with pytest.raises(CardError, match=r"lacks memory for token_embd.weight, .* cannot be page-locked .*\(--ctx\)"):
        qengine.load(opened, card=cards, progress=False, **options)


def test_what_drafts_take():
    """The column holds all of it: the others are as without drafts."""
    options = {"kv_tokens": 8192, "checkpoint_memory": 500 * MB, "slots": 32, "chunk": 512}
    plain, few, many = (planner("synthetic:9b", typed(H100, H100), drafts=n, **options).plan for n in (0, 1, 7))
    for stages in zip(plain.stages, few.stages, many.stages):
        without, *drafted = stages
        assert without.drafts == 0
        for stage in drafted:
            assert stage.drafts == stage.total - without.total
            names = "weights", "kv", "states", "checkpoints", "scratch"
            assert [getattr(stage, name) for name in names] == [getattr(without, name) for name in names]
    assert many.stages[1].drafts >= few.stages[1].drafts > 0     # the last card has the rows of logits
    assert "drafts" in many.table().splitlines()[0]


def test_longest_context_is_the_longest():
    plans = planner("synthetic:9b", [EmulatedCard(like=CMP_100_210, memory_bytes=12 << 30)])
    longest = plans.longest_context()
    assert plans.planned(n_ctx=longest).fits and not plans.planned(n_ctx=longest + 64).fits
    assert planner("synthetic:tiny", typed(CMP_100_210)).longest_context() == 262144
    assert planner("synthetic:tiny", typed(CMP_100_210), kv_tokens=5000).longest_context() == 4992


@pytest.mark.parametrize("memory", [100 << 20, 160 << 20])
def test_the_longest_context_of_a_model_that_sees_is_one_that_loads(memory):
    """The longer a context, the more tokens may a picture have, and the more memory do its eyes take."""
    opened = qengine.open_model(qengine.DEFAULT_MODEL)
    planner = lambda **wishes: qengine.make_planner(opened, [EmulatedCard(memory_bytes=memory)],
                                                    opened.demand(**wishes))
    longest = planner().longest_context()
    assert planner(ctx=longest).plan.fits and not planner(ctx=longest + 64).plan.fits


@pytest.mark.parametrize("model, gigabytes, demand", [("synthetic:27b:q6_k", (15.5, 15.5), {}),
                                                      ("synthetic:9b", (7, 5.5, 2.6), {"slots": 4}),
                                                      ("synthetic:35b-a3b:q4_k", (15.5,), {"expert_memory": 13 << 30})])
def test_no_plan_fits_a_longer_context(model, gigabytes, demand):
    """Cards that spare what they can may split the layers otherwise."""
    cards = [EmulatedCard(n, like=CMP_100_210, memory_bytes=int(gb * 2**30)) for n, gb in enumerate(gigabytes)]
    longest = planner(model, cards, **demand).longest_context()
    assert [planner(model, cards, **demand | {"n_ctx": longest + more}).plan.fits for more in (0, 64)] == [True, False]
    with pytest.raises(OutOfMemory, match=f"--ctx {longest}( or|$)"):
        planner(model, cards, **demand | {"n_ctx": longest + 64}).check()


def test_cards_keep_two_checkpoints_as_the_help_says():
    sizes = planner("synthetic:tiny", typed(CMP_100_210), checkpoint_memory=0).plan.sizes
    assert sizes.n_checkpoints == LEAST_CHECKPOINTS == 2
    assert "a card keeps two at least" in " ".join(build_parser().format_help().split())


def test_room_for_kept_tokens_is_not_made_for_slots():
    """If --kv-tokens says how many tokens are to be kept, the placement counts only these."""
    small = [EmulatedCard(number, like=CMP_100_210, memory_bytes=int(gb * 2**30))
             for number, gb in enumerate((7, 5.5, 2.52))]
    assert planner("synthetic:9b", small, n_ctx=20000, kv_tokens=40000).plan.fits


def test_a_shorter_context_fits_where_a_longer_one_does(monkeypatch):
    """Though what is lost to the pages of drivers, of 2 MB, depends on the split."""
    monkeypatch.setattr(Granular, "granule", 2 << 20)
    tight = [Granular(number, like=like, memory_bytes=n_bytes) for number, (like, n_bytes) in enumerate(
        ((CMP_100_210, 619_338_825), (H100, 423_736_128), (H100, 594_574_122)))]
    plans = planner("synthetic:0.8b", tight)
    lengths = 17_408, 17_472, 17_536, 17_664, 18_880, 18_944
    assert [plans.planned(n_ctx=n).fits for n in lengths] == [True] * 5 + [False]
    assert plans.longest_context() == 37_056        # with another split and one checkpoint
    assert planner("synthetic:0.8b", tight, n_ctx=37_056).plan.fits


def test_what_would_make_it_fit_does_and_no_less():
    card = EmulatedCard(like=CMP_100_210, memory_bytes=22 << 29)
    plans = planner("synthetic:9b", [card], n_ctx=32768, slots=32)
    assert not plans.plan.fits
    slots, ctx, kv, more, smaller = plans.changes()
    assert kv == "--kv q8"
    n = int(slots.removeprefix("--slots "))
    assert plans.planned(slots=n).fits and not plans.planned(slots=n + 1).fits
    n = int(ctx.removeprefix("--ctx "))
    assert plans.planned(n_ctx=n).fits and not plans.planned(n_ctx=n + 64).fits
    assert more == "1 more card like emulated card 0"
    assert planner("synthetic:9b", [card, card], n_ctx=32768, slots=32).plan.fits
    name = smaller.removeprefix("a file in ").lower()
    assert planner(f"synthetic:9b:{name}", [card], n_ctx=32768, slots=32).plan.fits
    with pytest.raises(OutOfMemory, match=rf"too much\nit would with {slots} or {ctx} or {kv} or {more} or {smaller}$"):
        plans.check()


def test_fewer_bits_and_no_eyes_are_proposed_and_contexts_of_no_use_are_not():
    def changes(gigabytes, kv="float16", **asked):
        opened, card = open_model("synthetic:0.8b").keeping(kv), typed(CMP_100_210, memory_bytes=int(gigabytes * 2**30))
        return make_planner(opened, card, opened.demand(**asked)).changes()

    more = "1 more card like emulated card 0"
    assert changes(1.2, ctx=32768) == ["--ctx 28480", "--kv q8", more, "a file in Q6_K"]
    assert changes(1.2, "q8+3", ctx=131072) == ["--ctx 73152", "--kv q3", more, "a file in Q5_0"]
    assert changes(1.2, mmproj="synthetic") == ["--mmproj none", more]
    assert changes(0.89)[:2] == ["--ctx 1344", more] and changes(0.88)[0] == more       # there, 512 tokens would fit
    embedding, card = open_model("synthetic:qwen3-0.6b-embedding"), typed(CMP_100_210, memory_bytes=512 * MB)
    assert not any("--kv" in change for change in make_planner(embedding, card, embedding.demand()).changes())


def test_options_that_ask_for_too_much_are_named():
    card = EmulatedCard(memory_bytes=64 * MB)
    assert "no --checkpoint-memory" in planner("synthetic:tiny", [card], n_ctx=64, checkpoint_memory=60 * MB).changes()
    assert "no --kv-tokens" in planner("synthetic:tiny", [card], n_ctx=64, kv_tokens=2 ** 20).changes()


def test_report_for_people():
    text = planner("synthetic:27b", open_cards("emulated:cmp-100-210,cmp-100-210,cmp-100-210"), n_ctx=18432).report()
    assert "0 - 21" in text and "43 - 63" in text and "the longest that fits has 262,144" in text
    assert "a hop: 10.0 MB for a pass of 512 tokens, 20.0 KB for one token, over links of 0.25, 0.25, 0.25 GB/s" in text
    assert "hop" not in planner("synthetic:tiny", open_cards("emulated")).report()


def test_a_plan_estimates_speeds():
    """One answer at a context of 18,432 reads 27 GB of weights and 1.2 GB of keys and values, at 75 % of 818 GB/s."""
    plans = planner("synthetic:27b", open_cards("emulated:cmp-100-210,cmp-100-210,cmp-100-210"), n_ctx=18432)
    prompt, answer = re.search(r"^ESTIMATE.* at ([\d,]+) tokens/s, one answer behind it at ([\d,]+)$", plans.report(),
                               re.M).groups()
    assert int(prompt.replace(",", "")) == round(18432 / plans.prompt_schedule(18432).seconds)
    assert 19 < int(answer) < 23


def test_an_estimate_says_that_it_counts_keys_that_are_left_out():
    for sparse in "off", "ask", "on":
        line = planner("synthetic:tiny", typed(CMP_100_210), sparse=sparse).speed_line()
        assert line.endswith(" (counted with all keys, though --sparse leaves some out)") == (sparse == "on")


def test_a_plan_estimates_the_speed_of_a_mixture():
    """Its decode steps reach less of a card's bandwidth: the share that they reached on an H100."""
    assert plan.MIXTURE_SHARE == round(figures.figure("mixture", "Q4_K", "decode at 297", 2) / 100, 2)
    plans = planner("synthetic:35b-a3b:q4_k", open_cards("emulated:cmp-100-210,cmp-100-210"), n_ctx=4096)
    cards, hops = plans.step_seconds(4096)
    answer = 1 / (cards * plan.PEAK_SHARE / plan.MIXTURE_SHARE + hops)
    assert 100 < answer < 200
    assert f", one answer behind it at {answer:,.0f} (at 42%: it reads experts)" in plans.report()


def test_a_plan_says_what_experts_that_are_not_on_the_cards_cost_a_prompt():
    """Shares of time do not assume that these experts are on the cards. A pass copies all that have no slot: of 256
    experts in each of 40 layers those beyond the slots, of three matrices of 2,048 x 512 in 4.5 bits each."""
    plans = planner("synthetic:35b-a3b:q4_k", open_cards("emulated:cmp-100-210"), memory=int(15.5 * 2**30))
    text = plans.report()
    slots = int(re.search(r"(\d+) experts of each layer lie on the card", text)[1])
    missing = (256 - slots) * 40 * 3 * 2048 * 512 * 4.5 / 8
    found = re.search(r"^a pass of 512 tokens of a prompt needs ([\d.]+) GB of experts that are not on the cards: "
                      r"([\d.]+) s over their links(.*); a prompt of 4,096 tokens takes 8 such passes$", text, re.M)
    assert float(found[1]) == pytest.approx(missing / 2**30, rel=0.05)
    assert float(found[2]) == pytest.approx(missing / 0.25e9, rel=0.05)
    assert "ESTIMATE" not in text
    two = planner("synthetic:35b-a3b:q4_k", open_cards("emulated:cmp-100-210,cmp-100-210"), memory=8 << 30).report()
    assert "a pass of 512 tokens" in two and "a hop: " in two and "share" not in two


@pytest.mark.parametrize("cards, is_told", [("emulated", True), ("emulated:2", True), ("emulated:t4", False)])
def test_a_plan_names_the_card_that_an_emulated_one_of_no_type_counts_as(cards, is_told):
    text = planner("synthetic:tiny", open_cards(cards)).report()
    assert "ESTIMATE" in text and ("(emulated cards of no type count as CMP 100-210)" in text) == is_told


def test_contexts_that_do_not_all_fit_at_once_are_told(capsys):
    """By the plan and at the start."""
    said = "pages for 1,024 (not all 4 at full length at once: the others wait); the longest"
    for kv_tokens, is_told in (1024, True), (4096, False):
        text = planner("synthetic:tiny", open_cards("emulated"), n_ctx=1024, slots=4, kv_tokens=kv_tokens).report()
        assert (said in text) == ("at full length" in text) == is_told
    qengine.load("synthetic:tiny", card="emulated", ctx=1024, slots=4, kv_tokens=1024).close()
    assert "context in all (not all 4 at full length at once: the others wait), " in capsys.readouterr().err


def test_a_search_finds_the_most():
    for low, high, limit in itertools.product((0, 1), (0, 5, 63), range(-1, 66)):
        tried = []
        found = most(low, high, lambda n: tried.append(n) or n <= limit)
        assert found == max((n for n in range(low, high + 1) if n <= limit), default=None)
        assert len(tried) == len(set(tried)) and all(low <= n <= high for n in tried)


@pytest.mark.parametrize("model, memory, n_kinds", [
    ("synthetic:27b+mtp:q4_k", None, 2), ("synthetic:35b-a3b:q4_k", 8 << 30, 2),
    (oracle_path("gguf/dense_kq-Q4_K_M.gguf"), None, None)], ids=str)
def test_blocks_that_are_alike_are_planned_once(monkeypatch, model, memory, n_kinds):
    """They take as much as if each were planned by itself, of the host, too."""
    opened, found = open_model(model), []
    for block in PaperLoader.block, Loader.block:
        monkeypatch.setattr(PaperLoader, "block", block)
        stage = PlannedModel(opened.config, opened.weights).stage(
            PlannedCard(EmulatedCard()), range(opened.config.n_layers), Demand(4096, drafts=1, expert_memory=memory,
                                                                            split=(opened.config.n_layers,)), None)
        stores = [(store.host_bytes, store.host.free_bytes, store.missing_bytes, len(store.layers))
                  for store in [stage.store] if store]
        n_objects = len({id(layer) for layer in stage.model.layers})
        found.append((stage.weight_bytes, stage.costs.work, stage.layer_works, stage.card.free_bytes, stores))
        assert n_objects == opened.config.n_layers if block is Loader.block else n_objects < opened.config.n_layers
        assert block is Loader.block or n_kinds in (None, n_objects)
    assert found[0] == found[1] and bool(found[0][-1]) == (memory is not None)


def test_slots_of_experts_are_counted_once_for_all_plans():
    """A plan asks for them of every layer of every card."""
    opened, asked = open_model("synthetic:tiny-moe"), []
    weights = Weights(opened.weights.shapes, lambda name: asked.append(name) or opened.weights.type_of(name))
    whole = expert_store.slot_bytes(weights, range(opened.config.n_layers))
    assert whole == sum(expert_store.slot_bytes(weights, range(i, i + 1)) for i in range(opened.config.n_layers)) > 0
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("memory, units", [(1 << 30, ["format"]), (1 << 20, ["card", "format"])])
def test_a_long_plan_shows_on_a_terminal_how_far_it_is(monkeypatch, memory, units):
    """Also one of a model that does not fit."""
    for is_terminal in False, True:
        screen = io.StringIO()
        monkeypatch.setattr(screen, "isatty", lambda: is_terminal)
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setattr(plan, "BAR_DELAY", 0)
        plans = planner("synthetic:tiny", typed(CMP_100_210), memory=memory)
        plans.report() if plans.plan.fits else plans.changes()
        for text in ["planning synthetic:tiny", *(f"{unit}/s" for unit in units)]:
            assert (text in screen.getvalue()) == is_terminal


def test_a_context_that_the_model_was_not_made_for_is_told():
    card = open_cards("emulated:cmp-100-210")
    assert "(the model was made for 262,144)" in planner("synthetic:tiny", card, n_ctx=300_000).report()
    assert "was made for" not in planner("synthetic:tiny", card, n_ctx=262_144).report()


# ---- how passes flow ---------------------------------------------------------------------------------------

def flow(n_stages, n_passes, seconds=1.0, hop=(0.0, 0.0)):
    return schedule([[seconds] * n_passes] * n_stages, [[hop] * n_passes] * (n_stages - 1))


def test_passes_flow_through_equal_stages():
    assert flow(1, 5).seconds == 5 and flow(1, 5).busy == [1.0]
    assert flow(3, 10).seconds == 12 and flow(3, 10).busy == pytest.approx([10 / 12] * 3)
    assert flow(3, 10, hop=(0.25, 0.25)).seconds == pytest.approx(13)       # hidden but for the first two
    assert flow(2, 10, hop=(3.0, 0.5)).seconds == pytest.approx(1 + 10 * 3.0 + 0.5 + 1)     # the link decides


def test_no_pass_begins_before_it_can():
    rng = random.Random(2)
    for _ in range(100):
        n_stages, n_passes = rng.randint(1, 4), rng.randint(1, 12)
        depth = 2 * n_stages
        passes = [[rng.random() for _ in range(n_passes)] for _ in range(n_stages)]
        hops = [[(rng.random(), rng.random()) for _ in range(n_passes)] for _ in range(n_stages - 1)]
        found = schedule(passes, hops)
        for stage, i in itertools.product(range(n_stages), range(n_passes)):
            start, end = found.spans[stage][i]
            assert end == pytest.approx(start + passes[stage][i])
            if i:
                assert start >= found.spans[stage][i - 1][1]
            if stage:
                assert start >= found.spans[stage - 1][i][1] + sum(hops[stage - 1][i]) - 1e-9
            if i >= depth:
                assert found.spans[0][i][0] >= found.spans[-1][i - depth][1]
        # `sum` rounds once from Python 3.12 on, a schedule at each pass.
        assert found.seconds >= max(functools.reduce(operator.add, stage) for stage in passes)
        assert found.seconds >= schedule(passes, [[(0.0, 0.0)] * n_passes] * (n_stages - 1)).seconds - 1e-9


# ---- what layers say of themselves -----------------------------------------------------------------------------


def work_of_layers(model, layers):
    """The Work that the layers of a model say they are, on paper."""
    opened = open_model(model)
    paper, card = PlannedModel(opened.config, opened.weights), PlannedCard(EmulatedCard())
    return sum((paper.layer(card, index) for index in layers), Work())


def test_layers_say_what_they_compute_and_keep():
    """Half of a 27B: 24 layers of DeltaNet (16 key heads, 48 value heads) and 8 of attention (24 heads, 4 of keys)."""
    work = work_of_layers("synthetic:27b", range(32))
    numbers = costs_of_27b().work
    assert (work.n_layers, work.products, work.row_operations, work.context_operations) == (
        32, numbers.products, numbers.row_operations + 0, 8 * 4 * 24 * 256)
    assert work.page_bytes == 8 * 2 * 64 * 4 * 256 * 2                                  # keys and values, float16
    assert work.state_bytes == 24 * 4 * (4 * (2 * 16 + 48) * 128 + 48 * 128 * 128)      # float32


def test_layers_of_a_9b_say_what_they_compute_and_keep():
    hidden, ffn = 4096, 12_288
    weights = 24 * (8192 + 4096 + 64 + 4096) + 8 * (8192 + 2 * 1024 + 4096) + 32 * 3 * ffn     # times hidden
    work = work_of_layers("synthetic:9b", range(32))
    assert (work.n_layers, work.row_operations, work.page_bytes, work.state_bytes) == (
        32, 2 * weights * hidden, 8 * 64 * 4 * 256 * 2 * 2, 53_477_376)


@pytest.mark.parametrize("layers", [range(4), range(1, 3), range(2, 4)], ids=str)
def test_the_chunk_of_a_stage_leaves_room_for_a_context_and_all_slots(layers, monkeypatch):
    """Weights, 64 pages and the states of 3 slots and 2 checkpoints come first; an eighth of the rest is for passes."""
    class Real(EmulatedCard):
        kind = "cuda"

    def stage(memory):
        opened = open_model("synthetic:tiny")
        card = PlannedCard(Real(memory_bytes=memory))
        return PlannedModel(opened.config, opened.weights).stage(card, layers, Demand(4096, slots=3), None)

    monkeypatch.setattr(probe, "dot_speed", lambda card: 1e18)
    large = stage(8 << 30)
    hops = (layers.start > 0) + (layers.stop < 4)
    row = large.model.row_bytes() + 2 * 4 * 256 * hops          # two buffers of each hop, float32
    memory = large.weight_bytes + 64 * large.page_bytes + 5 * large.state_bytes + 8 * 896 * row
    assert large.chunk == 4096 and stage(memory).chunk == 896 and stage(memory - 256).chunk == 832


# ---- a bound on what is taken ------------------------------------------------------------------------------

def test_memory_of_a_closed_engine_is_free_for_the_next_one():
    """Though parts of an engine know each other, so Python frees them only when it looks for such circles."""
    card = EmulatedCard(memory_bytes=60 * MB)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            engine = qengine.load("synthetic:tiny", card=card.twin(), progress=False, ctx=1024)
            taken = card.memory_bytes - card.free_bytes
            engine.close()
            del engine
            assert card.memory_bytes - card.free_bytes == taken > card.memory_bytes / 3
    finally:
        gc.enable()


def test_engines_take_no_more_than_they_may():
    card = EmulatedCard(memory_bytes=700 * MB)
    free = qengine.load("synthetic:tiny", card=card.twin(), progress=False, ctx=1024)
    usual = card.memory_bytes - card.free_bytes
    free.close()
    del free
    gc.collect()
    assert card.free_bytes == 700 * MB
    bounded = qengine.load("synthetic:tiny", card=card, progress=False, ctx=1024, memory=40 * MB)
    gc.collect()
    assert bounded.generate([1] * 700, max_tokens=3, ignore_eos=True)
    assert 0 < 40 * MB - card.free_bytes <= 40 * MB < usual     # fewer pages and checkpoints
    assert card.twin().free_bytes == card.free_bytes            # what engines take together counts
    with pytest.raises(OutOfMemory, match=r"needs 40.0 MB, but .* MB of 40.0 MB are free on emulated card 0"):
        card.twin().alloc(40 * MB, "int8", "too much")
    with pytest.raises(OutOfMemory, match="does not fit"):
        qengine.load("synthetic:tiny", card=card.twin(), progress=False, ctx=1024)      # the limit stays
    bounded.close()


def test_a_plan_within_a_bound():
    bounded = planner("synthetic:9b", typed(H100), memory=16 << 30)
    assert bounded.longest_context() == planner("synthetic:9b", typed(CMP_100_210)).longest_context()
    assert bounded.plan.stages[0].total <= bounded.plan.stages[0].free == 16 << 30
    assert planner("synthetic:9b", typed(H100), memory=200 << 30).plan.stages[0].free == H100.memory  # there is no more


@pytest.mark.parametrize("gigabytes, n_ctx", [(8, 4096), (12, 262144), (0, 64)])
def test_what_would_do_is_said_and_does(gigabytes, n_ctx):
    plans = planner("synthetic:9b", typed(H100), n_ctx=n_ctx, memory=gigabytes << 30)
    wish = next(change for change in plans.changes() if change.startswith("--memory "))
    more = float(wish.removeprefix("--memory "))
    assert planner("synthetic:9b", typed(H100), n_ctx=n_ctx, memory=int(more * 2**30)).plan.fits
    assert not planner("synthetic:9b", typed(H100), n_ctx=n_ctx, memory=int((more - 0.2) * 2**30)).plan.fits
    with pytest.raises(OutOfMemory, match=rf"does not fit:\n(.|\n)*too much\nit would with (.|\n)*{wish}"):
        plans.check()


def test_memory_that_the_card_lacks_is_not_proposed():
    changes = planner("synthetic:27b", typed(CMP_100_210), n_ctx=4096, memory=16 << 30).changes()
    assert changes and not any(change.startswith("--memory") for change in changes)
    with pytest.raises(qengine.RequestError, match="memory must be 0 or more, not -1"):
        planner("synthetic:tiny", typed(H100), memory=-1)
