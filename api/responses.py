"""OpenAI's responses: what clients send to /v1/responses, and the responses that are kept for them.

A response is made of items: messages, thoughts ("reasoning"), calls of functions and their outputs. What the server
writes is in responses_stream.py.

A kept response (`store`, by default true) can be read again, deleted, and continued by `previous_response_id`: the
prompt is then its input, its output and the new input. It is kept in memory and within bounds (stored.py).

Thoughts come as the content of reasoning items. These models write no summaries, so `summary` is empty. Where `include`
asks for reasoning.encrypted_content, the thoughts stand there as well, in base64, for clients that send nothing else
back.

field_table.py says which fields are taken, and how.
"""

import base64
import binascii
import bisect
import contextlib
import dataclasses
import secrets
import time

import flask

from engine.request import Request, RequestError
from engine.template import has_picture

from . import chat, field_table
from .endpoint import Endpoint
from .errors import NotFound
from .field_table import fields_of
from .fields import ANYTHING, BOOL, SAMPLED, TEXT, either, list_of, number, object_of, one_of, refused
from .openai import (DETAIL, FORMAT, MAX_LOGPROBS, NAME, OBJECT, PROTOCOL, SHARED, read_choice, read_format,
                     read_sampling)
from .pictures import Sent, content_of
from .results import CallId
from .responses_stream import SEAL, Answer
from .thinking import EFFORTS, VARIABLES, read_thinking, thinks
from .tools import Tool

# ---- what may be sent ------------------------------------------------------------------------------------

FUNCTION = refused("the server has no tools of its own, and clients run functions alone", "function")
NO_TOOLS = {"x-refused": FUNCTION["x-refused"]}
ONLY_TEXT = {"x-refused": "the models read texts and pictures"}


def typed(type: str, required: dict, **optional) -> dict:
    """An object whose `type` is given. It may hold more than is described, since clients send back what they got."""
    return object_of({"type": one_of(type), **required, **optional}, ["type", *required], others=True)


PART = either(typed("input_text", {"text": TEXT}), typed("output_text", {"text": TEXT}),
              typed("refusal", {"refusal": TEXT}),
              typed("input_image", {"image_url": TEXT}, detail=DETAIL, file_id=refused(
                  "no files are kept here, and 'image_url' holds the picture itself, as a data: URL"))) | ONLY_TEXT
CONTENT = either(TEXT, list_of(PART))
MESSAGE = object_of({"type": one_of("message"), "role": one_of("user", "assistant", "system", "developer"),
                     "content": CONTENT}, ["role", "content"], others=True)
ITEM = either(
    MESSAGE, typed("function_call", {"call_id": TEXT, "name": TEXT, "arguments": TEXT}),
    typed("function_call_output", {"call_id": TEXT, "output": CONTENT}),
    typed("reasoning", {}, id=TEXT, summary=list_of(typed("summary_text", {"text": TEXT})), encrypted_content=TEXT,
          content=list_of(typed("reasoning_text", {"text": TEXT}))),
    typed("item_reference", {"id": TEXT})) | {"x-refused": "the server has no tools that make or take other items"}
TOOL = object_of({"type": FUNCTION, "name": NAME, "description": TEXT, "parameters": OBJECT,
                  "strict": BOOL}, ["type", "name"], others=True)
NAMED_TOOL = object_of({"type": FUNCTION, "name": TEXT}, ["type", "name"])
CHOICE = either(one_of("none", "auto", "required"), NAMED_TOOL, object_of(
    {"type": one_of("allowed_tools"), "mode": one_of("auto", "required"), "tools": list_of(NAMED_TOOL, 1)},
    ["type", "mode", "tools"])) | NO_TOOLS
TEXT_FORMAT = either(*FORMAT["anyOf"][:2], object_of(
    {"type": one_of("json_schema"), "name": TEXT, "description": TEXT, "schema": OBJECT, "strict": BOOL},
    ["type", "schema"]))
SUMMARY = one_of("auto", "concise", "detailed")         # has no effect: there are no summaries
LOGPROBS, SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"
INCLUDE = list_of(one_of(LOGPROBS, SEALED, "file_search_call.results", "web_search_call.results",
                         "web_search_call.action.sources", "message.input_image.image_url",
                         "computer_call_output.output.image_url", "code_interpreter_call.outputs"))

