import numpy as np
import pytest

from kernels import sample
from kernels.advance import rows_on
from kernels.records import CHECK_ROWS
from kernels.sample import SamplingState, pack_parameters, philox_reference


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("case", sample.CASES, ids=str)
def test_tokens_equal_the_reference(card, case, width):
    sample.check(card, case, width)


def test_widest_check(card):
    sample.check(card, (300, {"temperature": 0.9, "top_p": 0.9, "repetition": 1.3, "frequency": 2.0, "masked": True,
                              "draw": 2**32 - 3}), CHECK_ROWS)


def test_philox_equals_its_published_vectors():
    # Known answers of the Random123 library, philox4x32 with 10 rounds, for counters with three zero words.
    assert philox_reference(0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)


def draw(card, logits, **settings):
    """The token of each row of logits [rows, V], row r with seed r (greedy by default)."""
    logits = np.asarray(logits, np.float32)
    rows, n_vocab = logits.shape
    state = SamplingState.allocate(card, rows, rows, n_vocab)
    card.copy_in(state.parameters, np.stack([pack_parameters(seed=r, **settings) for r in range(rows)]))
    tokens = card.alloc(rows, np.int32)
    card.poison(tokens)
    inputs = rows_on(card, np.zeros(rows), np.arange(rows), np.zeros(rows))
    sample.sample(card, tokens, card.upload(logits), inputs, state, rows, 1)
    return card.download(tokens)


@pytest.mark.parametrize("scratch", [3, 7, 14])
def test_rows_that_have_scratch_in_turns(card, scratch):
    """Five rows of three answers choose the same with scratch for one or a few rows of each."""
    n_vocab, x = 2100, np.random.default_rng(2).standard_normal((15, 2100)).astype(np.float32)
    rows = rows_on(card, np.arange(15) % 4, np.tile([2, 0, 1], 5), [*range(14), -1])
    settings = [{"frequency": 9.0}, {"temperature": 1.0, "top_p": 0.5, "presence": 3.0}, {"temperature": 0.7}]
    chosen = []
    for n_rows in 15, scratch:
        state, tokens = SamplingState.allocate(card, 3, n_rows, n_vocab), card.alloc(15, np.int32)
        card.copy_in(state.parameters, np.stack([pack_parameters(seed=9, **s) for s in settings]))
        sample.sample(card, tokens, card.upload(x), rows, state, 3, 5)
        chosen.append(card.download(tokens).tolist())
    assert chosen[0] == chosen[1] and chosen[0][-1] == -1 and len(set(chosen[0])) > 5


def test_the_lowest_id_of_equal_logits_wins(card):
    logits = np.zeros((4, 5000), np.float32)
    logits[1, [4999, 4200, 77]] = 2
    logits[2], logits[3, ::2] = -0.0, -0.0
    assert draw(card, logits).tolist() == [0, 77, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_defined_choice_gives_minus_one(card, temperature):
    logits = np.random.default_rng(0).standard_normal((4, 300))
    logits[0, 17], logits[1, 3], logits[2] = np.nan, np.inf, -np.inf
    got = draw(card, logits, temperature=temperature)
    assert got[:3].tolist() == [-1, -1, -1] and got[3] >= 0


def test_draws_follow_the_distribution(card):
    x = np.log(np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04]))
    count = lambda **settings: np.bincount(draw(card, np.tile(x, (1000, 1)), **settings), minlength=6)
    for settings, expected in (({"temperature": 1.0}, np.exp(x)),
                               ({"temperature": 0.5}, np.exp(2 * x)),
                               ({"temperature": 1.0, "top_k": 3}, np.exp(x) * [1, 1, 1, 0, 0, 0]),
                               ({"temperature": 1.0, "top_p": 0.7}, np.exp(x) * [1, 1, 1, 0, 0, 0]),
                               ({"temperature": 1.0, "min_p": 0.2}, np.exp(x) * [1, 1, 1, 1, 0, 0])):
        expected = expected / expected.sum() * 1000
        got, possible = count(**settings), expected > 0
        chi_squared = np.sum((got - expected)[possible] ** 2 / expected[possible])
        assert chi_squared < 20.5, (settings, got)  # exceeded once in 1,000 for 5 degrees of freedom
        assert not got[~possible].any(), (settings, got)


@pytest.mark.parametrize("settings", [{"top_k": 2500}, {"top_p": 0.5}, {"top_k": 4000, "top_p": 0.625}],
                         ids=str)
def test_of_equal_tokens_the_first_are_kept(card, settings):
    """5,000 equal tokens: the prefix ends within a tie that many threads and chunks share."""
    got = draw(card, np.zeros((200, 5000)), temperature=1.0, **settings)
    assert got.min() >= 0 and 2000 < got.max() < 2500


def test_a_row_does_not_depend_on_the_rows_beside_it(card):
    """Six rows with different parameters at once, and each alone."""
    n_vocab, x = 3000, np.random.default_rng(1).standard_normal((6, 3000)).astype(np.float32)
    settings = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 9},
                {"temperature": 1.0, "top_p": 0.8}, {"temperature": 2.0, "top_k": 700, "top_p": 0.6},
                {"temperature": 1.0, "min_p": 0.1}]
    state = SamplingState.allocate(card, 6, 6, n_vocab)
    tokens, logits = card.alloc(6, np.int32), card.upload(x)
    card.copy_in(state.parameters, np.stack([pack_parameters(seed=3, **s) for s in settings]))
    sample.sample(card, tokens, logits, rows_on(card, np.zeros(6), np.arange(6), np.zeros(6)), state, 6, 1)
    together = card.download(tokens).tolist()
    for row in range(6):
        sample.sample(card, tokens[row:row + 1], logits[row:row + 1], rows_on(card, [0], [row], [0]), state, 1, 1)
    assert card.download(tokens).tolist() == together


def test_a_vocabulary_too_large_is_refused(card):
    with pytest.raises(ValueError, match="524288"):
        SamplingState.allocate(card, 1, 1, 600_000)
