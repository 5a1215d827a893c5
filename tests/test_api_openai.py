"""OpenAI's protocol: the official client, at once and asynchronously, whole and streamed, against a scripted engine."""

import json
import re

import openai
import pytest

from api.chat import take_switches
from api.openai import MAX_CHOICES, read_choice
from engine.request import RequestError
from engine.template import ChatTemplate
from tests.calls import CALL, JSON, PERSON, WEATHER, XML
from tests.clients import CHAT, TEXT, app_of, scripted_clients
from tests.four_ways import chat_in_four_ways, told
from tests.paced import PacedEngine
from tests.scripted import ScriptedEngine, obeys, shipped

HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER.parameters}},
         {"type": "function", "function": {"name": "now"}}]
THINK = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}


@pytest.fixture(scope="module")
def scripted():
    """(engine, client, what runs a function of an asynchronous one)"""
    engine = ScriptedEngine()
    with scripted_clients(engine, openai.OpenAI, openai.AsyncOpenAI) as clients:
        yield engine, *clients


@pytest.fixture
def ask(scripted):
    """ask(script, **arguments) of a chat; gives ((choices, usage), request)."""
    engine, *clients = scripted

    def ask(script, messages=HI, **arguments):
        engine.script = script
        engine.requests.clear()
        return chat_in_four_ways(*clients, messages=messages, **arguments), engine.requests[0]

    return ask


# ---- what is said ------------------------------------------------------------------------------------------


def test_text(ask):
    (choices, usage), request = ask("Hello, \ub300\ud55c.\n")
    n_answer = len(shipped().tokenizer.encode("Hello, \ub300\ud55c.\n")) + 1
    assert choices == [(None, "Hello, \ub300\ud55c.\n", [], "stop")]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(request.prompt_ids), n_answer)
    assert usage["total_tokens"] == len(request.prompt_ids) + n_answer
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


def test_timings_are_those_of_llama_cpp():
    """In a whole answer and in the last chunk of a stream, with usage and without, of chats and of texts."""
    engine = PacedEngine("one two three", pace=0.02, delay=0.1)         # whole pages of its prompts count as cached
    web, long = app_of(engine).test_client(), "word " * 100
    for path, said in (CHAT, {"messages": [{"role": "user", "content": long}]}), (TEXT, {"prompt": long}):
        whole = web.post(path, json=said).json
        streams = [web.post(path, json=said | more | {"stream": True}).text
                   for more in ({}, {"stream_options": {"include_usage": True}})]
        found = [[whole], *(list(map(json.loads, re.findall("^data: ({.*)$", text, re.M))) for text in streams)]
        for generation, (*others, last) in zip(engine.generations[-3:], found, strict=True):
            assert not any("timings" in other for other in others)
            timings = last["timings"]
            n_prompt, n = generation.n_prompt - generation.n_cached, generation.n_generated
            assert (timings["prompt_n"], timings["predicted_n"]) == (n_prompt, n)
            assert 0 < timings["cache_n"] == generation.n_cached
            assert timings["prompt_ms"] >= 100
            assert timings["predicted_ms"] == pytest.approx(1e3 * generation.timings().answer, abs=0.01) != 0
            assert timings["prompt_n"] == pytest.approx(timings["prompt_per_second"] * timings["prompt_ms"] / 1e3, 1e-3)
            assert n - 1 == pytest.approx(timings["predicted_per_second"] * timings["predicted_ms"] / 1e3, rel=1e-3)
            assert timings["wait_ms"] == 0 and "draft_n" not in timings


def test_timings_say_nothing_that_was_not_measured():
    """An answer of one token has no speed, a prompt that is repeated alone has no answer, and several answers share the
    card."""
    engine = ScriptedEngine("Hello.")
    engine.checks = (3, 2), (1, 0)
    web, said = app_of(engine).test_client(), {"prompt": "Hi"}
    timings = web.post(TEXT, json=said | {"max_tokens": 1}).json["timings"]
    assert timings["predicted_n"] == 1 and timings["predicted_ms"] == 0 and timings["predicted_per_second"] is None
    assert timings["predicted_per_token_ms"] is None and (timings["draft_n"], timings["draft_n_accepted"]) == (4, 2)
    for more in {"n": 2}, {"echo": True, "max_tokens": 0}:
        assert "timings" not in web.post(TEXT, json=said | more).json


