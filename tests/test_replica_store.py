"""Model files of a node: fingerprints see every byte and read a file once; the store of fetched files is bounded."""

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from engine.replicas import store
from engine.replicas.store import Store, fingerprint
from engine.request import ModelError
from tests.tiny import ROOT

PIECE = 1 << 12


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """Small pieces, and nothing of this machine's own notes."""
    monkeypatch.setattr(store, "PIECE", PIECE)
    monkeypatch.setattr(store, "NOTES", tmp_path / "notes" / "fingerprints.json")
    monkeypatch.setattr(store, "SPARE", 0)


def aged(path, data):
    """A file that was written some time ago."""
    path.write_bytes(data)
    os.utime(path, ns=(time.time_ns(), time.time_ns() - 10**10))
    return path


def note(path, found):
    store.note(path, store.stamp_of(path), found)


def old(monkeypatch):
    """Files count as settled at once."""
    monkeypatch.setattr(store, "SETTLED", -1.0)


# ---- fingerprints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_bytes", [1, PIECE - 1, PIECE, 5 * PIECE + 7])
def test_every_byte_counts(tmp_path, n_bytes):
    data, found = bytearray(os.urandom(n_bytes)), set()
    for at in (None, 0, n_bytes // 2, n_bytes // 3, n_bytes - 1):
        if at is not None:
            data[at] ^= 1
        (tmp_path / "file").write_bytes(data)
        found.add(fingerprint(tmp_path / "file"))
    assert len(found) >= (5 if n_bytes > 3 else 2)


def test_pieces_that_have_come_make_the_same_fingerprint(tmp_path):
    data = os.urandom(3 * PIECE + 1)
    (tmp_path / "file").write_bytes(data)
    pieces = [data[at:at + PIECE] for at in range(0, len(data), PIECE)]
    assert store.fingerprint_of(len(data), map(store.digest_of, pieces)) == fingerprint(tmp_path / "file")


def test_a_file_is_read_once(tmp_path, monkeypatch):
    old(monkeypatch)
    path, shares = aged(tmp_path / "file", os.urandom(3 * PIECE)), []
    first = fingerprint(path, shares.append)
    assert shares == [1 / 3, 2 / 3, 1]
    assert fingerprint(path, shares.append) == first and len(shares) == 3
    store.NOTES.write_text("damaged")
    assert fingerprint(path, shares.append) == first and len(shares) == 6


@pytest.mark.parametrize("how", ["written", "replaced", "written, with its time set back"])
def test_a_file_that_changes_is_read_again(tmp_path, monkeypatch, how):
    old(monkeypatch)
    path = aged(tmp_path / "file", bytes(2 * PIECE))
    before, times = fingerprint(path), os.stat(path)
    time.sleep(0.02)                            # times of a file system have steps of some milliseconds
    if how == "replaced":
        (tmp_path / "other").write_bytes(bytes(2 * PIECE - 1) + b"1")
        os.utime(tmp_path / "other", ns=(times.st_atime_ns, times.st_mtime_ns))
        os.replace(tmp_path / "other", path)
    else:
        path.write_bytes(bytes(2 * PIECE - 1) + b"1")
        if "set back" in how:
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert fingerprint(path) != before


def test_what_has_just_changed_is_not_noted(tmp_path, monkeypatch):
    """Its times may not tell of a further change."""
    monkeypatch.setattr(store, "SETTLED", 3600.0)
    (tmp_path / "file").write_bytes(bytes(PIECE))
    fingerprint(tmp_path / "file")
    assert not store.NOTES.exists()


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    path = aged(tmp_path / "file", bytes(3 * PIECE))
    with pytest.raises(ModelError, match="has changed while it was read"):
        fingerprint(path, lambda share: path.write_bytes(bytes(3 * PIECE + 1)))


def test_a_file_that_is_replaced_before_it_is_noted_is_read_again(tmp_path, monkeypatch):
    """Right after the last look at it."""
    old(monkeypatch)
    path, other = (aged(tmp_path / name, os.urandom(PIECE)) for name in ("file", "other"))
    right = fingerprint(other, notes=tmp_path / "other notes" / "fingerprints.json")
    look, stamps = store.stamp_of, []

    def replaced(looked_at):
        stamps.append(look(looked_at))
        if len(stamps) == 2:
            os.replace(other, path)
        return stamps[-1]
    with monkeypatch.context() as patch:
        patch.setattr(store, "stamp_of", replaced)
        assert fingerprint(path) != right and store.NOTES.exists()
    assert not other.exists() and fingerprint(path) == right


def test_nobody_notes_while_another_one_does(tmp_path, monkeypatch):
    """Otherwise what one has noted in between is lost."""
    read = store.read_notes

    def slowly(notes):
        found = read(notes)
        time.sleep(0.05)
        return found
    monkeypatch.setattr(store, "read_notes", slowly)
    for i in range(4):
        (tmp_path / str(i)).write_bytes(b"1")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: note(tmp_path / str(i), str(i)), range(4)))
    assert {noted for _, noted in read(store.NOTES).values()} == {"0", "1", "2", "3"}


