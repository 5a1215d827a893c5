"""The gated delta rule of a linear-attention layer in a decode step, with the convolution before it and the gated norm
after it, in one launch: one token per slot, or a check of up to 8 rows of each.

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

**Checks.** Row 0 of a check is the latest token of its answer, the others are drafts. Which of them count is known
after the step. So the state and the ring are stored after row 0. Each later row leaves a record of what it did, and the
next check applies the records of the accepted rows to the state in its registers, before its own row 0:

    record of a row and value head      | inputs of q, k, v of the convolution | k | d |  5 vectors of 128;  g
    launch with records 1 .. a          load S and records; S = g S + k d^T for each record; row 0; store S; rows 1 ..

A step reads and writes a state once, whatever its rows. The order of operations is that of one token after the other,
so the bits are the same. A record belongs to one value head, and only the block of that head reads or writes it.

A block takes one value head of one answer. It holds the whole state, 64 KiB, in registers: a warp has 8 key rows, a
lane 4 columns of each, so a warp reads 512 bytes in a row.

    thread            0 .. 127   128 .. 255   256 .. 383   384 .. 511
    1. makes          q          k            v            silu(z)        one element of each row, into shared memory
    2. S^T k, S^T q   each warp over its 8 rows, for all columns; the 16 partial sums go to shared memory
    3. d, g S^T q     a column each, of which they first add up the partial sums of 16 warps
    4. S              all, row by row from 2 on
    5. y              a warp for each row, from the last on; of a single row, while the others store S

Value heads share key heads, so several blocks compute the same q and k. Each of them reads the ring; only one writes
it. With a rows pending at position p, blocks read the ring rows of the positions from p - 3 to p - 1 - a and write
those from p - min(a, 3) to p: no row is both read and written, for any a. All sums have one order: a row's bits depend
neither on the batch nor on the card.

Pipe: memory, 128 KiB of state read and written per head and answer. 8 answers run at 86 to 90 % of what a copy of the
states reaches on an H200; one row is a chain of latencies, 5.1 us for 32 heads. On cards whose launches overlap, state,
ring, records and positions may be loaded while the previous launch is still running (`early`, see
kernels/intrinsics.py). Measurements and lost attempts: benchmarks/results.md, section gdn_decode.
"""

from functools import cache, partial
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint32, uint64

from kernels import conv
from kernels.bench import Case, main
from kernels.card import Array
from kernels.compile import launches_overlap
from kernels.conv import convolve, ring_index
from kernels.gdn import (HEAD, NORM_EPS, QUERY_SCALE, TOLERANCE, Decay, LinearHeads, error_by_largest, random_inputs,
                         reference, split)
from kernels.intrinsics import (exp, let_next_begin, load_floats4, load_word, load_words4, opaque, rsqrt, sigmoid,
                                silu, softplus, store_floats4, store_words4, uniform, wait_for_previous, warp_sum)
from kernels.norm import gate_head, gated_norm_reference, store_plain, store_quantized
from kernels.quantize import quantize_reference
from kernels.records import CHECK_ROWS, VECTORS, Pending, Places, Projected, States

WARPS = 16
THREADS = 32 * WARPS
BLOCKS = 2             # for so many an SM has registers
ROWS = HEAD // WARPS   # key rows of a warp; a lane has 4 columns of each
QKVZ = 4 * HEAD
assert QKVZ == THREADS  # each thread makes one of these values
SUMS = 2 * WARPS * HEAD
OUT = 2 * HEAD
CONSTANTS = HEAD + 4     # shared: norm weights, then ssm_a and dt_bias
RATE_OF_DECAY, BIAS = HEAD, HEAD + 1
KEEP, RATE = 15, 14    # warps that compute these scalars of all rows; lower warps compute the others
K_NORM_AT, Q_NORM_AT, KQ_AT, KEEP_AT, RATE_AT, SCALARS = range(6)  # their places, and how many
PENDING = CHECK_ROWS - 1
K, D = 3, 4            # where a record has k and d, counted in vectors of 128; before them inputs of q, k and v
RECORD = VECTORS * HEAD
AT_ONCE = 4            # rows whose loads are in flight at once, where two blocks share an SM
KEPT = 3 * WARPS       # words of shared memory: each warp's slot, position and number of pending rows
STAGERS = 2 * HEAD // 4  # threads that load k and d of a record, 16 bytes each
assert (PENDING + 1) * STAGERS == THREADS and THREADS * 4 <= SUMS


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
def load_state(s, state, at):
    """s [ROWS, 4] <- the lane's part of a state, whose first element is state[at]."""
    for i in range(ROWS):
        s[i, 0], s[i, 1], s[i, 2], s[i, 3] = load_floats4(state, at + uint64(HEAD * i))


