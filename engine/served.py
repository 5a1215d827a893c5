"""The models of one server: which of them a request means, which are loaded, and which have to make room.

A model is either always loaded, or it is loaded at its first request and put away when nobody has asked it for a while.
What is loaded together fits the cards. Where it would not, the idle model goes that nobody has asked for the longest
time. A model that answers a request, or for which a request waits, never goes.

One thread loads and puts away, one model at a time. A server begins at most LOADS loads in LOADS_SECONDS, whatever its
clients ask for; a request that would need another one is refused until then. A load for which there is no memory does
not count. It is tried again after BUSY_SECONDS at the earliest.
"""

import collections
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.details import ModelDetails
from engine.images import Limits
from engine.pooling import PoolingEngine, RerankTemplate
from engine.request import EngineStopped
from engine.template import ChatTemplate
from engine.text_engine import TextEngine, sees, wrong_kind
from engine.tokenizer import Tokenizer
from kernels.card import OutOfMemory

LOADS, LOADS_SECONDS = 4, 60.0      # the most loads that begin in so many seconds
MOST_AWAITING = 32          # requests that wait for models to be loaded, of all models together
AGAIN_SECONDS = 20.0        # after a load that failed, its error is the answer for so long
BUSY_SECONDS = 5.0          # the same where other models, which are answering, have the memory
POLL_SECONDS = 0.05         # between two looks whether a request that waits is still wanted
LONGEST_IDLE = 365 * 86400.0        # what is to stay longer than so many seconds stays until others need its memory

logger = logging.getLogger("qengine.requests")      # the server's log: a line for each load


class NotLoaded(Exception):
    """A model is not loaded, and the request cannot wait for it. retry_after: seconds after which it may be asked
    again."""

    def __init__(self, text: str, retry_after: float):
        super().__init__(text)
        self.retry_after = max(1, math.ceil(retry_after))


@dataclass(frozen=True)
class Facts:
    """What is known of a model, loaded or not. The fields mean what they mean in TextEngine and PoolingEngine. limits:
    of the pictures that it takes; None: it takes none."""

    name: str
    kind: str
    n_ctx: int
    tokenizer: Tokenizer
    template: ChatTemplate | RerankTemplate | None
    details: ModelDetails
    limits: Limits | None = None

    @property
    def sees(self) -> bool:
        return self.limits is not None

    @classmethod
    def of(cls, engine: TextEngine | PoolingEngine) -> "Facts":
        return cls(engine.name, engine.kind, engine.n_ctx, engine.tokenizer, engine.template, engine.details,
                   engine.eyes.limits if sees(engine) else None)


@dataclass(frozen=True)
class Defaults:
    """What the answers of a model obey where a request says nothing. sampling: fields of Request. thinking: the default
    of the template's enable_thinking; template_kwargs: of its other variables."""

    sampling: dict = field(default_factory=dict)
    thinking: bool | None = None
    template_kwargs: dict = field(default_factory=dict)


class Served:
    """A model of a server. `Models` changes it.

    engine: None while the model is not loaded. load: makes an engine of it; None: the model is always loaded. It raises
    OutOfMemory, having taken no memory, if the model does not fit the cards now. idle: after so many seconds without a
    request the model is put away; math.inf: only to make room. aliases: further names. facts: of a model that is not
    loaded.
    """

    def __init__(self, engine: TextEngine | PoolingEngine | None, aliases=(), defaults: Defaults = Defaults(), *,
                 facts: Facts | None = None, load: Callable | None = None, idle: float = math.inf):
        self.engine, self.aliases, self.defaults = engine, tuple(aliases), defaults
        self._facts, self.load, self.idle = facts, load, bounded(idle)
        self.n_users = self.n_awaiting = self.n_loads = 0       # requests that hold the engine, that wait for it
        self.used = time.monotonic()        # when a request gave it back
        self.patience = self.idle           # `idle`, unless a client has asked for something else since it was loaded
        self.is_loading = False
        self.refusal, self.refused_until = "", 0.0      # why it cannot be loaded until then, by time.monotonic()

    @property
    def facts(self) -> Facts:
        engine = self.engine                # it may be put away meanwhile
        return self._facts if engine is None else Facts.of(engine)

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def kind(self) -> str:
        return self.facts.kind

    @property
    def state(self) -> str:
        """In the words of llama.cpp's router."""
        if self.engine is None:
            return "loading" if self.is_loading else "unloaded"
        return "loaded" if self.engine.reason is None else "failed"

    def is_named(self, name: str | None) -> bool:
        """Whether this is its name or an alias. Ollama's clients write a tag behind names."""
        return name is not None and name.removesuffix(":latest") in {
            one.removesuffix(":latest") for one in (self.name, *self.aliases)}

    def has_in_name(self, part: str) -> bool:
        return any(part.casefold() in one.casefold() for one in (self.name, *self.aliases))

    def may_go(self) -> bool:
        """Whether it can be put away now."""
        return bool(self.load and self.engine is not None and not self.n_users and not self.n_awaiting)

    def seconds_left(self) -> float:
        """Seconds until it is put away, if nobody asks it before; math.inf: only to make room."""
        return max(0.0, self.used + self.patience - time.monotonic()) if self.load else math.inf

    def leaves(self) -> float:
        """When it is put away, by time.monotonic(), if nobody asks it before. One that has failed goes at once: the
        next request has it loaded anew."""
        return 0.0 if self.engine.reason is not None else self.used + self.patience


