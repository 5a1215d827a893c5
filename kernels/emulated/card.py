"""The Card interface on the CPU: memory of the process, kernels as native code, streams as queues.

A stream is a queue, and a counter of the operations that are done. A thread that needs an operation done runs the
queue up to that operation itself: in `synchronize`, for a dependent stream, or for a copy to pageable memory. Each
stream also has a worker thread, started at the first operation, which runs the queue in the background, so that host
and card overlap.

With `late=True` there are no workers, and every operation runs at the last moment that the events allow. Among the
streams, the operation that was queued last runs first. A program that lacks a wait then reads stale data every time,
instead of once a month.
"""

import atexit
import ctypes
import math
import os
import platform
import random
import re
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager
from functools import cache, partial
from itertools import count, groupby
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from kernels import compile as compiler
from kernels.card import (ALIGNMENT, POISON, Card, CardError, Event, LaunchError, Pinned, Recording, Stream,
                          show_bytes)
from kernels.configured import accept_configurations
from kernels.emulated import native
from kernels.emulated.cards import CARDS
from kernels.emulated.ptx import Unsupported
from kernels.emulated.translate import Translator
from kernels.emulated.watching import Stoppable, Stopped, execute, here, stop
from kernels.workers import usable_processors

GAP = 64 << 10                                           # bytes around each array of a checked card
QUARANTINE = 256 << 20                                   # bytes of freed memory that it keeps
MOST_LAUNCHES = 64                                       # run as one list; not more, so that progress can be seen
MAX_STATIC_SHARED = 48 << 10                             # bytes per block, in shared arrays of fixed size
MAX_SHARED = {(7, 0): 96 << 10, (7, 5): 64 << 10}        # bytes per block, as Volta and Turing allow


