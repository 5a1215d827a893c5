"""The engine of a pooling model: texts of all requests are packed into passes, without padding.

    pass     | text 0, whole | text 1, whole | ... | text 9, tokens 0 .. 127 |      rows of one pass, one launch each
    pass                                           | text 9, tokens 128 .. 201 | text 10, whole | ...

A text has a slot and pages of its own until its last pass is queued. It is cut only at multiples of 64 tokens, where a
pass has no more room. Its bits depend neither on the cuts nor on the other texts of its passes. Requests take turns, a
text each, so a short request does not wait for a long one.

The host is a few passes behind: it reads the sums of a pass (kernels/pool.py) while the cards compute the next one, and
makes embeddings or scores of them (engine/pooling.py).
"""

import collections
import dataclasses
from typing import NamedTuple

import numpy as np

from engine.details import ModelDetails
from engine.plan import CacheSizes, Demand
from engine.pooling import PoolingEngine, TextsJob, TextsRequest, mean_of, relevance, unit
from engine.prefix import PAGE_TOKENS, pages_for, whole_pages
from engine.request import RequestError
from engine.rounds import Rounds
from engine.worker import Task
from kernels.card import CardError

TEXTS = 64                  # most texts of a pass
CLASSIFIER = "cls.output.weight"        # of a reranker, [2, hidden]; so small that the host multiplies
NAN_ROWS = "the rows of a text hold a NaN: the model file is damaged, or a kernel is wrong"


def for_pooling(demand: Demand) -> Demand:
    """What a pooling model needs of a demand: a slot for each text of a pass, no checkpoints and no drafts. Raises
    RequestError."""
    if demand.sparse != "off":
        raise RequestError("sparse", "models for embeddings and reranking read texts whole: they take no --sparse")
    return dataclasses.replace(demand, slots=TEXTS, checkpoint_memory=0, checkpoint_host_memory=0, drafts=0,
                               packed=True)


def most_spans(rows: int, parts: int) -> int:
    """No pass of so many rows and parts has more spans."""
    return rows // PAGE_TOKENS + parts


