"""The way through keys and values of few bits as a card is to compare it with kernels/attend_staged.py: the same bits,
but a pair of codes takes one instruction more to become halves, 3 bits two more for each 8 dims, and keys of few bits
are exchanged by selections. When a card has compared them (benchmarks/attend_variants.py), this file goes.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.types import float32, uint32, uint64

from kernels.attend_codes import KEYS
from kernels.attend_staged import (EVERY_LANE, HEADS, MINUS_INFINITY, MINUS_ZEROS, Walk, in_turn, query_row,
                                   scores_of_codes, slice_functions, slice_words)
from kernels.intrinsics import (exp, float_max, half2_high, half2_low, hfma2, hmul2, load_shared, load_shared4,
                                pack_half2, prmt, store_shared)
from kernels.kv_formats import KV_FORMATS, PAGE, Code


@cache
def former_row(kind, head_dim):
    """load_shared of kernels/kv_formats.py, as it was."""
    parts = kind.functions(head_dim)
    if kind.by_codes:
        return parts.load_shared
    bits = 4 if kind is KV_FORMATS["q4"].values else 3
    code, n_words = Code(bits), Code(bits).words(head_dim)
    place, middle, mask = code.place, 0x10001 * int(np.float16(-code.middle).view(np.uint16)), 0
    mask = (2 ** bits - 1) * 0x10001 << place
    shifts = (6, 2, -2, -6) if bits == 4 else (7, 4, 1, -2)

    @cuda.jit(device=True, forceinline=True)
    def pair(w, t, m):
        return hfma2(uint32(uint32(w & uint32(mask)) | uint32(0x3C003C00)), t, m)

    @cuda.jit(device=True, forceinline=True)
    def load_row(address, chunk):
        scales = load_shared(address + uint64(4 * n_words))
        t = prmt(scales, uint32(0), uint32(0x3232) if chunk >= uint32(16) else uint32(0x1010))
        m = hmul2(t, uint32(middle))
        if bits == 3:
            first = uint32(chunk * uint32(3))
            w0 = load_shared(address + uint64(uint32(uint32(first >> uint32(2)) * uint32(4))))
            w1 = load_shared(address + uint64(uint32(uint32(uint32(first + uint32(2)) >> uint32(2)) * uint32(4))))
            w = uint32(uint64(uint64(uint64(w1) << uint64(32)) | uint64(w0)) >>
                       uint64(uint32(uint32(first & uint32(3)) * uint32(8))))
            w = uint32(uint32(w & uint32(0xFFF)) | uint32(uint32(w << uint32(4)) & uint32(0x0FFF0000)))
        else:
            w = load_shared(address + uint64(uint32(chunk * uint32(4))))
        return (pair(uint32(w << uint32(shifts[0])), t, m), pair(uint32(w << uint32(shifts[1])), t, m),
                pair(uint32(w << uint32(1)) if bits == 3 else uint32(w >> uint32(2)), t, m),
                pair(uint32(w >> uint32(-shifts[3])), t, m))

    return load_row


def scores_of_halves(kind, head_dim, group):
    """The same for keys of fewer bits: products of halves, and float sums in the order of kernels/attend_decode.py. A
    key is expanded for all heads at once, and then it is forgotten."""
    row, load_shared_row = kind.row(head_dim), former_row(kind, head_dim)
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
        def sum_one(x, keys_at, queries, lane):
            chunk, upper = uint32(lane & uint32(chunks - 1)), (lane & uint32(16)) != uint32(0)
            at = keys_at + uint64(4 * row * j)
            if own_keys != KEYS:
                at = at + uint64(uint32(uint32(lane >> uint32(4)) * uint32(4 * row * own_keys)))
            k = load_shared_row(at, chunk)
            further = k
            if own_keys == KEYS:
                further = load_shared_row(at + uint64(4 * row * 4), chunk)
            for h in range(uint32(HEADS)):
                n = uint32(uint32(4) * h + uint32(j))
                if h < uint32(group):
                    q = load_shared4(queries + uint64(uint32(uint32(h) * uint32(query_bytes) + chunk * uint32(16))))
                    x[n] = exchange_floats(dot(q, k), dot(q, further), upper, 16) if own_keys == KEYS else dot(q, k)
                else:
                    x[n] = x[uint32(n - uint32(4))]     # the last head again
        return sum_one

    sum_keys = in_turn([sum_key(j) for j in range(4)])

    @cuda.jit(device=True, forceinline=True)
    def scores(keys_at, queries, scale, lane):
        x = cuda.local.array(16, float32)               # [head][key, or pair of keys]
        sum_keys(x, keys_at, queries, lane)
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
    row, load_row = kind.row(head_dim), former_row(kind, head_dim)
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
