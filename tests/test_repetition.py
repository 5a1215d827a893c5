"""Answers that repeat themselves are ended, and no others: the guard alone, in an engine, over the protocols."""

import base64
import logging
import random
import tracemalloc

import anthropic
import numpy as np
import openai
import pytest
from llguidance import LLMatcher

import qengine
from api.log import finish_of
from cli import chat, main, tasks
from engine.repetition import LONGEST_PERIOD, REPEATED_TOKENS, RepetitionGuard
from engine.request import Request
from engine.tokenizer import ByteTokenizer
from tests.clients import CHAT, HI, TEXT, app_of, send, serving
from tests.scripted import ScriptedEngine, shipped
from tests.until import wait_until

LOOP = "I say it again and again. " * 300
GUARDED = {"repetition_guard": True}


def end_of(tokens, prompt="hello", tokenizer=None):
    """After how many tokens the guard ends an answer; None if it does not."""
    tokenizer = tokenizer or shipped().tokenizer
    guard = RepetitionGuard(tokenizer, tokenizer.encode(prompt))
    return next((n for n, token in enumerate(tokens, start=1) if guard.push(token)), None)


def text_end(text, prompt="hello"):
    return end_of(shipped().tokenizer.encode(text), prompt)


# ---- the guard alone ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [1, 2, 3, 17, 63, 64])
@pytest.mark.parametrize("n_before", [0, 1, 100])
def test_it_counts_every_token_of_the_repetitions(period, n_before):
    tokens = list(range(1000, 1000 + n_before)) + list(range(100, 100 + period)) * 600
    assert end_of(tokens) == n_before + REPEATED_TOKENS
    assert end_of(tokens[:n_before + REPEATED_TOKENS - 1] + [7] * 400) is None      # one token differs


def test_longer_periods_and_varied_text_go_on():
    assert end_of(list(range(LONGEST_PERIOD + 1)) * 100) is None
    rng = random.Random(1)
    assert end_of([rng.choice([5, 6]) for _ in range(100_000)]) is None
    again = list(range(100, 130)) * 20
    again[::100] = range(6)                 # a word that is another one now and then
    assert end_of(again * 5) is None


ROWS = "".join(f"| {i} | {i * i} | yes |\n" for i in range(400))
HARMLESS = {
    "a table": "| n | n * n | odd |\n|---|---|---|\n" + ROWS,
    "base64": base64.b64encode(random.Random(2).randbytes(3000)).decode(),
    "base64 of zeros": base64.b64encode(bytes(300)).decode(),
    "numbers": ", ".join(map(str, range(3000))),
    "code": "".join(f"    case {i}:\n        return handle(event);\n        break;\n" for i in range(200)),
    "a pattern": ("+-" * 30 + "+\n" + "| " * 30 + "|\n") * 8, "rules": "-" * 200 + "\n" + "=" * 200,
    "zeros": "[" + "0, " * 150 + "0]"}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_people_write_goes_on(name):
    assert text_end(HARMLESS[name]) is None


@pytest.mark.parametrize("said, asked", [
    ("ha", "Write 'ha' a thousand times."), ("ha ", "Please: haha!"), ("ha", "ha"),
    (" the cat sat", "Repeat: sat the cat, for ever"), ("1 2 3\n", "2\n3 1\n2"), ("ab ", "a\tb"),
    ("日本 ", "「本日」と書いて"), ("–", "Draw a line of – please")])
def test_what_the_prompt_asked_for_goes_on(said, asked):
    assert text_end(said * 4000, asked) is None
    assert text_end(said * 4000, "Tell me something.") is not None


@pytest.mark.parametrize("said, asked", [
    ("tree ", "Repeat the word above: Tree"), ("Tree ", "the tree"), ("É", "é"), ("é", "É"), ("STRASSE ", "Straße"),
    ("ж Ж ", "Ж")])
def test_case_does_not_count(said, asked):
    assert text_end(said * 2000, asked) is None
    assert text_end(said * 2000, "Write it, please") is not None


