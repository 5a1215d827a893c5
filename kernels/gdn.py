"""The gated delta rule of a linear-attention layer, for a prompt; for one token see kernels/gdn_decode.py.

Each value head carries a state S [128 key rows i, 128 value columns j] from token to token. S is a memory: S^T k is
the value that it holds for the key k. A token brings q, k and v (convolved), and its projections a (`alpha`) and b
(`beta`). The head has two constants, A = `ssm_a` (negative) and `dt_bias`. Value head h uses q and k of key head
h mod n_k, which is the order of heads in GGUF files.

    k^ = k / sqrt(sum(k^2) + 1e-6)       q^ = q / sqrt(sum(q^2) + 1e-6) / sqrt(128)
    g  = exp(A softplus(a + dt_bias))    the share of the state that is kept, 0 .. 1
    1. decay      S = g S
    2. predict    p = S^T k^                           p_j = sum over i of S_ij k^_i
    3. update     S = S + k^ d^T                       S_ij + k^_i d_j, where d = sigmoid(b) (v - p)
    4. read       o = S^T q^                           o_j = sum over i of S_ij q^_i

Four tokens form a group, which reads and writes S once. Let S be the state before the group, G_t = g_1 .. g_t the
decay up to token t, and G_ts = g_s+1 .. g_t the decay from token s to token t. The four steps of all tokens become

    x_t = v_t - G_t S^T k^_t                                               v_t minus what S predicts
    d_t = sigmoid(b_t) (x_t - sum over s < t of G_ts (k^_t . k^_s) d_s)    = sum over u <= t of T_tu x_u
    o_t = G_t S^T q^_t + sum over s <= t of G_ts (q^_t . k^_s) d_s         = G_t S^T q^_t + sum over u of B_tu x_u
    S   = G_4 S + sum over t of k^_t (G_4t d_t)^T

T and B [4, 4] need no state: `gdn_factors` makes them for all groups at once. `gdn_recurrence` then goes from group
to group: S^T times the 8 vectors k_t and q_t, then x, d and o, then the new S. Columns of S never meet; a warp has 8.

    qkv        float32 [rows, (2 n_k + n_v) 128]:   | q0 q1 .. | k0 k1 .. | v0 v1 v2 v3 .. |    convolved
    projected  float32, rows `stride` apart:        | qkv, not convolved | z  n_v 128 | a  n_v | b  n_v | ..
    memory     float32 [n_slots, n_v, 128 key rows, 128 value columns]
    factors    float32 [rows / 4, n_v, 4 tokens, 12]:   G_4t |k_t|^-1 T_tu for 4 u | B_tu for 4 u |
                                                        G_t |k_t|^-1 | G_t |q_t|^-1 / sqrt(128) | G_4 | unused

Groups begin at multiples of 4 of a sequence, and prompts are cut at multiples of 64, so a cut changes no bit. Rows
past the end of a prompt count as tokens that neither decay nor write.

Pipe: fp32. A token takes 49,152 FMA per value head. On Volta this pipe is the bound: 0.3 us per token expected for 32
heads. An H200 has too few warps for that and mostly waits for shared memory and shuffles: 0.166 us measured.
Groups of 8 and of 64 tokens and other divisions among lanes: benchmarks/results.md, section gdn.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.types import float32, uint32, uint64

from kernels.bench import Case, main
from kernels.card import Array
from kernels.intrinsics import (exp, load_floats4, load_shared4, load_words4, prefetch, rsqrt, shared_address, sigmoid,
                                softplus, store_floats4, store_shared4, warp_sum, word_as_float)
from kernels.records import Projected

HEAD = 128       # key rows and value columns of a head: the kernels give each lane 4 of 128 elements
NORM_EPS = 1e-6  # added to the sum of squares of q and of k
QUERY_SCALE = HEAD ** -0.5
EVERY_LANE = 0xFFFFFFFF

GROUP = 4                 # tokens
RECORD = 12               # factors of a token
OWN = RECORD + 1          # the factors of a lane's token and one value of v
SUMS = 2 * 2 * GROUP      # of a lane: S^T k and S^T q, 2 columns, 4 tokens
WARPS = 4                 # of a block; each copies one token of a group to shared memory
WARP_COLUMNS = 8
COLUMNS = WARP_COLUMNS * WARPS
PARTS = 8                 # lanes that share a pair of columns
ROWS = HEAD // PARTS      # key rows of a lane
TOKEN = 4 * 2 * HEAD      # bytes of q and k
LINE = 32                 # floats of a line of the second-level cache
AHEAD = 4 * GROUP         # tokens between those that are multiplied and those that are prefetched into that cache
SHARED = 2 * GROUP * TOKEN // 4  # words: one group is read while the next is written


class LinearHeads(NamedTuple):
    """The heads of a linear-attention layer, 128 elements wide. A key head has a q and a k, a value head a v and a
    state."""

    n_keys: int
    n_values: int

    @property
    def channels(self) -> int:
        """Floats of q, k and v of one token."""
        return (2 * self.n_keys + self.n_values) * HEAD


class Decay(NamedTuple):
    """The constants of the decay, float32 [n_v] each."""

    ssm_a: Array            # -exp(A_log)
    dt_bias: Array


# ---- reference ---------------------------------------------------------------------------------------------

def reference(state, qkv, alpha, beta, ssm_a, dt_bias, n_k):
    """The four steps of the delta rule, token by token, in float64.

    state [n_v, 128, 128], qkv [T, (2 n_k + n_v) 128], alpha and beta [T, n_v] -> (o [T, n_v, 128], state after the
    last token). In the sums h is the value head, i the key row and j the value column.
    """
    q, k, v, log_keep, rate = _prepared(qkv, alpha, beta, ssm_a, dt_bias, n_k)
    state, o = np.array(state, np.float64), np.empty(v.shape)
    for t in range(len(v)):
        state *= np.exp(log_keep[t])[:, None, None]         # decay
        predicted = np.einsum("hij,hi->hj", state, k[t])
        d = rate[t][:, None] * (v[t] - predicted)
        state += k[t][:, :, None] * d[:, None, :]           # update
        o[t] = np.einsum("hij,hi->hj", state, q[t])         # read
    return o, state


def reference_grouped(state, qkv, alpha, beta, ssm_a, dt_bias, n_k, group=4):
    """The same function in groups of tokens, as the kernels compute it. With groups of 64 tokens this is the chunked
    (WY) form of Yang et al., "Gated Delta Networks", 2024.

    The d_t of a group are the solution of (I + L) D = rate X: L [group, group] holds rate_t G_ts (k^_t . k^_s) for
    s < t, and row t of X is x_t.
    """
    prepared = _prepared(qkv, alpha, beta, ssm_a, dt_bias, n_k)
    q, k, v, log_keep, rate = (np.moveaxis(a, 1, 0) for a in prepared)  # heads first
    state, o = np.array(state, np.float64), np.empty(v.shape)
    for start in range(0, v.shape[1], group):
        part = slice(start, start + group)
        qc, kc, vc, rc = q[:, part], k[:, part], v[:, part], rate[:, part, None]
        log_g = np.cumsum(log_keep[:, part], axis=1)[:, :, None]                     # [n_v, group, 1]
        decay = np.exp(np.tril(log_g - log_g.transpose(0, 2, 1)))                    # G_ts where s <= t
        lower = np.tril(rc * decay * (kc @ kc.transpose(0, 2, 1)), -1)               # L
        d = np.linalg.solve(np.eye(lower.shape[1]) + lower, rc * (vc - np.exp(log_g) * (kc @ state)))
        o[:, part] = np.exp(log_g) * (qc @ state) + np.tril(decay * (qc @ kc.transpose(0, 2, 1))) @ d
        to_end = np.exp(log_g[:, -1:] - log_g)
        state = np.exp(log_g[:, -1:]) * state + (kc * to_end).transpose(0, 2, 1) @ d
    return np.moveaxis(o, 0, 1), state


def _prepared(qkv, alpha, beta, ssm_a, dt_bias, n_k):
    """q^ and k^ (of each value head's key head) and v, [T, n_v, 128]; log g and sigmoid(b), [T, n_v]; all float64."""
    x = np.asarray(qkv, np.float64).reshape(len(qkv), -1, HEAD)
    unit = x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + NORM_EPS)
    v = x[:, 2 * n_k:]
    key_head = np.arange(v.shape[1]) % n_k
    softplus_of = np.logaddexp(0.0, np.asarray(alpha, np.float64) + dt_bias)
    rate = 1.0 / (1.0 + np.exp(-np.asarray(beta, np.float64)))
    return unit[:, key_head] * QUERY_SCALE, unit[:, n_k + key_head], v, ssm_a * softplus_of, rate


