"""Joining a cluster of Ray, and having Ray Serve keep the replicas of a model there.

Ray's own HTTP servers, its dashboard and its reports of usage stay off. Replicas tell what their application was
deployed with. So a front that is started again finds them and changes nothing. A front with another number has Ray
Serve add or remove replicas. A front with another model has Ray Serve replace them one after the other, and begins when
the first replica of its model is up.
"""

import contextlib
import copy
import logging
import re
import socket
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from engine.request import RequestError

from .actor import Recipe, Replica
from .front import Link, in_a_line

LOCAL = "local"
STORE_BYTES = 200 << 20     # of Ray's object store on a cluster of this machine alone; only pieces of files pass it
ROUTER = "engine.replicas.router.PrefixRouter"
SCALING = "engine.replicas.scaling:needed"
MOST_ONGOING = 4096         # calls of a replica at once; the server's own bound on open requests comes first
DRAIN_SECONDS = 600         # that a replica gets to finish its answers before it goes
HEALTH_SECONDS = 5, 30      # between two looks of Ray Serve at a replica, and for its answer
UP_SECONDS, DOWN_SECONDS = 5, 300       # of load above or below, before a replica is added or taken away
MEAN_SECONDS = 30           # over which load is averaged
STARTS = 3                  # that may fail before Ray Serve says that a replica cannot be started
REACH_SECONDS = 5           # that a cluster's head gets to take a connection
ROOT = Path(__file__).resolve().parents[2]      # where a node finds qengine, unless it is installed there


@dataclass(frozen=True)
class Wish:
    """What is to run. application: its name. recipe: None, for a front alone, takes replicas of any. n, most: replicas;
    with most > n Ray Serve adds and takes away by load. n_gpus, n_cpus: that each replica has of its node. n_slots:
    answers that each generates at the same time. version: Ray Serve replaces the replicas that have another one."""

    application: str
    recipe: Recipe | None
    n: int = 1
    most: int | None = None
    n_gpus: int = 0
    n_cpus: float = 1
    n_slots: int = 1
    version: str = field(default="", compare=False)


def join(address: str, n_cpus: int | None = None):
    """Joins the cluster at this address; LOCAL starts one on this machine alone, which ends with this process. n_cpus:
    of the cluster that LOCAL starts. Raises RequestError."""
    if ray.is_initialized():
        return
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if address == LOCAL:
            ray.init("local", include_dashboard=False, _node_ip_address="127.0.0.1", num_cpus=n_cpus,
                     object_store_memory=STORE_BYTES, **quiet)
        else:
            if (place := re.fullmatch(r"(?:ray://)?\[?([^\]]+)\]?:(\d+)", address)):     # Ray itself tries for minutes
                socket.create_connection(place.groups(), REACH_SECONDS).close()
            ray.init(address=address, **quiet)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise RequestError("ray", f"no cluster of Ray answers at {address}, or RAY_AUTH_MODE is another one here: "
                                  f"{in_a_line(error)}") from None
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled", logging_config=logs())


def logs() -> LoggingConfig:
    return LoggingConfig(log_level="ERROR", enable_access_log=False)


def leave():
    """Leaves the cluster, which goes on unless it is this process's own."""
    ray.shutdown()


def n_gpus() -> float:
    """GPUs of all nodes of the cluster."""
    return ray.cluster_resources().get("GPU", 0)


