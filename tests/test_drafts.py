"""Drafts change no token: answers with drafts are those without, whatever a request asks, whoever runs beside it, on
one card or several, fresh or after a cached prompt.

Most drafts of these tests come from a script: the answer itself, with some tokens made wrong. So checks accept nothing,
a part or everything.
"""

import json

import llguidance.numpy
import numpy as np
import pytest
from llguidance import LLMatcher

import qengine
from engine import recordings, sampler
from engine.prefix import PAGE_TOKENS
from kernels.emulated.card import EmulatedCard
from kernels.records import CHECK_ROWS
from tests.models import load_tiny

SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Ada Lovelace of London", "Emmy Noether"]},
                                           "age": {"type": "integer", "minimum": 0, "maximum": 150}},
          "required": ["name", "age"], "additionalProperties": False}
JSON = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))
WORDS = LLMatcher.grammar_from_regex("(the quick brown fox, ){3}[a-z ]{20}")
END = 4059

# What requests ask, by name. The prompts of all have 61 to 80 tokens, so that their answers fill pages soon.
ASKED = {
    "greedy": {}, "drawn": {"temperature": 1.0}, "top": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.05}, "repetition": {"temperature": 1.0, "repetition_penalty": 1.2},
    "frequency": {"temperature": 0.7, "frequency_penalty": 0.8, "presence_penalty": 0.3},
    "bias": {"temperature": 1.0, "logit_bias": {17: 6.0, 300: 5.0, END: -100.0}},
    "likely": {"temperature": 1.0, "logit_bias": {17: 14.0, 300: 13.0, 5: 12.0}},
    "log-probabilities": {"temperature": 1.0, "top_logprobs": 3},
    "thinking": {"temperature": 1.0, "thinking_budget": 12, "stop_after": 4073},
    "json": {"temperature": 1.0, "grammar": JSON, "ignore_eos": False},
    "words": {"temperature": 1.0, "grammar": WORDS, "ignore_eos": False},
    "words, log-probabilities": {"grammar": WORDS, "top_logprobs": 2, "ignore_eos": False},
    "words after a token": {"temperature": 1.0, "grammar": WORDS, "grammar_after": 17, "logit_bias": {17: 9.0},
                            "ignore_eos": False},
    "stop": {"temperature": 1.0, "stop": ["e", "the"], "ignore_eos": False},
    "short": {"temperature": 1.0, "max_tokens": 3},
}


def request(name, seed=0, n_prompt=None, **fields):
    rng = np.random.default_rng([seed, *name.encode()])
    ids = rng.integers(0, 4000, n_prompt or 61 + int(rng.integers(20))).tolist()
    return qengine.Request(ids, **{"seed": seed, "max_tokens": 40, "ignore_eos": True} | ASKED[name] | fields)


def script(engine, request, answer, right):
    """The text of a request as drafts, each token right with probability `right`, in every slot."""
    tokens = [*request.prompt_ids, *(delta.token_id for delta in answer)]
    rng = np.random.default_rng(len(tokens))
    wrong = rng.random(len(tokens)) >= right
    drafts = np.where(wrong, rng.integers(0, 4000, len(tokens)), tokens)
    set_script(engine, dict.fromkeys(range(engine.n_slots), drafts))


def set_script(engine, texts):
    """From now on the drafts of slots are the tokens of these texts; without texts they are what drafters make."""
    with engine.scheduler.between_steps():
        engine.pipeline.follow_script(texts)


def load_drafting(card, **options):
    """An engine whose checks have as many drafts as there are, whatever becomes of them."""
    engine = load_tiny(card, **options)
    engine.scheduler.pace.width = lambda answers: CHECK_ROWS
    return engine


@pytest.fixture(scope="module")
def plain(card):
    engine = load_tiny(card, draft="off")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def drafting(card):
    engine = load_drafting(card)
    yield engine
    engine.close()


@pytest.mark.parametrize("name", ASKED)
def test_one_answer(plain, drafting, name):
    """Drafts that are right, wrong, and both, and those of the drafters."""
    want = list(plain.submit(request(name)))
    for right in 1.0, 0.75, 0.3, None:
        drafting.clear_cache()
        script(drafting, request(name), want, right) if right else set_script(drafting, None)
        assert list(drafting.submit(request(name))) == want, f"{right} of the drafts are right"


