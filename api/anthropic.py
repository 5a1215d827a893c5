"""Anthropic's messages.

Beyond Anthropic's own fields there are those of SAMPLED, and timeout (the answer has to be complete within so many
seconds). Thoughts come where `thinking` asks for them, and are as long as its budget_tokens or the effort allow. A
field that is not described here is refused, also a field of a beta. The header anthropic-beta is not looked at, because
a request that uses a beta shows it in its fields.
"""

import json
import uuid

from engine.reply import CallArguments, CallStart, Content, Message, Thought
from engine.request import Delta, Request, RequestError
from engine.template import has_picture

from . import chat, field_table
from .endpoint import Endpoint, WireProtocol
from .errors import SETS_CONTEXT, WITHOUT_TOOLS, ErrorAnswer, NotFound, explain
from .field_table import fields_of
from .fields import ANYTHING, BOOL, SAMPLED, SECONDS, TEXT, either, list_of, number, object_of, one_of, sampling_of
from .grammar import Shape
from .pictures import Sent, content_of
from .openai import MAX_STOPS, NAME, OBJECT, STOP
from .results import CallId
from .streams import cause_of, kept_alive, keys_read, sse, whole
from .thinking import EFFORTS, VARIABLES, read_thinking
from .tools import Tool

# ---- what may be sent ------------------------------------------------------------------------------------


def block(type: str, required: dict, **optional) -> dict:
    """A block of a message's content. cache_control is accepted and ignored: the engine itself finds what to keep."""
    return object_of({"type": one_of(type), "cache_control": ANYTHING, **required, **optional}, ["type", *required])


TEXT_BLOCK = block("text", {"text": TEXT}, citations=ANYTHING)
TEXTS = either(TEXT, list_of(TEXT_BLOCK))
SOURCE = either(object_of({"type": one_of("base64"), "media_type": TEXT, "data": TEXT}, ["type", "data"]),
                object_of({"type": one_of("url"), "url": TEXT}, ["type", "url"])) | {
                    "x-refused": "no files are kept here"}
IMAGE_BLOCK = block("image", {"source": SOURCE}, transformations=object_of({"oversized_image": one_of("downsize")}))
RESULT = either(TEXT, list_of(either(TEXT_BLOCK, IMAGE_BLOCK)))
BLOCKS = either(
    TEXT_BLOCK, IMAGE_BLOCK,
    block("thinking", {"thinking": TEXT}, signature=TEXT), block("redacted_thinking", {"data": TEXT}),
    block("tool_use", {"id": TEXT, "name": TEXT, "input": OBJECT}, caller=ANYTHING, toolset_name=ANYTHING),
    block("tool_result", {"tool_use_id": TEXT}, content=RESULT, is_error=BOOL, toolset_name=ANYTHING))
MESSAGE = object_of({"role": one_of("user", "assistant", "system"), "content": either(TEXT, list_of(BLOCKS))},
                    ["role", "content"])
TOOL = object_of({"type": one_of("custom"), "name": NAME, "description": TEXT, "input_schema": OBJECT,
                  "strict": BOOL, "cache_control": ANYTHING, "input_examples": ANYTHING,
                  "eager_input_streaming": ANYTHING, "allowed_callers": list_of(one_of("direct")),
                  "defer_loading": one_of(False)}, ["name", "input_schema"])


def choice(type: str, **others) -> dict:
    return object_of({"type": one_of(type), **others}, ["type", *(["name"] if "name" in others else [])])


CHOICE = either(choice("auto", disable_parallel_tool_use=BOOL),
                choice("any", disable_parallel_tool_use=BOOL),
                choice("tool", name=TEXT, disable_parallel_tool_use=BOOL), choice("none"))
DISPLAY = one_of("summarized", "omitted")
THINKING = either(choice("enabled", budget_tokens=number("max_tokens"), display=DISPLAY, block_binding=ANYTHING),
                  choice("adaptive", display=DISPLAY, block_binding=ANYTHING), choice("disabled"))
OUTPUT = object_of({"effort": one_of(*(effort for effort, budget in EFFORTS.items() if budget)),
                    "format": object_of({"type": one_of("json_schema"), "schema": OBJECT}, ["type", "schema"])})

