"""Tool use: schemas of one to five tools in the prompt, and a request that needs one call, several, or none. The right
tool among several is what is hard, so training has more of them beside each other than what is scored.

A tool is a verb and a noun, such as book_team_room(date, party_size), half of both drawn for the example, or
one of a few handwritten ones (models/text/tools.toml) with requests as people make them, most of them and
those whose own name is on the other side of the held-out rule under other names, so that the description has to
be read; or an ordinary one (tasks/ordinary.py). Names of tools and the values to pass are held out. After a tool's
result the right answer tells what it says.
"""

import tomllib
from dataclasses import dataclass
from functools import cache

from . import facts, ordinary
from .example import Example, chat, json_in_prompt, pick_lang, to_compact_json, to_json
from .fields import Field, draw_fields, draw_kind, draw_value, object_schema, state, type_of
from .words import TEXT, Draw, Ko, apart, is_held, pairs, with_an


@dataclass(frozen=True)
class Tool:
    """verb and noun are (English, Korean) pairs; optional are the fields that a request may leave out."""

    name: str
    verb: tuple
    noun: tuple
    fields: tuple[Field, ...]
    optional: tuple[Field, ...]

    def schema(self, draw: Draw) -> dict:
        rng = draw.rng
        verb, noun = self.verb[0], self.noun[0]
        text = with_an(rng.choice((f"{verb.capitalize()} a {noun}.", f"{verb.capitalize()} the {noun}.",
                                   f"Can {verb} a {noun}.", f"{self.noun[1]} {self.verb[1]}")))
        parameters = object_schema(self.fields, self.optional)
        if rng.random() < 0.4:
            parameters["properties"] = {
                field.name: field.schema | {"description": rng.choice((field.label, field.label_ko))}
                for field in self.fields}
        return {"type": "function",
                "function": {"name": self.name, "description": text, "parameters": parameters}}


# ------------------------------------------------------------------------------------------------------
# Tools, calls and requests
# ------------------------------------------------------------------------------------------------------


def _function_name(draw: Draw, verb: str, noun: str) -> str:
    words = f"{verb} {noun}".replace("_", " ").split()
    style = draw.rng.random()
    if style < 0.7:
        return "_".join(words)
    if style < 0.85:
        return words[0] + "".join(map(str.capitalize, words[1:]))
    return "_".join(words[1:] + words[:1]) if style < 0.95 else "-".join(words)


def _invent(draw: Draw, verb: tuple | None = None, noun: tuple | None = None) -> Tool:
    rng, chosen = draw.rng, {}

    def make():
        chosen["verb"], chosen["noun"] = verb or _verb(draw), noun or _noun(draw)
        return _function_name(draw, chosen["verb"][0], chosen["noun"][0])
    name = draw.keep(make)
    fields = tuple(draw_fields(draw, rng.choice((0, 1, 1, 2, 2, 3, 3, 4))))
    optional = tuple(field for field in fields if rng.random() < 0.25)
    return Tool(name, chosen["verb"], chosen["noun"], fields, optional)


def _verb(draw: Draw) -> tuple[str, str]:
    if draw.rng.random() < 0.5:
        return draw.rng.choice(pairs("verbs", "tools"))
    word = draw.word("en")
    return word, word


def _noun(draw: Draw) -> tuple[str, str]:
    rng = draw.rng
    if rng.random() < 0.5:
        return draw.term()
    noun = rng.choice(pairs("nouns", "tools"))
    if rng.random() < 0.5:
        return noun
    qualifier = rng.choice(pairs("qualifiers", "tools"))
    return f"{qualifier[0]} {noun[0]}", f"{qualifier[1]} {noun[1]}"


def _invent_several(draw: Draw, n: int) -> list[Tool]:
    """n tools with different verbs or nouns; the others often share one of them with the first."""
    tools = [_invent(draw)]
    while len(tools) < n:
        share = draw.rng.random()
        verb, noun = (tools[0].verb, None) if share < 0.25 else (None, tools[0].noun if share < 0.5 else None)
        tool = _invent(draw, verb, noun)
        if (tool.verb, tool.noun) not in [(other.verb, other.noun) for other in tools]:
            tools.append(tool)
    return tools


