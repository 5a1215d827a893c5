"""The replica: what Ray Serve runs beside the cards, an engine and the feeds of the fronts.

Ray Serve calls `answer` once for each answer, and the call lasts as long as the answer; a call that is cancelled
cancels it. What happens to the answers of a front meanwhile goes through the front's Feed (feed.py).
"""

import asyncio
import importlib
import os
import socket
import time
from dataclasses import dataclass, field

from engine.limits import VERSION
from engine.request import EngineStopped, ModelError, RequestError
from engine.text_engine import sees
from kernels.card import CardError
from kernels.compile import CompileError

from .feed import Feed
from .wire import UNHEARD, error_told, fingerprint, unpacked

LEASE = 5.0                 # seconds that a stream without answers lasts: one that is cancelled may not notice


@dataclass(frozen=True)
class Recipe:
    """How every replica of a model is made. maker: "module:function" of a function that is called with the arguments
    and returns an engine. It is a name, so that the front need not import what it never uses."""

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
    import ray                  # here alone, so that the rest runs without it
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
        self.feeds: dict[str, Feed] = {}        # by the keys of their fronts

    async def hello(self) -> dict:
        """The facts of an engine that is up."""
        return self.facts

    async def answer(self, id: int, front: str, data: bytes) -> tuple | None:
        """Has the engine answer a request of a front. Returns when the answer has ended, however it did; an error as
        `error_told` has it where it could not even begin, or UNHEARD."""
        request = unpacked(data)
        try:
            if getattr(request, "grammar", None) is None:
                job = self.engine.submit(request)
            else:
                job = await self._submitted(request)
        except (RequestError, EngineStopped) as error:
            return error_told(error)
        feed = self.feed(front)
        over = feed.add(id, job)
        try:
            await over.wait()
        finally:
            job.cancel()        # the front has cancelled the call; of one that has ended this changes nothing
        return UNHEARD if feed.is_closed else None

    async def _submitted(self, request):
        """The job of a request with a grammar, which takes the engine up to seconds: the others' events go on. Where
        the call is cancelled meanwhile, the job is, too."""
        begun = asyncio.get_running_loop().run_in_executor(None, self.engine.submit, request)
        try:
            return await asyncio.shield(begun)
        except asyncio.CancelledError:
            begun.add_done_callback(lambda job: job.exception() or job.result().cancel())
            raise

    def feed(self, front: str) -> Feed:
        self._drop_closed()
        if front not in self.feeds:
            self.feeds[front] = feed = Feed(self.engine, self.facts, asyncio.get_running_loop())
            feed.thread.start()
        return self.feeds[front]

    def _drop_closed(self):
        self.feeds = {key: feed for key, feed in self.feeds.items() if not feed.is_closed}

    async def listen(self, replica: str, front: str, stream: int, knows: bool):
        """Gives the messages of a front's feed until the front has another stream, or for LEASE seconds, and longer
        while there is something to tell. replica: the id of this one, for router.py. stream, knows: see Feed.listen."""
        feed, end = self.feed(front), time.monotonic() + LEASE
        messages = feed.listen(stream, knows)
        try:
            while messages and (time.monotonic() < end or not feed.is_told()) and (message := await messages.get()):
                yield message
        finally:
            feed.leave(stream)

    async def record_autoscaling_stats(self) -> dict[str, int]:
        """What scaling.py counts; Ray Serve asks this again and again."""
        return {"answers": sum(len(feed.jobs) for feed in self.feeds.values())}

    async def check_health(self):
        """Ray Serve asks this again and again, and starts another replica where it raises or does not return. Fronts
        that are gone are found meanwhile."""
        for feed in self.feeds.values():
            feed.check()
        self._drop_closed()
        if self.engine.reason is not None:
            raise RuntimeError(self.engine.reason)

    def __del__(self):
        if engine := getattr(self, "engine", None):
            engine.close()
