"""Micro-batches: parts of a prompt's pass that run beside each other. The bits are the same, whatever the parts are and
whichever of them is late."""

import collections
import contextlib
import functools
import gc
import random
import threading
import time

import numpy as np
import pytest

import qengine
from cli.bench import Bench
from engine.plan import LARGEST_CHUNK, MICRO_BATCHES, Grouped
from engine.prefix import PAGE_TOKENS
from kernels import kv_expand, q8_gemm
from kernels.card import Array
from kernels.emulated import native
from kernels.emulated.card import EmulatedCard
from tests.costs import SPEED, costs_of, work_of
from tests.models import TINY, load_tiny, write_as_float32
from tests.own_card import own_card
from tests.until import PATIENCE

N = 700
SPLITS = [(64, 636), (256, 256, 188), (192, 64, 320, 124), (192, 192, 128, 128, 60)]


def prompt(seed, n=N):
    return np.random.default_rng(seed).integers(0, 4000, n).tolist()


def load(card, model=TINY, sizes=None, **options):
    """An engine whose passes of N rows run in micro-batches of these sizes, and other passes in random ones."""
    options = {"ctx": 1024, "slots": 2, "chunk": 704, "progress": False} | options
    engine = qengine.load(str(model), card=card, **options)
    draw = random.Random(0)

    def chosen(n):
        cut = [64 * draw.randint(1, 4) for _ in range(4)] if n != N else sizes
        ends = [end for end in np.cumsum(cut).tolist() if end < n]
        return np.diff([0, *ends, n]).tolist()

    for stage in engine.pipeline.stages if sizes else ():
        stage.costs.micro_batches = chosen
    return engine


def said(engine):
    """Logits of a text, and a conversation's tokens: its turns begin at checkpoints inside of passes."""
    logits, text, turns = engine.evaluate(prompt(1)), prompt(2), []
    for n in 30, 90, 200:
        generation = engine.submit(qengine.Request(text, max_tokens=8, ignore_eos=True))
        turns.append([delta.token_id for delta in generation])
        text = text + turns[-1] + prompt(n, n)
    return logits, turns, generation.n_cached


@pytest.fixture(scope="module")
def alone(card):
    with contextlib.closing(load(card, sizes=(N,), chunk=64)) as engine:
        yield said(engine)


def assert_same(found, wanted):
    np.testing.assert_array_equal(found[0], wanted[0])
    assert found[1:] == wanted[1:] and found[2] > 0


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_micro_batches_do_not_change_a_bit(card, alone, sizes):
    with contextlib.closing(load(card, sizes=sizes)) as engine:
        assert_same(said(engine), alone)


@pytest.mark.parametrize("late", range(3))
def test_a_later_part_waits_for_an_earlier_one(alone, late):
    """Whichever micro-batch begins late, on a card that copies as late as the events allow."""
    engine = load(EmulatedCard(late=True), sizes=(192, 192, 316))
    stage, launch = engine.pipeline.last, qengine.Stage.launch_prompt

    def launch_prompt(*arguments):
        stage.streams[late].push(lambda: time.sleep(0.1))
        return launch(stage, *arguments)

    stage.launch_prompt = launch_prompt
    with contextlib.closing(engine):
        assert_same(said(engine), alone)


class RestsWhenExpanded(EmulatedCard):
    """Rests when it has expanded a piece of the pages, before it reads that. Meanwhile other streams get on."""

    def execute(self, launches):
        for launch in native.in_order(launches):
            super().execute([launch])
            if launch.name.startswith("expand_kv"):
                time.sleep(0.003)


def test_micro_batches_take_turns_with_what_they_share(card, monkeypatch):
    """All of them expand keys and values into the same memory, two pages at a time."""
    with contextlib.closing(load(card, sizes=(N,), chunk=64, kv="q4")) as engine:
        wanted = said(engine)
    monkeypatch.setattr(kv_expand, "PIECE_PAGES", 2)
    with contextlib.closing(load(RestsWhenExpanded(), sizes=(192, 192, 316), kv="q4")) as engine:
        assert_same(said(engine), wanted)


class SlowSteps(EmulatedCard):
    """Rests again and again between the kernels of a recording, and recordings are steps. Meanwhile other streams get
    on."""

    def execute(self, launches):
        if not isinstance(launches, native.Program):
            return super().execute(launches)
        kernels = native.in_order(launches)
        for start in range(0, len(kernels), 5):
            super().execute(kernels[start:start + 5])
            time.sleep(0.002)


