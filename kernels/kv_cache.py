"""The KV cache: keys and values of the attention layers in pages of 64 tokens, and the kernel that fills it.

Per attention layer two arrays hold the pages; a table on the card says which pages make up the sequence of a slot:

    keys, values  [n_pages, n_kv, 64, elements of a row]      the element and the rows are the format's
    block_table   int32 [n_slots, max_pages]                  page of tokens 64 j .. 64 j + 63 of a slot

    slot 3, position 130:  block_table[3, 130 // 64 = 2] = 17
                           keys[17, kv head, 130 % 64 = 2, :]

                page 17:   | head 0: 64 rows | head 1: 64 rows | ..      float16, heads of 256: a row is 512 bytes

So the 64 keys that a tile of attention reads are one contiguous run, of 32 KiB in float16. Element offsets are 64 bits
wide: a cache of 256 K tokens with 4 heads holds 2^28 elements, and several slots soon hold more than 2^31.

`store_kv` writes one row per token: the key normalised and rotated as kernels/rope.py describes (without attention's
scale, which the query carries), the value as it is, both as the format (kernels/kv_formats.py) stores them. Where the
key is not finite, the value becomes NaN.

One warp per (row, head), lanes along the dims. Pipe: fp32, about 130 instructions per lane in float16, 400 to 500 where
keys and values are turned and quantised. Bytes per head and row: 8 head_dim read, and in float16 4 head_dim written. In
decode bound by its launch, in prefill by memory.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint32, uint64

from kernels.bench import Case, main
from kernels.card import Array
from kernels.hadamard import EVERY_LANE
from kernels.kv_formats import KV_FORMATS, PAGE, KVFormat, turned
from kernels.records import Places
from kernels.rope import (QWEN3, QWEN35, TOLERANCE, angles_function, heads_of, load_function, norm_rope_reference,
                          norm_rotate_function, sample_positions, sample_qkv, upload_qkv)


FIRST_INFINITE = 65520.0        # a float32 from which on a half is infinite


class Pages(NamedTuple):
    """The keys and values of an attention layer, and which pages belong to which slot."""

    format: KVFormat
    k: Array                # as `KVFormat.arrays` says
    v: Array
    block_table: Array      # int32 [n_slots, max_pages]

    @classmethod
    def alloc(cls, card, format, sizes, block_table, name):
        """Of a layer. sizes: pages, KV heads, and values of a head; name: of the layer, where memory is listed."""
        arrays = format.arrays(*sizes).items()
        return cls(format, *(card.alloc(*array, f"{name} {kind}") for kind, array in arrays), block_table)

    @property
    def nbytes(self):
        """Of keys and values."""
        return self.k.nbytes + self.v.nbytes


# ---- reference ---------------------------------------------------------------------------------------------

def read_pages(rows, pages, block_table, slot, n):
    """The first n tokens of a slot as float16 [n, n_kv, head_dim], from one of a layer's arrays of pages in NumPy, with
    these Rows; turned, if they are."""
    held = pages[np.asarray(block_table)[slot, :-(-n // PAGE)]]  # [pages of the slot, n_kv, 64, row]
    return rows.decode(np.moveaxis(held, 2, 1).reshape(-1, *held.shape[1:2], held.shape[3])[:n])


def kv_reference(qkv):
    """What the cache should hold of a QKV of host arrays: keys and values, float64 [rows, n_kv, head_dim] each, before
    the format rounds them."""
    heads, values = qkv.heads, np.asarray(qkv.products.values, np.float64)
    k, v = (values[:, start:end].reshape(len(values), heads.n_kv_heads, heads.head_dim)
            for start, end in ((heads.k_column, heads.v_column), (heads.v_column, heads.n_columns)))
    return norm_rope_reference(k, qkv.k_norm, *qkv.rotary, heads.eps), v


# ---- kernel ------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def head_of_page(block_table, max_pages, slot, page, kv_head, n_kv):
    """Number of a head's 64 rows in either array of pages: those of page number `page` (= position // 64) of a slot.
    They begin at element number * 64 * elements of a row (uint64)."""
    held = uint32(block_table[uint32(uint32(slot * max_pages) + page)])
    return uint64(uint64(held) * uint64(n_kv) + uint64(kv_head))


@cuda.jit(device=True, forceinline=True)
def _is_half(x):
    """Whether these four values are finite in half precision."""
    return abs(x[0]) < FIRST_INFINITE and abs(x[1]) < FIRST_INFINITE and \
        abs(x[2]) < FIRST_INFINITE and abs(x[3]) < FIRST_INFINITE


@cuda.jit(device=True, forceinline=True)
def _four_if(x, condition):
    n = float32(math.nan)
    return x[0] if condition else n, x[1] if condition else n, x[2] if condition else n, x[3] if condition else n


@cache
def spoil_function(head_dim):
    """spoil(v, k): the lane's values v of a head, or NaN if one of the head's keys is not finite in half precision. A
    softmax may ignore a score that is NaN, but a product with a value of NaN is NaN. So a key that is not finite shows
    in every format."""

    @cuda.jit(device=True, forceinline=True)
    def spoil_128(v, k):
        return _four_if(v, cuda.all_sync(EVERY_LANE, _is_half(k)))

    @cuda.jit(device=True, forceinline=True)
    def spoil_256(v, k):
        is_half = cuda.all_sync(EVERY_LANE, _is_half(k[:4]) and _is_half(k[4:]))
        return _four_if(v[:4], is_half) + _four_if(v[4:], is_half)

    return spoil_256 if head_dim == 256 else spoil_128


@cache
def store_kernel(format, head_dim, rotary):
    """The kernel for a KV format and heads of this shape."""
    load, angles_of = load_function(head_dim), angles_function(rotary)
    norm_rotate, keys, values = norm_rotate_function(head_dim, rotary), *format.functions(head_dim)
    spoil = spoil_function(head_dim)
    pack_key, write_key, pack_value, write_value = keys.pack, keys.write, values.pack, values.write
    k_row, v_row = format.keys.row(head_dim), format.values.row(head_dim)

    @cuda.jit
    def store_kv_rows(k_pages, v_pages, projected, w, rope_pos, inv_freq, block_table, row_slot, row_pos, stride,
                      k_column, v_column, max_pages, n_positions, n_kv, height_section, width_section, eps):
        """Grid (rows, n_kv), one warp each."""
        lane, row, head = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
        if row_pos[row] < int32(0):
            return
        position = uint32(row_pos[row])
        to = head_of_page(block_table, max_pages, uint32(row_slot[row]), uint32(position // uint32(PAGE)), head, n_kv)
        to = uint64(to * uint64(PAGE) + uint64(uint32(position % uint32(PAGE))))
        at = uint32(uint32(row * stride) + head * uint32(head_dim))
        angles = angles_of(row, n_positions, lane, rope_pos, inv_freq, height_section, width_section)
        k, v = load(projected, uint32(at + k_column), lane), load(projected, uint32(at + v_column), lane)
        k = norm_rotate(k, load(w, uint32(0), lane), angles, eps)
        write_key(k_pages, uint64(to * uint64(k_row)), lane, pack_key(k, lane))
        write_value(v_pages, uint64(to * uint64(v_row)), lane, pack_value(spoil(v, k), lane))

    return store_kv_rows


def store_kv(card, pages, qkv, places, rows, stream=None):
    """Pages <- the keys and values of the first `rows` rows of `qkv`; the block table must hold a page for every
    position of `places`. A row at position -1 is void: it stores nothing. Writes those rows of the pages only, never
    allocates."""
    heads, rotary = qkv.heads, qkv.rotary
    card.launch(store_kernel(pages.format, heads.head_dim, heads.rotary), (rows, heads.n_kv_heads), 32,
                pages.k.reshape(-1), pages.v.reshape(-1), qkv.products.values.reshape(-1), qkv.k_norm,
                rotary.positions.reshape(-1), rotary.frequencies, pages.block_table.reshape(-1), places.slots,
                places.positions, qkv.products.stride, heads.k_column, heads.v_column, pages.block_table.shape[1],
                rotary.positions.shape[1], heads.n_kv_heads, *rotary.sections[1:], float(heads.eps), stream=stream)


# ---- check -------------------------------------------------------------------------------------------------

CASES = [((2, (0,)), QWEN35), ((4, (1, 130, 63, 64)), QWEN35), ((2, (-1, 5, -1, 64)), QWEN35),
         ((2, tuple(range(33, 98))), QWEN35), ((2, (0, 131, 64, 63)), QWEN3), ((3, (5, 127)), (128, 64, True))]
# (n_kv, positions: of slot r % 3 for row r; -1 is void), shape of the heads


def check(card, format, case):
    """Stores rows into poisoned pages; all else must stay poisoned. Returns the largest error, of the largest |k|."""
    (n_kv, positions), shape = case
    rows, rng, heads = len(positions), np.random.default_rng(len(positions)), heads_of(n_kv, n_kv, shape)
    qkv = sample_qkv(rng, heads, sample_positions(rng, rows))
    slots, positions = np.arange(rows, dtype=np.int32) % 3, np.array(positions, np.int32)
    counts = positions >= 0
    max_pages = positions.max() // PAGE + 1
    table = rng.permutation(3 * max_pages + 1)[:3 * max_pages].reshape(3, -1).astype(np.int32)
    arrays = [card.alloc(*array) for array in format.arrays(3 * max_pages + 1, n_kv, heads.head_dim).values()]
    for array in arrays:
        card.poison(array)
    poisoned = [card.download(array) for array in arrays]
    store_kv(card, Pages(format, *arrays, card.upload(table)), upload_qkv(card, qkv),
             Places(card.upload(slots), card.upload(positions)), rows)
    want, got = kv_reference(qkv), [card.download(array) for array in arrays]
    at = table[slots, positions // PAGE][counts], slice(None), positions[counts] % PAGE
    want = [each[counts] for each in want]
    k, wanted_k = format.keys.decode(got[0][at]).astype(np.float64), turned(format.keys, want[0])
    error = np.max(np.abs(k - wanted_k)) / np.max(np.abs(wanted_k))
    assert error <= TOLERANCE - 2.0 ** -11 + format.keys.tolerance, f"error {error}"
    np.testing.assert_array_equal(got[1][at], format.values.encode(want[1]))
    for array, before in zip(got, poisoned):
        array[at] = before[at]
        np.testing.assert_array_equal(array.view(np.uint8), before.view(np.uint8), "wrote elsewhere")
    return error


def cases(card):
    """The checked cases."""
    for format in KV_FORMATS.values():
        for case in CASES:
            (n_kv, positions), shape = case
            yield Case(f"{len(positions)} rows, {n_kv} heads {shape}, {format.name}",
                       lambda format=format, case=case: check(card, format, case))


if __name__ == "__main__":
    main("KV pages", cases)
