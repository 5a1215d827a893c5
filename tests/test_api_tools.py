"""Calls of tools: values typed by their schemas, and grammars that let well-formed calls through and nothing else."""

import functools
import json
import random
import time

import pytest
from llguidance import LLMatcher

from api.chat import Conversation, Toolbox, rules_of
from api.grammar import GrammarError, Rules, Shape
from api.tools import EVERY_TYPE, JSONCall, Tool, XMLCall, form_of, read_value, types_of
from engine.reply import Call, Message, Reply
from engine.request import Request, RequestError
from tests.calls import JSON, WEATHER, XML
from tests.oracle import oracle_path
from tests.scripted import ScriptedEngine, obeys, shipped, vocabulary

NUMBER, TEXT, NULL = {"type": "number"}, {"type": "string"}, {"type": "null"}
POINT = {"$ref": "#/$defs/point", "$defs": {"point": {"type": "object", "properties": {"x": NUMBER}}}}

VALUES = [      # schema, text, value
    (TEXT, "5", "5"), (TEXT, "null", "null"), (TEXT, " a\nb ", " a\nb "), (TEXT, '{"a": 1}', '{"a": 1}'),
    ({"type": "integer"}, "5", 5), ({"type": "integer"}, "5.0", 5), ({"type": "integer"}, "-0", 0),
    ({"type": "integer"}, "5.5", "5.5"), ({"type": "integer"}, "three", "three"), ({"type": "integer"}, "", ""),
    ({"type": "integer"}, "true", "true"), ({"type": "integer"}, "1" * 400, int("1" * 400)),
    (NUMBER, "5", 5), (NUMBER, "5.0", 5.0), (NUMBER, "1e3", 1000.0), (NUMBER, "NaN", "NaN"), (NUMBER, "1e999", "1e999"),
    ({"type": "boolean"}, "true", True), ({"type": "boolean"}, "False", False), ({"type": "boolean"}, "1", "1"),
    (NULL, "null", None), (NULL, "None", None), (NULL, "nothing", "nothing"),
    ({"type": "array"}, "[1, 2]", [1, 2]), ({"type": "array"}, "[1, 2", "[1, 2"), ({"type": "array"}, "{}", "{}"),
    ({"type": "array"}, "[" * 100_000, "[" * 100_000),
    ({"type": "object"}, '{"a": "b"}', {"a": "b"}), ({"type": "object"}, "a: b", "a: b"),
    ({"type": ["string", "null"]}, "null", None), ({"type": ["string", "null"]}, "5", "5"),
    ({"anyOf": [{"type": "integer"}, NULL]}, "7", 7), ({"anyOf": [{"type": "integer"}, NULL]}, "None", None),
    ({"anyOf": [{"type": "integer"}, TEXT]}, "7", 7), ({"anyOf": [{"type": "integer"}, TEXT]}, "seven", "seven"),
    ({"oneOf": [{"type": "array"}, TEXT]}, "[]", []), ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "7", 7),
    ({"enum": ["5", "a"]}, "5", "5"), ({"enum": [5, "5"]}, "5", 5), ({"enum": [1, 2]}, "2", 2),
    ({"enum": [1, 2]}, "3", 3),
    ({"enum": ["a", None]}, "null", None), ({"const": True}, "true", True), ({"enum": ["a", "b"]}, "c", "c"),
    (POINT, '{"x": 1}', {"x": 1}), (POINT, "5", "5"),
    ({"$ref": "#/nowhere"}, "5", 5), ({}, "5", 5), ({}, "five", "five"), ({}, '{"a": [1]}', {"a": [1]}),
    ({"type": "integer", "anyOf": "nonsense", "enum": 5}, "5", 5), ({"type": "unheard of"}, "5", "5"),
]


@pytest.mark.parametrize("schema, text, value", VALUES, ids=[f"{i}-{case[1][:12]!r}" for i, case in enumerate(VALUES)])
def test_a_value_is_what_the_schema_admits_or_the_text(schema, text, value):
    read = read_value(text, schema)
    assert read == value and type(read) is type(value)


def test_types_of_what_refers_to_itself():
    assert types_of({"$ref": "#"}) == EVERY_TYPE
    schema = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, NULL]}}, "$ref": "#/$defs/a"}
    assert "null" in types_of(schema)
    assert types_of({"properties": {"a/b": TEXT}, "$ref": "#/properties/a~1b"}) == {"string"}


