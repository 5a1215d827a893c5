"""Templates that are told how much to think, as those of Qwen3.8 are: their variables, in every protocol and on the
command line."""

import io
import json
import sys

import pytest

import qengine
from api.thinking import EFFORTS
from cli import chat as cli_chat
from cli.main import main
from engine.reply import Content, Message, Thought
from engine.request import ModelError, RequestError
from engine.template import ChatTemplate
from tests.clients import CHAT, HI, app_of
from tests.scripted import ScriptedEngine, shipped
from tests.test_gguf import rewritten

# With the variables and the rules of Qwen3.8's, in our words: three efforts, of which the highest holds where none is
# named and the middle one says nothing; others are refused; thoughts of earlier turns are shown unless told not to.
TEMPLATE = """\
{%- set thinks = enable_thinking is undefined or enable_thinking -%}
{%- if thinks -%}
    {%- set degree = reasoning_effort | default('xhigh') -%}
    {%- if degree not in ['low', 'medium', 'xhigh'] -%}
        {{ raise_exception('No degree of thinking is called ' ~ degree ~ '.') }}
    {%- endif -%}
    {%- if degree != 'medium' -%}
        {{ '<|im_start|>system\\n' ~ {'low': 'Think little.', 'xhigh': 'Think much.'}[degree] ~ '<|im_end|>\\n' }}
    {%- endif -%}
{%- endif -%}
{%- for message in messages -%}
    {{ '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- if message.reasoning_content and (preserve_thinking is undefined or preserve_thinking) -%}
        {{ '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' }}
    {%- endif -%}
    {{ message.content ~ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|im_start|>assistant\\n<think>\\n' ~ ('' if thinks else '\\n</think>\\n\\n') }}
{%- endif -%}
"""
SAID = {"low": "Think little.", "medium": None, "xhigh": "Think much."}
NEAREST = {"none": "low", "minimal": "low", "low": "low", "medium": "medium", "high": "xhigh", "xhigh": "xhigh",
           "max": "xhigh"}
HISTORY = [HI, {"role": "assistant", "reasoning_content": "hmm", "content": "hello"},
           {"role": "user", "content": "bye"}]


@pytest.fixture(scope="module")
def template():
    return ChatTemplate(TEMPLATE, shipped().tokenizer.control)


def told(prompt):
    """How much a prompt tells the model to think."""
    found = [text for text in SAID.values() if text and text in prompt]
    assert len(found) < 2
    return found[0] if found else None


# ---- the template ----------------------------------------------------------------------------------------------


def test_what_a_template_asks_for(template):
    assert template.efforts == ["low", "medium", "xhigh"]
    assert {"reasoning_effort", "preserve_thinking", "enable_thinking"} <= template.variables
    assert shipped().template.efforts == [] and "reasoning_effort" not in shipped().template.variables
    assert {word: template.effort(word) for word in EFFORTS} == NEAREST
    assert [shipped().template.effort(word) for word in EFFORTS] == [None] * len(EFFORTS)


@pytest.mark.parametrize("source, efforts", [
    ("{{ reasoning_effort }}", list(EFFORTS)), ("{{ raise_exception('no ' ~ reasoning_effort) }}", []),
    ("{{ {'low': 1, 'high': 2}[reasoning_effort] + 0 }}", ["low", "high"]),
    ("{% set reasoning_effort = 'low' %}{{ reasoning_effort }}", [])])
def test_words_that_a_template_takes(source, efforts):
    assert ChatTemplate(source).efforts == efforts


NAMING = """\
{%- if reasoning_effort == 'low' %}{{ 'Think little.' }}{% elif reasoning_effort in ['high', 'ultra'] %}
{{- 'Think much.' }}{% elif reasoning_effort == 'medium' %}{% endif -%}
{{ messages[-1].content }}"""
SWITCH = "{{ 'Think much.' if reasoning_effort }}{{ messages[-1].content }}"


@pytest.mark.parametrize("source, efforts, refused", [
    (NAMING, ["low", "medium", "high"], ["max", "hihg", "", 5, True, ["low"]]), (SWITCH, [], []),
    ("{{ reasoning_effort | upper }}", list(EFFORTS), []), ("{{ reasoning_effort }}", list(EFFORTS), []),
    ("{{ 'a' if reasoning_effort is string else 'b' }}", [], []),
    ("{{ {'low': 1, 'max': 2}.get(reasoning_effort) }}", ["low", "max"], ["high"])])
