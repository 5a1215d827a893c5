"""Replicas on a cluster of Ray with two nodes on this machine: the same answers as from an engine alone, and what
happens when replicas die, hang, are added and are replaced.

    pip install -r requirements-ray.txt, and python -m pytest tests/test_replicas.py
"""

import contextlib
import dataclasses
import http.client
import json
import os
import shutil
import signal
import threading
import time

import numpy as np
import pytest

pytest.importorskip("ray", reason="Ray is an extra: pip install -r requirements-ray.txt")

import qengine
from engine.gguf import GGUF
from engine.images import Picture
from engine.pooling import TextsRequest
from engine.replicas import actor, cluster, files, front
from engine.replicas.jobs import RemoteAnswer
from engine.request import DeadlineExceeded, EngineStopped, ModelError, Request, RequestError, share_read
from engine.served import Facts
from tests.clients import CHAT, HI, app_of, send, serving, wait_until
from tests.models import TINY
from tests.replicas import kill, nodes, pooling_model, replicated, until_up, wish_for
from tests.scripted import ScriptedEngine, ScriptedPooling, shipped
from tests.test_split import split

LONG = " ".join(f"word{i}" for i in range(60))
PACE = 0.02
LIMIT = 120                 # seconds that anything may take on a machine with much other work; it takes far less


@pytest.fixture(scope="module")
def two_nodes():
    with nodes(16, 16) as found:            # not real ones: they only say who is placed where
        yield found


@pytest.fixture(scope="module")
def scripted(two_nodes):
    """A scripted engine on one replica, and the same one here."""
    arguments = {"script": "<think>\nHm.\n</think>\n\nHello, my friend.", "sees": True}
    with replicated(("scripted", arguments), model=Facts.of(ScriptedEngine(**arguments))) as engine:
        yield engine, ScriptedEngine(**arguments)


@pytest.fixture(scope="module")
def paced(two_nodes):
    """Two replicas that write a long text slowly."""
    with replicated(("paced", {"script": LONG, "pace": PACE}), n=2) as engine:
        yield engine


def prompt(text="hi"):
    return shipped().tokenizer.encode(text)


def told(job):
    return [(delta.token_id, delta.text, delta.finish_reason, delta.logprob, delta.top_logprobs) for delta in job]


def text_of(job):
    return "".join(delta.text for delta in job)


def alone(script=LONG):
    return text_of(ScriptedEngine(script).submit(Request(prompt())))


# ---- the same answers ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(two_nodes):
    """The small model of the tests on a replica, and here."""
    here = qengine.load(TINY, card="emulated", ctx=512, slots=2, progress=False)
    with replicated(("loaded", {"model": TINY, "ctx": 512, "slots": 2}), model=Facts.of(here)) as engine:
        yield engine, here
    here.close()


REQUESTS = [Request(list(range(20, 60)), max_tokens=12, ignore_eos=True, top_logprobs=3),
            Request(list(range(90, 260)), max_tokens=20, temperature=1.0, seed=5, stop=("a", "e")),
            Request(list(range(20, 200)), max_tokens=3, prompt_logprobs=1),
            Request(list(range(30, 60)), max_tokens=30, grammar='{"grammars": [{"lark_grammar": "start: /[0-9]+/"}]}')]


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_a_replica_computes_the_same_bits(real, number):
    engine, here = real
    there, near = engine.submit(REQUESTS[number]), here.submit(REQUESTS[number])
    assert told(there) == told(near) != []
    assert (there.finish_reason, there.n_generated, there.n_prompt, there.cause) == (
        near.finish_reason, near.n_generated, near.n_prompt, near.cause)
    assert len(there.token_times) == there.n_generated


def test_log_probabilities_of_the_prompt_come_along(real):
    (first, *_), (same, *_) = (list(one.submit(REQUESTS[2])) for one in real)
    for name in "own", "likeliest", "ids":
        assert np.array_equal(getattr(first.prompt_logprobs, name), getattr(same.prompt_logprobs, name))


