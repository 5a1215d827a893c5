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


def test_real_cards_count_nothing(monkeypatch):
    engine = tiny_engine()
    monkeypatch.setattr(engine.cards[0], "kind", "nvidia", raising=False)
    with pytest.raises(ValueError, match="only emulated cards count"), engine.counting():
        pass
    assert Tally().rows() == [["all", "0", "0.00", "0", ""]]


def test_an_answer_in_pieces():
    engine = tiny_engine()
    pieces = list(engine.stream(ASK, max_tokens=8))
    assert len(pieces) > 1 and "".join(pieces) == engine.chat(ASK, max_tokens=8)
    reading = engine.stream(ASK, max_tokens=1000, ignore_eos=True)
    next(reading)
    reading.close()
    deadline = time.monotonic() + 60
    while engine.stats()["requests_running"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
