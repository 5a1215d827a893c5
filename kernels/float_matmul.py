"""Matrix products for weights stored as floats: F32, F16 and BF16 weights times float32 activations.

    y[r, n] = sum over j of w[n, j] * x[r, j]          (+ y[r, n] with `add`)

    w  float32, float16 or uint16 (the bits of bfloat16) [n, k]; a weight becomes a float32 exactly
    x  float32 [rows, k]     y  float32 [rows, n]     rows, n and k any, n k < 2**32

Every product is one fma in float32. Each of the two families below adds in one fixed order, so a row of y has the same
bits whatever the other rows, the tile and the card are. The two families round differently.

Decode, `gemv_float`: a warp takes ROWS rows of w. Lane l sums j = l, l + 32, ... in that order, then a butterfly adds
the lanes. Up to eight rows of x share one reading of w. Pipe: fp32; bound by memory, 2 or 4 bytes per weight. A lane
loads one element at a time, a warp 64 or 128 bytes: about 80 % of read bandwidth is expected. Loads of 16 bytes per
lane would be faster, but k may be of any size.

Prefill, `gemm_float`: one fma chain per output, j increasing. A block of threads makes a tile of y. Its rows of w and
of x pass through shared memory as float32, `depth` elements at a time, with zeros past the end of k. There are two
buffers: while a block multiplies one, it fills the other, and the elements for the time after are on their way from
global memory. In a buffer 4 elements of a row lie together (a quad), and beside them the same quad of the next row:

        w  [depth / 4 quads][columns of the tile + 1][4]       x  [depth / 4 quads][rows of the tile + 1][4]
                                                    + 1: threads that store the quads of one row use all 32 banks
        a warp of 4 x 8 lanes                          lane (i, l) makes rows i, i + 4, i + 8, ... of the warp's rows
        reads 4 x R rows of x and 8 x C columns of w                 and columns l, l + 8, l + 16, ... of its columns

A thread of R x C outputs makes R + C loads of 16 bytes for 4 R C fma. For 4 x 4 outputs 512 of 630 instructions of the
loop are fma, 64 load from shared memory (sm_90). Shared memory gives 16 bytes to a warp's lanes in 2 cycles at best: it
is the bound of small tiles on Hopper, whose fp32 pipe is twice as wide as Volta's. A `Shape` says what a tile is.
Products for routers are small, 257 columns for 297 to 4,620 rows, and no SM should be idle: `shape_of` picks a tile.
On the emulated card all lanes lie side by side, because it loads neighbours fast. All shapes have the same bits.

Pipe: fp32. It serves routers, small projections and models that are not quantised. A half2 version would be twice as
fast and would round differently.
"""

from functools import cache, partial
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.types import float32, uint32, uint64

from kernels.bench import Case, main
from kernels.formats import FLOATS
from kernels.intrinsics import (float_as_word, half2_high, half2_low, half_to_float, load_shared4, load_words2,
                                load_words4, shared_address, store_shared, store_shared4, warp_sum, word_as_float)
from kernels.operands import Matrix

WARPS = 4  # of gemv
ROWS = 2  # of w per warp of gemv
COLUMNS = (1, 2, 4, 8)  # rows of x that a gemv kernel can take
GROUP = 32  # of gemm: elements of a row of w or x that neighbouring threads bring to shared memory
TYPES = {np.dtype(kind.dtype): kind for kind in FLOATS.values()}  # what weights are stored as -> formats.Float


def matmul_reference(w, x):
    """float64 y [rows, n]; w and x are NumPy arrays, w as it is stored."""
    return x.astype(np.float64) @ TYPES[w.dtype].widen(w).astype(np.float64).T


# ---- weights as stored -> float32 --------------------------------------------------------------------------

@cuda.jit(device=True, inline="always")
def float32_at(w, index):
    return w[index]


@cuda.jit(device=True, inline="always")
def float16_at(w, index):
    return half_to_float(w[index])


@cuda.jit(device=True, inline="always")
def bfloat16_at(w, index):
    return word_as_float(uint32(uint32(w[index]) << uint32(16)))


