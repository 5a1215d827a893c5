"""Matrix x matrix products for prompts on tensor cores: the same bits as kernels/q8_gemm.py, from another pipe.

    y[r, n] = acc;    for blocks b of 32, increasing:
                          acc = fma(float(dot(wq[n, b], xq[r, b])), wd[n, b] * xd[r, b], acc)

Operands, formats, shapes and the float chain are those of kernels/q8_gemm.py. Its dot is an exact int32, in whatever
way it is made: there by 8 dp4a, here by an `mma`. So each number of y has the same bits.

A warp makes a tile of y from products of 16 rows x 8 columns x 32 of k. Lane 4 g + t then has dots of rows g and g + 8
and of columns 2 t and 2 t + 1 (kernels/intrinsics.py), and scales them. A warp keeps its rows of a block of k in
registers, and passes over its columns 16 at a time. A block of threads has several warps, one below the other and side
by side. It brings each block of k from global to shared memory.

    shared memory       x  [rows of the tile][32] bytes, then [1 to 3][rows] words: scales, scale * sum
                        w  [columns of the tile][32] bytes, then [1 to 3][columns] words: their scales

The scales lie in such an order that a lane loads its own ones of 32 rows, or of 16 columns, as 4 words in a row.

From sm_80 on, x and Q8_0 go there by copies that pass no register, two blocks ahead, into one of three buffers. Weights
of the other formats must be unpacked, so they pass through registers. On older cards x and all weights pass through
registers, and there are two buffers: while one block is multiplied, the next lies in the other buffer, and the one
after that is on its way to registers. A thread computes its addresses in shared memory once (`opaque_address`): the
compiler would make them anew in each round.

A round multiplies one block of k. In its middle, between the two halves of a warp's columns, the threads store what
they have loaded in the round before, start copies, and load again. Any place in the round would be right. But from this
place on, marked by a `syncwarp`, the assembler moves no load forward, so that loads and products alternate.

`tile_function` makes the loop of a tile. The products of experts have it too (kernels/expert_gemm.py), with rows of x
that lie apart and tiles that are seldom full: so there a warp keeps its columns in registers, passes over its rows 16
at a time, and ends with the last row of the tile. It multiplies after all else in the round.

INSTRUCTIONS has a Form of these products for each `mma`:

    m16n8k32    int8, from sm_80 on. `ldmatrix` gives a warp 8 rows of 16 bytes, four times, as `mma` takes them. In
                shared memory the two halves of a block are swapped in every second group of 4 rows: so 8 rows use
                different banks, and so do 8 threads that each store a half of their own row. Where the halves of a
                block have scales of their own, m16n8k16 makes a dot of each.
    m8n8k16     int8, sm_75: four of them in place of one, from the same registers
    m8n8k4      halves with float32 sums, sm_70. Threads that store a block make halves of its int8, so a block has 64
                bytes. Integers up to 128 are exact as halves, and their dot is as a float: it stays below 2**24.

A sum of int8 starts at the bias with which its bits are those of a float (`unbias`). The bias lies in four registers.
The assembler must not know its value, or it would make it anew for each product. The mixed form converts half of the
dots instead (I2FP, from sm_86 on), which runs in a pipe of its own; the conversion of older cards is slow.

Pipe: tensor. But beside one m16n8k32 a lane takes 12 float32 operations for the scales of its 4 numbers. So the bound
is the issue of instructions (benchmarks/results.md, section tensor_gemm). In the loop of a warp of 64 x 64, on sm_90:

                        Q8_0    Q4_K    Q2_K    Q6_K
    instructions         473     650     805     945
    mma and scales       416     544     672     832
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint32, uint64

from kernels import q8_gemm
from kernels.bench import Case, main
from kernels.formats import BLOCK, FORMATS, as_words, on_card, random_raw
from kernels.intrinsics import (BIAS_WORD, commit_copies, float_as_word, global_address, hadd2, load_matrices,
                                load_shared, load_shared2, load_shared4, load_words4, mma_f16_8x8x4, mma_s8_8x8x16,
                                mma_s8_16x8x16, mma_s8_16x8x32, opaque_address, prmt, shared_address, start_copy,
                                start_copy4, store_shared, store_shared4, unbias, uniform, wait_for_copies,
                                warp_number, word_as_float, word_sum)
from kernels.operands import Matrix, Quantized
from kernels.q8_gemv import random_activations


class Shape(NamedTuple):
    """The tile of a block of threads."""
    rows: int       # of a warp, in sixteens
    columns: int    # of a warp, in eights
    down: int       # warps one below the other
    across: int     # warps side by side
    resident: int   # blocks of threads for which an SM has registers; one less with two dots, or with halves

    @property
    def threads(self):
        return 32 * self.down * self.across

    @property
    def carriers(self):
        """Threads that carry columns; each carries one or several."""
        return min(self.threads, self.tile_columns)

    @property
    def tile_rows(self):
        return 16 * self.rows * self.down

    @property
    def tile_columns(self):
        return 8 * self.columns * self.across


def carriers(format, shape):
    """How a thread carries blocks of w from global to shared memory: (begin, fetch, is_halves). A thread is one of
    the carriers of the Shape.

    begin(starts, first, last, thread, blocks): where its blocks start in global memory, in a tile of columns that
    begins at `first`; in place of columns past `last` it takes column `last`. fetch(raw, wq, wd, starts, blocks, b):
    loads block b of each. Each is column `thread` of the tile or some multiple of the carriers further on.

    A thread carries whole blocks, since it unpacks them. Q8_0 has nothing to unpack: two neighbouring threads carry
    the halves of one column's block, and then those of another's, so that a load touches half as many cache lines
    (is_halves).
    """
    starts_of, fetch_block, threads = format.starts, format.fetch, shape.carriers
    each = shape.tile_columns // threads

    @cuda.jit(device=True, forceinline=True)
    def begin(starts, first, last, thread, blocks):
        for i in range(each):
            q_from, d_from = starts_of(min(uint32(first + thread + uint32(i * threads)), last), blocks)
            starts[i, 0], starts[i, 1], starts[i, 2] = q_from, q_from, d_from

    @cuda.jit(device=True, forceinline=True)
    def fetch(raw, wq, wd, starts, blocks, b):
        for i in range(each):
            fetch_block(raw[i], wq, wd, starts[i, 0], starts[i, 2], blocks, b)

    @cuda.jit(device=True, forceinline=True)
    def begin_halves(starts, first, last, thread, blocks):
        half = uint32(uint32(thread & uint32(1)) << uint32(4))
        for i in range(each):
            column = uint32(first + uint32(i * threads))
            for j in range(2):
                own = uint32(column + uint32(j * threads // 2) + uint32(thread >> uint32(1)))
                q_from, _ = starts_of(min(own, last), blocks)
                starts[i, j] = uint32(q_from + half)
            _, starts[i, 2] = starts_of(min(uint32(column + thread), last), blocks)

    @cuda.jit(device=True, forceinline=True)
    def fetch_halves(raw, wq, wd, starts, blocks, b):
        at = uint32(b << uint32(5))
        for i in range(each):
            to = raw[i]
            to[0], to[1], to[2], to[3] = load_words4(wq, uint32(starts[i, 0] + at))
            to[4], to[5], to[6], to[7] = load_words4(wq, uint32(starts[i, 1] + at))
            to[8] = uint32(wd[uint32(starts[i, 2] + b)])

    return (begin_halves, fetch_halves, True) if format.bits == 8 else (begin, fetch, False)


def permuted(bits):
    """A device function: x with its lowest bits in another order. Bit i of the result is bit bits[i] of x."""
    n, rest = len(bits), 0xFFFFFFFF >> len(bits) << len(bits)

    @cuda.jit(device=True, forceinline=True)
    def permute(x):
        result = uint32(x & uint32(rest))
        for i in range(n):
            result = uint32(result | uint32(uint32(uint32(x >> uint32(bits[i])) & uint32(1)) << uint32(i)))
        return result

    return permute


def two_dots(format):
    """Whether the halves of a block have scales of their own."""
    return format.halves or format.float_scales == 2


class Form(NamedTuple):
    """How tensor cores make the dots of 16 rows of x with 16 columns of w.

    row_bytes: of a block of a row of x or of a column of w, in shared memory. copies: whether int8 may go there from
    global memory through no register. kind: of the dots; as_float: for each of a lane's two pairs of columns of 16 the
    function of a dot that gives its value, float32. words: which a lane holds of 16 rows, or of 16 columns. row_step:
    from a lane's first row of 16 to its second; column_step: from its first pair of columns to its second. row_bits,
    column_bits: the order (`permuted`) in which scales lie, so that a lane's own ones of 32 rows, and those of 16
    columns, are four words in a row.

    The rest are device functions. place(row, half): where the 16 bytes of half a block of a row lie; the other half is
    at this address ^ row_bytes / 2. store(at, w0, ..., w3): stores half a block. row_place(lane), column_place(lane):
    where a lane loads. load(words, at): loads what `multiply` takes of 16 rows or of 16 columns. multiply(dots, a, b,
    bias): dots [2, 4 or 8] <- the dots with the lane's first pair of columns and with its second; where a block has two
    dots, first those of its first half. own_row(lane), own_column(lane): the first that it has dots of.
    """
    row_bytes: int
    copies: bool
    kind: type
    as_float: tuple
    words: int
    row_step: int
    column_step: int
    row_bits: tuple
    column_bits: tuple
    place: Callable
    store: Callable
    row_place: Callable
    column_place: Callable
    load: Callable
    multiply: Callable
    own_row: Callable
    own_column: Callable


@cache
def form_of_bytes(two, is_small=False, converts=False, copies=False):
    """Products of int8. two: with two dots, of the halves of a block. is_small: from 8 rows x 8 columns x 16 of k.
    converts: the dots with a lane's first pair of columns become floats by a conversion, not by their bias."""
    @cuda.jit(device=True, forceinline=True)
    def place(row, half):
        swapped = uint32(half ^ uint32(uint32(row >> uint32(2)) & uint32(1)))
        return uint64(uint32(uint32(row << uint32(5)) + uint32(swapped << uint32(4))))

    @cuda.jit(device=True, forceinline=True)
    def store(at, w0, w1, w2, w3):
        store_shared4(at, w0, w1, w2, w3)

    @cuda.jit(device=True, forceinline=True)
    def row_place(lane):
        return place(uint32(lane & uint32(15)), uint32(lane >> uint32(4)))

    @cuda.jit(device=True, forceinline=True)
    def column_place(lane):
        """`mma` takes its words of x, and those of w, from registers in a row: so the halves of 8 columns come one
        after the other, but the first halves of 16 rows, then the second."""
        return place(uint32(uint32(lane & uint32(7)) + uint32(uint32(lane >> uint32(4)) << uint32(3))),
                     uint32(uint32(lane >> uint32(3)) & uint32(1)))

    @cuda.jit(device=True, forceinline=True)
    def load(words, at):
        words[0], words[1], words[2], words[3] = load_matrices(at)

    @cuda.jit(device=True, forceinline=True)
    def begin(bias, j):
        if converts and j == 0:
            return int32(0), int32(0), int32(0), int32(0)
        return bias[0], bias[1], bias[2], bias[3]

    @cuda.jit(device=True, forceinline=True)
    def multiply(dots, a, b, bias):
        for j in range(2):
            to, start = dots[j], begin(bias, j)
            to[0], to[1], to[2], to[3] = mma_s8_16x8x32((a[0], a[1], a[2], a[3]), (b[2 * j], b[2 * j + 1]), start)

    @cuda.jit(device=True, forceinline=True)
    def multiply_halves(dots, a, b, bias):
        for j in range(2):
            to, start = dots[j], begin(bias, j)
            to[0], to[1], to[2], to[3] = mma_s8_16x8x16((a[0], a[1]), (b[2 * j],), start)
            to[4], to[5], to[6], to[7] = mma_s8_16x8x16((a[2], a[3]), (b[2 * j + 1],), start)

    @cuda.jit(device=True, forceinline=True)
    def multiply_small(dots, a, b, bias):
        for j in range(2):
            for r in range(2):
                first = mma_s8_8x8x16((a[r],), (b[2 * j],), (bias[0], bias[1]))
                dots[j, 2 * r], dots[j, 2 * r + 1] = mma_s8_8x8x16((a[2 + r],), (b[2 * j + 1],), first)

    @cuda.jit(device=True, forceinline=True)
    def multiply_small_halves(dots, a, b, bias):
        for j in range(2):
            for h in range(2):
                for r in range(2):
                    dots[j, 4 * h + 2 * r], dots[j, 4 * h + 2 * r + 1] = mma_s8_8x8x16(
                        (a[2 * h + r],), (b[2 * j + h],), (bias[0], bias[1]))

    @cuda.jit(device=True, forceinline=True)
    def own_row(lane):
        return uint32(lane >> uint32(2))

    @cuda.jit(device=True, forceinline=True)
    def own_column(lane):
        return uint32(uint32(lane & uint32(3)) << uint32(1))

    product = (multiply_small_halves if is_small else multiply_halves) if two else \
        multiply_small if is_small else multiply
    return Form(BLOCK, copies, int32, (float32 if converts else unbias, unbias), 4, 8, 8, (3, 4, 0, 1, 2), (0, 3, 1, 2),
                place, store, row_place, column_place, load, product, own_row, own_column)


