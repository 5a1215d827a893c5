"""Formats whose codes of 4 bits index a table of 16 int8.

    IQ4_NL   blocks of 32,  d float16                    header on the card: d
    IQ4_XS   blocks of 256, d float16, (s - 32) of 6 bits for each 32         8 int8 (s - 32), d
    MXFP4    blocks of 32,  2**(e - 128), e of 8 bits                         the upper half of the float32 2**(e - 128)
    NVFP4    blocks of 64,  a float of 4 + 3 bits for each 16                 4 times this byte

The codes lie in order (kernels/formats/codes.py). The table of MXFP4 and NVFP4 has twice the numbers
that a float of 1 + 2 + 1 bits can be; their scales halve them again.
e = 255 and a float byte with seven bits set stand for NaN (OCP Microscaling Formats, version 1.0).
"""

import numpy as np
from numba import cuda
from numba.cuda.libdevice import fmul_rn
from numba.types import float32, uint16, uint32

from kernels.formats.codes import (exchanged, in_order, lookup_pairs, lookup_signs, nibbles, planes_of, take_exchanged,
                                   take_in_order)
from kernels.formats.format import Format, Random, Terms, byte_at, is_finite, word_at
from kernels.formats.legacy import fetch_scale, halves_at, no_minima, take_halves, take_scale, terms_function
from kernels.intrinsics import float_as_word, half_to_float, load_byte, load_word, word_as_float

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
FP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
PLANES = planes_of(4)

# On a card, codes of IQ4 are exchanged, so that codes n and n + 8 have values of the same sign.
IQ4_ON_CARD = IQ4_VALUES[exchanged(np.arange(16))]
LOOK_UP_IQ4, LOAD_IQ4 = lookup_pairs(IQ4_ON_CARD)


# ---- IQ4_NL --------------------------------------------------------------------------------------------------------

def codes_iq4_nl(blocks):
    return nibbles(blocks[:, 2:]).reshape(-1, 32)


def split_iq4_nl(blocks):
    return in_order(exchanged(codes_iq4_nl(blocks))), blocks[:, :2].copy().view(np.uint16)


@cuda.jit(device=True, forceinline=True)
def take_iq4_nl(low, high, raw, at, j):
    take_halves(low, raw, uint32(at + uint32(1)), 0)


@cuda.jit(device=True, forceinline=True)
def unpack_iq4_nl(w, scales, raw, book):
    LOOK_UP_IQ4(w, raw, book)
    scales[0] = float_as_word(half_to_float(uint16(raw[4])))


IQ4_NL = Format(
    "IQ4_NL", 20, 32, 18, PLANES, 1, split_iq4_nl, terms_function(codes_iq4_nl, IQ4_VALUES),
    take_exchanged(take_iq4_nl), take_scale, fetch_scale, unpack_iq4_nl, IQ4_ON_CARD, wd_type=np.float16, in_order=True,
    table=True, load_book=LOAD_IQ4)


# ---- IQ4_XS: d, upper 2 bits of eight s (2 bytes), lower 4 bits of them (4 bytes), codes ---------------------------

def codes_iq4_xs(blocks):
    return nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 32)


def scales_iq4_xs(blocks):
    """int8 [rows, 8]."""
    low = np.moveaxis(nibbles(blocks[:, 4:8]), 1, 2).reshape(-1, 8)
    high = blocks[:, 2:4].copy().view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    return ((low | high << 4).astype(int) - 32).astype(np.int8)


def split_iq4_xs(blocks):
    header = np.concatenate([scales_iq4_xs(blocks).view(np.uint8), blocks[:, :2]], axis=1)
    return in_order(exchanged(codes_iq4_xs(blocks))), header.view(np.uint16)


def terms_iq4_xs(blocks):
    scale = (halves_at(blocks, 0) * scales_iq4_xs(blocks).astype(np.float32)).reshape(-1, 1)
    return Terms(IQ4_VALUES[codes_iq4_xs(blocks)], None, scale, no_minima(len(scale)))


@cuda.jit(device=True, forceinline=True)
def take_iq4_xs(low, high, raw, at, j):
    take_halves(low, raw, uint32(at + uint32(4) + uint32(j << uint32(3))), 0)


@cuda.jit(device=True, forceinline=True)
def scale_iq4_xs(raw, at, j):
    """s - 32 of block j, as a byte."""
    low = uint32(byte_at(raw, uint32(at + uint32(2)), uint32(j >> uint32(1)))
                 >> uint32(uint32(j & uint32(1)) << uint32(2))) & uint32(15)
    high = uint32(uint32(raw[uint32(at + uint32(1))]) >> uint32(j << uint32(1))) & uint32(3)
    return uint32(uint32(low | uint32(high << uint32(4))) + uint32(224)) & uint32(255)


