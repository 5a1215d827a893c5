"""Models whose matrices are floats: the kernels widen a weight exactly, so a file of half-width weights and the F32
file of the same values must give the same bits."""

import numpy as np
import pytest

import qengine
from kernels.formats import FLOATS
from tests.models import results, rewrite, stored, write_as_float32
from tests.oracle import DATA

SOURCE = DATA / "tiny-Q8_0.gguf"


@pytest.mark.parametrize("kind", [name for name, kind in FLOATS.items() if kind.file_bytes < FLOATS["F32"].file_bytes])
def test_half_width_weights_are_widened_exactly(card, kind, tmp_path):
    rewrite(SOURCE, tmp_path / "narrow.gguf",
            lambda tensor, values: stored(kind, values) if tensor.type == "Q8_0" else values)
    write_as_float32(tmp_path / "narrow.gguf", tmp_path / "wide.gguf")
    assert {t.type for t in qengine.GGUF(tmp_path / "narrow.gguf").tensors.values()} == {kind, "F32"}
    narrow, wide = results(tmp_path / "narrow.gguf", card), results(tmp_path / "wide.gguf", card)
    assert np.isfinite(narrow[0]).all() and narrow[0].std() > 0.1
    np.testing.assert_array_equal(narrow[0], wide[0])
    assert narrow[1] == wide[1]
