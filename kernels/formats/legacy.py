"""Formats whose blocks of 32 weights have a scale d each, or d and a minimum, in float16.

Q8_0, Q4_0, Q5_0: q is signed and has its two's complement as code. Q4_1, Q5_1: weight = d q + m, q from 0 on. So the
minimum is -m, and both lie beside each other on the card.
"""

import numpy as np
from numba import cuda
from numba.types import float32, uint16, uint32

from kernels.formats.codes import (in_planes, nibbles, planes_of, signed_values, spread_function,
                                   take_codes_of)
from kernels.formats.format import Format, HalfScales, Random, Terms, is_finite, word_at
from kernels.intrinsics import float_as_word, half2_high, half2_low, half_to_float, load_word


# ---- NumPy -----------------------------------------------------------------------------------------------------------

def codes_q8_0(blocks):
    return blocks[:, 2:]


def codes_q4_0(blocks):
    return nibbles(blocks[:, 2:]).reshape(-1, 32) ^ 8


def codes_q4_1(blocks):
    return nibbles(blocks[:, 4:]).reshape(-1, 32)


def _fifth_bits(blocks, at):
    high = np.unpackbits(blocks[:, at:at + 4], axis=1, bitorder="little")
    return nibbles(blocks[:, at + 4:]).reshape(-1, 32) | high << 4


def codes_q5_0(blocks):
    return _fifth_bits(blocks, 2) ^ 16


def codes_q5_1(blocks):
    return _fifth_bits(blocks, 4)


def split_function(codes, bits, n_scales=1):
    """The `split_blocks` of a format from its codes; its header is a copy of the file's first float16."""
    return lambda blocks: (in_planes(codes(blocks), bits), blocks[:, :2 * n_scales].copy().view(np.uint16))


def halves_at(blocks, *places):
    """The float16 at each of some bytes, as float32 [n_blocks, places]."""
    return np.concatenate([blocks[:, at:at + 2].copy().view(np.float16) for at in places], axis=1).astype(np.float32)


def no_minima(n_blocks):
    return np.zeros((n_blocks, 0), np.float32)


def terms_function(codes, values):
    """The `terms` of a format with one scale."""
    return lambda blocks: Terms(values[codes(blocks)], None, halves_at(blocks, 0), no_minima(len(blocks)))


def terms_with_minimum(codes):
    return lambda blocks: Terms(codes(blocks), None, halves_at(blocks, 0), -halves_at(blocks, 2))


# ---- repacking -------------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def take_q8_0(low, high, raw, at, j):
    for i in range(8):
        low[i] = word_at(raw, uint32(at + uint32(1 + 2 * i)))


@cuda.jit(device=True, forceinline=True)
def take_halves(low, raw, at, flip):
    """16 bytes at raw[at]: the first 16 codes in the lower halves, the others in the upper halves."""
    for i in range(4):
        word = uint32(word_at(raw, uint32(at + uint32(2 * i))) ^ uint32(flip))
        low[i] = word & uint32(0x0F0F0F0F)
        low[4 + i] = uint32(word >> uint32(4)) & uint32(0x0F0F0F0F)


@cuda.jit(device=True, forceinline=True)
def take_fifth_bits(high, bits):
    for i in range(8):  # the multiplication puts four neighbouring bits into four bytes
        four = uint32(bits >> uint32(4 * i)) & uint32(15)
        high[i] = uint32(four * uint32(0x00204081)) & uint32(0x01010101)


@cuda.jit(device=True, forceinline=True)
def take_q4_0(low, high, raw, at, j):
    take_halves(low, raw, uint32(at + uint32(1)), 0x88888888)


@cuda.jit(device=True, forceinline=True)
def take_q4_1(low, high, raw, at, j):
    take_halves(low, raw, uint32(at + uint32(2)), 0)


