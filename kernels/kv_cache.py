"""The KV cache: keys and values of the attention layers in pages of 64 tokens, and the kernel that fills it.

Per attention layer two arrays hold the pages; a table on the card says which pages make up the sequence of
a slot:

    k_pages, v_pages  float16 [n_pages, n_kv, 64, 256]
    block_table       int32   [n_slots, max_pages]       page of tokens 64 j .. 64 j + 63 of a slot

    slot 3, position 130:  block_table[3, 130 // 64 = 2] = 17
                           k_pages[17, kv head, 130 % 64 = 2, :]

                page 17:   | head 0: 64 rows of 256 | head 1: 64 rows of 256 | ..      a row is 512 bytes

So the 64 keys that a tile of attention reads are one contiguous run of 32 KiB. Element offsets are 64 bits
wide: a cache of 256 K tokens with 4 heads holds 2^28 elements, several slots soon more than 2^31.

`store_kv` writes one row per token: the key normalised and rotated as kernels/rope.py describes (without
the factor 1/16, which the query carries), the value as it is, both rounded to float16.

    projected  float32 [rows, stride]: n_kv 256 keys from k_column on, as many values from v_column on
    row_slot, row_pos  int32 [rows]      rope_pos  int32 [3, rows]

One warp per (row, head), lanes along the dims. Pipe: fp32, about 130 instructions per lane. Bytes: 2,048
read and 1,024 written per head and row. Bound by its launch in decode, by memory in prefill.
"""

import numpy as np
from numba import cuda
from numba.types import uint32, uint64

from kernels.bench import Case, main
from kernels.rope import (EPS, HEAD_DIM, SECTIONS, TOLERANCE, inverse_frequencies, load_head, norm_rope_reference,
                          norm_rotate, rotation, sample_positions, store_head)

PAGE = 64  # tokens


# ---- reference ---------------------------------------------------------------------------------------------

