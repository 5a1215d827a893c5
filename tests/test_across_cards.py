"""One model on several cards: the same tokens whatever the cards, their number, the split; hops that lose nothing;
cards that fail."""

import contextlib
import ctypes
import gc
import itertools
import random
import subprocess
import sys
import threading
import time
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from llguidance import LLMatcher

import qengine
from api.service import create_app
from cli.engines import asked
from cli.options import build_parser
from cli.serve import go_on
from engine import worker
from engine.worker import Worker
from kernels import q8_gemv
from kernels.card import CardError, NoAnswer, OutOfMemory
from kernels.emulated import card as emulated
from kernels.emulated.card import EmulatedCard
from tests.oracle import DATA
from tests.tiny import ROOT
from tests.until import PATIENCE, wait_until

MODEL, TINY = "synthetic:tiny", str(DATA / "tiny-Q8_0.gguf")        # 4 layers, and 3
CONTEXT, SLOTS, VOCABULARY = 512, 4, 256
SPLITS = [(4,), (2, 2), (1, 3), (1, 2, 1), (1, 1, 1, 1)]


def cards(n, **settings):
    return [EmulatedCard(number, memory_bytes=256 << 20, **settings) for number in range(n)]


def load(split, model=MODEL, on=None, **options):
    options = {"ctx": CONTEXT, "slots": SLOTS, "chunk": 64, "progress": False} | options
    return qengine.load(model, card=on or cards(len(split)), split=split, **options)


def request(seed, n_prompt, max_tokens=12, **fields):
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, n_prompt).tolist()
    drawn = {"temperature": float(seed % 2), "seed": seed, "ignore_eos": True}
    return qengine.Request(ids, max_tokens=max_tokens, **drawn | fields)


def requests():
    """Of all kinds; prompts that end within a page and at its end, and one that goes on where another has ended."""
    word = {"grammar": LLMatcher.grammar_from_regex("[a-z]{8}"), "ignore_eos": False}
    kinds = {}, {"top_logprobs": 3}, {"presence_penalty": 1.0, "logit_bias": {5: 3.0}}, word, {"top_k": 20}
    asked = [request(n, n, 5 + n % 9, **kinds[n % 5]) for n in (1, 63, 64, 130, 201, 300, 17)]
    return asked + [request(7, 350, ignore_eos=True)]


def told(generation):
    """All that a reader gets, except the text."""
    return [(delta.token_id, delta.logprob, delta.top_logprobs) for delta in generation]


def answers(engine):
    """What an engine answers to all requests at once, then to a prompt that goes on after one of the answers, and to a
    request alone. A grammar forces most of that last answer, so several of its tokens go through the stages at once."""
    asked = requests()
    said = [told(generation) for generation in [engine.submit(r) for r in asked]]
    tokens = asked[5].prompt_ids + [token for token, *_ in said[5]] + list(range(40))
    later = engine.submit(qengine.Request(tokens, max_tokens=10, ignore_eos=True))
    said += [told(later), later.n_cached > 0]
    grammar = LLMatcher.grammar_from_regex("(many hands ){4}[a-z]{8}")
    return [*said, told(engine.submit(request(3, 50, 80, grammar=grammar, ignore_eos=False)))]


@pytest.fixture(scope="module")
def alone():
    """What one card says: answers, and the logits of a text."""
    engine = load((4,), chunk=512)
    yield answers(engine), engine.evaluate(request(1, 300).prompt_ids)
    engine.close()


# ---- the same tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("split", SPLITS[1:], ids=str)
def test_any_split_gives_the_same_tokens(split, late, alone):
    engine = load(split, on=cards(len(split), late=late), chunk=64 << len(split) % 3)
    assert [len(stage.layers) for stage in engine.pipeline.stages] == list(split)
    said, logits = alone
    assert answers(engine) == said
    np.testing.assert_array_equal(engine.evaluate(request(1, 300).prompt_ids), logits)
    engine.close()


