"""The file of experts and the window of host memory: what is where, and faults."""

import errno
import os
import threading

import numpy as np
import pytest

from engine import expert_file
from engine.expert_file import SHARE, DiskError, ExpertFile, InFile, Record, Window
from engine.residency import NOWHERE, Residency
from kernels.card import ALIGNMENT

N_LAYERS, N_EXPERTS, SIZES = 3, 12, ((300, 40), (700,))         # bytes of codes and scales of each matrix of an expert


@pytest.fixture
def file(tmp_path):
    made = ExpertFile(tmp_path)
    yield made
    made.close()


class Filled:
    """A window of a file of random bytes."""

    def __init__(self, file, n_slots, most=4):
        rng, self.bytes, layers = np.random.default_rng(0), {}, []
        records = [Record.of(*sizes) for sizes in SIZES]
        starts = np.cumsum([0, *(record.nbytes for record in records)])
        for layer in range(N_LAYERS):
            layers.append([])
            for record, slot_start in zip(records, starts):
                values = rng.integers(0, 256, (N_EXPERTS, record.nbytes), np.uint8)
                self.bytes[layer, int(slot_start)] = values
                layers[-1].append(InFile(file.append(values), record, int(slot_start),
                                         np.zeros((N_EXPERTS + 1, 2), np.uint64)))
        self.resident = Residency(N_LAYERS, N_EXPERTS, 0)
        self.window = Window(file, np.zeros((n_slots, starts[-1]), np.uint8), layers, self.resident, most)

    def check(self):
        """Each expert lies where the window says, and nobody else does. Returns those that are here, of each layer."""
        window = self.window
        for layer, matrices in enumerate(window.layers):
            for matrix in matrices:
                for expert, slot in enumerate(window.slot_of[layer]):
                    if slot == NOWHERE:
                        assert not matrix.places[expert].any()
                        continue
                    assert tuple(window.owner[slot]) == (layer, expert)
                    at = window.memory[slot, matrix.slot_start:]
                    np.testing.assert_array_equal(at[:matrix.record.nbytes],
                                                  self.bytes[layer, matrix.slot_start][expert])
                    starts = [at.ctypes.data + start for start in matrix.record.starts]
                    assert matrix.places[expert].tolist() == starts + [0] * (2 - len(starts))
                assert not matrix.places[N_EXPERTS].any()
        taken = window.slot_of[window.slot_of != NOWHERE]
        assert np.unique(taken).size == taken.size == (window.owner[:, 0] != NOWHERE).sum()
        return [set(np.flatnonzero(slots != NOWHERE)) for slots in window.slot_of]


@pytest.mark.parametrize("n_slots", [4, 5, 9, N_LAYERS * N_EXPERTS])
def test_whatever_is_asked_for_is_there(file, n_slots):
    rng, filled = np.random.default_rng(n_slots), Filled(file, n_slots)
    window, n_held = filled.window, 0
    for _ in range(200):
        layer, chosen = int(rng.integers(N_LAYERS)), rng.integers(0, N_EXPERTS, rng.integers(1, 5))
        filled.resident.use(np.tile(chosen, (N_LAYERS, 1)))
        held = window.hold(layer, int(chosen[0]))
        owner = None if held is None else tuple(window.owner[held])
        window.bring(layer, chosen)
        assert set(chosen) <= filled.check()[layer]
        if held is not None:
            assert tuple(window.owner[held]) == owner
            window.release(held)
            n_held += 1
    assert (n_held > 0) == (n_slots > 4)        # a window without a slot to spare can hold none
    wanted = sum(record.nbytes for record in map(lambda sizes: Record.of(*sizes), SIZES))
    assert window.bytes_read == window.n_read * wanted
    assert (window.n_read == N_LAYERS * N_EXPERTS) == (n_slots == N_LAYERS * N_EXPERTS)


def test_what_the_card_has_gives_way_first_then_the_lowest_score(file):
    filled = Filled(file, 8, most=2)
    window, resident = filled.window, filled.resident
    for expert in range(8):
        window.bring(0, np.array([expert]))
        resident.score[0, expert] = [5, 9, 1, 7, 3, 8, 0, 0][expert]
    resident.slot_of[0, 1], resident.score[1] = 0, 100                  # expert 1 is on the card
    for gone in 1, 6, 7, 2, 4, 0, 3:                                    # at first, 6 and 7 were read last
        before = filled.check()[0]
        window.bring(1, np.array([gone]))
        assert before - filled.check()[0] == {gone}