# ---- kernels -----------------------------------------------------------------------------------------------

# `gdn_recurrence` keeps S in registers from the first token to the last. A warp has 8 columns, a lane 16 rows of 2:
#
#                                         columns 0 1    2 3     4 5     6 7
#     lane 8 j + p has columns 2 j and        -------------------------------
#     2 j + 1 of the rows 4 p .. 4 p + 3,   rows  0 |  0   |   8  |  16  |  24  |
#     32 + 4 p .., 64 + 4 p .., 96 + 4 p ..       4 |  1   |   9  |  17  |  25  |     lanes
#                                                .. |  ..  |  ..  |  ..  |  ..  |
#                                                28 |  7   |  15  |  23  |  31  |
#                                                32 |  0   |   8  |   ..
#
# For a group a lane makes 16 partial sums: 2 columns, 4 tokens, k and q. Three exchanges with the 7 other lanes of its
# columns (`halve`) add them up. Then each lane has S^T k and S^T q of one column and one token, and makes its d and o:
# four shuffles bring the four x of the column. Eight shuffles bring the d of two columns for the update of S.
# The 4 warps of a block share q and k of a group in shared memory. The next group is loaded while this one is worked
# on, so one barrier per group is enough.

@cuda.jit(device=True, forceinline=True)
def dot(a, i, b, j):
    """a[i] . b[j], on every lane. The vectors have 128 elements; each lane holds 4."""
    total = cuda.fma(a[i, 1], b[j, 1], a[i, 0] * b[j, 0])
    return warp_sum(cuda.fma(a[i, 3], b[j, 3], cuda.fma(a[i, 2], b[j, 2], total)))


