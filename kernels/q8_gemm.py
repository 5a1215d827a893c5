"""Matrix x matrix for prompts: int8 weights (Q8_0) times int8 activations, tiled through shared memory.

    y[r, n] = acc;    for blocks b of 32, increasing:
                          acc = fma(float(dot(wq[n, b], xq[r, b])), wd[n, b] * xd[r, b], acc)

    wq  int8    [n, k]      wd  float16 [n, k / 32]       Q8_0 split into two arrays
    xq  int8    [rows, k]   xd  float32 [rows, k / 32]    of kernels/quantize.py
    y   float32 [rows, n]           k a multiple of 32, n and rows any, n k and rows n below 2**32
                                    with `add`, y + acc, rounded once more

The dot is an exact int32 (8 dp4a) and the float chain runs over b alone, so every tile shape, every number of
rows and every version below gives the same bits.

Version 1, `gemm_naive_kernel`: a thread per output, everything from global memory: two loads per dp4a.
Version 2, `tiled_kernel(rows_per_thread)`: a block of 8 warps makes 8 R rows x 128 columns of y, R =
rows_per_thread, and walks k by blocks of 32.

        shared (two of each, filled by turns)          a warp's outputs: R rows x 128 columns
        w  [8 words][128 + 4]  word-major              lane l has columns l, l + 32, l + 64, l + 96
        x  [8 R rows][8 words] row-major               -> R x 4 accumulators per thread
        wd [128], xd [8 R]

  * A thread keeps the 8 words of its 4 columns in 32 registers, then walks its rows: 8 words of x, the same
    for the whole warp (two broadcast 16-byte loads), feed 32 dp4a. Only 4 integer sums are alive at a time:
    with the scale applied every 32 weights, an outer product would need R x 4 of them.
  * The next block travels from global memory to registers while this one is multiplied: a barrier per block.
  * R = 8 needs 120 registers, so two blocks of threads fit an SM; R = 16 needs 160 and leaves room for one.

Pipe: dp4a, n k rows / 4 of them. Per block and output 8 dp4a and 3 float operations (unbias, scale, fma),
which share issue with dp4a on Volta: at most 73 % of its peak. Per warp and block of k a tile of R = 8 costs
256 dp4a (128 clocks of an SM) and 32 + 16 shared-memory wavefronts, so shared memory is not the limit.
Expected: 50 to 60 % of the dp4a peak.
"""

from functools import partial

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint32

from kernels.bench import Case, main
from kernels.intrinsics import BIAS_WORD, dp4a, half_to_float, load_word, load_words4, store_words4, unbias
from kernels.q8_gemv import q8_reference, random_activations, random_q8

BLOCK = 32  # weights per scale, and the depth of a tile
WORDS = 8  # of 4 int8 in a block
WARPS = 8
THREADS = 32 * WARPS
COLUMNS = 4  # per thread
TILE_N = 32 * COLUMNS
PITCH = TILE_N + 4  # words from one word row of w to the next: the halves of a block land in different banks
ROWS_PER_THREAD = (4, 8)  # the small tile for up to 32 rows

# The NumPy reference is that of the decode family, `q8_reference`: the formula in float64, without an order.


@cuda.jit
def gemm_naive_kernel(y, wq, wd, xq, xd, n, k, n_rows, add):
    column = uint32(cuda.blockIdx.x * uint32(32) + cuda.threadIdx.x)
    row = uint32(cuda.blockIdx.y * uint32(WARPS) + cuda.threadIdx.y)
    if column >= n or row >= n_rows:
        return
    blocks = uint32(k >> uint32(5))
    acc = float32(0.0)
    for b in range(blocks):
        w_at = uint32(column * blocks + uint32(b))
        x_at = uint32(row * blocks + uint32(b))
        dot = int32(BIAS_WORD)
        for i in range(WORDS):
            dot = dp4a(load_word(wq, uint32(uint32(w_at << uint32(5)) + uint32(4 * i))),
                       load_word(xq, uint32(uint32(x_at << uint32(5)) + uint32(4 * i))), dot)
        acc = cuda.fma(unbias(dot), half_to_float(wd[w_at]) * xd[x_at], acc)
    at = uint32(row * n + column)
    y[at] = y[at] + acc if add else acc


