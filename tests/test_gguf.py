"""The GGUF reader and Config: real files, published shapes, and thousands of damaged files."""

import dataclasses
import functools
import random
import resource
import struct
import time
import tracemalloc

import gguf as reference
import numpy as np
import pytest

import qengine
from engine.gguf import SUPPORTED_TYPES
from engine.template import ChatTemplate
from engine.tokenizer import load_tokenizer
from engine.weights import FileWeights
from kernels.formats import FLOATS, FORMATS, GGML_TYPES, factors, pack, pack_scales, random_raw, split
from models.quantize import quantize
from tests.models import has_codes
from tests.oracle import DATA, oracle_files, oracle_path

TINY = DATA / "tiny-Q8_0.gguf"
STRING, ARRAY, U32, U8, BOOL = 8, 9, 4, 0, 7


# ---- what the reader reads -----------------------------------------------------------------------------


@pytest.mark.parametrize("file", oracle_files())
def test_reads_what_the_gguf_package_reads(file):
    compare_with_package(oracle_path(f"gguf/{file}"))


def test_reads_what_the_gguf_package_reads_without_the_oracle():
    compare_with_package(TINY)


def compare_with_package(path):
    """Every key and every tensor; values where the type is one that we turn into floats."""
    ours, theirs = qengine.GGUF(path), reference.GGUFReader(path)
    keys = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    plain = {key: value.tolist() if isinstance(value, np.ndarray) else value
             for key, value in ours.metadata.items()}
    assert plain == keys
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(int(dim) for dim in tensor.shape[::-1])
        assert (info.type, info.offset, info.nbytes) == \
            (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)
        assert bytes(ours.data(tensor.name)) == tensor.data.tobytes()
        if info.type in SUPPORTED_TYPES:
            values = reference.quants.dequantize(tensor.data, tensor.tensor_type).reshape(info.shape)
            np.testing.assert_array_equal(ours.floats(tensor.name), values)


def test_table_of_types_is_that_of_the_gguf_package():
    sizes = reference.constants.GGML_QUANT_SIZES
    assert GGML_TYPES == {int(kind): (kind.name, *size) for kind, size in sizes.items()}


# ---- Config --------------------------------------------------------------------------------------------


def checked_config(gguf):
    """The Config of a file whose tensors have been compared with it. Raises ModelError."""
    config = qengine.Config.from_gguf(gguf)
    qengine.check_model(config, gguf)
    return config


def test_config_of_the_reference_model():
    config = checked_config(qengine.GGUF(oracle_path("gguf/dense_mtp-Q8_0.gguf")))
    layers = ("linear", "linear", "linear", "attention") * 2
    assert (config.n_layers, config.n_nextn, config.layer_kinds) == (8, 1, layers)
    assert (config.hidden_dim, config.ffn_dim, config.n_vocab) == (256, 320, 4096)
    assert (config.n_heads, config.n_kv_heads, config.head_dim, config.rope_dim) == (4, 2, 256, 64)
    assert (config.query_dim, config.kv_dim, config.conv_dim, config.value_dim) == (1024, 512, 1024, 512)
    assert config.rope_sections == (11, 11, 10) and config.rope_base == 1e7
    assert config.norm_eps == pytest.approx(1e-6) and not config.tied_embeddings


def test_config_of_the_small_model():
    config = checked_config(qengine.GGUF(TINY))
    assert (config.name, config.n_layers, config.n_nextn) == ("tiny", 3, 1)
    assert config.layer_kinds == ("linear", "linear", "attention") and config.tied_embeddings
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.n_layers = 4


@pytest.mark.parametrize("name, millions", [("0.8b", 752.39), ("2b", 1881.8), ("4b", 4205.8), ("9b", 8953.8),
                                            ("27b", 26896)])
def test_published_sizes(name, millions):
    """Parameters of the language model, as llama-bench counts them for the published files."""
    config = qengine.Config.synthetic(name)
    assert qengine.n_parameters(config) / 1e6 == pytest.approx(millions, rel=1e-4)
    qengine.check_config(config, config.name)


