"""Whole models with keys and values in few bits: how far logits move, and that nothing else moves bits."""

import collections
import gc

import numpy as np
import pytest

import qengine
from benchmarks.figures import figure
from cli.perplexity import measure_perplexity
from engine.plan import Demand
from engine.request import RequestError
from kernels.card import PlannedCard
from kernels.emulated.card import EmulatedCard
from kernels.kv_formats import KV_FORMATS
from kernels.open import open_cards
from qengine import PlannedModel
from tests.kinds import KV_BY_KIND
from tests.models import TINY

# KL divergence from float16 of the shipped model, mean over a text, in nats: (at least, at most). Products with 8-bit
# activations alone make 0.002 of any change. Each model has its own: that of 2026-11-29 has 0.023 on TEXT in q8+3.
DIVERGENCE = {"q8": (0, 0.005), "q8+4": (0, 0.02), "q8+3": (0.005, 0.03), "q4": (0.005, 0.02), "q3": (0.01, 0.04)}
TEXT = """The emulated card executes the same kernels as a real one. It counts what each pipe did, and it tells how long
a kernel would take on a card that few people have. Attention reads every key once. Its scores are sums of products in
half precision, and its statistics are kept in single precision, so that an answer does not depend on the length of the
text before it. A page holds the keys and values of 64 tokens. """
pytestmark = pytest.mark.usefixtures("compiled_when_launched")
PROMPT = [5, 300, 77, 1024, 9, 2048, 31, 600, 12, 3000, 44] * 15


@pytest.mark.parametrize("name", KV_BY_KIND)
def test_logits_stay_near_those_of_float16(card, name):
    exact, coarse = (qengine.load(card=card, ctx=512, draft="off", progress=False, kv=kv) for kv in ("float16", name))
    found = measure_perplexity(coarse, coarse.tokenizer.encode(TEXT * 2), exact)
    for engine in exact, coarse:
        engine.close()
    least, most = DIVERGENCE[name]
    assert least <= np.mean(found.divergences) <= most


def said(card, kv, times=1, **options):
    """(logits of PROMPT, tokens after it, `times` times)."""
    engine = qengine.load(TINY, card=card, progress=False, kv=kv, **{"ctx": 512, "chunk": 256} | options)
    tokens = [[delta.token_id for delta in engine.submit(qengine.Request(PROMPT, max_tokens=12, ignore_eos=True))]
              for _ in range(times)]
    logits = engine.evaluate(PROMPT)
    engine.close()
    assert all(each == tokens[0] for each in tokens)
    return np.asarray(logits).view(np.uint32), tokens[0]


@pytest.mark.parametrize("name", KV_BY_KIND)
def test_neither_chunks_nor_cached_prefixes_nor_drafts_nor_cards_change_bits(name):
    one = lambda: open_cards("emulated")[0]
    logits, tokens = said(one(), name)
    for cards, times, options in ((one(), 2, {"chunk": 64}), (one(), 1, {"draft": 3, "slots": 2}),
                                  ([EmulatedCard(0), EmulatedCard(1)], 1, {"split": (1, 2), "ctx": 40_000})):
        again = said(cards, name, times, **options)
        np.testing.assert_array_equal(again[0], logits)
        assert again[1] == tokens
    assert (logits != said(one(), "float16")[0]).any()


def test_pieces_behind_the_last_key_are_not_launched():
    """A prompt of three pages in a context of three pieces; then rows of which the host does not know the places."""
    card = open_cards("emulated")[0]
    engine = qengine.load(TINY, card=card, progress=False, kv="q8+3", ctx=40_000, chunk=64, draft="off")
    stage, ids = engine.pipeline.last, PROMPT[:150]
    layers, passes = len(stage.cache.pages), 3
    with card.counting() as log:
        engine.submit(qengine.Request(ids, max_tokens=1)).wait()
    assert [one.kernel for one in log].count("expand_kv") == layers * passes
    engine.pipeline.settle()
    qengine.set_rows(stage.inputs, ids[:64], [0] * 64, range(64))
    with card.counting() as log:
        stage.launch_prompt(64)
    assert [one.kernel for one in log].count("expand_kv") == layers * 3
    engine.close()


@pytest.mark.parametrize("ctx, n_pages", [(200, 4), (40_000, 256)])
def test_a_piece_has_no_more_pages_than_a_context(ctx, n_pages):
    """And a plan counts its halves as they are taken."""
    opened, card = qengine.open_model(TINY).keeping("q8+3"), EmulatedCard(memory_bytes=700 << 20)
    plan = qengine.make_planner(opened, [card], opened.demand(ctx=ctx)).plan
    engine = qengine.load(opened, card=card, ctx=ctx, progress=False)
    gc.collect()
    assert engine.pipeline.last.model.piece.n_pages == n_pages
    assert plan.stages[0].total == card.memory_bytes - card.free_bytes
    engine.close()


@pytest.mark.parametrize("model, kv, gigabytes", [("9b", "float16", 8.6), ("9b", "q8+3", 3.3), ("27b", "q8+3", 6.6),
                                                  ("27b", "q3", 3.6)])
