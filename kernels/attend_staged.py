"""Attention of decoded tokens in few bits: how a warp that works alone goes through a unit, for
kernels/attend_decode.py.

A warp has 8 keys of each page, for all query heads of its block, at most 4. It waits for no other warp, so it has a
maximum, a sum and a result of its own. The 8 rows of its keys lie one behind the other in the page, and so do those of
its values. Each 8 rows are a *slice*, which begins at a multiple of 16 bytes:

    a page   | 8 rows: slice of warp 0 | 8 rows: slice of warp 1 | .. | slice of warp 7 |

    page n + 1      from memory to registers, 16 bytes for each lane and load; under way while page n is computed
    page n          from registers to the warp's place in shared memory, then scores, probabilities, products

So loads are few, none is repeated, and each has the time of a whole page to arrive. In shared memory any lane reads any
word of the slice. So each sum can be divided among the lanes in its own way:

    scores, keys in 8 bits   D / 32 lanes share a key, and each has 32 of its dims: a head's sum crosses 4 lanes. With
                             D = 256 a warp takes 4 keys at once. Of the 8 lanes of a key the first 4 have the first
                             128 dims. Sums of integers are exact, in whatever order
    scores, fewer bits       products of halves, as in kernels/attend_decode.py: the order of float sums is a part of
                             the bits
    values                   a lane has 8 dims of its keys, and adds a key to the sums of all heads before the next one

The row of a new token replaces the stale row in shared memory, in the page's format. It also replaces the rows behind,
whose bytes may be anything: a scale that is NaN would spoil the output even with probability 0.

Pipe: dp4a and half2. Bytes: those of keys and values, read once. Measurements: benchmarks/results.md, kv_formats.
"""

from collections.abc import Callable
from typing import NamedTuple

from numba import cuda
from numba.types import float32, int32, uint32, uint64

from kernels.attend_codes import KEYS, as_float, exchange, scale_of
from kernels.intrinsics import (dp4a, exp, float_max, half2_high, half2_low, hfma2, hmul2, load_shared,
                                load_shared4, load_word, load_words4, pack_half2, store_shared, store_shared4)
from kernels.kv_formats import PAGE

EVERY_LANE = 0xFFFFFFFF
HEADS = 4                # most query heads of a block: scores of all are computed at once
MINUS_INFINITY = float("-inf")
MINUS_ZEROS = 0x80008000     # two halves
P_WORDS = HEADS * KEYS   # words of a warp: its keys' probabilities, [key][head], each in both halves


class Walk(NamedTuple):
    """How the warps of a block go through a unit."""

    load_keys: Callable         # load(raw, pages, page, first, last, lane): the lane's words of rows first .. first + 7
    load_values: Callable
    n_key_words: int            # registers for that
    n_value_words: int
    n_shared: int               # words of shared memory for each warp, from a multiple of 16 bytes on
    walk_alone: Callable


