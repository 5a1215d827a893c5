"""The timeline: what is in it, in which order, and that nothing is left of it."""

import json
import threading

import numpy as np
import pytest

from kernels import trace as trace_module
from kernels.card import CardError
from kernels.emulated.card import EmulatedCard
from kernels.open import open_cards
from kernels.trace import HOST, draw, joined, tracing
from tests.card_cases import N, of_kind
from tests.doubling import double


def test_trace_is_what_viewers_read(card, tmp_path):
    x = card.zeros(N, np.float32, "x")
    with tracing([card]) as trace:
        for _ in range(3):
            card.launch(double, 4, 256, x, N)
            card.download(x)
    trace.write(tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text())
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in data["traceEvents"] if e["name"] == "process_name"}
    bars = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert len({tid for _, tid in names}) == len(names) and 0 not in {n for row in names for n in row}
    assert min(bar["ts"] for bar in bars) == 0 and all(bar["dur"] >= 0 for bar in bars)
    assert {(processes[b["pid"]], names[b["pid"], b["tid"]]) for b in bars} >= {(card.name, "default")}
    for row in names:
        mine = [bar for bar in bars if (bar["pid"], bar["tid"]) == row]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 2e-3 for a, b in zip(mine, mine[1:]))    # µs: both are rounded
    assert data["otherData"][card.name] == card.describe()
    draw(data, tmp_path / "trace.svg")
    assert "default" in (tmp_path / "trace.svg").read_text()


@pytest.mark.parametrize("late", [False, True])
def test_cards_on_one_clock(late):
    """What waits for another card begins after it, and a slow link is seen as such."""
    first, second = open_cards("emulated:2@0.05", late=late)
    host, x, y = first.pinned(N, np.float32), first.zeros(N, np.float32, "x"), second.zeros(N, np.float32, "y")
    with tracing([first, second]) as trace:
        first.launch(double, 4, 256, x, N)
        first.copy_out(host, x)
        first.default_stream.record().synchronize()
        second.copy_in(y, host)
        second.launch(double, 4, 256, y, N)
        second.synchronize()
    out, into = sorted(of_kind(trace, "copy"), key=lambda span: span.start)
    assert (out.process, into.process) == (first.name, second.name) and out.end <= into.start
    assert min(out.end - out.start, into.end - into.start) >= 4 * N / 0.05e9
    waited, = [span for span in trace.spans if span.process == HOST]
    assert waited.row == threading.current_thread().name and waited.name == f"for {first.name}"


def test_trace_of_a_card_that_breaks(tmp_path):
    card = EmulatedCard(9)
    x = card.zeros(N, np.float32, "x")
    with pytest.raises(CardError), tracing([card]) as trace:
        card.launch(double, 4, 256, x, N)
        card.default_stream.synchronize()
        card.default_stream.push(lambda: 1 / 0)
        card.default_stream.synchronize()
    assert [span.name for span in of_kind(trace, "kernel")] == ["double"]
    trace.write(tmp_path / "trace.json")
    assert "division" in json.loads((tmp_path / "trace.json").read_text())["otherData"][f"{card.name} failed"]


def test_trace_of_a_card_that_hangs(monkeypatch):
    """What was done before is there, and nobody waits for the rest."""
    monkeypatch.setattr(trace_module, "LAST_WAIT", 0.5)
    card, gate = EmulatedCard(9), threading.Event()
    x = card.zeros(N, np.float32, "x")
    with tracing([card]) as trace:
        card.launch(double, 4, 256, x, N)
        card.default_stream.synchronize()
        card.default_stream.push(gate.wait)
        card.launch(double, 4, 256, x, N)
    gate.set()
    assert [span.name for span in of_kind(trace, "kernel")] == ["double"]
    assert trace.facts[f"{card.name} failed"] == f"{card.name} has not answered for 0.5 s"


def test_a_long_trace_keeps_the_end_and_says_so(card, monkeypatch):
    monkeypatch.setattr(trace_module, "MOST", 3)
    x = card.zeros(N, np.float32, "x")
    with tracing([card]) as trace:
        for _ in range(4):
            card.launch(double, 4, 256, x, N)
        card.fill(x, 0)
    assert [span.name for span in of_kind(trace, "kernel")] == ["double", "double", "fill: x"]
    assert trace.facts[trace_module.LEFT_OUT] == "the first 2 operations"


def test_joined_bars():
    assert joined([(4, 5), (0, 1), (1.5, 2)], 1) == [[0, 2], [4, 5]] and joined([], 1) == []
