"""Logits of listed tokens: the part of the head for drafts that is each slot's own.

The head for drafts has the tokens of low ids (kernels/draft_head.py). Each slot also has a list of further ids: those
of its prompt, and those that it has chosen lately, since a text often repeats its own rare words.

    y[i, r] = head[listed[slots[i], r]] . x[i]          -inf where the list has no entry (-1)

    listed  int32 [n_slots, LISTED]         y   float32: row i begins `stride` numbers after row i - 1
    head    a Matrix [vocabulary, k]        x   an Activation: Quantized [n, k], or float32 for a head of floats

A warp takes an entry, a lane every 32nd block of 32 weights. Answers share no entries, so each reads its own rows: with
1,024 entries 4.5 MB of a 9B in Q8_0. The products are of floats and add in another order than the decode family's, so a
logit may differ in its last bits from that of the whole head. That may change a draft, never an answer. Pipe: fp32;
bound by memory.
"""

from functools import cache, partial
from types import SimpleNamespace

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint32

from kernels.bench import Case, main
from kernels.embedding import weight_functions
from kernels.float_matmul import WEIGHT_AT, random_weights
from kernels.float_matmul import as_words as float_words
from kernels.formats import BLOCK, FLOATS, FORMATS, as_words, dequantize, on_card, random_raw
from kernels.intrinsics import let_next_begin, load_word, wait_for_previous, warp_sum
from kernels.operands import Matrix, Quantized
from kernels.quantize import quantize_reference
from kernels.records import LISTED

WARPS = 8
MINUS_INFINITY = float("-inf")


@cuda.jit(device=True, forceinline=True)
def entry_of(listed, slots):
    """(answer, entry, token) of this warp."""
    i = uint32(cuda.blockIdx.y)
    entry = uint32(uint32(cuda.blockIdx.x) * uint32(WARPS) + uint32(cuda.threadIdx.x >> 5))
    return i, entry, listed[uint32(uint32(slots[i]) * uint32(LISTED) + entry)]


@cuda.jit(device=True, inline="always")
def value_of(word, byte):
    """A byte of a word, signed, as a float."""
    return float32(int32(word << uint32(24 - 8 * byte)) >> int32(24))


def float_kernel(weight_at):
    """The kernel for a head whose weights are read by the device function weight_at(head, index)."""

    @cuda.jit
    def listed_kernel(y, listed, slots, head, x, k, stride):
        """Grid (LISTED / WARPS, n)."""
        let_next_begin()
        lane = uint32(cuda.threadIdx.x & 31)
        wait_for_previous()
        i, entry, token = entry_of(listed, slots)
        total, at = float32(0.0), lane
        while token >= int32(0) and at < k:
            total = cuda.fma(weight_at(head, uint32(uint32(token) * k + at)), x[uint32(i * k + at)], total)
            at = uint32(at + uint32(32))
        total = warp_sum(total)
        if lane == uint32(0):
            y[uint32(i * stride + entry)] = total if token >= int32(0) else float32(MINUS_INFINITY)

    return listed_kernel


def quantized_kernel(format):
    """The kernel for a head in a format of kernels/formats."""
    (load_block, weights_at), raw_words, n_scales = weight_functions(format), format.raw_words, format.n_scales
    load_book = format.load_book

    @cuda.jit
    def listed_kernel(y, listed, slots, wq, wd, xq, xd, k, stride):
        """Grid (LISTED / WARPS, n)."""
        let_next_begin()
        raw, w = cuda.local.array(raw_words, uint32), cuda.local.array(8, uint32)
        scales = cuda.local.array(n_scales, uint32)
        lane, blocks = uint32(cuda.threadIdx.x & 31), uint32(k >> uint32(5))
        book = load_book(uint32(cuda.threadIdx.x), uint32(32 * WARPS))
        wait_for_previous()
        i, entry, token = entry_of(listed, slots)
        total, b = float32(0.0), lane
        while token >= int32(0) and b < blocks:
            load_block(w, scales, raw, wq, wd, uint32(token), blocks, b, book)
            here, at = float32(0.0), uint32(i * blocks + b)
            for j in range(8):
                word = load_word(xq, uint32(uint32(at << uint32(5)) + uint32(4 * j)))
                w0, w1, w2, w3 = weights_at(w, scales, j)
                here = cuda.fma(w0, value_of(word, 0), here)
                here = cuda.fma(w1, value_of(word, 1), here)
                here = cuda.fma(w2, value_of(word, 2), here)
                here = cuda.fma(w3, value_of(word, 3), here)
            total = cuda.fma(here, xd[at], total)
            b = uint32(b + uint32(32))
        total = warp_sum(total)
        if lane == uint32(0):
            y[uint32(i * stride + entry)] = total if token >= int32(0) else float32(MINUS_INFINITY)

    return listed_kernel


