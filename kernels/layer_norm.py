"""LayerNorm of float32 rows, written in half precision: what enters the products of a vision tower.

    y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * w + b        over a row of k

    x  float32 [rows, k]     w, b  float32 [k]     y  float16 [rows, k]     k a multiple of 4

A warp takes a row and reads it three times: for the mean, for the mean square of what differs from it, and for the
result. The second and third time the row comes from the L1 cache. Lane l adds elements 4 l .. 4 l + 3 of each group of
128, group after group; a butterfly adds the lanes. So a row's bits depend on that row alone.

Pipe: fp32, about 10 operations per value. Bytes per value: 6. Bound by memory.
"""

from functools import partial

import numpy as np
from numba import cuda
from numba.types import float32, uint32

from kernels.bench import Case, main
from kernels.half_gemm import store_halves
from kernels.intrinsics import div_rn, load_floats4, rsqrt, warp_sum

WARPS = 4
GROUP = 128              # elements of a row that a warp loads at once


def layer_norm_reference(x, w, b, eps):
    """x [..., k], w and b [k] -> float64 [..., k]."""
    x = np.asarray(x, np.float64)
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * w + b


@cuda.jit
def layer_norm_kernel(y, x, w, b, k, n_rows, eps):
    row = uint32(uint32(cuda.blockIdx.x) * uint32(WARPS) + uint32(cuda.threadIdx.y))
    first = uint32(uint32(cuda.threadIdx.x) << uint32(2))
    if row >= n_rows:
        return
    at, n_groups = uint32(row * k), uint32(uint32(k + uint32(GROUP - 1)) // uint32(GROUP))
    total = float32(0.0)
    for g in range(n_groups):
        i = uint32(uint32(g) * uint32(GROUP) + first)
        if i < k:
            x0, x1, x2, x3 = load_floats4(x, uint32(at + i))
            total = total + ((x0 + x1) + (x2 + x3))
    mean = div_rn(warp_sum(total), float32(k))
    total = float32(0.0)
    for g in range(n_groups):
        i = uint32(uint32(g) * uint32(GROUP) + first)
        if i < k:
            x0, x1, x2, x3 = load_floats4(x, uint32(at + i))
            x0, x1, x2, x3 = x0 - mean, x1 - mean, x2 - mean, x3 - mean
            total = cuda.fma(x3, x3, cuda.fma(x2, x2, cuda.fma(x1, x1, cuda.fma(x0, x0, total))))
    scale = rsqrt(div_rn(warp_sum(total), float32(k)) + eps)
    for g in range(n_groups):
        i = uint32(uint32(g) * uint32(GROUP) + first)
        if i < k:
            x0, x1, x2, x3 = load_floats4(x, uint32(at + i))
            w0, w1, w2, w3 = load_floats4(w, i)
            b0, b1, b2, b3 = load_floats4(b, i)
            y0, y1 = cuda.fma((x0 - mean) * scale, w0, b0), cuda.fma((x1 - mean) * scale, w1, b1)
            y2, y3 = cuda.fma((x2 - mean) * scale, w2, b2), cuda.fma((x3 - mean) * scale, w3, b3)
            store_halves(y, uint32(at + i), y0, y1, y2, y3)


# ---- launches: they write in place and never allocate -----------------------------------------------------

def layer_norm(card, y, x, weight, bias, rows, eps, *, stream=None):
    """y float16 [rows, k] <- LayerNorm of x float32 [rows, k]; both may have more rows. weight, bias: float32 [k]."""
    k = weight.size
    if k % 4:
        raise ValueError(f"LayerNorm takes rows of a multiple of 4 values, not {k}")
    card.launch(layer_norm_kernel, -(-rows // WARPS), (32, WARPS), y.reshape(-1), x.reshape(-1), weight, bias, k, rows,
                float(eps), stream=stream)


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [(4, 1), (144, 5), (1152, 33), (1160, 3), (8192, 2)]       # k, rows


def check(card, k, rows):
    """Random rows far from 0; y is poisoned, and has a row too many. Returns the largest error as a fraction of what
    the rounding to half precision and 2^-20 of the largest value may do."""
    rng = np.random.default_rng(k + rows)
    x = (rng.standard_normal((rows, k)) * 3 + rng.uniform(-20, 20, (rows, 1))).astype(np.float32)
    w, b = rng.uniform(0.5, 1.5, k).astype(np.float32), rng.standard_normal(k).astype(np.float32)
    y = card.alloc((rows + 1, k), np.float16)
    card.poison(y)
    layer_norm(card, y, card.upload(x), card.upload(w), card.upload(b), rows, 1e-6)
    got, want = card.download(y), layer_norm_reference(x, w, b, 1e-6)
    assert np.isnan(got[rows]).all(), "wrote elsewhere"
    error = (np.abs(got[:rows] - want) / (np.abs(want) * 2.0 ** -11 + 2.0 ** -20 * np.abs(x).max() + 2.0 ** -24)).max()
    assert error <= 1, f"error {error}"
    return error


def cases(card):
    """The checks, then the time of a picture of 2,304 patches."""
    for case in CASES:
        yield Case("rows of {}, {} rows".format(*case), partial(check, card, *case))
    x, y, w = card.zeros((2304, 1152), np.float32), card.zeros((2304, 1152), np.float16), card.zeros(1152, np.float32)
    yield Case("time of 2304 rows of 1152", launch=partial(layer_norm, card, y, x, w, w, 2304, 1e-6),
               n_bytes=x.nbytes + y.nbytes)


if __name__ == "__main__":
    main("LayerNorm", cases)