class Packed(NamedTuple):
    """A pass over parts of several texts, as the cards read it: int32 arrays on the host."""

    inputs: np.ndarray      # [6, rows]: token id, slot, position, three rotary positions of each row
    table: np.ndarray       # [slots, pages of a slot]: the block table
    parts: np.ndarray       # [3, parts]: first row of each, the row behind its last one, position of its first token
    spans: np.ndarray       # [spans, 2], see kernels/pool.py

    def cut(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows of each part, positions of their first tokens), of the parts that have rows from `start` to end - 1."""
        first, last, position = self.parts
        begin, stop = np.maximum(first, start), np.minimum(last, end)
        inside = begin < stop
        return (stop - begin)[inside], (position + begin - first)[inside]


class Text:
    """A text of a job, with a slot and pages. n_done: tokens whose passes are queued; sums: those of its spans."""

    def __init__(self, job: TextsJob, index: int, slot: int, pages: list[int]):
        self.job, self.index, self.ids = job, index, job.request.texts[index]
        self.slot, self.pages, self.n_done, self.sums = slot, pages, 0, []


class Part(NamedTuple):
    """Tokens start .. end - 1 of a text, from row `row` of a pass on."""

    text: Text
    row: int
    start: int
    end: int

    def spans(self, pooling: str) -> list[tuple[int, int]]:
        """(first row, rows) of what is summed."""
        n = self.end - self.start
        if pooling == "mean":
            return [(self.row + at, min(PAGE_TOKENS, n - at)) for at in range(0, n, PAGE_TOKENS)]
        if pooling == "cls":
            return [(self.row, 1)] if self.start == 0 else []
        return [(self.row + n - 1, 1)] if self.end == len(self.text.ids) else []        # "last", "rank"


class Flight(NamedTuple):
    """A queued pass: its parts, how many spans each has, and the task that gives the sums."""

    parts: list[Part]
    counts: list[int]
    task: Task


class Packer(Rounds):
    """Packs the texts of jobs into passes, and lands what the cards have made of them. What is `waiting` and `running`
    are TextsJobs: a job runs from its first text's first pass on."""

    def __init__(self, pipeline, config, sizes: CacheSizes, chunk: int, finish):
        """finish(text): the row of a text, of its sums."""
        super().__init__(pipeline)
        self.config, self.chunk, self.finish = config, chunk, finish
        self.table = np.zeros((sizes.n_slots, sizes.max_pages), np.int32)
        self.free_slots, self.free_pages = (list(reversed(range(n))) for n in (sizes.n_slots, sizes.n_pages))
        self.n_pages = sizes.n_pages
        self.turns = collections.deque()        # (job, number of its next text) of running jobs that have texts left
        self.cut: Text | None = None            # the text whose next part the next pass begins with
        self.flights: collections.deque[Flight] = collections.deque()
        self.most_flights = 2 * pipeline.n_groups
        self.totals = dict.fromkeys(("requests", "texts", "prompt_tokens", "passes"), 0)

    def running_jobs(self) -> list[TextsJob]:
        return self.running

    def stats(self) -> dict[str, int]:
        return self.totals | {"requests_running": len(self.running), "requests_waiting": len(self.waiting),
                              "kv_pages": self.n_pages, "kv_pages_used": self.n_pages - len(self.free_pages)}

    def run_round(self):
        """Queue a pass if there are texts for one. Land the oldest pass if there are none, or if enough are queued."""
        self._drop_ended()
        parts = self._fill()
        if parts:
            self._queue(parts)
        if self.flights and (not parts or len(self.flights) >= self.most_flights):
            self._land(self.flights.popleft())

    def _drop_ended(self):
        """End the jobs that were cancelled or have taken longer than they may."""
        with self.changed:
            ended = [job for job in [*self.running, *self.waiting] if job.is_over()]
            for job in ended:
                (self.running if job in self.running else self.waiting).remove(job)
                job.close(job.overdue())
        if ended:
            self.turns = collections.deque(turn for turn in self.turns if turn[0] not in ended)
            if self.cut and self.cut.job in ended:
                self._release(self.cut)
                self.cut = None

    def _fill(self) -> list[Part]:
        """The parts of the next pass."""
        parts, row = [], 0
        while row < self.chunk and (text := self.cut or self._next_text()):
            self.cut, left, room = None, len(text.ids) - text.n_done, self.chunk - row
            n = left if left <= room else whole_pages(room)
            if n < left:
                self.cut = text
            if n:
                parts.append(Part(text, row, text.n_done, text.n_done + n))
                text.n_done, row = text.n_done + n, row + n
            if self.cut:
                break
        return parts

    def _next_text(self) -> Text | None:
        """The text whose turn it is, with a slot and pages; None if there is no text, or if it must wait for these."""
        with self.changed:
            while self.waiting:
                self.running.append(self.waiting.popleft())
                self.turns.append((self.running[-1], 0))
                self.totals["requests"] += 1
        if not self.turns or not self.free_slots:
            return None
        job, index = self.turns[0]
        n_pages = pages_for(len(job.request.texts[index]))
        if n_pages > len(self.free_pages):
            return None
        self.turns.popleft()
        if index + 1 < len(job.request.texts):
            self.turns.append((job, index + 1))
        text = Text(job, index, self.free_slots.pop(), [self.free_pages.pop() for _ in range(n_pages)])
        self.table[text.slot, :n_pages] = text.pages
        return text

    def _queue(self, parts: list[Part]):
        spans = [part.spans(self.config.pooling) for part in parts]
        lengths, starts = [part.end - part.start for part in parts], [part.start for part in parts]
        inputs = np.empty((6, sum(lengths)), np.int32)
        inputs[0] = np.concatenate([part.text.ids[part.start:part.end] for part in parts])
        inputs[1] = np.repeat([part.text.slot for part in parts], lengths)
        inputs[2:] = np.concatenate([np.arange(part.start, part.end) for part in parts])
        rows = [part.row for part in parts]
        packed = Packed(inputs, self.table.copy(), np.array([rows, np.add(rows, lengths), starts], np.int32),
                        np.array([span for each in spans for span in each], np.int32).reshape(-1, 2))
        self.flights.append(Flight(parts, [len(each) for each in spans], self.pipeline.pool(packed)))
        self.totals["passes"] += 1
        self.totals["prompt_tokens"] += sum(lengths)
        for part in parts:
            if part.end == len(part.text.ids):
                self._release(part.text)

    def _release(self, text: Text):
        """The slot and the pages of a text may go to the next one: all work that uses them is queued."""
        self.free_slots.append(text.slot)
        self.free_pages.extend(reversed(text.pages))

    def _land(self, flight: Flight):
        """Wait for a pass, and hand out the rows of the texts that end in it."""
        sums, arrived = flight.task.result()
        flight.task.worker.wait(arrived)
        sums, at = sums.copy(), 0               # the array is used again
        if not np.isfinite(sums).all():
            raise CardError(NAN_ROWS)
        for part, count in zip(flight.parts, flight.counts):
            text = part.text
            text.sums.extend(sums[at:at + count])
            at += count
            if part.end == len(text.ids) and text.job in self.running:
                self.totals["texts"] += 1
                text.job.land(text.index, self.finish(text))
                if not text.job.n_missing:
                    self.running.remove(text.job)


