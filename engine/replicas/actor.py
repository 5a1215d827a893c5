"""The replica: what Ray Serve runs beside the cards, an engine and the streams to the fronts.

Ray Serve calls `answer` once for each answer, and the call lasts as long as the answer; a call that is cancelled
cancels it. What happens to the answers of a front meanwhile goes through the front's Feed.
"""

import asyncio
import importlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import ray

from engine.limits import VERSION
from engine.request import Delta, EngineStopped, ModelError, Request, RequestError
from engine.text_engine import sees
from kernels.card import CardError
from kernels.compile import CompileError

from .wire import GAP, REPORT_SECONDS, WHOLE, counts_told, delta_told, error_told, fingerprint, unpacked

LEASE = 30.0                # seconds that a stream lasts; then its front asks for the next, if the front still lives
UNHEARD = 120.0             # seconds after which a feed that nobody listens to, and that is empty, is forgotten


@dataclass(frozen=True)
class Recipe:
    """What every replica of a model is made by. maker: "module:function" of a function that is called with the
    arguments and returns an engine. It is a name, so that the front need not import what it never uses."""

    maker: str
    arguments: dict = field(default_factory=dict)
    version: str = VERSION                      # of qengine at the front; each node has the same

    def make(self):
        if self.version != VERSION:
            raise ModelError(f"the front runs qengine {self.version}, and this node has {VERSION}")
        module, _, name = self.maker.partition(":")
        return getattr(importlib.import_module(module), name)(**self.arguments)


def facts_of(engine) -> dict:
    """What a front must know of a replica's engine."""
    return {"name": engine.name, "kind": engine.kind, "n_ctx": engine.n_ctx,
            "n_slots": getattr(engine, "n_slots", 1), "n_dims": getattr(engine, "n_dims", 0),
            "layers": [(layers.start, layers.stop) for layers in engine.layers],
            "cards": [card.describe() for card in engine.cards],
            "vocabulary": fingerprint(engine.tokenizer),
            "sparse": getattr(engine, "sparse", "off"),
            "limits": tuple(engine.eyes.limits) if sees(engine) else None,
            "node": ray.util.get_node_ip_address(), "hostname": socket.gethostname(), "pid": os.getpid()}


class Replica:
    """The class that Ray Serve makes a replica of."""

    def __init__(self, wish):
        """wish: a Wish of cluster.py."""
        try:
            self.engine = wish.recipe.make()
        except (ModelError, RequestError, CardError, CompileError) as error:
            raise RuntimeError(f"qengine: {error}") from None   # cluster.py finds the sentence in Ray's message
        self.facts = facts_of(self.engine) | {"wish": wish}
        self.feeds: dict[str, Feed] = {}

    async def hello(self) -> dict:
        """The facts of an engine that is up."""
        return self.facts

    async def answer(self, id: int, front: str, data: bytes) -> tuple | None:
        """Has the engine answer a request of a front. Returns when the answer has ended, however it did; an error as
        `error_told` has it where it could not even begin."""
        request = unpacked(data)
        try:
            if getattr(request, "grammar", None) is None:
                job = self.engine.submit(request)
            else:           # a grammar takes the engine up to seconds, in which the others' events must go on
                job = await asyncio.get_running_loop().run_in_executor(None, self.engine.submit, request)
        except (RequestError, EngineStopped) as error:
            return error_told(error)
        over = self.feed(front).add(id, job)
        try:
            await over.wait()
        finally:
            job.cancel()        # the front has cancelled the call; of one that has ended this changes nothing
        return None

    def feed(self, front: str) -> "Feed":
        for key, one in list(self.feeds.items()):
            if one.is_unheard:
                one.close()
                del self.feeds[key]
        if front not in self.feeds:
            self.feeds[front] = Feed(self, asyncio.get_running_loop())
        return self.feeds[front]

    async def listen(self, replica: str, front: str):
        """Gives the messages of a front's feed for LEASE seconds, and as long after as answers of it are open. replica:
        the id of this one, for router.py."""
        feed, end = self.feed(front), time.monotonic() + LEASE
        feed.n_listening += 1
        feed.start()
        try:
            while time.monotonic() < end or feed.jobs:
                yield await feed.messages.get()
        finally:
            feed.n_listening -= 1
            feed.heard = time.monotonic()

    def check_health(self):
        """Ray Serve asks this again and again, and starts another replica where it raises or does not return."""
        if self.engine.reason is not None:
            raise RuntimeError(self.engine.reason)

    def __del__(self):
        if engine := getattr(self, "engine", None):
            engine.close()


