"""A server under many clients (benchmarks/soak.py), and what judges their answers."""

import pytest

import qengine
from benchmarks import soak
from benchmarks.soak import END, MARGIN, Answer, Turn, is_close, verdict
from engine.prefix import PrefixCache
from tests.models import TINY, load_tiny


def entries(*said):
    """Log-probabilities as a client gets them, of (token, likeliest other, nats between the two)."""
    return [{"token": token, "logprob": -0.5, "top_logprobs": [
        {"token": token, "logprob": -0.5}, {"token": other, "logprob": -0.5 - less}]} for token, other, less in said]


def answer(logprobs, n_cached=0, **choice):
    text = "".join(entry["token"] for entry in logprobs)
    choice = {"content": text, "finish_reason": "stop", "logprobs": logprobs} | choice
    return Answer([choice], 200, n_cached, len(logprobs), first=0.1, seconds=0.2)


NEAR, FAR = MARGIN / 2, MARGIN * 2
ALONE = entries(("a", "x", FAR), ("b", "c", NEAR), ("d", END, NEAR))


@pytest.mark.parametrize("got, close", [
    (ALONE, True), (entries(("a", "x", FAR), ("c", "b", NEAR)), True), (entries(("x", "a", NEAR)), False),
    (ALONE[:2], True), (ALONE[:1], False), (ALONE + entries(("e", END, NEAR)), True),
    (ALONE + entries(("e", END, FAR)), False), ([ALONE[0] | {"logprob": -1.0}, *ALONE[1:]], False),
    ([ALONE[0] | {"logprob": -0.6}, *ALONE[1:]], True)])
def test_what_is_close(got, close):
    assert is_close(got, ALONE) == close


def test_verdicts():
    """Only what may rest on decoded tokens may be close; all else is the same or wrong."""
    parted = entries(("a", "x", FAR), ("c", "b", NEAR))
    for turn in (Turn("short", {}, answer(ALONE)), Turn("conversation", {}, answer(ALONE), 128)):
        assert verdict(turn, answer(ALONE, n_cached=192)) == "same"
        assert verdict(turn, answer(parted, n_cached=128)).startswith("differs")
        assert verdict(turn, answer(ALONE, finish_reason="length")).startswith("differs")
    assert verdict(turn, answer(parted, n_cached=192)) == "close"


def test_before_the_clients_come_every_page_and_checkpoint_was_used(monkeypatch):
    """They take their memory when they are first used, which would look like a leak."""
    config = qengine.open_model(TINY).config
    four = 4 * qengine.state_bytes(config, config.layer_kinds)
    engine, taken, take = load_tiny("emulated", ctx=512, kv_tokens=2048, checkpoint_memory=four,
                                    checkpoint_host_memory=four), set(), PrefixCache.take_pages
    monkeypatch.setattr(PrefixCache, "take_pages", lambda cache, count: (
        pages := take(cache, count), taken.update(pages))[0])
    soak.fill_caches(engine)
    cache, [stage] = engine.scheduler.cache, engine.pipeline.stages
    assert taken == set(range(cache.n_pages)) and len(taken) == 32
    assert stage.cache.host.keys() == set(cache.free_hosts) == set(range(4))
    assert engine.stats()["kv_pages_free"] == 32
    engine.close()


@pytest.mark.slow
def test_clients_get_what_each_would_get_alone():
    engine = soak.load(card="emulated", slots=4)
    outcomes, faults = soak.soak(engine, n_clients=12, seconds=20, n_cards=24, patience=60)
    engine.close()
    results = [outcome.result for outcome in outcomes]
    assert faults == [] and results.count("same") > 20 and results.count("left") > 5
