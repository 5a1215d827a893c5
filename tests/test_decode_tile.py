from types import SimpleNamespace

import numpy as np
import pytest

from kernels import decode_tile
from kernels.formats import FORMATS, on_card, random_raw
from kernels.operands import Matrix, Quantized
from kernels.q8_gemv import gemv, random_activations
from kernels.quant_gemv import decoder
from kernels.swiglu import swiglu_quantize
from tests.kinds import BY_KIND

HOPPER = 227 << 10  # bytes of shared memory of a block of threads
SMALL = decode_tile.Shape(4, 2, 2)  # compiles sooner than those in use


@pytest.fixture
def roomy(card, monkeypatch):
    """The card, with enough shared memory. An emulated one may stand for a T4, which has too little, but need not."""
    if card.kind == "emulated":
        monkeypatch.setattr(card, "max_shared", HOPPER)
    elif card.max_shared < 96 << 10:
        pytest.skip(f"a block of threads has {card.max_shared} bytes of shared memory on {card.name}: no tile fits")
    return card


@pytest.fixture
def small(roomy, monkeypatch):
    monkeypatch.setattr(decode_tile, "SHAPES", (SMALL,))


def operands(card, format, n, k, columns):
    rng = np.random.default_rng((n, k, columns))
    w = Matrix(format.name, n, k, *on_card(card, format, random_raw(rng, format, n, k), n, k))
    return w, Quantized(*map(card.upload, random_activations(rng, columns, k)))


def poisoned(card, *shape, dtype=np.float32):
    array = card.alloc(shape, dtype)
    card.poison(array)
    return array


def compare_with_gemv(card, format, n, k, columns):
    """Bit for bit with the kernels for few columns, which add to y, too, with numbers around each column."""
    w, x = operands(card, format, n, k, columns)
    y, want = poisoned(card, columns + 1, n + 3), poisoned(card, columns + 1, n + 3)
    for to, multiply in ((y, decode_tile.tile_gemv), (want, gemv_in_parts)):
        for add in (False, True):
            multiply(card, to.reshape(-1)[1:], n + 3, w, x, columns, add)
    np.testing.assert_array_equal(card.download(y).view(np.uint32), card.download(want).view(np.uint32))


def gemv_in_parts(card, y, stride, w, x, columns, add):
    """`gemv` of so few columns at a time that it does not turn to tiles."""
    for first in range(0, columns, 8):
        here = min(columns - first, 8)
        part = Quantized(x.q[first:first + here], x.d[first:first + here])
        gemv(card, decoder(FORMATS[w.format]), y[first * stride:], stride, w, part, here, add)


@pytest.mark.parametrize("name", BY_KIND)
def test_every_format_has_the_bits_of_gemv(card, name, small):
    compare_with_gemv(card, FORMATS[name], 67, 1280, 13)


@pytest.mark.parametrize("shape", decode_tile.SHAPES[1::4], ids=str)
def test_shapes_have_the_bits_of_gemv(card, shape, roomy, monkeypatch):
    """Of a tile and a part of one, for one block of threads and for several."""
    monkeypatch.setattr(decode_tile, "SHAPES", (shape,))
    if not decode_tile._fitting(card, FORMATS["Q8_0"], False):
        pytest.skip(f"{card.max_shared} bytes of shared memory on {card.name} are too few for {shape}")
    for n_sms in 1, 132:
        monkeypatch.setattr(card, "n_sms", n_sms)
        compare_with_gemv(card, FORMATS["Q8_0"], 40, 2080, shape.columns * shape.across + 3)


@pytest.mark.parametrize("k", [32, 992, 1024])
def test_rows_shorter_than_the_chains(card, k, small):
    compare_with_gemv(card, FORMATS["Q8_0"], 33, k, 16)


@pytest.mark.parametrize("n, k, columns", [(96, 1280, 19), (32, 256, 3)])
def test_swiglu_has_the_bits_of_the_separate_kernels(card, n, k, columns, small, monkeypatch):
    monkeypatch.setattr(card, "n_sms", 2)
    w, x = operands(card, FORMATS["Q8_0"], 2 * n, k, columns)
    both = poisoned(card, columns, 2 * n)
    out, want = (Quantized(poisoned(card, columns + 1, n, dtype=np.int8), poisoned(card, columns + 1, n // 32))
                 for _ in range(2))
    decode_tile.tile_gemv(card, both, 2 * n, w, x, columns)
    swiglu_quantize(card, want, both, columns, n)
    decode_tile.tile_gemv_swiglu(card, out, w, x, columns)
    for got, expected in zip(out, want):
        np.testing.assert_array_equal(card.download(got).view(np.uint8), card.download(expected).view(np.uint8))


@pytest.mark.parametrize("name, case", [("Q8_0", decode_tile.CASES[0]), ("Q4_K", decode_tile.CASES[0])], ids=str)
def test_within_the_rounding_bound(card, name, case, small):
    decode_tile.check(card, FORMATS[name], *case)


@pytest.mark.parametrize("name", FORMATS)
def test_the_choice_of_a_shape(name):
    def width(n, columns, n_sms=132, shared=HOPPER):
        card = SimpleNamespace(n_sms=n_sms, max_shared=shared)
        shape = decode_tile.shape_for(card, FORMATS[name], n, columns)
        return shape.columns * shape.across

    want = {8: [16, 16, 32, 32, 16, 32, 32], 12: [16, 16, 24, 32, 48, 32, 32], 16: [16, 16, 24, 32, 48, 64, 64]}
    most = max(shape.columns for shape in decode_tile.shapes_of(FORMATS[name]))
    assert [width(24576, columns) for columns in (13, 16, 24, 32, 40, 64, 128)] == want[most]
    assert width(1024, 64) == 16                    # few rows: narrow tiles, so that more SMs have one
    assert width(10240, 64) == 32                   # five rounds of half tiles instead of three
    assert width(4096, 64, n_sms=80, shared=96 << 10) == 32
    w = SimpleNamespace(format=name)
    for shared, columns, kind, takes in ((HOPPER, 12, "cuda", True), (HOPPER, 8, "cuda", False),
                                         (96 << 10, 64, "cuda", True), (64 << 10, 64, "cuda", False),
                                         (HOPPER, 64, "emulated", False)):
        assert decode_tile.takes(SimpleNamespace(kind=kind, max_shared=shared), w, columns) == takes
