"""How many drafts a check gets (engine/speculate.py): against the best width, with times and luck that are made up."""

import logging
import random

import pytest

from engine.speculate import (ALLOWANCE, LARGEST_CHECK, MEASUREMENTS, MOST_BALANCE, MOST_DRAFTS, RETRY_TOKENS, SHARE,
                              WATCHED, Drafts, Pace)


class Run:
    """Answers whose draft i is right with chance chances(i), on cards whose check takes cost(width) seconds."""

    def __init__(self, chances, cost, n=1, limit=MOST_DRAFTS, has_block=True, seed=1):
        self.chances, self.cost, self.random = chances, cost, random.Random(seed)
        self.pace = Pace(limit, has_block)
        self.answers = [Drafts() for _ in range(n)]
        for drafts in self.answers:
            self.pace.join(drafts, None)

    def steps(self, n_steps, n_there=MOST_DRAFTS):
        """The widths of so many steps, and tokens per second. n_there: drafts that there are, if no block makes them"""
        widths, tokens, seconds = [], 0, 0.0
        for _ in range(n_steps):
            width = self.pace.width(self.answers)
            taken = self.cost(width) * self.random.uniform(0.95, 1.05)
            self.pace.measure(len(self.answers), width, taken)
            for drafts in self.answers:
                n_drafts, right = min(width - 1, drafts.limit, n_there), 0
                while right < n_drafts and self.random.random() < self.chances(right):
                    right += 1
                self.pace.land(drafts, n_drafts, right, n_there)
                tokens += 1 + right
            widths.append(width)
            seconds += taken
        return widths, tokens / seconds


def best_speed(chances, cost, n=1):
    """Tokens per second of the best fixed width, and that width."""
    found = []
    for width in range(1, 1 + min(MOST_DRAFTS + 1, LARGEST_CHECK // n)):
        chance, tokens = 1.0, 1.0
        for i in range(width - 1):
            chance *= chances(i)
            tokens += chance
        found.append((n * tokens / cost(width), width))
    return max(found)


CARDS = {"many rows are cheap": lambda w: 3e-3 * (1 + 0.035 * (w - 1)), "rows cost": lambda w: 0.02 * (0.8 + 0.2 * w),
         "rows cost nearly a step": lambda w: 0.1 * (0.2 + 0.8 * w),
         "three fit into a tile": lambda w: 1e-3 * (1 + 0.5 * (w > 3) + 0.02 * w)}


@pytest.mark.parametrize("costs", CARDS)
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.75, 0.98])
@pytest.mark.parametrize("n", [1, 3])
def test_speed_comes_near_that_of_the_best_width(costs, chance, n):
    run = Run(lambda i: chance, CARDS[costs], n)
    run.steps(200)                                          # times and chances become known
    _, speed = run.steps(1500)
    best, width = best_speed(run.chances, CARDS[costs], n)
    assert speed > 0.93 * best, (speed / best, width)


def test_without_luck_checks_end_and_are_tried_again_now_and_then():
    run = Run(lambda i: 0.0, CARDS["rows cost"])
    run.steps(400)                                          # few checks are made, so it takes long to know the chances
    widths, _ = run.steps(1000)
    assert set(widths) == {1, 2}
    assert 1000 // RETRY_TOKENS - 1 <= widths.count(2) <= 1000 // RETRY_TOKENS + 1
    run.chances = lambda i: 0.9                             # luck is back
    run.steps(500)
    widths, _ = run.steps(100)
    assert min(widths) > 2


@pytest.mark.parametrize("costs", CARDS)
@pytest.mark.parametrize("n, late", [(1, 0), (1, 2), (3, 0), (20, 2)])
@pytest.mark.parametrize("has_block", [True, False])
def test_without_luck_checks_lose_little_from_the_first_token_on(costs, n, late, has_block):
    """However many drafts there are. late: steps that are chosen before the tokens of a step are known."""
    run, flights, seconds = Run(lambda i: 0.0, CARDS[costs], n, has_block=has_block), [], 0.0
    for step in range(1, 1001):
        width = run.pace.width(run.answers)
        run.pace.measure(n, width, run.cost(width))
        seconds += run.cost(width)
        flights.append(width)
        if len(flights) > late:
            n_drafts = flights.pop(0) - 1
            for drafts in run.answers:
                run.pace.land(drafts, n_drafts, 0, MOST_DRAFTS)
        assert seconds / run.cost(1) <= (1 + SHARE) * step + ALLOWANCE, step


