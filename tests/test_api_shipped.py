"""Both official clients against the model that ships, on the emulated card: every feature of both protocols, at once
and asynchronously, whole and streamed.

    what                          OpenAI                                    Anthropic
    text, length, usage, cache    test_text_and_usage                       test_a_message
    sampling, seeds               test_sampling, test_biases_and_penalties  test_a_message_is_sampled
    stop strings                  test_stop_strings                         test_stop_sequences
    thoughts and their switches   test_thoughts                             test_thinking
    JSON, schemas                 test_forms_of_the_answer                  test_a_message_in_a_schema
    tools, choices, results       test_tools, test_a_call_and_its_result    test_messages_with_tools
    several answers               test_several_answers                      (it has none)
    log-probabilities             test_log_probabilities                    (it has none)
    completions                   test_completions                          (it has none)
    counting tokens, models       test_behind_the_protocols                 test_a_message
    errors                        test_errors                               test_errors
    responses                     test_responses, test_kept_responses       (it has none)

What the model says is not tested: only that the form is right, and that all four ways say the same.
"""

import asyncio
import json

import anthropic
import jsonschema
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import qengine
from tests.clients import app_of, official_clients, send, serving
from tests.four_ways import blocks_of, chat_in_four_ways, message_in_four_ways, respond_in_four_ways
from tests.scripted import shipped

WEATHER = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 30}, "days": {"type": "integer"}},
           "required": ["city", "days"]}
MAIL = {"type": "object", "properties": {"to": {"enum": ["Ann", "Bob"]}, "urgent": {"type": "boolean"}},
        "required": ["to", "urgent"]}
SCHEMAS = {"get_weather": WEATHER, "send_mail": MAIL}
TOOLS = [{"type": "function", "function": {"name": name, "description": text, "parameters": SCHEMAS[name]}}
         for name, text in (("get_weather", "Get the weather."), ("send_mail", "Send a mail."))]
