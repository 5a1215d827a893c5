"""What a front hears of its answers in a replica, stream after stream, and that answers end whose front is gone. No
cluster is started."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from engine.replicas import feed, front, wire
from engine.replicas.feed import Feed
from engine.replicas.jobs import RemoteAnswer
from engine.replicas.scaling import needed
from engine.request import Delta, Request, share_read
from tests.paced import PacedEngine
from tests.scripted import ScriptedEngine
from tests.until import PATIENCE, wait_until

FACTS = {"node": "10.0.0.1", "hostname": "a", "n_slots": 4}


class Engine(PacedEngine):
    """Writes a long text slowly, and has the marks of a cache."""

    def __init__(self, pace=0.005):
        super().__init__("word " * 2000, pace=pace)

    def marks(self):
        return [1, 2]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(feed, "REPORT_SECONDS", 0.02)


@contextlib.asynccontextmanager
async def fed():
    """A Feed with one answer: (Feed, that answer, what is set when it is over)."""
    one, job = Feed(Engine(), FACTS, asyncio.get_running_loop()), Engine().submit(Request([20]))
    over = one.add(1, job)
    one.thread.start()
    try:
        yield one, job, over
    finally:
        for _ in range(feed.MOST_CHECKS + 1):
            one.check()
        assert job.cancelled and over.is_set()
        await asyncio.to_thread(one.thread.join, PATIENCE)


async def read(messages, n_tokens):
    """Reads messages until there are so many tokens; gives the numbers of the messages and the tokens."""
    numbers, tokens = [], []
    while len(tokens) < n_tokens:
        number, *_, events = await asyncio.wait_for(messages.get(), PATIENCE)
        numbers += [number] * bool(events)
        tokens += [delta[0] for *_, told, _ in events for delta in told]
    return numbers, tokens


# ---- streams ------------------------------------------------------------------------------------------------------


def test_an_old_stream_takes_nothing_from_the_new_one():
    async def check():
        one = Feed(Engine(), FACTS, asyncio.get_running_loop())
        old = one.listen(1, False)
        waits = asyncio.create_task(old.get())
        await asyncio.sleep(0)
        new = one.listen(2, False)
        one.send("a message", [])
        assert await waits is None and await new.get() == "a message"
        one.send("two", [])
        one.send("three", [])
        newest = one.listen(7, False)           # what the last one has not sent goes to this one
        assert await new.get() is None and [await newest.get(), await newest.get()] == ["two", "three"]
        assert one.listen(3, False) is None     # it comes late
        one.leave(2)
        assert one.is_heard                     # the one that has left was not the last
        one.leave(7)
        assert not one.is_heard
    asyncio.run(check())


def test_a_message_that_an_old_stream_waits_for_goes_to_the_new_one():
    """It has come, and the old stream was not yet woken."""
    async def check():
        one = Feed(Engine(), FACTS, asyncio.get_running_loop())
        waits = asyncio.create_task(one.listen(1, False).get())
        await asyncio.sleep(0)
        one.send("a message", [])
        new = one.listen(2, False)
        assert await waits is None and await asyncio.wait_for(new.get(), PATIENCE) == "a message"
    asyncio.run(check())


def test_nothing_is_missing_over_many_streams(quick):
    async def check():
        async with fed() as (one, job, _):
            numbers, tokens = [], []
            for stream in range(1, 6):
                more = await read(one.listen(stream, True), 10)
                one.leave(stream)
                await asyncio.sleep(0.03)       # nobody listens, and the engine goes on
                numbers, tokens = numbers + more[0], tokens + more[1]
            assert numbers == list(range(1, len(numbers) + 1))
        alone = Engine(0).submit(Request([20]))
        assert tokens == [delta.token_id for delta in alone][:len(tokens)]
    asyncio.run(check())


def test_facts_come_to_who_lacks_them(quick):
    async def check():
        async with fed() as (one, _, _):
            for stream, knows in enumerate([False, True, False], start=1):
                messages = one.listen(stream, knows)
                told = [(await asyncio.wait_for(messages.get(), PATIENCE))[1] for _ in range(3)]
                assert told.count(FACTS) == (not knows) and told.count(None) == 2 + knows
    asyncio.run(check())


def test_the_counts_of_a_sparse_prompt_are_told():
    near = ScriptedEngine("Hello").submit(Request([20, 21], sparse=True))       # it has ended
    near.keys_read, near.keys_seen = 30, 120
    one, there = Feed(None, None, None), RemoteAnswer(near.request, None, [])
    one.jobs[1] = feed.Open(near, feed.news_of(near, one.wake), None)
    one._gather()
    (_, n_before, counts, told, end), = one.events.values()
    assert n_before == 0
    there.hear(counts, told)
    assert end == (wire.WHOLE,)
    there.end()
    assert share_read([there]) == share_read([near]) == 0.25
    assert there.n_generated == near.n_generated > 1 and there.finish_reason == near.finish_reason


# ---- a front that is gone -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves", [True, False], ids=["the stream broke", "the stream is there and nobody reads it"])
def test_answers_of_a_front_that_asks_no_more_end(quick, leaves):
    async def check():
        async with fed() as (one, job, over):
            messages = one.listen(1, True)
            await read(messages, 3)
            if leaves:
                one.leave(1)
            for _ in range(feed.MOST_CHECKS):
                one.check()
            assert not job.cancelled and not over.is_set()
            one.check()
            await asyncio.wait_for(over.wait(), PATIENCE)
            assert job.cancelled and one.is_closed and one.listen(2, True) is None
            assert await asyncio.to_thread(job.wait, PATIENCE) and job.n_generated < 1000
            while await asyncio.wait_for(messages.get(), PATIENCE) is not None:
                pass                            # the stream ends, too
    asyncio.run(check())


def test_a_front_that_has_never_listened_is_not_waited_for():
    """`fed` checks it, and asserts that its answer ends."""
    async def check():
        async with fed():
            pass
    asyncio.run(check())


def test_a_front_that_asks_again_in_time_keeps_its_answers(quick):
    async def check():
        async with fed() as (one, job, over):
            for stream in range(1, 20):
                one.listen(stream, True)
                for _ in range(feed.MOST_CHECKS):
                    one.check()
            assert not over.is_set() and not job.cancelled and not one.is_closed
    asyncio.run(check())


# ---- the front's side ---------------------------------------------------------------------------------------------


class Stream:
    """What a call of a stream gives: messages, an error, or its end, which is None."""

    def __init__(self, messages):
        self.messages, self.is_cancelled = asyncio.Queue(), False
        for message in messages:
            self.messages.put_nowait(message)

    async def __aiter__(self):
        while (message := await self.messages.get()) is not None:
            if isinstance(message, BaseException):
                raise message
            yield message

    def cancel(self):
        self.is_cancelled = True


class Handle:
    """A handle of Ray Serve. streams: the messages of each stream of replica "a", one after the other. ends: what each
    call of an answer returns."""

    def __init__(self, streams=(), ends=()):
        self.streams, self.ends, self.asked, self.given, self.n_shut = list(streams), list(ends), [], [], 0
        self.answer = SimpleNamespace(remote=self._answer)
        self.hello = SimpleNamespace(remote=lambda: asyncio.sleep(0))

    def options(self, stream):
        return SimpleNamespace(listen=SimpleNamespace(remote=self._listen))

    def _listen(self, replica, front, stream, knows):
        self.asked.append((stream, knows))
        if self.given:
            self.given[-1].messages.put_nowait(None)
        self.given.append(Stream(self.streams.pop(0) if self.streams else []))
        return self.given[-1]

    def _answer(self, id, front, data):
        self.link.placed(id, "a")
        return asyncio.ensure_future(asyncio.sleep(0 if self.ends else 3600, self.ends.pop(0) if self.ends else None))

    def shutdown(self):
        self.n_shut += 1


@contextlib.contextmanager
def linked(monkeypatch, recipe=None, **arguments):
    monkeypatch.setattr(front, "AGAIN_SECONDS", 0.01)
    handle = Handle(**arguments)
    handle.link = link = front.Link(handle, "fed", recipe=recipe)
    try:
        yield link, handle
    finally:
        link.close()
        link.close()
    assert handle.n_shut == 1                   # Ray Serve's own tasks for it end, too


def message(number, facts=None, events=()):
    return number, facts, None, None, None, list(events)


HERE = FACTS | {"vocabulary": "v"}
NONE = *(0,) * len(wire.COUNTS), None


def test_a_front_asks_for_one_stream_after_the_other(monkeypatch):
    """While it reads one, which it reads to its end; of one that breaks it asks anew."""
    monkeypatch.setattr(front, "NEXT_SECONDS", 0.0)
    heard = []
    said = [[message(0, HERE), message(0)], [message(1, events=[(99, 0, NONE, [], None)])], [ValueError("broken")],
            [message(1)]]
    with linked(monkeypatch, streams=said) as (link, handle):
        link._hear = lambda id, one, hear=link._hear: (heard.append(one), hear(id, one))
        link.see(["a"])
        wait_until(lambda: len(heard) == 4 and len(handle.asked) == 5)
        assert heard == [said[0][0], said[0][1], said[1][0], said[3][0]]
        assert handle.asked == [(1, False), (2, True), (3, True), (4, True), (5, True)]
        assert link.table.listed()[0].facts == HERE
    assert [one.is_cancelled for one in handle.given] == [False, False, True, False, True]


def test_a_replica_that_leaves_is_asked_for_nothing(monkeypatch):
    """Ray Serve does not let it be called: its stream goes on as long as it has answers."""
    monkeypatch.setattr(front, "NEXT_SECONDS", 0.0)
    with linked(monkeypatch, streams=[[]]) as (link, handle):
        link.see(["a"])
        wait_until(lambda: handle.given)
        job = RemoteAnswer(Request([1]), link, [])
        link.submit(job)
        wait_until(lambda: job.replica == "a")
        link.see([])
        link.loop.call_soon_threadsafe(handle.given[0].messages.put_nowait, message(0, HERE))
        wait_until(lambda: link.table.listed()[0].facts)
        assert len(handle.asked) == 1 and not handle.given[0].is_cancelled
        job.cancel()
        wait_until(lambda: handle.given[0].is_cancelled)


@pytest.mark.parametrize("numbers, n_lost", [([1, 2, 3], 0), ([1, 3], 1), ([1, 2, 1], 0), ([4, 5], 1)])
def test_messages_that_are_missing_are_noticed(monkeypatch, numbers, n_lost):
    """A number that goes back is that of a new feed."""
    said = wire.delta_told(Delta(7, "x"))
    with linked(monkeypatch) as (link, handle):
        job = RemoteAnswer(Request([1]), link, [])
        link.submit(job)
        wait_until(lambda: job.replica == "a")
        for number in numbers:
            in_loop(link, heard(link, message(number, events=[(job.id, job.n_again, NONE, [said], None)])))
        assert job.n_lost == n_lost and job.id in link.jobs


async def heard(link, *messages, replica="a"):
    for one in messages:
        link._hear(replica, one)


def in_loop(link, work):
    return asyncio.run_coroutine_threadsafe(work, link.loop).result(PATIENCE)


def test_an_answer_whose_replica_has_not_heard_of_the_front_begins_again(monkeypatch):
    """It was suspended for long, say; the answer was cut in the replica, and is not taken for a whole one."""
    with linked(monkeypatch, ends=[wire.UNHEARD]) as (link, handle):
        job = RemoteAnswer(Request([1]), link, [])
        first = job.id
        link.submit(job)
        wait_until(lambda: job.id != first and job.replica == "a")
        assert job.n_lost == 1 and not job.wait(0) and job.error is None


# ---- how many replicas --------------------------------------------------------------------------------------------


def load(answers, queued=0.0, target=4, running=2):
    told = {"answers": dict(enumerate(answers)), "other": {0: 1e9}} if answers else {}
    return SimpleNamespace(aggregated_metrics=told,
                           total_queued_requests=queued, total_num_requests=1e9, running_replicas=range(running),
                           target_num_replicas=3, config=SimpleNamespace(get_target_ongoing_requests=lambda: target))


def test_answers_are_load_and_streams_are_none():
    """total_num_requests has the streams of fronts in it."""
    assert needed(load([])) == (0, {}) == needed(load([0, 0]))
    assert needed(load([4, 4])) == (2, {}) and needed(load([4, 4], queued=2)) == (2.5, {})
    assert needed(load([], running=0)) == (3, {})


def test_what_ray_serve_is_sent_needs_nothing_of_this_project():
    from engine.replicas import scaling
    assert not {name for name, value in vars(scaling).items() if not name.startswith("__")} - {"needed"}