REQUEST = (("Please {verb} the {noun}", "{Verb} the {noun}", "I want to {verb} a {noun}",
            "Can you {verb} the {noun}", "{Verb} a {noun} for me", "I need to {verb} the {noun}"),
           ("{noun} {verb}해 줘", "{noun:을} {verb}해 주세요", "{noun} {verb} 부탁해요", "{noun:을} {verb}하고 싶어요",
            "{noun} {verb}해 주실래요", "{noun:을} {verb}해야 합니다"))
JOINED = (("{request} with {details}.", "{request}: {details}.", "{request}. {details}.",
           "{request}, {details}."),
          ("{request}. {details}.", "{request}: {details}.", "{request}. {details}", "{details}. {request}."))
ALSO = (" And ", " Also: ", " Then "), (" 그리고 ", " 또 ", " 그다음 ")
AS_JSON = 0.1   # of the requests to train on give the arguments as JSON


def _ask_for(draw: Draw, tool: Tool, lang: str) -> tuple[str, dict]:
    """A request for one call, and the call."""
    rng, side = draw.rng, lang == "ko"
    given = [field for field in tool.fields if field not in tool.optional or rng.random() < 0.5]
    values = {field.name: draw_value(draw, field, lang) for field in given}
    request = with_an(rng.choice(REQUEST[side]).format(verb=Ko(tool.verb[side]), noun=Ko(tool.noun[side]),
                                                       Verb=tool.verb[0].capitalize()))
    spoken = rng.sample(given, len(given)) if rng.random() < 0.5 else given
    if given and not draw.held and rng.random() < AS_JSON:
        request += ": " + json_in_prompt(draw, {field.name: values[field.name] for field in spoken})
    elif given:
        details = state(draw, spoken, values, lang)
        request = rng.choice(JOINED[side]).format(request=request, details=details)
    else:
        request += "."
    return request, {"name": tool.name, "arguments": values}


def call_message(calls: list[dict]) -> dict:
    return {"role": "assistant", "content": "",
            "tool_calls": [{"type": "function", "function": call} for call in calls]}


def _schemas(draw: Draw, tools: list[Tool]) -> list[dict]:
    return [tool.schema(draw) for tool in draw.rng.sample(tools, len(tools))]


# What is asked, as (request, calls, schemas in the prompt).


def one(draw: Draw, lang: str) -> tuple[str, list, list]:
    tools = _invent_several(draw, draw.rng.randint(1, 4))
    request, call = _ask_for(draw, tools[0], lang)
    return request, [call], _schemas(draw, tools)


def several(draw: Draw, lang: str) -> tuple[str, list, list]:
    """Two or three calls at once, of one tool or of several; none is asked for twice."""
    rng, requests, calls = draw.rng, [], []
    tools = _invent_several(draw, rng.randint(1, 3))
    for _ in range(rng.choice((2, 2, 3))):
        request, call = _ask_for(draw, rng.choice(tools), lang)
        if call not in calls:
            requests.append(request)
            calls.append(call)
    return rng.choice(ALSO[lang == "ko"]).join(requests), calls, _schemas(draw, tools)


@cache
def _handwritten() -> tuple[dict, ...]:
    return tuple(tomllib.loads((TEXT / "tools.toml").read_text("utf-8"))["tool"])


@cache
def _trained() -> tuple[dict, ...]:
    """These, and more that only training has."""
    return (*_handwritten(), *tomllib.loads((TEXT / "wide" / "tools.toml").read_text("utf-8"))["tool"])


def _sampled(draw: Draw, lang: str, n: int) -> list["_Named"]:
    return [_Named(draw, tool, lang) for tool in draw.rng.sample(_handwritten() if draw.held else _trained(), n)]


