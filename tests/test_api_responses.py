"""OpenAI's responses: the official client, at once and asynchronously, whole and streamed, with a scripted engine."""

import base64
import json

import openai
import pydantic
import pytest

from api import stored
from api.stored import Stored
from api.thinking import EFFORTS
from engine.request import EngineStopped
from tests.calls import CALL, PERSON, WEATHER, XML
from tests.clients import app_of, official_client, scripted_clients, send, serving
from tests.four_ways import respond_in_four_ways
from tests.paced import PacedEngine
from tests.scripted import ScriptedEngine, obeys, shipped

PATH = "/v1/responses"
TOOLS = [{"type": "function", "name": "get_weather", "parameters": WEATHER.parameters, "strict": False},
         {"type": "function", "name": "now", "parameters": None, "strict": None}]
THINK = {"reasoning": {"effort": "low"}}
THOUGHTS = "I think.\n</think>\n\n"


@pytest.fixture(scope="module")
def scripted():
    """(engine, client, what runs a function of an asynchronous one)"""
    engine = ScriptedEngine()
    with scripted_clients(engine, openai.OpenAI, openai.AsyncOpenAI) as clients:
        yield engine, *clients


@pytest.fixture
def ask(scripted):
    """ask(script, **arguments) of a response; gives (response, request, prompt)."""
    engine, *clients = scripted

    def ask(script, input="Hi", **arguments):
        engine.script = script
        engine.requests.clear()
        response = respond_in_four_ways(*clients, input=input, **arguments)
        request = engine.requests[0]
        return response, request, engine.tokenizer.decode(request.prompt_ids, special=True)

    return ask


def items_of(response):
    """What the items of a response say."""
    kinds = {"message": lambda item: item.content[0].text, "reasoning": lambda item: item.content[0].text,
             "function_call": lambda item: (item.name, json.loads(item.arguments))}
    return [(item.type, kinds[item.type](item)) for item in response.output]


# ---- what is said ------------------------------------------------------------------------------------------


def test_text(ask):
    response, request, prompt = ask("Hello, \ub300\ud55c.\n", instructions="Be brief.", metadata={"a": "b"})
    assert response.output_text == "Hello, \ub300\ud55c.\n" and response.status == "completed"
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")
    n = len(shipped().tokenizer.encode("Hello, \ub300\ud55c.\n")) + 1
    usage = response.usage.to_dict()
    assert usage == {"input_tokens": len(request.prompt_ids), "output_tokens": n,
                     "total_tokens": len(request.prompt_ids) + n, "output_tokens_details": {"reasoning_tokens": 0},
                     "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
    assert response.metadata == {"a": "b"} and response.instructions == "Be brief."
    assert response.error is response.incomplete_details is None and response.model == "scripted"


def test_thoughts_text_and_calls(ask):
    response, _, prompt = ask(f"{THOUGHTS}I look.\n\n{XML}\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
                              tools=TOOLS, **THINK)
    assert items_of(response) == [("reasoning", "I think."), ("message", "I look."), ("function_call", CALL),
                                  ("function_call", ("now", {}))]
    assert [item.status for item in response.output] == ["completed"] * 4
    n = len(shipped().tokenizer.encode("I think.\n</think>"))
    assert response.usage.output_tokens_details.reasoning_tokens == n
    assert '"get_weather"' in prompt and prompt.endswith("<think>\n")
    assert [tool.name for tool in response.tools] == ["get_weather", "now"]


def test_an_answer_that_was_cut(ask):
    response, request, _ = ask(f"Hello.\n\n{XML}", tools=TOOLS, max_output_tokens=18)
    assert request.max_tokens == 18 and response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in response.output] == ["completed", "incomplete"]
    assert response.usage.output_tokens == 18


@pytest.mark.parametrize("effort, thinks", [("none", False), ("minimal", False), ("low", True), ("high", True)])
def test_effort_switches_thinking(ask, effort, thinks):
    response, request, prompt = ask("a</think>b", reasoning={"effort": effort, "summary": "auto"})
    assert request.thinking_budget == EFFORTS[effort]
    assert prompt.endswith("<think>\n") == thinks
    assert (response.reasoning.effort, response.reasoning.summary) == (effort, None)


