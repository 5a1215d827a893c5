"""--perplexity: losses and KL divergence against NumPy and the reference models, and what a person sees."""

import numpy as np
import pytest

import qengine
from cli.main import main
from cli.perplexity import measure_perplexity, score_rows
from kernels.card import CardError
from tests.models import write_as_float32
from tests.oracle import DATA, oracle_npz, oracle_path

MODEL = str(DATA / "tiny-Q8_0.gguf")
CONTEXT = 100               # tokens of a window: no multiple of a page, a chunk or a block of rows
IDS = np.random.default_rng(5).integers(0, 4000, 250).tolist()


@pytest.fixture(scope="module")
def engine(card):
    engine = qengine.load(MODEL, card=card, ctx=CONTEXT, progress=False)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def float_engine(card, tmp_path_factory):
    """The same weights as float32 tensors: the logits differ by what 8-bit activations cost."""
    path = tmp_path_factory.mktemp("model") / "float.gguf"
    write_as_float32(MODEL, path)
    engine = qengine.load(str(path), card=card, ctx=CONTEXT, progress=False)
    yield engine
    engine.close()


def log_probabilities(engine, ids):
    """float64 [len(ids) - 1, n_vocab]: row i predicts token i + 1, in windows of CONTEXT tokens."""
    starts = range(0, len(ids) - 1, CONTEXT)
    rows = np.concatenate([engine.evaluate(ids[start:start + CONTEXT]) for start in starts])[:len(ids) - 1]
    rows = rows.astype(np.float64)
    return rows - np.logaddexp.reduce(rows, axis=1)[:, None]


@pytest.mark.parametrize("n_tokens", [2, 3, CONTEXT, CONTEXT + 1, CONTEXT + 2, 250])
def test_losses_are_those_of_the_logits(engine, n_tokens):
    ids = IDS[:n_tokens]
    measured = measure_perplexity(engine, ids)
    want = -log_probabilities(engine, ids)[np.arange(n_tokens - 1), ids[1:]]
    np.testing.assert_allclose(measured.losses, want, rtol=0, atol=1e-12)
    assert measured.other_losses is measured.divergences is measured.same_top is None


