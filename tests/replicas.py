"""A cluster of Ray on this machine, with several nodes, and engines that are replicas on it."""

import contextlib
import gc
import importlib.util
import os
import signal
import time
import uuid
import warnings

import pytest

from engine.request import Request
from engine.served import Facts
from tests.scripted import ScriptedEngine, ScriptedPooling, shipped
from tests.until import wait_until

LONG = " ".join(f"word{i}" for i in range(60))
PACE = 0.02


def skip_without_ray():
    """For the head of a file, in place of importorskip, which would import Ray before engine.replicas does."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is an extra: pip install -r requirements-ray.txt", allow_module_level=True)


@pytest.fixture(scope="module")
def two_nodes():
    from engine.replicas import cluster
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "HEALTH_SECONDS", (3, 30))       # so what has died is replaced sooner
        with nodes(16, 16) as found:        # not real ones: they only say who is placed where
            yield found


@contextlib.contextmanager
def nodes(*cpus):
    """A cluster with nodes of so many CPUs, the first one the head; gives it with the nodes."""
    os.environ["RAY_AUTH_MODE"] = "disabled"    # whether or not this machine has a token of Ray's
    for who in "REPLICA", "HANDLE":             # loads are told every second, and not every ten
        os.environ[f"RAY_SERVE_{who}_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "1"
    from engine.replicas import cluster         # before Ray: its package sets what Ray reads when it is imported
    from ray.cluster_utils import Cluster
    one = Cluster()
    try:
        each = [add_node(one, n) for n in cpus]
        cluster.join(one.address)
        yield one, each
    finally:
        cluster.leave()
        one.shutdown()
        # Tasks of Ray Serve that have failed unnoticed are reported when they are collected as garbage. Python 3.11
        # parses the lines of their tracebacks for that, and if this happens while it parses a file, that fails.
        gc.collect()


def add_node(ray_cluster, n_cpus):
    return ray_cluster.add_node(num_cpus=n_cpus, object_store_memory=100 << 20, include_dashboard=False)


def replace_second(ray_cluster, each):
    """Kills the raylet of the second node, and all that runs there with it, and adds another node."""
    ray_cluster.remove_node(each[1], allow_graceful=False)
    each[1] = add_node(ray_cluster, 16)


def revive_second(ray_cluster, each):
    """Adds another node if the second one has died by itself. One node did so, a second after its start. It wrote
    nothing, as after SIGKILL or SIGPIPE. Nobody knows who sent such a signal, so a warning tells of the next case."""
    raylet, = each[1].all_processes["raylet"]
    if (code := raylet.process.poll()) is not None:
        warnings.warn(f"a raylet of Ray has died by itself, with exit code {code}")
        replace_second(ray_cluster, each)


@contextlib.contextmanager
def replicated(maker, n=1, model=None, name=None, **wishes):
    """An engine whose replicas a function of tests/replica_engines.py makes. maker: its name, and its arguments.
    model: what the front knows of the model, by default that of a scripted engine."""
    from engine.replicas import cluster, front
    wish = wish_for(maker, n, name, **wishes)
    cluster.keep(wish)
    link, facts = cluster.link(wish)
    engine = front.engine_of(link, model or Facts.of(ScriptedEngine()), facts)
    try:
        wait_until(lambda: n_up(engine) >= n, 120, lambda: seen(engine))
        yield engine
    finally:
        engine.close()
        cluster.end(wish.application)


def wish_for(maker, n=1, name=None, **wishes):
    from engine.replicas import cluster
    function, arguments = maker
    recipe = cluster.Recipe(f"tests.replica_engines:{function}", arguments)
    return cluster.Wish(name or f"test-{uuid.uuid4().hex[:8]}", recipe, n, **wishes)


def pooling_model():
    return Facts.of(ScriptedPooling())


def pid_of(replica):
    return replica.facts["pid"]


def kill(replica, how=signal.SIGKILL):
    os.kill(pid_of(replica), how)


def n_up(engine):
    return sum(one.state == "up" for one in engine.replicas)


def until_up(engine, n, seconds=120, meanwhile=lambda: None):
    """Waits until exactly n replicas are up. meanwhile(): is called again and again until then."""
    wait_until(lambda: meanwhile() or n_up(engine) == n, seconds, lambda: seen(engine))
    time.sleep(0.1)


def seen(engine):
    """The replicas as the front knows them, how many Ray Serve has in each state, and the nodes."""
    from engine.replicas import cluster
    nodes = [(node["NodeID"][:8], "alive" if node["Alive"] else node["DeathReasonMessage"])
             for node in cluster.ray.nodes()]
    return f"{[(one.id, one.state) for one in engine.replicas]} {cluster.states(engine.link.application)} {nodes}"


def prompt(text="hi"):
    return shipped().tokenizer.encode(text)


def text_of(job):
    return "".join(delta.text for delta in job)


def alone(script=LONG):
    return text_of(ScriptedEngine(script).submit(Request(prompt())))


def running(engine):
    return engine.stats()["requests_running"]


def begun(engine, n):
    """n answers, with a few tokens each, and by replica."""
    jobs = [engine.submit(Request(prompt())) for _ in range(n)]
    wait_until(lambda: all(job.n_generated >= 3 for job in jobs), seen=lambda: seen(engine))
    return jobs
