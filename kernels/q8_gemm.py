"""Matrix x matrix products for prompts: quantised weights times int8 activations.

    y[r, n] = acc;    for blocks b of 32, increasing:
                          acc = fma(float(dot(wq[n, b], xq[r, b])), wd[n, b] * xd[r, b], acc)

    w   of a format of kernels/formats: for Q8_0  wq  int8  [n, k]  and  wd  float16  [n, k / 32]
    xq  int8    [rows, k]   xd  float32 [rows, k / 32]    of kernels/quantize.py
    y   float32 [rows, n]           k a multiple of 32, n and rows any, n k and rows n below 2**32
                                    with `add`, y + acc, rounded once more

This formula is that of Q8_0; kernels/formats says what a block of another format adds. The dot is an exact int32
(8 dp4a) and the float chain runs over b alone. So every tile shape, number of rows and version has the same bits.

Version 1, `gemm_naive_kernel`: a thread per output, everything from global memory, two loads per dp4a.
Version 2, `gemm_tiled_kernel`: 32 x 32 outputs per block of threads, w and x through shared memory. It still needs more
than one load per dp4a, and all threads wait for memory twice per block of k.
Version 3, `pipelined_kernel(format, R)`: a warp makes R rows x 128 columns of y; a block has 4 warps, one below the
other. It serves every format; a thread unpacks the block of w that it brings to shared memory.

        shared memory                                  a warp's outputs: R rows x 128 columns
        w  2 buffers [128][48]: 32 bytes, 16 padding   lane l has columns l, l + 32, l + 64, l + 96
           and [1 to 3][128] words: their scales       -> R x 4 accumulators per thread
        x  3 buffers [4 warps], [16][32] bytes each
           and [2 or 3][16]: scales, scale * sum

  * A thread keeps the 32 words of its 4 columns in registers and walks the rows. 8 words of x, the same for the whole
    warp (two broadcast 16-byte loads), feed 32 dp4a. The padding puts 8 neighbouring lanes into different banks.
  * While row r of block b is multiplied, these loads are in flight: row r + 1 and the scales of the next four rows from
    shared memory, block b + 2 from global memory. Block b + 1 is unpacked into the next buffer.
  * The loop has no branch: for Q8_0 512 of 790 instructions are dp4a, 192 scale, 60 access memory, 26 do the rest. Q4_K
    adds 64 fma and 20 that unpack; integer scales of halves (Q6_K) add 64 conversions, multiplications and fma each.

Pipe: dp4a, n k rows / 4 of them. 2 float32 operations per block and output share the issue slots with 8 dp4a: the bound
is 80 % of the dp4a peak on Volta and 89 % on Hopper, whose float32 pipe is twice as wide. On registers alone an H200
reaches 82.5 %. Per cent of its 133.8 TOPS (2026-11-21; benchmarks/results.md, section q8_gemm, has the other forms):

    n x k x rows              4096 x 4096 x 4096    12288 x 4096 x 4096    4096 x 4096 x 297
    version 3                        74.8                   76.7                  58.4
    versions 2 and 1 (1024 rows)     18.9 and 1.3
"""

from functools import cache, partial

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint32, uint64

from kernels.bench import Case, main
from kernels.formats import BLOCK, FORMATS, as_words, on_card, product_reference, random_raw
from kernels.intrinsics import (dp4a, float_as_word, half_to_float, load_shared, load_shared4,
                                load_word, load_words4, shared_address, store_shared, store_shared4, word_as_float,
                                word_sum)
from kernels.operands import Matrix, Quantized
from kernels.q8_gemv import random_activations

WORDS = 8  # of 4 int8 in a block
WARPS = 4
THREADS = 32 * WARPS
COLUMNS = 4  # per thread
TILE_N = 32 * COLUMNS
assert TILE_N == THREADS  # each thread carries one column: brings it from global to shared memory

# Shared memory, in bytes.
PITCH = 48  # from the block of a column to that of the next
X_ROWS = 16 * BLOCK  # rows of a warp; after them their scales and, for formats with minima, scale * sum