@cache
def form_of_halves(two):
    """Products of halves: from four of 8 rows x 8 columns x 4 of k at a time, which make 16 x 16 x 4."""
    @cuda.jit(device=True, forceinline=True)
    def place(row, half):
        """Of 16 halves: 8 of them, and the other 8 at this address ^ 16. Rows whose bit 1 or 3 differs have the eights
        in another order, and so in other banks."""
        swapped = uint32(uint32(half << uint32(1)) ^ uint32(
            uint32(uint32(row >> uint32(1)) & uint32(1)) | uint32(uint32(row >> uint32(2)) & uint32(2))))
        return uint64(uint32(uint32(row << uint32(6)) + uint32(swapped << uint32(4))))

    @cuda.jit(device=True, forceinline=True)
    def as_halves(word):
        """4 int8 -> two half2 words. The half 0x6400 + u is 1024 + u for a byte u, here 128 + the int8."""
        biased = uint32(word ^ uint32(0x80808080))
        return (hadd2(prmt(biased, uint32(0x64646464), uint32(0x4140)), uint32(0xE480E480)),
                hadd2(prmt(biased, uint32(0x64646464), uint32(0x4342)), uint32(0xE480E480)))

    @cuda.jit(device=True, forceinline=True)
    def store(at, w0, w1, w2, w3):
        h0, h1 = as_halves(w0)
        h2, h3 = as_halves(w1)
        store_shared4(at, h0, h1, h2, h3)
        h0, h1 = as_halves(w2)
        h2, h3 = as_halves(w3)
        store_shared4(at ^ uint64(16), h0, h1, h2, h3)

    @cuda.jit(device=True, forceinline=True)
    def within(lane):
        """The row of its product for which a lane has a, and the column for which it has b."""
        return uint32(uint32(lane & uint32(3)) + uint32(uint32(lane >> uint32(4)) << uint32(2)))

    @cuda.jit(device=True, forceinline=True)
    def row_place(lane):
        return place(uint32(within(lane) + uint32(uint32(lane & uint32(4)) << uint32(1))), uint32(0))

    @cuda.jit(device=True, forceinline=True)
    def column_place(lane):
        return place(uint32(within(lane) + uint32(lane & uint32(8))), uint32(0))

    @cuda.jit(device=True, forceinline=True)
    def load(words, at):
        for e in range(4):
            words[4 * e], words[4 * e + 1], words[4 * e + 2], words[4 * e + 3] = load_shared4(at ^ uint64(16 * e))

    @cuda.jit(device=True, forceinline=True)
    def multiply_part(dots, a, b, h, first, last):
        zero = float32(0.0)
        made = (zero, zero, zero, zero, zero, zero, zero, zero)
        for s in range(first, last):
            made = mma_f16_8x8x4((a[2 * s], a[2 * s + 1]), (b[2 * s], b[2 * s + 1]), made)
        for e in range(4):
            dots[0, 4 * h + e], dots[1, 4 * h + e] = made[e], made[4 + e]

    @cuda.jit(device=True, forceinline=True)
    def multiply(dots, a, b, bias):
        multiply_part(dots, a, b, 0, 0, 4 if two else 8)
        if two:
            multiply_part(dots, a, b, 1, 4, 8)

    @cuda.jit(device=True, forceinline=True)
    def own_row(lane):
        return uint32(uint32(uint32(lane & uint32(1)) + uint32(uint32(lane >> uint32(4)) << uint32(2)))
                      + uint32(uint32(lane & uint32(4)) << uint32(1)))

    @cuda.jit(device=True, forceinline=True)
    def own_column(lane):
        return uint32(uint32(lane & uint32(2)) + uint32(lane & uint32(8)))

    return Form(2 * BLOCK, False, float32, (float32, float32), 16, 2, 4, (1, 4, 0, 2, 3), (0, 2, 1, 3), place, store,
                row_place, column_place, load, multiply, own_row, own_column)


