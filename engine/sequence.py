"""A generation that holds a slot, as the scheduler follows it."""

from engine.prefix import PAGE_TOKENS, Branch, Node
from engine.request import Generation, PromptLogprobs
from engine.worker import Task

FORCED_ROWS = 8             # most tokens in one decode pass over tokens that a grammar forces


class Sequence(Branch):
    """A generation that holds a slot: its tokens, and how many of them have been computed."""

    def __init__(self, generation: Generation, slot: int, n_pages: int, root: Node):
        super().__init__(slot, generation.request.prompt_ids, root)
        self.generation = generation
        self.n_pages = n_pages          # pages that are promised to the sequence: the most it can need
        self.marks: list[int] = []      # positions in the prompt where checkpoints are taken
        self.last_pass = 0              # tokens of its prompt's latest pass
        self.in_flight = 0              # tokens that a queued decode step will choose: 0 or 1
        self.group: int | None = None   # the group of answers in whose decode steps it takes part
        self.uses_cache = generation.request.prompt_logprobs is None    # these need every token of the prompt computed
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

    def n_forced(self, n_ctx: int) -> int:
        """How many forced tokens one pass can append. A pass stays within a page. The result is 0 if the sampler must
        see each token: for its log-probability, or for penalties."""
        constraint, request = self.generation.constraint, self.generation.request
        if not constraint or not constraint.binds() or request.top_logprobs is not None or request.is_penalized:
            return 0
        n = min(len(constraint.forced), self.room(n_ctx)) - self.in_flight
        return min(n, FORCED_ROWS, PAGE_TOKENS - (self.n_computed + self.in_flight) % PAGE_TOKENS)
