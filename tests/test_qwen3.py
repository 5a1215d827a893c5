"""Plain Qwen3 against the reference: hidden states of every layer, logits, answers; and what must not change bits.

The oracle's files of this architecture are made for embeddings and reranking. Without their pooling type they are
models of text, with the same weights.
"""

import numpy as np
import pytest

import qengine
from cli.main import main
from engine.packing import CLASSIFIER
from engine.request import ModelError, RequestError
from tests.models import as_stored, rewrite
from tests.oracle import oracle_json, oracle_npz, oracle_path
from tests.tiny import tiny_engine
from tests.test_model import decode_logits, distance, run

MODELS = {"embed-Q8_0": ("short", "long"), "rerank-Q8_0": ("short",)}
CASES = [(model, prompt) for model, prompts in MODELS.items() for prompt in prompts]
TINY = "synthetic:qwen3-tiny"
IDS = [5, 300, 77, 1023, 9, 512, 31] * 30           # 210 tokens: more than three pages


@pytest.fixture(scope="module")
def engines(card, tmp_path_factory):
    """(model, in float32 or as it is) -> an engine of text with its weights."""
    loaded = {}

    def engine(model, as_float):
        if (model, as_float) not in loaded:
            path, source = tmp_path_factory.mktemp("model") / "text.gguf", oracle_path(f"gguf/{model}.gguf")
            keep = (lambda tensor, values: values) if as_float else as_stored(source)
            rewrite(source, path, lambda tensor, values: None if tensor.name == CLASSIFIER else keep(tensor, values),
                    {"qwen3.pooling_type": None, "qwen3.classifier.output_labels": None})
            loaded[model, as_float] = qengine.load(path, card=card, ctx=1024, progress=False)
        return loaded[model, as_float]

    yield engine
    for each in loaded.values():
        each.close()


def head_logits(model, states):
    """What the reference's last states, after the output norm, give as logits: the head is the embedding table."""
    return states @ qengine.GGUF(oracle_path(f"gguf/{model}.gguf")).floats("token_embd.weight").astype(np.float64).T


@pytest.mark.parametrize("model, prompt", CASES)
def test_float_weights_settle_the_formulas(engines, model, prompt):
    """Every layer, then the logits. All layers are attention, whose half precision may cost a fifth of what the
    reference's own float16 run costs on this model (noise table: 2e-2)."""
    reference, engine = oracle_npz(model), engines(model, True)
    hidden, logits = run(engine, reference[f"{prompt}_ids"].tolist())
    rows = reference["long_hidden_rows"] if prompt == "long" else np.arange(len(reference["short_ids"]))
    wanted = reference[f"{prompt}_hf_hidden"]
    assert len(wanted) == len(hidden) + 1
    np.testing.assert_array_equal(hidden[0][rows], wanted[0])
    for state, want in enumerate(wanted[1:-1], 1):
        assert distance(hidden[state][rows], want) <= 4e-3, f"state {state}"
    assert distance(logits[rows], head_logits(model, wanted[-1])) <= 4e-3


@pytest.mark.parametrize("model, prompt", CASES)
def test_quantised_weights_are_as_near_as_llama_cpp(engines, model, prompt):
    """No further from the float32 reference than llama.cpp, whose activations have 8 bits, too. Decoded tokens are as
    near; on 50 positions alone chance decides, so they get a tenth more."""
    reference, engine = oracle_npz(model), engines(model, False)
    agreement = oracle_json("manifest.json")["models"][model]["agreement"][prompt]
    limit = agreement["llamacpp_quantised_f16kv__vs__hf_f32"]["rel_l2"]
    rows = reference["long_hidden_rows"] if prompt == "long" else np.arange(len(reference["short_ids"]))
    ids, want = reference[f"{prompt}_ids"].tolist(), head_logits(model, reference[f"{prompt}_hf_hidden"][-1])
    assert distance(run(engine, ids)[1][rows], want) <= limit
    if prompt == "short":
        assert distance(decode_logits(engine, ids), want) <= 1.1 * limit


# ---- what must not change bits ----------------------------------------------------------------------------------


