"""Grammars that answers must obey, in Lark's syntax as llguidance takes it.

A tag that is one token of the vocabulary is named by its id, <[6139]>: text that spells the same letters is not it.
Where a vocabulary has no such token, the tag is its letters.
"""

import collections
import functools
import itertools
import json
import math
import re
from dataclasses import dataclass

from llguidance import LLMatcher

from engine.constraints import JSON_STYLE
from engine.request import GRAMMAR_LETTERS, is_within
from engine.trials import TRIALS

from .strings import GrammarError, between_slashes, check_meetings, expressions_of, verbatim
from .tools import BY_SCHEMAS, DEFINITIONS, PARAMETER_END, Tool, XMLCall, choices, names_in, resolve, types_of

# Keywords that say nothing of a value. Two schemas that differ only in these have the same values.
ANNOTATIONS = "title", "description", "examples", "default"
LITERAL = "enum", "const", *ANNOTATIONS     # their values are no schemas
NAMED = "properties", "patternProperties", *DEFINITIONS     # their values are schemas by names, one maybe `default`

# Keywords about all arguments together, which a grammar of the XML form cannot enforce.
OF_ALL_ARGUMENTS = BY_SCHEMAS | {
    "patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas",
    "dependencies", "unevaluatedProperties", "enum", "const"}

MAX_SCHEMAS = 8 * GRAMMAR_LETTERS   # letters of schemas of arguments; the grammar is shorter where they share rules
PATTERN_COST = 10_000               # of a pattern, in such letters: each pattern is tried on its own
SAID = {            # what llguidance says in its own terms -> what that means
    "Regex is empty: .*": "no string fits it",
    "oneOf constraints are not supported.*": "oneOf, where a value may fit two of its schemas: they have to differ in "
                                             "their types, or in the values of something that they require"}
MAX_REASON = 250                    # letters of a refusal, which quotes the schema
GBNF_LETTERS = 1 << 16              # of a grammar in GBNF
GBNF_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
# Literals, classes and comments of GBNF to their ends, and an operator of repetition at the end of a group.
GBNF_LAST = re.compile(r'"(?:\\.|[^"\\])*"?|\[(?:\\.|[^]\\])*\]?|#[^\r\n]*|([*+?}])(?=\s*\))', re.DOTALL)
TOO_LONG = f"it takes a grammar of more than {GRAMMAR_LETTERS} letters"


@functools.lru_cache(maxsize=16)        # one request may bring megabytes of schemas
def checked_grammar(lark: str) -> str:
    """A grammar in Lark's syntax as Request.grammar takes it. Raises GrammarError where llguidance cannot use it."""
    if len(lark) > GRAMMAR_LETTERS:
        raise GrammarError(TOO_LONG)
    grammar = LLMatcher.grammar_from_lark(lark)
    reason, _ = TRIALS.verdict(grammar)
    if reason is not None:
        reason = reason.rpartition("failed to compile JSON schema: ")[2]
        for told, meant in SAID.items():
            reason = re.sub(told, meant, reason, flags=re.DOTALL)
        raise GrammarError(" ".join(re.split(r"\n +\d+ \|", reason)[0].split())[:MAX_REASON])
    return grammar


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\x7f")


# ---- what a text has to be ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """What the text of an answer has to be. kind: one of SHAPES. value: what the field of the request holds."""

    kind: str
    value: object
    field: str

    def lark(self) -> str:
        """The same as an expression in Lark's syntax. Raises GrammarError where it cannot be enforced."""
        return SHAPES[self.kind](self.value)


def json_value(schema: dict, strict: bool = True) -> str:
    """Lark for a JSON value that fits a schema. Where strict is false, keywords that cannot be enforced are overlooked.
    Raises GrammarError where strict is true and there are such keywords, or where too many patterns meet."""
    check_meetings(schema)
    if strict:
        check_counts(schema)
    try:
        options = {"x-guidance": JSON_STYLE | {"lenient": not strict}}
        return "%json " + json.dumps(discriminated(schema) | options, allow_nan=False)
    except ValueError:                  # 1e999, which json.loads took for infinity
        raise GrammarError("a number beyond all that computers take for finite") from None


def mapped(schema: dict, change) -> dict:
    """The schema with change(value) in the place of each value that is a schema or holds schemas."""
    def changed(keyword, value):
        if keyword in NAMED and isinstance(value, dict):
            return {name: change(inner) for name, inner in value.items()}
        return value if keyword in LITERAL else change(value)

    return {keyword: changed(keyword, value) for keyword, value in schema.items()}


