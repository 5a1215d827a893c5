"""What an answer is judged by.

Every judge takes an example's `expect` and the visible part of an answer (`visible`), and returns whether
it is right.
"""

import json
import re

from .example import Example


def visible(example: Example, text: str) -> str | None:
    """The answer without thoughts and end token, or None where the thinking never ends."""
    text = text.removesuffix("\n").removesuffix("<|im_end|>")
    if example.thinking:
        _, end, text = text.partition("</think>")
        if not end:
            return None
    return text.strip("\n")


def score(example: Example, text: str) -> bool:
    """Whether a generated text, all that follows the generation prompt, is right."""
    answer = visible(example, text)
    return answer is not None and _JUDGES[example.expect["kind"]](example.expect, answer)


def json_is_valid(example: Example, text: str) -> bool:
    """Whether a "json" example's answer fits the schema, right or not."""
    answer = visible(example, text)
    try:
        return answer is not None and fits(json.loads(answer), example.expect["schema"])
    except ValueError:
        return False


# ------------------------------------------------------------------------------------------------------
# Tool calls
# ------------------------------------------------------------------------------------------------------

_PARAMETER = r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>\n"
_CALL = re.compile(rf"<tool_call>\n<function=([^>\n]+)>\n((?:{_PARAMETER})*)</function>\n</tool_call>", re.S)


def parse_tool_calls(text: str, tools: list) -> tuple[str, list[dict]]:
    """The text before the calls, and the calls: [{"name", "arguments"}, ...], typed as the schemas say.

    Strict: raises ValueError for anything but a newline between or text after the calls, an unknown
    function, an unknown, doubled or missing parameter, or a value that is not of its parameter's type.
    """
    start = text.find("<tool_call>")
    if start < 0:
        return text, []
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools or []}
    calls, at = [], start
    while at < len(text):
        match = _CALL.match(text, at)
        if not match:
            raise ValueError(f"no tool call at character {at}")
        calls.append({"name": match[1], "arguments": _arguments(match[1], match[2], schemas)})
        at = match.end()
        if at < len(text):
            if text[at] != "\n":
                raise ValueError("text after a tool call")
            at += 1
    return text[:start].strip(), calls


def _arguments(name: str, body: str, schemas: dict) -> dict:
    if name not in schemas:
        raise ValueError(f"there is no function {name!r}")
    properties, values = schemas[name]["properties"], {}
    for key, raw in re.findall(_PARAMETER, body, re.S):
        if key not in properties or key in values:
            raise ValueError(f"{name} has no parameter {key!r}, or it came twice")
        values[key] = raw if properties[key]["type"] == "string" else json.loads(raw)
    if not fits(values, schemas[name]):
        raise ValueError(f"the arguments of {name} do not fit its schema")
    return values


# ------------------------------------------------------------------------------------------------------
# JSON schemas, as far as the examples go
# ------------------------------------------------------------------------------------------------------

_TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list,
          "object": dict}


def fits(value, schema: dict) -> bool:
    """Whether a value fits a schema of type, enum, items, properties and required; nothing else may occur."""
    if not isinstance(value, _TYPES[schema["type"]]):
        return False
    if isinstance(value, bool) and schema["type"] != "boolean":  # to Python True is an int as well
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, list):
        return all(fits(item, schema["items"]) for item in value)
    if isinstance(value, dict):
        properties = schema["properties"]
        return (set(schema["required"]) <= set(value) <= set(properties)
                and all(fits(item, properties[key]) for key, item in value.items()))
    return True


# ------------------------------------------------------------------------------------------------------
# The judges
# ------------------------------------------------------------------------------------------------------


def _has(text: str, value: str) -> bool:
    """Whether a value occurs and is not the middle of a longer number or English word."""
    return re.search(rf"(?<![0-9A-Za-z]){re.escape(value)}(?![0-9A-Za-z])", text) is not None


def _keys(expect: dict, answer: str) -> bool:
    """Every key phrase, or one of its alternatives, occurs; a fact is no place for a tool call."""
    answer = answer.lower()
    return "<tool_call>" not in answer and all(
        any(phrase.lower() in answer for phrase in key.split("|")) for key in expect["keys"])


def _value(expect: dict, answer: str) -> bool:
    """The value occurs, and none of the values it could be mistaken for."""
    return _has(answer, expect["value"]) and not any(_has(answer, other) for other in expect["others"])


def _values(expect: dict, answer: str) -> bool:
    return "<tool_call>" not in answer and all(_has(answer, value) for value in expect["values"])


def _exact(expect: dict, answer: str) -> bool:
    return answer.strip().removesuffix(".") == expect["answer"].removesuffix(".")


def _number(expect: dict, answer: str) -> bool:
    """The last number is the right one."""
    numbers = re.findall(r"-?\d+", answer)
    return bool(numbers) and int(numbers[-1]) == expect["number"]


def _json(expect: dict, answer: str) -> bool:
    try:
        value = json.loads(answer)
    except ValueError:
        return False
    return fits(value, expect["schema"]) and value == expect["value"]


def _calls(expect: dict, answer: str) -> bool:
    """Exactly the right calls, in any order, and not a word beside them."""
    try:
        before, calls = parse_tool_calls(answer, expect["tools"])
    except ValueError:
        return False
    missing = list(expect["calls"])
    for call in calls:
        if call not in missing:
            return False
        missing.remove(call)
    return not before and not missing


_JUDGES = {"keys": _keys, "value": _value, "values": _values, "exact": _exact, "number": _number,
           "json": _json, "calls": _calls}
