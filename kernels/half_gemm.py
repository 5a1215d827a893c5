"""Matrix products in half precision with float32 sums, for pictures: float16 weights times float16 activations.

    y[r, n] = f(b[n] + sum over chains c of float(h[r, n, c].low) + float(h[r, n, c].high))
    h[r, n, c]: half2, the products w[n, j : j + 2] * x[r, j : j + 2] for j = 32 c, 32 c + 2, ..., 32 c + 30, added up
                one fma after the other

    w  float16 [n, k]     x  float16 [rows, k]     b  float32 [n]
    y  float16 or float32 [rows, n]; rows any, n a multiple of 4, k a multiple of 8; w, x, y below 2**32 elements

An `Ending` names f and the type of y: plain, with GELU, or added to what y holds.

Half precision where it is harmless: each half of a chain adds 16 products, then float32 takes over. An fma errs by at
most 2^-11 of the chain's sum so far, so the relative error of a product of random matrices is about 6e-4, whatever k
is. Sums of 16 products must stay below 65,504. With float32 from the first product on, the fp32 pipe would take twice
as many instructions.

A lane makes R rows x C columns, in a warp of 4 x 8 lanes; `down` x `across` warps make a tile of y. Rows of x and w
pass through shared memory, 32 elements at a time, in two buffers. While a block multiplies one, it fills the other, and
the elements for the time after are on their way from global memory.

    buffer: rows of x, then rows of w, 64 bytes each and 16 of padding: 8 neighbouring rows lie in different banks
    a lane's rows of x are i, i + 4, i + 8, ... of the warp's; its columns are C neighbours, C l .. C l + C - 1
    column C l + c of a warp lies at row 8 c + l of its part of w, so 8 lanes read 8 neighbouring rows

Each output is one chain of sums over k alone, so all shapes of tiles have the same bits, whatever the other rows are.

Pipe: half2, n k rows / 2 fma. For 8 x 8 outputs per lane, 1,024 of about 1,360 instructions of the loop are half2 fma,
128 turn halves into floats, 128 add floats, 64 load from shared memory: the bound is 75 % of the peak of a card whose
half2 pipe takes an instruction in every cycle (Hopper), and more on Volta, whose half2 pipe takes one in two.
"""

import math
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.types import float32, uint32, uint64

from kernels.attention import power_of_two
from kernels.bench import Case, main
from kernels.card import Array
from kernels.float_matmul import place_of_8
from kernels.intrinsics import (div_rn, exp, float_as_word, float_min, half2_high, half2_low, hfma2, hmul2,
                                load_floats4, load_shared4, load_words4, pack_half2, shared_address, store_floats4,
                                store_shared4, store_words2, word_as_float)

DEPTH = 32               # elements of k in a buffer, and in the two halves of a chain together
PIECES = DEPTH // 8      # of 16 bytes in a row of a buffer
PITCH = 2 * DEPTH + 16   # bytes from one row of a buffer to the next
LANES_DOWN, LANES_ACROSS = 4, 8
GELU_SLOPE = 2 * math.sqrt(2 / math.pi) * math.log2(math.e)


class HalfMatrix(NamedTuple):
    """A linear map: y = x . w^T + bias."""

    w: Array             # float16 [n, k]
    bias: Array          # float32 [n]


# ---- reference ---------------------------------------------------------------------------------------------

