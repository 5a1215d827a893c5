"""The checking mode: planted faults are found with kernel, line, block and thread; what is right passes."""

import ctypes
import inspect
import re

import numpy as np
import pytest
from numba import cuda, float32, int32, uint32, uint64

import qengine
from kernels.card import LaunchError
from kernels.emulated import checking
from kernels.intrinsics import (commit_copies, global_address, load_shared4, load_words4, shared_address, start_copy,
                                wait_for_copies, warp_sum)
from kernels.open import open_cards
from tests.oracle import DATA


@pytest.fixture
def checked():
    """A new card for each test: a fault breaks it."""
    return open_cards("emulated", checked=True)[0]


def line_of(kernel, mark="# fault"):
    """The number of the line of a kernel that has this comment."""
    lines, first = inspect.getsourcelines(kernel.py_func)
    return first + next(i for i, line in enumerate(lines) if mark in line)


def fault(card, kernel, grid, block, *args, shared=0):
    """The message with which a launch breaks the card; it names the kernel, this file and the line marked."""
    card.launch(kernel, grid, block, *args, shared=shared)
    with pytest.raises(LaunchError) as caught:
        card.synchronize()
    message = str(caught.value)
    assert f"{kernel.__name__} ({__file__}, line {line_of(kernel)})" in message
    return message


def passes(card, kernel, grid, block, *args, shared=0):
    card.launch(kernel, grid, block, *args, shared=shared)
    card.synchronize()


# ---- races in what a kernel calls --------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def neighbour(x):
    tile = cuda.shared.array(32, float32)
    tile[cuda.threadIdx.x] = x
    return tile[uint32(uint32(cuda.threadIdx.x) ^ uint32(1))]


@cuda.jit
def of_neighbours(y):
    y[cuda.threadIdx.x] = neighbour(y[cuda.threadIdx.x])  # fault


def test_a_race_in_a_device_function(checked):
    """PTX has the line that calls it, and no other."""
    message = fault(checked, of_neighbours, 1, 32, checked.zeros(32, np.float32))
    assert "or in a device function that this line calls\n" in message


# ---- loops that never end ----------------------------------------------------------------------------------

@cuda.jit
def forgotten_step(y, x, n):
    b, total = uint32(0), float32(0.0)
    while b < n:  # fault
        total += x[b]
    y[cuda.threadIdx.x] = total


@cuda.jit
def forgotten_step_between_barriers(y, n):
    b = uint32(0)
    while b < n:
        y[cuda.threadIdx.x] = float32(1.0)
        cuda.syncthreads()


def test_a_loop_that_never_ends(checked, monkeypatch):
    monkeypatch.setattr(checking, "MOST_ACCESSES", 100_000)
    y, x = checked.zeros(64, np.float32), checked.zeros(64, np.float32)
    message = fault(checked, forgotten_step, 2, 64, y, x, 8)
    assert re.search(r"thread \((0|32), 0, 0\): is still here after 100,000 accesses and rounds: does", message)
    assert message.endswith("while b < n:  # fault")


def test_a_loop_with_barriers_that_never_ends(checked, monkeypatch):
    monkeypatch.setattr(checking, "MOST_BARRIERS", 1000)
    checked.launch(forgotten_step_between_barriers, 2, 64, checked.zeros(64, np.float32), 8)
    with pytest.raises(LaunchError, match=r"waits at a barrier, warp 0 in line \d+, warp 1 in line \d+, and was at "
                                          "1,000 before: does its loop end"):
        checked.synchronize()


def test_a_long_loop_that_ends(checked, monkeypatch):
    """What a warp does counts from barrier to barrier, and each warp and each launch for itself."""
    monkeypatch.setattr(checking, "MOST_ACCESSES", 300)
    y = checked.zeros(64, np.float32)
    for _ in range(3):
        passes(checked, ones_between_barriers, 4, 64, y, 200)


@cuda.jit
def ones_between_barriers(y, n):
    for _ in range(n):
        for _ in range(8):
            y[cuda.threadIdx.x] += float32(1.0)
        cuda.syncthreads()


# ---- addresses ---------------------------------------------------------------------------------------------

@cuda.jit
def shifted_read(y, x, n):
    i = uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    if i < n:
        value = x[uint32(i + uint32(1))]  # fault
        y[i] = value


@cuda.jit
def shifted_write(y, x, n):
    i = uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    if i < n:
        y[uint32(i + uint32(1))] = x[i]  # fault


