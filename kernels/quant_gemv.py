"""Matrix x vector for decoding with the packed formats of kernels/formats: how a warp reads them.

    y[c, n] = sum over blocks b of 32:  as in kernels/formats, "A block adds this"          (+ y[c, n] with `add`)

The kernels are those of kernels/q8_gemv.py. `decoder` tells them what they need to know of a format. A tile of a warp
is 32 blocks of a row (1,024 weights), a whole block for each lane.

        lane           0         1      ...    31
        low bits    16 bytes  16 bytes  ... 16 bytes       of the row's first plane
        upper bits   4 or 8    4 or 8   ...  4 or 8        of its second plane, where codes have 5 or 6 bits
        scales       2 bytes   2 bytes  ...  2 bytes       and d, dmin: the same word for eight lanes
        x           32 bytes  32 bytes  ... 32 bytes       of each column; a single column lies in shared memory in
                                                           planes, so that neighbours read 16 bytes side by side

The last blocks of a row may be fewer than 32; the last lanes are idle then. The order of additions is that of Q8_0. A
lane has the chain of its number:

    chain:  acc = fma(float(dot), ws * xd, acc); with a minimum, acc = fma(-minimum, xd * sum, acc)   block by block

The sum of a block of x takes 8 dp4a with 0x01010101, which serve all rows of a warp; of a single column it is computed
once for all warps. A warp unpacks two rows at once: more would not leave registers for the columns.

Pipe: integer (dp4a and the unpacking, both 64 lanes per SM on Volta), but memory is the bound. A block of 32 weights
takes 8 dp4a and 2 or 3 float operations for each column. Unpacking it, once for all columns, takes 12 operations for 4
bits, 28 for 5 and 6 bits and 36 for a table; its scales take about 8. A block of Q4_K has 18.5 bytes: at full bandwidth
a CMP 100-210 has time for 170 lane operations per block, and an H200 for 67, of which one column takes about 40.

Measurements and what was tried: benchmarks/results.md, section quant_gemv.
"""

from functools import cache, partial

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint32

from kernels import q8_gemv
from kernels.bench import Case, main
from kernels.formats import BLOCK, FORMATS, on_card, product_reference, random_raw
from kernels.intrinsics import BIAS_WORD, dp4a, load_words4, unbias, word_as_float, word_sum
from kernels.operands import Matrix, Quantized
from kernels.q8_gemv import PLANE, Q8, SUMS, TILE, Decoder, gemv, random_activations

PAIR = 2  # rows that are unpacked at once


# How a lane loads its block of x (8 words): from rows, as the quantisation leaves them, or from planes.

@cuda.jit(device=True, forceinline=True)
def row_block(x, xq, at):
    x[0], x[1], x[2], x[3] = load_words4(xq, uint32(at << uint32(5)))
    x[4], x[5], x[6], x[7] = load_words4(xq, uint32(uint32(at << uint32(5)) + uint32(16)))


@cuda.jit(device=True, forceinline=True)
def plane_block(x, xq, at):
    x[0], x[1], x[2], x[3] = load_words4(xq, uint32(at << uint32(4)))
    x[4], x[5], x[6], x[7] = load_words4(xq, uint32(uint32(at << uint32(4)) + uint32(PLANE)))