def test_pages_of_262_144_tokens(model, kv, gigabytes):
    """As a plan counts them."""
    opened = qengine.open_model(f"synthetic:{model}").keeping(kv)
    layers = range(opened.config.n_layers)
    stage = PlannedModel(opened.config, opened.weights).stage(PlannedCard(EmulatedCard()), layers, Demand(262144), None)
    assert 0.8 * gigabytes * 1e9 < 4096 * stage.page_bytes <= gigabytes * 1e9


def driver_card(gb=16):
    """A card of so many GB, whose driver gives memory in pages of 2 MiB."""
    card = EmulatedCard(memory_bytes=int(gb * 2**30))
    card.granule = 2 << 20
    return card


def longest_context(model, kv, card, **options):
    opened = qengine.open_model(f"synthetic:{model}").keeping(kv)
    return qengine.make_planner(opened, [card], opened.demand(ctx=1024, **options)).longest_context()


@pytest.mark.parametrize("gb, formats", [(16, KV_FORMATS), (15.5, ("float16", "q8+3", "q3")),
                                         (15, ("float16", "q8+3", "q3"))])
def test_contexts_that_fit(gb, formats):
    """As benchmarks/results.md has them."""
    for kv in formats:
        assert longest_context("27b:q4_k", kv, driver_card(gb)) == figure("kv-fits", f"{gb} GB", kv), kv


def test_all_of_a_context_of_a_9b_fits_into_16_gb():
    assert longest_context("9b", "q8+3", driver_card()) == 262_144


PICTURES = {"any picture": None, "64 to 2,048 tokens": (64, 2048), "64 to 1,024 tokens": (64, 1024)}


@pytest.mark.parametrize("pictures", PICTURES)
def test_contexts_and_eyes_that_fit_into_16_gb(pictures):
    """As benchmarks/results.md has them; and what the eyes take, with the longest context in q8+3."""
    card, options = driver_card(), {"mmproj": "synthetic", "image_tokens": PICTURES[pictures]}
    for kv in "float16", "q8+3", "q3":
        assert longest_context("27b:q4_k", kv, card, **options) == figure("kv-fits-eyes", pictures, kv)
    opened = qengine.open_model("synthetic:27b:q4_k")
    n_ctx, paper, taken = int(figure("kv-fits-eyes", pictures, "q8+3")), PlannedCard(card), collections.Counter()
    sight = opened.demand(ctx=1024, **options).eyes.load(paper, opened.config.hidden_dim, n_ctx)
    sight.allocate(paper, chunk=512)
    for n_bytes, name in paper.allocations.values():
        taken["weights" if name.startswith(("v.", "mm.")) else "rows" if "rows" in name else "work"] += n_bytes / 2**20
    assert {kind: round(n) for kind, n in taken.items()} == {
        "weights": figure("kv-eyes", "weights", pictures), "work": figure("kv-eyes", "the largest picture", pictures),
        "rows": figure("kv-eyes", "rows of pictures", pictures)}


def test_a_plan_says_what_fits_in_each_format():
    """On two cards, of which the second is the smaller. A context is longer where tokens take fewer bytes, as long as
    the model was made for no longer one."""
    cards = [EmulatedCard(0, memory_bytes=7 << 30), EmulatedCard(1, memory_bytes=6 << 30)]
    opened, found = qengine.open_model("synthetic:9b"), {}
    planner = qengine.make_planner(opened, cards, opened.demand(ctx=1024, checkpoint_memory=0))
    lines = planner.report().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("--kv"))
    for line in lines[begin + 1:begin + 1 + len(KV_FORMATS)]:
        name, first, _, second, longest = line.replace(",", "").split()
        assert int(first) + int(second) == KV_FORMATS[name].token_bytes(4, 256) * 8
        found[name] = int(longest)
    assert list(found) == list(KV_FORMATS)
    assert sorted(found.values()) == list(found.values()) and found["float16"] < found["q8"] < found["q3"]
    kept = opened.keeping("q8+3")
    alone = qengine.make_planner(kept, cards, kept.demand(ctx=1024, checkpoint_memory=0))
    assert alone.longest_context() == found["q8+3"]


def test_experts_that_leave_the_card_make_room_in_each_format():
    """Each format is planned with as many experts on the card as it leaves room for."""
    def planner(kv):
        opened = qengine.open_model("synthetic:35b-a3b").keeping(kv)
        return qengine.make_planner(opened, [EmulatedCard(0, memory_bytes=4 << 30)],
                                    opened.demand(ctx=1024, checkpoint_memory=0))

    lines = planner("float16").report().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("--kv")) + 1
    rows = dict(line.split()[::2] for line in lines[begin:begin + len(KV_FORMATS)])
    found = {name: int(longest.replace(",", "")) for name, longest in rows.items()}
    assert list(found) == list(KV_FORMATS) and sorted(found.values()) == list(found.values())
    for name in "float16", "q3":
        alone = planner(name)
        assert alone.moves_experts and alone.longest_context() == found[name]
        assert alone.planned(n_ctx=found[name], expert_memory=0).fits
    assert found["float16"] < found["q3"]


def test_an_unknown_format_is_refused():
    with pytest.raises(RequestError, match="no KV format q5"):
        qengine.load(TINY, kv="q5")


def test_a_model_that_packs_texts_keeps_halves():
    opened = qengine.open_model("synthetic:qwen3-tiny-embedding")
    assert opened.keeping("float16").config == opened.config
    with pytest.raises(RequestError, match="embeddings"):
        opened.keeping("q8")
