"""Plans: what a model takes of each card's memory, which layers go where, and how long a pass over a prompt takes.

    Work        what some layers compute for a token and keep of it: counts, no times
    StageCosts  Work on one card: seconds of a pass, micro-batches of a pass, tokens of a pass
    Demand      what a model is to be loaded for
    Planner     the Plan of a model on some cards, and what would make it fit

A plan builds the stages of the model on cards that only count (`PlannedCard`), so the figures of a plan are those of
what `load` allocates. This module does not know how a stage is built: it sees the model through the Protocol
`Blueprint`.
"""

import collections
import dataclasses
import functools
import itertools
import math
import numbers
import operator
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import tqdm

from engine.host_memory import free_memory, machine_bytes
from engine.limits import KEPT_CONTEXTS, MOST_DRAFTS, SPARSE
from engine.prefix import PAGE_TOKENS, pages_for
from engine.request import RequestError
from engine.speculate import LARGEST_CHECK
from kernels import block_sparse, probe, q8_gemm
from kernels.card import OutOfMemory, PlannedCard, show_bytes
from kernels.emulated.cards import CARDS
from kernels.formats import FORMATS
from kernels.kv_formats import KV_FORMATS
from kernels.ngram import END_BITS
from kernels.limits import CHECK_ROWS, WISHES
from kernels.products import Products

PEAK_SHARE = 0.75           # plans assume that products reach this share of a card's peak
MIXTURE_SHARE = 0.42        # and that decode steps over experts reach this one, as they did on an H100 (results.md)
ATTENTION_SHARE = 0.32      # share of the half2 peak that attention of prompts reaches (benchmarks/results.md)

# ---- what layers compute and keep ------------------------------------------------------------------------------


class Grouped(NamedTuple):
    """A product in which each row of a pass meets the matrices of n_used out of n_experts experts."""

    n: int                  # of the matrix [n, k] of one expert
    k: int
    n_experts: int
    n_used: int
    n_bytes: int            # of the matrices of all experts

    def touched(self, rows: int) -> float:
        """The share of the experts that `rows` rows meet, if each row chooses its own evenly."""
        return 1 - (1 - self.n_used / self.n_experts) ** rows

    def rows_for(self, rows: int) -> int:
        """Of how many rows an expert meets about `rows`."""
        return rows * self.n_experts // self.n_used


@dataclass(frozen=True)
class Work:
    """What some layers compute for a token of a prompt, and what they keep in memory. Two Work objects can be added.

    A multiplication and an addition are two operations. `products` counts the matrix products by their shape (n, k),
    `grouped` those of experts. Operations are those of the experts that a token uses.
    """

    n_layers: int = 0
    products: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # of quantised matrices
    grouped: collections.Counter = dataclasses.field(default_factory=collections.Counter)   # Grouped -> count
    row_operations: int = 0         # of all matrix products, for one token
    context_operations: int = 0     # of attention, for one token and per token before it
    page_bytes: int = 0             # keys and values of PAGE_TOKENS tokens
    state_bytes: int = 0            # recurrent states of one slot
    record_bytes: int = 0           # what checks note of a slot beside its states

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(operator.add, vars(self).values(), vars(other).values()))

    @property
    def expert_bytes(self) -> int:
        """Bytes of the matrices of all experts."""
        return sum(count * each.n_bytes for each, count in self.grouped.items())

    def expert_bytes_read(self, rows: int) -> int:
        """About how many of them a pass or a step of so many rows reads."""
        return round(sum(count * each.n_bytes * each.touched(rows) for each, count in self.grouped.items()))

    @property
    def idle_bytes(self) -> int:
        """Bytes of weights that a step of one row does not read."""
        return self.expert_bytes - self.expert_bytes_read(1)


# ---- how long a stage takes ------------------------------------------------------------------------------------

CHUNK = 512                 # most tokens of a pass on an emulated card, or where memory is short; a multiple of 64
LARGEST_CHUNK = 8192        # most tokens of a pass on a real card, where more rows make products faster per row
PEAK_ROWS = 4096            # rows of a pass whose products reach PEAK_SHARE
CHUNK_SHARE = 8             # scratch memory of a pass takes 1 / 8 of what weights, a context and its states leave
PASS_SECONDS = 0.5          # the products of a pass take no longer than this at the card's peak
PASS_TOLERANCE = 1.005      # passes this close to the fastest count as equally fast
PRODUCT_SECONDS = 100e-6    # what one more pass costs for each of its products
MICRO_BATCHES = 4           # most micro-batches of a pass, beside one of the rows after the last whole page
MICRO_BATCH_ROWS = 256      # about the fewest rows of a micro-batch
EXPERT_ROWS = 64            # about the fewest rows of an expert in a micro-batch: a tile of kernels/expert_gemm.py
HOST_SHARE = 0.5            # share of a pass's time that queueing its micro-batches may take the host, at most
LAYER_SECONDS = 260e-6      # what the host takes to queue one layer of one micro-batch


