"""The Card interface, the same tests on every kind of card, and what only an emulated card can show."""

import gc
import threading
import time

import numpy as np
import pytest
from numba import cuda, float32, uint32

from kernels.card import Array, CardError, LaunchError, OutOfMemory, PlannedCard, is_pinned, open_cards, show_bytes
from kernels.compile import CompileError
from kernels.emulated import native
from kernels.emulated.card import EmulatedCard
from kernels.emulated.ptx import Unsupported

N = 1000


@cuda.jit
def add_scaled(x, y, n, scale):
    i = uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    if i < n:
        y[i] = y[i] + x[i] * scale


@cuda.jit
def typed(out, integer, real, flag, wide, half, table):
    out[0] = integer
    out[1] = real
    out[2] = 1 if flag else 0
    out[3] = wide
    out[4] = float32(half[0])
    out[5] = table[uint32(1), uint32(2)]


@cuda.jit
def where(out):
    place = uint32(cuda.blockIdx.x + cuda.gridDim.x * (cuda.blockIdx.y + cuda.gridDim.y * cuda.blockIdx.z))
    plane = uint32(cuda.threadIdx.y + cuda.blockDim.y * cuda.threadIdx.z)
    thread = uint32(cuda.threadIdx.x + cuda.blockDim.x * plane)
    out[place, thread] = place * uint32(1000) + thread


@cuda.jit
def reversed_by_shared(x, y):
    shared = cuda.shared.array(0, float32)
    i, n = uint32(cuda.threadIdx.x), uint32(cuda.blockDim.x)
    shared[i] = x[i]
    cuda.syncthreads()
    y[i] = shared[n - uint32(1) - i]


@cuda.jit
def spin(out, turns):
    value = uint32(1)
    for _ in range(uint32(turns)):
        value = uint32(value * uint32(1664525) + uint32(1013904223))
    out[uint32(0)] = value


def numbers(n=N, seed=0):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def after_add_scaled(x, y, scale, times=1):
    for _ in range(times):
        y = y + x * np.float32(scale)
    return y


# ---- memory ------------------------------------------------------------------------------------------------

def test_upload_and_download(card):
    for dtype in ("int8", "uint8", "float16", "int32", "float32", "int64"):
        host = np.arange(-15, 15).astype(dtype).reshape(2, 3, 5)
        array = card.upload(host, "x")
        assert (array.shape, array.dtype, array.ndim, array.size) == ((2, 3, 5), dtype, 3, 30)
        assert array.nbytes == host.nbytes and array.ptr % 256 == 0
        assert array.card is card and array.name == "x"
        np.testing.assert_array_equal(card.download(array), host)


def test_upload_takes_any_order_of_memory(card):
    host = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(card.download(card.upload(host.T)), host.T)
    np.testing.assert_array_equal(card.download(card.upload(host[:, ::2])), host[:, ::2])


def test_views_share_memory(card):
    host = np.arange(24, dtype=np.float32).reshape(4, 6)
    x = card.upload(host)
    np.testing.assert_array_equal(card.download(x[2]), host[2])
    np.testing.assert_array_equal(card.download(x[-1]), host[-1])
    np.testing.assert_array_equal(card.download(x[1:3]), host[1:3])
    np.testing.assert_array_equal(card.download(x[1:][1]), host[2])
    np.testing.assert_array_equal(card.download(x.reshape(-1, 3)), host.reshape(-1, 3))
    np.testing.assert_array_equal(card.download(x.view("uint8")), host.view("uint8"))
    assert x.view("int8").view("float16").shape == (4, 12)
    card.fill(x[1], 0)
    assert not card.download(x)[1].any() and card.download(x)[2].any()
    with pytest.raises(IndexError):
        x[4]
    with pytest.raises(ValueError):
        x.reshape(5, 5)
    with pytest.raises(ValueError):
        card.alloc((3, 3), "int8").view("float32")