# Name -> (the oldest architecture for which it is, its Form for a format with one dot for a block or with two).
INSTRUCTIONS = {"m16n8k32 mixed": ((8, 6), partial(form_of_bytes, converts=True, copies=True)),
                "m16n8k32": ((8, 0), partial(form_of_bytes, copies=True)),
                "m8n8k16": ((7, 5), partial(form_of_bytes, is_small=True)), "m8n8k4": ((7, 0), form_of_halves)}


def adder(format, as_float, w_has_rows=False):
    """add_dots(acc, dots, w_scales, x_scales): adds the scaled dots of a lane to acc float32 [4]. The lane has two rows
    and two columns of dots: those of x and of w or, with `w_has_rows`, those of w and of x."""
    minima, integers, n_scales = format.minima, format.halves, format.n_scales
    first_minimum, apart = n_scales - minima, format.float_scales == 2

    @cuda.jit(device=True, forceinline=True)
    def add_dots(acc, dots, w_scales, x_scales):
        for i in range(2):
            for j in range(2):
                at, of_w, of_x = 2 * i + j, i if w_has_rows else j, j if w_has_rows else i
                total = as_float(dots[at])
                if integers:
                    total = cuda.fma(as_float(dots[4 + at]), word_as_float(w_scales[2, of_w]),
                                     total * word_as_float(w_scales[1, of_w]))
                acc[at] = cuda.fma(total, word_as_float(w_scales[0, of_w]) * x_scales[0, of_x], acc[at])
                if apart:
                    acc[at] = cuda.fma(as_float(dots[4 + at]), word_as_float(w_scales[1, of_w]) * x_scales[0, of_x],
                                       acc[at])
                for m in range(minima):
                    acc[at] = cuda.fma(word_as_float(w_scales[first_minimum + m, of_w]), x_scales[1 + m, of_x],
                                       acc[at])

    return add_dots


