"""The small model of the tests; copies of model files with their tensors in another type, and what a model says."""

import functools
import itertools

import gguf
import numpy as np

import qengine
from kernels import formats
from kernels.formats import FLOATS, FORMATS
from kernels.formats.codes import in_order, in_planes
from tests import code_books
from tests.oracle import DATA

TINY = str(DATA / "tiny-Q8_0.gguf")
SLOTS, CONTEXT, CHUNK = 3, 1024, 64


def load_tiny(card, **options):
    """An engine with the small model of random weights that the tests have."""
    return qengine.load(TINY, card=card, progress=False, **{"ctx": CONTEXT, "slots": SLOTS, "chunk": CHUNK} | options)


def rewrite(source, path, convert, keys=None):
    """Writes the GGUF file `source` to `path` with other tensors: convert(tensor, values) takes a TensorInfo and its
    values as float32, and returns an array to store, or (bytes, GGMLQuantizationType) for a type NumPy lacks, or None
    for none. keys: metadata that is changed, added, or left out where the value is None."""
    source, reader, keys = qengine.GGUF(source), gguf.GGUFReader(str(source)), dict(keys or {})
    writer = gguf.GGUFWriter(str(path), source.get("general.architecture", str))
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            if (value := keys.pop(key, field.contents())) is not None:
                writer.add_key_value(key, value, field.types[0], sub_type)
    for key, value in keys.items():
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in source.tensors.items():
        if (stored := convert(tensor, source.floats(name))) is not None:
            array, kind = stored if isinstance(stored, tuple) else (stored, None)
            writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def as_stored(source):
    """For `rewrite`: the tensors of the file `source` as they are."""
    source = qengine.GGUF(source)

    def convert(tensor, values):
        return values if tensor.type == "F32" else (source.data(tensor.name), gguf.GGMLQuantizationType[tensor.type])

    return convert


def write_as_float32(source, path):
    """The same model with every tensor dequantised."""
    rewrite(source, path, lambda tensor, values: values)


EXPERTS, USED, EXPERT_DIM, SHARED_DIM = 6, 3, 256, 512
SIZES = {"expert_count": EXPERTS, "expert_used_count": USED, "expert_feed_forward_length": EXPERT_DIM,
         "expert_shared_feed_forward_length": SHARED_DIM}


def expert_tensors(hidden, fused=False):
    """Names and shapes of the tensors that make the MLP of a block a mixture of experts."""
    inputs = {"gate_up": 2 * EXPERT_DIM} if fused else {"gate": EXPERT_DIM, "up": EXPERT_DIM}
    return {"ffn_gate_inp": (EXPERTS, hidden), "ffn_gate_inp_shexp": (hidden,),
            **{f"ffn_{name}_exps": (EXPERTS, n, hidden) for name, n in inputs.items()},
            "ffn_down_exps": (EXPERTS, hidden, EXPERT_DIM), "ffn_gate_shexp": (SHARED_DIM, hidden),
            "ffn_up_shexp": (SHARED_DIM, hidden), "ffn_down_shexp": (hidden, SHARED_DIM)}


@functools.cache
def metadata_of_tiny():
    """(key, value, types) of each key of the small model. The package is slow to read them."""
    return [(key, field.contents(), field.types) for key, field in gguf.GGUFReader(TINY).fields.items()
            if not key.startswith("GGUF.") and key != "general.architecture"]


def write_experts(path, kinds=None, keys=None, change=None, fused=False):
    """Writes the small model of the tests as a mixture of experts of random weights.

    kinds: name of a tensor, without block and ending -> its type; by default routers are F32 and the others Q8_0.
    keys: metadata that is changed, or left out where the value is None. change(name, values): the values that are
    stored, or None for none. fused: whether gate and up of an expert are one tensor."""
    source, keys = qengine.GGUF(TINY), {"feed_forward_length": None} | SIZES | (keys or {})
    writer = gguf.GGUFWriter(str(path), "qwen35moe")
    for key, value, types in metadata_of_tiny():
        name = key.removeprefix("qwen35.")
        if name not in keys:
            sub_type = types[-1] if types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(f"qwen35moe.{name}" if name != key else key, value, types[0], sub_type)
    for name, value in keys.items():
        if value is not None:
            writer.add_key_value(f"qwen35moe.{name}", value, gguf.GGUFValueType.get_type(value))
    for name, tensor in source.tensors.items():
        if ".ffn_" not in name:
            kind = gguf.GGMLQuantizationType[tensor.type]
            writer.add_tensor(name, source.data(name), raw_dtype=None if tensor.type == "F32" else kind)
    rng = np.random.default_rng(11)
    for block in range(source.get("qwen35.block_count", int)):
        for name, shape in expert_tensors(source.get("qwen35.embedding_length", int), fused).items():
            full, is_router = f"blk.{block}.{name}.weight", "_inp" in name
            values = rng.standard_normal(shape, np.float32) * np.float32((2.0 if is_router else 1.0) / shape[-1] ** 0.5)
            values = values if change is None else change(full, values)
            if values is not None:
                kind = (kinds or {}).get(name, "F32" if is_router else "Q8_0")
                raw, number = stored(kind, values.reshape(-1, values.shape[-1]))
                raw = raw.reshape(*values.shape[:-1], -1)
                writer.add_tensor(full, raw.view(np.float32) if kind == "F32" else raw, raw_dtype=number)
    for step in writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close:
        step()


