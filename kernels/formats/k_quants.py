"""K-quants: blocks of 256 weights share float16 d (and dmin), and small integers scale their parts.

    Q4_K, Q5_K   per 32:  weight = d s q - dmin m,   s and m of 6 bits      header on the card: 8 times (s, m), d, dmin
    Q2_K         per 16:  the same,                  s and m of 4 bits      8 times (s | m << 4 of both halves), d, dmin
    Q6_K         per 16:  weight = d s q,            s int8                 8 times (s of both halves), d
    Q3_K         per 16:  weight = d s q,            s of 6 bits, signed    the same

Q2_K and Q3_K have few codes, so s times each code is looked up: w is s q, which fits int8, and products need no s. For
Q3_K w is -s q, from -128 to 124, and the scale is -d.
"""

from functools import partial

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint16, uint32

from kernels.formats.codes import (in_planes, lookup_crumbs, lookup_octals, nibbles, planes_of, signed_values,
                                   spread_function, take_codes_of)
from kernels.formats.format import Format, HalfScales, Random, Terms, byte_at, is_finite, word_at
from kernels.formats.legacy import halves_at, no_minima
from kernels.intrinsics import float_as_word, half2_high, half2_low, half_to_float, load_word, prmt

SHIFTS = np.array([0, 2, 4, 6], np.uint8)[:, None]


# ---- NumPy -----------------------------------------------------------------------------------------------------------

def codes_q4_k(blocks):
    return nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 32)


def codes_q5_k(blocks):
    low = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return (low | high << 4).reshape(-1, 32)


def codes_q6_k(blocks):
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> SHIFTS & 3
    return (low | high << 4).reshape(-1, 32) ^ 32


def codes_q2_k(blocks):
    return (blocks[:, 16:80].reshape(-1, 2, 1, 32) >> SHIFTS & 3).reshape(-1, 32)


def codes_q3_k(blocks):
    """0 .. 7 for q from -4 to 3."""
    low = blocks[:, 32:96].reshape(-1, 2, 1, 32) >> SHIFTS & 3
    high = blocks[:, :32].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return low.reshape(-1, 32) | high.reshape(-1, 32) << 2


def headers_q4_k(blocks):
    """uint8 [rows, 20]: the 6-bit scales and minima lie in 12 bytes."""
    first, second, rest = np.split(blocks[:, 4:16], 3, axis=1)
    scale = np.concatenate([first & 63, rest & 15 | (first >> 6) << 4], axis=1)
    minimum = np.concatenate([second & 63, rest >> 4 | (second >> 6) << 4], axis=1)
    return np.concatenate([np.stack([scale, minimum], axis=2).reshape(-1, 16), blocks[:, :4]], axis=1)


def headers_q6_k(blocks):
    return blocks[:, 192:]


def headers_q2_k(blocks):
    return np.concatenate([blocks[:, :16], blocks[:, 80:]], axis=1)


def headers_q3_k(blocks):
    """The 6-bit scales as int8: their low halves lie in 8 bytes, their upper 2 bits in 4."""
    low = nibbles(blocks[:, 96:104]).reshape(-1, 16)
    high = (blocks[:, None, 104:108] >> SHIFTS & 3).reshape(-1, 16)
    return np.concatenate([(low | high << 4) - 32 & 255, blocks[:, 108:]], axis=1).astype(np.uint8)


def split_function(codes, headers, bits):
    return lambda blocks: (in_planes(codes(blocks), bits), np.ascontiguousarray(headers(blocks)).view(np.uint16))


def terms_q4_k(codes, blocks):
    """Q4_K and Q5_K. d s is the float scale of a block."""
    pairs = headers_q4_k(blocks)[:, :16].reshape(-1, 8, 2).astype(np.float32)
    scale, minimum = np.moveaxis(pairs * halves_at(blocks, 0, 2)[:, None], 2, 0).reshape(2, -1, 1)
    return Terms(codes(blocks), None, scale, minimum)


def terms_q2_k(blocks):
    pairs = blocks[:, :16].reshape(-1, 2)
    d, dmin = (np.repeat(halves_at(blocks, at), 8, axis=0) for at in (80, 82))
    return Terms(codes_q2_k(blocks), (pairs & 15).astype(int), d, dmin * (pairs >> 4).astype(np.float32))


