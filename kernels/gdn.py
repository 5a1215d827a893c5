"""The gated delta rule: the recurrence of a linear-attention layer, for decode and prefill alike.

Per value head a state S [128 key rows, 128 value columns] is carried from token to token. With the convolved
q, k, v of the token, its projections a (`alpha`) and b (`beta`), and the constants A = `ssm_a` (negative) and
`dt_bias`:

    g = exp(A * softplus(a + dt_bias))              how much of the state is kept, 0..1
    q^ = q / sqrt(sum(q^2) + 1e-6) / sqrt(128)      k^ = k / sqrt(sum(k^2) + 1e-6)
    S  = g S                                        decay
    d  = sigmoid(b) (v - S^T k^)                    what the state does not yet say about k^
    S += k^ d^T                                     write
    o  = S^T q^                                     read

Value head j uses key head j mod n_k (the order of heads in GGUF files).

Memory. A row (token) of `qkv` is q of all key heads, k of all key heads, v of all value heads; the state of a
slot:

    qkv [rows, (2 n_k + n_v) 128]:   | q0 q1 .. | k0 k1 .. | v0 v1 v2 v3 .. |
    state [n_slots, n_v, 128, 128]:  key row i of a head is 128 consecutive floats, one per value column
                                                         lanes 0..31
                                                        |----------|
                                     row 0:   columns   0 ....... 31   32 ....... 63   64 .....
                                     row 1:             0 ....... 31   32 ....... 63   64 .....

The columns of S are independent of each other given q, k and the four scalars below. So one warp takes 32
columns of a head, a lane owns one column, its 128 numbers stay in registers from the first token of the
launch to the last, and no sum ever crosses lanes. Every row of S is read and written as 128 contiguous bytes.
q and k of a token are broadcast to the lanes from shared memory, fetched from global memory while the token
before is worked on; a warp shares nothing with other warps, so there is no barrier.

Normalisation is not applied to the 256 numbers but to what comes out of the dot products: `gdn_factors`
reduces each (token, value head) to four scalars, which a lane reads at once:

    keep = g,   predict = g |k|^-1,   write = sigmoid(b) |k|^-1,   read = |q|^-1 / sqrt(128)
    d = write (v - predict (S^T k)),   S = keep S + k d^T,   o = read (S^T q)

The same kernel serves decode (sequences of one row) and prefill (one sequence of many rows): it is the same
recurrence with the same order of operations, so the bits depend neither on how a prompt was cut nor on the
batch.

Why the recurrence and not the chunked (WY) form, also given below in NumPy as `reference_chunked`? Per token
and head the recurrence costs 4 * 128 * 128 = 65,536 float operations of one lane (predict, decay, write,
read). In chunks of 64 the products with the state (three of 128 * 128 = 49,152) remain, and k k^T, q k^T, the
triangular solve for two 128-wide right-hand sides and the product with the chunk's values add four of 64 *
128 / 2 and one of 64 * 64 / 6 or so: 66,000 to 90,000, depending on how much of each triangle is skipped. It
pays only where tensor cores make products nearly free. What it offers on a card without them is a shorter
chain of dependent steps; the recurrence has enough work in flight as long as 4 n_v warps fill the card.

Pipe: fp32. Per token and value head 49,152 FMA and 16,384 multiplications; decode moves 128 KiB of state per
head. Expected: decode at the memory's copy bandwidth; prefill at 512 fp32 instructions per token and warp, of
about 620 issued, so 80 % of the fp32 pipe with one warp per scheduler.
"""

from functools import partial

import numpy as np
from numba import cuda
from numba.types import float32, uint32, uint64

from kernels import conv
from kernels.bench import Case, main
from kernels.conv import convolve, ring_index
from kernels.intrinsics import (exp, load_floats4, load_shared4, load_words4, rsqrt, shared_address, sigmoid, silu,
                                softplus, store_floats4, store_shared4, warp_sum, word_as_float)
from kernels.norm import gate_head, gated_norm_reference, store_quantized
from kernels.quantize import quantize_reference

HEAD = 128       # key rows and value columns of a head
NORM_EPS = 1e-6  # added to the sum of squares of q and of k
QUERY_SCALE = HEAD ** -0.5
EVERY_LANE = 0xFFFFFFFF

GROUP = 4                    # tokens that prefill solves for at once, a power of two
GROUP_BITS = GROUP.bit_length() - 1
HEADS_AT_ONCE = 32 // GROUP  # value heads that a warp makes factors for
RECORD = 2 * GROUP + 4       # factors of a token
WARPS = 4                    # of a block
PARTS = 8                    # lanes that share a column, each with ROWS of its rows
ROWS = HEAD // PARTS
PART_BITS = PARTS.bit_length() - 1
LANE_COLUMNS = 2             # neighbours, of a lane
WARP_COLUMNS = LANE_COLUMNS * 32 // PARTS
COLUMNS = WARP_COLUMNS * WARPS
SOLVERS = PARTS // LANE_COLUMNS  # lanes that receive the sums of one column
OWN = GROUP // SOLVERS       # tokens whose sums a lane receives
SUMS = 2 * GROUP * LANE_COLUMNS  # of a lane: S^T k and S^T q
FETCHED = GROUP // WARPS     # tokens of which a thread carries 4 elements of q and k
TOKEN = 8 * HEAD             # bytes of a token's q and k in shared memory
SHARED = 2 * GROUP * TOKEN // 4

