"""Grammars that answers must obey, in Lark's syntax as llguidance takes it.

A tag that is one token of the vocabulary is named by its id, <[6139]>: text that spells the same letters is not it.
Where a vocabulary has no such token, the tag is its letters.
"""

import functools
import json

from llguidance import LLMatcher

from .strings import GrammarError, between_slashes, expressions_of
from .tools import DEFINITIONS, PARAMETER_END, Tool, XMLCall, choices, resolve, types_of

# The separators that models write (json.dumps), with and without the blank. Free white space would let small models
# write nothing else, and every character of it is one that the grammar could have forced.
STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


# What says nothing of a value, and would make two values of one kind differ.
ANNOTATIONS = {"title", "description", "examples", "default"}


MAX_GRAMMAR = 1 << 18       # letters; a second's work
MAX_SCHEMAS = 8 * MAX_GRAMMAR       # letters of schemas of arguments, of which many may have one rule
TOO_LONG = f"it takes a grammar of more than {MAX_GRAMMAR} letters"


@functools.lru_cache(maxsize=16)        # one request may bring megabytes of schemas
def compile_grammar(lark: str) -> str:
    """What Request.grammar takes. GrammarError: llguidance cannot use it."""
    if len(lark) > MAX_GRAMMAR:
        raise GrammarError(TOO_LONG)
    grammar = LLMatcher.grammar_from_lark(lark)
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if failed:
        reason = messages[0].rpartition("failed to compile JSON schema: ")[2]
        raise GrammarError(" ".join(reason.partition("\n   1 |")[0].split()))
    return grammar


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_value(schema: dict, strict: bool = True) -> str:
    """Lark for a JSON value that fits a schema. Not strict: keywords that cannot be enforced are overlooked."""
    return "%json " + json.dumps(schema | {"x-guidance": STYLE | {"lenient": not strict}})


class Rules:
    """What an answer must obey, as arguments of Request: {} where nothing can be asked of it.

    tags: ids of the model's tags, by name. opening: how the answer begins, see reply.py.
    """

    def __init__(self, tags: dict[str, int], opening: str):
        self.tags, self.opening = tags, opening

    def value(self, schema: dict) -> dict:
        """One JSON value that fits a schema."""
        return self._after_thoughts(json_value(schema), [])

    def calls(self, form, tools: list[Tool], must: bool, several: bool, schema: dict | None = None) -> dict:
        """Well-formed calls of these tools. must: nothing else is an answer; otherwise there may be a JSON value that
        fits the schema instead, or where there is no schema any text before them."""
        write = xml_call if form is XMLCall else json_call
        names = [f"call_{i}" for i in range(len(tools))]
        values = Values()
        rules = [write(name, tool, values, self._tag("</tool_call>")) for name, tool in zip(names, tools)]
        again = f'("\\n" {self._tag("<tool_call>")} call)*' if several else ""
        rules = [f"call: {' | '.join(names)}", *rules, *values.rules()]
        calls = f"{self._tag('<tool_call>')} call {again}"
        if must or schema is not None:
            return self._after_thoughts(calls if must else f"({json_value(schema)} | {calls})", rules)
        if "<tool_call>" not in self.tags:          # nobody could say where the grammar begins
            return {}
        return {"grammar": compile_grammar("\n".join([f"start: call {again}", *rules])),
                "grammar_after": self.tags["<tool_call>"]}

    def _after_thoughts(self, answer: str, rules: list[str]) -> dict:
        """The rules for an answer that follows the thoughts, where there are any."""
        end, before, after = self._tag("</think>"), "", None
        if self.opening == "thought" and "</think>" in self.tags:
            before, after = '"\\n\\n"', self.tags["</think>"]
        elif self.opening == "thought":
            before, rules = 'thoughts "\\n\\n"', [*rules, r"thoughts[lazy]: /(?s:.*)<\/think>/"]
        elif self.opening == "either" and "</think>" in self.tags:
            before = f'({self._tag("<think>")} /(?s:.*)/ {end} "\\n\\n")?'
        grammar = compile_grammar("\n".join([f"start: {before} {answer}", *rules]))
        return {"grammar": grammar, "grammar_after": after}

    def _tag(self, name: str) -> str:
        return f"<[{self.tags[name]}]>" if name in self.tags else literal(name)


# ---- calls, from behind <tool_call> on ---------------------------------------------------------------------


