"""Mixtures of experts: the whole model against two independent implementations, a layer against NumPy in float64, and
the same bits whatever the chunk, the batch, the cards and the drafts are."""

import contextlib
import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest

import qengine
from cli import bench as engine_bench
from cli.bench import Bench
from engine.details import parameters
from engine.micro_batches import Alone
from engine.plan import Demand, LayerCosts, StageCosts
from kernels import q8_gemv
from kernels.emulated.card import EmulatedCard
from kernels.norm import rms_norm_reference
from kernels.quantize import quantize_reference
from kernels.route import route_reference
from kernels.swiglu import swiglu_reference
from tests import test_across_cards, test_micro_batches
from tests.costs import SPEED
from tests.models import EXPERTS, USED, expert_tensors, write_experts
from tests.oracle import oracle_json
from tests.test_model import decode_logits, distance, reference_fixtures

pytestmark = pytest.mark.usefixtures("compiled_when_launched")
MODEL = "moe_mtp-Q8_0"
PROMPTS = ["short", "long"]
# Of a gap between two logits of a router in float32: after the attention layer, which works in half precision, the
# residual stream is 2e-4 off.
FLOAT_NOISE = 1e-3


# ---- the reference -----------------------------------------------------------------------------------------

reference, engine, float_engine = reference_fixtures(MODEL)


def run(engine, ids):
    """(hidden states [layers + 1, T, hidden], experts [layers, T, n_used] in ascending order, logits [T, vocabulary])
    of a text."""
    states, chosen, scratch = {}, {}, engine.pipeline.last.model.scratch

    def tap(name, x):
        states.setdefault(name, []).append(x.card.download(x))
        if name != "embedding":
            chosen.setdefault(name, []).append(x.card.download(scratch.chosen))

    def whole(found):
        return np.stack([np.concatenate([part[:n] for part, n in zip(parts, lengths)]) for parts in found.values()])

    logits = engine.evaluate(ids, tap)
    lengths = [min(engine.chunk, len(ids) - start) for start in range(0, len(ids), engine.chunk)]
    return whole(states), np.sort(whole(chosen), axis=-1), logits


def same_experts(chosen, reference, prompt):
    """Whether each layer chose the reference's experts for each token: bool [layers, T]."""
    return (chosen == np.sort(reference[f"{prompt}_hf_expert_ids"], axis=-1)).all(axis=-1)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_float_weights_settle_the_formulas(float_engine, reference, prompt):
    """Every layer, then the logits, of the tokens for which no router is in doubt. Up to the first attention layer all
    is float32: within twice the distance at which the two references stand from each other. After it, half precision in
    attention and its cache: a tenth of what the reference's own float16 run costs with experts that flip."""
    agreement = oracle_json("manifest.json")["models"][MODEL]["agreement"][prompt]
    between_references = agreement["layer_hidden_rel_l2_hf_vs_llamacpp_f32"]
    first_attention = float_engine.config.layer_kinds.index("attention")
    hidden, chosen, logits = run(float_engine, reference[f"{prompt}_ids"].tolist())
    clear = reference[f"{prompt}_hf_router_margin"] > FLOAT_NOISE
    assert same_experts(chosen, reference, prompt)[clear].all() and clear.mean() > 0.98
    clear = clear.all(axis=0)
    rows = reference["long_hidden_rows"] if prompt == "long" else np.arange(len(reference["short_ids"]))
    for state, want in enumerate(reference[f"{prompt}_hf_hidden"][:-1]):
        error = distance(hidden[state][rows[clear[rows]]], want[clear[rows]])
        limit = 2 * between_references[state] if state <= first_attention else 2e-3
        assert error <= limit, f"state {state}: {error:.2e}"
    rows, want = reference[f"{prompt}_logit_rows"], reference[f"{prompt}_hf_logits"]
    assert distance(logits[rows[clear[rows]]], want[clear[rows]]) <= 2e-3


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_of_float_weights(float_engine, reference, prompt):
    """Decode, 64 tokens: the first difference, if any, is at a margin below the arithmetic's noise."""
    request = qengine.Request(reference[f"{prompt}_ids"].tolist(), max_tokens=64, ignore_eos=True)
    got = np.array([delta.token_id for delta in float_engine.submit(request)])
    want, margin = reference[f"{prompt}_hf_greedy"], reference[f"{prompt}_hf_greedy_margin"]
    different = np.flatnonzero(got != want)
    if different.size:
        assert margin[different[0]] <= 2e-2, f"token {different[0]} differs at a margin of {margin[different[0]]:.3f}"


