"""Several models behind one server: which one answers, what loads them, and what makes them go."""

import json
import logging
import math
import threading
import time

import pytest
from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families

from api import openapi
from api import service as service_api
from api.service import create_app
from engine import served
from engine.durations import read_seconds
from engine.request import EngineStopped, RequestError
from engine.served import Defaults, Facts, Models, NotLoaded, Served
from kernels.card import OutOfMemory
from tests.clients import CHAT, HI, Offered, assert_error, serving
from tests.clock import Clock
from tests.paced import PacedEngine
from tests.scripted import ScriptedEngine, ScriptedPooling
from tests.until import PATIENCE, wait_until



def named(name, engine):
    engine.name = name
    return engine


class Reader(FlaskClient):
    """A client that reads an answer to its end, unless it is told otherwise; until then the request is not over."""

    def open(self, *arguments, **more):
        return super().open(*arguments, **{"buffered": True} | more)


class Machine:
    """Cards with room for so many of the models, which are loaded when a request comes. A model is written as its name,
    or as (name, function that makes its engine)."""

    def __init__(self, *models, room=9, idle=math.inf, aliases=(), always=()):
        self.room, self.log, self.lock = room, [], threading.Lock()
        self.may_load = threading.Event()
        self.may_load.set()
        self.error = None
        makers = dict(one if isinstance(one, tuple) else (one, ScriptedEngine) for one in models)
        self.made = {name: [] for name in makers}
        rows = [Served(None, aliases, facts=Facts.of(named(name, make())), idle=idle,
                       load=lambda name=name, make=make: self.load(name, make)) for name, make in makers.items()]
        self.models = Models([Served(Offered(engine)) for engine in always] + rows, self.put_away)
        self.app = create_app(models=self.models)
        self.app.test_client_class = Reader
        self.web = self.app.test_client()

    @property
    def loaded(self):
        return [one.name for one in self.models.served if one.state == "loaded"]

    def load(self, name, make):
        self.log.append(f"load {name}")
        assert self.may_load.wait(PATIENCE)
        if self.error:
            raise self.error
        with self.lock:
            if len(self.loaded) >= self.room:
                raise OutOfMemory(f"{name} does not fit:\na table\nit would with --ctx 1")
        self.made[name].append(named(name, make()))
        return Offered(self.made[name][-1])

    def put_away(self, engine):
        self.log.append(f"put away {engine.name}")
        assert not any(not g._done.is_set() for g in engine._engine.generations), "a request was running"

    def ask(self, name, **more):
        return self.web.post(CHAT, json={"model": name, "messages": [HI], **more}, buffered=not more.get("stream"))


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch, served)


@pytest.fixture
def machine():
    made = []

    def make(*models, **more):
        made.append(Machine(*models, **more))
        return made[-1]

    yield make
    for one in made:
        one.may_load.set()
        one.app.extensions["qengine"].close()
        one.models.close()


# ---- which one -----------------------------------------------------------------------------------------------------


def three() -> Models:
    return Models([Served(named("qwen3.5-9b", ScriptedEngine()), ["gpt-4o", "default"]),
                   Served(named("qwen3.5-9b-coder", ScriptedEngine()), ["code"]),
                   Served(named("bge", ScriptedPooling()), ["text-embedding-3"])])


@pytest.mark.parametrize("kind, name, wanted", [
    ("text", "qwen3.5-9b", "qwen3.5-9b"), ("text", "qwen3.5-9b-coder:latest", "qwen3.5-9b-coder"),
    ("text", "default", "qwen3.5-9b"), ("text", "code:latest", "qwen3.5-9b-coder"),
    ("text", "Coder", "qwen3.5-9b-coder"), ("text", "9b", "qwen3.5-9b"), ("text", "claude", "qwen3.5-9b"),
    ("text", None, "qwen3.5-9b"),
    ("text", "", "qwen3.5-9b"), ("text", "embedding", "qwen3.5-9b"), ("embedding", "anything", "bge"),
    ("embedding", "embedding-3", "bge"), (None, "bge", "bge"), (None, "other", "qwen3.5-9b")])
def test_the_model_that_a_name_means(kind, name, wanted):
    assert three().choose(kind, name).name == wanted


def test_a_model_of_another_kind_is_refused_by_name_alone():
    models = three()
    with pytest.raises(RequestError, match="can make embeddings, but not generate text"):
        models.choose("text", "text-embedding-3")
    assert models.choose("reranking", "no such name") is None


