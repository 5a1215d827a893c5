"""Experts in a file, for machines whose memory cannot hold them all, and the window of host memory that has some.

    file, no name           layer 0, gate and up: expert 0 | 1 | 2 | ... ; layer 0, down: expert 0 | 1 | 2 | ... ; ...
                                       │ read by several threads at once
    window, page-locked     slot 0 | slot 1 | ...           each with all matrices of one expert, of any layer
                                       │ computed with by the host's processor; copied to the card from here

A record is what the file has of an expert's matrix: codes, then scales, each from a multiple of ALIGNMENT on.

The loader fills one matrix of all experts of a layer in memory before it is written, so loading takes that memory.

Nothing is mapped, so a disk that fails or a file that was cut is an exception here (engine/reading.py): whoever needs
the expert hears one sentence. The file has no name; it ends with the process.

Which expert gives way. First those that the card holds by now; then the one with the lowest score, as on the card
(engine/residency.py). The experts that were read last stay: the host learns of their use only when their step has
ended. An expert that is being copied to the card stays until the copy is done.
"""

import itertools
import os
import tempfile
import threading
from concurrent.futures import FIRST_EXCEPTION, wait
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine.reading import Readers, read_into
from engine.residency import LARGEST_GAIN, NOWHERE, Residency
from kernels.card import ALIGNMENT, CardError, show_bytes

READERS = 8                 # threads: an SSD is fast only with several reads under way
SHARE = 1 << 20             # bytes that one of them reads at a time
SLOWEST_DISK = 100e6        # bytes per second of a disk that is still waited for
PATIENCE = 5.0              # and so many seconds more
FRESH = 4                   # 1 / FRESH of the slots, those filled last, give way last


class DiskError(CardError):
    """Experts cannot be written to the disk, or cannot be read from it."""


