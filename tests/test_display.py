"""How an engine shows itself, what is counted of it, and what `generate` says to those who misuse it."""

import re
import time
import warnings

import pytest

from engine import talk
from engine.display import Tally
from engine.request import RequestError
from tests.scripted import ScriptedEngine
from tests.tiny import MODEL, tiny_engine

ASK = [{"role": "user", "content": "Hello"}]


def test_an_engine_shows_itself():
    engine = tiny_engine()
    card, = engine.cards
    assert repr(engine) == f"<qengine {MODEL} on {card.name}, 2 x 2,048 tokens>"
    shown = engine._repr_html_()
    assert shown.count("<tr>") == 5 and card.describe() in shown and "2 x 2,048 tokens" in shown
    assert re.search(r"[\d.]+ MB of weights, [\d.]+ [GM]B free", shown)


def test_what_is_counted_adds_up():
    engine = tiny_engine()
    with engine.counting() as tally:
        text = engine.generate("Hello", max_tokens=2)
    assert text == engine.generate("Hello", max_tokens=2)
    pipes, (*rows, last) = tally.pipes(), tally.rows()
    assert tally.launches.total() > 20 and len(rows) == len(tally.counts) == len(pipes)
    assert int(last[3].replace(",", "")) == sum(sum(own.values()) for own in pipes.values())
    assert pipes["embed_kernel"] and any("dp4a" in own for own in pipes.values())
    assert repr(tally).count("\n") == len(rows) + 1 and "warp instructions" in tally._repr_html_()


def test_a_plot_has_a_bar_for_each_kernel():
    plt = pytest.importorskip("matplotlib.pyplot", reason="Matplotlib is not installed")
    plt.switch_backend("agg")
    engine = tiny_engine()
    with engine.counting() as tally:
        engine.generate("Hello", max_tokens=1)
    axes = tally.plot(most=5)
    assert len(axes.get_yticklabels()) == 5 and axes.get_legend() is not None
    plt.close(axes.figure)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        axes = Tally().plot()               # nothing ran
    assert axes.get_legend() is None
    plt.close(axes.figure)


def test_real_cards_count_nothing(monkeypatch):
    engine = tiny_engine()
    monkeypatch.setattr(engine.cards[0], "kind", "nvidia", raising=False)
    with pytest.raises(ValueError, match="only emulated cards count"), engine.counting():
        pass
    assert Tally().rows() == [["all", "0", "0.00", "0", ""]]


def test_an_answer_in_pieces():
    engine = tiny_engine()
    pieces = list(engine.stream(ASK, thinking=False, max_tokens=8))
    assert len(pieces) > 1 and "".join(pieces) == engine.chat(ASK, thinking=False, max_tokens=8)
    for is_read in True, False:
        reading = engine.stream(ASK, thinking=False, max_tokens=1000, ignore_eos=True)
        if is_read:
            next(reading)
        reading.close()
        wait_for(lambda: not engine.stats()["requests_running"] + engine.stats()["requests_waiting"])


def wait_for(reached):
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stream_begins_before_it_is_read():
    """Two of them run side by side, and what becomes of the messages later changes neither."""
    engine, others, asked = tiny_engine(), [{"role": "user", "content": "Good bye"}], [dict(ASK[0])]
    answers = [engine.chat(messages, thinking=False, max_tokens=8) for messages in (ASK, others)]
    before = engine.stats()["generated_tokens"]
    streams = [engine.stream(messages, thinking=False, max_tokens=8) for messages in (asked, others)]
    asked[0]["content"] = "Never mind"
    wait_for(lambda: engine.stats()["generated_tokens"] - before == 16)
    assert ["".join(pieces) for pieces in streams] == answers


@pytest.mark.parametrize("messages, sampling, said", [
    (ASK, {"temperature": 9}, "temperature"), (ASK, {"max_token": 3}, "is max_tokens"), ("Hello", {}, "messages")])
def test_a_stream_is_refused_at_the_call(messages, sampling, said):
    with pytest.raises(RequestError, match=said):
        tiny_engine().stream(messages, **sampling)