def test_drafts_count_as_predictions():
    """Those of all answers of a request. A request may limit them."""
    engine = ScriptedEngine("Hello.")
    engine.checks = (3, 2), (1, 0), (2, 2)
    for path, said in (CHAT, {"messages": HI}), (TEXT, {"prompt": "Hi"}):
        answer = app_of(engine).test_client().post(path, json=said | {"n": 2, "draft": 3}).json
        details = answer["usage"]["completion_tokens_details"]
        assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (8, 4)
        assert [request.draft for request in engine.requests[-2:]] == [3, 3]
        for wrong in -1, 8, 1.5, "auto", True:
            refused = app_of(engine).test_client().post(path, json=said | {"draft": wrong})
            assert (refused.status_code, refused.json["error"]["param"]) == (400, "draft")


def test_thoughts(ask):
    (choices, usage), request = ask("I think.\n</think>\n\nHello.", **THINK)
    assert choices == [("I think.", "Hello.", [], "stop")]
    tokenizer = shipped().tokenizer
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(tokenizer.encode("I think.\n</think>"))
    assert request.stop_after == tokenizer.tags["</think>"]
    assert ask("I think.\n</think>\n\nHello.")[0][0] == [(None, "I think.\n</think>\n\nHello.", [], "stop")]


def test_stop_strings_where_the_model_opens_its_thoughts_itself():
    template = ChatTemplate("{{ messages[0].content }}{# what a template says of </think> #}")
    for script, said in (("<think>\nAn apple.\n</think>\n\nHere is an apple.", ("An apple.", "Here is an ")),
                         ("Here is an apple.", (None, "Here is an "))):
        client = app_of(ScriptedEngine(script, template)).test_client()
        answer = client.post("/v1/chat/completions", json={"messages": HI, "stop": "apple"}).json
        assert told(openai.types.chat.ChatCompletion.model_validate(answer))[0] == [(*said, [], "stop")]


def test_a_message_of_blanks():
    """Each blank before what might be a switch is looked at once; again and again would take hours."""
    messages = [{"role": "user", "content": "a" + 2_000_000 * " " + "b"}]
    assert take_switches(messages) == (messages, None)


@pytest.mark.parametrize("text, thinks", [
    ("Hi /think", True), ("Hi /no_think", False), ("/think Hi", True), ("Hi\n/think ", True), ("Hi/think", False),
    ("What does /think do?", False), ("/thinking Hi", False)])
def test_the_switch_in_a_message(ask, text, thinks):
    for content in text, [{"type": "text", "text": text}]:
        _, request = ask("a</think>b", [{"role": "user", "content": content}])
        prompt = shipped().tokenizer.decode(request.prompt_ids)
        assert prompt.endswith("<think>\n") == thinks
        assert ("think " in prompt or "/thinking" in prompt) == (text in ("What does /think do?", "/thinking Hi"))
    said = {"role": "assistant", "content": "b"}
    messages = [{"role": "user", "content": "/think a"}, said, {"role": "user", "content": "c /no_think"}]
    _, request = ask("a</think>b", messages)
    assert shipped().tokenizer.decode(request.prompt_ids).endswith("</think>\n\n")
    _, request = ask("a</think>b", [{"role": "user", "content": "a /no_think"}], **THINK)
    assert shipped().tokenizer.decode(request.prompt_ids).endswith("<think>\n")


@pytest.mark.parametrize("effort, thinks", [("none", False), ("minimal", False), ("low", True), ("medium", True),
                                            ("high", True), ("xhigh", True), (None, False)])
def test_reasoning_effort_switches_thinking(ask, effort, thinks):
    _, request = ask("a</think>b", reasoning_effort=effort)
    assert shipped().tokenizer.decode(request.prompt_ids).endswith("<think>\n") == thinks
    _, request = ask("a</think>b", [{"role": "user", "content": "Hi /think"}], reasoning_effort=effort)
    assert shipped().tokenizer.decode(request.prompt_ids).endswith("<think>\n") == (thinks or effort is None)
    for said in True, False:        # what is said outright goes before it
        _, request = ask("a</think>b", reasoning_effort=effort,
                         extra_body={"chat_template_kwargs": {"enable_thinking": said}})
        assert shipped().tokenizer.decode(request.prompt_ids).endswith("<think>\n") == said


def prompt_of(request):
    return shipped().tokenizer.decode(request.prompt_ids, special=True)


