"""SwiGLU and the residual addition: what the forward pass does to single values.

    swiglu   y = gate / (1 + exp(-gate)) * up
    add      x = x + y

`swiglu_quantize` writes int8 blocks instead of y: the bits of `swiglu` followed by `quantize_q8`
(kernels/quantize.py).

    gate, up, x, y  float32 [rows, k]      q  int8 [rows, k]      d  float32 [rows, k / 32]

Rows lie one after another and k is a multiple of 32, so a launch sees one long row; a thread takes 4
neighbouring values with 16-byte accesses, and eight lanes hold a block of the quantisation.

Pipe: fp32, about 30 operations per value of SwiGLU (exp and a division), 15 more when quantising. Bytes per
value: 12, or 9.1 when quantising. In decode bound by the launch; on long prompts 80 % of copy bandwidth is
expected.
"""

from functools import partial

import numpy as np
from numba import cuda, float32, uint32

from kernels.bench import Case, main
from kernels.intrinsics import float_as_word, load_floats4, silu, store_floats4, store_word
from kernels.quantize import block_scale, quantize_q8, quantize_word

THREADS = 128


def swiglu_reference(gate, up):
    """float64 of the shape of gate and up."""
    gate = np.asarray(gate, np.float64)
    return gate / (1.0 + np.exp(-gate)) * up


@cuda.jit(device=True, inline="always")
def _swiglu4(gate, up, at):
    g0, g1, g2, g3 = load_floats4(gate, at)
    u0, u1, u2, u3 = load_floats4(up, at)
    return silu(g0) * u0, silu(g1) * u1, silu(g2) * u2, silu(g3) * u3


@cuda.jit
def swiglu_kernel(y, gate, up, n):
    at = uint32(uint32(cuda.blockIdx.x * uint32(THREADS) + cuda.threadIdx.x) * uint32(4))
    if at < n:
        a, b, c, d = _swiglu4(gate, up, at)
        store_floats4(y, at, a, b, c, d)


@cuda.jit
def swiglu_quantize_kernel(q, d, gate, up, n):
    at = uint32(uint32(cuda.blockIdx.x * uint32(THREADS) + cuda.threadIdx.x) * uint32(4))
    y0, y1, y2, y3 = float32(0), float32(0), float32(0), float32(0)
    if at < n:
        y0, y1, y2, y3 = _swiglu4(gate, up, at)
    w0, w1, w2, w3 = float_as_word(y0), float_as_word(y1), float_as_word(y2), float_as_word(y3)
    scale = block_scale(w0, w1, w2, w3)  # shuffles: every lane takes part
    if at < n:
        store_word(q, at, quantize_word(w0, w1, w2, w3, scale))
        if at & uint32(31) == uint32(0):
            d[uint32(at >> uint32(5))] = scale


@cuda.jit
def add_kernel(x, y, n):
    at = uint32(uint32(cuda.blockIdx.x * uint32(THREADS) + cuda.threadIdx.x) * uint32(4))
    if at < n:
        a, b, c, d = load_floats4(x, at)
        e, f, g, h = load_floats4(y, at)
        store_floats4(x, at, a + e, b + f, c + g, d + h)


# ---- launches: written in place, none allocates ------------------------------------------------------------

def _blocks(n):
    if n % 4:
        raise ValueError(f"elementwise kernels take values by fours, got {n}")
    return -(-n // (4 * THREADS))


def swiglu(card, y, gate, up, rows, k, stream=None):
    """y float32 [rows, k] <- silu(gate) * up; rows * k a multiple of 4."""
    n = rows * k
    card.launch(swiglu_kernel, _blocks(n), THREADS, y.reshape(-1), gate.reshape(-1), up.reshape(-1), n,
                stream=stream)


def swiglu_quantize(card, q, d, gate, up, rows, k, stream=None):
    """q int8 [rows, k], d float32 [rows, k / 32] <- silu(gate) * up, quantised; k a multiple of 32."""
    n = rows * k
    card.launch(swiglu_quantize_kernel, _blocks(n), THREADS, q.reshape(-1), d.reshape(-1), gate.reshape(-1),
                up.reshape(-1), n, stream=stream)


def add(card, x, y, n, stream=None):
    """x float32 [n] += y float32 [n]; n a multiple of 4."""
    card.launch(add_kernel, _blocks(n), THREADS, x.reshape(-1), y.reshape(-1), n, stream=stream)


# ---- check and bench ---------------------------------------------------------------------------------------

CASES = [("swiglu", 1, 32), ("swiglu", 3, 320), ("swiglu", 33, 544), ("swiglu", 2, 17408),
         ("add", 1, 32), ("add", 7, 5120)]

TOLERANCE = 5 * 2.0 ** -24  # exp 2 roundings, the sum, the division, the product with up


def check(card, case):
    """case = (kind, rows, k): float output against float64, int8 output against the quantised float output;
    one row too many must stay poisoned. Returns the largest relative error."""
    kind, rows, k = case
    random = np.random.default_rng(k + rows)
    a, b = (random.standard_normal((rows + 1, k)).astype(np.float32) * scale for scale in (8, 3))
    a[rows] = np.nan
    x, y = card.upload(a), card.upload(b)
    if kind == "add":
        add(card, x, y, rows * k)
        got = card.download(x)
        np.testing.assert_array_equal(got, np.concatenate([a[:rows] + b[:rows], a[rows:]]))
        return 0.0
    out, q = card.alloc(a.shape, np.float32), card.alloc(a.shape, np.int8)
    d = card.alloc((rows + 1, k // 32), np.float32)
    want_q, want_d = card.alloc((rows, k), np.int8), card.alloc((rows, k // 32), np.float32)
    for output in (out, q, d, want_q, want_d):
        card.poison(output)
    swiglu(card, out, x, y, rows, k)
    swiglu_quantize(card, q, d, x, y, rows, k)
    quantize_q8(card, want_q, want_d, out, rows, k)
    want = swiglu_reference(a, b)[:rows]
    got, got_q, got_d = card.download(out), card.download(q), card.download(d)
    np.testing.assert_allclose(got[:rows], want, rtol=TOLERANCE, atol=1e-36)
    np.testing.assert_array_equal(got_q[:rows], card.download(want_q))
    np.testing.assert_array_equal(got_d[:rows], card.download(want_d))
    assert np.isnan(got[rows]).all() and (got_q[rows] == -1).all() and np.isnan(got_d[rows]).all(), "wrote on"
    return np.max(np.abs(got[:rows] - want) / np.abs(want))


def cases(card):
    """The checks, then times at the shapes of a small and a 27B model."""
    for case in CASES:
        yield Case("{} {} x {}".format(*case), partial(check, card, case))
    for rows, k in ((1, 512), (1, 17408), (512, 17408)):
        yield _timed(card, rows, k)


def _timed(card, rows, k):
    gate, up = card.zeros((rows, k), np.float32), card.zeros((rows, k), np.float32)
    q, d = card.alloc((rows, k), np.int8), card.alloc((rows, k // 32), np.float32)
    launch = partial(swiglu_quantize, card, q, d, gate, up, rows, k)
    return Case(f"swiglu to int8 {rows} x {k}", launch=launch,
                n_bytes=gate.nbytes + up.nbytes + q.nbytes + d.nbytes)


if __name__ == "__main__":
    main("SwiGLU and addition", cases)
