"""Products on tensor cores have the bits of those on dp4a (kernels/q8_gemm.py)."""

import itertools
import re
from types import SimpleNamespace

import pytest

from kernels import assembler
from kernels import compile as compiler
from kernels import q8_gemm, tensor_gemm
from kernels.card import LaunchError
from kernels.formats import FORMATS
from kernels.intrinsics import wait_for_copies
from kernels.open import open_cards
from tests.kinds import FIRST

EVERY_SHAPE = pytest.mark.parametrize("shape", tensor_gemm.SHAPES.values(), ids=tensor_gemm.SHAPES)
SMALL = tensor_gemm.SHAPES["32 x 128"]


@pytest.fixture
def one_tile(monkeypatch):
    """q8_gemm compiles one kernel for each format."""
    monkeypatch.setattr(q8_gemm, "TILES", {8: q8_gemm.TILES[8]})


@EVERY_SHAPE
@pytest.mark.parametrize("case", q8_gemm.CASES, ids=str)
def test_bits_are_those_of_dp4a(card, case, shape, one_tile):
    if not tensor_gemm.instruction_of(card):
        pytest.skip(f"{card.name} has no tensor cores")
    for add in False, True:
        tensor_gemm.check(card, *case, add, shape=shape)


def formats_with_instructions():
    """(format, instruction): Q8_0 with all, and the first of each kind with m8n8k4, which has a form of its own, and
    one of the others by turns. The rest are slow tests."""
    others = [name for name in tensor_gemm.INSTRUCTIONS if name != "m8n8k4"]
    chosen = {*itertools.product(["Q8_0"], others), *itertools.product(["Q8_0", *FIRST.values()], ["m8n8k4"]),
              *zip(FIRST.values(), itertools.cycle(others))}
    for pair in itertools.product(FORMATS, tensor_gemm.INSTRUCTIONS):
        yield pair if pair in chosen else pytest.param(*pair, marks=pytest.mark.slow)


@pytest.mark.parametrize("name, instruction", [*formats_with_instructions()])
def test_bits_of_every_format_are_those_of_dp4a(card, name, instruction, one_tile):
    oldest, _ = tensor_gemm.INSTRUCTIONS[instruction]
    if card.kind != "emulated" and not (card.cc >= oldest and (instruction != "m8n8k4" or card.cc == oldest)):
        pytest.skip(f"{card.name} has no {instruction}, or a slow one")
    format = FORMATS[name]
    for n, blocks, rows in q8_gemm.FORMAT_CASES:
        tensor_gemm.check(card, n, blocks * format.file_block, rows, rows > 1, SMALL, format, instruction)


@pytest.mark.parametrize("name, instruction", [("Q8_0", "m16n8k32"), ("Q2_K", "m16n8k32"), ("Q4_K", "m8n8k4")])
def test_neither_memory_error_nor_race(name, instruction, one_tile):
    """Five blocks of k or more, so both buffers in shared memory are used again."""
    card, format = open_cards("emulated", checked=True)[0], FORMATS[name]
    k, rows = max(160, format.file_block), SMALL.tile_rows + 1
    tensor_gemm.check(card, 130, k, rows, shape=SMALL, format=format, instruction=instruction)


def test_a_wait_for_too_few_copies_is_found(one_tile, monkeypatch):
    """The kernel with a wait that leaves one more group of copies on its way. The bits are right here all the same,
    since the emulated card makes copies at once."""
    monkeypatch.setattr(tensor_gemm, "wait_for_copies", lambda n: wait_for_copies(n + 1))
    monkeypatch.setattr(tensor_gemm, "tensor", tensor_gemm.tensor_kernel)
    card = open_cards("emulated", checked=True)[0]
    with pytest.raises(LaunchError, match="a race with a copy of thread"):
        tensor_gemm.check(card, 130, 160, SMALL.tile_rows, shape=SMALL, instruction="m16n8k32")


ARCHITECTURES = {(7, 0): "m8n8k4", (7, 5): "m8n8k16", (8, 0): "m16n8k32", (9, 0): "m16n8k32 mixed"}


@pytest.mark.parametrize("cc, tile", [(cc, tile) for cc, instruction in ARCHITECTURES.items()
                                      for tile in tensor_gemm.shapes_of(instruction)], ids=str)
