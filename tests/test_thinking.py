"""Budgets of thoughts: the tag that ends them comes in time, whatever else a request asks; fields of the protocols."""

import codecs
import itertools
import json

import anthropic
import numpy as np
import openai
import pytest
from llguidance import LLMatcher

import qengine
from api.thinking import EFFORTS, UNLIMITED, thinks
from cli import main
from engine.thinking import constraint_of
from kernels.emulated.card import EmulatedCard
from tests.clients import CHAT, HI, app_of, official_clients, send, serving
from tests.four_ways import blocks_of, chat_in_four_ways, message_in_four_ways
from tests.models import load_tiny
from tests.scripted import ScriptedEngine, shipped
from tests.tiny import tiny_engine

WORDS = LLMatcher.grammar_from_lark('start: "\\n\\n" /[a-z]{8}/')


def request(engine, budget=None, seed=0, **fields):
    """A request for an answer that begins with thoughts. A tag of the model's own is unlikely."""
    ids = np.random.default_rng(seed).integers(0, 4000, 20 + seed).tolist()
    return qengine.Request(ids, **{"thinking_budget": budget, "stop_after": engine.tokenizer.tags["</think>"],
                                   "temperature": 1.0, "seed": seed, "max_tokens": 40, "ignore_eos": True} | fields)


def tokens(engine, request):
    return [delta.token_id for delta in engine.submit(request)]


def n_thoughts(engine, free, budget):
    """How many of the tokens of an answer are thoughts within the budget, the last character whole."""
    while budget:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(b"".join(engine.tokenizer.pieces[token] for token in free[:budget]))
        if not decoder.getstate()[0]:
            break
        budget += 1
    return budget


def closing(engine, before):
    """What is forced after these tokens of prompt and thoughts."""
    is_new_line = engine.tokenizer.pieces[before[-1]].endswith(b"\n")
    return engine.tokenizer.encode("</think>" if is_new_line else "\n</think>")


# ---- answers of a model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"temperature": 0}, {"top_logprobs": 2}, {"presence_penalty": 1.0},
                                    {"repetition_guard": True, "ignore_eos": False, "logit_bias": {4059: -100.0}}],
                         ids=str)
@pytest.mark.parametrize("budget", [0, 1, 2, 17])
def test_the_tag_comes_at_exactly_this_token(engine, budget, fields):
    asked = request(engine, budget, **fields)
    free = tokens(engine, request(engine, **fields))
    answer, budget = tokens(engine, asked), n_thoughts(engine, free, budget)
    end = closing(engine, [*asked.prompt_ids, *free[:budget]])
    after = answer[budget + len(end):]
    assert answer[:budget] == free[:budget] and answer[budget:budget + len(end)] == end
    assert len(answer) == 40 and len(set(after)) > 1 and not set(after) & set(end)


def test_a_budget_that_is_not_spent_changes_nothing(engine):
    free = tokens(engine, request(engine))
    for budget in 40, 2**31 - 1:
        assert tokens(engine, request(engine, budget)) == free
    assert tokens(engine, request(engine, 3, stop_after=None)) == free       # an answer without thoughts


def test_thoughts_that_end_by_themselves_are_not_ended_again(engine):
    free = tokens(engine, request(engine))
    end = next(token for i, token in enumerate(free) if i >= 3 and token not in free[:i])
    for name in "stop_after", "stop_before":            # the tag, or a call of a tool
        assert tokens(engine, request(engine, 8, **{name: end})) == free


def test_thoughts_that_may_begin_with_the_answer(engine):
    """They begin with a tag as the first token, or never."""
    free = tokens(engine, request(engine))
    asked = request(engine, 2, stop_pause=free[0])
    end = closing(engine, free[:3])
    assert tokens(engine, asked)[:3 + len(end)] == [*free[:3], *end]
    assert tokens(engine, request(engine, 2, stop_pause=free[0] + 1)) == free
    first = tokens(engine, request(engine, 0, stop_pause=free[0]))
    assert first[:1] == free[:1] and first[1:3] == closing(engine, free[:1])


