"""Engines with keys and values in few bits when something goes wrong: a page of NaN, requests that are cancelled,
caches that are full, checkpoints that had to leave the card."""

import numpy as np
import pytest

import qengine
from tests.kinds import KV_BY_KIND
from tests.models import load_tiny

SLOTS, CONTEXT = 3, 512


@pytest.fixture(scope="module", params=KV_BY_KIND)
def kv(request):
    return request.param


@pytest.fixture(scope="module")
def engine(kv):
    """Its pages are those of three contexts; two checkpoints are on the card, and more in host memory."""
    engine = load_tiny("emulated", kv=kv, ctx=CONTEXT, slots=SLOTS, kv_tokens=SLOTS * CONTEXT, checkpoint_memory=0)
    yield engine
    engine.close()


def request(seed, n_prompt=200, **fields):
    ids = np.random.default_rng(seed).integers(0, 4000, n_prompt).tolist()
    return qengine.Request(ids, **{"max_tokens": 8, "ignore_eos": True} | fields)


def tokens(generation):
    return [delta.token_id for delta in generation]


def alone(engine, asked):
    """The answer of an engine that remembers nothing."""
    engine.clear_cache()
    return tokens(engine.submit(asked))


@pytest.mark.parametrize("array", ["k", "v"])
def test_a_page_that_is_not_finite_ends_the_engine(kv, array):
    """It is told, and never read over: the step that reads it fails, and so does what comes later."""
    engine = load_tiny("emulated", kv=kv, ctx=CONTEXT, slots=1)
    generation = engine.submit(request(1, max_tokens=100))
    next(iter(generation))
    with engine.scheduler.between_steps():
        engine.pipeline.settle()
        for pages in engine.pipeline.last.cache.pages.values():
            engine.cards[0].poison(getattr(pages, array))
        engine.pipeline.settle()
    with pytest.raises(qengine.EngineStopped, match="the logits hold a NaN"):
        tokens(generation)
    with pytest.raises(qengine.EngineStopped, match="NaN"):
        engine.submit(request(2))
    engine.close()


def test_cancelled_requests_leave_pages_that_are_right(engine):
    """Some while they are read, some while they are answered; the slots and pages of each serve others."""
    asked = [request(seed, 90 + 40 * seed) for seed in range(6)]
    want = [alone(engine, one) for one in asked]
    engine.clear_cache()
    for round_ in range(3):
        doomed = [engine.submit(request(100 + seed, 450, max_tokens=50)) for seed in range(SLOTS)]
        if round_:
            next(iter(doomed[0]))               # the others are read, or wait
        for generation in doomed:
            generation.cancel()
        assert [tokens(engine.submit(one)) for one in asked] == want
        for generation in doomed:
            generation.wait()
            assert generation.n_generated < 50
    stats = engine.stats()
    assert stats["requests_running"] == stats["kv_pages_used"] == 0
    engine.clear_cache()
    assert engine.stats()["kv_pages_free"] == engine.stats()["kv_pages"]


def test_a_full_cache_makes_room_and_changes_no_token(engine):
    """Contexts that are as long as they may be, twice as many as the pages hold."""
    asked = [request(200 + seed, CONTEXT - 30, max_tokens=25) for seed in range(2 * SLOTS)]
    want = [alone(engine, one) for one in asked]
    engine.clear_cache()
    dropped = engine.stats()["checkpoints_dropped"]
    assert [tokens(g) for g in [engine.submit(one) for one in asked]] == want
    assert [tokens(g) for g in [engine.submit(one) for one in asked]] == want
    assert engine.stats()["checkpoints_dropped"] > dropped


def test_pages_behind_spilled_checkpoints_are_read_again(engine):
    """Five texts come back one after the other, while the card has room for two checkpoints."""
    asked = [request(300 + seed, 100) for seed in range(5)]
    want = [alone(engine, one) for one in asked]
    engine.clear_cache()
    before = engine.stats()
    assert [tokens(engine.submit(one)) for one in asked] == want
    again = [engine.submit(one) for one in asked]
    assert [tokens(generation) for generation in again] == want
    assert [generation.n_cached for generation in again] == [64] * 5
    stats = engine.stats()
    assert stats["checkpoints_spilled"] - before["checkpoints_spilled"] >= 3
    assert stats["checkpoints_fetched"] - before["checkpoints_fetched"] >= 3