def terms_with_halves(codes, headers, values, blocks):
    """Q6_K and Q3_K."""
    header = np.ascontiguousarray(headers(blocks))
    d = np.repeat(halves_at(header, 16), 8, axis=0)
    integers = np.ascontiguousarray(header[:, :16]).view(np.int8).reshape(-1, 2).astype(int)
    return Terms(values[codes(blocks)], integers, d, no_minima(len(d)))


# ---- repacking -------------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def take_nibbles(low, raw, at, shift):
    for i in range(8):
        low[i] = uint32(word_at(raw, uint32(at + uint32(2 * i))) >> shift) & uint32(0x0F0F0F0F)


@cuda.jit(device=True, forceinline=True)
def take_bits(to, raw, at, shift, mask):
    """Bits of 32 neighbouring bytes."""
    for i in range(8):
        to[i] = uint32(word_at(raw, uint32(at + uint32(2 * i))) >> shift) & uint32(mask)


@cuda.jit(device=True, forceinline=True)
def take_q4_k(low, high, raw, at, j):
    chunk = uint32(uint32(j >> uint32(1)) << uint32(4))  # 32 bytes hold two blocks
    take_nibbles(low, raw, uint32(at + uint32(8) + chunk), uint32(uint32(j & uint32(1)) << uint32(2)))


@cuda.jit(device=True, forceinline=True)
def take_q5_k(low, high, raw, at, j):
    chunk = uint32(uint32(j >> uint32(1)) << uint32(4))
    take_nibbles(low, raw, uint32(at + uint32(24) + chunk), uint32(uint32(j & uint32(1)) << uint32(2)))
    take_bits(high, raw, uint32(at + uint32(8)), j, 0x01010101)


@cuda.jit(device=True, forceinline=True)
def take_q6_k(low, high, raw, at, j):
    half, quarter = uint32(j >> uint32(2)), uint32(j & uint32(3))  # of 128 and of 32 weights
    chunk = uint32(uint32(half << uint32(5)) + uint32(uint32(quarter & uint32(1)) << uint32(4)))
    take_nibbles(low, raw, uint32(at + chunk), uint32(uint32(quarter >> uint32(1)) << uint32(2)))
    upper = uint32(at + uint32(64) + uint32(half << uint32(4)))
    take_bits(high, raw, upper, uint32(quarter << uint32(1)), 0x03030303)
    for i in range(8):
        high[i] = uint32(high[i] ^ uint32(0x02020202))


@cuda.jit(device=True, forceinline=True)
def take_crumbs(low, raw, at, j):
    """2 bits each of 32 of 64 bytes at raw[at]."""
    chunk = uint32(uint32(j >> uint32(2)) << uint32(4))
    take_bits(low, raw, uint32(at + chunk), uint32(uint32(j & uint32(3)) << uint32(1)), 0x03030303)


@cuda.jit(device=True, forceinline=True)
def take_q2_k(low, high, raw, at, j):
    take_crumbs(low, raw, uint32(at + uint32(8)), j)


@cuda.jit(device=True, forceinline=True)
def take_q3_k(low, high, raw, at, j):
    take_crumbs(low, raw, uint32(at + uint32(16)), j)
    take_bits(high, raw, at, j, 0x01010101)


@cuda.jit(device=True, forceinline=True)
def take_scales_minima(wd, raw, at, j, to, b):
    i, packed = uint32(j & uint32(3)), uint32(at + uint32(2))
    first, second = byte_at(raw, packed, i), byte_at(raw, packed, uint32(i + uint32(4)))
    rest = byte_at(raw, packed, uint32(i + uint32(8)))
    scale, minimum = uint32(first & uint32(63)), uint32(second & uint32(63))
    if j > uint32(3):
        scale = uint32(uint32(rest & uint32(15)) | uint32(uint32(first >> uint32(6)) << uint32(4)))
        minimum = uint32(uint32(rest >> uint32(4)) | uint32(uint32(second >> uint32(6)) << uint32(4)))
    return put_pair(wd, uint32(scale | uint32(minimum << uint32(8))), raw[at], raw[uint32(at + uint32(1))], j, to, b)


