"""Matrix x vector for decoding: int8 weights (Q8_0) times int8 activations, a few columns at once.

    y[c, n] = sum over blocks b of 32:  dot(wq[n, b], xq[c, b]) * (wd[n, b] * xd[c, b])
                                                                       (+ y[c, n] with `add`)

    wq  int8    [n, k]         wd  float16 [n, k / 32]         Q8_0 split in two: rows of aligned words
    xq  int8    [columns, k]   xd  float32 [columns, k / 32]   of kernels/quantize.py
    y   float32 [columns, n]             k a multiple of 32, n and columns any, n k and columns n below 2**32

The tree of additions is fixed, so a column has the same bits whatever n, its neighbours and the card are. A
warp takes ROWS rows of w and walks them by steps of 16 blocks:

        lane          0        1        2        3     ...    31
        weights    16 bytes 16 bytes 16 bytes 16 bytes ... 16 bytes      half a block each
        scales     |  block 0  |    |  block 1  |

then, where k leaves them, a step of 8 blocks with 8 bytes per lane, and one of up to 7 blocks that leaves the
last lanes idle. (Real models have k a multiple of 512; the two last steps are for the small ones.)

    lane:  acc = fma(float(dot of 16 or 8), wd * xd, acc)   step by step; the dot is exact, by dp4a
    warp:  butterfly sum of the 32 acc; with `add`, one more rounded addition

Pipe: dp4a, but bound by memory: 1.06 n k bytes and n k columns / 4 dp4a per call. The weights are read once
for up to eight columns: at its full bandwidth a CMP 100-210 has time for 27 dp4a per word of weights, and
eight columns need 8 of them and 6 float operations. Expected: 89 % of read bandwidth for one column of a
large matrix.
"""

from functools import partial

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint32

from kernels.bench import Case, main
from kernels.intrinsics import BIAS_WORD, dp4a, half_to_float, load_words2, load_words4, unbias, warp_sum

BLOCK = 32
WARPS = 4  # per block of threads
ROWS = 2  # rows of w per warp: they share the loads of x
COLUMNS = (1, 2, 4, 8)  # a kernel for each; the next larger one serves the numbers between


def q8_reference(wq, wd, xq, xd):
    """float64 y [columns, n] by the formula above, without its order."""
    w = wq.reshape(len(wq), -1, BLOCK) * wd.astype(np.float64)[:, :, None]
    x = xq.reshape(len(xq), -1, BLOCK) * xd.astype(np.float64)[:, :, None]
    return x.reshape(xq.shape) @ w.reshape(wq.shape).T


