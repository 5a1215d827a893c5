"""A mixture of experts in the place of an MLP: a router picks a few of many small MLPs for each row.

    u   = norm(x)
    w   = softmax(router u)                         float32, over all experts; the n_used largest, divided by their sum
    y_r = down_e (silu(gate_e u) * up_e u)          of the expert e that has rank r, the likeliest first
    x   = x + (w_0 y_0 + w_1 y_1 + ... + sigmoid(g . u) y_shared)       in this order

The shared expert is an MLP that every row uses; g is the router's last row. A pair is a row and one of its experts:
pair row * n_used + rank. Source: `Qwen3_5MoeSparseMoeBlock` of Hugging Face transformers, and ggml's `qwen35moe`.

Prompts sort their pairs by expert on the card (kernels/route.py), and grouped products (kernels/expert_gemm.py) take
the rows of an expert together. Decode steps take the pairs as they come (kernels/expert_gemv.py). The host need not
know which experts were chosen, so a pass waits for nothing and a step can be recorded. engine/expert_store.py keeps the
experts if the card holds only some of them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.expert_store import StoredLayer, expert_bytes
from engine.plan import LARGEST_CHUNK, Grouped, Work
from engine.scratch import Activation, ScratchArray
from engine.weights import Stack, Tensors
from kernels import expert_gemm, expert_gemv, host_requests, norm, route, swiglu
from kernels.card import Array, Card, Event
from kernels.expert_gemm import Tiles
from kernels.operands import Experts, Matrix
from kernels.quant_gemv import decoder_of
from kernels.records import Choice, Groups

MOST_USED = min(route.MOST_USED, route.MOST_PAIRS // LARGEST_CHUNK)


class MadeUp(NamedTuple):
    """For benchmarks: the experts of decode steps are made up instead of chosen, see `route.route_like`."""

    hits: float         # the chance that an expert is one of the hot ones of its layer
    seed: int           # uint32, another one for each layer


@dataclass
class ExpertsMLP:
    """The experts of a layer, all of one size, their router and the shared expert."""

    norm: Array                                 # [hidden]
    router: Matrix                              # float32 [n_experts + 1, hidden]; last, the shared expert's gate
    gate_up: tuple[tuple[int, Experts], ...]    # columns: expert_dim of gate; expert_dim of up
    down: Experts                               # [hidden, expert_dim] each
    shared_gate_up: Stack                       # columns: shared_dim of gate; shared_dim of up
    shared_down: Matrix                         # [hidden, shared_dim]
    stored: StoredLayer | None = None           # if the card holds only some of the experts
    made_up: MadeUp | None = None               # set by benchmarks alone, when nothing is recorded

    @staticmethod
    def shapes(c) -> dict[str, tuple[int, ...]]:
        hidden, n, dim = c.hidden_dim, c.n_experts, c.expert_dim
        inputs = {"gate_up": 2 * dim} if c.one_gate_up else {"gate": dim, "up": dim}
        return {f"{c.mlp_norm}.weight": (hidden,), "ffn_gate_inp.weight": (n, hidden),
                **{f"ffn_{name}_exps.weight": (n, rows, hidden) for name, rows in inputs.items()},
                "ffn_down_exps.weight": (n, hidden, dim), "ffn_gate_inp_shexp.weight": (hidden,),
                "ffn_gate_shexp.weight": (c.shared_dim, hidden), "ffn_up_shexp.weight": (c.shared_dim, hidden),
                "ffn_down_shexp.weight": (hidden, c.shared_dim)}

    @staticmethod
    def rules(c) -> list[tuple[bool, str]]:
        sizes = {"of an expert": c.expert_dim, "of the shared expert": c.shared_dim}
        return [*((size % 32 == 0, f"the feed-forward size {whose} is {size}, not a multiple of 32")
                  for whose, size in sizes.items()),
                (c.hidden_dim <= route.MOST_K, f"the hidden size {c.hidden_dim} is more than {route.MOST_K}"),
                (c.n_experts <= route.MOST_EXPERTS,
                 f"a layer has {c.n_experts} experts, more than {route.MOST_EXPERTS}"),
                (c.n_used_experts <= min(c.n_experts, MOST_USED),
                 f"a token uses {c.n_used_experts} of {c.n_experts} experts, and at most {MOST_USED} can be")]

    @classmethod
    def load(cls, tensors: Tensors, c) -> "ExpertsMLP":
        inputs = ["ffn_gate_up_exps"] if c.one_gate_up else ["ffn_gate_exps", "ffn_up_exps"]
        (_, down), = tensors.experts("ffn_down_exps")
        stored = tensors.loader.store and tensors.loader.store.layers[tensors.prefix]
        return cls(tensors.vector(f"{c.mlp_norm}.weight"), tensors.float_matrix("ffn_gate_inp", "ffn_gate_inp_shexp"),
                   tensors.experts(*inputs), down, tensors.stack("ffn_gate_shexp", "ffn_up_shexp"),
                   tensors.matrix("ffn_down_shexp"), stored)

    @property
    def experts(self) -> list[Experts]:
        return [experts for _, experts in self.gate_up] + [self.down]

    def work(self, c) -> Work:
        """Of the experts. What all rows are multiplied by is counted as in any layer."""
        found = Work()
        for each in self.experts:
            n_bytes = c.n_experts * expert_bytes(each)
            found.grouped[Grouped(each.n, each.k, c.n_experts, c.n_used_experts, n_bytes)] += 1
        return found + Work(row_operations=sum(2 * each.n * each.k * c.n_used_experts for each in self.experts))

    @staticmethod
    def scratch(c, rows: int) -> dict[str, ScratchArray]:
        pairs, columns = rows * c.n_used_experts, max(c.hidden_dim, 2 * c.expert_dim)
        return Activation.layout("inner", c.shared_dim, rows) | Activation.layout("pair_inner", c.expert_dim, pairs) | {
            "router_logits": ScratchArray((rows, c.n_experts + 1), np.float32, "logits of the router"),
            "chosen": ScratchArray((rows, c.n_used_experts), np.int32, "chosen experts"),
            "chosen_weights": ScratchArray((rows, c.n_used_experts + 1), np.float32, "weights of experts"),
            "pair_order": ScratchArray((pairs,), np.int32, "pairs sorted by expert"),
            "pair_position": ScratchArray((pairs,), np.int32, "where pairs went"),
            "tiles": ScratchArray((pairs, 3), np.int32, "tiles of sorted pairs"),
            "n_tiles": ScratchArray((rows,), np.int32, "number of tiles"),
            "pair_products": ScratchArray((pairs * columns,), np.float32, "products of pairs"),
            "shared": ScratchArray((rows, c.hidden_dim), np.float32, "shared expert's result")}

    def prefill(self, model, run, chosen=None):
        """x += the experts' results of the rows of a pass. The same launches serve a decode step of experts that are
        floats, with an Array of its own for the choice."""
        card, c, s, n, pairs = model.card, model.config, model.scratch, run.rows.n, model.scratch.pair_inner
        u = self.normalise(model, run)
        shared = self.share_beside(model, u, run) if chosen is None else self.share(model, run, u)
        choice = self.choose(model, run, chosen, u)
        groups, n_pairs = Groups(s.pair_order, s.pair_position, s.tiles, s.n_tiles), n * choice.n_used
        tiles = model.products.tiles_of_experts(self.experts, n_pairs)
        route.group_pairs(card, groups, choice, n, c.n_experts, tiles.rows)
        for column, experts in self.gate_up:
            y = s.pair_products[column:]
            for within_reach in self.in_turns(experts, n_pairs):
                multiply_grouped(card, y, 2 * c.expert_dim, within_reach, u, (groups, tiles), n_pairs, choice.n_used)
        activate(card, pairs, s.pair_products, n_pairs, self.down.is_quantized)
        for within_reach in self.in_turns(self.down, n_pairs):
            multiply_grouped(card, s.pair_products, self.down.n, within_reach, pairs, (groups, tiles), n_pairs)
        if shared:
            card.target(None).wait(shared)
        expert_gemm.combine(card, s.x, s.pair_products, choice, groups, s.shared, n)

    def decode(self, model, run):
        """The same of a decode step."""
        card, c, s, n, pairs = model.card, model.config, model.scratch, run.rows.n, model.scratch.pair_inner
        chosen = self.stored.chosen(n) if self.stored else s.chosen
        if not all(experts.is_quantized for experts in self.experts):
            return self.prefill(model, run, chosen)
        if self.shared_is_quantized:
            u, choice = self.choose_in_one(model, run, chosen)
        else:
            u = self.normalise(model, run)
            choice = self.choose(model, run, chosen, u)
        request = self.stored and self.stored.request(n)
        in_gate_up, in_down = self.shared_in_launches(model)
        if len(self.gate_up) == 1:
            (_, experts), = self.gate_up
            expert_gemv.expert_swiglu(card, decoder_of(experts.home), pairs.quantized, experts, u.quantized, choice, n,
                                      in_gate_up, request=request)
        else:
            if request:
                host_requests.hand_over(card, request, u.quantized, choice, self.down.places, n)
            for column, experts in self.gate_up:
                expert_gemv.expert_gemv(card, decoder_of(experts.home), s.pair_products[column:], 2 * c.expert_dim,
                                        experts, u.quantized, choice, n)
            activate(card, pairs, s.pair_products, n * choice.n_used, True)
        if in_gate_up is None:
            self.share(model, run, u)
        expert_gemv.expert_down(card, decoder_of(self.down.home), s.x, self.down, pairs.quantized, choice,
                                in_down or s.shared, n, request=request)

    def normalise(self, model, run) -> Activation:
        """norm(x), in 8 bits and as floats."""
        card, c, s, n = model.card, model.config, model.scratch, run.rows.n
        u, normed = s.activations[c.hidden_dim], norm.NormInput(s.x, self.norm, c.norm_eps)
        norm.rms_norm(card, u.x, normed, n, u.k)
        norm.rms_norm_quantize(card, u.quantized, normed, n, u.k)
        return u

    def choose(self, model, run, chosen: Array | None, u: Activation) -> Choice:
        """The experts of each row. chosen: where a decode step's go; None for a prompt's pass."""
        card, s, n = model.card, model.scratch, run.rows.n
        choice = Choice(s.chosen if chosen is None else chosen, s.chosen_weights)
        model.project(run, s.router_logits, self.router, u)
        route.route(card, choice, s.router_logits, self.router.n, n, model.config.n_experts)
        if chosen is not None:
            self.make_up(model, run, choice)
        return choice

    def choose_in_one(self, model, run, chosen: Array) -> tuple[Activation, Choice]:
        """norm(x) and the experts of each row in one launch, for a decode step that reads norm(x) in 8 bits alone."""
        c, s = model.config, model.scratch
        u, normed = s.activations[c.hidden_dim], norm.NormInput(s.x, self.norm, c.norm_eps)
        choice, scratch = Choice(chosen, s.chosen_weights), (s.router_logits, model.arrived)
        route.norm_route(model.card, choice, u.quantized, normed, self.router, scratch, run.rows.n)
        self.make_up(model, run, choice)
        return u, choice

    def make_up(self, model, run, choice: Choice):
        """For benchmarks: other experts in the place of the chosen ones, see `MadeUp`."""
        if self.made_up:
            route.route_like(model.card, choice, run.rows.places, run.rows.n, model.config.n_experts, *self.made_up)

    def in_turns(self, experts: Experts, n_pairs: int):
        """What a prompt's products take for one of the matrices of the experts: see `StoredMatrix.in_turns`."""
        return self.stored.in_turns(experts, n_pairs) if self.stored else [experts]

    def share_beside(self, model, u: Activation, run) -> Event | None:
        """Like `share`, beside what is queued next: in a stream of its own, because these products have too few tiles
        to fill a card. Returns the event of their end. Micro-batches fill a card together, and a recording has one
        stream. There the shared expert is queued in order, and there is no event."""
        card, side = model.card, model.side
        if run.shares_card or card.defers:
            return self.share(model, run, u)
        side.wait(card.target(None).record())
        with card.on(side):
            self.share(model, run, u)
        return side.record()

    def share(self, model, run, u: Activation):
        """s.shared = the shared expert's results, by launches of its own."""
        s, stack = model.scratch, self.shared_gate_up
        for column, matrix in stack.parts:
            model.project(run, s.projected[column:], matrix, u, stride=stack.stride)
        activate(model.card, s.inner, s.projected, run.rows.n, self.shared_down.is_quantized)
        model.project(run, s.shared, self.shared_down, s.inner)

    @property
    def shared_is_quantized(self) -> bool:
        return self.shared_down.is_quantized and all(matrix.is_quantized for _, matrix in self.shared_gate_up.parts)

    def shared_in_launches(self, model):
        """The shared expert as the launches of the other experts take it: for gate and up, and for down. (None, None)
        if they cannot take it, or if a user has products of their own."""
        (_, matrix), *others = self.shared_gate_up.parts
        if others or len(self.gate_up) > 1 or not self.shared_is_quantized or model.gemv:
            return None, None
        return [expert_gemv.SharedExpert(decoder_of(each), each, model.scratch.inner.quantized)
                for each in (matrix, self.shared_down)]


def multiply_grouped(card: Card, y: Array, stride: int, experts: Experts, x: Activation, tiled: tuple[Groups, Tiles],
                     *rows: int):
    """y = the products of sorted pairs with their experts. rows: see `expert_gemm`."""
    groups, tiles = tiled
    if experts.is_quantized:
        expert_gemm.expert_gemm(card, y, stride, experts, x.quantized, groups, *rows, tiles=tiles)
    else:
        expert_gemm.expert_gemm_float(card, y, stride, experts, x.x, groups, *rows)


def activate(card: Card, out: Activation, products: Array, n: int, is_quantized: bool):
    """out = silu(gate) * up of n rows of products, in the form that the next product reads."""
    if is_quantized:
        swiglu.swiglu_quantize(card, out.quantized, products, n, out.k)
    else:
        swiglu.swiglu(card, out.x, products, n, out.k)
