"""The gated delta rule of a linear-attention layer for one token per slot, with the convolution before it and the gated
norm after it, in one launch.

    q, k, v   = silu(conv(projected qkv))       kernels/conv.py: 4 taps; the 3 inputs before come from the slot's ring
    p         = g S^T k^                        decay and predict     kernels/gdn.py explains the rule and has the
    d         = sigmoid(b) (v - p)                                    NumPy reference; S is [key rows, value columns]
    o         = g S^T q^ + d (k^ . q^)          read, after the update
    S         = g S + k^ d^T                    update
    y         = norm_w o / sqrt(mean(o^2) + eps) * silu(z)            as float32, or as int8 with scales per 32

The read is written with the state before the token, so one pass over S gives both S^T k and S^T q.

    projected   float32, rows `stride` apart:   | qkv  (2 n_k + n_v) 128 | z  n_v 128 | a  n_v | b  n_v | ..
    ring        float32 [n_slots, 4, (2 n_k + n_v) 128]       conv_w  float32 [(2 n_k + n_v) 128, 4]
    state       float32 [n_slots, n_v, 128 key rows, 128 value columns]
    y           float32 [rows, n_v 128], or q int8 [rows, n_v 128] and d float32 [rows, n_v 4]

A block takes one value head of one row. It holds the whole state, 64 KiB, in registers: a warp has 8 key rows, a lane
4 columns of each, so a warp reads 512 bytes in a row.

    thread            0 .. 127   128 .. 255   256 .. 383   384 .. 511
    1. makes          q          k            v            silu(z)        one element, into shared memory
    2. S^T k, S^T q   each warp over its 8 rows, for all columns; the 16 partial sums go to shared memory
    3. d, o           threads 0 .. 127, a column each, which first add up the partial sums of 16 warps
    4. y              the last warp, while the others store S

Value heads share key heads, so several blocks compute the same q and k. Each of them reads the ring; only one writes
the newest input, to the ring row that no block reads. All sums have one order: a row's bits depend neither on the batch
nor on the card.

Pipe: memory, 128 KiB of state read and written per head and row. 8 rows run at 86 to 90 % of what a copy of the states
reaches on an H200; one row is a chain of latencies, 5.1 us for 32 heads. On cards whose launches overlap, state, ring
and position may be loaded while the previous launch is still running (`early`, see kernels/intrinsics.py).
Measurements and lost attempts: benchmarks/results.md, section gdn_decode.
"""

from functools import cache, partial
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.types import float32, uint32, uint64

from kernels import conv
from kernels.bench import Case, main
from kernels.card import Array
from kernels.compile import launches_overlap
from kernels.conv import convolve, ring_index
from kernels.gdn import (HEAD, NORM_EPS, QUERY_SCALE, TOLERANCE, Decay, LinearHeads, error_by_largest, random_inputs,
                         reference, split)
from kernels.intrinsics import (exp, let_next_begin, load_floats4, rsqrt, sigmoid, silu, softplus, store_floats4,
                                wait_for_previous, warp_sum)
from kernels.norm import gate_head, gated_norm_reference, store_plain, store_quantized
from kernels.quantize import quantize_reference
from kernels.records import Places, Projected, States

WARPS = 16
THREADS = 32 * WARPS
BLOCKS = 2             # that have room on an SM, by their registers
ROWS = HEAD // WARPS   # key rows of a warp; a lane has 4 columns of each
QKVZ = 4 * HEAD
assert QKVZ == THREADS  # each thread makes one of these values
SUMS = 2 * WARPS * HEAD
OUT = 2 * HEAD
KEEP, RATE, K_NORM, Q_NORM, KQ = 15, 14, 13, 12, 11  # each is the warp that makes a scalar and the scalar's place


class LinearWeights(NamedTuple):
    """The weights of a linear-attention layer between its projections."""

    conv: Array             # float32 [channels, 4]
    decay: Decay            # float32 [n_v] each
    norm: Array             # float32 [128]


# ---- kernels -----------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def dot(x, i, j, lane):
    """x[i : i + 128] . x[j : j + 128], on every lane. x: shared memory."""
    a0, a1, a2, a3 = load_floats4(x, uint32(uint32(i) + lane * uint32(4)))
    b0, b1, b2, b3 = load_floats4(x, uint32(uint32(j) + lane * uint32(4)))
    return warp_sum(cuda.fma(a3, b3, cuda.fma(a2, b2, cuda.fma(a1, b1, a0 * b0))))