# The least that each endpoint takes which a model answers, in OpenAI's words or others'.
BODIES = {
    "POST /v1/chat/completions": {"messages": [HI]}, "POST /v1/completions": {"prompt": "a"},
    "POST /v1/responses": {"input": "a"}, "POST /v1/responses/input_tokens": {"input": "a"},
    "POST /v1/messages": {"messages": [HI], "max_tokens": 9}, "POST /v1/messages/count_tokens": {"messages": [HI]},
    "POST /api/chat": {"messages": [HI], "stream": False}, "POST /api/generate": {"prompt": "a", "stream": False},
    "POST /tokenize": {"content": "a"}, "POST /detokenize": {"tokens": [1]}, "POST /apply-template": {"messages": [HI]},
    "POST /v1/embeddings": {"input": "a"}, "POST /api/embed": {"input": "a"}, "POST /api/embeddings": {"prompt": "a"},
    **dict.fromkeys(["POST /v1/rerank", "POST /v2/rerank", "POST /rerank"], {"query": "a", "documents": ["b"]})}
ANSWERING = [endpoint for endpoint in openapi.ENDPOINTS if endpoint.body is not None and endpoint.asks != "server"]


def test_every_endpoint_that_a_model_answers_is_asked():
    assert BODIES.keys() == {endpoint.name for endpoint in ANSWERING}


@pytest.mark.parametrize("endpoint", ANSWERING, ids=lambda endpoint: endpoint.name)
def test_every_protocol_goes_by_the_model(machine, endpoint):
    """It loads the model that is named, by name, alias or part of the name, and no other; the one that is named
    answers."""
    make = {"embedding": ScriptedPooling, "reranking": lambda: ScriptedPooling("reranking")}.get(
        endpoint.kind, lambda: ScriptedEngine("yes"))
    for name in "second", "second:latest", "SECO", "alias":
        one = machine(("first", make), ("second", make))
        one.models.served[1].aliases = ("alias",)
        answer = one.web.post(endpoint.path, json=BODIES[endpoint.name] | {"model": name})
        assert answer.status_code == 200, answer.text
        assert one.log == ["load second"] and one.loaded == ["second"]
        if "model" in answer.json:
            assert answer.json["model"].removesuffix(":latest") == "second"
        assert [row.n_users for row in one.models.served] == [0, 0]
        one.web.post(endpoint.path, json=BODIES[endpoint.name] | {"model": "another"})
        assert one.log == ["load second", "load first"]


def test_errors_of_loading_have_the_shape_of_their_protocol(machine, monkeypatch):
    monkeypatch.setattr(served, "AGAIN_SECONDS", PATIENCE)
    one = machine("first", "second")
    one.error = ValueError("it is damaged")
    for endpoint in ANSWERING:
        if endpoint.kind not in (None, "text"):
            continue
        answer = one.web.post(endpoint.path, json=BODIES[endpoint.name] | {"model": "second"})
        assert answer.status_code == 503 and answer.headers["Retry-After"], endpoint.name
        assert "the model second cannot be loaded: it is damaged" in answer.text, endpoint.name
    assert one.log == ["load second"]               # the error is the answer for a while


def test_a_kept_response_belongs_to_its_model(machine):
    one = machine(("first", lambda: ScriptedEngine("I am the first")), ("second", lambda: ScriptedEngine("No, me")))
    begun = one.web.post("/v1/responses", json={"input": "who?", "model": "second"}).json
    following = {"input": "and now?", "previous_response_id": begun["id"]}
    assert one.web.post("/v1/responses", json=following).json["model"] == "second"
    assert one.web.post("/v1/responses", json=following | {"model": "first"}).json["model"] == "first"
    assert one.web.get(f"/v1/responses/{begun['id']}").json["model"] == "second"


def test_each_model_has_its_own_defaults():
    engines = named("warm", ScriptedEngine("a")), named("cold", ScriptedEngine("a"))
    web = create_app(models=Models([Served(engines[0]), Served(engines[1], defaults=Defaults({"temperature": 0.25}))]))
    for name in "warm", "cold":
        web.test_client().post(CHAT, json={"messages": [HI], "model": name})
    assert [engine.requests[0].temperature for engine in engines] == [1.0, 0.25]


# ---- loading --------------------------------------------------------------------------------------------------------


def test_a_model_is_loaded_at_its_first_request_alone(machine):
    one = machine("first", "second")
    assert one.loaded == [] and one.web.get("/health").json["status"] == "ok"
    assert [row["status"]["value"] for row in one.web.get("/v1/models").json["data"]] == ["unloaded"] * 2
    for _ in range(3):
        assert one.ask("second").status_code == 200
    assert one.log == ["load second"]
    assert [row["status"]["value"] for row in one.web.get("/v1/models").json["data"]] == ["unloaded", "loaded"]


