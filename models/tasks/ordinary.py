"""Ordinary tools, named as developers name them: read_file, playSong, lamp-switch-off.

A tool is an action on a thing (models/text/ordinary.toml), such as to switch off a lamp, which hundreds of pairs are;
its name is a verb for the action and the stem of the thing, in one of the spellings that programs use, on its side of
the held-out rule. Requests may call the thing by another word than the tool does, so that the description counts.
Beside the tool stand others like it: with the same thing or with the same verb.
"""

import tomllib
from dataclasses import dataclass
from functools import cache

from .facts import expanded, typed
from .fields import camel_case, draw_kind, type_of
from .words import TEXT, Draw, Ko, apart_names, is_held, spelled, with_an

SHORT_KINDS = ("city", "person", "id", "room", "file", "word", "time")
DESCRIBED = 0.75  # of the tools have a description; the name of any other says all


@dataclass(frozen=True, eq=False)
class Action:
    """What tools of a kind do. parameters: for each, its names, the first as requests call it, and its kind; described
    and asked have wordings by language."""

    verbs: tuple[str, ...]
    parameters: tuple[tuple[tuple[str, ...], str], ...]
    described: dict
    asked: dict


@dataclass(frozen=True, eq=False)
class Thing:
    """Its stem in names, and its words by language."""

    stem: str
    words: dict


@cache
def kinds() -> tuple[tuple[tuple[Thing, ...], tuple[Action, ...]], ...]:
    """(things, actions) of every kind."""
    tables = tomllib.loads((TEXT / "ordinary.toml").read_text("utf-8"))["kind"]
    return tuple((tuple(map(_thing, table["things"].split(","))), tuple(map(_action, table["action"])))
                 for table in tables)


def _thing(entry: str) -> Thing:
    *english, korean = entry.split()
    return Thing(english[0], {"en": tuple(" ".join(english[1:]).split("/")), "ko": tuple(korean.split("/"))})


def _action(table: dict) -> Action:
    parameters = tuple((tuple(name for name in names.split("/") if spelled(name) not in apart_names()), kind)
                       for names, kind in table["parameters"].items())
    described = {lang: expanded(table[f"describe_{lang}"]) for lang in ("en", "ko")}
    asked = {lang: [text for pattern in table[lang] for text in expanded(pattern)] for lang in ("en", "ko")}
    return Action(tuple(table["verbs"].split()), parameters, described, asked)


