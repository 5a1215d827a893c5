"""Threads that wait for other threads by polling memory: locks, flags, named barriers; and those that wait for ever."""

import numpy as np
import pytest
from numba import cuda, int32

from kernels.card import LaunchError
from kernels.emulated import native
from kernels.open import open_cards
from tests.emulated.ptx_runner import launch, module


@pytest.fixture(params=[False, True], ids=["plain", "checked"], scope="module")
def emulated(request):
    return open_cards("emulated", checked=request.param)[0]


def run(card, kernel, grid, block, *arrays):
    """The arrays after a launch."""
    arrays = [card.upload(a) for a in arrays]
    card.launch(kernel, grid, block, *arrays)
    return [card.download(a) for a in arrays]


@cuda.jit
def add_under_a_lock(lock, total):
    done = False
    while not done:
        if cuda.atomic.cas(lock, 0, 0, 1) == 0:
            cuda.threadfence()
            total[0] += cuda.grid(1)
            cuda.threadfence()
            cuda.atomic.exch(lock, 0, 0)
            done = True


@cuda.jit
def add_under_a_lock_many_times(lock, total):
    for i in range(int32(cuda.threadIdx.x % 3)):
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:
            pass
        cuda.threadfence()
        total[0] += i + 1
        if total[0] % 7 == 0:
            total[1] += 1
        cuda.threadfence()
        cuda.atomic.exch(lock, 0, 0)
    cuda.atomic.add(total, 2, 1)


@pytest.mark.parametrize("grid, block", [(1, 1), (1, 32), (1, 100), (3, 64)])
def test_a_lock_of_each_lane(card, grid, block):
    lock, total = run(card, add_under_a_lock, grid, block, np.zeros(1, np.int32), np.zeros(1, np.int32))
    n = grid * block
    assert lock[0] == 0 and total[0] == n * (n - 1) // 2


@pytest.mark.parametrize("grid, block", [(1, 32), (1, 90), (2, 70)])
def test_a_lock_taken_in_a_loop(card, grid, block):
    lock, total = run(card, add_under_a_lock_many_times, grid, block, np.zeros(1, np.int32), np.zeros(3, np.int32))
    added = [i + 1 for thread in list(range(block)) * grid for i in range(thread % 3)]
    assert lock[0] == 0 and total[0] == sum(added) and total[2] == grid * block
    assert 0 < total[1] <= len(added)


def test_locks_on_a_checked_card():
    card = open_cards("emulated", checked=True)[0]
    for _ in range(3):
        lock, total = run(card, add_under_a_lock, 2, 50, np.zeros(1, np.int32), np.zeros(1, np.int32))
        assert lock[0] == 0 and total[0] == 100 * 99 // 2


def lock_then_barrier(lock, total, out):
    done = False
    while not done:
        if cuda.atomic.cas(lock, 0, 0, 1) == 0:
            total[0] += cuda.threadIdx.x
            cuda.threadfence()
            cuda.atomic.exch(lock, 0, 0)
            done = True
    cuda.syncthreads()
    out[cuda.threadIdx.x] = total[0]


def lock_then_shuffle(lock, total, out):
    while cuda.atomic.cas(lock, 0, 0, 1) != 0:
        pass
    total[0] += cuda.threadIdx.x
    cuda.threadfence()
    cuda.atomic.exch(lock, 0, 0)
    cuda.shfl_sync(-1, 1, 0)
    cuda.syncthreads()
    out[cuda.threadIdx.x] = total[0]


def lock_and_barrier_in_a_loop(lock, total, out):
    for _ in range(total.size):
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:
            pass
        total[0] += cuda.threadIdx.x
        cuda.threadfence()
        cuda.atomic.exch(lock, 0, 0)
        cuda.syncthreads()
    out[cuda.threadIdx.x] = total[0]


def lock_of_some_then_barrier(lock, total, out):
    """Half of the lanes take it, each another number of times, on one of two ways."""
    if cuda.threadIdx.x % 2:
        for _ in range(int32(cuda.threadIdx.x % 5)):
            while cuda.atomic.cas(lock, 0, 0, 1) != 0:
                pass
            total[0] += 1
            cuda.threadfence()
            cuda.atomic.exch(lock, 0, 0)
        cuda.syncwarp(0xAAAAAAAA)
        cuda.atomic.add(total, 1, 1)
    cuda.syncthreads()
    out[cuda.threadIdx.x] = total[0] + 1000 * total[1]