@cuda.jit(device=True, forceinline=True)
def load_slot(s, state, state_at, ring, slot, position, channel, width):
    """s [ROWS, 4] <- the lane's part of a state. Returns the inputs of a channel at the three positions before this."""
    x0 = ring[ring_index(slot, uint32(position + uint32(1)), channel, width)]
    x1 = ring[ring_index(slot, uint32(position + uint32(2)), channel, width)]
    x2 = ring[ring_index(slot, uint32(position + uint32(3)), channel, width)]
    cuda.syncwarp()  # the compiler moves no load of the state before these three, which would wait behind 64 KiB
    for i in range(ROWS):
        s[i, 0], s[i, 1], s[i, 2], s[i, 3] = load_floats4(state, state_at + uint64(HEAD * i))
    return x0, x1, x2


@cache
def decode_kernel(quantized, early):
    """The kernel with int8 or float32 output. early: state, ring and position are read before the wait for the previous
    launch (kernels/intrinsics.py)."""
    store = store_quantized if quantized else store_plain

    @cuda.jit(launch_bounds=(THREADS, BLOCKS))
    def gdn_decode_kernel(q_out, d_out, state, ring, projected, stride, conv_w, ssm_a, dt_bias, norm_w,
                          row_slot, row_pos, n_k, n_v, eps):
        let_next_begin()
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        head, row = uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
        key_head = uint32(head % n_k)
        width = uint32((n_k + n_k + n_v) * uint32(HEAD))
        row_at = uint32(row * stride)

        # A thread makes one element of q, k, v or z: `kind` 0 to 3. Only for q, k and v its `channel` is convolved.
        kind, element = uint32(thread >> uint32(7)), uint32(thread & uint32(HEAD - 1))
        start = key_head if kind == uint32(0) else (n_k + key_head if kind == uint32(1) else n_k + n_k + head)
        channel = uint32(uint32(start) * uint32(HEAD) + element)
        column = channel if kind < uint32(3) else uint32(width + head * uint32(HEAD) + element)
        weight = norm_w[element]
        w0, w1, w2, w3 = load_floats4(conv_w, uint32(channel * uint32(4)))
        rate_of_decay, bias = ssm_a[head], dt_bias[head]
        slot = uint32(row_slot[row])
        home = uint32(uint32(slot * n_v + head) * uint32(HEAD * HEAD))
        home = uint64(uint32(home + warp * uint32(ROWS * HEAD) + lane * uint32(4)))
        s = cuda.local.array((ROWS, 4), float32)
        if early:
            position = uint32(row_pos[row])
            x0, x1, x2 = load_slot(s, state, home, ring, slot, position, channel, width)
        wait_for_previous()
        newest = projected[uint32(row_at + column)]
        gate_at = uint32(row_at + width + n_v * uint32(HEAD) + head)
        gate = projected[gate_at if warp == uint32(KEEP) else uint32(gate_at + n_v)]
        if not early:
            position = uint32(row_pos[row])
            x0, x1, x2 = load_slot(s, state, home, ring, slot, position, channel, width)

        qkvz, scalars = cuda.shared.array(QKVZ, float32, alignment=16), cuda.shared.array(WARPS, float32)
        weights = cuda.shared.array(HEAD, float32, alignment=16)
        convolved = convolve(w0, w1, w2, w3, x0, x1, x2, newest)
        qkvz[thread] = silu(convolved if kind < uint32(3) else newest)
        if kind == uint32(3):
            weights[element] = weight
        if kind == uint32(2) or (kind < uint32(2) and head < n_k):  # of blocks that share a key head, one writes
            ring[ring_index(slot, position, channel, width)] = newest
        cuda.syncthreads()

        if warp == uint32(KEEP):
            scalars[uint32(KEEP)] = exp(rate_of_decay * softplus(gate + bias))
        if warp == uint32(RATE):
            scalars[uint32(RATE)] = sigmoid(gate)
        if warp == uint32(K_NORM):
            scalars[uint32(K_NORM)] = rsqrt(dot(qkvz, HEAD, HEAD, lane) + float32(NORM_EPS))
        if warp == uint32(Q_NORM):
            scalars[uint32(Q_NORM)] = rsqrt(dot(qkvz, 0, 0, lane) + float32(NORM_EPS)) * float32(QUERY_SCALE)
        if warp == uint32(KQ):
            scalars[uint32(KQ)] = dot(qkvz, 0, HEAD, lane)
        sums = cuda.shared.array(SUMS, float32, alignment=16)
        q_at, k_at = uint32(warp * uint32(ROWS)), uint32(uint32(HEAD) + warp * uint32(ROWS))
        p, r = cuda.local.array(4, float32), cuda.local.array(4, float32)
        for c in range(4):
            p[c], r[c] = float32(0), float32(0)
        for i in range(ROWS):
            q, k = qkvz[uint32(q_at + uint32(i))], qkvz[uint32(k_at + uint32(i))]
            for c in range(4):
                p[c] = cuda.fma(s[i, c], k, p[c])
                r[c] = cuda.fma(s[i, c], q, r[c])
        to = uint32(warp * uint32(HEAD) + lane * uint32(4))
        store_floats4(sums, to, p[0], p[1], p[2], p[3])
        store_floats4(sums, uint32(to + uint32(WARPS * HEAD)), r[0], r[1], r[2], r[3])
        cuda.syncthreads()

        out = cuda.shared.array(OUT, float32, alignment=16)  # d, then o
        keep = scalars[uint32(KEEP)]
        if thread < uint32(HEAD):
            predicted, read = float32(0), float32(0)
            for i in range(WARPS):
                predicted = predicted + sums[uint32(uint32(HEAD * i) + thread)]
                read = read + sums[uint32(uint32(HEAD * (WARPS + i)) + thread)]
            k_norm, v = scalars[uint32(K_NORM)], qkvz[uint32(uint32(2 * HEAD) + thread)]
            d = scalars[uint32(RATE)] * k_norm * cuda.fma(-(keep * k_norm), predicted, v)
            out[thread] = d
            o = scalars[uint32(Q_NORM)] * cuda.fma(scalars[uint32(KQ)], d, keep * read)
            out[uint32(uint32(HEAD) + thread)] = o
        cuda.syncthreads()

        if warp == uint32(WARPS - 1):  # y first: this warp's stores of the state would queue behind the others'
            at = uint32(lane * uint32(4))
            o0, o1, o2, o3 = load_floats4(out, uint32(uint32(HEAD) + at))
            g0, g1, g2, g3 = load_floats4(qkvz, uint32(uint32(3 * HEAD) + at))
            y0, y1, y2, y3 = gate_head(o0, o1, o2, o3, load_floats4(weights, at), g0, g1, g2, g3, eps)
            at = uint32(uint32(row * n_v + head) * uint32(HEAD) + at)
            store(q_out, d_out, at, True, y0, y1, y2, y3)
        d0, d1, d2, d3 = load_floats4(out, uint32(lane * uint32(4)))
        for i in range(ROWS):
            k = qkvz[uint32(k_at + uint32(i))]
            store_floats4(state, home + uint64(HEAD * i), cuda.fma(k, d0, keep * s[i, 0]),
                          cuda.fma(k, d1, keep * s[i, 1]), cuda.fma(k, d2, keep * s[i, 2]),
                          cuda.fma(k, d3, keep * s[i, 3]))

    return gdn_decode_kernel


