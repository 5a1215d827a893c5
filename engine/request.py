"""A request for text, and the answer on its way: what a caller of an engine says and hears.

Four kinds of error leave an engine on purpose: `ModelError` for a file that cannot be used, `RequestError` for a
request that cannot be answered, `DeadlineExceeded` for one that was not answered in the time it allows, `EngineStopped`
once there is no engine to answer it. Each carries one sentence that a person can act on. kernels/ adds `CardError`, of
a card, and `CompileError`, for a kernel that cannot be compiled.
"""

import dataclasses
import math
import numbers
import queue
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.limits import MOST_DRAFTS, SAMPLING
from engine.patience import too_late
from engine.repetition import RepetitionGuard
from engine.speculate import Drafts
from kernels.logprobs import REPORT, TOP, unpack_report


class ModelError(Exception):
    """A model file that cannot be used. The text is one sentence: file, key or tensor, byte position."""


class RequestError(Exception):
    """A request that cannot be answered. `field` names the part of the request that is at fault."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


class ContextExceeded(RequestError):
    """A prompt that leaves no room for an answer. n_prompt: its tokens, or the fewest that it can have where it is too
    long to be cut into tokens; n_ctx: tokens that the context holds, prompt and answer together."""

    def __init__(self, n_prompt: int, n_ctx: int, is_exact: bool = True):
        count = f"{n_prompt} tokens" if is_exact else f"at least {n_prompt} tokens"
        super().__init__("prompt", f"This model's maximum context length is {n_ctx} tokens. However, your prompt "
                                   f"resulted in {count}, and the answer needs at least one more.")
        self.n_prompt, self.n_ctx = n_prompt, n_ctx


class EngineStopped(Exception):
    """The engine answers no more: it was closed, or it failed. The text says which."""


class DeadlineExceeded(Exception):
    """A generation took longer than its request allows."""


class Fault(NamedTuple):
    """What ended the work of an engine."""

    card: str | None        # its name, if a card is at fault
    what: str
    since: float            # Unix time

    @classmethod
    def of(cls, error: BaseException) -> "Fault":
        card, what = getattr(error, "card", None), str(error) or type(error).__name__
        name = card and card.name
        return cls(name, what if card is None or name in what else f"{name}: {what}", time.time())


STOPS, STOP_LETTERS = 64, 1024      # the most stop strings of a request, and the most letters of each
GRAMMAR_LETTERS = 1 << 18   # the most letters of a grammar


def is_within(kind: type, value, low, high) -> bool:
    """Whether `value` is a number from `low` to `high`, a whole one if `kind` is int. A NaN is not."""
    is_number = isinstance(value, numbers.Integral if kind is int else numbers.Real) and not isinstance(value, bool)
    return is_number and low <= value <= high


def check_sampling(name: str, value, field: str | None = None):
    """Returns `value` if SAMPLING allows it as `name`. Otherwise raises RequestError for `field`, by default `name`."""
    kind, low, high, _ = SAMPLING[name]
    if not is_within(kind, value, low, high):
        noun = "a whole number" if kind is int else "a number"
        raise RequestError(field or name, f"'{field or name}' must be {noun} from {low} to {high}")
    return value


def several(values) -> tuple:
    """One value or several as a tuple. A text is one."""
    return tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else (values,)


@dataclass
class Request:
    """What a caller wants generated; SAMPLING has the meaning and the limits of the numbers."""

    prompt_ids: list[int]
    max_tokens: int | None = None       # None: until the model ends or the context is full
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None             # None: another one for every request
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    thinking_budget: int | None = None
    logit_bias: dict[int, float] = dataclasses.field(default_factory=dict)  # token id -> number added to its logit
    top_logprobs: int | None = None     # log-probabilities of the tokens, and of so many of the likeliest
    prompt_logprobs: int | None = None  # the same of the prompt; the prefix cache is not used then
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()          # strings that end the text and are not part of it; a single str is one string
    stop_token_ids: tuple[int, ...] = ()        # tokens that end the answer as the model's own end tokens do
    special: bool = False               # whether control tokens are part of the text
    # Three token ids say where thoughts end and tool calls begin (api/chat.py): stop strings count between the two.
    stop_after: int | None = None       # they count only after this token and the line breaks that follow it
    stop_pause: int | None = None       # if given: stop_after holds only for answers that begin with this token
    stop_before: int | None = None      # they do not count from this token on
    grammar: str | None = None          # a grammar for the answer, as llguidance.LLMatcher.grammar_from_... gives it
    grammar_after: int | None = None    # token id: only the text after it obeys the grammar
    repetition_guard: bool = False      # end an answer that repeats itself, see RepetitionGuard; not with ignore_eos
    timeout: float | None = None        # seconds from `submit` on, after which it ends with DeadlineExceeded
    draft: int | None = None            # most drafts checked at once; None: what the engine was loaded for
    sparse: bool | None = None          # whether a long prompt leaves out keys; None: what the engine was loaded for
    pictures: tuple = ()                # Pictures of engine/images.py, in the order of their tokens in the prompt

    def __post_init__(self):
        self.stop, self.stop_token_ids = several(self.stop), several(self.stop_token_ids)

    @property
    def is_penalized(self) -> bool:
        """Whether a penalty is set, so that sampling needs the history of tokens."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    @property
    def limits_thoughts(self) -> bool:
        """Whether the answer may hold thoughts, and these have a budget (engine/thinking.py)."""
        return self.thinking_budget is not None and self.stop_after is not None

    @property
    def is_masked(self) -> bool:
        """Whether the sampler may choose only some of the tokens, now and then at least."""
        return self.grammar is not None or self.limits_thoughts

    def check(self, n_vocab: int, n_ctx: int):
        """Raises RequestError for the first field that cannot be served."""
        if not self.prompt_ids:
            raise RequestError("prompt", "the prompt is empty")
        if len(self.prompt_ids) >= n_ctx:
            raise ContextExceeded(len(self.prompt_ids), n_ctx)
        if not all(0 <= token < n_vocab for token in self.prompt_ids):
            raise RequestError("prompt", f"a token id of the prompt is outside 0 .. {n_vocab - 1}")
        if len(self.stop) > STOPS or not all(isinstance(string, str) and 1 <= len(string) <= STOP_LETTERS
                                              for string in self.stop):
            raise RequestError("stop", f"'stop' may hold {STOPS} strings, each of 1 to {STOP_LETTERS} letters")
        if self.draft is not None and not is_within(int, self.draft, 0, MOST_DRAFTS):
            raise RequestError("draft", f"'draft' must be a whole number from 0 to {MOST_DRAFTS}")
        if self.sparse is not None and not isinstance(self.sparse, bool):
            raise RequestError("sparse", "'sparse' must be true or false")
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise RequestError("timeout", "'timeout' must be a number of seconds above 0")
        for name in ("stop_after", "stop_pause", "stop_before", "grammar_after"):
            if (token := getattr(self, name)) is not None and not is_within(int, token, 0, n_vocab - 1):
                raise RequestError(name, f"'{name}' must be a token id from 0 to {n_vocab - 1}")
        ends = self.stop_token_ids
        if len(ends) > STOPS or not all(is_within(int, token, 0, n_vocab - 1) for token in ends):
            raise RequestError("stop_token_ids", f"'stop_token_ids' may hold {STOPS} token ids from 0 to {n_vocab - 1}")
        for name in ("top_logprobs", "prompt_logprobs"):
            if (top := getattr(self, name)) is not None and not is_within(int, top, 0, TOP):
                raise RequestError(name, f"'{name}' must be a whole number from 0 to {TOP}")
        if self.grammar is not None and not isinstance(self.grammar, str):
            raise RequestError("grammar", "'grammar' must be a text")
        if self.grammar is not None and len(self.grammar) > GRAMMAR_LETTERS:
            raise RequestError("grammar", f"the grammar has {len(self.grammar)} letters, "
                                          f"and may have {GRAMMAR_LETTERS}")
        for token, bias in self.logit_bias.items():
            if not is_within(int, token, 0, n_vocab - 1):
                raise RequestError("logit_bias", f"{token!r} is no token id from 0 to {n_vocab - 1}")
            if not is_within(float, bias, -100, 100):
                raise RequestError("logit_bias", f"the bias of token {token} must be a number from -100 to 100")
        for name in SAMPLING:
            if (value := getattr(self, name)) is not getattr(Request, name):    # a default may be None
                check_sampling(name, value)


