"""OpenAI's completions: a text and what follows it, without a conversation.

The fields beyond OpenAI's own are those of openai.py. `echo` repeats the prompt before its continuation; with
`logprobs`, the prompt's tokens get log-probabilities, too. `max_tokens` 0 asks for the prompt alone. That is how
programs that evaluate models score texts (lm-eval's local-completions).
"""

import itertools
from typing import NamedTuple

import numpy as np

from engine.request import Delta, RequestError
from engine.tokenizer import StreamDecoder

from . import chat, field_table
from .endpoint import Endpoint
from .field_table import fields_of
from .fields import BOOL, SAMPLED, TEXT, either, list_of, object_of
from .grammar import Rules
from .openai import (ID, MAX_CHOICES, MAX_LOGPROBS, NO_LIMIT, PROTOCOL, SHARED, Answer, is_end, late_end, read_sampling,
                     read_shape, seeded)

DEFAULT_TOKENS = 16         # of an answer, as OpenAI has it for completions
MAX_SCORES = 1 << 19        # log-probabilities of prompts in one answer: each takes 100 bytes while it is written

# ---- what may be sent ------------------------------------------------------------------------------------

COMPLETION = object_of(fields_of(field_table.TEXT, {
    **SHARED, "prompt": either(TEXT, list_of(either(TEXT, ID, list_of(either(ID, TEXT), 1)), 1)),
    "max_tokens": either(NO_LIMIT, SAMPLED["max_tokens"] | {"minimum": 0}), "echo": BOOL,
    "logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
    "best_of": {"type": "integer", "minimum": 1, "maximum": MAX_CHOICES}}), ["prompt"])

# ---- endpoints -------------------------------------------------------------------------------------------