def test_a_model_of_a_file_gives_the_same_tokens():
    said = []
    for split in (3,), (1, 1, 1), (2, 1):
        engine = load(split, TINY)
        said.append(answers(engine))
        engine.close()
    assert said[0] == said[1] == said[2]


def test_cards_of_different_kinds_give_the_same_tokens(alone):
    """Only the sizes of grids depend on the number of multiprocessors."""
    mixed = cards(3)
    for card, n_sms in zip(mixed, (68, 80, 40)):
        card.n_sms = n_sms
    engine = load((1, 2, 1), on=mixed)
    assert answers(engine) == alone[0]
    engine.close()


# ---- hops --------------------------------------------------------------------------------------------------


def checksum(array):
    """Of what an emulated card's array holds at the moment."""
    return zlib.crc32((ctypes.c_char * array.nbytes).from_address(array.ptr))


class Checked:
    """Has every hop of an engine checked on arrival: checksums of the hidden states as they leave and as they arrive,
    each taken where the cards' own order has it. Meanwhile streams and workers are delayed at random."""

    def __init__(self, monkeypatch, seed, longest):
        self.sent, self.received, self.random, self.longest = {}, {}, random.Random(seed), longest
        send, receive = qengine.Edge.send, qengine.Edge.receive

        def checked_send(edge, n, freed):
            self.note(self.sent, edge, edge.upstream, n)
            self.delay(edge.upstream.card)
            return send(edge, n, freed)

        def checked_receive(edge, n, on_host):
            self.delay(edge.downstream.card)
            receive(edge, n, on_host)
            self.note(self.received, edge, edge.downstream, n)

        monkeypatch.setattr(qengine.Edge, "send", checked_send)
        monkeypatch.setattr(qengine.Edge, "receive", checked_receive)

    def note(self, found, edge, stage, n):
        sums, x = found.setdefault(edge, []), stage.model.scratch.x[:n]
        stage.card.default_stream.push(lambda: sums.append((n, checksum(x))))

    def delay(self, card):
        if self.random.random() < 0.2:
            seconds = self.random.random() * self.longest
            where = self.random.choice([None, *card.streams])
            where.push(lambda: time.sleep(seconds)) if where else time.sleep(seconds)

    def check(self, at_least):
        assert list(self.sent.values()) == [self.received[edge] for edge in self.sent]
        assert sum(map(len, self.sent.values())) >= at_least
        assert len({s for sums in self.sent.values() for s in sums}) > at_least / 2     # not always the same


@pytest.mark.parametrize("late, n_hops, longest", [
    (False, 600, 0.002), (True, 600, 0.002), pytest.param(False, 20_000, 0.005, marks=pytest.mark.slow),
    pytest.param(True, 20_000, 0.005, marks=pytest.mark.slow)])
