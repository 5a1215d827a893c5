"""Embeddings over HTTP: OpenAI's and Ollama's, with the official clients; and a server with models of several kinds."""

import base64
import http.client
import json
import logging
import threading

import numpy as np
import ollama
import openai
import pytest

from api.embeddings import read_texts
from api.service import create_app
from engine.pooling import MOST_TEXTS
from engine.request import EngineStopped, Fault, RequestError
from engine.tokenizer import ByteTokenizer
from tests.clients import CHAT, HI, TEXT, app_of, assert_error, official_client, send, serving
from tests.oracle import server_cosine, server_said
from tests.scripted import ScriptedEngine, ScriptedPooling
from tests.until import PATIENCE, wait_until

PATH, OLLAMA = "/v1/embeddings", "/api/embed"
SECRET = "the launch code is 0000"


def named(name, engine):
    engine.name = name
    return engine


@pytest.fixture
def engine():
    return named("e", ScriptedPooling())


@pytest.fixture
def web(engine):
    return app_of(named("chat", ScriptedEngine("Hello.")), [engine]).test_client()


def rows_of(answer):
    return np.array([one["embedding"] for one in answer.json["data"]], np.float32)


# ---- OpenAI's client -----------------------------------------------------------------------------------------------


def test_the_official_client(engine):
    with serving(app_of(engine)) as (port, _), official_client(port) as client:
        answer = client.embeddings.create(model="text-embedding-3-small", input=["One text.", "Another."])
        assert [one.index for one in answer.data] == [0, 1] and answer.model == "e"
        np.testing.assert_array_equal(np.array([one.embedding for one in answer.data], np.float32),
                                      engine.embed(["One text.", "Another."]))
        n = sum(len(engine.tokenizer.encode(text)) for text in ("One text.", "Another."))
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (n, n)
        assert client.embeddings.create(model="e", input="One text.", dimensions=3).data[0].embedding == \
            pytest.approx(engine.embed(["One text."], 3)[0].tolist(), abs=1e-9)
        with pytest.raises(openai.BadRequestError, match="1 to 8") as caught:
            client.embeddings.create(model="e", input="a", dimensions=9)
        assert caught.value.param == "dimensions"


@pytest.mark.parametrize("given, texts", [
    ("One text.", ["One text."]), (["One text."], ["One text."]), ([5, 6, 7], [[5, 6, 7]]),
    ([[5, 6], [7]], [[5, 6], [7]]), (["a", [5]], ["a", [5]])], ids=str)
def test_what_an_input_may_be(web, engine, given, texts):
    """Both encodings give the same bits, and those are the engine's."""
    want, said = engine.embed(texts), web.post(PATH, json={"input": given})
    np.testing.assert_array_equal(rows_of(said), want)
    coded = web.post(PATH, json={"input": given, "encoding_format": "base64"})
    rows = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in coded.json["data"]]
    np.testing.assert_array_equal(np.array(rows), want)
    assert said.json["usage"] == coded.json["usage"] == dict.fromkeys(
        ["prompt_tokens", "total_tokens"], engine.jobs[-1].n_prompt)
    assert said.headers["Content-Type"] == "application/json" and said.json["object"] == "list"


@pytest.mark.parametrize("value", [0.1, -0.0, 1e-30, 3.4e38, 1 / 3, 1.17e-38, -123456.7])
def test_numbers_keep_their_bits(engine, value):
    """Whatever the exponent, the text of a number is JSON and gives the same float32 again."""
    engine.submit = lambda request, submit=engine.submit: with_rows(submit(request), value)
    [row] = rows_of(app_of(engine).test_client().post(PATH, json={"input": "a"}))
    assert row.tobytes() == np.full(8, value, np.float32).tobytes()


def with_rows(job, value):
    job.rows = [np.full(8, value, np.float32)]
    return job


@pytest.mark.parametrize("body, param", [
    ({}, "input"), ({"input": None}, "input"), ({"input": []}, "input"), ({"input": ""}, "input"),
    ({"input": [""]}, "input"), ({"input": [[]]}, "input"), ({"input": [1, "a"]}, "input"), ({"input": [1.5]}, "input"),
    ({"input": [True]}, "input"), ({"input": [[1, "a"]]}, "input"), ({"input": 5}, "input"), ({"input": {}}, "input"),
    ({"input": [-1]}, "input"), ({"input": [10**30]}, "input"), ({"input": [[1 << 31]]}, "input"),
    ({"input": [5] * 513}, "input"), ({"input": "a b " * 400}, "input"), ({"input": "a" * 10**6}, "input"),
    ({"input": ["a"] * (MOST_TEXTS + 1)}, "input"), ({"input": [[5]] * (MOST_TEXTS + 1)}, "input"),
    ({"input": "\ud800"}, "input"), ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": 9}, "dimensions"), ({"input": "a", "dimensions": "8"}, "dimensions"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format"), ({"input": "a", "timeout": 0}, "timeout"),
    ({"input": "a", "imput": "b"}, "imput"), ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens")],
    ids=lambda value: str(value)[:40])