OPENED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize("said, end, choice", [
    ({"content": "Once upon"}, OPENED + "Once upon", (None, " a time.", [], "stop")),
    ({"content": "Once <|im_end|>"}, OPENED + "Once <|im_end|>", (None, " a time.", [], "stop")),
    ({"content": "So.", "reasoning_content": "I"}, "<think>\nI\n</think>\n\nSo.", (None, " a time.", [], "stop")),
    ({"content": "", "reasoning_content": "I"}, "assistant\n<think>\nI", (" a time.", "", [], "stop"))])
def test_the_assistants_last_message_is_continued(ask, said, end, choice):
    """As llama.cpp's server does it, with or without a word. What a client writes never becomes a control token."""
    messages = [*HI, {"role": "assistant"} | said]
    for extra in {}, {"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}:
        (choices, _), request = ask(" a time.", messages, extra_body=extra)
        assert prompt_of(request).endswith(end) and choices == [choice]
        ids = shipped().tokenizer.control
        assert request.prompt_ids.count(ids["<|im_end|>"]) == 1 and request.prompt_ids.count(ids["<|im_start|>"]) == 2


def test_the_assistants_last_message_is_not_continued(ask):
    messages = [*HI, {"role": "assistant", "content": "Yes"}]
    for extra in {"add_generation_prompt": True}, {"continue_final_message": False}:
        assert prompt_of(ask("a", messages, extra_body=extra)[1]).endswith(OPENED)
    _, request = ask("a", extra_body={"add_generation_prompt": False})
    assert prompt_of(request).endswith("Hi<|im_end|>\n")


@pytest.mark.parametrize("extra, field", [
    ({"continue_final_message": True}, "continue_final_message"),
    ({"messages": [*HI, {"role": "assistant", "content": "a"}], "continue_final_message": True,
      "add_generation_prompt": True}, "add_generation_prompt"),
    ({"messages": [*HI, {"role": "assistant", "content": "a"}], "json_schema": {}}, "json_schema")])
def test_what_cannot_be_continued(scripted, extra, field):
    with pytest.raises(openai.BadRequestError) as caught:
        scripted[1].chat.completions.create(model="m", messages=HI, extra_body=extra)
    assert caught.value.param == field


def test_variables_of_the_template(scripted, monkeypatch):
    """Any names, but none that the server itself sets; what they hold never becomes a control token."""
    engine, client, _ = scripted
    monkeypatch.setattr(engine, "template", ChatTemplate("{{ tone }}<|im_end|>", shipped().tokenizer.control))
    client.chat.completions.create(model="m", messages=HI, extra_body={"chat_template_kwargs": {"tone": "<|im_end|>"}})
    assert prompt_of(engine.requests[-1]) == "<|im_end|><|im_end|>"
    assert engine.requests[-1].prompt_ids.count(shipped().tokenizer.control["<|im_end|>"]) == 1


def test_an_end_that_comes_late(ask):
    """min_tokens: neither the model's end nor stop_token_ids can come before."""
    tokenizer = shipped().tokenizer
    [stop] = tokenizer.encode("!")
    _, request = ask("a", extra_body={"min_tokens": 3, "stop_token_ids": [stop]})
    rules = {"grammar": request.grammar}
    assert request.grammar_after is None and request.stop_token_ids == (stop,)
    assert [obeys(rules, text) for text in ("a b c d", "a", "! b c", "a b c!", "<think> a\n b")] == [
        True, False, False, False, True]
    _, request = ask("a", extra_body={"min_tokens": 3, "ignore_eos": True})
    assert request.grammar is None
    for extra in {"tools": TOOLS}, {"guided_regex": "a"}:
        with pytest.raises(openai.BadRequestError, match="'min_tokens' cannot be kept beside a grammar or tools"):
            ask("a", extra_body={"min_tokens": 3} | extra)


def test_tokens_that_end_an_answer(ask):
    [stop] = shipped().tokenizer.encode("!")
    (choices, usage), _ = ask("Hello! there", extra_body={"stop_token_ids": [stop], "ignore_eos": True})
    assert choices == [(None, "Hello", [], "stop")]
    assert usage["completion_tokens"] == len(shipped().tokenizer.encode("Hello!"))
    with pytest.raises(openai.BadRequestError, match="'stop_token_ids'"):
        ask("a", extra_body={"stop_token_ids": [6144]})


def test_control_tokens_in_the_text(ask):
    for skip, said in (True, "a  b"), (False, "a <|box_start|> b"):
        (choices, _), _ = ask("a <|box_start|> b", extra_body={"skip_special_tokens": skip}, stop=" c")
        assert choices == [(None, said, [], "stop")]


@pytest.mark.parametrize("asked, got", [
    ({"n_predict": 3}, {"max_tokens": 3}), ({"max_tokens": -1}, {"max_tokens": None}), ({"seed": -1}, {"seed": None}),
    ({"n_predict": 3, "max_tokens": 4}, {"max_tokens": 4}), ({"top_k": -1}, {"top_k": 0}),
    ({"repeat_penalty": 1.5, "repeat_last_n": -1}, {"repetition_penalty": 1.5}),
    ({"repeat_penalty": 1.5, "presence_penalty": 1, "repeat_last_n": 0},
     {"repetition_penalty": 1, "presence_penalty": 0}),
    ({"repeat_penalty": 1, "repeat_last_n": 64}, {"repetition_penalty": 1})])
def test_names_of_other_servers(ask, asked, got):
    _, request = ask("a", extra_body=asked)
    assert {name: getattr(request, name) for name in got} == got


def test_penalties_of_a_window(ask):
    with pytest.raises(openai.BadRequestError, match="'repeat_last_n' must be -1 or 0"):
        ask("a", extra_body={"repeat_penalty": 1.5, "repeat_last_n": 64})


def test_the_first_piece_of_a_stream(scripted):
    engine, client, _ = scripted
    engine.script = "Hello."
    first, *others = client.chat.completions.create(model="m", messages=HI, stream=True)
    assert first.choices[0].delta.model_dump(exclude_unset=True) == {"role": "assistant", "content": ""}
    assert all(chunk.choices[0].delta.role is None for chunk in others)


def test_stop_strings(ask):
    (choices, usage), request = ask("one two three", stop=[" th", "four"])
    assert choices == [(None, "one two", [], "stop")] and request.stop == (" th", "four")
    (choices, _), _ = ask("one. two", stop=".")
    assert choices == [(None, "one", [], "stop")]


def test_length(ask):
    assert ask("one two three four", max_tokens=2)[0][0][0][3] == "length"
    _, request = ask("one", max_tokens=2, max_completion_tokens=3)
    assert request.max_tokens == 3


def test_several_answers(ask, scripted):
    (choices, usage), request = ask("Hello.", n=3, seed=5, temperature=1)
    assert choices == [(None, "Hello.", [], "stop")] * 3
    assert [one.seed for one in scripted[0].requests[:3]] == [5, 6, 7]
    assert usage["prompt_tokens"] == len(request.prompt_ids)
    assert usage["completion_tokens"] == 3 * (len(shipped().tokenizer.encode("Hello.")) + 1)
    with pytest.raises(openai.BadRequestError, match="'n'"):
        ask("Hello.", n=MAX_CHOICES + 1)


def test_several_answers_stream_side_by_side():
    """Each as its tokens come: none waits for another's end.."""
    texts = iter(["one two three four five six", "a b"])
    engine = PacedEngine(lambda prompt: next(texts), pace=0.2)
    with scripted_clients(engine, openai.OpenAI, openai.AsyncOpenAI) as (client, _):
        stream = client.chat.completions.create(model="m", messages=HI, n=2, stream=True)
        told = [(choice.index, choice.delta.content or "", choice.finish_reason)
                for chunk in stream for choice in chunk.choices]
    said = {i: "".join(text for index, text, _ in told if index == i) for i in (0, 1)}
    assert set(said.values()) == {"one two three four five six", "a b"}
    order = [index for index, text, _ in told if text]
    [short] = [i for i, text in said.items() if text == "a b"]
    assert short in order[:4] and order[-1] != short        # it begins and ends while the other goes on
    assert [index for index, _, reason in told if reason] == [short, 1 - short]


def test_sampling_reaches_the_engine(ask):
    arguments = {"temperature": 0.5, "top_p": 0.25, "seed": 3, "logit_bias": {"5": -100, "7": 1.5}}
    extra = {"top_k": 4, "min_p": 0.125, "ignore_eos": True}
    _, request = ask("Hello.", **arguments, extra_body=extra)
    for name, value in (arguments | extra).items():
        assert getattr(request, name) == ({5: -100, 7: 1.5} if name == "logit_bias" else value)
    _, request = ask("Hello.")
    assert (request.temperature, request.grammar, request.stop_after, request.top_logprobs) == (1, None, None, None)


def test_log_probabilities(scripted):
    """Of the tokens of the text, but not of thoughts, calls and the end; the same streamed."""
    engine, client, _ = scripted
    engine.script = f"hm\n</think>\n\nHello, \ub300\ud55c.\n\n{XML}"
    arguments = {"model": "m", "messages": HI, "tools": TOOLS, "logprobs": True, "top_logprobs": 2} | THINK
    entries = client.chat.completions.create(**arguments).choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == "\n\nHello, \ub300\ud55c.\n\n"
    assert all(entry.logprob == -0.5 and [one.logprob for one in entry.top_logprobs] == [-0.5, -1.5]
               for entry in entries)
    assert entries[0].top_logprobs[0].token == entries[0].token == "\n\n"
    chunks = client.chat.completions.create(**arguments, stream=True)
    streamed = [chunk.choices[0].logprobs.content for chunk in chunks if chunk.choices[0].logprobs]
    assert [entry for entries in streamed for entry in entries] == entries
    arguments["top_logprobs"] = 0
    assert client.chat.completions.create(**arguments).choices[0].logprobs.content[0].top_logprobs == []


def test_log_probabilities_of_a_completion(scripted):
    engine, client, _ = scripted
    engine.script = "Hello there."
    arguments = {"model": "m", "prompt": "a", "logprobs": 1}
    told = client.completions.create(**arguments).choices[0].logprobs
    assert "".join(told.tokens) == "Hello there." and told.text_offset[:2] == [0, len(told.tokens[0])]
    assert told.token_logprobs == [-0.5] * len(told.tokens)
    assert told.top_logprobs == [{token: -0.5} for token in told.tokens]
    chunks = [chunk.choices[0].logprobs for chunk in client.completions.create(**arguments, stream=True)]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [one for chunk in chunks for one in getattr(chunk, name)] == getattr(told, name)


# ---- tools -------------------------------------------------------------------------------------------------


def test_a_call(ask):
    (choices, _), request = ask(f"I look.\n\n{XML}", tools=TOOLS)
    assert choices == [(None, "I look.", [("get_weather", {"city": 'S\u00e3o "Paulo"', "days": 3})], "tool_calls")]
    assert request.grammar_after == shipped().tokenizer.tags["<tool_call>"]
    assert '"get_weather"' in shipped().tokenizer.decode(request.prompt_ids)


def test_several_calls_after_thoughts(ask):
    (choices, _), _ = ask(f"Look.\n</think>\n\n{XML}\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
                          tools=TOOLS, **THINK)
    calls = [("get_weather", {"city": 'S\u00e3o "Paulo"', "days": 3}), ("now", {})]
    assert choices == [("Look.", "", calls, "tool_calls")]


def test_the_json_form(ask, scripted, monkeypatch):
    """A model whose template has the other form."""
    source = '{{ messages[-1].content }}{% if tools %}<tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}'
    monkeypatch.setattr(scripted[0], "template", ChatTemplate(source))
    (choices, _), _ = ask(f"{JSON}\n{JSON}", tools=TOOLS)
    assert choices == [(None, "", [("get_weather", {"city": 'S\u00e3o "Paulo"', "days": 3})] * 2, "tool_calls")]


@pytest.mark.parametrize("choice, parallel, good, bad", [
    ("required", True, [XML, f"{XML}\n{XML}"], ["Hello", f"Hello\n{XML}", ""]),
    ("required", False, [XML], ["Hello", f"{XML}\n{XML}"]),
    ({"type": "function", "function": {"name": "now"}}, True,
     ["<tool_call>\n<function=now>\n</function>\n</tool_call>"], [XML, "Hello"]),
    ("auto", True, ["Hello", XML, f"Hello\n\n{XML}\n{XML}"], [f"{XML} and", XML.replace("3", "three")]),
    ("auto", False, ["Hello", XML], [f"{XML}\n{XML}"]),
], ids=["required", "required-one", "named", "auto", "auto-one"])
def test_what_may_be_called(ask, choice, parallel, good, bad):
    for thinking in {}, THINK:
        thoughts = "hm\n</think>\n\n" if thinking else ""
        _, request = ask(thoughts + good[0], tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel, **thinking)
        rules = {"grammar": request.grammar, "grammar_after": request.grammar_after}
        assert all(obeys(rules, thoughts + text) for text in good)
        assert not any(obeys(rules, thoughts + text) for text in bad)


@pytest.mark.parametrize("mode, good, bad", [("required", [XML], ["Hello"]), ("auto", ["Hello", XML], [])])
def test_allowed_tools(ask, mode, good, bad):
    """The prompt shows all tools, so that a prompt cache keeps its use; only the allowed ones can be called."""
    other = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [
        {"type": "function", "function": {"name": "get_weather"}}]}}
    _, request = ask(XML, tools=TOOLS, tool_choice=allowed)
    assert '"now"' in shipped().tokenizer.decode(request.prompt_ids)
    rules = {"grammar": request.grammar, "grammar_after": request.grammar_after}
    assert all(obeys(rules, text) for text in good) and not any(obeys(rules, text) for text in [other, *bad])


