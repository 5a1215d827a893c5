"""qengine: Qwen3.5-style hybrid language models on any NVIDIA card from Volta on, and on a plain CPU.

Table of contents
    1  Config and GGUF               what the model file says: metadata, tensors, shapes
    2  Tokenizer and chat template   text to token ids and back, messages to a prompt
    3  Weights                       tensors on a card, from a file or random
    4  Model                         the forward pass, layer by layer
    5  Cache                         KV pages and recurrent states
    6  Stages                        layers on cards, one after the other
    7  Sampling and constraints      per-slot parameters of the sampling kernels, grammars that answers obey
    8  Scheduler and engine          requests, slots, prompts and answers taking turns; load()
    9  Server                        requests over HTTP, in the wire formats of api/
    10 Bench                         how fast a model runs, and what of the card it uses
    11 Command line                  one prompt, a chat, a server, or a measurement

Four kinds of error leave this file on purpose: `ModelError` for a file that cannot be used, `RequestError` for a
request that cannot be answered, `DeadlineExceeded` for one that was not answered in the time it allows,
`EngineStopped` once there is no engine to answer it. Each carries one sentence that a person can act on. kernels/
adds `CardError`, of a card.
"""

import os
import signal
import sys

if __name__ == "__main__":      # the imports take seconds: Ctrl-C meanwhile is no reason for a traceback
    sys.modules["qengine"] = sys.modules["__main__"]    # what api/ imports is this, not a second copy
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    for _name, _mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):   # Python's None: closed by who started us
        if getattr(sys, _name) is None:
            setattr(sys, _name, open(os.devnull, _mode))

import argparse
import collections
import contextlib
import copy
import dataclasses
import functools
import gc
import ipaddress
import itertools
import json
import logging
import math
import re
import secrets
import socket
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import flask
import llguidance
import llguidance.numpy
import numpy as np
import tqdm
import waitress
import waitress.channel
import waitress.server
import waitress.task
from werkzeug.exceptions import GatewayTimeout, HTTPException, ServiceUnavailable, TooManyRequests

from engine.constraints import Constraint, Vocabulary
from engine.gguf import GGUF, REQUIRED, SUPPORTED_TYPES
from engine.prefix import CHECKPOINT_INTERVAL, PAGE_TOKENS, Node, PrefixCache, checkpoint_positions, pages_for
from engine.request import (SAMPLING, DeadlineExceeded, EngineStopped, Fault, Generation, ModelError, Request,
                            RequestError)
from engine.template import SYNTHETIC_TEMPLATE, ChatTemplate
from engine.tokenizer import ByteTokenizer, Tokenizer, encode_prompt, load_tokenizer
from engine.worker import Task, Worker, stop_all
from kernels import (advance, attend_decode, attention, checkpoint, conv, embedding, finite, float_matmul, formats, gdn,
                     gdn_decode, kv_cache, logprobs, norm, probe, q8_gemm, q8_gemv, quant_gemv, quantize, rope, sample,
                     swiglu, synthetic)
from kernels.assembler import find_assembler
from kernels.bench import operation_seconds
from kernels.card import Array, Card, CardError, Event, OutOfMemory, PlannedCard, show_bytes
from kernels.compile import CompileError
from kernels.emulated.cards import CARDS, CardModel
from kernels.emulated.estimate import PIPES, SECTOR, Counts
from kernels.formats import FLOATS, FORMATS
from kernels.open import open_cards
from kernels.trace import LEFT_OUT, tracing
from kernels.upload import PIECE, Feeder

# ======================================================================================================
# 1  Config
# ======================================================================================================

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
    def positive(key: str, default=REQUIRED) -> int:
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
        allowed = SUPPORTED_TYPES if len(shape) == 2 else tuple(FLOATS)
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
    if format in FLOATS:
        return Matrix(format, n, k, card.alloc((n, k), FLOATS[format].dtype, name))
    values, scales = FORMATS[format].arrays(n, k)
    return Matrix(format, n, k, card.alloc(*values, name), card.alloc(*scales, f"{name} scales"))


class FileWeights:
    """The tensors of a GGUF file, put on cards."""

    def __init__(self, gguf: GGUF):
        self.gguf = gguf

    @contextlib.contextmanager
    def loading(self, card: Card):
        """Gives weights whose `matrix` and `vector` fill that card, from one thread; the values are good when it ends.
        ModelError."""
        names, largest = list(self.gguf.tensors), max(tensor.nbytes for tensor in self.gguf.tensors.values())
        weights, bad = FileWeights(self.gguf), card.zeros(len(names), np.uint32, "flags of damaged tensors")
        weights.feeder = Feeder(card, min(PIECE, largest))
        weights.bad = {name: bad[i:i + 1] for i, name in enumerate(names)}
        try:
            yield weights
            damaged = np.flatnonzero(card.download(bad))
        finally:
            weights.feeder = weights.bad = None
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
        return contextlib.nullcontext(self)

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


class PlannedWeights:
    """The tensors of a model without their values, for a plan of what cards are to hold; all of `format`, if given."""

    def __init__(self, config: Config, weights: "FileWeights | SyntheticWeights", format: str | None = None):
        self.shapes, self.weights, self.format = config.tensor_shapes(), weights, format

    def loading(self, card: Card):
        return contextlib.nullcontext(self)

    def type_of(self, name: str) -> str:
        if self.format and self.shapes[name][1] % FORMATS[self.format].file_block == 0:
            return self.format
        return self.weights.type_of(name)

    def matrix(self, card: Card, *names: str) -> Matrix:
        n, k = sum(self.shapes[name][0] for name in names), self.shapes[names[0]][1]
        return alloc_matrix(card, self.type_of(names[0]), n, k, " + ".join(names))

    def vector(self, card: Card, name: str) -> Array:
        return card.alloc(self.shapes[name], np.float32, name)


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
    one token of each of several slots, or consecutive ones of a single slot (`each`), and runs the decode family.
    """

    n: int
    is_decode: bool
    ids: Array              # [n] token ids
    slots: Array            # [n]
    positions: Array        # [n] index in the slot's sequence
    rope: Array             # [3, n] time, height, width
    marks: tuple = ()       # of a prefill pass: (n rows, slot, row of the states that keeps the slot's after them)
    beside: bool = False    # of a part of a prefill pass: others run beside it,
    lane: "Lane | None" = None      # and it waits for those before it
    each: tuple = ()        # of a decode pass over one slot: its rows one by one, as a layer's states take them
    early: bool = False     # of a decode pass: what is kept of its slots may be read `early` (kernels/intrinsics.py)

    def turn(self):
        """Surrounds what reads and changes the states, or the keys and values, of a layer."""
        return self.lane.turn() if self.lane else contextlib.nullcontext()

    def in_turn(self):
        """(first row, rows) of a decode pass that the states of a layer take at once, in their order."""
        return enumerate(self.each) if self.each else [(0, self)]

    def parts(self):
        """(first row, end, slot, row to keep its states in or None) of a prefill pass, cut at its marks."""
        start = 0
        for end, slot, kept in (*self.marks, (self.n, None, None)):
            if end > start:
                yield start, end, slot, kept
            start = end


class Lane:
    """A part of a prompt's pass, in a stream of its own. Where one of its kernels leaves the card partly idle, in the
    last round of its blocks of threads or all the time, those of other parts run. In each layer a part waits for the
    states, or the keys and values, that the part before leaves there; nothing else joins them.

    On an H100 (2026-11-21, 9B in Q8_0, per cent of the dp4a peak) prompts of so many tokens ran at

                                     256    297    384    512    768   1,024   1,160   2,048   4,620
        in one lane                 57.8   56.5   60.3   64.3   66.2    67.0    65.4    68.7    68.2
        in lanes of 128             59.4   56.1   62.8   67.6
        in lanes of 256                           62.8   69.2   70.7    71.8    71.5
        as `Stage.lane_rows` says   57.8   56.4   62.7   69.2   70.7    71.8    72.0    73.0    71.2

    Queued one part after the other, not layer by layer, 1,024 tokens reached 70.0, as the first lane was ahead by what
    the host takes. With a larger priority for later lanes 1,160 reached 67 to 68, for earlier ones 66.
    """

    def __init__(self, stream, before: "Lane | None"):
        self.stream, self.before = stream, before
        self.left = collections.deque()     # the events after which the layers are as the next part wants them

    def queue(self, steps):
        """Goes on with the generator `steps`, whose work goes to the lane's stream, at each step of its own."""
        while True:
            with self.stream.card.on(self.stream):
                if next(steps, None) is None:
                    return
            yield

    @contextlib.contextmanager
    def turn(self):
        """See `Rows.turn`. The part before must have come to the same layer."""
        if self.before:
            self.stream.wait(self.before.left.popleft())
        yield
        self.left.append(self.stream.record())