def natural(draw: Draw, lang: str) -> tuple[str, list, list]:
    """One call of a handwritten tool, others of both sorts beside it or none."""
    rng = draw.rng
    chosen = _sampled(draw, lang, rng.choice((1, 2, 2, 3, 3, 4) if draw.held else (1, 1, 2, 2, 3, 3, 4, 4)))
    n_others = rng.randint(0, 4 - len(chosen))
    return _natural(draw, chosen, _schemas(draw, _invent_several(draw, n_others)) if n_others else [])


def _natural(draw: Draw, chosen: list["_Named"], others: list) -> tuple[str, list, list]:
    """A request for the first of the chosen tools, its call, and all schemas."""
    schemas = [named.schema() for named in chosen] + others
    draw.rng.shuffle(schemas)
    request, call = chosen[0].ask_for(draw)
    return request, [call], schemas


class _Named:
    """A handwritten tool, what is said of it, and what it and its parameters are called here: names go from
    there to here."""

    def __init__(self, draw: Draw, tool: dict, lang: str, rename: bool = True):
        self.tool, self.lang, rng = tool, lang, draw.rng
        self.description = rng.choice(tool["description"] + tool.get(f"description_{lang}", []))
        self.names = {name: name for name in (tool["name"], *tool["parameters"])}
        renamed = RENAMED if draw.held else RENAMED_IN_TRAINING
        if rename and (rng.random() < renamed or is_held(tool["name"]) != draw.held):
            self.names[tool["name"]] = draw.name_with(*rng.choice(([], tool["name"].split("_")[-1:])))
        for name in tool["parameters"]:
            if rename and rng.random() < 0.4:
                self.names[name] = draw.word("en")

    def ask_for(self, draw: Draw) -> tuple[str, dict]:
        """A request for one call, and the call."""
        values = {name: draw_kind(draw, kind, self.lang) for name, kind in self.tool["parameters"].items()}
        request = facts.typed(draw, draw.rng.choice(self.tool[self.lang]))
        request = request.format_map({name: Ko(value) for name, value in values.items()})
        arguments = {self.names[name]: value for name, value in values.items()}
        return request, {"name": self.names[self.tool["name"]], "arguments": arguments}

    def schema(self) -> dict:
        """A parameter under another name is described by its own."""
        properties = {}
        for name, kind in self.tool["parameters"].items():
            described = {} if self.names[name] == name else {"description": name}
            properties[self.names[name]] = {"type": type_of(kind)} | described
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return {"type": "function", "function": {
            "name": self.names[self.tool["name"]], "description": self.description,
            "parameters": parameters}}


RENAMED, RENAMED_IN_TRAINING = 0.7, 0.45    # of the handwritten tools have another name than their own
INVENTED = 0.2  # of the ordinary tools have invented names
TWICE = 0.12    # of the requests for an ordinary tool with one parameter are for two calls


def of_ordinary(draw: Draw, lang: str, invented: bool | None = None) -> tuple[str, list, list]:
    """One call of an ordinary tool, or two as in "Weather in Rome and Oslo?"; others like it beside it."""
    rng = draw.rng
    invented = rng.random() < INVENTED if invented is None else invented
    n_tools = rng.choice((1, 2, 3, 3, 4, 5) if draw.held else (1, 1, 2, 3, 3, 4, 4, 5))
    chosen = ordinary.several(draw, lang, n_tools, invented)
    schemas = [tool.schema() for tool in rng.sample(chosen, len(chosen))]
    if rng.random() < TWICE and chosen[0].can_be_asked_twice:
        request, calls = chosen[0].ask_twice(draw)
    else:
        request, *calls = chosen[0].ask_for(draw)
    return request, calls, schemas


def _any_request(draw: Draw, lang: str) -> tuple[str, list, list]:
    """In training more often of tools in ordinary words, which are what is hard."""
    weights = (22, 18, 25, 35) if draw.held else (12, 14, 32, 42)
    return draw.rng.choices((one, several, natural, of_ordinary), weights)[0](draw, lang)