WEIGHT_AT = {np.dtype(kind): at for kind, at in
             ((np.float32, float32_at), (np.float16, float16_at), (np.uint16, bfloat16_at))}


def as_words(w):
    """The flat array that a kernel reads: float16 weights as uint16."""
    return (w.view(np.uint16) if w.dtype == np.float16 else w).reshape(-1)


# ---- decode ------------------------------------------------------------------------------------------------

def sums_function(weight_at, columns):
    """multiply_rows(y, w, x, row, x_starts, first, n, k, n_columns, stride, add): a warp's rows row, row + 1 of w times
    up to `columns` rows of x, which start at x[x_starts[c]]. It writes the first n_columns of them, into rows first,
    first + 1, ... of y."""

    @cuda.jit(device=True, inline="always")
    def accumulate(acc, w_starts, x_starts, j, w, x):
        """acc[r, c] += element j of row r of w times element j of row c of x."""
        weight = cuda.local.array(ROWS, float32)
        for r in range(ROWS):
            weight[r] = weight_at(w, uint32(w_starts[r] + j))
        for c in range(columns):
            value = x[uint32(x_starts[c] + j)]
            for r in range(ROWS):
                acc[r, c] = cuda.fma(weight[r], value, acc[r, c])

    @cuda.jit(device=True, forceinline=True)
    def multiply_rows(y, w, x, row, x_starts, first, n, k, n_columns, stride, add):
        lane = uint32(cuda.threadIdx.x)
        w_starts = cuda.local.array(ROWS, uint32)
        acc = cuda.local.array((ROWS, columns), float32)
        for r in range(ROWS):  # in place of rows of w past the last one the last one again, not stored
            w_starts[r] = uint32(min(uint32(row + uint32(r)), uint32(n - uint32(1))) * k)
            for c in range(columns):
                acc[r, c] = float32(0.0)

        for i in range(uint32(k >> uint32(5))):
            accumulate(acc, w_starts, x_starts, uint32(uint32(i) * uint32(32) + lane), w, x)
        rest = uint32(k & uint32(31))
        if lane < rest:
            accumulate(acc, w_starts, x_starts, uint32(k - rest + lane), w, x)

        for r in range(ROWS):
            for c in range(columns):
                total = warp_sum(acc[r, c])
                at = uint32(uint32(first + uint32(c)) * stride + row + uint32(r))
                if lane == uint32(0) and uint32(row + uint32(r)) < n and uint32(c) < n_columns:
                    y[at] = y[at] + total if add else total

    return multiply_rows


def gemv_kernel(weight_at, columns):
    """The decode kernel for one type of weights and up to `columns` rows of x."""
    multiply_rows = sums_function(weight_at, columns)

    @cuda.jit
    def gemv_float_kernel(y, w, x, n, k, n_columns, stride, add):
        row = uint32(uint32(cuda.blockIdx.x * uint32(WARPS) + cuda.threadIdx.y) * uint32(ROWS))
        if row >= n:
            return
        x_starts = cuda.local.array(columns, uint32)
        for c in range(columns):  # in place of rows of x past the last one the last one again
            x_starts[c] = uint32(min(uint32(c), uint32(n_columns - uint32(1))) * k)
        multiply_rows(y, w, x, row, x_starts, uint32(0), n, k, n_columns, stride, add)

    return gemv_float_kernel


# ---- prefill -----------------------------------------------------------------------------------------------

