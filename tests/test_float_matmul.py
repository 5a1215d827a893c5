import numpy as np
import pytest

from kernels import float_matmul
from kernels.float_matmul import gemm_float, gemv_float
from kernels.formats import FLOATS

KINDS = [kind.dtype for kind in FLOATS.values()]


@pytest.mark.parametrize("multiply", [gemv_float, gemm_float])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", float_matmul.CASES, ids=str)
def test_within_the_rounding_bound(card, case, kind, multiply):
    float_matmul.check(card, *case, kind, multiply)
    float_matmul.check(card, *case, kind, multiply, add=True)


def product(card, w, x, multiply):
    y = card.alloc((len(x), len(w)), np.float32)
    card.poison(y)
    multiply(card, y, len(w), float_matmul.upload_matrix(card, w), card.upload(x), len(x))
    return card.download(y)


@pytest.mark.parametrize("multiply", [gemv_float, gemm_float])
@pytest.mark.parametrize("kind", KINDS)
def test_row_has_the_same_bits_in_any_company(card, kind, multiply):
    rng = np.random.default_rng(1)
    w, x = float_matmul.random_weights(rng, kind, 70, 77), rng.standard_normal((70, 77), np.float32)
    together = product(card, w, x, multiply)
    for first, rows in ((0, 1), (7, 2), (3, 3), (60, 8), (1, 65)):
        part = slice(first, first + rows)
        np.testing.assert_array_equal(product(card, w, x[part], multiply), together[part])
    np.testing.assert_array_equal(product(card, w[65:68], x, multiply), together[:, 65:68])
