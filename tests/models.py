"""The small model of the tests; copies of model files with their tensors in another type, and what a model says."""

import functools
import itertools

import gguf
import numpy as np

import qengine
from kernels.formats import FLOATS, FORMATS
from models.quantize import quantize, rewrite
from tests.oracle import DATA

TINY = str(DATA / "tiny-Q8_0.gguf")
SLOTS, CONTEXT, CHUNK = 3, 1024, 64


def load_tiny(card, **options):
    """An engine with the small model of random weights that the tests have."""
    return qengine.load(TINY, card=card, progress=False, **{"ctx": CONTEXT, "slots": SLOTS, "chunk": CHUNK} | options)


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


def results(path, card, **options):
    """(logits of PROMPT, float32 [42, n_vocab]; the 6 greedy tokens after it) of a model file."""
    engine = qengine.load(str(path), card=card, ctx=128, progress=False, **options)
    tokens = [delta.token_id for delta in engine.submit(qengine.Request(PROMPT, max_tokens=6, ignore_eos=True))]
    logits = engine.evaluate(PROMPT)
    engine.close()
    return logits, tokens


# ---- stored, simply ------------------------------------------------------------------------------------

def stored(kind, values):
    """float32 [n, k] as `rewrite` takes it in a type of kernels/formats: (uint8 [n, bytes of a row], its number)."""
    number = gguf.GGMLQuantizationType[kind]
    if kind in FORMATS:
        return quantize(kind, values), number
    if kind == "BF16":      # the upper halves: truncation is rounding enough here
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(FLOATS[kind].dtype).view(np.uint8), number


def has_codes(format):
    """Whether each weight has a code of its own."""
    return len(format.values) == 2**format.bits


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
