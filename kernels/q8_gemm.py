"""Matrix x matrix for prompts: quantised weights times int8 activations.

    y[r, n] = acc;    for blocks b of 32, increasing:
                          acc = fma(float(dot(wq[n, b], xq[r, b])), wd[n, b] * xd[r, b], acc)

    w   of a format of kernels/formats.py: for Q8_0  wq  int8  [n, k]  and  wd  float16  [n, k / 32]
    xq  int8    [rows, k]   xd  float32 [rows, k / 32]    of kernels/quantize.py
    y   float32 [rows, n]           k a multiple of 32, n and rows any, n k and rows n below 2**32
                                    with `add`, y + acc, rounded once more

The formula is that of Q8_0; what a block of another format adds is in kernels/formats.py. The dot is an exact
int32 (8 dp4a) and the float chain runs over b alone, so every tile shape, every number of rows and every
version below gives the same bits.

Version 1, `gemm_naive_kernel`: a thread per output, everything from global memory: two loads per dp4a.
Version 2, `gemm_tiled_kernel`: 32 x 32 outputs per block of threads, w and x through shared memory: still
more than one load per dp4a, and everyone waits for memory twice per block of k.
Version 3, `pipelined_kernel(format, R)`: a warp makes R rows x 128 columns of y, the 4 warps of a block lie
one below the other. It serves every format: a thread unpacks the block that it carries.

        shared memory                                  a warp's outputs: R rows x 128 columns
        w  2 sides [128][48]: 32 bytes, 16 of padding  lane l has columns l, l + 32, l + 64, l + 96
           and [1 to 3][128] words: their scales       -> R x 4 accumulators per thread
        x  3 sides [4 warps], [16][32] bytes each
           and [2][16]: scales, scale * sum

  * A thread keeps the 32 words of its 4 columns in registers and walks the rows: 8 words of x, the same for
    the whole warp (two broadcast 16-byte loads), feed 32 dp4a. Nothing is transposed, so the tiles are stored
    and loaded by 16 bytes; the padding puts 8 neighbouring lanes into different banks.
  * Everything is under way while something is multiplied: row r + 1 while row r is, the scales of four rows
    ahead of them; block b + 2 from global memory to registers and block b + 1 from registers, unpacked, to the
    next side while block b is.
  * The one barrier of a turn stands in the middle of its rows, where nobody waits for what it guards: block
    b + 1 was put a few rows before, and is read at the end of the turn. Hence a third side of x: a warp may put
    block b + 2 while another is not beyond the last rows of b. The assembler moves products across a barrier as
    it likes, but no load: those of rows keep it in its place.
  * A warp's load of 16 bytes from each of 32 columns takes 32 turns of the L1 cache, which were the busiest
    part of an SM but for the multipliers. So lanes 2 r and 2 r + 1 bring a half of row r of x each, and halves
    of a column's block of Q8_0 (`carriers`); a packed block is 16 bytes and a few, and a thread brings it whole.
  * The loop has no branch: of 790 instructions for Q8_0 512 are dp4a, 192 the scaling, 60 memory, the rest 26.
    Q4_K adds 64 fma and 20 for unpacking; Q6_K 128 integer multiplications and 64 accumulators that start.
  * R = 16 takes 168 registers, so 12 warps fit an SM (with 64 KB of shared memory 8 for Q4_K, Q5_K and Q6_K).
    R = 15, 10, 8 and 4 are for rows that fill the last round of blocks badly (see `rows_per_warp`). For
    an odd R the first row of the next block arrives in the other registers, and is moved.
  * The dot becomes a float by the conversion instruction, which has a pipe of its own (16 lanes on Volta,
    half the time of the dp4a beside it), and not by `unbias`, whose addition is on the pipe of dp4a.

Pipe: dp4a, n k rows / 4 of them. Per block and output 8 dp4a and 2 float32 operations share it: at most 80 %
of the dp4a peak on Volta (the estimate says the same; with `unbias` 73 %), and 89 % on an H100 or H200, where
float32 has twice the lanes. Of that an H200 reaches 82.5 % in a loop of these instructions on registers alone
(80 % with `unbias`, 95 % without any scaling), before anything is loaded or anyone waits. While all SMs are busy
this kernel reaches 77 %; with 4096 rows the last round of blocks, a sixth of what fits the card, costs 3 %.

Measured on an H200 (2026-11-21, 1.98 GHz; per cent of the 133.8 TOPS of 64 lanes per SM; n x k x rows):

                                                 4096 x 4096 x 4096   12288 x 4096 x 4096   4096 x 4096 x 297
    version 3                                            74.8                 76.7                58.4
      a thread brings a whole column of Q8_0             74.3                 75.9                55.2
      the barrier at 7 rows of 16 and at 10              73.8 and 72.6        75.0 and 75.5       55.4 and 55.1
      loop turned by a row, so that its end is           74.7                 76.2                53.0
          not where the weights change
      warps beyond the last row carry, no more           71.6                 73.4                56.7
    two sides of x, the barrier before the last row,     70.4                 71.6                51.1
        scales of rows handed on by shuffles
      the same, of rows loaded one by one                70.5                 73.1                54.5
        with `unbias`                                    68.3                 70.5                52.7
        2 blocks of threads per SM, 217 registers        66.5
        words of w one by one from word-major tiles      69.3                 69.1
        8 rows x 8 columns per thread                    57.6                 59.3
    outer product, 8 x 8 per thread, tiles               71.5                                     49.4 (5 x 8)
        transposed, scaling amid the first products
      with `unbias`                                      69.2                                     48.4 (5 x 8)
      6 x 8 per thread, 3 warps per scheduler            63.1
    8 rows x 4 columns, nothing ahead but the tile       51.7                 54.6                29.1
    versions 2 and 1 (1024 rows)                         18.9 and 1.3

    Q4_K                                                 67.6                 69.7                54.1
    Q6_K                                                 59.4                 61.1                48.0

The outer product is as fast for many rows, but slower for few, and half as fast on the emulated card. 297
rows are 256 blocks of threads of 40 rows for 132 SMs: 90 % of the two rounds is work. A split of k would give
other bits. R = 15 came after these measurements: prompts of a 9B went from 55.9 to 57.7 % at 297 tokens (12288 x 4096:
5 tiles of 60 rows, not of 64) and from 64.7 to 65.7 % at 1,160, all kernels included; R = 13 beside it added nothing.
Launches that overlap (kernels/intrinsics.py) lost, with the first weights fetched before the wait: 50.8 for 56.1 % at
297 tokens, 64.5 for 65.2 % at 1,160 (H100): the next product's blocks take the room of the one that still runs.

What that allows a prompt of a 9B (Q8_0, H100 80GB HBM3, 2026-11-21, all kernels included, per cent of the peak): as one
part after the other 297, 1,160, 4,620 and 18,400 tokens ran at 56.5, 65.5, 68.2 and 61.4. Then the last round of blocks
leaves SMs idle, and what is no product leaves dp4a idle:

    tokens   whole   work at the peak   all but products   the products    share of     registers alone,
                                                           have left       the rounds   by that share
     1,160   184 ms       120 ms             10 ms         174 ms: 69 %       94 %          77.5 %
     4,620   703 ms       479 ms             63 ms         640 ms: 75 %       98 %          80.8 %

In lanes (`qengine.Lane`), parts of a prompt side by side, both find room beside another part's blocks, and the time is
that of the blocks' work: 27 prompts of 640 to 4,096 tokens in 2 to 6 lanes took, within 1.1 %, 0.93 of the sum of
`tile_work` at 1.15 ns, 11 ms for 1,000 tokens, 1.9 ms for the square of that, and 7 to 11 ms. Tiles are the larger ones
then, whatever the rounds (1,160 tokens in lanes of 384, 384, 384 and 8 rows: 71.3 %, with the tiles that are best alone
69.2). 1,160, 4,620 and 18,400 tokens run at 72.0, 71.2 and 63.7 %, at the card's limit of 700 W, where its clock begins
to give way. 297 tokens stay as they were, at 56.4: 93 % of their rounds is work, and of two or three lanes (128 and
169 rows: 55.1, 192 and 105: 55.4, 64 and 233: 52.3, 128, 128 and 41: 55.8) each has fewer blocks than there are SMs.
Of their 54.3 ms (2026-11-22) the products alone take 49.2, 62.4 % of the peak, the other kernels alone 3.05, and the
head with the choice 0.39: without anything between launches they would run at 58.2 %. 4,620 tokens in one pass of
1,152, 1,152, 1,152, 1,152 and 12 rows took as long as in two, 665.8 ms for 664.4 (71.8 and 71.9 %).
"""

