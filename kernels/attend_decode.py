"""Attention of decoded tokens, in one launch: from the projections of query, gate, key and value to the input of the
output projection. A plain step has one row per slot; a check (below) has several.

    q = rope(rms_norm(query)) D^-1/2,   k = rope(rms_norm(key))    q as float16; k and v go into the cache
    out = sum_j softmax(q . k)_j v_j * sigmoid(gate)               over the keys j = 0 .. position, D = head_dim

The mathematics is that of kernels/rope.py, kernels/kv_cache.py and kernels/attention.py, which do the same for prompts
in three launches. Query head h reads KV head h // group, group = heads / n_kv; heads without gates skip the sigmoid.

    projected  float32 [rows, stride]     queries with gates, keys, values: the columns of kernels/rope.py's Heads
    k, v       pages in a KV format (kernels/kv_formats.py), found through block_table int32 [n_slots, max_pages]
    out        int8 [rows, heads D] and scales float32 [rows, heads D / 32] (kernels/quantize.py), or float32

**A check** has `width` rows for each of n answers; row j * n + i is row j of answer i. Row 0 holds the latest token of
the answer, at position p, and row j the j-th draft after it, at p + j. Rows with position -1 are *void*: they write
nothing. The void rows of an answer come after its others, and no row lies beyond the page of row 0. A row has the
bits of a plain step at its position.

**How a sequence is cut.** A *unit* is n pages of 64 keys, with the smallest n for which the pages up to the row's
position make at most 64 units; the last unit may have fewer. So the bits depend neither on the batch nor on the card,
and one recorded launch serves every length: its blocks beyond the last unit end at once. 300 tokens are 5 units of 1
page, 4,620 tokens 37 units of 2 pages, 18,400 tokens 58 units of 5 pages, 262,144 tokens 64 units of 64 pages.

    grid (n_kv, rows, units): a block of 8 warps per row and unit, at most 64 units
    page   | 8 keys | 8 keys | .. | 8 keys |
    warp       0        1      ..     7

A block has a warp for each of its query heads. A KV head with more than 8 of them has several such blocks, which take
equal *shares* of its query heads; the first share's blocks write the new key and value into the page.

In a check of many answers, in float16 and with up to 4 heads in a group, a block may take two rows of an answer. It
loads keys and values once, and computes one row after the other; the blocks that are not needed end at once. A launch
does so only if all SMs get two rounds of such blocks: with fewer, SMs would be idle, and loads are not the bound.

A warp takes 8 keys of a page for all query heads of the KV head at once, so a row reads the cache once. A *span* is a
group of D / 8 lanes that hold a row together, 8 dims each. With D = 256 a span is a warp, and each lane has its dims of
all 8 keys and values; with D = 128 a span is half a warp and has 4 of the keys and values. Per page:

    scores    q . k: a lane chains 4 half2 products over its 8 dims and adds the two halves; a butterfly adds the lanes
    softmax   a warp per head: maximum and sum of the 64 scores, probabilities rounded to half
    values    p v: a lane chains half2 products over its 8 or 4 keys; the chains of each span go to shared memory
    sum       a thread owns 2 dims of some heads and adds the chains of all spans in increasing order, float32;
              pages are merged into the unit's result in increasing order, rescaled to the running maximum

One warp makes the new key and value of a row, and writes both into the page for later tokens. A block of the row's last
unit has loaded what the page held there before. It replaces these stale values in its registers, through shared memory.
In a check, it also makes the keys and values of the answer's earlier rows, a warp for each, and replaces theirs: so no
row waits for another. A block of several rows replaces them anew for each row, so a row multiplies the same numbers as
alone. No result depends on what these places of the page hold meanwhile. The last block of a (row, share)
to finish merges the units in increasing order, applies the gate and writes the output, for each of its rows; it knows
that it is the last from a counter on the card, which it sets back to zero. Accuracy: see kernels/attention.py.
Pipe: half2 and fp32, about 600 instructions per lane for 64 keys and 4 heads. Bytes: 4 D per key and KV head in
float16, read once; 4 (D + 2) written and read per unit and head.

**Few bits.** Keys and values of few bits lie in registers as they do in the page. A warp makes halves of its values
before the products with them, and of its keys before the scores. Keys in 8 bits are multiplied as they are, by integers
(kernels/attend_codes.py). A warp turns its query (kernels/hadamard.py), and the block that merges the units turns the
output back before the gate. Loads are so short here that most of the time would pass while warps wait for each other.
So in a block of up to ALONE heads they do not wait (kernels/attend_staged.py): each warp keeps maxima, sums and results
of its own 8 keys of each page, and they are merged at the end of the unit. Measurements: benchmarks/results.md,
sections attend_decode and kv_formats.
"""

from functools import cache, partial as bind
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.types import float16, float32, int32, uint32, uint64

from kernels import attend_codes, attend_staged
from kernels.attention import TOLERANCE_ALL, attention_reference, gates, head_error
from kernels.attend_staged import walk_of
from kernels.bench import Case, main
from kernels.card import Array
from kernels.compile import launches_overlap
from kernels.hadamard import turn_back_function
from kernels.intrinsics import (arrive, div_rn, exp, float_as_word, float_max, half2_high, half2_low, hfma2, hmul2,
                                let_next_begin, load_floats4, load_shared, load_shared4, pack_half2, shared_address,
                                sigmoid, store_shared, store_shared4, uniform, wait_for_previous, warp_max, warp_sum,
                                word_as_float)
from kernels.kv_cache import Pages, head_of_page, read_pages, spoil_function
from kernels.kv_formats import KV_FORMATS, PAGE, turned, turned_back
from kernels.norm import store_plain, store_quantized
from kernels.quantize import quantize_reference
from kernels.records import Places
from kernels.rope import (QKV, QWEN3, QWEN35, angles_function, heads_of, load_function, norm_rotate_function,
                          query_reference, sample_qkv, store_query_function, upload_qkv)

WARPS = 8                # per block
RESIDENT = 2             # blocks that an SM must hold: bounds the registers
KEYS = PAGE // WARPS     # keys of a page per warp
UNITS = 64               # most units of a sequence
CHECK_ROWS = 8           # most rows of an answer in a launch: a warp computes the new key of each
MAX_HEADS = WARPS        # of a block in a plain step
DIMS = 8                 # of a lane, 4 words
MANY_ANSWERS = 4         # with so many or more, a block of a check may take several rows
ALONE = 4                # most query heads of a block with which its warps may work alone
ROUNDS = 2               # least rounds on all SMs that blocks of several rows must fill
MERGED = 16              # units whose results a thread loads at once when units are merged
MERGED_SHAPE = MERGED, 4  # dims of a thread
UNITS_EACH = UNITS // 32  # of a lane
RECORD = 8               # floats of a unit's result beside its values: maximum, sum, 6 unused
MINUS_INFINITY = float("-inf")
EVERY_LANE = 0xFFFFFFFF