def is_sparse(request: Request, wish: str) -> bool:
    """Whether the prompt of a request leaves out keys (kernels/block_sparse.py), in an engine loaded with this wish:
    "off", "ask" or "on". Raises RequestError."""
    if request.sparse and wish == "off":
        raise RequestError("sparse", "this model reads prompts whole: it was loaded without --sparse")
    return wish == "on" if request.sparse is None else bool(request.sparse)


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of the tokens of a prompt from the second one on, since the first one follows nothing. They are
    those of the model, as in `Delta`."""

    own: np.ndarray         # float32 [n - 1] of the tokens of the prompt
    likeliest: np.ndarray   # float32 [n - 1, top] of the likeliest tokens in the place of each, the likeliest first
    ids: np.ndarray         # int32 [n - 1, top] of these

    @classmethod
    def of(cls, reports: list[np.ndarray], top: int) -> "PromptLogprobs":
        """From the reports of kernels/logprobs.py, in the order of the tokens."""
        own, likeliest, ids = unpack_report(np.concatenate([*reports, np.empty((0, REPORT), np.uint32)]))
        return cls(own.copy(), likeliest[:, :top].copy(), ids[:, :top].copy())


@dataclass(frozen=True)
class Delta:
    """A generated token, and the text that can be shown now: letters that may belong to a stop string or to an
    unfinished character are held back. The last Delta of an answer has a finish reason, "stop" or "length". Its cause
    says more where there is more to say: "repetition" if the answer was cut because it repeated itself.
    Log-probabilities are those of the model, before anything that a request asks of sampling."""

    token_id: int
    text: str
    finish_reason: str | None = None
    logprob: float | None = None        # if the request asks for log-probabilities
    top_logprobs: tuple[tuple[int, float], ...] = ()        # of the likeliest tokens
    cause: str | None = None
    prompt_logprobs: PromptLogprobs | None = None           # with the first Delta, if the request asks for them


class StopScanner:
    """Cuts a text, which arrives in pieces, just before the stop string that ends first. Of several that end at the
    same letter, the longest counts. Letters that may become a stop string are held back.

    The result does not depend on how the text is cut. Over a whole text, a letter costs at most two comparisons per
    stop string on average (Knuth, Morris and Pratt, "Fast pattern matching in strings")."""

    def __init__(self, stop):
        self.stop = [(string, borders(string)) for string in stop]
        self.begun = [0] * len(self.stop)       # for each stop string: how many of its first letters the text ends with
        self.held = ""
        self.stopped = False        # a stop string was found

    def push(self, piece: str) -> str:
        """Take another piece and return the text that can be shown now."""
        text = self.held + piece
        for end, letter in enumerate(piece if self.stop else "", len(self.held) + 1):
            self.begun = [lengthened(n, letter, *stop) for n, stop in zip(self.begun, self.stop)]
            found = [n for n, (string, _) in zip(self.begun, self.stop) if n == len(string)]
            if found:
                self.stopped, self.held = True, ""
                return text[:end - max(found)]
        shown = len(text) - max(self.begun, default=0)
        self.held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The letters that were held back, when the text ends without a stop string."""
        text, self.held, self.begun = self.held, "", [0] * len(self.stop)
        return text


