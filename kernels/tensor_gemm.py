"""Matrix x matrix products for prompts on tensor cores: the same bits as kernels/q8_gemm.py, from another pipe.

    y[r, n] = acc;    for blocks b of 32, increasing:
                          acc = fma(float(dot(wq[n, b], xq[r, b])), wd[n, b] * xd[r, b], acc)

Operands, formats, shapes and the float chain are those of kernels/q8_gemm.py. Its dot is an exact int32, in whatever
way it is made: there by 8 dp4a, here by an `mma`. So each number of y has the same bits.

A warp makes a tile of y from products of 16 rows x 8 columns x 32 of k. Lane 4 g + t then has dots of rows g and g + 8
and of columns 2 t and 2 t + 1 (kernels/intrinsics.py), and scales them. A block of threads has several warps, one below
the other and side by side. It brings each block of k from global to shared memory, in two buffers: while one is
multiplied, the other is filled, and the block after that is on its way from global memory to registers.

    shared memory       x  [rows of the tile][32] bytes, then [1 to 3][rows] words: scales, scale * sum
                        w  [columns of the tile][32] bytes, then [1 to 4][columns] words: their scales

  * The order of k within a block is free if it is the same for x and w. So lane 4 g + t takes bytes 8 t to 8 t + 7 of
    row g, in one load, where `mma` has bytes 4 t to 4 t + 3 and 16 + 4 t to 16 + 4 t + 3. Where a format has two dots
    for a block, one for each half, the lane takes a word of each half.
  * Of every other 4 rows the halves of 16 bytes have changed places. So the 4 lanes of each of 8 rows use different
    banks in all of these loads, and so do 8 threads that each store 16 bytes of their own row.

Pipe: tensor; but per block 3 float32 operations for each number of y share the issue slots with 1/128 of a warp's
`mma`, which makes the float32 pipe the bound.
"""

from functools import cache, partial
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint32, uint64

from kernels import q8_gemm
from kernels.bench import Case, main
from kernels.formats import BLOCK, FORMATS, as_words, on_card, random_raw
from kernels.intrinsics import (BIAS_WORD, dp4a, float_as_word, load_shared, load_matrices, load_shared2, load_words4,
                                mma_s8_16x8x16, mma_s8_16x8x32, mma_s8_8x8x16, shared_address, store_shared, store_shared4, unbias,
                                warp_number, word_as_float)
from kernels.operands import Matrix, Quantized
from kernels.q8_gemv import random_activations


