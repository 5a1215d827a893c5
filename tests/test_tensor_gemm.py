"""Products on tensor cores have the bits of those on dp4a (kernels/q8_gemm.py)."""

import re

import pytest

from kernels import assembler
from kernels import compile as compiler
from kernels import q8_gemm, tensor_gemm
from kernels.formats import FORMATS
from kernels.open import open_cards
from tests.kinds import BY_KIND

EVERY_INSTRUCTION = pytest.mark.parametrize("instruction", tensor_gemm.INSTRUCTIONS)
EVERY_SHAPE = pytest.mark.parametrize("shape", tensor_gemm.SHAPES.values(), ids=tensor_gemm.SHAPES)
SMALL = tensor_gemm.SHAPES["32 x 128"]


@pytest.fixture
def tensor_card(card):
    if not tensor_gemm.instruction_of(card):
        pytest.skip(f"{card.name} has no tensor cores for int8")
    return card


@EVERY_SHAPE
@pytest.mark.parametrize("case", q8_gemm.CASES, ids=str)
def test_bits_are_those_of_dp4a(tensor_card, case, shape, one_tile):
    for add in False, True:
        tensor_gemm.check(tensor_card, *case, add, shape=shape)


@pytest.fixture
def one_tile(monkeypatch):
    """q8_gemm compiles one kernel for each format."""
    monkeypatch.setattr(q8_gemm, "TILES", {8: q8_gemm.TILES[8]})


@EVERY_INSTRUCTION
@pytest.mark.parametrize("name", FORMATS)
def test_bits_of_every_format_are_those_of_dp4a(tensor_card, name, instruction, one_tile):
    if tensor_card.kind != "emulated" and tensor_card.cc < tensor_gemm.INSTRUCTIONS[instruction]:
        pytest.skip(f"{tensor_card.name} has no {instruction} of int8")
    format = FORMATS[name]
    for n, blocks, rows in q8_gemm.FORMAT_CASES:
        tensor_gemm.check(tensor_card, n, blocks * format.file_block, rows, rows > 1, SMALL, format, instruction)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q2_K"])
def test_neither_memory_error_nor_race(name, one_tile):
    """Five blocks of k or more, so both buffers in shared memory are used again."""
    card, format = open_cards("emulated", checked=True)[0], FORMATS[name]
    tensor_gemm.check(card, 130, max(160, format.file_block), SMALL.tile_rows + 1, shape=SMALL, format=format)


ARCHITECTURES = {(7, 5): "m8n8k16", (8, 0): "m16n8k32", (9, 0): "m16n8k32"}


@pytest.mark.parametrize("cc", ARCHITECTURES, ids=str)
@EVERY_SHAPE
@pytest.mark.parametrize("name", BY_KIND)
def test_everything_stays_in_registers(name, shape, cc):
    if cc not in compiler.supported_ccs() or not assembler.find_assembler():
        pytest.skip(f"the installed CUDA toolkit cannot compile for {cc}")
    format = FORMATS[name]
    bits = "int8[1]" if format.bits == 8 else "uint8[1]"
    signature = "float32[1]", bits, "uint16[1]", "int8[1]", "float32[1]", *["uint32"] * 4, "bool"
    compiled = compiler.compile_kernel(tensor_gemm.tensor(format, shape, ARCHITECTURES[cc]), signature, cc)
    _, words = assembler.run_assembler(assembler.find_assembler()[0], compiled, cc)
    assert ".local" not in compiled.ptx and " 0 bytes spill stores" in words, words
    assert re.search(r"\bmma\.sync\.aligned\.m(16n8k(32|16)|8n8k16)\.row\.col\.s32\.s8\.s8\.s32\b", compiled.ptx)
