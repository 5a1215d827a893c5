"""Translations with a hook: a flag that stops a kernel, or a function that sees each memory access.

Stoppable: kernels that Ctrl-C ends, in a notebook *Interrupt*. Each round of a loop looks at a flag. The project's own
kernels end, so they need no flag; a reader's kernel may run for ever.

Watching: what counters and checks share. Before every memory access a function outside is called.

    observer(watch, access, size, kind, mask, shared) -> 0 to go on, else the warp stops

watch: pointers to int64 arrays, set from Python before a launch (`Watch`); the first of them holds the
addresses of the 32 lanes. access: the number of the access among those of the kernel. size: bytes per lane.
kind: flags, READ to COPY. mask: the running lanes. shared: where the block's shared memory starts. Such
translations keep their records without locks, so they run on one thread.
"""

import contextlib
import ctypes
import threading
from dataclasses import dataclass, replace

import numpy as np
from numba import njit, types

from . import native
from .emit import WARP
from .translate import Translator

READ, WRITE, ATOMIC, SHARED, LOCAL, COPY = 1, 2, 4, 8, 16, 32
N_POINTERS = 8
OBSERVER = types.int32(types.CPointer(types.CPointer(types.int64)), types.int32, types.int32, types.int32,
                       types.uint32, types.int64)


# ---- kernels that can be stopped ---------------------------------------------------------------------------

class Stopped(native.KernelFault):
    """Ctrl-C has ended a kernel. What it has written until then remains."""


class Stoppable(Translator):
    """A translation whose loops end the warp, as `trap` does, once @stop is not 0."""

    def _global_lines(self):
        yield from super()._global_lines()
        yield "@stop = global i32 0"

    def _terminate(self, block):
        if block.index in self.flow.loops:              # the head of a loop: once in each round
            flag = self.let("load volatile i32, ptr @stop")
            self.n += 1
            goes_on = self.compare("eq", "i32", 1, flag, "0")
            self.do(f"br i1 {goes_on}, label %round{self.n}, label %stopped")
            self.label(f"round{self.n}")
        super()._terminate(block)

    def _body(self):
        return [*super()._body(), "stopped:", "  ret i32 -1"]


here = threading.local()                # .owner: the stream for which this thread runs kernels
_runs = set()                           # the _Run of all that runs now
_changed = threading.Condition()        # guards _runs and the flags


@dataclass(eq=False)
class _Run:
    """Kernels that run for a stream. flags: addresses of @stop in their machine code, of which there is one for all
    runs of a kernel. is_stopped: `stop` was called for this run."""

    owner: object
    flags: set[int]
    is_stopped: bool = False


def _set(flags: set[int], value: int):
    for flag in flags:
        ctypes.c_int32.from_address(flag).value = value


def stop(owner):
    """Ends what `execute` runs now for this stream, in any thread."""
    with _changed:
        for run in _runs:
            if run.owner is owner:
                run.is_stopped = True
                _set(run.flags, 1)


def execute(launches, n_workers):
    """native.execute, for launches of which some may be Stoppable: then Ctrl-C ends them. The main thread does not run
    these itself, since it hears of Ctrl-C only between lines of Python. Raises Stopped where `stop` was called by
    another thread."""
    flags = {launch.code.variable("stop") for launch in native.in_order(launches)
             if issubclass(launch.code.kernel.translator, Stoppable)}
    run = _Run(getattr(here, "owner", None), flags)
    if not flags:
        native.execute(launches, n_workers)
    elif threading.current_thread() is threading.main_thread():
        _execute_elsewhere(launches, n_workers, run)
    else:
        _execute(launches, n_workers, run)


def _execute_elsewhere(launches, n_workers, run):
    failed = []

    def work():
        try:
            _execute(launches, n_workers, run)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    try:
        thread.start()
        thread.join()
    except KeyboardInterrupt:
        while thread.is_alive():
            with contextlib.suppress(KeyboardInterrupt):    # once more does not make it quicker
                stop(run.owner)                             # again: it may not have begun before
                thread.join(0.01)
        raise
    if failed:
        raise failed[0]


def _execute(launches, n_workers, run):
    with _changed:          # the flags of a kernel that is being stopped would stop this one, too
        _changed.wait_for(lambda: not any(other.is_stopped and other.flags & run.flags for other in _runs))
        _runs.add(run)
    try:
        native.execute(launches, n_workers)
    except native.KernelFault as fault:
        if run.is_stopped:
            raise Stopped(f"{fault}, by Ctrl-C") from None
        if any(ctypes.c_int32.from_address(flag).value for flag in run.flags):
            raise native.KernelFault(f"{fault}, by Ctrl-C at another card that runs the same kernel") from None
        raise
    finally:
        with _changed:
            _runs.discard(run)
            _set(run.flags.difference(*(other.flags for other in _runs)), 0)
            _changed.notify_all()


# ---- kernels that are watched ------------------------------------------------------------------------------

class Watching(Stoppable):
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
