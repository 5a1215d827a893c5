"""Tensors of a file, or random ones, as matrices on a card."""

import gguf
import numpy as np
import pytest

import qengine
from kernels import embedding
from kernels.formats import FORMATS, random_raw, split
from tests.models import EXPERTS, write_as_float32, write_experts
from tests.oracle import DATA

FILE = DATA / "tiny-Q8_0.gguf"
NAMES = [f"blk.0.{name}.weight" for name in ("ffn_up", "ffn_gate", "attn_gate", "ssm_alpha")]     # rows of 256 weights


def loaded(card, weights, *names):
    """The arrays of a matrix on the host, the flat bytes of each."""
    with weights.loading(card) as loader:
        matrix = loader.matrix(*names)
    arrays = [matrix.values] if matrix.scales is None else [matrix.values, matrix.scales]
    return matrix, [card.download(array.view(np.uint8)).tobytes() for array in arrays]


@pytest.mark.parametrize("kind", ["Q8_0", "F32", "synthetic"])
def test_stacked_rows_are_those_of_the_tensors(card, kind, tmp_path):
    if kind == "F32":
        write_as_float32(FILE, tmp_path / "F32.gguf")
    if kind == "synthetic":
        weights = qengine.SyntheticWeights(qengine.tensor_shapes(qengine.Config.synthetic("tiny")))
    else:
        weights = qengine.FileWeights(qengine.GGUF(FILE if kind == "Q8_0" else tmp_path / "F32.gguf"))
    stacked, got = loaded(card, weights, *NAMES)
    alone = [loaded(card, weights, name) for name in NAMES]
    assert got == [b"".join(parts) for parts in zip(*(arrays for _, arrays in alone), strict=True)]
    assert stacked.n == sum(matrix.n for matrix, _ in alone) and stacked.k == alone[0][0].k == 256
    assert stacked.format == ("F32" if kind == "F32" else "Q8_0")


def test_values_of_a_file(card):
    gguf = qengine.GGUF(FILE)
    for name in NAMES:
        matrix, arrays = loaded(card, qengine.FileWeights(gguf), name)
        codes, scales = split(FORMATS["Q8_0"], gguf.data(name))
        assert arrays == [codes.tobytes(), scales.tobytes()] and (matrix.n, matrix.k) == gguf.tensors[name].shape


@pytest.mark.parametrize("piece", [100_000, None])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "F16"])
def test_experts_have_their_rows_of_each_tensor(card, kind, piece, tmp_path, monkeypatch):
    """However the bytes of the file are cut into pieces: 100,000 bytes end within an expert and within a row."""
    if piece:
        monkeypatch.setattr("engine.weights.PIECE", piece)
    names = [f"blk.1.ffn_{name}_exps.weight" for name in ("gate", "up")]
    write_experts(tmp_path / "m.gguf", {"ffn_gate_exps": kind, "ffn_up_exps": kind})
    gguf = qengine.GGUF(tmp_path / "m.gguf")
    with qengine.FileWeights(gguf).loading(card) as loader:
        experts = loader.experts(*names)
    n, places = gguf.tensors[names[0]].shape[1], card.download(experts.places)
    assert (experts.n, experts.k, experts.format, len(places)) == (2 * n, 256, kind, EXPERTS)
    for i in range(EXPERTS):
        assert places[i].tolist() == list(experts.addresses(i))
        for name, first in zip(names, (0, n)):
            part = experts.slot(i).rows(first, first + n)
            if experts.is_quantized:
                values = card.alloc((n, 256), np.float32)
                embedding.embed(card, kind, values, card.upload(np.arange(n, dtype=np.int32)), part.values, part.scales,
                                n, 256)
                np.testing.assert_array_equal(card.download(values), gguf.floats(name)[i])
            else:
                np.testing.assert_array_equal(card.download(part.values), gguf.floats(name)[i])


def test_random_experts_differ_and_depend_on_their_tensor_alone(card):
    weights = qengine.SyntheticWeights(qengine.tensor_shapes(qengine.Config.synthetic("tiny-moe")))
    with weights.loading(card) as loader:
        gate, up, both = (loader.experts(*(f"blk.0.ffn_{name}_exps.weight" for name in names))
                          for names in (["gate"], ["up"], ["gate", "up"]))
    found = [[card.download(each.slot(i).values) for i in range(8)] for each in (gate, up, both)]
    assert len({values.tobytes() for each in found for values in each}) == 24
    for i in range(8):
        np.testing.assert_array_equal(found[2][i], np.concatenate([found[0][i], found[1][i]]))


def test_the_first_damaged_tensor_is_named(card, tmp_path):
    write_as_float32(FILE, tmp_path / "F32.gguf")
    for file, what in (FILE, "block scale"), (tmp_path / "F32.gguf", "value"):
        tensors, data = qengine.GGUF(file).tensors, bytearray(file.read_bytes())
        for name in NAMES[1:3]:
            at = tensors[name].offset
            data[at:at + 4] = b"\0\x7c\x80\x7f"         # no number, as a float16 and as a float32
        damaged = tmp_path / "damaged.gguf"
        damaged.write_bytes(data)
        weights = qengine.FileWeights(qengine.GGUF(damaged))
        first = min(NAMES[1:3], key=list(weights.gguf.tensors).index)
        with pytest.raises(qengine.ModelError, match=f"'{first}' holds a {what} that is not a finite number"):
            with weights.loading(card) as loader:
                for name in NAMES:
                    loader.matrix(name)


def test_nothing_but_the_matrices_stays_on_the_card(card):
    """Also while somebody holds the loader."""
    before = set(card.allocations)
    with qengine.FileWeights(qengine.GGUF(FILE)).loading(card) as loader:
        matrix = loader.matrix(NAMES[0])
    assert set(card.allocations) - before == {matrix.values.ptr, matrix.scales.ptr}


@pytest.mark.parametrize("name", FORMATS)
def test_a_scale_that_is_no_number_is_found(card, name, tmp_path):
    format, n = FORMATS[name], 3
    raw = random_raw(np.random.default_rng(3), format, n, format.file_block)
    place, value = next(iter(format.scales.bad()))
    for block, is_damaged in (0, False), (2, True):
        if is_damaged:
            raw[block, place:place + len(value)] = value
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen35")
        writer.add_tensor("w", raw, raw_dtype=gguf.GGMLQuantizationType[name])
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            write()
        writer.close()
        weights = qengine.FileWeights(qengine.GGUF(tmp_path / "m.gguf"))
        if is_damaged:
            with pytest.raises(qengine.ModelError, match="'w' holds a block scale that is not a finite number"):
                loaded(card, weights, "w")
        else:
            matrix, _ = loaded(card, weights, "w")
            assert (matrix.format, matrix.n, matrix.k) == (name, n, format.file_block)