ASK_WEATHER = [{"role": "user", "content": "Please get the weather with city Paris and days 3."}]
ASK_SUM = [{"role": "user", "content": "What is 17 + 25?"}]
WHAT = [{"role": "user", "content": "What is qengine?"}]
THINK = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
PERSON = {"type": "object", "properties": {
    "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 3}},
    "required": ["name", "age", "pets"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
NAMED = {"type": "function", "function": {"name": "send_mail"}}


@pytest.fixture(scope="module")
def port():
    engine = qengine.load(card="emulated", slots=4, progress=False)
    with serving(app_of(engine)) as (port, _):
        yield port
    engine.close()


def n_tokens(text):
    return len(shipped().tokenizer.encode(text))


# ---- OpenAI ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clients(port):
    with official_clients(openai.OpenAI, openai.AsyncOpenAI, port) as clients:
        yield clients


@pytest.fixture(scope="module")
def chat(clients):
    """chat(messages, **arguments): (thought, text, calls, reason) of the answer, or answers, and the usage."""
    def chat(messages, **arguments):
        arguments = {"messages": messages, "temperature": 0, "max_tokens": 150} | arguments
        choices, usage = chat_in_four_ways(*clients, **arguments)
        return (*choices[0], usage) if len(choices) == 1 else (choices, usage)

    return chat


def test_text_and_usage(chat):
    long = [{"role": "system", "content": "Be brief. " * 60}, *WHAT]
    thought, text, calls, reason, usage = chat(long, user="someone", metadata={"a": "b"})
    assert text and not text.isspace() and (thought, calls, reason) == (None, [], "stop")
    assert usage["completion_tokens"] == n_tokens(text) + 1
    prompt = shipped().template.render(long)
    assert usage["prompt_tokens"] == n_tokens(prompt) and usage["total_tokens"] == n_tokens(prompt) + n_tokens(text) + 1
    *_, again = chat(long)
    assert usage["prompt_tokens"] - again["prompt_tokens_details"]["cached_tokens"] <= 64
    for name in "max_tokens", "max_completion_tokens":
        _, cut, _, reason, usage = chat(long, **{name: 5})
        assert (reason, usage["completion_tokens"]) == ("length", 5) and text.startswith(cut)


def test_a_conversation_goes_on(chat):
    _, text, _, _, _ = chat(WHAT)
    _, next_text, _, reason, usage = chat([*WHAT, {"role": "assistant", "content": text}, *ASK_SUM])
    assert next_text and reason == "stop" and usage["prompt_tokens"] > n_tokens(text)


@pytest.mark.parametrize("sampling", [
    {"temperature": 1}, {"temperature": 1.5, "top_p": 0.9},
    {"temperature": 1.2, "extra_body": {"top_k": 40, "min_p": 0.01}}])
def test_sampling(chat, sampling):
    _, greedy, _, _, _ = chat(WHAT, max_tokens=12)
    first, *_ = shipped().tokenizer.encode(greedy)      # without it the model does not know it all by heart
    said = [chat(WHAT, max_tokens=12, logit_bias={first: -100}, seed=seed, **sampling)[1] for seed in (1, 2, 3)]
    assert len(set(said)) > 1
    for narrow in {"top_p": 0}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1}}:
        assert chat(WHAT, max_tokens=12, seed=1, **{"temperature": 1} | narrow)[1] == greedy


def test_biases_and_penalties(chat):
    tokenizer = shipped().tokenizer
    _, usual, _, _, _ = chat(WHAT, max_tokens=12)
    first, *_ = tokenizer.encode(usual)
    _, banned, _, _, _ = chat(WHAT, max_tokens=12, logit_bias={first: -100})
    assert first not in tokenizer.encode(banned)
    for penalty in {"presence_penalty": 2}, {"frequency_penalty": 2}, {"extra_body": {"repetition_penalty": 2}}:
        assert chat(WHAT, max_tokens=12, logit_bias={first: 12}, **penalty)[1]
    _, forced, _, _, _ = chat(WHAT, max_tokens=4, logit_bias={first: 100})
    assert tokenizer.encode(forced) == [first] * 4
    _, varied, _, _, _ = chat(WHAT, max_tokens=4, logit_bias={first: 6}, presence_penalty=2, frequency_penalty=2,
                              extra_body={"repetition_penalty": 10})
    assert varied != forced


def test_stop_strings(chat):
    _, text, _, _, _ = chat(WHAT)
    stop = text[len(text) // 2:][:5]            # wherever the tokens lie
    for stops in stop, ["never said", stop]:
        _, cut, _, reason, _ = chat(WHAT, stop=stops)
        assert (cut, reason) == (text[:text.index(stop)], "stop")
    thought, text, _, _, _ = chat(ASK_SUM, **THINK)
    assert thought and text
    for stop in (thought[1:4], text[-3:]):      # of the text alone
        cut = text.partition(stop)[0]
        assert chat(ASK_SUM, stop=stop, **THINK)[:2] == (thought, cut)


def test_thoughts(chat):
    thought, text, _, reason, usage = chat(ASK_SUM, **THINK)
    assert thought and text and reason == "stop"
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    switched = [{"role": "user", "content": ASK_SUM[0]["content"] + " /think"}]
    for messages, arguments in (switched, {}), (ASK_SUM, {"reasoning_effort": "low"}):
        assert chat(messages, **arguments)[:2] == (thought, text)
    plain = chat(ASK_SUM)[:2]
    assert plain[0] is None
    switched = [{"role": "user", "content": ASK_SUM[0]["content"] + " /no_think"}]
    for messages, arguments in (switched, {}), (ASK_SUM, {"reasoning_effort": "none"}):
        assert chat(messages, **arguments)[:2] == plain
    assert chat(switched, **THINK)[:2] == (thought, text)       # what a field says goes before it


@pytest.mark.parametrize("extra", [{}, THINK], ids=["plain", "thinks"])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "seed": 1}], ids=["greedy", "sampled"])
def test_forms_of_the_answer(chat, extra, sampling):
    messages = ASK_SUM if extra else WHAT       # not of everything it thinks
    thought, text, _, reason, _ = chat(messages, response_format=FORMAT, max_tokens=300, **sampling, **extra)
    jsonschema.validate(json.loads(text), PERSON)
    assert reason == "stop" and bool(thought) == bool(extra)
    short = {token: 100 for token in shipped().tokenizer.encode("{}")} if not extra else {}
    _, text, _, reason, _ = chat(messages, response_format={"type": "json_object"}, logit_bias=short, max_tokens=40,
                                 **sampling, **extra)
    assert text.startswith("{") and (extra or json.loads(text) == {})