def test_forms_of_the_templates():
    assert form_of(shipped().template.source) is XMLCall
    for name in ("Qwen3.5-4B", "Qwen3-Coder"):
        assert form_of(oracle_path(f"templates/{name}.jinja").read_text()) is XMLCall
    assert form_of('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>') is JSONCall
    assert form_of("no tools") is None


# ---- grammars ----------------------------------------------------------------------------------------------


def json_rules(schema, tags=None, opening="content"):
    """The rules of a text that has to be JSON of this schema. tags: None for those of the model that ships."""
    return Rules(shipped().tokenizer.tags if tags is None else tags, opening).text(Shape("json", schema, "f"))

LEAVES = {"city": TEXT, "days": {"type": "integer"}, "share": NUMBER, "exact": {"type": "boolean"},
          "unit": {"enum": ["C", "F"]}, "level": {"enum": [1, 2]}, "note": {"anyOf": [TEXT, NULL]},
          "tags": {"type": "array", "items": TEXT}, "at": {"$ref": "#/$defs/point"},
          "size": {"type": ["integer", "null"]},
          "any": {}}
DEFS = {"point": {"type": "object", "properties": {"x": NUMBER, "y": NUMBER}, "required": ["x", "y"]}}
MADE = {"city": ["Seoul", "", 'a "b"\n</par', "x\n\ny", "\ub300\ud55c"], "days": [0, -3, 12], "share": [0.5, 3, -1.25],
        "exact": [True, False], "unit": ["C", "F"], "level": [1, 2], "note": ["later", None],
        "tags": [[], ["a", "\u00e9"]], "at": [{"x": 1, "y": 2.5}], "size": [4, None], "any": ["text", {"a": [1]}]}


def random_tool(rng, name):
    keys = rng.sample(list(LEAVES), rng.randrange(6))
    required = [key for key in keys if rng.random() < 0.6]
    parameters = {"type": "object", "properties": {key: LEAVES[key] for key in keys}, "required": required,
                  "$defs": DEFS}
    return Tool(name, parameters, strict=rng.random() < 0.5)


def random_arguments(rng, tool):
    return {key: rng.choice(MADE[key]) for key in tool.parameters["properties"]
            if key in tool.parameters["required"] or rng.random() < 0.5}


def write(form, name, arguments):
    """A call as the model's template or, in the JSON form, Qwen3's writes it."""
    if form is JSONCall:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = shipped().template.render(messages, add_generation_prompt=False)
    return text[text.index("<tool_call>"):text.index("</tool_call>")] + "</tool_call>"


def calls_in(form, tools, text):
    """The calls that are read from an answer, whose text must be nothing but calls."""
    message = Message()
    engine = ScriptedEngine(text)
    reply = Reply(engine.tokenizer, "content", form, {tool.name: tool for tool in tools}, ruled=True)
    for delta in engine.submit(Request([0])):
        for part in reply.push(delta):
            message.add(part)
    assert all(isinstance(block, Call) for block in message.blocks), message.blocks
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


@pytest.mark.parametrize("form", [XMLCall, JSONCall])
def test_calls_that_the_template_writes_obey_and_come_back(form):
    rng = random.Random(4)
    for _ in range(40):
        tools = [random_tool(rng, name) for name in ("get_weather", "get", "send-mail")[:rng.randrange(1, 4)]]
        calls = [(tool.name, random_arguments(rng, tool)) for tool in rng.choices(tools, k=rng.randrange(1, 4))]
        text = "\n".join(write(form, *call) for call in calls)
        must, free = (Rules(shipped().tokenizer.tags, "content").calls(form, tools, must, several=True)
                      for must in (True, False))
        assert obeys(must, text), text
        assert obeys(free, "I look.\n\n" + text), text
        assert calls_in(form, tools, text) == calls
        assert not obeys(must, "I look.\n\n" + text)
        assert not obeys(free, text + "\nThere.")


XML_RULES = [       # text with a call of WEATHER's in the XML form, is it one?
    (XML, True),
    (XML.replace("get_weather", "get_whether"), False),
    (XML.replace("3", "three"), False),
    (XML.replace("city", "town"), False),
    (XML.replace("</function>\n", ""), False),
    (XML.replace("S\u00e3o", "<b>\n</parameter"), True),
    ("<tool_call>\n<function=get_weather>\n</function>\n</tool_call>", True),        # nothing of it is required
    (XML + "\n" + XML, False),          # several are not allowed
    ("", False), ("Hello", False),
]