@cuda.jit(device=True, forceinline=True)
def take_q5_0(low, high, raw, at, j):
    take_fifth_bits(high, uint32(~word_at(raw, uint32(at + uint32(1)))))
    take_halves(low, raw, uint32(at + uint32(3)), 0)


@cuda.jit(device=True, forceinline=True)
def take_q5_1(low, high, raw, at, j):
    take_fifth_bits(high, word_at(raw, uint32(at + uint32(2))))
    take_halves(low, raw, uint32(at + uint32(4)), 0)


@cuda.jit(device=True, forceinline=True)
def take_scale(wd, raw, at, j, to, b):
    wd[uint32(to + b)] = raw[at]
    return is_finite(raw[at])


@cuda.jit(device=True, forceinline=True)
def take_scale_minimum(wd, raw, at, j, to, b):
    here, d, m = uint32(to + uint32(b << uint32(1))), raw[at], raw[uint32(at + uint32(1))]
    wd[here] = d
    wd[uint32(here + uint32(1))] = m
    return is_finite(d) and is_finite(m)


# ---- products --------------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def fetch_scale(raw, at, wd, d_from, b):
    raw[at] = uint32(wd[uint32(d_from + b)])


@cuda.jit(device=True, forceinline=True)
def fetch_scale_minimum(raw, at, wd, d_from, b):
    raw[at] = load_word(wd, uint32(d_from + uint32(b << uint32(1))))


def unpack_scaled(unpack_codes, scale_at, down=1.0):
    """The `unpack` of a format with one scale d, which is raw[scale_at] and is made `down` times as large."""

    @cuda.jit(device=True, forceinline=True)
    def unpack(w, scales, raw, book):
        unpack_codes(w, raw)
        scales[0] = float_as_word(half_to_float(uint16(raw[scale_at])) * float32(down))

    return unpack


def unpack_signed(bits):
    """Signed codes at the top of their bytes; the scale takes the factor back exactly."""
    return unpack_scaled(spread_function(bits, 8 - bits), bits, 2.0**(bits - 8))


def unpack_with_minimum(bits):
    spread = spread_function(bits, 0)

    @cuda.jit(device=True, forceinline=True)
    def unpack(w, scales, raw, book):
        spread(w, raw)
        scales[0] = float_as_word(half2_low(raw[bits]))
        scales[1] = float_as_word(half2_high(raw[bits]))  # the negated minimum is m itself

    return unpack


# ---- the formats -----------------------------------------------------------------------------------------------------

def signed_format(name, number, bits, file_bytes, codes, take_codes):
    values = signed_values(bits)
    return Format(
        name, number, 32, file_bytes, planes_of(bits), 1, split_function(codes, bits), terms_function(codes, values),
        take_codes_of(bits, take_codes), take_scale, fetch_scale, unpack_signed(bits), values,
        random=Random(codes="sevens" if bits == 8 else "all"), wd_type=np.float16)


def format_with_minimum(name, number, bits, file_bytes, codes, take_codes):
    return Format(
        name, number, 32, file_bytes, planes_of(bits), 2, split_function(codes, bits, 2), terms_with_minimum(codes),
        take_codes_of(bits, take_codes), take_scale_minimum, fetch_scale_minimum, unpack_with_minimum(bits),
        np.arange(2**bits, dtype=np.int8), minima=1, scales=HalfScales(0, 2), random=Random(second=-1.0))


Q8_0 = signed_format("Q8_0", 8, 8, 34, codes_q8_0, take_q8_0)
Q4_0 = signed_format("Q4_0", 2, 4, 18, codes_q4_0, take_q4_0)
Q5_0 = signed_format("Q5_0", 6, 5, 22, codes_q5_0, take_q5_0)
Q4_1 = format_with_minimum("Q4_1", 3, 4, 20, codes_q4_1, take_q4_1)
Q5_1 = format_with_minimum("Q5_1", 7, 5, 24, codes_q5_1, take_q5_1)
