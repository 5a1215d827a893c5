"""What an answer is judged by.

Every judge takes an example's `expect` and the visible part of an answer (`visible`), and returns whether
it is right.
"""

import json
import re
from functools import cache

from .example import Example, estimate_tokens, text_of


def visible(example: Example, text: str) -> str | None:
    """The answer without thoughts and end token, or None where the thinking never ends."""
    text = text.removesuffix("\n").removesuffix("<|im_end|>")
    if example.thinking:
        _, end, text = text.partition("</think>")
        if not end:
            return None
    return text.strip("\n")


def score(example: Example, text: str) -> bool:
    """Whether a generated text, all that follows the generation prompt, is right. An echo never is."""
    answer = visible(example, text)
    if answer is None or answer.strip() == text_of(example.messages[-2]["content"]).strip():
        return False
    return _JUDGES[example.expect["kind"]](example.expect, answer)


def json_is_valid(example: Example, text: str) -> bool:
    """Whether a "json" example's answer fits the schema, right or not."""
    answer = visible(example, text)
    try:
        return answer is not None and fits(strict_json(answer), example.expect["schema"])
    except ValueError:
        return False


# ------------------------------------------------------------------------------------------------------
# Tool calls
# ------------------------------------------------------------------------------------------------------

NO_PARAMETERS = {"type": "object", "properties": {}, "required": []}
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
    schemas = {tool["function"]["name"]: {**NO_PARAMETERS, **tool["function"].get("parameters", {})}
               for tool in tools or []}
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
        values[key] = raw if properties[key]["type"] == "string" else strict_json(raw)
    if not fits(values, schemas[name]):
        raise ValueError(f"the arguments of {name} do not fit its schema")
    return values


# ------------------------------------------------------------------------------------------------------
# JSON schemas, as far as the examples go
# ------------------------------------------------------------------------------------------------------

_TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list,
          "object": dict}


def strict_json(text: str):
    """The value of a JSON text. Raises ValueError where a key comes twice and for NaN and Infinity, too."""
    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    def once(items):
        if len(dict(items)) < len(items):
            raise ValueError("a key came twice")
        return dict(items)
    return json.loads(text, object_pairs_hook=once, parse_constant=refuse)


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


# What may follow a Korean value without a space: particles, and forms of 이다.
_ENDINGS = ("은|는|이|가|을|를|과|와|의|도|만|로|으로|에|에서|에게|한테|부터|까지|처럼|보다|(?:이)?(?:라고|라는|고|며|나|랑|죠|네요|지만)|"
            "인데|(?:이었|였)(?:다|어요|습니다)|입니다|이에요|예요|(?:이)?야|이다")
_BEFORE, _AFTER = r"(?<![0-9A-Za-z가-힣])(?<![0-9A-Za-z][.,-])", r"(?![0-9A-Za-z]|[.,-][0-9A-Za-z])"


def _bounded(value: str) -> str:
    """A pattern for a value that is not a piece of a longer number, code or word."""
    after = rf"(?:(?:{_ENDINGS})?(?![가-힣]))" if "가" <= value[-1] <= "힣" else ""
    return _BEFORE + re.escape(value) + after + _AFTER


def _has(text: str, value: str) -> bool:
    return re.search(_bounded(value), text) is not None


def _keys(expect: dict, answer: str) -> bool:
    """Every key phrase, or one of its alternatives, occurs, and no other fact's answer is more like it.

    A fact is no place for a tool call.
    """
    if "<tool_call>" in answer:
        return False
    if "answer" in expect:
        common = _shared(answer, expect["answer"])
        if any(_shared(answer, other) > common for other in expect["others"]):
            return False
    return all(any(_has_phrase(answer, phrase) for phrase in key.split("|")) for key in expect["keys"])


def _has_phrase(text: str, phrase: str) -> bool:
    """Whether it occurs, whatever its case; a number not within another."""
    before = r"(?<!\d)(?<!\d[.,])" if phrase[0].isdigit() else ""
    after = r"(?!\d|[.,]\d)" if phrase[-1].isdigit() else ""
    return re.search(before + re.escape(phrase) + after, text, re.I) is not None