DECODE_WARPS = 16
DECODE_THREADS = 32 * DECODE_WARPS
DECODE_BLOCKS = 2           # that find registers on an SM
WARP_ROWS = HEAD // DECODE_WARPS
QKVZ = 4 * HEAD
assert QKVZ == DECODE_THREADS  # each thread makes one of these values
PARTIAL = 2 * HEAD * DECODE_WARPS
OUT = 2 * HEAD


# ---- reference ---------------------------------------------------------------------------------------------

def reference(state, qkv, alpha, beta, ssm_a, dt_bias, n_k):
    """The recurrence in float64. state [n_v, 128, 128], qkv [T, (2 n_k + n_v) 128], alpha and beta [T, n_v]
    -> (o [T, n_v, 128], state after the last token)."""
    q, k, v, log_keep, rate = _prepared(qkv, alpha, beta, ssm_a, dt_bias, n_k)
    state, o = np.array(state, np.float64), np.empty(v.shape)
    for t in range(len(v)):
        state *= np.exp(log_keep[t])[:, None, None]
        d = rate[t][:, None] * (v[t] - np.einsum("hij,hi->hj", state, k[t]))
        state += k[t][:, :, None] * d[:, None, :]
        o[t] = np.einsum("hij,hi->hj", state, q[t])
    return o, state


def reference_grouped(state, qkv, alpha, beta, ssm_a, dt_bias, n_k, group=4):
    """The same function as the prefill kernels compute it, by groups of tokens; notation as in the text above."""
    prepared = _prepared(qkv, alpha, beta, ssm_a, dt_bias, n_k)
    q, k, v, log_keep, rate = (np.moveaxis(a, 1, 0) for a in prepared)  # heads first
    state, o = np.array(state, np.float64), np.empty(v.shape)
    for start in range(0, v.shape[1], group):
        part = slice(start, start + group)
        qc, kc, vc, rc = q[:, part], k[:, part], v[:, part], rate[:, part, None]
        log_g = np.cumsum(log_keep[:, part], axis=1)[:, :, None]                     # [n_v, group, 1]
        decay = np.exp(np.tril(log_g - log_g.transpose(0, 2, 1)))                    # g_s+1 .. g_t where s <= t
        lower = np.tril(rc * decay * (kc @ kc.transpose(0, 2, 1)), -1)               # L
        d = np.linalg.solve(np.eye(lower.shape[1]) + lower, rc * (vc - np.exp(log_g) * (kc @ state)))
        o[:, part] = np.exp(log_g) * (qc @ state) + np.tril(decay * (qc @ kc.transpose(0, 2, 1))) @ d
        to_end = np.exp(log_g[:, -1:] - log_g)
        state = np.exp(log_g[:, -1:]) * state + (kc * to_end).transpose(0, 2, 1) @ d
    return np.moveaxis(o, 0, 1), state


def _prepared(qkv, alpha, beta, ssm_a, dt_bias, n_k):
    """q, k (normalised, one per value head), v [T, n_v, 128]; log decay and write rate [T, n_v]; float64."""
    x = np.asarray(qkv, np.float64).reshape(len(qkv), -1, HEAD)
    unit = x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + NORM_EPS)
    v = x[:, 2 * n_k:]
    key_head = np.arange(v.shape[1]) % n_k
    softplus_of = np.logaddexp(0.0, np.asarray(alpha, np.float64) + dt_bias)
    rate = 1.0 / (1.0 + np.exp(-np.asarray(beta, np.float64)))
    return unit[:, key_head] * QUERY_SCALE, unit[:, n_k + key_head], v, ssm_a * softplus_of, rate


# ---- kernels -----------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def dot(a, i, b, j):
    """a[i] . b[j], on every lane; vectors of 128, of which a lane holds four elements."""
    return warp_sum(cuda.fma(a[i, 3], b[j, 3], cuda.fma(a[i, 2], b[j, 2], cuda.fma(a[i, 1], b[j, 1],
                                                                                 a[i, 0] * b[j, 0]))))


@cuda.jit(device=True, forceinline=True)
def gates_of(projected, at, ssm_a, dt_bias, head, n_v):
    """g and sigmoid(b) of a value head; the alphas of its row begin at `at`, the betas follow them."""
    keep = exp(ssm_a[head] * softplus(projected[uint32(at + head)] + dt_bias[head]))
    return keep, sigmoid(projected[uint32(at + n_v + head)])


# ---- prefill -----------------------------------------------------------------------------------------------

