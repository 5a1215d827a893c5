"""Counters: kernels whose counts can be told by hand, and the dp4a instructions of a decoded token."""

import numpy as np
import pytest
from numba import cuda, float32, int32, uint32

import qengine
from kernels.emulated.cards import CARDS, V100
from kernels.emulated.counting import table, total
from kernels.emulated.estimate import report
from kernels.intrinsics import dp4a, hfma2, warp_sum
from kernels.open import open_cards
from tests.oracle import DATA


@pytest.fixture(scope="module")
def emulated():
    return open_cards("emulated")[0]


def counts(emulated, kernel, grid, block, *args):
    """The Counts of one launch."""
    with emulated.counting() as log:
        emulated.launch(kernel, grid, block, *args)
    (launch,) = log
    assert (launch.kernel, launch.grid[0], launch.block[0]) == (kernel.__name__, grid, block)
    return launch.counts


@cuda.jit
def strided(y, x, stride):
    i = uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    y[i] = x[uint32(i * stride)]


@pytest.mark.parametrize("stride, per_warp", [(0, 1), (1, 4), (2, 8), (8, 32), (9, 32)])
def test_sectors_of_strided_reads(emulated, stride, per_warp):
    x, y = np.arange(192 * 9, dtype=np.float32), emulated.alloc(192, np.float32)
    got = counts(emulated, strided, 3, 64, y, emulated.upload(x), stride)
    np.testing.assert_array_equal(emulated.download(y), x[np.arange(192) * stride])
    assert got.read_sectors == 6 * per_warp and got.written_sectors == 6 * 4
    assert got.read_bytes == got.written_bytes == 192 * 4
    assert got.global_ == 12 and got.shared == got.local == 0
    assert got.distinct_sectors == 24 + (1 if stride == 0 else 6 * per_warp)


def test_lanes_at_rest_move_nothing(emulated):
    """40 threads: the second warp has 8 lanes, which one sector holds."""
    got = counts(emulated, strided, 1, 40, emulated.alloc(40, np.float32), emulated.zeros(40, np.float32), 1)
    assert (got.read_sectors, got.read_bytes, got.global_) == (5, 160, 4)


def test_sectors_read_again_are_distinct_once(emulated):
    y, x = emulated.alloc(64, np.float32), emulated.zeros(64, np.float32)
    with emulated.counting() as log:
        emulated.launch(strided, 1, 64, y, x, 1)
        emulated.launch(strided, 1, 64, y, x, 1)
    assert [launch.counts.distinct_sectors for launch in log] == [16, 16]
    assert total(log).read_sectors == 16


@cuda.jit
def through_shared(y, stride):
    shared = cuda.shared.array(1024, float32)
    t = uint32(cuda.threadIdx.x)
    shared[uint32(t * stride)] = float32(t)
    cuda.syncthreads()
    y[t] = shared[uint32(t * stride)]


@pytest.mark.parametrize("stride, passes", [(0, 1), (1, 1), (2, 2), (3, 1), (8, 8), (32, 32)])
def test_bank_conflicts(emulated, stride, passes):
    got = counts(emulated, through_shared, 1, 32, emulated.alloc(32, np.float32), stride)
    assert (got.shared, got.barrier) == (2, 1)
    assert got.shared_passes == 2 * passes and got.shared_replays == 2 * (passes - 1)
    assert got.read_sectors == 0 and got.written_sectors == 4


def test_wide_shared_accesses_take_turns(emulated):
    """8 bytes per lane: two turns of sixteen lanes, and no conflicts."""
    @cuda.jit
    def wide(y):
        shared = cuda.shared.array(256, np.float64)
        t = uint32(cuda.threadIdx.x)
        shared[t] = float32(t)
        cuda.syncwarp()
        y[t] = shared[t]

    got = counts(emulated, wide, 1, 32, emulated.alloc(32, np.float64))
    assert (got.shared, got.shared_passes, got.shared_replays) == (2, 4, 0)


