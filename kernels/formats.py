"""Types of weights: how a GGUF file stores them, how they lie on a card, how a lane turns them into dp4a words.

A quantised weight is  scale * q - minimum  with a small integer q. What is stored of q is its *code* of a few bits:
q = format.values[code]. A *block* is 32 consecutive weights of a row; d and dmin are float16 of the file's block.

    format  bits of a code  q        scale of a block     minimum            bytes: file's block   32 weights on a card
    Q8_0    8               signed   d                    -                  34  of  32 weights         34
    Q4_0    4               signed   d                    -                  18  of  32                 18
    Q5_0    5               signed   d                    -                  22  of  32                 22
    IQ4_NL  4               table    d                    -                  18  of  32                 18
    Q6_K    6               signed   d * int8, one for    -                  210 of 256                 26.25
                                     each half block
    Q4_K    4               0..15    d * (0..63)          dmin * (0..63)     144 of 256                 18.5
    Q5_K    5               0..31    d * (0..63)          dmin * (0..63)     176 of 256                 22.5

A signed q has its two's complement as code; the code of IQ4_NL indexes IQ4_VALUES. Products of scales are exact.

On the card a matrix [n, k] is two arrays with a line for each of its rows. `wq` holds a row's codes in planes, so that
neighbouring lanes load neighbouring blocks, 16 bytes each:

    8 bits  [k / 32][32] bytes                int8 [n, k]
    others  [k / 32][16] bytes: low 4 bits    byte b of word i: weight 4 i + b, and in its upper half 16 + 4 i + b
            5: then [k / 32][4] bytes         byte b, bit i: fifth bit of weight 4 i + b, i < 8
            6: then [k / 32][8] bytes         word h, byte b, bits 2 i and 2 i + 1: those of 16 h + 4 i + b, i < 4
            padding to 16 bytes               uint8 [n, bits k / 8, rounded up]

`wd` holds the scales, float16 bits and pairs of bytes:

    one d          [k / 32]        d                                                           float16 [n, k / 32]
    Q4_K, Q5_K     [k / 256][10]   8 times (scale, minimum), d, dmin                           uint16 [n, 10 k / 256]
    Q6_K           [k / 256][9]    8 times (scale of the first half, of the second), d         uint16 [n, 9 k / 256]

A block adds this to a product with int8 activations xq of scale xd (kernels/quantize.py), in all kernels:

    dot    = sum of q * xq over the block, exact;  Q6_K: scale0 * dot of the first half + scale1 * dot of the second
    acc    = fma(float(dot), ws * xd, acc)           ws = d, d * scale, or Q6_K: d
    acc    = fma(-minimum, xd * float(sum of xq), acc)                              Q4_K and Q5_K

Pipe: none; the bus that brings the file is the bound. Its layout: github.com/ggml-org/ggml, src/ggml-quants.c.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint16, uint32

from kernels.bench import Case, main
from kernels.intrinsics import (BIAS_WORD, dp4a, float_as_word, half2_high, half2_low, half_to_float, load_word,
                                load_words2, load_words4, prmt, store_word, store_words4, unbias)

BLOCK = 32  # weights, or activations, that share a scale
THREADS = 128


# ---- weights that are stored as floats ---------------------------------------------------------------------------

@dataclass(frozen=True)
class Float:
    """A type whose weights are stored as floats."""

    name: str
    number: int         # of the type in a GGUF file
    dtype: type         # of the arrays that hold it; uint16 for the bits of bfloat16, which NumPy lacks
    exponent: int       # the bits of the exponent: all of them are set in infinities and NaN
    file_block: int = 1

    @property
    def file_bytes(self):
        """Bytes of a weight."""
        return np.dtype(self.dtype).itemsize

    def widen(self, stored):
        """An array of `dtype` -> the same numbers as float32."""
        return (stored.astype(np.uint32) << 16).view(np.float32) if self.dtype == np.uint16 else \
            stored.astype(np.float32)


FLOATS = {kind.name: kind for kind in (
    Float("F32", 0, np.float32, 0x7F800000),
    Float("F16", 1, np.float16, 0x7C00),
    Float("BF16", 30, np.uint16, 0x7F80),
)}
EXPONENT = FLOATS["F16"].exponent  # of a scale


# ---- NumPy: from the file's bytes to codes, to the card's arrays, and to floats ----------------------------------

def _nibbles(data):
    """uint8 [..., m] -> [..., 2, m]: low halves, high halves."""
    return np.stack([data & 15, data >> 4], axis=-2)


def _split_q8_0(blocks):
    return blocks[:, 2:], blocks[:, :2]


def _split_q4_0(blocks):
    return _nibbles(blocks[:, 2:]).reshape(-1, 32) ^ 8, blocks[:, :2]


def _split_iq4_nl(blocks):
    return _nibbles(blocks[:, 2:]).reshape(-1, 32), blocks[:, :2]


def _split_q5_0(blocks):
    high = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    return (_nibbles(blocks[:, 6:]).reshape(-1, 32) | high << 4) ^ 16, blocks[:, :2]


def _k_scales(blocks):
    """Headers of Q4_K and Q5_K as on the card, uint8 [rows, 20]: the 6-bit scales and minima lie in 12 bytes."""
    first, second, rest = np.split(blocks[:, 4:16], 3, axis=1)
    scale = np.concatenate([first & 63, rest & 15 | (first >> 6) << 4], axis=1)
    minimum = np.concatenate([second & 63, rest >> 4 | (second >> 6) << 4], axis=1)
    return np.concatenate([np.stack([scale, minimum], axis=2).reshape(-1, 16), blocks[:, :4]], axis=1)


def _split_q4_k(blocks):
    return _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256), _k_scales(blocks)


def _split_q5_k(blocks):
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return (low | high << 4).reshape(-1, 256), _k_scales(blocks)


def _split_q6_k(blocks):
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return (low | high << 4).reshape(-1, 256) ^ 32, blocks[:, 192:]


def split(format, raw):
    """The file's bytes of whole blocks -> codes uint8 [n_blocks, 32], and wd uint16, flat, as on the card."""
    codes, wd = format.split_blocks(raw.reshape(-1, format.file_bytes))
    return np.ascontiguousarray(codes).reshape(-1, BLOCK), np.ascontiguousarray(wd).view(np.uint16).reshape(-1)


