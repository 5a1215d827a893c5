"""Attention of decoded tokens, one row per slot, in one launch: from the projections of query, gate, key and
value to the input of the output projection.

    q = rope(rms_norm(query)) / 16,   k = rope(rms_norm(key))    as float16; k and v go into the cache
    out = sum_j softmax(q . k)_j v_j * sigmoid(gate)               over the keys j = 0 .. position

The mathematics is that of kernels/rope.py, kernels/kv_cache.py and kernels/attention.py, which do the same
for prompts in three launches. Query head h reads KV head h // group, group = heads / n_kv.

    projected     float32 [rows, stride]       per head 256 query, 256 gate; from k_column on n_kv 256 keys;
                                               from v_column on n_kv 256 values
    k, v          float16 [n_pages, n_kv, 64, 256], found through block_table int32 [n_slots, max_pages]
    out           int8 [rows, heads 256] and scales float32 [rows, heads 8] (kernels/quantize.py), or float32
    row_slot, row_pos  int32 [rows],  rope_pos  int32 [3, >= rows]

**How a sequence is cut.** Pages of 64 keys are the leaves. A *unit* is 1, 2, 4, .. pages, the least power of
two that makes at most 64 units of the live pages: it follows from the row's position alone, so the bits
depend neither on the batch nor on the card, and one recorded launch serves every length, its blocks beyond
the last unit ending at once.

    grid (n_kv, rows, 64 units), a block of 8 warps per unit:     300 tokens:    5 units of  1 page
                                                                4,620 tokens:   37 units of  2 pages
    page   | 8 keys | 8 keys | .. | 8 keys |                   18,400 tokens:   36 units of  8 pages
    warp       0        1      ..     7                       262,144 tokens:   64 units of 64 pages

A warp takes 8 keys of a page for all query heads of the KV head at once, so the cache is read once; a lane
holds 8 dims of 8 keys and 8 values, 64 words. All loads of the first page are on their way before the queries
are rotated; those of the next page leave as soon as the registers of this one are free. Per page:

    scores    q . k by a chain of 4 products per half and a butterfly over the lanes; into shared memory
    softmax   a warp per head: maximum and sum of the 64 scores, probabilities rounded to half
    values    p v by chains of 8 products per half, into shared memory
    sum       a thread owns 2 dims of every other head: the 8 chains in increasing order, float32;
              pages are merged into the unit's result in increasing order, rescaled to the running maximum

The warp that a new key falls to makes it after the wait, writes it into its page for later tokens, and puts it
through shared memory into its own registers, over the row that it loaded for it and those beyond. No other warp of
any block reads it. The last block of a (row, KV head) to finish merges the units in increasing order, applies the
gate and writes the output; a counter on the card, which it sets back to zero, tells it that it is the last. A thread
has 4 dims of a head there: maxima, gates and the values of up to 16 units are under way at once, where one load would
wait for the other.

From Hopper on, where the launch before it overlaps (kernels/intrinsics.py) and the caller knows that they may be
(`early`), the keys and values of the first page are loaded before the wait, and blocks beyond the last unit end at
once: 16 launches of a 27B's token 0.123 ms for 0.136; the token 27 us less, of a 9B in Q4_K 10, of a 0.8B 6 (H100,
2026-11-21). Then the new key was still written and read back, by a warp that loaded nothing early, and units merged 4
at a time: without that a 9B's token takes 11 us less, a 0.8B's 6 (549.8 for 555.5; 2026-11-22).

The live units come first in the grid and so spread over all SMs. (With the units in grid.x, half of an H200's
SMs had two of them and half none: 37.6 us at 18,400 tokens.)

Accuracy as of kernels/attention.py, by the same chains. Pipe: half2 and fp32, about 600 instructions per lane
for 64 keys and 4 heads. Bytes: 1,024 per key and KV head, read once; 1,040 written and read per unit and
head.
"""

from functools import cache, partial as bind

import numpy as np
from numba import cuda
from numba.types import float16, float32, uint32, uint64

from kernels.compile import launches_overlap
from kernels.intrinsics import (arrive, div_rn, exp, float_as_word, float_max, half2_high, half2_low, hfma2,
                                hmul2, let_next_begin, load_floats4, load_shared, load_shared4, pack_half2,
                                shared_address, sigmoid, store_shared, store_shared4, wait_for_previous, warp_max,
                                warp_sum, word_as_float)