CONVERSATION = {
    "model": TEXT, "input": either(TEXT, list_of(ITEM)), "instructions": TEXT, "previous_response_id": TEXT,
    "tools": list_of(TOOL), "tool_choice": CHOICE, "parallel_tool_calls": BOOL,
    "text": object_of({"format": TEXT_FORMAT, "verbosity": one_of("low", "medium", "high")}),
    "reasoning": object_of({
        "effort": one_of(*EFFORTS), "summary": SUMMARY,
        "generate_summary": SUMMARY, "context": one_of("auto", "current_turn"), "mode": one_of("standard")}),
    "truncation": one_of("auto", "disabled"), "chat_template_kwargs": VARIABLES}
SAME = [*(name for name in SAMPLED if name != "max_tokens"), "logit_bias", "stop", "stop_token_ids", "ignore_eos",
        "timeout"]          # as chats have them
RESPONSE = object_of(fields_of(field_table.RESPONSES, {
    **CONVERSATION, **{name: SHARED[name] for name in SAME}, "stream": BOOL, "store": BOOL, "include": INCLUDE,
    "max_output_tokens": number("max_tokens"), "stream_options": object_of({"include_obfuscation": BOOL}),
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
    "metadata": object_of({}, others={"type": "string", "maxLength": 512})}), ["input"])
# A token count takes fewer fields.
COUNTED = object_of({name: RESPONSE["properties"][name] for name in (*CONVERSATION, "conversation")}
                    | {"personality": ANYTHING}, ["input"])

# ---- endpoints -------------------------------------------------------------------------------------------


def create(service, body: dict):
    owner, include, sampling = read_owner(), body.get("include", ()), read_sampling(service, body)
    if "max_output_tokens" in body:
        sampling["max_tokens"] = body["max_output_tokens"]
    if LOGPROBS in include or "top_logprobs" in body:
        sampling["top_logprobs"] = body.get("top_logprobs", 0)

    def keep(response: dict) -> bool:
        return service.stored.keep(owner, response, items)

    def make(turn):
        request = Request(**sampling | turn.asked)
        response = told(service, body, request)
        answer = Answer(service.engine.tokenizer, turn.reader(), response, SEALED in include,
                        keep if response["store"] else None)
        return [request], answer

    with named_as_input():
        with service.places(1):                 # megabytes of conversation take a while
            items = read_previous(service, body) + read_items(service, body["input"])
            conversation = read_conversation(body, items)
            if body.get("truncation") == "auto":
                conversation = shortened(service, conversation)
        return chat.respond(service, conversation, 1, make, body.get("stream", False))


def count_tokens(service, body: dict):
    items = read_previous(service, body) + read_items(service, body["input"])
    with named_as_input():
        return {"object": "response.input_tokens",
                "input_tokens": chat.count(service, read_conversation(body, items))}


def retrieve(service, response_id: str, **_):
    return find(service, response_id)[0]


