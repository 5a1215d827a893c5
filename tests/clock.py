"""A clock that a test sets forward."""

import time


class Clock:
    """What a module sees instead of `time`. ahead: by so many seconds."""

    def __init__(self, monkeypatch, module):
        self.ahead = 0.0
        monkeypatch.setattr(module, "time", self)

    def __getattr__(self, name):
        return getattr(time, name)

    def monotonic(self):
        return time.monotonic() + self.ahead

    def perf_counter(self):
        return time.perf_counter() + self.ahead

    def time(self):
        return time.time() + self.ahead
