"""Log-probabilities of the chosen tokens, and the 20 likeliest tokens of each row with their log-probabilities.

For one row of logits x[0 .. V - 1], as the model gave them, before bias, penalties, mask and temperature:

    l_i = (x_i - M) - ln S          M = max x          S = sum over i of exp(x_i - M)

    logits  float32 [rows, V]                tokens  int32 [rows]
    report  uint32  [rows, 41]:  | l of the token | l of the 20 largest x, in their order | their 20 ids |
                                 l as float32 bits; of equal x the lower id comes first
    best    uint64  [rows, chunks, 20]       scratch: the 20 largest of each chunk, as ranks
    sums    float32 [rows, chunks]           scratch: sum of exp(x_i - largest x of the chunk)

A rank is a 64-bit word that stands for a token and its logit: a key that orders as x does, above the complement of the
id. So the largest of several ranks belongs to the largest x, and among equal x to the lowest id. Rank 0 is no token.
A vocabulary of fewer than 20 tokens leaves places with l = -inf and the id -1. If the largest x of a row is not finite
(a NaN counts as the largest), every l of the row is NaN. A row whose token is -1 is skipped, and its report stays as it
is: such a row of a check is void, or nothing could be chosen (kernels/sample.py).

There are two launches. `rank_chunks` has a block per row and chunk of 2,048 tokens, 256 threads with 8 tokens each.
`merge_chunks` has a block per row and a thread per chunk. Both find the 20 largest ranks in 20 rounds. In each round
every thread of the block offers its largest rank, and the thread that offered the largest of all replaces it by its
next: in `rank_chunks` of its 8 tokens, in `merge_chunks` of the 20 of its chunk.

Chunks are fixed ranges of the vocabulary, and sums have one order: 8 tokens of a thread, a butterfly over its warp, one
warp after the other; over the chunks likewise. So the bits depend neither on the card nor on the rows beside.

Pipe: integer and shuffles, 20 rounds of about 50 instructions per warp. Bytes: 4 V per row, which take a hundredth of
the time of the rounds: 24 us for a row of V = 248,320 on a V100, as the emulated card estimates. The engine runs both
launches only in steps in which a request wants log-probabilities. More: benchmarks/results.md, section logprobs.
"""

from dataclasses import dataclass

import numpy as np
from numba import cuda
from numba.cuda import libdevice
from numba.types import float32, int64, uint32, uint64

from kernels.bench import Case, main
from kernels.card import Array
from kernels.intrinsics import exp, float_as_word, log, warp_sum
from kernels.sample import (CHUNK, EVERY_LANE, MAX_CHUNKS, PER_THREAD, THREADS, WARPS, key_value, order_key,
                            token_of)

TOP = 20                          # likeliest tokens of a row
REPORT = 1 + 2 * TOP
MAXIMA = 2 * WARPS
MINUS_INFINITY = float("-inf")


