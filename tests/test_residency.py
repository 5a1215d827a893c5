"""Which experts have slots: the rule against others on made-up traces, and what must hold whatever the trace."""

from collections import OrderedDict

import numpy as np
import pytest

from engine.residency import LARGEST_GAIN, NOWHERE, Residency

N_EXPERTS, N_USED = 256, 8


def topics(seed, n_steps=1200, topic=400, slope=1.0, repeated=0.25):
    """Choices [n_steps, N_USED] of a made-up router. A choice repeats one of the step before with probability
    `repeated`, as measured on a published model (26.6 %, ssubbotin/flash-moe, docs/STATUS.md). Otherwise it is drawn by
    Zipf's law; which experts are frequent changes every `topic` steps."""
    rng = np.random.default_rng(seed)
    p = 1 / np.arange(1, N_EXPERTS + 1) ** slope
    chosen, order = np.empty((n_steps, N_USED), np.int64), None
    for step in range(n_steps):
        order = rng.permutation(N_EXPERTS) if step % topic == 0 else order
        row = [e for e in chosen[step - 1] if step and rng.random() < repeated]
        row += [e for e in order[rng.choice(N_EXPERTS, N_EXPERTS, replace=False, p=p / p.sum())] if e not in row]
        chosen[step] = row[:N_USED]
    return chosen


def residency_hits(trace, n_slots, half_life=None):
    """(share of hits, copies to the card per step) of a Residency whose moves are done at once."""
    resident = Residency(1, N_EXPERTS, n_slots, *[half_life] * (half_life is not None))
    n_missed = n_moves = 0
    for chosen in trace:
        missing, n = resident.use(chosen[None])
        n_missed += n
        for layer, expert in missing:
            if move := resident.make_way(layer, expert):
                resident.settle(move)
                n_moves += 1
    return 1 - n_missed / trace.size, n_moves / len(trace)


def lru_hits(trace, n_slots):
    """The same where the least recently used expert always gives way."""
    slots, n_missed = OrderedDict.fromkeys(range(n_slots)), 0
    for chosen in trace:
        missing = [e for e in chosen if e not in slots]
        for expert in chosen:
            slots.pop(expert, None)
            slots[expert] = None
        while len(slots) > n_slots:
            slots.popitem(last=False)
        n_missed += len(missing)
    return 1 - n_missed / trace.size, n_missed / len(trace)


def list_hits(trace, n_slots):
    """The share of hits of a fixed list of the experts that were frequent in the first quarter of the trace."""
    frequent = np.argsort(-np.bincount(trace[:len(trace) // 4].ravel(), minlength=N_EXPERTS))[:n_slots]
    return np.isin(trace, frequent).mean()


@pytest.mark.parametrize("n_slots, share", [(32, 0.7), (64, 0.8), (128, 1.0)])
def test_hits_as_the_least_recently_used_rule_has_them_with_fewer_copies(n_slots, share):
    """share: of the copies; the fewer slots, the fewer experts are worth one."""
    trace = topics(0)
    (hits, copies), (lru, lru_copies) = residency_hits(trace, n_slots), lru_hits(trace, n_slots)
    assert hits > lru - 0.015
    assert copies < lru_copies * share
    assert hits > list_hits(trace, n_slots) + 0.1       # topics change, a list does not


def test_frequency_alone_does_not_follow_topics():
    trace = topics(1)
    assert residency_hits(trace, 64)[0] > residency_hits(trace, 64, 1e9)[0] + 0.03


def test_a_short_half_life_is_the_least_recently_used_rule():
    trace = topics(2, n_steps=300)[:, :1]               # one choice a step: there are no ties
    assert residency_hits(trace, 16, 0.02) == lru_hits(trace, 16)


def test_slots_and_experts_agree_whatever_is_chosen():
    """Moves are done late and in any order, as on a card."""
    rng, resident, moving = np.random.default_rng(3), Residency(3, 16, 4, 0.5), []
    for _ in range(2000):
        missing, n_missed = resident.use(rng.integers(0, 16, (3, 6)))
        assert n_missed >= len(missing) == len({tuple(each) for each in missing})
        assert all(resident.slot_of[layer, expert] == NOWHERE for layer, expert in missing)
        moving += [move for pair in missing if (move := resident.make_way(*pair))]
        for _ in range(min(rng.integers(0, 4), len(moving))):
            resident.settle(moving.pop(rng.integers(len(moving))))
        coming = {(move.layer, move.expert) for move in moving}
        assert len({(move.layer, move.slot) for move in moving}) == len(moving)     # no slot awaits two experts
        for layer, owners in enumerate(resident.owner):
            assert len(set(owners)) == 4
            for slot, expert in enumerate(owners):
                assert resident.slot_of[layer, expert] == (NOWHERE if (layer, expert) in coming else slot)
        assert (resident.slot_of != NOWHERE).sum() == 12 - len(moving)
        assert np.isfinite(resident.score).all() and resident._gain <= LARGEST_GAIN * 4


def test_without_slots_all_experts_are_missing():
    resident = Residency(2, 8, 0)
    missing, n_missed = resident.use(np.array([[1, 3], [3, 7]]))
    assert sorted(map(tuple, missing)) == [(0, 1), (0, 3), (1, 3), (1, 7)] and n_missed == 4
    assert resident.make_way(0, 1) is None


def test_with_a_slot_for_each_expert_none_is_missing():
    resident = Residency(2, 8, 100)
    missing, n_missed = resident.use(np.array([[1, 3, 1], [3, 7, 0]]))
    assert len(missing) == n_missed == 0 and resident.n_slots == 8
