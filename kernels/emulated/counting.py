"""Counters: what each launch did, by pipe, and the traffic of its memory accesses.

    with card.counting() as log:                         # of an EmulatedCard
        ...                                              # launches and replays
    print(table(log, CARDS))                             # estimated times: kernels/emulated/cards.py

A kernel is translated a second time, with code that counts. That code adds one to the counter of a basic block
whenever a warp runs the block, and calls `count_access` with the addresses of every access. How many instructions of
which pipe a block has is known from its translation. The parser puts a branch around a predicated instruction; that
branch does not count, and the instruction does not count when no lane runs it. A called function is part of its
caller.
"""

import contextlib
import functools
import re
import threading
from collections import Counter
from dataclasses import dataclass

import llvmlite.binding as llvm
import numpy as np
from numba import cfunc, njit

from . import native
from .emit import WARP
from .estimate import SECTOR, Counts, estimate, multiply_adds, pipe_of, registers_used
from .watching import OBSERVER, READ, SHARED, WRITE, Watch, Watching, execute, find_row

# The arrays of @watch.
#   LANES        the addresses of the lanes, and room to work
#   TOTALS       sums, then the counters of blocks
#   ALLOCATIONS  (start, end, first bit in TOUCHED) of each allocation
#   TOUCHED      a bit for each sector of the allocations: whether the launch touched it
LANES, TOTALS, ALLOCATIONS, TOUCHED = range(4)
# Places in TOTALS: sums under the names of Counts' fields, then two numbers that count_access must know.
SUMS = ("lane_dp4a", "read_sectors", "written_sectors", "distinct_sectors", "read_bytes", "written_bytes",
        "shared_passes", "shared_replays")
(_READ_SECTORS, _WRITTEN_SECTORS, _DISTINCT, _READ_BYTES, _WRITTEN_BYTES, _PASSES,
 _REPLAYS) = range(1, len(SUMS))
SHARED_BYTES, N_ALLOCATIONS, N_TOTALS = len(SUMS), len(SUMS) + 1, len(SUMS) + 2
BANKS = 32


# ---- the code that counts ----------------------------------------------------------------------------------

class Counting(Watching):
    """Adds block counters to the watching of accesses. Its notes: for each block ((opcode, instructions), ...)."""

    observer = "qengine_count_access"

    def notes(self):
        return tuple(tuple(Counter(self._opcodes(block)).items()) for block in self.flow.blocks)

    def _opcodes(self, block):
        for instr in block.instrs + ([block.end] if block.end else []):
            if instr.name != "bra" or re.search(r"\bbra\b", instr.text):   # no branch that the parser put in
                yield ".".join((instr.name, *instr.mods))

    def note_access(self, instr, place, size):
        if "local" not in instr.mods:
            super().note_access(instr, place, size)

    def _terminate(self, block):
        """Counts the block. The mask is still the one with which the block ran."""
        self._add(N_TOTALS + block.index, "1")
        n_dp4a = sum(instr.name == "dp4a" for instr in block.instrs)
        if n_dp4a:
            lanes = self.call("llvm.ctpop.i32", "i32", ("i32", self.mask or "-1"))
            lanes = self.op("mul", "i64", 1, self.resize("i32", "i64", 1, lanes), str(n_dp4a))
            self._add(SUMS.index("lane_dp4a"), lanes)
        super()._terminate(block)

    def _add(self, place, value):
        counter = self.let(f"getelementptr i64, ptr {self.watched(TOTALS)}, i64 {place}")
        count = self.op("add", "i64", 1, self.let(f"load i64, ptr {counter}"), value)
        self.do(f"store i64 {count}, ptr {counter}")