def test_sampling_reaches_the_engine(ask):
    arguments = {"temperature": 0.5, "top_p": 0.25}
    extra = {"top_k": 4, "min_p": 0.125, "seed": 3, "ignore_eos": True, "stop": ["x"], "timeout": 9.0}
    response, request, _ = ask("Hello.", **arguments, extra_body=extra)
    for name, value in (arguments | extra).items():
        assert getattr(request, name) == (("x",) if name == "stop" else value)
    assert (response.temperature, response.top_p) == (0.5, 0.25)
    response, request, _ = ask("Hello.")
    assert (request.temperature, request.max_tokens, request.top_logprobs) == (1, None, None)


def test_log_probabilities(ask):
    """Of the tokens of the text, but not of thoughts, calls and the end."""
    include = ["message.output_text.logprobs"]
    response, _, _ = ask(f"{THOUGHTS}Hello, \ub300\ud55c.\n\n{XML}", include=include, top_logprobs=2, tools=TOOLS,
                         **THINK)
    entries = response.output[1].content[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == "\n\nHello, \ub300\ud55c.\n\n"
    assert [entry.logprob for entry in entries] == [-0.5] * len(entries)
    assert all([one.logprob for one in entry.top_logprobs] == [-0.5, -1.5] for entry in entries)
    response, _, _ = ask("Hello.", include=include)
    assert response.output[0].content[0].logprobs[0].top_logprobs == []


# ---- input -------------------------------------------------------------------------------------------------


def test_items_become_one_conversation(ask):
    """Thoughts, text and calls that follow one another are one message of the assistant."""
    items = [{"role": "developer", "content": "Be kind."},
             {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather "},
                                                             {"type": "input_text", "text": "in Seoul?"}]},
             {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
             {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [
                 {"type": "output_text", "text": "I look.", "annotations": []}]},
             {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Seoul"}'},
             {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
             {"type": "function_call_output", "call_id": "c1", "output": "20 degrees"},
             {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]}]
    response, _, prompt = ask("It is 20 degrees.", items, instructions="Be brief.", tools=TOOLS)
    assert response.output_text == "It is 20 degrees."
    chat = app_of(ScriptedEngine()).test_client().post("/apply-template", json={
        "messages": [
            {"role": "system", "content": "Be brief.\n\nBe kind."}, {"role": "user", "content": "Weather in Seoul?"},
            {"role": "assistant", "reasoning_content": "Hm.", "content": "I look.", "tool_calls": [
                {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Seoul"}}},
                {"type": "function", "function": {"name": "now", "arguments": {}}}]},
            {"role": "tool", "content": "20 degrees"}, {"role": "tool", "content": "noon"}],
        "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER.parameters}},
                  {"type": "function", "function": {"name": "now"}}]})
    assert prompt == chat.json["prompt"] and "Hm." in prompt


def test_sealed_thoughts_come_back(ask):
    """A client that sends back no more than encrypted_content sends back the thoughts, which only this server reads."""
    response, _, _ = ask(f"{THOUGHTS}{XML}", tools=TOOLS, include=["reasoning.encrypted_content"], store=False, **THINK)
    thought, call = response.output
    sealed = {"type": "reasoning", "id": thought.id, "summary": [], "encrypted_content": thought.encrypted_content}
    items = [{"role": "user", "content": "Hi"}, sealed, call.to_dict(),
             {"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"}]
    assert "I think." in ask("Ok.", items, tools=TOOLS)[2]
    assert "encrypted_content" not in ask(f"{THOUGHTS}Hi", **THINK)[0].output[0].to_dict()
    for foreign in "gAAAAABm", "qengine.!", "qengine." + base64.b64encode(b"\xff").decode():
        with pytest.raises(openai.BadRequestError, match="not of this server") as caught:
            ask("Ok.", [items[0], sealed | {"encrypted_content": foreign}])
        assert caught.value.param == "input[1].encrypted_content"


def test_counting_tokens(scripted):
    engine, client, _ = scripted
    engine.script = "Hello."
    arguments = {"model": "m", "input": "Hi there", "instructions": "Be brief.", "tools": TOOLS}
    counted = client.responses.input_tokens.count(**arguments)
    assert counted.input_tokens == client.responses.create(**arguments).usage.input_tokens


def test_truncation(scripted):
    """With "auto", the oldest turns go where the conversation is too long; the instructions and the last turn stay."""
    engine, client, _ = scripted
    engine.script = "Hello."
    turns = [{"role": role, "content": f"number {i} " + "long " * 100}
             for i in range(60) for role in ("user", "assistant")]
    arguments = {"model": "m", "input": [*turns, {"role": "user", "content": "Last."}], "instructions": "Be brief."}
    with pytest.raises(openai.BadRequestError, match="4096") as caught:
        client.responses.create(**arguments)
    assert caught.value.param == "input"
    response = client.responses.create(**arguments, truncation="auto")
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt_ids, special=True)
    assert prompt.startswith("<|im_start|>system\nBe brief.") and "Last." in prompt and "number 59" in prompt
    assert "number 0 " not in prompt and 2500 < response.usage.input_tokens <= 4096 * 7 // 8
    assert response.truncation == "auto"
    short = arguments | {"input": turns[:2] + turns[-1:]}
    assert client.responses.create(**short, truncation="auto").usage == client.responses.create(**short).usage
    with pytest.raises(openai.BadRequestError, match="4096"):
        client.responses.create(**arguments | {"input": "long " * 5000}, truncation="auto")


# ---- tools and formats -------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice, parallel, good, bad", [
    ("required", True, [XML, f"{XML}\n{XML}"], ["Hello", ""]), ("required", False, [XML], [f"{XML}\n{XML}"]),
    ({"type": "function", "name": "now"}, True, ["<tool_call>\n<function=now>\n</function>\n</tool_call>"],
     [XML, "Hello"]),
    ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}, True, [XML],
     ["<tool_call>\n<function=now>\n</function>\n</tool_call>", "Hello"]),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]}, True,
     [XML, "Hello"], ["<tool_call>\n<function=now>\n</function>\n</tool_call>"]),
    ("auto", False, ["Hello", XML], [f"{XML}\n{XML}"]),
], ids=["required", "required-one", "named", "allowed-required", "allowed-auto", "auto-one"])
def test_what_may_be_called(ask, choice, parallel, good, bad):
    _, request, prompt = ask(good[0], tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel)
    rules = {"grammar": request.grammar, "grammar_after": request.grammar_after}
    assert all(obeys(rules, text) for text in good) and not any(obeys(rules, text) for text in bad)
    assert '"get_weather"' in prompt and '"now"' in prompt