def test_alone_together_and_on_a_late_card_the_tokens_are_the_same(engine):
    """Also beside answers with a grammar, and without anything."""
    requests = [request(engine, budget, seed, max_tokens=30 + 5 * seed) for seed, budget in
                enumerate((0, 9, None, 1, 30, 22))]
    requests += [request(engine, 6, 7, grammar=WORDS, grammar_after=engine.tokenizer.tags["</think>"]),
                 request(engine, None, 8, grammar=WORDS), request(engine, 4, 9, top_logprobs=3)]
    alone = [list(engine.submit(one)) for one in requests]
    for order in requests, requests[::-1]:
        together = [list(generation) for generation in [engine.submit(one) for one in order]]
        assert together == (alone if order is requests else alone[::-1])
    late = load_tiny(EmulatedCard(late=True))
    assert [list(generation) for generation in [late.submit(one) for one in requests]] == alone
    late.close()


def test_several_cards_give_the_same_tokens(engine):
    if engine.cards[0].kind != "emulated":
        pytest.skip("one such comparison is enough")
    requests = [request(engine, budget, seed) for seed, budget in enumerate((0, 1, 12, None, 20))]
    want = [tokens(engine, one) for one in requests]
    several = load_tiny("emulated:2")
    assert [tokens(several, one) for one in requests] == want
    assert [[d.token_id for d in g] for g in [several.submit(one) for one in requests]] == want
    several.close()


def test_a_grammar_applies_behind_the_tag(engine):
    after = engine.tokenizer.tags["</think>"]
    free = tokens(engine, request(engine))
    for budget in 0, 5:
        answer = list(engine.submit(request(engine, budget, grammar=WORDS, grammar_after=after)))
        budget = n_thoughts(engine, free, budget)
        ids = [delta.token_id for delta in answer]
        assert ids[:budget] == free[:budget]
        assert ids[budget:].index(after) == len(closing(engine, [*request(engine).prompt_ids, *free[:budget]])) - 1
        text = "".join(delta.text for delta in answer[ids.index(after) + 1:])
        assert text.startswith("\n\n") and len(text) == 10 and text[2:].isalpha()
        assert answer[-1].finish_reason == "stop"


def test_a_grammar_of_the_whole_answer_takes_the_tag_too(engine):
    """As for models that may think or not."""
    begin, end = (engine.tokenizer.tags[name] for name in ("<think>", "</think>"))
    grammar = LLMatcher.grammar_from_lark(f'start: <[{begin}]> /(?s:.*)/ <[{end}]> "\\n\\n" /[a-z]{{8}}/')
    free = tokens(engine, request(engine, grammar=grammar, stop_pause=begin))
    ids = tokens(engine, request(engine, 6, grammar=grammar, stop_pause=begin))
    n = n_thoughts(engine, free[1:], 6)
    assert n > 6 and ids[:1 + n] == free[:1 + n] and ids[0] == begin and ids.index(end) in (1 + n, 2 + n)
    assert engine.tokenizer.decode(ids[ids.index(end) + 1:]).strip().isalpha()


def test_the_length_holds(engine):
    free = tokens(engine, request(engine))
    n = n_thoughts(engine, free, 5)
    want = [*free[:n], *closing(engine, free[:n])]
    for length in range(1, n + 4):
        answer = list(engine.submit(request(engine, 5, max_tokens=length)))
        ids = [delta.token_id for delta in answer]
        assert len(ids) == length and ids[:len(want)] == want[:length] and answer[-1].finish_reason == "length"


def test_only_the_end_of_thoughts_waits_for_masks(engine, monkeypatch):
    """All other steps are those of an answer without a budget."""
    counts = {"step": 0, "forward": 0, "constrain": 0}
    for name in counts:
        original = getattr(qengine.Pipeline, name)

        def counted(*arguments, name=name, original=original):
            counts[name] += 1
            return original(*arguments)

        monkeypatch.setattr(qengine.Pipeline, name, counted)
    answer = tokens(engine, request(engine, 20, max_tokens=60, draft=0))
    assert len(answer) == 60 and counts["step"] >= 54
    assert counts["forward"] <= 4 and counts["constrain"] <= 3


