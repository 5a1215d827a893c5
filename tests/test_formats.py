"""Formats of quantised weights: NumPy against the gguf package, and the card's arrays against NumPy."""

import gguf
import numpy as np
import pytest

from kernels import formats
from kernels.formats import checks, codes
from kernels.formats import FLOATS, FORMATS
from tests.models import has_codes, quantize


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


@pytest.mark.parametrize("n, blocks", checks.SHAPES)
def test_repacks_bit_for_bit(card, format, n, blocks):
    checks.check_repack(card, format, n, blocks * format.file_block)


def test_is_hardly_larger_than_the_file(format):
    n, k = 64, 4096
    nbytes = sum(np.dtype(dtype).itemsize * np.prod(shape) for shape, dtype in format.arrays(n, k))
    at_most = {"MXFP4": 1.06, "TQ1_0": 1.23}    # a scale of two bytes for one; 2 bits for log2(3)
    assert nbytes <= at_most.get(format.name, 1.04) * n * k // format.file_block * format.file_bytes


def test_every_bit_has_its_place(format):
    """One bit of a row's blocks at a time: it alone changes wq, and each bit of wq belongs to one."""
    n_blocks = 3
    blocks = np.zeros((n_blocks, sum(format.planes)), np.uint8)
    used = np.zeros((1, format.q_row(32 * n_blocks)), np.uint8)
    for i in range(8 * blocks.size):
        blocks.reshape(-1)[i // 8] = 1 << i % 8
        changed = formats.pack(format, blocks, 1)
        assert np.bitwise_count(changed).sum() == 1 and not (changed & used).any()
        used |= changed
        blocks.reshape(-1)[i // 8] = 0
    assert (used[0, :4 * format.bits * n_blocks] == 255).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_code_has_its_place(bits):
    """One code of a block at a time: its bits alone change, each bit of the planes belongs to one code."""
    assert sum(codes.planes_of(bits)) == 4 * bits
    used = np.zeros((1, 4 * bits), np.uint8)
    for i in range(32):
        block = np.zeros(32, np.uint8)
        block[i] = 2**bits - 1
        changed = codes.in_planes(block, bits)
        assert np.bitwise_count(changed).sum() == bits and not (changed & used).any()
        used |= changed
    assert (used == 255).all()


def test_the_quantisers_of_the_tests(format):
    """Every weight within a step and a half of its block, as the gguf package reads it. Tables have wider steps, and
    ternary weights only the sign of a large one."""
    values = np.random.default_rng(2).standard_normal((5, 512)).astype(np.float32)
    raw = quantize(format.name, values)
    got = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[format.name]).reshape(-1, 32)
    if not has_codes(format):   # groups of weights share a code
        error = np.linalg.norm(got - values.reshape(-1, 32)) / np.linalg.norm(values)
        assert error <= {3: 0.2, 2: 0.35, 1: 0.5}[format.bits]
        return
    if format.random.codes == "ternary":
        assert (got * values.reshape(-1, 32) >= 0).all() and got.reshape(-1, 256).any(axis=1).all()
        return
    q = np.sort(format.values.astype(int))
    step = np.ptp(values.reshape(-1, 32), axis=1, keepdims=True) * np.diff(q).max() / np.ptp(q)
    assert (abs(got - values.reshape(-1, 32)) <= 1.5 * step).all()