@cuda.jit(device=True, forceinline=True)
def store_state(s, state, at):
    """The state at state[at] <- s."""
    for i in range(ROWS):
        store_floats4(state, at + uint64(HEAD * i), s[i, 0], s[i, 1], s[i, 2], s[i, 3])


@cuda.jit(device=True, forceinline=True)
def update(s, k_from, k_at, keep, d0, d1, d2, d3):
    """s <- keep s + k d^T, the lane's part. k_from[k_at]: the k of the lane's first key row, in shared memory."""
    for i in range(ROWS):
        k = k_from[uint32(k_at + uint32(i))]
        s[i, 0], s[i, 1] = cuda.fma(k, d0, keep * s[i, 0]), cuda.fma(k, d1, keep * s[i, 1])
        s[i, 2], s[i, 3] = cuda.fma(k, d2, keep * s[i, 2]), cuda.fma(k, d3, keep * s[i, 3])


@cuda.jit(device=True, forceinline=True)
def state_at(slot, n_v, head, warp, lane):
    """Where the lane's part of a state begins in `state`."""
    home = uint32(uint32(slot * n_v + head) * uint32(HEAD * HEAD))
    return uint64(uint32(home + warp * uint32(ROWS * HEAD) + lane * uint32(4)))


@cuda.jit(device=True, forceinline=True)
def record_of(slot, n_v, head, row):
    """Where the record of a row begins in `vectors`."""
    record = uint32(uint32(slot * uint32(PENDING) + row) - uint32(1))
    return uint32(uint32(record * n_v + head) * uint32(RECORD))


