"""Which pages of keys a page of queries reads: the choice behind sparse attention of long prompts.

Attention of a prompt costs its length squared, and most of the keys get almost no weight. So for each page of queries
(64 tokens at an absolute multiple of 64) and each KV head, this file chooses the pages of keys that matter, and
kernels/attention.py reads no other. Of a page of queries and its group of query heads, g for each KV head:

    m_r      the mean of 16 neighbouring queries of a head, r = 0 .. 4 g - 1
    L_rp     = log2 sum_j exp(m_r . k_j)                        over the 64 keys j of page p, an earlier one
    M_p      = sum_r round(2^24 2^(L_rp - max_p L_rp) / Z_r)    Z_r: the sum of these powers over p
    kept     = the fewest pages whose M_p are the largest and hold all but 2^-s of the sum of all M_p,
               but at most n / share + base pages, the budget, where these queries see n pages

A page with a score m_r . k_j that is not finite is always kept, whatever the budget: an answer must show what is broken
as it would with all keys. Its L is NaN, and its M has the bit BROKEN.

Queries are averaged, keys are not: one key that matters is seen in a page of 64. Sums of anti-diagonals, which cost as
much, and means of keys find less of the true weights (benchmarks/results.md, section block_sparse). The first pages of
a text (`sinks`) and the nearest ones (`near`, with the page itself) are always kept, and so is everything while there
are few pages (`dense`). `Rule` holds these numbers.

    q          float16 [rows, heads, D]         rotated, with attention's scale, as for kernels/attention.py
    pages      of keys, in a KV format (kernels/kv_formats.py)
    kept       uint32 [query pages, n_kv, words]        bit p % 32 of word p / 32: whether page p is read
    counts     uint64 [slots, 2]                grow by the pages kept, and by those that the queries see, over all
                                                query pages, KV heads and layers

**The choice depends on tokens and absolute positions alone.** A page of queries is whole in a pass, or it is the last
one of its prompt. It sees keys as the KV cache holds them. Floats are summed in an order that only the page number
decides. Only integers are compared and added between pages, and their order does not matter. So neither chunks, nor
cached pages, nor micro-batches, nor pieces of an expanded format, nor cards change a bit. All queries of a page share
one choice, so later rows decide for earlier ones, too. A prompt that ends within a page chooses from its rows there.

Three kernels, for up to TURN_ROWS rows at a time, so that L takes little memory:

    mean_queries   a warp sums 16 queries of a head
    page_levels    L. As in attention, 4 warps share a KV head, a warp takes 8 means, and pages of keys pass through
                   shared memory; the values are not read. A block walks over SPAN pages
    keep_pages     a block for each page of queries and KV head: M, then a binary search for the least M that is kept

Pipe: half2, in page_levels: 1/16 of the products that attention has for its scores, so 1/32 of all. The search reads M
31 times, from L2. Pages of few bits are expanded here, too (kernels/kv_expand.py).
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint32, uint64

from kernels.attention import (EVERY_LANE, KEY_STRIDE, LOADED, LOG2E, MINUS_INFINITY, PAGE, ROWS, TILE, TILE_DIMS,
                               WARPS, half_warp_max, half_warp_sum, load_functions, paged, power_of_two,
                               product_functions, score_addresses, store_tile)
from kernels.bench import Case, main
from kernels.card import Array, CardError
from kernels.intrinsics import (div_rn, float_max, half2_high, half2_low, load_words4, log, pack_half2, round_to_int,
                                store_words4, warp_max, warp_sum)
from kernels.kv_cache import Pages, head_of_page, read_pages
from kernels.kv_expand import PIECE_PAGES, Piece, expand_pages
from kernels.kv_formats import KV_FORMATS
from kernels.records import Places
from kernels.rope import QWEN3, QWEN35, heads_of

MEAN = 16                   # queries of a head that are averaged
MEANS = PAGE // MEAN        # of a page and head
TURN_ROWS = 2048            # rows of a pass whose pages are chosen at a time
SPAN = 32                   # pages of keys that a block of page_levels walks over
KEEP_WARPS = 8              # of a block of keep_pages
UNIT = 1 << 24              # M of a mean whose whole weight is in one page
MOST_MEANS = 64             # of a page and KV head: 16 query heads share it at most
STEPS = 31                  # of the binary search: the sum of all M stays below 2^31
BROKEN = 1 << STEPS         # of an M: a level of its page is NaN
SUMS, SCALES = 2 * STEPS + 2, 2 * MOST_MEANS
THREADS = 32 * KEEP_WARPS
DIMS = 8                    # of a lane in an access of 16 bytes


class Rule(NamedTuple):
    """How pages are chosen."""

    dense: int              # query pages below this number read every page
    sinks: int              # pages at the beginning of a text that are always read; at least 1
    near: int               # nearest pages that are always read, the queries' own among them; at least 1
    base: int               # the budget of pages is base + n / share,
    share: int              # where the queries see n pages
    spare: int              # all but 2^-spare of the estimated weight is enough


RULE = Rule(dense=128, sinks=1, near=4, base=128, share=8, spare=9)
CHOICE = 0.035              # the time of a choice / the time of dense attention (benchmarks/results.md)


def most_pages(n, rule=None):
    """The most pages that a page of queries reads of the n pages that it sees, unless more are broken. rule: by default
    RULE."""
    rule = rule or RULE
    return n if n <= rule.dense else min(max(rule.base + n // rule.share, rule.sinks + rule.near), n)


def keys_worth(n, rule=None):
    """About how many keys dense attention reads in the time of a sparse query with n tokens before it, at most."""
    n_pages = n // PAGE + 1
    return n if n_pages <= (rule or RULE).dense else min(PAGE * most_pages(n_pages, rule) + int(CHOICE * n), n)


class Chooser(NamedTuple):
    """The workspace of a choice, and what was chosen."""

    means: Array            # float16 [TURN_ROWS / 16, heads, D]
    levels: Array           # float32 [n_kv, 4 g query pages, max_pages]: L
    masses: Array           # uint32 [query pages, n_kv, max_pages]: M
    kept: Array             # uint32 [query pages of a pass, n_kv, words]
    counts: Array           # uint64 [slots, 2]
    on_host: np.ndarray     # of these, page-locked

    @classmethod
    def alloc(cls, card, sizes, rows, max_pages, n_slots):
        """sizes: query heads, KV heads, and values of a head; rows: of a pass at most; max_pages: of a slot."""
        n_heads, n_kv, head_dim = sizes
        if MEANS * n_heads // n_kv > MOST_MEANS:
            raise CardError(f"sparse prompts take at most {MOST_MEANS // MEANS} query heads for a KV head, and the "
                            f"model has {n_heads // n_kv}")
        query_pages = -(-rows // PAGE)
        at_once = min(query_pages, TURN_ROWS // PAGE)
        return cls(card.alloc((at_once * MEANS, n_heads, head_dim), np.float16, "mean queries"),
                   card.alloc((n_kv, at_once * MEANS * (n_heads // n_kv), max_pages), np.float32, "levels of pages"),
                   card.alloc((at_once, n_kv, max_pages), np.uint32, "masses of pages"),
                   card.alloc((query_pages, n_kv, -(-max_pages // 32)), np.uint32, "kept pages"),
                   card.zeros((n_slots, 2), np.uint64, "counts of kept pages"),
                   card.pinned((n_slots, 2), np.uint64))

    def forget(self, slot):
        """Before the first pass of a prompt: nothing is counted yet."""
        self.counts.card.fill(self.counts[slot], 0)

    def count(self, slot):
        """Queue a copy of a slot's counts to the host. Returns it, and the event after which it is there."""
        card = self.counts.card
        card.copy_out(self.on_host[slot], self.counts[slot])
        return self.on_host[slot], card.default_stream.record()


