"""What every kind of card must do: cases for test_card.py, and for test_nvidia.py over a stand-in for the driver.

A case is a function of a card. tests/conftest.py has pytest rewrite the assertions in here, as in a test file.
"""

import gc
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from numba import cuda, float32, uint32

from kernels.card import (MAX_THREADS, Array, CardError, LaunchError, Observer, OutOfMemory, PlannedCard, is_pinned,
                          most_threads, show_bytes)
from kernels.compile import CompileError
from kernels.emulated.card import EmulatedCard
from kernels.trace import tracing
from tests.doubling import double
from tests.own_card import own_card
from tests.until import PATIENCE

N = 1000
CASES = []


def case(function):
    """Adds a case to CASES."""
    CASES.append(function)
    return function


@cuda.jit
def add_scaled(x, y, n, scale):
    i = uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    if i < n:
        y[i] = y[i] + x[i] * scale


@cuda.jit(launch_bounds=(64, 2))
def add_one(x):
    i = uint32(cuda.threadIdx.x)
    x[i] = x[i] + float32(1)


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

@case
def upload_and_download(card):
    for dtype in ("int8", "uint8", "float16", "int32", "float32", "int64"):
        host = np.arange(-15, 15).astype(dtype).reshape(2, 3, 5)
        array = card.upload(host, "x")
        assert (array.shape, array.dtype, array.ndim, array.size) == ((2, 3, 5), dtype, 3, 30)
        assert array.nbytes == host.nbytes and array.ptr % 256 == 0
        assert array.card is card and array.name == "x"
        np.testing.assert_array_equal(card.download(array), host)


@case
def upload_takes_any_order_of_memory(card):
    host = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(card.download(card.upload(host.T)), host.T)
    np.testing.assert_array_equal(card.download(card.upload(host[:, ::2])), host[:, ::2])


@case
def views_share_memory(card):
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


@case
def empty_arrays(card):
    x, y = card.zeros((0, 5), "float32"), card.upload(np.zeros((5, 0), np.float32))
    assert x.size == 0 and card.download(x).shape == (0, 5)
    card.copy(x, y)
    card.fill(x, 1)
    card.copy_in(x, np.zeros((0, 5), np.float32))
    card.synchronize()


@case
def zeros_and_poison(card):
    x = card.zeros((3, 5), "float16")
    assert not card.download(x).any()
    card.poison(x)
    assert np.isnan(card.download(x)).all()


@case
def allocation_that_does_not_fit_names_itself(card):
    message = r"kv_cache \(float32\[1048576, 1048576\]\) needs 4096.0 GB.* free on "
    with pytest.raises(OutOfMemory, match=message):
        card.alloc((1 << 20, 1 << 20), "float32", "kv_cache")
    card.launch(add_scaled, 1, 32, *[card.zeros(8, "float32")] * 2, 8, 1.0)       # the card still works
    card.synchronize()


@case
def memory_comes_back(card):
    card = own_card(card)

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


@case
def packed_arrays_share_an_allocation(card):
    """As far as they have room. Each has its own bytes, and the allocation stays as long as one of them does."""
    card = own_card(card)
    granule, taken, free = card.granule, card.taken.nbytes, card.free_bytes
    planned = PlannedCard(card)
    planned.granule = card.granule = 2 << 20             # as in drivers, whatever card this is
    sizes = (3 << 20) + 1, 700, (1 << 20) + 300, 1       # of the last, one byte would take the rest
    try:
        with planned.packed():
            for nbytes in sizes[:3]:
                planned.alloc(nbytes, "int8")
        assert planned.packed_bytes == (4 << 20) + 256 + 768 + 512 and free - planned.free_bytes == 6 << 20
        with card.packed(planned.packed_bytes):
            arrays = [card.alloc(nbytes, "int8") for nbytes in sizes]
        assert card.taken.nbytes == taken + (6 << 20) + 256     # the last one had no room
        for byte, array in enumerate(arrays):
            card.fill(array, byte)
        for byte, array in enumerate(arrays):
            assert (card.download(array) == byte).all()
        card.free(arrays.pop(1))
        del arrays[1:], array
        gc.collect()
        assert card.taken.nbytes == taken + (6 << 20)           # the first one keeps it
        arrays.clear()
        assert card.taken.nbytes == taken
        with card.packed(1 << 50):                              # there is none of this size: as ever
            assert card.alloc(4 << 20, "int8").nbytes == 4 << 20
    finally:
        card.granule = granule


