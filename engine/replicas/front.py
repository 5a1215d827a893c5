"""The front: all replicas of a model as one engine, which is what a server sees.

A Link has a thread with an event loop. It holds what is open, listens to each replica, and begins anew elsewhere what a
lost replica had. A replica counts as lost when its stream breaks, and as hanging when nothing at all has come from
it for MOST_LOOKS looks: one that is merely slow reports all the same. Looks are counted, not seconds: time
in which the front itself is suspended does not count against a replica.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import secrets
import threading
import time
import uuid
from collections import Counter

from engine.images import PAD, Limits, Reader
from engine.limits import MOST_DRAFTS
from engine.pooling import PoolingEngine, TextsRequest
from engine.prefix import marks_of
from engine.request import EngineStopped, ModelError, Request, RequestError, is_sparse
from engine.served import Facts
from engine.sight import pictures_of
from engine.text_engine import TextEngine, TextOnly
from engine.tokenizer import encode_prompt

from .jobs import MOST_FAILED, MOST_LOST, Differs, RemoteAnswer, RemoteJob, RemoteTexts, Try
from .links import LINKS
from .table import Layers, Replica, Table
from .wire import NEXT_SECONDS, UNHEARD, WHOLE, error_heard, fingerprint, packed

LOOK_SECONDS = 0.5          # between two looks at replicas and deadlines
MOST_LOOKS = 60             # without a message, after which a replica counts as hanging: 30 s, as Ray Serve has it
END_LOOKS = 20              # after the end of a call: by then the answer's end must have come by the stream
NOBODY_SECONDS = 60.0       # so long requests wait for a replica where there is none
ANSWER_SECONDS = 60.0       # that the first words of a replica that is up may take
POLL_SECONDS = 0.1
CLOSE_SECONDS = 5.0         # that a front which ends takes to tell replicas that their answers are cancelled
AGAIN_SECONDS = 0.5         # before the next try of an answer, or to listen to a replica whose stream has broken
LOST = object()             # how a try ends whose replica was lost

logger = logging.getLogger("qengine.requests")


class Link:
    """What joins a front with the replicas of one model.

    handle: of Ray Serve, for the deployment; it ends with the link. application: its name. on_facts(facts): is called
    with what each new replica says of itself, in the link's thread. recipe: see Table.
    """

    def __init__(self, handle, application: str, on_facts=lambda facts: None, recipe=None):
        self.handle, self.application, self.on_facts = handle, application, on_facts
        self.key, self.table = uuid.uuid4().hex, Table(recipe)
        self.jobs: dict[int, RemoteJob] = {}        # open ones by their id
        self.lock = threading.Lock()                # guards jobs, which replica each has, and closed
        self.listeners: dict[str, asyncio.Task] = {}
        self.streams = itertools.count(1)           # their numbers; of two of one replica the later one counts
        self.looks, self.numbers = Counter(), {}    # by replica: looks without a message; the number of its last one
        self.vocabulary = None          # the fingerprint of the front's own, once that is known
        self.alone_since, self.closed = time.monotonic(), False
        self.loop = asyncio.new_event_loop()
        LINKS[application] = self
        self.thread = threading.Thread(target=self._run, name="replicas", daemon=True)
        self.thread.start()

    def _run(self):
        asyncio.set_event_loop(self.loop)
        self.task = self.loop.create_task(self._look())
        self.loop.run_forever()
        self.loop.close()                           # what comes later is refused, and does not wait for ever

    def call(self, method: str, *arguments):
        """Has any replica run a method, and waits for what it returns; for threads other than the link's."""
        async def ask():
            return await getattr(self.handle, method).remote(*arguments)
        return asyncio.run_coroutine_threadsafe(ask(), self.loop)

    def first_facts(self, failure, meanwhile=lambda: None) -> dict:
        """Waits until a replica is up that is made by the front's recipe, and returns what it says of itself; others
        are about to be replaced by such ones. failure(): why there can be none, or None. meanwhile(): is called again
        and again. Raises ModelError with the failure, RequestError where nothing comes from a replica."""
        asked = None            # any call makes Ray Serve say which replicas there are
        while (facts := self.table.wanted()) is None:
            if asked is None or asked.done() and asked.exception() is not None:
                asked = self.call("hello")
            if (why := failure()) is not None:
                raise ModelError(why)
            if any(not one.facts and not one.is_leaving and time.time() - one.since > ANSWER_SECONDS
                   for one in self.table.listed()):
                raise RequestError("ray", "the replicas are up, but their answers do not get here: RAY_AUTH_MODE and "
                                          "the token must be the same on all nodes, and ports must be open")
            meanwhile()
            time.sleep(POLL_SECONDS)
        return facts

    def be_of(self, vocabulary: str):
        """The front cuts text by this vocabulary: replicas with another one get no requests."""
        self.vocabulary = vocabulary
        for one in self.table.listed():
            if one.facts and one.facts["vocabulary"] != vocabulary:
                self.table.exclude(one.id)

    def close(self):
        """Ends all that is open, and tells the replicas. They stay."""
        if not self.closed:
            self._in_loop(lambda: self.loop.create_task(self._end()))
            self.thread.join(CLOSE_SECONDS + 1)
            LINKS.pop(self.application, None)
            self.handle.shutdown()                      # or Ray Serve goes on to report for it

    async def _end(self):
        with self.lock:
            self.closed = True                          # from now on no job comes
        for job in list(self.jobs.values()):
            self._settle(job, EngineStopped("the server is shutting down"))
        for task in [self.task, *self.listeners.values()]:
            task.cancel()
        if others := asyncio.all_tasks() - {asyncio.current_task()}:    # each tells its replica before it ends
            await asyncio.wait(others, timeout=CLOSE_SECONDS)
        self.loop.stop()

    # ---- answers, from any thread ---------------------------------------------------------------------------

    def submit(self, job: RemoteJob):
        """Raises EngineStopped."""
        with self.lock:
            if self.closed:
                raise EngineStopped("the server is shutting down")
            self.jobs[job.id] = job
        self._in_loop(lambda: self.loop.create_task(self._answer(job)))

    def drop(self, job: RemoteJob):
        """Nobody wants the rest of it."""
        if self.jobs.get(job.id) is job:
            self._in_loop(lambda: self._settle(job, None))

    def _in_loop(self, work):
        with contextlib.suppress(RuntimeError):     # the loop is closed, and all has ended
            self.loop.call_soon_threadsafe(work)

    @property
    def n_unplaced(self) -> int:
        return sum(job.replica is None for job in list(self.jobs.values()))

    # ---- for router.py, in a thread of Ray Serve --------------------------------------------------------------

    def see(self, ids: list[str]):
        """Ray Serve has these replicas now."""
        if not self.table.listed():
            self.alone_since = time.monotonic()
        new, leaving = self.table.see(ids)
        if new or leaving:
            self._in_loop(lambda: self._changed(new, leaving))

    def place(self, id: int, replicas: list[str]) -> list[str]:
        """These replicas, the best one for an answer first; from now on it counts as open there."""
        job = self.jobs.get(id)
        ranked = self.table.rank(job.marks if job else (), replicas)
        if job and ranked:
            self.placed(id, ranked[0])
        return ranked

    def placed(self, id: int, replica: str):
        """An answer is sent to a replica."""
        with self.lock:
            job = self.jobs.get(id)
            if job is None or job.replica == replica:
                return
            self._leave(job)
            job.replica, job.sent_after = replica, time.perf_counter() - job.started
            job.opened = self.table.take(replica, job.marks)

    def _leave(self, job: RemoteJob):
        self.table.give_back(job.opened)
        job.replica = job.opened = None

    # ---- the loop: answers --------------------------------------------------------------------------------------

    async def _answer(self, job: RemoteJob):
        """Sends a job, again where its replica was lost. Ends when the job is settled."""
        while job.id in self.jobs:
            job.over = self.loop.create_future()
            call = self.loop.create_task(self._call(job, job.id))
            outcome = await job.over
            call.cancel()
            if outcome is not LOST:
                return
            await asyncio.sleep(AGAIN_SECONDS)

    async def _call(self, job: RemoteJob, id: int):
        """One try. Its end is heard in the replica's stream, unless the call itself fails or ends long before."""
        response = None
        try:
            data = packed(dataclasses.replace(job.request, timeout=job.seconds_left))
            response = self.handle.answer.remote(id, self.key, data)
            refused = await response
        except asyncio.CancelledError:
            if response is not None:
                response.cancel()
            raise
        except Exception as error:              # Ray's, of many kinds: the replica died, or cannot be reached
            if self.jobs.get(id) is job and job.replica is not None:
                self.table.silence(job.replica)         # until it reports again
            self._lose(job, id, "the call failed", in_a_line(error))
        else:
            if refused is None:
                for _ in range(END_LOOKS):
                    await asyncio.sleep(LOOK_SECONDS)
                self._lose(job, id, "its end was not heard")
            elif refused == UNHEARD:
                self._lose(job, id, refused[2])
            elif refused[0] == "stopped":
                self._stopped(job, id, refused[2])
            else:
                self._settle(job, error_heard(refused))

    def _stopped(self, job: RemoteJob, id: int, why: str):
        """The engine of a job's replica has stopped. Ray Serve will replace it."""
        if self.jobs.get(id) is job:
            self.table.fail(job.replica, why)
        self._lose(job, id, "its engine has stopped", in_a_line(why))

    def _lose(self, job: RemoteJob, id: int, seen: str, why: str = ""):
        """A try has failed, with its replica or before it had one. seen, why: of a Try."""
        if self.jobs.get(id) is not job:
            return
        job.tries.append(Try(job.replica, seen, why))
        if job.is_over():
            self._settle(job, job.overdue())
        elif job.n_lost >= MOST_LOST:
            self._give_up(job, f"{MOST_LOST} replicas were lost while they worked on this request")
        elif job.n_failed >= MOST_FAILED:
            self._give_up(job, f"no replica could be asked: {why or seen}")
        else:
            logger.info("lost request=%d %s; it begins again elsewhere", id, job.tries[-1])
            with self.lock:
                del self.jobs[id]
                self._leave(job)
                job.begin_again()
                self.jobs[job.id] = job
            job.over.set_result(LOST)

    def _give_up(self, job: RemoteJob, sentence: str):
        """Ends a job that was tried in vain, and writes down what was seen of its last tries."""
        logger.warning("gave up request=%d: %s; %s", job.id, sentence, "; ".join(map(str, job.tries[-MOST_LOST:])))
        self._settle(job, EngineStopped(sentence))

    def _settle(self, job: RemoteJob, error: Exception | None, close=None):
        """A job has ended. close: ends it, if not by close(error)."""
        with self.lock:
            if self.jobs.pop(job.id, None) is None:
                return
            replica = job.replica
            self._leave(job)
        close() if close else job.close(error)
        job.begun.set()
        if job.over is not None and not job.over.done():
            job.over.set_result(None)
        if replica is not None:
            self._part(replica)

    # ---- the loop: replicas ---------------------------------------------------------------------------------------

    def _changed(self, new: list[str], leaving: list[str]):
        for id in new:
            self.listeners[id] = self.loop.create_task(self._listen(id))
        for id in leaving:
            self._part(id)

    def _part(self, id: str):
        """Stops listening to a replica that Ray Serve wants to end, once nothing of this front is open there."""
        one = self.table.replicas.get(id)
        if one is not None and one.is_leaving and not any(job.replica == id for job in list(self.jobs.values())):
            self.table.forget(id)
            self.looks.pop(id, None)
            self.numbers.pop(id, None)
            task = self.listeners.pop(id, None)
            if task is not None and task is not asyncio.current_task(self.loop):
                task.cancel()

    async def _listen(self, id: str):
        """Reads one stream of a replica after the other, until the replica is forgotten. The next one is asked for
        while this one goes on, as that ends it. A replica that Ray Serve drains cannot be asked."""
        streams, asked = [], 0.0                # what is read, and the next one; when the last one was asked for
        one = self.table.replicas.get(id)
        try:
            while one is not None and self.table.replicas.get(id) is one:
                try:
                    if one.is_leaving and not streams:
                        raise EOFError("it cannot be asked for the next one")
                    asked = asked if streams else self._ask(one, streams)
                    async for message in streams[0]:
                        self._hear(id, message)
                        if self.table.replicas.get(id) is not one:      # it leaves, and this was its last answer's end
                            return
                        if len(streams) == 1 and not one.is_leaving and time.monotonic() > asked + NEXT_SECONDS:
                            asked = self._ask(one, streams)
                    streams.pop(0)
                except (Exception, asyncio.CancelledError) as error:    # Ray's, of many kinds; this is one of them, too
                    if asyncio.current_task().cancelling():
                        raise
                    cancel_all(streams)
                    self.table.silence(id)
                    self._lose_all(id, "its stream broke or ended", in_a_line(error))
                    await asyncio.sleep(AGAIN_SECONDS)
        finally:
            cancel_all(streams)

    def _ask(self, one: Replica, streams: list) -> float:
        """Asks a replica for a further stream. Returns when."""
        listen = self.handle.options(stream=True).listen
        streams.append(listen.remote(one.id, self.key, next(self.streams), bool(one.facts)))
        return time.monotonic()

    def _lose_all(self, id: str, seen: str, why: str = ""):
        """Nothing that is open at a replica is waited for any longer; one that leaves is forgotten by that."""
        for job in list(self.jobs.values()):
            if job.replica == id:
                self._lose(job, job.id, seen, why)
        self._part(id)

    def _hear(self, id: str, message: tuple):
        number, facts, stats, reason, marks, events = message
        self.looks[id] = 0
        before, self.numbers[id] = self.numbers.get(id, 0), number
        if number < before:                     # a new feed: the replica has ended what was in the one before
            before = 0
        self.table.report(id, facts, stats, reason, marks)
        if facts is not None:
            if self.vocabulary not in (None, facts["vocabulary"]):
                self.table.exclude(id)
            self.on_facts(facts)
        if number != before + bool(events):
            self._lose_all(id, "a message of it is missing")
        for event in events:
            self._take(id, *event)

    def _take(self, replica: str, id: int, n_before: int, counts: tuple, told: list, end: tuple | None):
        job = self.jobs.get(id)
        if job is None or job.replica != replica:
            return                  # it was given up; or Ray Serve has chosen otherwise, and says so after this event
        if n_before != job.n_again:
            return self._lose(job, id, "tokens from it are missing")
        try:
            job.hear(counts, told)
        except Differs:
            self._give_up(job, "the replica that worked on this request was lost, and another one computes other "
                               "tokens: ask again")
            return
        job.begun.set()
        if told:
            self.table.has_read(job.opened)
        if end is None:
            return
        if end[0] == WHOLE:
            self._settle(job, None, job.end)
        elif end[0] == "stopped":
            self._stopped(job, id, end[2])
        else:
            self._settle(job, error_heard(end))

    async def _look(self):
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            # Ray Serve may have sent an answer to a replica that is not listened to, as it has just left.
            for id in self.listeners.keys() | {job.replica for job in list(self.jobs.values())} - {None}:
                self.looks[id] += 1
                if self.looks[id] >= MOST_LOOKS:
                    self.table.silence(id)
                    self._lose_all(id, "it hangs")
            if any(one.state == "up" for one in self.table.listed()):
                self.alone_since = time.monotonic()
            is_alone = time.monotonic() - self.alone_since > NOBODY_SECONDS
            for job in list(self.jobs.values()):
                if job.is_over():
                    self._settle(job, job.overdue())
                elif is_alone:
                    self._give_up(job, "no replica of the model is up")


