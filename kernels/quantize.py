"""Activations to int8, one float32 scale per 32 values.

    d = max|x| / 127                          over a block of 32 consecutive values of a row
    q = round_half_even(x / d)                -127 .. 127,  x ~ q * d,  |x - q d| <= d / 2

Both quotients are correctly rounded; x * (127 / max|x|) would give other integers. A lane divides once for its four
values, r = 1 / d. Then it refines q = x r twice by q + r (x - q d), whose remainder is exact by fma: the first gives a
neighbour of x / d, the second the nearest float (P. Markstein, Computation of elementary functions on the IBM RISC
System/6000 processor, IBM J. Res. Dev. 34, 1990). Without fma (kernels/throttled.py) a value next to a tie may be
rounded to the other side.

A block whose scale would not be a normal float32, max|x| < 1.5e-36, becomes all zeros. A NaN or an infinity makes the
scale of its block NaN or infinite, so that it shows in whatever is computed from the block.

**The rest.** Where 8 bits are too few, a second product with what they leave adds about 8 more:

    (q, d) <- int8 blocks of x - q d          the same memory; x - q d is rounded once

    x  float32 [rows, k]         k a multiple of 32, so no block crosses rows, and the rows are one long row
    q  int8    [rows, k]
    d  float32 [rows, k / 32]

        lane        0        1     ...    7     |    8    ...
        x       4 floats  4 floats ... 4 floats | 4 floats     16-byte loads
        q        1 word    1 word  ...  1 word  |  1 word       4-byte stores
        d       |<----------- 1 float --------->|

Eight lanes hold a block and find its maximum by three shuffles. Pipe: fp32; per lane two correctly rounded divisions,
of about ten fma each, and five operations for each value. Bytes: 4 + 1 + 1/8 per value, of which the 4 are usually
still in L2. In the engine the kernel takes a few microseconds and is bound by its launch; on long prompts 80 % of copy
bandwidth is expected.
"""

import itertools
from functools import partial

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint32

from kernels.bench import Case, main
from kernels.formats import BLOCK
from kernels.intrinsics import (div_rn, float_as_word, load_word, load_words4, round_to_int, store_word,
                                word_as_float)
from kernels.operands import Quantized

THREADS = 128
MIN_NORMAL = 2.0**-126
LOW, LIFT = 2.0**-100, 2.0**60  # scales below LOW, and their values, are multiplied by LIFT to keep remainders exact
NO_SIGN = 0x7FFFFFFF


def quantize_reference(x):
    """x float32 [rows, k] -> (q int8 [rows, k], d float32 [rows, k / 32]), bit for bit what the kernel gives."""
    blocks = x.reshape(-1, BLOCK).astype(np.float32)
    d = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    tiny = d < np.float32(MIN_NORMAL)
    with np.errstate(invalid="ignore"):
        q = np.rint(blocks / np.where(tiny, np.float32(1), d))
    q = np.nan_to_num(q, nan=0.0).astype(np.int8)  # NaN / NaN and inf / inf: the scale shows them
    return q.reshape(x.shape), np.where(tiny, np.float32(0), d).reshape(x.shape[0], -1)


def quantize_rest_reference(x, q, d):
    """x float32 [rows, k] and what `quantize_reference` gives of it -> the int8 blocks of what is left."""
    with np.errstate(invalid="ignore"):
        rest = x.astype(np.float64) - q.astype(np.float64) * np.repeat(d, BLOCK, axis=1)    # exact but for one rounding
    return quantize_reference(rest.astype(np.float32))


@cuda.jit(device=True, inline="always")
def word_max(a, b):
    """The larger of two words. Floats without a sign are ordered as their bits are; infinity is above them, NaN above
    infinity."""
    return uint32(a if a > b else b)


@cuda.jit(device=True, inline="always")
def block_scale(w0, w1, w2, w3):
    """The scale d of a block that 8 neighbouring lanes hold, each 4 floats as words; all lanes call."""
    high = word_max(word_max(w0 & uint32(NO_SIGN), w1 & uint32(NO_SIGN)),
                    word_max(w2 & uint32(NO_SIGN), w3 & uint32(NO_SIGN)))
    high = word_max(high, uint32(cuda.shfl_xor_sync(0xFFFFFFFF, int32(high), 4)))
    high = word_max(high, uint32(cuda.shfl_xor_sync(0xFFFFFFFF, int32(high), 2)))
    high = word_max(high, uint32(cuda.shfl_xor_sync(0xFFFFFFFF, int32(high), 1)))
    d = div_rn(word_as_float(high), float32(127.0))
    return float32(0.0) if d < float32(MIN_NORMAL) else d


@cuda.jit(device=True, inline="always")
def quotient_byte(x, divisor, inverse):
    """round(x / divisor) as a byte; inverse is the correctly rounded 1 / divisor."""
    q = x * inverse
    q = cuda.fma(cuda.fma(-q, divisor, x), inverse, q)
    q = cuda.fma(cuda.fma(-q, divisor, x), inverse, q)
    return uint32(round_to_int(q)) & uint32(0xFF)