@cuda.jit
def gdn_factors(factors, qkv, projected, stride, ssm_a, dt_bias, rows, n_k, n_v):
    """One warp per (key head, group): all its dot products on every lane, then a lane per value head of this
    key head and token u, whose column of T and B it solves for."""
    lane, key_head, group = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
    first, last = uint32(group * uint32(GROUP)), uint32(rows - uint32(1))
    width = uint32((n_k + n_k + n_v) * uint32(HEAD))
    q, k = cuda.local.array((GROUP, 4), float32), cuda.local.array((GROUP, 4), float32)
    for t in range(GROUP):
        row = uint32(min(uint32(first + uint32(t)), last))
        at = uint32(row * width + key_head * uint32(HEAD) + lane * uint32(4))
        q[t, 0], q[t, 1], q[t, 2], q[t, 3] = load_floats4(qkv, at)
        k[t, 0], k[t, 1], k[t, 2], k[t, 3] = load_floats4(qkv, uint32(at + n_k * uint32(HEAD)))
    qk, kk = cuda.local.array((GROUP, GROUP), float32), cuda.local.array((GROUP, GROUP), float32)
    for t in range(GROUP):
        for s in range(GROUP):
            if s <= t:
                qk[t, s], kk[t, s] = dot(q, t, k, s), dot(k, t, k, s)

    u, quad = uint32(lane & uint32(GROUP - 1)), uint32(lane & uint32(32 - GROUP))
    q_square, k_square = float32(0), float32(0)  # of token u
    for t in range(GROUP):
        square = dot(q, t, q, t)
        if u == uint32(t):
            q_square, k_square = square, kk[t, t]
    q_norm = rsqrt(q_square + float32(NORM_EPS)) * float32(QUERY_SCALE)
    k_norm = rsqrt(k_square + float32(NORM_EPS))
    q_scale, k_scale = cuda.local.array(GROUP, float32), cuda.local.array(GROUP, float32)
    for t in range(GROUP):
        q_scale[t] = cuda.shfl_sync(EVERY_LANE, q_norm, uint32(t))
        k_scale[t] = cuda.shfl_sync(EVERY_LANE, k_norm, uint32(t))
    for t in range(GROUP):
        for s in range(GROUP):
            qk[t, s], kk[t, s] = qk[t, s] * (q_scale[t] * k_scale[s]), kk[t, s] * (k_scale[t] * k_scale[s])

    row = uint32(first + u)
    gates_at = uint32(uint32(min(row, last)) * stride + width + n_v * uint32(HEAD))
    keep, rate = cuda.local.array(GROUP, float32), cuda.local.array(GROUP, float32)
    y = cuda.local.array(GROUP, float32)
    for start in range(key_head, n_v, uint32(n_k * uint32(HEADS_AT_ONCE))):
        head = uint32(uint32(start) + uint32(lane >> uint32(GROUP_BITS)) * n_k)
        exists = head < n_v
        g, b = gates_of(projected, gates_at, ssm_a, dt_bias, head if exists else key_head, n_v)
        g, b = (g, b) if row < rows else (float32(1), float32(0))  # rows past the end change nothing
        for t in range(GROUP):
            keep[t] = cuda.shfl_sync(EVERY_LANE, g, uint32(quad | uint32(t)))
            rate[t] = cuda.shfl_sync(EVERY_LANE, b, uint32(quad | uint32(t)))
        to = uint32(uint32(uint32(group * n_v + head) * uint32(GROUP)) * uint32(RECORD))
        decay, whole = float32(1), float32(1)  # over the tokens up to u, over the group
        for t in range(GROUP):
            whole = whole * keep[t]
            said, told = float32(0), float32(0)
            for s in range(GROUP):
                if s < t:
                    y[s] = y[s] * keep[t]
                    said = cuda.fma(kk[t, s], y[s], said)
            y[t] = rate[t] * ((float32(1) if u == uint32(t) else float32(0)) - said)
            for s in range(GROUP):
                if s <= t:
                    told = cuda.fma(qk[t, s], y[s], told)
            if u == uint32(t):
                decay = whole
            if exists:
                factors[uint32(to + uint32(RECORD * t + GROUP) + u)] = told
        if exists:
            for t in range(GROUP):
                factors[uint32(to + uint32(RECORD * t) + u)] = y[t] * k_scale[t]
            store_floats4(factors, uint32(to + u * uint32(RECORD) + uint32(2 * GROUP)), decay * k_norm,
                          decay * q_norm, whole, float32(0))


@cuda.jit(device=True, forceinline=True)
def halve(x, half, mask, lane):
    """A stage of sums over lanes: of x[0 .. 2 half) the lanes without the bit `mask` keep the first half and
    the others the second, each added to what the partner across the bit had of it."""
    upper = (lane & uint32(mask)) != uint32(0)
    for i in range(half):
        keep, send = (x[half + i], x[i]) if upper else (x[i], x[half + i])
        x[i] = keep + cuda.shfl_xor_sync(EVERY_LANE, send, mask)


