"""Ollama's protocol: the official client, at once and asynchronously, whole and streamed, against a scripted engine;
and the requests of Open WebUI."""

import asyncio
import datetime
import functools
import json
import operator
import re

import ollama
import pytest

from api import streams
from api.ollama import OPTIONS, WITHOUT_EFFECT
from engine.request import EngineStopped
from tests.calls import WEATHER, XML
from tests.clients import app_of, send, serving
from tests.paced import PacedEngine
from tests.scripted import ScriptedEngine, obeys, shipped
from tests.until import PATIENCE

HI = [{"role": "user", "content": "Hi"}]
INPUT = {"city": 'S\u00e3o "Paulo"', "days": 3}
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"],
          "additionalProperties": False}
DURATIONS = "total_duration", "load_duration", "prompt_eval_duration", "eval_duration"


def get_weather(city: str, days: int = 1) -> str:
    """The weather.

    Args:
      city: Where
      days: For how many days
    """


@pytest.fixture(scope="module")
def scripted():
    """(engine, client, what runs a coroutine function of an asynchronous one, port)"""
    engine = ScriptedEngine()
    with serving(app_of(engine)) as (port, _), asyncio.Runner() as runner:
        host = f"http://127.0.0.1:{port}"
        yield engine, ollama.Client(host), lambda ask: runner.run(ask(ollama.AsyncClient(host))), port


@pytest.fixture
def ask(scripted):
    """ask(method, script, **arguments) asks in four ways, which have to agree; gives (last line, request). What the
    lines of a stream say is put together."""
    engine, client, run_async, _ = scripted

    def ask(method, script, **arguments):
        engine.script = script
        engine.requests.clear()
        arguments = {"model": "m"} | arguments

        async def asynchronously(client):
            whole = await getattr(client, method)(**arguments)
            return whole, [line async for line in await getattr(client, method)(**arguments, stream=True)]

        whole, lines = run_async(asynchronously)
        answers = [getattr(client, method)(**arguments), whole, *map(
            joined, (lines, list(getattr(client, method)(**arguments, stream=True))))]
        told = [answer.model_dump(exclude={"created_at", *DURATIONS}) for answer in answers]
        assert told[1:] == told[:1] * 3
        assert all(getattr(answer, name) >= 0 for answer in answers for name in DURATIONS)
        return answers[0], engine.requests[0]

    return ask


def joined(lines):
    """The last line of a stream, with what all lines say."""
    last = lines[-1].model_copy(deep=True)
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    holder, text = (last.message, "content") if hasattr(last, "message") else (last, "response")
    for name, nothing in (text, ""), ("thinking", ""), ("tool_calls", []):
        pieces = [piece for line in lines if (piece := getattr(getattr(line, "message", line), name, None))]
        if pieces:
            setattr(holder, name, functools.reduce(operator.add, pieces, nothing))
    last.logprobs = [one for line in lines for one in line.logprobs or []] or None
    return last


def prompt_of(request):
    return shipped().tokenizer.decode(request.prompt_ids, special=True)


def post(port, path, **body):
    status, headers, answer = send(port, "POST", path, {"model": "m", "stream": False} | body)
    return status, answer


def test_text(ask):
    answer, request = ask("chat", "Hello, \ub300\ud55c.", messages=HI)
    assert (answer.message.role, answer.message.content) == ("assistant", "Hello, \ub300\ud55c.")
    assert (answer.model, answer.done, answer.done_reason) == ("scripted:latest", True, "stop")
    assert answer.prompt_eval_count == len(request.prompt_ids)
    assert answer.eval_count == len(shipped().tokenizer.encode("Hello, \ub300\ud55c.")) + 1
    assert request.max_tokens is None and request.temperature == 1.0
    made = datetime.datetime.fromisoformat(answer.created_at)
    assert abs(datetime.datetime.now(datetime.timezone.utc) - made) < datetime.timedelta(minutes=5)


def test_cached_tokens_are_told_apart():
    """A client that divides by prompt_eval_duration, which is the time of the others, can leave them out."""
    engine = PacedEngine("Hello.")              # of every prompt, the whole pages count as cached
    answer = app_of(engine).test_client().post("/api/chat", json={
        "model": "m", "stream": False, "messages": [{"role": "user", "content": "word " * 100}]}).json
    generation, = engine.generations
    assert answer["prompt_eval_count"] == generation.n_prompt
    assert 0 < answer["prompt_eval_cached_count"] == generation.n_cached < generation.n_prompt


