"""How long somebody waits for work that is done for them: for some seconds, and only while they are still there.

This file imports little, because the processes of engine/sandbox.py start with it.
"""

import math
import threading
import time
from collections.abc import Callable

LOOK_SECONDS = 0.05         # between two looks whether the one who waits has gone
GONE = "the client has hung up"


def too_late(seconds: float) -> str:
    """The sentence about work that takes longer than a request allows."""
    return f"not finished after the {seconds:g} s that the request allows"


class Patience:
    """Of somebody who waits for work from now on.

    seconds: that they wait; None: as long as it takes. gone(): whether they have left. why: a sentence for the error
    when the seconds are over; by default that the request allows no more.
    """

    def __init__(self, seconds: float | None = None, gone: Callable[[], bool] | None = None, why: str | None = None):
        self.end = math.inf if seconds is None else time.monotonic() + seconds
        self.gone, self._why = gone, why or too_late(seconds or 0)

    @property
    def has_left(self) -> bool:
        return self.gone is not None and self.gone()

    @property
    def left(self) -> float:
        """Seconds, none for somebody who has left."""
        return 0.0 if self.has_left else max(0.0, self.end - time.monotonic())

    def wait(self, comes: Callable[[float], bool], seconds: float = math.inf) -> bool:
        """Whether something comes before the patience ends, and within so many seconds. comes(seconds) waits for it
        that long and says whether it has come."""
        end = time.monotonic() + seconds
        while True:
            left = min(self.left, max(0.0, end - time.monotonic()))
            if comes(min(left, threading.TIMEOUT_MAX if self.gone is None else LOOK_SECONDS)):
                return True
            if not left:
                return False

    @property
    def why(self) -> str:
        """A sentence about the end of the patience."""
        return GONE if self.has_left else self._why


ENDLESS = Patience()