@cuda.jit(device=True, forceinline=True)
def load_pending(vectors, keeps, slot, head, n_v, n_pending, thread):
    """4 words of k and d of the first n_pending records of a slot, or of their decays: the thread's part, which
    `apply_pending` needs."""
    first, record = uint32(slot * uint32(PENDING)), uint32(thread // uint32(STAGERS))
    w0 = w1 = w2 = w3 = uint32(0)
    if record < n_pending:
        at = uint32(uint32(uint32(first + record) * n_v + head) * uint32(RECORD) + uint32(K * HEAD))
        w0, w1, w2, w3 = load_words4(vectors, uint32(at + uint32(4) * uint32(thread - record * uint32(STAGERS))))
    if record == uint32(PENDING):
        record = uint32(thread - uint32(PENDING * STAGERS))
        if record < n_pending:
            w0 = load_word(keeps, uint32(uint32(first + record) * n_v + head))
    return w0, w1, w2, w3


@cuda.jit(device=True, forceinline=True)
def apply_pending(s, words, n_pending, staged, thread):
    """s <- the state after the first n_pending records of a slot. words: of `load_pending`. staged: shared float32
    [4 THREADS], free for use."""
    if n_pending > uint32(0):
        store_words4(staged, uint32(uint32(4) * thread), words[0], words[1], words[2], words[3])
        cuda.syncthreads()
        lane, warp, record = uint32(thread & uint32(31)), uint32(thread >> uint32(5)), uint32(0)
        while record < n_pending:
            at = uint32(opaque(record) * uint32(2 * HEAD))
            keep = staged[uint32(uint32(4 * PENDING * STAGERS) + uint32(4) * record)]
            d0, d1, d2, d3 = load_floats4(staged, uint32(at + uint32(HEAD) + lane * uint32(4)))
            update(s, staged, uint32(at + warp * uint32(ROWS)), keep, d0, d1, d2, d3)
            record = uint32(record + uint32(1))


@cuda.jit(device=True, forceinline=True)
def inputs_before(ring, vectors, slot, position, channel, channels, n_pending, record_at, record_step):
    """The inputs of a channel at the three positions before `position`: those that are pending from their records, of
    which the channel's first is vectors[record_at], the others from the ring."""
    x0 = ring[ring_index(slot, uint32(position + uint32(1)), channel, channels)]
    x1 = ring[ring_index(slot, uint32(position + uint32(2)), channel, channels)]
    x2 = ring[ring_index(slot, uint32(position + uint32(3)), channel, channels)]
    if n_pending > uint32(0):
        last = uint32(record_at + uint32(n_pending - uint32(1)) * record_step)
        x2 = vectors[last]
        if n_pending > uint32(1):
            x1 = vectors[uint32(last - record_step)]
        if n_pending > uint32(2):
            x0 = vectors[uint32(last - uint32(2) * record_step)]
    return x0, x1, x2


@cache
def projected_loader(most, at_once):
    """How a thread takes its column of the `most` rows of an answer: a single row in a register, several into qkvz,
    `at_once` at a time. It returns that register, and a gate: on lane j that of row j."""

    @cuda.jit(device=True, forceinline=True)
    def take_one(qkvz, projected, stride, answer, width, column, gate_column):
        return projected[uint32(answer * stride + column)], projected[uint32(answer * stride + gate_column)]

    @cuda.jit(device=True, forceinline=True)
    def take_several(qkvz, projected, stride, answer, width, column, gate_column):
        answers, lane = uint32(cuda.gridDim.y), uint32(cuda.threadIdx.x & 31)
        thread, held = uint32(cuda.threadIdx.x), cuda.local.array(at_once, float32)
        row = uint32((lane if lane < width else uint32(0)) * answers + answer)
        gate = projected[uint32(row * stride + gate_column)]
        first = uint32(0)
        while first < width:
            for j in range(at_once):
                row = uint32(first + uint32(j))
                if row < width:
                    held[j] = projected[uint32(uint32(row * answers + answer) * stride + column)]
            for j in range(at_once):
                if uint32(first + uint32(j)) < width:
                    qkvz[uint32(uint32(first + uint32(j)) * uint32(QKVZ) + thread)] = held[j]
            first = uint32(first + uint32(at_once))
        return float32(0), gate

    return take_one if most == 1 else take_several


@cache
def decode_kernel(quantized, early, keeps_records, most, alone=False):
    """The kernel with int8 or float32 output. early: what earlier steps left is read before the wait for the previous
    launch (kernels/intrinsics.py). keeps_records: there are pending rows (kernels/records.py). most: rows of an answer
    that it takes, 1 or CHECK_ROWS. alone: a block has an SM for itself, so its threads may take twice the registers."""
    store, at_once = store_quantized if quantized else store_plain, CHECK_ROWS if alone else AT_ONCE
    take_projected, blocks = projected_loader(most, at_once), 1 if alone else BLOCKS
    qkvz_size, out_size, n_scalars = most * QKVZ, most * OUT, most * SCALARS

    @cuda.jit(launch_bounds=(THREADS, blocks))
    def gdn_decode_kernel(q_out, d_out, state, ring, accepted, vectors, keeps, projected, stride, conv_w, ssm_a,
                          dt_bias, norm_w, row_slot, row_pos, width, n_k, n_v, eps):
        """Grid (n_v, answers)."""
        let_next_begin()
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        if alone:       # for two blocks on an SM, the number in a register of its own would be one too many
            warp = uniform(warp)
        head, answer, answers = uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y), uint32(cuda.gridDim.y)
        key_head = uint32(head % n_k)
        channels = uint32((n_k + n_k + n_v) * uint32(HEAD))
        qkvz, out = (cuda.shared.array(qkvz_size, float32, alignment=16),         # out: d, then g S^T q, of each row
                     cuda.shared.array(out_size, float32, alignment=16))
        sums, scalars = cuda.shared.array(SUMS, float32, alignment=16), cuda.shared.array(n_scalars, float32)
        weights, kept = cuda.shared.array(CONSTANTS, float32, alignment=16), cuda.shared.array(KEPT, uint32)

        # A thread makes one element of q, k, v or z: `kind` 0 to 3. Only for q, k and v its `channel` is convolved.
        kind, element = uint32(thread >> uint32(7)), uint32(thread & uint32(HEAD - 1))
        start = key_head if kind == uint32(0) else (n_k + key_head if kind == uint32(1) else n_k + n_k + head)
        channel = uint32(uint32(start) * uint32(HEAD) + element)
        column = channel if kind < uint32(3) else uint32(channels + head * uint32(HEAD) + element)
        gate_column = uint32(channels + n_v * uint32(HEAD) + head + (uint32(0) if warp == uint32(KEEP) else n_v))
        constant = norm_w[element]
        if thread < uint32(2):
            constant = ssm_a[head] if thread == uint32(0) else dt_bias[head]
        w0, w1, w2, w3 = load_floats4(conv_w, uint32(channel * uint32(4)))
        slot = uint32(row_slot[answer])
        home = state_at(slot, n_v, head, warp, lane)
        record_at = uint32(uint32(uint32(slot * uint32(PENDING)) * n_v + head) * uint32(RECORD) + thread)
        record_step, n_pending = uint32(n_v * uint32(RECORD)), uint32(0)
        s = cuda.local.array((ROWS, 4), float32)
        if not early:
            wait_for_previous()
            newest, gate = take_projected(qkvz, projected, stride, answer, width, column, gate_column)
        position = uint32(row_pos[answer])
        if keeps_records:
            n_pending = uint32(accepted[slot])
        count = uint32(1)
        if most > 1:
            of = int32(-1)
            if lane < width:
                of = row_pos[uint32(lane * answers + answer)]
            count = uint32(cuda.popc(cuda.ballot_sync(0xFFFFFFFF, of >= int32(0))))
        x0, x1, x2 = inputs_before(ring, vectors, slot, position, channel, channels, n_pending, record_at, record_step)
        cuda.syncwarp()  # the compiler moves no load of the state before these three, which would wait behind 64 KiB
        words = load_pending(vectors, keeps, slot, head, n_v, n_pending, thread)
        load_state(s, state, home)
        if kind == uint32(3):
            weights[element] = constant
        if thread < uint32(2):
            weights[uint32(uint32(RATE_OF_DECAY) + thread)] = constant
        at = uint32(warp * uint32(3))
        if lane == uint32(0):
            kept[at], kept[uint32(at + uint32(1))], kept[uint32(at + uint32(2))] = slot, position, n_pending
        apply_pending(s, words, n_pending, sums, thread)
        if early:
            wait_for_previous()
            newest, gate = take_projected(qkvz, projected, stride, answer, width, column, gate_column)
        if keeps_records:   # from shared memory, so that neither these nor addresses made of them take registers so far
            cuda.syncwarp()
            slot, position, n_pending = kept[at], kept[uint32(at + uint32(1))], kept[uint32(at + uint32(2))]
            record_at = uint32(uint32(uint32(slot * uint32(PENDING)) * n_v + head) * uint32(RECORD) + thread)
        if position >= uint32(1 << 31):  # void
            return
        if warp >= uint32(RATE) and lane < uint32(most):
            scalars[uint32((uint32(KEEP_AT * most) if warp == uint32(KEEP) else uint32(RATE_AT * most)) + lane)] = gate
        if most > 1:
            newest = qkvz[thread]
        if kind == uint32(2) or (kind < uint32(2) and head < n_k):  # of blocks that share a key head, one writes
            ring[ring_index(slot, position, channel, channels)] = newest
            if n_pending > uint32(0):
                ring[ring_index(slot, uint32(position + uint32(3)), channel, channels)] = x2
            if n_pending > uint32(1):
                ring[ring_index(slot, uint32(position + uint32(2)), channel, channels)] = x1
            if n_pending > uint32(2):
                ring[ring_index(slot, uint32(position + uint32(1)), channel, channels)] = x0
        j = uint32(0)
        while j < count:
            at = uint32(uint32(opaque(j) * uint32(QKVZ)) + thread)
            if most > 1:
                newest = qkvz[at]
            convolved = convolve(w0, w1, w2, w3, x0, x1, x2, newest)
            value = silu(convolved if kind < uint32(3) else newest)
            qkvz[at] = value
            if j > uint32(0):
                record = uint32(record_at + uint32(opaque(j) - uint32(1)) * record_step)
                if kind < uint32(3):
                    vectors[record] = newest
                if kind == uint32(1):
                    vectors[uint32(record + uint32((K - 1) * HEAD))] = value
            x0, x1, x2 = x1, x2, newest
            j = uint32(j + uint32(1))
        cuda.syncthreads()

        at = uint32(uint32(KEEP_AT * most) + lane)
        if warp == uint32(KEEP) and lane < uint32(most):
            scalars[at] = exp(weights[uint32(RATE_OF_DECAY)] * softplus(scalars[at] + weights[uint32(BIAS)]))
        at = uint32(uint32(RATE_AT * most) + lane)
        if warp == uint32(RATE) and lane < uint32(most):
            scalars[at] = sigmoid(scalars[at])
        task = uint32(uint32(RATE - 1) - warp)
        while task < uint32(3) * count:
            row = uint32(task // uint32(3))
            which, at = uint32(task - uint32(3) * row), uint32(row * uint32(QKVZ))
            x = dot(qkvz, uint32(at + (uint32(HEAD) if which == uint32(0) else uint32(0))),
                    uint32(at + (uint32(0) if which == uint32(1) else uint32(HEAD))), lane)
            if which < uint32(2):
                x = rsqrt(x + float32(NORM_EPS))
            if which == uint32(1):
                x = x * float32(QUERY_SCALE)
            scalars[uint32(uint32(which * uint32(most)) + row)] = x
            task = uint32(task + uint32(RATE))

        j = uint32(0)
        while j < count:
            row = opaque(j)
            at = uint32(row * uint32(QKVZ))
            q_at = uint32(at + warp * uint32(ROWS))
            k_at = uint32(q_at + uint32(HEAD))
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

            keep = scalars[uint32(uint32(KEEP_AT * most) + row)]
            if thread < uint32(OUT):
                total, half = float32(0), uint32(warp >> uint32(2))
                first = uint32(uint32(half * uint32(WARPS * HEAD)) + uint32(thread - half * uint32(HEAD)))
                for i in range(WARPS):
                    total = total + sums[uint32(first + uint32(HEAD * i))]
                if half == uint32(0):
                    rate = scalars[uint32(uint32(RATE_AT * most) + row)]
                    k_norm = scalars[uint32(uint32(K_NORM_AT * most) + row)]
                    v = qkvz[uint32(at + uint32(2 * HEAD) + thread)]
                    total = rate * k_norm * cuda.fma(-(keep * k_norm), total, v)
                    if j > uint32(0):
                        vectors[uint32(record_of(kept[0], n_v, head, row) + uint32(D * HEAD) + thread)] = total
                else:
                    total = keep * total
                out[uint32(uint32(row * uint32(OUT)) + thread)] = total
            cuda.syncthreads()

            last = uint32(j + uint32(1)) == count
            if last and uint32(warp + count) >= uint32(WARPS):
                # A warp for each row's y, and before the state is stored: its own stores would queue behind those.
                of, at4 = uint32(uint32(WARPS - 1) - warp), uint32(lane * uint32(4))
                d_at = uint32(of * uint32(OUT) + at4)
                d0, d1, d2, d3 = load_floats4(out, d_at)
                r0, r1, r2, r3 = load_floats4(out, uint32(d_at + uint32(HEAD)))
                q_norm = scalars[uint32(uint32(Q_NORM_AT * most) + of)]
                kq = scalars[uint32(uint32(KQ_AT * most) + of)]
                g0, g1, g2, g3 = load_floats4(qkvz, uint32(of * uint32(QKVZ) + uint32(3 * HEAD) + at4))
                y0, y1, y2, y3 = gate_head(
                    q_norm * cuda.fma(kq, d0, r0), q_norm * cuda.fma(kq, d1, r1), q_norm * cuda.fma(kq, d2, r2),
                    q_norm * cuda.fma(kq, d3, r3), load_floats4(weights, at4), g0, g1, g2, g3, eps)
                of = uint32(of * answers + answer)
                store(q_out, d_out, uint32(uint32(of * n_v + head) * uint32(HEAD) + at4), True, y0, y1, y2, y3)
            if not last or j == uint32(0):
                keep = scalars[uint32(uint32(KEEP_AT * most) + row)]
                d0, d1, d2, d3 = load_floats4(out, uint32(uint32(row * uint32(OUT)) + lane * uint32(4)))
                update(s, qkvz, k_at, keep, d0, d1, d2, d3)
            if j == uint32(0):
                if most > 1:
                    home = state_at(kept[0], n_v, head, warp, lane)
                store_state(s, state, home)
            elif thread == uint32(0):
                keeps[uint32(record_of(kept[0], n_v, head, row) // uint32(RECORD))] = keep
            j = uint32(j + uint32(1))

    return gdn_decode_kernel


# ---- launches ----------------------------------------------------------------------------------------------

def gdn_decode(card, y, states: States, projected: Projected, weights: LinearWeights, places: Places,
               heads: LinearHeads, *, rows, eps, pending: Pending | None = None, width=1, early=False, stream=None):
    """y float32 [width rows, n_v 128] <- the gated outputs of a check of each of `rows` answers, which have slots of
    their own; row j of answer i is row j * rows + i of y, projected and places. Its states move on past row 0; the
    other rows become its pending ones (kernels/records.py). states, pending: of one layer. pending: None where every
    step has one row.

    Rows with a position of -1 are void: they change nothing, and their y is undefined. In an answer they are the last.

    early: states, what is pending, slots and positions have not changed since the last launch that does not overlap
    (kernels/intrinsics.py). Never allocates.
    """
    _launch(card, False, (y, y), states, projected, weights, places, heads, rows=rows, eps=eps, pending=pending,
            width=width, early=early, stream=stream)


def gdn_decode_quantize(card, q, d, states: States, projected: Projected, weights: LinearWeights, places: Places,
                        heads: LinearHeads, *, rows, eps, pending: Pending | None = None, width=1, early=False,
                        stream=None):
    """The same outputs as q int8 [width rows, n_v 128] with scales d float32 [width rows, n_v 4]."""
    _launch(card, True, (q, d), states, projected, weights, places, heads, rows=rows, eps=eps, pending=pending,
            width=width, early=early, stream=stream)


def _launch(card, quantized, outputs, states, projected, weights, places, heads, *, rows, eps, pending, width, early,
            stream):
    (n_k, n_v), overlaps = heads, launches_overlap(card.cc)
    most = 1 if width == 1 else CHECK_ROWS
    if not (1 <= width <= most and (pending or width == 1)):
        raise ValueError(f"a check of {width} rows, at most {CHECK_ROWS}; several need what is pending")
    # Without pending rows the kernel does not look at these three.
    records = pending or (places.slots, states.conv, states.conv)
    # Two blocks would share the SM that is free first, while other SMs stay idle. So where there is an SM for every
    # block, each asks for half the shared memory of an SM, without using it. A check uses the room in registers.
    alone = overlaps and n_v * rows <= card.n_sms
    kernel = decode_kernel(quantized, early and overlaps, pending is not None, most, alone and most > 1)
    card.launch(kernel, (n_v, rows), THREADS, *(output.reshape(-1) for output in outputs), states.memory.reshape(-1),
                states.conv.reshape(-1), *(array.reshape(-1) for array in records), *projected,
                weights.conv.reshape(-1), *weights.decay, weights.norm, *places, width, n_k, n_v, float(eps),
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


CHAINS = [(1, 1, 2), (3, 1, 1), (2, 2, 4)]                # answers, n_k, n_v
TOKENS = 40


class Chain:
    """40 tokens of some answers, whose slots are beside an idle one, and wrong drafts, for checks of random rows."""

    def __init__(self, card, answers, n_k, n_v, seed=0):
        self.card, self.random = card, np.random.default_rng([answers, n_k, n_v, seed])
        self.heads, self.slots = LinearHeads(n_k, n_v), [*range(answers, 0, -1)]
        projected, *decay = random_inputs(self.random, TOKENS * (answers + 1) + 1, n_k, n_v)
        self.wrong, self.tokens = projected[-1], projected[:-1].reshape(answers + 1, TOKENS, -1)
        self.first = self.random.integers(0, 100, answers + 1)              # position of a slot's first token
        shapes = ((answers + 1, n_v, HEAD, HEAD), (answers + 1, conv.WIDTH, self.heads.channels),
                  (self.heads.channels, conv.WIDTH), HEAD)
        self.memory, self.ring, conv_w, norm_w = (
            self.random.standard_normal(shape).astype(np.float32) / 8 for shape in shapes)
        self.weights = LinearWeights(card.upload(conv_w), Decay(*map(card.upload, decay)), card.upload(norm_w))

    def states(self):
        return States(self.card.upload(self.ring), self.card.upload(self.memory))

    def run(self, states, rows, width=1, pending=None):
        """y of a check of rows (token, slot, position). A token of None is a wrong draft, a position of -1 void."""
        card = self.card
        inputs = np.stack([self.wrong if token is None else self.tokens[slot, token] for token, slot, _ in rows])
        places = Places(*(card.upload(np.asarray(column, np.int32)) for column in list(zip(*rows))[1:]))
        y = card.alloc((len(rows), self.heads.n_values * HEAD), np.float32)
        card.poison(y)
        gdn_decode(card, y, states, Projected(card.upload(inputs.reshape(-1)), inputs.shape[1]), self.weights, places,
                   self.heads, rows=len(rows) // width, eps=1e-6, pending=pending, width=width)
        return card.download(y)

    def plain(self, n_tokens=TOKENS):
        """One token at a time: y [n_tokens, answers, ..], then states and rings before and after each token."""
        states, y, memory, rings = self.states(), [], [self.memory], [self.ring]
        for t in range(n_tokens):
            y.append(self.run(states, [(t, slot, self.first[slot] + t) for slot in self.slots]))
            memory.append(self.card.download(states.memory))
            rings.append(self.card.download(states.conv))
        return y, memory, rings

    def choose_check(self, done):
        """Of a random check: its width, the number of each slot's rows that are not void, and of those accepted."""
        width = int(self.random.integers(1, CHECK_ROWS + 1))
        counts, takes = np.zeros_like(done), np.zeros_like(done)
        for slot in self.slots:
            fewest = int(self.random.random() > 0.2)
            counts[slot] = min(self.random.integers(fewest, width + 1), TOKENS - done[slot])
            takes[slot] = self.random.integers(1, counts[slot] + 1) if counts[slot] else 0
        return width, counts, takes

    def rows(self, done, width, counts, takes):
        return [(done[slot] + j if j < takes[slot] else None, slot, self.first[slot] + done[slot] + j
                 if j < counts[slot] else -1) for j in range(width) for slot in self.slots]


def assert_same_bits(got, want):
    np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))


def check_chain(card, case):
    """case = (answers, n_k, n_v): 40 tokens of each answer in checks of random widths, of which random numbers are
    accepted and the rest are wrong or void, must have the bits of one token at a time: y, states and rings."""
    chain = Chain(card, *case)
    (want_y, want_memory, want_rings), states, n_slots = chain.plain(), chain.states(), len(chain.memory)
    pending = Pending.allocate(card, 1, n_slots, chain.heads).layer(0)
    card.poison(pending.vectors)
    done, accepted, written = (np.zeros(n_slots, np.int32) for _ in range(3))   # written: tokens that the states have
    while min(done[chain.slots]) < TOKENS:
        width, counts, takes = chain.choose_check(done)
        pending = pending._replace(accepted=card.upload(accepted))
        y = chain.run(states, chain.rows(done, width, counts, takes), width, pending)
        for i, slot in enumerate(chain.slots):
            for j in range(takes[slot]):
                assert_same_bits(y[j * len(chain.slots) + i], want_y[done[slot] + j][i])
        written = np.where(takes > 0, done + 1, written)
        accepted, done = np.where(takes > 0, takes - 1, accepted).astype(np.int32), done + takes
        for array, wants in (states.memory, want_memory), (states.conv, want_rings):
            for slot, got in enumerate(card.download(array)):
                assert_same_bits(got, wants[written[slot]][slot])
    return 0.0


def cases(card):
    """The checks, then times at the shapes of a 0.8B, a 9B and a 27B model. Every call uses the same states; those of
    one row stay in a large L2 cache."""
    for case in CASES:
        yield Case("check {} rows, heads {}/{}".format(*case), partial(check, card, case))
    for case in CHAINS:
        yield Case("checks of {} answers, heads {}/{}".format(*case), partial(check_chain, card, case))
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