# Which thoughts of earlier turns the model sees is for the chat template to say, whatever `keep` says.
EDIT = object_of({"type": one_of("clear_thinking_20251015"), "keep": ANYTHING}, ["type"])

THREAD = either(choice("create"), object_of({"type": one_of("continue"), "previous_message_id": TEXT}, ["type"]))
MESSAGES = object_of(fields_of(field_table.MESSAGES, {
    **SAMPLED, "model": TEXT, "messages": list_of(MESSAGE, 1), "system": TEXTS, "tools": list_of(TOOL),
    "tool_choice": CHOICE,
    "thinking": THINKING, "output_config": OUTPUT, "context_management": object_of({"edits": list_of(EDIT)}),
    "stream": BOOL, "timeout": SECONDS, "stop_sequences": list_of(STOP, 0, MAX_STOPS), "thread": THREAD,
    "chat_template_kwargs": VARIABLES}),
    ["messages", "max_tokens"])
# A token count takes fewer fields. Clients may send it a compaction, as it changes no count.
COUNTED = object_of({name: MESSAGES["properties"][name] for name in (
    "model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "cache_control",
    "chat_template_kwargs",
    "context_management", "mcp_servers", "speed", "user_profile_id", "workspace_id", "billing_policy")}
    | {"compaction": ANYTHING}, ["messages"])

# ---- errors ----------------------------------------------------------------------------------------------

ERRORS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}


def error_body(answer: ErrorAnswer) -> dict:
    """Programs find a code, where there is one, as details.error_code."""
    message = answer.message
    if answer.counts:                           # clients look for these words, and shorten the conversation
        message = "prompt is too long: {n_prompt_tokens} tokens > {n_ctx} maximum".format(**answer.counts)
        message += f" ({SETS_CONTEXT})" + f" ({WITHOUT_TOOLS})" * (answer.field == "tools")
    kind = ERRORS.get(answer.status, "api_error" if answer.status >= 500 else "invalid_request_error")
    details = {"details": {"error_code": answer.code}} if answer.code else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


PROTOCOL = WireProtocol("/v1/messages", error_body)

# ---- endpoints -------------------------------------------------------------------------------------------


def messages(service, body: dict):
    stops = body.get("stop_sequences", [])
    request = service.sampling | sampling_of(body) | {"stop": stops, "timeout": body.get("timeout")}
    shows_thoughts = body.get("thinking", {}).get("display") != "omitted"

    def make(turn):
        answer = Answer(service.engine.name, turn.reader(), stops, shows_thoughts)
        return [Request(**request | turn.asked)], answer

    return chat.respond(service, read_conversation(body), 1, make, body.get("stream", False))


def count_tokens(service, body: dict):
    return {"input_tokens": chat.count(service, read_conversation(body))}


ENDPOINTS = [Endpoint("POST", "/v1/messages", "Answer a conversation (Anthropic)", messages, PROTOCOL, MESSAGES,
                      generates=True, kind="text", may_show=True),
             Endpoint("POST", "/v1/messages/count_tokens", "How long the prompt of a conversation is", count_tokens,
                      PROTOCOL, COUNTED, kind="text", may_show=True)]


def read_conversation(body: dict) -> chat.Conversation:
    """What a request wants answered."""
    if body.get("thread", {}).get("type") == "continue":        # the official client then sends the whole conversation
        raise NotFound("thread", "no thread is held here: send the whole conversation", "thread_not_found")
    asked, output = body.get("thinking", {"type": "disabled"}), body.get("output_config", {})
    thoughts = read_thinking(body, output.get("effort"), asked["type"] != "disabled")
    if "budget_tokens" in asked:
        thoughts |= {"thinking_budget": asked["budget_tokens"], "budget_field": "thinking.budget_tokens"}
    system = [{"role": "system", "content": text_of(body["system"])}] if body.get("system") else []
    conversation = system + [one for i, message in enumerate(body["messages"])
                             for one in read_message(message, f"messages[{i}].content")]
    format = output.get("format") or {}
    shape = Shape("json", format["schema"], "output_config.format.schema") if format else None
    is_continued = conversation[-1]["role"] == "assistant"      # the answer continues this message
    if is_continued and conversation[-1].get("tool_calls"):
        raise RequestError("messages", "the last message calls tools: the next one has to bring their results")
    return chat.Conversation(conversation, toolbox=read_tools(body), shape=shape, **thoughts, continued=is_continued,
                             timeout=body.get("timeout"))


