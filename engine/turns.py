"""Whose turn it is: which prompt gets the next pass, and when running answers come before prompts.

Prompts take turns by length and by age. The next pass belongs to the prompt with the fewest tokens left, the turn after
that to the oldest prompt. So the shortest prompt waits for one pass of another prompt at most, and the oldest gets on
however many shorter ones arrive.

While answers run, passes over prompts get at most PROMPT_SHARE of the time. After the work of a pass the answers have
decode steps for themselves until they have had their share. A pass that made the answers wait for longer than PAUSE
makes the following passes smaller. The times are measured on the host. No token depends on them: they decide when
something is computed, and never what.
"""

import collections
import time

from engine.prefix import PAGE_TOKENS

PROMPT_SHARE = 0.5          # most of the time that passes over prompts get while answers run
PAUSE = 0.25                # seconds without a token of an answer, about, at most
LONGEST_PAUSE = 10.0        # a longer one was no work of a card: the process was suspended
RUNNING_CHUNK = 512         # most tokens of a pass over a prompt while answers run


class Turns:
    """The turns of prompts and answers on `n_stages` cards. A prompt is a Sequence whose prompt is not computed yet.

    clock: seconds; another one in tests.
    """

    def __init__(self, n_stages: int, clock=time.perf_counter):
        self.n_stages, self.clock = n_stages, clock
        self.passed_over = None         # the oldest prompt, if the last pass belonged to a shorter one
        self.n_passes = 0               # passes queued so far while answers ran
        self.unmeasured = collections.deque()   # tokens of the last ones of these, whose times are not known yet
        self.owed = 0.0                 # seconds that answers are still to have before the next pass
        self.limit = RUNNING_CHUNK      # tokens of a pass while answers run, at most
        self.landed_at = clock()        # when the host last got tokens of an answer

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
        """Whether a pass may be queued beside running answers. Each card may have a pass whose time is not known."""
        return self.owed <= 0 and len(self.unmeasured) < self.n_stages

    def add_pass(self, n_tokens: int):
        """A pass was queued beside running answers."""
        self.n_passes += 1
        self.unmeasured.append(n_tokens)

    def land(self, n_passes: int):
        """The tokens of a decode step have come, or the first token of an answer. n_passes: what it was when they were
        queued."""
        now = self.clock()
        seconds, self.landed_at = min(now - self.landed_at, LONGEST_PAUSE), now
        n_tokens = 0                    # of the passes that are over now
        while len(self.unmeasured) > self.n_passes - n_passes:
            n_tokens += self.unmeasured.popleft()
        if not n_tokens:
            self.owed = max(self.owed - seconds, 0.0)
            return
        self.owed += seconds * (1 / PROMPT_SHARE - 1)
        if seconds > PAUSE:
            self.limit = max(self.limit // 2, PAGE_TOKENS)
        elif seconds < PAUSE / 2 and n_tokens >= self.limit:
            self.limit = min(self.limit * 2, RUNNING_CHUNK)
