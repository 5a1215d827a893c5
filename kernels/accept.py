"""How many of the tokens that a check chose become part of each answer: those up to the first that is not the draft at
its place.

The rows of a check are in the order of kernels/advance.py: row j * n + i is row j of answer i. ids[row] is what the
row held, row 0 the latest token of the answer and row j > 0 the j-th draft; tokens[row] is the choice after this row.

    row 0 counts       if it is not void
    row j > 0 counts   if row j - 1 counts, row j is not void, its draft is tokens of row j - 1, and it chose a token

So each row that counts has seen the tokens that plain decoding would have seen, and chooses the same token. The answer
gains the tokens of the rows that count:

    outcomes  int32 [n, 16]   | COUNT | TOKENS: 8, -1 behind the COUNT tokens | NEXT_DRAFTS: 7 times -1 |

COUNT is 0 where row 0 is void, and -1 where row 0 chose none (a token of -1: its logits hold a NaN, say). Where a later
row chose none, the answer ends before it: the row is row 0 of the next check, and the host learns of it then.

The slot of the answer moves on as if the tokens had been chosen one by one (kernels/sample.py): DRAW += COUNT, and with
penalties its history counts each token.

A thread has one answer. The time is that of an empty launch.
"""

from functools import partial

import numpy as np
from numba import cuda
from numba.types import int32, uint32

from kernels.advance import COUNT, N_DRAFTS, N_OUTCOME, NEXT_DRAFTS, TOKENS, rows_on
from kernels.bench import Case, main
from kernels.intrinsics import let_next_begin, wait_for_previous
from kernels.records import CHECK_ROWS
from kernels.sample import (DRAW, FLAGS, IN_PROMPT, N_PARAMETERS, PENALIZED, TIMES, SamplingState, pack_parameters,
                            parameter, times_one_more)

THREADS = 32


def accept_reference(tokens, ids, positions, n, width):
    """The outcomes of a check."""
    outcomes = np.full((n, N_OUTCOME), -1, np.int32)
    for i in range(n):
        count = 0
        for row in range(i, n * width, n):
            if positions[row] < 0 or tokens[row] < 0 or (count and ids[row] != tokens[row - n]):
                break
            count += 1
        outcomes[i, COUNT] = -1 if positions[i] >= 0 and tokens[i] < 0 else count
        outcomes[i, TOKENS:TOKENS + count] = tokens[i:i + count * n:n]
    return outcomes


def count_reference(outcomes, slots, parameters, history):
    """Moves DRAW and the history of the slots on by what the outcomes hold, in place. slots: of the answers."""
    for slot, outcome in zip(slots, outcomes):
        chosen = outcome[TOKENS:TOKENS + max(outcome[COUNT], 0)]
        parameters[slot, DRAW:DRAW + 1] += np.uint32(len(chosen))
        if parameters[slot, FLAGS] & PENALIZED:
            for token in chosen:
                history[slot, token] += (history[slot, token] & TIMES) < TIMES


@cuda.jit
def accept_kernel(outcomes, tokens, row_id, row_slot, row_pos, parameters, history, n, width, n_vocab):
    chosen = cuda.local.array(CHECK_ROWS, int32)
    let_next_begin()
    i = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
    wait_for_previous()
    if i < n:
        slot, outcome = uint32(row_slot[i]), uint32(i * uint32(N_OUTCOME))
        counts, count, before = row_pos[i] >= int32(0), int32(0), row_id[i]
        none = counts and tokens[i] < int32(0)
        for j in range(uint32(CHECK_ROWS)):
            chosen[j] = int32(-1)
            if uint32(j) < width:
                row = uint32(uint32(j) * n + i)
                token = tokens[row]
                counts = counts and row_pos[row] >= int32(0) and token >= int32(0) and row_id[row] == before
                if counts:
                    chosen[j], before, count = token, token, int32(count + int32(1))
            outcomes[uint32(outcome + uint32(TOKENS) + uint32(j))] = chosen[j]
        outcomes[uint32(outcome + uint32(COUNT))] = int32(-1) if none else count
        for j in range(uint32(N_DRAFTS)):
            outcomes[uint32(outcome + uint32(NEXT_DRAFTS) + uint32(j))] = int32(-1)

        if count > int32(0):
            at = uint32(slot * uint32(N_PARAMETERS) + uint32(DRAW))
            parameters[at] = uint32(parameters[at] + uint32(count))
            if parameter(parameters, slot, FLAGS) & uint32(PENALIZED):
                for j in range(uint32(CHECK_ROWS)):
                    if chosen[j] >= int32(0):
                        at = uint32(slot * n_vocab + uint32(chosen[j]))
                        history[at] = times_one_more(uint32(history[at]))


