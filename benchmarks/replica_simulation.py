"""Two to a thousand replicas, simulated: `python -m benchmarks.replica_simulation [--plot FILE.svg] [--json FILE]`.

Requests arrive as statistics of real services have them:

    when        gaps between arrivals are drawn from a gamma distribution. Its shape is 0.5 for bursts, as the generator
                has it that belongs to BurstGPT, a trace of Azure's service (github.com/HPMLL/BurstGPT, gamma_shape in
                example/src/burstgpt/config.py), and 1 for a Poisson process, for comparison
    how long    the Mooncake trace, 23,608 requests to Kimi within an hour, as NVIDIA's Dynamo lists it ("datagen
                analyze" in benchmarks/README.md of github.com/ai-dynamo/dynamo in 2025): a prompt has 8,590 tokens in
                the mean, 5,755 of them in common with others; TRACES has quartiles of the rest, and those of answers
    shared      half of the requests ask one question under one of 30 long system prompts, chosen by Zipf's law: the
                median and the third quartile of what prompts share are both 6,144 tokens there. The others are turns
                of conversations, of 2.6 turns in the mean, which is the number that gives the trace's 5,755

The trace does not tell these, so they are assumed: half and half, how many system prompts there are and how often each
is used, and THINKING seconds between two turns. Neither trace has both, arrivals to the millisecond and what prompts
share.

Three ways to choose a replica are compared: at random, the one with the fewest open requests, and the front's own Table
(engine/replicas/table.py), which runs here as it does in a front. A replica reads prompts in the engine's own turns
(engine/turns.py) and writes answers side by side; it keeps the beginnings that were used last. What replicas and the
front take was measured (benchmarks/results.md, "The whole engine: H100 and H200" and "Replicas on Ray"); no network is
simulated, nor that a front is late when it has too much to do. How busy it would be is printed instead.
"""

import argparse
import collections
import heapq
import itertools
import json
import math
import random
import statistics
import time
from dataclasses import dataclass

from cli.ending import run_program
from engine.prefix import PAGE_TOKENS
from engine.replicas.table import Table
from engine.replicas.wire import GAP, REPORT_SECONDS
from engine.turns import PASS, Turns

# Measured, in seconds. Of a front's processor: for a request, a token, and a message of a replica, of which one that
# writes sends up to 25 in a second. Of a replica, an H100 with a 9B model in Q8_0 by dp4a: for a token of a prompt, and
# for a step of 8 answers.
FRONT_REQUEST, FRONT_TOKEN, FRONT_MESSAGE = 0.011, 0.000055, 0.001
PREFILL, STEP, SLOTS = 1 / 6908, 8 / 1876, 8
KEPT = 400                  # beginnings that a replica keeps
LOAD = 0.7                  # share of the replicas' time that is asked for, were nothing cached

SHAPES = {"bursts": 0.5, "Poisson": 1.0}        # of the gamma distribution of gaps
THINKING = 20.0             # seconds between an answer and the next turn, in the mean
MOST_TOKENS = 125_546       # of a prompt
WARM = 60.0                 # seconds before those that count, in which caches fill and conversations begin
WAYS = {"random": "at random", "fewest": "fewest open", "table": "by marks"}


