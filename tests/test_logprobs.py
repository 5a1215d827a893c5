import numpy as np
import pytest

from kernels import logprobs
from kernels.logprobs import REPORT, LogprobState, unpack_report


@pytest.mark.parametrize("kind", ["normal", "ties"])
@pytest.mark.parametrize("n_vocab", logprobs.CASES)
def test_equals_the_reference(card, n_vocab, kind):
    logprobs.check(card, n_vocab, kind)


@pytest.mark.parametrize("n_vocab", [3, 5000])
@pytest.mark.parametrize("kind", ["equal", "infinite", "nan"])
def test_logits_that_are_equal_or_not_finite(card, n_vocab, kind):
    logprobs.check(card, n_vocab, kind)


def test_a_row_does_not_depend_on_the_rows_beside_it(card):
    n_vocab, rows = 5000, 5
    logits = card.upload(np.random.default_rng(1).standard_normal((rows, n_vocab)).astype(np.float32))
    tokens, state = card.upload(np.arange(rows, dtype=np.int32)), LogprobState.allocate(card, rows, n_vocab)
    report = card.alloc((rows, REPORT), np.uint32)
    logprobs.logprobs(card, report, logits, tokens, state, rows, n_vocab)
    together = card.download(report)
    for row in range(rows):
        logprobs.logprobs(card, report, logits[row:row + 1], tokens[row:row + 1], state, 1, n_vocab)
        np.testing.assert_array_equal(card.download(report)[0], together[row])


def test_probabilities_add_up(card):
    logits, n_vocab = np.random.default_rng(2).standard_normal((1, 20)).astype(np.float32), 20
    state, report = LogprobState.allocate(card, 1, n_vocab), card.alloc((1, REPORT), np.uint32)
    logprobs.logprobs(card, report, card.upload(logits), card.upload(np.array([3], np.int32)), state, 1, n_vocab)
    own, likeliest, ids = unpack_report(card.download(report))
    assert abs(np.exp(likeliest, dtype=np.float64).sum() - 1) < 1e-6
    assert own[0] == likeliest[0, ids[0].tolist().index(3)]


def test_a_vocabulary_too_large_is_refused(card):
    with pytest.raises(ValueError, match="524288"):
        LogprobState.allocate(card, 1, 600_000)