def test_what_is_refused(engine, body, param):
    with serving(app_of(engine)) as (port, service):
        answer = send(port, "POST", PATH, body)
        assert_error(answer, 400, param)
        assert len(answer[2]["error"]["message"]) < 300 and not service.open and not service.n_entering


def test_a_full_request_is_served(engine):
    """As many texts as may be; and as many token ids."""
    web = app_of(engine).test_client()
    answer = web.post(PATH, json={"input": ["a"] * MOST_TEXTS})
    assert answer.status_code == 200 and len(answer.json["data"]) == MOST_TEXTS
    assert web.post(PATH, json={"input": [5] * 512}).json["usage"]["prompt_tokens"] == 512


@pytest.mark.parametrize("given, texts", [("", [""]), ([3, 5], [[3, 5]]), ([[3]], [[3]]), (["", [3]], ["", [3]])])
def test_texts_of_an_input(given, texts):
    assert read_texts(given, "input") == texts


def test_an_input_is_not_mixed():
    with pytest.raises(RequestError, match="a list of token ids"):
        read_texts([3, "a"], "input")


# ---- Ollama --------------------------------------------------------------------------------------------------------


def test_the_client_of_ollama(engine):
    with serving(app_of(named("chat", ScriptedEngine("Hello.")), [engine])) as (port, _):
        client = ollama.Client(f"http://127.0.0.1:{port}")
        said = client.embed("e:latest", ["One text.", "Another."], dimensions=4)
        np.testing.assert_array_equal(np.float32(said.embeddings), engine.embed(["One text.", "Another."], 4))
        assert said.prompt_eval_count == engine.jobs[0].n_prompt and said.model == "e:latest"
        assert 0 < said.load_duration < said.total_duration
        np.testing.assert_array_equal(np.float32(client.embed("x", "One text.").embeddings),
                                      engine.embed(["One text."]))
        np.testing.assert_array_equal(np.float32(client.embeddings("e", "One text.").embedding),
                                      engine.embed(["One text."])[0])
        assert [one.model for one in client.list().models] == ["chat:latest", "e:latest"]
        assert [one.model for one in client.ps().models] == ["chat:latest", "e:latest"]
        assert client.show("e").capabilities == ["embedding"]
        assert "completion" in client.show("anything").capabilities
        for ask in (lambda: client.embed("chat", "a"), lambda: client.embed("e", [""]),
                    lambda: client.embeddings("e", ""), lambda: client.generate("e", "a")):
            with pytest.raises(ollama.ResponseError) as caught:
                ask()
            assert caught.value.status_code == 400 and caught.value.error


# ---- models of several kinds -----------------------------------------------------------------------------------------


def everything():
    chat, embedder = named("chat", ScriptedEngine("Hello.")), named("e", ScriptedPooling())
    return chat, [embedder, named("r", ScriptedPooling("reranking"))]


BODIES = {CHAT: {"messages": [HI]}, TEXT: {"prompt": "a"}, "/v1/responses": {"input": "a"},
          "/v1/messages": {"messages": [HI], "max_tokens": 5}, PATH: {"input": "a"},
          "/v1/rerank": {"query": "a", "documents": ["b"]}, OLLAMA: {"input": "a"},
          "/api/chat": {"messages": [HI], "stream": False}, "/api/generate": {"prompt": "a", "stream": False}}
KINDS = dict.fromkeys(BODIES, "chat") | {PATH: "e", OLLAMA: "e", "/v1/rerank": "r"}


@pytest.mark.parametrize("path", BODIES)
def test_a_request_goes_to_a_model_that_can_answer_it(path):
    """A name that is not here does not matter; that of a model which cannot answer is one sentence."""
    chat, side = everything()
    web = app_of(chat, side).test_client()
    for name in "chat", "e", "r", "gpt-5":
        answer = web.post(path, json=BODIES[path] | {"model": name})
        if name in (KINDS[path], "gpt-5"):
            assert answer.status_code == 200, answer.text
        else:
            assert answer.status_code == 400 and f"the model {name} can " in answer.text and ", but not " in answer.text
    asked = {"chat": len(chat.requests)} | {engine.name: len(engine.requests) for engine in side}
    assert asked == dict.fromkeys(asked, 0) | {KINDS[path]: 2}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("kind", ["text", "embedding", "reranking"])
