"""The router of a mixture of experts: choice and groups."""

import itertools

import numpy as np
import pytest

from kernels import route
from kernels.emulated.card import EmulatedCard


@pytest.mark.parametrize("case", route.CASES, ids=str)
def test_choices_equal_the_reference(card, case):
    route.check(card, *case)


@pytest.mark.parametrize("case", route.NORM_CASES, ids=str)
def test_one_launch_has_the_bits_of_the_separate_ones(card, case):
    route.check_norm_route(card, *case)


@pytest.mark.parametrize("case", route.GROUP_CASES, ids=str)
def test_groups_equal_the_reference(card, case):
    route.check_groups(card, *case)


@pytest.mark.parametrize("case", [case for case in route.NORM_CASES if case[3] > 1000], ids=str)
def test_emulated_cards_give_the_bits_of_the_shape_that_real_cards_have(case, monkeypatch):
    monkeypatch.setattr(route, "EMULATED", route.REAL)
    route.check_norm_route(EmulatedCard(0), *case)


@pytest.mark.parametrize("case", route.LIKE_CASES, ids=str)
def test_made_up_choices_equal_the_reference(card, case):
    route.check_like(card, *case)


@pytest.mark.parametrize("hits", [0.8, 0.9, 1.0])
def test_made_up_choices_are_as_local_as_asked(hits):
    """The hot experts are those that a stretch of positions uses most. The next stretch has all of them but one."""
    n_hot, hot = route.hot_experts(256, 8), []
    for stretch in range(3):
        slots, positions = np.divmod(np.arange(4 * route.DRIFT, dtype=np.int32), route.DRIFT)
        experts = route.route_like_reference(slots, positions + stretch * route.DRIFT, 256, 8, hits, 5)
        counts = np.bincount(experts.ravel(), minlength=256)
        hot.append(set(np.argsort(-counts)[:n_hot].tolist()))
        assert np.sort(counts)[-n_hot:].sum() / counts.sum() == pytest.approx(hits, abs=0.03)
    assert len(hot[0] & hot[1]) == len(hot[1] & hot[2]) == n_hot - 1


def test_there_is_room_for_the_most_tiles_and_no_more():
    """Over all ways in which up to 5 rows can be spread over up to 4 experts."""
    for rows, n_experts, used, tile in itertools.product(range(1, 6), range(1, 5), range(1, 5), range(1, 5)):
        if used <= n_experts:
            counts = (c for c in itertools.product(range(rows + 1), repeat=n_experts) if sum(c) == rows * used)
            most = max(sum(-(-n // tile) for n in count) for count in counts)
            assert route.most_tiles(rows, used, n_experts, tile) == most


def test_sizes_out_of_reach_are_refused():
    for n_experts, used in (513, 8), (8, 9), (256, 17), (8, 0):
        with pytest.raises(ValueError, match=f"not {used} of {n_experts}"):
            route.check_sizes(n_experts, used)
