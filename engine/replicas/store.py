"""Model files of a node: how a file is recognised, and where fetched files are kept.

A file is told from others by its fingerprint, a digest of all of it. It is computed from the digests of pieces, so
that a file that comes in pieces has been read when it is there. Reading 28 GB takes a while; so fingerprints are kept
in NOTES, each with the size, the times and the inode of its file. A file is read again only where one of these differs.

    root/lock                       locked by the process that makes room
    root/<name of a set>/used       locked as long as a process uses the files; its time says when it was last seen so
                         lock       locked by the process that fetches files
                         <file>     ...
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.request import ModelError

PIECE = 16 << 20            # bytes
READERS = 4                 # threads that read a file for its fingerprint, a piece each
CACHE = Path.home() / ".cache" / "qengine"
NOTES, MOST_NOTES = CACHE / "fingerprints.json", 256
SETTLED = 2.0               # seconds since a file changed; before, its times need not tell of another change
ROOT = CACHE / "files"
MOST_IDLE = 64 << 30        # bytes of fetched files that no process uses
SPARE = 1 << 30             # bytes that a disk has left when all is fetched
USED, LOCK = "used", "lock"
PART = ".part"              # ends the name of a file that is being fetched
GONE = ".gone"              # begins the name of a folder that is being removed


# ---- fingerprints -------------------------------------------------------------------------------------------------


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def fingerprint_of(n_bytes: int, digests: Iterable[str]) -> str:
    """Of a file whose pieces have these digests."""
    return digest_of(f"{n_bytes} {' '.join(digests)}".encode())


def fingerprint(path: str | Path, tell: Callable = lambda share: None, notes: Path | None = None) -> str:
    """Of a file, which is read unless that is noted. tell(share): is called after each piece. notes: by default NOTES.
    Raises OSError; ModelError for a file that changes meanwhile."""
    path, notes = os.path.abspath(path), notes or NOTES
    before, began = stamp_of(path), time.time()
    if (noted := read_notes(notes).get(path)) and noted[0] == before:
        return noted[1]
    found = fingerprint_of(before[0], digests_of(path, before[0], tell))
    if stamp_of(path) != before:
        raise ModelError(f"{path} has changed while it was read")
    if began - max(before[1:3]) / 1e9 > SETTLED:
        note(path, before, found, notes)
    return found


def digests_of(path: str, n_bytes: int, tell: Callable) -> Iterable[str]:
    starts = range(0, n_bytes, PIECE)
    with open(path, "rb") as file, ThreadPoolExecutor(READERS) as pool:
        for n, digest in enumerate(pool.map(lambda at: digest_of(os.pread(file.fileno(), PIECE, at)), starts), start=1):
            yield digest
            tell(n / len(starts))


def stamp_of(path: str | Path | int) -> list[int]:
    """What changes with a file: [bytes, ns of its last change, ns of its inode's, inode, device]. path: or a descriptor
    of the open file."""
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]


def read_notes(notes: Path) -> dict[str, tuple[list, str]]:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return {path: (stamp, found) for path, (stamp, found) in json.loads(notes.read_text()).items()}
    return {}                                   # there are none, or they are damaged: files are read again


def note(path: str | Path, stamp: list[int], found: str, notes: Path | None = None):
    """Notes the fingerprint of the file that had this stamp, and drops the oldest one where there are many. What lies
    at the path by now may be another file."""
    notes = notes or NOTES
    with contextlib.suppress(OSError):          # without notes all works, only slower
        notes.parent.mkdir(parents=True, exist_ok=True)
        with locked(notes.with_suffix(".lock"), fcntl.LOCK_EX):
            known = read_notes(notes)
            known.pop(str(path), None)
            known[str(path)] = stamp, found
            begun = notes.with_suffix(PART)
            begun.write_text(json.dumps(dict(list(known.items())[-MOST_NOTES:])))
            os.replace(begun, notes)


# ---- fetched files ------------------------------------------------------------------------------------------------


def locked(path: Path, how: int):
    """An open file with this lock of flock's, which lasts until it is closed, never one that was removed meanwhile.
    Raises BlockingIOError where `how` has LOCK_NB."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            file = stack.enter_context(open(path, "a"))
            fcntl.flock(file, how)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                stack.pop_all()
                return file


@contextlib.contextmanager
def in_a_sentence(what: str):
    """Raises ModelError, "what: why", where the system refuses something."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"{what}: {error.strerror or error}") from None


class Store:
    """The files that a node has fetched. most_idle: bytes of them that are kept though no process uses them."""

    def __init__(self, root: Path | None = None, most_idle: int | None = None):
        self.root, self.most_idle = root or ROOT, MOST_IDLE if most_idle is None else most_idle
        self.held = []                          # open files, whose locks end with this process or by `release`

    def hold(self, name: str) -> Path:
        """The folder of a set of files, which nobody removes now. Raises ModelError."""
        with in_a_sentence(f"fetched files cannot be kept in {self.root}"):
            used = locked(self.root / name / USED, fcntl.LOCK_SH)
            self.held.append(used)
            os.utime(used.fileno())
        return self.root / name

    def release(self):
        while self.held:
            self.held.pop().close()

    def fill(self, folder: Path, lacking: Callable, fetch: Callable):
        """Fetches what a folder that is held lacks, as one process of all. lacking(): [(file name, bytes)]. fetch(file
        name, path): writes into the file that is there, and returns its fingerprint. Raises ModelError."""
        with in_a_sentence(f"fetched files cannot be kept in {folder}"), locked(folder / LOCK, fcntl.LOCK_EX):
            drop_parts(folder)
            files = dict(lacking())
            if own := [name for name in files if name in (USED, LOCK) or name.endswith(PART)]:
                raise ModelError(f"a fetched file cannot be named {own[0]}: files beside it have that name")
            try:
                self.take_room({folder / (name + PART): n_bytes for name, n_bytes in files.items()})
                for name in files:
                    keep(folder, name, fetch)
            finally:
                drop_parts(folder)

    def take_room(self, sizes: dict[Path, int]):
        """Makes files of so many bytes. Before, it removes sets that no process uses, the least recently used first: as
        long as they are more than most_idle, and until the files have room. Only one process does so at a time:
        otherwise two could promise the same room, and each would mistake the other's look at a set for use of the set.
        Raises ModelError, OSError."""
        with locked(self.root / LOCK, fcntl.LOCK_EX):
            self._make_room(sum(sizes.values()))
            for path, n_bytes in sizes.items():
                with open(path, "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, n_bytes)

    def _make_room(self, n_bytes: int):
        with contextlib.ExitStack() as stack:
            folders = [path for path in self.root.iterdir() if path.is_dir() and not path.is_symlink()]
            idle = sorted(filter(None, [self._idle(folder, stack) for folder in folders]))
            while idle and (sum(size for _, size, _ in idle) > self.most_idle or self._room() < n_bytes):
                *_, folder = idle.pop(0)
                remove(folder)
        if n_bytes and (room := self._room()) < n_bytes:
            raise ModelError(f"model files of {n_bytes / 1e9:.1f} GB have no room in {self.root}, whose disk has "
                             f"{max(room, 0) / 1e9:.1f} GB left besides {SPARE / 1e9:.1f} GB that are kept free")

    def _room(self) -> int:
        return shutil.disk_usage(self.root).free - SPARE

    def _idle(self, folder: Path, stack: contextlib.ExitStack) -> tuple[float, int, Path] | None:
        """(when it was last used, bytes, folder) of a set that no process uses, nor can use before `stack` ends; its
        broken pieces are removed. None for others."""
        if folder.name.startswith(GONE):        # the process that removed it was killed
            remove(folder)
            return None
        try:
            stack.enter_context(locked(folder / USED, fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            os.utime(folder / USED)             # it is in use
            return None
        drop_parts(folder)
        sizes = [file.stat().st_size for file in folder.iterdir()]
        return (folder / USED).stat().st_mtime, sum(sizes), folder


def keep(folder: Path, name: str, fetch: Callable):
    """Fetches a file whose room is taken, and notes its fingerprint. All of it is on the disk before that: after a loss
    of power, a file that has its size and its note, and zeros in place of data, would count as whole."""
    begun = folder / (name + PART)
    with open(begun, "rb") as file:
        found = fetch(name, begun)
        os.fsync(file.fileno())
        os.replace(begun, folder / name)
        sync_folder(folder)
        note(folder / name, stamp_of(file.fileno()), found)


def sync_folder(folder: Path):
    """Has the names of its files on the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def drop_parts(folder: Path):
    """Removes what interrupted fetches have left. Only the process that may fetch calls this."""
    for part in folder.glob("*" + PART):
        part.unlink(missing_ok=True)


def remove(folder: Path):
    """Removes a folder. It has another name before, so that whoever comes meanwhile makes a new one."""
    gone = folder
    if not folder.name.startswith(GONE):
        gone = folder.with_name(f"{GONE}-{folder.name}")
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)