@dataclass(frozen=True)
class Kind:
    """Conversations of a kind. share: of all requests. n_systems: prompts of the system, by Zipf's law, of so many
    tokens. turns: in the mean."""

    share: float
    n_systems: int
    tokens: int
    turns: float


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens with this mean and these quartiles, the least and the most among them; without quartiles they
    fall off exponentially."""

    mean: float
    quartiles: tuple = ()

    def draw(self, rng) -> int:
        """Even within the first three quarters, and bent within the last, so that the mean is right."""
        if not self.quartiles:
            return max(8, int(rng.expovariate(1 / self.mean)))
        quarter, share = divmod(4 * rng.random(), 1)
        low, high = self.quartiles[int(quarter):int(quarter) + 2]
        if quarter == 3:
            others = sum(self.quartiles[i] + self.quartiles[i + 1] for i in range(3)) / 2
            share **= (high - low) / (4 * self.mean - others - low) - 1
        return max(1, int(low + (high - low) * share))


@dataclass(frozen=True)
class Workload:
    """fresh, answer: tokens of a prompt that no other has, and of an answer."""

    kinds: tuple[Kind, ...]
    fresh: Lengths
    answer: Lengths

    def rate(self, n_replicas: int) -> float:
        """Requests in a second that ask for LOAD of these replicas' time, were nothing cached."""
        a_turn = self.fresh.mean + self.answer.mean
        n_prompt = self.fresh.mean + sum(kind.share * (kind.tokens + (kind.turns - 1) * a_turn) for kind in self.kinds)
        return LOAD * n_replicas / (n_prompt * PREFILL + self.answer.mean * STEP / SLOTS)

    def requests(self, n_replicas: int, seconds: float, shape: float, rng) -> list["Job"]:
        """The requests from -WARM to so many seconds, in the order in which they come."""
        often = [kind.share / kind.turns for kind in self.kinds]
        gap, at, found = 1 / (sum(often) * self.rate(n_replicas)), -WARM, []
        for conversation in itertools.count():
            at += rng.gammavariate(shape, gap / shape)
            if at > seconds:
                return sorted(found, key=lambda job: job.came)
            kind, = rng.choices(self.kinds, often)
            system, = rng.choices(range(kind.n_systems), [1 / (i + 1) for i in range(kind.n_systems)])
            when, n_prompt, n_shared, is_over = at, kind.tokens, kind.tokens // PAGE_TOKENS, False
            while when <= seconds and not is_over:
                n_prompt = min(n_prompt + self.fresh.draw(rng), MOST_TOKENS)
                n_answer = self.answer.draw(rng)
                marks = [hash((kind.tokens, system, page) if page < n_shared else (conversation, page))
                         for page in range(n_prompt // PAGE_TOKENS)]
                found.append(Job(when, n_prompt, n_answer, marks, n_shared))
                is_over = rng.random() < 1 / kind.turns
                n_prompt += n_answer
                when += n_answer * STEP + rng.expovariate(1 / THINKING)


TRACES = Workload((Kind(0.5, 30, 6144, 1.0), Kind(0.5, 1, 512, 2.6)), Lengths(2834, (0, 266, 560, 1103, 125_034)),
                  Lengths(182, (1, 13, 30, 356, 2000)))
LESSON = Workload((Kind(1.0, 30, 900, 4.0),), Lengths(120), Lengths(200))       # of notebooks/09_serving.ipynb


class Job:
    """A request. left: tokens of its prompt that are not read yet; None before it has a slot."""

    def __init__(self, came: float, n_prompt: int, n_answer: int, marks: list, n_shared: int):
        self.came, self.n_prompt, self.n_answer, self.marks = came, n_prompt, n_answer, marks
        self.beginnings = [marks[n_shared - 1], marks[-1]]
        self.n_cached, self.left, self.first = 0, None, None
        self.opened = None                      # what the Table counts for it


class Card:
    """A replica, with the turns of the engine's own prompts (engine/turns.py). events: a heap of (time, number, Card,
    Job whose answer has ended, or None where a pass has)."""

    def __init__(self, id: str, events: list, numbers):
        self.id, self.events, self.numbers = id, events, numbers
        self.kept, self.turns = collections.OrderedDict(), Turns(1)
        self.waiting, self.prompts, self.passing = collections.deque(), [], None
        self.n_used, self.n_open = 0, 0
        self.writes_until = self.wrote = 0.0        # seconds in which at least one answer was written

    def take(self, job: Job, now: float):
        self.n_open += 1
        self.waiting.append(job)
        self.go_on(now)

    def go_on(self, now: float):
        """Gives slots to jobs, and begins a pass."""
        while self.waiting and self.n_used < SLOTS:
            job = self.waiting.popleft()
            job.n_cached = next((n * PAGE_TOKENS for n in range(len(job.marks), 0, -1)
                                 if job.marks[n - 1] in self.kept), 0)
            job.left = max(1, job.n_prompt - job.n_cached)
            self.prompts.append(job)
            self.n_used += 1
        if self.prompts and self.passing is None:
            job = self.turns.choose(self.prompts, lambda one: one.left)
            self.passing = job, min(job.left, round(PASS / PREFILL))
            self.post(now + self.passing[1] * PREFILL, None)

    def post(self, when: float, job: Job | None):
        heapq.heappush(self.events, (when, next(self.numbers), self, job))

    def end_pass(self, now: float, has_read):
        (job, n), self.passing = self.passing, None
        job.left -= n
        if not job.left:
            self.prompts.remove(job)
            has_read(job.opened)
            job.first, end = now, now + job.n_answer * STEP
            self.wrote += max(0.0, end - max(now, self.writes_until))
            self.writes_until = max(self.writes_until, end)
            self.post(end, job)
        self.go_on(now)

    def end(self, job: Job, now: float):
        self.n_used -= 1
        self.n_open -= 1
        for mark in job.beginnings:
            self.kept[mark] = None
            self.kept.move_to_end(mark)
        while len(self.kept) > KEPT:
            self.kept.popitem(last=False)
        self.go_on(now)


def simulate(way: str, n_replicas: int, n: int, shape: float = 0.5, work: Workload = TRACES, seed: int = 1) -> dict:
    """Serves requests, of which about n count, by a way to choose, one of WAYS. shape: of the gaps between arrivals."""
    rng, table, events, numbers = random.Random(seed), Table(), [], itertools.count()
    cards = [Card(f"r{i}", events, numbers) for i in range(n_replicas)]
    by_id, ids, choosing = {card.id: card for card in cards}, [card.id for card in cards], 0.0
    table.see(ids)
    for id in ids:
        table.report(id, {"node": "", "hostname": "", "n_slots": SLOTS}, {}, None, [])

    def advance(until: float):
        while events and events[0][0] <= until:
            now, _, card, job = heapq.heappop(events)
            if job is None:
                card.end_pass(now, table.has_read)
                continue
            card.end(job, now)
            if way == "table":
                table.give_back(job.opened)
                table.report(card.id, None, None, None, list(card.kept))

    seconds = n / work.rate(n_replicas)
    for job in (jobs := work.requests(n_replicas, seconds, shape, rng)):
        advance(job.came)
        began = time.perf_counter()
        if way == "table":
            card = by_id[table.rank(job.marks, ids)[0]]
            job.opened = table.take(card.id, job.marks)
        elif way == "fewest":
            card = min(cards, key=lambda one: (one.n_open, rng.random()))
        else:
            card = rng.choice(cards)
        choosing += time.perf_counter() - began
        card.take(job, job.came)
    advance(math.inf)
    choosing *= seconds / (WARM + seconds)
    wrote = sum(card.wrote for card in cards) * seconds / (WARM + seconds)
    n_messages = wrote / GAP + max(0.0, n_replicas * seconds - wrote) / REPORT_SECONDS
    jobs = [job for job in jobs if job.came >= 0]
    waits = sorted(job.first - job.came for job in jobs)
    busy = (len(jobs) * FRONT_REQUEST + sum(job.n_answer for job in jobs) * FRONT_TOKEN + n_messages * FRONT_MESSAGE
            + choosing)
    return {"replicas": n_replicas, "way": way,
            "cached": round(sum(job.n_cached for job in jobs) / sum(job.n_prompt for job in jobs), 3),
            "first token, s": {"median": round(statistics.median(waits), 2),
                               "95 %": round(waits[int(0.95 * len(waits))], 2)},
            "requests/s": round(len(jobs) / seconds, 1), "of a front": round(busy / seconds, 3),
            "ms to choose": round(1e3 * choosing / len(jobs), 3)}


def plot(rows: list[dict], path: str):
    """Cached tokens, the wait for the first token and the front's share, on light and dark pages."""
    import matplotlib
    matplotlib.use("svg")
    from matplotlib import pyplot, ticker
    grey = "#888888"
    with pyplot.rc_context({"text.color": grey, "axes.labelcolor": grey, "xtick.color": grey, "ytick.color": grey,
                            "axes.edgecolor": grey, "svg.hashsalt": "replicas"}):
        figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
        for (way, label), colour in zip(WAYS.items(), ("#d98c00", "#5a8fd6", "#2ca02c")):
            for arrivals, line in ("bursts", "o-"), ("Poisson", "s:"):
                mine = [row for row in rows if (row["way"], row["arrivals"]) == (way, arrivals)]
                sizes = [row["replicas"] for row in mine]
                if arrivals == "bursts":
                    left.plot(sizes, [100 * row["cached"] for row in mine], line, color=colour)
                middle.plot(sizes, [row["first token, s"]["95 %"] for row in mine], line, color=colour,
                            label=f"{label}, {arrivals}")
                if way == "table":
                    right.plot(sizes, [row['of a front'] for row in mine], line, color=colour)
        right.axhline(1, color=grey, linewidth=1)
        for axes, title in ((left, "cached tokens of prompts, %"), (middle, "first token, 95 % within, s"),
                            (right, "processors of one front")):
            axes.set(xscale="log", xlabel="replicas", title=title)
            axes.title.set_color(grey)
            axes.patch.set_alpha(0)
            axes.grid(alpha=0.3)
        for axes in middle, right:
            axes.set_yscale("log")
            axes.yaxis.set(major_locator=ticker.LogLocator(subs=(1, 2, 3, 5)), minor_locator=ticker.NullLocator(),
                           major_formatter=ticker.StrMethodFormatter("{x:g}"))
        figure.legend(*middle.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
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
    print(f"{'arrivals':9}{'replicas':>8}  {'way':8}{'cached':>8}{'first token, s':>16}{'95 %':>8}{'requests/s':>12}"
          f"{'front':>8}{'ms to choose':>14}")
    for arrivals, shape in SHAPES.items():
        for size in options.sizes:
            for way in WAYS:
                row = {"arrivals": arrivals} | simulate(way, size, max(3000, options.requests * size), shape)
                rows.append(row)
                print(f"{arrivals:9}{size:8}  {way:8}{row['cached']:8.1%}{row['first token, s']['median']:16.2f}"
                      f"{row['first token, s']['95 %']:8.2f}{row['requests/s']:12.1f}{row['of a front']:8.3f}"
                      f"{row['ms to choose']:14.3f}", flush=True)
    if options.plot:
        plot(rows, options.plot)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    run_program(main)
