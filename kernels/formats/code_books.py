"""Types whose codes index a code book: IQ3_S, IQ3_XXS, IQ2_S, IQ2_XS, IQ2_XXS, IQ1_S and IQ1_M.

A code stands for a *group* of 4 or 8 neighbouring weights: an entry of the book has their magnitudes, or for IQ1 their
digits -1, 0, 1. Eight bits give the eight weights of one or two groups their signs; where only seven are stored, the
number of negative weights is even. In IQ1 a group has a shift of +-1/8 instead of signs.

    type      code     book             signs      integer scale             weight
    IQ2_XXS    8 bits   256 of 8        7          one of 32 weights         d / 8 * (2 s + 1) * +-{8, 25, 43}
    IQ2_XS     9 bits   512 of 8        7          one of 16                 the same
    IQ2_S     10 bits  1024 of 8        8          one of 16                 the same
    IQ3_XXS    8 bits   256 of 4        7          one of 32                 d / 4 * (2 s + 1) * +-{4, 12, .. 52, 62}
    IQ3_S      9 bits   512 of 4        8          one of 32                 d     * (2 s + 1) * +-{1, 3, .. 15}
    IQ1_S     11 bits  2048 of 8        1 shift    one of 32                 d / 8 * (2 s + 1) * (8 {-1, 0, 1} +- 1)
    IQ1_M     11 bits  2048 of 8        4 shifts   one of 16                 the same

All factors are exact in float32, so a weight has the bits of the gguf package's, whatever the order of the products.
The books are the gguf package's.

On the card (bytes of 32 weights; d is a float16 of 256):

    IQ2_*     plane of 8:           the low 8 bits of 4 codes; the word of signs
    IQ3_*     planes of 8 and 4:    the low 8 bits of 8 codes; the word of signs
    IQ1_*     plane of 4:           the low 8 bits of 4 codes
    wd        IQ2_XXS, IQ3_XXS      [d]
              IQ2_XS                [8 bytes: two scales][d]
              IQ2_S, IQ3_S, IQ1_S   [8 times: a byte of upper bits of codes, a byte of scales][d]; IQ1_S as in the file
              IQ1_M                 [8 times: four of 3 upper bits and 1 of shift][8 bytes: two scales][d]

The word of signs: bit 4 n + g is that of weight n of group g of 8. With seven stored bits, nibble 7 has the scale
(IQ2_XXS, IQ3_XXS) or the ninth bits of the codes (IQ2_XS), and its signs are the exclusive or of the other nibbles.

How a code becomes int8 words. The book lies in shared memory, a word for each entry:
  * of eight weights: a nibble for each, which number says which of three bytes it is. With the sign as bit 2 of the
    nibble, the word is a selector for prmt among the bytes and their negatives: 1 load and 5 integer operations for
    8 weights. For IQ1_S the shift chooses the bytes. For IQ1_M, whose groups have a shift each, it is bit 2 of all
    nibbles.
  * of four weights: their bytes. 0x01010100 - word has their negatives, as no byte is zero, and prmt chooses
    with the sign as bit 2: 2 loads and 7 operations for 8 weights.
32 lanes that load random words of 32 banks take about 3.5 cycles.

Layouts of the files: github.com/ggml-org/ggml, src/ggml-common.h and src/ggml-quants.c.
"""

from collections import namedtuple
from functools import cache

import gguf.quants
import numpy as np
from numba import cuda
from numba.types import float32, uint16, uint32, uint64

from kernels.formats.codes import shifted
from kernels.formats.format import BLOCK, Format, HalfScales, Random, Terms, byte_at, is_finite, word_at
from kernels.intrinsics import (float_as_word, half_to_float, load_byte, load_shared, prmt, shared_address,
                                store_shared4, table_words4)

BLOCKS = 8  # of 32 weights in a block of the file
SEVEN, EIGHT, SHIFTS = "seven signs", "eight signs", "shifts"  # what a group of eight weights has beside its codes


# ---- books ----------------------------------------------------------------------------------------------------------

@cache
def grid(name):
    """int8 [entries, weights of a group]: the book of a type as the gguf package has it."""
    quant = getattr(gguf.quants, "IQ1_S" if name == "IQ1_M" else name)
    quant.init_grid()
    return quant.grid.reshape(quant.grid_shape).astype(np.int8)


