"""A thread that works in rounds: what the schedulers of all kinds of engines share."""

import collections
import contextlib
import logging
import threading

from engine.request import EngineStopped, Fault
from kernels.card import CardError
from kernels.compile import CompileError


class Rounds:
    """Takes jobs, and repeats `run_round` in a thread of its own as long as there are any. A job has close(error).

    waiting: jobs that no round has taken. running: what rounds work on; `running_jobs` gives the jobs. After a failure
    of the cards, `reason` says why there are no more rounds, and every job ends with it.
    """

    def __init__(self, pipeline):
        """pipeline: has error, fault and settle(), and calls its on_fault when it fails (qengine.py's Pipeline)."""
        self.pipeline = pipeline
        self.waiting, self.running = collections.deque(), []
        self.changed = threading.Condition()        # guards waiting, guests, draining and closing
        self.draining = self.closing = False        # draining: no more jobs are taken; closing: no more rounds
        self.reason: str | None = None              # why the engine has stopped, a sentence
        self.fault: Fault | None = None
        self.stepping = threading.Lock()            # held while the pipeline is in use
        self.guests = 0                             # threads that want or have the pipeline: no round begins meanwhile
        self.thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        pipeline.on_fault = self._wake

    def run_round(self):
        raise NotImplementedError

    def running_jobs(self) -> list:
        raise NotImplementedError

    def submit(self, job):
        """Queue a job. Raises EngineStopped."""
        with self.changed:
            if self.draining or self.closing:
                raise EngineStopped(self.reason or "the engine was closed")
            self.waiting.append(job)
            self.changed.notify_all()

    def close(self, grace: float = 0.0):
        """Take no more jobs. Let those that were submitted go on for up to `grace` seconds, then end them and the
        thread."""
        with self.changed:
            self.draining = True
            self.changed.wait_for(lambda: self.closing or not (self.waiting or self.running), grace)
            self.closing = True
            self.changed.notify_all()
        self.thread.join()

    @contextlib.contextmanager
    def between_steps(self):
        """Context manager: the caller has the pipeline and the cache to itself. Raises EngineStopped after a failure or
        the end."""
        with self._as_guest(), self.stepping:
            if self.closing or self.reason is not None:
                raise EngineStopped(self.reason or "the engine was closed")
            yield

    @contextlib.contextmanager
    def _as_guest(self):
        """Holds the next round back. The lock alone is not fair: the scheduler's thread, which frees the lock and takes
        it again at once, would nearly always get it before a thread that waits."""
        with self.changed:
            self.guests += 1
        try:
            yield
        finally:
            with self.changed:
                self.guests -= 1
                self.changed.notify_all()

    def _run(self):
        try:
            while self._wait_for_work():
                with self.stepping:
                    self.run_round()
        except BaseException as error:      # a panic of a library in Rust is no Exception
            self.fault = self.pipeline.fault or Fault.of(error)
            if isinstance(error, (CardError, CompileError)):    # every request gets this reason, later ones too
                self.reason = f"the engine has stopped: {self.fault.what}"
            else:
                logging.getLogger("qengine").error("the engine has stopped", exc_info=error)
                self.reason = "the engine has stopped after an internal error"
        with contextlib.suppress(Exception):            # queued work must end before its memory is freed
            self.pipeline.settle()
        with self.changed:
            self.closing = True
            for job in [*self.running_jobs(), *self.waiting]:
                job.close(self.reason and EngineStopped(self.reason))
            self.running.clear()
            self.waiting.clear()
            self.changed.notify_all()

    def _wait_for_work(self) -> bool:
        """Waits for work. Returns False when the engine closes. Raises what the pipeline failed with, even if no
        request runs."""
        with self.changed:
            if self.draining and not (self.waiting or self.running):
                self.changed.notify_all()
            self.changed.wait_for(lambda: self.closing or self.pipeline.error
                                  or ((self.waiting or self.running) and not self.guests))
            if self.pipeline.error and not self.closing:
                raise self.pipeline.error
            return not self.closing

    def _wake(self):
        with self.changed:
            self.changed.notify_all()
