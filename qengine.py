"""qengine: Qwen3.5-style hybrid language models on any NVIDIA card from Volta on, and on a plain CPU.

Table of contents
    1  Config and GGUF               what the model file says: metadata, tensors, shapes
    2  Tokenizer and chat template   text to token ids and back, messages to a prompt
    3  Weights                       tensors on a card, from a file or random
    4  Model                         the forward pass, layer by layer
    5  Cache                         KV pages and recurrent states
    6  Stages                        layers on cards, one after the other
    7  Sampling                      per-slot parameters of the sampling kernels
    8  Scheduler and engine          requests, slots, prompts and answers taking turns; load()
    9  Server                        OpenAI's wire format over HTTP
    10 Bench                         how fast a model runs, and what of the card it uses
    11 Command line                  one prompt, a chat, a server, or a measurement

Three kinds of error leave this file on purpose: `ModelError` for a file that cannot be used, `RequestError`
for a request that cannot be answered, `EngineStopped` once there is no engine to answer it. Each carries one
sentence that a person can act on. kernels/ adds `CardError`, of a card.
"""

import os
import signal
import sys

if __name__ == "__main__":      # the imports take seconds: Ctrl-C meanwhile is no reason for a traceback
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    for _name, _mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):   # Python's None: closed by who started us
        if getattr(sys, _name) is None:
            setattr(sys, _name, open(os.devnull, _mode))

import argparse
import codecs
import collections
import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import logging
import math
import mmap
import numbers
import queue
import re
import secrets
import socket
import struct
import threading
import time
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path

import flask
import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
import sentencepiece
import tokenizers
import tqdm
import waitress
import waitress.channel
import waitress.server
import waitress.task
from werkzeug.exceptions import HTTPException, ServiceUnavailable, TooManyRequests

from kernels import (advance, attend_decode, attention, conv, embedding, finite, float_matmul, formats, gdn, gdn_decode,
                     kv_cache, norm, probe, q8_gemm, q8_gemv, quant_gemv, quantize, rope, sample, swiglu, synthetic)
