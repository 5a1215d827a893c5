"""What a front hears of its answers in a replica, stream after stream, and that answers end whose front is gone. No
cluster is started."""

import asyncio
import contextlib
import time
from types import SimpleNamespace

import pytest

from engine.replicas import feed, front, wire
from engine.replicas.feed import Feed
from engine.replicas.jobs import RemoteAnswer
from engine.replicas.scaling import needed
from engine.request import Delta, Request
from tests.clients import wait_until
from tests.paced import PacedEngine

FACTS = {"node": "10.0.0.1", "hostname": "a", "n_slots": 4}
LIMIT = 60


class Engine(PacedEngine):
    """Writes a long text slowly, and has the marks of a cache."""

    def __init__(self, pace=0.005):
        super().__init__("word " * 2000, pace=pace)

    def marks(self):
        return [1, 2]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(feed, "REPORT_SECONDS", 0.02)
    monkeypatch.setattr(feed, "MOST_UNHEARD", 5)


@contextlib.asynccontextmanager
async def fed():
    """A Feed with one answer: (Feed, that answer, what is set when it is over)."""
    one, job = Feed(Engine(), FACTS, asyncio.get_running_loop()), Engine().submit(Request([20]))
    over = one.add(1, job)
    one.thread.start()
    try:
        yield one, job, over
    finally:
        job.cancel()
        one.is_heard = False
        one.close()
        await asyncio.to_thread(one.thread.join, LIMIT)


async def read(messages, n_tokens):
    """Reads messages until there are so many tokens; gives the numbers of the messages and the tokens."""
    numbers, tokens = [], []
    while len(tokens) < n_tokens:
        number, *_, events = await asyncio.wait_for(messages.get(), LIMIT)
        numbers += [number] * bool(events)
        tokens += [delta[0] for _, _, told, _ in events for delta in told]
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
        assert await waits is None and await asyncio.wait_for(new.get(), LIMIT) == "a message"
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
                told = [(await asyncio.wait_for(messages.get(), LIMIT))[1] for _ in range(3)]
                assert told.count(FACTS) == (not knows) and told.count(None) == 2 + knows
    asyncio.run(check())


# ---- a front that is gone -----------------------------------------------------------------------------------------


def test_answers_of_a_front_that_listens_no_more_end(quick):
    async def check():
        async with fed() as (one, job, over):
            await read(one.listen(1, True), 3)
            one.leave(1)
            await asyncio.wait_for(over.wait(), LIMIT)
            assert job.cancelled and one.is_closed
            assert await asyncio.to_thread(job.wait, LIMIT) and job.n_generated < 1000
            assert one.listen(2, True) is None
    asyncio.run(check())


def test_a_front_that_has_never_listened_is_not_waited_for(quick):
    async def check():
        async with fed() as (_, job, over):
            await asyncio.wait_for(over.wait(), LIMIT)
            assert job.cancelled
    asyncio.run(check())


def test_a_front_that_listens_again_in_time_keeps_its_answers(quick):
    async def check():
        async with fed() as (one, job, over):
            for stream in range(1, 20):         # longer than MOST_UNHEARD looks, all together
                one.listen(stream, True)
                await asyncio.sleep(0.03)
                one.leave(stream)
            assert not over.is_set() and not job.cancelled and not one.is_closed
            one.n_unheard = 100
            one.listen(30, True)
            one.close()                         # was on its way when the stream came
            assert not one.is_closed
    asyncio.run(check())


def test_time_in_which_a_replica_is_suspended_does_not_count(quick, monkeypatch):
    async def check():
        async with fed() as (one, job, _):
            await read(one.listen(1, True), 3)
            jump = 1e6
            monkeypatch.setattr(feed, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + jump,
                                                              sleep=time.sleep))
            one.leave(1)
            await asyncio.sleep(0.03)
            assert not job.cancelled and one.n_unheard <= 3
            one.listen(2, True)
    asyncio.run(check())


# ---- the front's side ---------------------------------------------------------------------------------------------


class Handle:
    """A handle of Ray Serve. streams: what each stream of replica "a" gives, one after the other. ends: what each
    call of an answer returns."""

    def __init__(self, streams=(), ends=()):
        self.streams, self.ends, self.asked, self.n_shut = list(streams), list(ends), [], 0
        self.answer = SimpleNamespace(remote=self._answer)

    def options(self, stream):
        return SimpleNamespace(listen=SimpleNamespace(remote=self._listen))

    async def _listen(self, replica, front, stream, knows):
        self.asked.append((stream, knows))
        for message in self.streams.pop(0) if self.streams else ():
            yield message
        if not self.streams:
            await asyncio.sleep(3600)

    async def _answer(self, id, front, data):
        self.link.placed(id, "a")
        return self.ends.pop(0) if self.ends else await asyncio.sleep(3600)

    def shutdown(self):
        self.n_shut += 1


@contextlib.contextmanager
def linked(monkeypatch, **arguments):
    monkeypatch.setattr(front, "AGAIN_SECONDS", 0.01)
    handle = Handle(**arguments)
    handle.link = link = front.Link(handle, "fed")
    try:
        yield link, handle
    finally:
        link.close()
        link.close()
    assert handle.n_shut == 1                   # Ray Serve's own tasks for it end, too


def message(number, facts=None, events=()):
    return number, facts, None, None, None, list(events)


def test_a_front_asks_for_one_stream_after_the_other(monkeypatch):
    facts = FACTS | {"vocabulary": "v"}
    with linked(monkeypatch, streams=[[], [message(0, facts)], [message(1, events=[(99, (0,) * 4, [], None)])],
                                      [message(1)]]) as (link, handle):
        link.see(["a"])
        wait_until(lambda: len(handle.asked) == 4 and not handle.streams, LIMIT)
        assert handle.asked == [(1, False), (2, False), (3, True), (4, True)]
        assert link.table.listed()[0].facts == facts


@pytest.mark.parametrize("numbers, n_lost", [([1, 2, 3], 0), ([1, 3], 1), ([1, 2, 1], 0), ([4, 5], 1)])
def test_messages_that_are_missing_are_noticed(monkeypatch, numbers, n_lost):
    """A number that goes back is that of a new feed."""
    said = wire.delta_told(Delta(7, "x"))
    with linked(monkeypatch) as (link, handle):
        job = RemoteAnswer(Request([1]), link, [])
        link.submit(job)
        wait_until(lambda: job.replica == "a", LIMIT)
        for number in numbers:
            asyncio.run_coroutine_threadsafe(
                heard(link, message(number, events=[(job.id, (0,) * 4, [said], None)])), link.loop).result(LIMIT)
        assert job.n_lost == n_lost and job.id in link.jobs


async def heard(link, *messages):
    for one in messages:
        link._hear("a", one)


def test_an_answer_whose_replica_has_not_heard_of_the_front_begins_again(monkeypatch):
    """It was suspended for long, say; the answer was cut in the replica, and is not taken for a whole one."""
    with linked(monkeypatch, ends=[wire.UNHEARD]) as (link, handle):
        job = RemoteAnswer(Request([1]), link, [])
        first = job.id
        link.submit(job)
        wait_until(lambda: job.id != first and job.replica == "a", LIMIT)
        assert job.n_lost == 1 and not job.wait(0) and job.error is None


# ---- how many replicas --------------------------------------------------------------------------------------------


def load(answers, queued=0.0, target=4, running=2):
    return SimpleNamespace(aggregated_metrics={"answers": dict(enumerate(answers)), "other": {0: 1e9}} if answers else {},
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
