"""Running the server for others: keys, CORS, the log of requests, silence in streams, /metrics, the page's headers."""

import base64
import contextlib
import hashlib
import http.client
import itertools
import json
import logging
import math
import re
import threading
import time

import anthropic
import ollama
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import qengine
from api import access, log, page, streams
from api.service import create_app
from cli import serve
from cli.main import main
from engine import pipes
from engine.pipes import PIPES_SECONDS, PipeMeter
from engine.request import EngineStopped, Request, RequestError
from engine.served import Models, Served
from kernels.emulated import counting
from kernels.q8_gemv import gemv_q8_q8
from tests.clients import CHAT, HI, TEXT, app_of, assert_error, official_client, send, serving
from tests.paced import PacedEngine
from tests.scripted import ScriptedEngine
from tests.tiny import ROOT, tiny_engine
from tests.until import PATIENCE, wait_until

ANSWER = "Two SMs, and nothing more."
BODY = {"messages": [HI], "temperature": 0}
SHIPPED = ROOT / "models" / "qengine-10m-Q8_0.gguf"
OURS, OTHERS = "https://chat.example", "https://other.example"
STREAM = BODY | {"stream": True, "stream_options": {"include_usage": True}}


def web(engine=None, **arguments):
    """A client of an app, without sockets."""
    return app_of(engine or PacedEngine(ANSWER), **arguments).test_client()


def refusal(answer) -> str:
    """The message of a refused request, which is in OpenAI's shape."""
    assert_error((answer.status_code, answer.headers, answer.json), answer.status_code)
    return answer.json["error"]["message"]


# ---- keys --------------------------------------------------------------------------------------------------

SENT = {"bearer": {"Authorization": "Bearer {}"}, "lower": {"authorization": "bearer {}"},
        "x-api-key": {"x-api-key": "{}"}}


def with_key(way, key):
    return {name: value.format(key) for name, value in SENT[way].items()}


@pytest.mark.parametrize("way", SENT)
def test_one_of_the_keys_opens(way):
    client = web(keys=["first", "second"])
    for key in ("first", "second"):
        said = client.post(CHAT, json=BODY, headers=with_key(way, key)).json
        assert said["choices"][0]["message"]["content"] == ANSWER
    for key in ("third", "", "firs", "first2", "FIRST", "ké"):
        answer = client.post(CHAT, json=BODY, headers=with_key(way, key))
        assert answer.status_code == 401 and refusal(answer)
        assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_what_needs_a_key_and_what_does_not():
    client = web(keys=["secret"])
    for path in ("/", "/health"):
        assert client.get(path).status_code == 200
    for path in ("/v1/models", "/metrics", "/pipes", "/experts", "/openapi.json", "/nothing"):
        answer = client.get(path)
        assert answer.status_code == 401 and "x-api-key" in refusal(answer)
    assert client.get("/v1/models", headers={"x-api-key": "secret"}).status_code == 200
    assert client.get("/v1/models", headers={"Authorization": "Basic secret"}).status_code == 401
    assert client.post("/v1/messages", json={}).json["error"]["type"] == "authentication_error"     # Anthropic's word


def test_every_key_is_compared_whichever_is_right(monkeypatch):
    compared, compare = [], access.hmac.compare_digest
    monkeypatch.setattr(access.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b))
    client = web(keys=["a", "b", "c"])
    for key, status in (("a", 200), ("c", 200), ("d", 401)):
        compared.clear()
        assert client.get("/v1/models", headers={"x-api-key": key}).status_code == status
        assert {a for a, _ in compared} == {b"a", b"b", b"c"}


def test_the_official_clients_send_their_key():
    with serving(app_of(PacedEngine(ANSWER), keys=["secret"])) as (port, _):
        ours = {"api_key": "secret", "max_retries": 0}
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", **ours) as client:
            assert client.chat.completions.create(model="m", messages=[HI]).choices[0].message.content == ANSWER
        with anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", **ours) as client:
            assert client.messages.create(model="m", messages=[HI], max_tokens=99).content[0].text == ANSWER
        with official_client(port) as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with (anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0) as client,
              pytest.raises(anthropic.AuthenticationError)):
            client.messages.create(model="m", messages=[HI], max_tokens=99)


def test_a_file_of_keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("one\n\n  two  \r\n", encoding="utf-8")
    assert access.read_keys(["zero"], str(path)) == ["zero", "one", "two"]
    assert access.read_keys([], None) == []
    path.write_text("\ufeff# of the office\none\n  # two\n", encoding="utf-8")
    assert access.read_keys([], str(path)) == ["one"]
    bad = tmp_path / "bad"
    bad.write_text("one\n# two words\n\ntwo words\n", encoding="utf-8")
    path.write_text("\n#\n", encoding="utf-8")
    for keys, file, named in (([], str(path), "holds no key"), ([], str(tmp_path / "none"), "No such file"),
                              ([], str(bad), "bad, line 4: an API key"), ([""], None, "key"),
                              (["two words"], None, "spaces"), (["ké"], None, "ASCII")):
        with pytest.raises(RequestError, match=named):
            access.read_keys(keys, file)


@pytest.mark.parametrize("arguments, warned", [
    ([], False), (["--host", "localhost"], False), (["--host", "0.0.0.0"], True),
    (["--host", "0.0.0.0", "--api-key", "secret"], False)], ids=str)
def test_a_server_open_to_all_says_so(monkeypatch, capsys, arguments, warned):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(qengine, "load", interrupt)      # it listens by then
    assert main(["--serve", "0", *arguments]) == 130
    assert ("warning: whoever reaches 0.0.0.0" in capsys.readouterr().err) == warned