LATE = functools.partial(EmulatedCard, late=True)


@pytest.mark.parametrize("make_card, chunk, sizes", [(LATE, 704, None), (LATE, 704, (192, 192, 316)),
                                                     (SlowSteps, 128, None), (SlowSteps, 128, (64, 64))])
def test_steps_between_the_parts_of_a_pass_change_no_bit(make_card, chunk, sizes, monkeypatch):
    """Parts of any number of layers, on a card that does everything as late as the events allow, and on one where
    a part runs between the kernels of a step."""
    draw, fields = random.Random(1), {"ignore_eos": True, "top_logprobs": 3}
    both = [qengine.Request(prompt(seed, n), max_tokens=most, **fields) for seed, n, most in ((8, 40, 150), (9, N, 8))]
    with contextlib.closing(load(make_card(), chunk=chunk)) as engine:
        if sizes:
            stage = engine.pipeline.last
            stage.costs.micro_batches = lambda n: list(sizes) if n == sum(sizes) else [n]
        turns, parts = engine.scheduler.turns, []
        want = [[(delta.token_id, delta.top_logprobs) for delta in engine.submit(request)] for request in both]
        engine.clear_cache()
        monkeypatch.setattr(turns, "n_pieces", lambda pieces, has_answers: draw.choice((1, 1, 2)))
        monkeypatch.setattr(turns, "add_part", lambda seconds, span, has_answers: parts.append(span))
        generations = [engine.submit(both[0])]
        next(iter(generations[0]))
        generations.append(engine.submit(both[1]))
        found = [[(delta.token_id, delta.top_logprobs) for delta in generation] for generation in generations]
    assert len(parts) > 1 and all(part.result().seconds > 0 for part in parts if part)
    assert found[1] == want[1] and found[0] == want[0][1:]


def test_a_part_does_not_wait_for_the_step_before_it():
    """But for what was queued before the part before it; and what is queued later waits for the part."""
    sizes, gates = (192, 192, 316), [threading.Event() for _ in range(2)]
    with contextlib.closing(load(EmulatedCard(), sizes=sizes)) as engine:
        pipeline, stage = engine.pipeline, engine.pipeline.last
        streams, default = stage.streams[:len(sizes)], stage.card.default_stream

        def are_over(streams, seconds=PATIENCE):
            return all(event.wait(seconds) for event in [stream.record() for stream in streams])

        def queue(work, *arguments):
            stage.worker.ask(work, *arguments).result()

        pipeline.set_pages(0, range(11))
        pipeline.prepare_slot(0, qengine.Request([0]))
        queue(stage.queue_prompt, prompt(2), 0, 0, (), None, None, 1)
        default.push(gates[0].wait)                 # as long as a decode step
        queue(stage.continue_prompt, 1)
        assert are_over(streams) and not are_over([default], 0.05)
        streams[1].push(gates[1].wait)
        queue(stage.continue_prompt, 1)
        assert not any(are_over([stream], 0.05) for stream in streams)
        gates[0].set()
        assert are_over([streams[0]]) and not any(are_over([stream], 0.05) for stream in (streams[1], default))
        gates[1].set()
        assert are_over([*streams, default])


@pytest.mark.parametrize("model", [TINY, "synthetic:tiny-moe"])
def test_a_step_and_the_part_beside_it_share_weights_and_caches_alone(card, model):
    with contextlib.closing(load(card, model, (192, 192, 316))) as engine:
        stage, of_passes, of_steps = engine.pipeline.last, {}, {}
        for stream in stage.streams:
            stream.keep = lambda name, values: of_passes.update((x.memory, x) for x in values if type(x) is Array)
        engine.evaluate([token % 250 for token in prompt(7)])
        for recording in stage.recordings.made.values():
            of_steps |= recording.used
        cache, tensors = stage.cache, (*engine.opened.weights.shapes, "rotary frequencies")
        caches = [cache.block_table, *cache.states, *(array for pages in cache.pages.values() for array in pages)]
        shared = {array.name for memory, array in of_passes.items() if memory in of_steps}
        caches = {array.name for array in caches if isinstance(array, Array)}
        shared = {name for name in shared if not name.startswith(tensors)}
        assert len(shared) > 4 and shared <= caches
        assert {array.memory for array in stage.model.scratch.arrays.values()} & set(of_passes)


