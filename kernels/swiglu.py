"""SwiGLU, the activation between the two products of the MLP.

    y = gate / (1 + exp(-gate)) * up

`swiglu_quantize` writes int8 blocks in place of y: the bits of `swiglu` followed by `quantize_q8`
(kernels/quantize.py).

    gate_up  float32 [rows, 2 k]     a row: | gate 0 .. k - 1 | up 0 .. k - 1 |, as one matrix product writes it
    y        float32 [rows, k]       q  int8 [rows, k]      d  float32 [rows, k / 32]

A block of threads takes 512 values of a row. A thread takes 4 neighbouring values with 16-byte accesses; eight lanes
hold one block of the quantisation.

Pipe: fp32, about 30 operations per value (exp and a division), 15 more when quantising. Bytes per value: 12, or 9.1
when quantising. In decode bound by the launch; on long prompts 80 % of copy bandwidth is expected.
"""

from functools import partial

import numpy as np
from numba import cuda, float32, uint32

from kernels.bench import Case, main
from kernels.intrinsics import float_as_word, load_floats4, silu, store_floats4, store_word
from kernels.operands import Quantized
from kernels.quantize import block_scale, check_with_twin, quantize_word

THREADS = 128


def swiglu_reference(gate, up):
    """float64 of the shape of gate and up."""
    gate = np.asarray(gate, np.float64)
    return gate / (1.0 + np.exp(-gate)) * up


@cuda.jit(device=True, inline="always")
def _swiglu4(gate_up, row, column, k):
    at = uint32(row * uint32(k + k) + column)
    g0, g1, g2, g3 = load_floats4(gate_up, at)
    u0, u1, u2, u3 = load_floats4(gate_up, uint32(at + k))
    return silu(g0) * u0, silu(g1) * u1, silu(g2) * u2, silu(g3) * u3


@cuda.jit
def swiglu_kernel(y, gate_up, k):
    row = uint32(cuda.blockIdx.x)
    column = uint32(uint32(cuda.blockIdx.y * uint32(THREADS) + cuda.threadIdx.x) * uint32(4))
    if column < k:
        a, b, c, d = _swiglu4(gate_up, row, column, k)
        store_floats4(y, uint32(row * k + column), a, b, c, d)


@cuda.jit
def swiglu_quantize_kernel(q, d, gate_up, k):
    row = uint32(cuda.blockIdx.x)
    column = uint32(uint32(cuda.blockIdx.y * uint32(THREADS) + cuda.threadIdx.x) * uint32(4))
    y0, y1, y2, y3 = float32(0), float32(0), float32(0), float32(0)
    if column < k:
        y0, y1, y2, y3 = _swiglu4(gate_up, row, column, k)
    w0, w1, w2, w3 = float_as_word(y0), float_as_word(y1), float_as_word(y2), float_as_word(y3)
    scale = block_scale(w0, w1, w2, w3)  # it shuffles, so every lane calls
    if column < k:
        at = uint32(row * k + column)
        store_word(q, at, quantize_word(w0, w1, w2, w3, scale))
        if at & uint32(31) == uint32(0):
            d[uint32(at >> uint32(5))] = scale


@cuda.jit(device=True, forceinline=True)
def finish_unit(q, d, h, buffer, column, block, lane):
    """Takes a column's 32 sums of gate and of up from h, a pair per lane, and stores silu(gate) * up as block `block`
    of (q, d). Eight lanes quantise four values each."""
    at = uint32(uint32(column << uint32(5)) + lane)
    h[buffer, 0, at] = silu(h[buffer, 0, at]) * h[buffer, 1, at]
    cuda.syncwarp()
    at = uint32(uint32(column << uint32(5)) + uint32(uint32(lane & uint32(7)) << uint32(2)))
    w0, w1 = float_as_word(h[buffer, 0, at]), float_as_word(h[buffer, 0, uint32(at + uint32(1))])
    w2, w3 = float_as_word(h[buffer, 0, uint32(at + uint32(2))]), float_as_word(h[buffer, 0, uint32(at + uint32(3))])
    scale = block_scale(w0, w1, w2, w3)
    word = quantize_word(w0, w1, w2, w3, scale)
    if lane < uint32(8):
        store_word(q, uint32(uint32(block << uint32(5)) + uint32(lane << uint32(2))), word)
    if lane == uint32(0):
        d[block] = scale


# ---- launches: they write in place and never allocate -----------------------------------------------------

def _grid(rows, k):
    if k % 32:
        raise ValueError(f"SwiGLU takes rows of a multiple of 32 values, not {k}")
    return rows, -(-k // (4 * THREADS))


def swiglu(card, y, gate_up, rows, k, *, stream=None):
    """y float32 [rows, k] <- silu(gate) * up, both in gate_up float32 [rows, 2 k]; k a multiple of 32."""
    card.launch(swiglu_kernel, _grid(rows, k), THREADS, y.reshape(-1), gate_up.reshape(-1), k, stream=stream)


def swiglu_quantize(card, out, gate_up, rows, k, *, stream=None):
    """out, Quantized [rows, k] <- what `swiglu` gives, quantised."""
    card.launch(swiglu_quantize_kernel, _grid(rows, k), THREADS, *out.flat,
                gate_up.reshape(-1), k, stream=stream)


# ---- check and bench ---------------------------------------------------------------------------------------

CASES = [(1, 32), (3, 320), (33, 544), (2, 17408)]

TOLERANCE = 5 * 2.0 ** -24  # exp 2 roundings, the sum, the division, the product with up


def check(card, rows, k):
    """Checks both kernels on random values; returns the largest relative error."""
    random = np.random.default_rng(k + rows)
    gate, up = (random.standard_normal((rows, k)).astype(np.float32) * scale for scale in (8, 3))
    gate_up = card.upload(np.concatenate([gate, up], axis=1))
    return check_with_twin(card, swiglu_reference(gate, up), TOLERANCE,
                           lambda y: swiglu(card, y, gate_up, rows, k),
                           lambda out: swiglu_quantize(card, out, gate_up, rows, k))


def cases(card):
    """The checks, then times at the shapes of a small and a 27B model."""
    for case in CASES:
        yield Case("{} x {}".format(*case), partial(check, card, *case))
    for rows, k in ((1, 512), (1, 17408), (512, 17408)):
        yield _timed(card, rows, k)


def _timed(card, rows, k):
    gate_up = card.zeros((rows, 2 * k), np.float32)
    out = Quantized(card.alloc((rows, k), np.int8), card.alloc((rows, k // 32), np.float32))
    return Case(f"to int8 {rows} x {k}", launch=partial(swiglu_quantize, card, out, gate_up, rows, k),
                n_bytes=gate_up.nbytes + out.q.nbytes + out.d.nbytes)


if __name__ == "__main__":
    main("SwiGLU", cases)