@pytest.mark.parametrize("host, here", [("0.0.0.0", "127.0.0.1"), ("::", "[::1]")])
@pytest.mark.parametrize("own", ["10.1.2.3", "fd00::7", None])
def test_a_server_for_others_says_its_address(monkeypatch, host, here, own):
    class Probe(contextlib.nullcontext):
        def connect(self, address):
            if own is None:
                raise OSError("Network is unreachable")

        def __enter__(self):
            return self

        def getsockname(self):
            return own, 5

    monkeypatch.setattr(serve.socket, "socket", lambda *_: Probe())
    monkeypatch.setattr(serve.socket, "gethostname", lambda: "rig")
    assert serve.names_of(host) == [here, {"fd00::7": "[fd00::7]", None: "rig"}.get(own, own)]


def test_other_servers_are_called_as_they_were_told():
    assert (serve.names_of("localhost"), serve.names_of("::1"), serve.names_of("10.1.2.3")) == (
        ["localhost"], ["[::1]"], ["10.1.2.3"])
    assert serve.names_of("0.0.0.0")[0] == "127.0.0.1" and serve.names_of("0.0.0.0")[1] != "0.0.0.0"


@pytest.mark.parametrize("arguments, mode, said", [
    (["--cors", "*"], 0o600, "warning: every web page that a user of this machine opens can use this server"),
    (["--cors", "*", "--api-key", "k"], 0o600, None), (["--cors", OURS], 0o600, None),
    (["--cors", OURS + ":443/"], 0o600, f"browsers send this origin as {OURS}"),
    (["--api-key-file", "FILE"], 0o600, None), (["--api-key-file", "FILE"], 0o644, "warning: other users")], ids=str)
def test_what_is_said_of_keys_and_pages_at_the_start(monkeypatch, capsys, tmp_path, arguments, mode, said):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    file = tmp_path / "keys"
    file.write_text("k\n")
    file.chmod(mode)
    monkeypatch.setattr(qengine, "load", interrupt)
    assert main(["--serve", "0", *[str(file) if one == "FILE" else one for one in arguments]]) == 130
    told = capsys.readouterr().err
    assert said in told if said else "warning" not in told and "browsers" not in told


# ---- web pages of other origins ----------------------------------------------------------------------------

PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}


@pytest.mark.parametrize("origins, origin, told", [
    ([OURS], OURS, OURS), ([OTHERS, OURS], OURS, OURS), (["*"], OURS, "*"), ([OURS], OTHERS, None), ([], OURS, None),
    ([OURS], None, None), (["*"], None, None)], ids=str)
def test_pages_of_origins_that_were_named_may_read(origins, origin, told):
    client, headers = web(origins=origins, keys=["secret"]), {"Origin": origin} if origin else {}
    answers = [client.options(CHAT, headers=headers | PREFLIGHT), client.get("/v1/models", headers=headers),
               client.get("/v1/models", headers=headers | {"x-api-key": "secret"})]
    assert [answer.headers.get("Access-Control-Allow-Origin") for answer in answers] == [told] * 3      # 401s, too
    assert [answer.status_code for answer in answers] == [204 if told else 403 if origin else 401, 401, 200]
    assert told or not origin or f"--cors {origin} lets them" in refusal(answers[0])
    if told:
        assert answers[0].headers["Access-Control-Allow-Headers"] == PREFLIGHT["Access-Control-Request-Headers"]
        assert "POST" in answers[0].headers["Access-Control-Allow-Methods"]
        assert "X-Request-Id" in answers[2].headers["Access-Control-Expose-Headers"]
    if origins and "*" not in origins:                          # a cache must not give one origin's answer to another
        assert "Origin" in answers[2].headers["Vary"]


@pytest.mark.parametrize("given, origin", [
    (OURS, OURS), (OURS + "/", OURS), ("HTTPS://Chat.Example", OURS), (OURS + ":443", OURS), (f" {OURS} ", OURS),
    ("http://localhost:3000", "http://localhost:3000"), ("http://Localhost:80/", "http://localhost"),
    ("https://chat.example:80", "https://chat.example:80"), ("http://[::1]:8080", "http://[::1]:8080"),
    ("https://bücher.example", "https://xn--bcher-kva.example"), ("*", "*"), ("null", "null"),
    ("chrome-extension://abcdef", "chrome-extension://abcdef")])
def test_origins_as_browsers_send_them(given, origin):
    assert access.read_origin(given) == origin
    if origin not in ("*", "null"):
        client = web(origins=[access.read_origin(given)])
        answer = client.get("/v1/models", headers={"Origin": origin})
        assert answer.headers["Access-Control-Allow-Origin"] == origin


@pytest.mark.parametrize("given, reason", [
    ("chat.example", "as https://chat.example does"), ("localhost:3000", "begins with its scheme"),
    ("//chat.example", "begins with its scheme"), ("", "begins with its scheme"),
    (OURS + "/app", f"no path, and browsers would send {OURS}"), (OURS + "?a", "no path"), (OURS + "/#a", "no path"),
    ("https://*.example", "one host"), (f"{OURS},{OTHERS}", "one host"), ("https://me@chat.example", "one host"),
    ("https://", "one host"), ("https://chat.example:99999", "no origin"), ("https://[::1", "no origin"),
    ("https://a..b", "no origin"), ("https://chat example", "one host")])