def test_a_period_of_repetitions_is_one_of_them():
    """Its tokens are "no", " no" and a line break, and the prompt holds one "no" alone."""
    assert text_end("no no\n" * 400, "Write 'no' for ever.") is None
    assert text_end("no no\n" * 400, "Write 'n' for ever.") is not None


def test_long_texts_without_contents_end_unless_the_prompt_holds_them():
    for text, words, shown in [
            ("0,0,0,0\n" * 400, "Write 400 rows of zeros as CSV", "Write 400 rows of 0,0,0,0"),
            ("|   |   |\n" * 400, "Write an empty table", "Write an empty table of | |"),
            ("00 " * 2000, "Dump some kilobytes of zeros", "Dump 2,000 zeros: 00 00")]:
        assert text_end(text, words) is not None and text_end(text, shown) is None, text


def test_the_prompt_may_cut_the_text_into_other_tokens():
    """Even within a letter."""
    tokens = list("é".encode())
    assert end_of(tokens * 400, "é", ByteTokenizer(300)) is None
    assert end_of(tokens[::-1] * 400, "é", ByteTokenizer(300)) is None
    assert end_of(list("É".encode())[::-1] * 400, "é", ByteTokenizer(300)) is None
    assert end_of(tokens * 400, "e", ByteTokenizer(300)) == REPEATED_TOKENS


def test_white_space_is_never_asked_for():
    for space in "\n", " \n", "\t":
        assert text_end("x" + space * 20_000, f"Here:{space}{space}.") is not None


def test_another_repetition_after_one_that_was_asked_for_is_noticed():
    asked, other = ([n] * 600 for n in (1200, 1201))
    prompt = shipped().tokenizer.decode([1200])
    assert end_of([*asked, *other], prompt) == 600 + REPEATED_TOKENS


def test_it_takes_no_more_memory_as_the_answer_grows():
    guard = RepetitionGuard(shipped().tokenizer, [5])
    rng = random.Random(3)
    tokens = [rng.randrange(6000) for _ in range(1000)]
    tracemalloc.start()
    sizes = []
    for _ in range(3):
        for token in tokens * 5:
            guard.push(token)
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert max(sizes) - min(sizes) < 2000


# ---- in an engine ------------------------------------------------------------------------------------------


def scripted(script=LOOP, **fields):
    generation = ScriptedEngine(script).submit(Request([5], **fields))
    return list(generation), generation


def test_the_last_delta_says_why():
    deltas, generation = scripted(**GUARDED)
    assert len(deltas) == text_end(LOOP) and deltas[-1].text
    assert {delta.cause for delta in deltas[:-1]} == {None}
    assert (deltas[-1].finish_reason, deltas[-1].cause) == ("length", "repetition")
    assert (generation.finish_reason, generation.cause, finish_of(generation)) == ("length", *["repetition"] * 2)


def test_it_is_off_where_nobody_asks_for_it_and_with_ignore_eos():
    for fields in {}, {"repetition_guard": False}, GUARDED | {"ignore_eos": True}:
        deltas, generation = scripted(**fields)
        assert (deltas[-1].finish_reason, deltas[-1].cause, generation.cause) == ("stop", None, None)


def test_other_ends_come_first():
    n = text_end(LOOP)
    for fields in {"max_tokens": n - 1}, {"max_tokens": n}, {"stop": "again and"}:
        deltas, _ = scripted(**GUARDED | fields)
        assert deltas[-1].finish_reason in ("length", "stop") and deltas[-1].cause is None


def looping(engine, seed, **fields):
    """A request whose answer is one token for ever, which the prompt does not hold."""
    ids = np.random.default_rng(seed).integers(0, 4000, 20).tolist()
    longest = max(range(4000), key=lambda token: len(engine.tokenizer.pieces[token]))
    bias = {longest: 100.0}
    return qengine.Request(ids, **{"max_tokens": 700, "logit_bias": bias} | GUARDED | fields)