def test_synthetic_names():
    tiny = qengine.Config.synthetic("tiny")
    qengine.check_config(tiny, tiny.name)
    with pytest.raises(qengine.ModelError, match="synthetic:7b: there is no such model, only tiny, 0.8b"):
        qengine.Config.synthetic("7b")


@pytest.mark.parametrize("name, words", [
    ("dense_mtp-mmproj-F16", "architecture 'clip' is not supported"),
])
def test_other_models_are_refused_by_name(name, words):
    with pytest.raises(qengine.ModelError, match=words):
        checked_config(qengine.GGUF(oracle_path(f"gguf/{name}.gguf")))


@functools.cache
def small_model():
    """The small model's keys, as (key, value, types), and its tensors; the package is slow to read them."""
    source = reference.GGUFReader(TINY)
    keys = [(key, field.contents(), field.types) for key, field in source.fields.items()
            if not key.startswith("GGUF.") and key != "general.architecture"]
    return keys, source.tensors


def rewritten(path, keys=None, tensors=None, drop=()):
    """The small model written anew with other metadata and tensors ({name: (values, type)})."""
    old_keys, old_tensors = small_model()
    keys = dict(keys or {})
    writer = reference.GGUFWriter(path, keys.pop("general.architecture", "qwen35"))
    for key, value, types in old_keys:
        if key not in drop:
            value = keys.pop(key, value)
            writer.add_key_value(key, value, types[0], types[-1] if isinstance(value, list) else None)
    for key, value in keys.items():
        writer.add_key_value(key, value, reference.GGUFValueType.get_type(value))
    for tensor in old_tensors:
        if tensor.name not in drop and tensor.name not in (tensors or {}):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, (values, kind) in (tensors or {}).items():
        number = reference.GGMLQuantizationType[kind]
        raw = quantize(kind, values) if kind in FORMATS else values.astype(np.int8) if kind == "I8" else \
            reference.quants.quantize(values, number)
        writer.add_tensor(name, raw, raw_dtype=number)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return qengine.GGUF(path)


def ones(*shape):
    return np.ones(shape, np.float32)


def largest_error(kind):
    """How far a type may move a weight in [-1, 1]: by half a step between two neighbours. A packed format may move it
    by a whole step, since q may end a step earlier on one side than on the other."""
    if kind in FLOATS:
        return {"F32": 0, "F16": 2**-12, "BF16": 2**-9}[kind]
    q = FORMATS[kind].values.astype(int)
    step = np.diff(np.sort(q)).max() / abs(q).max()
    return step / 2 if FORMATS[kind].bits == 8 else step


@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
def test_matrices_of_every_supported_type(tmp_path, kind):
    values = np.linspace(-1, 1, 256 * 256, dtype=np.float32).reshape(256, 256)
    model = rewritten(tmp_path / "m.gguf", tensors={"blk.0.ffn_up.weight": (values, kind)})
    checked_config(model)
    assert model.tensors["blk.0.ffn_up.weight"].type == kind
    read = model.floats("blk.0.ffn_up.weight")
    raw = model.data("blk.0.ffn_up.weight").reshape(256, -1).view(np.uint8)
    np.testing.assert_array_equal(read, reference.quants.dequantize(raw, reference.GGMLQuantizationType[kind]))
    if kind in FLOATS or has_codes(FORMATS[kind]):
        assert np.abs(read - values).max() <= largest_error(kind)
    else:       # a code book has no entry for some groups of weights, and signs of most must be even in number
        assert np.linalg.norm(read - values) < 0.5 * np.linalg.norm(values)


