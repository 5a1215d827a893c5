import numpy as np
import pytest

from kernels import ngram


@pytest.mark.parametrize("case", ngram.CASES, ids=str)
def test_equals_the_reference(card, case):
    ngram.check(card, *case)


@pytest.mark.parametrize("n, n_ctx", [(1, 12), (300, 50)])
def test_script(card, n, n_ctx):
    ngram.check_script(card, n, n_ctx)


@pytest.mark.parametrize("text, drafts", [
    ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1, 2, 3, 4, 5]), ([1, 2, 3, 4, 2, 3], []), ([7, 7, 7], []),
    ([7, 7, 7, 7], [7] * 7), ([1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3, 9, 1, 2]),
    ([0, 1, 2, 3, 8, 1, 2, 3, 9, 0, 1, 2, 3], [8, 1, 2, 3, 9, 0, 1])],
    ids=["period", "too short", "three of one", "four of one", "the latest", "the longest"])
def test_reference(text, drafts):
    assert ngram.ngram_reference(text, 7) == drafts


def test_a_text_too_long_is_refused(card):
    with pytest.raises(ValueError, match="67108864"):
        ngram.Texts.allocate(card, 1, 2**26 + 1)


def test_a_match_is_as_long_as_16_tokens(card):
    """The later of two matches is taken although the earlier is longer: both reach 16 tokens."""
    rng = np.random.default_rng(0)
    text = rng.permutation(100).tolist()
    assert ngram.ngram_reference([*text[:20], 200, *text[4:20], 201, *text[:20]], 2) == [201, text[0]]
