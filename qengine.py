"""qengine: Qwen3.5-style hybrid language models on any NVIDIA card from Volta on, and on a plain CPU.

Table of contents
    1  Config              what the metadata of a model file says
    2  Weights             the tensors of a layer, on its card
    3  Passes              what runs through the layers: rows of a prompt, or of a decode step
    4  Layers              each kind of mixer and MLP, with all of its facts
    5  Model and cache     the forward pass of a range of layers
    6  Stages              layers on cards, one after the other
    7  Scheduler           requests, slots, prompts and answers side by side
    8  Engine              a loaded model; load()

How a token travels. Three kinds of threads take part: the caller's, the scheduler's, and one worker for each card.

    Engine.submit           a Request becomes a Generation, which waits in the scheduler's queue
    Scheduler.run_round     a Generation that gets a slot becomes a Sequence; each round queues a pass of a
                            prompt (some layers of it while answers run) and a decode step of one group of
                            answers; without a prompt, a decode step of every group
    Pipeline.prefill, step  posts the pass or step to the worker of every stage, in the order of the layers
    Stage.queue_...         launches kernels on the stage's card; decode steps replay a recording
    Model.layer_by_layer    embedding, then for each layer mixer (DeltaNet or Attention) and MLP, on rows of x
    Edge                    carries the rows of x to the next stage's card
    Model.compute_logits    at the last stage: norm and output head
    Sampler                 chooses a token for each row on the card; the outcomes (new tokens, next drafts)
                            become inputs of the next step (kernels/advance.py), and a copy of them goes to the host
    Scheduler._take         the host reads the tokens: Generation.push makes each a Delta with text, for the caller

Before `submit`, `encode_prompt` (engine/tokenizer.py) turns text into tokens. The first token of an answer comes from
the last pass of its prompt (`Stage.queue_first_choice`). The next step is queued before the host has read the tokens of
this one, so the card waits for the host only if an answer has a grammar. Models for embeddings and reranking have a
scheduler of their own (engine/packing.py), the same layers, and no head or sampler. engine/request.py lists the errors
of requests and model files; kernels/ adds `CardError` and `CompileError`. docs/how-it-works.md ends with a glossary.
"""

import sys

if __name__ == "__main__":      # cli/ takes over, and imports this file once more as the module `qengine`
    from cli.main import run_process

    run_process()

import collections
import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import tqdm

from engine import display, expert_store, host_table, look, own_products, talk
from engine.constraints import Constraint, Vocabulary
from engine.details import ModelDetails, parameters
from engine.draft_block import PIECE, DraftBlock
from engine.edge import Edge
from engine.experts import ExpertsMLP
from engine.gguf import GGUF, SUPPORTED_TYPES
from engine.hub import eyes_file, local_path
from engine.hyperparameters import keeping, read_hyperparameters, synthetic_hyperparameters
from engine.limits import DEFAULT_CTX, DEFAULT_MODEL, SAMPLING
from engine.look import HEAD_ROWS
from engine.micro_batches import Alone, MicroBatch, PassInParts, Span
from engine.packing import CLASSIFIER, Packed, Pooling, for_pooling, most_spans
from engine.pipes import PipeMeter
from engine.plan import (CHUNK, MICRO_BATCHES, CacheSizes, Demand, Planner, StageCosts, Work, check_whole, choose_rows,
                         choose_sizes, group_count, hop_bytes, most_drafts, slowest_seconds, step_rows, widest)
from engine.pooling import SYNTHETIC_RERANK, RerankTemplate
from engine.prefix import PAGE_TOKENS, PrefixCache, checkpoint_positions, pages_for
from engine.recordings import Recordings
from engine.request import (DeadlineExceeded, Delta, EngineStopped, Fault, Generation, ModelError, Request,
                            RequestError, is_sparse)
from engine.rounds import Rounds
from engine.scratch import Activation, Scratch, ScratchArray
from engine.sampler import BUFFERS, FIRST_TOKENS, Sampler, Tokens
from engine.sequence import Sequence
from engine.sight import Gallery, PromptPictures, Seen, open_eyes, pictures_of
from engine.speculate import Pace
from engine.template import SYNTHETIC_TEMPLATE, ChatTemplate
from engine.text_engine import TextEngine, TextOnly
from engine.thinking import constraint_of
from engine.tokenizer import ByteTokenizer, Tokenizer, encode_prompt, load_tokenizer
from engine.turns import Ticket, Turns
from engine.weights import FileWeights, Loader, Stack, SyntheticWeights, Tensors, Weights, fits_blocks, is_factor
from engine.worker import Task, Worker, stop_all
from kernels import (advance, attend_decode, attention, block_sparse, checkpoint, conv, embedding, float_matmul, gdn,
                     gdn_decode, kv_cache, kv_expand, logprobs, norm, pool, probe, q8_gemm, q8_gemv, quantize, rope,
                     swiglu)
from kernels.card import Array, Card, CardError, show_bytes
from kernels.advance import answer_of
from kernels.formats import FLOATS, FORMATS
from kernels.kv_cache import Pages
from kernels.kv_formats import FLOAT16, KV_FORMATS
from kernels.open import open_cards
from kernels.operands import Experts, Matrix
from kernels.products import Products, measure_products
from kernels.quant_gemv import decoder_of
from kernels.records import CHECK_ROWS, Pending, Places, Projected, States
from kernels.rope import QKV, Heads, Rotary

# What a user of this module may rely on. The names of the last two lines are parts that the notebooks look at.
__all__ = [
    "load", "open_model", "DEFAULT_MODEL", "Config", "Engine", "Request", "Generation", "Delta", "SAMPLING",
    "ModelError", "RequestError", "DeadlineExceeded", "EngineStopped",
    "HEAD_ROWS", "TURN", "MicroBatch", "PlannedModel", "Stack", "Stage", "StepShape", "answer_of",
    "matrices", "n_parameters", "rows_of", "set_rows", "tensor_shapes"]

# ======================================================================================================
# 1  Config
# ======================================================================================================

@dataclass(frozen=True)
class Config:
    """What a model is: every number that the code below needs, from the file's metadata.

    Layers are counted without the next-token-prediction (nextn, MTP) blocks that may follow them. A layer's kind is
    "linear" (Gated DeltaNet), "attention" (full attention with an output gate), "plain attention" (without a gate) or
    "pooled attention" (without a gate, in models for embeddings and reranking).
    """

    name: str
    architecture: str                     # as files call it: "qwen35", "qwen35moe" or "qwen3"
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
    rope_sections: tuple[int, int, int]   # how many rotary frequencies belong to time, height, width
    n_key_heads: int                      # of a linear layer; 0 if the model has none
    n_value_heads: int                    # value head h reads key head h % n_key_heads
    linear_head_dim: int
    conv_width: int                       # taps of the causal convolution
    norm_eps: float
    mlp_norm: str                         # name of the norm before the MLP
    n_vocab: int
    tied_embeddings: bool                 # the output head is the embedding table
    context_length: int                   # tokens the model was made for
    pooling: str | None                   # None: the model generates text. Else how the rows of a text become one:
                                          # "last", "mean" or "cls" for embeddings, "rank" for reranking
    n_experts: int = 0                    # of a layer; 0 if the MLPs are dense
    n_used_experts: int = 0               # experts of a layer that one token uses
    expert_dim: int = 0
    shared_dim: int = 0                   # of the expert that all tokens use
    one_gate_up: bool = False             # whether files have gate and up of an expert in one tensor
    kv: str = FLOAT16                     # format of the KV cache (kernels/kv_formats.py): the user's choice

    @property
    def query_dim(self) -> int:
        """Columns of all query heads together."""
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
    def mlp_kind(self) -> str:
        return "experts" if self.n_experts else "dense"

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> "Config":
        """The metadata of a file. `check_model` says whether the engine can run the model. Raises ModelError."""
        return cls(**read_hyperparameters(gguf))

    @classmethod
    def synthetic(cls, name: str) -> "Config":
        """The shapes of a published model, for random weights. Raises ModelError for unknown names."""
        return cls(**synthetic_hyperparameters(name))


# ======================================================================================================
# 2  Weights
# ======================================================================================================
# A Loader (engine/weights.py) puts tensors on a card: as a Matrix, as a Stack of matrices that read the same input, or
# as the Experts of a layer.


def matrices(part) -> list[Matrix]:
    """All Matrix objects in the fields of a mixer, an MLP or a layer: also those in Stacks, not those in Experts."""
    if isinstance(part, Matrix | Experts):
        return [part] * isinstance(part, Matrix)
    fields = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    inner = part if isinstance(part, tuple) else [getattr(part, field.name) for field in fields]
    return [matrix for item in inner for matrix in matrices(item)]


def product_work(part) -> Work:
    """The Work of the matrix products of a mixer, an MLP or a layer."""
    found = matrices(part)
    return Work(products=collections.Counter((matrix.n, matrix.k) for matrix in found if matrix.is_quantized),
                row_operations=2 * sum(matrix.n * matrix.k for matrix in found))


# ======================================================================================================
# 3  Passes
# ======================================================================================================
# What runs through the layers is a pass: consecutive tokens of one prompt, or one decode step of several answers.
# Passes over prompts use the prefill family of kernels, decode steps the decode family. The two round differently.
# Within a family, the bits of a row depend neither on the other rows of the pass nor on how a prompt is cut into
# passes.


@dataclass(frozen=True)
class Rows:
    """The tokens of a pass, as int32 arrays on the card."""

    n: int
    ids: Array              # [n] token ids
    places: Places          # [n] the slot of each token, and its position in the slot's sequence
    rope: Array             # [3, n] positions for the rotation of heads: time, height, width


INPUTS = 6                  # int32 of a row: id, slot, position, three rotary positions


def rows_of(inputs: Array, n: int) -> Rows:
    """n rows whose ids, slots and positions lie side by side at the start of an array, so that one copy fills all."""
    i = inputs
    return Rows(n, i[:n], Places(i[n:2 * n], i[2 * n:3 * n]), i[3 * n:6 * n].reshape(3, n))


def set_rows(inputs: Array, ids, slots, positions, rope=None):
    """Fill what `rows_of` reads, from lists of the same length. rope: [3, n]; by default the positions."""
    table = np.empty((INPUTS, len(ids)), np.int32)
    table[0], table[1], table[2], table[3:] = ids, slots, positions, positions if rope is None else rope
    inputs.card.copy_in(inputs[:table.size], table.reshape(-1))


class Mark(NamedTuple):
    """A position in a prompt's pass at which the recurrent states of its slot are copied into a checkpoint."""

    end: int                # rows of the pass before the position
    slot: int
    kept: int               # row of the state arrays that receives the copy


@dataclass(frozen=True)
class PromptPass:
    """A pass over consecutive prompt tokens of one slot, or a part of its rows (see `MicroBatch`)."""

    rows: Rows
    marks: tuple[Mark, ...]         # in ascending order
    pictures: tuple                 # (row, Array [n, hidden] on the first card): replaces embeddings from this row on
    shares_card: bool               # whether other micro-batches run at the same time
    batch: MicroBatch | Alone       # orders the uses of states, pages and shared memory by micro-batches
    sparse_from: int | None         # position of the first row in a sparse prompt; None: rows see all keys before them
    n_keys: int | None = dataclasses.field(default=None, kw_only=True)      # keys seen by its last row; None: any

    tiles: ClassVar = None

    def parts(self):
        """(first row, end, slot, kept) of the parts between the marks. After a part, the states of the slot are copied
        to row `kept`, unless that is None."""
        start = 0
        for end, slot, kept in (*self.marks, (self.rows.n, None, None)):
            if end > start:
                yield start, end, slot, kept
            start = end


@dataclass(frozen=True)
class PackedPass(PromptPass):
    """A pass over parts of several texts, one after another. Each part is consecutive tokens of one slot. All layers
    must be attention."""

    tiles: Array            # which rows belong together, see kernels/attention.py


@dataclass(frozen=True)
class DecodePass:
    """A decode step of n answers, with `width` rows of each: row j * n + i is row j of answer i.

    Row 0 of an answer is its latest token. The other rows are drafts of what follows, and the step checks them: a step
    of more than one row is a check. The rows of an answer that count come first. The others are void: their position is
    -1, and they change no page and no state. The bits of a row do not depend on the width.
    """

    rows: Rows
    n: int
    width: int = 1

    pictures: ClassVar = ()


# ======================================================================================================
# 4  Layers
# ======================================================================================================
# A layer is x += mixer(norm(x)); x += mlp(norm(x)), where x is the residual stream, float32 [rows, hidden]. A kind of
# mixer or MLP is a class that owns all facts of its kind: the names and shapes of its tensors, what it demands of a
# model, its passes over rows, its scratch memory, and what it computes and keeps (`Work`).
# Passes call `Model.project_norm` (products of a Stack with norm(x)) and `Model.project` (one product), see section 5.


@dataclass(frozen=True)
class DeltaNet:
    """Gated DeltaNet: a recurrence whose state is 128 x 128 per value head, whatever the length of the text."""

    heads: gdn.LinearHeads
    norm: Array             # [hidden]
    in_proj: Stack          # columns: conv_dim of q, k, v; value_dim of z (gate of the output); n_value_heads of alpha
                            # (decay of the state); n_value_heads of beta (strength of its update)
    conv: Array             # [conv_dim, conv_width]
    decay: gdn.Decay        # -exp(A_log) and dt_bias, [n_value_heads] each, see kernels/gdn.py
    out_norm: Array         # [128]
    out_proj: Matrix        # [hidden, value_dim]

    keeps: ClassVar = States

    @staticmethod
    def shapes(c: Config) -> dict[str, tuple[int, ...]]:
        hidden, n_v = c.hidden_dim, c.n_value_heads
        return {"attn_norm.weight": (hidden,), "attn_qkv.weight": (c.conv_dim, hidden),
                "attn_gate.weight": (c.value_dim, hidden), "ssm_alpha.weight": (n_v, hidden),
                "ssm_beta.weight": (n_v, hidden), "ssm_conv1d.weight": (c.conv_dim, c.conv_width), "ssm_a": (n_v,),
                "ssm_dt.bias": (n_v,), "ssm_norm.weight": (c.linear_head_dim,),
                "ssm_out.weight": (hidden, c.value_dim)}

    @staticmethod
    def rules(c: Config) -> list[tuple[bool, str]]:
        return [(c.linear_head_dim == 128, f"linear-attention heads are {c.linear_head_dim} wide, not 128"),
                (c.conv_width == 4, f"the convolution has {c.conv_width} taps, not 4"),
                (c.n_value_heads % c.n_key_heads == 0,
                 f"{c.n_value_heads} value heads do not share {c.n_key_heads} key heads evenly")]

    @classmethod
    def load(cls, tensors: Tensors, c: Config) -> "DeltaNet":
        in_proj = tensors.stack("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta")
        decay = gdn.Decay(tensors.vector("ssm_a"), tensors.vector("ssm_dt.bias"))
        return cls(gdn.LinearHeads(c.n_key_heads, c.n_value_heads), tensors.vector("attn_norm.weight"), in_proj,
                   tensors.vector("ssm_conv1d.weight"), decay, tensors.vector("ssm_norm.weight"),
                   tensors.matrix("ssm_out"))

    def work(self, c: Config) -> Work:
        states = 4 * (c.conv_width * c.conv_dim + c.value_dim * c.linear_head_dim)
        return Work(state_bytes=states, record_bytes=Pending.slot_bytes(self.heads))

    @staticmethod
    def scratch(c: Config, rows: int) -> dict[str, ScratchArray]:
        return {"mixed": ScratchArray((rows, c.conv_dim), np.float32, "qkv after convolution"),
                "delta": ScratchArray((rows, c.value_dim), np.float32, "delta rule output"),
                "factors": ScratchArray(gdn.factors_shape(rows, c.n_value_heads), np.float32, "delta rule factors")}

    @staticmethod
    def alloc(card: Card, c: Config, n_layers: int, n_rows: int) -> States:
        """What n_layers such layers keep, for n_rows slots and checkpoints."""
        return States(card.alloc((n_layers, n_rows, c.conv_width, c.conv_dim), np.float32, "convolution states"),
                      card.alloc((n_layers, n_rows, c.n_value_heads, c.linear_head_dim, c.linear_head_dim), np.float32,
                                 "recurrent states"))

    @staticmethod
    def out_width(c: Config) -> int:
        """The width of what enters `out_proj`."""
        return c.value_dim

    def prefill(self, model: "Model", run: PromptPass, kept: tuple[States, Pending]):
        card, c, s, n_rows, (states, _) = model.card, model.config, model.scratch, run.rows.n, kept
        projected, u = model.project_norm(run, self.in_proj, self.norm), s.activations[c.value_dim]
        with run.batch.in_order():
            for start, end, slot, kept in run.parts():
                n, mixed = end - start, s.mixed[start:]
                part, places = projected.rows_from(start), run.rows.places.rows_from(start)
                conv.conv_silu(card, mixed, part, states.conv, self.conv, places, n, c.conv_dim)
                gdn.gdn_prefill(card, s.delta[start:], states.memory, mixed, part, self.decay, places.slots, self.heads,
                                rows=n, factors=s.factors)
                if kept is not None:
                    states.copy(card, kept, slot)
        gated = norm.GatedInput(s.delta, projected.values[c.conv_dim:], projected.stride, c.n_value_heads,
                                self.out_norm, c.norm_eps)
        if self.out_proj.is_quantized:
            norm.gated_norm_quantize(card, u.quantized, gated, n_rows)
        else:
            norm.gated_norm(card, u.x, gated, n_rows)
        model.project(run, s.x, self.out_proj, u, add=True)

    def decode(self, model: "Model", run: DecodePass, kept: tuple[States, Pending]):
        card, c, s, (states, pending) = model.card, model.config, model.scratch, kept
        projected, u = model.project_norm(run, self.in_proj, self.norm), s.activations[c.value_dim]
        weights = gdn_decode.LinearWeights(self.conv, self.decay, self.out_norm)
        inputs = states, projected, weights, run.rows.places, self.heads
        sizes = {"rows": run.n, "width": run.width, "pending": pending, "eps": c.norm_eps, "early": True}
        if self.out_proj.is_quantized:
            gdn_decode.gdn_decode_quantize(card, u.q, u.d, *inputs, **sizes)
        else:
            gdn_decode.gdn_decode(card, u.x, *inputs, **sizes)
        model.project(run, s.x, self.out_proj, u, add=True)