def test_quantised_weights_choose_the_experts_as_often_as_llama_cpp(engine, reference):
    """8-bit activations make routers in doubt choose other experts: as often as in llama.cpp, which quantises alike.
    Which of them flip is chance: two standard deviations of the difference of two counts."""
    agreement = oracle_json("manifest.json")["models"][MODEL]["agreement"]
    ours = theirs = 0
    for prompt in PROMPTS:
        _, chosen, _ = run(engine, reference[f"{prompt}_ids"].tolist())
        same = same_experts(chosen, reference, prompt)
        ours += (~same).sum()
        theirs += sum(agreement[prompt]["expert_choice_mismatch_per_layer_llamacpp_quantised"]) * same.shape[1]
    assert theirs > 100 and ours <= theirs + 2 * (2 * theirs) ** 0.5


@pytest.mark.parametrize("family", ["prefill", "decode"])
def test_quantised_weights_are_as_near_as_llama_cpp(engine, reference, family):
    """A token whose router flips is as far off as the flip is large, here or there. So tokens are counted: ours is
    nearer to the reference than llama.cpp's for half of them, but for two standard deviations of chance. Distances are
    those of the logits that both stored lists of likeliest tokens hold."""
    n_nearer = n = 0
    for prompt in PROMPTS:
        ids = reference[f"{prompt}_ids"].tolist()
        logits = run(engine, ids)[2] if family == "prefill" else decode_logits(engine, ids)
        wanted, llama = ([dict(zip(*row)) for row in zip(reference[f"{prompt}_{source}_top_ids"],
                                                         reference[f"{prompt}_{source}_top_vals"])]
                         for source in ("hf", "llama"))
        for row, want in enumerate(wanted):
            both = [token for token in want if token in llama[row]]
            ours, theirs = (np.linalg.norm([found[token] - want[token] for token in both])
                            for found in (logits[row], llama[row]))
            n_nearer, n = n_nearer + (ours <= theirs), n + 1
    assert n_nearer >= n / 2 - n ** 0.5


# ---- a layer against NumPy ---------------------------------------------------------------------------------

ROWS = 70


def float64_layer(gguf, block, x, quantised):
    """x + the experts' results, from the formulas alone. quantised: names of the tensors, without block and ending,
    whose products read activations of 8 bits."""
    weights = {name: gguf.floats(f"blk.{block}.{name}.weight").astype(np.float64) for name in expert_tensors(256)}

    def product(name, x, expert=...):
        if name in quantised:
            q, d = quantize_reference(x.astype(np.float32))
            x = q * np.repeat(d, 32, axis=1).astype(np.float64)
        return x @ weights[name][expert].T

    def mlp(names, x, expert=...):
        gate, up, down = names
        return product(down, swiglu_reference(product(gate, x, expert), product(up, x, expert)), expert)

    u = rms_norm_reference(x, gguf.floats(f"blk.{block}.post_attention_norm.weight"), 1e-6)
    logits = np.concatenate([u @ weights["ffn_gate_inp"].T, (u @ weights["ffn_gate_inp_shexp"])[:, None]], axis=1)
    experts, shares = route_reference(logits.astype(np.float32), EXPERTS, USED)
    y = shares[:, USED:] * mlp(("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"), u)
    for row, rank in np.ndindex(*experts.shape):
        names = "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"
        y[row] += shares[row, rank] * mlp(names, u[row:row + 1], experts[row, rank])[0]
    return x + y


