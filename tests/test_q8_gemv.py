import numpy as np
import pytest

from kernels import q8_gemv


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("case", q8_gemv.CASES, ids=str)
def test_within_the_rounding_bound(card, case, add):
    q8_gemv.check(card, *case, add)


@pytest.mark.parametrize("case", q8_gemv.FUSED_CASES, ids=str)
def test_fused_kernels_have_the_bits_of_the_separate_ones(card, case):
    q8_gemv.check_fused(card, *case)


@pytest.mark.parametrize("case", [(500, 1024, 8), (33, 2080, 1), (1, 32, 1), (33, 2592, 1), (33, 3584, 1)], ids=str)
def test_shapes_of_real_cards(card, case, monkeypatch):
    """The kernels with weights under way, on every card; for few SMs and for many."""
    monkeypatch.setattr(card, "kind", "cuda")
    for n_sms in (2, 132):
        monkeypatch.setattr(card, "n_sms", n_sms)
        q8_gemv.check(card, *case)


@pytest.mark.parametrize("case", [(96, 2080, 1)], ids=str)
def test_fused_shapes_of_real_cards(card, case, monkeypatch):
    monkeypatch.setattr(card, "kind", "cuda")
    q8_gemv.check_fused(card, *case)


def multiply(card, w, x):
    wq, wd = w
    xq, xd = x
    y = card.alloc((len(xq), len(wq)), np.float32)
    card.poison(y)
    q8_gemv.gemv_q8_q8(card, y, len(wq), *map(card.upload, (wq, wd, xq, xd)), *wq.shape, len(xq))
    return card.download(y)


def test_column_has_the_same_bits_in_any_company(card):
    rng = np.random.default_rng(1)
    w, (xq, xd) = q8_gemv.random_q8(rng, 37, 1568), q8_gemv.random_activations(rng, 19, 1568)
    together = multiply(card, w, (xq, xd))
    for columns in range(1, 10):
        part = slice(5, 5 + columns)
        np.testing.assert_array_equal(multiply(card, w, (xq[part], xd[part])), together[part])


def test_row_has_the_same_bits_in_any_matrix(card):
    rng = np.random.default_rng(2)
    (wq, wd), x = q8_gemv.random_q8(rng, 37, 576), q8_gemv.random_activations(rng, 2, 576)
    whole = multiply(card, (wq, wd), x)
    np.testing.assert_array_equal(multiply(card, (wq[5:12], wd[5:12]), x), whole[:, 5:12])


@pytest.mark.parametrize("k", [64, 256, 1024, 1120])
def test_bits_of_the_tree(card, k):
    """Pieces of 16, then of 8 weights dealt to 32 lanes, a lane a chain of fma; the butterfly: in NumPy."""
    rng = np.random.default_rng(3)
    (wq, wd), (xq, xd) = q8_gemv.random_q8(rng, 40, k), q8_gemv.random_activations(rng, 3, k)
    lanes = np.zeros((3, 40, 32), np.float32)
    whole = k - k % 512
    pieces = [(start, 16) for start in range(0, whole, 16)] + [(start, 8) for start in range(whole, k, 8)]
    for start, size in pieces:
        part, lane = slice(start, start + size), start % (32 * size) // size
        dot = xq[:, part].astype(np.int64) @ wq[:, part].astype(np.int64).T
        scale = xd[:, start // 32, None] * wd[:, start // 32].astype(np.float32)
        # The float64 sum of an exact product and a float32 rounds once more only in its 53rd bit.
        lanes[:, :, lane] = dot * scale.astype(np.float64) + lanes[:, :, lane]
    for distance in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[:, :, np.arange(32) ^ distance]
    np.testing.assert_array_equal(multiply(card, (wq, wd), (xq, xd)), lanes[:, :, 0])