# ---- the budget alone --------------------------------------------------------------------------------------


def test_a_budget_binds_in_time_however_far_the_host_is_behind():
    """Whatever is forced was announced by `binds` before the tokens ahead of it were known."""
    tokenizer = shipped().tokenizer
    first, end, other = tokenizer.tags["<think>"], tokenizer.tags["</think>"], 300
    for budget, pause, ahead in itertools.product((0, 1, 2, 5), (None, first), (0, 1)):
        asked = qengine.Request([5], thinking_budget=budget, stop_after=end, stop_pause=pause)
        state, announced = constraint_of(asked, tokenizer, None), []
        for n in range(12):
            if ahead:
                announced.append(state.binds(1))        # of token n + 1, before token n is taken
            forced = list(state.forced)[:1]
            masked = state.binds()
            assert not forced or masked
            if ahead and n:
                assert announced[n - 1] or not masked
            state.take(forced[0] if forced else first if pause and not n else other)
            assert state.error is None and not state.ended and state.matcher is None
        assert not state.binds(0) and not state.binds(1)


def test_a_break_before_the_tag_only_where_there_is_none():
    tokenizer = shipped().tokenizer
    end = tokenizer.tags["</think>"]
    for prompt, breaks in ("<think>\n", 0), ("<think>", 1), ("<think>\n\n", 0):
        asked = qengine.Request(tokenizer.encode(prompt), thinking_budget=0, stop_after=end)
        assert list(constraint_of(asked, tokenizer, None).forced) == tokenizer.encode("\n") * breaks + [end]


def test_requests_that_are_refused(engine):
    for budget in -1, 1.5, True, 2**31:
        with pytest.raises(qengine.RequestError, match="'thinking_budget' must be a whole number from 0"):
            engine.submit(request(engine, budget))




# ---- fields of the protocols -------------------------------------------------------------------------------

THINK = {"chat_template_kwargs": {"enable_thinking": True}}
OPENAI = [      # fields of a chat request -> the budget; None where the server's own holds
    ({}, None), ({"reasoning_effort": "low"}, 1024), ({"reasoning_effort": "max"}, UNLIMITED),
    ({"thinking_budget": 0}, 0), ({"thinking_token_budget": 5}, 5), ({"thinking_budget_tokens": 6}, 6),
    ({"reasoning_budget_tokens": 7}, 7), ({"reasoning_budget_tokens": -1}, UNLIMITED),
    ({"reasoning_effort": "high", "thinking_budget": 12}, 12),
    ({"reasoning_effort": "none"} | THINK, None), ({"reasoning_effort": "medium"} | THINK, 4096)]
ANTHROPIC = [
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, 2000),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}, "output_config": {"effort": "low"}}, 2000),
    ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, 1024),
    ({"thinking": {"type": "adaptive"}, "thinking_budget": 9}, 9), ({"thinking": {"type": "adaptive"}}, None)]
OLLAMA = [({"think": True}, None), ({"think": "low"}, 1024), ({"think": "max"}, UNLIMITED),
          ({"think": True, "options": {"thinking_budget": 3}}, 3)]
ASKED = [*((CHAT, {"messages": [HI]} | fields, budget) for fields, budget in OPENAI),
         *(("/v1/messages", {"messages": [HI], "max_tokens": 9} | fields, budget) for fields, budget in ANTHROPIC),
         *(("/api/chat", {"model": "m", "messages": [HI], "stream": False} | fields, budget)
           for fields, budget in OLLAMA)]


@pytest.mark.parametrize("default", [None, 333])
def test_every_field_reaches_the_engine(default):
    engine = ScriptedEngine("a</think>b")
    sampling = {} if default is None else {"thinking_budget": default}
    with serving(app_of(engine, sampling=sampling)) as (port, _):
        for path, body, budget in ASKED:
            status, _, answer = send(port, "POST", path, body)
            assert status == 200, answer
            assert engine.requests[-1].thinking_budget == (default if budget is None else budget), body


def test_more_effort_is_a_larger_budget():
    budgets = list(EFFORTS.values())
    assert budgets == sorted(budgets) and [thinks(effort) for effort in EFFORTS] == [False] * 2 + [True] * 5
    assert thinks(None) is None


