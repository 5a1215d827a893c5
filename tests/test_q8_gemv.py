import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from kernels import q8_gemv
from kernels.formats import FORMATS
from kernels.quant_gemv import decoder


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("case", q8_gemv.CASES, ids=str)
def test_within_the_rounding_bound(card, case, add):
    q8_gemv.check(card, *case, add)


@pytest.mark.parametrize("case", q8_gemv.FUSED_CASES, ids=str)
def test_fused_kernels_have_the_bits_of_the_separate_ones(card, case):
    q8_gemv.check_fused(card, *case)


@pytest.mark.parametrize("case", [(500, 1024, 8), (33, 2080, 1), (1, 32, 1), (33, 2592, 1), (33, 3584, 1)], ids=str)
def test_shapes_of_real_cards(card, case, monkeypatch):
    """The kernels that keep weights in flight, on every card: for few SMs and for many, with some of them left to the
    next launch and with none."""
    monkeypatch.setattr(card, "kind", "cuda")
    for n_sms, overlap in itertools.product((2, 132), (False, True)):
        monkeypatch.setattr(card, "n_sms", n_sms)
        monkeypatch.setattr(q8_gemv, "launches_overlap", lambda cc: overlap)
        q8_gemv.check(card, *case)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n, k", [(1024, 2048), (1024, 3584), (2560, 9216), (4096, 4096), (5120, 6144), (40_000, 4096)])
def test_processors_are_left_to_the_next_launch(name, n, k):
    w_decoder, kind, n_sms = decoder(FORMATS[name]), "cuda", 132

    def blocks(cc, columns=1):
        card = SimpleNamespace(kind=kind, n_sms=n_sms, cc=cc)
        return q8_gemv._n_blocks(card, w_decoder, n, k, columns, q8_gemv.shape_for(card, w_decoder, columns, k))

    def rounds(n_blocks):
        return -(-n // (shape.rows * shape.warps * n_blocks))

    shape, found = q8_gemv.shape_for(SimpleNamespace(kind=kind), w_decoder, 1, k), blocks((9, 0))
    if rounds(n_sms) == 1 and k // 32 // w_decoder.tile <= shape.depth:     # all weights in flight at once
        assert found == 80
    else:                                                           # no further round, and a fifth of one to spare
        assert found == n_sms or 80 <= found and n / (shape.rows * shape.warps * found) <= rounds(n_sms) - 0.2
    assert blocks((7, 0)) == blocks((9, 0), columns=2) == n_sms


@pytest.mark.parametrize("case", [(96, 2080, 1)], ids=str)
def test_fused_shapes_of_real_cards(card, case, monkeypatch):
    monkeypatch.setattr(card, "kind", "cuda")
    q8_gemv.check_fused(card, *case)


def multiply(card, w, x):
    n, columns = len(w[0]), len(x[0])
    y = card.alloc((columns, n), np.float32)
    card.poison(y)
    q8_gemv.gemv_q8_q8(card, y, n, *q8_gemv.upload_q8(card, w, x), columns)
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
