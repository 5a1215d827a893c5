"""Makes what a decode step chose the inputs of the next step, so that steps follow each other without the host.

A decode step is a *check* of n answers with `width` rows each. Row j * n + i is row j of answer i. Row 0 holds the
latest token of the answer, at its position p in the sequence. Row j holds the j-th draft, a guess of the token at
p + j.

    answers   int32 [n, 12]   | TOKEN | SLOT | POSITION | END | ACCEPTED | DRAFTS: 7 |
                              TOKEN, POSITION: of row 0; END: most tokens of the sequence; ACCEPTED: how many rows of
                              the check before, after its row 0, belong to the answer; a draft of -1 is none
    outcomes  int32 [n, 16]   | COUNT | TOKENS: 8 | NEXT_DRAFTS: 7 |   of the check before (kernels/accept.py)

First the answers move on. If COUNT > 0:
    TOKEN = the last of the COUNT tokens,  POSITION += COUNT,  ACCEPTED = COUNT - 1,  DRAFTS = NEXT_DRAFTS
With a COUNT of 0 (nothing was chosen) or -1 (the logits held a NaN) the answer stays where it is, and there it reads
and writes only its own memory until the host ends it. The outcomes stay as they are, since their copy to the host may
run beside this kernel.

Then the rows are written. Row j counts if all rows before it count and
    its token is at least 0,  p + j < (p | 63) + 1,  p + j + 1 < END
So the rows of an answer lie in one page of 64 tokens, and none chooses a token beyond the end.

    ids, slots, positions  int32 [n * width]        rope  int32 [3, n * width]: time, height, width, all the position
                                                    less the lag of the slot
    accepted               int32 [n_slots]          ACCEPTED of each answer, at its slot
    lags                   int32 [n_slots]          how far rotary positions are behind positions (engine/sight.py)

A row that does not count is *void*: id 0, the slot of the answer, position -1, rope 0.

A thread has one answer. The time is that of an empty launch. The kernel must not call `let_next_begin`
(kernels/intrinsics.py): the kernels of layers read positions, slots and `accepted` before they wait for the kernels
right before them, and may do so because none of them begins before this kernel has ended. A fence at its end makes
what it wrote visible by then.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
from numba import cuda
from numba.types import int32, uint32

from kernels.bench import Case, main
from kernels.intrinsics import wait_for_previous
from kernels.kv_formats import PAGE
from kernels.records import CHECK_ROWS, Places

TOKEN, SLOT, POSITION, END, ACCEPTED, DRAFTS = range(6)
N_DRAFTS = CHECK_ROWS - 1
N_ANSWER = DRAFTS + N_DRAFTS            # columns of `answers`
COUNT, TOKENS = range(2)
NEXT_DRAFTS = TOKENS + CHECK_ROWS
N_OUTCOME = NEXT_DRAFTS + N_DRAFTS      # columns of `outcomes`
THREADS = 32
NO_END = 2**30                          # an END that no sequence reaches


def answer_of(token, slot, position, end=NO_END, accepted=0, drafts=()):
    """The record of an answer, a row of `answers`, as a list."""
    drafts = list(drafts)[:N_DRAFTS]
    return [token, slot, position, end, accepted, *drafts, *[-1] * (N_DRAFTS - len(drafts))]


def advance_reference(answers, outcomes, width):
    """-> (answers after the step, ids, slots and positions int32 [n * width])."""
    answers = answers.copy()
    ids, slots, positions = np.zeros((3, width, len(answers)), np.int32)
    for i, (answer, outcome) in enumerate(zip(answers, outcomes)):
        if (count := outcome[COUNT]) > 0:
            answer[TOKEN], answer[ACCEPTED] = outcome[TOKENS + count - 1], count - 1
            answer[POSITION] += count
            answer[DRAFTS:] = outcome[NEXT_DRAFTS:]
        p = answer[POSITION]
        limit = min(p - p % PAGE + PAGE, answer[END] - 1) if p >= 0 else p
        tokens = [answer[TOKEN], *answer[DRAFTS:]][:width]
        n_rows = next((j for j, token in enumerate(tokens) if token < 0 or p + j >= limit), width)
        slots[:, i], positions[:, i] = answer[SLOT], -1
        ids[:n_rows, i], positions[:n_rows, i] = tokens[:n_rows], p + np.arange(n_rows)
    return answers, ids.reshape(-1), slots.reshape(-1), positions.reshape(-1)


@cuda.jit
def advance_kernel(ids, slots, positions, rope, accepted, lags, answers, outcomes, n, width):
    drafts = cuda.local.array(N_DRAFTS, int32)
    i = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
    wait_for_previous()
    if i < n:
        answer, outcome = uint32(i * uint32(N_ANSWER)), uint32(i * uint32(N_OUTCOME))
        count = outcomes[uint32(outcome + uint32(COUNT))]
        token, slot = answers[uint32(answer + uint32(TOKEN))], answers[uint32(answer + uint32(SLOT))]
        position, end = answers[uint32(answer + uint32(POSITION))], answers[uint32(answer + uint32(END))]
        n_accepted = answers[uint32(answer + uint32(ACCEPTED))]
        for j in range(uint32(N_DRAFTS)):
            drafts[j] = answers[uint32(answer + uint32(DRAFTS) + uint32(j))]
        if count > int32(0):
            token = outcomes[uint32(outcome + uint32(TOKENS) + uint32(count) - uint32(1))]
            position, n_accepted = int32(position + count), int32(count - int32(1))
            answers[uint32(answer + uint32(TOKEN))] = token
            answers[uint32(answer + uint32(POSITION))] = position
            answers[uint32(answer + uint32(ACCEPTED))] = n_accepted
            for j in range(uint32(N_DRAFTS)):
                drafts[j] = outcomes[uint32(outcome + uint32(NEXT_DRAFTS) + uint32(j))]
                answers[uint32(answer + uint32(DRAFTS) + uint32(j))] = drafts[j]
        accepted[uint32(slot)] = n_accepted
        lag = lags[uint32(slot)]

        limit = min(int32((position | int32(PAGE - 1)) + int32(1)), int32(end - int32(1)))
        counts = position >= int32(0)
        for j in range(uint32(CHECK_ROWS)):
            if uint32(j) < width:
                if uint32(j) > uint32(0):
                    token = drafts[uint32(j) - uint32(1)]
                here, row = int32(position + int32(j)), uint32(uint32(j) * n + i)
                counts = counts and token >= int32(0) and here < limit
                ids[row] = token if counts else int32(0)
                slots[row] = slot
                positions[row] = here if counts else int32(-1)
                for axis in range(uint32(3)):
                    rope[uint32(uint32(axis) * n * width + row)] = int32(here - lag) if counts else int32(0)
    cuda.threadfence()      # kernels that do not wait see what this one wrote


def advance(card, rows, answers, outcomes, accepted, lags, n, width):
    """answers int32 [n, 12] <- what outcomes int32 [n, 16] say. rows <- the n * width rows of
    the next check: ids, places (slots, positions) and rope. accepted and lags: int32 [n_slots]."""
    card.launch(advance_kernel, -(-n // THREADS), THREADS, rows.ids, *rows.places, rows.rope.reshape(-1), accepted,
                lags, answers.reshape(-1), outcomes.reshape(-1), n, width)


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [(1, 1), (3, 1), (1, 8), (5, 2), (32, 3), (33, 7), (128, 4), (45, 8)]


def rows_on(card, ids, slots, positions):
    """The rows of a pass on a card, as its kernels take them; every array is followed by an element of 7."""
    n = len(ids)
    ids, slots, positions, rope = (card.upload(np.append(host, 7).astype(np.int32))
                                   for host in (ids, slots, positions, np.tile(np.maximum(positions, 0), 3)))
    return SimpleNamespace(ids=ids[:n], places=Places(slots[:n], positions[:n]), rope=rope[:3 * n].reshape(3, n),
                           ends=[ids[n:], slots[n:], positions[n:], rope[3 * n:]])


def random_records(rng, n, n_slots):
    """Answers near the ends of pages and of sequences, and outcomes of all kinds."""
    answers, outcomes = np.zeros((n, N_ANSWER), np.int32), np.zeros((n, N_OUTCOME), np.int32)
    answers[:, TOKEN], answers[:, SLOT] = rng.integers(0, 99, n), rng.permutation(n_slots)[:n]
    answers[:, POSITION] = rng.integers(0, 4, n) * PAGE + rng.integers(-10, 10, n)
    answers[:, POSITION] = np.maximum(answers[:, POSITION], -1)
    answers[:, END] = answers[:, POSITION] + np.where(rng.random(n) < 0.5, 1000, rng.integers(0, 20, n))
    answers[:, ACCEPTED] = rng.integers(0, CHECK_ROWS, n)
    outcomes[:, COUNT] = rng.integers(-1, CHECK_ROWS + 1, n)
    for drafts in (answers[:, DRAFTS:], outcomes[:, NEXT_DRAFTS:]):
        drafts[:] = np.where(rng.random((n, N_DRAFTS)) < 0.15, -1, rng.integers(0, 99, (n, N_DRAFTS)))
    outcomes[:, TOKENS:NEXT_DRAFTS] = rng.integers(0, 99, (n, CHECK_ROWS))
    return answers, outcomes


def check(card, n, width):
    """Random records: everything written must be exact, nothing else may change."""
    rng = np.random.default_rng(n * width)
    n_slots = n + 2
    answers, outcomes = random_records(rng, n, n_slots)
    want, ids, slots, positions = advance_reference(answers, outcomes, width)
    accepted = np.full(n_slots, 77, np.int32)
    accepted[want[:, SLOT]] = want[:, ACCEPTED]
    rows, lags = rows_on(card, *np.full((3, n * width), 55)), rng.integers(0, 50, n_slots, np.int32)
    on_card = [card.upload(host) for host in (np.append(answers, 7).astype(np.int32), outcomes,
                                              np.full(n_slots, 77, np.int32))]
    advance(card, rows, on_card[0][:-1], *on_card[1:], card.upload(lags), n, width)
    got = [card.download(array) for array in on_card]
    for found, expected in zip(got, (np.append(want, 7), outcomes, accepted)):
        np.testing.assert_array_equal(found, expected)
    for array, expected in ((rows.ids, ids), (rows.places.slots, slots), (rows.places.positions, positions),
                            (rows.rope, np.tile(np.where(positions < 0, 0, positions - lags[slots]), (3, 1)))):
        np.testing.assert_array_equal(card.download(array), expected)
    assert all(card.download(end)[0] == 7 for end in rows.ends), "wrote past its rows"
    return 0.0


def cases(card):
    """The checks, then the time for one answer and for many."""
    for n, width in CASES:
        yield Case(f"{n} answers of {width} rows", partial(check, card, n, width))
    for n, width in ((1, 1), (1, 8), (64, 1), (16, 8)):
        answers, outcomes = random_records(np.random.default_rng(0), n, n)
        arrays = rows_on(card, *np.zeros((3, n * width))), card.upload(answers), card.upload(outcomes), \
            card.zeros(n, np.int32), card.zeros(n, np.int32)
        yield Case(f"{n} answers of {width} rows",
                   launch=lambda arrays=arrays, n=n, width=width: advance(card, *arrays, n, width))


if __name__ == "__main__":
    main("Inputs of the next step", cases)