def borders(string: str) -> list[int]:
    """For each beginning of the string, the length of its longest border: of the longest shorter string with which it
    both begins and ends."""
    found = [0]
    for letter in string[1:]:
        found.append(lengthened(found[-1], letter, string, found))
    return found


def lengthened(n: int, letter: str, string: str, borders: list[int]) -> int:
    """A text ended with the first n letters of `string`, fewer than all, and now gets `letter`. Returns the new n (a
    step of Knuth, Morris and Pratt)."""
    while n and string[n] != letter:
        n = borders[n - 1]
    return n + (string[n] == letter)


class Job:
    """A request on its way through an engine, of whatever kind. The request has `timeout`."""

    def __init__(self, request, n_prompt: int):
        self.request, self.n_prompt = request, n_prompt
        self.cancelled = False
        self.finish_reason: str | None = None   # None when cancelled or failed
        self.error: Exception | None = None     # what the job failed with
        self.started = time.perf_counter()
        self.deadline = self.started + (math.inf if request.timeout is None else request.timeout)
        self._done = threading.Event()

    def cancel(self):
        """End the job within one step or pass of the engine, whether it waits or runs."""
        self.cancelled = True

    def is_over(self) -> bool:
        """Whether the rest is not wanted: it was cancelled, or takes longer than its request allows."""
        return self.cancelled or time.perf_counter() > self.deadline

    def overdue(self) -> DeadlineExceeded | None:
        """The error that a job ends with when `is_over`; None if it was cancelled."""
        if self.cancelled:
            return None
        return DeadlineExceeded(too_late(self.request.timeout))

    def wait(self, seconds: float | None = None) -> bool:
        """Return when the job has finished, failed or been cancelled: true. Or after so many seconds: false."""
        return self._done.wait(seconds)