@dataclass(frozen=True)
class Attention:
    """Full attention with grouped query heads. The first ROTARY values of a head are rotated; a sigmoid gate scales the
    output. Kinds without a gate, and with other heads, are subclasses."""

    heads: Heads
    norm: Array             # [hidden]
    in_proj: Stack          # columns: head_dim of query, and of gate if there is one, per head; keys; values
    q_norm: Array           # [head_dim]
    k_norm: Array           # [head_dim]
    out_proj: Matrix        # [hidden, query_dim]

    keeps: ClassVar = Pages
    HEAD_DIM: ClassVar = 256
    ROTARY: ClassVar = 64
    GATED: ClassVar = True

    @classmethod
    def shapes(cls, c: Config) -> dict[str, tuple[int, ...]]:
        hidden = c.hidden_dim
        return {"attn_norm.weight": (hidden,), "attn_q.weight": ((1 + cls.GATED) * c.query_dim, hidden),
                "attn_k.weight": (c.kv_dim, hidden), "attn_v.weight": (c.kv_dim, hidden),
                "attn_q_norm.weight": (c.head_dim,), "attn_k_norm.weight": (c.head_dim,),
                "attn_output.weight": (hidden, c.query_dim)}

    @classmethod
    def rules(cls, c: Config) -> list[tuple[bool, str]]:
        return [(c.head_dim == cls.HEAD_DIM, f"attention heads are {c.head_dim} wide, not {cls.HEAD_DIM}"),
                (c.n_heads % c.n_kv_heads == 0,
                 f"{c.n_heads} query heads do not share {c.n_kv_heads} KV heads evenly"),
                (c.rope_dim == cls.ROTARY, f"{c.rope_dim} rotary dimensions of a head turn, not {cls.ROTARY}"),
                (min(c.rope_sections) >= 0 and sum(c.rope_sections) == c.rope_dim // 2,
                 f"the rotary sections {c.rope_sections} do not add up to {c.rope_dim // 2}"),
                (1 < c.rope_base < float("inf"), f"the rotary base is {c.rope_base}")]

    @classmethod
    def load(cls, tensors: Tensors, c: Config) -> "Attention":
        heads = Heads(c.n_heads, c.n_kv_heads, c.head_dim, c.rope_dim, cls.GATED, eps=c.norm_eps)
        return cls(heads, tensors.vector("attn_norm.weight"), tensors.stack("attn_q", "attn_k", "attn_v"),
                   tensors.vector("attn_q_norm.weight"), tensors.vector("attn_k_norm.weight"),
                   tensors.matrix("attn_output"))

    def work(self, c: Config) -> Work:
        return Work(context_operations=4 * c.query_dim,
                    page_bytes=KV_FORMATS[c.kv].page_bytes(c.n_kv_heads, c.head_dim))

    @staticmethod
    def scratch(c: Config, rows: int) -> dict[str, ScratchArray]:
        return {"q": ScratchArray((rows, c.n_heads, c.head_dim), np.float16, "rotated query"),
                "attended": ScratchArray((rows, c.query_dim), np.float32, "attention output")}

    @staticmethod
    def alloc(card: Card, c: Config, n_pages: int, block_table: Array, name: str) -> Pages:
        """What such a layer keeps."""
        return Pages.alloc(card, KV_FORMATS[c.kv], (n_pages, c.n_kv_heads, c.head_dim), block_table, name)

    @staticmethod
    def out_width(c: Config) -> int:
        return c.query_dim

    def project_qkv(self, model: "Model", run: PromptPass | DecodePass) -> QKV:
        return self.qkv(model, run, model.project_norm(run, self.in_proj, self.norm))

    def qkv(self, model: "Model", run: PromptPass | DecodePass, products: Projected) -> QKV:
        """products: of `in_proj` with the rows of the pass."""
        rotary = Rotary(run.rows.rope, model.inv_freq, model.config.rope_sections)
        return QKV(products, self.heads, self.q_norm, self.k_norm, rotary)

    def prefill(self, model: "Model", run: PromptPass, pages: Pages):
        card, s, n, places = model.card, model.scratch, run.rows.n, run.rows.places
        qkv, u = self.project_qkv(model, run), s.activations[self.out_proj.k]
        rope.norm_rope_q(card, s.q, qkv, n, turned=pages.format.turned)
        with run.batch.in_order():
            kv_cache.store_kv(card, pages, qkv, places, n)
        with run.batch.in_turns(pages.format.expands or run.sparse_from is not None):
            kept = block_sparse.choose_pages(card, model.chooser, s.q, self.heads, pages, places, n, run.sparse_from,
                                             piece=model.piece)
            attention.attend_prefill(card, s.attended, s.q, qkv, pages, places, n, tiles=run.tiles, piece=model.piece,
                                     sums=u.x, kept=kept, n_keys=run.n_keys)
        if self.out_proj.is_quantized:
            quantize.quantize_q8(card, u.quantized, s.attended, n, u.k)
        else:
            card.copy(u.x[:n], s.attended[:n])
        model.project(run, s.x, self.out_proj, u, add=True)

    def decode(self, model: "Model", run: DecodePass, pages: Pages):
        card, s, u = model.card, model.scratch, model.scratch.activations[self.out_proj.k]
        out = (u.q, u.d) if self.out_proj.is_quantized else (u.x, None)
        attend_decode.attend_decode(card, out, self.project_qkv(model, run), pages, run.rows.places,
                                    model.attention_scratch, run.n, width=run.width, early=True)
        model.project(run, s.x, self.out_proj, u, add=True)


class PlainAttention(Attention):
    """Full attention of a plain Qwen3: without a gate, and the whole head is rotated."""

    HEAD_DIM, ROTARY, GATED = 128, 128, False


class PooledAttention(PlainAttention):
    """Plain attention of a pooling model. Its queries and keys are computed from activations of 16 bits, because
    softmax magnifies their errors (benchmarks/results.md)."""

    def project_qkv(self, model: "Model", run: PromptPass) -> QKV:
        return self.qkv(model, run, model.project_norm_finely(run, self.in_proj, self.norm,
                                                               self.heads.v_column))


@dataclass(frozen=True)
class DenseMLP:
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    norm: Array             # [hidden]
    gate_up: Stack          # columns: ffn_dim of gate; ffn_dim of up
    down: Matrix            # [hidden, ffn]

    @staticmethod
    def shapes(c: Config) -> dict[str, tuple[int, ...]]:
        hidden, ffn = c.hidden_dim, c.ffn_dim
        return {f"{c.mlp_norm}.weight": (hidden,), "ffn_gate.weight": (ffn, hidden),
                "ffn_up.weight": (ffn, hidden), "ffn_down.weight": (hidden, ffn)}

    @staticmethod
    def rules(c: Config) -> list[tuple[bool, str]]:
        return [(c.ffn_dim % 32 == 0, f"the feed-forward size {c.ffn_dim} is not a multiple of 32")]

    @classmethod
    def load(cls, tensors: Tensors, c: Config) -> "DenseMLP":
        return cls(tensors.vector(f"{c.mlp_norm}.weight"), tensors.stack("ffn_gate", "ffn_up"),
                   tensors.matrix("ffn_down"))

    def work(self, c: Config) -> Work:
        return Work()

    @staticmethod
    def scratch(c: Config, rows: int) -> dict[str, ScratchArray]:
        return Activation.layout("inner", c.ffn_dim, rows)

    def prefill(self, model: "Model", run: PromptPass | DecodePass):
        card, h, n = model.card, model.scratch.inner, run.rows.n
        projected = model.project_norm(run, self.gate_up, self.norm)
        if self.down.is_quantized:
            swiglu.swiglu_quantize(card, h.quantized, projected.values, n, h.k)
        else:
            swiglu.swiglu(card, h.x, projected.values, n, h.k)
        model.project(run, model.scratch.x, self.down, h, add=True)

    def decode(self, model: "Model", run: DecodePass):
        if not (self.down.is_quantized and model.is_fused(self.gate_up)):
            return self.prefill(model, run)
        (_, matrix), s, c = self.gate_up.parts[0], model.scratch, model.config
        q8_gemv.norm_gemv_swiglu(model.card, decoder_of(matrix), s.inner.quantized, matrix,
                                 norm.NormInput(s.x, self.norm, c.norm_eps), s.activations[c.hidden_dim].quantized,
                                 run.rows.n, products=model.products)
        model.project(run, s.x, self.down, s.inner, add=True)


# Kinds of mixers, as `Config.layer_kinds` names them.
MIXERS = {"linear": DeltaNet, "attention": Attention, "plain attention": PlainAttention,
          "pooled attention": PooledAttention}


MLPS = {"dense": DenseMLP, "experts": ExpertsMLP}      # as `Config.mlp_kind` names them


def mixer_kind(config: Config, index: int) -> type:
    """The class of the mixer of block `index`: a layer, or behind those a draft block."""
    return MIXERS[config.layer_kinds[index] if index < config.n_layers else DraftBlock.KIND]


def mixer_kinds(config: Config) -> list[type]:
    """The classes of all mixers of a model."""
    used = {mixer_kind(config, index) for index in range(config.n_layers + config.n_nextn)}
    return [kind for kind in MIXERS.values() if kind in used]


@dataclass(frozen=True)
class Layer:
    """A mixer and an MLP."""

    mixer: DeltaNet | Attention
    mlp: DenseMLP | ExpertsMLP
    work: Work

    @classmethod
    def load(cls, loader: Loader, config: Config, index: int) -> "Layer":
        """The weights of block `index`, put on the loader's card."""
        def of(tensors):
            parts = [kind.load(tensors, config) for kind in (mixer_kind(config, index), MLPS[config.mlp_kind])]
            return cls(*parts, sum((product_work(part) + part.work(config) for part in parts), Work(n_layers=1)))

        return loader.block(index, of)

    def stacks(self) -> list[Stack]:
        return [value for part in (self.mixer, self.mlp) for value in vars(part).values() if isinstance(value, Stack)]


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name and row-major shape of every tensor that the model's file holds."""
    c = config
    shapes = {"token_embd.weight": (c.n_vocab, c.hidden_dim), "output_norm.weight": (c.hidden_dim,)}
    if not c.tied_embeddings:
        shapes["output.weight"] = (c.n_vocab, c.hidden_dim)
    if c.pooling == "rank":
        shapes[CLASSIFIER] = (2, c.hidden_dim)
    for i in range(c.n_layers + c.n_nextn):
        kinds = [mixer_kind(c, i), MLPS[c.mlp_kind]] + [DraftBlock] * (i >= c.n_layers)
        block = dict(itertools.chain.from_iterable(kind.shapes(c).items() for kind in kinds))
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    return shapes


def n_parameters(config: Config) -> int:
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def check_config(config: Config, path: str):
    """Raises ModelError unless the kernels can run the model."""
    rules = [rule for kind in (*mixer_kinds(config), MLPS[config.mlp_kind]) for rule in kind.rules(config)]
    rules += [(config.hidden_dim % 32 == 0, f"the hidden size {config.hidden_dim} is not a multiple of 32"),
              (not config.pooling or all(kind.keeps is Pages for kind in mixer_kinds(config)),
               f"pooling ({config.pooling}) needs a model whose layers are all attention"),
              (0 < config.norm_eps < 1, f"the epsilon of the norms is {config.norm_eps}")]
    for is_met, rule in rules:
        if not is_met:
            raise ModelError(f"{path}: {rule}")


def check_model(config: Config, gguf: GGUF):
    """Raises ModelError unless the kernels can run the model, and each tensor is in the file, in the right shape and in
    a type that the engine runs. An unknown tensor is an error, too."""
    check_config(config, gguf.path)
    shapes = tensor_shapes(config)
    for name, shape in shapes.items():
        tensor = gguf.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{gguf.path}: tensor '{name}' is missing")
        if tensor.shape != shape:
            raise ModelError(f"{gguf.path}: tensor '{name}' (byte {tensor.offset}) has the shape "
                             f"{tensor.shape}, not {shape}")
        allowed = SUPPORTED_TYPES if len(shape) > 1 else tuple(FLOATS)
        if tensor.type not in allowed:
            raise ModelError(f"{gguf.path}: tensor '{name}' (byte {tensor.offset}) is of type "
                             f"{tensor.type}, not {', '.join(allowed)}")
    unknown = next((name for name in gguf.tensors if name not in shapes and not is_factor(gguf, name)), None)
    if unknown is not None and unknown.endswith((".scale", ".input_scale")):
        raise ModelError(f"{gguf.path}: tensor {unknown[:80]!r} is no float32 factor of a matrix in NVFP4")
    if unknown is not None:
        raise ModelError(f"{gguf.path}: tensor {unknown[:80]!r} is not part of the "
                         f"{config.architecture} architecture")
    n_tokens = len(gguf.get("tokenizer.ggml.tokens", list))
    if n_tokens != config.n_vocab:
        raise ModelError(f"{gguf.path}: the vocabulary has {n_tokens} tokens and the embedding table "
                         f"{config.n_vocab} rows")


