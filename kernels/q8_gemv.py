"""Matrix x vector products for decoding: quantised weights times int8 activations.

    gemv               y[c, i] = sum over blocks b of 32:  dot(wq[i, b], xq[c, b]) * (wd[i, b] * xd[c, b])
                                                                       (+ y[c, i] with `add`)
    norm_gemv          gemv of u, the quantised RMSNorm of x: the bits of rms_norm_quantize followed by gemv
    norm_gemv_swiglu   quantised silu(gate . u) * (up . u): the bits of norm_gemv followed by swiglu_quantize

    wq  int8    [n, k]         wd  float16 [n, k / 32]        Q8_0; other formats are in kernels/quant_gemv.py
    xq  int8    [columns, k]   xd  float32 [columns, k / 32]  of kernels/quantize.py; a column is one activation vector
    x   float32 [columns, k]   y   float32 [columns, stride]  k a multiple of 32, n and columns any, n * k below 2**32

A warp multiplies a few rows of w by a few columns, along k in tiles of 32 blocks:

        lane             0           1           2           3       ...    31
        first 16      first half  second half  first half  second half
        blocks        |      block 0       |  |      block 1       |        block 15
        the others    |      block 16      |  |      block 17      |        block 31
        its block     0           16           1           17        ...    31

A lane loads 16 bytes of each part and multiplies two half blocks. It gives one of the two sums to its neighbour and
gets the other half of its own block. So loads are coalesced, and the sum of a whole block is exact. What follows the
last tile goes in steps of 8 blocks, four lanes for each. The order of additions is fixed, so the bits of y[c, i] depend
neither on n nor on the other columns nor on the card:

    chain:  block b belongs to chain b mod 32, which adds its blocks one after the other:
            acc = fma(float(dot of 32), wd * xd, acc); the dot is exact, by dp4a
    tree:   t_w = ((chain w + chain w + 8) + chain w + 16) + chain w + 24 for w < 8, then y = the sum of t by pairs that
            are 4, 2 and 1 apart; with `add`, one more rounded addition

`tree_reference` computes these bits in NumPy. Kernels for more columns may divide k otherwise and have the same bits.

  * A launch has at most one block of threads per SM, so the norm is computed once per SM. Each warp has a contiguous
    range of rows; two ranges differ by one group (Shape.rows rows) at most.
  * Each warp keeps the loads of its next tiles in flight, in a ring of registers: when a tile has been multiplied, its
    registers are loaded again. The ring is filled before the norm is computed and before x is waited for.
  * SwiGLU: a warp takes the same rows of gate and of up. 32 outputs, one block of the quantisation, meet in shared
    memory; two buffers alternate, so that one barrier per 32 outputs is enough.
  * Warps know their number from a shuffle (`warp_number`), but not those of packed formats that compute a norm: it
    takes a register, and they have none left on sm_70.
  * Many columns: a team of 2 or 4 warps takes the same rows, each warp its part of the columns (see `_split`).
  * Weights bypass the L1 cache, which holds x. With packed formats a single column is in shared memory, in planes.

Pipe: dp4a, but bound by memory: 1.06 n k bytes and n k columns / 4 dp4a per call. While a CMP 100-210 loads a word of
weights, it has time for 27 dp4a; eight columns need 8 dp4a and 6 float operations, so memory stays the bound.

Measurements, and which rings were tried: benchmarks/results.md, section q8_gemv.
"""

import math
from collections import namedtuple
from functools import cache, partial

import numpy as np
from numba import cuda
from numba.types import float32, int8, int32, uint16, uint32

from kernels.bench import Case, main
from kernels.compile import launches_overlap
from kernels.decode_tile import takes, tile_gemv, tile_gemv_swiglu
from kernels.formats import BLOCK, as_words
from kernels.formats.format import no_book
from kernels.intrinsics import (BIAS_WORD, dp4a, float_as_word, half_to_float, let_next_begin, load_words2,
                                load_words4, store_word, store_words4, stream_words2, stream_words4, unbias,
                                wait_for_previous, warp_number, word_sum)
from kernels.norm import (MAX_WARPS, NormInput, hold_weights, norm_quantizer, rms_norm_quantize,
                          store_quantized)
from kernels.operands import Matrix, Quantized
from kernels.quantize import block_scale, quantize_word
from kernels.swiglu import finish_unit, swiglu_quantize

MAX_COLUMNS = 16  # most columns of one launch
FEW_WARPS = 16  # warps of a block of threads, if there is at most one row for each of them
LONG = 8  # with so many tiles of a row or more, 3 and 4 columns get two rows instead of four, if rows are few
WIDE_ROWS = 256  # with so many rows per SM or more, a warp takes 8 columns: 16 warps then have 4 groups of 4 rows
MAX_FUSED = 16384  # longest column whose norm is computed inside the product
MAX_PLANES = 20480  # longest column in planes; `down` of a 27B has 17,408 values
TILE = 32  # blocks of a row that a warp multiplies at once, and chains of the tree
PLANE, SUMS = MAX_PLANES // 2, MAX_PLANES // BLOCK  # where the second plane starts in xq, and the sums in xd
IN_PLANES = 2 * SUMS  # floats of xd in planes
HELD = 2, 4  # norm weights that a lane holds in registers: 8, so 32 warps hold up to 8,192
SPARE, LEAST = 0.2, 0.6  # see `_n_blocks`: SPARE is a share of a round of warps, LEAST a share of the SMs
H_SHAPE = 2, 2, MAX_COLUMNS * BLOCK  # SwiGLU's sums in shared memory: buffer, gate or up, output of a column
H_OF_ONE = 2, 2, BLOCK


def q8_reference(wq, wd, xq, xd):
    """float64 y [columns, n] by the formula above, without its order."""
    w = wq.reshape(len(wq), -1, BLOCK) * wd.astype(np.float64)[:, :, None]
    x = xq.reshape(len(xq), -1, BLOCK) * xd.astype(np.float64)[:, :, None]
    return x.reshape(xq.shape) @ w.reshape(wq.shape).T


def fma_reference(a, b, c):
    """float32 a * b + c, rounded once, for finite numbers: float64 holds the product exactly, and its sum, if inexact,
    is made odd in its last bit, so that rounding it to float32 cannot meet a tie that is none."""
    product, c = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    is_even = total.view(np.int64) & 1 == 0
    neighbour = np.nextafter(total, np.copysign(np.inf, error))
    return np.where((error != 0) & is_even, neighbour, total).astype(np.float32)


def tree_sum(chains):
    """Adds float32 [..., 32], a number of each chain, in the order of the kernels."""
    c = chains.reshape(*chains.shape[:-1], 4, 8)
    t = ((c[..., 0, :] + c[..., 1, :]) + c[..., 2, :]) + c[..., 3, :]
    t = t[..., :4] + t[..., 4:]
    t = t[..., :2] + t[..., 2:]
    return t[..., 0] + t[..., 1]


def tree_reference(wq, wd, xq, xd):
    """float32 y [columns, n], bit for bit as the kernels compute it."""
    chains = np.zeros((len(xq), len(wq), 32), np.float32)
    for block in range(wd.shape[1]):
        part = slice(BLOCK * block, BLOCK * block + BLOCK)
        dot = xq[:, part].astype(np.float32) @ wq[:, part].astype(np.float32).T  # integers below 2**24: exact
        scale = xd[:, block, None] * wd[:, block].astype(np.float32)
        chains[:, :, block % 32] = fma_reference(dot, scale, chains[:, :, block % 32])
    return tree_sum(chains)