@pytest.mark.parametrize("changes, words", [
    (dict(keys={"general.architecture": "llama"}), "architecture 'llama' is not supported"),
    (dict(keys={"qwen35.rope.scaling.type": "yarn"}), "rotary scaling 'yarn' is not supported"),
    (dict(keys={"qwen35.rope.scaling.factor": 4.0}), "rotary scaling 'linear' is not supported"),
    (dict(keys={"qwen35.attention.head_count": 3}), r"'blk.2.attn_q.weight' .* has the shape \(1024, 256\)"),
    (dict(keys={"qwen35.attention.head_count": 0}), "head_count' is 0, not a sensible size"),
    (dict(keys={"qwen35.block_count": 2**31 - 1}), "block_count' is 2147483647, more than"),
    (dict(keys={"qwen35.nextn_predict_layers": 4}), "nextn_predict_layers' is 4 of 4 blocks"),
    (dict(keys={"qwen35.attention.key_length": 128}), "keys and values of attention heads differ"),
    (dict(keys={"qwen35.ssm.state_size": 64}), "ssm.inner_size' is not"),
    (dict(keys={"qwen35.ssm.group_count": 3}), "2 value heads do not share 3 key heads"),
    (dict(keys={"qwen35.ssm.conv_kernel": 5}), "the convolution has 5 taps"),
    (dict(keys={"qwen35.rope.dimension_count": 128, "qwen35.rope.dimension_sections": [22, 22, 20, 0]}),
     "128 rotary dimensions of a head turn, not 64"),
    (dict(keys={"qwen35.rope.dimension_sections": [11, 11, 9, 0]}), "do not add up to 32"),
    (dict(keys={"qwen35.rope.freq_base": float("nan")}), "the rotary base is nan"),
    (dict(keys={"qwen35.attention.layer_norm_rms_epsilon": 0.0}), "the epsilon of the norms is 0.0"),
    (dict(keys={"qwen35.attention.recurrent_layers": [True, False]}), "is not 4 truth values"),
    (dict(keys={"qwen35.attention.recurrent_layers": [True, False, True, False]}),
     "'blk.1.attn_q.weight' is missing"),
    (dict(drop=["qwen35.context_length"]), "key 'qwen35.context_length' is missing"),
    (dict(drop=["token_embd.weight"]), "tensor 'token_embd.weight' is missing"),
    (dict(drop=["blk.3.nextn.enorm.weight"]), "tensor 'blk.3.nextn.enorm.weight' is missing"),
    (dict(tensors={"blk.0.extra.weight": (ones(2, 32), "F32")}), "'blk.0.extra.weight' is not part"),
    (dict(tensors={"blk.0.ffn_up.weight": (ones(256, 256), "I8")}), "is of type I8, not Q8_0, Q4_0"),
    (dict(tensors={"blk.0.ffn_up.scale": (ones(1), "F32")}), "'blk.0.ffn_up.scale' is no float32 factor"),
    (dict(tensors={"blk.0.ffn_up.input_scale": (ones(1), "F32")}), "'blk.0.ffn_up.input_scale' is no float32 factor"),
    (dict(tensors={"output_norm.weight": (ones(256), "Q8_0")}), "is of type Q8_0, not F32, F16, BF16"),
    (dict(keys={"tokenizer.ggml.tokens": ["a"]}), "has 1 tokens and the embedding table 4096 rows"),
])
def test_a_wrong_model_is_named(tmp_path, changes, words):
    with pytest.raises(qengine.ModelError, match=words):
        checked_config(rewritten(tmp_path / "m.gguf", **changes))


def test_older_files_without_a_list_of_layers(tmp_path):
    model = rewritten(tmp_path / "m.gguf", drop=["qwen35.attention.recurrent_layers"])
    assert checked_config(model) == checked_config(qengine.GGUF(TINY))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers(tmp_path, bad):
    for kind in FLOATS:
        values = ones(256)
        values[77] = bad
        model = rewritten(tmp_path / "m.gguf", tensors={"output_norm.weight": (values, kind)})
        with pytest.raises(qengine.ModelError, match="'output_norm.weight' holds a value that is not"):
            model.floats("output_norm.weight")
    raw = bytearray(TINY.read_bytes())
    at = qengine.GGUF(TINY).tensors["token_embd.weight"].offset + 5 * 34  # the scale of block 5
    raw[at:at + 2] = np.float16(bad).tobytes()
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(qengine.ModelError, match="'token_embd.weight' holds a value that is not"):
        qengine.GGUF(tmp_path / "m.gguf").floats("token_embd.weight")


