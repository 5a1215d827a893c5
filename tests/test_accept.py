"""Checks of several rows choose what plain steps choose: what `advance`, `sample` and `accept` do together."""

import numpy as np
import pytest

from kernels import accept, advance, ngram, sample
from kernels.advance import ACCEPTED, COUNT, END, N_ANSWER, N_OUTCOME, NEXT_DRAFTS, POSITION, SLOT, TOKEN, TOKENS
from kernels.ngram import Texts
from kernels.records import CHECK_ROWS
from kernels.sample import IN_PROMPT, SamplingState, pack_parameters


@pytest.mark.parametrize("n, width", accept.CASES)
def test_equals_the_reference(card, n, width):
    accept.check(card, n, width)


N_VOCAB, LENGTH = 40, 150
SETTINGS = [{}, {"temperature": 1.0}, {"repetition": 1.6}, {"temperature": 0.8, "top_k": 9, "presence": 0.7},
            {"temperature": 1.2, "top_p": 0.9, "frequency": 0.6, "masked": True},
            {"temperature": 0.9, "min_p": 0.02, "biased": True, "repetition": 0.8, "seed": 2**63 + 5}, {"masked": True}]
N = len(SETTINGS)
SLOTS = np.random.default_rng(1).permutation(N + 1)[:N]


class Model:
    """A model of a table: the logits after a token at a position, the mask there. repeats: every position is alike."""

    def __init__(self, repeats=False):
        rng = np.random.default_rng(4)
        shape = (1 if repeats else LENGTH, N_VOCAB, N_VOCAB)
        logits = np.round(rng.standard_normal(shape) * 2, 1).astype(np.float32)
        self.logits = np.broadcast_to(logits, (LENGTH, N_VOCAB, N_VOCAB))
        self.masks = np.broadcast_to(rng.integers(0, 2**32, (shape[0], 2), np.uint32), (LENGTH, 2))
        self.bias = np.round(rng.standard_normal((N, N_VOCAB)), 1).astype(np.float32)


def sampling_state(card, model, rows):
    """Every one of SETTINGS has a slot; one slot is left over."""
    state = SamplingState.allocate(card, N + 1, rows, N_VOCAB)
    history, bias = np.zeros((N + 1, N_VOCAB), np.uint16), np.zeros((N + 1, N_VOCAB), np.float32)
    parameters = np.zeros((N + 1, sample.N_PARAMETERS), np.uint32)
    history[:, ::7] = IN_PROMPT
    bias[SLOTS] = model.bias
    parameters[SLOTS] = [pack_parameters(**{"seed": i} | s) for i, s in enumerate(SETTINGS)]
    for array, host in (state.history, history), (state.bias, bias), (state.parameters, parameters):
        card.copy_in(array, host)
    return state


def logits_of(card, model, rows, state):
    """The logits of the rows of a check; their masks are set. Void rows hold NaN."""
    ids, positions = card.download(rows.ids), card.download(rows.places.positions)
    logits, mask = np.full((len(ids), N_VOCAB), np.nan, np.float32), np.zeros(state.mask.shape, np.uint32)
    for row, (token, position) in enumerate(zip(ids, positions)):
        if position >= 0:
            logits[row] = model.logits[position, token]
            mask[SLOTS[row % N] * CHECK_ROWS + row // N] = model.masks[position]
    card.copy_in(state.mask, mask)
    return card.upload(logits)


def write(card, model, width, draft=None):
    """What each of SETTINGS writes in checks of so many rows, up to LENGTH or somewhat less: (tokens, histories,
    parameters, steps). draft(outcomes, answers, texts) fills in the drafts on the card."""
    state = sampling_state(card, model, N * width)
    first = np.full((N, N_ANSWER), -1, np.int32)
    first[:, TOKEN], first[:, SLOT], first[:, POSITION] = np.arange(N), SLOTS, 3 * np.arange(N)
    first[:, END], first[:, ACCEPTED] = LENGTH - np.arange(N), 0
    texts, steps = [[int(answer[TOKEN])] for answer in first], 0
    answers, outcomes = card.upload(first), card.zeros((N, N_OUTCOME), np.int32)
    rows = advance.rows_on(card, *np.zeros((3, N * width)))
    accepted, lags, tokens = *(card.zeros(N + 1, np.int32) for _ in range(2)), card.alloc(N * width, np.int32)
    while any(start + len(text) < end for start, text, end in zip(first[:, POSITION], texts, first[:, END])):
        steps += 1
        advance.advance(card, rows, answers, outcomes, accepted, lags, N, width)
        card.poison(tokens)
        sample.sample(card, tokens, logits_of(card, model, rows, state), rows, state, N, width)
        accept.accept(card, outcomes, tokens, rows, state, N, width)
        for text, outcome in zip(texts, card.download(outcomes)):
            text += outcome[TOKENS:TOKENS + outcome[COUNT]].tolist()
        if draft:
            draft(outcomes, answers, texts)
    return texts, card.download(state.history), card.download(state.parameters), steps


def assert_equal(got, want):
    assert got[0] == want[0]
    np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_array_equal(got[2], want[2])


@pytest.mark.parametrize("width", [2, 4, 8])
def test_checks_choose_what_plain_steps_choose(card, width):
    """Tokens, histories and draws are those of one row at a time, bit for bit, however often the drafts are right."""
    model = Model()
    plain = write(card, model, 1)
    assert len({tuple(text[:20]) for text in plain[0]}) == N

    def guess(outcomes, _, texts):
        host = card.download(outcomes)
        for outcome, text, whole in zip(host, texts, plain[0]):
            ahead = whole[len(text):][:rng.integers(0, CHECK_ROWS)]
            wrong = rng.random(len(ahead)) > right
            outcome[NEXT_DRAFTS:NEXT_DRAFTS + len(ahead)] = np.where(wrong, rng.integers(0, N_VOCAB), ahead)
        card.copy_in(outcomes, host)

    for seed, right in enumerate((0.1, 0.9, 1.0)):
        rng = np.random.default_rng(seed)
        checked = write(card, model, width, guess)
        assert_equal(checked, plain)
    assert checked[3] < 0.8 * plain[3]


def test_drafts_from_the_text(card):
    """A model that repeats itself: the n-gram drafter saves steps and changes nothing."""
    model, texts = Model(repeats=True), Texts.allocate(card, N + 1, LENGTH)
    card.copy_in(texts.most, np.full(N + 1, CHECK_ROWS - 1, np.int32))
    plain = write(card, model, 1)
    checked = write(card, model, 5, lambda outcomes, answers, _: ngram.ngram(card, outcomes, answers, texts, N))
    assert_equal(checked, plain)
    assert checked[3] < plain[3]
    greedy = card.download(texts.ids)[SLOTS[0]]
    assert greedy[:len(plain[0][0])].tolist() == plain[0][0]