def test_a_grammar_that_fails_behind_a_draft(plain, drafting, monkeypatch):
    """The mask of a matcher that has failed allows the end of the text alone. No row chooses by it."""
    fill = llguidance.numpy.fill_next_token_bitmask_par

    def fail_at_drafts(executor, free, masks):
        for matcher, row in free:
            if row % CHECK_ROWS in (2, 5):
                matcher.validate_tokens([10**6])        # which is no token
                assert matcher.is_error()
        fill(executor, free, masks)

    asked = request("words")
    want = list(plain.submit(asked))
    script(drafting, asked, want, 1.0)
    monkeypatch.setattr(llguidance.numpy, "fill_next_token_bitmask_par", fail_at_drafts)
    assert list(drafting.submit(asked)) == want


@pytest.mark.parametrize("seconds, has_drafts", [(-1.0, False), (60.0, True)])
def test_a_slow_grammar_gets_fewer_drafts(plain, drafting, monkeypatch, seconds, has_drafts):
    """Once the masks of a step have taken too long, its further rows get none. A slow grammar does not delay the other
    answers more with drafts than without."""
    rows, fill = [], llguidance.numpy.fill_next_token_bitmask_par

    def count(executor, free, masks):
        rows.extend(row % CHECK_ROWS for _, row in free)
        fill(executor, free, masks)

    asked = request("json")
    want = list(plain.submit(asked))
    script(drafting, asked, want, 1.0)
    monkeypatch.setattr(sampler, "DRAFT_SECONDS", seconds)
    monkeypatch.setattr(llguidance.numpy, "fill_next_token_bitmask_par", count)
    assert list(drafting.submit(asked)) == want
    assert (max(rows) > 0) == has_drafts


def test_answers_that_run_together(plain, drafting):
    """Beside each other, with prompts that arrive meanwhile; nobody's drafts change anybody's tokens."""
    requests = [request(name, seed) for seed, name in enumerate(sorted(ASKED) * 2)]
    want = [list(plain.submit(r)) for r in requests]
    set_script(drafting, None)
    drafting.clear_cache()
    assert [list(g) for g in [drafting.submit(r) for r in requests]] == want
    stats = drafting.stats()
    assert 0 < sum(stats["drafts_accepted"]) < sum(stats["drafts_checked"])


def test_recordings_of_steps_are_bounded(plain, monkeypatch):
    """Steps come in many shapes. Those that were used least lately are recorded again when they come back."""
    monkeypatch.setattr(recordings, "MOST_RECORDINGS", 4)
    engine = load_drafting(EmulatedCard(late=True))
    stage, record, made = engine.pipeline.last, qengine.Stage.launch_step, []
    monkeypatch.setattr(qengine.Stage, "launch_step", lambda stage, *sizes: made.append(sizes) or record(stage, *sizes))
    requests = [request(name, seed) for seed, name in enumerate(("drawn", "likely", "json", "thinking"))]
    assert [list(g) for g in [engine.submit(r) for r in requests]] == [list(plain.submit(r)) for r in requests]
    assert len(stage.recordings) <= 4 and len(made) > len(set(made)) > 4
    engine.close()


def test_on_a_card_that_does_everything_late(plain):
    requests = [request(name) for name in ("drawn", "likely", "json", "log-probabilities", "thinking")]
    want = [list(plain.submit(r)) for r in requests]
    late = load_drafting(EmulatedCard(late=True))
    assert [list(g) for g in [late.submit(r) for r in requests]] == want
    late.close()


def test_over_several_cards(plain):
    """One answer, and several in as many groups as there are cards."""
    engine = load_drafting([EmulatedCard(0), EmulatedCard(1), EmulatedCard(2)], split=(1, 1, 1))
    for name in "drawn", "json", "words", "log-probabilities":
        want = list(plain.submit(request(name)))
        for right in 1.0, 0.6:
            engine.clear_cache()
            script(engine, request(name), want, right)
            assert list(engine.submit(request(name))) == want
    set_script(engine, None)
    requests = [request(name, seed) for seed, name in enumerate(sorted(ASKED))]
    assert [list(g) for g in [engine.submit(r) for r in requests]] == [list(plain.submit(r)) for r in requests]
    engine.close()


def conversation(engine, right, answers=()):
    """The deltas of three turns, each a prompt of all before and a few tokens more, and the cached tokens of each.
    answers: those of a run before, which give the script."""
    engine.clear_cache()
    ids, found = list(range(5, 45)), []
    for turn in range(3):
        asked = qengine.Request(list(ids), max_tokens=100, temperature=1.0, seed=turn, ignore_eos=True, top_logprobs=1)
        if answers:
            script(engine, asked, answers[turn][0], right)
        generation = engine.submit(asked)
        deltas = list(generation)
        found.append((deltas, generation.n_cached))
        ids += [delta.token_id for delta in deltas] + list(range(1000 + turn, 1009 + turn))
    return found