def delete(service, response_id: str):
    if not service.stored.forget(read_owner(), response_id):
        raise not_kept(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


def cancel(service, response_id: str):
    find(service, response_id)
    raise RequestError(None, "only a response in the background can be cancelled, and there are none; a client ends "
                             "a response by closing its connection")


def input_items(service, response_id: str, limit: int = 20, order: str = "desc", after: str | None = None):
    items = find(service, response_id)[1]
    items = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise RequestError("after", f"'after' names no item of the input: {after[:80]!r}")
    start = 0 if after is None else ids.index(after) + 1
    data = items[start:start + limit]
    return {"object": "list", "data": data, "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None, "has_more": start + limit < len(items)}


def name_of(service, body: dict) -> str | None:
    """The model that a request names; else that of the response that it goes on with."""
    found = service.stored.find(read_owner(), body.get("previous_response_id", ""))
    return body.get("model") or (found and found[0]["model"])


ONE = "/v1/responses/{response_id}"
STREAM = {"stream": refused("a response can be streamed only while it is made", "false")}
PAGE = {"limit": {"type": "integer", "minimum": 1, "maximum": 100}, "order": one_of("asc", "desc"), "after": TEXT}
ENDPOINTS = [
    Endpoint("POST", "/v1/responses", "Answer a conversation", create, PROTOCOL, RESPONSE, generates=True, kind="text",
             may_show=True, name_of=name_of),
    Endpoint("POST", "/v1/responses/input_tokens", "How long the prompt of a response is", count_tokens, PROTOCOL,
             COUNTED, kind="text", may_show=True, name_of=name_of),
    Endpoint("GET", ONE, "A kept response", retrieve, PROTOCOL, query=STREAM),
    Endpoint("DELETE", ONE, "Forget a kept response", delete, PROTOCOL),
    Endpoint("POST", ONE + "/cancel", "Refused: no response is in the background", cancel, PROTOCOL),
    Endpoint("GET", ONE + "/input_items", "What a kept response answered", input_items, PROTOCOL, query=PAGE)]


def read_owner() -> bytes | None:
    """The API key of the current request, None on a server without keys. Kept responses belong to a key."""
    return flask.g.get("key")


def find(service, id: str) -> tuple[dict, list[dict]]:
    """A kept response and its input."""
    found = service.stored.find(read_owner(), id)
    if found is None:
        raise not_kept(id)
    return found


def not_kept(id: str) -> NotFound:
    return NotFound(None, f"the response {id[:80]!r} is not kept: it never was, or it had to make room for others",
                    "response_not_found")


def told(service, body: dict, request: Request) -> dict:
    """The response object before the first token. It repeats what the request has asked for."""
    text, reasoning = body.get("text", {}), body.get("reasoning", {})
    return {
        "id": f"resp_{secrets.token_hex(24)}", "object": "response", "created_at": int(time.time()),
        "status": "in_progress", "background": False, "error": None, "incomplete_details": None,
        "instructions": body.get("instructions"), "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata", {}),
        "model": service.engine.name, "output": [], "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None}, "service_tier": "default",
        "store": body.get("store", True), "temperature": request.temperature,
        "text": {"format": text.get("format", {"type": "text"}), "verbosity": text.get("verbosity", "medium")},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": [{"parameters": None, "strict": None} | tool for tool in body.get("tools", [])],
        "top_logprobs": request.top_logprobs or 0, "top_p": request.top_p,
        "truncation": body.get("truncation", "disabled"), "usage": None}


# ---- reading ---------------------------------------------------------------------------------------------


def read_previous(service, body: dict) -> list[dict]:
    """The items of the conversation that a request goes on with: input and output of the response that it names."""
    id = body.get("previous_response_id")
    if id is None:
        return []
    found = service.stored.find(read_owner(), id)
    if found is None:
        raise NotFound("previous_response_id", str(not_kept(id)), "previous_response_not_found", status=400)
    response, items = found
    return items + response["output"]


PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "function_call_output": "fco_"}


def read_items(service, input: str | list[dict]) -> list[dict]:
    """The items of a request's own input, each with its type and an id, and referenced ones in place of references."""
    if isinstance(input, str):
        input = [{"role": "user", "content": input}]
    if not input:
        raise RequestError("input", "'input' holds no items")
    items, referenced = [], set()
    for i, item in enumerate(input):
        item = {"type": "message"} | {name: value for name, value in item.items() if value is not None}
        if item["type"] == "item_reference":
            items.append(read_reference(service, item["id"], f"input[{i}].id", referenced))
            continue
        if isinstance(item.get("content"), str):
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": item["content"]}]
        items.append({"id": PREFIXES[item["type"]] + secrets.token_hex(24)} | item)
    return items


def read_reference(service, id: str, field: str, referenced: set[str]) -> dict:
    """The item that has this id, among the output of kept responses. referenced: the ids so far; each may come once, so
    that a short request does not become an endless prompt."""
    if id in referenced:
        raise RequestError(field, f"'{field}' refers to an item for the second time: {id[:80]!r}")
    referenced.add(id)
    found = service.stored.find_item(read_owner(), id)
    if found is None:
        raise RequestError(field, f"'{field}' refers to an item that is not kept: {id[:80]!r}")
    return found


def read_conversation(body: dict, items: list[dict]) -> chat.Conversation:
    """What a request wants answered. items: of the whole conversation. Instructions hold for one response: those of
    earlier responses are not among the items."""
    effort = body.get("reasoning", {}).get("effort")
    messages = [{"role": "system", "content": body["instructions"]}] if "instructions" in body else []
    n_own = len(body["input"]) if isinstance(body["input"], list) else 1
    return chat.Conversation(messages + read_messages(items, n_own - len(items)), toolbox=read_tools(body),
                             shape=read_format(body.get("text", {}).get("format", {}), "text.format"),
                             timeout=body.get("timeout"), **read_thinking(body, effort, thinks(effort)))