class EmulatedCard(Card):
    """A card that runs kernels on this machine's processor.

    number: its place among the emulated cards. memory_bytes: size of its memory; None: half of the machine's.
    threads: processor threads per launch; None: all that the process may use. link_gbs: speed of copies between host
    and card in GB/s each way; None: as fast as memory. late: run everything as late as the events allow, for tests.
    checked: run kernels slowly and look for memory errors and races in them, see checking.py. cc: the compute
    capability to compile for; None: the oldest from Volta on that the CUDA toolkit offers. like: a CardModel; the card
    has its memory, link, number of SMs and shared memory where no other argument says otherwise. It still runs as fast
    as this processor can.
    """

    kind = "emulated"

    def __init__(self, number=0, memory_bytes=None, threads=None, *, link_gbs=None, late=False, checked=False,
                 cc=None, like=None, cache_dir=compiler.CACHE_DIR):
        cc = cc or next(c for c in compiler.supported_ccs() if c >= (7, 0))
        self.threads, self.like = threads or usable_processors(), like
        if like:
            memory_bytes, link_gbs = memory_bytes or like.memory, link_gbs or like.link_bandwidth / 1e9
        self.number, self.link_gbs, self.late, self.checked = number, link_gbs, late, checked
        self.random = random.Random(0)                   # the order of warps on a checked card
        self._freed = deque()                            # on a checked card: freed memory that is not used again yet
        shared = min(MAX_SHARED.get(cc, 96 << 10), like.shared_per_block if like else 96 << 10)
        super().__init__(f"emulated card {number}", cc, like.n_sms if like else self.threads,
                         memory_bytes or default_memory(), shared, Path(cache_dir))
        self._log = None                                 # inside `counting`: the list of what was counted
        self._checking = checked                         # whether launches are checked now
        self._stops = False                              # whether it has got kernels that can be stopped
        self._links = {"in": threading.Lock(), "out": threading.Lock()}
        self.streams = []
        self.error = None                                # the first failure; as under CUDA, it stays
        self.default_stream = self.stream("default")
        with _starting:                                  # two cards that are made at once start one pool of threads
            native._pool()
        _cards.add(self)
        accept_configurations()

    def describe(self):
        processor, vectors = _processor()
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        name = f"{self.name} like a {self.like.name}" if self.like else self.name
        return f"{name} on {processor} ({threads}, {vectors}), {show_bytes(self.memory_bytes)}"

    def twin(self):
        """Another card with the same memory and the same link."""
        twin = EmulatedCard(self.number, self.memory_bytes, self.threads, link_gbs=self.link_gbs, late=self.late,
                            checked=self.checked, cc=self.cc, like=self.like, cache_dir=self.cache_dir)
        twin.taken, twin._memory_lock, twin._links = self.taken, self._memory_lock, self._links
        return twin

    @property
    def n_done(self):
        return sum(stream.done for stream in self.streams)

    # -- memory --

    @property
    def unused_bytes(self):
        return self.memory_bytes - self.taken.nbytes

    def _take(self, nbytes):
        if nbytes > self.unused_bytes:
            raise MemoryError
        around = GAP if self.checked else 0
        backing = np.empty(nbytes + ALIGNMENT + 2 * around, np.uint8)
        start = backing.ctypes.data + around
        return start + -start % ALIGNMENT, backing

    def _give(self, memory):
        if self.checked:
            memory.backing[:] = POISON
            self._freed.append((memory.ptr, memory.nbytes, memory.name, memory.backing))
            while sum(entry[1] for entry in self._freed) > QUARANTINE:
                self._freed.popleft()
        memory.backing = None

    def freed(self):
        """(start, bytes, name) of allocations that were freed lately, the last one first."""
        return [entry[:3] for entry in reversed(self._freed)]

    def pinned(self, shape, dtype):
        """A NumPy array. Copies read and write it when they run, see kernels/card.py."""
        host = np.zeros(shape, dtype)
        keep = Pinned(host.ctypes.data, host.nbytes, lambda: None)
        keep.memory = host
        return np.asarray(keep).view(dtype).reshape(shape)

    def _reaches(self, host):
        return True

    # -- copies --

    def _fill_now(self, array, byte):
        ctypes.memset(array.ptr, byte, array.nbytes)

    def _upload_now(self, array, host):
        self._transfer("in", array.ptr, host.ctypes.data, host.nbytes)

    def _copy_in(self, dst, host, pinned, stream):
        host = host if pinned else np.array(host, order="C")
        stream.push(lambda: self._transfer("in", dst.ptr, host.ctypes.data, host.nbytes))

    def _copy_out(self, host, src, pinned, stream):
        stream.push(lambda: self._transfer("out", host.ctypes.data, src.ptr, host.nbytes))
        if not pinned:
            stream.synchronize()

    def _copy(self, dst, src, stream):
        stream.push(lambda: ctypes.memmove(dst.ptr, src.ptr, src.nbytes))

    def _fill(self, array, byte, stream):
        stream.push(lambda: ctypes.memset(array.ptr, byte, array.nbytes))

    def _transfer(self, direction, dst, src, nbytes):
        """A copy over the link: one at a time in each direction, and at most as fast as the link."""
        if not self.link_gbs:
            ctypes.memmove(dst, src, nbytes)
            return
        with self._links[direction]:
            end = time.perf_counter() + nbytes / (self.link_gbs * 1e9)
            ctypes.memmove(dst, src, nbytes)
            time.sleep(max(end - time.perf_counter(), 0))

    # -- launches --

    def _load(self, compiled):
        translator = _translator_of(compiled, self.checked)
        self._stops = self._stops or translator is Stoppable
        kernel = native.load(compiled.ptx, self.cache_dir / "native", translator=translator)
        if kernel.static_shared > MAX_STATIC_SHARED:
            raise CardError(f"{compiled.name}: {kernel.static_shared} bytes of shared arrays; "
                            f"what goes beyond {MAX_STATIC_SHARED} must be dynamic shared memory")
        return kernel, kernel.static_shared

    def _is_cached(self, compiled, block):
        return native.is_cached(compiled.ptx, block, self.cache_dir / "native",
                                _translator_of(compiled, self.checked))

    def _cache_filler(self):
        return partial(_fill_native, cache_dir=self.cache_dir / "native", is_checked=self.checked)

    def _make_ready(self, function, block):
        function.handle.code(block)

    def _enqueue(self, stream, function, grid, block, shared, params, args):
        try:
            launch = function.handle.prepare(grid, block, params, shared)      # compiles at a new `block`
        except Unsupported as error:
            raise LaunchError(f"{function.name}, grid {grid}, block {block}: {error}") from error
        stream.push(Launch(launch, args))

    # -- order --

    def stream(self, name=""):
        """A new Stream."""
        stream = EmulatedStream(self, name)
        self.streams.append(stream)
        return stream

    def synchronize(self):
        """Waits for every stream of the card. Raises what went wrong."""
        if self.late:
            self._run_latest_first()
        for stream in list(self.streams):
            stream.run_until(stream.pushed)
        self.raise_error()

    def _run_latest_first(self):
        """Empties the queues. Of their next operations, the one that was queued last always runs first.

        So a result is used before it is made, unless an event forces the right order.
        """
        while True:
            stream = max(list(self.streams), key=EmulatedStream.next_given)
            if stream.next_given() < 0:
                return
            stream.run_until(stream.done + 1)

    def run(self, operations):
        """Runs several launches as one native list, or one operation of another kind.

        A broken card runs nothing. Its queues become empty all the same, so that nobody waits for ever.
        """
        try:
            if self.error is not None:
                return
            if type(operations[0]) is Launch:
                self.execute([operation.native for operation in operations])
            else:
                operations[0]()
        except Stopped:                                  # whoever waits for it has got the KeyboardInterrupt
            return
        except Exception as error:
            self.error = error

    def execute(self, launches):
        """Runs native launches in order, or a native.Program of them."""
        if self._log is not None:
            from kernels.emulated import counting        # here, because importing it takes seconds
            self._log += [counting.run(launch, self.allocations) for launch in native.in_order(launches)]
        elif self._checking:
            from kernels.emulated import checking
            for launch in native.in_order(launches):
                checking.run(launch, self)
        elif self._stops:
            execute(launches, self.threads)
        else:
            native.execute(launches, self.threads)

    @property
    def is_watched(self):
        """Whether launches are counted or checked now."""
        return self._log is not None or self._checking

    @contextmanager
    def counting(self):
        """Counts what the launches inside do. Yields a list of counting.Counted, which is complete at the end."""
        self.synchronize()
        self._log = log = []
        try:
            yield log
            self.synchronize()
        finally:
            self._log = None

    def prepare_counting(self, recording, model):
        """Compiles the code that counts a replay of `recording`, and what estimates for `model` need. That may take
        seconds; the card may work meanwhile."""
        from kernels.emulated import counting
        for program in recording.programs:
            for launch in native.in_order(program):
                counting.prepare(launch, model)

    @contextmanager
    def checking(self):
        """Checks the launches inside as a checked card does, except that arrays may lie side by side in memory.

        The first error is raised as LaunchError, at the end at the latest. The wrong access is not made, so the card
        goes on working.
        """
        self.synchronize()
        self._checking = True
        try:
            yield
            self.synchronize()
        except LaunchError:
            if self.error is None:
                raise
            raise LaunchError(str(self.error)) from self.error
        finally:
            self._checking = self.checked
            self.error = None

    def raise_error(self):
        """Raises a CardError that names the kernel which broke the card, if the card is broken."""
        if self.error is not None:
            raise LaunchError(f"{self.name} is broken: {self.error}") from self.error

    def _hold(self, stream, event):
        stream.push(lambda: event.stream.run_until(event.position))

    def _replay(self, recording, stream):
        for operation in recording.parts:
            stream.push(partial(recording.run, operation))       # the method holds the recording and its arrays

    def _await(self, event, timeout):
        """Whether `event` is done, after `timeout` seconds at most."""
        if timeout is None or self.late:                 # a late card has no worker that would run the queue
            event.stream.run_until(event.position)
        elif not event.stream.is_at(event.position, timeout):
            return False
        self.raise_error()
        return True

    def _begin_recording(self):
        return EmulatedRecording(self)

    def _end_recording(self, recording):
        recording.finish()


