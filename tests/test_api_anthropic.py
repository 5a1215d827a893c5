"""Anthropic's protocol: the official client, at once and asynchronously, whole and streamed, against a scripted
engine."""

import anthropic
import pytest

from api import grammar
from engine.request import Delta, EngineStopped
from tests.calls import WEATHER, XML
from tests.clients import app_of, scripted_clients
from tests.four_ways import blocks_of, message_in_four_ways
from tests.scripted import ScriptedEngine, Unreal, obeys, shipped

HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"name": "get_weather", "description": "The weather.", "input_schema": WEATHER.parameters},
         {"name": "now", "input_schema": {"type": "object", "properties": {}}}]
INPUT = {"city": 'S\u00e3o "Paulo"', "days": 3}
THINK = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


@pytest.fixture(scope="module")
def scripted():
    """(engine, client, what runs a function of an asynchronous one)"""
    engine = ScriptedEngine()
    with scripted_clients(engine, anthropic.Anthropic, anthropic.AsyncAnthropic, "") as clients:
        yield engine, *clients


@pytest.fixture
def ask(scripted):
    """ask(script, **arguments); gives (blocks, message, request)."""
    engine, *clients = scripted

    def ask(script, messages=HI, **arguments):
        engine.script = script
        engine.requests.clear()
        message = message_in_four_ways(*clients, messages=messages, **arguments)
        return blocks_of(message), message, engine.requests[0]

    return ask


def prompt_of(request):
    return shipped().tokenizer.decode(request.prompt_ids)


def test_text(ask):
    blocks, message, request = ask("Hello, \ub300\ud55c.")
    assert blocks == [("text", "Hello, \ub300\ud55c.")]
    assert (message.type, message.role, message.model) == ("message", "assistant", "scripted")
    assert message.stop_reason == "end_turn"
    assert message.usage.input_tokens == len(request.prompt_ids) and message.usage.cache_read_input_tokens == 0
    assert message.usage.output_tokens == len(shipped().tokenizer.encode("Hello, \ub300\ud55c.")) + 1
    assert request.max_tokens == 500 and prompt_of(request).endswith("</think>\n\n")


def test_thoughts(ask):
    script = "I think.\n</think>\n\nHello."
    blocks, message, request = ask(script, **THINK)
    assert blocks == [("thinking", "I think."), ("text", "Hello.")]
    assert message.usage.output_tokens_details.thinking_tokens == len(shipped().tokenizer.encode("I think.\n</think>"))
    assert ask(script, thinking={"type": "adaptive"})[0] == blocks
    assert ask(script, thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"})[0] == blocks[1:]
    assert ask("Hello.", thinking={"type": "disabled"})[0] == [("text", "Hello.")]


def test_why_an_answer_ends(ask):
    assert ask("one two three", max_tokens=2)[1].stop_reason == "max_tokens"
    _, message, request = ask("one two three", stop_sequences=["four", " th"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " th")
    assert blocks_of(message) == [("text", "one two")] and request.stop == ("four", " th")
    _, message, _ = ask("one two three", stop_sequences=["two three", "two", "wo"])
    assert (message.content[0].text, message.stop_sequence) == ("one ", "two")          # as the engine cut it
    assert ask("")[1].content == []


def test_sampling(ask):
    _, _, request = ask("Hello.", extra_body={"temperature": 0.5, "top_k": 3, "top_p": 0.25, "seed": 4})
    assert (request.temperature, request.top_k, request.top_p, request.seed) == (0.5, 3, 0.25, 4)


def test_calls(ask):
    now = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    blocks, message, request = ask(f"I look.\n\n{XML}\n{now}", tools=TOOLS)
    assert blocks == [("text", "I look."), ("tool_use", ("get_weather", INPUT)), ("tool_use", ("now", {}))]
    assert message.stop_reason == "tool_use" and message.content[1].id.startswith("toolu_")
    assert request.grammar_after == shipped().tokenizer.tags["<tool_call>"]
    assert '"description": "The weather."' in prompt_of(request)


@pytest.mark.parametrize("choice, good, bad", [
    ({"type": "any"}, [XML, f"{XML}\n{XML}"], ["Hello"]),
    ({"type": "any", "disable_parallel_tool_use": True}, [XML], ["Hello", f"{XML}\n{XML}"]),
    ({"type": "tool", "name": "now"}, ["<tool_call>\n<function=now>\n</function>\n</tool_call>"], [XML]),
    ({"type": "auto"}, ["Hello", XML, f"{XML}\n{XML}"], [f"{XML} and"]),
])
def test_what_may_be_called(ask, choice, good, bad):
    for thinking in {}, THINK:
        thoughts = "hm\n</think>\n\n" if thinking else ""
        _, _, request = ask(thoughts + good[0], tools=TOOLS, tool_choice=choice, **thinking)
        rules = {"grammar": request.grammar, "grammar_after": request.grammar_after}
        assert all(obeys(rules, thoughts + text) for text in good)
        assert not any(obeys(rules, thoughts + text) for text in bad)
    assert ask(XML, tools=TOOLS, tool_choice={"type": "none"})[0] == [("text", XML)]


def test_a_conversation_with_results(ask):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Which tool?", "signature": ""}, {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Seoul"}},
            {"type": "tool_use", "id": "toolu_2", "name": "now", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "20 degrees"}]},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no clock", "is_error": True},
            {"type": "text", "text": "And now?"}]}]
    _, _, request = ask("Fine.", messages, tools=TOOLS, system=[{"type": "text", "text": "Be brief."}])
    prompt = prompt_of(request)
    parts = ["Be brief.", "Weather?", "I look.", "<function=get_weather>\n<parameter=city>\nSeoul\n", "<function=now>",
             "20 degrees\n</tool_response>", "Error: no clock\n</tool_response>", "And now?"]
    assert [part for part in parts if part not in prompt] == []
    assert sorted(parts, key=prompt.index) == parts
    _, _, request = ask("Fine.", messages[:2] + [messages[2] | {"content": messages[2]["content"][:2]}], tools=TOOLS)
    assert "<think>\nWhich tool?\n</think>" in prompt_of(request)       # of this turn they stay


