"""Experts of which some lie on a card and all in host memory: whatever lies where, kernels read the same bytes."""

import contextlib

import numpy as np
import pytest
from numba import cuda
from numba.types import uint32

from engine import expert_store
from engine.expert_store import ExpertStore
from engine.residency import NOWHERE
from engine.weights import Loader, alloc_matrix
from kernels.card import CardError, PlannedCard
from kernels.formats import FLOATS, FORMATS
from kernels.intrinsics import array_at
from kernels.open import open_cards
from kernels.operands import Experts

N_LAYERS, N_EXPERTS, N_USED, MOST_ROWS = 3, 16, 2, 4
MATRICES = {"ffn_inputs_exps": (64, 256), "ffn_down_exps": (32, 512)}      # of an expert


@cuda.jit
def read_experts(out, chosen, places, like, n_words, like_scales, n_scales):
    """out[pair] = a number that depends on each word and scale of the matrix of expert chosen[pair], and on its place
    there. Nothing of an expert out of reach."""
    pair, thread = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
    expert = uint32(chosen[pair])
    if places[uint32(2 * expert)] == 0:
        return
    words = array_at(places[uint32(2 * expert)], like)
    total = uint32(0)
    for i in range(uint32(thread), n_words, uint32(32)):
        total = uint32(total + uint32(words[i] * uint32(uint32(2 * i) + uint32(1))))
    if n_scales > 0:
        scales = array_at(places[uint32(uint32(2 * expert) + uint32(1))], like_scales)
        for i in range(uint32(thread), n_scales, uint32(32)):
            total = uint32(total + uint32(uint32(scales[i]) * uint32(uint32(6 * i) + uint32(5))))
    cuda.atomic.add(out, pair, total)


def number_of(values, scales=None):
    """What `read_experts` finds in the bytes of a matrix."""
    words = values.reshape(-1).view(np.uint8).view(np.uint32).astype(np.uint64)
    total = (words * (2 * np.arange(words.size, dtype=np.uint64) + 1)).sum()
    if scales is not None:
        scales = scales.reshape(-1).view(np.uint16).astype(np.uint64)
        total += (scales * (6 * np.arange(scales.size, dtype=np.uint64) + 5)).sum()
    return np.uint32(total & 0xFFFFFFFF)


class RandomExperts:
    """Weights of random bytes: `loading` gives what `ExpertStore.loading` asks for."""

    def __init__(self, format):
        rng, self.format, self.bytes = np.random.default_rng(0), format, {}
        for layer in range(N_LAYERS):
            for name, (n, k) in MATRICES.items():
                shapes = FORMATS[format].arrays(n, k) if format in FORMATS else [((n, k), FLOATS[format].dtype)]
                self.bytes[f"blk.{layer}.{name}.weight"] = [
                    [rng.integers(0, 256, np.prod(shape) * np.dtype(kind).itemsize, np.uint8).view(kind).reshape(shape)
                     for shape, kind in shapes] for _ in range(N_EXPERTS)]

    @contextlib.contextmanager
    def loading(self, card):
        class OfBytes(Loader):
            def experts(loader, name):
                n, k = MATRICES[name.split(".")[2]]
                experts = Experts(alloc_matrix(card, self.format, N_EXPERTS * n, k, name), n,
                                  card.alloc((N_EXPERTS, 2), np.uint64))
                for i, arrays in enumerate(self.bytes[name]):
                    for to, values in zip((experts.slot(i).values, experts.slot(i).scales), arrays):
                        card.copy_in(to, values)
                return experts
        yield OfBytes(card, {}, None)

    def numbers(self):
        """What `read_experts` must find: uint32 [layer, matrix, expert]."""
        return np.array([[[number_of(*arrays) for arrays in self.bytes[f"blk.{i}.{name}.weight"]]
                          for name in MATRICES] for i in range(N_LAYERS)])