def test_nobody_else_waits_for_a_load(machine):
    """Requests for the model that is loaded wait together, and are answered together."""
    one, said = machine("slow", always=[named("there", ScriptedEngine("hello"))]), []
    one.may_load.clear()
    threads = [threading.Thread(target=lambda: said.append(one.app.test_client().post(
        CHAT, json={"model": "slow", "messages": [HI]}).status_code)) for _ in range(5)]
    for thread in threads:
        thread.start()
    wait_until(lambda: one.models.served[1].n_awaiting == 5)
    wait_until(lambda: one.web.get("/v1/models").json["data"][1]["status"]["value"] == "loading")
    assert one.ask("there").status_code == 200 and said == []
    one.may_load.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert said == [200] * 5 and one.log == ["load slow"]


def test_a_request_that_waits_for_a_load_sees_its_deadline(machine, monkeypatch):
    one, clock, said = machine("slow"), Clock(monkeypatch, service_api), []
    one.may_load.clear()                                    # for longer than a request could wait
    thread = threading.Thread(target=lambda: said.append(one.ask("slow", timeout=PATIENCE)))
    thread.start()
    wait_until(lambda: one.log == ["load slow"])
    clock.ahead = PATIENCE
    thread.join(PATIENCE)
    assert said[0].status_code == 504
    assert one.models.first.n_awaiting == 0 and not one.app.extensions["qengine"].n_entering
    one.may_load.set()
    wait_until(lambda: one.loaded == ["slow"])            # the next request finds it
    assert one.ask("slow", timeout=PATIENCE).status_code == 200 and one.log == ["load slow"]


def test_a_client_that_leaves_while_its_model_is_loaded(machine):
    one = machine("slow")
    one.may_load.clear()
    with serving(one.app) as (port, service):
        import socket
        body = json.dumps({"model": "slow", "messages": [HI]}).encode()
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n%b" % (
                CHAT.encode(), len(body), body))
            wait_until(lambda: one.models.first.n_awaiting == 1)
        wait_until(lambda: one.models.first.n_awaiting == 0 and not service.n_entering)
        one.may_load.set()


def test_a_server_that_closes_does_not_wait_for_those_who_wait(machine):
    one, said = machine("slow"), []
    one.may_load.clear()
    thread = threading.Thread(target=lambda: said.append(one.ask("slow")))
    thread.start()
    wait_until(lambda: one.models.first.n_awaiting == 1)
    assert one.app.extensions["qengine"].close(timeout=PATIENCE)
    thread.join(PATIENCE)
    assert said[0].status_code == 503


def test_only_so_many_requests_wait_for_loads(machine, monkeypatch):
    monkeypatch.setattr(served, "MOST_AWAITING", 3)
    one, said = machine("slow", "other"), []
    one.may_load.clear()
    threads = [threading.Thread(target=lambda name=name: said.append(one.app.test_client().post(
        CHAT, json={"model": name, "messages": [HI]}))) for name in ("slow", "slow", "other")]
    for thread in threads:
        thread.start()
    wait_until(lambda: sum(row.n_awaiting for row in one.models.served) == 3)
    for name in "slow", "other":
        answer = one.ask(name)
        assert answer.status_code == 503 and "3 requests wait" in answer.json["error"]["message"]
    one.may_load.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert [answer.status_code for answer in said] == [200] * 3


def test_a_load_that_failed_is_tried_again_after_a_while(machine, monkeypatch, clock):
    monkeypatch.setattr(served, "AGAIN_SECONDS", 2.0 * PATIENCE)
    one = machine("first")
    one.error = OSError("a cable is loose")
    for clock.ahead in 0, 0.5 * PATIENCE, PATIENCE:
        assert "a cable is loose" in one.ask("first").json["error"]["message"]
    one.error = None
    clock.ahead += served.AGAIN_SECONDS
    assert one.ask("first").status_code == 200 and one.log == ["load first"] * 2


def test_loads_are_told_in_the_log(machine, caplog):
    caplog.set_level(logging.INFO, "qengine.requests")
    one = machine("first", "second", room=1)
    one.ask("first")
    one.ask("second")
    said = " | ".join(record.getMessage() for record in caplog.records)
    for words in "loading model=first", "loaded model=first seconds=", "put away model=first: second needs its memory":
        assert words in said


