"""OpenAI's chat completions.

Beside OpenAI's own fields those of other servers are taken: field_table.py says which and how. An answer's thoughts
come as reasoning_content. A field that is not in that table is refused, so that a client hears of a misspelt name.
"""

import json
import time
import uuid

from engine.reply import CallArguments, CallStart, Content, Message, Thought
from engine.request import STOP_LETTERS, Delta, Request, RequestError

from . import chat, field_table
from .endpoint import Endpoint, WireProtocol
from .errors import ErrorAnswer, explain
from .field_table import fields_of
from .fields import ANYTHING, BOOL, SAMPLED, SECONDS, TEXT, either, list_of, number, object_of, one_of, sampling_of
from .grammar import Shape, at_least
from .pictures import Sent
from .results import CallId
from .streams import cause_of, kept_alive, keys_read, sse, together, whole
from .thinking import BUDGETS, EFFORTS, VARIABLES, read_thinking, thinks
from .tools import Tool

BUILD = "qengine-1"         # which server this is, in answers and in /props
MAX_CHOICES = 16            # answers of one request
MAX_LOGPROBS = 20           # alternatives of one token
MAX_STOPS = 16              # stop strings of one request

# ---- what may be sent ------------------------------------------------------------------------------------

NAME = {"type": "string", "pattern": r'^[^\u0000-\u0020<>"\\]{1,128}$'}       # of a tool, as both forms write it
OBJECT = {"type": "object"}
ID = {"type": "integer"}
STOP = {"type": "string", "minLength": 1, "maxLength": STOP_LETTERS}

PART = object_of({"type": one_of("text"), "text": TEXT}, ["type", "text"], others=True)
DETAIL = one_of("auto", "low", "high", "original")
PICTURE = object_of({"type": one_of("image_url"), "image_url": object_of({"url": TEXT, "detail": DETAIL}, ["url"])},
                    ["type", "image_url"], others=True)
CALL = object_of({"id": TEXT, "type": one_of("function"), "function": object_of(
    {"name": TEXT, "arguments": either(TEXT, OBJECT)}, ["name"], others=True)}, ["function"], others=True)
SAID, SHOWN = ({"content": either(TEXT, list_of(one))} for one in (PART, either(PART, PICTURE)))
RESULT = SHOWN | {"tool_call_id": TEXT}
MESSAGE = either(
    *(object_of({"role": one_of(role)} | said, ["role", "content"], others=True)
      for role, said in (("system", SAID), ("developer", SAID), ("user", SHOWN), ("tool", RESULT))),
    object_of({"role": one_of("assistant"), **SAID, "reasoning_content": TEXT, "tool_calls": list_of(CALL)}, ["role"],
              others=True))
TOOL = object_of({"type": one_of("function"), "function": object_of(
    {"name": NAME, "description": TEXT, "parameters": OBJECT, "strict": BOOL}, ["name"], others=True)},
    ["type", "function"], others=True)
NAMED_TOOL = object_of({"type": one_of("function"), "function": object_of({"name": TEXT}, ["name"])},
                       ["type", "function"])
ALLOWED_TOOLS = object_of({"type": one_of("allowed_tools"), "allowed_tools": object_of(
    {"mode": one_of("auto", "required"), "tools": list_of(NAMED_TOOL, 1)}, ["mode", "tools"])},
    ["type", "allowed_tools"])
FORMAT = either(
    object_of({"type": one_of("text")}, ["type"]),
    object_of({"type": one_of("json_object"), "schema": OBJECT}, ["type"]),
    object_of({"type": one_of("json_schema"), "schema": OBJECT, "json_schema": object_of(
        {"name": TEXT, "description": TEXT, "schema": OBJECT, "strict": BOOL}, ["schema"])}, ["type"]))
CHOICES = list_of(TEXT, 1)
STRUCTURE = object_of({"json": either(OBJECT, TEXT), "json_object": BOOL, "regex": TEXT, "choice": CHOICES,
                       "grammar": TEXT, **dict.fromkeys(["disable_any_whitespace", "disable_fallback"], ANYTHING)})