@pytest.mark.parametrize("text, fits", XML_RULES)
def test_a_required_call(text, fits):
    rules = Rules(shipped().tokenizer.tags, "content").calls(XMLCall, [WEATHER], must=True, several=False)
    assert obeys(rules, text) == fits


@pytest.mark.parametrize("text, fits", [
    (JSON, True), (JSON.replace("3", '"3"'), False), (JSON.replace('"name": "get', '"name": "got'), False),
    (JSON.replace("days", "hours"), False),
    ('<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>', True)])
def test_a_required_call_in_the_json_form(text, fits):
    rules = Rules(shipped().tokenizer.tags, "content").calls(JSONCall, [WEATHER], must=True, several=False)
    assert obeys(rules, text) == fits


def xml_call(value):
    return f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"


def rules_of_argument(schema, strict=False):
    defs = {"short": TEXT | {"maxLength": 2}}
    tool = Tool("f", {"properties": {"a": schema}, "required": ["a"], "$defs": defs}, strict)
    return Rules(shipped().tokenizer.tags, "content").calls(XMLCall, [tool], must=True, several=False)


SHAPES = [{"type": "object", "properties": {"kind": {"const": kind}, "r": {"type": "integer"}}, "required": ["kind"]}
          for kind in (1, "x")]
STRINGS = [     # schema, values that fit, values that do not
    (TEXT, ["", "a\n\nb", "a </param", "\n"], ["a</parameter>b", "</parameter>"]),
    (TEXT | {"maxLength": 3}, ["", "abc", "\ub300\ud55c\n"], ["abcd"]),
    (TEXT | {"minLength": 2, "maxLength": 3}, ["ab", "abc"], ["", "a", "abcd"]),
    (TEXT | {"pattern": "^[a-z]+$"}, ["abc"], ["aBc", "", "abc "]),
    (TEXT | {"pattern": "b"}, ["b", "abc", "a\nb\n"], ["", "ac"]),
    (TEXT | {"pattern": "^a|b$"}, ["ac", "cb"], ["ca", "bc"]),
    (TEXT | {"pattern": "^a\\$$"}, ["a$"], ["a"]), (TEXT | {"pattern": "^[|]/(x|y)$"}, ["|/x"], ["|/", "/x", "y"]),
    (TEXT | {"pattern": "b", "maxLength": 3}, ["abc"], ["ac", "abcd"]),
    (TEXT | {"pattern": "."}, ["a"], ["a</parameter>\n"]),
    (TEXT | {"pattern": r"^\d+[\w-]\W$"}, ["12x-", "1_\u00e9", "1- "], ["\u0661\u0662x-", "1\u00e9-", "12xy"]),
    (TEXT | {"pattern": r"^[^\d][^\W]\D[\d-x]$"}, ["xyz1", "\u0661_\u06611", "-a-x"], ["1yz1", "x\u00e9z1", "xy11"]),
    (TEXT | {"pattern": r"^[+-\d]+[\w-.]$"}, ["+5.", "-12-", "123"], ["/,.", "+5/"]),
    (TEXT | {"format": "date"}, ["2026-11-21"], ["2026-11-31", "tomorrow"]),
    (TEXT | {"format": "date-time"}, ["2026-11-21T08:00:00Z"], ["2026-11-21", "2026-11-21T25:00:00Z"]),
    (TEXT | {"format": "email"}, ["a.b@example.com"], ["a b@example.com", "a@"]),
    (TEXT | {"format": "uri"}, ["https://example.com/a?b#c"], ["example", "a: b"]),
    (TEXT | {"format": "ipv4"}, ["127.0.0.1"], ["127.0.0.256", "127.1"]),
    ({"anyOf": [TEXT | {"maxLength": 3}, NULL]}, ["abc", "null", "nul"], ["abcd", "nullx"]),
    ({"anyOf": [TEXT | {"pattern": "^[A-Z]+$"}, {"type": "integer"}]}, ["AB", "12"], ["ab", "1.5"]),
    ({"type": ["string", "null"], "maxLength": 2}, ["ab", "null"], ["abc"]),
    ({"anyOf": [TEXT | {"minLength": 5}, NUMBER, {"const": [1, 2]}]}, ["abcde", "-12", "1.5", "[1, 2]"],
     ["abc", "[1]"]),
    ({"enum": (texts := ["a b", "a.c", "a\nb", "\t<x>/#&~-", "\\d/\\/[x](y)|{2}^$*+?"])}, texts, ["abc", "", "5"]),
    ({"anyOf": [{"enum": ["a", 5]}, {"type": "array"}]}, ["a", "5", "[1]"], ["b", "6"]),
    ({"$ref": "#/$defs/short", "title": "T"}, ["ab"], ["abc"]),
    ({"enum": ["a", None, 3]}, ["a", "null", "3"], ["b", '"a"']),
    ({"oneOf": [TEXT | {"maxLength": 2}, NULL]}, ["ab", "null"], ["abc"]),
    ({"oneOf": [{"const": "a", "title": "A"}, {"enum": ["b", 3]}, {"const": None}]}, ["a", "3", "null"], ["c", "1"]),
    ({"oneOf": [{"enum": ["a", "b"]}, *SHAPES]}, ["b", '{"kind": 1}', '{"kind": "x", "r": 1}'], ["c", '{"kind": 2}']),
]