def test_micro_batches_of_a_model_in_float32(card, tmp_path):
    """Its activations are copied, not quantised: each micro-batch copies its own."""
    write_as_float32(TINY, tmp_path / "float32.gguf")
    logits = []
    for sizes in None, (192, 192, 316):
        with contextlib.closing(load(card, tmp_path / "float32.gguf", sizes)) as engine:
            logits.append(engine.evaluate(prompt(3)))
    np.testing.assert_array_equal(*logits)


def test_states_are_kept_where_they_are_asked_for(card):
    """Within a micro-batch, at its end, at the end of all."""
    marks, kept = [(64, 0), (192, 1), (384, 2), (640, 3)], []
    for sizes in None, (192, 192, 256):
        with contextlib.closing(load(card, sizes=sizes)) as engine:
            engine.pipeline.set_pages(0, range(11))
            for stage in engine.pipeline.stages if sizes else ():
                stage.costs.micro_batches = lambda n: list(sizes)
            engine.pipeline.prepare_slot(0, qengine.Request([0]))
            engine.pipeline.prefill(prompt(6, 640), 0, 0, marks)
            engine.pipeline.settle()
            states = engine.pipeline.last.cache.recurrent.values()
            kept.append([card.download(array[2 + number]) for state in states for array in (state.memory, state.conv)
                         for _, number in marks])
    for one, other in zip(*kept):
        np.testing.assert_array_equal(one, other)
        assert one.any()


def test_micro_batches_on_two_cards(alone):
    cards = [EmulatedCard(number, late=True) for number in range(2)]
    with contextlib.closing(load(cards, sizes=(256, 64, 380), split=[1, 2])) as engine:
        assert_same(said(engine), alone)


def test_a_tap_sees_all_rows(card):
    """Of each layer, one after the other, though the pass would run in micro-batches."""
    taps = []
    for sizes in (N,), (192, 508):
        seen = {}
        with contextlib.closing(load(card, sizes=sizes)) as engine:
            engine.evaluate(prompt(4), tap=lambda name, x: seen.update({name: card.download(x[:N])}))
        taps.append(seen)
    alone, beside = taps
    assert list(alone) == list(beside) == ["embedding", "layer 0", "layer 1", "layer 2"]
    for one, other in zip(alone.values(), beside.values()):
        np.testing.assert_array_equal(one, other)
        assert np.isfinite(one).all()


def costs_of_9b(kind="cuda", row_operations=13_836_992_512, products=None, n_layers=32, hidden_dim=4096):
    """The StageCosts of 32 layers that take as many operations for a row as those of a 9B do."""
    products = {(4096, 4096): 1} if products is None else products
    work = work_of(products, n_layers, row_operations=row_operations)
    return costs_of(hidden_dim, work, kind=kind, speed=SPEED._replace(dot=133.8e12))


@pytest.mark.parametrize("kind, n, sizes", [
    ("cuda", 1, [1]), ("cuda", 297, [297]), ("cuda", 383, [383]), ("cuda", 384, [192, 192]), ("cuda", 512, [256, 256]),
    ("cuda", 520, [256, 256, 8]), ("cuda", 1160, [320, 320, 256, 256, 8]), ("cuda", 4096, [1024] * 4),
    ("emulated", 4096, [4096])])
def test_rows_of_micro_batches(kind, n, sizes):
    assert costs_of_9b(kind).micro_batches(n) == sizes


@pytest.mark.parametrize("products", [{}, {(48, 4096): 24, (4096, 4096): 32}])
def test_micro_batches_of_other_files(products):
    """Of float matrices alone, and with small ones of a type of their own beside the large."""
    costs = costs_of_9b(products=products)
    assert costs.micro_batches(1160) == [320, 320, 256, 256, 8]
    assert (costs.product_time(1160) > 0) == bool(products)


def test_micro_batches_leave_few_rows_out_of_whole_tiles():
    costs = costs_of_9b()
    for n in range(1, 4097):
        *whole, last = costs.micro_batches(n)
        assert sum(whole) + last == n and not any(rows % 64 for rows in whole) and len(whole) <= MICRO_BATCHES
        assert not whole or last % 64 == 0 or last < 64


def test_micro_batches_of_experts_begin_at_whole_pages():
    """A 35B-A3B. Otherwise the delta rule would cut a prompt elsewhere, and round otherwise."""
    work = work_of({(12_288, 2048): 40}, n_layers=40, grouped=collections.Counter({Grouped(1024, 2048, 256, 8, 1): 40}))
    costs, most = costs_of(2048, work), 0
    for n in range(1, LARGEST_CHUNK + 1):
        sizes = costs.micro_batches(n)
        assert sum(sizes) == n and not any(rows % PAGE_TOKENS for rows in sizes[:-1])
        most = max(most, len(sizes))
    assert most > 2