def layer_results(card, path, block, x):
    """{family: what a layer makes of x}, of both families."""
    opened = qengine.open_model(path)
    with opened.weights.loading(card) as loader:
        model = qengine.Model(loader, opened.config, range(opened.config.n_layers))
    model.allocate(128, ROWS, 2)
    inputs, found = card.alloc(7 * 128, np.int32), {}
    qengine.set_rows(inputs, [0] * len(x), [0] * len(x), range(len(x)))
    rows = qengine.rows_of(inputs, len(x))
    passes = {"prefill": qengine.PromptPass(rows, (), (), False, Alone, None),
              "decode": qengine.DecodePass(rows, len(x))}
    for family, run in passes.items():
        for array in model.scratch.arrays.values():
            card.poison(array)
        card.copy_in(model.scratch.x[:len(x)], x)
        getattr(model.blocks[block].mlp, family)(model, run)
        found[family] = card.download(model.scratch.x[:len(x)])
    return found


def one_of(*kinds):
    """Types of the tensors of a layer, in turn."""
    names = [name for name in expert_tensors(256) if "_inp" not in name]
    return {name: kinds[i % len(kinds)] for i, name in enumerate(names)}


FILES = {"Q8_0": {}, "F32": one_of("F32"), "apart": one_of("Q4_K", "Q8_0"),
         "together": one_of("Q8_0") | {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K"},
         "floats and codes": one_of("F16", "F16", "Q8_0"), "float shared": one_of("Q8_0") | {"ffn_down_shexp": "BF16"}}


@pytest.mark.parametrize("n", [1, ROWS])
@pytest.mark.parametrize("kinds", FILES)
def test_a_layer_is_what_the_formulas_say(card, kinds, n, tmp_path):
    write_experts(tmp_path / "m.gguf", FILES[kinds])
    gguf = qengine.GGUF(tmp_path / "m.gguf")
    quantised = {name for name in expert_tensors(256)
                 if gguf.tensors[f"blk.1.{name}.weight"].type not in ("F32", "F16", "BF16")}
    x = np.random.default_rng(n).standard_normal((n, 256), np.float32)
    want = float64_layer(gguf, 1, x, quantised)
    for family, got in layer_results(card, tmp_path / "m.gguf", 1, x).items():
        limit = 1e-3 if quantised else 1e-6          # a rounding to 8 bits may fall to the other side
        assert distance(got - x, want - x) < limit, family


def test_gate_and_up_of_an_expert_in_one_tensor(card, tmp_path):
    """The same weights as two tensors and as one give the same bits."""
    x = np.random.default_rng(3).standard_normal((9, 256), np.float32)

    write_experts(tmp_path / "two.gguf")
    two = qengine.GGUF(tmp_path / "two.gguf")

    def change(name, values):
        if "gate_up" in name:
            return np.concatenate([two.floats(name.replace("gate_up", part)) for part in ("gate", "up")], axis=1)
        return two.floats(name)

    write_experts(tmp_path / "one.gguf", fused=True, change=change)
    assert qengine.open_model(tmp_path / "one.gguf").config.one_gate_up
    found = [layer_results(card, tmp_path / f"{name}.gguf", 0, x) for name in ("two", "one")]
    for family in found[0]:
        np.testing.assert_array_equal(found[0][family], found[1][family])


# ---- the same bits -----------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The small model of the tests with experts, and a draft block that has some, too."""
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    write_experts(path)
    return path


@pytest.fixture(scope="module")
def alone(small):
    """What one card says."""
    with contextlib.closing(test_across_cards.load((3,), str(small), chunk=512)) as engine:
        yield test_across_cards.answers(engine), engine.evaluate(test_across_cards.request(1, 300).prompt_ids)


@pytest.mark.parametrize("split, options", [((3,), {"draft": "off"}), ((2, 1), {}), ((1, 1, 1), {"chunk": 128})],
                         ids=str)
def test_cards_chunks_batches_and_drafts_change_no_token(split, options, alone, small):
    """Several answers at once and one alone, prompts that go on after cached pages, grammars, log-probabilities."""
    said, logits = alone
    with contextlib.closing(test_across_cards.load(split, str(small), **options)) as engine:
        assert test_across_cards.answers(engine) == said
        np.testing.assert_array_equal(engine.evaluate(test_across_cards.request(1, 300).prompt_ids), logits)


def test_micro_batches_change_no_bit(card, small):
    found = []
    for sizes in (test_micro_batches.N,), (192, 64, 320, 124):
        with contextlib.closing(test_micro_batches.load(card, small, sizes)) as engine:
            found.append(test_micro_batches.said(engine))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


def test_products_of_a_reader_serve_the_shared_expert(card, small):
    """Also in decode steps, where it is otherwise a part of the experts' launches; the bits are the same."""
    met = set()

    def gemv(card, y, stride, w, *arguments):
        met.add(w.values.ptr)
        q8_gemv.gemv_q8_q8(card, y, stride, w, *arguments)

    with contextlib.closing(qengine.load(str(small), card=card, ctx=128, progress=False)) as engine:
        before = engine.generate([7, 8, 9], max_tokens=20, ignore_eos=True)
        mlp = engine.pipeline.last.model.layers[0].mlp
        engine.use(gemv=gemv)
        assert engine.generate([7, 8, 9], max_tokens=20, ignore_eos=True) == before
    assert {mlp.shared_gate_up.parts[0][1].values.ptr, mlp.shared_down.values.ptr} <= met


# ---- files -------------------------------------------------------------------------------------------------

def refusal(path, **file):
    """How a file that `write_experts` writes is refused."""
    write_experts(path, **file)
    with pytest.raises(qengine.ModelError) as error:
        qengine.open_model(path)
    return str(error.value)


@pytest.mark.parametrize("name", [f"blk.1.{name}.weight" for name in expert_tensors(256)])
def test_tensors_of_other_shapes_are_refused(name, small):
    """A tensor that lacks its last row or its last expert, that has its dimensions in another order, that is not
    there."""
    opened, gguf = qengine.open_model(small), qengine.GGUF(small)
    tensor, shape = gguf.tensors[name], gguf.tensors[name].shape
    for other in {(shape[0] - 1, *shape[1:]), shape[:-1] or (1, 256), shape[1:] + (1,)}:
        gguf.tensors[name] = dataclasses.replace(tensor, shape=other)
        with pytest.raises(qengine.ModelError, match=re.escape(f"has the shape {other}, not {shape}")):
            qengine.check_model(opened.config, gguf)
    del gguf.tensors[name]
    with pytest.raises(qengine.ModelError, match=f"tensor '{name}' is missing"):
        qengine.check_model(opened.config, gguf)


def test_a_damaged_file_is_refused(tmp_path):
    def change(name, values):
        return values[:-1] if name == "blk.1.ffn_up_exps.weight" else values

    said = refusal(tmp_path / "m.gguf", change=change)
    assert re.search(r"'blk.1.ffn_up_exps.weight' \(byte \d+\) has the shape \(5, 256, 256\), not \(6, 256,", said)


@pytest.mark.parametrize("keys, words", [
    ({"expert_count": 8}, r"'blk.0.ffn_gate_inp.weight' \(byte \d+\) has the shape \(6, 256\), not \(8, 256\)"),
    ({"expert_count": 0}, "'qwen35moe.expert_count' is 0, not a sensible size"),
    ({"expert_count": None}, "'qwen35moe.expert_count' is missing"),
    ({"expert_used_count": 7}, "a token uses 7 of 6 experts"),
    ({"expert_used_count": 0}, "'qwen35moe.expert_used_count' is 0"),
    ({"expert_feed_forward_length": 250}, "the feed-forward size of an expert is 250, not a multiple of 32"),
    ({"expert_shared_feed_forward_length": 1}, "the feed-forward size of the shared expert is 1, not a multiple"),
    ({"expert_gating_func": 2}, "'qwen35moe.expert_gating_func' is 2, and only 1 is supported"),
    ({"expert_weights_norm": False}, "'qwen35moe.expert_weights_norm' is False, and only True"),
    ({"expert_weights_scale": 2.5}, "'qwen35moe.expert_weights_scale' is 2.5, and only 1.0"),
], ids=str)
def test_metadata_that_the_layer_does_not_do_is_refused(keys, words, tmp_path):
    assert re.search(words, refusal(tmp_path / "m.gguf", keys=keys))


def test_more_experts_than_can_be_chosen_from():
    config = qengine.Config.synthetic("tiny-moe")
    for fields in {"n_experts": 513}, {"n_experts": 64, "n_used_experts": 17}:
        with pytest.raises(qengine.ModelError, match="513 experts, more than 512|17 of 64 experts, and at most 16"):
            qengine.check_config(dataclasses.replace(config, **fields), "m")


def test_metadata_that_files_may_have(tmp_path):
    """The size of a dense MLP, which no layer has; a gate that is softmax, as ours is."""
    keys = {"feed_forward_length": 999, "expert_gating_func": 1, "expert_weights_norm": True,
            "expert_weights_scale": 1.0}
    write_experts(tmp_path / "m.gguf", keys=keys)
    assert qengine.open_model(tmp_path / "m.gguf").config.ffn_dim == 0


@pytest.mark.parametrize("kind, what", [("Q8_0", "block scale"), ("F32", "value")])
def test_an_expert_that_holds_no_number_is_named(card, kind, what, tmp_path):
    write_experts(tmp_path / "m.gguf", one_of(kind))
    gguf, name = qengine.GGUF(tmp_path / "m.gguf"), "blk.2.ffn_up_exps.weight"
    data, tensor = bytearray((tmp_path / "m.gguf").read_bytes()), gguf.tensors[name]
    at = tensor.offset + tensor.nbytes // EXPERTS * (EXPERTS - 1)       # where the last expert begins
    data[at:at + 4] = b"\0\x7c\x80\x7f"         # no number, as a float16 and as a float32
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(qengine.ModelError, match=f"'{name}' holds a {what} that is not a finite number"):
        qengine.load(str(tmp_path / "m.gguf"), card=card, ctx=64, progress=False)


# ---- sizes -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, millions, words", [
    ("35b-a3b", 34660.61, "34,660.6 million parameters (35B, 3B active)"),
    ("122b-a10b", 122111.5, "122,111.5 million parameters (122B, 10B active)"),
    ("397b-a17b", 396346.4, "396,346.4 million parameters (396B, 17B active)")])
