"""The products of a mixture of experts in decode steps: their bits in all formats, on all shapes of cards."""

from types import SimpleNamespace

import numpy as np
import pytest

from kernels import expert_gemv
from kernels.expert_gemv import Sizes, expert_down, expert_gemv as multiply_pairs, expert_swiglu
from kernels.formats import FORMATS
from kernels.operands import Quantized
from kernels.q8_gemv import Q8, random_activations
from tests.kinds import BY_KIND

Q8_0 = FORMATS["Q8_0"]
NARROW = Sizes(512, 512, 512, 5, 2, 3)      # two rows of `down` make a tile


@pytest.mark.parametrize("name", BY_KIND)
def test_bits_of_the_products_of_single_experts(card, name):
    expert_gemv.check(card, FORMATS[name], NARROW, Q8_0)


@pytest.mark.parametrize("shared", [None, "Q8_0", "Q4_0"])
@pytest.mark.parametrize("sizes", expert_gemv.CASES, ids=str)
def test_sizes_and_shared_experts(card, sizes, shared):
    expert_gemv.check(card, Q8_0, sizes, shared and FORMATS[shared], absent=(0,))


@pytest.mark.parametrize("name, sizes", [
    ("Q8_0", NARROW), ("Q8_0", Sizes(2080, 1056, 32, 3, 2, 1)), ("Q4_0", Sizes(1056, 512, 64, 3, 2, 2)),
    pytest.param("Q4_0", NARROW, marks=pytest.mark.slow),
    pytest.param("Q4_0", Sizes(1056, 1056, 64, 3, 2, 2), marks=pytest.mark.slow)], ids=str)
def test_shapes_of_real_cards(card, name, sizes, monkeypatch):
    """The kernels that keep weights in flight, on every card: for few SMs and for many. Rows of whole tiles and others,
    and rows of which two make a tile."""
    monkeypatch.setattr(card, "kind", "cuda")
    for n_sms, absent in (2, (1,)), (132, ()):
        monkeypatch.setattr(card, "n_sms", n_sms)
        expert_gemv.check(card, FORMATS[name], sizes, Q8_0, absent=absent)


def test_the_launch_of_a_large_card_fills_it_once():
    """Down of a 35B-A3B: a round of blocks of threads, of which each has two rounds of 9 warps."""
    for n_sms, bits in (132, 3), (80, 4), (2, 5):
        card = SimpleNamespace(kind="cuda", n_sms=n_sms)
        assert expert_gemv.output_bits_of(card, 2048, 1) == bits
        shape = expert_gemv.shape_of(card, Q8, 512, 2048)
        warps = expert_gemv.warps_of(card, bits, 8, shape, shape)
        assert shape.narrow and 9 * 2**bits // 4 % warps == 0


def step(card, sizes, seed=0):
    """(gate_up, down, activations, Choice) of random Q8_0 experts."""
    rng = np.random.default_rng(seed)
    gate_up, _ = expert_gemv.random_experts(card, Q8_0, sizes.n_experts, 2 * sizes.inner, sizes.hidden, rng)
    down, _ = expert_gemv.random_experts(card, Q8_0, sizes.n_experts, sizes.hidden, sizes.inner, rng)
    u = Quantized(*map(card.upload, random_activations(rng, sizes.n_rows, sizes.hidden)))
    return gate_up, down, u, expert_gemv.random_choice(card, rng, sizes)[0]


