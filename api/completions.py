"""OpenAI's completions: a text and what follows it, without a conversation.

The fields beyond OpenAI's own are those of openai.py.
"""

from engine.request import Delta, RequestError

from . import chat, field_table
from .endpoint import Endpoint
from .field_table import fields_of
from .fields import TEXT, either, list_of, object_of
from .grammar import Rules
from .openai import (ID, MAX_LOGPROBS, PROTOCOL, SHARED, Answer, is_end, late_end, read_sampling, read_shape,
                     seeded)

# ---- what may be sent ------------------------------------------------------------------------------------

COMPLETION = object_of(fields_of(field_table.TEXT, {
    **SHARED, "prompt": either(TEXT, list_of(either(TEXT, ID, list_of(ID, 1)), 1)),
    "logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
    }), ["prompt"])

# ---- endpoints -------------------------------------------------------------------------------------------


def completions(service, body: dict):
    engine, n = service.ready(), body.get("n", 1)
    request = {"max_tokens": 16} | read_sampling(service, body) | {"top_logprobs": body.get("logprobs")}    # OpenAI: 16
    prompts = read_prompts(body["prompt"], engine, service.max_requests // n)

    def prepare():
        rules = chat.text_rules(Rules({}, "content"), read_shape(body))
        asked = late_end(service, request | rules, body.get("min_tokens", 0))
        requests = [one for prompt in prompts for one in seeded(asked | {"prompt_ids": prompt}, n)]
        choices = [TextChoice(engine.tokenizer) for _ in requests]
        return requests, Answer(service, body, choices, "cmpl-", "text_completion", "text_completion")

    return service.respond(len(prompts) * n, prepare, body.get("stream", False))


ENDPOINTS = [Endpoint("POST", "/v1/completions", "Continue a text", completions, PROTOCOL, COMPLETION,
                      generates=True)]


def read_prompts(prompt, engine, most: int) -> list[list[int]]:
    """The prompts of a completion request as token ids, `most` at most. prompt: a string, a list of ids, or a list of
    such."""
    several = isinstance(prompt, list) and prompt and all(isinstance(one, str | list) for one in prompt)
    if several and len(prompt) > most:
        raise RequestError("prompt", f"'prompt' holds {len(prompt)} prompts, and the server takes {most} of this kind "
                                     "at once")
    prompts = [engine.encode(one) if isinstance(one, str) else one for one in (prompt if several else [prompt])]
    for ids in prompts:
        if not (isinstance(ids, list) and all(type(token) is int for token in ids)):
            raise RequestError("prompt", "'prompt' must be a string, a list of token ids, or a list of such")
    return prompts


# ---- what is answered ------------------------------------------------------------------------------------


class TextChoice:
    """One continuation of a text as it is written."""

    def __init__(self, tokenizer):
        self.tokenizer, self.text, self.n_thinking = tokenizer, "", 0
        self.logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        self.offset = 0

    opening = []
    closing = {"text": ""}

    def push(self, delta: Delta) -> list[dict]:
        self.text += delta.text
        return [{"text": delta.text}] if delta.text else []

    def logprobs_of(self, delta: Delta) -> dict | None:
        if delta.logprob is None:
            return None
        if is_end(delta, self.tokenizer):
            return {name: [] for name in self.logprobs}
        token = self._text_of(delta.token_id)
        new = {"tokens": [token], "token_logprobs": [delta.logprob], "text_offset": [self.offset],
               "top_logprobs": [{self._text_of(one): logprob for one, logprob in delta.top_logprobs}]}
        self.offset += len(token)
        for name, values in new.items():
            self.logprobs[name] += values
        return new

    def _text_of(self, token: int) -> str:
        return self.tokenizer.pieces[token].decode("utf-8", "replace")

    def finish_reason(self, reason: str) -> str:
        return reason

    def whole(self) -> dict:
        return {"text": self.text}