def test_thoughts(ask):
    script = "I think.\n</think>\n\nHello."
    for think in True, "low", "high":
        message = ask("chat", script, messages=HI, think=think)[0].message
        assert (message.thinking, message.content) == ("I think.", "Hello.")
    answer, request = ask("chat", "Hello.", messages=HI, think=False)
    assert (answer.message.thinking, answer.message.content) == (None, "Hello.")
    assert prompt_of(request).endswith("</think>\n\n")
    answer, _ = ask("generate", script, prompt="Hi", think=True)
    assert (answer.thinking, answer.response) == ("I think.", "Hello.")


def test_calls(ask):
    answer, request = ask("chat", f"I look.\n\n{XML}\n{XML}", messages=HI, tools=[get_weather], think=False)
    assert answer.message.content == "I look." and answer.done_reason == "stop"
    assert [(call.function.name, call.function.arguments) for call in answer.message.tool_calls] == [
        ("get_weather", INPUT)] * 2
    assert request.grammar_after == shipped().tokenizer.tags["<tool_call>"]
    assert '"description": "The weather."' in prompt_of(request)


def test_calls_of_a_stream_have_numbers_and_ids(scripted):
    """Open WebUI puts calls together by their numbers."""
    engine, _, _, port = scripted
    engine.script = f"{XML}\n{XML}"
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER.parameters}}]
    response = app_of(engine).test_client().post("/api/chat", json={"model": "m", "messages": HI, "tools": tools})
    assert response.mimetype == "application/x-ndjson"
    lines = list(map(json.loads, response.text.splitlines()))
    calls = [call for line in lines for call in line["message"].get("tool_calls", [])]
    assert [call["function"]["index"] for call in calls] == [0, 1] and len({call["id"] for call in calls}) == 2


def test_a_call_cut_short_is_text(ask):
    short = len(shipped().tokenizer.encode(XML)) - 8
    answer, _ = ask("chat", XML, messages=HI, tools=[get_weather], think=False, options={"num_predict": short})
    assert answer.message.tool_calls is None and answer.done_reason == "length"
    assert answer.message.content.startswith('get_weather: {"city": "S\u00e3o')


def test_a_conversation_with_results(ask):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"},
                {"role": "assistant", "thinking": "Which tool?", "content": "I look.", "tool_calls": [
                    {"function": {"name": "get_weather", "arguments": {"city": "Seoul"}}}]},
                {"role": "tool", "tool_name": "get_weather", "content": "20 degrees"}]
    _, request = ask("chat", "Fine.", messages=messages, tools=[get_weather])
    parts = ["Be brief.", "Weather?", "<think>\nWhich tool?\n</think>", "I look.",
             "<function=get_weather>\n<parameter=city>\nSeoul\n", "20 degrees\n</tool_response>"]
    assert sorted(parts, key=prompt_of(request).index) == parts


@pytest.mark.parametrize("method, arguments", [("chat", {"messages": HI}), ("generate", {"prompt": "Hi"}),
                                               ("generate", {"prompt": "Hi", "raw": True})])
def test_a_format_rules_the_answer(ask, method, arguments):
    for format, good, bad in ((SCHEMA, '{"age": 3}', '{"age": "3"}'), ("json", '{"b": 1}', "[1]")):
        _, request = ask(method, good, format=format, think=False, **arguments)
        assert obeys({"grammar": request.grammar}, good) and not obeys({"grammar": request.grammar}, bad)
    assert ask(method, "x", format="", think=False, **arguments)[1].grammar is None


def test_options(ask):
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "seed": 4, "num_predict": 9,
               "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25, "stop": ["four", " th"],
               "num_ctx": 2048, "num_keep": 5, "num_thread": 8, "mirostat": 0, "repeat_last_n": 64}
    answer, request = ask("chat", "one two three", messages=HI, options=options, think=False)
    assert (answer.message.content, answer.done_reason) == ("one two", "stop")
    assert (request.temperature, request.top_k, request.top_p, request.min_p, request.seed, request.max_tokens,
            request.repetition_penalty, request.presence_penalty, request.frequency_penalty, request.stop) == (
        0.5, 3, 0.25, 0.125, 4, 9, 1.5, 0.5, 0.25, ("four", " th"))
    assert ask("chat", "one two", messages=HI, options={"num_predict": 1})[0].done_reason == "length"


@pytest.mark.parametrize("n", [-2, -1, 0])
def test_options_that_leave_it_to_the_server(ask, n):
    options = {"num_predict": n, "seed": min(n, -1), "top_k": min(n, -1), "repeat_last_n": 0, "repeat_penalty": 1.5}
    if n == -2:
        options |= {"seed": -1, "top_k": -1}
    _, request = ask("chat", "Hello", messages=HI, options=options)
    assert (request.max_tokens, request.seed, request.top_k, request.repetition_penalty) == (None, None, 0, 1.0)


CHANGE_NOTHING = dict.fromkeys(OPTIONS["properties"], 0) | dict.fromkeys(WITHOUT_EFFECT, True) | {
    "tfs_z": 1, "typical_p": 1, "repeat_penalty": 1, "repetition_guard": True, "stop": "never", "draft": 2,
    "sparse": False}


