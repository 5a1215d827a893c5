"""How many drafts a check gets. A draft is a guessed next token of an answer. A check is a decode step that computes
several drafts at once and keeps those that are what the model itself chooses, so no token depends on this file.

    width       rows of each answer in a check: one for its latest token, one for each draft; 1 is a plain step
    position    of a draft in its check, from 1 on; lists have the first position at index 0

A check of width w gives an answer 1 + c1 + c1 c2 + ... + c1 c2 .. c(w-1) tokens on average, where cj is the chance that
draft j is right if all drafts before it are. It takes longer than a plain step. `Pace` takes the width that gives the
most tokens per second to the answers of a group together, by recent chances and by measured times of steps.

Chances may be wrong, and most are guessed at first. So checks may lose little: `Pace.balance` is the time, in plain
steps, that they may lose now. A check pays its `risk`, what it loses if no draft is right, when it is chosen. Each
accepted draft pays in a plain step, each token SHARE of one. A check that the balance cannot pay is not made. So t
tokens take the time of (1 + SHARE) t plain steps and of ALLOWANCE more at most, however wrong the drafts are, as long
as times are as they were measured. What it costs to record a step of a new width comes on top, once.
"""

import bisect
import collections
import itertools
import logging
import operator

from engine.limits import MOST_DRAFTS

LARGEST_CHECK = 64          # most rows of a check, of all its answers together
RETRY_TOKENS = 64           # after so many tokens a check is tried that is wider than what seems best
RECENT = 1 / 16             # weight of a check in the chances of an answer
NEWS = 1 / 2                # the same where nothing was known for RETRY_TOKENS
USUAL = 1 / 64              # the same in the chances that new answers begin with
ROW_COST = 0.02             # of one more row for each answer, in plain steps, until it is measured
ALLOWANCE = 4.0             # plain steps that the first checks of an engine may lose, a few of them being wrong
FIRST_RISK = 1.0            # plain steps that a check of one draft may lose, until its time is known
SHARE = 1 / 64              # of a plain step, that checks may lose for each token
MOST_BALANCE = 8.0          # plain steps that checks may lose of what others have won
CAUTION = 2.0               # times what measured rows cost, for rows that were not measured
MEASUREMENTS, FIRST_MEASUREMENTS = 9, 3      # times of steps, of which the median counts; of a new width the first few

# Chances of the first answers: with a block of the model's own that predicts tokens, and with copied tokens alone.
BLOCK_CHANCES = 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45
COPY_CHANCES = 0.5, 0.7, 0.8, 0.85, 0.9, 0.9, 0.9

WATCHED = 256               # drafts over which acceptance is watched
WAS_GOOD = 0.2              # a fall from above this share to zero is logged


def as_plain(width: int) -> float:
    """About how many plain steps take as long as a check."""
    return 1 + ROW_COST * (width - 1)


class Drafts:
    """The drafts of one answer: how many were checked and accepted at each position, and what that makes likely.

    Every draft of a check counts as checked, also those behind a wrong one.
    """

    def __init__(self):
        self.n_checked, self.n_accepted = [0] * MOST_DRAFTS, [0] * MOST_DRAFTS
        self.limit = MOST_DRAFTS                # most drafts of a check; see `Pace.join`
        self.chances = list(BLOCK_CHANCES)
        self.ages = [0] * MOST_DRAFTS           # tokens since a draft at this position was found right or wrong
        self.since_try = 0                      # tokens since a draft was checked where nothing was known
        self.n_next: int | None = None          # drafts that were there for the next check; None: not known
        self.n_together = 1                     # answers of its group, in the step that was chosen last

    @property
    def share(self) -> float | None:
        """Accepted drafts per checked one; None before the first check."""
        return sum(self.n_accepted) / sum(self.n_checked) if self.n_checked[0] else None

    def land(self, n_drafts: int, n_accepted: int, n_next: int | None = None):
        """A step is over, in which n_drafts drafts were checked (0: a plain step) and the first n_accepted were right.
        n_next: drafts that it left for the next check."""
        self.n_next, self.since_try = n_next, self.since_try + 1 + n_accepted
        if any(age >= RETRY_TOKENS for age in self.ages[:n_drafts]):
            self.since_try = 0
        for i in range(MOST_DRAFTS):
            self.ages[i] += 1 + n_accepted
            self.n_checked[i] += i < n_drafts
            self.n_accepted[i] += i < n_accepted
        for i in range(min(n_accepted + 1, n_drafts)):      # of drafts behind a wrong one nothing is known
            weight = NEWS if self.ages[i] >= RETRY_TOKENS else RECENT
            self.chances[i] += weight * ((i < n_accepted) - self.chances[i])
            self.ages[i] = 0

    def gains(self, n_there: int):
        """Tokens that each row of a check adds on average, row 0 first. n_there: drafts that there are for it."""
        chances = self.chances[:min(n_there, self.limit)]
        return itertools.accumulate(chances, operator.mul, initial=1.0)


