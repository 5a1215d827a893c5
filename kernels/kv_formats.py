"""KV formats: how keys and values lie in the pages of the KV cache, and how kernels write and read them.

A page holds the keys, or the values, of 64 consecutive tokens of a sequence, for all KV heads of a layer. Whatever the
format, a page of one head is 64 rows, one after the other, a row for each token:

    [n_pages, n_kv_heads, 64, elements of a row]

`KV_FORMATS` holds the formats by name. Each has one kind of rows (`Rows`) for its keys and one for its values:

    name       keys, values      bytes of both, for a head of 256
    float16    halves            1,024
    q8         8 bits            520        one scale for each 128 dims
    q8+4       8 and 4 bits      392
    q8+3       8 and 3 bits      360
    q4         4 bits            264
    q3         3 bits            200

The cache asks a format for the arrays of a layer, plans and the bench for bytes, the kernels for its device functions,
tests and notebooks for the NumPy twins. Three kernels are made for a format: kernels/kv_cache.py stores prompts,
kernels/kv_expand.py makes halves of them for kernels/attention.py, kernels/attend_decode.py does both for decoded
tokens.

To add a format: write its Rows in a section of their own, and add a line to `KV_FORMATS`. Tests are parametrised over
it. `expand` gives 8 dims as 4 words of two halves; kernels/attend_codes.py multiplies keys of 8 bits as integers.
Scales of a row belong into the row, so that a layer has two arrays in every format, one of keys and one of values.

**Rows of few bits** hold keys and values turned by kernels/hadamard.py: attention turns its queries, too, and turns its
output back. Each 128 dims have a scale t, a half. A code n of b bits stands for

    b = 8:       n t                               n = -127 .. 127
    b = 4, 3:    (n + 1/2 - 2^(b-1)) t / 2^b       n = 0 .. 2^b - 1: levels on both sides of zero, none at zero

    row, 32-bit words:    | codes of dims 0 .. 7 | codes of dims 8 .. 15 | .. | scales of dims 0 .. and 128 .. |
                            b bytes                                             a word

Codes of 8 dims, p = 0 .. 3: for 4 bits, dim 2 p begins at bit 4 p of a word and dim 2 p + 1 at bit 16 + 4 p; for 3
bits, in 24 bits, at bits 3 p and 12 + 3 p. So a shift puts a pair into two halves. For 8 bits a dim has a byte, in
order, but the words of dims 8 i .. 8 i + 3 come first and those of dims 8 i + 4 .. 8 i + 7 behind them all, so that
the lanes of a warp load neighbouring words.

For 8 bits the outermost level is the largest magnitude of the 128 dims. For 4 and 3 bits it pays to clip: the outermost
level is 0.87 and 0.75 of the largest, and then the scale is the one with the least squared error for these codes.
Measurements, also of levels and scales that were not taken: benchmarks/results.md, section kv_formats.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.cuda import libdevice
from numba.types import float16, float32, int32, uint32, uint64

from kernels.hadamard import BLOCK, EVERY_LANE, ROOT, turn, turn_back_reference, turn_reference
from kernels.intrinsics import (BIAS_FLOAT, BIAS_WORD, div_rn, float_as_word, float_max,
                                float_min, hadd2, half_bits, hfma2, hmul2, load_shared, load_shared4, load_word,
                                load_words4, prmt, warp_max, warp_sum)
from kernels.limits import FLOAT16
from kernels.rope import store_function

PAGE = 64  # tokens


class RowFunctions(NamedTuple):
    """Device functions for heads of one width. chunk c is the dims 8 c .. 8 c + 7 of a row.

    load(raw, pages, at, c, i)   what `expand` needs of a chunk of the row at element `at` of the pages, as element
                                 n_raw i and on of the local array `raw` of words
    expand(raw, i, c)            of that, the dims as 4 words of two halves; None: `load` gives these words
    load_shared(address, c)      4 such words of a row in shared memory
    pack(x, lane)                what a warp stores of a head; x: the lane's values as a tuple (kernels/rope.py)
    write(out, at, lane, packed) a warp writes the row at element `at` of a global or shared array

    Of rows in 8 bits also, for products of integers:

    load_codes(pages, at, c)        the codes of a chunk as 2 words, of the row at element `at` of the pages
    load_shared_codes(address, c)   the same of a row in shared memory
    scales                          element of a row: the word with its scales
    """

    n_raw: int
    load: Callable
    expand: Callable | None
    load_shared: Callable
    pack: Callable
    write: Callable
    load_codes: Callable | None = None
    load_shared_codes: Callable | None = None
    scales: int = 0


@dataclass(frozen=True, eq=False)
class Rows:
    """One kind of rows. NumPy twins of the device functions:

    encode(x)        float [..., head_dim] -> rows as `write` leaves them, [..., elements of a row]
    decode(rows)     rows -> float16 [..., head_dim] as `expand` gives them, turned if the rows are
    """

    name: str
    dtype: type                 # of an element: NumPy's
    element: object             # and Numba's
    turned: bool                # by kernels/hadamard.py
    row: Callable               # row(head_dim): elements of a row
    functions: Callable         # functions(head_dim): RowFunctions
    encode: Callable
    decode: Callable
    by_codes: bool              # whether scores of decoded tokens are products of codes (kernels/attend_codes.py)
    tolerance: float            # of a stored value: the largest error of encode and decode, relative to the row's |max|
    error: float                # relative L2 error of random rows from a Gaussian, at most

    @property
    def expands(self) -> bool:
        """Whether the rows are anything else than halves."""
        return self is not HALVES


@dataclass(frozen=True, eq=False)
class KVFormat:
    """Rows of keys and of values: both are HALVES, or both are of few bits."""

    name: str
    keys: Rows
    values: Rows

    def __str__(self) -> str:
        return self.name

    @property
    def element(self):
        return self.keys.element

    @property
    def turned(self) -> bool:
        return self.keys.turned

    @property
    def expands(self) -> bool:
        """Whether rows are anything else than halves."""
        return self.keys.expands

    @property
    def kinds(self) -> dict[str, Rows]:
        """The two arrays of a layer: name -> Rows."""
        return {"keys": self.keys, "values": self.values}

    def functions(self, head_dim) -> tuple[RowFunctions, RowFunctions]:
        """Of keys and of values."""
        return self.keys.functions(head_dim), self.values.functions(head_dim)

    def arrays(self, n_pages, n_kv_heads, head_dim):
        """name -> (shape, dtype) of the arrays of a layer."""
        return {name: ((n_pages, n_kv_heads, PAGE, rows.row(head_dim)), rows.dtype) for name, rows in
                self.kinds.items()}

    def token_bytes(self, n_kv_heads, head_dim):
        """Bytes of a token's keys and values in a layer."""
        return n_kv_heads * sum(rows.row(head_dim) * np.dtype(rows.dtype).itemsize for rows in self.kinds.values())

    def page_bytes(self, n_kv_heads, head_dim):
        """Bytes of a page's keys and values in a layer."""
        return PAGE * self.token_bytes(n_kv_heads, head_dim)


