"""RMSNorm, plain and gated, with float32 or int8 output.

    rms_norm     y = w x / sqrt(mean(x^2) + eps)                     over a row of k
    gated_norm   y = w o / sqrt(mean(o^2) + eps) * silu(z)           over each head of 128

The `_quantize` forms write int8 blocks for the integer matrix products in place of y. They give the bits of the plain
form followed by `quantize_q8` (kernels/quantize.py), but y does not pass through memory.

    x, y, o, z  float32 [rows, k], heads side by side in a row (k = 128 n_heads); rows of z may be further apart,
                `z_stride` numbers, where a product wrote z next to other results
    w           float32 [k], or [128] for the gated norm, the same for all heads
    q           int8 [rows, k]      d  float32 [rows, k / 32]

A block of threads takes a row. Each warp takes 512 consecutive values of the row and keeps them in registers between
the sum and the product:

    value of the part    0..3    4..7    ...  124..127   |  128..131  ...          4 groups of 128
    lane                  0       1              31      |     0                   16-byte accesses

The quantising form of rms_norm computes the same sum. For the product it reads the values again, and warp w of W takes
groups w, w + W, ... of 128. So all warps share the divisions, even where there are more warps than the row has parts:
in launches of few rows, and where kernels/q8_gemv.py computes the norm inside a product.

The sum of squares has one fixed tree for a given k: a lane adds its 16 squares one after another, a butterfly adds the
lanes, another butterfly the warps. A head of the gated norm is one group, so it takes one warp and no barrier.

Pipe: fp32, a few operations per value (about 15 when quantising). Bytes per value: 8, or 5.1 when quantising; the gated
form reads 4 more. Rows of 5,120 values take a few microseconds in decode, bound by latency; on long prompts about 80 %
of copy bandwidth is expected.
"""

from functools import cache, partial
from typing import NamedTuple

import numpy as np
from numba import cuda, float32, uint32

from kernels.bench import Case, main
from kernels.card import Array
from kernels.intrinsics import (div_rn, float_as_word, let_next_begin, load_floats4, rsqrt, silu,
                                store_floats4, store_word, wait_for_previous, warp_sum)
from kernels.operands import Quantized
from kernels.quantize import block_scale, check_with_twin, quantize_word

GROUP = 128               # values that a warp loads at once, and the width of a gated head
GROUPS = 4                # groups that a warp keeps in registers
PART = GROUP * GROUPS     # values of a row per warp
VALUES = PART // 32       # values of a row per lane
MAX_WARPS = 32            # of a block of threads, hence rows of at most 16,384
WEIGHTS = GROUPS, 4       # norm weights that a lane of rms_norm_quantize_kernel holds
STEP_ROWS = 64            # with so many rows or fewer, the time of one row is the time of the launch
GATED_WARPS = 4           # warps of a block of threads of the gated norm, each with a head


class NormInput(NamedTuple):
    """What an RMSNorm reads."""

    values: Array         # float32 [rows, k]
    weight: Array         # float32 [k]
    eps: float


class GatedInput(NamedTuple):
    """What a gated norm reads."""

    o: Array              # float32 [rows, n_heads, 128]
    z: Array              # float32, n_heads * 128 gates of each row, `z_stride` numbers from one row to the next
    z_stride: int
    n_heads: int
    weight: Array         # float32 [128]
    eps: float


# ---- reference ---------------------------------------------------------------------------------------------

def rms_norm_reference(x, w, eps):
    """x [..., k], w [k] -> float64 [..., k]."""
    x = np.asarray(x, np.float64)
    return w * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def gated_norm_reference(o, z, w, eps):
    """o, z [rows, n_heads, 128], w [128] -> float64 of the same shape."""
    z = np.asarray(z, np.float64)
    return rms_norm_reference(o, w, eps) * z / (1.0 + np.exp(-z))


