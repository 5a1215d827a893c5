"""Parts of a prompt's pass that run beside each other: the same bits, whatever the parts and whoever is late."""

import collections
import contextlib
import random
import time

import numpy as np
import pytest

import qengine
from cli.bench import Bench
from kernels import q8_gemm
from kernels.emulated.card import EmulatedCard
from tests.models import TINY, load_tiny, write_as_float32
from tests.test_engine import stage_of

N = 700
SPLITS = [(64, 636), (256, 256, 188), (192, 64, 320, 124), (192, 192, 128, 128, 60)]


def prompt(seed, n=N):
    return np.random.default_rng(seed).integers(0, 4000, n).tolist()


def load(card, model=TINY, lanes=None, **options):
    """An engine whose passes of N rows run in these lanes, and those of other lengths in random ones."""
    options = {"ctx": 1024, "slots": 2, "chunk": 704, "progress": False} | options
    engine = qengine.load(str(model), card=card, **options)
    draw = random.Random(0)

    def chosen(n):
        cut = [64 * draw.randint(1, 4) for _ in range(4)] if n != N else lanes
        ends = [end for end in np.cumsum(cut).tolist() if end < n]
        return np.diff([0, *ends, n]).tolist()

    for stage in engine.pipeline.stages if lanes else ():
        stage.lane_rows = chosen
    return engine


def said(engine):
    """Logits of a text, and a conversation's tokens: its turns begin at checkpoints inside of passes."""
    logits, text, turns = engine.evaluate(prompt(1)), prompt(2), []
    for n in 30, 90, 200:
        generation = engine.submit(qengine.Request(text, max_tokens=8, ignore_eos=True))
        turns.append([event.token_id for event in generation])
        text = text + turns[-1] + prompt(n, n)
    return logits, turns, generation.n_cached


@pytest.fixture(scope="module")
def alone(card):
    with contextlib.closing(load(card, lanes=(N,), chunk=64)) as engine:
        yield said(engine)


def assert_same(found, wanted):
    np.testing.assert_array_equal(found[0], wanted[0])
    assert found[1:] == wanted[1:] and found[2] > 0


@pytest.mark.parametrize("lanes", SPLITS, ids=str)
def test_lanes_do_not_change_a_bit(card, alone, lanes):
    with contextlib.closing(load(card, lanes=lanes)) as engine:
        assert_same(said(engine), alone)


@pytest.mark.parametrize("late", range(3))
def test_a_later_part_waits_for_an_earlier_one(alone, late):
    """Whichever lane begins late, and copies as late as their events allow."""
    engine = load(EmulatedCard(late=True), lanes=(192, 192, 316))
    stage, launch = engine.pipeline.last, qengine.Stage.launch_prompt

    def launch_prompt(*arguments):
        stage.lanes[late].push(lambda: time.sleep(0.1))
        launch(stage, *arguments)

    stage.launch_prompt = launch_prompt
    with contextlib.closing(engine):
        assert_same(said(engine), alone)


def test_lanes_of_a_model_in_float32(card, tmp_path):
    """Its activations are copied, not quantised: each part's own."""
    write_as_float32(TINY, tmp_path / "float32.gguf")
    logits = []
    for lanes in None, (192, 192, 316):
        with contextlib.closing(load(card, tmp_path / "float32.gguf", lanes)) as engine:
            logits.append(engine.evaluate(prompt(3)))
    np.testing.assert_array_equal(*logits)


def test_states_are_kept_where_they_are_asked_for(card):
    """Within a part, at its end, at the end of all."""
    marks, kept = [(64, 0), (192, 1), (384, 2), (640, 3)], []
    for lanes in None, (192, 192, 256):
        with contextlib.closing(load(card, lanes=lanes)) as engine:
            engine.pipeline.set_pages(0, range(11))
            for stage in engine.pipeline.stages if lanes else ():
                stage.lane_rows = lambda n: list(lanes)
            engine.pipeline.start(0, qengine.Request([0]))
            engine.pipeline.prefill(prompt(6, 640), 0, 0, marks)
            engine.pipeline.settle()
            states = engine.pipeline.last.cache.recurrent.values()
            kept.append([card.download(array[2 + number]) for state in states for array in (state.memory, state.conv)
                         for _, number in marks])
    for one, other in zip(*kept):
        np.testing.assert_array_equal(one, other)
        assert one.any()


def test_lanes_on_two_cards(alone):
    cards = [EmulatedCard(number, late=True) for number in range(2)]
    with contextlib.closing(load(cards, lanes=(256, 64, 380), split=[1, 2])) as engine:
        assert_same(said(engine), alone)


def test_a_tap_sees_all_rows(card):
    """Of each layer, one after the other, though the pass would run in lanes."""
    taps = []
    for lanes in (N,), (192, 508):
        seen = {}
        with contextlib.closing(load(card, lanes=lanes)) as engine:
            engine.evaluate(prompt(4), tap=lambda name, x: seen.update({name: card.download(x[:N])}))
        taps.append(seen)
    alone, beside = taps
    assert list(alone) == list(beside) == ["embedding", "layer 0", "layer 1", "layer 2"]
    for one, other in zip(alone.values(), beside.values()):
        np.testing.assert_array_equal(one, other)
        assert np.isfinite(one).all()