class Ordinary:
    """A tool for an action on a thing, as it is called in one example.

    invented: whether its name and those of its parameters are invented words.
    """

    def __init__(self, draw: Draw, lang: str, thing: Thing, action: Action, invented: bool = False):
        self.thing, self.action, self.lang = thing, action, lang
        self.names = {names[0]: draw.word("en") if invented else draw.rng.choice(names)
                      for names, _ in action.parameters}
        if len(set(self.names.values())) < len(self.names):
            self.names = {names[0]: names[0] for names, _ in action.parameters}
        # An invented name stands for nothing: the description has to.
        self.is_described = invented or draw.rng.random() < DESCRIBED
        self.name = draw.name_with() if invented else self._name(draw)
        text = draw.rng.choice(action.described[lang] if draw.rng.random() < 0.6 else action.described["en"])
        side = "ko" if text in action.described["ko"] else "en"
        self.description = self._filled(text, {"t": thing.words[side][0]}, side)

    def _name(self, draw: Draw) -> str:
        """Verb and thing, as developers write them."""
        rng = draw.rng
        words = rng.choice(_names(self.thing, self.action, draw.held))
        name = _written(rng, " ".join(reversed(words)) if rng.random() < 0.2 else " ".join(words))
        draw.keep_if(name)
        return name

    def ask_for(self, draw: Draw) -> tuple[str, dict]:
        """A request for one call, and the call."""
        rng, values = draw.rng, {}
        for names, kind in self.action.parameters:
            values[names[0]] = draw_kind(draw, kind, self.lang)
        thing = rng.choice(self.thing.words[self.lang])
        asked = typed(draw, rng.choice(self.action.asked[self.lang]))
        request = self._filled(asked, values | {"t": thing}, self.lang)
        return request, {"name": self.name, "arguments": {self.names[name]: value for name, value in values.items()}}

    @property
    def can_be_asked_twice(self) -> bool:
        """Whether two values of its only parameter can stand in one request, "Rome and Oslo"."""
        return len(self.action.parameters) == 1 and self.action.parameters[0][1] in SHORT_KINDS

    def ask_twice(self, draw: Draw) -> tuple[str, list[dict]]:
        """A request for two calls that differ in the only parameter, and these."""
        (names, kind), = self.action.parameters
        one, two = draw_kind(draw, kind, self.lang), draw_kind(draw, kind, self.lang)
        both = f"{one} and {two}" if self.lang == "en" else f"{Ko(one):과} {two}"
        thing = draw.rng.choice(self.thing.words[self.lang])
        request = self._filled(draw.rng.choice(self.action.asked[self.lang]), {names[0]: both, "t": thing}, self.lang)
        calls = [{"name": self.name, "arguments": {self.names[names[0]]: value}} for value in (one, two)]
        return request, calls if one != two else calls[:1]

    def schema(self) -> dict:
        properties = {}
        for names, kind in self.action.parameters:
            name = self.names[names[0]]
            properties[name] = {"type": type_of(kind)} | ({} if name in names else {"description": names[0]})
        function = {"name": self.name} | ({"description": self.description} if self.is_described else {})
        return {"type": "function", "function": function | {
            "parameters": {"type": "object", "properties": properties, "required": list(properties)}}}

    def _filled(self, template: str, values: dict, lang: str) -> str:
        text = template.format_map({name: Ko(value) for name, value in values.items()})
        text = text[0].upper() + text[1:] if template.startswith("{t}") else text
        return with_an(text) if lang == "en" else text


@cache
def _names(thing: Thing, action: Action, held: bool) -> tuple:
    """(verb, stem) of every name on one side of the held-out rule."""
    every = [(verb, thing.stem) for verb in action.verbs]
    return tuple(words for words in every if is_held(" ".join(words)) == held)


def _written(rng, words: str) -> str:
    words, style = words.replace("_", " "), rng.random()
    if style < 0.6:
        return words.replace(" ", "_")
    if style < 0.85:
        return camel_case(words)
    return "".join(map(str.capitalize, words.split())) if style < 0.92 else words.replace(" ", "-")


def _pair(draw: Draw, things: tuple, actions: tuple) -> tuple[Thing, Action]:
    """A thing and an action that have a name."""
    while True:
        thing, action = draw.rng.choice(things), draw.rng.choice(actions)
        if _names(thing, action, draw.held):
            return thing, action


def several(draw: Draw, lang: str, n: int, invented: bool = False) -> list[Ordinary]:
    """n tools of different names; those after the first mostly have its thing or its action."""
    rng = draw.rng
    chosen = rng.choice(kinds())
    pairs = [_pair(draw, *chosen)]
    while len(pairs) < n:
        like, (thing, action) = rng.random(), pairs[0]
        things, actions = rng.choice(kinds()) if like > 0.7 else chosen
        pair = rng.choice(things), rng.choice(actions)
        if like < 0.35:
            pair = thing, pair[1]
        elif like < 0.7:
            pair = pair[0], action
        if pair not in pairs and _names(*pair, draw.held):
            pairs.append(pair)
        elif rng.random() < 0.1:  # a thing may have one action with a name alone
            n -= 1
    tools = {}
    for pair in pairs:
        tool = Ordinary(draw, lang, *pair, invented=invented)
        tools.setdefault(tool.name, tool)
    return list(tools.values())


def of_other_kinds(draw: Draw, lang: str, tools: list[Ordinary]) -> Ordinary:
    """A tool for what none of these is for: neither its thing nor its action is of their kinds."""
    taken = {action for tool in tools for _, actions in kinds() if tool.action in actions for action in actions}
    others = [kind for kind in kinds() if not taken & set(kind[1])]
    return Ordinary(draw, lang, *_pair(draw, *draw.rng.choice(others)))