@pytest.mark.parametrize("script, thinking, thoughts, text", [
    ("17 * 3\nis 51.\n</think>\n\nIt is 51.", True, "17 * 3\nis 51.", "It is 51."),
    ("It is 51.\n", False, "", "It is 51.\n")])
def test_thoughts_are_apart_from_the_answer(script, thinking, thoughts, text):
    """In a stream, too, where they come as they are thought."""
    engine, heard = ScriptedEngine(script), []
    answer = talk.chat(engine, ASK, thinking=thinking, thinking_budget=100)
    assert isinstance(answer, str) and answer == text and answer.thoughts == thoughts
    assert engine.requests[0].limits_thoughts == thinking           # where they end is told
    assert "".join(talk.stream(engine, ASK, thinking, on_thought=heard.append)) == text
    assert "".join(heard) == thoughts and bool(len(heard) > 1) == thinking
    assert "".join(talk.stream(engine, ASK, thinking)) == text


def test_an_answer_of_thoughts_alone_is_told():
    with pytest.warns(UserWarning, match=r"^the answer ended among its thoughts, .* thinking=False$"):
        answer = talk.chat(ScriptedEngine("still thinking"), ASK, thinking=True)
    assert answer == "" and answer.thoughts == "still thinking"


@pytest.mark.parametrize("call, said", [
    (lambda engine: engine.chat(ASK, thinking="on"), "^thinking is True, False or None, and not 'on'$"),
    (lambda engine: engine.chat(ASK, thinking=1), "^thinking is True, False or None, and not 1$"),
    (lambda engine: engine.look([{"role": "user", "contnet": "hi"}]),
     r"^messages\[0\] has no content; it has role, contnet$"),
    (lambda engine: engine.chat([{1: 2}]), r"^messages\[0\] has no content; it has 1$"),
    (lambda engine: engine.chat([{}]), r"^messages\[0\] has no content; it has nothing$"),
    (lambda engine: engine.chat([*ASK, {"role": "user", "content": None}]), r"^messages\[1\] has no content; it has"),
    (lambda engine: engine.chat(ASK, max_token=3), "^max_token is no field of a request; is max_tokens meant\\?$"),
    (lambda engine: engine.generate("a", xyz=3), "^xyz is no field of a request$"),
    (lambda engine: engine.generate("a", stop=3), "^'stop' may hold 64 strings, each of 1 to 1024 letters$"),
    (lambda engine: engine.generate("a", stop=["a", None]), "^'stop' may hold 64 strings"),
    (lambda engine: engine.generate("a", stop_token_ids=-3), "^'stop_token_ids' may hold 64 token ids"),
    *[(lambda engine, prompt=prompt: engine.generate(prompt), "^a prompt is a text or a list of token ids, and not ")
      for prompt in (5, None, ["a"], [1.5], b"hello", bytearray(b"a"), memoryview(b"a"), {3, 4})]])
def test_slips_are_told_in_a_sentence(call, said):
    with pytest.raises(RequestError, match=said):
        call(tiny_engine())


@pytest.mark.parametrize("messages", ["text", ASK[0], 3], ids=["text", "a message", "a number"])
def test_chat_takes_messages(messages):
    with pytest.raises(RequestError, match=r'^chat takes a list of messages; for a text: engine\.chat\(\[\{"role"'):
        tiny_engine().chat(messages)


@pytest.mark.parametrize("prompt", [ASK, ASK[0]], ids=["messages", "a message"])
def test_messages_are_for_chat(prompt):
    with pytest.raises(RequestError, match=r"for messages: engine\.chat\(messages\)"):
        tiny_engine().generate(prompt)


def test_a_model_of_conversations_that_says_nothing():
    silent = ScriptedEngine("")
    with pytest.warns(UserWarning, match=r"try engine\.chat\("):
        assert talk.generate(silent, "Hello") == ""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert talk.generate(silent, [5]) == "" and talk.generate(ScriptedEngine("Yes"), "Hello") == "Yes"