def stage_of_9b(kind, row_operations=13_836_992_512):
    """A Stage that knows its card, and how many operations its 32 layers take for a row: those of a 9B."""
    stage = stage_of(132, 4096, 4096)
    stage.card.kind, stage.speed.dot = kind, 133.8e12
    stage.layers, stage.row_operations = range(32), row_operations
    return stage


@pytest.mark.parametrize("kind, n, lanes", [
    ("cuda", 1, [1]), ("cuda", 297, [297]), ("cuda", 383, [383]), ("cuda", 384, [192, 192]), ("cuda", 512, [256, 256]),
    ("cuda", 520, [256, 256, 8]), ("cuda", 1160, [320, 320, 256, 256, 8]), ("cuda", 4096, [1024] * 4),
    ("emulated", 4096, [4096])])
def test_rows_of_lanes(kind, n, lanes):
    assert stage_of_9b(kind).lane_rows(n) == lanes


@pytest.mark.parametrize("products", [{}, {(48, 4096): 24, (4096, 4096): 32}])
def test_lanes_of_other_files(products):
    """Of float matrices alone, and with small ones of a type of their own beside the large."""
    stage = stage_of_9b("cuda")
    stage.products = products
    assert stage.lane_rows(1160) == [320, 320, 256, 256, 8]
    assert (stage.pass_time(1160) > 0) == bool(products)


def test_lanes_leave_few_rows_out_of_whole_tiles():
    stage = stage_of_9b("cuda")
    for n in range(1, 4097):
        *whole, last = stage.lane_rows(n)
        assert sum(whole) + last == n and not any(rows % 64 for rows in whole) and len(whole) <= qengine.LANES
        assert not whole or last % 64 == 0 or last < 64


def test_no_more_lanes_than_the_host_can_feed():
    """1,160 tokens of a 0.8B run for 23 ms; queueing them in five lanes took 31."""
    small = stage_of_9b("cuda", row_operations=992_000_000)
    small.layers = range(24)
    assert [len(small.lane_rows(n)) for n in (1160, 2048, 4096)] == [1, 1, 3]
    slow = stage_of_9b("cuda", row_operations=100_000_000_000)
    assert len(slow.lane_rows(4096)) == 4
    slow.config.hidden_dim = 1024           # a block for each SM from 1,024 rows on
    assert [len(slow.lane_rows(n)) for n in (1024, 1536, 4096)] == [1, 2, 4]


def test_the_operations_of_a_prompt_are_those_of_its_lanes(card):
    """`--bench` tells of the launches of all parts, though a recording knows one stream."""
    with contextlib.closing(load(card, lanes=(256, 256, 188))) as engine:
        bench = Bench(engine, [collections.namedtuple("Report", "dp4a_peak")(1e12)], 1, 1)
        operations = {operation.name: operation.launches for operation in bench.prefill(N).operations}
    assert operations["gdn_recurrence"] == 2 * 3 and operations["attend_tiles"] == 3


def test_passes_of_a_prompt_follow_each_other(card):
    """Each waits for the one before, though their lanes differ."""
    with contextlib.closing(load_tiny(card, chunk=512)) as engine:
        want = engine.evaluate(prompt(5))
        for stage in engine.pipeline.stages:
            stage.lane_rows = lambda n: [n] if n < 128 else [64, n - 64]
        np.testing.assert_array_equal(engine.evaluate(prompt(5)), want)


def test_lanes_share_no_scratch_memory(card):
    """What a lane is given of the memory of rows begins within its own: where another's is used instead, it is rarely
    at the same time here."""
    lanes, used = (192, 192, 316), []
    with contextlib.closing(load(card, lanes=lanes)) as engine:
        stage, model = engine.pipeline.last, engine.pipeline.last.model
        activations = [array for u in (*model.activations.values(), model.inner) for array in (u.x, u.q, u.d)]
        scratch = {array.memory: array.nbytes // stage.max_rows for array in (
            model.x, model.projected, model.mixed, model.o, model.factors, model.q, model.attended, *activations)}
        for lane, stream in enumerate(stage.lanes):
            stream.keep = lambda name, values, lane=lane: used.extend(
                (lane, name, x) for x in values if type(x) is qengine.Array and x.memory in scratch)
        engine.evaluate(prompt(7))
        for lane, name, array in used:
            row = (array.ptr - array.memory.ptr) // scratch[array.memory]
            first, behind = sum(lanes[:lane]), sum(lanes[:lane + 1])
            assert first <= row < behind, f"lane {lane}: {name} is given row {row} of {array!r}"
    assert {lane for lane, _, _ in used} == set(range(len(lanes)))


def test_a_readers_product_serves_every_lane(card):
    """Also one that comes after lanes have run, and no longer when it has gone."""
    lanes, seen = (192, 192, 316), []

    def gemm(card, y, stride, w, x, rows, add=False):
        seen.append(rows)
        q8_gemm.gemm_q8_q8(card, y, stride, w, x, rows, add)

    with contextlib.closing(load(card, lanes=lanes)) as engine:
        want = engine.evaluate(prompt(8))
        engine.use(gemm=gemm)
        seen.clear()
        np.testing.assert_array_equal(engine.evaluate(prompt(8)), want)
        assert set(seen) == set(lanes)
        engine.use()
        seen.clear()
        engine.evaluate(prompt(8))
        assert not seen
