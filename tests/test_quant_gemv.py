import numpy as np
import pytest

from kernels import formats, q8_gemv, quant_gemv
from kernels.formats import FORMATS
from kernels.operands import Matrix, Quantized
from tests.blocks import added, block_terms
from tests.kinds import BY_KIND


@pytest.fixture(params=[name for name in BY_KIND if name != "Q8_0"])
def format(request):
    return FORMATS[request.param]


@pytest.mark.parametrize("case", quant_gemv.CASES, ids=str)
def test_within_the_rounding_bound(card, format, case):
    quant_gemv.check(card, format, *case, add=case[0] > 1)


def multiply(card, format, raw, n, xq, xd):
    columns, k = xq.shape
    y = card.alloc((columns, n), np.float32)
    card.poison(y)
    w, x = Matrix(format.name, n, k, *formats.on_card(card, format, raw, n, k)), Quantized(*map(card.upload, (xq, xd)))
    q8_gemv.gemv(card, quant_gemv.decoder(format), y, n, w, x, columns)
    return card.download(y)


def test_column_has_the_same_bits_in_any_company(card, format):
    rng, n, k = np.random.default_rng(1), 37, 1280
    raw, (xq, xd) = formats.random_raw(rng, format, n, k), q8_gemv.random_activations(rng, 8, k)
    together = multiply(card, format, raw, n, xq, xd)
    for columns in (1, 2, 3):
        part = slice(3, 3 + columns)
        np.testing.assert_array_equal(multiply(card, format, raw, n, xq[part], xd[part]), together[part])
    of_row = len(raw) // n
    few = multiply(card, format, raw[5 * of_row:12 * of_row], 7, xq, xd)
    np.testing.assert_array_equal(few, together[:, 5:12])


def test_a_column_that_is_too_long_for_planes_has_the_same_bits(card, format, monkeypatch):
    rng, n, k = np.random.default_rng(3), 5, 1280
    raw, x = formats.random_raw(rng, format, n, k), q8_gemv.random_activations(rng, 1, k)
    in_planes = multiply(card, format, raw, n, *x)
    monkeypatch.setattr(q8_gemv, "MAX_PLANES", k - 1)
    np.testing.assert_array_equal(multiply(card, format, raw, n, *x), in_planes)


def test_fused_kernels_have_the_bits_of_the_separate_ones(card, format):
    quant_gemv.check_fused(card, format, 96, 1792)


def test_bits_of_the_tree(card, format):
    """Blocks dealt to 32 chains of fma, and the tree over the chains: in NumPy."""
    rng, n, k = np.random.default_rng(2), 20, 2304
    raw, (xq, xd) = formats.random_raw(rng, format, n, k), q8_gemv.random_activations(rng, 2, k)
    chains = np.zeros((2, n, 32), np.float32)
    for block, terms in enumerate(block_terms(format, raw, n, xq, xd)):
        chains[:, :, block % 32] = added(chains[:, :, block % 32], terms)
    np.testing.assert_array_equal(multiply(card, format, raw, n, xq, xd), q8_gemv.tree_sum(chains))
