"""OpenAI's responses: what the server writes, whole or as a stream of events.

A response's output is a list of items. A run of thoughts is a reasoning item, a run of text is a message, and each call
is an item of its own. An item begins with response.output_item.added and ends with response.output_item.done; between
them come the events of its content. Every event has a sequence number, and the first two and the last one hold the
response object itself.
"""

import base64
import secrets
import time

from engine.reply import CallArguments, CallStart, Content, Thought
from engine.request import Delta

from .errors import explain
from .openai import error_body, logprobs_of_text
from .streams import cause_of, kept_alive, keys_read, sse, whole

SEAL = "qengine."           # how the encrypted_content of this server begins; what follows is base64, not a secret


class Answer:
    """The answer to one HTTP request.

    response: the response object before the first token. seals: whether thoughts come as encrypted_content, too.
    keep(response): keeps the response that has ended, before its client hears of the end, and returns whether it did;
    None: the response is not to be kept.
    """

    def __init__(self, tokenizer, reply, response: dict, seals: bool, keep=None):
        self.tokenizer, self.reply, self.seals, self.keep = tokenizer, reply, seals, keep
        self.response = response
        self.item = None            # the item that is being written
        self.logprobs = []          # of tokens of the text that no event has shown yet
        self.n_events = 0

    def whole(self, generations) -> dict:
        for _ in self._written(generations[0], is_stream=False):
            pass
        return self.response

    def events(self, generations):
        """Server-sent events, as they come. An answer that fails ends with response.failed and an error."""
        return kept_alive(self._streamed(generations[0]), ": keep-alive\n\n", generations)

    def _streamed(self, generation):
        try:
            yield self._event("response.created", {"response": self.response})
            yield self._event("response.in_progress", {"response": self.response})
            for name, fields in self._written(generation, is_stream=True):
                yield self._event(name, fields) if name else ""
            yield self._event("response." + self.response["status"], {"response": self.response})
        except Exception as error:      # the status is out already
            answer = explain(error)
            self.response |= {"status": "failed", "error": {"code": "server_error", "message": answer.message}}
            yield self._event("response.failed", {"response": self.response})
            said = error_body(answer)["error"]      # the official client raises what stands under "error"
            yield self._event("error", said | {"error": said})

    def _event(self, name: str, fields: dict) -> str:
        event = fields | {"type": name, "sequence_number": self.n_events}
        self.n_events += 1
        return sse(event, name)

    def _written(self, generation, is_stream: bool):
        """The events of the items, each as (name, fields), and ("", {}) where there is nothing to write. At the end the
        response is complete."""
        for delta in whole(generation, is_stream):
            if delta is not None:
                last = delta
                yield from self._pushed(delta)
            yield "", {}
        self.response |= {"status": "completed", "completed_at": int(time.time()), "usage": self.usage(generation)}
        if last.finish_reason == "length":
            self.response |= {"status": "incomplete", "completed_at": None,
                              "incomplete_details": {"reason": "max_output_tokens"} | cause_of(last)}
        yield from self._close(self.response["status"])
        if self.keep:
            self.response["store"] = self.keep(self.response)

    def _pushed(self, delta: Delta):
        """The events that a token adds."""
        parts = self.reply.push(delta)
        if delta.logprob is not None:
            self.logprobs += logprobs_of_text(delta, self.reply, self.tokenizer)
        for part in parts:
            if self.item is None or not isinstance(part, self.item.takes):
                yield from self._close("completed")
                self.item = next(kind for kind in KINDS if isinstance(part, kind.begins))(
                    len(self.response["output"]), part)
                yield from self.item.open()
            yield from self.item.push(part, self._take_logprobs())

    def _close(self, status: str):
        """Ends the item that is being written, if one is. It then is part of the response."""
        if self.item is not None:
            yield from self.item.close(status, self._take_logprobs(), self.seals)
            self.response["output"].append(self.item.item)
            self.item = None

    def _take_logprobs(self) -> list[dict]:
        """The log-probabilities that are to be shown with the next piece of text."""
        taken = self.logprobs if isinstance(self.item, MessageItem) else []
        self.logprobs = self.logprobs[len(taken):]
        return taken

    def usage(self, generation) -> dict:
        return {"input_tokens": generation.n_prompt,
                "input_tokens_details": {"cached_tokens": generation.n_cached, "cache_write_tokens": 0}
                | keys_read([generation]),
                "output_tokens": generation.n_generated,
                "output_tokens_details": {"reasoning_tokens": self.reply.n_thinking},
                "total_tokens": generation.n_prompt + generation.n_generated}


