"""What one front hears of its answers in a replica.

Messages are (number, facts, stats, reason, marks, events), see wire.py. number: so many messages of the feed had events
so far, so a front sees where one is missing; facts come where the front has none, stats with those that end a job and
every REPORT_SECONDS, marks when they have changed. A thread gathers the events: engines tell of them by an Event. First
tokens and ends are sent at once; other tokens wait for GAP to pass since the last message.

A front listens by one stream at a time and asks for the next one every NEXT_SECONDS, which ends the one before. So
the replica sees that the front lives: a feed for which no stream was asked over MOST_CHECKS checks is closed, and its
answers end. Ray Serve's questions for the replica's health are these checks. They come every few seconds as long as the
replica can be called. A replica that Ray Serve drains gets no more questions and no more calls, but its streams go on.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.request import Delta, Request

from .wire import GAP, REPORT_SECONDS, WHOLE, counts_told, delta_told, error_told

MOST_CHECKS = 3             # without a stream that was asked for


@dataclass
class Open:
    """An answer whose end has not been handed out. news: gives what is new of it, see news_of. over: of the feed's
    loop, set when it is over. What follows belongs to the feed's thread."""

    job: object
    news: Callable
    over: asyncio.Event
    is_new: bool = True         # nothing was gathered of it
    n_told: int = 0             # Deltas or rows that were gathered
    has_ended: bool = False     # its end was gathered


class Feed:
    """The answers of one front in a replica. engine, facts: those of the replica. loop: where all is called but what
    begins with _, which the feed's own thread does."""

    def __init__(self, engine, facts: dict, loop: asyncio.AbstractEventLoop):
        self.engine, self.facts, self.loop = engine, facts, loop
        self.messages = asyncio.Queue()         # for the stream that listens, or for the next one
        self.stream, self.is_heard, self.n_checks = 0, False, 0
        self.jobs: dict[int, Open] = {}         # until the message with its end is in the queue: only the loop takes
        self.wake = threading.Event()
        self.n_sent, self.is_closed = 0, False
        self.tells_facts, self.told_marks, self.reported = False, None, 0.0
        # What was gathered for the next message: by job, those that have ended, and whether somebody waits for it.
        self.events, self.ended, self.is_urgent = {}, [], False
        self.thread = threading.Thread(target=self._run, name="feed", daemon=True)

    # ---- in the loop ------------------------------------------------------------------------------------------

    def add(self, id: int, job) -> asyncio.Event:
        """A job of the engine; gives what is set when it is over."""
        one = self.jobs[id] = Open(job, news_of(job, self.wake), asyncio.Event())
        self.wake.set()
        return one.over

    def listen(self, stream: int, knows: bool) -> asyncio.Queue | None:
        """The messages for a stream of the front, until one is None. The stream before it ends; what that one has not
        sent goes to this one. stream: a number; None is given where a later one has come before. knows: whether the
        front has the facts."""
        if stream <= self.stream or self.is_closed:
            return None
        self.stream, before, self.messages = stream, self.messages, asyncio.Queue()
        while not before.empty():
            self.messages.put_nowait(before.get_nowait())
        before.put_nowait(None)
        self.is_heard, self.n_checks = True, 0
        self.tells_facts = self.tells_facts or not knows
        self.wake.set()
        return self.messages

    def leave(self, stream: int):
        """A stream has ended."""
        if stream == self.stream:
            self.is_heard = False

    def check(self):
        """Ends all answers if the front seems to be gone."""
        self.n_checks += 1
        if self.n_checks > MOST_CHECKS:
            self.close()

    def close(self):
        """Ends all answers and the stream."""
        if self.is_closed:
            return
        self.is_closed = True
        self.messages.put_nowait(None)
        for one in self.jobs.values():
            one.job.cancel()
            one.over.set()
        self.jobs.clear()                       # they are no load any more
        self.wake.set()

    def send(self, message: tuple, ended: list[int] = ()):
        """ended: ids of answers whose ends are in the message."""
        self.messages.put_nowait(message)
        for id in ended:
            if (one := self.jobs.pop(id, None)) is not None:
                one.over.set()

    def is_told(self) -> bool:
        """Whether nothing is left to hand out, nor anything to come."""
        return not self.jobs and self.messages.empty()

    # ---- in the feed's thread ---------------------------------------------------------------------------------

    def _run(self):
        try:
            self._tell()
        finally:                                # after an error of the engine, nobody waits for what cannot come
            with contextlib.suppress(RuntimeError):     # the loop is closed: the replica ends
                self.loop.call_soon_threadsafe(self.close)

    def _tell(self):
        sent = 0.0
        while not self.is_closed:
            self.wake.wait(REPORT_SECONDS)
            self.wake.clear()
            if not self.is_heard:               # what happens meanwhile stays in the jobs
                continue
            self._gather()
            if not self.is_urgent and (left := sent + GAP - time.monotonic()) > 0:
                time.sleep(left)                # what comes meanwhile shares the message
                self._gather()
            sent = time.monotonic()
            message = self._message()
            try:
                self.loop.call_soon_threadsafe(self.send, *message)
            except RuntimeError:                # as above
                return

    def _gather(self):
        """What has happened to the jobs since the last time, into self.events."""
        for id, one in list(self.jobs.items()):
            if one.has_ended:
                continue
            told, end = one.news()
            if not (told or end is not None or one.job.n_read or one.is_new):
                continue
            _, n_before, _, before, _ = self.events.get(id, (id, one.n_told, None, [], None))
            self.events[id] = id, n_before, counts_told(one.job), before + told, end
            self.is_urgent = self.is_urgent or end is not None or bool(told and not one.n_told)
            one.is_new, one.n_told, one.has_ended = False, one.n_told + len(told), end is not None
            if one.has_ended:
                self.ended.append(id)

    def _message(self) -> tuple[tuple, list[int]]:
        facts, self.tells_facts = self.facts if self.tells_facts else None, False
        events, ended, now = list(self.events.values()), self.ended, time.monotonic()
        stats = marks = None
        if ended or facts or now >= self.reported + REPORT_SECONDS:
            self.reported, stats = now, self.engine.stats()
            marks = self.engine.marks() if self.engine.kind == "text" else None
            marks = None if marks == self.told_marks else marks
            self.told_marks = self.told_marks if marks is None else marks
        self.n_sent += bool(events)
        self.events, self.ended, self.is_urgent = {}, [], False
        return (self.n_sent, facts, stats, self.engine.reason, marks, events), ended


def news_of(job, wake: threading.Event) -> Callable:
    """A function that gives (what is new of a job, how it has ended; None if it has not). wake: is set when there may
    be news."""
    if isinstance(job.request, Request):
        job.wake = wake
        return lambda: text_news(job)
    threading.Thread(target=lambda: (job.wait(), wake.set()), name="rows of a job", daemon=True).start()
    return lambda: row_news(job)


def text_news(job) -> tuple[list[tuple], tuple | None]:
    """The end is (WHOLE,) or what `error_told` gives."""
    told = []
    try:
        while isinstance(said := job.take(), Delta):
            told.append(delta_told(said))
    except queue.Empty:
        return told, None
    except Exception as error:
        said = error
    if said is not None:
        return told, error_told(said)
    return told, (WHOLE,)


def row_news(job) -> tuple[list, tuple | None]:
    """All rows come at once."""
    if not job.wait(0):
        return [], None
    return ([], error_told(job.error)) if job.error else (job.rows if job.finish_reason else [], (WHOLE,))