# The NumPy reference is formats.product_reference: the formula in float64, in no particular order.


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
    w_tile = cuda.shared.array((WORDS, 33), uint32)  # 33: lanes that store one column of the tile use 32 banks
    x_tile = cuda.shared.array((32, WORDS), uint32)
    lane, warp = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
    column = uint32(cuda.blockIdx.x * uint32(32) + lane)
    row0 = uint32(cuda.blockIdx.y * uint32(32))
    blocks = uint32(k >> uint32(5))
    last_column, last_row = uint32(n - uint32(1)), uint32(n_rows - uint32(1))
    thread = uint32(warp * uint32(32) + lane)
    piece, word = uint32(thread >> uint32(3)), uint32(thread & uint32(7))  # what the thread carries
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
    """How a thread carries a block of w from global to shared memory: (begin, fetch, place, second).

    begin(first, last, thread, blocks): where the thread's bytes and scales start in global memory, for a tile of
    columns that begins at `first`; in place of columns past `last` it takes column `last`. fetch: loads them into
    registers. place(thread): where the bytes go in shared memory; the second 16 of them go `second` bytes further.

    A thread carries one column with its scales. But a block of Q8_0 has 32 bytes, and a warp's load of 16 bytes from
    each of 32 columns takes the L1 cache 32 cycles. So two neighbouring threads carry the halves of one column's block,
    and then those of the column 64 further on: each load touches half as many cache lines. A packed block is 16 bytes
    and a few more.
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


def device_functions(format):
    """The parts of version 3 that depend on the scales of the format."""
    minima, unpack, n_scales, integers = format.minima, format.unpack, format.n_scales, format.halves
    dots, first_minimum = 2 if integers or format.float_scales == 2 else 1, n_scales - minima
    dot_shape, apart = (dots, COLUMNS), not integers and dots == 2

    @cuda.jit(device=True, forceinline=True)
    def put_column(raw, to, other, scale_to, book):
        """Unpacks a block of w, given as it lies in global memory, and stores its int8 and scales in shared memory: the
        first 16 bytes at `to`, the others at `other`."""
        w, scales = cuda.local.array(WORDS, uint32), cuda.local.array(n_scales, uint32)
        unpack(w, scales, raw, book)
        if integers:
            scales[1], scales[2] = float_as_word(float32(int32(scales[1]))), float_as_word(float32(int32(scales[2])))
        store_shared4(to, w[0], w[1], w[2], w[3])
        store_shared4(other, w[4], w[5], w[6], w[7])
        for s in range(n_scales):
            store_shared(scale_to + uint64(4 * TILE_N * s), scales[s])

    @cuda.jit(device=True, forceinline=True)
    def put_x(words, scale, to, scale_to):
        """Stores half a block of x in shared memory. The even lane of a pair stores the scale of the row; the odd lane,
        for formats with a minimum, scale * (sum of the block). For two minima each lane stores that of its half."""
        store_shared4(to, words[0], words[1], words[2], words[3])
        is_odd = (uint32(cuda.threadIdx.x) & uint32(1)) != uint32(0)
        if minima:
            total = int32(0)
            for i in range(4):
                total = word_sum(words[i], total)
        if minima == 1:
            total = int32(total + cuda.shfl_xor_sync(0xFFFFFFFF, total, 1))
            if is_odd:
                scale = scale * float32(total)
        if minima == 2:
            store_shared(scale_to + uint64(64), float_as_word(scale * float32(total)))
        if minima < 2 or not is_odd:
            store_shared(scale_to, float_as_word(scale))

    @cuda.jit(device=True, forceinline=True)
    def load_x_scales(x_scales, r, xd_at):
        """Loads the scales of rows r .. r + 3 into x_scales[r / 4 % 2, 0], and scale * sum behind it; r is a
        multiple of 4."""
        for s in range(1 + minima):
            to = x_scales[(r >> 2) & 1, s]
            to[0], to[1], to[2], to[3] = load_shared4(xd_at + uint64(64 * s + 4 * r))

    @cuda.jit(device=True, forceinline=True)
    def multiply_row(acc, r, w, w_scales, x, x_scales):
        """acc[r, c] += the block of x times the block of column c, for every column of the thread."""
        dot = cuda.local.array(dot_shape, int32)
        for c in range(COLUMNS):
            for h in range(dots):
                dot[h, c] = int32(0)
        for i in range(WORDS):
            for c in range(COLUMNS):
                dot[i * dots // WORDS, c] = dp4a(w[c, i], x[i], dot[i * dots // WORDS, c])
        for c in range(COLUMNS):  # float32(): a conversion, whose pipe is idle; `unbias` would add on that of dp4a
            total = float32(dot[0, c])
            if integers:  # exact, below 2**24; integer multiplications would run in the pipe of dp4a
                total = cuda.fma(float32(dot[1, c]), word_as_float(w_scales[2, c]),
                                 total * word_as_float(w_scales[1, c]))
            x_scale = word_as_float(x_scales[(r >> 2) & 1, 0, r & 3])
            acc[r, c] = cuda.fma(total, word_as_float(w_scales[0, c]) * x_scale, acc[r, c])
            if apart:
                acc[r, c] = cuda.fma(float32(dot[1, c]), word_as_float(w_scales[1, c]) * x_scale, acc[r, c])
            for m in range(minima):
                acc[r, c] = cuda.fma(word_as_float(w_scales[first_minimum + m, c]),
                                     word_as_float(x_scales[(r >> 2) & 1, 1 + m, r & 3]), acc[r, c])

    return put_column, put_x, load_x_scales, multiply_row


def carried_row(rows):
    """row_of(lane): which of its warp's `rows` rows of x a lane carries from global to shared memory. Lanes 2 r and
    2 r + 1 carry the halves of row r; lanes without a row those of the last one."""
    @cuda.jit(device=True, forceinline=True)
    def row_of(lane):
        return uint32(min(uint32(lane >> uint32(1)), uint32(rows - 1)))

    return row_of


def tile_functions(format, rows, skips=False):
    """Version 3 for a tile of y: (multiply_tile, store_tile).

    Each warp makes `rows` rows, 4 to 16. The warps of a block lie one below the other. skips: warps that have no rows
    carry, but do not multiply.

    multiply_tile(acc, works, wq, wd, start, xq, xd, x_row, k): acc float32 [rows, COLUMNS]; works: whether the warp
    has rows; start: uint32 [3], what `begin` of `carriers` gives for the column that the thread carries; x_row: the row
    of x which the thread carries, that of its `carried_row`, and in place of a row that is not there any other.
    store_tile(y, acc, row0, end, column0, n, stride, add): the warp writes rows row0, row0 + 1, ... below `end`. The
    block's columns begin at column0.
    """
    row_of = carried_row(rows)
    put_row, sync_row, is_odd = rows // 3, rows // 2, rows % 2 == 1
    rest_row = (sync_row + rows) // 2  # a loop over all rows after sync_row would not be unrolled
    _, fetch, place, second = carriers(format)
    put_column, put_x, load_x_scales, multiply_row = device_functions(format)
    per_row, n_scales, raw_words = 1 + format.minima, format.n_scales, format.raw_words
    x_warp = X_ROWS + 64 * max(per_row, 2)
    w_buffer, load_book = TILE_N * (PITCH + 4 * n_scales), format.load_book
    x_buffer = WARPS * x_warp
    x_end = 3 * x_buffer
    shared_words = (2 * w_buffer + x_end) // 4

    @cuda.jit(device=True, forceinline=True)
    def multiply_rows(acc, first, last, w, w_scales, x, x_at, x_scales):
        """Multiplies rows first .. last - 1 of a block. Meanwhile it loads the next row and the scales of the next
        four."""
        for r in range(first, last):
            load_block(x[(r + 1) & 1], x_at + uint64(BLOCK * (r + 1)))
            if r & 3 == 1 and r + 3 < rows:
                load_x_scales(x_scales, r + 3, x_at + uint64(X_ROWS))
            multiply_row(acc, r, w, w_scales, x[r & 1], x_scales)

    @cuda.jit(device=True, forceinline=True)
    def fetch_x(words, xq, xd, x_from, xd_from, b):
        """Loads half a block of x from global memory into `words`, and returns the scale of the block."""
        words[0], words[1], words[2], words[3] = load_words4(xq, uint32(x_from + uint32(b << uint32(5))))
        return xd[uint32(xd_from + b)]

    @cuda.jit(device=True, forceinline=True)
    def multiply_tile(acc, works, wq, wd, start, xq, xd, x_row, k):
        lane, warp = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        thread = uint32(warp * uint32(32) + lane)
        blocks = uint32(k >> uint32(5))
        last = uint32(blocks - uint32(1))

        # What this thread carries from global to shared memory.
        row, half = row_of(lane), uint32(lane & uint32(1))
        xd_from = uint32(x_row * blocks)
        x_from = uint32(uint32(xd_from << uint32(5)) + uint32(half << uint32(4)))
        raw = cuda.local.array(raw_words, uint32)
        x_words = cuda.local.array(4, uint32)

        # Addresses in shared memory, in the first buffer. *_to: where the thread stores what it carries. *_at: where it
        # reads its columns, their scales and its rows. The offsets of the buffers in use, *_here, and of those that are
        # being filled, *_next, are added to them.
        w_to = shared_address(cuda.shared.array(shared_words, uint32, alignment=16))
        wd_to = w_to + uint64(TILE_N * PITCH)
        x_at = w_to + uint64(2 * w_buffer) + uint64(uint32(warp * uint32(x_warp)))
        w_at = w_to + uint64(uint32(lane * uint32(PITCH)))
        wd_at = wd_to + uint64(uint32(lane << uint32(2)))
        w_to, wd_to = w_to + uint64(place(thread)), wd_to + uint64(uint32(thread << uint32(2)))
        x_to = x_at + uint64(uint32(lane << uint32(4)))
        xd_to = x_at + uint64(X_ROWS) + uint64(uint32(uint32(row << uint32(2)) + uint32(half << uint32(6))))
        w_here, w_next, x_here, x_next = uint64(0), uint64(w_buffer), uint64(0), uint64(x_buffer)

        for r in range(rows):
            for c in range(COLUMNS):
                acc[r, c] = float32(0.0)
        w = cuda.local.array((COLUMNS, WORDS), uint32)
        x = cuda.local.array((2, WORDS), uint32)
        w_scales = cuda.local.array((n_scales, COLUMNS), uint32)
        x_scales = cuda.local.array((2, per_row, 4), uint32)
        fetch(raw, wq, wd, start, blocks, uint32(0))
        x_scale = fetch_x(x_words, xq, xd, x_from, xd_from, uint32(0))
        book = load_book(thread, uint32(THREADS))
        put_column(raw, w_to, w_to + uint64(second), wd_to, book)
        put_x(x_words, x_scale, x_to, xd_to)
        b = min(uint32(1), last)
        fetch(raw, wq, wd, start, blocks, b)
        x_scale = fetch_x(x_words, xq, xd, x_from, xd_from, b)
        cuda.syncthreads()
        for c in range(COLUMNS):
            load_block(w[c], w_at + uint64(32 * PITCH * c))
        load_block(x[0], x_at)
        load_x_scales(x_scales, 0, x_at + uint64(X_ROWS))

        # There is one barrier per block b. It stands amid the rows: block b + 1 is stored a few rows before it and read
        # after the last row, so no warp waits long. A warp may store x of block b + 2 while another still reads the
        # last rows of b, hence the third buffer of x. The assembler moves products across a barrier, but no loads:
        # those of the rows keep the barrier in its place.
        block = uint32(0)
        while block < blocks:
            x_now = x_at + x_here
            if works or not skips:
                for s in range(n_scales):
                    for c in range(COLUMNS):
                        w_scales[s, c] = load_shared(wd_at + w_here + uint64(4 * TILE_N * s + 128 * c))
                multiply_rows(acc, 0, put_row, w, w_scales, x, x_now, x_scales)
                put_column(raw, w_to + w_next, w_to + w_next + uint64(second), wd_to + w_next, book)
                put_x(x_words, x_scale, x_to + x_next, xd_to + x_next)
                multiply_rows(acc, put_row, sync_row, w, w_scales, x, x_now, x_scales)
            else:
                put_column(raw, w_to + w_next, w_to + w_next + uint64(second), wd_to + w_next, book)
            b = min(uint32(block + uint32(2)), last)
            fetch(raw, wq, wd, start, blocks, b)
            x_scale = fetch_x(x_words, xq, xd, x_from, xd_from, b)
            cuda.syncthreads()
            if works or not skips:
                multiply_rows(acc, sync_row, rest_row, w, w_scales, x, x_now, x_scales)
                multiply_rows(acc, rest_row, rows - 1, w, w_scales, x, x_now, x_scales)
                load_block(x[rows & 1], x_at + x_next)
                multiply_row(acc, rows - 1, w, w_scales, x[(rows - 1) & 1], x_scales)
                if is_odd:  # the first row of the next block is in the other registers
                    for i in range(WORDS):
                        x[0, i] = x[1, i]
                for c in range(COLUMNS):
                    load_block(w[c], w_at + w_next + uint64(32 * PITCH * c))
                load_x_scales(x_scales, 0, x_at + x_next + uint64(X_ROWS))
            w_here, w_next, x_here = w_next, w_here, x_next
            x_next = x_next + uint64(x_buffer)
            if x_next == uint64(x_end):
                x_next = uint64(0)
            block = uint32(block + uint32(1))

    @cuda.jit(device=True, forceinline=True)
    def store_tile(y, acc, row0, end, column0, n, stride, add):
        column0 = uint32(column0 + cuda.threadIdx.x)
        for r in range(rows):
            row = uint32(row0 + uint32(r))
            for c in range(COLUMNS):
                column = uint32(column0 + uint32(32 * c))
                at = uint32(row * stride + column)
                if row < end and column < n:
                    y[at] = y[at] + acc[r, c] if add else acc[r, c]

    return multiply_tile, store_tile


def pipelined_kernel(format, rows, blocks_per_sm):
    """Version 3 for a weight format, with `rows` rows per warp. The registers suffice for `blocks_per_sm` blocks of
    threads on an SM: 16 rows take 168 registers, so 12 warps fit (8 warps of Q4_K, Q5_K and Q6_K, where an SM has 64 KB
    of shared memory)."""
    row_of, (multiply_tile, store_tile) = carried_row(rows), tile_functions(format, rows)
    begin, *_ = carriers(format)

    @cuda.jit(launch_bounds=(THREADS, blocks_per_sm))
    def gemm_q8_q8_kernel(y, wq, wd, xq, xd, n, k, n_rows, stride, add):
        row0 = uint32(uint32(cuda.blockIdx.y * uint32(WARPS) + cuda.threadIdx.y) * uint32(rows))
        x_row = min(uint32(row0 + row_of(uint32(cuda.threadIdx.x))), uint32(n_rows - uint32(1)))
        column0 = uint32(cuda.blockIdx.x * uint32(TILE_N))
        start, acc = cuda.local.array(3, uint32), cuda.local.array((rows, COLUMNS), float32)
        thread = uint32(uint32(cuda.threadIdx.y * uint32(32)) + cuda.threadIdx.x)
        start[0], start[1], start[2] = begin(column0, uint32(n - uint32(1)), thread, uint32(k >> uint32(5)))
        multiply_tile(acc, row0 < n_rows, wq, wd, start, xq, xd, x_row, k)
        store_tile(y, acc, row0, n_rows, column0, n, stride, add)

    return gemm_q8_q8_kernel


# Rows per warp -> blocks of threads for which an SM has registers. Fewer rows are for products that fill the last round
# of blocks badly (see `rows_per_warp`).
TILES = {16: 3, 15: 3, 10: 3, 8: 3, 4: 4}
CONCURRENT = 0.93  # time of a block where the products of several micro-batches fill an SM, relative to one alone


@cache
def pipelined(format, rows):
    """The kernel of a format for `rows` rows per warp, a key of TILES."""
    return pipelined_kernel(format, rows, TILES[rows])


def block_count(n, rows, each):
    """Blocks of threads of a product with `each` rows per warp."""
    return -(-n // TILE_N) * -(-rows // (WARPS * each))


def block_time(each):
    """The time of one block of threads, per weight of a row, in units of the time of one row of a warp: the number of
    rows of a warp and about 2 more, for the weights. Fewer than 7 rows take as long as 7: they do not cover the latency
    of memory."""
    return max(each, 7) + 2


def tile_work(card, n, rows, each):
    """The time that the blocks of a product take of each SM."""
    return block_count(n, rows, each) / card.n_sms * block_time(each)


def tile_time(card, n, rows, each):
    """The time of a product that runs alone. All SMs make the same number of blocks, since the last round takes as long
    as any other. Start and end cost the time of about 3 rows."""
    return -(-block_count(n, rows, each) // card.n_sms) * block_time(each) + 3


def rows_per_warp(card, n, rows, concurrent=False):
    """The rows per warp with which a product takes the least time. concurrent: other kernels run at the same time and
    use the SMs that the last round of blocks leaves idle, so that only the work of the blocks counts."""
    time = tile_work if concurrent else tile_time
    return min(TILES, key=lambda each: time(card, n, rows, each))


def filling_rows(card, n):
    """About as many rows as give each SM one block of threads; a multiple of the rows of a block."""
    return max(round(card.n_sms * TILE_N / n), 1) * WARPS * max(TILES)


def relative_time(card, n, k, micro_batches):
    """The time of a product over all micro-batches of a prompt, which run concurrently; micro_batches has the rows of
    each. For comparison with other times on the same card. A unit is 1.15 ns on an H200, within 2 % for 4096 or 12288
    columns and 297 to 4096 rows."""
    if len(micro_batches) == 1:
        rows, = micro_batches
        return k * tile_time(card, n, rows, rows_per_warp(card, n, rows))
    work = sum(tile_work(card, n, rows, rows_per_warp(card, n, rows, concurrent=True)) for rows in micro_batches)
    return k * (work * CONCURRENT + 3)


# ---- launches: they write in place and never allocate -----------------------------------------------------

def gemm_naive(card, y, stride, w, x, rows, add=False, *, stream=None):
    """As `gemm_q8_q8`, by version 1."""
    grid = (-(-w.n // 32), -(-rows // 8))
    card.launch(gemm_naive_kernel, grid, (32, 8), *_arrays(y, w, x), w.n, w.k, rows, stride, add, stream=stream)


def gemm_tiled(card, y, stride, w, x, rows, add=False, *, stream=None):
    """As `gemm_q8_q8`, by version 2."""
    grid = (-(-w.n // 32), -(-rows // 32))
    card.launch(gemm_tiled_kernel, grid, (32, 8), *_arrays(y, w, x), w.n, w.k, rows, stride, add, stream=stream)


def gemm(card, y, stride, w, x, rows, add=False, *, stream=None, concurrent=False):
    """y <- (y +) x . w^T.

    w: Matrix [n, k] in a format of kernels/formats. x: Quantized [rows, k]. y: float32, n numbers of each row,
    `stride` from one row to the next; stride is larger than n where several products write next to each other.
    concurrent: as in `rows_per_warp`."""
    each = rows_per_warp(card, w.n, rows, concurrent)
    grid = (-(-w.n // TILE_N), -(-rows // (WARPS * each)))
    card.launch(pipelined(FORMATS[w.format], each), grid, (32, WARPS), *_arrays(y, w, x), w.n, w.k, rows, stride, add,
                stream=stream)


def gemm_q8_q8(card, y, stride, w, x, rows, add=False, *, stream=None):
    """`gemm` with w in Q8_0: w.values int8 [n, k], w.scales float16 [n, k / 32]; x.q int8 [rows, k], x.d float32
    [rows, k / 32]; y float32, `stride` numbers from one row to the next."""
    gemm(card, y, stride, w, x, rows, add, stream=stream)


def _arrays(y, w, x):
    """The flat arrays of a launch."""
    return y.reshape(-1), w.values.reshape(-1), as_words(w.scales), *x.flat


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [(1, 32, 1), (4, 320, 3), (33, 96, 31), (129, 544, 33), (500, 1024, 65), (256, 64, 500)]  # n, k, rows
FORMAT_CASES = [(1, 1, 1), (33, 3, 31), (130, 2, 65)]  # n, blocks of the file in a row of w, rows


def compare(card, n, k, rows, add=False, multiply=gemm, format=FORMATS["Q8_0"]):
    """Multiplies random matrices. Returns three arrays [rows, n]: what came, what is right, and by how much rounding
    may make them differ: 2**-24 of the sum of magnitudes for every link of the chain over the blocks, for the product
    of the scales and for the addition to y. multiply: called as `gemm_q8_q8` is. AssertionError if it wrote
    elsewhere."""
    rng = np.random.default_rng((n, k, rows))
    raw, (xq, xd) = random_raw(rng, format, n, k), random_activations(rng, rows, k)
    before = rng.standard_normal((rows, n), np.float32)
    y = card.alloc((rows + 1, n + 3), np.float32)      # with columns before and after, and a row too many
    card.poison(y)
    if add:
        card.copy_in(y[:rows], np.pad(before, ((0, 0), (1, 2)), constant_values=np.nan))
    w, x = Matrix(format.name, n, k, *on_card(card, format, raw, n, k)), Quantized(card.upload(xq), card.upload(xd))
    multiply(card, y.reshape(-1)[1:], n + 3, w, x, rows, add)
    y = card.download(y)
    got = y[:rows, 1:n + 1].copy()
    y[:rows, 1:n + 1] = np.nan
    assert np.isnan(y).all(), "wrote elsewhere"
    want, magnitude = product_reference(format, raw, xq, xd)
    bound = (k // BLOCK * format.terms_per_block + 2) * 2.0**-24 * (magnitude + abs(before) * add)
    return got, want + before * add, bound


def check(*case, **more):
    """Asserts that a product differs from its reference by no more than rounding; the arguments are those of `compare`.
    Returns the largest error as a fraction of that."""
    got, want, bound = compare(*case, **more)
    error = (abs(got - want) / bound).max()
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
            yield Case(f"{n} x {case[1]}, {rows} rows, {name}", partial(check, card, *case, format=format))
    for multiply, n, k, rows in TIMED:
        yield timed(card, multiply.__name__, multiply, FORMATS["Q8_0"], n, k, rows)
    for name, format in FORMATS.items():
        yield timed(card, name, gemm, format, 1024, 1024, 256)


def timed(card, name, multiply, format, n, k, rows):
    w = Matrix(format.name, n, k, *(card.zeros(*array) for array in format.arrays(n, k)))
    x = Quantized(card.zeros((rows, k), np.int8), card.zeros((rows, k // BLOCK), np.float32))
    y = card.alloc((rows, n), np.float32)
    return Case(f"time of {name}, {n} x {k}, {rows} rows", launch=partial(multiply, card, y, n, w, x, rows),
                n_bytes=sum(a.nbytes for a in (w.values, w.scales, *x, y)), n_ops=2 * n * k * rows, pipe="dp4a")


if __name__ == "__main__":
    main("Matrix x matrix", cases)
