"""Answers cut into thoughts, text and calls: the same parts however the tokens cut the text."""

import json
import random

import pytest

from api.tools import JSONCall, Tool, XMLCall
from engine.reply import TAGS, Call, CallArguments, CallStart, Content, Cutter, Message, Reply, Thought, opening_of
from engine.request import Generation, Request
from engine.tokenizer import StreamDecoder, Tokenizer
from tests.calls import CALL, JSON, WEATHER, XML
from tests.scripted import shipped

TOOLS = {"get_weather": WEATHER}


class Letters(Tokenizer):
    """A token is a letter, or any text that is asked for; tags are letters, too, unless they are named."""

    def __init__(self, tags=()):
        super().__init__([b""], {}, [], {})
        self.tags = {tag: i for i, tag in enumerate(tags)}
        self.pieces = [tag.encode() for tag in tags]

    def token(self, text: str) -> int:
        self.pieces.append(text.encode())
        return len(self.pieces) - 1

    def stream_decoder(self, special=False):
        return StreamDecoder(self.pieces)


def read(pieces, tags=(), opening="content", form=XMLCall, tools=TOOLS, ruled=False, stop=(), reason="stop"):
    """(blocks of the answer, Reply) when the text comes in these pieces; a piece that is named as a tag is its
    token."""
    tokenizer = Letters(tags)
    reply, message = Reply(tokenizer, opening, form, tools, ruled), Message()
    for delta in generated(tokenizer, pieces, stop, reason):
        for part in reply.push(delta):
            message.add(part)
    return [(block.name, json.loads(block.arguments)) if isinstance(block, Call) else block
            for block in message.blocks], reply


def generated(tokenizer, pieces, stop=(), reason="stop"):
    """What a generation makes of them."""
    generation = Generation(Request([0], stop=stop), tokenizer)
    for i, piece in enumerate(pieces):
        token = tokenizer.tags[piece] if piece in tokenizer.tags else tokenizer.token(piece)
        if generation.push(token, reason if i == len(pieces) - 1 else None):
            break
    generation.close()
    return generation


def cuts(text, rng):
    """The text in one piece, in letters, in two pieces cut anywhere, and in random pieces."""
    yield [text]
    yield list(text)
    yield from ([text[:i], text[i:]] for i in range(1, len(text)))
    for _ in range(20):
        at = sorted(rng.sample(range(1, len(text)), min(len(text) - 1, rng.randrange(1, 12))))
        yield [text[i:j] for i, j in zip([0, *at], [*at, len(text)])]


ANSWERS = [      # opening, form, text, blocks
    ("content", XMLCall, "Hello.\n\nBye.\n", [Content("Hello.\n\nBye.\n")]),
    ("content", XMLCall, "  a <b> </b> <tool", [Content("  a <b> </b> <tool")]),
    ("content", XMLCall, "1 < 2 <tool_cat> <think> </think>", [Content("1 < 2 <tool_cat> <think> </think>")]),
    ("thought", XMLCall, "hm\nyes\n</think>\n\nHello.", [Thought("hm\nyes"), Content("Hello.")]),
    ("thought", XMLCall, "\n</think>\n\nHello.", [Content("Hello.")]),
    ("thought", XMLCall, "endless\n\n", [Thought("endless\n\n")]),
    ("either", XMLCall, "<think>\nhm\n</think>\n\nHello.", [Thought("hm"), Content("Hello.")]),
    ("either", XMLCall, "\n\n<think>hm</think>Hello.", [Thought("hm"), Content("Hello.")]),
    ("either", XMLCall, "Hello <think>", [Content("Hello <think>")]),
    ("content", XMLCall, "<think>hm</think>Hello.", [Thought("hm"), Content("Hello.")]),
    ("content", XMLCall, XML, [CALL]),
    ("content", JSONCall, JSON, [CALL]),
    ("content", XMLCall, f"I look.\n\n{XML}\n{XML}\n", [Content("I look."), CALL, CALL]),
    ("content", JSONCall, f"I look.\n\n{JSON}\n{JSON}\n", [Content("I look."), CALL, CALL]),
    ("thought", XMLCall, f"hm\n</think>\n\n{XML}", [Thought("hm"), CALL]),
    ("thought", XMLCall, f"hm\n{XML}", [Thought("hm"), CALL]),              # the thoughts never end
    ("content", XMLCall, f"{XML}\n\nThere.", [CALL, Content("There.")]),
    ("content", XMLCall, XML.removesuffix("\n</tool_call>"), [CALL]),
    ("content", JSONCall, JSON.removesuffix("\n</tool_call>"), [CALL]),
    ("content", XMLCall, "<tool_call>\n<function=now>\n</function>\n</tool_call>", [("now", {})]),
    ("content", JSONCall, '<tool_call>{"arguments": {"days": "3"}, "name": "get_weather"}</tool_call>',
     [("get_weather", {"days": 3})]),
]
BROKEN = [       # form, text that is no call
    (XMLCall, "<tool_call>\nget_weather\n</tool_call>"),
    (XMLCall, "<tool_call> is a tag."),
    (XMLCall, "a\n\n<tool_call>\n\n"),
    (XMLCall, "<tool_call>\n<function=>\n</function>\n</tool_call>"),
    (XMLCall, "<tool_call>\n<function=a<b>\n</function>\n</tool_call>"),
    (XMLCall, "<tool_call>\n<function=f>\nwhat?\n</function>\n</tool_call>"),
    (XMLCall, "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>"),
    (XMLCall, "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n</function>"),
    (XMLCall, "<tool_call>\n<function=f>\n</function>\nmore\n</tool_call> and on"),
    (XMLCall, "<tool_call>\n<function=f>\n<parameter=a>\n<tool_call>"),
    (XMLCall, "<tool_call></tool_call>"),
    (JSONCall, '<tool_call>\n{"name": "f", "arguments": {"a": tru}}\n</tool_call>'),
    (JSONCall, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}}\n</tool_call>'),
    (JSONCall, '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>'),
    (JSONCall, '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>'),
    (JSONCall, '<tool_call>\n{"name": "f", "arguments": {}, "more": 1}\n</tool_call>'),
    (JSONCall, '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>'),
    (JSONCall, '<tool_call>\n["f"]\n</tool_call>'),
    (JSONCall, "<tool_call></tool_call>"),
]