@case
def what_is_made_in_one_allocation_is_counted_before(card):
    """On a card as on paper, where `packed_bytes` stays that of what was counted there. An array that does not fit is
    named."""
    def make(card, *sizes):
        return [card.alloc(nbytes, "int8", f"array {i}") for i, nbytes in enumerate(sizes)]

    card = own_card(card)
    granule, taken, free = card.granule, card.taken.nbytes, card.free_bytes
    card.granule = 2 << 20                               # as in drivers, whatever card this is
    try:
        planned = PlannedCard(card)
        with planned.packed():
            make(planned, 1000)
        for each in planned, card:
            made = each.in_one_allocation(make, (1 << 20) + 1, 700, (1 << 20) + 300)
            assert len(made) == 3 and len({id(array.memory.backing) for array in made}) == 1
        assert (planned.packed_bytes, planned.free_bytes) == (1024, free - (6 << 20))
        assert card.taken.nbytes == taken + (4 << 20)
        with pytest.raises(OutOfMemory, match="^array 1 .*needs"):
            card.in_one_allocation(make, 1000, 1 << 50)
        del made
        gc.collect()
        assert card.taken.nbytes == taken
    finally:
        card.granule = granule


@case
def bytes_to_fill_with(card):
    x = card.zeros(4, "uint8")
    card.fill(x, 255)
    for wrong in (-1, 256):
        with pytest.raises(CardError, match="no byte"):
            card.fill(x, wrong)
    assert card.download(x).tolist() == [255] * 4


@case
def copies_check_shapes(card):
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

