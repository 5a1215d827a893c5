"""Models whose matrices are in the formats of kernels/formats.

tests/data/formats.json holds a hash for each format of what synthetic:tiny says in it: the logits of a prompt, and the
tokens and log-probabilities of decode steps. `python -m tests.test_quantized_models` prints what a card computes.
"""

import hashlib
import json
import sys

import numpy as np
import pytest

import qengine
from kernels.formats import FORMATS
from kernels.open import open_cards
from tests.kinds import BY_KIND, FIRST
from tests.models import as_types, results, rewrite, write_as_float32
from tests.oracle import DATA

SOURCE = DATA / "tiny-Q8_0.gguf"
RECORDED = DATA / "formats.json"
PACKED = [name for name, format in FORMATS.items() if format.bits < 8]      # narrower than those of SOURCE


@pytest.mark.parametrize("names", [list(FIRST.values()), pytest.param(PACKED, marks=pytest.mark.slow)],
                         ids=["one of each kind", "all"])
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


IDS = [5, 300, 77, 1023, 9, 512, 31] * 6


def fingerprint(name, card):
    """The hash of what synthetic:tiny says in a format: logits of IDS, tokens of 6 steps and their likeliest
    log-probabilities. Its table of tokens, the matrices of prompts and those of decoding are all in the format."""
    engine = qengine.load(f"synthetic:tiny:{name.lower()}", card=card, ctx=128, progress=False)
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
