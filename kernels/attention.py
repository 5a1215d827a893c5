"""Causal attention of prompts with grouped heads over the paged KV cache, with a gated output where heads have gates.

    s_j = q . k_j               over the keys j = 0 .. position; q already carries the scale D^-1/2, D = head_dim
    o   = sum_j softmax(s)_j v_j
    out = o * sigmoid(gate)     elementwise; without gates out = o

Query head h reads KV head h // (heads / n_kv). Decoded tokens go through kernels/attend_decode.py.

    q          float16 [rows, heads, D]
    projected  float32 [rows, stride]           a row begins with query and gate, D values each, of every head
    k, v       pages in a KV format (kernels/kv_formats.py), found through block_table int32 [n_slots, max_pages]
    out        float32 [rows, heads * D]        row_slot, row_pos  int32 [rows]

The rows of a launch are consecutive tokens of one slot. Or they are *packed*: parts of several texts, one behind the
other, each of consecutive tokens of a slot of its own. Then `tiles` lists what each block of threads takes:

    tiles      int32 [blocks, 3]    first row of its part, rows of the part, first unit of the block (below)

A part's results have the bits of a launch for this part alone.

**Pages of few bits** are read as halves, which kernels/kv_expand.py makes of them in a workspace, once per launch and
not once per tile. The workspace has room for a *piece* of the context, so a launch walks over a piece. Between two
pieces its sums stay on the card as they are, unscaled and per lane, so the bits do not depend on the size of a piece.
Such keys and values are turned (kernels/hadamard.py): q is turned, too, and behind the last piece the kernel turns the
output back before the gate.

**Sparse prompts** read the pages that kernels/block_sparse.py has chosen for each 64 queries and KV head, and no other:

    kept       uint32 [query pages, n_kv, words]    bit p % 32 of word p / 32: whether these queries read page p

A block of threads belongs to one page of queries, since its 32 rows of heads do not reach over multiples of 64.

Half precision where it is harmless. Products run on packed half2 FMA. A score is made of chains of 8 products per half,
two of which are added in half precision; an output takes chains of 16 products. Chains are added to float32 sums, so a
chain's rounding errors (2^-11 of its partial sum each) do not grow with the context. Softmax statistics, rescaling and
all longer sums are float32; probabilities, at most 1, are rounded to half for the product with v. A value beyond 4,000
in magnitude would overflow a chain. Relative L2 error against float64: 8.4e-4 over all, 2.6e-3 in the worst row.

A block of 4 warps shares a KV head. A warp takes 8 consecutive rows of one query head and walks over the keys with an
online softmax, page by page: 64 keys at absolute multiples of 64. A page in which a row sees no key changes none of its
bits, so results do not depend on how a prompt is cut into launches. A page passes through shared memory in tiles of
16 KiB; each tile is loaded into registers while the warps work on the tile before it:

    D = 256:  keys, dims 0..127 | keys, dims 128..255 | values of keys 0..31 | values of keys 32..63
    D = 128:  keys              | values

    shared memory, words:   q [4 warps][8 rows][D/2 + 4]   tile: 64 keys of [68], or 8,192 / D values of [D/2 + 4]
                            p [4 warps][8 rows][64]        each twice in a word

Rows are padded by 4 words: 8 lanes that read 16 bytes of 8 neighbouring rows touch all 32 banks once.

    scores: a lane owns 4 rows x 4 keys, all dims: lane % 2 picks the rows, the keys are 4 (lane // 2) .. + 3
    values: a lane owns 8 dims, all keys; D = 256: of all 8 rows; D = 128: of 4 rows, as for scores

Neighbouring lanes read the same keys, so a load of 16 bytes of 16 keys takes two cycles of shared memory and not four.
A probability fills both halves of its word, so a product takes the word as it is. A Hopper card runs packed products on
two pipes, of which one cannot take one half of a word for both factors.

Where no score of the warp exceeds its row's maximum so far, nothing is rescaled, since the factor would be exactly 1,
and no maximum is exchanged. A score that is NaN counts as above the maximum, and then makes the row's sum NaN. Without
this it would be lost: maxima ignore a NaN, so its key would get the probability 0. The sum of the probabilities
stays with each lane's own keys until the end. Keys and values beyond the live length are never read: the index is
clamped to the last live key, whose probability is then 0.

Pipe: half2, 66 % of the instructions. Measured at 40 % of its peak: benchmarks/results.md, section attention.
"""

import math
from functools import cache

import numpy as np
from numba import cuda
from numba.cuda import libdevice
from numba.types import float32, int32, uint32, uint64

from kernels.bench import Case, main
from kernels.hadamard import turn_back_function
from kernels.intrinsics import (BIAS_FLOAT, both_high, both_low, div_rn, float_as_word, float_max, hadd2, half2_high,
                                half2_low, hfma2, hmul2, load_floats4, load_shared4, load_words4, pack_half2,
                                shared_address, sigmoid, store_floats4, store_shared4, store_words4,
                                word_as_float)
from kernels.kv_cache import Pages, head_of_page
from kernels.kv_expand import PIECE_PAGES, Piece, expand_pages
from kernels.kv_formats import KV_FORMATS, PAGE, turned_back
from kernels.records import Places, Projected
from kernels.rope import QKV, QWEN3, QWEN35, heads_of

WARPS = 4                # per block
RESIDENT = 2             # blocks that an SM must hold: bounds the registers. With 38,400 B each a T4 holds one
ROWS = 8                 # query rows of a warp
CHAIN = 16               # products with values added in half precision
DIMS = 8                 # dims of a lane in an access of 16 bytes, and in the output
TILE_DIMS = 128          # dims of a tile of keys
TILE_ELEMENTS = PAGE * TILE_DIMS            # of a tile of values, too
KEY_STRIDE = TILE_DIMS // 2 + 4             # words from one key of a tile to the next in shared memory
LOADS = PAGE // 2 // WARPS                  # 16-byte loads of a lane per tile
TILE, P_TILE, LOADED = PAGE * KEY_STRIDE, WARPS * ROWS * PAGE, 4 * LOADS  # words
LOG2E, LN2 = 1 / math.log(2), math.log(2)
MINUS_INFINITY, NAN = float("-inf"), float("nan")
EVERY_LANE = 0xFFFFFFFF