class Record(NamedTuple):
    """How the arrays of a matrix, codes and scales, lie one behind the other. All in bytes."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, *sizes: int) -> "Record":
        ends = [0, *itertools.accumulate(size + -size % ALIGNMENT for size in sizes)]
        return cls(tuple(ends[:-1]), sizes, ends[-1])

    def parts(self, memory: np.ndarray) -> list[np.ndarray]:
        """The bytes of the arrays in a record, uint8."""
        return [memory[start:start + size] for start, size in zip(self.starts, self.sizes)]


class ExpertFile:
    """A file without a name in a folder, which grows by `append`. Raises DiskError."""

    def __init__(self, folder: Path):
        self.folder, self.nbytes = folder, 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = tempfile.TemporaryFile(dir=folder, buffering=0)
        except OSError as error:
            raise DiskError(f"experts: no file in {folder}: {error.strerror}") from None
        self._threads = Readers(READERS, "experts from the disk")

    def append(self, data: np.ndarray) -> int:
        """Writes the bytes of an array behind all others. Returns where they begin."""
        start, left = self.nbytes, memoryview(data.reshape(-1)).cast("B")
        try:
            os.posix_fallocate(self.file.fileno(), start, data.nbytes)
            while left:
                n = os.pwrite(self.file.fileno(), left, self.nbytes)
                left, self.nbytes = left[n:], self.nbytes + n
        except OSError as error:
            raise DiskError(f"experts: no file of {show_bytes(start + data.nbytes)} in {self.folder}: "
                            f"{error.strerror}") from None
        return start

    def read(self, wanted: list[tuple[int, np.ndarray]]):
        """Fills each array, uint8 and contiguous, with the bytes of the file from where its number says. Whoever gets
        a DiskError must not use the arrays again: threads may still write there."""
        patience = PATIENCE + sum(into.size for _, into in wanted) / SLOWEST_DISK
        jobs = [self._threads.call(read_into, self.file.fileno(), start + at, into[at:at + SHARE])
                for start, into in wanted for at in range(0, into.size, SHARE)]
        done, late = wait(jobs, patience, FIRST_EXCEPTION)
        try:
            for job in done:
                job.result()
        except EOFError:
            why = f"it has become shorter: {os.fstat(self.file.fileno()).st_size} of {self.nbytes} bytes are left"
        except OSError as error:
            why = error.strerror
        else:
            why = late and f"no answer within {patience:.1f} s"
        if why:
            for job in late:
                job.cancel()
            raise DiskError(f"experts cannot be read from their file in {self.folder}: {why}")

    def close(self):
        """Ends the threads, once they have read what they are reading."""
        self._threads.close()


class InFile(NamedTuple):
    """A matrix of all experts of a layer."""

    start: int              # of the records in the file
    record: Record
    slot_start: int         # of the record in a slot of the window
    places: np.ndarray      # uint64 [n_experts + 1, 2]: where an expert lies in the window, or zeros


class Window:
    """Experts of a file in host memory: those that were needed last, of all layers.

    memory: uint8 [slots, bytes of the largest expert]. layers: the matrices of each. resident: whose scores count, and
    which experts the card has. most: experts that one call of `bring` may ask for; memory has at least so many slots.
    One thread calls `bring`, another one the rest.
    """

    def __init__(self, file: ExpertFile, memory: np.ndarray, layers: list[list[InFile]], resident: Residency,
                 most: int):
        self.file, self.memory, self.layers, self.resident, self.most = file, memory, layers, resident, most
        self.slot_of = np.full(resident.slot_of.shape, NOWHERE, np.int32)
        self.owner = np.full((len(memory), 2), NOWHERE, np.int32)       # layer and expert
        self.filled = np.zeros(len(memory), np.int64)                   # how many experts had been read by then
        self.held = np.zeros(len(memory), np.int32)                     # how often
        self.n_read = self.bytes_read = 0
        self._lock = threading.Lock()

    def bring(self, layer: int, experts: np.ndarray):
        """Reads those experts of a layer that are not here. All of them stay until the next call. Raises DiskError."""
        experts = np.unique(experts)
        with self._lock:
            missing = experts[self.slot_of[layer, experts] == NOWHERE]
            slots = self._make_way(missing.size, self.slot_of[layer, np.setdiff1d(experts, missing)])
        wanted = [(matrix.start + int(expert) * matrix.record.nbytes,
                   self.memory[slot, matrix.slot_start:matrix.slot_start + matrix.record.nbytes])
                  for expert, slot in zip(missing, slots) for matrix in self.layers[layer]]
        self.file.read(wanted)
        with self._lock:
            self.n_read += missing.size
            self.bytes_read += sum(into.size for _, into in wanted)
            self.owner[slots, 0], self.owner[slots, 1] = layer, missing
            self.slot_of[layer, missing], self.filled[slots] = slots, self.n_read
            for matrix in self.layers[layer]:
                first = self.memory.ctypes.data + slots * self.memory.shape[1] + matrix.slot_start
                for column, start in enumerate(matrix.record.starts):
                    matrix.places[missing, column] = first + start

    def _make_way(self, n: int, staying: np.ndarray) -> np.ndarray:
        """Empties n slots, and says which. staying: slots that are needed."""
        layer, expert = self.owner.T
        worth = np.where(self.resident.slot_of[layer, expert] == NOWHERE, self.resident.score[layer, expert], -1.0)
        fresh = self.filled > self.n_read - len(self.memory) // FRESH
        worth[fresh] = LARGEST_GAIN ** 2 * self.filled[fresh]           # above every score
        worth[expert == NOWHERE] = -2.0
        worth[staying], worth[self.held > 0] = np.inf, np.inf
        slots = np.argsort(worth)[:n]
        assert len(slots) == n and not np.isinf(worth[slots]).any(), "the window is smaller than what a step needs"
        for layer, expert in self.owner[slots][expert[slots] != NOWHERE]:
            self.slot_of[layer, expert] = NOWHERE
            for matrix in self.layers[layer]:
                matrix.places[expert] = 0
        self.owner[slots] = NOWHERE
        return slots

    def hold(self, layer: int, expert: int) -> int | None:
        """The slot of an expert, which stays until `release`. None: it is not here, or too many are held already."""
        with self._lock:
            slot = int(self.slot_of[layer, expert])
            if slot == NOWHERE or np.count_nonzero(self.held) >= len(self.memory) - self.most:
                return None
            self.held[slot] += 1
            return slot

    def release(self, slot: int):
        """Call it once for each `hold`: then the slot may get another expert."""
        with self._lock:
            self.held[slot] -= 1

    def copy(self, layer: int, expert: int, start: int, into: np.ndarray) -> bool:
        """Fills an array with the bytes of an expert's slot from `start` on. False: it is not here."""
        slot = self.hold(layer, expert)
        if slot is not None:
            into[:] = self.memory[slot, start:start + into.size]
            self.release(slot)
        return slot is not None
