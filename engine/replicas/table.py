"""What a front knows of the replicas of a model, and which of them a request should go to.

A replica reports the marks of what its prefix cache keeps (engine/prefix.py): from there a later prompt goes on. The
front adds the prompts that it has sent there since. A request goes to the replica with the largest sum: tokens that it
spares, less tokens of open prompts that it has still to read, less AWAY for each open answer. So a long conversation
returns to its replica, and a beginning that many requests share does not gather them all in one place. No replica gets
more than its share of what is open, however much it keeps, unless it has a free slot.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.prefix import PAGE_TOKENS

AWAY = 64                   # tokens of a prompt that the answer of an open request outweighs
SHARE = 1.25                # of the mean of open requests: no replica gets more while others have less
MOST_MARKS = 1 << 14        # that a front keeps of a replica
GAUGES = {"requests_running", "requests_waiting", "kv_pages", "kv_pages_used", "kv_pages_cached", "kv_pages_free",
          "checkpoints", "checkpoints_on_card", "slots"}    # counts of this moment: they go with their replica


class Layers:
    """A card of a replica, as /health shows those of an engine."""

    def __init__(self, text: str):
        self.text = text

    def describe(self) -> str:
        return self.text


@dataclass
class Replica:
    """What is known of one replica.

    id: Ray Serve's. node: the address of its machine. hostname: of that. facts: what its actor has said of its engine,
    see `engine.replicas.actor.facts_of`; empty before it has.
    """

    id: str
    node: str = ""
    hostname: str = ""
    facts: dict = field(default_factory=dict)
    stats: dict = field(default_factory=dict)       # of the engine, as its last report has them
    reason: str | None = None                       # why its engine has stopped
    kept: frozenset[int] = frozenset()              # marks that it has reported
    n_open: int = 0
    n_unread: int = 0                               # tokens that it has to read of prompts that are open there
    is_leaving: bool = False                        # Ray Serve sends it nothing more
    is_silent: bool = False                         # nothing has come from it for long
    is_foreign: bool = False                        # it has a model with another vocabulary than the front's
    is_other: bool = False                          # it was made otherwise than the front wants it: a change goes on
    since: float = field(default_factory=time.time)

    @property
    def n_slots(self) -> int:
        return self.facts.get("n_slots", 1)

    @property
    def state(self) -> str:
        if self.is_silent:
            return "silent"
        if self.is_leaving:
            return "leaving"
        if self.is_foreign:
            return "foreign"
        return "failed" if self.reason else "up" if self.facts else "starting"


@dataclass(eq=False)
class Opened:
    """A request that is open at a replica. n_unread: tokens of its prompt that the replica did not have, until they are
    read."""

    replica: Replica
    marks: Sequence[int]
    n_unread: int


class Table:
    """The replicas of a model. Any thread may call this. recipe: by which replicas are to be made (actor.py); others
    get requests only while there is none of these. None: all are equal."""

    def __init__(self, recipe=None):
        self.recipe = recipe
        self.lock = threading.Lock()
        self.replicas: dict[str, Replica] = {}
        # mark -> {id: how often it is kept there, or in a prompt that is open there}
        self.holders: dict[int, Counter] = {}
        self.totals: Counter = Counter()        # counts of replicas that are gone; tuples are (name, index)
        self.n_turns = 0

    # ---- who is there -------------------------------------------------------------------------------------

    def see(self, ids: Iterable[str]) -> tuple[list[str], list[str]]:
        """These replicas take requests now, and no others. Returns (new ones, those that leave)."""
        with self.lock:
            ids = set(ids)
            new = sorted(ids - self.replicas.keys())
            leaving = [one for one in self.replicas.values() if one.id not in ids and not one.is_leaving]
            for one in self.replicas.values():
                one.is_leaving = one.id not in ids      # one that was missed in a list may come back
            self.replicas |= {id: Replica(id) for id in new}
            return new, [one.id for one in leaving]

    def forget(self, id: str):
        """A replica is gone. What it has counted stays."""
        with self.lock:
            gone = self.replicas.pop(id, None)
            for mark in [mark for mark, holders in self.holders.items() if id in holders]:
                self._unhold(id, [mark], self.holders[mark][id])
            for name, count in (gone.stats if gone else {}).items():
                if name not in GAUGES:
                    self.totals.update(flat(name, count))

    def report(self, id: str, facts: dict | None, stats: dict | None, reason: str | None, kept):
        """What a replica says of itself; None where it says nothing new."""
        with self.lock:
            if (one := self.replicas.get(id)) is None:
                return
            if facts is not None:
                one.facts, one.node, one.hostname = facts, facts["node"], facts["hostname"]
                one.is_other = self.recipe is not None and facts["wish"].recipe != self.recipe
            one.stats, one.reason, one.is_silent = stats or one.stats, reason, False
            if kept is not None:
                before, one.kept = one.kept, frozenset(kept[:MOST_MARKS])
                self._hold(id, one.kept - before)
                self._unhold(id, before - one.kept)

    def silence(self, id: str):
        """Nothing has come from a replica for long."""
        with self.lock:
            if id in self.replicas:
                self.replicas[id].is_silent = True

    def exclude(self, id: str):
        """A replica has another model than the front, which cuts text into other tokens."""
        with self.lock:
            if id in self.replicas:
                self.replicas[id].is_foreign = True

    def fail(self, id: str | None, reason: str):
        """A replica has refused a request because its engine has stopped."""
        with self.lock:
            if id in self.replicas:
                self.replicas[id].reason = reason

    def listed(self) -> list[Replica]:
        with self.lock:
            return sorted(self.replicas.values(), key=lambda one: (one.since, one.id))

    def wanted(self) -> dict | None:
        """The facts of a replica that is up and made as the front wants it; None if there is none."""
        return next((one.facts for one in self.listed() if one.state == "up" and not one.is_other), None)

    def _hold(self, id: str, marks: Iterable[int]):
        for mark in marks:
            self.holders.setdefault(mark, Counter())[id] += 1

    def _unhold(self, id: str, marks: Iterable[int], n: int = 1):
        for mark in marks:
            holders = self.holders.get(mark)
            if holders is not None and id in holders:       # it may be gone, and forgotten
                holders[id] -= n
                if holders[id] <= 0:
                    del holders[id]
                if not holders:
                    del self.holders[mark]

    # ---- where to -----------------------------------------------------------------------------------------

    def rank(self, marks: Sequence[int], ids: Iterable[str]) -> list[str]:
        """Those of these replicas that work, the best one for a prompt with these marks first."""
        with self.lock:
            known = [self.replicas.get(id) or Replica(id) for id in ids]
            able = [one for one in known if one.reason is None and not (one.is_silent or one.is_foreign)]
            wanted = [one for one in able if one.facts and not one.is_other]
            able = wanted if wanted and self.recipe is not None else able
            spared = self._spared(marks)
            limit = math.ceil(SHARE * (sum(one.n_open for one in able) + 1) / max(len(able), 1))
            self.n_turns += 1

            def worth(at: int):
                one = able[at]
                is_full = one.n_open >= max(one.n_slots, limit)
                n_tokens = one.n_unread + AWAY * one.n_open - spared.get(one.id, 0)
                return is_full, n_tokens, one.n_open / one.n_slots, (at + self.n_turns) % len(able)

            return [able[at].id for at in sorted(range(len(able)), key=worth)]

    def n_spared(self, id: str, marks: Sequence[int]) -> int:
        """How many tokens of a prompt with these marks a replica need not compute, as far as is known."""
        with self.lock:
            return self._spared(marks).get(id, 0)

    def _spared(self, marks: Sequence[int]) -> dict[str, int]:
        found = {}
        for n, mark in enumerate(marks, start=1):
            for id in self.holders.get(mark, ()):
                found[id] = n * PAGE_TOKENS
        return found

    def take(self, id: str, marks: Sequence[int]) -> Opened | None:
        """A request with this prompt is sent to a replica. None where the replica is not one of these."""
        with self.lock:
            if (one := self.replicas.get(id)) is None:
                return None
            opened = Opened(one, marks, len(marks) * PAGE_TOKENS - self._spared(marks).get(id, 0))
            one.n_open += 1
            one.n_unread += opened.n_unread
            self._hold(id, marks)
            return opened

    def has_read(self, opened: Opened | None):
        """The prompt is read: its answer has begun."""
        if opened is not None and opened.n_unread:
            with self.lock:
                opened.replica.n_unread -= opened.n_unread
                opened.n_unread = 0

    def give_back(self, opened: Opened | None):
        """It has ended there. A replica that was forgotten since then may be there anew: it is another one."""
        self.has_read(opened)
        with self.lock:
            if opened is not None and self.replicas.get(opened.replica.id) is opened.replica:
                opened.replica.n_open -= 1
                self._unhold(opened.replica.id, opened.marks)

    # ---- what they count ------------------------------------------------------------------------------------

    def stats(self) -> dict:
        """The counts of all replicas together, with those of replicas that are gone."""
        with self.lock:
            total = Counter(self.totals)
            for one in self.replicas.values():
                for name, count in one.stats.items():
                    total.update(flat(name, count))
        found, tuples = {}, {}
        for name, count in total.items():
            if isinstance(name, tuple):
                tuples.setdefault(name[0], {})[name[1]] = count
            else:
                found[name] = count
        return found | {name: tuple(counts.get(i, 0) for i in range(max(counts) + 1))
                        for name, counts in tuples.items()}


def flat(name: str, count) -> dict:
    """A count, or those of a tuple each by itself."""
    return {(name, i): each for i, each in enumerate(count)} if isinstance(count, tuple) else {name: count}
