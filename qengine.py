"""qengine: Qwen3.5-style hybrid language models on any NVIDIA card from Volta on, and on a plain CPU.

Table of contents
    1  Config and GGUF               what the model file says: metadata, tensors, shapes
    2  Tokenizer and chat template   text to token ids and back, messages to a prompt

Two kinds of error leave this file on purpose: `ModelError` for a file that cannot be used, `RequestError`
for a request that cannot be answered. Each carries one sentence that a person can act on.
"""

import codecs
import dataclasses
import datetime
import json
import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
import sentencepiece
import tokenizers

# ======================================================================================================
# 1  Config and GGUF
# ======================================================================================================


class ModelError(Exception):
    """A model file that cannot be used. The text is one sentence: file, key or tensor, byte position."""


class RequestError(Exception):
    """A request that cannot be answered. `field` names the part of the request that is at fault."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


# GGML tensor types: number -> (name, weights per block, bytes per block). All of them, so that a file in
# a format that the engine does not run is refused by the format's name.
GGML_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}
SUPPORTED_TYPES = ("Q8_0", "F16", "BF16", "F32")

# GGUF metadata: type number -> struct format. 7 is bool, 8 string, 9 array.
GGUF_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
GGUF_BOOL, GGUF_STRING, GGUF_ARRAY = 7, 8, 9
MAX_KEY_BYTES = 65535  # of the GGUF specification; also bounds what an error message repeats


@dataclass(frozen=True)
class TensorInfo:
    """One row of a GGUF tensor table."""

    name: str
    shape: tuple[int, ...]  # row-major: (rows, columns); GGUF stores the reverse
    type: str               # "Q8_0", "F32", ...
    offset: int             # bytes from the start of the file
    nbytes: int


class _Cursor:
    """Reads little-endian values from `data` one after the other and never past its end."""

    def __init__(self, data: memoryview, path: str):
        self.data, self.path, self.at = data, path, 0

    def fail(self, message: str, at: int | None = None):
        raise ModelError(f"{self.path}: {message} (byte {self.at if at is None else at})")

    def skip(self, n: int, what: str) -> int:
        """Step over n bytes; returns where they start."""
        start, left = self.at, len(self.data) - self.at
        if n > left:
            self.fail(f"the file ends early: {what} needs {n} bytes and {left} are left")
        self.at += n
        return start

    def number(self, format: str, what: str):
        return struct.unpack_from(format, self.data, self.skip(struct.calcsize(format), what))[0]

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.number("<Q", f"the length of {what}")
        if limit is not None and length > limit:
            self.fail(f"{what} is {length} bytes long, more than {limit}")
        start = self.skip(length, what)
        try:
            return str(self.data[start:self.at], "utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8 text", start)

    def value(self, kind: int, what: str):
        """A metadata value: int, float, bool, str, list of str, or NumPy array (of numbers or bools)."""
        if kind == GGUF_STRING:
            return self.string(what)
        if kind == GGUF_ARRAY:
            return self.array(what)
        if kind == GGUF_BOOL:
            byte = self.number("<B", what)
            if byte > 1:
                self.fail(f"{what} is a truth value but holds {byte}", self.at - 1)
            return byte == 1
        if kind not in GGUF_NUMBERS:
            self.fail(f"{what} has the unknown value type {kind}")
        return self.number(GGUF_NUMBERS[kind], what)

    def array(self, what: str):
        kind = self.number("<I", f"the element type of {what}")
        count = self.number("<Q", f"the length of {what}")
        if kind == GGUF_STRING:
            return self.strings(count, what)
        if kind != GGUF_BOOL and kind not in GGUF_NUMBERS:
            self.fail(f"{what} is an array of the unsupported value type {kind}")
        dtype = np.dtype("u1" if kind == GGUF_BOOL else GGUF_NUMBERS[kind])
        start = self.skip(count * dtype.itemsize, what)
        array = np.frombuffer(self.data[start:self.at], dtype)
        if kind != GGUF_BOOL:
            return array
        if array.size and array.max() > 1:
            self.fail(f"{what} holds truth values other than 0 and 1", start)
        return array.astype(bool)

    def strings(self, count: int, what: str) -> list[str]:
        """An array of strings. A vocabulary has 250,000 of them, so this loop is written for speed."""
        if count * 8 > len(self.data) - self.at:
            self.fail(f"the file ends early: {what} claims {count} strings")
        data, at, end, found, length = self.data, self.at, len(self.data), [], struct.Struct("<Q")
        try:
            for _ in range(count):
                stop = at + 8 + length.unpack_from(data, at)[0]
                if stop > end:
                    self.fail(f"the file ends early: string {len(found)} of {what} goes past the end", at)
                found.append(str(data[at + 8:stop], "utf-8"))
                at = stop
        except struct.error:
            self.fail(f"the file ends early: string {len(found)} of {what} has no length", at)
        except UnicodeDecodeError:
            self.fail(f"string {len(found)} of {what} is not UTF-8 text", at)
        self.at = at
        return found


_REQUIRED = object()


class GGUF:
    """A GGUF model file (version 2 or 3, little-endian), mapped into memory and checked before use.

    metadata   key -> int, float, bool, str, list of str, or NumPy array (of numbers or bools)
    tensors    name -> TensorInfo
    data(name) the tensor's bytes as stored, without a copy; floats(name) its values

    Counts and lengths are compared with the bytes that are left before anything is allocated, so that a
    damaged file ends in a `ModelError` at once. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """

    def __init__(self, path: str | Path):
        self.path = str(path)
        self.metadata: dict = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._bytes = self._map()
        cursor = _Cursor(self._bytes, self.path)
        n_tensors, n_keys = self._read_header(cursor)
        for _ in range(n_keys):
            self._read_key(cursor)
        rows = [self._read_tensor(cursor) for _ in range(n_tensors)]
        self._place(rows, cursor)

    def _map(self) -> memoryview:
        try:
            with open(self.path, "rb") as file:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except OSError as error:
            raise ModelError(f"{self.path}: cannot be opened: {error.strerror}") from None
        except ValueError:  # mmap's word for an empty file
            raise ModelError(f"{self.path}: the file is empty") from None

    def _read_header(self, cursor: _Cursor) -> tuple[int, int]:
        start = cursor.skip(4, "the magic number")
        if self._bytes[start:cursor.at] != b"GGUF":
            cursor.fail("not a GGUF file: it does not begin with the letters GGUF", 0)
        version = cursor.number("<I", "the version")
        if version not in (2, 3):
            big_endian = ", and seems to be byte-swapped (big-endian)" if version & 0xFFFF == 0 else ""
            cursor.fail(f"GGUF version {version} is not 2 or 3{big_endian}", 4)
        n_tensors = cursor.number("<Q", "the tensor count")
        n_keys = cursor.number("<Q", "the key count")
        least = n_tensors * 32 + n_keys * 13  # the smallest table rows there can be
        if least > len(self._bytes) - cursor.at:
            cursor.fail(f"the file ends early: it claims {n_tensors} tensors and {n_keys} keys", 8)
        return n_tensors, n_keys

    def _read_key(self, cursor: _Cursor):
        at = cursor.at
        key = cursor.string("a metadata key", MAX_KEY_BYTES)
        if key in self.metadata:
            cursor.fail(f"key '{key}' appears twice", at)
        self.metadata[key] = cursor.value(cursor.number("<I", f"the type of key '{key}'"), f"key '{key}'")

    def _read_tensor(self, cursor: _Cursor) -> tuple[TensorInfo, int]:
        """A row of the tensor table, its offset still relative to the data; and where the row stands."""
        at = cursor.at
        name = cursor.string("a tensor name", MAX_KEY_BYTES)
        what = f"tensor '{name}'"
        n_dims = cursor.number("<I", f"the number of dimensions of {what}")
        if not 1 <= n_dims <= 4:
            cursor.fail(f"{what} has {n_dims} dimensions, not 1 to 4", at)
        dims = [cursor.number("<Q", f"a dimension of {what}") for _ in range(n_dims)]
        number = cursor.number("<I", f"the type of {what}")
        offset = cursor.number("<Q", f"the offset of {what}")
        if min(dims) < 1:
            cursor.fail(f"{what} has a dimension of zero", at)
        if number not in GGML_TYPES:
            cursor.fail(f"{what} has the unknown type number {number}", at)
        type, block, block_bytes = GGML_TYPES[number]
        if dims[0] % block:
            cursor.fail(f"{what} has rows of {dims[0]} weights, not a multiple of {type}'s {block}", at)
        nbytes = math.prod(dims) // block * block_bytes  # Python integers: no product wraps
        return TensorInfo(name, tuple(reversed(dims)), type, offset, nbytes), at

    def _place(self, rows: list, cursor: _Cursor):
        """Turn offsets into file positions; every tensor inside the file, aligned, overlapping no other."""
        alignment = self.get("general.alignment", int, 32)
        if alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise ModelError(f"{self.path}: key 'general.alignment' is {alignment}, not a power of two >= 8")
        start = -(-cursor.at // alignment) * alignment
        end = len(self._bytes)
        used = start
        for tensor, at in sorted(rows, key=lambda row: row[0].offset):
            what, position = f"tensor '{tensor.name}'", start + tensor.offset
            if tensor.name in self.tensors:
                cursor.fail(f"{what} appears twice", at)
            if tensor.offset % alignment:
                cursor.fail(f"{what} starts at offset {tensor.offset}, not a multiple of {alignment}", at)
            if position < used:
                cursor.fail(f"{what} overlaps the tensor before it", at)
            used = position + tensor.nbytes
            if used > end:
                cursor.fail(f"{what} ends at byte {used}, past the end of the file at {end}", at)
            self.tensors[tensor.name] = dataclasses.replace(tensor, offset=position)

    def get(self, key: str, kind: type, default=_REQUIRED):
        """metadata[key], which must be of the Python type `kind` (NumPy arrays: np.ndarray)."""
        if key not in self.metadata:
            if default is _REQUIRED:
                raise ModelError(f"{self.path}: key '{key}' is missing")
            return default
        value = self.metadata[key]
        if type(value) is not kind:
            raise ModelError(f"{self.path}: key '{key}' holds {type(value).__name__}, not {kind.__name__}")
        return value

    def data(self, name: str) -> np.ndarray:
        """The tensor as stored, a read-only view: F32 and F16 in their own type, BF16 as uint16, all in the
        tensor's shape; Q8_0 as uint8 [rows, columns / 32 * 34]; any other type as flat uint8."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self._bytes[tensor.offset:tensor.offset + tensor.nbytes], np.uint8)
        plain = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
        if tensor.type in plain:
            return raw.view(plain[tensor.type]).reshape(tensor.shape)
        return raw.reshape(*tensor.shape[:-1], -1) if tensor.type == "Q8_0" else raw

    def floats(self, name: str) -> np.ndarray:
        """The tensor's values as float32 in its shape, all of them finite."""
        tensor, data = self.tensors[name], self.data(name)
        if tensor.type == "Q8_0":
            quants, scales = self.q8_0(name)
            blocks = quants.reshape(-1, 32).astype(np.float32) * scales.reshape(-1, 1).astype(np.float32)
            return blocks.reshape(tensor.shape)
        if tensor.type == "BF16":  # the upper half of a float32
            values = (data.astype(np.uint32) << 16).view(np.float32)
        elif tensor.type in ("F16", "F32"):
            values = data.astype(np.float32)
        else:
            raise ModelError(f"{self.path}: tensor '{name}' is of the unsupported type {tensor.type}")
        if not np.isfinite(values).all():
            raise ModelError(f"{self.path}: tensor '{name}' holds a value that is not a finite number")
        return values

    def q8_0(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A Q8_0 matrix [N, K] as int8 quants [N, K] and float16 scales [N, K / 32], all of them finite."""
        n, k = self.tensors[name].shape
        quants, scales = q8_0_split(self.data(name), n, k)
        if not np.isfinite(scales).all():
            raise ModelError(f"{self.path}: tensor '{name}' holds a block scale that is not a finite number")
        return quants, scales


def q8_0_split(raw: np.ndarray, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Take Q8_0 rows apart: int8 quants [n, k] and float16 scales [n, k / 32]; weight = scale * quant.

    raw holds n * k / 32 blocks of 34 bytes (uint8, any shape), each: float16 scale, 32 int8 quants.
    """
    blocks = raw.reshape(-1).view(np.dtype([("scale", "<f2"), ("quants", "i1", 32)]))
    return np.ascontiguousarray(blocks["quants"]).reshape(n, k), \
        np.ascontiguousarray(blocks["scale"]).reshape(n, k // 32)


# Shapes of the published dense models, from config.json of huggingface.co/Qwen/Qwen3.5-{0.8B,2B,4B,9B,27B};
# the parameter counts agree with those that llama-bench prints (752.39 M for 0.8B). "tiny" is ours.
SYNTHETIC_FIELDS = ("hidden_dim", "ffn_dim", "n_layers", "n_heads", "n_kv_heads", "n_key_heads",
                    "n_value_heads", "n_vocab", "tied_embeddings")
SYNTHETIC = {
    "tiny": (256, 320, 4, 4, 2, 2, 4, 1024, True),
    "0.8b": (1024, 3584, 24, 8, 2, 16, 16, 248320, True),
    "2b": (2048, 6144, 24, 8, 2, 16, 16, 248320, True),
    "4b": (2560, 9216, 32, 16, 4, 16, 32, 248320, True),
    "9b": (4096, 12288, 32, 16, 4, 16, 32, 248320, False),
    "27b": (5120, 17408, 64, 24, 4, 16, 48, 248320, False),
}


@dataclass(frozen=True)
class Config:
    """What a model is: every number that the code below needs, from the file's metadata.

    Layers are counted without the next-token-prediction (nextn, MTP) blocks that may follow them. A layer's
    kind is "linear" (Gated DeltaNet) or "attention" (full attention with an output gate).
    """

    name: str
    hidden_dim: int
    ffn_dim: int
    n_layers: int
    n_nextn: int
    layer_kinds: tuple[str, ...]          # one per layer
    n_heads: int                          # query heads of an attention layer
    n_kv_heads: int                       # query head h reads KV head h // (n_heads / n_kv_heads)
    head_dim: int
    rope_dim: int                         # leading dimensions of a head that are rotated
    rope_base: float
    rope_sections: tuple[int, int, int]   # rotary frequencies of time, height, width
    n_key_heads: int                      # of a linear layer
    n_value_heads: int                    # value head h reads key head h % n_key_heads
    linear_head_dim: int
    conv_width: int                       # taps of the causal convolution
    norm_eps: float
    n_vocab: int
    tied_embeddings: bool                 # the output head is the embedding table
    context_length: int                   # tokens the model was made for

    @property
    def query_dim(self) -> int:
        """Width of the attention heads side by side. attn_q gives twice this: query and gate per head."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def key_dim(self) -> int:
        return self.n_key_heads * self.linear_head_dim

    @property
    def value_dim(self) -> int:
        return self.n_value_heads * self.linear_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of a linear layer's convolution: q, k and v."""
        return 2 * self.key_dim + self.value_dim

    @property
    def n_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and row-major shape of every tensor that the model's file holds."""
        shapes = {"token_embd.weight": (self.n_vocab, self.hidden_dim),
                  "output_norm.weight": (self.hidden_dim,)}
        if not self.tied_embeddings:
            shapes["output.weight"] = (self.n_vocab, self.hidden_dim)
        for i, kind in enumerate(self.layer_kinds + ("attention",) * self.n_nextn):
            for name, shape in self._layer_shapes(kind, nextn=i >= self.n_layers).items():
                shapes[f"blk.{i}.{name}"] = shape
        return shapes

    def _layer_shapes(self, kind: str, nextn: bool) -> dict[str, tuple[int, ...]]:
        hidden, ffn, n_v = self.hidden_dim, self.ffn_dim, self.n_value_heads
        shapes = {"attn_norm.weight": (hidden,), "post_attention_norm.weight": (hidden,),
                  "ffn_gate.weight": (ffn, hidden), "ffn_up.weight": (ffn, hidden),
                  "ffn_down.weight": (hidden, ffn)}
        if kind == "linear":
            shapes |= {"attn_qkv.weight": (self.conv_dim, hidden),
                       "attn_gate.weight": (self.value_dim, hidden),
                       "ssm_alpha.weight": (n_v, hidden), "ssm_beta.weight": (n_v, hidden),
                       "ssm_conv1d.weight": (self.conv_dim, self.conv_width), "ssm_a": (n_v,),
                       "ssm_dt.bias": (n_v,), "ssm_norm.weight": (self.linear_head_dim,),
                       "ssm_out.weight": (hidden, self.value_dim)}
        else:
            shapes |= {"attn_q.weight": (2 * self.query_dim, hidden), "attn_k.weight": (self.kv_dim, hidden),
                       "attn_v.weight": (self.kv_dim, hidden), "attn_q_norm.weight": (self.head_dim,),
                       "attn_k_norm.weight": (self.head_dim,), "attn_output.weight": (hidden, self.query_dim)}
        if nextn:
            shapes |= {"nextn.eh_proj.weight": (hidden, 2 * hidden), "nextn.enorm.weight": (hidden,),
                       "nextn.hnorm.weight": (hidden,), "nextn.shared_head_norm.weight": (hidden,)}
        return shapes

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> "Config":
        """Read a `qwen35` file's metadata and check that its tensors are what the metadata promises."""
        architecture = gguf.get("general.architecture", str)
        if architecture != "qwen35":
            raise ModelError(f"{gguf.path}: architecture '{architecture}' is not supported, 'qwen35' is")
        config = _read_config(gguf)
        _check_config(config, gguf.path)
        _check_tensors(config, gguf)
        return config

    @classmethod
    def synthetic(cls, name: str) -> "Config":
        """The shapes of a published model, for random weights: "tiny", "0.8b", "2b", "4b", "9b" or "27b"."""
        if name not in SYNTHETIC:
            raise ModelError(f"synthetic:{name}: there is no such model, only {', '.join(SYNTHETIC)}")
        sizes = dict(zip(SYNTHETIC_FIELDS, SYNTHETIC[name], strict=True))
        return cls(name=f"synthetic:{name}", n_nextn=0, layer_kinds=_kinds_by_interval(sizes["n_layers"], 4),
                   head_dim=256, rope_dim=64, rope_base=1e7, rope_sections=(11, 11, 10), linear_head_dim=128,
                   conv_width=4, norm_eps=1e-6, context_length=262144, **sizes)


def _kinds_by_interval(n_layers: int, interval: int) -> tuple[str, ...]:
    return tuple("linear" if (i + 1) % interval else "attention" for i in range(n_layers))


def _read_config(gguf: GGUF) -> Config:
    def positive(key: str, default=_REQUIRED) -> int:
        value = gguf.get(f"qwen35.{key}", int, default)
        if not 0 < value < 2**31:
            raise ModelError(f"{gguf.path}: key 'qwen35.{key}' is {value}, not a sensible size")
        return value

    n_blocks = positive("block_count")
    if n_blocks > len(gguf.tensors):  # before anything is made of this length
        raise ModelError(f"{gguf.path}: key 'qwen35.block_count' is {n_blocks}, more than the tensors")
    n_nextn = gguf.get("qwen35.nextn_predict_layers", int, 0)
    if not 0 <= n_nextn < n_blocks:
        raise ModelError(f"{gguf.path}: key 'qwen35.nextn_predict_layers' is {n_nextn} of {n_blocks} blocks")
    scaling = gguf.get("qwen35.rope.scaling.type", str, "none")
    if scaling != "none":
        raise ModelError(f"{gguf.path}: rotary scaling '{scaling}' is not supported")
    sections = gguf.get("qwen35.rope.dimension_sections", np.ndarray)
    if len(sections) < 3 or any(sections[3:]):
        raise ModelError(f"{gguf.path}: key 'qwen35.rope.dimension_sections' is {list(sections)[:8]}, "
                         "not time, height, width and 0")
    embedding = gguf.tensors.get("token_embd.weight")
    head_dim = positive("attention.key_length")
    if positive("attention.value_length") != head_dim:
        raise ModelError(f"{gguf.path}: keys and values of attention heads differ in length")
    config = Config(
        name=gguf.get("general.name", str, Path(gguf.path).stem),
        hidden_dim=positive("embedding_length"),
        ffn_dim=positive("feed_forward_length"),
        n_layers=n_blocks - n_nextn,
        n_nextn=n_nextn,
        layer_kinds=_layer_kinds(gguf, n_blocks, n_nextn, positive("full_attention_interval", 4)),
        n_heads=positive("attention.head_count"),
        n_kv_heads=positive("attention.head_count_kv"),
        head_dim=head_dim,
        rope_dim=positive("rope.dimension_count"),
        rope_base=gguf.get("qwen35.rope.freq_base", float),
        rope_sections=tuple(int(s) for s in sections[:3]),
        n_key_heads=positive("ssm.group_count"),
        n_value_heads=positive("ssm.time_step_rank"),
        linear_head_dim=positive("ssm.state_size"),
        conv_width=positive("ssm.conv_kernel"),
        norm_eps=gguf.get("qwen35.attention.layer_norm_rms_epsilon", float),
        n_vocab=embedding.shape[0] if embedding else 1,
        tied_embeddings="output.weight" not in gguf.tensors,
        context_length=positive("context_length"),
    )
    if positive("ssm.inner_size") != config.value_dim:
        raise ModelError(f"{gguf.path}: key 'qwen35.ssm.inner_size' is not time_step_rank * state_size, "
                         f"{config.value_dim}")
    return config


def _layer_kinds(gguf: GGUF, n_blocks: int, n_nextn: int, interval: int) -> tuple[str, ...]:
    """From the explicit list where there is one, else (older files) every interval-th layer is attention."""
    key = "qwen35.attention.recurrent_layers"
    recurrent = gguf.get(key, np.ndarray, None)
    if recurrent is None:
        return _kinds_by_interval(n_blocks - n_nextn, interval)
    if recurrent.dtype != bool or len(recurrent) != n_blocks:
        raise ModelError(f"{gguf.path}: key '{key}' is not {n_blocks} truth values")
    return tuple("linear" if r else "attention" for r in recurrent[:n_blocks - n_nextn])


def _check_config(config: Config, path: str):
    """What the kernels take for granted."""
    c = config
    for met, rule in (
        (c.head_dim == 256, f"attention heads are {c.head_dim} wide, not 256"),
        (c.linear_head_dim == 128, f"linear-attention heads are {c.linear_head_dim} wide, not 128"),
        (c.conv_width == 4, f"the convolution has {c.conv_width} taps, not 4"),
        (c.n_heads % c.n_kv_heads == 0,
         f"{c.n_heads} query heads do not share {c.n_kv_heads} KV heads evenly"),
        (c.n_value_heads % c.n_key_heads == 0,
         f"{c.n_value_heads} value heads do not share {c.n_key_heads} key heads evenly"),
        (c.hidden_dim % 32 == 0, f"the hidden size {c.hidden_dim} is not a multiple of 32"),
        (c.ffn_dim % 32 == 0, f"the feed-forward size {c.ffn_dim} is not a multiple of 32"),
        (c.rope_dim % 2 == 0 and c.rope_dim <= c.head_dim,
         f"{c.rope_dim} rotary dimensions do not fit a head"),
        (min(c.rope_sections) >= 0 and sum(c.rope_sections) == c.rope_dim // 2,
         f"the rotary sections {c.rope_sections} do not add up to {c.rope_dim // 2}"),
        (1 < c.rope_base < float("inf"), f"the rotary base is {c.rope_base}"),
        (0 < c.norm_eps < 1, f"the epsilon of the norms is {c.norm_eps}"),
    ):
        if not met:
            raise ModelError(f"{path}: {rule}")


def _check_tensors(config: Config, gguf: GGUF):
    """Each tensor there, of the right shape and of a type the engine runs; none that would be ignored."""
    shapes = config.tensor_shapes()
    for name, shape in shapes.items():
        tensor = gguf.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{gguf.path}: tensor '{name}' is missing")
        if tensor.shape != shape:
            raise ModelError(f"{gguf.path}: tensor '{name}' (byte {tensor.offset}) has the shape "
                             f"{tensor.shape}, not {shape}")
        allowed = SUPPORTED_TYPES if len(shape) == 2 else ("F32", "F16", "BF16")
        if tensor.type not in allowed:
            raise ModelError(f"{gguf.path}: tensor '{name}' (byte {tensor.offset}) is of type "
                             f"{tensor.type}, not {', '.join(allowed)}")
    unknown = next((name for name in gguf.tensors if name not in shapes), None)
    if unknown is not None:
        raise ModelError(f"{gguf.path}: tensor '{unknown}' is not part of the qwen35 architecture")
    n_tokens = len(gguf.get("tokenizer.ggml.tokens", list))
    if n_tokens != config.n_vocab:
        raise ModelError(f"{gguf.path}: the vocabulary has {n_tokens} tokens and the embedding table "
                         f"{config.n_vocab} rows")


# ======================================================================================================
# 2  Tokenizer and chat template
# ======================================================================================================

# Token types of GGUF, the same numbers as SentencePiece's.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# How text is cut before byte pairs are merged; the two differ in whether combining marks belong to words.
# From llama.cpp's src/llama-vocab.cpp. Text is taken as it comes: no Unicode normalisation (NFC), as there.
_WORD = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?%s+|\p{N}"
_REST = r" ?[^\s%s\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {
    "qwen2": _WORD % r"\p{L}" + "|" + _REST % r"\p{L}",
    "qwen35": _WORD % r"[\p{L}\p{M}]" + "|" + _REST % r"\p{L}\p{M}",
}

# Tokens that end a turn in every file that has them, whether or not its metadata says so.
END_TOKENS = ("<|im_end|>", "<|endoftext|>")

# Put inside what looks like a control token in a message, so that no message can end its own turn; taken out
# again by `Tokenizer.encode`. A Unicode noncharacter, reserved for such use inside a program.
GUARD = "\ufdd0"


class Tokenizer:
    """Text to token ids and back. Subclasses say how plain text is cut into tokens.

    n_vocab       number of tokens
    pieces        list of bytes: what each token stands for
    eos_ids       the tokens that end an answer
    prefix, suffix   tokens that the file wants around a text (`encode(ends=True)`), mostly none

    Control tokens (<|im_end|>, ...) are matched in text only where `allow_special` is true, and are left out
    of decoded text unless `special` is true. Tags such as <think> are ordinary tokens in both directions.
    """

    leading_space = False  # whether encoding puts a space before the text, which decoding takes away

    def __init__(self, pieces: list[bytes], control: dict[str, int], eos_ids, prefix=(), suffix=()):
        self.pieces, self.n_vocab = pieces, len(pieces)
        self.eos_ids, self.prefix, self.suffix = frozenset(eos_ids), list(prefix), list(suffix)
        self.control = control
        self._control_pattern = _any_of(control)
        hidden = set(control.values())
        self._shown = [b"" if i in hidden else piece for i, piece in enumerate(pieces)]

    def _encode_plain(self, texts: list[str]) -> list[list[int]]:
        raise NotImplementedError

    def encode(self, text: str, allow_special: bool = True, ends: bool = False) -> list[int]:
        """Token ids of a text. With allow_special=False a control token in it is spelt out as text."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError("prompt", "the prompt holds half of a surrogate pair") from None
        parts = self._control_pattern.split(text) if allow_special else [text]
        plain = self._encode_plain([part.replace(GUARD, "") for part in parts[::2]])
        ids = plain[0]
        for name, more in zip(parts[1::2], plain[1:], strict=True):
            ids += [self.control[name], *more]
        return self.prefix + ids + self.suffix if ends else ids

    def decode(self, ids, special: bool = False) -> str:
        """The text of a whole sequence of ids; bytes that are not UTF-8 become the replacement character."""
        bad = next((i for i in ids if not 0 <= i < self.n_vocab), None)
        if bad is not None:
            raise RequestError("prompt", f"token id {bad} is outside 0 .. {self.n_vocab - 1}")
        table = self.pieces if special else self._shown
        text = b"".join(table[i] for i in ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.leading_space else text

    def stream_decoder(self) -> "StreamDecoder":
        return StreamDecoder(self._shown)


class StreamDecoder:
    """Text from one token after another: a character split over tokens comes with its last byte.

    Unlike `Tokenizer.decode` it keeps a first space, which belongs between the prompt and its continuation.
    """

    def __init__(self, pieces: list[bytes]):
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._pieces[token])

    def flush(self) -> str:
        """What is left at the end: the replacement character for a character that was begun, else nothing."""
        return self._decoder.decode(b"", True)


def _any_of(strings) -> re.Pattern:
    """Matches any of the strings, as a group, the longest first; nothing when there are none."""
    longest_first = sorted(strings, key=len, reverse=True)
    return re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")


class BPETokenizer(Tokenizer):
    """Byte-level byte-pair encoding (GGUF model "gpt2"), through the `tokenizers` library."""

    def __init__(self, gguf: GGUF):
        pattern = PRE_TOKENIZERS.get(pre := gguf.get("tokenizer.ggml.pre", str))
        if pattern is None:
            raise ModelError(f"{gguf.path}: pre-tokenizer '{pre}' is not supported, "
                             f"{' and '.join(PRE_TOKENIZERS)} are")
        tokens, types = _read_tokens(gguf)
        ids = {token: i for i, token in enumerate(tokens)}
        if len(ids) < len(tokens):
            raise ModelError(f"{gguf.path}: key 'tokenizer.ggml.tokens' has the same token twice")
        merges = _read_merges(gguf, ids)
        self._tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=merges))
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        self._tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False)
                                    for token, type in zip(tokens, types) if type == USER_DEFINED and token])
        to_byte = str.maketrans({char: chr(byte) for byte, char in enumerate(BYTE_ALPHABET)})
        pieces = [_byte_level_piece(token, to_byte) if type == NORMAL else token.encode()
                  for token, type in zip(tokens, types)]
        super().__init__(pieces, **_special_tokens(gguf, tokens, types))

    def _encode_plain(self, texts):
        # The batch call, also for one text: it releases the interpreter lock, `encode` does not.
        return [encoding.ids for encoding
                in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1),
                 *range(ord("\xae"), ord("\xff") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(256 + others.index(byte)) if byte in others else chr(byte) for byte in range(256)]


BYTE_ALPHABET = _byte_alphabet()


def _byte_level_piece(token: str, to_byte: dict) -> bytes:
    try:
        return token.translate(to_byte).encode("latin-1")
    except UnicodeEncodeError:  # a token outside the byte alphabet, which no text reaches: padding
        return token.encode()


def _read_tokens(gguf: GGUF) -> tuple[list[str], list[int]]:
    """The vocabulary and each token's type."""
    tokens = gguf.get("tokenizer.ggml.tokens", list)
    types = gguf.get("tokenizer.ggml.token_type", np.ndarray)
    if len(types) != len(tokens):
        raise ModelError(f"{gguf.path}: there are {len(tokens)} tokens and {len(types)} token types")
    return tokens, types.tolist()


def _read_merges(gguf: GGUF, ids: dict[str, int]) -> list[tuple[str, str]]:
    """The byte-pair merges, best first; all their tokens, and every byte, must be in the vocabulary."""
    merges = []
    for i, merge in enumerate(gguf.get("tokenizer.ggml.merges", list)):
        left, _, right = merge.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise ModelError(f"{gguf.path}: merge {i} of key 'tokenizer.ggml.merges' is of unknown tokens")
        merges.append((left, right))
    missing = next((byte for byte, char in enumerate(BYTE_ALPHABET) if char not in ids), None)
    if missing is not None:
        raise ModelError(f"{gguf.path}: the vocabulary has no token for byte {missing}")
    return merges


def _special_tokens(gguf: GGUF, tokens: list[str], types: list[int]) -> dict:
    """The arguments of `Tokenizer` that the metadata decides: control, eos_ids, prefix, suffix."""
    def token_id(role: str):
        key = f"tokenizer.ggml.{role}_token_id"
        value = gguf.get(key, int, None)
        if value is not None and not 0 <= value < len(tokens):
            raise ModelError(f"{gguf.path}: key '{key}' is {value}, outside the vocabulary")
        return value

    control = {token: i for i, (token, type) in enumerate(zip(tokens, types)) if type == CONTROL and token}
    ends = {token_id("eos"), token_id("eot"), *(control.get(name) for name in END_TOKENS)} - {None}
    if not ends:
        raise ModelError(f"{gguf.path}: no token ends a text: key 'tokenizer.ggml.eos_token_id' is missing")
    around = {"prefix": [], "suffix": []}
    for where, role in (("prefix", "bos"), ("suffix", "eos")):
        if gguf.get(f"tokenizer.ggml.add_{role}_token", bool, False) and token_id(role) is not None:
            around[where] = [token_id(role)]
    return {"control": control, "eos_ids": ends, **around}


class SPMTokenizer(Tokenizer):
    """SentencePiece vocabulary (GGUF model "llama"): the library's own model file, written from the metadata.

    Field numbers: github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
    """

    def __init__(self, gguf: GGUF):
        tokens, types = _read_tokens(gguf)
        scores = gguf.get("tokenizer.ggml.scores", np.ndarray)
        if len(scores) != len(tokens):
            raise ModelError(f"{gguf.path}: there are {len(tokens)} tokens and {len(scores)} token scores")
        self.leading_space = gguf.get("tokenizer.ggml.add_space_prefix", bool, True)
        model = b"".join(
            _proto_bytes(1, _proto_bytes(1, token.encode()) + _proto_float(2, score) + _proto_number(3, type))
            for token, score, type in zip(tokens, scores.tolist(), types))
        trainer = _proto_number(3, 2) + _proto_number(35, BYTE in types)  # model_type BPE, byte_fallback
        normalizer = (_proto_bytes(1, b"identity") + _proto_number(3, self.leading_space)
                      + _proto_number(4, False))  # name, add_dummy_prefix, remove_extra_whitespaces
        try:
            self._processor = sentencepiece.SentencePieceProcessor(
                model_proto=model + _proto_bytes(2, trainer) + _proto_bytes(3, normalizer))
        except RuntimeError as error:
            raise ModelError(f"{gguf.path}: not a SentencePiece vocabulary: {error}") from None
        pieces = [bytes([int(token[3:5], 16)]) if type == BYTE else token.replace("\u2581", " ").encode()
                  for token, type in zip(tokens, types)]
        super().__init__(pieces, **_special_tokens(gguf, tokens, types))

    def _encode_plain(self, texts):
        return self._processor.encode(texts)


def _varint(value: int) -> bytes:
    """Protocol buffers' integer: seven bits a byte, the lowest first; negative ones as 64-bit."""
    value &= (1 << 64) - 1
    low = []
    while value > 127:
        low.append(value & 127 | 128)
        value >>= 7
    return bytes([*low, value])


def _proto_number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _proto_float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _proto_bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


class ByteTokenizer(Tokenizer):
    """For models without a vocabulary: token i < 256 is byte i, 256 ends a text, and the rest up to n_vocab,
    which a model of random weights mostly says, show their number."""

    EOS = 256

    def __init__(self, n_vocab: int):
        pieces = [bytes([i]) for i in range(256)] + [b"<%d>" % i for i in range(256, n_vocab)]
        super().__init__(pieces, {"<|endoftext|>": self.EOS}, [self.EOS])

    def _encode_plain(self, texts):
        return [list(text.encode()) for text in texts]


def load_tokenizer(gguf: GGUF) -> Tokenizer:
    """The tokenizer that a model file describes."""
    kinds = {"gpt2": BPETokenizer, "llama": SPMTokenizer}
    model = gguf.get("tokenizer.ggml.model", str)
    if model not in kinds:
        raise ModelError(f"{gguf.path}: tokenizer '{model}' is not supported, {' and '.join(kinds)} are")
    return kinds[model](gguf)


# The form in which random weights are talked to: the one of Qwen's models, with its switch for thinking.
SYNTHETIC_TEMPLATE = """\
{% for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
<think>
{% if enable_thinking is defined and not enable_thinking %}

</think>

{% endif %}
{% endif %}
"""


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks what to train on; here it only shows its content."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """What templates expect of `tojson`; Jinja's own sorts keys and escapes <, &, ' and all but ASCII."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def _raise_exception(message):
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """A model's own Jinja template, which turns a list of messages into a prompt.

    source: the template's text. control: the names of control tokens; where a message contains one, `render`
    puts a `GUARD` inside, so that the text of a message is never taken for the structure around it.

    The template runs in a sandbox that keeps it from the file system and the interpreter, yet does not limit
    how long it runs: it comes from the operator's model file and must never come from a request.
    """

    def __init__(self, source: str, control=(), bos: str = "", eos: str = ""):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag])
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _raise_exception, "bos_token": bos, "eos_token": eos,
            "strftime_now": lambda format: datetime.datetime.now().strftime(format)}
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"the chat template cannot be used: {error}") from None
        self._control_pattern = _any_of(control)

    @classmethod
    def from_gguf(cls, gguf: GGUF, tokenizer: Tokenizer) -> "ChatTemplate | None":
        """The file's own template, or None where it has none."""
        source = gguf.get("tokenizer.chat_template", str, None)
        if source is None:
            return None
        names = {}
        for role in ("bos", "eos"):
            token = gguf.get(f"tokenizer.ggml.{role}_token_id", int, None)
            names[role] = "" if token is None else tokenizer.decode([token], special=True)
        try:
            return cls(source, tokenizer.control, **names)
        except ModelError as error:
            raise ModelError(f"{gguf.path}: {error}") from None

    def render(self, messages: list[dict], tools: list | None = None, enable_thinking: bool | None = None,
               add_generation_prompt: bool = True) -> str:
        """The prompt for a conversation.

        messages: {"role", "content"} with content a string, None, or a list of text parts; an assistant's may
        have "tool_calls", whose arguments may be JSON text. enable_thinking: None leaves it to the template.
        Raises RequestError, naming the field, for what the template does not take.
        """
        switches = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        messages = [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        try:
            return self._template.render(messages=self._guard(messages), tools=self._guard(tools),
                                         add_generation_prompt=add_generation_prompt, **switches)
        except Exception as error:  # a template is foreign code: whatever it raises is about this request
            raise RequestError("messages", f"the chat template refuses the messages: {error}") from None

    def _guard(self, value):
        """The value with every control token in its texts broken by a GUARD."""
        if isinstance(value, str):
            return self._control_pattern.sub(lambda match: match[0][0] + GUARD + match[0][1:], value)
        if isinstance(value, list):
            return [self._guard(item) for item in value]
        if isinstance(value, dict):
            return {key: self._guard(item) for key, item in value.items()}
        return value


def _template_message(message, where: str) -> dict:
    """A message as every template takes it: content one string, arguments of tool calls parsed."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(where, f"{where} is not an object with a role")
    message = message | {"content": _flat_content(message.get("content"), f"{where}.content")}
    if message.get("tool_calls") is not None:
        message["tool_calls"] = _parsed_calls(message["tool_calls"], f"{where}.tool_calls")
    return message


def _flat_content(content, where: str) -> str:
    """Content as one string: older templates know no lists of parts, and none knows null."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(where, f"{where} is neither a string nor a list of parts")
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{i}]", f"{where}[{i}] is not a part of type text, "
                                                "the only type that is supported")
    return "".join(part["text"] for part in content)


def _parsed_calls(calls, where: str) -> list[dict]:
    """Tool calls with their arguments as an object: clients send JSON text, templates walk through keys."""
    parsed = []
    for i, call in enumerate(calls if isinstance(calls, list) else [calls]):
        field = f"{where}[{i}].function"
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise RequestError(field, f"{field} is not an object")
        arguments = call["function"].get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise RequestError(f"{field}.arguments", f"{field}.arguments is not a JSON object")
        parsed.append(call | {"function": call["function"] | {"arguments": arguments}})
    return parsed
