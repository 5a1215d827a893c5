"""Calls of tools in the two forms that the model family writes, read as they come.

    XML form   <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>
    JSON form  <tool_call>\\n{"name": "NAME", "arguments": {...}}\\n</tool_call>

The XML form (Qwen3-Coder, Qwen3.5) writes a string as it is and everything else as JSON, so that only the tool's schema
tells "5" from 5. What a schema does not admit stays a string: a call is never lost for its values.
"""

import functools
import json
import re
from dataclasses import dataclass, field

from engine.reply import NotACall, overlap

MAX_DEPTH = 200             # of schemas that are followed to learn what one value may be
EVERY_TYPE = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


@dataclass(frozen=True)
class Tool:
    """A tool that a request offers. parameters: the JSON schema of an object as the client wrote it, so it may hold
    anything. strict: no keyword of it may be overlooked."""

    name: str
    parameters: dict = field(default_factory=dict)
    strict: bool = False

    @functools.cached_property
    def schema(self) -> dict:
        """The parameters, with `$ref` and `allOf` at their root written out."""
        return written_out(self.parameters)

    @functools.cached_property
    def required(self) -> list[str]:
        """The names of arguments that each call has."""
        return names_in(self.schema)

    @functools.cached_property
    def properties(self) -> dict:
        """The schemas of the arguments that are listed or required, by the names of the arguments."""
        listed = self.schema.get("properties")
        listed = listed if isinstance(listed, dict) else {}
        is_open = self.others is not None or "additionalProperties" not in self.schema
        return listed | {key: self.others or {} for key in self.required if is_open and key not in listed}

    @property
    def others(self) -> dict | None:
        """The schema of every argument that is not listed; None where no such argument is allowed. None are allowed
        unless the parameters say so, or describe their arguments by schemas within them."""
        schemas = BY_SCHEMAS | {"patternProperties"}
        others = {} if schemas & self.schema.keys() else self.schema.get("additionalProperties", False)
        return others if isinstance(others, dict) else {} if others else None

    def schema_of(self, key: str | None) -> dict:
        """The schema of one argument, or (None) of those not listed, with its definitions; {} where there is none."""
        schema = self.properties.get(key, self.others)
        return definitions_for(schema, self.parameters) | schema if isinstance(schema, dict) else {}


# ---- values by their schema ------------------------------------------------------------------------------

DEFINITIONS = "$defs", "definitions"
BY_SCHEMAS = {"allOf", "oneOf", "not", "if", "anyOf", "$ref"}       # keywords that say by other schemas what may be
SILENT = {"title", "description", "examples", "default", "$schema", "$id", "$comment", *DEFINITIONS}


def written_out(root: dict) -> dict:
    """A schema of objects in which $ref and allOf at the root are replaced by what they refer to. The schema comes back
    as it is where these hold more than properties and required names, because merging would then lose something."""
    waiting, seen, parts = [root], {id(root)}, []
    for schema in waiting:              # `waiting` grows meanwhile
        more = schema.get("allOf", [])
        more = [*more, resolve(schema["$ref"], root)] if isinstance(schema.get("$ref"), str) else more
        if not isinstance(more, list) or not all(isinstance(one, dict) for one in more):
            return root
        waiting += [one for one in {id(one): one for one in more}.values() if id(one) not in seen]
        seen |= set(map(id, more))      # a schema that is referred to twice counts once
        parts.append({key: value for key, value in schema.items() if key not in SILENT | {"$ref", "allOf"}})
    parts = list(filter(None, parts))
    is_plain = all(part.keys() <= {"type", "properties", "required"} for part in parts) or len(parts) == 1
    if not is_plain or not all(isinstance(part.get("properties", {}), dict) for part in parts):
        return root
    return {key: root[key] for key in DEFINITIONS if key in root} | functools.reduce(both, parts, {})


def both(one: dict, other: dict) -> dict:
    """One schema that says what two schemas say. Both may have only properties, required names and a type."""
    known, new = one.get("properties", {}), other.get("properties", {})
    shared = {key: {"allOf": [known[key], new[key]]} for key in known.keys() & new.keys() if known[key] != new[key]}
    return one | other | {"properties": known | new | shared, "required": names_in(one) + names_in(other)}


def names_in(schema: dict) -> list[str]:
    """The names that a schema says are required, each once."""
    names = schema.get("required")
    return list(dict.fromkeys(one for one in names if isinstance(one, str))) if isinstance(names, list) else []


