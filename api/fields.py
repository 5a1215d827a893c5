"""What the body of a request may hold: one description of it, which `check` enforces and openapi.py publishes.

A description is JSON Schema, of which `check` knows: type, enum, minimum, maximum, minLength, maxLength, pattern,
items, minItems, maxItems, properties, propertyNames, required, additionalProperties, and anyOf. A property that is not
required may also be null, which means the same as leaving it out. "x-refused" is of our own: why a value that does not
fit is refused.
"""

import difflib
import json
import re

from engine.limits import MOST_DRAFTS, SAMPLING
from engine.request import RequestError

# ---- descriptions --------------------------------------------------------------------------------------

ANYTHING, BOOL, TEXT = {}, {"type": "boolean"}, {"type": "string"}
SECONDS = {"type": "number", "minimum": 0.001, "maximum": 86_400}


def one_of(*values) -> dict:
    return {"enum": list(values)}


def number(name: str) -> dict:
    """A number of SAMPLING."""
    kind, low, high, _ = SAMPLING[name]
    return {"type": "integer" if kind is int else "number", "minimum": low, "maximum": high}


# What clients may say of sampling, in fields named as those of Request.
SAMPLED = {**{name: number(name) for name in SAMPLING}, "repetition_guard": BOOL, "sparse": BOOL,
           "draft": {"type": "integer", "minimum": 0, "maximum": MOST_DRAFTS}}


def sampling_of(body: dict) -> dict:
    """Arguments of Request: what a body says of sampling."""
    return {name: body[name] for name in SAMPLED if name in body}


def refused(reason: str, *neutral) -> dict:
    """Only these values, which ask for nothing; null is allowed, too. reason: why other values are refused, a
    sentence."""
    return {"enum": list(neutral) or [None], "x-refused": reason}


def list_of(items: dict, least: int = 0, most: int | None = None) -> dict:
    return {"type": "array", "items": items, "minItems": least} | ({} if most is None else {"maxItems": most})


def either(*descriptions: dict) -> dict:
    """Any of these descriptions. They differ in their type, or are objects whose first property tells them apart. Only
    the first of such objects may do without that property."""
    return {"anyOf": list(descriptions)}


