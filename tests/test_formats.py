"""Formats of quantised weights: NumPy against the gguf package, and the card's arrays against NumPy."""

import gguf
import numpy as np
import pytest

import qengine
from engine.gguf import TensorInfo
from kernels import formats
from kernels.formats import FLOATS, FORMATS, checks, codes
from models import quantize
from tests.oracle import DATA


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


@pytest.mark.parametrize("name", quantize.SCHEMES)
def test_what_lies_on_a_card_leads_back_to_the_file(name):
    format = FORMATS[name]
    raw = formats.random_raw(np.random.default_rng(3), format, 5, 2 * format.file_block)
    if name == "NVFP4":
        raw[:, :4] &= 127       # bit 7 means nothing
    found = quantize.on_card(format, raw)
    planes = sum(format.planes) * format.per_unit
    np.testing.assert_array_equal(quantize.in_file(format, found[:, :planes], found[:, planes:]), raw)


# |w' - w| / |w| at most, for normal weights: about what a scale and codes of this width can do.
AT_MOST = {"Q8_0": 0.006, "Q6_K": 0.02, "Q5_K": 0.04, "Q5_1": 0.04, "Q5_0": 0.05, "Q4_K": 0.08, "Q4_1": 0.085,
           "IQ4_NL": 0.085, "IQ4_XS": 0.085, "NVFP4": 0.1, "Q4_0": 0.1, "MXFP4": 0.13, "IQ3_S": 0.15, "Q3_K": 0.16,
           "IQ3_XXS": 0.2, "IQ2_S": 0.27, "Q2_K": 0.3, "IQ2_XS": 0.32, "IQ2_XXS": 0.36, "IQ1_M": 0.45, "IQ1_S": 0.5,
           "TQ1_0": 0.5, "TQ2_0": 0.5}


def test_quantises_nearly_as_well_as_the_format_can(format):
    """As the gguf package reads it; in blocks of every size, some of zeros, some of one sign."""
    values = np.random.default_rng(2).standard_normal((6, 1024)).astype(np.float32)
    values *= np.repeat(np.float32([1, 0.1, 0.01, 1]), 256)
    values[4], values[5] = 0, abs(values[5])
    raw = quantize.quantize(format.name, values)
    assert raw.shape == (6, 1024 // format.file_block * format.file_bytes)
    got = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[format.name])
    assert not got[4].any() and np.isfinite(got).all()
    for part in slice(0, 256), slice(256, 512):
        assert np.linalg.norm((got - values)[:4, part]) <= AT_MOST[format.name] * np.linalg.norm(values[:4, part])


def test_exports_a_model(tmp_path, capsys):
    """Matrices change their type where their rows are whole blocks; all else stays as it is."""
    source, path = DATA / "tiny-Q8_0.gguf", tmp_path / "small.gguf"
    quantize.main(["IQ4_XS", str(path), str(source)])
    assert capsys.readouterr().out == f"{path}: {path.stat().st_size / 1e6:.2f} MB\n"
    ours, theirs = qengine.GGUF(path), qengine.GGUF(source)
    qengine.check_model(qengine.Config.from_gguf(ours), ours)
    for name, tensor in theirs.tensors.items():
        if tensor.type == "Q8_0" and tensor.shape[1] % 256 == 0:
            assert ours.tensors[name].type == "IQ4_XS"
            w = theirs.floats(name)
            assert np.linalg.norm(ours.floats(name) - w) < 0.12 * np.linalg.norm(w)
        else:
            assert ours.tensors[name].type == tensor.type
            assert bytes(ours.data(name)) == bytes(theirs.data(name))
    changed = {key for key in theirs.metadata if not np.array_equal(ours.metadata.get(key), theirs.metadata[key])}
    assert changed <= {"general.file_type"} and ours.metadata.keys() <= theirs.metadata.keys() | {"general.file_type"}
    with pytest.raises(SystemExit):
        quantize.main(["Q4_K", str(path), str(path)])
    assert "over itself" in capsys.readouterr().err


def test_a_matrix_for_each_expert_is_exported_and_a_router_is_not():
    shape = (4, 96, 256)
    tensors = [TensorInfo(f"blk.0.{name}.weight", shape, "Q8_0", 0, 0) for name in ("ffn_up_exps", "ffn_gate_inp")]
    assert [quantize.is_convertible(tensor, "Q4_K") for tensor in tensors] == [True, False]
    assert not quantize.is_convertible(TensorInfo("output_norm.weight", (256,), "F32", 0, 0), "Q8_0")
