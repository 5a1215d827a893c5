"""Both official clients against the model that ships, on the emulated card: what only a real engine can show."""

import asyncio
import json

import anthropic
import jsonschema
import openai
import pytest

import qengine
from tests.scripted import official_clients, serving_app, shipped

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
           "required": ["city", "days"]}
MAIL = {"type": "object", "properties": {"to": {"enum": ["Ann", "Bob"]}, "urgent": {"type": "boolean"}},
        "required": ["to", "urgent"]}
TOOLS = [{"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}
         for name, text, parameters in (("get_weather", "Get the weather.", WEATHER), ("send_mail", "Send a mail.", MAIL))]
ASK_WEATHER = [{"role": "user", "content": "Please get the weather with city Paris and days 3."}]
ASK_SUM = [{"role": "user", "content": "What is 17 + 25?"}]
WHAT = [{"role": "user", "content": "What is qengine?"}]
THINK = {"chat_template_kwargs": {"enable_thinking": True}}
PERSON = {"type": "object", "properties": {
    "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 3}},
    "required": ["name", "age", "pets"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


@pytest.fixture(scope="module")
def port():
    engine = qengine.load(card="emulated", slots=4, progress=False)
    with serving_app(qengine.create_app(engine)) as port:
        yield port
    engine.close()


@pytest.fixture(scope="module")
def clients(port):
    with official_clients(openai.OpenAI, openai.AsyncOpenAI, port) as clients:
        yield clients


@pytest.fixture(scope="module")
def chat(clients):
    """The message and the finish reason of an answer, and its usage."""
    def chat(messages, extra=None, **arguments):
        arguments = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 150} | arguments
        answer = clients[0].chat.completions.create(**arguments, extra_body=extra)
        return answer.choices[0].message, answer.choices[0].finish_reason, answer.usage

    return chat


def called(message):
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


@pytest.mark.parametrize("thinks", [False, True])
def test_a_tool_is_called_and_its_result_told(chat, thinks):
    message, reason, _ = chat(ASK_WEATHER, THINK if thinks else None, tools=TOOLS)
    assert called(message) == [("get_weather", {"city": "Paris", "days": 3})]
    assert (reason, message.content) == ("tool_calls", None)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": '{"weather": "sunny"}'}
    message, reason, usage = chat([*ASK_WEATHER, message.model_dump(exclude_none=True), result], tools=TOOLS)
    assert (message.content, reason) == ("The weather is sunny.", "stop")
    assert usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens < 128       # of the tools, nothing


@pytest.mark.parametrize("extra", [None, THINK])
def test_a_call_that_the_model_would_not_make(chat, extra):
    message, reason, _ = chat(WHAT, extra, tools=TOOLS, tool_choice="required")
    assert reason == "tool_calls" and called(message)[0][0] in ("get_weather", "send_mail")
    named = {"type": "function", "function": {"name": "send_mail"}}
    message, _, _ = chat(WHAT, extra, tools=TOOLS, tool_choice=named, temperature=1, seed=3)
    [(name, arguments)] = called(message)
    jsonschema.validate(arguments, MAIL)
    assert name == "send_mail"


def test_a_call_streams(clients):
    stream = clients[0].chat.completions.create(model="m", messages=ASK_WEATHER, tools=TOOLS, temperature=0, stream=True)
    deltas = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.function.name for call in deltas if call.function.name] == ["get_weather"]
    pieces = [call.function.arguments for call in deltas if call.function.arguments]
    assert len(pieces) > 3 and json.loads("".join(pieces)) == {"city": "Paris", "days": 3}


@pytest.mark.parametrize("extra", [None, THINK])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_schema_holds(chat, extra, temperature):
    for seed in range(3 if temperature else 1):
        message, reason, _ = chat(WHAT, extra, response_format=FORMAT, temperature=temperature, seed=seed)
        jsonschema.validate(json.loads(message.content), PERSON)
        assert reason == "stop"


def test_answers_under_a_schema_are_the_same_together_and_alone(clients):
    """Streamed and whole, many at once, some of them free."""
    def arguments(seed):
        ruled = {"response_format": FORMAT} if seed % 3 else {}
        return {"model": "m", "messages": WHAT, "temperature": 1.2, "seed": seed, "max_tokens": 60, **ruled}

    async def together():
        async with clients[1]() as client:
            async def ask(seed):
                if seed % 2:
                    return (await client.chat.completions.create(**arguments(seed))).choices[0].message.content
                chunks = await client.chat.completions.create(**arguments(seed), stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

            return await asyncio.gather(*map(ask, range(8)))

    alone = [clients[0].chat.completions.create(**arguments(seed)).choices[0].message.content for seed in range(8)]
    assert asyncio.run(together()) == alone


def test_thoughts_and_stop_strings(chat):
    """The sum of the thoughts holds the stop strings, the answer one of them."""
    message, _, usage = chat(ASK_SUM, THINK)
    assert (message.reasoning_content, message.content) == ("17 + 25 = 42", "The answer is 42.")
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    message, reason, _ = chat(ASK_SUM, THINK, stop=["+", "2"])
    assert (message.reasoning_content, message.content, reason) == ("17 + 25 = 42", "The answer is 4", "stop")
    switched, _, _ = chat([{"role": "user", "content": "What is 17 + 25? /think"}])
    assert switched.reasoning_content == "17 + 25 = 42"


def test_log_probabilities(clients):
    answer = clients[0].chat.completions.create(
        model="m", messages=WHAT, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    for entry in entries:
        likeliest = [one.logprob for one in entry.top_logprobs]
        assert likeliest == sorted(likeliest, reverse=True) and entry.logprob == likeliest[0] <= 0


def test_biases_and_penalties(chat):
    tokenizer = shipped().tokenizer
    usual, _, _ = chat(WHAT, max_tokens=12)
    first, *_ = tokenizer.encode(usual.content)
    banned, _, _ = chat(WHAT, max_tokens=12, logit_bias={first: -100})
    assert first not in tokenizer.encode(banned.content)
    penalised, _, _ = chat(WHAT, {"repetition_penalty": 2}, max_tokens=12, presence_penalty=2, frequency_penalty=2)
    assert penalised.content != usual.content


def test_anthropics_client(port):
    tools = [{"name": "get_weather", "description": "Get the weather.", "input_schema": WEATHER}]
    with official_clients(anthropic.Anthropic, anthropic.AsyncAnthropic, port, "") as (client, _):
        arguments = {"model": "m", "max_tokens": 100, "extra_body": {"temperature": 0}}
        with client.messages.stream(messages=ASK_WEATHER, tools=tools, **arguments) as stream:
            message = stream.get_final_message()
        [call] = message.content
        assert (call.name, call.input, message.stop_reason) == ("get_weather", {"city": "Paris", "days": 3}, "tool_use")
        thinking = {"type": "enabled", "budget_tokens": 1024}
        message = client.messages.create(messages=ASK_SUM, thinking=thinking, **arguments)
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.content[0].thinking == "17 + 25 = 42" and message.content[1].text == "The answer is 42."
        forced = client.messages.create(messages=WHAT, tools=tools, tool_choice={"type": "any"}, **arguments)
        assert forced.content[0].type == "tool_use" and forced.usage.cache_read_input_tokens > 0
