"""Products of prompts with experts: each pair of (row, expert) takes a row of x times the matrix of its expert.

    y[p] = W[expert of p] . x[row of p]             p: sorted position of a pair; the pairs of an expert lie together
    x[r] = x[r] + acc,   acc = 0;   acc = fma(weight[r, i], y[position[r, i]], acc)      for ranks i = 0, 1, ...
                                    acc = fma(weight[r, n_used], shared[r], acc)         the shared expert

    w       Experts (kernels/operands.py): matrices [n, k] in a format of kernels/formats, or of floats
    x       Quantized or float32: [rows, k], of which p reads row order[p] / n_used, or [pairs, k], of which it reads
            row p
    y       float32 [pairs, n]
    groups  kernels/records.py: order, position, and tiles, of which each has some rows of one expert

`expert_gemm` gives the bits of `gemm` (kernels/q8_gemm.py) for that row and that matrix, by dp4a or on tensor cores
(kernels/tensor_gemm.py); `expert_gemm_float` those of `gemm_float`, `expert_gemv_float` those of `gemv_float`
(kernels/float_matmul.py). They use the same device functions: here they learn from a tile where their rows of x, their
weights and their rows of y are.

        y, sorted        | expert 0      | expert 2         | expert 3 ...
        tiles of 16      |    16   | 7   |   16    |   11   | 2 |               a block of threads: a tile x columns

The number of tiles is known to the card alone. The grid has as many as there can be; blocks without a tile leave.

By dp4a a tile is 16, 32 or 64 rows high (`tiles_for`): a prompt of 297 tokens gives each of 256 experts 9 rows, one of
4,620 tokens 144. A block has 4 warps with a quarter of the rows each, one below the other, and 128 columns. A warp
whose rows are past the end of its tile carries weights to shared memory for the others and multiplies nothing.

Tiles of 32 and 64 rows multiply as `gemm` does, a block of k at a time. Tiles of 16 rows have so few products for each
weight that the L1 cache would be the bound: a warp's load of 16 bytes takes it a cycle for each line of 128 bytes. So
these tiles take 4 blocks of k at a time, and a load touches 4 or 8 columns instead of 16 or 32.

On tensor cores a tile is 64 rows high. Each of its 4 warps has all rows and a quarter of the columns, and multiplies 16
rows at a time, as many times as the tile has rows. So few rows cost few products, and all warps have the same number.

Pipe: dp4a, as in kernels/q8_gemm.py, or tensor; kernels/products.py chooses. Higher tiles read an expert's weights less
often, but have more unused rows; benchmarks/results.md, section expert_gemm, counts both. On tensor cores a tile takes
about as long with few rows as with many, because the copy of its weights to shared memory is the bound. Up
to about 12 rows per expert, each expert is read once by dp4a, and memory bounds Q8_0. `combine` is bound by memory:
4 (n_used + 3) bytes per value with the shared expert.
"""

import itertools
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.types import float32, uint32, uint64

from kernels import float_matmul, tensor_gemm
from kernels.bench import Case, main
from kernels.float_matmul import ROWS, WEIGHT_AT, first_line
from kernels.formats import BLOCK, FORMATS, as_words, on_card, product_reference, random_raw
from kernels.intrinsics import (array_at, load_floats4, load_shared, load_shared4, load_words4, shared_address,
                                store_floats4)
from kernels.operands import Experts, Matrix, Quantized
from kernels.q8_gemm import (COLUMNS, THREADS, TILE_N, WARPS, WORDS, carried_row, carriers, device_functions,
                             load_block, tile_functions)
from kernels.q8_gemv import random_activations
from kernels.records import Choice, Groups
from kernels.route import group_reference, most_tiles
from kernels.tensor_gemm import Shape

WIDTH = 4 * THREADS  # values of a row that a block of `combine` takes


HEIGHTS = 16, 32, 64  # rows of tiles, shared by the warps of a block
LOW = 16,             # heights that have a kernel of their own

# The tiles of tensor cores. All warps have all rows of a tile, and so the same number of sixteens to make.
TENSOR_SHAPE = Shape(4, 4, 1, 4, 3)


class Tiles(NamedTuple):
    """How the products of experts are made.

    rows: of a tile. instruction: the key of tensor_gemm.INSTRUCTIONS that makes them; None: dp4a."""
    rows: int
    instruction: str | None = None

    @property
    def pipe(self):
        """For people."""
        return "tensor" if self.instruction else "dp4a"


def tiles_for(n_pairs, n_experts, instruction=None):
    """The Tiles for n_pairs pairs: by dp4a the lowest that hold the rows of an expert with a third more than the
    average."""
    if instruction:
        return Tiles(TENSOR_SHAPE.tile_rows, instruction)
    return Tiles(next((rows for rows in HEIGHTS if 3 * rows * n_experts >= 4 * n_pairs), max(HEIGHTS)))


# The time of a block of threads, full or not, in the unit of q8_gemm.block_time: by the rows of a tile of dp4a, and on
# tensor cores. Measured on an H100, Q8_0, 1024 x 2048, 297 to 4,620 rows.
TIMES, TENSOR_TIME = {16: 5.9, 32: 9.1, 64: 16.5}, 9.3