def book_words(book):
    """uint32 [entries], as it lies in shared memory: the bytes of four weights, or for each of eight a nibble that
    says which of the book's values it is; and those values, in order."""
    values = np.unique(book)
    if book.shape[1] == 4:
        return np.ascontiguousarray(book).view(np.uint32).reshape(-1), values
    nibbles = np.searchsorted(values, book).astype(np.uint32)
    return np.bitwise_or.reduce(nibbles << np.arange(0, 32, 4, dtype=np.uint32), axis=1), values


# ---- NumPy: what the bytes of a file mean ---------------------------------------------------------------------------

# Of rows of 256 weights. codes: uint16 [rows, 8, 4 or 8]. marks: uint8 [rows, 8, 4], of each eight weights their signs,
# bit n of weight n, or their shift. scales: uint8 [rows, 8, 1 or 2], s above. d: float16 [rows].
Parts = namedtuple("Parts", "codes marks scales d")


def _bits(fields, shifts, mask):
    """Integers [..] -> [.., shifts]: the bits at each of the shifts."""
    return fields[..., None] >> np.array(shifts, fields.dtype) & fields.dtype.type(mask)


def _array(blocks, dtype, start, stop=None):
    """Bytes start .. stop of every row as [rows, 8, ..] of a type."""
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype).reshape(len(blocks), BLOCKS, -1)


def _d(blocks):
    return np.ascontiguousarray(blocks[:, :2]).view(np.float16)[:, 0]


def _eight(seven):
    """Seven signs -> eight, of which an even number is negative."""
    return (seven | np.bitwise_count(seven) % 2 << 7).astype(np.uint8)


def _nibbles(data):
    """uint8 [rows, m] -> [rows, 8, m / 4]: low halves, high halves of each byte."""
    return _bits(data, (0, 4), 15).reshape(len(data), BLOCKS, -1)


def _signs_scale(words):
    """Words of four times seven signs and a scale."""
    return _eight(_bits(words, (0, 7, 14, 21), 127)), (words >> 28).astype(np.uint8)[..., None]


def parts_iq2_xxs(blocks):
    words = _array(blocks, np.uint32, 2)
    return Parts(words[..., :1].copy().view(np.uint8), *_signs_scale(words[..., 1]), _d(blocks))


def parts_iq2_xs(blocks):
    codes = _array(blocks, np.uint16, 2, 66)
    return Parts(codes & 511, _eight(codes >> 9), _nibbles(blocks[:, 66:]), _d(blocks))


def parts_iq2_s(blocks):
    upper = _bits(blocks[:, 66:74], (0, 2, 4, 6), 3).astype(np.uint16)
    return Parts(_array(blocks, np.uint8, 2, 34) | upper << 8, _array(blocks, np.uint8, 34, 66),
                 _nibbles(blocks[:, 74:]), _d(blocks))


def parts_iq3_xxs(blocks):
    return Parts(_array(blocks, np.uint8, 2, 66), *_signs_scale(_array(blocks, np.uint32, 66)[..., 0]), _d(blocks))


def parts_iq3_s(blocks):
    upper = _bits(blocks[:, 66:74], range(8), 1).astype(np.uint16)
    return Parts(_array(blocks, np.uint8, 2, 66) | upper << 8, _array(blocks, np.uint8, 74, 106),
                 _nibbles(blocks[:, 106:]), _d(blocks))


def parts_iq1_s(blocks):
    words = _array(blocks, np.uint16, 34)[..., 0]
    return Parts(_array(blocks, np.uint8, 2, 34) | _bits(words, (0, 3, 6, 9), 7) << 8,
                 np.repeat(words[..., None] >> 15, 4, axis=2).astype(np.uint8),
                 (words >> 12 & 7).astype(np.uint8)[..., None], _d(blocks))


def parts_iq1_m(blocks):
    nibbles = _nibbles(blocks[:, 32:48])
    words = np.ascontiguousarray(blocks[:, 48:]).view(np.uint16)
    d = np.bitwise_or.reduce(words >> 12 << np.array([0, 4, 8, 12], np.uint16), axis=1)
    return Parts(_array(blocks, np.uint8, 0, 32) | (nibbles & 7).astype(np.uint16) << 8, nibbles >> 3,
                 _bits(words, (0, 3, 6, 9), 7).reshape(-1, BLOCKS, 2).astype(np.uint8), d.view(np.float16))