# ---- weight formats ----------------------------------------------------------------------------------------

# The kernels below know a weight format only by its Decoder. A tile has 32 blocks of a row; each lane adds the products
# of one of them, and of the blocks that follow it at a distance of 32: a chain.
#
#   planes    whether it reads a single column in planes
#   words     the uint32, weights and scales, that a lane holds of a tile
#   least     the fewest blocks of a last tile for which `fetch` and `multiply` can do; what is left is for `rest`
#   table     whether it looks codes up in a table, which takes registers
#   place     device function (lane): which of the 32 blocks is the lane's, which is also the number of its chain
#   apart     of the lanes whose chains are 1, 2, 4, 8 and 16 apart: the distance (for shuffles by xor)
#   fetch     (whole) -> device function (raw, piece, row, block, k, lane, wq, wd): loads the lane's words of the tile
#             that starts at `block` of row `row` into raw[piece]; it computes nothing
#   multiply  (rows, columns, planes, whole) -> device function (acc, raw, piece, block, k, lane, x_starts, xq, xd,
#             book): acc[r, c] += the product of the lane's block in raw[piece + r] and of the same block of column c
#   narrow    (rows) -> device functions for tiles that are two rows of 16 blocks, next to each other, and one column:
#             fetch (raw, piece, row, lane, wq, wd) loads the lane's words of rows row and row + 1; multiply (acc, raw,
#             lane, x_starts, xq, xd, book): acc[r, 0] += the product in raw[r]. Bit 4 of the lane's place says which of
#             the two rows its block is in, the other bits which block
#   rest      (rows, columns, planes) -> device function (acc, w_rows, block, k, lane, wq, wd, x_starts, xq, xd, book):
#             acc[r, c] += what follows from `block` on, less than a tile, of row w_rows[r] and column c
#   load_book as in a Format: gives the `book`
#
# whole: whether rows are whole tiles. raw: local uint32 [pieces, words]. acc: local float32 [rows, columns]. w_rows:
# local uint32 [rows]. x_starts: local uint32 [columns], the block at which a column starts in xq and xd, in global or
# shared memory.
#
# "In planes" is how a column lies in shared memory for packed formats. xq has the first 16 bytes of every block, and
# from PLANE on the second 16 bytes of every block. So if each lane takes a whole block, neighbouring lanes read
# neighbouring 16 bytes in both planes, without bank conflicts. xd has the scales of the blocks and, from SUMS on, the
# scale times the sum of the 32 integers of each block, which formats with a minimum need.

Decoder = namedtuple("Decoder", "planes words least table place apart fetch multiply narrow rest load_book")
BIAS_HALF, BIAS_QUARTER = BIAS_WORD // 2, BIAS_WORD // 4  # sums that start here make one that started at BIAS_WORD


@cuda.jit(device=True, forceinline=True)
def place_q8(lane):
    """Lane 2 j has block j of a tile, lane 2 j + 1 has block 16 + j."""
    return uint32(uint32(lane >> uint32(1)) | uint32(uint32(lane & uint32(1)) << uint32(4)))


def fetch_q8(whole):
    @cuda.jit(device=True, forceinline=True)
    def fetch(raw, piece, row, block, k, lane, wq, wd):
        blocks, place = uint32(k >> uint32(5)), place_q8(lane)
        at = uint32(row * blocks + block)
        byte = uint32(uint32(at << uint32(5)) + uint32(lane << uint32(4)))
        raw[piece, 0], raw[piece, 1], raw[piece, 2], raw[piece, 3] = stream_words4(wq, byte)
        if whole or uint32(block + uint32(TILE)) <= blocks:
            byte = uint32(byte + uint32(512))
            raw[piece, 4], raw[piece, 5], raw[piece, 6], raw[piece, 7] = stream_words4(wq, byte)
        else:
            place = uint32(place & uint32(15))
        raw[piece, 8] = uint32(wd[uint32(at + place)])

    return fetch


def multiply_q8(rows, columns, planes, whole, narrow=False):
    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, raw, piece, block, k, lane, x_starts, xq, xd, book):
        """A lane multiplies halves of two blocks, keeps one of the sums and exchanges the other for the second half of
        its own block. Where the tile ends after 16 blocks, lanes of the others add nothing. A narrow tile has two
        rows of 16 blocks, for both of which x is the same."""
        x = cuda.local.array(8, uint32)
        place, is_odd = place_q8(lane), (lane & uint32(1)) != uint32(0)
        full = whole or uint32(block + uint32(TILE)) <= uint32(k >> uint32(5))
        adds = full or not is_odd
        x_place = place if full and not narrow else uint32(place & uint32(15))
        for c in range(columns):
            at = uint32(x_starts[c] + block)
            byte = uint32(uint32(at << uint32(5)) + uint32(lane << uint32(4)))
            x[0], x[1], x[2], x[3] = load_words4(xq, byte)
            if narrow:
                x[4], x[5], x[6], x[7] = x[0], x[1], x[2], x[3]
            elif full:
                x[4], x[5], x[6], x[7] = load_words4(xq, uint32(byte + uint32(512)))
            x_scale = xd[uint32(at + x_place)]
            for r in range(rows):
                first, second = int32(BIAS_HALF), int32(BIAS_HALF)
                for i in range(4):
                    first = dp4a(raw[piece + r, i], x[i], first)
                    second = dp4a(raw[piece + r, 4 + i], x[4 + i], second)
                dot = second if is_odd else first
                dot = int32(dot + cuda.shfl_xor_sync(0xFFFFFFFF, first if is_odd else second, 1))
                scale = half_to_float(uint16(raw[piece + r, 8])) * x_scale
                total = cuda.fma(unbias(dot), scale, acc[r, c])
                acc[r, c] = total if adds else acc[r, c]

    return multiply


def narrow_q8(rows):
    """Two rows of 16 blocks lie in memory as one row of 32."""
    fetch_row, multiply_tiles = fetch_q8(True), multiply_q8(rows, 1, False, True, True)
    k = uint32(TILE * BLOCK)

    @cuda.jit(device=True, forceinline=True)
    def fetch(raw, piece, row, lane, wq, wd):
        fetch_row(raw, piece, uint32(row >> uint32(1)), uint32(0), k, lane, wq, wd)

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, raw, lane, x_starts, xq, xd, book):
        multiply_tiles(acc, raw, 0, uint32(0), k, lane, x_starts, xq, xd, book)

    return fetch, multiply