@pytest.mark.parametrize("extra", [{}, THINK], ids=["plain", "thinks"])
@pytest.mark.parametrize("choice, parallel, sampling", [
    ("required", True, {}), ("required", False, {"temperature": 1, "seed": 2}),
    (NAMED, True, {"temperature": 1, "seed": 3})],
    ids=["required", "one", "named"])
def test_tools(chat, extra, choice, parallel, sampling):
    """Calls that the model would not make."""
    _, text, calls, reason, _ = chat(WHAT, tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel,
                                     max_tokens=400, stop=["\n", "<"], **sampling, **extra)
    assert (text, reason) == ("", "tool_calls") and calls
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[name])
    if choice == NAMED:
        assert [name for name, _ in calls] == ["send_mail"]
    assert len(calls) == 1 or parallel
    _, text, calls, reason, _ = chat(ASK_WEATHER, tools=TOOLS, tool_choice="none", **extra)
    assert text and calls == []


@pytest.mark.parametrize("extra", [{}, THINK], ids=["plain", "thinks"])
def test_a_call_and_its_result(chat, extra):
    """A call that the model makes by itself, and what it makes of the result."""
    _, _, calls, reason, _ = chat(ASK_WEATHER, tools=TOOLS, **extra)
    assert reason == "tool_calls" and [name for name, _ in calls] == ["get_weather"]
    jsonschema.validate(calls[0][1], WEATHER)
    function = {"name": "get_weather", "arguments": json.dumps(calls[0][1])}
    turns = [{"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
             {"role": "tool", "tool_call_id": "call_1", "content": '{"weather": "sunny"}'}]
    _, text, calls, reason, usage = chat([*ASK_WEATHER, *turns], tools=TOOLS)
    assert (calls, reason) == ([], "stop") and "sunny" in text
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] < 128       # of the tools, nothing


def test_a_call_streams(clients):
    stream = clients[0].chat.completions.create(model="m", messages=WHAT, tools=TOOLS, tool_choice=NAMED, stream=True)
    deltas = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.function.name for call in deltas if call.function.name] == ["send_mail"]
    pieces = [call.function.arguments for call in deltas if call.function.arguments]
    assert len(pieces) > 3
    jsonschema.validate(json.loads("".join(pieces)), MAIL)


def test_several_answers(chat):
    choices, usage = chat(WHAT, n=3, seed=5, temperature=1, max_tokens=12)
    assert [reason for *_, reason in choices] == ["length"] * 3 and usage["completion_tokens"] == 36
    alone = [chat(WHAT, seed=seed, temperature=1, max_tokens=12)[1] for seed in (5, 6, 7)]
    assert [text for _, text, _, _ in choices] == alone