@pytest.mark.parametrize("name", ["Q8_0", *(pytest.param(name, marks=pytest.mark.slow) for name in FIRST.values())])
def test_everything_stays_in_registers(name, tile, cc):
    if cc not in compiler.supported_ccs() or not assembler.find_assembler():
        pytest.skip(f"the installed CUDA toolkit cannot compile for {cc}")
    format, instruction = FORMATS[name], ARCHITECTURES[cc]
    bits = "int8[1]" if format.bits == 8 else "uint8[1]"
    signature = "float32[1]", bits, "uint16[1]", "int8[1]", "float32[1]", *["uint32"] * 4, "bool"
    kernel = tensor_gemm.tensor(format, tensor_gemm.SHAPES[tile], instruction)
    compiled = compiler.compile_kernel(kernel, signature, cc)
    _, words = assembler.run_assembler(assembler.find_assembler()[0], compiled, cc)
    assert ".local" not in compiled.ptx and " 0 bytes spill stores" in words, words
    family = instruction.split()[0].rstrip("0123456789")           # two dots for a block are of 16 of k each
    assert re.search(rf"\bmma\.sync\.aligned\.{family}\d+\.row\.col\b", compiled.ptx)


def test_tiles_fill_the_card():
    """Few rows get small tiles: tiles of 128 rows would leave SMs idle."""
    card = SimpleNamespace(n_sms=132, kind="cuda", cc=(9, 0))
    chosen = [tensor_gemm.shape_for(card, 4096, rows, FORMATS["Q8_0"]).tile_rows for rows in (4096, 160, 8)]
    assert chosen == [128, 64, 32]
    chosen = [tensor_gemm.shape_for(card, 4096, rows, FORMATS["Q8_0"], concurrent=True).tile_rows
              for rows in (128, 60, 8)]
    assert chosen == [128, 64, 32]


@pytest.mark.parametrize("n_sms, cc", [(132, (9, 0)), (80, (7, 0)), (40, (7, 5))], ids=str)
@pytest.mark.parametrize("n", [1024, 4096, 12288, 24576])
def test_choices_of_tiles_are_sensible(n, n_sms, cc):
    """The more rows, the higher the tile, until tiles of 128 rows fill the card. No tile that the card has takes less
    time than the chosen one."""
    card, q8_0 = SimpleNamespace(n_sms=n_sms, kind="cuda", cc=cc), FORMATS["Q8_0"]
    able = [tensor_gemm.SHAPES[name] for name in tensor_gemm.shapes_of(tensor_gemm.instruction_of(card))]
    for concurrent, time in (False, tensor_gemm.tile_time), (True, tensor_gemm.tile_work):
        heights = []
        for rows in 1, 32, 64, 128, 256, 512, 2048, 8192:
            chosen = tensor_gemm.shape_for(card, n, rows, q8_0, concurrent)
            assert chosen in able
            assert time(card, n, rows, chosen) == min(time(card, n, rows, shape) for shape in able)
            heights.append(chosen.tile_rows)
        assert heights[0] == 32 and heights[-1] == 128
        if concurrent:                      # by the work alone, rounds of blocks do not matter
            assert heights == sorted(heights)


def test_times_of_tiles_grow_with_them():
    """But a weight of a row takes less time in a higher tile, and a block that shares an SM less than one alone."""
    for name in tensor_gemm.INSTRUCTIONS:
        shapes = sorted((tensor_gemm.SHAPES[shape] for shape in tensor_gemm.shapes_of(name)), key=lambda s: s.tile_rows)
        for low, high in zip(shapes, shapes[1:]):
            for i in range(2):
                assert 1 < tensor_gemm.TIMES[high][i] / tensor_gemm.TIMES[low][i] < high.tile_rows / low.tile_rows
        assert all(further < alone for alone, further in (tensor_gemm.TIMES[shape] for shape in shapes))


def test_relative_time_counts_rows_and_columns():
    card = SimpleNamespace(n_sms=132, kind="cuda", cc=(9, 0))
    times = [tensor_gemm.relative_time(card, 4096, 4096, rows) for rows in ([8], [2048], [4096], [2048, 2048])]
    assert times[0] < times[1] < times[3] <= times[2] < 2 * times[1]
    assert 1 < q8_gemm.relative_time(card, 12288, 4096, [4096]) / tensor_gemm.relative_time(card, 12288, 4096, [4096])
