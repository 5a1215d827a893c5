"""Whose turn it is: which prompt gets the next pass, and when running answers come before prompts.

Prompts take turns by length and by age. The next pass belongs to the prompt with the fewest tokens left, the turn after
that to the oldest prompt. So the shortest prompt waits for one pass of another prompt at most, and the oldest gets on
however many shorter ones arrive.

While answers run, a pass is queued in parts, and decode steps run between the parts. A part is some layers of the pass,
so a short part needs no short pass, and a pass of many tokens uses a card best. Several cards hand on whole passes, so
there a part is a pass, and only PASS bounds it. Where a step runs beside the next part (engine/micro_batches.py), the
picture and the account below stay as they are; prompts then get more than their share, if the card gains by that.

    ──step──┬────── part ──────┬──step──┬────── part ──────┬──step──
            PROMPT_SHARE of the time    └── answers wait ──┘

Prompts get PROMPT_SHARE of the time. There is an account of the seconds that answers are owed. A part adds its own
seconds times (1 / PROMPT_SHARE - 1), a step takes its seconds off. The next part is queued when half a step is owed,
or less. It is as long as one step can pay for, so that answers wait as shortly as this share allows, but no shorter
than PART.

While no answer runs, passes are queued in parts, too, so that a prompt that is cancelled leaves the cards soon, however
long its text is: no more than two parts of AHEAD are queued at a time. And a pass has no more tokens than let a layer
end in that time, since attention takes longer and longer towards the end of a long text. So an answer that starts in
the midst of such a pass may wait for a layer, which is AHEAD at most and not PART. Several cards hand on whole passes,
which then take LONGEST_PASS at most.

Pictures are encoded before the pass that shows them, in such parts, too. Each of these parts is a turn of its own: an
encoding may take much longer than its tokens tell, so passes of other prompts run between its parts. Only prompts that
have pictures left to show wait for its end, since each encoding takes rows from those before it. Passes between parts
of an encoding are as short as beside answers, since each part may wait for one.

The card must not wait for the host. So a part is queued before the one before it is over, and the account uses
estimates of how long parts and steps take. When the tokens behind a part have come, the account is corrected by the
time that the part took: by the card's clock, since the host's threads wait for each other while a part is queued. For a
whole pass on several cards, only the times at which the host got tokens are known. How long a part should take is what
engine/plan.py says, times a factor that is measured all the time, and for encodings of pictures apart. No token depends
on times: they decide when something is computed, and never what.
"""

import collections
import itertools
import time
from typing import NamedTuple

from engine.prefix import PAGE_TOKENS

PROMPT_SHARE = 0.82         # share of the time that passes over prompts get while answers run
PART = 0.02                 # seconds that a part takes at least, if its pass is as long: each has a price of its own
PASS = 0.25                 # seconds of a whole pass, about, at most: a shorter prompt, or several cards, wait for it
AHEAD = 0.2                 # seconds of a part, about, at most, while no answer runs
LONGEST_PASS = 0.5          # seconds of a pass on the slowest of several cards, about, at most
CAUTION = 4                 # so many times longer than planned may a piece take, until one is measured
LONGEST_PAUSE = 10.0        # a longer one was no work of a card: the process was suspended
STEP_AGE = 32               # after so many parts a step is measured again: three steps then follow each other
RECENT_STEPS, RECENT_PARTS = 3, 5       # measurements that count


class Ticket(NamedTuple):
    """What was queued before the choice of tokens: so many steps and first tokens, this one included, and parts."""

    number: int
    n_parts: int
    is_step: bool