@pytest.mark.parametrize("schema, good, bad", STRINGS, ids=[json.dumps(schema)[:50] for schema, _, _ in STRINGS])
def test_strings_of_the_xml_form_obey_their_schemas(schema, good, bad):
    rules = rules_of_argument(schema, strict=True)
    assert [value for value in good if not obeys(rules, xml_call(value))] == []
    assert [value for value in bad if obeys(rules, xml_call(value))] == []


INT_A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT_B = {"properties": {"b": TEXT}, "required": ["b"]}
A, AB, AC = [("a", 1)], [("a", 1), ("b", "x")], [("a", 1), ("c", 2)]
ROOTS = [       # parameters, which of A, AB, AC and no arguments at all fit them
    ({"$ref": "#/definitions/p", "definitions": {"p": INT_A}, "$schema": "http://json-schema.org/schema#"}, [A]),
    (INT_A | {"$ref": "#", "title": "P"}, [A]),
    ({"allOf": [INT_A, {"$ref": "#/$defs/b"}], "$defs": {"b": {"allOf": [TEXT_B]}}}, [AB]),
    ({"allOf": [INT_A, {"properties": {"a": {"maximum": 0}}}]}, []),
    ({"type": "object"}, [[]]), ({"type": "object", "additionalProperties": True}, [A, AB, AC, []]),
    ({"additionalProperties": {"type": "integer"}}, [A, AC, []]),
    (INT_A | {"additionalProperties": {"type": "integer"}}, [A, AC]),
    ({"required": ["a"], "additionalProperties": True}, [A, AB, AC]), ({"required": ["a"]}, [A]),
]


def call_of(form, arguments):
    """A call of f in this form; `write` takes no name twice."""
    if form is JSONCall:
        written = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in arguments)
        return f'<tool_call>\n{{"name": "f", "arguments": {{{written}}}}}\n</tool_call>'
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"


def rules_of_call(form, parameters, strict):
    tool = Tool("f", parameters, strict)
    return Rules(shipped().tokenizer.tags, "content").calls(form, [tool], must=True, several=False)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("form", [XMLCall, JSONCall])
@pytest.mark.parametrize("parameters, fitting", ROOTS, ids=[json.dumps(root)[:50] for root, _ in ROOTS])
def test_what_parameters_say_at_their_root(form, strict, parameters, fitting):
    rules = rules_of_call(form, parameters, strict)
    assert [one for one in (A, AB, AC, []) if obeys(rules, call_of(form, one))] == fitting
    for arguments in fitting:
        assert calls_in(form, [Tool("f", parameters, strict)], call_of(form, arguments)) == [("f", dict(arguments))]


def test_arguments_of_any_name():
    """A listed one is written as its schema says; one that is not may come again, and the last one counts."""
    tool = Tool("f", INT_A | {"additionalProperties": TEXT})
    rules = rules_of_call(XMLCall, tool.parameters, strict=True)
    assert not obeys(rules, call_of(XMLCall, [("a", 1), ("a", 2)]))
    assert obeys(rules, again := call_of(XMLCall, [("a", 1), ("b c/d-e", "5"), ("b c/d-e", "6")]))
    assert calls_in(XMLCall, [tool], again) == [("f", {"a": 1, "b c/d-e": "6"})]