@cuda.jit(device=True, forceinline=True)
def put_pair(wd, pair, d, dmin, j, to, b):
    """Into a header of 8 words, d and dmin."""
    header = uint32(to + uint32(uint32(b >> uint32(3)) * uint32(10)))
    wd[uint32(header + j)] = uint16(pair)
    if j == uint32(0):
        wd[uint32(header + uint32(8))] = d
        wd[uint32(header + uint32(9))] = dmin
    return is_finite(d) and is_finite(dmin)


@cuda.jit(device=True, forceinline=True)
def put_word(wd, word, d, j, to, b):
    """Into a header of 8 words and d."""
    header = uint32(to + uint32(uint32(b >> uint32(3)) * uint32(9)))
    wd[uint32(header + j)] = uint16(word)
    if j == uint32(0):
        wd[uint32(header + uint32(8))] = d
    return is_finite(d)


@cuda.jit(device=True, forceinline=True)
def take_scales_q2_k(wd, raw, at, j, to, b):
    return put_pair(wd, raw[uint32(at + j)], raw[uint32(at + uint32(40))], raw[uint32(at + uint32(41))], j, to, b)


@cuda.jit(device=True, forceinline=True)
def take_scales_q6_k(wd, raw, at, j, to, b):
    return put_word(wd, raw[uint32(at + uint32(96) + j)], raw[uint32(at + uint32(104))], j, to, b)


@cuda.jit(device=True, forceinline=True)
def scale_q3_k(raw, at, i):
    """Scale i of 16, as a byte. They lie in 12 bytes at raw[at]."""
    low = uint32(byte_at(raw, at, uint32(i & uint32(7))) >> uint32(uint32(i >> uint32(3)) << uint32(2))) & uint32(15)
    high = byte_at(raw, at, uint32(uint32(8) + uint32(i & uint32(3))))
    high = uint32(high >> uint32(uint32(i >> uint32(2)) << uint32(1))) & uint32(3)
    return uint32(uint32(low | uint32(high << uint32(4))) + uint32(224)) & uint32(255)


@cuda.jit(device=True, forceinline=True)
def take_scales_q3_k(wd, raw, at, j, to, b):
    first, packed = uint32(j << uint32(1)), uint32(at + uint32(48))
    pair = uint32(scale_q3_k(raw, packed, first)
                  | uint32(scale_q3_k(raw, packed, uint32(first + uint32(1))) << uint32(8)))
    return put_word(wd, pair, raw[uint32(at + uint32(54))], j, to, b)


# ---- products --------------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def fetch_pair(raw, at, wd, d_from, b):
    """From headers of 8 words, d and dmin."""
    header = uint32(d_from + uint32(uint32(b >> uint32(3)) * uint32(10)))
    raw[at] = uint32(wd[uint32(header + uint32(b & uint32(7)))])
    raw[at + 1] = load_word(wd, uint32(header + uint32(8)))


@cuda.jit(device=True, forceinline=True)
def fetch_word(raw, at, wd, d_from, b):
    """From headers of 8 words and d."""
    header = uint32(d_from + uint32(uint32(b >> uint32(3)) * uint32(9)))
    raw[at] = uint32(wd[uint32(header + uint32(b & uint32(7)))])
    raw[at + 1] = uint32(wd[uint32(header + uint32(8))])


def unpack_q4_k(bits):
    spread = spread_function(bits, 0)

    @cuda.jit(device=True, forceinline=True)
    def unpack(w, scales, raw, book):
        spread(w, raw)
        pair, d = raw[bits], raw[bits + 1]
        scales[0] = float_as_word(half2_low(d) * float32(uint32(pair & uint32(0xFF))))
        scales[1] = float_as_word(half2_high(d) * -float32(uint32(pair >> uint32(8))))

    return unpack


