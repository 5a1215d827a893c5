"""Workers: the threads that give cards their work.

Every card has a thread, its worker, that alone gives it work: whoever wants something of a stage posts a task. A task
may wait for tasks that were posted before it, to other workers, too, and thus for none that waits for it.
"""

import contextlib
import functools
import queue
import threading

from kernels.card import Card, CardError, NoAnswer

DEADLINE = 120.0            # seconds after which a card is broken that somebody waits for and that does nothing
LOOKS = 20                  # at whether it does something, in that time


class Task:
    """Something that a worker is to do, and what came of it."""

    def __init__(self, worker: "Worker", work, is_vital: bool):
        self.worker, self.work, self.is_vital = worker, work, is_vital
        self.value = self.error = None
        self.over = threading.Event()

    def do(self):
        work, self.work = self.work, None       # which may hold much, and others may hold this
        self.end(work())

    def end(self, value=None, error: BaseException | None = None):
        if not self.over.is_set():
            self.value, self.error = value, error
            self.over.set()

    def wait(self):
        """Return when it is over. Raises NoAnswer."""
        self.worker.expect(self.over.wait)

    def result(self):
        """What the work returned. Raises what it raised, or why it was never done."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self.value


class Worker(threading.Thread):
    """The thread that gives a card its work: tasks, in the order in which they are posted."""

    def __init__(self, card: Card):
        super().__init__(name=f"worker of {card.name}", daemon=True)    # a card that hangs must not hold the process
        self.card = card
        self.on_fault = lambda worker, error: None      # what is to be done about it
        self.tasks, self.task = queue.SimpleQueue(), None
        self.n_done = 0                                 # tasks and parts of them; grows as `Card.n_done` does
        self.error: BaseException | None = None         # why there is no more to do
        self.lock = threading.Lock()                    # held while `error` is decided on
        self.waits_for: tuple[Worker, bool] | None = None   # as `expect` has it

    def post(self, work, *arguments) -> Task:
        """Have work(*arguments) done after all that was posted before. An error there ends the pipeline, since it may
        be that nobody looks at the task again."""
        return self._give(Task(self, functools.partial(work, *arguments), True))

    def ask(self, work, *arguments) -> Task:
        """The same for somebody who does look: only an error of the card ends the pipeline."""
        return self._give(Task(self, functools.partial(work, *arguments), False))

    def _give(self, task: Task) -> Task:
        with self.lock:
            if self.error is not None:
                task.end(error=self.error)
            else:
                if self.ident is None:
                    self.start()
                self.tasks.put(task)
        return task

    def run(self):
        while (task := self.tasks.get()) is not None:
            self.task = task
            try:
                task.do()
            except BaseException as error:              # a panic of a library in Rust is no Exception
                if task.is_vital or isinstance(error, CardError):
                    self.fail(error)
                task.end(error=error)
            self.n_done += 1
            self.task = task = None

    def wait(self, event):
        """Return when an event of this worker's card is done; for any thread. Raises CardError."""
        try:
            self.expect(event.wait, of_card=True)
        except NoAnswer:
            raise
        except CardError as error:
            self.fail(error)
            raise

    def expect(self, is_over, of_card: bool = False):
        """Return when is_over(seconds), which waits so long at most for this worker, or for its card, says so. Raises
        NoAnswer when the card, or the one that the worker waits for, has got on with nothing for DEADLINE.

        Where the process is stopped or hardly gets to run, the card is, too: so it is looks that count, not time.
        """
        waiter = threading.current_thread()
        if isinstance(waiter, Worker):
            waiter.waits_for = self, of_card
        try:
            seen, n_looks = None, 0
            while not is_over(DEADLINE / LOOKS):
                worker = self.awaited(of_card)
                now = worker, worker.n_done, worker.card.n_done
                seen, n_looks = now, n_looks + 1 if now == seen else 0
                if n_looks == LOOKS:
                    worker.card.hangs = True
                    error = NoAnswer(worker.card, DEADLINE)
                    worker.fail(error)
                    raise error
        finally:
            if isinstance(waiter, Worker):
                waiter.waits_for = None

    def awaited(self, of_card: bool) -> "Worker":
        """Whose card it is that whoever waits for this worker, or for its card, waits for in the end."""
        worker = self
        while not of_card and (other := worker.waits_for) is not None:
            worker, of_card = other
        return worker

    def fail(self, error: BaseException):
        """Tell of an error; of a card it is this worker's, unless it is known to be another's."""
        if isinstance(error, CardError):
            error.card = error.card or self.card
        self.on_fault(self, error)

    def stop(self, error: BaseException):
        """End with `error` all that is still to do, what is done at the moment, and the thread."""
        with self.lock:
            self.error = self.error or error
            left = [self.task]
            with contextlib.suppress(queue.Empty):
                while True:
                    left.append(self.tasks.get_nowait())
            self.tasks.put(None)
        for task in filter(None, left):
            task.end(error=self.error)


def stop_all(workers: list[Worker], error: BaseException):
    """Stop them all, and wait for the ends of their threads."""
    for worker in workers:
        worker.stop(error)
    for worker in workers:
        if worker.ident is not None:
            worker.join(timeout=1.0)            # of one whose card hangs there is no end
