"""Pages of few bits become halves: a piece of a sequence's keys and values, for attention of prompts.

    k, v    float16 [n_pages, n_kv, 64, D]      pages first_page .. first_page + n_pages - 1 of a slot, as
                                                kernels/kv_formats.py's `decode` has them: turned, D = head_dim

kernels/attention.py reads each page once for every 32 rows of a KV head's queries. So a page is expanded here once per
launch, and attention reads halves, whatever the format. A piece has all pages of a sequence, but no more than
PIECE_PAGES. This bounds the memory: 64 MiB for 4 heads of 256, for all layers of a card. benchmarks/results.md, section
kv_formats, says what it costs.

A block has a page of a KV head; a thread expands 8 dims of a row at a time, 16 bytes. Pages and rows beyond the last
row of the pass are left out: nobody reads them. Pipe: half2 and integer, 10 to 15 instructions for 8 dims. Bound by
memory: it reads what the format keeps and writes 4 D bytes for each token and KV head.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.types import uint32, uint64

from kernels.bench import Case, main
from kernels.card import Array
from kernels.intrinsics import store_words4
from kernels.kv_cache import Pages, head_of_page, read_pages
from kernels.kv_formats import KV_FORMATS, PAGE
from kernels.records import Places
from kernels.rope import QWEN3, QWEN35

PIECE_PAGES = 256        # 16,384 tokens
WARPS = 8                # per block
DIMS = 8                 # of a thread at a time


class Piece(NamedTuple):
    """Pages of a sequence as halves."""

    k: Array                # float16 [n_pages, n_kv, 64, head_dim]
    v: Array
    block_table: Array      # int32 [1, n_pages]: 0, 1, .., since attention finds its pages through a table

    @classmethod
    def alloc(cls, card, format, n_kv_heads, head_dim, max_pages):
        """For pages of this format; None if they are halves. max_pages: of a sequence."""
        if not format.expands:
            return None
        n_pages = min(max_pages, PIECE_PAGES)
        shape = n_pages, n_kv_heads, PAGE, head_dim
        k, v = (card.alloc(shape, np.float16, f"expanded {name}") for name in ("keys", "values"))
        return cls(k, v, card.upload(np.arange(n_pages, dtype=np.int32)[None], "block table of expanded pages"))

    @property
    def n_pages(self):
        return self.k.shape[0]


# ---- kernel ------------------------------------------------------------------------------------------------

def expand_function(rows, head_dim):
    """expand(out, pages, page, n, thread): of the head's rows number `page` in pages of these Rows, the first n rows,
    to element 0 of the 64 rows at `out`."""
    parts, row = rows.functions(head_dim), rows.row(head_dim)
    load, expand, n_raw, chunks = parts.load, parts.expand, parts.n_raw, head_dim // DIMS
    rows_at_once = 32 * WARPS // chunks

    @cuda.jit(device=True, forceinline=True)
    def expand_rows(out, to, pages, page, n, thread):
        raw = cuda.local.array(n_raw, uint32)
        chunk, first = uint32(thread % uint32(chunks)), uint32(thread // uint32(chunks))
        page = uint64(page * uint64(PAGE * row))
        for i in range(uint32(PAGE // rows_at_once)):
            token = uint32(first + uint32(i) * uint32(rows_at_once))
            if token < n:
                load(raw, pages, uint64(page + uint64(uint32(token * uint32(row)))), chunk, uint32(0))
                w0, w1, w2, w3 = expand(raw, uint32(0), chunk)
                at = uint64(to + uint64(uint32(token * uint32(head_dim) + chunk * uint32(DIMS))))
                store_words4(out, at, w0, w1, w2, w3)

    return expand_rows


@cache
def expand_kernel(format, head_dim):
    """The kernel for a KV format of few bits."""
    expand_keys, expand_values = (expand_function(rows, head_dim) for rows in format.kinds.values())

    @cuda.jit(launch_bounds=(32 * WARPS, 2))
    def expand_kv(k, v, k_pages, v_pages, block_table, row_slot, row_pos, rows, first_page, max_pages, n_kv):
        """Grid (pages of the piece, n_kv), block 256."""
        thread, number, head = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
        n_tokens = uint32(uint32(row_pos[uint32(0)]) + rows)
        first = uint32(uint32(first_page + number) * uint32(PAGE))
        if first >= n_tokens:
            return
        page = head_of_page(block_table, max_pages, uint32(row_slot[uint32(0)]), uint32(first_page + number), head,
                            n_kv)
        to = uint64(uint64(uint64(number) * uint64(n_kv) + uint64(head)) * uint64(PAGE * head_dim))
        expand_keys(k, to, k_pages, page, uint32(n_tokens - first), thread)
        expand_values(v, to, v_pages, page, uint32(n_tokens - first), thread)

    return expand_kv


def expand_pages(card, piece, pages, places, rows, first_page, stream=None):
    """piece <- the pages from number first_page on of slot places.slots[0], as far as rows 0 .. rows - 1, at
    consecutive positions from places.positions[0] on, see them. Writes k and v only, never allocates."""
    _, n_kv, _, head_dim = piece.k.shape
    max_pages = pages.block_table.shape[1]
    card.launch(expand_kernel(pages.format, head_dim), (min(piece.n_pages, max_pages - first_page), n_kv), 32 * WARPS,
                piece.k.reshape(-1), piece.v.reshape(-1), pages.k.reshape(-1), pages.v.reshape(-1),
                pages.block_table.reshape(-1), places.slots, places.positions, rows, first_page, max_pages, n_kv,
                stream=stream)


# ---- check -------------------------------------------------------------------------------------------------

CASES = [((2, 0, 64, 0, 4), QWEN35), ((3, 70, 13, 0, 2), QWEN35), ((1, 250, 71, 2, 3), QWEN35),
         ((2, 100, 60, 1, 9), QWEN3), ((1, 0, 1, 0, 1), QWEN3)]
# (n_kv, first position, rows, first page, pages of the piece), shape of the heads
EXPANDED = [format for format in KV_FORMATS.values() if format.expands]


def check(card, format, case):
    """Bits against the NumPy twin; what lies behind the last row must stay poisoned. Returns 0, the error."""
    (n_kv, start, rows, first, n_pages), (head_dim, *_) = case
    rng, n = np.random.default_rng(start), start + rows
    held = -(-n // PAGE)
    table = np.full((2, held + 2), -1, np.int32)
    table[1, :held] = rng.permutation(held + 1)[:held]
    host = [rows.encode(rng.standard_normal((held + 1, n_kv, PAGE, head_dim), np.float32) * 3)
            for rows in format.kinds.values()]
    pages = Pages(format, *map(card.upload, (*host, table)))
    piece = Piece.alloc(card, format, n_kv, head_dim, n_pages)
    for array in piece.k, piece.v:
        card.poison(array)
    places = Places(card.upload(np.ones(rows, np.int32)), card.upload(np.arange(start, n, dtype=np.int32)))
    expand_pages(card, piece, pages, places, rows, first)
    begin, end = min(first * PAGE, n), min((first + n_pages) * PAGE, n)
    for got, kind, array in zip((piece.k, piece.v), format.kinds.values(), host):
        got = np.moveaxis(card.download(got), 2, 1).reshape(n_pages * PAGE, n_kv, head_dim)
        want = read_pages(kind, array, table, 1, n)[begin:end]
        np.testing.assert_array_equal(got[:end - begin].view(np.uint16), want.view(np.uint16))
        assert np.isnan(got[end - begin:]).all(), "wrote on"
    return 0.0


def cases(card):
    """The checked cases."""
    for format in EXPANDED:
        for case in CASES:
            yield Case(f"{case}, {format.name}", lambda format=format, case=case: check(card, format, case))


if __name__ == "__main__":
    main("Pages of few bits as halves", cases)
