"""Ternary formats: blocks of 256 weights with one float16 d, each weight -d, 0 or d (TQ2_0 has 2 d, too).

    TQ2_0   2 bits a weight: code = q + 1
    TQ1_0   five weights in a byte: it is 256 / 243 times (81 (q0 + 1) + 27 (q1 + 1) + ... + (q4 + 1)), rounded up. So
            the upper half of 3 byte is q0 + 1, and that of 3 (3 byte mod 256) is q1 + 1, and so on

On the card both have 2 bits a weight. The header is d.
"""

import numpy as np
from numba import cuda
from numba.types import uint16, uint32

from kernels.formats.codes import in_planes, lookup_crumbs, planes_of, take_codes_of
from kernels.formats.format import Format, HalfScales, Random, Terms, byte_at, is_finite
from kernels.formats.k_quants import SHIFTS, take_crumbs
from kernels.formats.legacy import halves_at, no_minima
from kernels.intrinsics import float_as_word, half_to_float

VALUES = np.array([-1, 0, 1, 2], np.int8)
POWERS = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]


def codes_tq2_0(blocks):
    return (blocks[:, :64].reshape(-1, 2, 1, 32) >> SHIFTS & 3).reshape(-1, 32)


def codes_tq1_0(blocks):
    """Digit i of 32 bytes, then of 16, gives as many neighbouring weights; the last 16 weights are four digits of 4."""
    parts = [(blocks[:, None, first:last] * POWERS[:digits]).reshape(len(blocks), -1)
             for first, last, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4))]
    return (np.concatenate(parts, axis=1).astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(-1, 32)


def split_function(codes):
    return lambda blocks: (in_planes(codes(blocks), 2), blocks[:, -2:].copy().view(np.uint16))


def terms_function(codes):
    def terms(blocks):
        d = np.repeat(halves_at(blocks, blocks.shape[1] - 2), 8, axis=0)
        return Terms(VALUES[codes(blocks)], None, d, no_minima(len(d)))
    return terms


@cuda.jit(device=True, forceinline=True)
def take_tq2_0(low, high, raw, at, j):
    take_crumbs(low, raw, at, j)


@cuda.jit(device=True, forceinline=True)
def digit(raw, at, weight):
    """The code of one of 256 weights."""
    first, size, here = uint32(0), uint32(32), weight
    if weight >= uint32(160):
        first, size, here = uint32(32), uint32(16), uint32(weight - uint32(160))
    if weight >= uint32(240):
        first, size, here = uint32(48), uint32(4), uint32(weight - uint32(240))
    byte, power = byte_at(raw, at, uint32(first + here % size)), uint32(here // size)
    for i in range(uint32(4)):
        if uint32(i) < power:
            byte = uint32(byte * uint32(3)) & uint32(255)
    return uint32(uint32(byte * uint32(3)) >> uint32(8))


@cuda.jit(device=True, forceinline=True)
def take_tq1_0(low, high, raw, at, j):
    for i in range(uint32(8)):
        word, weight = uint32(0), uint32(uint32(j << uint32(5)) + uint32(4) * uint32(i))
        for m in range(uint32(4)):
            word = uint32(word | uint32(digit(raw, at, uint32(weight + uint32(m))) << uint32(uint32(8) * uint32(m))))
        low[i] = word


def take_scale_function(place):
    """d is `place` pairs of bytes behind the start of a file's block."""

    @cuda.jit(device=True, forceinline=True)
    def take_scale(wd, raw, at, j, to, b):
        d = raw[uint32(at + uint32(place))]
        if j == uint32(0):
            wd[uint32(to + uint32(b >> uint32(3)))] = d
        return is_finite(d)

    return take_scale


@cuda.jit(device=True, forceinline=True)
def fetch_shared_scale(raw, at, wd, d_from, b):
    raw[at] = uint32(wd[uint32(d_from + uint32(b >> uint32(3)))])


@cuda.jit(device=True, forceinline=True)
def unpack_ternary(w, scales, raw, book):
    for h in range(2):
        lookup_crumbs(w, raw, h, uint32(0x020100FF))  # VALUES
    scales[0] = float_as_word(half_to_float(uint16(raw[2])))


def ternary(name, number, file_bytes, codes, take_codes):
    return Format(
        name, number, 256, file_bytes, planes_of(2), 1, split_function(codes), terms_function(codes),
        take_codes_of(2, take_codes), take_scale_function(file_bytes // 2 - 1), fetch_shared_scale, unpack_ternary,
        VALUES, scales=HalfScales(file_bytes - 2), random=Random(codes="ternary"))


TQ1_0 = ternary("TQ1_0", 34, 54, codes_tq1_0, take_tq1_0)
TQ2_0 = ternary("TQ2_0", 35, 66, codes_tq2_0, take_tq2_0)
