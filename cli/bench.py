"""How fast a model runs, and how much of the cards it uses.

Prefill is a whole prompt of random tokens, until its first answer token is on the host. Decode is steps of a batch of
slots from a context on, each step until its tokens are on the host. The context is not computed before: its pages hold
random keys and values, and the recurrent states begin as zeros, which takes as long as those of a text. Percentages are
of what the probe found. Prefill: of the int8 operations that the dp4a units do at the measured clock, for the matrix
products alone. Decode: of the bytes per second that the card reads, for weights, recurrent states and KV pages.

A small model's decode may go beyond 100 per cent, because what fits into a cache is read faster than memory. So may
prefill where tensor cores multiply (kernels/products.py): they do more operations than the dp4a units. Operations
are timed by themselves. So the operations of a prompt's parts, which run side by side, add up to more than the prompt
takes. A product of experts that is replayed by itself finds another layer's choice of experts in memory: with few rows
it may read fewer experts than in its place, and seem faster.
"""

import contextlib
import dataclasses
import functools
import time
from dataclasses import dataclass

import numpy as np

import qengine
from engine.experts import MadeUp
from engine.pipes import launching_as
from engine.plan import Demand, Grouped, Work, passes_over
from engine.prefix import PAGE_TOKENS, pages_for
from engine.request import Request, RequestError
from engine.weights import SyntheticWeights
from kernels import probe, route
from kernels.advance import answer_of
from kernels.assembler import find_assembler
from kernels.bench import operation_seconds
from kernels.card import Card, show_bytes
from kernels.emulated.cards import CARDS
from kernels.limits import FLOAT16
from kernels.open import open_cards
from kernels.operands import Matrix

from .checks import CheckBench, bench_checks, room_for, run_tokens
from .engines import memories, traced, write_json
from .options import CONTEXTS, DECODE_STEPS, EMULATED_LENGTH, PROMPT_LENGTHS, REPEATS


@dataclass(frozen=True)
class Operation:
    """The launches of one kernel, recorded and replayed by themselves: how many, and their seconds together."""

    name: str
    launches: int
    seconds: float


@dataclass(frozen=True)
class Throughput:
    """How fast prefill or decode is at a context. launches, operations: of the prompt, or of one decode step."""

    context: int
    batch: int
    tokens_per_s: float             # the median of the repeats
    repeats: list[float]
    percent_of_peak: float
    launches: int
    operations: list[Operation]