def turned(kind, x):
    """Float64 [..., head_dim] as these Rows, or the rows of this KVFormat, would store it without rounding."""
    x = np.asarray(x, np.float64)
    return turn_reference(x) * ROOT if kind.turned else x


def turned_back(kind, x):
    """The values that `decode` gives, or sums of such, as they were before they were turned: float64."""
    return turn_back_reference(x) if kind.turned else np.asarray(x, np.float64)


# ---- halves ------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def _load_halves(raw, pages, at, chunk, i):
    n = uint32(uint32(4) * i)
    at = uint64(at + uint64(uint32(chunk * uint32(8))))
    raw[n], raw[n + uint32(1)], raw[n + uint32(2)], raw[n + uint32(3)] = load_words4(pages, at)


@cuda.jit(device=True, forceinline=True)
def _load_shared_halves(address, chunk):
    return load_shared4(address + uint64(uint32(chunk * uint32(16))))


@cuda.jit(device=True, forceinline=True)
def _as_it_is(x, lane):
    return x


def _to_half(x):
    return np.asarray(x).astype(np.float16)


@cache
def _half_functions(head_dim):
    return RowFunctions(4, _load_halves, None, _load_shared_halves, _as_it_is, store_function(head_dim))


HALVES = Rows("halves", np.float16, float16, False, lambda head_dim: head_dim, _half_functions, _to_half, _to_half,
              by_codes=False, tolerance=2.0 ** -11, error=2.0 ** -12)


# ---- few bits ----------------------------------------------------------------------------------------------

OUTERMOST = {8: 1.0, 4: 0.87, 3: 0.75}      # level, of the largest magnitude


