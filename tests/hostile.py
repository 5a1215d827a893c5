"""Grammars that strangers may send to keep a server busy: each is small, and would take seconds, hundreds of megabytes
or the whole process if llguidance were let alone with it."""

import json


def grammar_of(schema: dict) -> str:
    return "start: %json " + json.dumps(schema | {"x-guidance": {"whitespace_flexible": False}})


def of_pattern(pattern: str) -> dict:
    return {"type": "string", "pattern": pattern}


def bomb(n: int) -> dict:
    """A schema with three nested repetitions, a different one for each n from 1 to 999."""
    return of_pattern(f"^((a{{1000}}){{1000}}){{{n}}}$")


def exact(**properties) -> dict:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


CHAIN = {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(3000)} | {"d3000": {}}
MULTIPLES = [{"type": "integer", "multipleOf": n} for n in (97, 89, 83, 79)]

# Refused before anything of them is used.
AT_ONCE = {
    "nested repetitions": grammar_of(bomb(999)), "two of them": grammar_of(of_pattern("^(a{1000}){1000}$")),
    "a long repetition": grammar_of(of_pattern("^(abc){100000}$")),
    "a long way of references": grammar_of({"$defs": CHAIN, "$ref": "#/$defs/d0"}),
    "multiples": grammar_of({"allOf": MULTIPLES}),
    "a large multiple": grammar_of({"type": "integer", "multipleOf": 99991}),
    "items that are known": grammar_of({"type": "array", "items": {"type": "null"}, "minItems": 10**6}),
    "many small ones": grammar_of(exact(**{f"p{i}": of_pattern(f"^(a{{{500 + i}}}){{200}}$") for i in range(100)})),
    "text": f'start: "{"hello world, " * 20_000}"', "repeated rules": 'start: (("a"{1000}){1000}){999}',
    "rules that double": "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(60)) + '\na60: "x"',
    "terminals that meet": "start: T\nT: /((a{1000}){1000}){999}/ & /((a{999}){1000}){1000}/"}

# Accepted, as their first steps are cheap; a later one may end the answer.
LATER = {
    "behind a number": grammar_of(exact(a={"type": "integer"}, b=bomb(999))),
    "behind letters": grammar_of(of_pattern("^[a-z]{3}((a{1000}){1000}){999}$")),
    "alternatives": grammar_of(of_pattern("^(" + "|".join(f"w{i}x" for i in range(500)) + "){1000}$")),
    "lengths": grammar_of({"type": "string", "minLength": 10**6}),
    "gaps": grammar_of(of_pattern("^(.*a.{1000}){1000}$")),
    "items": grammar_of({"type": "array", "items": {"type": "integer"}, "minItems": 10**6}),
    "names": grammar_of({"type": "object", "patternProperties": {"^((a{1000}){1000}){999}$": {}}}),
    "ambiguous": 'start: e\ne: e e e | "a" | "b" | e "c" | ""',
    "text behind a letter": f'start: /[a-z]/ "{"hello world, " * 20_000}"'}
