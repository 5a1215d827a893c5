"""A conversation to be answered, whatever its protocol: its prompt, what the answer must obey, how to read it."""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

from engine.images import check_places, prompt_fields
from engine.reply import Reply, boundaries, check_budget, opening_of
from engine.request import ContextExceeded, RequestError
from engine.sight import BLIND
from engine.template import EFFORT, ChatTemplate, flat_content
from engine.text_engine import wrong_kind

from .errors import WITHOUT_TOOLS
from .grammar import GrammarError, Rules, Shape
from .pictures import Sent, sent_in
from .results import in_order
from .thinking import EFFORTS
from .tools import Tool, form_of

# A message of the user or the system that begins or ends with one of these switches thinking on or off from there on.
SWITCHES = {"/think": True, "/no_think": False}


@dataclass(frozen=True)
class Toolbox:
    """The tools of a request. offered: as the chat template takes them. must: one has to be called, or more where
    `several` may be."""

    offered: list[dict]
    tools: list[Tool]
    must: bool = False
    several: bool = True


def toolbox_of(offered: list[dict], tools: list[Tool], mode: str, names: list[str] | None = None,
               several: bool = True) -> Toolbox | None:
    """The tools that an answer may call; None where there are none. The template is shown all that are offered.

    mode: "none", "auto", "required", or "one" for exactly one call. names: of the tools that may be called, None for
    all. Raises RequestError where a name is of no tool, or a call is required and there are no tools.
    """
    if missing := set(names or ()) - {tool.name for tool in tools}:
        raise RequestError("tool_choice", f"'tool_choice' names no tool of the request: {min(missing)[:80]!r}")
    if mode in ("required", "one") and not tools:
        raise RequestError("tool_choice", f"'tool_choice' is {mode}, and there are no tools")
    if mode == "none" or not tools:
        return None
    allowed = tools if names is None else [tool for tool in tools if tool.name in names]
    return Toolbox(offered, allowed, must=mode != "auto", several=several and mode != "one")


@dataclass(frozen=True)
class Conversation:
    """What a request wants answered. thinking: None leaves it to the messages, the command line and the template, in
    this order. shape: what the answer's text has to be, if the request says so. continued: whether the last message,
    the assistant's, is the beginning of the answer. template_kwargs: further variables of the template.
    add_generation_prompt: whether the template opens the assistant's message. timeout: seconds for the prompt.
    effort: a word for how much to think, passed to the template; if the template knows no such words, a limit of tokens
    takes its place. thinking_budget: the most tokens of thoughts; None leaves it to the effort, or else to the command
    line. budget_field: the request's field with it."""

    messages: list[dict]
    thinking: bool | None
    toolbox: Toolbox | None = None
    shape: Shape | None = None
    continued: bool = False
    template_kwargs: dict = dataclasses.field(default_factory=dict)
    add_generation_prompt: bool = True
    timeout: float | None = None
    effort: str | None = None
    thinking_budget: int | None = None
    budget_field: str | None = None


@dataclass(frozen=True)
class Prompt:
    """A prompt as text, with one control token for each of the pictures that were sent. opening: how its answer
    begins."""

    text: str
    opening: str
    sent: list[Sent]


@dataclass(frozen=True)
class Turn:
    """asked: arguments of Request, the prompt and what the answer must obey. reader() makes a Reply for one answer."""

    asked: dict
    reader: Callable[[], Reply]


def respond(service, conversation: Conversation, n: int, make, stream: bool):
    """The HTTP response to n requests for an answer. make(turn): (requests, answer), as Service.respond takes them."""
    with named_as_sent(conversation, service):
        return service.respond(n, lambda: make(prepare(service, conversation)), stream)


