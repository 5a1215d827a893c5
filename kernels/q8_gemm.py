"""Matrix x matrix for prompts: int8 weights (Q8_0) times int8 activations.

    y[r, n] = acc;    for blocks b of 32, increasing:
                          acc = fma(float(dot(wq[n, b], xq[r, b])), wd[n, b] * xd[r, b], acc)

    wq  int8    [n, k]      wd  float16 [n, k / 32]       Q8_0 split into two arrays
    xq  int8    [rows, k]   xd  float32 [rows, k / 32]    of kernels/quantize.py
    y   float32 [rows, n]           k a multiple of 32, n and rows any, n k and rows n below 2**32
                                    with `add`, y + acc, rounded once more

The dot is an exact int32 (8 dp4a) and the float chain runs over b alone, so every tile shape, every number of
rows and every version below gives the same bits.

Version 1, `gemm_naive_kernel`: a thread per output, everything from global memory: two loads per dp4a.
Version 2, `gemm_tiled_kernel`: 32 x 32 outputs per block of threads, w and x through shared memory: still
more than one load per dp4a, and everyone waits for memory twice per block of k.
Version 3, `pipelined_kernel(R)`: a warp makes R rows x 128 columns of y, the 4 warps of a block lie one below
the other.

        shared memory, two sides, filled by turns      a warp's outputs: R rows x 128 columns
        w  [128][48]  bytes: 32, and 16 of padding     lane l has columns l, l + 32, l + 64, l + 96
        x  [4 warps][16][32]                           -> R x 4 accumulators per thread
        wd [128] float32, xd [4 warps][32] float32

  * A thread keeps the 32 words of its 4 columns in registers and walks the rows: 8 words of x, the same for
    the whole warp (two broadcast 16-byte loads), feed 32 dp4a. Nothing is transposed, so the tiles are stored
    and loaded by 16 bytes; the padding puts 8 neighbouring lanes into different banks.
  * Everything is under way while something is multiplied: row r + 1 while row r is; block b + 2 from global
    memory to registers and block b + 1 from registers to the other side while block b is. The one barrier of
    a turn stands before the last row, whose dp4a cover it and the loads of the next block's weights.
  * The loop has no branch and steps addresses in shared memory instead of computing them: of 791 instructions
    512 are dp4a, 192 the scaling, 56 memory, 31 the rest.
  * R = 16 takes 168 registers, so 12 warps fit an SM. R = 10, 8 and 4 are for few rows (see `rows_per_warp`).
  * The dot becomes a float by the conversion instruction, which has a pipe of its own (16 lanes on Volta,
    half the time of the dp4a beside it), and not by `unbias`, whose addition is on the pipe of dp4a.

Pipe: dp4a, n k rows / 4 of them. Per block and output 8 dp4a and 2 float32 operations share it: at most 80 %
of the dp4a peak on Volta (the estimate says the same; with `unbias` 73 %), and 89 % on an H100 or H200, where
float32 has twice the lanes. Of that an H200 reaches 82.5 % in a loop of these instructions on registers alone
(80 % with `unbias`, 95 % without any scaling), before anything is loaded or anyone waits.

Measured on an H200 (2026-11-21, 1.98 GHz; per cent of the 133.8 TOPS of 64 lanes per SM; n x k x rows):

                                                 4096 x 4096 x 4096   12288 x 4096 x 4096   4096 x 4096 x 297
    version 3                                            70.5                 73.1                54.5
      with `unbias`                                      68.3                 70.5                52.7
      2 blocks of threads per SM, 217 registers          66.5
      words of w one by one from word-major tiles        69.3                 69.1
      the loop turned by two rows, so that its end       68.6                 71.8                52.5
          is not where the weights change
      8 rows x 8 columns per thread                      57.6                 59.3
    outer product, 8 x 8 per thread, tiles               71.5                                     49.4 (5 x 8)
        transposed, scaling amid the first products
      with `unbias`                                      69.2                                     48.4 (5 x 8)
      6 x 8 per thread, 3 warps per scheduler            63.1
    8 rows x 4 columns, nothing ahead but the tile       51.7                 54.6                29.1
    versions 2 and 1 (1024 rows)                         18.9 and 1.3

The outer product is as fast for many rows, but slower for few, and half as fast on the emulated card. 297
rows are 256 blocks of threads of 40 rows for 132 SMs: 90 % of the two rounds is work. A split of k would give
other bits.
"""

from functools import partial

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint16, uint32, uint64