class Timings(NamedTuple):
    """The seconds of an answer that has at least one token, and its tokens per second, as the engine has measured
    them. The prompt gives the first token, so the speed of the answer is that of the others."""

    waiting: float              # until the engine began with the prompt
    prompt: float               # from then to the first token
    answer: float               # from the first token to the last
    prompt_speed: float         # of the tokens that were not cached
    answer_speed: float | None  # None: there is no second token


class Answer(Job):
    """A request for text on its way, as its readers see it. Iterating over it gives its Deltas."""

    def __init__(self, request: Request):
        super().__init__(request, len(request.prompt_ids))
        self.n_generated = 0
        self.waited = self.first_after = self.last_after = 0.0      # seconds from `started`, see Timings
        self.n_cached = 0           # tokens of the prompt that were not computed, because they were cached
        self.n_read = 0             # tokens of the prompt so far that were cached, or whose passes are queued
        self.drafts = Drafts()      # how many were checked and accepted
        self.is_sparse = False      # whether its prompt leaves out keys
        self.keys_read = self.keys_seen = 0     # once such a prompt is read: pages of keys, over layers and KV heads
        self.cause: str | None = None           # of the last Delta
        self.token_times: list[float] = []      # when the engine gave each token; a reader may get several at once
        self._deltas = queue.SimpleQueue()
        self.wake = threading.Event()           # set whenever `take` has something to give

    def begin(self):
        """The engine begins with the prompt: the request waits no longer."""
        self.waited = time.perf_counter() - self.started

    def timings(self) -> Timings:
        """The Timings so far. There must be a token."""
        prompt, answer = self.first_after - self.waited, self.last_after - self.first_after
        return Timings(self.waited, prompt, answer, (self.n_prompt - self.n_cached) / prompt,
                       (self.n_generated - 1) / answer if answer else None)

    def __iter__(self):
        """Deltas as they come. Ends without a finish reason when the generation was cancelled. Raises what the
        generation failed with; EngineStopped if the engine failed."""
        return filter(None, self.listen())

    def listen(self, patience: float | None = None):
        """The Deltas that iteration gives, and None whenever nothing has come for `patience` seconds."""
        return (said and said[1] for said in deltas_of([self], patience))

    def take(self) -> Delta | Exception | None:
        """The next Delta; at the end None, or what the generation failed with. Raises queue.Empty if nothing has come
        yet."""
        said = self._deltas.get_nowait()
        if not isinstance(said, Delta):
            self._put(said)                     # the end stays in the queue for further calls
        return said

    def _put(self, said: Delta | Exception | None):
        self._deltas.put(said)
        self.wake.set()

    def close(self, error: Exception | None = None):
        """No more Deltas come; `error` is raised where the Deltas are read."""
        self.error = error
        self._put(error)
        self._done.set()


