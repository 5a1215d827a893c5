"""What Ray Serve calls in a replica. Neither Ray nor a cluster is needed."""

import asyncio
import contextlib
import time

import pytest

from engine.replicas import actor, wire
from engine.replicas.actor import Recipe, Replica
from engine.request import Request
from tests.scripted import ScriptedEngine

LIMIT = 60


class Engine(ScriptedEngine):
    """Writes what a test pushes."""

    def marks(self):
        return []

    def close(self):
        pass

    def submit(self, request):
        self.generations.append(self.begin(request))
        return self.generations[-1]


@contextlib.asynccontextmanager
async def replica(monkeypatch, engine):
    """A Replica of this engine, without what Ray says of it. Its feeds end."""
    monkeypatch.setattr(Recipe, "make", lambda self: engine)
    monkeypatch.setattr(actor, "facts_of", lambda engine: {"node": "here"})
    one = Replica(type("Wish", (), {"recipe": Recipe("")}))
    try:
        yield one
    finally:
        feeds = list(one.feeds.values())
        while not all(feed.is_closed for feed in feeds):
            await one.check_health()
        for feed in feeds:
            await asyncio.to_thread(feed.thread.join, LIMIT)


def asked(one, id=1, request=Request([20])):
    return asyncio.create_task(one.answer(id, "front", wire.packed(request)))


async def until(is_true):
    async with asyncio.timeout(LIMIT):
        while not is_true():
            await asyncio.sleep(0.005)


# ---- streams ------------------------------------------------------------------------------------------------------


def test_a_stream_hands_out_the_end_of_its_last_answer(monkeypatch):
    """Its lease is over, and the answer ends while the stream is busy with the message before. A replica that Ray Serve
    drains is asked for no further stream."""
    monkeypatch.setattr(actor, "LEASE", 0.0)

    async def check():
        async with replica(monkeypatch, Engine()) as one:
            call = asked(one)
            await until(lambda: one.feeds and one.feeds["front"].jobs)
            job, = one.engine.generations
            stream = one.listen("a", "front", 1, True)
            await asyncio.wait_for(anext(stream), LIMIT)
            job.push(20, "stop")
            job.close()
            time.sleep(0.5)         # the loop stands still: the feed's thread gathers the end, and cannot send it
            events = [event for message in [one async for one in stream] for event in message[-1]]
            assert events[-1][-1][0] == wire.WHOLE and await asyncio.wait_for(call, LIMIT) is None
            assert one.feeds["front"].is_told()
    asyncio.run(check())


def test_a_stream_without_answers_ends_after_its_lease(monkeypatch):
    monkeypatch.setattr(actor, "LEASE", 0.5)

    async def check():
        async with replica(monkeypatch, Engine()) as one, asyncio.timeout(LIMIT):
            began = time.monotonic()
            assert [message async for message in one.listen("a", "front", 1, True)]
            assert time.monotonic() - began >= 0.5
    asyncio.run(check())