def test_what_good_checks_have_won_others_may_lose_again_in_part():
    run = Run(lambda i: 1.0, CARDS["rows cost"])
    run.steps(300)
    run.chances = lambda i: 0.0
    widths, _ = run.steps(1000)
    lost = sum(run.cost(width) / run.cost(1) - 1 for width in widths)
    assert 2 < lost <= 1.1 * (MOST_BALANCE + 1000 * SHARE)      # times vary by 5 %


@pytest.mark.parametrize("n", [1, 4])
def test_luck_is_found_soon(n):
    """Although the first checks are narrow: after 60 steps, the widths are those of long runs."""
    run = Run(lambda i: 0.9, CARDS["many rows are cheap"], n)
    run.steps(60)
    widths, speed = run.steps(60)
    assert speed > 0.9 * best_speed(run.chances, CARDS["many rows are cheap"], n)[0]


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("has_block", [True, False])
def test_luck_of_an_engine_that_has_just_begun_is_not_wasted(n, has_block):
    """A wrong draft or two among the first do not stop checks for long."""
    speeds = []
    for seed in range(20):
        run = Run(lambda i: 0.75, CARDS["rows cost"], n, has_block=has_block, seed=seed)
        speeds.append(run.steps(60)[1] / best_speed(run.chances, run.cost, n)[0])
    assert sum(speeds) / len(speeds) > 0.85


def test_a_width_that_does_not_pay_hides_no_wider_one_that_does():
    """A fourth row needs a tile that costs half a step: this does not pay for four rows, but it pays for eight."""
    shares = []
    for seed in range(6):
        run = Run(lambda i: 0.85, CARDS["three fit into a tile"], 3, seed=seed)
        run.steps(200)
        best, width = best_speed(run.chances, run.cost, 3)
        shares.append(run.steps(800)[1] / best)
        assert width == 8
    assert sum(shares) / len(shares) > 0.92, shares


@pytest.mark.parametrize("slow", [1, 2])
def test_a_width_that_was_measured_at_a_bad_moment_is_tried_again(slow):
    """The machine did something else when this width was measured first."""
    run = Run(lambda i: (0.6, 0.2)[i > 0], CARDS["rows cost"])
    for width in 1, 2, 3, 4:
        for _ in range(MEASUREMENTS):
            run.pace.measure(1, width, run.cost(width) * (2 if width == slow else 1))
    run.steps(150)
    widths, speed = run.steps(500)
    best, width = best_speed(run.chances, run.cost)
    assert width == 2 and widths.count(2) > 450 and speed > 0.97 * best


def test_a_width_that_was_skipped_risks_no_more_than_a_wider_one():
    pace, cost = Pace(MOST_DRAFTS, True), CARDS["rows cost"]
    for n, width in (1, 1), (1, 2), (1, 3), (1, 4), (2, 4), (2, 1):
        for _ in range(3):
            pace.measure(n, width, cost(width))
    assert max(pace.risks(2, 4)) <= cost(4) / cost(1) - 1 + 1e-9


def test_answers_pay_by_the_size_of_their_own_group():
    pace, group, other = Pace(MOST_DRAFTS, True), [Drafts() for _ in range(8)], [Drafts()]
    for drafts in group + other:
        pace.join(drafts, None)
    pace.width(group)
    pace.width(other)
    before = pace.balance
    for drafts in group:
        pace.land(drafts, 0, 0, MOST_DRAFTS)
    assert pace.balance - before == pytest.approx(SHARE)


def test_a_wider_check_is_tried_when_later_drafts_become_right():
    run = Run(lambda i: 0.9 * (i < 2), CARDS["many rows are cheap"])
    run.steps(300)
    widths, _ = run.steps(100)
    assert sorted(widths)[50] == 3
    run.chances = lambda i: 0.95
    run.steps(1000)
    assert sorted(run.steps(100)[0])[50] == 8