@pytest.mark.parametrize("path, body, field", [
    (CHAT, {"thinking_token_budget": -2}, "thinking_token_budget"), (CHAT, {"thinking_budget": 1.5}, "thinking_budget"),
    ("/v1/messages", {"max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens")])
def test_budgets_that_are_refused(path, body, field):
    with serving(app_of(ScriptedEngine("a"))) as (port, _):
        status, _, answer = send(port, "POST", path, {"messages": [HI]} | body)
        assert status == 400 and f"'{field}' must be a whole number" in answer["error"]["message"]


def test_a_model_whose_tag_is_spelt_says_no_to_a_number_and_takes_a_hint():
    with serving(app_of(tiny_engine())) as (port, _):
        body = {"messages": [HI], "max_tokens": 2}
        for path, fields, field in ((CHAT, {"thinking_budget": 3} | THINK, "thinking_budget"),
                                    ("/v1/messages", ANTHROPIC[0][0], "thinking.budget_tokens")):
            status, _, answer = send(port, "POST", path, body | fields)
            assert status == 400 and f"'{field}' needs a model that has </think>" in answer["error"]["message"]
        for fields in {"reasoning_effort": "low"}, {"thinking_budget": 3, "reasoning_effort": "none"}:
            assert send(port, "POST", CHAT, body | fields)[0] == 200


# ---- the model that ships ----------------------------------------------------------------------------------

SUM = [{"role": "user", "content": "What is 17 + 25?"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": {
    "type": "object", "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["sum"],
    "additionalProperties": False}}}


@pytest.fixture(scope="module")
def port():
    engine = qengine.load(card="emulated", slots=2, progress=False)
    with serving(app_of(engine)) as (port, _):
        yield port
    engine.close()


@pytest.mark.parametrize("budget", [0, 3])
def test_the_answer_reads_as_text_and_its_thoughts_are_counted(port, budget):
    """In all forms of an answer alike; the tag and the line break before it count among the thoughts."""
    fields = {"messages": SUM, "max_tokens": 60}
    with official_clients(openai.OpenAI, openai.AsyncOpenAI, port) as (client, run_async):
        extra = {"temperature": 0, "extra_body": {"thinking_budget": budget} | THINK}
        choices, usage = chat_in_four_ways(client, run_async, **fields, **extra)
        formed, _ = chat_in_four_ways(client, run_async, **fields, **extra, response_format=FORMAT)
    [(thought, text, calls, reason)] = choices
    n = usage["completion_tokens_details"]["reasoning_tokens"]
    assert text == text.strip() != "" and "think" not in text and (calls, reason) == ([], "stop")
    assert n in (budget + 1, budget + 2) and len(shipped().tokenizer.encode(thought or "")) in (budget, budget - 1)
    assert json.loads(formed[0][1]).keys() == {"sum"} and formed[0][0] == thought
    with official_clients(anthropic.Anthropic, anthropic.AsyncAnthropic, port, "") as (client, run_async):
        fields["thinking"] = {"type": "adaptive"}
        fields["extra_body"] = {"thinking_budget": budget, "temperature": 0}
        message = message_in_four_ways(client, run_async, **fields)
    assert message.usage.output_tokens_details.thinking_tokens == n
    assert blocks_of(message) == [("thinking", thought)] * bool(thought) + [("text", text)]


def test_the_command_line_limits_thoughts(capsys):
    ask = ["-p", "What is 17 + 25?", "--card", "emulated", "--thinking", "on", "--max-tokens", "60"]
    assert main.main([*ask, "--thinking-budget", "3"]) == 0
    text, said = capsys.readouterr()
    thought = said[:said.index("\nprompt ")].splitlines()[-1]            # in the line above that of the speeds
    assert text.strip() and "</think>" not in text and len(shipped().tokenizer.encode(thought)) <= 5
    assert main.main([*ask, "-m", "synthetic:tiny", "--thinking-budget", "3"]) == 2
    assert "--thinking-budget' needs a model that has </think>" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main.main(["-p", "hi", "--raw", "--thinking-budget", "3"])