def deployed(wish: Wish) -> "serve.Application":
    """What Ray Serve is to run. A version is an internal option of Ray 2.60; without it another number of replicas
    would replace them all."""
    sizes = {"num_replicas": wish.n} if not wish.most or wish.most == wish.n else {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=wish.n, max_replicas=wish.most, upscale_delay_s=UP_SECONDS, downscale_delay_s=DOWN_SECONDS,
            look_back_period_s=MEAN_SECONDS, target_ongoing_requests=wish.n_slots,
            policy=AutoscalingPolicy(policy_function=SCALING))}
    return serve.deployment(Replica).options(
        name="Replica", version=wish.version, _internal=True, max_ongoing_requests=MOST_ONGOING,
        graceful_shutdown_timeout_s=DRAIN_SECONDS, graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_SECONDS[0], health_check_timeout_s=HEALTH_SECONDS[1],
        max_constructor_retry_count=STARTS, logging_config=logs(),
        ray_actor_options={"num_gpus": wish.n_gpus, "num_cpus": wish.n_cpus,
                           "runtime_env": {"env_vars": {"PYTHONPATH": str(ROOT)}}},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER,
                                                  request_router_kwargs={"application": wish.application}),
        **sizes).bind(wish)


def keep(wish: Wish, note=lambda text: None) -> bool:
    """Has the cluster run what is wished, and returns at once. Returns whether running replicas are replaced; they are
    not if only their number changes."""
    runs = running(wish.application)
    is_same = runs is not None and replace(runs, n=wish.n, most=wish.most) == wish
    if is_replaced := runs is not None and not is_same:
        note("the replicas that run are replaced, one after the other")
    wish = replace(wish, version=runs.version if is_same else uuid.uuid4().hex)
    serve.run_many([serve.RunTarget(deployed(wish), name=wish.application, route_prefix=None, logging_config=logs())],
                   wait_for_applications_running=False)
    return is_replaced


def running(application: str) -> Wish | None:
    """What the application was deployed with, as a replica of it says; None where none is up."""
    if not states(application).get("RUNNING"):
        return None
    handle = handle_for(application)
    try:
        return handle.hello.remote().result(timeout_s=HEALTH_SECONDS[1])["wish"]
    except Exception:                           # it goes just now: then it is deployed anew
        return None
    finally:
        handle.shutdown()


def handle_for(application: str) -> DeploymentHandle:
    """What calls replicas. Who has it shuts it down; so it is a copy of the one that Ray Serve keeps."""
    return copy.copy(serve.get_app_handle(application))


def link(wish: Wish, on_facts=lambda facts: None, meanwhile=lambda: None) -> tuple[Link, dict]:
    """Joins this process with the replicas, once one is up that is as wished. Returns (Link, what that one says of
    itself). meanwhile(): is called again and again until then. Raises ModelError where none can be started,
    RequestError where none answers."""
    found = Link(handle_for(wish.application), wish.application, on_facts, wish.recipe)
    try:
        return found, found.first_facts(lambda: failure(wish.application), meanwhile)
    except BaseException:
        found.close()
        raise


def failure(application: str) -> str | None:
    """Why no replica can be started; None while one may."""
    status = serve.status().applications.get(application)
    if status is None or "FAILED" not in str(status.status):
        return None
    said = "\n".join([status.message, *(one.message for one in status.deployments.values())])
    sentences = re.findall(r"qengine: (.+)", said)
    return sentences[-1] if sentences else f"no replica can be started: {said.splitlines()[0]}"


def states(application: str) -> dict[str, int]:
    """How many replicas are in each state of Ray Serve's."""
    status = serve.status().applications.get(application)
    counts = {}
    for one in (status.deployments.values() if status else ()):
        for state, n in one.replica_states.items():
            counts[str(getattr(state, "value", state))] = n
    return counts


def applications() -> list[str]:
    """The names of all that Ray Serve keeps on the cluster."""
    return sorted(serve.status().applications)


def end(application: str) -> bool:
    """Ends all replicas of a model. Returns whether they have ended; otherwise they will, once their answers have."""
    try:
        serve.delete(application)
    except TimeoutError:                        # Ray Serve waits for a minute
        return False
    return True


@contextlib.contextmanager
def said(address: str):
    """Turns errors of Ray, which has many kinds of them, into one sentence: RequestError."""
    try:
        yield
    except (ray.exceptions.RayError, RayServeException) as error:
        raise RequestError("ray", f"the cluster of Ray at {address} has failed: {in_a_line(error)}") from None