def tiled_kernel(rows_per_thread):
    """The tiled kernel whose warps make `rows_per_thread` rows each."""
    tile_m = WARPS * rows_per_thread
    w_words, x_words = WORDS * PITCH, tile_m * WORDS  # of one tile

    @cuda.jit(device=True, inline="always")
    def multiply(acc, w_tile, x_tile, w_scales, x_scales, lane, warp_row):
        """acc[r, c] += the tile's block of row warp_row + r times that of column lane + 32 c."""
        w = cuda.local.array((COLUMNS, WORDS), uint32)
        scale = cuda.local.array(COLUMNS, float32)
        x = cuda.local.array(WORDS, uint32)
        for c in range(COLUMNS):
            scale[c] = w_scales[uint32(lane + uint32(32 * c))]
            for i in range(WORDS):
                w[c, i] = w_tile[uint32(lane + uint32(i * PITCH + 32 * c))]
        for r in range(rows_per_thread):
            row = uint32(warp_row + uint32(r))
            x[0], x[1], x[2], x[3] = load_words4(x_tile, uint32(row * uint32(WORDS)))
            x[4], x[5], x[6], x[7] = load_words4(x_tile, uint32(row * uint32(WORDS) + uint32(4)))
            for c in range(COLUMNS):
                dot = int32(BIAS_WORD)
                for i in range(WORDS):
                    dot = dp4a(w[c, i], x[i], dot)
                acc[r, c] = cuda.fma(unbias(dot), scale[c] * x_scales[row], acc[r, c])

    @cuda.jit
    def gemm_q8_q8_kernel(y, wq, wd, xq, xd, n, k, n_rows, add):
        w_tiles = cuda.shared.array((2, w_words), uint32)
        x_tiles = cuda.shared.array((2, x_words), uint32, alignment=16)
        w_scales = cuda.shared.array((2, TILE_N), float32)
        x_scales = cuda.shared.array((2, tile_m), float32)
        lane, warp = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        thread = uint32(warp * uint32(32) + lane)
        column0 = uint32(cuda.blockIdx.x * uint32(TILE_N))
        row0 = uint32(cuda.blockIdx.y * uint32(tile_m))
        blocks = uint32(k >> uint32(5))

        # What this thread carries from global to shared memory: half a block of one row of w, the same of one
        # of x, and a scale of each. Rows past the end are the last row once more; they are not stored.
        piece, half = uint32(thread >> uint32(1)), uint32(uint32(thread & uint32(1)) << uint32(4))  # bytes
        last_column, last_row = uint32(n - uint32(1)), uint32(n_rows - uint32(1))
        w_from = uint32(min(uint32(column0 + piece), last_column) * blocks)
        x_from = uint32(min(uint32(row0 + piece), last_row) * blocks)
        wd_from = uint32(min(uint32(column0 + thread), last_column) * blocks)
        xd_from = uint32(min(uint32(row0 + thread), last_row) * blocks)
        w0, w1, w2, w3 = uint32(0), uint32(0), uint32(0), uint32(0)
        x0, x1, x2, x3 = uint32(0), uint32(0), uint32(0), uint32(0)
        w_scale, x_scale = float32(0.0), float32(0.0)

        warp_row = uint32(warp * uint32(rows_per_thread))
        warp_works = uint32(row0 + warp_row) < n_rows
        acc = cuda.local.array((rows_per_thread, COLUMNS), float32)
        for r in range(rows_per_thread):
            for c in range(COLUMNS):
                acc[r, c] = float32(0.0)

        # Turn b loads block b, multiplies block b - 1, and then puts block b where block b - 2 was.
        for turn in range(uint32(blocks + uint32(1))):
            b = uint32(turn)
            if b < blocks:
                w0, w1, w2, w3 = load_words4(wq, uint32(uint32(uint32(w_from + b) << uint32(5)) + half))
                if piece < uint32(tile_m):
                    x0, x1, x2, x3 = load_words4(xq, uint32(uint32(uint32(x_from + b) << uint32(5)) + half))
                if thread < uint32(TILE_N):
                    w_scale = half_to_float(wd[uint32(wd_from + b)])
                if thread < uint32(tile_m):
                    x_scale = xd[uint32(xd_from + b)]
            if b > uint32(0) and warp_works:
                side = uint32(uint32(b + uint32(1)) & uint32(1))
                multiply(acc, w_tiles[side], x_tiles[side], w_scales[side], x_scales[side], lane, warp_row)
            if b < blocks:
                side = uint32(b & uint32(1))
                word = uint32(half >> uint32(2))  # of the block, 0 or 4
                at = uint32(word * uint32(PITCH) + piece)
                w_tiles[side, at] = w0
                w_tiles[side, uint32(at + uint32(PITCH))] = w1
                w_tiles[side, uint32(at + uint32(2 * PITCH))] = w2
                w_tiles[side, uint32(at + uint32(3 * PITCH))] = w3
                if piece < uint32(tile_m):
                    store_words4(x_tiles[side], uint32(piece * uint32(WORDS) + word), x0, x1, x2, x3)
                if thread < uint32(TILE_N):
                    w_scales[side, thread] = w_scale
                if thread < uint32(tile_m):
                    x_scales[side, thread] = x_scale
            cuda.syncthreads()

        for r in range(rows_per_thread):
            row = uint32(row0 + warp_row + uint32(r))
            for c in range(COLUMNS):
                column = uint32(column0 + lane + uint32(32 * c))
                at = uint32(row * n + column)
                if row < n_rows and column < n:
                    y[at] = y[at] + acc[r, c] if add else acc[r, c]

    return gemm_q8_q8_kernel


