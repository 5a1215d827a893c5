"""The experts of a card that holds only some of them: slots on the card, all experts in host memory.

    host memory, page-locked     expert 0 | 1 | 2 | 3 | ...  of each layer, bytes as on the card
                                     │           │  promoted between two steps, in a stream of their own
    the card                     slot 0 | slot 1 | ...       of each layer
    places                       for each expert: its slot, or where it lies in host memory

Kernels find experts by `places` (kernels/operands.py). A decode step reads experts without a slot from host memory over
the link, in the middle of a product. So where an expert lies is data: a step stays one recording, waits for nothing,
and has the same bits whatever lies where.

Over a slow link, places say that experts without a slot are out of reach instead, and this machine's processor computes
their products in host memory (kernels/host_experts.py): whatever takes less time, by the measured speeds of both.

Decode steps. Each step leaves the chosen experts of all layers in an array, which is copied to the host behind it.
Before a later step is queued, the host reads what has arrived by then. engine/residency.py says which experts are worth
a slot, and which ones give way. First, in the order of the default stream, the places of an expert that gives way point
to host memory again. Then the new expert is copied into the slot. When the copy is done, its places point to the slot.

Prompts meet most experts in every layer. Their experts without slots are copied ahead of the products, through a small
area of two halves: while products read one half, the link fills the other (`StoredMatrix.in_turns`).

If the machine's memory is too small for all experts, they lie in a file, and those that were needed last in a window of
host memory (engine/expert_file.py). The host's processor computes with what is there, and first reads what is not.

Copies to the card that shall wait for nothing begin in page-locked memory. If the experts do not lie in such memory,
they go through a little of it: experts of prompts pass through a second area of two halves; a promoted expert comes
from the window, or passes through a slot of its own.

Host memory is filled by the loader that fills cards: for it, `HostCard` is a card whose memory is host memory and whose
kernels are run by this machine's processor.
"""

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from engine import plan
from engine.expert_file import SLOWEST_DISK, ExpertFile, InFile, Record, Window
from engine.residency import NOWHERE, Move, Residency
from engine.weights import Loader, Weights, alloc_matrix, places_of_slots
from kernels.card import ALIGNMENT, Array, Card, CardError, Event, PlannedCard, show_bytes
from kernels.emulated.card import EmulatedCard
from kernels.host_experts import (DEADLINE, MAX_ROWS, HostExperts, HostLayer, cost_of_a_miss, experts_of,
                                  measure_host)
from kernels.host_requests import HostRequest
from kernels.operands import Experts, Matrix
from kernels.probe import speed_of

STAGED_BYTES = 64 << 20         # of a half of the area for prompts
MEASURED_LAYERS = 8             # whose experts the host computes with to measure its speed
MOST_MOVING = 8                 # experts on their way into slots at once
MOVING_SECONDS = 5e-3           # and no more than the link brings in this time: other copies wait behind them
REPORTS = 4                     # steps whose choices may be on their way to the host
SLOWER = 4                      # times than measured may the host compute, before a step gives up
OUT_OF_REACH = 0, 0             # what places say of an expert that kernels shall not read


class HostCard(EmulatedCard):
    """This machine's processor, with arrays in page-locked memory that `card` can read.

    refusal: a sentence if memory cannot be page-locked, or shall not be; arrays are then in memory that `card` cannot
    read.
    """

    def __init__(self, card: Card, refusal: str | None = None):
        super().__init__(memory_bytes=1 << 62, cache_dir=card.cache_dir)    # plans compare with the host's memory
        self.name, self._reader, self.refusal = "host memory", card, refusal

    def _take(self, nbytes):
        if self.refusal:
            backing = aligned(np.empty, nbytes)
        else:
            backing, why = page_locked(self._reader, nbytes)
            self.refusal = why and (
                f"{show_bytes(nbytes)} more of host memory cannot be page-locked for experts ({why}): allow more "
                "locked memory (`ulimit -l`, a container's limit), or let more of them lie on the card "
                "(--expert-memory)")
        return backing.ctypes.data, backing

    def _give(self, memory):
        memory.backing = None


