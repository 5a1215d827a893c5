"""What programs find in errors: a code, a type and counts, as each protocol's clients look for them."""

import anthropic
import openai
import pytest

from tests.clients import CHAT, HI, TEXT, app_of, official_client, send, serving
from tests.scripted import ScriptedEngine

LONG = {"role": "user", "content": "long " * 5000}


@pytest.fixture(scope="module")
def port():
    with serving(app_of(ScriptedEngine("Hello."))) as (port, _):
        yield port


@pytest.mark.parametrize("path, body, param", [
    (CHAT, {"messages": [LONG]}, "messages"), (TEXT, {"prompt": LONG["content"]}, "prompt"),
    (TEXT, {"prompt": [1] * 4096}, "prompt"), (CHAT, {"messages": [LONG | {"content": "long" * 500_000}]}, "messages"),
], ids=["chat", "text", "ids", "letters"])
def test_a_prompt_too_long_for_openai_and_llama_cpp(port, path, body, param):
    """litellm looks for the first words of the message, langchain for the code; clients of llama.cpp look for the type
    and for the counts."""
    status, _, answer = send(port, "POST", path, body)
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert error["message"].startswith("This model's maximum context length is 4096 tokens")
    assert error["message"].endswith("--ctx of the server sets this length.")
    assert error["type"] == "exceed_context_size_error"
    assert error["n_prompt_tokens"] >= error["n_ctx"] == 4096


def test_a_prompt_too_long_for_the_official_clients(port):
    with pytest.raises(openai.BadRequestError) as caught:
        official_client(port).chat.completions.create(model="m", messages=[LONG])
    assert caught.value.code == "context_length_exceeded"
    client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0)
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: 5\d+ tokens > 4096 maximum \(--ctx of"):
        client.messages.create(model="m", max_tokens=5, messages=[LONG])


def test_a_wrong_key():
    with serving(app_of(ScriptedEngine("Hello."), keys=["secret"])) as (port, _):
        with pytest.raises(openai.AuthenticationError) as caught:
            official_client(port).chat.completions.create(model="m", messages=[HI])
        assert (caught.value.code, caught.value.type) == ("invalid_api_key", "authentication_error")
        client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError) as caught:
            client.messages.create(model="m", max_tokens=5, messages=[HI])
        assert caught.value.body["error"]["type"] == "authentication_error"
