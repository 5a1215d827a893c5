"""A mixture of experts in the place of an MLP: a router picks a few of many small MLPs for each row.

    u   = norm(x)
    w   = softmax(router u)                         float32, over all experts; the n_used largest, divided by their sum
    y_r = down_e (silu(gate_e u) * up_e u)          of the expert e that has rank r, the likeliest first
    x   = x + (w_0 y_0 + w_1 y_1 + ... + sigmoid(g . u) y_shared)       in this order

The shared expert is an MLP that every row uses; g is the router's last row. A pair is a row and one of its experts:
pair row * n_used + rank. Source: `Qwen3_5MoeSparseMoeBlock` of Hugging Face transformers, and ggml's `qwen35moe`.

Prompts sort their pairs by expert on the card (kernels/route.py), and grouped products (kernels/expert_gemm.py) take
the rows of an expert together. Decode steps take the pairs as they come (kernels/expert_gemv.py). The host never learns
which experts were chosen, so a pass waits for nothing and a step can be recorded.
"""

from dataclasses import dataclass

import numpy as np

from engine.plan import Grouped, Work
from engine.scratch import Activation, ScratchArray
from engine.weights import Stack, Tensors
from kernels.card import Array
from kernels.operands import Experts, Matrix

MOST_EXPERTS, MOST_USED = 512, 32       # that kernels/route.py chooses from, and that it chooses


@dataclass(frozen=True)
class ExpertsMLP:
    """The experts of a layer, all of one size, their router and the shared expert."""

    norm: Array                                 # [hidden]
    router: Matrix                              # float32 [n_experts + 1, hidden]; last, the shared expert's gate
    gate_up: tuple[tuple[int, Experts], ...]    # columns: expert_dim of gate; expert_dim of up
    down: Experts                               # [hidden, expert_dim] each
    shared_gate_up: Stack                       # columns: shared_dim of gate; shared_dim of up
    shared_down: Matrix                         # [hidden, shared_dim]

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
                (c.n_experts <= MOST_EXPERTS, f"a layer has {c.n_experts} experts, more than {MOST_EXPERTS}"),
                (c.n_used_experts <= min(c.n_experts, MOST_USED),
                 f"a token uses {c.n_used_experts} of {c.n_experts} experts, and at most {MOST_USED} can be")]

    @classmethod
    def load(cls, tensors: Tensors, c) -> "ExpertsMLP":
        inputs = ["ffn_gate_up_exps"] if c.one_gate_up else ["ffn_gate_exps", "ffn_up_exps"]
        (_, down), = tensors.experts("ffn_down_exps")
        return cls(tensors.vector(f"{c.mlp_norm}.weight"), tensors.float_matrix("ffn_gate_inp", "ffn_gate_inp_shexp"),
                   tensors.experts(*inputs), down, tensors.stack("ffn_gate_shexp", "ffn_up_shexp"),
                   tensors.matrix("ffn_down_shexp"))

    @property
    def experts(self) -> list[Experts]:
        return [experts for _, experts in self.gate_up] + [self.down]

    def work(self, c) -> Work:
        """Of the experts. What all rows are multiplied by is counted as in any layer."""
        found = Work()
        for each in self.experts:
            home = each.home
            n_bytes = home.values.nbytes + (home.scales.nbytes if home.is_quantized else 0)
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

    def prefill(self, model, run):
        raise NotImplementedError

    def decode(self, model, run):
        raise NotImplementedError
