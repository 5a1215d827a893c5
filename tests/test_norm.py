import numpy as np
import pytest

from kernels import norm
from kernels.operands import Quantized
from tests.oracle import oracle_npz


@pytest.mark.parametrize("case", norm.CASES, ids=str)
def test_norms_equal_the_reference(card, case):
    norm.check(card, *case)


def test_a_row_has_the_same_bits_alone_and_in_a_batch(card):
    x, w = np.random.default_rng(0).standard_normal((9, 1056)).astype(np.float32), np.ones(1056, np.float32)
    y, alone = card.alloc(x.shape, x.dtype), card.alloc((1, 1056), x.dtype)
    x, w = card.upload(x), card.upload(w)
    norm.rms_norm(card, y, norm.NormInput(x, w, 1e-6), 9, 1056)
    norm.rms_norm(card, alone, norm.NormInput(x[7:8], w, 1e-6), 1, 1056)
    np.testing.assert_array_equal(card.download(y)[7:8], card.download(alone))


@pytest.mark.parametrize("n_warps", [1, 2, 9, 32])
def test_a_quantised_row_has_the_same_bits_with_any_number_of_warps(card, n_warps):
    rows, k = 3, 1056  # 3 parts for the sum, 9 groups of 128
    x, w = np.random.default_rng(1).standard_normal((2, rows, k)).astype(np.float32)
    x, w = card.upload(x), card.upload(w[0])
    want, got = (Quantized(card.alloc((rows, k), np.int8), card.alloc((rows, k // 32), np.float32)) for _ in range(2))
    for array in (*want, *got):
        card.poison(array)
    norm.rms_norm_quantize(card, want, norm.NormInput(x, w, 1e-6), rows, k)
    card.launch(norm.rms_norm_quantize_kernel, rows, 32 * n_warps, got.q.reshape(-1), got.d.reshape(-1), x.reshape(-1),
                w, k, 1e-6)
    for a, b in zip(got, want):
        np.testing.assert_array_equal(card.download(a), card.download(b))


def test_zeros_stay_zeros_and_nan_stays_visible(card):
    x = np.zeros((2, 64), np.float32)
    x[1, 5] = np.nan
    q, d = card.alloc((2, 64), np.int8), card.alloc((2, 2), np.float32)
    card.poison(q), card.poison(d)
    given = norm.NormInput(card.upload(x), card.upload(np.ones(64, np.float32)), 1e-6)
    norm.rms_norm_quantize(card, Quantized(q, d), given, 2, 64)
    q, d = card.download(q), card.download(d)
    assert not q[0].any() and not d[0].any() and np.isnan(d[1]).all()


def test_rows_too_long_are_refused(card):
    with pytest.raises(ValueError, match="16384"):
        norm.rms_norm(card, None, norm.NormInput(None, None, 1e-6), 1, 16388)


def test_gated_norm_of_the_reference_model(card):
    z = oracle_npz("operators")
    inputs, want = (z["gdn_out"][:40], z["gatednorm_z"], z["gatednorm_weight"]), z["gatednorm_out"]
    y = card.alloc(want.shape, np.float32)
    card.poison(y)
    o, gate, w = map(card.upload, inputs)
    norm.gated_norm(card, y, norm.GatedInput(o, gate, 512, 4, w, 1e-6), 40)
    np.testing.assert_allclose(card.download(y), want, rtol=1e-5, atol=1e-6 * np.abs(want).max())
