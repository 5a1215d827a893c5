"""The translation that counters and checks share: before every memory access a function outside is called.

    observer(watch, access, size, kind, mask, shared) -> 0 to go on, else the warp stops

watch: pointers to int64 arrays, set from Python before a launch (`Watch`); the first of them holds the
addresses of the 32 lanes. access: the number of the access among those of the kernel. size: bytes per lane.
kind: flags, READ to COPY. mask: the running lanes. shared: where the block's shared memory starts. Such
translations keep their records without locks, so they run on one thread.
"""

import ctypes
from dataclasses import replace

import numpy as np
from numba import njit, types

from .emit import WARP
from .translate import Translator

READ, WRITE, ATOMIC, SHARED, LOCAL, COPY = 1, 2, 4, 8, 16, 32
N_POINTERS = 8
OBSERVER = types.int32(types.CPointer(types.CPointer(types.int64)), types.int32, types.int32, types.int32,
                       types.uint32, types.int64)


class Watching(Translator):
    """A translation that calls an observer. Subclasses set `observer`, the name under which LLVM knows the function."""

    observer = ""
    level = 0                                       # most of the time goes to compilation and to the observer

    def __init__(self, ptx, block, target):
        super().__init__(ptx, block, target)
        self.accesses = []                          # the instructions that the observer is told of, by number

    def notes(self):
        """What a launch needs to know about the kernel, as tuples of tuples of str and int. Called when the
        translation is done."""
        return ()

    def translate(self):
        translated = super().translate()
        return replace(translated, notes=self.notes())

    def _global_lines(self):
        yield from super()._global_lines()
        yield f"@watch = global [{N_POINTERS} x ptr] zeroinitializer"

    def watched(self, i):
        """Pointer number i of @watch."""
        return self.let(f"load ptr, ptr getelementptr (ptr, ptr @watch, i64 {i})")

    def note_access(self, instr, place, size):
        pattern = self._pattern(place)
        lanes = self.vector(place.base, "i64") if pattern is None else \
            self.spread("i64", self.scalar(place.base, "i64"), pattern)
        lanes = self.op("add", "i64", WARP, lanes, f"splat (i64 {place.offset})") if place.offset else lanes
        self.do(f"store <{WARP} x i64> {lanes}, ptr {self.watched(0)}, align 8")
        self.tell_observer(instr, size, access_kind(instr), self.mask or "-1")

    def tell_observer(self, instr, size, kind, mask):
        """Calls the observer and returns its answer."""
        shared = self.let("ptrtoint ptr %shared to i64")
        self.accesses.append(instr)
        return self.call(self.observer, "i32", ("ptr", "@watch"), ("i32", str(len(self.accesses) - 1)),
                         ("i32", str(size)), ("i32", str(kind)), ("i32", mask), ("i64", shared))


def access_kind(instr):
    """The flags of a load, store or atomic instruction."""
    kinds = {"ld": READ, "ldmatrix": READ, "st": WRITE, "red": WRITE | ATOMIC, "atom": READ | WRITE | ATOMIC}
    return kinds[instr.name] | SHARED * ("shared" in instr.mods) | LOCAL * ("local" in instr.mods) \
        | COPY * ("async" in instr.mods)


@njit
def find_row(table, n, address):
    """The place of a row in `table`, which holds n ascending rows (start, end, anything): the row with start <=
    address < end, or -1 if there is none."""
    low, high = 0, n
    while high - low > 1:
        middle = (low + high) // 2
        if table[3 * middle] <= address:
            low = middle
        else:
            high = middle
    return 3 * low if table[3 * low] <= address < table[3 * low + 1] else -1


class Watch:
    """The arrays that a kernel's code sees while it is watched."""

    def __init__(self, code):
        self._pointers = (ctypes.c_void_p * N_POINTERS).from_address(code.variable("watch"))
        self._arrays = {}

    def set(self, i, array):
        """Makes the int64 `array` pointer number i of the kernel's @watch."""
        assert array.dtype == np.int64 and array.flags.c_contiguous
        self._arrays[i], self._pointers[i] = array, array.ctypes.data