@pytest.mark.parametrize("parameters, keyword, fitting", [
    ({"anyOf": [INT_A, TEXT_B]}, "anyOf", [A, AB, AC, []]),
    ({"$ref": "#/$defs/p", "$defs": {"p": INT_A}, "additionalProperties": False}, "$ref", [A, AB, AC, []]),
    ({"patternProperties": {"^a": NUMBER}, "additionalProperties": False}, "patternProperties", [A, AB, AC, []]),
    (INT_A | {"minProperties": 2}, "minProperties", [A]),
    (INT_A | {"dependentRequired": {"a": ["b"]}}, "dependentRequired", [A]),
])
def test_what_the_xml_form_cannot_see_to(parameters, keyword, fitting):
    """Overlooked, and then no call that fits is ruled out for it; or refused by its name where the tool is strict."""
    rules = rules_of_call(XMLCall, parameters, strict=False)
    assert [one for one in (A, AB, AC, []) if obeys(rules, call_of(XMLCall, one))] == fitting
    with pytest.raises(GrammarError, match=f"^{keyword}".replace("$", r"\$")):
        rules_of_call(XMLCall, parameters, strict=True)


@pytest.mark.parametrize("form", [XMLCall, JSONCall])
@pytest.mark.parametrize("parameters, named", [
    (TEXT, "type: "), ({"required": ["a"], "additionalProperties": False}, "required: 'a' ")])
def test_parameters_that_nothing_fits(form, parameters, named):
    with pytest.raises(GrammarError, match=f"^{named}"):
        rules_of_call(form, parameters, strict=False)


UNENFORCED = [TEXT | {"pattern": "(?=a)b"}, TEXT | {"pattern": "("}, TEXT | {"pattern": ["a"]},
              TEXT | {"minLength": 5, "maxLength": 3}, TEXT | {"maxLength": "3"}, TEXT | {"maxLength": 10**30},
              TEXT | {"format": "postcode"}, {"oneOf": [TEXT, {"const": "a"}]}, {"$ref": "#/nowhere"},
              TEXT | {"not": {"const": "a"}}, TEXT | {"pattern": "a" * 10_001}, {"minLength": 20},
              {"anyOf": [TEXT | {"maxLength": 2}, {"type": "array"}]}]


@pytest.mark.parametrize("schema", UNENFORCED, ids=lambda schema: json.dumps(schema)[:50])
def test_strings_whose_schemas_cannot_be_enforced(schema):
    """Such a keyword is overlooked; where the tool is strict, it is refused by its name."""
    assert obeys(rules_of_argument(schema), xml_call("whatever"))
    with pytest.raises(GrammarError) as caught:
        rules_of_argument(schema, strict=True)
    assert any(str(caught.value).startswith(word) for word in (*(schema.keys() - {"type"}), "limits of a string"))


def test_values_that_the_xml_form_cannot_write_are_named():
    with pytest.raises(GrammarError, match="enum or const holds </parameter>"):
        rules_of_argument({"enum": ["x</parameter>y", "z"]})


def test_arguments_bring_only_the_definitions_they_refer_to():
    defs = {"a": {"items": {"$ref": "#/$defs/b/x"}}, "b": {"x": {"$ref": "#/$defs/a"}}, "c": TEXT, "d/e": NULL}
    tool = Tool("f", {"$defs": defs, "properties": {
        "a": {"$ref": "#/$defs/a"}, "c": {"anyOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/none"}]}, "n": NUMBER,
        "e": {"$ref": "#/$defs/d~1e"}, "other": {"$ref": "other.json#/$defs/c"}}})
    brought = {key: set(tool.schema_of(key).get("$defs", ())) for key in tool.properties}
    assert brought == {"a": {"a", "b"}, "c": {"c"}, "n": set(), "e": {"d/e"}, "other": set()}


def big_tools(kind):
    """Tools, 260,000 letters of them or more, whose grammars would be far larger or take minutes."""
    if kind == "shared definitions":
        defs = {f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(3000)}
        properties = {f"p{i}": {"anyOf": [{"$ref": "#/$defs/d0"}, {"const": i}]} for i in range(1500)}
        return [Tool("f", {"$defs": defs, "properties": properties})]
    if kind == "references that multiply":
        defs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(7000)}
        return [Tool("f", {"$defs": defs, "properties": {f"p{i}": {"$ref": "#/$defs/d0"} for i in range(9)}})]
    if kind == "patterns":
        return [Tool("f", {"properties": {f"p{i}": TEXT | {"pattern": f"(?=a){i}"} for i in range(9000)}})]
    lists = [{f"p{j}_{i}": {"type": "array", "items": {"const": [i, j]}} for j in range(10)} for i in range(900)]
    return [Tool(f"f{i}", {"properties": properties}) for i, properties in enumerate(lists)]


