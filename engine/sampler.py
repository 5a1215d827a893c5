"""The choice of tokens at the end of a step: what the sampling kernels keep on the last card, and how tokens get to the
host.

A step of n answers has `width` rows for each answer: row j * n + i is row j of answer i. Row 0 holds the answer's
latest token and the others hold drafts of what may follow. The sampler chooses a token after each row. Then `accept`
(kernels/accept.py) finds how many drafts equal what was chosen, and writes an outcome for each answer: its new tokens
and, once the drafters have run, the drafts for the next step. kernels/advance.py has the columns of an outcome.
"""

import itertools
import secrets
import time
from dataclasses import dataclass

import llguidance
import llguidance.numpy
import numpy as np

from engine.constraints import Constraint, along
from engine.plan import Demand, step_rows
from engine.prefix import PAGE_TOKENS, pages_for
from engine.request import Request
from engine.worker import Task
from kernels import accept, advance, logprobs, ngram, sample
from kernels.card import Array, Card, Event
from kernels.records import CHECK_ROWS


class Tokens:
    """Outcomes of a step on their way from the card to the host: the tokens that were chosen, and the next drafts.

    found: the task that returns what `Sampler.read_back` returns."""

    def __init__(self, found: Task):
        self.found, self.report = found, None
        self.taken: Task | None = None      # the first stage's task that takes them for the next step

    def arrived(self) -> np.ndarray:
        """Waits for the outcomes and returns them, int32 [n answers, columns of kernels/advance.py]. The array is used
        again: the second `read_back` of the group after this one may overwrite it."""
        outcomes, self.report, arrived = self.found.result()
        self.found.worker.wait(arrived)
        return outcomes

    def read(self) -> np.ndarray:
        """Like `arrived`, for the scheduler. The first stage's worker needs the same tokens for the next step, and its
        card may be idle until it has them. So this waits until that worker has taken them: two threads that wake at the
        same time would compete for the interpreter's lock."""
        if self.taken is not None:
            self.taken.wait()
        return self.arrived()

    def log_probs(self, row: int, top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
        """The log-probability of the token that was chosen after a row of the step, and the `top` likeliest tokens with
        theirs. The tokens were read."""
        own, likeliest, ids = logprobs.unpack_report(self.report)
        return float(own[row]), tuple(zip(ids[row, :top].tolist(), likeliest[row, :top].tolist()))


DRAFT_SECONDS = 0.005       # of making masks, after which no further row of drafts gets one
BUFFERS = 2                 # result buffers of a group: one is read while the next step writes the other
FIRST_TOKENS = -1           # stands for the number of a group where the first token after a prompt is chosen


@dataclass
class Results:
    """A buffer for what `Sampler.launch` finds, and the host memory that the buffer is copied to."""

    outcomes: Array                             # int32, a row for each answer
    report: Array                               # of log-probabilities, a row for each row of the step
    on_host: tuple[np.ndarray, np.ndarray]      # page-locked, the same two
    copied: Event | None = None                 # after this event the buffer may be written again


class Sampler:
    """The memory of the sampling kernels on a card: parameters, number of the next draw, token history, biases, masks
    and text of every slot, and buffers for their results.

    Each step writes its results to another buffer than the step before, so that their copy to the host runs beside the
    next step. Between two steps the copy would make the card wait.
    """

    def __init__(self, card: Card, demand: Demand, n_vocab: int, prompt_rows: int):
        """prompt_rows: most rows of a prompt's pass."""
        self.card, self.demand, self.n_vocab = card, demand, n_vocab
        n_slots, self.step_rows = demand.slots, step_rows(demand.slots, demand.drafts)
        self.state = sample.SamplingState.allocate(card, n_slots, self.step_rows, n_vocab)
        self.log_probs = logprobs.LogprobState.allocate(card, self.step_rows, n_vocab)
        self.chosen = card.alloc(self.step_rows, np.int32, "tokens chosen after each row")
        self.texts = ngram.Texts.allocate(card, n_slots, pages_for(demand.n_ctx) * PAGE_TOKENS)
        self.script: Array | None = None    # see `follow_script`
        self.prompt_tokens = card.alloc(prompt_rows, np.int32, "tokens of a prompt that get log-probabilities")
        self.prompt_reports = card.alloc((prompt_rows, logprobs.REPORT), np.uint32, "log-probabilities of a prompt")
        self.masks, self.copies = card.pinned(self.state.mask.shape, np.uint32), card.stream()
        # On an emulated card a stream is a thread that shares the processors with the kernels: one is enough.
        self.reads = card.default_stream if card.kind == "emulated" else card.stream("reads")
        self.executor = llguidance.LLExecutor()

    def allocate(self, n_groups: int):
        """Take the memory of the result buffers. Each group of answers has BUFFERS of them. First tokens of prompts
        have n_groups + 1, as up to n_groups first tokens may be unread."""
        counts = [BUFFERS] * n_groups + [n_groups + 1]      # those of FIRST_TOKENS stand last
        arrays = [self.card.zeros((sum(counts), self.demand.slots, advance.N_OUTCOME), np.int32, "outcomes of steps"),
                  self.card.alloc((sum(counts), self.step_rows, logprobs.REPORT), np.uint32, "log-probabilities")]
        on_host = zip(*(self.card.pinned(array.shape, array.dtype) for array in arrays))
        results = map(Results, *arrays, on_host)
        self.results = [list(itertools.islice(results, n)) for n in counts]
        self.latest = [0] * len(counts)         # the buffer that each group used last

    def prepare_slot(self, slot: int, request: Request):
        """Set a slot's parameters for a request."""
        r, state = request, self.state
        seed = secrets.randbits(64) if r.seed is None else r.seed
        packed = sample.pack_parameters(
            r.temperature, r.top_k, r.top_p, r.min_p, seed, repetition=r.repetition_penalty,
            frequency=r.frequency_penalty, presence=r.presence_penalty, masked=r.is_masked,
            biased=bool(r.logit_bias))
        self.card.copy_in(state.parameters[slot], packed)
        if packed[sample.FLAGS] & sample.PENALIZED:
            history = np.zeros(self.n_vocab, np.uint16)
            history[r.prompt_ids] = sample.IN_PROMPT
            self.card.copy_in(state.history[slot], history)
        most = self.demand.drafts if r.draft is None else min(r.draft, self.demand.drafts)
        self.card.copy_in(self.texts.ids[slot][:len(r.prompt_ids)], np.array(r.prompt_ids, np.int32))
        self.card.copy_in(self.texts.most[slot:slot + 1], np.array([most], np.int32))
        if r.is_masked:
            self.card.fill(self.masks_of(state.mask, slot), 0xFF, self.copies)  # all tokens, until a constraint binds
            self.card.default_stream.wait(self.copies.record())
        if r.logit_bias:
            bias = np.zeros(self.n_vocab, np.float32)
            bias[list(r.logit_bias)] = list(r.logit_bias.values())
            self.card.copy_in(state.bias[slot], bias)

    @staticmethod
    def masks_of(masks, slot: int):
        """The masks of a slot: one for each row that a step may have of it."""
        return masks[slot * CHECK_ROWS:(slot + 1) * CHECK_ROWS]

    def make_masks(self, constraints: dict[int, Constraint], drafts: dict[int, list[int]]):
        """Write the masks of slots on the host: what each row of the next step may choose. Row j follows the first j of
        the slot's drafts. Some rows choose nothing, so that the check ends before them: rows behind a draft that may
        not stand there, rows whose matcher has failed, and rows that would keep all answers waiting, because the masks
        of the rows before them took longer than DRAFT_SECONDS. If a failed matcher comes again as the first row of a
        step, the answer's own matcher fails.
        The tokens that were chosen under the last masks must have been read: the host's masks are overwritten."""
        started = time.perf_counter()
        walks = {slot: along(constraint, drafts[slot]) for slot, constraint in constraints.items()}
        for slot in walks:
            self.masks_of(self.masks, slot)[:len(drafts[slot]) + 1] = 0
        for row in range(CHECK_ROWS):
            if not walks or row and time.perf_counter() - started > DRAFT_SECONDS:
                return
            found = {slot: next(walk, None) for slot, walk in walks.items()}
            walks = {slot: walk for slot, walk in walks.items() if found[slot] is not None}
            self._make_row(row, {slot: found[slot] for slot in walks})

    def _make_row(self, row: int, constraints: dict[int, Constraint]):
        """Write the masks of one row of slots: what their constraints allow next."""
        free = []
        for slot, constraint in constraints.items():
            mask = self.masks_of(self.masks, slot)[row]
            if constraint.forced:
                token = constraint.forced[0]
                mask[token // 32] = 1 << token % 32
            elif constraint.matcher is None:
                mask[:] = 0xFFFFFFFF
            else:
                free.append((constraint.matcher, slot * CHECK_ROWS + row))
        if free:
            llguidance.numpy.fill_next_token_bitmask_par(self.executor, free, self.masks.view(np.int32))
        for matcher, at in free:
            if matcher.is_error():
                self.masks[at] = 0

    def send_masks(self, slots: list[int], free: set[int], width: int):
        """Queue the copy of masks to the card, for the next `launch`. Slots in `free` get masks that allow all. The
        copies run beside the kernels of the default stream. All writes of masks go to the stream `copies`, which keeps
        their order."""
        for slot in free:
            self.card.fill(self.masks_of(self.state.mask, slot), 0xFF, self.copies)
        for slot in slots:
            self.card.copy_in(self.masks_of(self.state.mask, slot)[:width], self.masks_of(self.masks, slot)[:width],
                              self.copies)
        self.card.default_stream.wait(self.copies.record())

    def next_buffer(self, group: int) -> int:
        """The index of the next result buffer of a group, or of FIRST_TOKENS. On the card, what is queued after this
        call runs once the buffer's earlier results have been copied to the host."""
        buffer = self.latest[group] = (self.latest[group] + 1) % len(self.results[group])
        if copied := self.results[group][buffer].copied:
            self.card.default_stream.wait(copied)
        return buffer

    def launch(self, logits: Array, rows, n: int, results: Results, log_probs: bool):
        """Queue the choice of a token after each row, and the outcomes of the n answers without the next drafts. rows:
        qengine.Rows of a step. The launches can be recorded."""
        card = self.card
        sample.sample(card, self.chosen, logits, rows, self.state, n, rows.n // n)
        if log_probs:
            logprobs.logprobs(card, results.report, logits, self.chosen, self.log_probs, rows.n, self.n_vocab)
        accept.accept(card, results.outcomes, self.chosen, rows, self.state, n, rows.n // n)

    def read_back(self, group: int, buffer: int, n: int, n_rows: int) -> tuple[np.ndarray, np.ndarray | None, Event]:
        """Queue the copy of a buffer's outcomes of n answers to the host, beside what is queued next, and of its report
        of log-probabilities for n_rows rows. Returns both, None for a report of 0 rows, and the event after which they
        are there."""
        results = self.results[group][buffer]
        outcomes, report = results.on_host[0][:n], results.on_host[1][:n_rows]
        self.reads.wait(self.card.default_stream.record())
        self.card.copy_out(outcomes, results.outcomes[:n], self.reads)
        if n_rows:
            self.card.copy_out(report, results.report[:n_rows], self.reads)
        results.copied = self.reads.record()
        return outcomes, report if n_rows else None, results.copied

    def continue_drafts(self, outcomes: Array, answers: Array, n: int):
        """Where the draft block has left room for drafts, fill in the tokens that followed earlier in the text after
        the same tokens as its last ones."""
        ngram.ngram(self.card, outcomes, answers, self.texts, n)
        if self.script is not None:
            ngram.script(self.card, outcomes, answers, self.script, n)

    def follow_script(self, texts: dict[int, list[int]] | None):
        """See `Pipeline.follow_script`."""
        self.script = None
        if texts is not None:
            tokens = np.full(self.texts.ids.shape, -1, np.int32)
            for slot, text in texts.items():
                tokens[slot, :len(text)] = text
            self.script = self.card.upload(tokens)