class EmulatedEvent(Event):
    def __init__(self, stream):
        self.card, self.stream, self.time = stream.card, stream, None
        self.position = stream.push(self._mark)

    def _mark(self):
        self.time = time.perf_counter()

    @property
    def done(self):
        return self.stream.done >= self.position

    def seconds_since(self, earlier):
        if self.time is None or earlier.time is None:
            raise CardError("the time between two events is known when both are done")
        return self.time - earlier.time


class Launch:
    """An operation of a stream: a native launch, and the arguments, which must live until it has run."""

    __slots__ = ("native", "keep")

    def __init__(self, native, keep):
        self.native, self.keep = native, keep


class EmulatedStream(Stream):
    """A queue of operations, each a Launch or a function, with the numbers of operations pushed and done."""

    def __init__(self, card, name):
        self.card, self.name = card, name
        self.pushed = self.done = 0
        self._queue = deque()
        self._given = deque()                            # on a late card: the number of each operation in the queue
        self._pushing = threading.Lock()                 # guards `pushed` and the order of the queue
        self._running = threading.Lock()                 # held by the thread that runs the queue
        self._progress = threading.Condition()           # notified whenever `_running` is released
        self._worker = self._signals = None
        self._awake = False                              # whether the worker has a signal that it has not answered

    def push(self, operation):
        """Adds an operation. Returns its position, which is the value of `done` when the operation has just run."""
        with self._pushing:
            if self.card.late:
                self._given.append(next(_numbers))
            self._queue.append(operation)
            self.pushed += 1
            if not self._awake and not self.card.late:
                self._wake()
            return self.pushed

    def record(self):
        self.card.target(self, "an event")
        return EmulatedEvent(self)

    def synchronize(self):
        self.run_until(self.pushed)
        self.card.raise_error()

    def run_until(self, position):
        """Returns when `position` operations are done. This thread runs them if no other thread does.

        If another thread runs them, this one does not wait for what that thread runs afterwards: it might be a wait
        for the stream that this thread is running. Ctrl-C ends kernels that can be stopped.
        """
        try:
            self._run_until(position)
        except KeyboardInterrupt:
            stop(self)
            raise

    def _run_until(self, position):
        while self.done < position:
            if self._running.acquire(blocking=False):
                try:
                    if self.done < position:
                        self._run_some(position - self.done)
                finally:
                    self._running.release()
                    with self._progress:
                        self._progress.notify_all()
            else:
                with self._progress:
                    self._progress.wait_for(lambda: self.done >= position or not self._running.locked())

    def is_at(self, position, timeout):
        """Whether the worker has done `position` operations, after `timeout` seconds at most."""
        with self._progress:
            return self._progress.wait_for(lambda: self.done >= position, timeout)

    def next_given(self):
        """On a late card, the number of the next operation, counted over all late cards; -1: the queue is empty."""
        try:
            return self._given[0]
        except IndexError:
            return -1

    def answer(self):
        """The worker runs the queue. It calls this at each signal."""
        self._awake = False                              # before `pushed` is read, so that no operation is missed
        self.run_until(self.pushed)

    def _run_some(self, most):
        """Runs the next operation. If it is a launch, runs the launches that follow it as well, up to the next
        operation of another kind, but not more than `most` or MOST_LAUNCHES in all."""
        operations = []
        try:
            operations.append(self._queue.popleft())
            if type(operations[0]) is Launch:
                while len(operations) < min(most, MOST_LAUNCHES) and type(self._queue[0]) is Launch:
                    operations.append(self._queue.popleft())
            here.owner = self
            self.card.run(operations)
        finally:                                         # also at Ctrl-C
            here.owner = None                            # it would keep this stream
            self.done += len(operations)                 # not earlier, because others go on when `done` says so
            for _ in operations if self.card.late else ():
                self._given.popleft()

    def _wake(self):
        self._awake = True
        if self._worker is None:
            self._signals = SimpleQueue()                # finalizers may use it at any moment
            self._worker = threading.Thread(target=_work, args=(weakref.ref(self), self._signals),
                                            name=f"{self.card.name}, {self.name}", daemon=True)
            self._worker.start()
            weakref.finalize(self, self._signals.put, None)      # the last signal ends the thread
        self._signals.put(None)