# ---- kernels -----------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def store_quantized(q, d, at, inside, y0, y1, y2, y3):
    """Stores one group of 128 values, 4 per lane, as int8 blocks. All lanes call; those that are not `inside` pass
    zeros and store nothing."""
    w0, w1, w2, w3 = float_as_word(y0), float_as_word(y1), float_as_word(y2), float_as_word(y3)
    scale = block_scale(w0, w1, w2, w3)
    if inside:
        store_word(q, at, quantize_word(w0, w1, w2, w3, scale))
        if at & uint32(31) == uint32(0):
            d[uint32(at >> uint32(5))] = scale


@cuda.jit(device=True, forceinline=True)
def store_plain(y, unused, at, inside, y0, y1, y2, y3):
    """Has the parameters of `store_quantized`, but stores float32 values; without a second array."""
    if inside:
        store_floats4(y, at, y0, y1, y2, y3)


@cuda.jit(device=True, inline="always")
def load_part(values, x, row, start, lane, k):
    """Loads the warp's part of a row into registers, with zeros past the end of the row. Returns the sum of squares of
    the part, on every lane."""
    total = float32(0)
    for j in range(uint32(GROUPS)):
        i = uint32(start + j * uint32(GROUP) + lane * uint32(4))
        a, b, c, d = float32(0), float32(0), float32(0), float32(0)
        if i < k:
            a, b, c, d = load_floats4(x, uint32(row * k + i))
        total = cuda.fma(d, d, cuda.fma(c, c, cuda.fma(b, b, cuda.fma(a, a, total))))
        to = uint32(j * uint32(4))
        values[to], values[uint32(to + uint32(1))] = a, b
        values[uint32(to + uint32(2))], values[uint32(to + uint32(3))] = c, d
    return warp_sum(total)


@cuda.jit(device=True, inline="always")
def block_sum(partial, total, lane, warp):
    """Sums one number per warp over the block of threads; every thread gets the sum. partial: shared float32
    [MAX_WARPS]."""
    n_warps = uint32(cuda.blockDim.x // uint32(32))
    if n_warps > uint32(1):
        partial[warp] = total
        cuda.syncthreads()
        total = warp_sum(partial[lane] if lane < n_warps else float32(0))
    return total


@cuda.jit(device=True, inline="always")
def scaled4(values, j, scale, w, i):
    """The lane's values of group j, times scale, times their weights, which start at w[i]."""
    a, b, c, d = load_floats4(w, i)
    at = uint32(j * uint32(4))
    return (values[at] * scale * a, values[uint32(at + uint32(1))] * scale * b,
            values[uint32(at + uint32(2))] * scale * c, values[uint32(at + uint32(3))] * scale * d)


@cuda.jit
def rms_norm_kernel(y, x, w, k, eps):
    row, lane, warp = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x & 31), uint32(cuda.threadIdx.x >> 5)
    start = uint32(warp * uint32(PART))
    values = cuda.local.array(VALUES, float32)
    partial = cuda.shared.array(MAX_WARPS, float32)
    total = block_sum(partial, load_part(values, x, row, start, lane, k), lane, warp)
    scale = rsqrt(div_rn(total, float32(k)) + eps)
    for j in range(uint32(GROUPS)):
        i = uint32(start + j * uint32(GROUP) + lane * uint32(4))
        if i < k:
            a, b, c, d = scaled4(values, j, scale, w, i)
            store_floats4(y, uint32(row * k + i), a, b, c, d)


@cuda.jit(device=True, forceinline=True)
def _load4_or_zeros(array, index, inside):
    a, b, c, d = float32(0), float32(0), float32(0), float32(0)
    if inside:
        a, b, c, d = load_floats4(array, index)
    return a, b, c, d


@cuda.jit(device=True, forceinline=True)
def hold_weights(held, w, k, lane, warp, n_warps):
    """held, local float32 [any number, 4] <- the lane's norm weights for the first groups that its warp takes in
    `quantize_norm`. A kernel calls it before it waits for x: the weights come from memory meanwhile."""
    for g in range(len(held)):
        i = uint32(uint32(uint32(warp + uint32(g) * n_warps) * uint32(GROUP)) + lane * uint32(4))
        held[g, 0], held[g, 1], held[g, 2], held[g, 3] = _load4_or_zeros(w, i, i < k)


