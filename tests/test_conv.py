import numpy as np
import pytest

from kernels import conv
from kernels.records import Places, Projected
from tests.oracle import oracle_npz


@pytest.mark.parametrize("case", conv.CASES, ids=str)
def test_equals_the_reference(card, case):
    conv.check(card, case)


@pytest.mark.parametrize("cuts", [[1] * 29, [2, 1, 26], [8, 21], [17, 3, 9]], ids=str)
def test_bits_do_not_depend_on_the_cut(card, cuts):
    random, (rows, channels) = np.random.default_rng(0), (29, 96)
    x = card.upload(random.standard_normal((rows, channels)).astype(np.float32))
    w = card.upload(random.standard_normal((channels, 4)).astype(np.float32))
    slot, positions = card.zeros(rows, np.int32), card.upload(np.arange(rows, dtype=np.int32))

    def run(cuts):
        y, ring = card.alloc((rows, channels), np.float32), card.zeros((1, 4, channels), np.float32)
        card.poison(y)
        start = 0
        for length in cuts:
            part = slice(start, start + length)
            conv.conv_silu(card, y[part], Projected(x[part].reshape(-1), channels), ring, w,
                           Places(slot, positions[part]), length, channels)
            start += length
        return card.download(y), card.download(ring)

    for got, want in zip(run(cuts), run([rows])):
        np.testing.assert_array_equal(got, want)


def test_convolution_of_the_reference_model(card):
    z = oracle_npz("operators")
    x, w = z["conv_in"], z["conv_weight"]
    want = np.concatenate([z[name][:40].reshape(40, -1) for name in ("gdn_q", "gdn_k", "gdn_v")], axis=1)
    y, ring = card.alloc(want.shape, np.float32), card.zeros((1, 4, 1024), np.float32)
    card.poison(y)
    zeros = card.zeros(40, np.int32)
    conv.conv_silu(card, y, Projected(card.upload(x).reshape(-1), 1024), ring, card.upload(w), Places(zeros, zeros),
                   40, 1024)
    np.testing.assert_allclose(card.download(y), want, rtol=1e-5, atol=1e-6 * np.abs(want).max())
    np.testing.assert_array_equal(card.download(ring)[0], x[36:])
