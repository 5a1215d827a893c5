"""Codes of a few bits: how 32 of them lie in the planes of a block, and how a lane turns them into words of int8.

    8 bits  32 bytes
    4 to 6  16 bytes: low 4 bits      byte b of word i: weight 4 i + b, and in its upper half 16 + 4 i + b
            5: then 4 bytes           byte b, bit i: fifth bit of weight 4 i + b, i < 8
            6: then 8 bytes           word h, byte b, bits 2 i and 2 i + 1: those of 16 h + 4 i + b, i < 4
    4, in order   16 bytes            word h, nibble m: weight 8 h + m, m < 8. For tables of 16
    2, 3    8 bytes: low 2 bits       word h, nibble m: weight 16 h + m, and in its upper half 16 h + 8 + m, m < 8
            3: then 4 bytes           nibble m, bit i: third bit of weight 8 i + m, i < 4

Codes of 4 bits and more are moved by shifts and masks. Codes of 2 and 3 bits, and those of tables of 16, are looked up:
a nibble with such a code selects a byte for `prmt`, four at a time, and they come out in order.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.types import uint32, uint64

from kernels.intrinsics import prmt, table_words4


def nibbles(data):
    """uint8 [..., m] -> [..., 2, m]: low halves, high halves."""
    return np.stack([data & 15, data >> 4], axis=-2)


def signed_values(bits):
    """int8 [2**bits]: codes as two's complement."""
    codes = np.arange(2**bits)
    return ((codes ^ len(codes) // 2) - len(codes) // 2).astype(np.int8)


def planes_of(bits):
    """Bytes of a block in each plane."""
    return {8: (32,), 6: (16, 8), 5: (16, 4), 4: (16,), 3: (8, 4), 2: (8,)}[bits]


def in_planes(codes, bits):
    """Codes uint8, blocks of 32 -> the bytes of their planes, uint8 [n_blocks, 4 bits]."""
    codes = np.ascontiguousarray(codes).reshape(-1, 32)
    if bits == 8:
        return codes
    if bits < 4:
        return _in_narrow_planes(codes, bits)
    planes = [codes[:, :16] & 15 | (codes[:, 16:] & 15) << 4]
    high = bits - 4
    if high:
        words = (codes >> 4).reshape(len(codes), high, 8 // high, 4)
        shifts = np.arange(0, 8, high, dtype=np.uint8)[:, None]
        planes.append(np.bitwise_or.reduce(words << shifts, axis=2).reshape(len(codes), -1))
    return np.concatenate(planes, axis=1)


def in_order(codes):
    """Codes uint8 of 4 bits, blocks of 32 -> uint8 [n_blocks, 16], in order."""
    codes = np.ascontiguousarray(codes).reshape(-1, 32)
    return codes[:, 0::2] | codes[:, 1::2] << 4


def exchanged(codes):
    """Codes of 4 bits, uint8, with their upper two bits in the other order."""
    return codes & 3 | (codes & 4) << 1 | (codes & 8) >> 1


def _in_narrow_planes(codes, bits):
    eights = codes.reshape(len(codes), 4, 8)
    low = eights[:, 0::2] & 3 | (eights[:, 1::2] & 3) << 2  # [n_blocks, word, nibble]
    planes = [low[:, :, 0::2] | low[:, :, 1::2] << 4]
    if bits == 3:
        top = np.bitwise_or.reduce((eights >> 2) << np.arange(4, dtype=np.uint8)[:, None], axis=1)
        planes.append(top[:, None, 0::2] | top[:, None, 1::2] << 4)
    return np.concatenate([plane.reshape(len(codes), -1) for plane in planes], axis=1)


# ---- repacking: `gather` makes planes of codes that lie one in a byte -----------------------------------------------
# low uint32 [8]: the low bits of the 32 codes (4 of them, all 8, or 2 where codes have 2 or 3); high uint32 [8]: the
# bits above them.

@cuda.jit(device=True, forceinline=True)
def to_nibbles(word):
    """The low halves of four bytes, as 16 bits."""
    pairs = uint32(word | uint32(word >> uint32(4))) & uint32(0x00FF00FF)
    return uint32(pairs | uint32(pairs >> uint32(8))) & uint32(0xFFFF)


@cuda.jit(device=True, forceinline=True)
def eight_nibbles(words, i):
    return uint32(to_nibbles(words[2 * i]) | uint32(to_nibbles(words[2 * i + 1]) << uint32(16)))


@cache
def gather_function(bits):
    """gather(words, low, high): words uint32 [bits], those of the planes."""
    high_bits = bits - 4

    @cuda.jit(device=True, forceinline=True)
    def gather_bytes(words, low, high):
        for i in range(8):
            words[i] = low[i]

    @cuda.jit(device=True, forceinline=True)
    def gather_halves(words, low, high):
        for i in range(4):
            words[i] = uint32(low[i] | uint32(low[4 + i] << uint32(4)))
        for h in range(high_bits):
            word = uint32(0)
            for i in range(8 // high_bits):
                word = uint32(word | uint32(high[8 // high_bits * h + i] << uint32(high_bits * i)))
            words[4 + h] = word

    @cuda.jit(device=True, forceinline=True)
    def gather_narrow(words, low, high):
        for h in range(2):
            words[h] = uint32(eight_nibbles(low, 2 * h) | uint32(eight_nibbles(low, 2 * h + 1) << uint32(2)))
        if bits == 3:
            word = uint32(0)
            for i in range(4):
                word = uint32(word | uint32(eight_nibbles(high, i) << uint32(i)))
            words[2] = word

    return gather_bytes if bits == 8 else gather_halves if bits >= 4 else gather_narrow


@cuda.jit(device=True, forceinline=True)
def gather_in_order(words, low, high):
    for i in range(4):
        words[i] = eight_nibbles(low, i)


@cuda.jit(device=True, forceinline=True)
def gather_exchanged(words, low, high):
    gather_in_order(words, low, high)
    for i in range(4):
        upper = uint32(words[i] << uint32(1)) & uint32(0x88888888)
        lower = uint32(words[i] >> uint32(1)) & uint32(0x44444444)
        words[i] = uint32(uint32(words[i] & uint32(0x33333333)) | uint32(upper | lower))


def take_codes_of(bits, take_codes):
    """The `take` of a Format (kernels/formats/format.py) from take_codes(low, high, raw, at, j)."""
    return _take(gather_function(bits), take_codes)


def take_in_order(take_codes):
    """The same for codes of 4 bits in order."""
    return _take(gather_in_order, take_codes)


def take_exchanged(take_codes):
    """The same for codes of 4 bits in order, `exchanged`."""
    return _take(gather_exchanged, take_codes)


def _take(gather, take_codes):

    @cuda.jit(device=True, forceinline=True)
    def take(words, raw, at, j):
        low, high = cuda.local.array(8, uint32), cuda.local.array(8, uint32)
        take_codes(low, high, raw, at, j)
        gather(words, low, high)

    return take


# ---- from planes to int8 ------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def shifted(word, left):
    """word << left, or >> -left for a negative one; `left` is a constant once loops are unrolled."""
    return uint32(uint32(word << uint32(max(left, 0))) >> uint32(max(-left, 0)))


@cache
def spread_function(bits, place):
    """spread(w, raw): codes of 4 to 8 bits, each 2**place times as large. With place = 8 - bits a signed code is at the
    top of its byte, so that no sign has to be extended."""
    high = bits - 4
    low_mask = 0x0F0F0F0F << place
    high_mask = (2**high - 1 << 4 + place) * 0x01010101
    per_word = 8 // high if 0 < high < 4 else 8  # words of w that share a word of upper bits

    @cuda.jit(device=True, forceinline=True)
    def spread_bytes(w, raw):
        for i in range(8):
            w[i] = raw[i]

    @cuda.jit(device=True, forceinline=True)
    def spread_halves(w, raw):
        for i in range(4):
            w[i] = shifted(raw[i], place) & uint32(low_mask)
            w[4 + i] = shifted(raw[i], place - 4) & uint32(low_mask)
        if high:
            for i in range(8):
                upper = shifted(raw[4 + i // per_word], place + 4 - high * (i % per_word))
                w[i] = uint32(w[i] | uint32(upper & uint32(high_mask)))

    return spread_bytes if bits == 8 else spread_halves


# A table of 16 int8, asked by nibbles. One prmt looks up four bytes among 8 by three bits of a nibble each. Where the
# fourth bit of a nibble is set, it gives the sign of the byte instead, eight times. So two prmt are asked, one by the
# codes and one by the codes with their fourth bits flipped: of the two bytes, one is of the table, the other one is
# 0x00 or 0xFF, as the tables are made. An operation more brings both together. 9 integer instructions for 8 codes.
#
# Two of the four words of a table are in registers, as `book`: an instruction holds only one constant, and the
# assembler would move the other one into a register for each prmt anew.

def load_words_function(first, second):
    """The load_book of a Format (kernels/formats/format.py) whose book is two words, in registers of every lane. The
    assembler knows no word that was loaded, and keeps it."""
    words_of = table_words4(np.tile(np.array([first, second, 0, 0], np.uint32), 32))

    @cuda.jit(device=True, forceinline=True)
    def load_words(thread, threads):
        w0, w1, _, _ = words_of(uint32(uint32(thread & uint32(31)) << uint32(2)))
        return uint64(uint64(w0) | uint64(uint64(w1) << uint64(32)))

    return load_words


def lookup_function(tables, join):
    """(lookup(w, raw, book), load_book). tables: for codes, and for flipped ones, uint32 [2] each. join(a, b): the word
    of four weights from the bytes of both."""
    (a0, a1), (b0, b1) = ([int(word) for word in table] for table in tables)

    @cuda.jit(device=True, forceinline=True)
    def four(codes, flipped, book):
        a = prmt(uint32(book), uint32(a1), codes)
        return join(a, prmt(uint32(book >> uint64(32)), uint32(b1), flipped))

    @cuda.jit(device=True, forceinline=True)
    def lookup(w, raw, book):
        for i in range(4):
            flipped = uint32(raw[i] ^ uint32(0x88888888))
            w[2 * i] = four(raw[i], flipped, book)
            w[2 * i + 1] = four(uint32(raw[i] >> uint32(16)), uint32(flipped >> uint32(16)), book)

    return lookup, load_words_function(a0, b0)


def lookup_signs(table):
    """`lookup_function` for a table whose second half is the negated first one, with numbers below 64. w is twice as
    large as the table says: all bytes asked are positive, so the other one of two is 0. Those of the first table are
    twice the numbers, those of the second one the lower 7 bits of the negated ones. Moved up by a bit, these are twice
    the negated numbers."""
    first = np.array(table[:8], np.int64)
    assert (np.array(table[8:]) == -first).all() and first.min() >= 0 and first.max() < 64

    @cuda.jit(device=True, forceinline=True)
    def join(positive, negative):
        return uint32(uint32(negative << uint32(1)) + positive)

    tables = [np.array(numbers, np.uint8).view(np.uint32) for numbers in (2 * first, -first & 127)]
    return lookup_function(tables, join)


def lookup_pairs(table):
    """`lookup_function` for any table whose numbers n and n + 8 have the same sign. Where it is +, the other one of two
    bytes is 0. Where it is -, the other one is 0xFF, and the lower 7 bits of a byte of the tables are flipped."""
    numbers = np.array(table, np.int8).view(np.uint8).reshape(2, 8)
    assert (numbers[0] >> 7 == numbers[1] >> 7).all()

    @cuda.jit(device=True, forceinline=True)
    def join(first, second):
        return uint32(first ^ uint32(second & uint32(0x7F7F7F7F)))

    return lookup_function((numbers ^ (numbers >> 7) * np.uint8(127)).view(np.uint32), join)


@cuda.jit(device=True, forceinline=True)
def lookup_crumbs(w, raw, h, table):
    """w of half h of a block, from codes of 2 bits and a table of four int8."""
    for p in range(2):
        selectors = uint32(raw[h] >> uint32(2 * p)) & uint32(0x33333333)
        w[4 * h + 2 * p] = prmt(table, table, selectors)
        w[4 * h + 2 * p + 1] = prmt(table, table, uint32(selectors >> uint32(16)))


@cuda.jit(device=True, forceinline=True)
def lookup_octals(w, raw, h, first, second):
    """w of half h of a block, from codes of 3 bits and a table of eight int8 in two words."""
    for p in range(2):
        low = uint32(raw[h] >> uint32(2 * p)) & uint32(0x33333333)
        selectors = uint32(low | uint32(shifted(raw[2], 2 - (2 * h + p)) & uint32(0x44444444)))
        w[4 * h + 2 * p] = prmt(first, second, selectors)
        w[4 * h + 2 * p + 1] = prmt(first, second, uint32(selectors >> uint32(16)))