from kernels.attention import TOLERANCE_ALL, attention_reference, gates, head_error, load_part
from kernels.bench import Case, main
from kernels.kv_cache import PAGE, page_offset, read_pages
from kernels.norm import store_plain, store_quantized
from kernels.quantize import quantize_reference
from kernels.rope import (EPS, HEAD_DIM, QUERY_SCALE, SECTIONS, inverse_frequencies, load_head,
                          norm_rope_reference, norm_rotate, rotation, store_head, store_query)

WARPS = 8                # per block
RESIDENT = 2             # blocks that an SM must hold: bounds the registers
KEYS = PAGE // WARPS     # of a page, per warp
UNITS = 64               # at most, of a sequence
MAX_GROUP = WARPS        # query heads per KV head
DIMS = HEAD_DIM // 32    # of a lane
WORDS = HEAD_DIM // 2    # of a half-precision row
MERGED = 16              # units whose results are under way at once, when they are merged
MERGED_SHAPE = MERGED, 4  # dims of a thread
UNITS_EACH = UNITS // 32  # of a lane
NEWEST = 2 * HEAD_DIM    # numbers of the new key and value
RECORD = HEAD_DIM + 8    # floats of a unit's result: 256 values, maximum, sum, 6 unused
LOADED = KEYS * DIMS // 2
MINUS_INFINITY = float("-inf")
EVERY_LANE = 0xFFFFFFFF


# ---- parts -------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def load_keys(words, pages, page, first, last, lane):
    """Dims of a lane of 8 rows of a page, from `first` on, in 4 words each; rows beyond `last` repeat that
    one."""
    at = uint64(page + uint64(uint32(first * uint32(HEAD_DIM) + lane * uint32(DIMS))))
    if uint32(first + uint32(KEYS - 1)) <= last:
        for j in range(uint32(KEYS)):
            load_part(words, pages, uint64(at + uint64(uint32(j * uint32(HEAD_DIM)))), j)
    else:
        for j in range(uint32(KEYS)):
            key = uint32(min(j, uint32(last - first)))
            load_part(words, pages, uint64(at + uint64(uint32(key * uint32(HEAD_DIM)))), j)


@cuda.jit(device=True, forceinline=True)
def store_newest(newest, k_pages, v_pages, to, projected, k_from, v_from, lane, w, sin, cos, eps):
    """One warp: the new key and value, from these elements of `projected`, to element `to` of the pages and into
    `newest`, shared float16 [2, 256]."""
    k, v = load_head(projected, k_from, lane), load_head(projected, v_from, lane)
    k = norm_rotate(k, w, sin, cos, eps)
    store_head(newest, uint32(0), lane, k)
    store_head(newest, uint32(HEAD_DIM), lane, v)
    store_head(k_pages, to, lane, k)
    store_head(v_pages, to, lane, v)
    cuda.syncwarp()         # the warp may load that row of the page next, to put this one over it


@cuda.jit(device=True, forceinline=True)
def put_newest(words, at, own):
    """The row at a shared address becomes row `own` of the lane's 8, and those beyond it, which repeat it."""
    w0, w1, w2, w3 = load_shared4(at)
    for j in range(uint32(KEYS)):
        if j >= own:
            i = uint32(uint32(4) * j)
            words[i], words[i + uint32(1)] = w0, w1
            words[i + uint32(2)], words[i + uint32(3)] = w2, w3


@cuda.jit(device=True, forceinline=True)
def exchange(x, y, upper, offset):
    """A stage of the butterfly: of (x, y) the lower lanes keep x and the upper ones y, summed over both."""
    keep, send = (y, x) if upper else (x, y)
    return keep + cuda.shfl_xor_sync(EVERY_LANE, send, offset)