def test_origins_that_no_browser_sends(given, reason):
    with pytest.raises(RequestError, match="^--cors ") as error:
        access.read_origin(given)
    assert reason in str(error.value)


# ---- web pages, where there are no keys ---------------------------------------------------------------------


def ask_as(client, host, origin):
    return client.post(CHAT, json=BODY, headers={"Host": host} | ({"Origin": origin} if origin else {}))


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1:8080", "127.0.0.5", "[::1]:8080",
                                  "LOCALHOST.:1"])
@pytest.mark.parametrize("listens", ["127.0.0.1", "localhost", "::1", "127.0.0.5"])
def test_on_loopback_the_server_has_the_names_of_this_machine(listens, host):
    """As an SSH tunnel has them, too: its own end is one of this machine."""
    client = web(host=listens)
    for origin in (None, f"http://{host}", f"https://{host}"):
        assert ask_as(client, host, origin).status_code == 200
    assert client.get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", [
    "evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "[::1", "10.0.0.1:8080",
    "@",
    "localhost@evil.example"])
def test_a_name_that_leads_here_is_not_enough(host):
    """DNS rebinding: to the browser, a page of that name and this server are one origin."""
    for origin in (None, f"http://{host}"):
        answer = ask_as(web(), host, origin)
        assert answer.status_code == 403 and "--cors" in refusal(answer)
        assert ask_as(web(host="0.0.0.0"), host, origin).status_code == 200         # it may have any name
        assert ask_as(web(origins=["*"]), host, origin).status_code == 200
    assert web().get("/", headers={"Host": host}).status_code == 403
    answer = web(keys=["secret"]).post(CHAT, json=BODY, headers={"Host": host, "x-api-key": "secret"})
    assert answer.status_code == 200


