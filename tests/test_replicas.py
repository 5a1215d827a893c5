"""Replicas on a cluster of Ray with two nodes on this machine: the same answers as from an engine alone, and what
happens when replicas die, hang, are added and are replaced.

    pip install -r requirements-ray.txt, and python -m pytest tests/test_replicas*.py

Others, which come and go, are in test_replicas_come_and_go.py. Most of the time of both files is waiting.
"""

import base64
import contextlib
import dataclasses
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.replicas import skip_without_ray

skip_without_ray()

import qengine
from cli.options import build_parser, check_options
from cli.replicas import Shares, Waiting, end_replicas, load_replicas
from engine.gguf import GGUF
from engine.images import Picture
from engine.limits import DEFAULT_PICTURE
from engine.pooling import TextsRequest
from engine.replicas import cluster, files, front, store
from engine.request import DeadlineExceeded, EngineStopped, ModelError, Request, RequestError, share_read
from engine.served import Facts
from kernels import block_sparse
from tests.clients import CHAT, HI, app_of, send, serving
from tests.models import TINY
from tests.replica_engines import FEW_PAGES, loaded_sparsely
from tests.replicas import (LONG, PACE, alone, begun, kill, pooling_model, prompt, replicated, running, text_of,
                            two_nodes, until_up, wish_for)
from tests.scripted import ScriptedEngine, ScriptedPooling, shipped
from tests.test_cli import start
from tests.test_split import split
from tests.tiny import ROOT
from tests.until import PATIENCE, wait_until


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


def told(job):
    return [(delta.token_id, delta.text, delta.finish_reason, delta.logprob, delta.top_logprobs) for delta in job]


# ---- the same answers ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(two_nodes):
    """The small model of the tests on a replica, and here."""
    arguments = {"model": TINY, "ctx": 1400, "slots": 2, "sparse": "ask"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_sparse, "RULE", FEW_PAGES)
        here = loaded_sparsely(**arguments)
        with replicated(("loaded_sparsely", arguments), model=Facts.of(here)) as engine:
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


def test_a_sparse_prompt_is_read_as_sparsely_as_here(real):
    ids = np.random.default_rng(0).integers(0, 250, 1200).tolist()
    found = []
    for sparse in True, False, True:
        there, near = jobs = [one.submit(Request(ids, max_tokens=8, ignore_eos=True, sparse=sparse)) for one in real]
        assert told(there) == told(near) != []
        counts = [(job.is_sparse, job.keys_read, job.keys_seen, job.n_cached) for job in jobs]
        assert counts[0] == counts[1]
        found.append((share_read([there]), there.n_cached))
    (share, n_cached), dense, (again, n_again) = found
    assert 0.2 < share < 0.6 and n_cached == 0 and dense == (None, 0)
    assert n_again >= 1024 and 0 < again < 1 and real[0].stats()["keys_seen"] == real[1].stats()["keys_seen"] > 0


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
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
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
        wait_until(lambda: engine.stats()["requests"] == 2)


# ---- who waits no longer -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def less_than_all(engine):
    """Asserts that an answer does not go on to its end in the replica."""
    wait_until(lambda: running(engine) == 0)
    before = engine.stats()["generated_tokens"]
    yield
    wait_until(lambda: running(engine) == 0)
    assert engine.stats()["generated_tokens"] - before < len(shipped().tokenizer.encode(LONG))


