"""Random weights made on the card, so that a model of any size can be timed without a file.

    bits(i, seed) = mix(i + mix(seed + 0x9E3779B9))     one uint32 per index, the 32-bit finaliser of MurmurHash3
    uniform       low + (high - low) * bits / 2**32
    8-bit codes   4 bytes of bits(word index), each cut to 7 bits and sign-extended: uniform in [-64, 63]
    other codes   all bits of wq are random: every pattern is a code, so q is uniform over the format's values;
                  of ternary codes 3 becomes 1
    scales d      (0.5 + bits / 2**32) / (deviation sqrt(k)), where `deviation` is that of q times its integer scale:
                  so a row's product with unit inputs is of order 1, whatever k is. Where a scale has few bits, it is
                  one of the two next to d, at random
    integer scales   ((bits & mask) | base) * factor, as the format says (RandomHeader in kernels/formats/format.py).
                  The minimum has the same integer scale, and dmin is d times the mean of q, so that weights are
                  around 0

Layout: kernels/formats. Thread i writes word i of the codes, the header of block i of the file, or float i.
Cost: 18 to 34 bytes written per 32 weights and about 12 integer instructions per word; bandwidth is the limit.
"""

import math
from functools import cache, partial

import numpy as np
from numba import cuda
from numba.types import float32, uint16, uint32

from kernels.bench import Case, main
from kernels.formats import FORMATS, as_words, pack_scales
from kernels.intrinsics import float_as_word, half_bits, store_word

THREADS = 256
Q8_DEVIATION = 36.95  # of a uniform integer in [-64, 63]


def mix_reference(words):
    """MurmurHash3's 32-bit finaliser (Austin Appleby, public domain) on an array of uint32."""
    h = words.astype(np.uint32)
    for multiplier, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        h = (h ^ (h >> np.uint32(shift))) * np.uint32(multiplier)
    return h ^ (h >> np.uint32(16))


def bits_reference(count, seed):
    """bits(i, seed) for i < count."""
    start = mix_reference(np.array([(seed + 0x9E3779B9) & 0xFFFFFFFF], np.uint32))
    return mix_reference(np.arange(count, dtype=np.uint32) + start)


def deviation(format):
    """Standard deviation of q as `random_matrix` draws it, times the mean of the integer scales, if there are any."""
    if format.random.codes != "all":
        return {"sevens": Q8_DEVIATION, "ternary": math.sqrt(0.5)}[format.random.codes]
    return math.sqrt(format.values.var()) * format.random.mean


def drawn_words(format):
    """Random words for the header of a block of the file."""
    return 8 if format.random.integers <= 8 else 16


