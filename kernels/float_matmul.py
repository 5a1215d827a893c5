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

Prefill, `gemm_float`: one fma chain per output, j increasing. A block of 8 warps makes 64 rows x 64 columns of y. Tiles
of depth 32 pass through shared memory, with zeros past the end of k:

        w  [32 j][64 + 1]  lane l reads columns l and l + 32
        x  [64 rows][32 j]  the same for the whole warp

A warp makes 8 rows, a thread 8 x 2 outputs: 16 loads from shared memory per 64 fma. Pipe: fp32, expected 40 % of its
peak. It serves small projections and models that are not quantised. A half2 version would be twice as fast and would
round differently.
"""

from functools import partial

import numpy as np
from numba import cuda
from numba.types import float32, uint32

from kernels.bench import Case, main
from kernels.formats import FLOATS
from kernels.intrinsics import half_to_float, load_floats4, warp_sum, word_as_float
from kernels.operands import Matrix

WARPS = 4  # of gemv
ROWS = 2  # of w per warp of gemv
COLUMNS = (1, 2, 4, 8)  # rows of x that a gemv kernel can take
TILE_WARPS = 8  # of gemm
TILE_ROWS = 8  # of x per warp
TILE_COLUMNS = 2  # per thread
DEPTH = 32  # of a tile
TILE_M, TILE_N = TILE_WARPS * TILE_ROWS, 32 * TILE_COLUMNS
CARRIED = TILE_M // TILE_WARPS  # rows of x that a warp brings to shared memory
PITCH = TILE_N + 1  # odd: 32 lanes that store one column of the tile use 32 banks
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

def tile_function(weight_at):
    """multiply_tile(y, w, x, x_starts, row0, end, n, k, stride, add): a block's rows row0 .. row0 + TILE_M - 1 of y,
    those below `end`. Warp i carries rows i, i + TILE_WARPS, ... of the tile from x to shared memory: from
    x[x_starts[0]], x[x_starts[1]], ... on."""

    @cuda.jit(device=True, forceinline=True)
    def multiply_tile(y, w, x, x_starts, row0, end, n, k, stride, add):
        w_tile = cuda.shared.array((DEPTH, PITCH), float32)
        x_tile = cuda.shared.array((TILE_M, DEPTH), float32, alignment=16)
        lane, warp = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        column0 = uint32(cuda.blockIdx.x * uint32(TILE_N))
        warp_row = uint32(warp * uint32(TILE_ROWS))
        warp_works = uint32(row0 + warp_row) < end
        last_column = uint32(n - uint32(1))
        weight = cuda.local.array((4, TILE_COLUMNS), float32)
        acc = cuda.local.array((TILE_ROWS, TILE_COLUMNS), float32)
        for r in range(TILE_ROWS):
            for c in range(TILE_COLUMNS):
                acc[r, c] = float32(0.0)

        for tile in range(uint32(uint32(k + uint32(DEPTH - 1)) // uint32(DEPTH))):
            j = uint32(uint32(tile) * uint32(DEPTH) + lane)
            for i in range(TILE_N // TILE_WARPS):  # a warp loads 32 elements of one row at a time
                line = uint32(warp + uint32(i * TILE_WARPS))
                start = uint32(min(uint32(column0 + line), last_column) * k)
                w_tile[lane, line] = weight_at(w, uint32(start + j)) if j < k else float32(0.0)
            for i in range(CARRIED):
                line = uint32(warp + uint32(i * TILE_WARPS))
                x_tile[line, lane] = x[uint32(x_starts[i] + j)] if j < k else float32(0.0)
            cuda.syncthreads()
            if warp_works:
                for j4 in range(DEPTH // 4):
                    for i in range(4):
                        for c in range(TILE_COLUMNS):
                            weight[i, c] = w_tile[uint32(4 * j4 + i), uint32(lane + uint32(32 * c))]
                    for r in range(TILE_ROWS):
                        at = uint32(uint32(warp_row + uint32(r)) * uint32(DEPTH) + uint32(4 * j4))
                        values = load_floats4(x_tile, at)
                        for i in range(4):
                            for c in range(TILE_COLUMNS):
                                acc[r, c] = cuda.fma(weight[i, c], values[i], acc[r, c])
            cuda.syncthreads()

        for r in range(TILE_ROWS):
            row = uint32(row0 + warp_row + uint32(r))
            for c in range(TILE_COLUMNS):
                column = uint32(column0 + lane + uint32(32 * c))
                at = uint32(row * stride + column)
                if row < end and column < n:
                    y[at] = y[at] + acc[r, c] if add else acc[r, c]

    return multiply_tile


def gemm_kernel(weight_at):
    """The prefill kernel for one type of weights."""
    multiply_tile = tile_function(weight_at)

    @cuda.jit
    def gemm_float_kernel(y, w, x, n, k, n_rows, stride, add):
        row0 = uint32(cuda.blockIdx.y * uint32(TILE_M))
        x_starts = cuda.local.array(CARRIED, uint32)
        for i in range(CARRIED):  # in place of rows past the last one the last one again
            line = uint32(cuda.threadIdx.y + uint32(i * TILE_WARPS))
            x_starts[i] = uint32(min(uint32(row0 + line), uint32(n_rows - uint32(1))) * k)
        multiply_tile(y, w, x, x_starts, row0, n_rows, n, k, stride, add)

    return gemm_float_kernel


GEMV = {(kind, columns): gemv_kernel(at, columns) for kind, at in WEIGHT_AT.items() for columns in COLUMNS}
GEMM = {kind: gemm_kernel(at) for kind, at in WEIGHT_AT.items()}


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


def gemm_float(card, y, stride, w, x, rows, add=False, *, stream=None):
    """Prefill family: arguments as `gemv_float`. One launch."""
    grid = (-(-w.n // TILE_N), -(-rows // TILE_M))
    card.launch(GEMM[np.dtype(w.values.dtype)], grid, (32, TILE_WARPS), y.reshape(-1), as_words(w.values),
                x.reshape(-1), w.n, w.k, rows, stride, add, stream=stream)


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
    """Multiplies random matrices by `multiply`, gemv_float or gemm_float, and returns the largest error as a fraction
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
    chain = k if multiply is gemm_float else -(-k // 32) + 5
    bound = (chain + 1) * 2.0**-24 * magnitude
    error = (abs(got - (matmul_reference(w, x) + before * add)) / bound).max()
    assert error <= 1
    return error


TIMED = [(gemv_float, 1024, 1024, 1), (gemv_float, 16384, 4096, 1), (gemv_float, 4096, 4096, 8),
         (gemm_float, 32, 1024, 256), (gemm_float, 2048, 2048, 256)]


def cases(card):
    """The checks of both families for every kind of weight, then times."""
    for case in CASES:
        for kind in WEIGHT_AT:
            for multiply in (gemv_float, gemm_float):
                yield Case(f"{multiply.__name__} {TYPES[kind].name}, {'{} x {}, {} rows'.format(*case)}",
                           partial(check, card, *case, kind, multiply))
    for multiply, n, k, rows in TIMED:
        for kind in WEIGHT_AT:
            w = Matrix(TYPES[kind].name, n, k, card.zeros((n, k), kind))
            x = card.zeros((rows, k), np.float32)
            y = card.alloc((rows, n), np.float32)
            yield Case(f"time of {multiply.__name__} {TYPES[kind].name}, {n} x {k}, {rows} rows",
                       launch=partial(multiply, card, y, n, w, x, rows),
                       n_bytes=w.values.nbytes + x.nbytes + y.nbytes, n_ops=2 * n * k * rows, pipe="ffma")


if __name__ == "__main__":
    main("Float matrix products", cases)