# ---- making room ----------------------------------------------------------------------------------------------------


def test_the_idle_model_goes_that_nobody_asked_for_the_longest_time(machine):
    one = machine("a", "b", "c", room=2)
    for name in "a", "b", "a", "c":
        assert one.ask(name).status_code == 200
    assert one.loaded == ["a", "c"] and one.log == ["load a", "load b", "load c", "put away b", "load c"]


def test_a_model_that_answers_does_not_go(machine):
    """A stream that is read slowly holds its model, to its last byte."""
    one = machine(("busy", lambda: PacedEngine("word " * 50, pace=0.005)), "other", room=1)
    stream = one.ask("busy", stream=True)
    assert stream.status_code == 200
    refused = one.ask("other")
    assert refused.status_code == 503 and int(refused.headers["Retry-After"]) >= 1
    assert refused.json["error"]["message"] == "the model other does not fit beside what answers now: busy"
    assert "[DONE]" in stream.text and one.loaded == ["busy"]
    stream.close()


def test_a_refused_model_is_loaded_once_there_is_room(machine, monkeypatch):
    monkeypatch.setattr(served, "BUSY_SECONDS", 0.2)
    one = machine(("busy", lambda: PacedEngine("word " * 20, pace=0.005)), "other", room=1)
    stream = one.ask("busy", stream=True)
    assert one.ask("other").status_code == 503
    assert "[DONE]" in stream.text
    stream.close()
    time.sleep(0.25)
    assert one.ask("other").status_code == 200 and one.loaded == ["other"]


def test_loads_without_memory_do_not_count(machine, monkeypatch):
    """Otherwise a model that never fits would keep the others out for a minute."""
    monkeypatch.setattr(served, "AGAIN_SECONDS", 0.1)
    one = machine("large", "small", room=0)
    while len(one.log) < 2 * served.LOADS:
        assert one.ask("large").status_code == 503
    one.room = 1
    assert one.ask("small").status_code == 200 and one.loaded == ["small"]


def test_a_request_that_sleeps_through_a_refusal_has_its_model_loaded(machine):
    """On a busy machine it may look again only when the refusal is over, and nothing else would wake the loader."""
    one = machine("a")
    row = one.models.first
    with one.models.changed:        # as such a request has it
        row.n_awaiting, row.refused_until = 1, time.monotonic() + 0.1
        one.models.changed.notify_all()
    wait_until(lambda: row.engine is not None)
    with one.models.changed:
        row.n_awaiting = 0


def test_health_tells_of_a_first_model_that_is_put_away(machine):
    one = machine(("seeing", lambda: ScriptedEngine(sees=True)), "blind")

    def health():
        return one.web.get("/health").json

    away = health()
    assert (away["status"], away["model"], away["kind"], away["state"]) == ("ok", "seeing", "text", "unloaded")
    assert away["cards"] == [] and "refused" not in away and away["sees"]["pictures"] > 0
    one.error = OSError("a cable is loose")
    assert one.ask("seeing").status_code == one.ask("blind").status_code == 503
    assert "a cable is loose" in health()["refused"] and "a cable is loose" in health()["side"][0]["refused"]
    one.models.first.refused_until, one.error = 0.0, None
    assert one.ask("seeing").status_code == 200
    loaded = health()
    assert loaded["state"] == "loaded" and loaded["sees"] == away["sees"] and "refused" not in loaded


def test_a_model_that_fits_nowhere_is_one_sentence(machine):
    one = machine("large", room=0)
    message = one.ask("large").json["error"]["message"]
    assert message == "the model large cannot be loaded: large does not fit; it would with --ctx 1"


def test_models_that_are_always_loaded_stay(machine):
    one = machine("asked", room=1, always=[named("there", ScriptedEngine())])
    assert one.ask("asked").status_code == 503 and one.loaded == ["there"]
    one.models.keep(one.models.first, 0)
    time.sleep(0.1)
    assert one.loaded == ["there"] and one.ask("there").status_code == 200


def test_an_idle_model_is_put_away(machine):
    one, begun = machine("first", "second", idle=0.3), time.monotonic()
    one.ask("first")
    wait_until(lambda: one.loaded == [])
    assert time.monotonic() - begun >= 0.3 and one.log == ["load first", "put away first"]
    assert one.ask("first").status_code == 200 and len(one.made["first"]) == 2