def _work(stream_reference, signals):
    """What the worker thread of a stream does. The thread ends when the stream does."""
    while True:
        signals.get()
        stream = stream_reference()
        if stream is None:
            return
        stream.answer()
        del stream


class EmulatedRecording(Recording):
    def __init__(self, card):
        super().__init__(card, _RecordingStream(card, "recording"))
        self.parts, self.programs = [], []

    def finish(self):
        """Turns each unbroken series of launches into one native program, which a replay runs by one call."""
        for is_launch, group in groupby(self.stream.recorded, lambda operation: type(operation) is Launch):
            group = list(group)
            if is_launch:
                self.programs.append(native.Program([x.native for x in group]))
                self.parts.append(partial(self.card.execute, self.programs[-1]))
            else:
                self.parts += group

    def run(self, part):
        part()


class _RecordingStream(EmulatedStream):
    """A stream that keeps operations, with their arguments, instead of running them."""

    def __init__(self, card, name):
        super().__init__(card, name)
        self.recorded = []
        self.push = self.recorded.append


def open_emulated_cards(choice, cache_dir=compiler.CACHE_DIR, **settings):
    """Emulated cards, as a list. Raises CardError.

    choice: how many, "3" (together they have half of the machine's memory), or types of cards (CardModel.key) with
    commas, "cmp-100-210,v100". The GB/s of a link may follow after an @: "3@0.25", "v100@4,t4". settings: arguments of
    each EmulatedCard.
    """
    models, found = {model.key: model for model in CARDS}, []
    parts = [part.partition("@") for part in choice.split(",")]
    try:
        count = 1 if parts[0][0] in models else int(parts[0][0])
        speeds = [float(speed) if at else None for _, at, speed in parts]
        if count < 1 or any(speed is not None and not 0 < speed < math.inf for speed in speeds):
            raise ValueError
        for (what, _, _), link_gbs in zip(parts, speeds):
            if what not in models and len(parts) > 1:
                raise ValueError
            own = {"like": models[what]} if what in models else {"memory_bytes": default_memory() // count}
            found += [own | ({"link_gbs": link_gbs} if link_gbs else {}) | settings] * count
    except ValueError:
        raise CardError(f"unknown cards emulated:{choice}: say how many, emulated:3, or of which types, v100,v100 ("
                        f"{', '.join(models)}); the GB/s of links may follow, emulated:3@0.25") from None
    return [EmulatedCard(number, cache_dir=cache_dir, **each) for number, each in enumerate(found)]


def _translator_of(compiled, is_checked):
    """The Translator of a kernel. One that is not the project's own can be stopped."""
    if is_checked:
        from kernels.emulated.checking import Checking                       # here, because it takes seconds
        return Checking
    file = re.search(r'\.file\s+1\s+"([^"]*)"', compiled.ptx)
    return Stoppable if file and compiler.current_file(file[1]) == file[1] else Translator


def _fill_native(compiled, block, cache_dir, is_checked):
    native.load(compiled.ptx, cache_dir, translator=_translator_of(compiled, is_checked)).code(block)


@cache
def _processor():
    """(name of the processor, its widest vector instructions that the emulated card uses)."""
    try:
        lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    except OSError:
        lines = []
    info = {key.strip(): value.strip() for key, _, value in reversed(lines)}
    flags = info.get("flags", "").split()
    vectors = next((label for flag, label in (("avx512_vnni", "AVX-512 VNNI"), ("avx512f", "AVX-512"),
                                              ("avx2", "AVX2")) if flag in flags), platform.machine())
    return info.get("model name") or platform.processor() or "this processor", vectors


def default_memory():
    """Half of the machine's memory, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


_cards = weakref.WeakSet()
_starting = threading.Lock()
_numbers = count()                                       # of the operations queued on late cards, over all of them


@atexit.register
def _finish():
    """Lets queued work end before the interpreter frees the memory that it uses."""
    for card in list(_cards):
        if not card.late:
            for stream in card.streams:
                stream.run_until(stream.pushed)
