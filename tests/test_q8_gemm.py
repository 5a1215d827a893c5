import numpy as np
import pytest

from kernels import q8_gemm


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("multiply", [q8_gemm.gemm_naive, q8_gemm.gemm_q8_q8])
@pytest.mark.parametrize("case", q8_gemm.CASES, ids=str)
def test_within_the_rounding_bound(card, case, multiply, add):
    q8_gemm.check(card, *case, add, multiply)


def product(card, w, x, multiply=q8_gemm.gemm_q8_q8):
    wq, wd = w
    xq, xd = x
    y = card.alloc((len(xq), len(wq)), np.float32)
    card.poison(y)
    multiply(card, y, *map(card.upload, (wq, wd, xq, xd)), *wq.shape, len(xq))
    return card.download(y)


def test_row_has_the_same_bits_in_any_tile(card):
    """However many rows and columns are multiplied together, with the small tile, the large one or none."""
    rng = np.random.default_rng(1)
    w, (xq, xd) = q8_gemm.random_q8(rng, 150, 416), q8_gemm.random_activations(rng, 130, 416)
    together = product(card, w, (xq, xd))
    np.testing.assert_array_equal(product(card, w, (xq, xd), q8_gemm.gemm_naive), together)
    for first, rows in ((0, 1), (7, 3), (60, 32), (60, 33), (65, 65)):
        part = slice(first, first + rows)
        np.testing.assert_array_equal(product(card, w, (xq[part], xd[part])), together[part])
    few = product(card, (w[0][100:103], w[1][100:103]), (xq, xd))
    np.testing.assert_array_equal(few, together[:, 100:103])


def test_bits_of_the_chain(card):
    """One fma per block of 32 in increasing k: step by step in NumPy."""
    rng = np.random.default_rng(2)
    k = 416
    (wq, wd), (xq, xd) = q8_gemm.random_q8(rng, 70, k), q8_gemm.random_activations(rng, 40, k)
    y = np.zeros((40, 70), np.float32)
    for block in range(k // 32):
        part = slice(32 * block, 32 * block + 32)
        dot = xq[:, part].astype(np.int64) @ wq[:, part].astype(np.int64).T
        scale = xd[:, block, None] * wd[:, block].astype(np.float32)
        # The float64 sum of an exact product and a float32 rounds once more only in its 53rd bit.
        y = (dot * scale.astype(np.float64) + y).astype(np.float32)
    np.testing.assert_array_equal(product(card, (wq, wd), (xq, xd)), y)