def test_a_model_alone(path, kind):
    """It serves its own endpoints, and the others say what is missing."""
    engine = ScriptedEngine("Hello.") if kind == "text" else ScriptedPooling(kind)
    web, body = app_of(engine).test_client(), BODIES[path] | {"model": "any"}
    answer = web.post(path, json=body)
    if {"chat": "text", "e": "embedding", "r": "reranking"}[KINDS[path]] == kind:
        assert answer.status_code == 200
    else:
        option = {"chat": "-m", "e": "--embedding-model", "r": "--reranking-model"}[KINDS[path]]
        assert answer.status_code == 404 and "no model of this server can " in answer.text and option in answer.text
    for path in ("/health", "/v1/models", "/props", "/slots", "/metrics", "/tokenizer_info", "/", "/api/tags",
                 "/api/ps", "/openapi.json"):
        assert web.get(path).status_code == 200
    assert web.post("/tokenize", json={"content": "Hello"}).status_code == 200
    assert web.post("/api/show", json={"model": "m"}).status_code == 200
    assert web.get("/pipes").status_code == 404
    said = web.post("/apply-template", json={"messages": [HI]})
    assert said.status_code == (200 if kind == "text" else 404)


def test_all_models_are_listed():
    web = app_of(*everything()).test_client()
    assert [(one["id"], one["kind"]) for one in web.get("/v1/models").json["data"]] == [
        ("chat", "text"), ("e", "embedding"), ("r", "reranking")]
    assert web.get("/v1/models/r").json["max_model_len"] == 512 and web.get("/v1/models/x").status_code == 404
    health = web.get("/health").json
    assert health["model"] == "chat" and [one["model"] for one in health["side"]] == ["e", "r"]


@pytest.mark.parametrize("failed", [["e"], ["r"], ["e", "r"], ["chat"], ["chat", "r"], []])
def test_a_model_that_fails_is_told_of_and_the_others_go_on(failed):
    """The server counts as failed if the main model has."""
    chat, side = everything()
    web, engines = app_of(chat, side).test_client(), {one.name: one for one in (chat, *side)}
    for name in failed:
        engines[name].reason, engines[name].fault = f"{name} has stopped", Fault(f"card of {name}", "it burns", 0)
    health = web.get("/health")
    found = {one["model"]: one for one in health.json["side"]} | {"chat": health.json}
    assert health.status_code == (503 if "chat" in failed else 200)
    assert health.json["status"] == ("error" if "chat" in failed else "ok")
    for name, told in found.items():
        why = (f"{name} has stopped", f"card of {name}", "1970-01-01T00:00:00+00:00") if name in failed else (None,) * 3
        assert (told.get("error"), told.get("card"), told.get("since")) == why
    for path, body in BODIES.items():
        said = web.post(path, json=body | {"model": "any"})
        assert said.status_code == (503 if KINDS[path] in failed else 200), path


@pytest.mark.parametrize("path", [PATH, "/v1/rerank", "/rerank", "/v2/rerank", OLLAMA, "/api/embeddings"])
def test_keys_and_bodies(path):
    """As everywhere: a key is asked for, a body is limited, and what is no JSON object is refused in JSON."""
    web = app_of(*everything(), keys=["k"]).test_client()
    assert web.post(path, json={}).status_code == 401
    for data, status in ((b"{", 400), (b"[]", 400), (b"x" * (5 << 20), 413), (b"[" * 200, 400), (b'{"a": 1}', 400)):
        answer = web.post(path, data=data, headers={"x-api-key": "k"})
        assert answer.status_code == status and answer.json["error"]
    assert web.get(path, headers={"x-api-key": "k"}).status_code == 405


def test_while_the_model_loads():
    web = app_of().test_client()
    for path in BODIES:
        assert web.post(path, json=BODIES[path]).status_code == 503


# ---- limits, cancellation, log and metrics -------------------------------------------------------------------------


def test_the_client_leaves(engine):
    engine.is_held = True
    with serving(app_of(engine)) as (port, service):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        connection.request("POST", PATH, json.dumps({"input": "a"}), {"Content-Type": "application/json"})
        wait_until(lambda: engine.jobs)
        assert not engine.jobs[0].cancelled
        connection.close()
        wait_until(lambda: engine.jobs[0].cancelled)
        engine.release()                    # an engine ends what was cancelled within a pass
        wait_until(lambda: not service.open)


def test_timeouts_and_failures(engine):
    engine.is_held = True

    def ends():
        wait_until(lambda: engine.jobs and engine.jobs[0].is_over())
        engine.release()
        wait_until(lambda: len(engine.jobs) == 2)
        engine.jobs[1].close(EngineStopped("it burns"))

    with serving(app_of(engine)) as (port, service):
        thread = threading.Thread(target=ends)
        thread.start()
        assert_error(send(port, "POST", PATH, {"input": "a", "timeout": 1}), 504)
        assert_error(send(port, "POST", PATH, {"input": "a"}), 503)
        thread.join()
        assert not service.open