def test_what_is_cached_is_reported_and_used(real):
    engine, _ = real
    ids = list(range(10, 210))
    for n_cached in 0, 192:
        job = engine.submit(Request(ids, max_tokens=1))
        list(job)
        assert job.n_cached == n_cached
    replica, = engine.replicas
    from engine.prefix import marks_of
    assert engine.link.table.n_spared(replica.id, marks_of(ids)) == 192


def test_a_grammar_that_is_none_is_refused_at_once(real):
    engine, here = real
    sentences = []
    for one in real:
        with pytest.raises(RequestError) as error:
            one.submit(Request([20], grammar='{"grammars": [{"lark_grammar": "start: ("}]}'))
        sentences.append((error.value.field, str(error.value)))
    assert sentences[0] == sentences[1]


BODIES = {
    "/v1/chat/completions": {"messages": [HI]}, "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"}, "/v1/messages": {"messages": [HI], "max_tokens": 50},
    "/api/chat": {"messages": [HI]}, "/api/generate": {"prompt": "hi"}}


def without(value, names=("id", "created", "timings", "created_at", "total_duration", "load_duration",
                          "prompt_eval_duration", "eval_duration", "completed_at", "item_id", "response_id")):
    """A JSON value without what differs from answer to answer."""
    if isinstance(value, dict):
        return {key: without(one, names) for key, one in value.items() if key not in names}
    return [without(one, names) for one in value] if isinstance(value, list) else value


def stream(port, path, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", path, json.dumps(body | {"stream": True, "model": "m"}),
                       {"Content-Type": "application/json"})
    lines = [line.decode().removeprefix("data: ") for line in connection.getresponse()]
    connection.close()
    return [without(json.loads(line)) for line in lines if line.startswith("{")]


@pytest.fixture(scope="module")
def ports(scripted):
    with serving(app_of(scripted[0])) as (there, _), serving(app_of(scripted[1])) as (here, _):
        yield there, here


@pytest.mark.parametrize("path", BODIES)
def test_every_protocol_says_the_same(ports, path):
    streams = [stream(port, path, BODIES[path]) for port in ports]
    assert streams[0] == streams[1] != []
    whole = [send(port, "POST", path, BODIES[path] | {"stream": False, "model": "m"}) for port in ports]
    assert [without(body) for _, _, body in whole][0] == without(whole[1][2]) and whole[0][0] == 200


def test_pictures_travel(scripted):
    engine, here = scripted
    picture, pad = Picture.of(np.zeros((64, 64, 3), np.uint8)), here.eyes.pad
    request = Request([20, pad, pad, pad, pad, 21], pictures=(picture,))
    assert told(engine.submit(request)) == told(here.submit(request)) and engine.eyes.pad == pad
    with pytest.raises(RequestError, match="no 4 tokens"):
        engine.submit(Request([20, pad, 21], pictures=(picture,)))


def test_embeddings_and_scores(two_nodes):
    with replicated(("pooling", {}), model=pooling_model()) as engine:
        texts = [[5, 6, 7], [9], [5, 6]]
        assert np.array_equal(engine.embed(texts), ScriptedPooling().embed(texts))
        with pytest.raises(RequestError, match="empty"):
            engine.submit(TextsRequest([[]]))
        with serving(app_of(engine)) as (port, _):
            status, _, body = send(port, "POST", "/v1/embeddings", {"input": "hello", "model": "m"})
        assert status == 200 and len(body["data"][0]["embedding"]) == 8
        wait_until(lambda: engine.stats()["requests"] == 2, LIMIT)


# ---- who waits no longer -------------------------------------------------------------------------------------------


def running(engine):
    return engine.stats()["requests_running"]


@contextlib.contextmanager
def less_than_all(engine):
    """Asserts that an answer does not go on to its end in the replica."""
    wait_until(lambda: running(engine) == 0, LIMIT)
    before = engine.stats()["generated_tokens"]
    yield
    wait_until(lambda: running(engine) == 0, LIMIT)
    assert engine.stats()["generated_tokens"] - before < len(shipped().tokenizer.encode(LONG))