def pack(format, codes, n):
    """Codes uint8 [n_blocks, 32], the blocks of n rows -> wq as on the card, uint8 [n, bytes of a row]."""
    if format.bits == 8:
        return codes.reshape(n, -1)
    planes = [codes[:, :16] & 15 | (codes[:, 16:] & 15) << 4]
    high = format.bits - 4
    if high:
        words = (codes >> 4).reshape(len(codes), high, 8 // high, 4)
        shifts = np.arange(0, 8, high, dtype=np.uint8)[:, None]
        planes.append(np.bitwise_or.reduce(words << shifts, axis=2))
    rows = np.concatenate([plane.reshape(n, -1) for plane in planes], axis=1)
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % 16)))


def scales(format, wd, dtype):
    """(scale, minimum) of every weight, arrays of `dtype` that broadcast to [n_blocks, 32]."""
    if format.file_block == BLOCK:
        return wd.view(np.float16).astype(dtype)[:, None], dtype(0)
    wd = wd.reshape(-1, format.wd_words)
    d = wd[:, 8:].copy().view(np.float16).astype(dtype)
    pairs = wd[:, :8].copy().view(np.int8).reshape(-1, 8, 2).astype(dtype)
    if format.halves:
        return np.repeat((pairs * d[:, :, None]).reshape(-1, 2), BLOCK // 2, axis=1), dtype(0)
    scale, minimum = np.moveaxis(pairs * d[:, None], 2, 0).reshape(2, -1, 1)
    return scale, minimum


def dequantize(format, raw, dtype=np.float32):
    """The file's bytes of whole blocks (uint8, any shape) -> their weights, flat; as float32 rounded once each, the
    bits of the gguf package's."""
    codes, wd = split(format, raw)
    scale, minimum = scales(format, wd, dtype)
    return (format.values[codes] * scale - minimum).reshape(-1)


def product_reference(format, raw, xq, xd):
    """float64 y [rows, n] = x . w^T for the file's bytes of w [n, k] and quantised rows x (kernels/quantize.py), and
    the sum of the magnitudes that a kernel adds up for each."""
    codes, wd = split(format, raw)
    q, (scale, minimum) = format.values[codes], scales(format, wd, np.float64)
    x = xq * np.repeat(xd.astype(np.float64), BLOCK, axis=1)
    k = xq.shape[1]
    return (x @ (q * scale - minimum).reshape(-1, k).T,
            abs(x) @ (abs(q * scale) + abs(minimum)).reshape(-1, k).T)


# ---- a lane's part: from memory to int8 words and scales ---------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def shifted(word, left):
    """word << left, or >> -left for a negative one; `left` is a constant once loops are unrolled."""
    return uint32(uint32(word << uint32(max(left, 0))) >> uint32(max(-left, 0)))


def fetch_function(format, load4=load_words4):
    """fetch(raw, wq, wd, q_from, d_from, blocks, b): the global loads of block b of a row that starts at wq[q_from] and
    wd[d_from] and has `blocks` blocks. raw: uint32 [format.raw_words], local. load4: how 16 bytes are read."""
    high, scales_at, wd_words = format.bits - 4, format.bits, format.wd_words

    @cuda.jit(device=True, forceinline=True)
    def fetch_bytes(raw, wq, q_from, blocks, b):
        at = uint32(q_from + uint32(b << uint32(5)))
        raw[0], raw[1], raw[2], raw[3] = load4(wq, at)
        raw[4], raw[5], raw[6], raw[7] = load4(wq, uint32(at + uint32(16)))

    @cuda.jit(device=True, forceinline=True)
    def fetch_planes(raw, wq, q_from, blocks, b):
        raw[0], raw[1], raw[2], raw[3] = load4(wq, uint32(q_from + uint32(b << uint32(4))))
        plane = uint32(q_from + uint32(blocks << uint32(4)))
        if high == 1:
            raw[4] = load_word(wq, uint32(plane + uint32(b << uint32(2))))
        if high == 2:
            raw[4], raw[5] = load_words2(wq, uint32(plane + uint32(b << uint32(3))))

    fetch_q = fetch_bytes if format.bits == 8 else fetch_planes

    @cuda.jit(device=True, forceinline=True)
    def fetch(raw, wq, wd, q_from, d_from, blocks, b):
        fetch_q(raw, wq, q_from, blocks, b)
        raw[scales_at] = uint32(wd[uint32(d_from + b)])

    @cuda.jit(device=True, forceinline=True)
    def fetch_k(raw, wq, wd, q_from, d_from, blocks, b):
        fetch_q(raw, wq, q_from, blocks, b)
        header = uint32(d_from + uint32(uint32(b >> uint32(3)) * uint32(wd_words)))
        raw[scales_at] = uint32(wd[uint32(header + uint32(b & uint32(7)))])
        if wd_words == 10:
            raw[scales_at + 1] = load_word(wd, uint32(header + uint32(8)))
        else:
            raw[scales_at + 1] = uint32(wd[uint32(header + uint32(8))])

    return fetch if format.file_block == BLOCK else fetch_k


def starts_function(format):
    """starts(row, blocks): where a row of `blocks` blocks starts, (byte of wq, uint16 of wd)."""
    bits, per_unit, wd_words = format.bits, format.file_block // BLOCK, format.wd_words

    @cuda.jit(device=True, forceinline=True)
    def starts(row, blocks):
        q_row = uint32(uint32(uint32(blocks * uint32(4 * bits)) + uint32(15)) & uint32(0xFFFFFFF0))
        d_row = uint32(uint32(blocks // uint32(per_unit)) * uint32(wd_words))
        return uint32(row * q_row), uint32(row * d_row)

    return starts


def lookup_function(table):
    """lookup(word): q of the 8 codes in a word, from a table of 16 int8, as two words: q of the codes in the lower
    halves of the bytes, and q of those in the upper halves. One prmt looks up four bytes among 8 by three bits each (a
    fourth bit would replicate a sign). So both halves of the table are asked by the lower three bits of a code, and the
    highest bit of the code chooses between the answers. 13 integer instructions, where shifts and masks take 3."""
    t0, t1, t2, t3 = (int(word) for word in np.array(table, np.int8).view(np.uint32))

    @cuda.jit(device=True, forceinline=True)
    def four(indices, choice):
        """Of the four codes in 16 bits of `indices`, each without its highest bit."""
        lower = prmt(uint32(t0), uint32(t1), indices)
        upper = prmt(uint32(t2), uint32(t3), indices)
        return prmt(lower, upper, choice)

    @cuda.jit(device=True, forceinline=True)
    def lookup(word):
        indices = uint32(word & uint32(0x77777777))
        choice = uint32(uint32(uint32(word >> uint32(1)) & uint32(0x44444444)) | uint32(0x32103210))
        first = four(indices, choice)
        second = four(uint32(indices >> uint32(16)), uint32(choice >> uint32(16)))
        return prmt(first, second, uint32(0x6420)), prmt(first, second, uint32(0x7531))

    return lookup


def unpack_function(format):
    """unpack(w, scales, raw): w uint32 [8], the block's q as int8 in order of k, each 2**format.place times as
    large: signed codes are moved to the top of their byte, so that no sign has to be extended, and scales[0] takes
    the factor back exactly. scales uint32 [format.n_scales], float32 bits except for Q6_K's two integers."""
    place, high, scales_at = format.place, format.bits - 4, format.bits
    low_mask = 0x0F0F0F0F << place
    high_mask = (2**high - 1 << 4 + place) * 0x01010101
    per_word = 8 // high if 0 < high < 4 else 8  # words of w that share a word of upper bits
    down = 2.0**-place

    @cuda.jit(device=True, forceinline=True)
    def unpack_bytes(w, raw):
        for i in range(8):
            w[i] = raw[i]

    @cuda.jit(device=True, forceinline=True)
    def unpack_planes(w, raw):
        for i in range(4):
            w[i] = shifted(raw[i], place) & uint32(low_mask)
            w[4 + i] = shifted(raw[i], place - 4) & uint32(low_mask)
        if high:
            for i in range(8):
                upper = shifted(raw[4 + i // per_word], place + 4 - high * (i % per_word))
                w[i] = uint32(w[i] | uint32(upper & uint32(high_mask)))

    @cuda.jit(device=True, forceinline=True)
    def unpack_indices(w, raw):
        for i in range(4):
            w[i], w[4 + i] = lookup(raw[i])

    lookup = lookup_function(format.table) if format.table else None
    unpack_q = unpack_bytes if format.bits == 8 else unpack_indices if format.table else unpack_planes

    @cuda.jit(device=True, forceinline=True)
    def unpack(w, scales, raw):
        unpack_q(w, raw)
        scales[0] = float_as_word(half_to_float(uint16(raw[scales_at])) * float32(down))

    @cuda.jit(device=True, forceinline=True)
    def unpack_minimum(w, scales, raw):
        unpack_q(w, raw)
        pair, d = raw[scales_at], raw[scales_at + 1]
        scales[0] = float_as_word(half2_low(d) * float32(uint32(pair & uint32(0xFF))))
        scales[1] = float_as_word(half2_high(d) * -float32(uint32(pair >> uint32(8))))

    @cuda.jit(device=True, forceinline=True)
    def unpack_halves(w, scales, raw):
        unpack_q(w, raw)
        pair = raw[scales_at]
        scales[0] = float_as_word(half_to_float(uint16(raw[scales_at + 1])) * float32(down))
        scales[1] = uint32(int32(pair << uint32(24)) >> int32(24))
        scales[2] = uint32(int32(pair << uint32(16)) >> int32(24))

    return unpack_minimum if format.minimum else unpack_halves if format.halves else unpack


def dot_function(format):
    """dot(w, scales, x): float32, the exact dot product of a block with 8 words of x, times 2**format.place."""

    @cuda.jit(device=True, forceinline=True)
    def dot(w, scales, x):
        total = int32(BIAS_WORD)
        for i in range(8):
            total = dp4a(w[i], x[i], total)
        return unbias(total)

    @cuda.jit(device=True, forceinline=True)
    def dot_halves(w, scales, x):
        first, second = int32(0), int32(0)
        for i in range(4):
            first = dp4a(w[i], x[i], first)
            second = dp4a(w[4 + i], x[4 + i], second)
        return float32(int32(int32(first * int32(scales[1])) + int32(second * int32(scales[2]))))

    return dot_halves if format.halves else dot


# ---- repacking ----------------------------------------------------------------------------------------------------
# A thread repacks a block: it reads the file's bytes as they are (they are 2-byte aligned) and writes 16 aligned bytes.
#
# take(low, high, raw, at, j): the codes of block j (of 32 weights) of the file's block at raw[at], in 16-bit units: 8
# words with the low 4 bits of a code in each byte (all 8 bits of Q8_0), and 8 words with its upper bits.

@cuda.jit(device=True, forceinline=True)
def word_at(raw, at):
    """4 bytes from two 16-bit units: a file's blocks are not aligned to words."""
    return uint32(uint32(raw[at]) | uint32(uint32(raw[uint32(at + uint32(1))]) << uint32(16)))


@cuda.jit(device=True, forceinline=True)
def take_q8_0(low, high, raw, at, j):
    for i in range(8):
        low[i] = word_at(raw, uint32(at + uint32(1 + 2 * i)))


@cuda.jit(device=True, forceinline=True)
def take_q4_0(low, high, raw, at, j):
    for i in range(4):
        word = uint32(word_at(raw, uint32(at + uint32(1 + 2 * i))) ^ uint32(0x88888888))
        low[i] = word & uint32(0x0F0F0F0F)
        low[4 + i] = uint32(word >> uint32(4)) & uint32(0x0F0F0F0F)


@cuda.jit(device=True, forceinline=True)
def take_iq4_nl(low, high, raw, at, j):
    for i in range(4):
        word = word_at(raw, uint32(at + uint32(1 + 2 * i)))
        low[i] = word & uint32(0x0F0F0F0F)
        low[4 + i] = uint32(word >> uint32(4)) & uint32(0x0F0F0F0F)


@cuda.jit(device=True, forceinline=True)
def take_q5_0(low, high, raw, at, j):
    bits = uint32(~word_at(raw, uint32(at + uint32(1))))
    take_iq4_nl(low, high, raw, uint32(at + uint32(2)), j)
    for i in range(8):  # the multiplication puts four neighbouring bits into four bytes
        four = uint32(bits >> uint32(4 * i)) & uint32(15)
        high[i] = uint32(four * uint32(0x00204081)) & uint32(0x01010101)


@cuda.jit(device=True, forceinline=True)
def take_nibbles(low, raw, at, shift):
    for i in range(8):
        low[i] = uint32(word_at(raw, uint32(at + uint32(2 * i))) >> shift) & uint32(0x0F0F0F0F)


@cuda.jit(device=True, forceinline=True)
def take_q4_k(low, high, raw, at, j):
    chunk = uint32(uint32(j >> uint32(1)) << uint32(4))  # 32 bytes hold two blocks
    take_nibbles(low, raw, uint32(at + uint32(8) + chunk), uint32(uint32(j & uint32(1)) << uint32(2)))


@cuda.jit(device=True, forceinline=True)
def take_q5_k(low, high, raw, at, j):
    chunk = uint32(uint32(j >> uint32(1)) << uint32(4))
    take_nibbles(low, raw, uint32(at + uint32(24) + chunk), uint32(uint32(j & uint32(1)) << uint32(2)))
    for i in range(8):
        high[i] = uint32(word_at(raw, uint32(at + uint32(8 + 2 * i))) >> j) & uint32(0x01010101)


@cuda.jit(device=True, forceinline=True)
def take_q6_k(low, high, raw, at, j):
    half, quarter = uint32(j >> uint32(2)), uint32(j & uint32(3))  # of 128 and of 32 weights
    chunk = uint32(uint32(half << uint32(5)) + uint32(uint32(quarter & uint32(1)) << uint32(4)))
    take_nibbles(low, raw, uint32(at + chunk), uint32(uint32(quarter >> uint32(1)) << uint32(2)))
    upper = uint32(at + uint32(64) + uint32(half << uint32(4)))
    for i in range(8):
        bits = uint32(word_at(raw, uint32(upper + uint32(2 * i))) >> uint32(quarter << uint32(1)))
        high[i] = uint32(bits & uint32(0x03030303)) ^ uint32(0x02020202)


# take_scales(wd, raw, at, j, to, b): writes the scales of the same block, which is block b of the row whose scales
# start at wd[to]; returns whether they are finite. The first of the eight blocks of a K-quant writes what they share.

@cuda.jit(device=True, forceinline=True)
def is_finite(half):
    return uint32(uint32(half) & uint32(EXPONENT)) != uint32(EXPONENT)


@cuda.jit(device=True, forceinline=True)
def take_scale(wd, raw, at, j, to, b):
    wd[uint32(to + b)] = raw[at]
    return is_finite(raw[at])


@cuda.jit(device=True, forceinline=True)
def byte_at(raw, at, i):
    """Byte i after raw[at]."""
    pair = uint32(raw[uint32(at + uint32(i >> uint32(1)))])
    return uint32(pair >> uint32(uint32(i & uint32(1)) << uint32(3))) & uint32(0xFF)


@cuda.jit(device=True, forceinline=True)
def take_scales_minima(wd, raw, at, j, to, b):
    i, packed = uint32(j & uint32(3)), uint32(at + uint32(2))
    first, second = byte_at(raw, packed, i), byte_at(raw, packed, uint32(i + uint32(4)))
    rest = byte_at(raw, packed, uint32(i + uint32(8)))
    scale, minimum = uint32(first & uint32(63)), uint32(second & uint32(63))
    if j > uint32(3):
        scale = uint32(uint32(rest & uint32(15)) | uint32(uint32(first >> uint32(6)) << uint32(4)))
        minimum = uint32(uint32(rest >> uint32(4)) | uint32(uint32(second >> uint32(6)) << uint32(4)))
    header = uint32(to + uint32(uint32(b >> uint32(3)) * uint32(10)))
    wd[uint32(header + j)] = uint16(uint32(scale | uint32(minimum << uint32(8))))
    d, dmin = raw[at], raw[uint32(at + uint32(1))]
    if j == uint32(0):
        wd[uint32(header + uint32(8))] = d
        wd[uint32(header + uint32(9))] = dmin
    return is_finite(d) and is_finite(dmin)


@cuda.jit(device=True, forceinline=True)
def take_scales_halves(wd, raw, at, j, to, b):
    header = uint32(to + uint32(uint32(b >> uint32(3)) * uint32(9)))
    wd[uint32(header + j)] = raw[uint32(at + uint32(96) + j)]
    d = raw[uint32(at + uint32(104))]
    if j == uint32(0):
        wd[uint32(header + uint32(8))] = d
    return is_finite(d)


def put_function(format):
    """put(wq, low, high, to, blocks, b): writes the codes of block b of a row of `blocks` blocks, which starts at
    wq[to]."""
    high_bits = format.bits - 4

    @cuda.jit(device=True, forceinline=True)
    def put_bytes(wq, low, high, to, blocks, b):
        at = uint32(to + uint32(b << uint32(5)))
        store_words4(wq, at, low[0], low[1], low[2], low[3])
        store_words4(wq, uint32(at + uint32(16)), low[4], low[5], low[6], low[7])

    @cuda.jit(device=True, forceinline=True)
    def put_planes(wq, low, high, to, blocks, b):
        for i in range(4):
            low[i] = uint32(low[i] | uint32(low[4 + i] << uint32(4)))
        store_words4(wq, uint32(to + uint32(b << uint32(4))), low[0], low[1], low[2], low[3])
        plane = uint32(to + uint32(blocks << uint32(4)))
        for h in range(high_bits):
            word = uint32(0)
            for i in range(8 // high_bits):
                word = uint32(word | uint32(high[8 // high_bits * h + i] << uint32(high_bits * i)))
            store_word(wq, uint32(plane + uint32(uint32(b * uint32(high_bits)) + uint32(h)) * uint32(4)), word)

    return put_bytes if format.bits == 8 else put_planes


def repack_kernel(format):
    take, take_scales, put, starts = format.take, format.take_scales, put_function(format), format.starts
    units, per_unit = format.file_bytes // 2, format.file_block // BLOCK

    @cuda.jit
    def repack_blocks(wq, wd, raw, bad, blocks, first, count):
        block = uint32(cuda.blockIdx.x * uint32(THREADS) + cuda.threadIdx.x)
        if block >= count:
            return
        low, high = cuda.local.array(8, uint32), cuda.local.array(8, uint32)
        at = uint32(uint32(block // uint32(per_unit)) * uint32(units))
        j = uint32(block % uint32(per_unit))
        row = uint32(uint32(first + block) // blocks)
        b = uint32(uint32(first + block) - uint32(row * blocks))
        q_to, d_to = starts(row, blocks)
        take(low, high, raw, at, j)
        put(wq, low, high, q_to, blocks, b)
        if not take_scales(wd, raw, at, j, d_to, b):
            bad[uint32(0)] = uint32(1)

    return repack_blocks


# ---- the formats ----------------------------------------------------------------------------------------------------

@dataclass(frozen=True, eq=False)
class Format:
    """A quantised type: its numbers, its NumPy functions and its device functions; see the top of this file."""

    name: str
    number: int  # of the type in a GGUF file
    bits: int  # of a code
    file_block: int  # weights of a block in the file
    file_bytes: int  # its bytes there
    split_blocks: Callable  # uint8 [rows, file_bytes] -> codes, scales
    take: Callable
    take_scales: Callable
    minimum: bool = False  # weights have one, and q no sign
    halves: bool = False  # each half of a block has an integer scale
    table: tuple[int, ...] | None = None  # q of each of the 16 codes, where a code is no number itself

    @cached_property
    def values(self):
        """int8 [2**bits]: q of every code."""
        if self.table:
            return np.array(self.table, np.int8)
        codes = np.arange(2**self.bits)
        return (codes if self.minimum else (codes ^ len(codes) // 2) - len(codes) // 2).astype(np.int8)

    @property
    def place(self):
        """q is unpacked 2**place times as large: at the top of its byte, where it is signed."""
        return 0 if self.minimum or self.table else 8 - self.bits

    @property
    def raw_words(self):
        """Words that `fetch` gives."""
        return self.bits + (1 if self.file_block == BLOCK else 2)

    @property
    def n_scales(self):
        """Words of scales that `unpack` gives."""
        return 1 + self.minimum + 2 * self.halves

    @property
    def wd_words(self):
        """uint16 of scales per block of the file."""
        return 1 if self.file_block == BLOCK else 9 + self.minimum

    @cached_property
    def starts(self):
        return starts_function(self)

    @cached_property
    def fetch(self):
        return fetch_function(self)

    @cached_property
    def unpack(self):
        return unpack_function(self)

    @cached_property
    def dot(self):
        return dot_function(self)

    @cached_property
    def repack_kernel(self):
        return repack_kernel(self)

    def q_row(self, k):
        """Bytes of a row of wq."""
        return -(-k * self.bits // 128) * 16

    def d_row(self, k):
        """uint16 of a row of wd."""
        return k // self.file_block * self.wd_words

    def arrays(self, n, k):
        """((shape, dtype) of wq, (shape, dtype) of wd) of a matrix [n, k]; file_block divides k."""
        return ((n, self.q_row(k)), np.int8 if self.bits == 8 else np.uint8), \
            ((n, self.d_row(k)), np.float16 if self.file_block == BLOCK else np.uint16)


IQ4_VALUES = -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113  # q of IQ4_NL, by code

FORMATS = {format.name: format for format in (
    Format("Q8_0", 8, 8, 32, 34, _split_q8_0, take_q8_0, take_scale),
    Format("Q4_0", 2, 4, 32, 18, _split_q4_0, take_q4_0, take_scale),
    Format("IQ4_NL", 20, 4, 32, 18, _split_iq4_nl, take_iq4_nl, take_scale, table=IQ4_VALUES),
    Format("Q5_0", 6, 5, 32, 22, _split_q5_0, take_q5_0, take_scale),
    Format("Q4_K", 12, 4, 256, 144, _split_q4_k, take_q4_k, take_scales_minima, minimum=True),
    Format("Q5_K", 13, 5, 256, 176, _split_q5_k, take_q5_k, take_scales_minima, minimum=True),
    Format("Q6_K", 14, 6, 256, 210, _split_q6_k, take_q6_k, take_scales_halves, halves=True),
)}

# The other types of GGML, number -> (name, weights per block, bytes per block). The engine does not run them, but it
# refuses a file that has one by the type's name. A type that becomes a Format leaves this list.
OTHER_TYPES = {
    3: ("Q4_1", 32, 20), 7: ("Q5_1", 32, 24), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}
GGML_TYPES = {type.number: (type.name, type.file_block, type.file_bytes)
              for type in (*FLOATS.values(), *FORMATS.values())} | OTHER_TYPES


def as_words(wd):
    """The flat uint16 array that kernels read scales from."""
    return wd.view(np.uint16).reshape(-1)


def repack(card, format, wq, wd, raw, bad, first, k, *, stream=None):
    """Blocks first, first + 1, ... (of the file's size) of the matrix (wq, wd) of rows of k <- raw, uint8, whole blocks
    as in the file. bad uint32 [1] becomes 1 where a float16 scale is not finite. Never allocates."""
    per_unit = format.file_block // BLOCK
    count = raw.size // format.file_bytes * per_unit
    card.launch(format.repack_kernel, -(-count // THREADS), THREADS, wq.reshape(-1), as_words(wd), as_words(raw), bad,
                k // BLOCK, first * per_unit, count, stream=stream)


# ---- check and time ----------------------------------------------------------------------------------------

def random_raw(rng, format, n, k):
    """A matrix [n, k] as in a file, uint8 [blocks, bytes]: random bits, finite scales of either sign."""
    n_blocks = n * k // format.file_block
    raw = rng.integers(0, 256, (n_blocks, format.file_bytes), np.uint8)
    scales = (rng.standard_normal((n_blocks, 2)) / 1000).astype(np.float16).view(np.uint8)
    places = scale_places(format)
    raw[:, places.start:places.stop] = scales[:, :len(places)]
    return raw


def scale_places(format):
    """The bytes of a file's block where its float16 scales are."""
    start = format.file_bytes - 2 if format.halves else 0
    return range(start, start + 2 + 2 * format.minimum)


def on_card(card, format, raw, n, k):
    """(wq, wd) of the matrix [n, k] with these bytes in a file."""
    wq, wd = (card.alloc(*array) for array in format.arrays(n, k))
    repack(card, format, wq, wd, card.upload(raw), card.zeros(1, np.uint32), 0, k)
    card.synchronize()      # a product may read its weights before the launch in front of it has ended
    return wq, wd


def check_repack(card, format, n, k):
    """Repacks random blocks in two pieces; the bits must be the reference's, and a bad scale must be seen."""
    raw = random_raw(np.random.default_rng(n), format, n, k)
    wq, wd = (card.alloc((rows + 1, width), dtype) for (rows, width), dtype in format.arrays(n, k))
    bad, cut = card.zeros(1, np.uint32), len(raw) // 3
    card.poison(wq), card.poison(wd)
    for first, part in ((cut, raw[cut:]), (0, raw[:cut])):
        if len(part):
            repack(card, format, wq[:n], wd[:n], card.upload(part), bad, first, k)
    codes, want_wd = split(format, raw)
    want_wq, used = pack(format, codes, n), k * format.bits // 8  # what follows in a row stays as it was
    got_wq, got_wd = card.download(wq).view(np.uint8), card.download(wd).view(np.uint16)
    np.testing.assert_array_equal(got_wq[:n, :used], want_wq[:, :used])
    np.testing.assert_array_equal(got_wd[:n].reshape(-1), want_wd)
    assert (got_wq[n] == 255).all() and (got_wd[n] == 65535).all(), "wrote past the end"
    assert card.download(bad)[0] == 0
    for place in scale_places(format)[::2]:
        for value in (np.inf, -np.inf, np.nan):
            wrong = raw.copy()
            wrong[-1, place:place + 2] = np.array([value], np.float16).view(np.uint8)
            card.fill(bad, 0)
            repack(card, format, wq[:n], wd[:n], card.upload(wrong), bad, 0, k)
            assert card.download(bad)[0] == 1, f"did not see {value}"
    return 0.0


SHAPES = [(1, 1), (5, 3), (33, 2)]  # rows, blocks of the file in one


def cases(card):
    """The checks, then the time of a matrix of 16 M weights."""
    for format in FORMATS.values():
        for n, blocks in SHAPES:
            k = blocks * format.file_block
            yield Case(f"{n} x {k} of {format.name}", partial(check_repack, card, format, n, k))
    n = k = 4096
    for format in FORMATS.values():
        wq, wd = (card.alloc(*array) for array in format.arrays(n, k))
        raw, bad = card.zeros(n * k // format.file_block * format.file_bytes, np.uint8), card.zeros(1, np.uint32)
        yield Case(f"time of {n} x {k} of {format.name}", n_bytes=raw.nbytes + wq.nbytes + wd.nbytes,
                   launch=partial(repack, card, format, wq, wd, raw, bad, 0, k))


if __name__ == "__main__":
    main("Formats of weights", cases)