@cuda.jit(device=True, forceinline=True)
def take_scales_iq4_xs(wd, raw, at, j, to, b):
    """Every second block writes a pair of scales, the first d."""
    header = uint32(to + uint32(uint32(b >> uint32(3)) * uint32(5)))
    if j & uint32(1) == uint32(0):
        pair = uint32(scale_iq4_xs(raw, at, j) | uint32(scale_iq4_xs(raw, at, uint32(j + uint32(1))) << uint32(8)))
        wd[uint32(header + uint32(j >> uint32(1)))] = uint16(pair)
    if j == uint32(0):
        wd[uint32(header + uint32(4))] = raw[at]
    return is_finite(raw[at])


@cuda.jit(device=True, forceinline=True)
def fetch_scales_iq4_xs(raw, at, wd, d_from, b):
    header = uint32(d_from + uint32(uint32(b >> uint32(3)) * uint32(5)))
    raw[at] = load_byte(wd, uint32(uint32(header << uint32(1)) + uint32(b & uint32(7))))
    raw[at + 1] = uint32(wd[uint32(header + uint32(4))])


@cuda.jit(device=True, forceinline=True)
def unpack_iq4_xs(w, scales, raw, book):
    LOOK_UP_IQ4(w, raw, book)
    scale = word_as_float(uint32(raw[4] ^ uint32(0x4B000080))) - float32(2**23 + 128)     # of int8, exact
    scales[0] = float_as_word(half_to_float(uint16(raw[5])) * scale)


IQ4_XS = Format(
    "IQ4_XS", 23, 256, 136, PLANES, 5, split_iq4_xs, terms_iq4_xs, take_exchanged(take_iq4_xs), take_scales_iq4_xs,
    fetch_scales_iq4_xs, unpack_iq4_xs, IQ4_ON_CARD, scale_words=2, in_order=True, table=True, load_book=LOAD_IQ4,
    random=Random(4, 0x1010, 0x0F0F, 1, 23.5))


# ---- MXFP4: e, codes -----------------------------------------------------------------------------------------------

class Exponents:
    """A byte e in front of a block, the scale 2**(e - 128)."""

    kind = "exponent"

    def fill(self, rng, raw):
        raw[:, 0] = rng.integers(110, 126, len(raw))

    def put(self, raw, scales):
        raw[:, 0] = np.rint(np.log2(np.broadcast_to(abs(scales), (len(raw), 1)))[:, 0]) + 128

    def bad(self):
        yield 0, np.array([255], np.uint8)


def codes_mxfp4(blocks):
    return nibbles(blocks[:, 1:]).reshape(-1, 32)


def exponent_halves(blocks):
    """The upper halves of float32 2**(e - 128), uint16 [n_blocks, 1]. Below 2**-126 a float32 has no exponent bits."""
    e = blocks[:, :1].astype(np.uint16)
    return np.where(e < 2, np.uint16(0x20) << np.minimum(e, 1), np.maximum(e, 1) - 1 << 7).astype(np.uint16)


def split_mxfp4(blocks):
    return in_order(codes_mxfp4(blocks)), exponent_halves(blocks)


def terms_mxfp4(blocks):
    scale = (exponent_halves(blocks).astype(np.uint32) << 16).view(np.float32)
    return Terms(FP4_VALUES[codes_mxfp4(blocks)], None, scale, no_minima(len(blocks)))


@cuda.jit(device=True, forceinline=True)
def take_mxfp4(low, high, raw, at, j):
    """raw: single bytes."""
    for i in range(4):
        word = uint32(0)
        for m in range(4):
            word = uint32(word | uint32(uint32(raw[uint32(at + uint32(1 + 4 * i + m))]) << uint32(8 * m)))
        low[i] = word & uint32(0x0F0F0F0F)
        low[4 + i] = uint32(word >> uint32(4)) & uint32(0x0F0F0F0F)


@cuda.jit(device=True, forceinline=True)
def take_exponent(wd, raw, at, j, to, b):
    e = uint32(raw[at])
    word = uint32(uint32(e - uint32(1)) << uint32(7))
    if e < uint32(2):
        word = uint32(uint32(0x20) << e)
    wd[uint32(to + b)] = uint16(word)
    return e != uint32(255)


LOOK_UP_FP4, LOAD_FP4 = lookup_signs(FP4_VALUES)  # w is twice as large; scales take the factor back exactly


@cuda.jit(device=True, forceinline=True)
def unpack_mxfp4(w, scales, raw, book):
    LOOK_UP_FP4(w, raw, book)
    scales[0] = float_as_word(word_as_float(uint32(raw[4] << uint32(16))) * float32(0.5))


MXFP4 = Format(
    "MXFP4", 39, 32, 17, PLANES, 1, split_mxfp4, terms_mxfp4, take_in_order(take_mxfp4), take_exponent, fetch_scale,
    unpack_mxfp4, FP4_VALUES, scales=Exponents(), in_order=True, table=True, load_book=LOAD_FP4)


