"""Matrix x vector for decoding with the packed formats of kernels/formats.py: Q4_0, Q5_0, Q4_K, Q5_K, Q6_K.

"""

from functools import cache, partial

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint32

from kernels.bench import Case, main
from kernels.formats import BLOCK, FORMATS, as_words, on_card, product_reference, random_raw
from kernels.intrinsics import dp4a, load_words4, warp_sum, word_as_float
from kernels.q8_gemv import gemv_q8_q8, random_activations

WARPS = 4  # per block of threads
ROWS = 2  # of w per warp: they share the loads of x
MOST_COLUMNS = 8  # of a launch
TURNS = 2


def step(format, columns, rows, turns, fence):
    """Device function: a lane multiplies blocks first + lane, first + lane + 32, ... of every row, `turns` of them, by
    those of every column. All loads of weights stand first; `fence` keeps them there, where all lanes come."""
    fetch, unpack, dot, minimum = format.fetch, format.unpack, format.dot, format.minimum
    raw_words, n_scales, pieces = format.raw_words, format.n_scales, turns * rows

    @cuda.jit(device=True, inline="always")
    def accumulate(acc, q_starts, d_starts, blocks, block, wq, wd, xq, xd):
        raw = cuda.local.array((pieces, raw_words), uint32)
        for u in range(turns):
            for r in range(rows):
                fetch(raw[u * rows + r], wq, wd, q_starts[r], d_starts[r], blocks, uint32(block + uint32(32 * u)))
        if fence:
            cuda.syncwarp()
        w, scales = cuda.local.array((rows, 8), uint32), cuda.local.array((rows, n_scales), uint32)
        x = cuda.local.array(8, uint32)
        for u in range(turns):
            for r in range(rows):
                unpack(w[r], scales[r], raw[u * rows + r])
            for c in range(columns):
                at = uint32(uint32(uint32(c) * blocks) + block + uint32(32 * u))
                x[0], x[1], x[2], x[3] = load_words4(xq, uint32(at << uint32(5)))
                x[4], x[5], x[6], x[7] = load_words4(xq, uint32(uint32(at << uint32(5)) + uint32(16)))
                x_scale = xd[at]
                if minimum:
                    total = int32(0)
                    for i in range(8):
                        total = dp4a(x[i], uint32(0x01010101), total)
                    x_sum = x_scale * float32(total)
                for r in range(rows):
                    acc[r, c] = cuda.fma(dot(w[r], scales[r], x), word_as_float(scales[r, 0]) * x_scale, acc[r, c])
                    if minimum:
                        acc[r, c] = cuda.fma(word_as_float(scales[r, 1]), x_sum, acc[r, c])

    return accumulate


def walk(format, columns, rows, turns):
    """walk_rows(acc, w_rows, k, lane, wq, wd, xq, xd): acc[r, c] += the lane's share of row w_rows[r] times column c."""
    starts = format.starts
    many, one, rest = (step(format, columns, rows, *p) for p in ((turns, True), (1, rows > 1), (1, False)))

    @cuda.jit(device=True, inline="always")
    def walk_rows(acc, w_rows, k, lane, wq, wd, xq, xd):
        blocks = uint32(k >> uint32(5))
        q_starts, d_starts = cuda.local.array(rows, uint32), cuda.local.array(rows, uint32)
        for r in range(rows):
            q_starts[r], d_starts[r] = starts(w_rows[r], blocks)
        first = uint32(0)
        while uint32(first + uint32(32 * turns)) <= blocks:
            many(acc, q_starts, d_starts, blocks, uint32(first + lane), wq, wd, xq, xd)
            first = uint32(first + uint32(32 * turns))
        if turns > 1:
            while uint32(first + uint32(32)) <= blocks:
                one(acc, q_starts, d_starts, blocks, uint32(first + lane), wq, wd, xq, xd)
                first = uint32(first + uint32(32))
        if uint32(first + lane) < blocks:
            rest(acc, q_starts, d_starts, blocks, uint32(first + lane), wq, wd, xq, xd)

    return walk_rows


def gemv_kernel(format, columns, rows, turns):
    """The kernel that holds `columns` columns in registers."""
    walk_rows = walk(format, columns, rows, turns)

    @cuda.jit
    def gemv_quantized_kernel(y, wq, wd, xq, xd, n, k, n_columns, stride, add):
        lane = uint32(cuda.threadIdx.x)
        row = uint32(uint32(cuda.blockIdx.x * uint32(WARPS) + cuda.threadIdx.y) * uint32(rows))
        if row >= n:
            return
        acc = cuda.local.array((rows, columns), float32)
        w_rows = cuda.local.array(rows, uint32)
        for r in range(rows):  # past the last row: the last one once more, not stored
            w_rows[r] = uint32(min(uint32(row + uint32(r)), uint32(n - uint32(1))))
            for c in range(columns):
                acc[r, c] = float32(0.0)
        walk_rows(acc, w_rows, k, lane, wq, wd, xq, xd)
        for r in range(rows):
            for c in range(columns):
                total = warp_sum(acc[r, c])
                at = uint32(uint32(c) * stride + row + uint32(r))
                if lane == uint32(0) and uint32(row + uint32(r)) < n:
                    y[at] = y[at] + total if add else total

    return gemv_quantized_kernel


@cache
def kernel(format, columns, rows=ROWS, turns=TURNS):
    return gemv_kernel(format, columns, rows, turns)


def gemv(card, format, y, stride, wq, wd, xq, xd, n, k, columns, add=False, stream=None, rows=ROWS, turns=TURNS):
    """y <- (y +) w . x with weights (wq, wd) [n, k] of a format of kernels/formats.py; the rest as `gemv_q8_q8`."""
    if format.bits == 8:
        return gemv_q8_q8(card, y, stride, wq, wd, xq, xd, n, k, columns, add, stream)
    y, wq, wd = y.reshape(-1), wq.reshape(-1), as_words(wd)
    for first in range(0, columns, MOST_COLUMNS):
        here = min(columns - first, MOST_COLUMNS)
        part = slice(first, first + here)
        card.launch(kernel(format, here, rows, turns), -(-n // (WARPS * rows)), (32, WARPS), y[first * stride:], wq, wd,
                    xq[part].reshape(-1), xd[part].reshape(-1), n, k, here, stride, add, stream=stream)


def check(card, format, n, k, columns, add=False, multiply=gemv):
    rng = np.random.default_rng((n, k, columns))
    raw, (xq, xd) = random_raw(rng, format, n, k), random_activations(rng, columns, k)
    before = rng.standard_normal((columns, n), np.float32)
    y = card.alloc((columns + 1, n + 3), np.float32)
    card.poison(y)
    if add:
        card.copy_in(y[:columns], np.pad(before, ((0, 0), (1, 2)), constant_values=np.nan))
    multiply(card, format, y.reshape(-1)[1:], n + 3, *on_card(card, format, raw, n, k), card.upload(xq), card.upload(xd),
             n, k, columns, add)
    y = card.download(y)
    got = y[:columns, 1:n + 1].copy()
    y[:columns, 1:n + 1] = np.nan
    assert np.isnan(y).all(), "wrote elsewhere"
    want, magnitude = product_reference(format, raw, xq, xd)
    bound = ((k // 1024 + 1) * (1 + format.minimum) + 9) * 2.0**-24 * (magnitude + abs(before) * add)
    error = (abs(got - (want + before * add)) / bound).max()
    assert error <= 1, error
    return error
