"""Bodies of requests: what is parsed, what is refused before it is parsed, and that neither stops other threads."""

import contextlib
import gc
import json
import random

import pytest

from api import body
from api.body import MAX_COMMAS, MAX_DEPTH, MAX_DIGITS, MAX_FRACTIONS, MAX_PARTS, parse_body
from api.errors import MAX_BODY
from engine.pooling import MOST_TOKENS
from engine.request import RequestError
from tests.longest_wait import LongestWait
from tests.schemas import random_schema

SECONDS = 0.2               # of work while other threads wait; 0.1 where this was written, and 1.2 without limits


def filled(part: str, before='{"a":[', after="0]}", n=None) -> bytes:
    """A body of n such parts; by default as many as fit."""
    room = (MAX_BODY - len(before) - len(after)) // len(part.encode())
    return (before + part * min(room, room if n is None else n) + after).encode()


def keys(n: int) -> str:
    return ",".join(f'"{i:x}":0' for i in range(n))


def fractions(n: int) -> str:
    rng = random.Random(n)
    return "".join(f"{rng.random() * 1e-300!r}," for _ in range(n))


# Bodies that would keep the lock, and a word of why they are refused; None: they are parsed, and that is short.
HOSTILE = {
    "lists": (filled("[],"), "lists"), "nested lists": (filled("[[[]]],"), "lists"),
    "objects": (filled("{},"), "objects"), "objects with a name": (filled('{"a":1},'), "objects"),
    "deep lists": (filled("[" * 90 + "]" * 90 + ","), "lists"),
    "too deep": (filled("[" * 200 + "]" * 200 + ","), "lists"),
    "names": (f"{{{keys(350_000)}}}".encode(), "properties"), "fractions": (filled("1.5,"), "points"),
    "exponents": (filled("1e9,"), "exponents"), "long fractions": (filled(fractions(150_000)), "points"),
    "whole numbers": (filled("1,"), "commas"), "words": (filled("true,"), None), "texts": (filled('"",'), "commas"),
    "long numbers": (filled("1" * 4000 + ","), "digits"), "a long number": (filled("1", '{"a":', "}"), "digits"),
    "long fraction": (filled("1", '{"a":', ".5}"), "digits"),
    "escapes": (filled("\\n", '{"a":"', '"}'), None), "backslashes": (filled("\\\\", '{"a":"', '"}'), None),
    "quotes": (filled('\\"', '{"a":"', '"}'), None), "characters": (filled("\\u00e9", '{"a":"', '"}'), None),
    "pairs": (filled("\\ud83d\\ude00", '{"a":"', '"}'), None), "emoji": (filled("\U0001F600", '{"a":"', '"}'), None),
    "texts with pairs": (filled('"\\ud83d\\ude00",'), None), "halves": (filled('"\\ud83d",'), "surrogate"),
    "blanks": (filled(" "), None), "half a text": (filled('"", ', '{"a": ["', "0]}"), "JSON"),
    # As much as is let through.
    "most lists": (filled("[],", n=MAX_PARTS - 3), None), "most objects": (filled("{},", n=MAX_PARTS - 3), None),
    "most names": (f"{{{keys(MAX_PARTS - 1)}}}".encode(), None),
    "most fractions": (filled("0.12345678901234567890123,", n=MAX_FRACTIONS), None),
    "most of all": (filled("0.12345678901234567890123," * MAX_FRACTIONS + "{}," * (MAX_PARTS - 3)
                           + "1," * (MAX_COMMAS - MAX_PARTS - MAX_FRACTIONS), n=1), None)}