def rest_q8(rows, columns, planes):
    def eight(all_there):
        @cuda.jit(device=True, forceinline=True)
        def add_blocks(acc, w_rows, block, k, lane, wq, wd, x_starts, xq, xd):
            """The next 8 blocks, or what is left of them; 8 bytes per lane. The four sums of a block are added, and
            the lane that has its chain takes the sum."""
            blocks, place = uint32(k >> uint32(5)), place_q8(lane)
            here, its_block = uint32(lane << uint32(3)), uint32(place & uint32(7))
            loads = all_there or uint32(block + uint32(lane >> uint32(2))) < blocks
            adds = uint32(place >> uint32(3)) == uint32(uint32(block >> uint32(3)) & uint32(3))
            if not all_there:
                adds = adds and uint32(block + its_block) < blocks
                its_block = min(its_block, uint32(uint32(blocks - block) - uint32(1)))
            for r in range(rows):
                at = uint32(w_rows[r] * blocks + block)
                w0, w1 = uint32(0), uint32(0)
                if loads:
                    w0, w1 = stream_words2(wq, uint32(uint32(at << uint32(5)) + here))
                w_scale = half_to_float(wd[uint32(at + its_block)])
                for c in range(columns):
                    x_at = uint32(x_starts[c] + block)
                    x0, x1 = uint32(0), uint32(0)
                    if loads:
                        x0, x1 = load_words2(xq, uint32(uint32(x_at << uint32(5)) + here))
                    dot = dp4a(w1, x1, dp4a(w0, x0, int32(BIAS_QUARTER)))
                    dot = int32(dot + cuda.shfl_xor_sync(0xFFFFFFFF, dot, 1))
                    dot = int32(dot + cuda.shfl_xor_sync(0xFFFFFFFF, dot, 2))
                    dot = cuda.shfl_sync(0xFFFFFFFF, dot, uint32(uint32(place & uint32(7)) << uint32(2)))
                    total = cuda.fma(unbias(dot), w_scale * xd[uint32(x_at + its_block)], acc[r, c])
                    acc[r, c] = total if adds else acc[r, c]

        return add_blocks

    add_eight, add_last = eight(True), eight(False)

    @cuda.jit(device=True, forceinline=True)
    def rest(acc, w_rows, block, k, lane, wq, wd, x_starts, xq, xd, book):
        blocks = uint32(k >> uint32(5))
        while uint32(block + uint32(8)) <= blocks:
            add_eight(acc, w_rows, block, k, lane, wq, wd, x_starts, xq, xd)
            block = uint32(block + uint32(8))
        if block < blocks:
            add_last(acc, w_rows, block, k, lane, wq, wd, x_starts, xq, xd)

    return rest


Q8 = Decoder(False, 9, 16, False, place_q8, (2, 4, 8, 16, 1), fetch_q8, multiply_q8, narrow_q8, rest_q8, no_book)


# ---- x in planes -------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def in_plane(at):
    """The place of byte `at` of a column in planes."""
    half = uint32(uint32(at >> uint32(4)) & uint32(1))
    return uint32(uint32(uint32(at >> uint32(5)) << uint32(4)) + uint32(at & uint32(15)) + half * uint32(PLANE))


@cuda.jit(device=True, forceinline=True)
def store_scale(d, block, scale, total):
    d[block], d[uint32(block + uint32(SUMS))] = scale, scale * float32(total)


@cuda.jit(device=True, forceinline=True)
def store_in_planes(q, d, at, inside, y0, y1, y2, y3):
    """Does what `store_quantized` (kernels/norm.py) does, but stores in planes."""
    w0, w1, w2, w3 = float_as_word(y0), float_as_word(y1), float_as_word(y2), float_as_word(y3)
    scale = block_scale(w0, w1, w2, w3)
    word = quantize_word(w0, w1, w2, w3, scale)
    total = word_sum(word, int32(0))
    total = int32(total + cuda.shfl_xor_sync(0xFFFFFFFF, total, 4))
    total = int32(total + cuda.shfl_xor_sync(0xFFFFFFFF, total, 2))
    total = int32(total + cuda.shfl_xor_sync(0xFFFFFFFF, total, 1))
    if inside:
        store_word(q, in_plane(at), word)
        if at & uint32(31) == uint32(0):
            store_scale(d, uint32(at >> uint32(5)), scale, total)


@cuda.jit(device=True, forceinline=True)
def load_half(xq, xd, i, inside):
    """Half block i of a column and the scale of its block, or zeros where not `inside`."""
    w0, w1, w2, w3, scale = uint32(0), uint32(0), uint32(0), uint32(0), float32(0)
    if inside:
        w0, w1, w2, w3 = load_words4(xq, uint32(i << uint32(4)))
        scale = xd[uint32(i >> uint32(1))]
    return w0, w1, w2, w3, scale


@cuda.jit(device=True, forceinline=True)
def store_half(q, d, i, inside, w0, w1, w2, w3, scale):
    """Stores half block i and its scale in planes; all lanes call, since two of them exchange their sums."""
    total = word_sum(w3, word_sum(w2, word_sum(w1, word_sum(w0, int32(0)))))
    total = int32(total + cuda.shfl_xor_sync(0xFFFFFFFF, total, 1))
    if inside:
        store_words4(q, in_plane(uint32(i << uint32(4))), w0, w1, w2, w3)
        if i & uint32(1) == uint32(0):
            store_scale(d, uint32(i >> uint32(1)), scale, total)


@cuda.jit(device=True, forceinline=True)
def copy_into_planes(q, d, xq, xd, start, k, thread, threads):
    """Copies the column of (xq, xd) that starts at block `start` into shared memory (q, d), in planes. The whole block
    of threads calls; each thread has the loads of two half blocks in flight."""
    halves, i, first = uint32(k >> uint32(4)), thread, uint32(thread & uint32(0xFFFFFFE0))  # first: of the warp
    skipped = uint32(start << uint32(1))
    while first < halves:
        j = uint32(i + threads)
        a0, a1, a2, a3, a = load_half(xq, xd, uint32(skipped + i), i < halves)
        b0, b1, b2, b3, b = load_half(xq, xd, uint32(skipped + j), j < halves)
        store_half(q, d, i, i < halves, a0, a1, a2, a3, a)
        store_half(q, d, j, j < halves, b0, b1, b2, b3, b)
        i, first = uint32(j + threads), uint32(first + threads + threads)


# ---- parts of the kernels ----------------------------------------------------------------------------------

