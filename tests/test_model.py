"""The whole forward pass against two independent implementations: hidden states, logits, greedy tokens.

`*_hf_*` is float32 arithmetic on exactly the weights stored in the file. The same weights written as F32 run through
the float kernels here and must agree closely, which settles the formulas; the file as shipped adds 8-bit
activations, and must be no further from the reference than llama.cpp, which quantises the same way.
"""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

import qengine
from tests.models import write_as_float32
from tests.oracle import oracle_json, oracle_npz, oracle_path

MODEL = "dense_mtp-Q8_0"
PROMPTS = ["short", "long"]


def reference_fixtures(model):
    """Fixtures of a module: the arrays of a reference model, an engine with it, and one with the same weights as
    float32 tensors, so without 8-bit activations anywhere."""
    @pytest.fixture(scope="module")
    def reference():
        return oracle_npz(model)

    @pytest.fixture(scope="module")
    def engine(card):
        with contextlib.closing(qengine.load(oracle_path(f"gguf/{model}.gguf"), card=card, ctx=1024,
                                             progress=False)) as engine:
            yield engine

    @pytest.fixture(scope="module")
    def float_engine(card, tmp_path_factory):
        path = tmp_path_factory.mktemp("model") / "float.gguf"
        write_as_float32(oracle_path(f"gguf/{model}.gguf"), path)
        with contextlib.closing(qengine.load(path, card=card, ctx=1024, progress=False)) as engine:
            yield engine

    return reference, engine, float_engine


reference, engine, float_engine = reference_fixtures(MODEL)


def distance(got, want):
    """Relative L2."""
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def run(engine, ids):
    """(hidden states [layers + 1, T, hidden], logits [T, vocabulary]) of a text."""
    states = {}

    def tap(name, array):
        states.setdefault(name, []).append(array.card.download(array))

    n, chunk = len(ids), engine.chunk
    logits = engine.evaluate(ids, tap)
    lengths = [min(chunk, n - start) for start in range(0, n, chunk)]
    hidden = np.stack([np.concatenate([part[:length] for part, length in zip(parts, lengths)])
                       for parts in states.values()])
    return hidden, logits


def stored_logits(reference, prompt):
    """(rows, logits) that the reference holds."""
    want = reference[f"{prompt}_hf_logits"]
    return (np.arange(len(want)) if prompt == "short" else reference[f"{prompt}_logit_rows"]), want


@pytest.mark.parametrize("prompt", PROMPTS)
def test_float_weights_settle_the_formulas(float_engine, reference, prompt):
    """Every layer, then the logits. Up to the first attention layer all is float32: within twice the distance at which
    the two references stand from each other. After it, half precision in attention and its cache: half of what the
    reference's own float16 run costs (noise table: 4e-3)."""
    agreement = oracle_json("manifest.json")["models"][MODEL]["agreement"][prompt]
    between_references = agreement["layer_hidden_rel_l2_hf_vs_llamacpp_f32"]
    first_attention = float_engine.config.layer_kinds.index("attention")
    hidden, logits = run(float_engine, reference[f"{prompt}_ids"].tolist())
    rows = reference["long_hidden_rows"] if prompt == "long" else np.arange(len(reference["short_ids"]))
    for state, want in enumerate(reference[f"{prompt}_hf_hidden"][:-1]):     # 0: embedding, 1: after layer 0, ...
        error = distance(hidden[state][rows], want)
        limit = 2 * between_references[state] if state <= first_attention else 2e-3
        assert error <= limit, f"state {state}: {error:.2e}"
    rows, want = stored_logits(reference, prompt)
    assert distance(logits[rows], want) <= 2e-3


def check_as_near_as_llama_cpp(engine, reference, *prompts):
    """Over all positions of the prompts, on the logits that both stored lists of likeliest tokens hold (9,760 of the
    long prompt), ours are no further from the float32 reference than llama.cpp's with the same weights and 8-bit
    activations. The prompts count together: on 50 positions alone the rounding of 8 bits decides by chance."""
    ours, theirs = [], []
    for prompt in prompts:
        _, logits = run(engine, reference[f"{prompt}_ids"].tolist())
        wanted, llama = ([dict(zip(*row)) for row in zip(reference[f"{prompt}_{source}_top_ids"],
                                                         reference[f"{prompt}_{source}_top_vals"])]
                         for source in ("hf", "llama"))
        both = [(row, token) for row, want in enumerate(wanted) for token in want if token in llama[row]]
        assert len(both) > 15 * len(logits)
        ours += [logits[row, token] - wanted[row][token] for row, token in both]
        theirs += [llama[row][token] - wanted[row][token] for row, token in both]
    assert np.linalg.norm(ours) <= np.linalg.norm(theirs)