def discriminated(schema):
    """The schema, in which every alternative of a oneOf requires the property that its discriminator names. OpenAPI
    demands that of whoever writes a discriminator, but pydantic does not require a property that has a default."""
    if isinstance(schema, list):
        return list(map(discriminated, schema))
    if not isinstance(schema, dict):
        return schema
    schema = mapped(schema, discriminated)
    discriminator, several = schema.get("discriminator"), schema.get("oneOf")
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    if isinstance(name, str) and isinstance(several, list) and all(isinstance(one, dict) for one in several):
        schema["oneOf"] = [one | {"required": [*names_in(one), name]} for one in several]
    return schema


def check_counts(schema: dict):
    """Raises GrammarError for minProperties where an object may have names that the schema does not list: llguidance
    allows such a name twice, and counts it twice."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            mapped(one, waiting.append)
            required = one["required"] if isinstance(one.get("required"), list) else []
            is_open = one.get("additionalProperties") is not False or one.get("patternProperties")
            if is_open and is_within(int, one.get("minProperties"), len(required) + 1, math.inf):
                raise GrammarError("minProperties, where an object may have names that the schema does not list")


def matching(expression: str) -> str:
    """Lark for a text that a regular expression fits as a whole."""
    return between_slashes(f"(?:{expression})")


def one_text(texts: list[str]) -> str:
    """Lark for one of these texts."""
    if not texts:
        raise GrammarError("there is no text to choose")
    return matching("|".join(map(verbatim, texts)))


def nested(lark: str) -> str:
    """Lark for a text that obeys a whole grammar with a `start` rule, whose names stay its own. The grammar begins in
    the line in which it is nested, so that errors name its lines as the client counts them."""
    return f"%lark {{ {lark}\n}}"


def from_gbnf(gbnf: str) -> str:
    """Lark for a text that obeys a grammar in GBNF, the syntax of llama.cpp."""
    if len(gbnf) > GBNF_LETTERS:
        raise GrammarError(f"a grammar in GBNF of more than {GBNF_LETTERS} letters")
    reason, lark = TRIALS.lark_of(GBNF_LAST.sub(kept_group, GBNF_ESCAPE.sub(plain_escape, gbnf)))
    if reason is not None:
        raise GrammarError(" ".join(reason.split())[:MAX_REASON])
    return nested(lark)


def plain_escape(escape: re.Match) -> str:
    r"""An escape of GBNF as the converter and llguidance's Lark take it: they know no \u, and \x only in ASCII."""
    if escape.lastindex is None:        # of a letter, as \n
        return escape[0]
    code = int(escape[escape.lastindex], 16)
    if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        raise GrammarError(f"{escape[0]} is no character")
    return chr(code) if code >= 0x80 else f"\\x{code:02x}"


def kept_group(found: re.Match) -> str:
    """What GBNF_LAST finds, with an empty text behind an operator at the end of a group: the converter drops the
    parentheses of a group that is one repetition, and llguidance takes no operator behind another one."""
    return found[0] + (' ""' if found[1] else "")


# Kinds of shapes -> Lark of their values: a JSON schema, a regular expression of the whole text, a list of texts, a
# grammar in GBNF, a grammar in Lark's syntax as llguidance has it.
SHAPES = {"json": json_value, "regex": matching, "choice": one_text, "gbnf": from_gbnf, "lark": nested}


def at_least(n: int, ends: set[int]) -> str:
    """A grammar of any tokens, in which the tokens `ends` cannot come before n others."""
    other = f"<[^{','.join(map(str, sorted(ends)))}]>"
    return checked_grammar(f"start: {other}{{{n}}} {other}*")


# ---- rules -------------------------------------------------------------------------------------------------