@cache
def norm_quantizer(store):
    """A `quantize_norm` that stores its results through `store`, a device function with the parameters of
    `store_quantized`."""

    @cuda.jit(device=True, forceinline=True)
    def quantize_norm(q, d, x, at, w, held, k, eps, partial, lane, warp, n_warps):
        """RMSNorm of the k values of x from `at` on, stored as int8 blocks; any number of warps, n_warps, takes part.

        q, d: arrays in global or shared memory; the results go to q[at] and d[at / 32] and following. held: what
        `hold_weights` filled. partial: shared float32 [MAX_WARPS], used for this row alone. It has one barrier, before
        the results are stored: a caller that reads the results of other warps needs another one.
        """
        n_parts = uint32((k + uint32(PART - 1)) // uint32(PART))
        i = uint32(uint32(warp * uint32(GROUP)) + lane * uint32(4))
        x0, x1, x2, x3 = _load4_or_zeros(x, uint32(at + i), i < k)  # this load is in flight during the sum
        part = warp
        while part < n_parts:
            total = float32(0)
            for j in range(GROUPS):
                of = uint32(part * uint32(PART) + uint32(j * GROUP) + lane * uint32(4))
                a, b, c, e = _load4_or_zeros(x, uint32(at + of), of < k)
                total = cuda.fma(e, e, cuda.fma(c, c, cuda.fma(b, b, cuda.fma(a, a, total))))
            total = warp_sum(total)
            if lane == uint32(0):
                partial[part] = total
            part = uint32(part + n_warps)
        cuda.syncthreads()
        total = warp_sum(partial[lane] if lane < n_parts else float32(0))
        scale = rsqrt(div_rn(total, float32(k)) + eps)
        for g in range(len(held)):
            if uint32(i - lane * uint32(4)) < k:  # uniform over the warp, whose lanes shuffle in `store`
                store(q, d, uint32(at + i), i < k, x0 * scale * held[g, 0], x1 * scale * held[g, 1],
                      x2 * scale * held[g, 2], x3 * scale * held[g, 3])
            i = uint32(i + uint32(n_warps * uint32(GROUP)))
            x0, x1, x2, x3 = _load4_or_zeros(x, uint32(at + i), i < k)
        while uint32(i - lane * uint32(4)) < k:  # groups whose weights are not held
            w0, w1, w2, w3 = _load4_or_zeros(w, i, i < k)
            store(q, d, uint32(at + i), i < k, x0 * scale * w0, x1 * scale * w1, x2 * scale * w2, x3 * scale * w3)
            i = uint32(i + uint32(n_warps * uint32(GROUP)))
            x0, x1, x2, x3 = _load4_or_zeros(x, uint32(at + i), i < k)

    return quantize_norm


quantize_norm = norm_quantizer(store_quantized)


@cuda.jit
def rms_norm_quantize_kernel(q, d, x, w, k, eps):
    let_next_begin()
    row, lane, warp = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x & 31), uint32(cuda.threadIdx.x >> 5)
    n_warps = uint32(cuda.blockDim.x >> 5)
    partial = cuda.shared.array(MAX_WARPS, float32)
    held = cuda.local.array(WEIGHTS, float32)
    hold_weights(held, w, k, lane, warp, n_warps)
    wait_for_previous()
    quantize_norm(q, d, x, uint32(row * k), w, held, k, eps, partial, lane, warp, n_warps)


@cuda.jit(device=True, inline="always")
def gate_head(o0, o1, o2, o3, w, g0, g1, g2, g3, eps):
    """The norm of a head with the lane's 4 values o and 4 weights w, times the gates g = silu(z)."""
    total = warp_sum(cuda.fma(o3, o3, cuda.fma(o2, o2, cuda.fma(o1, o1, o0 * o0))))
    scale = rsqrt(total * float32(1.0 / GROUP) + eps)
    return o0 * scale * w[0] * g0, o1 * scale * w[1] * g1, o2 * scale * w[2] * g2, o3 * scale * w[3] * g3


