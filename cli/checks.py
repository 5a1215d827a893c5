"""How much faster drafts make decoding: what `--bench` does with --draft and with --check-widths.

Random weights predict nothing that a drafter could guess. So the tokens of a plain run are recorded and serve as drafts
for a second run from the same states. Each is made wrong with the probability 1 - P of --acceptance. A script on the
card (`Pipeline.follow_script`) puts them in the place of the drafters' own. All else is as in use: the model's draft
block, if there is one, makes as many drafts as are checked, but they are not used. The second run has to choose the
tokens of the first one.

What a check costs by itself is measured with drafts that are all right, so that all rows count and are kept.
"""

import dataclasses
import time
from dataclasses import dataclass

import numpy as np

import qengine
from engine.request import Request
from kernels.advance import COUNT, TOKENS, answer_of
from kernels.card import CardError
from kernels.records import CHECK_ROWS

from .options import ACCEPTANCE

TOKENS_OF_A_RUN, EMULATED_TOKENS = 384, 48


@dataclass(frozen=True)
class Drafted:
    """Decoding with drafts beside plain decoding, at a context: medians of the repeats. check_cost: of a step with
    drafts, in plain steps."""

    context: int
    batch: int
    drafts: int                     # checked in a step
    acceptance: float               # chance that a draft is right
    plain_tokens_per_s: float
    tokens_per_s: float
    factor: float
    repeats: list[float]            # the factor of each
    tokens_per_check: float
    check_cost: float


@dataclass(frozen=True)
class CheckCost:
    """What a step costs that checks all rows of `rows` for each answer, at a context. cost, with_drafting: in plain
    steps; the latter if the model's draft block makes as many drafts for the next step, None without a block."""

    context: int
    batch: int
    rows: int
    seconds: float
    cost: float
    with_drafting: float | None


@dataclass(frozen=True)
class Run:
    """Decode steps from the end of the prompts on: seconds, steps of each group, and the tokens of each slot."""

    seconds: float
    n_steps: int
    texts: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.texts)) / self.seconds

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.n_steps


class CheckBench:
    """Times checks on the engine of a `cli.bench.Bench`. The engine has a checkpoint for each slot of the batch and,
    behind each context, room for `room_for` more tokens. n_tokens: of an answer."""

    def __init__(self, bench, n_tokens: int):
        self.bench, self.pipeline, self.n_tokens = bench, bench.pipeline, n_tokens
        self.n_ctx, self.n_vocab = bench.engine.n_ctx, bench.engine.config.n_vocab
        self.script = {slot: [] for slot in range(bench.batch)}         # by position; -1 is none

    def drafted(self, context: int, n_drafts: int, acceptance: float) -> Drafted:
        """The Drafted at a context. Raises CardError if a token differs from plain decoding's."""
        self.compute_prompts(context)
        runs = []
        for seed in range(self.bench.repeats):
            plain = self.run(context, 1, 0)
            self.write_script(context, plain.texts, acceptance, seed)
            self.run(context, 1 + n_drafts, n_drafts, 2)                # what is new is recorded
            found = self.run(context, 1 + n_drafts, n_drafts)
            compare(plain.texts, found.texts)
            runs.append((plain, found))
        self.pipeline.follow_script(None)
        plain, speed = (float(np.median([pair[i].tokens_per_s for pair in runs])) for i in (0, 1))
        factors = [found.tokens_per_s / plain.tokens_per_s for plain, found in runs]
        costs = [found.step_seconds / plain.step_seconds for plain, found in runs]
        per_check = [sum(map(len, found.texts)) / found.n_steps / self.bench.batch for _, found in runs]
        factor, per_check, cost = (float(np.median(values)) for values in (factors, per_check, costs))
        return Drafted(context, self.bench.batch, n_drafts, acceptance, plain, speed, factor, factors, per_check, cost)

    def costs(self, context: int, widths) -> list[CheckCost]:
        """The CheckCost of checks of these widths at a context."""
        self.compute_prompts(context)
        plain = self.run(context, 1, 0)
        self.write_script(context, plain.texts, 1.0, 0)
        has_block = self.pipeline.last.model.block is not None
        kinds = {width: [0, width - 1] if has_block else [0] for width in widths}
        seconds = {(width, n): [] for width in widths for n in kinds[width]}
        for key in seconds:
            self.run(context, *key, 2)
        plain = []
        for _ in range(self.bench.repeats):                             # in turns, as clocks may drift
            plain.append(self.run(context, 1, 0).step_seconds)
            for key, found in seconds.items():
                found.append(self.run(context, *key).step_seconds)
        self.pipeline.follow_script(None)
        unit, times = np.median(plain), {key: float(np.median(found)) for key, found in seconds.items()}
        return [CheckCost(context, self.bench.batch, width, times[width, 0], times[width, 0] / unit,
                          times[width, width - 1] / unit if has_block else None) for width in widths]

    # ---- runs ----

    def compute_prompts(self, context: int):
        """Computes a prompt for each slot, and keeps the states after it as the checkpoint of the slot's number."""
        for slot in range(self.bench.batch):
            self.bench.prompt(context, slot)
            self.pipeline.save(slot, slot)

    def run(self, context: int, width: int, n_drafts: int, n_tokens: int | None = None) -> Run:
        """Decodes behind the prompts, by steps of this width, until an answer has n_tokens tokens."""
        n_tokens, groups = n_tokens or self.n_tokens, self.bench.groups
        texts, before, n_steps = [[] for _ in range(self.bench.batch)], [None] * len(groups), 0

        def take(tokens, slots):
            for slot, outcome in zip(slots, tokens.read().tolist()):
                if outcome[COUNT] < 1:
                    raise CardError(qengine.NAN_LOGITS)
                texts[slot] += outcome[TOKENS:TOKENS + outcome[COUNT]]

        for group, slots in enumerate(groups):
            for slot in slots:
                self.pipeline.prepare_slot(slot, Request([0]), slot)
            self.pipeline.place([answer_of(0, slot, context, self.n_ctx, 0, self.script[slot][context + 1:])
                                 for slot in slots], group)
        self.pipeline.settle()
        started = time.perf_counter()
        while max(map(len, texts)) < n_tokens:
            n_steps += 1
            for group, slots in enumerate(groups):
                shape = qengine.StepShape(len(slots), width, n_drafts)
                tokens, before[group] = before[group], self.pipeline.step(shape, group)
                if tokens:
                    take(tokens, slots)
        for tokens, slots in zip(before, groups):
            take(tokens, slots)
        return Run(time.perf_counter() - started, n_steps, texts)

    def write_script(self, context: int, texts: list[list[int]], acceptance: float, seed: int):
        """The drafts of the runs that follow: these tokens behind the prompts, each right with the chance
        `acceptance`, and otherwise another token."""
        random = np.random.default_rng(seed)
        for slot, text in enumerate(texts):
            tokens = np.array(text)
            others = (tokens + random.integers(1, self.n_vocab, len(tokens))) % self.n_vocab
            drafts = np.where(random.random(len(tokens)) < acceptance, tokens, others)
            self.script[slot] = [-1] * (context + 1) + drafts.tolist()
        self.pipeline.follow_script(self.script)

