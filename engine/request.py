"""A request for text, and the answer on its way: what a caller of an engine says and hears.

Four kinds of error leave an engine on purpose: `ModelError` for a file that cannot be used, `RequestError` for a
request that cannot be answered, `DeadlineExceeded` for one that was not answered in the time it allows,
`EngineStopped` once there is no engine to answer it. Each carries one sentence that a person can act on. kernels/
adds `CardError`, of a card.
"""

import dataclasses
import math
import numbers
import queue
import threading
import time
from dataclasses import dataclass
from typing import NamedTuple

from kernels.logprobs import TOP


class ModelError(Exception):
    """A model file that cannot be used. The text is one sentence: file, key or tensor, byte position."""


class RequestError(Exception):
    """A request that cannot be answered. `field` names the part of the request that is at fault."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


class EngineStopped(Exception):
    """The engine answers no more: it was closed, or it failed. The text says which."""


class DeadlineExceeded(Exception):
    """A generation took longer than its request allows."""


class Fault(NamedTuple):
    """What ended the work of an engine."""

    card: str | None        # its name, where a card is at fault
    what: str
    since: float            # Unix time

    @classmethod
    def of(cls, error: BaseException) -> "Fault":
        card, what = getattr(error, "card", None), str(error) or type(error).__name__
        name = card and card.name
        return cls(name, what if card is None or name in what else f"{name}: {what}", time.time())


STOPS, STOP_LETTERS = 64, 1024      # stop strings of a request, and letters of each, at most
GRAMMAR_LETTERS = 1 << 18   # of a grammar, at most: where it spells out as many, the scheduler waits 0.5 s for it

# What a request may ask of sampling, anywhere: type, lowest, highest, meaning (for --help).
SAMPLING = {
    "max_tokens": (int, 1, 2**31 - 1, "longest answer, in tokens (default: what the context holds)"),
    "temperature": (float, 0, 2, "0 takes the likeliest token, more is more varied (default: 0, --serve: 1)"),
    "top_k": (int, 0, 2**31 - 1, "choose among the K likeliest tokens (0: all)"),
    "top_p": (float, 0, 1, "choose among the likeliest tokens that together reach this probability (1: all)"),
    "min_p": (float, 0, 1, "leave out tokens less likely than this share of the likeliest one (0: none)"),
    "seed": (int, 0, 2**64 - 1, "the same seed and prompt give the same answer"),
    "repetition_penalty": (float, 0.01, 10, "divide the logits of tokens seen in prompt or answer by this (1: off)"),
    "frequency_penalty": (float, -2, 2, "take this from a token's logit for each time that the answer has it (0: off)"),
    "presence_penalty": (float, -2, 2, "take this from the logits of tokens that the answer has (0: off)"),
}


def is_within(kind: type, value, low, high) -> bool:
    """Whether `value` is a number from `low` to `high`, a whole one if `kind` is int. A NaN is not."""
    is_number = isinstance(value, numbers.Integral if kind is int else numbers.Real) and not isinstance(value, bool)
    return is_number and low <= value <= high


def check_sampling(name: str, value, field: str | None = None):
    """`value`, if it is what SAMPLING allows as `name`; RequestError names `field`, which is `name` by default."""
    kind, low, high, _ = SAMPLING[name]
    if not is_within(kind, value, low, high):
        noun = "a whole number" if kind is int else "a number"
        raise RequestError(field or name, f"'{field or name}' must be {noun} from {low} to {high}")
    return value


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
    logit_bias: dict[int, float] = dataclasses.field(default_factory=dict)  # token id -> what its logit gains
    top_logprobs: int | None = None     # log-probabilities of the tokens, and of so many of the likeliest
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()          # strings that end the text and are not part of it; one may stand alone
    stop_after: int | None = None       # token id: stop strings count in what follows it, line breaks at once aside
    stop_pause: int | None = None       # token id: only where it begins the answer do they wait for stop_after
    stop_before: int | None = None      # token id: no stop string counts from there on
    grammar: str | None = None          # what the answer obeys, as llguidance.LLMatcher.grammar_from_... write it
    grammar_after: int | None = None    # token id: only what follows it obeys the grammar
    timeout: float | None = None        # seconds from `submit` on, after which it ends with DeadlineExceeded

    def __post_init__(self):
        self.stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_penalized(self) -> bool:
        """Whether the choice of a token depends on those before."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    def check(self, n_vocab: int, n_ctx: int):
        """RequestError names the first field that cannot be served."""
        if not self.prompt_ids:
            raise RequestError("prompt", "the prompt is empty")
        if len(self.prompt_ids) >= n_ctx:
            raise RequestError("prompt", f"the prompt has {len(self.prompt_ids)} tokens and the context holds {n_ctx}, "
                                         "prompt and answer together")
        if not all(0 <= token < n_vocab for token in self.prompt_ids):
            raise RequestError("prompt", f"a token id of the prompt is outside 0 .. {n_vocab - 1}")
        if len(self.stop) > STOPS or not all(1 <= len(string) <= STOP_LETTERS for string in self.stop):
            raise RequestError("stop", f"'stop' may hold {STOPS} strings, each of 1 to {STOP_LETTERS} letters")
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise RequestError("timeout", "'timeout' must be a number of seconds above 0")
        for name in ("stop_after", "stop_pause", "stop_before", "grammar_after"):
            if (token := getattr(self, name)) is not None and not is_within(int, token, 0, n_vocab - 1):
                raise RequestError(name, f"'{name}' must be a token id from 0 to {n_vocab - 1}")
        if self.top_logprobs is not None and not is_within(int, self.top_logprobs, 0, TOP):
            raise RequestError("top_logprobs", f"'top_logprobs' must be a whole number from 0 to {TOP}")
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