EVERYONE = 64 * 63 // 2


@pytest.mark.parametrize("kernel, n, expected", [
    (lock_then_barrier, 1, EVERYONE), (lock_then_shuffle, 1, EVERYONE), (lock_and_barrier_in_a_loop, 3, 3 * EVERYONE),
    (lock_of_some_then_barrier, 2, sum(i % 5 for i in range(1, 64, 2)) + 32000)])
def test_a_lock_and_then_a_barrier(emulated, kernel, n, expected):
    arrays = np.zeros(1, np.int32), np.zeros(n, np.int32), np.zeros(64, np.int32)
    lock, _, out = run(emulated, cuda.jit(kernel), 1, 64, *arrays)
    assert lock[0] == 0 and (out == expected).all()


def wait_with_a_fence(flag, out):
    if cuda.threadIdx.x == 0:
        while flag[0] == 0:
            cuda.threadfence()
        out[0] = flag[0] + 1
    if cuda.threadIdx.x == 40:
        flag[0] = 6


def wait_asleep(flag, out):
    if cuda.threadIdx.x == 0:
        while flag[0] == 0:
            cuda.nanosleep(100)
        out[0] = flag[0] + 1
    if cuda.threadIdx.x == 40:
        flag[0] = 6


def wait_with_the_warp(flag, out):
    if cuda.threadIdx.x < 32:
        while flag[0] == 0:
            cuda.syncwarp()
        out[0] = flag[0] + 1
    else:
        flag[0] = 6


def wait_on_shared_memory(flag, out):
    shared = cuda.shared.array(1, int32)
    shared[0] = 0
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        rounds = 0
        while shared[0] == 0:
            cuda.threadfence_block()
            rounds += 1
            flag[0] = rounds
        out[0] = shared[0] + 1
    if cuda.threadIdx.x == 40:
        shared[0] = 6


@pytest.mark.parametrize("kernel", [wait_with_a_fence, wait_asleep, wait_with_the_warp, wait_on_shared_memory])
def test_an_ordinary_load_may_poll(kernel, monkeypatch):
    monkeypatch.setattr(native, "PATIENCE", 2)
    card = open_cards("emulated")[0]
    _, out = run(card, cuda.jit(kernel), 1, 64, np.zeros(1, np.int32), np.zeros(1, np.int32))
    assert out[0] == 7


@cuda.jit
def hand_over(flags, out):
    """Warp i waits for warp i + 1, and all for a barrier in between."""
    warp, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
    last = cuda.blockDim.x // 32 - 1
    for step in range(1, 4):
        if warp < last:
            while cuda.atomic.add(flags, warp + 1, 0) < step:
                pass
        out[cuda.threadIdx.x] = 10 * out[cuda.threadIdx.x] + (out[(warp + 1) * 32 + lane] % 10 if warp < last else step)
        cuda.threadfence()
        cuda.syncwarp()
        if lane == 0:
            cuda.atomic.add(flags, warp, 1)
        cuda.syncthreads()


def test_warps_wait_for_each_other_between_barriers(emulated):
    _, out = run(emulated, hand_over, 1, 160, np.zeros(5, np.int32), np.zeros(160, np.int32))
    assert (out == 123).all()


def wait_for_a_flag_in_vain(flags):
    if cuda.threadIdx.x == 40:
        while flags[0] == 0:
            cuda.threadfence()


@cuda.jit
def wait_in_vain(flags):
    if cuda.threadIdx.x == 40:
        while cuda.atomic.add(flags, 0, 0) == 0:
            pass
    cuda.syncthreads()


def test_who_waits_for_ever_is_given_up_with_kernel_and_line(emulated, monkeypatch):
    monkeypatch.setattr(native, "PATIENCE", 0)
    card = open_cards("emulated", checked=emulated.checked)[0]
    line = wait_in_vain.py_func.__code__.co_firstlineno + 3
    with pytest.raises(LaunchError, match=f"wait_in_vain, line {line}: waits for ever"):
        run(card, wait_in_vain, 1, 64, np.zeros(1, np.int32))