def query_row(row):
    """Words of a query that is a row of keys: its beginning is aligned to 16 bytes."""
    return -(-row // 4) * 4


def slice_shape(row):
    """Of a slice with rows of so many words: (loads of 16 bytes for each lane, the words that are left, whether a load
    of 4 bytes for each lane brings those)."""
    whole, left = divmod(KEYS * row, 128)
    return whole, left, left <= 32


def slice_words(row):
    """Registers of a lane that a slice takes."""
    whole, left, is_short = slice_shape(row)
    return 4 * whole + (min(left, 1) if is_short else 4)


def slice_functions(row):
    """load_slice, store_slice and put_row: for rows of so many words."""
    whole, left, is_short = slice_shape(row)

    @cuda.jit(device=True, forceinline=True)
    def load_slice(raw, pages, page, first, last, lane):
        """Loads the rows first .. first + 7 of a page, wherever its last live one is."""
        at = uint64(uint64(page * uint64(PAGE * row)) + uint64(uint32(first * uint32(row))))
        at, of_left = uint64(at + uint64(uint32(lane * uint32(4)))), uint64(at + uint64(128 * whole))
        for i in range(uint32(whole)):
            n = uint32(uint32(4) * i)
            raw[n], raw[n + uint32(1)], raw[n + uint32(2)], raw[n + uint32(3)] = load_words4(
                pages, uint64(at + uint64(uint32(uint32(128) * i))))
        if is_short:
            if lane < uint32(left):
                raw[4 * whole] = load_word(pages, uint64(of_left + uint64(lane)))
        elif lane < uint32(left // 4):
            raw[4 * whole], raw[4 * whole + 1], raw[4 * whole + 2], raw[4 * whole + 3] = load_words4(
                pages, uint64(at + uint64(128 * whole)))

    @cuda.jit(device=True, forceinline=True)
    def store_slice(to, raw, lane):
        """Writes what `load_slice` has loaded to a shared address."""
        at, of_left = to + uint64(uint32(lane * uint32(16))), to + uint64(512 * whole)
        for i in range(uint32(whole)):
            n = uint32(uint32(4) * i)
            store_shared4(at + uint64(uint32(uint32(512) * i)), raw[n], raw[n + uint32(1)], raw[n + uint32(2)],
                          raw[n + uint32(3)])
        if is_short:
            if lane < uint32(left):
                store_shared(of_left + uint64(uint32(lane * uint32(4))), raw[4 * whole])
        elif lane < uint32(left // 4):
            store_shared4(at + uint64(512 * whole), raw[4 * whole], raw[4 * whole + 1], raw[4 * whole + 2],
                          raw[4 * whole + 3])

    @cuda.jit(device=True, forceinline=True)
    def put_row(slice_at, at, new, lane):
        """Replaces rows new .. 7 of the slice at a shared address by the row at another."""
        for j in range(new, uint32(KEYS)):
            for i in range(uint32(-(-row // 32))):
                n = uint32(lane + uint32(32) * i)
                if n < uint32(row):
                    store_shared(slice_at + uint64(uint32(uint32(uint32(j) * uint32(row) + n) * uint32(4))),
                                 load_shared(at + uint64(uint32(n * uint32(4)))))

    return load_slice, store_slice, put_row


def in_turn(functions):
    """A device function that calls these functions of 4 arguments, one after the other. A loop might not be unrolled
    by the compiler, and would then compute indices anew in each turn."""
    if not functions:
        return cuda.jit(device=True, forceinline=True)(lambda a, b, c, d: None)
    first, others = functions[0], in_turn(functions[1:])

    @cuda.jit(device=True, forceinline=True)
    def call(a, b, c, d):
        first(a, b, c, d)
        others(a, b, c, d)

    return call


def scores_of_codes(kind, head_dim, group):
    """own_scale, key_of and scores, for keys in 8 bits."""
    row, scales_at = kind.row(head_dim), kind.functions(head_dim).scales
    lanes, at_once = head_dim // 32, 32 * 32 // head_dim        # lanes of a key; keys of the warp at once
    n_own, second, root = KEYS // at_once, head_dim // 2, float(head_dim) ** -0.5
    bits, n_words, n_sums, query_bytes = lanes.bit_length() - 1, 8 * n_own, HEADS * n_own, 4 * query_row(row)

    @cuda.jit(device=True, forceinline=True)
    def block_of(lane):
        """Which 128 dims the lane has."""
        return uint32(uint32(lane >> uint32(2)) & uint32(1)) if n_own > 1 else uint32(0)

    @cuda.jit(device=True, forceinline=True)
    def own_scale(query_at, lane):
        """What `scores` takes for the lane's query."""
        return scale_of(load_shared(query_at + uint64(4 * scales_at)), block_of(lane)) * float32(root)

    @cuda.jit(device=True, forceinline=True)
    def key_of(lane):
        """The key, of the warp's 8, whose product the lane gets from `scores`."""
        if n_own > 1:
            return uint32(uint32(lane >> uint32(3)) + uint32(lane & uint32(4)))
        return uint32(lane >> uint32(2))

    @cuda.jit(device=True, forceinline=True)
    def sum_heads(x, s, lane):
        """Of the lane's sums with its key s: lane l gets head l % 4, summed over its 4 lanes."""
        n, upper = uint32(uint32(HEADS) * s), (lane & uint32(2)) != uint32(0)
        x0, x1 = exchange(x[n], x[n + uint32(2)], upper, 2), exchange(x[n + uint32(1)], x[n + uint32(3)], upper, 2)
        return as_float(exchange(x0, x1, (lane & uint32(1)) != uint32(0), 1))

    @cuda.jit(device=True, forceinline=True)
    def scores(keys_at, queries, scale, lane):
        """q . k of the queries, rows at a shared address, with the slice at another: lane l gets the product of head
        l % 4 and its key. scale: of that head."""
        k, q, x = cuda.local.array(n_words, uint32), cuda.local.array(8, uint32), cuda.local.array(n_sums, int32)
        own, part = uint32(lane >> uint32(bits)), uint32(uint32(lane & uint32(lanes - 1)) * uint32(16))
        for s in range(uint32(n_own)):
            at = keys_at + uint64(uint32(uint32(own + uint32(at_once) * s) * uint32(4 * row) + part))
            for j in range(uint32(4)):
                n = uint32(uint32(8) * s + j)
                k[n] = load_shared(at + uint64(uint32(uint32(4) * j)))
                k[n + uint32(4)] = load_shared(at + uint64(uint32(uint32(second) + uint32(4) * j)))
        for h in range(uint32(HEADS)):
            if h < uint32(group):
                at = queries + uint64(uint32(uint32(h) * uint32(query_bytes) + part))
                q[0], q[1], q[2], q[3] = load_shared4(at)
                q[4], q[5], q[6], q[7] = load_shared4(at + uint64(second))
            for s in range(uint32(n_own)):
                n = uint32(uint32(HEADS) * s + h)
                if h < uint32(group):
                    total = int32(0)
                    for j in range(uint32(8)):
                        total = dp4a(q[j], k[uint32(uint32(8) * s + j)], total)
                    x[n] = total
                else:
                    x[n] = x[uint32(n - uint32(1))]     # the last head again
        own_at = keys_at + uint64(uint32(uint32(own * uint32(row) + uint32(scales_at)) * uint32(4)))
        block = block_of(lane)
        y = sum_heads(x, uint32(0), lane) * (scale_of(load_shared(own_at), block) * scale)
        if n_own > 1:
            of_next = scale_of(load_shared(own_at + uint64(4 * row * at_once)), block)
            z = sum_heads(x, uint32(1), lane) * (of_next * scale)
            keep, send = (z, y) if block != uint32(0) else (y, z)
            y = keep + cuda.shfl_xor_sync(EVERY_LANE, send, 4)
        return y

    return own_scale, key_of, scores


def scores_of_halves(kind, head_dim, group):
    """The same for keys of fewer bits: products of halves, and float sums in the order of kernels/attend_decode.py. A
    key is expanded for all heads at once, and then it is forgotten."""
    row, load_shared_row = kind.row(head_dim), kind.functions(head_dim).load_shared
    own_keys, chunks, query_bytes = KEYS * head_dim // 256, head_dim // 8, 2 * head_dim

    @cuda.jit(device=True, forceinline=True)
    def own_scale(query_at, lane):
        return float32(1.0)

    @cuda.jit(device=True, forceinline=True)
    def key_of(lane):
        return uint32(lane >> uint32(2))

    @cuda.jit(device=True, forceinline=True)
    def dot(q, k):
        h = hfma2(q[3], k[3], hfma2(q[2], k[2], hfma2(q[1], k[1], hmul2(q[0], k[0]))))
        return half2_low(h) + half2_high(h)

    @cuda.jit(device=True, forceinline=True)
    def exchange_floats(x, y, upper, offset):
        keep, send = (y, x) if upper else (x, y)
        return keep + cuda.shfl_xor_sync(EVERY_LANE, send, offset)

    def sum_key(j):
        """Of keys j and j + 4, one for each half of the warp: the lane's part of the products with all heads."""
        @cuda.jit(device=True, forceinline=True)
        def sum_one(x, rows, queries, lane):
            """rows: addresses of the first key of the lane's half and of the first one of the other half."""
            (own, other), chunk = rows, uint32(lane & uint32(chunks - 1))
            k = load_shared_row(own + uint64(4 * row * j), chunk)
            further = k
            if own_keys == KEYS:
                further = load_shared_row(other + uint64(4 * row * j), chunk)
            for h in range(uint32(HEADS)):
                n = uint32(uint32(4) * h + uint32(j))
                if h < uint32(group):
                    q = load_shared4(queries + uint64(uint32(uint32(h) * uint32(query_bytes) + chunk * uint32(16))))
                    x[n] = dot(q, k)
                    if own_keys == KEYS:
                        x[n] = x[n] + cuda.shfl_xor_sync(EVERY_LANE, dot(q, further), 16)
                else:
                    x[n] = x[uint32(n - uint32(4))]     # the last head again
        return sum_one

    sum_keys = in_turn([sum_key(j) for j in range(4)])

    @cuda.jit(device=True, forceinline=True)
    def scores(keys_at, queries, scale, lane):
        x = cuda.local.array(16, float32)               # [head][key, or pair of keys]
        half = uint32(uint32(lane >> uint32(4)) * uint32(16 * row))     # bytes to the keys of the lane's half
        sum_keys(x, (keys_at + uint64(half), keys_at + uint64(uint32(uint32(16 * row) - half))), queries, lane)
        for h in range(uint32(HEADS)):
            n, upper = uint32(uint32(4) * h), (lane & uint32(8)) != uint32(0)
            x0 = exchange_floats(x[n], x[n + uint32(2)], upper, 8)
            x1 = exchange_floats(x[n + uint32(1)], x[n + uint32(3)], upper, 8)
            x[h] = exchange_floats(x0, x1, (lane & uint32(4)) != uint32(0), 4)
        upper = (lane & uint32(2)) != uint32(0)
        x0, x1 = exchange_floats(x[0], x[2], upper, 2), exchange_floats(x[1], x[3], upper, 2)
        return exchange_floats(x0, x1, (lane & uint32(1)) != uint32(0), 1)

    return own_scale, key_of, scores


def value_functions(kind, head_dim, group):
    """add_values: the products of probabilities and values."""
    row, load_row = kind.row(head_dim), kind.functions(head_dim).load_shared
    own_keys, chunks, n_chains = KEYS * head_dim // 256, head_dim // 8, 4 * group

    @cuda.jit(device=True, forceinline=True)
    def add_key(chains, values_at, p_at, chunk):
        """Adds a key to the chains: its row of values, and its probability for each head, at shared addresses."""
        v, p = cuda.local.array(4, uint32), cuda.local.array(HEADS, uint32)
        v[0], v[1], v[2], v[3] = load_row(values_at, chunk)
        p[0], p[1], p[2], p[3] = load_shared4(p_at)
        for g in range(uint32(group)):
            for w in range(uint32(4)):
                n = uint32(uint32(4) * g + w)
                chains[n] = hfma2(p[g], v[w], chains[n])

    def add_key_function(j):
        @cuda.jit(device=True, forceinline=True)
        def add_one(chains, values_at, p_at, chunk):
            add_key(chains, values_at + uint64(4 * row * j), p_at + uint64(16 * j), chunk)
        return add_one

    add_keys = in_turn([add_key_function(j) for j in range(own_keys)])

    @cuda.jit(device=True, forceinline=True)
    def add_values(o, values_at, p_at, lane):
        """Adds p v, chained over the lane's keys in half precision, to the lane's 8 dims of each head in o."""
        chains, chunk = cuda.local.array(n_chains, uint32), uint32(lane & uint32(chunks - 1))
        first = uint32(uint32(lane // uint32(chunks)) * uint32(own_keys))
        for n in range(uint32(n_chains)):
            chains[n] = uint32(MINUS_ZEROS)             # so that the first sum is the first product
        add_keys(chains, values_at + uint64(uint32(first * uint32(4 * row))),
                 p_at + uint64(uint32(first * uint32(16))), chunk)
        for n in range(uint32(n_chains)):
            i = uint32(uint32(2) * n)
            o[i], o[i + uint32(1)] = o[i] + half2_low(chains[n]), o[i + uint32(1)] + half2_high(chains[n])

    return add_values


def walk_of(format, head_dim, group, put_rows_function):
    """The Walk. put_rows_function(put_row): puts all new rows, of kernels/attend_decode.py."""
    k_row, v_row = format.keys.row(head_dim), format.values.row(head_dim)
    load_keys, store_keys, put_key = slice_functions(k_row)
    load_values, store_values, put_value = slice_functions(v_row)
    put_keys, put_values = put_rows_function(put_key), put_rows_function(put_value)
    by_codes, n_o = format.keys.by_codes, 8 * group
    parts = scores_of_codes(format.keys, head_dim, group) if by_codes else \
        scores_of_halves(format.keys, head_dim, group)
    own_scale, key_of, scores = parts
    add_values = value_functions(format.values, head_dim, group)
    query_bytes = 4 * query_row(k_row) if by_codes else 2 * head_dim
    key_bits = (8, 16, 4) if by_codes and head_dim == 256 else (4, 8, 16)   # of a lane's number: its key, in this order
    k_bytes, slice_bytes = 4 * k_row, 4 * KEYS * k_row

    @cuda.jit(device=True, forceinline=True)
    def rescale(o, of_before):
        for g in range(uint32(group)):
            f = cuda.shfl_sync(EVERY_LANE, of_before, g)
            for d in range(uint32(8)):
                n = uint32(uint32(8) * g + d)
                o[n] = o[n] * f

    @cuda.jit(device=True, forceinline=True)
    def walk_alone(o, factors, totals, raw, k_pages, v_pages, block_table, cache, pages, last, queries, newest_at,
                   new_rows, stage_at, p_at, warp, lane):
        """From the first page on, whose slices are loaded already, to the last one. o <- 8 dims of each head of the
        warp's keys; factors, totals [warp][head] <- their maximum and sum."""
        raw_keys, raw_values = raw
        max_pages, slot, kv_head, n_kv = cache
        first_page, end_page, last_page, position = pages
        first_key, own_head = uint32(warp * uint32(KEYS)), uint32(lane & uint32(3))
        own_query = queries + uint64(uint32(uint32(min(own_head, uint32(group - 1))) * uint32(query_bytes)))
        scale, own_key, values_at = own_scale(own_query, lane), key_of(lane), stage_at + uint64(slice_bytes)
        own_p = p_at + uint64(uint32(uint32(own_key * uint32(16)) + uint32(own_head * uint32(4))))
        high, total = float32(MINUS_INFINITY), float32(0.0)
        for i in range(uint32(n_o)):
            o[i] = float32(0.0)
        at_table, most = uint32(slot * max_pages), uint32(end_page - uint32(1))
        held = uint32(block_table[uint32(at_table + min(uint32(first_page + uint32(1)), most))])   # the next page
        for done in range(uint32(end_page - first_page)):
            number = uint32(first_page + uint32(done) + uint32(1))
            next_page, next_last = uint64(uint64(held) * uint64(n_kv) + uint64(kv_head)), uint32(0)
            if number < end_page:
                next_last = uint32(min(uint32(position - number * uint32(PAGE)), uint32(PAGE - 1)))
            if first_key <= last:
                store_keys(stage_at, raw_keys, lane)
                store_values(values_at, raw_values, lane)
                if number < end_page and first_key <= next_last:
                    load_keys(raw_keys, k_pages, next_page, first_key, next_last, lane)
                    load_values(raw_values, v_pages, next_page, first_key, next_last, lane)
                held = uint32(block_table[uint32(at_table + min(uint32(number + uint32(1)), most))])
                cuda.syncwarp()
                if number > last_page:
                    put_keys(stage_at, newest_at, new_rows, uint32(0), first_key, lane)
                    put_values(values_at, newest_at + uint64(k_bytes), new_rows, uint32(0), first_key, lane)
                    cuda.syncwarp()
                x = scores(stage_at, queries, scale, lane)
                x = x if uint32(first_key + own_key) <= last else float32(MINUS_INFINITY)
                page_high = x
                for offset in (4, 8, 16):
                    page_high = float_max(page_high, cuda.shfl_xor_sync(EVERY_LANE, page_high, offset))
                new_high = float_max(high, page_high)
                lower, p = high - new_high, exp(x - new_high)
                high = new_high
                store_shared(own_p, pack_half2(p, p))
                if cuda.all_sync(EVERY_LANE, lower == float32(0.0)):
                    total = total + p               # exp(0) is 1
                else:
                    of_before = exp(lower)
                    total = cuda.fma(total, of_before, p)
                    rescale(o, of_before)
                cuda.syncwarp()
                add_values(o, values_at, p_at, lane)
                cuda.syncwarp()     # before the next page's rows overwrite these
            last = next_last
        for offset in key_bits:
            total = total + cuda.shfl_xor_sync(EVERY_LANE, total, offset)
        if lane < uint32(group):
            at = uint32(warp * uint32(group) + lane)
            factors[at], totals[at] = high, total

    return Walk(load_keys, load_values, slice_words(k_row), slice_words(v_row), KEYS * (k_row + v_row), walk_alone)