@cuda.jit(device=True, forceinline=True)
def keep_of(alpha, ssm_a, dt_bias, head):
    """g of a value head."""
    return exp(ssm_a[head] * softplus(alpha + dt_bias[head]))


@cuda.jit(device=True, forceinline=True)
def dot_products(products, norms, qkv, at, rows, width, n_k, lane):
    """Of a group, for s <= t: kk[t, s] <- k^_t . k^_s and qk[t, s] <- q^_t . k^_s; q_norms, k_norms <- the factors that
    turn q into q^ and k into k^. Every lane gets all of them. Returns the two factors of token (lane mod 4).

    products: (kk, qk); norms: (q_norms, k_norms); rows: (first row of the group, last row of all); at: the lane's first
    element of q in a row.
    """
    (kk, qk), (q_norms, k_norms), (first, last) = products, norms, rows
    q, k = cuda.local.array((GROUP, 4), float32), cuda.local.array((GROUP, 4), float32)
    for t in range(GROUP):
        i = uint32(uint32(min(uint32(first + uint32(t)), last)) * width + at)
        q[t, 0], q[t, 1], q[t, 2], q[t, 3] = load_floats4(qkv, i)
        k[t, 0], k[t, 1], k[t, 2], k[t, 3] = load_floats4(qkv, uint32(i + n_k * uint32(HEAD)))
    q_square, k_square = float32(0), float32(0)  # of token lane mod 4: lanes share out the slow roots and divisions
    for t in range(GROUP):
        for s in range(GROUP):
            if s <= t:
                qk[t, s], kk[t, s] = dot(q, t, k, s), dot(k, t, k, s)
        q_sum = dot(q, t, q, t)
        if uint32(lane & uint32(GROUP - 1)) == uint32(t):
            q_square, k_square = q_sum, kk[t, t]
    q_norm = rsqrt(q_square + float32(NORM_EPS)) * float32(QUERY_SCALE)
    k_norm = rsqrt(k_square + float32(NORM_EPS))
    for t in range(GROUP):
        q_norms[t] = cuda.shfl_sync(EVERY_LANE, q_norm, uint32(t))
        k_norms[t] = cuda.shfl_sync(EVERY_LANE, k_norm, uint32(t))
        for s in range(GROUP):
            if s <= t:
                qk[t, s] = qk[t, s] * (q_norms[t] * k_norms[s])
                kk[t, s] = kk[t, s] * (k_norms[t] * k_norms[s])
    return q_norm, k_norm