# ------------------------------------------------------------------------------------------------------
# Examples
# ------------------------------------------------------------------------------------------------------


def to_call(draw: Draw, lang: str) -> Example:
    """A request that the tools can fulfil, sometimes after other talk; the answer is the calls."""
    return _to_call(draw, lang, *_any_request(draw, lang))


def make_new_words(rng, held: bool = True, length: int | None = None, lang: str | None = None) -> Example:
    """To judge with: a call of a tool that no training example has, others of these beside it."""
    lang, draw = pick_lang(rng, lang), Draw(rng, held)
    chosen = [_Named(draw, tool, lang, rename=False) for tool in rng.sample(apart()["tool"], rng.randint(1, 3))]
    return _to_call(draw, lang, *_natural(draw, chosen, []))


def make_ordinary(rng, held: bool = True, length: int | None = None, lang: str | None = None) -> Example:
    """To judge with: a call of an ordinary tool whose name is held out."""
    lang, draw = pick_lang(rng, lang), Draw(rng, held)
    return _to_call(draw, lang, *of_ordinary(draw, lang, invented=False))


def make_ordinary_invented(rng, held: bool = True, length: int | None = None, lang: str | None = None) -> Example:
    """To judge with: the same requests, for tools whose names are invented."""
    lang, draw = pick_lang(rng, lang), Draw(rng, held)
    return _to_call(draw, lang, *of_ordinary(draw, lang, invented=True))


def _to_call(draw: Draw, lang: str, request: str, calls: list, schemas: list) -> Example:
    rng = draw.rng
    trained = Draw(rng, held=False)  # what was said before is not what is asked for
    n_before = rng.choices((0, 1, 2), (8, 1, 1))[0]
    spoken = pick_lang(rng, None) if rng.random() < facts.MIXED else lang
    before = [text for _ in range(n_before) for text in facts.small_talk(trained, spoken)[:2]]
    expect = {"kind": "calls", "calls": calls, "tools": schemas}
    return chat(draw, lang, "tools", [*before, request, call_message(calls)], expect, facts.system(rng, lang),
                schemas)


NO_TOOL = {"en": "None of the tools can do that.", "ko": "그 일을 할 수 있는 도구가 없습니다."}


def no_call(draw: Draw, lang: str) -> Example:
    """A question that needs no tool, or a request that no tool fits."""
    rng = draw.rng
    if rng.random() < 0.4:
        chosen = ordinary.several(draw, lang, rng.randint(1, 4))
        schemas = [tool.schema() for tool in chosen]
        asked = ordinary.of_other_kinds(draw, lang, chosen).ask_for(draw)[0]
    else:
        tools = _invent_several(draw, rng.randint(2, 4))
        schemas, asked = _schemas(draw, tools[1:]), _ask_for(draw, tools[0], lang)[0]
    if rng.random() < 0.5 and not draw.held:
        question, answer, expect = facts.turn(rng, lang, rng.choice(("facts", "facts", "self")))[:3]
    else:
        question, answer = asked, NO_TOOL[lang]
        expect = {"kind": "keys", "keys": ["None of the tools" if lang == "en" else "도구가 없습니다"]}
    return chat(draw, lang, "tools", [question, answer], expect, facts.system(rng, lang), schemas)


# ------------------------------------------------------------------------------------------------------
# Results
# ------------------------------------------------------------------------------------------------------

FAILED = {"en": "The call failed: {error}.", "ko": "호출이 실패했습니다: {error}."}
ERRORS = ("not found", "no access", "timed out", "out of stock", "already exists", "invalid date",
          "too many requests", "offline")


def to_tell(draw: Draw, lang: str, write=json_in_prompt) -> Example:
    """A request, its calls, the tools' results, and the answer that tells the results. write: JSON of a draw."""
    request, calls, schemas = _any_request(draw, lang)
    results = [_result(draw, lang) for _ in calls]
    told = [{"role": "tool", "content": _content(draw, result, write)} for result, *_ in results]
    turns = [request, call_message(calls), *told,
             {"role": "assistant", "content": " ".join(answer for _, answer, _ in results)}]
    expect = {"kind": "values", "values": [pair for *_, pairs in results for pair in pairs]}
    return chat(draw, lang, "tools", turns, expect, None, schemas)