@pytest.mark.parametrize("form", [XMLCall, JSONCall])
@pytest.mark.parametrize("kind", ["shared definitions", "references that multiply", "patterns", "many tools"])
def test_schemas_far_too_large(form, kind):
    """Free calls, or a refusal that says so, in the time that a request may take."""
    tools, start = big_tools(kind), time.thread_time()
    conversation = [Conversation([], None, Toolbox([], tools, must)) for must in (False, True)]
    rules = Rules(shipped().tokenizer.tags, "content")
    if rules_of(rules, form, conversation[0]) == {}:
        with pytest.raises(RequestError, match="letters") as caught:
            rules_of(rules, form, conversation[1])
        assert caught.value.field == "tools"
    assert time.thread_time() - start < 10


def meeting(*patterns):
    return {"allOf": [TEXT | {"pattern": one} for one in patterns]}


FORTY = [f"[a-z]{{{i}}}" for i in range(2, 42)]
ALTERNATIVES = "|".join(f"[a-{chr(98 + i % 25)}]x{i}" for i in range(3000))
TOO_MUCH_MEETS = {
    "patterns": meeting(*FORTY), "long patterns": meeting(ALTERNATIVES, ALTERNATIVES + "|y"),
    "a list's": {"items": meeting(*FORTY)},
    "of two objects": {"allOf": [{"properties": {"a": meeting(*FORTY[i:i + 10])}} for i in (0, 10)]},
    "references": {"$defs": {"a": meeting(*FORTY[:10])}, "$ref": "#/$defs/a", "allOf": [meeting(*FORTY[10:20])]},
    "alternatives": {"allOf": [{"anyOf": [TEXT | {"pattern": f"^(a|b{i}{j})*$"} for i in range(10)]}
                               for j in range(5)]},
    "names": {"type": "object", "patternProperties": {one: TEXT for one in (ALTERNATIVES, ALTERNATIVES + "|y")}},
    "deep": {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(300)} |
             {"d300": meeting(*FORTY[:12])}, "allOf": [{"$ref": "#/$defs/d0"}, TEXT | {"pattern": "a{2}b"}]}}


@pytest.mark.parametrize("name", TOO_MUCH_MEETS)
def test_too_many_patterns_that_meet_are_refused_at_once(name):
    """llguidance would take minutes and gigabytes for most of them."""
    start = time.thread_time()
    with pytest.raises(GrammarError, match="too many"):
        json_rules(TOO_MUCH_MEETS[name])
    assert rules_of(Rules(shipped().tokenizer.tags, "content"), XMLCall, Conversation(
        [], None, Toolbox([], [Tool("f", {"properties": {"a": TOO_MUCH_MEETS[name] | {"type": ["object", "array"]}}})],
                          must=False))) == {}
    assert time.thread_time() - start < 1


def test_patterns_that_meet():
    """As far as they are few; and definitions that only follow on each other meet nobody."""
    rules = json_rules(meeting("^[A-Z]{2}-", "[0-9]$", "^.{4,6}$") | {"format": "hostname"})
    assert obeys(rules, '"AB-12"') and not obeys(rules, '"AB-1234567"') and not obeys(rules, '"AB-x"')
    parts = [{"properties": {f"{name}{i}": TEXT | {"format": "date"} for i in range(30)}} for name in "ab"]
    assert json_rules({"type": "object", "allOf": parts, "patternProperties": {"^x-": {}, "^y-": {}}})
    assert json_rules(TEXT | {"pattern": ALTERNATIVES, "minLength": 3})