class Pooling(PoolingEngine):
    """A loaded embedding or reranking model, as `qengine.load` gives it.

        engine = qengine.load("embedding.gguf")
        rows = engine.embed(["A text.", "Another one."])        # float32 [2, n_dims]
    """

    def __init__(self, opened, pipeline, sizes: CacheSizes, planner):
        """opened: qengine.py's OpenModel; planner: its Planner."""
        self.opened, self.config = opened, opened.config
        self.tokenizer, self.template = opened.tokenizer, opened.template
        self.kind, self.name, self.details = opened.kind, opened.name, ModelDetails.of(opened.weights)
        self.pipeline, self.chunk, self.n_ctx = pipeline, planner.plan.chunk, planner.demand.n_ctx
        self.n_slots, self.n_dims = sizes.n_slots, opened.config.hidden_dim
        self.cards, self.spare = [stage.card for stage in pipeline.stages], planner.spare
        self.layers = [stage.layers for stage in pipeline.stages]
        is_ranking = self.kind == "reranking"
        self.classifier = opened.weights.floats(CLASSIFIER) if is_ranking else None
        finish = self.score if is_ranking else self.embedding
        self.scheduler = Packer(pipeline, self.config, sizes, self.chunk, finish)
        self.scheduler.thread.start()

    @property
    def reason(self) -> str | None:
        """Why the engine has stopped, a sentence; None while it works."""
        return self.scheduler.reason

    @property
    def fault(self):
        """What has stopped the engine; None while it works."""
        return self.scheduler.fault

    def submit(self, request: TextsRequest) -> TextsJob:
        """See PoolingEngine."""
        request.check(self.config.n_vocab, self.n_ctx, self.n_dims)
        job = TextsJob(request)
        self.scheduler.submit(job)
        return job

    def stats(self) -> dict[str, int]:
        """See PoolingEngine."""
        return self.scheduler.stats()

    def embedding(self, text: Text) -> np.ndarray:
        """The embedding of a text, of its sums."""
        row = mean_of(text.sums, len(text.ids)) if self.config.pooling == "mean" else text.sums[0]
        return unit(row, text.job.request.dimensions)

    def score(self, text: Text) -> np.ndarray:
        """The score of a query and a document, of the sums of their text."""
        return relevance(text.sums[0], self.classifier)

    def close(self, grace: float = 0.0):
        """Close the engine. New requests are refused, and running ones get `grace` seconds to finish."""
        self.scheduler.close(grace)
        self.pipeline.close()
