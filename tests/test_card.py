"""The Card interface: what every kind of card must do, and what only an emulated card can show."""

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from numba import cuda, float32, uint32

from kernels.card import CardError, LaunchError
from kernels.emulated import native
from kernels.emulated.card import EmulatedCard
from kernels.emulated.ptx import Unsupported
from kernels.open import open_cards
from tests.card_cases import CASES, N, add_scaled, numbers, spin
from tests.until import PATIENCE, wait_until


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_card(card, case):
    case(card)


# ---- memory ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [">f4", "V12", "datetime64[s]", [("a", "f4")], "U3"])
def test_only_native_numbers_are_items(card, dtype):
    with pytest.raises(TypeError, match="native byte order"):
        card.upload(np.zeros(3, dtype))
    with pytest.raises(TypeError, match="native byte order"):
        card.alloc(12, "int8").view(">i2")


NUMPY = {"np.sum(x)": TypeError, "np.float32(2) * x": TypeError, "x + 1": TypeError, "1 - x": TypeError,
         "x @ x": TypeError, "float(x[0])": TypeError, "x > 0": TypeError, "x.__setitem__(0, 5)": TypeError,
         "x.sum()": AttributeError, "x.T": AttributeError, "x.copy_to_host()": AttributeError}


@pytest.mark.parametrize("said", NUMPY)
def test_what_numpy_does_is_refused_in_a_sentence(card, said):
    with pytest.raises(NUMPY[said], match=r"this array is on a card: card.download\(array\) brings it to NumPy$"):
        eval(said, {"np": np, "x": card.zeros(4, "float32")})


def test_attributes_that_nobody_has(card):
    x = card.zeros(4, "float32")
    assert not hasattr(x, "__cuda_array_interface__") and not hasattr(x, "tolist")
    with pytest.raises(AttributeError, match="^an Array has no attribute 'shap'$") as caught:
        x.shap
    assert caught.value.name == "shap" and caught.value.obj is x        # Python says: did you mean 'shape'?


# ---- launches ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("grid, block, shared, message", [
    (0, 32, 0, "a grid is"), ((1, 65536), 32, 0, "a grid is"), ((1, 1, 1, 1), 32, 0, "a grid is"),
    (1, 1025, 0, "a block is"), (1, (1, 1, 65), 0, "a block is"), (1, 0, 0, "a block is"),
    (2.5, 32, 0, "whole numbers"), ("two", 32, 0, "whole numbers"), (1, (32, 1.5), 0, "whole numbers"),
    (1, 32, 1 << 20, "dynamic shared memory"), (1, 32, -1, "dynamic shared memory")])
def test_impossible_launches(card, grid, block, shared, message):
    x = card.zeros(4, "float32")
    with pytest.raises(LaunchError, match=f"add_scaled, grid .*, block .*{message}"):
        card.launch(add_scaled, grid, block, x, x, 4, 1.0, shared=shared)


@pytest.mark.parametrize("value, message", [(-1, "uint32"), (2**32, "uint32"), ("text", "str"),
                                            (np.zeros(3), "ndarray")])
def test_impossible_arguments(card, value, message):
    x = card.zeros(4, "float32")
    with pytest.raises(LaunchError, match=f"add_scaled.*{message}"):
        card.launch(add_scaled, 1, 32, x, x, value, 1.0)


AS_NUMBA_WRITES_IT = """
import numpy as np
from numba.cuda.dispatcher import CUDADispatcher

numbas_own = CUDADispatcher.__getitem__
import qengine
from kernels.emulated.card import EmulatedCard
from kernels.open import open_cards
from tests.doubling import double

assert CUDADispatcher.__getitem__ is numbas_own          # imports alone change nothing
for open_card in EmulatedCard, lambda: open_cards("emulated")[0]:
    CUDADispatcher.__getitem__ = numbas_own
    card = open_card()
    assert CUDADispatcher.__getitem__ is not numbas_own
    x = card.upload(np.ones(4, np.float32))
    double[1, 32](x, 4)
    card.synchronize()
    double[1, 32, card.stream(), 64](x, 4)
    card.synchronize()
    assert card.download(x).tolist() == [4.0] * 4
"""


def test_a_card_lets_numba_configure_launches():
    """In a process of its own, as a notebook is."""
    ran = subprocess.run([sys.executable, "-c", AS_NUMBA_WRITES_IT], cwd=Path(__file__).parents[1], capture_output=True,
                         text=True)
    assert ran.returncode == 0, ran.stderr


# ---- several cards -----------------------------------------------------------------------------------------

def test_choice_of_cards():
    assert [c.name for c in open_cards("emulated:3")] == [f"emulated card {i}" for i in range(3)]
    assert sum(c.memory_bytes for c in open_cards("emulated:3")) <= open_cards("emulated")[0].memory_bytes
    assert open_cards("emulated", memory_bytes=1 << 20)[0].free_bytes == 1 << 20
    assert len(open_cards()) >= 1
    for wrong in ("cpu", "emulated:0", "emulated:x", "emulated:1,2", "emulated:1,v100", "emulated:3@", "emulated:3@0",
                  "emulated:3@nan", "emulated:v1000", ":1", "cuda:99", "cuda:x"):
        with pytest.raises(CardError):
            open_cards(wrong)