def test_a_schema_rules_the_answer(ask):
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"],
              "additionalProperties": False}
    _, _, request = ask('{"age": 3}', output_config={"format": {"type": "json_schema", "schema": schema}})
    assert obeys({"grammar": request.grammar}, '{"age": 3}') and not obeys({"grammar": request.grammar}, '{"age": "3"}')


def test_count_tokens(scripted, ask, monkeypatch):
    _, client, run_async = scripted
    arguments = {"messages": HI, "tools": TOOLS, "system": "Be brief."}
    n_prompt = len(ask("Hello.", **arguments)[2].prompt_ids)
    monkeypatch.setattr(grammar, "checked_grammar", lambda lark: pytest.fail("counting needs no grammar"))
    counts = [client.messages.count_tokens(model="m", **arguments),
              run_async(lambda client: client.messages.count_tokens(model="m", **arguments))]
    assert [count.input_tokens for count in counts] == [n_prompt] * 2
    with pytest.raises(anthropic.BadRequestError, match="4096"):
        client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "long " * 500_000}])


def test_request_ids(scripted):
    """Where the client looks for them."""
    engine, client, _ = scripted
    engine.script = "Hello."
    arguments = {"model": "m", "messages": HI, "max_tokens": 9, "extra_headers": {"X-Request-Id": "job-7"}}
    assert client.messages.create(**arguments)._request_id == "job-7"
    with client.messages.stream(**arguments) as stream:
        stream.until_done()
        assert stream.request_id == "job-7"
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**arguments | {"messages": []})
    assert caught.value.request_id == "job-7"


