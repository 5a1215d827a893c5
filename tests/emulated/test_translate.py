"""What the opcode tests do not reach: memory, lanes, control flow, barriers, calls; what is refused; other machines."""

import math
import re
import shutil
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest

from kernels.emulated import native
from kernels.emulated.ptx import Unsupported
from kernels.emulated.translate import Target, translate
from tests.emulated.arithmetic import half2, half_fma, halves
from tests.emulated.ptx_runner import elementwise, launch, module
from tests.emulated.test_opcodes import prmt

TARGETS = pytest.mark.parametrize("target", native.TARGETS)
LANES = np.arange(32, dtype=np.uint32)
START = "mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1];"


def warp(lines, result="u32", variables="", target=None, block=(32,), inputs=None):
    """%r1 = the thread's number -> what `lines` leave in %r9 (or %f9), one value per thread of a block."""
    n = int(np.prod(block))
    out, data = np.zeros(n, np.uint32), np.arange(4096, dtype=np.uint32) if inputs is None else inputs
    ptx = module(f"{START}\n{lines}\nmad.wide.u32 %rd60, %r1, 4, %rd1;\nst.global.u32 [%rd60], %r9;", ["u64", "u64"],
                 variables=variables)
    launch(ptx, (1,), block, out, data, target=target and target())
    return out.view(np.float32) if result == "f32" else out


# ---- memory ----

