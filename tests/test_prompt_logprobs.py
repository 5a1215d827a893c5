"""Log-probabilities of prompts: of the engine, and as /v1/completions tells of them."""

import contextlib

import numpy as np
import pytest

import qengine
from kernels.emulated.card import EmulatedCard
from kernels.logprobs import check_values, logprobs_reference
from tests.models import load_tiny


def ids_of(seed, n):
    return np.random.default_rng(seed).integers(0, 4000, n).tolist()


def scores(engine, ids, top=3, **fields):
    first, *others = engine.submit(qengine.Request(list(ids), **{"max_tokens": 2, "prompt_logprobs": top} | fields))
    assert all(delta.prompt_logprobs is None for delta in others)
    return first.prompt_logprobs


def assert_same(one, other):
    for name in ("own", "likeliest", "ids"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("n", [1, 2, 9, 64, 65, 200])
def test_they_are_those_of_the_logits(engine, n):
    ids = ids_of(n, n)
    found, logits = scores(engine, ids), engine.evaluate(ids)
    assert found.own.shape == (n - 1,) and found.likeliest.shape == found.ids.shape == (n - 1, 3)
    for row, token in enumerate(ids[1:]):
        own, likeliest, best = logprobs_reference(logits[row], token)
        assert found.ids[row].tolist() == best[:3].tolist()
        check_values(np.append(found.likeliest[row], found.own[row]), np.append(likeliest[:3], own))


@pytest.mark.parametrize("options", [{"chunk": 512}, {"slots": 11}, {"split": [1, 2]}], ids=str)
def test_the_bits_depend_neither_on_passes_nor_on_cards(engine, options):
    """Nor on the number of slots, nor on a card that runs all as late as it may, nor on what runs beside."""
    want = [scores(engine, ids_of(seed, n), 20) for seed, n in enumerate((3, 200, 600))]
    cards = [EmulatedCard(number, late=True) for number in range(2 if "split" in options else 1)]
    with contextlib.closing(load_tiny(cards, **options)) as other:
        beside = other.submit(qengine.Request(ids_of(9, 30), max_tokens=400, ignore_eos=True))
        requests = [qengine.Request(ids_of(seed, n), max_tokens=1, prompt_logprobs=20)
                    for seed, n in enumerate((3, 200, 600))]
        for generation, wanted in zip([other.submit(r) for r in requests], want):
            first, = generation
            assert_same(first.prompt_logprobs, wanted)
        beside.cancel()
        beside.wait()


def test_what_is_cached_is_computed_again(engine):
    """And is there for prompts that want no log-probabilities; fewer likeliest tokens are the first ones of more."""
    engine.clear_cache()
    ids = ids_of(1, 300)
    want = scores(engine, ids)
    again = engine.submit(qengine.Request(ids, max_tokens=2, prompt_logprobs=3))
    first, _ = again
    assert again.n_cached == 0
    assert_same(first.prompt_logprobs, want)
    fewer = scores(engine, ids, 0)
    assert fewer.likeliest.shape == (299, 0)
    np.testing.assert_array_equal(fewer.own, want.own)
    plain = engine.submit(qengine.Request(ids, max_tokens=2))
    plain.wait()
    assert plain.n_cached == 256
    assert engine.stats()["kv_pages_used"] == 0


def test_an_answer_is_the_same_with_and_without_them(engine):
    fields = {"max_tokens": 20, "temperature": 1.0, "seed": 3, "ignore_eos": True, "top_logprobs": 2}
    with_them, without = ([(delta.token_id, delta.logprob) for delta in engine.submit(
        qengine.Request(ids_of(2, 150), prompt_logprobs=top, **fields))] for top in (5, None))
    assert with_them == without


def test_a_scored_prompt_can_be_cancelled(engine):
    generation = engine.submit(qengine.Request(ids_of(1, 1000), max_tokens=1, prompt_logprobs=20))
    generation.cancel()
    assert list(generation) == []
    assert len(scores(engine, ids_of(1, 10)).own) == 9


@pytest.mark.parametrize("top", [-1, 21, 1.5, True, "1"])
def test_what_a_request_may_not_ask(engine, top):
    with pytest.raises(qengine.RequestError) as caught:
        engine.submit(qengine.Request([1], prompt_logprobs=top))
    assert caught.value.field == "prompt_logprobs"
