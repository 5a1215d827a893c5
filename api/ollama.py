"""Ollama's API: /api/chat, /api/generate, /api/embed, and what the server has.

The streams are lines of JSON. A request for an unknown model is answered by a model that is here. What a request leaves
open has the defaults of the command line, not those of a Modelfile. `keep_alive` has an effect on models that are
loaded at their first request; the others stay loaded. The penalty of `repeat_penalty` counts tokens of the whole prompt
and answer, whatever `repeat_last_n` above 0 says. A prompt that does not fit is refused, also where `truncate` or
`shift` allow to cut it. Embeddings have length 1, also those of the old /api/embeddings. What else Ollama has (pulling,
making and deleting models) is not served: 404.
"""

import datetime
import functools
import hashlib
import json
import math
import time

import flask

from engine.durations import read_seconds
from engine.pooling import MOST_TEXTS, PoolingEngine
from engine.reply import Call, Content, Message, Thought
from engine.request import Request, RequestError
from engine.served import Facts, Served
from engine.text_engine import TextEngine

from . import chat
from .embeddings import DIMENSIONS, embed
from .endpoint import Endpoint, WireProtocol
from .errors import ErrorAnswer, explain
from .fields import ANYTHING, BOOL, SAMPLED, TEXT, either, list_of, object_of, one_of
from .grammar import Rules, Shape
from .openai import CALL, ID, MAX_LOGPROBS, MAX_STOPS, OBJECT, STOP, TOOL, ChatChoice, read_call_id, read_tools
from .pictures import Sent, content_of
from .streams import cause_of, kept_alive, keys_read, whole
from .thinking import VARIABLES, read_thinking, thinks
from .tools import form_of

VERSION = "0.13.0"          # of Ollama, whose API this is: clients compare it with the version that they need
NEVER = "9999-12-31T23:59:59Z"      # when the model will be unloaded

# ---- what may be sent ------------------------------------------------------------------------------------


def whole_number(least: int, most: int = 2**31 - 1) -> dict:
    return {"type": "integer", "minimum": least, "maximum": most}