def test_who_loads_in_vain_for_ever_is_given_up(monkeypatch):
    monkeypatch.setattr(native, "PATIENCE", 0)
    with pytest.raises(LaunchError, match="wait_for_a_flag_in_vain, line .*: waits for ever"):
        run(open_cards("emulated")[0], cuda.jit(wait_for_a_flag_in_vain), 1, 64, np.zeros(1, np.int32))


def test_a_block_may_wait_for_another_that_runs():
    """The later block, on another worker or after the earlier."""
    out = np.zeros(2, np.uint32)
    body = """ld.param.u64 %rd1, [p0]; mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 0; @%p1 bra FIRST;
    AGAIN: ld.volatile.global.u32 %r2, [%rd1]; setp.eq.u32 %p2, %r2, 0; @%p2 bra AGAIN; st.global.u32 [%rd1+4], %r2;
    bra END;
    FIRST: st.global.u32 [%rd1], 7; END:"""
    kernel = native.NativeKernel(module(body, ["u64"]))
    for workers in (1, 2):
        native.execute([kernel.prepare((64,), (1,), out.ctypes.data.to_bytes(8, "little"))], workers)
        assert out.tolist() == [7, 7]
        out[:] = 0


# ---- barriers of a part of the block ----

PIPELINE = """.reg .b32 %round; mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [p0]; shr.u32 %r2, %r1, 5; and.b32 %r3, %r1, 31;
mul.wide.u32 %rd2, %r3, 4; mov.u64 %rd3, board; add.s64 %rd3, %rd3, %rd2; add.s64 %rd4, %rd1, %rd2; mov.u32 %round, 0;
setp.ne.u32 %p1, %r2, 0; mov.u32 %r9, 1; mov.u32 %r10, 0; @%p1 bra TAKE;
GIVE: mad.lo.s32 %r4, %round, 100, %r3; st.shared.u32 [%rd3], %r4; bar.arrive 1, 64; bar.sync {empty}, {n};
add.s32 %round, %round, 1; setp.lt.u32 %p2, %round, 5; @%p2 bra GIVE; bra.uni END;
TAKE: setp.gt.u32 %p4, %r2, 1; @%p4 bra END; bar.sync 1, 64; ld.shared.u32 %r5, [%rd3]; mad.lo.s32 %r10, %r10, 3, %r5;
bar.sync {empty}, {n}; add.s32 %round, %round, 1; setp.lt.u32 %p3, %round, 5; @%p3 bra TAKE; st.global.u32 [%rd4], %r10;
END: {end}"""


@pytest.mark.parametrize("target", native.TARGETS)
@pytest.mark.parametrize("empty, n, end", [("%r9", 64, "bar.sync 0;"), ("2", "%r11", ""), ("0", 64, "")])
def test_a_pipeline_of_two_warps(empty, n, end, target):
    """Warp 0 gives numbers to warp 1 through shared memory, five times; the third warp has no part in it."""
    out = np.zeros(32, np.uint32)
    body = "mov.u32 %r11, 64;" + PIPELINE.format(empty=empty, n=n, end=end).replace("mov.u32 %r9, 1", "mov.u32 %r9, 3")
    ptx = module(body, ["u64"], variables=".shared .align 4 .b8 board[128];")
    launch(ptx, (2,), (96,), out, target=target())
    expected = np.zeros(32, np.uint32)
    for i in range(5):
        expected = expected * 3 + i * 100 + np.arange(32, dtype=np.uint32)
    assert (out == expected).all()


def test_a_barrier_that_too_few_reach_is_given_up(monkeypatch):
    monkeypatch.setattr(native, "PATIENCE", 0)
    body = "mov.u32 %r1, %tid.x; setp.gt.u32 %p1, %r1, 31; @%p1 bra END; bar.sync 1, 64; END:"
    with pytest.raises(native.KernelFault, match="line 7: waits for ever.*bar.sync 1, 64"):
        launch(module(body, []), (1,), (96,))