from kernels.bench import Case, main
from kernels.intrinsics import (dp4a, float_as_word, half_to_float, load_shared, load_shared4, load_word,
                                load_words4, shared_address, store_shared, store_shared4, word_as_float)
from kernels.q8_gemv import q8_reference, random_activations, random_q8

BLOCK = 32  # weights per scale, and the depth of a tile
WORDS = 8  # of 4 int8 in a block
WARPS = 4
THREADS = 32 * WARPS
COLUMNS = 4  # per thread
TILE_N = 32 * COLUMNS
assert TILE_N == THREADS  # each thread carries one column

# A side of shared memory, in bytes.
PITCH = 48  # from a column's block to the next
X_AT = TILE_N * PITCH
WD_AT = X_AT + WARPS * 16 * BLOCK
XD_AT = WD_AT + 4 * TILE_N
SIDE = XD_AT + 4 * THREADS
SHARED_WORDS = 2 * SIDE // 4

# The NumPy reference is that of the decode family, `q8_reference`: the formula in float64, without an order.


@cuda.jit
def gemm_naive_kernel(y, wq, wd, xq, xd, n, k, n_rows, stride, add):
    column = uint32(cuda.blockIdx.x * uint32(32) + cuda.threadIdx.x)
    row = uint32(cuda.blockIdx.y * uint32(8) + cuda.threadIdx.y)
    if column >= n or row >= n_rows:
        return
    blocks = uint32(k >> uint32(5))
    acc = float32(0.0)
    for b in range(blocks):
        w_at = uint32(column * blocks + uint32(b))
        x_at = uint32(row * blocks + uint32(b))
        dot = int32(0)
        for i in range(WORDS):
            dot = dp4a(load_word(wq, uint32(uint32(w_at << uint32(5)) + uint32(4 * i))),
                       load_word(xq, uint32(uint32(x_at << uint32(5)) + uint32(4 * i))), dot)
        acc = cuda.fma(float32(dot), half_to_float(wd[w_at]) * xd[x_at], acc)
    at = uint32(row * stride + column)
    y[at] = y[at] + acc if add else acc


@cuda.jit
def gemm_tiled_kernel(y, wq, wd, xq, xd, n, k, n_rows, stride, add):
    w_tile = cuda.shared.array((WORDS, 33), uint32)  # 33: the lanes that store meet 32 different banks, too
    x_tile = cuda.shared.array((32, WORDS), uint32)
    lane, warp = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
    column = uint32(cuda.blockIdx.x * uint32(32) + lane)
    row0 = uint32(cuda.blockIdx.y * uint32(32))
    blocks = uint32(k >> uint32(5))
    last_column, last_row = uint32(n - uint32(1)), uint32(n_rows - uint32(1))
    thread = uint32(warp * uint32(32) + lane)
    piece, word = uint32(thread >> uint32(3)), uint32(thread & uint32(7))  # what it carries
    w_from = uint32(min(uint32(cuda.blockIdx.x * uint32(32) + piece), last_column) * blocks)
    x_from = uint32(min(uint32(row0 + piece), last_row) * blocks)
    acc = cuda.local.array(4, float32)
    for r in range(4):
        acc[r] = float32(0.0)
    for b in range(blocks):
        word_at = uint32(word << uint32(2))
        w_tile[word, piece] = load_word(
            wq, uint32(uint32(uint32(w_from + uint32(b)) << uint32(5)) + word_at))
        x_tile[piece, word] = load_word(xq, uint32(uint32(uint32(x_from + uint32(b)) << uint32(5)) + word_at))
        cuda.syncthreads()
        w_scale = half_to_float(wd[uint32(min(column, last_column) * blocks + uint32(b))])
        for r in range(4):
            row = uint32(warp * uint32(4) + uint32(r))
            dot = int32(0)
            for i in range(WORDS):
                dot = dp4a(w_tile[uint32(i), lane], x_tile[row, uint32(i)], dot)
            x_scale = xd[uint32(min(uint32(row0 + row), last_row) * blocks + uint32(b))]
            acc[r] = cuda.fma(float32(dot), w_scale * x_scale, acc[r])
        cuda.syncthreads()
    for r in range(4):
        row = uint32(row0 + warp * uint32(4) + uint32(r))
        at = uint32(row * stride + column)
        if row < n_rows and column < n:
            y[at] = y[at] + acc[r] if add else acc[r]


