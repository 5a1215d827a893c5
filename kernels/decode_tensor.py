"""Products of decode steps with several columns on tensor cores: the same bits as kernels/decode_tile.py.

    y[c, i]  as in kernels/q8_gemv.py and kernels/quant_gemv.py, with the same bits              (+ y[c, i] with `add`)

    w   Matrix [n, k] of a format of kernels/formats       k a multiple of 256, n any, n k below 2**32
    xq  int8    [columns, k]   xd  float32 [columns, k / 32]  of kernels/quantize.py
    y   float32 [columns, stride]

The dot of a block of 32 is an exact integer, however it is made: here by `mma`, of 16 rows of w with 8 columns of x.
The tree of additions of the decode family has 32 chains: chain h adds blocks h, h + 32, h + 64, ... of a row. So a
product splits into 32 parts that nothing joins before the end. Here the warps of a block of threads share a tile of
rows of w and columns of x. Warp v of 8 makes the chains v, v + 8, v + 16 and v + 24 of its outputs, one by one:

    stage:  8 neighbouring blocks of k, one for each warp, of all rows of w and columns of x of the tile
    pass:   every fourth stage along k: one chain of each warp, in registers. Then each lane adds it to its total
    end:    the totals of the eight warps meet in shared memory: t_w, then the butterfly 4, 2, 1

    shared memory of a stage        w  [8 blocks][rows][32] bytes, and their scales
                                    x  [8 blocks][columns][32] bytes, then [1 to 3][columns][8 + 4] words: scales,
                                       scale * sum

Copies that pass no register bring x and Q8_0 to shared memory, three stages ahead. Weights of the other formats must be
unpacked, so they pass through registers, one stage ahead. In every second group of 4 rows, the two halves of a block
are swapped, as in kernels/tensor_gemm.py: so the 8 rows of an `ldmatrix` use different banks.

SwiGLU: the first half of a tile's rows are 32 rows of gate, the second half the same rows of up. 32 outputs of a column
are one block of the quantisation.

Pipe: tensor. Beside one `mma` a lane takes 12 float32 operations for the scales of its 4 numbers. No pipe is full: what
bounds it is how fast w and x come from the second-level cache to shared memory.
Measured: benchmarks/results.md, section decode_tensor.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint16, uint32, uint64

from kernels import decode_tile
from kernels.bench import Case, main
from kernels.formats import BLOCK, FORMATS, as_words, on_card, random_raw
from kernels.intrinsics import (BIAS_WORD, commit_copies, float_as_word, global_address, half_to_float, let_next_begin,
                                load_matrices, load_shared, load_shared4, mma_s8_16x8x16, mma_s8_16x8x32,
                                opaque_address, shared_address, start_copy4, store_shared, store_shared4,
                                unbias, wait_for_copies, wait_for_previous, warp_number, word_as_float, word_sum)
from kernels.operands import Matrix, Quantized
from kernels.swiglu import finish_unit, swiglu_quantize
from kernels.tensor_gemm import adder, two_dots

CHAINS, PASSES = 8, 4       # chains of a stage, one for each warp; passes over k
STAGE = CHAINS * BLOCK      # numbers of a row
PITCH = 4 * (CHAINS + 4)    # bytes from the scales of a column of x to those of the next
BUFFERS = 4
ABSENT = 0xFFFFFFFF         # where columns past the last one would start: nobody reads what lies in their place
OLDEST = 8, 0               # the first architecture that has these copies and this `mma`


class Shape(NamedTuple):
    """The tile of a block of threads."""
    rows: int       # of w for a warp, in sixteens
    columns: int    # of x, in eights
    resident: int   # blocks of threads for which an SM has registers; one where a block of weights has two dots

    @property
    def threads(self):
        return 32 * CHAINS

    @property
    def tile_rows(self):
        return 16 * self.rows

    @property
    def tile_columns(self):
        return 8 * self.columns


class Layout(NamedTuple):
    """Bytes of shared memory: of a block of w and of x, where each part of a stage begins, and where it ends."""
    w_block: int
    x_block: int
    wd: int
    x: int
    xd: int
    end: int


def layout_of(format, shape):
    """Blocks have such padding that threads that store neighbouring blocks use different banks."""
    rows, columns = shape.tile_rows, shape.tile_columns
    w_block, x_block = BLOCK * rows + (32 if format.bits == 8 else 16), BLOCK * columns + 32
    wd = CHAINS * w_block
    x = wd + (2 * CHAINS * rows if format.bits == 8 else 4 * format.n_scales * CHAINS * (rows + 4))
    xd = x + CHAINS * x_block
    return Layout(w_block, x_block, wd, x, xd, xd + (1 + format.minima) * PITCH * columns)


def totals_pitch(shape):
    """Words from the totals of a column to those of the next."""
    return shape.tile_rows + 8


def shared_bytes(format, shape):
    """Dynamic shared memory of a launch. The totals take the place of the stages."""
    return max(BUFFERS * layout_of(format, shape).end, 4 * CHAINS * shape.tile_columns * totals_pitch(shape))


@cuda.jit(device=True, forceinline=True)
def place(row, half):
    """Where 16 bytes of a row of a block lie."""
    swapped = uint32(half ^ uint32(uint32(row >> uint32(2)) & uint32(1)))
    return uint64(uint32(uint32(row << uint32(5)) + uint32(swapped << uint32(4))))


# ---- from global to shared memory --------------------------------------------------------------------------

def row_function(shape, swiglu):
    """row_of(i, first, n): the row of w, of 2 n with `swiglu`, that is row i of the tile of outputs from `first` on."""
    half = shape.tile_rows // 2

    @cuda.jit(device=True, forceinline=True)
    def row_of(i, first, n):
        return min(uint32(first + i), uint32(n - uint32(1)))

    @cuda.jit(device=True, forceinline=True)
    def row_of_pair(i, first, n):
        return uint32(first + i) if i < uint32(half) else uint32(n + first + uint32(i - uint32(half)))

    return row_of_pair if swiglu else row_of


class Weights(NamedTuple):
    """How w comes to shared memory. What a thread brings starts at the places in uint32 [n_starts] and is in uint32
    raw_shape on the way. `group` is the number of a stage's blocks along k, `first` the first output of the tile.

    begin(starts, first, n, k, thread) finds these places. copy(to, wq, wd, starts, group, thread) starts to copy a
    stage. Or fetch(raw, wq, wd, starts, k, group, thread) loads it, and put(to, raw, thread, book) unpacks and stores
    it.
    """
    n_starts: int
    raw_shape: tuple
    begin: Callable
    copy: Callable
    fetch: Callable
    put: Callable


@cuda.jit(device=True, forceinline=True)
def no_copy(to, wq, wd, starts, group, thread):
    pass


@cuda.jit(device=True, forceinline=True)
def no_fetch(raw, wq, wd, starts, k, group, thread):
    pass


@cuda.jit(device=True, forceinline=True)
def no_put(to, raw, thread, book):
    pass


def copied(shape, layout, swiglu):
    """The Weights of Q8_0. A thread copies pieces of 16 bytes, and the scales of a row."""
    threads, rows, w_block, wd_at = shape.threads, shape.tile_rows, layout.w_block, layout.wd
    count, apart, row_of = 2 * CHAINS * rows // threads, threads // (2 * CHAINS), row_function(shape, swiglu)

    @cuda.jit(device=True, forceinline=True)
    def begin(starts, first, n, k, thread):
        for m in range(count):
            row = row_of(uint32(uint32(thread >> uint32(4)) + uint32(m * apart)), first, n)
            starts[m] = uint32(uint32(row * k) + uint32(uint32(thread & uint32(15)) << uint32(4)))
        row = row_of(min(thread, uint32(rows - 1)), first, n)
        starts[count] = uint32(row * uint32(k >> uint32(4)))

    @cuda.jit(device=True, forceinline=True)
    def copy(to, wq, wd, starts, group, thread):
        source = global_address(wq) + uint64(uint32(group << uint32(8)))
        block, half = uint32(uint32(thread >> uint32(1)) & uint32(7)), uint32(thread & uint32(1))
        at = to + uint64(uint32(block * uint32(w_block)))
        for m in range(count):
            row = uint32(uint32(thread >> uint32(4)) + uint32(m * apart))
            start_copy4(at + place(row, half), source + uint64(starts[m]))
        if thread < uint32(rows):
            scales = global_address(wd) + uint64(uint32(starts[count] + uint32(group << uint32(4))))
            start_copy4(to + uint64(wd_at) + uint64(uint32(thread << uint32(4))), scales)

    return Weights(count + 1, (1, 1), begin, copy, no_fetch, no_put)


def carried(format, shape, layout, swiglu):
    """The Weights of the other formats. A thread carries whole blocks."""
    threads, w_block, wd_at, pitch = shape.threads, layout.w_block, layout.wd, 4 * (shape.tile_rows + 4)
    count, apart, row_of = CHAINS * shape.tile_rows // threads, threads // CHAINS, row_function(shape, swiglu)
    starts_of, fetch_block, unpack, n_scales = format.starts, format.stream, format.unpack, format.n_scales
    integers = format.halves

    @cuda.jit(device=True, forceinline=True)
    def begin(starts, first, n, k, thread):
        for m in range(count):
            row = row_of(uint32(uint32(thread >> uint32(3)) + uint32(m * apart)), first, n)
            starts[m], starts[count + m] = starts_of(row, uint32(k >> uint32(5)))

    @cuda.jit(device=True, forceinline=True)
    def fetch(raw, wq, wd, starts, k, group, thread):
        b = uint32(uint32(group << uint32(3)) + uint32(thread & uint32(7)))
        for m in range(count):
            fetch_block(raw[m], wq, wd, starts[m], starts[count + m], uint32(k >> uint32(5)), b)

    @cuda.jit(device=True, forceinline=True)
    def put(to, raw, thread, book):
        block = uint32(thread & uint32(7))
        at = to + uint64(uint32(block * uint32(w_block)))
        scales_at = to + uint64(wd_at) + uint64(uint32(block * uint32(pitch)))
        for m in range(count):
            w, scales = cuda.local.array(8, uint32), cuda.local.array(n_scales, uint32)
            unpack(w, scales, raw[m], book)
            if integers:
                scales[1] = float_as_word(float32(int32(scales[1])))
                scales[2] = float_as_word(float32(int32(scales[2])))
            row = uint32(uint32(thread >> uint32(3)) + uint32(m * apart))
            store_shared4(at + place(row, uint32(0)), w[0], w[1], w[2], w[3])
            store_shared4(at + place(row, uint32(1)), w[4], w[5], w[6], w[7])
            for s in range(n_scales):
                store_shared(scales_at + uint64(uint32(uint32(row << uint32(2)) + uint32(s * CHAINS * pitch))),
                             scales[s])

    return Weights(2 * count, (count, format.raw_words), begin, no_copy, fetch, put)


def columns_function(format, shape, layout):
    """(n_starts, begin, copy, put_sums) for x, as in Weights. put_sums(at, thread): scale * sum of the blocks, or half
    blocks, of a stage that has come, for formats with a minimum."""
    threads, columns, x_block, minima = shape.threads, shape.tile_columns, layout.x_block, format.minima
    pieces, x_at, xd_at = 2 * CHAINS * columns, layout.x, layout.xd
    count, apart = -(-pieces // threads), threads // (2 * CHAINS)

    @cuda.jit(device=True, forceinline=True)
    def column_of(thread, m):
        return uint32(uint32(thread >> uint32(4)) + uint32(m * apart))

    @cuda.jit(device=True, forceinline=True)
    def begin(starts, first, n_columns, k, thread):
        for m in range(count):
            column = uint32(first + column_of(thread, m))
            starts[m] = uint32(uint32(column * k) + uint32(uint32(thread & uint32(15)) << uint32(4)))
            if column >= n_columns or column_of(thread, m) >= uint32(columns):
                starts[m] = uint32(ABSENT)
        column = uint32(first + uint32(thread >> uint32(1)))
        starts[count] = uint32(uint32(column * uint32(k >> uint32(3)))
                               + uint32(uint32(thread & uint32(1)) << uint32(4)))
        if column >= n_columns or thread >= uint32(2 * columns):
            starts[count] = uint32(ABSENT)

    @cuda.jit(device=True, forceinline=True)
    def copy(to, xq, xd, starts, group, thread):
        source = global_address(xq) + uint64(uint32(group << uint32(8)))
        block, half = uint32(uint32(thread >> uint32(1)) & uint32(7)), uint32(thread & uint32(1))
        at = to + uint64(x_at) + uint64(uint32(block * uint32(x_block)))
        for m in range(count):
            if starts[m] != uint32(ABSENT):
                start_copy4(at + place(column_of(thread, m), half), source + uint64(starts[m]))
        if starts[count] != uint32(ABSENT):
            here = uint32(uint32(uint32(thread >> uint32(1)) * uint32(PITCH)) + uint32(half << uint32(4)))
            scales = global_address(xd) + uint64(uint32(starts[count] + uint32(group << uint32(5))))
            start_copy4(to + uint64(xd_at) + uint64(here), scales)

    @cuda.jit(device=True, forceinline=True)
    def put_sums(at, thread):
        block = uint32(thread & uint32(7))
        for m in range(CHAINS * columns // threads + (CHAINS * columns % threads > 0)):
            column = uint32(uint32(thread >> uint32(3)) + uint32(m * threads // CHAINS))
            if column < uint32(columns):
                here = at + uint64(x_at) + uint64(uint32(block * uint32(x_block)))
                scale_at = at + uint64(xd_at) + uint64(
                    uint32(uint32(column * uint32(PITCH)) + uint32(block << uint32(2))))
                scale = word_as_float(load_shared(scale_at))
                total = int32(0)
                for h in range(2):
                    w0, w1, w2, w3 = load_shared4(here + place(column, uint32(h)))
                    total = word_sum(w3, word_sum(w2, word_sum(w1, word_sum(w0, total))))
                    if minima == 2 or h == 1:
                        to = uint64(PITCH * columns * (1 + h if minima == 2 else 1))
                        store_shared(scale_at + to, float_as_word(scale * float32(total)))
                        total = int32(0)

    return count + 1, begin, copy, put_sums


# ---- products ----------------------------------------------------------------------------------------------

def product_functions(format, shape, layout, converts):
    """(multiply_stage, w_place, x_place): what a lane does with its warp's block of a stage. converts: the dots with
    every other eight columns become floats by a conversion, which has a pipe of its own, and not by their bias."""
    rows, eights, n_scales, minima = shape.rows, shape.columns, format.n_scales, format.minima
    two, packed, n_dots = two_dots(format), format.bits < 8, 8 if two_dots(format) else 4
    per_column, tile_columns, scale_plane = 1 + minima, shape.tile_columns, 4 * CHAINS * (shape.tile_rows + 4)

    @cuda.jit(device=True, forceinline=True)
    def w_place(lane):
        """Matrices of 8 rows: the first halves of rows 0 .. 15, then the second."""
        return place(uint32(lane & uint32(15)), uint32(lane >> uint32(4)))

    @cuda.jit(device=True, forceinline=True)
    def x_place(lane):
        """Both halves of columns 0 .. 7, then of 8 .. 15."""
        column = uint32(lane & uint32(7))
        if eights > 1:
            column = uint32(column + uint32(uint32(lane >> uint32(4)) << uint32(3)))
        return place(column, uint32(uint32(lane >> uint32(3)) & uint32(1)))

    def functions(converted):
        add_dots = adder(format, float32 if converted else unbias, w_has_rows=True)

        @cuda.jit(device=True, forceinline=True)
        def begin(bias):
            if converted:
                return int32(0), int32(0), int32(0), int32(0)
            return bias[0], bias[1], bias[2], bias[3]

        @cuda.jit(device=True, forceinline=True)
        def multiply(acc, a, b0, b1, bias, w_scales, x_scales):
            """acc: of rows g, g + 8 and columns 2 t, 2 t + 1, for lane 4 g + t."""
            dots = cuda.local.array(n_dots, int32)
            start = begin(bias)
            if two:
                dots[0], dots[1], dots[2], dots[3] = mma_s8_16x8x16((a[0], a[1]), (b0,), start)
                dots[4], dots[5], dots[6], dots[7] = mma_s8_16x8x16((a[2], a[3]), (b1,), start)
            else:
                dots[0], dots[1], dots[2], dots[3] = mma_s8_16x8x32((a[0], a[1], a[2], a[3]), (b0, b1), start)
            add_dots(acc, dots, w_scales, x_scales)

        return multiply

    multiply_even, multiply_odd = functions(converts), functions(False)

    @cuda.jit(device=True, forceinline=True)
    def load_w_scales(w_scales, at, shift, r):
        for i in range(2):
            if packed:
                for s in range(n_scales):
                    w_scales[s, i] = load_shared(at + uint64(scale_plane * s + 4 * (16 * r + 8 * i)))
            else:
                pair = load_shared(at + uint64(2 * CHAINS * (16 * r + 8 * i)))
                w_scales[0, i] = float_as_word(half_to_float(uint16(pair >> shift)))

    @cuda.jit(device=True, forceinline=True)
    def multiply_stage(acc, bias, w_at, x_at, wd_at, xd_at, shift):
        """acc += the products of one block. wd_at, xd_at: the scales of the lane's first row and column. shift: where a
        float16 stands in its word."""
        b, x_scales = cuda.local.array((eights, 2), uint32), cuda.local.array((eights, per_column, 2), float32)
        for c in range(0, eights, 2):
            b[c, 0], b[c, 1], second0, second1 = load_matrices(x_at + uint64(8 * BLOCK * c))
            if c + 1 < eights:
                b[c + 1, 0], b[c + 1, 1] = second0, second1
        for c in range(eights):
            for p in range(per_column):
                for j in range(2):
                    x_scales[c, p, j] = word_as_float(
                        load_shared(xd_at + uint64(PITCH * (tile_columns * p + 8 * c + j))))
        for r in range(rows):
            a, w_scales = cuda.local.array(4, uint32), cuda.local.array((n_scales, 2), uint32)
            a[0], a[1], a[2], a[3] = load_matrices(w_at + uint64(16 * BLOCK * r))
            load_w_scales(w_scales, wd_at, shift, r)
            for c in range(0, eights, 2):
                multiply_even(acc[r, c], a, b[c, 0], b[c, 1], bias, w_scales, x_scales[c])
                if c + 1 < eights:
                    multiply_odd(acc[r, c + 1], a, b[c + 1, 0], b[c + 1, 1], bias, w_scales, x_scales[c + 1])

    return multiply_stage, w_place, x_place


@cache
def tensor_kernel(format, shape, swiglu, converts):
    """The kernel of y <- (y +) w . x or, with `swiglu`, of (q, d) <- quantised silu(gate . x) * (up . x)."""
    layout = layout_of(format, shape)
    rows, eights, resident = shape.rows, shape.columns, resident_blocks(format, shape)
    threads, tile_rows, tile_columns = shape.threads, shape.tile_rows, shape.tile_columns
    outputs = tile_rows // 2 if swiglu else tile_rows      # numbers of a column that a tile makes
    buffer, end, copies_w = layout.end, BUFFERS * layout.end, format.bits == 8
    n_starts, raw_shape, begin_w, copy_w, fetch_w, put_w = (
        copied(shape, layout, swiglu) if copies_w else carried(format, shape, layout, swiglu))
    n_x_starts, begin_x, copy_x, put_sums = columns_function(format, shape, layout)
    acc_shape, minima, load_book = (rows, eights, 4), format.minima, format.load_book
    multiply_stage, w_place, x_place = product_functions(format, shape, layout, converts)
    wait = wait_for_copies(BUFFERS - 3 if minima else BUFFERS - 2)  # sums are made a stage before their products
    wait_for_all = wait_for_copies(0)
    x_part, wd_part, xd_part, w_block, x_block = layout.x, layout.wd, layout.xd, layout.w_block, layout.x_block
    wd_step = 4 * (tile_rows + 4)                           # from the scales of a block to those of the next
    pitch, h_shape = totals_pitch(shape), (1, 2, tile_columns * BLOCK if swiglu else 1)
    quads = tile_columns * tile_rows // threads

    @cuda.jit(device=True, forceinline=True)
    def following(group, groups):
        """The stage after a stage: of the same pass, or the first of the next."""
        after = uint32(group + uint32(PASSES))
        return after if after < groups else uint32(uint32(group & uint32(PASSES - 1)) + uint32(1))

    @cuda.jit(device=True, forceinline=True)
    def next_buffer(at):
        at = at + uint64(buffer)
        return uint64(0) if at == uint64(end) else at

    @cuda.jit(device=True, forceinline=True)
    def buffers():
        return shared_address(cuda.shared.array(0, uint32, alignment=128))

    @cuda.jit(device=True, forceinline=True)
    def start(starts, raw, wq, wd, n, k, first, thread):
        """The first loads of w, which no kernel before this one has written."""
        groups, to = uint32(k >> uint32(8)), buffers()
        begin_w(starts, first, n, k, thread)
        fetch_w(raw, wq, wd, starts, k, uint32(0), thread)
        group = uint32(0)
        for s in range(BUFFERS - 1):
            if uint32(s) < groups:
                copy_w(to + uint64(buffer * s), wq, wd, starts, group, thread)
            group = following(group, groups)

    @cuda.jit(device=True, forceinline=True)
    def add_products(total, starts, raw, book, wq, wd, xq, xd, n, k, n_columns, lane, warp, first_column):
        """total <- the lane's part of the sums t of its chains."""
        thread, groups, start = uint32(uint32(warp << uint32(5)) + lane), uint32(k >> uint32(8)), buffers()
        x_starts = cuda.local.array(n_x_starts, uint32)
        begin_x(x_starts, first_column, n_columns, k, thread)
        group = uint32(0)                       # whose copies begin next
        for s in range(BUFFERS - 1):
            if uint32(s) < groups:
                copy_x(start + uint64(buffer * s), xq, xd, x_starts, group, thread)
            commit_copies()                     # the first of these groups has all that `start` has copied, too
            group = following(group, groups)
        put_w(start, raw, thread, book)
        held = following(uint32(0), groups)     # whose weights are in registers
        if groups > uint32(1):
            fetch_w(raw, wq, wd, starts, k, held, thread)

        acc = cuda.local.array(acc_shape, float32)
        for r in range(rows):
            for c in range(eights):
                for i in range(4):
                    acc[r, c, i], total[r, c, i] = float32(0.0), float32(-0.0)
        bias = cuda.local.array(4, int32)
        for i in range(4):          # k is a multiple of 32, so it adds nothing
            bias[i] = int32(uint32(BIAS_WORD) | uint32(k & uint32(1 << i)))
        row, column, shift = uint32(lane >> uint32(2)), uint32(uint32(lane & uint32(3)) << uint32(1)), uint32(0)
        w_at = opaque_address(start + w_place(lane) + uint64(uint32(warp * uint32(w_block))))
        x_at = opaque_address(start + x_place(lane) + uint64(uint32(uint32(x_part) + uint32(warp * uint32(x_block)))))
        if copies_w:
            shift = uint32(uint32(warp & uint32(1)) << uint32(4))
            here = uint32(uint32(row << uint32(4)) + uint32(uint32(warp >> uint32(1)) << uint32(2)))
        else:
            here = uint32(uint32(warp * uint32(wd_step)) + uint32(row << uint32(2)))
        wd_at = opaque_address(start + uint64(wd_part) + uint64(here))
        xd_at = opaque_address(start + uint64(xd_part) + uint64(
            uint32(uint32(column * uint32(PITCH)) + uint32(warp << uint32(2)))))

        if minima:
            wait()
            cuda.syncthreads()
            put_sums(start, thread)
        now, filling, done, at = uint64(0), uint64(buffer * (BUFFERS - 1)), uint32(0), uint32(0)
        while done < groups:
            wait()
            cuda.syncthreads()
            if uint32(done + uint32(BUFFERS - 1)) < groups:
                copy_w(start + filling, wq, wd, starts, group, thread)
                copy_x(start + filling, xq, xd, x_starts, group, thread)
                group = following(group, groups)
            commit_copies()
            filling = next_buffer(filling)
            done = uint32(done + uint32(1))
            if done < groups:
                put_w(start + next_buffer(now), raw, thread, book)
                if minima:
                    put_sums(start + next_buffer(now), thread)
                if uint32(done + uint32(1)) < groups:
                    held = following(held, groups)
                    fetch_w(raw, wq, wd, starts, k, held, thread)
            multiply_stage(acc, bias, w_at + now, x_at + now, wd_at + now, xd_at + now, shift)
            now = next_buffer(now)
            if uint32(at + uint32(PASSES)) >= groups:   # the last stage of a pass
                for r in range(rows):
                    for c in range(eights):
                        for i in range(4):
                            total[r, c, i] = total[r, c, i] + acc[r, c, i]
                            acc[r, c, i] = float32(0.0)
            at = following(at, groups)
        if groups < uint32(PASSES):     # chains without a block
            for r in range(rows):
                for c in range(eights):
                    for i in range(4):
                        total[r, c, i] = total[r, c, i] + float32(0.0)

    @cuda.jit(device=True, forceinline=True)
    def leave_totals(total, lane, warp):
        """Stores the totals of all warps: [warp][column][row]."""
        start = buffers()
        wait_for_all()
        cuda.syncthreads()              # nobody reads a stage any more
        column = uint32(uint32(warp * uint32(tile_columns)) + uint32(uint32(lane & uint32(3)) << uint32(1)))
        to = start + uint64(
            uint32(uint32(uint32(column * uint32(pitch)) + uint32(lane >> uint32(2))) << uint32(2)))
        for r in range(rows):
            for c in range(eights):
                for i in range(4):
                    here = 4 * (pitch * (8 * c + (i & 1)) + 16 * r + 8 * (i >> 1))
                    store_shared(to + uint64(here), float_as_word(total[r, c, i]))
        cuda.syncthreads()

    @cuda.jit(device=True, forceinline=True)
    def sum_of(row, column):
        """Over the eight warps."""
        at = buffers() + uint64(uint32(uint32(uint32(column * uint32(pitch)) + row) << uint32(2)))
        t = cuda.local.array(CHAINS, uint32)
        for v in range(CHAINS):
            t[v] = load_shared(at + uint64(4 * pitch * tile_columns * v))
        return decode_tile.butterfly(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7])

    @cuda.jit(launch_bounds=(threads, resident))
    def decode_tensor_kernel(y, stride, wq, wd, xq, xd, n, k, n_columns, add):
        let_next_begin()
        lane, warp = uint32(cuda.threadIdx.x), warp_number()
        thread, total = uint32(uint32(warp << uint32(5)) + lane), cuda.local.array(acc_shape, float32)
        starts, raw = cuda.local.array(n_starts, uint32), cuda.local.array(raw_shape, uint32)
        first, first_column = uint32(cuda.blockIdx.y * uint32(outputs)), uint32(cuda.blockIdx.x * uint32(tile_columns))
        start(starts, raw, wq, wd, n, k, first, thread)
        book = load_book(thread, uint32(threads))
        wait_for_previous()
        add_products(total, starts, raw, book, wq, wd, xq, xd, n, k, n_columns, lane, warp, first_column)
        leave_totals(total, lane, warp)
        i = thread
        for _ in range(quads):
            row, c = uint32(i % uint32(tile_rows)), uint32(i // uint32(tile_rows))
            column = uint32(first_column + c)
            if uint32(first + row) < n and column < n_columns:
                at, total_sum = uint32(uint32(column * stride) + uint32(first + row)), sum_of(row, c)
                y[at] = y[at] + total_sum if add else total_sum
            i = uint32(i + uint32(threads))

    @cuda.jit(launch_bounds=(threads, resident))
    def decode_tensor_swiglu_kernel(q, d, wq, wd, xq, xd, n, k, n_columns):
        let_next_begin()
        h = cuda.shared.array(h_shape, float32)
        lane, warp = uint32(cuda.threadIdx.x), warp_number()
        thread, total = uint32(uint32(warp << uint32(5)) + lane), cuda.local.array(acc_shape, float32)
        starts, raw = cuda.local.array(n_starts, uint32), cuda.local.array(raw_shape, uint32)
        first, first_column = uint32(cuda.blockIdx.y * uint32(outputs)), uint32(cuda.blockIdx.x * uint32(tile_columns))
        start(starts, raw, wq, wd, n, k, first, thread)
        book = load_book(thread, uint32(threads))
        wait_for_previous()
        add_products(total, starts, raw, book, wq, wd, xq, xd, n, k, n_columns, lane, warp, first_column)
        leave_totals(total, lane, warp)
        i = thread
        for _ in range(quads):
            row, c = uint32(i % uint32(tile_rows)), uint32(i // uint32(tile_rows))
            h[0, uint32(row >> uint32(5)), uint32(uint32(c << uint32(5)) + uint32(row & uint32(31)))] = sum_of(row, c)
            i = uint32(i + uint32(threads))
        cuda.syncthreads()
        c, unit = warp, uint32(first >> uint32(5))
        while c < uint32(tile_columns) and uint32(first_column + c) < n_columns:
            finish_unit(q, d, h, uint32(0), c, uint32(uint32(uint32(first_column + c) * uint32(n >> uint32(5))) + unit),
                        lane)
            c = uint32(c + uint32(threads // 32))

    return decode_tensor_swiglu_kernel if swiglu else decode_tensor_kernel


# ---- launches: they write in place and never allocate ------------------------------------------------------

SHAPES = {"64 x 8": Shape(4, 1, 2), "64 x 16": Shape(4, 2, 2), "64 x 32": Shape(4, 4, 1)}

# Shapes -> the time of a stage of a block of threads, in microseconds on an H100 whose SMs all have work.
TIMES = {SHAPES["64 x 8"]: 0.96, SHAPES["64 x 16"]: 1.05, SHAPES["64 x 32"]: 1.2}
LEAST, LEAST_OF_BYTES = 5, 25   # fewest columns for which these kernels are faster than dp4a's; the second: of Q8_0
FILLED = 0.75                   # least share of SMs that must have a tile of 64 x 32


def resident_blocks(format, shape):
    """Blocks of threads for which an SM has registers."""
    return 1 if two_dots(format) else shape.resident


def takes(card, format, n, k, columns, swiglu=False):
    """Whether these kernels can make a product, and faster than those of dp4a, on a card that multiplies prompts
    faster on tensor cores."""
    least, widest = LEAST_OF_BYTES if format.bits == 8 else LEAST, SHAPES["64 x 32"].tile_columns
    fits = any(shape.tile_columns >= min(columns, widest) for shape in _fitting(card, format, swiglu))
    return (columns >= least and k % STAGE == 0 and fits
            and block_count(n, columns, SHAPES["64 x 32"]) >= FILLED * card.n_sms)


def _fitting(card, format, swiglu):
    """The shapes for which a block of threads has the shared memory."""
    room = card.max_shared - format.book_bytes
    return [shape for shape in SHAPES.values()
            if shared_bytes(format, shape) + swiglu * 8 * BLOCK * shape.tile_columns <= room]


def block_count(n, columns, shape):
    """Blocks of threads of a product."""
    return -(-n // shape.tile_rows) * -(-columns // shape.tile_columns)


def shape_for(card, format, n, columns, swiglu=False):
    """The Shape with which a product takes the least time: that of the SM which makes the most blocks."""
    return min(_fitting(card, format, swiglu),
               key=lambda shape: -(-block_count(n, columns, shape) // card.n_sms) * TIMES[shape])


def tensor_gemv(card, y, stride, w, x, columns, add=False, *, shape=None, converts=True, stream=None):
    """`gemv` of kernels/q8_gemv.py. w: a Matrix. x: Quantized."""
    format = FORMATS[w.format]
    shape = shape or shape_for(card, format, w.n, columns)
    kernel, block = tensor_kernel(format, shape, False, converts), (32, shape.threads // 32)
    card.launch(kernel, _grid(shape, w.n, columns), block, y.reshape(-1), stride,
                w.values.reshape(-1), as_words(w.scales), *x.flat, w.n, w.k, columns, add,
                shared=shared_bytes(format, shape), stream=stream)


def tensor_gemv_swiglu(card, out, w, x, columns, *, shape=None, converts=True, stream=None):
    """out, Quantized <- quantised silu(gate . x) * (up . x). w: the rows of gate, below them those of up."""
    format, n = FORMATS[w.format], w.n // 2
    shape = shape or shape_for(card, format, w.n, columns, True)
    kernel, block = tensor_kernel(format, shape, True, converts), (32, shape.threads // 32)
    card.launch(kernel, _grid(shape, w.n, columns), block,
                *out.flat, w.values.reshape(-1), as_words(w.scales), *x.flat, n, w.k, columns,
                shared=shared_bytes(format, shape), stream=stream)


def _grid(shape, n, columns):
    """Tiles side by side, and one below the other. Those that share weights are neighbours."""
    return -(-columns // shape.tile_columns), -(-n // shape.tile_rows)


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [(33, 256, 3), (40, 1280, 24), (70, 2560, 70)]  # n, k, columns


def operands(card, format, n, k, columns):
    """(Matrix, Quantized) of random numbers."""
    rng = np.random.default_rng((n, k, columns))
    w = Matrix(format.name, n, k, *on_card(card, format, random_raw(rng, format, n, k), n, k))
    xq, xd = rng.integers(-127, 128, (columns, k), np.int8), rng.random((columns, k // BLOCK), np.float32)
    return w, Quantized(card.upload(xq), card.upload(xd))


def poisoned(card, *shape, dtype=np.float32):
    array = card.alloc(shape, dtype)
    card.poison(array)
    return array


def check(card, format, n, k, columns, shape=None, converts=True):
    """Compares the bits of products of random matrices with those of kernels/decode_tile.py, alone and added to what is
    there, with numbers around each column and a column more. Returns 0, the error."""
    w, x = operands(card, format, n, k, columns)
    y, want = poisoned(card, columns + 1, n + 3), poisoned(card, columns + 1, n + 3)
    for add in False, True:
        tensor_gemv(card, y.reshape(-1)[1:], n + 3, w, x, columns, add, shape=shape, converts=converts)
        decode_tile.tile_gemv(card, want.reshape(-1)[1:], n + 3, w, x, columns, add)
    np.testing.assert_array_equal(card.download(y).view(np.uint32), card.download(want).view(np.uint32))
    return 0.0


def check_swiglu(card, format, n, k, columns, shape=None, converts=True):
    """The same of `tensor_gemv_swiglu` and of the product and swiglu_quantize. n: rows of gate, a multiple of 32."""
    w, x = operands(card, format, 2 * n, k, columns)
    both = poisoned(card, columns, 2 * n)
    out, want = (Quantized(poisoned(card, columns + 1, n, dtype=np.int8), poisoned(card, columns + 1, n // BLOCK))
                 for _ in range(2))
    decode_tile.tile_gemv(card, both, 2 * n, w, x, columns)
    swiglu_quantize(card, want, both, columns, n)
    tensor_gemv_swiglu(card, out, w, x, columns, shape=shape, converts=converts)
    for got, expected in zip(out, want):
        np.testing.assert_array_equal(card.download(got).view(np.uint8), card.download(expected).view(np.uint8))
    return 0.0


TIMED = [(4096, 4096, 8), (4096, 4096, 16), (4096, 4096, 64), (24576, 4096, 32), (24576, 4096, 64)]


def cases(card):
    """The checks, then times. None on a card that is too old or has too little shared memory."""
    if card.kind != "emulated" and card.cc < OLDEST:
        return
    able = [format for format in FORMATS.values() if _fitting(card, format, False)]
    for format in able:
        for case in CASES:
            yield Case("{} x {}, {} columns, ".format(*case) + format.name, partial(check, card, format, *case))
    for format in able:
        for case in TIMED:
            yield decode_tile.timed(card, tensor_gemv, "tensor", format, *case)


if __name__ == "__main__":
    main("Several columns of a decode step on tensor cores", cases)
