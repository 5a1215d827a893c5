"""Results of tools reach the model in the order of the calls, in whatever order they are sent. Over all endpoints that
take results."""

import pytest

from api.results import CallId, in_order
from engine.request import RequestError
from tests.clients import app_of
from tests.scripted import ScriptedEngine, shipped
from tests.test_control_tokens import RICH, Recorded

TEXTS = {"a": "21 in Seoul", "b": "25 in Busan", "nope": "30 nowhere"}
CITIES = {"a": "Seoul", "b": "Busan"}
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


def messages_of(ids, named=True):
    """A conversation as OpenAI and Ollama have it: two calls, and results of these ids. named: whether they say so."""
    calls = [{"id": id, "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
             for id, city in CITIES.items()]
    return {"messages": [
        {"role": "system", "content": "Be short."}, {"role": "user", "content": "Where is it warmer?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "content": TEXTS[id]} | ({"tool_call_id": id} if named else {}) for id in ids)],
        "tools": [{"type": "function", "function": FUNCTION}]}


def anthropic(ids):
    return {"max_tokens": 9, "system": "Be short.", "messages": [
        {"role": "user", "content": "Where is it warmer?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": id, "name": "weather", "input": {"city": city}}
                                          for id, city in CITIES.items()]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": TEXTS[id]} for id in ids]}],
        "tools": [{"name": "weather", "input_schema": FUNCTION["parameters"]}]}


def responses(ids):
    return {"instructions": "Be short.", "input": [
        {"role": "user", "content": "Where is it warmer?"},
        *({"type": "function_call", "call_id": id, "name": "weather", "arguments": f'{{"city": "{city}"}}'}
          for id, city in CITIES.items()),
        *({"type": "function_call_output", "call_id": id, "output": TEXTS[id]} for id in ids)],
        "tools": [{"type": "function"} | FUNCTION]}


def ollama(ids):
    return {"model": "m", "stream": False} | messages_of(ids)


# Of each endpoint that takes results: its request with results of these ids, and the field of the second id.
SENT = {"/v1/chat/completions": (messages_of, "messages[4].tool_call_id"),
        "/apply-template": (messages_of, "messages[4].tool_call_id"),
        "/v1/messages": (anthropic, "messages[2].content[1].tool_use_id"),
        "/v1/messages/count_tokens": (lambda ids: {name: value for name, value in anthropic(ids).items()
                                                   if name != "max_tokens"}, "messages[2].content[1].tool_use_id"),
        "/v1/responses": (responses, "input[4].call_id"), "/v1/responses/input_tokens": (responses, "input[4].call_id"),
        "/api/chat": (ollama, "messages[4].tool_call_id")}


@pytest.fixture
def ask():
    """ask(path, request): (status, answer, prompt)"""
    template = Recorded(shipped().template)
    client = app_of(ScriptedEngine("Hi.", template)).test_client()

    def ask(path, request):
        answer = client.post(path, json=request)
        return answer.status_code, answer.get_data(as_text=True), template.prompts[-1] if template.prompts else ""
    return ask


def test_every_endpoint_that_takes_results_is_tested():
    assert SENT.keys() == RICH.keys() - {"/api/generate"}


@pytest.mark.parametrize("path", SENT)
def test_results_stand_in_the_order_of_their_calls(ask, path):
    make, field = SENT[path]
    status, _, usual = ask(path, make(["a", "b"]))
    assert status == 200 and -1 < usual.index("21 in Seoul") < usual.index("25 in Busan")
    assert ask(path, make(["b", "a"]))[::2] == (200, usual)
    for ids, said in ((["a", "nope"], f"'{field}' names no call before it: 'nope'"),
                      (["a", "a"], f"'{field}' names a call that has its result already: 'a'")):
        status, answer, _ = ask(path, make(ids))
        assert status == 400 and said in answer


def test_results_without_ids_stand_as_they_come(ask):
    """As clients of llama.cpp and Ollama send them."""
    path = "/v1/chat/completions"
    prompts = [ask(path, messages_of(ids, named))[2] for ids, named in
               (("ba", False), ("ab", True), ("b", True), ("b", False))]
    assert prompts[0].index("25 in Busan") < prompts[0].index("21 in Seoul") and prompts[2] == prompts[3]
    sent = messages_of("ba", False)
    sent["messages"][3]["tool_call_id"] = "b"           # so the other one is of the other call
    sent["messages"][4]["tool_call_id"] = None
    assert ask(path, sent)[::2] == (200, prompts[1])
    sent["messages"][4]["tool_call_id"] = 5
    assert ask(path, sent)[:1] == (400,)


def test_an_error_counts_the_items_of_its_own_request():
    client = app_of(ScriptedEngine("Hi.")).test_client()
    first = client.post("/v1/responses", json=responses([])).json["id"]
    outputs = [{"type": "function_call_output", "call_id": id, "output": "x"} for id in ("a", "nope")]
    answer = client.post("/v1/responses", json={"previous_response_id": first, "input": outputs})
    assert answer.status_code == 400 and answer.json["error"]["param"] == "input[1].call_id"


def conversation(*said):
    """Messages: a list of ids is a message that calls tools, (id, text) a result, a string a message of the user."""
    kinds = {list: lambda ids: {"role": "assistant", "tool_calls": [{"id": id} for id in ids]},
             tuple: lambda result: {"role": "tool", "content": result[1]} | (
                 {"tool_call_id": CallId(result[0], "id")} if result[0] is not None else {}),
             str: lambda text: {"role": "user", "content": text}}
    return [kinds[type(one)](one) for one in said]


def contents(messages):
    return " ".join(message.get("content", ".") for message in messages)


@pytest.mark.parametrize("said, shown", [
    ([["a", "b", "c"], ("c", "C"), (None, "A"), ("b", "B")], ". A B C"),
    ([["a", "b"], ("b", "B"), "and", ("a", "A")], ". A and B"),                 # Anthropic's, of two messages
    ([["a"], ("a", "A"), ["a", "b"], ("b", "B2"), ("a", "A2")], ". A . A2 B2"),     # numbered anew in each turn
    ([["a", "b"], ("b", "B"), ["c"], ("c", "C"), ("a", "A")], ". B . A C"),         # one that came late
    ([["x", "x"], ("x", "1"), ("x", "2")], ". 1 2"), ([["", ""], ("", "1"), ("", "2")], ". 1 2"),
    ([["", ""], ("p", "1"), ("q", "2")], ". 1 2"),                                  # ids of results alone
    ([["a", "b"], ("b", "B")], ". B"),                                              # a call without a result
    ([(None, "1"), "and", (None, "2")], "1 and 2"), ([["a"], (None, "1"), (None, "2")], ". 1 2")])
def test_orders(said, shown):
    assert contents(in_order(conversation(*said))) == shown


def test_a_result_before_its_call_has_none():
    with pytest.raises(RequestError, match="'id' names no call before it: 'a'"):
        in_order(conversation(("a", "A"), ["a"]))


def test_very_many_results():
    ids = [str(i) for i in range(10_000)]
    messages = in_order(conversation(ids, *((id, id) for id in reversed(ids))))
    assert [message["content"] for message in messages[1:]] == ids
