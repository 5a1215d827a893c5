"""The choice of a draft: the likeliest of the tokens that the head for drafts knows. And the row of the next draft.

The head for drafts has only some rows of the output head: the first n_low token ids, and the last ids of the
vocabulary, where control tokens stand. Column c of its logits is token c, or from n_low on token c + skipped. From
n_shared on, the columns are the entries of the slot's own list (kernels/draft_list.py). A draft need not be the
likeliest token of all: a wrong one costs a row of a check, and never changes a token.

    draft = the token of the largest logit, the first of equal ones

Then answer i goes on. Its row stands at position q, and its drafts end at limits[i] (kernels/draft_input.py):

    q >= 0, no logit NaN, the largest finite, q + 1 < limits[i]:    outcome i, NEXT_DRAFTS + number = draft
                                                                    the next row: id draft, position q + 1
    otherwise:                                                      no draft, and the next row is void (position -1)

    logits  float32 [n, columns]    outcomes  int32 [n, 16]         rows, next rows: int32, as in kernels/draft_input.py
    best    uint32 [n, chunks, 2]   arrived   uint32 [n], zero before the first launch and after each

A block of 256 threads takes 4,096 logits of an answer, a chunk, and leaves the largest with its column. The block that
arrives last compares the chunks. 4 bytes per logit, read from the second-level cache; bound by latency.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint32

from kernels.advance import COUNT, N_OUTCOME, NEXT_DRAFTS
from kernels.bench import Case, main
from kernels.intrinsics import arrive, let_next_begin, wait_for_previous
from kernels.records import LISTED, DraftHead
from kernels.sample import (INFINITY_KEY, MINUS_INFINITY, MINUS_INFINITY_KEY, NAN_KEY, THREADS, WARPS, better,
                            block_best, order_key)

PER_THREAD = 16
CHUNK = PER_THREAD * THREADS            # logits of a block
MAX_COLUMNS = CHUNK * THREADS           # a thread of the last block for each chunk


def draft_reference(logits, positions, limits, head, lists):
    """lists: of each row's slot. -> (drafts int32 [n], -1 for none, positions of the next rows int32 [n])."""
    with np.errstate(invalid="ignore"):
        columns = np.argmax(logits, axis=1)                 # of a NaN, if there is one
        largest = logits[np.arange(len(logits)), columns]
    goes_on = (positions >= 0) & np.isfinite(largest) & (positions + 1 < limits)
    drafts = np.where(columns < head.n_low, columns, columns + head.skipped)
    listed = np.maximum(columns - head.n_shared, 0)
    drafts = np.where(columns < head.n_shared, drafts, lists[np.arange(len(lists)), listed])
    return np.where(goes_on, drafts, -1), np.where(goes_on, positions + 1, -1)


@cuda.jit
def draft_kernel(ids, slots, positions, rope, from_slots, from_positions, limits, lags, outcomes, logits, best, arrived,
                 listed, columns, n_low, skipped, n_shared, number, n):
    """Grid (chunks, n)."""
    let_next_begin()
    keys, ids_of = cuda.shared.array(WARPS, uint32), cuda.shared.array(WARPS, uint32)
    last_keys, last_ids = cuda.shared.array(WARPS, uint32), cuda.shared.array(WARPS, uint32)
    is_last = cuda.shared.array(1, uint32)
    x = cuda.local.array(PER_THREAD, float32)
    thread, chunk, i = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
    chunks = uint32(cuda.gridDim.x)
    wait_for_previous()
    for j in range(uint32(PER_THREAD)):
        column = uint32(chunk * uint32(CHUNK) + uint32(j) * uint32(THREADS) + thread)
        x[j] = logits[uint32(i * columns + column)] if column < columns else float32(MINUS_INFINITY)
    key, column = uint32(0), uint32(NAN_KEY)
    for j in range(uint32(PER_THREAD)):
        here = uint32(chunk * uint32(CHUNK) + uint32(j) * uint32(THREADS) + thread)
        key, column = better(key, column, order_key(x[j]), here)
    key, column = block_best(key, column, keys, ids_of, thread)
    if thread == uint32(0):
        at = uint32(uint32(i * chunks + chunk) * uint32(2))
        best[at], best[uint32(at + uint32(1))] = key, column
    cuda.syncthreads()
    if thread == uint32(0):
        is_last[uint32(0)] = uint32(arrive(arrived, i) == uint32(chunks - uint32(1)))
    cuda.syncthreads()
    if is_last[uint32(0)] == uint32(0):
        return
    key, column = uint32(0), uint32(NAN_KEY)
    if thread < chunks:
        at = uint32(uint32(i * chunks + thread) * uint32(2))
        key, column = best[at], best[uint32(at + uint32(1))]
    key, column = block_best(key, column, last_keys, last_ids, thread)
    if thread == uint32(0):
        arrived[i] = uint32(0)
        slot, position = from_slots[i], from_positions[i]
        goes_on = key > uint32(MINUS_INFINITY_KEY) and key < uint32(INFINITY_KEY)
        goes_on = goes_on and position >= int32(0) and int32(position + int32(1)) < limits[i]
        draft, position = int32(column), int32(position + int32(1))
        if column >= n_shared:
            if goes_on:
                draft = listed[uint32(uint32(slot) * uint32(LISTED) + uint32(column - n_shared))]
        elif column >= n_low:
            draft = int32(column + skipped)
        if goes_on:
            outcomes[uint32(i * uint32(N_OUTCOME) + uint32(NEXT_DRAFTS) + number)] = draft
        ids[i], slots[i] = draft if goes_on else int32(0), slot
        positions[i] = position if goes_on else int32(-1)
        turn = int32(position - lags[uint32(slot)]) if goes_on else int32(0)
        for axis in range(uint32(3)):
            rope[uint32(uint32(axis) * n + i)] = turn


