"""Counts, occupancy and estimates: launches whose time is known from the card's figures alone."""

import pytest
from numba import cuda
from numba.types import float32, uint32

from kernels import tensor_gemm
from kernels.compile import compile_kernel, supported_ccs
from kernels.emulated.cards import CARDS, CMP_100_210, H100, T4, V100
from kernels.emulated.estimate import (PIPES, Counts, blocks_per_sm, estimate, multiply_adds, pipe_of, registers_used,
                                       report)
from kernels.formats import FORMATS

EVERY_CARD = pytest.mark.parametrize("model", CARDS, ids=lambda c: c.name)


def full(card, counts, blocks=100):
    """An estimate with all SMs equally busy: 256 threads, 32 registers, no shared memory."""
    return estimate(counts, (blocks * card.n_sms,), 256, 32, 0, card)


@EVERY_CARD
def test_dp4a_loop_runs_at_the_peak_of_the_card(model):
    n = 10**9
    e = full(model, Counts(dp4a=n, lane_dp4a=32 * n))
    assert 8 * 32 * n / (e.seconds - model.launch_seconds) / 1e12 == pytest.approx(model.dp4a_tops())
    assert e.limiting in ("fma", "fma heavy")


def test_peaks_agree_with_published_figures():
    assert CMP_100_210.dp4a_tops() == pytest.approx(48.0, rel=0.01)
    assert V100.dp4a_tops() == pytest.approx(56.5, rel=0.01)
    assert T4.dp4a_tops() == pytest.approx(32.6, rel=0.01)
    assert H100.dp4a_tops() == pytest.approx(133, rel=0.01)                     # measured
    assert 2 * V100.rate("ffma") / 1e12 == pytest.approx(14.1, rel=0.01)
    assert 4 * V100.rate("half2") / 1e12 == pytest.approx(28.3, rel=0.01)
    assert 2 * V100.rate("fp64") / 1e12 == pytest.approx(7.07, rel=0.01)
    assert 2 * 32 * V100.rate("tensor") / 1e12 == pytest.approx(113, rel=0.01)  # 1,024 fma: 32 per lane
    assert 2 * T4.rate("fp64") / 1e12 == pytest.approx(0.25, rel=0.02)


@pytest.mark.parametrize("model, text, tops", [
    (V100, "m8n8k4 row col f32 f16 f16 f32", 113), (CMP_100_210, "m8n8k4 row col f32 f16 f16 f32", 6.0),
    (T4, "m8n8k16 row col s32 s8 s8 s32", 130), (H100, "m16n8k32 row col s32 s8 s8 s32", 2141)])
def test_tensor_cores_run_at_their_peak(model, text, tops):
    """Of V100 and T4 as NVIDIA states it (the CMP's measured). And an instruction takes one place in the queue."""
    per_instruction, n = multiply_adds(text.split()), 10**9
    e = full(model, Counts(tensor=n, multiply_adds=n * per_instruction))
    ops = 2 * n * per_instruction * (2 if "s8" in text else 1)
    assert ops / e.per_pipe_seconds["tensor"] / 1e12 == pytest.approx(tops, rel=0.07) and e.limiting == "tensor"
    issued = e.per_pipe_seconds["issue"] * model.throttle.get("tensor", 1)
    assert issued == pytest.approx(full(model, Counts(fp32=n)).per_pipe_seconds["issue"])


def test_the_throttled_pipes_of_the_mining_card():
    assert 2 * CMP_100_210.rate("fp64") / 1e12 == pytest.approx(0.38, rel=0.02)
    assert 2 * 32 * CMP_100_210.rate("tensor") / 1e12 == pytest.approx(6.0, rel=0.07)
    half = full(CMP_100_210, Counts(fp64=10**8)), full(V100, Counts(fp64=10**8))
    assert half[0].seconds / half[1].seconds == pytest.approx(16 * 80 / 68, rel=0.01)


