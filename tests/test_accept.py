"""Checks of several rows choose what plain steps choose: what `advance`, `sample` and `accept` do together."""

import numpy as np
import pytest

from kernels import accept, advance, sample
from kernels.advance import COUNT, END, N_ANSWER, N_OUTCOME, NEXT_DRAFTS, POSITION, SLOT, TOKEN, TOKENS
from kernels.records import CHECK_ROWS
from kernels.sample import IN_PROMPT, SamplingState, pack_parameters


@pytest.mark.parametrize("n, width", accept.CASES)
def test_equals_the_reference(card, n, width):
    accept.check(card, n, width)


N_VOCAB, LENGTH = 40, 150
SETTINGS = [{}, {"temperature": 1.0}, {"repetition": 1.6}, {"temperature": 0.8, "top_k": 9, "presence": 0.7},
            {"temperature": 1.2, "top_p": 0.9, "frequency": 0.6, "masked": True},
            {"temperature": 0.9, "min_p": 0.02, "biased": True, "repetition": 0.8, "seed": 2**63 + 5}, {"masked": True}]


class Model:
    """A model of a table: the logits after a token at a position, the mask there."""

    def __init__(self):
        rng = np.random.default_rng(4)
        self.logits = np.round(rng.standard_normal((LENGTH, N_VOCAB, N_VOCAB)) * 2, 1).astype(np.float32)
        self.masks = rng.integers(0, 2**32, (LENGTH, 2), np.uint32)
        self.bias = np.round(rng.standard_normal((len(SETTINGS), N_VOCAB)), 1).astype(np.float32)


def write(card, model, width, right=0.0, seed=0):
    """What each of the SETTINGS writes up to LENGTH in checks of so many rows: (tokens, histories, draws, steps).
    right: how likely a draft is right; drafts have random numbers of tokens."""
    rng, n = np.random.default_rng(seed), len(SETTINGS)
    slots = np.random.default_rng(1).permutation(n + 1)[:n]
    state = SamplingState.allocate(card, n + 1, n * width, N_VOCAB)
    history = np.zeros((n + 1, N_VOCAB), np.uint16)
    history[:, ::7] = IN_PROMPT
    bias = np.zeros((n + 1, N_VOCAB), np.float32)
    parameters = np.zeros((n + 1, sample.N_PARAMETERS), np.uint32)
    bias[slots] = model.bias
    parameters[slots] = [pack_parameters(**{"seed": i} | s) for i, s in enumerate(SETTINGS)]
    for array, host in (state.history, history), (state.bias, bias), (state.parameters, parameters):
        card.copy_in(array, host)
    answers = np.full((n, N_ANSWER), -1, np.int32)
    answers[:, [TOKEN, SLOT, POSITION, END, advance.ACCEPTED]] = np.stack(
        [np.arange(n), slots, 3 * np.arange(n), LENGTH - np.arange(n), np.zeros(n)], 1)
    ends, outcomes = answers[:, END].copy(), np.zeros((n, N_OUTCOME), np.int32)
    texts = [[int(answer[TOKEN])] for answer in answers]
    starts, plain = answers[:, POSITION].copy(), model.plain if right else None
    on_card, results = card.upload(answers), card.upload(outcomes)
    rows = advance.rows_on(card, *np.zeros((3, n * width)))
    accepted, tokens = card.zeros(n + 1, np.int32), card.alloc(n * width, np.int32)
    steps = 0
    while any(start + len(text) < end for start, text, end in zip(starts, texts, ends)):
        steps += 1
        advance.advance(card, rows, on_card, results, accepted, n, width)
        ids, positions = card.download(rows.ids), card.download(rows.places.positions)
        logits, mask = np.full((n * width, N_VOCAB), np.nan, np.float32), np.zeros(state.mask.shape, np.uint32)
        for row, (token, position) in enumerate(zip(ids, positions)):
            if position >= 0:
                logits[row] = model.logits[position, token]
                mask[slots[row % n] * CHECK_ROWS + row // n] = model.masks[position]
        card.copy_in(state.mask, mask)
        card.poison(tokens)
        sample.sample(card, tokens, card.upload(logits), rows, state, n, width)
        accept.accept(card, results, tokens, rows, state, n, width)
        outcomes = card.download(results)
        for i, outcome in enumerate(outcomes):
            texts[i] += outcome[TOKENS:TOKENS + outcome[COUNT]].tolist()
            if plain:
                ahead = plain[i][len(texts[i]):][:rng.integers(0, CHECK_ROWS)]
                wrong = rng.random(len(ahead)) > right
                outcome[NEXT_DRAFTS:NEXT_DRAFTS + len(ahead)] = np.where(wrong, rng.integers(0, N_VOCAB), ahead)
        card.copy_in(results, outcomes)
    return texts, card.download(state.history), card.download(state.parameters), steps


@pytest.mark.parametrize("width", [2, 4, 8])
def test_checks_choose_what_plain_steps_choose(card, width):
    """Tokens, histories and draws are those of one row at a time, bit for bit."""
    model = Model()
    model.plain, history, parameters, plain_steps = write(card, model, 1)
    assert len({tuple(text[:20]) for text in model.plain}) == len(SETTINGS)
    for seed, right in enumerate((0.1, 0.9, 1.0)):
        texts, *counted, steps = write(card, model, width, right, seed)
        assert texts == model.plain
        np.testing.assert_array_equal(counted[0], history)
        np.testing.assert_array_equal(counted[1], parameters)
    assert steps < 0.8 * plain_steps
