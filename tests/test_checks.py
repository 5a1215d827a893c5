"""What `--bench` does with drafts (cli/checks.py), on a pipeline that chooses tokens by a rule."""

from types import SimpleNamespace

import numpy as np
import pytest

from cli.checks import CheckBench, compare, room_for
from kernels.accept import accept_reference
from kernels.advance import COUNT, N_OUTCOME, NEXT_DRAFTS, POSITION, SLOT, TOKENS, advance_reference
from kernels.card import CardError

N_VOCAB, CONTEXT, N_TOKENS = 50, 61, 40


class Pipeline:
    """Chooses tokens by slot, position and the token before. A step of w rows takes 1 + 0.1 (w - 1) seconds, and as
    long again for each 10 drafts that its block makes."""

    def __init__(self, n_slots, block=None):
        self.now, self.prompts, self.outcomes, self.answers, self.shapes = 0.0, {}, {}, {}, []
        self.script, self.last = None, SimpleNamespace(model=SimpleNamespace(block=block))

    def settle(self):
        pass

    def follow_script(self, texts):
        self.script = texts and {slot: list(text) for slot, text in texts.items()}

    def on_all(self, work):
        work(SimpleNamespace(cache=SimpleNamespace(save=self.save)))

    def save(self, slot, number):
        assert slot == number
        self.prompts[slot] = True

    def prepare_slot(self, slot, request, number):
        assert self.prompts[number] and slot == number and request.prompt_ids

    def place(self, answers, group):
        self.answers[group] = np.array(answers, np.int32)
        self.outcomes[group] = np.zeros((len(answers), N_OUTCOME), np.int32)

    def step(self, shape, group):
        n, width, n_drafts, *_ = shape
        assert n == len(self.answers[group])
        self.shapes.append((width, n_drafts))
        self.now += 1 + 0.1 * (width - 1) + 0.1 * n_drafts
        self.answers[group], ids, slots, positions = advance_reference(self.answers[group], self.outcomes[group], width)
        chosen = np.where(positions < 0, -1, (7 * ids + 3 * slots + positions ** 2) % N_VOCAB).astype(np.int32)
        found = self.outcomes[group] = np.array(accept_reference(chosen, ids, positions, n, width), np.int32)
        for outcome, answer in zip(found, self.answers[group]):
            at = answer[POSITION] + outcome[COUNT] + 1
            drafts = self.script[answer[SLOT]][at:at + 7] if self.script else []
            outcome[NEXT_DRAFTS:] = drafts + [-1] * (7 - len(drafts))
        read = found.copy()
        return SimpleNamespace(read=lambda: read)


@pytest.fixture
def check_bench(monkeypatch):
    """check_bench(slots, groups, block): a CheckBench over a Pipeline."""
    def make(batch=1, n_groups=1, block=None):
        pipeline = Pipeline(batch, block)
        monkeypatch.setattr("cli.checks.time", SimpleNamespace(perf_counter=lambda: pipeline.now))
        bench = SimpleNamespace(
            pipeline=pipeline, repeats=2, batch=batch, prompt=lambda context, slot: None,
            groups=[range(group, batch, n_groups) for group in range(n_groups)],
            engine=SimpleNamespace(n_ctx=CONTEXT + room_for(N_TOKENS), n_slots=batch,
                                   config=SimpleNamespace(n_vocab=N_VOCAB)))
        return CheckBench(bench, N_TOKENS)

    return make


@pytest.mark.parametrize("batch, n_groups", [(1, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("n_drafts, acceptance", [(2, 1.0), (3, 0.5), (1, 0.0), (7, 0.9)])
def test_decoding_with_drafts(check_bench, batch, n_groups, n_drafts, acceptance):
    found = check_bench(batch, n_groups).drafted(CONTEXT, n_drafts, acceptance)
    assert found.plain_tokens_per_s == pytest.approx(batch / n_groups)
    assert found.check_cost == pytest.approx(1 + 0.2 * n_drafts) and len(found.repeats) == 2
    assert found.factor == pytest.approx(found.tokens_per_check / found.check_cost)
    assert found.tokens_per_s == pytest.approx(found.factor * found.plain_tokens_per_s, rel=0.1)
    if acceptance == 0:
        assert found.tokens_per_check == 1
    elif acceptance == 1:
        assert 0.8 * (1 + n_drafts) < found.tokens_per_check < 1 + n_drafts     # checks end at multiples of 64
    else:
        expected = sum(acceptance ** i for i in range(n_drafts + 1))
        assert 0.6 * expected < found.tokens_per_check < 1.4 * expected


@pytest.mark.parametrize("block", [None, "a block"])
def test_what_checks_cost(check_bench, block):
    bench = check_bench(2, block=block)
    found = bench.costs(CONTEXT, (1, 3, 8))
    assert [(cost.rows, cost.batch) for cost in found] == [(1, 2), (3, 2), (8, 2)]
    assert [cost.cost for cost in found] == pytest.approx([1, 1.2, 1.7])
    assert [cost.seconds for cost in found] == pytest.approx([1, 1.2, 1.7])
    assert [cost.with_drafting for cost in found] == (pytest.approx([1, 1.4, 2.4]) if block else [None] * 3)
    assert bench.pipeline.script is None


def test_a_token_that_drafts_have_changed_is_noticed(check_bench):
    bench = check_bench(2)
    step = bench.pipeline.step

    def wrong(shape, group):
        tokens = step(shape, group)
        if shape[1] > 1 and bench.pipeline.answers[0][1, POSITION] > CONTEXT + 9:
            tokens.read()[1, TOKENS] += 1
        return tokens

    bench.pipeline.step = wrong
    with pytest.raises(CardError, match=r"drafts have changed token \d+ of answer 1"):
        bench.drafted(CONTEXT, 2, 1.0)
    compare([[1, 2], [3]], [[1], [3, 4]])
    with pytest.raises(CardError, match="token 1 of answer 0: 5 instead of 2"):
        compare([[1, 2]], [[1, 5]])