def test_cards_of_a_type():
    cmp_card, v100, t4 = open_cards("emulated:cmp-100-210,v100@4,t4")
    assert (cmp_card.memory_bytes, cmp_card.link_gbs, cmp_card.n_sms) == (16 << 30, 0.25, 68)
    assert (v100.link_gbs, v100.n_sms, t4.max_shared) == (4, 80, 64 << 10)
    assert "like a CMP 100-210" in cmp_card.describe()
    assert [card.link_gbs for card in open_cards("emulated:2@0.25")] == [0.25, 0.25]


# ---- only emulated -----------------------------------------------------------------------------------------

def late_pipeline(card, wait):
    """A copy on one stream, its use on another, with or without the wait between them; what the user saw."""
    x, y = card.zeros(N, "float32"), card.zeros(N, "float32")
    host = card.pinned(N, "float32")
    host[:] = numbers()
    copies = card.stream("copies")
    card.copy_in(x, host, copies)
    if wait:
        card.default_stream.wait(copies.record())
    card.launch(add_scaled, 8, 128, x, y, N, 1.0)
    return card.download(y)


def test_late_card_shows_a_missing_wait():
    card = EmulatedCard(late=True)
    np.testing.assert_array_equal(late_pipeline(card, wait=True), numbers())
    assert not late_pipeline(card, wait=False).any()


@pytest.mark.parametrize("first", ["producer", "consumer"])
@pytest.mark.parametrize("end", ["synchronize", "free"])
def test_late_card_shows_a_missing_wait_wherever_the_host_waits(first, end):
    """Whichever stream is older, and also when the host waits for the whole card."""
    card = EmulatedCard(late=True)
    streams = [card.stream() for _ in range(2)]
    producer, consumer = streams if first == "producer" else reversed(streams)
    for wait in (False, True):
        x, y = card.upload(numbers()), card.zeros(N, "float32")
        card.fill(x, 0, producer)
        if wait:
            consumer.wait(producer.record())
        card.launch(add_scaled, 8, 128, x, y, N, 1.0, stream=consumer)
        card.synchronize() if end == "synchronize" else card.free(card.zeros(1, "int8"))
        np.testing.assert_array_equal(card.download(y), 0 if wait else numbers())


def test_time_between_events_that_are_not_done():
    card = EmulatedCard(late=True)
    events = [card.default_stream.record() for _ in range(2)]
    with pytest.raises(CardError, match="both are done"):
        events[1].seconds_since(events[0])


def test_late_card_shows_a_pinned_buffer_written_too_early():
    card = EmulatedCard(late=True)
    x, host = card.zeros(4, "float32"), card.pinned(4, "float32")
    host[:] = 1
    card.copy_in(x, host)
    sent = card.default_stream.record()
    host[:] = 2                                          # before `sent` is done
    assert not sent.done and (card.download(x) == 2).all()
    card.copy_in(x, host)
    card.default_stream.record().synchronize()
    host[:] = 3
    assert (card.download(x) == 2).all()


def test_late_replay_keeps_its_arrays():
    card = EmulatedCard(late=True)
    x, y = card.upload(numbers()), card.zeros(N, "float32")
    ptr = x.ptr
    with card.record() as recording:
        card.launch(add_scaled, 8, 128, x, y, N, 1.0)
    recording.replay()
    del recording, x
    gc.collect()
    assert ptr in card.allocations                       # the replay has not run yet
    np.testing.assert_array_equal(card.download(y), numbers())
    gc.collect()
    assert ptr not in card.allocations


def test_waiter_returns_when_its_position_is_reached():
    """Not when the stream's runner comes to rest: that may be waiting for the waiter."""
    card = EmulatedCard()
    a, b, go = card.stream("a"), card.stream("b"), threading.Event()
    b.push(go.wait)
    a.wait(b.record())                                   # a's worker waits for b's, which waits for `go`
    b.wait(a.record())
    time.sleep(0.05)
    go.set()
    wait_until(lambda: (a.done, b.done) == (2, 3))


def test_late_card_follows_chains_of_events():
    card, other = EmulatedCard(late=True), EmulatedCard(1, late=True)
    a, b, c = (card.stream(name) for name in "abc")
    x = card.zeros(1, "int8")
    card.fill(x, 1, a)
    b.wait(a.record())
    card.fill(x, 2, b)
    c.wait(b.record())
    other.default_stream.wait(c.record())
    other.default_stream.synchronize()
    assert a.done == a.pushed and card.download(x, card.stream())[0] == 2


