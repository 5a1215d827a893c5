"""Fields of other servers (api/field_table.py): every row of the table is what the server does."""

import re
from pathlib import Path

import pytest
from anthropic.types import message_create_params as stable
from anthropic.types.beta import message_create_params as beta
from openai.types import completion_create_params as text
from openai.types import embedding_create_params as embeddings
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

from api.field_table import (CHAT, EMBEDDINGS, FIELDS, MESSAGES, OBEYED, REFUSED, RERANK, RESPONSES, TEXT,
                             WITHOUT_EFFECT, fields_of, page)
from engine.limits import SAMPLING
from engine.template import ChatTemplate
from tests.clients import app_of
from tests.scripted import ScriptedEngine, ScriptedPooling

HI, TOOL = {"role": "user", "content": "Hi"}, {"name": "f", "description": "d"}
BEGUN = {"messages": [HI, {"role": "assistant", "content": "Yes"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BODIES = {CHAT: {"messages": [HI]}, TEXT: {"prompt": "Hi"}, RESPONSES: {"input": "Hi"},
          MESSAGES: {"messages": [HI], "max_tokens": 50}, EMBEDDINGS: {"input": "Hi"},
          RERANK: {"query": "Hi", "documents": ["Yes", "No, none"]}}
ANSWER = "Hello <|box_start|>there."
TEMPLATE = ChatTemplate("{{ messages[-1].content }}{{ documents }}")        # the model that ships knows no documents

# What shows that a field is obeyed: a value, or a value and what else is sent with it and without it.
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
OPENAI_TOOLS = {"tools": [{"type": "function", "function": TOOL}]}
SHOWN = {
    **{name: 3 if kind is int else 0.5 for name, (kind, *_) in SAMPLING.items()}, "repetition_guard": False, "draft": 3,
    "sparse": False,
    "prompt": "Other", "echo": True, "n": 2, "stop": "there", "logit_bias": {"5": 1}, "stream": True,
    "ignore_eos": True, "stream_options": ({"include_usage": True}, {"stream": True}), "stop_token_ids": [7],
    "min_tokens": 3, "skip_special_tokens": False, "return_token_ids": True, "timeout": 5, "n_predict": 3,
    "max_completion_tokens": 3,
    "repeat_penalty": 1.5, "repeat_last_n": (0, {"repeat_penalty": 1.5}), "response_format": {"type": "json_object"},
    "guided_json": SCHEMA, "guided_regex": "a+", "guided_choice": ["a", "b"], "guided_grammar": 'start: "a"',
    "structured_outputs": {"regex": "a+"}, "grammar": 'root ::= "a"', "json_schema": SCHEMA,
    "tools": OPENAI_TOOLS["tools"], "tool_choice": ("required", OPENAI_TOOLS),
    "parallel_tool_calls": (False, OPENAI_TOOLS), "logprobs": True, "top_logprobs": (1, {"logprobs": True}),
    "thinking_budget": (3, THINKS), "reasoning_effort": "high", "messages": [{"role": "user", "content": "Other"}],
    "chat_template_kwargs": {"enable_thinking": True}, "documents": [{"title": "a", "text": "b"}],
    "add_generation_prompt": False, "continue_final_message": (False, BEGUN), "system": "S",
    "stop_sequences": ["there"], "thinking": {"type": "enabled", "budget_tokens": 1024},
    **dict.fromkeys(["thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens"], (3, THINKS)),
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "input": "Other", "instructions": "S",
    "max_output_tokens": 3, "text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "high"},
    "include": ["message.output_text.logprobs"], "metadata": {"a": "b"}, "truncation": "auto", "store": False,
    "encoding_format": "base64", "dimensions": 3, "query": "Other", "top_n": 1, "return_documents": True,
    "instruction": "Find nothing", "max_tokens_per_doc": 1}
SHOWN_ELSEWHERE = {
    (RERANK, "documents"): ["Other"],
    (RERANK, "truncation"): (True, {"documents": ["Yes ", "Yes " * 500]}),      # without it they are refused
    (TEXT, "logprobs"): 1, (RESPONSES, "tools"): [TOOL | {"type": "function"}], (RESPONSES, "top_logprobs"): 1,
    (RESPONSES, "tool_choice"): ("required", {"tools": [TOOL | {"type": "function"}]}),
    (RESPONSES, "parallel_tool_calls"): (False, {"tools": [TOOL | {"type": "function"}]}),
    (TEXT, "thinking_budget"): 3, (RESPONSES, "thinking_budget"): (3, {"reasoning": {"effort": "high"}}),
    (MESSAGES, "thinking_budget"): (3, {"thinking": {"type": "adaptive"}}),
    (MESSAGES, "tools"): [TOOL | {"input_schema": {}}],
    (MESSAGES, "tool_choice"): ({"type": "any"}, {"tools": [TOOL | {"input_schema": {}}]})}

INSIDE = {"model": "other", "best_of": 1, "stream_options": {"include_obfuscation": True},
          "thread": {"type": "create"}, "context_management": {"edits": []}}


def rows(effect):
    return [pytest.param(path, row, id=f"{path} {row.name}") for row in FIELDS if row.effect == effect
            for path in row.paths]


def ask(path, body, status=200):
    """What a request asks of the engine and what is answered, without what no two answers share."""
    kind = {EMBEDDINGS: "embedding", RERANK: "reranking"}.get(path)
    engine = ScriptedPooling(kind) if kind else ScriptedEngine(ANSWER, TEMPLATE if "documents" in body else None)
    answer = app_of(engine).test_client().post(path, json=BODIES[path] | body)
    assert answer.status_code == status, answer.text
    alone = r'"(id|item_id|call_id|created(_at)?|completed_at|timings)": ?("[^"]*"|\d+|\{[^}]*\})'
    return engine.requests, re.sub(alone, "", answer.text)


@pytest.mark.parametrize("path, row", rows(OBEYED))
def test_obeyed(path, row):
    if row.name == "previous_response_id":
        return                      # a second request: test_api_responses.py
    shown = SHOWN_ELSEWHERE.get((path, row.name), SHOWN[row.name])
    value, beside = shown if isinstance(shown, tuple) else (shown, {})
    without = {"documents": []} if (path, row.name) == (CHAT, "documents") else {}
    status = 400 if (path, row.name) == (RERANK, "truncation") else 200
    assert ask(path, beside | {row.name: value}) != ask(path, beside | without, status)


@pytest.mark.parametrize("path, row", rows(WITHOUT_EFFECT))
def test_without_effect(path, row):
    assert ask(path, {row.name: INSIDE.get(row.name, "anything")}) == ask(path, {})


@pytest.mark.parametrize("path, row", rows(REFUSED))
def test_refused(path, row):
    """By name; what asks for nothing is taken."""
    app = app_of(ScriptedEngine(ANSWER), [ScriptedPooling(), ScriptedPooling("reranking")])
    answer = app.test_client().post(path, json=BODIES[path] | {row.name: "anything"})
    assert answer.status_code == 400
    assert answer.json["error"]["message"].startswith(f"'{row.name}' is not supported: {row.says}")
    for value in (None, *row.neutral):
        assert ask(path, {row.name: value}) == ask(path, {})


@pytest.mark.parametrize("path, types, elsewhere", [
    (CHAT, [chat.CompletionCreateParamsBase], set()), (TEXT, [text.CompletionCreateParamsBase], set()),
    (RESPONSES, [responses.ResponseCreateParamsBase], set()),
    (EMBEDDINGS, [embeddings.EmbeddingCreateParams], set()),
    (MESSAGES, [stable.MessageCreateParamsBase, beta.MessageCreateParamsBase], {"betas"})])       # a header
def test_what_the_official_clients_can_send_is_in_the_table(path, types, elsewhere):
    sent = {name for one in types for name in one.__annotations__} - elsewhere
    assert not sent - {row.name for row in FIELDS if path in row.paths}


def test_a_field_has_one_row():
    pairs = [(row.name, path) for row in FIELDS for path in row.paths]
    assert len(pairs) == len(set(pairs))
    with pytest.raises(ValueError, match="temperature"):
        fields_of(CHAT, {})


def test_a_field_of_no_document_is_refused():
    answer = app_of(ScriptedEngine()).test_client().post(CHAT, json=BODIES[CHAT] | {"dry_multiplyer": 0})
    assert answer.status_code == 400 and "did you mean 'dry_multiplier'?" in answer.json["error"]["message"]


def test_the_page_for_people():
    """`python -m api.field_table > api/FIELDS.md` writes it anew."""
    assert (Path(__file__).parents[1] / "api/FIELDS.md").read_text() == page()