@pytest.mark.parametrize("name", CHANGE_NOTHING)
def test_every_option_is_taken(scripted, name):
    scripted[0].script = "Hello."
    for value in CHANGE_NOTHING[name], None:
        status, answer = post(scripted[3], "/api/chat", messages=HI, options={name: value}, think=False)
        assert status == 200 and answer["message"]["content"] == "Hello."


@pytest.mark.parametrize("path, body, said", [
    ("chat", {"messages": [{"role": "user", "content": "Hi", "images": ["AAAA"]}]}, "the model has no eyes"),
    ("generate", {"prompt": "Hi", "images": ["AAAA"]}, "the model has no eyes"),
    ("generate", {"prompt": "Hi", "template": "{{ .Prompt }}"}, "template"),
    ("generate", {"prompt": "def f(", "suffix": "return x"}, "suffix"),
    ("generate", {"prompt": "Hi", "raw": True, "system": "Be brief."}, "raw"),
    ("generate", {"prompt": "Hi", "context": [99999999]}, "token id"),
    ("chat", {"messages": HI, "options": {"num_ctx": 8192}}, "options.num_ctx.*4096"),
    ("chat", {"messages": HI, "options": {"mirostat": 2}}, "options.mirostat"),
    ("chat", {"messages": HI, "options": {"temprature": 1}}, "did you mean 'options.temperature'"),
    ("chat", {"messages": HI, "top_logprobs": 3}, "top_logprobs"),
    ("chat", {"messages": [{"role": "user", "content": "Hi " * 5000}]}, "4096"),
    ("chat", {"messages": HI, "format": {"type": "string", "pattern": "("}}, "format"),
])
def test_refusals(scripted, path, body, said):
    """In Ollama's shape, streamed or not."""
    port = scripted[3]
    for stream in False, True:
        status, answer = post(port, f"/api/{path}", **body, stream=stream)
        assert status == 400 and list(answer) == ["error"] and "\n" not in answer["error"]
        assert re.search(said, answer["error"])


@pytest.mark.parametrize("method, path", [
    ("POST", "/api/pull"), ("POST", "/api/push"), ("POST", "/api/create"),
    ("DELETE", "/api/delete"), ("POST", "/api/copy")])
def test_what_is_not_served(scripted, method, path):
    status, _, answer = send(scripted[3], method, path, {})
    assert (status, answer) == (404, {"error": f"{method} {path} is not served; /openapi.json says what is"})


def test_errors_reach_the_client(scripted):
    """Before a stream begins, and in it."""
    client = scripted[1]
    long = [{"role": "user", "content": "Hi " * 5000}]
    for stream in False, True:
        with pytest.raises(ollama.ResponseError, match="4096") as caught:
            list(client.chat("m", long, stream=stream))
        assert caught.value.status_code == 400

    def fail(prompt):
        raise EngineStopped("the card is gone")

    with serving(app_of(PacedEngine(fail))) as (port, _), pytest.raises(ollama.ResponseError, match="card is gone"):
        list(ollama.Client(f"http://127.0.0.1:{port}").chat("m", HI, stream=True))


def test_a_silent_stream_says_that_it_lives(monkeypatch):
    """By lines that say nothing: Ollama's clients read every line as an object."""
    monkeypatch.setattr(streams, "SILENCE_SECONDS", 0.02)
    with serving(app_of(engine := PacedEngine("Hello.", delay=PATIENCE))) as (port, _):
        lines = []
        for line in ollama.Client(f"http://127.0.0.1:{port}").chat("m", HI, stream=True):
            lines.append(line)
            engine.delay = 0.1 if len(lines) > 5 else PATIENCE
    assert len(lines) > 5 and joined(lines).message.content == "Hello."


def test_generate(ask):
    answer, request = ask("generate", "Hello.", prompt="Hi", system="Be brief.", think=False)
    assert answer.response == "Hello." and "Be brief." in prompt_of(request) and "Hi" in prompt_of(request)
    tokenizer = shipped().tokenizer
    said = tokenizer.decode(answer.context, special=True)
    assert said == prompt_of(request) + "Hello.<|im_end|>\n"
    _, later = ask("generate", "Fine.", prompt="And you?", context=answer.context, think=False)
    assert later.prompt_ids[:len(answer.context)] == answer.context and "And you?" in prompt_of(later)


def test_generate_raw(ask):
    script = "<think>\nno\n</think> <tool_call>"
    answer, request = ask("generate", script, prompt="<|im_start|>user\nHi", raw=True)
    assert (answer.response, answer.thinking, answer.context) == (script, None, None)
    assert prompt_of(request) == "<|im_start|>user\nHi"