def ring(decoder, rows, columns, shape, planes):
    """Device functions (start, multiply_rows) with which a warp multiplies `rows` rows of w by `columns` columns. The
    loads of the next `depth` tiles are always in flight, into registers raw [rows * depth, words]. With depth 0 there
    is no ring: a tile is loaded where it is multiplied. A last tile that is not whole goes through the ring, too, if it
    has the blocks that the decoder needs for that."""
    depth, whole, least = shape.depth, shape.whole, decoder.least
    span, single = TILE * depth, depth == 1  # blocks in the ring
    in_tiles = whole or depth == 0
    fetch, multiply = decoder.fetch(in_tiles), decoder.multiply(rows, columns, planes, in_tiles)
    rest = decoder.rest(rows, columns, planes)
    spare_shape, beyond = (rows, decoder.words), 0 if in_tiles else TILE - least

    @cuda.jit(device=True, forceinline=True)
    def multiply_from(acc, w_rows, block, k, lane, wq, wd, x_starts, xq, xd, book):
        """acc += the products from `block` to the end of the rows; none of these weights has been loaded yet."""
        spare, blocks = cuda.local.array(spare_shape, uint32), uint32(k >> uint32(5))
        while not single and uint32(block + uint32(TILE)) <= uint32(blocks + uint32(beyond)):
            for r in range(rows):
                fetch(spare, r, w_rows[r], block, k, lane, wq, wd)
            multiply(acc, spare, 0, block, k, lane, x_starts, xq, xd, book)
            block = uint32(block + uint32(TILE))
        if not whole:
            block = min(block, uint32(blocks - blocks % uint32(least)))
            if block < blocks:
                rest(acc, w_rows, block, k, lane, wq, wd, x_starts, xq, xd, book)

    @cuda.jit(device=True, forceinline=True)
    def start_nothing(raw, w_rows, k, lane, wq, wd):
        pass

    @cuda.jit(device=True, forceinline=True)
    def multiply_at_once(acc, raw, w_rows, next_rows, more, k, lane, wq, wd, x_starts, xq, xd, book):
        for r in range(rows):
            for c in range(columns):
                acc[r, c] = float32(0.0)
        multiply_from(acc, w_rows, uint32(0), k, lane, wq, wd, x_starts, xq, xd, book)

    @cuda.jit(device=True, forceinline=True)
    def start(raw, w_rows, k, lane, wq, wd):
        """Fills the ring: starts the loads of the first tiles of rows w_rows."""
        if uint32(uint32(k >> uint32(5)) + uint32(beyond)) >= uint32(span):
            for s in range(depth):
                for r in range(rows):
                    fetch(raw, s * rows + r, w_rows[r], uint32(s * TILE), k, lane, wq, wd)
        # Without this barrier the assembler, to save registers, moves each load to where its words are used.
        cuda.syncwarp()

    @cuda.jit(device=True, forceinline=True)
    def multiply_rows(acc, raw, w_rows, next_rows, more, k, lane, wq, wd, x_starts, xq, xd, book):
        """acc <- the lane's share of the products of rows w_rows, whose first tiles are in the ring. If there are
        `more` rows, it leaves the first tiles of next_rows in the ring."""
        blocks = uint32(uint32(k >> uint32(5)) + uint32(beyond))
        for r in range(rows):
            for c in range(columns):
                acc[r, c] = float32(0.0)
        rows_after = cuda.local.array(rows, uint32)
        block = uint32(0)
        while uint32(block + uint32(span)) <= blocks:
            after = uint32(block + uint32(span))
            is_last = uint32(after + uint32(span)) > blocks
            wanted = more or not is_last
            for r in range(rows):
                rows_after[r] = next_rows[r] if is_last else w_rows[r]
            after = uint32(0) if is_last else after
            for s in range(depth):
                multiply(acc, raw, s * rows, uint32(block + uint32(s * TILE)), k, lane, x_starts, xq, xd, book)
                if wanted:
                    at = uint32(after + uint32(s * TILE))
                    for r in range(rows):
                        fetch(raw, s * rows + r, rows_after[r], at, k, lane, wq, wd)
            block = uint32(block + uint32(span))
        multiply_from(acc, w_rows, block, k, lane, wq, wd, x_starts, xq, xd, book)

    return (start, multiply_rows) if depth else (start_nothing, multiply_at_once)


def tree(count, apart):
    """Device function (values, place) that adds each of `count` values over the 32 chains, in the order of `tree_sum`.
    `place` is the lane's chain, `apart` is that of a Decoder. The sum of a value is what the lane of chain
    value << (5 - bits) returns, bits = log2 of count rounded up; other lanes may return what is no sum.

    In every round a lane gives half of its values to another lane and keeps the other half, of which it then has twice
    as many chains. After two rounds it has four chains of a value, 8 apart, and adds them one after the other. The
    others are added pair by pair, as soon as they meet."""
    size = 1 << (count - 1).bit_length()  # with zeros behind the values
    half, quarter, far, near = size // 2, max(size // 4, 1), apart[4], apart[3]
    add_pairs = butterfly(quarter, apart, 4)

    @cuda.jit(device=True, forceinline=True)
    def add_one(values, place):
        x = values[0]
        a, b = cuda.shfl_xor_sync(0xFFFFFFFF, x, near), cuda.shfl_xor_sync(0xFFFFFFFF, x, far)
        return add_pairs((((x + a) + b) + cuda.shfl_xor_sync(0xFFFFFFFF, x, near ^ far),), place)

    @cuda.jit(device=True, forceinline=True)
    def add_many(values, place):
        low, high = cuda.local.array(half, float32), cuda.local.array(half, float32)  # chains below 16, and from 16 on
        upper = (place & uint32(16)) != uint32(0)
        for i in range(half):
            a, b = values[i], values[half + i] if half + i < count else float32(0.0)
            kept, got = b if upper else a, cuda.shfl_xor_sync(0xFFFFFFFF, a if upper else b, far)
            low[i], high[i] = got if upper else kept, kept if upper else got
        sums = cuda.local.array(quarter, float32)
        upper = (place & uint32(8)) != uint32(0)
        for i in range(quarter):
            a, b, c, d = low[i], low[half - quarter + i], high[i], high[half - quarter + i]
            first = (b if upper else a) + cuda.shfl_xor_sync(0xFFFFFFFF, a if upper else b, near)
            kept, got = d if upper else c, cuda.shfl_xor_sync(0xFFFFFFFF, c if upper else d, near)
            sums[i] = (first + (got if upper else kept)) + (kept if upper else got)
        return add_pairs(sums, place)

    return add_many if count > 1 else add_one


def narrow_tree(count, apart):
    """`tree` for narrow tiles: a value is the sum over 16 chains, the others are empty. count: a power of two up to 16,
    of which each lane has the chain of its place in one of two rows. The sums of the row of bit 4 of the place are on
    the lanes of chains value << (4 - bits)."""
    half, near, add_pairs = count // 2, apart[3], butterfly(max(count // 2, 1), apart, 4)

    @cuda.jit(device=True, forceinline=True)
    def add_one(values, place):
        return add_pairs(((values[0] + cuda.shfl_xor_sync(0xFFFFFFFF, values[0], near)) + float32(0.0),), place)

    @cuda.jit(device=True, forceinline=True)
    def add_many(values, place):
        kept = cuda.local.array(half, float32)
        upper = (place & uint32(8)) != uint32(0)
        for i in range(half):
            low, high = values[i], values[half + i]
            got = cuda.shfl_xor_sync(0xFFFFFFFF, low if upper else high, near)
            kept[i] = ((high if upper else low) + got) + float32(0.0)  # the empty chains: they make -0 a 0
        return add_pairs(kept, place)

    return add_many if half else add_one


