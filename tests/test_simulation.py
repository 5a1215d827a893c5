"""benchmarks/across_cards.py and drafts.py: one block of each launch stands for all, a few layers stand for a model,
and a timeline of the engine is told again."""

import json

import pytest

import qengine
from benchmarks import across_cards, drafts
from engine.plan import Demand, schedule
from kernels.emulated.cards import CMP_100_210
from kernels.trace import tracing

ROWS, START = 128, 256


def test_a_block_of_each_launch_tells_what_all_take(monkeypatch):
    monkeypatch.setattr(across_cards, "ROWS", (ROWS,))
    layers = across_cards.Layers(qengine.Config.synthetic("tiny"), CMP_100_210)
    for kind, index in ("linear", 0), ("attention", 1):
        sampled = layers.seconds(kind, ROWS, START + ROWS / 2)
        layers.stage.model.layers, layers.stage.model.first_layer = layers.layers[index:index + 1], index
        qengine.set_rows(layers.stage.inputs, [0] * ROWS, [0] * ROWS, range(START, START + ROWS))
        with layers.card.counting() as log:
            layers.stage.launch_prompt(ROWS)
        assert sampled == pytest.approx(sum(launch.estimate(CMP_100_210).seconds for launch in log), rel=0.1)


def test_two_layers_stand_for_a_decode_step():
    """As benchmarks/drafts.py counts them. A step reads all weights, so it takes as long as that, and not much
    longer."""
    steps = drafts.Steps("synthetic:0.8b", CMP_100_210, 300)
    both, *alone = [steps.estimated(indices, 1, 0) for indices in (range(2), [0], [1])]
    assert both > max(alone) and alone[0] != alone[1]
    read = qengine.make_planner(steps.opened, [steps.card], Demand(512)).plan.stages[0].weights
    least = read / CMP_100_210.read_bandwidth
    assert least < steps.seconds(1, 0) < 2 * least


def test_a_timeline_is_told_again(tmp_path, capsys):
    engine = qengine.load("synthetic:tiny", card="emulated:2@0.02", ctx=2048, chunk=128, progress=False)
    prompts = [list(range(1000)), list(range(5, 700))]
    with tracing(engine.cards) as trace:
        for prompt in prompts:
            engine.submit(qengine.Request(prompt, max_tokens=3)).wait()
    engine.close()
    trace.write(tmp_path / "trace.json")
    passes, hops, seconds = across_cards.measured_times(json.loads((tmp_path / "trace.json").read_text()))
    assert len(passes) == 2 and len(passes[0]) == len(passes[1]) == len(hops[0]) >= 1000 / 128
    copies = 4 * engine.config.hidden_dim * 1000 / 0.02e9               # seconds, in each direction
    assert all(sum(direction) >= copies for direction in zip(*hops[0]))
    assert schedule(passes, hops).seconds == pytest.approx(seconds, rel=0.3)
    assert across_cards.compare(tmp_path / "trace.json") == 0
    assert "measured" in capsys.readouterr().out