def render(service, conversation: Conversation) -> Prompt:
    """The prompt of a conversation. Its pictures are not looked at yet."""
    engine, toolbox = service.engine, conversation.toolbox
    if engine.kind != "text":
        raise wrong_kind(engine, "text")
    template = engine.template
    if template is None:
        raise RequestError("messages", "this model has no chat template: use /v1/completions")
    messages = in_order(conversation.messages)
    sent = sent_in(messages)
    if sent and engine.eyes is None:
        raise RequestError(sent[0].field, BLIND)
    if toolbox:
        check_tools(toolbox.tools, form_of(template.source))
    messages, switch = take_switches(join_system(messages))
    asked = conversation.thinking, switch, service.thinking
    thinking = next((one for one in asked if one is not None), None)
    begun = messages.pop() if conversation.continued else None
    if begun is not None:
        thinking = bool(begun.get("reasoning_content"))         # without any, the answer goes on behind its thoughts
    effort = template.effort(conversation.effort) if conversation.effort else None
    variables = service.template_kwargs | ({EFFORT: effort} if effort else {}) | conversation.template_kwargs
    prompt = template.render(messages, toolbox.offered if toolbox else None, thinking,
                             conversation.add_generation_prompt, variables, conversation.timeout)
    opening = opening_of(prompt, template.source, thinking)
    if begun is not None:
        prompt, opening = continued(prompt, opening, begun, template)
    return Prompt(prompt, opening, sent)


def encode(service, prompt: Prompt, timeout: float | None) -> dict:
    """Arguments of Request: the token ids of a prompt, and its pictures. timeout: see `with_pictures`."""
    return with_pictures(service, service.engine.encode(prompt.text), prompt.sent, timeout)


def with_pictures(service, ids: list[int], sent: list[Sent], timeout: float | None = None) -> dict:
    """Arguments of Request: token ids in which each picture has as many tokens as it needs, and the pictures.

    ids: of a prompt with one token for each picture. timeout: seconds that reading the pictures may take. Raises
    RequestError where the chat template shows more or fewer pictures than were sent, and as `Pictures.read` does.
    """
    if not sent:
        return {"prompt_ids": ids}
    eyes = service.engine.eyes
    check_places(ids, len(sent), eyes.pad)          # before anything is read
    return prompt_fields(ids, service.read_pictures(sent, timeout), eyes)


def join_system(messages: list[dict]) -> list[dict]:
    """The messages with those of the system at the beginning joined into one: templates take one."""
    n = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if n < 2:
        return messages
    texts = [flat_content(message.get("content"), f"messages[{i}].content") for i, message in enumerate(messages[:n])]
    return [messages[0] | {"content": "\n\n".join(texts)}] + messages[n:]


def continued(prompt: str, opening: str, begun: dict, template: ChatTemplate) -> tuple[str, str]:
    """A prompt that ends with the beginning of the answer, a message of the assistant's, and how the rest of the answer
    begins."""
    thoughts, text = begun.get("reasoning_content") or "", flat_content(begun.get("content"), "messages")
    if thoughts and opening != "thought":
        prompt += "<think>\n"
    prompt += template.guarded(thoughts)
    if thoughts and not text:
        return prompt, "thought"
    if thoughts or opening == "thought":
        prompt += "\n</think>\n\n"
    return prompt + template.guarded(text), "content"


def check_tools(tools: list[Tool], form):
    """Raises RequestError where a model that calls tools in this form could not tell two tools apart, or not write the
    name of an argument."""
    if form is None:
        raise RequestError("tools", "the chat template of this model knows no tools")
    for name, n in collections.Counter(tool.name for tool in tools).items():
        if n > 1:
            raise RequestError("tools", f"{n} tools have the name {name!r}")
    for tool in tools:
        for key in tool.properties:
            if not form.can_write(key):
                raise RequestError("tools", f"the model cannot name the argument {key[:80]!r} of the tool "
                                            f"{tool.name!r}: it is empty, or has '>', '<' or a line break")


def count(service, conversation: Conversation) -> int:
    """Tokens of the prompt of a conversation."""
    with named_as_sent(conversation, service):
        return len(encode(service, render(service, conversation), conversation.timeout)["prompt_ids"])


def prepare(service, conversation: Conversation) -> Turn:
    """What the engine is asked for, and how its answers are read."""
    engine, toolbox = service.engine, conversation.toolbox
    prompt = render(service, conversation)
    asked = encode(service, prompt, conversation.timeout)       # first, because a prompt too long needs no grammar
    opening = prompt.opening
    tokenizer, form = engine.tokenizer, form_of(engine.template.source)
    rules = rules_of(Rules(tokenizer.tags, opening), form, conversation)
    bounds = boundaries(tokenizer.tags, opening, toolbox is not None)
    if conversation.budget_field:
        check_budget(conversation.budget_field, opening, bounds)
    bounds |= budget_of(conversation, engine.template)
    tools = {tool.name: tool for tool in toolbox.tools} if toolbox else None
    return Turn(asked | rules | bounds,
                functools.partial(Reply, tokenizer, opening, form, tools, ruled="grammar" in rules))


