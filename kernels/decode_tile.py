"""Products of decode steps with 12 to 128 columns: quantised weights times int8 activations.

    y[c, i]  as in kernels/q8_gemv.py and kernels/quant_gemv.py, with the same bits              (+ y[c, i] with `add`)

    w   Matrix [n, k] of a format of kernels/formats       k a multiple of 32, n any, n k below 2**32
    xq  int8    [columns, k]   xd  float32 [columns, k / 32]  of kernels/quantize.py
    y   float32 [columns, stride]

The tree of additions of the decode family has 32 chains: chain h adds blocks h, h + 32, h + 64, ... of a row. So a
product splits into 32 parts that nothing joins before the end. Here the eight warps of a block of threads share a tile
of 32 rows of w and C columns of x, and warp v makes the chains v, v + 8, v + 16 and v + 24 of all its outputs:

    stage:  J = 8 G neighbouring blocks of the tile's rows of w and columns of x, in shared memory
            lane = (group of G, across, row of 8): G chains at once; 8 `across` lanes have 4 rows x C / across columns
    pass:   every 32 / J-th stage along k: one chain of each lane, in registers. Then the lane adds it to its total
    end:    the totals of the eight warps meet in shared memory: t_w, then the butterfly 4, 2, 1

        C    columns of a lane   across   G   passes          shared memory of a stage
       16            8             2      2     2             w  [J] blocks: two planes [32][16] bytes, and 16 bytes
       24           12             2      2     2                [1 to 3 scales][J][32 + 4] words
       32           16             2      2     2             x  [J] blocks: two planes [C][16] bytes, and 16 bytes
       32            8             4      1     4                [scale, scale * sum][J][C + 4] words
       48           12             4      1     4
       64           16             4      1     4

  * A lane has the 32 weights of its 4 rows in registers and walks its columns: 8 words of x feed 32 dp4a.
  * Four more warps only load: they bring the next stage from global memory to registers, unpack it and store it in
    shared memory. No warp that multiplies waits for another: it waits until its stage is full (a barrier for each warp)
    and says, half a stage before it ends, that the buffers of the stage before are empty. w has two buffers, since a
    warp reads a block of w before it multiplies, and x has three.
  * A block of threads takes tiles until none is left; the loads of the next tile begin before the last one is done.
  * Blocks past the end of a row count as dot 0 times scale -1: adding that changes no bit, not even of a zero.
  * SwiGLU: a tile of gate, then the same rows of up; 32 outputs of a column are one block of the quantisation.

Pipe: dp4a. As in kernels/q8_gemm.py, float32 operations between them bound it to 80 % of the peak on Volta.
Measured: benchmarks/results.md, section decode_tile.
"""

from collections import namedtuple
from functools import cache, partial
from itertools import cycle

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint16, uint32, uint64

from kernels.bench import Case, main
from kernels.formats import BLOCK, FORMATS, as_words, on_card, product_reference, random_raw
from kernels.intrinsics import (dp4a, float_as_word, half_to_float, let_next_begin, load_shared4,
                                load_words4, part_barrier, shared_address, store_shared, store_shared4, stream_words4,
                                wait_for_previous, word_as_float, word_sum)
from kernels.operands import Matrix, Quantized
from kernels.swiglu import finish_unit

WARPS = 8
THREADS = 32 * WARPS  # threads that multiply
LOADERS = 4  # warps that bring w and x to shared memory
LOADING = 32 * LOADERS
CHAINS = 32
ROWS = 4  # of w for a lane
TILE_ROWS = 8 * ROWS  # for a block of threads
LEAST = 12  # columns; fewer are faster with kernels/q8_gemv.py
ONE, MINUS_ONE = 0x3F800000, -1.0  # scales of w and of x past the end of a row

# Barriers. FULL + v: a stage lies in shared memory for warp v. EMPTY: all warps are done with the buffers of a stage.
PRODUCTS, EMPTY, FULL = 1, 2, 3
meet_products = part_barrier("sync", THREADS)
wait_until_full, say_full = (part_barrier(kind, 32 + LOADING) for kind in ("sync", "arrive"))
wait_until_empty, say_empty = (part_barrier(kind, THREADS + LOADING) for kind in ("sync", "arrive"))

# Bytes in shared memory of a block of w: two planes of 16 bytes of each row, with 16 bytes of padding, and a scale.
W_PLANE, W_SCALES = 16 * (TILE_ROWS + 1), 4 * (TILE_ROWS + 4)

# columns: of a lane. across: lanes to which the columns of a tile are dealt in turn. groups: of lanes, each with chains
# of its own.
Shape = namedtuple("Shape", "columns across groups")
SHAPES = (Shape(8, 2, 2), Shape(12, 2, 2), Shape(16, 2, 2), Shape(8, 4, 1), Shape(12, 4, 1), Shape(16, 4, 1))
SPARE_COLUMNS = 9  # a tile of C columns takes the time of C + 9


# ---- from global to shared memory --------------------------------------------------------------------------