# ======================================================================================================
# 5  Model and cache
# ======================================================================================================

class Model:
    """The forward pass of a range of layers on one card. The layers change the states and pages of a cache that the
    caller owns. Every float operation is a kernel of kernels/ on `card`; this class only decides their order."""

    def __init__(self, loader: Loader, config: Config, layers: range, progress=iter, drafts: bool = True,
                 wish: str = "auto"):
        """drafts: whether the draft block is loaded, if the model has one. It lives on the last card. wish: which
        instructions shall multiply several rows, see kernels/products.py."""
        self.card, self.config, self.first_layer = loader.card, config, layers.start
        is_last = layers.stop == config.n_layers
        drafts = drafts and is_last and config.n_nextn > 0
        self.layers = [Layer.load(loader, config, index) for index in progress(layers)]
        self.embeddings = self.head = self.block = None
        has_head = is_last and not config.pooling
        if layers.start == 0 or drafts or (has_head and config.tied_embeddings):
            load_table = loader.matrix if has_head and config.tied_embeddings else loader.table
            self.embeddings = load_table("token_embd.weight")
        if is_last:
            self.head_norm = loader.vector("output_norm.weight")
        if has_head:
            self.head = self.embeddings if config.tied_embeddings else loader.matrix("output.weight")
        if drafts:
            index = config.n_layers
            self.block = DraftBlock(Tensors(loader, index), Layer.load(loader, config, index), self.head,
                                    lambda inputs, n: DecodePass(rows_of(inputs, n), n))
        frequencies = rope.inverse_frequencies(config.rope_base, config.rope_dim)
        self.inv_freq = self.card.upload(frequencies, "rotary frequencies")
        self.blocks = self.layers + ([self.block.layer] if drafts else [])
        self.numbers = range(layers.start, layers.stop + drafts)        # of these blocks
        self.stride = max(stack.stride for layer in self.blocks for stack in layer.stacks())
        self.products = Products.of(self.card, wish)       # of prompts
        self.gemv = self.gemm = None    # a user's own products of Q8_0 matrices, see `Engine.use`
        self.chooser: block_sparse.Chooser | None = None        # if prompts may be sparse

    def work(self) -> Work:
        """The Work of the layers. A draft block adds its products in a pass over a prompt, and its pages."""
        found = sum((layer.work for layer in self.layers), Work())
        if self.block:
            pages = self.block.layer.work.page_bytes
            found += product_work(self.block.prompt_products) + Work(page_bytes=pages)
        return found

    def scratch_layout(self, rows: int) -> dict[str, ScratchArray]:
        """What a pass of so many rows needs: name -> shape, type and title of an array."""
        c = self.config
        layout = {"x": ScratchArray((rows, c.hidden_dim), np.float32, "residual stream"),
                  "projected": ScratchArray((rows * self.stride,), np.float32, "products of a stack")}
        kinds = mixer_kinds(c)
        for kind in kinds:
            layout |= kind.scratch(c, rows)
        for k in {c.hidden_dim, *(kind.out_width(c) for kind in kinds)}:
            layout |= Activation.layout(str(k), k, rows)
        return layout | MLPS[c.mlp_kind].scratch(c, rows)

    def row_bytes(self) -> int:
        """Bytes of scratch memory for a row."""
        arrays = self.scratch_layout(PAGE_TOKENS).values()
        return sum(math.prod(each.shape) * np.dtype(each.dtype).itemsize for each in arrays) // PAGE_TOKENS

    def allocate(self, rows: int, step_rows: int, max_pages: int):
        """Takes scratch memory. Passes have up to `rows` rows, steps step_rows rows, and sequences max_pages pages."""
        c, card = self.config, self.card
        self.scratch = self.step_scratch = self.take_scratch(rows)
        self.piece = kv_expand.Piece.alloc(card, KV_FORMATS[c.kv], c.n_kv_heads, c.head_dim, max_pages)
        self.attention_scratch = attend_decode.Scratch.alloc(card, step_rows, c.n_heads, c.head_dim)
        self.arrived = card.zeros(step_rows, np.uint32, "router blocks that have arrived")
        self.side = card.stream("shared experts")
        if self.head is not None:
            self.logits = card.alloc((max(step_rows, HEAD_ROWS), c.n_vocab), np.float32, "logits")
        if self.block:
            self.block.allocate(card, c.hidden_dim, rows, step_rows)
        # Decode steps run beside the parts of a pass. Only a model that has all layers runs passes in parts.
        if self.first_layer == 0 and self.head is not None:
            self.step_scratch = self.take_scratch(step_rows)
        self.views = {}             # name or row -> Model, see below; kept, since Arrays cache what launches need

    def take_scratch(self, rows: int) -> Scratch:
        return Scratch({name: self.card.alloc(*each) for name, each in self.scratch_layout(rows).items()})

    def behind(self, row: int) -> "Model":
        """This model with the scratch memory of the rows from `row` on, a multiple of 64: for a micro-batch."""
        return self._view(row, lambda: self.scratch.behind(self.scratch_layout(row))) if row else self

    def for_steps(self) -> "Model":
        """This model with the scratch memory of decode steps."""
        return self._view("steps", lambda: self.step_scratch)

    def _view(self, key, make_scratch) -> "Model":
        if key not in self.views:
            self.views[key] = view = copy.copy(self)
            # No `views`: that dict refers to the view, and a circle of references would keep its memory too long.
            view.scratch, view.views = make_scratch(), None
        return self.views[key]

    def forward(self, run: PromptPass | DecodePass, cache: "Cache", tap=None):
        """Runs the layers over the rows of a pass; the result is in `scratch.x`. tap(name, array) is called after the
        embedding and after every layer."""
        for _ in self.layer_by_layer(run, cache, tap):
            pass

    def layer_by_layer(self, run: PromptPass | DecodePass, cache: "Cache", tap=None):
        """What `forward` does, as a generator: yields the number of each layer when its work is queued."""
        x, table, tap = self.scratch.x, self.embeddings, tap or (lambda name, array: None)
        if self.first_layer == 0:
            embedding.embed(self.card, table.format, x, run.rows.ids, table.values, table.scales, run.rows.n, table.k)
            for row, seen in run.pictures:
                self.card.copy(x[row:row + len(seen)], seen)
            tap("embedding", x)
        for index, layer in enumerate(self.layers, self.first_layer):
            part = "decode" if isinstance(run, DecodePass) else "prefill"
            getattr(layer.mixer, part)(self, run, cache.kept[index])
            getattr(layer.mlp, part)(self, run)
            tap(f"layer {index}", x)
            yield index

    def compute_logits(self, rows: Rows, x: Array):
        """logits[:n] = head(norm(x[:n])), n = rows.n; the other fields of `rows` are not read. After a prompt's pass,
        too, the decode family computes the logits, so that the head always rounds in the same way."""
        stack = Stack(((0, self.head),), self.head.n)
        self.multiply_normed(DecodePass(rows, rows.n), stack, self.head_norm, x, self.logits)

    # ---- what the layers share ----

    def is_fused(self, stack: Stack) -> bool:
        """Whether one decode kernel computes the norm and the whole stack: only if the stack is one Matrix."""
        (_, matrix), *others = stack.parts
        return matrix.is_quantized and not others and not (self.gemv and matrix.format == "Q8_0")

    def project_norm(self, run: PromptPass | DecodePass, stack: Stack, weight: Array) -> Projected:
        """The products of a stack with RMSNorm(residual stream)."""
        s = self.scratch
        self.multiply_normed(run, stack, weight, s.x, s.projected)
        return Projected(s.projected, stack.stride)

    def project_norm_finely(self, run: PromptPass, stack: Stack, weight: Array, n_columns: int) -> Projected:
        """As `project_norm`, with activations of 16 bits for the first n_columns columns: a second product adds what
        rounding to 8 bits has lost."""
        card, s, n, u = self.card, self.scratch, run.rows.n, self.scratch.activations[self.config.hidden_dim]
        found = self.project_norm(run, stack, weight)
        if not any(matrix.is_quantized for _, matrix in stack.parts):
            return found
        norm.rms_norm(card, u.x, norm.NormInput(s.x, weight, self.config.norm_eps), n, u.k)
        quantize.quantize_rest(card, u.quantized, u.x, n, u.k)
        for column, matrix in stack.parts:
            if matrix.is_quantized and column < n_columns:
                rows = matrix.rows(0, min(matrix.n, n_columns - column))
                self.project(run, found.values[column:], rows, u, add=True, stride=stack.stride)
        return found

    def multiply_normed(self, run: PromptPass | DecodePass, stack: Stack, weight: Array, x: Array, y: Array):
        """y = RMSNorm(x) W^T, each matrix of the stack into its own columns of y."""
        card, n, normed = self.card, run.rows.n, norm.NormInput(x, weight, self.config.norm_eps)
        matrices = [matrix for _, matrix in stack.parts]
        u = self.scratch.activations[matrices[0].k]
        if isinstance(run, DecodePass) and self.is_fused(stack):
            matrix, = matrices
            q8_gemv.norm_gemv(card, decoder_of(matrix), y, stack.stride, matrix, normed, u.quantized, n,
                              products=self.products)
            return
        if any(matrix.is_quantized for matrix in matrices):
            norm.rms_norm_quantize(card, u.quantized, normed, n, u.k)
        if not all(matrix.is_quantized for matrix in matrices):
            norm.rms_norm(card, u.x, normed, n, u.k)
        for column, matrix in stack.parts:
            self.project(run, y.reshape(-1)[column:], matrix, u, stride=stack.stride)

    def project(self, run: PromptPass | DecodePass, y: Array, matrix: Matrix, u: Activation, add: bool = False,
                stride: int = 0):
        """y = u W^T, or y += u W^T with `add`, by a kernel of the pass's family. Rows of y begin `stride` numbers
        apart, by default matrix.n."""
        card, n_rows, stride, decodes = self.card, run.rows.n, stride or matrix.n, isinstance(run, DecodePass)
        if matrix.is_quantized:
            arguments = y, stride, matrix, u.quantized, n_rows, add
            own = self.gemv if decodes else self.gemm
            if own and matrix.format == "Q8_0":
                own(card, *arguments)
            elif decodes:
                q8_gemv.gemv(card, decoder_of(matrix), *arguments, products=self.products)
            else:
                self.products.multiply(*arguments, concurrent=run.shares_card)
        else:
            product = float_matmul.gemv_float if decodes else float_matmul.gemm_float
            product(card, y, stride, matrix, u.x, n_rows, add)


class Cache:
    """The memory of a range of layers: pages behind a block table, and the states of slots and checkpoints."""

    def __init__(self, card: Card, config: Config, blocks: range, sizes: CacheSizes):
        """blocks: the layers, and behind the last one the draft block if there is one (`Model.numbers`)."""
        self.card, self.n_slots, self.max_pages = card, sizes.n_slots, sizes.max_pages
        kinds = {index: mixer_kind(config, index) for index in blocks}
        self.block_table = card.zeros((sizes.n_slots, sizes.max_pages), np.int32, "block table")
        self.pages = {index: kind.alloc(card, config, sizes.n_pages, self.block_table, f"layer {index}")
                      for index, kind in kinds.items() if kind.keeps is Pages}
        recurrent = [index for index, kind in kinds.items() if kind.keeps is States]
        self.states = DeltaNet.alloc(card, config, len(recurrent), sizes.n_slots + sizes.n_checkpoints)
        heads = gdn.LinearHeads(config.n_key_heads, config.n_value_heads)
        self.pending = Pending.allocate(card, len(recurrent), sizes.n_slots, heads)
        self.lags = card.zeros(sizes.n_slots, np.int32, "lags of rotary positions")     # see engine/sight.py
        self.targets = card.upload(np.full(sizes.n_slots, -1, np.int32), "rows for the next checkpoints")
        self.recurrent = {index: self.states.layer(i) for i, index in enumerate(recurrent)}
        pending = {index: (self.recurrent[index], self.pending.layer(i)) for i, index in enumerate(recurrent)}
        self.kept = self.pages | pending            # what each layer keeps
        self.host = {}              # number of a checkpoint in host memory -> its two arrays, pinned

    def set_lag(self, slot: int, lag: int):
        self.card.copy_in(self.lags[slot:slot + 1], np.array([lag], np.int32))

    def reset(self, slot: int):
        """Clear the recurrent states of a slot. Pages need no clearing: a row reads keys and values only up to its own
        position."""
        if self.recurrent:
            checkpoint.clear_states(self.card, self.states, slot)

    def set_pages(self, slot: int, pages: list[int]):
        """Tell the card which pages hold the slot's tokens, 64 each, in order."""
        row = np.zeros(self.max_pages, np.int32)
        row[:len(pages)] = pages
        self.card.copy_in(self.block_table[slot], row)

    def aim(self, slot: int, number: int | None):
        """When the slot's tokens next fill a page, its states become checkpoint `number`. None: they do not."""
        row = -1 if number is None else self.n_slots + number
        self.card.copy_in(self.targets[slot:slot + 1], np.array([row], np.int32))

    def keep(self, places: Places, n: int):
        """Of n slots, those whose tokens have just filled a page get the checkpoint that `aim` has named."""
        if self.recurrent:
            checkpoint.keep_states(self.card, self.states, self.pending, places, self.targets, n)

    def save(self, slot: int, number: int):
        """The states of a slot become checkpoint `number`."""
        self._copy(self.n_slots + number, slot)

    def restore(self, number: int, slot: int):
        """Checkpoint `number` becomes the states of a slot."""
        self._copy(slot, self.n_slots + number)

    def _copy(self, to: int, source: int):
        if self.recurrent:
            checkpoint.copy_states(self.card, self.states, to, source)

    def pin(self, host: int):
        """Take page-locked host memory for checkpoint number `host`, if the number is used for the first time. Raises
        CardError."""
        if host not in self.host:
            self.host[host] = [self.card.pinned((states.shape[0], *states.shape[2:]), np.float32)
                               for states in self.states]

    def spill(self, number: int, host: int):
        """Copy a checkpoint to host memory."""
        for there, states in zip(self.host[host], self.states):
            for layer in range(len(there)):
                self.card.copy_out(there[layer], states[layer][self.n_slots + number])

    def fetch(self, host: int, number: int):
        """Copy a checkpoint back from host memory."""
        for there, states in zip(self.host[host], self.states):
            for layer in range(len(there)):
                self.card.copy_in(states[layer][self.n_slots + number], there[layer])


# ======================================================================================================
# 6  Stages
# ======================================================================================================
# A stage is a range of layers on one card. Every card has a worker (engine/worker.py), the only thread that gives the
# card work: a Pipeline posts the methods of its stages to their workers as tasks.

CHECKED_WEIGHTS = 1 << 22   # `Engine.use` compares products on random matrices of at most so many weights


class StepShape(NamedTuple):
    """How large a decode step is. Each step shape has a recording."""

    n: int                      # answers
    width: int = 1              # rows of each: its latest token, and drafts
    n_drafts: int = 0           # most drafts that the draft block makes for the next step
    log_probs: bool = False

    @property
    def n_reports(self) -> int:
        """How many rows get log-probabilities."""
        return self.n * self.width * self.log_probs


@dataclass(frozen=True)
class Batch:
    """The records of a group's answers on a card (kernels/advance.py), and the rows of their decode step. outcomes: of
    the latest steps, in buffers that are used in turn."""

    answers: Array
    inputs: Array
    outcomes: list[Array]


