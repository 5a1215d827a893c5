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


@pytest.mark.parametrize("case", [(500, 1024, 8), (33, 2080, 1), (1, 32, 1), (33, 2592, 1), (33, 3584, 1),
                                  (33, 3584, 4), (40, 2080, 2), (40, 8736, 3), (40, 8192, 4), (30, 8192, 8)], ids=str)
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
        return q8_gemv._n_blocks(card, w_decoder, n, k, columns,
                                 q8_gemv.shape_for(card, w_decoder, columns, k, n=n))

    def rounds(n_blocks):
        return -(-n // (shape.rows * shape.warps * n_blocks))

    shape, found = q8_gemv.shape_for(SimpleNamespace(kind=kind, n_sms=n_sms), w_decoder, 1, k, n=n), blocks((9, 0))
    if rounds(n_sms) == 1 and -(-k // 1024) <= shape.depth:     # all weights in flight at once
        assert found == 80
    else:                                                           # no further round, and a fifth of one to spare
        assert found == n_sms or 80 <= found and n / (shape.rows * shape.warps * found) <= rounds(n_sms) - 0.2
    assert blocks((7, 0)) == blocks((9, 0), columns=2) == n_sms


@pytest.mark.parametrize("case", [(96, 2080, 1), (64, 2080, 2)], ids=str)
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


@pytest.mark.parametrize("k", [64, 256, 1024, 1120, 3584])
def test_bits_of_the_tree(card, k):
    """Two blocks of each chain, and chains that the row's end leaves empty."""
    rng = np.random.default_rng(3)
    w, x = q8_gemv.random_q8(rng, 40, k), q8_gemv.random_activations(rng, 3, k)
    np.testing.assert_array_equal(multiply(card, w, x), q8_gemv.tree_reference(*w, *x))


def test_the_reference_adds_in_the_order_of_the_tree():
    """Chains 0, 8, 16 and 24 one after the other, then pairs 4, 2 and 1 apart: in other orders the ones are lost."""
    one, large = np.float32(1), np.float32(2**24)
    for terms, want in (({0: large, 8: one, 16: one}, large), ({0: one, 8: one, 16: large}, large + 2),
                        ({16: one, 24: one, 0: large}, large), ({0: large, 1: one, 5: one}, large + 2),
                        ({0: large, 4: one, 2: one, 6: one}, large + 2), ({0: large, 2: one, 3: one}, large)):
        chains = np.zeros(32, np.float32)
        chains[list(terms)] = list(terms.values())
        assert q8_gemv.tree_sum(chains) == want


@pytest.mark.parametrize("sign", [1, -1])
def test_fused_multiplication_of_the_reference_rounds_once(sign):
    """a * b is half a unit of c, less 2**-70. In float64 the sum is a tie, which float32 rounds to an even number."""
    a, b, c = sign * (1 - 2.0**-23) * 2.0**-24, 1 + 2.0**-23, 1 + 2.0**-23
    assert np.float32(a * b + c) != c
    assert q8_gemv.fma_reference(*np.float32([a, b, c])) == c
