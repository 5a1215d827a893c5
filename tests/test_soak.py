"""A server under many clients (benchmarks/soak.py), and what judges their answers."""

import random

import pytest

import qengine
from benchmarks import hostile, soak
from benchmarks.soak import END, MARGIN, Answer, Turn, is_close, verdict
from engine.constraints import Constraint, Vocabulary
from engine.plan import Demand
from engine.prefix import PrefixCache
from kernels.limits import FLOAT16
from qengine import make_planner
from tests.clients import app_of, serving
from tests.kinds import KV_KINDS
from tests.models import TINY, load_tiny
from tests.scripted import ScriptedEngine


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


@pytest.mark.parametrize("kv", [FLOAT16, *KV_KINDS])
def test_before_the_clients_come_every_page_and_checkpoint_was_used(kv, monkeypatch):
    """They take their memory when they are first used, which would look like a leak."""
    opened = qengine.open_model(TINY)
    four = 4 * make_planner(opened, "emulated", Demand(512)).plan.on_paper[0].state_bytes
    engine, taken, take = load_tiny("emulated", ctx=512, kv_tokens=2048, checkpoint_memory=four,
                                    checkpoint_host_memory=four, kv=kv), set(), PrefixCache.take_pages
    monkeypatch.setattr(PrefixCache, "take_pages", lambda cache, count: (
        pages := take(cache, count), taken.update(pages))[0])
    soak.fill_caches(engine)
    cache, [stage] = engine.scheduler.cache, engine.pipeline.stages
    assert taken == set(range(cache.n_pages)) and len(taken) == 32
    assert stage.cache.host.keys() == set(cache.free_hosts) == set(range(4))
    assert engine.stats()["kv_pages_free"] == 32
    engine.close()


class RuledEngine(ScriptedEngine):
    """A scripted engine that takes grammars as an engine does, and follows none."""

    def submit(self, request):
        if request.grammar is not None:
            Constraint(Vocabulary(self.tokenizer), request.grammar, request.grammar_after)
        return super().submit(request)


@pytest.mark.parametrize("make", hostile.REQUESTS, ids=lambda make: make.__name__)
def test_a_hostile_request_gets_what_is_right_for_it(make):
    """And any other answer is told."""
    path, body = make(random.Random(0))
    with serving(app_of(RuledEngine("x" * 50))) as (port, _):
        connection = hostile.half_sent(port)
        assert hostile.wrong(port, path, body, hostile.REQUESTS[make], 60) is None
        assert hostile.wrong(port, path, body, {599}, 60)[:3] in map(str, hostile.REQUESTS[make])
        connection.close()


@pytest.mark.slow
def test_clients_get_what_each_would_get_alone_beside_hostile_ones():
    """Eight hostile clients for a minute: the honest ones get the right answers, the first letter of each soon, and the
    memory comes back."""
    engine = soak.load(card="emulated", slots=12)
    outcomes, faults = soak.soak(engine, n_clients=4, seconds=60, n_cards=24, patience=60, n_hostile=8)
    engine.close()
    firsts = sorted(outcome.first for outcome in outcomes if outcome.first is not None)
    assert faults == [] and firsts[len(firsts) * 9 // 10] < 2        # 0.3 s where nothing else runs on two cores


@pytest.mark.slow
@pytest.mark.parametrize("kv", [FLOAT16, *KV_KINDS])
def test_clients_get_what_each_would_get_alone(kv):
    engine = soak.load(card="emulated", slots=4, kv=kv)
    outcomes, faults = soak.soak(engine, n_clients=12, seconds=20, n_cards=24, patience=60)
    engine.close()
    results = [outcome.result for outcome in outcomes]
    assert faults == [] and results.count("same") > 20 and results.count("left") > 5