class Scratch(NamedTuple):
    """What the blocks of a launch leave for each other, on the card."""

    partials: Array         # float32 of `partials_shape`
    arrived: Array          # uint32, rows * heads elements or more: zero before the first launch and after each

    @classmethod
    def alloc(cls, card, rows, n_heads, head_dim):
        return cls(card.alloc(partials_shape(rows, n_heads, head_dim), np.float32, "attention partials"),
                   card.zeros((rows, n_heads), np.uint32, "attention blocks that have arrived"))


# ---- parts -------------------------------------------------------------------------------------------------
# own_keys: of how many of a warp's 8 keys a lane holds its 8 dims: 8 if the span is a warp, 4 if it is half a warp.

def row_functions(kind, head_dim, own_keys):
    """load_rows, expand_rows and put_newest: for keys or for values, which lie in these Rows."""
    parts, row = kind.functions(head_dim), kind.row(head_dim)
    load, expand, load_shared_row, n_loaded = parts.load, parts.expand, parts.load_shared, own_keys * parts.n_raw

    @cuda.jit(device=True, forceinline=True)
    def first_and_chunk(lane):
        """The first of the lane's keys among the warp's 8; which 8 dims are the lane's."""
        if own_keys != KEYS:
            return uint32(uint32(lane >> uint32(4)) * uint32(own_keys)), uint32(lane & uint32(15))
        return uint32(0), lane

    @cuda.jit(device=True, forceinline=True)
    def load_rows(raw, pages, page, first, last, lane):
        """Loads what the lane's 8 dims of each of its keys among first .. first + 7 are made of. In place of keys
        beyond `last`, the last live one, it loads `last` again."""
        own, chunk = first_and_chunk(lane)
        at = uint64(uint64(page * uint64(PAGE * row)) + uint64(uint32(first * uint32(row))))
        if uint32(first + uint32(KEYS - 1)) <= last:
            for j in range(uint32(own_keys)):
                load(raw, pages, uint64(at + uint64(uint32((j + own) * uint32(row)))), chunk, j)
        else:
            for j in range(uint32(own_keys)):
                key = uint32(min(j + own, uint32(last - first)))
                load(raw, pages, uint64(at + uint64(uint32(key * uint32(row)))), chunk, j)

    @cuda.jit(device=True, forceinline=True)
    def expand_rows(words, raw, lane):
        """Of what `load_rows` loaded, 4 words for each of the lane's keys. What was loaded is forgotten: no register
        keeps it until the next load."""
        own, chunk = first_and_chunk(lane)
        for j in range(uint32(own_keys)):
            i = uint32(uint32(4) * j)
            words[i], words[i + uint32(1)], words[i + uint32(2)], words[i + uint32(3)] = expand(raw, j, chunk)
        for i in range(uint32(n_loaded)):
            raw[i] = uint32(0)

    @cuda.jit(device=True, forceinline=True)
    def put_newest(words, at, new, lane):
        """Replaces key `new` of the warp's 8 by the row at a shared address. Replaces the keys after it, too: in their
        place, `load_rows` has loaded key `new` again."""
        own, chunk = first_and_chunk(lane)
        w0, w1, w2, w3 = load_shared_row(at, chunk)
        for j in range(uint32(own_keys)):
            if j + own >= new:
                i = uint32(uint32(4) * j)
                words[i], words[i + uint32(1)] = w0, w1
                words[i + uint32(2)], words[i + uint32(3)] = w2, w3

    return load_rows, expand_rows, put_newest


def newest_function(format, head_dim, rotary):
    """store_newest."""
    keys, values = format.functions(head_dim)
    load_head, norm_rotate = load_function(head_dim), norm_rotate_function(head_dim, rotary)
    spoil = spoil_function(head_dim)
    pack_key, write_key, pack_value, write_value = keys.pack, keys.write, values.pack, values.write
    k_row, v_row = format.keys.row(head_dim), format.values.row(head_dim)

    @cuda.jit(device=True, forceinline=True)
    def store_newest(newest, new, k_pages, v_pages, to, is_own, projected, k_from, v_from, lane, w, angles, eps):
        """Called by one warp. Takes a new key and value from elements k_from and v_from of `projected`, normalises and
        rotates the key, and stores both as pair `new` of `newest` in shared memory; if `is_own`, also as row `to` of
        the pages."""
        k, v = load_head(projected, k_from, lane), load_head(projected, v_from, lane)
        k = norm_rotate(k, w, angles, eps)
        v = pack_value(spoil(v, k), lane)
        k = pack_key(k, lane)
        at = uint32(new * uint32(k_row + v_row))
        write_key(newest, at, lane, k)
        write_value(newest, uint32(at + uint32(k_row)), lane, v)
        if is_own:
            write_key(k_pages, uint64(to * uint64(k_row)), lane, k)
            write_value(v_pages, uint64(to * uint64(v_row)), lane, v)
        cuda.syncwarp()     # the warp may load that row of the page next, to put this one over it

    return store_newest


@cuda.jit(device=True, forceinline=True)
def exchange(x, y, upper, offset):
    """A stage of the butterfly: of each pair of lanes the lower one keeps x and the upper one y, summed over the
    pair."""
    keep, send = (y, x) if upper else (x, y)
    return keep + cuda.shfl_xor_sync(EVERY_LANE, send, offset)


def product_functions(own_keys):
    """dot_heads and chain_values."""

    @cuda.jit(device=True, forceinline=True)
    def dot_keys(query_at, k, lane):
        """Partial q . k of the query at a shared address with the warp's 8 keys: lane l gets key l // 4, and the four
        lanes of a quad are still to be added. k: 4 words for each of the lane's keys."""
        x = cuda.local.array(own_keys, float32)
        q0, q1, q2, q3 = load_shared4(query_at)
        for j in range(uint32(own_keys)):
            i = uint32(uint32(4) * j)
            h = hmul2(q0, k[i])
            h = hfma2(q1, k[i + uint32(1)], h)
            h = hfma2(q2, k[i + uint32(2)], h)
            h = hfma2(q3, k[i + uint32(3)], h)
            x[j] = half2_low(h) + half2_high(h)
        if own_keys == KEYS:            # otherwise the halves of the warp hold different keys already
            upper = (lane & uint32(16)) != uint32(0)
            x0, x1 = exchange(x[0], x[4], upper, 16), exchange(x[1], x[5], upper, 16)
            x2, x3 = exchange(x[2], x[6], upper, 16), exchange(x[3], x[7], upper, 16)
        else:
            x0, x1, x2, x3 = x[0], x[1], x[2], x[3]
        upper = (lane & uint32(8)) != uint32(0)
        x0, x1 = exchange(x0, x2, upper, 8), exchange(x1, x3, upper, 8)
        return exchange(x0, x1, (lane & uint32(4)) != uint32(0), 4)

    @cuda.jit(device=True, forceinline=True)
    def dot_heads(at0, at1, at2, at3, own_at, k, lane):
        """q . k of four queries: lane l gets the product of query l % 4 and key l // 4."""
        x0, x1 = dot_keys(at0, k, lane), dot_keys(at1, k, lane)
        x2, x3 = dot_keys(at2, k, lane), dot_keys(at3, k, lane)
        upper = (lane & uint32(2)) != uint32(0)
        x0, x1 = exchange(x0, x2, upper, 2), exchange(x1, x3, upper, 2)
        return exchange(x0, x1, (lane & uint32(1)) != uint32(0), 1)

    @cuda.jit(device=True, forceinline=True)
    def chain_values(p, v, w):
        """Word w of the sum of p v over the lane's keys, in half precision. p: for each key its probability in both
        halves of a word. v: 4 words per key."""
        h = hmul2(p[uint32(0)], v[w])
        for j in range(uint32(1), uint32(own_keys)):
            h = hfma2(p[j], v[uint32(uint32(4) * j + w)], h)
        return h

    return dot_heads, chain_values