@pytest.mark.parametrize("kernel, verb, name", [(shifted_read, "reads", "x"), (shifted_write, "writes", "y")])
def test_one_beyond_the_end(checked, kernel, verb, name):
    x, y = checked.zeros(100, np.float32, "x"), checked.zeros(100, np.float32, "y")
    passes(checked, kernel, 2, 64, y, x, 99)
    message = fault(checked, kernel, 2, 64, y, x, 100)
    assert "block (1, 0, 0), thread (35, 0, 0)" in message
    array = x if name == "x" else y
    assert f"{verb} 4 bytes at {array.ptr + 400:#x}, byte 400 of {name} (400 bytes)" in message


def test_the_access_that_fails_does_not_happen(checked):
    """The second half of an array is made to belong to nobody: it keeps its value."""
    x, y = checked.upload(np.ones(64, np.float32)), checked.zeros(64, np.float32)
    checked.allocations[y.ptr] = 128, "half of y"
    assert "of half of y (128 bytes)" in fault(checked, shifted_write, 1, 64, y, x, 64)
    after = np.ctypeslib.as_array((ctypes.c_float * 64).from_address(y.ptr))
    assert not after[32:].any()


def test_far_from_every_array(checked):
    """No array is named: none has anything to do with it."""
    @cuda.jit
    def far(x):
        x[uint32(uint32(cuda.threadIdx.x) << uint32(27))] = float32(1)  # fault

    message = fault(checked, far, 1, 32, checked.zeros(64, np.float32, "x"))
    assert "thread (1, 0, 0): writes 4 bytes at 0x" in message and ", far from every array (`st." in message


def test_before_the_start(checked):
    @cuda.jit
    def before(x):
        i = int32(cuda.threadIdx.x)
        x[i - 1 if i else i - 5 - 16 * i] = float32(1)  # fault

    x = checked.zeros(64, np.float32, "x")
    # A negative index counts from the end, as in NumPy: by more than the length it leaves the array.
    message = fault(checked, before, 1, 64, x[:2])
    assert "thread (0, 0, 0)" in message and "byte -12 of x (256 bytes)" in message