def test_betas(scripted):
    """What templates do anyway is accepted, and what nothing here does is refused by the name of its field."""
    engine, client, _ = scripted
    engine.script = "I think.\n</think>\n\nHello."
    arguments = {"model": "m", "messages": HI, "max_tokens": 99, "betas": ["context-management-2025-06-27"]} | THINK
    for edits in [], [{"type": "clear_thinking_20251015"}], [{"type": "clear_thinking_20251015", "keep": "all"}]:
        message = client.beta.messages.create(**arguments, context_management={"edits": edits})
        assert blocks_of(message) == [("thinking", "I think."), ("text", "Hello.")]
    for refused, field in (({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
                            "context_management.edits[0].type"),
                           ({"mcp_servers": [{"type": "url", "name": "a", "url": "https://a.example"}]}, "mcp_servers"),
                           ({"container": "c"}, "container")):
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.beta.messages.create(**arguments | refused)
        assert field in caught.value.body["error"]["message"]


def test_a_call_that_the_length_cuts(scripted):
    engine, client, _ = scripted
    engine.script = XML
    message = client.messages.create(model="m", messages=HI, tools=TOOLS, max_tokens=16)
    assert message.stop_reason == "max_tokens"
    [(kind, text)] = blocks_of(message)
    assert kind == "text" and text.startswith('get_weather: {"city": "S')


@pytest.mark.parametrize("arguments, said", [
    ({"messages": []}, "messages"), ({"max_tokens": 0}, "max_tokens"), ({"extra_body": {"oops": 1}}, "oops"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [*HI, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "a", "name": "now", "input": {}}]}]}, "results"),
    ({"extra_body": {"container": "c"}}, "'container' is not supported"),
    ({"tools": [TOOLS[0] | {"defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "then"}}, "tool_choice"),
    ({"thinking": {"type": "enabled", "budget_tokens": "long"}}, "thinking.budget_tokens"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"), ({"stop_sequences": ["a" * 1025]}, "stop_sequences[0]"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
])
def test_what_is_wrong_is_named(scripted, arguments, said):
    _, client, _ = scripted
    for stream in False, True:
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.create(**({"model": "m", "messages": HI, "max_tokens": 5, "stream": stream} | arguments))
        error = caught.value.body["error"]
        assert error["type"] == "invalid_request_error" and said in error["message"]


def test_the_assistants_last_message_is_continued(ask):
    message, _, request = ask(" a time.", messages=[*HI, {"role": "assistant", "content": "Once upon"}])
    assert message == [("text", " a time.")]
    assert shipped().tokenizer.decode(request.prompt_ids).endswith("</think>\n\nOnce upon")


def test_the_tool_runner(scripted):
    """It sends a thread, and then only what is new. Told that there is none, it sends the whole conversation."""
    engine, client, _ = scripted
    engine.requests.clear()
    engine.script = lambda prompt: "It is 20 degrees." if "20 C" in prompt else XML

    @anthropic.beta_tool
    def get_weather(city: str, days: int) -> str:
        """The weather."""
        return "20 C"

    for _ in range(2):
        runner = client.beta.messages.tool_runner(model="m", max_tokens=100, messages=HI, tools=[get_weather])
        assert runner.until_done().content[0].text == "It is 20 degrees."
    prompt = shipped().tokenizer.decode(engine.requests[-1].prompt_ids)
    assert "Hi" in prompt and "20 C" in prompt and "get_weather" in prompt
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.beta.messages.create(model="m", max_tokens=5, messages=HI,
                                    thread={"type": "continue", "previous_message_id": "msg_1"})
    assert caught.value.body["error"]["details"] == {"error_code": "thread_not_found"}


def test_errors_have_anthropics_shape(scripted, monkeypatch):
    engine, client, _ = scripted
    monkeypatch.setattr(engine, "reason", "the card fell off the bus")
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(model="m", messages=HI, max_tokens=5)
    assert (caught.value.status_code, caught.value.body["error"]["type"]) == (503, "overloaded_error")
    web = app_of(engine).test_client()
    answer = web.get("/v1/messages")
    assert (answer.status_code, answer.json["type"]) == (405, "error")
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert web.get("/v1/messages/batches").json["error"]["type"] == "not_found_error"


class Broken(Unreal):
    """A generation whose card fails after the first token."""

    def __init__(self):
        super().__init__()
        self.said = [Delta(shipped().tokenizer.encode("a")[0], "a", None),
                     EngineStopped("the card fell off the bus")]

    def take(self):
        return self.said.pop(0)


def test_a_failure_in_mid_stream_is_told(scripted, monkeypatch):
    engine, client, _ = scripted
    monkeypatch.setattr(engine, "submit", lambda request: Broken())
    with pytest.raises(anthropic.APIStatusError, match="fell off the bus"):
        list(client.messages.create(model="m", messages=HI, max_tokens=5, stream=True))
    with pytest.raises(anthropic.APIStatusError, match="fell off the bus"):
        client.messages.create(model="m", messages=HI, max_tokens=5)