def test_hops_arrive_as_they_left(late, n_hops, longest, monkeypatch):
    """Also where copies run as late as the events allow. pytest -m slow has thousands of hops."""
    checked = Checked(monkeypatch, n_hops, longest)
    engine = load((1, 1, 2), on=cards(3, late=late), slots=5, chunk=128)
    engine.pipeline.stages[0].exit.n_direct = 0         # steps go beside the layers here, straight over the other
    choice = random.Random(n_hops)
    monkeypatch.setattr(engine.pipeline, "pass_rows", lambda start, end, limit, last, is_sparse: min(
        end - start, 64 * choice.randint(1, limit // 64)))
    asked = [request(seed, choice.randint(1, 400), choice.randint(1, 60)) for seed in range(n_hops // 40)]
    for generation in [engine.submit(r) for r in asked]:
        generation.wait()
        assert generation.error is None
    engine.pipeline.settle()
    checked.check(n_hops)
    engine.close()


@pytest.mark.parametrize("asked, n_ahead", [
    ([request(0, 500, 1)], 4), ([request(seed, 20, 1) for seed in range(6)], 2),
    ([request(seed, 10, 50) for seed in range(4)], 2)], ids=["a long prompt", "short prompts", "answers"])
def test_cards_work_at_the_same_time(asked, n_ahead, monkeypatch):
    """While the last card does nothing, the first goes on: with passes over a prompt, as far as a cancellation may have
    to wait for them; with those over the next prompt; with the step of another group of answers."""
    engine, gate, sent, done = load((2, 2), slots=6), threading.Event(), [], []
    send, run_pass = qengine.Edge.send, qengine.Stage.run_pass

    def counted_pass(stage, *arguments):
        found = run_pass(stage, *arguments)
        if not stage.exit:
            stage.card.default_stream.push(lambda: done.append(stage))
        return found

    monkeypatch.setattr(qengine.Edge, "send", lambda *arguments: (send(*arguments), sent.append(arguments))[0])
    monkeypatch.setattr(qengine.Stage, "run_pass", counted_pass)
    with engine.scheduler.borrow_slot(1):
        generations = [engine.submit(r) for r in asked]
        if asked[0].max_tokens == 1:
            engine.cards[1].default_stream.push(gate.wait)
    if asked[0].max_tokens > 1:                     # once all are answers
        for generation in generations:
            next(iter(generation))
        engine.cards[1].default_stream.push(gate.wait)
    wait_until(lambda: len(sent) - len(done) == n_ahead)
    time.sleep(0.1)
    assert len(sent) - len(done) == n_ahead
    gate.set()
    for generation in generations:
        generation.wait()
        assert generation.n_generated == generation.request.max_tokens
    engine.close()


# ---- cards that fail ---------------------------------------------------------------------------------------


def failures(engine, n=6):
    """What n requests end with, started before the engine fails or after."""
    said = []
    for seed in range(n):
        try:
            list(engine.submit(request(seed, 100, 300)))
        except qengine.EngineStopped as error:
            said.append(str(error))
    return said


def breaks(card):
    """What is queued next fails, as after a fault of a kernel."""
    card.default_stream.push(lambda: 1 / 0)


def hangs(card):
    """What is queued from now on does not end."""
    card.default_stream.push(GATE.wait)


def hangs_at_once(card):
    """The driver does not come back."""
    card.launch = card._replay = lambda *arguments, **options: GATE.wait()


GATE = threading.Event()
FAULTS = {breaks: "is broken: division by zero", hangs: "has not answered for 2 s",
          hangs_at_once: "has not answered for 2 s"}


@pytest.fixture
def impatient(fault, monkeypatch):
    """impatient(): a context with little patience with cards that hang. There is more outside, where engines load and
    answer; yet whoever waits looks often enough to notice the end of an engine."""
    @contextlib.contextmanager
    def impatient():
        with monkeypatch.context() as patch:
            if fault is not breaks:
                patch.setattr(worker, "DEADLINE", 2.0)
            yield

    GATE.clear()
    monkeypatch.setattr(worker, "DEADLINE", 30.0)
    yield impatient
    GATE.set()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_card_that_fails_is_named(fault, impatient):
    """Whichever it is, and in whatever way: all requests hear of it, and nothing hangs. The time until
    a card is given up passes for all cards at once, each of which fails in an engine of its own."""
    failing, places = [], [(0, (4,), "float16"), (0, (4,), "q8+3"), *((n, (1, 2, 1), "float16") for n in range(3))]
    engines = [load(split, kv=kv) for _, split, kv in places]
    with impatient():
        for (number, *_), engine in zip(places, engines):
            bad, before = engine.cards[number], time.time()
            generations = [engine.submit(request(seed, 100, 300)) for seed in range(SLOTS + 2)]
            next(iter(generations[0]))
            fault(bad)
            failing.append((engine, bad, before, generations))
        for _, bad, _, generations in failing:
            for generation in generations:
                with pytest.raises(qengine.EngineStopped, match=f"{bad.name} {FAULTS[fault]}"):
                    list(generation)
    for engine, bad, before, _ in failing:
        assert failures(engine, 1) == [engine.reason]
        assert engine.fault.card == bad.name and before <= engine.fault.since <= time.time()
    with ThreadPoolExecutor() as pool:
        assert max(pool.map(seconds_to_close, engines)) < worker.DEADLINE / 2


def seconds_to_close(engine):
    started = time.perf_counter()
    engine.close()
    return time.perf_counter() - started


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_goes_on_with_the_cards_that_are_left(fault, alone, impatient, capsys):
    """Until there are none."""
    options = build_parser().parse_args(
        ["-m", MODEL, "--serve", "0", "--go-on", "--ctx", str(CONTEXT), "--slots", str(SLOTS), "--split", "1,2,1",
         "--draft", "off"])         # so that the answer still runs when the card fails
    app = create_app(load((1, 2, 1), draft="off"))
    service, lost = app.extensions["qengine"], []
    for bad in (1, 0):
        engine, health = service.engine, app.test_client().get("/health")
        assert [card["card"] for card in health.json.get("lost", [])] == lost
        generation = engine.submit(request(0, 100, 300))
        next(iter(generation))
        with impatient(), pytest.raises(qengine.EngineStopped):
            fault(engine.cards[bad])
            list(generation)
        lost.append(engine.cards[bad].name)
        health = app.test_client().get("/health")
        assert health.status_code == 503 and health.json["card"] == lost[-1] and "since" in health.json
        left = [card for card in engine.cards if card.name != lost[-1]]
        assert go_on(service, options)
        assert service.engine.cards == left and answers(service.engine) == alone[0]
        assert f"going on with {', '.join(card.name for card in left)}\n" in capsys.readouterr().err
    fresh = qengine.load(MODEL, cards(1), progress=False, **asked(options) | {"split": None})
    assert left[0].free_bytes >= fresh.cards[0].free_bytes      # of the old engines nothing is left
    fresh.close()
    with impatient(), pytest.raises(qengine.EngineStopped):
        fault(left[0])
        list(service.engine.submit(request(0, 100, 300)))
    assert not go_on(service, options)
    assert "cannot go on: no card is left" in capsys.readouterr().err


def test_a_slow_card_is_not_at_fault(monkeypatch, alone):
    """Though what is queued on it takes longer than a card may do nothing."""
    monkeypatch.setattr(worker, "DEADLINE", 1.5)
    monkeypatch.setattr(emulated, "MOST_LAUNCHES", 2)
    engine = load((2, 2), chunk=512)
    execute = engine.cards[0].execute
    engine.cards[0].execute = lambda launches: (time.sleep(0.4), execute(launches))
    started = time.perf_counter()
    assert engine.evaluate(request(1, 300).prompt_ids).tolist() == alone[1].tolist()
    assert time.perf_counter() - started > 2 * 1.5
    engine.close()


STOPPED = """
import os, signal, subprocess, time
from engine import worker
from kernels.emulated.card import EmulatedCard

def stop():
    subprocess.Popen(["sh", "-c", f"sleep 2.5; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.3)

worker.DEADLINE = 1.5
started = time.monotonic()
worker.Worker(EmulatedCard()).post(stop).result()
assert time.monotonic() - started > 2
"""


def test_a_process_that_was_stopped_blames_no_card():
    """Ctrl-Z, a debugger, a paused machine."""
    subprocess.run([sys.executable, "-c", STOPPED], cwd=ROOT, check=True, timeout=PATIENCE, start_new_session=True)


def test_a_fault_is_noticed_while_nobody_waits():
    engine = load((2, 2))
    breaks(engine.cards[1])
    with pytest.raises(CardError):
        engine.evaluate([1, 2, 3])
    engine.scheduler.thread.join(PATIENCE)
    assert engine.fault.card == engine.cards[1].name and "division by zero" in engine.reason


def served(engine, *options):
    """(options of a server, its app)"""
    said = ["-m", MODEL, "--serve", "0", "--go-on", "--ctx", str(CONTEXT), *options]
    return build_parser().parse_args(said), create_app(engine)


def stop(engine):
    """Wait for the end of an engine that has failed."""
    assert failures(engine, 1) == [engine.reason]
    engine.scheduler.thread.join(PATIENCE)


def test_a_server_goes_on_with_cards_that_were_idle(monkeypatch, capsys):
    two = cards(2)
    monkeypatch.setattr(qengine, "open_cards", lambda name: two)
    options, app = served(qengine.load(MODEL, ctx=CONTEXT, progress=False))
    service = app.extensions["qengine"]
    assert (service.engine.cards, service.engine.spare) == (two[:1], two[1:])
    breaks(two[0])
    stop(service.engine)
    assert go_on(service, options) and service.engine.cards == two[1:]
    assert len(service.engine.generate([1, 2, 3], max_tokens=4, ignore_eos=True))
    service.engine.close()


@pytest.mark.parametrize("second", ["fails", "hangs"])
def test_a_server_goes_on_though_another_card_fails_meanwhile(second, monkeypatch, capsys):
    """In between, clients and /health hear that it loads."""
    GATE.clear()
    three, heard = cards(3), []
    options, app = served(load((1, 2, 1), on=three))
    monkeypatch.setattr(worker, "DEADLINE", 3.0)
    service, client = app.extensions["qengine"], app.test_client()
    breaks(three[0])
    stop(service.engine)

    def upload(array, host):
        heard.extend([client.get("/health").json, client.post("/v1/completions", json={"prompt": "x"})])
        if second == "fails":
            raise CardError("gone")
        GATE.wait()

    three[1]._upload_now = upload
    assert go_on(service, options) and service.engine.cards == three[2:]
    GATE.set()
    assert heard[0]["status"] == "loading" and heard[0]["lost"][0]["card"] == three[0].name
    assert heard[1].status_code == 503 and "Retry-After" in heard[1].headers
    assert [lost["card"] for lost in client.get("/health").json["lost"]] == [three[0].name, three[1].name]
    assert f"going on with {three[2].name}\n" in capsys.readouterr().err
    service.engine.close()


def test_a_card_that_hangs_while_it_loads_is_named(monkeypatch):
    GATE.clear()
    monkeypatch.setattr(worker, "DEADLINE", 3.0)
    two = cards(2)
    two[1]._upload_now = lambda *_: GATE.wait()
    with pytest.raises(NoAnswer, match=f"^{two[1].name} has not answered for 3 s$") as raised:
        load((2, 2), on=two)
    assert raised.value.card is two[1] and two[1].hangs and not two[0].hangs
    GATE.set()
    wait_until(lambda: not workers_of(two))


def test_where_no_card_is_at_fault_none_is_given_up(capsys):
    """No card is given up for a NaN, or for a mistake of ours."""
    def nan(stage):
        stage.card.poison(stage.model.head_norm)

    def mistake(stage):
        stage.worker.post(len, 5)

    for wrong in nan, mistake:
        options, app = served(load((2, 2)))
        service = app.extensions["qengine"]
        wrong(service.engine.pipeline.last)
        stop(service.engine)
        health = app.test_client().get("/health").json
        assert health["status"] == "error" and "since" in health and "card" not in health
        assert not go_on(service, options)
        assert "cannot go on: no card is known to be at fault" in capsys.readouterr().err


def test_what_has_failed_leaves_no_host_memory():
    """Only its faults are remembered."""
    options, app = served(load((1, 2, 1), checkpoint_memory=0, checkpoint_host_memory=8 << 20))
    service = app.extensions["qengine"]
    for seed in range(3):
        service.engine.generate(request(seed, 300).prompt_ids, max_tokens=1)
    pipeline = service.engine.pipeline
    held = [weakref.ref(pinned) for stage in pipeline.stages[:2] for pinned in stage.exit.pinned]
    held += [weakref.ref(copy) for stage in pipeline.stages for copies in stage.cache.host.values() for copy in copies]
    assert len(held) > 4
    breaks(service.engine.cards[0])
    stop(service.engine)
    del pipeline
    assert go_on(service, options)
    gc.collect()
    assert not any(ref() is not None for ref in held)
    service.engine.close()


def test_functions_of_others_are_used_by_all_cards_or_by_none(alone):
    engine = load((2, 2))
    head = engine.pipeline.last.model.head

    def gemv(card, y, stride, w, x, rows, add):
        assert w.n != head.n, "not for the head"
        q8_gemv.gemv_q8_q8(card, y, stride, w, x, rows, add)

    with pytest.raises(ValueError, match="not for the head"):
        engine.use(gemv=gemv)
    assert not [stage for stage in engine.pipeline.stages if stage.model.gemv]
    assert answers(engine) == alone[0]
    engine.close()


def test_ctrl_c_ends_a_first_start(monkeypatch):
    """It reaches the main thread, so that must be the one that compiles."""
    two = cards(2)

    def interrupted(*_):
        assert threading.current_thread() is threading.main_thread()
        raise KeyboardInterrupt

    monkeypatch.setattr(EmulatedCard, "compile_kernels", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load((2, 2), on=two)
    assert not workers_of(two)


def test_an_error_of_a_tap_is_only_its_callers(alone):
    engine, names = load((2, 2)), []
    for name in "layer 0", "layer 3":
        def tap(at, array):
            names.append(at)
            if at == name:
                raise ZeroDivisionError
        with pytest.raises(ZeroDivisionError):
            engine.evaluate(list(range(200)), tap)
    assert answers(engine) == alone[0] and engine.fault is None
    engine.evaluate([1, 2], lambda name, array: names.append(name))
    assert names[-5:] == ["embedding", *(f"layer {i}" for i in range(4))]
    engine.close()


def test_a_card_without_room_is_named_at_load():
    """Others have taken memory of this card since the plan was made."""
    three = cards(3)
    alloc, numbers = three[1].alloc, itertools.count()
    def full(shape, dtype, name=""):
        if next(numbers) == 5:
            raise OutOfMemory(f"{name} does not fit on {three[1].name}")
        return alloc(shape, dtype, name)
    three[1].alloc = full
    with pytest.raises(OutOfMemory, match="does not fit on emulated card 1"):
        load((1, 2, 1), on=three)
    assert not workers_of(three)


def workers_of(cards):
    workers = [thread for thread in threading.enumerate() if isinstance(thread, Worker)]
    return [worker for worker in workers if worker.card in cards]


def test_an_engine_that_is_closed_leaves_no_thread():
    engine = load((2, 2))
    told(engine.submit(request(1, 10)))
    engine.close()
    for stage in engine.pipeline.stages:
        stage.worker.join(PATIENCE)
        assert not stage.worker.is_alive()
    with pytest.raises(CardError, match="was closed"):
        engine.pipeline.settle()


def test_tokens_are_read_after_the_first_card_goes_on_with_them():
    """Otherwise the thread that reads tokens would delay the thread that both cards wait for."""
    engine, order, steps = load((2, 2)), [], []
    card = engine.cards[0]
    replay = card._replay
    card._replay = lambda recording, stream: (order.append("card"), replay(recording, stream))
    engine.pipeline.prepare_slot(0, request(0, 1, 9))
    engine.pipeline.set_pages(0, [0])
    engine.pipeline.place([qengine.answer_of(1, 0, 0)])
    for _ in range(9):
        steps.append(engine.pipeline.step(qengine.StepShape(1)))
        if len(steps) > 1:
            steps[-2].read()
            order.append("reader")
    assert order == ["card"] + ["card", "reader"] * 8
    engine.close()
