"""Experts that the card does not hold, computed where they lie: in host memory, by the host's processor.

Over a slow link it takes longer to fetch an expert than to compute with it (PCIe 1.0 x1 brings 3 MB in 13 ms). So the
card hands over the rows that need it, goes on with the experts that it has, and takes the results when it needs them:

    card    norm, router | gate, up: the card's own experts, the shared expert | down: the same | weighted sum
                           | asks                                                               ^ waits
    link          row as int8, wanted experts                                         one result per product
                               v                                                                |
    host                  gate, up, SwiGLU, down: the kernels of kernels/expert_gemv.py, on an emulated card

A step stays one recording: nothing is queued while it runs. Card and host meet in page-locked memory that both reach
(`Card.mapped`): the host looks there for requests (kernels/emulated/serving.py). kernels/host_requests.py has the
card's side: which parts of its launches ask and wait. If no expert is missing, nothing crosses the link, and nothing
waits. The bits are those of the card: the same kernels compute them.

    words    uint32 [MAIL_WORDS]                the mail, as kernels/emulated/serving.py says, and TROUBLE
    q, d     int8 [rows, k], float32 [rows, k / 32]     the normed rows; only those that a missing pair needs
    wanted   int32 [3, n]                       of each missing pair: the expert, the row, the pair
    results  float32 [rows * n_used, k]         by pair; of the missing pairs only

Experts need not be in host memory either: a Supply (kernels/emulated/serving.py) then brings those of a request before
its program runs, and says by their places where they are.

The host has a program for each layer and for 1, 2, 4, 8, ... products. A request with fewer products is filled up with
pairs of -1, whose expert, n_experts, has no place. A program copies the rows of its products side by side, so that
filling up takes almost no time, and stores each result at its pair.

Failures. A card that has waited for too long, or hears that no answer will come, writes 1 + the number of the layer to
TROUBLE, and makes the rows of this and of later steps NaN. `check` turns TROUBLE into a sentence.

Cost on the link for each product: k * 4 bytes, and once for each row k * 1.125 bytes; 8 KB and 2.3 KB where k is 2048.
"""

import math
import time
import weakref
from functools import partial
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.types import int32, uint32

from kernels.bench import Case, main
from kernels.card import CardError, show_bytes
from kernels.emulated.card import EmulatedCard
from kernels.emulated.native import AWAKE
from kernels.emulated.serving import FAILED, MAIL_WORDS, Service, Supply
from kernels.expert_gemv import expert_down, expert_gemv, expert_swiglu
from kernels.formats import FORMATS
from kernels.host_requests import (ANSWER, ARRIVED, LAYER, PRODUCTS, REQUEST, SIZE, THREADS, TROUBLE, HostRequest,
                                   copy_row, hand_over)
from kernels.intrinsics import load_words4, store_words4
from kernels.operands import Experts, Matrix, Quantized
from kernels.quant_gemv import decoder_of
from kernels.records import Choice
from kernels.swiglu import swiglu_quantize
from kernels.synthetic import random_matrix_reference

MAX_ROWS = 1024                                         # of a step
DEADLINE = 5.0                                          # seconds; below the patience of an emulated card


class ExpertsMissing(CardError):
    """The host's processor has not computed what a step needs. The tokens of that step are of no use."""


# ---- the host's side ---------------------------------------------------------------------------------------

@cuda.jit
def pack_kernel(to_q, to_d, q, d, rows, k):
    """Row i of (to_q, to_d) <- row rows[i] of (q, d). A block for each row."""
    i = uint32(cuda.blockIdx.x)
    copy_row(to_q, to_d, i, q, d, uint32(rows[i]), k, uint32(cuda.threadIdx.x), THREADS)


@cuda.jit
def put_kernel(results, y, pairs, k):
    """Row pairs[i] of results <- row i of y, where pairs[i] is none of -1. A block for each row."""
    i, thread = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
    pair, pieces = pairs[i], uint32(k >> uint32(2))
    if pair >= int32(0):
        for first in range(uint32(0), pieces, uint32(THREADS)):
            piece = uint32(first + thread)
            if piece < pieces:
                w0, w1, w2, w3 = load_words4(y, uint32(uint32(i * pieces + piece) << uint32(2)))
                store_words4(results, uint32(uint32(uint32(pair) * pieces + piece) << uint32(2)), w0, w1, w2, w3)