def test_notes_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MOST_NOTES", 3)
    for i in range(5):
        (tmp_path / str(i)).write_bytes(b"1")
        note(tmp_path / str(i), str(i))
    assert [noted for _, noted in store.read_notes(store.NOTES).values()] == ["2", "3", "4"]
    note(tmp_path / "2", "2")
    assert list(json.loads(store.NOTES.read_text())) == [str(tmp_path / name) for name in "342"]


def test_without_a_place_for_notes_all_works(tmp_path, monkeypatch):
    old(monkeypatch)
    monkeypatch.setattr(store, "NOTES", tmp_path / "file" / "notes")        # no folder
    path = aged(tmp_path / "file", b"1")
    assert fingerprint(path) == fingerprint(path)


# ---- fetched files ------------------------------------------------------------------------------------------------


def filled(one, name, n_bytes, hold=False):
    """Has a store fetch a file."""
    folder = one.hold(name)
    one.fill(folder, lambda: [("file", n_bytes)] if not (folder / "file").exists() else [],
             lambda name, path: path.write_bytes(bytes(n_bytes)) and "a fingerprint")
    if not hold:
        one.release()
    return folder


def kept(one):
    return sorted(path.name for path in one.root.iterdir() if path.is_dir())


def used_at(one, name, when):
    os.utime(one.root / name / "used", (when, when))


@pytest.fixture
def small(tmp_path):
    return Store(tmp_path / "store", most_idle=250)


def test_what_is_fetched_is_noted_and_not_fetched_again(small):
    folder = filled(small, "a", 100)
    assert (folder / "file").stat().st_size == 100 and fingerprint(folder / "file") == "a fingerprint"
    small.hold("a")
    small.fill(folder, lambda: [], None)


def test_the_least_recently_used_goes_first(small):
    for age, name in enumerate("abc"):
        filled(small, name, 100)
        used_at(small, name, 1000 - age)
    filled(small, "d", 100)                     # c, b and a are 300 bytes, and 250 may stay idle
    assert kept(small) == ["a", "b", "d"]


def test_a_set_in_use_stays_and_counts_as_just_used(small, tmp_path):
    user = Store(small.root, most_idle=0)
    filled(user, "a", 1000, hold=True)
    used_at(small, "a", 1000)
    filled(small, "b", 100)
    filled(Store(small.root, most_idle=0), "c", 100)
    assert kept(small) == ["a", "c"] and (small.root / "a" / "used").stat().st_mtime > time.time() - 60
    user.release()
    filled(Store(small.root, most_idle=0), "d", 100)
    assert kept(small) == ["d"]