@pytest.mark.parametrize("choice, read", [
    ("none", ("none", None)), ({"type": "function", "name": "f"}, ("one", ["f"])),
    ({"type": "function", "function": {"name": "f"}}, ("one", ["f"])),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}, ("auto", ["f"])),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "function": {"name": "f"}}]}}, ("required", ["f"]))])
def test_both_forms_of_tool_choice(choice, read):
    assert read_choice(choice) == read


def test_stop_strings_do_not_cut_a_call(ask):
    for stop in "\n", "Paulo", "<":           # also where a call is the model's choice
        (choices, _), _ = ask(f"I look.{XML}", tools=TOOLS, stop=stop)
        assert choices == [(None, "I look.", [CALL], "tool_calls")]
    (choices, _), _ = ask(f"I look.{XML}", tools=TOOLS, stop="look")
    assert choices == [(None, "I ", [], "stop")]
    (choices, _), _ = ask(XML, tools=TOOLS, tool_choice="required", stop=["Paulo", "<"])
    assert choices == [(None, "", [("get_weather", {"city": 'S\u00e3o "Paulo"', "days": 3})], "tool_calls")]


def test_no_call(ask):
    (choices, _), request = ask(XML, tools=TOOLS, tool_choice="none")
    assert choices == [(None, XML, [], "stop")] and request.grammar is None
    assert "get_weather" not in shipped().tokenizer.decode(request.prompt_ids)