def test_no_call(ask):
    response, request, prompt = ask(XML, tools=TOOLS, tool_choice="none")
    assert response.output_text == XML and request.grammar is None and "get_weather" not in prompt


def test_a_format_rules_the_answer(ask):
    format = {"type": "json_schema", "name": "answer", "schema": PERSON, "strict": True}
    response, request, _ = ask('{"name": "a", "age": 3}', text={"format": format, "verbosity": "low"})
    assert obeys({"grammar": request.grammar}, '{"name": "a", "age": 3}')
    assert not obeys({"grammar": request.grammar}, "Hello")
    assert response.text.format.to_dict() == format
    _, request, _ = ask("{}", text={"format": {"type": "json_object"}})
    assert obeys({"grammar": request.grammar}, '{"a": [1]}') and not obeys({"grammar": request.grammar}, "[1]")
    assert ask("Hi", text={"format": {"type": "text"}})[1].grammar is None


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_the_helpers_that_parse(scripted):
    """`parse` and `stream` read an answer into a class, and the arguments of a call into its class."""
    engine, client, run_async = scripted
    engine.script = '{"name": "a", "age": 3}'
    arguments = {"model": "m", "input": "Hi", "text_format": Person}
    assert client.responses.parse(**arguments).output_parsed == Person(name="a", age=3)
    with client.responses.stream(**arguments) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_parsed == Person(name="a", age=3)
    assert kinds.count("response.output_text.delta") > 3 and kinds[-1] == "response.completed"

    async def asynchronously(client):
        async with client.responses.stream(**arguments) as stream:
            final = await stream.get_final_response()
        return final.output_parsed, (await client.responses.parse(**arguments)).output_parsed

    assert run_async(asynchronously) == (Person(name="a", age=3),) * 2
    engine.script = XML.replace("get_weather", "Person").replace("city", "name").replace("days", "age")
    [call] = client.responses.parse(model="m", input="Hi", tools=[openai.pydantic_function_tool(Person)]).output
    assert call.parsed_arguments == Person(name='S\u00e3o "Paulo"', age=3)


# ---- kept responses ----------------------------------------------------------------------------------------