def test_rules_follow_the_thoughts():
    tags = shipped().tokenizer.tags
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
              "additionalProperties": False}
    for opening, good, bad in (
            ("content", ['{"a": 1}', '{"a":1}'], ['{"a": 1}\n', '{"a": "1"}', '{"b": 1}', "hm</think>\n\n{\"a\": 1}"]),
            ("thought", ['hm {\n</think>\n\n{"a": 1}'], ['hm</think>{"a": 1}', 'hm\n</think>\n\n{"a": x}']),
            ("either", ['{"a": 1}', '<think>\nhm\n</think>\n\n{"a": 1}'], ["<think>\nhm", 'hm{"a": 1}'])):
        rules = json_rules(schema, tags, opening)
        assert rules["grammar_after"] == (tags["</think>"] if opening == "thought" else None)
        assert all(obeys(rules, text) for text in good)
        assert not any(obeys(rules, text) for text in bad)


def test_rules_where_tags_are_letters():
    """The same with a vocabulary that has no tag as a token; `obeys` then reads them as what they are, letters."""
    rules = json_rules({"type": "integer"}, {}, "thought")
    assert rules["grammar_after"] is None
    spelt = "<tool_call>\n<function=get_weather>\n</function>\n</tool_call>"
    for text, fits in (("hm</thin></think>\n\n5", True), ("5", False), ("hm</think>\n\nfive", False)):
        assert obeys_in_letters(rules, text) == fits
    rules = Rules({}, "content").calls(XMLCall, [WEATHER], must=True, several=True)
    assert obeys_in_letters(rules, spelt) and obeys_in_letters(rules, f"{spelt}\n{spelt}")
    assert not obeys_in_letters(rules, "Hello")
    assert Rules({}, "content").calls(XMLCall, [WEATHER], must=False, several=True) == {}


def obeys_in_letters(rules, text):
    matcher = LLMatcher(vocabulary(), rules["grammar"], log_level=0)
    ids = [token for letter in text for token in shipped().tokenizer.encode(letter)]
    return all(matcher.consume_token(token) for token in ids) and matcher.is_accepting()


def test_an_answer_in_a_schema_or_a_call():
    shape = Shape("json", {"type": "integer"}, "response_format")
    rules = Rules(shipped().tokenizer.tags, "content").calls(XMLCall, [WEATHER], False, True, shape)
    assert obeys(rules, "5") and obeys(rules, XML) and obeys(rules, f"{XML}\n{XML}")
    assert not obeys(rules, "five") and not obeys(rules, f"5\n{XML}")


@pytest.mark.parametrize("schema, named", [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"), ({"not": {"type": "string"}}, "not"),
    ({"type": "string", "format": "postcode"}, "postcode"), ({"type": "objekt"}, "objekt"),
    ({"type": "string", "pattern": "(?=a)b"}, "look"), ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "$defs/b"),
    ({"minimum": float("inf")}, "finite"), ({"properties": {"a": {"if": {}}}}, "if"),
    ({"type": "string", "minLength": 5, "maxLength": 3}, "minLength"),
    ({"type": "string", "pattern": "a", "maxLength": 0}, "no string fits it$"),
    ({"type": "string", "pattern": "(" * 300}, "regex parse error"),
    ({"oneOf": [NUMBER, {"type": "integer"}]}, "^oneOf, where a value may fit two"),
])
def test_what_cannot_be_enforced_is_named(schema, named):
    with pytest.raises(GrammarError, match=named.replace("$d", r"\$d")) as caught:
        json_rules(schema)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_discriminator_tells_alternatives_apart():
    """In pydantic's schemas it is not required where it has a default; without it, an answer might fit both."""
    pets = {name: {"type": "object", "properties": {"kind": {"const": name, "default": name}, key: {"type": "integer"}},
                   "required": [key], "additionalProperties": False} for name, key in (("cat", "age"), ("dog", "size"))}
    union = {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "discriminator": {"propertyName": "kind"}}
    schema = {"type": "array", "items": union, "$defs": pets}
    rules = json_rules(schema)
    assert obeys(rules, '[{"kind": "cat", "age": 1}, {"kind": "dog", "size": 1}]') and obeys(rules, "[]")
    assert not obeys(rules, '[{"kind": "cat", "size": 1}]') and not obeys(rules, '[{"age": 1}]')
    by_name = {"type": "object", "properties": {"default": union}, "required": ["default"], "$defs": pets}
    assert not obeys(json_rules(by_name), '{"default": {"age": 1}}')
    as_data = {"const": [{"oneOf": [{}], "discriminator": {"propertyName": "a"}}]}
    assert obeys(json_rules(as_data), json.dumps(as_data["const"]))


