"""What a request asks of sampling: penalties, biases, log-probabilities, stop strings after a token."""

import dataclasses
import time

import numpy as np
import pytest

import qengine
from engine.request import STOP_LETTERS, StopScanner
from engine.tokenizer import ByteTokenizer
from kernels import sample
from tests.models import SLOTS


def request(seed=0, **fields):
    ids = np.random.default_rng(seed).integers(0, 4000, 12).tolist()
    return qengine.Request(ids, **{"max_tokens": 12, "ignore_eos": True, "seed": seed} | fields)


def answer(engine, request):
    return list(engine.submit(request))


def tokens(deltas):
    return [delta.token_id for delta in deltas]


# ---- penalties and biases ----------------------------------------------------------------------------------


def test_the_card_counts_what_prompt_and_answer_hold(engine):
    got = tokens(answer(engine, request(repetition_penalty=1.01)))
    want = np.zeros(4096, np.uint16)
    want[request().prompt_ids] = sample.IN_PROMPT
    np.add.at(want, got, 1)
    history = engine.cards[0].download(engine.pipeline.last.sampler.state.history)
    assert any((row == want).all() for row in history)


def test_penalties_change_answers_and_nothing_is_left_of_them(engine):
    want = [tokens(answer(engine, request(seed, max_tokens=40))) for seed in range(SLOTS)]
    for penalties in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 10.0}):
        penalized = [engine.submit(request(seed, max_tokens=40, **penalties)) for seed in range(SLOTS)]
        got = [tokens(generation) for generation in penalized]
        assert got != want
        assert sum(len(set(g)) for g in got) > sum(len(set(w)) for w in want)       # they repeat less
        assert [tokens(answer(engine, request(seed, max_tokens=40))) for seed in range(SLOTS)] == want


def test_repetition_counts_the_prompt(engine):
    """Its first token is chosen with the prompt's tokens penalised, as NumPy says."""
    logits = engine.evaluate(request().prompt_ids)[-1]
    likeliest = np.argsort(-logits)[:4].tolist()
    ids = [*likeliest[:3], *request().prompt_ids]
    logits = engine.evaluate(ids)[-1]
    packed = sample.pack_parameters(repetition=10.0)
    history = np.zeros(4096, np.uint16)
    history[ids] = sample.IN_PROMPT
    want = int(np.argmax(sample.adjust_reference(logits, packed, history, None, None)))
    first = answer(engine, dataclasses.replace(request(), prompt_ids=ids, max_tokens=1, repetition_penalty=10.0))
    assert tokens(first) == [want] and want != int(np.argmax(logits))


def test_a_bias_allows_and_forbids(engine):
    want = tokens(answer(engine, request()))
    assert tokens(answer(engine, request(logit_bias={7: 100.0}))) == [7] * 12
    banned = tokens(answer(engine, request(logit_bias={np.int64(token): -100 for token in want})))
    assert not set(banned) & set(want)
    assert tokens(answer(engine, request())) == want


@pytest.mark.parametrize("name, values", {
    "logit_bias": ({4096: 1.0}, {-1: 1.0}, {"7": 1.0}, {7: 100.5}, {7: float("nan")}, {7: "a"}, {True: 1.0}),
    "top_logprobs": (-1, 21, 1.5, True), "stop_after": (4096, -1, "7"), "stop_pause": (4096,),
    "grammar_after": (4096,), "repetition_penalty": (0, 11, None),
    "frequency_penalty": (2.1, -3), "presence_penalty": (float("inf"),),
}.items())
def test_what_a_request_may_not_ask(engine, name, values):
    for value in values:
        with pytest.raises(qengine.RequestError) as caught:
            engine.submit(request(**{name: value}))
        assert caught.value.field == name


# ---- log-probabilities -------------------------------------------------------------------------------------


def test_log_probabilities_are_those_of_the_logits(engine):
    """Of the first token exactly; of the later ones, which `evaluate` sees as a prompt, nearly."""
    deltas = answer(engine, request(top_logprobs=20, temperature=1.0))
    ids = request().prompt_ids
    logits = engine.evaluate(ids + tokens(deltas)[:-1])[len(ids) - 1:].astype(np.float64)
    for at, (delta, row) in enumerate(zip(deltas, logits, strict=True)):
        log_probs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        tolerance = 1e-5 if at == 0 else 0.05
        assert abs(delta.logprob - log_probs[delta.token_id]) < tolerance
        assert [value for _, value in delta.top_logprobs] == sorted((v for _, v in delta.top_logprobs), reverse=True)
        assert np.abs(np.array([v - log_probs[i] for i, v in delta.top_logprobs])).max() < tolerance
        if delta.token_id in dict(delta.top_logprobs):
            assert dict(delta.top_logprobs)[delta.token_id] == delta.logprob
    assert [i for i, _ in deltas[0].top_logprobs] == np.argsort(-logits[0], kind="stable")[:20].tolist()


