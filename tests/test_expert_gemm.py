"""Products of prompts with experts, and the sum of their results."""

import itertools

import numpy as np
import pytest

from kernels import assembler, expert_gemm, formats, q8_gemm, tensor_gemm
from kernels import compile as compiler
from kernels.expert_gemm import Tiles
from kernels.formats import FLOATS, FORMATS
from kernels.open import open_cards
from kernels.operands import Matrix, Quantized
from kernels.q8_gemv import random_activations
from kernels.records import Choice, Groups
from kernels.tensor_gemm import INSTRUCTIONS
from tests.kinds import BY_KIND, BY_KIND_IF_EMULATED, FIRST

KINDS = [kind.dtype for kind in FLOATS.values()]


@pytest.fixture(params=expert_gemm.HEIGHTS, ids="tiles of {} rows".format)
def one_shape(request, monkeypatch):
    """expert_gemm has no other tile to choose from."""
    monkeypatch.setattr(expert_gemm, "HEIGHTS", (request.param,))


@pytest.mark.parametrize("from_pairs", [False, True])
@pytest.mark.parametrize("case", expert_gemm.CASES, ids=str)
def test_within_the_rounding_bound(card, case, from_pairs, one_shape):
    expert_gemm.check(card, *case, from_pairs=from_pairs)


@pytest.mark.parametrize("name", BY_KIND_IF_EMULATED)
def test_every_format_is_within_the_rounding_bound(card, name, monkeypatch):
    monkeypatch.setattr(expert_gemm, "HEIGHTS", (16,))    # one kernel to compile for each
    format = FORMATS[name]
    for n, blocks, *rest in expert_gemm.FORMAT_CASES:
        expert_gemm.check(card, n, blocks * format.file_block, *rest, format=format)


def all_to(expert):
    """As `random_choice`, but all rows go to one expert."""
    return lambda rng, n_rows, n_used, n_experts: np.full((n_rows, n_used), expert, np.int32)


@pytest.mark.parametrize("expert", [0, 2])
def test_one_expert_may_have_all_rows(card, expert, one_shape):
    expert_gemm.check(card, 33, 96, 70, 1, 3, choose=all_to(expert))


def grouped_products(card, w, x, experts, tiles, from_pairs=False):
    """y [pairs, n] in sorted order, and the order."""
    groups, order = expert_gemm.upload_groups(card, experts, len(w.places), tiles.rows)
    y = card.alloc((experts.size, w.n), np.float32)
    card.poison(y)
    n_used = None if from_pairs else experts.shape[1]
    expert_gemm.expert_gemm(card, y, w.n, w, x, groups, experts.size, n_used, tiles=tiles)
    return card.download(y), order


def check_bits(card, format, tiles=None, n_rows=50):
    """Each row has the bits of `gemm` with that row and matrix, whatever the others are and wherever it lies."""
    rng, (n, k, rows, n_used, n_experts) = np.random.default_rng(5), (150, 512, n_rows, 2, 3)
    tiles = tiles or expert_gemm.tiles_for(rows * n_used, n_experts)
    home = Matrix(format.name, n_experts * n, k, *formats.on_card(
        card, format, formats.random_raw(rng, format, n_experts * n, k), n_experts * n, k))
    w = expert_gemm.place_experts(card, home, n, [1, 2, 0])
    xq, xd = random_activations(rng, rows, k)
    experts = expert_gemm.random_choice(rng, rows, n_used, n_experts)
    got, order = grouped_products(card, w, Quantized(card.upload(xq), card.upload(xd)), experts, tiles)
    source = order // n_used
    x = Quantized(card.upload(xq[source]), card.upload(xd[source]))
    np.testing.assert_array_equal(grouped_products(card, w, x, experts, tiles, from_pairs=True)[0], got)
    for expert, slot in enumerate([1, 2, 0]):
        here, y = experts.reshape(-1)[order] == expert, card.alloc((experts.size, n), np.float32)
        q8_gemm.gemm(card, y, n, w.slot(slot), x, experts.size)
        np.testing.assert_array_equal(got[here], card.download(y)[here])


def test_rows_have_the_bits_of_the_dense_product(card, one_shape):
    check_bits(card, FORMATS["Q8_0"])


@pytest.mark.parametrize("name", BY_KIND)
def test_rows_of_every_format_have_the_bits_of_the_dense_product(card, name, monkeypatch):
    monkeypatch.setattr(expert_gemm, "HEIGHTS", (16,))
    monkeypatch.setattr(q8_gemm, "TILES", {8: q8_gemm.TILES[8]})
    check_bits(card, FORMATS[name])


# ---- on tensor cores -------------------------------------------------------------------------------------------------

ARCHITECTURES = {(7, 0): "m8n8k4", (7, 5): "m8n8k16", (8, 0): "m16n8k32", (9, 0): "m16n8k32 mixed"}


def skip_without_tensor_cores(card, instruction):
    oldest, _ = INSTRUCTIONS[instruction]
    if card.kind != "emulated" and not (card.cc >= oldest and (instruction != "m8n8k4" or card.cc == oldest)):
        pytest.skip(f"{card.name} has no {instruction}, or a slow one")