def relative_time(card, n, k, n_experts, micro_batches, instruction=None):
    """The time of a product over all micro-batches of a prompt, as q8_gemm.relative_time and in the same unit.
    micro_batches has the pairs of each.

    An expert has one tile at least, and the last of several is about half full.
    """
    work = 0.0
    for pairs in micro_batches:
        rows, _ = tiles_for(pairs, n_experts, instruction)
        work += max(pairs / n_experts / rows + 0.5, 1) * (TENSOR_TIME if instruction else TIMES[rows])
    return k * n_experts * -(-n // TILE_N) / card.n_sms * work


# ---- NumPy -------------------------------------------------------------------------------------------------------

def combine_reference(x, y, position, weights, shared=None):
    """float32 [rows, n], bit for bit. position int32 [rows, n_used]; weights float32 [rows, n_used + 1]. The float64
    sum of an exact product and a float32 rounds once more only in its 53rd bit."""
    acc = np.zeros_like(x)
    terms = [y[position[:, rank]] for rank in range(position.shape[1])] + ([] if shared is None else [shared])
    for rank, term in enumerate(terms):
        acc = (weights[:, rank, None].astype(np.float64) * term + acc).astype(np.float32)
    return x + acc


# ---- quantised ---------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def read_tile(tiles):
    """(expert, first row, end of the rows) of a block of threads."""
    at = uint32(cuda.blockIdx.y * uint32(3))
    first = uint32(tiles[uint32(at + uint32(1))])
    return uint32(tiles[at]), first, uint32(first + uint32(tiles[uint32(at + uint32(2))]))


@cuda.jit(device=True, forceinline=True)
def place_of_tile(places, tiles, n_tiles):
    """The two addresses of the expert of a block of threads; 0, 0 where there is no tile or the expert is out of
    reach."""
    if uint32(cuda.blockIdx.y) >= uint32(n_tiles[0]):
        return uint64(0), uint64(0)
    expert, _, _ = read_tile(tiles)
    place = uint32(expert * uint32(2))
    return places[place], places[uint32(place + uint32(1))]


@cuda.jit(device=True, forceinline=True)
def source_row(order, position, n_used):
    """The row of x that a sorted position takes."""
    return uint32(uint32(order[position]) // n_used) if n_used > uint32(0) else uint32(position)


def warp_rows(rows):
    """rows_of_warp of warps with `rows` rows each."""
    @cuda.jit(device=True, forceinline=True)
    def rows_of_warp(tiles):
        """(first row, end) of the rows of y that a warp makes; there may be none. Which warp has the first rows differs
        from block to block, since warps of one number share a partition of the SM (multiplicative hashing: D. Knuth,
        The Art of Computer Programming 3, section 6.4)."""
        _, first, end = read_tile(tiles)
        block = uint32(uint32(cuda.blockIdx.y * cuda.gridDim.x) + cuda.blockIdx.x)
        warp = uint32(cuda.threadIdx.y + uint32(uint32(block * uint32(0x9E3779B1)) >> uint32(30)))
        return uint32(first + uint32(warp % uint32(WARPS)) * uint32(rows)), end

    return rows_of_warp


def high_kernel(format, rows):
    """The kernel of a format for high tiles, of `rows` rows of each warp."""
    rows_of_warp = warp_rows(rows)
    row_of, (multiply_tile, store_tile) = carried_row(rows), tile_functions(format, rows, skips=True)
    begin, *_ = carriers(format)
    blocks_per_sm = 3 if format.minima < 2 else 2  # for which an SM has registers

    @cuda.jit(launch_bounds=(THREADS, blocks_per_sm))
    def expert_gemm_kernel(y, wq, wd, xq, xd, places, order, tiles, n_tiles, n, k, n_used, stride):
        codes, scales = place_of_tile(places, tiles, n_tiles)
        if codes == uint64(0):
            return
        row0, end = rows_of_warp(tiles)
        position = min(uint32(row0 + row_of(uint32(cuda.threadIdx.x))), uint32(end - uint32(1)))
        start, acc = cuda.local.array(3, uint32), cuda.local.array((rows, COLUMNS), float32)
        thread = uint32(uint32(cuda.threadIdx.y * uint32(32)) + cuda.threadIdx.x)
        column0 = uint32(cuda.blockIdx.x * uint32(TILE_N))
        start[0], start[1], start[2] = begin(column0, uint32(n - uint32(1)), thread, uint32(k >> uint32(5)))
        # An address of the thread's own takes fewer registers than the expert's and a start.
        codes, scales = codes + uint64(start[0]), scales + uint64(2) * uint64(start[2])
        start[0], start[1], start[2] = uint32(0), uint32(start[1] - start[0]), uint32(0)
        multiply_tile(acc, row0 < end, array_at(codes, wq), array_at(scales, wd), start, xq, xd,
                      source_row(order, position, n_used), k)
        row0, end = rows_of_warp(tiles)  # read once more: they would take registers
        store_tile(y, acc, row0, end, uint32(cuda.blockIdx.x * uint32(TILE_N)), n, stride, False)

    return expert_gemm_kernel


# ---- quantised: low tiles ----------------------------------------------------------------------------------------
# A block of threads brings DEPTH blocks of k of w and x to shared memory at once, so that a load takes up to 128
# neighbouring bytes of a column. The next ones are on their way to registers while it multiplies. Shared memory, in
# bytes; where a tile has `rows` rows of a warp:
#
#     w  [DEPTH][128 columns][32], then their scales [DEPTH][1 to 3][128 columns][4]; each block of k has PAD more
#     x  [4 warps][rows][DEPTH][32], then [4 warps][DEPTH][2 or 3][16][4]: scales, scale * sum
#
# The padding, the order of columns in `first_column` and that of halves in `half_at` are for the banks: 8 neighbouring
# threads that store, or read, 16 bytes each use all 32.

DEPTH = 4
EACH = TILE_N // DEPTH          # columns of which a block of threads has DEPTH blocks of k when each thread has one
PAD = 32
W_BLOCK = TILE_N * BLOCK + PAD


@cuda.jit(device=True, forceinline=True)
def half_at(column, half):
    """Where half of a column's block lies. In every other 4 columns the halves have changed places."""
    swapped = uint32(half ^ uint32(uint32(column >> uint32(2)) & uint32(1)))
    return uint32(uint32(column << uint32(5)) + uint32(swapped << uint32(4)))


@cuda.jit(device=True, forceinline=True)
def block_of(thread):
    """Which of DEPTH blocks of k a thread carries, whole ones of w."""
    return uint32(thread & uint32(DEPTH - 1))


@cuda.jit(device=True, forceinline=True)
def block_of_pair(thread):
    """Which of DEPTH blocks of k two neighbouring threads carry, half a block each."""
    return uint32(uint32(thread >> uint32(1)) & uint32(DEPTH - 1))


@cuda.jit(device=True, forceinline=True)
def first_column(thread):
    """The first column of which a thread carries a block; the others are EACH, 2 EACH, ... further on."""
    group = uint32(thread >> uint32(2))
    turned = uint32(uint32(uint32(group & uint32(1)) << uint32(2)) | uint32(uint32(group >> uint32(1)) & uint32(3)))
    return uint32(uint32(group & uint32(0xFFFFFFF8)) | turned)


def deep_carriers(format):
    """As `carriers` of kernels/q8_gemm.py, for DEPTH blocks of k: (begin, fetch, places).

    start: uint32 [DEPTH, 3]; raw: uint32 [DEPTH, raw_words]. fetch takes blocks of k from number b on, and in place of
    those past `last` the last one. places(thread): where the two times 16 bytes of raw[0] go in shared memory.
    """
    starts, fetch_block = format.starts, format.fetch

    @cuda.jit(device=True, forceinline=True)
    def begin(start, first, last, thread, blocks):
        for j in range(DEPTH):
            q_from, d_from = starts(min(uint32(first + first_column(thread) + uint32(EACH * j)), last), blocks)
            start[j, 0], start[j, 1], start[j, 2] = q_from, q_from, d_from

    @cuda.jit(device=True, forceinline=True)
    def fetch(raw, wq, wd, start, blocks, b, last, thread):
        b = min(uint32(b + block_of(thread)), last)
        for j in range(DEPTH):
            fetch_block(raw[j], wq, wd, start[j, 0], start[j, 2], blocks, b)

    @cuda.jit(device=True, forceinline=True)
    def places(thread):
        column, at = first_column(thread), uint32(block_of(thread) * uint32(W_BLOCK))
        return uint32(at + half_at(column, uint32(0))), uint32(at + half_at(column, uint32(1)))

    @cuda.jit(device=True, forceinline=True)
    def begin_halves(start, first, last, thread, blocks):
        begin(start, first, last, thread, blocks)
        half = uint32(uint32(thread & uint32(1)) << uint32(4))
        for j in range(DEPTH):
            for i in range(2):
                column = uint32(first + uint32(thread >> uint32(3)) + uint32(EACH * j + EACH // 2 * i))
                q_from, _ = starts(min(column, last), blocks)
                start[j, i] = uint32(q_from + half)

    @cuda.jit(device=True, forceinline=True)
    def fetch_halves(raw, wq, wd, start, blocks, b, last, thread):
        at = uint32(min(uint32(b + block_of_pair(thread)), last) << uint32(5))
        b = min(uint32(b + block_of(thread)), last)
        for j in range(DEPTH):
            to = raw[j]
            to[0], to[1], to[2], to[3] = load_words4(wq, uint32(start[j, 0] + at))
            to[4], to[5], to[6], to[7] = load_words4(wq, uint32(start[j, 1] + at))
            to[8] = uint32(wd[uint32(start[j, 2] + b)])

    @cuda.jit(device=True, forceinline=True)
    def places_of_halves(thread):
        at = uint32(uint32(block_of_pair(thread) * uint32(W_BLOCK))
                    + half_at(uint32(thread >> uint32(3)), uint32(thread & uint32(1))))
        return at, uint32(at + uint32(EACH // 2 * BLOCK))

    return (begin_halves, fetch_halves, places_of_halves) if format.bits == 8 else (begin, fetch, places)


def low_kernel(format, rows):
    """The kernel of a format for low tiles, of `rows` rows of each warp."""
    begin, fetch, places = deep_carriers(format)
    put_column, put_x, load_x_scales, multiply_row = device_functions(format)
    rows_of_warp, (_, store_tile) = warp_rows(rows), tile_functions(format, rows)
    per_row, n_scales, raw_words, load_book = 1 + format.minima, format.n_scales, format.raw_words, format.load_book
    at_once = 32 // (2 * DEPTH)         # rows of x that a warp loads at once
    x_parts = rows // at_once
    wd_block, xd_block, x_row = 4 * TILE_N * n_scales + PAD, 64 * max(per_row, 2), DEPTH * BLOCK
    wd_start = DEPTH * W_BLOCK
    x_start = wd_start + DEPTH * wd_block
    xd_start = x_start + WARPS * rows * x_row
    shared_words = (xd_start + WARPS * DEPTH * xd_block) // 4

    @cuda.jit(device=True, forceinline=True)
    def fetch_rows(words, scales, xq, xd, x_from, b, last, lane):
        b = min(uint32(b + block_of_pair(lane)), last)
        for p in range(x_parts):
            to = words[p]
            to[0], to[1], to[2], to[3] = load_words4(xq, uint32(x_from[p] + uint32(b << uint32(5))))
            scales[p] = xd[uint32(uint32(x_from[p] >> uint32(5)) + b)]

    @cuda.jit(device=True, forceinline=True)
    def multiply_block(acc, w_at, other_at, wd_at, x_at, xd_at, j):
        """acc += block j of k. The addresses are those of block 0."""
        w_at, other_at = w_at + uint64(uint32(j * uint32(W_BLOCK))), other_at + uint64(uint32(j * uint32(W_BLOCK)))
        wd_at, xd_at = wd_at + uint64(uint32(j * uint32(wd_block))), xd_at + uint64(uint32(j * uint32(xd_block)))
        x_at = x_at + uint64(uint32(j * uint32(BLOCK)))
        w, w_scales = cuda.local.array((COLUMNS, WORDS), uint32), cuda.local.array((n_scales, COLUMNS), uint32)
        x, x_scales = cuda.local.array(WORDS, uint32), cuda.local.array((2, per_row, 4), uint32)
        for c in range(COLUMNS):
            w[c, 0], w[c, 1], w[c, 2], w[c, 3] = load_shared4(w_at + uint64(32 * BLOCK * c))
            w[c, 4], w[c, 5], w[c, 6], w[c, 7] = load_shared4(other_at + uint64(32 * BLOCK * c))
        for s in range(n_scales):
            for c in range(COLUMNS):
                w_scales[s, c] = load_shared(wd_at + uint64(4 * TILE_N * s + 128 * c))
        for r in range(rows):
            if r & 3 == 0:
                load_x_scales(x_scales, r, xd_at)
            load_block(x, x_at + uint64(x_row * r))
            multiply_row(acc, r, w, w_scales, x, x_scales)

    @cuda.jit(launch_bounds=(THREADS, 3))
    def low_expert_gemm_kernel(y, wq, wd, xq, xd, addresses, order, tiles, n_tiles, n, k, n_used, stride):
        codes, scales = place_of_tile(addresses, tiles, n_tiles)
        if codes == uint64(0):
            return
        wq, wd = array_at(codes, wq), array_at(scales, wd)
        lane, warp = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        thread = uint32(uint32(warp * uint32(32)) + lane)
        blocks = uint32(k >> uint32(5))
        last = uint32(blocks - uint32(1))
        row0, end = rows_of_warp(tiles)
        works = row0 < end

        # What this thread carries from global to shared memory.
        start, x_from = cuda.local.array((DEPTH, 3), uint32), cuda.local.array(x_parts, uint32)
        raw, x_words = cuda.local.array((DEPTH, raw_words), uint32), cuda.local.array((x_parts, 4), uint32)
        x_scales = cuda.local.array(x_parts, float32)
        begin(start, uint32(cuda.blockIdx.x * uint32(TILE_N)), uint32(n - uint32(1)), thread, blocks)
        row, half = uint32(lane // uint32(2 * DEPTH)), uint32(lane & uint32(1))
        for p in range(x_parts):
            position = min(uint32(row0 + row + uint32(at_once * p)), uint32(end - uint32(1)))
            x_from[p] = uint32(uint32(source_row(order, position, n_used) * k) + uint32(half << uint32(4)))

        # Addresses in shared memory: where the thread stores, and where it reads.
        w_at = shared_address(cuda.shared.array(shared_words, uint32, alignment=16))
        x_at = w_at + uint64(x_start) + uint64(uint32(warp * uint32(rows * x_row)))
        xd_at = w_at + uint64(xd_start) + uint64(uint32(warp * uint32(DEPTH * xd_block)))
        wd_at = w_at + uint64(wd_start)
        w_place, other_place = places(thread)
        w_to, other_to = w_at + uint64(w_place), w_at + uint64(other_place)
        wd_to = wd_at + uint64(uint32(uint32(block_of(thread) * uint32(wd_block))
                                      + uint32(first_column(thread) << uint32(2))))
        x_to = x_at + uint64(uint32(uint32(row * uint32(x_row)) + uint32(block_of_pair(lane) << uint32(5))
                                    + uint32(half << uint32(4))))
        xd_to = xd_at + uint64(uint32(uint32(block_of_pair(lane) * uint32(xd_block)) + uint32(row << uint32(2))
                                      + uint32(half << uint32(6))))
        w_at, other_at = w_at + uint64(half_at(lane, uint32(0))), w_at + uint64(half_at(lane, uint32(1)))
        wd_at = wd_at + uint64(uint32(lane << uint32(2)))

        acc = cuda.local.array((rows, COLUMNS), float32)
        for r in range(rows):
            for c in range(COLUMNS):
                acc[r, c] = float32(0.0)
        fetch(raw, wq, wd, start, blocks, uint32(0), last, thread)
        fetch_rows(x_words, x_scales, xq, xd, x_from, uint32(0), last, lane)
        book = load_book(thread, uint32(THREADS))
        block = uint32(0)
        while block < blocks:
            for j in range(DEPTH):
                put_column(raw[j], w_to + uint64(EACH * BLOCK * j), other_to + uint64(EACH * BLOCK * j),
                           wd_to + uint64(4 * EACH * j), book)
            for p in range(x_parts):
                put_x(x_words[p], x_scales[p], x_to + uint64(at_once * x_row * p), xd_to + uint64(4 * at_once * p))
            cuda.syncthreads()
            following = uint32(block + uint32(DEPTH))
            fetch(raw, wq, wd, start, blocks, following, last, thread)
            fetch_rows(x_words, x_scales, xq, xd, x_from, following, last, lane)
            if works and following <= blocks:
                for j in range(DEPTH):
                    multiply_block(acc, w_at, other_at, wd_at, x_at, xd_at, uint32(j))
            elif works:
                for j in range(uint32(blocks - block)):
                    multiply_block(acc, w_at, other_at, wd_at, x_at, xd_at, uint32(j))
            cuda.syncthreads()
            block = following
        row0, end = rows_of_warp(tiles)  # read once more: they would take registers
        store_tile(y, acc, row0, end, uint32(cuda.blockIdx.x * uint32(TILE_N)), n, stride, False)

    return low_expert_gemm_kernel


@cache
def grouped(format, height):
    """The kernel of a format for tiles of `height` rows."""
    rows = height // WARPS
    return low_kernel(format, rows) if height in LOW else high_kernel(format, rows)


# ---- quantised: tensor cores -------------------------------------------------------------------------------------

@cache
def grouped_tensor(format, instruction, shape=TENSOR_SHAPE):
    """The kernel of a format for a key of tensor_gemm.INSTRUCTIONS."""
    width = shape.tile_columns
    multiply_tile = tensor_gemm.tile_function(format, shape, instruction, source_row, skips=True)

    @cuda.jit(launch_bounds=tensor_gemm.launch_bounds(format, shape, instruction))
    def expert_gemm_tensor_kernel(y, wq, wd, xq, xd, places, order, tiles, n_tiles, n, k, n_used, stride):
        codes, scales = place_of_tile(places, tiles, n_tiles)
        if codes == uint64(0):
            return
        _, first, end = read_tile(tiles)
        multiply_tile(y, array_at(codes, wq), array_at(scales, wd), xq, xd, order, n_used, first, end,
                      uint32(cuda.blockIdx.x * uint32(width)), n, k, stride, False)

    return expert_gemm_tensor_kernel


# ---- floats ------------------------------------------------------------------------------------------------------

@cache
def float_kernel(kind, shape, each):
    """The prefill kernel for one type of weights; shape, each: as in float_matmul.tile_function."""
    multiply_tile = float_matmul.tile_function(kind, shape, each)
    lines, carried = shape.lines(each), shape.carried(each)

    @cuda.jit(launch_bounds=(32 * shape.warps, 1))
    def expert_gemm_float_kernel(y, w, x, places, order, tiles, n_tiles, n, k, n_used, stride):
        address, _ = place_of_tile(places, tiles, n_tiles)
        if address == uint64(0):
            return
        _, first, end = read_tile(tiles)
        x_starts = cuda.local.array(carried, uint32)
        for i in range(carried):
            line = uint32(first_line(each) + uint32(i * lines))
            x_starts[i] = uint32(source_row(order, min(uint32(first + line), uint32(end - uint32(1))), n_used) * k)
        multiply_tile(y, array_at(address, w), x, x_starts, first, end, n, k, stride, False)

    return expert_gemm_float_kernel


def float_decode_kernel(weight_at):
    """The decode kernel for one type of weights: a block makes rows of w for one pair."""
    multiply_rows = float_matmul.sums_function(weight_at, 1)

    @cuda.jit
    def expert_gemv_float_kernel(y, w, x, places, experts, n, k, n_used, stride):
        row = uint32(uint32(cuda.blockIdx.x * uint32(float_matmul.WARPS) + cuda.threadIdx.y) * uint32(ROWS))
        if row >= n:
            return
        pair = uint32(cuda.blockIdx.y)
        address = places[uint32(uint32(experts[pair]) * uint32(2))]
        if address == uint64(0):
            return
        x_starts = cuda.local.array(1, uint32)
        x_starts[0] = uint32(uint32(pair // n_used) * k)
        multiply_rows(y, array_at(address, w), x, row, x_starts, pair, n, k, uint32(1), stride, False)

    return expert_gemv_float_kernel


FLOAT_GEMV = {kind: float_decode_kernel(at) for kind, at in WEIGHT_AT.items()}


# ---- the weighted sum --------------------------------------------------------------------------------------------

@cache
def combine_kernel(n_used, is_shared):
    """A thread makes 4 neighbouring values of a row. `n_used` is known when the kernel is compiled, so that the loads
    of all ranks are in flight together."""

    @cuda.jit
    def combine_experts_kernel(x, y, position, weights, shared, n):
        row = uint32(cuda.blockIdx.x)
        column = uint32(uint32(cuda.blockIdx.y * uint32(THREADS) + cuda.threadIdx.x) * uint32(4))
        if column >= n:
            return
        pair, weight_at, at = uint32(row * uint32(n_used)), uint32(row * uint32(n_used + 1)), uint32(row * n + column)
        a, b, c, d = float32(0.0), float32(0.0), float32(0.0), float32(0.0)
        for rank in range(n_used):
            w = weights[uint32(weight_at + uint32(rank))]
            p = uint32(position[uint32(pair + uint32(rank))])
            y0, y1, y2, y3 = load_floats4(y, uint32(p * n + column))
            a, b, c, d = cuda.fma(w, y0, a), cuda.fma(w, y1, b), cuda.fma(w, y2, c), cuda.fma(w, y3, d)
        if is_shared:
            w = weights[uint32(weight_at + uint32(n_used))]
            y0, y1, y2, y3 = load_floats4(shared, at)
            a, b, c, d = cuda.fma(w, y0, a), cuda.fma(w, y1, b), cuda.fma(w, y2, c), cuda.fma(w, y3, d)
        x0, x1, x2, x3 = load_floats4(x, at)
        store_floats4(x, at, x0 + a, x1 + b, x2 + c, x3 + d)

    return combine_experts_kernel


# ---- launches: they write in place and never allocate ------------------------------------------------------------

def expert_gemm(card, y, stride, w, x, groups, n_pairs, n_used=None, *, tiles=None, stream=None):
    """y[p] <- row of x times the matrix of the expert of sorted position p, for p < n_pairs.

    w: quantised Experts of matrices [n, k]. x: Quantized: with n_used, rows of tokens, of which each has n_used pairs;
    without, a row for each sorted position. y: float32, n numbers of each row, `stride` from one row to the next.
    tiles: the Tiles that groups have; None: those of `tiles_for` by dp4a. Rows of an expert that is out of reach stay
    as they are."""
    n_experts, format = len(w.places), FORMATS[w.format]
    rows, instruction = tiles or tiles_for(n_pairs, n_experts)
    kernel = grouped_tensor(format, instruction) if instruction else grouped(format, rows)
    grid = -(-w.n // TILE_N), most_tiles(n_pairs, 1, n_experts, rows)
    card.launch(kernel, grid, (32, WARPS), y.reshape(-1), w.home.values.reshape(-1), as_words(w.home.scales), *x.flat,
                *_sorted(w, groups), w.n, w.k, n_used or 0, stride, stream=stream)


def expert_gemm_float(card, y, stride, w, x, groups, n_pairs, n_used=None, *, stream=None):
    """As `expert_gemm`, with w Experts of floats and x float32."""
    n_experts = len(w.places)
    height = tiles_for(n_pairs, n_experts).rows
    shape, values = float_matmul.tallest(card), w.home.values
    assert shape.height >= height
    grid = -(-w.n // shape.width), most_tiles(n_pairs, 1, n_experts, height)
    card.launch(float_kernel(np.dtype(values.dtype), shape, float_matmul.each_of(w.home, x)), grid, (32, shape.warps),
                y.reshape(-1), float_matmul.as_words(values), x.reshape(-1), *_sorted(w, groups), w.n, w.k, n_used or 0,
                stride, stream=stream)


def _sorted(w, groups):
    """The flat arrays that say where things are."""
    return w.places.reshape(-1), groups.order, groups.tiles.reshape(-1), groups.n_tiles


def expert_gemv_float(card, y, stride, w, x, choice, n_rows, from_pairs=False, *, stream=None):
    """y[pair] <- row of x times the matrix of the pair's expert, for the pairs of n_rows rows; decode family.

    w: Experts of floats. x: float32 [n_rows, k]; with from_pairs [pairs, k]. y: float32, n numbers of each pair,
    `stride` from one pair to the next. Pairs of an expert that is out of reach stay as they are."""
    n_used = choice.n_used
    grid = -(-w.n // (float_matmul.WARPS * ROWS)), n_rows * n_used
    card.launch(FLOAT_GEMV[np.dtype(w.home.values.dtype)], grid, (32, float_matmul.WARPS), y.reshape(-1),
                float_matmul.as_words(w.home.values), x.reshape(-1), w.places.reshape(-1), choice.experts.reshape(-1),
                w.n, w.k, 1 if from_pairs else n_used, stride, stream=stream)


def combine(card, x, y, choice, groups, shared, n_rows, *, stream=None):
    """x[r] += the sum of the results of row r's experts, each times its weight, in the order of rank; then the shared
    expert's, if there is one.

    x: float32 [n_rows, n], n a multiple of 4. y: float32 [pairs, n] in sorted order. shared: float32 [n_rows, n] or
    None."""
    n = x.shape[-1]
    if n % 4:
        raise ValueError(f"the sum of experts takes rows of a multiple of 4 values, not {n}")
    kernel, last = combine_kernel(choice.n_used, shared is not None), x if shared is None else shared
    card.launch(kernel, (n_rows, -(-n // WIDTH)), THREADS, x.reshape(-1), y.reshape(-1), groups.position,
                choice.weights.reshape(-1), last.reshape(-1), n, stream=stream)


# ---- check and time ----------------------------------------------------------------------------------------------

# n, k, rows, n_used, experts: experts without rows, an expert for all rows, tiles of every height.
CASES = [(1, 32, 1, 1, 1), (33, 96, 5, 2, 16), (130, 544, 40, 2, 2), (300, 64, 70, 8, 16), (257, 320, 150, 2, 4)]
FORMAT_CASES = [(1, 1, 2, 1, 3), (130, 2, 9, 4, 8)]  # n, blocks of the file in a row of w, rows, n_used, experts
COMBINED = [(1, 4, 1, False), (5, 36, 2, True), (3, 1028, 8, True), (70, 2048, 8, False)]  # rows, n, n_used, is_shared


def random_choice(rng, n_rows, n_used, n_experts):
    """Experts of each row, all different, int32 [n_rows, n_used]; the first ones more often than the last."""
    keys = rng.random((n_rows, n_experts)) * np.linspace(0.5, 1.0, n_experts)
    return np.argsort(keys, axis=1)[:, :n_used].astype(np.int32)


def upload_groups(card, experts, n_experts, rows):
    """(groups with tiles of `rows` rows, their order on the host) of int32 experts [n_rows, n_used]. Unused entries of
    the list of tiles are -1."""
    order, position, tiles = group_reference(experts, n_experts, rows)
    room = np.full((most_tiles(experts.size, 1, n_experts, rows), 3), -1, np.int32)
    room[:len(tiles)] = tiles
    return Groups(*map(card.upload, (order, position, room, np.array([len(tiles)], np.int32)))), order


def place_experts(card, home, n, slots):
    """Experts, of which number e lies in slot slots[e] of the home; -1: it is out of reach."""
    w = Experts(home, n, card.alloc((len(slots), 2), np.uint64))
    card.copy_in(w.places, np.array([w.addresses(slot) if slot >= 0 else (0, 0) for slot in slots], np.uint64))
    return w


def random_slots(rng, n_experts):
    """Slots in random order; of four experts or more, one is out of reach."""
    slots = rng.permutation(n_experts)
    if n_experts > 3:
        slots[rng.integers(n_experts)] = -1
    return slots


def check(card, n, k, n_rows, n_used, n_experts, *, format=FORMATS["Q8_0"], from_pairs=False, choose=random_choice,
          tiles=None):
    """Multiplies with random experts in random slots, and returns the largest error as a fraction of what rounding may
    do, as in q8_gemm.check. from_pairs: x has a row for each sorted position. choose: gives the experts of each row.
    tiles: as for `expert_gemm`."""
    rng = np.random.default_rng((n, k, n_rows))
    slots, experts = random_slots(rng, n_experts), choose(rng, n_rows, n_used, n_experts)
    tiles = tiles or tiles_for(experts.size, n_experts)
    groups, order = upload_groups(card, experts, n_experts, tiles.rows)
    raw = random_raw(rng, format, n_experts * n, k)
    xq, xd = random_activations(rng, experts.size if from_pairs else n_rows, k)
    home = Matrix(format.name, n_experts * n, k, *on_card(card, format, raw, n_experts * n, k))
    y = card.alloc((experts.size + 1, n + 3), np.float32)  # with columns before and after, and a row too many
    card.poison(y)
    expert_gemm(card, y.reshape(-1)[1:], n + 3, place_experts(card, home, n, slots),
                Quantized(card.upload(xq), card.upload(xd)), groups, experts.size, None if from_pairs else n_used,
                tiles=tiles)
    y, error, raw = card.download(y), 0.0, raw.reshape(n_experts, -1, raw.shape[-1])
    for expert, slot in enumerate(slots):
        here = np.flatnonzero(experts.reshape(-1)[order] == expert)
        if slot >= 0 and len(here):
            source = here if from_pairs else order[here] // n_used
            want, magnitude = product_reference(format, raw[slot], xq[source], xd[source])
            bound = (k // BLOCK * format.terms_per_block + 2) * 2.0**-24 * magnitude
            error = max(error, (abs(y[here, 1:n + 1] - want) / bound).max())
            y[here, 1:n + 1] = np.nan
    assert np.isnan(y).all(), "wrote elsewhere"
    assert error <= 1
    return error


def check_floats(card, case, kind, decodes, from_pairs=False):
    """The same for experts of floats. case: one of CASES; kind: np.float32, np.float16 or np.uint16 (bfloat16). The
    bits must be those of the plain products."""
    n, k, n_rows, n_used, n_experts = case
    rng = np.random.default_rng((n, k, n_rows))
    slots, experts = random_slots(rng, n_experts), random_choice(rng, n_rows, n_used, n_experts)
    groups, order = upload_groups(card, experts, n_experts, tiles_for(experts.size, n_experts).rows)
    if decodes:
        order = np.arange(experts.size)
    x = rng.standard_normal((experts.size if from_pairs else n_rows, k), np.float32)
    home = float_matmul.upload_matrix(card, float_matmul.random_weights(rng, kind, n_experts * n, k))
    w, y = place_experts(card, home, n, slots), card.alloc((experts.size + 1, n + 3), np.float32)
    card.poison(y)
    to = card, y.reshape(-1)[1:], n + 3, w, card.upload(x)
    if decodes:
        expert_gemv_float(*to, Choice(card.upload(experts), None), n_rows, from_pairs)
    else:
        expert_gemm_float(*to, groups, experts.size, None if from_pairs else n_used)
    y, multiply = card.download(y), float_matmul.gemv_float if decodes else float_matmul.gemm_float
    for expert, slot in enumerate(slots):
        here = np.flatnonzero(experts.reshape(-1)[order] == expert)
        if slot >= 0 and len(here):
            want, source = card.alloc((len(here), n), np.float32), here if from_pairs else order[here] // n_used
            multiply(card, want, n, w.slot(slot), card.upload(x[source]), len(here))
            np.testing.assert_array_equal(y[here, 1:n + 1], card.download(want))
            y[here, 1:n + 1] = np.nan
    assert np.isnan(y).all(), "wrote elsewhere"
    return 0.0


def check_combine(card, n_rows, n, n_used, is_shared):
    """The sum must have the reference's bits."""
    rng = np.random.default_rng((n_rows, n))
    position = rng.permutation(n_rows * n_used).astype(np.int32).reshape(n_rows, n_used)
    y, x = (rng.standard_normal((rows, n), np.float32) for rows in (position.size, n_rows + 1))
    weights, shared = rng.random((n_rows, n_used + 1), np.float32), rng.standard_normal((n_rows, n), np.float32)
    got, choice = card.upload(x), Choice(card.upload(np.zeros_like(position)), card.upload(weights))
    groups = Groups(None, card.upload(position.reshape(-1)), None, None)
    combine(card, got[:n_rows], card.upload(y), choice, groups, card.upload(shared) if is_shared else None, n_rows)
    x[:n_rows] = combine_reference(x[:n_rows], y, position, weights, shared if is_shared else None)
    np.testing.assert_array_equal(card.download(got), x)
    return 0.0


def cases(card):
    """The checks, then times."""
    for case in CASES:
        n, k, n_rows, n_used, n_experts = case
        for from_pairs, tiles in itertools.product((False, True), both_tiles(card, n_rows * n_used, n_experts)):
            yield Case(f"{n} x {k}, {n_rows} rows, {n_used} of {n_experts} experts{', from pairs' * from_pairs}, "
                       f"{tiles.pipe}", partial(check, card, *case, from_pairs=from_pairs, tiles=tiles))
        for kind in WEIGHT_AT:
            for decodes in False, True:
                yield Case("{} x {}, {} rows, {} of {} experts".format(*case), partial(
                    check_floats, card, case, kind, decodes))
    for name, format in FORMATS.items():
        for n, blocks, n_rows, n_used, n_experts in FORMAT_CASES:
            case = n, blocks * format.file_block, n_rows, n_used, n_experts
            for tiles in both_tiles(card, n_rows * n_used, n_experts):
                yield Case(f"{n} x {case[1]}, {name}, {tiles.pipe}", partial(check, card, *case, format=format,
                                                                             tiles=tiles))
    for case in COMBINED:
        yield Case("sum of {} rows x {}, {} experts, shared: {}".format(*case), partial(check_combine, card, *case))
    n_experts = 256 if card.kind == "cuda" else 16
    for n, k, n_used in (1024, 2048, 8), (2048, 512, None):
        for rows in (297, 4620) if card.kind == "cuda" else (16, 64):
            for name in "Q8_0", "Q4_K":
                for tiles in both_tiles(card, 8 * rows, n_experts):
                    yield timed(card, n, k, rows, n_used, n_experts, FORMATS[name], tiles)
    for rows in 297, 4620:
        yield timed_sum(card, rows, 2048, 8)


def both_tiles(card, n_pairs, n_experts):
    """The Tiles by dp4a, and those by tensor cores where the card has them."""
    instruction = tensor_gemm.instruction_of(card)
    return [tiles_for(n_pairs, n_experts, each) for each in dict.fromkeys((None, instruction))]


def timed(card, n, k, n_rows, n_used, n_experts, format, tiles):
    """8 experts per row; without n_used, x has a row for each pair."""
    experts = random_choice(np.random.default_rng(n_rows), n_rows, 8, n_experts)
    groups, _ = upload_groups(card, experts, n_experts, tiles.rows)
    home = Matrix(format.name, n_experts * n, k, *(card.zeros(*array) for array in format.arrays(n_experts * n, k)))
    w = place_experts(card, home, n, np.arange(n_experts))
    rows = n_rows if n_used else experts.size
    x = Quantized(card.zeros((rows, k), np.int8), card.zeros((rows, k // BLOCK), np.float32))
    y = card.alloc((experts.size, n), np.float32)
    return Case(f"{tiles.pipe} {format.name}, {n} x {k}, {n_rows} rows", launch=partial(
        expert_gemm, card, y, n, w, x, groups, experts.size, n_used, tiles=tiles),
        n_bytes=sum(a.nbytes for a in (home.values, home.scales, *x, y)), n_ops=2 * n * k * experts.size, pipe="dp4a")


def timed_sum(card, n_rows, n, n_used):
    position = np.random.default_rng(0).permutation(n_rows * n_used).astype(np.int32)
    x, y, shared = (card.zeros((rows, n), np.float32) for rows in (n_rows, n_rows * n_used, n_rows))
    choice = Choice(card.zeros((n_rows, n_used), np.int32), card.zeros((n_rows, n_used + 1), np.float32))
    return Case(f"time of the sum of {n_rows} x {n}", n_bytes=y.nbytes + shared.nbytes + 2 * x.nbytes, launch=partial(
        combine, card, x, y, choice, Groups(None, card.upload(position), None, None), shared, n_rows))


if __name__ == "__main__":
    main("Products of experts", cases)