@cuda.jit(device=True, forceinline=True)
def dot_keys(query_at, k, lane):
    """q . k for the query at a shared address and 8 keys, of which each lane holds 8 dims (k: 4 words per
    key), summed over lanes of the same l % 4: lane l gets that of key l // 4."""
    x = cuda.local.array(KEYS, float32)
    q0, q1, q2, q3 = load_shared4(query_at)
    for j in range(uint32(KEYS)):
        i = uint32(uint32(4) * j)
        h = hmul2(q0, k[i])
        h = hfma2(q1, k[i + uint32(1)], h)
        h = hfma2(q2, k[i + uint32(2)], h)
        h = hfma2(q3, k[i + uint32(3)], h)
        x[j] = half2_low(h) + half2_high(h)
    upper = (lane & uint32(16)) != uint32(0)
    x0, x1 = exchange(x[0], x[4], upper, 16), exchange(x[1], x[5], upper, 16)
    x2, x3 = exchange(x[2], x[6], upper, 16), exchange(x[3], x[7], upper, 16)
    upper = (lane & uint32(8)) != uint32(0)
    x0, x1 = exchange(x0, x2, upper, 8), exchange(x1, x3, upper, 8)
    return exchange(x0, x1, (lane & uint32(4)) != uint32(0), 4)


@cuda.jit(device=True, forceinline=True)
def dot_heads(at0, at1, at2, at3, k, lane):
    """q . k for four queries: lane l gets that of query l % 4 and key l // 4."""
    x0, x1 = dot_keys(at0, k, lane), dot_keys(at1, k, lane)
    x2, x3 = dot_keys(at2, k, lane), dot_keys(at3, k, lane)
    upper = (lane & uint32(2)) != uint32(0)
    x0, x1 = exchange(x0, x2, upper, 2), exchange(x1, x3, upper, 2)
    return exchange(x0, x1, (lane & uint32(1)) != uint32(0), 1)


@cuda.jit(device=True, forceinline=True)
def chain_values(p, v, w):
    """Word w of sum over 8 keys of p v, in half precision: p 8 doubled probabilities, v 4 words per key."""
    h = hmul2(p[uint32(0)], v[w])
    for j in range(uint32(1), uint32(KEYS)):
        h = hfma2(p[j], v[uint32(uint32(4) * j + w)], h)
    return h


@cuda.jit(device=True, forceinline=True)
def weigh_units(factors, totals, partial, records, last_unit, head, lane):
    """A warp: sums of a head's units and the factors that rescale them to the highest maximum; beyond the last 0."""
    highs, sums = cuda.local.array(UNITS_EACH, float32), cuda.local.array(UNITS_EACH, float32)
    at = uint32(uint32(records + head * uint32(UNITS)) * uint32(RECORD) + uint32(HEAD_DIM))
    highest = float32(MINUS_INFINITY)
    for i in range(uint32(UNITS_EACH)):
        n = uint32(lane + uint32(32) * i)
        highs[i], sums[i] = float32(MINUS_INFINITY), float32(0.0)
        if n <= last_unit:
            highs[i] = partial[uint32(at + n * uint32(RECORD))]
            sums[i] = partial[uint32(at + n * uint32(RECORD) + uint32(1))]
        highest = float_max(highest, highs[i])
    highest = warp_max(highest)
    at = uint32(head * uint32(UNITS) + lane)
    for i in range(uint32(UNITS_EACH)):
        factors[uint32(at + uint32(32) * i)] = exp(highs[i] - highest)
        totals[uint32(at + uint32(32) * i)] = sums[i]


@cuda.jit(device=True, forceinline=True)
def load_units(values, partial, first, last, at):
    """values [MERGED, 4] <- 4 dims, from element `at` of a unit's record on, of units from `first` on; beyond
    `last` that one again."""
    for i in range(uint32(MERGED)):
        unit = uint32(min(uint32(first + i), last))
        values[i, 0], values[i, 1], values[i, 2], values[i, 3] = load_floats4(
            partial, uint32(at + unit * uint32(RECORD)))


@cuda.jit(device=True, forceinline=True)
def merge_units(acc, values, factors, totals, at):
    """acc [5] += 4 dims and the sum of the units whose factors and sums begin at `at`, in increasing order."""
    for i in range(uint32(MERGED)):
        n = uint32(at + i)
        f = factors[n]
        for d in range(uint32(4)):
            acc[d] = cuda.fma(values[i, d], f, acc[d])
        acc[4] = cuda.fma(totals[n], f, acc[4])


# ---- kernel ------------------------------------------------------------------------------------------------