# ---- files made by hand, each wrong in one way ---------------------------------------------------------


def u32(n):
    return struct.pack("<I", n)


def u64(n):
    return struct.pack("<Q", n)


def text(s):
    s = s if isinstance(s, bytes) else s.encode()
    return u64(len(s)) + s


def key(name, kind, payload):
    return text(name) + u32(kind) + payload


def tensor(name, dims, kind=0, offset=0):
    return text(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


def file(keys=(), tensors=(), data=b"", magic=b"GGUF", version=3, n_tensors=None, n_keys=None, alignment=32):
    header = magic + u32(version) + u64(len(tensors) if n_tensors is None else n_tensors)
    header += u64(len(keys) if n_keys is None else n_keys) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


NESTED = u32(STRING) + u64(1) + text("x")
for _ in range(2000):
    NESTED = u32(ARRAY) + u64(1) + NESTED

BAD_FILES = {
    "empty": (b"", "the file is empty"),
    "not GGUF": (file(magic=b"GGML"), "does not begin with the letters GGUF"),
    "version 1": (file(version=1), "GGUF version 1 is not 2 or 3"),
    "byte-swapped": (file(version=3 << 24), "byte-swapped"),
    "2^60 tensors": (file(n_tensors=1 << 60), "claims 1152921504606846976 tensors"),
    "2^63 keys": (file(n_keys=1 << 63), "ends early"),
    "2^40 bytes": (file([key("a", ARRAY, u32(U8) + u64(1 << 40))]), "needs 1099511627776 bytes"),
    "2^40 strings": (file([key("a", ARRAY, u32(STRING) + u64(1 << 40))]), "claims 1099511627776 strings"),
    "2^61 numbers": (file([key("a", ARRAY, u32(U32) + u64(1 << 62))]), "needs 18446744073709551616 bytes"),
    "nested arrays": (file([key("a", ARRAY, NESTED)]), "array of the unsupported value type 9"),
    "value type": (file([key("a", 13, b"")]), "unknown value type 13"),
    "element type": (file([key("a", ARRAY, u32(99) + u64(0))]), "unsupported value type 99"),
    "bool of 7": (file([key("a", BOOL, b"\7")]), "truth value but holds 7"),
    "bools of 7": (file([key("a", ARRAY, u32(BOOL) + u64(2) + b"\0\7")]), "truth values other than 0 and 1"),
    "key twice": (file([key("a", U8, b"1")] * 2), "key 'a' appears twice"),
    "key not UTF-8": (file([key(b"\xff", U8, b"1")]), "a metadata key is not UTF-8"),
    "key of 70,000": (file([key("a" * 70_000, U8, b"1")]), "70000 bytes long"),
    "value not UTF-8": (file([key("a", STRING, text(b"\xff"))]), "key 'a' is not UTF-8"),
    "string not UTF-8": (file([key("a", ARRAY, u32(STRING) + u64(1) + text(b"\xff"))]), "string 0 of key"),
    "long string": (file([key("a", ARRAY, u32(STRING) + u64(1) + u64(2**64 - 9))]), "goes past the end"),
    "alignment 0": (file([key("general.alignment", U32, u32(0))]), "general.alignment' is 0"),
    "alignment 24": (file([key("general.alignment", U32, u32(24))]), "general.alignment' is 24"),
    "alignment type": (file([key("general.alignment", U8, b"\x20")], [tensor("t", [8])], bytes(32)), None),
    "alignment text": (file([key("general.alignment", STRING, text("32"))]), "general.alignment' holds str"),
    "no dimensions": (file(tensors=[tensor("t", [])], data=bytes(32)), "0 dimensions"),
    "5 dimensions": (file(tensors=[tensor("t", [1] * 5)], data=bytes(32)), "5 dimensions"),
    "2^32 dimensions": (file(tensors=[text("t") + u32(2**32 - 1) + bytes(99)]), "4294967295 dimensions"),
    "zero dimension": (file(tensors=[tensor("t", [8, 0])], data=bytes(32)), "dimension of zero"),
    "product wraps": (file(tensors=[tensor("t", [2**32, 2**32])], data=bytes(32)), "past the end"),
    "part of a block": (file(tensors=[tensor("t", [40], 8)], data=bytes(64)), "not a multiple of Q8_0's 32"),
    "unknown type": (file(tensors=[tensor("t", [32], 4)], data=bytes(64)), "unknown type number 4"),
    "past the end": (file(tensors=[tensor("t", [9])], data=bytes(32)), "past the end of the file"),
    "offset wraps": (file(tensors=[tensor("t", [8], offset=2**64 - 64)], data=bytes(32)), "past the end"),
    "misaligned": (file(tensors=[tensor("t", [2], offset=8)], data=bytes(32)), "not a multiple of 32"),
    "overlap": (file(tensors=[tensor("s", [16]), tensor("t", [8], offset=32)], data=bytes(64)), "overlaps"),
    "same place": (file(tensors=[tensor("s", [8]), tensor("t", [8])], data=bytes(64)), "overlaps"),
    "tensor twice": (file(tensors=[tensor("t", [8]), tensor("t", [8], offset=32)], data=bytes(64)),
                     "tensor 't' appears twice"),
    "name not UTF-8": (file(tensors=[tensor(b"\xfe", [8])], data=bytes(32)), "a tensor name is not UTF-8"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_at_once(tmp_path, case):
    content, words = BAD_FILES[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    start = time.thread_time()
    if words is None:  # fine after all: a small integer is an integer
        assert qengine.GGUF(path).tensors["t"].shape == (8,)
    else:
        with pytest.raises(qengine.ModelError, match=words) as error:
            qengine.GGUF(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)
        assert "(byte " in str(error.value) or case == "empty" or "general.alignment" in words
    assert time.thread_time() - start < 1
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_version_2_is_read(tmp_path):
    path = tmp_path / "v2.gguf"
    path.write_bytes(file([key("a", STRING, text("é"))], [tensor("t", [8])], bytes(range(32)), version=2))
    model = qengine.GGUF(path)
    assert model.metadata == {"a": "é"} and bytes(model.data("t")) == bytes(range(32))


def test_files_that_cannot_be_opened(tmp_path):
    with pytest.raises(qengine.ModelError, match="nothing.gguf: cannot be opened: No such file"):
        qengine.GGUF(tmp_path / "nothing.gguf")
    with pytest.raises(qengine.ModelError, match="cannot be opened: Is a directory"):
        qengine.GGUF(tmp_path)


def test_every_truncation_of_a_header(tmp_path):
    """A real file cut anywhere in its header, and before its last byte, is a file that ends early."""
    content = TINY.read_bytes()
    data_start = min(info.offset for info in qengine.GGUF(TINY).tensors.values())
    rng = random.Random(4)
    cuts = [*range(1, 400), *(rng.randrange(400, data_start) for _ in range(150)), len(content) - 1]
    for cut in cuts:
        path = tmp_path / "cut.gguf"
        path.write_bytes(content[:cut])
        with pytest.raises(qengine.ModelError):
            qengine.GGUF(path)


# ---- real headers, mutated by the thousand -------------------------------------------------------------


def regions(path):
    """Where to damage a file: all of its header, and the parts of it that are not the long vocabulary."""
    data_start = min(info.offset for info in qengine.GGUF(path).tensors.values())
    header = path.read_bytes()[:data_start]
    vocabulary = header.index(b"tokenizer.ggml.tokens") + 40
    after = header.rindex(b"tokenizer.ggml.eos_token_id")
    return [range(data_start), range(4, vocabulary), range(after, data_start)]


def damage(content: bytearray, places, rng):
    """Change a few bytes in the ways that break files: bits, lengths, types, stretches in the wrong place."""
    place = rng.choice(places)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.choice(place)
        kind = rng.randrange(5)
        if kind == 0:
            content[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            content[at] = rng.choice([0, 1, 8, 9, 127, 128, 255])
        elif kind == 2:
            content[at:at + 8] = u64(rng.choice([0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]))
        elif kind == 3:
            content[at:at + 4] = u32(rng.choice([0, 1, 5, 7, 8, 9, 12, 30, 2**31, 2**32 - 1]))
        else:
            other, length = rng.choice(place), rng.randrange(1, 40)
            content[at:at + length] = content[other:other + length]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Jinja, about the escapes in a broken template
def test_mutated_headers_end_in_one_kind_of_error(tmp_path):
    """2,000 damaged files: each loads or ends in one sentence, quickly and without growing."""
    places, header = regions(TINY), bytearray(TINY.read_bytes()[:130_000])
    path = tmp_path / "damaged.gguf"
    path.write_bytes(TINY.read_bytes())
    rng, refused, slowest = random.Random(5), 0, 0.0
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in range(2000):
        content = bytearray(header)
        damage(content, places, rng)
        with open(path, "r+b") as damaged:  # in place: the tensors' bytes stay
            damaged.write(content[:len(header)])
        start = time.thread_time()
        try:
            model = qengine.GGUF(path)
            checked_config(model)
            if case % 16 == 0:  # slower than the rest together
                ChatTemplate.from_gguf(model, load_tokenizer(model))
        except qengine.ModelError as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error), (case, str(error))
            refused += 1
        slowest = max(slowest, time.thread_time() - start)
    assert refused > 1000
    assert slowest < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200_000  # kB


# ---- damaged matrices of every format ------------------------------------------------------------------


def matrix_file(kind, rng=None, raw=None):
    """A file with a matrix "w" of 3 rows of 2 blocks; (its bytes, where those of the matrix begin)."""
    format = FORMATS[kind]
    raw = random_raw(rng, format, 3, 2 * format.file_block) if raw is None else raw
    header = file(tensors=[tensor("w", [2 * format.file_block, 3], format.number)])
    return bytearray(header + raw.tobytes()), len(header)


def read_or_refused(path, content):
    """Whether a file is read; if so, all matrices that it has by now have the values that the gguf package gives them.
    Otherwise one sentence says what is wrong."""
    path.write_bytes(content)
    try:
        model = qengine.GGUF(path)
        found = {name: model.floats(name) for name in model.tensors}
    except qengine.ModelError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error), str(error)
        return False
    for name, values in found.items():
        info = model.tensors[name]
        bytes_of_rows = np.ascontiguousarray(model.data(name).reshape(-1)).view(np.uint8)
        want = reference.quants.dequantize(bytes_of_rows, reference.GGMLQuantizationType[info.type])
        np.testing.assert_array_equal(values.reshape(-1), want.reshape(-1))
    return True


@pytest.mark.parametrize("kind", FORMATS)
def test_mutated_headers_of_every_format(tmp_path, kind):
    """300 files: damaged anywhere in the header, some cut short as well."""
    rng, outcomes = random.Random(kind), []
    content, data_start = matrix_file(kind, np.random.default_rng(1))
    for _ in range(300):
        damaged = bytearray(content)
        damage(damaged, [range(data_start)], rng)
        if rng.random() < 0.2:
            del damaged[rng.randrange(len(damaged)):]
        outcomes.append(read_or_refused(tmp_path / "m.gguf", damaged))
    assert read_or_refused(tmp_path / "m.gguf", content)
    assert outcomes.count(False) > 100 and outcomes.count(True) > 5


@pytest.mark.parametrize("kind", FORMATS)
def test_a_matrix_that_claims_to_be_of_another_type_or_shape(tmp_path, kind):
    """Every type number with the bytes of this format, and shapes that are too large or no whole blocks."""
    content, data_start = matrix_file(kind, np.random.default_rng(1))
    format, dims_at = FORMATS[kind], content.index(b"w") + 1 + 4
    for number in range(2 + max(GGML_TYPES)):
        content[dims_at + 16:dims_at + 20] = u32(number)
        is_read = read_or_refused(tmp_path / "m.gguf", content)
        name, block, nbytes = GGML_TYPES.get(number, ("", 1, 0))
        size = 6 * format.file_block // block * nbytes
        fits = 2 * format.file_block % block == 0 and size <= len(content) - data_start
        assert not is_read or fits and name in SUPPORTED_TYPES
        assert is_read or number != format.number
    content[dims_at + 16:dims_at + 20] = u32(format.number)
    for k, n in ((2, 4), (3, 3), (2, 2**61), (2**60, 2**60), (2, 0), (0, 3)):
        content[dims_at:dims_at + 16] = u64(k * format.file_block % 2**64) + u64(n)
        assert not read_or_refused(tmp_path / "m.gguf", content)
    content[dims_at:dims_at + 16] = u64(2 * format.file_block - 1) + u64(3)
    assert not read_or_refused(tmp_path / "m.gguf", content)


def loaded(path, card):
    """The matrix "w" on a card."""
    with FileWeights(qengine.GGUF(path)).loading(card) as loader:
        return loader.matrix("w")


@pytest.mark.parametrize("kind", FORMATS)
def test_scales_that_are_no_numbers(tmp_path, card, kind):
    """In the first, a middle or the last block: refused on the host and on the card."""
    content, data_start = matrix_file(kind, np.random.default_rng(1))
    path, size = tmp_path / "m.gguf", FORMATS[kind].file_bytes
    for turn, (place, value) in enumerate(FORMATS[kind].scales.bad()):
        damaged, at = bytearray(content), data_start + (0, 2, 5)[turn % 3] * size + place
        damaged[at:at + len(value)] = value.tobytes()
        path.write_bytes(damaged)
        with pytest.raises(qengine.ModelError, match="tensor 'w' holds a block scale that is not a finite number"):
            loaded(path, card)
        with pytest.raises(qengine.ModelError, match="tensor 'w' holds a value that is not a finite number"):
            qengine.GGUF(path).floats("w")


@pytest.mark.parametrize("kind", FORMATS)
def test_random_bytes_for_a_matrix(tmp_path, card, kind):
    """They are refused, or lie on the card as the reference says, with finite scales."""
    rng, format, path = np.random.default_rng(6), FORMATS[kind], tmp_path / "m.gguf"
    for _ in range(8):
        raw = rng.integers(0, 256, (6, format.file_bytes), np.uint8)
        path.write_bytes(matrix_file(kind, raw=raw)[0])
        with np.errstate(invalid="ignore"):
            _, scale, minimum = factors(format, raw, np.float32)
        try:
            matrix = loaded(path, card)
        except qengine.ModelError:
            assert not (np.isfinite(scale).all() and np.isfinite(minimum).all())
            continue
        assert np.isfinite(scale).all() and np.isfinite(minimum).all()
        planes, wd = split(format, raw)
        used = 2 * format.file_block * format.bits // 8
        got = card.download(matrix.values).view(np.uint8)[:, :used]
        np.testing.assert_array_equal(got, pack(format, planes, 3)[:, :used])
        np.testing.assert_array_equal(card.download(matrix.scales).view(np.uint16), pack_scales(format, wd, 3))


def test_arrays_of_the_metadata_outlive_the_file():
    """They are copies: to read a mapping whose file was cut ends the process."""
    model = qengine.GGUF(oracle_path("gguf/moe_mtp-Q8_0.gguf"))
    arrays = [value for value in model.metadata.values() if isinstance(value, np.ndarray)]
    assert arrays and all(array.flags.owndata for array in arrays)
