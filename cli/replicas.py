"""The models of a server on Ray: what the options ask of a cluster, and how a replica makes its engine there."""

import contextlib
import dataclasses
import re
import time

import qengine
from engine.request import RequestError
from engine.served import Models, Served

from kernels.workers import usable_processors

from .models import Wanted, freeze, open_models
from .named import is_several

PREFIX = "qengine-"         # of what Ray Serve calls a model
LONG = 60                   # seconds after which a start that still waits says so
SHORT = 2                   # seconds in which nothing is said of files


def ray_cluster():
    """The module that joins a cluster. Raises RequestError."""
    try:
        from engine.replicas import cluster
    except ImportError as error:
        raise RequestError("ray", "--ray needs Ray, which is not installed: pip install -r requirements-ray.txt "
                                  f"({error})") from None
    return cluster


def load_replicas(options) -> Models:
    """The models of a server, each once one of its replicas is up. Raises ModelError, RequestError."""
    cluster = ray_cluster()
    wanted = open_models(options)
    each = options.each if is_several(options) else [options]
    served = []
    with cluster.said(options.ray), contextlib.ExitStack() as stack:
        cluster.join(options.ray, cpus_for(each))
        for one, own in zip(wanted, each, strict=True):
            engine = replicated(one, own)
            stack.callback(engine.close)
            served.append(Served(engine, one.aliases, one.defaults))
        stack.pop_all()
    return Models(served)


def end_replicas(address: str) -> int:
    """Ends the replicas of all models on a cluster; returns the exit code. Raises RequestError."""
    cluster = ray_cluster()
    with cluster.said(address):
        cluster.join(address)
        found = [name for name in cluster.applications() if name.startswith(PREFIX)]
        for name in found:
            is_over = cluster.end(name)
            qengine.note(f"the replicas of {model_of(name)} " + ("have ended" if is_over else
                         f"finish their answers, which takes up to {cluster.DRAIN_SECONDS // 60} minutes"))
    if not found:
        qengine.note(f"no replicas run on the cluster at {address}")
    return 0


def model_of(application: str) -> str:
    return application.removeprefix(PREFIX)


def cpus_for(each: list) -> int:
    """The CPUs that a cluster of this machine alone is said to have, at least one for each replica. Ray counts them
    when it places replicas; each replica may use all processors."""
    return max(usable_processors(), sum(max(own.replicas) for own in each))


def replicated(wanted: Wanted, options):
    """The engine whose replicas are those of a model."""
    from engine.replicas import cluster, files, front
    card, n_gpus = card_of(options.card, cluster.n_gpus())
    if options.card is None:
        qengine.note("a replica gets " + ("one GPU; --card cuda:0,1 gives it two" if n_gpus else
                                          "an emulated card: no node of the cluster has a GPU now"))
    shares = Shares()
    offers = files.offered(files_of(wanted), shares.tell)
    arguments = {"source": str(wanted.model.source), "name": wanted.model.name, "kv": options.kv, "card": card,
                 "arguments": wanted.arguments, "offers": offers}
    wish = cluster.Wish(f"{PREFIX}{options.argument.name if is_several(options) else 'model'}",
                        cluster.Recipe("cli.replicas:make_engine", arguments), *options.replicas, n_gpus=n_gpus,
                        n_slots=options.slots)
    cluster.keep(wish, qengine.note)
    began = time.monotonic()

    def tell(facts):
        if facts["wish"].recipe != wish.recipe:     # it is about to be replaced
            return
        qengine.note(f"a replica of {wanted.model.name} is up on {facts['hostname']} ({facts['node']}) after "
                     f"{time.monotonic() - began:.1f} s: {', '.join(facts['cards'])}")

    link, facts = cluster.link(wish, tell, Waiting(wish, offers, shares).tell)
    return front.engine_of(link, wanted.facts, facts)


def files_of(wanted: Wanted) -> list[str]:
    """The files that a replica reads: those of the model, and then that with its eyes."""
    gguf, eyes = wanted.model.weights.gguf, wanted.arguments.get("mmproj")
    found = [file.path for file in gguf.files] if gguf else []
    return found + ([eyes] if eyes not in (None, "none", "synthetic") else [])


class Shares:
    """Tells what nodes do with files, every tenth of a file, where it takes longer than SHORT."""

    def __init__(self):
        self.told, self.began = {}, time.monotonic()

    def tell(self, node: str, what: str, path: str, share: float):
        about, tenth = (node, what, path), int(share * 10)
        if tenth != self.told.get(about) and time.monotonic() - self.began > SHORT:
            self.told[about] = tenth
            qengine.note(f"{node} {what} {path}: {share:.0%}")


class Waiting:
    """Tells, until a replica is up, what nodes do with files, and once where it takes long for another reason."""

    def __init__(self, wish, offers: list, shares: Shares):
        self.wish, self.offers, self.shares, self.is_told = wish, offers, shares, False
        self.busy = time.monotonic()        # when a node was last busy with a file

    def tell(self):
        from engine.replicas import files
        for about, share in files.under_way(self.offers).items():
            self.shares.tell(*about, share)
            self.busy = time.monotonic()
        if not self.is_told and time.monotonic() - self.busy > LONG:
            self.is_told = True
            qengine.note(self.late())

    def late(self) -> str:
        """The sentence; it names what may hold the cards."""
        from engine.replicas import cluster
        name, wish = model_of(self.wish.application), self.wish
        others = [model_of(other) for other in cluster.applications() if other != wish.application]
        held = f"; {', '.join(others)} may hold some" * bool(others)
        return (f"no replica of {name} is up after {LONG} s: it still loads, or no node has {wish.n_gpus} GPUs and "
                f"{wish.n_cpus} CPUs of Ray's to spare (`ray status` says what there is{held})")


def card_of(card: str | None, n_there: float) -> tuple[str, int]:
    """(the card of a replica by the name that it has for its process, how many of Ray's GPUs that is). A process sees
    only the GPUs that Ray gives it, and numbers them from 0. n_there: GPUs of the cluster. Raises RequestError."""
    if card is None:
        card = "cuda:0" if n_there else "emulated"
    if card.startswith("emulated"):
        return card, 0
    if not re.fullmatch(r"cuda:\d+(,\d+)*", card):
        raise RequestError("card", f"--card {card}: with --ray name as many cards as each replica is to have: cuda:0 "
                                   "for one, cuda:0,1 for two; which they are, Ray decides")
    n = card.count(",") + 1
    return "cuda:" + ",".join(map(str, range(n))), n


def make_engine(source: str, name: str, kv: str | None, card: str, arguments: dict, offers: list) -> "qengine.Engine":
    """The engine of a replica, in its process."""
    from engine.replicas import files
    here = files.taken(offers)
    if arguments.get("mmproj") not in (None, "none", "synthetic"):
        arguments = arguments | {"mmproj": here.pop()}
    model = qengine.open_model(here[0] if here else source)
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, name=name))
    engine = qengine.load(model.keeping(kv) if model.kind == "text" else model, card, progress=False, **arguments)
    freeze()
    return engine
