"""Sums of normalised rows: what a pooling model takes of the rows of a text (engine/pooling.py).

    out[s] = sum over r = first .. first + count - 1 of  w x[r] / sqrt(mean(x[r]^2) + eps)          (first, count) of s

    x      float32 [rows, k]        the residual stream behind the last layer
    w      float32 [k]
    spans  int32 [spans, 2]         first row and number of rows, at least one, of each sum
    out    float32 [spans, k]

A span of one row is a text's last or first token. The mean of a long text takes a span for each page of 64 tokens; the
host adds them. Within a span the rows are added one after the other, so its bits depend on its rows alone. A row's norm
has the bits of `rms_norm` (kernels/norm.py), whose parts this kernel uses.

A block of threads takes a span, and a warp 512 consecutive values of each of its rows. Pipe: fp32, bound by the latency
of a row: load, sum over the block, two barriers. Bytes: 4 k read per row, 4 k written per span.
"""

import numpy as np
from numba import cuda, float32, uint32

from kernels.bench import Case, main
from kernels.intrinsics import div_rn, rsqrt, store_floats4
from kernels.norm import (GROUP, GROUPS, MAX_WARPS, PART, VALUES, NormInput, block_sum, load_part, rms_norm,
                          rms_norm_reference, row_threads, scaled4)

SPAN = 64                   # most rows of a span: a page


# ---- reference ---------------------------------------------------------------------------------------------

def pool_reference(x, w, eps, spans):
    """x [rows, k], w [k], spans int [spans, 2] -> float64 [spans, k]."""
    normed = rms_norm_reference(x, w, eps)
    return np.stack([normed[first:first + count].sum(axis=0) for first, count in spans])


# ---- kernel ------------------------------------------------------------------------------------------------

@cuda.jit(launch_bounds=32 * MAX_WARPS)
def pool_kernel(out, x, w, spans, k, eps):
    """Grid (spans), block (32 for each 512 values of a row)."""
    span, lane, warp = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x & 31), uint32(cuda.threadIdx.x >> 5)
    first, count = uint32(spans[uint32(span * uint32(2))]), uint32(spans[uint32(span * uint32(2) + uint32(1))])
    start = uint32(warp * uint32(PART))
    values, sums = cuda.local.array(VALUES, float32), cuda.local.array(VALUES, float32)
    partial = cuda.shared.array(MAX_WARPS, float32)
    for n in range(uint32(VALUES)):
        sums[n] = float32(0.0)
    for r in range(count):
        total = block_sum(partial, load_part(values, x, uint32(first + uint32(r)), start, lane, k), lane, warp)
        scale = rsqrt(div_rn(total, float32(k)) + eps)
        for j in range(uint32(GROUPS)):
            i = uint32(start + j * uint32(GROUP) + lane * uint32(4))
            if i < k:
                a, b, c, d = scaled4(values, j, scale, w, i)
                at = uint32(j * uint32(4))
                sums[at], sums[uint32(at + uint32(1))] = sums[at] + a, sums[uint32(at + uint32(1))] + b
                sums[uint32(at + uint32(2))] = sums[uint32(at + uint32(2))] + c
                sums[uint32(at + uint32(3))] = sums[uint32(at + uint32(3))] + d
        cuda.syncthreads()      # every warp has read `partial`, which the next row writes
    for j in range(uint32(GROUPS)):
        i = uint32(start + j * uint32(GROUP) + lane * uint32(4))
        if i < k:
            at = uint32(j * uint32(4))
            store_floats4(out, uint32(span * k + i), sums[at], sums[uint32(at + uint32(1))],
                          sums[uint32(at + uint32(2))], sums[uint32(at + uint32(3))])


def pool(card, out, x, spans, n_spans, k, stream=None):
    """out float32 [n_spans, k] <- sums of normalised rows of x, a NormInput; k a multiple of 4, at most 16,384. Writes
    out only, never allocates."""
    card.launch(pool_kernel, n_spans, row_threads(k), out.reshape(-1), x.values.reshape(-1), x.weight,
                spans.reshape(-1), k, float(x.eps), stream=stream)


# ---- check -------------------------------------------------------------------------------------------------

CASES = [(256, ((0, 1),)), (320, ((3, 64), (0, 3), (66, 1))), (1024, ((0, 33), (0, 64))), (2560, ((1, 2), (2, 5))),
         (5120, ((63, 2),)), (16384, ((0, 3),))]        # k, spans

# A norm's 19 roundings (kernels/norm.py), and one for each row of the sum: of 2^-24 each, of the sum of magnitudes.
ROUNDING = 2.0 ** -24


def check(card, k, spans):
    """Compares with the reference; a span too many stays poisoned. Spans of a row have the bits of `rms_norm`. Returns
    the largest error, of the sum of magnitudes."""
    rng, n_rows = np.random.default_rng(k), max(map(sum, spans))
    x = (rng.standard_normal((n_rows, k)) * rng.uniform(0.1, 30, (n_rows, 1))).astype(np.float32)
    w = rng.uniform(-2, 2, k).astype(np.float32)
    given = NormInput(card.upload(x), card.upload(w), 1e-6)
    out, normed = card.alloc((len(spans) + 1, k), np.float32), card.alloc((n_rows, k), np.float32)
    card.poison(out)
    pool(card, out, given, card.upload(np.array(spans, np.int32)), len(spans), k)
    rms_norm(card, normed, given, n_rows, k)
    got, normed = card.download(out), card.download(normed)
    assert np.isnan(got[-1]).all(), "wrote on"
    want = pool_reference(x, w, 1e-6, spans)
    size = np.stack([np.abs(normed[first:first + count]).sum(axis=0, dtype=np.float64) for first, count in spans])
    error = 0.0
    for i, (first, count) in enumerate(spans):
        worst = np.max(np.abs(got[i] - want[i]) / size[i])
        assert worst <= (19 + count) * ROUNDING, f"error {worst}"
        error = max(error, worst)
        if count == 1:
            np.testing.assert_array_equal(got[i], normed[first])
    return error


def cases(card):
    """The checked cases, then the times of a pass of 4,096 rows."""
    for k, spans in CASES:
        yield Case(f"{len(spans)} spans, rows of {k}", lambda k=k, spans=spans: check(card, k, spans))
    for k in 1024, 2560:
        x, w = card.zeros((4096, k), np.float32), card.zeros(k, np.float32)
        spans = card.upload(np.array([(first, SPAN) for first in range(0, 4096, SPAN)], np.int32))
        out = card.alloc((4096 // SPAN, k), np.float32)
        yield Case(f"4096 rows of {k}", launch=lambda x=x, w=w, out=out, k=k: pool(
            card, out, NormInput(x, w, 1e-6), spans, 4096 // SPAN, k), n_bytes=4096 * k * 4)


if __name__ == "__main__":
    main("Sums of normalised rows", cases)