# ---- reference ---------------------------------------------------------------------------------------------

def means_reference(q, start=0):
    """q [rows, heads, D], from a page's first row on -> float64 [ceil(rows / 16), heads, D]."""
    q = np.asarray(q, np.float64)
    return np.stack([q[at:at + MEAN].mean(axis=0) for at in range(0, len(q), MEAN)])


def levels_reference(means, k):
    """means [n, heads, D], k [keys, n_kv, D], whole pages -> float64 [n_kv, n g, pages]: L of mean i and head h of a
    group in row i g + h. NaN where a score is not finite."""
    n, n_heads, _ = means.shape
    n_kv = k.shape[1]
    scores = np.einsum("nkgd,jkd->kngj", means.reshape(n, n_kv, n_heads // n_kv, -1), np.asarray(k, np.float64))
    scores = scores.reshape(n_kv, -1, len(k) // PAGE, PAGE)
    high = scores.max(axis=-1)
    with np.errstate(invalid="ignore"):                 # inf - inf
        broken = 0 * scores.sum(axis=-1)
        return (high + np.log(np.exp(scores - high[..., None]).sum(axis=-1))) / math.log(2) + broken


def masses_reference(levels):
    """Levels [means, pages] of the earlier pages of a page of queries -> M, before it is rounded down: float64
    [means, pages]. NaN where a level is."""
    p = 2.0 ** (np.asarray(levels, np.float64) - np.fmax.reduce(levels, axis=1, keepdims=True))
    return p / np.nansum(p, axis=1, keepdims=True) * UNIT


def kept_reference(masses, rule):
    """M of the earlier pages, integers [page number of the queries] -> bool [page number + 1]."""
    number = len(masses)
    kept = np.ones(number + 1, bool)
    free = np.arange(rule.sinks, number + 1 - rule.near)
    if number < rule.dense or not len(free):
        return kept
    masses = np.asarray(masses, np.int64)
    weights, of_free = masses % BROKEN, masses[free]
    budget = max(rule.base + (number + 1) // rule.share - (number + 1 - len(free)), 0)
    total = weights.sum()
    held = total - weights[free].sum()
    least = 0               # the largest M for which what is kept would be enough, or too much
    for value in np.unique(np.minimum([*of_free, BROKEN], BROKEN)):
        above = free[of_free >= value]
        if held + weights[above].sum() >= total - (total >> rule.spare) or len(above) > budget:
            least = value
    if (of_free >= least).sum() > budget:
        least = min(least + 1, BROKEN)
    kept[free] = of_free >= least
    return kept


# ---- kernels -----------------------------------------------------------------------------------------------

@cache
def means_kernel(head_dim):
    lanes = head_dim // DIMS

    @cuda.jit
    def mean_queries(means, q, rows, heads):
        """Grid (groups of 16 rows, heads), block: 8 dims for each thread."""
        lane, number, head = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
        first = uint32(number * uint32(MEAN))
        n = uint32(min(uint32(MEAN), uint32(rows - first)))
        total = cuda.local.array(DIMS, float32)
        for i in range(uint32(DIMS)):
            total[i] = float32(0.0)
        at = uint32(uint32(uint32(first * heads) + head) * uint32(head_dim) + lane * uint32(DIMS))
        for r in range(n):
            w0, w1, w2, w3 = load_words4(q, uint32(at + uint32(uint32(r) * heads) * uint32(head_dim)))
            total[0], total[1] = total[0] + half2_low(w0), total[1] + half2_high(w0)
            total[2], total[3] = total[2] + half2_low(w1), total[3] + half2_high(w1)
            total[4], total[5] = total[4] + half2_low(w2), total[5] + half2_high(w2)
            total[6], total[7] = total[6] + half2_low(w3), total[7] + half2_high(w3)
        f = div_rn(float32(1.0), float32(n))
        at = uint32(uint32(uint32(number * heads) + head) * uint32(head_dim) + lane * uint32(DIMS))
        store_words4(means, at, pack_half2(total[0] * f, total[1] * f), pack_half2(total[2] * f, total[3] * f),
                     pack_half2(total[4] * f, total[5] * f), pack_half2(total[6] * f, total[7] * f))

    return mean_queries, lanes


@cache
def levels_kernel(expanded, head_dim):
    """expanded: whether it reads a piece in a workspace, and not the pages themselves."""
    n_parts = head_dim // TILE_DIMS
    rows_at_once = 32 * DIMS // head_dim                # means that a warp loads at once
    stride = head_dim // 2 + 4                          # words from one mean to the next in shared memory
    n_query = WARPS * ROWS * stride
    load_keys, _ = load_functions(head_dim)
    add_scores, _ = product_functions(stride, ROWS)

    @cuda.jit(launch_bounds=(32 * WARPS, 2))
    def page_levels(levels, means, k_pages, block_table, row_slot, row_pos, rows, heads, n_kv, level_rows, table_pages,
                    max_pages, first_page, n_pages, dense):
        """Grid (blocks of 32 means, n_kv, spans of SPAN pages), block (32, 4). Mean r of a KV head is that of rows
        16 (r // group) .. of its query head r % group. If expanded, k_pages holds pages first_page .. + n_pages - 1 of
        the sequence, as slot 0 of a table."""
        q_tile = cuda.shared.array(n_query, uint32)
        tile = cuda.shared.array(TILE, uint32)
        s = cuda.local.array(16, float32)
        loaded = cuda.local.array(LOADED, uint32)
        lane, warp, kv_head = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y), uint32(cuda.blockIdx.y)
        group = uint32(heads // n_kv)
        n_means = uint32(uint32(uint32(rows + uint32(MEAN - 1)) // uint32(MEAN)) * group)
        block_mean = uint32(uint32(cuda.blockIdx.x) * uint32(WARPS * ROWS))
        last_mean = uint32(min(uint32(block_mean + uint32(WARPS * ROWS - 1)), uint32(n_means - uint32(1))))
        # The block's last page of queries reads the pages before it.
        end = uint32(uint32(row_pos[uint32(0)] // uint32(PAGE)) + uint32(last_mean // uint32(MEANS * group)))
        number = uint32(first_page + uint32(cuda.blockIdx.z) * uint32(SPAN))
        if end < dense or number >= end:
            return
        end = uint32(min(end, uint32(min(uint32(number + uint32(SPAN)), uint32(first_page + n_pages)))))
        slot, offset = uint32(row_slot[uint32(0)]), uint32(0)
        if expanded:
            slot, offset = uint32(0), first_page

        mean = uint32(block_mean + warp * uint32(ROWS))     # the warp's first one
        row_lane, row = lane, uint32(0)
        if rows_at_once == 2:
            row_lane, row = uint32(lane & uint32(15)), uint32(lane >> uint32(4))
        for i in range(uint32(ROWS // rows_at_once)):
            r = uint32(row + uint32(i) * uint32(rows_at_once))
            source = uint32(min(uint32(mean + r), uint32(n_means - uint32(1))))
            at = uint32(uint32(source // group) * heads + kv_head * group + uint32(source % group))
            w0, w1, w2, w3 = load_words4(means, uint32(at * uint32(head_dim) + row_lane * uint32(DIMS)))
            at = uint32(uint32(warp * uint32(ROWS) + r) * uint32(stride) + row_lane * uint32(4))
            store_words4(q_tile, at, w0, w1, w2, w3)

        upper, key_lane = uint32(lane & uint32(1)), uint32(lane >> uint32(1))
        q_at, k_at, put_key = score_addresses(q_tile, tile, uint32(stride), warp, lane)
        first_row = uint32(uint32(kv_head * level_rows) + mean)
        page = head_of_page(block_table, table_pages, slot, uint32(number - offset), kv_head, n_kv)
        load_keys(loaded, k_pages, page, uint32(0), uint32(PAGE - 1), lane, warp)
        while number < end:
            here, number = number, uint32(number + uint32(1))
            next_page = page
            if number < end:
                next_page = head_of_page(block_table, table_pages, slot, uint32(number - offset), kv_head, n_kv)
            for i in range(uint32(16)):
                s[i] = float32(0.0)
            for part in range(uint32(n_parts)):
                cuda.syncthreads()  # no warp reads the tile before any more
                store_tile(loaded, put_key, uint32(2 * WARPS * KEY_STRIDE))
                cuda.syncthreads()
                if part < uint32(n_parts - 1):
                    load_keys(loaded, k_pages, page, uint32(1), uint32(PAGE - 1), lane, warp)
                elif number < end:
                    load_keys(loaded, k_pages, next_page, uint32(0), uint32(PAGE - 1), lane, warp)
                for c in range(uint32(TILE_DIMS // 32)):
                    of_chunk = uint32(uint32(c) * uint32(64))
                    add_scores(s, q_at + uint64(uint32(uint32(part) * uint32(2 * TILE_DIMS) + of_chunk)),
                               k_at + uint64(of_chunk))
            for i in range(uint32(4)):
                n = uint32(uint32(4) * i)
                a, b = float_max(s[n], s[n + uint32(1)]), float_max(s[n + uint32(2)], s[n + uint32(3)])
                high2 = half_warp_max(float_max(a, b)) * float32(LOG2E)
                a = power_of_two(cuda.fma(s[n], float32(LOG2E), -high2))
                b = power_of_two(cuda.fma(s[n + uint32(1)], float32(LOG2E), -high2))
                c = power_of_two(cuda.fma(s[n + uint32(2)], float32(LOG2E), -high2))
                d = power_of_two(cuda.fma(s[n + uint32(3)], float32(LOG2E), -high2))
                # Maxima, powers of two and logarithms hide a NaN. A score that is not finite makes the total NaN, and
                # that the level; 0 times what is finite changes neither.
                scores = (s[n] + s[n + uint32(1)]) + (s[n + uint32(2)] + s[n + uint32(3)])
                total = half_warp_sum(cuda.fma(float32(0.0), scores, (a + b) + (c + d)))
                level = cuda.fma(float32(0.0), total, cuda.fma(log(total), float32(LOG2E), high2))
                r = uint32(upper * uint32(4) + i)
                if key_lane == uint32(0) and uint32(mean + r) < n_means:
                    levels[uint64(uint64(first_row + r) * uint64(max_pages) + uint64(here))] = level
            page = next_page

    return page_levels


@cuda.jit(device=True, forceinline=True)
def _warp_count(x):
    """The sum of a uint32 over the lanes of a warp."""
    for offset in (16, 8, 4, 2, 1):
        x = uint32(x + uint32(cuda.shfl_xor_sync(EVERY_LANE, int32(x), offset)))
    return x


@cuda.jit(device=True, forceinline=True)
def add_up(sums, at, first, second, lane):
    """sums[at] and sums[at + 1] grow by what the lanes of a warp have in these two, uint32."""
    first, second = _warp_count(first), _warp_count(second)
    if lane == uint32(0):
        cuda.atomic.add(sums, at, first)
        cuda.atomic.add(sums, uint32(at + uint32(1)), second)


@cuda.jit(launch_bounds=32 * KEEP_WARPS)
def keep_pages(kept, masses, levels, counts, row_slot, row_pos, first_query_page, rows, n_kv, group, level_rows,
               max_pages, n_words, dense, sinks, near, base, share, spare):
    """Grid (query pages, n_kv), block (32, 8). rows: from row_pos[0] on; first_query_page: where their pages begin in
    `kept`; level_rows: of `levels` for a KV head."""
    scales = cuda.shared.array(SCALES, float32)         # of each mean: max_p L, and 2^24 / Z
    sums = cuda.shared.array(SUMS, uint32)            # pages and their M of each step of the search; all M,
    lane, warp = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)                     # and what is kept anyway
    query_page, kv_head = uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
    thread = uint32(uint32(warp * uint32(32)) + lane)
    number = uint32(uint32(uint32(row_pos[uint32(0)]) // uint32(PAGE)) + query_page)     # of the queries' own page
    seen = uint32(number + uint32(1))
    rounds = uint32(uint32(seen + uint32(THREADS - 1)) // uint32(THREADS))
    left = uint32(min(uint32(rows - query_page * uint32(PAGE)), uint32(PAGE)))
    n_means = uint32(uint32(uint32(left + uint32(MEAN - 1)) // uint32(MEAN)) * group)
    first_mean = uint32(uint32(kv_head * level_rows) + query_page * uint32(uint32(MEANS) * group))
    own = uint64(uint64(uint32(query_page * n_kv + kv_head)) * uint64(max_pages))       # of `masses`
    # The pages from `sinks` to `free_end` may be left out.
    free_end = uint32(seen - near) if seen > near else uint32(0)
    chooses = number >= dense and free_end > sinks
    least = uint32(0)
    if thread < uint32(SUMS):
        sums[thread] = uint32(0)
    if chooses:
        for i in range(uint32(uint32(n_means + uint32(KEEP_WARPS - 1)) // uint32(KEEP_WARPS))):
            r = uint32(uint32(uint32(i) * uint32(KEEP_WARPS)) + warp)
            if r < n_means:
                at = uint64(uint64(uint32(first_mean + r)) * uint64(max_pages))
                high, total = float32(MINUS_INFINITY), float32(0.0)
                for j in range(uint32(uint32(number + uint32(31)) // uint32(32))):
                    p = uint32(uint32(uint32(j) * uint32(32)) + lane)
                    if p < number:
                        high = float_max(high, levels[uint64(at + uint64(p))])
                high = warp_max(high)
                for j in range(uint32(uint32(number + uint32(31)) // uint32(32))):
                    p = uint32(uint32(uint32(j) * uint32(32)) + lane)
                    if p < number:
                        total = total + power_of_two(levels[uint64(at + uint64(p))] - high)
                total = float_max(warp_sum(total), float32(1.0))        # it is at least that, unless L holds NaN
                if lane == uint32(0):
                    scales[uint32(uint32(2) * r)] = high
                    scales[uint32(uint32(2) * r + uint32(1))] = div_rn(float32(UNIT), total)
        cuda.syncthreads()
        of_all, held = uint32(0), uint32(0)
        for i in range(rounds):
            p = uint32(uint32(uint32(i) * uint32(THREADS)) + thread)
            if p < number:
                mass, broken = uint32(0), uint32(0)
                for r in range(n_means):
                    at = uint64(uint64(uint32(first_mean + uint32(r))) * uint64(max_pages) + uint64(p))
                    n = uint32(uint32(2) * uint32(r))
                    level = levels[at]
                    part = power_of_two(level - scales[n]) * scales[uint32(n + uint32(1))]
                    mass = uint32(mass + uint32(round_to_int(part)))
                    if level != level:
                        broken = uint32(BROKEN)
                masses[uint64(own + uint64(p))] = uint32(mass | broken)
                of_all = uint32(of_all + mass)
                if p < sinks or p >= free_end:
                    held = uint32(held + mass)
        add_up(sums, uint32(2 * STEPS), of_all, held, lane)
        cuda.syncthreads()
        of_all, held = uint32(sums[uint32(2 * STEPS)]), uint32(sums[uint32(2 * STEPS + 1)])
        enough = uint32(of_all - uint32(of_all >> spare))
        n_free = uint32(free_end - sinks)
        always, budget = uint32(seen - n_free), uint32(base + uint32(seen // share))
        budget = uint32(budget - always) if budget > always else uint32(0)
        # The largest M for which what is kept would be enough, or too much, bit by bit from the highest one.
        n_least = n_free
        for step in range(uint32(STEPS)):
            tried = uint32(least | uint32(uint32(1) << uint32(uint32(STEPS - 1) - uint32(step))))
            n, mass = uint32(0), uint32(0)
            for i in range(rounds):
                p = uint32(uint32(uint32(i) * uint32(THREADS)) + thread)
                if p >= sinks and p < free_end:
                    m = uint32(masses[uint64(own + uint64(p))])
                    if m >= tried:
                        n, mass = uint32(n + uint32(1)), uint32(mass + uint32(m & uint32(BROKEN - 1)))
            at = uint32(uint32(2) * uint32(step))
            add_up(sums, at, n, mass, lane)
            cuda.syncthreads()
            n, mass = uint32(sums[at]), uint32(sums[uint32(at + uint32(1))])
            if uint32(held + mass) >= enough or n > budget:
                least, n_least = tried, n
        if n_least > budget:
            least = uint32(least + uint32(1))
    row = uint32(uint32(uint32(uint32(first_query_page + query_page) * n_kv) + kv_head) * n_words)
    n_kept = uint32(0)
    for i in range(rounds):
        p = uint32(uint32(uint32(i) * uint32(THREADS)) + thread)
        is_kept = p < seen
        if chooses and p >= sinks and p < free_end:
            is_kept = uint32(masses[uint64(own + uint64(p))]) >= least
        bits = uint32(cuda.ballot_sync(EVERY_LANE, is_kept))
        if lane == uint32(0) and p < seen:
            kept[uint32(row + uint32(p // uint32(32)))] = bits
            n_kept = uint32(n_kept + uint32(cuda.popc(bits)))
    at = uint32(uint32(2) * uint32(row_slot[uint32(0)]))
    if n_kept > uint32(0):
        cuda.atomic.add(counts, at, uint64(n_kept))
    if thread == uint32(0):
        cuda.atomic.add(counts, uint32(at + uint32(1)), uint64(seen))


def choose_pages(card, chooser, q, heads, pages, places, rows, start, *, rule=None, piece=None, stream=None):
    """Returns chooser.kept, with the pages that each page of queries reads; chooser.counts grows. The rows are
    consecutive tokens of one slot, the first one at position `start`, a multiple of 64. start None: they read every
    page, so there is nothing to choose; returns None. q float16 [rows, heads, head_dim] as `norm_rope_q` makes it;
    heads: a kernels/rope.py Heads. For pages of few bits: piece, a kernels/kv_expand.py Piece. It has a multiple of 32
    pages, or all pages of a sequence. rule: by default RULE. Writes chooser and piece, never allocates."""
    if start is None:
        return None
    rule, expanded = rule or RULE, pages.format.expands
    n_kv, level_rows, max_pages = chooser.levels.shape
    levels, means, masses = (array.reshape(-1) for array in (chooser.levels, chooser.means, chooser.masses))
    kept, n_words, counts = chooser.kept.reshape(-1), chooser.kept.shape[-1], chooser.counts.reshape(-1)
    halves, n_pages = (piece, piece.n_pages) if expanded else (pages, max_pages)
    mean, lanes = means_kernel(heads.head_dim)
    for first in range(0, rows, TURN_ROWS):
        n, at = min(TURN_ROWS, rows - first), places.rows_from(first)
        n_means = -(-n // MEAN)
        card.launch(mean, (n_means, heads.n_heads), lanes, means, q[first:].reshape(-1), n, heads.n_heads,
                    stream=stream)
        end = (start + first + n - 1) // PAGE           # the last page of queries reads the pages before it
        for first_page in range(0, min(end, max_pages), n_pages) if end >= rule.dense else ():
            if expanded:
                expand_pages(card, piece, pages, at, n, first_page, stream=stream)
            spans = -(-min(n_pages, end - first_page) // SPAN)
            card.launch(levels_kernel(expanded, heads.head_dim),
                        (-(-n_means * heads.group // (WARPS * ROWS)), n_kv, spans), (32, WARPS), levels, means,
                        halves.k.reshape(-1), halves.block_table.reshape(-1), at.slots, at.positions, n, heads.n_heads,
                        n_kv, level_rows, halves.block_table.shape[1], max_pages, first_page, n_pages, rule.dense,
                        stream=stream)
        card.launch(keep_pages, (-(-n // PAGE), n_kv), (32, KEEP_WARPS), kept, masses, levels, counts, at.slots,
                    at.positions, first // PAGE, n, n_kv, heads.group, level_rows, max_pages, n_words, *rule,
                    stream=stream)
    return chooser.kept


# ---- check -------------------------------------------------------------------------------------------------

FEW = Rule(dense=2, sinks=1, near=2, base=2, share=4, spare=6)
CASES = [((4, 2, 0, 700), QWEN35, FEW), ((2, 1, 128, 513), QWEN35, FEW), ((16, 4, 2560, 65), QWEN35, FEW),
         ((24, 4, 640, 1), QWEN35, FEW), ((4, 4, 0, 450), QWEN3, FEW), ((10, 2, 192, 400), QWEN3, FEW),
         ((16, 1, 320, 17), QWEN3, FEW._replace(base=9, spare=2)), ((4, 2, 0, 200), QWEN35, RULE),
         ((2, 1, 0, 2200), QWEN3, FEW._replace(near=1, base=0, share=9, spare=20))]
# (heads, n_kv, first position, rows), shape of the heads, rule
TIMED = [(16, 4, 512, 4608), (16, 4, 2048, 18432)]      # heads, n_kv, rows, tokens
LEVEL_TOLERANCE = 0.02              # a score is within 2^-10 of its products' sum of 2 or so, in powers of two


def sample_text(heads, n, rows, seed=0):
    """(q float16 [rows, heads, D] with attention's scale, k float32 [n, n_kv, D]): keys of a few topics, and queries
    that look for them, so that pages differ."""
    rng = np.random.default_rng(seed)
    topics = rng.standard_normal((8, heads.head_dim), np.float32)
    of_page = topics[rng.integers(0, 8, -(-n // PAGE))].repeat(PAGE, axis=0)[:n]
    k = rng.standard_normal((n, heads.n_kv_heads, heads.head_dim), np.float32) + of_page[:, None]
    of_row = topics[rng.integers(0, 8, -(-rows // PAGE))].repeat(PAGE, axis=0)[:rows]
    q = rng.standard_normal((rows, heads.n_heads, heads.head_dim), np.float32) + of_row[:, None]
    return (q * (heads.head_dim ** -0.5)).astype(np.float16), k


def upload_keys(card, format, k, more=1):
    """Pages on a card with these keys, whose values nobody reads."""
    (keys, table), (values, _) = (paged(format, name, [k]) for name in ("keys", "values"))
    table = np.pad(table, ((0, 0), (0, more)), constant_values=-1)
    return Pages(format, *map(card.upload, (keys, values, table)))


def unpacked(kept, number):
    """The bits of pages 0 .. number of words uint32 [.., words] as bools [.., number + 1]."""
    bits = np.unpackbits(np.ascontiguousarray(kept).view(np.uint8), axis=-1, bitorder="little")
    return bits[..., :number + 1].astype(bool)


def launcher(card, heads, n, rows):
    """A function that queues a choice of the last rows of n tokens, in float16."""
    q, k = sample_text(heads, n, rows)
    pages, q = upload_keys(card, KV_FORMATS["float16"], k), card.upload(q)
    chooser = Chooser.alloc(card, (heads.n_heads, heads.n_kv_heads, heads.head_dim), rows, n // PAGE + 2, 1)
    places = Places(card.zeros(rows, np.int32), card.upload(np.arange(n - rows, n, dtype=np.int32)))
    return lambda: choose_pages(card, chooser, q, heads, pages, places, rows, n - rows)


def check(card, format, case):
    """Each step with its reference, on what the step before has left on the card; the workspace is poisoned, so are
    pages behind the last key. Returns the largest error of a level."""
    (n_heads, n_kv, start, rows), shape, rule = case
    heads, n = heads_of(n_heads, n_kv, shape), start + rows
    q, k = sample_text(heads, n, rows, seed=n)
    pages = upload_keys(card, format, k)
    max_pages = pages.block_table.shape[1]
    chooser = Chooser.alloc(card, (n_heads, n_kv, heads.head_dim), rows + PAGE, max_pages, 3)
    for array in chooser[:-2]:
        card.poison(array)
    piece = Piece.alloc(card, format, n_kv, heads.head_dim, 32)
    places = Places(card.upload(np.zeros(rows, np.int32)), card.upload(np.arange(start, n, dtype=np.int32)))
    choose_pages(card, chooser, card.upload(q), heads, pages, places, rows, start, rule=rule, piece=piece)
    means, levels, masses, kept, counts = map(card.download, chooser[:-1])
    held = read_pages(format.keys, card.download(pages.k), card.download(pages.block_table), 0, n)
    first = (rows - 1) // TURN_ROWS * TURN_ROWS         # what the workspace holds is of the last turn
    want = means_reference(q[first:])
    assert np.max(np.abs(means[:len(want)] - want)) <= 2.0 ** -11 * np.max(np.abs(want))
    error, n_pages, total, seen = 0.0, -(-rows // PAGE), 0, 0
    want = levels_reference(means[:len(want)].astype(np.float64), held[:n // PAGE * PAGE])
    for page in range(n_pages):
        number = start // PAGE + page
        for head in range(n_kv):
            got = unpacked(kept[page, head], number)
            total, seen = total + int(got.sum()), seen + number + 1
            if page * PAGE < first:
                assert got[-1] and got[:rule.sinks].all()
                continue
            turn_page = page - first // PAGE
            at = MEANS * heads.group * turn_page
            n_means = heads.group * -(-min(rows - page * PAGE, PAGE) // MEAN)
            mine = np.zeros(number, np.uint32)
            if number >= rule.dense and number + 1 - rule.near > rule.sinks:
                mine = masses[turn_page, head, :number]
                of_card = levels[head, at:at + n_means, :number]
                error = max(error, float(np.max(np.abs(of_card - want[head, at:at + n_means, :number]))))
                whole = masses_reference(of_card).sum(axis=0)
                np.testing.assert_array_equal(mine >= BROKEN, np.isnan(whole))
                assert np.nanmax(np.abs(whole - mine)) <= n_means * UNIT * 2.0 ** -17
            np.testing.assert_array_equal(got, kept_reference(mine, rule))
    assert error <= LEVEL_TOLERANCE, f"error {error}"
    assert counts.tolist() == [[total, seen], [0, 0], [0, 0]]
    assert (kept[n_pages:] == kept[-1, -1, -1]).all(), "wrote on"
    return error


def cases(card):
    """The checked cases, then the times of a chunk of rows at the end of a context."""
    for format in KV_FORMATS.values():
        for case in CASES:
            yield Case(f"{case[0]} {case[1]}, {format.name}",
                       lambda format=format, case=case: check(card, format, case))
    for n_heads, n_kv, rows, n in TIMED:
        heads = heads_of(n_heads, n_kv)
        n_ops = 2 * heads.head_dim * n_heads * rows // MEAN * n
        yield Case(f"{rows} rows of {n}, {n_heads}/{n_kv} heads", launch=launcher(card, heads, n, rows), n_ops=n_ops,
                   pipe="half2")


if __name__ == "__main__":
    main("Pages that queries read", cases)