@pytest.fixture(scope="module")
def loaded():
    """As while a server works: what the process has loaded is no garbage, and is not looked at."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("name", HOSTILE)
def test_no_body_keeps_other_threads_waiting(name, loaded):
    """Where the machine has something else to do, other threads wait for that, too. So the work counts that was done
    meanwhile, and the least of five times."""
    data, reason = HOSTILE[name]
    waits = []
    for _ in range(5):
        parsed = None
        with LongestWait() as wait, pytest.raises(RequestError, match=reason) if reason else contextlib.nullcontext():
            parsed = parse_body(data)
        waits.append(wait.work)
    assert min(waits) < SECONDS
    assert reason or parsed == json.loads(data)


@pytest.mark.parametrize("most, at_most, one_more, reason", [
    (MAX_PARTS, filled("[],", n=MAX_PARTS - 3), filled("[],", n=MAX_PARTS - 2), f"has {MAX_PARTS + 1} lists"),
    (MAX_FRACTIONS, filled("1.5,", n=MAX_FRACTIONS), filled("1E3,", n=MAX_FRACTIONS + 1), f"has {MAX_FRACTIONS + 1} "),
    (MAX_FRACTIONS, filled("1.5e3,", n=MAX_FRACTIONS // 2), filled("1.5E-3,", n=MAX_FRACTIONS // 2 + 1), "exponents"),
    (MAX_COMMAS, filled("1,", n=MAX_COMMAS), filled("1,", n=MAX_COMMAS + 1), f"has {MAX_COMMAS + 1} commas"),
    (MAX_DEPTH, b'{"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}",
     b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "nested"),
    (MAX_DIGITS, filled("7", '{"a":', "}", MAX_DIGITS - 1), filled("7", '{"a":', "}", MAX_DIGITS), "digits")])
def test_limits(most, at_most, one_more, reason):
    assert parse_body(at_most) == json.loads(at_most)
    with pytest.raises(RequestError, match=reason):
        parse_body(one_more)


def test_texts_do_not_count():
    """Characters that look like structure do not count inside a text or a name, with any escapes around them."""
    tricky = ['[{"a":1.5e3,' * 9, "\\", '"', '\\"', '"\\', "\\\\", "9" * MAX_DIGITS, "[" * MAX_DEPTH * 2, "",
              "é大😀\0\n"]
    rng = random.Random(1)
    for _ in range(200):
        values = [rng.choice(tricky) for _ in range(rng.randrange(1, 9))]
        sent = {"a": values, rng.choice(tricky): rng.choice(tricky)}
        written = json.dumps(sent, ensure_ascii=rng.random() < 0.5).encode()
        outside = bytes(body.outside_texts(written.replace(rb"\\", b"__").replace(rb"\"", b"__")))
        assert outside.replace(b" ", b"") == f'{{":[{",".join(chr(34) * len(values))}],":"}}'.encode()
        assert parse_body(written) == sent


def test_parts_are_counted():
    """Lists, objects and properties, in random values of all kinds."""
    def parts(value):
        if isinstance(value, dict):
            return 1 + len(value) + sum(map(parts, value.values()))
        return 1 + sum(map(parts, value)) if isinstance(value, list) else 0

    rng = random.Random(2)
    for _ in range(9):
        sent = {"schema": random_schema(rng, 4), "values": [0.5, -1.25, True, False, None, 7]}
        padding = [[]] * (MAX_PARTS - parts(sent) - 2)
        assert parse_body(json.dumps(sent | {"more": padding}).encode())["more"] == padding
        with pytest.raises(RequestError, match=f"has {MAX_PARTS + 1} lists"):
            parse_body(json.dumps(sent | {"more": [*padding, []]}).encode())


def tool(i: int) -> dict:
    properties = {f"argument_{j}": {"type": "string", "description": "What it is for.", "enum": ["a", "b", "c"]}
                  for j in range(20)}
    return {"type": "function", "function": {"name": f"tool_{i}", "description": "It does this and that. " * 20,
            "parameters": {"type": "object", "properties": properties, "required": list(properties)}}}


def call(i: int) -> dict:
    return {"id": f"call_{i}", "type": "function", "function": {"name": "f", "arguments": '{"a": [1.5, {}]}' * 9}}


CODE = "for (i = 0; i < n; i++) { a[i] = 0.5; }\n"
HONEST = {
    "long messages with tools": {"messages": [{"role": "user", "content": CODE * 500}] * 50,
                                 "tools": [tool(i) for i in range(200)]},
    "10,000 messages in parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi."}]}] * 10_000},
    "4,000 calls": {"messages": [{"role": "assistant", "content": None, "tool_calls": [call(i)]} for i in range(4000)]},
    "a book as JSON": {"prompt": json.dumps([{"line": i, "of": [0.5, 1e9]} for i in range(60_000)])},
    "a million tokens": {"input": [[7] * (MOST_TOKENS // 2048)] * 2048},
    "a context of tokens": {"prompt": [248_319] * 262_144}}


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("ascii", [False, True])
def test_honest_bodies_are_parsed(name, ascii):
    sent = json.dumps(HONEST[name], ensure_ascii=ascii, separators=(",", ":")).encode()
    assert len(sent) < MAX_BODY and parse_body(sent) == HONEST[name]


@pytest.mark.parametrize("data, reason", [
    (b'{"a": "\xed\xa0\x80"}', "utf-8"), ('{"a": 1}'.encode("utf-16"), "utf-8"),
    ('{"a": 1}'.encode("utf-32-le"), "JSON"),
    (b'{"a": \\"1}', "JSON"), (b'{"a": [1, "b": {"\\ud800": "\\ud83d"}}', "JSON"), (b"", "JSON"), (b'"', "JSON"),
    (b"[]", "object"), (b'{"a": NaN}', "NaN"), (b'{"a": ["\\ud83d\\ud83d\\ude00"]}', "'a' holds half"),
    (b'{"a": [{"\\uDC00": 1}]}', "'a' holds half"), (b'{"\\ud800": 1}', "holds half")])
def test_what_is_no_body(data, reason):
    with pytest.raises(RequestError, match=reason):
        parse_body(data)


def test_what_is_a_body():
    assert parse_body(b'\xef\xbb\xbf{"a": "\\\\ud800 \\ud83d\\ude00"}') == {"a": "\\ud800 \U0001F600"}