def butterfly(count, apart, distance):
    """Device function (values, place): the rounds of `tree` from chains `distance` apart on."""
    half, lanes = count // 2, apart[distance.bit_length() - 1]
    rest = butterfly(max(half, 1), apart, distance // 2) if distance else None

    @cuda.jit(device=True, forceinline=True)
    def add_alone(values, place):
        x = values[0]
        return rest((x + cuda.shfl_xor_sync(0xFFFFFFFF, x, lanes),), place)

    @cuda.jit(device=True, forceinline=True)
    def add_halves(values, place):
        kept = cuda.local.array(half, float32)
        upper = (place & uint32(distance)) != uint32(0)
        for i in range(half):
            low, high = values[i], values[half + i]
            sent = low if upper else high
            kept[i] = (high if upper else low) + cuda.shfl_xor_sync(0xFFFFFFFF, sent, lanes)
        return rest(kept, place)

    @cuda.jit(device=True, forceinline=True)
    def only(values, place):
        return values[0]

    return only if not distance else add_halves if half else add_alone


# ---- kernels -----------------------------------------------------------------------------------------------

# rows: of w that a warp takes at once. depth: tiles of each of these rows in the warp's ring. warps: of a block of
# threads, a power of two; for SwiGLU, rows / 2 * warps must divide 32, the outputs of a unit (see `swiglu_kernel`).
# whole: whether rows are whole tiles.
Shape = namedtuple("Shape", "rows depth warps whole")


def shape_for(card, decoder, columns, k, in_pairs=False, n=math.inf, teams=1):
    """The Shape for warps that take `columns` columns of k values. in_pairs: for SwiGLU. n: rows of w. teams: warps of
    a team.

    As many tiles are in flight as the registers of a thread hold. Tiles that are left over at the end of a row are not
    loaded ahead. So for one column, not in pairs, with an even number of tiles in Q8_0, the ring has 2 tiles of one
    row. For packed formats of up to 6 words it has 4 if their number is a multiple of 4 or odd, or all if they are
    fewer. In all other cases one or two columns get two rows, with 2 tiles each or 1 if registers are short, and more
    columns 4 rows. In SwiGLU a table leaves registers for a second tile of up to 5 words. With Q8_0 and a row or less
    for each warp, warps take single rows and hold up to 4 of their tiles; with two rows or less, several columns get
    two rows with 2 tiles each, 3 and 4 columns only where rows are long. SwiGLU of two columns in Q8_0 gets these, too.
    On an emulated card there is no ring, since the CPU prefetches, and one column gets few warps, since each costs time
    at the barriers of the norm."""
    blocks = k // BLOCK
    whole = blocks % TILE == 0
    if card.kind == "emulated":
        return Shape(4 if in_pairs or columns > 2 else 2, 0, 16 if in_pairs or columns > 1 else 4, whole)
    tiles = (blocks + TILE - decoder.least) // TILE
    if decoder is Q8 and n <= FEW_WARPS * card.n_sms and tiles > 1:
        return Shape(1, min(tiles, 4), FEW_WARPS, whole)
    if decoder is Q8 and 1 < columns <= 4 and tiles >= (2 if columns == 2 else LONG):
        if n * teams <= 2 * FEW_WARPS * card.n_sms or in_pairs and columns == 2:
            return Shape(2, 2, FEW_WARPS, whole)
    if columns > 2:
        return Shape(4, 1, 16, whole)
    alone = columns == 1 and not in_pairs
    if decoder is Q8:
        return Shape(1, 2, 32, whole) if alone and tiles % 2 == 0 else Shape(2, 1, 32, whole)
    if alone and decoder.words <= 6 and (tiles % 4 == 0 or tiles % 2):
        return Shape(1, min(tiles, 4), 32, whole)
    room = decoder.words <= 5 if in_pairs and decoder.table else decoder.words <= 6 or columns == 2
    depth = 2 if tiles > 1 and room else 1
    return Shape(2, depth, 32 if columns == 1 else 16, whole)


def x_starts_of(columns):
    """Device function (x_starts, first, n_columns, k) that sets x_starts to the blocks at which `columns` columns from
    `first` on start. Columns past the last one are replaced by the last one; their results are not stored.
    """
    @cuda.jit(device=True, forceinline=True)
    def set_starts(x_starts, first, n_columns, k):
        for c in range(columns):
            column = min(uint32(first + uint32(c)), uint32(n_columns - uint32(1)))
            x_starts[c] = uint32(column * uint32(k >> uint32(5)))

    return set_starts


@cache
def gemv_kernel(decoder, columns, shape, fused, planes):
    """The kernel of y <- (y +) w . x. Two options for one column: `fused` replaces x by its quantised RMSNorm, `planes`
    puts x into planes. A team is 2**team_bits warps that take the same rows and `columns` columns each."""
    rows, depth, warps, _ = shape
    threads = 32 * warps
    (start, multiply_rows), load_book = ring(decoder, rows, columns, shape, planes), decoder.load_book
    quantize_norm = norm_quantizer(store_in_planes if planes else store_quantized)
    set_starts, count, place_of = x_starts_of(columns), rows * columns, decoder.place
    shift = 5 - (count - 1).bit_length()  # the sum of value v is on the lane of chain v << shift
    first_chain, warp_bits = (1 << shift) - 1, warps.bit_length() - 1
    sums, raw_shape = tree(count, decoder.apart), (max(rows * depth, 1), decoder.words)
    acc_shape = rows, columns

    @cuda.jit(device=True, forceinline=True)
    def share(team, teams_bits, each, extra):
        """The range (first, last + 1) of the groups of rows of a team. A block of threads has `each` consecutive
        groups, the first `extra` blocks one more, so a block touches few pages of memory. The 2**teams_bits teams of
        the block divide its groups in the same way."""
        block = uint32(cuda.blockIdx.x)
        here = uint32(each + (uint32(1) if block < extra else uint32(0)))
        for_each = uint32(here >> teams_bits)
        left = uint32(here - uint32(for_each << teams_bits))
        first = uint32(block * each + min(block, extra) + team * for_each + min(team, left))
        return first, uint32(first + for_each + (uint32(1) if team < left else uint32(0)))

    @cuda.jit(device=True, forceinline=True)
    def set_rows(w_rows, group, n):
        for r in range(rows):  # rows past the last one are replaced by the last one, and not stored
            w_rows[r] = min(uint32(group * uint32(rows) + uint32(r)), uint32(n - uint32(1)))

    @cuda.jit(device=True, forceinline=True)
    def work(raw, book, y, stride, wq, wd, xq, xd, n, k, add, lane, group, last, first_column, n_columns):
        acc, values = cuda.local.array(acc_shape, float32), cuda.local.array(count, float32)
        w_rows, next_rows = cuda.local.array(rows, uint32), cuda.local.array(rows, uint32)
        x_starts = cuda.local.array(columns, uint32)
        set_starts(x_starts, first_column, n_columns, k)
        place = place_of(lane)
        value = uint32(place >> uint32(shift))
        column = uint32(first_column + value % uint32(columns))
        while group < last:
            set_rows(w_rows, group, n)
            set_rows(next_rows, uint32(group + uint32(1)), n)
            row = uint32(group * uint32(rows) + value // uint32(columns))
            at = uint32(column * stride + row)
            stores = ((place & uint32(first_chain)) == uint32(0) and value < uint32(count) and row < n
                      and column < n_columns)
            before = float32(0.0)
            if add and stores:
                before = y[at]
            group = uint32(group + uint32(1))
            multiply_rows(acc, raw, w_rows, next_rows, group < last, k, lane, wq, wd, x_starts, xq, xd, book)
            for r in range(rows):
                for c in range(columns):
                    values[r * columns + c] = acc[r, c]
            total = sums(values, place)
            if stores:
                y[at] = before + total if add else total

    @cuda.jit(launch_bounds=(threads, 1))
    def gemv_kernel(y, stride, wq, wd, xq, xd, n, k, n_columns, team_bits, each, extra, add):
        let_next_begin()
        lane, warp = uint32(cuda.threadIdx.x), warp_number()
        raw, w_rows = cuda.local.array(raw_shape, uint32), cuda.local.array(rows, uint32)
        team = uint32(warp >> team_bits)
        group, last = share(team, uint32(uint32(warp_bits) - team_bits), each, extra)
        set_rows(w_rows, group, n)
        if group < last:
            start(raw, w_rows, k, lane, wq, wd)
        book = load_book(uint32(uint32(warp << uint32(5)) + lane), uint32(threads))
        wait_for_previous()
        first_column = uint32(uint32(warp - uint32(team << team_bits)) * uint32(columns))
        work(raw, book, y, stride, wq, wd, xq, xd, n, k, add, lane, group, last, first_column, n_columns)

    @cuda.jit(launch_bounds=(threads, 1))
    def planes_gemv_kernel(y, stride, wq, wd, xq, xd, n, k, n_columns, team_bits, each, extra, add):
        let_next_begin()
        q = cuda.shared.array(MAX_PLANES, int8, alignment=16)
        d = cuda.shared.array(IN_PLANES, float32)
        lane, warp = uint32(cuda.threadIdx.x), warp_number()
        raw, w_rows = cuda.local.array(raw_shape, uint32), cuda.local.array(rows, uint32)
        group, last = share(warp, uint32(warp_bits), each, extra)
        set_rows(w_rows, group, n)
        if group < last:
            start(raw, w_rows, k, lane, wq, wd)
        book = load_book(uint32(uint32(warp << uint32(5)) + lane), uint32(threads))
        wait_for_previous()
        thread = uint32(uint32(warp << uint32(5)) + lane)
        copy_into_planes(q, d, xq, xd, uint32(0), k, thread, uint32(threads))
        cuda.syncthreads()
        work(raw, book, y, stride, wq, wd, q, d, n, k, add, lane, group, last, uint32(0), uint32(1))

    @cuda.jit(launch_bounds=(threads, 1))
    def norm_gemv_kernel(y, stride, wq, wd, x, norm_w, eps, n, k, each, extra):
        let_next_begin()
        xq = cuda.shared.array(MAX_PLANES, int8, alignment=16)
        xd = cuda.shared.array(IN_PLANES, float32)
        partial = cuda.shared.array(MAX_WARPS, float32)
        lane, warp = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y) if planes else warp_number()
        raw, w_rows = cuda.local.array(raw_shape, uint32), cuda.local.array(rows, uint32)
        held = cuda.local.array(HELD, float32)
        hold_weights(held, norm_w, k, lane, warp, uint32(warps))  # first: behind the loads of the ring they would wait
        group, last = share(warp, uint32(warp_bits), each, extra)
        set_rows(w_rows, group, n)
        if group < last:
            start(raw, w_rows, k, lane, wq, wd)
        book = load_book(uint32(uint32(warp << uint32(5)) + lane), uint32(threads))
        wait_for_previous()
        quantize_norm(xq, xd, x, uint32(0), norm_w, held, k, eps, partial, lane, warp, uint32(warps))
        cuda.syncthreads()
        work(raw, book, y, stride, wq, wd, xq, xd, n, k, False, lane, group, last, uint32(0), uint32(1))

    return norm_gemv_kernel if fused else planes_gemv_kernel if planes else gemv_kernel


@cache
def swiglu_kernel(decoder, columns, shape, fused):
    """The kernel of (q, d) <- quantised silu(gate . x) * (up . x); with `fused`, for one column, x is replaced by its
    quantised RMSNorm. Teams are as in `gemv_kernel`. A block of threads makes units of 32 outputs: of each column one
    block of the quantisation. A warp has the same rows of gate and of up."""
    rows, depth, warps, _ = shape
    threads = 32 * warps
    pairs, place_of = rows // 2, decoder.place
    planes = fused and decoder.planes
    # One column of a packed format leaves no register for a number of the warp that the assembler knows.
    alone = columns == 1 and decoder.planes
    (start, multiply_rows), load_book = ring(decoder, rows, columns, shape, planes), decoder.load_book
    quantize_norm = norm_quantizer(store_in_planes if planes else store_quantized)
    set_starts, half = x_starts_of(columns), 1 << (pairs * columns - 1).bit_length()
    count = 2 * half  # values of gate, padded to a power of two, then those of up: their sums go to chains 16 .. 31
    shift = 5 - half.bit_length()
    first_chain = (1 << shift) - 1
    sums, raw_shape = tree(count, decoder.apart), (max(rows * depth, 1), decoder.words)
    acc_shape = rows, columns

    @cuda.jit(device=True, forceinline=True)
    def set_rows(w_rows, output, n):
        for p in range(pairs):
            w_rows[p], w_rows[pairs + p] = uint32(output + uint32(p)), uint32(n + output + uint32(p))

    @cuda.jit(device=True, forceinline=True)
    def work(raw, book, h, q, d, wq, wd, xq, xd, n, k, unit, last, lane, warp, team, teams, first_column, n_columns):
        acc, values = cuda.local.array(acc_shape, float32), cuda.local.array(count, float32)
        w_rows, next_rows = cuda.local.array(rows, uint32), cuda.local.array(rows, uint32)
        x_starts = cuda.local.array(columns, uint32)
        set_starts(x_starts, first_column, n_columns, k)
        for i in range(count):
            values[i] = float32(0.0)
        place = place_of(lane)
        part, value = uint32(place >> uint32(4)), uint32(uint32(place & uint32(15)) >> uint32(shift))
        column = uint32(first_column + value % uint32(columns))
        to = uint32(uint32(column << uint32(5)) + value // uint32(columns))
        stores = ((place & uint32(first_chain)) == uint32(0) and value < uint32(pairs * columns)
                  and column < n_columns)
        buffer, inside = uint32(0), uint32(team * uint32(pairs))
        while unit < last:
            next_inside, next_unit = uint32(inside + teams * uint32(pairs)), unit
            ends = next_inside >= uint32(BLOCK)
            if ends:
                next_inside, next_unit = uint32(team * uint32(pairs)), uint32(unit + uint32(1))
            set_rows(w_rows, uint32(uint32(unit << uint32(5)) + inside), n)
            set_rows(next_rows, uint32(uint32(next_unit << uint32(5)) + next_inside), n)
            multiply_rows(acc, raw, w_rows, next_rows, next_unit < last, k, lane, wq, wd, x_starts, xq, xd, book)
            for p in range(pairs):
                for c in range(columns):
                    values[p * columns + c] = acc[p, c]
                    values[half + p * columns + c] = acc[pairs + p, c]
            total = sums(values, place)
            if stores:
                h[buffer, part, uint32(to + inside)] = total
            if ends:
                cuda.syncthreads()  # no second barrier: the next unit writes the other buffer
                if warp < n_columns:
                    finish_unit(q, d, h, buffer, warp, uint32(warp * uint32(n >> uint32(5)) + unit), lane)
                buffer = uint32(buffer ^ uint32(1))
            unit, inside = next_unit, next_inside

    @cuda.jit(device=True, forceinline=True)
    def share(each, extra):
        """The range (first, last + 1) of the units of a block of threads: `each`, in the first `extra` blocks one more.
        They are consecutive, so a block touches few pages of memory."""
        block = uint32(cuda.blockIdx.x)
        first = uint32(block * each + min(block, extra))
        return first, uint32(first + each + (uint32(1) if block < extra else uint32(0)))

    @cuda.jit(launch_bounds=(threads, 1))
    def gemv_swiglu_kernel(q, d, wq, wd, xq, xd, n, k, n_columns, team_bits, each, extra):
        let_next_begin()
        h = cuda.shared.array(H_SHAPE, float32)
        lane, warp = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y) if alone else warp_number()
        raw, w_rows = cuda.local.array(raw_shape, uint32), cuda.local.array(rows, uint32)
        team = uint32(warp >> team_bits)
        unit, last = share(each, extra)
        set_rows(w_rows, uint32(uint32(unit << uint32(5)) + team * uint32(pairs)), n)
        start(raw, w_rows, k, lane, wq, wd)
        book = load_book(uint32(uint32(warp << uint32(5)) + lane), uint32(threads))
        wait_for_previous()
        first_column = uint32(uint32(warp - uint32(team << team_bits)) * uint32(columns))
        teams = uint32(uint32(warps) >> team_bits)
        work(raw, book, h, q, d, wq, wd, xq, xd, n, k, unit, last, lane, warp, team, teams, first_column, n_columns)

    @cuda.jit(launch_bounds=(threads, 1))
    def norm_gemv_swiglu_kernel(q, d, wq, wd, x, norm_w, eps, n, k, each, extra):
        let_next_begin()
        xq = cuda.shared.array(MAX_PLANES, int8, alignment=16)
        xd = cuda.shared.array(IN_PLANES, float32)
        partial = cuda.shared.array(MAX_WARPS, float32)
        h = cuda.shared.array(H_OF_ONE, float32)
        lane, warp = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y) if planes else warp_number()
        raw, w_rows = cuda.local.array(raw_shape, uint32), cuda.local.array(rows, uint32)
        held = cuda.local.array(HELD, float32)
        hold_weights(held, norm_w, k, lane, warp, uint32(warps))  # first: behind the loads of the ring they would wait
        unit, last = share(each, extra)
        set_rows(w_rows, uint32(uint32(unit << uint32(5)) + warp * uint32(pairs)), n)
        start(raw, w_rows, k, lane, wq, wd)
        book = load_book(uint32(uint32(warp << uint32(5)) + lane), uint32(threads))
        wait_for_previous()
        quantize_norm(xq, xd, x, uint32(0), norm_w, held, k, eps, partial, lane, warp, uint32(warps))
        cuda.syncthreads()
        work(raw, book, h, q, d, wq, wd, xq, xd, n, k, unit, last, lane, warp, warp, uint32(warps), uint32(0),
             uint32(1))

    return norm_gemv_swiglu_kernel if fused else gemv_swiglu_kernel