def test_published_sizes(name, millions, words):
    """Parameters of the language model, as llama-bench counts them for the published files."""
    config = qengine.Config.synthetic(name)
    shapes = qengine.tensor_shapes(config)
    assert qengine.n_parameters(config) / 1e6 == pytest.approx(millions, rel=1e-6)
    assert parameters(shapes, config) == words
    with_block = qengine.Config.synthetic(f"{name}+mtp")
    assert parameters(qengine.tensor_shapes(with_block), with_block).split("(")[1] == words.split("(")[1]
    qengine.check_config(with_block, with_block.name)


def planned(model, memory=700 << 20, n_cards=1, **demand):
    cards = [EmulatedCard(n, memory_bytes=memory) for n in range(n_cards)]
    return qengine.make_planner(qengine.open_model(model), cards, Demand(256, **demand))


def test_a_plan_tells_what_a_token_uses():
    planner = planned("synthetic:tiny-moe")
    work, c = planner.costs.works[-1], planner.blueprint.config
    one = 3 * c.hidden_dim * c.expert_dim
    assert work.expert_bytes == c.n_layers * c.n_experts * one * 34 // 32
    assert work.expert_bytes_read(1) == work.expert_bytes * c.n_used_experts // c.n_experts
    assert work.idle_bytes == work.expert_bytes - work.expert_bytes_read(1)
    assert work.expert_bytes_read(1) < work.expert_bytes_read(2) < 2 * work.expert_bytes_read(1)
    assert work.expert_bytes_read(1000) == work.expert_bytes
    dense = qengine.PlannedModel(qengine.Config.synthetic("tiny"), qengine.SyntheticWeights(
        qengine.tensor_shapes(qengine.Config.synthetic("tiny"))))
    mlp = LayerCosts(dense, planner.cards).works[-1].row_operations - 4 * 2 * 3 * 256 * 320
    per_token = c.n_used_experts * one + 3 * c.hidden_dim * c.shared_dim + (c.n_experts + 1) * c.hidden_dim
    assert work.row_operations == mlp + c.n_layers * 2 * per_token
    assert "million parameters (11M, 6M active): of " in planner.report() and "a token reads" in planner.report()