@cuda.jit
def pipes(y, h, w, n):
    i = uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    total, packed, dot = y[i], h[i], int32(0)
    for _ in range(n):
        total = cuda.fma(total, total, total)
        total = total + total * total
        packed = hfma2(packed, packed, packed)
        dot = dp4a(w[i], packed, dot)
    y[i] = warp_sum(total)
    h[i] = packed
    w[i] = uint32(dot)


@pytest.mark.parametrize("n", [1, 7, 64])
def test_pipes_of_a_loop(emulated, n):
    """Two warps in each of three blocks; compared with n = 0, so that only the loop counts."""
    words = [emulated.zeros(192, np.uint32) for _ in range(2)]
    empty, got = (counts(emulated, pipes, 3, 64, emulated.zeros(192, np.float32), *words, m) for m in (0, n))
    assert got.ffma - empty.ffma == got.half2 - empty.half2 == got.dp4a - empty.dp4a == 6 * n
    assert got.fp32 - empty.fp32 == 12 * n
    assert got.lane_dp4a == 32 * got.dp4a
    assert got.shuffle == empty.shuffle == 6 * 5
    assert empty.fp32 == 6 * 5 and got.barrier == got.tensor == got.fp64 == 0


def test_divergent_branches_count_each_side(emulated):
    @cuda.jit
    def divergent(w):
        i = uint32(cuda.threadIdx.x)
        if i & uint32(3):
            w[i] = dp4a(w[i], w[i], int32(0))

    got = counts(emulated, divergent, 1, 64, emulated.zeros(64, np.uint32))
    assert got.dp4a == 2 and got.lane_dp4a == 48


def test_replays_are_counted(emulated):
    y, x = emulated.alloc(64, np.float32), emulated.zeros(64, np.float32)
    with emulated.record() as recording:
        emulated.launch(strided, 1, 64, y, x, 1)
        emulated.launch(strided, 2, 32, y, x, 1)
    with emulated.counting() as log:
        recording.replay()
        recording.replay()
    recording.replay()
    emulated.synchronize()
    assert [launch.grid[0] for launch in log] == [1, 2, 1, 2]
    assert all(launch.counts.read_sectors == 8 for launch in log)


def test_estimates_and_tables(emulated):
    with emulated.counting() as log:
        for n in (1, 2):
            y, x = emulated.alloc(128, np.float32), emulated.zeros(128, np.float32)
            emulated.launch(strided, n, 64, y, x, 1)
    estimates = [launch.estimate(V100) for launch in log]
    assert all(e.limiting == "launch" and e.card is V100 for e in estimates)
    lines = table(log, CARDS).splitlines()
    assert lines[1].split()[:2] == ["strided", "2"] and lines[-1].startswith("estimated total")
    assert f"{1e6 * sum(e.seconds for e in estimates):.1f}" in lines[-1]
    assert "V100" in report("strided", log[0].counts, estimates[:1])


def test_dp4a_of_a_decoded_token():
    """Each decoded token multiplies every int8 matrix once, the embedding as the head that it is here too:
    N K / 4 lane instructions, N rounded up to the two rows that a warp takes."""
    engine = qengine.load(str(DATA / "tiny-Q8_0.gguf"), card="emulated", ctx=128, progress=False, draft="off")
    lanes = []
    for n_tokens in (2, 3, 5):
        with engine.cards[0].counting() as log:
            engine.submit(qengine.Request([1, 2, 3], max_tokens=n_tokens, ignore_eos=True)).wait()
        lanes.append(total(log).lane_dp4a)
    matrices = [t for name, t in qengine.GGUF(DATA / "tiny-Q8_0.gguf").tensors.items()
                if t.type == "Q8_0" and not name.startswith(f"blk.{engine.config.n_layers}.")]   # draft layer
    assert engine.config.tied_embeddings and len(matrices) == 24
    per_token = sum((n + n % 2) * k // 4 for n, k in (t.shape for t in matrices))
    engine.close()
    assert lanes[1] - lanes[0] == per_token
    assert lanes[2] - lanes[1] == 2 * per_token
