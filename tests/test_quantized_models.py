"""Models whose matrices are in the formats of kernels/formats.

tests/data/formats.json holds a hash for each format of what synthetic:tiny says in it: the logits of a prompt, and the
tokens and log-probabilities of decode steps. `python -m tests.test_quantized_models` prints what a card computes.
"""

import hashlib
import itertools
import json
import sys

import gguf
import numpy as np
import pytest

import qengine
from engine.weights import floats_of, is_factor
from kernels.formats import FORMATS
from kernels.open import open_cards
from tests.kinds import BY_KIND, FEW
from models.quantize import export, is_convertible, quantize
from tests.models import as_stored, as_types, expert_tensors, results, rewrite, write_as_float32, write_experts
from tests.oracle import DATA

pytestmark = pytest.mark.usefixtures("compiled_when_launched")

SOURCE = DATA / "tiny-Q8_0.gguf"
RECORDED = DATA / "formats.json"
PACKED = [name for name, format in FORMATS.items() if format.bits < 8]      # narrower than those of SOURCE


@pytest.mark.parametrize("names", [FEW, pytest.param(PACKED, marks=pytest.mark.slow)], ids=["few", "all"])
def test_many_formats_in_one_model(card, tmp_path, names):
    """8-bit activations are all that sets a model apart from the same weights as float32: a model whose matrices are in
    several packed formats, one after the other, is as far from its float32 form as a model of Q8_0 is. To compile the
    products of all formats takes minutes, and shorter tests cover each of them."""
    rewrite(SOURCE, tmp_path / "mixed.gguf", as_types(*names))
    assert {t.type for t in qengine.GGUF(tmp_path / "mixed.gguf").tensors.values()} == {*names, "F32"}
    distances = []
    for file in tmp_path / "mixed.gguf", SOURCE:
        write_as_float32(file, tmp_path / "wide.gguf")
        (logits, tokens), (want, _) = results(file, card), results(tmp_path / "wide.gguf", card)
        assert want.std() > 0.1 and len(tokens) == 6
        distances.append(np.linalg.norm(logits - want) / np.linalg.norm(want))
    assert distances[0] <= 1.5 * distances[1]


# ---- factors of whole matrices -----------------------------------------------------------------------------------


def nvfp4_file(path, with_experts):
    """The small model, its matrices in NVFP4."""
    if with_experts:
        write_experts(path, {name: "NVFP4" for name in expert_tensors(256) if "_inp" not in name})
    else:
        export(SOURCE, path, "NVFP4")
    return qengine.GGUF(path)


def shifted(source, path, powers):
    """Writes a file with the scales in the file `source` made 2**n times as large, for n of `powers` in turn, tensor by
    tensor and expert by expert; and a factor of 2**-n beside each, if there is any n but 0."""
    turns, factors = itertools.cycle(powers), {}

    def convert(tensor, values):
        number, raw = gguf.GGMLQuantizationType[tensor.type], source.data(tensor.name)
        if tensor.type != "NVFP4":
            return values if tensor.type == "F32" else (raw.view(np.uint8), number)
        blocks = raw.reshape(tensor.shape[0] if len(tensor.shape) == 3 else 1, -1, 36).copy()
        power = np.array([next(turns) for _ in blocks])
        blocks[..., :4] = np.clip(blocks[..., :4], 8, 100) + 8 * power[:, None, None]      # exponents begin at bit 3
        if any(powers):
            stem = tensor.name.removesuffix(".weight")
            factors[f"{stem}.scale"] = np.exp2(-power).astype(np.float32)
            factors[f"{stem}.input_scale"] = np.full(len(power), 7, np.float32)        # has no effect
        return blocks.reshape(*tensor.shape[:-1], -1), number

    rewrite(source.path, path, convert, more=factors)
    return len(factors)


