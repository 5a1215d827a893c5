"""How many instructions a decode step gives each execution pipe of a card (dp4a, half2, ...), counted on an emulated
card while the engine runs."""

import contextlib
import math
import threading
import time

from engine.recordings import Recordings
from engine.request import RequestError
from kernels.assembler import find_assembler
from kernels.card import Card
from kernels.emulated.cards import CARDS, CardModel
from kernels.emulated.estimate import PIPES, SECTOR, Counts

PIPES_SECONDS = 1           # at least so long from one counted step to the next
WAIT_SECONDS = 1            # for an answer to begin, where none is being written
LOOKS = 8                   # at steps, for one whose shape is ready
LOOK_SECONDS = 0.002        # between two looks whether one has begun: a short answer is over in a tenth of a second


@contextlib.contextmanager
def launching_as(card: Card, model: CardModel):
    """While the `with` body runs, the grids of launches on an emulated card are made for the SMs of `model`, and tensor
    cores multiply by the instruction that it has. Other code remains that of the emulated card's own compute
    capability."""
    own = card.n_sms, card.like
    card.n_sms, card.like = model.n_sms, model
    try:
        yield
    finally:
        card.n_sms, card.like = own


class PipeMeter:
    """Counts what a decode step of a running engine does on an emulated card, with the grids that the card MODEL would
    get.

    A counted step takes a hundred times as long as others. So a step is counted only when somebody asks, and at most
    once in PIPES_SECONDS. The code that counts is compiled before, for each shape of steps; answers go on meanwhile.
    The code for a step of one plain answer is compiled at the first call, whether or not an answer is being written: a
    short answer would be over before its code is compiled.

    pipeline, scheduler: those of an engine on one card. Such an engine has one group of answers.
    """

    MODEL = CARDS[0]

    def __init__(self, pipeline, scheduler):
        self.pipeline, self.scheduler, self.stage = pipeline, scheduler, pipeline.last
        self.busy = threading.Lock()                # held by the thread that counts; other threads get `last`
        self.last = None, -math.inf                 # the step that was counted last, and when
        self.recordings = Recordings(self.stage.card)       # of the stage's steps, with the grids of MODEL
        self.ready = set()                          # shapes of steps for which what counts them is compiled

    def forget(self):
        """Forget what was counted and compiled: the stage has other kernels now. The caller is between steps."""
        self.recordings.clear()
        self.ready.clear()
        self.last = None, -math.inf

    def can_count(self) -> bool:
        return [stage.card.kind for stage in self.pipeline.stages] == ["emulated"]

    def count(self) -> dict | None:
        """What the next decode step does, or what the last counted one did; None before the first counted step. Waits
        for WAIT_SECONDS at most if no answer is being written.

        tokens, launches; pipes: instructions of warps by pipe; megabytes that memory must move; card: the name of
        MODEL; estimated_seconds on that card, None where there is no ptxas; seconds_ago: how long ago it was counted.
        """
        if self.busy.acquire(blocking=False):
            try:
                if not self.ready:
                    self._get_ready_for_one()
                if time.monotonic() - self.last[1] > PIPES_SECONDS and self._wait():
                    self._count()
            finally:
                self.busy.release()
        step, at = self.last
        return step and step | {"seconds_ago": time.monotonic() - at}

    def _get_ready_for_one(self):
        with contextlib.suppress(RequestError):             # if no slot is free, compile for what runs
            with self.scheduler.borrow_slot(1, leaves_pictures=True) as sequence:
                shape = self.scheduler.shape([sequence], 0)
            self._get_ready(shape._replace(width=1, n_drafts=0))

    @contextlib.contextmanager
    def _without_drafts(self):
        """While the `with` body runs, no further drafts are planned, so that most steps have one shape. Drafts of a
        model's own block are planned a step ahead, so one more step may check some. What an answer says does not
        depend on that."""
        self.scheduler.pace.is_paused = True
        try:
            yield
        finally:
            self.scheduler.pace.is_paused = False

    def _get_ready(self, shape):
        """Compiles what counts steps of this shape."""
        stage = self.stage
        with self.scheduler.between_steps(leaves_pictures=True), self._as_model():
            recordings = [stage.recordings.of(stage.launch_step, shape, 0, buffer)
                          for buffer in range(len(stage.batches[0].outcomes))]
        for recording in recordings:
            stage.card.prepare_counting(recording, self.MODEL)
        self.ready.add(shape)

    def _wait(self) -> bool:
        """Whether an answer is being written; waits for one if not. Otherwise, who asks when a request begins would
        miss a short answer."""
        end = time.monotonic() + WAIT_SECONDS
        while not (found := self.scheduler.answering(0)) and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
        return bool(found)

    def _count(self):
        """Counts the next step that has a shape for which all is compiled. If there is none among the next LOOKS
        steps, the last one's is compiled, and nothing counted."""
        with self._without_drafts():            # in the steps between two looks, too: they plan those that come
            for _ in range(LOOKS):
                with self.scheduler.between_steps(leaves_pictures=True), self._as_model():
                    batch = self.scheduler.answering(0)
                    if not batch:
                        return
                    shape = self.scheduler.shape(batch, 0)
                    if shape in self.ready:
                        with self.stage.card.counting() as log:
                            self.scheduler.decode(0)
                            self.pipeline.settle()
                        self.last = summary(log, len(batch), self.MODEL), time.monotonic()
                        return
                time.sleep(LOOK_SECONDS)                    # or the next round could not begin
        self._get_ready(shape)

    @contextlib.contextmanager
    def _as_model(self):
        """While the `with` body runs, the stage launches with the grids of MODEL, from the meter's own recordings."""
        self.pipeline.settle()
        own, self.stage.recordings = self.stage.recordings, self.recordings
        try:
            with launching_as(self.stage.card, self.MODEL):
                yield
        finally:
            self.stage.recordings = own


def summary(log: list, n_tokens: int, model: CardModel) -> dict:
    """What a counted step did, as `PipeMeter.count` returns it. log: the launches of the step."""
    counts = sum((launch.counts for launch in log), Counts())
    pipes = {name.rstrip("_"): n for name in PIPES if name != "move" and (n := getattr(counts, name))}
    seconds = sum(launch.estimate(model).seconds for launch in log) if find_assembler() else None
    return {"tokens": n_tokens, "launches": len(log), "pipes": pipes, "card": model.name, "estimated_seconds": seconds,
            "megabytes": SECTOR * counts.distinct_sectors / 1e6}