def test_logprobs(ask):
    answer, _ = ask("chat", "Hello.", messages=HI, logprobs=True, top_logprobs=2, think=False)
    assert "".join(one.token for one in answer.logprobs) == "Hello."
    assert {one.logprob for one in answer.logprobs} == {-0.5}
    assert [len(one.top_logprobs) for one in answer.logprobs] == [2] * len(answer.logprobs)
    answer, _ = ask("generate", "Hello.", prompt="Hi", logprobs=True, raw=True)
    assert "".join(one.token for one in answer.logprobs) == "Hello."


def test_loading_and_unloading(scripted):
    """A request without a prompt. The engine hears nothing of it."""
    engine, client, _, port = scripted
    engine.requests.clear()
    assert (client.generate("m").done_reason, client.chat("m").message.content) == ("load", "")
    assert [line.done_reason for line in client.generate("m", stream=True)] == ["load"]
    assert post(port, "/api/generate", prompt="", keep_alive=0)[1]["done_reason"] == "unload"      # Open WebUI's
    assert post(port, "/api/chat", messages=[], keep_alive="0s")[1]["done_reason"] == "unload"
    assert engine.requests == []


def test_what_there_is(scripted):
    _, client, _, port = scripted
    [model] = client.list().models
    [running] = client.ps().models
    file = shipped().weights.gguf
    assert model.model == running.model == running.name == "scripted:latest"
    assert model.size == sum(tensor.nbytes for tensor in file.tensors.values()) == running.size_vram
    assert model.digest == running.digest and len(model.digest) == 64
    assert (model.details.family, model.details.parameter_size, model.details.quantization_level) == (
        "qwen35", "10.9M", "Q8_0")
    assert running.context_length == 4096 and running.expires_at.year == 9999
    said = client.show("scripted:latest")
    assert said.capabilities == ["completion", "tools", "thinking"]
    assert said.template == shipped().template.source and said.details == model.details
    assert said.modelinfo["general.name"] == "qengine-10m" and said.modelinfo["qwen35.context_length"] == 4096
    assert not any(isinstance(value, list) for value in said.modelinfo.values())
    assert "num_ctx 4096" in said.parameters and said.license == "apache-2.0"
    status, _, answer = send(port, "GET", "/api/version")
    assert status == 200 and [int(part) for part in answer["version"].split(".")] >= [0, 12, 11]


def test_a_key_is_needed():
    with serving(app_of(ScriptedEngine("Hello."), keys=["secret"])) as (port, _):
        host = f"http://127.0.0.1:{port}"
        client = ollama.Client(host, headers={"Authorization": "Bearer secret"})
        assert client.chat("m", HI).message.content == "Hello." and len(client.list().models) == 1
        for ask in (lambda client: client.chat("m", HI), lambda client: client.list(),
                    lambda client: list(client.generate("m", "Hi", stream=True))):
            with pytest.raises(ollama.ResponseError) as caught:
                ask(ollama.Client(host, headers={"Authorization": "Bearer wrong"}))
            assert caught.value.status_code == 401 and "key" in caught.value.error


def test_open_webui(scripted):
    """Requests as version 0.12.4 of Open WebUI sends them (backend/open_webui/utils/payload.py), and what it reads of
    their answers (utils/response.py)."""
    engine, _, _, port = scripted
    engine.script = "Hello."
    status, _, listed = send(port, "GET", "/api/tags")
    name = listed["models"][0]["model"]
    options = {"temperature": 0.8, "top_p": 0.9, "num_ctx": 4096, "num_predict": 64, "stop": ["\n\n\n"]}
    messages = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"},
        {"role": "assistant", "thinking": "hm", "tool_calls": [
            {"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": {"city": "Seoul"}}}],
         "content": ""},
        {"role": "tool", "content": "20 degrees", "tool_call_id": "call_1"}, {"role": "user"}]
    body = {"model": name, "messages": messages, "stream": True, "options": options, "think": True, "keep_alive": "5m",
            "tools": [{"type": "function", "function": {"name": "get_weather", "description": "The weather.",
                                                        "parameters": WEATHER.parameters}}]}
    response = app_of(engine).test_client().post("/api/chat", json=body)
    assert response.status_code == 200
    lines = [json.loads(line) for line in response.data.split(b"\n") if line]
    assert "".join(line["message"]["content"] + line["message"].get("thinking", "") for line in lines) == "Hello."
    counts = "prompt_eval_count", "prompt_eval_cached_count", "eval_count"
    assert all(type(lines[-1][count]) is int for count in (*counts, *DURATIONS))
    expires = datetime.datetime.fromisoformat(send(port, "GET", "/api/ps")[2]["models"][0]["expires_at"])
    assert int(expires.timestamp()) > 0