class Shape(NamedTuple):
    """The tile of a block of threads."""
    rows: int       # of a warp, in sixteens
    columns: int    # of a warp, in eights
    down: int       # warps one below the other
    across: int     # warps side by side
    resident: int   # blocks of threads for which an SM has registers
    converts: bool  # dots become floats by a conversion; otherwise by their bias

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
    """How a thread carries blocks of w from global to shared memory: (begin, fetch, places).

    begin(starts, first, last, thread, blocks): where its blocks start in global memory, in a tile of columns that
    begins at `first`; in place of columns past `last` it takes column `last`. fetch(raw, wq, wd, starts, blocks, b):
    loads block b of each. places(thread): where the two 16 bytes of the first of them go in shared memory; those of
    the next go 32 bytes for each thread further.

    A thread carries whole blocks, since it unpacks them. Q8_0 has nothing to unpack: two neighbouring threads carry
    the halves of one column's block, and then those of another's, so that a load touches half as many cache lines.
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
    def places(thread):
        return place_of_half(thread, uint32(0)), place_of_half(thread, uint32(1))

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

    @cuda.jit(device=True, forceinline=True)
    def places_of_halves(thread):
        first = place_of_half(uint32(thread >> uint32(1)), uint32(thread & uint32(1)))
        return first, uint32(first + uint32(16 * threads))

    return (begin_halves, fetch_halves, places_of_halves) if format.bits == 8 else (begin, fetch, places)


@cuda.jit(device=True, forceinline=True)
def place_of_half(row, half):
    """Where 16 bytes of a row lie in shared memory."""
    swapped = uint32(half ^ uint32(uint32(row >> uint32(2)) & uint32(1)))
    return uint32(uint32(row << uint32(5)) + uint32(swapped << uint32(4)))


def two_dots(format):
    """Whether the halves of a block have scales of their own."""
    return format.halves or format.float_scales == 2


def lane_functions(format, converts, instruction):
    """What a warp does with the words of x and w: (multiply, add_dots).

    multiply(dots, a, b, bias): dots int32 [4] or, where there are two for a block, [8] <- BIAS_WORD + the dots of 16
    rows x 8 columns. add_dots(acc, dots, w_scales, x_scales): adds the scaled dots to acc float32 [4].
    """
    minima, integers, n_scales = format.minima, format.halves, format.n_scales
    first_minimum, apart, as_float = n_scales - minima, format.float_scales == 2, float32 if converts else unbias

    @cuda.jit(device=True, forceinline=True)
    def multiply_whole(dots, a, b, bias):
        made = mma_s8_16x8x32((a[0], a[1], a[2], a[3]), (b[0], b[1]), (bias[0], bias[1], bias[2], bias[3]))
        for i in range(4):
            dots[i] = made[i]

    @cuda.jit(device=True, forceinline=True)
    def multiply_halves(dots, a, b, bias):
        for h in range(2):
            made = mma_s8_16x8x16((a[2 * h], a[2 * h + 1]), (b[h],), (bias[0], bias[1], bias[2], bias[3]))
            for i in range(4):
                dots[4 * h + i] = made[i]

    @cuda.jit(device=True, forceinline=True)
    def multiply_eights(dots, a, b, bias):
        for i in range(2):
            first = mma_s8_8x8x16((a[i],), (b[0],), (bias[0], bias[1]))
            dots[2 * i], dots[2 * i + 1] = mma_s8_8x8x16((a[2 + i],), (b[1],), first)

    @cuda.jit(device=True, forceinline=True)
    def multiply_halves_of_eights(dots, a, b, bias):
        for h in range(2):
            for i in range(2):
                made = mma_s8_8x8x16((a[2 * h + i],), (b[h],), (bias[0], bias[1]))
                dots[4 * h + 2 * i], dots[4 * h + 2 * i + 1] = made

    @cuda.jit(device=True, forceinline=True)
    def add_dots(acc, dots, w_scales, x_scales):
        for i in range(2):
            for j in range(2):
                at = 2 * i + j
                total = as_float(dots[at])
                if integers:
                    total = cuda.fma(as_float(dots[4 + at]), word_as_float(w_scales[2, j]),
                                     total * word_as_float(w_scales[1, j]))
                acc[at] = cuda.fma(total, word_as_float(w_scales[0, j]) * x_scales[0, i], acc[at])
                if apart:
                    acc[at] = cuda.fma(as_float(dots[4 + at]), word_as_float(w_scales[1, j]) * x_scales[0, i], acc[at])
                for m in range(minima):
                    acc[at] = cuda.fma(word_as_float(w_scales[first_minimum + m, j]), x_scales[1 + m, i], acc[at])

    whole, halves = {"m16n8k32": (multiply_whole, multiply_halves),
                     "m8n8k16": (multiply_eights, multiply_halves_of_eights)}[instruction]
    return halves if two_dots(format) else whole, add_dots


def tensor_kernel(format, shape, instruction):
    """The kernel for a weight format and a Shape."""
    rows, columns, down, _, resident, converts = shape
    threads, tile_rows, tile_columns, w_threads = shape.threads, shape.tile_rows, shape.tile_columns, shape.carriers
    each, n_scales, minima, raw_words = tile_columns // w_threads, format.n_scales, format.minima, format.raw_words
    assert each * w_threads == tile_columns
    x_parts, carrying = max(2 * tile_rows // threads, 1), min(2 * tile_rows // 32, threads // 32)
    begin, fetch, places = carriers(format, shape)
    multiply, add_dots = lane_functions(format, converts, instruction)
    unpack, integers, load_book, n_dots = format.unpack, format.halves, format.load_book, 8 if two_dots(format) else 4
    per_row = 1 + minima
    xd_at, w_at = BLOCK * tile_rows, (BLOCK + 4 * per_row) * tile_rows
    wd_at = w_at + BLOCK * tile_columns
    buffer = wd_at + 4 * n_scales * tile_columns
    together = 16 // n_dots     # products at a time: their dots wait in registers
    shared_words, is_partial, w_warps = 2 * buffer // 4, carrying < threads // 32, w_threads // 32
    w_is_partial = w_threads < threads

    @cuda.jit(device=True, forceinline=True)
    def put_columns(raw, first, second, scale_to, book):
        """Unpacks blocks of w, given as they lie in global memory, and stores their int8 and scales."""
        for i in range(each):
            w, scales = cuda.local.array(8, uint32), cuda.local.array(n_scales, uint32)
            unpack(w, scales, raw[i], book)
            if integers:
                scales[1] = float_as_word(float32(int32(scales[1])))
                scales[2] = float_as_word(float32(int32(scales[2])))
            store_shared4(first + uint64(BLOCK * w_threads * i), w[0], w[1], w[2], w[3])
            store_shared4(second + uint64(BLOCK * w_threads * i), w[4], w[5], w[6], w[7])
            for s in range(n_scales):
                store_shared(scale_to + uint64(4 * (tile_columns * s + w_threads * i)), scales[s])

    @cuda.jit(device=True, forceinline=True)
    def put_rows(words, scales, to, scale_to):
        """Stores halves of blocks of x. The even lane of a pair stores the scale of the row; the odd lane, for formats
        with a minimum, scale * (sum of the block). For two minima each lane stores that of its half."""
        is_odd = (uint32(cuda.threadIdx.x) & uint32(1)) != uint32(0)
        for p in range(x_parts):
            store_shared4(to + uint64(16 * threads * p), words[p, 0], words[p, 1], words[p, 2], words[p, 3])
            scale, here = scales[p], scale_to + uint64(2 * threads * p)
            if minima:
                total = int32(0)
                for i in range(4):
                    total = dp4a(words[p, i], uint32(0x01010101), total)
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
    def multiply_rows(acc, first_row, end, bias, b, w_scales, x_here, xd_here):
        for r in range(first_row, end):
            a, x_scales = cuda.local.array(4, uint32), cuda.local.array((per_row, 2), float32)
            a[0], a[1], a[2], a[3] = load_matrices(x_here + uint64(16 * BLOCK * r))
            for p in range(per_row):
                for i in range(2):
                    x_scales[p, i] = word_as_float(load_shared(xd_here + uint64(4 * tile_rows * p + 64 * r + 32 * i)))
            dots = cuda.local.array((together, n_dots), int32)
            for first in range(0, columns, together):
                for c in range(together):
                    multiply(dots[c], a, b[first + c], bias)
                for c in range(together):
                    add_dots(acc[r, first + c], dots[c], w_scales[first + c], x_scales)

    @cuda.jit(device=True, forceinline=True)
    def multiply_block(acc, bias, x_here, w_here, xd_here, wd_here):
        """acc += one block of k."""
        b, w_scales = cuda.local.array((columns, 2), uint32), cuda.local.array((columns, n_scales, 2), uint32)
        for c in range(0, columns, 2):
            b[c, 0], b[c, 1], b[c + 1, 0], b[c + 1, 1] = load_matrices(w_here + uint64(8 * BLOCK * c))
        for c in range(columns):
            for s in range(n_scales):
                w_scales[c, s, 0], w_scales[c, s, 1] = load_shared2(wd_here + uint64(4 * tile_columns * s + 32 * c))
        multiply_rows(acc, 0, rows // 2, bias, b, w_scales, x_here, xd_here)  # one loop would not be unrolled
        multiply_rows(acc, rows // 2, rows, bias, b, w_scales, x_here, xd_here)

    @cuda.jit(launch_bounds=(threads, resident))
    def gemm_tensor_kernel(y, wq, wd, xq, xd, n, k, n_rows, stride, add):
        lane, warp = uint32(cuda.threadIdx.x), warp_number()
        thread = uint32(uint32(warp << uint32(5)) + lane)
        first_row, first_column = uint32(cuda.blockIdx.x * uint32(tile_rows)), uint32(
            cuda.blockIdx.y * uint32(tile_columns))
        blocks = uint32(k >> uint32(5))
        last = uint32(blocks - uint32(1))
        carries, w_carries = not is_partial or warp < uint32(carrying), not w_is_partial or warp < uint32(w_warps)

        # What this thread carries from global to shared memory.
        starts, raw = cuda.local.array((each, 3), uint32), cuda.local.array((each, raw_words), uint32)
        begin(starts, first_column, uint32(n - uint32(1)), thread, blocks)
        x_from = cuda.local.array(x_parts, uint32)
        x_words, x_scales = cuda.local.array((x_parts, 4), uint32), cuda.local.array(x_parts, float32)
        for p in range(x_parts):
            row = min(uint32(first_row + uint32(p * threads // 2) + uint32(thread >> uint32(1))),
                      uint32(n_rows - uint32(1)))
            x_from[p] = uint32(uint32(row * k) + uint32(uint32(thread & uint32(1)) << uint32(4)))

        # Addresses in shared memory, in the first buffer: where the thread stores, and where the lane reads.
        start = shared_address(cuda.shared.array(shared_words, uint32, alignment=16))
        first_place, second_place = places(thread)
        w_to, w_second = start + uint64(w_at) + uint64(first_place), start + uint64(w_at) + uint64(second_place)
        wd_to = start + uint64(wd_at) + uint64(uint32(thread << uint32(2)))
        x_to = start + uint64(place_of_half(uint32(thread >> uint32(1)), uint32(thread & uint32(1))))
        odd = uint32(thread & uint32(1))
        xd_to = start + uint64(xd_at) + uint64(uint32(uint32(thread >> uint32(1)) << uint32(2))) + uint64(
            uint32(odd * uint32(4 * tile_rows)))
        warp_row = uint32(uint32(warp % uint32(down)) * uint32(16 * rows))
        warp_column = uint32(uint32(warp // uint32(down)) * uint32(8 * columns))
        g, t = uint32(lane >> uint32(2)), uint32(lane & uint32(3))
        x_row, x_half = uint32(lane & uint32(15)), uint32(lane >> uint32(4))
        w_row = uint32(uint32(lane & uint32(7)) + uint32(uint32(lane >> uint32(4)) << uint32(3)))
        w_half = uint32(uint32(lane >> uint32(3)) & uint32(1))
        x_here = start + uint64(uint32(warp_row << uint32(5))) + uint64(place_of_half(x_row, x_half))
        w_here = start + uint64(w_at) + uint64(uint32(warp_column << uint32(5))) + uint64(place_of_half(w_row, w_half))
        xd_here = start + uint64(xd_at) + uint64(uint32(warp_row << uint32(2))) + uint64(uint32(g << uint32(2)))
        wd_here = start + uint64(wd_at) + uint64(uint32(warp_column << uint32(2))) + uint64(uint32(t << uint32(3)))

        acc = cuda.local.array((rows, columns, 4), float32)
        for r in range(rows):
            for c in range(columns):
                for i in range(4):
                    acc[r, c, i] = float32(0.0)
        bias = cuda.local.array(4, int32)
        for i in range(4):
            bias[i] = int32(0) if converts else int32(uint32(BIAS_WORD) | uint32(k & uint32(1 << i)))
        book = load_book(thread, uint32(threads))
        if w_carries:
            fetch(raw, wq, wd, starts, blocks, uint32(0))
            put_columns(raw, w_to, w_second, wd_to, book)
        if carries:
            fetch_rows(x_words, x_scales, xq, xd, x_from, uint32(0))
            put_rows(x_words, x_scales, x_to, xd_to)
        cuda.syncthreads()
        now, following = uint64(0), uint64(buffer)
        block = uint32(0)
        while block < blocks:
            b = min(uint32(block + uint32(1)), last)
            if w_carries:
                fetch(raw, wq, wd, starts, blocks, b)
            if carries:
                fetch_rows(x_words, x_scales, xq, xd, x_from, b)
            multiply_block(acc, bias, x_here + now, w_here + now, xd_here + now, wd_here + now)
            if w_carries:
                put_columns(raw, w_to + following, w_second + following, wd_to + following, book)
            if carries:
                put_rows(x_words, x_scales, x_to + following, xd_to + following)
            cuda.syncthreads()
            now, following = following, now
            block = uint32(block + uint32(1))

        first_row = uint32(first_row + uint32(warp_row + g))
        first_column = uint32(first_column + uint32(warp_column + uint32(t << uint32(1))))
        for i in range(2 * rows):
            row = uint32(first_row + uint32(8 * i))
            for j in range(2 * columns):
                column = uint32(first_column + uint32(8 * (j >> 1) + (j & 1)))
                at = uint32(row * stride + column)
                if row < n_rows and column < n:
                    total = acc[i >> 1, j >> 1, 2 * (i & 1) + (j & 1)]
                    y[at] = y[at] + total if add else total

    return gemm_tensor_kernel


INSTRUCTIONS = {"m16n8k32": (8, 0), "m8n8k16": (7, 5)}     # mma of int8 -> the oldest architecture that has it
TILES = {"64 x 128": (4, 4, 1, 4, 3), "32 x 128": (2, 4, 1, 4, 4), "128 x 128": (4, 8, 2, 2, 2),
         "128 x 128 of 8 warps": (4, 4, 2, 4, 2), "128 x 256": (4, 8, 2, 4, 1), "192 x 128": (4, 4, 3, 4, 1),
         "128 x 192": (4, 4, 2, 6, 1)}
SHAPES = {name + " converted" * converts: Shape(*tile, converts) for converts in (False, True)
          for name, tile in TILES.items()}



@cache
def tensor(format, shape, instruction):
    """The kernel of a format for a Shape and a key of INSTRUCTIONS."""
    return tensor_kernel(format, shape, instruction)


def instruction_of(card):
    """The key of INSTRUCTIONS that a card has, or None. The emulated card has all."""
    return next((name for name, oldest in INSTRUCTIONS.items() if card.kind == "emulated" or card.cc >= oldest), None)


def gemm(card, y, stride, w, x, rows, add=False, *, stream=None, shape=SHAPES["64 x 128"], instruction=None):
    """y <- (y +) x . w^T, as `gemm` of kernels/q8_gemm.py. shape: one of SHAPES. instruction: one of INSTRUCTIONS; None
    takes the largest that the card has."""
    instruction = instruction or instruction_of(card)
    grid = (-(-rows // shape.tile_rows), -(-w.n // shape.tile_columns))
    arrays = y.reshape(-1), w.values.reshape(-1), as_words(w.scales), *x.flat
    block = 32, shape.down * shape.across
    kernel = tensor(FORMATS[w.format], shape, instruction)
    card.launch(kernel, grid, block, *arrays, w.n, w.k, rows, stride, add, stream=stream)


# ---- check and time ----------------------------------------------------------------------------------------

TIMED = [(12288, 4096, 4096), (24576, 4096, 1160), (4096, 4096, 4096), (4096, 4096, 297)]      # n, k, rows


def check(card, n, k, rows, add=False, shape=SHAPES["64 x 128"], format=FORMATS["Q8_0"], instruction=None):
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