class PromptRows(NamedTuple):
    """The rows of a prompt's pass: n tokens of a slot, from position `start` on. numbers: of the checkpoints that get
    the states after the last row."""

    slot: int
    start: int
    n: int
    numbers: list[int]
    copies: list            # see engine/sight.py (Seen)
    is_sparse: bool = False


NO_ROWS = PromptRows(0, 0, 0, [], [])


class Stage:
    """A range of layers on one card: weights, caches, scratch memory, and the launches of decode steps, recorded.

    Token ids enter the first stage, hidden states go from each stage to the next, and the last stage's sampler turns
    logits into token ids.
    """

    def __init__(self, worker: Worker, config: Config, weights, layers: range, demand: Demand, chunk: int | None = None,
                 progress=iter, packed_bytes: int = 0):
        """chunk: the most tokens of a prompt's pass; by default what fits. packed_bytes: of weights, see
        `Card.packed`."""
        card = worker.card
        self.worker, self.card, self.config, self.layers, self.n_slots = worker, card, config, layers, demand.slots
        free, self.step_rows = card.free_bytes, 1 if config.pooling else step_rows(demand.slots, demand.drafts)
        blocks = range(layers.start, layers.stop + config.n_nextn * (demand.drafts > 0 and not self.hands_on))
        eyes = demand.eyes if not layers.start else None
        with (weights.loading(card) as loader, host_table.loading(weights, loader, demand.table_on_host),
              expert_store.loading(weights, loader, config, blocks, demand, self.step_rows) as self.store,
              card.packed(packed_bytes)):
            self.sight = eyes and eyes.load(card, config.hidden_dim, demand.n_ctx)
            self.model = Model(loader, config, layers, progress, drafts=demand.drafts > 0, wish=demand.products)
        self.weight_bytes = free - card.free_bytes
        self.table_bytes = host_table.bytes_of(self.model)
        work, self.layer_works = self.model.work(), [layer.work for layer in self.model.layers]
        self.page_bytes, self.state_bytes = work.page_bytes, work.state_bytes
        self.costs = StageCosts(card, config.hidden_dim, work, in_one=self.store is not None,
                                products=self.model.products)
        hops = (layers.start > 0) + self.hands_on
        chunk = chunk or self.costs.chunk_that_fits(pages_for(demand.n_ctx), demand.slots + demand.least_checkpoints,
                                                    self.model.row_bytes() + 2 * hop_bytes(config.hidden_dim, hops))
        self.chunk = min(chunk, pages_for(demand.n_ctx) * PAGE_TOKENS)
        self.max_rows = max(self.chunk, self.step_rows, HEAD_ROWS)
        self.gallery = self.sight.allocate(card, self.chunk) if self.sight else Gallery(0, 0)
        self.model.allocate(self.max_rows, self.step_rows, pages_for(demand.n_ctx))
        if demand.sparse != "off":
            self.model.chooser = block_sparse.Chooser.alloc(card, (config.n_heads, config.n_kv_heads, config.head_dim),
                                                            self.chunk, pages_for(demand.n_ctx), demand.slots)
        self.sampler = None
        if self.model.head:
            self.sampler = Sampler(card, demand, config.n_vocab, self.max_rows)
            self.first = card.alloc((1, advance.N_ANSWER), np.int32, "the answer that gets its first token")
        # A prompt's pass has inputs of its own, because a batch keeps its inputs from one step to the next.
        # INPUTS + 1: a micro-batch views the inputs from its own first row on, so its view ends later.
        self.inputs = card.alloc((INPUTS + 1) * self.max_rows, np.int32, "ids, slots and positions of a prompt's pass")
        self.incoming, self.outgoing = (
            [card.alloc((self.max_rows, config.hidden_dim), np.float32, f"{name} hidden states")
             for _ in range(2 * is_there)]
            for name, is_there in (("incoming", layers.start > 0), ("outgoing", self.hands_on)))
        self.entry = self.exit = None   # the Edges to the stages beside this one, see `Pipeline`
        self.cache = None               # see `allocate`
        # One more: the rows after the last whole page may be a micro-batch of their own.
        self.streams = [card.stream(f"micro-batch {i}") for i in range(MICRO_BATCHES + 1)]
        self.recordings = Recordings(card)
        self.prompt = NO_ROWS           # of the pass that was begun last
        self.layers_left = self.pictures_left = None    # PassInParts: of that pass, and of the encoding begun last

    @property
    def hands_on(self) -> bool:
        """Whether another stage follows."""
        return self.layers.stop < self.config.n_layers

    def release(self):
        """Drop what refers to memory of the card, so that it is freed even if a thread that hangs holds the stage."""
        if self.store:
            self.store.close()
        self.model = self.sampler = self.cache = self.inputs = self.first = self.entry = self.exit = self.store = None
        self.layers_left = self.pictures_left = self.sight = None
        for held in self.incoming, self.outgoing, self.batches, self.recordings:
            held.clear()

    def allocate(self, sizes: CacheSizes, n_groups: int = 1):
        """Take the memory of the cache, whose size depends on what the weights leave, and of the inputs of the decode
        steps of each group of answers."""
        self.cache = self.card.in_one_allocation(Cache, self.config, self.model.numbers, sizes)
        if self.sampler:
            self.sampler.allocate(n_groups)
        self.batches = [self.new_batch(group) for group in range(n_groups)]

    def new_batch(self, group: int) -> Batch:
        card, n = self.card, self.n_slots
        outcomes = [each.outcomes for each in self.sampler.results[group]] if self.sampler else [
            card.zeros((n, advance.N_OUTCOME), np.int32, "outcomes of the last stage")]
        return Batch(card.alloc((n, advance.N_ANSWER), np.int32, "answers of a decode step"),
                     card.alloc(INPUTS * self.step_rows, np.int32, "ids, slots and positions of a decode step"),
                     outcomes)

    # ---- what the worker queues ----

    def run_pass(self, before: Task | None, freed: Task | None, n: int, work, *arguments):
        """Queue this stage's part of a pass of n rows: the hop in, work(stage, *arguments), the hop out. Returns the
        event of the hop out; on the last stage, what work returns. before: the previous stage's task for this pass.
        freed: see `Edge.send`."""
        if self.entry:
            self.entry.receive(n, before.result())
        found = work(self, *arguments)
        return self.exit.send(n, freed) if self.exit else found

    def queue_prompt(self, ids, slot: int, start: int, marks, seen: Seen | None, tap, n_layers: int | None = None,
                     is_sparse: bool = False):
        """Queue a pass over consecutive tokens of a slot. The hidden states stay in the model's scratch.x until the
        next pass. marks: (tokens of the pass, number of the checkpoint that is taken after them). seen: of pictures.
        n_layers: queue only so many layers of the pass; `continue_prompt` queues the others. Returns their Span."""
        n, (rope, copies) = len(ids), seen or (None, [])
        set_rows(self.inputs, ids, [slot] * n, range(start, start + n), rope)
        inside = tuple(Mark(end, slot, self.n_slots + number) for end, number in marks if end < n)
        self.prompt = PromptRows(slot, start, n, [number for end, number in marks if end == n], copies, is_sparse)
        begin = self.card.default_stream.record()
        span = self._queue_part(self.launch_prompt, n, inside, tap, n_layers, is_last=n_layers is None)
        return span or Span([begin], self.card.default_stream.record())

    def queue_pictures(self, placed, n_pieces: int | None) -> Span:
        """Queue the encoding of pictures into rows of the Sight, or only n_pieces of it. placed: None: go on with the
        encoding that was begun last."""
        if placed is not None:
            self.pictures_left = PassInParts(self.card.default_stream, [], self.sight.launch(placed))
        with self.card.span("pictures"):
            return self.pictures_left.queue_timed(n_pieces)

    def continue_prompt(self, n_layers: int | None) -> Span:
        """Queue n_layers more of the pass that `queue_prompt` has begun, or all that are left."""
        return self._queue_part(self.layers_left.queue_timed, n_layers, is_last=n_layers is None)

    def _queue_part(self, launch, *arguments, is_last: bool):
        slot, start, n, numbers, *_ = self.prompt
        with self.card.span(f"slot {slot}, {n} tokens from {start} on"):
            span = launch(*arguments)
            if is_last and self.model.block:
                self.model.block.prefill(self.model, self.prompt_pass(0, n, n), self.cache)
        for number in numbers if is_last else ():
            self.cache.save(slot, number)
        if is_last:
            self.prompt = NO_ROWS       # other users of the inputs may set rows at any position
        return span

    def queue_first_choice(self, row: int, answer, n_drafts: int, log_probs: bool):
        """Queue the choice of an answer's first token from row `row` of the prompt's pass that was queued last, and
        n_drafts drafts of what follows. answer: its record, with the place of that row. Returns what
        `Sampler.read_back` does."""
        slot, position = answer[advance.SLOT], answer[advance.POSITION]
        x, buffer = self.model.scratch.x[row:row + 1], self.sampler.next_buffer(FIRST_TOKENS)
        self.card.copy_in(self.first, np.array([answer], np.int32))
        set_rows(self.inputs, [0], [slot], [position])      # of this row, the sampler reads slot and position
        rows, results = rows_of(self.inputs, 1), self.sampler.results[FIRST_TOKENS][buffer]
        self.model.compute_logits(rows, x)
        self.sampler.launch(self.model.logits, rows, 1, results, log_probs)
        self.launch_drafts(x, results.outcomes, self.first, (1, 1, n_drafts))
        return self.sampler.read_back(FIRST_TOKENS, buffer, 1, log_probs)

    def score_prompt(self, tokens) -> np.ndarray:
        """The reports (kernels/logprobs.py), uint32 [n, REPORT], of n tokens: token i is the one that follows row i of
        the prompt's pass that was queued last. Waits until they are computed."""
        sampler, n = self.sampler, len(tokens)
        self.card.copy_in(sampler.prompt_tokens[:n], np.array(tokens, np.int32))
        for row in range(0, n, HEAD_ROWS):
            end = min(row + HEAD_ROWS, n)
            self.model.compute_logits(rows_of(self.inputs, end - row), self.model.scratch.x[row:end])
            logprobs.logprobs(self.card, sampler.prompt_reports[row:end], self.model.logits,
                              sampler.prompt_tokens[row:end], sampler.log_probs, end - row, sampler.n_vocab)
        return self.card.download(sampler.prompt_reports[:n])

    def read_logits(self, row: int, n: int) -> np.ndarray:
        """The logits of n rows, from `row` on, of the prompt's pass that was queued last."""
        self.model.compute_logits(rows_of(self.inputs, n), self.model.scratch.x[row:row + n])
        return self.card.download(self.model.logits[:n])

    def set_batch(self, answers: np.ndarray, group: int):
        """Set the answers of a group's next decode step, int32 [n, N_ANSWER]. Clears the outcomes of former steps."""
        batch = self.batches[group]
        self.card.copy_in(batch.answers[:len(answers)], answers)
        for outcomes in batch.outcomes:
            self.card.fill(outcomes, 0)

    def receive_tokens(self, tokens: Tokens | None, n: int, group: int):
        """On all cards but the last: wait for the outcomes of the group's previous step, and queue their copy to where
        `launch_inputs` reads them. This card and the last one may be idle meanwhile."""
        if self.hands_on and tokens is not None:
            self.card.copy_in(self.batches[group].outcomes[0][:n], tokens.arrived())

    def queue_step(self, tokens: Tokens | None, shape: StepShape, group: int):
        """Queue a decode step: `queue_layers` and `queue_choice` in one recording."""
        self.receive_tokens(tokens, shape.n, group)
        buffer = self.sampler.next_buffer(group) if self.sampler else 0
        self.replay(shape, self.launch_step, shape, group, buffer)
        return self.sampler and self.sampler.read_back(group, buffer, shape.n, shape.n_reports)

    def queue_layers(self, tokens: Tokens | None, shape: StepShape, group: int):
        """Queue the layers of a group's next decode step. Its rows are the answers of `set_batch`, or the tokens chosen
        since then."""
        self.receive_tokens(tokens, shape.n, group)
        before = self.sampler.latest[group] if self.sampler else 0
        self.replay(shape, self.launch_layers, shape.n, shape.width, group, before)

    def queue_choice(self, shape: StepShape, group: int):
        """Queue the choice of the tokens that follow the rows of `queue_layers`. They enter the next step."""
        buffer = self.sampler.next_buffer(group)
        self.recordings.of(self.launch_choice, shape, group, buffer).replay()
        return self.sampler.read_back(group, buffer, shape.n, shape.n_reports)

    def replay(self, shape: StepShape, launch, *arguments):
        """Queue a recording of a step's layers. Between two steps, experts may move."""
        if self.store:
            self.store.before_step()
        self.recordings.of(launch, *arguments).replay()
        if self.store:
            self.store.after_step(shape.n * shape.width)

    # ---- launches ----

    def launch_prompt(self, n: int, marks=(), tap=None, n_layers: int | None = None):
        """A pass over the n rows of the inputs, in micro-batches; the first n_layers of it, or all. A tap sees all rows
        at once, so with a tap there is one micro-batch."""
        sizes, batch, queued = self.costs.micro_batches(n), None, []
        if tap or len(sizes) == 1:
            layers = self.model.layer_by_layer(self.prompt_pass(0, n, n, marks), self.cache, tap)
            self.layers_left = PassInParts(self.card.default_stream, [], layers)
        else:
            for (start, rows), stream in zip(with_starts(sizes), self.streams):
                batch = MicroBatch(stream, batch)
                run = self.prompt_pass(start, rows, n, marks, batch)
                queued.append(batch.queue(self.model.behind(start).layer_by_layer(run, self.cache)))
            # Layer by layer: otherwise the last micro-batch could begin only when all layers of the others are queued.
            layers = itertools.zip_longest(*queued)
            self.layers_left = PassInParts(self.card.default_stream, self.streams[:len(sizes)], layers)
        return self.layers_left.queue() if n_layers is None else self.layers_left.queue_timed(n_layers)

    def launch_micro_batches_in_sequence(self, n: int):
        """Like `launch_prompt`, in one stream, because a recording has one: the micro-batches follow each other."""
        for start, rows in with_starts(self.costs.micro_batches(n)):
            self.model.behind(start).forward(self.prompt_pass(start, rows, n), self.cache)

    def prompt_pass(self, start: int, n: int, n_all: int, marks=(), batch: MicroBatch | Alone = Alone) -> PromptPass:
        """The pass, or micro-batch, over n of the n_all rows of the inputs, from row `start` on."""
        inside = tuple(mark._replace(end=mark.end - start) for mark in marks if start < mark.end <= start + n)
        rows = dataclasses.replace(rows_of(self.inputs[start:], n_all), n=n)
        pictures = self.sight.shown(self.prompt.copies, start, n) if self.sight else ()
        at = self.prompt.start + start
        return PromptPass(rows, inside, pictures, n < n_all, batch, at if self.prompt.is_sparse else None,
                          n_keys=at + n if self.prompt.n else None)

    def launch_step(self, shape: StepShape, group: int, buffer: int):
        before = (buffer - 1) % BUFFERS if self.sampler else 0
        self.launch_layers(shape.n, shape.width, group, before)
        if self.sampler:
            self.launch_choice(shape, group, buffer)

    def launch_inputs(self, n: int, width: int, group: int, before: int) -> Rows:
        """The rows of a step of n answers, from the outcomes of the step before, in the buffer `before`. Answers whose
        tokens have filled a page get their checkpoint."""
        batch, rows = self.batches[group], rows_of(self.batches[group].inputs, n * width)
        advance.advance(self.card, rows, batch.answers, batch.outcomes[before], self.cache.pending.accepted,
                        self.cache.lags, n, width)
        self.cache.keep(rows.places, n)
        return rows

    def launch_layers(self, n: int, width: int, group: int, before: int):
        rows, model = self.launch_inputs(n, width, group, before), self.model.for_steps()
        model.forward(DecodePass(rows, n, width), self.cache)
        if self.sampler:
            model.compute_logits(rows, model.scratch.x)

    def launch_choice(self, shape: StepShape, group: int, buffer: int):
        batch, results = self.batches[group], self.sampler.results[group][buffer]
        rows = rows_of(batch.inputs, shape.n * shape.width)
        self.sampler.launch(self.model.logits, rows, shape.n, results, shape.log_probs)
        self.launch_drafts(self.model.step_scratch.x, results.outcomes, batch.answers, shape[:3])

    def launch_drafts(self, x: Array, outcomes: Array, answers: Array, sizes: tuple[int, int, int]):
        """The drafts of the next step. x: what the layers have made of the rows of this step. sizes: answers, width,
        and the most drafts of the draft block."""
        if self.model.block:
            self.model.block.draft(self.model.for_steps(), x, outcomes, answers, sizes, self.cache)
        self.sampler.continue_drafts(outcomes, answers, sizes[0])

    # ---- kernels ----

    def needed_kernels(self) -> dict:
        """The kernels that any prompt and any answer will run, as `Card.collecting` has them."""
        with self.card.collecting() as needed:
            self.launch_all()
        return needed

    def record(self):
        """Record the usual decode steps, so that no request waits for it."""
        sizes = [n for n in (1, 2, 4, 8) if n <= self.n_slots]          # other sizes are recorded when they come
        buffers = range(BUFFERS if self.sampler else 1)
        for group, n, buffer in itertools.product(range(len(self.batches)), sizes, buffers):
            self.recordings.of(self.launch_step, StepShape(n), group, buffer)

    def launch_all(self):
        """Launch every kernel that a prompt or an answer of any length may need. The results are of no use."""
        lengths = self.launch_passes()
        if self.sight:
            self.sight.rehearse()
        if self.model.block:
            for n in {min(n, PIECE) for n in lengths}:
                self.model.block.prefill(self.model, self.prompt_pass(0, n, n), self.cache)
        steps = {(n, 1) for n in range(1, self.n_slots + 1)} | {(1, width) for width in range(1, CHECK_ROWS + 1)}
        steps |= {(n, width) for n, width in {n * width: (n, width) for n in range(1, self.n_slots + 1)
                                              for width in range(1, widest(n, self.step_rows) + 1)}.values()}
        for n, width in sorted(steps):
            self.launch_step(StepShape(n, width, width - 1, True), 0, 0)
        if self.sampler:
            for n in range(1, HEAD_ROWS + 1):
                self.model.compute_logits(rows_of(self.inputs, n), self.model.scratch.x)
        self.cache.reset(0)
        self.cache.save(0, 0)

    def launch_passes(self):
        """Launch every kernel of the layers that a prompt may need. Returns the lengths of the passes."""
        few = min(self.chunk, CHUNK)    # beyond CHUNK rows, the kernels depend on the number of pages alone
        lengths = *range(1, min(few, 64)), *range(64, few + 1, 8), *range(CHUNK, self.chunk + 1, PAGE_TOKENS)
        batches = [self.costs.micro_batches(n) for n in lengths]
        for n, shares_card in sorted({(n, len(sizes) > 1) for sizes in batches for n in sizes}):
            run = dataclasses.replace(self.prompt_pass(0, n, n), shares_card=shares_card)
            self.model.forward(run, self.cache)
        if self.model.chooser:          # one page of queries that chooses keys; the kernel is the same for more rows
            self.model.forward(dataclasses.replace(run, sparse_from=block_sparse.RULE.dense * PAGE_TOKENS), self.cache)
        return lengths

    def product_checks(self, gemv, gemm) -> list:
        """The arguments of each `own_products.check_product` that `Engine.use` asks for."""
        model = self.model
        weights = [matrix for part in (*model.blocks, model.head, model.block and model.block.eh_proj)
                   if part for matrix in matrices(part)]
        shapes = {(matrix.n, matrix.k) for matrix in weights if matrix.format == "Q8_0"}
        products = (gemv, {1, HEAD_ROWS, self.step_rows}), (gemm, {1, PAGE_TOKENS + 1})
        return [(self.card, product, min(n, CHECKED_WEIGHTS // k), k, n_rows, add)
                for product, rows in products if product
                for (n, k), n_rows, add in itertools.product(shapes, rows, (False, True))]

    def replace_products(self, gemv, gemm):
        """See `Engine.use`. What was recorded before is forgotten."""
        self.card.synchronize()                     # after this, nothing replays the recordings any more
        self.recordings.clear()
        self.model.gemv, self.model.gemm = gemv, gemm
        self.model.views.clear()                    # the views have the former products


class PoolingStage(Stage):
    """A stage of a pooling model. Its passes are over parts of several texts (engine/packing.py), and the last stage
    sums rows of the result, which go to the host. Nothing is decoded."""

    def allocate(self, sizes: CacheSizes, n_groups: int = 1):
        """See `Stage.allocate`. The host may be up to 2 n_groups passes behind with reading sums."""
        card, c, n_spans = self.card, self.config, most_spans(self.chunk, self.n_slots)
        self.cache = card.in_one_allocation(Cache, c, self.model.numbers, sizes)
        self.group = c.n_heads // c.n_kv_heads
        n_tiles = attention.most_tiles(self.chunk, self.n_slots + len(self.streams), self.group)
        self.tiles = card.alloc((n_tiles, 3), np.int32, "tiles of packed attention")
        self.tiles_from = {}            # first row of a micro-batch -> its tiles, of the pass that is queued
        self.batches = []
        if not self.hands_on:
            self.spans = card.alloc((n_spans, 2), np.int32, "spans of rows")
            self.sums = card.alloc((n_spans, c.hidden_dim), np.float32, "sums of rows")
            self.on_host = itertools.cycle([card.pinned(self.sums.shape, np.float32) for _ in range(2 * n_groups)])

    def release(self):
        super().release()
        self.tiles = self.tiles_from = self.spans = self.sums = self.on_host = None

    def queue_packed(self, packed: Packed):
        """Queue a pass. Returns the event at its end; on the last stage, the sums on the host and the event after which
        they are there."""
        card, n, n_spans = self.card, packed.inputs.shape[1], len(packed.spans)
        card.copy_in(self.inputs[:packed.inputs.size], packed.inputs.reshape(-1))
        card.copy_in(self.cache.block_table, packed.table)
        self.set_tiles(packed)
        self.launch_prompt(n)
        if self.hands_on:
            return card.default_stream.record()
        on_host = next(self.on_host)[:n_spans]
        if n_spans:
            card.copy_in(self.spans[:n_spans], packed.spans)
            self.launch_sums(n_spans)
            card.copy_out(on_host, self.sums[:n_spans])
        return on_host, card.default_stream.record()

    def set_tiles(self, packed: Packed):
        """The tiles of each micro-batch of a pass."""
        sizes, end = self.costs.micro_batches(packed.inputs.shape[1]), 0
        for start, rows in with_starts(sizes):
            tiles = attention.tiles_of(*packed.cut(start, start + rows), self.group)
            self.tiles_from[start] = self.tiles[end:end + len(tiles)]
            self.card.copy_in(self.tiles_from[start], tiles)
            end += len(tiles)

    def prompt_pass(self, start: int, n: int, n_all: int, marks=(), batch: MicroBatch | Alone = Alone) -> PackedPass:
        run = super().prompt_pass(start, n, n_all, marks, batch)
        return PackedPass(**vars(run), tiles=self.tiles_from.get(start, self.tiles))

    def launch_sums(self, n_spans: int):
        normed = norm.NormInput(self.model.scratch.x, self.model.head_norm, self.config.norm_eps)
        pool.pool(self.card, self.sums, normed, self.spans, n_spans, self.config.hidden_dim)

    def launch_all(self):
        """See `Stage.launch_all`."""
        self.launch_passes()
        if not self.hands_on:
            self.launch_sums(1)

    def record(self):
        """There are no decode steps."""


def stage_class(config: Config) -> type[Stage]:
    return PoolingStage if config.pooling else Stage


def with_starts(sizes: list[int]):
    """(start, size) of parts of these sizes that follow each other."""
    return zip(itertools.accumulate(sizes, initial=0), sizes)


class Pipeline:
    """The stages in order, and what crosses from card to card. Several passes over prompts, or decode steps of several
    groups of answers, are in the stages at once, so that all cards work at the same time.

    Everything is queued and happens in the order of the calls. So a slot or a page may go to the next request as soon
    as all work of the request before is queued; it need not have run.
    """

    def __init__(self, stages: list[Stage], sizes: CacheSizes):
        self.stages, self.last = stages, stages[-1]
        self.n_stages, self.n_groups = len(stages), group_count(len(stages), sizes.n_slots)
        self.fault: Fault | None = None
        self.error: BaseException | None = None     # the exception behind the fault
        self.on_fault = lambda: None            # set by the Scheduler
        self.failing = threading.Lock()         # guards fault and error: only the first failure counts
        for stage in stages:
            stage.worker.on_fault = self.fail
            stage.worker.ask(stage.allocate, sizes, self.n_groups).result()
        for upstream, downstream in itertools.pairwise(stages):
            Edge(upstream, downstream)          # sets upstream.exit and downstream.entry
        self.queued = collections.deque()       # the prompt passes that `prefill` has not waited for, oldest first
        self.chosen = [None] * self.n_groups    # each group's last Tokens; None if the next step begins from `place`
        self.slowest = slowest_seconds([stage.costs for stage in stages])
        self.gallery = stages[0].gallery

    def load_kernels(self, tell=None):
        """Load the kernels that any prompt and any answer will run, card by card: what is compiled for the first card
        serves the others, too. The calling thread compiles, not a worker, so that Ctrl-C can end it. With `tell`, a
        progress bar is shown; if stderr is no terminal, tell(sentence) is called instead."""
        for stage in self.stages:
            worker, needed = stage.worker, stage.worker.ask(stage.needed_kernels).result()
            with tqdm.tqdm(desc="compiling kernels", total=len(needed), unit="kernel", leave=False,
                           disable=None if tell else True) as bar:
                stage.card.compile_kernels(needed, lambda name: (bar.set_postfix_str(name), bar.update()),
                                           tell if bar.disable else None)
            for kernel in needed:
                worker.ask(stage.card.load_kernel, *kernel).result()
            worker.ask(stage.record).result()

    def follow_script(self, texts: dict[int, list[int]] | None):
        """From now on, a slot's drafts are the tokens of its text at the same positions. None: drafters make drafts
        again. For tests and benchmarks."""
        self.last.worker.ask(self.last.sampler.follow_script, texts).result()
        self.last.worker.ask(self.last.recordings.clear).result()

    def use(self, gemv, gemm, check) -> list:
        """See `Engine.use`. Calls `check` for each product and shape, and returns the results."""
        found = [stage.worker.ask(check, *case).result() for stage in self.stages
                 for case in stage.product_checks(gemv, gemm)]
        for stage in self.stages:
            stage.worker.ask(stage.replace_products, gemv, gemm).result()
        return found

    def fail(self, worker: Worker, error: BaseException):
        """Stop everything at the first failure. All tasks end with its error, so every thread that waits for one gets
        it."""
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
        with contextlib.suppress(Exception):    # a card that has failed raises its error again
            self.settle()
        stop_all([stage.worker for stage in self.stages], CardError("the engine was closed"))
        expert_store.close(self.stages)

    # ---- slots, pages, checkpoints ----

    def on_all(self, work):
        """Have work(stage) done by every stage's worker."""
        for stage in self.stages:
            stage.worker.post(work, stage)

    def prepare_slot(self, slot: int, request: Request, number: int | None = None, lag: int = 0):
        """Make a slot ready for a new sequence. Its states begin as those of checkpoint `number`, or as zeros. lag: of
        its rotary positions in decode steps."""
        self.on_all(lambda stage: stage.cache.set_lag(slot, lag))
        if self.last.model.chooser:
            self.on_all(lambda stage: stage.model.chooser.forget(slot))
        if number is None:
            self.on_all(lambda stage: stage.cache.reset(slot))
        else:
            self.on_all(lambda stage: stage.cache.restore(number, slot))
        self.last.worker.post(self.last.sampler.prepare_slot, slot, request)
        if block := self.last.model.block:
            self.last.worker.post(block.forget, slot, request.prompt_ids)

    def set_pages(self, slot: int, pages: list[int]):
        pages = list(pages)                     # as they are now
        self.on_all(lambda stage: stage.cache.set_pages(slot, pages))

    def save(self, slot: int, number: int):
        """Keep a slot's states as checkpoint `number`. Its rows so far are those of a prompt."""
        self.on_all(lambda stage: stage.cache.save(slot, number))

    def aim(self, slot: int, number: int | None):
        """When the slot's tokens next fill a page, its states become checkpoint `number`. None: they do not."""
        self.on_all(lambda stage: stage.cache.aim(slot, number))

    def spill(self, number: int, host: int) -> bool:
        """Copy checkpoint `number` to number `host` in host memory. False if no more memory can be page-locked."""
        try:
            for stage in self.stages:
                stage.cache.pin(host)
        except CardError:
            return False
        self.on_all(lambda stage: stage.cache.spill(number, host))
        return True

    def fetch(self, host: int, number: int):
        """Copy checkpoint `host` in host memory back to the cards, as checkpoint `number`."""
        self.on_all(lambda stage: stage.cache.fetch(host, number))

    # ---- passes over prompts ----

    def run(self, n: int, work, *arguments, post=Worker.post) -> list[Task]:
        """Have work(stage, *arguments) done by every stage for its part of a pass of n rows."""
        tasks = [None]
        for stage in self.stages:
            freed = stage.exit and stage.exit.receipts[0]
            tasks.append(post(stage.worker, stage.run_pass, tasks[-1], freed, n, work, *arguments))
            if stage.entry:
                stage.entry.receipts.append(tasks[-1])
        return tasks[1:]

    def prefill(self, ids, slot: int, start: int, marks=(), n_pieces: int | None = None, tap=None,
                seen: Seen | None = None, is_sparse: bool = False):
        """A pass over a prompt: tokens of `slot` at positions start, start + 1, ...; start is a multiple of 64.
        marks: (tokens of the pass, number of the checkpoint to take after them), ascending; the tokens are a multiple
        of 64. n_pieces: queue only so many of the pieces that `piece_seconds` tells of; `continue_prefill` queues the
        others. On one card this returns a task that gives the Span of what is queued. With a tap it returns when all is
        queued, or raises what the tap has raised. seen: of pictures, whose encoding must be queued."""
        arguments = ids, slot, start, marks, seen, tap, n_pieces, is_sparse
        if n_pieces is not None:
            return self.last.worker.post(self.last.queue_prompt, *arguments)
        if tap:
            self.run(len(ids), Stage.queue_prompt, *arguments, post=Worker.ask)[-1].result()
            return None
        self.queued.append(task := self.run(len(ids), Stage.queue_prompt, *arguments)[-1])
        # The host stays few passes ahead, so that a cancellation stops the cards soon. Two for each stage: a card
        # computes one while another one crosses a link, and crossing may take as long as computing.
        if len(self.queued) >= 2 * len(self.stages):
            self.last.worker.wait(self.queued.popleft().result().end)
        return task if len(self.stages) == 1 else None

    def encode(self, placed: list | None, n_pieces: int | None = None) -> Task:
        """Queue the encoding of pictures on the first card, or only n_pieces of it. placed: what `Gallery.place`
        returns; None: go on with the encoding begun last. Returns a task that gives the Span."""
        return self.stages[0].worker.post(self.stages[0].queue_pictures, placed, n_pieces)

    def show(self, pictures: PromptPictures, start: int, end: int) -> Seen | None:
        """Queue the encoding of the pictures in tokens start to end of a prompt. Returns the `seen` of `prefill`."""
        if placed := pictures.place(start, end, self.gallery):
            self.encode(placed)
        return pictures.seen(start, end, self.gallery)

    def blame(self, pictures: PromptPictures, placed) -> RequestError | None:
        """The error that ends a request with a NaN, see `Sight.blame`. placed: pictures not encoded to their end."""
        first = self.stages[0]
        return first.worker.ask(first.sight.blame, pictures, self.gallery, placed).result()

    def encoding_seconds(self, placed) -> list[float]:
        """About how long each piece of an encoding takes."""
        return self.stages[0].sight.seconds(placed, self.stages[0].costs.speed)

    def continue_prefill(self, n_pieces: int | None = None) -> Task:
        """Queue n_pieces more of a pass that `prefill` has begun, or all that are left. A task that gives the Span."""
        return self.last.worker.post(self.last.continue_prompt, n_pieces)

    def piece_seconds(self, rows: int, start: int, is_sparse: bool = False) -> list[float]:
        """About how long each piece of a pass takes. Decode steps may run between two pieces. On one card each layer is
        a piece. Several cards hand on whole passes, so there a pass is one piece."""
        if len(self.stages) > 1:
            return [self.slowest(rows, start, is_sparse)]
        return self.last.costs.layer_seconds(rows, start, self.last.layer_works, is_sparse)

    def pass_rows(self, start: int, end: int, limit: int, last: int, is_sparse: bool = False) -> int:
        """Tokens of the next pass over a prompt, as `choose_rows`."""
        slowest = functools.partial(self.slowest, is_sparse=is_sparse)
        return choose_rows(start, end, limit, len(self.stages), slowest, last)

    def sample_row(self, row: int, answer, n_drafts: int = 0, log_probs: bool = False) -> Tokens:
        """The first token of an answer, from row `row` of the pass queued last. answer: its record, see `answer_of`,
        with the position of that row."""
        return Tokens(self.last.worker.post(self.last.queue_first_choice, row, answer, n_drafts, log_probs))

    def score(self, tokens: list[int]) -> Task:
        """A task that gives the reports of tokens of a prompt, as `Stage.score_prompt`."""
        return self.last.worker.post(self.last.score_prompt, tokens)

    def logits(self, row: int, n: int) -> np.ndarray:
        """The logits [n, n_vocab] after rows `row`, `row` + 1, ... of the pass queued last."""
        return self.last.worker.ask(self.last.read_logits, row, n).result()

    def pool(self, packed: Packed) -> Task:
        """Queue a pass over parts of several texts, of a pooling model. A task that gives the sums of its spans on the
        host, float32 [spans, hidden_dim], and the event after which they are there."""
        return self.run(packed.inputs.shape[1], PoolingStage.queue_packed, packed)[-1]

    # ---- decode steps of a group of answers ----

    def place(self, answers, group: int = 0):
        """Set the answers of the decode steps that follow: one record each, see `answer_of`."""
        answers = np.array(answers, np.int32)
        self.on_all(lambda stage: stage.set_batch(answers, group))
        self.chosen[group] = None

    def step(self, shape: StepShape, group: int = 0) -> Tokens:
        """Queue a decode step of the group's answers. The tokens that it chooses are the inputs of the next step, see
        kernels/advance.py."""
        tokens = Tokens(self.run_step(group, shape.n * shape.width, Stage.queue_step, shape)[-1])
        self.chosen[group] = tokens
        return tokens

    def forward(self, shape: StepShape, group: int = 0):
        """The first part of a step, which needs only the tokens of the step before: the layers."""
        self.run_step(group, shape.n * shape.width, Stage.queue_layers, shape)

    def run_step(self, group: int, n_rows: int, work, shape: StepShape) -> list[Task]:
        """`run` for a step that goes on from the tokens of the group's last step. `Tokens.read` waits until the first
        stage has taken these tokens."""
        tokens = self.chosen[group]
        tasks = self.run(n_rows, work, tokens, shape, group)
        if tokens is not None:
            tokens.taken = tasks[0]
        return tasks

    def catch_up(self, answers, group: int):
        """Take the checkpoints of answers whose tokens have filled a page, which their next step would take. After this
        the group needs a `place`."""
        self.place(answers, group)
        self.on_all(lambda stage: stage.launch_inputs(len(answers), 1, group, 0))

    def constrain(self, constraints: dict[int, Constraint], drafts: dict[int, list[int]], width: int):
        """Slots choose their next tokens from what their constraints allow. drafts: those of the step, by slot. A slot
        that has drafts and no constraint may choose any token."""
        self.last.sampler.make_masks(constraints, drafts)
        self.last.worker.post(self.last.sampler.send_masks, list(constraints), set(drafts) - set(constraints), width)

    def choose(self, shape: StepShape, group: int = 0) -> Tokens:
        """The second part of a step: its tokens are chosen, under the masks that `constrain` has sent."""
        tokens = self.chosen[group] = Tokens(self.last.worker.post(self.last.queue_choice, shape, group))
        return tokens


# ======================================================================================================
# 7  Scheduler
# ======================================================================================================

LEAST_FORCED = 3            # fewer are not worth a check: the host must have read the step in flight before it
TURN = "<|im_start|>"       # the control token at which a turn of a conversation begins
NAN_LOGITS = "the logits hold a NaN: the model file is damaged, or a kernel is wrong"


@dataclass(frozen=True)
class Flight:
    """A queued decode step, or the end of a prompt: its sequences, and the tokens that it will choose."""

    sequences: list[Sequence]
    tokens: Tokens
    ticket: Ticket
    width: int = 1
    replays: bool = True        # whether a step of this shape was recorded before


@dataclass
class Progress:
    """A pass over a prompt that is being queued: tokens from `start` to `end`. placed: if not empty, no pass is queued,
    but the encoding of these pictures (`Gallery.place`). marks: (position, number of the checkpoint that is taken
    there). pieces: the seconds of each piece that is not queued yet (`Pipeline.piece_seconds`)."""

    sequence: Sequence
    start: int
    end: int
    marks: list[tuple[int, int]]
    pieces: list[float]
    placed: list | tuple = ()
    has_begun: bool = False


def wants_log_probs(sequences: list[Sequence]) -> bool:
    return any(s.generation.request.top_logprobs is not None for s in sequences)


class Scheduler(Rounds):
    """Decides what the cards do next. Its thread repeats `run_round`: admit requests, queue one pass of one prompt,
    queue decode steps. `waiting` holds Generations, `running` holds Sequences.

    engine/turns.py says which prompt gets the next pass, which rounds belong to running answers alone, and how many
    layers of a pass are queued between two decode steps. Each round ends cancelled requests. The queue has no limit;
    the HTTP server limits its open requests. Requests are admitted in the order of arrival, each when a slot and all
    pages that its prompt and answer can need are available. A page is available if it is free or only kept for later
    prompts, and not promised to a running sequence. So a running sequence never lacks a page, and no request waits for
    ever.

    The prefix tree is searched only when a prompt's first pass is due, not when the prompt arrives. So of several
    similar prompts that arrive together, the later ones find the beginning that the first one has computed. A prompt
    whose turn it is, and whose next page another prompt is going to compute, gives its turn to that prompt.

    A decode step is queued before the host has read the tokens of the step before. One card takes these tokens from its
    own memory and does not wait for the host; between cards a worker copies them. If such a token ends its sequence,
    the queued step computes one row in vain. That does no harm: the row writes only into the slot and pages of the
    ended sequence, and all work of their next owner is queued later. If an answer has a grammar, the host reads the
    tokens while the layers of the next step run, and queues the choice after that.

    Several cards work on several things at the same time. The answers form as many groups as there are stages: while
    one group's step is on the first card, another group's step is on the second. A round with a pass of a prompt steps
    only one group, since a step that is queued after a pass waits for the pass. The next prompt begins before the first
    token of the previous one has arrived. One card has one group. No token depends on the grouping.
    """

    def __init__(self, pipeline: Pipeline, cache: PrefixCache, tokenizer: Tokenizer, n_slots: int, n_ctx: int,
                 chunk: int, pace: Pace):
        super().__init__(pipeline)
        self.cache, self.tokenizer = cache, tokenizer
        self.n_slots, self.n_ctx, self.chunk, self.pace = n_slots, n_ctx, chunk, pace
        self.free_slots = list(reversed(range(n_slots)))
        self.flights: list[Flight | None] = [None] * pipeline.n_groups  # the step in flight of each group
        self.landed_at: list[float | None] = [None] * pipeline.n_groups    # when a step landed right before this flight
        # The width of each group's next step, for which its latest step makes drafts by the draft block.
        self.planned = [1] * pipeline.n_groups
        self.recorded = set()           # (group, result buffer, shape) of the steps for which there was a recording
        self.n_steps = [0] * pipeline.n_groups
        self.first_tokens = collections.deque()     # the Flights that end prompts
        self.next_groups = itertools.cycle(range(pipeline.n_groups))
        self.turns = Turns(pipeline.n_stages)
        self.progress: Progress | None = None       # the pass over a prompt that is queued in part
        self.encoding: Progress | None = None       # the encoding queued in part; other prompts get passes meanwhile
        self.totals = dict.fromkeys(("requests", "cache_hits", "prompt_tokens", "cached_tokens", "generated_tokens",
                                     "keys_read", "keys_seen"), 0)

    def running_jobs(self) -> list[Generation]:
        return [s.generation for s in self.running]

    def stats(self) -> dict:
        """Counts, as `Engine.stats` has them."""
        cache = self.cache
        return self.totals | expert_store.counts_of(self.pipeline.stages) | {
            "requests_running": len(self.running), "requests_waiting": len(self.waiting), "slots": self.n_slots,
            "kv_pages": cache.n_pages, "kv_pages_free": len(cache.free_pages), "kv_pages_cached": cache.n_idle,
            "kv_pages_used": cache.n_pages - cache.n_available,
            "checkpoints": len(cache.on_card) + len(cache.in_host),
            "checkpoints_on_card": cache.n_checkpoints - len(cache.free_numbers),
            "checkpoints_spilled": cache.n_spilled, "checkpoints_fetched": cache.n_fetched,
            "checkpoints_dropped": cache.n_dropped,
            "drafts_checked": tuple(self.pace.n_checked), "drafts_accepted": tuple(self.pace.n_accepted)}

    @contextlib.contextmanager
    def between_steps(self, leaves_pictures: bool = False):
        """See Rounds. First, a pass that is queued in part is queued to its end, because the caller may overwrite its
        scratch memory; so is an encoding, unless leaves_pictures: the caller needs neither the tower nor its rows."""
        with super().between_steps():
            while run := self.progress or (None if leaves_pictures else self.encoding):     # an encoding adds its pass
                self._queue_part(run, len(run.pieces))
            yield

    @contextlib.contextmanager
    def borrow_slot(self, n_tokens: int, leaves_pictures: bool = False):
        """Context manager for work outside the queue: gives a Sequence with a free slot and pages for so many tokens,
        and the caller has the pipeline to itself. Raises RequestError if every slot is taken or too few pages are left,
        and EngineStopped after a failure or the end."""
        with self.between_steps(leaves_pictures):
            if not self.free_slots:
                raise RequestError("slots", "every slot is taken by a running request")
            if pages_for(n_tokens) > self._unpromised_pages():
                raise RequestError("slots", f"running requests leave too few KV pages for {n_tokens} tokens")
            sequence = Sequence(Generation(Request([]), self.tokenizer), self.free_slots.pop(), pages_for(n_tokens),
                                self.cache.roots[False])
            try:
                self._reserve(sequence, n_tokens)
                yield sequence
            finally:
                self._release(sequence)

    def run_round(self):
        """Admit what fits. Queue a pass of a prompt, or a part of one, and a decode step of one group of answers. If no
        prompt has a turn, queue a decode step of every group."""
        self._drop_ended()
        self._admit()
        prompt = self._next_prompt()
        if prompt is not None:
            self._prefill(prompt)
        goes_on = prompt is not None and any(s.in_prompt for s in self.running)
        self._land_first_tokens(len(self.flights) - 1 if goes_on else 0)
        self._form_groups()
        for group in range(len(self.flights)) if prompt is None else [next(self.next_groups)]:
            self.decode(group)

    def _next_prompt(self) -> Sequence | None:
        """The sequence whose prompt gets a pass now. None if all prompts are computed, or if answers have their
        turn."""
        prompts = [s for s in self.running if s.in_prompt]
        if not self._has_answers():
            self.turns.stand_alone()
        elif not self.turns.may_pass:
            return None
        if not prompts:
            return None
        if self.progress:
            return self.progress.sequence
        chosen = self.turns.choose(prompts, self.cache.tokens_left)
        return next((s for s in prompts if chosen.follows(s)), chosen)

    def _has_answers(self) -> bool:
        return any(s.is_answer for s in self.running)

    def _drop_ended(self):
        """End the requests that were cancelled or have taken longer than they may."""
        for sequence in [s for s in self.running if s.generation.is_over()]:
            self._finish(sequence, sequence.generation.overdue())
        with self.changed:
            for generation in [g for g in self.waiting if g.is_over()]:
                self.waiting.remove(generation)
                generation.close(generation.overdue())

    def _admit(self):
        """Give slots to the requests that have waited longest, as far as there are slots and pages for them."""
        while self.free_slots:
            with self.changed:
                if not self.waiting:
                    return
                n_pages = self._pages_wanted(self.waiting[0].request)
                if n_pages > self._unpromised_pages():
                    return
                root = self.cache.roots[self.waiting[0].is_sparse]
                self.running.append(Sequence(self.waiting.popleft(), self.free_slots.pop(), n_pages, root))
                self.pace.join(self.running[-1].generation.drafts, self.running[-1].generation.request.draft)
            self.totals["requests"] += 1

    def _pages_wanted(self, request: Request) -> int:
        """Pages of the prompt and of the longest answer that the request allows."""
        longest = self.n_ctx if request.max_tokens is None else len(request.prompt_ids) + request.max_tokens
        return pages_for(min(longest, self.n_ctx))

    def _unpromised_pages(self) -> int:
        return self.cache.n_available - sum(s.n_pages - len(s.pages) for s in self.running)

    def _prefill(self, sequence: Sequence):
        """Queue the next pass of a prompt, or a part of it. If the prompt still shows pictures, an encoding that was
        begun is completed first."""
        if not sequence.has_begun:
            self._begin(sequence)
        run = self.progress or (self.encoding if sequence.pictures.after(sequence.n_computed) else None)
        self._queue_part(run or self._plan_pass(sequence))

    def _plan_pass(self, sequence: Sequence) -> Progress:
        """The next pass of a prompt. Passes start at multiples of 64, so no result depends on their size."""
        start, is_sparse = sequence.n_computed, sequence.generation.is_sparse
        seconds = lambda rows: self.pipeline.piece_seconds(rows, start, is_sparse)
        limit = self.turns.most_rows(self.chunk, seconds, self._has_answers() or self.encoding is not None)
        sequence.last_pass = self.pipeline.pass_rows(start, sequence.n_prompt, limit, sequence.last_pass, is_sparse)
        end = start + sequence.last_pass
        if sequence.pictures and (placed := sequence.pictures.place(start, end, self.pipeline.gallery, self._ahead())):
            return Progress(sequence, start, start, [], self.pipeline.encoding_seconds(placed), placed)
        self._reserve(sequence, end)
        marks = [at for at in sequence.marks if start < at <= end]
        numbers = [number for _ in marks if (number := self.cache.take_number()) is not None]
        return Progress(sequence, start, end, list(zip(marks[len(marks) - len(numbers):], numbers)),
                        seconds(end - start))

    def _ahead(self) -> list:
        """The pictures that running prompts are still going to show."""
        return [picture for s in self.running if s.in_prompt and s.pictures
                for picture in s.pictures.after(s.n_prompt - self.cache.tokens_left(s))]

    def _queue_part(self, run: Progress, n_pieces: int | None = None):
        """Queue the next pieces of a pass, by default as many as have their turn."""
        has_answers, self.turns.is_encoding = self._has_answers(), bool(run.placed)
        n_pieces = n_pieces or self.turns.n_pieces(run.pieces, has_answers)
        queued, run.pieces = run.pieces[:n_pieces], run.pieces[n_pieces:]
        part = [n_pieces] if run.pieces else []         # else all that is left
        if run.placed:
            span = self.pipeline.encode(None if run.has_begun else run.placed, *part)
        elif run.has_begun:
            span = self.pipeline.continue_prefill(*part)
        else:
            marks, sequence = [(at - run.start, number) for at, number in run.marks], run.sequence
            span = self.pipeline.prefill(sequence.ids[run.start:run.end], sequence.slot, run.start, marks, *part,
                                         seen=sequence.pictures.seen(run.start, run.end, self.pipeline.gallery),
                                         is_sparse=sequence.generation.is_sparse)
        run.has_begun = True
        self.turns.add_part(sum(queued), span, has_answers)
        left = run if run.pieces else None
        self.progress, self.encoding = (None, left) if run.placed else (left, self.encoding)
        if not left:
            self._end_pass(run)

    def _end_pass(self, run: Progress):
        """All of a pass is queued: put its pages into the tree. After the last pass of a prompt, queue the choice of
        the first token."""
        sequence, start, end = run.sequence, run.start, run.end
        if run.placed:          # next comes the pass that shows these pictures, before others take their rows
            self.progress = self._plan_pass(sequence)
            return
        sequence.n_computed = sequence.generation.n_read = end
        nodes = self.cache.join(sequence, end)
        for at, number in run.marks:
            self.cache.keep(nodes[at], number)
        if not sequence.uses_cache and (following := sequence.ids[start + 1:end + 1]):
            sequence.scores.append(self.pipeline.score(following))
        if sequence.in_prompt:
            return
        if sequence.generation.is_sparse:
            sequence.counts = [stage.worker.post(stage.model.chooser.count, sequence.slot)
                               for stage in self.pipeline.stages]
        self._constrain([sequence], 1)
        if sequence in self.running:
            self._reserve(sequence, end + 1)            # the draft block keeps the token that is chosen now
            tokens = self.pipeline.sample_row(end - start - 1, sequence.answer(self.n_ctx), max(self.planned) - 1,
                                              wants_log_probs([sequence]))
            self.first_tokens.append(Flight([sequence], tokens, self.turns.add_first_token()))

    def _begin(self, sequence: Sequence):
        """Make the slot ready. The prompt goes on after its longest beginning that has a checkpoint. The last token is
        always computed, because its logits are needed."""
        generation, tokens, known = sequence.generation, sequence.tokens, 0
        generation.begin()
        if sequence.uses_cache:
            sequence.node, known = self.cache.find(tokens[:-1], sequence.node)
        sequence.pages = self.cache.enter(sequence.node)
        number = self.cache.fetch(sequence.node)
        self.pipeline.prepare_slot(sequence.slot, generation.request, number, sequence.pictures.lag)
        self.pipeline.set_pages(sequence.slot, sequence.pages)
        sequence.n_computed = generation.n_cached = generation.n_read = sequence.node.depth * PAGE_TOKENS
        sequence.marks = self._checkpoints(tokens, sequence.n_computed, known)
        sequence.has_begun = True
        self.totals["cache_hits"] += generation.n_cached > 0
        self.totals["cached_tokens"] += generation.n_cached
        self.totals["prompt_tokens"] += generation.n_prompt

    def _checkpoints(self, tokens: list[int], start: int, known: int) -> list[int]:
        """The positions in a prompt where checkpoints are taken, see `checkpoint_positions`. Where no layer has states,
        a checkpoint costs nothing, so every page gets one."""
        if any(stage.state_bytes for stage in self.pipeline.stages):
            return checkpoint_positions(tokens, self.tokenizer.control.get(TURN), start, known)
        return list(range(start + PAGE_TOKENS, len(tokens), PAGE_TOKENS))

    def _land_first_tokens(self, n_left: int):
        """Take the first tokens of answers, except the n_left queued last, which the cards still compute."""
        while len(self.first_tokens) > n_left:
            flight = self.first_tokens.popleft()
            sequence, = flight.sequences
            outcome, = flight.tokens.read().tolist()
            self.turns.land(flight.ticket)
            if sequence in self.running:
                sequence.take_scores()
                sequence.take_counts(self.totals)
                self._take_outcome(sequence, flight.tokens, [0], outcome)

    def _form_groups(self):
        """Put new answers into the smallest group. If the sizes differ by more than one, move an answer from the
        largest group to the smallest."""
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
        """Queue a decode step of a group of answers. Then read the tokens of the group's previous step. They are read
        before the step if the batch changes or if a grammar forces tokens (which become drafts), and between the layers
        and the choice of the step if a grammar rules the choice."""
        flight = self.flights[group]
        if flight and (flight.sequences != self.answering(group) or any(s.n_certain >= LEAST_FORCED
                                                                         for s in flight.sequences)):
            self._land(group)
        batch = self.answering(group)
        if not batch:
            return
        shape = self.shape(batch, group)
        if self.flights[group] is None:
            for sequence in batch:
                sequence.draft_what_is_certain()
            self.pipeline.place([s.answer(self.n_ctx) for s in batch], group)
        for sequence in batch:
            self._reach(sequence, shape.width)
        if any(s.is_ruled(s.in_flight + shape.width) for s in batch):
            self.pipeline.forward(shape, group)
            self._land(group, is_behind=True)       # the masks depend on the tokens of the step before
            self._constrain(batch, shape.width)
            tokens = self.pipeline.choose(shape, group)
        else:
            tokens = self.pipeline.step(shape, group)
            self._land(group, is_behind=True)       # takes the previous step's tokens: the flight is still that step's
        self.planned[group] = shape.n_drafts + 1
        for sequence in batch:
            sequence.in_flight = shape.width
        place = group, self.n_steps[group] % BUFFERS, shape
        replays = place in self.recorded
        self.recorded.add(place)
        self.n_steps[group] += 1
        self.flights[group] = Flight(batch, tokens, self.turns.add_step(), shape.width, replays)

    def shape(self, batch: list[Sequence], group: int) -> StepShape:
        """The shape of the group's next step."""
        width, n_drafts = self.pace.width([s.generation.drafts for s in batch]), 0
        if self.pace.has_block:             # its drafts for this step were made in the step before
            width, n_drafts = self.planned[group], width - 1
        if self.flights[group] is None and (n_certain := max(s.n_certain for s in batch)) >= LEAST_FORCED:
            width = max(width, 1 + n_certain)
        width = min(width, widest(len(batch), self.pipeline.last.step_rows))
        return StepShape(len(batch), width, n_drafts, wants_log_probs(batch))

    def _reach(self, sequence: Sequence, width: int):
        """Prepare for a step of so many rows: pages, and a checkpoint if the step may fill one."""
        longest = len(sequence.tokens) + sequence.room(self.n_ctx)
        end = min(sequence.n_computed + sequence.in_flight + width, longest)
        self._reserve(sequence, min(end + 1, longest))      # the draft block is a token ahead
        if end // PAGE_TOKENS > sequence.n_computed // PAGE_TOKENS:
            self.cache.aim(sequence)

    def answering(self, group: int) -> list[Sequence]:
        """The running sequences of the group, except those that must not have another step now."""
        return [s for s in self.running if s.group == group and not s.is_last(self.n_ctx)]

    def _land(self, group: int, is_behind: bool = False):
        """Take the tokens of the group's step in flight, except those of sequences that have ended meanwhile.
        is_behind: whether the group's next step is queued behind it."""
        flight, self.flights[group] = self.flights[group], None
        if flight is None:
            return
        outcomes, n = flight.tokens.read().tolist(), len(flight.sequences)
        self.turns.land(flight.ticket)
        self._measure(flight, group, is_behind)
        if not is_behind:           # then no later step notes what was accepted and takes the checkpoints
            filled = [answer_of(0, s.slot, s.n_computed + outcome[advance.COUNT], accepted=outcome[advance.COUNT] - 1)
                      for s, outcome in zip(flight.sequences, outcomes) if s in self.running and s.fills_page(outcome)]
            if filled:
                self.pipeline.catch_up(filled, group)
        for i, (sequence, outcome) in enumerate(zip(flight.sequences, outcomes)):
            if sequence in self.running:
                self._take_outcome(sequence, flight.tokens, range(i, n * flight.width, n), outcome)

    def _measure(self, flight: Flight, group: int, is_behind: bool):
        """Note how long a step took, if it followed another one directly, replays a recording, and no prompt's pass ran
        beside it."""
        before, now = self.landed_at[group], self.turns.landed_at
        self.landed_at[group] = now if is_behind and not self.turns.unmeasured else None
        if before is not None and self.landed_at[group] is not None and flight.replays:
            self.pace.measure(len(flight.sequences), flight.width, now - before)

    def _take_outcome(self, sequence: Sequence, tokens: Tokens, rows, outcome: list[int]):
        """Take what a step has chosen for a sequence. rows: the sequence's rows in the step."""
        count = outcome[advance.COUNT]
        if count < 0:
            expert_store.check(self.pipeline.stages)
            placed = [each for run in (self.progress, self.encoding) if run for each in run.placed]
            if sequence.pictures and (error := self.pipeline.blame(sequence.pictures, placed)):
                return self._finish(sequence, error)        # only rows of this sequence hold the NaN
            raise CardError(NAN_LOGITS)
        n_checked = sequence.land(outcome, len(rows), self.n_ctx)
        self.pace.land(sequence.generation.drafts, n_checked, count - 1, len(sequence.drafts))
        for row, token in zip(rows, outcome[advance.TOKENS:advance.TOKENS + count]):
            if sequence.is_answer:                  # the token before this one was computed by the row
                sequence.n_computed += 1
                if sequence.n_computed % PAGE_TOKENS == 0:
                    self.cache.keep_decoded(sequence)
            self._take(sequence, tokens, row, token)
            if sequence not in self.running:
                return

    def _reserve(self, sequence: Sequence, n_tokens: int):
        """Give a sequence pages for its first n_tokens, out of the pages that were promised to it."""
        missing = pages_for(n_tokens) - len(sequence.pages)
        if missing > 0:
            sequence.pages += self.cache.take_pages(missing)
            self.pipeline.set_pages(sequence.slot, sequence.pages)

    def _constrain(self, sequences: list[Sequence], width: int):
        """Tell the cards what the rows of the next step may choose. A sequence whose grammar has failed ends."""
        ruled = [s for s in sequences if s in self.running and s.is_ruled(width)]
        for sequence in ruled:
            sequence.is_masked = sequence.generation.constraint.binds(width - 1)
        if ruled:
            self.pipeline.constrain({s.slot: s.generation.constraint for s in ruled if s.is_masked},
                                    {s.slot: s.drafts[:width - 1] for s in ruled}, width)
        for sequence in ruled:
            if error := sequence.generation.constraint.error:
                self._finish(sequence, error)

    def _take(self, sequence: Sequence, tokens: Tokens, row: int, token: int):
        """Hand a new token of a sequence, from row `row` of `tokens`, to its reader. After the last token the slot is
        free."""
        generation, request = sequence.generation, sequence.generation.request
        if constraint := generation.constraint:
            constraint.take(token)
            if error := constraint.error:
                self._finish(sequence, error)
                return
        finish_reason = None
        ends = request.stop_token_ids if request.ignore_eos else {*request.stop_token_ids, *self.tokenizer.eos_ids}
        if constraint and constraint.ended or token in ends:
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
        for run in [run for run in (self.progress, self.encoding) if run and run.sequence is sequence]:
            self.cache.free_numbers += [number for _, number in run.marks]      # the rest of the pass is never queued
            if run.placed:
                self.pipeline.gallery.forget(run.placed)
            self.progress, self.encoding = (self.progress, None) if run is self.encoding else (None, self.encoding)
        self._release(sequence)
        sequence.generation.close(error)

    def _release(self, sequence: Sequence):
        self.cache.leave(sequence)
        self.free_slots.append(sequence.slot)


# ======================================================================================================
# 8  Engine
# ======================================================================================================

class Engine(TextOnly, TextEngine):
    """A loaded model, for notebooks, the command line and the server.

        engine = qengine.load()             # the small model that comes with qengine, or name a file
        print(engine.generate("Once upon a time", max_tokens=32))
    """

    def __init__(self, opened: "OpenModel", pipeline: Pipeline, sizes: CacheSizes, planner: Planner):
        self.opened, self.config = opened, opened.config
        self.tokenizer, self.template = opened.tokenizer, opened.template
        self.name, self.details = opened.config.name, ModelDetails.of(opened.weights)
        self.pipeline, self.n_slots, self.chunk = pipeline, sizes.n_slots, planner.plan.chunk
        self.n_ctx, eyes = planner.demand.n_ctx, planner.demand.eyes
        self.sparse, self.eyes = planner.demand.sparse, eyes and eyes.reader(self.n_ctx)
        self.cards, self.spare = [stage.card for stage in pipeline.stages], planner.spare  # spare: opened, not used
        self.layers = [stage.layers for stage in pipeline.stages]      # of each card
        cache = PrefixCache(pipeline, sizes.n_pages, sizes.n_checkpoints, sizes.n_host_checkpoints)
        pace = Pace(planner.demand.drafts, pipeline.last.model.block is not None)
        self.scheduler = Scheduler(pipeline, cache, self.tokenizer, sizes.n_slots, self.n_ctx, self.chunk, pace)
        self.pipe_meter = PipeMeter(pipeline, self.scheduler)
        self.scheduler.thread.start()

    @property
    def reason(self) -> str | None:
        """Why the engine has stopped, a sentence; None while it works."""
        return self.scheduler.reason

    @property
    def fault(self) -> Fault | None:
        """What has stopped the engine, the card at fault if there is one, and when; None while it works."""
        return self.scheduler.fault

    @property
    def counts_pipes(self) -> bool:
        """Whether `count_pipes` works: only if all layers are on one emulated card."""
        return self.pipe_meter.can_count()

    def count_pipes(self) -> dict | None:
        """The work of a decode step of running answers by execution pipe, as `engine.pipes.PipeMeter.count` has it."""
        return self.pipe_meter.count()

    def submit(self, request: Request) -> Generation:
        """Start a request. Raises RequestError or EngineStopped."""
        request.check(self.config.n_vocab, self.n_ctx)
        pictures = pictures_of(request.prompt_ids, request.pictures, self.eyes)
        constraint = None
        if request.grammar is not None:
            constraint = Constraint(self.vocabulary, request.grammar, request.grammar_after)
            if constraint.error:
                raise constraint.error
        generation = Generation(request, self.tokenizer, constraint_of(request, self.tokenizer, constraint), pictures)
        generation.is_sparse = is_sparse(request, self.sparse)
        self.scheduler.submit(generation)
        return generation

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary as grammars need it. The first grammar makes it: a large one takes a second."""
        return Vocabulary(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt. Raises RequestError, see `encode_prompt`."""
        return encode_prompt(self.tokenizer, text, self.n_ctx)

    def marks(self) -> list[int]:
        """The marks of all beginnings of prompts that need not be computed again (engine/prefix.py)."""
        return self.scheduler.cache.marks()

    generate = talk.generate                        # the text that follows a text
    chat, stream = talk.chat, talk.stream           # the answer to a conversation, which may hold pictures
    look, evaluate, logit_rows = look.look, look.evaluate, look.logit_rows      # attention, hidden states, logits
    counting = display.counting                     # what kernels do, by kernel and pipe, on emulated cards
    __repr__, _repr_html_ = display.in_a_line, display.as_html

    def stats(self) -> dict:
        """Counts of this moment: requests_running, requests_waiting, slots; kv_pages, which are kv_pages_used (by
        running requests), kv_pages_cached (for later prompts) or kv_pages_free; checkpoints, and how many of them are
        checkpoints_on_card. Counts since the start: requests, prompt_tokens, cached_tokens (those of prompts that were
        not computed), cache_hits (requests with cached tokens), generated_tokens, keys_seen (pages of keys before the
        queries of sparse prompts, over layers and KV heads), keys_read (those read), checkpoints_spilled (to host
        memory), checkpoints_fetched (back from it), checkpoints_dropped (for want of room); and, as tuples with a count
        for each position of a draft in its check, drafts_checked and drafts_accepted."""
        return self.scheduler.stats()

    def clear_cache(self):
        """Forget all prompts, pictures and answers, except those of running requests. Raises EngineStopped."""
        with self.scheduler.between_steps():
            self.scheduler.cache.clear()
            self.pipeline.gallery.clear()

    def use(self, gemv=None, gemm=None, approximate: bool = False,
            question: str = own_products.QUESTION) -> own_products.Report | None:
        """Use functions of yours for the products of Q8_0 matrices. Without arguments the engine uses its own again.

        gemv is called as `gemv_q8_q8` (kernels/q8_gemv.py) is, for decode steps and the output head. gemm is called as
        `gemm_q8_q8` (kernels/q8_gemm.py) is, for prompts, also for micro-batches that run side by side in streams of
        their own. Before anything changes, each function is compared with the reference on random matrices of the
        model's shapes; those of large shapes have fewer rows. ValueError says where a function is wrong. Running
        answers go on with the new functions.

        approximate: numbers may differ by more than rounding. Then the Report tells how large the errors are, how the
        answer to `question` changes, and how fast the engine was before and is now.
        """
        if approximate:
            self.use()                              # compare with the engine's own functions, not with earlier ones
        before = own_products.run(self, question) if approximate else None
        with self.scheduler.between_steps():
            check = own_products.error_of if approximate else own_products.check_product
            errors = self.pipeline.use(gemv, gemm, check)
            self.pipeline.load_kernels()
            self.pipe_meter.forget()
            self.scheduler.cache.clear()            # what is kept was computed by other kernels
            self.pipeline.gallery.clear()
        return own_products.Report.of(errors, before, own_products.run(self, question)) if approximate else None

    def close(self, grace: float = 0.0):
        """Close the engine. New requests are refused, and running ones get `grace` seconds to finish."""
        self.scheduler.close(grace)
        self.pipeline.close()
        if self.eyes:
            self.eyes.close()


@dataclass(frozen=True)
class OpenModel:
    """A model whose metadata is read and checked, and whose weights are not loaded yet."""

    config: Config
    tokenizer: Tokenizer
    template: ChatTemplate | RerankTemplate | None
    weights: Weights
    source: str | Path          # what was opened, by the user's name for it

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def kind(self) -> str:
        """What the model is for: "text", "embedding" or "reranking"."""
        return {None: "text", "rank": "reranking"}.get(self.config.pooling, "embedding")

    def keeping(self, kv: str | None) -> "OpenModel":
        """This model with a KV cache in the format `kv` (kernels/kv_formats.py), if given. Raises RequestError."""
        return self if kv is None else dataclasses.replace(self, config=keeping(self.config, kv))

    def demand(self, ctx: int | None = None, draft: int | str = "auto", mmproj: str | Path | None = None,
               image_tokens: tuple[int, int] | None = None, **wishes) -> Demand:
        """What the arguments of `load` ask for. Raises RequestError, ModelError."""
        eyes = open_eyes(eyes_file(mmproj, self, note), image_tokens, self)
        demand = Demand(self.n_ctx(ctx), drafts=most_drafts(draft), eyes=eyes, **wishes)
        return for_pooling(demand) if self.config.pooling else demand

    def n_ctx(self, ctx: int | None) -> int:
        """Tokens of a slot: `ctx` if given, else DEFAULT_CTX, or the model's own context length if that is less.
        Raises RequestError."""
        return min(self.config.context_length, DEFAULT_CTX) if ctx is None else check_whole("ctx", ctx)


def open_model(model: str | Path) -> OpenModel:
    """Open a GGUF file, one of the Hub by a name of engine/hub.py ("hf:OWNER/NAME:Q4_K_M"), or random weights by the
    name "synthetic:NAME" or "synthetic:NAME:FORMAT". Nothing is put on a card yet. Raises ModelError."""
    if model == DEFAULT_MODEL and not DEFAULT_MODEL.exists():
        raise ModelError(f"{model}: the model that comes with qengine is not there; name another (-m MODEL)")
    kind, _, name = str(model).partition(":")
    if kind == "synthetic":
        name, _, format = name.partition(":")
        if (format := format.upper() or "Q8_0") not in FORMATS:
            raise ModelError(f"{model}: there is no such format, only {', '.join(FORMATS).lower()}"
                             + "; +mtp goes with the size: synthetic:9b+mtp:q4_k" * format.endswith("+MTP"))
        config = dataclasses.replace(Config.synthetic(name), name=str(model))
        weights = SyntheticWeights(tensor_shapes(config), format, config.architecture)
        tokenizer = ByteTokenizer(config.n_vocab)
        templates = {None: lambda: ChatTemplate(SYNTHETIC_TEMPLATE, tokenizer.control),
                     "rank": lambda: RerankTemplate(SYNTHETIC_RERANK)}
        return OpenModel(config, tokenizer, templates.get(config.pooling, lambda: None)(), weights, model)
    gguf = GGUF(local_path(model, note))
    config = Config.from_gguf(gguf)
    check_model(config, gguf)
    tokenizer = load_tokenizer(gguf)
    kind = {None: ChatTemplate, "rank": RerankTemplate}.get(config.pooling)
    return OpenModel(config, tokenizer, kind and kind.from_gguf(gguf, tokenizer), FileWeights(gguf), model)


def load(model: str | Path | OpenModel = DEFAULT_MODEL, card: str | Card | list[Card] | None = None,
         ctx: int | None = None, slots: int = 1, chunk: int | None = None, progress: bool = True,
         kv_tokens: int | None = None, checkpoint_memory: int | None = None, *,
         checkpoint_host_memory: int | None = None, split: tuple[int, ...] | None = None,
         draft: int | str = "auto", expert_memory: int | None = None, products: str = "auto", memory: int | None = None,
         kv: str | None = None, sparse: str = "off", mmproj: str | Path | None = None,
         image_tokens: tuple[int, int] | None = None) -> Engine | Pooling:
    """Load a GGUF file, one of the Hub by the name "hf:OWNER/NAME:Q4_K_M", or random weights by the name
    "synthetic:9b:q4_k", ready to generate. Of an embedding or a reranking model, a Pooling engine (engine/packing.py).

    model: its path or name, or what `open_model` made of that; by default the model that comes with qengine.
    card: a Card, a list of Cards that share the layers, or a name for `kernels.open.open_cards`. By default the first
    NVIDIA card if the model fits on it, else all NVIDIA cards; an emulated card if there is none. split: layers on each
    card, (22, 21, 21); by default what `place_layers` finds.
    ctx: tokens of a slot, prompt and answer together, or of a text. slots: answers that are generated at the same time.
    chunk: tokens of a prompt per pass at most, a multiple of 64 to 8,192; by default what suits card and model.
    progress: print the cards and a progress bar on stderr. memory: bytes of each card for engines (`Card.limit`).
    kv_tokens: size of the KV cache in tokens, for all slots and for prompts to come, at least ctx; checkpoint_memory,
    checkpoint_host_memory: bytes for states from which prompts to come go on. Defaults: `plan.choose_sizes`.
    draft: most drafts of an answer in a decode step, 0 to 7; "off" is 0, "auto" is as many as pay. expert_memory: bytes
    of each card for experts (engine/expert_store.py); by default for all. products: which kernels multiply rows of
    prompts, "dp4a", "tensor" or "auto" (kernels/products.py). kv: a format of kernels/kv_formats.py. sparse: whether
    long prompts leave out keys (kernels/block_sparse.py): "off", "ask" if a request asks, "on" unless it refuses.
    mmproj: file of the vision tower, "synthetic", "none"; by default its own. image_tokens: fewest, most of a picture.
    Raises ModelError, RequestError, CompileError, CardError (OutOfMemory shows what did not fit, and what would).
    """
    opened = (model if isinstance(model, OpenModel) else open_model(model)).keeping(kv)
    demand = opened.demand(ctx, draft, slots=slots, chunk=chunk, kv_tokens=kv_tokens, split=split, memory=memory,
                           expert_memory=expert_memory, products=products, mmproj=mmproj, image_tokens=image_tokens,
                           checkpoint_memory=checkpoint_memory, checkpoint_host_memory=checkpoint_host_memory,
                           sparse=sparse)
    planner = measured_planner(opened, card, demand)
    config, cards, free = opened.config, planner.cards, sum(card.free_bytes for card in planner.cards)
    if progress:
        for card, layers in zip(cards, planner.plan.layers):
            note(f"card: {card.describe()}" + f", layers {layers.start} - {layers.stop - 1}" * (len(cards) > 1))
            if said := Products.of(card, demand.products).describe(opened.weights.formats()):
                note(f"products of prompts: {said}")
        if demand.n_ctx > config.context_length:
            note(f"warning: the model was made for {config.context_length} tokens of context, not {demand.n_ctx}; "
                 "what comes after those may make no sense")
    stages = load_stages(opened, planner, progress)
    sizes = choose_sizes(stages, planner.plan.demand)
    try:
        pipeline = Pipeline(stages, sizes)
        pipeline.load_kernels(note if progress else None)
    except BaseException as error:
        stop_all([stage.worker for stage in stages], error)
        raise
    if progress:
        taken, where = free - sum(card.free_bytes for card in cards), f"the card{'s' * (len(cards) > 1)}"
        note(f"model: {config.name}, {parameters(tensor_shapes(config), config)}; "
             f"{show_bytes(taken)} on {where}, {demand.contexts} tokens of context included")
        for said in [f"experts: {stage.store}" for stage in stages if stage.store] + planner.plan.spared:
            note(said)
    if progress and not config.pooling:
        note(f"cache: {sizes.n_pages * PAGE_TOKENS:,} tokens of context in all{sizes.shortage}, "
             f"{sizes.n_checkpoints} checkpoints of {show_bytes(sum(stage.state_bytes for stage in stages))} on "
             f"{where}, up to {sizes.n_host_checkpoints} in host memory")
    return (Pooling if config.pooling else Engine)(opened, pipeline, sizes, planner)


def load_stages(opened: OpenModel, planner: Planner, progress: bool) -> list[Stage]:
    """The stages as planned, with their weights on the cards. All cards are filled at the same time. If one fails, the
    others stop at their next layer."""
    plan, demand, failures = planner.plan, planner.plan.demand, []
    workers = [Worker(card) for card in planner.cards]

    def load_stage(worker, layers, on_paper):
        return stage_class(opened.config)(worker, opened.config, opened.weights, layers, demand, plan.chunk,
                                          functools.partial(counted, worker), on_paper.card.packed_bytes)

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
                   disable=not progress or None) as bar:
        loading = [worker.post(load_stage, worker, layers, on_paper)
                   for worker, layers, on_paper in zip(workers, plan.layers, plan.on_paper)]
        try:
            return [task.result() for task in loading]
        except BaseException as error:
            failures.append(error)              # Ctrl-C
            for task in loading:                # wait until all are over and the memory of their stages is free
                with contextlib.suppress(CardError):
                    task.wait()
            stop_all(workers, failures[0])
            raise failures[0] from None


class PlannedModel:
    """A model on paper: the Blueprint of engine/plan.py. format: if given, the plan is made as if each matrix whose row
    length is a multiple of the format's block were in this format."""

    def __init__(self, config: Config, weights: Weights, format: str | None = None):
        def type_of(name):
            return format if format and fits_blocks(weights.shapes[name], format) else weights.type_of(name)

        self.config, self.weights, self.on_paper = config, weights, Weights(weights.shapes, type_of)
        self.name, self.n_layers, self.hidden_dim, self.kv = config.name, config.n_layers, config.hidden_dim, config.kv
        self.context_length, self.parameters = config.context_length, parameters(weights.shapes, config)

    def stage(self, card: Card, layers: range, demand: Demand, chunk: int | None) -> Stage:
        return stage_class(self.config)(Worker(card), self.config, self.on_paper, layers, demand, chunk)

    def formats(self) -> list[str]:
        return self.weights.formats()

    def layer(self, card: Card, index: int) -> Work:
        with self.on_paper.loading(card) as loader:
            return Layer.load(loader, self.config, index).work

    def head_bytes(self, card: Card) -> int:
        if self.config.pooling:
            return 0
        before = card.free_bytes
        with self.on_paper.loading(card) as loader:
            loader.matrix("token_embd.weight" if self.config.tied_embeddings else "output.weight")
        return before - card.free_bytes

    def changed(self, format: str | None = None, kv: str | None = None) -> "PlannedModel":
        return PlannedModel(keeping(self.config, kv or self.kv), self.weights, format)


def measured_planner(opened: OpenModel, card: str | Card | list[Card] | None, demand: Demand) -> Planner:
    """As `make_planner`, for a model that fits, on cards that have been measured. A card whose products of prompts were
    not measured yet is measured now, and the plan is made anew. The cards of the plan then avoid throttled
    instructions."""
    cards, formats = open_named(card), opened.weights.formats()

    def plan():
        planner = make_planner(opened, cards, demand)
        if not planner.plan.fits and gc.collect():      # a closed engine holds memory until its circles are found
            planner = make_planner(opened, cards, demand)
        planner.check()
        for each in planner.cards:
            each.replace(probe.saved_replacements(each))
        return planner

    planner = plan()
    if demand.products == "auto" and any([measure_products(each, formats) for each in planner.cards]):
        planner = plan()
    return planner


def make_planner(opened: OpenModel, card: str | Card | list[Card] | None, demand: Demand) -> Planner:
    """The Planner of a model on the cards that `load` would take. Raises RequestError, CardError."""
    cards, model = open_named(card), PlannedModel(opened.config, opened.weights)
    if isinstance(cards, Candidates) and demand.split:
        n = len(demand.split)
        return Planner(model, cards[:n], demand, cards[n:])
    if isinstance(cards, Candidates) and len(cards) > 1:
        first = Planner(model, cards[:1], demand, cards[1:])
        if first.plan.fits and first.demand == demand:      # with all experts on the card, if there are any
            return first
    return Planner(model, cards, demand)


class Candidates(list):
    """Cards for a model: it takes the first one if it fits there, else all of them."""


def open_named(card: str | Card | list[Card] | None) -> list[Card]:
    """The cards that `load` was given or that its argument names; Candidates for None."""
    if isinstance(card, (Card, list)):
        return [card] if isinstance(card, Card) else card
    return Candidates(open_cards(card)) if card is None else open_cards(card)


def note(text: str):
    """A line for the person at the terminal; stdout is for answers."""
    print(text, file=sys.stderr, flush=True)