# ---- repacking: take and take_scales of a Format --------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def spread(byte):
    """Bit n of a byte -> bit 4 n."""
    x = uint32(byte | uint32(byte << uint32(12))) & uint32(0x000F000F)
    x = uint32(x | uint32(x << uint32(6))) & uint32(0x03030303)
    return uint32(x | uint32(x << uint32(3))) & uint32(0x11111111)


@cuda.jit(device=True, forceinline=True)
def signs_of(word, bits):
    """The word of signs, from four fields of so many bits."""
    signs = uint32(0)
    for g in range(4):
        field = uint32(word >> uint32(bits * g)) & uint32((1 << bits) - 1)
        signs = uint32(signs | uint32(spread(field) << uint32(g)))
    return signs


def take_function(first_code, codes, signs_at, signs):
    """take for types whose codes begin at 16-bit unit first_code, 4 or 8 to a block of 32, and whose words of signs, if
    any, begin at unit signs_at."""
    words_of_codes, bits = codes // 4, 8 if signs == EIGHT else 7

    @cuda.jit(device=True, forceinline=True)
    def take(words, raw, at, j):
        here = uint32(at + uint32(first_code) + uint32(j * uint32(2 * words_of_codes)))
        for i in range(words_of_codes):
            words[i] = word_at(raw, uint32(here + uint32(2 * i)))
        if signs_at:
            word = word_at(raw, uint32(at + uint32(signs_at) + uint32(j << uint32(1))))
            words[words_of_codes] = signs_of(word, bits)
            if bits == 7:
                words[words_of_codes] = uint32(words[words_of_codes] | uint32(word & uint32(0xF0000000)))

    return take


@cuda.jit(device=True, forceinline=True)
def take_iq2_xxs(words, raw, at, j):
    here = uint32(at + uint32(1) + uint32(j << uint32(2)))
    word = word_at(raw, uint32(here + uint32(2)))
    words[0] = word_at(raw, here)
    words[1] = uint32(signs_of(word, 7) | uint32(word & uint32(0xF0000000)))


@cuda.jit(device=True, forceinline=True)
def take_iq2_xs(words, raw, at, j):
    low, signs = uint32(0), uint32(0)
    for g in range(4):
        code = uint32(raw[uint32(at + uint32(1 + g) + uint32(j << uint32(2)))])
        low = uint32(low | uint32(uint32(code & uint32(0xFF)) << uint32(8 * g)))
        ninth = uint32(uint32(uint32(code >> uint32(8)) & uint32(1)) << uint32(28))
        signs = uint32(signs | uint32(uint32(spread(uint32(code >> uint32(9))) | ninth) << uint32(g)))
    words[0], words[1] = low, signs


@cuda.jit(device=True, forceinline=True)
def take_d(wd, raw, at, j, to, b):
    """wd of types that have nothing but d there."""
    if j == uint32(0):
        wd[uint32(to + uint32(b >> uint32(3)))] = raw[at]
    return is_finite(raw[at])


@cuda.jit(device=True, forceinline=True)
def take_scales_iq2_xs(wd, raw, at, j, to, b):
    header = uint32(to + uint32(uint32(b >> uint32(3)) * uint32(5)))
    if j < uint32(4):
        wd[uint32(header + j)] = raw[uint32(at + uint32(33) + j)]
    if j == uint32(4):
        wd[uint32(header + j)] = raw[at]
    return is_finite(raw[at])


@cuda.jit(device=True, forceinline=True)
def put_word(wd, raw, at, j, to, b, word):
    """The j-th of 8 words, then d."""
    header = uint32(to + uint32(uint32(b >> uint32(3)) * uint32(9)))
    wd[uint32(header + j)] = uint16(word)
    if j == uint32(0):
        wd[uint32(header + uint32(8))] = raw[at]
    return is_finite(raw[at])


@cuda.jit(device=True, forceinline=True)
def take_scales_iq2_s(wd, raw, at, j, to, b):
    upper, scales = byte_at(raw, uint32(at + uint32(33)), j), byte_at(raw, uint32(at + uint32(37)), j)
    return put_word(wd, raw, at, j, to, b, uint32(upper | uint32(scales << uint32(8))))