# ---- version 3 ---------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def fetch(words, scales, wq, wd, xq, xd, w_from, x_from, xd_from, b):
    """What this thread carries of block b, from global memory: 32 bytes of w, 16 of x, a scale of each."""
    byte = uint32(b << uint32(5))
    at = uint32(uint32(w_from << uint32(5)) + byte)
    words[0], words[1], words[2], words[3] = load_words4(wq, at)
    words[4], words[5], words[6], words[7] = load_words4(wq, uint32(at + uint32(16)))
    words[8], words[9], words[10], words[11] = load_words4(xq, uint32(x_from + byte))
    scales[0] = uint32(wd[uint32(w_from + b)])
    scales[1] = float_as_word(xd[uint32(xd_from + b)])


@cuda.jit(device=True, forceinline=True)
def put(words, scales, w_to, x_to, scale_to):
    """The same, to a side of shared memory."""
    store_shared4(w_to, words[0], words[1], words[2], words[3])
    store_shared4(w_to + uint64(16), words[4], words[5], words[6], words[7])
    store_shared4(x_to, words[8], words[9], words[10], words[11])
    store_shared(scale_to + uint64(WD_AT), float_as_word(half_to_float(uint16(scales[0]))))
    store_shared(scale_to + uint64(XD_AT), scales[1])


@cuda.jit(device=True, forceinline=True)
def load_columns(w, at):
    for c in range(COLUMNS):
        w[c, 0], w[c, 1], w[c, 2], w[c, 3] = load_shared4(at + uint64(32 * PITCH * c))
        w[c, 4], w[c, 5], w[c, 6], w[c, 7] = load_shared4(at + uint64(32 * PITCH * c + 16))


@cuda.jit(device=True, forceinline=True)
def load_row(x, at, r):
    x[0], x[1], x[2], x[3] = load_shared4(at + uint64(BLOCK * r))
    x[4], x[5], x[6], x[7] = load_shared4(at + uint64(BLOCK * r + 16))


@cuda.jit(device=True, forceinline=True)
def multiply_row(acc, r, w, x, w_scales, x_scales):
    """acc[r, c] += the block of x times that of column c."""
    dot = cuda.local.array(COLUMNS, int32)
    for c in range(COLUMNS):
        dot[c] = int32(0)
    for i in range(WORDS):
        for c in range(COLUMNS):
            dot[c] = dp4a(w[c, i], x[i], dot[c])
    for c in range(COLUMNS):
        scale = word_as_float(w_scales[c]) * word_as_float(x_scales[r])
        acc[r, c] = cuda.fma(float32(dot[c]), scale, acc[r, c])