BIAS = object_of({}, others={"type": "number", "minimum": -100, "maximum": 100}) | {
    "propertyNames": {"pattern": "^[0-9]{1,9}$"}}                   # token ids, which JSON has as strings
NO_LIMIT = one_of(-1)       # as llama.cpp and vLLM write it
SHARED = {
    "model": TEXT, "stream": BOOL, "stream_options": object_of({
        "include_usage": BOOL, "include_obfuscation": BOOL, "continuous_usage_stats": BOOL}),
    "n": {"type": "integer", "minimum": 1, "maximum": MAX_CHOICES}, **SAMPLED,
    **{name: either(NO_LIMIT, number(name)) for name in ("max_tokens", "top_k", "seed")},
    "n_predict": either(NO_LIMIT, number("max_tokens")), "repeat_penalty": number("repetition_penalty"),
    "repeat_last_n": {"type": "integer", "minimum": -1, "maximum": 2**31 - 1},
    "min_tokens": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    "logit_bias": BIAS, "stop": either(STOP, list_of(STOP, 0, MAX_STOPS)), "stop_token_ids": list_of(ID, 0, MAX_STOPS),
    "ignore_eos": BOOL, "skip_special_tokens": BOOL, "return_token_ids": BOOL, "timeout": SECONDS,
    "response_format": FORMAT, "guided_json": either(OBJECT, TEXT), "guided_regex": TEXT, "guided_choice": CHOICES,
    "guided_grammar": TEXT, "structured_outputs": STRUCTURE, "grammar": TEXT, "json_schema": OBJECT}
CHAT = object_of(fields_of(field_table.CHAT, {
    **SHARED, "messages": list_of(MESSAGE, 1), "max_completion_tokens": SHARED["max_tokens"],
    "logprobs": BOOL, "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
    "tools": list_of(TOOL), "parallel_tool_calls": BOOL,
    "tool_choice": either(one_of("none", "auto", "required"), NAMED_TOOL, ALLOWED_TOOLS),
    "chat_template_kwargs": VARIABLES, "documents": list_of(OBJECT),
    "add_generation_prompt": BOOL, "continue_final_message": BOOL,
    "reasoning_effort": one_of(*EFFORTS), **BUDGETS}), ["messages"])

# Other names of one number -> that number's name in Request. The last one that is said counts.
ALIASES = {"n_predict": "max_tokens", "max_tokens": "max_tokens", "max_completion_tokens": "max_tokens",
           "repeat_penalty": "repetition_penalty", "repetition_penalty": "repetition_penalty"}
UNLIMITED = {"max_tokens": None, "top_k": 0, "seed": None}          # what Request has for NO_LIMIT


def read_sampling(service, body: dict) -> dict:
    """Arguments of Request that both endpoints take. The body overrules the command line."""
    said = sampling_of(body) | {ours: body[name] for name, ours in ALIASES.items() if name in body}
    said |= {name: value for name, value in UNLIMITED.items() if said.get(name) == -1}
    request = service.sampling | said | {
        "stop": body.get("stop", ()), "stop_token_ids": body.get("stop_token_ids", ()),
        "ignore_eos": body.get("ignore_eos", False), "special": not body.get("skip_special_tokens", True),
        "timeout": body.get("timeout"),
        "logit_bias": {int(token): float(bias) for token, bias in body.get("logit_bias", {}).items()}}
    return without_penalties(request, body["repeat_last_n"]) if "repeat_last_n" in body else request


NO_PENALTIES = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}


def without_penalties(request: dict, n: int) -> dict:
    """llama.cpp's repeat_last_n: penalties look at the last n tokens. Ours look at all of them, -1."""
    if n == 0:
        return request | NO_PENALTIES
    if n > 0 and any(request.get(name, value) != value for name, value in NO_PENALTIES.items()):
        raise RequestError("repeat_last_n", "'repeat_last_n' must be -1 or 0 where a penalty is set: penalties look at "
                                            "all tokens")
    return request


def late_end(service, request: dict, n: int) -> dict:
    """The request, as arguments of Request, with the rule that its end cannot come before n tokens."""
    if not n or request.get("ignore_eos") and not request["stop_token_ids"]:
        return request
    if request.get("grammar") is not None:
        raise RequestError("min_tokens", "'min_tokens' cannot be kept beside a grammar or tools, which say when the "
                                         "answer ends")
    return request | {"grammar": at_least(n, {*request["stop_token_ids"], *service.engine.tokenizer.eos_ids})}


