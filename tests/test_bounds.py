"""What one request may cost: long texts for the tokenizer, tools that fill the context, templates that hang."""

import json
import threading
import time
import tracemalloc

import pytest

from api import chat
from api.errors import MAX_BODY
from api.plain import BLOCK, MAX_BYTES, MAX_IDS, MAX_PIECES
from engine import tokenizer as tokens
from engine.template import ChatTemplate
from tests.clients import CHAT, HI, app_of, assert_error
from tests.scripted import ScriptedEngine, shipped
from tests.until import PATIENCE, wait_until

MESSAGES, OLLAMA = "/v1/messages", "/api/chat"


@pytest.fixture(scope="module")
def web():
    return app_of(ScriptedEngine("Hi.")).test_client()


def refused(answer, field):
    assert_error((answer.status_code, answer.headers, answer.json), 400, field)
    return answer.json["error"]["message"]


# ---- the tokenizer -------------------------------------------------------------------------------------------


def test_a_book_is_cut_into_tokens(web):
    """In several blocks, whose joints do not show."""
    book = ("It was the best of times, it was the worst of times. 大 é\n" * 20_000)[:MAX_BYTES - 60_000]
    ids = web.post("/tokenize", json={"content": book}).json["tokens"]
    assert ids == shipped().tokenizer.encode(book) and len(ids) > 10 * BLOCK
    told = web.post("/tokenize", json={"content": book, "with_pieces": True}).json["tokens"]
    assert [one["id"] for one in told] == ids
    assert web.post("/detokenize", json={"tokens": ids}).json["content"] == book


@pytest.mark.parametrize("n", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_joints_of_blocks(web, n):
    answer = web.post("/tokenize", json={"content": "7" * n})
    assert json.loads(answer.data)["tokens"] == shipped().tokenizer.encode("7" * n)
    assert answer.headers["Content-Type"] == "application/json"


def test_longer_texts_are_refused(web):
    for text in ("a" * (MAX_BYTES + 1), "é" * (MAX_BYTES // 2 + 1)):
        assert f"may have {MAX_BYTES}" in refused(web.post("/tokenize", json={"content": text}), "content")
    many = {"content": "7" * (MAX_PIECES + 1), "with_pieces": True}
    assert f"up to {MAX_PIECES}" in refused(web.post("/tokenize", json=many), "with_pieces")
    assert str(MAX_IDS) in refused(web.post("/detokenize", json={"tokens": [7] * (MAX_IDS + 1)}), "tokens")
    n_bytes, token = max((len(piece), token) for token, piece in enumerate(shipped().tokenizer.pieces))
    long = {"tokens": [token] * (MAX_BODY // n_bytes + 1)}
    assert "bytes" in refused(web.post("/detokenize", json=long), "tokens")


def test_long_texts_are_encoded_one_at_a_time(monkeypatch):
    """Other requests and short texts do not wait for them. What Python itself keeps afterwards is next to nothing."""
    tokenizer, lock = shipped().tokenizer, shipped().tokenizer._long_text._lock
    started, ended = threading.Event(), threading.Event()

    def encode():
        started.set()
        tokenizer.encode("7" * (tokens.LONG + 1))
        ended.set()

    thread = threading.Thread(target=encode)
    with lock:
        thread.start()
        assert started.wait(PATIENCE) and not ended.wait(0.2)
        assert tokenizer.encode("7" * 99)
    thread.join()
    assert ended.is_set()
    tracemalloc.start()
    tokenizer.encode("7" * MAX_BYTES)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1 << 20


# ---- tools that fill the context -----------------------------------------------------------------------------

LONG = "all that can be said of it " * 2000
TOOL = {"type": "function", "function": {"name": "f", "description": LONG, "parameters": {"type": "object"}}}


@pytest.mark.parametrize("path, body, tool", [
    (CHAT, {}, TOOL),
    (MESSAGES, {"max_tokens": 9}, {"name": "f", "description": LONG, "input_schema": {"type": "object"}}),
    (OLLAMA, {"model": "m"}, TOOL)])
def test_tools_that_are_too_long_are_named(web, path, body, tool):
    """In the field of the error, where the protocol has one, and in words."""
    def message_of(content, tools):
        answer = web.post(path, json=body | {"messages": [{"role": "user", "content": content}], "tools": tools})
        assert answer.status_code == 400
        error = answer.json["error"]
        return error if isinstance(error, str) else error["message"]

    assert "Without 'tools' it would fit" in message_of("hi", [tool])
    for content, tools in ((LONG, []), (LONG, [tool])):
        assert "Without 'tools'" not in message_of(content, tools)
    if path == CHAT:
        answer = web.post(path, json={"messages": [HI], "tools": [TOOL]})
        refused(answer, "tools")
        assert answer.json["error"]["code"] == "context_length_exceeded"
        refused(web.post(path, json={"messages": [HI | {"content": LONG}], "tools": [TOOL]}), "messages")


# ---- calls that the end of an answer has cut -----------------------------------------------------------------

CUT = '{"city": "Par'


def test_a_cut_call_may_be_sent_back(web):
    """As each protocol has it: Anthropic's and Ollama's arguments are objects, so there the answer says it in text."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": CUT}}
    history = [HI, {"role": "assistant", "content": None, "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "call_1", "content": "cut"}, HI]
    for path, body in ((CHAT, {}), (OLLAMA, {"model": "m", "stream": False})):
        messages = [message | {"content": message["content"] or ""} for message in history]
        assert web.post(path, json=body | {"messages": messages}).status_code == 200
    prompt = web.post("/apply-template", json={"messages": history}).json["prompt"]
    assert "<function=weather>\n<parameter=city>\nPar\n</parameter>" in prompt


# ---- templates that hang -------------------------------------------------------------------------------------

HANGS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("path, body", [(CHAT, {}), (MESSAGES, {"max_tokens": 9})])
def test_a_template_that_hangs_ends_with_the_timeout_of_the_request(path, body):
    client = app_of(ScriptedEngine("Hi.", ChatTemplate(HANGS))).test_client()
    answer = client.post(path, json=body | {"messages": [HI], "timeout": 0.3})
    assert answer.status_code == 504 and "0.3 s" in answer.json["error"]["message"]


@pytest.mark.parametrize("path, body", [(CHAT, {}), (MESSAGES, {"max_tokens": 9})])
def test_the_time_of_the_template_counts(path, body, monkeypatch):
    """The timeout of a request runs from its arrival on, not from when the engine gets it."""
    engine, prepare = ScriptedEngine("Hi."), chat.prepare
    monkeypatch.setattr(chat, "prepare", lambda *asked: [time.sleep(0.5), prepare(*asked)][1])
    answer = app_of(engine).test_client().post(path, json=body | {"messages": [HI], "timeout": 60})
    generation, = engine.generations
    assert answer.status_code == 200 and 0 < generation.deadline - generation.started < 59.6


def test_closing_the_server_does_not_wait_for_a_template(monkeypatch):
    """It would take as long as templates may, and then the time of the requests that wait for it."""
    monkeypatch.setattr("engine.template.SECONDS", 2 * PATIENCE)
    client = app_of(ScriptedEngine("Hi.", ChatTemplate(HANGS)))
    service, answers = client.extensions["qengine"], []

    def ask():
        answers.append(client.test_client().post(CHAT, json={"messages": [HI]}).status_code)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: service.n_entering >= 4)
    assert service.close(timeout=PATIENCE)
    for thread in threads:
        thread.join()
    assert answers == [503] * 4             # the requests are sound: another server may answer them