def test_a_word_that_a_template_would_ignore(source, efforts, refused):
    """It is refused, and those that the template has are listed; others, even such that OpenAI has not, reach it."""
    template = ChatTemplate(source)
    assert template.efforts == efforts
    for word in refused:
        with pytest.raises(RequestError, match=f"has no reasoning_effort .*, only {', '.join(efforts)}$") as caught:
            template.render([HI], template_kwargs={"reasoning_effort": word})
        assert caught.value.field == "chat_template_kwargs"
    for word in (*efforts, *({"ultra"} if source is NAMING else {"new"} if not refused else {}), None):
        template.render([HI], template_kwargs={"reasoning_effort": word})


def test_efforts_of_a_template_that_ignores_others():
    """OpenAI's words become the nearest that it has, never one that it ignores."""
    engine = ScriptedEngine("Hello.", ChatTemplate(NAMING))
    web = app_of(engine).test_client()
    for word in EFFORTS:
        answer = web.post(CHAT, json={"messages": [HI], "reasoning_effort": word})
        assert answer.status_code == 200 and engine.requests[-1].thinking_budget is None
        nearest = "low" if word in ("none", "minimal", "low") else "medium" if word == "medium" else "high"
        prompt = engine.tokenizer.decode(engine.requests[-1].prompt_ids)
        assert told(prompt) == {"low": "Think little.", "medium": None, "high": "Think much."}[nearest]
    answer = web.post(CHAT, json={"messages": [HI], "chat_template_kwargs": {"reasoning_effort": "most"}})
    assert answer.status_code == 400 and "no reasoning_effort 'most', only low, medium, high" in answer.text


def test_a_template_that_takes_for_ever_over_a_word(monkeypatch):
    from engine import template as room
    monkeypatch.setattr(room, "SECONDS", 0.5)
    with pytest.raises(ModelError, match="the chat template cannot be used: it takes longer than 0.5 s"):
        ChatTemplate("{% for i in range(99999) %}{% for j in range(99999) %}{{ reasoning_effort and '' }}{% endfor %}"
                     "{% endfor %}")


@pytest.mark.parametrize("variables, words", [
    ({}, "Think much."), ({"reasoning_effort": "low"}, "Think little."), ({"reasoning_effort": "medium"}, None)])
def test_a_template_with_each_of_its_variables(template, variables, words):
    prompt = template.render(HISTORY, template_kwargs=variables)
    assert told(prompt) == words and "<think>\nhmm\n</think>" in prompt and prompt.endswith("assistant\n<think>\n")
    prompt = template.render(HISTORY, template_kwargs=variables | {"preserve_thinking": False})
    assert told(prompt) == words and "hmm" not in prompt
    prompt = template.render(HISTORY, enable_thinking=False, template_kwargs=variables)
    assert told(prompt) is None and prompt.endswith("<think>\n\n</think>\n\n")
    with pytest.raises(RequestError, match="refuses the messages: No degree of thinking is called high."):
        template.render(HISTORY, template_kwargs={"reasoning_effort": "high"})


# ---- the protocols ---------------------------------------------------------------------------------------------