ADDRESSES = {                                        # a register written twice would have no known pattern
    "one place": ("mov.u32 %r2, 12;", lambda i: 12 + 0 * i),
    "neighbours": ("shl.b32 %r2, %r1, 4;", lambda i: 16 * i),
    "in pairs": ("shr.u32 %r3, %r1, 1; shl.b32 %r2, %r3, 4;", lambda i: i // 2 * 16),
    "two rows": ("and.b32 %r3, %r1, 1; shr.u32 %r4, %r1, 1; mul.lo.s32 %r5, %r3, 1024; mad.lo.s32 %r2, %r4, 16, %r5;",
                 lambda i: i % 2 * 1024 + i // 2 * 16),
    "backwards": ("sub.s32 %r3, 31, %r1; shl.b32 %r2, %r3, 4;", lambda i: (31 - i) * 16),
    "far apart": ("mul.lo.s32 %r2, %r1, 112;", lambda i: 112 * i),
    "fours, far apart": ("shr.u32 %r3, %r1, 2; mul.lo.s32 %r2, %r3, 112;", lambda i: i // 4 * 112),
    "three places": ("and.b32 %r3, %r1, 1; shr.u32 %r4, %r1, 1; and.b32 %r5, %r4, 1; add.s32 %r6, %r3, %r5; "
                     "mul.lo.s32 %r2, %r6, 112;", lambda i: (i % 2 + i // 2 % 2) * 112),
    "scattered": ("mul.lo.s32 %r3, %r1, %r1; and.b32 %r4, %r3, 255; shl.b32 %r2, %r4, 4;",
                  lambda i: i * i % 256 * 16),
}


@TARGETS
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind, n", [("u8", 1), ("s8", 1), ("u16", 1), ("s16", 2), ("u32", 1), ("u32", 2), ("u32", 4),
                                     ("u64", 1), ("u64", 2), ("f32", 4)])
@pytest.mark.parametrize("case", ADDRESSES)
def test_loads_and_stores(case, kind, n, masked, target):
    """Copies elements from an address pattern to the same pattern elsewhere; lanes at rest must change nothing."""
    lines, place = ADDRESSES[case]
    size = int(kind[1:]) // 8
    letters = "h" if size <= 2 else "f" if kind == "f32" else "r" if size == 4 else "rd"
    registers = [f"%{letters}{20 + i}" for i in range(n)]
    values = registers[0] if n == 1 else f"{{{', '.join(registers)}}}"
    vector = f".v{n}" if n > 1 else ""
    guard = "setp.lt.u32 %p1, %r1, 5; setp.eq.u32 %p2, %r1, 9; or.pred %p1, %p1, %p2; @!%p1 bra END;" if masked else ""
    body = f"""{START} {lines} {guard} cvt.u64.u32 %rd3, %r2; add.s64 %rd4, %rd2, %rd3; add.s64 %rd5, %rd1, %rd3;
    ld.global{vector}.{kind} {values}, [%rd4]; st.global{vector}.{kind} [%rd5], {values}; END:"""
    source, out = np.random.default_rng(0).integers(1, 255, 8192, np.uint8), np.zeros(8192, np.uint8)
    expected = out.copy()
    for i in [*range(5), 9] if masked else range(32):
        at = slice(place(i), place(i) + size * n)
        expected[at] = source[at]
    launch(module(body, ["u64", "u64"]), (1,), (32,), out, source, target=target())
    assert (out == expected).all()


@pytest.mark.parametrize("lanes, places", [(1, 32), (2, 16), (4, 8), (16, 2)])
def test_known_places_are_loaded_once(lanes, places):
    """However many lanes read a place; and no lane's address is computed."""
    body = f"""{START} shr.u32 %r3, %r1, {lanes.bit_length() - 1}; mul.lo.s32 %r2, %r3, 112; cvt.u64.u32 %rd3, %r2;
    add.s64 %rd4, %rd2, %rd3; ld.global.v4.u32 {{%r5, %r6, %r7, %r8}}, [%rd4]; add.s32 %r10, %r5, %r6;
    xor.b32 %r11, %r7, %r8; mad.lo.s32 %r9, %r10, %r11, %r1; mul.wide.u32 %rd5, %r1, 4; add.s64 %rd6, %rd1, %rd5;
    st.global.u32 [%rd6], %r9;"""
    ir = translate(ptx := module(body, ["u64", "u64"]), (32, 1, 1), native.host()).ir
    assert len(re.findall("load <4 x i32>", ir)) == places and "x ptr>" not in ir
    data, out = np.random.default_rng(0).integers(0, 1 << 32, 4096, np.uint32), np.zeros(32, np.uint32)
    launch(ptx, (1,), (32,), out, data)
    a, b, c, d = data[LANES // lanes * 28 + np.arange(4)[:, None]]
    assert (out == (a + b) * (c ^ d) + LANES).all()


@TARGETS
@pytest.mark.parametrize("how", ["together", "a store between", "an acquire between", "a place twice", "lanes at rest"])
def test_neighbouring_words_of_scattered_rows_are_loaded_together(how, target):
    """Rows of 9 words, a row for each lane; its words 1 .. 4 in any order."""
    between = {"a store between": "st.shared.u32 [%rd5+12], %r1;", "a place twice": "ld.shared.u32 %r15, [%rd5+8];",
               "an acquire between": "ld.acquire.gpu.global.u32 %r15, [%rd1];",
               "lanes at rest": "setp.gt.u32 %p1, %r1, 20; mov.u32 %r9, 5; @%p1 bra END;"}.get(how, "")
    stores = " ".join(f"mad.lo.s32 %r{20 + i}, %r1, 9, {i}; st.shared.u32 [%rd5+{4 * i}], %r{20 + i};"
                      for i in range(9))
    lines = f"""mul.wide.u32 %rd4, %r1, 36; mov.u64 %rd3, board; add.s64 %rd5, %rd3, %rd4; {stores}
    ld.shared.u32 %r12, [%rd5+8]; ld.shared.u32 %r11, [%rd5+4]; mov.u32 %r10, %r11; {between}
    ld.shared.u32 %r14, [%rd5+16]; ld.shared.u32 %r13, [%rd5+12]; mad.lo.s32 %r16, %r10, 3, %r12;
    mad.lo.s32 %r17, %r13, 5, %r16; mad.lo.s32 %r9, %r14, 7, %r17; END:"""
    got = warp(lines, variables=(board := ".shared .align 4 .b8 board[1152];"), target=target)
    a, b, c, d = LANES * 9 + np.arange(1, 5, dtype=np.uint32)[:, None]
    want = 3 * a + b + 5 * (LANES if how == "a store between" else c) + 7 * d
    assert (got == np.where((how == "lanes at rest") & (LANES > 20), 5, want)).all()
    ir = translate(module(f"{START} {lines}", ["u64", "u64"], variables=board), (32, 1, 1), target()).ir
    assert ir.count("load <4 x i32>") == (32 if how in ("together", "a place twice") else 0)


@TARGETS
@pytest.mark.parametrize("pitch", [2, 4])
def test_neighbouring_words_of_rows_without_holes(pitch, target):
    """Each lane loads 4 words, from the beginning of its row on. Rows have `pitch` words. Word number i holds i."""
    stores = " ".join(f"mad.lo.s32 %r{20 + i}, %r1, 4, {i}; st.shared.u32 [%rd5+{4 * i}], %r{20 + i};"
                      for i in range(4))
    got = warp(f"""mul.wide.u32 %rd4, %r1, 16; mov.u64 %rd3, board; add.s64 %rd5, %rd3, %rd4; {stores} bar.sync 0;
    mul.wide.u32 %rd6, %r1, {4 * pitch}; add.s64 %rd7, %rd3, %rd6; ld.shared.u32 %r11, [%rd7]; mul.lo.s32 %r15, %r11, 3;
    ld.shared.u32 %r13, [%rd7+8]; ld.shared.u32 %r12, [%rd7+4]; ld.shared.u32 %r14, [%rd7+12];
    mad.lo.s32 %r16, %r12, 5, %r15; mad.lo.s32 %r17, %r13, 7, %r16; mad.lo.s32 %r9, %r14, 11, %r17;""",
               variables=".shared .align 4 .b8 board[512];", target=target)
    a, b, c, d = LANES * pitch + np.arange(4, dtype=np.uint32)[:, None]
    assert (got == 3 * a + 5 * b + 7 * c + 11 * d).all()


@TARGETS
@pytest.mark.parametrize("how", ["copies", "with a first value", "read, too", "lanes at rest"])
def test_copies_of_16_bytes_stay_as_they_lie(how, target):
    """What one turn of a loop loads, the next one stores, behind a barrier."""
    four = "{%r5, %r6, %r7, %r8}"
    first = "mov.u32 %r5, 7; mov.u32 %r7, %r1;" if how == "with a first value" else ""
    rest = "setp.gt.u32 %p2, %r1, 40; @%p2 bra ON;" if how == "lanes at rest" else ""
    body = f"""{START} mul.wide.u32 %rd3, %r1, 16; add.s64 %rd4, %rd2, %rd3; add.s64 %rd5, %rd1, %rd3; mov.u32 %r2, 0;
    {first} AGAIN: bar.sync 0; st.global.v4.u32 [%rd5], {four}; {rest} ld.global.v4.u32 {four}, [%rd4];
    ON: add.s64 %rd4, %rd4, 1024; add.s64 %rd5, %rd5, 1024; {"add.s32 %r9, %r5, %r6;" if how == "read, too" else ""}
    add.s32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 4; @%p1 bra AGAIN;"""
    data = np.random.default_rng(0).integers(0, 1 << 32, (4, 64, 4), np.uint32)
    out, want = np.full_like(data, 3), np.zeros_like(data)
    want[1:] = data[:3]
    if how == "with a first value":
        want[0, :, 0], want[0, :, 2] = 7, np.arange(64)
    if how == "lanes at rest":
        want[:, 41:] = 0
    launch(ptx := module(body, ["u64", "u64"]), (1,), (64,), out, data, target=target())
    assert (out == want).all()
    is_sorted = "shufflevector <128 x i32>" in translate(ptx, (64, 1, 1), target()).ir
    assert is_sorted == (how != "copies")


@TARGETS
def test_the_last_lane_wins(target):
    out = np.zeros(1, np.uint32)
    body = f"{START} setp.gt.u32 %p1, %r1, 20; @%p1 bra END; st.global.u32 [%rd1], %r1; END:"
    launch(module(body, ["u64", "u64"]), (1,), (32,), out, out, target=target())
    assert out[0] == 20


@TARGETS
def test_an_index_that_wraps_compares_as_on_a_card(target):
    """tid - 3 as 64 bits is huge for lanes 0 to 2; as an address it is used only from lane 3 on."""
    got = warp("""add.s32 %r2, %r1, -3; cvt.u64.u32 %rd3, %r2; setp.gt.u64 %p1, %rd3, 1000; selp.b32 %r9, 7, 0, %p1;
    @%p1 bra END; shl.b64 %rd4, %rd3, 2; add.s64 %rd5, %rd2, %rd4; ld.global.u32 %r9, [%rd5]; END:""", target=target)
    assert (got == np.where(LANES < 3, 7, LANES - 3)).all()


@TARGETS
def test_local_shared_and_constant_memory(target):
    got = warp("""mov.u64 %rd3, buffer; cvta.local.u64 %rd3, %rd3; and.b32 %r2, %r1, 3; mul.wide.u32 %rd4, %r2, 4;
    add.s64 %rd5, %rd3, %rd4; st.u32 [%rd5], %r1; ld.local.u32 %r3, [%rd5];
    mov.u64 %rd6, board; mad.wide.u32 %rd7, %r1, 4, %rd6; st.shared.u32 [%rd7], %r3; bar.sync 0;
    ld.shared.u32 %r4, [board+8]; mov.u64 %rd8, table; add.s64 %rd9, %rd8, %rd4; ld.const.u32 %r5, [%rd9];
    add.s32 %r9, %r4, %r3; add.s32 %r9, %r9, %r5;""", target=target,
               variables=".shared .align 4 .b8 board[128];\n.local .align 8 .b8 buffer[16];\n"
                         ".const .align 4 .u32 table[4] = {10, 20, 30, 40};")
    assert (got == 2 + LANES + np.array([10, 20, 30, 40])[LANES % 4]).all()


def test_dynamic_shared_memory_follows_static():
    out = np.zeros(1, np.uint32)
    body = """ld.param.u64 %rd1, [p0]; mov.u64 %rd2, fixed; mov.u64 %rd3, dynamic; sub.s64 %rd4, %rd3, %rd2;
    cvt.u32.u64 %r1, %rd4;
    st.shared.u32 [dynamic+60], %r1; ld.shared.u32 %r2, [dynamic+60]; st.global.u32 [%rd1], %r2;"""
    variables = ".shared .align 4 .b8 fixed[20];\n.extern .shared .align 16 .b8 dynamic[];"
    launch(module(body, ["u64"], variables=variables), (1,), (1,), out, shared_bytes=64)
    assert out[0] == 32


@TARGETS
@pytest.mark.parametrize("operation, kind, start, value, expected", [
    ("add", "u32", 5, lambda i: i, 5 + 496), ("min", "s32", 7, lambda i: i - 9, 2**32 - 9),
    ("max", "u32", 7, lambda i: i, 31),
    ("and", "b32", 0xFF, lambda i: 0xF0 | i, 0xF0), ("or", "b32", 0, lambda i: 1 << i, 2**32 - 1),
    ("xor", "b32", 0, lambda i: i, 0), ("exch", "b32", 1, lambda i: i + 3, 34), ("inc", "u32", 3, lambda i: 9, 5),
    ("dec", "u32", 3, lambda i: 9, 1)])
def test_atomics(operation, kind, start, value, expected, target):
    """All lanes on one word; and what each lane saw is the state before it, in the order of lanes."""
    out, data = np.zeros(32, np.uint32), np.array([start] + [value(i) % 2**32 for i in range(32)], np.uint32)
    body = f"""{START} mad.wide.u32 %rd3, %r1, 4, %rd2; ld.global.u32 %r2, [%rd3+4];
    atom.global.{operation}.{kind} %r3, [%rd2], %r2; mad.wide.u32 %rd4, %r1, 4, %rd1; st.global.u32 [%rd4], %r3;"""
    launch(module(body, ["u64", "u64"]), (1,), (32,), out, data, target=target())
    assert data[0] == expected and out[0] == start and len(set(out)) > 1


@TARGETS
def test_atomic_float_add_and_compare_and_swap(target):
    out, data = np.zeros(32, np.uint32), np.zeros(2, np.float32)
    body = f"""{START} cvt.rn.f32.u32 %f1, %r1; red.global.add.f32 [%rd2], %f1; add.s32 %r2, %r1, 1;
    atom.global.cas.b32 %r3, [%rd2+4], %r1, %r2; mad.wide.u32 %rd4, %r1, 4, %rd1; st.global.u32 [%rd4], %r3;"""
    launch(module(body, ["u64", "u64"]), (1,), (32,), out, data, target=target())
    assert data[0] == 496 and data.view(np.uint32)[1] == 32 and (out == LANES).all()


# ---- lanes ----

def shuffled(how, lane, by, clamp):
    """(source lane, predicate) as the PTX manual computes them."""
    by, limit, segment = by & 31, clamp & 31, clamp >> 8 & 31
    low, high = lane & segment, lane & segment | limit & ~segment
    j = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": low | by & ~segment}[how]
    inside = j >= high if how == "up" else j <= high
    return (j if inside else lane), inside


@TARGETS
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("clamp", [0x1F, 0, 0x181F, 0x1C07])
@pytest.mark.parametrize("by", [0, 1, 5, 16, 31])
@pytest.mark.parametrize("how", ["up", "down", "bfly", "idx"])
def test_shuffles(how, by, clamp, constant, target):
    amount = f"mov.u32 %r4, {by};" if constant else f"ld.global.u32 %r4, [%rd2+{4 * by}];"
    got = warp(f"""mul.lo.s32 %r2, %r1, %r1; add.s32 %r2, %r2, 3; {amount} mov.u32 %r5, {clamp};
    shfl.sync.{how}.b32 %r3|%p1, %r2, %r4, %r5, -1; selp.b32 %r6, 65536, 0, %p1;
    add.s32 %r9, %r3, %r6;""", target=target)
    pairs = [shuffled(how, lane, by, clamp) for lane in range(32)]
    assert got.tolist() == [j * j + 3 + 65536 * inside for j, inside in pairs]


@TARGETS
@pytest.mark.parametrize("how", ["up", "idx"])
def test_shuffles_of_what_all_lanes_have(how, target):
    got = warp(f"""ld.global.u32 %r2, [%rd2+28]; shfl.sync.{how}.b32 %r3|%p1, %r2, 1, {31 * (how == "idx")}, -1;
    selp.b32 %r6, 65536, 0, %p1; add.s32 %r9, %r3, %r6;""", target=target)
    value = warp("ld.global.u32 %r9, [%rd2+28];", target=target)[0]
    inside = [shuffled(how, lane, 1, 31 * (how == "idx"))[1] for lane in range(32)]
    assert value and got.tolist() == [value + 65536 * i for i in inside]


@TARGETS
def test_shuffle_by_an_amount_of_each_lane(target):
    got = warp("xor.b32 %r2, %r1, 85; mul.lo.s32 %r4, %r1, %r1; shfl.sync.idx.b32 %r9, %r2, %r4, 31, -1;",
               target=target)
    assert (got == (LANES * LANES % 32 ^ 85)).all()


@TARGETS
def test_votes(target):
    got = warp("""setp.gt.u32 %p1, %r1, 20; vote.sync.ballot.b32 %r2, %p1, -1; vote.sync.any.pred %p2, %p1, 255;
    vote.sync.all.pred %p3, %p1, -2097152; selp.b32 %r3, 1, 0, %p2; selp.b32 %r4, 2, 0, %p3; add.s32 %r9, %r2, %r3;
    add.s32 %r9, %r9, %r4; @%p1 bra END; activemask.b32 %r9; END:""", target=target)
    ballot = sum(1 << i for i in range(21, 32))
    assert (got == np.where(LANES > 20, ballot + 2, 2**21 - 1)).all()


def test_what_a_block_alone_reads_in_a_loop_is_fetched_ahead():
    """16 KB and 1 KB for large loads; 1 KB and 64 bytes for small ones; not what all blocks read, nor outside loops."""
    def offsets(loop, index):
        body = f"""{START} mov.u32 %r2, %ctaid.x; mov.u32 %r3, 0; mad.lo.s32 %r4, {index}, 4096, %r3;
        mad.wide.u32 %rd3, %r4, 16, %rd2; mul.wide.u32 %rd5, %r1, 16; add.s64 %rd4, %rd3, %rd5;
        mul.wide.u32 %rd7, %r1, 2; add.s64 %rd6, %rd3, %rd7;
        AGAIN: ld.global.v4.u32 {{%r5, %r6, %r7, %r8}}, [%rd4]; ld.global.u16 %h1, [%rd6];
        add.s32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, 9; {"@%p1 bra AGAIN;" if loop else ""}"""
        ir = translate(module(body, ["u64", "u64"]), (32, 1, 1), native.host()).ir
        lines = re.findall(r"(%t\d+) = getelementptr i8, ptr %t\d+, i64 (\d+)", ir)
        ahead = re.findall(r"llvm.prefetch.p0\(ptr (%t\d+), i32 0, i32 (\d)", ir)
        return sorted((int(dict(lines)[name]), int(locality)) for name, locality in ahead)

    far, near = [(16384 + i, 1) for i in range(0, 512, 64)], [(1024 + i, 3) for i in range(0, 512, 64)]
    assert offsets(True, "%r2") == sorted([*far, *near, (1024, 1), (64, 3)])
    assert offsets(False, "%r2") == offsets(True, "%r3") == []


# ---- dot products and repeated values ----

@TARGETS
@pytest.mark.parametrize("start", ["constant", "uniform", "varying"])
@pytest.mark.parametrize("n_a, n_b, n_quads", [(1, 1, 1), (1, 1, 2), (3, 1, 1), (1, 3, 1), (2, 3, 2)])
def test_dot_products_of_16_byte_loads(n_a, n_b, n_quads, start, target):
    """Every row of a by every row of b, 16 or 32 bytes per lane, bytes from -128 to 127."""
    random = np.random.default_rng(0)
    a, b = (random.integers(-128, 128, (n, n_quads, 32, 16), np.int8) for n in (n_a, n_b))
    a[0, 0, 0], b[0, 0, 0] = -128, -128
    out, starts = np.zeros((n_a, n_b, 32), np.int32), np.arange(32, dtype=np.int32) - 9
    registers = [".reg .b32 %a<64>;", ".reg .b32 %b<64>;", ".reg .b32 %d<128>;"]
    lines = ["mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; ld.param.u64 %rd3, [p2];",
             "ld.param.u64 %rd4, [p3]; mad.wide.u32 %rd2, %r1, 16, %rd2; mad.wide.u32 %rd3, %r1, 16, %rd3;",
             {"constant": "mov.u32 %r2, 1262485504;", "uniform": "ld.global.u32 %r2, [%rd4+8];",
              "varying": "mad.wide.u32 %rd4, %r1, 4, %rd4; ld.global.u32 %r2, [%rd4];"}[start]]
    for name, pointer, n in (("a", 2, n_a), ("b", 3, n_b)):
        for i in range(n * n_quads):
            four = ", ".join(f"%{name}{4 * i + word}" for word in range(4))
            lines.append(f"ld.global.v4.u32 {{{four}}}, [%rd{pointer}+{512 * i}];")
    lines.append("mad.wide.u32 %rd1, %r1, 4, %rd1;")
    n_words, dots = 4 * n_quads, 0
    for i in range(n_a):
        for j in range(n_b):
            before = "%r2"
            for word in range(n_words):
                after = f"%d{dots}"
                lines.append(f"dp4a.s32.s32 {after}, %a{n_words * i + word}, %b{n_words * j + word}, {before};")
                before, dots = after, dots + 1
            lines.append(f"st.global.u32 [%rd1+{128 * (n_b * i + j)}], {before};")
    ptx = module("\n".join(lines), ["u64"] * 4, "\n".join(registers))
    launch(ptx, (1,), (32,), out, a, b, starts, target=target())
    first = {"constant": 1262485504, "uniform": starts[2], "varying": starts}[start]
    assert (out == first + np.einsum("aqlk,bqlk->abl", a.astype(int), b.astype(int))).all()


@TARGETS
def test_a_pair_of_words_may_be_multiplied_twice(target):
    data = np.random.default_rng(0).integers(0, 2**32, 256, np.uint32)
    got = warp("""mad.wide.u32 %rd3, %r1, 16, %rd2; ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd3];
    ld.global.v4.u32 {%r12, %r13, %r14, %r15}, [%rd3+512]; dp4a.s32.s32 %r20, %r2, %r12, 5;
    dp4a.s32.s32 %r21, %r3, %r13, %r20; dp4a.s32.s32 %r22, %r4, %r14, %r21; dp4a.s32.s32 %r23, %r5, %r15, %r22;
    dp4a.s32.s32 %r9, %r3, %r13, %r23;""", target=target, inputs=data)
    a, b = data.view(np.int8).reshape(2, 32, 4, 4).astype(int)
    products = (a * b).sum(-1)
    assert (got.view(np.int32) == 5 + products.sum(-1) + products[:, 1]).all()


@TARGETS
@pytest.mark.parametrize("how", ["another load", "one word", "lanes at rest"])
def test_dot_products_of_16_byte_loads_into_registers_that_are_written_again(how, target):
    data = np.random.default_rng(0).integers(0, 2**32, 512, np.uint32)
    again = {"another load": "ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd3+1024];", "one word": "mov.u32 %r4, %r12;",
             "lanes at rest": "setp.gt.u32 %p1, %r1, 6; @%p1 bra ON; "
                              "ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd3+1024];"
                              "ON:"}
    got = warp(f"""mad.wide.u32 %rd3, %r1, 16, %rd2; ld.global.v4.u32 {{%r2, %r3, %r4, %r5}}, [%rd3];
    ld.global.v4.u32 {{%r12, %r13, %r14, %r15}}, [%rd3+512]; {again[how]} dp4a.s32.s32 %r20, %r2, %r12, 5;
    dp4a.s32.s32 %r21, %r3, %r13, %r20; dp4a.s32.s32 %r22, %r4, %r14, %r21; dp4a.s32.s32 %r9, %r5, %r15, %r22;""",
               target=target, inputs=data)
    a, b, c, _ = data.view(np.int8).reshape(4, 32, 4, 4).astype(int)
    if how == "one word":
        a[:, 2] = b[:, 0]
    else:
        a[:7 if how == "lanes at rest" else 32] = c[:7 if how == "lanes at rest" else 32]
    assert (got.view(np.int32) == 5 + (a * b).sum((-1, -2))).all()


@TARGETS
@pytest.mark.parametrize("n", [123, 124, 125, 300])
def test_long_chains_of_dot_products_of_the_largest_bytes(n, target):
    """The sum of 128 words of these bytes, times 256, would not fit in 32 bits."""
    data = np.full(32, 0x80808080, np.uint32)
    dots = " ".join(f"dp4a.s32.s32 %d{i + 1}, %r2, %r2, %d{i};" for i in range(n))
    got = warp(f"""mad.wide.u32 %rd3, %r1, 4, %rd2; ld.global.u32 %r2, [%rd3]; .reg .b32 %d<{n + 1}>; mov.u32 %d0, 7;
    {dots} mov.u32 %r9, %d{n};""", target=target, inputs=data)
    assert (got == 7 + n * 4 * 128 * 128).all()


@TARGETS
def test_dot_products_of_registers_that_are_written_again(target):
    """Within a chain, after it, in a loop, and of the sum itself."""
    data = np.random.default_rng(0).integers(0, 2**32, 96, np.uint32)
    got = warp("""mad.wide.u32 %rd3, %r1, 4, %rd2; ld.global.u32 %r2, [%rd3]; ld.global.u32 %r3, [%rd3+128];
    ld.global.u32 %r4, [%rd3+256]; mov.u32 %r5, 7; mov.u32 %r6, 0;
    AGAIN: dp4a.s32.s32 %r20, %r2, %r3, %r5; dp4a.s32.s32 %r21, %r3, %r4, %r20; dp4a.s32.s32 %r22, %r4, %r2, %r21;
    mov.u32 %r7, %r3; mov.u32 %r3, %r4; dp4a.s32.s32 %r23, %r2, %r3, %r22; dp4a.s32.s32 %r24, %r3, %r3, %r23;
    dp4a.s32.s32 %r25, %r2, %r2, %r24; mov.u32 %r4, %r2; mov.u32 %r2, %r7; mov.u32 %r5, %r25;
    dp4a.s32.s32 %r5, %r2, %r3, %r5; dp4a.s32.s32 %r5, %r3, %r3, %r5;
    add.u32 %r6, %r6, 1; setp.lt.u32 %p1, %r6, 3; @%p1 bra AGAIN; mov.u32 %r9, %r5;""", target=target, inputs=data)
    x, y, z = data.view(np.int8).reshape(3, 32, 4).astype(int)
    total = 7
    for _ in range(3):
        total = total + x * y + y * z + z * x
        y, before = z, y
        total = total + x * y + y * y + x * x
        x, z = before, x
        total = total + x * y + y * y
    assert (got.view(np.int32) == (total - 7).sum(-1) + 7).all()


@TARGETS
def test_a_chain_of_dot_products_that_are_the_same_for_all_lanes(target):
    """A product that differs among lanes may follow in the same chain."""
    data = np.random.default_rng(0).integers(0, 2**32, 96, np.uint32)
    got = warp("""ld.global.u32 %r2, [%rd2]; ld.global.u32 %r3, [%rd2+128]; dp4a.s32.s32 %r20, %r2, %r3, 7;
    dp4a.s32.s32 %r21, %r2, %r2, %r20; dp4a.s32.s32 %r22, %r3, %r3, %r21; dp4a.s32.s32 %r23, %r3, %r2, %r22;
    mad.wide.u32 %rd3, %r1, 4, %rd2; ld.global.u32 %r4, [%rd3+256]; xor.b32 %r24, %r23, %r4;
    dp4a.s32.s32 %r9, %r4, %r2, %r24;""", target=target, inputs=data)
    x, y, z = (data[i:i + n].view(np.int8).reshape(n, 4).astype(int) for i, n in ((0, 1), (32, 1), (64, 32)))
    same = 7 + (2 * x * y + x * x + y * y).sum(-1)
    assert (got.view(np.int32) == (same ^ data[64:].view(np.int32)) + (z * x).sum(-1)).all()


@TARGETS
@pytest.mark.parametrize("written_again", [False, True])
@pytest.mark.parametrize("bytes_of", ["all lanes", "each lane"])
def test_permutations_by_one_of_two_selectors(bytes_of, written_again, target):
    data = np.random.default_rng(0).integers(0, 1 << 32, 64, np.uint32)
    place = "mad.wide.u32 %rd2, %r1, 8, %rd2;" if bytes_of == "each lane" else ""
    again = "shr.u32 %r4, %r4, 8;" if written_again else ""
    got = warp(f"""{place} ld.global.u32 %r2, [%rd2]; ld.global.u32 %r3, [%rd2+4]; setp.lt.u32 %p1, %r1, 13;
    selp.b32 %r4, 0x5210, 0x0E73, %p1; {again} prmt.b32 %r9, %r2, %r3, %r4;""", target=target, inputs=data)
    a, b = data.reshape(32, 2)[LANES if bytes_of == "each lane" else 0 * LANES].T
    selectors = np.where(LANES < 13, 0x5210, 0x0E73) >> (8 if written_again else 0)
    assert (got == [prmt(*map(int, three)) for three in zip(a, b, selectors)]).all()


CODES = 0x03C003C0, 0x3C003C00, -1.46875          # mask, ones, k: kernels/kv_formats.py with 4 bits


def sum_of_codes(mask, ones, k, behind_mask="", behind_a="", behind_c=""):
    """Lines of a * b + c with a = ones | (%in0 & mask), b = %in1, c = b * k. %r3 is %in0 & mask, %r4 is a, %r6 is c."""
    k = int(np.float16(k).view(np.uint16)) * 0x10001
    return f"""and.b32 %r3, %in0, {mask}; {behind_mask} or.b32 %r4, %r3, {ones}; {behind_a} mov.b32 %r5, {k};
    mul.rn.f16x2 %r6, %in1, %r5; {behind_c} fma.rn.f16x2 %out, %r4, %in1, %r6;"""


def calls_fma(lines, target):
    """Whether a call computes the sum, which rounds to odd first."""
    lines = re.sub(r"%in(\d)", r"%r1\1", lines).replace("%out", "%r9")
    ptx = module(f"{START} ld.global.v2.u32 {{%r10, %r11}}, [%rd2]; ld.global.u32 %r12, [%rd2+8]; {lines} "
                 "st.global.u32 [%rd1], %r9;", ["u64", "u64"])
    return "@fma.rn.f16x2" in translate(ptx, (32, 1, 1), target).ir


@TARGETS
@pytest.mark.parametrize("is_short, mask, ones, k", [
    (True, *CODES), (True, 0x03800380, 0x3C003C00, -1.4375), (True, 0, 0x42004200, 1.001),
    (True, 0x03FF03FF, 0x3C003C00, 3), (True, 0x03C00380, 0x3C004000, 2.5), (True, 0x03FE03FE, 0x34003400, -1.5),
    (False, 0x03C003C0, 0x3C003C00, 0.999), (False, 0x03FF03FF, 0x3C003C00, -3.002), (False, 0x07C007C0, 0x38003800, 2),
    (False, 0x03C003C0, 0x3C00BC00, 2), (False, 0x03FF03C0, 0x3C003C00, 99), (False, 0x03C003C0, 0x00400040, 2),
    (False, 0x02000200, 0x04000400, -65504), (False, *CODES[:2], 1), (False, *CODES[:2], math.inf)])
def test_sums_that_float32_holds_are_rounded_once(is_short, mask, ones, k, target):
    """With every half as b."""
    lines, b, target = sum_of_codes(mask, ones, k), np.arange(1 << 16, dtype=np.uint16), target()
    assert calls_fma(lines, target) == (not is_short and not target.fp16)
    for seed in range(4):
        x = np.random.default_rng(seed).integers(0, 1 << 32, len(b), np.uint32)
        words = np.stack([b, b[::-1]], axis=1).view(np.uint32).reshape(-1)
        got = elementwise(lines, ("f16x2",) * 2, "f16x2", [x, words], False, target)
        with np.errstate(all="ignore"):
            c = half2(halves(words) * np.float16(k))
            expected = halves(half_fma(x & np.uint32(mask) | np.uint32(ones), words, c))
        assert np.array_equal(halves(got), expected, equal_nan=True)


@TARGETS
@pytest.mark.parametrize("again", [
    {}, {"behind_mask": "mov.b32 %r3, %in2;"}, {"behind_mask": "or.b32 %r3, %in2, 0x02000200;"},
    {"behind_a": "mov.b32 %r4, %in2;"}, {"behind_a": "and.b32 %r3, %in2, 0x02000200;"},
    {"behind_a": "add.s32 %r4, %r3, 0x3C003C00;"}, {"behind_c": "mov.b32 %in1, %in2;"},
    {"behind_c": "mov.b32 %r6, %in2;"}, {"behind_c": "mul.rn.f16x2 %r6, %in2, %r5;"},
    {"behind_c": "add.rn.f16x2 %r6, %in1, %r5;"}])
def test_sums_of_registers_that_are_written_again(again, target):
    """Half 0 is 29/16 b + 1 with 29/16 b = 2^-11 + 2^-25. Rounded to float32 first, it would be rounded to 1."""
    lines, target = sum_of_codes(*CODES, **again), target()
    assert calls_fma(lines, target) == bool(again and not target.fp16)
    if again == {"behind_c": "mov.b32 %in1, %in2;"}:
        halves_of_one = -np.linspace(0.5, 1, 1025, dtype=np.float16)
        first = halves_of_one[halves_of_one * np.float16(CODES[2]) == 1][0]
        x, b, y = (np.full(32, n, np.uint32) for n in (0x340, first.view(np.uint16),
                                                       np.float16(565 * 2 ** -21).view(np.uint16)))
        got = elementwise(lines, ("f16x2",) * 3, "f16x2", [x, b, y], False, target)
        assert (halves(got)[:, 0] == 1 + 2.0 ** -10).all()


@TARGETS
@pytest.mark.parametrize("kind", [np.uint16, np.int16])
@pytest.mark.parametrize("line, value", [
    ("mul.lo.s16 %h2, %h1, 2048;", LANES << 11), ("mul.lo.s16 %h2, %h1, 4096;", LANES << 12),
    ("mul.lo.s16 %h3, %h1, -1; add.s16 %h4, %h3, 1; and.b16 %h2, %h4, 0x8000;", 1 - LANES & 0x8000)])
def test_shifts_of_16_bits_with_a_sign_or_a_carry_by_lane(line, value, kind, target):
    got = warp(f"""cvt.u16.u32 %h1, %r1; {line} shr.{"us"[kind is np.int16]}16 %h5, %h2, 8;
    cvt.u32.u16 %r9, %h5;""", target=target)
    assert (got == (value.astype(np.uint16).view(kind) >> kind(8)).view(np.uint16)).all()


@TARGETS
@pytest.mark.parametrize("kind, widen", [("u8", "cvt.u32.u16"), ("s8", "cvt.s32.s16"), ("u16", "cvt.u32.u16"),
                                         ("s16", "cvt.s32.s16"), ("u32", "")])
def test_values_that_lanes_share(kind, widen, target):
    """x[lane / 2] with a scalar, with y[lane / 2], with y[lane / 4] and with the lane."""
    size, register = int(kind[1:]) // 8, "%h" if widen else "%r"
    load = lambda i, shift, offset: f"""shr.u32 %r2, %r1, {shift}; mad.wide.u32 %rd3, %r2, {size}, %rd2;
    ld.global.{kind} {register}{20 + i}, [%rd3+{offset}]; {f"{widen} %r{30 + i}, %h{20 + i};" if widen else
                                                         f"mov.u32 %r{30 + i}, %r{20 + i};"}"""
    data = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    got = warp(f"""{load(0, 1, 0)} {load(1, 1, 64)} {load(2, 2, 256)} ld.global.u32 %r3, [%rd2+1024];
    mad.lo.s32 %r4, %r30, %r3, %r31; setp.lt.s32 %p1, %r4, %r30; selp.b32 %r4, %r3, %r4, %p1;
    xor.b32 %r5, %r4, %r32; mad.lo.s32 %r9, %r5, 3, %r1;""", target=target, inputs=data)
    typed = data.view(f"{'i' if kind[0] == 's' else 'u'}{size}")
    x, y, z = (typed[offset // size + LANES // n].astype(np.int64).astype(np.uint32)
               for offset, n in ((0, 2), (64, 2), (256, 4)))
    scalar = data.view(np.uint32)[256]
    total = x * scalar + y
    total = np.where(total.view(np.int32) < x.view(np.int32), scalar, total)
    assert (got == (total ^ z) * np.uint32(3) + LANES).all()


# ---- control flow ----

@TARGETS
def test_divergent_loops(target):
    """Collatz steps of every lane's number: loops of unequal length with a branch inside."""
    got = warp("""add.s32 %r2, %r1, 1; mov.u32 %r9, 0; LOOP: setp.eq.u32 %p1, %r2, 1; @%p1 bra END; add.s32 %r9, %r9, 1;
    and.b32 %r3, %r2, 1; setp.eq.u32 %p2, %r3, 0; @%p2 bra EVEN; mad.lo.s32 %r2, %r2, 3, 1; bra.uni LOOP;
    EVEN: shr.u32 %r2, %r2, 1; bra.uni LOOP; END:""", target=target)
    assert got.tolist() == [collatz(i + 1) for i in range(32)]


def collatz(n):
    steps = 0
    while n != 1:
        n, steps = n // 2 if n % 2 == 0 else 3 * n + 1, steps + 1
    return steps


@TARGETS
def test_early_returns_and_incomplete_warps_pass_barriers(target):
    """75 threads; those from 70 on leave; the others reverse their numbers through shared memory, twice."""
    got = warp("""mov.u32 %r9, 0; setp.ge.u32 %p1, %r1, 70; @%p1 bra END; mov.u64 %rd3, board; mov.u32 %r5, 0;
    mov.u32 %r6, %r1;
    AGAIN: mad.wide.u32 %rd4, %r1, 4, %rd3; st.shared.u32 [%rd4], %r6; bar.sync 0; sub.s32 %r2, 69, %r1;
    mad.wide.u32 %rd5, %r2, 4, %rd3; ld.shared.u32 %r6, [%rd5]; bar.sync 0; add.s32 %r5, %r5, 1; add.s32 %r6, %r6, 100;
    setp.lt.u32 %p2, %r5, 2; @%p2 bra AGAIN; mov.u32 %r9, %r6; END:""", target=target, block=(75,),
               variables=".shared .align 4 .b8 board[512];")
    assert (got == np.where(np.arange(75) < 70, np.arange(75) + 200, 0)).all()


@TARGETS
@pytest.mark.parametrize("block", [(32, 4), (8, 8), (4, 2, 8), (5, 7), (3, 5, 4), (64, 2), (2, 2, 2)])
def test_thread_indices(block, target):
    x, y, z = (*block, 1, 1)[:3]
    got = warp(f"""mov.u32 %r2, %tid.x; mov.u32 %r3, %tid.y; mov.u32 %r4, %tid.z; mad.lo.s32 %r1, %r4, {y}, %r3;
    mad.lo.s32 %r1, %r1, {x}, %r2; shl.b32 %r9, %r4, 8; or.b32 %r9, %r9, %r3; shl.b32 %r9, %r9, 8; or.b32 %r9, %r9, %r2;
    mov.u32 %r5, %ntid.x; mad.lo.s32 %r9, %r5, 16777216, %r9;""", target=target, block=block)
    i = np.arange(x * y * z)
    assert (got == x << 24 | i // (x * y) << 16 | i // x % y << 8 | i % x).all()


def test_many_blocks_on_several_workers():
    out = np.zeros(1000 * 64, np.uint32)
    body = """ld.param.u64 %rd1, [p0]; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %nctaid.x;
    mad.lo.s32 %r4, %r2, %r3, %r1;
    mov.u32 %r5, %tid.x; mad.lo.s32 %r6, %r4, 64, %r5; mad.wide.u32 %rd2, %r6, 4, %rd1; st.global.u32 [%rd2], %r6;"""
    kernel = native.NativeKernel(module(body, ["u64"]))
    run = kernel.prepare((50, 20), (64,), out.ctypes.data.to_bytes(8, "little"))
    for _ in range(20):
        out[:] = 0
        native.execute([run, run], 3)
        assert (out == np.arange(64000)).all()


@TARGETS
def test_carries_go_on_and_multiply(target):
    """Sum, difference and product plus sum of 64-bit numbers in words of 32 bits, mixed into one word; against
    Python."""
    got = warp("""mov.u32 %r2, -1; sub.s32 %r3, %r2, %r1; mul.lo.s32 %r4, %r1, 305419896;
    add.cc.u32 %r5, %r3, %r4; addc.cc.u32 %r6, %r2, %r1; addc.u32 %r7, 0, 0;
    sub.cc.u32 %r10, %r4, %r3; subc.cc.u32 %r11, %r1, %r2; subc.u32 %r12, 0, 0;
    mad.lo.cc.u32 %r13, %r3, %r4, %r2; madc.hi.cc.u32 %r14, %r3, %r4, %r2; addc.u32 %r15, %r1, 0;
    xor.b32 %r9, %r5, %r6; add.s32 %r9, %r9, %r7; xor.b32 %r10, %r10, %r11; sub.s32 %r9, %r9, %r10;
    add.s32 %r9, %r9, %r12;
    mad.lo.s32 %r9, %r9, 31, %r13; xor.b32 %r9, %r9, %r14; mad.lo.s32 %r9, %r9, 31, %r15;""", target=target)
    assert got.tolist() == [carried(i) for i in range(32)]


def carried(lane):
    ones = 2**32 - 1
    a, b = ones - lane, lane * 305419896 & ones
    total, less = (ones << 32 | a) + (lane << 32 | b), (lane << 32 | b) - (ones << 32 | a)
    product = a * b + (ones << 32 | ones)
    x = ((total & ones ^ total >> 32 & ones) + (total >> 64) - (less & ones ^ less >> 32 & ones) + (less >> 64)) * 31
    return (((x + product & ones) ^ product >> 32 & ones) * 31 + lane + (product >> 64)) & ones


@TARGETS
@pytest.mark.parametrize("how, kind", [("popc", "u32"), ("and", "pred"), ("or", "pred")])
def test_barriers_that_reduce(how, kind, target):
    """75 threads vote three times; those from 70 on have left before the second time."""
    keep = "mov.u32 %r3, %r4;" if how == "popc" else "selp.b32 %r3, 1, 0, %p4;"
    result = "%r4" if how == "popc" else "%p4"
    got = warp(f"""mov.u32 %r9, 0; mov.u32 %r5, 0; AGAIN: mul.lo.s32 %r6, %r5, 30; setp.ge.u32 %p1, %r1, %r6;
    bar.red.{how}.{kind} {result}, 0, %p1; {keep} mad.lo.s32 %r9, %r9, 100, %r3; setp.ge.u32 %p2, %r1, 70; @%p2 bra END;
    add.s32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 3; @%p3 bra AGAIN; END:""", target=target, block=(75,))
    counts = {"popc": (75, 40, 10), "and": (1, 0, 0), "or": (1, 1, 1)}[how]
    stays = counts[0] * 10000 + counts[1] * 100 + counts[2]
    assert (got == np.where(np.arange(75) < 70, stays, counts[0])).all()


@TARGETS
@pytest.mark.parametrize("masks", ["one", "by parity", "by value"])
def test_votes_and_matches_among_some_lanes(masks, target):
    """Every lane names members of its own; lanes from 27 on do not take part."""
    value = lambda i: i * i % 7
    members = {"one": lambda i: 0x07FFFFFF, "by parity": lambda i: 0x55555555 << i % 2,
               "by value": lambda i: sum(1 << j for j in range(32) if value(j) == value(i))}[masks]
    data = np.array([value(i) for i in range(32)] + [members(i) for i in range(32)], np.uint32)
    got = warp("""setp.gt.u32 %p5, %r1, 26; mov.u32 %r9, 0; @%p5 bra END; mad.wide.u32 %rd3, %r1, 4, %rd2;
    ld.global.u32 %r2, [%rd3]; ld.global.u32 %r3, [%rd3+128]; setp.gt.u32 %p1, %r2, 3;
    vote.sync.ballot.b32 %r9, %p1, %r3;
    vote.sync.any.pred %p2, %p1, %r3; vote.sync.all.pred %p3, %p1, %r3; vote.sync.uni.pred %p4, %p1, %r3;
    selp.b32 %r4, 3, 0, %p2; mad.lo.s32 %r9, %r9, 31, %r4; selp.b32 %r4, 5, 0, %p3; mad.lo.s32 %r9, %r9, 31, %r4;
    selp.b32 %r4, 7, 0, %p4; mad.lo.s32 %r9, %r9, 31, %r4; match.any.sync.b32 %r4, %r2, %r3;
    mad.lo.s32 %r9, %r9, 31, %r4;
    cvt.u64.u32 %rd4, %r2; match.all.sync.b64 %r4|%p2, %rd4, %r3; mad.lo.s32 %r9, %r9, 31, %r4; selp.b32 %r4, 9, 0, %p2;
    mad.lo.s32 %r9, %r9, 31, %r4; END:""", target=target, inputs=data)
    for i in range(27):
        group = [j for j in range(27) if members(i) >> j & 1]
        yes = [j for j in group if value(j) > 3]
        twins = [j for j in group if value(j) == value(i)]
        words = [sum(1 << j for j in yes), 3 * bool(yes), 5 * (yes == group), 7 * (yes in ([], group)),
                 sum(1 << j for j in twins), sum(1 << j for j in group) * (twins == group), 9 * (twins == group)]
        expected = 0
        for word in words:
            expected = expected * 31 + word & 2**32 - 1
        assert got[i] == expected, i


@TARGETS
def test_jumps_through_a_table(target):
    got = warp("""and.b32 %r2, %r1, 3; bra.uni GO; T: .branchtargets A, B, C, A; GO: brx.idx %r2, T;
    A: mov.u32 %r9, 5; bra.uni END; B: mov.u32 %r9, 6; bra.uni END; C: mov.u32 %r9, 7; END:""", target=target)
    assert (got == np.array([5, 6, 7, 5])[LANES % 4]).all()


def test_the_clock_goes_on():
    got = warp("mov.u64 %rd3, %clock64; bar.sync 0; mov.u64 %rd4, %clock64; "
               "setp.gt.u64 %p1, %rd4, %rd3; selp.b32 %r9, 1, 0, %p1;")
    assert got.all()


@TARGETS
def test_the_time_goes_on_while_a_warp_sleeps(target):
    """%globaltimer is in nanoseconds; a sleep lasts at least as long as it should, and not for ever."""
    got = warp("""mov.u64 %rd3, %globaltimer; mov.u32 %r3, 3000000; nanosleep.u32 %r3; nanosleep.u32 500;
    mov.u64 %rd4, %globaltimer; sub.u64 %rd4, %rd4, %rd3; cvt.u32.u64 %r9, %rd4;""", target=target)
    assert (got >= 3_000_000).all() and (got < 4_000_000_000).all()


def test_what_is_released_and_acquired():
    got = warp("st.release.sys.global.u32 [%rd1], 7; ld.acquire.sys.global.u32 %r9, [%rd1];")
    assert (got == 7).all()


def test_registers_that_nothing_writes_are_harmless():
    """NVVM leaves the upper half of a pack undefined where only the lower half is used."""
    got = warp("mov.b64 %rd3, {%r1, %r40}; cvt.u32.u64 %r9, %rd3; setp.eq.u32 %p1, %r41, 3; @%p1 bra END; END:")
    assert (got == LANES).all()


def test_a_register_that_is_read_first_keeps_what_is_written_later():
    """In a loop with a barrier: behind it, only what was never written is zero."""
    got = warp("""mad.wide.u32 %rd3, %r1, 4, %rd2; mov.u32 %r2, 0; AGAIN: bar.sync 0; add.s32 %r9, %r5, %r2;
    ld.global.u32 %r5, [%rd3]; add.s32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 3; @%p1 bra AGAIN;""", block=(64,))
    assert (got == np.arange(64) + 2).all()


def test_debugging_sections_are_skipped():
    text = module("ld.param.u64 %rd1, [p0]; st.global.u32 [%rd1], 5;", ["u64"])
    out = np.zeros(1, np.uint32)
    launch(text + ".section .debug_str\n{\n$L__info_string0:\n.b8 95,90\n.b8 0\n}\n", (1,), (1,), out)
    assert out[0] == 5


@TARGETS
def test_calls_are_inlined(target):
    function = """.func (.param .b32 result) square_plus(.param .b32 a, .param .b32 b) { .reg .b32 %r<8>;
    .reg .pred %p<2>;
    ld.param.u32 %r1, [a]; ld.param.u32 %r2, [b]; setp.gt.u32 %p1, %r1, 9; @%p1 bra BIG; mul.lo.s32 %r1, %r1, %r1;
    BIG: add.s32 %r3, %r1, %r2; st.param.b32 [result+0], %r3; ret; }"""
    calls = "".join(f"""{{ .param .b32 param0; st.param.b32 [param0+0], %r{a}; .param .b32 param1;
    st.param.b32 [param1+0], {b};
    .param .b32 retval0; call.uni (retval0), square_plus, (param0, param1); ld.param.b32 %r{to}, [retval0+0]; }}"""
                    for a, b, to in ((1, 5, 2), (2, 7, 9)))
    got = warp(calls, target=target, variables=function)
    f = lambda a, b: np.where(a > 9, a, a * a) + b
    assert (got == f(f(LANES, 5), 7)).all()


@TARGETS
def test_calls_may_pass_parameters_of_one_name_in_several_sizes(target):
    function = """.func (.param .b{0} result) next{0}(.param .b{0} a) {{ .reg .b64 %rd<3>; .reg .b32 %r<3>;
    ld.param.b{0} %{1}1, [a]; add.s{0} %{1}2, %{1}1, 1; st.param.b{0} [result+0], %{1}2; ret; }}"""
    call = """{{ .param .b{0} param0; st.param.b{0} [param0+0], {1}; .param .b{0} retval0;
    call.uni (retval0), next{0}, (param0); ld.param.b{0} {1}, [retval0+0]; }}"""
    lines = (f"{call.format(32, '%r1')} cvt.u64.u32 %rd3, %r1; {call.format(64, '%rd3')} "
             "cvt.u32.u64 %r9, %rd3; sub.s32 %r1, %r1, 1;")
    got = warp(lines, target=target, variables=function.format(32, "r") + function.format(64, "rd"))
    assert (got == LANES + 2).all()


def test_printing(capsys):
    """Text, numbers of every size and percent signs, by the lanes that are there, in their order."""
    text = r"%s: %d, %llu, %5.2f %% %c%x" + "\n"
    constants = f".const .align 1 .b8 form[{len(text) + 1}] = {{{', '.join(map(str, text.encode()))}}};\n" \
                ".const .align 1 .b8 name[6] = {108, 97, 110, 101, 37};\n.local .align 8 .b8 values[48];"
    warp("""setp.ne.u32 %p1, %r1, 3; setp.ne.u32 %p2, %r1, 21; and.pred %p1, %p1, %p2; @%p1 bra END;
    mov.u64 %rd3, name; mov.u64 %rd4, form; mov.u64 %rd5, values; st.local.u64 [%rd5], %rd3; neg.s32 %r2, %r1;
    st.local.u32 [%rd5+8], %r2; mov.u64 %rd6, -1; st.local.u64 [%rd5+16], %rd6; cvt.rn.f64.s32 %fd1, %r2;
    st.local.f64 [%rd5+24], %fd1; mov.u32 %r3, 65; st.local.u32 [%rd5+32], %r3; st.local.u32 [%rd5+36], %r2;
    { .param .b64 param0; st.param.b64 [param0+0], %rd4; .param .b64 param1; st.param.b64 [param1+0], %rd5;
    .param .b32 retval0; call.uni (retval0), vprintf, (param0, param1); ld.param.b32 %r8, [retval0+0]; }
    st.global.u32 [%rd1], %r8; END: mov.u32 %r9, 0;""", variables=constants)
    assert capsys.readouterr().out == "lane%: -3, 18446744073709551615, -3.00 % Afffffffd\n" \
                                      "lane%: -21, 18446744073709551615, -21.00 % Affffffeb\n"


def test_inline_assembly_has_its_own_registers():
    lines = "{ .reg .b32 t; add.u32 t, %in0, 1; { .reg .b32 t; mov.u32 t, 50; } mul.lo.u32 %out, t, 2; }"
    x = np.arange(32, dtype=np.uint32)
    assert (elementwise(lines, ("u32",), "u32", (x,), False) == (x + 1) * 2).all()


def test_a_trap_is_a_fault_that_names_the_kernel_and_ends_the_list():
    out = np.zeros(32, np.uint32)
    kernel = native.NativeKernel(module("mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 3; @%p1 trap;", []))
    after = native.NativeKernel(module(f"{START} st.global.u32 [%rd1], 1;", ["u64", "u64"]))
    launches = [kernel.prepare((5,), (32,), b""), after.prepare((1,), (32,), out.ctypes.data.to_bytes(8, "little") * 2)]
    with pytest.raises(native.KernelFault, match="k stopped at a trap"):
        native.execute(launches)
    assert not out.any()
    native.execute(launches[1:])
    assert out[0] == 1


def test_a_launch_that_stands_twice_runs_twice():
    count = np.zeros(1, np.uint32)
    kernel = native.NativeKernel(module("ld.param.u64 %rd1, [p0]; red.global.add.u32 [%rd1], 1;", ["u64"]))
    run = kernel.prepare((2,), (32,), count.ctypes.data.to_bytes(8, "little"))
    native.execute([run, run, run])
    assert count[0] == 3 * 64


# ---- what is refused ----

@pytest.mark.parametrize("line", [
    "frobnicate.u32 %r1, %r2;", "add.rn.ftz.f16 %h1, %h2, %h3;", "mul.hi.f32 %f1, %f2, %f3;", "ld.tex.u32 %r1, [%rd1];",
    "mov.u32 %r1, %mystery;", "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%f1}, {%f2}, {%f3}, {%f4};",
    "cvt.f32.u64 %f1, %rd1;", "add.cc.f32 %f1, %f2, %f3;", "bar.red.popc.u32 %r1, 1, 64, %p1;",
        "dp4a.s32.u8 %r1, %r2, %r3, %r4;",
    "shfl.up.b32 %r1, %r2, %r3, %r4;", "atom.global.add.v2.f32 %f1, [%rd1], %f2;",
    "tex.1d.v4.f32.s32 {%f1}, [%rd1, {%r1}];",
    "call.uni unknown, ();", "setp.approximately.f32 %p1, %f1, %f2;", "wmma.load.a.sync %r1, [%rd1];"])
def test_unknown_things_are_refused_by_name_and_line(line):
    with pytest.raises(Unsupported) as refusal:
        translate(module(line, []), (32, 1, 1), native.host())
    assert line.split(".")[0].split()[0] in str(refusal.value) and "line 7" in str(refusal.value)


@pytest.mark.parametrize("line, why", [
    ("call.uni (result), cudaCGGetIntrinsicHandle, (result);", "a grid that synchronizes"),
    ("call.uni itself, ();", "recursion"), ("call.uni %rd1, ();", "unknown"),
    ("brx.idx 5;", "unknown form"), ("ld.param.u32 %r1;", ""), (".reg .b32;", "unknown form"), ("@ bra END;", ""),
    ("mov.u32 %r1, [%r2 + %r3 + 4];", "unknown form"), ("st.param.b32 [result+0];", "unknown form")])
def test_what_cannot_be_read_is_refused_with_its_line(line, why):
    function = ".func itself() {\n.loc 1 7 0\ncall.uni itself, (); ret; }" if "itself" in line else ""
    with pytest.raises(Unsupported, match=f"line 7.*{why}"):
        translate(module(f".param .b32 result; {line}", [], variables=function), (32, 1, 1), native.host())


def test_lines_of_inlined_library_code_are_those_of_the_kernel():
    body = ".loc 2 4569 1, function_name $L__info_string0, inlined_at 1 9 1\n.loc 1 0 1\nfrobnicate.u32 %r1, %r2;"
    with pytest.raises(Unsupported, match="line 9"):
        translate(module(body, []), (32, 1, 1), native.host())


# ---- other machines, the cache ----

def test_compiles_for_arm():
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    arm = Target("aarch64-unknown-linux-gnu", "generic", "+neon", False, False, False, False)
    body = f"""{START} mul.lo.s32 %r2, %r1, %r1; shl.b32 %r3, %r2, 2; cvt.u64.u32 %rd3, %r3; add.s64 %rd4, %rd2, %rd3;
    ld.global.u32 %r4, [%rd4]; dp4a.s32.s32 %r5, %r4, %r2, %r1; shfl.sync.idx.b32 %r6, %r5, %r4, 31, -1; bar.sync 0;
    fma.rn.f16x2 %r7, %r6, %r5, %r4; atom.global.add.u32 %r8, [%rd1], %r7;"""
    translated = translate(module(body, ["u64", "u64"]), (64, 1, 1), arm)
    assert native.compile_object(translated.ir, arm)[:4] == b"\x7fELF"
    assert native.compile_object(native._runtime_ir(arm), arm)[18] == 183      # EM_AARCH64


def test_machine_code_is_kept_on_disk(tmp_path, monkeypatch):
    body = "ld.param.u64 %rd1, [p0]; mov.u32 %r1, %tid.x; mad.wide.u32 %rd2, %r1, 4, %rd1; st.global.u32 [%rd2], %r1;"
    ptx, out = module(body, ["u64"]), np.zeros(32, np.uint32)
    native.NativeKernel(ptx, tmp_path).code((32,))
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(native, "translate", None)
    kernel = native.NativeKernel(ptx, tmp_path)
    native.execute([kernel.prepare((1,), (32,), out.ctypes.data.to_bytes(8, "little"))])
    assert (out == LANES).all()


def test_machine_code_is_of_the_sources_that_made_it(tmp_path, monkeypatch):
    """A change of the runtime's template or of a translating file gives the files on disk other names; one of a file
    that writes no code does not."""
    package = shutil.copytree(Path(native.__file__).parent, tmp_path / "emulated")
    monkeypatch.setattr(native, "__file__", str(package / "native.py"))

    def version():
        return native._version.__wrapped__(native.Translator)

    for name, counts in (("runtime.ll", True), ("memory.py", True), ("card.py", False)):
        before = version()
        assert version() == before
        (package / name).write_text((package / name).read_text() + "\n")
        assert (version() != before) == counts, name


def test_every_pattern_of_a_large_warp_count_is_exact():
    """Random chains of integer instructions on the thread number agree with Python: the lane analysis is never
    wrong."""
    random = np.random.default_rng(1)
    for _ in range(60):
        lines, value = ["mov.u32 %r2, %r1;"], np.arange(256, dtype=np.uint64)
        for _ in range(int(random.integers(2, 8))):
            name = str(random.choice(["add", "sub", "mul.lo", "and", "or", "xor", "shl", "shr", "shr.s"]))
            c = int(random.choice([1, 2, 3, 5, 16, 31, 32, 0xFFFFFFFE, 0xFFFFFFE0, 7, 63])) if "sh" not in name else \
                int(random.integers(0, 9))
            kind = {"and": "b32", "or": "b32", "xor": "b32", "shl": "b32", "shr.s": "s32"}.get(name, "u32")
            lines.append(f"{re.sub('[.]s$', '', name)}.{kind} %r2, %r2, {c};")
            value = {"add": lambda v: v + c, "sub": lambda v: v - c, "mul.lo": lambda v: v * c, "and": lambda v: v & c,
                     "or": lambda v: v | c, "xor": lambda v: v ^ c, "shl": lambda v: v << c, "shr": lambda v: v >> c,
                     "shr.s": lambda v: (v.astype(np.uint32).view(np.int32) >> c).view(np.uint32).astype(np.uint64),
                     }[name](value.astype(np.uint64) if name != "sub" else value + np.uint64(1 << 32))
            value = value & np.uint64(0xFFFFFFFF)
            # Each step in a register of its own: several definitions of one would be joined to a vector.
            lines[-1] = lines[-1].replace("%r2", f"%r{len(lines) + 10}", 1).replace("%r2", f"%r{len(lines) + 9}")
        lines[0] = "mov.u32 %r11, %r1;"
        last = f"%r{len(lines) + 10}"
        for shape in ((256,), (16, 16), (8, 32)):
            first = f"mov.u32 %r3, %tid.y; mad.lo.s32 %r1, %r3, {shape[0]}, %r1;" if len(shape) > 1 else ""
            got = warp(f"{first} {' '.join(lines)} mov.u32 %r9, {last};", block=shape)
            assert (got == value).all(), (lines, shape)


@TARGETS
@pytest.mark.parametrize("below", [0, 16, 32])
def test_lanes_that_part_in_a_loop_meet_at_its_head(below, target):
    """The loop is left only at its head, to which lanes go back from two places."""
    body = f"""ld.param.u64 %rd1, [p0]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;
    ld.global.u32 %r4, [%rd1]; mov.u32 %r2, 0; mov.u32 %r3, 0;
    HEAD: setp.eq.u32 %p1, %r2, 5; @%p1 bra END; add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r4, {below}; @%p2 bra HEAD;
    add.u32 %r3, %r3, 1; bra.uni HEAD;
    END: st.global.u32 [%rd1], %r3;"""
    out = np.arange(32, dtype=np.uint32)
    launch(module(body, ["u64"]), (1,), (32,), out, target=target())
    assert (out == np.where(np.arange(32) < below, 0, 5)).all()