@pytest.mark.parametrize("late", [False, True])
def test_random_streams_keep_every_order_that_events_force(late):
    """Random work on streams of two cards: nothing runs before what it has to wait for."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        cards = [EmulatedCard(number, late=late) for number in range(2)]
        streams = [card.stream(str(i)) for card in cards for i in range(3)]
        ran, events, needs = [], [], []                  # needs: what has to run before each operation
        known = [set() for _ in streams]                 # what comes before a stream's next operation
        for number in range(60):
            i = rng.integers(len(streams))
            if rng.random() < 0.3:
                events.append((streams[i].record(), set(known[i])))
            if events and rng.random() < 0.3:
                event, before = events[rng.integers(len(events))]
                streams[i].wait(event)
                known[i] |= before
            if events and rng.random() < 0.1:
                event, before = events[rng.integers(len(events))]
                event.synchronize()
                assert before <= set(ran) and event.done
            needs.append(set(known[i]))
            known[i].add(number)
            streams[i].push(lambda number=number: ran.append(number))
        for card in cards:
            card.synchronize()
        places = {number: place for place, number in enumerate(ran)}
        assert len(ran) == 60 and all(places[b] < places[n] for n, before in enumerate(needs) for b in before)


def test_link_speed():
    card, may_go_on, went_on = EmulatedCard(link_gbs=0.02), threading.Event(), []
    host = np.zeros(1_000_000, np.int8)
    start = time.perf_counter()
    x = card.upload(host)
    card.download(x)
    assert time.perf_counter() - start >= 0.1
    pinned = card.pinned(1_000_000, "int8")
    card.default_stream.push(lambda: went_on.append(may_go_on.wait(PATIENCE)))
    card.copy_in(x, pinned)
    start = time.perf_counter()
    may_go_on.set()                                      # the host has gone on before the copy has begun
    card.synchronize()
    assert time.perf_counter() - start >= 0.05 and went_on == [True]


def test_failure_surfaces_at_synchronize_and_stays():
    card = EmulatedCard()
    x = card.zeros(4, "float32")
    card.default_stream.push(lambda: 1 / 0)
    card.launch(add_scaled, 1, 32, x, x, 4, 1.0)
    for _ in range(2):
        with pytest.raises(LaunchError, match="emulated card 0 is broken: .*zero"):
            card.synchronize()
    with pytest.raises(LaunchError, match="broken"):
        card.download(x)


def test_damaged_machine_code_is_made_again(tmp_path):
    def result():
        native.load.cache_clear()                        # as in a new process
        card = EmulatedCard(cache_dir=tmp_path)
        y = card.zeros(N, "float32")
        card.launch(add_scaled, 8, 128, card.upload(numbers()), y, N, 1.0)
        return card.download(y)

    expected = result()
    file, = (tmp_path / "native").iterdir()
    whole = file.read_bytes()
    middle = len(whole) // 2
    for damage in (b"", whole[:middle], whole[:middle] + bytes(100) + whole[middle + 100:]):
        file.write_bytes(damage)
        np.testing.assert_array_equal(result(), expected)
        assert file.read_bytes() == whole


def test_card_works_without_a_cache(tmp_path):
    (tmp_path / "file").write_text("")
    card = EmulatedCard(cache_dir=tmp_path / "file")
    y = card.zeros(N, "float32")
    with pytest.warns(UserWarning, match="not kept"):
        card.launch(add_scaled, 8, 128, card.upload(numbers()), y, N, 1.0)
    np.testing.assert_array_equal(card.download(y), numbers())


@cuda.jit
def too_much_shared(x):
    shared = cuda.shared.array(20000, float32)
    shared[uint32(cuda.threadIdx.x)] = x[uint32(0)]
    cuda.syncthreads()
    x[uint32(0)] = shared[uint32(1)]


def test_what_the_card_cannot_do_is_said_at_the_launch(monkeypatch):
    def refuse(*arguments):
        raise Unsupported("mma.sync, line 7")

    card = EmulatedCard()
    x = card.zeros(4, "float32")
    with monkeypatch.context() as patch, pytest.raises(LaunchError, match="spin, grid .*mma.sync, line 7"):
        patch.setattr(native.NativeKernel, "prepare", refuse)
        card.launch(spin, 1, 32, x.view("uint32"), 1)
    with pytest.raises(LaunchError, match="too_much_shared.*80000 bytes of shared arrays"):
        card.launch(too_much_shared, 1, 32, x)
    card.launch(add_scaled, 1, 32, x, x, 4, 1.0)
    card.synchronize()


def test_worker_lets_the_card_go():
    card = EmulatedCard()
    card.fill(card.zeros(4, "int8"), 1)
    card.synchronize()
    worker = card.default_stream._worker
    assert worker.is_alive()
    del card
    wait_until(lambda: gc.collect() >= 0 and not worker.is_alive())     # it may hold the stream for a moment itself


def test_launch_is_cheap():
    card = EmulatedCard(late=True)
    x, y = card.zeros(N, "float32"), card.zeros(N, "float32")
    card.launch(add_scaled, 8, 128, x, y, N, 1.0)

    def microseconds():
        start = time.thread_time()                       # which other work on the machine does not stretch
        for _ in range(200):
            card.launch(add_scaled, 8, 128, x, y, N, 1.0)
        return (time.thread_time() - start) / 200 * 1e6

    assert min(microseconds() for _ in range(5)) < 500   # a guard against compiling again, not a benchmark