def test_no_more_micro_batches_than_the_host_can_feed():
    """1,160 tokens of a 0.8B run for 23 ms; queueing them in five micro-batches took 31."""
    small = costs_of_9b(row_operations=992_000_000, n_layers=24)
    assert [len(small.micro_batches(n)) for n in (1160, 2048, 4096)] == [1, 1, 3]
    slow = {"row_operations": 100_000_000_000}
    assert len(costs_of_9b(**slow).micro_batches(4096)) == 4
    narrow = costs_of_9b(**slow, hidden_dim=1024)           # a block for each SM from 1,024 rows on
    assert [len(narrow.micro_batches(n)) for n in (1024, 1536, 4096)] == [1, 2, 4]


def test_the_operations_of_a_prompt_are_those_of_its_micro_batches(card):
    """`--bench` tells of the launches of all parts, though a recording knows one stream."""
    with contextlib.closing(load(card, sizes=(256, 256, 188))) as engine:
        bench = Bench(engine, [collections.namedtuple("Report", "dp4a_peak")(1e12)], 1, 1)
        operations = {operation.name: operation.launches for operation in bench.prefill(N).operations}
    assert operations["gdn_recurrence"] == 2 * 3 and operations["attend_tiles"] == 3


def test_what_a_stage_releases_is_free_at_once(card):
    """Its memory does not wait until Python looks for circles of references, also after micro-batches have run."""
    card = own_card(card)
    engine = load(card, sizes=(192, 192, 316))
    engine.evaluate(prompt(9))
    stage, taken = engine.pipeline.last, dict(card.allocations)
    engine.close()
    gc.collect()
    gc.disable()
    try:
        stage.release()
        assert sum(taken[ptr][0] for ptr in taken.keys() - card.allocations.keys()) > stage.weight_bytes
        left = set(card.allocations)
    finally:
        gc.enable()
    gc.collect()
    assert set(card.allocations) == left


def test_passes_of_a_prompt_follow_each_other(card):
    """Each waits for the one before, though their micro-batches differ."""
    with contextlib.closing(load_tiny(card, chunk=512)) as engine:
        want = engine.evaluate(prompt(5))
        for stage in engine.pipeline.stages:
            stage.costs.micro_batches = lambda n: [n] if n < 128 else [64, n - 64]
        np.testing.assert_array_equal(engine.evaluate(prompt(5)), want)


def test_micro_batches_share_no_scratch_memory(card):
    """What a micro-batch is given of the memory of rows begins within its own. Where it is given another's, the two are
    rarely used at the same time here."""
    sizes, used = (192, 192, 316), []
    with contextlib.closing(load(card, sizes=sizes)) as engine:
        stage = engine.pipeline.last
        scratch = {array.memory: array.nbytes // stage.max_rows for array in stage.model.scratch.arrays.values()}
        assert len(scratch) == len(stage.model.scratch.arrays) >= 16
        for batch, stream in enumerate(stage.streams):
            stream.keep = lambda name, values, batch=batch: used.extend(
                (batch, name, x) for x in values if type(x) is Array and x.memory in scratch)
        engine.evaluate(prompt(7))
        for batch, name, array in used:
            row = (array.ptr - array.memory.ptr) // scratch[array.memory]
            first, behind = sum(sizes[:batch]), sum(sizes[:batch + 1])
            assert first <= row < behind, f"micro-batch {batch}: {name} is given row {row} of {array!r}"
    assert {batch for batch, _, _ in used} == set(range(len(sizes)))


def test_a_readers_product_serves_every_micro_batch(card):
    """Also one that comes after micro-batches have run, and no longer when it has gone."""
    sizes, seen = (192, 192, 316), []

    def gemm(card, y, stride, w, x, rows, add=False):
        seen.append(rows)
        q8_gemm.gemm_q8_q8(card, y, stride, w, x, rows, add)

    with contextlib.closing(load(card, sizes=sizes)) as engine:
        want = engine.evaluate(prompt(8))
        engine.use(gemm=gemm)
        seen.clear()
        np.testing.assert_array_equal(engine.evaluate(prompt(8)), want)
        assert set(seen) == {*sizes, 512, 188}        # the draft block takes the rows in pieces of its own
        engine.use()
        seen.clear()
        engine.evaluate(prompt(8))
        assert not seen