def test_decode_steps_read_what_a_token_uses():
    """So the cost of a layer is that of its active weights, and its memory that of all."""
    costs = planned("synthetic:35b-a3b:q4_k", 64 << 30).costs
    whole = costs.memory(0, 40, 4, 2)
    step = costs.decode_seconds(0, 0, 40, 256) * costs.speeds[0].read * 0.75
    assert whole > 17e9 and 1e9 < step < 0.12 * whole


def test_passes_read_all_experts():
    """A pass of few rows takes as long as its experts take to be read."""
    work = planned("synthetic:35b-a3b:q4_k", 64 << 30).costs.works[-1]
    card = SimpleNamespace(n_sms=132, kind="cuda")
    few, many = (StageCosts(card, 2048, work, SPEED).pass_seconds(rows) for rows in (64, 4096))
    assert few > 0.9 * work.expert_bytes_read(64) / SPEED.read and few < many < 16 * few


def test_two_cards_hold_what_one_cannot():
    one, two = (planned("synthetic:35b-a3b:q4_k", 16 << 30, n) for n in (1, 2))
    assert one.demand.expert_memory is not None             # some of the experts lie elsewhere
    assert two.demand.expert_memory is None and two.plan.fits and sum(map(len, two.plan.layers)) == 40
    assert one.costs.expert_bytes > 16 << 30 > max(stage.total for stage in two.plan.stages)


