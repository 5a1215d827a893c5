"""What a front does where replicas, their streams and Ray Serve's words fail or come late. Neither Ray nor a cluster is
needed."""

import asyncio
import contextlib
import itertools
import time
from types import SimpleNamespace

import pytest

from engine.replicas import front, wire
from engine.replicas.actor import Recipe
from engine.replicas.jobs import RemoteAnswer, RemoteTexts
from engine.pooling import TextsRequest
from engine.request import Delta, EngineStopped, ModelError, Request, RequestError
from tests.test_replica_feed import HERE, NONE, heard, in_loop, linked, message
from tests.until import PATIENCE, wait_until

END = wire.WHOLE,
TOKENS = [wire.delta_told(Delta(i, f"t{i}")) for i in range(5)]
TEXT = "t0t1t2t3t4"


@pytest.fixture
def late(monkeypatch):
    """No stream is followed by the next one."""
    monkeypatch.setattr(front, "NEXT_SECONDS", 1e9)


def submitted(link, kind=RemoteAnswer):
    """A job that has a replica."""
    job = RemoteAnswer(Request([1]), link, []) if kind is RemoteAnswer else RemoteTexts(TextsRequest([[1]] * 5), link)
    link.submit(job)
    wait_until(lambda: job.replica)
    return job


def unheard(link):
    """Streams of this link say nothing: what is heard, a test says."""
    link._listen = lambda id: asyncio.sleep(3600)


def event(job, n_before=0, told=(), end=None):
    return message(1, HERE, events=[(job.id, n_before, NONE, list(told), end)])


def text_of(job):
    return "".join(delta.text for delta in job)


# ---- tokens -------------------------------------------------------------------------------------------------------


def test_tokens_that_come_before_ray_serve_says_where_from_are_not_left_out(monkeypatch):
    """It has taken the second best replica, and says so once that has begun."""
    with linked(monkeypatch) as (link, handle):
        unheard(link)
        link.see(["a", "b"])
        job = submitted(link)                   # the handle says "a"
        first = job.id

        async def early():
            link._hear("b", event(job, 0, TOKENS[:2]))
            link.placed(job.id, "b")
            link._hear("b", message(2, events=[(job.id, 2, NONE, TOKENS[2:], END)]))

        in_loop(link, early())
        wait_until(lambda: job.id != first and job.replica)
        in_loop(link, heard(link, event(job, 0, TOKENS[:3])))
        in_loop(link, heard(link, message(2, events=[(job.id, 3, NONE, TOKENS[3:], END)])))
        assert text_of(job) == TEXT and job.n_lost == 1


@pytest.mark.parametrize("n_before, n_lost", [(3, 0), (2, 1), (4, 1)])
@pytest.mark.parametrize("kind", [RemoteAnswer, RemoteTexts])
def test_what_is_missing_or_comes_twice_loses_the_try(monkeypatch, kind, n_before, n_lost):
    told = TOKENS if kind is RemoteAnswer else [[float(i)] for i in range(5)]
    with linked(monkeypatch) as (link, handle):
        unheard(link)
        link.see(["a"])
        job = submitted(link, kind)
        in_loop(link, heard(link, event(job, 0, told[:3]),
                            message(2, events=[(job.id, n_before, NONE, told[3:], None)])))
        assert job.n_lost == n_lost


def test_the_wait_for_a_replica_is_measured(monkeypatch):
    """Each try has its own."""
    with linked(monkeypatch) as (link, handle):
        unheard(link)
        link.see(["a"])
        handle.link = SimpleNamespace(placed=lambda *_: None)
        job = RemoteAnswer(Request([1]), link, [])
        link.submit(job)
        for number, least in enumerate((0.2, 0.6), start=1):
            wait_until(lambda: time.perf_counter() - job.started > least)
            wait_until(lambda: link.place(job.id, ["a"]) and job.replica)
            counts = *NONE[:4], 0.05, 0.1, 0.1, None
            in_loop(link, heard(link, message(number, HERE, events=[(job.id, 0, counts, TOKENS[:1], None)])))
            assert job.waited == job.sent_after + 0.05 and job.sent_after > least
            assert job.first_after == job.sent_after + 0.1
            link.loop.call_soon_threadsafe(link._lose, job, job.id, "a test loses it")
            wait_until(lambda: job.replica is None)
        job.cancel()


# ---- ends ---------------------------------------------------------------------------------------------------------