class Reader:
    """A made-up model: a step copies the choices of its router from an array, and reads the experts."""

    def __init__(self, card, n_slots, format="Q4_K", reads_host=True):
        self.card, self.weights = card, RandomExperts(format)
        self.store = ExpertStore(card, n_slots, N_USED, MOST_ROWS, reads_host)
        with self.store.loading(self.weights, Loader(card, {}, None)):
            self.experts = [[self.store.add(f"blk.{i}.{name}.weight") for name in MATRICES] for i in range(N_LAYERS)]
        self.wanted = self.weights.numbers()
        self.layers = list(self.store.layers.values())
        self.router = card.zeros((N_LAYERS, MOST_ROWS * N_USED), np.int32)
        self.out = card.alloc((N_LAYERS, len(MATRICES), MOST_ROWS * N_USED), np.uint32)
        self.recordings = {}

    def read(self, out, experts, chosen, n_pairs):
        values, scales = experts.home.values.reshape(-1).view(np.uint32), experts.home.scales
        scales = values.view(np.uint16) if scales is None else scales.reshape(-1).view(np.uint16)
        n_values, n_scales = self.sizes(experts)
        self.card.launch(read_experts, n_pairs, 32, out, chosen, experts.places.reshape(-1), values, n_values // 4,
                         scales, n_scales // 2)

    def sizes(self, experts):
        """Bytes of the codes and of the scales of an expert."""
        stored = next(each for layer in self.layers for each in layer.matrices if each.on_card.home is experts.home)
        return [host.nbytes // N_EXPERTS for host in stored.host_arrays] + [0] * (2 - len(stored.host_arrays))

    def launch_step(self, n_rows):
        n = n_rows * N_USED
        for i, layer in enumerate(self.layers):
            self.card.copy(layer.chosen(n_rows).reshape(-1), self.router[i][:n])
            for j, experts in enumerate(self.experts[i]):
                self.card.fill(self.out[i][j][:n], 0)
                self.read(self.out[i][j], experts, layer.chosen(n_rows).reshape(-1), n)

    def step(self, chosen):
        """A decode step. chosen: int [layers, rows, n_used]. Returns what it finds: uint32 [layer, matrix, pair]."""
        self.queue_step(chosen)
        return self.card.download(self.out)[:, :, :chosen.shape[1] * N_USED]

    def queue_step(self, chosen):
        n_rows = chosen.shape[1]
        if n_rows not in self.recordings:
            with self.card.record() as self.recordings[n_rows]:
                self.launch_step(n_rows)
        self.store.before_step()
        self.card.copy_in(self.router, np.pad(chosen.reshape(N_LAYERS, -1).astype(np.int32),
                                              ((0, 0), (0, (MOST_ROWS - n_rows) * N_USED))))
        self.recordings[n_rows].replay()
        self.store.after_step(n_rows)

    def prompt(self, n_pairs):
        """A pass that meets all experts. Returns what it finds, uint32 [layer, matrix, expert], and in how many turns
        each matrix came."""
        found, turns = [], []
        everyone = self.card.upload(np.arange(N_EXPERTS, dtype=np.int32))
        for i, layer in enumerate(self.layers):
            for experts in self.experts[i]:
                out = self.card.zeros(N_EXPERTS, np.uint32)
                turns.append(0)
                for each in layer.in_turns(experts, n_pairs):
                    self.read(out, each, everyone, N_EXPERTS)
                    turns[-1] += 1
                found.append(out)
        return np.array([self.card.download(out) for out in found]).reshape(self.wanted.shape), turns

    def check_step(self, chosen):
        expected = np.stack([self.wanted[i][:, each.reshape(-1)] for i, each in enumerate(chosen)])
        np.testing.assert_array_equal(self.step(chosen), expected)


def choices(rng, n_rows, hot):
    """Mostly of the first `hot` experts of a layer."""
    return np.where(rng.random((N_LAYERS, n_rows, N_USED)) < 0.8, rng.integers(0, hot, (N_LAYERS, n_rows, N_USED)),
                    rng.integers(0, N_EXPERTS, (N_LAYERS, n_rows, N_USED)))


def walk(reader, n_steps=60):
    """Decode steps of one to four rows whose favourites change."""
    rng = np.random.default_rng(1)
    for i in range(n_steps):
        chosen = choices(rng, 1 + i % MOST_ROWS, 5)
        reader.check_step((chosen + i // 20 * 5) % N_EXPERTS)


@pytest.mark.parametrize("n_slots", [0, 1, 6, N_EXPERTS])
def test_decode_steps_read_the_same_bytes_wherever_experts_lie(card, n_slots):
    reader = Reader(card, n_slots)
    walk(reader)
    counts = reader.store.counts
    assert counts.hits + counts.misses > 700
    assert (counts.misses == 0) == (n_slots == N_EXPERTS)
    assert (counts.promoted > 0) == (0 < n_slots < N_EXPERTS)


@pytest.mark.parametrize("format", ["Q8_0", "Q6_K", "IQ2_XXS", "F32", "BF16"])
def test_experts_in_any_format(card, format):
    reader = Reader(card, 6, format)
    walk(reader, 30)
    assert reader.store.counts.promoted
    np.testing.assert_array_equal(reader.prompt(100)[0], reader.wanted)


def test_experts_that_are_used_move_into_slots(card):
    """All choices are of six experts that have no slot at first."""
    reader, rng = Reader(card, 8), np.random.default_rng(2)
    for i in range(40):
        reader.check_step(rng.integers(8, 14, (N_LAYERS, 2, N_USED)))
        card.synchronize()
    reader.store.before_step()
    assert (reader.store.resident.slot_of[:, 8:14] != NOWHERE).all()
    before = reader.store.counts
    for i in range(10):
        reader.check_step(rng.integers(8, 14, (N_LAYERS, 2, N_USED)))
        card.synchronize()
    reader.store.before_step()
    after = reader.store.counts
    assert after.misses == before.misses and after.hits == before.hits + 10 * N_LAYERS * 2 * N_USED
    assert after.hit_rate > before.hit_rate and after.bytes_read == before.bytes_read


@pytest.mark.parametrize("options", [{"checked": True}, {"late": True}, {"link_gbs": 0.5}], ids=str)
def test_on_other_emulated_cards(options, monkeypatch):
    """Kernels may read host memory; and nothing depends on when a copy runs."""
    monkeypatch.setattr(expert_store, "STAGED_BYTES", 1)            # one expert after the other
    reader = Reader(*open_cards("emulated", **options), 6)
    for _ in range(2):
        walk(reader, 20 if "checked" in options else 60)
        np.testing.assert_array_equal(reader.prompt(100)[0], reader.wanted)
    assert reader.store.counts.promoted


def test_an_expert_leaves_its_slot_behind_the_steps_that_read_it():
    """Step B, which reads expert 0 in the only slot, is queued and has not run when the choices of step A are known,
    and expert 5 goes to that slot."""
    card, = open_cards("emulated", late=True)
    reader = Reader(card, 1)
    store, (a, b) = reader.store, np.array([[5, 6], [0, 1]])
    for chosen in a, b:
        reader.queue_step(np.tile(chosen, (N_LAYERS, 1, 1)))
    store.reports[0][0].synchronize()
    store.before_step()
    assert store.counts.promoted == N_LAYERS
    card.synchronize()
    np.testing.assert_array_equal(card.download(reader.out)[:, :, :N_USED], reader.wanted[:, :, b])


def test_prompts_get_all_experts_in_turns(card, monkeypatch):
    """Three experts at a time go through an area of two halves, in the middle of decode steps."""
    sizes = [n * (FORMATS["Q8_0"].q_row(k) + 2 * FORMATS["Q8_0"].d_row(k)) for n, k in MATRICES.values()]
    monkeypatch.setattr(expert_store, "STAGED_BYTES", 3 * max(sizes))
    reader = Reader(card, 6, "Q8_0")
    for _ in range(3):
        walk(reader, 7)
        found, turns = reader.prompt(100)
        np.testing.assert_array_equal(found, reader.wanted)
        assert min(turns) >= 3
    assert reader.store.counts.bytes_staged > 0


def test_short_prompts_read_over_the_link(card):
    reader = Reader(card, 6)
    found, turns = reader.prompt(N_EXPERTS // 2)
    np.testing.assert_array_equal(found, reader.wanted)
    assert set(turns) == {1} and reader.store.counts.bytes_staged == 0


def test_experts_without_slots_can_be_out_of_reach(card):
    """Where the host computes their products, decode steps leave them out, and prompts get them all the same."""
    reader = Reader(card, 6, reads_host=False)
    np.testing.assert_array_equal(reader.prompt(1)[0], reader.wanted)
    found = reader.step(np.array([[[5, 6]]] * N_LAYERS))
    np.testing.assert_array_equal(found[:, :, 0], reader.wanted[:, :, 5])
    assert not found[:, :, 1].any()


@pytest.mark.parametrize("format, reads_host", [("Q4_K", True), ("F32", None)])
def test_host_memory_that_cannot_be_page_locked(card, format, reads_host, monkeypatch):
    """The host's processor computes with quantised experts only."""
    pinned = card.pinned

    def refuse(shape, dtype):
        if np.prod(shape) > 10_000:
            raise CardError("cuMemHostAlloc: out of memory")
        return pinned(shape, dtype)

    monkeypatch.setattr(card, "pinned", refuse)
    with pytest.raises(CardError, match="cannot be page-locked for experts .*--expert-memory"):
        Reader(card, 6, format, reads_host)


def test_a_copy_that_fails_is_heard():
    card, = open_cards("emulated")
    reader = Reader(card, 6)

    def fail(*_):
        raise CardError("the link is gone")

    card._transfer = fail
    with pytest.raises(CardError, match="the link is gone"):
        walk(reader)


def test_a_plan_takes_what_the_store_takes():
    card, = open_cards("emulated")
    planned, free = PlannedCard(card), card.free_bytes
    reader = Reader.__new__(Reader)
    weights = RandomExperts("Q4_K")
    for each in planned, card:
        store = ExpertStore(each, 6, N_USED, MOST_ROWS, True)
        with store.loading(weights, Loader(each, {}, None)):
            kept = [store.add(f"blk.{i}.{name}.weight") for i in range(N_LAYERS) for name in MATRICES]
        reader = store, kept, reader            # so that nothing is freed
    assert free - card.free_bytes == free - planned.free_bytes