@EVERY_CARD
def test_a_kernel_that_only_reads_runs_at_the_read_bandwidth(model):
    n_bytes = 10**9
    counts = Counts(global_=n_bytes // 512, integer=n_bytes // 512, read_sectors=n_bytes // 32,
                    distinct_sectors=n_bytes // 32, read_bytes=n_bytes)
    e = full(model, counts)
    assert e.limiting == "memory"
    assert n_bytes / (e.seconds - model.launch_seconds) == pytest.approx(model.read_bandwidth)


def test_pipes_of_one_unit_add_up_and_others_overlap():
    dp4a, fp32, integer = Counts(dp4a=10**8), Counts(fp32=10**8), Counts(integer=10**8)
    alone = full(V100, dp4a).per_pipe_seconds["fma"]
    assert full(V100, dp4a + fp32).per_pipe_seconds["fma"] == pytest.approx(2 * alone)
    assert full(V100, dp4a + integer).seconds == pytest.approx(full(V100, dp4a).seconds)
    # Four warp instructions per clock, two units at half rate each: together they fill every issue slot.
    assert full(V100, dp4a + integer).per_pipe_seconds["issue"] == pytest.approx(alone)
    # On GH100 the other half of the fma unit takes float32 instructions beside dp4a.
    assert full(H100, dp4a + fp32).seconds == pytest.approx(full(H100, dp4a).seconds)


def test_bank_conflicts_cost_passes():
    free = full(V100, Counts(shared=10**7, shared_passes=10**7))
    conflicts = full(V100, Counts(shared=10**7, shared_passes=8 * 10**7, shared_replays=7 * 10**7))
    assert free.limiting == conflicts.limiting == "lsu"
    assert conflicts.per_pipe_seconds["lsu"] == pytest.approx(8 * free.per_pipe_seconds["lsu"])
    assert conflicts.per_pipe_seconds["issue"] == free.per_pipe_seconds["issue"]


def test_rereads_cost_l2_but_not_memory():
    e = full(V100, Counts(global_=10**6, read_sectors=16 * 10**6, distinct_sectors=10**6))
    assert e.limiting == "L2"
    assert e.per_pipe_seconds["memory"] == pytest.approx(32e6 / V100.read_bandwidth)


def test_the_tail_of_the_last_wave():
    work = 10**8
    even = estimate(Counts(ffma=work), 80, 1024, 64, 0, V100)
    uneven = estimate(Counts(ffma=work), 81, 1024, 64, 0, V100)
    assert uneven.per_pipe_seconds["fma"] / even.per_pipe_seconds["fma"] == pytest.approx(2 * 80 / 81)
    assert even.waves == 1 and uneven.waves == pytest.approx(81 / 80)


def test_one_warp_uses_one_partition():
    one = estimate(Counts(ffma=10**6), 80, 32, 32, 0, V100).per_pipe_seconds["fma"]
    four = estimate(Counts(ffma=10**6), 80, 128, 32, 0, V100).per_pipe_seconds["fma"]
    assert one == pytest.approx(4 * four)


def test_an_idle_launch_is_limited_by_the_launch():
    e = estimate(Counts(integer=1), 1, 32, 16, 0, T4)
    assert e.limiting == "launch" and e.seconds == pytest.approx(T4.launch_seconds, rel=1e-2)


@pytest.mark.parametrize("size, registers, shared, model, expected", [
    (256, 32, 0, V100, 8),                  # 64 warps of 8
    (256, 64, 0, V100, 4),                  # hardware notes: 64 registers for 4 x 256 threads
    (256, 65, 0, V100, 3),                  # 72 registers: 28 warps
    (128, 255, 0, V100, 2),
    (256, 32, 64 << 10, V100, 1),           # a 128 x 128 float32 state
    (256, 32, 48 << 10, V100, 2),
    (256, 32, 48 << 10, T4, 1),
    (1024, 32, 0, T4, 1),
    (32, 16, 0, V100, 32),
    (32, 16, 0, T4, 16),
    (33, 16, 0, V100, 32),
    (256, 32, 75 << 10, H100, 3),           # 76 KB with the reserved one
    (256, 32, 76 << 10, H100, 2),
])
def test_blocks_per_sm(size, registers, shared, model, expected):
    assert blocks_per_sm(size, registers, shared, model) == expected


@pytest.mark.parametrize("size, registers, shared, model, words", [
    (1025, 16, 0, V100, "1025 threads"),
    (1024, 72, 0, V100, "72 registers for each of 1024 threads"),
    (256, 32, (64 << 10) + 4, T4, "65540 bytes of shared memory does not fit an SM of the T4"),
])
def test_a_block_that_does_not_fit(size, registers, shared, model, words):
    with pytest.raises(ValueError, match=words):
        blocks_per_sm(size, registers, shared, model)


@cuda.jit
def reverse_block(x):
    """x[i] of a block of 256 in the opposite order."""
    turn = cuda.shared.array(256, float32)
    i = uint32(cuda.threadIdx.x)
    turn[i] = x[i]
    cuda.syncthreads()
    x[i] = turn[uint32(255 - i)]


@pytest.mark.parametrize("cc", [(7, 0), (9, 0)])
def test_registers_come_from_the_assembler(cc):
    ptx = compile_kernel(reverse_block, ("float32[1]",), max(cc, supported_ccs()[0])).ptx
    assert 4 <= registers_used(ptx, cc) <= 32


def test_registers_of_instructions_that_older_cards_lack():
    """An emulated card compiles for the oldest architecture, and yet it runs these."""
    format, shape = FORMATS["Q8_0"], tensor_gemm.SMALLEST
    types = "float32[1]", "int8[1]", "uint16[1]", "int8[1]", "float32[1]", *["uint32"] * 4, "bool"
    ptx = compile_kernel(tensor_gemm.tensor(format, shape, "m16n8k32"), types, supported_ccs()[0]).ptx
    assert 64 < registers_used(ptx, (9, 0)) <= 255


@pytest.mark.parametrize("instruction, pipe", [
    ("dp4a.s32.s32", "dp4a"), ("dp2a.lo.s32.s32", "dp2a"), ("mad.lo.s32", "imad"), ("mul.wide.u32", "imad"),
    ("add.rn.f32", "fp32"), ("mul.rn.f32", "fp32"), ("fma.rn.f32", "ffma"), ("fma.rn.f16x2", "half2"),
    ("add.rn.f16", "half"), ("cvt.f32.f16", "half"), ("cvt.rn.f16.f32", "conversion"), ("fma.rn.f64", "fp64"),
    ("add.s64", "integer"), ("setp.lt.and.f32", "integer"), ("max.f32", "integer"), ("selp.f32", "integer"),
    ("prmt.b32", "integer"), ("shf.l.wrap.b32", "integer"), ("cvt.u64.u32", "integer"),
    ("cvt.rn.f32.s32", "conversion"),
    ("cvt.rni.s32.f32", "conversion"), ("cvt.rn.bf16.f32", "conversion"), ("div.rn.f32", "special"),
    ("ex2.approx.ftz.f32", "special"), ("popc.b32", "special"), ("shfl.sync.bfly.b32", "shuffle"),
    ("vote.sync.ballot.b32", "vote"), ("ld.global.nc.v4.u32", "global_"), ("ld.u32", "global_"),
    ("ld.shared.v4.f32", "shared"), ("st.local.u32", "local"), ("ld.param.u64", "move"), ("mov.u32", "move"),
    ("cvta.to.global.u64", "move"), ("atom.global.add.u32", "atomic"), ("bar.sync", "barrier"),
    ("membar.gl", "barrier"), ("bra.uni", "branch"), ("ret", "branch"),
    ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32", "tensor"),
])
def test_pipe_of(instruction, pipe):
    opcode, *types = instruction.split(".")
    assert pipe_of(opcode, tuple(types)) == pipe
    assert pipe in PIPES


def test_an_unknown_instruction_is_refused():
    with pytest.raises(ValueError, match="tex.2d.v4.f32.s32"):
        pipe_of("tex", ("2d", "v4", "f32", "s32"))


@EVERY_CARD
def test_every_pipe_but_moves_has_a_unit_beyond_issue(model):
    free = {"move", "barrier", "branch"}    # barriers and branches cost an issue slot and no more
    for pipe in set(PIPES) - free:
        assert any(pipe in u.pipes for u in model.units if u.name != "issue"), pipe
    assert set().union(*(u.pipes for u in model.units)) == set(PIPES) - {"move"}


def test_counts_add():
    assert Counts(dp4a=1, read_bytes=5) + Counts(dp4a=2, shared=3) == Counts(dp4a=3, shared=3, read_bytes=5)


def test_what_is_shown_says_estimate():
    counts = Counts(dp4a=10**6, shared=10**6, shared_passes=2 * 10**6, shared_replays=10**6)
    estimates = [full(card, counts) for card in CARDS]
    assert repr(estimates[0]).startswith("estimate for CMP 100-210: ")
    text = report("a kernel", counts, estimates)
    assert "estimated µs" in text and all(card.name in text for card in CARDS)
    assert text.count("◄") == len(CARDS)