# Ollama's names of what SAMPLED names as Request does.
NAMES = {name: name for name in SAMPLED if name not in ("max_tokens", "repetition_penalty")} | {
    "num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
# Numbers that may also be below what SAMPLED allows: description, highest value that leaves the choice to the server.
OPEN = {"num_predict": (whole_number(-2), 0), "top_k": (whole_number(-1), -1),
        "seed": (whole_number(-1, 2**64 - 1), -1)}
OFF = {"mirostat": one_of(0), "tfs_z": one_of(1), "typical_p": one_of(1)}       # ways of sampling that nobody has here
WITHOUT_EFFECT = ["embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "mirostat_eta", "mirostat_tau",
                  "num_batch", "num_gpu", "num_keep", "num_thread", "numa", "penalize_newline", "use_mlock", "use_mmap",
                  "vocab_only"]
OPTIONS = object_of({
    **{name: SAMPLED[of] for name, of in NAMES.items()}, **{name: described for name, (described, _) in OPEN.items()},
    **OFF, **dict.fromkeys(WITHOUT_EFFECT, ANYTHING),
    "stop": either(STOP, list_of(STOP, 0, MAX_STOPS)), "num_ctx": whole_number(0), "repeat_last_n": whole_number(-1)})

MESSAGE = object_of({
    "role": one_of("system", "user", "assistant", "tool"), "content": TEXT, "thinking": TEXT, "images": list_of(TEXT),
    "tool_calls": list_of(CALL), "tool_name": TEXT, "tool_call_id": TEXT}, ["role"], others=True)
KEEP_ALIVE = either(TEXT, {"type": "number"})
SHARED = {
    "model": TEXT, "stream": BOOL, "format": either(one_of("", "json"), OBJECT), "options": OPTIONS,
    "think": either(BOOL, one_of("low", "medium", "high", "max")), "chat_template_kwargs": VARIABLES,
    "logprobs": BOOL,
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
    "keep_alive": KEEP_ALIVE, **dict.fromkeys(["truncate", "shift", "metadata"], ANYTHING)}
CHAT = object_of({**SHARED, "messages": list_of(MESSAGE), "tools": list_of(TOOL)}, ["model"])
GENERATE = object_of({**SHARED, "prompt": TEXT, "system": TEXT, "raw": BOOL, "context": list_of(ID),
                      "images": list_of(TEXT), "suffix": one_of(""), "template": one_of("")}, ["model"])
IDLE = {"model": TEXT, "keep_alive": KEEP_ALIVE, **dict.fromkeys(["truncate", "options"], ANYTHING)}
EMBED = object_of({**IDLE, "input": either(TEXT, list_of(TEXT, 1, MOST_TEXTS)), "dimensions": DIMENSIONS},
                  ["model", "input"])
OLD_EMBED = object_of({**IDLE, "prompt": TEXT}, ["model", "prompt"])
SHOW = object_of({**dict.fromkeys(["model", "name"], TEXT),
                  **dict.fromkeys(["verbose", "system", "template", "options"], ANYTHING)})

# ---- errors ----------------------------------------------------------------------------------------------


def error_body(answer: ErrorAnswer) -> dict:
    return {"error": answer.message}


PROTOCOL = WireProtocol("/api/", error_body)

# ---- endpoints that generate -----------------------------------------------------------------------------


def is_unload(body: dict) -> bool:
    """Whether a client wants a model put away: there is nothing to answer, and nothing to wait for."""
    asked = any(body.get(name) for name in ("messages", "prompt", "images"))
    return not asked and keep_alive_of(body) == 0


def keep_alive_of(body: dict) -> float | None:
    """Seconds for which a model stays loaded after this request; math.inf: until another needs its memory. None:
    nothing is said."""
    said = body.get("keep_alive")
    try:
        seconds = read_seconds(said) if isinstance(said, str) and said else said
    except ValueError:
        raise RequestError("keep_alive", "'keep_alive' must be a number of seconds or a time such as 5m") from None
    return None if seconds in (None, "") else math.inf if seconds < 0 else float(seconds)


def keep(service, body: dict):
    """Obeys `keep_alive`."""
    if (seconds := keep_alive_of(body)) is not None:
        service.models.keep(service.served, seconds)


def unload(service, body: dict, said) -> dict:
    """The answer to a client that wants a model put away. service: the Service, since no model has to be loaded."""
    served = service.choose("text", body["model"])
    service.models.keep(served, 0)
    return {"model": tag(served.facts), "created_at": now(), **said("", "", []), "done": True, "done_reason": "unload"}


def chat_endpoint(service, body: dict):
    if is_unload(body):
        return unload(service, body, said_in_chat)
    keep(service, body)
    messages = [read_message(message, f"messages[{i}]") for i, message in enumerate(body.get("messages", []))]
    if not messages:
        return loaded(service, said_in_chat)
    conversation, make = converse(body, messages, read_tools(body)), maker(service, body, said_in_chat)
    return in_lines(chat.respond(service, conversation, 1, make, is_stream(body)), body)


def generate(service, body: dict):
    if is_unload(body):
        return unload(service, body, said_in_text)
    keep(service, body)
    prompt, images = body.get("prompt", ""), body.get("images", [])
    if not prompt and not images:
        return loaded(service, said_in_text)
    system, context = body.get("system"), body.get("context", [])
    is_raw = body.get("raw") or service.engine.template is None
    if body.get("raw") and (system or context):
        raise RequestError("raw", "'raw' takes the prompt as it is, without 'system' and 'context'")
    if is_raw and images:
        raise RequestError("images", "'images' need a prompt that the model's chat template writes")
    messages = [{"role": "system", "content": system}] if system else []
    conversation = converse(body, messages + [{"role": "user", "content": read_content(images, prompt, "images")}])
    make = maker(service, body, said_in_text)
    if not is_raw:
        return in_lines(chat.respond(service, conversation, 1, make, is_stream(body)), body)
    with chat.named_as_sent(conversation, service):
        turn = functools.partial(raw_turn, service, prompt, conversation)
        return in_lines(service.respond(1, lambda: make(turn()), is_stream(body)), body)


def is_stream(body: dict) -> bool:
    return body.get("stream", True)


def in_lines(response: flask.Response, body: dict) -> flask.Response:
    """The response, a stream of it marked as lines of JSON."""
    if is_stream(body):
        response.mimetype = "application/x-ndjson"
    return response


def loaded(service, said) -> dict:
    """The answer to a request without a prompt, by which clients load a model."""
    return {"model": tag(service.engine), "created_at": now(), **said("", "", []), "done": True, "done_reason": "load"}


def maker(service, body: dict, said):
    """Makes the request and the answer of a turn. said: `said_in_chat` or `said_in_text`."""
    begun, context, options = service.begun, body.get("context", []), read_options(service, body)
    is_logged = body.get("logprobs", False)
    if body.get("top_logprobs") and not is_logged:
        raise RequestError("top_logprobs", "'top_logprobs' needs 'logprobs' to be true")

    def make(turn):
        request = options | turn.asked | {"prompt_ids": context + turn.asked["prompt_ids"]}
        if is_logged:
            request["top_logprobs"] = body.get("top_logprobs", 0)
        choice = ChatChoice(service.engine.tokenizer, turn.reader())
        gives_context = said is said_in_text and not body.get("raw") and not request.get("pictures")
        return [Request(**request)], Answer(service, choice, said, begun, gives_context)

    return make


def read_options(service, body: dict) -> dict:
    """Arguments of Request. The body overrules the command line."""
    options = {name: value for name, value in body.get("options", {}).items() if value is not None}
    n_ctx = service.engine.n_ctx
    if options.get("num_ctx", 0) > n_ctx:
        raise RequestError("options.num_ctx", f"'options.num_ctx' asks for {options['num_ctx']} tokens of context, and "
                                              f"the server has {n_ctx} (--ctx)")
    said = {NAMES[name]: value for name, value in options.items()
            if name in NAMES and not (name in OPEN and value <= OPEN[name][1])}
    if options.get("repeat_last_n") == 0:
        said["repetition_penalty"] = 1.0
    return service.sampling | said | {"stop": options.get("stop", ())}


def converse(body: dict, messages: list[dict], toolbox=None) -> chat.Conversation:
    """What a request wants answered."""
    format, think = body.get("format"), body.get("think")
    schema = {"type": "object"} if format == "json" else format
    shape = Shape("json", schema, "format") if schema else None
    effort = think if isinstance(think, str) else None
    thoughts = read_thinking(body, effort, thinks(effort) if effort else think)
    return chat.Conversation(messages, toolbox=toolbox, shape=shape, **thoughts)


def read_message(message: dict, field: str) -> dict:
    """One of Ollama's messages as chat templates take it. field: the request's field with it."""
    images, text = message.get("images") or [], message.get("content") or ""
    if images and message["role"] not in ("user", "tool"):
        raise RequestError(f"{field}.images", f"'{field}.images' is for messages of the user and results of tools")
    said = {"role": message["role"], "content": read_content(images, text, f"{field}.images")}
    said |= read_call_id(message, field)
    for ours, theirs in (("reasoning_content", "thinking"), ("tool_calls", "tool_calls"), ("name", "tool_name")):
        if message.get(theirs):
            said[ours] = message[theirs]
    return said


def read_content(images: list[str], text: str, field: str) -> str | list[dict]:
    """Images and the text that follows them, as chat templates take them. An image is base64, of which some clients
    make a data: URL. field: the request's field with the images."""
    sent = [Sent(image, f"{field}[{i}]", is_url=image.startswith("data:")) for i, image in enumerate(images)]
    return content_of([*sent, text] if text else sent)


def raw_turn(service, prompt: str, conversation: chat.Conversation) -> chat.Turn:
    """A prompt as it is, without a template; the answer is text, whatever it holds."""
    engine = service.engine
    rules = chat.rules_of(Rules(engine.tokenizer.tags, "content"), None, conversation)
    return chat.Turn({"prompt_ids": engine.encode(prompt)} | rules, Verbatim)


class Verbatim:
    """Reads an answer without looking for thoughts and calls. Otherwise as Reply."""

    in_content = True

    def push(self, delta) -> list:
        return [Content(delta.text)] if delta.text else []


# ---- embeddings ----------------------------------------------------------------------------------------


def embed_texts(service, body: dict):
    begun, engine = service.begun, service.engine
    keep(service, body)

    def said(job, rows):
        times = {"total_duration": time.perf_counter() - begun, "load_duration": job.started - begun}
        return {"model": tag(engine), "embeddings": rows.astype(float).tolist(),
                **{name: round(seconds * 1e9) for name, seconds in times.items()}, "prompt_eval_count": job.n_prompt}

    return embed(service, body, "input", said)


def embed_prompt(service, body: dict):
    keep(service, body)
    return embed(service, body, "prompt", lambda job, rows: {"embedding": rows[0].astype(float).tolist()})


# ---- what is answered ------------------------------------------------------------------------------------


class Answer:
    """The answer to one HTTP request, whole or as a stream of lines.

    said: `said_in_chat` or `said_in_text`. begun: when the request came, by time.perf_counter(). gives_context: whether
    the end holds the token ids of prompt and answer, which the next request may send back. Those of pictures say
    nothing without the pictures.
    """

    def __init__(self, service, choice: ChatChoice, said, begun: float, gives_context: bool):
        self.model, self.tokenizer, self.choice, self.said = tag(service.engine), service.engine.tokenizer, choice, said
        self.begun, self.gives_context, self.ids, self.n_calls = begun, gives_context, [], 0

    def whole(self, generations) -> dict:
        [generation] = generations
        message, logprobs, reason = Message(), [], None
        for delta in whole(generation):
            reason = delta.finish_reason
            logprobs += self._read(delta, message)
        return self._object(message.blocks, logprobs, self._end(generation, reason))

    def events(self, generations):
        """The lines of a stream, the last of which is `done`."""
        return kept_alive(self._written(generations), self._line([]))

    def _written(self, generations):
        [generation] = generations
        message, reason = Message(), None       # message: what no line has told yet
        try:
            for delta in whole(generation, is_stream=True):
                yield ""
                if delta is None:
                    continue
                reason, logprobs = delta.finish_reason, self._read(delta, message)
                has_open_call = not reason and message.blocks and isinstance(message.blocks[-1], Call)
                n_told = len(message.blocks) - bool(has_open_call)      # a call is told when it is whole
                if n_told or logprobs:
                    yield self._line(message.blocks[:n_told], logprobs)
                message.blocks = message.blocks[n_told:]
            yield self._line([], [], self._end(generation, reason))
        except Exception as error:      # the status is out already: clients raise from this line instead
            yield json.dumps(error_body(explain(error))) + "\n"

    def _read(self, delta, message: Message) -> list:
        """Adds to the message what a token completes, and returns its log-probabilities if they are asked for."""
        self.ids.append(delta.token_id)
        for part in self.choice.reply.push(delta):
            message.add(part)
        logged = self.choice.logprobs_of(delta)
        return logged["content"] if logged else []

    def _line(self, blocks, logprobs=(), end=None) -> str:
        return json.dumps(self._object(blocks, logprobs, end or {"done": False})) + "\n"

    def _object(self, blocks, logprobs, end: dict) -> dict:
        text, thought, calls = "", "", []
        for block in blocks:
            match block:
                case Thought(more):
                    thought += more
                case Content(more):
                    text += more
                case _ if (arguments := arguments_of(block)) is None:
                    text += f"{block.name}: {block.arguments}"
                case _:
                    function = {"index": self.n_calls, "name": block.name, "arguments": arguments}
                    calls.append({"id": block.id, "function": function})
                    self.n_calls += 1
        logged = {"logprobs": list(logprobs)} if logprobs else {}
        return {"model": self.model, "created_at": now(), **self.said(text, thought, calls), **logged, **end}

    def _end(self, generation, reason: str) -> dict:
        """Why the answer ended, and what it took: tokens and nanoseconds. As in Ollama, prompt_eval_count has all
        tokens of the prompt, and prompt_eval_duration is the time of those that were not cached."""
        timings = generation.timings()
        times = {"total_duration": time.perf_counter() - self.begun,
                 "load_duration": generation.started - self.begun + timings.waiting,
                 "prompt_eval_duration": timings.prompt, "eval_duration": timings.answer}
        spent = {name: round(seconds * 1e9) for name, seconds in times.items()}
        counts = {"prompt_eval_count": generation.n_prompt, "prompt_eval_cached_count": generation.n_cached,
                  "eval_count": generation.n_generated} | keys_read([generation], "prompt_eval_keys_read")
        end = {"done": True, "done_reason": reason} | cause_of(generation)
        return end | self._context(generation, reason) | spent | counts

    def _context(self, generation, reason: str) -> dict:
        """The token ids of prompt and answer. Templates have a line break after the end of a turn."""
        ids = generation.request.prompt_ids + self.ids + (self.tokenizer.encode("\n") if reason == "stop" else [])
        return {"context": ids} if self.gives_context else {}


def arguments_of(call: Call) -> dict | None:
    """The arguments of a call; None where the end of the answer has cut them."""
    try:
        return json.loads(call.arguments)
    except ValueError:
        return None


def said_in_chat(text: str, thought: str, calls: list[dict]) -> dict:
    """What a piece of an answer says, as /api/chat has it."""
    message = {"role": "assistant", "content": text} | ({"thinking": thought} if thought else {})
    return {"message": message | ({"tool_calls": calls} if calls else {})}


def said_in_text(text: str, thought: str, calls: list[dict]) -> dict:
    """What a piece of an answer says, as /api/generate has it, which knows no calls."""
    return {"response": text} | ({"thinking": thought} if thought else {})


# ---- what the server has ---------------------------------------------------------------------------------


def tag(facts: Facts | TextEngine | PoolingEngine) -> str:
    """The name of a model with a tag behind it, as Ollama's clients write names."""
    name = facts.name
    return name if ":" in name else f"{name}:latest"


def now() -> str:
    return shown_time(time.time())


def shown_time(seconds: float) -> str:
    """A Unix time as Ollama's clients read times."""
    when = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return when.isoformat(timespec="microseconds").replace("+00:00", "Z")


def model_of(facts: Facts) -> dict:
    """What lists say of a model. Its digest stands for the file and is not the file's: that takes minutes to read."""
    details = facts.details
    said = json.dumps([facts.name, details.n_parameters, details.n_bytes, details.modified, details.metadata])
    return {"name": tag(facts), "model": tag(facts), "modified_at": shown_time(details.modified),
            "size": details.n_bytes, "digest": hashlib.sha256(said.encode()).hexdigest(), "details": family_of(details)}


def family_of(details) -> dict:
    family = str(details.metadata["general.architecture"])
    size = details.n_parameters / 1e6
    return {"parent_model": "", "format": "gguf", "family": family, "families": [family],
            "parameter_size": f"{size / 1e3:.1f}B" if size >= 1e3 else f"{size:.1f}M",
            "quantization_level": details.format}


def tags(service):
    return {"models": [model_of(one.facts) for one in service.ready().served]}


def ps(service):
    return {"models": [running(one) for one in service.ready().served if one.state == "loaded"]}


def running(served: Served) -> dict:
    facts, left = served.facts, served.seconds_left()
    model, ends = model_of(facts), NEVER if left == math.inf else shown_time(time.time() + left)
    return model | {"expires_at": ends, "size_vram": model["size"], "context_length": facts.n_ctx}


def show(service, body: dict):
    """What the model's file says. The context length is that of the server, in which prompts have to fit."""
    facts = service.choose(None, body.get("model") or body.get("name")).facts
    template, metadata = facts.template.source if facts.template else "", facts.details.metadata
    model_info = {key: value for key, value in metadata.items()
                  if key != "tokenizer.chat_template" and not (isinstance(value, float) and not math.isfinite(value))}
    model_info |= {"general.parameter_count": facts.details.n_parameters,
                   f"{metadata['general.architecture']}.context_length": facts.n_ctx}
    is_text = facts.kind == "text"
    can = {"completion": is_text, "tools": is_text and form_of(template) is not None,
           "thinking": is_text and "</think>" in template, "vision": facts.sees,
           "embedding": facts.kind == "embedding"}
    return {"license": str(metadata.get("general.license", "")), "modelfile": f"FROM {tag(facts)}\n",
            "parameters": f"num_ctx {facts.n_ctx}", "template": template, "details": family_of(facts.details),
            "model_info": model_info, "capabilities": [name for name in can if can[name]],
            "modified_at": shown_time(facts.details.modified)}


def version(service):
    return {"version": VERSION}


def asks(body: dict) -> str:
    """See Endpoint. A model is not loaded only to be put away."""
    return "server" if is_unload(body) else "model"


ENDPOINTS = [
    Endpoint("POST", "/api/chat", "Answer a conversation (Ollama)", chat_endpoint, PROTOCOL, CHAT, generates=True,
             kind="text", may_show=True, asks=asks),
    Endpoint("POST", "/api/generate", "Answer a prompt (Ollama)", generate, PROTOCOL, GENERATE, generates=True,
             kind="text", may_show=True, asks=asks),
    Endpoint("POST", "/api/embed", "Embeddings of texts (Ollama)", embed_texts, PROTOCOL, EMBED, generates=True,
             kind="embedding"),
    Endpoint("POST", "/api/embeddings", "The embedding of a text (Ollama)", embed_prompt, PROTOCOL, OLD_EMBED,
             generates=True, kind="embedding"),
    Endpoint("GET", "/api/tags", "The models that are served", tags, PROTOCOL),
    Endpoint("GET", "/api/ps", "The models that are loaded", ps, PROTOCOL),
    Endpoint("POST", "/api/show", "What a model's file says of it", show, PROTOCOL, SHOW,
             asks="server"),
    Endpoint("GET", "/api/version", "The version of Ollama whose API this is", version, PROTOCOL)]