@cuda.jit(device=True, forceinline=True)
def fetch_tokens(words, qkv, first, warp, last, width, q_at, k_at):
    """The 4 elements of q and of k that this thread carries, of every WARPS-th token."""
    for i in range(GROUP // WARPS):
        row = uint32(min(uint32(first + warp + uint32(WARPS * i)), last)) * width
        words[i, 0], words[i, 1], words[i, 2], words[i, 3] = load_words4(qkv, uint32(row + q_at))
        words[i, 4], words[i, 5], words[i, 6], words[i, 7] = load_words4(qkv, uint32(row + k_at))


@cuda.jit(device=True, forceinline=True)
def put_tokens(words, at):
    """The same, to shared memory."""
    for i in range(GROUP // WARPS):
        to = at + uint64(WARPS * TOKEN * i)
        store_shared4(to, words[i, 0], words[i, 1], words[i, 2], words[i, 3])
        store_shared4(to + uint64(4 * HEAD), words[i, 4], words[i, 5], words[i, 6], words[i, 7])


@cuda.jit(device=True, forceinline=True)
def fetch_own(v, f, qkv, factors, first, last, width, v_at, f_at):
    """v and the factors of the lane's tokens."""
    for i in range(OWN):
        v[i] = qkv[uint32(uint32(min(uint32(first + uint32(i)), last)) * width + v_at)]
        for j in range(RECORD // 4):
            at = uint32(f_at + uint32(RECORD * i + 4 * j))
            f[i, 4 * j], f[i, 4 * j + 1], f[i, 4 * j + 2], f[i, 4 * j + 3] = load_floats4(factors, at)


@cuda.jit
def gdn_recurrence(o, state, qkv, factors, row_slot, rows, n_k, n_v):
    """One block per (32 columns, value head), 8 columns a warp; all rows belong to one slot."""
    lane, warp, head = uint32(cuda.threadIdx.x & 31), uint32(cuda.threadIdx.x >> 5), uint32(cuda.blockIdx.y)
    part = uint32(lane & uint32(PARTS - 1))
    column = uint32(cuda.blockIdx.x * uint32(COLUMNS) + warp * uint32(WARP_COLUMNS))
    column = uint32(column + uint32(lane // uint32(PARTS)) * uint32(LANE_COLUMNS))  # the lane's first
    slot, last = uint32(row_slot[0]), uint32(rows - uint32(1))
    width = uint32((n_k + n_k + n_v) * uint32(HEAD))

    # 64 bits: the rows are constant offsets from one address.
    home = uint64(uint32(uint32(slot * n_v + head) * uint32(HEAD * HEAD) + part * uint32(4 * HEAD) + column))
    s = cuda.local.array((ROWS, LANE_COLUMNS), float32)  # all indices are constants once unrolled: registers
    for i in range(ROWS):
        at = home + uint64(HEAD * (i % 4 + 4 * PARTS * (i // 4)))
        for c in range(LANE_COLUMNS):
            s[i, c] = state[at + uint64(c)]

    # What a thread carries to shared memory, and where it reads there.
    q_at = uint32(uint32(head % n_k) * uint32(HEAD) + lane * uint32(4))
    k_at = uint32(q_at + n_k * uint32(HEAD))
    tokens = shared_address(cuda.shared.array(SHARED, float32, alignment=16))
    put_at = tokens + uint64(uint32(warp * uint32(TOKEN) + lane * uint32(16)))
    get_at = tokens + uint64(uint32(part << uint32(4)))
    side = uint64(GROUP * TOKEN)

    # The sums of which column and tokens of a group arrive in this lane.
    own_column = uint32(column + uint32(part // uint32(SOLVERS)))
    own_token = uint32(uint32(part & uint32(SOLVERS - 1)) * uint32(OWN))
    v_at = uint32(uint32(n_k + n_k + head) * uint32(HEAD) + own_column)
    o_at = uint32(head * uint32(HEAD) + own_column)
    f_at = uint32(uint32(head * uint32(GROUP) + own_token) * uint32(RECORD))
    f_step = uint32(n_v * uint32(GROUP * RECORD))

    words = cuda.local.array((FETCHED, 8), uint32)
    v, f = cuda.local.array(OWN, float32), cuda.local.array((OWN, RECORD), float32)
    x, e, y = cuda.local.array(OWN, float32), cuda.local.array(OWN, float32), cuda.local.array(OWN, float32)
    write = cuda.local.array(LANE_COLUMNS, float32)
    sums, k, q = cuda.local.array(SUMS, float32), cuda.local.array(4, uint32), cuda.local.array(4, uint32)
    next_v, next_f = cuda.local.array(OWN, float32), cuda.local.array((OWN, RECORD), float32)
    fetch_tokens(words, qkv, uint32(0), warp, last, width, q_at, k_at)
    fetch_own(next_v, next_f, qkv, factors, own_token, last, width, v_at, f_at)
    for first in range(uint32(0), rows, uint32(GROUP)):
        first = uint32(first)
        put_tokens(words, put_at)
        cuda.syncthreads()  # and so nobody reads the other side any more, which is written next
        fetch_tokens(words, qkv, uint32(first + uint32(GROUP)), warp, last, width, q_at, k_at)
        for i in range(OWN):
            v[i] = next_v[i]
            for j in range(RECORD):
                f[i, j] = next_f[i, j]
        f_at = uint32(f_at + (f_step if uint32(first + uint32(GROUP)) < rows else uint32(0)))
        fetch_own(next_v, next_f, qkv, factors, uint32(first + uint32(GROUP) + own_token), last, width, v_at, f_at)

        for i in range(SUMS):
            sums[i] = float32(0)
        for t in range(GROUP):
            for i in range(ROWS // 4):
                at = get_at + uint64(TOKEN * t + 16 * PARTS * i)
                q[0], q[1], q[2], q[3] = load_shared4(at)
                k[0], k[1], k[2], k[3] = load_shared4(at + uint64(4 * HEAD))
                for c in range(LANE_COLUMNS):
                    to = 2 * (GROUP * c + t)
                    for j in range(4):
                        sums[to] = cuda.fma(s[4 * i + j, c], word_as_float(k[j]), sums[to])
                        sums[to + 1] = cuda.fma(s[4 * i + j, c], word_as_float(q[j]), sums[to + 1])
        for i in range(PART_BITS):
            halve(sums, SUMS >> (i + 1), PARTS >> (i + 1), lane)

        for i in range(OWN):
            x[i] = cuda.fma(-f[i, 2 * GROUP], sums[2 * i], v[i])
            y[i], e[i] = f[i, 2 * GROUP + 1] * sums[2 * i + 1], float32(0)
        for u in range(GROUP):
            x_u = cuda.shfl_sync(EVERY_LANE, x[u % OWN], uint32(lane & uint32(32 - SOLVERS)) | uint32(u // OWN))
            for i in range(OWN):
                e[i] = cuda.fma(f[i, u], x_u, e[i])
                y[i] = cuda.fma(f[i, GROUP + u], x_u, y[i])
        for i in range(OWN):
            row = uint32(first + own_token + uint32(i))
            if row < rows:
                o[uint32(row * n_v * uint32(HEAD) + o_at)] = y[i]

        decay = f[0, 2 * GROUP + 2]
        for i in range(ROWS):
            for c in range(LANE_COLUMNS):
                s[i, c] = decay * s[i, c]
        for t in range(GROUP):
            for c in range(LANE_COLUMNS):
                write[c] = cuda.shfl_sync(EVERY_LANE, e[t % OWN],
                                          uint32(lane & uint32(32 - PARTS)) | uint32(SOLVERS * c + t // OWN))
            for i in range(ROWS // 4):
                k[0], k[1], k[2], k[3] = load_shared4(get_at + uint64(TOKEN * t + 16 * PARTS * i + 4 * HEAD))
                for j in range(4):
                    for c in range(LANE_COLUMNS):
                        s[4 * i + j, c] = cuda.fma(word_as_float(k[j]), write[c], s[4 * i + j, c])
        put_at, get_at, side = put_at + side, get_at + side, uint64(0) - side

    for i in range(ROWS):
        at = home + uint64(HEAD * (i % 4 + 4 * PARTS * (i // 4)))
        for c in range(LANE_COLUMNS):
            state[at + uint64(c)] = s[i, c]


# ---- decode ------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def decode_head(state, ring, projected, stride, conv_w, ssm_a, dt_bias, row_slot, row_pos, norm_w, n_k, n_v):
    """One block per (value head, row): moves ring and state on. Returns the lane's four values of o, of silu(z) and
    of the norm's weights."""
    thread = uint32(cuda.threadIdx.x)
    lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
    head, row = uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
    slot, position, key_head = uint32(row_slot[row]), uint32(row_pos[row]), uint32(head % n_k)
    width = uint32((n_k + n_k + n_v) * uint32(HEAD))
    row_at = uint32(row * stride)

    # What a thread needs for its element of q, k, v or z: before the state, which keeps memory busy for longer.
    kind, element = uint32(thread >> uint32(7)), uint32(thread & uint32(HEAD - 1))
    start = key_head if kind == uint32(0) else (n_k + key_head if kind == uint32(1) else n_k + n_k + head)
    channel = uint32(uint32(start) * uint32(HEAD) + element)
    column = channel if kind < uint32(3) else uint32(width + head * uint32(HEAD) + element)
    newest = projected[uint32(row_at + column)]
    weight = norm_w[element]
    x0 = ring[ring_index(slot, uint32(position + uint32(1)), channel, width)]
    x1 = ring[ring_index(slot, uint32(position + uint32(2)), channel, width)]
    x2 = ring[ring_index(slot, uint32(position + uint32(3)), channel, width)]
    w0, w1, w2, w3 = load_floats4(conv_w, uint32(channel * uint32(4)))

    home = uint64(uint32(uint32(uint32(slot * n_v + head) * uint32(HEAD) + warp * uint32(WARP_ROWS)) * uint32(HEAD)
                         + lane * uint32(4)))
    s = cuda.local.array((WARP_ROWS, 4), float32)
    for i in range(WARP_ROWS):
        s[i, 0], s[i, 1], s[i, 2], s[i, 3] = load_floats4(state, home + uint64(HEAD * i))

    qkvz, gates = cuda.shared.array(QKVZ, float32, alignment=16), cuda.shared.array(2, float32)
    weights = cuda.shared.array(HEAD, float32, alignment=16)
    if warp == uint32(DECODE_WARPS - 1):
        keep, rate = gates_of(projected, uint32(row_at + width + n_v * uint32(HEAD)), ssm_a, dt_bias, head, n_v)
        gates[uint32(0)], gates[uint32(1)] = keep, rate
    convolved = convolve(w0, w1, w2, w3, x0, x1, x2, newest)
    qkvz[thread] = silu(convolved if kind < uint32(3) else newest)
    if kind == uint32(3):
        weights[element] = weight
    if kind == uint32(2) or (kind < uint32(2) and head < n_k):  # of the blocks that share a key head one
        ring[ring_index(slot, position, channel, width)] = newest
    cuda.syncthreads()

    keep, rate = gates[uint32(0)], gates[uint32(1)]
    q_at, k_at = uint32(warp * uint32(WARP_ROWS)), uint32(uint32(HEAD) + warp * uint32(WARP_ROWS))
    sums = cuda.shared.array(PARTIAL, float32, alignment=16)
    p, r = cuda.local.array(4, float32), cuda.local.array(4, float32)
    for c in range(4):
        p[c], r[c] = float32(0), float32(0)
    for i in range(WARP_ROWS):
        q, k = qkvz[uint32(q_at + uint32(i))], qkvz[uint32(k_at + uint32(i))]
        for c in range(4):
            p[c] = cuda.fma(s[i, c], k, p[c])
            r[c] = cuda.fma(s[i, c], q, r[c])
    to = uint32(uint32(warp * uint32(HEAD)) + lane * uint32(4))
    store_floats4(sums, to, p[0], p[1], p[2], p[3])
    store_floats4(sums, uint32(to + uint32(DECODE_WARPS * HEAD)), r[0], r[1], r[2], r[3])
    predict, write, read, kq = float32(0), float32(0), float32(0), float32(0)
    if thread < uint32(HEAD):
        q, k = cuda.local.array((1, 4), float32), cuda.local.array((1, 4), float32)
        q[0, 0], q[0, 1], q[0, 2], q[0, 3] = load_floats4(qkvz, uint32(lane * uint32(4)))
        k[0, 0], k[0, 1], k[0, 2], k[0, 3] = load_floats4(qkvz, uint32(uint32(HEAD) + lane * uint32(4)))
        k_scale = rsqrt(dot(k, 0, k, 0) + float32(NORM_EPS))
        read = rsqrt(dot(q, 0, q, 0) + float32(NORM_EPS)) * float32(QUERY_SCALE)
        predict, write, kq = keep * k_scale, rate * k_scale, dot(q, 0, k, 0)
    cuda.syncthreads()

    out = cuda.shared.array(OUT, float32, alignment=16)  # d, then o
    if thread < uint32(HEAD):
        p, r = float32(0), float32(0)
        for i in range(DECODE_WARPS):
            p = p + sums[uint32(uint32(HEAD * i) + thread)]
            r = r + sums[uint32(uint32(HEAD * (DECODE_WARPS + i)) + thread)]
        d = write * cuda.fma(-predict, p, qkvz[uint32(uint32(2 * HEAD) + thread)])
        out[thread] = d
        out[uint32(thread + uint32(HEAD))] = read * cuda.fma(kq, d, keep * r)
    cuda.syncthreads()

    d0, d1, d2, d3 = load_floats4(out, uint32(lane * uint32(4)))
    for i in range(WARP_ROWS):
        k = qkvz[uint32(k_at + uint32(i))]
        store_floats4(state, home + uint64(HEAD * i), cuda.fma(k, d0, keep * s[i, 0]), cuda.fma(k, d1, keep * s[i, 1]),
                      cuda.fma(k, d2, keep * s[i, 2]), cuda.fma(k, d3, keep * s[i, 3]))
    o0, o1, o2, o3 = load_floats4(out, uint32(uint32(HEAD) + lane * uint32(4)))
    g0, g1, g2, g3 = load_floats4(qkvz, uint32(uint32(3 * HEAD) + lane * uint32(4)))
    return o0, o1, o2, o3, g0, g1, g2, g3, load_floats4(weights, uint32(lane * uint32(4)))


@cuda.jit(launch_bounds=(DECODE_THREADS, DECODE_BLOCKS))
def gdn_decode_kernel(y, state, ring, projected, stride, conv_w, ssm_a, dt_bias, norm_w, row_slot, row_pos, n_k,
                      n_v, eps):
    lane = uint32(cuda.threadIdx.x & 31)
    o0, o1, o2, o3, g0, g1, g2, g3, w = decode_head(state, ring, projected, stride, conv_w, ssm_a, dt_bias, row_slot,
                                                 row_pos, norm_w, n_k, n_v)
    head = uint32(cuda.blockIdx.y * n_v + cuda.blockIdx.x)
    if uint32(cuda.threadIdx.x) >= uint32(DECODE_THREADS - 32):
        y0, y1, y2, y3 = gate_head(o0, o1, o2, o3, w, g0, g1, g2, g3, eps)
        store_floats4(y, uint32(head * uint32(HEAD) + lane * uint32(4)), y0, y1, y2, y3)


@cuda.jit(launch_bounds=(DECODE_THREADS, DECODE_BLOCKS))
def gdn_decode_quantize_kernel(q, d, state, ring, projected, stride, conv_w, ssm_a, dt_bias, norm_w, row_slot,
                               row_pos, n_k, n_v, eps):
    lane = uint32(cuda.threadIdx.x & 31)
    o0, o1, o2, o3, g0, g1, g2, g3, w = decode_head(state, ring, projected, stride, conv_w, ssm_a, dt_bias, row_slot,
                                                 row_pos, norm_w, n_k, n_v)
    head = uint32(cuda.blockIdx.y * n_v + cuda.blockIdx.x)
    if uint32(cuda.threadIdx.x) >= uint32(DECODE_THREADS - 32):
        y0, y1, y2, y3 = gate_head(o0, o1, o2, o3, w, g0, g1, g2, g3, eps)
        store_quantized(q, d, uint32(head * uint32(HEAD) + lane * uint32(4)), True, y0, y1, y2, y3)


# ---- launches ----------------------------------------------------------------------------------------------

def factors_shape(rows, n_v):
    """Shape of the float32 scratch that gdn_prefill needs for up to `rows` rows."""
    return -(-rows // GROUP), n_v, GROUP, RECORD


def gdn_prefill(card, o, state, factors, qkv, projected, stride, ssm_a, dt_bias, row_slot, rows, n_k, n_v,
                stream=None):
    """o float32 [rows, n_v, 128] <- the outputs of `rows` consecutive tokens of slot row_slot[0], whose state
    moves on; before the gated norm.

    state    float32 [n_slots, n_v, 128 (key), 128 (value)]    qkv      float32 [rows, (2 n_k + n_v) 128], convolved
    factors  float32 scratch of `factors_shape`                projected, stride  see above
    ssm_a, dt_bias  float32 [n_v]                              row_slot  int32 [rows]

    The first row is at a multiple of GROUP of its sequence. Two kernel launches; writes only o, state and
    factors, never allocates.
    """
    qkv, factors = qkv.reshape(-1), factors.reshape(-1)
    card.launch(gdn_factors, (n_k, -(-rows // GROUP)), 32, factors, qkv, projected, stride, ssm_a, dt_bias, rows,
                n_k, n_v, stream=stream)
    card.launch(gdn_recurrence, (HEAD // COLUMNS, n_v), 32 * WARPS, o.reshape(-1), state.reshape(-1), qkv, factors,
                row_slot, rows, n_k, n_v, stream=stream)


def gdn_decode(card, y, state, ring, projected, stride, conv_w, ssm_a, dt_bias, norm_w, row_slot, row_pos, rows,
               n_k, n_v, eps, stream=None):
    """y float32 [rows, n_v 128] <- the gated outputs of one token of each slot in row_slot, at most one row per
    slot; their states and rings move on.

    state, projected, stride, ssm_a, dt_bias  as for gdn_prefill      norm_w    float32 [128]
    ring      float32 [n_slots, 4, (2 n_k + n_v) 128]                 conv_w    float32 [(2 n_k + n_v) 128, 4]
    row_slot, row_pos  int32 [rows]
    """
    card.launch(gdn_decode_kernel, (n_v, rows), DECODE_THREADS, y.reshape(-1), state.reshape(-1), ring.reshape(-1),
                projected, stride, conv_w.reshape(-1), ssm_a, dt_bias, norm_w, row_slot, row_pos, n_k, n_v,
                float(eps), stream=stream)


def gdn_decode_quantize(card, q, d, state, ring, projected, stride, conv_w, ssm_a, dt_bias, norm_w, row_slot,
                        row_pos, rows, n_k, n_v, eps, stream=None):
    """q int8 [rows, n_v 128], d float32 [rows, n_v 4] <- the same, quantised."""
    card.launch(gdn_decode_quantize_kernel, (n_v, rows), DECODE_THREADS, q.reshape(-1), d.reshape(-1),
                state.reshape(-1), ring.reshape(-1), projected, stride, conv_w.reshape(-1), ssm_a, dt_bias, norm_w,
                row_slot, row_pos, n_k, n_v, float(eps), stream=stream)


# ---- check and bench ---------------------------------------------------------------------------------------

PREFILL_CASES = [(1, 1, 1), (3, 2, 4), (31, 1, 2), (64, 2, 6), (65, 2, 4), (130, 1, 9)]  # rows, n_k, n_v
DECODE_CASES = [(1, 1, 1), (1, 2, 4), (3, 2, 6), (8, 1, 3)]

# Relative to the largest value. A sum is 34 roundings (a chain of 32, then 2) of 2**-24 on its terms, which
# like random numbers add up to 6. Decay and write are contractions: errors of earlier tokens only fade. 16
# leaves room for the few tokens that are remembered well; measured are 3 to 5.
TOLERANCE = 16 * 2.0 ** -24
PADDING = 4  # floats at the end of a row of `projected`


def random_inputs(random, rows, n_k, n_v):
    """projected [rows, stride], ssm_a, dt_bias of plausible sizes: decays from 0.02 to 0.9999."""
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


def check_prefill(card, case):
    """case = (rows, n_k, n_v): random inputs for the second of three slots, whose neighbours must keep their
    states, and a row too many that must stay poisoned. Returns the largest error by the largest value."""
    (rows, n_k, n_v), random = case, np.random.default_rng(sum(case))
    projected, ssm_a, dt_bias = random_inputs(random, rows, n_k, n_v)
    qkv, _, alpha, beta = split(projected, n_k, n_v)
    state = random.standard_normal((3, n_v, HEAD, HEAD)).astype(np.float32) / 8
    card_state, o = card.upload(state), card.alloc((rows + 1, n_v, HEAD), np.float32)
    factors = card.alloc(factors_shape(rows, n_v), np.float32)
    card.poison(o), card.poison(factors)
    gdn_prefill(card, o, card_state, factors, card.upload(np.ascontiguousarray(qkv)), card.upload(projected).reshape(-1),
                projected.shape[1], card.upload(ssm_a), card.upload(dt_bias), card.upload(np.ones(rows, np.int32)),
                rows, n_k, n_v)
    got, got_state = card.download(o), card.download(card_state)
    want, want_state = reference(state[1], qkv, alpha, beta, ssm_a, dt_bias, n_k)
    worst = max(error_by_largest(got[:rows], want), error_by_largest(got_state[1], want_state))
    assert worst <= TOLERANCE, f"error {worst:.2e} of the largest value, tolerance {TOLERANCE:.2e}"
    np.testing.assert_array_equal(got_state[::2], state[::2])
    assert np.isnan(got[rows]).all(), "wrote past its rows"
    return worst


def check_decode(card, case):
    """case = (rows, n_k, n_v): one token each of slots out of order, beside an idle slot that must keep its
    state and ring, and a row too many that must stay poisoned. The quantised form must give the bits of
    quantize_q8. Returns the largest error by the largest value."""
    (rows, n_k, n_v), random, eps = case, np.random.default_rng(sum(case)), 1e-6
    projected, ssm_a, dt_bias = random_inputs(random, rows, n_k, n_v)
    channels, slots = (2 * n_k + n_v) * HEAD, np.arange(rows, 0, -1)  # slot 0 stays idle
    state = random.standard_normal((rows + 1, n_v, HEAD, HEAD)).astype(np.float32) / 8
    before = random.standard_normal((rows + 1, conv.BEFORE, channels)).astype(np.float32)
    conv_w = random.standard_normal((channels, conv.WIDTH)).astype(np.float32)
    norm_w, positions = random.uniform(0.5, 1.5, HEAD).astype(np.float32), random.integers(0, 1000, rows + 1)
    ring = np.stack([conv.ring_of(x, p) for x, p in zip(before, positions)])
    constants = [card.upload(a) for a in (projected.reshape(-1), conv_w, ssm_a, dt_bias, norm_w)]
    places = [card.upload(a.astype(np.int32)) for a in (slots, positions[slots])]

    def run(decode, *widths_and_types):
        """The outputs, with a row too many, and the states of all slots."""
        outputs = [card.alloc((rows + 1, width), dtype) for width, dtype in widths_and_types]
        for output in outputs:
            card.poison(output)
        states = card.upload(state), card.upload(ring)
        decode(card, *outputs, *states, constants[0], projected.shape[1], *constants[1:], *places, rows, n_k,
               n_v, eps)
        return map(card.download, (*outputs, *states))

    y, got_state, got_ring = run(gdn_decode, (n_v * HEAD, np.float32))
    worst = 0.0
    for row, slot in enumerate(slots):
        qkv, z, alpha, beta = split(projected[row:row + 1], n_k, n_v)
        convolved = conv.reference(qkv, before[slot], conv_w)
        o, want_state = reference(state[slot], convolved, alpha, beta, ssm_a, dt_bias, n_k)
        want = gated_norm_reference(o, z.reshape(o.shape), norm_w, eps).reshape(-1)
        worst = max(worst, error_by_largest(y[row], want), error_by_largest(got_state[slot], want_state))
        ring[slot, positions[slot] % conv.WIDTH] = qkv
    assert worst <= TOLERANCE, f"error {worst:.2e} of the largest value, tolerance {TOLERANCE:.2e}"
    np.testing.assert_array_equal(got_ring, ring)
    np.testing.assert_array_equal(got_state[0], state[0])
    q, d, *_ = run(gdn_decode_quantize, (n_v * HEAD, np.int8), (n_v * HEAD // 32, np.float32))
    for got, want in zip((q, d), quantize_reference(y[:rows])):
        np.testing.assert_array_equal(got[:rows], want)
    assert np.isnan(y[rows]).all() and (q[rows] == -1).all() and np.isnan(d[rows]).all(), "wrote past its rows"
    return worst


def cases(card):
    """The checks, then times at the shapes of a 0.8B, a 9B and a 27B model; in decode all layers are one, so
    that up to 48 heads stay in a large L2 cache."""
    for case in PREFILL_CASES:
        yield Case("check prefill of {}, heads {}/{}".format(*case), partial(check_prefill, card, case))
    for case in DECODE_CASES:
        yield Case("check decode of {}, heads {}/{}".format(*case), partial(check_decode, card, case))
    for rows, n_v in (1, 16), (1, 32), (1, 48), (8, 32), (8, 48):
        yield _timed_decode(card, rows, 16, n_v)
    for rows, n_v in (64, 16), (512, 16), (512, 32), (512, 48):
        yield _timed_prefill(card, rows, 16, n_v)


def _timed_prefill(card, rows, n_k, n_v):
    projected, *gates = random_inputs(np.random.default_rng(0), rows, n_k, n_v)
    qkv = card.upload(np.ascontiguousarray(split(projected, n_k, n_v)[0]))
    o, factors = card.alloc((rows, n_v, HEAD), np.float32), card.alloc(factors_shape(rows, n_v), np.float32)
    state, slots = card.zeros((1, n_v, HEAD, HEAD), np.float32), card.zeros(rows, np.int32)
    launch = partial(gdn_prefill, card, o, state, factors, qkv, card.upload(projected).reshape(-1),
                     projected.shape[1], *map(card.upload, gates), slots, rows, n_k, n_v)
    return Case(f"prefill of {rows}, heads {n_k}/{n_v}", launch=launch,
                n_bytes=2 * state.nbytes + qkv.nbytes + o.nbytes,
                n_ops=rows * n_v * HEAD * HEAD * 6, pipe="ffma")


def _timed_decode(card, rows, n_k, n_v):
    projected, *gates = random_inputs(np.random.default_rng(0), rows, n_k, n_v)
    channels = (2 * n_k + n_v) * HEAD
    q, d = card.alloc((rows, n_v * HEAD), np.int8), card.alloc((rows, n_v * 4), np.float32)
    state, ring, conv_w, norm_w = (card.zeros(shape, np.float32) for shape in (
        (rows, n_v, HEAD, HEAD), (rows, conv.WIDTH, channels), (channels, conv.WIDTH), HEAD))
    slots = card.upload(np.arange(rows, dtype=np.int32))
    launch = partial(gdn_decode_quantize, card, q, d, state, ring, card.upload(projected).reshape(-1),
                     projected.shape[1], conv_w, *map(card.upload, gates), norm_w, slots, slots, rows, n_k, n_v,
                     1e-6)
    return Case(f"decode of {rows}, heads {n_k}/{n_v}", launch=launch, n_bytes=2 * state.nbytes,
                n_ops=rows * n_v * HEAD * HEAD * 7, pipe="ffma")


if __name__ == "__main__":
    main("Gated delta rule", cases)