def test_who_leaves_frees_the_slot_in_the_replica(paced):
    with serving(app_of(paced)) as (port, service), less_than_all(paced):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        connection.request("POST", CHAT, json.dumps({"messages": [HI], "stream": True}),
                           {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.read(10)
        wait_until(lambda: running(paced) == 1)
        response.close()
        connection.close()
        wait_until(lambda: running(paced) == 0 and not service.open)
    assert all(one.n_open == 0 for one in paced.replicas)


def test_deadlines_travel(paced):
    with less_than_all(paced), pytest.raises(DeadlineExceeded, match="not finished after the 0.2 s"):
        list(paced.submit(Request(prompt(), timeout=0.2)))


def test_requests_are_spread(paced):
    jobs = [paced.submit(Request(prompt())) for _ in range(4)]
    wait_until(lambda: all(job.n_generated for job in jobs))
    assert sorted(one.n_open for one in paced.replicas) == [2, 2]
    for job in jobs:
        job.cancel()
    assert all(job.wait(PATIENCE) for job in jobs) and all(job.finish_reason is None for job in jobs)


def test_full_is_429(paced):
    """Two clients ask again and again until one of them is refused: on a busy machine an answer may end before the
    other client has asked."""
    refused = []

    def ask(port):
        for _ in range(50):
            status, headers, _ = send(port, "POST", CHAT, {"messages": [HI]})
            if status == 429:
                refused.append(headers["Retry-After"])
            if refused:
                return

    with serving(app_of(paced, max_requests=1)) as (port, _), ThreadPoolExecutor(2) as pool:
        for client in [pool.submit(ask, port) for _ in range(2)]:
            client.result()
    assert refused and all(refused)


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
        wait_until(lambda: jobs[0].n_lost == 1)
        assert victim.state == "silent"
        assert [text_of(job) for job in jobs] == [alone()] * 2 and jobs[1].n_lost == 0
    finally:
        kill(victim, signal.SIGCONT)
    wait_until(lambda: victim.state == "up")     # it was only suspended, and reports again
    wait_until(lambda: running(paced) == 0)


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


def test_another_number_of_replicas_replaces_none(paced):
    until_up(paced, 2)
    wish, before = paced.one["wish"], {one.id for one in paced.replicas}
    assert cluster.keep(dataclasses.replace(wish, n=3)) is False
    until_up(paced, 3)
    assert before < {one.id for one in paced.replicas}
    for _ in range(2):                          # what a replica was started with is not how many there are
        assert cluster.keep(wish) is False
        until_up(paced, 2)


def test_what_cannot_be_started_is_a_sentence(two_nodes, monkeypatch):
    monkeypatch.setattr(cluster, "STARTS", 1)
    wish = wish_for(("loaded", {"model": "nowhere.gguf"}))
    cluster.keep(wish)
    with pytest.raises(ModelError, match="nowhere.gguf"):
        cluster.link(wish)
    cluster.end(wish.application)


def test_the_command_of_the_page_ends_replicas(two_nodes, scripted, capsys):
    """Those of models, and nothing else that Ray Serve keeps."""
    page = (ROOT / "docs" / "several-machines.md").read_text(encoding="utf-8")
    command, = re.findall(r"^python (qengine\.py .*--replicas 0)$", page, re.M)
    with replicated(("paced", {}), name="qengine-model"):
        assert cluster.running("qengine-model") is not None
        done = subprocess.run([sys.executable, *command.replace("auto", two_nodes[0].address).split()], cwd=ROOT,
                              capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0 and "the replicas of model have ended\n" in done.stderr
        assert cluster.states("qengine-model") == {}
        assert end_replicas("here") == 0 and "no replicas run on the cluster at here" in capsys.readouterr().err
    assert scripted[0].link.application in cluster.applications()


@pytest.fixture
def options():
    parser = build_parser()
    found = parser.parse_args(["--serve", "0", "--ray", "auto", "--card", "emulated", "-m", f"old={TINY}"])
    check_options(parser, found)
    return found


@pytest.mark.parametrize("fails", ["offered", "under_way"])
def test_a_cluster_that_fails_while_replicas_start_is_a_sentence(options, monkeypatch, fails):
    """A node is lost, say, while files are offered to others, or later."""
    def lose(*_):
        raise cluster.ray.exceptions.RaySystemError("The node has died.\nAnd a traceback.")

    monkeypatch.setattr(cluster, "join", lambda *_: None)
    monkeypatch.setattr(cluster, "n_gpus", lambda: 0)
    monkeypatch.setattr(cluster, "keep", lambda *_: True)
    monkeypatch.setattr(cluster, "link", lambda wish, tell, meanwhile: meanwhile())
    monkeypatch.setattr(files, "offered", lambda *_: [])
    monkeypatch.setattr(files, fails, lose)
    with pytest.raises(RequestError, match="^the cluster of Ray at auto has failed: .*died[^\n]*$"):
        load_replicas(options)


def test_a_start_that_waits_for_long_says_what_for(monkeypatch):
    monkeypatch.setattr(cluster, "applications", lambda: ["qengine-chat", "qengine-old", "other"])
    waiting = Waiting(cluster.Wish("qengine-chat", None, n_gpus=2), [], Shares())
    assert waiting.late().startswith("no replica of chat is up") and "old, other may hold some" in waiting.late()
    monkeypatch.setattr(cluster, "applications", lambda: ["qengine-chat"])
    assert "2 GPUs and 1 CPUs" in waiting.late() and "hold" not in waiting.late()


def test_no_cluster_is_a_sentence():
    code = "from engine.replicas import cluster; from engine.request import RequestError\n" \
           "try: cluster.join('127.0.0.1:9')\nexcept RequestError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("no cluster of Ray answers at 127.0.0.1:9") and done.stdout.count("\n") == 1


def test_fronts_on_two_nodes_wish_the_same():
    """Otherwise the second one would have all replicas replaced."""
    def wish(server, mark="abc"):
        offer = files.Offer("/models/model.gguf", mark, 1000, server)
        return cluster.Wish("qengine-model", cluster.Recipe("cli.replicas:make_engine", {"offers": [offer]}))

    assert wish("files of one node") == wish("files of another")
    assert wish("files of one node") != wish("files of one node", "another file")


# ---- the command line --------------------------------------------------------------------------------------------


def descendants(pid):
    """The processes that a process has started, and those that they have, which still run."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(name)] = int(parent)
    found = {pid}
    while more := {one for one, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def test_several_replicated_models_on_the_command_line():
    """As a process with a cluster of its own: what each says, a picture too, and SIGTERM ends all of it."""
    chat = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(
        open(DEFAULT_PICTURE, "rb").read()).decode()}}, {"type": "text", "text": "How many circles are there?"}]
    process = start("--ray", "local", "--serve", "0", ctx=1024,
                    model=("-m", f"a={qengine.DEFAULT_MODEL},replicas=1", "-m", f"b={TINY},replicas=2"))
    try:
        impatient = threading.Timer(PATIENCE, process.kill)
        impatient.start()
        # Ray writes to the same terminal, from threads of its own: half a line of it may stand before ours.
        line = next(line for line in process.stderr if "serving a on " in line)
        impatient.cancel()
        port = int(line.partition("127.0.0.1:")[2].partition("/")[0])
        models = send(port, "GET", "/v1/models")[2]["data"]
        assert [one["id"] for one in models] == ["a", "b"]
        wait_until(lambda: len(states_at(port)) == 3 and {*states_at(port)} == {"up"})
        short = {"temperature": 0, "max_tokens": 8}
        seen = send(port, "POST", CHAT, short | {"model": "a", "messages": [{"role": "user", "content": chat}]})[2]
        told = send(port, "POST", "/v1/completions", short | {"model": "b", "prompt": "hi"})[2]
        assert (seen["model"], told["model"]) == ("a", "b")
        assert seen["choices"][0]["message"]["content"] == "3"
        here = qengine.load(TINY, card="emulated", ctx=1024, progress=False)
        assert told["choices"][0]["text"] == here.generate("hi", max_tokens=8) != ""
        here.close()
        started = descendants(process.pid)
    finally:
        process.terminate()
        _, rest = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and "Traceback" not in rest and len(started) > 3
    wait_until(lambda: not started & descendants(1))


def states_at(port):
    health = send(port, "GET", "/health")[2]
    return [one["state"] for model in [health, *health.get("side", ())] for one in model.get("replicas", ())]


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The store of a node, and notes of fingerprints, apart from this machine's own."""
    monkeypatch.setattr(store, "NOTES", tmp_path / "fingerprints.json")
    return store.Store(tmp_path / "store")


@pytest.mark.parametrize("n_bytes", [1, 2 * store.PIECE + 5])
def test_a_file_is_fetched_in_pieces(two_nodes, tmp_path, kept, n_bytes):
    path, data = tmp_path / "model.gguf", os.urandom(n_bytes)
    path.write_bytes(data)
    told = []
    offer, = files.offered([str(path)], lambda *about: told.append(about))
    assert [share for *_, share in told][-1] == 1 and {what for _, what, *_ in told} == {"reads"}
    assert files.taken([offer], kept) == [str(path)]    # it is there
    elsewhere = dataclasses.replace(offer, path=str(tmp_path / "other" / "model.gguf"))
    got, = files.taken([elsewhere], kept)
    assert got != str(path) and open(got, "rb").read() == data
    assert files.taken([elsewhere], kept) == [got]
    wait_until(lambda: files.under_way([offer]) == {})      # nodes tell how far they are without waiting for it


def test_a_model_in_parts_is_fetched_into_one_folder(two_nodes, tmp_path, kept):
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
    *parts, look = files.taken(offers, kept)
    assert [open(part, "rb").read() for part in parts] == [open(path, "rb").read() for path in paths]
    assert [file.path for file in GGUF(parts[0]).files] == parts and open(look, "rb").read() == b"eyes"
    assert files.taken(offers, kept) == [*parts, look]


def test_another_file_of_the_same_name_and_size_is_not_taken(two_nodes, tmp_path, kept):
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(1 << 20))
    offer, = files.offered([str(path)])
    path.write_bytes(bytes(700_001) + b"1" + bytes((1 << 20) - 700_002))        # one byte is another
    with pytest.raises(ModelError, match="has changed while it was fetched"):
        files.taken([offer], kept)
    assert not [name for _, _, names in os.walk(kept.root) for name in names if name.startswith("model")]


def test_a_node_without_the_fronts_node_reads_its_own_file(two_nodes, tmp_path, kept):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"a model")
    offer, = files.offered([str(path)])
    assert files.taken([dataclasses.replace(offer, server="of a node that is gone")], kept) == [str(path)]


@pytest.mark.parametrize("what", ["the file", "its reader"])
def test_a_fetch_of_what_is_gone_is_a_sentence(two_nodes, tmp_path, kept, what):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"a model")
    offer, = files.offered([str(path)])
    if what == "the file":
        path.unlink()
    elsewhere = dataclasses.replace(offer, path=str(tmp_path / "other" / "model.gguf"),
                                    server=offer.server if what == "the file" else "of a node that is gone")
    with pytest.raises(ModelError, match="^.*model.gguf cannot be fetched from the front's node: ") as error:
        files.taken([elsewhere], kept)
    assert "\n" not in str(error.value) and ("No such file" in str(error.value)) == (what == "the file")