def test_a_call_that_is_none(ask):
    broken = XML.replace("</parameter>", "")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "nonsense"}}}}}
    (choices, _), request = ask(broken, tools=[tool])
    assert request.grammar is None              # it could not be ruled, and is read all the same
    assert choices == [(None, broken, [], "stop")]


def test_a_conversation_with_results(ask):
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Seoul"}'}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
                {"role": "tool", "tool_call_id": "call_1", "content": "20 degrees"}]
    (choices, _), request = ask("It is 20 degrees.", messages, tools=TOOLS)
    prompt = shipped().tokenizer.decode(request.prompt_ids)
    assert "<function=get_weather>\n<parameter=city>\nSeoul\n" in prompt and "20 degrees\n</tool_response>" in prompt


def test_the_helper_that_parses_streams(scripted):
    engine, client, _ = scripted
    engine.script = XML
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    with client.chat.completions.stream(model="m", messages=HI, tools=strict) as stream:
        kinds = [event.type for event in stream]
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    assert kinds.count("tool_calls.function.arguments.delta") > 3 and "tool_calls.function.arguments.done" in kinds
    assert call.function.parsed_arguments == {"city": 'S\u00e3o "Paulo"', "days": 3}


# ---- formats -----------------------------------------------------------------------------------------------


def json_format(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema} | more}