def test_a_process_that_is_killed_uses_nothing(small):
    code = ("import sys, time; from pathlib import Path; from engine.replicas.store import Store\n"
            "one = Store(Path(sys.argv[1])); one.hold('a'); print('held', flush=True); time.sleep(600)")
    with subprocess.Popen([sys.executable, "-c", code, str(small.root)], cwd=ROOT, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        Store(small.root, most_idle=0).take_room({})
        (small.root / "a" / "file").write_bytes(bytes(10))
        assert kept(small) == ["a"]
        other.kill()
        other.wait(60)
        Store(small.root, most_idle=0).take_room({})
    assert kept(small) == []


def disk(monkeypatch, one, n_bytes):
    """A disk of so many bytes."""
    def usage(root):
        taken = sum(file.stat().st_size for file in one.root.rglob("file*"))
        return SimpleNamespace(free=n_bytes - taken)
    monkeypatch.setattr(store.shutil, "disk_usage", usage)


def test_room_is_made_of_what_is_idle_and_no_more(small, monkeypatch):
    disk(monkeypatch, small, 300)
    for age, name in enumerate("ab"):
        filled(small, name, 100)
        used_at(small, name, 1000 + age)
    filled(small, "c", 200)
    assert kept(small) == ["b", "c"]


def test_where_there_is_no_room_there_is_a_sentence(small, monkeypatch):
    disk(monkeypatch, small, 300)
    filled(small, "a", 200, hold=True)
    with pytest.raises(ModelError, match=r"model files of 0.0 GB have no room in .*store, whose disk has") as error:
        filled(Store(small.root), "b", 101)
    assert "\n" not in str(error.value) and not (small.root / "b" / "file").exists()
    monkeypatch.setattr(store, "SPARE", 100)
    with pytest.raises(ModelError, match="no room"):
        filled(Store(small.root), "b", 1)


def test_room_is_taken_before_the_work(small, monkeypatch):
    """So a disk that others fill meanwhile is seen at once, and leaves nothing."""
    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(store.os, "posix_fallocate", full)
    with pytest.raises(ModelError, match="fetched files cannot be kept in .*: No space left on device"):
        filled(small, "a", 100)
    assert sorted(path.name for path in (small.root / "a").iterdir()) == ["lock", "used"]


def test_broken_fetches_leave_nothing(small):
    def broken(name, path):
        path.write_bytes(b"half")
        raise RuntimeError("the front has gone")

    folder = small.hold("a")
    with pytest.raises(RuntimeError):
        small.fill(folder, lambda: [("file", 100)], broken)
    assert not list(folder.glob("*.part"))
    (folder / "file.part").write_bytes(bytes(50))       # as a process leaves it that is killed
    small.release()
    filled(small, "b", 100)
    assert not list(small.root.rglob("*.part")) and "a" in kept(small)


def test_a_removal_that_was_broken_off_is_finished(small):
    filled(small, "a", 10)
    (small.root / "a").rename(small.root / ".gone-a")
    filled(small, "b", 10)
    assert kept(small) == ["b"]


def test_who_comes_while_a_set_is_removed_gets_a_new_one(small):
    """The lock that it waited for is that of a file which is there no more."""
    filled(small, "a", 10)
    blocking = store.locked(small.root / "a" / "used", fcntl.LOCK_EX)
    came = []
    waiter = threading.Thread(target=lambda: came.append(small.hold("a")))
    waiter.start()
    time.sleep(0.1)                             # it waits for the lock, or will find the folder gone
    store.remove(small.root / "a")
    blocking.close()
    waiter.join(60)
    assert came == [small.root / "a"] and os.listdir(came[0]) == ["used"]
    Store(small.root, most_idle=0).take_room({})
    assert kept(small) == ["a"]


def test_only_one_process_fetches(small):
    """The other one waits, and then lacks nothing."""
    began = []

    def fetch(name, path):
        began.append(name)
        if len(began) == 1:
            other.start()
            time.sleep(0.2)                     # in which the other one would begin
        path.write_bytes(bytes(100))
        return "a fingerprint"

    def take():
        one = Store(small.root)
        folder = one.hold("a")
        one.fill(folder, lambda: [] if (folder / "file").exists() else [("file", 100)], fetch)

    other = threading.Thread(target=take)
    take()
    other.join(60)
    assert began == ["file"] and not other.is_alive()


def test_what_a_killed_process_left_of_a_fetch_goes_before_the_next_one(small, monkeypatch):
    """It would take the room of that."""
    disk(monkeypatch, small, 300)
    folder = small.hold("a")
    (folder / "file 1.part").write_bytes(bytes(250))
    filled(Store(small.root), "a", 100)
    assert sorted(os.listdir(folder)) == ["file", "lock", "used"]


def test_a_fetched_file_that_is_replaced_before_it_is_noted_is_read_again(small, tmp_path, monkeypatch):
    other = aged(tmp_path / "other", bytes(100))
    monkeypatch.setattr(store, "sync_folder", lambda folder: os.replace(other, folder / "file"))
    folder = filled(small, "a", 100)
    assert not other.exists() and fingerprint(folder / "file") != "a fingerprint"


def test_a_fetched_file_is_on_the_disk_before_it_is_noted(small, monkeypatch):
    """Its bytes first, then its name, then the note: a loss of power in between leaves nothing that counts as whole."""
    done, sync, name, write = [], os.fsync, os.replace, store.note

    def synced(opened):
        path = os.readlink(f"/proc/self/fd/{opened}")
        done.append(("synced", os.path.basename(path), os.path.isdir(path) or os.path.getsize(path)))
        sync(opened)

    def named(start, end):
        done.append(("named", os.path.basename(end)))
        name(start, end)

    monkeypatch.setattr(store.os, "fsync", synced)
    monkeypatch.setattr(store.os, "replace", named)
    monkeypatch.setattr(store, "note", lambda path, *_: done.append(("noted", path.name)))
    filled(small, "a", 100)
    assert done == [("synced", "file.part", 100), ("named", "file"), ("synced", "a", True), ("noted", "file")]


def test_two_that_make_room_do_not_meet(small, monkeypatch):
    """Neither takes the other's look at a set for use of it, nor finds that it has gone."""
    for name in "abcd":
        filled(small, name, 10)
        used_at(small, name, 1000)
    looked, look = [], Store._idle

    def slowly(self, folder, stack):
        looked.append((threading.get_ident(), folder.name))
        found = look(self, folder, stack)
        time.sleep(0.02)
        return found
    monkeypatch.setattr(Store, "_idle", slowly)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: Store(small.root).take_room({}), range(2)))
    assert len(looked) == 8 and {(small.root / name / "used").stat().st_mtime for name in "abcd"} == {1000}