@cache
def attend_kernel(group, quantized, early):
    """The kernel for `group` query heads per KV head (a constant, so that what is held per head are
    registers), with int8 or float32 output; early: see kernels/intrinsics.py."""
    n_own, is_even = (group + 1) // 2, group % 2 == 0      # heads of a thread, 2 dims of each
    n_o = 2 * n_own
    n_query, n_scores = group * HEAD_DIM, group * PAGE
    n_chains, n_units = WARPS * group * WORDS, group * UNITS
    n_quads, most = -(-group // 4), uint32(group - 1)      # of heads
    n_rounds, n_fours = -(-group * HEAD_DIM // (4 * 32 * WARPS)), group * HEAD_DIM // 4
    store = store_quantized if quantized else store_plain

    @cuda.jit(launch_bounds=(32 * WARPS, RESIDENT))
    def attend(out, scales, partial, arrived, projected, q_norm, k_norm, rope_pos, inv_freq, k_pages, v_pages,
               block_table, row_slot, row_pos, stride, k_column, v_column, n_positions, max_pages, n_kv,
               height_section, width_section, eps):
        let_next_begin()
        if not early:
            wait_for_previous()
        query = cuda.shared.array(n_query, float16)        # [head of the group][256]
        scores = cuda.shared.array(n_scores, uint32)       # [head][64 keys]: float32, then half p, doubled
        chains = cuda.shared.array(n_chains, uint32)       # [warp][head][128 words]
        factors = cuda.shared.array(n_units, float32)      # [head][..]: of this page and of the pages before,
        totals = cuda.shared.array(n_units, float32)       # or of the units at the end
        newest = cuda.shared.array(NEWEST, float16, alignment=16)       # key, then value
        is_last = cuda.shared.array(1, uint32)
        kw = cuda.local.array(LOADED, uint32)
        vw = cuda.local.array(LOADED, uint32)
        pw = cuda.local.array(KEYS, uint32)
        o = cuda.local.array(n_o, float32)
        values = cuda.local.array(MERGED_SHAPE, float32)
        acc = cuda.local.array(5, float32)
        gates = cuda.local.array(4, float32)

        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        kv_head, row, unit = uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.z)
        position, slot = uint32(row_pos[row]), uint32(row_slot[row])
        sin, cos = rotation(row, n_positions, lane, rope_pos, inv_freq, height_section, width_section)
        last_page = uint32(position // uint32(PAGE))
        shift = uint32(uint32(32) - uint32(cuda.clz(uint32(last_page // uint32(UNITS)))))
        last_unit = uint32(last_page >> shift)
        if unit > last_unit:
            return
        first_page = uint32(unit << shift)
        end_page = uint32(min(uint32(first_page + uint32(uint32(1) << shift)), uint32(last_page + uint32(1))))
        row_at = uint32(row * stride)
        first_head = uint32(kv_head * uint32(group))
        first_key = uint32(warp * uint32(KEYS))

        new_key = uint32(position % uint32(PAGE))
        new_warp = uint32(new_key // uint32(KEYS))
        page = page_offset(block_table, max_pages, slot, first_page, kv_head, n_kv)
        last = uint32(min(uint32(position - first_page * uint32(PAGE)), uint32(PAGE - 1)))  # live key
        turn = uint32(uint32(warp + uint32(WARPS - 1) - new_warp) & uint32(WARPS - 1))  # the busy warp last
        head = uint32(first_head + uint32(min(turn, most)))
        query_from = uint32(row_at + head * uint32(2 * HEAD_DIM))
        w = load_head(q_norm, uint32(0), lane)
        has_newest = unit == last_unit and warp == new_warp
        of_head = uint32(row_at + kv_head * uint32(HEAD_DIM))
        k_from, v_from = uint32(of_head + k_column), uint32(of_head + v_column)
        to = page_offset(block_table, max_pages, slot, last_page, kv_head, n_kv)
        to = uint64(to + uint64(uint32(new_key * uint32(HEAD_DIM))))
        k_w = load_head(k_norm, uint32(0), lane)
        if not early:
            x = load_head(projected, query_from, lane)
            if has_newest:
                store_newest(newest, k_pages, v_pages, to, projected, k_from, v_from, lane, k_w, sin, cos, eps)
        if first_key <= last:
            load_keys(kw, k_pages, page, first_key, last, lane)
            load_keys(vw, v_pages, page, first_key, last, lane)
        if early:
            wait_for_previous()
            x = load_head(projected, query_from, lane)
            if has_newest:
                store_newest(newest, k_pages, v_pages, to, projected, k_from, v_from, lane, k_w, sin, cos, eps)
        if turn < uint32(group):
            store_query(query, uint32(turn * uint32(HEAD_DIM)), lane, x, w, sin, cos, eps)
        cuda.syncthreads()

        high, total = float32(MINUS_INFINITY), float32(0.0)  # of the pages so far; warp g: of head g
        for i in range(uint32(n_o)):
            o[i] = float32(0.0)
        lane_key = uint32(uint32(lane & uint32(3)) * uint32(KEYS) + uint32(lane >> uint32(2)))
        word, side = uint32(thread & uint32(WORDS - 1)), uint32(thread // uint32(WORDS))
        query_at = shared_address(query) + uint64(uint32(lane * uint32(16)))
        newest_at = shared_address(newest) + uint64(uint32(lane * uint32(16)))
        p_at = shared_address(scores) + uint64(uint32(first_key * uint32(4)))
        score_at = p_at + uint64(uint32(uint32(lane >> uint32(2)) * uint32(4)))
        softmax_at = shared_address(scores) + uint64(
            uint32(uint32(warp * uint32(PAGE) + lane_key) * uint32(4)))
        chain_at = shared_address(chains) + uint64(
            uint32(uint32(warp * uint32(group * WORDS) + lane * uint32(4)) * uint32(4)))
        sum_at = shared_address(chains) + uint64(uint32(uint32(side * uint32(WORDS) + word) * uint32(4)))
        for step in range(uint32(end_page - first_page)):
            number = uint32(first_page + uint32(step) + uint32(1))
            next_last, next_page = uint32(0), page
            more = number < end_page
            if more:
                next_page = page_offset(block_table, max_pages, slot, number, kv_head, n_kv)
                next_last = uint32(min(uint32(position - number * uint32(PAGE)), uint32(PAGE - 1)))
            load_next = more and first_key <= next_last
            if first_key <= last:
                if warp == new_warp and number > last_page:
                    put_newest(kw, newest_at, uint32(new_key - first_key))
                for quad in range(uint32(n_quads)):
                    g = uint32(uint32(4) * quad)
                    x = dot_heads(query_at + uint64(uint32(g * uint32(2 * HEAD_DIM))),
                                  query_at + uint64(uint32(min(g + uint32(1), most) * uint32(2 * HEAD_DIM))),
                                  query_at + uint64(uint32(min(g + uint32(2), most) * uint32(2 * HEAD_DIM))),
                                  query_at + uint64(uint32(min(g + uint32(3), most) * uint32(2 * HEAD_DIM))),
                                  kw, lane)
                    g = uint32(min(uint32(g + uint32(lane & uint32(3))), most))  # the last head again
                    store_shared(score_at + uint64(uint32(g * uint32(4 * PAGE))), float_as_word(x))
            if load_next:
                load_keys(kw, k_pages, next_page, first_key, next_last, lane)
            cuda.syncthreads()

            if warp < uint32(group):
                a = word_as_float(load_shared(softmax_at))
                b = word_as_float(load_shared(softmax_at + uint64(128)))
                a = a if lane_key <= last else float32(MINUS_INFINITY)
                b = b if uint32(lane_key + uint32(32)) <= last else float32(MINUS_INFINITY)
                page_high = warp_max(float_max(a, b))
                a, b = exp(a - page_high), exp(b - page_high)
                page_total = warp_sum(a + b)
                store_shared(softmax_at, pack_half2(a, a))
                store_shared(softmax_at + uint64(128), pack_half2(b, b))
                new = float_max(high, page_high)
                of_page, before = exp(page_high - new), exp(high - new)
                high, total = new, cuda.fma(page_total, of_page, total * before)
                if lane == uint32(0):
                    factors[warp], totals[warp] = of_page, before
            cuda.syncthreads()

            if first_key <= last:
                if warp == new_warp and number > last_page:
                    put_newest(vw, newest_at + uint64(2 * HEAD_DIM), uint32(new_key - first_key))
                for g in range(uint32(group)):
                    at = p_at + uint64(uint32(g * uint32(4 * PAGE)))
                    pw[0], pw[1], pw[2], pw[3] = load_shared4(at)
                    pw[4], pw[5], pw[6], pw[7] = load_shared4(at + uint64(16))
                    store_shared4(chain_at + uint64(uint32(g * uint32(4 * WORDS))),
                                  chain_values(pw, vw, uint32(0)), chain_values(pw, vw, uint32(1)),
                                  chain_values(pw, vw, uint32(2)), chain_values(pw, vw, uint32(3)))
            else:
                for g in range(uint32(group)):
                    store_shared4(chain_at + uint64(uint32(g * uint32(4 * WORDS))), uint32(0), uint32(0),
                                  uint32(0),
                                  uint32(0))
            if load_next:
                load_keys(vw, v_pages, next_page, first_key, next_last, lane)
            cuda.syncthreads()

            for j in range(uint32(n_own)):
                g = uint32(uint32(2) * j + side)
                if is_even or g < uint32(group):
                    x, y = float32(0.0), float32(0.0)
                    for w in range(uint32(WARPS)):
                        of_head = uint32(w * uint32(group) + uint32(2) * j)
                        h = load_shared(sum_at + uint64(uint32(of_head * uint32(4 * WORDS))))
                        x, y = x + half2_low(h), y + half2_high(h)
                    i = uint32(uint32(2) * j)
                    o[i] = cuda.fma(x, factors[g], o[i] * totals[g])
                    o[i + uint32(1)] = cuda.fma(y, factors[g], o[i + uint32(1)] * totals[g])
            page, last = next_page, next_last

        records = uint32(uint32(uint32(row * n_kv + kv_head) * uint32(group)) * uint32(UNITS))
        for j in range(uint32(n_own)):
            g = uint32(uint32(2) * j + side)
            if g < uint32(group):
                to = uint32(uint32(records + g * uint32(UNITS) + unit) * uint32(RECORD) + uint32(2) * word)
                i = uint32(uint32(2) * j)
                partial[to], partial[uint32(to + uint32(1))] = o[i], o[i + uint32(1)]
        if warp < uint32(group) and lane == uint32(0):
            to = uint32(uint32(records + warp * uint32(UNITS) + unit) * uint32(RECORD) + uint32(HEAD_DIM))
            partial[to], partial[uint32(to + uint32(1))] = high, total

        cuda.syncthreads()
        if thread == uint32(0):
            is_last[uint32(0)] = uint32(arrive(arrived, uint32(row * n_kv + kv_head)) == last_unit)
        cuda.syncthreads()
        if is_last[uint32(0)] == uint32(0):
            return
        if thread == uint32(0):
            arrived[uint32(row * n_kv + kv_head)] = uint32(0)
        gate_at = uint32(row_at + first_head * uint32(2 * HEAD_DIM) + uint32(HEAD_DIM))
        to = uint32(uint32(row * n_kv * uint32(group) + first_head) * uint32(HEAD_DIM))
        for j in range(uint32(n_rounds)):
            four = uint32(thread + j * uint32(32 * WARPS))
            inside = four < uint32(n_fours)
            g = uint32(min(uint32(four // uint32(HEAD_DIM // 4)), most))
            dim = uint32(uint32(4) * four % uint32(HEAD_DIM))
            of_units = uint32(uint32(records + g * uint32(UNITS)) * uint32(RECORD) + dim)
            load_units(values, partial, uint32(0), last_unit, of_units)
            for d in range(uint32(4)):
                gates[d] = projected[uint32(gate_at + g * uint32(2 * HEAD_DIM) + dim + d)]
            if j == uint32(0):
                if warp < uint32(group):
                    weigh_units(factors, totals, partial, records, last_unit, warp, lane)
                cuda.syncthreads()
            for d in range(uint32(5)):
                acc[d] = float32(0.0)
            merge_units(acc, values, factors, totals, uint32(g * uint32(UNITS)))
            for step in range(uint32(1), uint32(uint32(last_unit // uint32(MERGED)) + uint32(1))):
                first = uint32(uint32(step) * uint32(MERGED))
                load_units(values, partial, first, last_unit, of_units)
                merge_units(acc, values, factors, totals, uint32(g * uint32(UNITS) + first))
            r = div_rn(float32(1.0), acc[4])
            for d in range(uint32(4)):
                acc[d] = acc[d] * r * sigmoid(gates[d])
            store(out, scales, uint32(to + uint32(4) * four), inside, acc[0] if inside else float32(0.0),
                  acc[1] if inside else float32(0.0), acc[2] if inside else float32(0.0),
                  acc[3] if inside else float32(0.0))

    return attend


# ---- launch ------------------------------------------------------------------------------------------------

def partials_shape(rows, heads):
    """Shape of the float32 scratch array of `attend_decode`, whatever the context: 66 KiB per row and
    head."""
    return rows, heads, UNITS, RECORD


def attend_decode(card, out, scales, projected, stride, k_column, v_column, q_norm, k_norm, rope_pos,
                  inv_freq,
                  k_pages, v_pages, block_table, row_slot, row_pos, partials, arrived, rows, heads, n_kv,
                  sections,
                  eps, early=False, stream=None):
    """out int8 [rows, heads 256] and scales float32 [rows, heads 8], or out float32 and scales None: row b is
    one token of slot row_slot[b] at position row_pos[b]; its key and value are written into the pages, those
    before must be there.

    projected float32 [rows, stride] as in the text above, q_norm and k_norm float32 [256], rope_pos int32 [3,
    >= rows], inv_freq float32 [32], pages float16 [n_pages, n_kv, 64, 256], block_table int32 [n_slots,
    max_pages], row_slot and row_pos int32 [rows], one row per slot; partials float32 of `partials_shape`
    (these rows or more), arrived uint32 of rows n_kv elements or more, zero before the first launch and after
    each. early: pages, block_table, rope_pos, row_slot and row_pos are as they were before the last launch that does
    not overlap (kernels/intrinsics.py). Writes out, scales, the new rows of the pages and the scratch arrays; never
    allocates. ValueError: more than 8 query heads per KV head.
    """
    group = heads // n_kv
    if group > MAX_GROUP:
        raise ValueError(f"attention takes up to {MAX_GROUP} query heads per KV head, not {group}")
    is_quantized = scales is not None
    early = early and launches_overlap(card.cc)
    card.launch(attend_kernel(group, is_quantized, early), (n_kv, rows, min(UNITS, block_table.shape[1])),
                32 * WARPS,
                out.reshape(-1), (scales if is_quantized else out).reshape(-1), partials.reshape(-1),
                arrived.reshape(-1), projected.reshape(-1), q_norm, k_norm, rope_pos.reshape(-1), inv_freq,
                k_pages.reshape(-1), v_pages.reshape(-1), block_table.reshape(-1), row_slot, row_pos, stride,
                k_column,
                v_column, rope_pos.shape[1], block_table.shape[1], n_kv, sections[1], sections[2], float(eps),
                stream=stream)


# ---- check -------------------------------------------------------------------------------------------------

# heads, n_kv, positions: a row each. Beyond 4,096 tokens a unit is two pages, then four.
CASES = [(4, 2, (0, 609, 63)), (16, 4, (64, 1)), (24, 4, (65, 255, 256, 31)), (8, 2, (4095, 4096, 8320))]
TIMED = [(16, 4, 300, 1), (16, 4, 4620, 1), (16, 4, 18400, 1), (16, 4, 300, 8)]    # heads, n_kv, tokens, rows


def sample_case(heads, n_kv, positions, seed=0, max_pages=None):
    """Inputs of a launch on the host, by argument name; pages hold NaN from each row's position on."""
    rng, rows = np.random.default_rng(seed), len(positions)
    max_pages = max_pages or max(positions) // PAGE + 2
    stride = heads * 2 * HEAD_DIM + 2 * n_kv * HEAD_DIM + 12
    case = {"projected": rng.standard_normal((rows, stride), np.float32),
            "q_norm": rng.uniform(0.5, 1.5, HEAD_DIM).astype(np.float32),
            "k_norm": rng.uniform(0.5, 1.5, HEAD_DIM).astype(np.float32),
            "rope_pos": np.array([positions] * 3, np.int32), "inv_freq": inverse_frequencies(1e7)}
    held = [position // PAGE + 1 for position in positions]
    numbers = rng.permutation(sum(held))
    for name in ("k_pages", "v_pages"):
        case[name] = rng.standard_normal((sum(held), n_kv, PAGE, HEAD_DIM), np.float32).astype(np.float16)
    case["block_table"] = np.full((rows, max_pages), -1, np.int32)
    for row, position in enumerate(positions):
        case["block_table"][row, :held[row]], numbers = numbers[:held[row]], numbers[held[row]:]
        page = case["block_table"][row, position // PAGE]
        for name in ("k_pages", "v_pages"):
            case[name][page, :, position % PAGE:] = np.nan
    case["row_slot"], case["row_pos"] = np.arange(rows, dtype=np.int32), np.array(positions, np.int32)
    return case


def launcher(card, heads, n_kv, case):
    """(a function of out and scales that queues a launch, the arrays on the card by name)."""
    rows, stride = case["projected"].shape
    arrays = {name: card.upload(array) for name, array in case.items()}
    partials = card.alloc(partials_shape(rows, heads), np.float32)
    arrived = card.zeros((rows, n_kv), np.uint32)
    card.poison(partials)
    arrays["arrived"], k_column = arrived, heads * 2 * HEAD_DIM
    inputs = [arrays[name] for name in case]
    v_column = k_column + n_kv * HEAD_DIM
    return lambda out, scales, early=False: attend_decode(card, out, scales, inputs[0], stride, k_column, v_column,
                                                          *inputs[1:], partials, arrived, rows, heads, n_kv,
                                                          SECTIONS, EPS, early), arrays


def expected(heads, n_kv, case, k_pages, v_pages):
    """float64 [rows, heads 256] from the pages as they are after the launch."""
    queries = case["projected"][:, :heads * 2 * HEAD_DIM].reshape(-1, heads, 2, HEAD_DIM)[:, :, 0]
    norms_and_angles = (case[name] for name in ("q_norm", "rope_pos", "inv_freq"))
    q = norm_rope_reference(queries, *norms_and_angles, SECTIONS, EPS, QUERY_SCALE)
    found = []
    for row, position in enumerate(case["row_pos"]):
        k, v = (read_pages(pages, case["block_table"], row, position + 1) for pages in (k_pages, v_pages))
        gate = gates(case["projected"][row:row + 1], heads)
        found.append(attention_reference(q[row:row + 1].astype(np.float16), k, v, gate, [position]))
    return np.concatenate(found)


def check(card, shape):
    """Compares an early launch with float64, a second one, which is not and quantises, with the first; outputs and
    scratch are poisoned. Returns the largest relative L2 error of a row of a head."""
    heads, n_kv, positions = shape
    case, rows = sample_case(*shape), len(positions)
    launch, arrays = launcher(card, heads, n_kv, case)
    out = card.alloc((rows + 1, heads * HEAD_DIM), np.float32)
    q, d = card.alloc((rows + 1, heads * HEAD_DIM), np.int8), card.alloc((rows + 1, heads * 8), np.float32)
    for array in (out, q, d):
        card.poison(array)
    launch(out[:rows], None, early=True)  # the first one: until it stores the new key, the page holds NaN there
    launch(q[:rows], d[:rows])
    got, q, d = card.download(out), card.download(q), card.download(d)
    pages = [card.download(arrays[name]) for name in ("k_pages", "v_pages")]
    want = expected(heads, n_kv, case, *pages)
    error = head_error(got[:rows], want, heads)
    assert np.linalg.norm(got[:rows] - want) <= TOLERANCE_ALL * np.linalg.norm(want)
    for quantized, reference in zip((q, d), quantize_reference(got[:rows])):
        np.testing.assert_array_equal(quantized[:rows], reference)
    assert np.isnan(got[rows]).all() and (q[rows] == -1).all() and np.isnan(d[rows]).all(), "wrote on"
    assert not card.download(arrays["arrived"]).any(), "counters must be zero again"
    return error


def cases(card):
    """The checked cases, then times of a step."""
    for case in CASES:
        yield Case("{}/{} heads, {}".format(*case), bind(check, card, case))
    for heads, n_kv, tokens, rows in TIMED:
        case = sample_case(heads, n_kv, (tokens - 1,) * rows)
        q, d = card.alloc((rows, heads * HEAD_DIM), np.int8), card.alloc((rows, heads * 8), np.float32)
        yield Case(f"{tokens} tokens, {heads}/{n_kv} heads, {rows} rows",
                   launch=bind(launcher(card, heads, n_kv, case)[0], q, d),
                   n_bytes=4 * HEAD_DIM * n_kv * tokens * rows)


if __name__ == "__main__":
    main("Attention of decoded tokens", cases)