class Rules:
    """What an answer must obey, as arguments of Request; {} where no rule is possible.

    tags: token ids of the model's tags, by name. opening: how the answer begins, see `reply.opening_of`.
    """

    def __init__(self, tags: dict[str, int], opening: str):
        self.tags, self.opening = tags, opening

    def text(self, shape: Shape) -> dict:
        """A text of this shape."""
        return self._after_thoughts(shape.lark(), [])

    def calls(self, form, tools: list[Tool], must: bool, several: bool, shape: Shape | None = None) -> dict:
        """Well-formed calls of these tools. must: the answer is one or more calls and nothing else. Otherwise it may be
        a text of the shape instead, or (shape None) any text may precede the calls."""
        write = xml_call if form is XMLCall else json_call
        names = [f"call_{i}" for i in range(len(tools))]
        values = Values()
        for tool in tools:
            check_arguments(tool)
        rules = [write(name, tool, values, self._tag("</tool_call>")) for name, tool in zip(names, tools)]
        again = f'("\\n" {self._tag("<tool_call>")} call)*' if several else ""
        rules = [f"call: {' | '.join(names)}", *rules, *values.rules()]
        calls = f"{self._tag('<tool_call>')} call {again}"
        if must or shape is not None:
            return self._after_thoughts(calls if must else f"({shape.lark()} | {calls})", rules)
        if "<tool_call>" not in self.tags:          # no token marks where the grammar begins
            return {}
        return {"grammar": checked_grammar("\n".join([f"start: call {again}", *rules])),
                "grammar_after": self.tags["<tool_call>"]}

    def _after_thoughts(self, answer: str, rules: list[str]) -> dict:
        """The rules for an answer that follows the thoughts, if the model thinks."""
        end, before, after = self._tag("</think>"), "", None
        if self.opening == "thought" and "</think>" in self.tags:
            before, after = '"\\n\\n"', self.tags["</think>"]
        elif self.opening == "thought":
            before, rules = 'thoughts "\\n\\n"', [*rules, r"thoughts[lazy]: /(?s:.*)<\/think>/"]
        elif self.opening == "either" and "</think>" in self.tags:
            before = f'({self._tag("<think>")} /(?s:.*)/ {end} "\\n\\n")?'
        grammar = checked_grammar("\n".join([f"start: {before} {answer}", *rules]))
        return {"grammar": grammar, "grammar_after": after}

    def _tag(self, name: str) -> str:
        return f"<[{self.tags[name]}]>" if name in self.tags else literal(name)


# ---- calls, from behind <tool_call> on ---------------------------------------------------------------------


class Values:
    """Rules for values. Equal values share one rule, because a long grammar takes long to prepare."""

    def __init__(self):
        self.names = {}                 # text of a rule -> its name
        self.size = 0                   # letters of the schemas so far; definitions count wherever they are used

    def name(self, lark: str, how: str = "") -> str:
        return self.names.setdefault(f"{how}: {lark}", f"value_{len(self.names)}")

    def text(self, options) -> str:
        """A text and the tag behind it. options: lists of regular expressions; the text fits all those of one list."""
        fitting = [" & ".join(between_slashes(f"(?:{one})\n{PARAMETER_END}\n") for one in option or ["(?s:.*)"])
                   for option in options]
        end_within = between_slashes(f"(?s:.*){PARAMETER_END}(?s:.*){PARAMETER_END}\n")
        return self.name(f"({' | '.join(f'({one})' for one in fitting)}) & ~{end_within}", "[lazy]")

    def other_tag(self, names) -> str:
        """The tag of an argument that has none of these names."""
        taken = "|".join(map(verbatim, names))
        tag, other = (between_slashes(f"<parameter={name}>\n") for name in ("[^<>\n]+", f"(?:{taken})"))
        return self.name(f"{tag} & ~{other}" if taken else tag, "[lazy]")

    def charge(self, size: int):
        """Adds so many letters of schemas. Raises GrammarError when all together are too many."""
        self.size += size
        if self.size > MAX_SCHEMAS:
            raise GrammarError(TOO_LONG)

    def rules(self) -> list[str]:
        return [name + what for what, name in self.names.items()]


def json_call(name: str, tool: Tool, values: Values, end: str) -> str:
    """The rule of this name for a call in the JSON form."""
    head = f'\n{{"name": {json.dumps(tool.name)}, "arguments": '
    arguments = values.name(json_value(closed(tool), tool.strict))
    return f'{name}: {literal(head)} {arguments} "}}\\n" {end}'


def xml_call(name: str, tool: Tool, values: Values, end: str) -> str:
    """The rule for a call in the XML form: arguments in the order of the schema, then those that the schema does not
    name."""
    if tool.strict and (unseen := sorted(OF_ALL_ARGUMENTS & tool.schema.keys())):
        raise GrammarError(f"{unseen[0]} of the arguments of {tool.name!r}")
    rule = f"{name}: " + literal(f"\n<function={tool.name}>\n")
    for key in tool.properties:
        tag, often = literal(f"<parameter={key}>\n"), "" if key in tool.required else "?"
        rule += f" ({tag} {_xml_value(tool, key, values)}){often}"
    if tool.others is not None:
        rule += f" ({values.other_tag(tool.properties)} {_xml_value(tool, None, values)})*"
    return f'{rule} "</function>\\n" {end}'


def check_arguments(tool: Tool):
    """Raises GrammarError where no arguments can fit the parameters of a tool."""
    if "object" not in types_of(tool.parameters):
        raise GrammarError(f"type: the parameters of {tool.name!r} are no object")
    if unlisted := set(tool.required) - tool.properties.keys():
        raise GrammarError(f"required: {min(unlisted)[:80]!r} is no argument of {tool.name!r}")