@cuda.jit(device=True, inline="always")
def quantize_word(w0, w1, w2, w3, d):
    """One word of four int8 from four floats, given as words, and the scale of their block."""
    up = float32(LIFT) if d < float32(LOW) else float32(1.0)
    divisor = float32(1.0) if d == float32(0.0) else d * up  # |x| < 1.5e-36 there, so x LIFT / 1 rounds to 0
    inverse = div_rn(float32(1.0), divisor)
    q0 = quotient_byte(word_as_float(w0) * up, divisor, inverse)
    q1 = quotient_byte(word_as_float(w1) * up, divisor, inverse)
    q2 = quotient_byte(word_as_float(w2) * up, divisor, inverse)
    q3 = quotient_byte(word_as_float(w3) * up, divisor, inverse)
    return uint32(q0 | uint32(q1 << uint32(8)) | uint32(q2 << uint32(16)) | uint32(q3 << uint32(24)))


@cuda.jit(device=True, inline="always")
def quantize_and_store(q, d, word, inside, w0, w1, w2, w3):
    """Stores word number `word` of q, if it is inside, and the first lane of a block the scale. All lanes call: the
    scale comes from shuffles among the lanes of a block."""
    scale = block_scale(w0, w1, w2, w3)
    if inside:
        store_word(q, uint32(word * uint32(4)), quantize_word(w0, w1, w2, w3, scale))
        if word & uint32(7) == uint32(0):
            d[uint32(word >> uint32(3))] = scale


@cuda.jit
def quantize_kernel(q, d, x, n_words):
    word = uint32(cuda.blockIdx.x * uint32(THREADS) + cuda.threadIdx.x)  # this thread's word of q
    inside = word < n_words
    w0, w1, w2, w3 = uint32(0), uint32(0), uint32(0), uint32(0)
    if inside:
        w0, w1, w2, w3 = load_words4(x, uint32(word * uint32(4)))
    quantize_and_store(q, d, word, inside, w0, w1, w2, w3)


@cuda.jit(device=True, inline="always")
def rest_word(x, q, byte, d):
    """The word of the float x - q d; x: a float's word, q: the word whose byte number `byte` counts."""
    value = int32(int32(q << uint32(uint32(24) - uint32(8) * byte)) >> int32(24))
    return float_as_word(cuda.fma(-float32(value), d, word_as_float(x)))


@cuda.jit
def quantize_rest_kernel(q, d, x, n_words):
    word = uint32(cuda.blockIdx.x * uint32(THREADS) + cuda.threadIdx.x)  # this thread's word of q
    inside = word < n_words
    w0, w1, w2, w3 = uint32(0), uint32(0), uint32(0), uint32(0)
    if inside:
        w0, w1, w2, w3 = load_words4(x, uint32(word * uint32(4)))
        coarse, old = load_word(q, uint32(word * uint32(4))), d[uint32(word >> uint32(3))]
        w0, w1 = rest_word(w0, coarse, uint32(0), old), rest_word(w1, coarse, uint32(1), old)
        w2, w3 = rest_word(w2, coarse, uint32(2), old), rest_word(w3, coarse, uint32(3), old)
    quantize_and_store(q, d, word, inside, w0, w1, w2, w3)      # writes d after every lane of the block has read it