def test_use_after_free(checked):
    """By an index from another array that leads there; the Card itself refuses arrays that were freed."""
    @cuda.jit
    def follow(y, start):
        y[uint32(cuda.threadIdx.x)] = y[start]  # fault

    y, x = checked.zeros(32, np.uint32, "y"), checked.upload(np.arange(64, dtype=np.uint32), "x")
    address = x.ptr + 12
    index = np.uint64((address - y.ptr) // 4 % 2**64)
    passes(checked, follow, 1, 32, y, index)
    assert (checked.download(y) == 3).all()
    checked.free(x)
    others = [checked.zeros(64, np.uint32) for _ in range(10)]
    message = fault(checked, follow, 1, 32, y, index)
    assert f"thread (0, 0, 0): reads 4 bytes at {address:#x}, byte 12 of x, which was freed" in message
    assert all(abs(other.ptr - address) > 1024 for other in others)


def test_misaligned_vector_load(checked):
    @cuda.jit
    def vector(y, x, start):
        i = uint32(cuda.threadIdx.x)
        a, b, c, d = load_words4(x, uint32(start + uint32(16) * i))  # fault
        y[i] = a + b + c + d

    x, y = checked.zeros(400, np.uint8, "x"), checked.zeros(40, np.uint32, "y")
    passes(checked, vector, 1, 24, y, x, 16)
    message = fault(checked, vector, 1, 24, y, x, 8)
    assert f"thread (0, 0, 0): reads 16 bytes at {x.ptr + 8:#x}, byte 8 of x (400 bytes)" in message
    assert "not a multiple of 16" in message


@pytest.mark.parametrize("before", [4, 5, 6])
def test_vectors_of_a_shared_array_that_is_not_aligned_for_them(checked, before):
    """Wherever the arrays before it would put it by chance."""
    @cuda.jit
    def unaligned(y):
        other, shared = cuda.shared.array(before, uint32), cuda.shared.array(128, uint32)
        lane = uint32(cuda.threadIdx.x)
        other[uint32(lane % uint32(before))] = uint32(7)
        cuda.syncwarp()
        a, b, c, d = load_shared4(shared_address(shared) + uint64(uint32(lane * uint32(16))))  # fault
        y[lane] = a + b + c + d + other[uint32(0)]

    @cuda.jit
    def aligned(y):
        other, shared = cuda.shared.array(before, uint32), cuda.shared.array(128, uint32, alignment=16)
        lane = uint32(cuda.threadIdx.x)
        other[uint32(lane % uint32(before))] = uint32(7)
        cuda.syncwarp()
        a, b, c, d = load_shared4(shared_address(shared) + uint64(uint32(lane * uint32(16))))
        y[lane] = a + b + c + d + other[uint32(0)]

    y = checked.zeros(32, np.uint32, "y")
    passes(checked, aligned, 1, 32, y)
    assert "not a multiple of 16" in fault(checked, unaligned, 1, 32, y)


def test_vector_that_begins_inside(checked):
    @cuda.jit
    def vector(y, x):
        i = uint32(cuda.threadIdx.x)
        a, b, c, d = load_words4(x, uint32(uint32(16) * i))  # fault
        y[i] = a + b + c + d

    message = fault(checked, vector, 1, 32, checked.zeros(32, np.uint32), checked.zeros(504, np.uint8, "x"))
    assert "thread (31, 0, 0)" in message and "byte 496 of x (504 bytes)" in message


def test_outside_of_shared_memory(checked):
    @cuda.jit
    def dynamic(y):
        shared = cuda.shared.array(0, float32)
        t = uint32(cuda.threadIdx.x)
        shared[t] = float32(t)  # fault
        cuda.syncthreads()
        y[t] = shared[uint32(uint32(63) - t)]

    y = checked.zeros(64, np.float32)
    passes(checked, dynamic, 1, 64, y, shared=256)
    message = fault(checked, dynamic, 1, 64, y, shared=252)
    assert "thread (63, 0, 0)" in message and "byte 252 of a shared array (252 bytes)" in message


def test_outside_of_local_memory(checked):
    @cuda.jit
    def local(y, k):
        mine = cuda.local.array(16, float32)
        t = uint32(cuda.threadIdx.x)
        for i in range(uint32(16)):
            mine[uint32(i)] = y[uint32(uint32(i) * k % uint32(32))]
        y[t] = mine[uint32(t * k)]  # fault

    y = checked.zeros(64, np.float32)
    passes(checked, local, 1, 16, y, 1)
    assert "thread (16, 0, 0)" in fault(checked, local, 1, 32, y, 1)


def test_constants_of_a_kernel(checked):
    squares = np.arange(12, dtype=np.float32) ** 2

    @cuda.jit
    def constants(y, n):
        table = cuda.const.array_like(squares)
        t = uint32(cuda.threadIdx.x)
        if t < n:
            y[t] = table[t]  # fault

    y = checked.zeros(32, np.float32)
    passes(checked, constants, 1, 32, y, 12)
    np.testing.assert_array_equal(checked.download(y)[:12], squares)
    assert "thread (12, 0, 0)" in (message := fault(checked, constants, 1, 32, y, 13))
    assert "byte 48 of a constant (48 bytes)" in message


# ---- shared memory: order ----------------------------------------------------------------------------------

@cuda.jit
def exchange(y, how):
    """Each thread reads what another one wrote; how: 0 no barrier, 1 with syncwarp, 2 with syncthreads."""
    shared = cuda.shared.array(64, float32)
    t = uint32(cuda.threadIdx.x)
    shared[t] = float32(t)
    if how == uint32(1):
        cuda.syncwarp()
    elif how == uint32(2):
        cuda.syncthreads()
    y[t] = shared[uint32(t ^ uint32(y.size - uint32(1)))]  # fault


@pytest.mark.parametrize("n, how, ordered", [(32, 0, False), (32, 1, True), (32, 2, True), (64, 0, False),
                                             (64, 1, False), (64, 2, True)])
def test_exchange(checked, n, how, ordered):
    y = checked.zeros(n, np.float32)
    if ordered:
        passes(checked, exchange, 3, n, y, how)
        np.testing.assert_array_equal(checked.download(y), np.arange(n)[::-1])
        return
    checked.launch(exchange, 3, n, y, how)
    with pytest.raises(LaunchError, match="race with thread") as caught:
        checked.synchronize()
    message = str(caught.value)
    read, write = line_of(exchange), line_of(exchange, "shared[t] =")
    thread, what, other, its, line = re.search(         # whichever came second tells
        r"thread \((\d+), 0, 0\): (\w+) 4 bytes .* with thread \((\d+), 0, 0\), which (\w+) there in line (\d+)\n",
        message).groups()
    assert int(thread) ^ int(other) == n - 1
    lines = {"reads": read, "writes": write}
    assert {what, its} == set(lines) and int(line) == lines[its] and f", line {lines[what]})" in message
    assert f"    line {read}: y[t] = " in message and f"    line {write}: shared[t] = " in message


def test_a_barrier_that_is_missing_in_a_loop(checked):
    """The next turn's write meets the last turn's reads: the second barrier is missing."""
    @cuda.jit
    def turns(y, n):
        shared = cuda.shared.array(64, float32)
        t = uint32(cuda.threadIdx.x)
        total = float32(0)
        for i in range(n):
            shared[t] = float32(t) + float32(i)
            cuda.syncthreads()
            total += shared[uint32(uint32(63) - t)]
        y[t] = total

    y = checked.zeros(64, np.float32)
    passes(checked, turns, 1, 64, y, 1)
    checked.launch(turns, 1, 64, y, 2)
    with pytest.raises(LaunchError, match="race with thread"):
        checked.synchronize()


@cuda.jit
def same_place(y, different):
    shared = cuda.shared.array(4, uint32)
    t = uint32(cuda.threadIdx.x)
    shared[uint32(t >> uint32(4))] = t * different  # fault
    cuda.syncthreads()
    y[t] = shared[uint32(t >> uint32(4))]


def test_one_instruction_that_writes_different_values(checked):
    y = checked.zeros(32, np.uint32)
    passes(checked, same_place, 1, 32, y, 0)
    message = fault(checked, same_place, 1, 32, y, 1)
    assert "thread (1, 0, 0): writes 4 bytes" in message
    assert "a race with thread (0, 0, 0), which writes there at the same time\n" in message and "`" not in message


def test_two_warps_that_write_to_one_place(checked):
    @cuda.jit
    def flag(y):
        shared = cuda.shared.array(1, uint32)
        shared[uint32(0)] = uint32(7)  # fault
        cuda.syncthreads()
        y[uint32(cuda.threadIdx.x)] = shared[uint32(0)]

    y = checked.zeros(64, np.uint32)
    passes(checked, flag, 1, 32, y)
    assert "byte 0 of a shared array (4 bytes): a race" in fault(checked, flag, 1, 64, y)


@pytest.mark.parametrize("at, words", [(9, ""), (11, "byte 52 of a shared array (48 bytes)"),
                                       (100, "byte 400 of a shared array (48 bytes)")])
def test_which_shared_array_it_is(checked, at, words):
    """Bytes count from the beginning of the nearest array, wherever checks put it."""
    @cuda.jit
    def two(y, at):
        first = cuda.shared.array(3, uint32)
        second = cuda.shared.array(12, uint32, alignment=16)
        t = uint32(cuda.threadIdx.x)
        first[t] = t
        second[uint32(uint32(2) * t + at)] = t  # fault
        cuda.syncthreads()
        y[t] = first[t] + second[t]

    y = checked.zeros(2, np.uint32)
    if not words:
        return passes(checked, two, 1, 2, y, at)
    assert words in fault(checked, two, 1, 2, y, at)


def test_bytes_of_one_word_are_places_of_their_own(checked):
    @cuda.jit
    def single_bytes(y, step):
        shared = cuda.shared.array(128, np.uint8)
        t = uint32(cuda.threadIdx.x)
        shared[uint32(t * step)] = np.uint8(t)  # fault
        cuda.syncthreads()
        y[t] = shared[uint32(t * step)]

    y = checked.zeros(128, np.uint8)
    passes(checked, single_bytes, 1, 128, y, 1)
    assert "writes 1 byte" in fault(checked, single_bytes, 1, 128, y, 0)


@cuda.jit
def tickets(y, plain):
    shared = cuda.shared.array(1, uint32)
    t = uint32(cuda.threadIdx.x)
    if t == uint32(0):
        shared[uint32(0)] = uint32(0)
    cuda.syncthreads()
    y[t] = cuda.atomic.add(shared, 0, uint32(1))
    if plain and t == uint32(40):
        shared[uint32(0)] = uint32(0)


def test_atomics_are_ordered_among_themselves(checked):
    y = checked.zeros(64, np.uint32)
    passes(checked, tickets, 1, 64, y, False)
    assert sorted(checked.download(y)) == list(range(64))
    checked.launch(tickets, 1, 64, y, True)
    with pytest.raises(LaunchError, match="race with thread"):
        checked.synchronize()


# ---- shared memory: copies that a thread need not wait for -------------------------------------------------

def copying(n_left, has_barrier=True):
    """A kernel whose threads start copies of the words of x in turn, and read those of their neighbours. n_left: the
    groups of copies that a thread does not wait for; one is right."""
    wait = wait_for_copies(n_left)

    @cuda.jit
    def copies(y, x, n_turns):
        shared = cuda.shared.array((2, 64), uint32)
        t = uint32(cuda.threadIdx.x)
        other, to = uint32(t ^ uint32(63)), shared_address(shared) + uint64(uint32(t << uint32(2)))
        source, total, filled = global_address(x) + uint64(uint32(t << uint32(2))), uint32(0), uint64(0)
        start_copy(to, source)
        commit_copies()
        for i in range(n_turns):
            source = source + uint64(256)
            filled = uint64(256) - filled
            start_copy(to + filled, source)
            commit_copies()
            wait()
            if has_barrier:
                cuda.syncthreads()
            total += shared[uint32(i & uint32(1)), other]  # fault
            cuda.syncthreads()
        y[t] = total

    return copies


def test_copies_that_are_waited_for(checked):
    x, y = np.arange(4 * 64, dtype=np.uint32), checked.zeros(64, np.uint32)
    passes(checked, copying(1), 2, 64, y, checked.upload(x), 3)
    np.testing.assert_array_equal(checked.download(y), x.reshape(4, 64)[:3, ::-1].sum(axis=0))


@pytest.mark.parametrize("n_left, has_barrier", [(2, True), (1, False)])
def test_copies_that_are_not_waited_for(checked, n_left, has_barrier):
    kernel, x = copying(n_left, has_barrier), checked.zeros(4 * 64, np.uint32)
    checked.launch(kernel, 1, 64, checked.zeros(64, np.uint32), x, 3)
    with pytest.raises(LaunchError, match=r"a race with a copy of thread|copies 4 bytes .* a race with thread"):
        checked.synchronize()


@cuda.jit
def early(y, x, how):
    """A thread's own copy; how: 0 read before the wait, 1 written, 2 not committed, 3 right."""
    shared = cuda.shared.array(32, uint32)
    t = uint32(cuda.threadIdx.x)
    offset = uint64(uint32(t << uint32(2)))
    start_copy(shared_address(shared) + offset, global_address(x) + offset)
    if how != uint32(2):
        commit_copies()
    if how == uint32(1):
        shared[t] = t
    if how != uint32(0):
        wait_for_all()
    y[t] = shared[t]


wait_for_all = wait_for_copies(0)


@pytest.mark.parametrize("how", range(4))
def test_a_thread_and_its_own_copy(checked, how):
    x, y = np.arange(32, dtype=np.uint32), checked.zeros(32, np.uint32)
    checked.launch(early, 1, 32, y, checked.upload(x), how)
    if how == 3:
        return np.testing.assert_array_equal(checked.download(y), x)
    with pytest.raises(LaunchError, match=r"thread \((\d+), 0, 0\): .* a race with a copy of thread \(\1, 0, 0\)"):
        checked.synchronize()


def test_a_copy_from_outside_of_an_array(checked):
    x, y = checked.zeros(31, np.uint32, "x"), checked.zeros(32, np.uint32)
    checked.launch(early, 1, 32, y, x, 3)
    with pytest.raises(LaunchError, match=r"thread \(31, 0, 0\): copies 4 bytes .* byte 124 of x \(124 bytes\)"):
        checked.synchronize()


def test_the_order_of_warps_is_drawn(checked):
    """Between two barriers the tickets of the warps come in another order than the warps."""
    y, orders = checked.zeros(256, np.uint32), set()
    for _ in range(5):
        passes(checked, tickets, 1, 256, y, False)
        orders.add(tuple(checked.download(y)[::32] // 32))
    assert len(orders) > 1 and all(sorted(order) == list(range(8)) for order in orders)


# ---- barriers ----------------------------------------------------------------------------------------------

def test_a_barrier_for_some_lanes_of_a_warp(checked):
    @cuda.jit
    def divergent(y, n):
        t = uint32(cuda.threadIdx.x)
        if t < n:
            y[t] = float32(1)
            cuda.syncthreads()  # fault
        y[t] += float32(1)

    y = checked.zeros(64, np.float32)
    passes(checked, divergent, 1, 64, y, 64)
    message = fault(checked, divergent, 1, 64, y, 40)
    assert "thread (40, 0, 0): does not take part in a barrier" in message


@pytest.mark.parametrize("turns", [False, True])
def test_a_syncwarp_for_some_lanes(checked, turns):
    """Lanes that are elsewhere are not ordered by it, whether they skip it or leave a loop earlier."""
    @cuda.jit
    def half_of_the_warp(y, n):
        shared = cuda.shared.array(32, float32)
        t = uint32(cuda.threadIdx.x)
        shared[t] = float32(t)
        if turns:
            for _ in range(t // uint32(16) if n < uint32(32) else uint32(1)):
                cuda.syncwarp()  # fault
        elif t < n:
            cuda.syncwarp()
        y[t] = shared[uint32(uint32(31) - t)]

    y = checked.zeros(32, np.float32)
    passes(checked, half_of_the_warp, 1, 32, y, 32)
    checked.launch(half_of_the_warp, 1, 32, y, 16)
    with pytest.raises(LaunchError, match="does not take part in a barrier") as caught:
        checked.synchronize()
    assert re.search(r"thread \(\d+, 0, 0\)", str(caught.value)) and "bar.warp.sync" in str(caught.value)


def test_warps_at_different_barriers(checked):
    @cuda.jit
    def either(y):
        t = uint32(cuda.threadIdx.x)
        if t < uint32(32):
            cuda.syncthreads()  # first
            y[t] = float32(1)
        else:
            y[t] = float32(2)
            cuda.syncthreads()  # second
            y[t] = float32(3)

    checked.launch(either, 1, 64, checked.zeros(64, np.float32))
    with pytest.raises(LaunchError) as caught:
        checked.synchronize()
    lines = [line_of(either, mark) for mark in ("# first", "# second")]
    assert f"either ({__file__}), block (0, 0, 0): waits at different barriers, " \
           f"warp 0 in line {lines[0]}, warp 1 in line {lines[1]}" in str(caught.value)


def test_threads_that_have_returned_are_not_missed(checked):
    @cuda.jit
    def early(y, n):
        shared = cuda.shared.array(64, float32)
        t = uint32(cuda.threadIdx.x)
        if t >= n:
            return
        shared[t] = float32(t)
        cuda.syncthreads()
        y[t] = warp_sum(shared[t]) if n == uint32(64) else shared[uint32(0)]

    for n in (32, 40, 64):
        passes(checked, early, 1, 64, checked.zeros(64, np.float32), n)


# ---- a card that checks for a while ------------------------------------------------------------------------

def test_checking_for_a_while():
    """What is found is told with the text of its line, and the card works afterwards."""
    card = open_cards("emulated")[0]
    x, y = card.upload(np.ones(100, np.float32), "x"), card.zeros(100, np.float32, "y")
    with card.checking():
        passes(card, shifted_write, 2, 64, y, x, 99)
    with pytest.raises(LaunchError) as caught, card.checking():
        card.launch(shifted_write, 2, 64, y, x, 100)
    message = str(caught.value)
    assert message.startswith("shifted_write (") and "byte 400 of y (400 bytes)" in message
    assert message.endswith(f"line {line_of(shifted_write)}: y[uint32(i + uint32(1))] = x[i]  # fault")
    passes(card, shifted_write, 2, 64, y, x, 99)
    assert card.download(y).sum() == 99
    checked = open_cards("emulated", checked=True)[0]
    with checked.checking():
        pass
    fault(checked, shifted_write, 1, 64, checked.zeros(4, np.float32), checked.zeros(64, np.float32), 64)


# ---- the engine --------------------------------------------------------------------------------------------

def test_the_kernels_of_the_engine_are_clean(monkeypatch):
    """A prompt of more than a page and two decoded tokens, likeliest and drawn: as on an unchecked card."""
    monkeypatch.setattr(qengine.Pipeline, "load_kernels", lambda *_: None)     # only what these two launch
    answers = []
    for checked in (False, True):
        card = open_cards("emulated", checked=checked)[0]
        engine = qengine.load(str(DATA / "tiny-Q8_0.gguf"), card=card, ctx=128, progress=False)
        for temperature in (0.0, 1.0):
            request = qengine.Request(list(range(70)), max_tokens=3, temperature=temperature, seed=1,
                                      ignore_eos=True)
            answers.append([event.token_id for event in engine.submit(request)])
        engine.close()
    assert len(answers[0]) == 3 and answers[:2] == answers[2:]