WITH_THOUGHTS = {       # the conversation HISTORY, as each protocol has it
    CHAT: {"messages": HISTORY},
    "/v1/responses": {"input": [
        HI, {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hmm"}]},
        {"role": "assistant", "content": "hello"}, HISTORY[2]]},
    "/v1/messages": {"max_tokens": 99, "thinking": {"type": "adaptive"}, "messages": [
        HI, {"role": "assistant", "content": [{"type": "thinking", "thinking": "hmm", "signature": ""},
                                              {"type": "text", "text": "hello"}]}, HISTORY[2]]},
    "/api/chat": {"model": "m", "stream": False, "messages": [
        HI, {"role": "assistant", "thinking": "hmm", "content": "hello"}, HISTORY[2]]},
    "/api/generate": {"model": "m", "stream": False, "prompt": "bye"}}
EFFORT_FIELDS = {       # an effort, as each protocol has it, and the words that it knows
    CHAT: (lambda word: {"reasoning_effort": word}, [*EFFORTS]),
    "/v1/responses": (lambda word: {"reasoning": {"effort": word}}, [*EFFORTS]),
    "/v1/messages": (lambda word: {"output_config": {"effort": word}}, ["low", "medium", "high", "xhigh", "max"]),
    "/api/chat": (lambda word: {"think": word}, ["low", "medium", "high", "max"]),
    "/api/generate": (lambda word: {"think": word}, ["low", "medium", "high", "max"])}
CASES = [(path, word) for path, (_, words) in EFFORT_FIELDS.items() for word in words]


@pytest.fixture
def post(template):
    def ask(path, fields, status=200, **arguments):
        """(the prompt, the budget of thoughts) of a request; or the message that refuses it."""
        engine = ScriptedEngine("a</think>b", template)
        answer = app_of(engine, **arguments).test_client().post(path, json=WITH_THOUGHTS[path] | fields)
        assert answer.status_code == status, answer.text
        if status != 200:
            error = answer.json["error"]
            return error if isinstance(error, str) else error["message"]
        request = engine.requests[-1]
        return engine.tokenizer.decode(request.prompt_ids, special=True), request.thinking_budget

    return ask


@pytest.mark.parametrize("path, word", CASES)
def test_an_effort_is_the_templates_own_nearest_word(post, path, word):
    """And no number of tokens cuts thoughts short then."""
    prompt, budget = post(path, EFFORT_FIELDS[path][0](word))
    assert budget is None
    assert told(prompt) == (SAID[NEAREST[word]] if EFFORTS[word] else None)
    assert prompt.endswith("<think>\n" if EFFORTS[word] else "</think>\n\n")
    limit = {"thinking_budget": 7} if path.startswith("/v1") else {"options": {"thinking_budget": 7}}
    assert post(path, EFFORT_FIELDS[path][0](word) | limit) == (prompt, 7)      # a number holds beside the word


@pytest.mark.parametrize("path", WITH_THOUGHTS)
def test_variables_in_every_protocol(post, path):
    def prompt(fields, **arguments):
        return post(path, fields, **arguments)[0]

    kept = path != "/api/generate"                      # which has no earlier turns
    on = {} if path.startswith("/v1") else {"think": True}
    assert ("hmm" in prompt(on)) == kept and told(prompt(on)) == "Think much."
    assert "hmm" not in prompt(on | {"chat_template_kwargs": {"preserve_thinking": False}})
    assert told(prompt(on | {"chat_template_kwargs": {"reasoning_effort": "low"}})) == "Think little."
    off = prompt(on | {"chat_template_kwargs": {"enable_thinking": False}})
    assert told(off) is None and off.endswith("</think>\n\n")
    both = EFFORT_FIELDS[path][0]("high") | {"chat_template_kwargs": {"reasoning_effort": "low"}}
    assert told(prompt(both)) == "Think little."        # the template's own variable is nearer to it
    refusal = post(path, on | {"chat_template_kwargs": {"reasoning_effort": "high"}}, 400)
    assert "No degree of thinking is called high." in refusal
    assert "may not set 'messages'" in post(path, on | {"chat_template_kwargs": {"messages": []}}, 400)
    assert "chat_template_kwargs" in post(path, {"chat_template_kwargs": 3}, 400)


@pytest.mark.parametrize("path", WITH_THOUGHTS)
def test_variables_of_the_server(post, path):
    """They hold for what a request does not say."""
    server = {"template_kwargs": {"reasoning_effort": "low", "preserve_thinking": False}}
    on = {} if path.startswith("/v1") else {"think": True}
    prompt, _ = post(path, on, **server)
    assert told(prompt) == "Think little." and "hmm" not in prompt
    assert told(post(path, EFFORT_FIELDS[path][0]("medium"), **server)[0]) is None
    prompt, _ = post(path, on | {"chat_template_kwargs": {"reasoning_effort": "xhigh", "preserve_thinking": True}},
                     **server)
    assert told(prompt) == "Think much." and ("hmm" in prompt) == (path != "/api/generate")


def test_other_endpoints_that_render(template):
    client = app_of(ScriptedEngine("a", template)).test_client()
    for fields, words in ({"reasoning_effort": "low"}, "Think little."), ({"reasoning_effort": "max"}, "Think much."):
        assert told(client.post("/apply-template", json={"messages": HISTORY} | fields).json["prompt"]) == words
    counts = [client.post(path, json=body | {"chat_template_kwargs": {"preserve_thinking": keep}}).json["input_tokens"]
              for path, body in (("/v1/messages/count_tokens", {"messages": WITH_THOUGHTS["/v1/messages"]["messages"]}),
                                 ("/v1/responses/input_tokens", WITH_THOUGHTS["/v1/responses"]))
              for keep in (True, False)]
    assert counts[0] > counts[1] and counts[2] > counts[3]


# ---- the command line ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    rewritten(path, keys={"tokenizer.chat_template": TEMPLATE})
    return str(path)


@pytest.fixture
def prompts(monkeypatch):
    """Every prompt that the command line renders for a conversation."""
    found, render = [], ChatTemplate.render

    def recorded(self, messages, *arguments, **more):
        found.append(render(self, messages, *arguments, **more))
        return found[-1]

    monkeypatch.setattr(ChatTemplate, "render", recorded)
    return found


def run(model, variables, *arguments):
    return main(["-m", model, "--card", "emulated", "--ctx", "512", "--max-tokens", "2",
                 "--chat-template-kwargs", json.dumps(variables), *arguments])


@pytest.mark.parametrize("variables, arguments, words, end", [
    ({"reasoning_effort": "low"}, [], "Think little.", "<think>\n"),
    ({"reasoning_effort": "low", "enable_thinking": False}, [], None, "</think>\n\n"),
    ({"reasoning_effort": "low"}, ["--thinking", "off"], None, "</think>\n\n"), ({}, [], "Think much.", "<think>\n")])
def test_variables_on_the_command_line(model, prompts, capsys, variables, arguments, words, end):
    assert run(model, variables, "-p", "Hello", *arguments) == 0
    assert told(prompts[-1]) == words and prompts[-1].endswith(end)


def test_variables_of_a_chat(model, prompts, monkeypatch):
    """Thoughts of earlier turns stand apart, and are kept or not as the template is told."""
    answer = Message()
    answer.blocks = [Thought("hmm"), Content("hello")]
    monkeypatch.setattr(cli_chat, "print_answer", lambda *_: (answer, False))
    for keep in True, False:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi\nbye\n"), encoding="utf-8"))
        assert run(model, {"preserve_thinking": keep, "reasoning_effort": "medium"}, "--chat") == 0
        thought = "<think>\nhmm\n</think>\n\n" * keep
        assert prompts[-1] == ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" + thought +
                               "hello<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n<think>\n")