def test_limits_of_the_engine_of_a_request_and_of_a_check():
    free = CARDS["many rows are cheap"]
    assert set(Run(lambda i: 1.0, free, limit=0).steps(200)[0]) == {1}
    assert max(Run(lambda i: 1.0, free, limit=3).steps(200)[0]) == 4
    pace, answers = Pace(3, True), [Drafts() for _ in range(3)]
    for drafts, limit in zip(answers, (5, 0, None)):
        pace.join(drafts, limit)
    assert [drafts.limit for drafts in answers] == [3, 0, 3]
    assert pace.width([answers[1]]) == 1 and 1 < pace.width(answers) <= 4
    for n, widest in (8, 8), (9, 7), (32, 2), (33, 1), (64, 1), (100, 1):
        assert max(Run(lambda i: 1.0, lambda w: 1.0, n).steps(150)[0]) == widest, n


def test_copied_tokens_are_checked_where_there_are_some():
    run = Run(lambda i: 0.95, CARDS["many rows are cheap"], has_block=False)
    run.steps(50, 7)
    assert sorted(run.steps(50, 7)[0])[25] == 8
    run.steps(1, 0)                                         # this step hears that there are none
    assert set(run.steps(200, 0)[0]) == {1}
    run.steps(1, 2)
    assert max(run.steps(50, 2)[0]) == 3


def test_an_answer_without_drafts_does_not_stop_the_others():
    pace, lucky, plain = Pace(has_block=True), Drafts(), Drafts()
    pace.join(lucky, None)
    pace.join(plain, 0)
    for width in range(1, 9):
        for _ in range(5):
            pace.measure(2, width, 1 + 0.05 * width)
    for _ in range(50):
        pace.land(lucky, 7, 7)
        pace.land(plain, 0, 0)
    assert pace.width([lucky, plain]) == 8
    for _ in range(50):
        pace.land(lucky, 7, 0)
    assert pace.width([lucky, plain]) == 1


def test_new_answers_begin_with_what_was_usual():
    run = Run(lambda i: 0.0, CARDS["rows cost"])
    run.steps(20_000)
    new = Drafts()
    run.pace.join(new, None)
    assert new.chances[0] < 0.2 and run.pace.width([new]) == 1


def test_counts():
    drafts, pace = Drafts(), Pace()
    assert drafts.share is None
    for one in (0, 0), (3, 1), (2, 2), (7, 0), (2, 0):
        pace.land(drafts, *one)
    assert drafts.n_checked == pace.n_checked == [4, 4, 2, 1, 1, 1, 1]
    assert drafts.n_accepted == pace.n_accepted == [2, 1, 0, 0, 0, 0, 0]
    assert drafts.share == 3 / 14
    other = Drafts()
    pace.land(other, 1, 1)
    assert other.n_checked == [1, *[0] * 6] and pace.n_checked[0] == 5 and pace.n_accepted[0] == 3


def test_one_slow_step_changes_nothing():
    pace, drafts = Pace(has_block=True), Drafts()
    pace.join(drafts, None)
    assert pace.width([drafts]) > 1                         # nothing is measured: rows are taken to be cheap
    pace.measure(1, 3, 100.0)                               # it was compiled, say
    assert pace.seconds(1, 3) / pace.seconds(1, 1) == pytest.approx(1.04)
    for _ in range(4):
        pace.measure(1, 3, 0.010)
        pace.measure(1, 1, 0.009)
    assert pace.seconds(1, 3) == 0.010 and pace.seconds(1, 1) == 0.009
    assert pace.seconds(1, 4) == pytest.approx(0.010 * 1.06 / 1.04)
    for _ in range(MEASUREMENTS):                           # the context has become long
        pace.measure(1, 3, 0.02)
    assert pace.seconds(1, 3) == 0.02


def test_a_fall_of_acceptance_to_zero_is_logged_once(caplog):
    def warnings():
        return [record.message for record in caplog.records]

    with caplog.at_level(logging.WARNING, logger="qengine"):
        pace, answers = Pace(), [Drafts(), Drafts()]
        for _ in range(2 * WATCHED):
            pace.land(answers[0], 2, 0)                     # never any luck: nothing has fallen
        for i in range(WATCHED):
            pace.land(answers[i % 2], 2, 1)
        for i in range(WATCHED // 2 - 1):
            pace.land(answers[i % 2], 2, 0)
        assert not warnings()
        pace.land(answers[0], 2, 0)
        assert warnings() == [f"none of the last {WATCHED} drafts was right, and before that more than 20 % were"]
        for _ in range(3 * WATCHED):
            pace.land(answers[0], 2, 0)
        assert len(warnings()) == 1
        for n in WATCHED, 0:
            for _ in range(WATCHED):
                pace.land(answers[1], 2, bool(n))
        assert len(warnings()) == 2