@cache
def kernel(kind):
    """The kernel for a head of this type, by the name that GGUF has for it."""
    return float_kernel(WEIGHT_AT[np.dtype(FLOATS[kind].dtype)]) if kind in FLOATS else quantized_kernel(FORMATS[kind])


def listed_logits(card, y, stride, listed, slots, head, x, n, *, stream=None):
    """y <- the logits of n answers: LISTED numbers each, `stride` apart. x: an Activation, or what has its x, q, d."""
    k = head.k
    if head.is_quantized:
        arrays = head.values.reshape(-1), as_words(head.scales), x.q.reshape(-1), x.d.reshape(-1)
    else:
        arrays = float_words(head.values), x.x.reshape(-1)
    card.launch(kernel(head.format), (LISTED // WARPS, n), 32 * WARPS, y.reshape(-1), listed.reshape(-1), slots,
                *arrays, k, stride, stream=stream)


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [(1, 1, 50), (3, 3, 2000)]                  # answers, blocks of the head in a row (in its format), vocabulary


def check(card, n, n_blocks, vocabulary, kind):
    """Random lists with gaps. Returns the largest error, of the largest logit."""
    rng = np.random.default_rng((n, n_blocks, vocabulary))
    listed = np.where(rng.random((n + 1, LISTED)) < 0.3, -1, rng.integers(0, vocabulary, (n + 1, LISTED)))
    slots, stride = rng.permutation(n + 1)[:n].astype(np.int32), LISTED + 5
    if kind in FLOATS:
        k = n_blocks * BLOCK + 4
        stored = random_weights(rng, np.dtype(FLOATS[kind].dtype), vocabulary, k)
        head, weights = Matrix(kind, vocabulary, k, card.upload(stored)), FLOATS[kind].widen(stored)
    else:
        k = n_blocks * FORMATS[kind].file_block
        raw = random_raw(rng, FORMATS[kind], vocabulary, k)
        head = Matrix(kind, vocabulary, k, *on_card(card, FORMATS[kind], raw, vocabulary, k))
        weights = dequantize(FORMATS[kind], raw).reshape(vocabulary, k)
    x = rng.standard_normal((n, k), np.float32)
    given = SimpleNamespace(x=card.upload(x))
    if kind not in FLOATS:
        q, d = quantize_reference(x)
        given, x = Quantized(card.upload(q), card.upload(d)), q * np.repeat(d, BLOCK, axis=1)
    y = card.alloc((n + 1, stride), np.float32)
    card.poison(y)
    lists = card.upload(listed.astype(np.int32)), card.upload(slots)
    listed_logits(card, y.reshape(-1)[2:], stride, *lists, head, given, n)
    got, want = card.download(y), np.full((n, LISTED), -np.inf)
    for row, slot in enumerate(slots):
        there = listed[slot] >= 0
        want[row, there] = weights[listed[slot, there]].astype(np.float64) @ x[row].astype(np.float64)
    np.testing.assert_array_equal(np.isinf(got[:n, 2:2 + LISTED]), np.isinf(want))
    at = np.isfinite(want)
    error = np.max(np.abs(got[:n, 2:2 + LISTED][at] - want[at])) / np.max(np.abs(want[at]))
    assert error < 1e-5, f"error {error}"
    assert np.isnan(got[:n, :2]).all() and np.isnan(got[:n, 2 + LISTED:]).all() and np.isnan(got[n]).all(), "wrote on"
    return error


def cases(card):
    """The checks for every kind of head, then the time of a full list of a 9B."""
    for case in CASES:
        for kind in (*FLOATS, *FORMATS):
            yield Case("{} answers, {} blocks of {} rows {}".format(*case, kind), partial(check, card, *case, kind))
    n, k, vocabulary = 1, 4096, 100_000
    for kind in ("Q8_0", "Q6_K"):
        head = Matrix(kind, vocabulary, k, *(card.zeros(*array) for array in FORMATS[kind].arrays(vocabulary, k)))
        listed = card.upload(np.random.default_rng(0).integers(0, vocabulary, (n, LISTED)).astype(np.int32))
        x = Quantized(card.zeros((n, k), np.int8), card.zeros((n, k // BLOCK), np.float32))
        yield Case(f"time of {LISTED} entries of {k} {kind}", n_bytes=LISTED * FORMATS[kind].q_row(k), launch=partial(
            listed_logits, card, card.zeros(LISTED, np.float32), LISTED, listed, card.zeros(n, np.int32), head, x, n))


if __name__ == "__main__":
    main("Logits of listed tokens", cases)
