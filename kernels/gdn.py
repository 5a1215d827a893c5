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
from numba import cuda, float32, uint32, uint64

from kernels.bench import Case, main
from kernels.intrinsics import (exp, load_floats4, load_words4, rsqrt, sigmoid, softplus, store_floats4,
                                store_words4, warp_sum)

HEAD = 128       # key rows and value columns of a head
LANES = 32       # value columns of a warp
TOKEN = 2 * HEAD  # k and q of a token, in shared memory
NORM_EPS = 1e-6  # added to the sum of squares of q and of k
QUERY_SCALE = 128.0 ** -0.5


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


def reference_chunked(state, qkv, alpha, beta, ssm_a, dt_bias, n_k, chunk=64):
    """The same function in its WY form (Yang et al., "Gated Delta Networks", 2024): by matrix products.

    Within a chunk let G_t be the decay from its start to token t. Unrolling d_t = rate_t (v_t - S_t^T k_t)
    gives a unit lower triangular system for all d of the chunk, (1 + L) D = rate (V - G K S0) with
    L_ts = rate_t (G_t / G_s) k_t.k_s for s < t; o and the state after the chunk are plain products then.
    """
    prepared = _prepared(qkv, alpha, beta, ssm_a, dt_bias, n_k)
    q, k, v, log_keep, rate = (np.moveaxis(a, 1, 0) for a in prepared)  # heads first
    state, o = np.array(state, np.float64), np.empty(v.shape)
    for start in range(0, v.shape[1], chunk):
        part = slice(start, start + chunk)
        qc, kc, vc, rc = q[:, part], k[:, part], v[:, part], rate[:, part, None]
        log_g = np.cumsum(log_keep[:, part], axis=1)[:, :, None]                     # [n_v, C, 1]
        decay = np.exp(np.tril(log_g - log_g.transpose(0, 2, 1)))                    # G_t / G_s where s <= t
        lower = np.tril(rc * decay * (kc @ kc.transpose(0, 2, 1)), -1)
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

@cuda.jit(device=True, inline="always")
def _inverse_norm(x, index):
    """1 / sqrt(sum of 128 squares + eps), on every lane; `index` is where the lane's 4 elements are."""
    a, b, c, d = load_floats4(x, index)
    return rsqrt(warp_sum(cuda.fma(a, a, b * b) + cuda.fma(c, c, d * d)) + float32(NORM_EPS))


@cuda.jit
def gdn_factors(factors, qkv, alpha, beta, ssm_a, dt_bias, n_k, n_v):
    """One warp per (key head, row): the norms of q and k, then a lane per value head of this key head."""
    lane, key_head, row = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
    q = uint32(uint32(row * (n_k + n_k + n_v) + key_head) * uint32(HEAD) + lane * uint32(4))
    read = _inverse_norm(qkv, q) * float32(QUERY_SCALE)
    k_norm = _inverse_norm(qkv, uint32(q + n_k * uint32(HEAD)))
    head = uint32(key_head + lane * n_k)
    while head < n_v:
        at = uint32(row * n_v + head)
        keep = exp(ssm_a[head] * softplus(alpha[at] + dt_bias[head]))
        write = sigmoid(beta[at]) * k_norm
        store_floats4(factors, uint32(at * uint32(4)), keep, keep * k_norm, write, read)
        head = uint32(head + n_k * uint32(LANES))