class Shape(NamedTuple):
    """How a block of threads makes a tile of y."""

    rows: int               # of a thread
    columns: int            # of a thread
    down: int               # warps one below the other
    across: int             # warps side by side
    depth: int = GROUP      # elements of k in a buffer, a multiple of GROUP
    lanes: int = 8          # lanes of a warp side by side, a key of PLACES; the other lanes are below them
    ahead: bool = True      # a thread loads the next 4 elements while it multiplies these

    @property
    def warps(self):
        return self.down * self.across

    @property
    def height(self):
        return 32 // self.lanes * self.rows * self.down

    @property
    def width(self):
        return self.lanes * self.columns * self.across

    def lines(self, each):
        """Rows of which the block brings GROUP elements to shared memory at once, `each` per thread."""
        return self.warps * each

    def carried(self, each):
        """Rows of x that a thread helps to bring."""
        return -(-self.height // self.lines(each))


@cuda.jit(device=True, forceinline=True)
def place_of_8(lane):
    """(row, column) of a lane in a warp of 4 x 8. A load of 16 bytes per lane takes one passage for each half of the
    warp if lanes l and l ^ 1, or l and l ^ 2, want the same bytes: so bit 0 of the lane belongs to the rows and bits 1
    to 3 to the columns (S. Gray, maxas, SGEMM)."""
    return (uint32(lane & uint32(1)) | uint32(uint32(lane >> uint32(3)) & uint32(2)),
            uint32(uint32(lane >> uint32(1)) & uint32(7)))


@cuda.jit(device=True, forceinline=True)
def place_of_32(lane):
    return uint32(0), lane


PLACES = {8: place_of_8, 32: place_of_32}


@cuda.jit(device=True, forceinline=True)
def words_of_float32(raw):
    return raw[0], raw[1], raw[2], raw[3]


@cuda.jit(device=True, forceinline=True)
def words_of_float16(raw):
    return (float_as_word(half2_low(raw[0])), float_as_word(half2_high(raw[0])),
            float_as_word(half2_low(raw[1])), float_as_word(half2_high(raw[1])))


@cuda.jit(device=True, forceinline=True)
def words_of_bfloat16(raw):
    high = uint32(0xFFFF0000)
    return uint32(raw[0] << uint32(16)), uint32(raw[0] & high), uint32(raw[1] << uint32(16)), uint32(raw[1] & high)


WORDS_OF = {np.dtype(kind): words for kind, words in    # 4 weights as stored -> words of 4 float32
            ((np.float32, words_of_float32), (np.float16, words_of_float16), (np.uint16, words_of_bfloat16))}


def carrier(kind, each, count, lines):
    """How a thread brings `each` neighbouring elements, 4 or 1, of `count` rows to shared memory: (fetch, put, words).

    fetch(raw, source, starts, j, k): elements j, j + 1, ... of the rows that begin at starts[i], into raw[i], which has
    `words` words; zeros past the end of a row. 4 elements must lie at a multiple of their size.
    put(raw, to): stores them as float32, those of each row 16 * lines bytes behind those of the row before."""
    words_of, weight_at, is_word = WORDS_OF[np.dtype(kind)], WEIGHT_AT[np.dtype(kind)], np.dtype(kind).itemsize == 4
    words = 1 if each == 1 else 4 if is_word else 2

    @cuda.jit(device=True, forceinline=True)
    def load(raw, source, at):
        if words == 4:
            raw[0], raw[1], raw[2], raw[3] = load_words4(source, at)
        elif words == 2:
            raw[0], raw[1] = load_words2(source, at)
        else:
            raw[0] = float_as_word(weight_at(source, at))

    @cuda.jit(device=True, forceinline=True)
    def fetch(raw, source, starts, j, k):
        if j < k:
            for i in range(count):
                load(raw[i], source, uint32(starts[i] + j))
        else:
            for i in range(count):
                for word in range(words):
                    raw[i, word] = uint32(0)

    @cuda.jit(device=True, forceinline=True)
    def put(raw, to):
        for i in range(count):
            at = to + uint64(16 * lines * i)
            if words == 1:
                store_shared(at, raw[i, 0])
            else:
                w0, w1, w2, w3 = words_of(raw[i])
                store_shared4(at, w0, w1, w2, w3)

    return fetch, put, words


def multiplier(shape, w_pitch, x_pitch):
    """How a thread multiplies a buffer: (load_quad, multiply_quad, multiply_quads). A quad is 4 elements of k.

    load_quad(w, x, w_at, x_at, q): quad q of the thread's columns and rows, from shared memory into w and x.
    multiply_quad(acc, w, x): adds the products of a quad, j increasing.
    multiply_quads(acc, w, x, w_at, x_at, first, last): loads and multiplies quads first .. last - 1; with `ahead` it
    multiplies what is loaded, and loads quads up to `last`."""
    rows, columns, _, _, _, lanes, ahead = shape
    w_apart, x_apart = 16 * lanes, 16 * (32 // lanes)

    @cuda.jit(device=True, forceinline=True)
    def load_quad(w, x, w_at, x_at, q):
        for c in range(columns):
            w[c, 0], w[c, 1], w[c, 2], w[c, 3] = load_shared4(w_at + uint64(w_pitch * q + w_apart * c))
        for r in range(rows):
            x[r, 0], x[r, 1], x[r, 2], x[r, 3] = load_shared4(x_at + uint64(x_pitch * q + x_apart * r))

    @cuda.jit(device=True, forceinline=True)
    def multiply_quad(acc, w, x):
        for j in range(4):
            for r in range(rows):
                for c in range(columns):
                    acc[r, c] = cuda.fma(word_as_float(w[c, j]), word_as_float(x[r, j]), acc[r, c])

    @cuda.jit(device=True, forceinline=True)
    def multiply_quads(acc, w, x, w_at, x_at, first, last):
        for q in range(first, last):
            if ahead:
                load_quad(w[(q + 1) & 1], x[(q + 1) & 1], w_at, x_at, q + 1)
                multiply_quad(acc, w[q & 1], x[q & 1])
            else:
                load_quad(w[0], x[0], w_at, x_at, q)
                multiply_quad(acc, w[0], x[0])

    return load_quad, multiply_quad, multiply_quads


@cuda.jit(device=True, forceinline=True)
def first_line(each):
    """The first row of a tile of which a thread brings elements. 32 / each threads bring GROUP elements of a row."""
    return uint32(uint32(cuda.threadIdx.y * uint32(32) + cuda.threadIdx.x) * uint32(each)) >> uint32(5)


def tile_function(kind, shape, each):
    """multiply_tile(y, w, x, x_starts, row0, end, n, k, stride, add): a block's rows row0, row0 + 1, ... of y, those
    below `end`. each: elements of w and x that a thread loads at once, 4 or 1; 4 if all their rows begin at multiples
    of 4 elements. A thread carries rows first_line(each), first_line(each) + shape.lines(each), ... of the tile from x
    to shared memory: from x[x_starts[0]], x[x_starts[1]], ... on."""
    rows, columns, down, _, depth, lanes, ahead = shape
    width, lines, lanes_down, place = shape.width, shape.lines(each), 32 // lanes, PLACES[lanes]
    w_carried, x_carried = -(-width // lines), shape.carried(each)
    w_pitch, x_pitch = 16 * (w_carried * lines + 1), 16 * (x_carried * lines + 1)
    groups, quads, group_quads = depth // GROUP, depth // 4, GROUP // 4
    x_buffer, buffer = quads * w_pitch, quads * (w_pitch + x_pitch)
    shared_words = 2 * buffer // 4
    fetch_w, put_w, w_words = carrier(kind, each, w_carried, lines)
    fetch_x, put_x, x_words = carrier(np.float32, each, x_carried, lines)
    load_quad, multiply_quad, multiply_quads = multiplier(shape, w_pitch, x_pitch)
    middle, last = quads // 2, quads - 1 if ahead else quads
    quarter, rest = middle // 2, (middle + last) // 2  # the compiler does not unroll loops over more quads

    @cuda.jit(device=True, forceinline=True)
    def fetch_tile(raw_w, raw_x, w, x, w_starts, x_starts, j, k):
        for g in range(groups):
            fetch_w(raw_w[g], w, w_starts, uint32(j + uint32(GROUP * g)), k)
            fetch_x(raw_x[g], x, x_starts, uint32(j + uint32(GROUP * g)), k)

    @cuda.jit(device=True, forceinline=True)
    def put_tile(raw_w, raw_x, w_to, x_to):
        for g in range(groups):
            put_w(raw_w[g], w_to + uint64(w_pitch * group_quads * g))
            put_x(raw_x[g], x_to + uint64(x_pitch * group_quads * g))

    @cuda.jit(device=True, forceinline=True)
    def multiply_tile(y, w, x, x_starts, row0, end, n, k, stride, add):
        lane, warp = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        column0 = uint32(uint32(cuda.blockIdx.x) * uint32(width))
        row = uint32(uint32(warp % uint32(down)) * uint32(lanes_down * rows))
        column = uint32(uint32(warp // uint32(down)) * uint32(lanes * columns))
        works = uint32(row0 + row) < end and uint32(column0 + column) < n
        row_of_lane, column_of_lane = place(lane)
        row, column = uint32(row + row_of_lane), uint32(column + column_of_lane)

        # What this thread carries: elements j, j + 1, ... of these rows of w and x.
        line, j = first_line(each), uint32(lane * uint32(each)) & uint32(GROUP - 1)
        w_starts = cuda.local.array(w_carried, uint32)
        for i in range(w_carried):  # in place of rows past the last one the last one again
            w_starts[i] = uint32(min(uint32(column0 + line + uint32(i * lines)), uint32(n - uint32(1))) * k)
        raw_w = cuda.local.array((groups, w_carried, w_words), uint32)
        raw_x = cuda.local.array((groups, x_carried, x_words), uint32)

        # Addresses in shared memory, in the first buffer. *_to: where the thread stores what it carries; *_at: where
        # its columns and rows are. The offset of the buffer in use, `here`, or of the next one is added to them.
        w_at = shared_address(cuda.shared.array(shared_words, uint32, alignment=16))
        x_at = w_at + uint64(x_buffer)
        quad, to = uint32(j >> uint32(2)), uint32(line << uint32(4)) + uint32(uint32(j & uint32(3)) << uint32(2))
        w_to = w_at + uint64(uint32(uint32(quad * uint32(w_pitch)) + to))
        x_to = x_at + uint64(uint32(uint32(quad * uint32(x_pitch)) + to))
        w_at, x_at = w_at + uint64(uint32(column << uint32(4))), x_at + uint64(uint32(row << uint32(4)))
        here, following = uint64(0), uint64(buffer)

        weight = cuda.local.array((2, columns, 4), uint32)
        value = cuda.local.array((2, rows, 4), uint32)
        acc = cuda.local.array((rows, columns), float32)
        for r in range(rows):
            for c in range(columns):
                acc[r, c] = float32(0.0)
        fetch_tile(raw_w, raw_x, w, x, w_starts, x_starts, j, k)
        put_tile(raw_w, raw_x, w_to, x_to)
        j = uint32(j + uint32(depth))
        fetch_tile(raw_w, raw_x, w, x, w_starts, x_starts, j, k)
        cuda.syncthreads()
        if ahead:
            load_quad(weight[0], value[0], w_at, x_at, 0)

        # One barrier for each tile. What a warp stores before it goes to the buffer that no warp reads any more.
        for _ in range(uint32(uint32(k + uint32(depth - 1)) // uint32(depth))):
            w_here, x_here = w_at + here, x_at + here
            if works:
                multiply_quads(acc, weight, value, w_here, x_here, 0, quarter)
                multiply_quads(acc, weight, value, w_here, x_here, quarter, middle)
            put_tile(raw_w, raw_x, w_to + following, x_to + following)
            j = uint32(j + uint32(depth))
            fetch_tile(raw_w, raw_x, w, x, w_starts, x_starts, j, k)
            if works:
                multiply_quads(acc, weight, value, w_here, x_here, middle, rest)
                multiply_quads(acc, weight, value, w_here, x_here, rest, last)
            cuda.syncthreads()
            if ahead and works:
                load_quad(weight[0], value[0], w_at + following, x_at + following, 0)
                multiply_quad(acc, weight[1], value[1])
            here, following = following, here

        for r in range(rows):
            to_row = uint32(row0 + row + uint32(lanes_down * r))
            for c in range(columns):
                to_column = uint32(column0 + column + uint32(lanes * c))
                at = uint32(to_row * stride + to_column)
                if to_row < end and to_column < n:
                    total = acc[r, c] + float32(0.0)  # 0, not -0: as zeros past the end of k make it
                    y[at] = y[at] + total if add else total

    return multiply_tile


@cache
def gemm_kernel(kind, shape, each):
    """The prefill kernel for one type of weights and a Shape; `each` as in `tile_function`."""
    multiply_tile, height = tile_function(kind, shape, each), shape.height
    lines, carried = shape.lines(each), shape.carried(each)

    @cuda.jit(launch_bounds=(32 * shape.warps, 1))
    def gemm_float_kernel(y, w, x, n, k, n_rows, stride, add):
        row0 = uint32(uint32(cuda.blockIdx.y) * uint32(height))
        x_starts = cuda.local.array(carried, uint32)
        for i in range(carried):  # in place of rows past the last one the last one again
            line = uint32(first_line(each) + uint32(i * lines))
            x_starts[i] = uint32(min(uint32(row0 + line), uint32(n_rows - uint32(1))) * k)
        multiply_tile(y, w, x, x_starts, row0, n_rows, n, k, stride, add)

    return gemm_float_kernel


# The shapes of a real card.
TALLEST = Shape(4, 4, 4, 2)
SHAPES = TALLEST, Shape(4, 4, 2, 2), Shape(4, 4, 2, 1), Shape(2, 4, 4, 1, depth=64)
EMULATED = Shape(8, 1, 8, 2, lanes=32, ahead=False)


def each_of(w, x):
    """Elements of w and x that a thread loads at once: 4 if the rows of both begin at multiples of 4 elements."""
    aligned = w.k % 4 == 0 and x.ptr % 16 == 0 and w.values.ptr % (4 * w.values.dtype.itemsize) == 0
    return 4 if aligned else 1


def tile_time(card, n, rows, shape):
    """The time of a product, in cycles per 4 elements of k: that of the SM with the most blocks. A warp multiplies
    shape.rows x shape.columns outputs and loads 16 bytes for each row and column of a thread. Each of the 4 partitions
    of an SM issues one instruction per cycle; a load takes the SM's shared memory 2 cycles."""
    warps = -(-block_count(n, rows, shape) // card.n_sms) * shape.warps
    loads = shape.rows + shape.columns
    return max(-(-warps // 4) * (4 * shape.rows * shape.columns + loads), warps * 2 * loads)


def block_count(n, rows, shape):
    """Blocks of threads of a product."""
    return -(-n // shape.width) * -(-rows // shape.height)


def shape_of(card, n, rows):
    """The Shape with which a product takes the least time."""
    if card.kind == "emulated":
        return EMULATED
    return min(SHAPES, key=lambda shape: tile_time(card, n, rows, shape))


GEMV = {(kind, columns): gemv_kernel(at, columns) for kind, at in WEIGHT_AT.items() for columns in COLUMNS}


def tallest(card):
    """The Shape for tiles of up to 64 rows, of which few may be there."""
    return EMULATED if card.kind == "emulated" else TALLEST


# ---- launches: they write in place and never allocate -----------------------------------------------------

def gemv_float(card, y, stride, w, x, rows, add=False, *, stream=None):
    """Decode family: y <- (y +) x . w^T.

    w: Matrix [n, k] whose values are float32, float16 or uint16 (bfloat16 bits). x: float32 [rows, k]. y: float32, n
    numbers of each row, `stride` from one row to the next; stride is larger than n where several products write next to
    each other. One launch per eight rows."""
    y, values = y.reshape(-1), as_words(w.values)
    for first in range(0, rows, COLUMNS[-1]):
        here = min(rows - first, COLUMNS[-1])
        kernel = GEMV[np.dtype(w.values.dtype), min(c for c in COLUMNS if c >= here)]
        card.launch(kernel, -(-w.n // (WARPS * ROWS)), (32, WARPS), y[first * stride:], values,
                    x[first:first + here].reshape(-1), w.n, w.k, here, stride, add, stream=stream)


def gemm_float(card, y, stride, w, x, rows, add=False, *, stream=None, shape=None):
    """Prefill family: arguments as `gemv_float`. One launch. shape: a Shape; by default the fastest."""
    shape = shape or shape_of(card, w.n, rows)
    grid = (-(-w.n // shape.width), -(-rows // shape.height))
    card.launch(gemm_kernel(np.dtype(w.values.dtype), shape, each_of(w, x)), grid, (32, shape.warps), y.reshape(-1),
                as_words(w.values), x.reshape(-1), w.n, w.k, rows, stride, add, stream=stream)


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [(1, 1, 1), (4, 31, 3), (33, 257, 2), (65, 100, 65), (500, 512, 9), (130, 1024, 130)]  # n, k, rows


def random_weights(rng, kind, n, k):
    """Weights [n, k] as they are stored; `kind` is np.float32, np.float16 or np.uint16 (bfloat16)."""
    w = rng.standard_normal((n, k), np.float32)
    return (w.view(np.uint32) >> 16).astype(np.uint16) if kind == np.uint16 else w.astype(kind)


def upload_matrix(card, w):
    """Weights as `random_weights` gives them -> the Matrix on the card."""
    return Matrix(TYPES[w.dtype].name, *w.shape, card.upload(w))


def check(card, n, k, rows, kind, multiply, add=False):
    """Multiplies random matrices by `multiply`, gemv_float or a gemm_float, and returns the largest error as a fraction
    of what rounding may do: 2**-24 of the sum of magnitudes for every fma of a chain (k of them, fewer in gemv) and for
    the addition to y."""
    rng = np.random.default_rng((n, k, rows))
    w, x = random_weights(rng, kind, n, k), rng.standard_normal((rows, k), np.float32)
    before = rng.standard_normal((rows, n), np.float32)
    y = card.alloc((rows + 1, n + 3), np.float32)      # with columns before and after, and a row too many
    card.poison(y)
    if add:
        card.copy_in(y[:rows], np.pad(before, ((0, 0), (1, 2)), constant_values=np.nan))
    multiply(card, y.reshape(-1)[1:], n + 3, upload_matrix(card, w), card.upload(x), rows, add)
    y = card.download(y)
    got = y[:rows, 1:n + 1].copy()
    y[:rows, 1:n + 1] = np.nan
    assert np.isnan(y).all(), "wrote elsewhere"
    magnitude = matmul_reference(w & 0x7FFF if kind == np.uint16 else abs(w), abs(x)) + abs(before) * add
    chain = -(-k // 32) + 5 if multiply is gemv_float else k
    bound = (chain + 1) * 2.0**-24 * magnitude
    error = (abs(got - (matmul_reference(w, x) + before * add)) / bound).max()
    assert error <= 1
    return error


TIMED = [(gemv_float, 1024, 1024, 1), (gemv_float, 16384, 4096, 1), (gemv_float, 4096, 4096, 8),
         (gemm_float, 32, 1024, 256), (gemm_float, 2048, 2048, 256), (gemm_float, 257, 2048, 297)]
ROUTED = 924, 1848, 4620  # rows, for a router of 256 experts and the shared one's gate


def cases(card):
    """The checks of both families for every kind of weight, then times."""
    for case in CASES:
        for kind in WEIGHT_AT:
            for multiply in (gemv_float, gemm_float):
                yield Case(f"{multiply.__name__} {TYPES[kind].name}, {'{} x {}, {} rows'.format(*case)}",
                           partial(check, card, *case, kind, multiply))
    for case in TIMED:
        for kind in WEIGHT_AT:
            yield timed(card, *case, kind)
    if card.kind == "cuda":
        for rows in ROUTED:
            yield timed(card, gemm_float, 257, 2048, rows, np.dtype(np.float32))


def timed(card, multiply, n, k, rows, kind):
    w = Matrix(TYPES[kind].name, n, k, card.zeros((n, k), kind))
    x = card.zeros((rows, k), np.float32)
    y = card.alloc((rows, n), np.float32)
    return Case(f"time of {multiply.__name__} {TYPES[kind].name}, {n} x {k}, {rows} rows",
                launch=partial(multiply, card, y, n, w, x, rows),
                n_bytes=w.values.nbytes + x.nbytes + y.nbytes, n_ops=2 * n * k * rows, pipe="ffma")


if __name__ == "__main__":
    main("Float matrix products", cases)
