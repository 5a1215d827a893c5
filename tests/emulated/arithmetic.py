"""What single PTX instructions compute, in NumPy, on vectors of lanes: the oracle of the random kernels.

Words are uint32 arrays. Where the bits of a NaN become visible they are 0x7FC00000, or 0x7E00 in a half.
"""

import numpy as np


def round_to_odd_sum(p, c):
    """float64 p + c, its last bit set when inexact: rounding it once more to a shorter format is then right.

    The error of the rounded sum is exact (Knuth's TwoSum): an even inexact sum moves one step its way.
    """
    s = p + c
    t = s - p
    error = (p - (s - t)) + (c - t)
    bits = s.view(np.int64)
    inexact = np.isfinite(error) & (error != 0) & (bits & 1 == 0)
    return np.where(inexact, bits + np.where((error > 0) == (s > 0), 1, -1), bits).view(np.float64)


def fma(a, b, c):
    """float32 a * b + c, rounded once: the product of two float32 is exact in float64."""
    return round_to_odd_sum(a.astype(np.float64) * b, c.astype(np.float64)).astype(np.float32)


def towards(limit, exact):
    """float64 as float32, rounded towards 0, inf or -inf; `exact` may be rounded to odd."""
    nearest = exact.astype(np.float32)
    passed = abs(nearest) > abs(exact) if limit == 0 else nearest < exact if limit > 0 else nearest > exact
    return np.where(passed, np.nextafter(nearest, np.float32(limit)), nearest)


def halves(w):
    return np.ascontiguousarray(w).view(np.float16).reshape(-1, 2)


def half2(x):
    """The words of float16[n, 2]."""
    bits = np.where(np.isnan(x), np.uint16(0x7E00), np.ascontiguousarray(x).view(np.uint16))
    return np.ascontiguousarray(bits).view(np.uint32).reshape(-1)


def half_fma(a, b, c):
    wide = [halves(w).astype(np.float64) for w in (a, b, c)]
    return half2(round_to_odd_sum(wide[0] * wide[1], wide[2]).astype(np.float16))


def float_word(x):
    return np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32))


def larger(a, b):
    """A NaN loses, +0 is larger than -0."""
    greater = (a > b) | np.isnan(b) | ((a == b) & ~np.signbit(a))
    return np.where(greater, a, b)


def to_int(x):
    """Round half to even, saturate, NaN gives 0."""
    wide = np.nan_to_num(np.rint(x.astype(np.float64)), nan=0.0, posinf=2.0**32, neginf=-2.0**32)
    return np.clip(wide, -2**31, 2**31 - 1).astype(np.int32)


def bytes_of(w):
    return np.ascontiguousarray(w).view(np.int8).reshape(-1, 4).astype(np.int32)


def dot_bytes(a, b, c):
    return c + (bytes_of(a) * bytes_of(b)).sum(1, dtype=np.int32)


def dot_words(a, b, c, first):
    words = np.ascontiguousarray(a).view(np.int16).reshape(-1, 2).astype(np.int32)
    return c + (words * bytes_of(b)[:, first:first + 2]).sum(1, dtype=np.int32)


def permute_bytes(a, b, selector):
    """Bit 3 of a selector nibble spreads the sign of the byte instead of copying the byte."""
    pool = np.concatenate([np.ascontiguousarray(w).view(np.uint8).reshape(-1, 4) for w in (a, b)], axis=1)
    result = np.zeros_like(a)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = np.take_along_axis(pool, (nibble & 7)[:, None].astype(np.int64), 1)[:, 0].astype(np.uint32)
        byte = np.where(nibble & 8, np.where(byte & 0x80, np.uint32(255), np.uint32(0)), byte)
        result |= byte << np.uint32(8 * i)
    return result


def count_bits(w):
    return np.bitwise_count(w).astype(np.uint32)


def leading_zeros(w):
    return (32 - np.frexp(w.astype(np.float64))[1]).astype(np.uint32)


def reverse_bits(w):
    return np.packbits(np.unpackbits(w.astype(">u4").view(np.uint8).reshape(-1, 4), axis=1)[:, ::-1],
                       axis=1).copy().view(">u4").reshape(-1).astype(np.uint32)