@case
def launch(card):
    x, y = numbers(), numbers(seed=1)
    card_y = card.upload(y)
    card.launch(add_scaled, -(-N // 128), 128, card.upload(x), card_y, N, 0.1)
    np.testing.assert_array_equal(card.download(card_y), after_add_scaled(x, y, 0.1))


@case
def launch_as_numba_writes_it(card):
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


@case
def blocks_within_launch_bounds(card):
    """A larger block might find too few registers; the emulated card, which has enough, refuses it too."""
    x = card.zeros(96, "float32")
    card.launch(add_one, 1, 64, x)
    with pytest.raises(LaunchError, match=r"add_one, grid 1, block \(32, 3\): its launch bounds .* 64 threads"):
        card.launch(add_one, 1, (32, 3), x)
    assert card.download(x).sum() == 64
    assert most_threads(add_one) == 64 and most_threads(add_scaled) == MAX_THREADS


@case
def arguments_of_every_kind(card):
    out = card.zeros(6, "float64")
    half = card.upload(np.array([1.5], np.float16))
    table = card.upload(np.arange(12, dtype=np.int32).reshape(3, 4))
    card.launch(typed, 1, 1, out, 2**32 - 1, 0.1, True, np.int64(-5), half, table)
    np.testing.assert_array_equal(card.download(out), [2**32 - 1, np.float32(0.1), 1, -5, 1.5, 6])
    card.launch(typed, 1, 1, out, np.int8(-3), np.float64(0.1), False, np.uint16(7), half, table[1:])
    np.testing.assert_array_equal(card.download(out), [-3, 0.1, 0, 7, 1.5, 10])


@case
def grid_and_block_of_three_axes(card):
    for grid, block in (((3, 4, 5), (4, 2, 3)), ((7,), (5, 3)), (2, 33)):
        n_blocks, n_threads = np.prod(grid), np.prod(block)
        out = card.zeros((n_blocks, n_threads), "uint32")
        card.launch(where, grid, block, out)
        expected = np.arange(n_blocks)[:, None] * 1000 + np.arange(n_threads)
        np.testing.assert_array_equal(card.download(out), expected)


@case
def grid_beyond_65535_blocks(card):
    out = card.zeros((70000, 1), "uint32")
    card.launch(where, 70000, 1, out)
    np.testing.assert_array_equal(card.download(out)[:, 0], np.arange(70000) * 1000)


@case
def dynamic_shared_memory(card):
    for threads in (64, 1000):
        x, y = numbers(threads), card.zeros(threads, "float32")
        card.launch(reversed_by_shared, 1, threads, card.upload(x), y, shared=4 * threads)
        np.testing.assert_array_equal(card.download(y), x[::-1])
    card.poison(y)
    assert card.max_shared > 48 << 10
    card.launch(reversed_by_shared, 1, threads, card.upload(x), y, shared=card.max_shared)
    np.testing.assert_array_equal(card.download(y), x[::-1])


@case
def wrong_number_of_arguments(card):
    with pytest.raises(CompileError, match="add_scaled"):
        card.launch(add_scaled, 1, 32, card.zeros(4, "float32"))


@case
def launches_from_several_threads(card):
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

@case
def events_order_streams(card):
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


@case
def what_names_no_stream_goes_to_the_one_that_the_thread_is_on(card):
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


@case
def streams_that_wait_for_each_other(card):
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
    thread.join(PATIENCE)
    assert not thread.is_alive()
    expected = after_add_scaled(numbers(), np.float32(0), 1.0, times=600)
    np.testing.assert_array_equal(card.download(y), expected)


@case
def events_measure_time(card):
    slow = card.zeros(1, "uint32")
    card.launch(spin, 1, 1, slow, 1)
    start = card.default_stream.record()
    card.launch(spin, 1, 1, slow, 1_000_000)
    end = card.default_stream.record()
    end.synchronize()
    assert 1e-5 < end.seconds_since(start) < PATIENCE


@case
def pageable_memory_is_read_at_the_call(card):
    x, slow, stream = card.zeros(N, "float32"), card.zeros(1, "uint32"), card.stream()
    host = numbers()
    card.launch(spin, 1, 1, slow, 3_000_000, stream=stream)
    card.copy_in(x, host, stream)
    host[:] = 0
    np.testing.assert_array_equal(card.download(x, stream), numbers())


@case
def mapped(card):
    """The same bytes for the host and for kernels; views of them, too."""
    card = own_card(card)
    before, n_allocations = card.free_bytes, len(card.allocations)
    array, host = card.mapped((4, N), np.float32, "both")
    assert is_pinned(host) and not host.any() and array.shape == host.shape and card.free_bytes <= before
    host[1] = numbers()
    y = card.zeros(N, np.float32)
    card.launch(add_scaled, 8, 128, array[1], y, N, 2.0)
    card.launch(add_scaled, 8, 128, y, array[3], N, 1.0)
    card.synchronize()
    np.testing.assert_array_equal(host[3], numbers() * np.float32(2))
    twice = card.attach(host[2:], "half of it")
    assert twice.ptr == array[2].ptr
    np.testing.assert_array_equal(card.download(twice)[1], host[3])
    card.poison(twice)
    card.synchronize()
    assert np.isnan(host[2:]).all() and not np.isnan(host[:2]).any()
    card.free(twice)
    assert np.isnan(host[2]).all()                      # the bytes are of the host
    with pytest.raises(CardError, match="was freed"):
        card.download(twice)
    del array, twice, y
    gc.collect()
    assert len(card.allocations) == n_allocations
    with pytest.raises(CardError, match="contiguous"):
        card.attach(host[:, 1])
    if card.kind != "emulated":
        with pytest.raises(CardError, match="only if it is page-locked; words is not"):
            card.attach(np.zeros(4), "words")


@case
def pinned(card):
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

@case
def record_and_replay(card):
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


@case
def replays_without_waiting_in_between(card):
    x, y = card.upload(numbers()), card.zeros(N, "float32")
    with card.record() as recording:
        for _ in range(3):
            card.launch(add_scaled, 8, 128, x, y, N, 1.0)
    for _ in range(20):
        recording.replay()
        card.launch(add_scaled, 8, 128, x, y, N, 1.0)
    np.testing.assert_array_equal(card.download(y), after_add_scaled(numbers(), np.float32(0), 1.0, times=80))


@case
def recording_keeps_its_arrays(card):
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


@case
def replay_after_free_is_refused(card):
    x, y, z = card.upload(numbers()), card.zeros(N, "float32", "freed_later"), card.zeros(N, "float32")
    with card.record() as recording:
        card.launch(add_scaled, 8, 128, x, z, N, 1.0)
        card.copy(x[:10], y[:10])
    recording.replay()
    card.free(y)
    with pytest.raises(CardError, match="freed_later.*was freed"):
        recording.replay()
    np.testing.assert_array_equal(card.download(z), numbers())      # the card still works


@case
def only_card_side_work_is_recorded(card):
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


@case
def other_threads_are_not_recorded(card):
    x = card.zeros(4, "int32")
    with card.record() as recording:
        thread = threading.Thread(target=lambda: card.fill(x, 1, card.default_stream))
        thread.start()
        thread.join()
    assert recording.operations == []
    card.synchronize()
    assert (card.download(x) == 0x01010101).all()


# ---- several cards -----------------------------------------------------------------------------------------

@case
def two_cards_do_not_know_each_other(card):
    other = EmulatedCard(7)
    mine, theirs = card.upload(numbers()), other.zeros(N, "float32")
    with pytest.raises(LaunchError, match="add_scaled.*is on emulated card 7, not on"):
        card.launch(add_scaled, 1, 32, mine, theirs, N, 1.0)
    with pytest.raises(CardError, match="is on"):
        other.copy(theirs, mine)
    with pytest.raises(CardError, match="is on another card of the name emulated card 7$"):
        EmulatedCard(7).download(theirs)
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


@case
def cards_side_by_side(card):
    other = EmulatedCard(8)
    arrays = {c: (c.upload(numbers()), c.zeros(N, "float32")) for c in (card, other)}
    for _ in range(5):
        for c, (x, y) in arrays.items():
            c.launch(add_scaled, 8, 128, x, y, N, 1.0)
    for c, (_, y) in arrays.items():
        np.testing.assert_array_equal(c.download(y), after_add_scaled(numbers(), np.float32(0), 1.0, times=5))


@case
def a_planned_card_adds_up_and_does_nothing(card):
    card = own_card(card)
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


@case
def a_limit_holds_for_a_card_and_its_twins(card):
    card = own_card(card)
    twin, before = card.twin(), card.taken.nbytes
    card.limit(before + (8 << 20))
    try:
        x = twin.alloc((3 << 20) + 1, "int8", "x")
        held = (3 << 20) + 1 + -((3 << 20) + 1) % card.granule
        assert card.free_bytes == twin.free_bytes == (8 << 20) - held
        with pytest.raises(OutOfMemory, match="y .*needs 6.0 MB, but .* are free"):
            card.alloc(6 << 20, "int8", "y")
        twin.free(x)
        assert card.free_bytes == 8 << 20 and len(card.alloc(6 << 20, "int8")) == 6 << 20
        planned = PlannedCard(card)
        planned.alloc(16 << 20, "int8")         # a plan may want more than there is, and says so
        assert planned.free_bytes < 0
    finally:
        card.limit(None)


@case
def description(card):
    assert str(card.n_sms) in card.describe() or "thread" in card.describe()
    assert show_bytes(999) == "999 bytes" and show_bytes(3 << 29) == "1.5 GB"
    assert card.cc >= (7, 0) and 0 < card.free_bytes <= card.memory_bytes
    x = card.zeros((2, 3), "int8", "x")
    assert repr(x) == "<x: int8[2, 3]>" and isinstance(x, Array)


# ---- who looks on ------------------------------------------------------------------------------------------

def of_kind(trace, *kinds):
    return [span for span in trace.spans if span.kind in kinds]


@case
def trace_of_every_operation(card):
    before, copies = dict(vars(card)), card.stream("copies")
    x, host = card.zeros(N, np.float32, "x"), card.pinned(N, np.float32)
    host[:] = 1
    with card.record("twice") as recording:
        for _ in range(2):
            card.launch(double, 4, 256, x, N)
    with tracing([card]) as trace:
        card.copy_in(x, host, copies)
        card.default_stream.wait(copies.record())
        with card.span("all"):
            card.launch(double, 4, 256, x, N)
            recording.replay()
        with card.record():
            card.launch(double, 4, 256, x, N)
        copies.wait(card.default_stream.record())
        card.copy_out(host, x, copies)
        copies.record().synchronize()
    assert (host == 8).all() and set(vars(card)) == set(before) and card.observer is None
    assert [(s.row, s.name) for s in of_kind(trace, "copy")] == [("copies", "in: x"), ("copies", "out: x")]
    assert all(s.facts["bytes"] == 4 * N for s in of_kind(trace, "copy"))
    kernel, = of_kind(trace, "kernel")
    assert (kernel.name, kernel.row, kernel.facts["grid"]) == ("double", "default", (4, 1, 1))
    replay, = of_kind(trace, "replay")
    assert (replay.name, replay.facts) == ("twice", {"kernels": {"double": 2}})
    everything, = of_kind(trace, "span")
    assert everything.start <= kernel.start <= kernel.end <= replay.start <= replay.end <= everything.end
    assert {s.row for s in of_kind(trace, "wait") if s.process == card.name} == {"default", "copies"}
    card.launch(double, 4, 256, x, N)                   # no longer traced
    card.synchronize()
    assert len(of_kind(trace, "kernel")) == 1


class Noting(Observer):
    """Notes each operation when it begins and when it has ended."""

    def __init__(self):
        self.noted = []

    @contextmanager
    def _note(self, name, *about):
        self.noted.append((name, *about))
        yield
        self.noted.append(f"{name} ended")

    def launch(self, stream, function, grid, block, shared):
        return self._note("launch", stream.name, function.name, grid, block, shared)

    def copy_in(self, stream, dst):
        return self._note("copy_in", stream.name, dst.name)

    def copy_out(self, stream, src):
        return self._note("copy_out", stream.name, src.name)

    def copy(self, stream, dst, src):
        return self._note("copy", stream.name, dst.name, src.name)

    def fill(self, stream, array):
        return self._note("fill", stream.name, array.name)

    def replay(self, stream, recording):
        return self._note("replay", stream.name, recording.name)

    def hold(self, stream, event):
        return self._note("hold", stream.name)

    def host_wait(self, event):
        return self._note("host_wait")

    def span(self, name):
        return self._note("span", name)


@case
def an_observer_is_told_of_every_operation(card):
    x, y, other = card.zeros(N, np.float32, "x"), card.zeros(N, np.float32, "y"), card.stream("other")
    with card.record("twice") as recording:
        card.launch(double, 4, 256, x, N)
    observer, host = Noting(), np.ones(N, np.float32)
    with card.observed_by(observer):
        with pytest.raises(CardError, match=f"{card.name} is observed already"), card.observed_by(Observer()):
            pass
        with card.span("all"):
            card.launch(double, (4, 1), 256, x, N, shared=8)
            card.copy_in(x, host)
            card.copy(y, x)
            card.fill(x, 0)
            recording.replay(other)
            other.wait(card.default_stream.record())
            card.copy_out(host, y, other)
            other.record().synchronize()
    assert (host == 1).all() and card.observer is None
    expected = [("launch", "default", "double", (4, 1, 1), (256, 1, 1), 8), ("copy_in", "default", "x"),
                ("copy", "default", "y", "x"), ("fill", "default", "x"), ("replay", "other", "twice"),
                ("hold", "other"), ("copy_out", "other", "y"), ("host_wait",)]
    pairs = [note for what in expected for note in (what, f"{what[0]} ended")]
    assert observer.noted == [("span", "all"), *pairs, "span ended"]
    with card.observed_by(Observer()):                   # which takes no notice
        card.launch(double, 4, 256, x, N)
    card.launch(double, 4, 256, x, N)
    card.synchronize()
    assert len(observer.noted) == 2 * len(expected) + 2