def w_carrier(format, stage):
    """How a thread brings its part of a stage of w to shared memory: (count, begin, fetch, put).

    begin(q_from, d_from, row0, last_row, blocks, thread): where the thread's rows start, for a tile that begins at row
    `row0`; in place of rows past `last_row` it takes that one. fetch(raw, wq, wd, q_from, d_from, blocks, first,
    thread): loads its blocks of the stage that begins at block `first` into raw [count, format.raw_words]. put(raw, to,
    scales_to, outside, thread, book): unpacks and stores them. outside: they are past the end of a row.

    A thread carries blocks of one place in the stage, of `count` rows. But a block of Q8_0 has 32 bytes: two
    neighbouring threads carry its halves, so that a warp's load covers whole lines of memory."""
    starts, fetch_block, unpack, n_scales = format.starts, format.fetch, format.unpack, format.n_scales
    count, bits, scale_planes = TILE_ROWS * stage // LOADING, stage.bit_length() - 1, stage * W_SCALES
    rows, half_rows = LOADING // stage, LOADING // (2 * stage)  # that the threads carry at once

    @cuda.jit(device=True, forceinline=True)
    def row_of(place, bits):
        return uint32(place >> uint32(bits))

    @cuda.jit(device=True, forceinline=True)
    def scale_place(row, at):
        """The rows of a lane, 8 apart, have their scales side by side."""
        return at + uint64(uint32(uint32(uint32(row & uint32(7)) << uint32(2)) + uint32(row >> uint32(3))) << uint32(2))

    @cuda.jit(device=True, forceinline=True)
    def put_scales(scales, row, j, to, outside):
        at = scale_place(row, to + uint64(uint32(j * uint32(W_SCALES))))
        for s in range(n_scales):
            store_shared(at + uint64(scale_planes * s), uint32(ONE) if outside else scales[s])

    @cuda.jit(device=True, forceinline=True)
    def begin(q_from, d_from, row0, last_row, blocks, thread):
        for m in range(count):
            row = uint32(row0 + row_of(thread, bits) + uint32(m * rows))
            q_from[m], d_from[m] = starts(min(row, last_row), blocks)

    @cuda.jit(device=True, forceinline=True)
    def fetch(raw, wq, wd, q_from, d_from, blocks, first, thread):
        b = min(uint32(first + uint32(thread & uint32(stage - 1))), uint32(blocks - uint32(1)))
        for m in range(count):
            fetch_block(raw[m], wq, wd, q_from[m], d_from[m], blocks, b)

    @cuda.jit(device=True, forceinline=True)
    def put(raw, to, scales_to, outside, thread, book):
        w, scales = cuda.local.array(8, uint32), cuda.local.array(n_scales, uint32)
        j = uint32(thread & uint32(stage - 1))
        for m in range(count):
            unpack(w, scales, raw[m], book)
            row = uint32(row_of(thread, bits) + uint32(m * rows))
            at = to + uint64(uint32(j * uint32(2 * W_PLANE) + uint32(row << uint32(4))))
            store_shared4(at, w[0], w[1], w[2], w[3])
            store_shared4(at + uint64(W_PLANE), w[4], w[5], w[6], w[7])
            put_scales(scales, row, j, scales_to, outside)

    @cuda.jit(device=True, forceinline=True)
    def begin_halves(q_from, d_from, row0, last_row, blocks, thread):
        half = uint32(uint32(thread & uint32(1)) << uint32(4))
        for i in range(2 * count):
            row = min(uint32(row0 + row_of(thread, bits + 1) + uint32(i * half_rows)), last_row)
            q_from[i] = uint32(uint32(row * uint32(blocks << uint32(5))) + half)
        for m in range(count):
            d_from[m] = uint32(min(uint32(row0 + row_of(thread, bits) + uint32(m * rows)), last_row) * blocks)

    @cuda.jit(device=True, forceinline=True)
    def fetch_halves(raw, wq, wd, q_from, d_from, blocks, first, thread):
        last = uint32(blocks - uint32(1))
        at = uint32(min(uint32(first + uint32(uint32(thread & uint32(2 * stage - 1)) >> uint32(1))), last) << uint32(5))
        b = min(uint32(first + uint32(thread & uint32(stage - 1))), last)
        for m in range(count):
            raw[m, 0], raw[m, 1], raw[m, 2], raw[m, 3] = stream_words4(wq, uint32(q_from[2 * m] + at))
            raw[m, 4], raw[m, 5], raw[m, 6], raw[m, 7] = stream_words4(wq, uint32(q_from[2 * m + 1] + at))
            raw[m, 8] = uint32(wd[uint32(d_from[m] + b)])

    @cuda.jit(device=True, forceinline=True)
    def put_halves(raw, to, scales_to, outside, thread, book):
        scale = cuda.local.array(1, uint32)
        piece, j = uint32(thread & uint32(2 * stage - 1)), uint32(thread & uint32(stage - 1))
        to = to + uint64(uint32(piece * uint32(W_PLANE)))
        for m in range(count):
            for h in range(2):
                row = uint32(row_of(thread, bits + 1) + uint32((2 * m + h) * half_rows))
                at = to + uint64(uint32(row << uint32(4)))
                store_shared4(at, raw[m, 4 * h], raw[m, 4 * h + 1], raw[m, 4 * h + 2], raw[m, 4 * h + 3])
            scale[0] = float_as_word(half_to_float(uint16(raw[m, 8])))
            put_scales(scale, uint32(row_of(thread, bits) + uint32(m * rows)), j, scales_to, outside)

    return (count, begin_halves, fetch_halves, put_halves) if format.bits == 8 else (count, begin, fetch, put)


