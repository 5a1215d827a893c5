"""Causal attention with grouped heads over the paged KV cache, with a gated output: for prefill and for
decode.

    s_j = q . k_j               over the keys j = 0 .. position; q already carries the scale 256^-1/2
    o   = sum_j softmax(s)_j v_j
    out = o * sigmoid(gate)     elementwise

Query head h reads KV head h // (heads / n_kv).

    q        float16 [rows, heads, 256]
    qg       float32 [rows, heads, 512]         the gate is the second half of a head
    k, v     float16 [n_pages, n_kv, 64, 256]   pages, found through block_table int32 [n_slots, max_pages]
    out      float32 [rows, heads * 256]        row_slot, row_pos  int32 [rows]

Half precision where it is harmless. Products run on packed half2 FMA: a chain adds at most 8 products per
half before it is added to a float32 sum, so a chain's rounding errors (2^-11 of its partial sum each) do
not grow with the context. Softmax statistics, rescaling and all longer sums are float32; probabilities are
rounded to half, at most 1, for the product with v. A value beyond 8,000 in magnitude would overflow a
chain. Against float64 on the same float16 inputs the relative L2 error is 7e-4 over all and 2e-3 in the
worst row (`python -m kernels.attention`).

**Prefill** (rows of one slot at consecutive positions). A block of 4 warps shares a KV head; a warp takes 8
consecutive rows of one query head and walks over the keys in steps of 32, at absolute multiples of 32, with
an online softmax. A step in which a row sees no key changes none of its bits, so results do not depend on
how a prompt is cut into launches.

    shared memory, words:   q [4 warps][8 rows][132]   k or v [32 keys][132]   p [4 warps][8 rows][32 keys]

Rows of 128 words are padded to 132: 8 lanes reading 16 bytes of 8 neighbouring keys then touch all 32 banks
once. p holds each probability twice, as the half2 that multiplies two dims of v.

    scores: a lane owns 4 rows x 2 keys (lane // 16 picks the rows, lane % 16 the keys), all 256 dims
    values: a lane owns 8 rows x 8 dims (dims 8 lane .. 8 lane + 7), all 32 keys

**Decode** (one row per slot). The keys are split at absolute multiples of 256 over blocks, and within a
block over 4 warps: a warp takes the 64 keys of one page for all query heads of a KV head at once, so the
cache is read once. A lane holds 8 dims; its partial dot products for 8 keys are summed over the lanes by a
butterfly that halves the number of values at each exchange, 9 shuffles for 8 keys. Blocks write the partial
result of their split (maximum, sum, 256 values, float32), a second kernel merges the splits in increasing
order. Everything that depends on the length is read on the card, so a recorded launch serves every length;
its cost follows the length of the sequences.

Keys and values beyond the live length are never read (the index is clamped to the last live key, whose
probability is then 0): what a page holds there, NaN included, does not matter.

Pipe: half2. Per query head and visible key 256 packed FMA; prefill is expected at 60 % of the half2 peak.
Decode moves 1,024 bytes per key and KV head and is bound by memory from about 4,000 tokens on.
"""

import functools

import numpy as np
from numba import cuda
from numba.types import float32, uint32, uint64

from kernels.bench import Case, main
from kernels.intrinsics import (div_rn, exp, float_max, half2_high, half2_low, hfma2, hmul2, load_floats4,
                                load_words4, pack_half2, sigmoid, store_floats4, store_word, store_words4,
                                warp_max, warp_sum)
from kernels.kv_cache import PAGE, page_offset
from kernels.rope import HEAD_DIM

WARPS = 4                # per block
ROWS = 8                 # query rows of a warp (prefill)
KEYS = 32                # keys of a step (prefill)
STRIDE = 132             # words from one row to the next in shared memory
CHAIN = 8                # products added in half precision
DIMS = HEAD_DIM // 32    # dims of a lane
SPLIT = WARPS * PAGE     # keys of a split (decode)
SPLIT_BLOCKS = 64        # blocks that share the splits of a sequence
RECORD = HEAD_DIM + 8    # floats of a partial result: 256 values, maximum, sum, 6 unused
Q_TILE, KV_TILE, P_TILE = WARPS * ROWS * STRIDE, KEYS * STRIDE, WARPS * ROWS * KEYS  # words
OUTPUTS, VALUES = ROWS * DIMS, CHAIN * DIMS // 2    # of a lane: floats of o (prefill), words of 8 rows of v
MINUS_INFINITY = float("-inf")
EVERY_LANE = 0xFFFFFFFF