async def beat(link, seconds):
    """The replica reports, and says nothing of answers."""
    for _ in range(round(seconds / 0.02)):
        link._hear("a", message(0, HERE))
        await asyncio.sleep(0.02)


def test_an_answer_whose_call_has_ended_is_lost_if_its_end_does_not_come(monkeypatch):
    monkeypatch.setattr(front, "END_LOOKS", 4)
    with linked(monkeypatch, ends=[None]) as (link, handle):
        unheard(link)
        link.see(["a"])
        job = submitted(link)
        in_loop(link, beat(link, 0.2))
        assert job.n_lost == 0                  # the end may still come
        wait_until(lambda: in_loop(link, beat(link, 0.2)) or job.n_lost and job.replica)
        assert job.n_lost == 1 and "its end was not heard" in str(job.tries[0])
        in_loop(link, heard(link, event(job, 0, TOKENS, END)))
        assert text_of(job) == TEXT


def test_an_answer_at_a_replica_that_nobody_listens_to_is_lost(monkeypatch):
    monkeypatch.setattr(front, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(front, "MOST_LOOKS", 10)
    with linked(monkeypatch) as (link, handle):
        unheard(link)
        link.see(["b"])
        job = submitted(link)                   # the handle says "a", which has just left
        assert job.wait(PATIENCE)               # this handle knows no other replica: three are lost
        assert "it hangs" in str(job.tries[0])
        assert job.n_lost == 3 and not link.jobs


class Call:
    """A call of an answer that takes its time to be cancelled."""

    def __init__(self):
        self.is_cancelled = False

    def __await__(self):
        return asyncio.sleep(3600).__await__()

    def cancel(self):
        time.sleep(0.005)
        self.is_cancelled = True


def test_a_front_that_ends_tells_replicas_of_all_its_answers(monkeypatch):
    """Or they would go on with them until they miss the front."""
    with linked(monkeypatch) as (link, handle):
        link.see(["a"])
        calls = [Call() for _ in range(100)]
        given = iter(calls)
        handle.answer = SimpleNamespace(remote=lambda id, *_: (link.placed(id, "a"), next(given))[1])
        jobs = [submitted(link) for _ in calls]
        link.close()
        assert not link.thread.is_alive() and all(call.is_cancelled for call in calls)
        assert all(isinstance(job.error, EngineStopped) for job in jobs)


def test_a_front_ends_though_a_call_does_not(monkeypatch):
    monkeypatch.setattr(front, "CLOSE_SECONDS", 0.3)
    with linked(monkeypatch) as (link, handle):
        async def goes_on():
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(3600)

        handle.answer = SimpleNamespace(remote=lambda id, *_: (link.placed(id, "a"), goes_on())[1])
        link.see(["a"])
        submitted(link)
        link.close()
        assert not link.thread.is_alive()


# ---- replicas that leave ------------------------------------------------------------------------------------------


def push(link, handle, said):
    link.loop.call_soon_threadsafe(handle.given[0].messages.put_nowait, said)


def left(link, handle):
    """A job at a replica that has said what it is, and that leaves."""
    link.see(["a"])
    wait_until(lambda: link.table.listed()[0].facts)
    job = submitted(link)
    link.see([])
    return job


def test_the_last_end_of_a_replica_that_leaves_ends_its_stream(monkeypatch, late):
    """Ray Serve waits for the stream before it ends the replica."""
    with linked(monkeypatch, streams=[[message(0, HERE)]]) as (link, handle):
        job = left(link, handle)
        push(link, handle, message(1, events=[(job.id, 0, NONE, TOKENS, END)]))
        assert text_of(job) == TEXT and job.n_lost == 0
        wait_until(lambda: handle.given[0].is_cancelled)
        assert not link.table.listed() and not link.listeners and len(handle.asked) == 1


@pytest.mark.parametrize("last", [None, ValueError("broken")], ids=["ends", "breaks"])
def test_a_replica_that_leaves_is_forgotten_when_its_stream(monkeypatch, late, last):
    """It is asked for no further stream: that call would wait in Ray Serve for ever."""
    with linked(monkeypatch, streams=[[message(0, HERE)]]) as (link, handle):
        monkeypatch.setattr(front, "AGAIN_SECONDS", 0.05)
        job = left(link, handle)
        handle.link = SimpleNamespace(placed=lambda *_: None)      # Ray Serve has no other replica
        push(link, handle, last)
        wait_until(lambda: not link.table.listed() and not link.listeners)
        in_loop(link, asyncio.sleep(0.3))
        assert job.n_lost == 1 and len(handle.asked) == 1 and job.id in link.jobs
        job.cancel()


def test_a_replica_that_leaves_and_hangs_is_forgotten(monkeypatch, late):
    monkeypatch.setattr(front, "LOOK_SECONDS", 0.02)
    with linked(monkeypatch, streams=[[message(0, HERE)]]) as (link, handle):
        job = left(link, handle)
        handle.link = SimpleNamespace(placed=lambda *_: None)
        monkeypatch.setattr(front, "MOST_LOOKS", 10)        # from now on: it may have been silent for so long already
        wait_until(lambda: not link.table.listed() and not link.listeners)
        wait_until(lambda: handle.given[0].is_cancelled)
        assert job.n_lost == 1 and len(handle.asked) == 1
        job.cancel()


def test_a_stream_that_ray_calls_cancelled_is_a_broken_one(monkeypatch, late):
    """Ray makes asyncio's error of its own."""
    with linked(monkeypatch, streams=[[message(0, HERE), asyncio.CancelledError()], [message(0)]]) as (link, handle):
        link.see(["a"])
        wait_until(lambda: len(handle.asked) == 2 and link.table.listed()[0].state == "up")
        assert not link.listeners["a"].done()


# ---- a change of the model ----------------------------------------------------------------------------------------


OLD, NEW = Recipe("module:make", {"file": "old"}), Recipe("module:make", {"file": "new"})


def facts_by(recipe, n_ctx):
    return HERE | {"n_ctx": n_ctx, "wish": SimpleNamespace(recipe=recipe, n=2)}


@pytest.fixture
def changing(monkeypatch, late):
    """A front of the new model, and its handle. Replica "a" is still of the old one."""
    with linked(monkeypatch, streams=[[message(0, facts_by(OLD, 512))]], recipe=NEW) as (link, handle):
        link.see(["a"])
        wait_until(lambda: link.table.listed()[0].facts)
        yield link, handle


def test_a_front_that_starts_in_a_change_takes_the_facts_of_the_new_model(changing):
    link, handle = changing
    n_waited = itertools.count(1)

    def meanwhile():
        if next(n_waited) == 3:
            handle.streams.append([message(0, facts_by(NEW, 4096))])
            link.see(["a", "b"])

    assert link.first_facts(lambda: None, meanwhile)["n_ctx"] == 4096 and next(n_waited) > 3


def test_requests_go_to_replicas_of_the_new_model_as_soon_as_there_is_one(changing):
    link, handle = changing
    assert link.place(0, ["a"]) == ["a"]
    handle.streams.append([message(0, facts_by(NEW, 4096))])
    link.see(["a", "b"])
    wait_until(lambda: all(one.facts for one in link.table.listed()))
    assert {*map(tuple, (link.place(0, ["a", "b"]) for _ in range(4)))} == {("b",)}
    link.table.silence("b")
    assert link.place(0, ["a", "b"]) == ["a"]


def test_a_new_model_that_cannot_be_loaded_is_a_sentence(changing):
    """The replicas of the old one do not answer under its name."""
    link, handle = changing
    said = iter([None, None, "no such file"])
    with pytest.raises(ModelError, match="no such file"):
        link.first_facts(lambda: next(said))


def test_a_replica_that_says_nothing_once_it_is_up_is_a_sentence(monkeypatch, late):
    monkeypatch.setattr(front, "ANSWER_SECONDS", 0.3)
    with linked(monkeypatch) as (link, handle):
        with pytest.raises(RequestError, match="RAY_AUTH_MODE"):
            link.first_facts(lambda: None, lambda: link.see(["a"]))


def test_a_call_that_fails_while_a_front_starts_is_made_again(monkeypatch, late):
    """Its replica has just died, say."""
    with linked(monkeypatch, streams=[[message(0, facts_by(NEW, 4096))]], recipe=NEW) as (link, handle):
        said = iter([ConnectionError("it has died"), ConnectionError("it has died"), None])

        async def hello():
            if (error := next(said)) is not None:
                raise error
            link.see(["a"])

        handle.hello = SimpleNamespace(remote=hello)
        assert link.first_facts(lambda: None)["n_ctx"] == 4096