def budget_of(conversation: Conversation, template: ChatTemplate) -> dict:
    """Arguments of Request: the most tokens of thoughts, if the conversation says so."""
    if conversation.thinking_budget is not None:
        return {"thinking_budget": conversation.thinking_budget}
    if conversation.effort is None or template.efforts:
        return {}
    return {"thinking_budget": EFFORTS[conversation.effort]}


def rules_of(rules: Rules, form, conversation: Conversation) -> dict:
    """What an answer must obey, as arguments of Request. Raises RequestError if the request demands a shape or a schema
    (as the form of the text, of a required call, or of a strict tool) that cannot be enforced, or only by a grammar
    that is too long."""
    toolbox, shape = conversation.toolbox, conversation.shape
    if conversation.continued and (shape or toolbox and toolbox.must):
        field = shape.field if shape else "tool_choice"
        raise RequestError(field, f"'{field}' needs a whole answer, and the last message has already begun it")
    ruled = text_rules(rules, shape)
    if toolbox is None:
        return ruled
    try:
        return rules.calls(form, toolbox.tools, toolbox.must, toolbox.several, shape)
    except GrammarError as error:
        if ruled or toolbox.must or any(tool.strict for tool in toolbox.tools):
            raise RequestError("tools", f"a schema in 'tools' cannot be enforced: {error}") from None
        return {}                       # the model may still call tools; a call is then read when it is whole


def text_rules(rules: Rules, shape: Shape | None) -> dict:
    """What a text of this shape must obey, as arguments of Request. Raises RequestError where it cannot be enforced."""
    try:
        return {} if shape is None else rules.text(shape)
    except GrammarError as error:
        raise RequestError(shape.field, f"'{shape.field}' cannot be enforced: {error}") from None


@contextlib.contextmanager
def named_as_sent(conversation: Conversation, service):
    """Gives RequestErrors of the engine, about its prompt and its grammar, the names that these have in the client's
    request. A prompt is too long for its tools if it would fit without them."""
    try:
        with grammar_named("tools" if conversation.shape is None else conversation.shape.field):
            yield
    except RequestError as error:
        if error.field == "prompt":
            error.field = "messages"
            if isinstance(error, ContextExceeded) and fits_without_tools(service, conversation):
                error.field, error.args = "tools", (f"{error} {WITHOUT_TOOLS}.",)
        raise


@contextlib.contextmanager
def grammar_named(field: str):
    """Gives RequestErrors of the engine about its grammar the name of the field of the request that asked for it."""
    try:
        yield
    except RequestError as error:
        if error.field != "grammar" or str(error).startswith(f"'{field}'"):    # the request's own field `grammar`
            raise
        raise RequestError(field, f"'{field}' cannot be enforced: {error}") from None


def fits_without_tools(service, conversation: Conversation) -> bool:
    """Whether the request has tools, and its prompt would fit into the context without them."""
    if conversation.toolbox is None:
        return False
    try:
        return count(service, dataclasses.replace(conversation, toolbox=None)) < service.engine.n_ctx
    except RequestError:
        return False


def take_switches(messages: list[dict]) -> tuple[list[dict], bool | None]:
    """The messages without the switches /think and /no_think, and what the last switch says; None without one."""
    said = []

    def without(text):      # without regular expressions, which take quadratic time over a row of blanks
        for word, value in SWITCHES.items():
            if (begun := text.lstrip()).startswith(word) and not begun[len(word):][:1].strip():
                said.append(value)
                text = begun[len(word):].lstrip()
                break
        for word, value in SWITCHES.items():
            if (ended := text.rstrip()).endswith(word) and not ended[:-len(word)][-1:].strip():
                said.append(value)
                return ended[:-len(word)].rstrip()
        return text

    def cleaned(content):
        if isinstance(content, list):
            return [part | {"text": without(part["text"])} if part["type"] == "text" else part for part in content]
        return without(content) if isinstance(content, str) else content

    messages = [message | {"content": cleaned(message.get("content"))}
                if message["role"] in ("user", "system") else message for message in messages]
    return messages, said[-1] if said else None