def test_a_schema_rules_the_answer(ask):
    for thinking in {}, THINK:
        thoughts = "hm\n</think>\n\n" if thinking else ""
        for strict in {}, {"strict": True}, {"strict": False}:
            _, request = ask('{"name": "a", "age": 3}', response_format=json_format(PERSON, **strict), **thinking)
            rules = {"grammar": request.grammar, "grammar_after": request.grammar_after}
            assert obeys(rules, thoughts + '{"name": "a", "age": 3}')
            assert not obeys(rules, thoughts + '{"name": "a", "age": "3"}') and not obeys(rules, thoughts + "Hello")
    _, request = ask("{}", response_format={"type": "json_object"})
    rules = {"grammar": request.grammar}
    assert obeys(rules, '{"a": [1, {"b": null}]}') and not obeys(rules, "[1]") and not obeys(rules, "{} and")


def test_a_schema_from_a_class(scripted):
    """As the client makes one of a pydantic model, and reads the answer back into it."""
    import pydantic

    class Person(pydantic.BaseModel):
        name: str
        age: int
        pets: list["Person"] | None

    engine, client, _ = scripted
    engine.script = '{"name": "a", "age": 3, "pets": [{"name": "b", "age": 1, "pets": null}]}'
    answer = client.chat.completions.parse(model="m", messages=HI, response_format=Person)
    assert answer.choices[0].message.parsed.pets[0].name == "b"
    assert obeys({"grammar": engine.requests[-1].grammar}, engine.script)