def answers(card, **options):
    """(logits of IDS; tokens and log-probabilities of three answers at the same time) of TINY."""
    engine = qengine.load(TINY, card=card, progress=False, **{"ctx": 512, "slots": 3, "chunk": 64} | options)
    try:
        requests = [qengine.Request(IDS[i:], max_tokens=20, ignore_eos=True, top_logprobs=2, temperature=0.8, seed=i)
                    for i in (0, 9, 150)]
        generations = [engine.submit(request) for request in requests]
        said = [[(delta.token_id, delta.logprob) for delta in generation] for generation in generations]
        return engine.evaluate(IDS), said
    finally:
        engine.close()


@pytest.fixture(scope="module")
def plain_answers(card):
    return answers(card, draft="off")


@pytest.mark.parametrize("options", [{"chunk": 192, "draft": 3}, {"slots": 1, "chunk": 128}], ids=str)
def test_bits_depend_on_nothing_but_the_tokens(card, plain_answers, options):
    """Neither on chunks nor on what runs beside, nor on drafts, of which n-grams make some here."""
    logits, said = answers(card, **options)
    np.testing.assert_array_equal(logits, plain_answers[0])
    assert said == plain_answers[1]


@pytest.mark.parametrize("split", [(1, 3), (1, 2, 1)], ids=str)
def test_several_cards_give_the_same_bits(plain_answers, split):
    logits, said = answers(f"emulated:{len(split)}", split=split)
    np.testing.assert_array_equal(logits, plain_answers[0])
    assert said == plain_answers[1]


def test_a_prompt_goes_on_after_any_page(card):
    """Pages are all that such a model keeps: what a prompt shares with an earlier one is not computed again."""
    engine = qengine.load(TINY, card=card, ctx=512, chunk=64, progress=False)
    request = qengine.Request(IDS, max_tokens=4, ignore_eos=True)
    first, again = (list(engine.submit(request)) for _ in range(2))
    assert [delta.token_id for delta in first] == [delta.token_id for delta in again]
    shorter = engine.submit(qengine.Request([*IDS[:140], 7, 8, 9], max_tokens=4, ignore_eos=True))
    shorter.wait()
    assert shorter.n_cached == 128
    assert engine.stats()["cached_tokens"] == 192 + 128
    engine.close()


# ---- files and command lines ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, n_millions", [
    ("qwen3-0.6b", 596.05), ("qwen3-1.7b", 1720.57), ("qwen3-4b", 4022.47), ("qwen3-8b", 8190.74),
    ("qwen3-14b", 14768.31), ("qwen3-32b", 32762.12)])
def test_sizes_of_published_models(name, n_millions):
    """In millions of parameters, as the model cards of Qwen3 give them (0.6B: 0.6, without embeddings 0.44, ...)."""
    assert round(qengine.n_parameters(qengine.Config.synthetic(name)) / 1e6, 2) == n_millions


@pytest.mark.parametrize("options", [["--plan", "--ctx", "512"], ["--perplexity", "{text}", "--ctx", "128"],
                                     ["--bench", "--contexts", "64", "--batch", "1"]], ids=lambda o: o[0])
def test_command_lines(options, capfd, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("A text of some letters. " * 10)
    assert main(["-m", TINY, "--card", "emulated", *[option.format(text=text) for option in options]]) == 0
    assert capfd.readouterr().out


@pytest.mark.parametrize("key, value, words", [
    ("qwen3.attention.key_length", 64, "differ in length"), ("qwen3.pooling_type", 9, "pooling_type' is 9"),
    ("qwen3.rope.dimension_count", 64, "turn, not 128"), ("qwen3.rope.freq_base", 0.5, "rotary base"),
    ("qwen3.block_count", 99, "more than the tensors"), ("qwen3.attention.head_count_kv", 3, "share 3 KV heads"),
    ("qwen3.rope.scaling.type", "yarn", "scaling 'yarn' is not supported")])
def test_damaged_files_are_refused(tmp_path, key, value, words):
    source, path = oracle_path("gguf/embed-Q8_0.gguf"), tmp_path / "wrong.gguf"
    rewrite(source, path, as_stored(source), {key: value})
    with pytest.raises(ModelError, match=words):
        qengine.open_model(path)


def test_a_pooling_model_generates_no_text(capfd):
    assert main(["-m", "synthetic:qwen3-tiny-embedding", "-p", "Hi"]) == 2
    assert "can make embeddings, but not generate text" in capfd.readouterr().err
    with pytest.raises(ModelError, match="-embedding or -reranker at the end"):
        qengine.open_model("synthetic:qwen3-5b")
    with pytest.raises(RequestError, match="can generate text, but not make embeddings"):
        tiny_engine().embed(["a"])