def definitions_for(schema: dict, root: dict) -> dict:
    """The definitions in `root` that a schema refers to, directly or through other definitions."""
    found, waiting = {}, [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            waiting += one.values()
            place, name = definition_named(one.get("$ref"))
            there = root.get(place)
            if isinstance(there, dict) and name in there and name not in found.setdefault(place, {}):
                found[place][name] = there[name]
                waiting.append(there[name])
    return found


def definition_named(reference) -> tuple:
    """("$defs", "a") for "#/$defs/a" and for references into that; (None, None) for any other reference."""
    steps = reference.split("/") if isinstance(reference, str) else []
    is_one = len(steps) > 2 and steps[0] == "#" and steps[1] in DEFINITIONS
    return (steps[1], unescaped(steps[2])) if is_one else (None, None)


def unescaped(step: str) -> str:
    """A step of a JSON pointer."""
    return step.replace("~1", "/").replace("~0", "~")


def types_of(schema, root: dict | None = None, known: dict | None = None, depth: int = 0) -> frozenset:
    """The JSON types that a schema admits; where it says "number", it also admits "integer".

    root: the schema that references point into. known: the types that the references seen so far admit; every type for
    a reference whose types are still being found. depth: how many schemas were followed to this one.
    """
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return EVERY_TYPE
    root, known, types = schema if root is None else root, {} if known is None else known, EVERY_TYPE
    if "type" in schema:
        said = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        types &= {one for one in [*said, *(["integer"] if "number" in said else [])] if isinstance(one, str)}
    if values := choices(schema):
        types &= set(map(type_of, values))
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in known:
            known[reference] = EVERY_TYPE
            known[reference] = types_of(resolve(reference, root), root, known, depth + 1)
        types &= known[reference]
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            types &= frozenset().union(*(types_of(one, root, known, depth + 1) for one in schema[key]))
    if isinstance(schema.get("allOf"), list):
        types = types.intersection(*(types_of(one, root, known, depth + 1) for one in schema["allOf"]))
    return frozenset(types)


def resolve(reference: str, root: dict):
    """The schema that "#/$defs/name" points at, None where it is not in `root`."""
    at = root
    for name in map(unescaped, reference.removeprefix("#").strip("/").split("/")):
        at = at.get(name) if isinstance(at, dict) and name else at
    return at


def choices(schema: dict) -> list:
    """The values of `enum` or `const`, where a schema has one."""
    if isinstance(schema.get("enum"), list):
        return schema["enum"]
    return [schema["const"]] if "const" in schema else []


def type_of(value) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {type(None): "null", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def read_value(text: str, schema: dict):
    """The value that a text stands for: the one that the schema admits, or the text itself where it admits none."""
    for value in choices(schema):
        if text == (value if isinstance(value, str) else json.dumps(value)):
            return value
    python = {"True": True, "False": False, "None": None}          # models trained on Python write these
    try:
        value = python[text] if text in python else json.loads(text, parse_constant=float)
    except (ValueError, RecursionError):
        return text
    types = types_of(schema)
    if type(value) is float and value.is_integer() and "number" not in types:
        value = int(value)                                         # JSON Schema: 5.0 is an integer, too
    finite = type(value) is not float or abs(value) < float("inf")
    return value if type_of(value) in types - {"string"} and finite else text


# ---- the two forms -----------------------------------------------------------------------------------------


def form_of(template: str):
    """The class that reads the calls of a model with this chat template; None where the template knows no tools."""
    if "<function=" in template:
        return XMLCall
    return JSONCall if "<tool_call>" in template else None


class XMLCall:
    """A call in the XML form, from the text between <tool_call> and </tool_call> as it comes.

    name: the tool's, None until it is certain. arguments: the JSON text of the arguments so far. ruled: whether a
    grammar makes sure that arguments fit their schemas, so that lists and objects may be passed on before they end.
    """

    @staticmethod
    def can_write(key: str) -> bool:
        """Whether an argument may have this name."""
        return bool(key) and not set("<>\n") & set(key)

    def __init__(self, tools: dict[str, Tool], ruled: bool = False):
        self.tools, self.ruled, self.name, self.arguments = tools, ruled, None, ""
        self._tool, self._text, self._read = None, "", self._read_head
        self._keys, self._schema = set(), {}

    def push(self, text: str) -> str:
        """What another piece of text adds to the arguments. Raises NotACall where the text is no call."""
        self._text += text
        before = len(self.arguments)
        while (piece := self._read()) is not None:
            self.arguments += piece
        return self.arguments[before:]

    def close(self) -> str:
        """All the arguments, at the end of the call. Raises NotACall where the call is not whole."""
        if self._read != self._read_tail:
            raise NotACall
        return self.arguments

    # Each _read function takes one thing off the text and returns what it adds to the arguments, or None where it needs
    # more text.

    def _read_head(self):
        name = self._take_tag("<function=")
        if name is None:
            return None
        self.name, self._tool = name, self.tools.get(name, Tool(name))
        self._read = self._read_between
        return "{"

    def _read_between(self):
        end = "</function>"
        text = self._text.lstrip()
        if text.startswith(end):
            self._text, self._read = text.removeprefix(end), self._read_tail
            return "}"
        if end.startswith(text):
            return None
        key = self._take_tag("<parameter=")
        if key is None:
            return None
        is_free = self._tool.others is not None and key not in self._tool.properties
        if key in self._keys and not is_free:       # a grammar cannot forbid that a name not listed comes twice
            raise NotACall
        comma = ", " if self._keys else ""
        self._keys.add(key)
        self._schema = self._tool.schema_of(key)
        self._read = self._read_value_start
        return f"{comma}{json.dumps(key, ensure_ascii=False)}: "

    def _read_value_start(self):
        if not self._text:
            return None
        self._text = self._text.removeprefix("\n")
        types = types_of(self._schema)
        if types == {"string"}:
            self._read = self._read_string
            return '"'
        is_json = self.ruled and types and types <= {"array", "object"}
        self._read = self._read_json if is_json else self._read_other
        return ""

    def _read_string(self):
        return self._pass_on(_escaped, '"')

    def _read_json(self):
        return self._pass_on(str, "")

    def _pass_on(self, written, closing: str):
        """Passes the letters of a value on at once, except letters that may belong to the tag at its end.
        written(text): how they stand in the arguments."""
        text, end, rest = self._text.partition(PARAMETER_END)
        if end:
            self._text, self._read = rest, self._read_between
            return written(text.removesuffix("\n")) + closing
        held = max(overlap(text, PARAMETER_END), overlap(text, "\n" + PARAMETER_END))
        self._text = text[len(text) - held:]
        return written(text[:len(text) - held]) or None

    def _read_other(self):
        text, end, rest = self._text.partition(PARAMETER_END)
        if not end:
            return None
        self._text, self._read = rest, self._read_between
        return json.dumps(read_value(text.removesuffix("\n"), self._schema), ensure_ascii=False)

    def _read_tail(self):
        if self._text.strip():
            raise NotACall
        return None

    def _take_tag(self, opening: str) -> str | None:
        """Takes a tag such as <function=NAME> off the start of the text; returns NAME, or None: more text is needed."""
        text = self._text.lstrip()
        if not text.startswith(opening[:len(text)]):
            raise NotACall
        name, end, rest = text[len(opening):].partition(">")
        if "\n" in name or "<" in name or (end and not name):
            raise NotACall
        if not end:
            return None
        self._text = rest
        return name


PARAMETER_END = "</parameter>"      # the first one ends a value, so no value can hold it


def _escaped(text: str) -> str:
    """Text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class JSONCall:
    """A call in the JSON form; otherwise like XMLCall. It passes on all letters of arguments, ruled or not."""

    @staticmethod
    def can_write(key: str) -> bool:
        return True

    HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"arguments"\s*:\s*(?=\{)')

    def __init__(self, tools: dict[str, Tool], ruled: bool = False):
        self.tools, self.name, self.arguments = tools, None, ""
        self._text, self._at = "", 0                # the whole text, and how many letters of it are read
        self._depth, self._in_string, self._escape = 0, False, False

    def push(self, text: str) -> str:
        self._text += text
        if self.name is None:
            if not self._text.lstrip().startswith("{") and self._text.strip():
                raise NotACall
            head = self.HEAD.match(self._text)
            if head is None:                        # incomplete, or in an order that only close() can read
                return ""
            self.name, self._at = _loads(head[1]), head.end()
        if self.arguments and self._depth == 0:     # the arguments are whole
            return ""
        start = self._at
        for char in self._text[start:]:
            self._at += 1
            self._step(char)
            if self._depth == 0:
                break
        piece = self._text[start:self._at]
        self.arguments += piece
        return piece

    def _step(self, char: str):
        """Follows how deep the next letter of JSON is nested."""
        if self._in_string:
            self._in_string = self._escape or char != '"'
            self._escape = char == "\\" and not self._escape
        elif char == '"':
            self._in_string = True
        else:
            self._depth += (char in "{[") - (char in "}]")

    def close(self) -> str:
        call = _loads(self._text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise NotACall
        arguments = call.get("arguments", {})
        arguments = _loads(arguments) if isinstance(arguments, str) else arguments
        if not call["name"] or not isinstance(arguments, dict) or call.keys() - {"name", "arguments"}:
            raise NotACall
        self.name = call["name"]
        tool = self.tools.get(self.name, Tool(self.name))
        self.arguments = json.dumps({key: _mended(value, tool.schema_of(key)) for key, value in arguments.items()},
                                    ensure_ascii=False)
        return self.arguments


def _loads(text: str):
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise NotACall from None


def _mended(value, schema: dict):
    """The value that a string stands for where the schema admits no string; any other value as it is."""
    return read_value(value, schema) if isinstance(value, str) and "string" not in types_of(schema) else value