def scratch_shape(n, columns):
    """Shape of the uint32 array `best`. ValueError: too many columns."""
    if columns > MAX_COLUMNS:
        raise ValueError(f"the head for drafts has up to {MAX_COLUMNS} rows, not {columns}")
    return n, -(-columns // CHUNK), 2


def choose_draft(card, next_rows, at, outcomes, logits, scratch, head, number, *, stream=None):
    """NEXT_DRAFTS + number of the outcomes <- the draft of each answer, if there is one; next_rows <- the rows of the
    drafts (ids, places, rope). at: (places of the rows that gave the logits, which may be those of next_rows; limits;
    lags int32 [n_slots], see kernels/advance.py). logits: float32, those of an answer lie together. scratch: (best,
    arrived). head: a DraftHead."""
    (places, limits, lags), n = at, next_rows.rope.shape[1]
    listed = places[0] if head.listed is None else head.listed.reshape(-1)      # nothing reads the former
    card.launch(draft_kernel, (-(-head.columns // CHUNK), n), THREADS, next_rows.ids, *next_rows.places,
                next_rows.rope.reshape(-1), *places, limits, lags, outcomes.reshape(-1), logits.reshape(-1),
                *(array.reshape(-1) for array in scratch), listed, head.columns, head.n_low, head.skipped,
                head.n_shared, number, n, stream=stream)


# ---- check and time ----------------------------------------------------------------------------------------

# answers, columns of low and last ids, n_low, whether there are lists
CASES = [(1, 100, 100, False), (3, 5000, 4096, True), (9, 8192, 4100, False), (2, 98816, 98304, True),
         (20, 100, 50, True)]


def check(card, n, n_shared, n_low, has_lists):
    """Random logits with ties, NaN, infinities and rows that do not go on. Launches twice: the second draft follows the
    first, in the same rows."""
    rng = np.random.default_rng(n * n_shared)
    lists = rng.integers(0, 10**6, (n, LISTED), np.int32)
    head = DraftHead(n_low, 1000, n_shared, card.upload(lists) if has_lists else None, None)
    columns = head.columns
    logits = rng.integers(-500, 500, (n, columns)).astype(np.float32)
    logits[n // 2, rng.integers(columns)] = rng.choice([np.nan, np.inf]) if n > 1 else 0
    if n > 2:
        logits[2] = -np.inf
    positions, limits = rng.integers(-1, 60, n).astype(np.int32), rng.integers(50, 64, n).astype(np.int32)
    outcomes = np.full((n, N_OUTCOME), -1, np.int32)
    outcomes[:, COUNT] = 1
    arrays = [card.alloc(size, np.int32) for size in (n, n, n, 3 * n)]
    best = card.alloc(scratch_shape(n, columns), np.uint32)
    for array in (*arrays, best):
        card.poison(array)
    ids, slots, next_positions, rope = arrays
    rows = SimpleNamespace(ids=ids, places=(slots, next_positions), rope=rope.reshape(3, n))
    from_slots = np.arange(n, dtype=np.int32)[::-1].copy()
    records, arrived = card.upload(outcomes), card.zeros(n, np.uint32)
    places, lags = (card.upload(from_slots), card.upload(positions)), rng.integers(0, 50, n, np.int32)
    for number in range(2):
        at = places, card.upload(limits), card.upload(lags)
        choose_draft(card, rows, at, records, card.upload(logits), (best, arrived), head, number)
        drafts, positions = draft_reference(logits, positions, limits, head, lists[from_slots])
        outcomes[:, NEXT_DRAFTS + number] = drafts
        np.testing.assert_array_equal(card.download(records), outcomes)
        for got, want in zip(arrays, (np.maximum(drafts, 0), from_slots, positions,
                                      np.tile(np.where(positions < 0, 0, positions - lags[from_slots]), 3))):
            np.testing.assert_array_equal(card.download(got), want)
        assert not card.download(arrived).any(), "counters must be zero again"
        places = rows.places
    return 0.0


def cases(card):
    """The checks, then times for the default head."""
    for case in CASES:
        yield Case("{} answers, {} columns, {} low, lists: {}".format(*case), partial(check, card, *case))
    for n in (1, 8):
        head = DraftHead(98304, 149504, 98816, card.zeros((n, LISTED), np.int32), None)
        columns, rows = head.columns, SimpleNamespace(ids=card.zeros(n, np.int32), places=(
            card.zeros(n, np.int32), card.zeros(n, np.int32)), rope=card.zeros((3, n), np.int32))
        given = (rows, (rows.places, *(card.zeros(n, np.int32) for _ in range(2))),
                 card.zeros((n, N_OUTCOME), np.int32), card.zeros((n, columns), np.float32))
        scratch = card.alloc(scratch_shape(n, columns), np.uint32), card.zeros(n, np.uint32)
        yield Case(f"time of {n} x {columns}", n_bytes=given[-1].nbytes, launch=partial(
            choose_draft, card, *given, scratch, head, 0))


if __name__ == "__main__":
    main("The choice of a draft", cases)