@dataclass(frozen=True)
class LogprobState:
    """Scratch for a number of rows at a time, in the shapes above."""
    best: Array
    sums: Array

    @classmethod
    def allocate(cls, card, rows, n_vocab):
        n_chunks = -(-n_vocab // CHUNK)
        if n_chunks > MAX_CHUNKS:
            raise ValueError(f"log-probabilities are of {CHUNK * MAX_CHUNKS} tokens at most, not {n_vocab}")
        return cls(card.alloc((rows, n_chunks, TOP), np.uint64, "likeliest tokens of each chunk"),
                   card.alloc((rows, n_chunks), np.float32, "sum of each chunk"))


# ---- reference ---------------------------------------------------------------------------------------------

def logprobs_reference(logits, token):
    """(l of the token, l of the TOP likeliest, their ids) of one row in float64, float32 logits [V]."""
    x = logits.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        largest = x.max()
        l = x - largest - np.log(np.exp(x - largest).sum()) if np.isfinite(largest) else np.full(len(x), np.nan)
    ids = np.lexsort((np.arange(len(x)), -x, ~np.isnan(x)))[:TOP]
    missing = TOP - len(ids)
    return l[token], np.append(l[ids], np.full(missing, -np.inf)), np.append(ids, np.full(missing, -1))


# ---- rounds over a block -----------------------------------------------------------------------------------

@cuda.jit(device=True, inline="always")
def rank_of(x, i):
    """The rank of token i with the logit x."""
    return uint64(uint64(uint64(order_key(x)) << uint64(32)) | uint64(uint32(~i)))


@cuda.jit(device=True, inline="always")
def rank_value(rank):
    """The logit of a rank."""
    return key_value(uint32(rank >> uint64(32)))


@cuda.jit(device=True, inline="always")
def largest_of(ranks):
    """The largest of a thread's ranks."""
    largest = ranks[0]
    for j in range(uint32(1), uint32(PER_THREAD)):
        largest = max(largest, ranks[j])
    return largest


@cuda.jit(device=True, inline="always")
def block_max(x, maxima, half, thread):
    """The largest uint64 of all threads, in every thread. maxima: shared uint64 [MAXIMA], of which a call uses half 0
    or half 1. Calls alternate between the halves, so that one barrier per call is enough."""
    for offset in (16, 8, 4, 2, 1):
        x = max(x, uint64(cuda.shfl_xor_sync(EVERY_LANE, int64(x), offset)))
    start = uint32(half * uint32(WARPS))
    if thread & uint32(31) == uint32(0):
        maxima[uint32(start + uint32(thread >> uint32(5)))] = x
    cuda.syncthreads()
    for warp in range(uint32(uint32(cuda.blockDim.x) >> uint32(5))):
        x = max(x, maxima[uint32(start + uint32(warp))])
    return x


@cuda.jit(device=True, inline="always")
def block_sum(x, sums, thread):
    """The sum of all threads, the same bits in every thread. sums: shared float32 [WARPS]."""
    x = warp_sum(x)
    if thread & uint32(31) == uint32(0):
        sums[uint32(thread >> uint32(5))] = x
    cuda.syncthreads()
    total = sums[0]
    for warp in range(uint32(1), uint32(uint32(cuda.blockDim.x) >> uint32(5))):
        total = total + sums[warp]
    return total


# ---- kernels -----------------------------------------------------------------------------------------------

@cuda.jit
def rank_chunks(best, sums, logits, tokens, n_vocab):
    """Grid (chunks, rows): finds the TOP largest ranks of a chunk, and its sum of exp(x - largest x)."""
    x, ranks = cuda.local.array(PER_THREAD, float32), cuda.local.array(PER_THREAD, uint64)
    maxima, warp_sums = cuda.shared.array(MAXIMA, uint64), cuda.shared.array(WARPS, float32)
    thread, chunk, row = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
    at = uint32(row * uint32(cuda.gridDim.x) + chunk)
    if tokens[row] < 0:
        return
    for j in range(uint32(PER_THREAD)):
        i = token_of(chunk, j, thread)
        x[j] = logits[uint32(row * n_vocab + i)] if i < n_vocab else float32(MINUS_INFINITY)
        ranks[j] = rank_of(x[j], i) if i < n_vocab else uint64(0)

    own, largest = largest_of(ranks), uint64(0)
    for place in range(uint32(TOP)):
        winner = block_max(own, maxima, uint32(place & uint32(1)), thread)
        largest = max(largest, winner)
        if own == winner:
            for j in range(uint32(PER_THREAD)):
                ranks[j] = uint64(0) if ranks[j] == winner else ranks[j]
            own = largest_of(ranks)
        if thread == uint32(0):
            best[uint32(at * uint32(TOP) + uint32(place))] = winner

    total, m = float32(0.0), rank_value(largest)
    for j in range(uint32(PER_THREAD)):
        total = total + exp(x[j] - m)
    total = block_sum(total, warp_sums, thread)
    if thread == uint32(0):
        sums[at] = total


@cuda.jit
def merge_chunks(report, best, sums, logits, tokens, n_chunks, n_vocab):
    """Grid (rows): thread c stands for chunk c and offers the ranks of this chunk in their order."""
    maxima, warp_sums = cuda.shared.array(MAXIMA, uint64), cuda.shared.array(WARPS, float32)
    thread, row = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
    at, end, token = uint32(0), uint32(0), tokens[row]
    if token < 0:
        return
    if thread < n_chunks:
        at = uint32(uint32(row * n_chunks + thread) * uint32(TOP))
        end = uint32(at + uint32(TOP))
    own = best[at] if at < end else uint64(0)
    first, mine, largest = own, uint64(0), uint64(0)    # mine: the rank that this thread writes to the report
    for place in range(uint32(TOP)):
        winner = block_max(own, maxima, uint32(place & uint32(1)), thread)
        largest = max(largest, winner)
        mine = winner if thread == uint32(place) else mine
        if own == winner and at < end:
            at = uint32(at + uint32(1))
            own = best[at] if at < end else uint64(0)

    m, part = rank_value(largest), float32(0.0)
    if thread < n_chunks:
        part = libdevice.fmul_rn(sums[uint32(row * n_chunks + thread)], exp(rank_value(first) - m))
    log_sum = log(block_sum(part, warp_sums, thread)) + (m - m)     # NaN where m is not finite
    to = uint32(row * uint32(REPORT))
    if thread < uint32(TOP):
        value = float32(MINUS_INFINITY) if mine == uint64(0) else rank_value(mine) - m - log_sum
        report[uint32(to + uint32(1) + thread)] = float_as_word(value)
        report[uint32(to + uint32(1 + TOP) + thread)] = uint32(~uint32(mine))
    if thread == uint32(TOP):
        report[to] = float_as_word(logits[uint32(row * n_vocab + uint32(token))] - m - log_sum)


# ---- launches: they write in place and never allocate -----------------------------------------------------

def logprobs(card, report, logits, tokens, state, rows, n_vocab, stream=None):
    """report <- logits float32 [rows, n_vocab], tokens int32 [rows], as shown above. state: LogprobState."""
    report, best, sums = report.reshape(-1), state.best.reshape(-1), state.sums.reshape(-1)
    n_chunks, logits = -(-n_vocab // CHUNK), logits.reshape(-1)
    card.launch(rank_chunks, (n_chunks, rows), THREADS, best, sums, logits, tokens, n_vocab,
                stream=stream)
    card.launch(merge_chunks, rows, -(-n_chunks // 32) * 32, report, best, sums, logits, tokens, n_chunks, n_vocab,
                stream=stream)


def unpack_report(report):
    """(l of the tokens [rows], l of the likeliest [rows, TOP], their ids [rows, TOP]) of a report on the host."""
    values = report[:, :1 + TOP].view(np.float32)
    return values[:, 0], values[:, 1:], report[:, 1 + TOP:].view(np.int32)


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [1, 7, 20, 21, 255, 2048, 2049, 4096, 6145, 50_001]


def random_logits(n_vocab, kind):
    """Three rows of logits: normal ones, ones with few different values, or some that are not finite."""
    x = (np.random.default_rng(n_vocab).standard_normal((3, n_vocab)) * 4).astype(np.float32)
    if kind == "ties":
        x = np.round(x / 4)
    elif kind == "equal":
        x[:] = -3
    elif kind == "infinite":
        x[0, ::2], x[1] = -np.inf, -np.inf
        x[0, -1] = 1e30
    elif kind == "nan":
        x[0, n_vocab // 2], x[1, n_vocab // 2] = np.nan, np.inf
    return x


def check(card, n_vocab, kind="normal"):
    """Three rows, of which the last one has no token. Ids must be exact. Returns the largest error of an l."""
    x, tokens = random_logits(n_vocab, kind), np.array([n_vocab - 1, n_vocab // 2, -1], np.int32)
    state, report = LogprobState.allocate(card, 4, n_vocab), card.alloc((4, REPORT), np.uint32)
    for array in (state.best, state.sums, report):
        card.poison(array)
    logprobs(card, report, card.upload(x), card.upload(tokens), state, 3, n_vocab)
    report = card.download(report)
    assert (report[2:] == 0xFFFFFFFF).all(), "wrote a row without a token, or past the rows"
    error = 0.0
    for row in range(2):
        own, likeliest, ids = (part[row] for part in unpack_report(report))
        want_own, want, want_ids = logprobs_reference(x[row], tokens[row])
        assert ids.tolist() == want_ids.tolist(), f"ids {ids}, not {want_ids}"
        error = max(error, check_values(np.append(likeliest, own), np.append(want, want_own)))
    return error


def check_values(got, want):
    """x - M and the subtraction of ln S round once each. S has at most 2^19 positive terms, added in 47 levels; its
    terms, its sum and its logarithm together are off by less than 64 units of 2^-24."""
    known = np.isfinite(want)
    np.testing.assert_array_equal(got[~known], want[~known].astype(np.float32))
    error = np.abs(got[known].astype(np.float64) - want[known])
    assert (error <= 2.0**-24 * (64 + 3 * np.abs(want[known]))).all(), f"off by {error.max()}"
    return error.max(initial=0.0)


def cases(card):
    """The checks, then times with the vocabulary of the published models."""
    for n_vocab in CASES:
        for kind in ("normal", "ties"):
            yield Case(f"{n_vocab} {kind}", lambda case=(n_vocab, kind): check(card, *case))
    for kind in ("equal", "infinite", "nan"):
        yield Case(f"5000 {kind}", lambda kind=kind: check(card, 5000, kind))
    for rows in (1, 8):
        yield _timed(card, rows, 248320)


def _timed(card, rows, n_vocab):
    state = LogprobState.allocate(card, rows, n_vocab)
    logits = np.random.default_rng(0).standard_normal((rows, n_vocab), np.float32) * 3
    arrays = card.alloc((rows, REPORT), np.uint32), card.upload(logits), card.zeros(rows, np.int32)
    return Case(f"{rows} x {n_vocab}", launch=lambda: logprobs(card, *arrays, state, rows, n_vocab),
                n_bytes=logits.nbytes)


if __name__ == "__main__":
    main("Log-probabilities", cases)
