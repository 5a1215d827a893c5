"""What enters the draft block: the rows of its passes, and their inputs.

The draft block (engine/draft_block.py) predicts a token from two things: the token before it, and what the model
thought before it saw that token. Its key and value at position t come from the token x_t and the hidden row h_(t-1):

    out = [ enorm(embedding of x_t) ; hnorm(first_norm(h_(t-1))) ]          2 k numbers: the halves side by side

Each norm is an RMSNorm with a weight of its own. For rows that the model computed, h is its residual stream, and
first_norm the norm before the output head. For a draft that follows a draft, h is the block's own residual stream, and
first_norm the norm before the head for drafts. In front of position 0 stands h = 0.

    e        float32 [rows, k]          embedding rows              out   int8 [rows, 2 k] and scales float32
    x        float32 [any, k]           residual rows                     [rows, 2 k / 32], or float32 [rows, 2 k]
    hidden   float32 [n_slots, k]       the residual row of each slot's last prompt token
    sources  int32 [rows]               the row of x that a row takes as h; -1: the row of `hidden` of its slot

`draft_input` computes this: a block of threads per row, which holds its values in registers between the norms. A few
microseconds, bound by latency. Pipe: fp32.

`draft_rows` makes the rows of the first pass after a decode step. For an answer, the step has chosen COUNT tokens, the
first of them at position p + 1 (kernels/advance.py has the records). Each of them gets a row, the *last one first*, so
that rows 0 .. n - 1 are the ones from which drafts are made:

    row j * n + i     token back = COUNT - 1 - j of answer i, at position q = p + 1 + back, h from row back * n + i of x

If the head for drafts skips ids, chosen tokens with such ids enter the slot's list (kernels/draft_list.py).

The rotary positions of a row are q less the lag of its slot (engine/sight.py).

A row is void (id 0, position -1, rope 0) if there is no such token, or if q + 1 is END or more, since nothing can
follow then. limits int32 [n]: drafts of an answer stand at positions below this: the next multiple of 64 after the
newest token, where the next check ends, or END - 1.
"""

from functools import cache, partial
from types import SimpleNamespace

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint32

from kernels.advance import (ACCEPTED, COUNT, END, N_ANSWER, N_DRAFTS, N_OUTCOME, NEXT_DRAFTS, PAGE, POSITION, SLOT,
                             TOKENS)
from kernels.bench import Case, main
from kernels.intrinsics import div_rn, let_next_begin, load_floats4, rsqrt, store_floats4, wait_for_previous, warp_sum
from kernels.norm import (GROUP, GROUPS, MAX_WARPS, PART, VALUES, block_sum, load_part, rms_norm_reference,
                          row_threads, store_plain, store_quantized)
from kernels.quantize import check_with_twin
from kernels.records import CHECK_ROWS, LISTED, DraftHead

THREADS = 32
COPY_THREADS = 128


# ---- references --------------------------------------------------------------------------------------------

def input_reference(e, x, hidden, sources, slots, norms, eps):
    """float64 [rows, 2 k]; norms: the weights of enorm, first_norm and hnorm."""
    h = np.where(sources[:, None] >= 0, x[sources], hidden[slots])
    h = rms_norm_reference(rms_norm_reference(h, norms[1], eps), norms[2], eps)
    return np.concatenate([rms_norm_reference(e, norms[0], eps), h], axis=1)


def rows_reference(answers, outcomes, width):
    """-> (ids, slots, positions, sources int32 [n * width], limits int32 [n])."""
    n = len(answers)
    ids, slots, positions, sources = np.zeros((4, width, n), np.int32)
    newest = answers[:, POSITION] + outcomes[:, COUNT]
    limits = np.minimum(newest - newest % PAGE + PAGE, answers[:, END] - 1)
    for i, (answer, outcome) in enumerate(zip(answers, outcomes)):
        for j in range(width):
            back, position = outcome[COUNT] - 1 - j, newest[i] - j
            counts = back >= 0 and position + 1 < answer[END]
            ids[j, i], positions[j, i] = (outcome[TOKENS + back], position) if counts else (0, -1)
            slots[j, i], sources[j, i] = answer[SLOT], max(back, 0) * n + i
    return *(each.reshape(-1) for each in (ids, slots, positions, sources)), limits


# ---- kernels -----------------------------------------------------------------------------------------------