def test_more_requests_than_may_be_open(engine):
    engine.is_held = True
    app = app_of(engine, max_requests=1)
    with serving(app) as (port, service):
        first = threading.Thread(target=send, args=(port, "POST", PATH, {"input": "a"}))
        first.start()
        wait_until(lambda: service.open)
        status, headers, _ = send(port, "POST", PATH, {"input": "a"})
        assert status == 429 and headers["Retry-After"]
        engine.release()
        first.join()
        assert not service.open


@pytest.mark.parametrize("log_prompts", [False, True])
def test_the_log(caplog, log_prompts):
    chat, side = everything()
    web = app_of(chat, side, log_prompts=log_prompts).test_client()
    with caplog.at_level(logging.INFO, "qengine.requests"):
        web.post(PATH, json={"input": [SECRET, "two"]}).close()
        web.post("/v1/rerank", json={"query": SECRET, "documents": ["two"]}).close()
    lines = caplog.messages
    for line, engine in zip(lines, side):
        assert f"prompt={engine.jobs[0].n_prompt} cached=0 generated=0 finish=stop" in line
        assert (SECRET in line) == log_prompts and line.count(" text=") == (
            len(engine.requests[0].texts) if log_prompts else 0)
    assert len(lines) == 2


def test_metrics():
    chat, side = everything()
    web = app_of(chat, side).test_client()
    for path in PATH, "/v1/rerank", CHAT:
        web.post(path, json=BODIES[path]).close()
    lines = web.get("/metrics").text.splitlines()
    found = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
    for engine in chat, *side:
        assert found[f'qengine:request_success_total{{finished_reason="stop",model_name="{engine.name}"}}'] == 1
        assert found[f'qengine:prompt_tokens_total{{model_name="{engine.name}"}}'] > 0
        assert found[f'qengine:e2e_request_latency_seconds_count{{model_name="{engine.name}"}}'] == 1
    assert found['qengine:texts_total{model_name="e"}'] == 1 and 'qengine:texts_total{model_name="chat"}' not in found
    assert 'qengine:generation_tokens_total{model_name="e"}' not in found
    assert not any("texts" in line for line in app_of(chat).test_client().get("/metrics").text.splitlines())


def test_slots_show_answers_alone():
    chat, side = everything()
    side[0].is_held = True
    app = app_of(chat, side)
    with serving(app) as (port, service):
        thread = threading.Thread(target=send, args=(port, "POST", PATH, {"input": "a"}))
        thread.start()
        wait_until(lambda: service.open)
        assert [slot["is_processing"] for slot in app.test_client().get("/slots").json] == [False, False]
        side[0].release()
        thread.join()


# ---- the reference -------------------------------------------------------------------------------------------------


def test_as_llama_server_answers(embedder):
    """The same requests as llama-server was sent, by the official client: the same shape, the same counts, and nearly
    the same directions."""
    with serving(app_of(embedder)) as (port, _), official_client(port) as client:
        for _, request, want in server_said("embed", PATH):
            _, _, said = send(port, "POST", PATH, request)
            assert said["usage"] == want["usage"] and said.keys() == want.keys()
            for ours, theirs in zip(said["data"], want["data"], strict=True):
                assert ours.keys() == theirs.keys() and (ours["index"], ours["object"]) == (theirs["index"],
                                                                                           theirs["object"])
                assert np.dot(ours["embedding"], theirs["embedding"]) >= server_cosine()
            given = client.embeddings.create(**request).data
            np.testing.assert_array_equal(*(np.float32(rows) for rows in (
                [each.embedding for each in given], [each["embedding"] for each in said["data"]])))


def test_tokens_are_those_of_the_named_model():
    """Vocabularies differ, and token ids are embedded as they are."""
    text, beside = ScriptedEngine(), named("beside", ScriptedPooling())
    beside.tokenizer = ByteTokenizer(300)
    web = create_app(text, [beside]).test_client()
    for name, engine in ("beside", beside), ("beside:latest", beside), ("scripted", text), ("another", text):
        answer = web.post("/tokenize", json={"content": "Hi", "model": name}).json
        assert (answer["tokens"], answer["max_model_len"]) == (engine.tokenizer.encode("Hi"), engine.n_ctx)
        assert web.post("/detokenize", json={"tokens": answer["tokens"], "model": name}).json["content"] == "Hi"
    refused = web.post("/tokenize", json={"messages": [HI], "model": "beside"})
    assert refused.status_code == 400 and "but not generate text" in refused.json["error"]["message"]


def test_an_answer_has_its_place_until_it_is_written():
    app = app_of(ScriptedPooling())
    service = app.extensions["qengine"]
    with app.test_client().post(PATH, json={"input": ["a", "b"]}) as answer:
        assert len(service.open) == 1
        assert len(answer.json["data"]) == 2
    assert not service.open
