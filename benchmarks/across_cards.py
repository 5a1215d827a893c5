"""How a long prompt flows through several cards that are not here: `python -m benchmarks.across_cards`.

    3 CMP 100-210 at 0.25 GB/s, synthetic:27b, 18,400 tokens, unless the options say otherwise.

The time of a pass is the sum of its kernels' estimates (kernels/emulated/estimate.py), which are floors: an emulated
card runs and counts one block of each launch, and the count stands for the whole grid. Per layer that is T(rows) for a
linear layer and T(rows) + context · U(rows) for an attention layer; micro-batches, which run side by side
(`qengine.MicroBatch`), count one after the other. The passes then flow as in the engine (`engine.plan.schedule`).

`--trace FILE` takes the times of passes and hops from a timeline of a real run (--trace of qengine.py) instead, and
compares the time of the whole that follows from them with the measured one.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import re
from pathlib import Path

import qengine
from cli.ending import run_program
from cli.options import listed, whole_numbers
from engine.plan import CacheSizes, Demand, Planner, schedule
from engine.prefix import PAGE_TOKENS, pages_for
from kernels.card import Array
from kernels.emulated import counting, native
from kernels.emulated.card import EmulatedCard, Launch
from kernels.emulated.estimate import SECTOR, Counts, estimate
from kernels.open import open_cards
from kernels.trace import HOST

ROWS = 64, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280
CONTEXT = 1024                                           # at which attention is counted, besides at 0


# ---- estimates of passes -----------------------------------------------------------------------------------

class Layers:
    """Estimated seconds of a pass over one layer of each kind, on one type of card."""

    def __init__(self, config, model):
        self.model, self.card = model, EmulatedCard(like=model)
        config = dataclasses.replace(config, n_layers=2, layer_kinds=("linear", "attention"))
        blueprint = qengine.PlannedModel(config, qengine.SyntheticWeights(qengine.tensor_shapes(config)))
        self.stage = blueprint.stage(self.card, range(2), Demand(max(ROWS)), max(ROWS))
        self.stage.allocate(CacheSizes(1, pages_for(CONTEXT + max(ROWS)), 1, 2, 0))
        self.layers = self.stage.model.layers
        self.of = functools.cache(self.of)

    def seconds(self, kind, rows, context):
        """Of a pass with so many tokens before its middle."""
        first, then = self.of(kind, rows)
        return first + (then - first) * context / CONTEXT

    def of(self, kind, rows):
        """The same with no tokens before the middle, and with CONTEXT of them."""
        index = ("linear", "attention").index(kind)
        return [self.estimated(index, rows, start) for start in (0, CONTEXT)[:1 + index] * (2 - index)]

    def estimated(self, index, rows, start):
        model = self.stage.model
        model.layers, model.first_layer = self.layers[index:index + 1], index
        model.views.clear()                     # of micro-batches, which have the layers of before
        qengine.set_rows(self.stage.inputs, [0] * rows, [0] * rows, range(start, start + rows))
        with self.card.record() as recording:
            self.stage.launch_prompt(rows)
        self.card.synchronize()
        return sum(launch_seconds(self.card, launch, native.Launch(launch.native.code, (1, 1, 1), launch.native.params,
                                                                   launch.native.dynamic))
                   for launch in recording.stream.recorded if type(launch) is Launch)


def launch_seconds(card, launch, one, has_l1=False):
    """The estimate of a launch of which one block is counted, on the type of card that an emulated card is like. Memory
    moves what the blocks touch, but each array no more than once. one: a launch of the block. has_l1: what a block
    reads again comes from L1, all of it; otherwise none."""
    counted, n_blocks = counting.run(one, card.allocations), math.prod(launch.native.grid)
    counts = Counts(*(n_blocks * n for n in dataclasses.astuple(counted.counts)))
    given = sum(x.nbytes for x in launch.keep if isinstance(x, Array)) // SECTOR
    read = min(counts.read_sectors, counts.distinct_sectors) if has_l1 else counts.read_sectors
    counts = dataclasses.replace(counts, read_sectors=read, distinct_sectors=min(counts.distinct_sectors, given))
    registers = counting._registers(counted.ptx, card.like.cc)
    return estimate(counts, launch.native.grid, counted.block, registers, counted.shared_bytes, card.like).seconds


def estimated_times(planner, layers, passes):
    """(passes, hops) as `schedule` takes them, of (start, rows) of each pass."""
    stages = planner.plan.on_paper
    kinds = [[planner.blueprint.config.layer_kinds[i] for i in stage.layers] for stage in stages]
    times = [[sum(kinds[i].count(kind) * layers[stage.card.like].seconds(kind, rows, start + rows / 2)
                  for kind in ("linear", "attention")) for start, rows in passes] for i, stage in enumerate(stages)]
    hops = [[(a.hop_seconds(rows), b.hop_seconds(rows)) for _, rows in passes]
            for a, b in itertools.pairwise(planner.plan.costs)]
    return times, hops


def equal_passes(n, rows):
    return [(start, min(rows, n - start)) for start in range(0, n, rows)]


def line(what, n, times, hops):
    """Prints tokens per second, how busy each card is, and what hops add."""
    found = schedule(times, hops)
    without = schedule(times, [[(0.0, 0.0)] * len(edge) for edge in hops]).seconds
    busy = ", ".join(f"{100 * share:.1f}" for share in found.busy)
    hop, longest = max((sum(hop) for edge in hops for hop in edge), default=0.0), max(map(max, times))
    print(f"{what:<12}{len(times[0]):>7}{n / found.seconds:>10.1f}{found.seconds:>9.2f}   {busy:<22}"
          f"{100 * (1 - without / found.seconds):>6.2f} %{1e3 * hop:>9.1f}{1e3 * longest:>9.1f}", flush=True)


def simulate(options):
    opened = qengine.open_model(options.model)
    cards = open_cards(f"emulated:{options.cards}")
    n_ctx = pages_for(options.tokens) * PAGE_TOKENS
    demand = Demand(n_ctx, chunk=max(ROWS), split=options.split)
    planner = Planner(qengine.PlannedModel(opened.config, opened.weights), cards, demand)
    planner.check()
    print(f"{opened.config.name}, a prompt of {options.tokens:,} tokens, estimated\n\n{planner.plan.table()}\n")
    layers = {model: Layers(opened.config, model) for model in dict.fromkeys(card.like for card in cards)}
    print(f"{'passes of':<12}{'passes':>7}{'tokens/s':>10}{'seconds':>9}   {'busy %':<22}{'hops add':>8}{'hop ms':>9}"
          f"{'pass ms':>9}")
    for rows in options.rows:
        line(f"{rows}", options.tokens, *estimated_times(planner, layers, equal_passes(options.tokens, rows)))
    passes = planner.passes(options.tokens)
    print(f"as the engine chooses, passes of {listed(dict.fromkeys(rows for _, rows in passes))}:")
    line("", options.tokens, *estimated_times(planner, layers, passes))
    return 0


# ---- a measured timeline -----------------------------------------------------------------------------------

def measured_times(trace):
    """(passes, hops, seconds) of the first prompt in a timeline: what `schedule` takes, and how long it was."""
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    by_card = [[bar for bar in trace["traceEvents"] if bar["ph"] == "X" and bar["pid"] == pid]
               for pid in names if names[pid] != HOST]
    passes = [first_prompt(card) for card in by_card]
    rows = [n for n, _ in passes[0]]
    hops = [list(zip(copies_of(rows, a, "out: outgoing hidden states"),
                     copies_of(rows, b, "in: incoming hidden states"))) for a, b in itertools.pairwise(by_card)]
    bars = [bar for card in passes for _, bar in card]
    seconds = (max(bar["ts"] + bar["dur"] for bar in bars) - min(bar["ts"] for bar in bars)) / 1e6
    return [[bar["dur"] / 1e6 for _, bar in card] for card in passes], hops, seconds


def first_prompt(bars):
    """(tokens, bar) of the passes over the first prompt that begins at 0: each goes on where the last has ended."""
    found, end = [], 0
    for bar in bars:
        if numbers := re.fullmatch(r"slot \d+, (\d+) tokens from (\d+) on", bar["name"]):
            n, start = map(int, numbers.groups())
            if start == end:
                found.append((n, bar))
                end += n
    return found


def copies_of(rows, bars, name):
    """Seconds of the copy of each pass, in their order. Sizes tell these copies from those of decode steps."""
    copies = [bar for bar in bars if bar["name"] == name]
    row_bytes = max(bar["args"]["bytes"] for bar in copies) // max(rows)
    copies = iter(copies)
    return [next(bar["dur"] for bar in copies if bar["args"]["bytes"] == n * row_bytes) / 1e6 for n in rows]


def compare(path):
    passes, hops, seconds = measured_times(json.loads(Path(path).read_text()))
    found = schedule(passes, hops)
    print(f"{len(passes[0])} passes over {len(passes)} cards: measured {seconds:.4f} s, by the simulation "
          f"{found.seconds:.4f} s ({100 * (found.seconds / seconds - 1):+.1f} %)")
    for i, (stage, share) in enumerate(zip(passes, found.busy)):
        print(f"card {i}: busy {100 * sum(stage) / seconds:.1f} % of the time, by the simulation {100 * share:.1f} %")
    without = schedule(passes, [[(0.0, 0.0)] * len(edge) for edge in hops]).seconds
    print(f"hops add {100 * (1 - without / found.seconds):.2f} %")
    return 0


def main():
    parser = argparse.ArgumentParser(description="How a prompt flows through several cards.")
    parser.add_argument("--model", default="synthetic:27b", help="synthetic:NAME (default: synthetic:27b)")
    parser.add_argument("--cards", default="cmp-100-210,cmp-100-210,cmp-100-210",
                        help="types with commas, as --card emulated: has them, v100@4,t4 (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=18400, help="of the prompt (default: 18400)")
    parser.add_argument("--rows", type=whole_numbers, default=ROWS,
                        help=f"of the passes, multiples of 64 (default: {listed(ROWS)})")
    parser.add_argument("--split", type=whole_numbers, help="layers on each card")
    parser.add_argument("--trace", metavar="FILE", help="a timeline to compare with, instead of estimates")
    options = parser.parse_args()
    return compare(options.trace) if options.trace else simulate(options)


if __name__ == "__main__":
    run_program(main)
