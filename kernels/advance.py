"""Makes the tokens of a decode step the inputs of the next step, so that steps follow each other without the host.

    token >= 0:  ids[row] = token, positions[row] += 1, rope[0 .. 2, row] += 1

A token of -1 changes nothing: no token has been chosen yet, or the logits of the row hold a NaN. The row then stays at
its position, where it reads and writes only its own memory, until the host sees the token and ends the sequence.

    tokens, ids, positions  int32 [rows]        rope  int32 [3, rows]: time, height, width

A thread has one row, 24 bytes. The time is that of an empty launch; from Hopper on launches overlap
(kernels/intrinsics.py).
"""

from functools import partial

import numpy as np
from numba import cuda
from numba.types import int32, uint32

from kernels.bench import Case, main
from kernels.intrinsics import let_next_begin, wait_for_previous
from kernels.records import CHECK_ROWS

TOKEN, SLOT, POSITION, END, ACCEPTED, DRAFTS = range(6)
N_DRAFTS = CHECK_ROWS - 1
N_ANSWER = DRAFTS + N_DRAFTS            # columns of `answers`
COUNT, TOKENS = range(2)
NEXT_DRAFTS = TOKENS + CHECK_ROWS
N_OUTCOME = NEXT_DRAFTS + N_DRAFTS      # columns of `outcomes`
PAGE = 64                               # no check crosses a multiple of it
THREADS = 32


def advance_reference(ids, positions, rope, tokens):
    """ids, positions and rope after the step."""
    goes_on = tokens >= 0
    return np.where(goes_on, tokens, ids), positions + goes_on, rope + goes_on


@cuda.jit
def advance_kernel(ids, positions, rope, tokens, rows):
    let_next_begin()
    row = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
    wait_for_previous()
    if row < rows:
        token = tokens[row]
        if token >= int32(0):
            ids[row] = token
            positions[row] += int32(1)
            for axis in range(uint32(3)):
                rope[uint32(uint32(axis) * rows + row)] += int32(1)


def advance(card, ids, positions, rope, tokens, rows, stream=None):
    """ids, positions int32 [rows] and rope int32 [3, rows] <- the inputs of the next step, whose last step chose tokens
    int32 [rows]."""
    card.launch(advance_kernel, -(-rows // THREADS), THREADS, ids, positions, rope.reshape(-1), tokens, rows,
                stream=stream)


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [1, 3, 32, 33]


def check(card, rows):
    """Random inputs with some tokens of -1, and one row too many that must not change."""
    random = np.random.default_rng(rows)
    ids, positions, rope = (random.integers(0, 1000, (n, rows), np.int32) for n in (1, 1, 3))
    tokens = random.integers(-1, 2, rows, np.int32)
    arrays = [card.upload(np.append(host, np.int32(7))) for host in (ids, positions, rope)]
    advance(card, *(array[:-1] for array in arrays), card.upload(tokens), rows)
    for array, want in zip(arrays, advance_reference(ids, positions, rope, tokens)):
        got = card.download(array)
        np.testing.assert_array_equal(got[:-1].reshape(want.shape), want)
        assert got[-1] == 7, "wrote past its rows"
    return 0.0


def cases(card):
    """The checks, then the time for one row."""
    for rows in CASES:
        yield Case(f"{rows} rows", partial(check, card, rows))
    arrays = [card.zeros(n, np.int32) for n in (1, 1, 3, 1)]
    yield Case("1 row", launch=lambda: advance(card, *arrays, 1))


if __name__ == "__main__":
    main("Inputs of the next step", cases)