@pytest.mark.parametrize("opening, form, text, expected", ANSWERS)
def test_answers_read_alike_however_they_are_cut(opening, form, text, expected):
    for pieces in cuts(text, random.Random(1)):
        assert read(pieces, opening=opening, form=form)[0] == expected, pieces


@pytest.mark.parametrize("form, text", BROKEN)
def test_what_is_no_call_comes_back_whole(form, text):
    for pieces in cuts(text, random.Random(2)):
        assert read(pieces, form=form)[0] == [Content(text)], pieces


@pytest.mark.parametrize("form, text", [(XMLCall, XML), (JSONCall, JSON)])
@pytest.mark.parametrize("ruled", [False, True])
def test_an_answer_that_ends_anywhere_loses_nothing(form, text, ruled):
    """Under a grammar a call that was cut off is a call; otherwise it is text."""
    for end in range(1, len(text)):
        said = "Look: " + text[:end]
        reply = Reply(tokenizer := Letters(), "content", form, TOOLS, ruled)
        parts = [part for delta in generated(tokenizer, list(said), reason="length") for part in reply.push(delta)]
        if not any(isinstance(part, CallStart) for part in parts):
            assert "".join(part.text for part in parts) == said
        else:
            arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
            assert '{"city": "S\u00e3o \\"Paulo\\"", "days": 3}'.startswith(arguments)
            assert ruled or "\n</tool_call>".endswith(text[end:])


def test_what_only_looks_like_a_call_is_not_held_back():
    """Each letter comes as soon as it cannot belong to one."""
    for said, seen in (("a <tool_cal", "a "), ("a <tool_call>\n", "a "), ("a <tool_call>\nx", "a <tool_call>\nx"),
                       ("a <tool_call>\n<func", "a "), ("a <tool_call>\n<fund", "a <tool_call>\n<fund"),
                       ("a < b", "a < b"),
                       ("a <tool_call>\n<function=f>\n<pa", "a "),
                       ("a <tool_call>\n<function=f>\nx", "a <tool_call>\n<function=f>\nx")):
        reply = Reply(tokenizer := Letters(), "content", XMLCall, TOOLS)
        parts = [part for delta in generated(tokenizer, list(said), reason=None) for part in reply.push(delta)]
        assert "".join(part.text for part in parts) == seen