def sums_function(minima, planes):
    """sums(x_sums, x, x_scale, xd, at): the scale times the sum of the integers, of the block or of each of its halves,
    as many as it has minima."""
    @cuda.jit(device=True, forceinline=True)
    def computed(x_sums, x, x_scale, xd, at):
        for h in range(minima):
            total = int32(0)
            for i in range(8 // minima):
                total = word_sum(x[8 // minima * h + i], total)
            x_sums[h] = x_scale * float32(total)

    @cuda.jit(device=True, forceinline=True)
    def stored(x_sums, x, x_scale, xd, at):
        x_sums[0] = xd[uint32(at + uint32(SUMS))]

    return stored if planes and minima == 1 else computed


def add_function(format):
    """add(acc, w, scales, x, x_scale, x_sums): acc with the terms of a block, in the order of kernels/formats."""
    first_minimum, minima = format.n_scales - format.minima, format.minima

    @cuda.jit(device=True, forceinline=True)
    def add_whole(acc, w, scales, x, x_scale):
        total = int32(BIAS_WORD)
        for i in range(8):
            total = dp4a(w[i], x[i], total)
        return cuda.fma(unbias(total), word_as_float(scales[0]) * x_scale, acc)

    @cuda.jit(device=True, forceinline=True)
    def add_scaled_halves(acc, w, scales, x, x_scale):
        first, second = int32(0), int32(0)
        for i in range(4):
            first = dp4a(w[i], x[i], first)
            second = dp4a(w[4 + i], x[4 + i], second)
        total = int32(int32(first * int32(scales[1])) + int32(second * int32(scales[2])))
        return cuda.fma(float32(total), word_as_float(scales[0]) * x_scale, acc)

    @cuda.jit(device=True, forceinline=True)
    def add_each_half(acc, w, scales, x, x_scale):
        for h in range(2):
            total = int32(BIAS_WORD)
            for i in range(4):
                total = dp4a(w[4 * h + i], x[4 * h + i], total)
            acc = cuda.fma(unbias(total), word_as_float(scales[h]) * x_scale, acc)
        return acc

    add_dots = add_scaled_halves if format.halves else add_each_half if format.float_scales == 2 else add_whole

    @cuda.jit(device=True, forceinline=True)
    def add(acc, w, scales, x, x_scale, x_sums):
        acc = add_dots(acc, w, scales, x, x_scale)
        for m in range(minima):
            acc = cuda.fma(word_as_float(scales[first_minimum + m]), x_sums[m], acc)
        return acc

    return add


def multiply_function(format):
    """The `multiply` of a Decoder (kernels/q8_gemv.py)."""
    unpack, add, minima, n_scales = format.unpack, add_function(format), format.minima, format.n_scales

    def multiply(rows, columns, planes, whole):
        each = min(rows, PAIR)
        w_shape, scales_shape, sums_shape = (each, 8), (each, n_scales), max(minima, 1)
        load_block, block_sums = plane_block if planes else row_block, sums_function(minima, planes)

        @cuda.jit(device=True, forceinline=True)
        def multiply(acc, raw, piece, block, k, lane, x_starts, xq, xd, book):
            w, scales = cuda.local.array(w_shape, uint32), cuda.local.array(scales_shape, uint32)
            x, x_sums = cuda.local.array(8, uint32), cuda.local.array(sums_shape, float32)
            if not whole and uint32(block + lane) >= uint32(k >> uint32(5)):
                return
            for first in range(0, rows, each):
                for r in range(each):
                    unpack(w[r], scales[r], raw[piece + first + r], book)
                for c in range(columns):
                    at = uint32(x_starts[c] + block + lane)
                    load_block(x, xq, at)
                    x_scale = xd[at]
                    if minima:
                        block_sums(x_sums, x, x_scale, xd, at)
                    for r in range(each):
                        acc[first + r, c] = add(acc[first + r, c], w[r], scales[r], x, x_scale, x_sums)

        return multiply

    return multiply


@cuda.jit(device=True, forceinline=True)
def own_place(lane):
    return lane


@cache
def decoder(format):
    """A format of kernels/formats as the kernels of kernels/q8_gemv.py know it."""
    if format.bits == 8:
        return Q8
    starts, load = format.starts, format.stream
    raw_words, multiply = format.raw_words, multiply_function(format)

    def fetch(whole):
        @cuda.jit(device=True, forceinline=True)
        def fetch(raw, piece, row, block, k, lane, wq, wd):
            blocks, at = uint32(k >> uint32(5)), uint32(block + lane)
            if whole or at < blocks:
                q_from, d_from = starts(row, blocks)
                load(raw[piece], wq, wd, q_from, d_from, blocks, at)

        return fetch

    def narrow(rows):
        fetch_half, multiply_tiles = fetch(True), multiply(rows, 1, False, True)
        k = uint32(TILE // 2 * BLOCK)

        @cuda.jit(device=True, forceinline=True)
        def fetch_two(raw, piece, row, lane, wq, wd):
            its_row = uint32(row + uint32(lane >> uint32(4)))
            fetch_half(raw, piece, its_row, uint32(0), k, uint32(lane & uint32(15)), wq, wd)

        @cuda.jit(device=True, forceinline=True)
        def multiply_two(acc, raw, lane, x_starts, xq, xd, book):
            multiply_tiles(acc, raw, 0, uint32(0), k, uint32(lane & uint32(15)), x_starts, xq, xd, book)

        return fetch_two, multiply_two

    def rest(rows, columns, planes):
        fetch_last, multiply_last, raw_shape = fetch(True), multiply(rows, columns, planes, True), (rows, raw_words)

        @cuda.jit(device=True, forceinline=True)
        def rest(acc, w_rows, block, k, lane, wq, wd, x_starts, xq, xd, book):
            if uint32(block + lane) < uint32(k >> uint32(5)):
                raw = cuda.local.array(raw_shape, uint32)
                for r in range(rows):
                    fetch_last(raw, r, w_rows[r], block, k, lane, wq, wd)
                multiply_last(acc, raw, 0, block, k, lane, x_starts, xq, xd, book)

        return rest

    return Decoder(True, raw_words, 1, format.table, own_place, (1, 2, 4, 8, 16), fetch, multiply, narrow,
                   rest, format.load_book)


def decoder_of(w):
    """How decode kernels read the format of w, a quantised Matrix or Experts."""
    return decoder(FORMATS[w.format])


# ---- check and time ----------------------------------------------------------------------------------------

# n, k, columns; k in whole blocks of every format
CASES = [(1, 256, 1), (5, 3328, 2), (33, 1024, 3), (700, 1792, 8)]


def check(card, format, n, k, columns, add=False):
    """Multiplies random matrices and returns the largest error as a fraction of what rounding may do: the chain of a
    lane, six additions of the tree, the products of scales and the addition to y, 2**-24 of the sum of magnitudes
    each."""
    rng = np.random.default_rng((n, k, columns))
    raw, (xq, xd) = random_raw(rng, format, n, k), random_activations(rng, columns, k)
    before = rng.standard_normal((columns, n), np.float32)
    y = card.alloc((columns + 1, n + 3), np.float32)      # numbers before and behind, and a column too many
    card.poison(y)
    if add:
        card.copy_in(y[:columns], np.pad(before, ((0, 0), (1, 2)), constant_values=np.nan))
    w, x = Matrix(format.name, n, k, *on_card(card, format, raw, n, k)), Quantized(card.upload(xq), card.upload(xd))
    gemv(card, decoder(format), y.reshape(-1)[1:], n + 3, w, x, columns, add)
    y = card.download(y)
    got = y[:columns, 1:n + 1].copy()
    y[:columns, 1:n + 1] = np.nan
    assert np.isnan(y).all(), "wrote elsewhere"
    want, magnitude = product_reference(format, raw, xq, xd)
    bound = (-(-k // (32 * TILE)) * format.terms_per_block + 9) * 2.0**-24 * (magnitude + abs(before) * add)
    error = (abs(got - (want + before * add)) / bound).max()
    assert error <= 1
    return error


def check_fused(card, format, n, k):
    """`check_fused` of kernels/q8_gemv.py for one column; n a multiple of 32."""
    raw = random_raw(np.random.default_rng(n), format, 2 * n, k)
    w = Matrix(format.name, 2 * n, k, *on_card(card, format, raw, 2 * n, k))
    return q8_gemv.check_fused(card, n, k, 1, decoder(format), w)


PACKED = [format for format in FORMATS.values() if format.bits < 8]
TIMED = [(1024, 1024, 1), (4096, 4096, 1), (65536, 5120, 1), (4096, 4096, 8)]


def cases(card):
    """The checks, then times; the largest matrix is beyond every cache."""
    for format in PACKED:
        for case in CASES:
            yield Case("{} x {}, {} columns, ".format(*case) + format.name, partial(check, card, format, *case))
        yield Case(f"fused: {format.name}", partial(check_fused, card, format, 96, 1792))
    for format in PACKED:
        for n, k, columns in TIMED:
            w = Matrix(format.name, n, k, *(card.zeros(*array) for array in format.arrays(n, k)))
            x = Quantized(card.zeros((columns, k), np.int8), card.zeros((columns, k // BLOCK), np.float32))
            y = card.alloc((columns, n), np.float32)
            yield Case(f"{format.name} {n} x {k}, {columns} columns",
                       launch=partial(gemv, card, decoder(format), y, n, w, x, columns),
                       n_bytes=sum(a.nbytes for a in (w.values, w.scales, *x, y)), n_ops=2 * n * k * columns,
                       pipe="dp4a")


if __name__ == "__main__":
    main("Packed matrix x vectors", cases)
