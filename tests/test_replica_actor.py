"""What Ray Serve calls in a replica. Neither Ray nor a cluster is needed."""

import asyncio
import contextlib
import threading
import time

import pytest

from engine.replicas import actor, feed, wire
from engine.replicas.actor import Recipe, Replica
from engine.request import Request, RequestError
from tests.scripted import ScriptedEngine
from tests.until import PATIENCE


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
        for each in one.feeds.values():
            each.close()
            await asyncio.to_thread(each.thread.join, PATIENCE)


def asked(one, id=1, request=Request([20])):
    return asyncio.create_task(one.answer(id, "front", wire.packed(request)))


async def until(is_true):
    async with asyncio.timeout(PATIENCE):
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
            await asyncio.wait_for(anext(stream), PATIENCE)
            job.push(20, "stop")
            job.close()
            time.sleep(0.5)         # the loop stands still: the feed's thread gathers the end, and cannot send it
            events = [event for message in [one async for one in stream] for event in message[-1]]
            assert events[-1][-1][0] == wire.WHOLE and await asyncio.wait_for(call, PATIENCE) is None
            assert one.feeds["front"].is_told()
    asyncio.run(check())


def test_a_stream_without_answers_ends_after_its_lease(monkeypatch):
    monkeypatch.setattr(actor, "LEASE", 0.5)

    async def check():
        async with replica(monkeypatch, Engine()) as one, asyncio.timeout(PATIENCE):
            began = time.monotonic()
            assert [message async for message in one.listen("a", "front", 1, True)]
            assert time.monotonic() - began >= 0.5
    asyncio.run(check())


# ---- answers that nobody wants --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_that_is_cancelled_while_its_grammar_is_prepared_leaves_no_answer(monkeypatch, fails):
    may, seen = threading.Event(), []

    class Slow(Engine):
        def submit(self, request):
            assert may.wait(PATIENCE)
            seen.append("prepared")
            if fails:
                raise RequestError("grammar", "it is wrong")
            return super().submit(request)

    async def check():
        async with replica(monkeypatch, Slow()) as one:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
            call = asked(one, request=Request([20], grammar="x"))
            await asyncio.sleep(0.05)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            may.set()
            await until(lambda: seen and (fails or one.engine.generations and one.engine.generations[0].cancelled))
            await asyncio.sleep(0.05)
            assert seen == ["prepared"] and not one.feeds
    asyncio.run(check())


def test_a_call_with_a_grammar_is_answered(monkeypatch):
    async def check():
        async with replica(monkeypatch, Engine()) as one:
            call = asked(one, request=Request([20], grammar="x"))
            await until(lambda: one.feeds)
            assert not one.engine.generations[0].cancelled
            call.cancel()
            await until(lambda: one.engine.generations[0].cancelled)
    asyncio.run(check())


def test_answers_of_a_front_that_is_gone_are_no_load(monkeypatch):
    """Though no other front comes, which would close the feeds of those that are gone."""
    async def check():
        async with replica(monkeypatch, Engine()) as one:
            calls = [asked(one, id) for id in range(4)]
            await until(lambda: one.feeds and len(one.feeds["front"].jobs) == 4)
            assert await one.record_autoscaling_stats() == {"answers": 4}
            feed_of_it = one.feeds["front"]
            for _ in range(feed.MOST_CHECKS + 1):
                await one.check_health()
            assert await one.record_autoscaling_stats() == {"answers": 0} and not one.feeds and not feed_of_it.jobs
            assert await asyncio.gather(*calls) == [wire.UNHEARD] * 4
            assert all(job.cancelled for job in one.engine.generations)
            await asyncio.to_thread(feed_of_it.thread.join, PATIENCE)
    asyncio.run(check())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_feed_whose_engine_cannot_be_read_ends(monkeypatch):
    """Neither its stream nor its answers wait for what cannot come; the next stream has a new feed."""
    class Broken(Engine):
        def stats(self):
            raise ValueError("a mistake")

    async def check():
        async with replica(monkeypatch, Broken()) as one, asyncio.timeout(PATIENCE):
            call = asked(one)
            assert not [message async for message in one.listen("a", "front", 1, True)]
            assert await call == wire.UNHEARD and one.engine.generations[0].cancelled
    asyncio.run(check())