def test_a_model_is_not_idle_while_it_answers(machine):
    one = machine(("first", lambda: PacedEngine("word " * 40, pace=0.02)), idle=0.1)
    assert one.ask("first").json["choices"][0]["finish_reason"] == "stop"       # longer than it may be idle
    wait_until(lambda: one.loaded == [])


def test_whoever_looks_does_not_keep_a_model(machine, clock):
    """The page asks for the pipes every second."""
    one = machine("first", idle=2 * PATIENCE)
    assert one.web.get("/props").status_code == 503 and one.log == []
    one.ask("first")

    def look():
        return one.web.get("/props?model=first").status_code

    for clock.ahead in 0, 0.9 * PATIENCE:
        assert look() == 200
    clock.ahead = 2.1 * PATIENCE                # looks tell the loader, too, how late it is
    wait_until(lambda: look() == 503)
    assert one.log == ["load first", "put away first"]


def test_a_failed_model_is_loaded_anew(machine):
    one = machine("first", "second")
    one.ask("first")
    one.made["first"][0].reason = "the card fell off"
    assert one.ask("first").status_code == 200 and len(one.made["first"]) == 2


def test_a_failed_model_that_is_always_loaded_is_told(machine):
    one = machine("asked", always=[named("there", ScriptedEngine())])
    one.models.first.engine._engine.reason = "the card fell off"
    assert_error((lambda answer: (answer.status_code, answer.headers, answer.json))(one.ask("there")), 503)
    assert one.ask("asked").status_code == 200
    with pytest.raises(EngineStopped):
        one.models.lend(one.models.first, lambda: None)


# ---- attacks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ["turns", "unload", "crowd"])
def test_no_client_makes_models_come_and_go_faster_than_the_rate(machine, monkeypatch, attack):
    """Two models that do not fit together are asked for in turns; or one that is told to go each time; or both at the
    same time, so that there is often no memory for the other one, which does not count as a load."""
    monkeypatch.setattr(served, "LOADS_SECONDS", 2.0)
    monkeypatch.setattr(served, "BUSY_SECONDS", 0.01)
    one, found, over = machine("a", "b", room=1), [], time.monotonic() + 3.0
    reason = "does not fit beside" if attack == "crowd" else "which is the most it does"

    def goes_on():          # on a busy machine until the rate was met, too
        few = attack != "crowd" and sum(row.n_loads for row in one.models.served) <= served.LOADS
        few = few or not any(reason in text for _, _, text in found.copy())
        return time.monotonic() < over + PATIENCE * few

    def ask(name):
        web = one.app.test_client()
        while goes_on():
            if attack == "unload":
                web.post("/api/generate", json={"model": "a", "keep_alive": 0})
            answer = web.post(CHAT, json={"model": name, "messages": [HI]})
            found.append((answer.status_code, answer.headers.get("Retry-After"), answer.text))
            name = name if attack == "crowd" else "a" if attack == "unload" or name == "b" else "b"

    loads, load = [], one.models._load      # from before a load began until it had ended

    def timed(row):
        began, before = time.monotonic(), row.n_loads
        load(row)
        if row.n_loads > before:
            loads.append((began, time.monotonic()))

    monkeypatch.setattr(one.models, "_load", timed)
    threads = [threading.Thread(target=ask, args=(name,)) for name in ("aabb" if attack == "crowd" else "a")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    assert all(ended - began >= served.LOADS_SECONDS for (began, _), (_, ended) in zip(loads, loads[served.LOADS:]))
    assert len(loads) >= (1 if attack == "crowd" else served.LOADS + 1)
    statuses = {status for status, _, _ in found}
    assert statuses == {200, 503}
    assert all(int(after) >= 1 for status, after, _ in found if status == 503)
    assert any(reason in text for status, _, text in found if status == 503)


# ---- what clients see -----------------------------------------------------------------------------------------------


def test_lists_tell_what_each_model_can_do(machine):
    one = machine(("blind", ScriptedEngine), ("seeing", lambda: ScriptedEngine(sees=True)),
                  ("rows", ScriptedPooling), ("scores", lambda: ScriptedPooling("reranking")), aliases=["x"])
    found = {row["id"]: row for row in one.web.get("/v1/models").json["data"]}
    assert {name: row["abilities"] for name, row in found.items()} == {
        "blind": ["chat", "completion"], "seeing": ["chat", "completion", "pictures"], "rows": ["embeddings"],
        "scores": ["reranking"]}
    assert found["blind"]["aliases"] == ["x"] and one.web.get("/v1/models/rows").json == found["rows"]
    assert one.web.get("/v1/models/none").status_code == 404
    for name in "rows:latest", "x:latest":          # as Ollama's clients write names
        assert one.web.get(f"/v1/models/{name}").json == found["rows" if name[0] == "r" else "blind"]
    assert [row["name"] for row in one.web.get("/api/tags").json["models"]] == [f"{name}:latest" for name in found]
    assert "vision" in one.web.post("/api/show", json={"model": "seeing"}).json["capabilities"]
    assert one.web.get("/api/ps").json["models"] == [] and one.log == []        # whoever lists loads nothing
    health = one.web.get("/health").json
    assert [row["state"] for row in health["side"]] == ["unloaded"] * 3


def test_ollama_keeps_a_model_alive_as_long_as_it_is_told(machine):
    one = machine("first", idle=60)

    def left():
        [row] = one.web.get("/api/ps").json["models"]
        return row["expires_at"]

    one.web.post("/api/chat", json={"model": "first", "messages": [], "keep_alive": -1})
    assert left().startswith("9999")
    one.web.post("/api/generate", json={"model": "first", "keep_alive": "1h"})
    assert not left().startswith("9999")
    for long in 1e12, 1e300, "999999999h":         # longer than clocks can wait, and than calendars go
        one.web.post("/api/generate", json={"model": "first", "keep_alive": long})
        assert left().startswith("9999")
    refused = one.web.post("/api/chat", json={"model": "first", "messages": [HI], "keep_alive": "soon"})
    assert refused.status_code == 400 and "keep_alive" in refused.json["error"]
    assert one.web.post("/api/chat", json={"model": "first", "keep_alive": 0}).json["done_reason"] == "unload"
    wait_until(lambda: one.loaded == [])
    assert one.web.post("/api/chat", json={"model": "first", "keep_alive": 0}).json["done_reason"] == "unload"
    assert one.log == ["load first", "put away first"]          # what is away is not loaded to be put away


@pytest.mark.parametrize("text, seconds", [("10m", 600), ("1h30m", 5400), ("90", 90), ("1.5s", 1.5), ("250ms", 0.25),
                                           ("-1", -1), ("-5m", -300), ("0", 0)])
def test_durations(text, seconds):
    assert read_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "5 m", "5x", "five", "1h-2m", "٣s", "1" * 30 + "s", "--1"])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError):
        read_seconds(text)