def _shared(one: str, other: str) -> float:
    """Share of the words of either that are in both."""
    one, other = _words(one), _words(other)
    return len(one & other) / max(1, len(one | other))


@cache
def _words(text: str) -> frozenset:
    return frozenset(re.findall(r"\w+", text.lower()))


def _value(expect: dict, answer: str) -> bool:
    """The value, alone or with what it is of, neither denied nor doubted, and none it could be mistaken for."""
    if re.search(r"\b(not|or)\b|아닙니다|아니에요|또는", answer):
        return False
    if any(_has(answer, other) for other in expect["others"]) or not _has(answer, expect["value"]):
        return False
    alone = re.fullmatch(rf"(?:It is )?{_bounded(expect['value'])}\.?", answer.strip())
    return alone is not None or all(_has(answer.lower(), name.lower()) for name in expect["about"])


def _unsaid(expect: dict, answer: str) -> bool:
    return answer.strip() == expect["answer"]


def _values(expect: dict, answer: str) -> bool:
    """Every value follows its label, as in "the owner is Lucy", and no label is followed by anything else."""
    for label, value in sorted(set(expect["values"]), key=lambda pair: -len(pair[0])):
        said = rf"{_BEFORE}{re.escape(label)}(?: is|[은는이가:])? ?{_bounded(value)}"
        answer, n = re.subn(said, "", answer, flags=re.I)
        if not n:
            return False
    return "<tool_call>" not in answer and not any(
        label and re.search(rf"{_BEFORE}{re.escape(label)}(?: is|[은는이가:]) ", answer, re.I)
        for label, _ in expect["values"])


def _exact(expect: dict, answer: str) -> bool:
    return answer.strip().removesuffix(".") == expect["answer"].removesuffix(".")


def _number(expect: dict, answer: str) -> bool:
    """The last number is the right one; it may have decimals, or commas between thousands."""
    numbers = re.findall(r"-?\d+(?:,\d{3})*(?:\.\d+)?", answer)
    return bool(numbers) and float(numbers[-1].replace(",", "")) == expect["number"]


def _json(expect: dict, answer: str) -> bool:
    try:
        value = strict_json(answer)
    except ValueError:
        return False
    return fits(value, expect["schema"]) and value == expect["value"]


def _object(expect: dict, answer: str) -> bool:
    """An object that fits its schema, whatever it says, and that ends in time."""
    try:
        return fits(strict_json(answer), expect["schema"]) and estimate_tokens(answer) <= expect["most_tokens"]
    except ValueError:
        return False


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


def _seen(expect: dict, answer: str) -> bool:
    """Of each group of words one is said, and none of the wrong ones beside them."""
    right, rest = [word for group in expect["right"] for word in group], answer
    if any(_says(answer, word) for word in expect["wrong"] if not any(word in longer for longer in right)):
        return False
    for group in expect["right"]:
        said = next(filter(None, (_says(rest, word) for word in sorted(group, key=len, reverse=True))), None)
        if not said:
            return False
        rest = f"{rest[:said.start()]} {rest[said.end():]}"
    return not any(_says(rest, word) for word in expect["wrong"])


def _says(text: str, word: str) -> re.Match | None:
    """Where a word or name occurs; its case counts where it has capitals."""
    return re.search(_bounded(word), text, 0 if word != word.lower() else re.I)


def _read(expect: dict, answer: str) -> bool:
    """The text, letter by letter, alone or at the end of a short sentence, or before a Korean ending."""
    before, text = r"(?:[^\d\n,]{0,30}(?: is| are| says|[은는이가의]):? )?", re.escape(expect["text"])
    said = rf"{before}[\"'“]?{text}[\"'”]?(?:{_ENDINGS})?[.]?"
    return re.fullmatch(said, answer.strip()) is not None


_JUDGES = {"keys": _keys, "value": _value, "unsaid": _unsaid, "values": _values, "exact": _exact,
           "number": _number, "json": _json, "object": _object, "calls": _calls,
           "seen": _seen, "read": _read}