def test_the_least_number_of_names():
    """A name that the schema does not list may come again: {"a": 1, "a": 1} would pass for two."""
    listed = {"type": "object", "properties": {name: {"const": 1} for name in "ab"}, "additionalProperties": False}
    rules = json_rules(listed | {"minProperties": 1})
    assert obeys(rules, '{"b": 1}') and not obeys(rules, "{}") and not obeys(rules, '{"a": 1, "a": 1}')
    for free in {"additionalProperties": {"const": 1}}, {"patternProperties": {"^x": {}}}, {"required": ["a"]}:
        schema = listed | {"additionalProperties": free.get("additionalProperties", True)} | free
        with pytest.raises(GrammarError, match="minProperties"):
            json_rules({"items": schema | {"minProperties": 2}})
        with pytest.raises(GrammarError, match="minProperties"):
            json_rules({"properties": {"title": schema | {"minProperties": 2}}})
        assert json_rules({"items": schema | {"minProperties": len(free.get("required", []))}})


def test_tools_that_cannot_be_enforced():
    """Whoever demands that a call fits hears of it; otherwise calls are free, or free of that keyword."""
    def rules(tool, must):
        conversation = Conversation([], None, Toolbox([], [tool], must))
        return rules_of(Rules(shipped().tokenizer.tags, "content"), XMLCall, conversation)

    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    assert rules(Tool("f", unique), must=True) and rules(Tool("f", unique), must=False)
    broken = {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#/nowhere"}}}}
    assert rules(Tool("f", broken), must=False) == {}
    for tool, must in ((Tool("f", unique, strict=True), False), (Tool("f", broken), True),
                       (Tool("f", broken, True), False)):
        with pytest.raises(RequestError, match="tools") as caught:
            rules(tool, must)
        assert caught.value.field == "tools"


def test_no_schema_breaks_the_server():
    """Schemas of random junk are ruled, overlooked or refused in words."""
    rng = random.Random(5)
    names = ["type", "properties", "required", "anyOf", "allOf", "oneOf", "enum", "const", "$ref", "$defs", "items",
             "additionalProperties", "title", "a"]
    leaves = [None, True, 5, 0.5, "string", "integer", "object", "#", "#/$defs/a", "#/properties/a", "\n</x>\"", []]

    def junk(depth):
        if depth == 0 or rng.random() < 0.2:
            return rng.choice(leaves)
        if rng.random() < 0.2:
            return [junk(depth - 1) for _ in range(rng.randrange(3))]
        return {rng.choice(names): junk(depth - 1) for _ in range(rng.randrange(5))}

    outcomes = set()
    for i in range(600):
        parameters = {"properties": junk(3), "required": junk(1)} | (one if isinstance(one := junk(4), dict) else {})
        tool = Tool("f", parameters, strict=i % 2 == 0)
        try:
            form = rng.choice([XMLCall, JSONCall])
            rules = rules_of(Rules({}, "content"), form, Conversation([], None, Toolbox([], [tool], True)))
            outcomes.add("grammar" in rules)
        except RequestError as error:
            outcomes.add(error.field)
        for key in (*parameters, "a"):
            read_value("5", tool.schema_of(key))
    assert outcomes == {True, "tools"}


def test_references_through_deep_schemas():
    """Each definition hides the next one as deep as a body may be nested."""
    defs = {f"d{i}": functools.reduce(lambda inner, _: {"anyOf": [inner]}, range(40), {"$ref": f"#/$defs/d{i + 1}"})
            for i in range(300)}
    first = {"$ref": "#/$defs/d0"}
    tool = Tool("f", {"$defs": defs, "properties": {"a": first, "b": {"allOf": [first]}}})
    assert types_of(tool.schema_of("b")) == EVERY_TYPE
    assert read_value("5", tool.schema_of("b")) == 5
    conversation = Conversation([], None, Toolbox([], [tool], must=True))
    assert "grammar" in rules_of(Rules({}, "content"), XMLCall, conversation)


def test_references_that_multiply():
    """Each of a chain of definitions refers twice to the next."""
    defs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(300)}
    assert types_of({"$ref": "#/$defs/d0", "$defs": defs}) == EVERY_TYPE
    few = {f"d{i}": defs[f"d{i}"] for i in range(50)} | {"d50": TEXT}
    assert types_of({"$ref": "#/$defs/d0", "$defs": few}) == {"string"}