def test_metrics_are_by_model(machine):
    one = machine("a", "b", always=[named("there", ScriptedEngine("hi"))])
    for name in "a", "there":
        one.ask(name)
    found = {(sample.name, sample.labels["model_name"]): sample.value
             for family in text_string_to_metric_families(one.web.get("/metrics").text) for sample in family.samples
             if "model_name" in sample.labels}
    assert [found["qengine:model_loaded", name] for name in ("there", "a", "b")] == [1, 1, 0]
    assert [found["qengine:model_loads_total", name] for name in ("there", "a", "b")] == [0, 1, 0]
    assert found["qengine:generation_tokens_total", "a"] >= 1 and ("qengine:num_requests_running", "b") not in found


def test_counts_are_read_of_models_that_stay_meanwhile(machine):
    one = machine("first")
    one.ask("first")
    with one.models.held() as engines:
        one.models.keep(one.models.first, 0.05)
        time.sleep(0.3)
        assert one.loaded == ["first"] and [engine.name for engine in engines] == ["first"]
    wait_until(lambda: one.loaded == [])


def test_the_server_cannot_lend_what_was_never_there(machine):
    one = machine("first", room=0)
    with pytest.raises(NotLoaded):
        one.models.borrow(one.models.first)


def test_slots_and_the_queue_are_told_of_each_model_by_itself(machine):
    """Engines of these have two slots each. Requests are found whether they are streamed or not."""
    one = machine(*((name, lambda: PacedEngine("a b c", delay=PATIENCE)) for name in ("first", "second")))
    service = one.app.extensions["qengine"]
    for n, name in enumerate(["second", "second", "second", "first"]):
        threading.Thread(target=one.app.test_client().post, args=[CHAT], daemon=True, kwargs={
            "json": {"model": name, "messages": [HI]}, "headers": {"X-Request-Id": f"request-{n}"}}).start()
        wait_until(lambda: len(service.open) == n + 1)
    for name, busy in (("first", [True, False]), ("second", [True, True])):
        assert [slot["is_processing"] for slot in one.web.get(f"/slots?model={name}").json] == busy
    assert [one.web.get(f"/waiting?request=request-{n}").json["ahead"] for n in range(4)] == [0, 0, 1, 0]