class Code(NamedTuple):
    """Codes of so many bits; a code is the place of a level among the odd multiples of half a step, or, with 8 bits,
    among the multiples of a step."""

    bits: int

    @property
    def limit(self):
        """The outermost level, in steps."""
        return 127.0 if self.bits == 8 else 2 ** (self.bits - 1) - 0.5

    @property
    def offset(self):
        """From a level, in steps, to its code."""
        return 0.0 if self.bits == 8 else self.limit

    @property
    def step(self):
        """A step as a factor of the largest magnitude."""
        return OUTERMOST[self.bits] / self.limit

    @property
    def scale(self):
        """What is stored, as a factor of a step of the values that `turn` gives."""
        return ROOT if self.bits == 8 else 2 ** self.bits * ROOT

    @property
    def place(self):
        """The bit of a half where a code begins. With 1 before it, the half is 1 + code / 2^bits."""
        return 10 - self.bits

    @property
    def middle(self):
        """The half that stands for the level 0."""
        return 1152.0 if self.bits == 8 else 1 + self.limit / 2 ** self.bits

    def words(self, head_dim):
        """Words of codes in a row."""
        return head_dim * self.bits // 32

    def row(self, head_dim):
        return self.words(head_dim) + 1

    def starts(self):
        """The bit where the code of each dim of a lot begins: 8 dims, or, with 8 bits, the 4 of a word."""
        if self.bits == 8:
            return np.arange(0, 32, 8)
        far = 16 if self.bits == 4 else 12
        return np.stack([self.bits * np.arange(4), far + self.bits * np.arange(4)], axis=1).reshape(8)


def _both(x):
    """The word of two halves x."""
    return int(np.float16(x).view(np.uint16)) * 0x10001


@cache
def _quantizer(bits):
    """quantize(x, lane): of 128 dims, of which the lane has x, as `turn` takes them: (the lane's 4 codes, scale as
    16 bits)."""
    code = Code(bits)
    limit, offset, step_of_max, scale_of_step = code.limit, code.offset, code.step, code.scale

    @cuda.jit(device=True, forceinline=True)
    def level(x, inverse):
        x = float_min(float_max(x * inverse, float32(-limit)), float32(limit))
        return (x + float32(offset)) + float32(BIAS_FLOAT)

    @cuda.jit(device=True, forceinline=True)
    def product(biased, x):
        return libdevice.fmul_rn((biased - float32(BIAS_FLOAT)) - float32(offset), x)

    @cuda.jit(device=True, forceinline=True)
    def square(biased):
        y = (biased - float32(BIAS_FLOAT)) - float32(offset)
        return libdevice.fmul_rn(y, y)

    @cuda.jit(device=True, forceinline=True)
    def as_code(biased):
        return uint32(float_as_word(biased) - uint32(BIAS_WORD))

    @cuda.jit(device=True, forceinline=True)
    def quantize(x, lane):
        x = turn(x, lane)
        largest = warp_max(float_max(float_max(abs(x[0]), abs(x[1])), float_max(abs(x[2]), abs(x[3]))))
        step = libdevice.fmul_rn(largest, float32(step_of_max))
        inverse = div_rn(float32(1.0), step) if step != float32(0.0) else float32(0.0)
        b0, b1, b2, b3 = level(x[0], inverse), level(x[1], inverse), level(x[2], inverse), level(x[3], inverse)
        if bits != 8:
            along = warp_sum((product(b0, x[0]) + product(b1, x[1])) + (product(b2, x[2]) + product(b3, x[3])))
            step = div_rn(along, warp_sum((square(b0) + square(b1)) + (square(b2) + square(b3))))
        scale = half_bits(libdevice.fmul_rn(step, float32(scale_of_step)))
        return as_code(b0), as_code(b1), as_code(b2), as_code(b3), uint32(scale)

    return quantize


@cuda.jit(device=True, forceinline=True)
def _either_lane(word, distance):
    return uint32(word | uint32(cuda.shfl_xor_sync(EVERY_LANE, int32(word), distance)))