def unpack_q6_k(bits, place):
    spread = spread_function(bits, place)
    down = 2.0**-place

    @cuda.jit(device=True, forceinline=True)
    def unpack(w, scales, raw, book):
        spread(w, raw)
        pair = raw[bits]
        scales[0] = float_as_word(half_to_float(uint16(raw[bits + 1])) * float32(down))
        scales[1] = uint32(int32(pair << uint32(24)) >> int32(24))
        scales[2] = uint32(int32(pair << uint32(16)) >> int32(24))

    return unpack


@cuda.jit(device=True, forceinline=True)
def unpack_q2_k(w, scales, raw, book):
    d = raw[3]
    scales[0] = float_as_word(half2_low(d))
    for h in range(2):
        byte = uint32(raw[2] >> uint32(8 * h)) & uint32(255)
        lookup_crumbs(w, raw, h, uint32(uint32(byte & uint32(15)) * uint32(0x03020100)))  # up to 3 * 15 in each byte
        scales[1 + h] = float_as_word(half2_high(d) * -float32(uint32(byte >> uint32(4))))


@cuda.jit(device=True, forceinline=True)
def four_multiples(byte, even, odd):
    """byte, at most 256, times four integers from 0 to 4, each modulo 256: those of bytes 0 and 2 in `even`, of 1 and 3
    in `odd`."""
    return prmt(uint32(byte * uint32(even)), uint32(byte * uint32(odd)), uint32(0x6240))


@cuda.jit(device=True, forceinline=True)
def unpack_q3_k(w, scales, raw, book):
    """The table of a half holds -s q for q = -4 .. 3."""
    scales[0] = float_as_word(half_to_float(uint16(raw[4])) * float32(-1.0))
    for h in range(2):
        s = uint32(raw[3] >> uint32(8 * h)) & uint32(255)
        minus = uint32(uint32(256) - s)
        lookup_octals(w, raw, h, four_multiples(s, 0x00020004, 0x00010003),
                      four_multiples(minus, 0x00020000, 0x00030001))


# ---- the formats -----------------------------------------------------------------------------------------------------

def format_with_minimum(name, number, bits, file_bytes, codes, take_codes):
    return Format(
        name, number, 256, file_bytes, planes_of(bits), 10, split_function(codes, headers_q4_k, bits),
        partial(terms_q4_k, codes), take_codes_of(bits, take_codes), take_scales_minima, fetch_pair, unpack_q4_k(bits),
        np.arange(2**bits, dtype=np.int8), scale_words=2, minima=1, scales=HalfScales(0, 2),
        random=Random(8, 32, 31, 0x101, 47.5))


SIXES, OCTALS = signed_values(6), np.arange(-4, 4, dtype=np.int8)

Q4_K = format_with_minimum("Q4_K", 12, 4, 144, codes_q4_k, take_q4_k)
Q5_K = format_with_minimum("Q5_K", 13, 5, 176, codes_q5_k, take_q5_k)
Q6_K = Format(
    "Q6_K", 14, 256, 210, planes_of(6), 9, split_function(codes_q6_k, headers_q6_k, 6),
    partial(terms_with_halves, codes_q6_k, headers_q6_k, SIXES), take_codes_of(6, take_q6_k), take_scales_q6_k,
    fetch_word, unpack_q6_k(6, 2), SIXES, scale_words=2, halves=True, scales=HalfScales(208),
    random=Random(8, 0x2020, 0x1F1F, 1, 47.5))
Q2_K = Format(
    "Q2_K", 10, 256, 84, planes_of(2), 10, split_function(codes_q2_k, headers_q2_k, 2), terms_q2_k,
    take_codes_of(2, take_q2_k), take_scales_q2_k, fetch_pair, unpack_q2_k, np.arange(4, dtype=np.int8), scale_words=2,
    minima=2, scales=HalfScales(80, 82), random=Random(8, 0x0808, 0x0707, 0x11, 11.5))
Q3_K = Format(
    "Q3_K", 11, 256, 110, planes_of(3), 9, split_function(codes_q3_k, headers_q3_k, 3),
    partial(terms_with_halves, codes_q3_k, headers_q3_k, OCTALS), take_codes_of(3, take_q3_k), take_scales_q3_k,
    fetch_word, unpack_q3_k, OCTALS, scale_words=2, scales=HalfScales(108),
    random=Random(8, 0x1010, 0x0F0F, 1, 23.5))