def test_what_a_step_moves_and_a_prompt_computes():
    engine = qengine.load("synthetic:tiny-moe", card="emulated", ctx=128, slots=2, progress=False)
    c, b = engine.config, Bench(engine, None, 1, 2)
    matrices = b.weights()
    experts = c.n_layers * 3 * c.hidden_dim * c.expert_dim      # of one expert of each layer
    states = sum(kind == "linear" for kind in c.layer_kinds) * 4 * (
        2 * c.n_value_heads * 128 * 128 + c.conv_width * c.conv_dim)
    kept = sum(kind == "attention" for kind in c.layer_kinds) * 2 * c.kv_dim * 2
    dense = sum(m.values.nbytes + (m.scales.nbytes if m.is_quantized else 0) for m in matrices)
    touched = 1 - (1 - c.n_used_experts / c.n_experts) ** 2     # of the experts, by two slots
    assert b.step_bytes(64) == pytest.approx(
        dense + touched * c.n_experts * experts * 34 / 32
        + 2 * (states + kept * (64 + engine_bench.DECODE_STEPS // 2)))
    head = c.n_vocab * c.hidden_dim
    per_token = sum(m.n * m.k for m in matrices) - head + c.n_used_experts * experts
    assert b.prompt_operations(10) == 2 * (10 * per_token + head)
    engine.close()