def test_answers_of_a_model_end_at_the_same_token_alone_and_together(engine):
    requests = [looping(engine, 1), looping(engine, 2, repetition_guard=False, max_tokens=530),
                looping(engine, 3, top_logprobs=1)]
    alone = [list(engine.submit(request)) for request in requests]
    assert [list(g) for g in [engine.submit(request) for request in requests]] == alone
    assert [(len(answer), answer[-1].cause) for answer in alone] == [
        (REPEATED_TOKENS, "repetition"), (530, None), (REPEATED_TOKENS, "repetition")]
    assert not engine.scheduler.running


def test_white_space_that_a_grammar_allows_without_end(engine):
    newline, = engine.tokenizer.encode("\n")
    grammar = LLMatcher.grammar_from_lark(r'start: "{" /\n*/ "}"')
    answer = list(engine.submit(looping(engine, 1, grammar=grammar, logit_bias={newline: 100.0})))
    assert len(answer) == REPEATED_TOKENS + 1 and answer[-1].cause == "repetition"


# ---- over the protocols ------------------------------------------------------------------------------------

MESSAGES = {"messages": [HI], "max_tokens": 4000}
OFF = {"repetition_guard": False}
PLACES = {          # path, body, where the answer says how it ended, how it does, how the guard is switched off
    "chat": (CHAT, MESSAGES, lambda answer: answer["choices"][0], {"finish_reason": "length"}, OFF),
    "text": (TEXT, {"prompt": "hi", "max_tokens": 4000}, lambda answer: answer["choices"][0],
             {"finish_reason": "length"}, OFF),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 4000},
                  lambda answer: answer["incomplete_details"] or {"reason": "max_output_tokens"},
                  {"reason": "max_output_tokens"}, OFF),
    "anthropic": ("/v1/messages", MESSAGES, dict, {"stop_reason": "max_tokens", "stop_sequence": None}, OFF),
    "ollama": ("/api/chat", {"model": "m", "messages": [HI], "stream": False}, dict, {"done_reason": "length"},
               {"options": OFF})}


@pytest.fixture(scope="module")
def port():
    with serving(app_of(ScriptedEngine(LOOP))) as (port, _):
        yield port


@pytest.mark.parametrize("name", PLACES)
def test_each_protocol_says_it_in_its_own_words(port, name):
    path, body, place, words, off = PLACES[name]
    status, _, answer = send(port, "POST", path, body)
    end = place(answer)
    assert status == 200 and {key: end[key] for key in words} == words and end["cause"] == "repetition"
    status, _, answer = send(port, "POST", path, body | off)
    assert status == 200 and "cause" not in place(answer)


def test_streams_say_it_too(port):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
        *_, last = client.chat.completions.create(model="m", stream=True, **MESSAGES)
        assert (last.choices[0].finish_reason, last.choices[0].cause) == ("length", "repetition")
        *_, last = client.completions.create(model="m", stream=True, prompt="hi", max_tokens=4000)
        assert (last.choices[0].finish_reason, last.choices[0].cause) == ("length", "repetition")
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="none") as client:
        *_, end, _ = client.messages.create(model="m", stream=True, **MESSAGES)
        assert (end.delta.stop_reason, end.delta.cause) == ("max_tokens", "repetition")


def test_the_log_and_the_metrics_say_it(caplog):
    caplog.set_level(logging.INFO, "qengine.requests")
    with serving(app_of(ScriptedEngine(LOOP))) as (port, service):
        send(port, "POST", CHAT, MESSAGES)
        wait_until(lambda: caplog.messages)
        assert caplog.messages[0].endswith(" finish=repetition")
        sample = "qengine:request_success_total", {"model_name": "scripted", "finished_reason": "repetition"}
        assert service.metrics.registry.get_sample_value(*sample) == 1


def test_the_command_line_has_it(monkeypatch, capsys):
    answers = []
    monkeypatch.setattr(tasks, "run_prompt", lambda model, options, sampling, thinking: answers.append(sampling))
    for options in [], ["--repetition-guard", "off"]:
        main.main(["-p", "hi", *options])
    assert [sampling["repetition_guard"] for sampling in answers] == [True, False]
    chat.print_answer(ScriptedEngine(LOOP), Request([5], **answers[0]))
    assert "cut because it repeated itself" in capsys.readouterr().err