def test_a_slot_that_is_held_stays(file):
    filled = Filled(file, 6)
    window = filled.window
    window.bring(0, np.array([0, 1, 2, 3]))
    held = [window.hold(0, 0), window.hold(0, 1), window.hold(0, 2)]
    assert held[2] is None and None not in held[:2] and window.hold(0, 7) is None
    for layer in (1, 2) * 3:
        window.bring(layer, np.array([4, 5, 6, 7]))
        assert {0, 1} <= filled.check()[0]
    window.release(held[0])
    for layer in (1, 2) * 3:
        window.bring(layer, np.array([4, 5, 6, 7]))
    assert filled.check()[0] == {1}
    assert window.hold(0, 1) == held[1]                     # twice
    window.release(held[1])
    window.bring(1, np.array([8, 9, 10, 11]))
    window.bring(2, np.array([8, 9, 10, 11]))
    assert filled.check()[0] == {1}


def test_copies_of_what_is_here(file):
    filled = Filled(file, 6)
    filled.window.bring(2, np.array([3, 5]))
    for (layer, start), values in filled.bytes.items():
        for expert in range(N_EXPERTS):
            found = np.zeros(values.shape[1], np.uint8)
            is_here = filled.window.copy(layer, expert, start, found)
            assert is_here == (layer == 2 and expert in (3, 5)) == found.any()
            np.testing.assert_array_equal(found, values[expert] if is_here else 0)
    assert not filled.window.held.any()


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_reads_that_fail(file, monkeypatch, code):
    """Nothing that was not read counts as here. Once the disk is well, the same is read."""
    filled, preadv = Filled(file, 4), os.preadv

    def fail(*_):
        raise OSError(code, os.strerror(code))

    filled.window.bring(0, np.array([1, 2, 3, 4]))
    monkeypatch.setattr(os, "preadv", fail)
    filled.window.bring(0, np.array([1, 2]))                            # these are here
    with pytest.raises(DiskError, match=f"cannot be read from their file in .*: {os.strerror(code)}"):
        filled.window.bring(0, np.array([1, 2, 5, 6]))
    assert filled.check()[0] == {1, 2}
    monkeypatch.setattr(os, "preadv", preadv)
    filled.window.bring(0, np.array([1, 2, 5, 6]))
    assert filled.check()[0] == {1, 2, 5, 6}


def test_a_file_that_is_cut(file):
    filled = Filled(file, 4)
    os.ftruncate(file.file.fileno(), filled.window.layers[1][0].start + 1)
    filled.window.bring(0, np.array([3, 11]))
    filled.check()
    with pytest.raises(DiskError, match=rf"it has become shorter: \d+ of {file.nbytes} bytes are left"):
        filled.window.bring(1, np.array([0]))


def test_reads_of_many_pieces_and_short_reads(file, monkeypatch):
    """A system may read less than it was asked for."""
    data, preadv = np.random.default_rng(0).integers(0, 256, 3 * SHARE + 77, np.uint8), os.preadv
    assert [file.append(data[:100]), file.append(data[100:])] == [0, 100] and file.nbytes == data.size
    monkeypatch.setattr(os, "preadv", lambda file, into, at: preadv(file, [into[0][:100_001]], at))
    found = [np.zeros(size, np.uint8) for size in (data.size - 5, 1, SHARE)]
    file.read(list(zip((5, data.size - 1, 17), found)))
    for start, each in zip((5, data.size - 1, 17), found):
        np.testing.assert_array_equal(each, data[start:start + each.size])


def test_a_disk_that_does_not_answer(file, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(expert_file, "PATIENCE", 0.1)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "experts from the disk")
    monkeypatch.setattr(os, "preadv", lambda *_: gate.wait(30) and 0)
    file.append(np.zeros(100, np.uint8))
    with pytest.raises(DiskError, match="no answer within 0.1 s"):
        file.read([(0, np.zeros(100, np.uint8))] * 20)
    gate.set()


def test_a_disk_without_room(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = ExpertFile(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(DiskError, match="no file of 100 bytes in .*: No space left on device"):
        file.append(np.zeros(100, np.uint8))
    (tmp_path / "a file").touch()
    with pytest.raises(DiskError, match="experts: no file in .*a file: "):
        ExpertFile(tmp_path / "a file")


def test_records_are_aligned():
    record = Record.of(300, 40)
    assert record.starts == (0, 2 * ALIGNMENT) and record.nbytes == 3 * ALIGNMENT
    parts = record.parts(np.arange(record.nbytes).astype(np.uint8))
    assert [part.size for part in parts] == [300, 40] and parts[1][0] == 0