class Bench:
    """Times an engine that does nothing else. `batch` of its slots decode together. Close the engine afterwards.

    reports: of the engine's cards; percentages are of their peaks added up. hits: if given, the experts of decode steps
    are made up, see `MadeUp`.
    """

    def __init__(self, engine: qengine.Engine, reports: list[probe.Report], repeats: int, batch: int,
                 hits: float | None = None):
        self.engine, self.reports, self.repeats, self.batch, self.hits = engine, reports, repeats, batch, hits
        self.pipeline, self.stages = engine.pipeline, engine.pipeline.stages
        self.random = np.random.default_rng(1)
        n_groups = min(self.pipeline.n_groups, batch)
        self.groups = [range(group, batch, n_groups) for group in range(n_groups)]     # their slots
        pages = pages_for(engine.n_ctx)
        for slot in range(batch):
            self.pipeline.set_pages(slot, list(range(slot * pages, (slot + 1) * pages)))
        for stage in self.stages:
            stage.worker.ask(make_up_pages, stage).result()
        if hits is not None:
            for stage in self.stages:
                stage.worker.ask(make_up_experts, stage, hits).result()
            self.pipeline.load_kernels()

    # ---- what is timed ----

    def chunks(self, n: int):
        """(start, token ids) of the passes of a random prompt of n tokens."""
        ids, is_sparse = self.random.integers(0, self.engine.config.n_vocab, n).tolist(), self.engine.sparse == "on"
        return [(start, ids[start:start + rows]) for start, rows in passes_over(
            n, lambda start, last: self.pipeline.pass_rows(start, n, self.engine.chunk, last, is_sparse))]

    def prompt(self, n: int, slot: int = 0) -> float:
        """Seconds of a prompt of n tokens with its first answer token."""
        chunks, answer = self.chunks(n), answer_of(0, slot, n - 1)
        self.pipeline.prepare_slot(slot, Request([0]))
        started = time.perf_counter()
        for start, ids in chunks:
            self.pipeline.prefill(ids, slot, start, is_sparse=self.engine.sparse == "on")
        self.pipeline.sample_row(len(chunks[-1][1]) - 1, answer).read()
        return time.perf_counter() - started

    def steps(self, context: int) -> float:
        """Seconds of DECODE_STEPS steps of the batch from a context on, one group of slots after the other."""
        self.place_step(context)
        before = [None] * len(self.groups)
        started = time.perf_counter()
        for _ in range(DECODE_STEPS):       # a step is queued before the last one is read, as the scheduler does
            for group, slots in enumerate(self.groups):
                tokens, before[group] = before[group], self.pipeline.step(qengine.StepShape(len(slots)), group)
                if tokens:
                    tokens.read()
        for tokens in before:
            tokens.read()
        return time.perf_counter() - started

    def prefill(self, n: int) -> Throughput:
        """The Throughput of a prompt of n tokens."""
        self.prompt(n)
        speeds = [n / self.prompt(n) for _ in range(self.repeats)]
        times = {}
        self.pipeline.settle()                          # from here on this thread launches, not the workers
        for start, ids in self.chunks(n):
            for stage in self.stages:
                self.time_operations(stage, self.chunk(stage, start, ids), times)
        peak = sum(report.dp4a_peak for report in self.reports)
        return self.throughput(n, 1, speeds, self.prompt_operations(n) / n * np.median(speeds) / peak, times)

    def time_operations(self, stage: qengine.Stage, work, times: dict):
        """Adds the launches and seconds of each kernel of work() to `times`. Not where experts lie elsewhere: these
        launches change places, or wait for the host, and cannot be replayed by themselves."""
        if not stage.store:
            operation_seconds(stage.card, work, times)

    def chunk(self, stage: qengine.Stage, start: int, ids: list[int]):
        """Puts the inputs of a stage's pass over `ids` on the card; returns the function that queues its launches."""
        qengine.set_rows(stage.inputs, ids, [0] * len(ids), range(start, start + len(ids)))
        stage.prompt = stage.prompt._replace(start=start, n=len(ids))
        return functools.partial(stage.launch_micro_batches_in_sequence, len(ids))

    def decode(self, context: int) -> Throughput:
        """The Throughput of the batch from a context on."""
        for slot in range(self.batch):
            self.pipeline.prepare_slot(slot, Request([0]))
        # Made-up experts depend on positions. At the positions of an earlier run, they would all be on the card.
        starts = [context + DECODE_STEPS * i * (self.hits is not None) for i in range(self.repeats + 1)]
        speeds = [self.batch * DECODE_STEPS / self.steps(start) for start in starts][1:]
        self.place_step(context)
        self.pipeline.settle()
        times = {}
        for stage in self.stages:
            self.time_operations(stage, functools.partial(self.step, stage), times)
        bandwidth = sum(report.read_bandwidth for report in self.reports)
        share = self.step_bytes(context) / self.batch * np.median(speeds) / bandwidth
        return self.throughput(context, self.batch, speeds, share, times)

    def throughput(self, context: int, batch: int, speeds: list[float], share: float, times: dict) -> Throughput:
        """speeds: tokens/s of the repeats. share: of the peak. times: kernel -> (launches, seconds)."""
        operations = [Operation(name, n, seconds) for name, (n, seconds) in times.items()]
        operations.sort(key=lambda operation: -operation.seconds)
        return Throughput(context, batch, float(np.median(speeds)), speeds, float(100 * share),
                     sum(operation.launches for operation in operations), operations)

    def place_step(self, context: int):
        """Tells the cards the inputs of a decode step."""
        for group, slots in enumerate(self.groups):
            self.pipeline.place([answer_of(0, slot, context) for slot in slots], group)

    def step(self, stage: qengine.Stage):
        """Queues the launches of a stage's part of a decode step. The engine replays them from recordings."""
        for group, slots in enumerate(self.groups):
            stage.launch_step(qengine.StepShape(len(slots)), group, 0)

    # ---- what it must move and compute ----

    def weights(self) -> list[Matrix]:
        """The matrices of the layers and the head, which every decode step reads whole."""
        layers = [layer for stage in self.stages for layer in stage.model.layers]
        return [matrix for layer in layers for matrix in qengine.matrices(layer)] + [self.pipeline.last.model.head]

    def work(self) -> Work:
        """Of all layers."""
        return sum((work for stage in self.stages for work in stage.layer_works), Work())

    def prompt_operations(self, n: int) -> int:
        """Multiplications and additions of a prompt's matrix products, of experts those that its tokens use. The head's
        product is of the last row alone."""
        head = self.pipeline.last.model.head
        return n * self.work().row_operations + 2 * head.n * head.k

    def step_bytes(self, context: int) -> int:
        """Bytes that a decode step reads and writes, in the middle of DECODE_STEPS: the weights once for each group of
        slots, of experts those that are expected to be chosen; for every slot the recurrent states, read and written,
        and the keys and values up to its position."""
        experts = sum(self.expert_bytes(slots, context) for slots in self.groups)
        c, caches = self.engine.config, [stage.cache for stage in self.stages]
        weights = sum(m.values.nbytes + (m.scales.nbytes if m.is_quantized else 0) for m in self.weights())
        states = sum(2 * s.memory[0].nbytes + s.conv[0].nbytes for cache in caches for s in cache.recurrent.values())
        token = sum(pages.format.token_bytes(c.n_kv_heads, c.head_dim) for cache in caches
                    for pages in cache.pages.values())
        return len(self.groups) * weights + experts + self.batch * (states + (context + DECODE_STEPS // 2) * token)

    def expert_bytes(self, slots: range, context: int) -> int:
        """About how many bytes of experts a step of these slots reads, from a context on."""
        work, n = self.work(), len(slots)
        if self.hits is None:
            return work.expert_bytes_read(n)

        def touched(each: Grouped) -> float:
            chosen = (route.route_like_reference(np.array(slots), np.full(n, position), each.n_experts, each.n_used,
                                                 self.hits, seed=0)
                      for position in range(context, context + DECODE_STEPS))
            return np.mean([np.unique(experts).size for experts in chosen]) / each.n_experts

        return round(sum(count * each.n_bytes * touched(each) for each, count in work.grouped.items()))

    # ---- estimates for cards that are not here ----

    def estimates(self, n: int, context: int) -> dict:
        """Estimated tokens/s of a prompt of n tokens and of decode at a context, as `estimated_rates` has them."""
        (stage,), chunks = self.stages, self.chunks(n)
        self.pipeline.prepare_slot(0, Request([0]))
        self.place_step(context)
        self.pipeline.settle()

        def prefill():
            for start, ids in chunks:
                self.chunk(stage, start, ids)()

        work = {"prefill": (n, prefill), "decode": (self.batch, functools.partial(self.step, stage))}
        return estimated_rates(stage.card, work)


MADE_UP_PAGES = 16          # pages of random numbers; the others are copies of them


def make_up_pages(stage: qengine.Stage):
    """Fills all pages of a stage with keys and values from a Gaussian."""
    card, rng = stage.card, np.random.default_rng(0)
    for pages in stage.cache.pages.values():
        for rows, array in zip(pages.format.kinds.values(), (pages.k, pages.v)):
            n, (n_pages, n_kv_heads, tokens, _) = MADE_UP_PAGES, array.shape
            made_up = rng.standard_normal((min(n, n_pages), n_kv_heads, tokens, stage.config.head_dim), np.float32)
            card.copy_in(array[:n], rows.encode(made_up))
            while n < n_pages:
                card.copy(array[n:2 * n], array[:min(n, n_pages - n)])
                n *= 2


def make_up_experts(stage: qengine.Stage, hits: float):
    """From now on, the experts of a stage's decode steps are made up. What was recorded before is forgotten."""
    stage.card.synchronize()                    # after this, nothing replays the recordings any more
    stage.recordings.clear()
    for number, layer in zip(stage.model.numbers, stage.model.blocks):
        layer.mlp.made_up = MadeUp(hits, number)


def estimated_rates(card: Card, work: dict) -> dict:
    """Tokens/s of other cards as estimated by one emulated card: {name of the work: {name of a card: tokens/s}}.

    work: name -> (tokens, function that launches the work). The work is launched anew for each card of the table, as
    that card would be launched.
    """
    return {name: {other: count / seconds for other, seconds in estimated_seconds(card, launch).items()}
            for name, (count, launch) in work.items()}


def estimated_seconds(card: Card, launch) -> dict:
    """Name of a card -> seconds that the launches of launch() are estimated to take on it."""
    found = {}
    for model in CARDS:
        with launching_as(card, model), card.counting() as log:
            launch()
        found[model.name] = sum(one.estimate(model).seconds for one in log)
    return found


def bench_table(title: str, speeds: list[Throughput], of_what: str) -> str:
    """For people: a line for each Throughput, then where the time of the last one goes. of_what: what percentages are
    of."""
    lines = [f"{title:<10}{'batch':>6}{'tokens/s':>12}   of {of_what:<16}{'launches':>9}"]
    lines += [f"{speed.context:<10,}{speed.batch:>6}{speed.tokens_per_s:>12,.1f}   "
              f"{f'{speed.percent_of_peak:.1f} %':<19}{f'{speed.launches:,}' if speed.launches else '-':>9}"
              for speed in speeds]
    if any(speed.percent_of_peak > 100 for speed in speeds):
        lines.append("  more than 100 %: so small a model stays in the processor's caches")
    operations = speeds[-1].operations
    if not operations:
        return "\n".join(lines + ["", "  kernels have no times of their own where experts lie elsewhere"])
    total = sum(operation.seconds for operation in operations)
    lines += ["", f"  at {speeds[-1].context:,}, each kernel's launches replayed by themselves:"]
    lines += [f"  {o.name:<28}{o.launches:>7,}{o.seconds * 1e3:>12.3f} ms{100 * o.seconds / total:>7.1f} %"
              for o in operations]
    return "\n".join(lines)


def estimate_table(estimates: dict) -> str:
    """For people: the estimates of `Bench.estimates`, a line for each card."""
    names = list(estimates["prefill"])
    lines = [f"{'ESTIMATES':<18}{'prefill':>10}{'decode':>10}   tokens/s at most, from counted instructions "
             "and sectors; not measured"]
    for name in names:
        lines.append(f"{name:<18}{estimates['prefill'][name]:>10,.0f}{estimates['decode'][name]:>10,.0f}")
    return "\n".join(lines)


def run_bench(model: qengine.OpenModel, options) -> int:
    """Prints how fast a model is, perhaps on several numbers of cards; returns the exit code."""
    if options.expert_hits is not None:
        check_expert_hits(model)
    cards, counts = open_cards(options.card), options.cards or [None]
    if options.cards and max(counts) > len(cards):
        raise RequestError("cards", f"--cards {','.join(map(str, counts))}: there are {len(cards)} to take them from")
    chosen = [cards[:n] if options.card or n else None for n in counts]
    runs = [bench_cards(model, each, cards[0].kind == "emulated", options) for each in chosen]
    if len(runs) > 1:
        print(f"\n{side_by_side(runs)}")
    if options.json:
        write_json(options.json, {"runs": runs} if len(runs) > 1 else runs[0])
    return 0


def check_expert_hits(model: qengine.OpenModel):
    """Raises RequestError if --expert-hits is not for this model."""
    if not isinstance(model.weights, SyntheticWeights):
        raise RequestError("expert_hits", f"--expert-hits makes up the experts of synthetic models; {model.name} "
                                          "chooses its own")
    if model.config.n_experts < 2:
        raise RequestError("expert_hits", f"--expert-hits: {model.name} has no experts to choose from")


def bench_cards(model: qengine.OpenModel, cards: list[Card] | None, emulated: bool, options) -> dict:
    """Prints how fast a model is on these cards, or (None) on those that `qengine.load` would take; returns what
    --json has of it."""
    lengths = sorted(options.prompt_lengths or ([EMULATED_LENGTH] if emulated else PROMPT_LENGTHS))
    contexts = sorted(options.contexts or ([EMULATED_LENGTH] if emulated else CONTEXTS))
    repeats = options.repeats or (1 if emulated else REPEATS)
    drafts = max(options.draft or 0, *(width - 1 for width in options.check_widths or [1]))
    n_tokens = run_tokens(emulated)                                 # of an answer with drafts
    n_steps = DECODE_STEPS * (1 if options.expert_hits is None else repeats + 1)
    n_ctx = max(*lengths, *contexts) + max(n_steps + 1, drafts and room_for(n_tokens))
    wishes = {"slots": options.batch, "kv_tokens": options.batch * pages_for(n_ctx) * PAGE_TOKENS,
              "checkpoint_memory": 0, "split": options.split,       # every slot has pages of its own
              "products": options.products, "sparse": options.sparse, **memories(options)}
    planner = qengine.make_planner(model, cards, Demand(n_ctx, drafts=drafts, **wishes))
    if drafts:                                                      # and a checkpoint, to begin again there
        states = max(stage.state_bytes for stage in planner.plan.on_paper)
        wishes["checkpoint_memory"] = options.batch * states
    cards = planner.cards
    reports, free = [probe.saved_or_measured(card) for card in cards], sum(card.free_bytes for card in cards)
    loaded = qengine.load(model, card=cards, ctx=n_ctx, draft=drafts, **wishes)
    with contextlib.closing(loaded) as engine, traced(engine, options):
        bench = Bench(engine, reports, repeats, options.batch, options.expert_hits)
        peaks = ("dp4a measured", "read measured") if emulated else ("dp4a peak", "read bandwidth")
        prefill = [bench.prefill(n) for n in lengths]
        print(bench_table("prefill", prefill, peaks[0]), flush=True)
        decode = [bench.decode(n) for n in contexts]
        print(f"\n{bench_table('decode', decode, peaks[1])}")
        experts = {name: n for name, n in engine.stats().items() if name.startswith("expert_")}
        if options.expert_hits is not None:
            print(f"\n{made_up_line(engine.config, options.expert_hits)}", flush=True)
        if experts:
            print(f"\n{expert_line(experts)}", flush=True)
        checked = bench_checks(CheckBench(bench, n_tokens), contexts, options)
        used, kv = free - sum(card.free_bytes for card in cards), engine.config.kv
        kept = f"; keys and values in {kv}" * (kv != FLOAT16)
        print(f"\n{engine.name} on {', '.join(card.describe() for card in cards)}; peak memory {show_bytes(used)}"
              + kept)
        multiplied = [stage.model.products.describe(model.weights.formats()) for stage in engine.pipeline.stages]
        for card, said in zip(cards, multiplied):
            if said:
                print(f"products of prompts on {card.name}: {said}")
        estimates = None
        if emulated and len(cards) == 1 and find_assembler():
            estimates = bench.estimates(lengths[0], contexts[0])
            print(f"\n{estimate_table(estimates)}")
    layers = [[stage.layers.start, stage.layers.stop - 1] for stage in engine.pipeline.stages]
    return {"model": engine.name, "kv": kv, "date": probe.now(), "cards": [card.facts() for card in cards],
            "layers": layers, "versions": probe.versions(),
            "probes": [report.to_dict() for report in reports], "products": multiplied,
            "peak_memory_bytes": used,
            "prefill": [dataclasses.asdict(speed) for speed in prefill],
            "decode": [dataclasses.asdict(speed) for speed in decode],
            **checked, **({"estimates": estimates} if estimates else {}), **({"experts": experts} if experts else {}),
            **({} if options.expert_hits is None else {"made_up_hits": options.expert_hits})}


def made_up_line(config: qengine.Config, hits: float) -> str:
    """For people: that the experts of decode steps were not the router's."""
    n_hot = route.hot_experts(config.n_experts, config.n_used_experts)
    return (f"the experts of decode steps are made up: {hits:.0%} are among {n_hot} of the {config.n_experts} of their "
            f"layer, and every {route.DRIFT} tokens one of these gives way to another")


def expert_line(counts: dict[str, int]) -> str:
    """For people: where the experts of decode steps were, and what came over the link."""
    hits, used = counts["expert_hits"], counts["expert_hits"] + counts["expert_misses"]
    read, moved, staged = (show_bytes(counts[f"expert_bytes_{how}"]) for how in ("read", "promoted", "staged"))
    return (f"experts: {hits / max(used, 1):.1%} of those that decode steps used lay on the card; over the link came "
            f"{read} that steps have read, {moved} into slots, {staged} for prompts; the host's processor computed "
            f"{counts['expert_computed']:,} in {counts['expert_host_seconds']:.2f} s")


def side_by_side(runs: list[dict]) -> str:
    """For people: tokens/s with a column for each run, and from the second run on how many times the first run's."""
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