def step(columns, words):
    """Device function of one step: a lane multiplies `words` words of every row by those of every column."""
    load = {2: load_words2, 4: load_words4}[words]
    lanes_per_block = 8 // words

    @cuda.jit(device=True, inline="always")
    def accumulate(acc, w_starts, x_starts, block, lane, wq, wd, xq, xd):
        """acc[r, c] += the lane's piece from `block` of row r times that of column c; starts in blocks."""
        byte = uint32(lane * uint32(4 * words))
        its_block = uint32(lane // uint32(lanes_per_block))
        w = cuda.local.array((ROWS, words), uint32)
        w_scale = cuda.local.array(ROWS, float32)
        for r in range(ROWS):
            at = uint32(w_starts[r] + block)
            loaded = load(wq, uint32(uint32(at << uint32(5)) + byte))
            for i in range(words):
                w[r, i] = loaded[i]
            w_scale[r] = half_to_float(wd[uint32(at + its_block)])
        for c in range(columns):
            at = uint32(x_starts[c] + block)
            x = load(xq, uint32(uint32(at << uint32(5)) + byte))
            x_scale = xd[uint32(at + its_block)]
            for r in range(ROWS):
                dot = int32(BIAS_WORD)
                for i in range(words):
                    dot = dp4a(w[r, i], x[i], dot)
                acc[r, c] = cuda.fma(unbias(dot), w_scale[r] * x_scale, acc[r, c])

    return accumulate


def gemv_kernel(columns):
    """The kernel that holds `columns` columns in registers."""
    accumulate4, accumulate2 = step(columns, 4), step(columns, 2)

    @cuda.jit
    def gemv_q8_q8_kernel(y, wq, wd, xq, xd, n, k, n_columns, stride, add):
        lane = uint32(cuda.threadIdx.x)
        row = uint32(uint32(cuda.blockIdx.x * uint32(WARPS) + cuda.threadIdx.y) * uint32(ROWS))
        if row >= n:
            return
        blocks = uint32(k >> uint32(5))  # per row
        acc = cuda.local.array((ROWS, columns), float32)
        w_starts = cuda.local.array(ROWS, uint32)
        x_starts = cuda.local.array(columns, uint32)
        for r in range(ROWS):  # past the last row or column: the last one once more, not stored
            w_starts[r] = uint32(min(uint32(row + uint32(r)), uint32(n - uint32(1))) * blocks)
            for c in range(columns):
                acc[r, c] = float32(0.0)
        for c in range(columns):
            x_starts[c] = uint32(min(uint32(c), uint32(n_columns - uint32(1))) * blocks)

        for turn in range(uint32(blocks >> uint32(4))):
            accumulate4(acc, w_starts, x_starts, uint32(uint32(turn) * uint32(16)), lane, wq, wd, xq, xd)
        if blocks & uint32(8):
            accumulate2(acc, w_starts, x_starts, uint32(blocks & uint32(0xFFFFFFF0)), lane, wq, wd, xq, xd)
        if uint32(lane >> uint32(2)) < uint32(blocks & uint32(7)):
            accumulate2(acc, w_starts, x_starts, uint32(blocks & uint32(0xFFFFFFF8)), lane, wq, wd, xq, xd)

        for r in range(ROWS):
            for c in range(columns):
                total = warp_sum(acc[r, c])
                at = uint32(uint32(c) * stride + row + uint32(r))
                if lane == uint32(0) and uint32(row + uint32(r)) < n and uint32(c) < n_columns:
                    y[at] = y[at] + total if add else total

    return gemv_q8_q8_kernel


KERNELS = {columns: gemv_kernel(columns) for columns in COLUMNS}


def gemv_q8_q8(card, y, stride, wq, wd, xq, xd, n, k, columns, add=False, stream=None):
    """y <- (y +) w . x with w = (wq int8 [n, k], wd float16 [n, k / 32]) and x = (xq int8 [columns, k],
    xd float32 [columns, k / 32]). y: float32, n numbers of a column, `stride` from one column to the next, which
    is n or more where several products write side by side. One launch per eight columns; no allocation."""
    y, wd = y.reshape(-1), wd.view(np.uint16).reshape(-1)
    for first in range(0, columns, COLUMNS[-1]):
        here = min(columns - first, COLUMNS[-1])
        part = slice(first, first + here)
        kernel = KERNELS[min(c for c in COLUMNS if c >= here)]
        card.launch(kernel, -(-n // (WARPS * ROWS)), (32, WARPS), y[first * stride:], wq.reshape(-1), wd,
                    xq[part].reshape(-1), xd[part].reshape(-1), n, k, here, stride, add, stream=stream)


# ---- check and time ----------------------------------------------------------------------------------------

# n, k, columns
CASES = [(1, 32, 1), (4, 320, 1), (33, 512, 2), (31, 544, 3), (500, 1024, 8), (63, 2080, 11), (1024, 1024, 1)]


def random_q8(rng, rows, k):
    """Weights as a Q8_0 tensor has them: q int8 [rows, k], d float16 [rows, k / 32] of either sign."""
    q = rng.integers(-128, 128, (rows, k), np.int8)
    return q, (rng.standard_normal((rows, k // BLOCK)) / 1000).astype(np.float16)


def random_activations(rng, rows, k):
    """Quantised activations: q int8 [rows, k], d float32 [rows, k / 32]."""
    return rng.integers(-127, 128, (rows, k), np.int8), rng.random((rows, k // BLOCK), np.float32)


def check(card, n, k, columns, add=False):
    """Multiplies random matrices and returns the largest error as a fraction of what rounding may do: the
    chain of a lane, five additions of the butterfly, the product of the scales and the addition to y, 2**-24
    of the sum of magnitudes each."""
    rng = np.random.default_rng((n, k, columns))
    (wq, wd), (xq, xd) = random_q8(rng, n, k), random_activations(rng, columns, k)
    before = rng.standard_normal((columns, n), np.float32)
    y = card.alloc((columns + 1, n + 3), np.float32)      # numbers before and behind, and a column too many
    card.poison(y)
    if add:
        card.copy_in(y[:columns], np.pad(before, ((0, 0), (1, 2)), constant_values=np.nan))
    gemv_q8_q8(card, y.reshape(-1)[1:], n + 3, *map(card.upload, (wq, wd, xq, xd)), n, k, columns, add)
    y = card.download(y)
    got = y[:columns, 1:n + 1].copy()
    y[:columns, 1:n + 1] = np.nan
    assert np.isnan(y).all(), "wrote elsewhere"
    magnitude = q8_reference(abs(wq.astype(int)), abs(wd), abs(xq.astype(int)), xd) + abs(before) * add
    bound = (k // 512 + 2 + 7) * 2.0**-24 * magnitude
    error = (abs(got - (q8_reference(wq, wd, xq, xd) + before * add)) / bound).max()
    assert error <= 1
    return error


TIMED = [(256, 256, 1), (1024, 1024, 1), (4096, 4096, 1), (65536, 5120, 1), (4096, 4096, 2), (4096, 4096, 4),
         (4096, 4096, 8)]


def cases(card):
    """The checks, then times; the largest matrix (356 MB) is beyond every cache."""
    for case in CASES:
        yield Case("{} x {}, {} columns".format(*case), partial(check, card, *case))
    for n, k, columns in TIMED:
        wq, wd = card.zeros((n, k), np.int8), card.zeros((n, k // BLOCK), np.float16)
        xq, xd = card.zeros((columns, k), np.int8), card.zeros((columns, k // BLOCK), np.float32)
        y = card.alloc((columns, n), np.float32)
        yield Case(f"time of {n} x {k}, {columns} columns",
                   launch=partial(gemv_q8_q8, card, y, n, wq, wd, xq, xd, n, k, columns),
                   n_bytes=sum(a.nbytes for a in (wq, wd, xq, xd, y)), n_ops=2 * n * k * columns, pipe="dp4a")


if __name__ == "__main__":
    main("Q8_0 matrix x vectors", cases)