# ---- NVFP4: four scales, then codes: 8 bytes for each 16 weights ---------------------------------------------------
#
# A file may have a float32 factor of a whole matrix, in a tensor of its own: w . x is the factor times what the blocks
# say (build_lora_mm of llama.cpp's src/llama-graph.cpp). On a card each row has its factor in front, so that matrices
# with different factors can lie in one. It multiplies the scale of 16 weights, rounded to float32; 1 changes none. On
# a card it is 64 times as large, so that a kernel need not multiply the float of 4 + 3 bits itself.

ROW_HEAD = 0x0000, 0x4280       # 64 as float32


class MiniFloats:
    """Four bytes in front of a block, each a float without sign: 4 bits of exponent, 3 of mantissa. Half of it is the
    scale, from 2**-10 to 224. Bit 7 means nothing."""

    kind = "mini"

    def fill(self, rng, raw):
        raw[:, :4] = rng.integers(0, 127, (len(raw), 4)) | rng.integers(0, 2, (len(raw), 4)) << 7

    def put(self, raw, scales):
        exact = mini_floats(np.arange(127))
        wanted = np.broadcast_to(abs(scales), (len(raw), 1))
        raw[:, :4] = abs(np.log2(np.maximum(exact, exact[1] / 2)) - np.log2(wanted)).argmin(axis=1)[:, None]

    def bad(self):
        for at in range(4):
            for byte in (127, 255):
                yield at, np.array([byte], np.uint8)


def mini_floats(bytes):
    """The scales of bytes, float32, NaN where there is none. Their bits, moved by 7, are those of a float16 whose
    exponent counts 8 more."""
    bytes = np.asarray(bytes) & 127
    halves = (bytes.astype(np.uint16) << 7).view(np.float16)
    return np.where(bytes == 127, np.float32(np.nan), halves.astype(np.float32) * np.float32(128))


def codes_nvfp4(blocks):
    return nibbles(blocks[:, 4:].reshape(-1, 4, 8)).reshape(-1, 32)


def split_nvfp4(blocks):
    return in_order(codes_nvfp4(blocks)), blocks[:, :4].copy().view(np.uint16)


def terms_nvfp4(blocks):
    scale = mini_floats(blocks[:, :4]).reshape(-1, 2)
    return Terms(FP4_VALUES[codes_nvfp4(blocks)], None, scale, no_minima(len(scale)))


@cuda.jit(device=True, forceinline=True)
def take_nvfp4(low, high, raw, at, j):
    for h in range(2):
        part = uint32(at + uint32(2) + uint32(j << uint32(3)) + uint32(4 * h))
        for i in range(2):
            word = word_at(raw, uint32(part + uint32(2 * i)))
            low[4 * h + i] = word & uint32(0x0F0F0F0F)
            low[4 * h + 2 + i] = uint32(word >> uint32(4)) & uint32(0x0F0F0F0F)


@cuda.jit(device=True, forceinline=True)
def take_mini_floats(wd, raw, at, j, to, b):
    pair = uint32(raw[uint32(at + j)])
    if b == uint32(0):
        wd[to] = uint16(ROW_HEAD[0])
        wd[uint32(to + uint32(1))] = uint16(ROW_HEAD[1])
    wd[uint32(to + uint32(b + uint32(2)))] = uint16(pair)
    return uint32(pair & uint32(0x7F)) != uint32(0x7F) and uint32(pair & uint32(0x7F00)) != uint32(0x7F00)


@cuda.jit(device=True, forceinline=True)
def fetch_mini_floats(raw, at, wd, d_from, b):
    raw[at] = uint32(wd[uint32(d_from + uint32(b + uint32(2)))])
    raw[at + 1] = load_word(wd, d_from)


@cuda.jit(device=True, forceinline=True)
def small_mini_float(byte):
    """1 / 128 of a scale. w is twice as large as the table says, so 64 times this is what w is multiplied by."""
    return half_to_float(uint16(uint32(byte & uint32(127)) << uint32(7)))


@cuda.jit(device=True, forceinline=True)
def unpack_nvfp4(w, scales, raw, book):
    LOOK_UP_FP4(w, raw, book)
    factor = word_as_float(raw[5])
    scales[0] = float_as_word(fmul_rn(small_mini_float(raw[4]), factor))
    scales[1] = float_as_word(fmul_rn(small_mini_float(uint32(raw[4] >> uint32(8))), factor))


NVFP4 = Format(
    "NVFP4", 40, 64, 36, PLANES, 2, split_nvfp4, terms_nvfp4, take_in_order(take_nvfp4), take_mini_floats,
    fetch_mini_floats, unpack_nvfp4, FP4_VALUES, scale_words=2, float_scales=2, scales=MiniFloats(),
    in_order=True, table=True, load_book=LOAD_FP4, row_head=ROW_HEAD)