class Values:
    """Rules for values, each written once: arguments are of few kinds, and a long grammar takes long to prepare."""

    def __init__(self):
        self.names = {}                 # of the rules, by what they say
        self.size = 0                   # of the schemas that went into them

    def name(self, lark: str, how: str = "") -> str:
        return self.names.setdefault(f"{how}: {lark}", f"value_{len(self.names)}")

    def text(self, expressions=()) -> str:
        """Any text that fits all of these regular expressions, and the tag behind it."""
        fit = [between_slashes(f"(?:{one})\n{PARAMETER_END}\n") for one in expressions or ["(?s:.*)"]]
        end_within = between_slashes(f"(?s:.*){PARAMETER_END}(?s:.*){PARAMETER_END}\n")
        return self.name(" & ".join([*fit, f"~{end_within}"]), "[lazy]")

    def charge(self, schema: dict):
        """Takes note of a schema; GrammarError when all of them are too much. Definitions count wherever they are used."""
        self.size += len(json.dumps(schema))
        if self.size > MAX_SCHEMAS:
            raise GrammarError(TOO_LONG)

    def rules(self) -> list[str]:
        return [name + what for what, name in self.names.items()]


def json_call(name: str, tool: Tool, values: Values, end: str) -> str:
    """The rule of this name for a call in the JSON form."""
    head = f'\n{{"name": {json.dumps(tool.name)}, "arguments": '
    arguments = values.name(json_value(_closed(tool.parameters), tool.strict))
    return f'{name}: {literal(head)} {arguments} "}}\\n" {end}'


def xml_call(name: str, tool: Tool, values: Values, end: str) -> str:
    """The rule for a call in the XML form, its arguments in the order of the schema."""
    parameters = _closed(tool.parameters)
    rule = f"{name}: " + literal(f"\n<function={tool.name}>\n")
    for key in parameters["properties"]:
        tag, often = literal(f"<parameter={key}>\n"), "" if key in parameters["required"] else "?"
        rule += f" ({tag} {_xml_value(tool, key, values)}){often}"
    return f'{rule} "</function>\\n" {end}'


def _xml_value(tool: Tool, key: str, values: Values) -> str:
    """Lark for a value and the tag behind it."""
    schema = tool.schema_of(key)
    values.charge(schema)
    shared = {name: schema[name] for name in DEFINITIONS if name in schema}
    rules = {}                          # each once, in their order
    for one in alternatives(schema, schema):
        rules |= dict.fromkeys(_value_rules(one, shared, tool.strict, values))
    return values.text() if values.text() in rules else f"({' | '.join(rules)})"


def alternatives(schema: dict, root: dict, seen=frozenset()):
    """The schemas of which a value has to fit one, without what says nothing of it."""
    schema = {name: one for name, one in schema.items() if name not in ANNOTATIONS and name not in DEFINITIONS}
    reference, several, types = schema.get("$ref"), schema.get("anyOf"), schema.get("type")
    if schema.keys() == {"$ref"} and isinstance(reference, str) and reference not in seen:
        target = resolve(reference, root)
        yield from alternatives(target, root, seen | {reference}) if isinstance(target, dict) else [schema]
    elif schema.keys() == {"anyOf"} and isinstance(several, list) and several and all(isinstance(one, dict) for one in several):
        for one in several:
            yield from alternatives(one, root, seen)
    elif isinstance(types, list) and types:
        yield from (schema | {"type": one} for one in types)
    else:
        yield schema


def _value_rules(schema: dict, shared: dict, strict: bool, values: Values):
    """Lark for values that fit a schema, strings as they are and all else as JSON, each with the tag behind it."""
    end, listed = literal("\n</parameter>\n"), choices(schema)
    if listed and any(isinstance(value, str) for value in listed):
        yield from (f"{literal(value)} {end}" for value in listed if isinstance(value, str))
        listed = [value for value in listed if not isinstance(value, str)]
        schema = {"enum": listed}
    types = types_of(schema, shared | schema)
    if types == {"string"} and not listed:
        yield values.text(expressions_of(schema, strict))
    elif "string" in types and not listed:
        yield values.text()
    elif "enum" not in schema or listed:
        yield f"{values.name(json_value(shared | schema, strict))} {end}"


def _closed(parameters: dict) -> dict:
    """The parameters without what the schema does not name, unless it says that there may be more."""
    sound = {name: parameters[name] for name, kind in (("properties", dict), ("required", list))
             if isinstance(parameters.get(name), kind)}
    return {"type": "object", "additionalProperties": False} | parameters | {"properties": {}, "required": []} | sound
