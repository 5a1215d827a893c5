from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from kernels import float_matmul
from kernels.float_matmul import EMULATED, SHAPES, TALLEST, each_of, gemm_float, gemv_float, shape_of
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


def unaligned(card, x):
    """x on the card, 4 bytes behind a multiple of 16."""
    flat = card.alloc(x.size + 1, np.float32)
    card.copy_in(flat[1:], x.reshape(-1))
    return flat[1:].reshape(x.shape)


@pytest.mark.parametrize("shape, kind", [*((shape, np.float32) for shape in SHAPES),
                                         *((TALLEST, kind) for kind in KINDS if kind != np.float32)], ids=str)
def test_all_shapes_have_the_same_bits(card, shape, kind):
    """Whether threads load 4 elements at once or one. What is stored is widened by functions that know no shape."""
    for n, k, rows in (1, 4, 1), (257, 96, 70), (33, 71, 2), (50, 132, 33):
        rng = np.random.default_rng((n, k))
        w, x = float_matmul.random_weights(rng, kind, n, k), rng.standard_normal((rows, k), np.float32)
        want = product(card, w, x, partial(gemm_float, shape=EMULATED))
        np.testing.assert_array_equal(product(card, w, x, partial(gemm_float, shape=shape)), want)
        matrix, x, y = float_matmul.upload_matrix(card, w), unaligned(card, x), card.alloc((rows, n), np.float32)
        assert each_of(matrix, x) == 1
        card.poison(y)
        gemm_float(card, y, n, matrix, x, rows, shape=shape)
        np.testing.assert_array_equal(card.download(y), want)


def test_threads_load_four_elements_where_rows_allow_it(card):
    w, x = np.zeros((3, 8), np.float32), card.zeros((2, 8), np.float32)
    assert each_of(float_matmul.upload_matrix(card, w), x) == 4
    assert each_of(float_matmul.upload_matrix(card, w).rows(1, 3), x[1:]) == 4
    assert each_of(float_matmul.upload_matrix(card, w[:, :7].copy()), x) == 1


@pytest.mark.parametrize("shape", [*SHAPES, EMULATED], ids=str)
@pytest.mark.parametrize("k", [31, 32, 64])
def test_a_sum_that_underflows_is_positive_zero(card, shape, k):
    """However many zeros follow in the last tile."""
    w, x = np.full((3, k), 2.0**-100, np.float32), np.full((2, k), -2.0**-100, np.float32)
    y = product(card, w, x, partial(gemm_float, shape=shape))
    assert not y.any() and not np.signbit(y).any()


def test_tiles_are_chosen_to_fill_the_card():
    card = SimpleNamespace(kind="cuda", n_sms=132)
    for rows in 297, 924, 1848, 4620:
        shape = shape_of(card, 257, rows)
        n_blocks = float_matmul.block_count(257, rows, shape)
        rounds = -(-n_blocks // card.n_sms)
        assert n_blocks > 0.65 * rounds * card.n_sms, (rows, shape)
    assert shape_of(card, 257, 297) != shape_of(card, 4096, 4620)
    assert shape_of(SimpleNamespace(kind="emulated", n_sms=2), 257, 924) == EMULATED