def rows_of_experts(*counts):
    """As `random_choice`: as many rows as stand there go to each expert, in random order."""
    return lambda rng, n_rows, n_used, n_experts: rng.permutation(
        np.repeat(np.arange(n_experts), counts)).astype(np.int32).reshape(n_rows, n_used)


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_tensor_cores_have_the_bits_of_dp4a(card, instruction, monkeypatch):
    """Tiles with every number of sixteens, full or not, and experts without rows."""
    skip_without_tensor_cores(card, instruction)
    monkeypatch.setattr(q8_gemm, "TILES", {8: q8_gemm.TILES[8]})
    tiles = expert_gemm.tiles_for(1, 1, instruction)
    check_bits(card, FORMATS["Q8_0"], tiles, 150)
    counts = 1, 0, 15, 16, 17, 33, 64, 65, 113, 0
    for from_pairs in False, True:
        expert_gemm.check(card, 33, 96, sum(counts), 1, len(counts), from_pairs=from_pairs, tiles=tiles,
                          choose=rows_of_experts(*counts))
        expert_gemm.check(card, 257, 320, 30, 2, 4, from_pairs=from_pairs, tiles=tiles)


@pytest.mark.parametrize("name", BY_KIND)
def test_tensor_cores_have_the_bits_of_dp4a_in_every_format(card, name, monkeypatch):
    instruction = tensor_gemm.instruction_of(card)
    if not instruction:
        pytest.skip(f"{card.name} has no tensor cores")
    monkeypatch.setattr(q8_gemm, "TILES", {8: q8_gemm.TILES[8]})
    tiles = expert_gemm.tiles_for(1, 1, instruction)
    check_bits(card, FORMATS[name], tiles)
    for n, blocks, *rest in expert_gemm.FORMAT_CASES:
        expert_gemm.check(card, n, blocks * FORMATS[name].file_block, *rest, format=FORMATS[name], tiles=tiles)


@pytest.mark.parametrize("cc", ARCHITECTURES, ids=str)
@pytest.mark.parametrize("name", ["Q8_0", *(pytest.param(name, marks=pytest.mark.slow) for name in FIRST.values())])
def test_everything_on_tensor_cores_stays_in_registers(name, cc):
    check_registers(expert_gemm.grouped_tensor(FORMATS[name], ARCHITECTURES[cc]), FORMATS[name], cc)


# ---- floats, and the sum ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("from_pairs", [False, True])
@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_floats_have_the_bits_of_the_dense_products(card, kind, decodes, from_pairs):
    for case in expert_gemm.CASES:
        expert_gemm.check_floats(card, case, kind, decodes, from_pairs)


@pytest.mark.parametrize("case", expert_gemm.COMBINED, ids=str)
def test_sum_has_the_bits_of_the_reference(card, case):
    expert_gemm.check_combine(card, *case)


def test_sum_takes_four_values_at_a_time(card):
    x = card.zeros((1, 6), np.float32)
    choice = Choice(card.zeros((1, 1), np.int32), card.zeros((1, 2), np.float32))
    with pytest.raises(ValueError, match="a multiple of 4 values, not 6"):
        expert_gemm.combine(card, x, x, choice, Groups(None, card.zeros(1, np.int32), None, None), None, 1)


def test_tiles_are_as_high_as_experts_have_rows():
    """35B-A3B: 8 of 256 experts."""
    heights = [expert_gemm.tiles_for(8 * rows, 256).rows for rows in range(1, 5000)]
    assert heights[297 - 1] == 16 and heights[600 - 1] == 32 and heights[4620 - 1] == 64
    assert heights == sorted(heights)


@pytest.mark.parametrize("name, tiles", [
    ("Q8_0", Tiles(64)), ("Q8_0", Tiles(16)), ("Q4_K", Tiles(16)), ("Q8_0", Tiles(64, "m16n8k32")),
    ("Q2_K", Tiles(64, "m16n8k32")), ("Q4_K", Tiles(64, "m8n8k4"))], ids=str)
def test_neither_memory_error_nor_race(name, tiles):
    """Five blocks of k or more, so all buffers in shared memory are used again. Some warps have no rows."""
    card, format = open_cards("emulated", checked=True)[0], FORMATS[name]
    expert_gemm.check(card, 130, max(160, format.file_block), 9, 2, 4, format=format, tiles=tiles)


def test_experts_of_floats_without_memory_error_or_race():
    card = open_cards("emulated", checked=True)[0]
    for decodes in False, True:
        expert_gemm.check_floats(card, (70, 77, 9, 2, 4), np.uint16, decodes)
    expert_gemm.check_combine(card, 5, 36, 2, True)


ENDS = min(expert_gemm.HEIGHTS), max(expert_gemm.HEIGHTS)


def check_registers(kernel, format, cc):
    """Arrays in local memory would mean that a loop over rows has not been unrolled."""
    if cc not in compiler.supported_ccs() or not assembler.find_assembler():
        pytest.skip(f"the installed CUDA toolkit cannot compile for {cc}")
    bits = "int8[1]" if format.bits == 8 else "uint8[1]"
    signature = ("float32[1]", bits, "uint16[1]", "int8[1]", "float32[1]", "uint64[1]", *["int32[1]"] * 3,
                 *["uint32"] * 4)
    compiled = compiler.compile_kernel(kernel, signature, cc)
    _, words = assembler.run_assembler(assembler.find_assembler()[0], compiled, cc)
    assert ".local" not in compiled.ptx and " 0 bytes spill stores" in words, words


@pytest.mark.parametrize("height, name", [
    (height, name) if name in ("Q8_0", *FIRST.values()) and (height in ENDS or name == "Q8_0")
    else pytest.param(height, name, marks=pytest.mark.slow)
    for height, name in itertools.product(expert_gemm.HEIGHTS, FORMATS)])
def test_everything_stays_in_registers(height, name):
    check_registers(expert_gemm.grouped(FORMATS[name], height), FORMATS[name], (7, 0))