# ---- launches: they write in place and never allocate -----------------------------------------------------

def gemv(card, decoder, y, stride, w, x, columns, add=False, *, products=None, stream=None):
    """y <- (y +) w . x.

    decoder: of the format of w, a Matrix [n, k]. x: Quantized, `columns` columns of k values. y: float32; column c has
    n numbers from c * stride on. stride is larger than n where several products write next to each other. products: the
    Products of the card (kernels/products.py), if tensor cores may make those that they make faster. One launch per
    sixteen columns, or of tiles."""
    if products and products.takes(w, columns):
        return products.gemv(y, stride, w, x, columns, add, stream=stream)
    if takes(card, w, columns):
        return tile_gemv(card, y, stride, w, x, columns, add, stream=stream)
    n, k, y, (xq, xd) = w.n, w.k, y.reshape(-1), x.flat
    for first in range(0, columns, MAX_COLUMNS):
        here, team_bits, each = _split(card, decoder, n, columns - first)
        shape = shape_for(card, decoder, each, k, n=n, teams=1 << team_bits)
        grid, shares = _shares(n, shape, _n_blocks(card, decoder, n, k, columns, shape))
        planes = decoder.planes and columns == 1 and k <= MAX_PLANES
        card.launch(gemv_kernel(decoder, each, shape, False, planes), grid, (32, shape.warps), y[first * stride:],
                    stride, *flat_weights(w), xq[first * k:], xd[first * k // BLOCK:], n, k, here, team_bits, *shares,
                    add, stream=stream)


def norm_gemv(card, decoder, y, stride, w, x, u, columns, *, products=None, stream=None):
    """y <- w . (quantised RMSNorm of x): the bits of rms_norm_quantize followed by `gemv`.

    x: NormInput of `columns` columns of k values. u: Quantized of the same size, scratch for the norm of several
    columns. The rest as in `gemv`. One launch for one column; else one for the norm and one per sixteen columns."""
    n, k = w.n, w.k
    if columns > 1 or k > MAX_FUSED:
        rms_norm_quantize(card, u, x, columns, k, stream=stream)
        return gemv(card, decoder, y, stride, w, u, columns, products=products, stream=stream)
    shape = shape_for(card, decoder, 1, k)
    grid, shares = _shares(n, shape, card.n_sms)
    card.launch(gemv_kernel(decoder, 1, shape, True, decoder.planes), grid, (32, shape.warps), y.reshape(-1), stride,
                *flat_weights(w), x.values.reshape(-1), x.weight, float(x.eps), n, k, *shares, stream=stream)


def norm_gemv_swiglu(card, decoder, out, w, x, u, columns, *, products=None, stream=None):
    """out <- quantised silu(gate . v) * (up . v), v the quantised RMSNorm of x: the bits of `norm_gemv` followed by
    swiglu_quantize.

    w: Matrix [2 n, k], the n rows of gate and below them those of up; n a multiple of 32. out: Quantized, `columns`
    columns of n values. x, u as in `norm_gemv`. One launch for one column; else one for the norm and one per sixteen
    columns."""
    n, k = w.n // 2, w.k
    if n % BLOCK:
        raise ValueError(f"SwiGLU takes rows of a multiple of {BLOCK} values, not {n}")
    q, d = out.flat
    rounds = -(-n // (BLOCK * card.n_sms))
    grid = -(-n // (BLOCK * rounds))  # as few blocks of threads as make no further round
    shares = divmod(n // BLOCK, grid)
    if columns == 1 and k <= MAX_FUSED:
        shape = shape_for(card, decoder, 1, k, in_pairs=True)
        card.launch(swiglu_kernel(decoder, 1, shape, True), grid, (32, shape.warps), q, d, *flat_weights(w),
                    x.values.reshape(-1), x.weight, float(x.eps), n, k, *shares, stream=stream)
        return
    rms_norm_quantize(card, u, x, columns, k, stream=stream)
    if products and products.takes(w, columns, swiglu=True):
        return products.gemv_swiglu(out, w, u, columns, stream=stream)
    if takes(card, w, columns, swiglu=True):
        return tile_gemv_swiglu(card, out, w, u, columns, stream=stream)
    xq, xd = u.flat
    for first in range(0, columns, MAX_COLUMNS):
        here, team_bits, each = _split(card, decoder, 2 * n, columns - first)
        shape = shape_for(card, decoder, each, k, in_pairs=True)
        card.launch(swiglu_kernel(decoder, each, shape, False), grid, (32, shape.warps), q[first * n:],
                    d[first * n // BLOCK:], *flat_weights(w), xq[first * k:], xd[first * k // BLOCK:], n, k, here,
                    team_bits, *shares, stream=stream)


def gemv_q8_q8(card, y, stride, w, x, columns, add=False, *, stream=None):
    """`gemv` with w in Q8_0: w.values int8 [n, k], w.scales float16 [n, k / 32]; x.q int8 [columns, k], x.d float32
    [columns, k / 32]; y float32, column c from c * stride on."""
    gemv(card, Q8, y, stride, w, x, columns, add, stream=stream)


def flat_weights(w):
    """The flat arrays of a Matrix that kernels read."""
    return w.values.reshape(-1), as_words(w.scales)


def _split(card, decoder, n, columns):
    """Divides the next columns among the warps of a team, for n rows. Returns (columns of this launch, at most
    MAX_COLUMNS; log2 of the warps of a team; columns of each warp).

    With Q8_0 a warp takes up to 8 columns, since every warp of a team reads the weights from the L2 cache again. It
    takes only up to 4 where there are so few rows that warps would be idle, and on emulated cards. A warp of a packed
    format takes up to 2: its unpacked weights need registers."""
    here, most = min(columns, MAX_COLUMNS), 2
    if decoder is Q8:
        most = 8 if n >= WIDE_ROWS * card.n_sms and card.kind != "emulated" else 4
    team_bits = (-(-here // most) - 1).bit_length()
    return here, team_bits, -(-here // 2**team_bits)


def _n_blocks(card, decoder, n, k, columns, shape):
    """Blocks of threads of `gemv`: one per SM. For one column there are fewer where launches overlap, because on an SM
    that is left free the next launch can already fill its ring.

    In a round each warp of the launch multiplies one group of rows. We take the fewest blocks that need no additional
    round and leave a share SPARE of the last round unused, but at least LEAST of the SMs. If one block per SM would
    have all weights in flight at once, LEAST of the SMs are enough. Measurements: benchmarks/results.md, section
    q8_gemv."""
    if columns > 1 or not launches_overlap(card.cc):
        return card.n_sms
    n_groups = -(-n // shape.rows)
    rounds = -(-n_groups // (shape.warps * card.n_sms))
    all_in_flight = rounds == 1 and -(-k // (BLOCK * TILE)) <= shape.depth
    needed = 0 if all_in_flight else math.ceil(n_groups / shape.warps / (rounds - SPARE))
    return min(max(needed, math.ceil(LEAST * card.n_sms)), card.n_sms)


def _shares(n, shape, n_blocks):
    """The grid, of up to n_blocks blocks of threads, and how it divides n rows: (groups of rows of each block, number
    of blocks that take one more)."""
    n_groups = -(-n // shape.rows)
    grid = min(n_blocks, n_groups)
    return grid, divmod(n_groups, grid)


# ---- check and time ----------------------------------------------------------------------------------------

# n, k, columns
CASES = [(1, 32, 1), (4, 320, 1), (33, 512, 2), (31, 544, 3), (500, 1024, 8), (63, 2080, 11), (1024, 1024, 1)]


def random_q8(rng, rows, k):
    """Weights as a Q8_0 tensor has them: q int8 [rows, k], d float16 [rows, k / 32] with both signs."""
    q = rng.integers(-128, 128, (rows, k), np.int8)
    return q, (rng.standard_normal((rows, k // BLOCK)) / 1000).astype(np.float16)


def random_activations(rng, rows, k):
    """Quantised activations: q int8 [rows, k], d float32 [rows, k / 32]."""
    return rng.integers(-127, 128, (rows, k), np.int8), rng.random((rows, k // BLOCK), np.float32)


def upload_q8(card, w, x):
    """Arrays as `random_q8` and `random_activations` give them -> (Matrix, Quantized) on the card."""
    return Matrix("Q8_0", *w[0].shape, *map(card.upload, w)), Quantized(*map(card.upload, x))


def check(card, n, k, columns, add=False):
    """Multiplies random matrices, compares with `tree_reference` bit for bit, and returns the largest error as a
    fraction of what rounding may do: 2**-24 times the sum of magnitudes, once for each step of a chain, each of the six
    additions of the tree, the product of the scales and the addition to y."""
    rng = np.random.default_rng((n, k, columns))
    (wq, wd), (xq, xd) = random_q8(rng, n, k), random_activations(rng, columns, k)
    before = rng.standard_normal((columns, n), np.float32)
    y = card.alloc((columns + 1, n + 3), np.float32)      # with numbers around each column, and a column more
    card.poison(y)
    if add:
        card.copy_in(y[:columns], np.pad(before, ((0, 0), (1, 2)), constant_values=np.nan))
    gemv_q8_q8(card, y.reshape(-1)[1:], n + 3, *upload_q8(card, (wq, wd), (xq, xd)), columns, add)
    y = card.download(y)
    got = y[:columns, 1:n + 1].copy()
    y[:columns, 1:n + 1] = np.nan
    assert np.isnan(y).all(), "wrote elsewhere"
    magnitude = q8_reference(abs(wq.astype(int)), abs(wd), abs(xq.astype(int)), xd) + abs(before) * add
    exact = tree_reference(wq, wd, xq, xd)
    np.testing.assert_array_equal(got, before + exact if add else exact)
    bound = (-(-k // (BLOCK * TILE)) + 8) * 2.0**-24 * magnitude
    error = (abs(got - (q8_reference(wq, wd, xq, xd) + before * add)) / bound).max()
    assert error <= 1
    return error


# n, k, columns
FUSED_CASES = [(32, 1024, 1), (64, 32, 1), (96, 2080, 1), (160, 1056, 3), (96, 1536, 19)]


def check_fused(card, n, k, columns, decoder=Q8, w=None):
    """Compares norm_gemv and norm_gemv_swiglu with the kernels that they replace, bit for bit; returns 0, the error.
    w: a Matrix [2 n, k] in the format of `decoder`; without it random weights in Q8_0."""
    rng = np.random.default_rng((n, k, columns))
    w = w or Matrix("Q8_0", 2 * n, k, *map(card.upload, random_q8(rng, 2 * n, k)))
    x = NormInput(*(card.upload(rng.standard_normal(shape, np.float32)) for shape in ((columns, k), k)), 1e-6)
    u, want_u = _poisoned(card, columns, k), _poisoned(card, columns, k)
    out, want_out = _poisoned(card, columns + 1, n), _poisoned(card, columns + 1, n)
    y, want_y = card.alloc((columns + 1, 2 * n), np.float32), card.alloc((columns + 1, 2 * n), np.float32)
    card.poison(y), card.poison(want_y)
    rms_norm_quantize(card, want_u, x, columns, k)
    gemv(card, decoder, want_y, 2 * n, w, want_u, columns)
    swiglu_quantize(card, want_out, want_y, columns, n)
    norm_gemv(card, decoder, y, 2 * n, w, x, u, columns)
    norm_gemv_swiglu(card, decoder, out, w, x, u, columns)
    for got, want in zip((y, *out), (want_y, *want_out)):
        np.testing.assert_array_equal(card.download(got), card.download(want))
    return 0.0


def _poisoned(card, rows, k):
    """A Quantized of that size that nobody has written yet."""
    x = Quantized(card.alloc((rows, k), np.int8), card.alloc((rows, k // BLOCK), np.float32))
    card.poison(x.q), card.poison(x.d)
    return x


TIMED = [(256, 256, 1), (1024, 1024, 1), (4096, 4096, 1), (65536, 5120, 1), (4096, 4096, 2), (4096, 4096, 4),
         (4096, 4096, 8)]


def cases(card):
    """The checks, then times; the largest matrix (356 MB) fits no cache."""
    for case in CASES:
        yield Case("{} x {}, {} columns".format(*case), partial(check, card, *case))
    for case in FUSED_CASES:
        yield Case("fused: {} x {}, {} columns".format(*case), partial(check_fused, card, *case))
    for n, k, columns in TIMED:
        w = Matrix("Q8_0", n, k, card.zeros((n, k), np.int8), card.zeros((n, k // BLOCK), np.float16))
        x = Quantized(card.zeros((columns, k), np.int8), card.zeros((columns, k // BLOCK), np.float32))
        y = card.alloc((columns, n), np.float32)
        yield Case(f"time of {n} x {k}, {columns} columns",
                   launch=partial(gemv_q8_q8, card, y, n, w, x, columns),
                   n_bytes=sum(a.nbytes for a in (w.values, w.scales, *x, y)), n_ops=2 * n * k * columns, pipe="dp4a")


if __name__ == "__main__":
    main("Q8_0 matrix x vectors", cases)