def read_tools(body: dict) -> chat.Toolbox | None:
    """The tools of a request; None where it offers none, or forbids calls."""
    tools = [Tool(tool["name"], tool.get("parameters") or {}, bool(tool.get("strict")))
             for tool in body.get("tools", [])]
    offered = [{"type": "function", "function": {name: tool[name] for name in ("name", "description", "parameters")
                                                 if tool.get(name) is not None}} for tool in body.get("tools", [])]
    mode, names = read_choice(body.get("tool_choice", "auto"))
    return chat.toolbox_of(offered, tools, mode, names, body.get("parallel_tool_calls", True))


def read_messages(items: list[dict], first: int) -> list[dict]:
    """The items as messages, as chat templates take them. Thoughts, text and calls that follow one another are one
    message of the assistant. first: the number of the first item, such that the request's own input begins at 0."""
    messages = []

    def assistant(*taken) -> dict:
        """The assistant's message to go on with: a new one if the last message is not his or has one of these."""
        if not messages or messages[-1]["role"] != "assistant" or any(messages[-1].get(one) for one in taken):
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for i, item in enumerate(items, first):
        match item["type"]:
            case "reasoning":
                said = assistant("content", "tool_calls")
                said["reasoning_content"] = said.get("reasoning_content", "") + read_thoughts(item, i)
            case "function_call":
                assistant().setdefault("tool_calls", []).append({
                    "id": item["call_id"], "type": "function",
                    "function": {"name": item["name"], "arguments": item["arguments"]}})
            case "function_call_output":
                output = content_of_item(item["output"], f"input[{i}].output")
                call = CallId(item["call_id"], f"input[{i}].call_id")
                messages.append({"role": "tool", "tool_call_id": call, "content": output})
            case "message":
                role, content = item["role"], content_of_item(item["content"], f"input[{i}].content")
                if role != "user" and has_picture(content):
                    raise RequestError(f"input[{i}].content", f"'input[{i}].content' holds an image, and only messages "
                                                              "of the user and outputs of functions may")
                if role == "assistant":
                    assistant("content", "tool_calls")["content"] = content
                else:
                    messages.append({"role": "system" if role == "developer" else role, "content": content})
    return messages


def content_of_item(parts: str | list[dict], field: str) -> str | list[dict]:
    """The content of an item as chat templates take it. field: the request's field with it."""
    if isinstance(parts, str):
        return parts
    return content_of([read_picture(part, f"{field}[{i}]") if part["type"] == "input_image" else
                       part["refusal"] if part["type"] == "refusal" else part["text"] for i, part in enumerate(parts)])


def read_picture(part: dict, field: str) -> Sent:
    return Sent(part["image_url"], f"{field}.image_url", is_url=True, detail=part.get("detail") or "auto")


def read_thoughts(item: dict, i: int) -> str:
    """The thoughts of a reasoning item: its content, or else what the server itself has put into encrypted_content, or
    else the summary that another server has written."""
    if not item.get("content") and (sealed := item.get("encrypted_content")):
        try:
            if not sealed.startswith(SEAL):
                raise ValueError
            return base64.b64decode(sealed[len(SEAL):], validate=True).decode()
        except (ValueError, binascii.Error):
            raise RequestError(f"input[{i}].encrypted_content",
                               f"the encrypted_content of the reasoning item {item['id'][:80]!r} is not of this server"
                               ) from None
    return "\n".join(part["text"] for part in item.get("content") or item.get("summary", []))


def shortened(service, conversation: chat.Conversation) -> chat.Conversation:
    """The conversation without its oldest turns, where it is too long: as many go as have to, so that an eighth of the
    context is left for the answer. What the system says first stays, and so does the last turn."""
    messages, most = chat.join_system(conversation.messages), service.engine.n_ctx * 7 // 8
    n_system = int(messages[0]["role"] == "system")
    starts = [i for i, message in enumerate(messages) if message["role"] == "user"]

    def without(start: int) -> chat.Conversation:
        return dataclasses.replace(conversation, messages=messages[:n_system] + messages[start:])

    def fits(start: int) -> bool:
        try:
            return chat.count(service, without(start)) <= most
        except RequestError:            # about its length, or about something that the engine is asked about again
            return False

    if not starts or fits(n_system):
        return conversation
    return without(starts[min(bisect.bisect_left(starts, True, key=fits), len(starts) - 1)])


@contextlib.contextmanager
def named_as_input():
    """Gives RequestErrors about messages the name that these have in the client's request."""
    try:
        yield
    except RequestError as error:
        if (error.field or "").split("[")[0] != "messages":
            raise
        error.field = "input"
        raise