@dataclass(frozen=True)
class Event:
    """A generated token, and the text that is certain by now. The last one has a finish reason: "stop" or "length".

    Log-probabilities are those of the model, before anything that a request asks of sampling."""

    token_id: int
    text: str
    finish_reason: str | None = None
    logprob: float | None = None        # where the request asks for log-probabilities
    top_logprobs: tuple[tuple[int, float], ...] = ()        # of the likeliest tokens


class StopScanner:
    """Ends a text that arrives in pieces before the first stop string that is complete in it, of several that end there
    before the longest, and holds back what may become one. However it is cut, a letter takes the same steps for each
    stop string, of all letters together two at most (Knuth, Morris and Pratt, "Fast pattern matching in strings")."""

    def __init__(self, stop):
        self.stop = [(string, borders(string)) for string in stop]
        self.begun = [0] * len(self.stop)       # letters of each that the text ends with
        self.held = ""
        self.stopped = False        # a stop string was found

    def push(self, piece: str) -> str:
        """The text that is certain after another piece."""
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
        """What was held back, when the text ends without a stop string."""
        text, self.held, self.begun = self.held, "", [0] * len(self.stop)
        return text


def borders(string: str) -> list[int]:
    """Of each of its beginnings the longest border: how many letters it both begins and ends with, but not all."""
    found = [0]
    for letter in string[1:]:
        found.append(lengthened(found[-1], letter, string, found))
    return found


def lengthened(n: int, letter: str, string: str, borders: list[int]) -> int:
    """How many of the string's first letters a text ends with, which ended with n of them, less than all, before this
    letter."""
    while n and string[n] != letter:
        n = borders[n - 1]
    return n + (string[n] == letter)