def cancel_all(calls: list):
    while calls:
        calls.pop().cancel()


def in_a_line(why) -> str:
    """The first line of an error of Ray, which may have many."""
    text = str(why).strip() or type(why).__name__
    return text.splitlines()[0][:200]


class Replicated:
    """What engines of all kinds have that are replicas. model: what is known of the model where it is not loaded."""

    fault = None

    def __init__(self, link: Link, model: Facts, facts: dict):
        """facts: of one replica, as it has told them."""
        self.link, self.kind = link, model.kind
        self.name, self.details = model.name, model.details
        self.tokenizer, self.template = model.tokenizer, model.template
        self.n_ctx, self.n_dims, self.one = facts["n_ctx"], facts["n_dims"], facts
        link.be_of(fingerprint(model.tokenizer))

    @property
    def replicas(self) -> list:
        return self.link.table.listed()

    @property
    def n_slots(self) -> int:
        return sum(one.n_slots for one in self.replicas if one.state == "up") or self.one["n_slots"]

    @property
    def cards(self) -> list[Layers]:
        return [Layers(f"{name}, on {one.hostname}") for one in self.replicas for name in one.facts.get("cards", ())]

    @property
    def layers(self) -> list[range]:
        return [range(*layers) for one in self.replicas for layers in one.facts.get("layers", ())]

    @property
    def reason(self) -> str | None:
        return "the engine was closed" if self.link.closed else None

    def stats(self) -> dict:
        """The counts of all replicas, as they last told them."""
        found = self.NOTHING | self.link.table.stats()
        found["requests_waiting"] += self.link.n_unplaced
        return found | {"kv_pages": max(1, found["kv_pages"])}

    def close(self, grace: float = 0.0):
        self.link.close()


