"""What all formats of quantised weights share: how blocks of 32 weights lie on a card, how a kernel repacks and loads
them, and the reference of their values. The families are in the other files of this folder.

On the card a matrix [n, k] is two arrays with a line for each of its rows. A row of `wq` is made of planes. A plane has
so many bytes of each block, so that neighbouring lanes load neighbouring bytes:

    planes (16, 4)      [k / 32][16] bytes, then [k / 32][4] bytes, then padding to 16 bytes        uint8 [n, q_row(k)]

A row of `wd` has the scales: a header of wd_words uint16 for each block of the file. If a format has numbers that a
whole row shares (`row_head`), they stand in front of the first header.
"""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numba import cuda
from numba.types import uint16, uint32, uint64

from kernels.formats.floats import EXPONENT
from kernels.intrinsics import (load_word, load_words2, load_words4, store_word, store_words2, store_words4,
                                stream_word, stream_words2, stream_words4)

BLOCK = 32  # weights, or activations, that share a scale
THREADS = 128

# A weight is scale * (integer * q) - minimum. q: int [n_blocks, 32]. integers: int [n_blocks, 2], one for each half of
# a block, or None. scale float32 [n_blocks, 1 or 2], minimum float32 [n_blocks, 0, 1 or 2]: of the block, or of its
# halves.
Terms = namedtuple("Terms", "q integers scale minimum")

# How kernels/synthetic.py makes the header of a block of the file: `integers` words ((random & mask) | base) * factor,
# whose integer scales are `mean` on average; then floats as the format stores them: d, and where weights have a
# minimum, `second` times d times the mean of q. codes: of random bits; "all", "sevens" (7 of 8 bits) or "ternary" (1
# where two bits are set).
Random = namedtuple("Random", "integers base mask factor mean second codes",
                    defaults=(0, 0, 0, 1, 1.0, 1.0, "all"))


# ---- how float scales are stored ---------------------------------------------------------------------------------

class HalfScales:
    """float16 at some bytes of a file's block: d, and dmin or m where there is one."""

    kind = "half"

    def __init__(self, *at):
        self.at = at

    def fill(self, rng, raw):
        """Finite scales of either sign into random blocks, uint8 [blocks, bytes]."""
        self.put(raw, rng.standard_normal((len(raw), 2))[:, :len(self.at)] / 1000)

    def put(self, raw, scales):
        """scales: [blocks, len(at)], or 1 for the same everywhere."""
        scales = np.broadcast_to(scales, (len(raw), len(self.at))).astype(np.float16)
        for i, at in enumerate(self.at):
            raw[:, at:at + 2] = np.ascontiguousarray(scales[:, i:i + 1]).view(np.uint8)

    def bad(self):
        """Yields (place, bytes) of scales that are no finite numbers."""
        for at in self.at:
            for value in (np.inf, -np.inf, np.nan):
                yield at, np.array([value], np.float16).view(np.uint8)


@cuda.jit(device=True, forceinline=True)
def is_finite(half):
    return uint32(uint32(half) & uint32(EXPONENT)) != uint32(EXPONENT)


# ---- the file's bytes ----------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def word_at(raw, at):
    """4 bytes from two 16-bit units: a file's blocks are not aligned to words."""
    return uint32(uint32(raw[at]) | uint32(uint32(raw[uint32(at + uint32(1))]) << uint32(16)))


@cuda.jit(device=True, forceinline=True)
def byte_at(raw, at, i):
    """Byte i after raw[at], in 16-bit units."""
    pair = uint32(raw[uint32(at + uint32(i >> uint32(1)))])
    return uint32(pair >> uint32(uint32(i & uint32(1)) << uint32(3))) & uint32(0xFF)


# ---- planes --------------------------------------------------------------------------------------------------------

LOADS = load_word, load_words2, load_words4
STREAMS = stream_word, stream_words2, stream_words4  # past the L1 cache


def fetch_planes_function(planes, loads, before=0):
    """fetch_planes(raw, wq, q_from, blocks, b): the words of block b of a row at wq[q_from], plane after plane."""
    if not planes:
        return no_plane
    load1, load2, load4 = loads
    size, word, rest = planes[0], before // 4, fetch_planes_function(planes[1:], loads, before + planes[0])

    @cuda.jit(device=True, forceinline=True)
    def fetch_planes(raw, wq, q_from, blocks, b):
        at = uint32(q_from + uint32(blocks * uint32(before)) + uint32(b * uint32(size)))
        if size == 32:
            raw[word], raw[word + 1], raw[word + 2], raw[word + 3] = load4(wq, at)
            raw[word + 4], raw[word + 5], raw[word + 6], raw[word + 7] = load4(wq, uint32(at + uint32(16)))
        if size == 16:
            raw[word], raw[word + 1], raw[word + 2], raw[word + 3] = load4(wq, at)
        if size == 8:
            raw[word], raw[word + 1] = load2(wq, at)
        if size == 4:
            raw[word] = load1(wq, at)
        rest(raw, wq, q_from, blocks, b)

    return fetch_planes


