"""How long other threads wait for the interpreter's lock."""

import threading
import time


class LongestWait:
    """How long another thread of this process waited for the interpreter's lock at most, in seconds."""

    def __enter__(self):
        self.longest, self.over = 0.0, threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self):
        last = time.perf_counter()
        while not self.over.wait(0.001):
            now = time.perf_counter()
            self.longest, last = max(self.longest, now - last), now

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
