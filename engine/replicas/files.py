"""Model files for nodes that lack them: a node with the front's file at the same path reads that, every other one
fetches the file once, in pieces, from the front's node through Ray's object store, and keeps it (store.py).

    Offers ──to the replica, with what it is to make──> taken(): the paths of the same files on this node

Every piece that is fetched is compared with its own digest, and all of them together with the file's fingerprint; so
what has come is what was read.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from engine.limits import VERSION
from engine.request import ModelError

from .store import PIECE, Store, digest_of, fingerprint, fingerprint_of

NAMESPACE = "qengine"
MOST_SILENT = 30.0          # seconds; a node that says nothing of a file for longer has given it up
LATE_SECONDS = 1.0          # by which a report of progress may come after a later report
STORE = Store()             # of this node


@dataclass(frozen=True)
class Offer:
    """A file on the front's node. server: the name of the actor that reads it there. Two offers of the same file are
    equal on whichever node the front runs, so that a front elsewhere finds the replicas and leaves them as they are."""

    path: str
    fingerprint: str
    n_bytes: int
    server: str = field(compare=False)

    @property
    def n_pieces(self) -> int:
        return -(-self.n_bytes // PIECE)

    @property
    def name(self) -> str:
        return os.path.basename(self.path)


class Server:
    """The actor that reads files on the front's node. It stays when the front leaves, since a replica that is started
    later may need them."""

    def __init__(self):
        self.offers: dict[str, Offer] = {}
        self.told: dict[tuple[str, str, str], tuple] = {}   # (node, what it does, path) -> (share that is done, when)
        self.lock = threading.Lock()

    def add(self, offers: list[Offer]):
        with self.lock:
            self.offers |= {offer.fingerprint: offer for offer in offers}

    def piece(self, name: str, index: int, node: str) -> tuple[str, bytes]:
        """(digest, bytes) of a piece of the file with this fingerprint. Only offered files are read."""
        offer = self.offers[name]
        with open(offer.path, "rb") as file:
            file.seek(index * PIECE)
            data = file.read(PIECE)
        self.tell(node, "fetches", offer.path, (index + 1) / offer.n_pieces)
        return digest_of(data), data

    def tell(self, node: str, what: str, path: str, share: float):
        """Calls may overtake each other: a smaller share that comes soon after a larger one is old."""
        now = time.monotonic()
        with self.lock:
            before, when = self.told.get((node, what, path), (0.0, now))
            if share >= before or now - when > LATE_SECONDS:
                self.told[node, what, path] = share, now

    def under_way(self) -> dict[tuple[str, str, str], float]:
        with self.lock:
            now = time.monotonic()
            self.told = {about: (share, when) for about, (share, when) in self.told.items() if now - when < MOST_SILENT}
            return {about: share for about, (share, _) in self.told.items() if share < 1}


def offered(paths: list[str], tell: Callable = lambda *about: None) -> list[Offer]:
    """Offers of files of this node, which an actor here now reads for others. tell(node, what it does, path, share):
    is called while files are read for their fingerprints."""
    here = ray.get_runtime_context().get_node_id()
    name = f"files of {here}, {VERSION}"        # it stays, and a later version would talk with older code
    server = ray.remote(Server).options(
        name=name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0, max_restarts=-1,
        max_task_retries=3, max_concurrency=4, runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[2])}},
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False)).remote()
    node = ray.util.get_node_ip_address()
    offers = [Offer(os.path.abspath(path), fingerprint(path, lambda share: tell(node, "reads", path, share)),
                    os.path.getsize(path), name) for path in paths]
    ray.get(server.add.remote(offers))
    return offers


def server_of(offer: Offer) -> "ray.actor.ActorHandle":
    return ray.get_actor(offer.server, namespace=NAMESPACE)


def under_way(offers: list[Offer]) -> dict[tuple[str, str, str], float]:
    """What nodes do with files now: (node, "fetches" or "reads", path) -> share that is done."""
    with contextlib.suppress(ValueError):       # its actor is gone: a replica that needs it says so
        return ray.get(server_of(offers[0]).under_way.remote()) if offers else {}
    return {}


def taken(offers: list[Offer], store: Store = STORE) -> list[str]:
    """The paths of the offered files on this node, which fetches what it lacks. Files that lie beside each other on the
    front's node do so here: the parts of a model must. Raises ModelError."""
    folders: dict[str, list[Offer]] = {}        # of the front's node
    for offer in offers:
        folders.setdefault(os.path.dirname(offer.path), []).append(offer)
    found = {}
    for beside in folders.values():
        found |= zip(beside, taken_together(beside, store), strict=True)
    return [found[offer] for offer in offers]


def taken_together(offers: list[Offer], store: Store) -> list[str]:
    """The paths of files of one folder, in one folder of this node."""
    if all(is_it(offer.path, offer) for offer in offers):
        return [offer.path for offer in offers]
    folder, named = store.hold(set_name(offers)), {offer.name: offer for offer in offers}
    store.fill(folder, lambda: [(name, offer.n_bytes) for name, offer in named.items()
                                if not is_it(folder / name, offer)],
               lambda name, path: fetch(named[name], path))
    return [str(folder / offer.name) for offer in offers]


def set_name(offers: list[Offer]) -> str:
    return digest_of("".join(sorted(offer.fingerprint for offer in offers)).encode())


def is_it(path: str | Path, offer: Offer) -> bool:
    """Whether a file of this node is the one that is offered. It is read where it has the same size."""
    with contextlib.suppress(OSError, ModelError):      # there is none, or it changes just now
        return os.path.getsize(path) == offer.n_bytes and fingerprint(path, teller(offer, path)) == offer.fingerprint
    return False


def teller(offer: Offer, path: str | Path) -> Callable:
    """Tells the front's node how far this one is with reading a file, if that node is there."""
    with contextlib.suppress(ValueError):
        server, node = server_of(offer), ray.util.get_node_ip_address()
        return lambda share: server.tell.remote(node, "reads", str(path), share)
    return lambda share: None


def fetch(offer: Offer, path: Path) -> str:
    """Writes an offered file to a path of this node, and returns its fingerprint. Raises ModelError."""
    try:
        return fetched(offer, path)
    except (ValueError, ray.exceptions.RayError) as error:      # there is no such actor, or the call failed
        why = str(getattr(error, "cause", None) or error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{offer.path} cannot be fetched from the front's node: {why[0]}") from None


def fetched(offer: Offer, path: Path) -> str:
    server, node = server_of(offer), ray.util.get_node_ip_address()
    ahead, digests = server.piece.remote(offer.fingerprint, 0, node), []
    with open(path, "r+b") as file:
        for index in range(offer.n_pieces):
            coming, ahead = ahead, None
            if index + 1 < offer.n_pieces:      # the next one comes while this one is written
                ahead = server.piece.remote(offer.fingerprint, index + 1, node)
            digest, data = ray.get(coming)
            if digest_of(data) != digest:
                raise ModelError(f"{offer.path}: piece {index} has come damaged from the front's node")
            digests.append(digest)
            file.write(data)
    if fingerprint_of(os.path.getsize(path), digests) != offer.fingerprint:
        raise ModelError(f"{offer.path}: the file on the front's node has changed while it was fetched")
    return offer.fingerprint