# ---- reference ---------------------------------------------------------------------------------------------

def attention_reference(q, k, v, gate, positions):
    """q [rows, heads, D], k and v [keys, n_kv, D], gate [rows, heads, D] or None, positions [rows] -> float64 [rows,
    heads * D]. Row r sees keys 0 .. positions[r]."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("rhd,khd->hrk", q, k)
    scores[:, np.arange(len(k)) > np.asarray(positions)[:, None]] = -np.inf
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    o = np.einsum("hrk,khd->rhd", p / p.sum(axis=-1, keepdims=True), v)
    return (o if gate is None else o / (1.0 + np.exp(-np.asarray(gate, np.float64)))).reshape(len(q), -1)


# ---- parts -------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def power_of_two(x):
    """2^x for x <= 126, within 2^-18 of it; exactly 1 at 0, and 0 below -127."""
    t = float_max(x, float32(-127.0))
    biased = t + float32(BIAS_FLOAT)                         # rounded to an integer, its bits end in it
    f = t - (biased - float32(BIAS_FLOAT))
    p = cuda.fma(f, float32(LN2 ** 5 / 120), float32(LN2 ** 4 / 24))
    p = cuda.fma(p, f, float32(LN2 ** 3 / 6))
    p = cuda.fma(p, f, float32(LN2 ** 2 / 2))
    p = cuda.fma(p, f, float32(LN2))
    p = cuda.fma(p, f, float32(1.0))
    return word_as_float(uint32(float_as_word(p) + uint32(float_as_word(biased) << uint32(23))))


@cuda.jit(device=True, forceinline=True)
def any_above(a, b, c, d, high):
    """Whether one of four scores is above `high`, or NaN. It takes as many instructions as their maximum does, which
    would leave out a NaN."""
    return ((not a <= high) | (not b <= high)) | ((not c <= high) | (not d <= high))


@cuda.jit(device=True, forceinline=True)
def any_nan(a, b, c, d):
    """Whether one of four scores is NaN."""
    return ((a != a) | (b != b)) | ((c != c) | (d != d))


@cuda.jit(device=True, forceinline=True)
def half_warp_max(x):
    for offset in (16, 8, 4, 2):
        x = float_max(x, cuda.shfl_xor_sync(EVERY_LANE, x, offset))
    return x


@cuda.jit(device=True, forceinline=True)
def half_warp_sum(x):
    for offset in (16, 8, 4, 2):
        x = x + cuda.shfl_xor_sync(EVERY_LANE, x, offset)
    return x


@cuda.jit(device=True, forceinline=True)
def load_tile(words, address, i):
    """16 bytes of shared memory as words 4 i .. 4 i + 3."""
    n = uint32(uint32(4) * i)
    words[n], words[n + uint32(1)], words[n + uint32(2)], words[n + uint32(3)] = load_shared4(address)


@cuda.jit(device=True, forceinline=True)
def store_tile(words, address, stride):
    """The lane's share of a tile, 16 bytes at every `stride` words."""
    for i in range(uint32(LOADS)):
        n = uint32(uint32(4) * i)
        store_shared4(address + uint64(uint32(uint32(4) * i * stride)), words[n], words[n + uint32(1)],
                      words[n + uint32(2)], words[n + uint32(3)])


@cuda.jit(device=True, forceinline=True)
def score_addresses(q_tile, tile, stride, warp, lane):
    """Shared addresses: of the lane's 4 rows of queries, of its first row in a tile of keys, and of where it puts its
    share of that tile. stride: words from one query to the next."""
    upper, key_lane = uint32(lane & uint32(1)), uint32(lane >> uint32(1))
    q_at = shared_address(q_tile) + uint64(uint32(uint32(warp * uint32(ROWS) + upper * uint32(4)) * uint32(4 * stride)))
    k_at = shared_address(tile) + uint64(uint32(key_lane * uint32(4 * KEY_STRIDE)))
    put_key = shared_address(tile) + uint64(
        uint32(uint32(uint32(2) * warp + uint32(lane >> uint32(4))) * uint32(4 * KEY_STRIDE)
               + uint32(16) * uint32(lane & uint32(15))))
    return q_at, k_at, put_key