def quantize_rest(card, out, x, rows, k, *, stream=None):
    """out, Quantized [rows, k], holds x float32 [rows, k] and then holds what is left of it. Never allocates."""
    n_words = rows * k // 4
    card.launch(quantize_rest_kernel, -(-n_words // THREADS), THREADS, *out.flat,
                x.reshape(-1), n_words, stream=stream)


def quantize_q8(card, out, x, rows, k, *, stream=None):
    """out, Quantized [rows, k] <- x float32 [rows, k]; k a multiple of 32. Never allocates."""
    n_words = rows * k // 4
    card.launch(quantize_kernel, -(-n_words // THREADS), THREADS, *out.flat,
                x.reshape(-1), n_words, stream=stream)


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [(1, 32), (3, 96), (1, 320), (31, 160), (65, 1024), (500, 256), (1, 4096)]  # rows, k


def near_ties(high):
    """A block whose largest value is `high`; the others are the floats next to 15.5 d, 22.5 d, 29.5 d, ..."""
    high, up = np.float32(high), np.float32(np.inf)
    ties = high / np.float32(127) * (np.arange(10, dtype=np.float32) * 7 + np.float32(15.5))
    return np.r_[high, ties, -np.nextafter(ties, -up), np.nextafter(ties, up), ties[0]]


def sample_rows(rows, k):
    """float32 [rows, k]: random rows of all sizes, with awkward blocks among them."""
    rng = np.random.default_rng(rows * k)
    x = rng.standard_normal((rows, k), np.float32) * np.exp2(rng.integers(-30, 30, (rows, 1))).astype("f4")
    blocks = x.reshape(-1, BLOCK)
    awkward = (np.zeros(BLOCK), np.r_[127.0, np.arange(31) + 0.5], np.full(BLOCK, 1e-37),
               np.full(BLOCK, -3.4e38), np.r_[np.nan, np.ones(31)], np.r_[np.inf, np.ones(31)],
               np.r_[1.5e-36, np.full(31, -1e-45)], near_ties(1.0), near_ties(1e-35), near_ties(3e38))
    for block, values in zip(range(0, len(blocks), 5), itertools.cycle(awkward)):
        blocks[block] = values
    return x


def check(card, rows, k):
    """Quantises random rows and awkward blocks; asserts the bits of the reference. Returns 0, the error."""
    x = sample_rows(rows, k)
    q, d = card.alloc((rows + 1, k), np.int8), card.alloc((rows + 1, k // BLOCK), np.float32)
    card.poison(q), card.poison(d)
    quantize_q8(card, Quantized(q[:rows], d[:rows]), card.upload(x), rows, k)
    q, d = card.download(q), card.download(d)
    want_q, want_d = quantize_reference(x)
    np.testing.assert_array_equal(q[:rows], want_q)
    np.testing.assert_array_equal(d[:rows], want_d)
    assert (q[rows] == -1).all() and np.isnan(d[rows]).all(), "wrote past the end"
    return 0.0


def check_rest(card, rows, k):
    """Quantises random rows and what is left of them; asserts the bits of the reference, and that two planes are nearer
    than one. Returns 0, the error."""
    x = sample_rows(rows, k)
    q, d = card.alloc((rows + 1, k), np.int8), card.alloc((rows + 1, k // BLOCK), np.float32)
    card.poison(q), card.poison(d)
    given, out = card.upload(x), Quantized(q[:rows], d[:rows])
    quantize_q8(card, out, given, rows, k)
    coarse = card.download(q)[:rows], card.download(d)[:rows]
    quantize_rest(card, out, given, rows, k)
    q, d = card.download(q), card.download(d)
    want_q, want_d = quantize_rest_reference(x, *coarse)
    np.testing.assert_array_equal(q[:rows], want_q)
    np.testing.assert_array_equal(d[:rows], want_d)
    assert (q[rows] == -1).all() and np.isnan(d[rows]).all(), "wrote past the end"
    high = np.repeat(np.abs(x.reshape(-1, BLOCK)).max(axis=1), BLOCK).reshape(x.shape)
    usual = (high > 1e-25) & (high < 1e30)                  # in blocks whose scales are normal numbers
    with np.errstate(invalid="ignore"):
        both = sum(values.astype(np.float64) * np.repeat(scales, BLOCK, axis=1)
                   for values, scales in (coarse, (want_q, want_d)))
        assert (np.abs(x - both) <= high * 2.0 ** -15)[usual].all()
    return 0.0


def check_with_twin(card, want, tolerance, plain, quantized):
    """Checks a kernel in its two forms. plain(y) writes float32 rows, which are compared with `want`, float64
    [rows, k]. quantized(out) writes them as int8 blocks, which must have the bits of quantize_q8 of y. A row after the
    last one must stay as it was. Returns the largest relative error."""
    rows, k = want.shape
    shapes = ((rows + 1, k), np.float32), ((rows + 1, k), np.int8), ((rows + 1, k // BLOCK), np.float32)
    y, q, d, want_q, want_d = (card.alloc(*shape) for shape in (*shapes, *shapes[1:]))
    for output in (y, q, d, want_q, want_d):
        card.poison(output)
    plain(y)
    quantized(Quantized(q, d))
    quantize_q8(card, Quantized(want_q, want_d), y, rows, k)
    y, q, d, want_q, want_d = map(card.download, (y, q, d, want_q, want_d))
    np.testing.assert_allclose(y[:rows], want, rtol=tolerance, atol=1e-36)
    np.testing.assert_array_equal(q, want_q)
    np.testing.assert_array_equal(d, want_d)
    assert np.isnan(y[rows]).all() and (q[rows] == -1).all() and np.isnan(d[rows]).all(), "wrote past the end"
    return np.max(np.abs(y[:rows] - want) / np.abs(want))


def cases(card):
    """The checks, then times for one token and for a prompt of a small and a 27B model."""
    for case in CASES:
        yield Case("{} x {}".format(*case), partial(check, card, *case))
        yield Case("the rest of {} x {}".format(*case), partial(check_rest, card, *case))
    for rows, k in ((1, 256), (1, 5120), (512, 5120)):
        x = card.zeros((rows, k), np.float32)
        out = Quantized(card.alloc((rows, k), np.int8), card.alloc((rows, k // BLOCK), np.float32))
        yield Case(f"time of {rows} x {k}", launch=partial(quantize_q8, card, out, x, rows, k),
                   n_bytes=x.nbytes + out.q.nbytes + out.d.nbytes)


if __name__ == "__main__":
    main("int8 activations", cases)