PROMPT = [5, 300, 77, 1024, 9, 2048, 31] * 6


def results(path, card):
    """(logits of PROMPT, float32 [42, n_vocab]; the 6 greedy tokens after it) of a model file."""
    engine = qengine.load(str(path), card=card, ctx=128, progress=False)
    tokens = [delta.token_id for delta in engine.submit(qengine.Request(PROMPT, max_tokens=6, ignore_eos=True))]
    logits = engine.evaluate(PROMPT)
    engine.close()
    return logits, tokens


# ---- stored, simply ------------------------------------------------------------------------------------
# The gguf package quantises to some types only. For the others with a code for each weight, one scale spans each block
# of the file, which is not the best one.


def stored(kind, values):
    """float32 [n, k] as `rewrite` takes it in a type of kernels/formats: (uint8 [n, bytes of a row], its number)."""
    number = gguf.GGMLQuantizationType[kind]
    if kind in FORMATS:
        return quantize(kind, values), number
    if kind == "BF16":      # the upper halves: truncation is rounding enough here
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(FLOATS[kind].dtype).view(np.uint8), number


def quantize(kind, values):
    """float32 [n, k] as a GGUF file stores it in one of FORMATS: uint8 [n, bytes of a row]."""
    format = FORMATS[kind]
    try:
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        return _spanned(format, values).reshape(len(values), -1) if has_codes(format) else \
            code_books.quantize(format, values)


def has_codes(format):
    """Whether each weight has a code of its own."""
    return len(format.values) == 2**format.bits


def _spanned(format, values):
    """All bits of integer scales are set; d, and dmin, reach from the least to the largest weight of a block."""
    blocks, q = values.reshape(-1, format.file_block), format.values.astype(np.float32)
    raw = np.full((len(blocks), format.file_bytes), 255, np.uint8)
    largest, least = blocks.max(axis=1, keepdims=True), blocks.min(axis=1, keepdims=True)
    format.scales.put(raw, 1.0)
    _, (unit, *_), minimum = (np.broadcast_to(part, (len(blocks) * format.per_unit, 32))[0]
                              for part in formats.factors(format, raw, np.float32))
    if format.minima:
        least = np.minimum(least, 0)
        scales = np.concatenate([(largest - least) / q.max() / unit, -least / minimum[0]], axis=1)
    else:
        scales = np.maximum(np.maximum(largest / q.max(), least / q.min()), 1e-7) / unit
    format.scales.put(raw, scales)
    _, scale, minimum = (np.broadcast_to(part, (len(blocks) * format.per_unit, 32))[:, :, None]
                         for part in formats.factors(format, raw, np.float32))
    codes = abs(values.reshape(-1, 32, 1) - (q * scale - minimum)).argmin(axis=2).astype(np.uint8)
    return _with_planes(format, raw, in_order(codes) if format.in_order else in_planes(codes, format.bits))


def _with_planes(format, raw, planes):
    """Blocks of a file that have these bytes in their planes. `split` tells of each bit of a block in which bit of the
    planes it is found."""
    one_bit_each = np.packbits(np.eye(8 * format.file_bytes, dtype=np.uint8), axis=1, bitorder="little")
    of_zeros, _ = formats.split(format, np.zeros(format.file_bytes, np.uint8))
    changed, _ = formats.split(format, one_bit_each)
    changed = (changed.reshape(len(one_bit_each), -1) ^ of_zeros.reshape(-1))
    at, of_planes = np.nonzero(np.unpackbits(changed, axis=1))
    bits = np.unpackbits(raw, axis=1, bitorder="little")
    bits[:, at] = np.unpackbits(planes.reshape(len(raw), -1) ^ of_zeros.reshape(-1), axis=1)[:, of_planes]
    return np.packbits(bits, axis=1, bitorder="little")


def as_types(*kinds):
    """For `rewrite`: matrices in these types, one after the other, where their rows are whole blocks of it."""
    turn = itertools.count()

    def convert(tensor, values):
        if tensor.type != "Q8_0":
            return values
        fitting = [kind for kind in kinds if tensor.shape[1] % FORMATS[kind].file_block == 0] or ["Q8_0"]
        kind = fitting[next(turn) % len(fitting)]
        return stored(kind, values)

    return convert
