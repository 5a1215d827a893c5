"""The small model of the tests; copies of model files with their tensors in another type, and what a model says."""

import itertools

import gguf
import numpy as np

import qengine
from kernels import formats
from kernels.formats import BLOCK, FLOATS, FORMATS
from tests.oracle import DATA

TINY = str(DATA / "tiny-Q8_0.gguf")
SLOTS, CONTEXT, CHUNK = 3, 1024, 64


def load_tiny(card, **options):
    """An engine with the small model of random weights that the tests have."""
    return qengine.load(TINY, card=card, progress=False, **{"ctx": CONTEXT, "slots": SLOTS, "chunk": CHUNK} | options)


def rewrite(source, path, convert):
    """Writes the GGUF file `source` to `path` with other tensors: convert(tensor, values) takes a TensorInfo and its
    values as float32, and returns an array to store, or (bytes, GGMLQuantizationType) for a type NumPy lacks."""
    source, reader = qengine.GGUF(source), gguf.GGUFReader(str(source))
    writer = gguf.GGUFWriter(str(path), "qwen35")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    for name, tensor in source.tensors.items():
        stored = convert(tensor, source.floats(name))
        array, kind = stored if isinstance(stored, tuple) else (stored, None)
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_as_float32(source, path):
    """The same model with every tensor dequantised."""
    rewrite(source, path, lambda tensor, values: values)


PROMPT = [5, 300, 77, 1024, 9, 2048, 31] * 6


def results(path, card):
    """(logits of PROMPT, float32 [42, n_vocab]; the 6 greedy tokens after it) of a model file."""
    engine = qengine.load(str(path), card=card, ctx=128, progress=False)
    tokens = [delta.token_id for delta in engine.submit(qengine.Request(PROMPT, max_tokens=6, ignore_eos=True))]
    logits = engine.evaluate(PROMPT)
    engine.close()
    return logits, tokens


# ---- stored, simply ------------------------------------------------------------------------------------
# The gguf package quantises to some types only. For the others these functions choose scales that span each block,
# which are not the best ones.


def stored(kind, values):
    """float32 [n, k] as `rewrite` takes it in a type of kernels/formats.py: (uint8 [n, bytes of a row], its number)."""
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
        quantizer = _with_scale if format.file_block == BLOCK else _with_halves if format.halves else _with_minimum
        return quantizer(format, values).reshape(len(values), -1)


def _with_scale(format, values):
    """A format whose blocks of 32 have one scale each: the q that are nearest."""
    blocks, q = values.reshape(-1, BLOCK), format.values.astype(np.float32)
    step, step_bytes = _float16_steps(np.maximum(blocks.max(axis=1) / q.max(), blocks.min(axis=1) / q.min()), 1)
    codes = abs(blocks[:, :, None] - step[:, :, None] * q).argmin(axis=2).astype(np.uint8)
    raw = _with_codes(format, codes)
    raw[:, formats.scale_places(format)] = step_bytes
    return raw


def _with_codes(format, codes):
    """Blocks of a file, uint8 [blocks, bytes], that hold codes uint8 [blocks, 32]. `split` tells of each bit of a block
    which bit of which code it is."""
    one_bit_each = np.packbits(np.eye(8 * format.file_bytes, dtype=np.uint8), axis=1, bitorder="little")
    of_zeros, _ = formats.split(format, np.zeros(format.file_bytes, np.uint8))
    changed, _ = formats.split(format, one_bit_each)
    at, of_codes = np.nonzero(np.unpackbits(changed ^ of_zeros, axis=1))
    bits = np.zeros((len(codes), 8 * format.file_bytes), np.uint8)
    bits[:, at] = np.unpackbits(codes ^ of_zeros, axis=1)[:, of_codes]
    return np.packbits(bits, axis=1, bitorder="little")


def _float16_steps(largest, steps):
    """The float16 step, as float32, in which `steps` of them reach `largest`; and its bytes."""
    step = np.maximum(largest / steps, 1e-7).astype(np.float16)
    return step.astype(np.float32)[:, None], step[:, None].view(np.uint8)


def _with_minimum(format, values):
    """Q4_K and Q5_K: eight blocks of 32, each scale * q - minimum."""
    blocks, top = values.reshape(-1, 8, 32), format.values.max()
    least = np.maximum(-blocks.min(axis=2), 0)
    span = (blocks.max(axis=2) + least) / top
    (d, d_bytes), (dmin, dmin_bytes) = _float16_steps(span.max(axis=1), 63), _float16_steps(least.max(axis=1), 63)
    scale = np.clip(np.rint(span / d), 1, 63).astype(np.uint8)
    minimum = np.clip(np.rint(least / dmin), 0, 63).astype(np.uint8)
    q = (blocks + (dmin * minimum)[:, :, None]) / (d * scale)[:, :, None]
    q = np.clip(np.rint(q), 0, top).astype(np.uint8)
    first = scale[:, :4] | (scale[:, 4:] >> 4) << 6, minimum[:, :4] | (minimum[:, 4:] >> 4) << 6
    packed = [d_bytes, dmin_bytes, *first, scale[:, 4:] & 15 | (minimum[:, 4:] & 15) << 4]
    if format.bits == 5:
        packed.append(np.bitwise_or.reduce((q >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1))
    pairs = (q & 15).reshape(-1, 4, 2, 32)
    return np.concatenate([*packed, (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)], axis=1)


def _with_halves(_, values):
    """Q6_K: sixteen half blocks of 16, each scale * (q - 32)."""
    blocks = values.reshape(-1, 16, 16)
    span = abs(blocks).max(axis=2) / 31
    d, d_bytes = _float16_steps(span.max(axis=1), 127)
    scale = np.clip(np.rint(span / d), 1, 127).astype(np.int8)
    q = np.clip(np.rint(blocks / (d * scale)[:, :, None]), -32, 31).astype(np.int8).reshape(-1, 2, 4, 32)
    q = (q + np.int8(32)).view(np.uint8)
    low = (q[:, :, :2] & 15 | (q[:, :, 2:] & 15) << 4).reshape(-1, 128)
    high = np.bitwise_or.reduce((q >> 4) << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=2).reshape(-1, 64)
    return np.concatenate([low, high, scale.view(np.uint8), d_bytes], axis=1)


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
