"""Drafts change no token: answers with drafts are those without, whatever a request asks, whoever runs beside it, on one
card or several, fresh or after a cached prompt.

Most drafts of these tests come from a script: the answer itself, with some tokens made wrong. So checks accept nothing,
a part or everything.
"""

import json

import numpy as np
import pytest
from llguidance import LLMatcher

import qengine
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


@pytest.fixture(scope="module")
def plain(card):
    engine = load_tiny(card, draft="off")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def drafting(card):
    engine = load_tiny(card, draft=CHECK_ROWS - 1)
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