BROKEN = {"type": "function", "function": {"name": "f", "parameters": {"properties": {
    "a": {"type": "array", "items": {"$ref": "#/nowhere"}}}}}}


@pytest.mark.parametrize("arguments, field, said", [
    ({"response_format": json_format({"type": "array", "uniqueItems": True})}, "response_format.json_schema.schema",
     "uniqueItems"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "json_object"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "string"),
    ({"tools": [{"type": "code"}]}, "tools[0].type", "function"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "then"}}}, "tool_choice", "then"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
        {"type": "function", "function": {"name": "then"}}]}}}, "tool_choice", "then"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "auto"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ({"logit_bias": {"6144": 1}}, "logit_bias", "6143"),
    ({"extra_body": {"temprature": 1}}, "temprature", "did you mean 'temperature'?"),
    ({"stream_options": {"include_Usage": True}}, "stream_options.include_Usage", "'stream_options.include_usage'?"),
    ({"extra_body": {"x" * 90: 1}}, "x" * 80, f"unknown field '{'x' * 80}'"),
    ({"tools": [TOOLS[0], TOOLS[1], TOOLS[0]]}, "tools", "2 tools have the name 'get_weather'"),
    ({"stop": "a" * 1025}, "stop", "1024 letters"), ({"stop": ["a", "a" * 1025]}, "stop[1]", "1024 letters"),
    ({"stop": list("abcdefghijklmnopq")}, "stop", "0 to 16"),
    ({"reasoning_effort": "very"}, "reasoning_effort", "minimal"),
    ({"messages": [{"role": "user", "content": "long " * 4096}]}, "messages", "4096"),
    ({"messages": [{"role": "user", "content": "long " * 500_000}]}, "messages", "4096"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a>b": {}}}}}]},
     "tools", "'a>b'"),
    ({"tools": [BROKEN], "response_format": json_format(PERSON)}, "tools", "cannot be enforced"),
    ({"tools": [BROKEN], "tool_choice": "required"}, "tools", "cannot be enforced"),
    ({"tools": TOOLS, "response_format": json_format({"not": {}})}, "response_format.json_schema.schema", "not"),
    ({"response_format": json_format({"enum": ["a" * 300_000]})}, "response_format.json_schema.schema", "letters"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}]},
     "messages[0].content[0].type", "text"),
    ({"messages": [HI[0], {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]},
     "messages[1].tool_calls[0].function.arguments", "a string or an object"),
])
def test_what_is_wrong_is_named(scripted, arguments, field, said):
    engine, client, _ = scripted
    for stream in False, True:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**({"model": "m", "messages": HI, "stream": stream} | arguments))
        assert caught.value.param == field and said in caught.value.body["message"]


