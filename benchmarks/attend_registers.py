"""Attention of decoded tokens in few bits, as kernels/attend_staged.py does it, with rows in registers: a version to
compare with, which no engine launches. Bits and parameters are the same.

A lane loads the words of its 8 dims of each key, 4 bytes at a time, and all lanes of a span share each sum of a score.
Keys are under way only while values are multiplied, and values only while scores are made. When a card has compared the
two (benchmarks/attend_variants.py), this file goes.
"""

from numba import cuda
from numba.types import float32, uint32, uint64

from kernels import attend_codes, attend_staged
from kernels.attend_decode import DIMS, EVERY_LANE, KEYS, MINUS_INFINITY, product_functions, row_functions
from kernels.attend_staged import Walk
from kernels.intrinsics import exp, float_max, half2_high, half2_low, load_shared4, pack_half2, store_shared
from kernels.kv_cache import head_of_page
from kernels.kv_formats import PAGE


def walk_of(format, head_dim, group, put_rows_function):
    """The Walk whose lanes keep the words of their dims in registers."""
    own_keys, by_codes = KEYS * head_dim // (32 * DIMS), format.keys.by_codes
    load_keys, expand_keys, put_key = row_functions(format.keys, head_dim, own_keys)
    load_values, expand_values, put_value = row_functions(format.values, head_dim, own_keys)
    dot_heads, chain_values = product_functions(own_keys)
    n_k_loaded, n_v_loaded = (own_keys * each.n_raw for each in format.functions(head_dim))
    n_words, most, n_o, k_bytes = 4 * own_keys, group - 1, DIMS * group, 4 * format.keys.row(head_dim)
    query_bytes, lane_bytes = 2 * head_dim, 2 * DIMS
    if by_codes:
        load_keys, put_key, dot_heads = attend_codes.key_functions(format.keys, head_dim, own_keys)
        n_k_loaded, lane_bytes = attend_codes.n_key_words(own_keys), 4
        query_bytes = 4 * attend_staged.query_row(format.keys.row(head_dim))
    put_keys, put_values = put_rows_function(put_key), put_rows_function(put_value)
    chunks = head_dim // DIMS

    @cuda.jit(device=True, forceinline=True)
    def of_head(queries, head, chunk):
        return queries + uint64(uint32(uint32(min(head, most) * query_bytes) + uint32(chunk * uint32(lane_bytes))))

    @cuda.jit(device=True, forceinline=True)
    def walk_alone(o, factors, totals, raw, k_pages, v_pages, block_table, cache, pages, last, queries, newest_at,
                   new_rows, stage_at, p_at, warp, lane):
        loaded_keys, loaded_values = raw
        kw = loaded_keys
        if not by_codes:
            kw = cuda.local.array(n_words, uint32)
        vw, pw = cuda.local.array(n_words, uint32), cuda.local.array(own_keys, uint32)
        max_pages, slot, kv_head, n_kv = cache
        first_page, end_page, last_page, position = pages
        first_key, own_head = uint32(warp * uint32(KEYS)), uint32(lane & uint32(3))
        chunk, span = uint32(lane & uint32(chunks - 1)), uint32(lane // uint32(chunks))
        own_query = queries + uint64(uint32(uint32(min(own_head, uint32(most))) * uint32(query_bytes)))
        high, total = float32(MINUS_INFINITY), float32(0.0)
        for i in range(uint32(n_o)):
            o[i] = float32(0.0)
        for done in range(uint32(end_page - first_page)):
            number = uint32(first_page + uint32(done) + uint32(1))
            next_page, next_last, more = uint64(0), uint32(0), number < end_page
            if more:
                next_page = head_of_page(block_table, max_pages, slot, number, kv_head, n_kv)
                next_last = uint32(min(uint32(position - number * uint32(PAGE)), uint32(PAGE - 1)))
            load_next = more and first_key <= next_last
            if first_key <= last:
                if not by_codes:
                    expand_keys(kw, loaded_keys, lane)
                if number > last_page:
                    put_keys(kw, newest_at, new_rows, uint32(0), first_key, lane)
                x = dot_heads(of_head(queries, 0, chunk), of_head(queries, 1, chunk), of_head(queries, 2, chunk),
                              of_head(queries, 3, chunk), own_query, kw, lane)
                x = x if uint32(first_key + uint32(lane >> uint32(2))) <= last else float32(MINUS_INFINITY)
                page_high = x
                for offset in (4, 8, 16):
                    page_high = float_max(page_high, cuda.shfl_xor_sync(EVERY_LANE, page_high, offset))
                new_high = float_max(high, page_high)
                of_before, p = exp(high - new_high), exp(x - new_high)
                high, total = new_high, cuda.fma(total, of_before, p)
                store_shared(p_at + uint64(uint32(uint32(own_head * uint32(4 * KEYS)) +
                                                  uint32(lane & uint32(28)))), pack_half2(p, p))
                if not cuda.all_sync(EVERY_LANE, of_before == float32(1.0)):
                    for g in range(uint32(group)):
                        f = cuda.shfl_sync(EVERY_LANE, of_before, g)
                        for d in range(uint32(DIMS)):
                            n = uint32(uint32(DIMS) * g + d)
                            o[n] = o[n] * f
                cuda.syncwarp()
                if load_next:
                    load_keys(loaded_keys, k_pages, next_page, first_key, next_last, lane)
                expand_values(vw, loaded_values, lane)
                if number > last_page:
                    put_values(vw, newest_at + uint64(k_bytes), new_rows, uint32(0), first_key, lane)
                for g in range(uint32(group)):
                    at = p_at + uint64(uint32(g * uint32(4 * KEYS) + span * uint32(4 * own_keys)))
                    pw[0], pw[1], pw[2], pw[3] = load_shared4(at)
                    if own_keys == KEYS:
                        pw[4], pw[5], pw[6], pw[7] = load_shared4(at + uint64(16))
                    for w in range(uint32(DIMS // 2)):
                        h, n = chain_values(pw, vw, w), uint32(uint32(DIMS) * g + uint32(2) * w)
                        o[n], o[n + uint32(1)] = o[n] + half2_low(h), o[n + uint32(1)] + half2_high(h)
                if load_next:
                    load_values(loaded_values, v_pages, next_page, first_key, next_last, lane)
                cuda.syncwarp()
            last = next_last
        for offset in (4, 8, 16):
            total = total + cuda.shfl_xor_sync(EVERY_LANE, total, offset)
        if lane < uint32(group):
            at = uint32(warp * uint32(group) + lane)
            factors[at], totals[at] = high, total

    return Walk(load_keys, load_values, n_k_loaded, n_v_loaded, 0, walk_alone)
