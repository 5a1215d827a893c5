"""Decode products of several columns on tensor cores have the bits of the others of their family."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

import qengine
from kernels import assembler, decode_tensor
from kernels import compile as compiler
from kernels.decode_tensor import SHAPES, check_swiglu, operands, poisoned, tensor_gemv
from kernels.emulated.card import EmulatedCard
from kernels.formats import FORMATS
from kernels.open import open_cards
from kernels.products import Products
from kernels.q8_gemv import gemv
from kernels.quant_gemv import decoder_of
from tests.kinds import BY_KIND, FIRST
from tests.test_reproducible import decode_logits

SMALL = SHAPES["64 x 8"]
HOPPER = 227 << 10      # bytes of shared memory of a block of threads


@pytest.fixture
def able(card, monkeypatch):
    """The card, if it has the instructions. An emulated one has; it gets the shared memory, too."""
    if card.kind == "emulated":
        monkeypatch.setattr(card, "max_shared", HOPPER)
    elif card.cc < decode_tensor.OLDEST:
        pytest.skip(f"{card.name} is older than sm_80, which has the first of these tensor cores")
    return card


def compare_with_gemv(card, format, n, k, columns, shape, converts=True):
    """Bit for bit with the kernels for few columns, which add to y, too, with numbers around each column."""
    w, x = operands(card, format, n, k, columns)
    y, want = poisoned(card, columns + 1, n + 3), poisoned(card, columns + 1, n + 3)
    for add in (False, True):
        tensor_gemv(card, y.reshape(-1)[1:], n + 3, w, x, columns, add, shape=shape, converts=converts)
        gemv(card, decoder_of(w), want.reshape(-1)[1:], n + 3, w, x, columns, add)
    np.testing.assert_array_equal(card.download(y).view(np.uint32), card.download(want).view(np.uint32))


@pytest.mark.parametrize("name", BY_KIND)
def test_every_format_has_the_bits_of_gemv(able, name):
    compare_with_gemv(able, FORMATS[name], 67, 1280, 11, SMALL)


@pytest.mark.parametrize("k", [256, 768, 1024, 2304])
def test_rows_of_few_stages(able, k):
    """Shorter than the ring, than the passes, and a whole number of passes; chains of several lengths."""
    compare_with_gemv(able, FORMATS["Q8_0"], 33, k, 8, SMALL)


@pytest.mark.parametrize("shape, name", [
    pytest.param("64 x 16", "Q8_0", marks=pytest.mark.slow), ("64 x 16", "Q4_K"), ("64 x 32", "Q8_0"),
    ("64 x 32", "Q4_K")])
def test_shapes_have_the_bits_of_gemv(able, name, shape):
    """Of a tile and a part of one, in both directions."""
    format, shape = FORMATS[name], SHAPES[shape]
    if decode_tensor.shared_bytes(format, shape) > able.max_shared:
        pytest.skip(f"{able.max_shared} bytes of shared memory on {able.name} are too few for {shape}")
    compare_with_gemv(able, format, shape.tile_rows + 3, 1280, shape.tile_columns + 3, shape)


def test_dots_that_start_at_their_bias(able):
    """As on sm_80, which converts integers slowly."""
    compare_with_gemv(able, FORMATS["Q8_0"], 40, 512, 11, SHAPES["64 x 16"], converts=False)


@pytest.mark.parametrize("name, n, k, columns", [("Q8_0", 96, 1280, 19), ("Q4_K", 32, 256, 3)])
def test_swiglu_has_the_bits_of_the_separate_kernels(able, name, n, k, columns):
    check_swiglu(able, FORMATS[name], n, k, columns, SHAPES["64 x 8"])


@pytest.mark.parametrize("name", ["Q8_0", "Q2_K"])
def test_neither_memory_error_nor_race(name):
    """More stages than buffers in shared memory, which are used again."""
    card = open_cards("emulated", checked=True)[0]
    card.max_shared = HOPPER
    compare_with_gemv(card, FORMATS[name], 40, 2560, 9, SMALL)


@pytest.mark.parametrize("name", ["Q8_0", pytest.param("Q2_K", marks=pytest.mark.slow)])
def test_swiglu_without_memory_error_or_race(name):
    card = open_cards("emulated", checked=True)[0]
    card.max_shared = HOPPER
    check_swiglu(card, FORMATS[name], 32, 512, 9, SMALL)


def test_logits_of_decode_steps(monkeypatch):
    """Of three answers together. The emulated card would not choose these kernels."""
    monkeypatch.setattr(Products, "takes", lambda self, w, columns, swiglu=False: (
        self.wish == "tensor" and columns > 1 and w.k % decode_tensor.STAGE == 0))
    launched, found = [], []
    for name in "tensor_gemv", "tensor_gemv_swiglu":
        launch = getattr(decode_tensor, name)
        monkeypatch.setattr(decode_tensor, name, lambda *each, launch=launch, name=name, **options: (
            launched.append(name), launch(*each, **options)))
    for wish in "dp4a", "tensor":
        assert not launched
        card = EmulatedCard()
        card.max_shared = HOPPER
        engine = qengine.load("synthetic:tiny", card=card, ctx=512, slots=4, progress=False, products=wish)
        found.append(decode_logits(engine, [[0, 1, 2]], 2))
        engine.close()
    np.testing.assert_array_equal(*found)
    assert set(launched) == {"tensor_gemv", "tensor_gemv_swiglu"} and found[0].std() > 0


@pytest.mark.parametrize("cc", [pytest.param((8, 0), marks=pytest.mark.slow), (9, 0)], ids=str)
@pytest.mark.parametrize("name", ["Q8_0", *(pytest.param(name, marks=pytest.mark.slow) for name in FIRST.values())])
def test_everything_stays_in_registers(name, cc):
    if cc not in compiler.supported_ccs() or not assembler.find_assembler():
        pytest.skip(f"the installed CUDA toolkit cannot compile for {cc}")
    format = FORMATS[name]
    w, x, n = ("int8[1]" if format.bits == 8 else "uint8[1]", "uint16[1]"), ("int8[1]", "float32[1]"), ["uint32"] * 3
    for shape in SHAPES.values():
        kernels = [(decode_tensor.tensor_kernel(format, shape, False, cc > (8, 0)), "float32[1]", "uint32", *w, *x, *n,
                    "bool"),
                   (decode_tensor.tensor_kernel(format, shape, True, cc > (8, 0)), *x, *w, *x, *n)]
        for kernel, *signature in kernels:
            compiled = compiler.compile_kernel(kernel, tuple(signature), cc)
            _, words = assembler.run_assembler(assembler.find_assembler()[0], compiled, cc)
            assert ".local" not in compiled.ptx and " 0 bytes spill stores" in words, (shape, words)
            assert re.search(r"\bmma\.sync\.aligned\.m16n8k", compiled.ptx)


def test_the_choice():
    """Formats and sizes that win on an H100, and the tile that each gets."""
    card = SimpleNamespace(n_sms=132, max_shared=HOPPER)
    for name, n, columns, tile in [
            ("Q8_0", 12352, 8, None), ("Q8_0", 4096, 32, None), ("Q8_0", 12352, 32, (64, 32)),
            ("Q8_0", 4096, 64, (64, 32)), ("Q8_0", 248320, 128, (64, 32)), ("Q4_K", 4096, 8, None),
            ("Q4_K", 12352, 4, None), ("Q4_K", 12352, 8, (64, 8)), ("Q4_K", 12352, 12, (64, 16)),
            ("Q4_K", 24576, 64, (64, 32))]:
        format = FORMATS[name]
        assert decode_tensor.takes(card, format, n, 4096, columns) == (tile is not None), (name, n, columns)
        assert not decode_tensor.takes(card, format, n, 4096 + 128, columns)
        if tile:
            chosen = decode_tensor.shape_for(card, format, n, columns)
            assert (chosen.tile_rows, chosen.tile_columns) == tile, (name, n, columns)
        assert decode_tensor.shape_for(card, format, n, columns, swiglu=True).tile_rows == 64