def aligned(make, n_bytes: int) -> np.ndarray:
    """uint8 [n_bytes] from a multiple of ALIGNMENT on, in a larger array of make(shape, dtype)."""
    memory = make(n_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start:start + n_bytes]


def page_locked(card: Card, n_bytes: int) -> tuple[np.ndarray, str]:
    """Host memory that the card reads by itself, uint8, and "". If there is none, other memory, and why."""
    try:
        return aligned(card.pinned, n_bytes), ""
    except (CardError, MemoryError) as error:
        return aligned(np.empty, n_bytes), str(error) or "there is too little"


def on_host(array: Array) -> np.ndarray:
    """The bytes of an Array of a HostCard, for copies."""
    start = array.ptr - array.memory.ptr
    return array.memory.backing[start:start + array.nbytes].view(array.dtype).reshape(array.shape)


def places_of(experts: Experts) -> np.ndarray:
    """The addresses of all slots of the home: uint64 [slots, 2]."""
    slots = experts.home.n // experts.n
    return places_of_slots(experts, slots) if slots else np.empty((0, 2), np.uint64)


def counts_of(stages: list) -> dict[str, int]:
    """Counts of the stages' stores for `TextEngine.stats`; nothing if all experts lie on the cards."""
    stores = [stage.store.counts._asdict() | stage.store.computed() for stage in stages if stage.store]
    return {f"expert_{name}": sum(counts[name] for counts in stores) for name in (stores[0] if stores else ())}


def check(stages: list):
    """Raises CardError if a step that has ended went without its experts: its logits are NaN."""
    for stage in stages:
        if stage.store:
            stage.store.check()


def close(stages: list):
    """Ends what the host computes for cards."""
    for stage in stages:
        if stage.store:
            stage.store.close()


def fewest_in_window(n_experts: int, n_used: int, most_rows: int) -> int:
    """Experts that the window must hold at once: those of one layer that a step may need."""
    return min(n_experts, most_rows * n_used)


def longest_wait(n_pairs: int, n_experts: int, expert_bytes: int, speed: float, in_file: bool) -> float:
    """Seconds that a step waits for the host's processor at most, in a layer whose n_pairs pairs all lack their expert.
    speed: bytes of experts per second that the processor was measured to compute with. in_file: the disk, too, must
    bring each expert once."""
    read = min(n_pairs, n_experts) * expert_bytes / SLOWEST_DISK if in_file else 0.0
    return max(SLOWER * n_pairs * expert_bytes / speed + read, DEADLINE)


def arrays_of(matrix: Matrix) -> list[Array]:
    """The one or two arrays of a Matrix."""
    return [matrix.values] + [matrix.scales] * matrix.is_quantized


def expert_bytes(experts: Experts) -> int:
    """Bytes of the matrix of one expert."""
    return sum(math.prod(array.shape[1:]) * array.dtype.itemsize * experts.n for array in arrays_of(experts.home))


def slot_bytes(weights: Weights, layers: range) -> int:
    """Bytes that one more slot takes in each of the layers."""
    return sum(weights.slot_bytes.get(layer, 0) for layer in layers)