def test_against_another_model(engine, float_engine):
    measured = measure_perplexity(engine, IDS, against=float_engine)
    ours, theirs = log_probabilities(engine, IDS), log_probabilities(float_engine, IDS)
    rows = np.arange(len(IDS) - 1)
    np.testing.assert_allclose(measured.losses, -ours[rows, IDS[1:]], rtol=0, atol=1e-12)
    np.testing.assert_allclose(measured.other_losses, -theirs[rows, IDS[1:]], rtol=0, atol=1e-12)
    divergences = (np.exp(theirs) * (theirs - ours)).sum(axis=1)
    np.testing.assert_allclose(measured.divergences, divergences, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(measured.same_top, ours.argmax(axis=1) == theirs.argmax(axis=1))
    assert measured.divergences.min() > 0
    assert 0.5 < measured.same_top.mean() < 1       # a model of noise: close calls


def test_against_itself(engine):
    measured = measure_perplexity(engine, IDS, against=engine_of(engine))
    np.testing.assert_array_equal(measured.losses, measured.other_losses)
    assert not measured.divergences.any() and measured.same_top.all()


def engine_of(engine):
    """The same model a second time, with other chunks and a longer context."""
    return qengine.load(MODEL, card=engine.cards[0], ctx=4 * CONTEXT, chunk=64, progress=False)


def test_a_text_of_certain_and_of_impossible_tokens():
    logits = np.array([[0, 0, 0, 0], [800, 0, 0, 0], [800, 0, 0, -800], [1e30, 0, 0, 0]], np.float32)
    losses, = score_rows([2, 0, 3, 1], logits)
    np.testing.assert_array_equal(losses, [np.log(4), 0, 1600, np.float64(np.float32(1e30))])


def test_a_nan_is_no_perplexity():
    with pytest.raises(CardError, match="NaN"):
        score_rows([0], np.array([[0, np.nan]], np.float32))


# ---- the reference model -----------------------------------------------------------------------------------
# *_hf_* is float32 arithmetic on the file's weights; *_llama_* is llama.cpp, which quantises activations too.


@pytest.fixture(scope="module")
def reference():
    return oracle_npz("dense_mtp-Q8_0")


@pytest.fixture(scope="module")
def reference_engine(card):
    engine = qengine.load(str(oracle_path("gguf/dense_mtp-Q8_0.gguf")), card=card, ctx=1024, progress=False)
    yield engine
    engine.close()


def reference_losses(reference, prompt, source, tokens):
    """float64 [len(tokens)]: the negative log-likelihood of tokens[i] at position i, NaN where its logit is not
    stored, neither among the likeliest tokens nor in a whole row."""
    def get(name):
        return reference[f"{prompt}_{source}_{name}"]

    logits, n = np.full((len(get("lse")), 4096), np.nan), len(tokens)
    np.put_along_axis(logits, get("top_ids").astype(np.int64), get("top_vals"), axis=1)
    logits[reference.get(f"{prompt}_logit_rows", np.arange(len(logits)))] = get("logits")
    return get("lse")[:n].astype(np.float64) - logits[np.arange(n), tokens]


def distances(losses, reference, prompt, tokens, at_least):
    """(ours, llama.cpp's) from the float32 reference's losses, where those are known, at_least so many positions."""
    want, llama = (reference_losses(reference, prompt, source, tokens) for source in ("hf", "llama"))
    known = np.isfinite(want) & np.isfinite(llama)
    assert known.sum() >= at_least
    return (losses - want)[known], (llama - want)[known]


def assert_as_near_as_llama_cpp(found):
    """found: `distances` of each prompt. They count together: 50 positions alone are decided by 8-bit rounding."""
    ours, theirs = map(np.concatenate, zip(*found))
    assert np.linalg.norm(ours) <= np.linalg.norm(theirs)


def test_losses_of_the_reference_model(reference_engine, reference):
    """Wherever the logit of the token that came is stored: random weights seldom find it likely."""
    found = []
    for prompt, at_least in (("short", 49), ("long", 25)):
        ids = reference[f"{prompt}_ids"].tolist()
        losses = measure_perplexity(reference_engine, ids).losses
        found.append(distances(losses, reference, prompt, ids[1:], at_least))
    assert_as_near_as_llama_cpp(found)


def test_losses_of_the_likeliest_tokens(reference_engine, reference):
    """As if the reference's likeliest token had come at each position: those are known nearly everywhere."""
    found = []
    for prompt, at_least in (("short", 50), ("long", 550)):
        ids, likeliest = reference[f"{prompt}_ids"].tolist(), reference[f"{prompt}_hf_top_ids"][:, 0]
        losses, = score_rows(likeliest, reference_engine.evaluate(ids))
        found.append(distances(losses, reference, prompt, likeliest, at_least))
    assert_as_near_as_llama_cpp(found)


# ---- the command line --------------------------------------------------------------------------------------


def run(capsys, *arguments):
    """main() with these arguments on the emulated card; gives (exit code, stdout, last line of stderr)."""
    code = main(["--card", "emulated", "--ctx", str(CONTEXT), *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err.splitlines()[-1]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("Wölfe, 늑대\r\nand <|im_end|> wolves.\n".encode() * 12)
    return path


def test_the_table(capsys, engine, text):
    code, out, _ = run(capsys, "-m", MODEL, "--perplexity", text)
    ids = engine.tokenizer.encode(text.read_bytes().decode())
    losses = measure_perplexity(engine, ids).losses
    assert code == 0 and len(losses) == len(ids) - 1 > 2 * CONTEXT
    cells = dict(line.rsplit(maxsplit=1) for line in out.splitlines()[1:])
    assert cells == {"tokens predicted": f"{len(losses):,}", "nats per token": f"{losses.mean():.4f}",
                     "  standard error": f"{losses.std() / len(losses)**.5:.4f}",
                     "perplexity": f"{np.exp(losses.mean()):.4f}"}
    assert out.splitlines()[0].strip() == "tiny-Q8_0"


def test_the_table_of_two(capsys, text):
    code, out, _ = run(capsys, "-m", MODEL, "--perplexity", text, "--against", MODEL)
    assert code == 0
    head, *lines, kl, middle, high, higher, most, same = out.splitlines()
    assert head.split() == ["tiny-Q8_0"] * 2 and lines[3].split()[1] == lines[3].split()[2]
    assert {line.split()[-2] for line in (kl, middle, high, higher, most)} == {"0.000000"}
    assert same.endswith(" 100.00 %")


def test_a_model_beside_itself_with_other_pages(capsys, text):
    code, out, _ = run(capsys, "-m", MODEL, "--perplexity", text, "--kv", "q4", "--against-kv", "q8+3")
    head, *_, kl, middle, high, higher, most, _ = out.splitlines()
    assert code == 0 and head.split() == ["tiny-Q8_0", "(q4)", "tiny-Q8_0", "(q8+3)"]
    found = [float(line.split()[-2]) for line in (middle, high, higher, most)]
    assert 0 < found[0] and sorted(found) == found and found[0] < float(kl.split()[-2]) < found[-1]


def test_both_models_leave_out_keys_or_neither_does(capsys, monkeypatch, text):
    """So a comparison shows what the other model or format changes, and nothing else. No text needs eyes."""
    engines, load = [], qengine.load
    monkeypatch.setattr(qengine, "load", lambda *a, **more: engines.append(load(*a, **more)) or engines[-1])
    for sparse in "on", "off":
        assert run(capsys, "-m", MODEL, "--perplexity", text, "--against", MODEL, "--sparse", sparse)[0] == 0
    assert [engine.sparse for engine in engines] == ["on", "on", "off", "off"]


def test_both_models_take_of_the_same_memory(capsys, monkeypatch, text):
    bounds, load = [], qengine.load
    monkeypatch.setattr(qengine, "load", lambda *a, memory, **more: bounds.append(memory) or load(
        *a, memory=memory, **more))
    assert run(capsys, "-m", MODEL, "--perplexity", text, "--against", MODEL, "--memory", "1")[0] == 0
    assert bounds == [2**30, 2**30]


@pytest.mark.parametrize("content, words", [
    (None, "No such file"), (b"", "fewer than 2 tokens"), (b"a", "fewer than 2 tokens"),
    (b"abc\xff", "byte 3"),
], ids=str)
def test_texts_that_cannot_be_measured(capsys, monkeypatch, tmp_path, content, words):
    monkeypatch.setattr(qengine, "load", lambda *_, **__: pytest.fail("was loaded"))
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    assert_refused(run(capsys, "-m", MODEL, "--perplexity", path), str(path), words)


def assert_refused(result, *words):
    code, out, sentence = result
    assert (code, out) == (2, "") and sentence.startswith("qengine: ")
    assert all(word in sentence for word in words)


def test_a_folder_is_no_text(capsys, tmp_path):
    assert_refused(run(capsys, "-m", MODEL, "--perplexity", tmp_path), str(tmp_path), "directory")


def test_models_that_cannot_be_compared(capsys, monkeypatch, text):
    monkeypatch.setattr(qengine, "load", lambda *_, **__: pytest.fail("was loaded"))
    arguments = ["-m", MODEL, "--perplexity", text, "--against"]
    assert_refused(run(capsys, *arguments, "synthetic:tiny"), "synthetic:tiny", "vocabulary")
    assert_refused(run(capsys, *arguments, "/nowhere.gguf"), "/nowhere.gguf")
