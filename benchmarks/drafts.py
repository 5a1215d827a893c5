"""Plain and drafted decoding on cards that are not here, estimated: `python -m benchmarks.drafts`.

    9B and 27B on CMP 100-210, one answer at 4,620 tokens of context, unless the options say otherwise.

The time of a decode step is the sum of its kernels' estimates (kernels/emulated/estimate.py), which are floors: an
emulated card runs and counts one block of each launch, and the count stands for the whole grid. A step of a model with
one layer of each kind is estimated three times: with both layers, and with either. That tells what a layer of each kind
costs, and the rest: embedding, head, choice, drafts. Where the model needs several cards, the hidden states of a step's
rows cross each link twice, and the cards work one after the other.

A step that checks d drafts, each right with the chance P if those before it are, gives 1 + P + ... + P^d tokens.
"""

import argparse
import ctypes
import dataclasses

import numpy as np

import qengine
from cli.ending import run_program
from cli.options import whole_numbers
from engine.limits import MOST_DRAFTS
from engine.plan import CacheSizes, Demand, hop_bytes
from engine.prefix import pages_for
from kernels.advance import answer_of
from kernels.emulated import native
from kernels.emulated.card import EmulatedCard, Launch
from kernels.emulated.cards import CARDS

from .across_cards import launch_seconds

MODELS = "synthetic:9b+mtp", "synthetic:9b+mtp:q4_k", "synthetic:27b+mtp", "synthetic:27b+mtp:q4_k"
ROOM = 0.9                  # share of a card's memory that weights may take
KINDS = "linear", "attention"


class Steps:
    """Estimated seconds of a decode step of one answer on one type of card, with all layers on it."""

    def __init__(self, model: str, like, context: int):
        self.opened, self.context, self.card = qengine.open_model(model), context, EmulatedCard(like=like)
        self.config = self.opened.config
        config = dataclasses.replace(self.config, n_layers=len(KINDS), layer_kinds=KINDS)
        format = "".join(model.split(":")[2:]).upper() or "Q8_0"
        weights = qengine.SyntheticWeights(qengine.tensor_shapes(config), format)
        blueprint = qengine.PlannedModel(config, weights)
        self.stage = blueprint.stage(self.card, range(len(KINDS)), Demand(context + 64, drafts=MOST_DRAFTS), 64)
        pages = pages_for(context + 64)
        self.stage.allocate(CacheSizes(1, pages, pages, 2, 0))
        self.stage.cache.set_pages(0, list(range(pages)))
        self.layers = self.stage.model.layers
        if block := self.stage.model.block:     # one block of a launch does not choose a draft: let its id be a token
            for ids in block.newest, block.drafts:
                self.card.fill(ids, 0)

    def n_cards(self) -> int:
        """How many of these cards the weights take."""
        planner = qengine.make_planner(self.opened, [self.card], Demand(self.context + 64, drafts=MOST_DRAFTS))
        return -(-planner.plan.stages[0].weights // int(ROOM * self.card.like.memory))

    def seconds(self, width: int, n_drafts: int) -> float:
        """Of a step with so many rows, that also makes n_drafts drafts."""
        both = self.estimated(range(2), width, n_drafts)
        without = [self.estimated([1 - index], width, n_drafts) for index in range(2)]
        counts = [self.config.layer_kinds.count(kind) for kind in KINDS]
        rest = sum(without) - both
        return rest + sum(n * (both - each) for n, each in zip(counts, without))

    def estimated(self, indices, width: int, n_drafts: int) -> float:
        """The same of a model with some of the two layers."""
        stage, model = self.stage, self.stage.model
        model.layers, model.first_layer = [self.layers[i] for i in indices], indices[0]
        model.views.clear()                     # which have the layers of before
        drafts = [0] * (width - 1)
        stage.set_batch(np.array([answer_of(0, 0, self.context, self.context + 64, 0, drafts)], np.int32), 0)
        with self.card.record() as recording:
            stage.launch_step(qengine.StepShape(1, width, n_drafts), 0, 0)
        self.card.synchronize()
        return sum(launch_seconds(self.card, launch, FirstBlock.of(launch.native), has_l1=True)
                   for launch in recording.stream.recorded if type(launch) is Launch)


class FirstBlock(native.Launch):
    """The first block of a launch. It sees the whole grid: some kernels share out their work by its size."""

    @classmethod
    def of(cls, launch: native.Launch) -> "FirstBlock":
        first = cls(launch.code, launch.grid, launch.params, launch.dynamic)
        first.n_blocks = 1
        ctypes.c_int64.from_buffer(first.buffer, native.LAUNCH["n_blocks"]).value = 1
        return first

    def with_code(self, code):
        return FirstBlock.of(super().with_code(code))


def main():
    parser = argparse.ArgumentParser(description="Plain and drafted decoding on cards that are not here.")
    parser.add_argument("--models", default=",".join(MODELS), help="synthetic:NAME with commas (default: %(default)s)")
    parser.add_argument("--card", default=CARDS[0].key, choices=[card.key for card in CARDS])
    parser.add_argument("--context", type=int, default=4620, help="tokens before the answer (default: 4620)")
    parser.add_argument("--drafts", type=whole_numbers, default=(1, 2, 3), help="in a step (default: 1,2,3)")
    parser.add_argument("--acceptance", type=float, default=0.75, help="of a draft (default: 0.75)")
    options = parser.parse_args()
    like = next(card for card in CARDS if card.key == options.card)
    print(f"ESTIMATES for {like.name} at {options.context:,} tokens, not measured. Drafts are right with a chance of "
          f"{options.acceptance:g}\n")
    heads = "".join(f"{f'{d} drafts':>32}" for d in options.drafts)
    print(f"{'model':<22}{'cards':>6}{'ms':>9}{'tokens/s':>10}{heads}")
    for model in options.models.split(","):
        steps = Steps(model, like, options.context)
        n_cards = steps.n_cards()
        hop = 2 * (n_cards - 1) * hop_bytes(steps.config.hidden_dim, 1) / like.link_bandwidth
        plain, cells = steps.seconds(1, 0) + hop, []
        for n in options.drafts:
            seconds = steps.seconds(1 + n, n) + hop * (1 + n)
            tokens = sum(options.acceptance ** i for i in range(n + 1))
            speed = f"{tokens / seconds:.1f} ({tokens / seconds * plain:.2f} x)"
            cells.append(f"{f'{seconds / plain:.3f} steps: {speed}':>32}")
        print(f"{model:<22}{n_cards:>6}{1e3 * plain:>9.2f}{1 / plain:>10.1f}{''.join(cells)}", flush=True)
    return 0


if __name__ == "__main__":
    run_program(main)