@cuda.jit
def gdn_recurrence(o, state, qkv, factors, row_slot, length, n_k, n_v):
    """One warp per (32 columns, value head, sequence of `length` rows)."""
    lane, head, first = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.z * length)
    column = uint32(cuda.blockIdx.x * uint32(LANES) + lane)
    slot = uint32(row_slot[first])
    # 64 bits: the rows are constant offsets from one address, not 128 addresses that fill registers.
    base = uint64(uint32(uint32(slot * n_v + head) * uint32(HEAD * HEAD) + column))
    width = uint32((n_k + n_k + n_v) * uint32(HEAD))
    q_at = uint32(uint32(head % n_k) * uint32(HEAD) + lane * uint32(4))
    k_at = uint32(q_at + n_k * uint32(HEAD))
    v_at = uint32((n_k + n_k + head) * uint32(HEAD) + column)

    token = cuda.shared.array(TOKEN, float32)
    s = cuda.local.array(HEAD, float32)  # all indices are constants once unrolled: registers
    for i in range(uint32(HEAD)):
        s[i] = state[uint64(base + uint64(i * uint32(HEAD)))]

    row = first
    x = uint32(row * width)
    k, q = load_words4(qkv, uint32(x + k_at)), load_words4(qkv, uint32(x + q_at))
    next_v = qkv[uint32(x + v_at)]
    keep, predict, write, read = load_floats4(factors, uint32(uint32(row * n_v + head) * uint32(4)))
    for t in range(length):
        cuda.syncwarp()  # every lane has read the token before
        store_words4(token, uint32(lane * uint32(4)), k[0], k[1], k[2], k[3])
        store_words4(token, uint32(uint32(HEAD) + lane * uint32(4)), q[0], q[1], q[2], q[3])
        cuda.syncwarp()
        v, next_row = next_v, uint32(min(uint32(row + uint32(1)), uint32(first + length - uint32(1))))
        x = uint32(next_row * width)  # the last token fetches itself again: cheaper than a branch
        k, q = load_words4(qkv, uint32(x + k_at)), load_words4(qkv, uint32(x + q_at))
        next_v = qkv[uint32(x + v_at)]

        a0, a1, a2, a3 = float32(0), float32(0), float32(0), float32(0)  # four chains hide latency
        for i in range(uint32(HEAD // 4)):
            j = uint32(i * uint32(4))
            y0, y1, y2, y3 = load_floats4(token, j)
            a0 = cuda.fma(s[j], y0, a0)
            a1 = cuda.fma(s[j + uint32(1)], y1, a1)
            a2 = cuda.fma(s[j + uint32(2)], y2, a2)
            a3 = cuda.fma(s[j + uint32(3)], y3, a3)
        d = write * cuda.fma(-predict, (a0 + a1) + (a2 + a3), v)

        cuda.syncwarp()  # makes the compiler read k again below instead of holding it in 128 registers
        a0, a1, a2, a3 = float32(0), float32(0), float32(0), float32(0)
        for i in range(uint32(HEAD // 4)):
            j = uint32(i * uint32(4))
            y0, y1, y2, y3 = load_floats4(token, j)
            z0, z1, z2, z3 = load_floats4(token, uint32(j + uint32(HEAD)))
            s[j] = cuda.fma(y0, d, keep * s[j])
            s[j + uint32(1)] = cuda.fma(y1, d, keep * s[j + uint32(1)])
            s[j + uint32(2)] = cuda.fma(y2, d, keep * s[j + uint32(2)])
            s[j + uint32(3)] = cuda.fma(y3, d, keep * s[j + uint32(3)])
            a0 = cuda.fma(s[j], z0, a0)
            a1 = cuda.fma(s[j + uint32(1)], z1, a1)
            a2 = cuda.fma(s[j + uint32(2)], z2, a2)
            a3 = cuda.fma(s[j + uint32(3)], z3, a3)
        o[uint32(uint32(row * n_v + head) * uint32(HEAD) + column)] = read * ((a0 + a1) + (a2 + a3))
        row = next_row
        keep, predict, write, read = load_floats4(factors, uint32(uint32(row * n_v + head) * uint32(4)))

    for i in range(uint32(HEAD)):
        state[uint64(base + uint64(i * uint32(HEAD)))] = s[i]


def gated_delta_rule(card, o, state, factors, qkv, alpha, beta, ssm_a, dt_bias, row_slot, rows, n_k, n_v,
                     length=1, stream=None):
    """o <- the outputs of `rows` tokens; the state of each slot in row_slot moves on by `length` tokens.

    o        float32 [rows, n_v, 128]             state         float32 [n_slots, n_v, 128 (key), 128 (value)]
    qkv      float32 [rows, (2 n_k + n_v) 128]    alpha, beta   float32 [rows, n_v], raw projections
    factors  float32 [rows, n_v, 4], scratch      ssm_a, dt_bias  float32 [n_v]    row_slot  int32 [rows]

    `rows` is a multiple of `length`; rows i * length ... are one sequence of slot row_slot[i * length]: one
    row per slot in decode, all rows one sequence in prefill. No slot may own two sequences of a launch. Two
    kernel launches; writes only o, state and factors, never allocates.
    """
    qkv, factors = qkv.reshape(-1), factors.reshape(-1)
    card.launch(gdn_factors, (n_k, rows), LANES, factors, qkv, alpha.reshape(-1), beta.reshape(-1), ssm_a,
                dt_bias, n_k, n_v, stream=stream)
    card.launch(gdn_recurrence, (HEAD // LANES, n_v, rows // length), LANES, o.reshape(-1), state.reshape(-1),
                qkv, factors, row_slot, length, n_k, n_v, stream=stream)


# ---- check and bench ---------------------------------------------------------------------------------------

CASES = [(1, 1, 1, 1), (1, 3, 2, 4), (3, 1, 2, 4), (2, 2, 2, 6), (31, 1, 1, 2), (65, 1, 2, 4)]

# Relative to the largest value. A sum is 34 roundings (a chain of 32, then 2) of 2**-24 on its terms, which
# like random numbers add up to 6. Decay and write are contractions: errors of earlier tokens only fade. 16
# leaves room for the few tokens that are remembered well; measured are 3 to 5.
TOLERANCE = 16 * 2.0 ** -24


def random_inputs(random, rows, n_k, n_v):
    """qkv, alpha, beta, ssm_a, dt_bias of plausible sizes: decays from 0.02 to 0.9999."""
    normal = random.standard_normal
    return tuple(a.astype(np.float32) for a in (
        normal((rows, (2 * n_k + n_v) * HEAD)), 2 * normal((rows, n_v)), normal((rows, n_v)),
        -random.uniform(0.01, 1.5, n_v), random.uniform(-4, 1, n_v)))


def check(card, case):
    """case = (length, sequences, n_k, n_v): random inputs, slots out of order, an idle slot that must
    keep its state and a row too many that must stay poisoned. Returns the largest error by the
    largest value."""
    length, sequences, n_k, n_v = case
    rows, n_slots, random = length * sequences, sequences + 1, np.random.default_rng(sum(case))
    qkv, alpha, beta, ssm_a, dt_bias = random_inputs(random, rows, n_k, n_v)
    state = random.standard_normal((n_slots, n_v, HEAD, HEAD)).astype(np.float32) / 8
    slots = np.arange(sequences, 0, -1)  # slot 0 stays idle
    card_state = card.upload(state)
    o, factors = card.alloc((rows + 1, n_v, HEAD), np.float32), card.alloc((rows, n_v, 4), np.float32)
    card.poison(o), card.poison(factors)
    inputs = map(card.upload, (qkv, alpha, beta, ssm_a, dt_bias))
    gated_delta_rule(card, o[:rows], card_state, factors, *inputs,
                     card.upload(np.repeat(slots, length).astype(np.int32)), rows, n_k, n_v, length)
    got, got_state, worst = card.download(o), card.download(card_state), 0.0
    for i, slot in enumerate(slots):
        part = slice(i * length, (i + 1) * length)
        want, want_state = reference(state[slot], qkv[part], alpha[part], beta[part], ssm_a, dt_bias, n_k)
        for a, b in ((got[part], want), (got_state[slot], want_state)):
            worst = max(worst, np.max(np.abs(a - b)) / np.max(np.abs(b)))
    assert worst <= TOLERANCE, f"error {worst:.2e} of the largest value, tolerance {TOLERANCE:.2e}"
    np.testing.assert_array_equal(got_state[0], state[0])
    assert np.isnan(got[rows]).all(), "wrote past its rows"
    return worst


def cases(card):
    """The checks, then times at the shapes of the 11 MB reference model and of a 27B one."""
    for case in CASES:
        yield Case("check length {} x {}, heads {}/{}".format(*case), partial(check, card, case))
    for shape in (1, 1, 2, 4), (1, 1, 16, 48), (8, 1, 16, 48), (1, 512, 2, 4), (1, 512, 16, 48):
        yield _timed(card, *shape)


def _timed(card, sequences, length, n_k, n_v):
    rows = sequences * length
    inputs = [card.upload(a) for a in random_inputs(np.random.default_rng(0), rows, n_k, n_v)]
    o, factors = card.alloc((rows, n_v, HEAD), np.float32), card.alloc((rows, n_v, 4), np.float32)
    state = card.zeros((sequences, n_v, HEAD, HEAD), np.float32)
    slots = card.upload(np.repeat(np.arange(sequences, dtype=np.int32), length))
    launch = partial(gated_delta_rule, card, o, state, factors, *inputs, slots, rows, n_k, n_v, length)
    return Case(f"{sequences} x {length}, heads {n_k}/{n_v}", launch=launch,
                n_bytes=2 * state.nbytes + inputs[0].nbytes + o.nbytes,
                n_ops=rows * n_v * HEAD * HEAD * 7, pipe="ffma")


if __name__ == "__main__":
    main("Gated delta rule", cases)
