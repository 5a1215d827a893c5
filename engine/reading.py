"""Bytes of files, read so that a fault is an exception.

To touch a mapped page that the disk cannot bring, or that the file has lost, ends the process (SIGBUS). `os.preadv`
says what is wrong instead, and releases Python's lock meanwhile, so that several threads read at once.
"""

import os
import threading
import weakref
from concurrent.futures import Future
from queue import SimpleQueue

import numpy as np


def read_into(file: int, start: int, into: np.ndarray):
    """Fills `into`, a contiguous array, with the bytes of a file from `start` on. file: its descriptor. Raises OSError,
    and EOFError if the file ends before."""
    left = memoryview(into).cast("B")
    while left:
        if not (n := os.preadv(file, [left], start)):
            raise EOFError
        left, start = left[n:], start + n


class Readers:
    """Threads that make calls, several at once. A call that never returns keeps nobody from ending the process: those
    of ThreadPoolExecutor would."""

    def __init__(self, n_threads: int, name: str):
        self._calls = SimpleQueue()
        self._end = weakref.finalize(self, _end, self._calls, n_threads)
        for _ in range(n_threads):
            threading.Thread(target=_make_calls, args=(self._calls,), name=name, daemon=True).start()

    def call(self, function, *arguments) -> Future:
        """What the function returns or raises, later."""
        future = Future()
        self._calls.put((future, function, arguments))
        return future

    def close(self):
        """Ends the threads, once they have made the calls that were asked for."""
        self._end()


def _end(calls: SimpleQueue, n_threads: int):
    for _ in range(n_threads):
        calls.put(None)


def _make_calls(calls: SimpleQueue):
    while call := calls.get():
        future, function, arguments = call
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*arguments))
            except Exception as error:
                future.set_exception(error)
        del call, future, function, arguments           # they may hold much memory
