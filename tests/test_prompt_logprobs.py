"""Log-probabilities of prompts: of the engine, and as /v1/completions tells of them."""

import contextlib

import numpy as np
import openai
import pytest

import qengine
from api.plain import MAX_BYTES
from kernels.emulated.card import EmulatedCard
from kernels.logprobs import check_values, logprobs_reference
from tests.clients import app_of, scripted_clients
from tests.models import load_tiny
from tests.scripted import END, ScriptedEngine


def ids_of(seed, n):
    return np.random.default_rng(seed).integers(0, 4000, n).tolist()


def scores(engine, ids, top=3, **fields):
    first, *others = engine.submit(qengine.Request(list(ids), **{"max_tokens": 2, "prompt_logprobs": top} | fields))
    assert all(delta.prompt_logprobs is None for delta in others)
    return first.prompt_logprobs


def assert_same(one, other):
    for name in ("own", "likeliest", "ids"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("n", [1, 2, 9, 64, 65, 200])
def test_they_are_those_of_the_logits(engine, n):
    ids = ids_of(n, n)
    found, logits = scores(engine, ids), engine.evaluate(ids)
    assert found.own.shape == (n - 1,) and found.likeliest.shape == found.ids.shape == (n - 1, 3)
    for row, token in enumerate(ids[1:]):
        own, likeliest, best = logprobs_reference(logits[row], token)
        assert found.ids[row].tolist() == best[:3].tolist()
        check_values(np.append(found.likeliest[row], found.own[row]), np.append(likeliest[:3], own))


@pytest.mark.parametrize("options", [{"chunk": 512}, {"slots": 11}, {"split": [1, 2]}], ids=str)
def test_the_bits_depend_neither_on_passes_nor_on_cards(engine, options):
    """Nor on the number of slots, nor on a card that runs all as late as it may, nor on what runs beside."""
    want = [scores(engine, ids_of(seed, n), 20) for seed, n in enumerate((3, 200, 600))]
    cards = [EmulatedCard(number, late=True) for number in range(2 if "split" in options else 1)]
    with contextlib.closing(load_tiny(cards, **options)) as other:
        beside = other.submit(qengine.Request(ids_of(9, 30), max_tokens=400, ignore_eos=True))
        requests = [qengine.Request(ids_of(seed, n), max_tokens=1, prompt_logprobs=20)
                    for seed, n in enumerate((3, 200, 600))]
        for generation, wanted in zip([other.submit(r) for r in requests], want):
            first, = generation
            assert_same(first.prompt_logprobs, wanted)
        beside.cancel()
        beside.wait()


def test_what_is_cached_is_computed_again(engine):
    """And is there for prompts that want no log-probabilities; fewer likeliest tokens are the first ones of more."""
    engine.clear_cache()
    ids = ids_of(1, 300)
    want = scores(engine, ids)
    again = engine.submit(qengine.Request(ids, max_tokens=2, prompt_logprobs=3))
    first, _ = again
    assert again.n_cached == 0
    assert_same(first.prompt_logprobs, want)
    fewer = scores(engine, ids, 0)
    assert fewer.likeliest.shape == (299, 0)
    np.testing.assert_array_equal(fewer.own, want.own)
    plain = engine.submit(qengine.Request(ids, max_tokens=2))
    plain.wait()
    assert plain.n_cached == 256
    assert engine.stats()["kv_pages_used"] == 0


def test_an_answer_is_the_same_with_and_without_them(engine):
    fields = {"max_tokens": 20, "temperature": 1.0, "seed": 3, "ignore_eos": True, "top_logprobs": 2}
    with_them, without = ([(delta.token_id, delta.logprob) for delta in engine.submit(
        qengine.Request(ids_of(2, 150), prompt_logprobs=top, **fields))] for top in (5, None))
    assert with_them == without


def test_a_scored_prompt_can_be_cancelled(engine):
    generation = engine.submit(qengine.Request(ids_of(1, 1000), max_tokens=1, prompt_logprobs=20))
    generation.cancel()
    assert list(generation) == []
    assert len(scores(engine, ids_of(1, 10)).own) == 9


@pytest.mark.parametrize("top", [-1, 21, 1.5, True, "1"])
def test_what_a_request_may_not_ask(engine, top):
    with pytest.raises(qengine.RequestError) as caught:
        engine.submit(qengine.Request([1], prompt_logprobs=top))
    assert caught.value.field == "prompt_logprobs"


# ---- /v1/completions ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scripted():
    engine = ScriptedEngine("Hello there.")
    with scripted_clients(engine, openai.OpenAI, openai.AsyncOpenAI) as (client, _):
        yield engine, client


def complete(client, prompt, **arguments):
    """The choices of a request, and the same put together from its stream."""
    arguments = {"model": "m", "prompt": prompt} | arguments
    answer, streamed = client.completions.create(**arguments), {}
    for chunk in client.completions.create(stream=True, **arguments):
        for choice in chunk.choices:
            told = streamed.setdefault(choice.index, {"text": "", "logprobs": {}})
            told["text"] += choice.text
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                told["logprobs"].setdefault(name, []).extend(values)
            told["finish_reason"] = choice.finish_reason
    for choice in answer.choices:
        logprobs = choice.logprobs.model_dump() if choice.logprobs else {}
        assert streamed[choice.index] == {"text": choice.text, "logprobs": logprobs,
                                          "finish_reason": choice.finish_reason}
    return answer


PROMPT = "One \ub300\ud55c two <|im_end|> \U0001f600!"


def test_echo(scripted):
    """The prompt before its continuation; also of tokens, special ones included, and of parts of characters."""
    engine, client = scripted
    ids = engine.tokenizer.encode(PROMPT)
    for prompt in PROMPT, ids:
        answer = complete(client, prompt, echo=True)
        assert answer.choices[0].text == PROMPT + "Hello there." and answer.choices[0].logprobs is None
        assert engine.requests[-1].prompt_logprobs is None
    assert complete(client, ids, echo=False).choices[0].text == "Hello there."
    answer = client.completions.create(model="m", prompt=ids, echo=True, extra_body={"return_token_ids": True})
    assert answer.choices[0].token_ids[:len(ids)] == ids


@pytest.mark.parametrize("max_tokens", [0, 1, 16])
def test_echo_with_log_probabilities(scripted, max_tokens):
    """One entry for each token: those of the prompt, of which the first follows nothing, and those after it."""
    engine, client = scripted
    ids = engine.tokenizer.encode(PROMPT)
    answer = complete(client, ids, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0, seed=1)
    choice, = answer.choices
    told, n = choice.logprobs, len(ids)
    generated = [] if max_tokens == 0 else [*engine.tokenizer.encode("Hello there."), END][:max_tokens]
    assert answer.usage.completion_tokens == len(generated) and answer.usage.total_tokens == n + len(generated)
    assert choice.finish_reason == ("stop" if max_tokens == 16 else "length")
    assert told.token_logprobs == [None, *[-0.25] * (n - 1), *[-0.5] * len(generated)]
    texts = [engine.tokenizer.pieces[token].decode("utf-8", "replace") for token in [*ids, *generated]]
    assert told.tokens == texts
    assert told.top_logprobs == [None, *({text: -0.25} for text in texts[1:n]), *({text: -0.5} for text in texts[n:])]
    assert choice.text == PROMPT + engine.tokenizer.decode(generated)
    for text, start in zip(told.tokens, told.text_offset):
        assert "\ufffd" in text or choice.text[start:start + len(text)] == text or (text, start) == (
            "<|im_end|>", len(choice.text))
    assert (engine.requests[-1].prompt_logprobs, engine.requests[-1].max_tokens) == (1, max_tokens or 1)


def test_likeliest_tokens_that_look_alike(scripted, monkeypatch):
    """Two parts of characters have one text: the likelier one counts."""
    engine, client = scripted
    alike = [token for token, piece in enumerate(engine.tokenizer.pieces)
             if piece.decode("utf-8", "replace") == "\ufffd"][:2]
    pushed = qengine.Generation.push
    monkeypatch.setattr(qengine.Generation, "push", lambda generation, token, reason, *_: pushed(
        generation, token, reason, -0.5, ((alike[0], -0.5), (alike[1], -3.0))))
    told = client.completions.create(model="m", prompt="a", logprobs=2).choices[0].logprobs
    assert told.top_logprobs[0] == {"\ufffd": -0.5}


@pytest.mark.parametrize("prompt, want", [
    ("ab", ["ab"]), ([5, 6], [[5, 6]]), (["ab", "c"], ["ab", "c"]), ([[5], [6, 7]], [[5], [6, 7]]),
    (["ab", [5, 6], "c"], ["ab", [5, 6], "c"]), ([5, "ab", 6], [[5, "ab", 6]]),
    ([[5, "ab", 6, 7], "c", ["d"]], [[5, "ab", 6, 7], "c", "d"])], ids=str)
def test_prompts_of_strings_and_ids(scripted, prompt, want):
    """A list that holds a token id is one prompt."""
    engine, client = scripted
    ids = [[token for part in ([one] if isinstance(one, str) else one)
            for token in (engine.encode(part) if isinstance(part, str) else [part])] for one in want]
    del engine.requests[:]
    answer = client.completions.create(model="m", prompt=prompt, echo=True, max_tokens=0)
    assert [request.prompt_ids for request in engine.requests] == ids
    assert [choice.text for choice in answer.choices] == [engine.tokenizer.decode(one, special=True) for one in ids]


@pytest.mark.parametrize("arguments, field, said", [
    ({"max_tokens": 0}, "max_tokens", "only together with 'echo'"), ({"best_of": 3}, "best_of", "must equal 'n'"),
    ({"suffix": "end"}, "suffix", "suffix"), ({"logprobs": 21}, "logprobs", "20"), ({"echo": "yes"}, "echo", "true or"),
    ({"prompt": [5] * 4000, "echo": True, "logprobs": 20, "n": 8}, "logprobs", "672000 log-probabilities"),
    ({"prompt": [[5, True]]}, "prompt[0][1]", "whole number"), ({"prompt": [[]]}, "prompt[0]", "at least 1"),
    ({"prompt": [5, [6]]}, "prompt", "list of such"), ({"prompt": [9999], "echo": True}, "prompt", "9999")])
def test_what_completions_refuse(scripted, arguments, field, said):
    _, client = scripted
    with pytest.raises(openai.BadRequestError, match=said) as caught:
        client.completions.create(**{"model": "m", "prompt": "a"} | arguments)
    assert caught.value.param == field


def test_what_asks_for_nothing_is_taken(scripted):
    _, client = scripted
    answer = client.completions.create(model="m", prompt="a", n=2, best_of=2, suffix="", logprobs=20, echo=False)
    assert len(answer.choices) == 2


def test_scores_of_a_model(engine):
    """As lm-eval's local-completions asks for them: what a continuation gets is what the logits say."""
    ids, n_context = ids_of(4, 150), 140
    logits = engine.evaluate(ids)
    with scripted_clients(engine, openai.OpenAI, openai.AsyncOpenAI) as (client, _):
        answer = client.completions.create(model="m", prompt=[ids, ids[:100]], temperature=0, max_tokens=1, logprobs=1,
                                           seed=1234, echo=True)
    told = answer.choices[0].logprobs
    assert [len(choice.logprobs.tokens) for choice in answer.choices] == [151, 101]
    want = [logprobs_reference(logits[at - 1], ids[at]) for at in range(n_context, 150)]
    np.testing.assert_allclose(told.token_logprobs[n_context:-1], [own for own, *_ in want], atol=1e-5)
    np.testing.assert_allclose([max(top.values()) for top in told.top_logprobs[n_context:-1]],
                               [likeliest[0] for _, likeliest, _ in want], atol=1e-5)


# ---- the tokenizer, as lm-eval asks for it -----------------------------------------------------------------


def test_the_tokenizer_as_vllm_has_it():
    engine = ScriptedEngine()
    web, tokenizer = app_of(engine).test_client(), engine.tokenizer
    info = web.get("/tokenizer_info").json
    assert (info["bos_token"], info["model_max_length"]) == (None, engine.n_ctx)
    assert info["chat_template"] == engine.template.source
    ids = tokenizer.encode(PROMPT)
    told = web.post("/tokenize", json={"prompt": PROMPT, "add_special_tokens": False, "return_token_strs": True}).json
    assert told == {"tokens": ids, "count": len(ids), "max_model_len": engine.n_ctx,
                    "token_strs": [tokenizer.pieces[token].decode("utf-8", "replace") for token in ids]}
    end, = web.post("/tokenize", json={"prompt": info["eos_token"]}).json["tokens"]
    assert end in tokenizer.eos_ids
    assert web.post("/detokenize", json={"tokens": ids, "model": "m"}).json["prompt"] == PROMPT
    conversation = {"messages": [{"role": "user", "content": "Hi"}]}
    prompt = web.post("/apply-template", json=conversation).json["prompt"]
    assert web.post("/tokenize", json=conversation).json["tokens"] == tokenizer.encode(prompt)
    for body, field in (({}, "content"), ({"content": "a", "prompt": "b"}, "prompt"), ({"messages": []}, "messages"),
                        ({"prompt": "a" * (MAX_BYTES + 1)}, "prompt")):
        answer = web.post("/tokenize", json=body)
        assert (answer.status_code, answer.json["error"]["param"]) == (400, field)