def test_answers_under_a_schema_are_the_same_together_and_alone(clients):
    """Streamed and whole, many at once, some of them free."""
    def arguments(seed):
        ruled = {"response_format": FORMAT} if seed % 3 else {}
        return {"model": "m", "messages": WHAT, "temperature": 1.2, "seed": seed, "max_tokens": 40, **ruled}

    async def together(client):
        async def ask(seed):
            if seed % 2:
                return (await client.chat.completions.create(**arguments(seed))).choices[0].message.content
            chunks = await client.chat.completions.create(**arguments(seed), stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        return await asyncio.gather(*map(ask, range(8)))

    alone = [clients[0].chat.completions.create(**arguments(seed)).choices[0].message.content for seed in range(8)]
    assert clients[1](together) == alone


def both(clients, ask):
    """What `ask` gets from either of two clients: an answer, or all chunks of a stream."""
    async def asynchronously(client):
        answer = await ask(client)
        return [chunk async for chunk in answer] if hasattr(answer, "__aiter__") else answer

    answer = ask(clients[0])
    return [list(answer) if hasattr(answer, "__next__") else answer, clients[1](asynchronously)]


def test_log_probabilities(clients):
    arguments = {"model": "m", "messages": WHAT, "temperature": 0, "max_tokens": 5, "logprobs": True, "top_logprobs": 3}
    whole, streams = (both(clients, lambda client: client.chat.completions.create(**arguments, stream=stream))
                      for stream in (False, True))
    told = [answer.choices[0].logprobs.content for answer in whole]
    told += [[entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
             for chunks in streams]
    assert told[1:] == told[:1] * 3
    assert "".join(entry.token for entry in told[0]) == whole[0].choices[0].message.content
    for entry in told[0]:
        likeliest = [one.logprob for one in entry.top_logprobs]
        assert likeliest == sorted(likeliest, reverse=True) and entry.logprob == likeliest[0] <= 0


@pytest.mark.parametrize("more", [{}, {"n": 2, "seed": 4, "temperature": 1}, {"logprobs": 2}, {"stop": " "},
                                  {"prompt": ["One.", "Two."]}, {"prompt": [5, 300, 77]}], ids=str)
def test_completions(clients, more):
    arguments = {"model": "m", "prompt": "The GPU", "temperature": 0, "max_tokens": 8} | more
    whole, streams = (both(clients, lambda client: client.completions.create(**arguments, stream=stream))
                      for stream in (False, True))
    told = [{choice.index: choice.text for choice in answer.choices} for answer in whole]
    told += [{i: "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == i)
              for i in told[0]} for chunks in streams]
    n_prompts = 2 if "Two." in more.get("prompt", ()) else 1
    assert told[1:] == told[:1] * 3 and len(told[0]) == n_prompts * more.get("n", 1)
    assert all(choice.finish_reason in ("stop", "length") for choice in whole[0].choices)
    if "logprobs" in more:
        [choice] = whole[0].choices
        assert "".join(choice.logprobs.tokens) == choice.text
        assert [max(likeliest.values()) for likeliest in choice.logprobs.top_logprobs] == choice.logprobs.token_logprobs


def test_behind_the_protocols(port, clients):
    for models in map(list, both(clients, lambda client: client.models.list())):
        assert [model.id for model in models] == [shipped().config.name] and models[0].created > 0
    text = "대한 <|im_end|>"
    ids = send(port, "POST", "/tokenize", {"content": text})[2]["tokens"]
    assert ids == shipped().tokenizer.encode(text)
    assert send(port, "POST", "/detokenize", {"tokens": ids})[2] == {"content": text, "prompt": text}
    prompt = send(port, "POST", "/apply-template", {"messages": WHAT, "tools": TOOLS})[2]["prompt"]
    assert prompt == shipped().template.render(WHAT, tools=TOOLS)
    assert send(port, "GET", "/health")[2]["status"] == "ok"
    metrics = clients[0].with_options(base_url=f"http://127.0.0.1:{port}").get("/metrics", cast_to=str)
    assert "qengine:generation_tokens" in {family.name for family in text_string_to_metric_families(metrics)}


# ---- OpenAI's responses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("effort", ["none", "low"])
def test_responses(clients, effort):
    """Text, a call that is demanded and an answer in a schema, with and without thoughts."""
    arguments = {"model": "m", "temperature": 0, "max_output_tokens": 400, "reasoning": {"effort": effort}}
    kinds = ["reasoning"] * (effort == "low")
    response = respond_in_four_ways(*clients, input="What is 17 + 25?", **arguments)
    assert [item.type for item in response.output] == [*kinds, "message"] and response.status == "completed"
    assert (response.usage.output_tokens_details.reasoning_tokens > 0) == bool(kinds)
    tools = [{"type": "function", "name": name, "parameters": SCHEMAS[name], "strict": True} for name in SCHEMAS]
    response = respond_in_four_ways(*clients, input=WHAT[0]["content"], tools=tools, tool_choice={
        "type": "function", "name": "send_mail"}, **arguments)
    assert response.output[-1].type == "function_call"
    jsonschema.validate(json.loads(response.output[-1].arguments), MAIL)
    format = {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}
    response = respond_in_four_ways(*clients, input="A person.", text={"format": format}, **arguments)
    jsonschema.validate(json.loads(response.output_text), PERSON)


def test_kept_responses(clients):
    """The prompt of a response that goes on with another is in the cache, as far as that one went."""
    client, _ = clients
    arguments = {"model": "m", "temperature": 0, "reasoning": {"effort": "none"}, "instructions": "Be brief. " * 60}
    first = client.responses.create(input=WHAT, **arguments)
    second = client.responses.create(input="What is 17 + 25?", previous_response_id=first.id, **arguments)
    whole = client.responses.create(input=[*WHAT, *first.output, {"role": "user", "content": "What is 17 + 25?"}],
                                    **arguments)
    assert second.output_text == whole.output_text
    assert second.usage.input_tokens == whole.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens // 64 * 64 - 64


# ---- Anthropic ---------------------------------------------------------------------------------------------


ANTHROPIC_TOOLS = [{"name": tool["function"]["name"], "description": tool["function"]["description"],
                    "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
ENABLED = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


@pytest.fixture(scope="module")
def anthropics(port):
    with official_clients(anthropic.Anthropic, anthropic.AsyncAnthropic, port, "") as clients:
        yield clients


@pytest.fixture(scope="module")
def message(anthropics):
    """message(messages, **arguments): its blocks, and all of it. extra: fields that the client has no name for."""
    def message(messages, extra=None, **arguments):
        message = message_in_four_ways(*anthropics, messages=messages, extra_body={"temperature": 0} | (extra or {}),
                                       **{"max_tokens": 150} | arguments)
        return blocks_of(message), message

    return message


def test_a_message(message, chat, anthropics):
    system = "Be brief. " * 60
    blocks, whole = message(WHAT, system=system)
    assert blocks == [("text", chat([{"role": "system", "content": system}, *WHAT])[1])]
    assert (whole.role, whole.stop_reason, whole.stop_sequence) == ("assistant", "end_turn", None)
    _, again = message(WHAT, system=[{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}])
    assert again.usage.cache_read_input_tokens > 64 >= again.usage.input_tokens
    counts = both(anthropics, lambda client: client.messages.count_tokens(model="m", messages=WHAT, system=system))
    n_prompt = again.usage.input_tokens + again.usage.cache_read_input_tokens
    assert [count.input_tokens for count in counts] == [n_prompt] * 2
    _, cut = message(WHAT, system=system, max_tokens=5)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 5)
    turns = [*WHAT, {"role": "assistant", "content": blocks[0][1]}, *ASK_SUM]
    assert message(turns, system=system)[1].stop_reason == "end_turn"


@pytest.mark.parametrize("sampling", [{"temperature": 1, "seed": 3}, {"temperature": 1.5, "top_p": 0.9, "seed": 4},
                                      {"temperature": 1, "top_k": 40, "min_p": 0.01, "seed": 5}], ids=str)
def test_a_message_is_sampled(message, chat, sampling):
    """The same tokens as through the other protocol."""
    blocks, _ = message(WHAT, sampling, max_tokens=12)
    assert blocks == [("text", chat(WHAT, max_tokens=12, extra_body=sampling)[1])]


def test_stop_sequences(message):
    [(_, text)], _ = message(WHAT)
    stop = text[len(text) // 2:][:5]
    blocks, whole = message(WHAT, stop_sequences=["never said", stop])
    assert blocks == [("text", text[:text.index(stop)])]
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", stop)


def test_thinking(message, chat):
    thought, text, _, _, _ = chat(ASK_SUM, **THINK)
    blocks, whole = message(ASK_SUM, **ENABLED)
    assert blocks == [("thinking", thought), ("text", text)]
    assert 0 < whole.usage.output_tokens_details.thinking_tokens < whole.usage.output_tokens
    assert message(ASK_SUM, thinking={"type": "adaptive"})[0] == blocks
    assert message(ASK_SUM, thinking={"type": "adaptive", "display": "omitted"})[0] == blocks[1:]
    assert message(ASK_SUM, thinking={"type": "disabled"})[0] == message(ASK_SUM)[0] == [("text", chat(ASK_SUM)[1])]
    said = [block.model_dump() for block in whole.content]
    assert message([*ASK_SUM, {"role": "assistant", "content": said}, *WHAT], **ENABLED)[1].stop_reason == "end_turn"


@pytest.mark.parametrize("extra", [{}, ENABLED], ids=["plain", "thinks"])
def test_a_message_in_a_schema(message, extra):
    blocks, whole = message(ASK_SUM if extra else WHAT, max_tokens=300, **extra,
                            output_config={"format": {"type": "json_schema", "schema": PERSON}})
    jsonschema.validate(json.loads(blocks[-1][1]), PERSON)
    assert [kind for kind, _ in blocks] == ["thinking"] * bool(extra) + ["text"] and whole.stop_reason == "end_turn"


@pytest.mark.parametrize("extra", [{}, ENABLED], ids=["plain", "thinks"])
@pytest.mark.parametrize("choice", [
    {"type": "any"}, {"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "send_mail"}],
    ids=["any", "one", "named"])
def test_messages_with_tools(message, extra, choice):
    blocks, whole = message(WHAT, tools=ANTHROPIC_TOOLS, tool_choice=choice, max_tokens=400, **extra)
    calls = [said for kind, said in blocks if kind == "tool_use"]
    assert calls and whole.stop_reason == "tool_use" and "text" not in dict(blocks)
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[name])
        assert name == choice.get("name", name)
    assert len(calls) == 1 or choice == {"type": "any"}
    blocks, _ = message(ASK_WEATHER, tools=ANTHROPIC_TOOLS, tool_choice={"type": "none"}, **extra)
    assert "tool_use" not in dict(blocks)


@pytest.mark.parametrize("extra", [{}, ENABLED], ids=["plain", "thinks"])
def test_a_message_with_a_call_and_its_result(message, extra):
    blocks, whole = message(ASK_WEATHER, tools=ANTHROPIC_TOOLS, **extra)
    kind, (name, arguments) = blocks[-1]
    assert (kind, name, whole.stop_reason) == ("tool_use", "get_weather", "tool_use")
    jsonschema.validate(arguments, WEATHER)
    result = {"type": "tool_result", "tool_use_id": whole.content[-1].id, "content": '{"weather": "sunny"}'}
    said = [block.model_dump() for block in whole.content]
    turns = [*ASK_WEATHER, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    blocks, whole = message(turns, tools=ANTHROPIC_TOOLS, **extra)
    assert blocks[-1][0] == "text" and "sunny" in blocks[-1][1] and whole.stop_reason == "end_turn"


# ---- both --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_errors(clients, anthropics, stream):
    for wrong, field in (({"temperature": 3}, "temperature"), ({"stop": [""]}, "stop[0]"),
                         ({"messages": []}, "messages"),
                         ({"tools": TOOLS, "tool_choice": NAMED | {"function": {"name": "f"}}}, "tool_choice")):
        arguments = {"model": "m", "messages": WHAT, "stream": stream} | wrong
        for ask in (lambda: clients[0].chat.completions.create(**arguments),
                    lambda: clients[1](lambda client: client.chat.completions.create(**arguments))):
            with pytest.raises(openai.BadRequestError) as caught:
                ask()
            assert caught.value.param == field and field in caught.value.body["message"] and caught.value.request_id
        arguments = {"model": "m", "messages": WHAT, "max_tokens": 5, "stream": stream, "extra_body": {"oops": 1}}
        for ask in (lambda: anthropics[0].messages.create(**arguments),
                    lambda: anthropics[1](lambda client: client.messages.create(**arguments))):
            with pytest.raises(anthropic.BadRequestError, match="oops") as caught:
                ask()
            assert caught.value.request_id