def object_of(properties: dict, required=(), others: bool | dict = False) -> dict:
    """An object. others: whether it may hold more properties than these, or the description of such properties."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": others}


# ---- checking ------------------------------------------------------------------------------------------

TYPES = {"boolean": bool, "string": str, "array": list, "object": dict, "integer": int,
         "number": int | float}
NOUNS = {"boolean": "true or false", "string": "a string", "array": "a list", "object": "an object",
         "integer": "a whole number", "number": "a number"}


MAX_LOOKED_AT = 10_000      # items of one list that are checked one by one, at most


def read_query(sent, descriptions: dict) -> dict:
    """The parameters of a query string that are described. sent: texts by name. Raises RequestError where a text is not
    what its description allows."""
    found = {name: sent[name] for name in descriptions if name in sent}
    for name, text in found.items():
        if descriptions[name].get("type") == "integer" and re.fullmatch("-?[0-9]{1,18}", text):
            found[name] = int(text)
        check(found[name], descriptions[name], name)
    return found


def check(value, description: dict, path: str = ""):
    """Raises RequestError where a part of the value is not what its description allows; the error names the path of the
    first such part."""
    if "anyOf" in description:
        description = _alternative(value, description, path)
    kind = description.get("type")
    if not (_is(value, kind) and _within(value, description)):
        raise _misfit(path, description)
    if kind == "array":
        _check_items(value, description["items"], path)
    if kind == "object":
        _check_properties(value, description, path)


def _check_items(values: list, description: dict, path: str):
    """Items that are described by their type alone are not looked at one by one: there may be millions."""
    kinds = [one["type"] for one in description.get("anyOf", [description]) if one.keys() == {"type"}]
    plain = {TYPES[kind] for kind in kinds if kind not in ("number", "array")}
    others = [(i, item) for i, item in enumerate(values) if type(item) not in plain]
    if len(others) > MAX_LOOKED_AT:
        raise RequestError(path, f"'{path}' may hold {MAX_LOOKED_AT} such items, and holds {len(others)}")
    for i, item in others:
        check(item, description, f"{path}[{i}]")


def _check_properties(value: dict, description: dict, path: str):
    properties, others = description.get("properties", {}), description.get("additionalProperties", True)
    where = f"{path}." if path else ""
    for name, item in value.items():
        if "propertyNames" in description and not _within(name, description["propertyNames"]):
            pattern = description["propertyNames"]["pattern"]
            raise RequestError(path, f"'{path}' has a name that is not like {pattern}")
        known = properties.get(name, others)
        if known is False:
            raise unknown_field(where, name, properties)
        if known is not True and (item is not None or name not in properties):
            check(item, known, where + name)
    for name in description.get("required", ()):
        if value.get(name) is None:
            raise RequestError(where + name, f"'{where}{name}' is missing")


def unknown_field(where: str, name: str, properties) -> RequestError:
    name = name[:80]                # the error repeats the name to the client
    meant = difflib.get_close_matches(name.lower(), properties, 1, cutoff=0.8)
    hint = f": did you mean '{where}{meant[0]}'?" if meant else ""
    return RequestError(where + name, f"unknown field '{where}{name}'{hint}")


def _alternative(value, description: dict, path: str) -> dict:
    """The one of several descriptions that the value is meant to fit."""
    fitting = [one for one in description["anyOf"] if _is(value, one.get("type")) and _within(value, one)]
    if len(fitting) > 1 and isinstance(value, dict):
        key = next(iter(fitting[0]["properties"]))
        kinds = {one["properties"][key]["enum"][0]: one for one in fitting}
        kind = value.get(key)
        if kind is None and key not in fitting[0]["required"]:
            return fitting[0]
        check(kind, description | {"anyOf": [one_of(*kinds)]}, f"{path}.{key}")
        return kinds[kind]
    if not fitting:
        raise _misfit(path, description)
    return fitting[0]


def _misfit(path: str, description: dict) -> RequestError:
    reason = description.get("x-refused")
    if reason and "enum" in description:
        taken = " or ".join(json.dumps(one) for one in description["enum"] if one is not None)
        return RequestError(path, f"'{path}' is not supported: {reason}" + (f" (it may be {taken})" if taken else ""))
    return RequestError(path, f"'{path}' must be {_noun(description)}" + (f": {reason}" if reason else ""))


def _is(value, kind: str | None) -> bool:
    if kind is None:
        return True
    is_bool = isinstance(value, bool)               # Python counts True and False among the numbers
    return isinstance(value, TYPES[kind]) and is_bool == (kind == "boolean")


def _within(value, description: dict) -> bool:
    """Whether a value of the right type keeps to its limits."""
    if "enum" in description:
        is_bool = isinstance(value, bool)           # in JSON, true is not 1
        return any(value == one and is_bool == isinstance(one, bool) for one in description["enum"])
    if isinstance(value, str):
        pattern = description.get("pattern", "^(?s:.*)$").strip("^$")       # our patterns describe the whole text
        is_fit = description.get("minLength", 0) <= len(value) <= description.get("maxLength", len(value))
        return is_fit and re.fullmatch(pattern, value) is not None
    if isinstance(value, list):
        return description.get("minItems", 0) <= len(value) <= description.get("maxItems", len(value))
    if isinstance(value, int | float):              # a NaN is within no limits
        return description.get("minimum", value) <= value <= description.get("maximum", value)
    return True


def _noun(description: dict) -> str:
    if "anyOf" in description:
        return " or ".join(dict.fromkeys(map(_noun, description["anyOf"])))
    if "enum" in description:
        return " or ".join(map(json.dumps, description["enum"]))
    noun = NOUNS[description["type"]]
    if "minimum" in description:
        noun += f" from {description['minimum']} to {description['maximum']}"
    if description.get("minLength"):
        noun = "a non-empty string"
    if "maxLength" in description:
        noun += f" of at most {description['maxLength']} letters"
    if "pattern" in description:
        noun += f" like {description['pattern']}"
    least, most = description.get("minItems"), description.get("maxItems")
    if most is not None:
        noun += f" of {least} to {most} items"
    elif least:
        noun += f" of at least {least} item{'s' * (least > 1)}"
    return noun