class Activation:
    """Rows on their way into projections of input size k, in the forms that the matrices read."""

    def __init__(self, k: int, x: Array, q: Array, d: Array):
        self.k, self.x, self.q, self.d = k, x, q, d

    @classmethod
    def allocate(cls, card: Card, rows: int, k: int) -> "Activation":
        return cls(k, card.alloc((rows, k), np.float32, f"activation {k}"),
                   card.alloc((rows, k), np.int8, f"activation {k} quants"),
                   card.alloc((rows, k // 32), np.float32, f"activation {k} scales"))

    def behind(self, start: int) -> "Activation":
        """The memory of the rows from `start` on."""
        return Activation(self.k, self.x[start:], self.q[start:], self.d[start:])


class Model:
    """The forward pass of a range of layers on one card, with its scratch memory; the cache is the caller's.

    Every float operation is a kernel of kernels/ on `card`; here is only their order.
    """

    def __init__(self, card: Card, config: Config, weights, layers: range, progress=iter):
        self.card, self.config, self.first_layer = card, config, layers.start
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
        self.gemv = self.gemm = None    # of a reader: for the engine's products of Q8_0, see `Engine.use`

    def row_bytes(self) -> int:
        """Bytes that `allocate` takes for a row."""
        c, page = self.config, gdn.factors_shape(PAGE_TOKENS, self.config.n_value_heads)
        floats = c.hidden_dim + self.stride + c.conv_dim + c.value_dim + c.query_dim + math.prod(page) // PAGE_TOKENS
        halves = c.query_dim                                        # rotated query
        activations = sum({c.hidden_dim, c.value_dim, c.query_dim}) + c.ffn_dim
        return 4 * floats + 2 * halves + activations * 41 // 8      # of each a float, an int8 and 1 / 32 scale

    def allocate(self, rows: int, n_slots: int):
        """Scratch memory for passes of up to `rows` rows. A name says what an array holds in the course of a layer."""
        c, card = self.config, self.card

        def floats(name, width):
            return card.alloc((rows, width), np.float32, name)

        self.x = floats("residual stream", c.hidden_dim)
        self.projected = card.alloc(rows * self.stride, np.float32, "products of a stack")
        self.mixed, self.o = floats("qkv after convolution", c.conv_dim), floats("delta rule output", c.value_dim)
        self.factors = card.alloc(gdn.factors_shape(rows, c.n_value_heads), np.float32, "delta rule factors")
        self.q = card.alloc((rows, c.n_heads, c.head_dim), np.float16, "rotated query")
        self.attended = floats("attention output", c.query_dim)
        sizes = {c.hidden_dim, c.value_dim, c.query_dim}
        self.activations = {k: Activation.allocate(card, rows, k) for k in sizes}
        self.inner = Activation.allocate(card, rows, c.ffn_dim)     # of the MLP, whose kernel reads and writes these
        self.partials = card.alloc(attend_decode.partials_shape(n_slots, c.n_heads), np.float32, "attention partials")
        self.arrived = card.zeros((n_slots, c.n_kv_heads), np.uint32, "attention blocks that have arrived")
        if self.head is not None:
            self.logits = card.alloc((max(n_slots, HEAD_ROWS), c.n_vocab), np.float32, "logits")
        self.views = {}             # see `behind`; kept, since arrays know what launches ask of them

    def behind(self, start: int) -> "Model":
        """This model with the scratch memory of rows from `start` on, a multiple of 64: for a part of a pass."""
        if start == 0:
            return self
        if start not in self.views:
            self.views[start] = self._behind(start)
        return self.views[start]

    def _behind(self, start: int) -> "Model":
        part = copy.copy(self)
        part.views = None           # or they would hold each other
        part.x, part.projected = self.x[start:], self.projected[start * self.stride:]
        part.mixed, part.o = self.mixed[start:], self.o[start:]
        part.factors = self.factors[start // gdn.GROUP:]
        part.q, part.attended = self.q[start:], self.attended[start:]
        part.activations = {k: activation.behind(start) for k, activation in self.activations.items()}
        part.inner = self.inner.behind(start)
        return part

    def forward(self, rows: Rows, cache: "Cache", tap=None):
        """Runs the layers over the rows; the result is in `x`. `tap(name, array)` is called after every layer."""
        for name in self.steps(rows, cache):
            if tap:
                tap(name, self.x)

    def steps(self, rows: Rows, cache: "Cache"):
        """What `forward` does, layer by layer: yields the name of each when its work is queued."""
        if self.first_layer == 0:
            table = self.embeddings
            embedding.embed(self.card, table.format, self.x, rows.ids, table.values, table.scales, rows.n, table.k)
            yield "embedding"
        for index, layer in enumerate(self.layers, self.first_layer):
            if isinstance(layer, LinearLayer):
                self.linear_attention(rows, layer, cache.recurrent[index])
            else:
                self.attention(rows, layer, cache.pages[index], cache.block_table)
            self.mlp(rows, layer.mlp)
            yield f"layer {index}"

    def linear_attention(self, rows: Rows, layer: LinearLayer, state: "RecurrentState"):
        card, c, projected, stride = self.card, self.config, self.projected, layer.inputs.stride
        self.project_norm(rows, layer.inputs, layer.norm)
        u = self.activations[c.value_dim]
        constants, heads = (layer.a, layer.dt_bias), (c.n_key_heads, c.n_value_heads)
        if rows.is_decode:
            for row, one in rows.in_turn():
                inputs = state.memory, state.conv, projected[row * stride:], stride, layer.conv, *constants, \
                    layer.out_norm, one.slots, one.positions, one.n, *heads, c.norm_eps, one.early
                if layer.out.is_quantized:
                    gdn_decode.gdn_decode_quantize(card, u.q[row:], u.d[row:], *inputs)
                else:
                    gdn_decode.gdn_decode(card, u.x[row:], *inputs)
        else:
            with rows.turn():
                for start, end, slot, kept in rows.parts():
                    n, mixed, columns = end - start, self.mixed[start:], projected[start * stride:]
                    conv.conv_silu(card, mixed, columns, stride, state.conv, layer.conv, rows.slots[start:],
                                   rows.positions[start:], n, c.conv_dim)
                    gdn.gdn_prefill(card, self.o[start:], state.memory, self.factors, mixed, columns, stride,
                                    *constants, rows.slots[start:], n, *heads)
                    if kept is not None:
                        state.copy(card, kept, slot)
            inputs = self.o, projected[c.conv_dim:], stride, layer.out_norm, rows.n, c.n_value_heads, c.norm_eps
            if layer.out.is_quantized:
                norm.gated_norm_quantize(card, u.q, u.d, *inputs)
            else:
                norm.gated_norm(card, u.x, *inputs)
        self.project(rows, self.x, layer.out, u, add=True)

    def attention(self, rows: Rows, layer: AttentionLayer, pages: "Pages", block_table: Array):
        card, c, projected, stride = self.card, self.config, self.projected, layer.inputs.stride
        self.project_norm(rows, layer.inputs, layer.norm)
        u, columns = self.activations[c.query_dim], (2 * c.query_dim, 2 * c.query_dim + c.kv_dim)  # of keys, values
        rotary, places = (rows.rope, self.inv_freq), (block_table, rows.slots, rows.positions)
        sizes = rows.n, c.n_heads, c.n_kv_heads
        if rows.is_decode:
            for row, one in rows.in_turn():
                out = (u.q[row:], u.d[row:]) if layer.out.is_quantized else (u.x[row:], None)
                attend_decode.attend_decode(card, *out, projected[row * stride:], stride, *columns, layer.q_norm,
                                            layer.k_norm, one.rope, self.inv_freq, pages.k, pages.v, block_table,
                                            one.slots, one.positions, self.partials, self.arrived, one.n, c.n_heads,
                                            c.n_kv_heads, c.rope_sections, c.norm_eps, one.early)
        else:
            rope.norm_rope_q(card, self.q, projected, stride, layer.q_norm, *rotary, rows.n, c.n_heads,
                             c.rope_sections, c.norm_eps)
            with rows.turn():
                kv_cache.store_kv(card, pages.k, pages.v, projected, stride, *columns, layer.k_norm, *rotary, *places,
                                  rows.n, c.n_kv_heads, c.rope_sections, c.norm_eps)
            attention.attend_prefill(card, self.attended, self.q, projected, stride, pages.k, pages.v, *places, *sizes)
            if layer.out.is_quantized:
                quantize.quantize_q8(card, u.q, u.d, self.attended, rows.n, u.k)
            else:
                card.copy(u.x[:rows.n], self.attended[:rows.n])
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

    def is_fused(self, stack: Stack) -> bool:
        """Whether one decode kernel serves the whole stack, the norm before it included."""
        (_, matrix), *others = stack.parts
        return matrix.is_quantized and not others and not (self.gemv and matrix.format == "Q8_0")

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
            own = self.gemv if rows.is_decode else self.gemm
            if own and matrix.format == "Q8_0":
                own(card, *arguments)
            elif rows.is_decode:
                q8_gemv.gemv(card, matrix.decoder, *arguments)
            else:
                q8_gemm.gemm(card, FORMATS[matrix.format], *arguments, beside=rows.beside)
        else:
            product = float_matmul.gemv_float if rows.is_decode else float_matmul.gemm_float
            product(card, y, stride, matrix.values, u.x, n, k, rows.n, add)


# ======================================================================================================
# 5  Cache
# ======================================================================================================

# A page holds the keys and values of 64 tokens, and sequences that begin with the same tokens share pages. A recurrent
# state cannot be cut back: to go on after a prefix needs the states that were there, a checkpoint.


@dataclass(frozen=True)
class RecurrentState:
    """What a linear-attention layer remembers: row s is that of slot s, the rows after the slots' are checkpoints."""

    conv: Array             # [n_rows, conv_width, conv_dim] float32: inputs of position p in row p % conv_width
    memory: Array           # [n_rows, n_value_heads, 128 key, 128 value] float32

    def copy(self, card: Card, to: int, source: int):
        card.copy(self.conv[to], self.conv[source])
        card.copy(self.memory[to], self.memory[source])


@dataclass(frozen=True)
class Pages:
    """The keys and values of an attention layer, in pages of 64 tokens that belong to slots by the block table."""

    k: Array                # [n_pages, n_kv_heads, 64, 256] float16
    v: Array                # the same


def page_bytes(config: Config, kinds) -> int:
    """Bytes of a page in layers of these kinds: keys and values, float16."""
    return list(kinds).count("attention") * 2 * PAGE_TOKENS * config.kv_dim * 2


def state_bytes(config: Config, kinds) -> int:
    """Bytes of a slot's recurrent states in layers of these kinds, float32."""
    return list(kinds).count("linear") * 4 * (
        config.conv_width * config.conv_dim + config.value_dim * config.linear_head_dim)


@dataclass(frozen=True)
class CacheSizes:
    """How much the caches of all stages hold."""

    n_slots: int
    max_pages: int              # of a slot
    n_pages: int                # of all slots and of what is kept
    n_checkpoints: int          # on the card
    n_host_checkpoints: int     # in host memory, at most


LEAST_CHECKPOINTS = 2           # on the card, however little memory there is
KEPT_CONTEXTS = 4               # of every slot, whose pages are there if memory is: the one that runs, and earlier ones


def choose_sizes(stages: list["Stage"], n_slots: int, n_ctx: int, kv_tokens: int | None, checkpoint_memory: int | None,
                 checkpoint_host_memory: int | None) -> CacheSizes:
    """What to do with the memory that the weights have left.

    kv_tokens: tokens whose keys and values all pages hold together. By default n_slots times n_ctx, or fewer where 90 %
    of the memory do not suffice for that, but n_ctx at least; and KEPT_CONTEXTS times as many, or what a quarter of the
    memory holds, where later prompts can make use of them: none can without memory for checkpoints.
    checkpoint_memory: bytes on each card, by default a quarter of what the pages leave. checkpoint_host_memory: bytes,
    by default an eighth of the machine's. There are not more checkpoints than pages: a page has one at most.
    """
    max_pages = pages_for(n_ctx)
    if kv_tokens is None:
        fitting = min((stage.card.free_bytes - (n_slots + LEAST_CHECKPOINTS) * stage.state_bytes)
                      // max(stage.page_bytes, 1) for stage in stages)
        n_pages = max(min(n_slots * max_pages, int(0.9 * fitting)), max_pages)
        if checkpoint_memory != 0 or checkpoint_host_memory != 0:
            n_pages = max(n_pages, min(KEPT_CONTEXTS * n_slots * max_pages, fitting // 4))
    else:
        n_pages = pages_for(kv_tokens)
    n_checkpoints = n_pages
    for stage in stages:
        free = stage.card.free_bytes - n_slots * stage.state_bytes - n_pages * stage.page_bytes
        budget = free // 4 if checkpoint_memory is None else checkpoint_memory
        n_checkpoints = min(n_checkpoints, budget // max(stage.state_bytes, 1))
    if checkpoint_host_memory is None:
        checkpoint_host_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8
    n_host = checkpoint_host_memory // max(sum(stage.state_bytes for stage in stages), 1)
    return CacheSizes(n_slots, max_pages, n_pages, max(n_checkpoints, LEAST_CHECKPOINTS), min(n_host, n_pages))


class Cache:
    """The memory of a range of layers: pages behind a block table, and the states of slots and checkpoints."""

    def __init__(self, card: Card, config: Config, layers: range, sizes: CacheSizes):
        c, self.card, self.n_slots, self.max_pages = config, card, sizes.n_slots, sizes.max_pages
        attention, linear = ([index for index in layers if c.layer_kinds[index] == kind]
                             for kind in ("attention", "linear"))
        shape, self.pages = (sizes.n_pages, c.n_kv_heads, PAGE_TOKENS, c.head_dim), {}
        for index in attention:
            self.pages[index] = Pages(card.alloc(shape, np.float16, f"layer {index} keys"),
                                      card.alloc(shape, np.float16, f"layer {index} values"))
        rows = len(linear), sizes.n_slots + sizes.n_checkpoints     # of one layer lie together, as its kernels want it
        self.conv = card.alloc((*rows, c.conv_width, c.conv_dim), np.float32, "convolution states")
        self.memory = card.alloc((*rows, c.n_value_heads, c.linear_head_dim, c.linear_head_dim), np.float32,
                                 "recurrent states")
        self.recurrent = {index: RecurrentState(self.conv[i], self.memory[i]) for i, index in enumerate(linear)}
        self.block_table = card.zeros((sizes.n_slots, sizes.max_pages), np.int32, "block table")
        self.host = {}              # number of a checkpoint in host memory -> its two arrays, pinned

    def reset(self, slot: int):
        """Forget what the recurrent layers remember of a slot. Pages need no reset: positions bound what is read."""
        if self.recurrent:
            checkpoint.clear_states(self.card, self.memory, self.conv, slot)

    def set_pages(self, slot: int, pages: list[int]):
        """Tell the card which pages hold the slot's tokens, 64 each, in order."""
        row = np.zeros(self.max_pages, np.int32)
        row[:len(pages)] = pages
        self.card.copy_in(self.block_table[slot], row)

    def save(self, slot: int, number: int):
        """The states of a slot become checkpoint `number`."""
        self._copy(self.n_slots + number, slot)

    def restore(self, number: int, slot: int):
        self._copy(slot, self.n_slots + number)

    def _copy(self, to: int, source: int):
        if self.recurrent:
            checkpoint.copy_states(self.card, self.memory, self.conv, to, source)

    def pin(self, host: int):
        """Take page-locked host memory for a checkpoint, the first time that it is to be there. CardError."""
        if host not in self.host:
            self.host[host] = [self.card.pinned((states.shape[0], *states.shape[2:]), np.float32)
                               for states in (self.conv, self.memory)]

    def spill(self, number: int, host: int):
        """Copy a checkpoint to host memory."""
        for there, states in zip(self.host[host], (self.conv, self.memory)):
            for layer in range(len(there)):
                self.card.copy_out(there[layer], states[layer][self.n_slots + number])

    def fetch(self, host: int, number: int):
        """Copy a checkpoint back from host memory."""
        for there, states in zip(self.host[host], (self.conv, self.memory)):
            for layer in range(len(there)):
                self.card.copy_in(states[layer][self.n_slots + number], there[layer])


# ======================================================================================================
# 6  Stages
# ======================================================================================================


# Every card has a thread, its worker, that alone gives it work: whoever wants something of a stage posts a task. A task
# may wait for tasks that were posted before it, to other workers, too, and thus for none that waits for it.

CHECKED_WEIGHTS = 1 << 22   # of one matrix that is compared with NumPy's product, see `Engine.use`
LANES = 4                   # parts of a prompt's pass that run beside each other, at most,
LANE_ROWS = 256             # and of about so many rows at least: see `Lane`
HOST_SHARE = 0.5            # of a pass in which the host may queue its kernels: 0.8B in five lanes, where that took all of
LAYER_SECONDS = 260e-6      # the time, was 25 % slower than in one; what it takes for a layer of a part, on an H100's host
QUEUEING = 100e-6           # seconds of the host for a hop beside the layers, about


class Stage:
    """A range of layers on one card: weights, caches, scratch, and the launches of decode steps, recorded.

    Token ids enter the first stage, hidden states go from each to the next, and the last one's sampler turns logits
    into token ids. What queues work on the card is done by its worker.
    """

    def __init__(self, card: Card, config: Config, weights, layers: range, n_slots: int, n_ctx: int, chunk: int | None,
                 progress=iter, worker: Worker | None = None):
        self.card, self.config, self.layers, self.n_slots = card, config, layers, n_slots
        self.worker = worker or Worker(card)
        free = card.free_bytes
        with weights.loading(card) as weights:
            self.model = Model(card, config, weights, layers, progress)
        self.weight_bytes = free - card.free_bytes
        kinds = [config.layer_kinds[index] for index in layers]
        self.page_bytes, self.state_bytes = page_bytes(config, kinds), state_bytes(config, kinds)
        multiplied = [matrix for layer in self.model.layers for matrix in matrices(layer)]
        self.products = collections.Counter((matrix.n, matrix.k) for matrix in multiplied if matrix.is_quantized)
        self.row_operations = 2 * sum(matrix.n * matrix.k for matrix in multiplied)
        self.chunk = min(chunk or self.fitting_chunk(n_ctx), pages_for(n_ctx) * PAGE_TOKENS)
        self.max_rows = max(self.chunk, n_slots, HEAD_ROWS)
        self.model.allocate(self.max_rows, n_slots)
        self.sampler = Sampler(card, n_slots, config.n_vocab) if self.model.head else None
        # A prompt's pass must not disturb the batches, whose inputs stay from one step to the next.
        self.inputs = card.alloc(INPUTS * self.max_rows, np.int32, "ids, slots and positions of a prompt's pass")
        self.incoming, self.outgoing = (
            [card.alloc((self.max_rows, config.hidden_dim), np.float32, f"{name} hidden states")
             for _ in range(2 * is_there)]
            for name, is_there in (("incoming", layers.start > 0), ("outgoing", self.hands_on)))
        self.entry = self.exit = None   # the Edges to the stages beside, see `Pipeline`
        self.cache = None       # see `allocate`
        self.lanes = [card.stream(f"lane {i}") for i in range(LANES + 1)]       # one for rows that fill no page
        self.recordings = {}    # (name of what was recorded, *its arguments) -> Recording
        self.pass_time = functools.cache(self.pass_time)

    @property
    def hands_on(self) -> bool:
        """Whether there are stages behind."""
        return self.layers.stop < self.config.n_layers

    def fitting_chunk(self, n_ctx: int) -> int:
        """Tokens of a pass that suit the card: on a real one as many as the memory allows that weights, one context
        and the states of all slots leave, and as do not keep cancellations and running answers waiting too long."""
        if self.card.kind == "emulated":
            return CHUNK
        asked = pages_for(n_ctx) * self.page_bytes + (self.n_slots + LEAST_CHECKPOINTS) * self.state_bytes
        row_bytes = self.model.row_bytes() + 2 * 4 * self.config.hidden_dim * ((self.layers.start > 0) + self.hands_on)
        fitting = max(self.card.free_bytes - asked, 0) // CHUNK_SHARE // row_bytes
        in_time = max(int(PASS_SECONDS * probe.dot_speed(self.card) / self.row_operations), PAGE_TOKENS)
        return min(max(fitting, CHUNK), in_time, LARGEST_CHUNK) // PAGE_TOKENS * PAGE_TOKENS

    def lane_rows(self, n: int) -> list[int]:
        """The rows of each lane of a pass of n rows, see `Lane`: enough for the products that go into the residual
        stream to fill the card, and no more lanes than the host can feed. Rows that fill no page have a lane to
        themselves: in smaller tiles they take less. The processors of an emulated card are never partly idle: one."""
        if self.card.kind == "emulated":
            return [n]
        least = max(q8_gemm.filling_rows(self.card, self.config.hidden_dim), LANE_ROWS)     # of `out` and `down`
        seconds = n * self.row_operations / self.speed.dot / PEAK_SHARE
        queued = int(HOST_SHARE * seconds / (LAYER_SECONDS * len(self.layers)))
        n_lanes = min((n + least // 2) // least, LANES, queued)
        if n_lanes < 2:
            return [n]
        pages, rest = divmod(n, PAGE_TOKENS)
        sizes = [PAGE_TOKENS * (pages * (i + 1) // n_lanes - pages * i // n_lanes) for i in range(n_lanes)]
        return sorted(sizes, reverse=True) + [rest] * (rest > 0)

    def pass_time(self, rows: int) -> int:
        """How long the products of a pass take, to compare with others on the card (0 rows: nothing)."""
        lanes = self.lane_rows(rows)
        return sum(count * q8_gemm.relative_time(self.card, n, k, lanes) for (n, k), count in self.products.items()
                   ) if rows else 0

    def pass_seconds(self, rows: int) -> float:
        """About how long a pass takes at the beginning of a prompt. It takes time of its own, too, however few its rows
        are."""
        as_rows = self.pass_time(rows) * LARGEST_CHUNK / max(self.pass_time(LARGEST_CHUNK), 1)
        own = PRODUCT_SECONDS * self.products.total()
        return own + as_rows * self.row_operations / self.speed.dot / PEAK_SHARE

    def attention_seconds(self) -> float:
        """What each token before a row adds to that."""
        kinds = [self.config.layer_kinds[index] for index in self.layers]
        return attention_seconds(self.config, kinds.count("attention"), self.speed)

    def hop_seconds(self, rows: int) -> float:
        """How long the hidden states of a pass take to the host, or from it."""
        return hop_bytes(self.config, rows) / self.speed.link

    @functools.cached_property
    def speed(self) -> probe.Speed:
        return probe.speed_of(self.card)

    def release(self):
        """Give the memory back, though a thread that hangs may know the stage for ever."""
        self.model = self.sampler = self.cache = self.inputs = self.entry = self.exit = None
        for held in self.incoming, self.outgoing, self.batches, self.recordings:
            held.clear()

    def allocate(self, sizes: CacheSizes, n_groups: int = 1):
        """Take the memory of the cache, after the weights, so that its size can depend on what those leave; and that of
        the inputs of each group of answers, see `Pipeline`."""
        self.cache = Cache(self.card, self.config, self.layers, sizes)
        self.batches = [self.card.alloc(INPUTS * self.n_slots, np.int32, "ids, slots and positions of a decode step")
                        for _ in range(n_groups)]
        if self.sampler:
            self.sampler.allocate(n_groups)

    # ---- what the worker does ----

    def run_pass(self, before: Task | None, freed: Task | None, n: int, work, *arguments):
        """Queue this stage's part of a pass of n rows. before: what the stage before did for it; freed: what the one
        behind did for the last pass but one."""
        if self.entry:
            self.entry.receive(n, before.result())
        found = work(self, *arguments)
        return self.exit.send(n, freed) if self.exit else found

    def prefill(self, ids, slot: int, start: int, marks, tap):
        """Queue a pass over consecutive tokens of a slot; their hidden states stay in model.x until the next one.
        marks: (tokens of the pass, number of a checkpoint) where the slot's states are kept. Returns the pass's end."""
        n = len(ids)
        set_rows(self.inputs, ids, [slot] * n, range(start, start + n))
        inside = tuple((end, slot, self.n_slots + number) for end, number in marks if end < n)
        with self.card.span(f"slot {slot}, {n} tokens from {start} on"):
            self.launch_prompt(n, inside, tap)
        for end, number in marks:
            if end == n:
                self.cache.save(slot, number)
        return self.card.default_stream.record()

    def sample_row(self, row: int, slot: int, log_probs: bool):
        """Queue the choice of the next token of a slot from row `row` of the hidden states of the prefill pass queued
        last; as `Sampler.fetch`."""
        set_rows(self.inputs, [0], [slot], [0])
        self.model.compute_logits(self.model.x[row:row + 1], 1)
        turn = self.sampler.take_turn(-1)
        self.sampler.launch(self.model.logits, rows_of(self.inputs, 1, is_decode=True), -1, turn, log_probs)
        return self.sampler.fetch(-1, turn, 1, log_probs)

    def logits(self, row: int, n: int) -> np.ndarray:
        """Those of n rows of that pass from `row` on."""
        self.model.compute_logits(self.model.x[row:row + n], n)
        return self.card.download(self.model.logits[:n])

    def place(self, group: int, ids, slots, positions):
        """The inputs of a group's next decode step."""
        set_rows(self.batches[group], ids, slots, positions)

    def follow(self, group: int, tokens: "Tokens | None", n: int):
        """Queue the copy of the tokens of a group's last step, which the last stage found, to where `launch_layers` reads
        them. Both cards wait until that is done and the step queued."""
        if self.hands_on and tokens is not None:
            chosen = chosen_of(self.batches[group], n)
            self.card.copy_in(chosen, tokens.arrived())

    def step(self, group: int, tokens: "Tokens | None", n: int, log_probs: bool):
        """Queue a decode step of the n rows placed last, or of what followed them: `forward` and `choose` in one."""
        self.follow(group, tokens, n)
        turn = self.sampler.take_turn(group) if self.sampler else 0
        self.recording(self.launch_step, group, n, log_probs, turn).replay()
        return self.sampler and self.sampler.fetch(group, turn, n, log_probs)

    def forward(self, group: int, tokens: "Tokens | None", n: int):
        """Queue the layers of a decode step."""
        self.follow(group, tokens, n)
        self.recording(self.launch_layers, group, n).replay()

    def append(self, ids, slot: int, start: int, step: int):
        """Queue a decode pass over consecutive tokens of a slot, without a choice; its sampler goes on at `step`."""
        n = len(ids)
        set_rows(self.inputs, ids, [slot] * n, range(start, start + n), in_turn=True)
        self.recording(self.launch_in_turn, n).replay()
        if self.sampler:
            self.sampler.go_on(slot, step)

    def choose(self, group: int, n: int, log_probs: bool):
        """Queue the choice of the tokens that follow the n rows of `forward`; they are what enters the next step."""
        turn = self.sampler.take_turn(group)
        self.recording(self.launch_choice, group, n, log_probs, turn).replay()
        return self.sampler.fetch(group, turn, n, log_probs)

    def recording(self, launch, *arguments):
        """What launch(*arguments), one of the methods below, launches; made when it is first asked for."""
        key = launch.__name__, *arguments
        if key not in self.recordings:
            with self.card.record(" ".join(map(str, key))) as recording:
                launch(*arguments)
            self.recordings[key] = recording
        return self.recordings[key]

    def checks(self, gemv, gemm) -> list:
        """What `check_product` is to check for `Engine.use`, as its arguments."""
        model = self.model
        weights = [matrix for part in (*model.layers, model.head) if part for matrix in matrices(part)]
        shapes = {(matrix.n, matrix.k) for matrix in weights if matrix.format == "Q8_0"}
        products = (gemv, {1, self.n_slots, HEAD_ROWS}), (gemm, {1, PAGE_TOKENS + 1})
        return [(self.card, product, min(n, CHECKED_WEIGHTS // k), k, n_rows, add)
                for product, rows in products if product
                for (n, k), n_rows, add in itertools.product(shapes, rows, (False, True))]

    def use(self, gemv, gemm):
        """See `Engine.use`. What was recorded is forgotten."""
        self.card.synchronize()                     # nothing replays what goes now
        self.recordings.clear()
        self.model.gemv, self.model.gemm = gemv, gemm
        self.model.views.clear()                    # which know those of before

    def needed_kernels(self) -> dict:
        """What any prompt and any answer will run, as `Card.collecting` has it."""
        with self.card.collecting() as needed:
            self.launch_all()
        return needed

    def record(self):
        """Record what repeats, so that no request waits for it."""
        sizes = [n for n in (1, 2, 4, 8) if n <= self.n_slots]              # others are recorded when they come
        for group, n, turn in itertools.product(range(len(self.batches)), sizes, range(TURNS if self.sampler else 1)):
            self.recording(self.launch_step, group, n, False, turn)

    def launch_all(self):
        """Launch every kernel that a prompt or an answer of any length may need; what they compute is of no use."""
        few = min(self.chunk, CHUNK)    # beyond, what is run depends on the number of pages alone
        lengths = *range(1, min(few, 64)), *range(64, few + 1, 8), *range(CHUNK, self.chunk + 1, PAGE_TOKENS)
        lanes = [self.lane_rows(n) for n in lengths]
        for n, beside in sorted({(n, len(rows) > 1) for rows in lanes for n in rows}):
            self.model.forward(dataclasses.replace(self.rows_from(0, n, n), beside=beside), self.cache)
        for n in range(1, self.n_slots + 1):
            self.launch_step(0, n, log_probs=True, turn=0)
        for n in range(2, CERTAIN_ROWS + 1):
            self.launch_in_turn(n)
        if self.sampler:
            for n in range(1, HEAD_ROWS + 1):
                self.model.compute_logits(self.model.x, n)
        self.cache.reset(0)
        self.cache.save(0, 0)

    def launch_prompt(self, n: int, marks=(), tap=None):
        """A pass over the n rows of the inputs; with a tap, which sees all rows at once, in one lane."""
        lanes = self.lane_rows(n)
        if tap or len(lanes) == 1:
            self.model.forward(self.rows_from(0, n, n, marks), self.cache, tap)
            return
        begin, lane, queued = self.card.default_stream.record(), None, []
        for (start, rows), stream in zip(with_starts(lanes), self.lanes):
            stream.wait(begin)
            lane = Lane(stream, lane)
            part = dataclasses.replace(self.rows_from(start, rows, n, marks), lane=lane)
            queued.append(lane.queue(self.model.behind(start).steps(part, self.cache)))
        for _ in itertools.zip_longest(*queued):    # layer by layer: no lane waits until another's part is queued whole
            pass
        for stream in self.lanes[:len(lanes)]:
            self.card.default_stream.wait(stream.record())

    def launch_lanes_in_turn(self, n: int):
        """The same, one lane after the other, for a recording, which knows one stream."""
        for start, rows in with_starts(self.lane_rows(n)):
            self.model.behind(start).forward(self.rows_from(start, rows, n), self.cache)

    def rows_from(self, start: int, rows: int, n: int, marks=()) -> Rows:
        """`rows` of the n rows of the inputs, from `start` on."""
        inside = tuple((end - start, slot, kept) for end, slot, kept in marks if start < end <= start + rows)
        all_of_them = rows_of(self.inputs[start:], n, is_decode=False)
        return dataclasses.replace(all_of_them, n=rows, marks=inside, beside=rows < n)

    def launch_in_turn(self, n: int):
        rows = rows_of(self.inputs, n, is_decode=True)
        each = tuple(rows_of(self.inputs[6 * (n + i):], 1, is_decode=True) for i in range(n))
        self.model.forward(dataclasses.replace(rows, each=each), self.cache)

    def launch_step(self, group: int, n: int, log_probs: bool, turn: int):
        self.launch_layers(group, n)
        self.launch_choice(group, n, log_probs, turn)

    def launch_layers(self, group: int, n: int):
        rows = rows_of(self.batches[group], n, is_decode=True)
        rows = dataclasses.replace(rows, early=self.layers.start == 0 or not self.hands_on)  # no `advance` just before
        if self.hands_on:
            self.advance(rows, chosen_of(self.batches[group], n))
        self.model.forward(rows, self.cache)
        if self.sampler:
            self.model.compute_logits(self.model.x, n)

    def launch_choice(self, group: int, n: int, log_probs: bool, turn: int):
        if self.sampler:
            rows = rows_of(self.batches[group], n, is_decode=True)
            self.sampler.launch(self.model.logits, rows, group, turn, log_probs)
            self.advance(rows, self.sampler.results[group][turn].tokens)

    def advance(self, rows: Rows, tokens: Array):
        advance.advance(self.card, rows.ids, rows.positions, rows.rope, tokens, rows.n)


def check_product(card: Card, product, n: int, k: int, rows: int, add: bool):
    """Compare a product of Q8_0 with its reference on random numbers. ValueError where they differ."""
    try:
        q8_gemm.check(card, n, k, rows, add, product)
    except AssertionError as error:
        what = str(error) or "other numbers than the reference"
        where = f"a matrix of {n} x {k}, {rows} row{'s' * (rows > 1)} of x{', added to y' * add}"
        raise ValueError(f"{product.__name__}, {where}: {what}") from error


def with_starts(sizes: list[int]):
    """(start, size) of parts that lie one behind the other."""
    return zip(itertools.accumulate(sizes, initial=0), sizes)


INPUTS = 7                  # numbers of a row: id, slot, position, its three in space and time, and the token chosen last


def rows_of(inputs: Array, n: int, is_decode: bool) -> Rows:
    """n rows whose ids, slots and positions lie side by side at the start of an array, so that one copy fills all."""
    i = inputs
    return Rows(n, is_decode, i[:n], i[n:2 * n], i[2 * n:3 * n], i[3 * n:6 * n].reshape(3, n))


def chosen_of(inputs: Array, n: int) -> Array:
    """The last of the numbers that lie there: where another card's tokens arrive that follow those of n rows."""
    return inputs[6 * n:7 * n]


def set_rows(inputs: Array, ids, slots, positions, in_turn=False):
    """Fill what `rows_of` reads (lists of the same length), and behind it what `chosen_of` does: no tokens are chosen
    yet. in_turn: behind it the same for each row alone."""
    table = np.empty((6, len(ids)), np.int32)
    table[0], table[1], table[2:] = ids, slots, positions
    behind = table.T.reshape(-1) if in_turn else np.full(len(ids), -1, np.int32)
    packed = np.concatenate([table.reshape(-1), behind])
    inputs.card.copy_in(inputs[:packed.size], packed)


class Edge:
    """The way of hidden states from a stage to the next one's card: a hop.

        model.x → outgoing ──copies out──→ pinned host memory ──copies in──→ incoming → model.x

    The memory in between exists twice: while one hop is on its way, the layers go on, and the next may follow. They
    cross as the float32 that the residual stream is made of: in fewer bits, a split would be seen in the answers. That
    is 20 KB for a token of a 27B, and for a pass of 256 over 0.25 GB/s 21 ms each way, while each of three CMP 100-210
    computes for 130 ms (at PEAK_SHARE of its dp4a peak; not measured).
    Between the two copies the host waits for the first: on the hardware this is for, cards that wait for each other's
    events have read stale data.

    A decode step's few rows go straight from model.x to model.x, where they cross sooner than the host has queued a hop
    beside the layers: both cards would wait for that. A token of a 27B takes 0.4 µs over 50 GB/s.
    """

    def __init__(self, upstream: Stage, downstream: Stage):
        self.upstream, self.downstream = upstream, downstream
        upstream.exit = downstream.entry = self
        shape = upstream.max_rows, upstream.config.hidden_dim
        self.pinned = [upstream.card.pinned(shape, np.float32) for _ in range(2)]
        self.copies_out, self.copies_in = upstream.card.stream("copies out"), downstream.card.stream("copies in")
        self.n_sent = self.n_received = 0
        self.n_direct = sum(max(upstream.hop_seconds(n), downstream.hop_seconds(n)) <= QUEUEING
                            for n in range(1, upstream.n_slots + 1))        # rows that go straight
        # Per half: the events after which outgoing, pinned and incoming memory may be written again.
        self.has_left, self.has_come, self.was_read = [None] * 2, [None] * 2, [None] * 2
        self.receipts = collections.deque([None] * 2, maxlen=2)     # the tasks that received the last two hops

    def send(self, n: int, freed: Task | None) -> Event:
        """Queue what upstream's card does for n rows of its model.x. Returns the event after which they are on the
        host. freed: the task that received the last hop of this half."""
        card, half, is_direct = self.upstream.card, self.n_sent % 2, n <= self.n_direct
        self.n_sent += 1
        stream = card.default_stream if is_direct else self.copies_out
        if not is_direct:
            if self.has_left[half]:
                card.default_stream.wait(self.has_left[half])
            card.copy(self.upstream.outgoing[half][:n], self.upstream.model.x[:n])
            stream.wait(card.default_stream.record())
        if freed:
            freed.wait()
        if self.has_come[half]:
            self.downstream.worker.wait(self.has_come[half])
        # Not before: it may be for ever that a thread waits, and keeps this.
        leaving = (self.upstream.model.x if is_direct else self.upstream.outgoing[half])[:n]
        card.copy_out(self.pinned[half][:n], leaving, stream)
        self.has_left[half] = stream.record()
        return self.has_left[half]

    def receive(self, n: int, on_host: Event):
        """Queue what downstream's card does for n rows of its model.x, once they are on the host. Both cards may wait for
        what is done from then on, so there is little of it."""
        card, half, is_direct = self.downstream.card, self.n_received % 2, n <= self.n_direct
        self.n_received += 1
        stream = card.default_stream if is_direct else self.copies_in
        if self.was_read[half] and not is_direct:
            stream.wait(self.was_read[half])
        self.upstream.worker.wait(on_host)
        coming = (self.downstream.model.x if is_direct else self.downstream.incoming[half])[:n]
        card.copy_in(coming, self.pinned[half][:n], stream)
        self.has_come[half] = stream.record()
        if not is_direct:
            card.default_stream.wait(self.has_come[half])
            card.copy(self.downstream.model.x[:n], coming)
            self.was_read[half] = card.default_stream.record()


def choose_rows(start: int, end: int, limit: int, n_stages: int, slowest, last: int = 0) -> int:
    """Tokens of the next pass over a prompt that ends at `end` and is done up to `start`, at most `limit`: all that are
    left, or a multiple of 64. slowest(rows, context): seconds of a pass where it takes longest (`slowest_seconds`).
    last: tokens of the prompt's last pass.

    n stages take as long as one of them for all passes, and n - 1 times the longest pass, in which most of them wait for
    their first or have done their last. Larger passes have fewer beginnings and fill a card better, as the last round
    of blocks of threads takes as long as a full one; of smaller ones the longest is shorter, but not behind one that was
    as long. Of what is about as fast, several stages get the smallest.
    """
    n = end - start
    sizes = [*([n] if n <= limit else []), *range(min(limit, n) // PAGE_TOKENS * PAGE_TOKENS, 0, -PAGE_TOKENS)]
    so_far = slowest(last, start) if last else 0.0

    def seconds(rows):              # but for attention, which takes the same in sum
        rest = slowest(n % rows, 0) if n % rows else 0.0
        return n // rows * slowest(rows, 0) + rest + (n_stages - 1) * max(slowest(rows, end), so_far)

    found = {rows: seconds(rows) for rows in sizes}
    if n_stages == 1:
        return min(found, key=found.get)
    return min(rows for rows in sizes if found[rows] <= PASS_TOLERANCE * min(found.values()))


def passes_over(n: int, rows_of):
    """(start, tokens) of the passes over a prompt of n tokens; rows_of(start, last): tokens of the one that begins there,
    behind one of `last` tokens."""
    start = rows = 0
    while start < n:
        rows = rows_of(start, rows)
        yield start, rows
        start += rows


def attention_seconds(config: Config, n_layers: int, speed: probe.Speed) -> float:
    """What a token before it adds to the time of a token of a prompt, in so many layers of attention."""
    return n_layers * 4 * config.query_dim / speed.half2 / ATTENTION_SHARE


def hop_bytes(config: Config, rows: int) -> int:
    """Of the residual stream of so many tokens, see `Edge`."""
    return 4 * config.hidden_dim * rows


def group_count(n_stages: int, n_slots: int) -> int:
    """Of answers whose decode steps follow each other through the stages."""
    return min(n_stages, n_slots)


def slowest_seconds(stages: list[Stage]):
    """A function of rows and context, tokens before them: seconds of such a pass where it takes longest, on a card or
    between two."""
    edges = list(itertools.pairwise(stages))
    attention = max(stage.attention_seconds() for stage in stages)

    @functools.cache
    def first(rows):
        hops = [stage.hop_seconds(rows) for edge in edges for stage in edge]
        return max([stage.pass_seconds(rows) for stage in stages] + hops)

    return lambda rows, context: first(rows) + attention * rows * context


class Pipeline:
    """The stages in order, and what crosses from card to card. Passes over prompts follow each other through them, so
    that all cards work at the same time; so do decode steps of groups of answers.

    Everything is queued and happens in the order of the calls, also where two requests share memory one after the
    other: a slot or a page may be given to the next as soon as no further work of the last is queued.
    """

    def __init__(self, stages: list[Stage], sizes: CacheSizes):
        self.stages, self.last = stages, stages[-1]
        self.n_groups = group_count(len(stages), sizes.n_slots)
        self.fault: Fault | None = None
        self.error: BaseException | None = None     # what the fault was
        self.on_fault = lambda: None            # of a Scheduler
        self.failing = threading.Lock()         # held while it is decided whose fault it is
        for stage in stages:
            stage.worker.on_fault = self.fail
            stage.worker.ask(stage.allocate, sizes, self.n_groups).result()
        for upstream, downstream in itertools.pairwise(stages):
            Edge(upstream, downstream)
        self.queued = collections.deque()       # the prefill passes that nobody has waited for
        self.chosen = [None] * self.n_groups    # what the last step of each group found, where the next follows it
        self.slowest = slowest_seconds(stages)

    def load_kernels(self, progress: bool):
        """Load what any prompt and any answer will run: one card after the other, as a kernel that the first one needed
        compiled is there for all. It is this thread that compiles, since Ctrl-C ends what the main thread does."""
        for stage in self.stages:
            worker, needed = stage.worker, stage.worker.ask(stage.needed_kernels).result()
            with tqdm.tqdm(desc="compiling kernels", total=len(needed), unit="kernel", leave=False,
                           disable=not progress) as bar:
                stage.card.compile_kernels(needed, lambda name: (bar.set_postfix_str(name), bar.update()))
            for kernel in needed:
                worker.ask(stage.card.load_kernel, *kernel).result()
            worker.ask(stage.record).result()

    def use(self, gemv, gemm):
        """See `Engine.use`."""
        for stage in self.stages:
            for check in stage.checks(gemv, gemm):
                stage.worker.ask(check_product, *check).result()
        for stage in self.stages:
            stage.worker.ask(stage.use, gemv, gemm).result()

    def fail(self, worker: Worker, error: BaseException):
        """Nothing more is done after the first failure; whoever waits for something hears of it."""
        with self.failing:
            if self.fault is not None:
                return
            self.fault, self.error = Fault.of(error), error
            for stage in self.stages:
                stage.worker.stop(error)
        self.on_fault()

    def settle(self):
        """Wait for all that is queued. Raises CardError."""
        for task in [stage.worker.ask(stage.card.synchronize) for stage in self.stages]:
            task.result()

    def close(self):
        """End the workers, after what is queued."""
        with contextlib.suppress(Exception):    # of what has failed
            self.settle()
        stop_all([stage.worker for stage in self.stages], CardError("the engine was closed"))

    # ---- slots, pages, checkpoints ----

    def on_all(self, work):
        """Have work(stage) done by every stage's worker."""
        for stage in self.stages:
            stage.worker.post(work, stage)

    def start(self, slot: int, request: "Request", number: int | None = None):
        """Make a slot ready for a new sequence, whose states begin as those of checkpoint `number`, or as zeros."""
        if number is None:
            self.on_all(lambda stage: stage.cache.reset(slot))
        else:
            self.on_all(lambda stage: stage.cache.restore(number, slot))
        self.last.worker.post(self.last.sampler.start, slot, request)

    def set_pages(self, slot: int, pages: list[int]):
        pages = list(pages)                     # as they are now
        self.on_all(lambda stage: stage.cache.set_pages(slot, pages))

    def save(self, slot: int, number: int):
        """Keep a slot's states as checkpoint `number`."""
        self.on_all(lambda stage: stage.cache.save(slot, number))

    def spill(self, number: int, host: int) -> bool:
        """Copy checkpoint `number` to number `host` in host memory; False where no more of that can be page-locked."""
        try:
            for stage in self.stages:
                stage.cache.pin(host)
        except CardError:
            return False
        self.on_all(lambda stage: stage.cache.spill(number, host))
        return True

    def fetch(self, host: int, number: int):
        self.on_all(lambda stage: stage.cache.fetch(host, number))

    # ---- passes ----

    def run(self, n: int, work, *arguments, post=Worker.post) -> list[Task]:
        """Have work(stage, *arguments) done by every stage for its part of a pass of n rows."""
        tasks = [None]
        for stage in self.stages:
            freed = stage.exit and stage.exit.receipts[0]
            tasks.append(post(stage.worker, stage.run_pass, tasks[-1], freed, n, work, *arguments))
            if stage.entry:
                stage.entry.receipts.append(tasks[-1])
        return tasks[1:]

    def prefill(self, ids, slot: int, start: int, marks=(), tap=None):
        """A chunk of a prompt: tokens of `slot` at positions start, start + 1, ...; start is a multiple of 64.
        marks: (tokens of the chunk, a multiple of 64, number of the checkpoint to take after them), ascending.
        With a tap this returns, or raises what the tap has raised, when all is queued."""
        if tap:
            self.run(len(ids), Stage.prefill, ids, slot, start, marks, tap, post=Worker.ask)[-1].result()
            return
        self.queued.append(self.run(len(ids), Stage.prefill, ids, slot, start, marks, None)[-1])
        # Or all of a prompt is queued, and no cancellation stops the cards. Fewer would leave the cards idle between
        # links that take as long as they do.
        if len(self.queued) >= 2 * len(self.stages):
            self.last.worker.wait(self.queued.popleft().result())

    def pass_rows(self, start: int, end: int, limit: int, last: int) -> int:
        """Tokens of the next pass over a prompt, as `choose_rows`."""
        return choose_rows(start, end, limit, len(self.stages), self.slowest, last)

    def sample_row(self, row: int, slot: int, log_probs: bool = False) -> "Tokens":
        """The next token of a slot, from row `row` of the chunk queued last."""
        return Tokens(self.last.worker.post(self.last.sample_row, row, slot, log_probs))

    def logits(self, row: int, n: int) -> np.ndarray:
        """The logits after n tokens of the chunk queued last from `row` on."""
        return self.last.worker.ask(self.last.logits, row, n).result()

    # ---- decode steps of a group of answers ----

    def place(self, ids, slots, positions, group: int = 0):
        """The batch of the decode steps that follow: for each row a token, its slot and its position."""
        ids, slots, positions = list(ids), list(slots), list(positions)
        self.on_all(lambda stage: stage.place(group, ids, slots, positions))
        self.chosen[group] = None

    def step(self, n: int, log_probs: bool = False, group: int = 0) -> "Tokens":
        """Queue a decode step of the n rows of the batch. The tokens that it finds are what enters the next one."""
        tokens = Tokens(self.follow(n, Stage.step, group, n, log_probs)[-1])
        self.chosen[group] = tokens
        return tokens

    def forward(self, n: int, group: int = 0):
        """The first part of such a step: all that needs no more than the tokens of the step before."""
        self.follow(n, Stage.forward, group, n)

    def follow(self, n: int, work, group: int, *arguments) -> list[Task]:
        """`run` for a step with the tokens of the group's last one, which nobody reads before the first card has them."""
        tokens = self.chosen[group]
        tasks = self.run(n, work, group, tokens, *arguments)
        if tokens is not None:
            tokens.follower = tasks[0]
        return tasks

    def constrain(self, constraints: "dict[int, Constraint]"):
        """Slots choose their next tokens from what their constraints allow."""
        self.last.sampler.make_masks(constraints)
        self.last.worker.post(self.last.sampler.send_masks, list(constraints))

    def append(self, ids, slot: int, start: int, step: int):
        """A decode pass over consecutive tokens of `slot` at positions start, start + 1, ... that the host knows
        already: the slot's states take them, and the next token drawn there is that of `step`."""
        self.run(len(ids), Stage.append, ids, slot, start, step)

    def choose(self, n: int, log_probs: bool, group: int = 0) -> "Tokens":
        """The second part, which heeds what `constrain` was told in between."""
        tokens = self.chosen[group] = Tokens(self.last.worker.post(self.last.choose, group, n, log_probs))
        return tokens


# Placement: neighbouring layers on each card, so that the slowest one takes as little time as the memory of all allows.
# A plan builds the stages on cards that only count (PlannedCard), so its figures are those of what `load` allocates.

@dataclass(frozen=True)
class Schedule:
    """When each stage works on each pass of a prompt, in seconds from the start of the first."""

    spans: list[list[tuple[float, float]]]      # [stage][pass]: start and end

    @property
    def seconds(self) -> float:
        return self.spans[-1][-1][1]

    @property
    def busy(self) -> list[float]:
        """The share of the time that each stage works."""
        return [sum(end - start for start, end in stage) / self.seconds for stage in self.spans]


def schedule(passes: list, hops: list) -> Schedule:
    """What `Pipeline.prefill` makes of passes that take passes[stage][pass] seconds, and hops that take
    hops[edge][pass] = (out, in) seconds for the copies to the host and from it."""
    n_stages, n_passes = len(passes), len(passes[0])
    starts, ends, outs, ins = ([[0.0] * n_passes for _ in range(n_stages)] for _ in range(4))

    def at(times, i):
        return times[i] if i >= 0 else 0.0

    for i in range(n_passes):
        for stage in range(n_stages):
            start = max(ins[stage][i], at(ends[stage], i - 1), at(outs[stage], i - 3))
            if stage == 0:                              # back-pressure
                start = max(start, at(ends[-1], i - 2 * n_stages))
            starts[stage][i], ends[stage][i] = start, start + passes[stage][i]
            if stage == n_stages - 1:
                continue
            out, into = hops[stage][i]                  # two buffers on each side, and two in host memory between them
            begin = max(ends[stage][i], at(outs[stage], i - 1), at(ins[stage + 1], i - 2))
            outs[stage][i] = begin + out
            begin = max(outs[stage][i], at(ins[stage + 1], i - 1), at(starts[stage + 1], i - 2))
            ins[stage + 1][i] = begin + into
    return Schedule([list(zip(*times)) for times in zip(starts, ends)])


PEAK_SHARE = 0.75           # of a card's peak in the times of a plan, which only tell what is slower than what
ATTENTION_SHARE = 0.32      # of the half2 peak: 27B on an H200, passes of 768


@dataclass(frozen=True)
class Demand:
    """What a model is to be loaded for; the fields are arguments of `load`."""

    n_ctx: int
    slots: int = 1
    chunk: int | None = None
    kv_tokens: int | None = None
    checkpoint_memory: int | None = None
    checkpoint_host_memory: int | None = None
    split: tuple[int, ...] | None = None

    def __post_init__(self):
        """Raises RequestError."""
        limits = ("ctx", self.n_ctx, 1), ("slots", self.slots, 1), ("chunk", self.chunk, PAGE_TOKENS)
        for name, value, unit in limits:
            if value is not None and (value < 1 or value % unit):
                raise RequestError(name, f"{name} must be {unit}, {2 * unit}, ..., not {value}")
        if self.chunk is not None and self.chunk > LARGEST_CHUNK:   # kernels count the numbers of a pass in 32 bits
            raise RequestError("chunk", f"chunk must be at most {LARGEST_CHUNK}, not {self.chunk}")
        if self.kv_tokens is not None and self.kv_tokens < self.n_ctx:
            raise RequestError("kv_tokens", f"kv_tokens must be at least the {self.n_ctx} tokens of a context, not "
                                            f"{self.kv_tokens}")


def check_split(split, n_layers: int, n_cards: int) -> list[range]:
    """The layers of each card, of which there are split[i] on card i. Raises RequestError."""
    if len(split) != n_cards or sum(split) != n_layers or min(split) < 1:
        raise RequestError("split", f"split must be {n_cards} number{'s' * (n_cards > 1)} from 1 on, one per card, "
                                    f"with the sum {n_layers}, not {listed(split)}")
    stops = list(itertools.accumulate(split))
    return [range(stop - n, stop) for n, stop in zip(split, stops)]


def best_split(n_layers: int, costs: list) -> list[range] | None:
    """The layers of each stage, one at least, whose largest costs[stage](start, stop) is least; None where no split
    has finite costs. Of several, that with more layers on the earlier stages."""
    best = {n_layers: (0.0, ())}                # from this layer on, on the stages behind: (largest cost, stops)
    for behind, cost in enumerate(reversed(costs)):
        found = {}
        for start in range(len(costs) - 1 - behind, n_layers):
            for stop in sorted(best, reverse=True):
                if stop > start:
                    worst = max(cost(start, stop), best[stop][0])
                    if worst < found.get(start, (math.inf,))[0]:
                        found[start] = worst, (stop, *best[stop][1])
        best = found
    if 0 not in best:
        return None
    stops = best[0][1]
    return [range(start, stop) for start, stop in zip((0, *stops), stops)]


class LayerCosts:
    """What neighbouring layers cost on each card of a plan: memory and time."""

    def __init__(self, config: Config, weights, cards: list[Card]):
        self.config, self.speeds = config, [probe.speed_of(card) for card in cards]
        counting, sizes = PlannedCard(cards[0]), []
        for index in range(config.n_layers):
            before = counting.free_bytes
            load_layer(weights, counting, config, index)
            sizes.append(before - counting.free_bytes)
        before = counting.free_bytes
        weights.matrix(counting, "token_embd.weight" if config.tied_embeddings else "output.weight")
        self.head_bytes = before - counting.free_bytes
        operations = [0] * config.n_layers      # of a token of a prompt
        for name, shape in config.tensor_shapes().items():
            if (block := re.match(r"blk\.(\d+)\.", name)) and int(block[1]) < config.n_layers:
                operations[int(block[1])] += 2 * math.prod(shape)

        def sums(values):                       # of the layers before each: a difference of two is that of a range
            return list(itertools.accumulate(values, initial=0))

        self.weights, self.operations = sums(sizes), sums(operations)
        self.pages, self.states = (sums(each(config, [kind]) for kind in config.layer_kinds)
                                   for each in (page_bytes, state_bytes))
        self.n_attention = sums(kind == "attention" for kind in config.layer_kinds)

    def prefill_seconds(self, stage: int, start: int, stop: int, context: float) -> float:
        """Seconds of a token of a prompt that has `context` tokens before it."""
        products = (self.operations[stop] - self.operations[start]) / self.speeds[stage].dot / PEAK_SHARE
        n_layers = self.n_attention[stop] - self.n_attention[start]
        return products + context * attention_seconds(self.config, n_layers, self.speeds[stage])

    def decode_seconds(self, stage: int, start: int, stop: int, context: int) -> float:
        """Seconds of a decode step of one answer."""
        head = self.head_bytes * (stop == self.config.n_layers)
        n_bytes = self.memory(start, stop, pages_for(context), 2) + head        # states are read and written
        return n_bytes / self.speeds[stage].read / PEAK_SHARE

    def memory(self, start: int, stop: int, n_pages: int, n_states: int) -> int:
        """Bytes of weights, pages and states."""
        return (self.weights[stop] - self.weights[start] + n_pages * (self.pages[stop] - self.pages[start])
                + n_states * (self.states[stop] - self.states[start]))


def place_layers(config: Config, weights, cards: list[Card], demand: Demand, costs: LayerCosts,
                 wasted: list[int]) -> list[range]:
    """The layers of each of several cards: the slowest takes the least time for a pass of a prompt, and of such splits
    for a decode step, where the memory suffices. Room for the contexts of all slots is made if it can be; for one, there
    must be. Where even that does not fit, the split as if it did: the plan shows what is missing where.
    wasted: bytes of each card to leave."""
    n_layers, n_cards, n_states = config.n_layers, len(cards), demand.slots + LEAST_CHECKPOINTS
    context, least = demand.n_ctx // 2, pages_for(demand.kv_tokens or demand.n_ctx)
    # What a stage needs beside its layers does not depend on how many they are: a few of both kinds tell.
    few = next(n for n in range(1, n_layers + 1) if set(config.layer_kinds[:n]) == set(config.layer_kinds))
    few = min(few, n_layers // n_cards)
    samples = [range(few), *[range(1, 1 + few)] * (n_cards - 2), range(n_layers - few, n_layers)]
    sampled = plan_stages(config, weights, cards, dataclasses.replace(
        demand, chunk=demand.chunk or CHUNK, kv_tokens=least * PAGE_TOKENS, checkpoint_memory=0), samples)
    left = [stage.free - n - stage.total + costs.memory(stage.layers.start, stage.layers.stop, least, n_states)
            for stage, n in zip(sampled.stages, wasted)]

    def split(n_pages, slowest, seconds):
        """The best split by seconds(stage, start, stop, context) of those that fit, with no pass beyond `slowest`."""
        def cost(stage, start, stop):
            if n_pages is not None and costs.memory(start, stop, n_pages, n_states) > left[stage]:
                return math.inf
            within = costs.prefill_seconds(stage, start, stop, context) <= slowest * (1 + 1e-9)
            return seconds(stage, start, stop, context) if within else math.inf

        return best_split(n_layers, [functools.partial(cost, stage) for stage in range(n_cards)])

    wished = least if demand.kv_tokens else demand.slots * pages_for(demand.n_ctx)
    for n_pages in wished, least, None:
        if found := split(n_pages, math.inf, costs.prefill_seconds):
            slowest = max(costs.prefill_seconds(stage, layers.start, layers.stop, context)
                          for stage, layers in enumerate(found))
            return split(n_pages, slowest, costs.decode_seconds)


@dataclass(frozen=True)
class StagePlan:
    """What a stage takes of the memory of its card, in bytes."""

    card: str
    layers: range
    free: int                   # before
    weights: int
    kv: int                     # pages of keys and values
    states: int                 # recurrent, of the slots
    checkpoints: int
    scratch: int                # of passes, hops and sampling, and what is lost to the driver's pages

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.states + self.checkpoints + self.scratch


@dataclass(frozen=True)
class Plan:
    """Where a model goes, what that takes, and what hops between the cards will cost."""

    stages: list[StagePlan]
    on_paper: list[Stage]       # on cards that only count
    demand: Demand
    sizes: CacheSizes
    chunk: int                  # tokens of a pass, the same for all stages

    @property
    def fits(self) -> bool:
        return all(stage.total <= stage.free for stage in self.stages)

    @property
    def layers(self) -> list[range]:
        return [stage.layers for stage in self.stages]

    def table(self) -> str:
        """For people: a line for each card."""
        names = "weights", "kv", "states", "checkpoints", "scratch", "total", "free"
        heads = "weights", "KV pages", "states", "checkpoints", "scratch", "together", "free"
        widths = [max(len(head), 9) + 2 for head in heads]
        width = max(len(stage.card) for stage in self.stages)
        lines = [f"{'card':{width}}  {'layers':>9}" + "".join(f"{head:>{n}}" for head, n in zip(heads, widths))]
        for stage in self.stages:
            layers = f"{stage.layers.start} - {stage.layers.stop - 1}"
            sizes = "".join(f"{show_bytes(getattr(stage, name)):>{n}}" for name, n in zip(names, widths))
            missing = f"  {show_bytes(stage.total - stage.free)} too much" if stage.total > stage.free else ""
            lines.append(f"{stage.card:{width}}  {layers:>9}{sizes}{missing}")
        return "\n".join(lines)


def plan_stages(config: Config, weights, cards: list[Card], demand: Demand, layers: list[range]) -> Plan:
    """The Plan of these layers on each card, whether they fit or not. weights: PlannedWeights."""
    chunk = demand.chunk
    while True:                                 # once more where the stages would have chosen different chunks
        counting = [PlannedCard(card) for card in cards]
        stages = [Stage(card, config, weights, each, demand.slots, demand.n_ctx, chunk)
                  for card, each in zip(counting, layers)]
        if len({stage.chunk for stage in stages}) == 1:
            break
        chunk = min(stage.chunk for stage in stages)
    sizes = choose_sizes(stages, demand.slots, demand.n_ctx, demand.kv_tokens, demand.checkpoint_memory,
                         demand.checkpoint_host_memory)
    planned = []
    for card, stage in zip(cards, stages):
        free = stage.card.card.free_bytes
        stage.allocate(sizes, group_count(len(stages), sizes.n_slots))
        kv, states = sizes.n_pages * stage.page_bytes, sizes.n_slots * stage.state_bytes
        checkpoints, used = sizes.n_checkpoints * stage.state_bytes, free - stage.card.free_bytes
        scratch = used - stage.weight_bytes - kv - states - checkpoints
        planned.append(StagePlan(card.name, stage.layers, free, stage.weight_bytes, kv, states, checkpoints, scratch))
    return Plan(planned, stages, demand, sizes, stages[0].chunk)


def most(low: int, high: int, fits) -> int | None:
    """The largest n from low to high for which fits(n), which is false from some n on; None where it always is."""
    if low > high or not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


MOST_CARDS = 16             # of which a plan looks whether one more would do


class Planner:
    """The plan of a model on some cards, and what could be different about it."""

    def __init__(self, config: Config, weights, cards: list[Card], demand: Demand, spare: list[Card] = ()):
        """spare: cards that were opened with the others and are not to be used. Raises RequestError."""
        if len(cards) > config.n_layers:
            raise RequestError("card", f"{config.name} has {config.n_layers} layers: {len(cards)} cards are too many")
        self.config, self.demand, self.cards, self.spare = config, demand, cards, list(spare)
        self.weights = weights if isinstance(weights, PlannedWeights) else PlannedWeights(config, weights)
        self.plan = self.planned()

    @functools.cached_property
    def costs(self) -> LayerCosts:
        return LayerCosts(self.config, self.weights, self.cards)

    def planned(self, **changes) -> Plan:
        """The Plan, whether it fits or not, with other fields of the demand."""
        demand = dataclasses.replace(self.demand, **changes)
        if demand.split:
            layers = check_split(demand.split, self.config.n_layers, len(self.cards))
        elif len(self.cards) == 1:
            layers = [range(self.config.n_layers)]
        else:
            return self.placed(demand)
        return plan_stages(self.config, self.weights, self.cards, demand, layers)

    def placed(self, demand: Demand) -> Plan:
        """The Plan with the best split. How much the driver's pages waste depends on the split: where one does not fit
        on that account, another may."""
        plan, before, wasted = None, None, [0] * len(self.cards)
        while plan is None or not plan.fits:
            layers = place_layers(self.config, self.weights, self.cards, demand, self.costs, wasted)
            if layers == before:
                break
            plan, before = plan_stages(self.config, self.weights, self.cards, demand, layers), layers
            wasted = [n + max(stage.total - stage.free, 0) for n, stage in zip(wasted, plan.stages)]
        return plan

    def longest_context(self) -> int | None:
        """The most tokens of a context that fit, in whole pages; what the model was made for, at most."""
        longest = pages_for(max(self.config.context_length, self.demand.n_ctx))
        if self.demand.kv_tokens:
            longest = min(longest, self.demand.kv_tokens // PAGE_TOKENS)
        n = most(1, longest, lambda n: self.planned(n_ctx=n * PAGE_TOKENS).fits)
        return n and n * PAGE_TOKENS

    def passes(self, n: int) -> list[tuple[int, int]]:
        """(start, tokens) of the passes over a prompt of n tokens, as the engine makes them."""
        slowest = slowest_seconds(self.plan.on_paper)
        return list(passes_over(n, lambda start, last: choose_rows(
            start, n, self.plan.chunk, len(self.cards), slowest, last)))

    def prompt_schedule(self, n: int, with_hops: bool = True) -> Schedule:
        """What is expected of a prompt of n tokens; without hops: as if links were infinitely fast."""
        passes, stages = self.passes(n), self.plan.on_paper
        seconds = [[stage.pass_seconds(rows) + rows * (start + rows / 2) * stage.attention_seconds()
                    for start, rows in passes] for stage in stages]
        hops = [[(a.hop_seconds(rows) * with_hops, b.hop_seconds(rows) * with_hops) for _, rows in passes]
                for a, b in itertools.pairwise(stages)]
        return schedule(seconds, hops)

    def expected_hops(self) -> tuple[float, float, float]:
        """Of a prompt that fills the context: the share of its time that hops add to it, and the share that the least
        busy card works; and the share of hops in a decode step of one answer."""
        n, stages = self.demand.n_ctx, self.plan.on_paper
        found = self.prompt_schedule(n)
        added = 1 - self.prompt_schedule(n, with_hops=False).seconds / found.seconds
        step = sum(self.costs.decode_seconds(i, stage.layers.start, stage.layers.stop, n // 2)
                   for i, stage in enumerate(stages))
        hops = sum(a.hop_seconds(1) + b.hop_seconds(1) for a, b in itertools.pairwise(stages))
        return added, min(found.busy), hops / (step + hops)

    def report(self) -> str:
        """The plan for people: the table, the longest context, and what is expected of hops."""
        plan, d, longest = self.plan, self.demand, self.longest_context()
        lines = [plan.table(), "",
                 f"context: {d.slots} x {d.n_ctx:,} tokens, pages for {plan.sizes.n_pages * PAGE_TOKENS:,}; "
                 + (f"the longest that fits has {longest:,}" if longest else "none fits")]
        if len(self.cards) > 1:
            added, busy, decode = self.expected_hops()
            n_passes = len(self.passes(d.n_ctx))
            links = ", ".join(f"{speed.link / 1e9:g}" for speed in self.costs.speeds)
            lines += [f"a hop: {show_bytes(hop_bytes(self.config, plan.chunk))} for a pass of {plan.chunk} tokens, "
                      f"{show_bytes(hop_bytes(self.config, 1))} for one token, over links of {links} GB/s",
                      f"expected share of time in hops: {added:.1%} of a prompt of {d.n_ctx:,} tokens in {n_passes} "
                      f"passes, {decode:.1%} of a step of one answer",
                      f"expected share of that prompt's time that each card works: {busy:.0%} or more"]
            if any(card.kind == "emulated" and not card.like for card in self.cards):
                lines.append(f"(emulated cards of no type count as {CARDS[0].name})")
        return "\n".join(lines)

    def changes(self) -> list[str]:
        """What would make it fit, each by itself: the least of every kind, for people."""
        d, found = self.demand, []
        if n := most(1, d.slots - 1, lambda n: self.planned(slots=n).fits):
            found.append(f"--slots {n}")
        if (n := self.longest_context()) and n < d.n_ctx:
            found.append(f"--ctx {n}")
        for name in "kv_tokens", "checkpoint_memory":
            if getattr(d, name) is not None and self.planned(**{name: None}).fits:
                found.append(f"no {option_name(name)}")
        if d.split and self.planned(split=None).fits:
            found.append("no --split")
        largest = max(self.cards, key=lambda card: card.free_bytes)
        for n in range(len(self.cards) + 1, min(MOST_CARDS, self.config.n_layers) + 1):
            more = n - len(self.cards)
            if self.other([*self.cards, *[largest] * more], self.weights).fits:
                found.append(f"{more} more card{'s' * (more > 1)} like {largest.name}")
                break
        for name in sorted(FORMATS, key=lambda name: -FORMATS[name].file_bytes / FORMATS[name].file_block):
            if self.other(self.cards, PlannedWeights(self.config, self.weights, name)).fits:
                found.append(f"a file in {name}")
                break
        return found

    def other(self, cards: list[Card], weights) -> Plan:
        """The Plan on other cards or of other weights."""
        return Planner(self.config, weights, cards, dataclasses.replace(self.demand, split=None)).plan

    def check(self):
        """Raises OutOfMemory, with the table and what would do, where the plan does not fit."""
        if not self.plan.fits:
            changes = " or ".join(self.changes())
            way_out = f"it would with {changes}" if changes else "nothing else of its size would: take a smaller model"
            raise OutOfMemory(f"{self.config.name} does not fit:\n{self.plan.table()}\n{way_out}")


# ======================================================================================================
# 7  Sampling and constraints
# ======================================================================================================


class Tokens:
    """Tokens on their way from a card to the host, and their log-probabilities where these were asked for.
    fetched: the task that returns what `Sampler.fetch` does."""

    def __init__(self, fetched: Task):
        self.fetched, self.report = fetched, None
        self.follower: Task | None = None   # what the first stage does with them

    def arrived(self) -> np.ndarray:
        """Waits for them: int32, -1 where the logits of a row held a NaN. Good until the second `fetch` after, of the
        same group."""
        tokens, self.report, arrived = self.fetched.result()
        self.fetched.worker.wait(arrived)
        return tokens

    def read(self) -> np.ndarray:
        """The same for whom the cards do not wait. They go first: of two threads that wake up at once, one waits until
        the other is done with Python."""
        if self.follower is not None:
            self.follower.wait()
        return self.arrived()

    def log_probs(self, row: int, top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
        """Of what was read: the log-probability of a row's token, and the `top` likeliest tokens with theirs."""
        own, likeliest, ids = logprobs.unpack_report(self.report)
        return float(own[row]), tuple(zip(ids[row, :top].tolist(), likeliest[row, :top].tolist()))


TURNS = 2                   # of a group's steps, as to where they leave their results


@dataclass
class Results:
    """Where `Sampler.launch` leaves what it finds for some rows, and the host memory that this is copied to."""

    tokens: Array
    report: Array                               # of log-probabilities
    on_host: tuple[np.ndarray, np.ndarray]      # page-locked, the same two
    copied: Event | None = None             # after which they may be written again


class Sampler:
    """The sampling kernels' memory on a card: parameters, step, token history, biases and mask of every slot; and their
    results. These are copied to the host beside the next step, which writes others: a copy of four bytes in between
    takes 9 µs, of 504 for a step of a 0.8B (H100)."""

    def __init__(self, card: Card, n_slots: int, n_vocab: int):
        self.card, self.n_vocab = card, n_vocab
        self.state = sample.SamplingState.allocate(card, n_slots, n_slots, n_vocab)
        self.log_probs = logprobs.LogprobState.allocate(card, n_slots, n_vocab)
        self.masks, self.copies = card.pinned(self.state.mask.shape, np.uint32), card.stream()
        # To an emulated card a stream is one more thread to share the processors with: 0.1 ms a step.
        self.reads = card.default_stream if card.kind == "emulated" else card.stream("reads")
        self.executor = llguidance.LLExecutor()

    def allocate(self, n_groups: int):
        """Take the memory of results, for each group of answers and for first tokens. Of a group's some are copied and
        read while the next are found; as many first tokens as groups may wait to be read."""
        counts = [TURNS] * n_groups + [n_groups + 1]
        shape = sum(counts), len(self.masks)
        self.tokens = self.card.alloc(shape, np.int32, "sampled tokens")
        self.reports = self.card.alloc((*shape, logprobs.REPORT), np.uint32, "log-probabilities")
        on_host = zip(self.card.pinned(shape, np.int32), self.card.pinned(self.reports.shape, np.uint32))
        results = map(Results, self.tokens, self.reports, on_host)
        self.results = [list(itertools.islice(results, n)) for n in counts]
        self.turns = [itertools.cycle(range(n)) for n in counts]

    def start(self, slot: int, request: "Request"):
        """Set a slot's parameters for a request and forget what it generated before."""
        r, state = request, self.state
        seed = secrets.randbits(64) if r.seed is None else r.seed
        packed = sample.pack_parameters(
            r.temperature, r.top_k, r.top_p, r.min_p, seed, repetition=r.repetition_penalty,
            frequency=r.frequency_penalty, presence=r.presence_penalty, masked=r.grammar is not None,
            biased=bool(r.logit_bias))
        self.card.copy_in(state.parameters[slot], packed)
        if packed[sample.FLAGS] & sample.PENALIZED:
            history = np.zeros(self.n_vocab, np.uint16)
            history[r.prompt_ids] = sample.IN_PROMPT
            self.card.copy_in(state.history[slot], history)
        if r.grammar_after is not None:
            self.card.fill(state.mask[slot], 0xFF, self.copies)         # all tokens, until the grammar rules
            self.card.default_stream.wait(self.copies.record())
        if r.logit_bias:
            bias = np.zeros(self.n_vocab, np.float32)
            bias[list(r.logit_bias)] = list(r.logit_bias.values())
            self.card.copy_in(state.bias[slot], bias)

    def go_on(self, slot: int, step: int):
        """Number `step` is the next token that a slot draws."""
        self.card.copy_in(self.state.parameters[slot][sample.STEP:sample.STEP + 1], np.array([step], np.uint32))

    def make_masks(self, constraints: "dict[int, Constraint]"):
        """Write down on the host what slots may choose next. The tokens chosen under their last masks must have been
        read."""
        free = []
        for slot, constraint in constraints.items():
            if constraint.forced:
                token = constraint.forced[0]
                self.masks[slot] = 0
                self.masks[slot, token // 32] = 1 << token % 32
            else:
                free.append((constraint.matcher, slot))
        if free:
            llguidance.numpy.fill_next_token_bitmask_par(self.executor, free, self.masks.view(np.int32))

    def send_masks(self, slots: list[int]):
        """Queue the masks of slots for what `launch` does next. They travel beside what runs: all that writes masks is
        in `copies`."""
        for slot in slots:
            self.card.copy_in(self.state.mask[slot], self.masks[slot], self.copies)
        self.card.default_stream.wait(self.copies.record())

    def take_turn(self, group: int) -> int:
        """Which of the results of a group, -1: of first tokens, are to be written next. What is queued from now on
        waits until those that are there have been copied."""
        turn = next(self.turns[group])
        if copied := self.results[group][turn].copied:
            self.card.default_stream.wait(copied)
        return turn

    def launch(self, logits: Array, rows: Rows, group: int, turn: int, log_probs: bool):
        """Queue the choice of the next token of each row; it can be recorded."""
        results = self.results[group][turn]
        sample.sample(self.card, results.tokens, logits, rows.slots, self.state, rows.n, self.n_vocab)
        if log_probs:
            logprobs.logprobs(self.card, results.report, logits, results.tokens, self.log_probs, rows.n, self.n_vocab)

    def fetch(self, group: int, turn: int, n: int, log_probs: bool) -> tuple[np.ndarray, np.ndarray | None, Event]:
        """Queue the copy to the host of what `launch` found for n rows, beside what is queued next. Returns tokens,
        report of log-probabilities or None, and the event after which they are good."""
        results = self.results[group][turn]
        tokens, report = (host[:n] for host in results.on_host)
        self.reads.wait(self.card.default_stream.record())
        self.card.copy_out(tokens, results.tokens[:n], self.reads)
        if log_probs:
            self.card.copy_out(report, results.report[:n], self.reads)
        results.copied = self.reads.record()
        return tokens, report if log_probs else None, results.copied

# ======================================================================================================
# 8  Scheduler and engine
# ======================================================================================================

CHUNK = 512                 # tokens of a prompt that run in one pass, at most; a multiple of 64
LARGEST_CHUNK = 4096        # the same on a real card, which more rows fill better (9B at 4,620 tokens: 10 % faster),
CHUNK_SHARE = 8             # if they take no more than 1 / 8 of the memory that weights and a context leave
PASS_SECONDS = 0.5          # and if their products take no longer at the peak of the card; 1.4 times that is usual
PASS_TOLERANCE = 1.005      # with 1.02, 27B on two H200 got passes of 384 where 512 were 2 % faster
PRODUCT_SECONDS = 100e-6    # that one more pass costs for each of its products: 27B on two H200, see `choose_rows`
RUNNING_CHUNK = 512         # at most while answers are running, which wait for it
CERTAIN_ROWS = 8            # tokens that a grammar leaves no choice of, in one decode pass at most,
LEAST_CERTAIN = 3           # and at least: the pass waits for what is in flight
TURN = "<|im_start|>"       # the control token at which a turn of a conversation begins
NAN_LOGITS = "the logits hold a NaN: the model file is damaged, or a kernel is wrong"
DEFAULT_CTX = 4096          # tokens of a slot, where neither the caller nor the model asks for fewer

# The small model that comes with qengine.
DEFAULT_MODEL = Path(__file__).resolve().parent / "models" / "qengine-10m-Q8_0.gguf"


class Sequence:
    """A generation that holds a slot: its tokens, and how many of them the caches have seen."""

    def __init__(self, generation: Generation, slot: int, n_pages: int, root: Node):
        self.generation, self.slot = generation, slot
        self.n_pages = n_pages          # that it may come to need, and so can rely on
        self.tokens = list(generation.request.prompt_ids)
        self.has_begun = False          # its slot is ready for it
        self.n_cached = 0
        self.n_pass = 0                 # tokens of its prompt's last pass
        self.in_flight = 0              # tokens that a queued decode step will find: 0 or 1
        self.group: int | None = None   # of answers, whose steps it takes part in
        self.pages: list[int] = []
        self.node = root                # of the prefix tree: the last that stands for tokens of this
        self.marks: list[int] = []      # positions in the prompt where checkpoints are taken
        self.decoded: Node | None = None    # whose checkpoint is its latest of decoded tokens

    @property
    def in_prompt(self) -> bool:
        return self.n_cached < self.generation.n_prompt

    @property
    def is_answer(self) -> bool:
        """Whether its first token is there."""
        return len(self.tokens) > self.generation.n_prompt

    def is_full(self, more: int, n_ctx: int) -> bool:
        """Whether so many more tokens end it by its length."""
        return more >= self.room(n_ctx)

    def room(self, n_ctx: int) -> int:
        """How many more tokens it may have."""
        longest = self.generation.request.max_tokens
        left = n_ctx - len(self.tokens)
        return left if longest is None else min(left, longest - self.generation.n_generated)

    def n_certain(self, n_ctx: int) -> int:
        """How many tokens follow for certain and can be appended by one pass, which does not go beyond a page. None
        where something is to be known of each: its log-probability, or for penalties that it was there."""
        constraint, request = self.generation.constraint, self.generation.request
        if not constraint or constraint.after is not None or request.top_logprobs is not None or request.is_penalized:
            return 0
        certain = min(len(constraint.forced), self.room(n_ctx)) - self.in_flight
        return min(certain, CERTAIN_ROWS, PAGE_TOKENS - (self.n_cached + self.in_flight) % PAGE_TOKENS)


@dataclass(frozen=True)
class Flight:
    """A decode step that is queued, or the end of a prompt: the sequences of its rows, and the tokens it will find."""

    sequences: list[Sequence]
    tokens: Tokens


def wants_log_probs(sequences: list[Sequence]) -> bool:
    return any(s.generation.request.top_logprobs is not None for s in sequences)


class Scheduler:
    """Decides what the cards do next. Its thread repeats `step`: admit, one chunk of one prompt, one decode step.

    So prompts and running answers take turns, and a cancellation is seen at every step. The queue has no limit:
    the server, which strangers may reach, has one. Who waits is admitted in the order of arrival, when there is a slot
    and all pages that prompt and answer may come to need are there: free, or kept for later and promised to nobody. So
    nobody who runs ever lacks a page, and nobody is overtaken for ever.

    What a prompt has in common with earlier ones is looked up when its first chunk is due: of several that arrive
    together, the first is processed by then, and the others find what they share with it.

    A decode step is queued before the tokens of the one before it are looked at, since the cards hand those on
    themselves: so they never wait for the host. Where such a token ends its sequence, the step has computed a row
    for nothing: it wrote into the sequence's own slot and pages, before whoever has them next. Where a grammar rules
    an answer, the tokens are looked at while the layers of the next step run, and its choice is queued after that.

    Several cards work at the same time on several things. So the answers are in groups, as many as there are cards, and
    while one group's step is on the first card, another's is on the second; in between prompts the groups take turns,
    since a step comes back only after the passes before it. And the next prompt begins before the last one's first
    token is there. One card has one group. No token depends on the grouping.
    """

    def __init__(self, pipeline: Pipeline, cache: PrefixCache, tokenizer: Tokenizer, n_slots: int, n_ctx: int,
                 chunk: int):
        self.pipeline, self.cache, self.tokenizer = pipeline, cache, tokenizer
        self.n_slots, self.n_ctx, self.chunk = n_slots, n_ctx, chunk
        self.free_slots = list(reversed(range(n_slots)))
        self.waiting, self.running = collections.deque(), []
        self.flights: list[Flight | None] = [None] * pipeline.n_groups  # while there is one, the cards know its batch
        self.first_tokens = collections.deque()     # Flights that end prompts
        self.turns = itertools.cycle(range(pipeline.n_groups))
        self.totals = dict.fromkeys(("requests", "cache_hits", "prompt_tokens", "cached_tokens", "generated_tokens"), 0)
        self.changed = threading.Condition()        # guards waiting, guests, draining, closing and error
        self.draining = self.closing = False        # no more requests are taken; no more steps are made
        self.error: str | None = None               # the sentence on what the engine failed with
        self.fault: Fault | None = None
        self.stepping = threading.Lock()            # held while the pipeline is in use
        self.guests = 0                             # threads that want it; the scheduler lets them go first
        self.thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        pipeline.on_fault = self._wake

    def submit(self, generation: Generation):
        """Queue a generation. Raises EngineStopped."""
        with self.changed:
            if self.draining or self.closing:
                raise EngineStopped(self.error or "the engine was closed")
            self.waiting.append(generation)
            self.changed.notify_all()

    def close(self, grace: float = 0.0):
        """Take no more requests, give those there are `grace` seconds, and end what is left of them, and the thread."""
        with self.changed:
            self.draining = True
            self.changed.wait_for(lambda: self.closing or not (self.waiting or self.running), grace)
            self.closing = True
            self.changed.notify_all()
        self.thread.join()

    def stats(self) -> dict:
        """Counts, as `Engine.stats` has them."""
        cache = self.cache
        return self.totals | {
            "requests_running": len(self.running), "requests_waiting": len(self.waiting), "slots": self.n_slots,
            "kv_pages": cache.n_pages, "kv_pages_free": len(cache.free_pages), "kv_pages_cached": cache.n_idle,
            "kv_pages_used": cache.n_pages - cache.n_available,
            "checkpoints": len(cache.on_card) + len(cache.in_host),
            "checkpoints_on_card": cache.n_checkpoints - len(cache.free_numbers),
            "checkpoints_spilled": cache.n_spilled, "checkpoints_fetched": cache.n_fetched,
            "checkpoints_dropped": cache.n_dropped}

    @contextlib.contextmanager
    def between_steps(self):
        """The pipeline and the cache to oneself. Raises EngineStopped after a failure or the end."""
        with self._as_guest(), self.stepping:
            if self.closing or self.error is not None:
                raise EngineStopped(self.error or "the engine was closed")
            yield

    @contextlib.contextmanager
    def borrow_slot(self, n_tokens: int):
        """A free slot with pages for so many tokens, and the pipeline to oneself, for work outside the queue.

        Raises RequestError where every slot is taken, or too many pages, and EngineStopped after a failure or the end.
        """
        with self.between_steps():
            if not self.free_slots:
                raise RequestError("slots", "every slot is taken by a running request")
            if pages_for(n_tokens) > self._unpromised_pages():
                raise RequestError("slots", f"running requests leave too few KV pages for {n_tokens} tokens")
            sequence = Sequence(Generation(Request([]), self.tokenizer), self.free_slots.pop(), pages_for(n_tokens),
                                self.cache.root)
            try:
                self._reserve(sequence, n_tokens)
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
        except BaseException as error:      # a panic of a library in Rust is no Exception
            self.fault = self.pipeline.fault or Fault.of(error)
            if isinstance(error, (CardError, CompileError)):    # every request hears of it, also later ones
                self.error = f"the engine has stopped: {self.fault.what}"
            else:
                logging.getLogger("qengine").error("the engine has stopped", exc_info=error)
                self.error = "the engine has stopped after an internal error"
        with contextlib.suppress(Exception):            # what is queued uses memory that may go now
            self.pipeline.settle()
        with self.changed:
            self.closing = True
            for generation in [s.generation for s in self.running] + list(self.waiting):
                generation.close(self.error and EngineStopped(self.error))
            self.running.clear()
            self.waiting.clear()
            self.changed.notify_all()

    def _wait_for_work(self) -> bool:
        """Whether there is some; raises what the pipeline failed with, also while nobody waits for it."""
        with self.changed:
            if self.draining and not (self.waiting or self.running):
                self.changed.notify_all()
            self.changed.wait_for(lambda: self.closing or self.pipeline.error
                                  or ((self.waiting or self.running) and not self.guests))
            if self.pipeline.error and not self.closing:
                raise self.pipeline.error
            return not self.closing

    def _wake(self):
        with self.changed:
            self.changed.notify_all()

    def step(self):
        """Admit what fits; run a chunk of the oldest unfinished prompt, then a decode step of a group of answers, or of
        all where there is no prompt."""
        self._drop_ended()
        self._admit()
        prompt = self._prompt()
        if prompt is not None:
            self._prefill(prompt)
        self._land_first_tokens(len(self.flights) - 1 if self._prompt() else 0)
        self._form_groups()
        for group in range(len(self.flights)) if prompt is None else [next(self.turns)]:
            self.decode(group)

    def _prompt(self) -> Sequence | None:
        """The oldest that is unfinished."""
        return next((s for s in self.running if s.in_prompt), None)

    def _drop_ended(self):
        """End what was cancelled, and what has taken longer than it may."""
        for sequence in [s for s in self.running if s.generation.is_over()]:
            self._finish(sequence, sequence.generation.overdue())
        with self.changed:
            for generation in [g for g in self.waiting if g.is_over()]:
                self.waiting.remove(generation)
                generation.close(generation.overdue())

    def _admit(self):
        """Give slots to the oldest that wait, as far as there are slots and pages for them."""
        while self.free_slots:
            with self.changed:
                if not self.waiting:
                    return
                n_pages = self._pages_wanted(self.waiting[0].request)
                if n_pages > self._unpromised_pages():
                    return
                self.running.append(Sequence(self.waiting.popleft(), self.free_slots.pop(), n_pages, self.cache.root))
            self.totals["requests"] += 1

    def _pages_wanted(self, request: Request) -> int:
        """Pages of prompt and answer, if that becomes as long as it may."""
        longest = self.n_ctx if request.max_tokens is None else len(request.prompt_ids) + request.max_tokens
        return pages_for(min(longest, self.n_ctx))

    def _unpromised_pages(self) -> int:
        return self.cache.n_available - sum(s.n_pages - len(s.pages) for s in self.running)

    def _prefill(self, sequence: Sequence):
        """The next chunk of a prompt. Chunks start at multiples of 64, so no result depends on their size."""
        if not sequence.has_begun:
            self._begin(sequence)
        limit = min(self.chunk, RUNNING_CHUNK) if any(s.is_answer for s in self.running) else self.chunk
        start = sequence.n_cached
        sequence.n_pass = self.pipeline.pass_rows(start, sequence.generation.n_prompt, limit, sequence.n_pass)
        end = start + sequence.n_pass
        self._reserve(sequence, end)
        marks = [at for at in sequence.marks if start < at <= end]
        numbers = [number for _ in marks if (number := self.cache.take_number()) is not None]
        marks = list(zip(marks[len(marks) - len(numbers):], numbers))
        self.pipeline.prefill(sequence.tokens[start:end], sequence.slot, start, [(at - start, n) for at, n in marks])
        sequence.n_cached = end
        nodes = self._join(sequence, end)
        for at, number in marks:
            self.cache.keep(nodes[at], number)
        if sequence.in_prompt:
            return
        self._constrain([sequence])
        if sequence in self.running:
            tokens = self.pipeline.sample_row(end - start - 1, sequence.slot, wants_log_probs([sequence]))
            self.first_tokens.append(Flight([sequence], tokens))

    def _begin(self, sequence: Sequence):
        """Make the slot ready, with what the caches know of the prompt; its last token is always processed."""
        generation, tokens = sequence.generation, sequence.tokens
        sequence.node, known = self.cache.find(tokens[:-1])
        sequence.pages = self.cache.enter(sequence.node)
        number = self.cache.fetch(sequence.node)
        self.pipeline.start(sequence.slot, generation.request, number)
        self.pipeline.set_pages(sequence.slot, sequence.pages)
        sequence.n_cached = generation.n_cached = sequence.node.depth * PAGE_TOKENS
        sequence.marks = checkpoint_positions(tokens, self.tokenizer.control.get(TURN), sequence.n_cached, known)
        sequence.has_begun = True
        self.totals["cache_hits"] += generation.n_cached > 0
        self.totals["cached_tokens"] += generation.n_cached
        self.totals["prompt_tokens"] += generation.n_prompt

    def _join(self, sequence: Sequence, n_seen: int) -> dict[int, Node]:
        """The full pages of the first n_seen tokens, whose passes are queued, join the tree. Returns {position: node
        that ends there} of those that had not joined yet."""
        joined, pages = {}, list(sequence.pages)
        for end in range((sequence.node.depth + 1) * PAGE_TOKENS, n_seen + 1, PAGE_TOKENS):
            start, depth = end - PAGE_TOKENS, sequence.node.depth
            n_prompt = min(max(sequence.generation.n_prompt - start, 0), PAGE_TOKENS)
            sequence.node = joined[end] = self.cache.grow(
                sequence.node, tuple(sequence.tokens[start:end]), n_prompt, pages[depth])
            pages[depth] = sequence.node.page
        if pages != sequence.pages:
            sequence.pages = pages
            self.pipeline.set_pages(sequence.slot, pages)
        return joined

    def _keep_decoded(self, sequence: Sequence, n_seen: int):
        """Where what was queued last has filled a page of a sequence, keep that and the states after it. An answer
        has one such checkpoint, the latest, and those at multiples of CHECKPOINT_INTERVAL. Answers with the same tokens
        share them, and the last that goes on drops it: where one of them ended, its next turn begins."""
        if n_seen % PAGE_TOKENS:
            return
        node = self._join(sequence, n_seen)[n_seen]
        last, sequence.decoded = sequence.decoded, None
        if last is not None:
            last.n_answers -= 1
            if not last.n_answers and last.depth * PAGE_TOKENS % CHECKPOINT_INTERVAL:
                self.cache.drop(last)
        if node.is_kept:
            self.cache.touch(node)
        elif (number := self.cache.take_number()) is not None:
            self.pipeline.save(sequence.slot, number)
            self.cache.keep(node, number)
        if node.is_kept:
            node.n_answers += 1
            sequence.decoded = node

    def _land_first_tokens(self, n_left: int):
        """Take the tokens that follow prompts, but for the last n_left: the cards are still at those."""
        while len(self.first_tokens) > n_left:
            flight = self.first_tokens.popleft()
            sequence, = flight.sequences
            token, = flight.tokens.read().tolist()
            if sequence in self.running:
                self._take(sequence, flight.tokens, 0, token)

    def _form_groups(self):
        """Put new answers into the smallest group, and one of a group's answers into another where that evens them."""
        members = {group: [s for s in self.running if s.group == group] for group in range(len(self.flights))}

        def size(group):
            return len(members[group])

        for sequence in self.running:
            if sequence.is_answer and sequence.group is None:
                sequence.group = min(members, key=size)
                members[sequence.group].append(sequence)
        smallest, largest = min(members, key=size), max(members, key=size)
        if size(largest) - size(smallest) > 1:
            self._land(largest)
            members[largest][-1].group = smallest

    def decode(self, group: int):
        """Queue a step of a group of answers, and then take the tokens of the one before."""
        self._append_certain(group)
        if self.flights[group] and self.flights[group].sequences != self.answering(group):
            self._land(group)                       # who stays needs its token to be placed anew
        batch = self.answering(group)
        if not batch:
            return
        if self.flights[group] is None:
            self.pipeline.place([s.tokens[-1] for s in batch], [s.slot for s in batch], [s.n_cached for s in batch],
                                group)
        for sequence in batch:
            self._reserve(sequence, sequence.n_cached + sequence.in_flight + 1)
        if any(s.generation.constraint for s in batch):
            self.pipeline.forward(len(batch), group)
            self._land(group)                       # the masks follow from its tokens
            self._constrain(batch)
            tokens = self.pipeline.choose(len(batch), wants_log_probs(batch), group)
        else:
            tokens = self.pipeline.step(len(batch), wants_log_probs(batch), group)
            self._land(group)
        for sequence in batch:
            sequence.in_flight = 1
            if sequence in self.running:
                self._keep_decoded(sequence, sequence.n_cached + 1)
        self.flights[group] = Flight(batch, tokens)

    def _append_certain(self, group: int):
        """One answer alone in its group has the tokens that its grammar leaves no choice of appended, several by one
        decode pass, which gives them the same bits as a step each. Among others it would make those wait, and save
        nothing: a step reads the weights once for all of them."""
        batch = self.answering(group)
        if len(batch) != 1 or batch[0].n_certain(self.n_ctx) < LEAST_CERTAIN:
            return
        self._land(group)
        sequence, = batch
        if sequence not in self.running or not (n := sequence.n_certain(self.n_ctx)):
            return
        certain, start = list(sequence.generation.constraint.forced)[:n], sequence.n_cached
        self._reserve(sequence, start + n)
        self.pipeline.append([sequence.tokens[-1], *certain[:-1]], sequence.slot, start,
                             sequence.generation.n_generated + n)
        sequence.n_cached += n
        for token in certain[:-1]:
            if sequence in self.running:
                self._take(sequence, None, 0, token)
        if sequence in self.running:
            self._keep_decoded(sequence, sequence.n_cached)     # before the last one, which may end the answer
            self._take(sequence, None, 0, certain[-1])

    def answering(self, group: int) -> list[Sequence]:
        """Who takes part in the group's next step: all but those that the step in flight brings to their end."""
        return [s for s in self.running if s.group == group and not (s.in_flight and s.is_full(1, self.n_ctx))]

    def _land(self, group: int):
        """Take the tokens of the group's step in flight, but for sequences that have ended meanwhile."""
        flight, self.flights[group] = self.flights[group], None
        if flight is None:
            return
        for row, (sequence, token) in enumerate(zip(flight.sequences, flight.tokens.read().tolist())):
            if sequence in self.running:
                sequence.n_cached += 1
                sequence.in_flight = 0
                self._take(sequence, flight.tokens, row, token)

    def _reserve(self, sequence: Sequence, n_tokens: int):
        """Pages for the first n_tokens of a sequence, of those that it can rely on."""
        missing = pages_for(n_tokens) - len(sequence.pages)
        if missing > 0:
            sequence.pages += self.cache.take_pages(missing)
            self.pipeline.set_pages(sequence.slot, sequence.pages)

    def _constrain(self, sequences: list[Sequence]):
        """Tell the cards what the next tokens may be; a sequence whose grammar cannot say so has ended."""
        constrained = [s for s in sequences if s in self.running and s.generation.constraint
                       and s.generation.constraint.after is None]
        if constrained:
            self.pipeline.constrain({s.slot: s.generation.constraint for s in constrained})
        for sequence in constrained:
            if error := sequence.generation.constraint.error:
                self._finish(sequence, error)

    def _take(self, sequence: Sequence, tokens: Tokens, row: int, token: int):
        """Hand a new token of a sequence, of row `row`, to its reader; after the last one the slot is free."""
        generation, request = sequence.generation, sequence.generation.request
        if token < 0:
            raise CardError(NAN_LOGITS)
        if constraint := generation.constraint:
            constraint.take(token)
            if error := constraint.error:
                self._finish(sequence, error)
                return
        finish_reason = None
        if constraint and constraint.ended or token in self.tokenizer.eos_ids and not request.ignore_eos:
            finish_reason = "stop"
        elif sequence.is_full(1, self.n_ctx):
            finish_reason = "length"
        sequence.tokens.append(token)
        self.totals["generated_tokens"] += 1
        log_probs = () if request.top_logprobs is None else tokens.log_probs(row, request.top_logprobs)
        if generation.push(token, finish_reason, *log_probs):
            self._finish(sequence)

    def _finish(self, sequence: Sequence, error: Exception | None = None):
        self.running.remove(sequence)
        self._release(sequence)
        sequence.generation.close(error)

    def _release(self, sequence: Sequence):
        self.cache.leave(sequence.node, sequence.pages)
        self.free_slots.append(sequence.slot)


class Engine:
    """A loaded model, for notebooks, the command line and the server.

        engine = qengine.load()             # the small model that comes with qengine, or name a file
        print(engine.generate("Once upon a time", max_tokens=32))
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, template: ChatTemplate | None, pipeline: Pipeline,
                 sizes: CacheSizes, n_ctx: int, chunk: int, spare: list[Card]):
        self.name, self.config, self.tokenizer, self.template = config.name, config, tokenizer, template
        self.pipeline, self.n_ctx, self.chunk = pipeline, n_ctx, chunk
        self.cards, self.spare = [stage.card for stage in pipeline.stages], spare     # spare: opened, not used
        self.layers = [stage.layers for stage in pipeline.stages]      # of each card
        cache = PrefixCache(pipeline, sizes.n_pages, sizes.n_checkpoints, sizes.n_host_checkpoints)
        self.scheduler = Scheduler(pipeline, cache, tokenizer, sizes.n_slots, n_ctx, chunk)
        self.scheduler.thread.start()

    @property
    def error(self) -> str | None:
        """What the engine failed with, a sentence; None while it works."""
        return self.scheduler.error

    @property
    def fault(self) -> Fault | None:
        """The same, with the card if it was one, and since when."""
        return self.scheduler.fault

    def submit(self, request: Request) -> Generation:
        """Start a request. Raises RequestError or EngineStopped."""
        request.check(self.config.n_vocab, self.n_ctx)
        constraint = None
        if request.grammar is not None:
            constraint = Constraint(self.vocabulary, request.grammar, request.grammar_after)
            if constraint.error:
                raise constraint.error
        generation = Generation(request, self.tokenizer, constraint)
        self.scheduler.submit(generation)
        return generation

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer as grammars need it, made for the first of them: the largest take a second."""
        return Vocabulary(self.tokenizer)

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
        with self.scheduler.borrow_slot(len(ids)) as sequence:
            self.pipeline.start(sequence.slot, sequence.generation.request)
            for start in range(0, len(ids), self.chunk):
                chunk = ids[start:start + self.chunk]
                self.pipeline.prefill(chunk, sequence.slot, start, tap=tap)
                for row in range(0, len(chunk), HEAD_ROWS):
                    yield self.pipeline.logits(row, min(HEAD_ROWS, len(chunk) - row))

    def stats(self) -> dict:
        """Counts of this moment: requests_running, requests_waiting, slots; kv_pages = _used (by running requests) +
        _cached + _free; checkpoints (kept), checkpoints_on_card. And since the start: requests, prompt_tokens, of those
        cached_tokens (not processed), cache_hits (requests with such), generated_tokens, checkpoints_spilled (to host
        memory), _fetched (back from it), _dropped (for want of room)."""
        return self.scheduler.stats()

    def clear_cache(self):
        """Forget all prompts and answers but those that run. Raises EngineStopped."""
        with self.scheduler.between_steps():
            self.scheduler.cache.clear()

    def use(self, gemv=None, gemm=None):
        """Put functions of yours in the place of the products of Q8_0 matrices; without any, the engine's own again.

        They are called as `gemv_q8_q8` (kernels/q8_gemv.py, generated tokens) and `gemm_q8_q8` (kernels/q8_gemm.py,
        prompts) are; the latter also for parts of a prompt that run side by side, in streams of their own. Before
        anything changes, each is compared with the reference at every shape of the model, of a large matrix at its
        first rows; ValueError says where it is wrong. Answers that run go on with them.
        """
        with self.scheduler.between_steps():
            self.pipeline.use(gemv, gemm)
            self.pipeline.load_kernels(progress=False)
            self.scheduler.cache.clear()            # what is kept comes from other kernels

    def close(self, grace: float = 0.0):
        """End what runs, after so many seconds if that has not ended by then; new requests are refused."""
        self.scheduler.close(grace)
        self.pipeline.close()


@dataclass(frozen=True)
class OpenModel:
    """A model whose description is read and checked, and whose weights are still where they were."""

    config: Config
    tokenizer: Tokenizer
    template: ChatTemplate | None
    weights: FileWeights | SyntheticWeights

    def n_ctx(self, ctx: int | None) -> int:
        """Tokens of a slot: `ctx` where given, else DEFAULT_CTX, or the model's own where that is less."""
        return min(self.config.context_length, DEFAULT_CTX) if ctx is None else ctx


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


def load(model: str | Path | OpenModel = DEFAULT_MODEL, card: str | Card | list[Card] | None = None,
         ctx: int | None = None, slots: int = 1, chunk: int | None = None, progress: bool = True,
         kv_tokens: int | None = None, checkpoint_memory: int | None = None,
         checkpoint_host_memory: int | None = None, split: tuple[int, ...] | None = None) -> Engine:
    """Load a GGUF file, or random weights by the name "synthetic:0.8b", "synthetic:9b:q4_k", ..., ready to generate.

    model: its path or name, or what `open_model` made of that; by default the model that comes with qengine.
    card: a Card or several, or the name of some as kernels.open.open_cards takes it, which share the layers; by default
    the first NVIDIA card if the model fits there, or else all, and where there is none an emulated one. split: layers
    on each card, (22, 21, 21); by default what `place_layers` finds.
    ctx: tokens of a slot, prompt and answer together. slots: answers that are generated at the same time.
    chunk: tokens of a prompt per pass at most, a multiple of 64 to 4,096; by default what suits card and model.
    progress: show on stderr what is used and how far it is.
    kv_tokens: tokens whose keys and values fit, of all slots and of what is kept for later prompts; at least ctx.
    checkpoint_memory, checkpoint_host_memory: bytes for the states from which later prompts go on, on the card and in
    the host's memory. `choose_sizes` has the defaults of the three.
    Raises ModelError, RequestError, CardError (OutOfMemory shows what did not fit, and what would).
    """
    opened = model if isinstance(model, OpenModel) else open_model(model)
    demand = Demand(opened.n_ctx(ctx), slots, chunk, kv_tokens, checkpoint_memory, checkpoint_host_memory, split)
    planner = make_planner(opened, card, demand)
    planner.check()
    config, cards, n_ctx = opened.config, planner.cards, demand.n_ctx
    free = sum(card.free_bytes for card in cards)
    for card in cards:
        card.replace(probe.saved_replacements(card))
    if progress:
        for card, layers in zip(cards, planner.plan.layers):
            note(f"card: {card.describe()}" + f", layers {layers.start} - {layers.stop - 1}" * (len(cards) > 1))
        if n_ctx > config.context_length:
            note(f"warning: the model was made for {config.context_length} tokens of context, not {n_ctx}; "
                 "what comes after those may make no sense")
    stages = load_stages(opened, planner, progress)
    sizes = choose_sizes(stages, slots, n_ctx, kv_tokens, checkpoint_memory, checkpoint_host_memory)
    try:
        pipeline = Pipeline(stages, sizes)
        pipeline.load_kernels(progress)
    except BaseException as error:
        stop_all([stage.worker for stage in stages], error)
        raise
    if progress:
        taken, where = free - sum(card.free_bytes for card in cards), f"the card{'s' * (len(cards) > 1)}"
        note(f"model: {config.name}, {config.n_parameters / 1e6:,.1f} million parameters; "
             f"{show_bytes(taken)} on {where}, {slots} x {n_ctx} tokens of context included")
        note(f"cache: {sizes.n_pages * PAGE_TOKENS:,} tokens of context in all, {sizes.n_checkpoints} checkpoints of "
             f"{show_bytes(sum(stage.state_bytes for stage in stages))} on {where}, "
             f"up to {sizes.n_host_checkpoints} in host memory")
    return Engine(config, opened.tokenizer, opened.template, pipeline, sizes, n_ctx, planner.plan.chunk,
                  planner.spare)


def load_stages(opened: OpenModel, planner: Planner, progress: bool) -> list[Stage]:
    """The stages as planned, their weights on the cards, which are filled at the same time. Where one fails the others
    stop at their next layer."""
    plan, demand, failures = planner.plan, planner.demand, []
    workers = [Worker(card) for card in planner.cards]

    def load_stage(worker, layers):
        return Stage(worker.card, opened.config, opened.weights, layers, demand.slots, demand.n_ctx,
                     plan.chunk, functools.partial(counted, worker), worker)

    def counted(worker, layers):
        for index in layers:
            if failures:
                raise failures[0]
            yield index
            worker.n_done += 1
            bar.update()

    def fail(worker, error):
        failures.append(error)
        worker.stop(error)

    for worker in workers:
        worker.on_fault = fail
    with tqdm.tqdm(desc="loading layers", total=opened.config.n_layers, unit="layer", leave=False,
                   disable=not progress) as bar:
        loading = [worker.post(load_stage, worker, layers) for worker, layers in zip(workers, plan.layers)]
        try:
            return [task.result() for task in loading]
        except BaseException as error:
            failures.append(error)              # Ctrl-C
            for task in loading:                # its memory goes with it
                with contextlib.suppress(CardError):
                    task.wait()
            stop_all(workers, failures[0])
            raise failures[0] from None


def make_planner(opened: OpenModel, card: str | Card | list[Card] | None, demand: Demand) -> Planner:
    """Who plans a model on the cards that `load` would take. Raises RequestError, CardError."""
    cards = [card] if isinstance(card, Card) else card if isinstance(card, list) else open_cards(card)
    if card is None and demand.split:
        n = len(demand.split)
        return Planner(opened.config, opened.weights, cards[:n], demand, cards[n:])
    if card is None and len(cards) > 1:
        first = Planner(opened.config, opened.weights, cards[:1], demand, cards[1:])
        if first.plan.fits:
            return first
    return Planner(opened.config, opened.weights, cards, demand)


def note(text: str):
    """A line for the person at the terminal; stdout is for answers."""
    print(text, file=sys.stderr, flush=True)


# ======================================================================================================
# 9  Server
# ======================================================================================================
# Open requests, their clients, errors, and the sockets under them. What clients say and hear is in api/, which makes a
# Request of it; the engine does all the work.

MAX_WAITING = 64            # requests beyond those that have a slot; one more is answered 429
MAX_BODY = 4 << 20          # bytes of one request: the longest context, as token ids or as escaped text
POLL_SECONDS = 0.05         # between two looks for clients that hung up
READ_SECONDS = 60           # a client that takes nothing of what is there for it in so long is hung up on


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
        self.n_entering = 0                         # places taken by what is not in it, or not yet
        self.closing = False
        self.is_loading = False                     # another engine, in the place of one that has failed
        self.lost = []                              # the Faults of cards that it goes on without, see `go_on`
        self.pipes = PipeMeter()
        self.log = self.metrics = None              # of api/, set by create_app
        threading.Thread(target=self.watch, name="client watcher", daemon=True).start()

    def ready(self):
        """The engine, or the answer 503."""
        if self.engine is None or self.is_loading:
            raise ServiceUnavailable("the model is still loading", retry_after=5)
        if self.engine.error is not None:
            raise EngineStopped(self.engine.error)
        return self.engine

    def respond(self, n: int, prepare, stream: bool):
        """Submits n requests and returns the HTTP response to them.

        prepare: makes (requests, answer), which may take long; they have their places by then. answer: what a
        protocol makes of their generations: whole(generations) gives a JSON object, events(generations) the
        server-sent events of a stream, which tells of its errors itself.
        """
        generations, answer = self.submit(n, prepare)
        if stream:
            response = flask.Response(answer.events(generations), mimetype="text/event-stream", headers={
                "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})    # nginx passes it on as it comes
            # not a `finally` in events(): a generator that was never started does not run it
            response.call_on_close(lambda: self.release(generations))
            return response
        try:
            return flask.jsonify(answer.whole(generations))
        finally:
            self.release(generations)

    def text_of(self, ids) -> str:
        """The text of token ids, special ones included."""
        return self.engine.tokenizer.decode(ids, special=True)

    # ---- open requests ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def places(self, n: int):
        """Of the places of open requests n for the `with` body, which prepares such or does what takes long for others.
        TooManyRequests: so many are not left; ServiceUnavailable: the server ends."""
        with self.changed:
            if self.closing:
                raise ServiceUnavailable("the server is shutting down", retry_after=5)
            n_open = len(self.open) + self.n_entering
            if n_open + n > self.max_requests:
                raise TooManyRequests(f"too many requests: {n_open} of {self.max_requests} are open already",
                                      retry_after=1)
            self.n_entering += n
        try:
            yield
        finally:
            with self.changed:
                self.n_entering -= n
                self.changed.notify_all()

    def submit(self, n: int, prepare) -> tuple:
        """Hands n requests to the engine, all or none; their generations are open from now on, their client
        watched. prepare: see `respond`. Returns (generations, answer)."""
        gone = flask.request.environ.get("waitress.client_disconnected", lambda: False)
        generations = []
        try:
            with self.places(n):
                requests, answer = prepare()        # takes long with a grammar, here and in the engine
                for request in requests:
                    generations.append(self.ready().submit(request))
        except BaseException as error:
            self.release(generations)
            if isinstance(error, Exception):
                raise
            raise RuntimeError(f"a library failed: {error!r}") from error   # a panic in Rust, which ends no handler
        with self.changed:
            self.open |= {id(generation): (generation, gone) for generation in generations}
            if self.closing:
                self.release(generations)
            self.changed.notify_all()
        flask.g.exchange.generations += generations     # for the log
        return generations, answer

    def release(self, generations):
        """Ends generations, finished or not."""
        with self.changed:
            for generation in generations:
                generation.cancel()
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
            return self.changed.wait_for(lambda: not (self.open or self.n_entering), timeout)


class Failure(NamedTuple):
    """An error as HTTP knows it; each protocol has a shape of its own for it."""

    status: int
    message: str
    field: str | None = None                # of the request, where one is at fault
    headers: dict = {}


def explain(error: Exception) -> Failure:
    """What a client hears of an error; the unforeseen is logged, and its text kept."""
    for kind, told_as in (EngineStopped, ServiceUnavailable), (DeadlineExceeded, GatewayTimeout):
        if isinstance(error, kind):
            error = told_as(str(error))
    if isinstance(error, RequestError):
        return Failure(400, str(error), error.field)
    if isinstance(error, HTTPException):
        message = error.description
        if error.code in (404, 405):
            message = f"{flask.request.method} {flask.request.path[:80]} is not served; /openapi.json says what is"
        if error.code == 413:
            message = f"the request body is larger than {MAX_BODY} bytes"
        return Failure(error.code, message, None, {
            name: value for name, value in error.get_headers() if name in ("Allow", "Retry-After", "WWW-Authenticate")})
    logging.getLogger("qengine").error("a request failed", exc_info=error)
    return Failure(500, "internal error")


def create_app(engine=None, sampling=None, thinking=None, max_requests=MAX_WAITING, keys=(), origins=(),
               host="127.0.0.1", log_prompts=False) -> flask.Flask:
    """The Flask app over `engine`; app.extensions["qengine"] is its Service.

    Without an engine it answers 503 until the service is given one: it may listen before the model is there.
    keys: API keys, of which one is wanted where there are any. origins: of web pages that may ask, "*" for all.
    host: the address that the server is going to listen on.
    log_prompts: put the text of prompts into the log of requests.
    """
    from api import anthropic, log, metrics, openai, openapi  # here, because they import this file
    from api.access import Access

    defaults = {"temperature": 1.0} | (sampling or {})      # what both protocols say; Request's own is greedy
    service = Service(engine, defaults, thinking, max_requests)
    app = flask.Flask("qengine", static_folder=None)
    app.extensions["qengine"] = service
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY
    app.json.sort_keys = False

    service.metrics = metrics.Metrics(service)
    service.log = log.RequestLog([service.metrics.observe], service.text_of if log_prompts else None)
    service.log.install(app)
    Access(keys, origins, host).install(app)
    for endpoint in openapi.ENDPOINTS:
        app.add_url_rule(endpoint.path, f"{endpoint.method} {endpoint.path}",
                         functools.partial(endpoint.answer, service), methods=[endpoint.method])

    @app.errorhandler(Exception)
    def failed(error):
        failure = explain(error)
        protocol = anthropic if flask.request.path.startswith("/v1/messages") else openai
        return protocol.error_body(failure), failure.status, failure.headers

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
        from api import openai

        error = self.request.error
        refusal = HTTPException(f"{error.reason}: {error.body}")
        refusal.code = error.code
        body = json.dumps(openai.error_body(explain(refusal))).encode()
        self.status, self.content_length = f"{error.code} {error.reason}", len(body)
        self.response_headers.append(("Content-Type", "application/json"))
        self.set_close_on_finish()
        self.write(body)


class Connection(waitress.channel.HTTPChannel):
    """A client's connection."""

    error_task_class = HTTPError

    def writable(self):
        """Whether to poll for room to write; asked at each poll, once a second or more often."""
        if self.total_outbufs_len and self.is_stuck():
            self.hang_up()      # else its answer would hold a thread, and an open request its place, for ever
        return super().writable()

    def is_stuck(self) -> bool:
        """Whether there is something to send, and nothing could be sent for too long."""
        with self.outbuf_lock:      # nobody is about to send what he has just put there
            return self.total_outbufs_len > 0 and time.time() - self.last_activity > READ_SECONDS

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
# What fits in a cache is read faster than memory: a small model's decode may go beyond 100 per cent. Operations are
# timed by themselves: those of a prompt's lanes, which run side by side, add up to more than the prompt takes.

PROMPT_LENGTHS, CONTEXTS, REPEATS = (297, 1160, 4620, 18400), (297, 4620, 18400), 3
EMULATED_LENGTH = 297       # prompt and context on the emulated card, once
DECODE_STEPS = 32           # of one timed run
PIPES_SECONDS = 1           # at least, from one counted step of a server to the next


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
    """Times an engine that does nothing else; `batch` of its slots decode together. Close it afterwards.

    reports: of its cards, whose speeds add up to what percentages are of.
    """

    def __init__(self, engine: Engine, reports: list[probe.Report], repeats: int, batch: int):
        self.engine, self.reports, self.repeats, self.batch = engine, reports, repeats, batch
        self.pipeline, self.stages = engine.pipeline, engine.pipeline.stages
        self.random = np.random.default_rng(1)
        n_groups = min(self.pipeline.n_groups, batch)
        self.groups = [range(group, batch, n_groups) for group in range(n_groups)]     # their slots
        pages = pages_for(engine.n_ctx)
        for slot in range(batch):
            self.pipeline.set_pages(slot, list(range(slot * pages, (slot + 1) * pages)))

    # ---- what is timed ----

    def chunks(self, n: int):
        """(start, token ids) of the passes of a random prompt of n tokens."""
        ids = self.random.integers(0, self.engine.config.n_vocab, n).tolist()
        return [(start, ids[start:start + rows]) for start, rows in passes_over(
            n, lambda start, last: self.pipeline.pass_rows(start, n, self.engine.chunk, last))]

    def prompt(self, n: int, slot: int = 0) -> float:
        """Seconds of a prompt of n tokens with its first answer token."""
        chunks = self.chunks(n)
        self.pipeline.start(slot, Request([0]))
        started = time.perf_counter()
        for start, ids in chunks:
            self.pipeline.prefill(ids, slot, start)
        self.pipeline.sample_row(len(chunks[-1][1]) - 1, slot).read()
        return time.perf_counter() - started

    def steps(self, context: int) -> float:
        """Seconds of DECODE_STEPS steps of the batch from a context on, its groups in turn."""
        self.place_step(context)
        before = [None] * len(self.groups)
        started = time.perf_counter()
        for _ in range(DECODE_STEPS):                   # one ahead, as the scheduler does
            for group, slots in enumerate(self.groups):
                tokens, before[group] = before[group], self.pipeline.step(len(slots), group=group)
                if tokens:
                    tokens.read()
        for tokens in before:
            tokens.read()
        return time.perf_counter() - started

    def prefill(self, n: int) -> Speed:
        """The Speed of a prompt of n tokens."""
        self.prompt(n)
        speeds = [n / self.prompt(n) for _ in range(self.repeats)]
        times = {}
        self.pipeline.settle()                          # from here on the cards are ours, not their workers'
        for start, ids in self.chunks(n):
            for stage in self.stages:
                operation_seconds(stage.card, self.chunk(stage, start, ids), times)
        peak = sum(report.dp4a_peak for report in self.reports)
        return self.speed(n, 1, speeds, self.prompt_operations(n) / n * np.median(speeds) / peak, times)

    def chunk(self, stage: Stage, start: int, ids: list[int]):
        """A function that queues the launches of a stage's pass over `ids`, whose inputs are on the card."""
        set_rows(stage.inputs, ids, [0] * len(ids), range(start, start + len(ids)))
        return functools.partial(stage.launch_lanes_in_turn, len(ids))

    def decode(self, context: int) -> Speed:
        """The Speed of the batch from a context on."""
        for slot in range(self.batch):
            self.prompt(context, slot)
        self.steps(context)
        speeds = [self.batch * DECODE_STEPS / self.steps(context) for _ in range(self.repeats)]
        self.place_step(context)
        self.pipeline.settle()
        times = {}
        for stage in self.stages:
            operation_seconds(stage.card, functools.partial(self.step, stage), times)
        bandwidth = sum(report.read_bandwidth for report in self.reports)
        share = self.step_bytes(context) / self.batch * np.median(speeds) / bandwidth
        return self.speed(context, self.batch, speeds, share, times)

    def speed(self, context, batch, speeds, share, times) -> Speed:
        operations = [Operation(name, n, seconds) for name, (n, seconds) in times.items()]
        operations.sort(key=lambda operation: -operation.seconds)
        return Speed(context, batch, float(np.median(speeds)), speeds, float(100 * share),
                     sum(operation.launches for operation in operations), operations)

    def place_step(self, context: int):
        """Tell the cards the inputs of a decode step."""
        for group, slots in enumerate(self.groups):
            self.pipeline.place([0] * len(slots), slots, [context] * len(slots), group)

    def step(self, stage: Stage):
        """Queue the launches of a stage's part of a decode step, which `Stage.step` replays from recordings."""
        for group, slots in enumerate(self.groups):
            stage.launch_step(group, len(slots), log_probs=False, turn=0)

    # ---- what it must move and compute ----

    def weights(self) -> list[Matrix]:
        """The matrices of the layers and the head: what every decode step reads whole."""
        layers = [layer for stage in self.stages for layer in stage.model.layers]
        return [matrix for layer in layers for matrix in matrices(layer)] + [self.pipeline.last.model.head]

    def prompt_operations(self, n: int) -> int:
        """Multiplications and additions of a prompt's matrix products, the head's of its last row alone."""
        *layers, head = self.weights()
        return 2 * (n * sum(matrix.n * matrix.k for matrix in layers) + head.n * head.k)

    def step_bytes(self, context: int) -> int:
        """Bytes of a decode step in the middle of DECODE_STEPS: weights once for each group, and of every slot the
        recurrent states, read and written, and the keys and values up to its position."""
        c, caches = self.engine.config, [stage.cache for stage in self.stages]
        weights = sum(m.values.nbytes + (m.scales.nbytes if m.is_quantized else 0) for m in self.weights())
        states = sum(2 * s.memory[0].nbytes + s.conv[0].nbytes for cache in caches for s in cache.recurrent.values())
        n_attention = sum(len(cache.pages) for cache in caches)
        kept = (context + DECODE_STEPS // 2) * n_attention * 2 * c.kv_dim * 2          # k and v, float16
        return len(self.groups) * weights + self.batch * (states + kept)

    # ---- estimates for cards that are not here ----

    def estimates(self, n: int, context: int) -> dict:
        """Tokens/s of other cards as estimated by one emulated card, which launches for each of them what that card
        would have: {"prefill": {name: ..}, "decode": ..}."""
        (stage,), chunks = self.stages, self.chunks(n)
        self.pipeline.start(0, Request([0]))
        self.place_step(context)
        self.pipeline.settle()

        def prefill():
            for start, ids in chunks:
                self.chunk(stage, start, ids)()

        work = {"prefill": (n, prefill), "decode": (self.batch, functools.partial(self.step, stage))}
        return {name: {card: count / seconds for card, seconds in self.estimated_seconds(stage.card, each).items()}
                for name, (count, each) in work.items()}

    def estimated_seconds(self, card: Card, work) -> dict:
        """Name -> seconds that what work() launches would take on each card of the table."""
        found = {}
        for model in CARDS:
            with launching_as(card, model), card.counting() as log:
                work()
            found[model.name] = sum(launch.estimate(model).seconds for launch in log)
        return found


@contextlib.contextmanager
def launching_as(card: Card, model: CardModel):
    """What is launched on an emulated card meanwhile is what the other would have: grids are made for its SMs, if for
    launches that do not overlap, of which estimates know nothing."""
    own, card.n_sms = card.n_sms, model.n_sms
    try:
        yield
    finally:
        card.n_sms = own


class PipeMeter:
    """Counts what decode steps of a running engine do on an emulated card, launched as MODEL would have them.

    A step takes a hundred times as long while it is counted: so that is done when somebody asks, at most once in
    PIPES_SECONDS. The code that counts is compiled before the first time; what runs need not wait for it.
    """

    MODEL = CARDS[0]

    def __init__(self):
        self.busy = threading.Lock()                # held by who counts; others get what was counted last
        self.last, self.at = None, -math.inf
        self.recordings = {}                        # of the steps as MODEL has them

    def can_count(self, engine) -> bool:
        return [card.kind for card in engine.cards] == ["emulated"]

    def count(self, engine) -> dict | None:
        """Of a decode step, the next one or one before: its tokens, launches, pipes (instructions of warps by pipe),
        megabytes (that memory must move), and on MODEL, by its name, estimated seconds; None until there was one."""
        if self.busy.acquire(blocking=False):
            try:
                if time.monotonic() - self.at > PIPES_SECONDS:
                    self.last = self._count(engine) or self.last
                    self.at = time.monotonic()
            finally:
                self.busy.release()
        return self.last

    def _count(self, engine) -> dict | None:
        stage, scheduler = engine.pipeline.last, engine.scheduler
        with scheduler.between_steps(), self._as_model(engine):
            n = len(scheduler.answering(0))
            what = [(stage.launch_layers, 0, n), (stage.launch_choice, 0, n, False, 0)] if n else []
            recordings = [stage.recording(*launch) for launch in what]
        for recording in recordings:
            stage.card.prepare_counting(recording)
        with scheduler.between_steps(), self._as_model(engine), stage.card.counting() as log:
            n = len(scheduler.answering(0))
            scheduler.decode(0)
            engine.pipeline.settle()
        return summary(log, n, self.MODEL) if n else None

    @contextlib.contextmanager
    def _as_model(self, engine: Engine):
        stage = engine.pipeline.last
        engine.pipeline.settle()
        own, stage.recordings = stage.recordings, self.recordings
        try:
            with launching_as(stage.card, self.MODEL):
                yield
        finally:
            stage.recordings = own


def summary(log: list, n_tokens: int, model: CardModel) -> dict:
    """What a counted step did, as PipeMeter tells it."""
    counts = sum((launch.counts for launch in log), Counts())
    pipes = {name.rstrip("_"): n for name in PIPES if name != "move" and (n := getattr(counts, name))}
    seconds = sum(launch.estimate(model).seconds for launch in log) if find_assembler() else None
    return {"tokens": n_tokens, "launches": len(log), "pipes": pipes, "card": model.name, "estimated_seconds": seconds,
            "megabytes": SECTOR * counts.distinct_sectors / 1e6}


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
  python qengine.py -m model.gguf --plan --card cuda                what it would take of all cards together
"""

TASKS = "prompt", "chat", "serve", "perplexity", "bench", "probe", "plan", "print_config"

# Options that mean nothing without one of others. Whoever says them expects something.
GOES_WITH = {"raw": ["prompt"], "slots": ["serve", "plan", "print_config"], "kv_tokens": ["serve", "plan"],
             **dict.fromkeys(["host", "api_key", "api_key_file", "cors", "log_prompts", "go_on"], ["serve"]),
             **dict.fromkeys(["checkpoint_memory", "checkpoint_host_memory"], ["serve", "chat", "plan"]),
             "trace": ["prompt", "chat", "serve", "perplexity", "bench"],
             "against": ["perplexity"], "json": ["bench", "probe"],
             **dict.fromkeys(["prompt_lengths", "contexts", "repeats", "batch", "cards"], ["bench"]),
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
              "                         --bench | --probe | --plan] [options]",
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
    what.add_argument("--plan", action="store_true",
                      help="show what the model would take of each card's memory, the longest context that fits, and "
                           "what passing from card to card costs; loads nothing")
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
    bench.add_argument("--cards", metavar="N,N", type=whole_numbers,
                       help="on so many of the cards, one after the other, and then side by side: 1,2 (default: on all "
                            "that --card names, or else those that it takes without)")
    bench.add_argument("--json", metavar="FILE", help="write everything there, too; also with --probe")

    server = parser.add_argument_group("with --serve")
    server.add_argument("--host", metavar="ADDRESS", default="127.0.0.1",
                        help="address to listen on (default: 127.0.0.1, this machine only)")
    server.add_argument("--slots", metavar="N", type=within(int, 1, 256), default=1,
                        help="answers generated at the same time (default: 1)")
    server.add_argument("--api-key", metavar="KEY", action="append", default=[],
                        help="answer only who sends this key, or another of several; other users of this machine can "
                             "read a command line")
    server.add_argument("--api-key-file", metavar="FILE", help="the same for each line of a file")
    server.add_argument("--cors", metavar="ORIGIN", action="append", default=[],
                        help="let web pages of this origin ask, https://chat.example say; * for all; several are "
                             "allowed; behind a proxy without keys this server's own page needs it, too")
    server.add_argument("--log-prompts", action="store_true", help="write the text of prompts into the log of requests")

    server.add_argument("--go-on", action="store_true",
                        help="when a card fails, load the model anew onto the others if it fits there, and serve on")

    machine = parser.add_argument_group("the machine")
    machine.add_argument("--trace", metavar="FILE",
                         help="write what cards and threads did when, for ui.perfetto.dev or chrome://tracing: "
                              "kernels, copies and waits; slower than without")
    machine.add_argument("--card", metavar="CARD",
                         help="cuda:0 for one, cuda:0,2 or cuda (all) for several that share the layers, or emulated, "
                              "emulated:3, emulated:3@0.25 (links of 0.25 GB/s), emulated:cmp-100-210,v100 (like cards "
                              "of these types) (default: the first NVIDIA card if the model fits there, or else all of "
                              "them; without any an emulated card)")
    machine.add_argument("--split", metavar="N,N", type=whole_numbers,
                         help="layers on each card (default: so that the slowest card is as fast as memory allows)")
    machine.add_argument("--ctx", metavar="N", type=within(int, 1, 2**31 - 1),
                         help="tokens a conversation may have, prompt and answer together "
                              f"(default: {DEFAULT_CTX}, or the model's own where that is less)")
    machine.add_argument("--kv-tokens", metavar="N", type=within(int, 1, 2**31 - 1),
                         help="tokens of all conversations together, running ones and those kept for their "
                              f"next turn (default: slots x ctx, and {KEPT_CONTEXTS} times as many where there "
                              "is memory)")
    for where, default in ("", "a quarter of what is free"), ("host-", "an eighth of the machine's"):
        machine.add_argument(f"--checkpoint-{where}memory", metavar="MB", type=within(int, 0, 2**31 - 1),
                             help=f"{'host' if where else 'card'} memory for the states that spare later prompts "
                                  f"what they have in common with earlier ones (default: {default})")
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
    if options.trace and len(options.cards or ()) > 1:
        parser.error("--trace holds one run: name one number of --cards")
    if options.split and set(options.cards or ()) - {len(options.split)}:
        parser.error("--split names the layers of each card: give --cards that number of cards alone")
    if options.split and (options.probe or options.print_config):
        parser.error("--split is for what loads a model, and for --plan")
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
    with contextlib.closing(load_engine(model, options)) as engine, traced(engine, options):
        _, interrupted = print_answer(engine, ids, sampling)
    return 130 if interrupted else 0


def run_chat(model: OpenModel, options, sampling: dict, thinking) -> int:
    """A conversation on the terminal, or with the lines of stdin; returns the exit code."""
    if model.template is None:
        raise ModelError("this model has no chat template: use -p TEXT --raw")
    with contextlib.closing(load_engine(model, options)) as engine, traced(engine, options):
        return chat(engine, sampling, thinking)


def chat(engine, sampling: dict, thinking) -> int:
    """The conversation itself; Ctrl-C ends what is being answered and nothing else."""
    sys.stdin.reconfigure(errors="surrogateescape")     # what is no text is refused below, in a sentence
    if sys.stdin.isatty():
        try:
            import readline  # noqa: F401  gives input() line editing; not on every system
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
    from api.access import read_keys
    from api.log import on_stderr

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    keys = read_keys(options.api_key, options.api_key_file)
    app = create_app(None, sampling, thinking, options.slots + MAX_WAITING, keys, options.cors, options.host,
                     options.log_prompts)
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_stderr(app.extensions["qengine"].log))
        try:
            port = stack.enter_context(serving(app, options.host, options.serve))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            note(f"qengine: cannot listen on {options.host} port {options.serve}: {reason}")
            return 2
        if not keys and not is_loopback(options.host):
            note(f"warning: whoever reaches {options.host} can use this server: --api-key asks for a key")
        service = app.extensions["qengine"]
        service.engine = load_engine(options.model, options)
        stack.enter_context(traced(service.engine, options))
        try:
            note(f"serving {service.engine.name} on http://{options.host}:{port}/ (a page to talk with it, and /v1 for "
                 "programs; Ctrl-C stops)")
            is_working = True
            while is_working:
                service.engine.scheduler.thread.join()  # ends by a failure only, of which /health goes on to tell
                note(f"qengine: {service.engine.error}")
                is_working = options.go_on and go_on(service, options)
            while True:
                time.sleep(3600)
        finally:
            stack.close()
            service.engine.close()


def go_on(service: Service, options) -> bool:
    """Gives the service, whose engine has failed, another one on the cards that are left of all that were opened, or of
    those that do not fail meanwhile. False: that cannot be."""
    failed, fault = service.engine, service.engine.fault
    left = failed.cards + failed.spare
    service.is_loading = True
    failed.close()
    for stage in failed.pipeline.stages:
        stage.release()
    try:
        while fault.card is not None:
            service.lost.append(fault)
            left = [card for card in left if card.name != fault.card]
            if not left:
                raise CardError("no card is left")
            gc.collect()                # of what tracebacks hold
            try:
                service.engine = load(options.model, left, **asked(options) | {"split": None})
            except CardError as error:
                if error.card is None:
                    raise
                note(f"qengine: {error}")
                fault = Fault.of(error)
            else:
                note(f"going on with {', '.join(card.name for card in service.engine.cards)}")
                return True
        raise CardError("no card is known to be at fault")
    except (CardError, CompileError, ModelError, RequestError) as error:
        note(f"qengine: cannot go on: {error}")
        return False
    finally:
        service.is_loading = False


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
        stack.enter_context(traced(engine, options))
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
    """Prints how fast a model is, perhaps on several numbers of cards; returns the exit code."""
    cards, counts = open_cards(options.card), options.cards or [None]
    if options.cards and max(counts) > len(cards):
        raise RequestError("cards", f"--cards {listed(counts)}: there are {len(cards)} to take them from")
    if options.json:
        write_json(options.json, {})    # now: what is measured should not be lost for a mistyped folder
    chosen = [cards[:n] if options.card or n else None for n in counts]
    runs = [bench_cards(model, each, cards[0].kind == "emulated", options) for each in chosen]
    if len(runs) > 1:
        print(f"\n{side_by_side(runs)}")
    if options.json:
        write_json(options.json, {"runs": runs} if len(runs) > 1 else runs[0])
    return 0


def bench_cards(model: OpenModel, cards: list[Card] | None, emulated: bool, options) -> dict:
    """Prints how fast a model is on these cards, or on those that `load` would take; returns that as JSON has it."""
    lengths = sorted(options.prompt_lengths or ([EMULATED_LENGTH] if emulated else PROMPT_LENGTHS))
    contexts = sorted(options.contexts or ([EMULATED_LENGTH] if emulated else CONTEXTS))
    repeats = options.repeats or (1 if emulated else REPEATS)
    n_ctx = max(*lengths, *contexts) + DECODE_STEPS + 1
    wishes = {"slots": options.batch, "kv_tokens": options.batch * pages_for(n_ctx) * PAGE_TOKENS,
              "checkpoint_memory": 0, "split": options.split}       # every slot has pages of its own
    cards = make_planner(model, cards, Demand(n_ctx, **wishes)).cards
    reports, free = [probe.saved_or_measured(card) for card in cards], sum(card.free_bytes for card in cards)
    with (contextlib.closing(load(model, card=cards, ctx=n_ctx, **wishes)) as engine, traced(engine, options)):
        bench = Bench(engine, reports, repeats, options.batch)
        peaks = ("dp4a measured", "read measured") if emulated else ("dp4a peak", "read bandwidth")
        prefill = [bench.prefill(n) for n in lengths]
        print(bench_table("prefill", prefill, peaks[0]), flush=True)
        decode = [bench.decode(n) for n in contexts]
        print(f"\n{bench_table('decode', decode, peaks[1])}")
        used = free - sum(card.free_bytes for card in cards)
        print(f"\n{engine.name} on {', '.join(card.describe() for card in cards)}; peak memory {show_bytes(used)}")
        estimates = None
        if emulated and len(cards) == 1 and find_assembler():
            estimates = bench.estimates(lengths[0], contexts[0])
            print(f"\n{estimate_table(estimates)}")
    layers = [[stage.layers.start, stage.layers.stop - 1] for stage in engine.pipeline.stages]
    return {"model": engine.name, "date": probe.now(), "cards": [card.facts() for card in cards], "layers": layers,
            "versions": probe.versions(), "probes": [report.to_dict() for report in reports], "peak_memory_bytes": used,
            "prefill": [dataclasses.asdict(speed) for speed in prefill],
            "decode": [dataclasses.asdict(speed) for speed in decode]} | ({"estimates": estimates} if estimates else {})


def side_by_side(runs: list[dict]) -> str:
    """A table of tokens/s with a column for each run, and how many times the first one's each is."""
    heads = [f"{len(run['cards'])} card{'s' * (len(run['cards']) > 1)}" for run in runs]
    lines = [f"{'tokens/s':<26}" + "".join(f"{head:>20}" for head in heads)]
    for what in "prefill", "decode":
        for speeds in zip(*(run[what] for run in runs)):
            name = f"{what} {'at ' * (what == 'decode')}{speeds[0]['context']:,}"
            name += f", batch {speeds[0]['batch']}" * (what == "decode")
            first = speeds[0]["tokens_per_s"]
            columns = [f"{speed['tokens_per_s']:,.1f}" + (f"  {speed['tokens_per_s'] / first:.2f} x" if i else "")
                       for i, speed in enumerate(speeds)]
            lines.append(f"{name:<26}" + "".join(f"{column:>20}" for column in columns))
    return "\n".join(lines)


def write_json(path: str, data):
    """OSError, which `main` puts into a sentence, where the file cannot be written."""
    Path(path).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def print_config(options) -> int:
    """What the model file and the command line say; returns the exit code."""
    model = open_model(options.model)
    said = {"ctx": model.n_ctx(options.ctx), "slots": options.slots,
            "card": options.card or "the first if the model fits there, or else all"}
    for name, value in (dataclasses.asdict(model.config) | said).items():
        print(f"{name} = {value}")
    return 0


def asked(options) -> dict:
    """What the command line asks of `load`; for a single text, hardly any memory goes to checkpoints."""
    is_single = not (options.chat or options.plan or options.serve is not None)
    on_card, on_host = (0 if is_single else size and size << 20
                        for size in (options.checkpoint_memory, options.checkpoint_host_memory))
    return {"ctx": options.ctx, "slots": options.slots, "kv_tokens": options.kv_tokens, "checkpoint_memory": on_card,
            "checkpoint_host_memory": on_host, "split": options.split}


def load_engine(model: str | OpenModel, options) -> Engine:
    """The engine for what is to be done."""
    return load(model, card=options.card, **asked(options))


@contextlib.contextmanager
def traced(engine: Engine, options):
    """What --trace asks for, of what the engine's cards do inside."""
    if not options.trace:
        yield
        return
    try:
        with tracing(engine.cards) as trace:
            yield
    finally:
        trace.write(options.trace)
        if LEFT_OUT in trace.facts:
            note(f"qengine: {options.trace} lacks {trace.facts[LEFT_OUT]}")


def run_plan(model: OpenModel, options) -> int:
    """Prints where the model goes and what that takes; returns the exit code. Raises OutOfMemory."""
    wishes = asked(options)
    planner = make_planner(model, options.card, Demand(model.n_ctx(wishes.pop("ctx")), **wishes))
    planner.check()
    print(planner.report())
    return 0


def run(options) -> int:
    """Does what the parsed command line asks; returns the exit code."""
    sampling = {name: getattr(options, name) for name in SAMPLING if getattr(options, name) is not None}
    thinking = {None: None, "on": True, "off": False}[options.thinking]
    if options.trace:
        write_json(options.trace, {})       # now: what is recorded should not be lost for a mistyped folder
    if options.print_config:
        return print_config(options)
    if options.serve is not None:
        return run_server(options, sampling, thinking)
    if options.probe:
        return run_probe(options)
    model = open_model(options.model)
    if options.plan:
        return run_plan(model, options)
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