def test_quantised_weights_are_as_near_as_llama_cpp(engine, reference):
    check_as_near_as_llama_cpp(engine, reference, *PROMPTS)


@pytest.mark.parametrize("model", ["dense_kq-Q4_K_M", *(pytest.param(name, marks=pytest.mark.slow)
                                                        for name in ("dense_kq-Q5_K_M", "dense_kq-Q6_K"))])
def test_k_quants_are_as_near_as_llama_cpp(card, model):
    """Prefill, and in decode the same likeliest tokens."""
    reference = oracle_npz(model)
    engine = qengine.load(str(oracle_path(f"gguf/{model}.gguf")), card=card, ctx=128, progress=False)
    check_as_near_as_llama_cpp(engine, reference, "short")
    check_likeliest_tokens(reference, "short", decode_logits(engine, reference["short_ids"].tolist()))
    engine.close()


def decode_logits(engine, ids):
    """Logits [T, vocabulary] of a text whose first token is a prompt and whose others go through decode one by one."""
    pipeline, logits = engine.pipeline, []
    with engine.scheduler.borrow_slot(len(ids)) as sequence:
        pipeline.prepare_slot(sequence.slot, sequence.generation.request)
        pipeline.prefill(ids[:1], sequence.slot, 0)
        pipeline.sample_row(0, qengine.answer_of(0, sequence.slot, 0)).read()
        logits.append(engine.cards[0].download(pipeline.last.model.logits[0]))
        for position, token in enumerate(ids[1:], 1):
            pipeline.place([qengine.answer_of(token, sequence.slot, position)])
            pipeline.step(qengine.StepShape(1)).read()
            logits.append(engine.cards[0].download(pipeline.last.model.logits[0]))
    return np.stack(logits)


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_teacher_forced_tokens(engine, reference, prompt, family):
    ids = reference[f"{prompt}_ids"].tolist()
    logits = run(engine, ids)[1] if family == "prefill" else decode_logits(engine, ids)
    check_likeliest_tokens(reference, prompt, logits)


def check_likeliest_tokens(reference, prompt, logits):
    """At every position the likeliest token is the reference's, wherever its margin over the second exceeds the noise
    of 8-bit arithmetic: the largest margin at which llama.cpp, with the same weights, chose another token."""
    likeliest, values = reference[f"{prompt}_hf_top_ids"][:, 0], reference[f"{prompt}_hf_top_vals"]
    margin = values[:, 0] - values[:, 1]
    noise = margin[reference[f"{prompt}_llama_top_ids"][:, 0] != likeliest].max()
    clear = margin > noise
    assert clear.sum() > 0.3 * len(logits)
    np.testing.assert_array_equal(logits.argmax(axis=1)[clear], likeliest[clear])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_of_float_weights(float_engine, reference, prompt):
    """Decode, 64 tokens: the first difference, if any, is at a margin below the arithmetic's noise."""
    ids = reference[f"{prompt}_ids"].tolist()
    request = qengine.Request(ids, max_tokens=64, ignore_eos=True)
    got = np.array([delta.token_id for delta in float_engine.submit(request)])
    want, margin = reference[f"{prompt}_hf_greedy"], reference[f"{prompt}_hf_greedy_margin"]
    different = np.flatnonzero(got != want)
    if different.size:
        assert margin[different[0]] <= 2e-2, f"token {different[0]} differs at a margin of {margin[different[0]]:.3f}"


def test_scratch_memory_of_a_row():
    """What row_bytes says is what more rows take."""
    engine, taken = qengine.load("synthetic:tiny", card="emulated", ctx=128, progress=False), []
    model, card = engine.pipeline.last.model, engine.cards[0]
    model.card = SimpleNamespace(alloc=lambda *array: taken.append(card.alloc(*array)) or taken[-1], zeros=card.zeros,
                                 stream=card.stream)
    for rows in (64, 192):
        model.allocate(rows, 1, 2)
        taken.append(None)
    few, more = ([array.nbytes for array in arrays]
                 for arrays in (taken[:len(taken) // 2 - 1], taken[len(taken) // 2:-1]))
    assert sum(more) - sum(few) == 128 * model.row_bytes()
    engine.close()