@cache
def _packer(bits):
    """pack(x, lane): of 128 dims: (the word of codes that the lane writes, scale as 16 bits). Lane 8 i + j, or 4 i + j
    with 8 bits, has word i of those of the dims 32 j .. 32 j + 31."""
    quantize = _quantizer(bits)

    @cuda.jit(device=True, forceinline=True)
    def place_of(lane):
        if bits == 8:
            return uint32(uint32(lane & uint32(3)) * uint32(8))
        pair = uint32(uint32(uint32(lane >> uint32(1)) & uint32(3)) * uint32(bits))
        return uint32(pair + uint32(lane & uint32(1)) * uint32(16 if bits == 4 else 12))

    @cuda.jit(device=True, forceinline=True)
    def gather(code, place):
        word = uint32(uint32(code & uint32(2 ** bits - 1)) << place)
        word = _either_lane(_either_lane(word, 1), 2)
        return word if bits == 8 else _either_lane(word, 4)

    @cuda.jit(device=True, forceinline=True)
    def pack(x, lane):
        c0, c1, c2, c3, scale = quantize(x, lane)
        place = place_of(lane)
        w0, w1, w2, w3 = gather(c0, place), gather(c1, place), gather(c2, place), gather(c3, place)
        w0 = w1 if (lane & uint32(1)) != uint32(0) else w0
        w2 = w3 if (lane & uint32(1)) != uint32(0) else w2
        word = w2 if (lane & uint32(2)) != uint32(0) else w0
        if bits == 3:       # four lots of 24 bits to three words
            after = uint32(cuda.shfl_down_sync(EVERY_LANE, int32(word), 8))
            shift = uint32(uint32(lane >> uint32(3)) * uint32(8))
            word = uint32(uint32(word >> shift) | uint32(after << uint32(uint32(24) - shift)))
        return word, scale

    return pack


@cache
def _expander(bits):
    """halves(w0, w1, t): 8 dims as 4 words of two halves. w0, w1: words of codes, as `_reader` has them; t: the scale
    in both halves."""
    code = Code(bits)
    place, ones, middle = code.place, _both(1.0), _both(-code.middle)
    mask = (2 ** bits - 1) * 0x10001 << place if bits != 8 else 0

    @cuda.jit(device=True, forceinline=True)
    def of_bytes(w0, w1, t):
        w0, w1 = uint32(w0 ^ uint32(0x80808080)), uint32(w1 ^ uint32(0x80808080))
        x0, x1 = prmt(w0, uint32(0x64646464), uint32(0x4140)), prmt(w0, uint32(0x64646464), uint32(0x4342))
        x2, x3 = prmt(w1, uint32(0x64646464), uint32(0x4140)), prmt(w1, uint32(0x64646464), uint32(0x4342))
        m = uint32(middle)      # a byte n + 128 behind 0x64 is the half 1152 + n
        return hmul2(hadd2(x0, m), t), hmul2(hadd2(x1, m), t), hmul2(hadd2(x2, m), t), hmul2(hadd2(x3, m), t)

    @cuda.jit(device=True, forceinline=True)
    def of_pair(w, t, m):
        # LOP3 does both for one constant in a register. threadIdx.z is 0, but the assembler does not know that.
        in_register = uint32(uint32(ones) + uint32(cuda.threadIdx.z))
        return hfma2(uint32(uint32(w & uint32(mask)) | in_register), t, m)

    @cuda.jit(device=True, forceinline=True)
    def of_nibbles(w0, w1, t):
        m = hmul2(t, uint32(middle))
        return (of_pair(uint32(w0 << uint32(6)), t, m), of_pair(uint32(w0 << uint32(2)), t, m),
                of_pair(uint32(w0 >> uint32(2)), t, m), of_pair(uint32(w0 >> uint32(6)), t, m))

    @cuda.jit(device=True, forceinline=True)
    def of_three_bits(w0, w1, t):
        m = hmul2(t, uint32(middle))
        w = prmt(w0, uint32(w0 << uint32(4)), uint32(0x7610))       # the low half of one, the high half of the other
        return (of_pair(uint32(w << uint32(6)), t, m), of_pair(uint32(w << uint32(3)), t, m), of_pair(w, t, m),
                of_pair(uint32(w >> uint32(3)), t, m))

    return {8: of_bytes, 4: of_nibbles, 3: of_three_bits}[bits]


@cuda.jit(device=True, forceinline=True)
def _three_bytes(w0, w1, chunk):
    """The 24 bits of a chunk as bits 1 .. 24, from the words where they begin and end. The other bits are any."""
    begin = uint32(uint32(uint32(chunk * uint32(3)) & uint32(3)) * uint32(8))
    shift = uint32(uint32(uint32(33) - begin) & uint32(31))     # a chunk from bit 0 or 8 on lies in one word, w0 = w1
    return uint32(uint64(uint64(uint64(uint64(w1) << uint64(32)) | uint64(w0)) << uint64(shift)) >> uint64(32))


