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

import numpy as np
from numba import cuda, float32, uint32

from kernels.intrinsics import float_as_word, load_floats4, silu, store_floats4, store_word
from kernels.quantize import block_scale, quantize_word

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