from functools import cache, partial

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint32, uint64

from kernels.bench import Case, main
from kernels.formats import BLOCK, FORMATS, as_words, on_card, product_reference, random_raw
from kernels.intrinsics import (dp4a, float_as_word, half_to_float, load_shared, load_shared4,
                                load_word, load_words4, shared_address, store_shared, store_shared4, word_as_float)
from kernels.q8_gemv import random_activations

WORDS = 8  # of 4 int8 in a block
WARPS = 4
THREADS = 32 * WARPS
COLUMNS = 4  # per thread
TILE_N = 32 * COLUMNS
assert TILE_N == THREADS  # each thread carries one column

# Shared memory, in bytes.
PITCH = 48  # from a column's block to the next
X_ROWS = 16 * BLOCK  # of a warp; behind them the scales of its rows and, for a minimum, scale * sum
X_WARP = X_ROWS + 2 * 16 * 4
X_SIDE = WARPS * X_WARP
X_END = 3 * X_SIDE

# The NumPy reference is formats.product_reference: the formula in float64, without an order.


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
def load_block(w, at):
    w[0], w[1], w[2], w[3] = load_shared4(at)
    w[4], w[5], w[6], w[7] = load_shared4(at + uint64(16))


def carriers(format):
    """How a thread brings a block of w from global to shared memory: (begin, fetch, place, second).

    begin(first, last, thread, blocks): where its bytes and scales start in a tile of columns from `first` on (columns
    past `last` are that one once more). fetch: them, to registers. place(thread): where its bytes go, the second 16 of
    them `second` bytes on. A thread carries its column, scales and all; but of Q8_0, whose block is 32 bytes, two
    threads carry half a column's each, and then of the column 64 on: a load touches half as many cache lines.
    """
    starts, fetch_block = format.starts, format.fetch

    @cuda.jit(device=True, forceinline=True)
    def begin(first, last, thread, blocks):
        q_from, d_from = starts(min(uint32(first + thread), last), blocks)
        return q_from, q_from, d_from

    @cuda.jit(device=True, forceinline=True)
    def fetch(raw, wq, wd, start, blocks, b):
        fetch_block(raw, wq, wd, start[0], start[2], blocks, b)

    @cuda.jit(device=True, forceinline=True)
    def place(thread):
        return uint32(thread * uint32(PITCH))

    @cuda.jit(device=True, forceinline=True)
    def begin_halves(first, last, thread, blocks):
        column, half = uint32(first + uint32(thread >> uint32(1))), uint32(uint32(thread & uint32(1)) << uint32(4))
        one, _ = starts(min(column, last), blocks)
        two, _ = starts(min(uint32(column + uint32(TILE_N // 2)), last), blocks)
        _, d_from = starts(min(uint32(first + thread), last), blocks)
        return uint32(one + half), uint32(two + half), d_from

    @cuda.jit(device=True, forceinline=True)
    def fetch_halves(raw, wq, wd, start, blocks, b):
        at = uint32(b << uint32(5))
        raw[0], raw[1], raw[2], raw[3] = load_words4(wq, uint32(start[0] + at))
        raw[4], raw[5], raw[6], raw[7] = load_words4(wq, uint32(start[1] + at))
        raw[8] = uint32(wd[uint32(start[2] + b)])

    @cuda.jit(device=True, forceinline=True)
    def place_halves(thread):
        return uint32(uint32(uint32(thread >> uint32(1)) * uint32(PITCH))
                      + uint32(uint32(thread & uint32(1)) << uint32(4)))

    return (begin_halves, fetch_halves, place_halves, TILE_N // 2 * PITCH) if format.bits == 8 else \
        (begin, fetch, place, 16)


def device_functions(format, second):
    """The parts of version 3 that depend on what a block's scales are; `second` as in `carriers`."""
    minimum, halves, unpack, n_scales = format.minimum, 1 + format.halves, format.unpack, format.n_scales

    @cuda.jit(device=True, forceinline=True)
    def put_column(raw, to, scale_to):
        """A block of w, as it lies in global memory, to shared memory: int8 and scales."""
        w, scales = cuda.local.array(WORDS, uint32), cuda.local.array(n_scales, uint32)
        unpack(w, scales, raw)
        store_shared4(to, w[0], w[1], w[2], w[3])
        store_shared4(to + uint64(second), w[4], w[5], w[6], w[7])
        for s in range(n_scales):
            store_shared(scale_to + uint64(4 * TILE_N * s), scales[s])

    @cuda.jit(device=True, forceinline=True)
    def put_x(words, scale, to, scale_to):
        """Half a block of x to shared memory, with the scale of the row from the even lane of the two; from the odd
        one, where it is wanted, scale * sum of the block."""
        store_shared4(to, words[0], words[1], words[2], words[3])
        if minimum:
            total = int32(0)
            for i in range(4):
                total = dp4a(words[i], uint32(0x01010101), total)
            total = int32(total + cuda.shfl_xor_sync(0xFFFFFFFF, total, 1))
            if uint32(cuda.threadIdx.x) & uint32(1):
                scale = scale * float32(total)
        store_shared(scale_to, float_as_word(scale))

    @cuda.jit(device=True, forceinline=True)
    def load_x_scales(x_scales, r, x_at):
        """The scales of rows r .. r + 3, r a multiple of 4: x_scales[r / 4 % 2, 0 or 1 for scale * sum]."""
        for s in range(1 + minimum):
            to = x_scales[(r >> 2) & 1, s]
            to[0], to[1], to[2], to[3] = load_shared4(x_at + uint64(X_ROWS + 64 * s + 4 * r))

    @cuda.jit(device=True, forceinline=True)
    def multiply_row(acc, r, w, w_scales, x, x_scales):
        """acc[r, c] += the block of x times that of column c."""
        dot = cuda.local.array((halves, COLUMNS), int32)
        for c in range(COLUMNS):
            for h in range(halves):
                dot[h, c] = int32(0)
        for i in range(WORDS):
            for c in range(COLUMNS):
                dot[i * halves // WORDS, c] = dp4a(w[c, i], x[i], dot[i * halves // WORDS, c])
        for c in range(COLUMNS):
            total = dot[0, c]
            if halves == 2:
                total = int32(int32(total * int32(w_scales[1, c])) + int32(dot[1, c] * int32(w_scales[2, c])))
            scale = word_as_float(w_scales[0, c]) * word_as_float(x_scales[(r >> 2) & 1, 0, r & 3])
            acc[r, c] = cuda.fma(float32(total), scale, acc[r, c])
            if minimum:
                acc[r, c] = cuda.fma(word_as_float(w_scales[1, c]), word_as_float(x_scales[(r >> 2) & 1, 1, r & 3]),
                                     acc[r, c])

    return put_column, put_x, load_x_scales, multiply_row


def pipelined_kernel(format, rows, blocks_per_sm):
    """Version 3 for a format of weights, whose warps make `rows` rows each, 4 to 16; `blocks_per_sm` find registers."""
    put_row, sync_row, is_odd = rows // 3, rows // 2, rows % 2 == 1
    rest_row = (sync_row + rows) // 2  # the compiler unrolls no longer loops
    begin, fetch, place, second = carriers(format)
    put_column, put_x, load_x_scales, multiply_row = device_functions(format, second)
    per_row, n_scales, raw_words = 1 + format.minimum, format.n_scales, format.raw_words
    w_side = TILE_N * (PITCH + 4 * n_scales)
    shared_words = (2 * w_side + X_END) // 4

    @cuda.jit(device=True, forceinline=True)
    def multiply_rows(acc, first, last, w, w_scales, x, x_at, x_scales):
        """Rows first .. last - 1 of a block; the next row, and the next four's scales, are loaded meanwhile."""
        for r in range(first, last):
            load_block(x[(r + 1) & 1], x_at + uint64(BLOCK * (r + 1)))
            if r & 3 == 1 and r + 3 < rows:
                load_x_scales(x_scales, r + 3, x_at)
            multiply_row(acc, r, w, w_scales, x[r & 1], x_scales)

    @cuda.jit(device=True, forceinline=True)
    def fetch_x(words, xq, xd, x_from, xd_from, b):
        """Half a block of x from global memory, and its scale."""
        words[0], words[1], words[2], words[3] = load_words4(xq, uint32(x_from + uint32(b << uint32(5))))
        return xd[uint32(xd_from + b)]

    @cuda.jit(launch_bounds=(THREADS, blocks_per_sm))
    def gemm_q8_q8_kernel(y, wq, wd, xq, xd, n, k, n_rows, stride, add):
        lane, warp = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        thread = uint32(warp * uint32(32) + lane)
        column0 = uint32(cuda.blockIdx.x * uint32(TILE_N))
        row0 = uint32(uint32(cuda.blockIdx.y * uint32(WARPS) + warp) * uint32(rows))
        blocks = uint32(k >> uint32(5))
        last, last_row = uint32(blocks - uint32(1)), uint32(n_rows - uint32(1))

        # What this thread carries, from the arrays to shared memory. Rows past the end are the last one once
        # more; they are not stored. Lanes that a warp of few rows does not need do the same.
        start = begin(column0, uint32(n - uint32(1)), thread, blocks)
        row, half = uint32(min(uint32(lane >> uint32(1)), uint32(rows - 1))), uint32(lane & uint32(1))
        xd_from = uint32(min(uint32(row0 + row), last_row) * blocks)
        x_from = uint32(uint32(xd_from << uint32(5)) + uint32(half << uint32(4)))
        raw = cuda.local.array(raw_words, uint32)
        x_words = cuda.local.array(4, uint32)

        # Addresses in shared memory, on the first side: where it puts that; where its columns, their scales and
        # its rows are. And from there to the sides in use and to those that follow.
        w_to = shared_address(cuda.shared.array(shared_words, uint32, alignment=16))
        wd_to = w_to + uint64(TILE_N * PITCH)
        x_at = w_to + uint64(2 * w_side) + uint64(uint32(warp * uint32(X_WARP)))
        w_at, wd_at = w_to + uint64(uint32(lane * uint32(PITCH))), wd_to + uint64(uint32(lane << uint32(2)))
        w_to, wd_to = w_to + uint64(place(thread)), wd_to + uint64(uint32(thread << uint32(2)))
        x_to = x_at + uint64(uint32(lane << uint32(4)))
        xd_to = x_at + uint64(X_ROWS) + uint64(uint32(uint32(row << uint32(2)) + uint32(half << uint32(6))))
        w_here, w_next, x_here, x_next = uint64(0), uint64(w_side), uint64(0), uint64(X_SIDE)

        acc = cuda.local.array((rows, COLUMNS), float32)
        for r in range(rows):
            for c in range(COLUMNS):
                acc[r, c] = float32(0.0)
        w = cuda.local.array((COLUMNS, WORDS), uint32)
        x = cuda.local.array((2, WORDS), uint32)
        w_scales = cuda.local.array((n_scales, COLUMNS), uint32)
        x_scales = cuda.local.array((2, per_row, 4), uint32)
        fetch(raw, wq, wd, start, blocks, uint32(0))
        x_scale = fetch_x(x_words, xq, xd, x_from, xd_from, uint32(0))
        put_column(raw, w_to, wd_to)
        put_x(x_words, x_scale, x_to, xd_to)
        b = min(uint32(1), last)
        fetch(raw, wq, wd, start, blocks, b)
        x_scale = fetch_x(x_words, xq, xd, x_from, xd_from, b)
        cuda.syncthreads()
        for c in range(COLUMNS):
            load_block(w[c], w_at + uint64(32 * PITCH * c))
        load_block(x[0], x_at)
        load_x_scales(x_scales, 0, x_at)

        turn = uint32(0)
        while turn < blocks:
            for s in range(n_scales):
                for c in range(COLUMNS):
                    w_scales[s, c] = load_shared(wd_at + w_here + uint64(4 * TILE_N * s + 128 * c))
            x_now = x_at + x_here
            multiply_rows(acc, 0, put_row, w, w_scales, x, x_now, x_scales)
            put_column(raw, w_to + w_next, wd_to + w_next)
            put_x(x_words, x_scale, x_to + x_next, xd_to + x_next)
            multiply_rows(acc, put_row, sync_row, w, w_scales, x, x_now, x_scales)
            b = min(uint32(turn + uint32(2)), last)
            fetch(raw, wq, wd, start, blocks, b)
            x_scale = fetch_x(x_words, xq, xd, x_from, xd_from, b)
            cuda.syncthreads()
            multiply_rows(acc, sync_row, rest_row, w, w_scales, x, x_now, x_scales)
            multiply_rows(acc, rest_row, rows - 1, w, w_scales, x, x_now, x_scales)
            load_block(x[rows & 1], x_at + x_next)
            multiply_row(acc, rows - 1, w, w_scales, x[(rows - 1) & 1], x_scales)
            if is_odd:
                for i in range(WORDS):
                    x[0, i] = x[1, i]
            for c in range(COLUMNS):
                load_block(w[c], w_at + w_next + uint64(32 * PITCH * c))
            load_x_scales(x_scales, 0, x_at + x_next)
            w_here, w_next, x_here = w_next, w_here, x_next
            x_next = x_next + uint64(X_SIDE)
            if x_next == uint64(X_END):
                x_next = uint64(0)
            turn = uint32(turn + uint32(1))

        for r in range(rows):
            row = uint32(row0 + uint32(r))
            for c in range(COLUMNS):
                column = uint32(column0 + lane + uint32(32 * c))
                at = uint32(row * stride + column)
                if row < n_rows and column < n:
                    y[at] = y[at] + acc[r, c] if add else acc[r, c]

    return gemm_q8_q8_kernel


# Rows per warp -> registers for so many blocks of threads on an SM.
TILES = {16: 3, 15: 3, 10: 3, 8: 3, 4: 4}
BESIDE = 0.93  # of a block's time where products of several parts fill an SM


@cache
def pipelined(format, rows):
    """The kernel of a format for `rows` rows per warp, a key of TILES."""
    return pipelined_kernel(format, rows, TILES[rows])


def block_count(n, rows, each):
    """Blocks of threads of a product with `each` rows per warp."""
    return -(-n // TILE_N) * -(-rows // (WARPS * each))


def block_time(each):
    """How long one takes, per weight of a row, in the time of one row of a warp: its rows and about two more, for the
    weights; 7 rows at least, since fewer do not cover the latency of memory."""
    return max(each, 7) + 2


def tile_work(card, n, rows, each):
    """The time that the blocks of a product take of each SM."""
    return block_count(n, rows, each) / card.n_sms * block_time(each)


def tile_time(card, n, rows, each):
    """How long the product takes by itself: every SM makes so many blocks, the last round of which takes as long as
    any. Until the first and after the last some 3 rows' time is lost."""
    return -(-block_count(n, rows, each) // card.n_sms) * block_time(each) + 3


def rows_per_warp(card, n, rows, beside=False):
    """The rows per warp that finish first or, `beside` other kernels, which take the SMs that the last round leaves
    idle, leave them the most time."""
    time = tile_work if beside else tile_time
    return min(TILES, key=lambda each: time(card, n, rows, each))


def filling_rows(card, n):
    """About the rows, a multiple of those of a block of threads, whose product has a block for each SM."""
    return max(round(card.n_sms * TILE_N / n), 1) * WARPS * max(TILES)


def relative_time(card, n, k, lanes):
    """How long a product takes of the rows of all lanes, one beside the other, to compare with others on the same card.
    A unit is 1.15 ns on an H200, for 4096 or 12288 columns and 297 to 4096 rows within 2 %."""
    if len(lanes) == 1:
        rows, = lanes
        return k * tile_time(card, n, rows, rows_per_warp(card, n, rows))
    work = sum(tile_work(card, n, rows, rows_per_warp(card, n, rows, beside=True)) for rows in lanes)
    return k * (work * BESIDE + 3)


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


def gemm(card, format, y, stride, wq, wd, xq, xd, n, k, rows, add=False, stream=None, beside=False):
    """y <- (y +) x . w^T with weights (wq, wd) [n, k] of a format of kernels/formats.py and x = (xq int8 [rows, k],
    xd float32 [rows, k / 32]). y: float32, n numbers of a row, `stride` from one row to the next, which is n or
    more where several products write side by side. beside: as `rows_per_warp`. Never allocates."""
    each = rows_per_warp(card, n, rows, beside)
    grid = (-(-n // TILE_N), -(-rows // (WARPS * each)))
    arrays = (a.reshape(-1) for a in (y, wq, as_words(wd), xq, xd))
    card.launch(pipelined(format, each), grid, (32, WARPS), *arrays, n, k, rows, stride, add, stream=stream)


def gemm_q8_q8(card, y, stride, wq, wd, xq, xd, n, k, rows, add=False, stream=None):
    """`gemm` with w = (wq int8 [n, k], wd float16 [n, k / 32])."""
    gemm(card, FORMATS["Q8_0"], y, stride, wq, wd, xq, xd, n, k, rows, add, stream)


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [(1, 32, 1), (4, 320, 3), (33, 96, 31), (129, 544, 33), (500, 1024, 65), (256, 64, 500)]  # n, k, rows
FORMAT_CASES = [(1, 1, 1), (33, 3, 31), (130, 2, 65)]  # n, blocks of the file in a row of w, rows


def check(card, n, k, rows, add=False, multiply=gemm_q8_q8, format=FORMATS["Q8_0"]):
    """Multiplies random matrices and returns the largest error as a fraction of what rounding may do: the
    chain over the blocks, the product of the scales and the addition to y, 2**-24 of the sum of
    magnitudes each."""
    rng = np.random.default_rng((n, k, rows))
    raw, (xq, xd) = random_raw(rng, format, n, k), random_activations(rng, rows, k)
    before = rng.standard_normal((rows, n), np.float32)
    y = card.alloc((rows + 1, n + 3), np.float32)      # columns before and behind, and a row too many
    card.poison(y)
    if add:
        card.copy_in(y[:rows], np.pad(before, ((0, 0), (1, 2)), constant_values=np.nan))
    multiply(card, y.reshape(-1)[1:], n + 3, *on_card(card, format, raw, n, k), card.upload(xq), card.upload(xd), n, k,
             rows, add)
    y = card.download(y)
    got = y[:rows, 1:n + 1].copy()
    y[:rows, 1:n + 1] = np.nan
    assert np.isnan(y).all(), "wrote elsewhere"
    want, magnitude = product_reference(format, raw, xq, xd)
    bound = (k // BLOCK * (1 + format.minimum) + 2) * 2.0**-24 * (magnitude + abs(before) * add)
    error = (abs(got - (want + before * add)) / bound).max()
    assert error <= 1
    return error


TIMED = [(gemm_naive, 512, 512, 64), (gemm_tiled, 512, 512, 64), (gemm_q8_q8, 512, 512, 64),
         (gemm_q8_q8, 1024, 1024, 8), (gemm_q8_q8, 1024, 1024, 256), (gemm_q8_q8, 4096, 4096, 512)]


def cases(card):
    """The checks of all versions and formats, then their times."""
    for case in CASES:
        yield Case("{} x {}, {} rows".format(*case), partial(check, card, *case))
        for version, multiply in enumerate((gemm_naive, gemm_tiled), 1):
            yield Case("{} x {}, {} rows, version {}".format(*case, version),
                       partial(check, card, *case, multiply=multiply))
    for name, format in FORMATS.items():
        for n, blocks, rows in FORMAT_CASES:
            case = n, blocks * format.file_block, rows
            yield Case(f"{n} x {case[1]}, {rows} rows, {name}", partial(check, card, *case, format=format,
                                                                         multiply=multiplier(format)))
    for multiply, n, k, rows in TIMED:
        yield timed(card, multiply.__name__, multiply, FORMATS["Q8_0"], n, k, rows)
    for name, format in FORMATS.items():
        yield timed(card, name, multiplier(format), format, 1024, 1024, 256)


def multiplier(format):
    """`gemm` of a format, called as `gemm_q8_q8` is."""
    return lambda card, *arguments: gemm(card, format, *arguments)


def timed(card, name, multiply, format, n, k, rows):
    wq, wd = (card.zeros(*array) for array in format.arrays(n, k))
    xq, xd = card.zeros((rows, k), np.int8), card.zeros((rows, k // BLOCK), np.float32)
    y = card.alloc((rows, n), np.float32)
    return Case(f"time of {name}, {n} x {k}, {rows} rows",
                launch=partial(multiply, card, y, n, wq, wd, xq, xd, n, k, rows),
                n_bytes=sum(a.nbytes for a in (wq, wd, xq, xd, y)), n_ops=2 * n * k * rows, pipe="dp4a")


if __name__ == "__main__":
    main("Matrix x matrix", cases)