def test_who_leaves_frees_the_slot_in_the_replica(paced):
    with serving(app_of(paced)) as (port, service), less_than_all(paced):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", CHAT, json.dumps({"messages": [HI], "stream": True}),
                           {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.read(10)
        wait_until(lambda: running(paced) == 1, LIMIT)
        response.close()
        connection.close()
        wait_until(lambda: running(paced) == 0 and not service.open, LIMIT)
    assert all(one.n_open == 0 for one in paced.replicas)


def test_deadlines_travel(paced):
    with less_than_all(paced), pytest.raises(DeadlineExceeded, match="not finished after the 0.2 s"):
        list(paced.submit(Request(prompt(), timeout=0.2)))


def test_requests_are_spread(paced):
    jobs = [paced.submit(Request(prompt())) for _ in range(4)]
    wait_until(lambda: all(job.n_generated for job in jobs), LIMIT)
    assert sorted(one.n_open for one in paced.replicas) == [2, 2]
    for job in jobs:
        job.cancel()
    assert all(job.wait(LIMIT) for job in jobs) and all(job.finish_reason is None for job in jobs)


def test_full_is_429(paced):
    with serving(app_of(paced, max_requests=1)) as (port, _):
        job = threading.Thread(target=send, args=(port, "POST", CHAT, {"messages": [HI]}))
        job.start()
        wait_until(lambda: running(paced) == 1, LIMIT)
        status, headers, _ = send(port, "POST", CHAT, {"messages": [HI]})
        assert status == 429 and headers["Retry-After"]
        job.join()


def test_metrics_and_health_name_replicas_and_nodes(paced):
    list(paced.submit(Request(prompt(), max_tokens=2)))
    with serving(app_of(paced)) as (port, _):
        health = send(port, "GET", "/health")[2]
        assert [one["state"] for one in health["replicas"]] == ["up", "up"]
        assert all(one["node"] and one["host"] and one["id"] for one in health["replicas"])
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    for one in paced.replicas:
        assert f'qengine:replica_up{{model_name="scripted",node="{one.node}",replica="{one.id}"}} 1.0' in text
    total, = (float(line.split()[-1]) for line in text.splitlines() if line.startswith("qengine:generation_tokens_tot"))
    each = [float(line.split()[-1]) for line in text.splitlines()
            if line.startswith("qengine:replica_generation_tokens_tot")]
    assert len(each) == 2 and sum(each) == total > 0


# ---- what dies -----------------------------------------------------------------------------------------------------


def begun(engine, n):
    """n answers, with a few tokens each, and by replica."""
    jobs = [engine.submit(Request(prompt())) for _ in range(n)]
    wait_until(lambda: all(job.n_generated >= 3 for job in jobs), LIMIT)
    return jobs


def test_an_answer_goes_on_elsewhere_when_its_replica_is_killed(paced):
    jobs = begun(paced, 4)
    victim = next(one for one in paced.replicas if one.id == jobs[0].replica)
    kill(victim)
    assert [text_of(job) for job in jobs] == [alone()] * 4
    assert {job.n_lost for job in jobs} == {0, 1} and jobs[0].n_lost == 1
    until_up(paced, 2)
    assert victim.id not in {one.id for one in paced.replicas}


def test_a_request_that_kills_replicas_ends(paced, monkeypatch):
    monkeypatch.setattr(front, "MOST_LOST", 1)
    job, = begun(paced, 1)
    kill(next(one for one in paced.replicas if one.id == job.replica))
    with pytest.raises(EngineStopped, match="1 replicas were lost"):
        text_of(job)
    until_up(paced, 2)


def test_a_replica_that_hangs_is_told_from_a_slow_one(paced, monkeypatch):
    monkeypatch.setattr(front, "MOST_LOOKS", 12)       # 6 s: the other one reports meanwhile
    jobs = begun(paced, 2)
    victim = next(one for one in paced.replicas if one.id == jobs[0].replica)
    kill(victim, signal.SIGSTOP)
    try:
        wait_until(lambda: jobs[0].n_lost == 1, LIMIT)
        assert victim.state == "silent"
        assert [text_of(job) for job in jobs] == [alone()] * 2 and jobs[1].n_lost == 0
    finally:
        kill(victim, signal.SIGCONT)
    wait_until(lambda: victim.state == "up", LIMIT)     # it was only suspended, and reports again
    wait_until(lambda: running(paced) == 0, LIMIT)


def test_an_engine_that_stops_is_replaced(two_nodes):
    with replicated(("failing", {"n": 1, "script": "Hello"})) as engine:
        first, = engine.replicas
        assert text_of(engine.submit(Request(prompt()))) == "Hello"
        assert text_of(engine.submit(Request(prompt()))) == "Hello"         # by the next one
        assert first.id not in {one.id for one in engine.replicas if one.state == "up"}


def test_a_node_that_dies(two_nodes):
    """Its raylet is killed, and all that runs there with it."""
    ray_cluster, (_, second) = two_nodes
    with replicated(("paced", {"script": LONG, "pace": PACE}), n=2, n_cpus=9) as engine:        # one on each node
        jobs = begun(engine, 4)
        ray_cluster.remove_node(second, allow_graceful=False)
        two_nodes[1][1] = ray_cluster.add_node(num_cpus=16, object_store_memory=100 << 20)
        assert [text_of(job) for job in jobs] == [alone()] * 4
        assert {job.n_lost for job in jobs} == {0, 1}
        until_up(engine, 2)


# ---- what changes --------------------------------------------------------------------------------------------------


def test_a_front_that_starts_again_finds_the_replicas(paced):
    until_up(paced, 2)
    wish = paced.one["wish"]
    before = {one.id for one in paced.replicas}
    paced.link.close()
    with pytest.raises(EngineStopped):
        paced.submit(Request(prompt()))
    assert cluster.keep(wish) is False
    paced.link, facts = cluster.link(wish)
    assert text_of(paced.submit(Request(prompt()))) == alone()
    until_up(paced, 2)
    assert {one.id for one in paced.replicas} == before


def test_a_rolling_change_loses_nothing(two_nodes):
    with replicated(("paced", {"script": LONG, "pace": PACE}), n=2, name="rolling") as engine:
        before, answers, over = {one.id for one in engine.replicas}, [], threading.Event()

        def ask():
            while not over.is_set():
                answers.append(text_of(engine.submit(Request(prompt()))))

        clients = [threading.Thread(target=ask) for _ in range(3)]
        for client in clients:
            client.start()
        assert cluster.keep(wish_for(("paced", {"script": LONG + " new", "pace": PACE}), 2, "rolling")) is True
        wait_until(lambda: not before & {one.id for one in engine.replicas}, LIMIT)
        until_up(engine, 2)
        time.sleep(0.5)
        over.set()
        for client in clients:
            client.join()
        assert set(answers) == {alone(), alone(LONG + " new")} and answers[-1] == alone(LONG + " new")


def test_replicas_come_and_go_with_the_load(two_nodes, monkeypatch):
    monkeypatch.setattr(cluster, "UP_SECONDS", 0.5)
    monkeypatch.setattr(cluster, "DOWN_SECONDS", 1)
    with replicated(("paced", {"script": LONG * 4, "pace": PACE, "n_slots": 1}), n=1, most=2) as engine:
        jobs = begun(engine, 4)
        wait_until(lambda: sum(one.state == "up" for one in engine.replicas) == 2, LIMIT)
        assert [text_of(job) for job in jobs] == [alone(LONG * 4)] * 4      # none was lost to one that goes
        wait_until(lambda: sum(one.state == "up" for one in engine.replicas) == 1, LIMIT)


def test_what_cannot_be_started_is_a_sentence(two_nodes):
    wish = wish_for(("loaded", {"model": "nowhere.gguf"}))
    cluster.keep(wish)
    with pytest.raises(ModelError, match="nowhere.gguf"):
        cluster.link(wish)
    cluster.end(wish.application)


def test_no_cluster_is_a_sentence():
    import subprocess
    import sys
    code = "from engine.replicas import cluster; from engine.request import RequestError\n" \
           "try: cluster.join('127.0.0.1:9')\nexcept RequestError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("no cluster of Ray answers at 127.0.0.1:9") and done.stdout.count("\n") == 1


def test_a_replica_tells_the_counts_of_a_sparse_prompt():
    near = ScriptedEngine("Hello").submit(Request([20, 21], sparse=True))       # it has ended
    near.keys_read, near.keys_seen = 30, 120
    feed, there = actor.Feed(None, None), RemoteAnswer(near.request, None, [])
    feed.jobs[1], feed.untold = (near, actor.news_of(near, feed.wake), threading.Event()), {1}
    feed._gather()
    (_, counts, told, end), = feed.events.values()
    there.hear(counts, told)
    there.end(*end[1:])
    assert share_read([there]) == share_read([near]) == 0.25
    assert there.n_generated == near.n_generated > 1 and there.finish_reason == near.finish_reason


def test_fronts_on_two_nodes_wish_the_same():
    """Otherwise the second one would have all replicas replaced."""
    def wish(server, mark="abc"):
        offer = files.Offer("/models/model.gguf", mark, 1000, server)
        return cluster.Wish("qengine-model", cluster.Recipe("cli.replicas:make_engine", {"offers": [offer]}))

    assert wish("files of one node") == wish("files of another")
    assert wish("files of one node") != wish("files of one node", "another file")


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_bytes", [1, (1 << 20) + 5])
def test_a_file_is_fetched_in_pieces(two_nodes, tmp_path, monkeypatch, n_bytes):
    monkeypatch.setattr(files, "PIECE", 1 << 18)
    path, data = tmp_path / "model.gguf", os.urandom(n_bytes)
    path.write_bytes(data)
    offer, = files.offered([str(path)])
    assert files.taken([offer], tmp_path / "store") == [str(path)]  # it is there
    elsewhere = dataclasses.replace(offer, path=str(tmp_path / "other" / "model.gguf"))
    got, = files.taken([elsewhere], tmp_path / "store")
    assert got != str(path) and open(got, "rb").read() == data
    assert files.taken([elsewhere], tmp_path / "store") == [got] and files.fetching([offer]) == {}


def test_a_model_in_parts_is_fetched_into_one_folder(two_nodes, tmp_path):
    """And the eyes, which lie elsewhere, into another one: their file may have the same name."""
    front, eyes, node = folders = [tmp_path / name for name in ("front", "eyes", "node")]
    for folder in folders:
        folder.mkdir()
    paths = split(TINY, front, 2)
    (eyes / paths[0].name).write_bytes(b"eyes")
    shutil.copy(paths[0], node)                 # the node has one of the parts, and not the other
    at = [node / path.name for path in paths] + [node / "eyes" / paths[0].name]
    offers = [dataclasses.replace(offer, path=str(path))
              for offer, path in zip(files.offered([*map(str, paths), str(eyes / paths[0].name)]), at, strict=True)]
    *parts, look = files.taken(offers, tmp_path / "store")
    assert [open(part, "rb").read() for part in parts] == [open(path, "rb").read() for path in paths]
    assert [file.path for file in GGUF(parts[0]).files] == parts and open(look, "rb").read() == b"eyes"
    assert files.taken(offers, tmp_path / "store") == [*parts, look]


def test_another_file_of_the_same_name_is_not_taken(two_nodes, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(1000))
    offer, = files.offered([str(path)])
    path.write_bytes(bytes(999) + b"1")
    assert files.fingerprint(path) != offer.fingerprint
    with pytest.raises(ModelError, match="has changed while it was fetched"):
        files.taken([offer], tmp_path / "store")