@cuda.jit
def gdn_factors(factors, qkv, projected, stride, ssm_a, dt_bias, rows, n_k, n_v):
    """Grid (key heads, groups), one warp each. First all lanes compute the dot products of the group. Then each lane
    takes one value head of this key head and one token u: it solves for column u of T and of B, which are the d and the
    o that x_u = 1 and all other x = 0 would give without the state."""
    lane, key_head, group = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
    first, last = uint32(group * uint32(GROUP)), uint32(rows - uint32(1))
    width = uint32((n_k + n_k + n_v) * uint32(HEAD))
    kk, qk = cuda.local.array((GROUP, GROUP), float32), cuda.local.array((GROUP, GROUP), float32)
    q_norms, k_norms = cuda.local.array(GROUP, float32), cuda.local.array(GROUP, float32)
    at = uint32(key_head * uint32(HEAD) + lane * uint32(4))
    q_norm, k_norm = dot_products((kk, qk), (q_norms, k_norms), qkv, at, (first, last), width, n_k, lane)

    u, quad = uint32(lane & uint32(GROUP - 1)), uint32(lane & uint32(32 - GROUP))
    row = uint32(first + u)
    gates = uint32(uint32(min(row, last)) * stride + width + n_v * uint32(HEAD))
    keep, rate = cuda.local.array(GROUP, float32), cuda.local.array(GROUP, float32)
    d = cuda.local.array(GROUP, float32)  # d_s, each decayed up to token t
    for start in range(key_head, n_v, uint32(n_k * uint32(32 // GROUP))):
        head = uint32(uint32(start) + uint32(lane // uint32(GROUP)) * n_k)
        exists = head < n_v
        known = head if exists else key_head  # a lane without a head computes another's and writes nothing
        g = keep_of(projected[uint32(gates + known)], ssm_a, dt_bias, known)
        b = sigmoid(projected[uint32(gates + n_v + known)])
        g, b = (g, b) if row < rows else (float32(1), float32(0))  # past the end: no decay, no update
        for t in range(GROUP):
            keep[t] = cuda.shfl_sync(EVERY_LANE, g, uint32(quad | uint32(t)))
            rate[t] = cuda.shfl_sync(EVERY_LANE, b, uint32(quad | uint32(t)))
        to = uint32(uint32(uint32(group * n_v + head) * uint32(GROUP)) * uint32(RECORD))
        decay, whole = float32(1), float32(1)  # G_u, and G_t which ends as G_4
        for t in range(GROUP):
            whole = whole * keep[t]
            decay = whole if u == uint32(t) else decay
            predicted, read = float32(0), float32(0)
            for s in range(GROUP):
                if s < t:
                    d[s] = d[s] * keep[t]
                    predicted = cuda.fma(kk[t, s], d[s], predicted)
            d[t] = rate[t] * ((float32(1) if u == uint32(t) else float32(0)) - predicted)
            for s in range(GROUP):
                if s <= t:
                    read = cuda.fma(qk[t, s], d[s], read)
            if exists:
                factors[uint32(to + uint32(RECORD * t + GROUP) + u)] = read
        if exists:
            for t in range(GROUP):
                factors[uint32(to + uint32(RECORD * t) + u)] = d[t] * k_norms[t]
            store_floats4(factors, uint32(to + u * uint32(RECORD) + uint32(2 * GROUP)), decay * k_norm,
                          decay * q_norm, whole, float32(0))


@cuda.jit(device=True, forceinline=True)
def halve(x, half, mask, lane):
    """One exchange of a sum over lanes. Lanes without the bit `mask` keep the first half of x[0 .. 2 half), lanes with
    it the second half. To what a lane keeps it adds what its partner, the lane across that bit, had of the same."""
    upper = (lane & uint32(mask)) != uint32(0)
    for i in range(half):
        keep, send = (x[half + i], x[i]) if upper else (x[i], x[half + i])
        x[i] = keep + cuda.shfl_xor_sync(EVERY_LANE, send, mask)


@cuda.jit(device=True, forceinline=True)
def load_group(words, own, qkv, factors, rows, width, columns, f_at):
    """Of a group: words <- the 4 elements of q and the 4 of k that this thread copies to shared memory; own <- the
    factors of the lane's token, then its v.

    rows: (row that the warp copies, row of the lane's token, last row of all); columns: of q, k and v in a row; f_at:
    the factors of the lane's token.
    """
    (warp_row, lane_row, last), (q_at, k_at, v_at) = rows, columns
    row = uint32(uint32(min(warp_row, last)) * width)
    words[0], words[1], words[2], words[3] = load_words4(qkv, uint32(row + q_at))
    words[4], words[5], words[6], words[7] = load_words4(qkv, uint32(row + k_at))
    own[0], own[1], own[2], own[3] = load_floats4(factors, f_at)
    own[4], own[5], own[6], own[7] = load_floats4(factors, uint32(f_at + uint32(4)))
    own[8], own[9], own[10], own[11] = load_floats4(factors, uint32(f_at + uint32(8)))
    own[12] = qkv[uint32(uint32(min(lane_row, last)) * width + v_at)]


@cuda.jit(device=True, forceinline=True)
def prefetch_token(qkv, factors, row, width, lane_at, head, n_v, lane):
    """Prefetches a token into the second-level cache: lanes 0 .. 3 ask for its q, 4 .. 7 for its k, 8 for its v, 9 and
    10 for the factors of the head."""
    if lane < uint32(9):
        prefetch(qkv, uint32(row * width + lane_at))
    elif lane < uint32(11):
        record = uint32(uint32(uint32(row // uint32(GROUP)) * n_v + head) * uint32(GROUP) + uint32(row % uint32(GROUP)))
        prefetch(factors, uint32(record * uint32(RECORD) + uint32(lane - uint32(9)) * uint32(RECORD - 1)))


@cuda.jit(device=True, forceinline=True)
def products(sums, s, at):
    """sums[8 c + 2 t] <- k_t times column c of s, sums[8 c + 2 t + 1] <- q_t times column c, over the lane's rows.
    s: the lane's part of the state; at: the address of the lane's first rows of q of token 0 in shared memory."""
    q, k = cuda.local.array(4, uint32), cuda.local.array(4, uint32)
    for i in range(SUMS):
        sums[i] = float32(0)
    for t in range(GROUP):
        for i in range(ROWS // 4):
            q[0], q[1], q[2], q[3] = load_shared4(at + uint64(TOKEN * t + 16 * PARTS * i))
            k[0], k[1], k[2], k[3] = load_shared4(at + uint64(TOKEN * t + 16 * PARTS * i + 4 * HEAD))
            for c in range(2):
                to = 2 * (GROUP * c + t)
                for j in range(4):
                    sums[to] = cuda.fma(s[4 * i + j, c], word_as_float(k[j]), sums[to])
                    sums[to + 1] = cuda.fma(s[4 * i + j, c], word_as_float(q[j]), sums[to + 1])


@cuda.jit(device=True, forceinline=True)
def update(s, decay, write, at, lane):
    """s <- decay s + sum over t of k_t write_t. `write` belongs to the lane's own column and token; the others of its
    two columns and the four tokens come by shuffles."""
    k = cuda.local.array(4, uint32)
    for i in range(ROWS):
        s[i, 0], s[i, 1] = decay * s[i, 0], decay * s[i, 1]
    for t in range(GROUP):
        from_lane = uint32(lane & uint32(32 - PARTS)) | uint32(t)
        write0 = cuda.shfl_sync(EVERY_LANE, write, from_lane)
        write1 = cuda.shfl_sync(EVERY_LANE, write, from_lane | uint32(GROUP))
        for i in range(ROWS // 4):
            k[0], k[1], k[2], k[3] = load_shared4(at + uint64(TOKEN * t + 16 * PARTS * i + 4 * HEAD))
            for j in range(4):
                s[4 * i + j, 0] = cuda.fma(word_as_float(k[j]), write0, s[4 * i + j, 0])
                s[4 * i + j, 1] = cuda.fma(word_as_float(k[j]), write1, s[4 * i + j, 1])


@cuda.jit(launch_bounds=32 * WARPS)
def gdn_recurrence(o, state, qkv, factors, row_slot, rows, n_k, n_v):
    """Grid (128 / 32 columns, value heads), 4 warps each; all rows belong to one slot."""
    lane, warp, head = uint32(cuda.threadIdx.x & 31), uint32(cuda.threadIdx.x >> 5), uint32(cuda.blockIdx.y)
    part, pair = uint32(lane & uint32(PARTS - 1)), uint32(lane // uint32(PARTS))
    column = uint32(cuda.blockIdx.x * uint32(COLUMNS) + warp * uint32(WARP_COLUMNS) + pair * uint32(2))
    slot, last = uint32(row_slot[0]), uint32(rows - uint32(1))
    width = uint32((n_k + n_k + n_v) * uint32(HEAD))

    # `home` has 64 bits, so that all rows are constant offsets from one address.
    home = uint64(uint32(uint32(slot * n_v + head) * uint32(HEAD * HEAD) + part * uint32(4 * HEAD) + column))
    s = cuda.local.array((ROWS, 2), float32)  # registers, since all indices are constants once unrolled
    for i in range(ROWS):
        at = home + uint64(HEAD * (i % 4 + 4 * PARTS * (i // 4)))
        s[i, 0], s[i, 1] = state[at], state[at + uint64(1)]

    # After the three exchanges this lane has the sums of one column (own_column) and one token of each group.
    own_column = uint32(column + uint32(part // uint32(GROUP)))
    token = uint32(part & uint32(GROUP - 1))
    q_at = uint32(uint32(head % n_k) * uint32(HEAD) + lane * uint32(4))
    k_at = uint32(q_at + n_k * uint32(HEAD))
    v_at = uint32(uint32(n_k + n_k + head) * uint32(HEAD) + own_column)
    f_at = uint32(uint32(head * uint32(GROUP) + token) * uint32(RECORD))
    line_at = uint32(uint32(head % n_k) * uint32(HEAD) + uint32(lane & uint32(3)) * uint32(LINE))  # to prefetch
    line_at = line_at if lane < uint32(4) else uint32(line_at + n_k * uint32(HEAD))
    line_at = line_at if lane < uint32(8) else uint32(v_at - own_column + cuda.blockIdx.x * uint32(COLUMNS))
    shared = shared_address(cuda.shared.array(SHARED, float32, alignment=16))
    put_at = shared + uint64(uint32(warp * uint32(TOKEN) + lane * uint32(16)))
    get_at = shared + uint64(uint32(part * uint32(16)))
    to_other = uint64(GROUP * TOKEN)  # from this half of the shared memory to the other; changes sign with the half

    words, sums = cuda.local.array(8, uint32), cuda.local.array(SUMS, float32)
    own, ahead = cuda.local.array(OWN, float32), cuda.local.array(OWN, float32)  # this group's, the next one's
    load_group(words, ahead, qkv, factors, (warp, token, last), width, (q_at, k_at, v_at), f_at)
    for first in range(uint32(0), rows, uint32(GROUP)):
        row, next_group = uint32(uint32(first) + token), uint32(uint32(first) + uint32(GROUP))
        store_shared4(put_at, words[0], words[1], words[2], words[3])
        store_shared4(put_at + uint64(4 * HEAD), words[4], words[5], words[6], words[7])
        cuda.syncthreads()  # the group is there, and no thread still reads the other half, which is written next
        for i in range(OWN):
            own[i] = ahead[i]
        prefetch_token(qkv, factors, min(uint32(uint32(first) + uint32(AHEAD) + warp), last), width, line_at, head, n_v,
                       lane)
        f_at = uint32(f_at + (n_v * uint32(GROUP * RECORD) if next_group < rows else uint32(0)))
        rows_ahead = uint32(next_group + warp), uint32(next_group + token), last
        load_group(words, ahead, qkv, factors, rows_ahead, width, (q_at, k_at, v_at), f_at)

        products(sums, s, get_at)
        halve(sums, 8, 4, lane)
        halve(sums, 4, 2, lane)
        halve(sums, 2, 1, lane)
        x = cuda.fma(-own[8], sums[0], own[12])  # v - G_t S^T k^
        y, write = own[9] * sums[1], float32(0)  # G_t S^T q^, to which B x is added; T x, decayed to the group's end
        for u in range(GROUP):
            x_u = cuda.shfl_sync(EVERY_LANE, x, uint32(lane & uint32(32 - GROUP)) | uint32(u))
            write = cuda.fma(own[u], x_u, write)
            y = cuda.fma(own[GROUP + u], x_u, y)
        if row < rows:
            o[uint32(uint32(row * n_v + head) * uint32(HEAD) + own_column)] = y
        update(s, own[10], write, get_at, lane)
        put_at, get_at, to_other = put_at + to_other, get_at + to_other, uint64(0) - to_other

    for i in range(ROWS):
        at = home + uint64(HEAD * (i % 4 + 4 * PARTS * (i // 4)))
        state[at], state[at + uint64(1)] = s[i, 0], s[i, 1]


# ---- launches ----------------------------------------------------------------------------------------------

def factors_shape(rows, n_v):
    """Shape of the float32 scratch that gdn_prefill needs for up to `rows` rows."""
    return -(-rows // GROUP), n_v, GROUP, RECORD


def gdn_prefill(card, o, memory, qkv, projected: Projected, decay: Decay, slots, heads: LinearHeads, *, rows,
                factors, stream=None):
    """o float32 [rows, n_v, 128] <- what the queries of `rows` consecutive tokens read, before the gated norm. All
    tokens belong to slot slots[0], whose state in memory float32 [n_slots, n_v, 128, 128] moves on.

    qkv float32 [rows, channels], convolved; projected: its columns alpha and beta are read; slots int32 [rows];
    factors: float32 scratch of `factors_shape`. The first row is at a multiple of 4 of its sequence. Two launches;
    never allocates.
    """
    qkv, factors, (n_k, n_v) = qkv.reshape(-1), factors.reshape(-1), heads
    card.launch(gdn_factors, (n_k, -(-rows // GROUP)), 32, factors, qkv, *projected, *decay, rows, n_k, n_v,
                stream=stream)
    card.launch(gdn_recurrence, (HEAD // COLUMNS, n_v), 32 * WARPS, o.reshape(-1), memory.reshape(-1), qkv,
                factors, slots, rows, n_k, n_v, stream=stream)


# ---- check and bench ---------------------------------------------------------------------------------------

CASES = [(1, 1, 1), (3, 2, 4), (31, 1, 2), (64, 2, 6), (65, 2, 4), (130, 1, 9)]  # rows, n_k, n_v

# Relative to the largest value. A sum has 34 roundings (a chain of 32, then 2) of 2**-24. They add up like random
# numbers, to 6. Decay and update are contractions, so errors of earlier tokens only fade. Measured errors are 3 to 5
# times 2**-24; 16 leaves room for tokens that are remembered for long.
TOLERANCE = 16 * 2.0 ** -24
PADDING = 4  # floats at the end of a row of `projected`


def random_inputs(random, rows, n_k, n_v):
    """projected [rows, stride], ssm_a, dt_bias of plausible sizes, whose decays g are from 0.02 to 0.9999."""
    normal = random.standard_normal
    qkv_z, alpha, beta = normal((rows, 2 * (n_k + n_v) * HEAD)), 2 * normal((rows, n_v)), normal((rows, n_v))
    projected = np.concatenate([qkv_z, alpha, beta, np.full((rows, PADDING), np.nan)], axis=1)
    return tuple(a.astype(np.float32) for a in (
        projected, -random.uniform(0.01, 1.5, n_v), random.uniform(-4, 1, n_v)))


def split(projected, n_k, n_v):
    """qkv, z, alpha, beta of `projected` [rows, stride]."""
    ends = np.cumsum([(2 * n_k + n_v) * HEAD, n_v * HEAD, n_v, n_v])
    return np.split(projected, ends, axis=1)[:4]


def error_by_largest(got, want):
    return np.max(np.abs(got - want)) / np.max(np.abs(want))


def check(card, case):
    """case = (rows, n_k, n_v): random inputs for the second of three slots. The other two must keep their states, and a
    row too many must stay poisoned. Returns the largest error divided by the largest value."""
    (rows, n_k, n_v), random = case, np.random.default_rng(sum(case))
    projected, ssm_a, dt_bias = random_inputs(random, rows, n_k, n_v)
    qkv, _, alpha, beta = split(projected, n_k, n_v)
    state = random.standard_normal((3, n_v, HEAD, HEAD)).astype(np.float32) / 8
    card_state, o = card.upload(state), card.alloc((rows + 1, n_v, HEAD), np.float32)
    factors = card.alloc(factors_shape(rows, n_v), np.float32)
    card.poison(o), card.poison(factors)
    inputs = Projected(card.upload(projected.reshape(-1)), projected.shape[1])
    gdn_prefill(card, o, card_state, card.upload(np.ascontiguousarray(qkv)), inputs,
                Decay(card.upload(ssm_a), card.upload(dt_bias)), card.upload(np.ones(rows, np.int32)),
                LinearHeads(n_k, n_v), rows=rows, factors=factors)
    got, got_state = card.download(o), card.download(card_state)
    want, want_state = reference(state[1], qkv, alpha, beta, ssm_a, dt_bias, n_k)
    worst = max(error_by_largest(got[:rows], want), error_by_largest(got_state[1], want_state))
    assert worst <= TOLERANCE, f"error {worst:.2e} of the largest value, tolerance {TOLERANCE:.2e}"
    np.testing.assert_array_equal(got_state[::2], state[::2])
    assert np.isnan(got[rows]).all(), "wrote past its rows"
    return worst


def cases(card):
    """The checks, then times at the shapes of a 0.8B, a 9B and a 27B model."""
    for case in CASES:
        yield Case("check {} rows, heads {}/{}".format(*case), partial(check, card, case))
    for rows, n_v in (64, 16), (512, 16), (512, 32), (512, 48):
        yield _timed(card, rows, 16, n_v)


def _timed(card, rows, n_k, n_v):
    projected, *gates = random_inputs(np.random.default_rng(0), rows, n_k, n_v)
    qkv = card.upload(np.ascontiguousarray(split(projected, n_k, n_v)[0]))
    o, factors = card.alloc((rows, n_v, HEAD), np.float32), card.alloc(factors_shape(rows, n_v), np.float32)
    state, slots = card.zeros((1, n_v, HEAD, HEAD), np.float32), card.zeros(rows, np.int32)
    inputs = Projected(card.upload(projected).reshape(-1), projected.shape[1])
    launch = partial(gdn_prefill, card, o, state, qkv, inputs, Decay(*map(card.upload, gates)), slots,
                     LinearHeads(n_k, n_v), rows=rows, factors=factors)
    return Case(f"{rows} rows, heads {n_k}/{n_v}", launch=launch,
                n_bytes=2 * state.nbytes + qkv.nbytes + o.nbytes,
                n_ops=rows * n_v * HEAD * HEAD * 6, pipe="ffma")


if __name__ == "__main__":
    main("Gated delta rule of a prompt", cases)