def seeded(request: dict, n: int) -> list[Request]:
    """n requests that differ only in their seeds."""
    seed = request.get("seed")
    return [Request(**request | ({} if seed is None else {"seed": (seed + i) % 2**64})) for i in range(n)]


# ---- errors ----------------------------------------------------------------------------------------------


TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_body(answer: ErrorAnswer) -> dict:
    """OpenAI's clients read the code. Those of llama.cpp know a prompt that is too long by its type and its counts."""
    kind = TYPES.get(answer.status, "server_error" if answer.status >= 500 else "invalid_request_error")
    kind = "exceed_context_size_error" if answer.counts else kind
    return {"error": {"message": answer.message, "type": kind, "param": answer.field, "code": answer.code,
                      **answer.counts}}


PROTOCOL = WireProtocol("/", error_body)

# ---- endpoints -------------------------------------------------------------------------------------------


def chat_completions(service, body: dict):
    request, n = read_sampling(service, body), body.get("n", 1)
    if body.get("logprobs"):
        request["top_logprobs"] = body.get("top_logprobs", 0)
    elif "top_logprobs" in body:
        raise RequestError("top_logprobs", "'top_logprobs' needs 'logprobs' to be true")

    def make(turn):
        asked = late_end(service, request | turn.asked, body.get("min_tokens", 0))
        requests = seeded(asked, n)
        choices = [ChatChoice(service.engine.tokenizer, turn.reader(special=request["special"])) for _ in requests]
        return requests, Answer(service, body, choices, "chatcmpl-", "chat.completion", "chat.completion.chunk")

    return chat.respond(service, read_conversation(body), n, make, body.get("stream", False))


ENDPOINTS = [Endpoint("POST", "/v1/chat/completions", "Answer a conversation", chat_completions, PROTOCOL, CHAT,
                      generates=True, kind="text", may_show=True)]


def read_conversation(body: dict) -> chat.Conversation:
    """What a chat request wants answered."""
    effort = body.get("reasoning_effort")
    thoughts = read_thinking(body, effort, thinks(effort))
    if "documents" in body:
        thoughts["template_kwargs"]["documents"] = body["documents"]
    messages, is_continued = read_messages(body["messages"]), read_continued(body)
    return chat.Conversation(messages, toolbox=read_tools(body), shape=read_shape(body), **thoughts,
                             continued=is_continued, timeout=body.get("timeout"),
                             add_generation_prompt=is_continued or body.get("add_generation_prompt", True))


def read_continued(body: dict) -> bool:
    """Whether the answer continues the last message. It does so, as llama.cpp's does, where that is the assistant's."""
    last, opens = body["messages"][-1], body.get("add_generation_prompt")
    can = last["role"] == "assistant" and not last.get("tool_calls")
    is_continued = body.get("continue_final_message", can and not opens)
    if is_continued and opens:
        raise RequestError("add_generation_prompt", "'add_generation_prompt' and 'continue_final_message' exclude each "
                                                    "other")
    if is_continued and not can:
        raise RequestError("continue_final_message", "'continue_final_message' needs a last message of the assistant's "
                                                     "that calls no tools")
    return is_continued


def read_messages(messages: list[dict]) -> list[dict]:
    """The messages as chat templates take them."""
    for i, message in enumerate(messages):
        if message.get("content") is None and not message.get("tool_calls"):       # the assistant's
            raise RequestError(f"messages[{i}].content", f"messages[{i}].content is missing")
    names = {"developer": "system"}         # OpenAI's newer name for the same role; the templates do not know it
    return [message | {"role": names.get(message["role"], message["role"]),
                       "content": read_content(message.get("content"), f"messages[{i}].content")}
            | read_call_id(message, f"messages[{i}]") for i, message in enumerate(messages)]