@cuda.jit(device=True, forceinline=True)
def cut(last_page):
    """(pages of a unit, number of the last unit) of a sequence that ends in this page."""
    pages = uint32(uint32(last_page // uint32(UNITS)) + uint32(1))
    return pages, uint32(last_page // pages)


@cuda.jit(device=True, forceinline=True)
def merge_units(acc, values, weights, at, to_sums):
    """Adds MERGED units, in increasing order: factor * values to acc[0 .. 3], factor * sum to acc[4]. In `weights`,
    their factors begin at `at` and their sums to_sums further."""
    for i in range(uint32(MERGED)):
        n = uint32(at + i)
        f = weights[n]
        for d in range(uint32(4)):
            acc[d] = cuda.fma(values[i, d], f, acc[d])
        acc[4] = cuda.fma(weights[uint32(n + to_sums)], f, acc[4])


def unit_functions(head_dim, group):
    """weigh_units and load_units."""
    record = head_dim + RECORD

    @cuda.jit(device=True, forceinline=True)
    def weigh_units(weights, partial, records, last_unit, head, lane):
        """Called by a warp. Writes to `weights` what rescales the units of a head to the highest maximum, and the sums
        of the units; zeros beyond the last unit."""
        highs, sums = cuda.local.array(UNITS_EACH, float32), cuda.local.array(UNITS_EACH, float32)
        at = uint32(records * uint32(record) + uint32(head_dim))
        highest = float32(MINUS_INFINITY)
        for i in range(uint32(UNITS_EACH)):
            n = uint32(lane + uint32(32) * i)
            highs[i], sums[i] = float32(MINUS_INFINITY), float32(0.0)
            if n <= last_unit:
                highs[i] = partial[uint32(at + n * uint32(record))]
                sums[i] = partial[uint32(at + n * uint32(record) + uint32(1))]
            highest = float_max(highest, highs[i])
        highest = warp_max(highest)
        at = uint32(head * uint32(UNITS) + lane)
        for i in range(uint32(UNITS_EACH)):
            n = uint32(at + uint32(32) * i)
            weights[n] = exp(highs[i] - highest)
            weights[uint32(n + uint32(group * UNITS))] = sums[i]

    @cuda.jit(device=True, forceinline=True)
    def load_units(values, partial, first, last, at):
        """values[i] <- the 4 floats at element `at` of the record of unit min(first + i, last)."""
        for i in range(uint32(MERGED)):
            unit = uint32(min(uint32(first + i), last))
            values[i, 0], values[i, 1], values[i, 2], values[i, 3] = load_floats4(
                partial, uint32(at + unit * uint32(record)))

    return weigh_units, load_units


def warps_work_alone(format, group):
    """Whether the warps of a block wait for each other at the end of a unit only: kernels/attend_staged.py."""
    return format.expands and group <= ALONE


def merge_function(head_dim, group):
    """merge_warps: adds the results of a block's warps in increasing order, rescaled to the highest maximum."""
    n_spans = 32 * DIMS // head_dim * WARPS

    @cuda.jit(device=True, forceinline=True)
    def merge_warps(partial, chains, factors, totals, o, records, unit, span, row_lane, warp, lane):
        cuda.syncthreads()
        if warp < uint32(group):
            at = uint32(uint32(lane & uint32(WARPS - 1)) * uint32(group) + warp)
            high, total = factors[at], totals[at]
            highest = warp_max(high)
            f = exp(high - highest)
            total = total * f
            for offset in (1, 2, 4):
                total = total + cuda.shfl_xor_sync(EVERY_LANE, total, offset)
            cuda.syncwarp()
            if lane < uint32(WARPS):
                factors[at] = f
            if lane == uint32(0):
                to = uint32(uint32(records + warp * uint32(UNITS) + unit) * uint32(head_dim + RECORD))
                to = uint32(to + uint32(head_dim))
                partial[to], partial[uint32(to + uint32(1))] = highest, total
        cuda.syncthreads()
        thread = uint32(warp * uint32(32) + lane)
        for g in range(uint32(group)):
            f = factors[uint32(warp * uint32(group) + g)]
            at = uint32(span * uint32(head_dim) + row_lane * uint32(DIMS))
            for d in range(uint32(DIMS)):
                chains[uint32(at + d)] = o[uint32(uint32(DIMS) * g + d)] * f
            cuda.syncthreads()
            if thread < uint32(head_dim):
                x = chains[thread]
                for s in range(uint32(1), uint32(n_spans)):
                    x = x + chains[uint32(s * uint32(head_dim) + thread)]
                partial[uint32(uint32(records + g * uint32(UNITS) + unit) * uint32(head_dim + RECORD) + thread)] = x
            cuda.syncthreads()

    return merge_warps


# ---- kernel ------------------------------------------------------------------------------------------------

def shares_of(group):
    """Equal shares of the query heads of a KV head, as few as leave a block at most MAX_HEADS."""
    return next(n for n in range(-(-group // MAX_HEADS), group + 1) if group % n == 0)


def rows_of_block(format, group, n_answers, width):
    """Rows of an answer that a block takes at most: two in a check of many answers, if each of their heads has a warp.
    Where keys and values must be expanded, registers do not last for two."""
    return 2 if width > 1 and n_answers >= MANY_ANSWERS and 2 * group <= WARPS and not format.expands else 1


@cache
def attend_kernel(format, group, head_dim, rotary, gated, quantized, early, width, rows=1, shares=1):
    """The kernel for a KV format and heads of this shape. `group`, the query heads of a block, is a constant, so that
    a lane's values of each head are registers. quantized: int8 output or float32; early: see kernels/intrinsics.py;
    width: 1 in a plain step, CHECK_ROWS in a check; rows: of an answer in a block, at most; shares: of a KV head."""
    words, record = head_dim // 2, head_dim + RECORD
    k_row, v_row = format.keys.row(head_dim), format.values.row(head_dim)
    spans = 32 * DIMS // head_dim                           # of a warp
    own_keys, n_spans = KEYS // spans, WARPS * spans        # keys of a lane; spans of the block
    sides = 32 * WARPS // words                             # threads that own the same 2 dims, of different heads
    n_own, is_even = -(-group // sides), group % sides == 0     # heads of a thread, 2 dims of each
    n_o, n_v_words, n_newest = 2 * n_own * rows, own_keys * DIMS // 2, width * (k_row + v_row)
    n_k_loaded, n_v_loaded = (own_keys * each.n_raw for each in format.functions(head_dim))
    by_codes = format.keys.by_codes
    expands_keys, expands_values = format.keys.expands and not by_codes, format.values.expands
    n_heads = rows * group                                  # of the block: at most one for each warp
    query_row, n_scores = attend_staged.query_row(k_row) if by_codes else head_dim, n_heads * PAGE
    n_query, alone = n_heads * query_row, warps_work_alone(format, group)
    query_bytes, lane_bytes = (4 * query_row, 4) if by_codes else (2 * head_dim, 2 * DIMS)
    n_chains, n_factors, n_staged = n_spans * group * words, n_heads, 0
    if alone:
        n_o, n_scores, n_factors = DIMS * group, WARPS * attend_staged.P_WORDS, WARPS * group
    n_quads, most = -(-group // 4), uint32(group - 1)       # of heads
    n_rounds, n_fours = -(-group * head_dim // (4 * 32 * WARPS)), group * head_dim // 4
    query_width = 2 * head_dim if gated else head_dim
    k_bytes, pair_bytes = (n * np.dtype(format.keys.dtype).itemsize for n in (k_row, k_row + v_row))
    element, store, turned = format.element, store_quantized if quantized else store_plain, format.turned
    load_head, angles_of = load_function(head_dim), angles_function(rotary)
    store_query, turn_back = store_query_function(head_dim, rotary, turned), turn_back_function(4, 1)
    load_keys, expand_keys, put_key = row_functions(format.keys, head_dim, own_keys)
    load_values, expand_values, put_value = row_functions(format.values, head_dim, own_keys)
    store_newest = newest_function(format, head_dim, rotary)
    dot_heads, chain_values = product_functions(own_keys)
    query_type, n_k_words = float16, n_v_words
    if by_codes:
        store_query = attend_codes.store_query_function(format.keys, head_dim, rotary)
        load_keys, put_key, dot_heads = attend_codes.key_functions(format.keys, head_dim, own_keys)
        query_type, n_k_words = element, attend_codes.n_key_words(own_keys)
    weigh_units, load_units = unit_functions(head_dim, group)

    @cuda.jit(device=True, forceinline=True)
    def row_and_head(t):
        """Head t of a block: (row of the block, head of the group)."""
        r = uint32(t // uint32(group))
        return r, uint32(t - r * uint32(group))

    @cuda.jit(device=True, forceinline=True)
    def number_of(row, n_kv, share):
        """Number of a row's share among those of all rows."""
        return uint32(row * uint32(n_kv * uint32(shares)) + share)

    @cuda.jit(device=True, forceinline=True)
    def records_of(row, n_kv, share):
        """Number of the first of the records of a row's share in `partial`."""
        return uint32(uint32(number_of(row, n_kv, share) * uint32(group)) * uint32(UNITS))

    def put_rows_function(put_newest):
        @cuda.jit(device=True, forceinline=True)
        def put_rows(words, at, new_rows, r, first_key, lane):
            """Puts the new row of row r of the block into the lane's words of the last page; before row 0 also the new
            rows of the answer before. at: shared address of the first new row."""
            before = uint32(new_rows[1] + r)
            for m in range(uint32(0) if r == uint32(0) else before, uint32(before + uint32(1))):
                key = uint32(uint32(new_rows[0] + m) - first_key)
                if key < uint32(KEYS):
                    put_newest(words, at + uint64(uint32(m * uint32(pair_bytes))), key, lane)

        return put_rows

    put_keys, put_values = put_rows_function(put_key), put_rows_function(put_value)

    @cuda.jit(device=True, forceinline=True)
    def add_chains(o, r, sum_at, factors, totals, side):
        """Adds the chains of all spans, which are a page's values of a row, to the thread's dims of that row."""
        for j in range(uint32(n_own)):
            g = uint32(uint32(sides) * j + side)
            if is_even or g < uint32(group):
                x, y = float32(0.0), float32(0.0)
                for w in range(uint32(n_spans)):
                    of_head = uint32(w * uint32(group) + uint32(sides) * j)
                    h = load_shared(sum_at + uint64(uint32(of_head * uint32(4 * words))))
                    x, y = x + half2_low(h), y + half2_high(h)
                t = uint32(r * uint32(group) + g)
                i = uint32(uint32(2) * uint32(r * uint32(n_own) + j))
                o[i] = cuda.fma(x, factors[t], o[i] * totals[t])
                o[i + uint32(1)] = cuda.fma(y, factors[t], o[i + uint32(1)] * totals[t])

    walk_alone, merge_warps = None, merge_function(head_dim, group)
    if alone:
        load_keys, load_values, n_k_loaded, n_v_loaded, n_staged, walk_alone = walk_of(
            format, head_dim, group, put_rows_function)
        expands_keys = expands_values = True
        n_chains = max(WARPS * n_staged, n_spans * head_dim, 2 * group * UNITS)

    @cuda.jit(launch_bounds=(32 * WARPS, RESIDENT))
    def attend(out, scales, partial, arrived, projected, q_norm, k_norm, rope_pos, inv_freq, k_pages, v_pages,
               block_table, row_slot, row_pos, n_answers, enough, stride, k_column, v_column, n_positions, max_pages,
               n_kv, height_section, width_section, eps):
        let_next_begin()
        if not early:
            wait_for_previous()
        query = cuda.shared.array(n_query, query_type, alignment=16)    # [head of the group][head_dim], or [row]
        scores = cuda.shared.array(n_scores, uint32, alignment=16)      # [head][64 keys]: float32, then p twice
        # In the loop over pages words [span][head][words]; at the end factors, then sums of units, [head][unit] each.
        chains = cuda.shared.array(n_chains, float32, alignment=16)
        factors = cuda.shared.array(n_factors, float32)    # what rescales this page,
        totals = cuda.shared.array(n_factors, float32)     # and the pages before; or [warp][head]: highs, then totals
        newest = cuda.shared.array(n_newest, element, alignment=16)     # [new row][key, value]
        new_rows = cuda.shared.array(2, uint32)     # place of the first in its page; how many before the block's
        is_last = cuda.shared.array(1, uint32)
        kw = cuda.local.array(n_k_words, uint32)        # of the page, as halves or codes
        vw = cuda.local.array(n_v_words, uint32)
        loaded_keys, loaded_values = kw, vw             # of the page, or of the next one, as they lie there
        if expands_keys:
            loaded_keys = cuda.local.array(n_k_loaded, uint32)
        if expands_values:
            loaded_values = cuda.local.array(n_v_loaded, uint32)
        pw = cuda.local.array(own_keys, uint32)
        o = cuda.local.array(n_o, float32)
        values = cuda.local.array(MERGED_SHAPE, float32)
        acc = cuda.local.array(5, float32)
        gate = cuda.local.array(4, float32)

        thread = uint32(cuda.threadIdx.x)
        lane = uint32(thread & uint32(31))
        warp = uniform(thread >> uint32(5))
        share, row, unit = uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.z)
        kv_head = uint32(share // uint32(shares))
        is_void = row_pos[row] < int32(0)
        position, slot = uniform(uint32(max(row_pos[row], int32(0)))), uniform(uint32(row_slot[row]))
        before, answer = uint32(0), row                 # rows of the answer before this one
        if width > 1:
            before = uint32(row // n_answers)
            answer = uint32(row - before * n_answers)
        last_page = uint32(position // uint32(PAGE))
        unit_pages, last_unit = cut(last_page)
        if unit > last_unit:
            return
        count = uint32(1)                               # rows of the block; the same for all units of an answer
        if rows > 1 and uint32(uint32(last_unit + uint32(1)) * n_kv * uint32(cuda.gridDim.y)) >= uint32(rows) * enough:
            if before % uint32(rows) != uint32(0):
                return
            for r in range(uint32(1), uint32(rows)):
                later = uint32(row + r * n_answers)
                if later < uint32(cuda.gridDim.y) and row_pos[later] >= int32(0):
                    count = uint32(r + uint32(1))
            count = uniform(count)
        n_live = uint32(count * uint32(group))
        first_page = uint32(unit * unit_pages)
        end_page = uint32(min(uint32(first_page + unit_pages), uint32(last_page + uint32(1))))
        first_head = uint32(share * uint32(group))
        first_key = uint32(warp * uint32(KEYS))

        new_key = uint32(position % uint32(PAGE))
        new_warp = uint32(new_key // uint32(KEYS))
        page = head_of_page(block_table, max_pages, slot, first_page, kv_head, n_kv)
        last = uint32(min(uint32(position - first_page * uint32(PAGE)), uint32(PAGE - 1)))  # live key
        # Rotated, so that the warp with the new key comes last and has a query head only if the group has 8.
        own_head = uint32(uint32(warp + uint32(WARPS - 1) - new_warp) & uint32(WARPS - 1))
        of_row, head = uint32(0), uint32(min(own_head, most))
        if rows > 1:
            of_row, head = row_and_head(uint32(min(own_head, uint32(n_live - uint32(1)))))
        query_from = uint32(uint32(row + of_row * n_answers) * stride + uint32(first_head + head) * uint32(query_width))
        angles = angles_of(uint32(row + of_row * n_answers), n_positions, lane, rope_pos, inv_freq, height_section,
                           width_section)
        w = load_head(q_norm, uint32(0), lane)
        new = uint32(uint32(WARPS - 1) - own_head)          # the new row that this warp makes
        n_new = uint32(before + count)
        has_newest = unit == last_unit and new < n_new and not is_void
        is_own, new_row, new_angles = new >= before and share % uint32(shares) == uint32(0), row, angles
        if width > 1:
            new_row = uint32(new * n_answers + answer)
            if has_newest:
                new_angles = angles_of(new_row, n_positions, lane, rope_pos, inv_freq, height_section, width_section)
        of_head = uint32(new_row * stride + kv_head * uint32(head_dim))
        k_from, v_from = uint32(of_head + k_column), uint32(of_head + v_column)
        to = head_of_page(block_table, max_pages, slot, last_page, kv_head, n_kv)
        to = uint64(uint64(to * uint64(PAGE)) + uint64(uint32(uint32(new_key - before) + new)))
        k_w = load_head(k_norm, uint32(0), lane)
        if not early:
            if is_void:
                return
            x = load_head(projected, query_from, lane)
            if has_newest:
                store_newest(newest, new, k_pages, v_pages, to, is_own, projected, k_from, v_from, lane, k_w,
                             new_angles, eps)
        if first_key <= last and not is_void:
            load_keys(loaded_keys, k_pages, page, first_key, last, lane)
            load_values(loaded_values, v_pages, page, first_key, last, lane)
        if early:
            wait_for_previous()
            if is_void:
                return
            x = load_head(projected, query_from, lane)
            if has_newest:
                store_newest(newest, new, k_pages, v_pages, to, is_own, projected, k_from, v_from, lane, k_w,
                             new_angles, eps)
        if thread == uint32(0):
            new_rows[0], new_rows[1] = uint32(new_key - before), before
        if own_head < n_live:
            store_query(query, uint32(own_head * uint32(query_row)), lane, x, w, angles, eps)
        cuda.syncthreads()

        high, total = float32(MINUS_INFINITY), float32(0.0)  # of the pages so far; warp t: of head t of the block
        for i in range(uint32(n_o)):
            o[i] = float32(0.0)
        lane_key = uint32(uint32(lane & uint32(3)) * uint32(KEYS) + uint32(lane >> uint32(2)))
        word, side = uint32(thread & uint32(words - 1)), uint32(thread // uint32(words))
        span, row_lane = warp, lane                     # the lane's span and its place there
        if spans == 2:
            span, row_lane = uint32(thread >> uint32(4)), uint32(lane & uint32(15))
        query_at = shared_address(query) + uint64(uint32(row_lane * uint32(lane_bytes)))
        newest_at = shared_address(newest)
        p_at = shared_address(scores) + uint64(uint32(first_key * uint32(4)))
        score_at = p_at + uint64(uint32(uint32(lane >> uint32(2)) * uint32(4)))
        softmax_at = shared_address(scores) + uint64(
            uint32(uint32(warp * uint32(PAGE) + lane_key) * uint32(4)))
        chain_at = shared_address(chains) + uint64(
            uint32(uint32(span * uint32(group * words) + row_lane * uint32(4)) * uint32(4)))
        sum_at = shared_address(chains) + uint64(uint32(uint32(side * uint32(words) + word) * uint32(4)))
        if spans == 2:
            p_at = p_at + uint64(uint32(uint32(lane >> uint32(4)) * uint32(4 * own_keys)))
        if alone:
            walk_alone(o, factors, totals, (loaded_keys, loaded_values), k_pages, v_pages, block_table,
                       (max_pages, slot, kv_head, n_kv), (first_page, end_page, last_page, position), last,
                       shared_address(query), newest_at, new_rows,
                       shared_address(chains) + uint64(uint32(warp * uint32(4 * n_staged))),
                       shared_address(scores) + uint64(uint32(warp * uint32(4 * attend_staged.P_WORDS))), warp, lane)
            merge_warps(partial, chains, factors, totals, o, records_of(row, n_kv, share), unit, span, row_lane, warp,
                        lane)
        for done in range(uint32(0) if alone else uint32(end_page - first_page)):
            number = uint32(first_page + uint32(done) + uint32(1))
            next_last, next_page = uint32(0), page
            more = number < end_page
            if more:
                next_page = head_of_page(block_table, max_pages, slot, number, kv_head, n_kv)
                next_last = uint32(min(uint32(position - number * uint32(PAGE)), uint32(PAGE - 1)))
            load_next = more and first_key <= next_last
            if expands_keys:
                expand_keys(kw, loaded_keys, lane)
            for r in range(count):
                row_last = last
                if number > last_page:
                    row_last = uint32(last + r)
                    put_keys(kw, newest_at, new_rows, r, first_key, lane)
                if first_key <= row_last:
                    for quad in range(uint32(n_quads)):
                        g, of_row = uint32(uint32(4) * quad), uint32(r * uint32(group))
                        own_g = uint32(min(uint32(g + uint32(lane & uint32(3))), most))  # the last head again
                        at = query_at + uint64(uint32(of_row * uint32(query_bytes)))
                        x = dot_heads(at + uint64(uint32(g * uint32(query_bytes))),
                                      at + uint64(uint32(min(g + uint32(1), most) * uint32(query_bytes))),
                                      at + uint64(uint32(min(g + uint32(2), most) * uint32(query_bytes))),
                                      at + uint64(uint32(min(g + uint32(3), most) * uint32(query_bytes))),
                                      shared_address(query) + uint64(uint32(of_row + own_g) * uint32(query_bytes)),
                                      kw, lane)
                        store_shared(score_at + uint64(uint32(uint32(of_row + own_g) * uint32(4 * PAGE))),
                                     float_as_word(x))
            if load_next:
                load_keys(loaded_keys, k_pages, next_page, first_key, next_last, lane)
            cuda.syncthreads()

            if warp < n_live:
                row_last = last
                if number > last_page:
                    row_last = uint32(last + warp // uint32(group))
                a = word_as_float(load_shared(softmax_at))
                b = word_as_float(load_shared(softmax_at + uint64(128)))
                a = a if lane_key <= row_last else float32(MINUS_INFINITY)
                b = b if uint32(lane_key + uint32(32)) <= row_last else float32(MINUS_INFINITY)
                page_high = warp_max(float_max(a, b))
                a, b = exp(a - page_high), exp(b - page_high)
                page_total = warp_sum(a + b)
                store_shared(softmax_at, pack_half2(a, a))
                store_shared(softmax_at + uint64(128), pack_half2(b, b))
                new_high = float_max(high, page_high)
                of_page, of_before = exp(page_high - new_high), exp(high - new_high)
                high, total = new_high, cuda.fma(page_total, of_page, total * of_before)
                if lane == uint32(0):
                    factors[warp], totals[warp] = of_page, of_before
            cuda.syncthreads()

            if expands_values:
                expand_values(vw, loaded_values, lane)
            for r in range(uint32(rows)):
                if rows > 1 and r >= count:
                    break
                row_last = last
                if number > last_page:
                    row_last = uint32(last + r)
                    put_values(vw, newest_at + uint64(k_bytes), new_rows, r, first_key, lane)
                if first_key <= row_last:
                    for g in range(uint32(group)):
                        at = p_at + uint64(uint32(uint32(r * uint32(group) + g) * uint32(4 * PAGE)))
                        pw[0], pw[1], pw[2], pw[3] = load_shared4(at)
                        if own_keys == KEYS:
                            pw[4], pw[5], pw[6], pw[7] = load_shared4(at + uint64(16))
                        store_shared4(chain_at + uint64(uint32(g * uint32(4 * words))),
                                      chain_values(pw, vw, uint32(0)), chain_values(pw, vw, uint32(1)),
                                      chain_values(pw, vw, uint32(2)), chain_values(pw, vw, uint32(3)))
                else:
                    for g in range(uint32(group)):
                        store_shared4(chain_at + uint64(uint32(g * uint32(4 * words))), uint32(0), uint32(0), uint32(0),
                                      uint32(0))
                if load_next and r + uint32(1) == count:
                    load_values(loaded_values, v_pages, next_page, first_key, next_last, lane)
                cuda.syncthreads()
                add_chains(o, r, sum_at, factors, totals, side)
                if rows > 1 and r + uint32(1) < count:
                    cuda.syncthreads()  # before the next row's chains overwrite these
            page, last = next_page, next_last

        for r in range(uint32(0) if alone else uint32(rows)):
            if r < count:
                records = records_of(uint32(row + r * n_answers), n_kv, share)
                for j in range(uint32(n_own)):
                    g = uint32(uint32(sides) * j + side)
                    if g < uint32(group):
                        to = uint32(uint32(records + g * uint32(UNITS) + unit) * uint32(record) + uint32(2) * word)
                        i = uint32(uint32(2) * uint32(r * uint32(n_own) + j))
                        partial[to], partial[uint32(to + uint32(1))] = o[i], o[i + uint32(1)]
        if not alone and warp < n_live and lane == uint32(0):
            of_row, head = row_and_head(warp)
            records = records_of(uint32(row + of_row * n_answers), n_kv, share)
            to = uint32(uint32(records + head * uint32(UNITS) + unit) * uint32(record) + uint32(head_dim))
            partial[to], partial[uint32(to + uint32(1))] = high, total

        cuda.syncthreads()
        if thread == uint32(0):
            is_last[uint32(0)] = uint32(arrive(arrived, number_of(row, n_kv, share)) == last_unit)
        cuda.syncthreads()
        if is_last[uint32(0)] == uint32(0):
            return
        if thread == uint32(0):
            arrived[number_of(row, n_kv, share)] = uint32(0)
        for r in range(count):
            merged = uint32(row + r * n_answers)
            records = records_of(merged, n_kv, share)
            gate_at = uint32(merged * stride + first_head * uint32(2 * head_dim) + uint32(head_dim))
            to = uint32(uint32(merged * n_kv * uint32(shares * group) + first_head) * uint32(head_dim))
            for j in range(uint32(n_rounds)):
                four = uint32(thread + j * uint32(32 * WARPS))
                inside = four < uint32(n_fours)
                g = uint32(min(uint32(four // uint32(head_dim // 4)), most))
                dim = uint32(uint32(4) * four % uint32(head_dim))
                of_units = uint32(uint32(records + g * uint32(UNITS)) * uint32(record) + dim)
                load_units(values, partial, uint32(0), last_unit, of_units)
                if gated:
                    for d in range(uint32(4)):
                        gate[d] = projected[uint32(gate_at + g * uint32(2 * head_dim) + dim + d)]
                if j == uint32(0):
                    if warp < uint32(group):
                        weigh_units(chains, partial, uint32(records + warp * uint32(UNITS)), last_unit, warp, lane)
                    cuda.syncthreads()
                for d in range(uint32(5)):
                    acc[d] = float32(0.0)
                merge_units(acc, values, chains, uint32(g * uint32(UNITS)), uint32(group * UNITS))
                for part in range(uint32(1), uint32(uint32(last_unit // uint32(MERGED)) + uint32(1))):
                    first = uint32(uint32(part) * uint32(MERGED))
                    load_units(values, partial, first, last_unit, of_units)
                    merge_units(acc, values, chains, uint32(g * uint32(UNITS) + first), uint32(group * UNITS))
                inverse = div_rn(float32(1.0), acc[4])
                four_dims = acc[0] * inverse, acc[1] * inverse, acc[2] * inverse, acc[3] * inverse
                if turned:
                    four_dims = turn_back(four_dims, lane, lane)
                acc[0], acc[1], acc[2], acc[3] = four_dims
                if gated:
                    for d in range(uint32(4)):
                        acc[d] = acc[d] * sigmoid(gate[d])
                store(out, scales, uint32(to + uint32(4) * four), inside, acc[0] if inside else float32(0.0),
                      acc[1] if inside else float32(0.0), acc[2] if inside else float32(0.0),
                      acc[3] if inside else float32(0.0))
            if rows > 1:
                cuda.syncthreads()      # before the next row's factors overwrite these

    return attend


# ---- launch ------------------------------------------------------------------------------------------------

def partials_shape(rows, n_heads, head_dim):
    """Shape of the float32 array `Scratch.partials`, whatever the context: 66 KiB per row and head of 256. rows: all of
    a launch, answers times width."""
    return rows, n_heads, UNITS, head_dim + RECORD


def attend_decode(card, out, qkv, pages, places, scratch, rows, *, width=1, early=False, stream=None):
    """A step of `rows` answers with `width` rows each, 1 to CHECK_ROWS; see the head of this file. Row b of all
    rows * width is one token of slot places.slots[b] at places.positions[b]; position -1: void. No two answers share a
    slot. out: (int8 [all, heads D], scales float32 [all, heads D / 32]), or (float32 [all, heads D], None). The key and
    value of a row are written into the pages; those of the tokens before row 0 must be there.

    early: read before the launch before has ended; allowed only if pages, block table, rotary positions and places have
    not been written since the last launch that does not overlap (kernels/intrinsics.py). Writes out, the new rows of
    the pages and the scratch arrays; never allocates.
    """
    heads, rotary, (values, scales) = qkv.heads, qkv.rotary, out
    shares = shares_of(heads.group)
    group = heads.group // shares
    kernel = attend_kernel(pages.format, group, heads.head_dim, heads.rotary, heads.gated, scales is not None,
                           early and launches_overlap(card.cc), 1 if width == 1 else CHECK_ROWS,
                           rows_of_block(pages.format, group, rows, width), shares)
    card.launch(kernel, (heads.n_kv_heads * shares, rows * width, min(UNITS, pages.block_table.shape[1])), 32 * WARPS,
                values.reshape(-1), (values if scales is None else scales).reshape(-1), scratch.partials.reshape(-1),
                scratch.arrived.reshape(-1), qkv.products.values.reshape(-1), qkv.q_norm, qkv.k_norm,
                rotary.positions.reshape(-1), rotary.frequencies, pages.k.reshape(-1), pages.v.reshape(-1),
                pages.block_table.reshape(-1), places.slots, places.positions, rows, ROUNDS * RESIDENT * card.n_sms,
                qkv.products.stride, heads.k_column, heads.v_column, rotary.positions.shape[1],
                pages.block_table.shape[1], heads.n_kv_heads, *rotary.sections[1:], float(heads.eps), stream=stream)


# ---- check -------------------------------------------------------------------------------------------------

# (heads, n_kv, positions: a row each), shape of the heads. Beyond 4,096 tokens a unit is two pages, then three.
CASES = [((4, 2, (0, 609, 63)), QWEN35), ((16, 4, (64, 1)), QWEN35), ((24, 4, (65, 255, 256, 31)), QWEN35),
         ((32, 2, (65, 4096, 0)), QWEN35), ((11, 1, (63, 130)), QWEN3),
         ((8, 2, (4095, 4096, 8320)), QWEN35), ((4, 2, (0, 609, 63)), QWEN3), ((5, 1, (66, 4, 133)), QWEN3),
         ((16, 2, (65, 31, 4097)), QWEN3), ((3, 3, (70,)), QWEN3), ((3, 1, (62, 131)), QWEN35),
         ((4, 2, (62, 131)), (128, 64, True)), ((4, 2, (62, 131)), (256, 128, False))]
# (heads, n_kv, (position, rows that are not void) of each answer, width), shape of the heads.
CHECKS = [((8, 2, ((60, 4), (0, 8), (130, 1), (5, 0), (4157, 3)), 8), QWEN35),
          ((6, 1, ((61, 3), (7, 2)), 3), QWEN35), ((8, 1, ((126, 2), (0, 2), (3, 1)), 2), QWEN35),
          ((3, 1, ((61, 3), (7, 2)), 3), QWEN35), ((2, 2, ((61, 3), (7, 2)), 3), QWEN35),
          ((32, 2, ((60, 3), (130, 1), (5, 0), (4157, 3)), 3), QWEN35),
         ((5, 1, ((121, 7), (4163, 5)), 7), QWEN3), ((4, 1, ((59, 5), (7, 2)), 5), QWEN3),
          ((4, 2, ((10, 5), (58, 6)), 6), (128, 64, True))]
TIMED = [(16, 4, 300, 1), (16, 4, 4620, 1), (16, 4, 18400, 1), (16, 4, 300, 8)]    # heads, n_kv, tokens, rows


class Sample(NamedTuple):
    """Inputs of a launch on the host."""

    qkv: QKV
    pages: Pages            # keys and values from each row's position on consist of bytes 255: NaN in floats
    places: Places


def sample_case(format, heads, positions, seed=0, max_pages=None):
    """A Sample of a row at each of these positions, with a slot of its own."""
    rng, rows = np.random.default_rng(seed), len(positions)
    max_pages = max_pages or max(positions) // PAGE + 2
    qkv = sample_qkv(rng, heads, np.array([positions] * 3, np.int32), scale=1)
    held = [position // PAGE + 1 for position in positions]
    numbers, table = rng.permutation(sum(held)), np.full((rows, max_pages), -1, np.int32)
    shape = sum(held), heads.n_kv_heads, PAGE, heads.head_dim
    k, v = (kind.encode(rng.standard_normal(shape, np.float32)) for kind in format.kinds.values())
    for row, position in enumerate(positions):
        table[row, :held[row]], numbers = numbers[:held[row]], numbers[held[row]:]
        for pages in k, v:
            pages[table[row, position // PAGE], :, position % PAGE:].view(np.uint8)[...] = 255
    return Sample(qkv, Pages(format, k, v, table),
                  Places(np.arange(rows, dtype=np.int32), np.array(positions, np.int32)))


def upload_case(card, case):
    """The same with its arrays on a card."""
    pages = case.pages._replace(k=card.upload(case.pages.k), v=card.upload(case.pages.v),
                                block_table=card.upload(case.pages.block_table))
    return Sample(upload_qkv(card, case.qkv), pages, Places(*map(card.upload, case.places)))


def sample_check(format, heads, answers, width, seed=0):
    """A Sample of a check of several answers: of each its position and how many of its `width` rows are not void."""
    positions, n = tuple(position for position, _ in answers), len(answers)
    case, rng = sample_case(format, heads, positions, seed), np.random.default_rng(seed + 1)
    rows = np.array([[p + j if j < live else -1 for p, live in answers] for j in range(width)], np.int32).reshape(-1)
    qkv = sample_qkv(rng, heads, np.array([np.maximum(rows, 0)] * 3, np.int32), scale=1)
    return case._replace(qkv=qkv, places=Places(np.tile(np.arange(n, dtype=np.int32), width), rows))


def launcher(card, case, width=1):
    """(a function of out that queues a launch, the Sample on the card, its Scratch)."""
    heads, rows = case.qkv.heads, len(case.places.slots)
    there = upload_case(card, case)
    scratch = Scratch.alloc(card, rows, heads.n_heads, heads.head_dim)
    card.poison(scratch.partials)

    def launch(out, early=False):
        attend_decode(card, out, *there, scratch, rows // width, width=width, early=early)

    return launch, there, scratch


def rounded_query(format, q):
    """Queries [.., head_dim] with attention's scale as the kernel has them, turned back: float64."""
    if not format.keys.by_codes:
        return turned_back(format, turned(format, q).astype(np.float16))
    scale = q.shape[-1] ** -0.5
    return turned_back(format, format.keys.decode(format.keys.encode(q / scale))) * scale


def expected(case, k_pages, v_pages):
    """float64 [rows, heads D] from the pages as they are after the launch."""
    heads, format, found = case.qkv.heads, case.pages.format, []
    q = rounded_query(format, query_reference(case.qkv))
    gate = gates(case.qkv.products.values, heads)
    for row, position in enumerate(case.places.positions):
        k, v = (turned_back(kind, read_pages(kind, pages, case.pages.block_table, row, position + 1))
                for kind, pages in zip(format.kinds.values(), (k_pages, v_pages)))
        one = slice(row, row + 1)
        found.append(attention_reference(q[one], k, v, gate if gate is None else gate[one], [position]))
    return np.concatenate(found)


def outputs(card, rows, width, quantized):
    """The poisoned output of a launch: int8 and scales, or float32."""
    out = (card.alloc((rows, width), np.int8), card.alloc((rows, width // 32), np.float32)) if quantized else (
        card.alloc((rows, width), np.float32), None)
    for array in filter(None, out):
        card.poison(array)
    return out


def rows_of(output, n):
    """The first n rows of an output."""
    return tuple(array and array[:n] for array in output)


def compare(card, output, want, is_live):
    """The live rows of an output must have the bits of the rows `want`, quantised if it is, and the others its poison.
    want: float32 [fewer rows, width]; is_live: of each row of the output."""
    references = (want, None) if output[1] is None else quantize_reference(want)
    for array, reference in zip(filter(None, output), references):
        got = card.download(array).view(np.uint8)
        np.testing.assert_array_equal(got[is_live], np.ascontiguousarray(reference).view(np.uint8)[is_live[:len(want)]])
        assert (got[~is_live] == 255).all(), "a void row or one too many was written"


def check(card, format, case, quantized=True):
    """Launches twice, on poisoned outputs and scratch: early, with float32 output, which is compared with float64; then
    not early. The second output is int8, which is compared with the first one quantised, or, if not `quantized`,
    float32 with the same bits. Returns the largest relative L2 error of a row of a head."""
    (n_heads, n_kv, positions), shape = case
    heads, rows = heads_of(n_heads, n_kv, shape), len(positions)
    case, width = sample_case(format, heads, positions), n_heads * heads.head_dim
    launch, there, scratch = launcher(card, case)
    first, second = outputs(card, rows + 1, width, False), outputs(card, rows + 1, width, quantized)
    launch(rows_of(first, rows), early=True)    # until it stores the new key, the page holds NaN there
    launch(rows_of(second, rows))
    got, want = card.download(first[0]), expected(case, card.download(there.pages.k), card.download(there.pages.v))
    error = head_error(got[:rows], want, n_heads)
    assert np.linalg.norm(got[:rows] - want) <= TOLERANCE_ALL * np.linalg.norm(want)
    assert np.isnan(got[rows]).all(), "wrote on"
    compare(card, second, got[:rows], np.arange(rows + 1) < rows)
    assert not card.download(scratch.arrived).any(), "counters must be zero again"
    return error


def check_rows(card, format, case, quantized=(False, True)):
    """A check of several rows, on poisoned outputs and scratch, against plain launches of its rows 0, then its rows 1,
    ...: outputs and pages must have the same bits. It is launched twice, early and not, for each of `quantized`, which
    says whether its output is int8 or float32. Returns 0."""
    (n_heads, n_kv, answers, width), shape = case
    heads, n = heads_of(n_heads, n_kv, shape), len(answers)
    case, columns = sample_check(format, heads, answers, width), n_heads * heads.head_dim
    launch, there, scratch = launcher(card, case, width)
    found = [outputs(card, width * n + 1, columns, each) for each in quantized for _ in range(2)]
    for i, output in enumerate(found):
        launch(rows_of(output, width * n), early=i % 2 == 0)
    one_by_one = card.alloc((width * n, columns), np.float32)
    plain = upload_case(card, case)
    for first in range(0, width * n, n):
        qkv = plain.qkv._replace(
            products=plain.qkv.products.rows_from(first), rotary=plain.qkv.rotary._replace(positions=card.upload(
                np.ascontiguousarray(case.qkv.rotary.positions[:, first:first + n]))))
        attend_decode(card, (one_by_one[first:first + n], None), qkv, plain.pages, plain.places.rows_from(first),
                      scratch, n)
    want, is_live = card.download(one_by_one), case.places.positions >= 0
    assert np.isfinite(want[is_live]).all()
    for output in found:
        compare(card, output, want, np.append(is_live, False))
    for name in "k", "v":
        pages = [card.download(getattr(each.pages, name)).view(np.uint8) for each in (there, plain)]
        np.testing.assert_array_equal(*pages)
    assert not card.download(scratch.arrived).any(), "counters must be zero again"
    return 0


def cases(card):
    """The checked cases, then times of a step."""
    for format in KV_FORMATS.values():
        for case in CHECKS:
            (n_heads, n_kv, answers, width), shape = case
            yield Case(f"{n_heads}/{n_kv} heads {shape}, check of {width} rows, {answers}, {format.name}",
                       bind(check_rows, card, format, case))
        for case in CASES:
            (n_heads, n_kv, positions), shape = case
            yield Case(f"{n_heads}/{n_kv} heads {shape}, {positions}, {format.name}", bind(check, card, format, case))
        for n_heads, n_kv, tokens, rows in TIMED:
            heads = heads_of(n_heads, n_kv)
            case, width = sample_case(format, heads, (tokens - 1,) * rows), n_heads * heads.head_dim
            out = card.alloc((rows, width), np.int8), card.alloc((rows, width // 32), np.float32)
            yield Case(f"{tokens} tokens, {n_heads}/{n_kv} heads, {rows} rows, {format.name}",
                       launch=bind(launcher(card, case)[0], out),
                       n_bytes=format.token_bytes(n_kv, heads.head_dim) * tokens * rows)


if __name__ == "__main__":
    main("Attention of decoded tokens", cases)