class ReplicatedText(Replicated, TextOnly, TextEngine):
    """The replicas of a model that generates text."""

    counts_pipes = False
    NOTHING = dict.fromkeys(["requests_running", "requests_waiting", "kv_pages", "kv_pages_used", "checkpoints",
                             "checkpoints_on_card", "prompt_tokens", "cached_tokens", "generated_tokens",
                             "checkpoints_spilled", "checkpoints_fetched", "checkpoints_dropped"], 0) | {
        name: (0,) * MOST_DRAFTS for name in ("drafts_checked", "drafts_accepted")}

    def __init__(self, link: Link, model: Facts, facts: dict):
        super().__init__(link, model, facts)
        limits = facts["limits"]
        self.eyes = None if limits is None else Reader(Limits(*limits), self.tokenizer.control[PAD])

    def encode(self, text: str) -> list[int]:
        return encode_prompt(self.tokenizer, text, self.n_ctx)

    def submit(self, request: Request) -> RemoteAnswer:
        """Raises RequestError, EngineStopped. A grammar is checked where the answer is computed."""
        request.check(self.tokenizer.n_vocab, self.n_ctx)
        keys = pictures_of(request.prompt_ids, request.pictures, self.eyes).keys(request.prompt_ids)
        if request.seed is None:                # an answer that begins again draws the same numbers
            request = dataclasses.replace(request, seed=secrets.randbits(64))
        job = RemoteAnswer(request, self.link, marks_of(keys[:-1]))
        job.is_sparse = is_sparse(request, self.one["sparse"])
        self.link.submit(job)
        if request.grammar is not None:
            job.begun.wait()
            if job.error is not None:
                raise job.error
        return job

    def count_pipes(self) -> None:
        return None


class ReplicatedPooling(Replicated, PoolingEngine):
    """The replicas of a model that makes embeddings or scores."""

    NOTHING = dict.fromkeys(["requests_running", "requests_waiting", "kv_pages", "kv_pages_used", "requests", "texts",
                             "prompt_tokens", "passes"], 0)

    def submit(self, request: TextsRequest) -> RemoteTexts:
        """Raises RequestError, EngineStopped."""
        request.check(self.tokenizer.n_vocab, self.n_ctx, self.n_dims)
        job = RemoteTexts(request, self.link)
        self.link.submit(job)
        return job


def engine_of(link: Link, model: Facts, facts: dict) -> ReplicatedText | ReplicatedPooling:
    return (ReplicatedText if model.kind == "text" else ReplicatedPooling)(link, model, facts)