@cuda.jit
def draft_rows_kernel(ids, slots, positions, rope, sources, limits, lags, answers, outcomes, listed, n_listed, n_low,
                      skipped, n, width):
    let_next_begin()
    i = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
    wait_for_previous()
    if i < n:
        answer, outcome = uint32(i * uint32(N_ANSWER)), uint32(i * uint32(N_OUTCOME))
        count, slot = outcomes[uint32(outcome + uint32(COUNT))], answers[uint32(answer + uint32(SLOT))]
        newest = int32(answers[uint32(answer + uint32(POSITION))] + count)
        end, lag = answers[uint32(answer + uint32(END))], lags[uint32(slot)]
        limits[i] = min(int32((newest | int32(PAGE - 1)) + int32(1)), int32(end - int32(1)))
        for j in range(uint32(CHECK_ROWS)):
            if uint32(j) < width:
                back, row = int32(count - int32(1) - int32(j)), uint32(uint32(j) * n + i)
                token, position = int32(0), int32(-1)
                if back >= int32(0) and int32(newest - int32(j) + int32(1)) < end:
                    token = outcomes[uint32(outcome + uint32(TOKENS) + uint32(back))]
                    position = int32(newest - int32(j))
                ids[row], slots[row], positions[row] = token, slot, position
                sources[row] = int32(max(back, int32(0)) * int32(n) + int32(i))
                turn = int32(position - lag) if position >= int32(0) else int32(0)
                for axis in range(uint32(3)):
                    rope[uint32(uint32(axis) * n * width + row)] = turn
        if skipped != uint32(0):
            at = uint32(n_listed[uint32(slot)])
            for j in range(uint32(CHECK_ROWS)):
                token = outcomes[uint32(outcome + uint32(TOKENS) + uint32(j))]
                if int32(j) < count and token >= int32(n_low) and token < int32(n_low + skipped):
                    listed[uint32(uint32(slot) * uint32(LISTED) + uint32(at % uint32(LISTED)))] = token
                    at = uint32(at + uint32(1))
            n_listed[uint32(slot)] = int32(at)
        for j in range(uint32(N_DRAFTS)):
            outcomes[uint32(outcome + uint32(NEXT_DRAFTS) + uint32(j))] = int32(-1)


@cuda.jit(device=True, forceinline=True)
def load_either(values, x, hidden, source, slot, start, lane, k):
    """values <- the warp's part of row `source` of x, or of row `slot` of `hidden` if source is -1, with zeros past the
    end of the row. Returns the sum of squares of the part, on every lane."""
    total = float32(0)
    for j in range(GROUPS):
        i = uint32(start + uint32(j * GROUP) + lane * uint32(4))
        a, b, c, d = float32(0), float32(0), float32(0), float32(0)
        if i < k:
            if source >= int32(0):
                a, b, c, d = load_floats4(x, uint32(uint32(source) * k + i))
            else:
                a, b, c, d = load_floats4(hidden, uint32(slot * k + i))
        total = cuda.fma(d, d, cuda.fma(c, c, cuda.fma(b, b, cuda.fma(a, a, total))))
        values[4 * j], values[4 * j + 1], values[4 * j + 2], values[4 * j + 3] = a, b, c, d
    return warp_sum(total)


@cuda.jit(device=True, forceinline=True)
def scale_part(values, scale, w, start, lane, k):
    """values <- values * scale * their weights. Returns the new sum of squares of the part, on every lane."""
    total = float32(0)
    for j in range(GROUPS):
        i = uint32(start + uint32(j * GROUP) + lane * uint32(4))
        a, b, c, d = float32(0), float32(0), float32(0), float32(0)
        if i < k:
            a, b, c, d = load_floats4(w, i)
        a, b = values[4 * j] * scale * a, values[4 * j + 1] * scale * b
        c, d = values[4 * j + 2] * scale * c, values[4 * j + 3] * scale * d
        total = cuda.fma(d, d, cuda.fma(c, c, cuda.fma(b, b, cuda.fma(a, a, total))))
        values[4 * j], values[4 * j + 1], values[4 * j + 2], values[4 * j + 3] = a, b, c, d
    return warp_sum(total)