def test_calls_come_in_pieces_under_a_grammar():
    """Letters of strings as they come, other values when they are whole; together what the whole call is."""
    for form, text in (XMLCall, XML), (JSONCall, JSON):
        reply = Reply(tokenizer := Letters(), "content", form, TOOLS, ruled=True)
        parts = [part for delta in generated(tokenizer, list(text)) for part in reply.push(delta)]
        start, *rest = parts
        assert isinstance(start, CallStart) and (start.index, start.name) == (0, "get_weather")
        assert all(isinstance(part, CallArguments) for part in rest) and len(rest) > 12
        assert json.loads("".join(part.text for part in rest)) == CALL[1]
        assert reply.n_calls == 1


@pytest.mark.parametrize("ruled", [False, True])
def test_lists_and_objects_come_in_pieces_under_a_grammar(ruled):
    """A list that max_tokens cuts is not lost. Without a grammar it may be Python's and is read when it is whole."""
    tools = {"plan": Tool("plan", {"properties": {"tasks": {"type": "array"}, "more": {"type": "object"}}})}
    text = ('<tool_call>\n<function=plan>\n<parameter=tasks>\n["a", {"b": true}]\n</parameter>\n'
            '<parameter=more>\n{"c": "</para"}\n</parameter>\n</function>\n</tool_call>')
    reply, seen = Reply(tokenizer := Letters(), "content", XMLCall, tools, ruled), ""
    for n, delta in enumerate(generated(tokenizer, list(text)), start=1):
        seen += "".join(part.text for part in reply.push(delta) if isinstance(part, CallArguments))
        if n == text.index("true"):
            assert seen == ('{"tasks": ["a", {"b": ' if ruled else "")
    assert json.loads(seen) == {"tasks": ["a", {"b": True}], "more": {"c": "</para"}}


def test_a_tag_is_a_token_where_the_vocabulary_has_it():
    said = ["hm </thi", "nk> ", "</think>", "\n\n", "<tool", "_call> ", "<tool_call>",
            "\n<function=now>\n</function>\n"]
    blocks, reply = read([*said, "</tool_call>"], TAGS, "thought")
    assert blocks == [Thought("hm </think> "), Content("<tool_call> "), ("now", {})]
    assert reply.n_thinking == 3


def test_without_tools_calls_are_text():
    assert read([XML], tools=None)[0] == [Content(XML)]


def test_an_unknown_tool_is_called_as_it_is_written():
    text = ("<tool_call>\n<function=other>\n<parameter=n>\n3\n</parameter>\n"
            "<parameter=s>\nx y\n</parameter>\n</function>\n</tool_call>")
    assert read([text])[0] == [("other", {"n": 3, "s": "x y"})]


@pytest.mark.parametrize("tags", [(), ("</think>",)])
def test_stop_strings_that_hold_tags_back(tags):
    """A tag is shown later than its token where a stop string may begin before it."""
    for stop, expected in (("\n</think> never", [Thought("hm"), Content("Hello.")]), ("\n\nHe", [Thought("hm")])):
        blocks, reply = read(["hm", "\n", "</think>", "\n", "\nHel", "lo."], tags, "thought", stop=(stop, "unseen"))
        assert blocks == expected
        assert reply.stopped_by(("unseen", stop)) == (stop if len(expected) == 1 else None)


def test_cutter_gives_back_every_letter():
    rng = random.Random(3)
    for _ in range(300):
        tags = rng.sample(TAGS, rng.randrange(5))
        pieces = rng.choices([*TAGS, "<", "th", "ink>", "\u00e9", "x\n", "/"], k=12)
        cutter = Cutter(tokenizer := Letters(tags))
        stops = ["<tool_call>x", "\u00e9\u00e9"]
        shown = generated(tokenizer, pieces, stops)
        cut = [one for delta in shown for one in cutter.push(delta)] + [(cutter.flush(), False)]
        said = "".join(pieces)
        ends = [at for at in map(said.find, stops) if at >= 0]
        assert "".join(text for text, _ in cut) == (said[:min(ends)] if ends else said)
        assert all(text in TAGS for text, is_tag in cut if is_tag)


@pytest.mark.parametrize("thinking, opening", [(True, "thought"), (False, "content"), (None, "content")])
def test_how_an_answer_begins(thinking, opening):
    template = shipped().template
    prompt = template.render([{"role": "user", "content": "Hi"}], enable_thinking=thinking)
    assert opening_of(prompt, template.source, thinking) == opening
    assert opening_of("user: hi\nassistant:", "no tags", None) == "content"
    assert opening_of("user: hi\nassistant:", "it may have </think>", None) == "either"
    assert opening_of("user: hi\nassistant:", "it may have </think>", False) == "content"