def to_call_again(draw: Draw, lang: str) -> Example:
    """A request for one of several tools, after others of which the calls and results are told."""
    rng, turns = draw.rng, []
    if rng.random() < 0.5:
        chosen = ordinary.several(draw, lang, rng.randint(2, 4))
    else:
        chosen = _sampled(draw, lang, rng.randint(2, 4))
    for _ in range(rng.randint(1, 3)):
        request, call = rng.choice(chosen).ask_for(draw)
        result, answer, _ = _result(draw, lang)
        turns += [request, call_message([call]), {"role": "tool", "content": _content(draw, result)}, answer]
    request, call = rng.choice(chosen).ask_for(draw)
    schemas = [named.schema() for named in chosen]
    expect = {"kind": "calls", "calls": [call], "tools": schemas}
    return chat(draw, lang, "tools", [*turns, request, call_message([call])], expect, facts.system(rng, lang),
                schemas)


def make_compact_results(rng, held: bool = True, length: int | None = None, lang: str | None = None) -> Example:
    """To judge with: answers from results of which at least one is an object, as JavaScript writes it."""
    lang = pick_lang(rng, lang)
    while True:
        example = to_tell(Draw(rng, held), lang, lambda _, result: to_compact_json(result))
        if any(label for label, _ in example.expect["values"]):
            return example


def _content(draw: Draw, result, write=json_in_prompt) -> str:
    """What a tool's message says: an object as JSON, anything else as it is."""
    return write(draw, result) if isinstance(result, dict) else str(result)


PLAIN, PLAIN_TOLD = 0.2, {"en": "The result is {value}.", "ko": "결과는 {value}입니다."}  # of the results are one value
PLAIN_KINDS = ("word", "word", "title", "id", "number", "person", "phrase", "date", "file")


def _result(draw: Draw, lang: str) -> tuple[object, str, list]:
    """What a tool returns, the sentence that tells it, and the (label, value) pairs that it has to tell."""
    rng = draw.rng
    if rng.random() < 0.1:
        error = rng.choice(ERRORS)
        return {"error": error}, FAILED[lang].format(error=error), [("", error)]
    if rng.random() < PLAIN:
        value = draw_kind(draw, rng.choice(PLAIN_KINDS), lang)
        return value, PLAIN_TOLD[lang].format(value=value), [("", str(value))]
    fields = draw_fields(draw, rng.randint(1, 3), nested=False)
    result = {field.name: draw_value(draw, field, lang) for field in fields}
    told = {name: _told(value) for name, value in result.items()}
    return result, _tell(fields, told, lang), [(field.say(lang), told[field.name]) for field in fields]


def _told(value) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return value if isinstance(value, str) else to_json(value)


def _tell(fields: list[Field], told: dict, lang: str) -> str:
    if lang == "en":
        text = ", and ".join(f"the {field.label} is {told[field.name]}" for field in fields)
        return f"{text[0].upper()}{text[1:]}."
    text = ", ".join(f"{Ko(field.label_ko):은} {told[field.name]}" for field in fields)
    return f"{text}입니다."


FORMS = (to_call, no_call, to_tell, to_call_again)
# Where one tool is offered, training needs more calls than refusals: else a tool that it does not know is refused.
WEIGHTS, WEIGHTS_OF_TRAINING = (55, 15, 12, 18), (62, 12, 10, 16)


def make(rng, held: bool = False, length: int | None = None, lang: str | None = None) -> Example:
    lang, draw = pick_lang(rng, lang), Draw(rng, held)
    return rng.choices(FORMS, WEIGHTS if held else WEIGHTS_OF_TRAINING)[0](draw, lang)