def gelu_reference(x):
    """The form with tanh: x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    return x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


def gelu_exact_reference(x):
    """x times the normal distribution function of x."""
    return x * np.frompyfunc(lambda each: math.erfc(-each / math.sqrt(2)) / 2, 1, 1)(x).astype(np.float64)


def gemm_reference(w, bias, x):
    """float64 [rows, n]."""
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64).T + bias


# ---- endings -----------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def reciprocal(x):
    """1 / x within 2^-21 for 1 <= x < 2^60, without a branch. Newton's steps from a guess by the bits of x, which errs
    by 1 in 8 at most: an error e becomes e^2."""
    y = word_as_float(uint32(uint32(0x7EF311C7) - float_as_word(x)))
    for _ in range(3):
        y = cuda.fma(y, cuda.fma(-x, y, float32(1.0)), y)
    return y


@cuda.jit(device=True, forceinline=True)
def gelu(x):
    """The form with tanh, as x times a sigmoid: 1 + tanh(u) = 2 / (1 + 2^v), v = -2 log2(e) u. Within 2^-17 of it,
    where the result is not below 2^-50 |x|; a NaN stays one."""
    v = x * cuda.fma(x * x, float32(-0.044715 * GELU_SLOPE), float32(-GELU_SLOPE))
    return x * reciprocal(float32(1.0) + power_of_two(float_min(v, float32(50.0))))


@cuda.jit(device=True, forceinline=True)
def gelu_exact(x):
    """x Phi(x) within 2e-7 |x|. erfc(z) for z >= 0 is a polynomial of t = 1 / (1 + p z) times exp(-z^2): Abramowitz and
    Stegun, Handbook of Mathematical Functions, 7.1.26."""
    z = abs(x) * float32(math.sqrt(0.5))
    t = div_rn(float32(1.0), cuda.fma(z, float32(0.3275911), float32(1.0)))
    p = cuda.fma(t, float32(1.061405429), float32(-1.453152027))
    p = cuda.fma(p, t, float32(1.421413741))
    p = cuda.fma(p, t, float32(-0.284496736))
    p = cuda.fma(p, t, float32(0.254829592))
    tail = float32(0.5) * (p * t) * exp(-(z * z))         # Phi(-|x|)
    return x * (tail if x < float32(0.0) else float32(1.0) - tail)


@cuda.jit(device=True, forceinline=True)
def same(x):
    return x


@cuda.jit(device=True, forceinline=True)
def store_halves(y, at, a, b, c, d):
    store_words2(y, at, pack_half2(a, b), pack_half2(c, d))


@cuda.jit(device=True, forceinline=True)
def add_floats(y, at, a, b, c, d):
    y0, y1, y2, y3 = load_floats4(y, at)
    store_floats4(y, at, y0 + a, y1 + b, y2 + c, y3 + d)


class Ending(NamedTuple):
    """What becomes of a sum. dtype: of y; store(y, at, a, b, c, d) writes four neighbours."""

    function: object
    store: object
    dtype: type
    reference: object
    adds: bool = False


ENDINGS = {
    "half": Ending(same, store_halves, np.float16, lambda x: x),
    "gelu": Ending(gelu, store_halves, np.float16, gelu_reference),
    "exact gelu": Ending(gelu_exact, store_halves, np.float16, gelu_exact_reference),
    "float": Ending(same, store_floats4, np.float32, lambda x: x),
    "add": Ending(same, add_floats, np.float32, lambda x: x, adds=True),
}


# ---- kernel ------------------------------------------------------------------------------------------------

class Shape(NamedTuple):
    """How a block of threads makes a tile of y."""

    rows: int               # of a lane
    columns: int            # of a lane, a multiple of 4
    down: int               # warps one below the other
    across: int             # warps side by side
    resident: int           # blocks that an SM must hold: bounds the registers

    @property
    def warps(self):
        return self.down * self.across

    @property
    def height(self):
        return LANES_DOWN * self.rows * self.down

    @property
    def width(self):
        return LANES_ACROSS * self.columns * self.across


def tile_functions(shape):
    """(fetch, put, multiply, flush), the parts of the loop."""
    rows, columns, apart = shape.rows, shape.columns, 8 * shape.warps * PITCH

    @cuda.jit(device=True, forceinline=True)
    def fetch(raw, source, starts, j, k):
        """Loads 8 elements from j on of each row that the thread carries; zeros past the end of k."""
        for i in range(len(raw)):
            raw[i, 0], raw[i, 1], raw[i, 2], raw[i, 3] = uint32(0), uint32(0), uint32(0), uint32(0)
            if j < k:
                raw[i, 0], raw[i, 1], raw[i, 2], raw[i, 3] = load_words4(source, uint32(starts[i] + j))

    @cuda.jit(device=True, forceinline=True)
    def put(raw, to):
        for i in range(len(raw)):
            store_shared4(to + uint64(apart * i), raw[i, 0], raw[i, 1], raw[i, 2], raw[i, 3])

    @cuda.jit(device=True, forceinline=True)
    def multiply_rows(h, w, x, x_at, first, last, fresh):
        for r in range(first, last):
            x[0], x[1], x[2], x[3] = load_shared4(x_at + uint64(LANES_DOWN * PITCH * r))
            for j in range(4):
                for c in range(columns):
                    h[r, c] = hmul2(w[c, j], x[j]) if fresh and j == 0 else hfma2(w[c, j], x[j], h[r, c])

    @cuda.jit(device=True, forceinline=True)
    def multiply(h, w, x, w_at, x_at, fresh):
        """8 elements of each row of x and w: 4 links of every chain. fresh: the first ones."""
        for c in range(columns):
            w[c, 0], w[c, 1], w[c, 2], w[c, 3] = load_shared4(w_at + uint64(LANES_ACROSS * PITCH * c))
        multiply_rows(h, w, x, x_at, 0, rows // 2, fresh)
        multiply_rows(h, w, x, x_at, rows // 2, rows, fresh)

    @cuda.jit(device=True, forceinline=True)
    def flush(acc, h):
        for r in range(rows):
            for c in range(columns):
                acc[r, c] = acc[r, c] + (half2_low(h[r, c]) + half2_high(h[r, c]))

    return fetch, put, multiply, flush


@cache
def gemm_kernel(shape, ending):
    """The kernel for a Shape and the name of an Ending."""
    rows, columns, down, _, resident = shape
    function, store = ENDINGS[ending].function, ENDINGS[ending].store
    fetch, put, multiply, flush = tile_functions(shape)
    height, width, lines = shape.height, shape.width, 8 * shape.warps    # lines: rows that the block carries at once
    x_carried, w_carried = -(-height // lines), -(-width // lines)
    x_bytes, w_bytes = x_carried * lines * PITCH, w_carried * lines * PITCH
    shared_words, warp_width = 2 * (x_bytes + w_bytes) // 4, LANES_ACROSS * columns

    @cuda.jit(launch_bounds=(32 * shape.warps, resident))
    def gemm_half_kernel(y, w, bias, x, n, k, n_rows):
        lane, warp = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        column0 = uint32(uint32(cuda.blockIdx.x) * uint32(width))
        row0 = uint32(uint32(cuda.blockIdx.y) * uint32(height))

        # What the thread carries: 8 elements from j on of these rows; in place of rows past the last one the last one.
        line, j = uint32(uint32(warp << uint32(3)) + uint32(lane & uint32(7))), uint32(lane & uint32(0x18))
        x_starts, w_starts = cuda.local.array(x_carried, uint32), cuda.local.array(w_carried, uint32)
        x_raw, w_raw = cuda.local.array((x_carried, 4), uint32), cuda.local.array((w_carried, 4), uint32)
        for i in range(x_carried):
            at = uint32(row0 + line + uint32(lines * i))
            x_starts[i] = uint32(min(at, uint32(n_rows - uint32(1))) * k)
        for i in range(w_carried):
            at = uint32(line + uint32(lines * i))           # in the buffer; it holds this column of the tile:
            inside = uint32(at % uint32(warp_width))
            at = uint32(at - inside + uint32(inside & uint32(7)) * uint32(columns) + uint32(inside >> uint32(3)))
            w_starts[i] = uint32(min(uint32(column0 + at), uint32(n - uint32(1))) * k)

        x_to = shared_address(cuda.shared.array(shared_words, uint32, alignment=16))
        row, column = place_of_8(lane)
        row = uint32(row + uint32(uint32(warp % uint32(down)) * uint32(LANES_DOWN * rows)))
        w_line = uint32(column + uint32(uint32(warp // uint32(down)) * uint32(warp_width)))
        x_at = x_to + uint64(uint32(row * uint32(PITCH)))
        w_at = x_to + uint64(x_bytes) + uint64(uint32(w_line * uint32(PITCH)))
        x_to = x_to + uint64(uint32(uint32(line * uint32(PITCH)) + uint32(j << uint32(1))))
        w_to = x_to + uint64(x_bytes)
        here, following = uint64(0), uint64(x_bytes + w_bytes)

        acc = cuda.local.array((rows, columns), float32)
        h = cuda.local.array((rows, columns), uint32)
        words, value = cuda.local.array((columns, 4), uint32), cuda.local.array(4, uint32)
        for r in range(rows):
            for c in range(columns):
                acc[r, c] = float32(0.0)
        fetch(x_raw, x, x_starts, j, k)
        fetch(w_raw, w, w_starts, j, k)
        put(x_raw, x_to)
        put(w_raw, w_to)
        j = uint32(j + uint32(DEPTH))
        fetch(x_raw, x, x_starts, j, k)
        fetch(w_raw, w, w_starts, j, k)
        cuda.syncthreads()
        for _ in range(uint32(uint32(k + uint32(DEPTH - 1)) // uint32(DEPTH))):
            w_here, x_here = w_at + here, x_at + here
            multiply(h, words, value, w_here, x_here, True)
            multiply(h, words, value, w_here + uint64(16), x_here + uint64(16), False)
            put(x_raw, x_to + following)
            put(w_raw, w_to + following)
            j = uint32(j + uint32(DEPTH))
            fetch(x_raw, x, x_starts, j, k)
            fetch(w_raw, w, w_starts, j, k)
            multiply(h, words, value, w_here + uint64(32), x_here + uint64(32), False)
            multiply(h, words, value, w_here + uint64(48), x_here + uint64(48), False)
            flush(acc, h)
            cuda.syncthreads()
            here, following = following, here

        column = uint32(column0 + uint32(w_line - column) + uint32(column * uint32(columns)))
        for r in range(rows):
            to_row = uint32(row0 + row + uint32(LANES_DOWN * r))
            for c in range(0, columns, 4):
                to_column = uint32(column + uint32(c))
                if to_row < n_rows and to_column < n:
                    b0, b1, b2, b3 = load_floats4(bias, to_column)
                    store(y, uint32(to_row * n + to_column), function(acc[r, c] + b0), function(acc[r, c + 1] + b1),
                          function(acc[r, c + 2] + b2), function(acc[r, c + 3] + b3))

    return gemm_half_kernel


# The shapes of tiles, and how fast each is where all SMs are full, relative to the first one (measured on an H100).
SHAPES = {Shape(8, 8, 4, 1, 2): 1.0, Shape(4, 8, 4, 1, 3): 0.96}
EMULATED = Shape(4, 8, 4, 1, 3)


def tile_time(card, n, rows, shape):
    """The time of a product, in outputs of an SM that works at full speed. The SMs take blocks in rounds. A block of
    the last round is faster where it has an SM to itself, but not as much: starting a round costs a quarter of it."""
    blocks = -(-n // shape.width) * -(-rows // shape.height)
    rounds, rest = divmod(blocks, shape.resident * card.n_sms)
    last = (1 + 3 * -(-rest // card.n_sms) / shape.resident) / 4 if rest else 0
    return (rounds + last) * shape.resident * shape.height * shape.width / SHAPES[shape]


def shapes_of(card):
    """The Shapes from which a card chooses."""
    return [EMULATED] if card.kind == "emulated" else list(SHAPES)


def shape_of(card, n, rows):
    """The Shape with which a product takes the least time."""
    return min(shapes_of(card), key=lambda shape: tile_time(card, n, rows, shape))


# ---- launches: they write in place and never allocate -----------------------------------------------------

def gemm_half(card, y, matrix, x, rows, ending, *, stream=None, shape=None):
    """y [rows, n] <- what the Ending of this name makes of x . w^T + bias. x: float16 [rows, k] or more rows. matrix:
    HalfMatrix. y has the dtype of the Ending. shape: a Shape; by default the fastest."""
    n, k = matrix.w.shape
    if n % 4 or k % 8 or y.dtype != ENDINGS[ending].dtype:
        raise ValueError(f"no product of [{n}, {k}] with the ending {ending!r} in {y!r}")
    shape = shape or shape_of(card, n, rows)
    grid = (-(-n // shape.width), -(-rows // shape.height))
    card.launch(gemm_kernel(shape, ending), grid, (32, shape.warps), y.reshape(-1), matrix.w.reshape(-1), matrix.bias,
                x.reshape(-1), n, k, rows, stream=stream)


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [(4, 8, 1), (8, 40, 3), (132, 72, 65), (100, 144, 70), (260, 1152, 33), (64, 4304, 20)]     # n, k, rows
TIMED = [(3456, 1152, 2304), (1152, 1152, 2304), (4304, 1152, 2304), (1152, 4304, 2304), (3456, 1152, 9216),
         (4608, 4608, 576)]

# Relative L2 error of all of y. The roundings of a chain make 6e-4 (above), that of a float16 result 2e-4.
TOLERANCE = 2.0 ** -10


def check(card, n, k, rows, ending, shape=None):
    """Multiplies random matrices; y is poisoned, and has a row too many. Returns the relative L2 error of y."""
    rng = np.random.default_rng((n, k, rows))
    w, x = (rng.standard_normal(size, np.float32).astype(np.float16) for size in ((n, k), (rows, k)))
    w = (w / np.float16(k ** 0.5)).astype(np.float16)
    bias, before = rng.standard_normal(n, np.float32), rng.standard_normal((rows, n), np.float32)
    end = ENDINGS[ending]
    y = card.alloc((rows + 1, n), end.dtype)
    card.poison(y)
    if end.adds:
        card.copy_in(y[:rows], before)
    gemm_half(card, y, HalfMatrix(card.upload(w), card.upload(bias)), card.upload(x), rows, ending, shape=shape)
    got = card.download(y)
    assert np.isnan(got[rows]).all(), "wrote elsewhere"
    want = end.reference(gemm_reference(w, bias, x)) + before * end.adds
    error = np.linalg.norm(got[:rows] - want) / np.linalg.norm(want)
    assert error <= TOLERANCE, f"error {error}"
    return error


def cases(card):
    """The checks with every ending and shape, then times of the products of a tower of the real size."""
    for case in CASES:
        for ending in ENDINGS:
            yield Case("{} x {}, {} rows, ".format(*case) + ending, partial(check, card, *case, ending))
    for shape in SHAPES:
        for case in CASES:
            yield Case("{} x {}, {} rows, ".format(*case) + str(shape[:4]), partial(check, card, *case, "add", shape))
    if card.kind == "cuda":
        for n, k, rows in TIMED:
            matrix = HalfMatrix(card.zeros((n, k), np.float16), card.zeros(n, np.float32))
            x, y = card.zeros((rows, k), np.float16), card.zeros((rows, n), np.float16)
            yield Case(f"time of {n} x {k}, {rows} rows", launch=partial(gemm_half, card, y, matrix, x, rows, "half"),
                       n_ops=2 * n * k * rows, pipe="half2")


if __name__ == "__main__":
    main("Matrix products in half precision", cases)