class HostLayer(NamedTuple):
    """The experts of a layer, as `experts_of` gives them on the emulated card that is the host."""

    gate_up: tuple[Experts, ...]    # one of 2 F rows per expert, gate above up; or gate and up, F rows each
    down: Experts

    @property
    def expert_bytes(self):
        """Bytes of one expert."""
        slots = self.down.home.n // self.down.n
        arrays = [array for w in (*self.gate_up, self.down) for array in (w.home.values, w.home.scales)]
        return sum(array.nbytes for array in arrays) // slots


def experts_of(host, home, n):
    """Experts for a HostLayer: all that lie in `home`, a Matrix [n_experts * n, k] of the emulated card `host`, one
    behind the other. `places` has one line more than there are experts: it says nowhere."""
    experts = Experts(home, n, None)
    places = [experts.addresses(number) for number in range(home.n // n)]
    return Experts(home, n, host.upload(np.array([*places, (0, 0)], np.uint64), "places of experts"))


def rows_of(card, n, k):
    """Room on a card for Quantized [n, k]."""
    return Quantized(card.alloc((n, k), np.int8), card.alloc((n, k // 32), np.float32))


def first_of(x, n, k):
    """The first bytes of a Quantized as one of [n, k]."""
    return Quantized(*(array.reshape(-1)[:n * each].reshape(n, each) for array, each in zip(x, (k, k // 32))))


def launch_inner(card, gate_up, inner, both, u, choice, n_rows, request=None):
    """inner <- quantised silu(gate . u) * (up . u) of each pair of rows and experts.

    gate_up: as in a HostLayer. u: Quantized [n_rows, k]. inner: Quantized [pairs, F]. both: float32, 2 F for each pair;
    read only where gate and up are apart. request: a HostRequest that goes out first, if experts may be missing."""
    if len(gate_up) == 1:
        expert_swiglu(card, decoder_of(gate_up[0]), inner, gate_up[0], u, choice, n_rows, request=request)
        return
    if request:
        hand_over(card, request, u, choice, gate_up[0].places, n_rows)
    width, both = inner.q.shape[1], both.reshape(-1)
    for i, w in enumerate(gate_up):
        expert_gemv(card, decoder_of(w), both[i * width:], 2 * width, w, u, choice, n_rows)
    swiglu_quantize(card, inner, both, n_rows * choice.n_used, width)


def size_of(n):
    """The size of a request of n products: the program for 1 << size products."""
    return (n - 1).bit_length()


class Counts(NamedTuple):
    """What the host has computed so far."""

    requests: int           # layers of steps in which something was missing
    products: int           # pairs of (row, expert)
    seconds: float          # of the host's processor, from request to answer


class HostExperts:
    """Computes the missing experts of one card. A context manager: at its end the service stops.

    card: the card. host: the EmulatedCard with the experts, whose threads compute; it runs nothing else from now on.
    Its arrays may lie over other memory of this machine (`Card.attach`). layers: number of a layer -> HostLayer.
    most_rows: of a step. products: room on the card, see kernels/host_requests.py; None: it is taken. deadline: seconds
    within which an answer must come. bring(layer, experts): brings experts that have no place, see Supply; None: all
    have one. ValueError: too many rows, or experts of floats.

    Attributes: results, float32 [pairs, k], an Array of the card; see the top of this file.
    """

    def __init__(self, card, host, layers, n_used, most_rows, products=None, *, deadline=DEADLINE, bring=None):
        if most_rows > MAX_ROWS:
            raise ValueError(f"a step with experts on the host has up to {MAX_ROWS} rows, not {most_rows}")
        if not all(w.is_quantized for layer in layers.values() for w in (*layer.gate_up, layer.down)):
            raise ValueError("the host's processor computes with quantised experts only")
        first, most = next(iter(layers.values())), most_rows * n_used
        self.card, self.host, self.layers, self.n_used, self.deadline = card, host, layers, n_used, deadline
        self.most_rows, self.k, self.n_experts = most_rows, first.down.n, len(first.down.places) - 1
        self._words, self._mail = card.mapped(MAIL_WORDS, np.uint32, "requests to the host")
        self.state = card.zeros(ARRIVED + most_rows, np.uint32, "state of requests to the host")
        self._products = products if products is not None else card.alloc((most_rows, n_used + 1, self.k), np.float32)
        self._wanted, self._host_wanted = card.mapped((3, 1 << size_of(most)), np.int32, "experts wanted of the host")
        self._rows, rows_here = self._mapped_rows()
        self.results, results_here = card.mapped((most, self.k), np.float32, "results of the host")
        self._recordings = self._record(host.attach(self._host_wanted), rows_here, host.attach(results_here))
        programs = {key: recording.programs[0] for key, recording in self._recordings.items()}
        supply = bring and Supply(self._host_wanted[0], [layers[i].down.places.ptr for i in range(len(layers))], bring)
        self._service = Service(self._mail, programs, host.threads, supply)
        self._end = weakref.finalize(self, Service.close, self._service)
        self._service.start()

    def _mapped_rows(self):
        """Room for the rows of a step as int8 blocks: Quantized of the card, and the same of the host."""
        parts = [self.card.mapped(*part, "rows for the host") for part in (
            ((self.most_rows, self.k), np.int8), ((self.most_rows, self.k // 32), np.float32))]
        return Quantized(*(array for array, _ in parts)), Quantized(*(self.host.attach(here) for _, here in parts))

    def _record(self, wanted, rows, results):
        """(layer, size) -> the Recording of 1 << size products."""
        host, most, made = self.host, wanted.shape[1], {}
        width = max(layer.down.k for layer in self.layers.values())
        packed, inner = rows_of(host, most, self.k), rows_of(host, most, width)
        both, y = host.alloc((most, 2 * width), np.float32), host.alloc((most, self.k), np.float32)
        for number, layer in self.layers.items():
            for size in range(size_of(most) + 1):
                n = 1 << size
                here, choice = first_of(inner, n, layer.down.k), Choice(wanted[0][:n].reshape(n, 1), None)
                with host.record() as made[number, size]:
                    host.launch(pack_kernel, n, THREADS, *packed.flat, *rows.flat, wanted[1], self.k)
                    launch_inner(host, layer.gate_up, here, both, packed, choice, n)
                    expert_gemv(host, decoder_of(layer.down), y, self.k, layer.down, here, choice, n, from_pairs=True)
                    host.launch(put_kernel, n, THREADS, results.reshape(-1), y.reshape(-1), wanted[2], self.k)
        return made

    def compute(self, layer, experts):
        """Asks as the card does, and waits: the results of these experts for the first row. For measurements, while no
        step runs."""
        size = size_of(len(experts))
        lists = np.array([[self.n_experts, 0, -1]] * (1 << size), np.int32)
        lists[:len(experts)] = [(expert, 0, pair) for pair, expert in enumerate(experts)]
        self._host_wanted[:, :1 << size] = lists.T
        self._mail[[LAYER, SIZE, PRODUCTS]] = layer, size, len(experts)
        self._mail[REQUEST] = request = (self._mail[REQUEST] + 1) & np.uint32(FAILED - 1)
        while self._mail[ANSWER] != request:
            if self._mail[ANSWER] & FAILED:
                raise ExpertsMissing(f"the host's processor does not compute experts: {self._service.failure}")
            time.sleep(0)
        self.recover()                                  # the card goes on from this number

    def request(self, layer, n_rows):
        """The HostRequest of a layer in a step of so many rows. ValueError: the host was not prepared for it."""
        if layer not in self.layers or n_rows > self.most_rows:
            raise ValueError(f"the host was not prepared for {n_rows} rows of layer {layer}")
        return HostRequest(self._words, self._wanted, self._rows, self.results, self.state, self._products, layer,
                           self.n_experts, math.ceil(1e3 * self.deadline))

    # -- the engine --

    def check(self):
        """Raises ExpertsMissing if a step that has ended went without its experts. It asks no card."""
        if layer := int(self._mail[TROUBLE]):
            in_time = f"no answer within {self.deadline:g} s" if self._end.alive else "it was stopped"
            why = self._service.failure or in_time
            raise ExpertsMissing(f"the host's processor did not compute the experts of layer {layer - 1}: {why}")

    def recover(self):
        """Waits for an answer that was late, and lets steps ask again. Raises ExpertsMissing if it does not come."""
        self.card.synchronize()
        end = time.monotonic() + self.deadline
        while self._mail[ANSWER] != self._mail[REQUEST]:
            if self._mail[ANSWER] & FAILED or time.monotonic() > end:
                self.check()
                raise ExpertsMissing("the host's processor does not answer")
            time.sleep(1e-3)
        self.card.copy_in(self.state[:ARRIVED], np.array([self._mail[REQUEST], 0], np.uint32))
        self.card.synchronize()
        self._mail[TROUBLE] = 0

    def counts(self):
        """The Counts since the start."""
        return Counts(self._service.served, self._service.products, self._service.busy)

    def close(self):
        """Stops the service. A card that waits for it hears so."""
        self._end()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# ---- the choice between fetching and computing -------------------------------------------------------------

class Miss(NamedTuple):
    """The cost of an expert that the card lacks: its bytes, and the seconds to fetch it or to let the host compute."""

    n_bytes: int
    fetched: float
    computed: float

    @property
    def is_computed(self):
        """Whether the host's processor is the faster way."""
        return self.computed < self.fetched

    def __str__(self):
        way = "computed by the host's processor" if self.is_computed else "fetched over the link"
        return (f"an expert that is not on the card ({show_bytes(self.n_bytes)}) is {way}: {1e3 * self.fetched:.2g} ms "
                f"to fetch, {1e3 * self.computed:.2g} ms to compute")


def cost_of_a_miss(expert_bytes, k, link, speed):
    """The Miss of experts of so many bytes with rows of k numbers. link: bytes per second between host and card; speed:
    bytes of experts per second of the host's processor, see `measure_host`."""
    exchanged = 4 * k + k + k // 8                      # a result, and a row with its scales
    return Miss(expert_bytes, expert_bytes / link, expert_bytes / speed + exchanged / link)


def measure_host(host, layers, bring=None, *, rounds=3):
    """Bytes of experts per second with which the emulated card `host` computes one expert for one row. One, because a
    layer of a step asks for one or none where most experts are on the card; several at once would take less time each.
    The host's threads sleep before, as they do where misses are rare. layers: HostLayers, which take turns: what is
    measured should not be in a cache, as it is not in a step. bring: see HostExperts; the rounds behind the first find
    the experts in memory."""
    with HostExperts(host, host, dict(enumerate(layers)), 1, 1, bring=bring) as experts:
        wanted, best = np.zeros(1, np.int64), math.inf
        for _ in range(rounds):
            before = experts.counts().seconds
            for number in experts.layers:
                time.sleep(2e-9 * AWAKE)
                experts.compute(number, wanted)
            best = min(best, experts.counts().seconds - before)
    return sum(layer.expert_bytes for layer in layers) / best


# ---- check and time ----------------------------------------------------------------------------------------

class Sizes(NamedTuple):
    """Of a trial."""

    n_experts: int
    n_used: int
    rows: int
    k: int
    width: int              # F of an expert


# formats of gate and up (one for both, or two), format of down
CASES = [(("Q8_0",), "Q8_0", Sizes(8, 2, 1, 64, 32)), (("Q8_0",), "Q8_0", Sizes(5, 3, 7, 320, 96)),
         (("Q4_K",), "Q6_K", Sizes(8, 8, 2, 512, 256)), (("Q4_0", "Q5_0"), "Q8_0", Sizes(4, 1, 33, 96, 64))]
SHARES = 0.0, 0.3, 1.0                                  # of the experts that are missing


def random_experts(format, n_experts, n, k, seed):
    """(values, scales) of random matrices [n_experts * n, k], in host memory."""
    return random_matrix_reference(FORMATS[format], n_experts * n, k, seed)


def matrix_of(put, format, n, k, arrays):
    """(Matrix of all experts, rows of each). put: gives an Array for each of the arrays."""
    return Matrix(format, len(arrays[0]), k, *map(put, arrays)), n


class Trial:
    """A layer of random experts on a card and, once more, in host memory, with a step that a recording holds."""

    def __init__(self, card, host, gate_up, down, sizes, **options):
        n_experts, n_used, rows, k, width = sizes
        self.card, self.rows, self.k = card, rows, k
        wide, pairs = 2 * width // len(gate_up), rows * n_used
        shapes = [*((format, wide, k) for format in gate_up), (down, k, width)]
        made = [(*shape, random_experts(shape[0], n_experts, *shape[1:], seed)) for seed, shape in enumerate(shapes)]
        *gate_up, down = (experts_of(host, *matrix_of(host.attach, *shape)) for shape in made)
        self.experts = HostExperts(card, host, {0: HostLayer(tuple(gate_up), down)}, n_used, rows, **options)
        self.matrices = [experts_of(card, *matrix_of(card.upload, *shape)) for shape in made]
        self.addresses = [card.download(w.places) for w in self.matrices]
        self.choice = Choice(card.zeros((rows, n_used), np.int32), card.zeros((rows, n_used + 1), np.float32))
        self.u, self.inner = rows_of(card, rows, k), rows_of(card, pairs, width)
        self.x = card.zeros((rows, k), np.float32)
        self.both = card.alloc((pairs, 2 * width), np.float32)
        with card.record() as self.step:
            self.launch()

    def launch(self):
        """A layer's step behind the router: x += what the experts of each row give."""
        *gate_up, down = self.matrices
        request = self.experts.request(0, self.rows)
        launch_inner(self.card, gate_up, self.inner, self.both, self.u, self.choice, self.rows, request)
        expert_down(self.card, decoder_of(down), self.x, down, self.inner, self.choice, None, self.rows,
                    request=request)

    def draw(self, rng, share):
        """A new choice of experts, of which this share is missing, and new rows. -> which pairs are missing."""
        n_experts, n_used = len(self.addresses[0]) - 1, self.choice.n_used
        self.missing = rng.random(n_experts) < share
        chosen = np.argsort(rng.random((self.rows, n_experts)), axis=1)[:, :n_used].astype(np.int32)
        self.given = (chosen, rng.random((self.rows, n_used + 1)).astype(np.float32),
                      rng.integers(-127, 128, (self.rows, self.k), np.int8),
                      (rng.random((self.rows, self.k // 32)) * 0.01).astype(np.float32),
                      rng.standard_normal((self.rows, self.k)).astype(np.float32))
        return self.missing[chosen].reshape(-1)

    def run(self, missing=None):
        """x after a step with what was drawn last, float32 [rows, k]. missing: which experts, if not those drawn."""
        missing = self.missing if missing is None else missing
        for w, addresses in zip(self.matrices, self.addresses):
            self.card.copy_in(w.places, np.where(np.append(missing, True)[:, None], np.uint64(0), addresses))
        for array, values in zip((*self.choice, *self.u, self.x), self.given):
            self.card.copy_in(array, values)
        for array in (self.experts.results, *self.inner, self.both):
            self.card.poison(array)
        self.step.replay()
        return self.card.download(self.x)

    def right(self):
        """The same with all experts on the card."""
        return self.run(np.zeros_like(self.missing))


def check(card, gate_up, down, sizes):
    """Replays one recorded step with changing choices, rows and missing experts: the bits are those with all experts on
    the card. Only what is wanted is computed, and nothing is asked without need."""
    rng, asked = np.random.default_rng(sizes), Counts(0, 0, 0)
    trial = Trial(card, EmulatedCard(99), gate_up, down, sizes)
    with trial.experts as experts:
        for share in SHARES * 3:
            missing = trial.draw(rng, share)
            got = trial.run()
            experts.check()
            there = ~np.isnan(card.download(experts.results)).any(axis=1)
            np.testing.assert_array_equal(there, missing, "computed")
            asked = Counts(asked.requests + missing.any(), asked.products + missing.sum(), 0)
            assert experts.counts()[:2] == asked[:2]
            np.testing.assert_array_equal(got, trial.right())
            assert np.isfinite(got).all()
    return 0.0


def cases(card):
    """The checks, then a step of one row and one layer of a 35B-A3B, without and with a missing expert."""
    for case in CASES:
        yield Case("{}, {}, {} experts, {} used, {} x {} x {}".format("+".join(case[0]), case[1], *case[2]),
                   partial(check, card, *case))
    trial = Trial(card, EmulatedCard(99), ("Q8_0",), "Q8_0", Sizes(16, 8, 1, 2048, 512))
    for share in 0.0, 0.2:
        missing = trial.draw(np.random.default_rng(6), share)
        trial.run()
        yield Case(f"{missing.sum()} of 8 on the host", launch=trial.launch)
    trial.experts.close()


if __name__ == "__main__":
    main("Experts on the host", cases)