def launch_bounds(format, shape, instruction):
    """(threads of a block, blocks for which an SM has registers)."""
    less = two_dots(format) or INSTRUCTIONS[instruction][1](two_dots(format)).row_bytes > BLOCK
    return shape.threads, max(shape.resident - less, 1)


def tile_function(format, shape, instruction, row_of, skips=False):
    """multiply_tile(y, wq, wd, xq, xd, order, n_used, first_row, end, first_column, n, k, stride, add): a block of
    threads makes rows first_row .. end - 1 of y, at most as many as a tile of the Shape has, and the columns of a tile
    from first_column on. row_of(order, position, n_used): the row of x that row `position` of y takes.

    skips: each sixteen of rows without a row is left out, and a warp keeps its columns in registers, not its rows.
    """
    rows, columns, down, _, resident = shape
    threads, tile_rows, tile_columns, w_threads = shape.threads, shape.tile_rows, shape.tile_columns, shape.carriers
    each, n_scales, minima, raw_words = tile_columns // w_threads, format.n_scales, format.minima, format.raw_words
    assert each * w_threads == tile_columns and rows % 2 == 0 and threads % 64 == 0
    x_parts, carrying = max(2 * tile_rows // threads, 1), min(2 * tile_rows // 32, threads // 32)
    begin, fetch, w_is_halves = carriers(format, shape)
    form = INSTRUCTIONS[instruction][1](two_dots(format))
    row_bytes, copies, kind, as_float, words, row_step, column_step, row_bits, column_bits, place, store, row_place, \
        column_place, load, multiply, own_row, own_column = form
    scale_row, scale_column = permuted(row_bits), permuted(column_bits)
    add_first, add_second = (adder(format, each) for each in as_float)
    unpack, integers, load_book, n_dots = format.unpack, format.halves, format.load_book, 8 if two_dots(format) else 4
    per_row, half_bytes, pairs = 1 + minima, row_bytes // 2, columns // 2
    copies_w, buffers = copies and w_is_halves, 3 if copies else 2
    wait_for_all, makes_sums = wait_for_copies(0), copies and minima > 0
    wait = wait_for_copies(0 if minima else 1)      # the sums of a block are made in the round before its products
    xd_at, w_at = row_bytes * tile_rows, (row_bytes + 4 * per_row) * tile_rows
    wd_at = w_at + row_bytes * tile_columns
    buffer = wd_at + 4 * n_scales * tile_columns
    shared_words, is_partial = buffers * buffer // 4, carrying < threads // 32
    w_warps, w_is_partial = w_threads // 32, w_threads < threads
    scale_parts, scale_warps, x_is_partial = -(-tile_rows // threads), tile_rows // 32, tile_rows < threads
    # From the first 16 bytes of a thread's block of w to the second, in shared memory.
    step, flip = (row_bytes * w_threads // 2, 0) if w_is_halves else (0, half_bytes)

    @cuda.jit(device=True, forceinline=True)
    def tile_of(warp):
        """The first row and column of a warp in the tile of its block of threads."""
        return (uint32(uint32(warp % uint32(down)) * uint32(16 * rows)),
                uint32(uint32(warp // uint32(down)) * uint32(8 * columns)))

    @cuda.jit(device=True, forceinline=True)
    def put_columns(raw, to, scale_to, book):
        """Unpacks blocks of w, given as they lie in global memory, and stores their int8 and scales."""
        for i in range(each):
            w, scales = cuda.local.array(8, uint32), cuda.local.array(n_scales, uint32)
            unpack(w, scales, raw[i], book)
            if integers:
                scales[1] = float_as_word(float32(int32(scales[1])))
                scales[2] = float_as_word(float32(int32(scales[2])))
            if not copies_w:
                here = to + uint64(row_bytes * w_threads * i)
                store(here, w[0], w[1], w[2], w[3])
                store((here ^ uint64(flip)) + uint64(step), w[4], w[5], w[6], w[7])
            for s in range(n_scales):
                store_shared(scale_to + uint64(4 * (tile_columns * s + w_threads * i)), scales[s])

    @cuda.jit(device=True, forceinline=True)
    def put_rows(words, scales, to, scale_to):
        """Stores halves of blocks of x. The even lane of a pair stores the scale of the row; the odd lane, for formats
        with a minimum, scale * (sum of the block). For two minima each lane stores that of its half."""
        is_odd = (uint32(cuda.threadIdx.x) & uint32(1)) != uint32(0)
        for p in range(x_parts):
            store(to + uint64(row_bytes * threads // 2 * p), words[p, 0], words[p, 1], words[p, 2], words[p, 3])
            scale, here = scales[p], scale_to + uint64(2 * threads * p)
            if minima:
                total = int32(0)
                for i in range(4):
                    total = word_sum(words[p, i], total)
            if minima == 1:
                total = int32(total + cuda.shfl_xor_sync(0xFFFFFFFF, total, 1))
                if is_odd:
                    scale = scale * float32(total)
            if minima == 2:
                store_shared(here + uint64(4 * tile_rows), float_as_word(scale * float32(total)))
            if minima == 1 or not is_odd:
                store_shared(here, float_as_word(scale))

    @cuda.jit(device=True, forceinline=True)
    def fetch_rows(words, scales, xq, xd, x_from, b):
        for p in range(x_parts):
            words[p, 0], words[p, 1], words[p, 2], words[p, 3] = load_words4(
                xq, uint32(x_from[p] + uint32(b << uint32(5))))
            scales[p] = xd[uint32(uint32(x_from[p] >> uint32(5)) + b)]

    @cuda.jit(device=True, forceinline=True)
    def copy_columns(to, wq, starts, b):
        source = global_address(wq) + uint64(uint32(b << uint32(5)))
        for i in range(each):
            for j in range(2):
                here = to + uint64(row_bytes * w_threads * i + step * j)
                start_copy4(here, source + uint64(starts[i, j]))

    @cuda.jit(device=True, forceinline=True)
    def copy_rows(to, xq, x_from, b):
        source = global_address(xq) + uint64(uint32(b << uint32(5)))
        for p in range(x_parts):
            start_copy4(to + uint64(row_bytes * threads // 2 * p), source + uint64(x_from[p]))

    @cuda.jit(device=True, forceinline=True)
    def copy_scales(to, xd, xd_from, b):
        source = global_address(xd) + uint64(uint32(b << uint32(2)))
        for p in range(scale_parts):
            start_copy(to + uint64(4 * threads * p), source + uint64(xd_from[p]))

    @cuda.jit(device=True, forceinline=True)
    def put_sums(row_at, scale_at):
        """Of rows of x that have come by copies, as `put_rows`."""
        for p in range(scale_parts):
            at, to = row_at + uint64(row_bytes * threads * p), scale_at + uint64(4 * threads * p)
            scale = word_as_float(load_shared(to))
            total = int32(0)
            for h in range(2):
                w0, w1, w2, w3 = load_shared4(at ^ uint64(half_bytes * h))
                total = word_sum(w3, word_sum(w2, word_sum(w1, word_sum(w0, total))))
                if minima == 2 or h == 1:
                    to = to + uint64(4 * tile_rows)
                    store_shared(to, float_as_word(scale * float32(total)))
                    total = int32(0)

    # What a thread does to bring a block of k from global to shared memory, in three parts, of which each form needs
    # two or all. held: raw, x_words, x_scales; to: where the thread stores them; sources: the arrays; places: where its
    # blocks start in them (multiply_tile).

    @cuda.jit(device=True, forceinline=True)
    def fetch_block(held, sources, places, blocks, b, warp):
        """Loads to registers what passes through them."""
        (raw, x_words, x_scales), (wq, wd, xq, xd), (starts, x_from, _) = held, sources, places
        if not w_is_partial or warp < uint32(w_warps):
            fetch(raw, wq, wd, starts, blocks, b)
        if not copies and (not is_partial or warp < uint32(carrying)):
            fetch_rows(x_words, x_scales, xq, xd, x_from, b)

    @cuda.jit(device=True, forceinline=True)
    def store_block(held, to, filling, book, warp):
        """Stores what `fetch_block` has loaded."""
        (raw, x_words, x_scales), (x_to, xd_to, w_to, wd_to) = held, to
        if not w_is_partial or warp < uint32(w_warps):
            put_columns(raw, w_to + filling, wd_to + filling, book)
        if not copies and (not is_partial or warp < uint32(carrying)):
            put_rows(x_words, x_scales, x_to + filling, xd_to + filling)

    @cuda.jit(device=True, forceinline=True)
    def copy_block(to, sources, places, filling, b, warp):
        """Starts the copies of what passes no register, as one group."""
        (x_to, xd_to, w_to, _), (wq, _, xq, xd), (starts, x_from, xd_from) = to, sources, places
        if copies_w and (not w_is_partial or warp < uint32(w_warps)):
            copy_columns(w_to + filling, wq, starts, b)
        if copies and (not is_partial or warp < uint32(carrying)):
            copy_rows(x_to + filling, xq, x_from, b)
        if copies and (not x_is_partial or warp < uint32(scale_warps)):
            copy_scales(xd_to + filling, xd, xd_from, b)
        if copies:
            commit_copies()

    @cuda.jit(device=True, forceinline=True)
    def load_rows(a, x_scales, x_at, xd_here):
        """Loads a warp's rows of a block of k, and their scales, from shared memory."""
        for r in range(rows):
            load(a[r], x_at + uint64(16 * row_bytes * r))
        for r in range(0, rows, 2):
            for p in range(per_row):
                four = load_shared4(xd_here + uint64(4 * (tile_rows * p + 16 * r)))
                for i in range(2):
                    x_scales[r, p, i], x_scales[r + 1, p, i] = word_as_float(four[i]), word_as_float(four[2 + i])

    @cuda.jit(device=True, forceinline=True)
    def multiply_columns(acc, first, end, bias, a, x_scales, w_at, wd_here):
        """acc += the products of a warp's rows with its columns first .. end - 1, in eights."""
        for c in range(first, end, 2):
            b, w_scales = cuda.local.array(words, uint32), cuda.local.array((2, n_scales, 2), uint32)
            load(b, w_at + uint64(8 * row_bytes * c))
            for s in range(n_scales):
                w_scales[0, s, 0], w_scales[0, s, 1], w_scales[1, s, 0], w_scales[1, s, 1] = load_shared4(
                    wd_here + uint64(4 * (tile_columns * s + 8 * c)))
            dots = cuda.local.array((2, n_dots), kind)
            for r in range(rows):
                multiply(dots, a[r], b, bias)
                add_first(acc[r, c], dots[0], w_scales[0], x_scales[r])
                add_second(acc[r, c + 1], dots[1], w_scales[1], x_scales[r])

    @cuda.jit(device=True, forceinline=True)
    def load_sixteen(a, x_scales, r, x_at, xd_here):
        """Loads 16 rows of a block of x, and their scales."""
        load(a, x_at + uint64(16 * row_bytes * r))
        for p in range(per_row):
            first, second = load_shared2(xd_here + uint64(4 * (tile_rows * p + 32 * (r >> 1) + 2 * (r & 1))))
            x_scales[p, 0], x_scales[p, 1] = word_as_float(first), word_as_float(second)

    @cuda.jit(device=True, forceinline=True)
    def multiply_some(acc, first, end, sixteens, bias, a, x_scales, b, w_scales, x_at, xd_here):
        """Multiplies sixteens first .. end - 1 of rows, if they have rows, and loads the next one beforehand."""
        for r in range(first, end):
            if uint32(r) < sixteens:
                if r + 1 < rows:
                    load_sixteen(a[(r + 1) & 1], x_scales[(r + 1) & 1], r + 1, x_at, xd_here)
                dots = cuda.local.array((2, n_dots), kind)
                for c in range(pairs):
                    multiply(dots, a[r & 1], b[c], bias)
                    add_first(acc[r, 2 * c], dots[0], w_scales[c, 0], x_scales[r & 1])
                    add_second(acc[r, 2 * c + 1], dots[1], w_scales[c, 1], x_scales[r & 1])

    @cuda.jit(device=True, forceinline=True)
    def multiply_sixteens(acc, sixteens, bias, x_at, w_at, xd_here, wd_here):
        """acc += one block of k, for so many sixteens of rows."""
        a, x_scales = cuda.local.array((2, words), uint32), cuda.local.array((2, per_row, 2), float32)
        b, w_scales = cuda.local.array((pairs, words), uint32), cuda.local.array((pairs, 2, n_scales, 2), uint32)
        load_sixteen(a[0], x_scales[0], 0, x_at, xd_here)
        for c in range(pairs):
            load(b[c], w_at + uint64(16 * row_bytes * c))
            for s in range(n_scales):
                w_scales[c, 0, s, 0], w_scales[c, 0, s, 1], w_scales[c, 1, s, 0], w_scales[c, 1, s, 1] = load_shared4(
                    wd_here + uint64(4 * (tile_columns * s + 16 * c)))
        half = rows // 2            # one loop would not be unrolled
        multiply_some(acc, 0, half, sixteens, bias, a, x_scales, b, w_scales, x_at, xd_here)
        multiply_some(acc, half, rows, sixteens, bias, a, x_scales, b, w_scales, x_at, xd_here)

    @cuda.jit(device=True, forceinline=True)
    def multiply_tile(y, wq, wd, xq, xd, order, n_used, first_row, end, first_column, n, k, stride, add):
        lane, warp = uint32(cuda.threadIdx.x), warp_number()
        thread = uint32(uint32(warp << uint32(5)) + lane)
        blocks = uint32(k >> uint32(5))
        last = uint32(blocks - uint32(1))

        # What this thread carries from global to shared memory.
        starts, raw = cuda.local.array((each, 3), uint32), cuda.local.array((each, raw_words), uint32)
        begin(starts, first_column, uint32(n - uint32(1)), thread, blocks)
        x_from = cuda.local.array(x_parts, uint32)
        x_words, x_scales = cuda.local.array((x_parts, 4), uint32), cuda.local.array(x_parts, float32)
        for p in range(x_parts):
            row = row_of(order, min(uint32(first_row + uint32(p * threads // 2) + uint32(thread >> uint32(1))),
                                    uint32(end - uint32(1))), n_used)
            x_from[p] = uint32(uint32(row * k) + uint32(uint32(thread & uint32(1)) << uint32(4)))
        xd_from = cuda.local.array(scale_parts, uint32)
        for p in range(scale_parts):
            row = row_of(order, min(uint32(first_row + uint32(p * threads) + thread), uint32(end - uint32(1))), n_used)
            xd_from[p] = uint32(uint32(row * blocks) << uint32(2))

        # Addresses in shared memory, in the first buffer: where the thread stores, and where the lane reads.
        start = shared_address(cuda.shared.array(shared_words, uint32, alignment=128))
        pair, odd = uint32(thread >> uint32(1)), uint32(thread & uint32(1))
        x_to = opaque_address(start + place(pair, odd))
        w_to = x_to + uint64(w_at)
        if not w_is_halves:
            w_to = opaque_address(start + place(thread, uint32(0)) + uint64(w_at))
        row_at = w_to - uint64(w_at)    # of row `thread` of x, where w does not come by halves
        wd_to = opaque_address(start + uint64(wd_at) + uint64(uint32(scale_column(thread) << uint32(2))))
        if copies:
            xd_to = opaque_address(start + uint64(xd_at) + uint64(uint32(scale_row(thread) << uint32(2))))
        else:
            xd_to = opaque_address(start + uint64(xd_at) + uint64(uint32(scale_row(pair) << uint32(2))) + uint64(
                uint32(odd * uint32(4 * tile_rows))))
        warp_row, warp_column = tile_of(warp)
        of_warp = uint32(first_row + warp_row)
        sixteens = uniform(uint32(uint32(max(end, of_warp) - of_warp + uint32(15)) >> uint32(4)))
        x_here = opaque_address(start + row_place(lane) + uint64(uint32(warp_row * uint32(row_bytes))))
        w_here = opaque_address(start + column_place(lane) + uint64(w_at) + uint64(
            uint32(warp_column * uint32(row_bytes))))
        xd_here = opaque_address(start + uint64(xd_at) + uint64(
            uint32(uint32(warp_row + scale_row(own_row(lane))) << uint32(2))))
        wd_here = opaque_address(start + uint64(wd_at) + uint64(
            uint32(uint32(warp_column + scale_column(own_column(lane))) << uint32(2))))

        acc = cuda.local.array((rows, columns, 4), float32)
        for r in range(rows):
            for c in range(columns):
                for i in range(4):
                    acc[r, c, i] = float32(0.0)
        bias = cuda.local.array(4, int32)
        for i in range(4):      # k is a multiple of 32, so it adds nothing
            bias[i] = int32(uint32(BIAS_WORD) | uint32(k & uint32(1 << i)))
            if skips:           # the assembler would make it anew behind each branch
                bias[i] = int32(uniform(uint32(bias[i])))
        book = load_book(thread, uint32(threads))
        held, to = (raw, x_words, x_scales), (x_to, xd_to, w_to, wd_to)
        sources, places = (wq, wd, xq, xd), (starts, x_from, xd_from)
        filling, block = uint64(0), uint32(0)
        for _ in range(buffers - 1):
            b = min(block, last)
            fetch_block(held, sources, places, blocks, b, warp)
            copy_block(to, sources, places, filling, b, warp)
            store_block(held, to, filling, book, warp)
            filling, block = filling + uint64(buffer), uint32(block + uint32(1))
        b = min(block, last)
        fetch_block(held, sources, places, blocks, b, warp)
        if makes_sums:
            wait()
            cuda.syncthreads()
            if not x_is_partial or warp < uint32(scale_warps):
                put_sums(row_at, xd_to)

        a, row_scales = cuda.local.array((rows, words), uint32), cuda.local.array((rows, per_row, 2), float32)
        now, following, done = uint64(0), uint64(buffer), uint32(0)
        while done < blocks:
            if copies:
                wait()
            cuda.syncthreads()
            if makes_sums and (not x_is_partial or warp < uint32(scale_warps)):
                put_sums(row_at + following, xd_to + following)
            if not skips:
                load_rows(a, row_scales, x_here + now, xd_here + now)
                multiply_columns(acc, 0, columns // 2, bias, a, row_scales, w_here + now, wd_here + now)
            copy_block(to, sources, places, filling, b, warp)
            store_block(held, to, filling, book, warp)
            block = uint32(block + uint32(1))
            b = min(block, last)
            fetch_block(held, sources, places, blocks, b, warp)
            cuda.syncwarp()
            if skips:
                multiply_sixteens(acc, sixteens, bias, x_here + now, w_here + now, xd_here + now, wd_here + now)
            else:
                multiply_columns(acc, columns // 2, columns, bias, a, row_scales, w_here + now, wd_here + now)
            if copies:
                now, following, filling = following, filling, now
            else:
                now, filling = filling, now
            done = uint32(done + uint32(1))
        if copies:
            wait_for_all()

        warp_row, warp_column = tile_of(uint32(cuda.threadIdx.y))   # once more, so that they wait in no registers
        first_row = uint32(first_row + uint32(warp_row + own_row(lane)))
        first_column = uint32(first_column + uint32(warp_column + own_column(lane)))
        for i in range(2 * rows):
            row = uint32(first_row + uint32(16 * (i >> 1) + row_step * (i & 1)))
            for j in range(2 * columns):
                column = uint32(first_column + uint32(16 * (j >> 2) + column_step * ((j >> 1) & 1) + (j & 1)))
                at = uint32(row * stride + column)
                if row < end and column < n:
                    total = acc[i >> 1, j >> 1, 2 * (i & 1) + (j & 1)]
                    y[at] = y[at] + total if add else total

    return multiply_tile


@cuda.jit(device=True, forceinline=True)
def same_row(_, position, __):
    return position


def tensor_kernel(format, shape, instruction):
    """The kernel for a weight format, a Shape and a key of INSTRUCTIONS."""
    multiply_tile = tile_function(format, shape, instruction, same_row)
    tile_rows, tile_columns = shape.tile_rows, shape.tile_columns

    @cuda.jit(launch_bounds=launch_bounds(format, shape, instruction))
    def gemm_tensor_kernel(y, wq, wd, xq, xd, n, k, n_rows, stride, add):
        first_row, first_column = uint32(cuda.blockIdx.x * uint32(tile_rows)), uint32(
            cuda.blockIdx.y * uint32(tile_columns))
        multiply_tile(y, wq, wd, xq, xd, xd, k, first_row, n_rows, first_column, n, k, stride, add)

    return gemm_tensor_kernel


SHAPES = {"128 x 128": Shape(4, 8, 2, 2, 2), "128 x 128 of 8 warps": Shape(2, 8, 4, 2, 2),
          "64 x 128": Shape(2, 8, 2, 2, 3), "32 x 128": Shape(2, 4, 1, 4, 4)}
SMALLEST = SHAPES["32 x 128"]

# Shapes -> (the time of a block of threads that has an SM for itself, the time that each further block adds), per
# weight of a row and in the unit of q8_gemm.block_time. Measured on an H100, Q8_0. The tile of 8 warps was measured
# with an earlier loop alone: its times are those of 4 warps, longer in the same proportion as then.
TIMES = {SHAPES["128 x 128"]: (19.6, 12.7), SHAPES["128 x 128 of 8 warps"]: (20.5, 13.8),
         SHAPES["64 x 128"]: (12.3, 8.1), SHAPES["32 x 128"]: (7.6, 5.8)}


def shapes_of(instruction):
    """The keys of SHAPES for a key of INSTRUCTIONS. A warp of 64 x 64 has no registers left for what it carries; so it
    needs copies."""
    copies = INSTRUCTIONS[instruction][1](False).copies
    return [name for name in SHAPES if name != ("128 x 128 of 8 warps" if copies else "128 x 128")]


def tile_work(card, n, rows, shape):
    """The time that the blocks of threads of a product take of each SM."""
    return block_count(n, rows, shape) / card.n_sms * TIMES[shape][1]


def tile_time(card, n, rows, shape):
    """The time of a product that runs alone: that of the SM with the most blocks."""
    alone, further = TIMES[shape]
    return alone + (-(-block_count(n, rows, shape) // card.n_sms) - 1) * further


def block_count(n, rows, shape):
    """Blocks of threads of a product."""
    return -(-n // shape.tile_columns) * -(-rows // shape.tile_rows)


def shape_for(card, n, rows, format, concurrent=False):
    """The Shape with which a product takes the least time. format: that of the weights. concurrent: other kernels run
    at the same time and use the SMs that this product leaves idle, so that only the work of its blocks counts.

    The emulated card has one Shape, unless it is like another card: compiling a kernel for it takes long, and its
    processors are never partly idle.
    """
    if card.kind == "emulated" and not getattr(card, "like", None):
        return SMALLEST
    time = tile_work if concurrent else tile_time
    shapes = [SHAPES[name] for name in shapes_of(instruction_of(card))]
    return min(shapes, key=lambda shape: time(card, n, rows, shape))


def relative_time(card, n, k, micro_batches, format=FORMATS["Q8_0"]):
    """The time of a product over all micro-batches of a prompt, as q8_gemm.relative_time, and in the same unit."""
    if len(micro_batches) == 1:
        rows, = micro_batches
        return k * tile_time(card, n, rows, shape_for(card, n, rows, format))
    shapes = [shape_for(card, n, rows, format, concurrent=True) for rows in micro_batches]
    alone, further = TIMES[shapes[-1]]
    return k * (sum(tile_work(card, n, *each) for each in zip(micro_batches, shapes)) + alone - further)


@cache
def tensor(format, shape, instruction):
    """The kernel of a format for a Shape and a key of INSTRUCTIONS."""
    return tensor_kernel(format, shape, instruction)


def instruction_of(card):
    """The key of INSTRUCTIONS for a card, or None. The emulated card has all."""
    return next((name for name, (oldest, _) in INSTRUCTIONS.items()
                 if card.kind == "emulated" or card.cc >= oldest), None)


def gemm(card, y, stride, w, x, rows, add=False, *, stream=None, concurrent=False, shape=None, instruction=None):
    """y <- (y +) x . w^T, as `gemm` of kernels/q8_gemm.py.

    concurrent: as in `shape_for`, which chooses the Shape where `shape` is None. instruction: one of INSTRUCTIONS; None
    takes that of the card."""
    format, instruction = FORMATS[w.format], instruction or instruction_of(card)
    shape = shape or shape_for(card, w.n, rows, format, concurrent)
    grid = (-(-rows // shape.tile_rows), -(-w.n // shape.tile_columns))
    arrays = y.reshape(-1), w.values.reshape(-1), as_words(w.scales), *x.flat
    block = 32, shape.down * shape.across
    card.launch(tensor(format, shape, instruction), grid, block, *arrays, w.n, w.k, rows, stride, add, stream=stream)


# ---- check and time ----------------------------------------------------------------------------------------

TIMED = [(12288, 4096, 4096), (24576, 4096, 1160), (4096, 4096, 4096), (4096, 4096, 297)]      # n, k, rows


def check(card, n, k, rows, add=False, shape=None, format=FORMATS["Q8_0"], instruction=None):
    """Multiplies random matrices as q8_gemm.check does, and compares the bits with those of kernels/q8_gemm.py."""
    def both(card, y, *rest):
        q8_gemm.gemm(card, others := card.upload(card.download(y)), *rest)
        gemm(card, y, *rest, shape=shape, instruction=instruction)
        np.testing.assert_array_equal(card.download(y).view(np.uint32), card.download(others).view(np.uint32))
    return q8_gemm.check(card, n, k, rows, add, both, format)


def cases(card):
    """The checks of all shapes, then their times beside those of dp4a."""
    for name, shape in SHAPES.items():
        for case in q8_gemm.CASES:
            yield Case("{} x {}, {} rows, ".format(*case) + name, partial(check, card, *case, shape=shape))
    for size in [(512, 512, 64)] if card.kind == "emulated" else TIMED:
        for name, shape in SHAPES.items():
            yield timed(card, name, partial(gemm, shape=shape), FORMATS["Q8_0"], *size)
        yield timed(card, "dp4a", q8_gemm.gemm, FORMATS["Q8_0"], *size)


def timed(card, name, multiply, format, n, k, rows):
    rng = np.random.default_rng(0)
    w = Matrix(format.name, n, k, *on_card(card, format, random_raw(rng, format, n, k), n, k))
    x = Quantized(*map(card.upload, random_activations(rng, rows, k)))
    y = card.alloc((rows, n), np.float32)
    return Case(f"{name}, {n} x {k}, {rows} rows", launch=partial(multiply, card, y, n, w, x, rows),
                n_bytes=sum(a.nbytes for a in (w.values, w.scales, *x, y)), n_ops=2 * n * k * rows, pipe="dp4a")


if __name__ == "__main__":
    main("Matrix x matrix on tensor cores", cases)
