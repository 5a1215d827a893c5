"""Formats of quantised weights: NumPy against the gguf package, and the card's arrays against NumPy."""

import gguf
import numpy as np
import pytest

from kernels import formats
from kernels.formats import FLOATS, FORMATS
from tests.models import quantize


@pytest.fixture(params=FORMATS)
def format(request):
    return FORMATS[request.param]


@pytest.mark.parametrize("name", [*FLOATS, *FORMATS])
def test_numbers_are_those_of_the_gguf_package(name):
    type, number = (FORMATS.get(name) or FLOATS[name]), gguf.GGMLQuantizationType[name]
    assert type.name == name and type.number == number
    assert gguf.GGML_QUANT_SIZES[number] == (type.file_block, type.file_bytes)


def test_no_type_is_named_twice():
    assert len(formats.GGML_TYPES) == len(FLOATS) + len(FORMATS) + len(formats.OTHER_TYPES)
    assert len({name for name, _, _ in formats.GGML_TYPES.values()}) == len(formats.GGML_TYPES)


def test_dequantises_as_the_gguf_package_does(format):
    raw = formats.random_raw(np.random.default_rng(1), format, 9, 1024)
    want = gguf.quants.dequantize(raw.reshape(-1), gguf.GGMLQuantizationType[format.name])
    got = formats.dequantize(format, raw)
    np.testing.assert_array_equal(got.view(np.uint32), want.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("n, blocks", formats.SHAPES)
def test_repacks_bit_for_bit(card, format, n, blocks):
    formats.check_repack(card, format, n, blocks * format.file_block)


def test_is_hardly_larger_than_the_file(format):
    n, k = 64, 4096
    nbytes = sum(np.dtype(dtype).itemsize * np.prod(shape) for shape, dtype in format.arrays(n, k))
    assert nbytes <= 1.04 * n * k // format.file_block * format.file_bytes


def test_every_code_has_its_place(format):
    """One code of a row at a time: its bits alone change, each bit of wq belongs to one code."""
    k = 2 * format.file_block
    codes = np.zeros((k // 32, 32), np.uint8)
    empty, used = formats.pack(format, codes, 1).copy(), np.zeros((1, format.q_row(k)), np.uint8)
    for i in range(k):
        codes.reshape(-1)[i] = 2**format.bits - 1
        changed = formats.pack(format, codes, 1) ^ empty
        assert np.bitwise_count(changed).sum() == format.bits and not (changed & used).any()
        used |= changed
        codes.reshape(-1)[i] = 0
    assert (used[0, :k * format.bits // 8] == 255).all()


def test_the_quantisers_of_the_tests(format):
    """Every weight within a step and a half of its block, as the gguf package reads it."""
    values = np.random.default_rng(2).standard_normal((5, 512)).astype(np.float32)
    raw = quantize(format.name, values)
    got = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[format.name]).reshape(-1, 32)
    step = np.ptp(values.reshape(-1, 32), axis=1, keepdims=True) / (2**format.bits - 2)
    assert (abs(got - values.reshape(-1, 32)) <= 1.5 * step).all()
