"""Replicas on a cluster of Ray that come and go: with their fronts, engines and nodes, with the load, and when a change
is rolled out.

    pip install -r requirements-ray.txt, and python -m pytest tests/test_replicas*.py
"""

import contextlib
import itertools
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tests.replicas import skip_without_ray

skip_without_ray()

from engine.replicas import cluster
from engine.request import Request
from tests.replicas import (LONG, PACE, alone, begun, prompt, replace_second, replicated, revive_second, running,
                            text_of, two_nodes, until_up, wish_for)
from tests.tiny import ROOT
from tests.until import PATIENCE, wait_until

FRONT = """if True:
    import sys
    from engine.replicas import cluster, front
    from engine.request import Request
    from engine.served import Facts
    from tests.scripted import ScriptedEngine, shipped
    cluster.join(sys.argv[1])
    link, facts = cluster.link(cluster.Wish(sys.argv[2], None))
    engine = front.engine_of(link, Facts.of(ScriptedEngine()), facts)
    for _ in engine.submit(Request(shipped().tokenizer.encode("hi"))):
        print("begun", flush=True)
"""


def test_answers_of_a_front_that_is_killed_end(two_nodes):
    """Soon, and no others: alone they would take minutes."""
    with replicated(("paced", {"script": LONG * 100, "pace": PACE})) as engine:
        mine, = begun(engine, 1)
        other = subprocess.Popen([sys.executable, "-c", FRONT, two_nodes[0].address, engine.link.application],
                                 cwd=ROOT, stdout=subprocess.PIPE)
        assert other.stdout.readline() == b"begun\n"
        wait_until(lambda: running(engine) == 2)
        other.kill()
        other.communicate()
        wait_until(lambda: running(engine) == 1, 60)
        assert not mine.wait(0) and mine.n_lost == 0
        mine.cancel()


def test_an_engine_that_stops_is_replaced(two_nodes):
    with replicated(("failing", {"n": 1, "script": "Hello"})) as engine:
        first, = engine.replicas
        assert text_of(engine.submit(Request(prompt()))) == "Hello"
        assert text_of(engine.submit(Request(prompt()))) == "Hello"         # by the next one
        assert first.id not in {one.id for one in engine.replicas if one.state == "up"}


def test_a_node_that_dies(two_nodes):
    """Its raylet is killed, and all that runs there with it."""
    with replicated(("paced", {"script": LONG, "pace": PACE}), n=2, n_cpus=9) as engine:        # one on each node
        jobs = begun(engine, 4)
        replace_second(*two_nodes)
        assert [text_of(job) for job in jobs] == [alone()] * 4
        assert {job.n_lost for job in jobs} == {0, 1}
        until_up(engine, 2, meanwhile=lambda: revive_second(*two_nodes))


def test_a_rolling_change_loses_nothing(two_nodes):
    """Answers take longer than the lease of a stream, so some go on in a replica that is drained."""
    now, then = LONG * 3, LONG * 3 + " new"
    with replicated(("paced", {"script": now, "pace": PACE}), n=2, name="rolling") as engine:
        before, over = {one.id for one in engine.replicas}, threading.Event()

        def ask():
            answers = []
            while not over.is_set():
                answers.append(text_of(engine.submit(Request(prompt(), timeout=PATIENCE))))
            return answers

        with ThreadPoolExecutor(3) as pool:
            clients = [pool.submit(ask) for _ in range(3)]
            try:
                wait_until(lambda: running(engine) == 3)
                assert cluster.keep(wish_for(("paced", {"script": then, "pace": PACE}), 2, "rolling")) is True
                wait_until(lambda: not before & {one.id for one in engine.replicas})
                until_up(engine, 2)
                time.sleep(0.5)
            finally:
                over.set()
        for client in clients:
            first, *between, last = client.result()         # which raises what the client has met
            assert (first, last) == (alone(now), alone(then)) and {*between} <= {first, last}


@contextlib.contextmanager
def idle_fronts(engine, n):
    """Further fronts, which only listen, all of them to one replica."""
    over = threading.Event()

    def listen(key):
        stream = itertools.count(1)
        while not over.is_set():
            with contextlib.suppress(Exception):        # that replica may be the one that goes
                listens = engine.link.handle.options(stream=True).listen
                for _ in listens.remote(engine.replicas[0].id, key, next(stream), True):
                    n_heard[key] += 1

    n_heard = Counter()
    threads = [threading.Thread(target=listen, args=(f"idle {i}",)) for i in range(n)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(n_heard) == n)
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_replicas_come_and_go_with_the_load(two_nodes, monkeypatch):
    """Fronts that only listen are no load."""
    monkeypatch.setattr(cluster, "UP_SECONDS", 0.5)
    monkeypatch.setattr(cluster, "DOWN_SECONDS", 1)
    monkeypatch.setattr(cluster, "MEAN_SECONDS", 3)
    with replicated(("paced", {"script": LONG * 4, "pace": PACE, "n_slots": 1}), n=1, most=2) as engine, \
            idle_fronts(engine, 4):
        jobs = begun(engine, 4)
        until_up(engine, 2, PATIENCE)
        assert [text_of(job) for job in jobs] == [alone(LONG * 4)] * 4      # none was lost to one that goes
        until_up(engine, 1, PATIENCE)
