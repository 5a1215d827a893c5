"""The HTTP server: the official client against it, streaming and not, and what a request can get wrong."""

import contextlib
import http.client
import json
import random
import socket
import threading
import time

import openai
import pytest

import qengine
from api import chat as chat_api
from api import completions
from api import connection as connection_api
from api import fields
from api import http as http_api
from api import openai as openai_api
from api.errors import MAX_BODY
from api.service import Service
from engine.request import Delta, EngineStopped, Fault, RequestError, StopScanner
from engine.served import Models, Served
from tests.clients import CHAT, HI, TEXT, app_of, assert_error, official_client, send, serving
from tests.scripted import Unreal
from tests.tiny import CONTEXT, tiny_engine
from tests.until import PATIENCE, wait_until

PROMPT = "The quick brown fox"
MESSAGES = [{"role": "user", "content": PROMPT}]
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}
VARIED = {"temperature": 1, "seed": 7}      # greedy answers of random weights tend to repeat themselves


@pytest.fixture(scope="session")
def engine():
    return tiny_engine()


@pytest.fixture(scope="session")
def port(engine):
    with serving(app_of(engine, thinking=False)) as (port, _):
        yield port


@pytest.fixture(scope="session")
def client(port):
    with official_client(port) as client:
        yield client


def complete(client, prompt=PROMPT, max_tokens=24, **arguments):
    return client.completions.create(model="m", prompt=prompt, max_tokens=max_tokens, **(GREEDY | arguments))


# ---- the official client -----------------------------------------------------------------------------------


def test_chat(client, engine):
    answer = client.chat.completions.create(model="any name", messages=MESSAGES, max_tokens=8, **GREEDY)
    [choice] = answer.choices
    assert choice.message.role == "assistant" and isinstance(choice.message.content, str)
    assert choice.finish_reason == "length" and choice.index == 0
    prompt = engine.tokenizer.encode(engine.template.render(MESSAGES, enable_thinking=False))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 8)
    assert answer.usage.total_tokens == len(prompt) + 8
    assert answer.object == "chat.completion" and answer.model == engine.name
    assert abs(answer.created - time.time()) < 60


def test_chat_streams_the_same_text(client):
    arguments = {"model": "m", "messages": MESSAGES, "max_tokens": 24, **GREEDY}
    whole = client.chat.completions.create(**arguments)
    chunks = list(client.chat.completions.create(stream=True, **arguments))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({c.id for c in chunks}) == 1 and chunks[0].id != whole.id
    assert all(c.usage is None for c in chunks)


def test_chat_stream_helper(client):
    arguments = {"model": "m", "messages": MESSAGES, "max_tokens": 64} | GREEDY | VARIED
    text = client.chat.completions.create(**arguments).choices[0].message.content
    stop = text[8:12]       # the helper takes the end by length for an error
    arguments |= {"stop": stop, "stream_options": {"include_usage": True}}
    with client.chat.completions.stream(**arguments) as stream:
        seen = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert final.choices[0].message.content == seen == text[:text.find(stop)]
    assert final.choices[0].finish_reason == "stop" and 0 < final.usage.completion_tokens < 64


def test_text_parts_and_the_developer_role(client):
    def chat(*messages):
        answer = client.chat.completions.create(model="m", messages=messages, max_tokens=8, **GREEDY)
        return answer.choices[0].message.content, answer.usage.prompt_tokens

    parts = {"role": "user", "content": [{"type": "text", "text": PROMPT}]}
    assert chat(parts) == chat(*MESSAGES)
    system, developer = ({"role": role, "content": "Be brief."} for role in ("system", "developer"))
    assert chat(developer, *MESSAGES) == chat(system, *MESSAGES)


@pytest.mark.parametrize("thinking", [True, False, None])
def test_thinking_is_the_templates_own_switch(client, engine, thinking):
    switches = {"chat_template_kwargs": {"enable_thinking": thinking}}
    answer = client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=1, extra_body=switches)
    prompt = engine.template.render(MESSAGES, enable_thinking=bool(thinking))      # null: as the server was told
    assert answer.usage.prompt_tokens == len(engine.tokenizer.encode(prompt))