@cache
def input_kernel(store):
    """The kernel that stores its results through `store`: `store_quantized` or `store_plain` of kernels/norm.py."""

    @cuda.jit(device=True, forceinline=True)
    def store_part(out, scales, values, at, start, lane, k):
        for j in range(GROUPS):
            first = uint32(start + uint32(j * GROUP))
            if first < k:                       # uniform over the warp, whose lanes shuffle in `store`
                i = uint32(first + lane * uint32(4))
                store(out, scales, uint32(at + i), i < k, values[4 * j], values[4 * j + 1], values[4 * j + 2],
                      values[4 * j + 3])

    @cuda.jit
    def draft_input_kernel(out, scales, e, x, hidden, sources, slots, e_norm, first_norm, h_norm, k, eps):
        let_next_begin()
        row, lane, warp = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x & 31), uint32(cuda.threadIdx.x >> 5)
        start, at = uint32(warp * uint32(PART)), uint32(uint32(row * k) * uint32(2))
        values = cuda.local.array(VALUES, float32)
        of_e = cuda.shared.array(MAX_WARPS, float32)
        of_x, of_h = cuda.shared.array(MAX_WARPS, float32), cuda.shared.array(MAX_WARPS, float32)
        wait_for_previous()
        total = block_sum(of_e, load_part(values, e, row, start, lane, k), lane, warp)
        scale_part(values, rsqrt(div_rn(total, float32(k)) + eps), e_norm, start, lane, k)
        store_part(out, scales, values, at, start, lane, k)
        total = load_either(values, x, hidden, sources[row], uint32(slots[row]), start, lane, k)
        total = block_sum(of_x, total, lane, warp)
        total = scale_part(values, rsqrt(div_rn(total, float32(k)) + eps), first_norm, start, lane, k)
        total = block_sum(of_h, total, lane, warp)
        scale_part(values, rsqrt(div_rn(total, float32(k)) + eps), h_norm, start, lane, k)
        store_part(out, scales, values, uint32(at + k), start, lane, k)

    return draft_input_kernel


@cuda.jit
def keep_hidden_kernel(hidden, x, slots, row, k):
    i = uint32(uint32(cuda.blockIdx.x * uint32(COPY_THREADS) + cuda.threadIdx.x) << uint32(2))
    if i < k:
        a, b, c, d = load_floats4(x, uint32(row * k + i))
        store_floats4(hidden, uint32(uint32(slots[row]) * k + i), a, b, c, d)


# ---- launches: they write in place and never allocate -----------------------------------------------------

