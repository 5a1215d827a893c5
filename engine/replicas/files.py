"""Model files for nodes that lack them: a node with the front's file at the same path reads that, every other one
fetches the file once, in pieces, from the front's node through Ray's object store, and keeps it.

    Offers ──to the replica, with what it is to make──> taken(): the paths of the same files on this node

A file is told from others by its fingerprint: its size and a digest of SAMPLES stretches of it, which takes
milliseconds for any size. Every piece that is fetched is compared with its own digest, so what has come is what was
read.
"""

import contextlib
import fcntl
import hashlib
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from engine.request import ModelError

PIECE = 16 << 20            # bytes
SAMPLES, SAMPLE = 64, 1 << 16           # stretches of a file that are looked at, and bytes of each
STORE = Path.home() / ".cache" / "qengine" / "files"    # of fetched files, in a folder by the fingerprints of a set
NAMESPACE = "qengine"


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


def fingerprint(path: str) -> str:
    n_bytes = os.path.getsize(path)
    digest = hashlib.sha256(str(n_bytes).encode())
    with open(path, "rb") as file:
        for i in range(SAMPLES):
            file.seek(max(0, n_bytes - SAMPLE) * i // (SAMPLES - 1))
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:32]


class Server:
    """The actor that reads files on the front's node. It stays when the front leaves, since a replica that is started
    later may need them."""

    def __init__(self):
        self.offers: dict[str, Offer] = {}
        self.progress: dict[tuple[str, str], float] = {}        # (node, path) -> share that it has asked for
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
        with self.lock:
            self.progress[node, offer.path] = (index + 1) / offer.n_pieces
        return digest_of(data), data

    def fetching(self) -> dict[tuple[str, str], float]:
        with self.lock:
            return {key: share for key, share in self.progress.items() if share < 1}


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def offered(paths: list[str]) -> list[Offer]:
    """Offers of files of this node, which an actor here now reads for others."""
    here = ray.get_runtime_context().get_node_id()
    name = f"files of {here}"
    server = ray.remote(Server).options(
        name=name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0, max_restarts=-1,
        max_task_retries=3, max_concurrency=4, runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[2])}},
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False)).remote()
    offers = [Offer(os.path.abspath(path), fingerprint(path), os.path.getsize(path), name) for path in paths]
    ray.get(server.add.remote(offers))
    return offers


def fetching(offers: list[Offer]) -> dict[tuple[str, str], float]:
    """Which nodes fetch files now: (node, path) -> share that they have."""
    if not offers:
        return {}
    return ray.get(ray.get_actor(offers[0].server, namespace=NAMESPACE).fetching.remote())


def taken(offers: list[Offer], store: Path = STORE) -> list[str]:
    """The paths of the offered files on this node, which fetches what it lacks. Files that lie beside each other on the
    front's node do so here: the parts of a model must. Raises ModelError."""
    folders: dict[str, list[Offer]] = {}        # of the front's node
    for offer in offers:
        folders.setdefault(os.path.dirname(offer.path), []).append(offer)
    found = {}
    for beside in folders.values():
        found |= zip(beside, taken_together(beside, store), strict=True)
    return [found[offer] for offer in offers]


def taken_together(offers: list[Offer], store: Path) -> list[str]:
    """The paths of files of one folder, in one folder of this node."""
    if all(is_it(offer.path, offer) for offer in offers):
        return [offer.path for offer in offers]
    folder = store / digest_of("".join(sorted(offer.fingerprint for offer in offers)).encode())
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)        # another replica of this node may be fetching them
        for offer in offers:
            if not is_it(kept := folder / os.path.basename(offer.path), offer):
                fetch(offer, kept)
    return [str(folder / os.path.basename(offer.path)) for offer in offers]


def is_it(path: str | Path, offer: Offer) -> bool:
    with contextlib.suppress(OSError):
        return fingerprint(path) == offer.fingerprint
    return False


def fetch(offer: Offer, path: Path):
    server, node = ray.get_actor(offer.server, namespace=NAMESPACE), ray.util.get_node_ip_address()
    begun = path.with_name(path.name + ".part")
    ahead = server.piece.remote(offer.fingerprint, 0, node)
    with open(begun, "wb") as file:
        for index in range(offer.n_pieces):
            coming, ahead = ahead, None
            if index + 1 < offer.n_pieces:      # the next one comes while this one is written
                ahead = server.piece.remote(offer.fingerprint, index + 1, node)
            digest, data = ray.get(coming)
            if digest_of(data) != digest:
                raise ModelError(f"{offer.path}: piece {index} has come damaged from the front's node")
            file.write(data)
    if not is_it(begun, offer):
        raise ModelError(f"{offer.path}: the file on the front's node has changed while it was fetched")
    os.replace(begun, path)