def read_tools(body: dict) -> chat.Toolbox | None:
    """The tools of a request; None where it offers none, or forbids calls."""
    tools = [Tool(tool["name"], tool["input_schema"], bool(tool.get("strict"))) for tool in body.get("tools", [])]
    offered = [{"type": "function", "function": {
        "name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}}
        for tool in body.get("tools", [])]
    choice = body.get("tool_choice", {"type": "auto"})
    mode = {"any": "required", "tool": "one"}.get(choice["type"], choice["type"])
    names = [choice["name"]] if choice["type"] == "tool" else None
    return chat.toolbox_of(offered, tools, mode, names, several=not choice.get("disable_parallel_tool_use"))


def text_of(content) -> str:
    return content if isinstance(content, str) else "\n".join(block["text"] for block in content)


def read_message(message: dict, field: str) -> list[dict]:
    """One of Anthropic's messages as chat templates take it: there, the result of a tool is a message of its own.
    field: the request's field with its content."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results = [{"role": "tool", "tool_call_id": CallId(block["tool_use_id"], f"{field}[{i}].tool_use_id"),
                "content": read_result(block, f"{field}[{i}]")}
               for i, block in enumerate(content) if block["type"] == "tool_result"]
    calls = [{"id": block["id"], "type": "function",
              "function": {"name": block["name"], "arguments": block["input"]}}
             for block in content if block["type"] == "tool_use"]
    thoughts = [block["thinking"] for block in content if block["type"] == "thinking"]
    said = {"role": role, "content": read_blocks(content, field)}
    if role != "user" and has_picture(said["content"]):
        raise RequestError(field, f"'{field}' holds an image, and only messages of the user and results of tools may")
    said |= {"tool_calls": calls} if calls else {}
    said |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return results + ([said] if said["content"] or calls or not results else [])


def read_blocks(blocks: list[dict], field: str) -> str | list[dict]:
    """The texts and images among some blocks, as chat templates take them."""
    return content_of([
        block["text"] if block["type"] == "text" else read_source(block["source"], f"{field}[{i}].source")
        for i, block in enumerate(blocks) if block["type"] in ("text", "image")], between="\n")


def read_source(source: dict, field: str) -> Sent:
    """A picture from where an image block says that it is."""
    is_url = source["type"] == "url"
    return Sent(source["url"], f"{field}.url", is_url) if is_url else Sent(source["data"], f"{field}.data")


def read_result(block: dict, field: str) -> str | list[dict]:
    """The content of a tool's result. The templates have no field for a failure, so the text says so."""
    content = block.get("content") or ""
    content = content if isinstance(content, str) else read_blocks(content, f"{field}.content")
    if not block.get("is_error"):
        return content
    return "Error: " + content if isinstance(content, str) else [{"type": "text", "text": "Error: "}, *content]


# ---- what is answered ------------------------------------------------------------------------------------


class Answer:
    """The answer to one HTTP request, whole or as a stream of server-sent events."""

    def __init__(self, model: str, reply, stops, shows_thoughts: bool):
        self.id, self.model, self.reply, self.stops = f"msg_{uuid.uuid4().hex[:24]}", model, reply, stops
        self.shows_thoughts = shows_thoughts

    def whole(self, generations) -> dict:
        [generation] = generations
        message, reason = Message(), None
        for delta in whole(generation):
            reason = delta.finish_reason
            for part in self.parts(delta):
                message.add(part)
        return self.message(list(map(written, message.blocks)), self.usage(generation)) | self.end(generation, reason)

    def events(self, generations):
        """The events of a stream: the message's start, its blocks one after the other, its end."""
        return kept_alive(self._written(generations), event("ping"), generations)

    def _written(self, generations):
        [generation] = generations
        blocks, reason = BlockWriter(), None
        try:
            start = self.message([], {"input_tokens": generation.n_prompt, "output_tokens": 0})
            yield event("message_start", message=start | {"stop_reason": None, "stop_sequence": None})
            for delta in whole(generation, is_stream=True):
                yield ""
                if delta is None:
                    continue
                reason = delta.finish_reason
                for part in self.parts(delta):
                    yield from blocks.write(part)
            yield from blocks.close()
            yield event("message_delta", delta=self.end(generation, reason), usage=self.usage(generation))
            yield event("message_stop")
        except Exception as error:      # the status is out already: clients raise from this event instead
            yield sse(error_body(explain(error)), "error")

    def parts(self, delta: Delta) -> list:
        """The parts of the answer that a token completes and the client is to see."""
        parts = self.reply.push(delta)
        return parts if self.shows_thoughts else [part for part in parts if not isinstance(part, Thought)]

    def message(self, blocks: list, usage: dict) -> dict:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model,
                "content": blocks, "usage": usage}

    def end(self, generation, reason: str) -> dict:
        """Why the answer ended, and at which stop sequence, if it ended at one."""
        stop = None
        if reason == "length":
            is_asked = generation.cause or generation.n_generated == generation.request.max_tokens
            name = "max_tokens" if is_asked else "model_context_window_exceeded"
        elif stop := self.reply.stopped_by(self.stops):
            name = "stop_sequence"
        else:
            name = "tool_use" if self.reply.n_calls else "end_turn"
        return {"stop_reason": name, "stop_sequence": stop} | cause_of(generation)

    def usage(self, generation) -> dict:
        return {"input_tokens": generation.n_prompt - generation.n_cached, "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": generation.n_cached, "output_tokens": generation.n_generated,
                "output_tokens_details": {"thinking_tokens": self.reply.n_thinking}} | keys_read([generation])


def written(block) -> dict:
    """A block of an answer. Where the end of the answer has cut a call, its arguments are no JSON: it becomes text."""
    match block:
        case Thought(text):
            return opened(block) | {"thinking": text}
        case Content(text):
            return opened(block) | {"text": text}
    try:
        return opened(CallStart(0, block.id, block.name)) | {"input": json.loads(block.arguments)}
    except ValueError:
        return {"type": "text", "text": f"{block.name}: {block.arguments}"}


def opened(part) -> dict:
    """The block that begins with this part, without the part's content."""
    match part:
        case Thought():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case Content():
            return {"type": "text", "text": ""}
        case CallStart(_, id, name):
            return {"type": "tool_use", "id": id.replace("call_", "toolu_"), "name": name, "input": {}}


def change_of(part) -> dict | None:
    """What a part adds to its block; Anthropic's streams call it a delta."""
    match part:
        case Thought(text):
            return {"type": "thinking_delta", "thinking": text}
        case Content(text):
            return {"type": "text_delta", "text": text}
        case CallArguments(_, text):
            return {"type": "input_json_delta", "partial_json": text}


class BlockWriter:
    """Writes the parts of an answer as server-sent events. A block holds a run of parts of one kind, or one call."""

    def __init__(self):
        self.n_blocks, self.kind = 0, None      # kind: of the parts of the open block, None where none is open

    def write(self, part):
        if not isinstance(part, CallArguments) and (isinstance(part, CallStart) or self.kind is not type(part)):
            yield from self.close()
            yield event("content_block_start", index=self.n_blocks, content_block=opened(part))
            self.kind, self.n_blocks = type(part), self.n_blocks + 1
        if (change := change_of(part)) is not None:
            yield event("content_block_delta", index=self.n_blocks - 1, delta=change)

    def close(self):
        if self.kind is Thought:
            signature = {"type": "signature_delta", "signature": ""}
            yield event("content_block_delta", index=self.n_blocks - 1, delta=signature)
        if self.kind is not None:
            yield event("content_block_stop", index=self.n_blocks - 1)
        self.kind = None


def event(type: str, **data) -> str:
    """A server-sent event as Anthropic's streams have it."""
    return sse({"type": type} | data, type)