def store_planes_function(planes, before=0):
    """store_planes(wq, words, to, blocks, b): the same words into block b of a row at wq[to]."""
    if not planes:
        return no_plane
    size, word, rest = planes[0], before // 4, store_planes_function(planes[1:], before + planes[0])

    @cuda.jit(device=True, forceinline=True)
    def store_planes(wq, words, to, blocks, b):
        at = uint32(to + uint32(blocks * uint32(before)) + uint32(b * uint32(size)))
        if size >= 16:
            store_words4(wq, at, words[word], words[word + 1], words[word + 2], words[word + 3])
        if size == 32:
            store_words4(wq, uint32(at + uint32(16)), words[word + 4], words[word + 5], words[word + 6],
                         words[word + 7])
        if size == 8:
            store_words2(wq, at, words[word], words[word + 1])
        if size == 4:
            store_word(wq, at, words[word])
        rest(wq, words, to, blocks, b)

    return store_planes


@cuda.jit(device=True, forceinline=True)
def no_plane(words, wq, to, blocks, b):
    pass


@cuda.jit(device=True, forceinline=True)
def no_book(thread, threads):
    return uint64(0)


# ---- a format ------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, eq=False)
class Format:
    """A quantised type: its numbers, its NumPy functions and its device functions. All device functions see one block
    of 32 weights.

    split_blocks(blocks), NumPy: uint8 [rows, file_bytes] -> (uint8 [blocks of 32, bytes], uint16 [rows, wd_words]): the
        planes' bytes of each block, and the headers, as on the card.
    terms(blocks), NumPy: -> Terms.
    take(words, raw, at, j): the planes' words of block j of the file's block at raw[at]. raw: uint16, or uint8 where
        file_bytes is odd.
    take_scales(wd, raw, at, j, to, b): writes the scales of the same block, which is block b of the row that starts at
        wd[to]; returns whether they are finite. Block 0 of a file's block writes what all of its blocks share, block 0
        of a row its row_head.
    fetch_scales(raw, at, wd, d_from, b): the loads of what block b needs of a row's scales, which start at wd[d_from],
        into raw[at], raw[at + 1], ...: scale_words of them.
    unpack(w, scales, raw, book): raw, the planes' words and behind them the scales' -> w uint32 [8], int8 in order of
        k, and scales uint32 [n_scales]: float scales, integer scales, negated minima; float32 bits or int32.
    load_book(thread, threads): all threads of a block of threads call it once, before any of them unpacks. It brings a
        code book to shared memory and waits for it, or words of a table to registers; what it returns is the `book` of
        `unpack`.
    """

    name: str
    number: int  # of the type in a GGUF file
    file_block: int  # weights of a block in the file
    file_bytes: int  # its bytes there
    planes: tuple[int, ...]  # bytes of a block in each plane of wq: 32, 16, 8 or 4, the largest first
    wd_words: int  # uint16 of scales per block of the file
    split_blocks: Callable
    terms: Callable
    take: Callable
    take_scales: Callable
    fetch_scales: Callable
    unpack: Callable
    values: np.ndarray  # q of all codes, each as likely as the others where codes are random
    scale_words: int = 1
    float_scales: int = 1  # 2: each half of a block has its own
    halves: bool = False  # each half of a block has an integer scale beside the float one
    minima: int = 0  # 1: a block has a minimum; 2: each half has one
    scales: object = HalfScales(0)
    random: Random = Random()
    wd_type: type = np.uint16
    row_head: tuple[int, ...] = ()  # uint16 in front of a row's headers: a float32 for a row whose factor is 1
    in_order: bool = False  # codes of 4 bits lie in order in their plane (kernels/formats/codes.py)
    table: bool = False  # `unpack` holds a table in registers
    load_book: Callable = no_book
    book_bytes: int = 0  # of shared memory that load_book takes

    @property
    def bits(self):
        """Bits of wq for a weight."""
        return sum(self.planes) * 8 // BLOCK

    @property
    def plane_words(self):
        """Words of the planes for a block."""
        return sum(self.planes) // 4

    @property
    def raw_words(self):
        """Words that `fetch` gives."""
        return self.plane_words + self.scale_words

    @property
    def n_scales(self):
        """Words of scales that `unpack` gives."""
        return self.float_scales + 2 * self.halves + self.minima

    @property
    def terms_per_block(self):
        """Rounded additions to a product for each block."""
        return self.float_scales + self.minima

    @property
    def per_unit(self):
        """Blocks of 32 weights in a block of the file."""
        return self.file_block // BLOCK

    @cached_property
    def starts(self):
        return starts_function(self)

    @cached_property
    def fetch(self):
        return fetch_function(self, LOADS)

    @cached_property
    def stream(self):
        """`fetch` past the L1 cache."""
        return fetch_function(self, STREAMS)

    @cached_property
    def repack_kernel(self):
        return repack_kernel(self)

    def q_row(self, k):
        """Bytes of a row of wq."""
        return -(-k * self.bits // 128) * 16

    def d_row(self, k):
        """uint16 of a row of wd."""
        return len(self.row_head) + k // self.file_block * self.wd_words

    def arrays(self, n, k):
        """((shape, dtype) of wq, (shape, dtype) of wd) of a matrix [n, k]; file_block divides k."""
        return ((n, self.q_row(k)), np.int8 if self.bits == 8 else np.uint8), ((n, self.d_row(k)), self.wd_type)


def fetch_function(format, loads):
    """fetch(raw, wq, wd, q_from, d_from, blocks, b): the global loads of block b of a row that starts at wq[q_from] and
    wd[d_from] and has `blocks` blocks. raw: uint32 [format.raw_words], local."""
    fetch_planes, fetch_scales, scales_at = fetch_planes_function(format.planes, loads), format.fetch_scales, \
        format.plane_words

    @cuda.jit(device=True, forceinline=True)
    def fetch(raw, wq, wd, q_from, d_from, blocks, b):
        fetch_planes(raw, wq, q_from, blocks, b)
        fetch_scales(raw, scales_at, wd, d_from, b)

    return fetch


def starts_function(format):
    """starts(row, blocks): where a row of `blocks` blocks starts, (byte of wq, uint16 of wd)."""
    bits, per_unit, wd_words, head = format.bits, format.per_unit, format.wd_words, len(format.row_head)

    @cuda.jit(device=True, forceinline=True)
    def starts(row, blocks):
        q_row = uint32(uint32(uint32(blocks * uint32(4 * bits)) + uint32(15)) & uint32(0xFFFFFFF0))
        d_row = uint32(uint32(uint32(blocks // uint32(per_unit)) * uint32(wd_words)) + uint32(head))
        return uint32(row * q_row), uint32(row * d_row)

    return starts


def repack_kernel(format):
    """A thread repacks a block of 32: it reads the file's bytes as they are and writes aligned words."""
    take, take_scales, starts = format.take, format.take_scales, format.starts
    put, plane_words = store_planes_function(format.planes), format.plane_words
    units, per_unit = file_units(format), format.per_unit

    @cuda.jit
    def repack_blocks(wq, wd, raw, bad, blocks, first, count):
        block = uint32(cuda.blockIdx.x * uint32(THREADS) + cuda.threadIdx.x)
        if block >= count:
            return
        words = cuda.local.array(plane_words, uint32)
        at = uint32(uint32(block // uint32(per_unit)) * uint32(units))
        j = uint32(block % uint32(per_unit))
        row = uint32(uint32(first + block) // blocks)
        b = uint32(uint32(first + block) - uint32(row * blocks))
        q_to, d_to = starts(row, blocks)
        take(words, raw, at, j)
        put(wq, words, q_to, blocks, b)
        if not take_scales(wd, raw, at, j, d_to, b):
            bad[uint32(0)] = uint32(1)

    return repack_blocks


def file_units(format):
    """Units of a file's block in which `take` reads it: pairs of bytes, or bytes where their number is odd."""
    return format.file_bytes if format.file_bytes % 2 else format.file_bytes // 2


# ---- NumPy: values and products ------------------------------------------------------------------------------------

def in_blocks(format, raw):
    """The file's bytes of whole blocks, any shape -> uint8 [rows, file_bytes]."""
    return raw.reshape(-1, format.file_bytes)


def split(format, raw):
    """The file's bytes -> the planes' bytes uint8 [n_blocks, bytes], and wd uint16, flat, as on the card."""
    planes, wd = format.split_blocks(in_blocks(format, raw))
    return np.ascontiguousarray(planes).reshape(-1, sum(format.planes)), \
        np.ascontiguousarray(wd).view(np.uint16).reshape(-1)


def pack(format, planes, n):
    """The planes' bytes uint8 [n_blocks, bytes], of the blocks of n rows -> wq as on the card, uint8 [n, q_row]."""
    ends = np.cumsum(format.planes)[:-1]
    rows = np.concatenate([plane.reshape(n, -1) for plane in np.split(planes, ends, axis=1)], axis=1)
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % 16)))


def pack_scales(format, wd, n):
    """The headers of the blocks of n rows -> wd as on the card, uint16 [n, d_row]."""
    head = np.tile(np.array(format.row_head, np.uint16), (n, 1))
    return np.concatenate([head, wd.reshape(n, -1)], axis=1)


def spread(parts):
    """[n_blocks, 0, 1 or 2], of a block or its halves -> of its 32 weights; nothing is 0."""
    return np.repeat(parts, BLOCK // parts.shape[1], axis=1) if parts.shape[1] else parts.dtype.type(0)


def factors(format, raw, dtype):
    """(q, scale, minimum) of every weight in `dtype`, arrays that broadcast to [n_blocks, 32]: scale * q - minimum."""
    terms = format.terms(in_blocks(format, raw))
    scale = terms.scale.astype(dtype)
    if terms.integers is not None:
        scale = scale * terms.integers.astype(dtype)
    return terms.q.astype(dtype), spread(scale), spread(terms.minimum.astype(dtype))


def dequantize(format, raw, dtype=np.float32):
    """The file's bytes of whole blocks (uint8, any shape) -> their weights, flat; as float32 rounded once each, the
    bits of the gguf package's."""
    q, scale, minimum = factors(format, raw, dtype)
    return (q * scale - minimum).reshape(-1)


def product_reference(format, raw, xq, xd):
    """float64 y [rows, n] = x . w^T for the file's bytes of w [n, k] and quantised rows x (kernels/quantize.py), and
    the sum of the magnitudes that a kernel adds up for each."""
    q, scale, minimum = factors(format, raw, np.float64)
    x = xq * np.repeat(xd.astype(np.float64), BLOCK, axis=1)
    k = xq.shape[1]
    return (x @ (q * scale - minimum).reshape(-1, k).T,
            abs(x) @ (abs(q * scale) + abs(minimum)).reshape(-1, k).T)


def random_raw(rng, format, n, k):
    """A matrix [n, k] as in a file, uint8 [blocks, bytes]: random bits, finite scales of either sign."""
    raw = rng.integers(0, 256, (n * k // format.file_block, format.file_bytes), np.uint8)
    format.scales.fill(rng, raw)
    return raw


# ---- on a card -----------------------------------------------------------------------------------------------------

def as_words(wd):
    """The flat uint16 array that kernels read scales from."""
    return wd.view(np.uint16).reshape(-1)


def repack(card, format, wq, wd, raw, bad, first, k, *, stream=None):
    """Blocks first, first + 1, ... (of the file's size) of the matrix (wq, wd) of rows of k <- raw, uint8, whole blocks
    as in the file. bad uint32 [1] becomes 1 where a scale is not a finite number. Never allocates."""
    count = raw.size // format.file_bytes * format.per_unit
    raw = raw.reshape(-1) if format.file_bytes % 2 else as_words(raw)
    card.launch(format.repack_kernel, -(-count // THREADS), THREADS, wq.reshape(-1), as_words(wd), raw, bad,
                k // BLOCK, first * format.per_unit, count, stream=stream)


@cuda.jit
def write_factors(wd, n, d_row, factor):
    row = uint32(cuda.blockIdx.x * uint32(THREADS) + cuda.threadIdx.x)
    if row < n:
        at = uint32(row * d_row)
        wd[at] = uint16(uint32(factor & uint32(0xFFFF)))
        wd[uint32(at + uint32(1))] = uint16(uint32(factor >> uint32(16)))


def scale_rows(card, format, wd, n, k, factor):
    """Makes a float32 `factor` that of all rows of a matrix [n, k], which has been repacked. format: one with a
    row_head."""
    card.launch(write_factors, -(-n // THREADS), THREADS, as_words(wd), n, format.d_row(k),
                int(head_of(format, factor).view(np.uint32)))


def head_of(format, factor):
    """What stands in front of a row with this factor: float32, `factor` times the row_head of a format."""
    return np.float32(factor) * np.array(format.row_head, np.uint16).view(np.float32)[0]


def on_card(card, format, raw, n, k):
    """(wq, wd) of the matrix [n, k] with these bytes in a file."""
    wq, wd = (card.alloc(*array) for array in format.arrays(n, k))
    repack(card, format, wq, wd, card.upload(raw), card.zeros(1, np.uint32), 0, k)
    card.synchronize()      # a product may read its weights before the launch in front of it has ended
    return wq, wd