def compare(texts: list[list[int]], others: list[list[int]]):
    """Raises CardError where tokens with drafts differ from those without."""
    for slot, (text, other) in enumerate(zip(texts, others)):
        for i, (token, drafted) in enumerate(zip(text, other)):
            if token != drafted:
                raise CardError(f"drafts have changed token {i} of answer {slot}: {drafted} instead of {token}")


def run_tokens(emulated: bool) -> int:
    """Tokens of an answer in a run."""
    return EMULATED_TOKENS if emulated else TOKENS_OF_A_RUN


def room_for(n_tokens: int) -> int:
    """Tokens that an answer may get in a run until it has n_tokens: two steps are queued by then."""
    return n_tokens + 3 * CHECK_ROWS


def bench_checks(bench: CheckBench, contexts: list[int], options) -> dict:
    """Prints what the options ask of drafts and of checks, at each context; returns what --json has of it."""
    found = {}
    if options.draft:
        acceptance = ACCEPTANCE if options.acceptance is None else options.acceptance
        found["drafted"] = [bench.drafted(context, options.draft, acceptance) for context in contexts]
        print(f"\n{drafted_table(found['drafted'])}", flush=True)
    if options.check_widths:
        found["checks"] = [cost for context in contexts for cost in bench.costs(context, options.check_widths)]
        print(f"\n{costs_table(found['checks'])}", flush=True)
    return {name: [dataclasses.asdict(one) for one in each] for name, each in found.items()}


def drafted_table(found: list[Drafted]) -> str:
    """For people: a line for each Drafted."""
    lines = [f"{'drafts':<10}{'batch':>6}{'checked':>9}{'right':>7}{'tokens/s':>12}{'plain':>11}{'times':>8}"
             f"{'per check':>11}{'check costs':>13}"]
    lines += [f"{d.context:<10,}{d.batch:>6}{d.drafts:>9}{100 * d.acceptance:>5.0f} %{d.tokens_per_s:>12,.1f}"
              f"{d.plain_tokens_per_s:>11,.1f}{d.factor:>8.2f}{d.tokens_per_check:>11.2f}{d.check_cost:>13.3f}"
              for d in found]
    return "\n".join(lines)


def costs_table(found: list[CheckCost]) -> str:
    """For people: a line for each CheckCost. Costs are in plain steps."""
    lines = [f"{'checks':<10}{'batch':>6}{'rows':>6}{'ms':>10}{'costs':>9}{'with drafting':>16}"]
    lines += [f"{c.context:<10,}{c.batch:>6}{c.rows:>6}{1e3 * c.seconds:>10.3f}{c.cost:>9.3f}"
              + ("" if c.with_drafting is None else f"{c.with_drafting:>16.3f}") for c in found]
    return "\n".join(lines)