TILED = {rows: tiled_kernel(rows) for rows in ROWS_PER_THREAD}


def _launch(card, kernel, grid, y, wq, wd, xq, xd, n, k, rows, add, stream):
    wd = wd.view(np.uint16)
    arrays = (a.reshape(-1) for a in (y, wq, wd, xq, xd))
    card.launch(kernel, grid, (32, WARPS), *arrays, n, k, rows, add, stream=stream)


def gemm_naive(card, y, wq, wd, xq, xd, n, k, rows, add=False, stream=None):
    """As `gemm_q8_q8`, by version 1."""
    grid = (-(-n // 32), -(-rows // WARPS))
    _launch(card, gemm_naive_kernel, grid, y, wq, wd, xq, xd, n, k, rows, add, stream)


def gemm_q8_q8(card, y, wq, wd, xq, xd, n, k, rows, add=False, stream=None):
    """y float32 [rows, n] <- (y +) x . w^T with w = (wq int8 [n, k], wd float16 [n, k / 32]) and
    x = (xq int8 [rows, k], xd float32 [rows, k / 32]). Never allocates."""
    per_thread = ROWS_PER_THREAD[0] if rows <= WARPS * ROWS_PER_THREAD[0] else ROWS_PER_THREAD[-1]
    grid = (-(-n // TILE_N), -(-rows // (WARPS * per_thread)))
    _launch(card, TILED[per_thread], grid, y, wq, wd, xq, xd, n, k, rows, add, stream)


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [(1, 32, 1), (4, 320, 3), (33, 96, 31), (129, 544, 33), (500, 1024, 65), (256, 64, 500)]  # n, k, rows


def check(card, n, k, rows, add=False, multiply=gemm_q8_q8):
    """Multiplies random matrices and returns the largest error as a fraction of what rounding may do: the
    chain over the blocks, the product of the scales and the addition to y, 2**-24 of the sum of
    magnitudes each."""
    rng = np.random.default_rng((n, k, rows))
    (wq, wd), (xq, xd) = random_q8(rng, n, k), random_activations(rng, rows, k)
    before = rng.standard_normal((rows, n), np.float32)
    y = card.alloc((rows + 1, n), np.float32)
    card.poison(y)
    if add:
        card.copy_in(y[:rows], before)
    multiply(card, y[:rows], *map(card.upload, (wq, wd, xq, xd)), n, k, rows, add)
    y = card.download(y)
    assert np.isnan(y[rows]).all(), "wrote past the end"
    magnitude = q8_reference(abs(wq.astype(int)), abs(wd), abs(xq.astype(int)), xd) + abs(before) * add
    bound = (k // BLOCK + 2) * 2.0**-24 * magnitude
    error = (abs(y[:rows] - (q8_reference(wq, wd, xq, xd) + before * add)) / bound).max()
    assert error <= 1
    return error


TIMED = [(gemm_naive, 512, 512, 64), (gemm_q8_q8, 512, 512, 64), (gemm_q8_q8, 1024, 1024, 8),
         (gemm_q8_q8, 1024, 1024, 256), (gemm_q8_q8, 4096, 4096, 512)]


def cases(card):
    """The checks of both versions, then their times."""
    for case in CASES:
        yield Case("{} x {}, {} rows".format(*case), partial(check, card, *case))
        yield Case("{} x {}, {} rows, version 1".format(*case),
                   partial(check, card, *case, multiply=gemm_naive))
    for multiply, n, k, rows in TIMED:
        wq, wd = card.zeros((n, k), np.int8), card.zeros((n, k // BLOCK), np.float16)
        xq, xd = card.zeros((rows, k), np.int8), card.zeros((rows, k // BLOCK), np.float32)
        y = card.alloc((rows, n), np.float32)
        yield Case(f"time of {multiply.__name__}, {n} x {k}, {rows} rows",
                   launch=partial(multiply, card, y, wq, wd, xq, xd, n, k, rows),
                   n_bytes=sum(a.nbytes for a in (wq, wd, xq, xd, y)), n_ops=2 * n * k * rows, pipe="dp4a")


if __name__ == "__main__":
    main("Q8_0 matrix x matrix", cases)
