"""A model whose matrices are in all packed formats, one after the other, against the same weights as float32."""

import numpy as np

import qengine
from tests.models import as_types, results, rewrite, write_as_float32
from tests.oracle import DATA

SOURCE = DATA / "tiny-Q8_0.gguf"
KINDS = "Q4_K", "Q6_K", "Q5_K", "Q4_0", "Q5_0"


def test_all_formats_in_one_model(card, tmp_path):
    """8-bit activations are all that sets the two apart: as far as they take a model of Q8_0 from its float32 one."""
    rewrite(SOURCE, tmp_path / "mixed.gguf", as_types(*KINDS))
    assert {t.type for t in qengine.GGUF(tmp_path / "mixed.gguf").tensors.values()} == {*KINDS, "F32"}
    distances = []
    for file in tmp_path / "mixed.gguf", SOURCE:
        write_as_float32(file, tmp_path / "wide.gguf")
        (logits, tokens), (want, _) = results(file, card), results(tmp_path / "wide.gguf", card)
        assert want.std() > 0.1 and len(tokens) == 6
        distances.append(np.linalg.norm(logits - want) / np.linalg.norm(want))
    assert distances[0] <= 1.5 * distances[1]