def test_completion_prompts(client, engine):
    ids = engine.tokenizer.encode(PROMPT)
    texts = [complete(client, prompt).choices[0].text for prompt in (PROMPT, [PROMPT], ids, [ids])]
    assert texts[0] and texts == texts[:1] * 4


def test_defaults_are_those_of_openai(client):
    extra = {"ignore_eos": True}
    one, two = (client.completions.create(model="m", prompt=PROMPT, extra_body=extra) for _ in range(2))
    assert one.usage.completion_tokens == two.usage.completion_tokens == 16
    assert one.choices[0].text != two.choices[0].text       # temperature 1, a new seed each


def test_token_ids(client):
    extra = {"extra_body": {"ignore_eos": True, "return_token_ids": True}}
    whole = complete(client, **extra).choices[0].model_extra["token_ids"]
    chunks = list(complete(client, stream=True, **extra))
    assert len(whole) == 24
    assert [token for chunk in chunks for token in chunk.choices[0].model_extra["token_ids"]] == whole
    assert "token_ids" not in complete(client).choices[0].model_extra


def test_usage_of_a_stream(client):
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_seed_repeats(client):
    def text(seed):
        return complete(client, temperature=1, seed=seed).choices[0].text

    assert text(1) == text(1) != text(2)


def test_neutral_and_ignored_fields(client):
    plain = client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=8, **GREEDY)
    decorated = client.chat.completions.create(
        model="m", messages=MESSAGES, max_completion_tokens=8, n=1, logit_bias={}, logprobs=False, user="someone",
        metadata={"a": "b"}, tools=[], tool_choice="none", response_format={"type": "text"}, stop=None, **GREEDY)
    assert decorated.choices[0].message.content == plain.choices[0].message.content


def test_many_requests_at_once(client):
    """More requests than slots: each answer is the one it would have been alone."""
    prompts = [f"{PROMPT} {i}" for i in range(5)]
    alone = [complete(client, prompt).choices[0].text for prompt in prompts]
    together = [None] * len(prompts)

    def ask(i):
        together[i] = complete(client, prompts[i]).choices[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_models(client, engine):
    assert [model.id for model in client.models.list()] == [engine.name]


# ---- stop strings ------------------------------------------------------------------------------------------


def test_stop(client):
    text = complete(client, max_tokens=64, **VARIED).choices[0].text
    stop = text[7:12]           # some letters, so that token boundaries lie in it
    assert len(stop) == 5
    for stops in (stop, [stop], ["never, never", stop]):
        answer = complete(client, max_tokens=64, stop=stops, **VARIED)
        assert answer.choices[0].text == text[:text.find(stop)]
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens < 64
        chunks = list(complete(client, max_tokens=64, stop=stops, stream=True, **VARIED))
        assert "".join(chunk.choices[0].text for chunk in chunks) == text[:text.find(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_text_held_back_for_a_stop_comes_at_the_end(client):
    text = complete(client, **VARIED).choices[0].text
    stop = text[-3:] + "never"
    assert complete(client, stop=stop, **VARIED).choices[0].text == text
    chunks = complete(client, stop=stop, stream=True, **VARIED)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text


def test_stop_scanner_shows_what_is_certain_and_nothing_more():
    rng = random.Random(1)
    for _ in range(3000):
        text = "".join(rng.choices("ab", k=rng.randrange(12)))
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 5))) for _ in range(rng.randrange(4))]
        scanner, shown, at = StopScanner(stops), "", 0
        while at < len(text) and not scanner.stopped:
            size = rng.randrange(1, 4)
            shown += scanner.push(text[at:at + size])
            at += size
            if not scanner.stopped:     # what is held back begins a stop string, and nothing longer does
                held = text[:at][len(shown):]
                assert text[:at] == shown + held
                assert all(not s.startswith(text[:at][i:]) for s in stops for i in range(len(shown)))
                assert not held or any(s.startswith(held) for s in stops)
        ends = sorted((text.find(s) + len(s), text.find(s)) for s in stops if s in text)
        assert scanner.stopped == bool(ends)
        assert shown + scanner.flush() == (text[:ends[0][1]] if ends else text)     # however it was cut