def test_a_conversation_goes_on(scripted):
    """With what was said and answered, but without the earlier instructions."""
    engine, client, _ = scripted
    engine.script = f"I look.\n\n{XML}"
    first = client.responses.create(model="m", input="Weather?", instructions="Be brief.", tools=TOOLS)
    output = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "20 degrees"}
    engine.script = "It is warm."
    with client.responses.stream(model="m", input=[output], previous_response_id=first.id, tools=TOOLS) as stream:
        second = stream.get_final_response()
    assert second.previous_response_id == first.id
    third = client.responses.create(model="m", input="Thanks.", previous_response_id=second.id, instructions="Be kind.")
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt_ids, special=True)
    texts = ["Be kind.", "Weather?", "I look.", "<function=get_weather>", "20 degrees", "It is warm.", "Thanks."]
    assert sorted(texts, key=prompt.index) == texts and "Be brief." not in prompt
    items = list(client.responses.input_items.list(third.id, order="asc", limit=2))
    assert [item.type for item in items] == ["message", "message", "function_call", "function_call_output", "message",
                                             "message"]
    assert [item.id for item in client.responses.input_items.list(third.id)] == [item.id for item in items[::-1]]
    assert client.responses.retrieve(third.id).to_dict() == third.to_dict()


def test_references(scripted):
    engine, client, _ = scripted
    engine.script = "I say so."
    first = client.responses.create(model="m", input="Hi")
    items = [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": first.output[0].id}]
    client.responses.create(model="m", input=[*items, {"role": "user", "content": "Why?"}])
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt_ids)
    assert prompt.index("Hi") < prompt.index("I say so.") < prompt.index("Why?")
    for wrong, said in (items[1:] * 2, "second time"), ([{"type": "item_reference", "id": "msg_1"}], "not kept"):
        with pytest.raises(openai.BadRequestError, match=said) as caught:
            client.responses.create(model="m", input=wrong)
        assert caught.value.param == f"input[{len(wrong) - 1}].id"


def test_what_is_not_kept(scripted):
    _, client, _ = scripted
    unkept = client.responses.create(model="m", input="Hi", store=False)
    kept = client.responses.create(model="m", input="Hi")
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(kept.id)
    client.responses.delete(kept.id)
    for id in kept.id, unkept.id, "resp_1":
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="m", input="Hi", previous_response_id=id)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
        for ask in client.responses.retrieve, client.responses.delete, client.responses.cancel, \
                client.responses.input_items.list:
            with pytest.raises(openai.NotFoundError, match="not kept"):
                ask(id)


def test_another_key_reads_nothing():
    with serving(app_of(ScriptedEngine("Secret."), keys=["one", "two"])) as (port, _):
        one, two = (official_client(port).with_options(api_key=key) for key in ("one", "two"))
        kept = one.responses.create(model="m", input="Hi")
        assert one.responses.retrieve(kept.id).output_text == "Secret."
        for read in two.responses.retrieve, two.responses.delete, two.responses.input_items.list:
            with pytest.raises(openai.NotFoundError):
                read(kept.id)
        with pytest.raises(openai.BadRequestError, match="not kept"):
            two.responses.create(model="m", input="And?", previous_response_id=kept.id)
        with pytest.raises(openai.BadRequestError, match="not kept"):
            two.responses.create(model="m", input=[{"type": "item_reference", "id": kept.output[0].id}])
        assert one.responses.create(model="m", input="And?", previous_response_id=kept.id).status == "completed"


def test_kept_responses_are_bounded(monkeypatch):
    """By number and by bytes. The key that has most loses first, and what was read last stays longest."""
    monkeypatch.setattr(stored, "MAX_BYTES", 20_000)
    monkeypatch.setattr(stored, "MAX_ONE", 8_000)
    monkeypatch.setattr(stored, "MAX_RESPONSES", 12)

    def response(id, n=1000):
        return {"id": id, "output": [{"id": f"item {id}", "text": "x" * n}]}

    store = Stored()
    assert store.keep("b", response("b0"), []) and not store.keep("b", response("large", 8000), [])
    assert store.find("b", "large") is None
    for i in range(100):
        assert store.keep("a", response(f"a{i}"), [])
        assert store.find("a", "a0") and store.n_bytes <= 20_000
    assert store.find("b", "b0") and store.find_item("b", "item b0") and store.find("a", "a99")
    assert store.find("a", "a1") is store.find_item("a", "item a1") is None
    for i in range(100):
        store.keep("a", response(f"c{i}", 1), [])
    assert store.n_responses == 12 and store.find("b", "b0")
    for owner, shelf in list(store.shelves.items()):
        for id in list(shelf.entries):
            assert store.forget(owner, id) and not store.forget(owner, id)
    assert store.n_bytes == 0 and not any(shelf.holders for shelf in store.shelves.values())