def pipelined_kernel(rows, blocks_per_sm):
    """Version 3 whose warps make `rows` rows each, 4 to 16 and even; `blocks_per_sm` find registers."""
    put_row, fetch_row = rows // 3, 2 * rows // 3  # thirds: the compiler unrolls no larger loops
    rows_of_scales = 4 * -(-rows // 4)

    @cuda.jit(launch_bounds=(THREADS, blocks_per_sm))
    def gemm_q8_q8_kernel(y, wq, wd, xq, xd, n, k, n_rows, stride, add):
        lane, warp = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        thread = uint32(warp * uint32(32) + lane)
        column0 = uint32(cuda.blockIdx.x * uint32(TILE_N))
        row0 = uint32(uint32(cuda.blockIdx.y * uint32(WARPS) + warp) * uint32(rows))
        blocks = uint32(k >> uint32(5))
        last = uint32(blocks - uint32(1))
        last_column, last_row = uint32(n - uint32(1)), uint32(n_rows - uint32(1))

        # What this thread carries, from the arrays to shared memory. Columns and rows past the end are the
        # last one once more; they are not stored. Lanes that a warp of few rows does not need do the same.
        w_from = uint32(min(uint32(column0 + thread), last_column) * blocks)
        row, half = uint32(min(uint32(lane >> uint32(1)), uint32(rows - 1))), uint32(lane & uint32(1))
        x_from = uint32(uint32(min(uint32(row0 + row), last_row) * blocks) << uint32(5))
        x_from = uint32(x_from + uint32(half << uint32(4)))
        xd_from = uint32(min(uint32(row0 + min(lane, uint32(rows - 1))), last_row) * blocks)
        words = cuda.local.array(12, uint32)
        scales = cuda.local.array(2, uint32)

        # Addresses in shared memory: where it puts that; where its columns, its rows and their scales are.
        sides = shared_address(cuda.shared.array(SHARED_WORDS, uint32, alignment=16))
        w_to = sides + uint64(uint32(thread * uint32(PITCH)))
        x_to = sides + uint64(X_AT) + uint64(uint32(thread << uint32(4)))
        scale_to = sides + uint64(uint32(thread << uint32(2)))
        w_at = sides + uint64(uint32(lane * uint32(PITCH)))
        wd_at = sides + uint64(WD_AT) + uint64(uint32(lane << uint32(2)))
        x_at = sides + uint64(X_AT) + uint64(uint32(warp << uint32(9)))
        xd_at = sides + uint64(XD_AT) + uint64(uint32(warp << uint32(7)))
        step = uint64(SIDE)  # to the other side, and then back

        acc = cuda.local.array((rows, COLUMNS), float32)
        for r in range(rows):
            for c in range(COLUMNS):
                acc[r, c] = float32(0.0)
        w = cuda.local.array((COLUMNS, WORDS), uint32)
        x = cuda.local.array((2, WORDS), uint32)
        w_scales = cuda.local.array(COLUMNS, uint32)
        x_scales = cuda.local.array(rows_of_scales, uint32)
        fetch(words, scales, wq, wd, xq, xd, w_from, x_from, xd_from, uint32(0))
        put(words, scales, w_to, x_to, scale_to)
        fetch(words, scales, wq, wd, xq, xd, w_from, x_from, xd_from, min(uint32(1), last))
        w_to, x_to, scale_to = w_to + step, x_to + step, scale_to + step
        cuda.syncthreads()
        load_columns(w, w_at)
        load_row(x[0], x_at, 0)

        b = uint32(0)
        while b < blocks:
            for c in range(COLUMNS):
                w_scales[c] = load_shared(wd_at + uint64(128 * c))
            for r in range(0, rows_of_scales, 4):
                at = xd_at + uint64(4 * r)
                x_scales[r], x_scales[r + 1], x_scales[r + 2], x_scales[r + 3] = load_shared4(at)
            for r in range(put_row):
                load_row(x[(r + 1) & 1], x_at, r + 1)
                multiply_row(acc, r, w, x[r & 1], w_scales, x_scales)
            put(words, scales, w_to, x_to, scale_to)
            for r in range(put_row, fetch_row):
                load_row(x[(r + 1) & 1], x_at, r + 1)
                multiply_row(acc, r, w, x[r & 1], w_scales, x_scales)
            fetch(words, scales, wq, wd, xq, xd, w_from, x_from, xd_from, min(uint32(b + uint32(2)), last))
            for r in range(fetch_row, rows - 1):
                load_row(x[(r + 1) & 1], x_at, r + 1)
                multiply_row(acc, r, w, x[r & 1], w_scales, x_scales)
            w_to, x_to, scale_to = w_to - step, x_to - step, scale_to - step
            w_at, wd_at, x_at, xd_at = w_at + step, wd_at + step, x_at + step, xd_at + step
            step = uint64(0) - step
            cuda.syncthreads()
            load_row(x[0], x_at, 0)
            multiply_row(acc, rows - 1, w, x[1], w_scales, x_scales)
            load_columns(w, w_at)
            b = uint32(b + uint32(1))

        for r in range(rows):
            row = uint32(row0 + uint32(r))
            for c in range(COLUMNS):
                column = uint32(column0 + lane + uint32(32 * c))
                at = uint32(row * stride + column)
                if row < n_rows and column < n:
                    y[at] = y[at] + acc[r, c] if add else acc[r, c]

    return gemm_q8_q8_kernel


# Rows per warp -> kernel.
PIPELINED = {16: pipelined_kernel(16, 3), 10: pipelined_kernel(10, 3), 8: pipelined_kernel(8, 3),
             4: pipelined_kernel(4, 4)}


def rows_per_warp(card, n, rows):
    """The rows per warp that finish first. Every SM makes so many blocks of threads, and each takes as long as
    its rows and about two more, for the weights; 7 rows at least: fewer do not cover the latency of memory."""
    def time(each):
        n_blocks = -(-n // TILE_N) * -(-rows // (WARPS * each))
        return -(-n_blocks // card.n_sms) * (max(each, 7) + 2)
    return min(PIPELINED, key=time)


def _launch(card, kernel, grid, block, y, stride, wq, wd, xq, xd, n, k, rows, add, stream):
    wd = wd.view(np.uint16)
    arrays = (a.reshape(-1) for a in (y, wq, wd, xq, xd))
    card.launch(kernel, grid, block, *arrays, n, k, rows, stride, add, stream=stream)


def gemm_naive(card, y, stride, wq, wd, xq, xd, n, k, rows, add=False, stream=None):
    """As `gemm_q8_q8`, by version 1."""
    grid = (-(-n // 32), -(-rows // 8))
    _launch(card, gemm_naive_kernel, grid, (32, 8), y, stride, wq, wd, xq, xd, n, k, rows, add, stream)


def gemm_tiled(card, y, stride, wq, wd, xq, xd, n, k, rows, add=False, stream=None):
    """As `gemm_q8_q8`, by version 2."""
    grid = (-(-n // 32), -(-rows // 32))
    _launch(card, gemm_tiled_kernel, grid, (32, 8), y, stride, wq, wd, xq, xd, n, k, rows, add, stream)


def gemm_q8_q8(card, y, stride, wq, wd, xq, xd, n, k, rows, add=False, stream=None):
    """y <- (y +) x . w^T with w = (wq int8 [n, k], wd float16 [n, k / 32]) and x = (xq int8 [rows, k],
    xd float32 [rows, k / 32]). y: float32, n numbers of a row, `stride` from one row to the next, which is n or
    more where several products write side by side. Never allocates."""
    each = rows_per_warp(card, n, rows)
    grid = (-(-n // TILE_N), -(-rows // (WARPS * each)))
    _launch(card, PIPELINED[each], grid, (32, WARPS), y, stride, wq, wd, xq, xd, n, k, rows, add, stream)


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [(1, 32, 1), (4, 320, 3), (33, 96, 31), (129, 544, 33), (500, 1024, 65), (256, 64, 500)]  # n, k, rows


def check(card, n, k, rows, add=False, multiply=gemm_q8_q8):
    """Multiplies random matrices and returns the largest error as a fraction of what rounding may do: the
    chain over the blocks, the product of the scales and the addition to y, 2**-24 of the sum of
    magnitudes each."""
    rng = np.random.default_rng((n, k, rows))
    (wq, wd), (xq, xd) = random_q8(rng, n, k), random_activations(rng, rows, k)
    before = rng.standard_normal((rows, n), np.float32)
    y = card.alloc((rows + 1, n + 3), np.float32)      # columns before and behind, and a row too many
    card.poison(y)
    if add:
        card.copy_in(y[:rows], np.pad(before, ((0, 0), (1, 2)), constant_values=np.nan))
    multiply(card, y.reshape(-1)[1:], n + 3, *map(card.upload, (wq, wd, xq, xd)), n, k, rows, add)
    y = card.download(y)
    got = y[:rows, 1:n + 1].copy()
    y[:rows, 1:n + 1] = np.nan
    assert np.isnan(y).all(), "wrote elsewhere"
    magnitude = q8_reference(abs(wq.astype(int)), abs(wd), abs(xq.astype(int)), xd) + abs(before) * add
    bound = (k // BLOCK + 2) * 2.0**-24 * magnitude
    error = (abs(got - (q8_reference(wq, wd, xq, xd) + before * add)) / bound).max()
    assert error <= 1
    return error


TIMED = [(gemm_naive, 512, 512, 64), (gemm_tiled, 512, 512, 64), (gemm_q8_q8, 512, 512, 64),
         (gemm_q8_q8, 1024, 1024, 8), (gemm_q8_q8, 1024, 1024, 256), (gemm_q8_q8, 4096, 4096, 512)]


def cases(card):
    """The checks of all versions, then their times."""
    for case in CASES:
        yield Case("{} x {}, {} rows".format(*case), partial(check, card, *case))
        for version, multiply in enumerate((gemm_naive, gemm_tiled), 1):
            yield Case("{} x {}, {} rows, version {}".format(*case, version),
                       partial(check, card, *case, multiply=multiply))
    for multiply, n, k, rows in TIMED:
        wq, wd = card.zeros((n, k), np.int8), card.zeros((n, k // BLOCK), np.float16)
        xq, xd = card.zeros((rows, k), np.int8), card.zeros((rows, k // BLOCK), np.float32)
        y = card.alloc((rows, n), np.float32)
        yield Case(f"time of {multiply.__name__}, {n} x {k}, {rows} rows",
                   launch=partial(multiply, card, y, n, wq, wd, xq, xd, n, k, rows),
                   n_bytes=sum(a.nbytes for a in (wq, wd, xq, xd, y)), n_ops=2 * n * k * rows, pipe="dp4a")


if __name__ == "__main__":
    main("Q8_0 matrix x matrix", cases)
