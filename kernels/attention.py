"""Causal attention of prompts with grouped heads over the paged KV cache, with a gated output.

    s_j = q . k_j               over the keys j = 0 .. position; q already carries the scale 256^-1/2
    o   = sum_j softmax(s)_j v_j
    out = o * sigmoid(gate)     elementwise

Query head h reads KV head h // (heads / n_kv). Decoded tokens go through kernels/attend_decode.py.

    q          float16 [rows, heads, 256]
    projected  float32 [rows, stride]           512 floats per head first, their second half the gate
    k, v       float16 [n_pages, n_kv, 64, 256] pages, found through block_table int32 [n_slots, max_pages]
    out        float32 [rows, heads * 256]      row_slot, row_pos  int32 [rows]

Half precision where it is harmless. Products run on packed half2 FMA. A score is made of chains of 8 products
per half, two of which are added in half precision; a value of 16 products in one chain; then they are added
to float32 sums, so a chain's rounding errors (2^-11 of its partial sum each) do not grow with the context.
Softmax statistics, rescaling and all longer sums are float32; probabilities are rounded to half, at most 1,
for the product with v. A value beyond 4,000 in magnitude would overflow a chain. Against float64 on the same
float16 inputs the relative L2 error is 8.4e-4 over all and 2.6e-3 in the worst row of a head (`python -m
kernels.attention`; with chains of 8 throughout it is 7e-4 and 2e-3, at 15 % more instructions).

A block of 4 warps shares a KV head; a warp takes 8 consecutive rows of one query head and walks over the keys
in steps of a page, 64 keys at absolute multiples of 64, with an online softmax. A step in which a row sees no
key changes none of its bits, so results do not depend on how a prompt is cut into launches. A page passes
through shared memory as four tiles of 16 KiB, each fetched into registers while the one before is worked on:

    keys, dims 0..127 | keys, dims 128..255 | values of keys 0..31 | values of keys 32..63

    shared memory, words:   q [4 warps][8 rows][132]   tile [64 keys][68] or [32 values][132]
                            p [4 warps][8 rows][32]    two keys in a word

Rows are padded by 4 words: 8 lanes reading 16 bytes of 8 neighbouring rows then touch all 32 banks once.

    scores: a lane owns 4 rows x 4 keys (lane // 16 picks the rows, 4 (lane % 16) .. + 3 are the keys), all
    256 dims values: a lane owns 8 rows x 8 dims (dims 8 lane .. 8 lane + 7), all keys

Where no score of the warp exceeds its row's maximum so far, nothing is rescaled (the factor would be exactly
1) and no maximum is exchanged: after a few pages that is most of the time. The sum of the probabilities stays
with each lane's own keys until the end.

Keys and values beyond the live length are never read (the index is clamped to the last live key, whose
probability is then 0): what a page holds there, NaN included, does not matter.

Pipe: half2. Of 6,150 instructions per step and lane 4,096 are packed FMA, 67 %: the bound where the half2
pipe takes one instruction per issue slot (H100); on Volta, with half as many lanes, it is 86 %, the
conversions that share the pipe. Measured on an H200 (2026-11-21, 512 rows of 16/4 heads at the end of 4,608
and 18,432 tokens): 41 and 44 TFLOPS, 32 and 34 % of 131: 1.7 warps per scheduler issue in 49 % of the
cycles (ncu; fixed latencies 25 % of the samples, pipe contention 11 %, shared memory 40 % busy). 512 rows
are 1,024 warps, 1.9 per scheduler of that card, 3.8 of a CMP 100-210's. In a prompt of 18,400 tokens of a
9B (H100, passes of up to 4,096 rows) it is 34 % too, 15 % of the time: two blocks of an SM, for their
registers, whatever the rows. Three blocks, by 168 registers with no tile fetched ahead and half as many keys
and rows in a product, took 525 ms of that prompt (H200) for 469 ms. dp4a on quantised keys would halve the scores'
instructions on Volta and none on H100, for scores seven times less exact.
"""

import math

import numpy as np
from numba import cuda
from numba.types import float32, uint32, uint64