def test_empty_arrays(card):
    x, y = card.zeros((0, 5), "float32"), card.upload(np.zeros((5, 0), np.float32))
    assert x.size == 0 and card.download(x).shape == (0, 5)
    card.copy(x, y)
    card.fill(x, 1)
    card.copy_in(x, np.zeros((0, 5), np.float32))
    card.synchronize()


def test_zeros_and_poison(card):
    x = card.zeros((3, 5), "float16")
    assert not card.download(x).any()
    card.poison(x)
    assert np.isnan(card.download(x)).all()


def test_allocation_that_does_not_fit_names_itself(card):
    message = r"kv_cache \(float32\[1048576, 1048576\]\) needs 4096.0 GB.* free on "
    with pytest.raises(OutOfMemory, match=message):
        card.alloc((1 << 20, 1 << 20), "float32", "kv_cache")
    card.launch(add_scaled, 1, 32, *[card.zeros(8, "float32")] * 2, 8, 1.0)       # the card still works
    card.synchronize()


def test_memory_comes_back(card):
    def alive():
        return sum(nbytes for nbytes, _ in card.allocations.values())

    gc.collect()
    before = alive()
    x = card.alloc(1 << 20, "int8", "mine")
    assert alive() == before + (1 << 20) and card.allocations[x.ptr] == (1 << 20, "mine")
    part = x[10:]
    del x
    assert alive() == before + (1 << 20)                 # a view keeps it
    del part
    assert alive() == before
    y = card.zeros(100, "float32", "gone")
    card.free(y)
    assert alive() == before
    for use in (lambda: card.download(y), lambda: card.free(y), lambda: card.copy(y, y),
                lambda: card.fill(y, 0), lambda: card.launch(spin, 1, 1, y, 1)):
        with pytest.raises(CardError, match="gone.*freed"):
            use()
    with pytest.raises(CardError, match="part of a larger array"):
        card.free(card.zeros(4, "int8")[1:])


@pytest.mark.parametrize("dtype", [">f4", "V12", "datetime64[s]", [("a", "f4")], "U3"])
def test_only_native_numbers_are_items(card, dtype):
    with pytest.raises(TypeError, match="native byte order"):
        card.upload(np.zeros(3, dtype))
    with pytest.raises(TypeError, match="native byte order"):
        card.alloc(12, "int8").view(">i2")


def test_bytes_to_fill_with(card):
    x = card.zeros(4, "uint8")
    card.fill(x, 255)
    for wrong in (-1, 256):
        with pytest.raises(CardError, match="no byte"):
            card.fill(x, wrong)
    assert card.download(x).tolist() == [255] * 4


def test_copies_check_shapes(card):
    x = card.zeros(4, "float32")
    for host in (np.zeros(5, np.float32), np.zeros(4, np.float64), np.zeros((4, 1), np.float32)):
        with pytest.raises(CardError, match="does not match"):
            card.copy_in(x, host)
        with pytest.raises(CardError, match="does not match"):
            card.copy_out(host, x)
    with pytest.raises(CardError, match="contiguous"):
        card.copy_out(np.zeros(8, np.float32)[::2], x)
    with pytest.raises(CardError, match="bytes"):
        card.copy(x, card.zeros(5, "float32"))


# ---- launches ----------------------------------------------------------------------------------------------