class StageCosts:
    """How long a stage's passes take, by the work of its layers and the speed of its card."""

    def __init__(self, card, hidden_dim: int, work: Work, speed: probe.Speed | None = None, in_one: bool = False,
                 products: Products | None = None):
        """speed: that of the card; by default what the probe or the table of cards says. in_one: whether passes go
        without micro-batches, each of which would bring experts from the host. products: by default those of dp4a."""
        self.card, self.hidden_dim, self.work, self.in_one = card, hidden_dim, work, in_one
        self._speed, self.products = speed, products or Products(card, "dp4a")
        self.product_time = functools.cache(self.product_time)

    @functools.cached_property
    def speed(self) -> probe.Speed:
        """That of the card. Its products of int8 are those of prompts, by the kernels that make them."""
        return faster(self._speed or probe.speed_of(self.card), self.gain)

    @functools.cached_property
    def gain(self) -> float:
        return gain_of(self.products, self.work)

    def chunk_that_fits(self, n_pages: int, n_states: int, row_bytes: int) -> int:
        """Tokens of a pass that suit the card: a multiple of PAGE_TOKENS.

        On a real card two limits decide. The scratch memory of the pass, row_bytes per token, gets 1 / CHUNK_SHARE of
        what the weights, n_pages pages and n_states states leave, or room for CHUNK tokens if that is more. And the
        products of the pass take at most PASS_SECONDS, since cancellations and running answers wait for the pass. An
        emulated card gets CHUNK tokens.
        """
        if self.card.kind == "emulated":
            return CHUNK
        kept = n_pages * self.work.page_bytes + n_states * self.work.state_bytes
        fitting = max(self.card.free_bytes - kept, 0) // CHUNK_SHARE // row_bytes
        speed = probe.dot_speed(self.card) * self.gain
        in_time = max(int(PASS_SECONDS * speed / self.work.row_operations), PAGE_TOKENS)
        return min(max(fitting, CHUNK), in_time, LARGEST_CHUNK) // PAGE_TOKENS * PAGE_TOKENS

    def micro_batches(self, n: int) -> list[int]:
        """The rows of each micro-batch of a pass of n rows.

        A micro-batch has about so many rows that the narrowest products, of hidden_dim columns, occupy every SM, and
        that an expert has EXPERT_ROWS of them. All begin at multiples of PAGE_TOKENS rows. There are no more than the
        host can queue in time. Rows that fill no page are a micro-batch of their own, since smaller tiles serve them
        faster; where there are experts, the last micro-batch takes them, since few rows meet many experts, whose
        weights would be read once more. An emulated card gets one: its processors are never partly idle.
        """
        if self.card.kind == "emulated" or self.in_one:
            return [n]
        least = max(q8_gemm.filling_rows(self.card, self.hidden_dim), MICRO_BATCH_ROWS,
                    *(each.rows_for(EXPERT_ROWS) for each in self.work.grouped))
        seconds = n * self.work.row_operations / self.speed.dot / PEAK_SHARE
        queued = int(HOST_SHARE * seconds / (LAYER_SECONDS * self.work.n_layers))
        count = min((n + least // 2) // least, MICRO_BATCHES, queued)
        if count < 2:
            return [n]
        pages, rest = divmod(n, PAGE_TOKENS)
        sizes = [PAGE_TOKENS * (pages * (i + 1) // count - pages * i // count) for i in range(count)]
        sizes.sort(reverse=True)
        if self.work.grouped:
            sizes[-1] += rest
        elif rest:
            sizes.append(rest)
        return sizes

    def product_time(self, rows: int) -> int:
        """How long the products of a pass take, in a unit that compares passes on this card; 0 for 0 rows."""
        return products_time(self.work, self.micro_batches(rows), self.products) if rows else 0

    def pass_seconds(self, rows: int) -> float:
        """About how long a pass takes at the beginning of a prompt. A pass costs some time however few its rows are,
        for each of its products, and since a few rows meet most of the experts, whose weights must all be read."""
        as_rows = self.product_time(rows) * PEAK_ROWS / max(self.product_time(PEAK_ROWS), 1)
        own = PRODUCT_SECONDS * (self.work.products.total() + self.work.grouped.total())
        reading = self.work.expert_bytes_read(rows) / self.speed.read / PEAK_SHARE
        return own + max(as_rows * self.work.row_operations / self.speed.dot / PEAK_SHARE, reading)

    def context_seconds(self) -> float:
        """How much longer a row takes for each token before it."""
        return context_seconds(self.work.context_operations, self.speed)

    def layer_seconds(self, rows: int, start: int, layers: list[Work], is_sparse: bool = False) -> list[float]:
        """About how long each of the layers takes in a pass over a dense or a sparse prompt that begins at position
        `start`. A draft block counts with the last one."""
        at_peak = rows * self.work.row_operations / self.speed.dot      # `pass_seconds` is 0 for a model in float32
        products = max(self.pass_seconds(rows), at_peak) / self.work.row_operations
        attention = context_seconds(rows * attended(start + rows // 2, is_sparse), self.speed)
        found = [products * each.row_operations + attention * each.context_operations for each in layers]
        found[-1] += products * (self.work.row_operations - sum(each.row_operations for each in layers))
        return found

    def hop_seconds(self, rows: int) -> float:
        """How long the hidden states of a pass take to the host, or from there to the card."""
        return hop_bytes(self.hidden_dim, rows) / self.speed.link


def products_time(work: Work, sizes: list[int], products: Products) -> int:
    """The time of the products of a pass, as q8_gemm.relative_time. sizes: the rows of its micro-batches."""
    return (sum(count * products.relative_time(n, k, sizes) for (n, k), count in work.products.items())
            + sum(count * products.relative_time_of_experts(each.n, each.k, each.n_experts,
                                                            [size * each.n_used for size in sizes])
                  for each, count in work.grouped.items()))


def gain_of(products: Products, work: Work) -> float:
    """How many times as fast as by dp4a the products of a long pass are."""
    time, by_dp4a = (products_time(work, [PEAK_ROWS], each) for each in (products, Products(products.card, "dp4a")))
    return by_dp4a / time if time else 1.0


def faster(speed: probe.Speed, gain: float) -> probe.Speed:
    """A card's Speed, with `gain` times as many operations of int8 products."""
    return speed._replace(dot=speed.dot * gain)


def context_seconds(operations: int, speed: probe.Speed) -> float:
    """Seconds of so many operations of attention of prompts."""
    return operations / speed.half2 / ATTENTION_SHARE


def attended(context: int, is_sparse: bool) -> int:
    """How many keys a row of a prompt reads that has so many tokens before it; in a sparse prompt, about as many as it
    may, with what the choice takes."""
    return block_sparse.keys_worth(context) if is_sparse else context


def hop_bytes(hidden_dim: int, rows: int) -> int:
    """Bytes of the residual stream of so many tokens: float32."""
    return 4 * hidden_dim * rows


# ---- passes over a prompt --------------------------------------------------------------------------------------


def slowest_seconds(costs: list[StageCosts]):
    """A function (rows, context, is_sparse=False) -> seconds: the time of a pass over a dense or a sparse prompt of so
    many rows, with `context` tokens before it, on the slowest stage or hop."""
    edges = list(itertools.pairwise(costs))
    attention = max(each.context_seconds() for each in costs)

    @functools.cache
    def without_context(rows):
        hops = [each.hop_seconds(rows) for edge in edges for each in edge]
        return max([each.pass_seconds(rows) for each in costs] + hops)

    return lambda rows, context, is_sparse=False: (
        without_context(rows) + attention * rows * attended(context, is_sparse))


def choose_rows(start: int, end: int, limit: int, n_stages: int, slowest, last: int = 0) -> int:
    """Tokens of the next pass over a prompt that ends at `end` and is done up to `start`, at most `limit`. The result
    is a multiple of PAGE_TOKENS, or all tokens that are left.

    slowest: as `slowest_seconds` gives it. last: tokens of the prompt's pass before this one, 0 for none.

    The time of a prompt on n stages is the sum of all passes on one stage, plus n - 1 times the longest pass, while the
    pipeline fills and drains. Larger passes use a card better and cost their fixed price less often. Smaller passes
    shorten the second term, unless an earlier pass of the prompt was longer. Among sizes that are about equally fast,
    several stages get the smallest.
    """
    n = end - start
    sizes = [*([n] if n <= limit else []), *range(min(limit, n) // PAGE_TOKENS * PAGE_TOKENS, 0, -PAGE_TOKENS)]
    so_far = slowest(last, start) if last else 0.0

    def seconds(rows):              # attention counts in the last term alone: its sum is the same for all sizes
        rest = slowest(n % rows, 0) if n % rows else 0.0
        return n // rows * slowest(rows, 0) + rest + (n_stages - 1) * max(slowest(rows, end), so_far)

    found = {rows: seconds(rows) for rows in sizes}
    if n_stages == 1:
        return min(found, key=found.get)
    return min(rows for rows in sizes if found[rows] <= PASS_TOLERANCE * min(found.values()))


def passes_over(n: int, next_rows):
    """(start, tokens) of each pass over a prompt of n tokens. next_rows(start, last): tokens of the pass that begins at
    `start`, behind a pass of `last` tokens."""
    start = rows = 0
    while start < n:
        rows = next_rows(start, rows)
        yield start, rows
        start += rows


DRAFTS = {"off": 0, "auto": MOST_DRAFTS}


def check_whole(name: str, value: int | None) -> int | None:
    """The value of an argument of `load`, if it is a whole number or none. Raises RequestError."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
        raise RequestError(name, f"{name} must be a whole number, not {value!r}")
    return value


def most_drafts(draft: int | str) -> int:
    """The most drafts of an answer in a step, as `load` and the command line name them. Raises RequestError."""
    most = DRAFTS.get(draft, draft)
    if not isinstance(most, int) or not 0 <= most <= MOST_DRAFTS:
        raise RequestError("draft", f"draft must be 'auto', 'off' or a whole number from 0 to {MOST_DRAFTS}")
    return most


def step_rows(slots: int, drafts: int) -> int:
    """Rows of the largest decode step. drafts: most drafts of an answer. However few they are, one answer may have
    CHECK_ROWS rows, for tokens that a grammar forces."""
    return max(slots, CHECK_ROWS, min(slots * (1 + drafts), LARGEST_CHECK))


def widest(n: int, rows: int) -> int:
    """The most rows that each of n answers may have in a step of so many rows."""
    return min(max(rows // n, 1), CHECK_ROWS)


def group_count(n_stages: int, n_slots: int) -> int:
    """How many groups the answers form. Each stage can then work on the decode step of another group."""
    return min(n_stages, n_slots)


@dataclass(frozen=True)
class Schedule:
    """When each stage works on each pass of a prompt, in seconds from the beginning of the first pass."""

    spans: list[list[tuple[float, float]]]      # [stage][pass]: beginning and end

    @property
    def seconds(self) -> float:
        return self.spans[-1][-1][1]

    @property
    def busy(self) -> list[float]:
        """The share of the time that each stage works."""
        return [sum(end - start for start, end in stage) / self.seconds for stage in self.spans]


def schedule(passes: list, hops: list) -> Schedule:
    """The Schedule of a prompt whose passes take passes[stage][pass] seconds and whose hops take
    hops[edge][pass] = (out, in) seconds for the copies to the host and from the host. A model of `Pipeline.prefill`."""
    n_stages, n_passes = len(passes), len(passes[0])
    starts, ends, outs, ins = ([[0.0] * n_passes for _ in range(n_stages)] for _ in range(4))

    def at(times, i):
        return times[i] if i >= 0 else 0.0

    for i in range(n_passes):
        for stage in range(n_stages):
            start = max(ins[stage][i], at(ends[stage], i - 1), at(outs[stage], i - 3))
            if stage == 0:                              # the host queues no more than so many passes ahead
                start = max(start, at(ends[-1], i - 2 * n_stages))
            starts[stage][i], ends[stage][i] = start, start + passes[stage][i]
            if stage == n_stages - 1:
                continue
            out, into = hops[stage][i]                  # each side has two buffers, and so has host memory between them
            begin = max(ends[stage][i], at(outs[stage], i - 1), at(ins[stage + 1], i - 2))
            outs[stage][i] = begin + out
            begin = max(outs[stage][i], at(ins[stage + 1], i - 1), at(starts[stage + 1], i - 2))
            ins[stage + 1][i] = begin + into
    return Schedule([list(zip(*times)) for times in zip(starts, ends)])


# ---- sizes of the caches ---------------------------------------------------------------------------------------

LEAST_CHECKPOINTS = 2           # on the card, however little memory there is, unless SPARED says less


@dataclass(frozen=True)
class CacheSizes:
    """How much the caches of all stages hold."""

    n_slots: int
    max_pages: int              # of one slot
    n_pages: int                # of all slots and of what is kept for later prompts
    n_checkpoints: int          # on the card
    n_host_checkpoints: int     # in host memory, at most

    @property
    def shortage(self) -> str:
        """For people: whether the pages are too few for contexts of full length in all slots; "" if they are not."""
        is_short = self.n_pages < self.n_slots * self.max_pages
        return f" (not all {self.n_slots} at full length at once: the others wait)" * is_short


def choose_sizes(stages: list, demand: "Demand") -> CacheSizes:
    """How the memory that the weights have left is divided. stages: each has a card, costs, page_bytes and state_bytes.

    The pages hold demand.kv_tokens tokens. By default, where passes are packed, they hold a context, or a page of each
    slot if that is more. Otherwise they hold the contexts of all slots, but no more than fits into 90 % of the free
    memory, and one context at least. Unless checkpoints are switched off (both memories 0), later prompts can use more
    pages: the default is raised to KEPT_CONTEXTS contexts per slot, but no more than fits into a quarter of the free
    memory. Checkpoints get demand.checkpoint_memory bytes of each card, by default a quarter of what the pages leave,
    and demand.checkpoint_host_memory bytes of the host, by default an eighth of what experts and tables of embeddings
    there leave of the machine's memory. Each card has at least demand.least_checkpoints. More checkpoints than pages
    are of no use, since a page has one at most.
    """
    d, max_pages = demand, pages_for(demand.n_ctx)
    if d.kv_tokens is None and d.packed:
        n_pages = max(max_pages, d.slots)
    elif d.kv_tokens is None:
        fitting = min((stage.card.free_bytes - (d.slots + d.least_checkpoints) * stage.state_bytes
                       - d.slots * stage.costs.work.record_bytes) // max(stage.page_bytes, 1) for stage in stages)
        n_pages = max(min(d.slots * max_pages, int(0.9 * fitting)), max_pages)
        if d.checkpoint_memory != 0 or d.checkpoint_host_memory != 0:
            n_pages = max(n_pages, min(KEPT_CONTEXTS * d.slots * max_pages, fitting // 4))
    else:
        n_pages = pages_for(d.kv_tokens)
    n_checkpoints = n_pages
    for stage in stages:
        kept = d.slots * (stage.state_bytes + stage.costs.work.record_bytes) + n_pages * stage.page_bytes
        free = stage.card.free_bytes - kept
        budget = free // 4 if d.checkpoint_memory is None else d.checkpoint_memory
        n_checkpoints = min(n_checkpoints, budget // max(stage.state_bytes, 1))
    host_memory = d.checkpoint_host_memory
    if host_memory is None:
        locked = sum(stage.store.locked_bytes for stage in stages if stage.store)
        locked += d.table_on_host * sum(stage.table_bytes for stage in stages)
        host_memory = max(machine_bytes() - locked, 0) // 8
    n_host = host_memory // max(sum(stage.state_bytes for stage in stages), 1)
    return CacheSizes(d.slots, max_pages, n_pages, max(n_checkpoints, d.least_checkpoints), min(n_host, n_pages))


HOST_MEMORY_SHARE = 0.9         # of the machine's memory, for experts at most
WINDOW_SHARE = 2 / 3            # of its free memory, for those experts of a file that were needed last


def exceeds_machine(n_bytes: int) -> bool:
    """Whether experts of so many bytes are too much for this machine's memory."""
    return n_bytes > HOST_MEMORY_SHARE * machine_bytes()


def window_bytes(share: float, free: int) -> int:
    """Host memory for the experts of a card, if all lie in a file. share: its part of what all cards get. free: bytes
    that nothing needs."""
    return int(share * WINDOW_SHARE * free)


# ---- which layers go where -------------------------------------------------------------------------------------


LONGEST_CTX = 1 << END_BITS     # tokens of a context that drafts can be looked for in


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
    drafts: int = 0             # most drafts of an answer in a decode step
    expert_memory: int | None = None    # bytes of each card for experts; None: for all, if they fit
    memory: int | None = None   # bytes of each card that engines may take; None: what the card allows now
    packed: bool = False        # passes are over parts of several texts, one for each slot, and nothing is decoded
    products: str = "auto"      # which kernels multiply the rows of prompts, see kernels/products.py
    eyes: object = None         # the Eyes of engine/sight.py, if the model is to see
    sparse: str = "off"         # whether prompts may leave out keys: "off", "ask" or "on", see `is_sparse`
    least_checkpoints: int = LEAST_CHECKPOINTS      # on each card
    table_on_host: bool = False     # whether token embeddings lie in host memory (engine/host_table.py)
    # Bytes of host memory that nothing needed before the model was loaded.
    host_memory: int = field(default_factory=lambda: free_memory(), compare=False)

    @property
    def contexts(self) -> str:
        """For people."""
        return f"{self.n_ctx:,}" if self.packed else f"{self.slots} x {self.n_ctx:,}"

    def __post_init__(self):
        """Raises RequestError."""
        for name in ("slots", "chunk", "kv_tokens", "checkpoint_memory", "checkpoint_host_memory", "memory",
                     "expert_memory"):
            check_whole(name, getattr(self, name))
        limits = ("ctx", self.n_ctx, 1), ("slots", self.slots, 1), ("chunk", self.chunk, PAGE_TOKENS)
        for name, value, unit in limits:
            if value is not None and (value < 1 or value % unit):
                raise RequestError(name, f"{name} must be {unit}, {2 * unit}, ..., not {value}")
        if self.chunk is not None and self.chunk > LARGEST_CHUNK:   # kernels index a pass's arrays with 32 bits
            raise RequestError("chunk", f"chunk must be at most {LARGEST_CHUNK}, not {self.chunk}")
        if self.n_ctx > LONGEST_CTX:
            raise RequestError("ctx", f"ctx must be at most {LONGEST_CTX}, not {self.n_ctx}")
        for name in "expert_memory", "memory":
            if (value := getattr(self, name)) is not None and value < 0:
                raise RequestError(name, f"{name} must be 0 or more, not {value}")
        if self.products not in WISHES:
            raise RequestError("products", f"products must be {', '.join(WISHES)}, not {self.products!r}")
        if self.sparse not in SPARSE:
            raise RequestError("sparse", f"sparse must be {', '.join(SPARSE)}, not {self.sparse!r}")
        if self.kv_tokens is not None and self.kv_tokens < self.n_ctx:
            raise RequestError("kv_tokens", f"kv_tokens must be at least the {self.n_ctx} tokens of a context, not "
                                            f"{self.kv_tokens}")


class Blueprint(Protocol):
    """A model that is to be planned. qengine.py implements this."""

    name: str
    n_layers: int
    hidden_dim: int
    context_length: int                 # tokens the model was made for
    parameters: str                     # how many there are, for people
    kv: str                             # the KV format

    def stage(self, card: PlannedCard, layers: range, demand: Demand, chunk: int | None):
        """A stage of these layers on a card that only counts. It has card, layers, chunk, costs (StageCosts),
        weight_bytes, table_bytes (of them, or in host memory: token embeddings that nothing multiplies), page_bytes,
        state_bytes, store (an ExpertStore or None), and allocate(sizes, n_groups)."""

    def layer(self, card: PlannedCard, index: int) -> Work:
        """Allocates the weights of a layer on the card and returns its Work."""

    def head_bytes(self, card: PlannedCard) -> int:
        """Bytes of the output head's matrix."""

    def formats(self) -> list[str]:
        """The formats of the matrices of layers, without those of experts."""

    def changed(self, format: str | None = None, kv: str | None = None) -> "Blueprint":
        """The same model with its matrices in another weight format, or its keys and values in another KV format."""


def check_split(split, n_layers: int, n_cards: int) -> list[range]:
    """The range of layers of each card: split[i] layers on card i. Raises RequestError."""
    if len(split) != n_cards or sum(split) != n_layers or min(split) < 1:
        raise RequestError("split", f"split must be {n_cards} number{'s' * (n_cards > 1)} from 1 on, one per card, "
                                    f"with the sum {n_layers}, not {','.join(map(str, split))}")
    ends = list(itertools.accumulate(split))
    return [range(end - n, end) for n, end in zip(split, ends)]


def best_split(costs: np.ndarray) -> list[range] | None:
    """The layers of each stage, at least one each, such that the largest costs[stage, start, end] is as small as
    possible: float [n_stages, n_layers + 1, n_layers + 1]. None where every split has an infinite cost. Among equals
    the earlier stages get more layers."""
    n_layers, cuts = costs.shape[-1] - 1, []
    best = np.append(np.full(n_layers, np.inf), 0.0)    # of layers start .. n_layers - 1, over the stages done so far
    for cost in reversed(np.where(np.tri(n_layers + 1, dtype=bool), np.inf, costs)):    # no stage is empty
        worst = np.maximum(cost, best)[:, ::-1]         # of equals, the first is taken: the largest end
        cuts.append(n_layers - worst.argmin(1))
        best = worst.min(1)
    if np.isinf(best[0]):
        return None
    ends = list(itertools.accumulate(reversed(cuts), lambda start, cut: int(cut[start]), initial=0))
    return [range(*each) for each in itertools.pairwise(ends)]


class LayerCosts:
    """What the layers start .. end - 1 cost on each card of a plan: memory and time. start and end may be arrays."""

    def __init__(self, blueprint: Blueprint, cards: list, wish: str = "auto"):
        """wish: see kernels/products.py."""
        self.n_layers = blueprint.n_layers
        counting, sizes, works = PlannedCard(cards[0]), [0], [Work()]
        for index in range(blueprint.n_layers):
            with counting.packed():
                works.append(blueprint.layer(counting, index))
            sizes.append(counting.packed_bytes)
        self.head_bytes = blueprint.head_bytes(counting)
        self.weight_bytes = np.cumsum(sizes, dtype=float)       # of the layers before each; exact up to 2 ** 53
        self.works = list(itertools.accumulate(works))          # Work of the layers before each
        self.sums: dict[str, np.ndarray] = {}                   # field of Work -> its values in `works`
        self.expert_bytes = self.works[-1].expert_bytes
        self.speeds = [faster(probe.speed_of(card), gain_of(Products.of(card, wish), self.works[-1])) for card in cards]

    def between(self, start, end, field: str):
        """The sum of a field of Work over the layers start .. end - 1."""
        if field not in self.sums:
            self.sums[field] = np.array([getattr(work, field) for work in self.works], float)
        sums = self.sums[field]
        return sums[end] - sums[start]

    def prefill_seconds(self, stage: int, start, end, context: float):
        """Seconds of a token of a prompt that has `context` tokens before it."""
        speed = self.speeds[stage]
        products = self.between(start, end, "row_operations") / speed.dot / PEAK_SHARE
        return products + context * context_seconds(self.between(start, end, "context_operations"), speed)

    def decode_seconds(self, stage: int, start, end, context: int):
        """Seconds of a decode step of one answer."""
        head = self.head_bytes * (end == self.n_layers)
        n_bytes = self.memory(start, end, pages_for(context), 2) + head        # states are read and written
        return (n_bytes - self.between(start, end, "idle_bytes")) / self.speeds[stage].read / PEAK_SHARE

    def memory(self, start, end, n_pages: int, n_states: int, n_slots: int = 0, expert_memory: int | None = None):
        """Bytes of weights, pages, states, and records of checks. expert_memory: see Demand."""
        elsewhere = 0
        if expert_memory is not None:
            elsewhere = np.maximum(self.between(start, end, "expert_bytes") - expert_memory, 0)
        return (self.weight_bytes[end] - self.weight_bytes[start] - elsewhere
                + n_pages * self.between(start, end, "page_bytes")
                + n_states * self.between(start, end, "state_bytes")
                + n_slots * self.between(start, end, "record_bytes"))

    def few_of_each_kind(self) -> int:
        """The smallest n such that the first n layers include every kind of memory that the model keeps: pages,
        states."""
        kept = ["page_bytes", "state_bytes"]
        whole = [self.between(0, self.n_layers, field) > 0 for field in kept]
        return next(n for n in range(1, self.n_layers + 1)
                    if [self.between(0, n, field) > 0 for field in kept] == whole)


def place_layers(demand: Demand, costs: LayerCosts, room: np.ndarray) -> list[range]:
    """The layers of each of several cards. room: bytes of each for weights, pages and states of layers.

    Of the splits that fit into memory, those are kept whose slowest card takes the least time for a prompt. Of these,
    the one is chosen whose slowest card takes the least time for a decode step. A split fits if it has room for the
    contexts of all slots, or, if no split has, for one context. If not even one context fits, the split is chosen as if
    memory did not matter: the plan then shows what is missing on which card.
    """
    context, least, n_cards = demand.n_ctx // 2, pages_for(demand.kv_tokens or demand.n_ctx), len(room)
    starts, ends = np.ogrid[:costs.n_layers + 1, :costs.n_layers + 1]
    prefill, decode = (np.stack([seconds(stage, starts, ends, context) for stage in range(n_cards)])
                       for seconds in (costs.prefill_seconds, costs.decode_seconds))
    wished = least if demand.kv_tokens or demand.packed else demand.slots * pages_for(demand.n_ctx)
    for n_pages, n_checkpoints in (wished, LEAST_CHECKPOINTS), (least, LEAST_CHECKPOINTS), (least, 1), (None, 1):
        fits = n_pages is None or room[:, None, None] >= costs.memory(
            starts, ends, n_pages, demand.slots + n_checkpoints, demand.slots, demand.expert_memory)
        if found := best_split(np.where(fits, prefill, np.inf)):
            slowest = max(prefill[stage, layers.start, layers.stop] for stage, layers in enumerate(found))
            return best_split(np.where(fits & (prefill <= slowest * (1 + 1e-9)), decode, np.inf))


def memory_for_layers(blueprint: Blueprint, cards: list, demand: Demand, costs: LayerCosts) -> np.ndarray:
    """Bytes that each card has for weights, pages and states of layers. A stage also needs scratch memory and buffers
    for hops. Their size does not depend on the number of layers, so it is measured on a plan of stages of a few
    layers."""
    n_layers, n_cards, least = blueprint.n_layers, len(cards), pages_for(demand.kv_tokens or demand.n_ctx)
    few = min(costs.few_of_each_kind(), n_layers // n_cards)
    samples = [range(few), *[range(1, 1 + few)] * (n_cards - 2), range(n_layers - few, n_layers)]
    sampled = plan_stages(blueprint, cards, dataclasses.replace(
        demand, chunk=demand.chunk or CHUNK, kv_tokens=least * PAGE_TOKENS, checkpoint_memory=0), samples)
    n_states = demand.slots + sampled.sizes.n_checkpoints
    return np.array([left + costs.memory(layers.start, layers.stop, least, n_states, demand.slots, demand.expert_memory)
                     for left, layers in zip(sampled.left, samples)])


# ---- the plan --------------------------------------------------------------------------------------------------

# What a plan does without where a model does not fit: changes of a Demand. What costs less time comes first.
SPARED = {"table_on_host": True}, {"table_on_host": True, "least_checkpoints": 1}


@dataclass(frozen=True)
class StagePlan:
    """What a stage takes of the memory of its card, in bytes."""

    card: str
    layers: range
    free: int                   # before
    weights: int
    kv: int                     # pages of keys and values
    states: int                 # recurrent states of the slots
    checkpoints: int
    scratch: int                # for passes, hops and sampling, and what is lost to rounding (Card.granule)
    drafts: int                 # what drafts take: a block that makes them and its pages,
                                # records that take states back, rows of checks; not counted in the others

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.states + self.checkpoints + self.scratch + self.drafts


@dataclass(frozen=True)
class Plan:
    """Where a model goes, and what that takes."""

    left: list[int]             # bytes of each card that nothing takes; below 0: so many are missing
    on_paper: list              # the stages on cards that only count
    demand: Demand
    sizes: CacheSizes
    chunk: int                  # tokens of a pass, the same for all stages
    columns: Callable[[], list[StagePlan]]      # what memory is for; this takes as long as the rest of a plan

    @functools.cached_property
    def stages(self) -> list[StagePlan]:
        return self.columns()

    @property
    def fits(self) -> bool:
        return min(self.left) >= 0

    @property
    def layers(self) -> list[range]:
        return [stage.layers for stage in self.on_paper]

    @property
    def spared(self) -> list[str]:
        """For people: what the plan does without, in order to fit."""
        table, said = sum(stage.table_bytes for stage in self.on_paper), []
        if self.demand.table_on_host and table:
            said.append(f"token embeddings: {show_bytes(table)} of page-locked host memory, as the card lacks room")
        if self.sizes.n_checkpoints < LEAST_CHECKPOINTS:
            said.append("checkpoints: one on the card, as it lacks room, and the others in host memory")
        return said

    @property
    def costs(self) -> list[StageCosts]:
        return [stage.costs for stage in self.on_paper]

    def table(self) -> str:
        """For people: a line for each card."""
        names = "weights", "kv", "states", "checkpoints", "scratch", "drafts", "total", "free"
        heads = "weights", "KV pages", "states", "checkpoints", "scratch", "drafts", "together", "free"
        widths = [max(len(head), 9) + 2 for head in heads]
        width = max(len(stage.card) for stage in self.stages)
        lines = [f"{'card':{width}}  {'layers':>9}" + "".join(f"{head:>{n}}" for head, n in zip(heads, widths))]
        for stage in self.stages:
            layers = f"{stage.layers.start} - {stage.layers.stop - 1}"
            sizes = "".join(f"{show_bytes(getattr(stage, name)):>{n}}" for name, n in zip(names, widths))
            missing = f"  {show_bytes(stage.total - stage.free)} too much" if stage.total > stage.free else ""
            lines.append(f"{stage.card:{width}}  {layers:>9}{sizes}{missing}")
        return "\n".join(lines)


def plan_stages(blueprint: Blueprint, cards: list, demand: Demand, layers: list[range]) -> Plan:
    """The Plan of these layers on each card, whether they fit or not. If they do not, the plan does without the first
    of SPARED that makes them fit, if any does. All experts leave the cards before anything else does."""
    found = stages_planned(blueprint, cards, demand, layers)
    has_experts = any(stage.costs.work.expert_bytes for stage in found.on_paper)
    for spared in () if has_experts and demand.expert_memory != 0 else SPARED:
        saved = [stage.table_bytes + (found.sizes.n_checkpoints - spared.get("least_checkpoints", LEAST_CHECKPOINTS))
                 * stage.state_bytes for stage in found.on_paper]
        if not found.fits and all(left + n >= 0 for left, n in zip(found.left, saved)):
            other = stages_planned(blueprint, cards, dataclasses.replace(demand, **spared), layers)
            if other.fits:
                return other
    return found


def stages_planned(blueprint: Blueprint, cards: list, demand: Demand, layers: list[range]) -> Plan:
    """The Plan of these layers on each card, with all that was demanded."""
    demand, chunk = dataclasses.replace(demand, split=tuple(map(len, layers))), demand.chunk
    while True:                                 # a second round if the stages have chosen different chunks
        stages = [blueprint.stage(PlannedCard(card), each, demand, chunk) for card, each in zip(cards, layers)]
        if len({stage.chunk for stage in stages}) == 1:
            break
        chunk = min(stage.chunk for stage in stages)
    sizes, free = choose_sizes(stages, demand), [card.free_bytes for card in cards]
    used = [taken(stage, sizes, len(stages)) for stage in stages]

    def columns():
        return [stage_plan(blueprint, card, stage, demand, sizes, len(stages), *each)
                for card, stage, *each in zip(cards, stages, free, used)]

    return Plan([a - b for a, b in zip(free, used)], stages, demand, sizes, stages[0].chunk, columns)


def stage_plan(blueprint: Blueprint, card, stage, demand: Demand, sizes: CacheSizes, n_stages: int, free: int,
               used: int) -> StagePlan:
    """What a stage on paper needs memory for. used: the bytes that it takes of the `free` bytes of its card."""
    plain, drafts = stage, 0
    if demand.drafts:
        without = dataclasses.replace(demand, drafts=0)
        plain = blueprint.stage(PlannedCard(card), stage.layers, without, stage.chunk)
        drafts = used - taken(plain, sizes, n_stages)
    kv, states = sizes.n_pages * plain.page_bytes, sizes.n_slots * plain.state_bytes
    checkpoints = sizes.n_checkpoints * plain.state_bytes
    scratch = used - drafts - plain.weight_bytes - kv - states - checkpoints
    return StagePlan(card.name, stage.layers, free, plain.weight_bytes, kv, states, checkpoints, scratch, drafts)


def taken(stage, sizes: CacheSizes, n_stages: int) -> int:
    """Bytes that a stage on paper takes of its card, with caches of these sizes, which this call allocates."""
    stage.allocate(sizes, group_count(n_stages, sizes.n_slots))
    return stage.card.card.free_bytes - stage.card.free_bytes


def most(low: int, high: int, fits) -> int | None:
    """The largest n from low to high for which fits(n) is true; None if there is none. fits(n) must be true up to some
    n and false from there on."""
    found, beyond = low - 1, high + 1
    first = [high, low]
    while beyond - found > 1:
        n = first.pop(0) if first else (found + beyond) // 2
        if found < n < beyond:
            found, beyond = (n, beyond) if fits(n) else (found, n)
    return found if found >= low else None


def free_of_disk(folder: Path) -> int:
    """Bytes for files in a folder, which need not exist yet."""
    folder = folder.absolute()
    return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free


EXPERT_SHARES = 64          # memory for experts is chosen in steps of 1 / 64 of all experts
HIT_RATES = 0.8, 0.9, 0.95  # of experts on the card, of which a plan says what they cost
DISK = 2e9                  # bytes per second that plans assume of an SSD
BAR_DELAY = 0.3             # seconds after which a terminal shows how far `Planner.shown` is
MOST_CARDS = 16             # `Planner.changes` proposes up to so many cards
SHORTEST_CTX = 1024         # and no shorter context, unless it has half of the demanded tokens: it is of no use


class Planner:
    """The plan of a model on some cards, and what could be different about it."""

    def __init__(self, blueprint: Blueprint, cards: list, demand: Demand, spare: list = ()):
        """spare: cards that were opened with the others and are not to be used. Raises RequestError."""
        if len(cards) > blueprint.n_layers:
            raise RequestError("card", f"{blueprint.name} has {blueprint.n_layers} layers: {len(cards)} cards are too "
                                       "many")
        self.blueprint, self.demand, self.cards, self.spare = blueprint, demand, cards, list(spare)
        self.asked = demand         # self.demand may also say what of the experts stays on the cards
        if demand.memory is not None:
            for card in [*cards, *spare]:
                card.limit(demand.memory)
        self.plan = self.planned()
        if demand.expert_memory is not None and not self.costs.expert_bytes:
            raise RequestError("expert_memory", f"expert_memory: {blueprint.name} has no experts")
        self.moves_experts = not self.plan.fits and demand.expert_memory is None and self.costs.expert_bytes > 0
        if self.moves_experts:
            self._move_experts()
        if not self.plan.fits:      # then the plan says what is missing even if all is spared that can be
            self.plan = self._spared()

    @functools.cached_property
    def costs(self) -> LayerCosts:
        return LayerCosts(self.blueprint, self.cards, self.demand.products)

    @property
    def _moved(self) -> dict:
        """Changes of the demand by which all experts leave the cards, if they may."""
        return {"expert_memory": 0} if self.moves_experts else {}

    def _move_experts(self):
        """Leaves as many experts on the cards as fit, and the others in the host's memory."""
        unit, plans = self.costs.expert_bytes // EXPERT_SHARES, {}

        def fits(n):
            plans[n] = self.planned(expert_memory=n * unit)
            return plans[n].fits

        n = most(0, EXPERT_SHARES - 1, fits)
        if n is not None:
            self.demand, self.plan = dataclasses.replace(self.demand, expert_memory=n * unit), plans[n]

    def planned(self, **changes) -> Plan:
        """The Plan, whether it fits or not, with other fields of the demand."""
        demand = dataclasses.replace(self.demand, **changes)
        if demand.split:
            layers = check_split(demand.split, self.blueprint.n_layers, len(self.cards))
        elif len(self.cards) == 1:
            layers = [range(self.blueprint.n_layers)]
        else:
            return self.placed(demand)
        return plan_stages(self.blueprint, self.cards, demand, layers)

    def _spared(self, **changes) -> Plan:
        """The same where all is spared that can be. On several cards this may choose another split."""
        return self.planned(**SPARED[-1], **self._moved, **changes)

    def fits(self, **changes) -> bool:
        """Whether the model fits with other fields of the demand. Where experts had to leave the cards, all of them
        may."""
        return self.planned(**self._moved, **changes).fits or self._spared(**changes).fits

    def placed(self, demand: Demand) -> Plan:
        """The Plan with the best split. How much memory is lost to rounding (Card.granule) depends on the split. If a
        card lacks memory for that reason, the split is chosen again with so much less memory on the card, until it fits
        or does not change any more."""
        plan, before = None, None
        room = memory_for_layers(self.blueprint, self.cards, demand, self.costs)
        while plan is None or not plan.fits:
            layers = place_layers(demand, self.costs, room)
            if layers == before:
                break
            plan, before = plan_stages(self.blueprint, self.cards, demand, layers), layers
            room = room + np.minimum(plan.left, 0)
        return plan

    def longest_context(self) -> int | None:
        """The most tokens of a context that fit, in whole pages. At most what the model was made for, or what is
        demanded if that is more; and at most the demanded kv_tokens. Where experts had to leave the cards, all of them
        may."""
        longest = pages_for(max(self.blueprint.context_length, self.demand.n_ctx))
        if self.demand.kv_tokens:
            longest = min(longest, self.demand.kv_tokens // PAGE_TOKENS)
        n = most(1, longest, lambda n: self.fits(n_ctx=n * PAGE_TOKENS))
        return n and n * PAGE_TOKENS

    def passes(self, n: int) -> list[tuple[int, int]]:
        """(start, tokens) of the passes over a prompt of n tokens, as the engine makes them."""
        slowest = slowest_seconds(self.plan.costs)
        return list(passes_over(n, lambda start, last: choose_rows(
            start, n, self.plan.chunk, len(self.cards), slowest, last)))

    def prompt_schedule(self, n: int, with_hops: bool = True) -> Schedule:
        """The expected Schedule of a prompt of n tokens; without hops, links count as infinitely fast."""
        passes, costs = self.passes(n), self.plan.costs
        seconds = [[each.pass_seconds(rows) + rows * (start + rows / 2) * each.context_seconds()
                    for start, rows in passes] for each in costs]
        hops = [[(a.hop_seconds(rows) * with_hops, b.hop_seconds(rows) * with_hops) for _, rows in passes]
                for a, b in itertools.pairwise(costs)]
        return schedule(seconds, hops)

    def expected_hops(self) -> tuple[float, float, float]:
        """Three shares: of the time of a prompt that fills the context, the part that hops add and the part in which
        the least busy card works; and of the time of a decode step of one answer, the part that hops take."""
        n = self.demand.n_ctx
        found = self.prompt_schedule(n)
        added = 1 - self.prompt_schedule(n, with_hops=False).seconds / found.seconds
        step, hops = self.step_seconds(n // 2)
        return added, min(found.busy), hops / (step + hops)

    def step_seconds(self, context: int) -> tuple[float, float]:
        """What cards and what hops take of a decode step of one answer, expected."""
        cards = sum(self.costs.decode_seconds(i, stage.layers.start, stage.layers.stop, context)
                    for i, stage in enumerate(self.plan.on_paper))
        return cards, sum(a.hop_seconds(1) + b.hop_seconds(1) for a, b in itertools.pairwise(self.plan.costs))

    def speed_line(self) -> str:
        """For people: how fast a prompt that fills the context is, and the answer behind it. If experts are missing on
        cards, also the time that this costs in a pass."""
        n, stores = self.demand.n_ctx, [stage.store for stage in self.plan.on_paper if stage.store]
        if stores:
            missing, n_passes = [store.missing_bytes for store in stores], len(self.passes(n))
            links = sum(nbytes / probe.speed_of(store.card).link for nbytes, store in zip(missing, stores))
            disk = sum(nbytes for nbytes, store in zip(missing, stores) if store.in_file) / DISK
            from_disk = f", up to {disk:.1f} s from the disk" * (disk > 0)
            return (f"a pass of {self.plan.chunk:,} tokens of a prompt needs {show_bytes(sum(missing))} of experts "
                    f"that are not on the cards: {links:.1f} s over their links{from_disk}; a prompt of {n:,} tokens "
                    f"takes {n_passes:,} such pass{'es' * (n_passes > 1)}")
        share = MIXTURE_SHARE if self.costs.works[-1].grouped else PEAK_SHARE
        cards, hops = self.step_seconds(n)
        return (f"ESTIMATE, at {PEAK_SHARE:.0%} of the cards' peaks: a prompt of {n:,} tokens at "
                f"{n / self.prompt_schedule(n).seconds:,.0f} tokens/s, one answer behind it at "
                f"{1 / (cards * PEAK_SHARE / share + hops):,.0f}"
                + " (counted with all keys, though --sparse leaves some out)" * (self.demand.sparse == "on")
                + f" (at {share:.0%}: it reads experts)" * (share != PEAK_SHARE))

    def hop_lines(self) -> list[str]:
        """What hops between cards cost, for people. Shares of time assume that all experts are on the cards."""
        n, chunk, hidden_dim = self.demand.n_ctx, self.plan.chunk, self.blueprint.hidden_dim
        links = ", ".join(f"{speed.link / 1e9:g}" for speed in self.costs.speeds)
        lines = [f"a hop: {show_bytes(hop_bytes(hidden_dim, chunk))} for a pass of {chunk} tokens, "
                 f"{show_bytes(hop_bytes(hidden_dim, 1))} for one token, over links of {links} GB/s"]
        if not any(stage.store for stage in self.plan.on_paper):
            added, busy, decode = self.expected_hops()
            lines += [f"expected share of time in hops: {added:.1%} of a prompt of {n:,} tokens in "
                      f"{len(self.passes(n))} passes, {decode:.1%} of a step of one answer",
                      f"expected share of that prompt's time that each card works: {busy:.0%} or more"]
        return lines

    def report(self) -> str:
        """The plan for people: the table, the longest context, the share of the weights that a token uses if it is not
        all, contexts in other KV formats, an estimate of its speed, and what hops are expected to cost."""
        plan, d, longest, work = self.plan, self.demand, self.longest_context(), self.costs.works[-1]
        lines = [plan.table(), "",
                 f"context: {d.contexts} tokens, pages for {plan.sizes.n_pages * PAGE_TOKENS:,}"
                 + plan.sizes.shortage * (not d.packed) + "; "
                 + (f"the longest that fits has {longest:,}" if longest else "none fits")
                 + f" (the model was made for {self.blueprint.context_length:,})" * (
                     d.n_ctx > self.blueprint.context_length)]
        if work.grouped:
            lines.append(f"{self.blueprint.parameters}: of {show_bytes(work.expert_bytes)} of experts, a token reads "
                         f"{show_bytes(work.expert_bytes_read(1))}, and 8 tokens of different texts read "
                         f"{show_bytes(work.expert_bytes_read(8))}")
        lines += [f"products of prompts on {card.name}: {said}" for card in self.cards
                  if (said := Products.of(card, d.products).describe(self.blueprint.formats()))]
        lines += plan.spared + self.expert_lines() + self.kv_lines(longest)
        if not d.packed:
            lines.append(self.speed_line())
        if len(self.cards) > 1:
            lines += self.hop_lines()
        if any(card.kind == "emulated" and not card.like for card in self.cards):
            lines.append(f"(emulated cards of no type count as {CARDS[0].name})")
        return "\n".join(lines)

    @property
    def keeps_kv(self) -> bool:
        """Whether the model keeps keys and values, in a format that may be chosen."""
        return not self.demand.packed and any(stage.page_bytes for stage in self.plan.on_paper)

    def with_kv(self, kv: str) -> "Planner":
        """The same in another KV format."""
        return Planner(self.blueprint.changed(kv=kv), self.cards, self.asked, self.spare)

    def shown(self, tried, unit: str):
        """Yields each of what is tried. If that takes long, a terminal shows how many have been."""
        yield from tqdm.tqdm(tried, f"planning {self.blueprint.name}", unit=unit, leave=False, delay=BAR_DELAY,
                             disable=None)

    def kv_lines(self, longest: int | None) -> list[str]:
        """A table of all KV formats: bytes of a token on each card, and the longest context that fits, for people.
        longest: that of this plan. Nothing for models without --kv."""
        if not self.keeps_kv:
            return []
        lines = [f"{'--kv':9}{'bytes of a token' + ', by card' * (len(self.cards) > 1):>28}{'longest context':>18}"]
        for kv in self.shown(KV_FORMATS, "format"):
            other, found = self, longest
            if kv != self.blueprint.kv:
                other = self.with_kv(kv)
                found = other.longest_context()
            by_card = " + ".join(f"{stage.page_bytes // PAGE_TOKENS:,}" for stage in other.plan.on_paper)
            lines.append(f"{kv:9}{by_card:>28}{f'{found:,}' if found else 'none fits':>18}")
        return lines

    def changes(self) -> list[str]:
        """What would make the model fit, each change by itself and as small as possible, for people."""
        d, found = self.demand, []
        if not d.packed and (n := most(1, d.slots - 1, lambda n: self.fits(slots=n))):
            found.append(f"--slots {n}")
        if (n := self.longest_context()) and min(SHORTEST_CTX, d.n_ctx // 2) <= n < d.n_ctx:
            found.append(f"--ctx {n}")
        formats = list(KV_FORMATS)          # those of fewer bits come later
        smaller = formats[formats.index(self.blueprint.kv) + 1:] if self.keeps_kv else []
        if kv := next((kv for kv in smaller if self.with_kv(kv).plan.fits), None):
            found.append(f"--kv {kv}")
        for name in "kv_tokens", "checkpoint_memory":
            if getattr(d, name) is not None and self.fits(**{name: None}):
                found.append(f"no --{name.replace('_', '-')}")
        if d.drafts and self.fits(drafts=0):
            found.append("--draft off")
        if d.eyes and self.fits(eyes=None):
            found.append("--mmproj none")
        if d.split and self.fits(split=None):
            found.append("no --split")
        missing = [-left for left in self.plan.left]
        if d.memory is not None and all(n <= card.unused_bytes - card.free_bytes
                                        for n, card in zip(missing, self.cards) if n > 0):
            found.append(f"--memory {math.ceil((d.memory + max(missing)) / 2**30 * 10) / 10:g}")
        largest = max(self.cards, key=lambda card: card.free_bytes)
        for more in self.shown(range(1, min(MOST_CARDS, self.blueprint.n_layers) - len(self.cards) + 1), "card"):
            if self.other(self.blueprint, [*self.cards, *[largest] * more]).fits:
                found.append(f"{more} more card{'s' * (more > 1)} like {largest.name}")
                break
        by_size = sorted(FORMATS, key=lambda name: -FORMATS[name].file_bytes / FORMATS[name].file_block)
        for name in self.shown(by_size, "format"):
            if self.other(self.blueprint.changed(format=name), self.cards).fits:
                found.append(f"a file in {name}")
                break
        return found

    def other(self, blueprint: Blueprint, cards: list) -> Plan:
        """The Plan of another blueprint or on other cards."""
        return Planner(blueprint, cards, dataclasses.replace(self.demand, split=None)).plan

    def expert_lines(self) -> list[str]:
        """Where experts lie that are not all on the cards, and what that costs, for people."""
        lines, whole, moved = [], 0.0, 0.0
        for number, stage in enumerate(self.plan.on_paper):
            speed, layers = self.costs.speeds[number], stage.layers
            whole += self.costs.decode_seconds(number, layers.start, layers.stop, self.demand.n_ctx // 2)
            if store := stage.store:
                moved += stage.costs.work.expert_bytes_read(1) / (DISK if store.in_file else speed.link)
                where = (f"a file of {show_bytes(store.host_bytes)} in {store.card.cache_dir}, those needed last in "
                         f"{show_bytes(store.window_bytes)} of page-locked host memory" if store.in_file else
                         f"{show_bytes(store.host_bytes)} of page-locked host memory")
                lines.append(f"{stage.card.name}: {store.n_slots} experts of each layer lie on the card, and all in "
                             + where)
        if lines:
            rates, times = (", ".join(found) for found in zip(*(
                (f"{rate:.0%}", f"{1e3 * (whole + (1 - rate) * moved):.1f}") for rate in HIT_RATES)))
            others = ("and the others come over the link (at the start, this machine's processor is measured, and "
                      "computes them if that takes less time)")
            if any(stage.store and stage.store.in_file for stage in self.plan.on_paper):
                others = (f"or in host memory and the others come from a disk of {DISK / 1e9:g} GB/s (this machine's "
                          "processor computes with what is not on the card; its time comes on top)")
            lines.append(f"expected time of a token: {1e3 * whole:.1f} ms with all experts on the card, {times} ms "
                         f"where {rates} of its experts are there {others}")
        return lines

    def check(self):
        """Raises OutOfMemory, with the table and what would help, where the plan does not fit."""
        stored = [stage.store for stage in self.plan.on_paper if stage.store and stage.store.in_file]
        if self.plan.fits and stored:
            for problem in filter(None, (store.problem() for store in stored)):
                raise OutOfMemory(f"{self.blueprint.name}: {problem}")
            needed, folder = sum(store.host_bytes for store in stored), self.cards[0].cache_dir
            free = free_of_disk(folder)
            if needed > free:
                raise OutOfMemory(f"{self.blueprint.name}: its experts take {show_bytes(needed)}; this machine has "
                                  f"{show_bytes(machine_bytes())} of memory in all, and {show_bytes(free)} are free in "
                                  f"{folder}: take a smaller weight format or more cards")
        if not self.plan.fits:
            changes = " or ".join(self.changes())
            way_out = f"it would with {changes}" if changes else "nothing else of its size would: take a smaller model"
            raise OutOfMemory(f"{self.blueprint.name} does not fit:\n{self.plan.table()}\n{way_out}")