def read_call_id(message: dict, field: str) -> dict:
    """Which call a message answers, as api/results.py takes it; nothing where it does not say. field: the request's
    field with the message."""
    id = message.get("tool_call_id") if message["role"] == "tool" else None
    return {"tool_call_id": CallId(id, f"{field}.tool_call_id")} if id else {}


def read_content(content, field: str):
    """The content of a message as chat templates take it. field: the request's field with it."""
    if not isinstance(content, list):
        return content
    return [part if part["type"] == "text" else read_picture(part["image_url"], f"{field}[{i}].image_url.url").part
            for i, part in enumerate(content)]


def read_picture(image: dict, field: str) -> Sent:
    return Sent(image["url"], field, is_url=True, detail=image.get("detail") or "auto")


def read_tools(body: dict) -> chat.Toolbox | None:
    """The tools of a chat request; None where it offers none, or forbids calls."""
    offered = body.get("tools", [])
    tools = [Tool(tool["function"]["name"], tool["function"].get("parameters") or {},
                  bool(tool["function"].get("strict"))) for tool in offered]
    mode, names = read_choice(body.get("tool_choice", "auto"))
    return chat.toolbox_of(offered, tools, mode, names, body.get("parallel_tool_calls", True))


def read_choice(choice: str | dict) -> tuple[str, list[str] | None]:
    """OpenAI's tool_choice: "none", "auto", "required" or "one" (exactly one call), and the names of the tools that may
    be called, None for all. Responses have the fields of a tool at its top, chats have them under "function"."""
    if isinstance(choice, str):
        return choice, None
    if choice["type"] == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        return allowed["mode"], [tool.get("function", tool)["name"] for tool in allowed["tools"]]
    return "one", [choice.get("function", choice)["name"]]


def read_shape(body: dict) -> Shape | None:
    """What the text of the answer has to be, None without a demand. Fields of several servers say so; one may."""
    shapes = [read_format(body.get("response_format", {}))]
    structure = {f"structured_outputs.{name}": value for name, value in body.get("structured_outputs", {}).items()}
    if structure.get("structured_outputs.json_object"):
        shapes.append(Shape("json", {"type": "object"}, "structured_outputs.json_object"))
    for field, kind in SHAPE_FIELDS.items():
        value = (body | structure).get(field)
        if value is not None and value != "":
            shapes.append(read_value(kind, value, field))
    shapes = [shape for shape in shapes if shape is not None]
    if len(shapes) > 1:
        raise RequestError(shapes[1].field, f"'{shapes[0].field}' and '{shapes[1].field}' both say what the answer has "
                                            "to be, and one may")
    return shapes[0] if shapes else None


# Fields that say what the text has to be -> a kind of grammar.SHAPES; None: GBNF or Lark.
SHAPE_FIELDS = {"json_schema": "json", "grammar": "gbnf"} | {
    f"{before}{name}": kind for before in ("guided_", "structured_outputs.")
    for name, kind in (("json", "json"), ("regex", "regex"), ("choice", "choice"), ("grammar", None))}


def read_value(kind: str | None, value, field: str) -> Shape:
    """A shape of this kind. vLLM takes schemas also as JSON text, and grammars in two languages."""
    if kind == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise RequestError(field, f"'{field}' is not a JSON object")
    return Shape(kind or ("gbnf" if "::=" in value else "lark"), value, field)


def read_format(format: dict, field: str = "response_format") -> Shape | None:
    """What a format demands. field: the request's field that holds it. Responses and llama.cpp have the schema beside
    the type, chats have it inside of json_schema."""
    kind, schema = format.get("type"), format.get("schema")
    if kind not in ("json_schema", "json_object"):
        return None
    if schema is not None:
        return Shape("json", schema, f"{field}.schema")
    if kind == "json_object":
        return Shape("json", {"type": "object"}, field)
    if format.get("json_schema") is None:
        raise RequestError(f"{field}.json_schema", f"'{field}.json_schema' is missing")
    return Shape("json", format["json_schema"]["schema"], f"{field}.json_schema.schema")


# ---- what is answered ------------------------------------------------------------------------------------