# ---- requests that are refused -----------------------------------------------------------------------------

BAD = [     # endpoint, body, the field to be named
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": ["hi"]}, "messages"),
    (TEXT, {"prompt": 1000 * ["hi"]}, "prompt"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages"),
    (CHAT, {"messages": [{"role": "robot", "content": "hi"}]}, "messages"),
    (CHAT, {"messages": [{"role": ["user"], "content": "hi"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": ["hi"]}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    (CHAT, {"messages": [HI], "chat_template_kwargs": {"enable_thinking": "yes"}},
     "chat_template_kwargs.enable_thinking"),
    (CHAT, {"messages": [HI], "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    (CHAT, {"messages": [HI], "chat_template_kwargs": True}, "chat_template_kwargs"),
    (CHAT, {"messages": [HI], "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    (CHAT, {"messages": [HI], "logit_bias": {"5": 101}}, "logit_bias.5"),
    (CHAT, {"messages": [HI], "logit_bias": {"five": 1}}, "logit_bias"),
    (CHAT, {"messages": [HI], "logit_bias": {"5": True}}, "logit_bias.5"),
    (CHAT, {"messages": [HI], "presence_penalty": 2.5}, "presence_penalty"),
    (CHAT, {"messages": [HI], "prompt": "hi"}, "prompt"),
    (CHAT, {"messages": [HI], "temprature": 1}, "temprature"),
    (CHAT, {"messages": [HI], "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": [{"role": "user", "content": "long " * CONTEXT}]}, None),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": 5}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": [1, [2]]}, "prompt"),
    (TEXT, {"prompt": [["a", True]]}, "prompt"),
    (TEXT, {"prompt": [1, True]}, "prompt"),
    (TEXT, {"prompt": [1, -1]}, "prompt"),
    (TEXT, {"prompt": [1, 2**40]}, "prompt"),
    (TEXT, {"prompt": "\udc00"}, "prompt"),
    (TEXT, {"prompt": "long " * CONTEXT}, "prompt"),
    (TEXT, {"prompt": [1] * (CONTEXT + 1)}, "prompt"),
    (TEXT, {"prompt": "hi", "model": 5}, "model"),
    (TEXT, {"prompt": "hi", "suffix": "end"}, "suffix"),
    (TEXT, {"prompt": "hi", "echo": 1}, "echo"),
    (TEXT, {"prompt": "hi", "max_tokens": 0}, "max_tokens"),
    (TEXT, {"prompt": "hi", "best_of": 3}, "best_of"),
    (TEXT, {"prompt": "hi", "best_of": True}, "best_of"),
    (TEXT, {"prompt": "hi", "presence_penalty": False}, "presence_penalty"),
    (TEXT, {"prompt": "hi", "max_tokens": -2}, "max_tokens"),
    (TEXT, {"prompt": "hi", "max_tokens": 1.5}, "max_tokens"),
    (TEXT, {"prompt": "hi", "max_tokens": True}, "max_tokens"),
    (TEXT, {"prompt": "hi", "max_tokens": "5"}, "max_tokens"),
    (TEXT, {"prompt": "hi", "temperature": -0.1}, "temperature"),
    (TEXT, {"prompt": "hi", "temperature": "hot"}, "temperature"),
    (TEXT, {"prompt": "hi", "temperature": 10**400}, "temperature"),
    (TEXT, {"prompt": "hi", "top_p": 1.5}, "top_p"),
    (TEXT, {"prompt": "hi", "min_p": -1}, "min_p"),
    (TEXT, {"prompt": "hi", "top_k": -5}, "top_k"),
    (TEXT, {"prompt": "hi", "seed": "x"}, "seed"),
    (TEXT, {"prompt": "hi", "stop": 5}, "stop"),
    (TEXT, {"prompt": "hi", "stop": ""}, "stop"),
    (TEXT, {"prompt": "hi", "stop": [5]}, "stop"),
    (TEXT, {"prompt": "hi", "stop": ["s"] * 17}, "stop"),
    (TEXT, {"prompt": "hi", "stop": "\ud800"}, "stop"),
    (TEXT, {"prompt": "hi", "stream": "yes"}, "stream"),
    (TEXT, {"prompt": "hi", "stream_options": True}, "stream_options"),
    (TEXT, {"prompt": "hi", "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (TEXT, {"prompt": "hi", "ignore_eos": 1}, "ignore_eos"),
    (TEXT, {"prompt": "hi", "return_token_ids": 1}, "return_token_ids"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path, body, param", BAD, ids=[f"{i}-{bad[2]}" for i, bad in enumerate(BAD)])
def test_bad_fields_are_named(port, path, body, param, stream):
    answer = send(port, "POST", path, {"stream": stream} | body)
    assert_error(answer, 400, param)
    assert answer[2]["error"]["type"] in ("invalid_request_error", "exceed_context_size_error")


@pytest.mark.parametrize("path, body, said", [
    (CHAT, {"messages": []}, "'messages' must be a list of at least 1 item"),
    (TEXT, {"prompt": "hi", "stop": ["s"] * 17}, "'stop' must be a non-empty string of at most 1024 letters or "
                                                 "a list of 0 to 16 items")])
def test_lengths_of_lists_are_counted_in_items(port, path, body, said):
    assert send(port, "POST", path, body)[2]["error"]["message"] == said


@pytest.mark.parametrize("body, named", [
    ({"prompt": [[5]] * 100_000}, "prompt"), ({"prompt": [5] * 100_000 + [True]}, "prompt[100000]"),
    ({"prompt": [5, 6, []] * 2_000}, "prompt[2]"), ({"prompt": [5] * 1_000_000}, None)])
def test_long_lists_are_not_looked_at_one_by_one(body, named, monkeypatch):
    check, looked_at = fields.check, []
    monkeypatch.setattr(fields, "check", lambda value, *rest: [looked_at.append(value), check(value, *rest)])
    with pytest.raises(RequestError) if named else contextlib.nullcontext() as caught:
        fields.check(body, completions.COMPLETION)
    assert len(looked_at) <= 3 and (not named or caught.value.field == named)


@pytest.mark.parametrize("data", [
    b'{"prompt": "hi", "messages": ' + b"[" * 200 + b"]" * 200 + b"}", b"", b"{", b"[]", b'"text"', b"null", b"5",
    b"\xff\xfe", b"prompt=hi", b"[" * 100_000, b'{"a":' * 100_000,
    b'{"prompt": "hi", "temperature": NaN}', b'{"prompt": "hi", "temperature": Infinity}',
    b'{"prompt": "hi", "temperature": 1e999}', b'{"prompt": "hi", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "hi", "\\ud800": 1}', b'{"prompt": "\xff"}',
], ids=lambda data: repr(data[:24]))
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_bodies_that_are_no_request(port, path, data):
    assert_error(send(port, "POST", path, data), 400)


def test_no_body_is_an_internal_error(engine):
    """Valid requests with values put in at random: an answer or a named mistake, never a 500."""
    rng = random.Random(2)
    said = {"role": "assistant", "content": None}
    values = [None, True, False, 0, 1, -1, 2**70, 0.5, 1e300, "", "a", "\udc80", "\0", [], [[]], [1], [None],
              {}, {"a": 1}, {"include_usage": True}, [{}], [{"role": "user"}], [HI, HI], [HI | {"name": 5}],
              [HI, said | {"tool_calls": [1]}], [HI, said | {"tool_calls": {"a": 1}}],
              [HI | {"role": "tool"}], [HI | {"role": "system"}], [HI, HI | {"role": "assistant", "name": 5}]]
    fields = sorted(openai_api.CHAT["properties"].keys() | completions.COMPLETION["properties"].keys())
    web = app_of(engine).test_client()
    seen = set()
    for _ in range(500):
        path, body = rng.choice([(CHAT, {"messages": [HI]}), (TEXT, {"prompt": "hi"})])
        body |= {field: rng.choice(values) for field in rng.sample(fields, rng.choice([1, 1, 2]))}
        body["max_tokens"] = 1
        answer = web.post(path, data=json.dumps(body))
        assert answer.status_code in (200, 400), body
        assert b"internal error" not in answer.data, body
        seen.add(answer.status_code)
    assert seen == {200, 400}


def test_the_client_raises_its_own_errors(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=[])
    assert caught.value.param == "messages"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="m", input="x")


def test_unknown_paths_and_methods(port):
    assert_error(send(port, "GET", "/v2/nothing"), 404)
    assert_error(send(port, "GET", CHAT), 405)
    assert_error(send(port, "DELETE", "/v1/models"), 405)
    assert send(port, "GET", TEXT)[1]["Allow"]
    assert len(send(port, "GET", "/" + "a" * 100_000)[2]["error"]["message"]) < 300


@pytest.mark.parametrize("path, body, said", [
    (CHAT, {"prompt": "hi"}, "'prompt' is not supported: /v1/completions takes it"),
    (TEXT, {"messages": [HI]}, "'messages' is not supported: /v1/chat/completions takes them")])
def test_the_field_of_another_path_is_known(port, path, body, said):
    assert send(port, "POST", path, body)[2]["error"]["message"] == said


@pytest.mark.parametrize("asked, meant", [
    ("POST /chat/completions", "POST /v1/chat/completions"), ("POST /v1/v1/messages", "POST /v1/messages"),
    ("POST /v1/chat/completion", "POST /v1/chat/completions"), ("POST /completion", "POST /v1/completions"),
    ("GET /v1/completions", "POST /v1/completions"),
    ("POST /v1/chat/completions/", "POST /v1/chat/completions"), ("POST /v1/health", "GET /health"),
    ("GET /pipes", None), ("GET /v1/files", None), ("POST /" + "v1/chat/completions" * 1000, None)])
def test_what_was_meant_by_a_path(port, monkeypatch, asked, meant):
    """The first of these is the commonest slip: a base address without /v1. Another card would serve /pipes."""
    monkeypatch.setattr(qengine.Engine, "counts_pipes", False)
    method, path = asked.split()
    answer = send(port, method, path)
    assert_error(answer, 405 if meant and meant.endswith(f" {path}") else 404)
    end = f": did you mean {meant}?" if meant else "; /openapi.json says what is"
    assert answer[2]["error"]["message"] == f"{method} {path[:80]} is not served{end}"


def test_a_body_too_large(port):
    body = b'{"prompt": "' + b"a" * MAX_BODY + b'"}'
    answer = send(port, "POST", TEXT, body)
    assert_error(answer, 413)
    assert f"larger than {MAX_BODY} bytes" in answer[2]["error"]["message"]


@pytest.mark.parametrize("head, status", [
    (b"nonsense", 400),
    (b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5", 400),
    (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfive", 400),
    (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: gzip", 501),
    (b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d" % (64 << 20), 413),
    (b"GET / HTTP/1.1\r\nX: " + b"x" * (300 << 10), 431),
], ids=["nonsense", "length", "chunk", "coding", "body", "header"])
def test_what_is_no_http_request(port, head, status):
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        connection.sendall(head + b"\r\n\r\n")
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert_error((answer.status, answer.headers, json.loads(answer.read())), status)


@pytest.mark.parametrize("path, body", [
    (TEXT, {"prompt": "a" * 1_000_000}), (CHAT, {"messages": [{"role": "user", "content": "a" * 1_000_000}]})])
def test_a_prompt_far_too_long_is_not_tokenized(engine, monkeypatch, path, body):
    monkeypatch.setattr(engine.tokenizer, "_encode_plain", lambda texts: pytest.fail("was tokenized"))
    answer = app_of(engine).test_client().post(path, json=body)
    assert answer.status_code == 400 and str(CONTEXT) in answer.json["error"]["message"]


def test_a_port_that_is_taken_leaves_no_threads(engine, port):
    before = set(threading.enumerate())
    with pytest.raises(OSError), serving_on(engine, port):
        pass
    wait_until(lambda: set(threading.enumerate()) <= before)


def serving_on(engine, port):
    return http_api.serving(app_of(engine), "127.0.0.1", port)


# ---- health, load, disconnects, failures -------------------------------------------------------------------


def test_health(port, engine):
    status, _, body = send(port, "GET", "/health")
    assert (status, body["status"]) == (200, "ok")
    card, = engine.cards
    assert body["cards"] == [{"name": card.describe(), "layers": [0, engine.config.n_layers - 1]}]


def test_everything_is_503_until_the_model_is_there(engine):
    app = app_of()
    web = app.test_client()
    assert web.get("/health").status_code == 503 and web.get("/health").json == {"status": "loading"}
    for answer in (web.get("/v1/models"), web.post(TEXT, json={"prompt": "hi"}), web.post(CHAT, json={})):
        assert answer.status_code == 503 and "loading" in answer.json["error"]["message"]
        assert answer.headers["Retry-After"]
    app.extensions["qengine"].models = Models([Served(engine)])
    assert web.get("/health").status_code == 200
    assert web.post(TEXT, json={"prompt": "hi", "max_tokens": 1}).status_code == 200


def test_defaults_of_the_command_line_hold_where_a_request_is_silent(engine):
    app = app_of(engine, sampling={"max_tokens": 3, "temperature": 0.0}, thinking=False)
    web = app.test_client()

    def n_tokens(path, **body):
        usage = web.post(path, json=body | {"ignore_eos": True}).json["usage"]
        return usage["prompt_tokens"], usage["completion_tokens"]

    assert n_tokens(TEXT, prompt="hi")[1] == 3
    assert n_tokens(TEXT, prompt="hi", max_tokens=5)[1] == 5
    prompt = engine.template.render([HI], enable_thinking=False)
    assert n_tokens(CHAT, messages=[HI]) == (len(engine.tokenizer.encode(prompt)), 3)


def test_what_is_being_prepared_is_open(engine, monkeypatch):
    """A grammar may take seconds: others are told that all places are taken, and closing waits for it."""
    preparing, go_on, prepare = threading.Event(), threading.Event(), chat_api.prepare
    monkeypatch.setattr(chat_api, "prepare", lambda *arguments: (preparing.set(), go_on.wait(), prepare(*arguments))[2])
    with serving(app_of(engine, max_requests=2)) as (port, service):
        answers = []
        thread = threading.Thread(target=lambda: answers.append(send(port, "POST", CHAT, {"messages": [HI], "n": 2})))
        thread.start()
        preparing.wait()
        assert_error(send(port, "POST", TEXT, {"prompt": "hi"}), 429)
        assert not service.close(timeout=0.1)
        go_on.set()
        thread.join()
        assert service.close() and answers[0][0] == 503


@pytest.mark.parametrize("path, body", [
    ("/tokenize", {"content": "hi"}), ("/detokenize", {"tokens": [1]}), ("/apply-template", {"messages": [HI]}),
    ("/v1/messages/count_tokens", {"messages": [HI]}), (TEXT, {"prompt": "hi", "max_tokens": 1}), (TEXT, {})])
def test_every_body_has_a_place_while_it_is_looked_at(engine, path, body):
    with serving(app_of(engine, max_requests=1)) as (port, service):
        with service.places(1):
            assert send(port, "POST", path, body)[0] == 429
        assert send(port, "POST", path, body)[0] == (200 if body else 400)
        assert service.n_entering == 0 and not service.open


LONG = {"prompt": PROMPT, "max_tokens": CONTEXT - 100, "ignore_eos": True}


def test_too_many_requests(engine):
    with serving(app_of(engine, max_requests=1)) as (port, service):
        with engine.scheduler.borrow_slot(1):       # nothing starts, and so nothing ends
            connection = start(port, LONG | {"stream": True})
            wait_until(lambda: service.open)
            answer = send(port, "POST", TEXT, {"prompt": "hi"})
            assert_error(answer, 429)
            assert answer[1]["Retry-After"] and answer[2]["error"]["type"] == "rate_limit_error"
            assert send(port, "GET", "/health")[0] == 200
        connection.close()
        wait_until(lambda: not service.open)
        assert send(port, "POST", TEXT, {"prompt": "hi", "max_tokens": 1})[0] == 200


def start(port, body):
    """Sends a completion request and returns its connection, the answer unread."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("POST", TEXT, json.dumps(body))
    return connection


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_hangs_up_cancels_its_generation(engine, monkeypatch, stream):
    submitted = []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda request: submitted.append(submit(request)) or submitted[-1])
    with serving(app_of(engine)) as (port, service):
        for i in range(2):      # the second one finds a watcher that had nothing to watch
            connection = start(port, LONG | {"stream": stream})
            wait_until(lambda: len(submitted) > i and submitted[i].n_generated > 0)
            connection.close()
            submitted[i].wait()
            assert submitted[i].n_generated < LONG["max_tokens"]
            wait_until(lambda: not service.open)


class Broken(Unreal):
    """A generation whose card fails after the first token."""

    def __init__(self):
        super().__init__()
        self.said = [Delta(1, "a", None), EngineStopped("the card fell off the bus")]

    def take(self):
        return self.said.pop(0)


def test_a_card_that_fails(engine, client, port, monkeypatch):
    monkeypatch.setattr(engine, "submit", lambda request: Broken())
    answer = send(port, "POST", TEXT, {"prompt": "hi"})
    assert_error(answer, 503)
    assert "fell off the bus" in answer[2]["error"]["message"]
    with pytest.raises(openai.APIError, match="fell off the bus"):
        list(complete(client, stream=True))


OF_MODEL = "model", "kind", "state", "cards", "counts_pipes", "counts_experts"      # that /health always tells


def test_after_a_failure_everything_is_503_and_says_why(engine, port, monkeypatch):
    monkeypatch.setattr(engine.scheduler, "fault", Fault(None, "a mistake", 86400.5))
    monkeypatch.setattr(engine.scheduler, "reason", "the card fell off the bus")
    status, _, body = send(port, "GET", "/health")
    failure = {"status": "error", "error": "the card fell off the bus", "since": "1970-01-02T00:00:00+00:00"}
    assert status == 503 and body == failure | {name: body[name] for name in OF_MODEL}
    for answer in (send(port, "GET", "/v1/models"), send(port, "POST", TEXT, {"prompt": "hi"}),
                   send(port, "POST", CHAT, {"messages": [HI]})):
        assert_error(answer, 503)
        assert answer[2]["error"]["message"] == "the card fell off the bus"


def test_health_says_which_card_failed_and_since_when(engine, port, monkeypatch):
    monkeypatch.setattr(engine.scheduler, "reason", "the engine has stopped: cuda:1 fell off the bus")
    monkeypatch.setattr(engine.scheduler, "fault", Fault("cuda:1", "cuda:1 fell off the bus", 86400.5))
    status, _, body = send(port, "GET", "/health")
    failure = {"status": "error", "error": "the engine has stopped: cuda:1 fell off the bus", "card": "cuda:1",
               "since": "1970-01-02T00:00:00+00:00"}
    assert status == 503 and body == failure | {name: body[name] for name in OF_MODEL}


def test_an_error_of_our_own_shows_no_internals(engine, port, monkeypatch):
    monkeypatch.setattr(engine, "submit", lambda request: 1 / 0)
    answer = send(port, "POST", TEXT, {"prompt": "hi"})
    assert_error(answer, 500)
    assert "division" not in answer[2]["error"]["message"]


def test_a_panic_of_a_library_is_an_error_like_others(engine, port, monkeypatch):
    """pyo3's PanicException is no Exception."""
    class Panic(BaseException):
        pass

    submitted, submit = [], engine.submit

    def panic(request):
        if submitted:
            raise Panic("called `Option::unwrap()` on a `None` value")
        submitted.append(submit(request))
        return submitted[0]

    monkeypatch.setattr(engine, "submit", panic)
    answer = send(port, "POST", TEXT, LONG | {"n": 2})
    assert_error(answer, 500)
    assert "unwrap" not in answer[2]["error"]["message"]
    assert submitted[0].cancelled


def test_closing_tells_the_clients(engine):
    with serving(app_of(engine)) as (port, service), official_client(port) as client:
        stream = iter(complete(client, max_tokens=CONTEXT - 100, stream=True))
        next(stream)
        service.close()
        assert not service.open
        with pytest.raises(openai.APIError, match="cancelled"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
            complete(client)
        assert caught.value.response.headers["Retry-After"] == "5"


class Endless(Unreal):
    """A generation of more text than connections hold."""
    n_generated, cancelled = 0, False

    def take(self):
        self.n_generated += 1
        return None if self.cancelled else Delta(1, "a" * 10_000, None)

    def cancel(self):
        self.cancelled = True


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_does_not_read_loses_its_place(engine, monkeypatch, stream):
    monkeypatch.setattr(connection_api, "READ_SECONDS", 1)
    generation = Endless() if stream else Unhurried((2, Delta(1, "a" * (20 << 20), "stop")))
    monkeypatch.setattr(engine, "submit", lambda request: generation)
    with serving(app_of(engine)) as (port, service):
        client = start(port, LONG | {"stream": stream})
        wait_until(lambda: service.log.running)
        wait_until(lambda: not (service.log.running or service.open))
        assert generation.cancelled
        client.close()


class Unhurried(Unreal):
    """A generation that takes so many seconds for each thing it says."""

    n_generated, cancelled = 0, False

    def __init__(self, *said):
        super().__init__()
        self.said = list(said)

    def take(self):
        if not self.said:
            return None
        seconds, delta = self.said.pop(0)
        time.sleep(seconds)
        self.n_generated += 1
        return delta

    def cancel(self):
        self.cancelled = True


def test_a_client_that_reads_slowly_keeps_its_place(engine, monkeypatch):
    """Also while there is nothing to read."""
    monkeypatch.setattr(connection_api, "READ_SECONDS", 3)
    generation = Unhurried((4, Delta(1, "a" * (8 << 20))), (4, Delta(1, "b", "stop")))
    monkeypatch.setattr(engine, "submit", lambda request: generation)
    with serving(app_of(engine)) as (port, _):
        answer, n = start(port, LONG | {"stream": True}).getresponse(), 0
        while piece := answer.read(2 << 20):
            n += len(piece)
            time.sleep(0.4)
        assert n > 8 << 20 and piece == b""


def test_closing_does_not_wait_for_clients_that_do_not_read(engine, monkeypatch):
    generation, before = Endless(), set(threading.enumerate())
    monkeypatch.setattr(engine, "submit", lambda request: generation)
    monkeypatch.setattr(Service.close, "__defaults__", (0.5,))      # seconds; so long it does wait
    with serving(app_of(engine)) as (port, service):
        unread, idle = start(port, LONG | {"stream": True}), http.client.HTTPConnection("127.0.0.1", port)
        idle.connect()
        wait_until(lambda: generation.n_generated)
        seen = 0
        while seen != generation.n_generated:       # until the connection is full
            seen = generation.n_generated
            time.sleep(0.3)
    assert not service.open
    wait_until(lambda: set(threading.enumerate()) <= before)
    unread.close()
    idle.close()