def x_carrier(format, shape):
    """The same for x. A thread carries `count` halves of blocks, into words [count, 4], and their scales."""
    across, lane_columns = shape.across, shape.columns
    columns, stage = lane_columns * across, WARPS * shape.groups
    count, rows, bits = columns * 2 * stage // LOADING, LOADING // (2 * stage), stage.bit_length()
    plane, pitch, minima = x_plane(columns), x_scales_of(columns), format.minima
    sums = stage * pitch

    @cuda.jit(device=True, forceinline=True)
    def begin(x_from, column0, last_column, blocks, thread):
        for m in range(count):
            column = min(uint32(column0 + uint32(thread >> uint32(bits)) + uint32(m * rows)), last_column)
            x_from[m] = uint32(column * blocks)

    @cuda.jit(device=True, forceinline=True)
    def fetch(words, scales, xq, xd, x_from, blocks, first, thread):
        block = uint32(first + uint32(uint32(thread & uint32(2 * stage - 1)) >> uint32(1)))
        half = uint32(uint32(thread & uint32(1)) << uint32(4))
        for m in range(count):
            at = uint32(x_from[m] + block)
            scales[m] = float32(MINUS_ONE)
            for i in range(4):
                words[m, i] = uint32(0)
            if block < blocks:
                byte = uint32(uint32(at << uint32(5)) + half)
                words[m, 0], words[m, 1], words[m, 2], words[m, 3] = load_words4(xq, byte)
                scales[m] = xd[at]

    @cuda.jit(device=True, forceinline=True)
    def put(words, scales, to, scales_to, thread):
        piece = uint32(thread & uint32(2 * stage - 1))
        to = to + uint64(uint32(piece * uint32(plane)))
        scales_to = scales_to + uint64(uint32(uint32(piece >> uint32(1)) * uint32(pitch)))
        is_second = (piece & uint32(1)) != uint32(0)
        for m in range(count):
            column = uint32(uint32(thread >> uint32(bits)) + uint32(m * rows))
            store_shared4(to + uint64(uint32(column << uint32(4))), words[m, 0], words[m, 1], words[m, 2], words[m, 3])
            place = uint32(uint32(uint32(column % uint32(across)) * uint32(lane_columns))
                           + uint32(column // uint32(across)))  # those of a lane side by side
            at = scales_to + uint64(uint32(place << uint32(2)))
            if minima:
                total = int32(0)
                for i in range(4):
                    total = word_sum(words[m, i], total)
            if minima == 1:
                total = int32(total + cuda.shfl_xor_sync(0xFFFFFFFF, total, 1))
                if is_second:
                    store_shared(at + uint64(sums), float_as_word(scales[m] * float32(total)))
            if minima == 2:  # of the half that the thread carries
                to_sum = uint64(2 * sums) if is_second else uint64(sums)
                store_shared(at + to_sum, float_as_word(scales[m] * float32(total)))
            if not is_second:
                store_shared(at, float_as_word(scales[m]))

    return count, begin, fetch, put


def x_plane(columns):
    """Bytes in shared memory of a plane of a block of x, padding included."""
    return 16 * (columns + 1)


def x_scales_of(columns):
    """Bytes from the scales of a block of x to those of the next."""
    return 4 * (columns + 4)


# ---- products ----------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def load_pair(words, at, second):
    """A block from its two planes."""
    words[0], words[1], words[2], words[3] = load_shared4(at)
    words[4], words[5], words[6], words[7] = load_shared4(at + uint64(second))


def product_functions(format, shape):
    """(load_row, load_w_scales, load_x_scales, multiply): what a lane does with a stage in shared memory."""
    columns, stage = shape.columns * shape.across, WARPS * shape.groups
    n_scales, minima, halves = format.n_scales, format.minima, format.halves
    first_minimum, last_dot, apart = n_scales - minima, format.float_scales - 1, format.float_scales == 2
    scale_planes, sums, per_column = stage * W_SCALES, stage * x_scales_of(columns), 1 + minima

    @cuda.jit(device=True, forceinline=True)
    def load_row(w, r, at):
        load_pair(w[r], at + uint64(128 * r), W_PLANE)

    @cuda.jit(device=True, forceinline=True)
    def load_w_scales(w_scales, scales_at):
        for s in range(n_scales):
            w_scales[s, 0], w_scales[s, 1], w_scales[s, 2], w_scales[s, 3] = load_shared4(
                scales_at + uint64(scale_planes * s))

    @cuda.jit(device=True, forceinline=True)
    def load_x_scales(x_scales, c, at):
        """The scales of columns c .. c + 3."""
        half = (c >> 2) & 1
        for s in range(per_column):
            words = load_shared4(at + uint64(sums * s + 4 * c))
            for i in range(4):
                x_scales[half, s, i] = words[i]

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, r, c, w, w_scales, x, x_scales):
        half, i = (c >> 2) & 1, c & 3
        x_scale = word_as_float(x_scales[half, 0, i])
        dot = int32(0)
        for word in range(4):
            dot = dp4a(w[r, word], x[word], dot)
        if halves:
            second = int32(0)
            for word in range(4, 8):
                second = dp4a(w[r, word], x[word], second)
            dot = int32(int32(dot * int32(w_scales[1, r])) + int32(second * int32(w_scales[2, r])))
        else:
            if apart:
                acc[r, c] = cuda.fma(float32(dot), word_as_float(w_scales[0, r]) * x_scale, acc[r, c])
                dot = int32(0)
            for word in range(4, 8):
                dot = dp4a(w[r, word], x[word], dot)
        acc[r, c] = cuda.fma(float32(dot), word_as_float(w_scales[last_dot, r]) * x_scale, acc[r, c])
        for m in range(minima):
            acc[r, c] = cuda.fma(word_as_float(w_scales[first_minimum + m, r]),
                                 word_as_float(x_scales[half, 1 + m, i]), acc[r, c])

    return load_row, load_w_scales, load_x_scales, multiply


@cuda.jit(device=True, forceinline=True)
def butterfly(t0, t1, t2, t3, t4, t5, t6, t7):
    """The sum of eight words that are float32, in the order of the decode family."""
    t0, t1, t2, t3 = word_as_float(t0), word_as_float(t1), word_as_float(t2), word_as_float(t3)
    t4, t5, t6, t7 = word_as_float(t4), word_as_float(t5), word_as_float(t6), word_as_float(t7)
    return ((t0 + t4) + (t2 + t6)) + ((t1 + t5) + (t3 + t7))


def total_functions(shape):
    """(add_chain, sum_totals). The totals of a warp lie in shared memory, [columns of a lane][its lanes in a group]
    four rows each.

    add_chain(acc, at, group, first): adds the chains of the groups one after the other. sum_totals(sums, at): sums of
    four rows over the eight warps."""
    columns, lanes, groups = shape.columns, 8 * shape.across, shape.groups
    totals = 16 * columns * lanes  # bytes of a warp

    @cuda.jit(device=True, forceinline=True)
    def add_chain(acc, at, group, first):
        for g in range(groups):
            if group == uint32(g):
                for c in range(columns):
                    to = at + uint64(16 * lanes * c)
                    a0, a1, a2, a3 = acc[0, c], acc[1, c], acc[2, c], acc[3, c]
                    if g > 0 or not first:
                        t0, t1, t2, t3 = load_shared4(to)
                        a0, a1 = word_as_float(t0) + a0, word_as_float(t1) + a1
                        a2, a3 = word_as_float(t2) + a2, word_as_float(t3) + a3
                    store_shared4(to, float_as_word(a0), float_as_word(a1), float_as_word(a2), float_as_word(a3))
            if groups > 1:
                cuda.syncwarp()

    @cuda.jit(device=True, forceinline=True)
    def sum_totals(sums, at):
        t = cuda.local.array((WARPS, 4), uint32)
        for v in range(WARPS):
            t[v, 0], t[v, 1], t[v, 2], t[v, 3] = load_shared4(at + uint64(totals * v))
        for i in range(4):
            sums[i] = butterfly(t[0, i], t[1, i], t[2, i], t[3, i], t[4, i], t[5, i], t[6, i], t[7, i])

    return add_chain, sum_totals


def layout(format, shape):
    """Bytes of shared memory: (buffer of w, buffer of x, totals)."""
    columns, stage = shape.columns * shape.across, WARPS * shape.groups
    return (stage * (2 * W_PLANE + format.n_scales * W_SCALES),
            stage * (2 * x_plane(columns) + (1 + format.minima) * x_scales_of(columns)),
            4 * WARPS * TILE_ROWS * columns)


def shared_bytes(format, shape):
    """Dynamic shared memory of a launch."""
    w, x, totals = layout(format, shape)
    return 2 * w + 3 * x + totals


def h_bytes(shape):
    """Static shared memory of a launch with `swiglu`: the sums of gate and of up."""
    return 2 * 4 * BLOCK * shape.columns * shape.across


@cache
def tile_kernel(format, shape, swiglu):
    """The kernel of y <- (y +) w . x or, with `swiglu`, of (q, d) <- quantised silu(gate . x) * (up . x)."""
    across, groups, lane_columns = shape.across, shape.groups, shape.columns
    columns, stage, passes = lane_columns * across, WARPS * groups, CHAINS // (WARPS * groups)
    parts = 2 if swiglu else 1  # gate, then up
    w_buffer, x_buffer, totals = layout(format, shape)
    x_end, lanes, load_book = 3 * x_buffer, 8 * across, format.load_book
    n_w, begin_w, fetch_w, put_w = w_carrier(format, stage)
    n_x, begin_x, fetch_x, put_x = x_carrier(format, shape)
    load_row, load_w_scales, load_x_scales, multiply = product_functions(format, shape)
    add_chain, sum_totals = total_functions(shape)
    plane, w_scales_at, x_scales_at = x_plane(columns), stage * 2 * W_PLANE, stage * 2 * x_plane(columns)
    raw_shape, words_shape, acc_shape = (n_w, format.raw_words), (n_x, 4), (ROWS, lane_columns)
    scales_shape, x_scales_shape = (format.n_scales, ROWS), (2, 1 + format.minima, 4)
    n_q = 2 * n_w if format.bits == 8 else n_w
    x_pitch, quads, h_shape = x_scales_of(columns), TILE_ROWS * columns // 4, (1, 2, columns * BLOCK)

    def columns_function(first, last):
        """Multiplies columns first .. last - 1, and loads the one after each meanwhile. Column 0 is in x[2], column c
        in x[c & 1]."""
        @cuda.jit(device=True, forceinline=True)
        def multiply_columns(acc, w, w_scales, x, x_scales, at, scales_at):
            for c in range(first, last):
                load_pair(x[(c + 1) & 1], at + uint64(16 * across * (c + 1)), plane)
                if c & 3 == 1 and c + 3 < lane_columns:
                    load_x_scales(x_scales, c + 3, scales_at)
                for r in range(ROWS):
                    multiply(acc, r, c, w, w_scales, x[2 if c == 0 else c & 1], x_scales)

        return multiply_columns

    middle = lane_columns // 2
    multiply_first, multiply_second = columns_function(0, middle), columns_function(middle, lane_columns - 2)

    @cuda.jit(device=True, forceinline=True)
    def multiply_last(acc, w, w_scales, x, x_scales, at, w_next, x_next):
        """Multiplies the last two columns row by row; each row of w is followed by that of the next stage."""
        load_pair(x[1], at + uint64(16 * across * (lane_columns - 1)), plane)
        load_pair(x[2], x_next, plane)
        for r in range(ROWS):
            multiply(acc, r, lane_columns - 2, w, w_scales, x[0], x_scales)
            multiply(acc, r, lane_columns - 1, w, w_scales, x[1], x_scales)
            load_row(w, r, w_next)

    @cuda.jit(device=True, forceinline=True)
    def place(tile, part, n, column_tiles):
        """The first row of w and column of x of a tile of gate (part 0) or up."""
        unit = uint32(tile // column_tiles)
        row = uint32(uint32(unit * uint32(TILE_ROWS)) + uint32(part * n))
        return row, uint32(uint32(tile - uint32(unit * column_tiles)) * uint32(columns))

    @cuda.jit(device=True, forceinline=True)
    def store_tile(y, stride, n, n_columns, add, totals_at, row0, column0, thread):
        sums, quad = cuda.local.array(4, float32), thread
        while quad < uint32(quads):
            sum_totals(sums, totals_at + uint64(uint32(quad << uint32(4))))
            lane, c = uint32(quad % uint32(lanes)), uint32(quad // uint32(lanes))
            column = uint32(column0 + uint32(c * uint32(across)) + uint32(lane >> uint32(3)))
            for i in range(ROWS):
                row = uint32(row0 + uint32(lane & uint32(7)) + uint32(8 * i))
                at = uint32(column * stride + row)
                if row < n and column < n_columns:
                    y[at] = y[at] + sums[i] if add else sums[i]
            quad = uint32(quad + uint32(THREADS))

    @cuda.jit(device=True, forceinline=True)
    def keep_tile(h, part, totals_at, thread):
        sums, quad = cuda.local.array(4, float32), thread
        while quad < uint32(quads):
            sum_totals(sums, totals_at + uint64(uint32(quad << uint32(4))))
            lane, c = uint32(quad % uint32(lanes)), uint32(quad // uint32(lanes))
            at = uint32(uint32(uint32(c * uint32(across)) + uint32(lane >> uint32(3))) * uint32(BLOCK))
            for i in range(ROWS):
                h[0, part, uint32(at + uint32(lane & uint32(7)) + uint32(8 * i))] = sums[i]
            quad = uint32(quad + uint32(THREADS))

    @cuda.jit(device=True, forceinline=True)
    def store_units(q, d, h, n, n_columns, unit, column0, warp, lane):
        c = warp
        while c < uint32(columns) and uint32(column0 + c) < n_columns:
            finish_unit(q, d, h, uint32(0), c, uint32(uint32(column0 + c) * uint32(n >> uint32(5)) + unit), lane)
            c = uint32(c + uint32(WARPS))

    @cuda.jit(device=True, forceinline=True)
    def following(tile, part, turn, step, steps):
        """The stage after a stage, and whether a tile begins with it."""
        step, begins = uint32(step + uint32(1)), False
        if step == steps:
            step, turn = uint32(0), uint32(turn + uint32(1))
            if turn == uint32(passes):
                turn, part, begins = uint32(0), uint32(part + uint32(1)), True
                if part == uint32(parts):
                    part, tile = uint32(0), uint32(tile + cuda.gridDim.x)
        return tile, part, turn, step, begins

    @cuda.jit(device=True, forceinline=True)
    def last_row_of(n):
        return uint32(uint32(n + n) - uint32(1)) if swiglu else uint32(n - uint32(1))

    @cuda.jit(device=True, forceinline=True)
    def start(raw, q_from, d_from, wq, wd, n, k, column_tiles, thread):
        """The first loads of w, for the warps that load."""
        blocks = uint32(k >> uint32(5))
        row0, _ = place(uint32(cuda.blockIdx.x), uint32(0), n, column_tiles)
        begin_w(q_from, d_from, row0, last_row_of(n), blocks, thread)
        fetch_w(raw, wq, wd, q_from, d_from, blocks, uint32(0), thread)

    @cuda.jit(device=True, forceinline=True)
    def load(raw, book, q_from, d_from, wq, wd, xq, xd, n, k, n_columns, column_tiles, tiles, thread):
        """The work of the warps that load. The words of a stage are in their registers while those of the stage before
        are multiplied."""
        blocks, last_column = uint32(k >> uint32(5)), uint32(n_columns - uint32(1))
        steps = uint32(uint32(blocks + uint32(CHAINS - 1)) // uint32(CHAINS))
        last_row = last_row_of(n)
        carried = uint32(thread & uint32(stage - 1))  # the block of w whose scales the thread carries
        w_to = shared_address(cuda.shared.array(0, uint32, alignment=16))
        x_to = w_to + uint64(2 * w_buffer)
        w_next, x_next = uint64(0), uint64(0)
        x_raw, x_raw_scales = cuda.local.array(words_shape, uint32), cuda.local.array(n_x, float32)
        x_from = cuda.local.array(n_x, uint32)
        tile, part, turn, step = uint32(cuda.blockIdx.x), uint32(0), uint32(0), uint32(0)
        _, column0 = place(tile, part, n, column_tiles)
        begin_x(x_from, column0, last_column, blocks, thread)
        fetch_x(x_raw, x_raw_scales, xq, xd, x_from, blocks, uint32(0), thread)
        first = uint32(0)  # block of the stage in registers
        started = False
        while tile < tiles:
            if started:  # which also keeps the warps that load within a stage of each other
                wait_until_empty(uint32(EMPTY))
            started = True
            put_w(raw, w_to + w_next, w_to + w_next + uint64(w_scales_at), uint32(first + carried) >= blocks, thread,
                  book)
            put_x(x_raw, x_raw_scales, x_to + x_next, x_to + x_next + uint64(x_scales_at), thread)
            w_next, x_next = uint64(w_buffer) - w_next, x_next + uint64(x_buffer)
            if x_next == uint64(x_end):
                x_next = uint64(0)
            for v in range(WARPS):
                say_full(uint32(FULL + v))
            next_tile, next_part, turn, step, begins = following(tile, part, turn, step, steps)
            if begins:
                row0, column0 = place(min(next_tile, uint32(tiles - uint32(1))), next_part, n, column_tiles)
                begin_w(q_from, d_from, row0, last_row, blocks, thread)
                begin_x(x_from, column0, last_column, blocks, thread)
            first = uint32(uint32(step * uint32(CHAINS)) + uint32(turn * uint32(stage)))
            fetch_w(raw, wq, wd, q_from, d_from, blocks, first, thread)
            fetch_x(x_raw, x_raw_scales, xq, xd, x_from, blocks, first, thread)
            tile, part = next_tile, next_part

    @cuda.jit(device=True, forceinline=True)
    def work(y, q, d, h, stride, add, n, k, n_columns, column_tiles, tiles, lane, warp):
        """The work of the warps that multiply. h, q and d are not used without `swiglu`, and y not with it."""
        thread = uint32(uint32(warp << uint32(5)) + lane)
        lane_row, group = uint32(lane & uint32(7)), uint32(lane // uint32(lanes))
        column_lane = uint32(uint32(lane >> uint32(3)) & uint32(across - 1))
        steps = uint32(uint32(uint32(k >> uint32(5)) + uint32(CHAINS - 1)) // uint32(CHAINS))
        mine = uint32(warp + uint32(group * uint32(WARPS)))  # the lane's block of a stage

        # Addresses in shared memory: *_at as in kernels/q8_gemm.py, with the offsets of buffers added to them.
        start = shared_address(cuda.shared.array(0, uint32, alignment=16))
        all_totals = start + uint64(2 * w_buffer + x_end)
        w_at = start + uint64(uint32(uint32(mine * uint32(2 * W_PLANE)) + uint32(lane_row << uint32(4))))
        wd_at = start + uint64(uint32(uint32(w_scales_at) + uint32(mine * uint32(W_SCALES))
                                      + uint32(lane_row << uint32(4))))
        x_at = start + uint64(uint32(uint32(2 * w_buffer) + uint32(mine * uint32(2 * plane))
                                     + uint32(column_lane << uint32(4))))
        xd_at = start + uint64(uint32(uint32(2 * w_buffer + x_scales_at) + uint32(mine * uint32(x_pitch))
                                      + uint32(column_lane * uint32(4 * lane_columns))))
        totals_at = all_totals + uint64(uint32(uint32(warp * uint32(totals // WARPS))
                                               + uint32(uint32(lane % uint32(lanes)) << uint32(4))))
        w_next, x_here, x_next = uint64(w_buffer), uint64(0), uint64(x_buffer)
        w, w_scales = cuda.local.array((ROWS, 8), uint32), cuda.local.array(scales_shape, uint32)
        x, x_scales = cuda.local.array((3, 8), uint32), cuda.local.array(x_scales_shape, uint32)
        acc = cuda.local.array(acc_shape, float32)

        tile = uint32(cuda.blockIdx.x)
        left = uint32(uint32(uint32(tiles - tile) + uint32(cuda.gridDim.x - uint32(1))) // uint32(cuda.gridDim.x))
        left = uint32(left * uint32(steps * uint32(parts * passes)))  # stages of this block of threads
        if left > uint32(1):  # the buffers of the second stage
            say_empty(uint32(EMPTY))
        wait_until_full(uint32(warp + uint32(FULL)))
        for r in range(ROWS):
            load_row(w, r, w_at)
        load_w_scales(w_scales, wd_at)
        load_pair(x[2], x_at, plane)
        load_x_scales(x_scales, 0, xd_at)
        while tile < tiles:
            row, column = place(tile, uint32(0), n, column_tiles)
            for part in range(parts):
                turn = uint32(0)
                while turn < uint32(passes):
                    for r in range(ROWS):
                        for c in range(lane_columns):
                            acc[r, c] = float32(0.0)
                    step = uint32(0)
                    while step < steps:
                        multiply_first(acc, w, w_scales, x, x_scales, x_at + x_here, xd_at + x_here)
                        step, left = uint32(step + uint32(1)), uint32(left - uint32(1))
                        if left > uint32(0):
                            wait_until_full(uint32(warp + uint32(FULL)))
                        if left > uint32(1):
                            say_empty(uint32(EMPTY))
                        multiply_second(acc, w, w_scales, x, x_scales, x_at + x_here, xd_at + x_here)
                        multiply_last(acc, w, w_scales, x, x_scales, x_at + x_here, w_at + w_next, x_at + x_next)
                        load_w_scales(w_scales, wd_at + w_next)
                        load_x_scales(x_scales, 0, xd_at + x_next)
                        w_next = uint64(w_buffer) - w_next
                        x_here, x_next = x_next, x_next + uint64(x_buffer)
                        if x_next == uint64(x_end):
                            x_next = uint64(0)
                    if turn == uint32(0):  # until here, others may have read the totals of the tile before
                        meet_products(uint32(PRODUCTS))
                    add_chain(acc, totals_at, group, turn == uint32(0))
                    turn = uint32(turn + uint32(1))
                # The totals of all warps are complete.
                meet_products(uint32(PRODUCTS))
                if swiglu:
                    keep_tile(h, uint32(part), all_totals, thread)
            if swiglu:
                meet_products(uint32(PRODUCTS))
                store_units(q, d, h, n, n_columns, uint32(row >> uint32(5)), column, warp, lane)
            else:
                store_tile(y, stride, n, n_columns, add, all_totals, row, column, thread)
            tile = uint32(tile + cuda.gridDim.x)

    @cuda.jit(launch_bounds=(THREADS + LOADING, 1))
    def tile_kernel(y, stride, wq, wd, xq, xd, n, k, n_columns, column_tiles, tiles, add):
        let_next_begin()
        lane, warp = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        thread = uint32(uint32(uint32(warp - uint32(WARPS)) << uint32(5)) + lane)  # among those that load
        raw, q_from = cuda.local.array(raw_shape, uint32), cuda.local.array(n_q, uint32)
        d_from = cuda.local.array(n_w, uint32)
        if warp >= uint32(WARPS):
            start(raw, q_from, d_from, wq, wd, n, k, column_tiles, thread)
        book = load_book(uint32(uint32(warp << uint32(5)) + lane), uint32(THREADS + LOADING))
        wait_for_previous()
        if warp < uint32(WARPS):
            work(y, xq, xd, xd, stride, add, n, k, n_columns, column_tiles, tiles, lane, warp)
        else:
            load(raw, book, q_from, d_from, wq, wd, xq, xd, n, k, n_columns, column_tiles, tiles, thread)

    @cuda.jit(launch_bounds=(THREADS + LOADING, 1))
    def tile_swiglu_kernel(q, d, wq, wd, xq, xd, n, k, n_columns, column_tiles, tiles):
        let_next_begin()
        h = cuda.shared.array(h_shape, float32)
        lane, warp = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        thread = uint32(uint32(uint32(warp - uint32(WARPS)) << uint32(5)) + lane)
        raw, q_from = cuda.local.array(raw_shape, uint32), cuda.local.array(n_q, uint32)
        d_from = cuda.local.array(n_w, uint32)
        if warp >= uint32(WARPS):
            start(raw, q_from, d_from, wq, wd, n, k, column_tiles, thread)
        book = load_book(uint32(uint32(warp << uint32(5)) + lane), uint32(THREADS + LOADING))
        wait_for_previous()
        if warp < uint32(WARPS):
            work(d, q, d, h, uint32(0), False, n, k, n_columns, column_tiles, tiles, lane, warp)
        else:
            load(raw, book, q_from, d_from, wq, wd, xq, xd, n, k, n_columns, column_tiles, tiles, thread)

    return tile_swiglu_kernel if swiglu else tile_kernel


# ---- launches: they write in place and never allocate ------------------------------------------------------

def takes(card, w, columns, swiglu=False):
    """Whether a product is faster with these kernels than with those of kernels/q8_gemv.py, and possible: a tile needs
    more shared memory than a block of threads has on a T4, and SwiGLU in Q2_K more than on a V100. Emulated cards are
    faster without."""
    return columns >= LEAST and card.kind != "emulated" and bool(_fitting(card, FORMATS[w.format], swiglu))


def shapes_of(format):
    """The shapes for which a thread has the registers: each further scale of a block takes some."""
    most = 8 if format.float_scales == 2 else 12 if format.minima == 2 else 16
    return [shape for shape in SHAPES if shape.columns <= most]


def _fitting(card, format, swiglu):
    """The shapes for which a block of threads has the registers and the shared memory."""
    room = card.max_shared - format.book_bytes
    return [shape for shape in shapes_of(format) if shared_bytes(format, shape) + swiglu * h_bytes(shape) <= room]


def shape_for(card, format, n, columns, swiglu=False):
    """The Shape with which a product takes the least time. All SMs make the same number of tiles, since the last round
    takes as long as any other."""
    def time(shape):
        width = shape.columns * shape.across
        return -(-n // TILE_ROWS * -(-columns // width) // card.n_sms) * (width + SPARE_COLUMNS)

    return min(_fitting(card, format, swiglu), key=time)


def tile_gemv(card, y, stride, w, x, columns, add=False, *, stream=None):
    """`gemv` of kernels/q8_gemv.py. w: a Matrix. x: Quantized."""
    format, shape, grid = _launch(card, w, w.n, columns)
    card.launch(tile_kernel(format, shape, False), min(card.n_sms, grid[1]), (32, WARPS + LOADERS), y.reshape(-1),
                stride, *_arrays(w, x), w.n, w.k, columns, *grid, add, shared=shared_bytes(format, shape),
                stream=stream)


def tile_gemv_swiglu(card, out, w, x, columns, *, stream=None):
    """out, Quantized <- quantised silu(gate . x) * (up . x). w: the rows of gate, below them those of up."""
    format, shape, grid = _launch(card, w, w.n // 2, columns, True)
    card.launch(tile_kernel(format, shape, True), min(card.n_sms, grid[1]), (32, WARPS + LOADERS), out.q.reshape(-1),
                out.d.reshape(-1), *_arrays(w, x), w.n // 2, w.k, columns, *grid, shared=shared_bytes(format, shape),
                stream=stream)


def _launch(card, w, n, columns, swiglu=False):
    """(Format, Shape, (tiles side by side, tiles)) of a product with n rows of outputs."""
    format = FORMATS[w.format]
    shape = shape_for(card, format, w.n, columns, swiglu)
    side_by_side = -(-columns // (shape.columns * shape.across))
    return format, shape, (side_by_side, side_by_side * -(-n // TILE_ROWS))


def _arrays(w, x):
    return w.values.reshape(-1), as_words(w.scales), x.q.reshape(-1), x.d.reshape(-1)


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [(33, 256, 13), (40, 1280, 24), (70, 1024, 70)]  # n, k, columns; k in whole blocks of every format


def check(card, format, n, k, columns, add=False):
    """Multiplies random matrices and returns the largest error as a fraction of what rounding may do: the chain of a
    lane, the additions of the tree, the products of scales and the addition to y, 2**-24 of the sum of magnitudes
    each."""
    rng = np.random.default_rng((n, k, columns))
    raw, xq = random_raw(rng, format, n, k), rng.integers(-127, 128, (columns, k), np.int8)
    xd, before = rng.random((columns, k // BLOCK), np.float32), rng.standard_normal((columns, n), np.float32)
    y = card.alloc((columns + 1, n + 3), np.float32)  # with numbers around each column, and a column more
    card.poison(y)
    if add:
        card.copy_in(y[:columns], np.pad(before, ((0, 0), (1, 2)), constant_values=np.nan))
    w, x = Matrix(format.name, n, k, *on_card(card, format, raw, n, k)), Quantized(card.upload(xq), card.upload(xd))
    tile_gemv(card, y.reshape(-1)[1:], n + 3, w, x, columns, add)
    y = card.download(y)
    got = y[:columns, 1:n + 1].copy()
    y[:columns, 1:n + 1] = np.nan
    assert np.isnan(y).all(), "wrote elsewhere"
    want, magnitude = product_reference(format, raw, xq, xd)
    bound = (-(-k // (BLOCK * CHAINS)) * format.terms_per_block + 9) * 2.0**-24 * (magnitude + abs(before) * add)
    error = (abs(got - (want + before * add)) / bound).max()
    assert error <= 1
    return error


TIMED = [(4096, 4096, 16), (4096, 4096, 32), (4096, 4096, 64), (24576, 4096, 64)]


def timed(card, multiply, pipe, format, n, k, columns):
    """The Case of the time of a product that `multiply` makes on a pipe; several matrices in turn, so that no cache
    holds them."""
    copies = [[card.zeros(*array) for array in format.arrays(n, k)] for _ in range(1 + 2**27 // (n * k))]
    turns = cycle([Matrix(format.name, n, k, *copy) for copy in copies])
    x = Quantized(card.zeros((columns, k), np.int8), card.zeros((columns, k // BLOCK), np.float32))
    y = card.alloc((columns, n), np.float32)
    return Case(f"{format.name} {n} x {k}, {columns} columns",
                launch=lambda: multiply(card, y, n, next(turns), x, columns),
                n_bytes=sum(a.nbytes for a in (*copies[0], *x, y)), n_ops=2 * n * k * columns, pipe=pipe)


def cases(card):
    """The checks, then times."""
    for format in FORMATS.values():
        for case in CASES:
            yield Case("{} x {}, {} columns, ".format(*case) + format.name, partial(check, card, format, *case))
    for format in FORMATS.values():
        for case in TIMED:
            yield timed(card, tile_gemv, "dp4a", format, *case)


if __name__ == "__main__":
    main("Many columns of a decode step", cases)
