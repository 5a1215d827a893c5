"""Products of matrices by a whole warp, against NumPy: how elements lie over lanes, sums, and what is refused."""

import numpy as np
import pytest
from numba import cuda, float32, int32
from numba.types import uint32

from kernels import intrinsics
from kernels.card import CardError
from kernels.emulated import native
from kernels.emulated.native import KernelFault
from kernels.open import open_cards
from tests.emulated.ptx_runner import launch, module

LANE = np.arange(32)
G, T = LANE // 4, LANE % 4
BYTES = {"m16n8k32": (16, 32), "m16n8k16": (16, 16), "m8n8k16": (8, 16)}       # rows and depth
INTRINSICS = {"m16n8k32": intrinsics.mma_s8_16x8x32, "m16n8k16": intrinsics.mma_s8_16x8x16,
              "m8n8k16": intrinsics.mma_s8_8x8x16}
OLDEST = {"m16n8k32": (8, 0), "m16n8k16": (8, 0), "m8n8k16": (7, 5)}
EVERY_TARGET = pytest.mark.parametrize("target", native.TARGETS, ids=lambda target: target.__name__)
EVERY_FORM = pytest.mark.parametrize("form", BYTES)


def words_of_lanes(matrix, rows):
    """int8 [rows, k] of which lane 4 g + t holds bytes 16 h + 4 t .. + 3 of row g + 8 i -> uint32 [2 h + i, 32]."""
    words = np.ascontiguousarray(matrix).view(np.uint32)
    return np.stack([words[G + 8 * i, 4 * h + T] for h in range(words.shape[1] // 4) for i in range(rows // 8)])


def numbers_of_lanes(matrix):
    """[rows, 8] -> [2 i + j, 32]."""
    return np.stack([matrix[G + 8 * i, 2 * T + j] for i in range(len(matrix) // 8) for j in range(2)])


def random_bytes(rng, rows, depth):
    """(a, b, c, a . b^T + c), with c as large as int32 and the largest magnitudes among a and b."""
    a, b = (rng.choice([-128, 127, *rng.integers(-128, 128, 6)], (n, depth)).astype(np.int8) for n in (rows, 8))
    c = rng.integers(-2**31, 2**31, (rows, 8)).astype(np.int32)
    return a, b, c, (c + a.astype(np.int64) @ b.astype(np.int64).T).astype(np.int32)


def run_ptx(opcode, float_sums, a, b, c, target=None, before=""):
    """The result of an mma on the words of all lanes, [registers, 32] each."""
    r, mov = ("f", "f32") if float_sums else ("r", "b32")
    n = len(a) + len(b)
    body = ["mov.u32 %r0, %tid.x;", *(f"ld.param.u64 %rd{i}, [p{i}];" for i in range(2)),
            *(f"mad.wide.u32 %rd{i + 2}, %r0, 4, %rd{i};" for i in range(2)), before]
    body += [f"ld.global.b32 %r{10 + i}, [%rd3+{128 * i}];" for i in range(n)]
    body += [f"ld.global.{mov} %{r}{16 + i}, [%rd3+{128 * (n + i)}];" for i in range(len(c))]
    packs = [", ".join(f"%{kind}{first + i}" for i in range(len(words))) for kind, first, words in
             ((r, 24, c), ("r", 10, a), ("r", 10 + len(a), b), (r, 16, c))]
    body += [f"mma.sync.aligned.{opcode} " + ", ".join(f"{{{pack}}}" for pack in packs) + ";"]
    body += [f"st.global.{mov} [%rd2+{128 * i}], %{r}{24 + i};" for i in range(len(c))] + ["past:"]
    out = np.zeros(c.shape, c.dtype)
    held = np.concatenate([words.view(np.uint32) for words in (a, b, c)])
    launch(module("\n".join(body), ["u64"] * 2), (1,), (32,), out, held, target=target and target())
    return out


@EVERY_FORM
@EVERY_TARGET
def test_products_of_bytes(form, target):
    rng, (rows, depth) = np.random.default_rng(0), BYTES[form]
    for _ in range(5):
        a, b, c, want = random_bytes(rng, rows, depth)
        got = run_ptx(f"{form}.row.col.s32.s8.s8.s32", False, words_of_lanes(a, rows), words_of_lanes(b, 8),
                      numbers_of_lanes(c), target)
        np.testing.assert_array_equal(got, numbers_of_lanes(want))


def kernel_of(product, n_a, n_b, n_c, kind):
    """Loads the words of all lanes, multiplies and stores."""
    @cuda.jit
    def multiply(out, a, b, c):
        lane = uint32(cuda.threadIdx.x)
        if n_a == 4:
            left = a[lane], a[uint32(32 + lane)], a[uint32(64 + lane)], a[uint32(96 + lane)]
        elif n_a == 2:
            left = a[lane], a[uint32(32 + lane)]
        else:
            left = a[lane],
        right = (b[lane], b[uint32(32 + lane)]) if n_b == 2 else (b[lane],)
        if n_c == 8:
            total = product(left, right, (c[lane], c[uint32(32 + lane)], c[uint32(64 + lane)], c[uint32(96 + lane)],
                                          c[uint32(128 + lane)], c[uint32(160 + lane)], c[uint32(192 + lane)],
                                          c[uint32(224 + lane)]))
        elif n_c == 4:
            total = product(left, right, (c[lane], c[uint32(32 + lane)], c[uint32(64 + lane)], c[uint32(96 + lane)]))
        else:
            total = product(left, right, (c[lane], c[uint32(32 + lane)]))
        for i in range(n_c):
            out[uint32(32 * i + lane)] = kind(total[i])

    return multiply


def run_intrinsic(card, product, kind, a, b, c):
    out = card.alloc(c.size, c.dtype)
    card.poison(out)
    card.launch(kernel_of(product, len(a), len(b), len(c), kind), 1, 32, out, *(card.upload(x.reshape(-1)) for x in
                                                                                 (a, b, c)))
    return card.download(out).reshape(c.shape)


@EVERY_FORM
def test_the_intrinsics_of_bytes(card, form):
    if card.kind != "emulated" and card.cc < OLDEST[form]:
        pytest.skip(f"{card.name} has no {form} of int8")
    rows, depth = BYTES[form]
    a, b, c, want = random_bytes(np.random.default_rng(1), rows, depth)
    held = words_of_lanes(a, rows), words_of_lanes(b, 8), numbers_of_lanes(c)
    got = run_intrinsic(card, INTRINSICS[form], int32, *held)
    np.testing.assert_array_equal(got, numbers_of_lanes(want))


# ---- halves --------------------------------------------------------------------------------------------------------

U, Q, P = LANE // 16, LANE % 16 // 4, LANE % 4
HALVES = "m8n8k4.row.col.f32.f16.f16.f32"


def halves_of_lanes(matrices):
    """[4, 8, 4] of integers -> the half2 words that each lane holds of its row, [2, 32]."""
    return np.ascontiguousarray(matrices[Q, 4 * U + P].astype(np.float16)).view(np.uint32).T.copy()


def sums_of_lanes(matrices):
    """[4, 8, 8] -> float32 [8, 32]."""
    return np.stack([matrices[Q, 4 * U + P % 2 + 2 * d, 4 * e + P // 2 * 2 + j]
                     for e in range(2) for d in range(2) for j in range(2)]).astype(np.float32)


def random_halves(rng):
    """(a, b, c, a . b^T + c): integers of up to 127, and sums of blocks before this one."""
    a, b = (rng.integers(-127, 128, (4, 8, 4)) for _ in range(2))
    c = rng.integers(-28 * 127**2, 28 * 127**2, (4, 8, 8))
    return a, b, c, a @ b.transpose(0, 2, 1) + c


@EVERY_TARGET
def test_products_of_halves(target):
    rng = np.random.default_rng(2)
    for _ in range(5):
        a, b, c, want = random_halves(rng)
        got = run_ptx(HALVES, True, halves_of_lanes(a), halves_of_lanes(b), sums_of_lanes(c), target)
        np.testing.assert_array_equal(got, sums_of_lanes(want))


def test_the_intrinsic_of_halves(card):
    if card.kind != "emulated" and card.cc < (7, 0):
        pytest.skip(f"{card.name} has no mma of halves")
    a, b, c, want = random_halves(np.random.default_rng(3))
    held = halves_of_lanes(a), halves_of_lanes(b), sums_of_lanes(c)
    got = run_intrinsic(card, intrinsics.mma_f16_8x8x4, float32, *held)
    np.testing.assert_array_equal(got, sums_of_lanes(want))


@pytest.mark.parametrize("which, value", [("c", 0.5), ("c", 2.0**24 - 1), ("c", np.nan), ("c", -np.inf), ("a", 0.25),
                                          ("b", np.inf), ("b", 65504)])
def test_sums_that_depend_on_their_order_stop_the_kernel(which, value):
    a, b, c = np.ones((4, 8, 4)), np.full((4, 8, 4), 100.0), np.zeros((4, 8, 8))
    a[2, 5], b[2, 3] = 127, 127
    run_ptx(HALVES, True, halves_of_lanes(a), halves_of_lanes(b), sums_of_lanes(c))
    {"a": a, "b": b, "c": c}[which][2, 5 if which != "b" else 3, 3] = value
    if which == "b":
        a[2, 5] = 2048
    with np.errstate(over="ignore"), pytest.raises(KernelFault):
        run_ptx(HALVES, True, halves_of_lanes(a), halves_of_lanes(b), sums_of_lanes(c))


def test_all_lanes_take_part():
    a, b, c, _ = random_bytes(np.random.default_rng(4), 8, 16)
    held = words_of_lanes(a, 8), words_of_lanes(b, 8), numbers_of_lanes(c)
    with pytest.raises(KernelFault):
        run_ptx("m8n8k16.row.col.s32.s8.s8.s32", False, *held, before="setp.eq.u32 %p1, %r0, 5; @%p1 bra past;")


@pytest.mark.parametrize("form, multiply_adds", [("m16n8k32", 2048), ("m16n8k16", 1024), ("m8n8k16", 512)])
def test_products_are_counted(form, multiply_adds):
    """Each is one instruction, and two multiply-adds of int8 take as long as one of halves."""
    card, (rows, depth) = open_cards("emulated")[0], BYTES[form]
    a, b, c, _ = random_bytes(np.random.default_rng(6), rows, depth)
    with card.counting() as log:
        held = words_of_lanes(a, rows), words_of_lanes(b, 8), numbers_of_lanes(c)
        run_intrinsic(card, INTRINSICS[form], int32, *held)
    assert (log[0].counts.tensor, log[0].counts.multiply_adds) == (1, multiply_adds)


def test_a_card_breaks_where_a_sum_is_not_exact():
    card = open_cards("emulated")[0]
    a, b, c, _ = random_halves(np.random.default_rng(5))
    with pytest.raises(CardError):
        run_intrinsic(card, intrinsics.mma_f16_8x8x4, float32, halves_of_lanes(a), halves_of_lanes(b),
                      sums_of_lanes(c + 0.5))
        card.synchronize()