@pytest.mark.parametrize("task", [["-p", "Hello"], ["--chat"], ["--serve", "0"]])
def test_variables_that_the_template_refuses_are_told_before_anything_is_loaded(model, monkeypatch, capsys, task):
    monkeypatch.setattr(qengine, "load", lambda *_, **__: pytest.fail("a model is loaded"))
    assert run(model, {"reasoning_effort": "high"}, *task) == 2
    assert "the chat template refuses the messages: No degree of thinking is called high." in capsys.readouterr().err


def test_variables_that_the_template_does_not_use(model, capsys):
    assert run(model, {"effort": "low", "preserve_thinking": True}, "-p", "Hello") == 0
    assert "warning: the chat template of this model does not use effort\n" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, words", [
    (["--chat-template-kwargs", "low"], "must be a JSON object"), (["--chat-template-kwargs", "[1]"], "a JSON object"),
    (["--chat-template-kwargs", '{"messages": []}'], "may not set 'messages'"),
    (["--chat-template-kwargs", '{"enable_thinking": 1}'], "'enable_thinking' is neither true nor false"),
    (["--chat-template-kwargs", '{"enable_thinking": true}', "--thinking", "on"], "say the same: give one of them"),
    (["--chat-template-kwargs", "{}", "--raw"], "--chat-template-kwargs is for chat templates, and --raw uses none")])
def test_variables_that_are_mistakes(capsys, arguments, words):
    with pytest.raises(SystemExit) as leave:
        main(["-p", "Hello", *arguments])
    assert leave.value.code == 2 and words in capsys.readouterr().err


def test_a_model_without_a_template(tmp_path, capsys):
    path = tmp_path / "m.gguf"
    rewritten(path, drop=["tokenizer.chat_template"])
    assert run(str(path), {"reasoning_effort": "low"}, "-p", "Hello") == 2
    assert "--chat-template-kwargs is for chat templates, and this model has none" in capsys.readouterr().err