def draft_rows(card, rows, at, records, head, lags, n, width, *, stream=None):
    """rows <- ids, places and rope of n * width rows; at: (sources int32 [n * width], limits int32 [n]) likewise. All
    NEXT_DRAFTS of the outcomes become -1. records: (answers int32 [n, 12], outcomes int32 [n, 16]). head: a DraftHead,
    whose lists get the tokens that are skipped. lags: int32 [n_slots]."""
    records = [array.reshape(-1) for array in records]
    lists = records if head.listed is None else (head.listed.reshape(-1), head.n_listed)    # nothing reads the former
    card.launch(draft_rows_kernel, -(-n // THREADS), THREADS, rows.ids, *rows.places, rows.rope.reshape(-1), *at,
                lags, *records, *lists, head.n_low, 0 if head.listed is None else head.skipped, n, width, stream=stream)


def draft_input(card, out, e, x, hidden, rows, norms, eps, *, stream=None):
    """out <- the inputs of the block, [rows, 2 k]: an Activation's (q, d), or (x, None). rows: (number of rows,
    sources, slots). norms: the weights of enorm, first_norm and hnorm, float32 [k]. k: a multiple of 32, at most
    16,384."""
    (values, scales), (n, sources, slots), k = out, rows, e.shape[1]
    kernel = input_kernel(store_plain if scales is None else store_quantized)
    card.launch(kernel, n, row_threads(k), values.reshape(-1), (values if scales is None else scales).reshape(-1),
                e.reshape(-1), x.reshape(-1), hidden.reshape(-1), sources, slots, *norms, k, float(eps), stream=stream)


def keep_hidden(card, hidden, x, slots, row, *, stream=None):
    """The row of `hidden` of slot slots[row] <- row `row` of x."""
    k = x.shape[1]
    card.launch(keep_hidden_kernel, -(-k // (4 * COPY_THREADS)), COPY_THREADS, hidden.reshape(-1), x.reshape(-1), slots,
                row, k, stream=stream)


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [(1, 32), (3, 96), (5, 1056), (2, 4096)]                    # rows, k
ROW_CASES = [(1, 1), (3, 1), (1, 8), (5, 3), (33, 8)]               # answers, width


def check(card, rows, k):
    """Random rows, some of which take their h from the slot; a slot without a row before it has zeros. Returns the
    largest error, of the largest value."""
    rng = np.random.default_rng(rows * k)
    e, x, hidden = (rng.standard_normal((n, k), np.float32) for n in (rows, rows + 2, 3))
    hidden[1] = 0
    sources, slots = np.arange(rows, dtype=np.int32) % (rows + 2) - 1, np.arange(rows, dtype=np.int32) % 3
    norms = [rng.uniform(0.5, 1.5, k).astype(np.float32) for _ in range(3)]
    want = input_reference(e, x, hidden, sources, slots, norms, 1e-6)
    arrays, on_card = [card.upload(each) for each in (e, x, hidden)], [card.upload(each) for each in norms]
    places = rows, card.upload(sources), card.upload(slots)
    return check_with_twin(card, want, 1e-5, lambda y: draft_input(card, (y, None), *arrays, places, on_card, 1e-6),
                           lambda out: draft_input(card, out, *arrays, places, on_card, 1e-6))


def random_records(rng, n):
    """Answers near the ends of pages and of sequences, and outcomes of all kinds."""
    answers, outcomes = np.zeros((n, N_ANSWER), np.int32), np.full((n, N_OUTCOME), 7, np.int32)
    answers[:, SLOT], answers[:, ACCEPTED] = rng.permutation(n + 2)[:n], 1
    answers[:, POSITION] = rng.integers(1, 4, n) * PAGE + rng.integers(-10, 10, n)
    answers[:, END] = answers[:, POSITION] + np.where(rng.random(n) < 0.5, 1000, rng.integers(2, 20, n))
    outcomes[:, COUNT] = rng.integers(-1, CHECK_ROWS + 1, n)
    outcomes[:, TOKENS:NEXT_DRAFTS] = rng.integers(1, 99, (n, CHECK_ROWS))
    return answers, outcomes


def lists_reference(lists, n_listed, answers, outcomes, head):
    """The lists after the step, and how many entries they have got."""
    lists, n_listed = lists.copy(), n_listed.copy()
    for slot, outcome in zip(answers[:, SLOT], outcomes):
        for token in outcome[TOKENS:TOKENS + max(outcome[COUNT], 0)]:
            if head.n_low <= token < head.n_low + head.skipped:
                lists[slot, n_listed[slot] % LISTED] = token
                n_listed[slot] += 1
    return lists, n_listed


def check_rows(card, n, width):
    """Every row must be exact; the drafts of before are gone, the lists have the tokens chosen, and nothing else
    changes."""
    rng = np.random.default_rng(n * width)
    answers, outcomes = random_records(rng, n)
    outcomes[:, COUNT] = np.minimum(outcomes[:, COUNT], width)
    arrays = [card.alloc(size, np.int32) for size in (*[n * width + 1] * 4, 3 * n * width, n + 1)]
    for array in arrays:
        card.poison(array)
    ids, slots, positions, sources, rope, limits = arrays
    records = card.upload(answers), card.upload(outcomes)
    rows, lags = SimpleNamespace(ids=ids, places=(slots, positions), rope=rope), rng.integers(0, 50, n + 2, np.int32)
    lags_there = card.upload(lags)
    lists, n_listed = rng.integers(-1, 99, (n + 2, LISTED), np.int32), rng.integers(0, 2 * LISTED, n + 2, np.int32)
    head = DraftHead(40, 30, 60, card.upload(lists), card.upload(n_listed))
    draft_rows(card, rows, (sources, limits), records, head, lags_there, n, width)
    want = lists_reference(lists, n_listed, answers, outcomes, head)
    for got, expected in zip((head.listed, head.n_listed), want):
        np.testing.assert_array_equal(card.download(got), expected)
    draft_rows(card, rows, (sources, limits), records, head._replace(listed=None), lags_there, n, width)
    np.testing.assert_array_equal(card.download(head.listed), want[0], "a list that is not there")
    want = rows_reference(answers, outcomes, width)
    for got, expected in zip((ids, slots, positions, sources, limits), want):
        np.testing.assert_array_equal(card.download(got), np.append(expected, -1))
    np.testing.assert_array_equal(card.download(rope), np.tile(np.where(want[2] < 0, 0, want[2] - lags[want[1]]), 3))
    outcomes[:, NEXT_DRAFTS:] = -1
    np.testing.assert_array_equal(card.download(records[1]), outcomes)
    np.testing.assert_array_equal(card.download(records[0]), answers)
    return 0.0


def cases(card):
    """The checks, then times for the rows of a check of a 9B."""
    for case in CASES:
        yield Case("{} x {}".format(*case), partial(check, card, *case))
    for case in ROW_CASES:
        yield Case("{} answers of {} rows".format(*case), partial(check_rows, card, *case))
    for rows, k in ((1, 4096), (3, 4096), (512, 4096)):
        e, x, hidden = (card.zeros((rows, k), np.float32) for _ in range(3))
        out, places = card.alloc((rows, 2 * k), np.int8), (rows, card.zeros(rows, np.int32), card.zeros(rows, np.int32))
        norms = [card.zeros(k, np.float32)] * 3
        scales = card.alloc((rows, 2 * k // 32), np.float32)
        yield Case(f"time of {rows} x {k}", n_bytes=2 * e.nbytes + out.nbytes + scales.nbytes, launch=partial(
            draft_input, card, (out, scales), e, x, hidden, places, norms, 1e-6))


if __name__ == "__main__":
    main("Inputs of the draft block", cases)