@pytest.mark.parametrize("listens", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("origin", [OTHERS, "http://localhost:3000", "null", "http://localhost:8080.evil.example"])
def test_pages_of_other_origins_cannot_act_without_reading(listens, origin):
    """What a browser sends without asking first: text/plain, which may well be JSON."""
    engine = PacedEngine(ANSWER)
    client = web(engine, host=listens, origins=[OURS])
    headers = {"Host": "localhost:8080", "Origin": origin, "Content-Type": "text/plain"}
    answer = client.post(CHAT, data=json.dumps(BODY), headers=headers)
    assert answer.status_code == 403 and "--cors" in refusal(answer) and not engine.requests
    answer = client.post("/v1/messages", data=b"{}", headers=headers)
    assert answer.status_code == 403 and answer.json["error"]["type"] == "permission_error"
    assert client.post(CHAT, data=json.dumps(BODY), headers=headers | {"Origin": OURS}).status_code == 200


def test_behind_a_proxy():
    """By the name that --cors gives, whether or not the proxy passes it on."""
    client = web(origins=[OURS])
    for host in ("chat.example", "127.0.0.1:8080"):
        assert ask_as(client, host, OURS).status_code == 200
    assert client.get("/", headers={"Host": "chat.example"}).status_code == 200
    assert ask_as(client, "127.0.0.1:8080", OTHERS).status_code == 403


# ---- the log -----------------------------------------------------------------------------------------------


@pytest.fixture
def lines(caplog):
    """The log lines of requests so far, each as its fields before a text or an error."""
    caplog.set_level(logging.INFO, "qengine.requests")

    def read(n=None):
        wait_until(lambda: n is None or len(caplog.messages) >= n)
        fields = [re.split(" (?:text|error|param)=", message)[0].split(" ") for message in caplog.messages]
        return [dict(field.split("=", 1) for field in each) for each in fields]
    return read


@pytest.mark.parametrize("host, origin", [("127.0.0.1:8080", OTHERS), ("evil.example", None)])
def test_the_log_says_why_a_page_may_not_ask(caplog, host, origin):
    """The browser of its developer hides the answer."""
    caplog.set_level(logging.INFO, "qengine.requests")
    preflight = {"Host": host, "Access-Control-Request-Method": "POST"} | ({"Origin": origin} if origin else {})
    for answer in ask_as(web(), host, origin), web().options(CHAT, headers=preflight):
        said = refusal(answer)
        assert origin is None or said == f"pages of {origin} may not ask this server: --cors {origin} lets them"
        answer.close()                  # the log's line is written then
        assert caplog.messages[-1].endswith(f" error={json.dumps(said)}")
    assert "method=OPTIONS" in caplog.messages[-1]
    ask_as(web(), "127.0.0.1:8080", None).close()
    assert " error=" not in caplog.messages[-1] and " status=200 " in caplog.messages[-1]


@pytest.mark.parametrize("headers, said", [
    (PREFLIGHT | {"Origin": OTHERS}, f"pages of {OTHERS} may not ask this server: --cors {OTHERS} lets them"),
    ({"x-api-key": "wrong"}, "the API key is not one of this server's"),
    ({}, "this server wants an API key, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'")], ids=str)
def test_the_log_says_so_of_a_server_with_keys_too(caplog, headers, said):
    caplog.set_level(logging.INFO, "qengine.requests")
    client = web(keys=["secret"], origins=[OURS])
    (client.options if PREFLIGHT.items() <= headers.items() else client.get)("/v1/models", headers=headers).close()
    assert caplog.messages[-1].endswith(f" error={json.dumps(said)}")


@pytest.mark.parametrize("path, body, said", [
    (CHAT, BODY | {"temperature": 9}, 'param="temperature"'), (CHAT, {"messages": []}, 'param="messages"'),
    (CHAT, BODY | {"messages": [HI | {"content": ["my secret"]}]}, 'param="messages[0].content[0]"'),
    (CHAT, BODY | {"my secret": 1}, 'param="my secret"'),               # a name, and no prompt
    (CHAT, {"messages": [HI | {"content": "my secret " * 5000}]}, 'code=context_length_exceeded param="messages"'),
    (CHAT, [], 'error="the request body must be a JSON object"'),
    ("/v1/embeddings", {"input": "a"}, 'code=model_not_found param="model"'),
    ("/v1/chat", {}, 'error="POST /v1/chat is not served; /openapi.json says what is"')], ids=str)
def test_the_log_says_why_a_request_was_refused(caplog, path, body, said):
    """And quotes no text of it."""
    caplog.set_level(logging.INFO, "qengine.requests")
    answer = web().post(path, json=body)
    assert answer.status_code in (400, 404), answer.json
    answer.close()
    assert caplog.messages[-1].endswith(f" {said}"), caplog.messages
    assert "secret" not in caplog.text or said == 'param="my secret"'


def test_the_log_says_that_a_server_was_busy(caplog):
    caplog.set_level(logging.INFO, "qengine.requests")
    web(max_requests=0).post(CHAT, json=BODY).close()
    assert caplog.messages[-1].endswith(' error="too many requests: 0 of 0 are open already"')


def test_the_log_names_the_model_where_there_are_several(lines):
    engines = [PacedEngine(ANSWER) for _ in range(2)]
    for engine, name in zip(engines, ("qwen small", "other")):
        engine.name = name
    client = create_app(models=Models(list(map(Served, engines)))).test_client()
    for asked in "small", "other", "unknown":
        client.post(CHAT, json=BODY | {"model": asked}).close()
    web().post(CHAT, json=BODY).close()
    assert [line.get("model") for line in lines()] == ["qwen%20small", "other", "qwen%20small", None]


def test_a_line_for_each_request(lines):
    engine = PacedEngine(ANSWER, pace=0.01)
    with serving(app_of(engine)) as (port, _):
        for body in (BODY, STREAM):
            connection_id = send_raw(port, body)
            line = lines(1)[-1] if body is BODY else lines(2)[-1]
            assert line["id"] == connection_id
            assert [line[name] for name in ("client", "method", "path", "status", "finish")] == [
                "127.0.0.1", "POST", CHAT, "200", "stop"]
            generation = engine.generations[-1]
            counts = generation.n_prompt, generation.n_cached, generation.n_generated
            assert tuple(int(line[name]) for name in ("prompt", "cached", "generated")) == counts
            times = generation.token_times
            assert float(line["tokens_per_s"]) == pytest.approx((len(times) - 1) / (times[-1] - times[0]), abs=0.1)
            assert 0 <= float(line["first_token"]) < float(line["seconds"])
            drafts = {"drafts": "5", "accepted": "0.60"} if engine.checks else {}
            assert {name: line[name] for name in ("drafts", "accepted") if name in line} == drafts
            engine.checks = (3, 3), (2, 0)


def send_raw(port, body):
    """The X-Request-Id of an answer that is read to its end, whatever its type."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("POST", CHAT, json.dumps(body))
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.headers["X-Request-Id"]


def test_a_line_adds_up_several_answers(lines):
    engine = PacedEngine(ANSWER, pace=0.002)
    web(engine).post(CHAT, json=BODY | {"n": 3}).close()
    [line] = lines()
    assert int(line["generated"]) == sum(g.n_generated for g in engine.generations) and len(engine.generations) == 3
    times = sorted(time for g in engine.generations for time in g.token_times)
    speed = (sum(len(g.token_times) for g in engine.generations) - 3) / (times[-1] - times[0])
    assert float(line["tokens_per_s"]) == pytest.approx(speed, abs=0.1)


def test_request_ids_are_the_clients_where_they_are_sane(lines):
    client = web()
    for given, kept in (("job-7:a_b.c", True), ("x" * 100, True), ("x" * 101, False), ("a b", False), ("", False),
                        ("id=1", False), ("é", False)):
        answer = client.get("/v1/models", headers={"X-Request-Id": given})
        answer.close()
        said = answer.headers["X-Request-Id"]
        assert said == answer.headers["Request-Id"]
        assert (said == given) == kept and re.fullmatch(r"[\w.:-]{1,100}", said)
        assert lines()[-1]["id"] == said
    assert len({line["id"] for line in lines()}) == len(lines())


def test_a_line_is_one_line_whatever_the_path(lines):
    web().get("/a b%0Aid=forged%20status=200/%EA%B0%80").close()
    [line] = lines()
    assert line["status"] == "404" and line["path"] == "/a%20b%0Aid%3Dforged%20status%3D200/%EA%B0%80"


@pytest.mark.parametrize("address", ["203.0.113.7", "2001:db8::7", "fe80::1%eth0"])
def test_a_line_says_who_asked(lines, address):
    """Also where a key is wrong. What a header says of it counts nothing."""
    for keys, status in ((), "200"), (["secret"], "401"):
        web(keys=keys).get("/v1/models", environ_overrides={"REMOTE_ADDR": address}, headers={
            "X-Forwarded-For": "198.51.100.1", "Forwarded": "for=198.51.100.1"}).close()
        assert (lines()[-1]["client"], lines()[-1]["status"]) == (address, status)


def test_no_header_of_a_client_says_who_asked(lines):
    """The sockets of the server pass on none that would."""
    with serving(app_of(PacedEngine())) as (port, _):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        connection.request("GET", "/v1/models", headers={"X-Forwarded-For": "198.51.100.1",
                                                         "Forwarded": "for=198.51.100.1"})
        connection.getresponse().read()
        connection.close()
        assert lines(1)[-1]["client"] == "127.0.0.1"


def test_prompts_are_logged_only_when_asked(caplog, lines):
    secret = {"messages": [{"role": "user", "content": "my secret\nplan"}], "n": 2}
    web().post(CHAT, json=secret).close()
    assert "secret" not in caplog.text
    web(log_prompts=True).post(CHAT, json=secret).close()
    assert caplog.messages[-1].count("my secret\\nplan") == 1   # JSON: one line, and the prompt is the same for both


def test_polls_that_go_well_are_no_news(lines):
    client = web()
    for path in ("/health", "/metrics"):
        client.get(path).close()
    assert lines() == []
    web(keys=["secret"]).get("/metrics").close()
    assert [line["status"] for line in lines()] == ["401"]


def test_how_an_answer_ended(lines):
    def failing(prompt):
        raise EngineStopped("the card fell off the bus")

    with serving(app_of(PacedEngine(ANSWER * 99, pace=0.01))) as (port, service):
        with official_client(port) as client:
            stream = client.chat.completions.create(model="m", messages=[HI], stream=True)
            next(stream)
            stream.close()
        assert lines(1)[-1]["finish"] == "abort"
        send(port, "POST", CHAT, BODY | {"max_tokens": 3})
        assert lines(2)[-1]["finish"] == "length"
        service.models.first.engine = PacedEngine(failing)
        send_raw(port, STREAM)
        assert (lines(3)[-1]["status"], lines(3)[-1]["finish"]) == ("200", "error")     # the status was out already
        assert send(port, "POST", CHAT, BODY)[0] == 503
        assert (lines(4)[-1]["status"], lines(4)[-1]["finish"]) == ("503", "error")
        assert not service.log.running


def test_what_runs_is_shown_with_its_speed(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(log, "REFRESH_SECONDS", 0.01)
    engine = PacedEngine(ANSWER * 9, pace=0.01, delay=0.1)
    with serving(app_of(engine)) as (port, service), log.on_stderr(service.log):
        request_id = send_raw(port, STREAM)
        wait_until(lambda: not service.log.running)
    shown = capsys.readouterr().err
    n_prompt = engine.generations[0].n_prompt
    assert f"{request_id[:8]}  prompt of {n_prompt} tokens" in shown
    speeds = re.findall(rf"{request_id[:8]}  \d+ tokens, ([\d.]+) tokens/s", shown)
    begin, *times = engine.generations[0].token_times
    assert speeds and speeds[-1] in {f"{n / (at - begin):.1f}" for n, at in enumerate(times, start=1)}
    assert re.search(rf"id={request_id} .* finish=stop\n", shown)


# ---- silence in streams ------------------------------------------------------------------------------------


def test_a_silent_stream_says_that_it_lives(monkeypatch):
    monkeypatch.setattr(streams, "SILENCE_SECONDS", 0.02)
    with serving(app_of(engine := PacedEngine(ANSWER, delay=PATIENCE))) as (port, _):
        connection, started = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE), time.monotonic()
        connection.request("POST", TEXT, json.dumps({"prompt": "hi", "stream": True}))
        answer = connection.getresponse()
        assert [answer.readline() for _ in range(8)] == [b": keep-alive\n", b"\n"] * 4
        assert time.monotonic() - started >= 4 * 0.02
        engine.delay = 0.1
        events = answer.read().decode().split("\n\n")
        assert (answer.headers["Cache-Control"], answer.headers["X-Accel-Buffering"]) == ("no-cache", "no")
        connection.close()
        assert 4 + events.count(": keep-alive") <= (time.monotonic() - started) / 0.02
        assert events[-2:] == ["data: [DONE]", ""]
        with official_client(port) as client:
            chunks = client.chat.completions.create(model="m", messages=[HI], stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
        with anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="none") as client:
            with client.messages.stream(model="m", messages=[HI], max_tokens=99) as stream:
                assert stream.get_final_text() == ANSWER


# Arguments of this tool come when they are whole: only lists and objects come in pieces.
MIXED = {"type": "function", "function": {"name": "f", "parameters": {
    "properties": {"a": {"type": ["array", "null"]}}}}}


@pytest.mark.parametrize("path, body, script", [
    ("/v1/messages", {"max_tokens": 99, "thinking": {"type": "enabled", "budget_tokens": 99, "display": "omitted"}},
     "thoughts " * 5000),
    (CHAT, {"tools": [MIXED]}, f"<tool_call>\n<function=f>\n<parameter=a>\n{'word ' * 5000}")])
def test_a_stream_that_shows_nothing_of_many_tokens_says_that_it_lives(monkeypatch, path, body, script):
    monkeypatch.setattr(streams, "SILENCE_SECONDS", 0.05)
    with serving(app_of(PacedEngine(script, pace=0.02))) as (port, _):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        connection.request("POST", path, json.dumps(body | {"messages": [HI], "stream": True}))
        answer, n_signs = connection.getresponse(), 0
        while n_signs < 3:
            line = answer.readline()
            assert line, "it has ended"
            n_signs += line.startswith((b": keep-alive", b"event: ping"))
        connection.close()


LONG_HI = {"role": "user", "content": "hi " * 300}


@pytest.mark.parametrize("path, body", [(TEXT, {"prompt": "hi " * 300}), (CHAT, {"messages": [LONG_HI]}),
                                        ("/v1/responses", {"input": "hi " * 300}),
                                        ("/v1/messages", {"messages": [LONG_HI], "max_tokens": 99})])
def test_a_stream_says_how_much_of_a_prompt_is_read(monkeypatch, path, body):
    monkeypatch.setattr(streams, "READING_SECONDS", 0.05)
    with serving(app_of(engine := PacedEngine(ANSWER, delay=60, is_reading=True))) as (port, _):
        connection, started = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE), time.monotonic()
        connection.request("POST", path, json.dumps(body | {"stream": True}))
        answer, said = connection.getresponse(), []
        while len(found := [line for line in said if line.startswith(b": reading ")]) < 4:
            said.append(answer.readline())
            assert said[-1], "it has ended"
        assert time.monotonic() - started >= 4 * 0.05 and answer.readline() == b"\n"
        engine.delay = 0.1
        assert b": reading " not in answer.read().partition(b"data: {")[2]
        connection.close()
    n_prompt = engine.generations[0].n_prompt
    read = [int(re.fullmatch(rf": reading (\d+) of {n_prompt} tokens\n", line.decode())[1]) for line in found]
    assert read == sorted(set(read)) and 0 < read[0] and read[-1] < n_prompt


def test_official_clients_pass_over_what_is_said_of_reading(monkeypatch):
    monkeypatch.setattr(streams, "READING_SECONDS", 0.02)
    with serving(app_of(PacedEngine(ANSWER, delay=0.3, is_reading=True))) as (port, _):
        with official_client(port) as client:
            chunks = client.chat.completions.create(model="m", messages=[HI], stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
            events = list(client.responses.create(model="m", input="hi", stream=True))
            assert [event.delta for event in events if event.type == "response.output_text.delta"]
            assert events[-1].type == "response.completed" and events[-1].response.output_text == ANSWER
        with anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="none") as client:
            with client.messages.stream(model="m", messages=[HI], max_tokens=99) as stream:
                assert stream.get_final_text() == ANSWER
        lines = list(ollama.Client(f"http://127.0.0.1:{port}").chat("m", [HI], stream=True))
        assert "".join(line.message.content for line in lines) == ANSWER


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_says_how_much_of_a_prompt_is_read(monkeypatch, caplog, stream):
    monkeypatch.setattr(log, "READING_SECONDS", 0.2)
    caplog.set_level(logging.INFO, "qengine.requests")
    with serving(app_of(engine := PacedEngine(ANSWER, delay=60, is_reading=True))) as (port, _):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        connection.request("POST", TEXT, json.dumps({"prompt": "hi " * 300, "stream": stream}))
        wait_until(lambda: len(caplog.messages) >= 3)
        engine.delay = 0.1
        connection.getresponse().read()
        connection.close()
        wait_until(lambda: "finish=stop" in caplog.text)
    *reading, last = caplog.messages
    assert "read=" not in last
    line = (rf"id=[0-9a-f]+ client=127\.0\.0\.1 method=POST path={TEXT} seconds=([\d.]+) "
            r"prompt=\d+ read=\d+")
    seconds = [0.0, *(float(re.fullmatch(line, each)[1]) for each in reading)]
    assert all(later - earlier >= 0.199 for earlier, later in itertools.pairwise(seconds))


def test_streams_that_have_said_nothing_yet_end_cleanly_with_the_server():
    with serving(app_of(PacedEngine(ANSWER, delay=PATIENCE))) as (port, service), official_client(port) as client:
        streams = [client.chat.completions.create(model="m", messages=[HI], stream=True) for _ in range(3)]
        seen = []

        def read(stream):
            try:
                list(stream)
            except openai.APIError as error:
                seen.append(str(error))

        threads = [threading.Thread(target=read, args=(stream,)) for stream in streams]
        for thread in threads:
            thread.start()
        assert service.close()
        for thread in threads:
            thread.join()
        assert seen == ["the answer was cancelled: the server is shutting down"] * 3


# ---- metrics -----------------------------------------------------------------------------------------------


def samples(client, **headers):
    answer = client.get("/metrics", headers=headers)
    assert answer.status_code == 200 and answer.content_type.startswith("text/plain; version=")
    return {(sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "model_name")):
            sample.value
            for family in text_string_to_metric_families(answer.text) for sample in family.samples
            if sample.labels["model_name"] == "scripted"}


def test_metrics_have_the_names_of_vllm():
    engine = PacedEngine(ANSWER, pace=0.001)
    client = web(engine)
    for body in (BODY, BODY | {"n": 2}, BODY | {"max_tokens": 2}):
        client.post(CHAT, json=body).close()
    found, generations = samples(client), engine.generations
    assert found["qengine:num_requests_running",] == 0 == found["qengine:kv_cache_usage_perc",]
    assert found["qengine:prompt_tokens_total",] == sum(g.n_prompt for g in generations)
    assert found["qengine:prefix_cache_queries_total",] == found["qengine:prompt_tokens_total",]
    assert found["qengine:prefix_cache_hits_total",] == sum(g.n_cached for g in generations)
    assert found["qengine:generation_tokens_total",] == sum(g.n_generated for g in generations)
    assert found["qengine:request_success_total", "stop"] == 3 and found["qengine:request_success_total", "length"] == 1
    assert found["qengine:checkpoints",] == 3 and found["qengine:checkpoints_spilled_total",] == 1
    first = [g.token_times[0] - g.started for g in generations]
    assert found["qengine:time_to_first_token_seconds_count",] == 4
    assert found["qengine:time_to_first_token_seconds_sum",] == pytest.approx(sum(first))
    assert found["qengine:inter_token_latency_seconds_count",] == sum(g.n_generated - 1 for g in generations)
    gaps = sum(g.token_times[-1] - g.token_times[0] for g in generations)
    assert found["qengine:inter_token_latency_seconds_sum",] == pytest.approx(gaps)
    assert found["qengine:e2e_request_latency_seconds_count",] == 4


def test_metrics_of_requests_that_were_refused():
    client = web(keys=["secret"], max_requests=1)
    right = {"x-api-key": "secret"}
    for path, body, headers in ((CHAT, BODY, {}), (CHAT, BODY, {}), ("/v1/nothing", BODY, right), (CHAT, {}, right),
                                (CHAT, BODY | {"n": 2}, right), (CHAT, BODY, right), ("/metrics", None, {})):
        client.open(path, json=body, headers=headers, method="POST" if body is not None else "GET").close()
    families = text_string_to_metric_families(client.get("/metrics", headers=right).text)
    found = {(sample.labels["model_name"], sample.labels["status"]): sample.value for family in families
             for sample in family.samples if sample.name == "qengine:request_refused_total"}
    assert found == {("", "401"): 2, ("", "404"): 1, ("", "400"): 1, ("scripted", "429"): 1}


def test_metrics_of_drafts():
    engine = ScriptedEngine("Hello.")
    client = web(engine)
    assert samples(client)["qengine:drafts_checked_total", "1"] == 0
    engine.checks = (3, 2), (2, 0), (0, 0)
    for n in 1, 2:
        client.post(CHAT, json=BODY).close()
        found = samples(client)
        for what, counts in ("checked", (2, 2, 1, 0, 0, 0, 0)), ("accepted", (1, 1, 0, 0, 0, 0, 0)):
            for position, count in enumerate(counts, start=1):
                assert found[f"qengine:drafts_{what}_total", str(position)] == n * count
        names = "drafts", "draft_tokens", "accepted_tokens"
        assert [found[f"qengine:spec_decode_num_{name}_total",] for name in names] == [2 * n, 5 * n, 2 * n]


def test_metrics_of_what_runs_and_of_what_was_left():
    engine = PacedEngine(ANSWER * 99, pace=0.01)
    with serving(app_of(engine)) as (port, service), official_client(port) as client:
        web = service_client(service)
        stream = client.chat.completions.create(model="m", messages=[HI], stream=True)
        assert not next(stream).choices[0].delta.content and next(stream).choices[0].delta.content
        found = samples(web)
        assert found["qengine:num_requests_running",] == 1 and found["qengine:kv_cache_usage_perc",] == 0.25
        assert found["qengine:generation_tokens_total",] >= 1
        stream.close()
        wait_until(lambda: samples(web).get(("qengine:request_success_total", "abort")) == 1)
        wait_until(lambda: samples(web)["qengine:num_requests_running",] == 0)


def service_client(service):
    """A client of a second app over the same engine and counts: two apps in one process do not get into each other's
    way."""
    app = app_of(service.engine)
    app.extensions["qengine"].metrics = service.metrics
    return app.test_client()


def test_metrics_are_there_before_the_model():
    answer = app_of().test_client().get("/metrics")
    assert answer.status_code == 200 and b"qengine:num_requests_running{" not in answer.data


# ---- the page's headers, and the pipes ---------------------------------------------------------------------


def test_the_page_asks_nobody_else_and_runs_only_what_is_in_it():
    """The policy holds for all of it, libraries of others too; what is ours does not even name another place."""
    answer = web().get("/")
    source, policy = answer.text, answer.headers["Content-Security-Policy"]
    assert answer.content_type.startswith("text/html") and source == page.document().text
    for tag in ("script", "style"):
        texts = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", source, re.DOTALL)
        hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts}
        assert set(re.search(f"{tag}-src ([^;]*);", policy)[1].split()) == hashes and hashes
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
    ours = [path.read_text() for path in page.FOLDER.iterdir() if path.is_file()]
    urls = {url for text in ours for url in re.findall(r"""https?://[^\s"'`<>)]+""", text)}
    assert urls == {"http://www.w3.org/2000/svg"}           # a name, which nobody fetches
    for forbidden in "innerHTML", "insertAdjacent", "document.write":
        assert not any(forbidden in text for text in ours)


def test_pipes_of_a_running_engine():
    """What is counted is a step of an answer that somebody waits for: its tokens stay what they are."""
    engine = tiny_engine()
    client, request = web(engine), Request([1, 2, 3], max_tokens=500, ignore_eos=True)
    assert client.get("/health").json["counts_pipes"] is True
    assert client.get("/pipes").status_code == 204          # no answer is being written
    alone, counted = [delta.token_id for delta in engine.submit(request)], None
    while not counted:                                      # an answer may end while what counts is compiled
        time.sleep(PIPES_SECONDS)
        generation = engine.submit(request)
        tokens = [next(iter(generation)).token_id]
        counted = client.get("/pipes").get_json(silent=True)
        assert tokens + [delta.token_id for delta in generation] == alone
    assert counted["tokens"] == 1 and counted["launches"] > 10 and counted["pipes"]["dp4a"] > 0
    assert "move" not in counted["pipes"] and counted["megabytes"] > 0
    assert counted["card"] == "CMP 100-210" and (counted["estimated_seconds"] or 1e-4) > 1e-5
    time.sleep(PIPES_SECONDS)
    later = client.get("/pipes").json                       # the last one, until there is another
    assert later.pop("seconds_ago") >= PIPES_SECONDS + counted.pop("seconds_ago") and later == counted


def test_whoever_asks_for_pipes_before_an_answer_begins_is_told_of_it():
    """As the page does; a short answer is over before it could ask again."""
    engine = tiny_engine()
    client, request, told = web(engine), Request([1, 2, 3], max_tokens=500, ignore_eos=True), []
    while not told or told[-1] is None:                     # what counts is compiled, and an answer may end meanwhile
        engine.pipe_meter.last = None, -math.inf
        time.sleep(PIPES_SECONDS)
        thread = threading.Thread(target=lambda: told.append(client.get("/pipes").get_json(silent=True)))
        thread.start()
        time.sleep(0.1)                                     # nothing runs yet
        engine.submit(request).wait()
        thread.join()
    assert told[-1]["tokens"] == 1


def test_what_counts_is_compiled_before_the_first_answer(monkeypatch):
    """Whoever asks while nothing runs, as the page does when its bar is switched on, has it compiled. Then a short
    answer is counted, too."""
    engine, compiled, told, waits = tiny_engine(), [], [], threading.Event()
    monkeypatch.setattr(counting, "prepare", lambda launch, model, prepare=counting.prepare: (
        compiled.append(launch.name), prepare(launch, model)))
    monkeypatch.setattr(engine, "pipe_meter", PipeMeter(engine.pipeline, engine.scheduler))
    client = web(engine)
    assert client.get("/pipes").status_code == 204 and len(set(compiled)) > 5
    compiled.clear()
    wait = engine.pipe_meter._wait
    monkeypatch.setattr(engine.pipe_meter, "_wait", lambda: (waits.set(), wait())[1])
    monkeypatch.setattr(pipes, "WAIT_SECONDS", PATIENCE)
    thread = threading.Thread(target=lambda: told.append(client.get("/pipes").get_json(silent=True)))
    thread.start()
    waits.wait(PATIENCE)
    while thread.is_alive():                                # on a busy machine whoever asks may miss an answer
        engine.submit(Request([1, 2, 3], max_tokens=100, ignore_eos=True)).wait()
    thread.join()
    assert told[0]["tokens"] == 1 and told[0]["pipes"]["dp4a"] > 0
    assert compiled == []


def test_a_step_that_is_counted_checks_no_drafts():
    """So what counts it is compiled. Later steps may spend on drafts what they could."""
    engine = tiny_engine()
    meter, scheduler = PipeMeter(engine.pipeline, engine.scheduler), engine.scheduler
    with scheduler.borrow_slot(1) as sequence:
        before = scheduler.pace.balance
        with meter._without_drafts():
            assert scheduler.shape([sequence], 0).width == 1
        assert scheduler.pace.balance == before
        assert scheduler.shape([sequence], 0).width > 1


@pytest.fixture
def shipped():
    """An engine with the model that ships, which has a draft block."""
    with contextlib.closing(qengine.load(SHIPPED, card="emulated", ctx=1024, slots=1, progress=False)) as engine:
        yield engine


def begun(engine, n_tokens, prompt="What is a decode step?"):
    """An answer that has begun."""
    ids = engine.tokenizer.encode(engine.template.render([{"role": "user", "content": prompt}]))
    generation = engine.submit(Request(ids, max_tokens=n_tokens, ignore_eos=True))
    next(iter(generation))
    return generation


@pytest.mark.parametrize("planned", [1, 3])
def test_an_answer_with_a_draft_block_is_counted(shipped, monkeypatch, planned):
    """The width of its steps is planned a step ahead. What counts a plain step is compiled before the answer."""
    meter, scheduler, compiled = shipped.pipe_meter, shipped.scheduler, []
    monkeypatch.setattr(scheduler.pace, "limit", 2)
    monkeypatch.setattr(scheduler.pace, "_costs", lambda n, widest: ([0.0] * widest, [1.0] * widest))   # all are free
    scheduler.planned[0] = planned                          # what the answer before has left
    assert shipped.count_pipes() is None and {shape.width for shape in meter.ready} == {1}
    prepare = counting.prepare
    monkeypatch.setattr(counting, "prepare", lambda launch, model: (
        compiled.append(launch.name), prepare(launch, model)))
    generation = begun(shipped, 900)
    wait_until(lambda: sum(generation.drafts.n_checked))
    counted = shipped.count_pipes()
    assert counted and counted["tokens"] == 1 and compiled == []
    assert generation.finish_reason is None
    generation.cancel()


def test_functions_of_yours_are_counted_in_place_of_those_before(shipped):
    meter, stage, counted = shipped.pipe_meter, shipped.pipeline.last, []

    def mine(*arguments, **options):
        counted.append(stage.recordings is meter.recordings)        # or it is launched for an answer
        return gemv_q8_q8(*arguments, **options)

    shipped.count_pipes()
    before = begun(shipped, 900)
    assert shipped.count_pipes()["tokens"] == 1
    shipped.use(gemv=mine)
    assert not any(counted) and meter.last[0] is None       # what was counted before is told no more
    before.cancel()
    before.wait()
    assert shipped.count_pipes() is None                    # what counts the new one is compiled
    after = begun(shipped, 900)
    assert shipped.count_pipes()["tokens"] == 1 and any(counted)
    after.cancel()


def test_experts_only_where_they_are_counted():
    client = web()
    assert client.get("/health").json["counts_experts"] is False
    assert client.get("/experts").status_code == 404


def test_pipes_only_where_they_can_be_counted():
    client = web()
    assert client.get("/health").json["counts_pipes"] is False
    assert client.get("/pipes").status_code == 404