from kernels.bench import operation_seconds
from kernels.card import Array, Card, CardError, open_cards, show_bytes
from kernels.compile import CompileError
from kernels.emulated.cards import CARDS
from kernels.formats import FORMATS, dequantize
from kernels.nvidia import find_assembler
from kernels.upload import PIECE, Feeder

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
SUPPORTED_TYPES = (*FORMATS, "F16", "BF16", "F32")

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
            cursor.fail(f"key {key[:80]!r} appears twice", at)
        what = f"key {key[:80]!r}"
        self.metadata[key] = cursor.value(cursor.number("<I", f"the type of {what}"), what)

    def _read_tensor(self, cursor: _Cursor) -> tuple[TensorInfo, int]:
        """A row of the tensor table, its offset still relative to the data; and where the row stands."""
        at = cursor.at
        name = cursor.string("a tensor name", MAX_KEY_BYTES)
        what = f"tensor {name[:80]!r}"
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
            what, position = f"tensor {tensor.name[:80]!r}", start + tensor.offset
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

    def get_array(self, key: str, kinds: str, default=_REQUIRED):
        """metadata[key], an array of numbers whose NumPy kind is one of `kinds` ("iu" integers, "f", "b")."""
        array = self.get(key, np.ndarray, default)
        if array is not default and array.dtype.kind not in kinds:
            raise ModelError(f"{self.path}: key '{key}' is an array of the wrong type, {array.dtype}")
        return array

    def data(self, name: str) -> np.ndarray:
        """The tensor as stored, a read-only view: F32 and F16 in their own type, BF16 as uint16, all in the
        tensor's shape; the types of kernels/formats.py as uint8 [rows, bytes of a row]; any other as flat uint8."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self._bytes[tensor.offset:tensor.offset + tensor.nbytes], np.uint8)
        plain = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
        if tensor.type in plain:
            return raw.view(plain[tensor.type]).reshape(tensor.shape)
        return raw.reshape(*tensor.shape[:-1], -1) if tensor.type in FORMATS else raw

    def floats(self, name: str) -> np.ndarray:
        """The tensor's values as float32 in its shape, all of them finite."""
        tensor, data = self.tensors[name], self.data(name)
        if tensor.type in FORMATS:
            with np.errstate(invalid="ignore"):  # infinite times zero
                values = dequantize(FORMATS[tensor.type], data).reshape(tensor.shape)
        elif tensor.type == "BF16":  # the upper half of a float32
            values = (data.astype(np.uint32) << 16).view(np.float32)
        elif tensor.type in ("F16", "F32"):
            values = data.astype(np.float32)
        else:
            raise ModelError(f"{self.path}: tensor '{name}' is of the unsupported type {tensor.type}")
        if not np.isfinite(values).all():
            raise ModelError(f"{self.path}: tensor '{name}' holds a value that is not a finite number")
        return values


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
            raise ModelError(f"{gguf.path}: architecture {architecture[:80]!r} is not supported, 'qwen35' is")
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
    factor = gguf.get("qwen35.rope.scaling.factor", float, 1.0)
    implied = "none" if factor in (0.0, 1.0) else "linear"      # as llama.cpp reads a factor without a type
    scaling = gguf.get("qwen35.rope.scaling.type", str, implied)
    if scaling != "none":
        raise ModelError(f"{gguf.path}: rotary scaling {scaling[:80]!r} is not supported")
    sections = gguf.get_array("qwen35.rope.dimension_sections", "iu")
    if len(sections) < 3 or any(sections[3:]):
        raise ModelError(f"{gguf.path}: key 'qwen35.rope.dimension_sections' is {sections.tolist()[:8]}, "
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
    recurrent = gguf.get_array(key, "b", None)
    if recurrent is None:
        return _kinds_by_interval(n_blocks - n_nextn, interval)
    if len(recurrent) != n_blocks:
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
        (c.rope_dim == rope.ROTARY, f"{c.rope_dim} rotary dimensions of a head turn, not {rope.ROTARY}"),
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
        raise ModelError(f"{gguf.path}: tensor {unknown[:80]!r} is not part of the qwen35 architecture")
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
    max_token_bytes  no token stands for more of a text
    prefix, suffix   tokens that the file wants around a text (`encode(ends=True)`), mostly none

    Control tokens (<|im_end|>, ...) are matched in text only where `allow_special` is true, and are left out
    of decoded text unless `special` is true. Tags such as <think> are ordinary tokens in both directions.
    """

    leading_space = False  # whether encoding puts a space before the text, which decoding takes away

    def __init__(self, pieces: list[bytes], control: dict[str, int], eos_ids, prefix=(), suffix=()):
        self.pieces, self.n_vocab = pieces, len(pieces)
        self.eos_ids, self.prefix, self.suffix = frozenset(eos_ids), list(prefix), list(suffix)
        self.control = control
        self.max_token_bytes = max(len(piece) for piece in [*pieces, *map(str.encode, control)])
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
            raise ModelError(f"{gguf.path}: pre-tokenizer {pre[:80]!r} is not supported, "
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
    types = gguf.get_array("tokenizer.ggml.token_type", "iu")
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
    around = {}
    for where, role in (("prefix", "bos"), ("suffix", "eos")):
        token = token_id(role)
        wanted = gguf.get(f"tokenizer.ggml.add_{role}_token", bool, False) and token is not None
        around[where] = [token] if wanted else []
    return {"control": control, "eos_ids": ends, **around}


class SPMTokenizer(Tokenizer):
    """SentencePiece vocabulary (GGUF model "llama"): the library's own model file, written from the metadata.

    Field numbers: github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
    """

    def __init__(self, gguf: GGUF):
        tokens, types = _read_tokens(gguf)
        scores = gguf.get_array("tokenizer.ggml.scores", "f").astype(np.float32)
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
        pieces = [BYTE_PIECES[token] if type == BYTE else token.replace("\u2581", " ").encode()
                  for token, type in zip(tokens, types)]
        super().__init__(pieces, **_special_tokens(gguf, tokens, types))
        if BYTE not in types:               # one unknown token stands for any number of unknown letters
            self.max_token_bytes = math.inf

    def _encode_plain(self, texts):
        return self._processor.encode(texts)


# The names of SentencePiece's byte tokens; the library accepts no others.
BYTE_PIECES = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


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
        raise ModelError(f"{gguf.path}: tokenizer {model[:80]!r} is not supported, "
                         f"{' and '.join(kinds)} are")
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
        except Exception as error:  # Jinja compiles to Python, whose compiler has complaints of its own
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


# ======================================================================================================
# 3  Weights
# ======================================================================================================


@dataclass(frozen=True)
class Matrix:
    """A weight matrix [n, k] on a card.

    A format of kernels/formats.py: values are the bits of the quants and scales those of the scales, two arrays with a
    line for each row. Otherwise values float32, float16 or uint16 (the bits of bfloat16) [n, k] and scales None.
    """

    format: str             # as GGUF has it: "Q8_0", "F16", ...
    n: int
    k: int
    values: Array
    scales: Array | None = None

    @property
    def is_quantized(self) -> bool:
        return self.scales is not None

    @property
    def decoder(self):
        """How the decode kernels read the format."""
        return quant_gemv.decoder(FORMATS[self.format])

    def rows(self, start: int, stop: int) -> "Matrix":
        """Rows start .. stop - 1, in the same memory."""
        scales = None if self.scales is None else self.scales[start:stop]
        return Matrix(self.format, stop - start, self.k, self.values[start:stop], scales)


def alloc_matrix(card: Card, format: str, n: int, k: int, name: str) -> Matrix:
    """A matrix of undefined values. Raises OutOfMemory."""
    if format in embedding.FLOATS:
        return Matrix(format, n, k, card.alloc((n, k), embedding.FLOATS[format], name))
    values, scales = FORMATS[format].arrays(n, k)
    return Matrix(format, n, k, card.alloc(*values, name), card.alloc(*scales, f"{name} scales"))


class FileWeights:
    """The tensors of a GGUF file, put on cards."""

    def __init__(self, gguf: GGUF):
        self.gguf = gguf

    @contextlib.contextmanager
    def loading(self, card: Card):
        """Surrounds all calls of `matrix` and `vector` for a card; the values are good when it ends. ModelError."""
        names, largest = list(self.gguf.tensors), max(tensor.nbytes for tensor in self.gguf.tensors.values())
        self.feeder = Feeder(card, min(PIECE, largest))
        bad = card.zeros(len(names), np.uint32, "flags of damaged tensors")
        self.bad = {name: bad[i:i + 1] for i, name in enumerate(names)}
        try:
            yield
            damaged = np.flatnonzero(card.download(bad))
        finally:
            self.feeder = self.bad = None
        if damaged.size:
            tensor = self.gguf.tensors[names[damaged[0]]]
            what = "block scale" if tensor.type in FORMATS else "value"
            raise ModelError(f"{self.gguf.path}: tensor '{tensor.name}' holds a {what} that is not a finite number")

    def type_of(self, name: str) -> str:
        return self.gguf.tensors[name].type

    def matrix(self, card: Card, *names: str) -> Matrix:
        """The rows of one tensor or of several, of one type and width, one after the other."""
        tensors = [self.gguf.tensors[name] for name in names]
        format, k = tensors[0].type, tensors[0].shape[1]
        stops = np.cumsum([tensor.shape[0] for tensor in tensors]).tolist()
        matrix = alloc_matrix(card, format, stops[-1], k, " + ".join(names))
        for tensor, stop in zip(tensors, stops):
            assert (tensor.type, tensor.shape[1]) == (format, k)
            self._fill(card, matrix.rows(stop - tensor.shape[0], stop), tensor.name)
        return matrix

    def _fill(self, card: Card, rows: Matrix, name: str):
        """The bytes of a tensor to the card, where a kernel takes them apart and looks for damage."""
        data, bad = self.gguf.data(name), self.bad[name]
        if rows.is_quantized:
            format = FORMATS[rows.format]
            for first, raw in self.feeder.pieces(data, format.file_bytes):
                formats.repack(card, format, rows.values, rows.scales, raw, bad, first, rows.k)
        else:
            to = rows.values.reshape(-1).view(np.uint8)
            for first, raw in self.feeder.pieces(data, 1):
                card.copy(to[first:first + raw.size], raw)
            finite.find_nonfinite(card, rows.values, bad)

    def vector(self, card: Card, name: str) -> Array:
        """A norm weight, a bias or another small tensor, as float32 in its own shape."""
        return card.upload(self.gguf.floats(name), name)


# Random values for the small tensors, in the ranges that trained models have; other vectors lie around 1.
SYNTHETIC_RANGES = {"ssm_a": (-8.0, -0.05), "ssm_dt.bias": (-5.0, 1.0), "ssm_conv1d.weight": (-0.6, 0.6)}


class SyntheticWeights:
    """Random weights of a model's real shapes, made on the card: no file, nothing over the bus.

    Matrices are of `format`, or Q8_0 where their rows are no whole number of its blocks. A tensor's values depend on
    its name and type alone, so every card and every run has the same model.
    """

    def __init__(self, config: Config, format: str = "Q8_0"):
        self.shapes, self.format = config.tensor_shapes(), format

    def loading(self, card: Card):
        return contextlib.nullcontext()

    def type_of(self, name: str) -> str:
        return "Q8_0" if self.shapes[name][1] % FORMATS[self.format].file_block else self.format

    def matrix(self, card: Card, *names: str) -> Matrix:
        k, stop, format = self.shapes[names[0]][1], 0, self.type_of(names[0])
        matrix = alloc_matrix(card, format, sum(self.shapes[name][0] for name in names), k, " + ".join(names))
        for name in names:
            start, stop = stop, stop + self.shapes[name][0]
            rows, seed = matrix.rows(start, stop), zlib.crc32(name.encode())
            synthetic.random_matrix(card, FORMATS[format], rows.values, rows.scales, rows.n, k, seed)
        return matrix

    def vector(self, card: Card, name: str) -> Array:
        array = card.alloc(self.shapes[name], np.float32, name)
        low, high = SYNTHETIC_RANGES.get(re.sub(r"^blk\.\d+\.", "", name), (0.9, 1.1))
        synthetic.random_uniform(card, array, low, high, zlib.crc32(name.encode()))
        return array


# ======================================================================================================
# 4  Model
# ======================================================================================================
# x is the residual stream, float32 [rows, hidden]. A layer is x += mixer(norm(x)); x += mlp(norm(x)). What enters
# a projection is an *activation*: int8 with a scale per 32 values for a quantised matrix, float32 for any other.

HEAD_ROWS = 8               # rows of logits computed at once where a text's are all wanted


@dataclass(frozen=True)
class Stack:
    """Matrices that read the same input. Their products lie side by side, as columns of rows `stride` apart."""

    parts: tuple[tuple[int, Matrix], ...]   # (first column, matrix); neighbours of one type are one matrix
    stride: int                             # columns of all, and what makes them a multiple of 4


@dataclass(frozen=True)
class MLP:
    norm: Array             # [hidden]
    gate_up: Stack          # ffn columns of gate, ffn of up
    down: Matrix            # [hidden, ffn]


@dataclass(frozen=True)
class LinearLayer:
    """Gated DeltaNet: a recurrence whose state is 128 x 128 per value head, whatever the length of the text."""

    norm: Array             # [hidden]
    inputs: Stack           # conv_dim columns of q, k, v; value_dim of z, the output's gate; n_value_heads of alpha,
                            # how fast the state decays; and as many of beta, how strongly it is written
    conv: Array             # [conv_dim, conv_width]
    a: Array                # [n_value_heads], -exp(A_log)
    dt_bias: Array          # [n_value_heads]
    out_norm: Array         # [128]
    out: Matrix             # [hidden, value_dim]
    mlp: MLP


@dataclass(frozen=True)
class AttentionLayer:
    """Full attention: grouped heads of 256, a quarter of each rotated, a sigmoid gate on the output."""

    norm: Array             # [hidden]
    inputs: Stack           # per head 256 columns of query and 256 of gate; then kv_dim of keys, kv_dim of values
    q_norm: Array           # [256]
    k_norm: Array           # [256]
    out: Matrix             # [hidden, query_dim]
    mlp: MLP


def load_stack(weights, card: Card, names: list[str]) -> Stack:
    """The tensors `names`, of one width, in this order."""
    parts, column = [], 0
    for _, group in itertools.groupby(names, weights.type_of):
        matrix = weights.matrix(card, *group)
        parts.append((column, matrix))
        column += matrix.n
    return Stack(tuple(parts), column + -column % 4)


def load_layer(weights, card: Card, config: Config, index: int) -> LinearLayer | AttentionLayer:
    """The weights of block `index` on `card`."""
    def stack(*names):
        return load_stack(weights, card, [f"blk.{index}.{name}.weight" for name in names])

    def matrix(name):
        return weights.matrix(card, f"blk.{index}.{name}.weight")

    def vector(name):
        return weights.vector(card, f"blk.{index}.{name}")

    mlp = MLP(vector("post_attention_norm.weight"), stack("ffn_gate", "ffn_up"), matrix("ffn_down"))
    if config.layer_kinds[index] == "attention":
        return AttentionLayer(vector("attn_norm.weight"), stack("attn_q", "attn_k", "attn_v"),
                              vector("attn_q_norm.weight"), vector("attn_k_norm.weight"), matrix("attn_output"), mlp)
    return LinearLayer(vector("attn_norm.weight"), stack("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta"),
                       vector("ssm_conv1d.weight"), vector("ssm_a"), vector("ssm_dt.bias"),
                       vector("ssm_norm.weight"), matrix("ssm_out"), mlp)


def matrices(part) -> list[Matrix]:
    """The matrices of a layer, by what its fields hold."""
    if isinstance(part, Matrix):
        return [part]
    fields = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    inner = part if isinstance(part, tuple) else [getattr(part, field.name) for field in fields]
    return [matrix for item in inner for matrix in matrices(item)]


@dataclass(frozen=True)
class Rows:
    """The tokens of one pass through the layers and where each belongs; int32 arrays on the card.

    A prefill pass holds consecutive tokens of one slot and runs the prefill family of kernels; a decode pass holds
    one token of each of several slots and runs the decode family.
    """

    n: int
    is_decode: bool
    ids: Array              # [n] token ids
    slots: Array            # [n]
    positions: Array        # [n] index in the slot's sequence
    rope: Array             # [3, n] time, height, width


class Activation:
    """Rows on their way into projections of input size k, in the forms that the matrices read."""

    def __init__(self, card: Card, rows: int, k: int):
        self.k = k
        self.x = card.alloc((rows, k), np.float32, f"activation {k}")
        self.q = card.alloc((rows, k), np.int8, f"activation {k} quants")
        self.d = card.alloc((rows, k // 32), np.float32, f"activation {k} scales")


class Model:
    """The forward pass of a range of layers on one card, with its scratch memory; the caches are the caller's.

    Every float operation is a kernel of kernels/ on `card`; here is only their order.
    """

    def __init__(self, card: Card, config: Config, weights, layers: range, cache: "Cache", progress=iter):
        self.card, self.config, self.cache, self.first_layer = card, config, cache, layers.start
        is_last = layers.stop == config.n_layers
        self.layers = [load_layer(weights, card, config, index) for index in progress(layers)]
        self.embeddings = self.head = None
        if layers.start == 0 or (is_last and config.tied_embeddings):
            self.embeddings = weights.matrix(card, "token_embd.weight")
        if is_last:
            self.head_norm = weights.vector(card, "output_norm.weight")
            self.head = self.embeddings if config.tied_embeddings else weights.matrix(card, "output.weight")
        self.inv_freq = card.upload(rope.inverse_frequencies(config.rope_base), "rotary frequencies")
        self.stride = max(stack.stride for layer in self.layers for stack in (layer.inputs, layer.mlp.gate_up))

    def row_bytes(self) -> int:
        """Bytes that `allocate` takes for a row."""
        c, page = self.config, gdn.factors_shape(PAGE_TOKENS, self.config.n_value_heads)
        floats = c.hidden_dim + self.stride + c.conv_dim + c.value_dim + c.query_dim + math.prod(page) // PAGE_TOKENS
        halves = c.query_dim                                        # rotated query
        activations = sum({c.hidden_dim, c.value_dim, c.query_dim}) + c.ffn_dim
        return 4 * floats + 2 * halves + activations * 41 // 8      # of each a float, an int8 and 1 / 32 scale

    def allocate(self, rows: int, n_slots: int):
        """Scratch memory, for passes of up to `rows` rows. A name says what the array holds in the course of a layer."""
        c, card = self.config, self.card

        def floats(name, width):
            return card.alloc((rows, width), np.float32, name)

        self.x = floats("residual stream", c.hidden_dim)
        self.projected = card.alloc(rows * self.stride, np.float32, "products of a stack")
        self.mixed, self.o = floats("qkv after convolution", c.conv_dim), floats("delta rule output", c.value_dim)
        self.factors = card.alloc(gdn.factors_shape(rows, c.n_value_heads), np.float32, "delta rule factors")
        self.q = card.alloc((rows, c.n_heads, c.head_dim), np.float16, "rotated query")
        self.attended = floats("attention output", c.query_dim)
        self.activations = {k: Activation(card, rows, k) for k in {c.hidden_dim, c.value_dim, c.query_dim}}
        self.inner = Activation(card, rows, c.ffn_dim)  # of the MLP, whose kernel reads and writes activations
        self.partials = card.alloc(attend_decode.partials_shape(n_slots, c.n_heads), np.float32, "attention partials")
        self.arrived = card.zeros((n_slots, c.n_kv_heads), np.uint32, "attention blocks that have arrived")
        if self.head is not None:
            self.logits = card.alloc((max(n_slots, HEAD_ROWS), c.n_vocab), np.float32, "logits")

    def forward(self, rows: Rows, tap=None):
        """Runs the layers over the rows; the result is in `x`. `tap(name, array)` is called after every layer."""
        if self.first_layer == 0:
            table = self.embeddings
            embedding.embed(self.card, table.format, self.x, rows.ids, table.values, table.scales, rows.n, table.k)
            if tap:
                tap("embedding", self.x)
        for index, layer in enumerate(self.layers, self.first_layer):
            if isinstance(layer, LinearLayer):
                self.linear_attention(rows, layer, self.cache.recurrent[index])
            else:
                self.attention(rows, layer, self.cache.pages[index])
            self.mlp(rows, layer.mlp)
            if tap:
                tap(f"layer {index}", self.x)

    def linear_attention(self, rows: Rows, layer: LinearLayer, state: "RecurrentState"):
        card, c, projected, stride = self.card, self.config, self.projected, layer.inputs.stride
        self.project_norm(rows, layer.inputs, layer.norm)
        u = self.activations[c.value_dim]
        constants, heads = (layer.a, layer.dt_bias), (c.n_key_heads, c.n_value_heads)
        if rows.is_decode:
            inputs = state.memory, state.conv, projected, stride, layer.conv, *constants, layer.out_norm, rows.slots, \
                rows.positions, rows.n, *heads, c.norm_eps
            if layer.out.is_quantized:
                gdn_decode.gdn_decode_quantize(card, u.q, u.d, *inputs)
            else:
                gdn_decode.gdn_decode(card, u.x, *inputs)
        else:
            conv.conv_silu(card, self.mixed, projected, stride, state.conv, layer.conv, rows.slots, rows.positions,
                           rows.n, c.conv_dim)
            gdn.gdn_prefill(card, self.o, state.memory, self.factors, self.mixed, projected, stride, *constants,
                            rows.slots, rows.n, *heads)
            inputs = self.o, projected[c.conv_dim:], stride, layer.out_norm, rows.n, c.n_value_heads, c.norm_eps
            if layer.out.is_quantized:
                norm.gated_norm_quantize(card, u.q, u.d, *inputs)
            else:
                norm.gated_norm(card, u.x, *inputs)
        self.project(rows, self.x, layer.out, u, add=True)

    def attention(self, rows: Rows, layer: AttentionLayer, pages: "Pages"):
        card, c, projected, stride = self.card, self.config, self.projected, layer.inputs.stride
        self.project_norm(rows, layer.inputs, layer.norm)
        u, columns = self.activations[c.query_dim], (2 * c.query_dim, 2 * c.query_dim + c.kv_dim)  # of keys, values
        rotary, places = (rows.rope, self.inv_freq), (self.cache.block_table, rows.slots, rows.positions)
        sizes = rows.n, c.n_heads, c.n_kv_heads
        if rows.is_decode:
            out = (u.q, u.d) if layer.out.is_quantized else (u.x, None)
            attend_decode.attend_decode(card, *out, projected, stride, *columns, layer.q_norm, layer.k_norm, *rotary,
                                        pages.k, pages.v, *places, self.partials, self.arrived, *sizes,
                                        c.rope_sections, c.norm_eps)
        else:
            rope.norm_rope_q(card, self.q, projected, stride, layer.q_norm, *rotary, rows.n, c.n_heads,
                             c.rope_sections, c.norm_eps)
            kv_cache.store_kv(card, pages.k, pages.v, projected, stride, *columns, layer.k_norm, *rotary, *places,
                              rows.n, c.n_kv_heads, c.rope_sections, c.norm_eps)
            attention.attend_prefill(card, self.attended, self.q, projected, stride, pages.k, pages.v, *places, *sizes)
            if layer.out.is_quantized:
                quantize.quantize_q8(card, u.q, u.d, self.attended, rows.n, u.k)
            else:
                card.copy(u.x, self.attended)
        self.project(rows, self.x, layer.out, u, add=True)

    def mlp(self, rows: Rows, layer: MLP):
        card, stack, h = self.card, layer.gate_up, self.inner
        if rows.is_decode and layer.down.is_quantized and self.is_fused(stack):
            (_, matrix), u = stack.parts[0], self.activations[self.config.hidden_dim]
            q8_gemv.norm_gemv_swiglu(card, matrix.decoder, h.q, h.d, matrix.values, matrix.scales, self.x, layer.norm,
                                     self.config.norm_eps, h.k, u.k, rows.n, u.q, u.d)
        else:
            self.project_norm(rows, stack, layer.norm)
            if layer.down.is_quantized:
                swiglu.swiglu_quantize(card, h.q, h.d, self.projected, rows.n, h.k)
            else:
                swiglu.swiglu(card, h.x, self.projected, rows.n, h.k)
        self.project(rows, self.x, layer.down, h, add=True)

    def compute_logits(self, x: Array, n: int):
        """logits[:n] = head(norm(x[:n])), always through the decode family, so that a row has one answer."""
        rows = Rows(n, True, None, None, None, None)
        self.project_norm(rows, Stack(((0, self.head),), self.head.n), self.head_norm, x, self.logits)

    # ---- the steps of a layer ----

    @staticmethod
    def is_fused(stack: Stack) -> bool:
        """Whether one decode kernel serves the whole stack, the norm before it included."""
        return len(stack.parts) == 1 and stack.parts[0][1].is_quantized

    def project_norm(self, rows: Rows, stack: Stack, weight: Array, x: Array | None = None, y: Array | None = None):
        """y = RMSNorm(x) W^T, column by column as the stack has them; of the residual stream, to `projected`."""
        card, eps = self.card, self.config.norm_eps
        x, y = self.x if x is None else x, self.projected if y is None else y
        matrices = [matrix for _, matrix in stack.parts]
        u = self.activations[matrices[0].k]
        if rows.is_decode and self.is_fused(stack):
            matrix, = matrices
            q8_gemv.norm_gemv(card, matrix.decoder, y, stack.stride, matrix.values, matrix.scales, x, weight, eps,
                              matrix.n, u.k, rows.n, u.q, u.d)
            return
        if any(matrix.is_quantized for matrix in matrices):
            norm.rms_norm_quantize(card, u.q, u.d, x, weight, rows.n, u.k, eps)
        if not all(matrix.is_quantized for matrix in matrices):
            norm.rms_norm(card, u.x, x, weight, rows.n, u.k, eps)
        for column, matrix in stack.parts:
            self.project(rows, y.reshape(-1)[column:], matrix, u, stride=stack.stride)

    def project(self, rows: Rows, y: Array, matrix: Matrix, u: Activation, add: bool = False, stride: int = 0):
        """y = u W^T (y += with `add`) through the kernel of the rows' family; rows of y are `stride` numbers
        apart, where they hold more than the n of this product."""
        card, n, k, stride = self.card, matrix.n, matrix.k, stride or matrix.n
        if matrix.is_quantized:
            arguments = y, stride, matrix.values, matrix.scales, u.q, u.d, n, k, rows.n, add
            if rows.is_decode:
                q8_gemv.gemv(card, matrix.decoder, *arguments)
            else:
                q8_gemm.gemm(card, FORMATS[matrix.format], *arguments)
        else:
            product = float_matmul.gemv_float if rows.is_decode else float_matmul.gemm_float
            product(card, y, stride, matrix.values, u.x, n, k, rows.n, add)


# ======================================================================================================
# 5  Cache
# ======================================================================================================

PAGE_TOKENS = kv_cache.PAGE


@dataclass(frozen=True)
class RecurrentState:
    """What a linear-attention layer remembers of each slot."""

    conv: Array             # [n_slots, conv_width, conv_dim] float32: inputs of position p in row p % conv_width
    memory: Array           # [n_slots, n_value_heads, 128 key, 128 value] float32


@dataclass(frozen=True)
class Pages:
    """The keys and values of an attention layer, in pages of 64 tokens that belong to slots by the block table."""

    k: Array                # [n_pages, n_kv_heads, 64, 256] float16
    v: Array                # the same


class Cache:
    """The memory of a range of layers: pages behind a block table, and recurrent states by slot."""

    def __init__(self, card: Card, config: Config, layers: range, n_slots: int, n_ctx: int):
        c, self.card, self.max_pages = config, card, pages_for(n_ctx)
        self.pages, self.recurrent = {}, {}
        for index in layers:
            if c.layer_kinds[index] == "attention":
                shape = (n_slots * self.max_pages, c.n_kv_heads, PAGE_TOKENS, c.head_dim)
                self.pages[index] = Pages(card.alloc(shape, np.float16, f"layer {index} keys"),
                                          card.alloc(shape, np.float16, f"layer {index} values"))
            else:
                state = (n_slots, c.n_value_heads, c.linear_head_dim, c.linear_head_dim)
                self.recurrent[index] = RecurrentState(
                    card.zeros((n_slots, c.conv_width, c.conv_dim), np.float32, f"layer {index} conv state"),
                    card.zeros(state, np.float32, f"layer {index} recurrent state"))
        self.block_table = card.zeros((n_slots, self.max_pages), np.int32, "block table")

    def reset(self, slot: int):
        """Forget what the recurrent layers remember of a slot. Pages need no reset: positions bound what is read."""
        for state in self.recurrent.values():
            self.card.fill(state.conv[slot], 0)
            self.card.fill(state.memory[slot], 0)

    def set_pages(self, slot: int, pages: list[int]):
        """Tell the card which pages hold the slot's tokens, 64 each, in order."""
        row = np.zeros(self.max_pages, np.int32)
        row[:len(pages)] = pages
        self.card.copy_in(self.block_table[slot], row)


def pages_for(n_tokens: int) -> int:
    return -(-n_tokens // PAGE_TOKENS)


class PagePool:
    """The numbers of the free pages. A page has the same number in every layer, on every card."""

    def __init__(self, n_pages: int):
        self.free = list(range(n_pages - 1, -1, -1))

    def take(self, count: int) -> list[int]:
        if count > len(self.free):
            raise CardError(f"{count} KV pages are needed and {len(self.free)} are free")
        return [self.free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]):
        self.free.extend(reversed(pages))


# ======================================================================================================
# 6  Stages
# ======================================================================================================


class Stage:
    """A range of layers on one card: weights, caches, scratch, and the launches that repeat, recorded.

    Token ids enter the first stage, and its last one's sampler turns logits into token ids; what a stage in between
    hands on is `model.x`.
    """

    def __init__(self, card: Card, config: Config, weights, layers: range, n_slots: int, n_ctx: int, chunk: int | None,
                 progress=iter):
        self.card, self.n_slots = card, n_slots
        self.cache = Cache(card, config, layers, n_slots, n_ctx)
        with weights.loading(card):
            self.model = Model(card, config, weights, layers, self.cache, progress)
        self.chunk = min(chunk or self.fitting_chunk(), pages_for(n_ctx) * PAGE_TOKENS)
        max_rows = max(self.chunk, n_slots, HEAD_ROWS)
        self.model.allocate(max_rows, n_slots)
        self.sampler = Sampler(card, n_slots, config.n_vocab) if self.model.head else None
        # A prompt's pass must not disturb the batch, whose inputs stay from one step to the next.
        self.inputs = card.alloc(6 * max_rows, np.int32, "ids, slots and positions of a prompt's pass")
        self.batch = card.alloc(6 * n_slots, np.int32, "ids, slots and positions of a decode step")
        self.recordings = {}    # (rows, is_decode) -> Recording
        self.products = collections.Counter(
            (matrix.n, matrix.k) for layer in self.model.layers for matrix in matrices(layer) if matrix.is_quantized)
        self.pass_time = functools.cache(self.pass_time)

    def fitting_chunk(self) -> int:
        """Tokens of a pass that suit the card: on a real one as many as its free memory allows."""
        if self.card.kind == "emulated":
            return CHUNK
        rows = self.card.free_bytes // CHUNK_SHARE // self.model.row_bytes()
        return min(max(rows // PAGE_TOKENS * PAGE_TOKENS, CHUNK), LARGEST_CHUNK)

    def pass_time(self, rows: int) -> int:
        """How long the products of a pass take, to compare with others (0 rows: nothing)."""
        return sum(count * q8_gemm.relative_time(self.card, n, k, rows) for (n, k), count in self.products.items()
                   ) if rows else 0

    def pass_rows(self, n: int, limit: int) -> int:
        """Tokens of the next pass over a prompt that has n left, at most `limit`: all, or passes of the multiple of 64
        whose blocks of threads fill the card best, as the last round of a product takes as long as a full one."""
        sizes = [*([n] if n <= limit else []), *range(min(limit, n) // PAGE_TOKENS * PAGE_TOKENS, 0, -PAGE_TOKENS)]
        return min(sizes, key=lambda rows: n // rows * self.pass_time(rows) + self.pass_time(n % rows))

    def prefill(self, ids, slot: int, start: int, tap=None):
        """Queue a pass over consecutive tokens of a slot; their hidden states stay in model.x until the next one."""
        n = len(ids)
        set_rows(self.inputs, ids, [slot] * n, range(start, start + n))
        if n == self.chunk and tap is None:
            self.recording(n, is_decode=False).replay()
        else:
            self.model.forward(rows_of(self.inputs, n, is_decode=False), tap)

    def sample_row(self, row: int, slot: int) -> int:
        """The next token of a slot from row `row` of the hidden states of the prefill pass queued last."""
        set_rows(self.inputs, [0], [slot], [0])
        self.model.compute_logits(self.model.x[row:row + 1], 1)
        self.sampler.launch(self.model.logits, rows_of(self.inputs, 1, is_decode=True))
        return int(self.card.download(self.sampler.tokens[:1])[0])

    def place(self, ids, slots, positions):
        """The inputs of the next decode step."""
        set_rows(self.batch, ids, slots, positions)

    def step(self, n: int):
        """Queue a decode step of the n rows placed last, or where the step before it has left them."""
        self.recording(n, is_decode=True).replay()

    def recording(self, n: int, is_decode: bool):
        """What a pass over n rows launches; made when it is first asked for."""
        if (n, is_decode) not in self.recordings:
            with self.card.record() as recording:
                if is_decode:
                    self.launch_step(n)
                    self.advance(n)
                else:
                    self.model.forward(rows_of(self.inputs, n, is_decode))
            self.recordings[n, is_decode] = recording
        return self.recordings[n, is_decode]

    def launch_all(self):
        """Launch every kernel that a prompt or an answer of any length may need; what they compute is of no use."""
        few = min(self.chunk, CHUNK)    # beyond, what is run depends on the number of pages alone
        for n in (*range(1, min(few, 64)), *range(64, few + 1, 8), *range(CHUNK, self.chunk + 1, PAGE_TOKENS)):
            self.model.forward(rows_of(self.inputs, n, is_decode=False))
        for n in range(1, self.n_slots + 1):
            self.launch_step(n)
            self.advance(n)
        if self.sampler:
            for n in range(1, HEAD_ROWS + 1):
                self.model.compute_logits(self.model.x, n)

    def launch_step(self, n: int):
        """Queue all launches of a decode step but those that make the next one's inputs."""
        rows = rows_of(self.batch, n, is_decode=True)
        self.model.forward(rows)
        if self.sampler:
            self.model.compute_logits(self.model.x, n)
            self.sampler.launch(self.model.logits, rows)

    def advance(self, n: int):
        """The tokens of the step become the inputs of the next one."""
        if self.sampler:
            rows = rows_of(self.batch, n, is_decode=True)
            advance.advance(self.card, rows.ids, rows.positions, rows.rope, self.sampler.tokens, n)


def rows_of(inputs: Array, n: int, is_decode: bool) -> Rows:
    """n rows whose ids, slots and positions lie side by side at the start of an array, so that one copy fills all."""
    i = inputs
    return Rows(n, is_decode, i[:n], i[n:2 * n], i[2 * n:3 * n], i[3 * n:6 * n].reshape(3, n))


def set_rows(inputs: Array, ids, slots, positions):
    """Fill what `rows_of` reads (lists of the same length)."""
    packed = np.array([ids, slots, positions, positions, positions, positions], np.int32).reshape(-1)
    inputs.card.copy_in(inputs[:packed.size], packed)


class Pipeline:
    """The stages in order: one card, one stage for now. What crosses from card to card belongs here, nowhere else.

    Everything is queued and happens in the order of the calls, also where two requests share memory one after the
    other: a slot or a page may be given to the next as soon as no further work of the last is queued.
    """

    def __init__(self, stages: list[Stage]):
        self.stages, self.last = stages, stages[-1]
        self.queued = collections.deque()       # the ends of the prefill passes that nobody has waited for

    def load_kernels(self, progress: bool):
        """Load what any prompt and any answer will run, and record what repeats, so that no request waits for it."""
        for stage in self.stages:
            with stage.card.collecting() as needed:
                stage.launch_all()
            with tqdm.tqdm(desc="compiling kernels", total=len(needed), unit="kernel", leave=False,
                           disable=not progress) as bar:
                stage.card.load_kernels(needed, lambda name: (bar.set_postfix_str(name), bar.update()))
            stage.recording(stage.chunk, is_decode=False)
            for n in (n for n in (1, 2, 4, 8) if n <= stage.n_slots):       # others are recorded when they come
                stage.recording(n, is_decode=True)

    def start(self, slot: int, request: "Request"):
        """Make a slot ready for a new sequence."""
        for stage in self.stages:
            stage.cache.reset(slot)
        self.last.sampler.start(slot, request)

    def set_pages(self, slot: int, pages: list[int]):
        for stage in self.stages:
            stage.cache.set_pages(slot, pages)

    def prefill(self, ids, slot: int, start: int, tap=None):
        """A chunk of a prompt: tokens of `slot` at positions start, start + 1, ...; start is a multiple of 64."""
        for stage in self.stages:
            stage.prefill(ids, slot, start, tap)
        self.queued.append(self.last.card.default_stream.record())
        if len(self.queued) > 1:        # or a whole prompt is queued at once, and no cancellation stops the cards
            self.queued.popleft().synchronize()

    def pass_rows(self, n: int, limit: int) -> int:
        """Tokens of the next pass over a prompt that has n left, a multiple of 64 or all of them, at most `limit`."""
        return self.last.pass_rows(n, limit)

    def sample_row(self, row: int, slot: int) -> int:
        return self.last.sample_row(row, slot)

    def place(self, ids, slots, positions):
        """The batch of the decode steps that follow: for each row a token, its slot and its position."""
        for stage in self.stages:
            stage.place(ids, slots, positions)

    def step(self, n: int) -> "Tokens":
        """Queue a decode step of the n rows of the batch. The tokens that it finds are what enters the next one."""
        for stage in self.stages:
            stage.step(n)
        return self.last.sampler.fetch(n)


# ======================================================================================================
# 7  Sampling
# ======================================================================================================


class Tokens:
    """Tokens on their way from a card to the host."""

    def __init__(self, host: np.ndarray, arrived):
        self.host, self.arrived = host, arrived

    def read(self) -> np.ndarray:
        """Waits for them: int32, -1 where the logits of a row held a NaN. Good until the second `fetch` after."""
        self.arrived.synchronize()
        return self.host


class Sampler:
    """The sampling kernels' memory on a card: parameters, step, token history and mask of every slot."""

    def __init__(self, card: Card, n_slots: int, n_vocab: int):
        self.card, self.n_vocab = card, n_vocab
        self.state = sample.SamplingState.allocate(card, n_slots, n_slots, n_vocab)
        self.tokens = card.alloc(n_slots, np.int32, "sampled tokens")
        # One is read while the other is filled.
        self.hosts = itertools.cycle([card.pinned(n_slots, np.int32) for _ in range(2)])

    def start(self, slot: int, request: "Request"):
        """Set a slot's parameters for a request and forget what it generated before."""
        seed = secrets.randbits(64) if request.seed is None else request.seed
        packed = sample.pack_parameters(request.temperature, request.top_k, request.top_p, request.min_p, seed)
        self.card.copy_in(self.state.parameters[slot], packed)
        self.card.fill(self.state.history[slot], 0)

    def launch(self, logits: Array, rows: Rows):
        """Queue the choice of the next token of each row; it can be recorded."""
        sample.sample(self.card, self.tokens, logits, rows.slots, self.state, rows.n, self.n_vocab)

    def fetch(self, n: int) -> Tokens:
        """Queue the copy to the host of the tokens of the n rows sampled last."""
        host = next(self.hosts)[:n]
        self.card.copy_out(host, self.tokens[:n])
        return Tokens(host, self.card.default_stream.record())


# ======================================================================================================
# 8  Scheduler and engine
# ======================================================================================================

CHUNK = 512                 # tokens of a prompt that run in one pass, at most; a multiple of 64
LARGEST_CHUNK = 4096        # the same on a real card, whose multipliers more rows keep busier (GEMM: 64 or 72 % of peak),
CHUNK_SHARE = 8             # if they take no more than 1 / 8 of the memory that the weights leave
NAN_LOGITS = "the logits hold a NaN: the model file is damaged, or a kernel is wrong"
DEFAULT_CTX = 4096          # tokens of a slot, where neither the caller nor the model asks for fewer

# The small model that comes with qengine.
DEFAULT_MODEL = Path(__file__).resolve().parent / "models" / "qengine-10m-Q8_0.gguf"

# What a request may ask of sampling, anywhere: type, lowest, highest, meaning (for --help).
SAMPLING = {
    "max_tokens": (int, 1, 2**31 - 1, "longest answer, in tokens (default: what the context holds)"),
    "temperature": (float, 0, 2, "0 takes the likeliest token, more is more varied (default: 0, --serve: 1)"),
    "top_k": (int, 0, 2**31 - 1, "choose among the K likeliest tokens (0: all)"),
    "top_p": (float, 0, 1, "choose among the likeliest tokens that together reach this probability (1: all)"),
    "min_p": (float, 0, 1, "leave out tokens less likely than this share of the likeliest one (0: none)"),
    "seed": (int, 0, 2**64 - 1, "the same seed and prompt give the same answer"),
}


class EngineStopped(Exception):
    """The engine answers no more: it was closed, or it failed. The text says which."""


def check_sampling(name: str, value, field: str | None = None):
    """`value`, if it is what SAMPLING allows as `name`; RequestError names `field`, which is `name` by default."""
    kind, low, high, _ = SAMPLING[name]
    is_number = isinstance(value, numbers.Integral if kind is int else numbers.Real) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:       # a NaN is not, either
        noun = "a whole number" if kind is int else "a number"
        raise RequestError(field or name, f"'{field or name}' must be {noun} from {low} to {high}")
    return value


@dataclass
class Request:
    """What a caller wants generated; SAMPLING has the meaning and the limits of the numbers."""

    prompt_ids: list[int]
    max_tokens: int | None = None       # None: until the model ends or the context is full
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None             # None: another one for every request
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()          # strings that end the text and are not part of it; one may stand alone

    def __post_init__(self):
        self.stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check(self, n_vocab: int, n_ctx: int):
        """RequestError names the first field that cannot be served."""
        if not self.prompt_ids:
            raise RequestError("prompt", "the prompt is empty")
        if len(self.prompt_ids) >= n_ctx:
            raise RequestError("prompt", f"the prompt has {len(self.prompt_ids)} tokens and the context holds {n_ctx}, "
                                         "prompt and answer together")
        if not all(0 <= token < n_vocab for token in self.prompt_ids):
            raise RequestError("prompt", f"a token id of the prompt is outside 0 .. {n_vocab - 1}")
        if "" in self.stop:
            raise RequestError("stop", "a stop string is empty")
        for name in SAMPLING:
            if (value := getattr(self, name)) is not getattr(Request, name):    # a default may be None
                check_sampling(name, value)


@dataclass(frozen=True)
class Event:
    """A generated token, and the text that is certain by now. The last one has a finish reason: "stop" or "length"."""

    token_id: int
    text: str
    finish_reason: str | None = None


class StopScanner:
    """Ends a text that arrives in pieces before its first stop string, and holds back what may become one."""

    def __init__(self, stop):
        self.stop = stop
        self.held = ""
        self.stopped = False        # a stop string was found

    def push(self, piece: str) -> str:
        """The text that is certain after another piece."""
        text = self.held + piece
        found = [at for at in (text.find(s) for s in self.stop) if at >= 0]
        if found:
            self.stopped, self.held = True, ""
            return text[:min(found)]
        held = max((n for s in self.stop for n in range(1, min(len(s), len(text) + 1)) if text.endswith(s[:n])),
                   default=0)
        self.held = text[len(text) - held:]
        return text[:len(text) - held]

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        text, self.held = self.held, ""
        return text


class Generation:
    """A request on its way through the engine. Iterate over it for its events."""

    def __init__(self, request: Request, tokenizer: Tokenizer):
        self.request = request
        self.n_prompt, self.n_generated = len(request.prompt_ids), 0
        self.cancelled = False
        self.started = time.perf_counter()
        self.token_times: list[float] = []      # of the engine's tokens; readers may get several at once
        self._decoder, self._scanner = tokenizer.stream_decoder(), StopScanner(request.stop)
        self._events, self._done = queue.SimpleQueue(), threading.Event()

    def __iter__(self):
        """Events as they come. Ends without a finish reason when cancelled; EngineStopped when the engine fails."""
        while isinstance(event := self._events.get(), Event):
            yield event
        self._events.put(event)         # the end, for whoever reads on
        if event is not None:
            raise EngineStopped(event)

    def cancel(self):
        """End the generation within one step of the engine, whether it waits or runs."""
        self.cancelled = True

    def wait(self):
        """Return when it has finished, failed or been cancelled."""
        self._done.wait()

    def push(self, token: int, finish_reason: str | None) -> str | None:
        """Take the next token from the scheduler; returns the finish reason, which a stop string may have supplied."""
        self.n_generated += 1
        self.token_times.append(time.perf_counter())
        text = self._scanner.push(self._decoder.push(token))
        if finish_reason and not self._scanner.stopped:
            text += self._scanner.push(self._decoder.flush()) + self._scanner.flush()
        if self._scanner.stopped:
            finish_reason = "stop"
        self._events.put(Event(token, text, finish_reason))
        return finish_reason

    def close(self, error: str | None = None):
        """No more events; with `error`, readers hear why."""
        self._events.put(error)
        self._done.set()


class Sequence:
    """A generation that holds a slot: its tokens, and how many of them the caches have seen."""

    def __init__(self, generation: Generation, slot: int):
        self.generation, self.slot = generation, slot
        self.tokens = list(generation.request.prompt_ids)
        self.n_cached = 0
        self.in_flight = 0          # tokens that a queued decode step will find: 0 or 1
        self.pages: list[int] = []

    @property
    def in_prompt(self) -> bool:
        return self.n_cached < self.generation.n_prompt

    def is_full(self, more: int, n_ctx: int) -> bool:
        """Whether so many more tokens end it by its length."""
        return (self.generation.n_generated + more == self.generation.request.max_tokens
                or len(self.tokens) + more >= n_ctx)


@dataclass(frozen=True)
class Flight:
    """A decode step that is queued: the sequences of its rows, and the tokens that it will find."""

    sequences: list[Sequence]
    tokens: Tokens


class Scheduler:
    """Decides what the cards do next. One thread repeats `step`: admit, one chunk of one prompt, one decode step.

    So prompts and running answers take turns, and a cancellation is seen at every step. The queue has no limit:
    the server, which strangers may reach, has one.

    A decode step is queued before the tokens of the one before it are looked at, since the cards hand those on
    themselves: so they never wait for the host. Where such a token ends its sequence, the step has computed a row
    for nothing: it wrote into the sequence's own slot and pages, before whoever has them next.
    """

    def __init__(self, pipeline: Pipeline, tokenizer: Tokenizer, n_slots: int, n_ctx: int, chunk: int):
        self.pipeline, self.tokenizer, self.n_ctx, self.chunk = pipeline, tokenizer, n_ctx, chunk
        self.pool = PagePool(n_slots * pages_for(n_ctx))
        self.free_slots = list(reversed(range(n_slots)))
        self.waiting, self.running = collections.deque(), []
        self.flight: Flight | None = None           # while there is one, the cards know its batch
        self.changed = threading.Condition()        # guards waiting, guests, closing and error
        self.closing, self.error = False, None      # error: the sentence on what the engine failed with
        self.stepping = threading.Lock()            # held while the pipeline is in use
        self.guests = 0                             # threads in borrow_slot; the scheduler lets them go first
        self.thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self.thread.start()

    def submit(self, generation: Generation):
        """Queue a generation. Raises EngineStopped."""
        with self.changed:
            if self.closing:
                raise EngineStopped(self.error or "the engine was closed")
            self.waiting.append(generation)
            self.changed.notify_all()

    def close(self):
        """End every generation, and the thread."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        self.thread.join()

    @contextlib.contextmanager
    def borrow_slot(self):
        """A free slot and the pipeline to oneself, for work outside the queue, between two steps of the scheduler.

        Raises RequestError where every slot is taken, EngineStopped after a failure or the end.
        """
        with self._as_guest(), self.stepping:
            if self.closing or self.error is not None:
                raise EngineStopped(self.error or "the engine was closed")
            if not self.free_slots:
                raise RequestError("slots", "every slot is taken by a running request")
            sequence = Sequence(Generation(Request([]), self.tokenizer), self.free_slots.pop())
            try:
                yield sequence
            finally:
                self._release(sequence)

    @contextlib.contextmanager
    def _as_guest(self):
        """Holds the next step back. The lock alone would not do: a thread that frees one and takes it again wins."""
        with self.changed:
            self.guests += 1
        try:
            yield
        finally:
            with self.changed:
                self.guests -= 1
                self.changed.notify_all()

    def _run(self):
        try:
            while self._wait_for_work():
                with self.stepping:
                    self.step()
        except (CardError, CompileError) as error:      # every request hears of it, and later ones are refused
            self.error = f"the engine has stopped: {error}"
        except Exception as error:
            logging.getLogger("qengine").error("the engine has stopped", exc_info=error)
            self.error = "the engine has stopped after an internal error"
        for stage in self.pipeline.stages:              # what is queued uses memory that may go now
            with contextlib.suppress(CardError):
                stage.card.synchronize()
        with self.changed:
            self.closing = True
            for generation in [s.generation for s in self.running] + list(self.waiting):
                generation.close(self.error)
            self.running.clear()
            self.waiting.clear()

    def _wait_for_work(self) -> bool:
        with self.changed:
            self.changed.wait_for(lambda: self.closing or ((self.waiting or self.running) and not self.guests))
            return not self.closing

    def step(self):
        """Admit what fits; run a chunk of the oldest unfinished prompt, then a decode step of all running answers."""
        self._drop_cancelled()
        self._admit()
        prompt = next((s for s in self.running if s.in_prompt), None)
        if prompt is not None:
            self._prefill(prompt)
        self._decode()

    def _drop_cancelled(self):
        for sequence in [s for s in self.running if s.generation.cancelled]:
            self._finish(sequence)
        with self.changed:
            for generation in [g for g in self.waiting if g.cancelled]:
                self.waiting.remove(generation)
                generation.close()

    def _admit(self):
        while self.free_slots:
            with self.changed:
                if not self.waiting:
                    return
                generation = self.waiting.popleft()
            sequence = Sequence(generation, self.free_slots.pop())
            self.running.append(sequence)
            self.pipeline.start(sequence.slot, generation.request)

    def _prefill(self, sequence: Sequence):
        """The next chunk of a prompt. Chunks start at multiples of 64, so no result depends on their size."""
        start = sequence.n_cached
        end = start + self.pipeline.pass_rows(sequence.generation.n_prompt - start, self.chunk)
        self.reserve(sequence, end)
        self.pipeline.prefill(sequence.tokens[start:end], sequence.slot, start)
        sequence.n_cached = end
        if not sequence.in_prompt:
            self._take(sequence, self.pipeline.sample_row(end - start - 1, sequence.slot))

    def _decode(self):
        """Queue a step of all answers, and then take the tokens of the one before."""
        if self.flight and self.flight.sequences != self._answering():
            self._land()                            # who stays needs its token to be placed anew
        batch = self._answering()
        if not batch:
            return
        if self.flight is None:
            self.pipeline.place([s.tokens[-1] for s in batch], [s.slot for s in batch], [s.n_cached for s in batch])
        for sequence in batch:
            self.reserve(sequence, sequence.n_cached + sequence.in_flight + 1)
        tokens = self.pipeline.step(len(batch))
        self._land()
        for sequence in batch:
            sequence.in_flight = 1
        self.flight = Flight(batch, tokens)

    def _answering(self) -> list[Sequence]:
        """Who takes part in the next step: all answers, but those that the step in flight brings to their end."""
        return [s for s in self.running if not s.in_prompt and not (s.in_flight and s.is_full(1, self.n_ctx))]

    def _land(self):
        """Take the tokens of the step in flight, but for sequences that have ended meanwhile."""
        flight, self.flight = self.flight, None
        if flight is None:
            return
        for sequence, token in zip(flight.sequences, flight.tokens.read().tolist()):
            if sequence in self.running:
                sequence.n_cached += 1
                sequence.in_flight = 0
                self._take(sequence, token)

    def reserve(self, sequence: Sequence, n_tokens: int):
        """Pages for the first n_tokens of a sequence. There are enough: the pool holds every slot's whole context."""
        missing = pages_for(n_tokens) - len(sequence.pages)
        if missing > 0:
            sequence.pages += self.pool.take(missing)
            self.pipeline.set_pages(sequence.slot, sequence.pages)

    def _take(self, sequence: Sequence, token: int):
        """Hand a new token of a sequence to its reader; after the last one the slot is free."""
        if token < 0:
            raise CardError(NAN_LOGITS)
        generation, finish_reason = sequence.generation, None
        if token in self.tokenizer.eos_ids and not generation.request.ignore_eos:
            finish_reason = "stop"
        elif sequence.is_full(1, self.n_ctx):
            finish_reason = "length"
        sequence.tokens.append(token)
        if generation.push(token, finish_reason):
            self._finish(sequence)

    def _finish(self, sequence: Sequence):
        self.running.remove(sequence)
        self._release(sequence)
        sequence.generation.close()

    def _release(self, sequence: Sequence):
        self.pool.give_back(sequence.pages)
        self.free_slots.append(sequence.slot)


class Engine:
    """A loaded model, for notebooks, the command line and the server.

        engine = qengine.load()             # the small model that comes with qengine, or name a file
        print(engine.generate("Once upon a time", max_tokens=32))
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, template: ChatTemplate | None, pipeline: Pipeline,
                 n_slots: int, n_ctx: int, chunk: int):
        self.name, self.config, self.tokenizer, self.template = config.name, config, tokenizer, template
        self.pipeline, self.n_ctx, self.chunk = pipeline, n_ctx, chunk
        self.cards = [stage.card for stage in pipeline.stages]
        self.scheduler = Scheduler(pipeline, tokenizer, n_slots, n_ctx, chunk)

    @property
    def error(self) -> str | None:
        """What the engine failed with, a sentence; None while it works."""
        return self.scheduler.error

    def submit(self, request: Request) -> Generation:
        """Start a request. Raises RequestError or EngineStopped."""
        request.check(self.config.n_vocab, self.n_ctx)
        generation = Generation(request, self.tokenizer)
        self.scheduler.submit(generation)
        return generation

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt; RequestError as `encode_prompt` has it."""
        return encode_prompt(self.tokenizer, text, self.n_ctx)

    def generate(self, prompt: str | list[int], **sampling) -> str:
        """The text that follows a prompt, given as text or token ids. `sampling`: the other fields of Request."""
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return "".join(event.text for event in self.submit(Request(ids, **sampling)))

    def evaluate(self, ids: list[int], tap=None) -> np.ndarray:
        """Logits float32 [len(ids), n_vocab] after each token of a text, which runs as a prompt does.

        `tap(name, array)` sees the hidden states of each chunk on the card: "embedding", "layer 0", ...
        """
        logits, start = np.empty((len(ids), self.config.n_vocab), np.float32), 0
        for rows in self.logit_rows(ids, tap):
            logits[start:start + len(rows)] = rows
            start += len(rows)
        return logits

    def logit_rows(self, ids: list[int], tap=None):
        """What `evaluate` gives, up to HEAD_ROWS rows at a time: all of a long text's would take gigabytes.

        A slot is taken, and the engine does nothing else, until the last rows are out.
        """
        Request(list(ids)).check(self.config.n_vocab, self.n_ctx + 1)
        model = self.pipeline.last.model
        with self.scheduler.borrow_slot() as sequence:
            self.pipeline.start(sequence.slot, sequence.generation.request)
            self.scheduler.reserve(sequence, len(ids))
            for start in range(0, len(ids), self.chunk):
                chunk = ids[start:start + self.chunk]
                self.pipeline.prefill(chunk, sequence.slot, start, tap)
                for row in range(0, len(chunk), HEAD_ROWS):
                    n = min(HEAD_ROWS, len(chunk) - row)
                    model.compute_logits(model.x[row:row + n], n)
                    yield model.card.download(model.logits[:n])

    def close(self):
        """End what runs."""
        self.scheduler.close()


def encode_prompt(tokenizer: Tokenizer, text: str, n_ctx: int) -> list[int]:
    """Token ids of a prompt. RequestError, before any work, when its letters alone say that it cannot fit."""
    if len(text) - text.count(GUARD) > n_ctx * tokenizer.max_token_bytes:
        raise RequestError("prompt", f"the prompt of {len(text)} letters has more tokens than the context "
                                     f"holds, {n_ctx}, prompt and answer together")
    return tokenizer.encode(text)


@dataclass(frozen=True)
class OpenModel:
    """A model whose description is read and checked, and whose weights are still where they were."""

    config: Config
    tokenizer: Tokenizer
    template: ChatTemplate | None
    weights: FileWeights | SyntheticWeights

    def n_ctx(self, ctx: int | None) -> int:
        """Tokens of a slot: `ctx` where given, else DEFAULT_CTX, or the model's own where that is less."""
        return ctx or min(self.config.context_length, DEFAULT_CTX)


def open_model(model: str | Path) -> OpenModel:
    """A GGUF file, or random weights by the name "synthetic:NAME" or "synthetic:NAME:FORMAT", on no card yet.
    Raises ModelError."""
    if model == DEFAULT_MODEL and not DEFAULT_MODEL.exists():
        raise ModelError(f"{model}: the model that comes with qengine is not there; name another (-m MODEL)")
    kind, _, name = str(model).partition(":")
    if kind == "synthetic":
        name, _, format = name.partition(":")
        if (format := format.upper() or "Q8_0") not in FORMATS:
            raise ModelError(f"{model}: there is no such format, only {', '.join(FORMATS).lower()}")
        config = dataclasses.replace(Config.synthetic(name), name=str(model))
        template = ChatTemplate(SYNTHETIC_TEMPLATE)
        return OpenModel(config, ByteTokenizer(config.n_vocab), template, SyntheticWeights(config, format))
    gguf = GGUF(model)
    config = Config.from_gguf(gguf)
    tokenizer = load_tokenizer(gguf)
    return OpenModel(config, tokenizer, ChatTemplate.from_gguf(gguf, tokenizer), FileWeights(gguf))


def load(model: str | Path | OpenModel = DEFAULT_MODEL, card: str | Card | None = None,
         ctx: int | None = None, slots: int = 1, chunk: int | None = None, progress: bool = True) -> Engine:
    """Load a GGUF file, or random weights by the name "synthetic:0.8b", "synthetic:9b:q4_k", ..., ready to generate.

    model: its path or name, or what `open_model` made of that; by default the model that comes with qengine.
    card: a Card, or the name of one as kernels.card.open_cards takes it; by default the first NVIDIA card, or else an
    emulated one. ctx: tokens of a slot, prompt and answer together. slots: answers that are generated at the same time.
    chunk: tokens of a prompt per pass at most, a multiple of 64; by default what suits card and model. progress: show on stderr what is used and how far it is.
    Raises ModelError, RequestError, CardError (OutOfMemory names what did not fit).
    """
    limits = ("ctx", 1 if ctx is None else ctx, 1), ("slots", slots, 1), ("chunk", PAGE_TOKENS if chunk is None else chunk, PAGE_TOKENS)
    for name, value, unit in limits:
        if value < 1 or value % unit:
            raise RequestError(name, f"{name} must be {unit}, {2 * unit}, ..., not {value}")
    opened = model if isinstance(model, OpenModel) else open_model(model)
    config, n_ctx = opened.config, opened.n_ctx(ctx)
    used = card if isinstance(card, Card) else _open_card(card)
    free = used.free_bytes
    used.replace(probe.saved_replacements(used))
    if progress:
        note(f"card: {used.describe()}")
        if n_ctx > config.context_length:
            note(f"warning: the model was made for {config.context_length} tokens of context, not {n_ctx}; "
                 "what comes after those may make no sense")
    loading = functools.partial(tqdm.tqdm, desc="loading layers", unit="layer", leave=False, disable=not progress)
    layers = range(config.n_layers)
    stage = Stage(used, config, opened.weights, layers, slots, n_ctx, chunk, loading)
    pipeline = Pipeline([stage])
    pipeline.load_kernels(progress)
    if progress:
        note(f"model: {config.name}, {config.n_parameters / 1e6:,.1f} million parameters; "
             f"{show_bytes(free - used.free_bytes)} on the card, {slots} x {n_ctx} tokens of context included")
    return Engine(config, opened.tokenizer, opened.template, pipeline, slots, n_ctx, stage.chunk)


def _open_card(name: str | None) -> Card:
    """The card of that name. Several are refused: sharing a model between cards would be meant, and is not built."""
    cards = open_cards(name)
    if name is not None and len(cards) > 1:
        raise CardError(f"{name} means {len(cards)} cards, and a model runs on one for now: say emulated, or cuda:0")
    return cards[0]


def note(text: str):
    """A line for the person at the terminal; stdout is for answers."""
    print(text, file=sys.stderr, flush=True)


# ======================================================================================================
# 9  Server
# ======================================================================================================
# OpenAI's wire format over HTTP. It translates to Request and back; the engine does all the work.

MAX_WAITING = 64            # requests beyond those that have a slot; one more is answered 429
MAX_BODY = 4 << 20          # bytes of one request: the longest context, as token ids or as escaped text
MAX_STOPS = 16              # stop strings of one request
POLL_SECONDS = 0.05         # between two looks for clients that hung up

ENDPOINTS = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /health"
ROLES = ("system", "developer", "user", "assistant", "tool")

# Fields of both endpoints; fields that never change an answer; fields not supported yet, with the values that
# ask for nothing. Any other is refused: whoever misspells one should hear of it.
FIELDS = {*SAMPLING, "model", "stream", "stream_options", "stop", "ignore_eos", "return_token_ids",
          "max_completion_tokens"}
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
           "prompt_cache_retention", "parallel_tool_calls"}
NEUTRAL = {
    "n": [1], "best_of": [1], "echo": [False], "suffix": [""], "logprobs": [False], "top_logprobs": [0],
    "logit_bias": [{}], "presence_penalty": [0], "frequency_penalty": [0], "repetition_penalty": [1],
    "response_format": [{"type": "text"}], "modalities": [["text"]],
    "tools": [[]], "tool_choice": ["none", "auto"], "functions": [[]], "function_call": ["none", "auto"],
}


def parse_body(data: bytes) -> dict:
    """The JSON object in a request body; RequestError when it holds none, or text that is not Unicode."""
    def refuse(constant):
        raise ValueError(f"{constant} is no JSON number")

    try:
        body = json.loads(data, parse_constant=refuse)
        if not isinstance(body, dict):
            raise RequestError(None, "the request body must be a JSON object")
        for name, value in body.items():
            json.dumps([name, value], ensure_ascii=False).encode()
    except UnicodeEncodeError:      # "\ud800" is legal JSON, yet no text: the tokenizer cannot take it
        name = name.encode(errors="replace").decode()
        raise RequestError(name, f"'{name}' holds half of a surrogate pair") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(None, f"the request body is not JSON: {error}") from None
    return body


def read_body(own_fields: set) -> dict:
    """The fields of the current HTTP request, less nulls and those that change nothing.

    own_fields: what this endpoint takes beside FIELDS. RequestError names the one that it does not take.
    """
    body = parse_body(flask.request.get_data())
    body = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    for name in body.keys() - FIELDS - own_fields:
        if name not in NEUTRAL:
            raise RequestError(name, f"unknown field '{name}'")
        if not any(body[name] == value and isinstance(body[name], bool) == isinstance(value, bool)
                   for value in NEUTRAL[name]):         # false equals 0 in Python, yet not in a request
            neutral = json.dumps(NEUTRAL[name][0])
            raise RequestError(name, f"'{name}' is not supported yet (except as {neutral})")
    return body


def typed(body: dict, name: str, kind: type, default):
    """body[name], or `default` where it is missing or null; RequestError when it is not of this kind."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        nouns = {bool: "true or false", str: "a string", dict: "an object", list: "a list"}
        raise RequestError(name, f"'{name}' must be {nouns[kind]}")
    return value


def read_sampling(body: dict, defaults: dict) -> dict:
    """Arguments of Request, all but the prompt: `defaults`, overruled by what the body says."""
    said = {name: check_sampling(name, body[name]) for name in SAMPLING if name in body}
    if (name := "max_completion_tokens") in body:
        said["max_tokens"] = check_sampling("max_tokens", body[name], name)
    stop = body.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > MAX_STOPS or not all(isinstance(s, str) and s for s in stop):
        raise RequestError("stop", f"'stop' must be a non-empty string or up to {MAX_STOPS} of them")
    return defaults | said | {"stop": stop, "ignore_eos": typed(body, "ignore_eos", bool, False)}


def read_messages(body: dict) -> list:
    """The conversation of a chat request; what is in the contents is the template's business."""
    messages = typed(body, "messages", list, [])
    if not messages:
        raise RequestError("messages", "'messages' must be a list of at least one message")
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise RequestError(where, f"{where} must be an object")
        if message.get("role") not in ROLES:
            raise RequestError(f"{where}.role", f"{where}.role must be one of {', '.join(ROLES)}")
        if message.get("content") is None and not message.get("tool_calls"):
            raise RequestError(f"{where}.content", f"{where}.content is missing")
    names = {"developer": "system"}         # a newer name, which the templates do not know
    return [message | {"role": names.get(message["role"], message["role"])} for message in messages]


def read_prompt(body: dict, engine) -> list:
    """The token ids of a completion request: from a string, a list of ids, or a list of one such."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return engine.encode(prompt)
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    raise RequestError("prompt", "'prompt' must be one string or one list of token ids")


class ChatShape:
    """How /v1/chat/completions writes a choice."""
    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    opening = [{"delta": {"role": "assistant", "content": ""}}]

    @staticmethod
    def choice(text):
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    @staticmethod
    def piece(text):
        return {"delta": {"content": text} if text else {}}


class TextShape:
    """How /v1/completions writes a choice."""
    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"
    opening = []

    @staticmethod
    def choice(text):
        return {"text": text}

    piece = choice


class Service:
    """The HTTP endpoints and what they share.

    engine: None while it loads (the answer is 503). sampling: arguments of Request where the HTTP request is
    silent; thinking: likewise of the template. max_requests: how many may be open at once.
    """

    def __init__(self, engine, sampling, thinking, max_requests):
        self.engine, self.max_requests = engine, max_requests
        self.sampling, self.thinking = sampling, thinking
        self.started = int(time.time())
        self.changed = threading.Condition()        # guards what follows
        self.open = {}                              # id -> (Generation, function: has its client hung up?)
        self.closing = False
        threading.Thread(target=self.watch, name="client watcher", daemon=True).start()

    # ---- endpoints ----------------------------------------------------------------------------------------

    def health(self):
        if self.engine is None:
            return flask.jsonify(status="loading"), 503
        if self.engine.error is not None:
            return flask.jsonify(status="error", error=self.engine.error), 503
        return flask.jsonify(status="ok", model=self.engine.name,
                             cards=[card.describe() for card in self.engine.cards])

    def models(self):
        model = {"id": self.ready().name, "object": "model", "created": self.started, "owned_by": "qengine"}
        return flask.jsonify(object="list", data=[model])

    def chat_completions(self):
        engine, body = self.ready(), read_body({"messages", "chat_template_kwargs"})
        messages = read_messages(body)
        switches = typed(body, "chat_template_kwargs", dict, {})
        for name in switches.keys() - {"enable_thinking"}:
            raise RequestError("chat_template_kwargs", f"unknown template argument '{name}'")
        thinking = typed(switches, "enable_thinking", bool, self.thinking)
        if engine.template is None:
            raise RequestError("messages", "this model has no chat template: use /v1/completions")
        prompt = engine.encode(engine.template.render(messages, enable_thinking=thinking))
        return self.answer(prompt, self.sampling, body, ChatShape)

    def completions(self):
        engine, body = self.ready(), read_body({"prompt"})
        defaults = {"max_tokens": 16} | self.sampling       # 16: OpenAI's default for this endpoint
        return self.answer(read_prompt(body, engine), defaults, body, TextShape)

    def ready(self):
        """The engine, or the answer 503."""
        if self.engine is None:
            raise ServiceUnavailable("the model is still loading", retry_after=5)
        if self.engine.error is not None:
            raise EngineStopped(self.engine.error)
        return self.engine

    # ---- from request to answer ---------------------------------------------------------------------------

    def answer(self, prompt, defaults, body, shape):
        """Submits the request and returns its HTTP response, whole or as a stream of events."""
        typed(body, "model", str, "")                       # any name is accepted: there is one model
        options = typed(body, "stream_options", dict, {})
        with_usage = typed(options, "include_usage", bool, False)
        with_ids = typed(body, "return_token_ids", bool, False)
        stream = typed(body, "stream", bool, False)
        generation = self.submit(Request(prompt, **read_sampling(body, defaults)))
        head = {"id": shape.prefix + uuid.uuid4().hex, "object": shape.chunk if stream else shape.whole,
                "created": int(time.time()), "model": self.engine.name}
        if stream:
            response = flask.Response(self.events(generation, shape, head, with_usage, with_ids),
                                      mimetype="text/event-stream", headers={"Cache-Control": "no-cache"})
            # not a `finally` in events(): a generator that was never started does not run it
            response.call_on_close(lambda: self.release(generation))
            return response
        try:
            return flask.jsonify(self.whole(generation, shape, head, with_ids))
        finally:
            self.release(generation)

    def whole(self, generation, shape, head, with_ids):
        """The answer as one JSON object."""
        text, ids, finish_reason = [], [], None
        for event in generation:
            text.append(event.text)
            ids.append(event.token_id)
            finish_reason = event.finish_reason
        if finish_reason is None:
            raise ServiceUnavailable("the answer was cancelled")
        choice = {"index": 0} | shape.choice("".join(text)) | ({"token_ids": ids} if with_ids else {})
        choices = [choice | {"logprobs": None, "finish_reason": finish_reason}]
        return head | {"choices": choices, "usage": usage(generation)}

    def events(self, generation, shape, head, with_usage, with_ids):
        """The answer as server-sent events: a chunk per piece of text, usage if asked for, then [DONE]."""
        def chunk(piece, finish_reason=None, ids=()):
            choice = {"index": 0} | piece | ({"token_ids": list(ids)} if with_ids else {})
            choices = [choice | {"logprobs": None, "finish_reason": finish_reason}]
            return sse(head | {"choices": choices} | ({"usage": None} if with_usage else {}))

        try:
            for piece in shape.opening:
                yield chunk(piece)
            finish_reason = None
            for event in generation:
                finish_reason = event.finish_reason
                if event.text or finish_reason or with_ids:
                    yield chunk(shape.piece(event.text), finish_reason, [event.token_id])
            if finish_reason is None:
                raise ServiceUnavailable("the answer was cancelled")
            if with_usage:
                yield sse(head | {"choices": [], "usage": usage(generation)})
            yield "data: [DONE]\n\n"
        except Exception as error:      # the status is out already: clients raise from this event instead
            yield sse(error_body(error)[0])

    # ---- open requests ------------------------------------------------------------------------------------

    def submit(self, request):
        """Hands the request to the engine; its generation is open from now on, and its client watched."""
        gone = flask.request.environ.get("waitress.client_disconnected", lambda: False)
        with self.changed:
            if self.closing:
                raise ServiceUnavailable("the server is shutting down")
            if len(self.open) >= self.max_requests:
                raise TooManyRequests(f"too many requests: {self.max_requests} are open already", retry_after=1)
            generation = self.engine.submit(request)
            self.open[id(generation)] = generation, gone
            self.changed.notify_all()
        return generation

    def release(self, generation):
        """Ends a generation, finished or not."""
        generation.cancel()
        with self.changed:
            self.open.pop(id(generation), None)
            self.changed.notify_all()

    def watch(self):
        """Cancels generations whose clients hung up: their handlers wait for a token and cannot notice."""
        while not self.closing:
            with self.changed:
                self.changed.wait_for(lambda: self.open or self.closing)
                gone = [generation for generation, is_gone in self.open.values() if is_gone()]
            for generation in gone:
                generation.cancel()
            time.sleep(POLL_SECONDS)

    def close(self, timeout=5.0) -> bool:
        """Refuses new requests, cancels the open ones and waits for their end, `timeout` seconds at most.

        Returns whether all have ended.
        """
        with self.changed:
            self.closing = True
            self.changed.notify_all()
            for generation, _ in self.open.values():
                generation.cancel()
            return self.changed.wait_for(lambda: not self.open, timeout)


def usage(generation) -> dict:
    return {"prompt_tokens": generation.n_prompt, "completion_tokens": generation.n_generated,
            "total_tokens": generation.n_prompt + generation.n_generated}


def sse(data: dict) -> str:
    """One server-sent event. ASCII only: some clients also break lines at U+0085 and U+2028."""
    return f"data: {json.dumps(data)}\n\n"


def error_body(error: Exception) -> tuple:
    """(body, status, headers) of an error in OpenAI's shape; the unforeseen is logged and answered 500."""
    param, headers = None, {}
    if isinstance(error, EngineStopped):
        error = ServiceUnavailable(str(error))
    if isinstance(error, RequestError):
        status, message, param = 400, str(error), error.field
    elif isinstance(error, HTTPException):
        status, message = error.code, error.description
        headers = {name: value for name, value in error.get_headers() if name in ("Allow", "Retry-After")}
        if status in (404, 405):
            message = f"{flask.request.method} {flask.request.path[:80]} is not served; there are {ENDPOINTS}"
    else:
        logging.getLogger("qengine").error("a request failed", exc_info=error)
        status, message = 500, "internal error"
    kind = "server_error" if status >= 500 else "invalid_request_error"
    kind = "rate_limit_error" if status == 429 else kind
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}, status, headers


def create_app(engine=None, sampling=None, thinking=None, max_requests=MAX_WAITING) -> flask.Flask:
    """The Flask app over `engine`; app.extensions["qengine"] is its Service.

    Without an engine it answers 503 until the service is given one: it may listen before the model is there.
    """
    defaults = {"temperature": 1.0} | (sampling or {})      # OpenAI's default, where Request's own is greedy
    service = Service(engine, defaults, thinking, max_requests)
    app = flask.Flask("qengine", static_folder=None)
    app.extensions["qengine"] = service
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY
    app.json.sort_keys = False
    app.add_url_rule("/health", view_func=service.health)
    app.add_url_rule("/v1/models", view_func=service.models)
    app.add_url_rule("/v1/chat/completions", view_func=service.chat_completions, methods=["POST"])
    app.add_url_rule("/v1/completions", view_func=service.completions, methods=["POST"])
    app.register_error_handler(Exception, error_body)
    return app


def listen(host: str, port: int) -> list:
    """A listening socket for each address of `host`. OSError: one of them cannot listen, and so none does."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.create_server(address[:2], family=family)) for family, _, _, _, address
                   in dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))]
        opened.pop_all()        # from here on they are the caller's
    return sockets


class HTTPError(waitress.task.ErrorTask):
    """Waitress's own answer to what is no HTTP request, or too large a one, in OpenAI's shape."""

    def execute(self):
        error = self.request.error
        refusal = HTTPException(f"{error.reason}: {error.body}")
        refusal.code = error.code
        body = json.dumps(error_body(refusal)[0]).encode()
        self.status, self.content_length = f"{error.code} {error.reason}", len(body)
        self.response_headers.append(("Content-Type", "application/json"))
        self.set_close_on_finish()
        self.write(body)


class Connection(waitress.channel.HTTPChannel):
    """A client's connection."""

    error_task_class = HTTPError

    def hang_up(self):
        """Closes it by way of the thread that polls it, which also wakes whoever waits to write to it."""
        with contextlib.suppress(OSError, AttributeError):      # it was closed meanwhile
            self.socket.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def serving(app: flask.Flask, host: str, port: int):
    """Answers HTTP on other threads while the `with` body runs; gives the port. OSError: it cannot listen."""
    service = app.extensions["qengine"]
    try:
        sockets = listen(host, port)        # first: waitress starts its threads before it tries to
    except OSError:
        service.close()
        raise
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)     # that requests wait is no news
    watched = {}                                # waitress keeps here what it polls: sockets by their number
    server = waitress.create_server(
        app, watched, sockets=sockets, ident="qengine",
        threads=service.max_requests + 8,       # an open request holds a thread: some are left for /health
        connection_limit=1000,                  # above the threads, or streams wait for a connection
        asyncore_use_poll=True,                 # select() cannot watch that many
        channel_request_lookahead=1,            # without it a client that hangs up is not noticed
        outbuf_high_watermark=100_000,          # bytes: further than that no answer runs ahead of its reader
        max_request_body_size=4 * MAX_BODY)     # up to there Flask refuses, with an error in the right shape
    listeners = [item for item in watched.values() if isinstance(item, waitress.server.BaseWSGIServer)]
    for listener in listeners:
        listener.channel_class = Connection
    thread = threading.Thread(target=server.run, name="http server", daemon=True)
    thread.start()
    try:
        yield getattr(server, "effective_port", port)       # a host of several addresses has no such thing
    finally:
        if not service.close():                 # somebody does not read what is written
            hang_up(watched)
        server.task_dispatcher.shutdown()       # waits for the threads that write the last answers
        for listener in listeners:
            listener.close()
        thread.join(1.0)                        # what is written leaves
        hang_up(watched)                        # on the idle, and on those that do not read
        thread.join()


def hang_up(watched: dict):
    for connection in [item for item in list(watched.values()) if isinstance(item, Connection)]:
        connection.hang_up()


# ======================================================================================================
# 10  Bench
# ======================================================================================================
# Prefill: a whole prompt of random tokens until its first answer token is on the host. Decode: steps of a
# batch of slots from a context on, each until its tokens are on the host. Per cent are of what the probe
# found: of the int8 operations that its dp4a lanes do at the measured clock (prefill: those of the matrix
# products), and of the bytes per second that it reads (decode: weights, recurrent states and KV pages).
# What fits in a cache is read faster than memory: a small model's decode may go beyond 100 per cent.

PROMPT_LENGTHS, CONTEXTS, REPEATS = (297, 1160, 4620, 18400), (297, 4620, 18400), 3
EMULATED_LENGTH = 297       # prompt and context on the emulated card, once
DECODE_STEPS = 32           # of one timed run


@dataclass(frozen=True)
class Operation:
    """What the launches of one kernel take, recorded and replayed by themselves."""

    name: str
    launches: int
    seconds: float


@dataclass(frozen=True)
class Speed:
    """How fast prefill or decode is at a context; `operations` are those of the prompt, or of one step."""

    context: int
    batch: int
    tokens_per_s: float             # the median of the repeats
    repeats: list[float]
    percent_of_peak: float
    launches: int                   # of the prompt, or of a step
    operations: list[Operation]


class Bench:
    """Times an engine that does nothing else; `batch` of its slots decode together. Close it afterwards."""

    def __init__(self, engine: Engine, report: probe.Report, repeats: int, batch: int):
        self.engine, self.report, self.repeats, self.batch = engine, report, repeats, batch
        self.pipeline, self.stage, self.card = engine.pipeline, engine.pipeline.last, engine.cards[0]
        self.random = np.random.default_rng(1)
        pages = pages_for(engine.n_ctx)
        for slot in range(batch):
            self.pipeline.set_pages(slot, list(range(slot * pages, (slot + 1) * pages)))

    # ---- what is timed ----

    def chunks(self, n: int):
        """(start, token ids) of the passes of a random prompt of n tokens."""
        ids, start, chunks = self.random.integers(0, self.engine.config.n_vocab, n).tolist(), 0, []
        while start < n:
            end = start + self.pipeline.pass_rows(n - start, self.engine.chunk)
            chunks.append((start, ids[start:end]))
            start = end
        return chunks

    def prompt(self, n: int, slot: int = 0) -> float:
        """Seconds of a prompt of n tokens with its first answer token."""
        chunks = self.chunks(n)
        self.pipeline.start(slot, Request([0]))
        started = time.perf_counter()
        for start, ids in chunks:
            self.pipeline.prefill(ids, slot, start)
        self.pipeline.sample_row(len(chunks[-1][1]) - 1, slot)
        return time.perf_counter() - started

    def steps(self, context: int) -> float:
        """Seconds of DECODE_STEPS steps of the batch from a context on."""
        self.place_step(context)
        started = time.perf_counter()
        tokens = self.pipeline.step(self.batch)
        for _ in range(DECODE_STEPS - 1):               # one ahead, as the scheduler does
            tokens, before = self.pipeline.step(self.batch), tokens
            before.read()
        tokens.read()
        return time.perf_counter() - started

    def prefill(self, n: int) -> Speed:
        """The Speed of a prompt of n tokens."""
        self.prompt(n)
        speeds = [n / self.prompt(n) for _ in range(self.repeats)]
        times = {}
        for start, ids in self.chunks(n):
            operation_seconds(self.card, self.chunk(start, ids), times)
        share = self.prompt_operations(n) / n * np.median(speeds) / self.report.dp4a_peak
        return self.speed(n, 1, speeds, share, times)

    def chunk(self, start: int, ids: list[int]):
        """A function that queues the launches of a pass over `ids`, whose inputs are on the card."""
        set_rows(self.stage.inputs, ids, [0] * len(ids), range(start, start + len(ids)))
        return functools.partial(self.stage.model.forward, rows_of(self.stage.inputs, len(ids), is_decode=False))

    def decode(self, context: int) -> Speed:
        """The Speed of the batch from a context on."""
        for slot in range(self.batch):
            self.prompt(context, slot)
        self.steps(context)
        speeds = [self.batch * DECODE_STEPS / self.steps(context) for _ in range(self.repeats)]
        self.place_step(context)
        times = operation_seconds(self.card, self.step)
        share = self.step_bytes(context) / self.batch * np.median(speeds) / self.report.read_bandwidth
        return self.speed(context, self.batch, speeds, share, times)

    def speed(self, context, batch, speeds, share, times) -> Speed:
        operations = [Operation(name, n, seconds) for name, (n, seconds) in times.items()]
        operations.sort(key=lambda operation: -operation.seconds)
        return Speed(context, batch, float(np.median(speeds)), speeds, float(100 * share),
                     sum(operation.launches for operation in operations), operations)

    def place_step(self, context: int):
        """Tell the card the inputs of a decode step."""
        self.pipeline.place([0] * self.batch, range(self.batch), [context] * self.batch)

    def step(self):
        """Queue the launches of a decode step, which `Stage.step` replays from a recording."""
        self.stage.launch_step(self.batch)

    # ---- what it must move and compute ----

    def weights(self) -> list[Matrix]:
        """The matrices of the layers and the head: what every decode step reads whole."""
        model = self.stage.model
        return [matrix for layer in model.layers for matrix in matrices(layer)] + [model.head]

    def prompt_operations(self, n: int) -> int:
        """Multiplications and additions of a prompt's matrix products, the head's of its last row alone."""
        *layers, head = self.weights()
        return 2 * (n * sum(matrix.n * matrix.k for matrix in layers) + head.n * head.k)

    def step_bytes(self, context: int) -> int:
        """Bytes of a decode step in the middle of DECODE_STEPS: weights once, and of every slot the recurrent
        states, read and written, and the keys and values up to its position."""
        c, cache = self.engine.config, self.stage.cache
        weights = sum(m.values.nbytes + (m.scales.nbytes if m.is_quantized else 0) for m in self.weights())
        states = sum(2 * s.memory[0].nbytes + s.conv[0].nbytes for s in cache.recurrent.values())
        kept = (context + DECODE_STEPS // 2) * len(cache.pages) * 2 * c.kv_dim * 2     # k and v, float16
        return weights + self.batch * (states + kept)

    # ---- estimates for cards that are not here ----

    def estimates(self, n: int, context: int) -> dict:
        """Tokens/s of other cards as estimated by the emulated one, which launches for each of them what that card
        would have: {"prefill": {name: ..}, "decode": ..}."""
        chunks = self.chunks(n)
        self.pipeline.start(0, Request([0]))
        self.place_step(context)

        def prefill():
            for start, ids in chunks:
                self.chunk(start, ids)()

        return {"prefill": {name: n / seconds for name, seconds in self.estimated_seconds(prefill).items()},
                "decode": {name: self.batch / seconds for name, seconds in self.estimated_seconds(self.step).items()}}

    def estimated_seconds(self, work) -> dict:
        """Name -> seconds that what work() launches would take on each card of the table."""
        own, found = self.card.n_sms, {}
        try:
            for model in CARDS:
                self.card.n_sms = model.n_sms       # grids are made for so many
                with self.card.counting() as log:
                    work()
                found[model.name] = sum(launch.estimate(model).seconds for launch in log)
        finally:
            self.card.n_sms = own
        return found


def bench_table(title: str, speeds: list[Speed], of_what: str) -> str:
    """For people: a line for each Speed, then where the time of the last one goes."""
    lines = [f"{title:<10}{'batch':>6}{'tokens/s':>12}   of {of_what:<16}{'launches':>9}"]
    lines += [f"{speed.context:<10,}{speed.batch:>6}{speed.tokens_per_s:>12,.1f}   "
              f"{f'{speed.percent_of_peak:.1f} %':<19}{speed.launches:>9,}" for speed in speeds]
    operations = speeds[-1].operations
    total = sum(operation.seconds for operation in operations)
    lines += ["", f"  at {speeds[-1].context:,}, each kernel's launches replayed by themselves:"]
    lines += [f"  {o.name:<28}{o.launches:>7,}{o.seconds * 1e3:>12.3f} ms{100 * o.seconds / total:>7.1f} %"
              for o in operations]
    return "\n".join(lines)


def estimate_table(estimates: dict) -> str:
    """The estimates, under their name."""
    names = list(estimates["prefill"])
    lines = [f"{'ESTIMATES':<18}{'prefill':>10}{'decode':>10}   tokens/s at most, from counted instructions "
             "and sectors; not measured"]
    for name in names:
        lines.append(f"{name:<18}{estimates['prefill'][name]:>10,.0f}{estimates['decode'][name]:>10,.0f}")
    return "\n".join(lines)


# ======================================================================================================
# 11  Command line
# ======================================================================================================
# One answer, a chat, a server or a measurement. Answers go to stdout, all else to stderr.

EXAMPLES = """\
examples:
  python qengine.py                                                 talk with the small model that comes along
  python qengine.py -m synthetic:tiny -p "Hello" --max-tokens 32    random weights: a first run without a file
  python qengine.py -m model.gguf --chat                            talk with a model
  python qengine.py -m model.gguf --serve                           OpenAI-compatible server on port 8080
  python qengine.py -m model.gguf --perplexity text.txt             how well the model predicts a text
  python qengine.py --probe                                         what this card's pipes and memory can do
  python qengine.py -m model.gguf --bench                           how fast the model runs on it
"""

TASKS = "prompt", "chat", "serve", "perplexity", "bench", "probe", "print_config"

# Options that mean nothing without one of others. Whoever says them expects something.
GOES_WITH = {"raw": ["prompt"], "slots": ["serve", "print_config"], "host": ["serve"],
             "against": ["perplexity"], "json": ["bench", "probe"],
             **dict.fromkeys(["prompt_lengths", "contexts", "repeats", "batch"], ["bench"]),
             **dict.fromkeys([*SAMPLING, "thinking"], ["prompt", "chat", "serve"])}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"qengine: {message} (see --help)\n")


def within(kind: type, low, high):
    """An argparse type: an int or a float from `low` to `high`, as a row of SAMPLING says."""
    def convert(text):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low} to {high}, not {text}")
        return value

    convert.__name__ = "whole number" if kind is int else "number"      # for "invalid number value: 'x'"
    return convert


def whole_numbers(text: str) -> tuple[int, ...]:
    """An argparse type: "297,4620"."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1 or max(numbers) >= 2**31 - DECODE_STEPS - 1:
        raise argparse.ArgumentTypeError(f"must be whole numbers from 1 on with commas, not {text!r}")
    return numbers


def listed(numbers) -> str:
    return ",".join(map(str, numbers))


def build_parser() -> Parser:
    parser = Parser(
        usage="python qengine.py [-m MODEL] [-p TEXT | --chat | --serve [PORT] | --perplexity FILE |\n"
              "                         --bench | --probe] [options]",
        description="Runs a Qwen3.5 or Qwen3.6 model on NVIDIA cards or, without one, on an emulated card.",
        epilog=EXAMPLES, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", metavar="MODEL", default=DEFAULT_MODEL,
                        help="a GGUF file, or random weights: synthetic:0.8b, synthetic:9b:q4_k, ... "
                             "(default: the small model that comes with qengine)")

    what = parser.add_argument_group("what to do (one of these; at a terminal a chat, if none is named)")
    what = what.add_mutually_exclusive_group()
    what.add_argument("-p", "--prompt", metavar="TEXT", help="answer this text and leave")
    what.add_argument("--chat", action="store_true",
                      help="a conversation in the terminal (Ctrl-C stops an answer, Ctrl-D leaves)")
    what.add_argument("--serve", metavar="PORT", nargs="?", type=within(int, 0, 65535), const=8080,
                      help="an OpenAI-compatible HTTP server (default port: 8080)")
    what.add_argument("--perplexity", metavar="FILE",
                      help="how well the model predicts a UTF-8 text, taken as -p --raw takes it: the text "
                           "is cut into windows of --ctx tokens that know nothing of each other, and each "
                           "token is predicted once, from those before it in its window (the first of a "
                           "window from the whole window before)")
    what.add_argument("--bench", action="store_true",
                      help="tokens/s of prompts and of answers, how much of the card they use and where the "
                           "time goes; needs a card that does nothing else, and probes it if nobody did")
    what.add_argument("--probe", action="store_true",
                      help="measure what the card's instructions, memory and launches can do, name what is "
                           "throttled, and keep the result; uses no model")
    what.add_argument("--print-config", action="store_true",
                      help="show the model's configuration, and what --ctx, --slots and --card make of it")

    answer = parser.add_argument_group("the answer")
    for name, (kind, low, high, meaning) in SAMPLING.items():
        answer.add_argument("--" + name.replace("_", "-"), metavar="N" if kind is int else "X",
                            type=within(kind, low, high), help=meaning)
    answer.add_argument("--thinking", choices=("on", "off"),
                        help="let the model reason before it answers (default: as its chat template says)")
    answer.add_argument("--raw", action="store_true", help="continue the -p text as it stands")

    compare = parser.add_argument_group("with --perplexity")
    compare.add_argument("--against", metavar="OTHER",
                         help="also OTHER's figures, and how far MODEL's predictions are from its own (KL "
                              "divergence, likeliest tokens); the vocabulary is the same, and both are "
                              "loaded at once")

    bench = parser.add_argument_group("with --bench (in brackets: on the emulated card)")
    lengths = functools.partial(bench.add_argument, type=whole_numbers, metavar="N,N")
    lengths("--prompt-lengths",
            help=f"tokens of the prompts (default: {listed(PROMPT_LENGTHS)} [{EMULATED_LENGTH}])")
    lengths("--contexts", help=f"tokens before the answers (default: {listed(CONTEXTS)} [{EMULATED_LENGTH}])")
    bench.add_argument("--repeats", metavar="N", type=within(int, 1, 1000),
                       help=f"the median of so many counts (default: {REPEATS} [1])")
    bench.add_argument("--batch", metavar="N", type=within(int, 1, 256), default=1,
                       help="answers decoded at the same time (default: 1)")
    bench.add_argument("--json", metavar="FILE", help="write everything there, too; also with --probe")

    machine = parser.add_argument_group("the machine")
    machine.add_argument("--card", metavar="CARD",
                         help="cuda:0, cuda:1, ... or emulated "
                              "(default: the first NVIDIA card, or else an emulated card)")
    machine.add_argument("--ctx", metavar="N", type=within(int, 1, 2**31 - 1),
                         help="tokens a conversation may have, prompt and answer together "
                              f"(default: {DEFAULT_CTX}, or the model's own where that is less)")
    machine.add_argument("--slots", metavar="N", type=within(int, 1, 256), default=1,
                         help="answers generated at the same time by --serve (default: 1)")
    machine.add_argument("--host", metavar="ADDRESS", default="127.0.0.1",
                         help="address --serve listens on (default: 127.0.0.1, this machine only)")
    return parser


def option_name(name: str) -> str:
    return "-p" if name == "prompt" else "--" + name.replace("_", "-")


def given(parser: Parser, options) -> list[str]:
    """The names of the options that the command line set."""
    return [name for name, value in vars(options).items() if value != parser.get_default(name)]


def check_options(parser: Parser, options):
    """Leaves with a sentence when an option would do nothing."""
    names = given(parser, options)
    for name in names:
        partners = GOES_WITH.get(name)
        if partners and not set(partners) & set(names):
            parser.error(f"{option_name(name)} goes with {' or '.join(map(option_name, partners))}")
    if options.bench and options.ctx is not None:
        parser.error("--ctx is not for --bench, which takes what --prompt-lengths and --contexts need")
    if options.probe and options.model != DEFAULT_MODEL:
        parser.error("-m is not for --probe, which uses no model")
    if options.raw and options.thinking:
        parser.error("--thinking is for chat templates, and --raw uses none")
    if not options.model:
        parser.error("-m names no model: a GGUF file, or synthetic:tiny")


def print_answer(engine, prompt_ids: list, sampling: dict) -> tuple:
    """Generates and prints text as it comes, then the speed; returns (text, was it stopped by Ctrl-C?)."""
    generation = engine.submit(Request(prompt_ids, **sampling))
    pieces, interrupted = [], False
    try:
        for event in generation:
            pieces.append(event.text)
            print(event.text, end="", flush=True)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        generation.cancel()
        print()
    if pieces:      # the prompt's last step gives the first token: the answer's speed is that of the others
        n_prompt, times = generation.n_prompt, generation.token_times
        speeds = [f"prompt {n_prompt} tokens, {n_prompt / (times[0] - generation.started):.1f} tokens/s",
                  f"answer {len(times)} tokens"]
        if len(times) > 1:
            speeds[1] += f", {(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s"
        note("; ".join(speeds))
    return "".join(pieces), interrupted


def check_text(text: str):
    """RequestError when text from the command line or the terminal was not valid UTF-8."""
    if any("\ud800" <= c <= "\udfff" for c in text):     # how Python passes on bytes that it cannot decode
        raise RequestError("prompt", "the prompt is not valid UTF-8")


def run_prompt(model: OpenModel, options, sampling: dict, thinking) -> int:
    """Answers one text; returns the exit code. What cannot be answered is refused before the load."""
    check_text(text := options.prompt)
    n_ctx = model.n_ctx(options.ctx)
    if model.template is not None and not options.raw:
        text = model.template.render([{"role": "user", "content": text}], enable_thinking=thinking)
    ids = encode_prompt(model.tokenizer, text, n_ctx)
    Request(ids, **sampling).check(model.config.n_vocab, n_ctx)
    with contextlib.closing(load_engine(model, options)) as engine:
        _, interrupted = print_answer(engine, ids, sampling)
    return 130 if interrupted else 0


def run_chat(model: OpenModel, options, sampling: dict, thinking) -> int:
    """A conversation on the terminal, or with the lines of stdin; returns the exit code."""
    if model.template is None:
        raise ModelError("this model has no chat template: use -p TEXT --raw")
    with contextlib.closing(load_engine(model, options)) as engine:
        return chat(engine, sampling, thinking)


def chat(engine, sampling: dict, thinking) -> int:
    """The conversation itself; Ctrl-C ends what is being answered and nothing else."""
    sys.stdin.reconfigure(errors="surrogateescape")     # what is no text is refused below, in a sentence
    if sys.stdin.isatty():
        try:
            import readline     # noqa: F401  gives input() line editing; not on every system
        except ImportError:
            pass
        note("Ctrl-C stops an answer, Ctrl-D leaves.")
    messages = []
    while True:
        interruptible()
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return 0
        except KeyboardInterrupt:               # meant for the answer that ended just before
            if not sys.stdin.isatty():
                raise
            note("\nCtrl-D leaves.")
            continue
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        try:
            check_text(text)
            ids = engine.encode(engine.template.render(messages, enable_thinking=thinking))
            answer, _ = print_answer(engine, ids, sampling)
        except RequestError as error:           # the conversation has outgrown the context, say
            note(f"qengine: {error}")
            messages.pop()
        except KeyboardInterrupt:               # before the answer began
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer})


def run_server(options, sampling: dict, thinking) -> int:
    """Listens, loads, serves until Ctrl-C or SIGTERM; then cancels what is open and tells its clients."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    app = create_app(None, sampling, thinking, max_requests=options.slots + MAX_WAITING)
    with contextlib.ExitStack() as stack:
        try:
            port = stack.enter_context(serving(app, options.host, options.serve))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            note(f"qengine: cannot listen on {options.host} port {options.serve}: {reason}")
            return 2
        engine = app.extensions["qengine"].engine = load_engine(options.model, options)
        try:
            note(f"serving {engine.name} on http://{options.host}:{port}/v1 (Ctrl-C stops)")
            engine.scheduler.thread.join()              # ends by a failure only, of which /health goes on to tell
            note(f"qengine: {engine.error}")
            while True:
                time.sleep(3600)
        finally:
            stack.close()
            engine.close()


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text of n + 1 tokens: arrays [n], one entry for each token after the first.

    losses        float64, nats: negative log-likelihood of the token
    other_losses  the same of another model with the probabilities p', or None, as below
    divergences   float64, nats: sum of p' log(p' / p), the KL divergence of the model from the other
    same_top      bool: both find the same token likeliest
    """

    losses: np.ndarray
    other_losses: np.ndarray | None = None
    divergences: np.ndarray | None = None
    same_top: np.ndarray | None = None

    def table(self, names: list[str]) -> str:
        """For people, with the names of the one or two models at the heads of the columns."""
        columns = [losses for losses in (self.losses, self.other_losses) if losses is not None]
        rows = [("", names),
                ("tokens predicted", [f"{len(losses):,}" for losses in columns]),
                ("nats per token", [f"{losses.mean():.4f}" for losses in columns]),
                ("  standard error", [f"{losses.std() / math.sqrt(len(losses)):.4f}" for losses in columns]),
                ("perplexity", [f"{np.exp(losses.mean()):.4f}" for losses in columns])]
        if self.divergences is not None:
            middle, high = np.percentile(self.divergences, [50, 99])
            rows += [("", []),
                     ("KL divergence, mean", [f"{self.divergences.mean():.6f} nats"]),
                     ("  median", [f"{middle:.6f} nats"]),
                     ("  99 %", [f"{high:.6f} nats"]),
                     ("  max", [f"{self.divergences.max():.6f} nats"]),
                     ("same likeliest token", [f"{100 * self.same_top.mean():.2f} %"])]
        width = max(16, *map(len, names))
        return "\n".join("  ".join([f"{label:<20}", *(f"{cell:>{width}}" for cell in cells)]).rstrip()
                         for label, cells in rows)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural logarithms of the probabilities, float64, of each row of logits. CardError: they hold a NaN."""
    shifted = logits - logits.max(axis=-1, keepdims=True).astype(np.float64)
    if np.isnan(shifted).any():
        raise CardError(NAN_LOGITS)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def measure_perplexity(engine: Engine, ids: list[int], against: Engine | None = None,
                       progress: bool = False) -> Perplexity:
    """Predict each token of a text but the first, once; at least two tokens.

    The text is cut into windows of the context's length, which know nothing of each other: a token is
    predicted from those before it in its window, and the first of a window from the whole window before.
    against: another engine, to compare with. Of logits, HEAD_ROWS rows of each engine are held at a time.
    """
    engines = [engine] if against is None else [engine, against]
    n_ctx, found = min(each.n_ctx for each in engines), []
    last = len(ids) - 1
    with tqdm.tqdm(desc="perplexity", total=last, unit="token", leave=False, disable=not progress) as bar:
        for start in range(0, last, n_ctx):
            window, at = ids[start:min(start + n_ctx, last)], start + 1
            for logits, *other in zip(*(each.logit_rows(window) for each in engines), strict=True):
                found.append(score_rows(ids[at:at + len(logits)], logits, *other))
                at += len(logits)
                bar.update(len(logits))
    return Perplexity(*map(np.concatenate, zip(*found)))


def score_rows(tokens: list[int], logits: np.ndarray, other_logits: np.ndarray | None = None) -> tuple:
    """The fields of Perplexity for rows of logits float32 [rows, n_vocab] and the tokens that came."""
    rows, predicted = np.arange(len(tokens)), log_softmax(logits)
    losses = -predicted[rows, tokens]
    if other_logits is None:
        return losses,
    other = log_softmax(other_logits)
    divergences = (np.exp(other) * (other - predicted)).sum(axis=-1)
    same_top = logits.argmax(axis=-1) == other_logits.argmax(axis=-1)
    return losses, -other[rows, tokens], np.maximum(divergences, 0), same_top      # below 0 is rounding


def run_perplexity(model: OpenModel, options) -> int:
    """Prints how well a model predicts a text, perhaps beside another model; returns the exit code."""
    ids = model.tokenizer.encode(read_text(options.perplexity))
    if len(ids) < 2:
        raise RequestError("perplexity", f"{options.perplexity}: fewer than 2 tokens, so none to predict")
    names, other = [options.model], None
    if options.against is not None:
        names, other = [options.model, options.against], open_model(options.against)
        if other.tokenizer.pieces != model.tokenizer.pieces:
            raise ModelError(f"{options.against}: its vocabulary is not that of {options.model}, so there is "
                             "nothing to compare")
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(contextlib.closing(load_engine(model, options)))
        against = None
        if other:
            against = load(other, card=engine.cards[0], ctx=engine.n_ctx)
            stack.callback(against.close)
        measured = measure_perplexity(engine, ids, against, progress=True)
    print(measured.table([Path(name).name.removesuffix(".gguf") for name in names]))
    return 0


def read_text(path: str) -> str:
    """A text file as it stands, whatever ends its lines. RequestError: there is none, or it is not UTF-8."""
    try:
        return Path(path).read_bytes().decode()
    except OSError as error:
        raise RequestError("perplexity", f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError("perplexity", f"{path}: not UTF-8 text (byte {error.start})") from None


def run_probe(options) -> int:
    """Measures the chosen cards; returns the exit code."""
    reports = probe.probe_cards(options.card)
    if options.json:
        write_json(options.json, [report.to_dict() for report in reports])
    return 0


def run_bench(model: OpenModel, options) -> int:
    """Prints how fast a model is; returns the exit code."""
    card = _open_card(options.card)
    emulated = card.kind == "emulated"
    lengths = sorted(options.prompt_lengths or ([EMULATED_LENGTH] if emulated else PROMPT_LENGTHS))
    contexts = sorted(options.contexts or ([EMULATED_LENGTH] if emulated else CONTEXTS))
    repeats = options.repeats or (1 if emulated else REPEATS)
    if options.json:
        write_json(options.json, {})    # now: what is measured should not be lost for a mistyped folder
    report, free = probe.saved_or_measured(card), card.free_bytes
    n_ctx = max(*lengths, *contexts) + DECODE_STEPS + 1
    with contextlib.closing(load(model, card=card, ctx=n_ctx, slots=options.batch)) as engine:
        bench = Bench(engine, report, repeats, options.batch)
        peaks = ("dp4a measured", "read measured") if emulated else ("dp4a peak", "read bandwidth")
        prefill = [bench.prefill(n) for n in lengths]
        print(bench_table("prefill", prefill, peaks[0]), flush=True)
        decode = [bench.decode(n) for n in contexts]
        print(f"\n{bench_table('decode', decode, peaks[1])}")
        used = free - card.free_bytes
        print(f"\n{engine.name} on {card.describe()}; peak memory {show_bytes(used)}")
        estimates = bench.estimates(lengths[0], contexts[0]) if emulated and find_assembler() else None
        if estimates:
            print(f"\n{estimate_table(estimates)}")
    if options.json:
        write_json(options.json, {
            "model": engine.name, "date": probe.now(), "card": card.facts(), "versions": probe.versions(),
            "probe": report.to_dict(), "peak_memory_bytes": used,
            "prefill": [dataclasses.asdict(speed) for speed in prefill],
            "decode": [dataclasses.asdict(speed) for speed in decode]}
            | ({"estimates": estimates} if estimates else {}))
    return 0


def write_json(path: str, data):
    """OSError, which `main` puts into a sentence, where the file cannot be written."""
    Path(path).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def print_config(options) -> int:
    """What the model file and the command line say; returns the exit code."""
    model = open_model(options.model)
    said = {"ctx": model.n_ctx(options.ctx), "slots": options.slots, "card": options.card or "the first one"}
    for name, value in (dataclasses.asdict(model.config) | said).items():
        print(f"{name} = {value}")
    return 0


def load_engine(model: str | OpenModel, options) -> Engine:
    return load(model, card=options.card, ctx=options.ctx, slots=options.slots)


def run(options) -> int:
    """Does what the parsed command line asks; returns the exit code."""
    sampling = {name: getattr(options, name) for name in SAMPLING if getattr(options, name) is not None}
    thinking = {None: None, "on": True, "off": False}[options.thinking]
    if options.print_config:
        return print_config(options)
    if options.serve is not None:
        return run_server(options, sampling, thinking)
    if options.probe:
        return run_probe(options)
    model = open_model(options.model)
    if options.bench:
        return run_bench(model, options)
    if options.perplexity is not None:
        return run_perplexity(model, options)
    if options.chat:
        return run_chat(model, options, sampling, thinking)
    return run_prompt(model, options, sampling, thinking)


def interruptible():
    """From now on Ctrl-C raises KeyboardInterrupt, once. Pressed again before the next call of this it leaves
    at once: all that it could interrupt then is the clean-up."""
    signal.signal(signal.SIGINT, interrupt)


def interrupt(*_):
    signal.signal(signal.SIGINT, leave)
    raise KeyboardInterrupt


def leave(*_):
    os._exit(130)


def main(arguments=None) -> int:
    """The command line. Returns the exit code: 0 done, 1 a card failed or nobody takes the answer, 2 the user can
    put it right, 130 stopped by Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = build_parser()
    options = parser.parse_args(arguments)
    if not set(TASKS) & set(given(parser, options)):
        if not sys.stdin.isatty():
            parser.error(f"say what to do: {', '.join(map(option_name, TASKS))}")
        options.chat = True
    check_options(parser, options)
    before = signal.getsignal(signal.SIGINT)
    interruptible()
    try:
        code = run(options)
        sys.stdout.flush()
        return code
    except (ModelError, RequestError, CardError, CompileError) as error:
        note(f"qengine: {error}")
        return 2
    except EngineStopped as error:
        note(f"qengine: {error}")
        return 1
    except KeyboardInterrupt:
        note("")
        return 130
    except OSError as error:        # the reader of our output left, as `head` does; a disk is full
        if not isinstance(error, BrokenPipeError):
            note(f"qengine: {error}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")        # a terminal that lacks a letter shows a question mark
    exit_code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)    # nothing is left to interrupt but Python's own end
    sys.exit(exit_code)
