"""Grammars that answers must obey, in Lark's syntax as llguidance takes it.

A tag that is one token of the vocabulary is named by its id, <[6139]>: text that spells the same letters is not it.
Where a vocabulary has no such token, the tag is its letters.
"""

import functools
import json

from llguidance import LLMatcher

from .tools import Tool, XMLCall, choices, types_of

# The separators that models write (json.dumps), with and without the blank. Free white space would let small models
# write nothing else, and every character of it is one that the grammar could have forced.
STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class GrammarError(Exception):
    """A schema that cannot be enforced. The text names the keyword."""


@functools.lru_cache(maxsize=256)
def compile_grammar(lark: str) -> str:
    """What Request.grammar takes. GrammarError: llguidance cannot use it."""
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
        rules = [write(name, tool, self._tag("</tool_call>")) for name, tool in zip(names, tools)]
        again = f'("\\n" {self._tag("<tool_call>")} call)*' if several else ""
        rules = [f"call: {' | '.join(names)}", *rules, TEXT_VALUE]
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

TEXT_VALUE = r"text[lazy]: /(?s:.*)\n<\/parameter>\n/"


def json_call(name: str, tool: Tool, end: str) -> str:
    """The rule of this name for a call in the JSON form."""
    head = f'\n{{"name": {json.dumps(tool.name)}, "arguments": '
    return f'{name}: {literal(head)} {json_value(_closed(tool.parameters), tool.strict)} "}}\\n" {end}'


def xml_call(name: str, tool: Tool, end: str) -> str:
    """The rules for a call in the XML form, its arguments in the order of the schema."""
    parameters = _closed(tool.parameters)
    required = parameters.get("required", [])
    rules = {f"{name}_{i}": key for i, key in enumerate(parameters["properties"])}
    arguments = " ".join(rule if key in required else rule + "?" for rule, key in rules.items())
    head, tail = literal(f"\n<function={tool.name}>\n"), literal("</function>\n")
    return "\n".join([f"{name}: {head} {arguments} {tail} {end}"] + [
        f"{rule}: " + literal(f"<parameter={key}>\n") + _xml_value(tool, key) for rule, key in rules.items()])


def _xml_value(tool: Tool, key: str) -> str:
    """Lark for a value and the tag behind it. What may be a string may be any text, unless it is one of a few."""
    schema, end = tool.schema_of(key), literal("\n</parameter>\n")
    strings = choices(schema)
    if strings and all(isinstance(value, str) for value in strings):
        return f" ({' | '.join(map(literal, strings))}) {end}"
    return " text" if "string" in types_of(schema) else f" {json_value(schema, tool.strict)} {end}"


def _closed(parameters: dict) -> dict:
    """The parameters without what the schema does not name, unless it says that there may be more."""
    if not isinstance(parameters.get("properties"), dict):
        parameters = parameters | {"properties": {}}
    return {"type": "object", "additionalProperties": False} | parameters