# ---- what is wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments, field, said", [
    ({"input": []}, "input", "no items"), ({"input": 3}, "input", "string"),
    ({"input": [{"role": "robot", "content": "Hi"}]}, "input[0].role", "assistant"),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"}]}, "input[0].type",
     "the server has no tools that make or take other items"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "x"}]}]}, "input[0].content[0].type",
     "the models read texts and pictures"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "missing"),
    *(({"tools": [{"type": type, "name": "f"}]}, "tools[0].type", "the server has no tools of its own")
      for type in ("custom", "web_search", "file_search", "mcp", "code_interpreter", "computer", "local_shell")),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "string"),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search_preview"}}, "tool_choice.type", "no tools of its own"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "then"}}, "tool_choice", "then"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
    ({"background": True}, "background", "while its client waits"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "no prompts are kept"),
    ({"moderation": {"model": "omni-moderation-latest"}}, "moderation", "moderated"),
    ({"context_management": [{"type": "compaction"}]}, "context_management", "does not shorten"),
    ({"reasoning": {"context": "all_turns"}}, "reasoning.context", "current_turn"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "missing"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format.schema", "not"),
    ({"include": ["thoughts"]}, "include[0]", "message.output_text.logprobs"),
    ({"top_logprobs": 21}, "top_logprobs", "20"), ({"input": "long " * 4096}, "input", "4096"),
    ({"extra_body": {"temprature": 1}}, "temprature", "did you mean 'temperature'?"),
    ({"extra_body": {"max_tokens": 1}}, "max_tokens", "unknown field"),
])
def test_what_is_wrong_is_named(scripted, arguments, field, said):
    _, client, _ = scripted
    for stream in False, True:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**{"model": "m", "input": "Hi", "stream": stream} | arguments)
        assert caught.value.param == field and said in caught.value.body["message"]


def test_what_is_accepted_without_effect(ask):
    extra = {"max_tool_calls": 3, "service_tier": "auto", "user": "u", "safety_identifier": "s",
             "prompt_cache_key": "k", "prompt_cache_retention": "24h", "context_management": [],
             "background": False, "conversation": None}
    _, plain, _ = ask("Hello.")
    _, request, _ = ask("Hello.", extra_body=extra)
    assert request.prompt_ids == plain.prompt_ids and request.grammar is None


def test_a_stream_that_fails():
    """It says so in response.failed, and the official client raises the error that follows."""
    def script(prompt):
        raise EngineStopped("the card fell off the bus")

    with serving(app_of(PacedEngine(script))) as (port, _):
        stream = official_client(port).responses.create(model="m", input="Hi", stream=True)
        events = []
        with pytest.raises(openai.APIError, match="fell off"):
            for event in stream:
                events.append(event)
        assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
        failed = events[-1].response
        assert (failed.status, failed.error.code) == ("failed", "server_error") and "bus" in failed.error.message
        with pytest.raises(openai.NotFoundError):
            official_client(port).responses.retrieve(failed.id)


def test_queries_of_lists(scripted):
    _, client, _ = scripted
    port = client.base_url.port
    id = client.responses.create(model="m", input=[{"role": "user", "content": c} for c in "abc"]).id
    for query, status in (("limit=2", 200), ("limit=0", 400), ("limit=x", 400), ("order=up", 400), ("after=x", 400)):
        assert send(port, "GET", f"{PATH}/{id}/input_items?{query}")[0] == status
    body = send(port, "GET", f"{PATH}/{id}/input_items?limit=2")[2]
    assert [item["content"][0]["text"] for item in body["data"]] == ["c", "b"] and body["has_more"]
    body = send(port, "GET", f"{PATH}/{id}/input_items?after={body['last_id']}")[2]
    assert [item["content"][0]["text"] for item in body["data"]] == ["a"] and not body["has_more"]
    assert send(port, "GET", f"{PATH}/{id}?stream=true")[0] == 400
