"""Two to a thousand replicas, simulated: `python -m benchmarks.replica_simulation [--plot FILE.svg] [--json FILE]`.

Conversations arrive in bursts (gaps drawn from a gamma distribution with a coefficient of variation of 2, as BurstGPT
reports for services; Wang et al., 2024), share system prompts by Zipf's law, and go on for several turns. Three
ways to choose a replica are compared: at random, the one with the fewest open requests, and the front's own Table
(engine/replicas/table.py), which runs here as it does in a front. A replica reads one prompt after the other and writes
answers side by side; it keeps the beginnings that were used last, as many as its memory holds.

What a front takes is measured (benchmarks/results.md, "Replicas on Ray"), and what a replica takes is an estimate of
--plan. So the figures say how the whole would scale, and where a front saturates: at FRONT_REQUEST seconds of its
processor for each request and FRONT_TOKEN for each token.
"""

import argparse
import collections
import heapq
import itertools
import json
import random
import statistics
import time

from cli.ending import run_program
from engine.prefix import PAGE_TOKENS
from engine.replicas.table import Table

# Measured: seconds of a front's processor. Of a replica: a V100-like card with a 9B model, as --plan estimates it.
FRONT_REQUEST, FRONT_TOKEN = 0.011, 0.00022
PREFILL, STEP, SLOTS = 1 / 2500, 0.03, 8        # seconds of a token of a prompt, of a step; answers side by side
KEPT = 400                  # beginnings that a replica keeps
LOAD = 0.7                  # share of the replicas' time that is asked for, were nothing cached
SYSTEMS, SYSTEM_TOKENS, USER_TOKENS, ANSWER_TOKENS, TURNS, THINKING = 30, 900, 120, 200, 4, 20.0
BURSTS = 2.0                # coefficient of variation of the gaps between conversations


class Card:
    """A replica: when it is free to read the next prompt, its running answers, and what it keeps."""

    def __init__(self, id: str):
        self.id, self.free, self.kept = id, 0.0, collections.OrderedDict()
        self.slots = [0.0] * SLOTS          # when each is free

    def answer(self, now: float, marks, n_prompt: int, n_answer: int) -> tuple[float, float, int]:
        """(first token, end, cached tokens) of a request that comes now."""
        n_cached = next((n * PAGE_TOKENS for n in range(len(marks), 0, -1) if marks[n - 1] in self.kept), 0)
        slot = min(range(SLOTS), key=self.slots.__getitem__)
        begin = max(now, self.free, self.slots[slot])
        first = begin + (n_prompt - n_cached) * PREFILL
        end = first + n_answer * STEP
        self.free, self.slots[slot] = first, end
        return first, end, n_cached

    def keep(self, marks):
        for mark in marks:
            self.kept[mark] = None
            self.kept.move_to_end(mark)
        while len(self.kept) > KEPT:
            self.kept.popitem(last=False)