@cuda.jit(device=True, forceinline=True)
def count_kept(kept, row, end):
    """How many of the pages 0 .. end - 1 are kept, of the words from `row` on."""
    n = uint32(0)
    for i in range(uint32(end // uint32(32))):
        n = uint32(n + uint32(cuda.popc(uint32(kept[uint32(row + uint32(i))]))))
    rest = uint32(uint32(uint32(1) << uint32(end & uint32(31))) - uint32(1))
    if rest != uint32(0):
        n = uint32(n + uint32(cuda.popc(uint32(uint32(kept[uint32(row + uint32(end // uint32(32)))]) & rest))))
    return n


@cuda.jit(device=True, forceinline=True)
def next_kept(kept, row, number):
    """The first kept page from `number` on. There must be one."""
    word = uint32(uint32(kept[uint32(row + uint32(number >> uint32(5)))]) >> uint32(number & uint32(31)))
    while word == uint32(0):
        number = uint32(uint32(number | uint32(31)) + uint32(1))
        word = uint32(kept[uint32(row + uint32(number >> uint32(5)))])
    return uint32(number + uint32(cuda.popc(uint32(uint32(~word) & uint32(word - uint32(1))))))


def load_functions(head_dim):
    """load_keys and load_values, which load the lane's share of a tile into registers. Arguments: (words, pages, page,
    part, last, lane, warp); page: number of the head's rows, part: which of the page's tiles, last: the last live key
    of the page, which replaces those beyond it."""
    lanes = head_dim // DIMS                    # that share a row of values,
    rows_at_once = 32 // lanes                  # of which a warp loads so many at once

    @cuda.jit(device=True, forceinline=True)
    def load(words, pages, at, i):
        n = uint32(uint32(4) * i)
        words[n], words[n + uint32(1)], words[n + uint32(2)], words[n + uint32(3)] = load_words4(pages, at)

    @cuda.jit(device=True, forceinline=True)
    def load_keys(words, pages, page, part, last, lane, warp):
        """A warp loads two rows of the tile at a time, the block 8. Tile row r holds key 4 (r % 16) + r // 16."""
        page = uint64(page * uint64(PAGE * head_dim))
        first = uint32(uint32(8) * warp + uint32(4) * uint32(lane >> uint32(4)))
        dim = uint32(part * uint32(TILE_DIMS) + uint32(lane & uint32(15)) * uint32(DIMS))
        if last >= uint32(PAGE - 1):
            at = uint64(page + uint64(uint32(first * uint32(head_dim) + dim)))
            for i in range(uint32(LOADS)):
                key = uint32(uint32(32) * uint32(i % uint32(2)) + uint32(i // uint32(2)))
                load(words, pages, uint64(at + uint64(uint32(key * uint32(head_dim)))), i)
        else:
            for i in range(uint32(LOADS)):
                key = uint32(first + uint32(32) * uint32(i % uint32(2)) + uint32(i // uint32(2)))
                key = key if key < last else last
                load(words, pages, uint64(page + uint64(uint32(key * uint32(head_dim) + dim))), i)

    @cuda.jit(device=True, forceinline=True)
    def load_values(words, pages, page, part, last, lane, warp):
        """A warp loads a row at a time, or two where 16 lanes hold a row."""
        page = uint64(page * uint64(PAGE * head_dim))
        first = uint32(part * uint32(TILE_ELEMENTS // head_dim) + warp * uint32(rows_at_once))
        dim = uint32(lane * uint32(DIMS))
        if rows_at_once == 2:
            first = uint32(first + uint32(lane >> uint32(4)))
            dim = uint32(uint32(lane & uint32(15)) * uint32(DIMS))
        if last >= uint32(PAGE - 1):
            at = uint64(page + uint64(uint32(first * uint32(head_dim) + dim)))
            for i in range(uint32(LOADS)):
                load(words, pages, uint64(at + uint64(uint32(i * uint32(WARPS * rows_at_once * head_dim)))), i)
        else:
            for i in range(uint32(LOADS)):
                key = uint32(first + i * uint32(WARPS * rows_at_once))
                key = key if key < last else last
                load(words, pages, uint64(page + uint64(uint32(key * uint32(head_dim) + dim))), i)

    return load_keys, load_values


def product_functions(stride, n_rows):
    """add_scores and chain_values. stride: words from one query or value to the next in shared memory; n_rows: of the
    output of a lane."""

    @cuda.jit(device=True, forceinline=True)
    def chain_scores(h, q_at, k_at):
        """h[4 i + j] = q row i . tile row 16 j over 16 dims, for 4 rows at address q_at and 4 at k_at: chains of
        8 products per half."""
        kw = cuda.local.array(32, uint32)
        qw = cuda.local.array(8, uint32)
        for j in range(uint32(4)):
            at = k_at + uint64(uint32(j * uint32(4 * 16 * KEY_STRIDE)))
            load_tile(kw, at, uint32(uint32(2) * j))
            load_tile(kw, at + uint64(16), uint32(uint32(2) * j + uint32(1)))
        for i in range(uint32(4)):
            at = q_at + uint64(uint32(i * uint32(4 * stride)))
            load_tile(qw, at, uint32(0))
            load_tile(qw, at + uint64(16), uint32(1))
            for j in range(uint32(4)):
                h[uint32(uint32(4) * i + j)] = hmul2(qw[0], kw[uint32(8) * j])
            for w in range(uint32(1), uint32(8)):
                for j in range(uint32(4)):  # four chains side by side: each waits for its last product
                    n = uint32(uint32(4) * i + j)
                    h[n] = hfma2(qw[w], kw[uint32(uint32(8) * j + w)], h[n])

    @cuda.jit(device=True, forceinline=True)
    def add_scores(s, q_at, k_at):
        """s[4 i + j] += q row i . tile row 16 j over 32 dims: two chains, added in half precision."""
        a = cuda.local.array(16, uint32)
        b = cuda.local.array(16, uint32)
        chain_scores(a, q_at, k_at)
        chain_scores(b, q_at + uint64(32), k_at + uint64(32))
        for n in range(uint32(16)):
            h = hadd2(a[n], b[n])
            s[n] = s[n] + (half2_low(h) + half2_high(h))

    @cuda.jit(device=True, forceinline=True)
    def chain_values(h, p_at, v_at, fresh):
        """h[4 r + w] = or += p v over 4 keys, for n_rows rows of p at address p_at and the lane's 4 words of the rows
        of v at v_at."""
        pw = cuda.local.array(32, uint32)
        vw = cuda.local.array(4, uint32)
        for r in range(uint32(n_rows)):
            load_tile(pw, p_at + uint64(uint32(r * uint32(4 * PAGE))), r)
        for j in range(uint32(4)):
            load_tile(vw, v_at + uint64(uint32(j * uint32(4 * stride))), uint32(0))
            for r in range(uint32(n_rows)):
                x = pw[uint32(uint32(4) * r + j)]
                for w in range(uint32(4)):
                    n = uint32(uint32(4) * r + w)
                    h[n] = hmul2(x, vw[w]) if fresh and j == uint32(0) else hfma2(x, vw[w], h[n])

    return add_scores, chain_values


@cuda.jit(device=True, forceinline=True)
def close(x, gate):
    """4 values times the sigmoids of their gates."""
    return x[0] * sigmoid(gate[0]), x[1] * sigmoid(gate[1]), x[2] * sigmoid(gate[2]), x[3] * sigmoid(gate[3])


# ---- kernel ------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def of_eight_rows(values, r):
    """The value that belongs to row r of the warp's 8. values: those of the 4 rows whose scores this lane has; lanes of
    the other half of the warp have the other 4 rows."""
    return cuda.shfl_sync(EVERY_LANE, values[r % uint32(4)], uint32(r // uint32(4)))


@cuda.jit(device=True, forceinline=True)
def of_own_rows(values, r):
    """The same for row r of the lane's 4, where a lane has scores and outputs of the same rows."""
    return values[r]


@cuda.jit(device=True, forceinline=True)
def scaled(o, i, f):
    """The four values from o[i] on times f, which the compiler does not take for o[i] itself where f is 1: the emulated
    card would have to correct the bits of a NaN in each page, and not in the result alone."""
    return (libdevice.fmul_rn(o[i], f), libdevice.fmul_rn(o[i + uint32(1)], f), libdevice.fmul_rn(o[i + uint32(2)], f),
            libdevice.fmul_rn(o[i + uint32(3)], f))


@cache
def tiles_kernel(expanded, head_dim, gated, packed, sparse=False):
    """The kernel for heads of this shape. expanded: whether it reads a piece in a workspace, which was turned, and not
    the pages themselves; packed: whether `tiles` counts; sparse: whether `kept` counts. If packed, neither other."""
    n_parts = head_dim // TILE_DIMS                         # tiles of a page's keys, and of its values
    rows_at_once = 32 * DIMS // head_dim                    # rows of a tile of values that a warp covers
    n_rows, tile_values = ROWS // rows_at_once, TILE_ELEMENTS // head_dim
    n_outputs, n_chains = n_rows * DIMS, n_rows * DIMS // 2     # of a lane: floats, half2 sums
    q_stride = head_dim // 2 + 4                            # words from one query or value to the next in shared memory
    n_query = WARPS * ROWS * q_stride
    load_keys, load_values = load_functions(head_dim)
    turn_back = turn_back_function(DIMS, rows_at_once)
    finishes = gated or expanded                            # whether sums are not yet the output
    add_scores, chain_values = product_functions(q_stride, n_rows)
    of_row = of_eight_rows if n_rows == ROWS else of_own_rows

    @cuda.jit(launch_bounds=(32 * WARPS, RESIDENT))
    def attend_tiles(out, q, projected, k_pages, v_pages, block_table, row_slot, row_pos, tiles, kept, sums, stride,
                     max_pages, rows, heads, n_kv, first_page, n_pages, n_words):
        """Grid (tiles of 4 warps, n_kv), block (32, 4). Unit u of a KV head, a warp's work, is rows 8 (u // group) ..
        + 7 of its query head u % group; the last tiles, which see the most keys, come first.

        If expanded, k_pages and v_pages hold pages first_page .. + n_pages - 1 of the sequence, as slot 0 of a table.
        `sums` has 256 floats for each unit, between two pieces: of each lane `high` and `total`."""
        q_tile = cuda.shared.array(n_query, uint32, alignment=16)
        tile = cuda.shared.array(TILE, uint32, alignment=16)
        p_tile = cuda.shared.array(P_TILE, uint32, alignment=16)
        if sparse:
            words_at = cuda.shared.array(1, uint32)     # where the words of `kept` begin, for want of registers
        # Local arrays: all indices are constants once unrolled, so these are registers.
        o = cuda.local.array(n_outputs, float32)
        s = cuda.local.array(16, float32)
        loaded = cuda.local.array(LOADED, uint32)
        high = cuda.local.array(4, float32)   # of the lane's 4 score rows: maximum so far,
        total = cuda.local.array(4, float32)  # sum of the lane's own keys,
        scale = cuda.local.array(4, float32)  # and the rescaling of a page

        lane, warp, kv_head = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y), uint32(cuda.blockIdx.y)
        group = uint32(heads // n_kv)
        begin = uint32(0)                   # of the part, whose rows count from there on
        first_unit = uint32(uint32(cuda.gridDim.x - uint32(1) - cuda.blockIdx.x) * uint32(WARPS))
        if packed:
            listed = uint32(uint32(3) * uint32(cuda.blockIdx.x))
            begin, rows = uint32(tiles[listed]), uint32(tiles[uint32(listed + uint32(1))])
            first_unit = uint32(tiles[uint32(listed + uint32(2))])
        unit = uint32(first_unit + warp)
        head = uint32(uint32(kv_head * group) + uint32(unit % group))
        row = uint32(uint32(unit // group) * uint32(ROWS))
        slot, start = uint32(row_slot[begin]), uint32(row_pos[begin])
        position = uint32(start + row)  # of the warp's first row
        block_rows = uint32(uint32(uint32(first_unit + uint32(WARPS - 1)) // group + uint32(1)) * uint32(ROWS))
        last_key = uint32(start + uint32(min(block_rows, rows)) - uint32(1))  # that any row of the block sees
        is_last = True
        if expanded:        # from here on, positions and keys count from the piece's first key
            first_key, n_keys = uint32(first_page * uint32(PAGE)), uint32(n_pages * uint32(PAGE))
            if first_key > last_key:
                return
            position, last_key = uint32(position - first_key), uint32(last_key - first_key)
            slot, is_last = uint32(0), last_key < n_keys
            last_key = uint32(min(last_key, uint32(n_keys - uint32(1))))
        n_visits = uint32(uint32(last_key // uint32(PAGE)) + uint32(1))     # pages that are read
        kept_row, place = uint32(0), uint32(0)
        if sparse:
            query_page = uint32(uint32(first_unit // group) // uint32(PAGE // ROWS))
            kept_row = uint32(uint32(uint32(query_page * n_kv) + kv_head) * n_words)
            if expanded:    # pages count from the piece's first one, a multiple of 32, in `kept`, too
                kept_row = uint32(kept_row + uint32(first_page // uint32(32)))
            n_visits = count_kept(kept, kept_row, n_visits)
            if n_visits == uint32(0):
                return
            if lane == uint32(0) and warp == uint32(0):
                words_at[0] = kept_row
            place = next_kept(kept, kept_row, uint32(0))
        upper, key_lane = uint32(lane & uint32(1)), uint32(lane >> uint32(1))
        own, row_lane = uint32(0), lane     # the first row of the warp whose output is the lane's; its place in a row
        if n_rows != ROWS:
            own, row_lane = uint32(upper * uint32(n_rows)), key_lane

        for r in range(uint32(n_rows)):
            r = uint32(own + r)
            source = uint32(begin + uint32(min(uint32(row + r), uint32(rows - uint32(1)))))
            at = uint32(uint32(uint32(source * heads) + head) * uint32(head_dim) + row_lane * uint32(DIMS))
            w0, w1, w2, w3 = load_words4(q, at)
            store_words4(q_tile, uint32(uint32(warp * uint32(ROWS) + r) * uint32(q_stride) + row_lane * uint32(4)), w0,
                         w1, w2, w3)
        for i in range(uint32(n_outputs)):
            o[i] = float32(0.0)
        for i in range(uint32(4)):
            high[i], total[i] = float32(MINUS_INFINITY), float32(0.0)
        of_unit = uint32(0)
        if expanded:
            of_unit = uint32(uint32(uint32(row // uint32(ROWS)) * heads + head) * uint32(32 * 8) + lane * uint32(8))
            if first_page > uint32(0) and row < rows:        # go on where the piece before has stopped
                high[0], high[1], high[2], high[3] = load_floats4(sums, of_unit)
                total[0], total[1], total[2], total[3] = load_floats4(sums, uint32(of_unit + uint32(4)))
                for r in range(uint32(n_rows)):
                    if uint32(row + own + r) < rows:
                        at = uint32(uint32(uint32(row + own + r) * heads) + head)
                        at = uint32(at * uint32(head_dim) + row_lane * uint32(DIMS))
                        i = uint32(r * uint32(DIMS))
                        for n in range(uint32(2)):
                            o[i], o[i + uint32(1)], o[i + uint32(2)], o[i + uint32(3)] = load_floats4(
                                out, uint32(at + uint32(4) * n))
                            i = uint32(i + uint32(4))

        # Shared addresses: of the lane's rows of q, its row of a tile of keys, its part of a tile of values, and of the
        # rows of p that it reads and writes; and where the lane puts its share of a tile.
        q_at, k_at, put_key = score_addresses(q_tile, tile, uint32(q_stride), warp, lane)
        v_at = shared_address(tile) + uint64(uint32(row_lane * uint32(16)))
        p_at = shared_address(p_tile) + uint64(uint32(warp * uint32(ROWS * 4 * PAGE)))
        own_p_at = p_at + uint64(uint32(upper * uint32(4 * 4 * PAGE) + uint32(16) * key_lane))
        p_at = p_at + uint64(uint32(own * uint32(4 * PAGE)))
        put_value = shared_address(tile) + uint64(
            uint32(uint32(uint32(warp * uint32(rows_at_once)) + uint32(lane // uint32(32 // rows_at_once)))
                   * uint32(4 * q_stride) + uint32(16) * uint32(lane % uint32(32 // rows_at_once))))
        page = head_of_page(block_table, max_pages, slot, place, kv_head, n_kv)
        load_keys(loaded, k_pages, page, uint32(0), uint32(last_key - uint32(place * uint32(PAGE))), lane, warp)
        for visit in range(n_visits):
            number = place if sparse else uint32(visit)
            first = uint32(number * uint32(PAGE))
            last = uint32(last_key - first)
            next_page = page
            if not sparse and last >= uint32(PAGE):
                next_page = head_of_page(block_table, max_pages, slot, uint32(number + uint32(1)), kv_head, n_kv)
            # Does a row of the warp see a key? Signed: it may stand before the piece.
            sees = int32(first) < int32(position + uint32(ROWS)) and row < rows
            for i in range(uint32(16)):
                s[i] = float32(0.0)
            for part in range(uint32(n_parts)):
                cuda.syncthreads()  # no warp reads the tile before any more
                store_tile(loaded, put_key, uint32(2 * WARPS * KEY_STRIDE))
                cuda.syncthreads()
                if part < uint32(n_parts - 1):
                    load_keys(loaded, k_pages, page, uint32(1), last, lane, warp)
                else:
                    load_values(loaded, v_pages, page, uint32(0), last, lane, warp)
                if sees:
                    for c in range(uint32(TILE_DIMS // 32)):
                        of_chunk = uint32(uint32(c) * uint32(64))  # bytes of 32 dims
                        add_scores(s, q_at + uint64(uint32(uint32(part) * uint32(2 * TILE_DIMS) + of_chunk)),
                                   k_at + uint64(of_chunk))
            if sees:
                if int32(first + uint32(PAGE - 1)) > int32(position):  # some row does not see every key
                    for i in range(uint32(4)):
                        limit = uint32(position + upper * uint32(4) + i)  # the last key that the row sees
                        for j in range(uint32(4)):
                            n, key = uint32(uint32(4) * i + j), uint32(first + uint32(4) * key_lane + j)
                            s[n] = s[n] if int32(key) <= int32(limit) else float32(MINUS_INFINITY)
                moved = False
                for i in range(uint32(4)):
                    n = uint32(uint32(4) * i)
                    moved = moved | any_above(s[n], s[n + uint32(1)], s[n + uint32(2)], s[n + uint32(3)], high[i])
                if cuda.any_sync(EVERY_LANE, moved):
                    for i in range(uint32(4)):
                        n = uint32(uint32(4) * i)
                        a, b = float_max(s[n], s[n + uint32(1)]), float_max(s[n + uint32(2)], s[n + uint32(3)])
                        new = float_max(high[i], half_warp_max(float_max(a, b)))
                        scale[i] = power_of_two(high[i] * float32(LOG2E) - new * float32(LOG2E))  # 1 if it stays
                        lost = any_nan(s[n], s[n + uint32(1)], s[n + uint32(2)], s[n + uint32(3)])
                        total[i] = float32(NAN) if lost else total[i] * scale[i]
                        high[i] = new
                    for r in range(uint32(n_rows)):
                        f = of_row(scale, r)
                        for d in range(uint32(DIMS)):
                            o[r * uint32(DIMS) + d] = o[r * uint32(DIMS) + d] * f
                for i in range(uint32(4)):
                    n, high2 = uint32(uint32(4) * i), high[i] * float32(LOG2E)
                    a = power_of_two(cuda.fma(s[n], float32(LOG2E), -high2))
                    b = power_of_two(cuda.fma(s[n + uint32(1)], float32(LOG2E), -high2))
                    c = power_of_two(cuda.fma(s[n + uint32(2)], float32(LOG2E), -high2))
                    d = power_of_two(cuda.fma(s[n + uint32(3)], float32(LOG2E), -high2))
                    total[i] = total[i] + ((a + b) + (c + d))
                    ab, cd = pack_half2(a, b), pack_half2(c, d)
                    store_shared4(own_p_at + uint64(uint32(i * uint32(4 * PAGE))), both_low(ab), both_high(ab),
                                  both_low(cd), both_high(cd))
                cuda.syncwarp()
            for part in range(uint32(n_parts)):
                cuda.syncthreads()
                store_tile(loaded, put_value, uint32(WARPS * rows_at_once * q_stride))
                cuda.syncthreads()
                if part < uint32(n_parts - 1):
                    load_values(loaded, v_pages, page, uint32(1), last, lane, warp)
                elif sparse:        # the next page is looked for only here, for want of registers
                    if uint32(uint32(visit) + uint32(1)) < n_visits:
                        place = next_kept(kept, uint32(words_at[0]), uint32(place + uint32(1)))
                        next_page = head_of_page(block_table, max_pages, slot, place, kv_head, n_kv)
                        left = uint32(last_key - uint32(place * uint32(PAGE)))
                        load_keys(loaded, k_pages, next_page, uint32(0), left, lane, warp)
                elif last >= uint32(PAGE):
                    load_keys(loaded, k_pages, next_page, uint32(0), uint32(last - uint32(PAGE)), lane, warp)
                if sees:
                    for c in range(uint32(tile_values // CHAIN)):
                        h = cuda.local.array(n_chains, uint32)
                        of_part = uint32(uint32(part) * uint32(4 * tile_values))
                        at = p_at + uint64(uint32(of_part + uint32(c) * uint32(4 * CHAIN)))
                        v = v_at + uint64(uint32(uint32(c) * uint32(CHAIN * 4 * q_stride)))
                        chain_values(h, at, v, True)
                        chain_values(h, at + uint64(16), v + uint64(16 * q_stride), False)
                        chain_values(h, at + uint64(32), v + uint64(32 * q_stride), False)
                        chain_values(h, at + uint64(48), v + uint64(48 * q_stride), False)
                        for n in range(uint32(n_chains)):
                            i = uint32(uint32(2) * n)
                            o[i] = o[i] + half2_low(h[n])
                            o[i + uint32(1)] = o[i + uint32(1)] + half2_high(h[n])
            page = next_page

        if not is_last and row < rows:
            store_floats4(sums, of_unit, high[0], high[1], high[2], high[3])
            store_floats4(sums, uint32(of_unit + uint32(4)), total[0], total[1], total[2], total[3])
        for i in range(uint32(4)):
            total[i] = half_warp_sum(total[i])
        for r in range(uint32(n_rows)):
            f = div_rn(float32(1.0), of_row(total, r)) if is_last else float32(1.0)
            if uint32(row + own + r) < rows:
                row_head = uint32(uint32(uint32(begin + row + own + r) * heads) + head)
                at = uint32(row_head * uint32(head_dim) + row_lane * uint32(DIMS))
                i = uint32(r * uint32(DIMS))
                for n in range(uint32(2)):
                    store_floats4(out, uint32(at + uint32(4) * n), *scaled(o, i, f))
                    i = uint32(i + uint32(4))
        if finishes and is_last and row < rows:     # not unrolled: it would be a large part of the program
            for r in range(uint32(min(uint32(n_rows), uint32(rows - row)))):
                r = uint32(row + own + uint32(r))
                inside = r < rows           # not where only other lanes have a row left: all take part in turning
                r = uint32(begin + uint32(min(r, uint32(rows - uint32(1)))))
                at = uint32(uint32(uint32(r * heads) + head) * uint32(head_dim) + row_lane * uint32(DIMS))
                first, second = load_floats4(out, at), load_floats4(out, uint32(at + uint32(4)))
                if expanded:
                    both = turn_back(first + second, lane, row_lane)
                    first, second = both[:4], both[4:]
                if gated:
                    gate_at = uint32(uint32(r * stride) + head * uint32(2 * head_dim) + uint32(head_dim))
                    gate_at = uint32(gate_at + row_lane * uint32(DIMS))
                    first = close(first, load_floats4(projected, gate_at))
                    second = close(second, load_floats4(projected, uint32(gate_at + uint32(4))))
                if inside:
                    store_floats4(out, at, first[0], first[1], first[2], first[3])
                    store_floats4(out, uint32(at + uint32(4)), second[0], second[1], second[2], second[3])

    return attend_tiles


def n_tiles(rows, group):
    """How many blocks of threads a KV head has for so many rows of a part. group: query heads per KV head."""
    return -(-(-(-rows // ROWS) * group) // WARPS)


def most_tiles(rows, parts, group):
    """No packed launch of so many rows and parts has more tiles."""
    return rows * group // (ROWS * WARPS) + parts * (group // WARPS + 2)


def tiles_of(lengths, starts, group):
    """int32 [blocks, 3]: the tiles of a packed launch whose parts have `lengths` rows and begin at the positions
    `starts` of their texts. Those that see the most keys come first."""
    lengths, starts = np.asarray(lengths), np.asarray(starts)
    counts = np.array([n_tiles(rows, group) for rows in lengths.tolist()])
    part = np.repeat(np.arange(len(lengths)), counts)
    unit = WARPS * (np.arange(len(part)) - np.repeat(np.cumsum(counts) - counts, counts))
    keys = starts[part] + np.minimum((unit + WARPS - 1) // group * ROWS + ROWS, lengths[part])
    tiles = np.stack([(np.cumsum(lengths) - lengths)[part], lengths[part], unit], axis=1).astype(np.int32)
    return tiles[np.argsort(-keys, kind="stable")]


def attend_prefill(card, out, q, qkv, pages, places, rows, *, tiles=None, piece=None, sums=None, kept=None,
                   n_keys=None, stream=None):
    """out float32 [rows, heads * head_dim] for rows whose keys and values are in the pages already. They are rows of
    one slot (places.slots[0]) at positions places.positions[0], places.positions[0] + 1, ...; or, where there are
    tiles, int32 [blocks, 3] of `tiles_of`, parts of texts. q float16 [rows, heads, head_dim] as `norm_rope_q` makes it;
    of `qkv` the gates are read.

    kept: the pages that a sparse prompt reads, uint32 [query pages, n_kv, words]; its first row is at a multiple of 64.
    For pages of few bits, which know no tiles: piece, a kernels/kv_expand.py Piece, and sums, any float32 array of at
    least heads * 32 elements for each of the rows, rounded up to ROWS. n_keys: that the last row sees, if the host
    knows it: pieces behind them are not launched. Writes out, piece and sums, never allocates."""
    heads, products = qkv.heads, qkv.products
    expanded, max_pages = pages.format.expands, pages.block_table.shape[1]
    kernel = tiles_kernel(expanded, heads.head_dim, heads.gated, tiles is not None, kept is not None)
    grid = (n_tiles(rows, heads.group) if tiles is None else tiles.shape[0], heads.n_kv_heads)
    tiles = places.slots if tiles is None else tiles.reshape(-1)    # arrays that the kernel does not look at
    kept, n_words = (places.slots, 0) if kept is None else (kept.reshape(-1), kept.shape[-1])
    halves, sums, n_pages = (piece, sums, piece.n_pages) if expanded else (pages, out, max_pages)
    held = max_pages if n_keys is None else min(-(-n_keys // PAGE), max_pages)
    for first in range(0, held, n_pages):           # in pieces behind the last key, all blocks end at once
        if expanded:
            expand_pages(card, piece, pages, places, rows, first, stream=stream)
        card.launch(kernel, grid, (32, WARPS), out.reshape(-1), q.reshape(-1), products.values.reshape(-1),
                    halves.k.reshape(-1), halves.v.reshape(-1), halves.block_table.reshape(-1), places.slots,
                    places.positions, tiles, kept, sums.reshape(-1), products.stride, halves.block_table.shape[1],
                    rows, heads.n_heads, heads.n_kv_heads, first, n_pages, n_words, stream=stream)


# ---- check -------------------------------------------------------------------------------------------------

CASES = [((4, 2, 1), QWEN35), ((4, 2, 65), QWEN35), ((16, 4, 33), QWEN35), ((24, 4, 63), QWEN35),
         ((4, 2, 500), QWEN35), ((4, 2, 1), QWEN3), ((4, 4, 65), QWEN3), ((10, 2, 131), QWEN3), ((3, 1, 12), QWEN3),
         ((4, 2, 77), (128, 64, True)), ((4, 2, 70), (256, 128, False))]     # (heads, n_kv, rows = tokens), shape
PACKED = [((4, 2), QWEN3, ((0, 1), (0, 65), (64, 130), (0, 8), (0, 23))), ((3, 1), QWEN3, ((0, 12), (128, 140))),
          ((4, 2), QWEN35, ((0, 33), (64, 71), (0, 3)))]    # (heads, n_kv), shape, (position, end) of each part
TIMED = [(4, 2, 64, 512), (16, 4, 512, 512), (16, 4, 512, 4608)]  # heads, n_kv, rows, tokens

# Relative L2 error of a row of a head. With scores as large as those of `sample_inputs`, partial sums of a
# score's chains are some 0.15: 256 roundings of 2^-13 / sqrt(12) each make 6e-4, those of v and p add 3e-4.
# Five standard deviations for the worst row; all rows together stay below one of 2^-10.
TOLERANCE, TOLERANCE_ALL = 2.0 ** -8, 2.0 ** -10


def sample_inputs(heads, n, rows, seed=0):
    """q float16 [rows, heads, D], projected float32 [rows, stride] with the gates, if the heads have any, and 4 floats
    of padding, k, v float32 of n tokens, on the host; scores of about 1.5."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    d = heads.head_dim
    return ((normal(rows, heads.n_heads, d) * 1.5 * d ** -0.5).astype(np.float16), normal(rows, heads.k_column + 4),
            normal(n, heads.n_kv_heads, d), normal(n, heads.n_kv_heads, d))


def gates(projected, heads):
    """[rows, heads, D] of [rows, stride], or None."""
    both = projected[:, :heads.k_column].reshape(-1, heads.n_heads, heads.query_width)
    return both[:, :, heads.head_dim:] if heads.gated else None


def paged(format, name, sequences, seed=0):
    """Float [tokens, n_kv, D] of each slot -> pages of one of the format's arrays, "keys" or "values" (every byte 255
    where no token is: NaN in floats), and block table (-1 where no page is)."""
    counts = [-(-len(x) // PAGE) for x in sequences]
    numbers = np.random.default_rng(seed).permutation(sum(counts) + 3)
    table = np.full((len(sequences), max(counts) + 1), -1, np.int32)
    shape, dtype = format.arrays(len(numbers), *sequences[0].shape[1:])[name]
    pages = np.full(np.prod(shape) * np.dtype(dtype).itemsize, 255, np.uint8).view(dtype).reshape(shape)
    for slot, x in enumerate(sequences):
        table[slot, :counts[slot]], numbers = numbers[:counts[slot]], numbers[counts[slot]:]
        for t, row in enumerate(format.kinds[name].encode(x)):
            pages[table[slot, t // PAGE], :, t % PAGE] = row
    return pages, table


def upload_pages(card, format, k, v):
    """Pages on a card with the keys and values of one sequence, slot 0."""
    (k_pages, table), (v_pages, _) = paged(format, "keys", [k]), paged(format, "values", [v])
    return Pages(format, *map(card.upload, (k_pages, v_pages, table)))


def piece_of(card, format, heads, rows, n_pages=2):
    """What `attend_prefill` takes for so many rows in this format, poisoned: its arguments `piece` and `sums`."""
    piece = Piece.alloc(card, format, heads.n_kv_heads, heads.head_dim, n_pages)
    sums = card.alloc((-(-rows // ROWS) * ROWS, heads.n_heads * 32), np.float32)
    for array in (sums, piece.k, piece.v) if piece else ():
        card.poison(array)
    return {"piece": piece, "sums": sums}


def upload_gates(card, projected, heads):
    """A QKV on a card of a host array [rows, stride], of which `attend_prefill` reads the gates alone."""
    return QKV(Projected(card.upload(projected).reshape(-1), projected.shape[1]), heads, None, None, None)


def head_error(got, want, n_heads):
    """The largest relative L2 error of a row of a head. AssertionError beyond the tolerance, or NaN."""
    by_head = lambda x: np.linalg.norm(x.reshape(len(x), n_heads, -1), axis=-1)
    error = np.max(by_head(got - want) / by_head(want))
    assert error <= TOLERANCE, f"error {error}"
    return error


def launcher(card, format, heads, inputs, start, out, n_pages=2):
    """A function that queues one launch for rows at positions `start` and on; n_pages: of a piece."""
    q, projected, k, v = inputs
    rows, pages = len(q), upload_pages(card, format, k, v)
    places = Places(card.upload(np.zeros(rows, np.int32)), card.upload(np.arange(start, start + rows, dtype=np.int32)))
    q, qkv, piece = card.upload(q), upload_gates(card, projected, heads), piece_of(card, format, heads, rows, n_pages)
    return lambda: attend_prefill(card, out, q, qkv, pages, places, rows, **piece)


def check(card, format, case):
    """Compares with float64 on what the format holds; the output is poisoned, so are pages beyond the live length.
    Returns the largest relative L2 error of a row of a head."""
    (n_heads, n_kv, n), shape = case
    heads = heads_of(n_heads, n_kv, shape)
    inputs = sample_inputs(heads, n, n)
    out = card.alloc((n + 1, n_heads * heads.head_dim), np.float32)
    card.poison(out)
    launcher(card, format, heads, inputs, 0, out[:n])()
    got = card.download(out)
    q, projected, k, v = inputs
    k, v = (turned_back(kind, kind.decode(kind.encode(x))) for kind, x in zip(format.kinds.values(), (k, v)))
    want = attention_reference(turned_back(format, q), k, v, gates(projected, heads), np.arange(n))
    error = head_error(got[:n], want, n_heads)
    assert np.linalg.norm(got[:n] - want) <= TOLERANCE_ALL * np.linalg.norm(want)
    assert np.isnan(got[n]).all(), "wrote on"
    return error


def check_packed(card, case):
    """Parts of several texts in one launch have the bits of a launch for each; the row behind them stays poisoned.
    Returns 0, the error."""
    (n_heads, n_kv), shape, parts = case
    format, heads = KV_FORMATS["float16"], heads_of(n_heads, n_kv, shape)
    lengths, starts = [end - start for start, end in parts], [start for start, _ in parts]
    texts = [sample_inputs(heads, end, end - start, seed) for seed, (start, end) in enumerate(parts)]
    (k_pages, table), (v_pages, _) = (paged(format, name, [text[i] for text in texts])
                                       for i, name in ((2, "keys"), (3, "values")))
    pages = Pages(format, *map(card.upload, (k_pages, v_pages, table)))
    slots = np.repeat(np.arange(len(parts), dtype=np.int32), lengths)
    positions = np.concatenate([np.arange(*part, dtype=np.int32) for part in parts])
    rows, places = len(slots), Places(card.upload(slots), card.upload(positions))
    q, projected = (np.concatenate([text[i] for text in texts]) for i in (0, 1))
    out = card.alloc((rows + 1, n_heads * heads.head_dim), np.float32)
    card.poison(out)
    attend_prefill(card, out, card.upload(q), upload_gates(card, projected, heads), pages, places, rows,
                   tiles=card.upload(tiles := tiles_of(lengths, starts, heads.group)))
    assert len(tiles) <= most_tiles(rows, len(parts), heads.group)
    got, begin = card.download(out), 0
    for text, start, n in zip(texts, starts, lengths):
        alone = card.alloc((n, n_heads * heads.head_dim), np.float32)
        launcher(card, format, heads, text, start, alone)()
        np.testing.assert_array_equal(got[begin:begin + n], card.download(alone))
        begin += n
    assert np.isnan(got[rows]).all(), "wrote on"
    return 0.0


def cases(card):
    """The checked cases, then the times of a chunk of 512 rows at the end of a context."""
    for case in PACKED:
        (n_heads, n_kv), shape, parts = case
        yield Case(f"{n_heads}/{n_kv} heads {shape}, {len(parts)} parts", lambda case=case: check_packed(card, case))
    for format in KV_FORMATS.values():
        for case in CASES:
            (n_heads, n_kv, n), shape = case
            yield Case(f"{n_heads}/{n_kv} heads {shape}, {n}, {format.name}",
                       lambda format=format, case=case: check(card, format, case))
        for n_heads, n_kv, rows, n in TIMED:
            heads = heads_of(n_heads, n_kv)
            out = card.alloc((rows, n_heads * heads.head_dim), np.float32)
            launch = launcher(card, format, heads, sample_inputs(heads, n, rows), n - rows, out, PIECE_PAGES)
            n_ops = 4 * heads.head_dim * n_heads * rows * (2 * n - rows + 1) // 2
            yield Case(f"{rows} rows of {n}, {n_heads}/{n_kv} heads, {format.name}", launch=launch, n_ops=n_ops,
                       pipe="half2")


if __name__ == "__main__":
    main("Attention of prompts", cases)