from kernels.bench import Case, main
from kernels.intrinsics import (BIAS_FLOAT, both_high, both_low, div_rn, float_as_word, float_max, hadd2,
                                half2_high,
                                half2_low, hfma2, hmul2, load_floats4, load_shared4, load_words4, pack_half2,
                                shared_address, sigmoid, store_floats4, store_shared, store_shared4,
                                store_words4,
                                word_as_float)
from kernels.kv_cache import PAGE, page_offset
from kernels.rope import HEAD_DIM

WARPS = 4                # per block
RESIDENT = 2             # blocks that an SM must hold: bounds the registers. With 38,400 B each a T4 holds one
ROWS = 8                 # query rows of a warp
CHAIN = 16               # products with values added in half precision
DIMS = HEAD_DIM // 32    # dims of a lane
STRIDE = HEAD_DIM // 2 + 4         # words from one query or value to the next in shared memory,
KEY_STRIDE = HEAD_DIM // 4 + 4     # and from one half key to the next
FETCHES = PAGE // 2 // WARPS       # 16-byte loads of a lane per tile
Q_TILE, TILE, P_TILE = WARPS * ROWS * STRIDE, PAGE * KEY_STRIDE, WARPS * ROWS * PAGE // 2  # words
FETCHED, CHAINS, OUTPUTS = 4 * FETCHES, ROWS * DIMS // 2, ROWS * DIMS  # of a lane: words, half2 sums, floats
LOG2E, LN2 = 1 / math.log(2), math.log(2)
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


# ---- parts -------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def power_of_two(x):
    """2^x for x <= 0, within 2^-18 of it; exactly 1 at 0, and 0 below -127."""
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
def half_warp_max(x):
    for offset in (8, 4, 2, 1):
        x = float_max(x, cuda.shfl_xor_sync(EVERY_LANE, x, offset))
    return x


@cuda.jit(device=True, forceinline=True)
def half_warp_sum(x):
    for offset in (8, 4, 2, 1):
        x = x + cuda.shfl_xor_sync(EVERY_LANE, x, offset)
    return x


@cuda.jit(device=True, forceinline=True)
def load_part(words, pages, at, i):
    """16 bytes of the pages, from element `at` on, as words 4 i .. 4 i + 3."""
    n = uint32(uint32(4) * i)
    words[n], words[n + uint32(1)], words[n + uint32(2)], words[n + uint32(3)] = load_words4(pages, at)


@cuda.jit(device=True, forceinline=True)
def load_tile(words, address, i):
    """16 bytes of shared memory as words 4 i .. 4 i + 3."""
    n = uint32(uint32(4) * i)
    words[n], words[n + uint32(1)], words[n + uint32(2)], words[n + uint32(3)] = load_shared4(address)


@cuda.jit(device=True, forceinline=True)
def store_tile(words, address, stride):
    """The lane's share of a tile, 16 bytes at every `stride` words."""
    for i in range(uint32(FETCHES)):
        n = uint32(uint32(4) * i)
        store_shared4(address + uint64(uint32(uint32(4) * i * stride)), words[n], words[n + uint32(1)],
                      words[n + uint32(2)], words[n + uint32(3)])