def accept(card, outcomes, tokens, rows, state, n, width):
    """outcomes int32 [n, 16] <- what n answers gain from the tokens int32 [n * width] that `sample` chose. rows: ids
    and places (slots, positions) of the check. state: SamplingState, whose draws and histories move on."""
    card.launch(accept_kernel, -(-n // THREADS), THREADS, outcomes.reshape(-1), tokens, rows.ids, *rows.places,
                state.parameters.reshape(-1), state.history.reshape(-1), n, width, state.history.shape[1])


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [(1, 1), (3, 1), (5, 2), (1, 8), (31, 3), (33, 8), (128, 4)]
N_VOCAB = 5             # so that drafts are often right


def random_check(rng, n, width):
    """(tokens, ids, slots, positions) of a check: drafts that are right mostly, void ends, tokens of -1."""
    tokens, ids = rng.integers(0, N_VOCAB, (2, width, n))
    right = rng.random((width - 1, n)) < 0.8
    ids[1:] = np.where(right, tokens[:-1], ids[1:])
    positions = rng.integers(0, 1000, n) + np.arange(width)[:, None]
    positions[np.arange(width)[:, None] >= rng.integers(0, 3 * width, n)] = -1
    tokens[rng.random((width, n)) < 0.08] = -1
    slots = np.tile(rng.permutation(n + 2)[:n], width)
    return [array.reshape(-1).astype(np.int32) for array in (tokens, ids, slots, positions)]


def check(card, n, width):
    """Two random checks, one after the other. Outcomes, draws and histories must be exact."""
    rng = np.random.default_rng(n * width)
    state = SamplingState.allocate(card, n + 2, 1, N_VOCAB)
    parameters = np.stack([pack_parameters(draw=2**32 - 3, presence=float(slot % 2)) for slot in range(n + 2)])
    history = rng.integers(0, TIMES + 1, (n + 2, N_VOCAB)) + IN_PROMPT * rng.integers(0, 2, (n + 2, N_VOCAB))
    history = np.where(rng.random(history.shape) < 0.5, history | TIMES, history).astype(np.uint16)
    card.copy_in(state.parameters, parameters)
    card.copy_in(state.history, history)
    outcomes = card.alloc(n * N_OUTCOME + 1, np.int32)
    for _ in range(2):
        card.poison(outcomes)
        tokens, ids, slots, positions = random_check(rng, n, width)
        accept(card, outcomes[:-1], card.upload(tokens), rows_on(card, ids, slots, positions), state, n, width)
        want = accept_reference(tokens, ids, positions, n, width)
        np.testing.assert_array_equal(card.download(outcomes), np.append(want, -1))
        count_reference(want, slots[:n], parameters, history)
        np.testing.assert_array_equal(card.download(state.parameters), parameters)
        np.testing.assert_array_equal(card.download(state.history), history)
    return 0.0


def cases(card):
    """The checks, then times with and without penalties."""
    for n, width in CASES:
        yield Case(f"{n} answers of {width} rows", partial(check, card, n, width))
    for n, width, presence in ((1, 1, 0.0), (1, 8, 0.0), (1, 8, 1.0), (64, 1, 0.0), (16, 8, 1.0)):
        state = SamplingState.allocate(card, n, 1, N_VOCAB)
        card.copy_in(state.parameters, np.tile(pack_parameters(presence=presence), (n, 1)))
        inputs = rows_on(card, *np.tile(np.stack([np.zeros(n), np.arange(n), np.arange(n)]), width))
        arrays = card.alloc((n, N_OUTCOME), np.int32), card.zeros(n * width, np.int32), inputs, state, n, width
        yield Case(f"{n} answers of {width} rows{', penalties' * bool(presence)}",
                   launch=lambda arrays=arrays: accept(card, *arrays))


if __name__ == "__main__":
    main("What a check adds to its answers", cases)