@njit
def bank_passes(lanes, first, n, size):
    """Passes over the banks that accesses of `size` bytes at lanes[first : first + n] take: as many as the most
    different words in one bank."""
    words, n_words = WARP, 0                            # words found so far lie behind the lanes, as (word, rank)
    most = 0
    for i in range(first, first + n):
        for word in range(lanes[i] // 4, (lanes[i] + size - 1) // 4 + 1):
            rank, known = 1, False
            for j in range(n_words):
                other = lanes[words + 2 * j]
                if other == word:
                    known = True
                    break
                if other % BANKS == word % BANKS:
                    rank = max(rank, lanes[words + 2 * j + 1] + 1)
            if not known:
                lanes[words + 2 * n_words], lanes[words + 2 * n_words + 1] = word, rank
                n_words += 1
                most = max(most, rank)
    return most


@njit
def distinct_sectors(lanes, n, size):
    """Replaces the addresses lanes[:n] by the numbers of the different sectors that they touch. Returns how many.

    An aligned access lies in one sector."""
    found = 0
    for i in range(n):
        sector, known = lanes[i] // SECTOR, False
        for j in range(found - 1, -1, -1):
            if lanes[j] == sector:
                known = True
                break
        if not known:
            lanes[found] = sector
            found += 1
    return found


@njit
def touch(table, totals, bits, sectors, n):
    """Counts those of sectors[:n] that the launch touches for the first time. Constants of a kernel's code are not in
    the table of allocations and are not counted."""
    row = 0
    for i in range(n):
        address = sectors[i] * SECTOR
        if not table[row] <= address < table[row + 1]:
            found = find_row(table, totals[N_ALLOCATIONS], address)
            if found < 0:
                continue
            row = found
        bit = table[row + 2] + (address - table[row]) // SECTOR
        if not bits[bit >> 6] >> (bit & 63) & 1:
            bits[bit >> 6] |= 1 << (bit & 63)
            totals[_DISTINCT] += 1


@cfunc(OBSERVER, cache=True)
def count_access(watch, access, size, kind, mask, shared):
    """Adds one warp instruction's traffic to TOTALS."""
    lanes, totals = watch[LANES], watch[TOTALS]
    n = 0                                                # the addresses of active lanes move to the front
    for lane in range(WARP):
        if mask >> lane & 1:
            lanes[n] = lanes[lane]
            n += 1
    if kind & SHARED or 0 <= lanes[0] - shared < totals[SHARED_BYTES]:
        per_pass = max(WARP * 4 // max(size, 4), 1)      # lanes that 128 bytes serve, all banks at once
        lane, before = 0, 0
        while lane < WARP:
            here = 0
            for i in range(lane, lane + per_pass):
                here += mask >> i & 1
            if here:
                passes = bank_passes(lanes, before, here, size)
                totals[_PASSES] += passes
                totals[_REPLAYS] += passes - 1
            before += here
            lane += per_pass
        return 0
    sectors = distinct_sectors(lanes, n, size)
    if kind & READ:
        totals[_READ_SECTORS] += sectors
        totals[_READ_BYTES] += n * size
    if kind & WRITE:
        totals[_WRITTEN_SECTORS] += sectors
        totals[_WRITTEN_BYTES] += n * size
    touch(watch[ALLOCATIONS], totals, watch[TOUCHED], lanes, sectors)
    return 0


llvm.add_symbol(Counting.observer, count_access.address)


# ---- running it --------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Counted:
    """One launch. kernel: its name; shared_bytes: per block; ptx: the text of the kernel."""
    kernel: str
    grid: tuple
    block: tuple
    counts: Counts
    shared_bytes: int
    ptx: str

    def estimate(self, card):
        """The Estimate for a CardModel."""
        registers = _registers(self.ptx, card.cc)
        return estimate(self.counts, self.grid, self.block, registers, self.shared_bytes, card)


_lock = threading.Lock()                                 # one launch at a time may use a kernel's @watch


def code_of(launch):
    """The counting code of a native.Launch's kernel. The first call compiles it, which may take seconds."""
    return launch.code.kernel.translated_by(Counting).code(launch.code.facts.block)


def run(launch, allocations):
    """Executes a native.Launch and returns its Counted. allocations: those of the card, start -> (bytes, name)."""
    code = code_of(launch)
    totals = np.zeros(N_TOTALS + len(code.facts.notes), np.int64)
    rows = [(start, start + nbytes) for start, (nbytes, _) in sorted(allocations.items())] or [(0, 0)]
    starts = np.cumsum([0] + [(end - start) // SECTOR for start, end in rows])
    totals[SHARED_BYTES], totals[N_ALLOCATIONS] = launch.shared_bytes, len(rows)
    with _lock:
        watch = Watch(code)
        watch.set(LANES, np.zeros(WARP + 2 * WARP * 2, np.int64))
        watch.set(TOTALS, totals)
        watch.set(ALLOCATIONS, np.array([(*row, first) for row, first in zip(rows, starts)], np.int64))
        watch.set(TOUCHED, np.zeros(starts[-1] // 64 + 1, np.int64))
        execute([launch.with_code(code)], 1)
    pipes = Counter()
    for executions, block in zip(totals[N_TOTALS:].tolist(), code.facts.notes):
        for opcode, n in block:
            name, *types = opcode.split(".")
            pipes[pipe_of(name, types)] += executions * n
            if name == "mma":
                pipes["multiply_adds"] += executions * n * multiply_adds(types)
    counts = Counts(**pipes, **dict(zip(SUMS, totals[:len(SUMS)].tolist())))
    return Counted(launch.name, launch.grid, code.facts.block, counts, launch.shared_bytes, code.kernel.ptx)


_registers = functools.cache(registers_used)


def prepare(launch, model):
    """Compiles what counts a native.Launch, and lets ptxas tell its registers on a CardModel, if there is a ptxas."""
    code = code_of(launch)
    with contextlib.suppress(RuntimeError):
        _registers(code.kernel.ptx, model.cc)


# ---- tables ------------------------------------------------------------------------------------------------

def total(log):
    """The Counts of all launches of a log together."""
    return sum((launch.counts for launch in log), Counts())


def table(log, cards):
    """Text: a line per kernel, then their sum. cards: CardModels.

    A line has the kernel's launches, dp4a instructions of single lanes and traffic, then for each card the estimated
    time and the part of the card that limits most of it.
    """
    head = f"{'kernel':<32}{'launches':>9}{'dp4a lanes':>15}{'MB moved':>10}"
    lines = [head + "".join(f"{'µs, ' + card.name:>26}" for card in cards)]
    sums = [0.0] * len(cards)
    for kernel in dict.fromkeys(launch.kernel for launch in log):
        launches = [launch for launch in log if launch.kernel == kernel]
        line = _line(kernel, launches)
        for i, card in enumerate(cards):
            limits = Counter()
            for launch in launches:
                found = launch.estimate(card)
                limits[found.limiting] += found.seconds
            sums[i] += limits.total()
            line += f"{1e6 * limits.total():>15.1f} {limits.most_common(1)[0][0]:<10}"
        lines.append(line)
    lines.append(_line("estimated total", log) + "".join(f"{1e6 * t:>15.1f} {'':<10}" for t in sums))
    return "\n".join(line.rstrip() for line in lines)


def _line(name, launches):
    counts = total(launches)
    megabytes = SECTOR * counts.distinct_sectors / 1e6
    return f"{name:<32}{len(launches):>9}{counts.lane_dp4a:>15,}{megabytes:>10.2f}"