class Models:
    """The models of a server. A request that names no model gets the first one.

    put_away: gives back the memory of an engine.
    """

    def __init__(self, served: list[Served], put_away: Callable = lambda engine: engine.close()):
        self.served, self.put_away = list(served), put_away
        self.changed = threading.Condition()        # guards the fields of all Served
        self.begun = collections.deque(maxlen=LOADS)    # when the last loads began, by time.monotonic()
        self.closing = False
        self.thread = None
        if any(one.load for one in self.served):
            self.thread = threading.Thread(target=self._run, name="model loader", daemon=True)
            self.thread.start()

    @property
    def first(self) -> Served:
        return self.served[0]

    @property
    def engines(self) -> list:
        """Of the models that are loaded."""
        return [engine for one in self.served if (engine := one.engine) is not None]

    # ---- which one ----------------------------------------------------------------------------------------

    def choose(self, kind: str | None, name: str | None) -> Served | None:
        """The model that a request means. kind: that it needs; None: any. The model of this name or alias comes first,
        then the first model with `name` as a part of its name, then the first one. None if no model is of the kind.
        Raises RequestError if the model of this name is of another kind."""
        named = [one for one in self.served if one.is_named(name)]
        fitting = [one for one in named or self.served if kind in (None, one.kind)]
        if named and not fitting:
            raise wrong_kind(named[0], kind)
        similar = [one for one in fitting if name and one.has_in_name(name)]
        return next(iter(similar or fitting), None)

    # ---- lending ------------------------------------------------------------------------------------------

    def lend(self, served: Served, go_on: Callable[[], None]) -> TextEngine | PoolingEngine:
        """The engine of a model, which is loaded first if need be; it stays until `give_back`. go_on() is called while
        the model is loaded, and raises what the request ends with if it is not to wait any longer. Raises NotLoaded,
        EngineStopped."""
        with self.changed:
            if served.engine is None or served.engine.reason is not None and served.load:
                self._await(served, go_on)
            if served.engine.reason is not None:
                raise EngineStopped(served.engine.reason)
            served.n_users += 1
            return served.engine

    def _await(self, served: Served, go_on: Callable[[], None]):
        """Waits until a model is loaded. The caller holds `changed`."""
        if sum(one.n_awaiting for one in self.served) >= MOST_AWAITING:
            raise NotLoaded(f"the model {served.name} is not loaded, and {MOST_AWAITING} requests wait for models "
                            "already", BUSY_SECONDS)
        served.n_awaiting += 1
        self.changed.notify_all()
        try:
            while served.engine is None or served.engine.reason is not None:
                if self.closing:
                    raise EngineStopped("the server is shutting down")
                if (left := served.refused_until - time.monotonic()) > 0 and not served.is_loading:
                    raise NotLoaded(served.refusal, left)
                go_on()
                self.changed.wait(POLL_SECONDS)
        finally:
            served.n_awaiting -= 1

    def borrow(self, served: Served) -> TextEngine | PoolingEngine:
        """The engine of a model that is loaded; it stays until `give_back`. Raises NotLoaded, EngineStopped."""
        with self.changed:
            if served.engine is None:
                raise NotLoaded(f"the model {served.name} is not loaded: a request for an answer loads it",
                                BUSY_SECONDS)
            if served.engine.reason is not None:
                raise EngineStopped(served.engine.reason)
            served.n_users += 1
            return served.engine

    @contextlib.contextmanager
    def held(self):
        """The engines of all models that are loaded, failed ones as well; they stay while the `with` body runs."""
        with self.changed:
            loaded = [one for one in self.served if one.engine is not None]
            engines = [one.engine for one in loaded]
            for one in loaded:
                one.n_users += 1
        try:
            yield engines
        finally:
            for one in loaded:
                self.give_back(one, is_use=False)

    def give_back(self, served: Served, is_use: bool = True):
        """A request needs the engine no longer. is_use: whether it counts, so that the model is not idle."""
        with self.changed:
            served.n_users -= 1
            if is_use:
                served.used = time.monotonic()
            self.changed.notify_all()

    def keep(self, served: Served, seconds: float):
        """A client wants a model put away so many seconds after its last request, until the model is loaded anew. A
        model that is always loaded stays."""
        with self.changed:
            served.patience = bounded(seconds)
            self.changed.notify_all()

    def replace(self, engine, other):
        """Another engine answers for the model of `engine`."""
        with self.changed:
            next(one for one in self.served if one.engine is engine).engine = other

    # ---- loading and putting away -------------------------------------------------------------------------

    def _run(self):
        while not self.closing:
            with self.changed:
                wanted, leaving = self._wanted(), self._leaving()
                if wanted is None and leaving is None:
                    self.changed.wait(self._seconds())
                    continue
                if leaving is None:
                    wanted.is_loading = True
            if leaving is not None:
                self._put_away(leaving, "it has failed" if leaving.engine.reason is not None else "nobody asks it")
            else:
                self._load(wanted)

    def _wanted(self) -> Served | None:
        """The model that is to be loaded next. The caller holds `changed`, here and in what follows."""
        now = time.monotonic()
        return next((one for one in self.served if one.n_awaiting and one.engine is None
                     and one.refused_until <= now), None)

    def _leaving(self) -> Served | None:
        """A model that is to be put away now: it has been idle for long enough, or it has failed."""
        now = time.monotonic()
        return next((one for one in self.served if one.load and one.engine is not None and not one.n_users
                     and (one.engine.reason is not None or one.may_go() and one.leaves() <= now)), None)

    def _seconds(self) -> float | None:
        """How long nothing is to be done, unless a request comes; None: until one comes."""
        times = [one.leaves() for one in self.served if one.may_go() and one.leaves() < math.inf]
        # A request that still waits for a model then has slept through its refusal, and has it loaded.
        times += [one.refused_until for one in self.served if one.n_awaiting and one.engine is None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _load(self, served: Served):
        """Loads a model, and puts others away if it does not fit beside them. Raises nothing: the requests that wait
        for the model get the error."""
        engine, refusal, seconds, began = None, "", 0.0, time.monotonic()
        if len(self.begun) == LOADS and (seconds := self.begun[0] + LOADS_SECONDS - began) > 0:
            refusal = (f"the model {served.name} is not loaded, and this server has loaded {LOADS} models in the last "
                       f"{LOADS_SECONDS:g} seconds, which is the most it does")
        else:
            self.begun.append(began)
            logger.info("loading model=%s", served.name)
            try:
                engine = self._fitted(served)
            except OutOfMemory as error:
                self.begun.pop()        # nothing was loaded; the seconds below keep this seldom
                others = [one.name for one in self.served if one.load and one.engine is not None]
                seconds = BUSY_SECONDS if others else AGAIN_SECONDS
                refusal = (f"the model {served.name} does not fit beside what answers now: {', '.join(others)}"
                           if others else f"the model {served.name} cannot be loaded: {sentence_of(error)}")
            except Exception as error:
                seconds, refusal = AGAIN_SECONDS, f"the model {served.name} cannot be loaded: {sentence_of(error)}"
                logger.info("failed model=%s", served.name, exc_info=error)
        with self.changed:
            served.is_loading, served.engine = False, engine
            if engine is not None:
                served.used, served.patience = time.monotonic(), served.idle
                served.n_loads += 1
            else:
                served.refusal, served.refused_until = refusal, time.monotonic() + seconds
            self.changed.notify_all()
        logger.info("loaded model=%s seconds=%.1f" if engine else "not loaded model=%s seconds=%.1f: %s", served.name,
                    time.monotonic() - began, *(() if engine else (refusal,)))

    def _fitted(self, served: Served):
        """The engine of a model. Other models are put away one after the other until it fits."""
        while True:
            try:
                return served.load()
            except OutOfMemory:
                with self.changed:
                    idle = [one for one in self.served if one.may_go()]
                if not idle:
                    raise
                self._put_away(min(idle, key=lambda one: one.used), f"{served.name} needs its memory")

    def _put_away(self, served: Served, reason: str):
        """Puts a model away unless a request has come for it since."""
        with self.changed:
            if served.n_users or served.engine.reason is None and not served.may_go():
                return
            engine, served.engine = served.engine, None
        try:
            self.put_away(engine)
        except Exception as error:      # a card that has failed raises its error again
            logger.info("closing model=%s", served.name, exc_info=error)
        logger.info("put away model=%s: %s", served.name, reason)

    def close(self, seconds: float = 10.0):
        """Closes all engines, and refuses what comes after. A load that takes longer than so many seconds is left to
        the end of the process."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        if self.thread:
            self.thread.join(seconds)
        for engine in self.engines:
            with contextlib.suppress(Exception):
                engine.close()


def bounded(seconds: float) -> float:
    """Seconds without a request; math.inf for more than LONGEST_IDLE, which may be too large for clocks and
    calendars."""
    return seconds if seconds <= LONGEST_IDLE else math.inf


def sentence_of(error: Exception) -> str:
    """The text of an error in one line. Between the first line and the last one stands a table, if there is more."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0].rstrip(':')}; {lines[-1]}"