# ---- reference ---------------------------------------------------------------------------------------------

def attention_reference(q, k, v, gate, positions):
    """q [rows, heads, 256], k and v [keys, n_kv, 256], gate [rows, heads, 256], positions [rows] -> [rows,
    heads * 256], in float64. Row r sees keys 0 .. positions[r]."""
    q, k, v, gate = (np.asarray(a, np.float64) for a in (q, k, v, gate))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("rhd,khd->hrk", q, k)
    scores[:, np.arange(len(k)) > np.asarray(positions)[:, None]] = -np.inf
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    o = np.einsum("hrk,khd->rhd", p / p.sum(axis=-1, keepdims=True), v)
    return (o / (1.0 + np.exp(-gate))).reshape(len(q), -1)


# ---- shared by both families -------------------------------------------------------------------------------

@cuda.jit(device=True, inline="always")
def add_values(o, at, p, p_at, v):
    """o[at : at + 8] += sum over 8 keys of p * v; v: 8 keys x 4 words of a lane, p: the 8 keys' doubled
    probabilities."""
    p0, p1, p2, p3 = load_words4(p, p_at)
    p4, p5, p6, p7 = load_words4(p, uint32(p_at + uint32(4)))
    for w in range(uint32(DIMS // 2)):
        h = hmul2(p0, v[w])
        h = hfma2(p1, v[w + uint32(4)], h)
        h = hfma2(p2, v[w + uint32(8)], h)
        h = hfma2(p3, v[w + uint32(12)], h)
        h = hfma2(p4, v[w + uint32(16)], h)
        h = hfma2(p5, v[w + uint32(20)], h)
        h = hfma2(p6, v[w + uint32(24)], h)
        h = hfma2(p7, v[w + uint32(28)], h)
        d = uint32(at + w + w)
        o[d] = o[d] + half2_low(h)
        o[d + uint32(1)] = o[d + uint32(1)] + half2_high(h)


# ---- prefill -----------------------------------------------------------------------------------------------

@cuda.jit(device=True, inline="always")
def load_tile(tile, pages, at, last, lane, warp):
    """32 rows of a page from element `at` on into shared memory, a warp per row; rows beyond `last` repeat
    that one."""
    for i in range(uint32(KEYS // WARPS)):
        key = uint32(i * uint32(WARPS) + warp)
        source = key if key < last else last
        from_word = uint64(at + uint64(uint32(source * uint32(HEAD_DIM) + lane * uint32(DIMS))))
        w0, w1, w2, w3 = load_words4(pages, from_word)
        store_words4(tile, uint32(key * uint32(STRIDE) + lane * uint32(4)), w0, w1, w2, w3)


@cuda.jit(device=True, inline="always")
def add_scores(s, q, q_at, k, k_at):
    """s[2 i + j] += q row i . key j over 16 dims, for the 4 rows at word q_at of q and the 2 keys at word
    k_at of k."""
    kw = cuda.local.array(16, uint32)
    kw[0], kw[1], kw[2], kw[3] = load_words4(k, k_at)
    kw[4], kw[5], kw[6], kw[7] = load_words4(k, uint32(k_at + uint32(4)))
    kw[8], kw[9], kw[10], kw[11] = load_words4(k, uint32(k_at + uint32(16 * STRIDE)))
    kw[12], kw[13], kw[14], kw[15] = load_words4(k, uint32(k_at + uint32(16 * STRIDE + 4)))
    for i in range(uint32(4)):
        q0, q1, q2, q3 = load_words4(q, uint32(q_at + i * uint32(STRIDE)))
        q4, q5, q6, q7 = load_words4(q, uint32(q_at + i * uint32(STRIDE) + uint32(4)))
        for j in range(uint32(2)):
            h = hmul2(q0, kw[uint32(8) * j])
            h = hfma2(q1, kw[uint32(8) * j + uint32(1)], h)
            h = hfma2(q2, kw[uint32(8) * j + uint32(2)], h)
            h = hfma2(q3, kw[uint32(8) * j + uint32(3)], h)
            h = hfma2(q4, kw[uint32(8) * j + uint32(4)], h)
            h = hfma2(q5, kw[uint32(8) * j + uint32(5)], h)
            h = hfma2(q6, kw[uint32(8) * j + uint32(6)], h)
            h = hfma2(q7, kw[uint32(8) * j + uint32(7)], h)
            n = uint32(uint32(2) * i + j)
            s[n] = s[n] + (half2_low(h) + half2_high(h))


@cuda.jit(device=True, inline="always")
def half_warp_max(x):
    for offset in (8, 4, 2, 1):
        x = float_max(x, cuda.shfl_xor_sync(EVERY_LANE, x, offset))
    return x


@cuda.jit(device=True, inline="always")
def half_warp_sum(x):
    for offset in (8, 4, 2, 1):
        x = x + cuda.shfl_xor_sync(EVERY_LANE, x, offset)
    return x


@cuda.jit
def attend_tiles(out, q, qg, k_pages, v_pages, block_table, row_slot, row_pos, max_pages, rows, heads, n_kv):
    """Grid (tiles of 4 warps, n_kv), block (32, 4). Warp u of a KV head takes rows 8 (u // group) .. + 7 of
    its query head u % group."""
    q_tile = cuda.shared.array(Q_TILE, uint32)
    kv_tile = cuda.shared.array(KV_TILE, uint32)
    p_tile = cuda.shared.array(P_TILE, uint32)
    # Local arrays: all indices are constants once unrolled, so these are registers.
    o = cuda.local.array(OUTPUTS, float32)
    s = cuda.local.array(8, float32)
    high = cuda.local.array(4, float32)   # of the lane's 4 score rows: maximum and sum so far,
    total = cuda.local.array(4, float32)
    scale = cuda.local.array(4, float32)  # and the rescaling of a step

    lane, warp, kv_head = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y), uint32(cuda.blockIdx.y)
    group = uint32(heads // n_kv)
    unit = uint32(uint32(cuda.blockIdx.x * uint32(WARPS)) + warp)
    head = uint32(uint32(kv_head * group) + uint32(unit % group))
    row = uint32(uint32(unit // group) * uint32(ROWS))
    slot, start = uint32(row_slot[0]), uint32(row_pos[0])
    position = uint32(start + row)  # of the warp's first row
    last_unit = uint32(uint32(cuda.blockIdx.x * uint32(WARPS)) + uint32(WARPS - 1))
    block_rows = uint32(uint32(uint32(last_unit // group) + uint32(1)) * uint32(ROWS))
    last_key = uint32(start + uint32(min(block_rows, rows)) - uint32(1))  # that any row of the block sees

    for r in range(uint32(ROWS)):
        source = uint32(min(uint32(row + r), uint32(rows - uint32(1))))
        at = uint32(uint32(uint32(source * heads) + head) * uint32(HEAD_DIM) + lane * uint32(DIMS))
        w0, w1, w2, w3 = load_words4(q, at)
        store_words4(q_tile, uint32(uint32(warp * uint32(ROWS) + r) * uint32(STRIDE) + lane * uint32(4)), w0,
                     w1, w2, w3)
    for i in range(uint32(OUTPUTS)):
        o[i] = float32(0.0)
    for i in range(uint32(4)):
        high[i], total[i] = float32(MINUS_INFINITY), float32(0.0)

    half, key_lane = uint32(lane >> uint32(4)), uint32(lane & uint32(15))
    q_at = uint32(uint32(warp * uint32(ROWS) + half * uint32(4)) * uint32(STRIDE))
    p_at = uint32(uint32(warp * uint32(ROWS) + half * uint32(4)) * uint32(KEYS) + key_lane)
    for step in range(uint32(uint32(last_key // uint32(KEYS)) + uint32(1))):
        first = uint32(uint32(step) * uint32(KEYS))
        page = page_offset(block_table, max_pages, slot, uint32(first // uint32(PAGE)), kv_head, n_kv)
        page = uint64(page + uint64(uint32(first % uint32(PAGE)) * uint32(HEAD_DIM)))
        sees = first < uint32(position + uint32(ROWS)) and row < rows  # does a row of the warp see a key?
        cuda.syncthreads()  # everyone has done with the values of the step before
        load_tile(kv_tile, k_pages, page, uint32(last_key - first), lane, warp)
        cuda.syncthreads()
        if sees:
            for i in range(uint32(8)):
                s[i] = float32(0.0)
            for c in range(uint32(HEAD_DIM // 16)):
                word = uint32(uint32(c) * uint32(8))
                add_scores(s, q_tile, uint32(q_at + word), kv_tile, uint32(key_lane * uint32(STRIDE) + word))
            for i in range(uint32(4)):
                limit = uint32(position + half * uint32(4) + i)  # the last key that the row sees
                a, b, key = s[uint32(2) * i], s[uint32(2) * i + uint32(1)], uint32(first + key_lane)
                a = a if key <= limit else float32(MINUS_INFINITY)
                b = b if uint32(key + uint32(16)) <= limit else float32(MINUS_INFINITY)
                new = float_max(high[i], half_warp_max(float_max(a, b)))
                a, b = exp(a - new), exp(b - new)
                scale[i] = exp(high[i] - new)
                total[i] = cuda.fma(total[i], scale[i], half_warp_sum(a + b))
                high[i] = new
                store_word(p_tile, uint32(p_at + i * uint32(KEYS)), pack_half2(a, a))
                store_word(p_tile, uint32(p_at + i * uint32(KEYS) + uint32(16)), pack_half2(b, b))
            for r in range(uint32(ROWS)):
                f = cuda.shfl_sync(EVERY_LANE, scale[r % uint32(4)], uint32(r // uint32(4)) * uint32(16))
                for d in range(uint32(DIMS)):
                    o[r * uint32(DIMS) + d] = o[r * uint32(DIMS) + d] * f
        cuda.syncthreads()
        load_tile(kv_tile, v_pages, page, uint32(last_key - first), lane, warp)
        cuda.syncthreads()
        if sees:
            for c in range(uint32(KEYS // CHAIN)):
                v = cuda.local.array(VALUES, uint32)
                for j in range(uint32(CHAIN)):
                    at = uint32(uint32(uint32(c) * uint32(CHAIN) + j) * uint32(STRIDE) + lane * uint32(4))
                    v[uint32(4) * j], v[uint32(4) * j + uint32(1)], v[uint32(4) * j + uint32(2)], \
                        v[uint32(4) * j + uint32(3)] = load_words4(kv_tile, at)
                for r in range(uint32(ROWS)):
                    at = uint32(uint32(warp * uint32(ROWS) + r) * uint32(KEYS) + uint32(c) * uint32(CHAIN))
                    add_values(o, uint32(r * uint32(DIMS)), p_tile, at, v)

    for r in range(uint32(ROWS)):
        f = div_rn(float32(1.0),
                   cuda.shfl_sync(EVERY_LANE, total[r % uint32(4)], uint32(r // uint32(4)) * uint32(16)))
        if uint32(row + r) < rows:
            row_head = uint32(uint32(uint32(row + r) * heads) + head)
            at = uint32(row_head * uint32(HEAD_DIM) + lane * uint32(DIMS))
            i = uint32(r * uint32(DIMS))
            for half in range(uint32(2)):
                store_floats4(out, uint32(at + uint32(4) * half), o[i] * f, o[i + uint32(1)] * f,
                              o[i + uint32(2)] * f, o[i + uint32(3)] * f)
                i = uint32(i + uint32(4))
    if row < rows:  # a loop of its own, not unrolled: 64 sigmoids would be a large part of the program
        for r in range(uint32(min(uint32(ROWS), uint32(rows - row)))):
            row_head = uint32(uint32(uint32(row + uint32(r)) * heads) + head)
            gate_at = uint32(row_head * uint32(2 * HEAD_DIM) + uint32(HEAD_DIM) + lane * uint32(DIMS))
            at = uint32(row_head * uint32(HEAD_DIM) + lane * uint32(DIMS))
            for half in range(uint32(2)):
                x0, x1, x2, x3 = load_floats4(out, uint32(at + uint32(4) * half))
                g0, g1, g2, g3 = load_floats4(qg, uint32(gate_at + uint32(4) * half))
                store_floats4(out, uint32(at + uint32(4) * half), x0 * sigmoid(g0), x1 * sigmoid(g1),
                              x2 * sigmoid(g2), x3 * sigmoid(g3))


def attend_prefill(card, out, q, qg, k_pages, v_pages, block_table, row_slot, row_pos, rows, heads, n_kv,
                   stream=None):
    """out float32 [rows, heads * 256] for rows of one slot (row_slot[0]) at positions row_pos[0], row_pos[0]
    + 1, ... whose keys and values are in the pages already. q float16 [rows, heads, 256], qg float32 [rows,
    heads, 512], pages float16 [n_pages, n_kv, 64, 256], block_table int32 [n_slots, max_pages], row_slot and
    row_pos int32 [rows]. Writes out only, never allocates."""
    units = -(-rows // ROWS) * (heads // n_kv)
    card.launch(attend_tiles, (-(-units // WARPS), n_kv), (32, WARPS), out.reshape(-1), q.reshape(-1),
                qg.reshape(-1), k_pages.reshape(-1), v_pages.reshape(-1), block_table.reshape(-1), row_slot,
                row_pos, block_table.shape[1], rows, heads, n_kv, stream=stream)


# ---- decode ------------------------------------------------------------------------------------------------

@cuda.jit(device=True, inline="always")
def load_keys(words, pages, page, first, last, lane):
    """Dims of a lane of 8 keys of a page, from `first` on, in 4 words each; keys beyond `last` repeat that
    one."""
    for j in range(uint32(CHAIN)):
        key = uint32(first + j)
        key = key if key < last else last
        at = uint64(page + uint64(uint32(key * uint32(HEAD_DIM) + lane * uint32(DIMS))))
        i = uint32(uint32(4) * j)
        words[i], words[i + uint32(1)], words[i + uint32(2)], words[i + uint32(3)] = load_words4(pages, at)


@cuda.jit(device=True, inline="always")
def exchange(x, y, upper, offset):
    """One stage of the butterfly: of the pair (x, y) the lower lanes keep x and the upper ones y, summed over
    both."""
    keep, send = (y, x) if upper else (x, y)
    return keep + cuda.shfl_xor_sync(EVERY_LANE, send, offset)


@cuda.jit(device=True, inline="always")
def dot_keys(q0, q1, q2, q3, k, lane):
    """q . k for 8 keys, of which each lane holds 8 dims (k: 4 words per key): lane l gets that of key l //
    4."""
    x = cuda.local.array(CHAIN, float32)
    for j in range(uint32(CHAIN)):
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
    x0 = exchange(x0, x1, (lane & uint32(4)) != uint32(0), 4)
    x0 = x0 + cuda.shfl_xor_sync(EVERY_LANE, x0, 2)
    return x0 + cuda.shfl_xor_sync(EVERY_LANE, x0, 1)


@functools.cache
def split_kernel(group):
    """The decode kernel for `group` query heads per KV head (a constant, so that their accumulators are
    registers)."""
    n_o, n_q, n_stats = group * DIMS, group * 4, WARPS * group
    n_p, n_merge = n_stats * PAGE, n_stats * HEAD_DIM

    @cuda.jit
    def attend_split(partial, q, k_pages, v_pages, block_table, row_slot, row_pos, max_pages, n_splits, n_kv):
        """Grid (blocks per sequence, n_kv, batch), block (32, 4). A block takes every gridDim.x-th split of
        its row."""
        p_tile = cuda.shared.array(n_p, uint32)            # [warp][head of the group][64 keys], doubled
        merge = cuda.shared.array(n_merge, float32)        # [warp][head of the group][256]
        highs = cuda.shared.array(n_stats, float32)
        totals = cuda.shared.array(n_stats, float32)
        o = cuda.local.array(n_o, float32)
        qw = cuda.local.array(n_q, uint32)
        low_scores = cuda.local.array(group, float32)      # of keys 8 (lane % 4) + lane // 4 of the page,
        high_scores = cuda.local.array(group, float32)     # and of those 32 further on
        words = cuda.local.array(VALUES, uint32)

        lane, warp, kv_head = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y), uint32(cuda.blockIdx.y)
        row = uint32(cuda.blockIdx.z)
        slot, live = uint32(row_slot[row]), uint32(uint32(row_pos[row]) + uint32(1))
        first_head = uint32(uint32(uint32(row * n_kv) + kv_head) * uint32(group))
        for g in range(uint32(group)):
            at = uint32(uint32(first_head + g) * uint32(HEAD_DIM) + lane * uint32(DIMS))
            i = uint32(uint32(4) * g)
            qw[i], qw[i + uint32(1)], qw[i + uint32(2)], qw[i + uint32(3)] = load_words4(q, at)
        lane_key = uint32(uint32(lane & uint32(3)) * uint32(8) + uint32(lane >> uint32(2)))

        split = uint32(cuda.blockIdx.x)
        while uint32(split * uint32(SPLIT)) < live:
            page_number = uint32(split * uint32(WARPS) + warp)
            if uint32(page_number * uint32(PAGE)) < live:
                keys = uint32(min(uint32(live - page_number * uint32(PAGE)), uint32(PAGE)))
                last = uint32(keys - uint32(1))
                page = page_offset(block_table, max_pages, slot, page_number, kv_head, n_kv)
                n_octets = uint32(uint32(last >> uint32(3)) + uint32(1))
                for g in range(uint32(group)):
                    low_scores[g], high_scores[g] = float32(MINUS_INFINITY), float32(MINUS_INFINITY)
                for octet in range(n_octets):
                    octet = uint32(octet)
                    load_keys(words, k_pages, page, uint32(octet * uint32(8)), last, lane)
                    mine = uint32(lane & uint32(3)) == uint32(octet & uint32(3))
                    for g in range(uint32(group)):
                        i = uint32(uint32(4) * g)
                        x = dot_keys(qw[i], qw[i + uint32(1)], qw[i + uint32(2)], qw[i + uint32(3)],
                                     words, lane)
                        low_scores[g] = x if mine and octet < uint32(4) else low_scores[g]
                        high_scores[g] = x if mine and octet >= uint32(4) else high_scores[g]
                for g in range(uint32(group)):
                    a = low_scores[g] if lane_key <= last else float32(MINUS_INFINITY)
                    b = high_scores[g] if uint32(lane_key + uint32(32)) <= last else float32(MINUS_INFINITY)
                    high = warp_max(float_max(a, b))
                    a, b = exp(a - high), exp(b - high)
                    total = warp_sum(a + b)
                    i = uint32(uint32(warp * uint32(group)) + g)
                    if lane == uint32(0):
                        highs[i], totals[i] = high, total
                    store_word(p_tile, uint32(i * uint32(PAGE) + lane_key), pack_half2(a, a))
                    store_word(p_tile, uint32(i * uint32(PAGE) + lane_key + uint32(32)), pack_half2(b, b))
                cuda.syncwarp()
                for i in range(uint32(n_o)):
                    o[i] = float32(0.0)
                for octet in range(n_octets):
                    octet = uint32(octet)
                    load_keys(words, v_pages, page, uint32(octet * uint32(8)), last, lane)
                    for g in range(uint32(group)):
                        head = uint32(uint32(warp * uint32(group)) + g)
                        at = uint32(head * uint32(PAGE) + octet * uint32(8))
                        add_values(o, uint32(g * uint32(DIMS)), p_tile, at, words)
                for g in range(uint32(group)):
                    head = uint32(uint32(warp * uint32(group)) + g)
                    at = uint32(head * uint32(HEAD_DIM) + lane * uint32(DIMS))
                    i = uint32(g * uint32(DIMS))
                    store_floats4(merge, at, o[i], o[i + uint32(1)], o[i + uint32(2)], o[i + uint32(3)])
                    store_floats4(merge, uint32(at + uint32(4)), o[i + uint32(4)], o[i + uint32(5)],
                                  o[i + uint32(6)], o[i + uint32(7)])
            cuda.syncthreads()

            rest = uint32(live - split * uint32(SPLIT))
            n_pages = uint32(uint32(min(rest, uint32(SPLIT)) + uint32(PAGE - 1)) // uint32(PAGE))  # live ones
            g = warp
            while g < uint32(group):
                high = highs[g]
                for w in range(n_pages):
                    high = float_max(high, highs[uint32(uint32(w) * uint32(group) + g)])
                record = uint32(uint32(uint32(first_head + g) * n_splits + split) * uint32(RECORD))
                total = float32(0.0)
                for i in range(uint32(DIMS)):
                    o[i] = float32(0.0)
                for w in range(n_pages):
                    at = uint32(uint32(w) * uint32(group) + g)
                    f = exp(highs[at] - high)
                    total = cuda.fma(totals[at], f, total)
                    for i in range(uint32(DIMS)):
                        o[i] = cuda.fma(merge[uint32(at * uint32(HEAD_DIM) + i * uint32(32) + lane)], f, o[i])
                for i in range(uint32(DIMS)):
                    partial[uint32(record + i * uint32(32) + lane)] = o[i]
                if lane == uint32(0):
                    partial[uint32(record + uint32(HEAD_DIM))] = high
                    partial[uint32(record + uint32(HEAD_DIM + 1))] = total
                g = uint32(g + uint32(WARPS))
            cuda.syncthreads()
            split = uint32(split + uint32(cuda.gridDim.x))

    return attend_split


@cuda.jit
def merge_splits(out, partial, qg, row_pos, n_splits, heads):
    """Grid (heads, batch), 256 threads: one dim each, over the live splits in increasing order."""
    dim, row = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.y)
    head = uint32(uint32(row * heads) + cuda.blockIdx.x)
    first = uint32(uint32(head * n_splits) * uint32(RECORD))
    n_live = uint32(uint32(uint32(row_pos[row]) // uint32(SPLIT)) + uint32(1))
    high = partial[uint32(first + uint32(HEAD_DIM))]
    for split in range(n_live):
        high = float_max(high, partial[uint32(first + uint32(split) * uint32(RECORD) + uint32(HEAD_DIM))])
    total, o = float32(0.0), float32(0.0)
    for split in range(n_live):
        record = uint32(first + uint32(split) * uint32(RECORD))
        f = exp(partial[uint32(record + uint32(HEAD_DIM))] - high)
        total = cuda.fma(partial[uint32(record + uint32(HEAD_DIM + 1))], f, total)
        o = cuda.fma(partial[uint32(record + dim)], f, o)
    gate = qg[uint32(head * uint32(2 * HEAD_DIM) + uint32(HEAD_DIM) + dim)]
    out[uint32(head * uint32(HEAD_DIM) + dim)] = o * div_rn(float32(1.0), total) * sigmoid(gate)


def scratch_shape(batch, heads, max_pages):
    """Shape of the float32 scratch array of `attend_decode`: 1,056 bytes per row, head and 256 tokens of
    context."""
    return batch, heads, -(-max_pages * PAGE // SPLIT), RECORD


def attend_decode(card, out, q, qg, k_pages, v_pages, block_table, row_slot, row_pos, scratch, batch, heads,
                  n_kv, stream=None):
    """out float32 [batch, heads * 256]: row b is one token of slot row_slot[b] at position row_pos[b], whose
    key and value are in the pages already. q float16 [batch, heads, 256], qg float32 [batch, heads, 512],
    pages float16 [n_pages, n_kv, 64, 256], block_table int32 [n_slots, max_pages], row_slot and row_pos int32
    [batch], scratch float32 of `scratch_shape` (batch or more rows). Writes out and scratch only, never
    allocates."""
    n_splits = scratch.shape[2]
    card.launch(split_kernel(heads // n_kv), (min(n_splits, SPLIT_BLOCKS), n_kv, batch), (32, WARPS),
                scratch.reshape(-1), q.reshape(-1), k_pages.reshape(-1), v_pages.reshape(-1),
                block_table.reshape(-1), row_slot, row_pos, block_table.shape[1], n_splits, n_kv,
                stream=stream)
    card.launch(merge_splits, (heads, batch), HEAD_DIM, out.reshape(-1), scratch.reshape(-1), qg.reshape(-1),
                row_pos, n_splits, heads, stream=stream)


# ---- check -------------------------------------------------------------------------------------------------

# (kind, heads, n_kv, n): prefill: rows 0 .. n - 1 in one launch; decode: one row at each of the positions n.
CASES = [("prefill", 4, 2, 1), ("prefill", 4, 2, 65), ("prefill", 16, 4, 33), ("prefill", 24, 4, 63),
         ("prefill", 4, 2, 500), ("decode", 4, 2, (0, 609, 63)), ("decode", 16, 4, (64, 1)),
         ("decode", 24, 4, (65, 255, 256, 31))]

# Relative L2 error of a row of a head. With scores as large as those of `sample_inputs`, partial sums of a
# score's chains are some 0.15: 256 roundings of 2^-13 / sqrt(12) each make 6e-4, those of v and p add 3e-4.
# Five standard deviations for the worst row; all rows together stay below one of 2^-10.
TOLERANCE, TOLERANCE_ALL = 2.0 ** -8, 2.0 ** -10


def sample_inputs(heads, n_kv, n, positions, seed=0):
    """q, qg of one row per position; k, v of n tokens: float16 and float32 arrays on the host, scores of
    about 1.5."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    rows = len(positions)
    return ((normal(rows, heads, HEAD_DIM) * 1.5 / 16).astype(np.float16), normal(rows, heads, 2 * HEAD_DIM),
            normal(n, n_kv, HEAD_DIM).astype(np.float16), normal(n, n_kv, HEAD_DIM).astype(np.float16))


def paged(sequences, seed=0):
    """[tokens, n_kv, 256] of each slot -> pages (NaN where no token is) and block table (-1 where no page
    is)."""
    counts = [-(-len(x) // PAGE) for x in sequences]
    numbers = np.random.default_rng(seed).permutation(sum(counts) + 3)
    table = np.full((len(sequences), max(counts) + 1), -1, np.int32)
    pages = np.full((len(numbers), sequences[0].shape[1], PAGE, HEAD_DIM), np.nan, np.float16)
    for slot, x in enumerate(sequences):
        table[slot, :counts[slot]], numbers = numbers[:counts[slot]], numbers[counts[slot]:]
        for t, row in enumerate(x):
            pages[table[slot, t // PAGE], :, t % PAGE] = row
    return pages, table


def upload_case(card, case):
    """-> (inputs of each slot, rows' positions of each slot, the launch's arrays q .. row_pos on the
    card)."""
    kind, heads, n_kv, n = case
    positions = [np.arange(n)] if kind == "prefill" else [np.array([position]) for position in n]
    inputs = [sample_inputs(heads, n_kv, at[-1] + 1, at, seed) for seed, at in enumerate(positions)]
    q, qg = (np.concatenate([x[i] for x in inputs]) for i in (0, 1))
    (k_pages, table), (v_pages, _) = (paged([x[i] for x in inputs]) for i in (2, 3))
    row_slot = np.repeat(np.arange(len(positions)), [len(at) for at in positions]).astype(np.int32)
    row_pos = np.concatenate(positions).astype(np.int32)
    return inputs, positions, [card.upload(a) for a in (q, qg, k_pages, v_pages, table, row_slot, row_pos)]


def launcher(card, case, out, arrays):
    """A function that queues one launch of the case."""
    kind, heads, n_kv, _ = case
    table, rows = arrays[4], len(arrays[0])
    if kind == "prefill":
        return lambda: attend_prefill(card, out, *arrays, rows, heads, n_kv)
    scratch = card.alloc(scratch_shape(rows, heads, table.shape[1]), np.float32)
    card.poison(scratch)
    return lambda: attend_decode(card, out, *arrays, scratch, rows, heads, n_kv)


def check(card, case):
    """Compares with float64; outputs and scratch are poisoned, so are pages beyond the live length. Returns
    the largest relative L2 error of a row of a head."""
    inputs, positions, arrays = upload_case(card, case)
    rows, heads = arrays[0].shape[:2]
    out = card.alloc((rows + 1, heads * HEAD_DIM), np.float32)
    card.poison(out)
    launcher(card, case, out[:rows], arrays)()
    got = card.download(out)
    want = np.concatenate([attention_reference(q, k, v, qg[..., HEAD_DIM:], at)
                           for (q, qg, k, v), at in zip(inputs, positions)])
    by_head = lambda x: np.linalg.norm(x.reshape(rows, heads, HEAD_DIM), axis=-1)
    error = np.max(by_head(got[:rows] - want) / by_head(want))
    assert error <= TOLERANCE, f"error {error}"  # not so of NaN
    assert np.linalg.norm(got[:rows] - want) <= TOLERANCE_ALL * np.linalg.norm(want)
    assert np.isnan(got[rows]).all(), "wrote on"
    return error


def cases(card):
    """The checked cases; those long enough to tell are timed."""
    for case in CASES:
        kind, heads, n_kv, n = case
        _, _, arrays = upload_case(card, case)
        rows, keys = len(arrays[0]), sum(n) + len(n) if kind == "decode" else n * (n + 1) // 2
        n_read = keys if kind == "decode" else n
        out = card.alloc((rows, heads * HEAD_DIM), np.float32)
        yield Case(f"{kind} {heads}/{n_kv} heads, {n}", lambda case=case: check(card, case),
                   launcher(card, case, out, arrays),
                   n_bytes=4 * HEAD_DIM * n_kv * n_read + 10 * HEAD_DIM * heads * rows,
                   n_ops=4 * HEAD_DIM * heads * keys, pipe="half2")


if __name__ == "__main__":
    main("Attention", cases)