class Turns:
    """The turns of prompts and answers on `n_stages` cards. A prompt is a Sequence whose prompt is not computed yet.

    clock: seconds; another one in tests.
    """

    def __init__(self, n_stages: int, clock=time.perf_counter):
        self.n_stages, self.clock = n_stages, clock
        self.passed_over = None         # the oldest prompt, if the last pass belonged to a shorter one
        self.n_parts = 0                # parts queued so far while answers ran
        # Parts queued while answers ran, the last ones: (seconds by plan, seconds charged, task, factors).
        self.unmeasured = collections.deque()
        # Those queued while no answer ran, not waited for: (seconds by plan, task, factors).
        self.alone = collections.deque()
        self.owed = 0.0                 # seconds that answers are still to have before the next part; below 0: too many
        self.steps = collections.deque(maxlen=RECENT_STEPS)     # seconds that steps took without a part before them
        # Seconds that parts took / seconds by plan: of passes, and of encodings of pictures, whose plans err
        # differently.
        self.factors_of = [collections.deque(maxlen=RECENT_PARTS) for _ in range(2)]
        self.is_encoding = False        # whether the next part is one of an encoding
        self.step_age = STEP_AGE        # parts queued since a step was measured
        self.n_queued = 0               # steps and first tokens queued so far
        self.landed = Ticket(0, 0, False)       # the latest of these whose tokens have come
        self.landed_at = clock()        # when the host last got tokens of an answer
        self.is_quiet = False           # whether no part was queued since these were: queueing one makes the host late

    def choose(self, prompts: list, length_left):
        """The prompt that gets the next pass. prompts: the oldest first. length_left(prompt): its tokens to compute."""
        oldest = prompts[0]
        chosen = oldest if self.passed_over is oldest else min(prompts, key=length_left)
        self.passed_over = None if chosen is oldest else oldest
        return chosen

    def stand_alone(self):
        """No answer runs: prompts need not share their time."""
        self.unmeasured.clear()
        self.owed, self.landed_at = 0.0, self.clock()

    @property
    def may_pass(self) -> bool:
        """Whether a part may be queued beside running answers. Each card may have a part whose time is not known, and
        one more may wait for it."""
        is_due = self.owed <= self.step_seconds / 2         # to the nearest step
        return is_due and self.step_age < STEP_AGE and len(self.unmeasured) <= self.n_stages

    @property
    def step_seconds(self) -> float:
        """About how long a step takes. What makes the host late makes a measurement too long, so the least counts."""
        return min(self.steps, default=0.0)

    @property
    def factors(self) -> collections.deque:
        """The factors of parts like the next one."""
        return self.factors_of[self.is_encoding]

    @property
    def factor(self) -> float:
        """How many times longer than planned parts take: the median of the latest."""
        return sorted(self.factors)[len(self.factors) // 2] if self.factors else 1.0

    @property
    def worst_factor(self) -> float:
        """The largest of the latest: plans may err more about some layers than about others."""
        return max(self.factors, default=CAUTION)

    @property
    def part_seconds(self) -> float:
        """About how long the next part should take: as long as the step behind it, and what is owed, can pay for."""
        return max((self.step_seconds - self.owed) * PROMPT_SHARE / (1 - PROMPT_SHARE), PART)

    def most_rows(self, chunk: int, pieces, has_answers: bool) -> int:
        """Tokens of a pass, at most, beside running answers or an encoding, or without any. pieces(rows): seconds of
        the pieces of a pass, by plan."""
        self.is_encoding = False
        if has_answers:
            seconds, longest = lambda rows: sum(pieces(rows)), max(PASS, self.part_seconds)
        else:
            seconds, longest = lambda rows: max(pieces(rows)), AHEAD if self.n_stages == 1 else LONGEST_PASS
        factor = self.factor if has_answers or self.n_stages > 1 else self.worst_factor
        in_time = longest / factor
        if not has_answers and seconds(chunk) <= in_time:
            return chunk
        return max((rows for rows in range(PAGE_TOKENS, chunk + 1, PAGE_TOKENS) if seconds(rows) <= in_time),
                   default=PAGE_TOKENS)

    def n_pieces(self, pieces: list[float], has_answers: bool) -> int:
        """How many of a pass's next pieces the next part has, one at least; one as long as no part was measured.
        pieces: their seconds by plan."""
        if not self.factors:
            return 1
        factor, longest = self.factor, self.part_seconds
        if not has_answers:                                 # equal parts
            factor, total = self.worst_factor, sum(pieces) * self.worst_factor
            longest = total / max(round(total / AHEAD), 1)
        middles = (end - seconds / 2 for end, seconds in zip(itertools.accumulate(pieces), pieces))
        return max(sum(middle * factor <= longest for middle in middles), 1)

    def add_part(self, seconds: float, task, has_answers: bool):
        """A part was queued, beside running answers or without any. seconds: by plan. task: gives the Span of the part
        (engine/micro_batches.py); None for a pass on several cards, whose time must be guessed. Without answers this
        waits until the part before is over."""
        if not has_answers:
            if task:
                self.alone.append((seconds, task, self.factors))
            if len(self.alone) > 1:
                self._wait(*self.alone.popleft())
            return
        self.alone.clear()
        self.n_parts += 1
        self.step_age += 1
        self.unmeasured.append((seconds, seconds * self.factor, task, self.factors))
        self._owe(seconds * self.factor * (1 / PROMPT_SHARE - 1))

    def add_step(self) -> Ticket:
        """A decode step was queued. The Ticket is for `land`."""
        self._owe(-self.step_seconds)
        return self._ticket(is_step=True)

    def add_first_token(self) -> Ticket:
        """The choice of an answer's first token was queued."""
        return self._ticket(is_step=False)

    def _ticket(self, is_step: bool) -> Ticket:
        self.n_queued += 1
        return Ticket(self.n_queued, self.n_parts, is_step)

    def _owe(self, seconds: float):
        """Answers may have had half a step too much, no more: the next part would be too long."""
        self.owed = max(self.owed + seconds, -self.step_seconds / 2)

    def land(self, ticket: Ticket):
        """The tokens of a decode step have come, or the first token of an answer. So the parts queued before it are
        over. The time since others came tells how long a step takes, or a whole pass and a step, if these others were
        queued right before."""
        now, follows, was_quiet = self.clock(), ticket.number == self.landed.number + 1, self.is_quiet
        seconds, self.landed_at = min(now - self.landed_at, LONGEST_PAUSE), now
        self.landed, self.is_quiet = max(self.landed, ticket), self.n_parts == ticket.n_parts
        over = [self.unmeasured.popleft() for _ in range(len(self.unmeasured) - (self.n_parts - ticket.n_parts))]
        is_measure, whole = follows and ticket.is_step, [part for part in over if part[2] is None]
        for by_plan, charged, task, factors in over:
            if task:
                self._measure(by_plan, charged, min(task.result().seconds, LONGEST_PAUSE), factors)
        if whole and is_measure:
            by_plan, charged = map(sum, zip(*(part[:2] for part in whole)))
            # Never 0: a step may have been faster than most.
            self._measure(by_plan, charged, max(seconds - self.step_seconds, charged / 10), self.factors_of[False])
        if not over and is_measure and was_quiet and self.is_quiet:
            self.steps.append(seconds)
            self.step_age = 0

    def _wait(self, by_plan: float, task, factors: collections.deque):
        """Wait until a part is over that was queued while no answer ran, and note how long it took."""
        span = task.result()
        task.worker.wait(span.end)
        if by_plan:
            factors.append(min(span.seconds, LONGEST_PAUSE) / by_plan)

    def _measure(self, by_plan: float, charged: float, taken: float, factors: collections.deque):
        """Parts took so many seconds. What they were charged is corrected."""
        if by_plan:                     # 0 for hops that take no time, and layers of which plans know nothing
            factors.append(taken / by_plan)
            self._owe((taken - charged) * (1 / PROMPT_SHARE - 1))
