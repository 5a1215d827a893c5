"""The front's side of an answer that a replica computes.

An answer may lose its replica. It is then computed again elsewhere, from its prompt on. Every replica computes the same
bits. So the tokens that a reader already has come a second time: they are compared and left out, and the answer goes on
behind them. Where one differs, the answer ends with a sentence: what is cached may change the rounding of a prompt that
holds decoded tokens (engine/prefix.py), and a replica may have another model file during a change.
"""

import itertools
import math
import threading
import time
from typing import NamedTuple

from engine.pooling import TextsJob, TextsRequest
from engine.request import Answer, Delta, EngineStopped, Request
from engine.speculate import Drafts

from .table import Opened
from .wire import COUNTS, TIMES

MOST_LOST = 3               # replicas that an answer may lose before it ends; a request may be what kills them
MOST_FAILED = 120           # calls for it that may fail before a replica was chosen, with pauses a minute of them
_ids = itertools.count(1)


class Differs(Exception):
    """A replica has begun an answer anew and computed other tokens than the one before."""


class Try(NamedTuple):
    """A try that has failed. replica: the id of the one that was lost; None if none was chosen yet. seen: what was seen
    of that. why: Ray's or the replica's words, if there are any."""

    replica: str | None
    seen: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.replica or 'no replica'}: {self.seen}" + f" ({self.why})" * bool(self.why)


class RemoteJob:
    """What answers of all kinds have at a front. link: the Link of engine/replicas/front.py. marks: of the prompt, for
    the choice of a replica."""

    def __init__(self, link, marks=()):
        self.id, self.link, self.marks = next(_ids), link, marks
        self.replica: str | None = None         # the id of the one that computes it, once that is known
        self.opened: Opened | None = None       # what the table counts for it there
        self.sent_after = 0.0                   # seconds from `started` until that was chosen
        self.tries: list[Try] = []              # those that have failed
        self.n_again = 0                        # Deltas or rows that this try has given
        self.begun = threading.Event()          # a replica has taken it, or it has ended
        self.over = None                        # of asyncio, set by the link: how this try has ended

    @property
    def n_lost(self) -> int:
        return sum(each.replica is not None for each in self.tries)

    @property
    def n_failed(self) -> int:
        return len(self.tries) - self.n_lost

    def begin_again(self):
        """The next try. It has another id, so that what may still come of the last one is not taken for it."""
        self.id, self.n_again = next(_ids), 0

    def cancel(self):
        super().cancel()
        self.link.drop(self)

    @property
    def seconds_left(self) -> float | None:
        return None if self.deadline == math.inf else max(0.001, self.deadline - time.perf_counter())


class RemoteAnswer(RemoteJob, Answer):
    """An Answer that a replica computes."""

    def __init__(self, request: Request, link, marks):
        Answer.__init__(self, request)
        RemoteJob.__init__(self, link, marks)
        self.given: list[tuple] = []            # (token id, text, finish reason) of the Deltas that readers have

    def begin_again(self):
        super().begin_again()
        self.drafts = Drafts()

    def hear(self, counts: tuple, told: list[tuple]):
        """News of a replica; counts: as `counts_told` gives them. Raises Differs."""
        before, (*counts, drafts) = self.n_read, counts
        for name, count in zip(COUNTS, counts, strict=True):
            setattr(self, name, count + self.sent_after if name in TIMES and count else count)
        if drafts is not None:
            self.drafts.n_checked, self.drafts.n_accepted = map(list, drafts)
        self.n_read = max(self.n_read, before)      # it does not go back where the answer begins again
        for fields in told:
            if self.n_again < len(self.given):
                if self.given[self.n_again] != fields[:3]:
                    raise Differs
            else:
                delta = Delta(*fields)
                self.given.append(fields[:3])
                self.n_generated += 1
                self.token_times.append(time.perf_counter())
                self.finish_reason, self.cause = delta.finish_reason, delta.cause
                self._put(delta)
            self.n_again += 1

    def end(self):
        """The replica says that this was all."""
        self.close()


class RemoteTexts(RemoteJob, TextsJob):
    """A TextsJob that a replica computes."""

    def __init__(self, request: TextsRequest, link):
        TextsJob.__init__(self, request)
        RemoteJob.__init__(self, link)

    def hear(self, counts: tuple, told: list):
        for row in told:
            self.land(self.n_again, row)
            self.n_again += 1

    def end(self):
        if self.finish_reason is None:
            self.close(None if self.cancelled else EngineStopped("the engine was closed"))