@cuda.jit(device=True, forceinline=True)
def take_scales_iq3_s(wd, raw, at, j, to, b):
    pair = byte_at(raw, uint32(at + uint32(53)), uint32(j >> uint32(1)))
    scale = uint32(pair >> uint32(uint32(j & uint32(1)) << uint32(2))) & uint32(15)
    upper = byte_at(raw, uint32(at + uint32(33)), j)
    return put_word(wd, raw, at, j, to, b, uint32(upper | uint32(scale << uint32(8))))


@cuda.jit(device=True, forceinline=True)
def take_scales_iq1_s(wd, raw, at, j, to, b):
    return put_word(wd, raw, at, j, to, b, uint32(raw[uint32(at + uint32(17) + j)]))


@cuda.jit(device=True, forceinline=True)
def take_scales_iq1_m(wd, raw, at, j, to, b):
    header = uint32(to + uint32(uint32(b >> uint32(3)) * uint32(13)))
    wd[uint32(header + j)] = raw[uint32(at + uint32(16) + j)]
    d = uint32(0)
    for i in range(4):
        d = uint32(d | uint32(uint32(uint32(raw[uint32(at + uint32(24 + i))]) >> uint32(12)) << uint32(4 * i)))
    if j < uint32(4):  # four scales of 3 bits become nibbles
        word, nibbles = uint32(raw[uint32(at + uint32(24) + j)]), uint32(0)
        for i in range(4):
            nibbles = uint32(nibbles | uint32(uint32(uint32(word >> uint32(3 * i)) & uint32(7)) << uint32(4 * i)))
        wd[uint32(header + uint32(8) + j)] = uint16(nibbles)
    if j == uint32(4):
        wd[uint32(header + uint32(12))] = uint16(d)
    return is_finite(d)


# ---- a lane's part ------------------------------------------------------------------------------------------------

def fetch_scales_function(wd_words):
    """fetch_scales(raw, at, wd, d_from, b): loads what wd has of block b, d last, into raw[at], raw[at + 1], .."""

    @cuda.jit(device=True, forceinline=True)
    def fetch_scales(raw, at, wd, d_from, b):
        header, j = uint32(d_from + uint32(uint32(b >> uint32(3)) * uint32(wd_words))), uint32(b & uint32(7))
        if wd_words >= 9:
            raw[at] = uint32(wd[uint32(header + j)])
        if wd_words == 5:
            raw[at] = load_byte(wd, uint32(uint32(header << uint32(1)) + j))
        if wd_words == 13:
            raw[at + 1] = load_byte(wd, uint32(uint32(header << uint32(1)) + uint32(16) + j))
        raw[at + (wd_words > 1) + (wd_words == 13)] = uint32(wd[uint32(header + uint32(wd_words - 1))])

    return fetch_scales


@cuda.jit(device=True, forceinline=True)
def even_signs(word):
    """The word of signs whose nibble 7 is the exclusive or of the others."""
    signs = uint32(word & uint32(0x0FFFFFFF))
    parity = uint32(signs ^ uint32(signs << uint32(16)))
    parity = uint32(parity ^ uint32(parity << uint32(8)))
    parity = uint32(parity ^ uint32(parity << uint32(4)))
    return uint32(signs | uint32(parity & uint32(0xF0000000)))


# Where bits of a code or scale are: in a word of raw. `step`: from a code's to the next one's.
Upper = namedtuple("Upper", "word bit step mask")  # bits of `mask` behind the low 8 of a code
Scale = namedtuple("Scale", "word bit mask")  # of one s, or of a byte with two


