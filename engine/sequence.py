"""A generation that holds a slot, as the scheduler follows it."""

import itertools

from engine.prefix import PAGE_TOKENS, Branch, Node
from engine.request import Generation, PromptLogprobs
from engine.sight import NO_PICTURES
from engine.worker import Task
from kernels.advance import COUNT, N_DRAFTS, NEXT_DRAFTS, answer_of


class Sequence(Branch):
    """A generation that holds a slot: its tokens, and how many of them have been computed."""

    def __init__(self, generation: Generation, slot: int, n_pages: int, root: Node):
        self.ids, self.pictures = generation.request.prompt_ids, generation.pictures or NO_PICTURES
        super().__init__(slot, self.pictures.keys(self.ids), root)      # `tokens`, with keys for those of pictures
        self.generation = generation
        self.n_pages = n_pages          # pages that are promised to the sequence: the most it can need
        self.marks: list[int] = []      # positions in the prompt where checkpoints are taken
        self.last_pass = 0              # tokens of its prompt's latest pass
        self.in_flight = 0              # most tokens that the queued decode step may choose, 0 if none is queued
        self.drafts: list[int] = []     # of the tokens after the latest one, for the next step
        self.accepted = 0               # drafts of the latest step that were accepted
        self.is_masked = False          # whether masks of its slot may leave out tokens
        self.group: int | None = None   # the group of answers in whose decode steps it takes part
        self.uses_cache = generation.request.prompt_logprobs is None    # these need every token of the prompt computed
        self.counts: list[Task] = []    # give the counts of a sparse prompt, see `Chooser.count`
        self.scores: list[Task] = []    # give the reports of log-probabilities of the prompt, a task for each pass

    @property
    def in_prompt(self) -> bool:
        return self.n_computed < self.n_prompt

    @property
    def is_answer(self) -> bool:
        """Whether the first token of the answer is there."""
        return len(self.tokens) > self.n_prompt

    def is_full(self, more: int, n_ctx: int) -> bool:
        """Whether the sequence reaches its length limit with so many more tokens."""
        return more >= self.room(n_ctx)

    def is_last(self, n_ctx: int) -> bool:
        """Whether the tokens in flight must be read before another step: the last allowed token is among them. Or it
        may be among them, right behind a full page: then all rows of the next step would be void, and only a row that
        is not void takes the page's checkpoint."""
        left = self.room(n_ctx)
        ends_with_page = (len(self.tokens) + left - 1) % PAGE_TOKENS == 0
        return self.in_flight > 0 and left <= (self.in_flight if ends_with_page else 1)

    def room(self, n_ctx: int) -> int:
        """How many more tokens the sequence may have."""
        longest = self.generation.request.max_tokens
        left = n_ctx - len(self.tokens)
        return left if longest is None else min(left, longest - self.generation.n_generated)

    def take_scores(self):
        """Hand the log-probabilities of the prompt to the generation, once the passes of the prompt are over."""
        if not self.uses_cache:
            reports, self.scores = [task.result() for task in self.scores], []
            self.generation.prompt_logprobs = PromptLogprobs.of(reports, self.generation.request.prompt_logprobs)

    def take_counts(self, totals: dict):
        """How many pages of keys a sparse prompt has read, for its generation and for the totals of all. The passes of
        the prompt are over."""
        for task in self.counts:        # of each stage
            counts, event = task.result()
            event.synchronize()
            for name, count in zip(("keys_read", "keys_seen"), counts.tolist()):
                setattr(self.generation, name, getattr(self.generation, name) + count)
                totals[name] += count
        self.counts = []

    @property
    def n_certain(self) -> int:
        """How many tokens are certain after those in flight: their grammar forces them."""
        constraint = self.generation.constraint
        forced = constraint.forced if constraint else ()
        n_right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self.drafts, forced)))
        return len(forced) - (self.in_flight and min(n_right + 1, self.in_flight))

    def is_ruled(self, n_rows: int) -> bool:
        """Whether its grammar or its budget of thoughts may rule the choice after one of the next n_rows tokens, or has
        left masks that do so."""
        constraint = self.generation.constraint
        return constraint is not None and (self.is_masked or constraint.binds(n_rows - 1))

    def draft_what_is_certain(self):
        """Tokens that the grammar forces become the drafts of the next step. No step is in flight."""
        if self.n_certain > 0:
            self.drafts = list(itertools.islice(self.generation.constraint.forced, N_DRAFTS))

    def answer(self, n_ctx: int) -> list[int]:
        """The record of the sequence for the next step (kernels/advance.py)."""
        return answer_of(self.tokens[-1], self.slot, len(self.tokens) - 1, len(self.tokens) + self.room(n_ctx),
                         self.accepted, self.drafts)

    def fills_page(self, outcome: list[int]) -> bool:
        """Whether the rows whose tokens count in this outcome end with a full page."""
        return outcome[COUNT] > 0 and (self.n_computed + outcome[COUNT]) % PAGE_TOKENS == 0

    def land(self, outcome: list[int], width: int, n_ctx: int) -> int:
        """A step of so many rows of the sequence has this outcome. Returns how many drafts the step has checked."""
        left_in_page = PAGE_TOKENS - 1 - self.n_computed % PAGE_TOKENS
        n_checked = max(min(width - 1, len(self.drafts), left_in_page, self.room(n_ctx) - 1), 0)
        self.in_flight, self.accepted = 0, max(outcome[COUNT] - 1, 0)
        self.drafts = list(itertools.takewhile(lambda draft: draft >= 0, outcome[NEXT_DRAFTS:]))
        return n_checked