class Feed:
    """What one front hears of its answers in a replica.

    Messages are (number, facts, stats, reason, marks, events), see wire.py. number: so many messages had events so far;
    facts come with the first message of a feed, stats with those that end a job and every REPORT_SECONDS, marks when
    they have changed. A thread gathers the events: engines tell of them by an Event. First tokens and ends are sent at
    once; other tokens wait for GAP to pass since the last message.
    """

    def __init__(self, replica: Replica, loop: asyncio.AbstractEventLoop):
        self.replica, self.loop = replica, loop
        self.messages = asyncio.Queue()
        self.jobs: dict[int, tuple] = {}        # id -> (job, how to take its news, Event of the loop: it is over)
        self.untold: set[int] = set()           # those of them of which no event was sent
        self.wake = threading.Event()
        self.n_sent = self.n_listening = 0
        self.heard, self.closing, self.thread = time.monotonic(), False, None
        self.has_told, self.told_marks, self.reported = False, None, 0.0
        # What was gathered for the next message: by job, the ends of calls, and whether somebody waits for it.
        self.events, self.ended, self.is_urgent = {}, [], False
        self.begun: set[int] = set()            # jobs of which a Delta or rows were gathered

    @property
    def is_unheard(self) -> bool:
        return not (self.n_listening or self.jobs) and time.monotonic() - self.heard > UNHEARD

    def start(self):
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, name="feed", daemon=True)
            self.thread.start()

    def close(self):
        self.closing = True
        self.wake.set()

    def add(self, id: int, job) -> asyncio.Event:
        """A job of the engine; gives what is set when it is over. Called in the loop."""
        over = asyncio.Event()
        self.untold.add(id)
        self.jobs[id] = job, news_of(job, self.wake), over
        self.wake.set()
        return over

    def _run(self):
        sent = 0.0
        while not self.closing:
            self.wake.wait(REPORT_SECONDS)
            self.wake.clear()
            self._gather()
            if not self.is_urgent and (left := sent + GAP - time.monotonic()) > 0:
                time.sleep(left)                # what comes meanwhile shares the message
                self._gather()
            sent = time.monotonic()
            try:
                self.loop.call_soon_threadsafe(self._send, *self._message())
            except RuntimeError:                # the loop is closed: the replica ends
                return

    def _send(self, message: tuple, ended: list[asyncio.Event]):
        if self.n_listening or message[-1]:     # a report is for those who listen
            self.messages.put_nowait(message)
        for over in ended:
            over.set()

    def _gather(self):
        """What has happened to the jobs since the last time, into self.events."""
        for id, (job, news, over) in list(self.jobs.items()):
            told, end = news()
            if is_new := id in self.untold:
                self.untold.discard(id)
            if not (told or end is not None or job.n_read or is_new):
                continue
            before = self.events.get(id)
            self.events[id] = id, counts_told(job), before[2] + told if before else told, end
            if end is not None:
                del self.jobs[id]
                self.ended.append(over)
            if end is not None or told and id not in self.begun:
                self.is_urgent = True
            self.begun = self.begun & self.jobs.keys() | ({id} if told else set())

    def _message(self) -> tuple[tuple, list[asyncio.Event]]:
        engine, facts = self.replica.engine, None if self.has_told else self.replica.facts
        events, ended, now = list(self.events.values()), self.ended, time.monotonic()
        stats = marks = None
        if ended or facts or now >= self.reported + REPORT_SECONDS:
            self.reported, stats = now, engine.stats()
            marks = engine.marks() if engine.kind == "text" else None
            marks = None if marks == self.told_marks else marks
            self.told_marks = self.told_marks if marks is None else marks
        self.has_told, self.n_sent = True, self.n_sent + bool(events)
        self.events, self.ended, self.is_urgent = {}, [], False
        return (self.n_sent, facts, stats, engine.reason, marks, events), ended


def news_of(job, wake: threading.Event) -> Callable:
    """A function that gives (what is new of a job, how it has ended; None if it has not). wake: is set when there may
    be news."""
    if isinstance(job.request, Request):
        job.wake = wake
        return lambda: text_news(job)
    threading.Thread(target=lambda: (job.wait(), wake.set()), name="rows of a job", daemon=True).start()
    return lambda: row_news(job)


def text_news(job) -> tuple[list[tuple], tuple | None]:
    """The end is (WHOLE, drafts checked, drafts accepted) or what `error_told` gives."""
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
    return told, (WHOLE, job.drafts.n_checked, job.drafts.n_accepted)


def row_news(job) -> tuple[list, tuple | None]:
    """All rows come at once."""
    if not job.wait(0):
        return [], None
    return ([], error_told(job.error)) if job.error else (job.rows if job.finish_reason else [], (WHOLE, None, None))