def entry_function(upper):
    """entry_of(raw, i, book): the entry of code i, whose low 8 bits are byte i of raw."""
    place = 2  # of a code's lowest bit in the address: an entry has 4 bytes

    @cuda.jit(device=True, forceinline=True)
    def low(raw, i):
        return shifted(raw[i // 4], place - 8 * (i % 4)) & uint32(0xFF << place)

    @cuda.jit(device=True, forceinline=True)
    def entry_of_byte(raw, i, book):
        return load_shared(book + uint64(low(raw, i)))

    @cuda.jit(device=True, forceinline=True)
    def entry_of(raw, i, book):
        code = uint32(low(raw, i) | uint32(shifted(raw[word], place + 8 - bit - step * i) & uint32(mask)))
        return load_shared(book + uint64(code))

    if not upper:
        return entry_of_byte
    word, bit, step, mask = upper.word, upper.bit, upper.step, upper.mask << place + 8
    return entry_of


def eights_function(entry_of, values):
    """weights(w, raw, signs, book), w uint32 [8], for codes of eight weights with the three magnitudes `values`."""
    plus, minus = byte_words(values), byte_words(-values)

    @cuda.jit(device=True, forceinline=True)
    def weights(w, raw, signs, book):
        for g in range(4):
            entry = entry_of(raw, g, book)
            entry = uint32(entry | uint32(shifted(signs, 2 - g) & uint32(0x44444444)))
            w[2 * g] = prmt(uint32(plus), uint32(minus), entry)
            w[2 * g + 1] = prmt(uint32(plus), uint32(minus), uint32(entry >> uint32(16)))

    return weights


def fours_function(entry_of, values):
    """The same for codes of four weights."""

    @cuda.jit(device=True, forceinline=True)
    def weights(w, raw, signs, book):
        for g in range(4):
            choice = uint32(uint32(shifted(signs, 2 - g) & uint32(0x44444444)) | uint32(0x32103210))
            first = entry_of(raw, 2 * g, book)
            second = entry_of(raw, 2 * g + 1, book)
            w[2 * g] = prmt(first, uint32(uint32(0x01010100) - first), choice)
            w[2 * g + 1] = prmt(second, uint32(uint32(0x01010100) - second), uint32(choice >> uint32(16)))

    return weights


def shifted_function(entry_of, values, bit):
    """The same for eight of the digits `values`, all 32 moved up or, where this bit of `shifts` is set, down."""
    up, down = byte_words(8 * values + 1), byte_words(8 * values - 1)

    @cuda.jit(device=True, forceinline=True)
    def weights(w, raw, shifts, book):
        of_three = uint32(down) if shifts & uint32(1 << bit) else uint32(up)
        for g in range(4):
            entry = entry_of(raw, g, book)
            w[2 * g] = prmt(of_three, uint32(0), entry)
            w[2 * g + 1] = prmt(of_three, uint32(0), uint32(entry >> uint32(16)))

    return weights


def shifted_groups_function(values):
    """The same, each group of eight with its own shift. A nibble of raw[1] has the upper three bits of a code and, at
    the top, the shift."""
    up, down = byte_words(8 * values + 1), byte_words(8 * values - 1)

    @cuda.jit(device=True, forceinline=True)
    def weights(w, raw, shifts, book):
        upper = raw[1] & uint32(0x0707), uint32(raw[1] >> uint32(4)) & uint32(0x0707)
        for g in range(4):
            code = prmt(raw[0], upper[g % 2], uint32(0x7740 + 16 * (g // 2) + g))
            entry = load_shared(book + uint64(uint32(code << uint32(2))))
            of_three = uint32(down) if raw[1] & uint32(8 << 4 * g) else uint32(up)
            w[2 * g] = prmt(of_three, uint32(0), entry)
            w[2 * g + 1] = prmt(of_three, uint32(0), uint32(entry >> uint32(16)))

    return weights


def byte_words(values):
    """Three small integers as the bytes of a uint32."""
    return int(np.array([*values, 0], np.int8).view(np.uint32)[0])


def unpack_function(weights, marks_at, seven, scale, d_at, unit, halves):
    """unpack(w, scales, raw, book); see Format."""
    scale_at, bit, mask = scale

    @cuda.jit(device=True, forceinline=True)
    def unpack(w, scales, raw, book):
        weights(w, raw, even_signs(raw[marks_at]) if seven else raw[marks_at], book)
        d, s = half_to_float(uint16(raw[d_at])) * float32(unit), uint32(raw[scale_at] >> uint32(bit))
        if halves:
            scales[0] = float_as_word(d)
            scales[1] = uint32(uint32(s << uint32(1)) & uint32(2 * mask)) | uint32(1)
            scales[2] = uint32(uint32(s >> uint32(3)) & uint32(2 * mask)) | uint32(1)
        else:
            s = uint32(uint32(s << uint32(1)) & uint32(2 * mask)) | uint32(1)
            scales[0] = float_as_word(d * float32(s))

    return unpack


def load_function(words):
    """load_book(thread, threads); see Format."""
    n_words, four_words = len(words), table_words4(words)

    @cuda.jit(device=True, forceinline=True)
    def load_book(thread, threads):
        book = shared_address(cuda.shared.array(n_words, uint32, alignment=16))
        at = uint32(thread << uint32(2))
        while at < uint32(n_words):
            w0, w1, w2, w3 = four_words(at)
            store_shared4(book + uint64(uint32(at << uint32(2))), w0, w1, w2, w3)
            at = uint32(at + uint32(threads << uint32(2)))
        cuda.syncthreads()
        return book

    return load_book


# ---- the formats ----------------------------------------------------------------------------------------------------

class SpreadScale:
    """The d of IQ1_M: four bits of it at the top of each of the last four 16-bit words."""

    kind = "half"

    def fill(self, rng, raw):
        self.put(raw, rng.standard_normal((len(raw), 1)) / 1000)

    def put(self, raw, scales):
        d = np.ascontiguousarray(np.broadcast_to(scales, (len(raw), 1)), np.float16).view(np.uint16)
        words = np.ascontiguousarray(raw[:, 48:]).view(np.uint16) & 0xFFF
        raw[:, 48:] = (words | d >> np.array([0, 4, 8, 12], np.uint16) << 12).view(np.uint8)

    def bad(self):
        for value in (np.inf, -np.inf, np.nan):
            words = np.zeros((1, 56), np.uint8)
            self.put(words, value)
            yield 48, words[0, 48:]


def terms_function(parts, book, unit, halves):
    """terms(blocks); see Format."""
    def terms(blocks):
        codes, marks, s, d = parts(blocks)
        q = book[codes].reshape(-1, BLOCK).astype(np.int32)
        if marks_are_shifts:
            q = 8 * q + np.repeat(1 - 2 * marks.reshape(-1, 4).astype(np.int32), 8, axis=1)
        else:
            q *= 1 - 2 * np.unpackbits(marks.reshape(-1, 4), axis=1, bitorder="little").astype(np.int32)
        integers = 2 * s.reshape(len(q), -1).astype(np.int32) + 1
        scale = np.repeat(d.astype(np.float32) * np.float32(unit), BLOCKS)[:, None]
        return Terms(q, integers if halves else None, scale if halves else scale * integers.astype(np.float32),
                     np.zeros((len(q), 0), np.float32))

    marks_are_shifts = book.min() < 0
    return terms


def split_function(parts, header, marks):
    """split_blocks(blocks); see Format. header(parts): the rows' uint16 in front of d."""
    def split_blocks(blocks):
        here = parts(blocks)
        planes = [here.codes.astype(np.uint8)]
        if marks != SHIFTS:
            bits = np.unpackbits(here.marks, axis=2, bitorder="little").reshape(-1, 4, 8)
            if marks == SEVEN:  # the even number of negative weights says the last sign
                rest = _bits(here.scales[..., 0], range(4), 1) if here.codes.dtype == np.uint8 else here.codes >> 8
                bits[:, :, 7] = rest.reshape(-1, 4)
            planes.append(np.packbits(np.swapaxes(bits, 1, 2).reshape(-1, 32), axis=1, bitorder="little"))
        planes = np.concatenate([plane.reshape(len(blocks) * BLOCKS, -1) for plane in planes], axis=1)
        words = [np.ascontiguousarray(part).view(np.uint16).reshape(len(blocks), -1) for part in header(here)]
        return planes, np.concatenate([*words, here.d[:, None].view(np.uint16)], axis=1)

    return split_blocks


def _pairs(scales):
    """Two scales of 4 bits as a byte."""
    return scales[..., 0] | scales[..., 1] << 4


def _bytes(first, second):
    return np.stack([first, second], axis=2).astype(np.uint8)


def _packed(fields, step):
    """The bits of [rows, 8, 4 or 8] next to each other, each `step` bits."""
    shifts = np.arange(fields.shape[2], dtype=fields.dtype) * fields.dtype.type(step)
    return np.bitwise_or.reduce(fields << shifts, axis=2)


# What wd has of a row before d.
HEADERS = {
    "IQ2_XXS": lambda p: (),
    "IQ3_XXS": lambda p: (),
    "IQ2_XS": lambda p: (_pairs(p.scales),),
    "IQ2_S": lambda p: (_bytes(_packed(p.codes >> 8, 2), _pairs(p.scales)),),
    "IQ3_S": lambda p: (_bytes(_packed(p.codes >> 8, 1), p.scales[..., 0]),),
    "IQ1_S": lambda p: (_packed(p.codes >> 8, 3) | p.scales[..., 0].astype(np.uint16) << 12
                        | p.marks[..., 0].astype(np.uint16) << 15,),
    "IQ1_M": lambda p: (_packed(p.codes >> 8 | p.marks.astype(np.uint16) << 3, 4), _pairs(p.scales)),
}


# Of integer scales: what d is multiplied by.
UNITS = {"IQ3_S": 1.0, "IQ3_XXS": 0.25, "IQ2_S": 0.125, "IQ2_XS": 0.125, "IQ2_XXS": 0.125, "IQ1_S": 0.125,
         "IQ1_M": 0.125}


def code_book(name, number, file_bytes, planes, wd_words, *, parts, take, take_scales, marks, scale, upper=None,
              shift=None, halves=False, scales=HalfScales(0)):
    """The Format of a type. shift: the bit of a shift in the word behind the planes; where there are shifts and no such
    bit, each group has its own (`shifted_groups_function`). The other arguments are explained above."""
    book, unit = grid(name), UNITS[name]
    words, values = book_words(book)
    plane_words, scale_words = sum(planes) // 4, 1 + (wd_words > 1) + (wd_words > 9)
    entry_of, either = entry_function(upper), (8 * book - 1, 8 * book + 1) if marks == SHIFTS else (book, -book)
    if shift:
        weights = shifted_function(entry_of, values, shift)
    elif marks == SHIFTS:
        weights = shifted_groups_function(values)
    else:
        weights = (fours_function if book.shape[1] == 4 else eights_function)(entry_of, values)
    marks_at, d_at = plane_words - (marks != SHIFTS), plane_words + scale_words - 1
    return Format(
        name, number, 8 * BLOCK, file_bytes, planes, wd_words, split_function(parts, HEADERS[name], marks),
        terms_function(parts, book, unit, halves), take, take_scales, fetch_scales_function(wd_words),
        unpack_function(weights, marks_at, marks == SEVEN, scale, d_at, unit, halves), np.concatenate(either).ravel(),
        scale_words=scale_words, halves=halves, scales=scales, load_book=load_function(words),
        book_bytes=words.nbytes,
        random=Random(wd_words - 1, mask=0xFFFF, mean=(scale.mask + 1) * unit))


CODE_BOOKS = (
    code_book("IQ3_S", 21, 110, (8, 4), 9, parts=parts_iq3_s, take=take_function(1, 8, 37, EIGHT),
              take_scales=take_scales_iq3_s, marks=EIGHT, scale=Scale(3, 8, 15), upper=Upper(3, 0, 1, 1)),
    code_book("IQ3_XXS", 18, 98, (8, 4), 1, parts=parts_iq3_xxs, take=take_function(1, 8, 33, SEVEN),
              take_scales=take_d, marks=SEVEN, scale=Scale(2, 28, 15)),
    code_book("IQ2_S", 22, 82, (8,), 9, parts=parts_iq2_s, take=take_function(1, 4, 17, EIGHT),
              take_scales=take_scales_iq2_s, marks=EIGHT, scale=Scale(2, 8, 15), upper=Upper(2, 0, 2, 3), halves=True),
    code_book("IQ2_XS", 17, 74, (8,), 5, parts=parts_iq2_xs, take=take_iq2_xs, take_scales=take_scales_iq2_xs,
              marks=SEVEN, scale=Scale(2, 0, 15), upper=Upper(1, 28, 1, 1), halves=True),
    code_book("IQ2_XXS", 16, 66, (8,), 1, parts=parts_iq2_xxs, take=take_iq2_xxs, take_scales=take_d, marks=SEVEN,
              scale=Scale(1, 28, 15)),
    code_book("IQ1_S", 19, 50, (4,), 9, parts=parts_iq1_s, take=take_function(1, 4, 0, SHIFTS),
              take_scales=take_scales_iq1_s, marks=SHIFTS, scale=Scale(1, 12, 7), upper=Upper(1, 0, 3, 7),
              shift=15),
    code_book("IQ1_M", 29, 56, (4,), 13, parts=parts_iq1_m, take=take_function(0, 4, 0, SHIFTS),
              take_scales=take_scales_iq1_m, marks=SHIFTS, scale=Scale(2, 0, 15), halves=True, scales=SpreadScale()),
)