@pytest.mark.parametrize("arguments, field", [
    ({"response_format": json_format(PERSON)}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object"}}, "response_format"), ({"tools": TOOLS}, "tools")])
def test_a_grammar_that_only_the_engine_refuses(scripted, monkeypatch, arguments, field):
    """It is named by what the client asked for."""
    engine, client, _ = scripted

    def refuse(request):
        raise RequestError("grammar", "the grammar cannot be followed: too complex")

    monkeypatch.setattr(engine, "submit", refuse)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=HI, **arguments)
    assert caught.value.param == field and "too complex" in caught.value.body["message"]


@pytest.mark.parametrize("asked, good, bad", [
    ({"response_format": {"type": "json_object", "schema": PERSON}}, '{"name": "a", "age": 3}', "{}"),
    ({"response_format": {"type": "json_schema", "schema": PERSON}}, '{"name": "a", "age": 3}', "{}"),
    ({"json_schema": {"type": "integer"}}, "7", '"7"'), ({"json_schema": {}}, "[1]", "[1"),
    ({"grammar": 'root ::= "a"+'}, "aa", "b"), ({"guided_json": {"type": "integer"}}, "7", "a"),
    ({"guided_json": '{"type": "integer"}'}, "7", "a"), ({"guided_regex": "a+b"}, "aab", "a"),
    ({"guided_choice": ["yes", "no"]}, "no", "nope"), ({"guided_grammar": 'root ::= "a"'}, "a", "b"),
    ({"guided_grammar": 'start: "a"'}, "a", "b"), ({"structured_outputs": {"regex": "a+b"}}, "aab", "a"),
    ({"structured_outputs": {"json": {"type": "integer"}}}, "7", "a"),
    ({"structured_outputs": {"json_object": True, "disable_fallback": True}}, "{}", "[]"),
    ({"structured_outputs": {"choice": ["yes"]}}, "yes", "no")])
def test_forms_of_other_servers(ask, scripted, asked, good, bad):
    _, request = ask(good, extra_body=asked)
    assert obeys({"grammar": request.grammar}, good) and not obeys({"grammar": request.grammar}, bad)
    engine, client, _ = scripted
    client.completions.create(model="m", prompt="a", extra_body=asked)
    assert engine.requests[-1].grammar == request.grammar


@pytest.mark.parametrize("asked, field", [
    ({"guided_regex": "a", "grammar": 'root ::= "a"'}, "guided_regex"), ({"guided_json": "{"}, "guided_json"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
    ({"guided_regex": "(?=a)"}, "guided_regex"), ({"grammar": "root ::= ("}, "grammar"),
    ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format.type")])
def test_forms_that_are_refused(scripted, asked, field):
    _, client, _ = scripted
    for create, arguments in ((client.chat.completions.create, {"messages": HI}),
                              (client.completions.create, {"prompt": "a"})):
        with pytest.raises(openai.BadRequestError) as caught:
            create(model="m", **arguments, extra_body=asked)
        assert caught.value.param == field


# ---- completions and the endpoints behind ------------------------------------------------------------------


def test_completions(scripted):
    engine, client, _ = scripted
    engine.script = "Hello. <think>"
    ids = engine.encode("b")
    answer = client.completions.create(model="m", prompt=["a", "b"], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(i, "Hello. <think>") for i in range(4)]
    assert answer.usage.prompt_tokens == 2 and engine.requests[-1].prompt_ids == ids
    chunks = list(client.completions.create(model="m", prompt=ids, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello. <think>"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_models(scripted):
    _, client, _ = scripted
    assert [model.id for model in client.models.list()] == ["scripted"]


def test_tokens_and_templates(scripted):
    engine, client, _ = scripted
    web = app_of(engine).test_client()
    text = "Hi <|im_end|> <think> \ub300\ud55c \U0001f600"
    ids = web.post("/tokenize", json={"content": text}).json["tokens"]
    assert ids == engine.tokenizer.encode(text)
    assert web.post("/detokenize", json={"tokens": ids}).json == {"content": text, "prompt": text}
    plain = web.post("/tokenize", json={"content": text, "parse_special": False, "with_pieces": True}).json["tokens"]
    assert [one["id"] for one in plain] == engine.tokenizer.encode(text, allow_special=False)
    pieces = [one["piece"] for one in plain]
    assert b"".join(bytes(one) if isinstance(one, list) else one.encode() for one in pieces).decode() == text
    conversation = {"messages": [{"role": "user", "content": text}], "tools": TOOLS}
    prompt = web.post("/apply-template", json=conversation).json["prompt"]
    assert text in prompt and "get_weather" in prompt
    for path, body, field in (("/tokenize", {}, "content"), ("/detokenize", {"tokens": [-1]}, "tokens"),
                              ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
                              ("/apply-template", {"messages": []}, "messages")):
        answer = web.post(path, json=body)
        assert (answer.status_code, answer.json["error"]["param"]) == (400, field)


def test_messages_of_the_system_are_joined(scripted):
    """Templates take one, and pydantic-ai sends two."""
    engine, client, _ = scripted
    said = [{"role": "system", "content": "Be kind."}, {"role": "developer", "content": [
        {"type": "text", "text": "Be brief."}]}, HI[0]]
    for messages in said, [{"role": "system", "content": "Be kind.\n\nBe brief."}, HI[0]]:
        client.chat.completions.create(model="m", messages=messages)
    assert engine.requests[-1].prompt_ids == engine.requests[-2].prompt_ids