class ChatChoice:
    """One answer of a conversation as it is written. reply: the Reply that reads its tokens."""

    def __init__(self, tokenizer, reply):
        self.tokenizer, self.reply, self.message, self.n_thinking = tokenizer, reply, Message(), 0
        self.logprobs = {"content": [], "refusal": None}

    opening = [{"delta": {"role": "assistant", "content": ""}}]
    closing = {"delta": {}}

    def push(self, delta: Delta) -> list[dict]:
        """What a token adds to a stream."""
        parts = self.reply.push(delta)
        for part in parts:
            self.message.add(part)
        self.n_thinking = self.reply.n_thinking
        return [{"delta": delta_of(part)} for part in parts]

    def logprobs_of(self, delta: Delta) -> dict | None:
        """The log-probabilities of the token that was pushed last, if it is of the text."""
        if delta.logprob is None:
            return None
        content = logprobs_of_text(delta, self.reply, self.tokenizer)
        self.logprobs["content"] += content
        return {"content": content, "refusal": None}

    def ids_of(self, delta: Delta) -> list[int]:
        """The tokens that the last Delta adds to the answer."""
        return [delta.token_id]

    def finish_reason(self, reason: str) -> str:
        return "tool_calls" if self.reply.n_calls and reason == "stop" else reason

    def whole(self) -> dict:
        text, thought, calls = self.message.text(Content), self.message.text(Thought), self.message.calls
        message = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = [{"id": call.id, "type": "function", "function": {
                "name": call.name, "arguments": call.arguments}} for call in calls]
        return {"message": message}


def delta_of(part) -> dict:
    """A part of an answer as OpenAI's streams have it. Clients join the fragments, so a name must come only once."""
    match part:
        case Thought(text):
            return {"reasoning_content": text}
        case Content(text):
            return {"content": text}
        case CallStart(index, id, name):
            return {"tool_calls": [{"index": index, "id": id, "type": "function",
                                    "function": {"name": name, "arguments": ""}}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def is_end(delta: Delta, tokenizer) -> bool:
    """Whether the token ended the answer and is not part of it."""
    return delta.finish_reason == "stop" and delta.token_id in tokenizer.eos_ids


def logprobs_of_text(delta: Delta, reply, tokenizer) -> list[dict]:
    """The log-probabilities of the token that `reply` was given last: one entry, or none if the token is not of the
    text."""
    def entry(token: int, logprob: float) -> dict:
        piece = tokenizer.pieces[token]
        return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}

    if not reply.in_content or is_end(delta, tokenizer):
        return []
    return [entry(delta.token_id, delta.logprob) | {"top_logprobs": [entry(*one) for one in delta.top_logprobs]}]


def end_of(choice, delta: Delta) -> dict:
    """Why a choice ended, as its last Delta says."""
    return {"finish_reason": choice.finish_reason(delta.finish_reason)} | cause_of(delta)


def timings_of(generation) -> dict:
    """What an answer took, with llama.cpp's names, and `wait_ms` before the prompt was begun. cache_n tokens of the
    prompt were cached; its times are those of the others. The prompt gives the first token. So figures per predicted
    token count only the tokens behind it, and are null where there are none."""
    timings, drafts = generation.timings(), generation.drafts
    n_computed = generation.n_prompt - generation.n_cached
    said = {"cache_n": generation.n_cached, "prompt_n": n_computed, "prompt_ms": 1e3 * timings.prompt,
            "prompt_per_token_ms": 1e3 / timings.prompt_speed, "prompt_per_second": timings.prompt_speed,
            "predicted_n": generation.n_generated, "predicted_ms": 1e3 * timings.answer,
            "predicted_per_token_ms": timings.answer_speed and 1e3 / timings.answer_speed,
            "predicted_per_second": timings.answer_speed, "wait_ms": 1e3 * timings.waiting}
    counts = {"draft_n": sum(drafts.n_checked), "draft_n_accepted": sum(drafts.n_accepted)}
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in said.items()}
    return rounded | (counts if counts["draft_n"] else {})