class Pace:
    """Decides the width of every check of an engine. Used by one thread.

    limit: most drafts of a check. has_block: whether a block of the model's own makes drafts, as many as are asked for;
    otherwise only copied tokens are drafts, and often there are none.
    """

    def __init__(self, limit: int = MOST_DRAFTS, has_block: bool = False):
        self.limit, self.has_block = limit, has_block
        self.n_checked, self.n_accepted = [0] * MOST_DRAFTS, [0] * MOST_DRAFTS      # of all answers
        self.usual = list(BLOCK_CHANCES if has_block else COPY_CHANCES)     # chances that a new answer begins with
        self.times = collections.defaultdict(list)          # (answers, width) -> seconds since the last median
        self.medians = collections.defaultdict(dict)        # answers -> width -> the latest median of its times
        self.costs = {}         # (answers, widest) -> (risks, seconds) of each width, by these medians
        self.balance = ALLOWANCE                # plain steps that checks may lose now
        self.is_paused = False                  # whether checks are planned without drafts; any thread may set it
        self.watched = self.n_right = 0         # drafts of the current WATCHED, and how many of them were right
        self.n_wrong = 0                        # drafts since the last right one
        self.was_good = False

    def join(self, drafts: Drafts, limit: int | None):
        """An answer begins. limit: most drafts that its request allows; None leaves it to the engine."""
        drafts.limit = self.limit if limit is None else min(limit, self.limit)
        drafts.chances = list(self.usual)

    def land(self, drafts: Drafts, n_drafts: int, n_accepted: int, n_next: int | None = None):
        """A step of an answer is over; the numbers are those of `Drafts.land`."""
        drafts.land(n_drafts, n_accepted, n_next)
        for i in range(n_drafts):
            self.n_checked[i] += 1
            self.n_accepted[i] += i < n_accepted
        for i in range(min(n_accepted + 1, n_drafts)):
            self.usual[i] += USUAL * ((i < n_accepted) - self.usual[i])
        if drafts.limit:
            self.balance = min(self.balance + (n_accepted + SHARE * (1 + n_accepted)) / drafts.n_together, MOST_BALANCE)
        self._watch(n_drafts, n_accepted)

    def measure(self, n: int, width: int, seconds: float):
        """A step of n answers took so long. It followed another step directly, and no pass of a prompt ran beside. If
        steps of fewer rows seem to take longer, they were measured at a bad moment, and their times are forgotten."""
        times, known = self.times[n, width], self.medians[n]
        times.append(seconds)
        if len(times) == (MEASUREMENTS if width in known else FIRST_MEASUREMENTS):
            median = known[width] = sorted(times)[len(times) // 2]
            for slow in [w for w in known if w < width and known[w] > median]:
                del known[slow]
                if slow == 1:           # what checks may lose is counted in plain steps
                    known[1] = median
            self.costs.clear()
            times.clear()

    def seconds(self, n: int, width: int) -> float:
        """About how long a check of n answers takes: the median of the latest ones. A width that was not measured is
        taken to be as fast as the measured ones allow, so that it is tried: more rows cost ROW_COST each, and fewer
        rows take their share of the time. Without any measurement the unit is a plain step."""
        known = self.medians[n]
        if width in known:
            return known[width]
        return max((seconds * (as_plain(width) / as_plain(w) if w < width else width / w)
                    for w, seconds in known.items()), default=as_plain(width))

    def risks(self, n: int, widest: int) -> list[float]:
        """Plain steps that a check of n answers loses if no draft is right: of each width, 1 first. The last width is
        `widest`, or 2 before any was measured. The times are those of steps of n answers, else of about n. A row that
        was not measured takes CAUTION times as long as those that were, but a check no longer than a wider one."""
        measured = [(abs(m - n), m) for m, known in self.medians.items() if 1 in known and len(known) > 1]
        distance, nearest = min(measured, default=(0, None))
        known = self.medians[nearest] if measured else {1: 1.0}
        found, rows, cost = [0.0], 1, FIRST_RISK / CAUTION
        for width in range(2, min(widest, MOST_DRAFTS + 1 if measured else 2) + 1):
            if width in known:
                rows, cost = width - 1, known[width] / known[1] - 1
            caution = 1.0 if width in known and distance == 0 else CAUTION
            at_most = [known[w] / known[1] - 1 for w in known if w > width]
            risk = min([caution * cost * (width - 1) / rows, *(CAUTION ** (distance > 0) * most for most in at_most)])
            found.append(max(risk, found[-1]))
        return found

    def width(self, answers: list[Drafts]) -> int:
        """The width of the next check of these answers, which the balance pays. Now and then it is one more than what
        seems best, since chances and times that are never tried cannot improve."""
        n, there = len(answers), [self._n_there(drafts) for drafts in answers]
        widest = min(1 + max(there), LARGEST_CHECK // n)
        for drafts in answers:
            drafts.n_together = n
        risks, seconds = self._costs(n, widest)
        widest = bisect.bisect(risks, self.balance)
        if widest < 2 or self.is_paused:
            return 1
        gains = [drafts.gains(n_there) for drafts, n_there in zip(answers, there)]
        tokens = itertools.accumulate(map(sum, itertools.zip_longest(*gains, fillvalue=0.0)))
        speeds = list(map(operator.truediv, tokens, seconds[:widest]))
        best = 1 + speeds.index(max(speeds))
        is_due = best < widest and any(
            min(drafts.ages[best - 1], drafts.since_try) >= RETRY_TOKENS and n_there >= best
            for drafts, n_there in zip(answers, there))
        self.balance -= risks[best + is_due - 1]
        return best + is_due

    def _costs(self, n: int, widest: int) -> tuple[list[float], list[float]]:
        """What each width risks, and the seconds that it takes; more rows never take less. Both are kept until a median
        changes, since a width is chosen for every step, and a small model's step is short."""
        if (n, widest) not in self.costs:
            risks = self.risks(n, widest)
            seconds = (self.seconds(n, width) for width in range(1, len(risks) + 1))
            self.costs[n, widest] = risks, list(itertools.accumulate(seconds, max))
        return self.costs[n, widest]

    def _n_there(self, drafts: Drafts) -> int:
        """About how many drafts the next check of an answer can have."""
        known = None if self.has_block else drafts.n_next
        return drafts.limit if known is None else min(known, drafts.limit)

    def _watch(self, n_drafts: int, n_accepted: int):
        """Log a fall of acceptance to zero, once for each fall: something may be wrong with the drafts."""
        self.watched, self.n_right = self.watched + n_drafts, self.n_right + n_accepted
        self.n_wrong = 0 if n_accepted else self.n_wrong + n_drafts
        if self.was_good and self.n_wrong >= WATCHED:
            self.was_good = False
            logging.getLogger("qengine").warning("none of the last %d drafts was right, and before that more than "
                                                 "%.0f %% were", self.n_wrong, 100 * WAS_GOOD)
        if self.watched >= WATCHED:
            self.was_good = self.was_good or self.n_right > WAS_GOOD * self.watched
            self.watched = self.n_right = 0