@pytest.mark.parametrize("with_experts", [False, True], ids=["dense", "experts"])
def test_factors_that_the_scales_undo(card, tmp_path, with_experts):
    """Powers of two, which are exact: each matrix, and each expert, has its own, and no bit differs."""
    source = nvfp4_file(tmp_path / "source.gguf", with_experts)
    assert not shifted(source, tmp_path / "plain.gguf", [0])
    assert shifted(source, tmp_path / "factors.gguf", [0, 1, 2, 3]) > 20
    (want, tokens), (logits, found) = (results(tmp_path / f"{name}.gguf", card) for name in ("plain", "factors"))
    np.testing.assert_array_equal(logits, want)
    assert found == tokens and want.std() > 0.1
    if with_experts:                    # the same of experts in host memory
        logits, found = results(tmp_path / "factors.gguf", card, expert_memory=0)
        np.testing.assert_array_equal(logits, want)
        assert found == tokens


def test_factors_of_any_size(card, tmp_path):
    """As near to the same weights as float32 as without factors."""
    rng, source, number = np.random.default_rng(4), qengine.GGUF(SOURCE), gguf.GGMLQuantizationType["NVFP4"]
    matrices = [name for name, tensor in source.tensors.items() if is_convertible(tensor, "NVFP4")]
    given = {f"{name.removesuffix('.weight')}.scale": np.exp2(rng.uniform(-12, 0, 1)).astype(np.float32)
             for name in matrices}

    def convert(tensor, values):
        if tensor.name not in matrices:
            return values
        return quantize("NVFP4", values / given[f"{tensor.name.removesuffix('.weight')}.scale"]), number

    rewrite(SOURCE, tmp_path / "factors.gguf", convert, more=given)
    packed = qengine.GGUF(tmp_path / "factors.gguf")
    rewrite(packed.path, tmp_path / "wide.gguf", lambda tensor, values: None if is_factor(packed, tensor.name)
            else floats_of(packed, tensor.name))
    write_as_float32(SOURCE, tmp_path / "source.gguf")
    (logits, _), (want, _), (q8, _), (wide, _) = (results(file, card) for file in (
        packed.path, tmp_path / "wide.gguf", SOURCE, tmp_path / "source.gguf"))
    assert want.std() > 0.1
    off, off_of_q8 = (np.linalg.norm(ours - exact) / np.linalg.norm(exact)
                      for ours, exact in ((logits, want), (q8, wide)))
    assert off <= 1.5 * off_of_q8


@pytest.mark.parametrize("value, words", [(np.nan, "not a finite number"), (np.inf, "not a finite number")])
def test_factors_that_are_none(card, tmp_path, value, words):
    source = nvfp4_file(tmp_path / "source.gguf", False)
    rewrite(source.path, tmp_path / "m.gguf", as_stored(source.path), more={"blk.0.ffn_up.scale": np.float32([value])})
    with pytest.raises(qengine.ModelError, match=f"'blk.0.ffn_up.scale' holds a value that is {words}"):
        qengine.load(tmp_path / "m.gguf", card=card, ctx=128, progress=False)


IDS = [5, 300, 77, 1023, 9, 512, 31] * 6


def fingerprint(name, card, **options):
    """The hash of what synthetic:tiny says in a format: logits of IDS, tokens of 6 steps and their likeliest
    log-probabilities. Its table of tokens, the matrices of prompts and those of decoding are all in the format.
    options: of `qengine.load`."""
    engine = qengine.load(f"synthetic:tiny:{name.lower()}", card=card, ctx=128, progress=False, **options)
    request = qengine.Request(IDS, max_tokens=6, ignore_eos=True, top_logprobs=20)
    decoded = [(delta.token_id, delta.logprob, *delta.top_logprobs) for delta in engine.submit(request)]
    logits = engine.evaluate(IDS)
    engine.close()
    assert np.isfinite(logits).all() and logits.std() > 0.1
    return hashlib.sha256(logits.tobytes() + json.dumps(decoded).encode()).hexdigest()


@pytest.mark.parametrize("name", BY_KIND)
def test_recorded_bits(card, name):
    recorded = json.loads(RECORDED.read_text())
    assert name in recorded, f"{RECORDED} has no hash of {name}: when the format's other tests pass, add the line " \
                             "that `python -m tests.test_quantized_models emulated` prints for it"
    assert fingerprint(name, card) == recorded[name]


if __name__ == "__main__":
    card = open_cards(sys.argv[1] if len(sys.argv) > 1 else None)[0]
    print(json.dumps({name: fingerprint(name, card) for name in FORMATS}, indent=2))
