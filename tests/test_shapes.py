"""What the text of an answer has to be (api/grammar.py, SHAPES): every kind alone, after thoughts and beside tools."""

import pytest

from api.chat import Conversation, Toolbox, rules_of
from api.grammar import GBNF_LETTERS, MAX_REASON, SHAPES, Rules, Shape
from api.tools import JSONCall, Tool
from engine.request import RequestError
from tests.clients import CHAT, HI, TEXT, app_of
from tests.scripted import ScriptedEngine, obeys, shipped

DATE = r"""
root ::= "on " date ("," | [;!])?
date ::= digit{4} "-" two-digits "-" two-digits     # GBNF takes hyphens in names
two-digits ::= digit digit
digit ::= [0-9]
"""
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
LOOK = Tool("look", {"type": "object", "properties": {}, "additionalProperties": False})

# Of each kind: a value, texts of that shape, texts of another.
GOOD = {
    "json": ({"type": "integer", "minimum": 10}, ["10", "250"], ["9", "ten", "10 "]),
    "regex": (r"[a-c]+/\d{2}\n?|none", ["ab/12", "ab/12\n", "none"], ["ab/1", "no", "none ", " none"]),
    "choice": (["yes", "yes/no", "a\n\\b", "\x7f", "1+1=\"2\""], ["yes", "yes/no", "a\n\\b", "\x7f", '1+1="2"'],
               ["yes/", "no", "1+1=2", ""]),
    "gbnf": (DATE, ["on 2026-11-22", "on 2026-11-22;"], ["on 2026-1-22", "2026-11-22", "on 2026-11-22,,"]),
    "lark": ('start: "on " day ("," day)* // "}"\nday: "Mon" | "Tue"\ncall: "x"',
             ["on Mon", "on Tue,Mon"], ["on", "on Wed", "x"])}

# Of each kind: a value that cannot be used, and what the refusal says of it.
BAD = {
    "json": ({"type": "string", "pattern": "(?=a)b"}, "look-around"), "regex": ("a(b", "unclosed group"),
    "choice": ([], "no text to choose"), "gbnf": ("root ::= 5::", "Rule '5' not found|Expected"),
    "lark": ("start: a\na: b", r"at 2\(4\): unknown name")}


def test_every_kind_has_its_cases():
    assert GOOD.keys() == BAD.keys() == SHAPES.keys()


@pytest.mark.parametrize("tools", [None, Toolbox([], [LOOK])], ids=["alone", "beside tools"])
@pytest.mark.parametrize("opening, thoughts", [
    ("content", [""]), ("thought", ["hm\n</think>\n\n"]), ("either", ["", "<think>\nhm\n</think>\n\n"])])
@pytest.mark.parametrize("kind", SHAPES)
def test_texts_of_a_shape(kind, opening, thoughts, tools):
    value, good, bad = GOOD[kind]
    conversation = Conversation([], None, tools, Shape(kind, value, "f"))
    rules = rules_of(Rules(shipped().tokenizer.tags, opening), JSONCall, conversation)
    for before in thoughts:
        assert all(obeys(rules, before + text) for text in good)
        assert not any(obeys(rules, before + text) for text in bad)
        assert obeys(rules, before + CALL) == (tools is not None)


@pytest.mark.parametrize("kind", SHAPES)
def test_what_cannot_be_used_is_refused_by_its_field(kind):
    value, words = BAD[kind]
    with pytest.raises(RequestError, match=f"^'my.field' cannot be enforced: .*({words})") as caught:
        rules_of(Rules({}, "content"), None, Conversation([], None, None, Shape(kind, value, "my.field")))
    assert caught.value.field == "my.field"
    assert len(str(caught.value)) < MAX_REASON + 50 and "\n" not in str(caught.value)


@pytest.mark.parametrize("gbnf, good, bad", [
    (r'root ::= "\u00e9\U0001F600\x41\n" [\u4e00-\u9fff]', "é😀A\n中", "é😀A\na"),
    (r'root ::= [^\x5d\u005C"\\]+', "ab", "a]"), (r'root ::= "a\\x41"', r"a\x41", "aA")])
def test_escapes_of_gbnf(gbnf, good, bad):
    check_gbnf(gbnf, good, bad)


@pytest.mark.parametrize("gbnf, good, bad", [
    ('root ::= "a"{2} "b"{1,2} "c"{2,}', "aabccc", "aabbbcc"), ('root ::= ("a"{2}){3}', "aaaaaa", "aaaaa"),
    ('root ::= ( ("a"? )+ # )\n "b" )* x\nx ::= ("y"{1,2}\n){2}', "aabyyy", "by"),
    (r'root ::= ("*)\"" [+)\]]){2}', '*)"]*)")', '*) "]*) ")')])
def test_repetitions_of_gbnf(gbnf, good, bad):
    """The first grammar always worked. A repeated group that is one repetition used to be refused."""
    check_gbnf(gbnf, good, bad)


def check_gbnf(gbnf, good, bad):
    rules = Rules(shipped().tokenizer.tags, "content").text(Shape("gbnf", gbnf, "grammar"))
    assert obeys(rules, good) and not obeys(rules, bad)


@pytest.mark.parametrize("gbnf, words", [
    (r'root ::= "\ud800"', "no character"), (r'root ::= "\U00110000"', "no character"),
    ("root ::= " + "(" * 5000, "recursion"),
    ("", "No 'root' rule"), ('root ::= "a' + "a" * GBNF_LETTERS + '"', "more than")])
def test_gbnf_that_is_refused(gbnf, words):
    with pytest.raises(RequestError, match=words):
        rules_of(Rules({}, "content"), None, Conversation([], None, None, Shape("gbnf", gbnf, "grammar")))


class Refusing(ScriptedEngine):
    """An engine that cannot follow any grammar."""

    def submit(self, request):
        raise RequestError("grammar", "the grammar cannot be followed: it is too long")


@pytest.mark.parametrize("path, body", [(CHAT, {"messages": [HI]}), (TEXT, {"prompt": "Hi"})])
@pytest.mark.parametrize("field, value", [("guided_regex", "a+"), ("grammar", 'root ::= "a"'), ("grammar", "root ::=")])
def test_what_the_engine_says_of_a_grammar_is_said_of_the_field(path, body, field, value):
    answer = app_of(Refusing()).test_client().post(path, json=body | {field: value})
    assert answer.status_code == 400 and answer.json["error"]["param"] == field
    assert answer.json["error"]["message"].count("cannot be enforced") == 1