def completions(service, body: dict):
    engine, n = service.engine, body.get("n", 1)
    check_wishes(body, n)
    prompts = read_prompts(body["prompt"], engine, service.max_requests // n)
    request = {"max_tokens": DEFAULT_TOKENS} | read_sampling(service, body) | {"top_logprobs": body.get("logprobs")}
    is_silent = request["max_tokens"] == 0
    if is_silent:
        request["max_tokens"] = 1       # the engine chooses one token, which costs next to nothing; it is not shown
    if body.get("echo"):
        request["prompt_logprobs"] = body.get("logprobs")
        check_scores(prompts, n, body.get("logprobs"))

    shape = read_shape(body)

    def prepare():
        rules = chat.text_rules(Rules({}, "content"), shape)
        asked = late_end(service, request | rules, body.get("min_tokens", 0))
        requests = [one for prompt in prompts for one in seeded(asked | {"prompt_ids": prompt.ids}, n)]
        choices = [TextChoice(engine.tokenizer, prompt if body.get("echo") else None, is_silent)
                   for prompt in prompts for _ in range(n)]
        return requests, TextAnswer(service, body, choices, "cmpl-", "text_completion", "text_completion")

    with chat.grammar_named(shape.field if shape else "min_tokens"):
        return service.respond(len(prompts) * n, prepare, body.get("stream", False))


ENDPOINTS = [Endpoint("POST", "/v1/completions", "Continue a text", completions, PROTOCOL, COMPLETION,
                      generates=True, kind="text")]


def check_wishes(body: dict, n: int):
    """Raises RequestError for fields that only make sense together with others."""
    if body.get("best_of", n) != n:
        raise RequestError("best_of", "'best_of' must equal 'n': every answer that is generated is returned")
    if body.get("max_tokens") == 0 and not body.get("echo"):
        raise RequestError("max_tokens", "'max_tokens' may be 0 only together with 'echo'")


def check_scores(prompts: list["Prompt"], n: int, top: int | None):
    """Raises RequestError if the answer would hold too many log-probabilities of prompts."""
    n_scores = 0 if top is None else n * (top + 1) * sum(len(prompt.ids) for prompt in prompts)
    if n_scores > MAX_SCORES:
        raise RequestError("logprobs", f"'logprobs' asks for {n_scores} log-probabilities of prompts, and an answer "
                                       f"may hold {MAX_SCORES}")


class Prompt(NamedTuple):
    """A prompt as tokens and as text."""

    ids: list[int]
    text: str


def read_prompts(prompt, engine, most: int) -> list[Prompt]:
    """The prompts of a completion request, `most` at most. prompt: a string, or a list of token ids and strings, which
    together are one prompt; or a list of such prompts."""
    several = isinstance(prompt, list) and not any(type(one) is int for one in prompt)
    if several and len(prompt) > most:
        raise RequestError("prompt", f"'prompt' holds {len(prompt)} prompts, and the server takes {most} of this kind "
                                     "at once")
    return [read_prompt(one, engine) for one in (prompt if several else [prompt])]


def read_prompt(prompt: str | list, engine) -> Prompt:
    """A prompt of one string, or of token ids and strings."""
    if isinstance(prompt, str):
        return Prompt(engine.encode(prompt), prompt)
    ids, text = [], []
    for is_text, group in itertools.groupby(prompt, lambda part: isinstance(part, str)):
        part = "".join(group) if is_text else list(group)
        if not is_text and not all(type(token) is int for token in part):
            raise RequestError("prompt", "'prompt' must be a string, a list of token ids and strings, or a list of "
                                         "such")
        ids += engine.encode(part) if is_text else part
        text.append(part if is_text else engine.tokenizer.decode(part, special=True))
    return Prompt(ids, "".join(text))


# ---- what is answered ------------------------------------------------------------------------------------


class TextAnswer(Answer):
    """The answer to a completion request."""

    def usage(self, generations) -> dict:
        usage = super().usage(generations)
        if self.choices[0].is_silent:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def timings(self, generations) -> dict:
        return {} if self.choices[0].is_silent else super().timings(generations)


class TextChoice:
    """One continuation of a text as it is written.

    prompt: what is repeated before the continuation; None: nothing. is_silent: whether the continuation is left out.
    """

    opening = []
    closing = {"text": ""}

    def __init__(self, tokenizer, prompt: Prompt | None = None, is_silent: bool = False):
        self.tokenizer, self.prompt, self.is_silent = tokenizer, prompt, is_silent
        self.text, self.n_thinking = "", 0
        self.to_repeat = prompt         # None once it is written
        self.logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        self.offset, self.decoder = 0, tokenizer.stream_decoder()

    def push(self, delta: Delta) -> list[dict]:
        text = "" if self.is_silent else delta.text
        if self.to_repeat:
            text = self.to_repeat.text + text
        self.text += text
        return [{"text": text}] if text else []

    def ids_of(self, delta: Delta) -> list[int]:
        """The tokens that the last Delta adds to the answer."""
        repeated, self.to_repeat = self.to_repeat, None
        return [*(repeated.ids if repeated else []), *([] if self.is_silent else [delta.token_id])]

    def logprobs_of(self, delta: Delta) -> dict | None:
        """The log-probabilities of the tokens that the last Delta adds to the answer.

        A token that ends an answer is not part of its text. Where the prompt is repeated it is listed all the same,
        since clients then find the tokens of the continuation by their number."""
        if delta.logprob is None:
            return None
        new = {name: [] for name in self.logprobs}
        if delta.prompt_logprobs is not None:
            self._add_prompt(new, delta.prompt_logprobs)
        if not self.is_silent and (self.prompt or not is_end(delta, self.tokenizer)):
            self._add(new, delta.token_id, delta.logprob, delta.top_logprobs, self.decoder)
        for name, values in new.items():
            self.logprobs[name] += values
        return new

    def _add_prompt(self, new: dict, scores):
        decoder = StreamDecoder(self.tokenizer.pieces)      # of all tokens, as the repeated prompt shows them
        first, *others = self.prompt.ids
        self._add(new, first, None, None, decoder)
        for token, own, *top in zip(others, *map(np.ndarray.tolist, (scores.own, scores.ids, scores.likeliest))):
            self._add(new, token, own, zip(*top), decoder)
        self.offset = len(self.prompt.text)

    def _add(self, new: dict, token: int, logprob: float | None, top, decoder: StreamDecoder):
        """Append an entry for a token; `top`: (id, log-probability) of the likeliest tokens, in this order."""
        new["tokens"].append(self._text_of(token))
        new["token_logprobs"].append(logprob)
        new["text_offset"].append(self.offset)
        self.offset += len(decoder.push(token))
        best = None if top is None else {}
        for one, value in top or ():
            best.setdefault(self._text_of(one), value)      # parts of characters look alike: the likeliest counts
        new["top_logprobs"].append(best)

    def _text_of(self, token: int) -> str:
        return self.tokenizer.pieces[token].decode("utf-8", "replace")

    def finish_reason(self, reason: str) -> str:
        return "length" if self.is_silent else reason

    def whole(self) -> dict:
        return {"text": self.text}