def inner_of(card, sizes):
    pairs = sizes.n_rows * sizes.n_used
    return Quantized(card.zeros((pairs, sizes.inner), np.int8), card.zeros((pairs, sizes.inner // 32), np.float32))


def test_a_recording_follows_the_choice_and_the_places(card):
    """Replays after other experts were chosen, and after experts have moved to other slots."""
    sizes = Sizes(256, 64, 0, 4, 2, 2)
    gate_up, down, u, choice = step(card, sizes)
    inner, x = inner_of(card, sizes), card.zeros((sizes.n_rows, sizes.hidden), np.float32)

    def launch():
        expert_swiglu(card, Q8, inner, gate_up, u, choice, sizes.n_rows)
        expert_down(card, Q8, x, down, inner, choice, None, sizes.n_rows)

    def result(run):
        card.fill(x, 0)
        run()
        return card.download(x)

    first = result(launch)
    with card.record() as recording:
        launch()
    np.testing.assert_array_equal(result(recording.replay), first)
    for w in gate_up, down:                                     # expert e moves from slot a to slot b, which was free
        places = card.download(w.places)
        slots = [w.addresses(slot) for slot in range(sizes.n_experts + 1)]
        free = next(slot for slot, at in enumerate(slots) if at not in {(*map(int, p),) for p in places})
        expert = int(card.download(choice.experts)[0, 0])
        old = slots.index((*map(int, places[expert]),))
        card.copy(w.slot(free).values, w.slot(old).values)
        card.copy(w.slot(free).scales, w.slot(old).scales)
        card.poison(w.slot(old).values), card.poison(w.slot(old).scales)
        places[expert] = slots[free]
        card.copy_in(w.places, places)
    np.testing.assert_array_equal(result(recording.replay), first)
    card.copy_in(choice.experts, card.download(choice.experts)[::-1].copy())
    swapped = result(recording.replay)
    assert (swapped != first).any()
    np.testing.assert_array_equal(swapped, result(launch))


def test_what_nobody_computes_shows(card):
    """An expert out of reach, and no results from elsewhere: NaN, in its rows alone."""
    sizes = Sizes(64, 32, 0, 4, 2, 2)
    _, down, _, choice = step(card, sizes)
    card.copy_in(choice.experts, np.array([[0, 1], [2, 3]], np.int32))
    places = card.download(down.places)
    places[3] = 0
    card.copy_in(down.places, places)
    x = card.zeros((2, sizes.hidden), np.float32)
    expert_down(card, Q8, x, down, inner_of(card, sizes), choice, None, 2)
    assert (card.download(x)[0] == 0).all() and np.isnan(card.download(x)[1]).all()


def test_sizes_that_do_not_fit_are_refused(card):
    sizes = Sizes(64, 48, 0, 2, 1, 1)
    rng = np.random.default_rng(0)
    gate_up, _ = expert_gemv.random_experts(card, Q8_0, 2, 2 * sizes.inner, 64, rng)
    choice, *_ = expert_gemv.random_choice(card, rng, sizes)
    u = Quantized(*map(card.upload, random_activations(rng, 1, 64)))
    with pytest.raises(ValueError, match="multiple of 32"):
        expert_swiglu(card, Q8, u, gate_up, u, choice, 1)
    many, *_ = expert_gemv.random_choice(card, rng, Sizes(64, 64, 0, 33, 33, 1))
    with pytest.raises(ValueError, match="32 experts"):
        expert_down(card, Q8, card.zeros((1, 96), np.float32), gate_up, u, many, None, 1)


def test_rows_that_no_tile_divides(card):
    """An odd number of rows of 16 blocks: each row is a tile."""
    rng, sizes = np.random.default_rng(0), Sizes(512, 0, 0, 2, 1, 1)
    w, matrices = expert_gemv.random_experts(card, Q8_0, 2, 33, 512, rng)
    choice, experts, _ = expert_gemv.random_choice(card, rng, sizes)
    u = Quantized(*map(card.upload, random_activations(rng, 1, 512)))
    y, want = card.zeros((1, 33), np.float32), card.zeros((1, 33), np.float32)
    multiply_pairs(card, Q8, y, 33, w, u, choice, 1)
    expert_gemv.gemv(card, Q8, want, 33, matrices[experts[0, 0]], u, 1)
    np.testing.assert_array_equal(card.download(y), card.download(want))