class Generation(Answer):
    """An Answer as the engine makes it, token by token."""

    def __init__(self, request: Request, tokenizer, constraint=None, pictures=None):
        """pictures: the PromptPictures of engine/sight.py, or None."""
        super().__init__(request)
        self.constraint, self.pictures = constraint, pictures
        self.prompt_logprobs: PromptLogprobs | None = None  # set before the first token
        self._decoder, self._scanner = tokenizer.stream_decoder(request.special), StopScanner(request.stop)
        self._ends = {*request.stop_token_ids, *tokenizer.eos_ids}     # tokens that are not part of the text they end
        is_guarded = request.repetition_guard and not request.ignore_eos
        self._guard = RepetitionGuard(tokenizer, request.prompt_ids) if is_guarded else None
        self._scans = request.stop_after is None or request.stop_pause is not None
        self._at_start = not self._scans    # true while line breaks before the scanned text are skipped

    def push(self, token: int, finish_reason: str | None, logprob: float | None = None, top_logprobs=()) -> str | None:
        """Take the next token from the scheduler. Returns the finish reason, which may be that of a stop string or of
        the guard against repetition."""
        self.n_generated += 1
        self.token_times.append(time.perf_counter())
        self.last_after = self.token_times[-1] - self.started
        self.first_after = self.first_after or self.last_after
        if self._guard and self._guard.push(token) and not finish_reason:
            finish_reason, self.cause = "length", "repetition"
        text = ""
        if token == self.request.stop_pause and self.n_generated == 1:
            self._scans, self._at_start = False, True
        elif token == self.request.stop_before:
            text, self._scans = self._scanner.flush(), False
        is_end = finish_reason == "stop" and token in self._ends
        text += self._scan("" if is_end else self._decoder.push(token))
        if finish_reason and not self._scanner.stopped:
            text += self._scan(self._decoder.flush()) + self._scanner.flush()
        if self._scanner.stopped:
            finish_reason, self.cause = "stop", None
        self.finish_reason = finish_reason
        self._scans = self._scans or token == self.request.stop_after
        of_prompt, self.prompt_logprobs = self.prompt_logprobs, None
        self._put(Delta(token, text, finish_reason, logprob, top_logprobs, self.cause, of_prompt))
        return finish_reason

    def _scan(self, piece: str) -> str:
        if not self._scans:
            return piece
        text = piece.lstrip("\n") if self._at_start else piece
        self._at_start = self._at_start and not text
        return piece[:len(piece) - len(text)] + self._scanner.push(text)


def read_of(jobs: list[Job]) -> tuple[int, int]:
    """How much of the prompts of some jobs is read, in tokens, and how long these prompts are."""
    return sum(job.n_read for job in jobs), sum(job.n_prompt for job in jobs)


def share_read(generations: list) -> float | None:
    """The share of the keys that sparse prompts have read, all layers together; None if none of them is sparse, or
    has been read."""
    sparse = [generation for generation in generations if getattr(generation, "keys_seen", 0)]
    return sum(g.keys_read for g in sparse) / sum(g.keys_seen for g in sparse) if sparse else None


def deltas_of(generations: list[Answer], patience: float | None = None):
    """The Deltas of generations as they come, each as (index, Delta), and None whenever nothing has come for `patience`
    seconds. Raises what the first of the failed generations failed with."""
    wake, reading = generations[0].wake, dict(enumerate(generations))
    for generation in generations:
        generation.wake = wake                  # one event for all; Deltas from before are found in the first round
    while reading:
        wake.clear()
        is_silent = True
        for index, generation in list(reading.items()):
            try:
                said = generation.take()
            except queue.Empty:
                continue
            is_silent = False
            if isinstance(said, Delta):
                yield index, said
            elif said is None:
                del reading[index]
            else:
                raise said
        if is_silent and not wake.wait(patience):
            yield None