class Answer:
    """The answer to one HTTP request, whole or as a stream of server-sent events.

    choices: a ChatChoice or TextChoice for each generation, the same number for every prompt.
    """

    def __init__(self, service, body, choices, prefix, whole_name, chunk_name):
        self.choices, self.names = choices, {"whole": whole_name, "chunk": chunk_name}
        self.head = {"id": prefix + uuid.uuid4().hex, "created": int(time.time()), "model": service.engine.name,
                     "system_fingerprint": BUILD}
        self.with_usage = body.get("stream_options", {}).get("include_usage", False)
        self.with_ids, self.n = body.get("return_token_ids", False), body.get("n", 1)

    def whole(self, generations) -> dict:
        choices = [self._choice(i, choice, generation)
                   for i, (choice, generation) in enumerate(zip(self.choices, generations))]
        return self.head | {"object": self.names["whole"], "choices": choices, "usage": self.usage(generations),
                            **self.timings(generations)}

    def _choice(self, index, choice, generation) -> dict:
        ids, logprobs = [], None
        for delta in whole(generation):
            choice.push(delta)
            ids += choice.ids_of(delta)
            logprobs = choice.logprobs if choice.logprobs_of(delta) is not None else None
        return {"index": index, **choice.whole(), **({"token_ids": ids} if self.with_ids else {}),
                "logprobs": logprobs, **end_of(choice, delta)}

    def events(self, generations):
        """Server-sent events: a chunk per piece of an answer, as they come, usage if asked for, then [DONE]."""
        return kept_alive(self._written(generations), ": keep-alive\n\n", generations)

    def _written(self, generations):
        try:
            for i, choice in enumerate(self.choices):
                for piece in choice.opening:
                    yield self._chunk(i, piece)
            for said in together(generations, is_stream=True):
                yield from self._pieces(*said, generations) if said else ()
                yield ""
            if self.with_usage:
                yield self._event(choices=[], usage=self.usage(generations), **self.timings(generations))
            yield "data: [DONE]\n\n"
        except Exception as error:      # the status is out already: clients raise from this event instead
            yield sse(error_body(explain(error)))

    def _pieces(self, index: int, delta: Delta, generations):
        """The chunks that a token of one answer adds to the stream."""
        choice = self.choices[index]
        pieces = choice.push(delta)
        logprobs, ids = choice.logprobs_of(delta), choice.ids_of(delta)
        if delta.finish_reason or (not pieces and (logprobs or self.with_ids)):
            pieces.append(choice.closing)
        for piece in pieces:
            is_last = delta.finish_reason and piece is pieces[-1]
            timings = self.timings(generations) if is_last and not self.with_usage else {}
            yield self._chunk(index, piece | (end_of(choice, delta) if is_last else {}), ids, logprobs, **timings)
            logprobs, ids = None, []    # only the first piece of a token carries its id and log-probabilities

    def _chunk(self, index, piece, ids=(), logprobs=None, **timings) -> str:
        choice = {"index": index, **({"token_ids": list(ids)} if self.with_ids else {}), "logprobs": logprobs,
                  "finish_reason": None, **piece}
        return self._event(choices=[choice], **({"usage": None} if self.with_usage else {}), **timings)

    def _event(self, **data) -> str:
        return sse(self.head | {"object": self.names["chunk"]} | data)

    def timings(self, generations) -> dict:
        """`timings` as llama.cpp has them, in the last chunk of a stream. Answers that are made together share the
        time of the card, so there are none where a request has several."""
        return {"timings": timings_of(generations[0])} if len(generations) == 1 else {}

    def usage(self, generations) -> dict:
        """Tokens: of each prompt once, however many answers it has. Drafts count as predictions."""
        firsts, n_accepted = generations[::self.n], sum(sum(g.drafts.n_accepted) for g in generations)
        n_prompt, n_generated = sum(g.n_prompt for g in firsts), sum(g.n_generated for g in generations)
        return {"prompt_tokens": n_prompt, "completion_tokens": n_generated, "total_tokens": n_prompt + n_generated,
                "prompt_tokens_details": {"cached_tokens": sum(g.n_cached for g in firsts)} | keys_read(firsts),
                "completion_tokens_details": {
                    "reasoning_tokens": sum(choice.n_thinking for choice in self.choices),
                    "accepted_prediction_tokens": n_accepted,
                    "rejected_prediction_tokens": sum(sum(g.drafts.n_checked) for g in generations) - n_accepted}}