def requests(n: int, n_replicas: int, rng) -> list[tuple]:
    """(time, conversation, turn, tokens of the prompt, of the answer, marks): about n requests in bursts."""
    work = (SYSTEM_TOKENS + 2 * USER_TOKENS) * PREFILL + ANSWER_TOKENS * STEP / SLOTS
    gap, shape = TURNS * work / (LOAD * n_replicas), 1 / BURSTS**2
    weights, at, found = [1 / (i + 1) for i in range(SYSTEMS)], 0.0, []
    for conversation in range(n // TURNS):
        at += rng.gammavariate(shape, gap / shape)
        system, when, n_prompt = rng.choices(range(SYSTEMS), weights)[0], at, SYSTEM_TOKENS
        for turn in range(rng.randint(1, 2 * TURNS - 1)):
            n_prompt += max(8, int(rng.expovariate(1 / USER_TOKENS)))
            n_answer = max(8, int(rng.expovariate(1 / ANSWER_TOKENS)))
            n_shared = SYSTEM_TOKENS // PAGE_TOKENS
            marks = [(system, page) if page < n_shared else (system, conversation, page)
                     for page in range(n_prompt // PAGE_TOKENS)]
            found.append((when, conversation, turn, n_prompt, n_answer, marks))
            n_prompt += n_answer
            when += n_answer * STEP + rng.expovariate(1 / THINKING)
    return sorted(found, key=lambda one: one[0])


def simulate(way: str, n_replicas: int, n: int, seed: int = 1) -> dict:
    """Serves about n requests by a way to choose: random, fewest or table."""
    rng, table, cards = random.Random(seed), Table(), [Card(f"r{i}") for i in range(n_replicas)]
    by_id, ids, numbers = {card.id: card for card in cards}, [card.id for card in cards], itertools.count()
    table.see(ids)
    for id in ids:
        table.report(id, {"node": "", "hostname": "", "n_slots": SLOTS}, {}, None, [])
    ends, open_at, waits, n_cached, n_prompts, choosing = [], collections.Counter(), [], 0, 0, 0.0
    for now, _, _, n_prompt, n_answer, marks in requests(n, n_replicas, rng):
        while ends and ends[0][0] <= now:
            _, _, card, kept, asked = heapq.heappop(ends)
            card.keep(kept)
            open_at[card.id] -= 1
            if way == "table":
                table.give_back(card.id, asked)
                table.report(card.id, None, None, None, list(card.kept))
        began = time.perf_counter()
        if way == "table":
            card = by_id[table.rank(marks, ids)[0]]
            table.take(card.id, marks)
        elif way == "fewest":
            card = min(cards, key=lambda one: (open_at[one.id], rng.random()))
        else:
            card = rng.choice(cards)
        choosing += time.perf_counter() - began
        open_at[card.id] += 1
        first, end, cached = card.answer(now, marks, n_prompt, n_answer)
        shared = SYSTEM_TOKENS // PAGE_TOKENS
        heapq.heappush(ends, (end, next(numbers), card, [*marks[shared - 1:shared], *marks[-1:]], marks))
        waits.append(first - now)
        n_cached, n_prompts = n_cached + cached, n_prompts + n_prompt
    waits.sort()
    return {"replicas": n_replicas, "way": way, "cached": round(n_cached / n_prompts, 3),
            "first token, s": {"median": round(statistics.median(waits), 2),
                               "95 %": round(waits[int(0.95 * len(waits))], 2)},
            "ms to choose": round(1e3 * choosing / len(waits), 3)}


def saturation() -> dict:
    """Where one front ends, by its processor's time."""
    seconds = FRONT_REQUEST + ANSWER_TOKENS * FRONT_TOKEN
    a_replica = LOAD / ((SYSTEM_TOKENS + 2 * USER_TOKENS) * PREFILL + ANSWER_TOKENS * STEP / SLOTS)
    return {"requests/s of a front": round(1 / seconds, 1), "tokens/s of a front": round(ANSWER_TOKENS / seconds),
            "replicas that keep one front busy": round(1 / seconds / a_replica)}


def plot(rows: list[dict], path: str):
    """Two charts, of cached tokens and of the wait for the first token, that read on light and dark pages."""
    import matplotlib
    matplotlib.use("svg")
    from matplotlib import pyplot
    grey = "#888888"
    with pyplot.rc_context({"text.color": grey, "axes.labelcolor": grey, "xtick.color": grey, "ytick.color": grey,
                            "axes.edgecolor": grey, "svg.hashsalt": "replicas"}):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
        for way, colour in ("random", "#d98c00"), ("fewest", "#5a8fd6"), ("table", "#2ca02c"):
            mine = [row for row in rows if row["way"] == way]
            sizes = [row["replicas"] for row in mine]
            left.plot(sizes, [100 * row["cached"] for row in mine], "o-", color=colour, label=way)
            right.plot(sizes, [row["first token, s"]["95 %"] for row in mine], "o-", color=colour)
        for axes, title in (left, "cached tokens of prompts, %"), (right, "first token, 95 % within, s"):
            axes.set(xscale="log", xlabel="replicas", title=title)
            axes.title.set_color(grey)
            axes.patch.set_alpha(0)
            axes.grid(alpha=0.3)
        right.set_yscale("log")
        left.legend(frameon=False)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description="Two to a thousand replicas, simulated.")
    parser.add_argument("--sizes", type=lambda text: [int(each) for each in text.split(",")],
                        default=[2, 3, 10, 30, 100, 300, 1000], help="replicas (default: 2,3,10,30,100,300,1000)")
    parser.add_argument("--requests", type=int, default=60, help="for each replica, 3,000 at least (default: 60)")
    parser.add_argument("--plot", metavar="FILE", help="draw the figures")
    parser.add_argument("--json", metavar="FILE", help="write them")
    options = parser.parse_args()
    rows = []
    print(f"{'replicas':>8}  {'way':8}{'cached':>8}{'first token, s':>16}{'95 %':>8}{'ms to choose':>14}")
    for size in options.sizes:
        for way in "random", "fewest", "table":
            rows.append(row := simulate(way, size, max(3000, options.requests * size)))
            print(f"{size:8}  {way:8}{row['cached']:8.1%}{row['first token, s']['median']:16.2f}"
                  f"{row['first token, s']['95 %']:8.2f}{row['ms to choose']:14.3f}")
    print(json.dumps(saturation()))
    if options.plot:
        plot(rows, options.plot)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"rows": rows, "front": saturation()}, file, indent=1)
    return 0


if __name__ == "__main__":
    run_program(main)
