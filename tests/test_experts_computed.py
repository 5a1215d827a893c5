"""Engines whose missing experts are computed by the host's processor: several cards, drafts, and faults in time.
test_experts_elsewhere.py has further tests of them."""

import threading

import numpy as np
import pytest

import qengine
from engine import expert_store
from engine.request import EngineStopped
from kernels import host_experts
from kernels.card import CardError
from kernels.emulated.card import EmulatedCard
from kernels.host_experts import ExpertsMissing, Miss
from tests.models import write_as_float32
from tests.oracle import oracle_path
from tests.test_experts_elsewhere import MB, PROMPT, closing, load, same
from tests.test_host_experts import wait_for


def with_link(number=0):
    """A card with a link whose speed is known: without one, nothing is measured."""
    return EmulatedCard(number, link_gbs=50)


@pytest.fixture
def computes(monkeypatch):
    """The host's processor seems to be faster than the link."""
    monkeypatch.setattr(expert_store, "cost_of_a_miss", lambda n_bytes, *_: Miss(n_bytes, 2.0, 1.0))


@pytest.fixture(scope="module")
def resident():
    """What an engine with all experts on the card says."""
    return closing(load(with_link()))[0]


def test_on_several_cards(resident, computes):
    cards = [with_link(number) for number in range(3)]
    found, counts = closing(load(cards, split=(1, 2, 1), expert_memory=MB))
    same(found, resident)
    assert counts["expert_computed"] > 0


def kernels_of_a_step(**options):
    """The names of the launches of a decode step of one row, in order."""
    card, names = with_link(), []
    launch, engine = card.launch, load(card, slots=1, **options)
    engine.pipeline.set_pages(0, [0, 1])
    engine.pipeline.place([qengine.answer_of(0, 0, 7)], 0)
    engine.pipeline.settle()
    card.launch = lambda kernel, *given, **how: (names.append(kernel.__name__), launch(kernel, *given, **how))
    engine.pipeline.stages[0].launch_step(qengine.StepShape(1), 0, 0)
    engine.close()
    return names


def test_a_step_that_may_ask_has_as_many_launches(computes):
    asking, plain = kernels_of_a_step(expert_memory=MB), kernels_of_a_step()
    assert [name.replace("asking", "expert") for name in asking] == plain
    assert sum(name.startswith("asking") for name in asking) == 2 * sum(name == "norm_route_kernel" for name in asking)


def test_drafts(computes):
    path = str(oracle_path("gguf/moe_mtp-Q8_0.gguf"))
    expected, _ = closing(load(with_link(), path, draft=3))
    found, counts = closing(load(with_link(), path, draft=3, expert_memory=2 * MB))
    same(found, expected)
    assert counts["expert_computed"] > 0


def test_experts_as_floats_are_fetched(computes, tmp_path):
    write_as_float32(oracle_path("gguf/moe_mtp-Q8_0.gguf"), tmp_path / "float.gguf")
    engine = load(with_link(), tmp_path / "float.gguf", expert_memory=4 * MB)
    assert engine.pipeline.stages[0].store.helper is None
    engine.close()


def test_what_was_measured_decides():
    engine = load(EmulatedCard(link_gbs=1e6), expert_memory=MB)
    store = engine.pipeline.stages[0].store
    assert not store.miss.is_computed and store.helper is None and 0 < store.miss.computed < 1
    engine.close()


# ---- faults ------------------------------------------------------------------------------------------------

@pytest.fixture
def held(monkeypatch):
    """A gate uint32 [1]; while it is 0, the host's products do not end. It is open at first."""
    gate, inner = np.ones(1, np.uint32), host_experts.launch_inner

    def held(on, *given):
        if on.name == "host memory":
            on.launch(wait_for, 1, 1, on.attach(gate))
        inner(on, *given)

    monkeypatch.setattr(host_experts, "launch_inner", held)
    yield gate
    gate[0] = 1


def hears(engine, running, words):
    with pytest.raises((CardError, EngineStopped), match=words):
        list(running)
    with pytest.raises((CardError, EngineStopped), match=words):
        list(engine.submit(qengine.Request(PROMPT[:20], max_tokens=4)))
    engine.close()


def test_a_product_past_its_deadline(computes, held, monkeypatch):
    """The request hears one sentence, the next one is refused with it, and nothing hangs."""
    monkeypatch.setattr(expert_store, "longest_wait", lambda *_: 2.0)
    engine = load(with_link(), slots=1, expert_memory=0)
    running = engine.submit(qengine.Request(PROMPT[:20], max_tokens=400, ignore_eos=True))
    next(iter(running))
    held[0] = 0
    threading.Timer(5, held.fill, [1]).start()          # what is under way must end before the engine can
    hears(engine, running, r"did not compute the experts of layer \d+: no answer within 2 s")


def test_a_host_that_ends_while_it_is_needed(computes):
    engine = load(with_link(), slots=1, expert_memory=0)
    running = engine.submit(qengine.Request(PROMPT[:20], max_tokens=400, ignore_eos=True))
    next(iter(running))
    engine.pipeline.stages[0].store.helper.close()
    hears(engine, running, r"did not compute the experts of layer \d+: it was stopped")


def test_an_engine_that_is_closed_while_it_computes(computes):
    engine = load(with_link(), slots=1, expert_memory=0)
    helper = engine.pipeline.stages[0].store.helper
    running = engine.submit(qengine.Request(PROMPT[:20], max_tokens=400, ignore_eos=True))
    next(iter(running))
    engine.close()
    assert len(list(running)) < 400
    with pytest.raises(ExpertsMissing, match="does not compute"):
        helper.compute(0, [0])