class Generation:
    """A request on its way through the engine. Iterate over it for its events."""

    def __init__(self, request: Request, tokenizer, constraint=None):
        self.request, self.constraint = request, constraint
        self.n_prompt, self.n_generated = len(request.prompt_ids), 0
        self.n_cached = 0           # tokens of the prompt that were not processed, for an earlier one began with them
        self.cancelled = False
        self.finish_reason: str | None = None   # of the last event; None when cancelled or failed
        self.error: Exception | None = None     # what it failed with
        self.started = time.perf_counter()
        self.deadline = self.started + (math.inf if request.timeout is None else request.timeout)
        self.token_times: list[float] = []      # of the engine's tokens; readers may get several at once
        self._decoder, self._scanner = tokenizer.stream_decoder(), StopScanner(request.stop)
        self._scans = request.stop_after is None or request.stop_pause is not None
        self._at_start = not self._scans    # of what stop strings count in
        self._events, self._done = queue.SimpleQueue(), threading.Event()
        self.wake = threading.Event()           # set whenever there is something to `take`

    def __iter__(self):
        """Events as they come. Ends without a finish reason when cancelled, raises what the generation failed with:
        EngineStopped with the engine."""
        return filter(None, self.listen())

    def listen(self, patience: float | None = None):
        """What iteration gives, and None whenever nothing has come for `patience` seconds."""
        return (said and said[1] for said in events_of([self], patience))

    def take(self) -> Event | Exception | None:
        """The next event, if one is there (queue.Empty: not yet); at the end None, or what the generation failed with."""
        event = self._events.get_nowait()
        if not isinstance(event, Event):
            self._put(event)                    # for whoever reads on
        return event

    def _put(self, event: Event | Exception | None):
        self._events.put(event)
        self.wake.set()

    def cancel(self):
        """End the generation within one step of the engine, whether it waits or runs."""
        self.cancelled = True

    def is_over(self) -> bool:
        """Whether nobody waits for the rest: it was cancelled, or takes longer than its request allows."""
        return self.cancelled or time.perf_counter() > self.deadline

    def overdue(self) -> DeadlineExceeded | None:
        """What a generation that is over ends with."""
        if self.cancelled:
            return None
        return DeadlineExceeded(f"not finished after the {self.request.timeout:g} s that the request allows")

    def wait(self):
        """Return when it has finished, failed or been cancelled."""
        self._done.wait()

    def push(self, token: int, finish_reason: str | None, logprob: float | None = None, top_logprobs=()) -> str | None:
        """Take the next token from the scheduler; returns the finish reason, which a stop string may have supplied."""
        self.n_generated += 1
        self.token_times.append(time.perf_counter())
        text = ""
        if token == self.request.stop_pause and self.n_generated == 1:
            self._scans, self._at_start = False, True
        elif token == self.request.stop_before:
            text, self._scans = self._scanner.flush(), False
        text += self._scan(self._decoder.push(token))
        if finish_reason and not self._scanner.stopped:
            text += self._scan(self._decoder.flush()) + self._scanner.flush()
        if self._scanner.stopped:
            finish_reason = "stop"
        self.finish_reason = finish_reason
        self._scans = self._scans or token == self.request.stop_after
        self._put(Event(token, text, finish_reason, logprob, top_logprobs))
        return finish_reason

    def _scan(self, piece: str) -> str:
        if not self._scans:
            return piece
        text = piece.lstrip("\n") if self._at_start else piece
        self._at_start = self._at_start and not text
        return piece[:len(piece) - len(text)] + self._scanner.push(text)

    def close(self, error: Exception | None = None):
        """No more events; `error` is raised where they are read."""
        self.error = error
        self._put(error)
        self._done.set()


def events_of(generations: list[Generation], patience: float | None = None):
    """The events of generations as they come, each as (index, event), and None whenever nothing has come for `patience`
    seconds. Raises what the first of them failed with."""
    wake, reading = generations[0].wake, dict(enumerate(generations))
    for generation in generations:
        generation.wake = wake                  # what came before is there at the first look
    while reading:
        wake.clear()
        is_silent = True
        for index, generation in list(reading.items()):
            try:
                event = generation.take()
            except queue.Empty:
                continue
            is_silent = False
            if isinstance(event, Event):
                yield index, event
            elif event is None:
                del reading[index]
            else:
                raise event
        if is_silent and not wake.wait(patience):
            yield None