@pytest.mark.parametrize("top", [0, 3])
def test_as_many_as_are_asked_for(engine, top):
    deltas = answer(engine, request(top_logprobs=top, logit_bias={5: 100.0}, repetition_penalty=2.0))
    plain = answer(engine, request(top_logprobs=20))
    assert all(len(delta.top_logprobs) == top and delta.logprob <= 0 for delta in deltas)
    assert deltas[0].token_id == 5 and deltas[0].top_logprobs == plain[0].top_logprobs[:top]      # raw logits


def test_requests_with_and_without_side_by_side(engine):
    """The same deltas as alone, bit for bit, and none where none were asked for; tokens do not change."""
    requests = [request(seed, top_logprobs=wanted, temperature=seed % 2, presence_penalty=seed / 4,
                        logit_bias={seed: 2.0}, max_tokens=8 + 3 * seed)
                for seed, wanted in enumerate((None, 2, 0, None, 20, None))]
    alone = [answer(engine, r) for r in requests]
    assert [list(g) for g in [engine.submit(r) for r in requests]] == alone
    plain = [answer(engine, dataclasses.replace(r, top_logprobs=None)) for r in requests]
    assert [tokens(p) for p in plain] == [tokens(a) for a in alone]
    for deltas in plain + [alone[0], alone[3], alone[5]]:
        assert all(delta.logprob is None and delta.top_logprobs == () for delta in deltas)


# ---- stop strings ------------------------------------------------------------------------------------------


def test_many_long_stop_strings_cost_little():
    """However much of them the text has: minutes where each was compared with the text's end again at every letter."""
    scanner = StopScanner(["a" * (STOP_LETTERS - 1) + chr(98 + i) for i in range(16)])
    started = time.thread_time()
    shown = "".join(scanner.push("a") for _ in range(20_000))
    assert len(shown) == 20_000 - STOP_LETTERS + 1 and not scanner.stopped
    assert scanner.push("b") == "" and scanner.stopped
    assert time.thread_time() - started < 10       # 0.2 s


def test_stop_strings_count_after_a_token(engine):
    bias, spaced = {5: 100.0}, engine.tokenizer.pieces[5].decode()
    whole = answer(engine, request(max_tokens=6, logit_bias=bias))
    assert [delta.text for delta in whole] == [spaced] * 6
    stopped = answer(engine, request(max_tokens=6, logit_bias=bias, stop=spaced, stop_after=5))
    assert [delta.text for delta in stopped] == [spaced, ""] and stopped[-1].finish_reason == "stop"
    never = answer(engine, request(max_tokens=6, logit_bias=bias, stop=spaced, stop_after=6))
    assert [delta.text for delta in never] == [spaced] * 6 and never[-1].finish_reason == "length"


def test_line_breaks_before_what_stop_strings_count_in_are_none_of_it():
    """Templates put them behind thoughts: a text that may have one line would be empty."""
    generation = qengine.Generation(qengine.Request([1], stop="\n", stop_after=ord("!")), ByteTokenizer(256))
    for letter in b"a\nb!\n\nline\n":
        reason = generation.push(letter, None)
    generation.close()
    assert "".join(delta.text for delta in generation) == "a\nb!\n\nline" and reason == "stop"


@pytest.mark.parametrize("text, shown", [
    (b"<an apple>\n\nan apple", "<an apple>\n\nan "), (b"an apple>", "an "), (b"\n<an apple>", "\n<an "),
    (b"<an <apple", "<an <apple")], ids=["thoughts", "none", "not at once", "thoughts alone"])
def test_stop_strings_wait_where_the_answer_begins_with_a_token(text, shown):
    asked = qengine.Request([1], stop="apple", stop_after=ord(">"), stop_pause=ord("<"))
    generation = qengine.Generation(asked, ByteTokenizer(256))
    for n, letter in enumerate(text, 1):
        if generation.push(letter, "length" if n == len(text) else None) == "stop":
            break
    generation.close()
    assert "".join(delta.text for delta in generation) == shown