# ---- launches ----------------------------------------------------------------------------------------------

def gdn_decode(card, y, states: States, projected: Projected, weights: LinearWeights, places: Places,
               heads: LinearHeads, *, rows, eps, early=False, stream=None):
    """y float32 [rows, n_v 128] <- the gated outputs of one token of each slot in places.slots, at most one row per
    slot; the states of these slots move on. states: of one layer.

    early: states, slots and positions have not changed since the last launch that does not overlap
    (kernels/intrinsics.py). Never allocates.
    """
    _launch(card, False, (y, y), states, projected, weights, places, heads, rows=rows, eps=eps, early=early,
            stream=stream)


def gdn_decode_quantize(card, q, d, states: States, projected: Projected, weights: LinearWeights, places: Places,
                        heads: LinearHeads, *, rows, eps, early=False, stream=None):
    """The same outputs as q int8 [rows, n_v 128] with scales d float32 [rows, n_v 4]."""
    _launch(card, True, (q, d), states, projected, weights, places, heads, rows=rows, eps=eps, early=early,
            stream=stream)


def _launch(card, quantized, outputs, states, projected, weights, places, heads, *, rows, eps, early, stream):
    (n_k, n_v), overlaps = heads, launches_overlap(card.cc)
    # Two blocks would gather on an SM that is free first, while other SMs stay idle. So where there is an SM for every
    # block, each asks for half of the shared memory of an SM, which it does not use.
    alone = overlaps and n_v * rows <= card.n_sms
    card.launch(decode_kernel(quantized, early and overlaps), (n_v, rows), THREADS,
                *(output.reshape(-1) for output in outputs), states.memory.reshape(-1), states.conv.reshape(-1),
                *projected, weights.conv.reshape(-1), *weights.decay, weights.norm, *places, n_k, n_v, float(eps),
                stream=stream, shared=card.max_shared // 2 * alone)


# ---- check and bench ---------------------------------------------------------------------------------------

CASES = [(1, 1, 1), (1, 2, 4), (3, 2, 6), (8, 1, 3)]  # rows, n_k, n_v


def check(card, case):
    """case = (rows, n_k, n_v): one token each of slots out of order, beside an idle slot whose state and ring must not
    change, and a row too many that must stay poisoned. The quantised form, run early, must give the bits of
    quantize_q8. Returns the largest error divided by the largest value."""
    (rows, n_k, n_v), random, eps = case, np.random.default_rng(sum(case)), 1e-6
    projected, ssm_a, dt_bias = random_inputs(random, rows, n_k, n_v)
    heads, slots = LinearHeads(n_k, n_v), np.arange(rows, 0, -1)  # slot 0 stays idle
    state = random.standard_normal((rows + 1, n_v, HEAD, HEAD)).astype(np.float32) / 8
    before = random.standard_normal((rows + 1, conv.BEFORE, heads.channels)).astype(np.float32)
    conv_w = random.standard_normal((heads.channels, conv.WIDTH)).astype(np.float32)
    norm_w, positions = random.uniform(0.5, 1.5, HEAD).astype(np.float32), random.integers(0, 1000, rows + 1)
    ring = np.stack([conv.ring_of(x, p) for x, p in zip(before, positions)])
    inputs = Projected(card.upload(projected.reshape(-1)), projected.shape[1])
    weights = LinearWeights(card.upload(conv_w), Decay(card.upload(ssm_a), card.upload(dt_bias)), card.upload(norm_w))
    places = Places(*(card.upload(a.astype(np.int32)) for a in (slots, positions[slots])))

    def run(decode, early, *widths_and_types):
        """The outputs, with a row too many, then state and ring of all slots."""
        outputs = [card.alloc((rows + 1, width), dtype) for width, dtype in widths_and_types]
        for output in outputs:
            card.poison(output)
        states = States(conv=card.upload(ring), memory=card.upload(state))
        decode(card, *outputs, states, inputs, weights, places, heads, rows=rows, eps=eps, early=early)
        return map(card.download, (*outputs, states.memory, states.conv))

    y, got_state, got_ring = run(gdn_decode, False, (n_v * HEAD, np.float32))
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
    q, d, *others = run(gdn_decode_quantize, True, (n_v * HEAD, np.int8), (n_v * HEAD // 32, np.float32))
    for got, want in zip(others, (got_state, got_ring)):
        np.testing.assert_array_equal(got, want)
    for got, want in zip((q, d), quantize_reference(y[:rows])):
        np.testing.assert_array_equal(got[:rows], want)
    assert np.isnan(y[rows]).all() and (q[rows] == -1).all() and np.isnan(d[rows]).all(), "wrote past the end"
    return worst


def cases(card):
    """The checks, then times at the shapes of a 0.8B, a 9B and a 27B model. Every call uses the same states; those of
    one row stay in a large L2 cache."""
    for case in CASES:
        yield Case("check {} rows, heads {}/{}".format(*case), partial(check, card, case))
    for rows, n_v in (1, 16), (1, 32), (1, 48), (8, 32), (8, 48):
        yield _timed(card, rows, 16, n_v)


def _timed(card, rows, n_k, n_v):
    projected, *gates = random_inputs(np.random.default_rng(0), rows, n_k, n_v)
    heads = LinearHeads(n_k, n_v)
    q, d = card.alloc((rows, n_v * HEAD), np.int8), card.alloc((rows, n_v * 4), np.float32)
    memory, ring, conv_w, norm_w = (card.zeros(shape, np.float32) for shape in (
        (rows, n_v, HEAD, HEAD), (rows, conv.WIDTH, heads.channels), (heads.channels, conv.WIDTH), HEAD))
    slots = card.upload(np.arange(rows, dtype=np.int32))
    inputs = Projected(card.upload(projected).reshape(-1), projected.shape[1])
    launch = partial(gdn_decode_quantize, card, q, d, States(ring, memory), inputs,
                     LinearWeights(conv_w, Decay(*map(card.upload, gates)), norm_w), Places(slots, slots), heads,
                     rows=rows, eps=1e-6)  # not early: launches for the same slots follow each other
    return Case(f"{rows} rows, heads {n_k}/{n_v}", launch=launch, n_bytes=2 * memory.nbytes,
                n_ops=rows * n_v * HEAD * HEAD * 7, pipe="ffma")


if __name__ == "__main__":
    main("Gated delta rule of a token", cases)
