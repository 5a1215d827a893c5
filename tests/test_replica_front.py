"""What a front does where replicas, their streams and Ray Serve's words fail or come late. No cluster is started, and Ray
is not needed."""

import asyncio
from types import SimpleNamespace

import pytest

from engine.replicas import front, wire
from engine.replicas.jobs import RemoteAnswer, RemoteTexts
from engine.pooling import TextsRequest
from engine.request import Delta, Request
from tests.clients import wait_until
from tests.test_replica_feed import HERE, LIMIT, NONE, Stream, heard, in_loop, linked, message

END = wire.WHOLE, None, None
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
    wait_until(lambda: job.replica, LIMIT)
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
        wait_until(lambda: job.id != first and job.replica, LIMIT)
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
        wait_until(lambda: in_loop(link, beat(link, 0.2)) or job.n_lost and job.replica, LIMIT)
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
        wait_until(lambda: job.n_lost == 1, LIMIT)
        assert "it hangs" in str(job.tries[0])
        wait_until(lambda: job.wait(0), LIMIT)  # this handle knows no other replica: three are lost
        assert job.n_lost == 3 and not link.jobs