@cuda.jit(device=True, inline="always")
def _gated4(o, z, w, at, z_at, lane, eps):
    """The lane's 4 results of a head, whose inputs are at `at` in o and at `z_at` in z."""
    a, b, c, d = load_floats4(o, at)
    z0, z1, z2, z3 = load_floats4(z, z_at)
    weights = load_floats4(w, uint32(lane * uint32(4)))
    return gate_head(a, b, c, d, weights, silu(z0), silu(z1), silu(z2), silu(z3), eps)


@cuda.jit(device=True, inline="always")
def _gate_at(head, n_heads, z_stride, lane):
    """The index in z of the lane's gates of `head`, a number among the heads of all rows."""
    row = uint32(head // n_heads)
    return uint32(row * z_stride + uint32(head - row * n_heads) * uint32(GROUP) + lane * uint32(4))


@cuda.jit
def gated_norm_kernel(y, o, z, w, n, n_heads, z_stride, eps):
    lane, warp = uint32(cuda.threadIdx.x & 31), uint32(cuda.threadIdx.x >> 5)
    head = uint32(cuda.blockIdx.x * uint32(GATED_WARPS) + warp)  # among the heads of all rows
    if head < n:
        at = uint32(head * uint32(GROUP) + lane * uint32(4))
        a, b, c, d = _gated4(o, z, w, at, _gate_at(head, n_heads, z_stride, lane), lane, eps)
        store_floats4(y, at, a, b, c, d)


@cuda.jit
def gated_norm_quantize_kernel(q, d, o, z, w, n, n_heads, z_stride, eps):
    lane, warp = uint32(cuda.threadIdx.x & 31), uint32(cuda.threadIdx.x >> 5)
    head = uint32(cuda.blockIdx.x * uint32(GATED_WARPS) + warp)
    if head < n:
        at = uint32(head * uint32(GROUP) + lane * uint32(4))
        y0, y1, y2, y3 = _gated4(o, z, w, at, _gate_at(head, n_heads, z_stride, lane), lane, eps)
        store_quantized(q, d, at, True, y0, y1, y2, y3)


# ---- launches: they write in place and never allocate -----------------------------------------------------

def row_threads(k):
    """Threads of the block that takes a row of k values."""
    n_warps = -(-k // PART)
    if k % 4 or n_warps > MAX_WARPS:
        raise ValueError(f"RMSNorm takes rows of a multiple of 4 up to {MAX_WARPS * PART} values, not {k}")
    return 32 * n_warps


def rms_norm(card, y, x, rows, k, *, stream=None):
    """y float32 [rows, k] <- RMSNorm of x, a NormInput; k a multiple of 4, at most 16,384."""
    threads = row_threads(k)
    card.launch(rms_norm_kernel, rows, threads, y.reshape(-1), x.values.reshape(-1), x.weight, k, float(x.eps),
                stream=stream)


def _quantizing_threads(card, rows, k):
    """Threads of the block that quantises a row. In a step of a few rows every launch waits for the norm, so each group
    of 128 values gets a warp of its own; on many rows, and on emulated cards, warps that share the sum are enough."""
    threads = row_threads(k)
    few = rows <= STEP_ROWS and card.kind != "emulated"
    return 32 * min(-(-k // GROUP), MAX_WARPS) if few else threads


def rms_norm_quantize(card, out, x, rows, k, *, stream=None):
    """out, Quantized [rows, k] <- quantised RMSNorm of x, a NormInput; k a multiple of 32, at most 16,384."""
    threads = _quantizing_threads(card, rows, k)
    card.launch(rms_norm_quantize_kernel, rows, threads, *out.flat, x.values.reshape(-1),
                x.weight, k, float(x.eps), stream=stream)


def gated_norm(card, y, x, rows, *, stream=None):
    """y float32 [rows, n_heads, 128] <- RMSNorm of each head of x, a GatedInput, times silu of its gates."""
    _launch_gated(card, gated_norm_kernel, [y], x, rows, stream)


def gated_norm_quantize(card, out, x, rows, *, stream=None):
    """out, Quantized [rows, 128 n_heads] <- what `gated_norm` gives, quantised."""
    _launch_gated(card, gated_norm_quantize_kernel, out, x, rows, stream)


def _launch_gated(card, kernel, outputs, x, rows, stream):
    n = rows * x.n_heads
    arrays = (a.reshape(-1) for a in (*outputs, x.o, x.z))
    card.launch(kernel, -(-n // GATED_WARPS), 32 * GATED_WARPS, *arrays, x.weight, n, x.n_heads, x.z_stride,
                float(x.eps), stream=stream)


# ---- check and bench ---------------------------------------------------------------------------------------

CASES = [("rms", 1, 256), ("rms", 3, 320), ("rms", 65, 32), ("rms", 2, 544), ("rms", 33, 1024),
         ("rms", 3, 5120), ("rms", 1, 16384),
         ("gated", 1, 1), ("gated", 3, 4), ("gated", 31, 16), ("gated", 7, 48)]

# 19 roundings of 2**-24 each. A square passes through up to 16 + 5 + 5 additions, whose error the root halves: 13. The
# mean, eps, root, reciprocal and two products add 6. The gated norm has fewer: 9 / 2 + 6, silu 4, a product 1.
TOLERANCE = 19 * 2.0 ** -24


def check(card, kind, rows, n):
    """Checks both kernels of a kind, "rms" or "gated", on random values; n is the length of a row or the number of
    heads in it. Returns the largest relative error."""
    k, eps = (n if kind == "rms" else GROUP * n), 1e-6
    random = np.random.default_rng(k + rows)
    x, z = (random.standard_normal((rows, k)).astype(np.float32) * scale for scale in (3, 8))
    w = random.uniform(0.5, 1.5, k if kind == "rms" else GROUP).astype(np.float32)
    if kind == "rms":
        given, want = NormInput(card.upload(x), card.upload(w), eps), rms_norm_reference(x, w, eps)
        return check_with_twin(card, want, TOLERANCE, lambda y: rms_norm(card, y, given, rows, k),
                               lambda out: rms_norm_quantize(card, out, given, rows, k))
    x, z = x.reshape(rows, n, GROUP), z.reshape(rows, n, GROUP)
    want = gated_norm_reference(x, z, w, eps).reshape(rows, k)
    gates = card.upload(np.pad(z.reshape(rows, k), ((0, 0), (0, 12)), constant_values=np.nan))
    given = GatedInput(card.upload(x), gates, k + 12, n, card.upload(w), eps)
    return check_with_twin(card, want, TOLERANCE, lambda y: gated_norm(card, y, given, rows),
                           lambda out: gated_norm_quantize(card, out, given, rows))


def cases(card):
    """The checks, then times of the quantising forms at the shapes of a small and a 27B model."""
    for case in CASES:
        yield Case("{} {} x {}".format(*case), partial(check, card, *case))
    for kind, rows, n in (("rms", 1, 256), ("rms", 1, 5120), ("rms", 512, 5120),
                          ("gated", 1, 4), ("gated", 1, 48), ("gated", 512, 48)):
        yield _timed(card, kind, rows, n)


def _timed(card, kind, rows, n):
    k = n if kind == "rms" else GROUP * n
    x, z, w = card.zeros((rows, k), np.float32), card.zeros((rows, k), np.float32), card.zeros(k, np.float32)
    out = Quantized(card.alloc((rows, k), np.int8), card.alloc((rows, k // 32), np.float32))
    n_bytes = x.nbytes + out.q.nbytes + out.d.nbytes
    if kind == "rms":
        launch = partial(rms_norm_quantize, card, out, NormInput(x, w, 1e-6), rows, k)
        return Case(f"rms to int8 {rows} x {k}", launch=launch, n_bytes=n_bytes)
    launch = partial(gated_norm_quantize, card, out, GatedInput(x, z, k, n, w, 1e-6), rows)
    return Case(f"gated to int8 {rows} x {n} heads", launch=launch, n_bytes=n_bytes + z.nbytes)


if __name__ == "__main__":
    main("RMSNorm, plain and gated", cases)