def _xml_value(tool: Tool, key: str | None, values: Values) -> str:
    """Lark for a value and the tag behind it: strings as they are, all else as JSON. key: None for an argument that the
    schema does not name.

    Where a string has to fit something, one regular expression covers the string and everything that may stand in its
    place, because a lexer cannot tell from the first letters which of them it reads. Where one of the others has no
    regular expression, the string may be any text, and a strict tool is refused."""
    schema = tool.schema_of(key)
    values.charge(len(json.dumps(schema)))
    known, texts, others, spelt = {}, [], [], []
    for one in alternatives(schema):
        types = types_of(one, schema, known)
        if "string" in types and not choices(one):
            values.charge(PATTERN_COST if "pattern" in one else 0)
            texts.append(expressions_of(one, tool.strict))
            if not (types := types - {"string"}):
                continue
            one = one | {"type": sorted(types)}
        others.append(one)
        spelt.append(spelling_of(one, types))
    if texts and all(texts) and None in spelt:
        if tool.strict:
            raise GrammarError("limits of a string that may be something else, too, in the argument "
                               f"{(key or 'of any name')[:80]!r}")
        texts.append([])
    if texts:
        return values.text([*texts, *([one] for one in spelt if one)]) if all(texts) else values.text([[]])
    shared, end = {name: schema[name] for name in DEFINITIONS if name in schema}, literal(f"\n{PARAMETER_END}\n")
    rules = [values.text([[spelling]]) if choices(one) else
             f"{values.name(json_value(shared | one, tool.strict))} {end}"
             for one, spelling in zip(others, spelt)]
    return f"({' | '.join(dict.fromkeys(rules))})"


def alternatives(root: dict):
    """The schemas of which a value has to fit one, each once and without ANNOTATIONS and DEFINITIONS."""
    seen, waiting = set(), [root]
    while waiting:
        schema = {name: one for name, one in waiting.pop().items() if name not in ANNOTATIONS + DEFINITIONS}
        reference, types = schema.get("$ref"), schema.get("type")
        if schema.keys() == {"$ref"} and isinstance(reference, str):
            target = resolve(reference, root)
            if not isinstance(target, dict):
                yield schema
            elif reference not in seen:
                waiting.append(target)
            seen.add(reference)
        elif several := separate(schema, root):
            waiting += reversed(several)
        elif isinstance(types, list) and types:
            yield from (schema | {"type": one} for one in types)
        else:
            yield schema


def separate(schema: dict, root: dict) -> list[dict]:
    """The alternatives of a schema that is nothing but an anyOf or a oneOf; [] for any other schema.

    The alternatives of a oneOf are separate only where their types or listed values make sure that no value fits two of
    them. Alternatives that share a type stay together as one smaller oneOf."""
    [key] = schema.keys() if len(schema) == 1 else [None]
    several = schema[key] if key in ("anyOf", "oneOf") else None
    if not isinstance(several, list) or set(map(type, several)) != {dict}:
        return []
    values = [value for one in several for value in choices(one) or [[]]]       # []: one that lists no values
    is_apart = all(isinstance(value, str | int | None) for value in values) and len(set(values)) == len(values)
    if key == "anyOf" or is_apart:
        return several
    kinds = [{"number" if kind == "integer" else kind for kind in types_of(one, root)} for one in several]
    often = collections.Counter(itertools.chain(*kinds))
    alone = [one for one, each in zip(several, kinds) if all(often[kind] == 1 for kind in each)]
    together = [one for one, each in zip(several, kinds) if any(often[kind] > 1 for kind in each)]
    return [*alone, *([{"oneOf": together}] if together else [])] if alone else []


# Regular expressions for JSON of these types.
SPELLINGS = {"null": "null", "boolean": "true|false", "integer": "-?(?:0|[1-9][0-9]*)",
             "number": r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"}
LIMITS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}


def spelling_of(schema: dict, types) -> str | None:
    """A regular expression of the values of these types that fit a schema, strings without quotes; None where no simple
    one exists."""
    if listed := choices(schema):
        if any(isinstance(value, str) and PARAMETER_END in value for value in listed):
            raise GrammarError(f"a value of enum or const holds {PARAMETER_END}, where the model's form ends it")
        return "|".join(verbatim(value if isinstance(value, str) else json.dumps(value)) for value in listed)
    is_simple = types and types <= SPELLINGS.keys() and not (LIMITS | BY_SCHEMAS) & schema.keys()
    return "|".join(SPELLINGS[one] for one in sorted(types)) if is_simple else None


def closed(tool: Tool) -> dict:
    """The schema of the arguments of a tool. Arguments that it does not name are excluded, unless it allows them."""
    is_open = bool(BY_SCHEMAS & tool.schema.keys())
    return {"type": "object", "additionalProperties": is_open} | tool.schema | {
        "properties": tool.properties, "required": tool.required}