def random_matrix_reference(format, n, k, seed):
    """(wq, wd) of a matrix [n, k] in NumPy's dtypes of `format.arrays`."""
    (wq_shape, wq_type), (wd_shape, wd_type) = format.arrays(n, k)
    words = bits_reference(math.prod(wq_shape) // 4, seed)
    if format.random.codes == "sevens":
        sign = words & np.uint32(0x40404040)
        words = (words & np.uint32(0x3F3F3F3F)) | sign | (sign << np.uint32(1))
    if format.random.codes == "ternary":
        words = words & ~((words & np.uint32(0x55555555)) << np.uint32(1))
    count = n * k // format.file_block
    unit = bits_reference(count, seed + 1).astype(np.float32) * np.float32(2.0 ** -32)
    d = (np.float32(0.5) + unit) * np.float32(1.0 / (deviation(format) * math.sqrt(k)))
    made, seed = format.random, seed + 2
    drawn = bits_reference(drawn_words(format) * count, seed).astype(np.uint32).reshape(count, -1)
    integers = ((drawn[:, :made.integers] & np.uint32(made.mask)) | np.uint32(made.base)) * np.uint32(made.factor)
    n_floats = format.wd_words - made.integers
    floats = [d, d * np.float32(made.second * format.values.mean())][:n_floats] if format.minima else [d] * n_floats
    encode = ENCODERS[format.scales.kind][0]
    floats = [encode(value, drawn[:, i]) for i, value in enumerate(floats)]
    wd = pack_scales(format, np.concatenate([integers.astype(np.uint16), np.stack(floats, axis=1)], axis=1), n)
    return words.view(wq_type).reshape(wq_shape), wd.view(wd_type).reshape(wd_shape)


def random_uniform_reference(count, low, high, seed):
    """float32 [count]."""
    unit = bits_reference(count, seed).astype(np.float32) * np.float32(2.0 ** -32)
    return np.float32(low) + np.float32(high - low) * unit


@cuda.jit(device=True, inline="always")
def mix(h):
    """One round of `mix_reference`."""
    h = uint32(uint32(h ^ uint32(h >> uint32(16))) * uint32(0x85EBCA6B))
    h = uint32(uint32(h ^ uint32(h >> uint32(13))) * uint32(0xC2B2AE35))
    return uint32(h ^ uint32(h >> uint32(16)))


@cuda.jit(device=True, inline="always")
def random_bits(i, seed):
    """bits(i, seed)."""
    return mix(uint32(i + mix(uint32(seed + uint32(0x9E3779B9)))))


@cuda.jit
def random_words(out, n_words, seed, seven_bits, ternary):
    i = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
    if i < n_words:
        word = random_bits(i, seed)
        if seven_bits:
            sign = uint32(word & uint32(0x40404040))
            word = uint32(uint32(word & uint32(0x3F3F3F3F)) | uint32(sign | uint32(sign << uint32(1))))
        if ternary:
            word = uint32(word & uint32(~uint32(uint32(word & uint32(0x55555555)) << uint32(1))))
        store_word(out, uint32(i * uint32(4)), word)


@cuda.jit(device=True, inline="always")
def unit_float(i, seed):
    """bits(i, seed) / 2**32 as float32 in [0, 1]."""
    return float32(random_bits(i, seed)) * float32(2.0 ** -32)


# How a float scale is stored: (NumPy, device function) of float32 numbers above 0 and random words -> 16 bits.

def half_reference(x, drawn):
    return x.astype(np.float16).view(np.uint16)


def exponent_reference(x, drawn):
    word = x.view(np.uint32)
    chance = (word & np.uint32(0x7FFFFF)) < (drawn & np.uint32(0x7FFFFF))
    return (((word >> np.uint32(23)) + np.uint32(1) - chance.astype(np.uint32)) << np.uint32(7)).astype(np.uint16)


def minis_reference(x, drawn):
    half = (x * np.float32(2.0**-7)).astype(np.float16).view(np.uint16).astype(np.uint32)
    first, second = (half + (drawn >> np.uint32(shift) & np.uint32(127)) >> np.uint32(7) for shift in (0, 8))
    return (np.minimum(first, 126) | np.minimum(second, 126) << np.uint32(8)).astype(np.uint16)


@cuda.jit(device=True, inline="always")
def half_word(x, drawn):
    return half_bits(x)


@cuda.jit(device=True, inline="always")
def exponent_word(x, drawn):
    """The upper half of a power of two: the one below x or, the likelier the nearer x is, the one above."""
    word = float_as_word(x)
    exponent = uint32(word >> uint32(23))
    if uint32(word & uint32(0x7FFFFF)) >= uint32(drawn & uint32(0x7FFFFF)):
        exponent = uint32(exponent + uint32(1))
    return uint16(uint32(exponent << uint32(7)))


@cuda.jit(device=True, inline="always")
def minis_word(x, drawn):
    """Two bytes as NVFP4 has them, each one of the two next to x."""
    half = uint32(half_bits(x * float32(2.0**-7)))
    first = uint32(uint32(half + uint32(drawn & uint32(127))) >> uint32(7))
    second = uint32(uint32(half + uint32(uint32(drawn >> uint32(8)) & uint32(127))) >> uint32(7))
    return uint16(uint32(min(first, uint32(126)) | uint32(min(second, uint32(126)) << uint32(8))))


ENCODERS = {"half": (half_reference, half_word), "exponent": (exponent_reference, exponent_word),
            "mini": (minis_reference, minis_word)}


@cache
def headers_kernel(format):
    """The kernel of random headers of a format."""
    made, wd_words, encode = format.random, format.wd_words, ENCODERS[format.scales.kind][1]
    n, base, mask, factor = made.integers, made.base, made.mask, made.factor
    has_minimum, n_drawn, head = format.minima > 0, drawn_words(format), format.row_head or (0, 0)
    n_head = len(format.row_head)

    @cuda.jit
    def random_headers(out, count, per_row, seed, unit, minimum):
        """per_row: headers of a row. minimum: of a weight, relative to d."""
        i = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        if i < count:
            row, drawn = uint32(i // per_row), uint32(i * uint32(n_drawn))
            to = uint32(uint32(i * uint32(wd_words)) + uint32(uint32(row + uint32(1)) * uint32(n_head)))
            if n_head and i == uint32(row * per_row):
                out[uint32(to - uint32(2))] = uint16(head[0])
                out[uint32(to - uint32(1))] = uint16(head[1])
            for j in range(uint32(n)):
                h = random_bits(uint32(drawn + uint32(j)), uint32(seed + uint32(1)))
                out[uint32(to + uint32(j))] = uint16(
                    uint32(uint32(uint32(h & uint32(mask)) | uint32(base)) * uint32(factor)))
            d = (float32(0.5) + unit_float(i, seed)) * unit
            for j in range(uint32(n), uint32(wd_words)):
                h = random_bits(uint32(drawn + uint32(uint32(j) - uint32(n))), uint32(seed + uint32(1)))
                out[uint32(to + uint32(j))] = encode(d * minimum if has_minimum and j > uint32(n) else d, h)

    return random_headers


@cuda.jit
def random_floats(out, count, seed, low, width):
    i = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
    if i < count:
        out[i] = low + width * unit_float(i, seed)


def random_matrix(card, format, wq, wd, n, k, seed):
    """Fills the arrays of a matrix [n, k] of a format of kernels/formats; wq below 2**32 bytes."""
    words, count, unit = wq.nbytes // 4, n * k // format.file_block, 1.0 / (deviation(format) * math.sqrt(k))
    card.launch(random_words, -(-words // THREADS), THREADS, wq.reshape(-1), words, seed,
                format.random.codes == "sevens", format.random.codes == "ternary")
    minimum = float(np.float32(format.random.second * format.values.mean()))
    card.launch(headers_kernel(format), -(-count // THREADS), THREADS, as_words(wd), count, k // format.file_block,
                (seed + 1) % 2**32, unit, minimum)


def random_uniform(card, out, low, high, seed):
    """Fills a float32 array of any shape with values uniform in [low, high]."""
    card.launch(random_floats, -(-out.size // THREADS), THREADS, out.reshape(out.size), out.size, seed,
                float(low), float(high - low))


# ---- check and time -------------------------------------------------------------------------------------------------

SHAPES = [(1, 1), (3, 2), (31, 3), (65, 4)]  # rows, blocks of the file in one


def check(card, format, n, k):
    """Both fills against their references: the same bits, and nothing written beyond the end."""
    wq, wd = (card.alloc((rows + 1, width), dtype) for (rows, width), dtype in format.arrays(n, k))
    floats = card.alloc((n + 1, k), np.float32)
    for array in (wq, wd, floats):
        card.poison(array)
    random_matrix(card, format, wq[:n], wd[:n], n, k, seed=7)
    random_uniform(card, floats[:n], -0.5, 1.5, seed=9)
    want_wq, want_wd = random_matrix_reference(format, n, k, 7)
    wq, wd, floats = (card.download(array) for array in (wq, wd, floats))
    np.testing.assert_array_equal(wq[:n], want_wq)
    np.testing.assert_array_equal(wd[:n], want_wd)
    np.testing.assert_array_equal(floats[:n].ravel(), random_uniform_reference(n * k, -0.5, 1.5, 9))
    assert (wq[n].view(np.uint8) == 255).all() and (wd[n].view(np.uint16) == 65535).all(), "wrote past its rows"
    assert np.isnan(floats[n]).all(), "wrote past its rows"
    return 0.0


def cases(card):
    """The checks, then the time of a matrix of 16 M weights."""
    for format in FORMATS.values():
        for n, blocks in SHAPES:
            k = blocks * format.file_block
            yield Case(f"{n} x {k} {format.name}", partial(check, card, format, n, k))
    n = k = 4096
    for format in FORMATS.values():
        wq, wd = (card.alloc(*array) for array in format.arrays(n, k))
        yield Case(f"random {format.name} {n} x {k}", launch=partial(random_matrix, card, format, wq, wd, n, k, 1),
                   n_bytes=wq.nbytes + wd.nbytes)


if __name__ == "__main__":
    main("Random weights", cases)
