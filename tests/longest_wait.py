"""How long other threads wait for the interpreter's lock."""

import threading
import time


class LongestWait:
    """How long another thread of this process waited for the interpreter's lock at most.

    longest: in seconds. work: in seconds of processor time of the thread that enters the `with` body, which a machine
    with other work does not stretch.
    """

    def __enter__(self):
        self.longest, self.work, self.over = 0.0, 0.0, threading.Event()
        self.clock = time.pthread_getcpuclockid(threading.get_ident())
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self):
        last, worked = time.perf_counter(), time.clock_gettime(self.clock)
        while not self.over.wait(0.001):
            now, work = time.perf_counter(), time.clock_gettime(self.clock)
            self.longest, self.work = max(self.longest, now - last), max(self.work, work - worked)
            last, worked = now, work

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