@contextlib.contextmanager
def loading(weights: Weights, loader: Loader, config, layers: range, demand: plan.Demand, most_rows: int):
    """Inside, `loader` loads the layers. Yields the ExpertStore of their experts if these take more of the card than
    demand.expert_memory; None if they do not, or if that is None. layers: also a draft block. most_rows: of a decode
    step."""
    each, memory = slot_bytes(weights, layers), demand.expert_memory
    if memory is None or each * config.n_experts <= memory:
        yield None
        return
    window, blocks = None, range(config.n_layers + config.n_nextn)
    if plan.exceeds_machine(slot_bytes(weights, blocks) * config.n_experts):
        needs = [window_need(weights, config, of_card, memory, most_rows) for of_card in ranges_of(config, demand)]
        share = window_need(weights, config, layers, memory, most_rows) / sum(needs)
        window = plan.window_bytes(share, demand.host_memory)
    store = ExpertStore(loader.card, memory // each, config.n_used_experts, most_rows, window_bytes=window)
    with store.loading(weights, loader):
        yield store


def ranges_of(config, demand: plan.Demand) -> list[range]:
    """The layers of each card, the draft block too, whose number follows that of the last layer."""
    ends = list(itertools.accumulate(demand.split))
    ranges = [range(end - n, end) for n, end in zip(demand.split, ends)]
    return [*ranges[:-1], range(ranges[-1].start, ends[-1] + config.n_nextn * (demand.drafts > 0))]


def window_need(weights: Weights, config, layers: range, memory: int, most_rows: int) -> int:
    """Bytes of the experts of these layers for which a card with `memory` for experts has no room; at least what a step
    needs of the largest layer. 0: it has room for all. Cards share the host memory in these proportions."""
    each = slot_bytes(weights, layers)
    lacking = config.n_experts - memory // max(each, 1)
    fewest = fewest_in_window(config.n_experts, config.n_used_experts, most_rows)
    largest = max(slot_bytes(weights, range(layer, layer + 1)) for layer in layers)
    return max(lacking * each, fewest * largest) if lacking > 0 else 0


class Counts(NamedTuple):
    """What has happened since the store was made. Pairs are of decode steps: a row and one of its experts."""

    hits: int = 0               # pairs whose expert had a slot
    misses: int = 0             # pairs whose expert had none
    promoted: int = 0           # experts that got a slot
    bytes_read: int = 0         # of experts that decode steps have read over the link
    bytes_promoted: int = 0     # copied into slots
    bytes_staged: int = 0       # copied for prompts

    @property
    def hit_rate(self) -> float:
        return self.hits / max(self.hits + self.misses, 1)


class _Half:
    """A half of the area through which prompts get experts. host: the same in host memory, if experts must be gathered
    there before they are copied."""

    def __init__(self, card: Card, n_bytes: int, n_experts: int):
        self.memory = card.alloc(n_bytes, np.uint8, "experts of prompts")
        self.places = card.zeros((n_experts, 2), np.uint64, "places of experts of prompts")
        self.was_read: Event | None = None      # after this event, both may be written again
        self.host: np.ndarray | None = None
        self.was_copied: Event | None = None    # after this event, `host` may be


@dataclass
class StoredMatrix:
    """The same matrix of all experts of a layer: some on the card, all of them on the host."""

    store: "ExpertStore"
    layer: int
    is_down: bool
    on_card: Experts            # its home has the slots of the layer
    host: Experts               # its home has all experts; if they lie in a file, only on paper
    slot_start: int             # where its record begins behind those of the expert's other matrices
    host_arrays: list[np.ndarray] = field(default_factory=list)     # codes and scales of that home
    in_file: InFile | None = None

    @cached_property
    def record(self) -> Record:
        """How the arrays of an expert lie one behind the other, where they are brought together."""
        return Record.of(*(array.nbytes for array in arrays_of(self.host.slot(0))))

    def take(self):
        """Takes over what the loader has put into host memory: the first experts go into the slots."""
        self.store.host.synchronize()
        self.host_arrays, slots = [on_host(array) for array in arrays_of(self.host.home)], self.on_card.home.n
        if slots:
            self.fill(0, [array[:slots] for array in self.host_arrays])
        if self.store.file:
            self._write()

    def _write(self):
        """Puts all experts into the file, and lets go of their memory."""
        n_experts, record = len(self.on_card.places), np.zeros(self.record.nbytes, np.uint8)
        start = self.store.file.nbytes
        for expert in range(n_experts):
            self.gather(expert, record)
            self.store.file.append(record)
        self.in_file = InFile(start, self.record, self.slot_start, np.zeros((n_experts + 1, 2), np.uint64))
        home = self.host.home
        self.host = Experts(alloc_matrix(PlannedCard(self.store.host), home.format, home.n, home.k, ""), self.host.n,
                            None)
        self.host_arrays = []

    def gather(self, expert: int, record: np.ndarray):
        """Copies the arrays of an expert, which lie in host memory, one behind the other."""
        for part, array in zip(self.record.parts(record), self.arrays_of(expert)):
            part[:] = array.reshape(-1).view(np.uint8)

    def arrays_of(self, expert: int) -> list[np.ndarray]:
        """The arrays of an expert in host memory."""
        return [array[expert * self.host.n:(expert + 1) * self.host.n] for array in self.host_arrays]

    def addresses(self) -> np.ndarray:
        """What `places` says: uint64 [n_experts, 2]."""
        slots, places = self.store.resident.slot_of[self.layer], places_of(self.host)
        if not self.store.reads_host:
            places[:] = OUT_OF_REACH
        places[slots != NOWHERE] = places_of(self.on_card)[slots[slots != NOWHERE]]
        return places

    def place(self, expert: int):
        """Queues the present address of an expert into `places`."""
        slot, place = self.store.resident.slot_of[self.layer, expert], OUT_OF_REACH
        if slot != NOWHERE:
            place = self.on_card.addresses(slot)
        elif self.store.reads_host:
            place = self.host.addresses(expert)
        self.store.card.copy_in(self.on_card.places[expert], np.array(place, np.uint64))

    def fill(self, slot: int, arrays: list[np.ndarray], stream=None):
        """Queues copies of codes and scales, of one expert or of several, into the slots from this one on."""
        for array, host in zip(arrays_of(self.on_card.home), arrays):
            to = array[slot * self.on_card.n:].reshape(-1).view(np.uint8)
            self.store.card.copy_in(to[:host.nbytes], host.reshape(-1).view(np.uint8), stream)

    def in_turns(self, n_pairs: int) -> Iterator[Experts]:
        """For the products of a prompt with n_pairs pairs. Yields Experts in turn, each with other experts within
        reach, until all have been. Launches may read them if they are queued on the present stream before the next
        Experts are asked for."""
        n_experts, store = len(self.on_card.places), self.store
        missing = np.flatnonzero(store.resident.slot_of[self.layer] == NOWHERE)
        few = store.reads_host and 2 * n_pairs <= n_experts     # few experts are met: read over the link
        if few or not missing.size or store.card.defers:
            yield self.on_card
            return
        each, size = store.staged_bytes // self.record.nbytes, expert_bytes(self.on_card)
        for start in range(0, missing.size, each):
            half, experts = next(store.halves), missing[start:start + each]
            places = self.addresses() if start == 0 else np.zeros((n_experts, 2), np.uint64)
            places[missing] = OUT_OF_REACH
            if half.was_read:
                store.stagings.wait(half.was_read)
            places[experts] = self._stage_gathered(half, experts) if half.host is not None else \
                self._stage(half, experts)
            store.card.copy_in(half.places, places, store.stagings)
            reader = store.card.target(None)
            reader.wait(store.stagings.record())
            store.count(bytes_staged=size * experts.size)
            yield Experts(self.on_card.home, self.on_card.n, half.places)
            half.was_read = reader.record()

    def _stage(self, half: _Half, experts: np.ndarray) -> np.ndarray:
        """Queues copies of some experts into a half. Returns what their places say: uint64 [n, 2]."""
        rows, at, places = self.on_card.n, 0, np.zeros((experts.size, 2), np.uint64)
        ends = np.flatnonzero(np.diff(experts) != 1) + 1        # experts that follow each other are one copy
        for column, host in enumerate(self.host_arrays):
            size = host[:rows].nbytes
            to = half.memory[at:at + size * experts.size]
            for start, stop in itertools.pairwise([0, *ends, experts.size]):
                source = host[experts[start] * rows:(experts[stop - 1] + 1) * rows]
                self.store.card.copy_in(to[start * size:stop * size], source.reshape(-1).view(np.uint8),
                                        self.store.stagings)
            places[:, column] = to.ptr + np.arange(experts.size, dtype=np.uint64) * np.uint64(size)
            at += size * experts.size + -size * experts.size % ALIGNMENT
        return places

    def _stage_gathered(self, half: _Half, experts: np.ndarray) -> np.ndarray:
        """The same of experts that must be brought together in host memory first."""
        size, card, stagings = self.record.nbytes, self.store.card, self.store.stagings
        host, to = half.host[:size * experts.size], half.memory[:size * experts.size]
        if half.was_copied:
            half.was_copied.synchronize()
        if self.in_file:
            copy, start = self.store.window.copy, self.in_file.start
            self.store.file.read([(start + int(expert) * size, record)
                                  for expert, record in zip(experts, host.reshape(-1, size))
                                  if not copy(self.layer, expert, self.slot_start, record)])
        else:
            for expert, record in zip(experts, host.reshape(-1, size)):
                self.gather(expert, record)
        card.copy_in(to, host, stagings)
        half.was_copied = stagings.record()
        places = np.zeros((experts.size, 2), np.uint64)
        for column, start in enumerate(self.record.starts):
            places[:, column] = to.ptr + start + np.arange(experts.size, dtype=np.uint64) * np.uint64(size)
        return places

    def in_window(self) -> Experts:
        """The experts as the host's processor finds them in the window. The home is the first slot."""
        store, like = self.store, self.host.slot(0)
        slot = store.host.attach(store.window.memory[0], "window of experts")
        arrays = [slot[self.slot_start + start:][:array.nbytes].view(array.dtype).reshape(array.shape)
                  for start, array in zip(self.record.starts, arrays_of(like))]
        return Experts(Matrix(like.format, like.n, like.k, *arrays), like.n, store.host.attach(self.in_file.places))


class StoredLayer:
    """A layer whose experts are in an ExpertStore."""

    def __init__(self, store: "ExpertStore", number: int):
        self.store, self.number, self.matrices = store, number, []

    @property
    def expert_bytes(self) -> int:
        """Bytes of all matrices of an expert."""
        return sum(expert_bytes(each.host) for each in self.matrices)

    @property
    def record_bytes(self) -> int:
        """Of all records of an expert."""
        return sum(each.record.nbytes for each in self.matrices)

    def chosen(self, n_rows: int) -> Array:
        """Where a decode step of n_rows rows writes the experts that this layer's router chooses: int32 [n_rows,
        n_used].

        The last layer comes first. It may be a draft block, whose last draft has fewer rows than the step of the other
        layers; it begins at 0 all the same.
        """
        n = n_rows * self.store.n_used
        start = (len(self.store.layers) - 1 - self.number) * n
        return self.store.chosen[start:start + n].reshape(n_rows, self.store.n_used)

    def on_host(self) -> HostLayer:
        """The experts as the host's processor computes with them."""
        gate_up, down = ([
            each.in_window() if each.in_file else experts_of(self.store.host, each.host.home, each.host.n)
            for each in self.matrices if each.is_down == is_down] for is_down in (False, True))
        return HostLayer(tuple(gate_up), *down)

    def request(self, n_rows: int) -> HostRequest | None:
        """The HostRequest by which the launches of a decode step ask for products of experts out of reach. None if all
        are within reach."""
        return self.store.helper and self.store.helper.request(self.number, n_rows)

    def in_turns(self, experts: Experts, n_pairs: int) -> Iterator[Experts]:
        """See `StoredMatrix.in_turns`. experts: one of the matrices, as `ExpertStore.add` gave it."""
        return next(each for each in self.matrices if each.on_card is experts).in_turns(n_pairs)


class ExpertStore:
    """The experts of the layers of a card. One thread uses it: the card's worker.

    n_slots: experts of each layer that lie on the card. n_used: experts of a row. most_rows: of a decode step.
    reads_host: whether decode steps read experts without a slot over the link. Otherwise places say that these are out
    of reach. By default the faster way is taken, and if the link is slower, `helper` computes their products.
    window_bytes: of host memory for experts, which all lie in a file. None: all lie in host memory.

    Attributes: miss, what either way takes, once that was measured, else None. file, window: if there is a file.
    """

    def __init__(self, card: Card, n_slots: int, n_used: int, most_rows: int, reads_host: bool | None = None,
                 window_bytes: int | None = None):
        self.card, self.n_slots, self.n_used, self.most_rows = card, n_slots, n_used, most_rows
        self.reads_host, self.miss, self.helper, self.window_bytes = reads_host, None, None, window_bytes
        self.products: Array | None = None
        self.file = self.window = None
        self.host = HostCard(card, f"more than this machine's memory holds: a file in {card.cache_dir}"
                             if self.in_file else None)
        if isinstance(card, PlannedCard):
            self.host = PlannedCard(self.host)
        elif self.in_file:
            self.file = ExpertFile(card.cache_dir)
        self.layers: dict[str, StoredLayer] = {}        # "blk.0." -> the layer whose tensors' names begin so
        self.promotions, self.stagings = card.stream("experts into slots"), card.stream("experts of prompts")
        self.reports, self.moving = deque(), deque()    # (Event, rows, array), (Event, Move, slot): under way
        self.counts = Counts()

    @property
    def in_file(self) -> bool:
        """Whether the experts lie in a file."""
        return self.window_bytes is not None

    @property
    def host_bytes(self) -> int:
        """Of host memory, or of the file, that the experts take."""
        return sum(array.nbytes for each in self._matrices() for array in arrays_of(each.host.home))

    @property
    def missing_bytes(self) -> int:
        """Of the experts that have no slot: so many are copied for each pass over a prompt."""
        return sum((len(each.on_card.places) - each.on_card.home.n // each.on_card.n) * expert_bytes(each.host)
                   for each in self._matrices())

    @property
    def locked_bytes(self) -> int:
        """Of host memory that shall be page-locked for experts."""
        return self.window_bytes if self.in_file else self.host_bytes

    # ---- loading ----

    @contextlib.contextmanager
    def loading(self, weights, loader: Loader):
        """Inside, `loader` puts experts here. At the end, all are on the host, and the first ones of each layer in its
        slots."""
        with weights.loading(self.host) as self._from_file:
            loader.store = self
            yield
        self.host.synchronize()
        loader.store = self._from_file = None
        self._begin()

    def add(self, *names: str) -> Experts:
        """What `Loader.experts` gives, with a home of n_slots slots. Raises OutOfMemory, and CardError if host memory
        cannot be page-locked."""
        host = self._from_file.experts(*names)
        slots, title = min(self.n_slots, len(host.places)), " + ".join(names)
        home = alloc_matrix(self.card, host.format, slots * host.n, host.k, title)
        experts = Experts(home, host.n, self.card.alloc(host.places.shape, np.uint64, f"{title} places"))
        block = names[0].rsplit(".", 2)[0] + "."
        layer = self.layers.setdefault(block, StoredLayer(self, len(self.layers)))
        matrix = StoredMatrix(self, layer.number, "_down_" in names[0], experts, host, layer.record_bytes)
        layer.matrices.append(matrix)
        if not isinstance(self.card, PlannedCard):
            matrix.take()
        return experts

    def _begin(self):
        """Takes the rest of the memory, and fills slots and places."""
        card, n_experts = self.card, max(len(each.on_card.places) for each in self._matrices())
        self.resident = Residency(len(self.layers), n_experts, self.n_slots)
        largest = max(each.record.nbytes for each in self._matrices())
        self.slot_bytes = max(layer.record_bytes for layer in self.layers.values())
        self.fewest = fewest_in_window(n_experts, self.n_used, self.most_rows)
        self.staged_bytes = min(max(STAGED_BYTES // largest, 1), n_experts) * largest
        room = self.staged_bytes + 2 * ALIGNMENT
        halves = [_Half(card, room, n_experts) for _ in range(2)]
        self.halves = itertools.cycle(halves)
        n_chosen = len(self.layers) * self.most_rows * self.n_used
        self.chosen = card.zeros(n_chosen, np.int32, "chosen experts of decode steps")
        self._arrays = itertools.cycle([card.pinned(n_chosen, np.int32) for _ in range(REPORTS)])
        if self._can_compute():                 # whether it will is not known on paper
            shape = self.most_rows, self.n_used + 1, next(each.on_card.n for each in self._matrices() if each.is_down)
            self.products = card.alloc(shape, np.float32, "products beside the host's")
        if isinstance(card, PlannedCard):
            return
        self.sizes = np.array([layer.expert_bytes for layer in self.layers.values()])
        self.most_moving = int(min(max(speed_of(card).link * MOVING_SECONDS / self.sizes.max(), 1), MOST_MOVING))
        if self.host.refusal:
            for half in halves:
                half.host, _ = page_locked(card, self.staged_bytes)
            if self.in_file:
                self._open_window()
            else:
                moving, _ = page_locked(card, self.most_moving * self.slot_bytes)
                self._moving = itertools.cycle(moving.reshape(self.most_moving, self.slot_bytes))
        if self.reads_host is None:
            self._choose_way()
        if self.reads_host:
            if self.host.refusal:
                raise CardError(self.host.refusal)
            self._reached = [card.attach(array.memory.backing, array.name)
                             for each in self._matrices() for array in arrays_of(each.host.home)]
        for each in self._matrices():
            card.copy_in(each.on_card.places, each.addresses())
        card.synchronize()

    def _open_window(self):
        """Takes host memory for the experts that were needed last."""
        n_slots = min(self.window_bytes // self.slot_bytes, self.resident.slot_of.size)
        if n_slots < self.fewest:
            raise CardError(self.problem())
        memory, why = page_locked(self.card, n_slots * self.slot_bytes)
        self.host.refusal += (f", {n_slots} of {self.resident.slot_of.size} in a window of {show_bytes(memory.nbytes)} "
                              "of host memory" + f", which is not page-locked: {why}" * bool(why))
        layers = [[each.in_file for each in layer.matrices] for layer in self.layers.values()]
        self.window = Window(self.file, memory.reshape(n_slots, self.slot_bytes), layers, self.resident, self.fewest)

    def problem(self) -> str:
        """Why experts cannot lie in a file; "" if they can, or need not."""
        if not self.in_file:
            return ""
        if floats := sorted({each.host.home.format for each in self._matrices() if not each.host.is_quantized}):
            return (f"its experts are more than this machine's memory holds, so they would lie in a file and this "
                    f"machine's processor would compute with them; it cannot with {' and '.join(floats)}, only with "
                    "quantised experts: take a weight format like Q8_0, or more cards")
        if self.most_rows > MAX_ROWS:
            return (f"experts lie in a file, and a step of {self.most_rows} rows is more than the {MAX_ROWS} that this "
                    "machine's processor takes: take fewer --slots")
        if self.window_bytes >= self.fewest * self.slot_bytes:
            return ""
        return (f"experts lie in a file, and a step of {self.most_rows} rows needs {self.fewest} of a layer in "
                f"{show_bytes(self.fewest * self.slot_bytes)} of host memory, of which {show_bytes(self.window_bytes)} "
                "are there for it: take fewer --slots, --draft off, or a smaller weight format")

    def _can_compute(self) -> bool:
        """Whether the host's processor could compute with these experts."""
        return self.most_rows <= MAX_ROWS and all(each.host.is_quantized for each in self._matrices())

    def _choose_way(self):
        """Whether experts without a slot are read over the link, or computed by the host's processor."""
        link, self.reads_host = speed_of(self.card).link, True
        if not self._can_compute() or not (self.host.refusal or np.isfinite(link)):
            return
        layers = {layer.number: layer.on_host() for layer in self.layers.values()}
        down = next(iter(layers.values())).down
        bring = self.window and self.window.bring
        speed = measure_host(self.host, list(layers.values())[:MEASURED_LAYERS], bring)
        self.miss = cost_of_a_miss(int(self.sizes.max()), down.n, link, speed)
        if self.miss.is_computed or self.host.refusal:
            self.reads_host = False
            largest = self.most_rows * self.n_used, len(self.resident.slot_of[0]), int(self.sizes.max())
            self.helper = HostExperts(self.card, self.host, layers, self.n_used, self.most_rows, self.products,
                                      deadline=longest_wait(*largest, speed, self.in_file), bring=bring)

    def check(self):
        """Raises CardError if the host has not computed the experts of a step that has ended."""
        if self.helper:
            self.helper.check()

    def close(self):
        """Ends what the host computes, and reads."""
        if self.helper:
            self.helper.close()
        if self.file:
            self.file.close()

    def __str__(self):
        """Where experts lie, for people, in a line."""
        way = "computed by the host's processor" if self.helper else "read over the link"
        text = str(self.miss) if self.miss and not self.host.refusal else f"an expert that is not there is {way}"
        return (f"{self.resident.n_slots} of {len(self.resident.slot_of[0])} experts of each layer on the card; {text}"
                + f" ({self.host.refusal})" * bool(self.host.refusal))

    def _matrices(self) -> Iterator[StoredMatrix]:
        return itertools.chain.from_iterable(layer.matrices for layer in self.layers.values())

    # ---- decode steps ----

    def before_step(self):
        """Called before each decode step is queued: takes in what has arrived, and queues changes of slots and places.
        Waits for nothing if there is page-locked memory. Raises CardError if a step went without its experts."""
        self.check()
        while self.moving and self.moving[0][0].done:
            self._settle(*self.moving.popleft()[1:])
        while self.reports and self.reports[0][0].done:
            self._read(*self.reports.popleft()[1:])

    def after_step(self, n_rows: int):
        """Called behind each decode step of n_rows rows: queues the copy of its choices to the host."""
        if len(self.reports) < REPORTS:         # else the host is far behind, and does without this one
            n, host = len(self.layers) * n_rows * self.n_used, next(self._arrays)
            self.card.copy_out(host[:n], self.chosen[:n])
            self.reports.append((self.card.default_stream.record(), n_rows, host))

    def _read(self, n_rows: int, host: np.ndarray):
        """Follows the choices of a step."""
        n_layers = len(self.layers)
        chosen = host[:n_layers * n_rows * self.n_used].reshape(n_layers, -1)[::-1]
        missing, n_missed = self.resident.use(chosen)
        self.count(hits=chosen.size - n_missed, misses=n_missed,
                   bytes_read=int(self.sizes[missing[:, 0]].sum()) * self.reads_host)
        room = self.most_moving - len(self.moving)
        moves = (self._make_way(layer, expert) for layer, expert in missing)
        self._promote(list(itertools.islice(filter(None, moves), room)))

    def _make_way(self, layer: int, expert: int) -> tuple[Move, int | None] | None:
        """A Move and, if experts lie in a file, the slot of the window in which the expert stays until it has moved.
        None if it is not there, or if no slot of the card is for it."""
        held = self.window.hold(layer, expert) if self.window else None
        if self.window and held is None:
            return None
        if move := self.resident.make_way(layer, expert):
            return move, held
        if self.window:
            self.window.release(held)

    def _promote(self, moves: list[tuple[Move, int | None]]):
        """Queues copies of experts into their slots, behind all that reads the experts that leave."""
        if not moves:
            return
        layers = list(self.layers.values())
        for move, _ in moves:
            for matrix in layers[move.layer].matrices:
                matrix.place(move.leaving)
        self.promotions.wait(self.card.default_stream.record())
        for move, held in moves:
            memory = self.window.memory[held] if self.window else next(self._moving) if self.host.refusal else None
            for matrix in layers[move.layer].matrices:
                matrix.fill(move.slot, self._moved(matrix, move.expert, memory), self.promotions)
            self.moving.append((self.promotions.record(), move, held))
            self.count(promoted=1, bytes_promoted=int(self.sizes[move.layer]))

    def _moved(self, matrix: StoredMatrix, expert: int, memory: np.ndarray | None) -> list[np.ndarray]:
        """The arrays of an expert for a copy that waits for nothing. memory: a slot of page-locked memory, if the
        expert's home is not."""
        if memory is None:
            return matrix.arrays_of(expert)
        record = memory[matrix.slot_start:]
        if not self.window:
            matrix.gather(expert, record)
        return matrix.record.parts(record)

    def _settle(self, move: Move, held: int | None):
        """From the next step on, an expert is read from its slot."""
        self.resident.settle(move)
        for matrix in list(self.layers.values())[move.layer].matrices:
            matrix.place(move.expert)
        if self.window:
            self.window.release(held)

    def computed(self) -> dict:
        """What the host has computed: pairs, and seconds; and bytes of experts that it has read from the file."""
        counts = self.helper.counts() if self.helper else None
        return {"computed": counts.products if counts else 0, "host_seconds": counts.seconds if counts else 0.0,
                "bytes_from_file": self.window.bytes_read if self.window else 0}

    def count(self, **more: int):
        self.counts = self.counts._replace(**{name: getattr(self.counts, name) + n for name, n in more.items()})