@cache
def _code_functions(bits, head_dim):
    code = Code(bits)
    n_words, halves, pack = code.words(head_dim), _expander(bits), _packer(bits)
    n_raw = 2 if bits == 4 else 3                                       # words that a chunk takes: scales and codes
    lots = 4 if bits == 8 else 8                                        # lanes that share a word of codes
    block_words = BLOCK // 8 if bits == 8 else code.words(BLOCK)        # words from one block to the next

    @cuda.jit(device=True, forceinline=True)
    def word_of(chunk, part):
        """The first and the last word of a chunk."""
        if bits == 3:
            return uint32(uint32(uint32(chunk * uint32(3)) + uint32(part * uint32(2))) >> uint32(2))
        return uint32(chunk + uint32(part * uint32(head_dim // 8 if bits == 8 else 0)))

    @cuda.jit(device=True, forceinline=True)
    def load(raw, pages, at, chunk, i):
        n = uint32(uint32(n_raw) * i)
        raw[n] = load_word(pages, uint64(at + uint64(n_words)))
        raw[n + uint32(1)] = load_word(pages, uint64(at + uint64(word_of(chunk, uint32(0)))))
        if bits != 4:
            raw[n + uint32(2)] = load_word(pages, uint64(at + uint64(word_of(chunk, uint32(1)))))

    @cuda.jit(device=True, forceinline=True)
    def halves_of(w0, w1, scales, chunk):
        t = prmt(scales, uint32(0), uint32(0x3232) if chunk >= uint32(BLOCK // 8) else uint32(0x1010))
        if bits == 3:
            w0 = _three_bytes(w0, w1, chunk)
        return halves(w0, w1, t)

    @cuda.jit(device=True, forceinline=True)
    def expand(raw, i, chunk):
        n = uint32(uint32(n_raw) * i)
        return halves_of(raw[n + uint32(1)], raw[uint32(n + uint32(n_raw - 1))], raw[n], chunk)

    @cuda.jit(device=True, forceinline=True)
    def load_codes(pages, at, chunk):
        return (load_word(pages, uint64(at + uint64(word_of(chunk, uint32(0))))),
                load_word(pages, uint64(at + uint64(word_of(chunk, uint32(1))))))

    @cuda.jit(device=True, forceinline=True)
    def load_shared_codes(address, chunk):
        return (load_shared(address + uint64(uint32(word_of(chunk, uint32(0)) * uint32(4)))),
                load_shared(address + uint64(uint32(word_of(chunk, uint32(1)) * uint32(4)))))

    @cuda.jit(device=True, forceinline=True)
    def load_shared_row(address, chunk):
        w0, w1 = load_shared_codes(address, chunk)
        return halves_of(w0, w1, load_shared(address + uint64(4 * n_words)), chunk)

    @cuda.jit(device=True, forceinline=True)
    def pack_128(x, lane):
        return pack(x, lane)

    @cuda.jit(device=True, forceinline=True)
    def pack_256(x, lane):
        first, second = pack(x[:4], lane), pack(x[4:], lane)
        return first[0], second[0], uint32(first[1] | uint32(second[1] << uint32(16)))

    @cuda.jit(device=True, forceinline=True)
    def write(out, at, lane, packed):
        group, i = uint32(lane & uint32(lots - 1)), uint32(lane // uint32(lots))
        if group < uint32(4) and i < uint32(bits):
            word = uint32(uint32(group * uint32(bits)) + i)
            if bits == 8:
                word = uint32(uint32(word >> uint32(1)) + uint32(uint32(word & uint32(1)) * uint32(head_dim // 8)))
            out[at + word] = packed[0]
            if head_dim == 2 * BLOCK:
                out[at + uint32(word + uint32(block_words))] = packed[1]
        if lane == uint32(0):
            out[at + uint32(n_words)] = packed[-1]

    found = RowFunctions(n_raw, load, expand, load_shared_row, pack_256 if head_dim == 2 * BLOCK else pack_128, write)
    if bits == 8:
        return found._replace(load_codes=load_codes, load_shared_codes=load_shared_codes, scales=n_words)
    return found


def _warp_sum(x):
    """Of [..., 32], in the order of kernels/intrinsics.py's `warp_sum`: [..., 1]."""
    for offset in (16, 8, 4, 2, 1):
        x = x + x[..., np.arange(32) ^ offset]
    return x[..., :1]


def _encode(bits, x):
    """The NumPy twin of `pack` and `write`."""
    code, x = Code(bits), np.asarray(x).astype(np.float32)
    with np.errstate(all="ignore"):
        y = turn_reference(x).reshape(*x.shape[:-1], -1, 4, 32)     # [..., block, part, lane]
        step = np.abs(y).max(axis=(-2, -1), keepdims=True) * np.float32(code.step)
        inverse = np.where(step != 0, np.float32(1) / step, np.float32(0))
        level = np.fmin(np.fmax(y * inverse, np.float32(-code.limit)), np.float32(code.limit))
        codes = np.rint(level + np.float32(code.offset))
        if bits != 8:
            level = codes - np.float32(code.offset)
            along, square = level * y, level * level
            by_lane = [(z[..., 0, :] + z[..., 1, :]) + (z[..., 2, :] + z[..., 3, :]) for z in (along, square)]
            step = (_warp_sum(by_lane[0]) / _warp_sum(by_lane[1]))[..., None]
        scales = (step * np.float32(code.scale)).astype(np.float16)
    codes = codes.astype(np.int32).astype(np.uint32) & np.uint32(2 ** bits - 1)
    starts = code.starts()
    lots = np.bitwise_or.reduce(codes.reshape(*x.shape[:-1], -1, len(starts)) << starts.astype(np.uint32), axis=-1)
    if bits == 3:
        lots = np.ascontiguousarray(lots.astype("<u4")[..., None].view(np.uint8)[..., :3])
    else:
        lots = lots.astype("<u4")
    if bits == 8:       # first words of all chunks, then second words
        lots = np.ascontiguousarray(np.moveaxis(lots.reshape(*x.shape[:-1], -1, 2), -1, -2))
    found = np.zeros((*x.shape[:-1], code.row(x.shape[-1])), np.uint32)
    n = code.words(x.shape[-1])
    found[..., :n] = lots.reshape(*x.shape[:-1], -1).view("<u4")
    found[..., n:n + 1] = _padded(scales.reshape(*x.shape[:-1], -1)).view("<u4")
    return found


def _padded(scales):
    """Scales of a row, one or two, as two halves."""
    return np.ascontiguousarray(np.concatenate([scales, np.zeros_like(scales)], axis=-1)[..., :2])


def _decode(bits, rows):
    """The NumPy twin of `expand`."""
    code = Code(bits)
    n = {code.row(head_dim): code.words(head_dim) for head_dim in (128, 256)}[rows.shape[-1]]
    held = np.ascontiguousarray(rows[..., :n]).view(np.uint8)
    scales = np.ascontiguousarray(rows[..., n:n + 1]).view(np.float16)[..., :n * 32 // bits // BLOCK]
    t = np.repeat(scales, BLOCK, axis=-1)
    with np.errstate(all="ignore"):
        if bits == 8:
            words = np.moveaxis(held.view("<u4").reshape(*rows.shape[:-1], 2, -1), -2, -1)
            return np.ascontiguousarray(words).view(np.int8).reshape(t.shape).astype(np.float16) * t
        lots = held.reshape(*rows.shape[:-1], -1, bits).astype(np.uint32)
        lots = np.bitwise_or.reduce(lots << (8 * np.arange(bits, dtype=np.uint32)), axis=-1)
        codes = (lots[..., None] >> code.starts().astype(np.uint32)) & np.uint32(2 ** bits - 1)
        one = 1 + codes.reshape(t.shape) / 2.0 ** bits              # exact in halves, products and sums in doubles
        return (one * t + (t * np.float16(-code.middle)).astype(np.float64)).astype(np.float16)


def _few_bits(bits, tolerance, error):
    code = Code(bits)
    return Rows(f"{bits} bits", np.uint32, uint32, True, code.row, lambda head_dim: _code_functions(bits, head_dim),
                lambda x: _encode(bits, x), lambda rows: _decode(bits, rows), bits == 8, tolerance, error)


# Tolerance: with 8 bits half a step, 1/254, and roundings to halves; with fewer what is clipped, 0.13 and 0.25, and
# what the largest loses by a scale that fits the others. Error of 4 and 3 bits: that of the best equal steps for a
# Gaussian of known width (J. Max, 1960), since a scale for each 128 dims does better.
Q8 = _few_bits(8, tolerance=0.005, error=0.007)
Q4 = _few_bits(4, tolerance=0.2, error=0.1075)
Q3 = _few_bits(3, tolerance=0.35, error=0.1935)


# ---- the formats -------------------------------------------------------------------------------------------

KV_FORMATS = {format.name: format for format in (
    KVFormat(FLOAT16, HALVES, HALVES), KVFormat("q8", Q8, Q8), KVFormat("q8+4", Q8, Q4),
    KVFormat("q8+3", Q8, Q3), KVFormat("q4", Q4, Q4), KVFormat("q3", Q3, Q3))}
