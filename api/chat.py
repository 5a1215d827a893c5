"""A conversation to be answered, whatever its protocol: its prompt, what the answer must obey, how to read it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from qengine import RequestError

from .grammar import GrammarError, Rules
from .reply import Reply, opening_of
from .tools import Tool, form_of

# What a message of a user or the system begins or ends with to switch thinking on or off from there on.
SWITCHES = {"/think": True, "/no_think": False}


@dataclass(frozen=True)
class Toolbox:
    """The tools of a request. offered: as the chat template takes them. must: one has to be called, or more where
    `several` may be."""

    offered: list[dict]
    tools: list[Tool]
    must: bool = False
    several: bool = True


@dataclass(frozen=True)
class Turn:
    """prompt_ids and rules are arguments of Request; reader() makes a Reply for one answer."""

    prompt_ids: list[int]
    rules: dict
    reader: Callable[[], Reply]


def render(service, messages: list[dict], thinking: bool | None, toolbox: Toolbox | None = None) -> tuple:
    """The prompt of a conversation, and how its answer begins. thinking: None leaves it to the messages, the command
    line and the template, in this order."""
    template = service.ready().template
    if template is None:
        raise RequestError("messages", "this model has no chat template: use /v1/completions")
    if toolbox and form_of(template.source) is None:
        raise RequestError("tools", "the chat template of this model knows no tools")
    messages, switch = take_switches(messages)
    thinking = next((one for one in (thinking, switch, service.thinking) if one is not None), None)
    prompt = template.render(messages, tools=toolbox.offered if toolbox else None, enable_thinking=thinking)
    return prompt, opening_of(prompt, template.source, thinking)


def prepare(service, messages: list[dict], thinking: bool | None, toolbox: Toolbox | None = None,
            schema: dict | None = None, schema_field: str | None = None) -> Turn:
    """A turn of a conversation. schema: what the text must be; schema_field: what says so. RequestError names it."""
    engine = service.ready()
    prompt, opening = render(service, messages, thinking, toolbox)
    prompt_ids = engine.encode(prompt)          # first: a prompt too long needs no grammar
    tokenizer, form = engine.tokenizer, form_of(engine.template.source)
    rules = rules_of(Rules(tokenizer.tags, opening), form, toolbox, schema, schema_field)
    stop_after = tokenizer.tags.get("</think>") if opening == "thought" else None
    if toolbox and toolbox.must:
        rules["stop"] = ()              # stop strings are for text, of which there is none
    tools = {tool.name: tool for tool in toolbox.tools} if toolbox else None
    stop_before = tokenizer.tags.get("<tool_call>") if toolbox else None
    return Turn(prompt_ids, rules | {"stop_after": stop_after, "stop_before": stop_before},
                functools.partial(Reply, tokenizer, opening, form, tools, ruled="grammar" in rules))


def rules_of(rules: Rules, form, toolbox: Toolbox | None, schema: dict | None, schema_field: str | None) -> dict:
    """What an answer must obey, as arguments of Request."""
    try:
        if schema is not None and toolbox is None:
            return rules.value(schema)
        if toolbox is not None:
            return rules.calls(form, toolbox.tools, toolbox.must, toolbox.several, schema)
        return {}
    except GrammarError as error:
        if schema is not None:
            raise RequestError(schema_field, f"'{schema_field}' cannot be enforced: {error}") from None
        if toolbox.must or any(tool.strict for tool in toolbox.tools):
            raise RequestError("tools", f"a schema in 'tools' cannot be enforced: {error}") from None
        return {}                       # calls may be made all the same, and are read when they are whole


def respond(service, requests, answer, stream: bool):
    """The HTTP response to requests; the engine's word for a grammar that it refuses is the client's, too."""
    try:
        return service.respond(requests, answer, stream)
    except RequestError as error:
        if error.field == "grammar":
            raise RequestError("response_format", f"the form of the answer cannot be enforced: {error}") from None
        raise


def take_switches(messages: list[dict]) -> tuple[list[dict], bool | None]:
    """The messages without /think and /no_think, and what the last of these says."""
    said = []

    def without(text):      # no regular expression: those look at a row of blanks again and again
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
            return [part | {"text": without(part["text"])} for part in content]
        return without(content) if isinstance(content, str) else content

    messages = [message | {"content": cleaned(message.get("content"))}
                if message["role"] in ("user", "system") else message for message in messages]
    return messages, said[-1] if said else None
