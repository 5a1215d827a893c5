"""Experts that the host's processor computes while the card waits: the same bits, and no wait without an end."""

import ctypes
import math
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from numba import cuda, uint32

from kernels import host_experts
from kernels.emulated import native, serving
from kernels.emulated.card import EmulatedCard
from kernels.host_experts import (CASES, DEADLINE, ExpertsMissing, HostExperts, HostLayer, Sizes, Trial, check,
                                  cost_of_a_miss, measure_host)
from kernels.intrinsics import poll
from kernels.operands import Experts, Matrix
from tests.kinds import BY_FEW

SMALL = ("Q8_0",), "Q8_0", Sizes(6, 2, 3, 64, 32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_have_the_bits_of_the_card(card, case):
    check(card, *case)


@pytest.mark.parametrize("name", BY_FEW)
def test_every_format(card, name):
    """The products are those of test_expert_gemv.py, on the card and on the host."""
    check(card, (name,), name, Sizes(3, 2, 2, 256, 256))


@pytest.mark.parametrize("settings", [{"checked": True}, {"late": True}, {"threads": 1}], ids=str)
def test_every_kind_of_emulated_card(settings):
    check(EmulatedCard(**settings), *SMALL)


def test_a_step_that_is_counted():
    card = EmulatedCard()
    trial = Trial(card, EmulatedCard(1), *SMALL)
    with trial.experts:
        trial.draw(np.random.default_rng(0), 1.0)
        with card.counting() as log:
            got = trial.run()
        np.testing.assert_array_equal(got, trial.right())
    assert [counted.kernel for counted in log] == ["asking_swiglu_kernel", "asking_down_kernel"]


def test_several_cards_wait_at_once():
    """Each card has a service of its own, and the machine's threads are shared by all."""
    trials = [Trial(EmulatedCard(i), EmulatedCard(9 + i), *SMALL) for i in range(3)]
    results = {}

    def steps(number):
        trial, rng, same = trials[number], np.random.default_rng(number), []
        for _ in range(30):
            trial.draw(rng, 0.7)
            same.append((trial.run() == trial.right()).all())
            trial.experts.check()
        results[number] = same

    threads = [threading.Thread(target=steps, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for trial in trials:
        trial.experts.close()
    assert len(results) == 3 and all(all(same) and len(same) == 30 for same in results.values())


def test_a_miss_in_one_row_takes_that_row_alone_over_the_link(card):
    trial = Trial(card, EmulatedCard(1), *SMALL)
    with trial.experts as experts:
        missing = trial.draw(np.random.default_rng(1), 0.2).reshape(3, -1)
        assert 0 < missing.any(axis=1).sum() < 3 and missing.sum() == 1
        for array in experts._rows:
            card.poison(array)
        trial.run()
        sent = card.download(experts._rows.d)
        assert (np.isfinite(sent).all(axis=1) == missing.any(axis=1)).all()
        assert experts.counts()[:2] == (1, 1) and experts.counts().seconds > 0


def test_the_numbers_of_requests_begin_again(card):
    trial, last = Trial(card, EmulatedCard(1), *SMALL), serving.FAILED - 2
    with trial.experts as experts:
        experts.compute(0, [0])
        experts._mail[host_experts.REQUEST] = last              # the same request once more, with another number
        experts.recover()
        for _ in range(4):
            trial.draw(np.random.default_rng(2), 1.0)
            np.testing.assert_array_equal(trial.run(), trial.right())
            experts.check()
        assert experts._mail[host_experts.REQUEST] == 2


class Elsewhere:
    """A Trial whose experts on the host have no places until they are brought."""

    def __init__(self, card):
        self.trial, self.brought, self.fails = Trial(card, EmulatedCard(1), *SMALL, bring=self.bring), [set()], False
        layer, = self.trial.experts.layers.values()
        self.places = [w.places for w in (*layer.gate_up, layer.down)]
        self.addresses = [self.trial.experts.host.download(places) for places in self.places]
        self.keep([])

    def keep(self, experts):
        """Only these have places."""
        host = self.trial.experts.host
        for places, addresses in zip(self.places, self.addresses):
            there = np.isin(np.arange(len(addresses)), experts)
            host.copy_in(places, np.where(there[:, None], addresses, np.uint64(0)))
        host.synchronize()

    def bring(self, layer, experts):
        if self.fails:
            raise OSError("the disk is gone")
        self.brought.append(set(experts.tolist()))
        self.keep(experts)


def test_experts_that_must_be_brought(card):
    made, rng = Elsewhere(card), np.random.default_rng(3)
    trial = made.trial
    with trial.experts as experts:
        n = 0
        for share in (0.5, 1.0) * 10:
            missing = trial.draw(rng, share)
            wanted, here = set(trial.given[0].reshape(-1)[missing].tolist()), made.brought[-1]
            got = trial.run()
            n += not wanted <= here
            assert len(made.brought) == 1 + n and (wanted <= here or made.brought[-1] == wanted)
            np.testing.assert_array_equal(got, trial.right())
            experts.check()
        assert 5 < n < 20


def test_experts_that_cannot_be_brought(card):
    made = Elsewhere(card)
    made.fails = True
    with made.trial.experts as experts:
        made.trial.draw(np.random.default_rng(1), 1.0)
        assert np.isnan(made.trial.run()).all()
        with pytest.raises(ExpertsMissing, match="did not compute the experts of layer 0: the disk is gone"):
            experts.check()


# ---- a host that is late, fails or ends --------------------------------------------------------------------

@cuda.jit
def wait_for(gate):
    """What stands for products here: it ends when the gate opens."""
    while poll(gate, uint32(0)) == uint32(0):
        cuda.nanosleep(uint32(1000))


@contextmanager
def held_back(monkeypatch, card, deadline):
    """(Trial, gate) whose host goes on when gate[0] is 1. A choice of which all is missing is made."""
    gate, host, inner = np.zeros(1, np.uint32), EmulatedCard(1), host_experts.launch_inner

    def held(on, *given):
        if on is host:
            host.launch(wait_for, 1, 1, host.attach(gate))
        inner(on, *given)

    monkeypatch.setattr(host_experts, "launch_inner", held)
    trial = Trial(card, host, *SMALL, deadline=deadline)
    trial.draw(np.random.default_rng(3), 1.0)
    try:
        yield trial, gate
    finally:
        gate[0] = 1
        trial.experts.close()


def test_a_late_host_is_reported_and_nothing_passes_for_right(card, monkeypatch):
    with held_back(monkeypatch, card, 0.5) as (trial, gate):
        experts, start = trial.experts, time.monotonic()
        assert np.isnan(trial.run()).all()
        assert 0.5 <= time.monotonic() - start < DEADLINE
        with pytest.raises(ExpertsMissing, match="did not compute the experts of layer 0: no answer within 0.5 s"):
            experts.check()
        start = time.monotonic()
        for share in (0, 1) * 10:                               # steps that were queued already wait for nothing
            trial.draw(np.random.default_rng(4), share)
            assert np.isnan(trial.run()).all()
        assert time.monotonic() - start < 0.5 * 20 / 2
        with pytest.raises(ExpertsMissing):
            experts.recover()
        gate[0], experts.deadline = 1, DEADLINE                 # a busy host may need more for the next step
        with card.record() as trial.step:
            trial.launch()
        experts.recover()
        experts.check()
        trial.draw(np.random.default_rng(5), 1.0)
        np.testing.assert_array_equal(trial.run(), trial.right())
        experts.check()


def test_a_row_that_lacks_nothing_does_not_wait(monkeypatch):
    """The blocks of the other rows have ended, too: a single thread runs them all, and then waits."""
    card = EmulatedCard(threads=1)
    with held_back(monkeypatch, card, 8) as (trial, gate):
        lacks = trial.draw(np.random.default_rng(19), 0.2).reshape(trial.rows, -1).any(axis=1)
        assert lacks.tolist() == [False, False, True]
        right = trial.right()
        x = np.ctypeslib.as_array((ctypes.c_float * right.size).from_address(trial.x.ptr)).reshape(right.shape)
        step = threading.Thread(target=trial.run)
        step.start()
        end = time.monotonic() + 7
        while not (trial.experts._service.is_busy and (x[:2] == right[:2]).all()) and time.monotonic() < end:
            time.sleep(1e-3)
        assert (x[:2] == right[:2]).all() and (x[2] == trial.given[-1][2]).all()
        gate[0] = 1
        step.join()
        np.testing.assert_array_equal(x, right)


def test_an_end_while_the_card_waits(card, monkeypatch):
    """What is under way is answered; a step behind it hears that nothing will come."""
    with held_back(monkeypatch, card, 8) as (trial, gate):
        experts, start = trial.experts, time.monotonic()
        gate[0] = 1
        trial.run()
        gate[0] = 0
        for _ in range(2):
            trial.step.replay()
        while not experts._service.is_busy:
            time.sleep(1e-3)
        end = threading.Thread(target=experts.close)
        end.start()
        time.sleep(0.05)
        assert end.is_alive() and not experts._mail[host_experts.TROUBLE]
        gate[0] = 1
        card.synchronize()
        end.join()
        assert experts.counts().requests == 2 and time.monotonic() - start < 8
        with pytest.raises(ExpertsMissing, match="it was stopped"):
            experts.check()


def test_no_answer_after_the_end(card):
    trial = Trial(card, EmulatedCard(1), *SMALL)
    trial.experts.close()
    trial.experts.close()
    trial.draw(np.random.default_rng(6), 1.0)
    start = time.monotonic()
    assert np.isnan(trial.run()).all()
    assert time.monotonic() - start < DEADLINE
    with pytest.raises(ExpertsMissing, match="layer 0: it was stopped"):
        trial.experts.check()


def test_a_step_that_the_host_does_not_know(card):
    trial = Trial(card, EmulatedCard(1), *SMALL)
    with trial.experts as experts:
        with pytest.raises(ValueError, match="not prepared for 4 rows of layer 0"):
            experts.request(0, 4)
        with pytest.raises(ExpertsMissing, match="for which there is no program"):
            experts.compute(1, [0, 1, 1])
        trial.draw(np.random.default_rng(8), 1.0)
        assert np.isnan(trial.run()).all()
        with pytest.raises(ExpertsMissing, match="layer 0: a request has come"):
            experts.check()


def test_more_rows_than_a_step_may_have(card):
    with pytest.raises(ValueError, match="up to 1024 rows, not 1025"):
        Trial(card, EmulatedCard(1), ("Q8_0",), "Q8_0", Sizes(2, 1, 1025, 64, 32))


def test_the_most_rows_of_a_step(card):
    check(card, ("Q8_0",), "Q8_0", Sizes(3, 2, 1024, 32, 32))


def test_experts_of_floats(card):
    host = EmulatedCard(1)
    w = Experts(Matrix("F32", 64, 32, host.zeros((64, 32), np.float32)), 32, host.zeros((3, 2), np.uint64))
    with pytest.raises(ValueError, match="quantised experts only"):
        HostExperts(card, host, {0: HostLayer((w,), w)}, 1, 1)


def test_the_deadline_comes_before_the_patience_of_an_emulated_card():
    assert DEADLINE < native.PATIENCE


def test_dropping_it_ends_its_threads():
    def serving_threads():
        return {thread for thread in threading.enumerate() if thread.name == serving.THREAD}

    before = serving_threads()
    trial = Trial(EmulatedCard(), EmulatedCard(1), *SMALL)
    trial.experts.compute(0, [0, 2])
    started = serving_threads() - before
    trial.experts.close()
    assert started and not any(thread.is_alive() for thread in started)


# ---- which way ---------------------------------------------------------------------------------------------

def test_the_faster_way_is_taken():
    slow = cost_of_a_miss(3_342_336, 2048, 0.25e9, 10e9)
    assert slow.is_computed and math.isclose(slow.fetched, 3_342_336 / 0.25e9)
    assert math.isclose(slow.computed, 3_342_336 / 10e9 + (4 * 2048 + 2048 + 256) / 0.25e9)
    assert str(slow) == ("an expert that is not on the card (3.2 MB) is computed by the host's processor: 13 ms to "
                         "fetch, 0.38 ms to compute")
    fast = cost_of_a_miss(3_342_336, 2048, 55e9, 10e9)
    assert not fast.is_computed and "is fetched over the link: 0.061 ms to fetch" in str(fast)
    assert not cost_of_a_miss(3_342_336, 2048, math.inf, 10e9).is_computed


def test_steps_go_on_after_a_measurement(card):
    trial = Trial(card, EmulatedCard(1), *SMALL)
    with trial.experts as experts:
        for _ in range(3):
            trial.draw(np.random.default_rng(9), 1.0)
            np.testing.assert_array_equal(trial.run(), trial.right())
            experts.compute(0, [1, 4, 3])
        experts.check()


def test_the_speed_of_the_host_is_measured():
    trial = Trial(EmulatedCard(), host := EmulatedCard(1), *SMALL)
    layer, = trial.experts.layers.values()
    trial.experts.close()
    assert layer.expert_bytes == 3 * 64 * 32 * 34 // 32
    assert 1e3 < measure_host(host, [layer] * 3) < 1e12
