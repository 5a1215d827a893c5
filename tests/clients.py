"""Servers under test, their clients, and what a refusal looks like."""

import asyncio
import contextlib
import http.client
import json

import openai

from api.http import serving as http_server
from api.service import create_app
from engine.pooling import PoolingEngine
from engine.text_engine import TextEngine
from tests.until import PATIENCE

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"role": "user", "content": "hi"}

# What a server may use of an engine.
OFFERED = {protocol: set(protocol.__annotations__) | {name for name in vars(protocol) if not name.startswith("_")}
           for protocol in (TextEngine, PoolingEngine)}


class Offered:
    """An engine as a server may see it: whoever asks for more than its protocol names is told so."""

    def __init__(self, engine: TextEngine | PoolingEngine):
        self._engine, self._protocol = engine, TextEngine if engine.kind == "text" else PoolingEngine

    def __getattr__(self, name):
        assert name in OFFERED[self._protocol], f"a server used {name!r}, which {self._protocol} does not offer"
        return getattr(self._engine, name)


def app_of(engine: TextEngine | PoolingEngine | None = None, side=(), **arguments):
    """The app over what a server may see of an engine, and of those beside it. arguments: of `create_app`."""
    return create_app(engine and Offered(engine), list(map(Offered, side)), **arguments)


@contextlib.contextmanager
def serving(app, tls=None):
    """A real server on a free loopback port; gives (port, Service). tls: an SSLContext, for https."""
    with http_server(app, "127.0.0.1", 0, tls) as port:
        yield int(port), app.extensions["qengine"]


def official_client(port):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


@contextlib.contextmanager
def official_clients(kind, async_kind, port, path="/v1"):
    """A client, and what runs a coroutine function of an asynchronous one: such a one belongs to its event loop."""
    arguments = {"base_url": f"http://127.0.0.1:{port}{path}", "api_key": "none", "max_retries": 0}
    with kind(**arguments) as client, asyncio.Runner() as runner:
        async_client = async_kind(**arguments)
        yield client, lambda ask: runner.run(ask(async_client))
        runner.run(async_client.close())


@contextlib.contextmanager
def scripted_clients(engine, kind, async_kind, path="/v1"):
    """The two of `official_clients` of a server with this engine."""
    with serving(app_of(engine)) as (port, _), official_clients(kind, async_kind, port, path) as clients:
        yield clients


def send(port, method, path, body=None):
    """One HTTP request, its body an object or raw bytes; gives (status, headers, decoded answer)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, data, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, answer.headers, json.loads(text)


def assert_error(answer, status, param=None):
    got, headers, body = answer
    error = body["error"]
    assert got == status and set(error) - {"n_prompt_tokens", "n_ctx"} == {"message", "type", "param", "code"}
    assert param is None or error["param"].split("[")[0] == param       # "messages[0].content", say
    assert error["message"] and "\n" not in error["message"]
    assert headers["Content-Type"] == "application/json"
