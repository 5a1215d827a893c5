"""Models whose matrices are F16, BF16 or F32: the kernels widen a weight exactly, so a file of half-width weights and the
F32 file of the same values must give the same bits."""

import gguf
import numpy as np
import pytest

import qengine
from tests.models import results, rewrite, write_as_float32
from tests.oracle import DATA

SOURCE = DATA / "tiny-Q8_0.gguf"


def bfloat16(values):
    """The upper halves of float32 values as bytes: truncation is rounding enough here."""
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8), gguf.GGMLQuantizationType.BF16


def as_half_width(kind):
    """For `rewrite`: matrices as `kind`, the rest as it is."""
    narrow = bfloat16 if kind == "BF16" else lambda values: values.astype(np.float16)
    return lambda tensor, values: narrow(values) if tensor.type == "Q8_0" else values


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_width_weights_are_widened_exactly(card, kind, tmp_path):
    rewrite(SOURCE, tmp_path / "narrow.gguf", as_half_width(kind))
    write_as_float32(tmp_path / "narrow.gguf", tmp_path / "wide.gguf")
    assert {t.type for t in qengine.GGUF(tmp_path / "narrow.gguf").tensors.values()} == {kind, "F32"}
    narrow, wide = results(tmp_path / "narrow.gguf", card), results(tmp_path / "wide.gguf", card)
    assert np.isfinite(narrow[0]).all() and narrow[0].std() > 0.1
    np.testing.assert_array_equal(narrow[0], wide[0])
    assert narrow[1] == wide[1]
