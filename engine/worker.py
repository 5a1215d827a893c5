"""Workers: the threads that give cards their work.

Every card has a worker, the only thread that gives the card work. Other threads that want something of a stage post a
task to the stage's worker. A task may wait only for tasks that were posted earlier, to any worker. So no two tasks can
wait for each other.
"""

import contextlib
import functools
import queue
import threading

from kernels.card import Card, CardError, NoAnswer

DEADLINE = 120.0            # seconds without progress after which a card that is waited for counts as broken
LOOKS = 20                  # how often progress is looked for in that time


class Task:
    """Work for a worker, and its result. is_vital: any error in it ends the pipeline, not only a CardError."""

    def __init__(self, worker: "Worker", work, is_vital: bool):
        self.worker, self.work, self.is_vital = worker, work, is_vital
        self.value = self.error = None
        self.over = threading.Event()

    def do(self):
        work, self.work = self.work, None       # a task may live on, and its work may refer to much memory
        self.end(work())

    def end(self, value=None, error: BaseException | None = None):
        if not self.over.is_set():
            self.value, self.error = value, error
            self.over.set()

    def wait(self):
        """Return when the task is over. Raises NoAnswer."""
        self.worker.expect(self.over.wait)

    def result(self):
        """What the work returned. Raises what the work raised, or why it was never done."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self.value


class Worker(threading.Thread):
    """The thread that gives a card its work: tasks, in the order in which they are posted."""

    def __init__(self, card: Card):
        super().__init__(name=f"worker of {card.name}", daemon=True)    # a card that hangs must not hold the process
        self.card = card
        self.on_fault = lambda worker, error: None      # called when work has failed
        self.tasks, self.task = queue.SimpleQueue(), None
        self.n_done = 0                                 # tasks done, and steps within long tasks: a sign of progress
        self.error: BaseException | None = None         # why the worker has stopped
        self.lock = threading.Lock()                    # guards `error` and the queue: a stopped worker gets no task
        self.waits_for: tuple[Worker, bool] | None = None   # what this thread waits for in `expect`: (worker, of_card)

    def post(self, work, *arguments) -> Task:
        """Have work(*arguments) done after all that was posted before. An error in it ends the pipeline, since perhaps
        nobody looks at the task again."""
        return self._give(Task(self, functools.partial(work, *arguments), True))

    def ask(self, work, *arguments) -> Task:
        """Like `post`, for a caller that will call `Task.result`, which raises errors there. Only a CardError ends the
        pipeline."""
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
        """Call is_over(seconds), which waits for up to so many seconds, until it is true. of_card: the caller waits for
        this worker's card, else for the worker.

        Raises NoAnswer when the card makes no progress for DEADLINE. If the worker itself waits for another one, the
        card at the end of this chain of waits counts. Looks without progress are counted, not seconds: time in which
        the process is suspended must not count against a card.
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
        """The last worker of the chain of waits that begins with this worker: all others wait for the last one's
        card."""
        worker = self
        while not of_card and (other := worker.waits_for) is not None:
            worker, of_card = other
        return worker

    def fail(self, error: BaseException):
        """Report an error. A CardError that names no card is taken for one of this worker's card."""
        if isinstance(error, CardError):
            error.card = error.card or self.card
        self.on_fault(self, error)

    def stop(self, error: BaseException):
        """End all queued tasks and the running one with `error`, and end the thread."""
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
    """Stop workers, and wait up to a second for the end of each thread."""
    for worker in workers:
        worker.stop(error)
    for worker in workers:
        if worker.ident is not None:
            worker.join(timeout=1.0)            # the thread of a card that hangs never ends