class Item:
    """An item of the output while it is written. item: as clients see it. Events are (name, fields).

    begins: the kind of parts of an answer that such an item begins with. takes: the kind that it goes on with. prefix:
    of its id. event: how the names of the events of its content begin.
    """

    begins = takes = prefix = event = None

    def __init__(self, index: int, part):
        self.index = index
        self.item = {"id": self.prefix + secrets.token_hex(24), **self.start(part), "status": "in_progress"}

    def at(self, **fields) -> dict:
        return {"item_id": self.item["id"], "output_index": self.index} | fields

    def added(self):
        return "response.output_item.added", {"output_index": self.index, "item": dict(self.item)}

    def done(self, status: str):
        self.item["status"] = status
        return "response.output_item.done", {"output_index": self.index, "item": self.item}


class TextItem(Item):
    """A run of thoughts or of text, as the one part of its item's content. logprobs: of the tokens of the text."""

    def open(self):
        self.text, self.logprobs = "", []
        yield self.added()
        yield "response.content_part.added", self.at(content_index=0, part=self.part())

    def push(self, part: Thought | Content, logprobs: list[dict]):
        self.text += part.text
        self.logprobs += logprobs
        yield self.event + ".delta", self.at(content_index=0, delta=part.text, **self.listed(logprobs))

    def close(self, status: str, logprobs: list[dict], seals: bool):
        self.logprobs += logprobs
        yield self.event + ".done", self.at(content_index=0, text=self.text, **self.listed(self.logprobs))
        yield "response.content_part.done", self.at(content_index=0, part=self.part())
        self.item["content"] = [self.part()]
        yield self.done(status)


class ReasoningItem(TextItem):
    begins = takes = Thought
    prefix, event = "rs_", "response.reasoning_text"

    def start(self, part: Thought) -> dict:
        return {"type": "reasoning", "summary": [], "content": []}

    def part(self) -> dict:
        return {"type": "reasoning_text", "text": self.text}

    def listed(self, logprobs: list[dict]) -> dict:
        return {}

    def close(self, status: str, logprobs: list[dict], seals: bool):
        if seals:
            self.item["encrypted_content"] = SEAL + base64.b64encode(self.text.encode()).decode()
        return super().close(status, logprobs, seals)


class MessageItem(TextItem):
    begins = takes = Content
    prefix, event = "msg_", "response.output_text"

    def start(self, part: Content) -> dict:
        return {"type": "message", "role": "assistant", "content": []}

    def part(self) -> dict:
        return {"type": "output_text", "annotations": [], "logprobs": self.logprobs, "text": self.text}

    def listed(self, logprobs: list[dict]) -> dict:
        return {"logprobs": logprobs}


class CallItem(Item):
    begins, takes = CallStart, CallArguments
    prefix, event = "fc_", "response.function_call_arguments"

    def start(self, part: CallStart) -> dict:
        return {"type": "function_call", "call_id": part.id, "name": part.name, "arguments": ""}

    def open(self):
        yield self.added()

    def push(self, part: CallStart | CallArguments, logprobs: list[dict]):
        if isinstance(part, CallArguments):
            self.item["arguments"] += part.text
            yield self.event + ".delta", self.at(delta=part.text)

    def close(self, status: str, logprobs: list[dict], seals: bool):
        yield self.event + ".done", self.at(name=self.item["name"], arguments=self.item["arguments"])
        yield self.done(status)


KINDS = ReasoningItem, MessageItem, CallItem