def test_launch(card):
    x, y = numbers(), numbers(seed=1)
    card_y = card.upload(y)
    card.launch(add_scaled, -(-N // 128), 128, card.upload(x), card_y, N, 0.1)
    np.testing.assert_array_equal(card.download(card_y), after_add_scaled(x, y, 0.1))


def test_launch_as_numba_writes_it(card):
    """The same launch, on the card of the arrays; dynamic shared memory and a stream may be said too."""
    x, y = numbers(), numbers(seed=1)
    card_y, stream = card.upload(y), card.stream()
    add_scaled[-(-N // 128), 128](card.upload(x), card_y, N, 0.1)
    np.testing.assert_array_equal(card.download(card_y), after_add_scaled(x, y, 0.1))
    add_scaled[-(-N // 128), (128,), stream, 64](card.upload(x), card_y, N, 0.1)
    np.testing.assert_array_equal(card.download(card_y, stream), after_add_scaled(x, y, 0.1, times=2))
    with pytest.raises(LaunchError, match="add_scaled, grid .*dynamic shared memory"):
        add_scaled[1, 32, None, 1 << 20](card_y, card_y, N, 0.1)
    card.free(card_y)
    with pytest.raises(LaunchError, match="add_scaled.*freed"):
        add_scaled[1, 32](card_y, card_y, N, 0.1)


def test_arguments_of_every_kind(card):
    out = card.zeros(6, "float64")
    half = card.upload(np.array([1.5], np.float16))
    table = card.upload(np.arange(12, dtype=np.int32).reshape(3, 4))
    card.launch(typed, 1, 1, out, 2**32 - 1, 0.1, True, np.int64(-5), half, table)
    np.testing.assert_array_equal(card.download(out), [2**32 - 1, np.float32(0.1), 1, -5, 1.5, 6])
    card.launch(typed, 1, 1, out, np.int8(-3), np.float64(0.1), False, np.uint16(7), half, table[1:])
    np.testing.assert_array_equal(card.download(out), [-3, 0.1, 0, 7, 1.5, 10])


def test_grid_and_block_of_three_axes(card):
    for grid, block in (((3, 4, 5), (4, 2, 3)), ((7,), (5, 3)), (2, 33)):
        n_blocks, n_threads = np.prod(grid), np.prod(block)
        out = card.zeros((n_blocks, n_threads), "uint32")
        card.launch(where, grid, block, out)
        expected = np.arange(n_blocks)[:, None] * 1000 + np.arange(n_threads)
        np.testing.assert_array_equal(card.download(out), expected)


def test_grid_beyond_65535_blocks(card):
    out = card.zeros((70000, 1), "uint32")
    card.launch(where, 70000, 1, out)
    np.testing.assert_array_equal(card.download(out)[:, 0], np.arange(70000) * 1000)


def test_dynamic_shared_memory(card):
    for threads in (64, 1000):
        x, y = numbers(threads), card.zeros(threads, "float32")
        card.launch(reversed_by_shared, 1, threads, card.upload(x), y, shared=4 * threads)
        np.testing.assert_array_equal(card.download(y), x[::-1])
    card.poison(y)
    assert card.max_shared > 48 << 10
    card.launch(reversed_by_shared, 1, threads, card.upload(x), y, shared=card.max_shared)
    np.testing.assert_array_equal(card.download(y), x[::-1])


@pytest.mark.parametrize("grid, block, shared, message", [
    (0, 32, 0, "a grid is"), ((1, 65536), 32, 0, "a grid is"), ((1, 1, 1, 1), 32, 0, "a grid is"),
    (1, 1025, 0, "a block is"), (1, (1, 1, 65), 0, "a block is"), (1, 0, 0, "a block is"),
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


def test_wrong_number_of_arguments(card):
    with pytest.raises(CompileError, match="add_scaled"):
        card.launch(add_scaled, 1, 32, card.zeros(4, "float32"))


def test_launches_from_several_threads(card):
    x = card.upload(numbers())
    results, streams = [card.zeros(N, "float32") for _ in range(4)], [card.stream() for _ in range(4)]

    def work(y, stream):
        for _ in range(50):
            card.launch(add_scaled, 8, 128, x, y, N, 1.0, stream=stream)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(results, streams)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for y, stream in zip(results, streams):
        expected = after_add_scaled(numbers(), np.zeros(N, np.float32), 1.0, times=50)
        np.testing.assert_array_equal(card.download(y, stream), expected)


# ---- order -------------------------------------------------------------------------------------------------

def test_events_order_streams(card):
    x, y = card.zeros(N, "float32"), card.zeros(N, "float32")
    host = card.pinned(N, "float32")
    host[:] = numbers()
    copies = card.stream("copies")
    slow = card.zeros(1, "uint32")
    card.launch(spin, 1, 1, slow, 3_000_000, stream=copies)
    card.copy_in(x, host, copies)
    arrived = copies.record()
    card.default_stream.wait(arrived)
    card.launch(add_scaled, 8, 128, x, y, N, 2.0)
    back = card.pinned(N, "float32")
    card.copy_out(back, y)
    card.default_stream.synchronize()
    assert arrived.done
    np.testing.assert_array_equal(back, numbers() * 2)


def test_what_names_no_stream_goes_to_the_one_that_the_thread_is_on(card):
    streams, kept = [card.stream(name) for name in "ab"], []
    for stream in streams:
        stream.keep = lambda name, values, stream=stream: kept.append(stream)
    x, y = card.zeros(N, "float32"), card.zeros(N, "float32")

    def launch(**options):
        card.launch(add_scaled, 4, 256, x, y, N, 1.0, **options)

    with card.on(streams[0]):
        launch()
        with card.on(streams[1]):
            launch()
        launch(stream=streams[1])
        card.copy(y, x)
        other = threading.Thread(target=launch)     # which is on none
        other.start()
        other.join()
    launch()
    assert kept == [streams[0], streams[1], streams[1], streams[0]]
    for stream in streams:
        stream.synchronize()


def test_streams_that_wait_for_each_other(card):
    """Double buffering: each stream waits for the other's last step, again and again."""
    a, b = card.stream("a"), card.stream("b")
    x, y = card.upload(numbers()), card.zeros(N, "float32")

    def work():
        for _ in range(300):
            card.launch(add_scaled, 8, 128, x, y, N, 1.0, stream=b)
            a.wait(b.record())
            card.launch(add_scaled, 8, 128, x, y, N, 1.0, stream=a)
            b.wait(a.record())
        card.synchronize()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    expected = after_add_scaled(numbers(), np.float32(0), 1.0, times=600)
    np.testing.assert_array_equal(card.download(y), expected)


def test_events_measure_time(card):
    slow = card.zeros(1, "uint32")
    card.launch(spin, 1, 1, slow, 1)
    start = card.default_stream.record()
    card.launch(spin, 1, 1, slow, 1_000_000)
    end = card.default_stream.record()
    end.synchronize()
    assert 1e-5 < end.seconds_since(start) < 10


def test_pageable_memory_is_read_at_the_call(card):
    x, slow, stream = card.zeros(N, "float32"), card.zeros(1, "uint32"), card.stream()
    host = numbers()
    card.launch(spin, 1, 1, slow, 3_000_000, stream=stream)
    card.copy_in(x, host, stream)
    host[:] = 0
    np.testing.assert_array_equal(card.download(x, stream), numbers())


def test_pinned(card):
    host = card.pinned((3, 4), "float16")
    assert host.shape == (3, 4) and host.dtype == np.float16
    assert is_pinned(host) and is_pinned(host[1:, 2]) and is_pinned(host.view("int16").reshape(-1))
    assert not is_pinned(host.copy()) and not is_pinned(np.zeros(3))
    x = card.zeros((3, 4), "float16")
    host[:] = 1.5
    card.copy_in(x, host)
    card.synchronize()
    host[:] = 0
    card.copy_out(host, x)
    card.synchronize()
    assert (host == 1.5).all()


# ---- record and replay -------------------------------------------------------------------------------------

def test_record_and_replay(card):
    x, y, z = card.upload(numbers()), card.zeros(N, "float32"), card.zeros(N, "float32")
    with card.record() as recording:
        card.launch(add_scaled, 8, 128, x, y, N, 1.0)
        card.launch(add_scaled, 8, 128, x, y, N, 0.5)
        card.copy(z, y)
        card.fill(y[:10], 0)
        card.launch(add_scaled, 8, 128, x, z, N, 1.0)
    assert not card.download(y).any()                    # nothing has run
    expected_y = np.zeros(N, np.float32)
    for stream in (None, card.stream(), None):
        recording.replay(stream)
        (stream or card.default_stream).synchronize()
        expected_y = after_add_scaled(numbers(), after_add_scaled(numbers(), expected_y, 1.0), 0.5)
        expected_z = after_add_scaled(numbers(), expected_y, 1.0)
        expected_y[:10] = 0
        np.testing.assert_array_equal(card.download(y), expected_y)
        np.testing.assert_array_equal(card.download(z), expected_z)


def test_replays_without_waiting_in_between(card):
    x, y = card.upload(numbers()), card.zeros(N, "float32")
    with card.record() as recording:
        for _ in range(3):
            card.launch(add_scaled, 8, 128, x, y, N, 1.0)
    for _ in range(20):
        recording.replay()
        card.launch(add_scaled, 8, 128, x, y, N, 1.0)
    np.testing.assert_array_equal(card.download(y), after_add_scaled(numbers(), np.float32(0), 1.0, times=80))


def test_recording_keeps_its_arrays(card):
    x, y = card.upload(numbers()), card.zeros(N, "float32")
    ptr = x.ptr
    with card.record() as recording:
        card.launch(add_scaled, 8, 128, x, y, N, 1.0)
    del x
    gc.collect()
    assert ptr in card.allocations
    recording.replay()
    np.testing.assert_array_equal(card.download(y), numbers())
    del recording
    gc.collect()
    assert ptr not in card.allocations


def test_replay_after_free_is_refused(card):
    x, y, z = card.upload(numbers()), card.zeros(N, "float32", "freed_later"), card.zeros(N, "float32")
    with card.record() as recording:
        card.launch(add_scaled, 8, 128, x, z, N, 1.0)
        card.copy(x[:10], y[:10])
    recording.replay()
    card.free(y)
    with pytest.raises(CardError, match="freed_later.*was freed"):
        recording.replay()
    np.testing.assert_array_equal(card.download(z), numbers())      # the card still works


def test_only_card_side_work_is_recorded(card):
    x = card.zeros(4, "float32")
    before = card.default_stream.record()
    with card.record():
        for wrong in (lambda: card.copy_in(x, np.zeros(4, np.float32)), lambda: card.download(x)):
            with pytest.raises(CardError, match="cannot be recorded"):
                wrong()
        with pytest.raises(CardError, match="give no stream"):
            card.fill(x, 0, card.default_stream)
        for wrong in (card.default_stream.record, lambda: card.default_stream.wait(before)):
            with pytest.raises(CardError, match="cannot be recorded"):
                wrong()
    with pytest.raises(ZeroDivisionError):
        with card.record():
            1 / 0
    with card.record() as empty:
        pass
    empty.replay()
    card.synchronize()


def test_other_threads_are_not_recorded(card):
    x = card.zeros(4, "int32")
    with card.record() as recording:
        thread = threading.Thread(target=lambda: card.fill(x, 1, card.default_stream))
        thread.start()
        thread.join()
    card.synchronize()
    assert (card.download(x) == 0x01010101).all()


# ---- several cards -----------------------------------------------------------------------------------------

def test_two_cards_do_not_know_each_other(card):
    other = EmulatedCard(7)
    mine, theirs = card.upload(numbers()), other.zeros(N, "float32")
    with pytest.raises(LaunchError, match="add_scaled.*is on emulated card 7, not on"):
        card.launch(add_scaled, 1, 32, mine, theirs, N, 1.0)
    with pytest.raises(CardError, match="is on"):
        other.copy(theirs, mine)
    with card.record() as recording:
        card.launch(add_scaled, 1, 32, mine, mine, N, 1.0)
    stream = other.default_stream
    for use in (lambda: card.launch(add_scaled, 1, 32, mine, mine, N, 1.0, stream=stream),
                lambda: card.copy(mine, mine, stream), lambda: recording.replay(stream)):
        with pytest.raises(CardError, match="cannot use a stream of emulated card 7"):
            use()
    # The way from card to card leads through the host; events order it across cards.
    host = card.pinned(N, "float32")
    card.copy_out(host, mine)
    if type(card) is EmulatedCard:
        other.default_stream.wait(card.default_stream.record())
    else:
        card.synchronize()
    other.copy_in(theirs, host)
    np.testing.assert_array_equal(other.download(theirs), numbers())


def test_cards_side_by_side(card):
    other = EmulatedCard(8)
    arrays = {c: (c.upload(numbers()), c.zeros(N, "float32")) for c in (card, other)}
    for _ in range(5):
        for c, (x, y) in arrays.items():
            c.launch(add_scaled, 8, 128, x, y, N, 1.0)
    for c, (_, y) in arrays.items():
        np.testing.assert_array_equal(c.download(y), after_add_scaled(numbers(), np.float32(0), 1.0, times=5))


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


def test_a_planned_card_adds_up_and_does_nothing(card):
    planned, free = PlannedCard(card), card.free_bytes
    planned.granule = 2 << 20                           # as drivers have it: large arrays in whole ones,
    large, small = planned.alloc((3 << 20) + 1, "int8", "large"), [planned.zeros(1000, "int8") for _ in range(3)]
    planned.launch(add_scaled, 1, 32, large, small[0], 5, 1.0)
    planned.copy_in(small[0], np.zeros(1000, np.int8), planned.stream("copies"))
    planned.default_stream.wait(planned.default_stream.record())
    planned.default_stream.record().synchronize()
    assert planned.free_bytes == free - (6 << 20)       # and small ones in one
    planned.alloc(1 << 50, "int8")
    assert planned.free_bytes < 0 and planned.describe() == card.describe() and planned.n_sms == card.n_sms


def test_description(card):
    assert str(card.n_sms) in card.describe() or "thread" in card.describe()
    assert show_bytes(999) == "999 bytes" and show_bytes(3 << 29) == "1.5 GB"
    assert card.cc >= (7, 0) and 0 < card.free_bytes <= card.memory_bytes
    x = card.zeros((2, 3), "int8", "x")
    assert repr(x) == "<x: int8[2, 3]>" and isinstance(x, Array)


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
    end = time.monotonic() + 20
    while (a.done, b.done) != (2, 3) and time.monotonic() < end:
        time.sleep(0.01)
    assert (a.done, b.done) == (2, 3)


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
    card = EmulatedCard(link_gbs=0.02)
    host = np.zeros(1_000_000, np.int8)
    start = time.perf_counter()
    x = card.upload(host)
    card.download(x)
    assert 0.1 <= time.perf_counter() - start < 1
    start = time.perf_counter()
    pinned = card.pinned(1_000_000, "int8")
    card.copy_in(x, pinned)
    assert time.perf_counter() - start < 0.04            # the host goes on while the copy is under way
    card.synchronize()
    assert time.perf_counter() - start >= 0.05


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
    end = time.monotonic() + 10
    while worker.is_alive() and time.monotonic() < end:  # the worker itself may hold the stream for a moment
        gc.collect()
        worker.join(timeout=0.1)
    assert not worker.is_alive()


def test_launch_is_cheap():
    card = EmulatedCard(late=True)
    x, y = card.zeros(N, "float32"), card.zeros(N, "float32")
    card.launch(add_scaled, 8, 128, x, y, N, 1.0)

    def microseconds():
        start = time.perf_counter()
        for _ in range(200):
            card.launch(add_scaled, 8, 128, x, y, N, 1.0)
        return (time.perf_counter() - start) / 200 * 1e6

    assert min(microseconds() for _ in range(5)) < 500   # a guard against compiling again, not a benchmark