def test_room_that_one_has_is_promised_to_no_other(small, monkeypatch):
    """Not even that of files which it has not begun."""
    disk(monkeypatch, small, 300)
    monkeypatch.setattr(store, "SPARE", 50)

    def fetch(name, path):
        with pytest.raises(ModelError, match="no room"):
            filled(Store(small.root), "b", 60)
        return filled(Store(small.root), "c", 50) and "a fingerprint"

    small.fill(small.hold("a"), lambda: [("file 1", 100), ("file 2", 100)], fetch)


@pytest.mark.parametrize("name", ["used", "lock", "model.part"])
def test_no_fetched_file_takes_the_place_of_a_lock(small, name):
    with pytest.raises(ModelError, match=f"cannot be named {name}"):
        small.fill(small.hold("a"), lambda: [(name, 10)], None)


def test_a_folder_that_is_a_link_is_left_alone(small, tmp_path):
    """Somebody has put it there, and what it leads to is theirs."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_bytes(b"1")
    filled(small, "a", 10)
    (small.root / "link").symlink_to(tmp_path / "theirs")
    Store(small.root, most_idle=0).take_room({})
    assert kept(small) == ["link"] and os.listdir(tmp_path / "theirs") == ["file"]


def test_a_cache_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").write_bytes(b"1")
    with pytest.raises(ModelError, match=r"^fetched files cannot be kept in .*file/files: Not a directory$"):
        Store(tmp_path / "file" / "files").hold("a")