@pytest.mark.parametrize("right", [1.0, 0.8, 0.4])
def test_conversations(plain, drafting, right):
    """Later turns go on from states that answers have left. These stand at the same places, with the same bits."""
    want = conversation(plain, 1.0)
    assert [cached for _, cached in want] == [0, 2 * PAGE_TOKENS, 4 * PAGE_TOKENS - PAGE_TOKENS]
    assert conversation(drafting, right, want) == want


@pytest.mark.parametrize("right", [1.0, 0.9])
def test_answers_that_end_right_behind_a_page(plain, drafting, right):
    """The step that chooses the last token may fill a page, and leaves nothing for the step after it to compute. The
    checkpoint of this page has its bits all the same."""
    asked = request("drawn", n_prompt=33, max_tokens=2 * PAGE_TOKENS + 1 - 33)

    def two_turns(engine, answer=()):
        engine.clear_cache()
        if answer:
            script(engine, asked, answer, right)
        first = list(engine.submit(asked))
        ids = [*asked.prompt_ids, *(delta.token_id for delta in first), 5]
        second = engine.submit(qengine.Request(ids, max_tokens=4, ignore_eos=True, top_logprobs=1))
        return first, list(second), second.n_cached

    first, *second = two_turns(plain)
    assert second[1] == 2 * PAGE_TOKENS
    assert two_turns(drafting, first) == (first, *second)


def test_what_was_not_accepted_enters_no_page(plain, drafting):
    """The pages and states that two runs keep hold the same bits, one with drafts and one without."""

    def kept(engine):
        cache, scheduler = engine.pipeline.last.cache, engine.scheduler
        nodes = sorted(scheduler.cache.on_card, key=lambda node: node.depth)
        pages = [page for node in nodes[-1:] for page in [*[each.page for each in node.path()]][::-1]]
        layers = [array for index, pages_of in cache.pages.items() for array in pages_of[1:3]
                  if index < engine.config.n_layers]        # behind these come the draft block's
        return ([engine.cards[0].download(array)[pages].view(np.uint8) for array in layers],
                [engine.cards[0].download(states)[:, cache.n_slots + nodes[-1].number].view(np.uint8)
                 for states in cache.states], nodes[-1].depth)

    asked = request("drawn", n_prompt=70, max_tokens=150)
    plain.clear_cache()
    want = list(plain.submit(asked))
    *arrays, depth = kept(plain)
    for right in 0.9, 0.5:
        drafting.clear_cache()
        script(drafting, asked, want, right)
        assert list(drafting.submit(asked)) == want
        *found, found_depth = kept(drafting)
        assert found_depth == depth == 3
        for got, expected in zip(found, arrays):
            for one, other in zip(got, expected, strict=True):
                np.testing.assert_array_equal(one, other)


def test_a_first_token_has_a_page(drafting):
    """The draft block keeps its key and value with the first drafts, also right behind a full page: not elsewhere."""
    stage = drafting.pipeline.last
    blocks = stage.cache.pages[drafting.config.n_layers]
    drafting.clear_cache()
    with drafting.scheduler.between_steps():
        free = drafting.scheduler.cache.free_pages
        free.remove(0)                                  # page 0, which empty entries of the block table name
        before = [stage.card.download(array)[0].copy() for array in blocks[1:3]]
    assert len(list(drafting.submit(request("drawn", n_prompt=PAGE_TOKENS, max_tokens=2)))) == 2
    with drafting.scheduler.between_steps():
        free.append(0)
        for array, kept in zip(blocks[1:3], before, strict=True):
            np.testing.assert_array_equal(stage.card.download(array)[0], kept)


def test_right_drafts_save_steps(drafting, plain, monkeypatch):
    steps, step = [], qengine.Pipeline.step
    monkeypatch.setattr(qengine.Pipeline, "step", lambda *arguments: steps.append(1) or step(*arguments))
    asked = request("drawn", max_tokens=100)
    want = list(plain.submit(asked))
    n_plain = len(steps)
    drafting.clear_cache()
    script(drafting, asked, want, 1.0)
    assert list(drafting.submit(asked)) == want
    assert n_plain >= 99 and len(steps) - n_plain < 99 / 4


def test_a_request_limits_its_own_drafts(plain, drafting):
    """Also beside answers that have more, and those of the draft block."""
    set_script(drafting, None)
    requests = [request("likely", seed, draft=draft, max_tokens=100) for seed, draft in enumerate((0, 1, None))]
    generations = [drafting.submit(r) for r in requests]
    assert [list(g) for g in generations] == [list(plain.submit(r)) for r in requests]
    none, one, free = (generation.drafts.n_checked for generation in generations)
    assert sum(none) == 0 and one[0] > 0 == sum(one[1:]) and sum(free[1:]) > 0