def read_pages(pages, block_table, slot, n):
    """The first n tokens of a slot as NumPy [n, n_kv, 256], from pages [n_pages, n_kv, 64, 256]."""
    held = pages[np.asarray(block_table)[slot, :-(-n // PAGE)]]  # [pages of the slot, n_kv, 64, 256]
    return np.moveaxis(held, 2, 1).reshape(-1, *held.shape[1:2], HEAD_DIM)[:n]


def store_kv_reference(k, v, w, rope_pos, inv_freq, sections, eps):
    """k, v [rows, n_kv, 256] -> what the cache should hold of them, float64 [rows, n_kv, 256] each, before
    rounding."""
    return norm_rope_reference(k, w, rope_pos, inv_freq, sections, eps), np.asarray(v, np.float64)


# ---- kernel ------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def page_offset(block_table, max_pages, slot, page, kv_head, n_kv):
    """Element (uint64) where the 64 rows of a head begin in page number `page` (= position // 64) of a
    slot."""
    held = uint32(block_table[uint32(uint32(slot * max_pages) + page)])
    return uint64(uint64(held) * uint64(n_kv) + uint64(kv_head)) * uint64(PAGE * HEAD_DIM)


@cuda.jit
def store_kv_rows(k_pages, v_pages, projected, w, rope_pos, inv_freq, block_table, row_slot, row_pos, stride,
                  k_column, v_column, max_pages, n_positions, n_kv, height_section, width_section, eps):
    """Grid (rows, n_kv), one warp each."""
    lane, row, head = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
    position = uint32(row_pos[row])
    to = page_offset(block_table, max_pages, uint32(row_slot[row]), uint32(position // uint32(PAGE)), head,
                     n_kv)
    to = uint64(to + uint64(uint32(position % uint32(PAGE)) * uint32(HEAD_DIM)))
    at = uint32(uint32(row * stride) + head * uint32(HEAD_DIM))
    sin, cos = rotation(row, n_positions, lane, rope_pos, inv_freq, height_section, width_section)
    k, v = load_head(projected, uint32(at + k_column), lane), load_head(projected, uint32(at + v_column), lane)
    store_head(k_pages, to, lane, norm_rotate(k, load_head(w, uint32(0), lane), sin, cos, eps))
    store_head(v_pages, to, lane, v)


def store_kv(card, k_pages, v_pages, projected, stride, k_column, v_column, w, rope_pos, inv_freq,
             block_table,
             row_slot, row_pos, rows, n_kv, sections, eps, stream=None):
    """Pages float16 [n_pages, n_kv, 64, 256] <- the tokens at row_pos of row_slot, int32 [rows]: projected
    float32 [rows, stride], of which a row holds n_kv 256 keys from k_column on and as many values from
    v_column on; w float32 [256] the key norm, rope_pos int32 [3, >= rows], inv_freq float32 [32], block_table
    int32 [n_slots, max_pages] (must hold a page for every position), sections (s_t, s_h, s_w). Writes those
    rows only, never allocates."""
    card.launch(store_kv_rows, (rows, n_kv), 32, k_pages.reshape(-1), v_pages.reshape(-1),
                projected.reshape(-1), w,
                rope_pos.reshape(-1), inv_freq, block_table.reshape(-1), row_slot, row_pos, stride, k_column,
                v_column, block_table.shape[1], rope_pos.shape[1], n_kv, sections[1], sections[2], float(eps),
                stream=stream)


# ---- check -------------------------------------------------------------------------------------------------

CASES = [(2, (0,)), (4, (1, 130, 63, 64)),
         (2, tuple(range(33, 98)))]  # n_kv, positions: of slot r % 3 for row r


def check(card, case):
    """Stores rows into poisoned pages; all else must stay poisoned. Returns the largest error, of the largest
    |k|."""
    n_kv, positions = case
    rows, rng = len(positions), np.random.default_rng(len(positions))
    width, k_column = n_kv * HEAD_DIM, 20
    v_column, stride = k_column + width + 8, k_column + 2 * width + 12
    projected = rng.standard_normal((rows, stride), np.float32) * 3
    w = rng.uniform(0.5, 1.5, HEAD_DIM).astype(np.float32)
    rope_pos, inv_freq = sample_positions(rng, rows), inverse_frequencies(1e7)
    slots, positions = np.arange(rows, dtype=np.int32) % 3, np.array(positions, np.int32)
    max_pages = positions.max() // PAGE + 1
    table = rng.permutation(3 * max_pages + 1)[:3 * max_pages].reshape(3, -1).astype(np.int32)
    pages = [card.alloc((3 * max_pages + 1, n_kv, PAGE, HEAD_DIM), np.float16) for _ in "kv"]
    for array in pages:
        card.poison(array)
    store_kv(card, *pages, card.upload(projected), stride, k_column, v_column,
             *map(card.upload, (w, rope_pos, inv_freq, table, slots, positions)), rows, n_kv, SECTIONS, EPS)
    k, v = (projected[:, at:at + width].reshape(rows, n_kv, HEAD_DIM) for at in (k_column, v_column))
    want_k, want_v = store_kv_reference(k, v, w, rope_pos, inv_freq, SECTIONS, EPS)
    got_k, got_v = (card.download(array).astype(np.float64) for array in pages)
    at = table[slots, positions // PAGE], slice(None), positions % PAGE
    error = np.max(np.abs(got_k[at] - want_k)) / np.max(np.abs(want_k))
    assert error <= TOLERANCE, f"error {error}"
    np.testing.assert_array_equal(got_v[at], want_v.astype(np.float16))
    got_k[at] = got_v[at] = np.nan
    assert np.isnan(got_k).all() and np.isnan(got_v).all(), "wrote elsewhere"
    return error


def cases(card):
    """The checked cases."""
    for case in CASES:
        yield Case(f"{len(case[1])} rows, {case[0]} heads", lambda case=case: check(card, case))


if __name__ == "__main__":
    main("KV pages", cases)