@cuda.jit(device=True, forceinline=True)
def fetch_keys(words, pages, page, part, last, lane, warp):
    """The lane's share of half the dims of a page's keys into registers: two tile rows of a warp at a time, 8
    of the block. Tile row r holds key 4 (r % 16) + r // 16; keys beyond `last` repeat that one."""
    first = uint32(uint32(8) * warp + uint32(4) * uint32(lane >> uint32(4)))
    dim = uint32(part * uint32(HEAD_DIM // 2) + uint32(lane & uint32(15)) * uint32(8))
    if last >= uint32(PAGE - 1):
        at = uint64(page + uint64(uint32(first * uint32(HEAD_DIM) + dim)))
        for i in range(uint32(FETCHES)):
            key = uint32(uint32(32) * uint32(i % uint32(2)) + uint32(i // uint32(2)))
            load_part(words, pages, uint64(at + uint64(uint32(key * uint32(HEAD_DIM)))), i)
    else:
        for i in range(uint32(FETCHES)):
            key = uint32(first + uint32(32) * uint32(i % uint32(2)) + uint32(i // uint32(2)))
            key = key if key < last else last
            load_part(words, pages, uint64(page + uint64(uint32(key * uint32(HEAD_DIM) + dim))), i)


@cuda.jit(device=True, forceinline=True)
def fetch_values(words, pages, page, part, last, lane, warp):
    """The lane's share of 32 rows of a page's values into registers, a row of a warp at a time, 4 of the
    block."""
    first, dim = uint32(part * uint32(PAGE // 2) + warp), uint32(lane * uint32(DIMS))
    if last >= uint32(PAGE - 1):
        at = uint64(page + uint64(uint32(first * uint32(HEAD_DIM) + dim)))
        for i in range(uint32(FETCHES)):
            load_part(words, pages, uint64(at + uint64(uint32(i * uint32(WARPS * HEAD_DIM)))), i)
    else:
        for i in range(uint32(FETCHES)):
            key = uint32(first + i * uint32(WARPS))
            key = key if key < last else last
            load_part(words, pages, uint64(page + uint64(uint32(key * uint32(HEAD_DIM) + dim))), i)


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
        at = q_at + uint64(uint32(i * uint32(4 * STRIDE)))
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
    """h[4 r + w] = or += p v over 8 keys, for 8 rows of p at address p_at (two keys in a word) and the lane's
    4 words of the rows of v at v_at."""
    pw = cuda.local.array(32, uint32)
    vw = cuda.local.array(4, uint32)
    for r in range(uint32(ROWS)):
        load_tile(pw, p_at + uint64(uint32(r * uint32(2 * PAGE))), r)
    for j in range(uint32(8)):
        load_tile(vw, v_at + uint64(uint32(j * uint32(4 * STRIDE))), uint32(0))
        for r in range(uint32(ROWS)):
            pair = pw[uint32(uint32(4) * r + uint32(j // uint32(2)))]
            x = both_high(pair) if j % uint32(2) else both_low(pair)
            for w in range(uint32(4)):
                n = uint32(uint32(4) * r + w)
                h[n] = hmul2(x, vw[w]) if fresh and j == uint32(0) else hfma2(x, vw[w], h[n])


# ---- kernel ------------------------------------------------------------------------------------------------

@cuda.jit(launch_bounds=(32 * WARPS, RESIDENT))
def attend_tiles(out, q, projected, k_pages, v_pages, block_table, row_slot, row_pos, stride, max_pages,
                 rows, heads,
                 n_kv):
    """Grid (tiles of 4 warps, n_kv), block (32, 4). Warp u of a KV head takes rows 8 (u // group) .. + 7 of
    its query head u % group; the last tiles, which see the most keys, come first."""
    q_tile = cuda.shared.array(Q_TILE, uint32)
    tile = cuda.shared.array(TILE, uint32)
    p_tile = cuda.shared.array(P_TILE, uint32)
    # Local arrays: all indices are constants once unrolled, so these are registers.
    o = cuda.local.array(OUTPUTS, float32)
    s = cuda.local.array(16, float32)
    fetched = cuda.local.array(FETCHED, uint32)
    high = cuda.local.array(4, float32)   # of the lane's 4 score rows: maximum so far,
    total = cuda.local.array(4, float32)  # sum of the lane's own keys,
    scale = cuda.local.array(4, float32)  # and the rescaling of a step

    lane, warp, kv_head = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y), uint32(cuda.blockIdx.y)
    group = uint32(heads // n_kv)
    first_unit = uint32(uint32(cuda.gridDim.x - uint32(1) - cuda.blockIdx.x) * uint32(WARPS))
    unit = uint32(first_unit + warp)
    head = uint32(uint32(kv_head * group) + uint32(unit % group))
    row = uint32(uint32(unit // group) * uint32(ROWS))
    slot, start = uint32(row_slot[0]), uint32(row_pos[0])
    position = uint32(start + row)  # of the warp's first row
    block_rows = uint32(uint32(uint32(first_unit + uint32(WARPS - 1)) // group + uint32(1)) * uint32(ROWS))
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

    upper, key_lane = uint32(lane >> uint32(4)), uint32(lane & uint32(15))
    # Shared addresses: of the lane's rows of q, its row of a tile of keys, its part of one of values,
    # of the warp's rows of p; and where the lane puts its share of a tile.
    q_at = shared_address(q_tile) + uint64(
        uint32(uint32(warp * uint32(ROWS) + upper * uint32(4)) * uint32(4 * STRIDE)))
    k_at = shared_address(tile) + uint64(uint32(key_lane * uint32(4 * KEY_STRIDE)))
    v_at = shared_address(tile) + uint64(uint32(lane * uint32(16)))
    p_at = shared_address(p_tile) + uint64(uint32(warp * uint32(ROWS * 2 * PAGE)))
    own_p_at = p_at + uint64(uint32(upper * uint32(4 * 2 * PAGE) + uint32(8) * key_lane))
    put_key = shared_address(tile) + uint64(
        uint32(uint32(uint32(2) * warp + upper) * uint32(4 * KEY_STRIDE) + uint32(16) * key_lane))
    put_value = v_at + uint64(uint32(warp * uint32(4 * STRIDE)))
    page = page_offset(block_table, max_pages, slot, uint32(0), kv_head, n_kv)
    fetch_keys(fetched, k_pages, page, uint32(0), last_key, lane, warp)
    for step in range(uint32(uint32(last_key // uint32(PAGE)) + uint32(1))):
        first = uint32(uint32(step) * uint32(PAGE))
        last = uint32(last_key - first)
        next_page = page
        if last >= uint32(PAGE):
            next_page = page_offset(block_table, max_pages, slot, uint32(step + uint32(1)), kv_head, n_kv)
        sees = first < uint32(position + uint32(ROWS)) and row < rows  # does a row of the warp see a key?
        for i in range(uint32(16)):
            s[i] = float32(0.0)
        for part in range(uint32(2)):
            cuda.syncthreads()  # everyone has done with the tile before
            store_tile(fetched, put_key, uint32(2 * WARPS * KEY_STRIDE))
            cuda.syncthreads()
            if part == uint32(0):
                fetch_keys(fetched, k_pages, page, uint32(1), last, lane, warp)
            else:
                fetch_values(fetched, v_pages, page, uint32(0), last, lane, warp)
            if sees:
                for c in range(uint32(HEAD_DIM // 64)):
                    of_chunk = uint32(uint32(c) * uint32(64))  # bytes of 32 dims
                    add_scores(s, q_at + uint64(uint32(uint32(part) * uint32(HEAD_DIM) + of_chunk)),
                               k_at + uint64(of_chunk))
        if sees:
            if uint32(first + uint32(PAGE - 1)) > position:  # some row does not see every key
                for i in range(uint32(4)):
                    limit = uint32(position + upper * uint32(4) + i)  # the last key that the row sees
                    for j in range(uint32(4)):
                        n, key = uint32(uint32(4) * i + j), uint32(first + uint32(4) * key_lane + j)
                        s[n] = s[n] if key <= limit else float32(MINUS_INFINITY)
            moved = False
            for i in range(uint32(4)):
                n = uint32(uint32(4) * i)
                a, b = float_max(s[n], s[n + uint32(1)]), float_max(s[n + uint32(2)], s[n + uint32(3)])
                scale[i] = float_max(a, b)
                moved = moved or scale[i] > high[i]
            if cuda.any_sync(EVERY_LANE, moved):
                for i in range(uint32(4)):
                    new = float_max(high[i], half_warp_max(scale[i]))
                    scale[i] = power_of_two(high[i] * float32(LOG2E) - new * float32(LOG2E))  # 1 if it stays
                    total[i] = total[i] * scale[i]
                    high[i] = new
                for r in range(uint32(ROWS)):
                    f = cuda.shfl_sync(EVERY_LANE, scale[r % uint32(4)], uint32(r // uint32(4)) * uint32(16))
                    for d in range(uint32(DIMS)):
                        o[r * uint32(DIMS) + d] = o[r * uint32(DIMS) + d] * f
            for i in range(uint32(4)):
                n, high2 = uint32(uint32(4) * i), high[i] * float32(LOG2E)
                a = power_of_two(cuda.fma(s[n], float32(LOG2E), -high2))
                b = power_of_two(cuda.fma(s[n + uint32(1)], float32(LOG2E), -high2))
                c = power_of_two(cuda.fma(s[n + uint32(2)], float32(LOG2E), -high2))
                d = power_of_two(cuda.fma(s[n + uint32(3)], float32(LOG2E), -high2))
                total[i] = total[i] + ((a + b) + (c + d))
                at = own_p_at + uint64(uint32(i * uint32(2 * PAGE)))
                store_shared(at, pack_half2(a, b))
                store_shared(at + uint64(4), pack_half2(c, d))
            cuda.syncwarp()
        for part in range(uint32(2)):
            cuda.syncthreads()
            store_tile(fetched, put_value, uint32(WARPS * STRIDE))
            cuda.syncthreads()
            if part == uint32(0):
                fetch_values(fetched, v_pages, page, uint32(1), last, lane, warp)
            elif last >= uint32(PAGE):
                fetch_keys(fetched, k_pages, next_page, uint32(0), uint32(last - uint32(PAGE)), lane, warp)
            if sees:
                for c in range(uint32(PAGE // 2 // CHAIN)):
                    h = cuda.local.array(CHAINS, uint32)
                    at = p_at + uint64(uint32(uint32(part) * uint32(PAGE) + uint32(c) * uint32(2 * CHAIN)))
                    v = v_at + uint64(uint32(uint32(c) * uint32(CHAIN * 4 * STRIDE)))
                    chain_values(h, at, v, True)
                    chain_values(h, at + uint64(16), v + uint64(8 * 4 * STRIDE), False)
                    for n in range(uint32(4 * ROWS)):
                        i = uint32(uint32(2) * n)
                        o[i] = o[i] + half2_low(h[n])
                        o[i + uint32(1)] = o[i + uint32(1)] + half2_high(h[n])
        page = next_page

    for i in range(uint32(4)):
        total[i] = half_warp_sum(total[i])
    for r in range(uint32(ROWS)):
        f = div_rn(float32(1.0),
                   cuda.shfl_sync(EVERY_LANE, total[r % uint32(4)], uint32(r // uint32(4)) * uint32(16)))
        if uint32(row + r) < rows:
            row_head = uint32(uint32(uint32(row + r) * heads) + head)
            at = uint32(row_head * uint32(HEAD_DIM) + lane * uint32(DIMS))
            i = uint32(r * uint32(DIMS))
            for n in range(uint32(2)):
                store_floats4(out, uint32(at + uint32(4) * n), o[i] * f, o[i + uint32(1)] * f,
                              o[i + uint32(2)] * f, o[i + uint32(3)] * f)
                i = uint32(i + uint32(4))
    if row < rows:  # a loop of its own, not unrolled: 64 sigmoids would be a large part of the program
        for r in range(uint32(min(uint32(ROWS), uint32(rows - row)))):
            r = uint32(row + uint32(r))
            gate_at = uint32(uint32(r * stride) + head * uint32(2 * HEAD_DIM) + uint32(HEAD_DIM))
            gate_at = uint32(gate_at + lane * uint32(DIMS))
            at = uint32(uint32(uint32(r * heads) + head) * uint32(HEAD_DIM) + lane * uint32(DIMS))
            for n in range(uint32(2)):
                x0, x1, x2, x3 = load_floats4(out, uint32(at + uint32(4) * n))
                g0, g1, g2, g3 = load_floats4(projected, uint32(gate_at + uint32(4) * n))
                store_floats4(out, uint32(at + uint32(4) * n), x0 * sigmoid(g0), x1 * sigmoid(g1),
                              x2 * sigmoid(g2), x3 * sigmoid(g3))


def attend_prefill(card, out, q, projected, stride, k_pages, v_pages, block_table, row_slot, row_pos, rows,
                   heads, n_kv,
                   stream=None):
    """out float32 [rows, heads * 256] for rows of one slot (row_slot[0]) at positions row_pos[0], row_pos[0]
    + 1, ... whose keys and values are in the pages already. q float16 [rows, heads, 256], projected float32
    [rows, stride], of which a row begins with 512 floats per head (the second half is the gate), pages
    float16 [n_pages, n_kv, 64, 256], block_table int32 [n_slots, max_pages], row_slot and row_pos int32
    [rows]. Writes out only, never allocates."""
    units = -(-rows // ROWS) * (heads // n_kv)
    card.launch(attend_tiles, (-(-units // WARPS), n_kv), (32, WARPS), out.reshape(-1), q.reshape(-1),
                projected.reshape(-1), k_pages.reshape(-1), v_pages.reshape(-1), block_table.reshape(-1),
                row_slot,
                row_pos, stride, block_table.shape[1], rows, heads, n_kv, stream=stream)


# ---- check -------------------------------------------------------------------------------------------------

CASES = [(4, 2, 1), (4, 2, 65), (16, 4, 33), (24, 4, 63), (4, 2, 500)]  # heads, n_kv, rows = tokens
TIMED = [(4, 2, 64, 512), (16, 4, 512, 512), (16, 4, 512, 4608)]  # heads, n_kv, rows, tokens

# Relative L2 error of a row of a head. With scores as large as those of `sample_inputs`, partial sums of a
# score's chains are some 0.15: 256 roundings of 2^-13 / sqrt(12) each make 6e-4, those of v and p add 3e-4.
# Five standard deviations for the worst row; all rows together stay below one of 2^-10.
TOLERANCE, TOLERANCE_ALL = 2.0 ** -8, 2.0 ** -10


def sample_inputs(heads, n_kv, n, rows, seed=0):
    """q float16 [rows, heads, 256], gates in rows of [heads, 512] and 4 floats of padding, k, v float16 of n
    tokens, on the host; scores of about 1.5."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    return ((normal(rows, heads, HEAD_DIM) * 1.5 / 16).astype(np.float16), normal(rows,
                                                                                  heads * 2 * HEAD_DIM + 4),
            normal(n, n_kv, HEAD_DIM).astype(np.float16), normal(n, n_kv, HEAD_DIM).astype(np.float16))


def gates(projected, heads):
    """[rows, heads, 256] of [rows, stride]."""
    return projected[:, :heads * 2 * HEAD_DIM].reshape(-1, heads, 2, HEAD_DIM)[:, :, 1]


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


def head_error(got, want, heads):
    """The largest relative L2 error of a row of a head. AssertionError beyond the tolerance, or NaN."""
    by_head = lambda x: np.linalg.norm(x.reshape(len(x), heads, HEAD_DIM), axis=-1)
    error = np.max(by_head(got - want) / by_head(want))
    assert error <= TOLERANCE, f"error {error}"
    return error


def launcher(card, heads, n_kv, inputs, start, out):
    """A function that queues one launch for rows at positions `start` and on."""
    q, projected, k, v = inputs
    rows = len(q)
    (k_pages, table), (v_pages, _) = paged([k]), paged([v])
    arrays = [card.upload(a) for a in (k_pages, v_pages, table, np.zeros(rows, np.int32),
                                       np.arange(start, start + rows, dtype=np.int32))]
    q, projected = card.upload(q), card.upload(projected)
    return lambda: attend_prefill(card, out, q, projected, projected.shape[1], *arrays, rows, heads, n_kv)


def check(card, case):
    """Compares with float64; the output is poisoned, so are pages beyond the live length. Returns the largest
    relative L2 error of a row of a head."""
    heads, n_kv, n = case
    inputs = sample_inputs(heads, n_kv, n, n)
    out = card.alloc((n + 1, heads * HEAD_DIM), np.float32)
    card.poison(out)
    launcher(card, heads, n_kv, inputs, 0, out[:n])()
    got = card.download(out)
    q, projected, k, v = inputs
    want = attention_reference(q, k, v, gates(projected, heads), np.arange(n))
    error = head_error(got[:n], want, heads)
    assert np.linalg.norm(got[:n] - want) <= TOLERANCE_ALL * np.linalg.norm(want)
    assert np.isnan(got[n]).all(), "wrote on"
    return error


def cases(card):
    """The checked cases, then the times of a chunk of 512 rows at the end of a context."""
    for case in CASES:
        yield Case("{}/{} heads, {}".format(*case), lambda case=case: check(card, case))
    for heads, n_kv, rows, n in TIMED:
        out = card.alloc((rows, heads * HEAD_DIM), np.float32)
        launch = launcher(card, heads, n_kv, sample_inputs(heads, n_kv, n, rows), n - rows, out)
        n_ops = 4 * HEAD_DIM * heads * rows * (2 * n - rows + 1) // 2
        yield Case(f"{rows} rows of {n}, {heads}/{n_kv} heads", launch=launch, n_ops=n_ops, pipe="half2")


if __name__ == "__main__":
    main("Attention of prompts", cases)
