"""The card: memory, streams, launches. One interface over the emulated card and over NVIDIA's driver.

    from kernels.card import open_cards
    card = open_cards("emulated")[0]                     # or open_cards(): real cards when there are any
    x = card.upload(host, name="x")                      # Array: typed, C-contiguous memory of this card
    card.launch(kernel, grid, block, x, 5, 0.5)          # kernel: a lazy @cuda.jit function
    kernel[grid, block](x, 5, 0.5)                       # the same, as Numba writes it
    y = card.download(x)

Order. Operations given to one stream run in the order given; operations of two streams are ordered by events
alone. `stream=None` means the card's default stream, a stream like any other; within `with card.on(stream):` it
means that stream, for the thread that is there. `upload` and `zeros` are done when they return, `download` waits
for its stream; everything else is asynchronous. There is no current card: every Array belongs to one Card, and two
Cards in one process, used from any thread, do not know of each other.

Host memory. Pageable memory is read when `copy_in` is called; pinned memory (`card.pinned`) is read when the
copy runs, so it must live and not change before. `copy_out` into pageable memory returns when the copy is
done, into pinned memory at once.

Record and replay. Launches and copies within the card made inside `with card.record() as recording` are kept
instead of run, arguments frozen; `recording.replay()` runs them all for the price of about one launch.
`alloc`, `upload` and `zeros` act at once even there; copies to and from the host and events are refused.
"""

import math
import struct
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
from numba.cuda.dispatcher import CUDADispatcher

from kernels import compile as compiler
from kernels import workers
from kernels.throttled import rewrite

ALIGNMENT = 256                                          # bytes; of every allocation, as on the real card
WORTH_WORKERS = 4                                        # fewer missing kernels take less time than starting Python
POISON = 0xFF                                            # a byte that makes NaN of floats and -1 of integers


class CardError(Exception):
    """An operation on a card failed or was used wrongly. card: the Card that is at fault, where somebody knows it."""

    card = None


class OutOfMemory(CardError):
    """An allocation did not fit; the message names the array, its size and what is free."""


class LaunchError(CardError):
    """A kernel could not be launched or failed while it ran; the message names kernel, grid and block."""


class NoAnswer(CardError):
    """A card has not done in time what somebody waited for."""

    def __init__(self, card, seconds):
        super().__init__(f"{card.name} has not answered for {seconds:g} s")


# ---- memory ------------------------------------------------------------------------------------------------

class Memory:
    """One allocation, freed by `Card.free` or when the last Array or queued operation that uses it ends."""

    __slots__ = ("card", "ptr", "nbytes", "name", "backing", "__weakref__")

    def __init__(self, card, ptr, nbytes, name, backing):
        self.card, self.ptr, self.nbytes, self.name = card, ptr, nbytes, name
        self.backing = backing                           # what holds the bytes of an emulated card

    def release(self):
        card, self.card = self.card, None
        if card is not None:
            card._return(self)

    __del__ = release


class Array:
    """A C-contiguous array in the memory of one card. Indexing, slicing of axis 0, `view` and `reshape` share
memory.

    Attributes: card, name, shape (tuple of int), dtype (NumPy), ndim, size (items), nbytes, ptr (address,
    int), type (its type string for compilation), memory (the allocation).
    """

    __slots__ = ("memory", "ptr", "shape", "dtype", "type", "name", "_words", "_forms")

    def __init__(self, memory, ptr, shape, dtype, name):
        self.memory, self.ptr, self.shape, self.dtype, self.name = memory, ptr, shape, dtype, name
        self.type = compiler.array_type(dtype, len(shape))
        self._words = None
        self._forms = {}                                 # views and shapes of it: every launch asks for the same

    card = property(lambda self: self.memory.card)
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))
    nbytes = property(lambda self: math.prod(self.shape) * self.dtype.itemsize)

    @property
    def words(self):
        """The bytes that stand for this array among a kernel's parameters."""
        if self._words is None:
            self._words = compiler.array_words(self.ptr, self.shape, self.dtype.itemsize)
        return self._words

    def view(self, dtype):
        """The same bytes as items of `dtype`; the last axis changes its length."""
        form = self._forms.get(dtype)
        if form is None:
            form = self._forms[dtype] = self._view(np.dtype(dtype))
        return form

    def _view(self, dtype):
        last = self.shape[-1] * self.dtype.itemsize if self.shape else self.dtype.itemsize
        if last % dtype.itemsize or self.ptr % dtype.itemsize:
            raise ValueError(f"cannot view {self!r} as {dtype.name}")
        return Array(self.memory, self.ptr, (*self.shape[:-1], last // dtype.itemsize), dtype, self.name)

    def reshape(self, *shape):
        """The same items in another shape; one extent may be -1."""
        shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        form = self._forms.get(shape)
        if form is None:
            form = self._forms[shape] = self._reshape(shape)
        return form

    def _reshape(self, shape):
        if -1 in shape:
            known = -math.prod(shape)
            shape = tuple(self.size // max(known, 1) if extent == -1 else extent for extent in shape)
        if math.prod(shape) != self.size or min(shape, default=0) < 0:
            raise ValueError(f"cannot reshape {self!r} to {shape}")
        return Array(self.memory, self.ptr, shape, self.dtype, self.name)

    def __getitem__(self, index):
        if not self.shape:
            raise IndexError(f"{self!r} has no axis to index")
        rows, row_bytes = self.shape[0], math.prod(self.shape[1:]) * self.dtype.itemsize
        if isinstance(index, slice):
            start, stop, step = index.indices(rows)
            if step != 1:
                raise IndexError(f"slices of a card's array have step 1, not {step}")
            if (start, stop) == (0, rows):
                return self                              # and what is known of it
            shape = (max(stop - start, 0), *self.shape[1:])
        else:
            start, shape = range(rows)[index], self.shape[1:]
        return Array(self.memory, self.ptr + start * row_bytes, shape, self.dtype, self.name)

    def __len__(self):
        return self.shape[0]

    def __repr__(self):
        state = "" if self.card else ", freed"
        return f"<{self.name or 'array'}: {self.dtype.name}{list(self.shape)}{state}>"


class Pinned:
    """Page-locked host memory, the base of the arrays of `Card.pinned`. `release` is called at its end."""

    def __init__(self, ptr, nbytes, release):
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (ptr, False)}
        self._release = release

    def __del__(self):
        self._release()


def is_pinned(host):
    """Whether the NumPy array `host` lies in memory from `Card.pinned`."""
    while isinstance(host, np.ndarray):
        host = host.base
    return isinstance(host, Pinned)


# ---- order -------------------------------------------------------------------------------------------------

class Stream:
    """An in-order queue of one card. `synchronize()` waits for all of it and raises what went wrong in it.

    `record()` returns an Event at its present end; `wait(event)` holds what follows until `event` is done, an
    event of another card included. Cards implement it. Attributes: card, name.
    """

    def wait(self, event):
        self.card.target(self, "a wait")
        self.card._hold(self, event)

    def keep(self, name, values):
        """Called with each launch or copy within the card, and what it uses; a recording keeps both."""


class Event:
    """A point in a stream of `card`. `done` tells without waiting whether that has come there.

    `seconds_since(earlier)`: the time between two events, both done. Cards implement it.
    """

    def synchronize(self):
        """Waits for it. Raises what went wrong."""
        self.card._await(self, None)

    def wait(self, seconds):
        """Whether it is done, after so many seconds at most. Raises what went wrong."""
        return self.card._await(self, seconds)


class Recording:
    """A recorded sequence. `replay(stream=None)` runs it; the arrays it uses live as long as it does.

    A replay after `Card.free` of one of them raises CardError. Attributes: card, name, operations (the names of
    the kernels and copies in it, in order).
    """

    def __init__(self, card, stream):
        self.card, self.name, self.operations = card, "", []
        self.stream = stream                             # keeps operations instead of running them
        self.thread = threading.get_ident()
        self.used = used = {}                            # allocation -> an Array of it
        self.n_freed = card.n_freed
        operations = self.operations                     # no reference to self: it should end with its last user

        def keep(name, values):
            operations.append(name)
            used.update((x.memory, x) for x in values if type(x) is Array)

        stream.keep = keep

    def replay(self, stream=None):
        stream = self.card.target(stream, "a replay")
        self.check()
        self.card._replay(self, stream)

    def check(self):
        """Raises unless everything that a replay uses is there."""
        if self.n_freed == self.card.n_freed:            # nothing was freed: a replay should cost no search
            return
        for memory, array in self.used.items():
            if memory.card is None:
                self.card._check(array)
        self.n_freed = self.card.n_freed


# ---- the card ----------------------------------------------------------------------------------------------

class Function:
    """A kernel compiled and loaded for one set of argument types. `handle` belongs to the kind of card."""

    __slots__ = ("name", "pack", "handle", "max_shared")

    def __init__(self, name, pack, handle, max_shared):
        self.name, self.pack, self.handle, self.max_shared = name, pack, handle, max_shared


class Card:
    """A card. Attributes: name, cc (compute capability), n_sms, memory_bytes, free_bytes, default_stream; n_done, which
    grows with what it is known to have done, so that a slow card differs from one that hangs.

    The kinds of card implement `_take` and `_give` (memory), `_upload_now`, `_fill_now`, `_copy_in`,
    `_copy_out`, `_copy`, `_fill`, `_load`, `_enqueue`, `_begin_recording`, `_end_recording`, `_replay`, `_hold`
    (a stream until an event), `_await` (an event, with a limit), `stream`, `pinned`, `synchronize` and `describe`;
    of machine code, `_is_cached(compiled, block)`, `_cache_filler()`, which gives a function of the same that can
    be pickled and needs no card, and `_make_ready(function, block)`.
    """

    kind = "cuda"                                        # what `open_cards` calls its kind
    granule = ALIGNMENT                                  # bytes: memory is taken in multiples of it

    def __init__(self, name, cc, n_sms, memory_bytes, max_shared, cache_dir):
        self.name, self.cc, self.n_sms, self.memory_bytes = name, cc, n_sms, memory_bytes
        self.max_shared = max_shared                     # bytes of shared memory that one block may have
        self.cache_dir = cache_dir
        self.allocations = {}                            # start address -> (bytes, name) of everything alive
        self.n_freed = 0                                 # calls of `free`
        self.hangs = False                               # nothing of such a card is freed: that would not end
        # Two locks: memory is freed by finalizers, which may interrupt a thread that waits for a compilation.
        self._memory_lock, self._loading = threading.RLock(), threading.Lock()
        self._functions = {}                             # (kernel, *argument types) -> Function
        self._replaced = ()                              # instructions, see `replace`
        self._recording = None
        self._collecting = {}                            # thread -> what its launches need
        self._streams = {}                               # thread -> the stream that it is `on`

    def __repr__(self):
        return f"<{self.describe()}>"

    def facts(self):
        """What a report should say of this card: a dict of texts and numbers; "name" is always there."""
        return {"name": self.describe()}

    # -- memory --

    def alloc(self, shape, dtype, name=""):
        """An Array with undefined contents. Raises OutOfMemory."""
        shape = (shape,) if isinstance(shape, (int, np.integer)) else shape
        shape, dtype = tuple(int(extent) for extent in shape), np.dtype(dtype)
        if min(shape, default=0) < 0:
            raise ValueError(f"array {name!r}: negative extent in {shape}")
        nbytes = max(math.prod(shape) * dtype.itemsize, 1)
        nbytes += -nbytes % ALIGNMENT
        with self._memory_lock:
            try:
                ptr, backing = self._take(nbytes)
            except MemoryError:
                free, total = show_bytes(self.free_bytes), show_bytes(self.memory_bytes)
                what = f"{name or 'an array'} ({dtype.name}{list(shape)})"
                raise OutOfMemory(f"{what} needs {show_bytes(nbytes)}, but {free} of {total} are free on "
                                  f"{self.name}") from None
            self.allocations[ptr] = math.prod(shape) * dtype.itemsize, name
        return Array(Memory(self, ptr, nbytes, name, backing), ptr, shape, dtype, name)

    def zeros(self, shape, dtype, name=""):
        """An Array of zeros, ready for every stream."""
        array = self.alloc(shape, dtype, name)
        if array.nbytes:
            self._fill_now(array, 0)
        return array

    def upload(self, host, name=""):
        """An Array with the contents of the NumPy array `host`, ready for every stream."""
        host = np.asarray(host, order="C")
        array = self.alloc(host.shape, host.dtype, name)
        if array.nbytes:
            self._upload_now(array, host)
        return array

    def free(self, array):
        """Gives the allocation of `array` back, after waiting for the card; using it afterwards raises."""
        self._check(array)
        if array.ptr != array.memory.ptr:
            raise CardError(f"{array!r} is part of a larger array: free that one")
        self.synchronize()
        self.n_freed += 1
        array.memory.release()

    def _return(self, memory):
        with self._memory_lock:
            self.allocations.pop(memory.ptr, None)
            self._give(memory)

    # -- copies --

    def download(self, array, stream=None):
        """A new NumPy array with the contents of `array` after all that `stream` holds at the moment."""
        host = np.empty(array.shape, array.dtype)
        self.copy_out(host, array, stream)
        return host

    def copy_in(self, dst, host, stream=None):
        """Host → card. `host` has the shape and dtype of `dst`; see above for pageable and pinned memory."""
        self._check(dst)
        self._check_host(dst, host)
        pinned = is_pinned(host) and host.flags.c_contiguous
        stream = self.target(stream, "copy_in")
        if dst.nbytes:
            self._copy_in(dst, host, pinned, stream)

    def copy_out(self, host, src, stream=None):
        """Card → host. `host` is C-contiguous and has the shape and dtype of `src`."""
        self._check(src)
        self._check_host(src, host)
        if not (host.flags.c_contiguous and host.flags.writeable):
            raise CardError(f"{src!r} needs contiguous and writeable host memory")
        stream = self.target(stream, "copy_out")
        if src.nbytes:
            self._copy_out(host, src, is_pinned(host), stream)

    def copy(self, dst, src, stream=None):
        """Within the card. Equal numbers of bytes and no overlap."""
        self._check(dst)
        self._check(src)
        if dst.nbytes != src.nbytes:
            raise CardError(f"cannot copy {src!r} into {dst!r}: {src.nbytes} and {dst.nbytes} bytes")
        stream = self.target(stream)
        stream.keep("copy", (dst, src))
        if dst.nbytes:
            self._copy(dst, src, stream)

    def fill(self, array, byte, stream=None):
        """Sets every byte of `array` to `byte` (0 to 255)."""
        self._check(array)
        if not 0 <= byte <= 255:
            raise CardError(f"{array!r}: {byte} is no byte to fill with")
        stream = self.target(stream)
        stream.keep("fill", (array,))
        if array.nbytes:
            self._fill(array, byte, stream)

    def poison(self, array, stream=None):
        """Fills `array` with NaN or -1, so that a kernel that fails to write it is seen."""
        self.fill(array, POISON, stream)

    # -- launches --

    def launch(self, kernel, grid, block, *args, shared=0, stream=None):
        """Queues `kernel` with `grid` blocks of `block` threads, each an int or a tuple of up to 3.

        shared: bytes of dynamic shared memory.
        Arguments: Array of this card; int (as uint32), float (as float32), bool; NumPy scalars, as what they
        are. Raises LaunchError, or CompileError at the first use of a kernel with these types of arguments.
        """
        types, values = [kernel], []
        try:
            for value in args:
                if type(value) is Array:
                    if value.memory.card is not self:
                        self._check(value)
                    types.append(value.type)
                    values.append(value._words or value.words)
                else:
                    types.append(compiler.scalar_type(value))
                    values.append(value)
            blocks, threads = _geometry(grid, block)
            if self._collecting and threading.get_ident() in self._collecting:
                self._collecting[threading.get_ident()][tuple(types), threads] = None
                return
            function = self._functions.get(tuple(types)) or self._function(tuple(types))
            if not 0 <= shared <= function.max_shared:
                raise LaunchError(f"{shared} bytes of dynamic shared memory, {function.max_shared} at most")
            params = function.pack(*values)
        except (CardError, TypeError, OverflowError, ValueError, struct.error) as error:
            raise LaunchError(f"{kernel.__name__}, grid {grid}, block {block}: {error}") from error
        stream = self.target(stream)
        stream.keep(function.name, args)
        self._enqueue(stream, function, blocks, threads, shared, params, args)

    def _function(self, types):
        """The Function of types = (kernel, *types of its arguments)."""
        with self._loading:
            function = self._functions.get(types)
            if function is None:
                compiled = self._source(*types)(compiler.compile_kernel)
                handle, static_shared = self._load(compiled)
                pack = compiler.packer(types[1:])
                function = Function(compiled.name, pack, handle, self.max_shared - static_shared)
                self._functions[types] = function
        return function

    def _source(self, kernel, *types):
        """What gives the PTX of a kernel for this card, by a function of kernels/compile.py; it can be pickled."""
        return partial(_source, kernel, types, compiler.target_cc(self.cc), self.cache_dir, self._replaced)

    def replace(self, instead):
        """From now on load kernels with instructions replaced, pairs as `throttled.rewrite` takes them; returns
        the pairs so far. What is recorded stays as it is."""
        with self._loading:
            before, self._replaced = self._replaced, tuple(instead)
            self._functions.clear()
        return before

    # -- many kernels at once --

    @contextmanager
    def collecting(self):
        """Launches that this thread makes inside are not run. Yields a dict that is filled with what they need, for
        `compile_kernels` and `load_kernel`."""
        thread = threading.get_ident()
        needed = self._collecting[thread] = {}
        try:
            yield needed
        finally:
            del self._collecting[thread]

    def compile_kernels(self, needed, on_done=lambda name: None):
        """Compiles what no cache has of the kernels in `needed`, from `collecting`; many are compiled by several
        processes at once. on_done(name) is called for each kernel. The card has no part in it."""
        jobs = {}
        for types, block in needed:
            source = self._source(*types)
            compiled = source(compiler.find_kernel)
            if compiled is None or not self._is_cached(compiled, block):
                jobs[types, block] = partial(_fill_caches, source, self._cache_filler(), block)
        for types, block in needed:
            if (types, block) not in jobs:
                on_done(types[0].__name__)
        if len(jobs) >= WORTH_WORKERS:
            workers.run(jobs, lambda need: on_done(need[0][0].__name__))
            return
        for (types, _), job in jobs.items():
            job()
            on_done(types[0].__name__)

    def load_kernel(self, types, block):
        """Loads a kernel that `collecting` found, so that no launch waits for it. Raises CompileError."""
        self._make_ready(self._function(types), block)

    # -- record and replay --

    @contextmanager
    def record(self, name=""):
        """Collects the launches and copies within the card that this thread makes instead of running them."""
        if self._recording is not None:
            raise CardError("a recording is being made on this card already")
        recording = self._recording = self._begin_recording()
        recording.name = name
        try:
            yield recording
        finally:
            self._recording = None
            self._end_recording(recording)

    @contextmanager
    def on(self, stream):
        """Whatever this thread gives the card inside, and does not name a stream for, goes to `stream`."""
        stream, thread = self.target(stream, "a change of streams"), threading.get_ident()
        before = self._streams.get(thread)
        self._streams[thread] = stream
        try:
            yield
        finally:
            if before is None:
                del self._streams[thread]
            else:
                self._streams[thread] = before

    def span(self, name):
        """Surrounds what belongs together on the default stream; a trace shows it (kernels/trace.py)."""
        return nullcontext()

    def target(self, stream, outside=None):
        """The stream that an operation goes to; `outside` names an operation that cannot be recorded."""
        if stream is not None and stream.card is not self:
            raise CardError(f"{self.name} cannot use a stream of {stream.card.name}")
        recording = self._recording
        if recording is None or recording.thread != threading.get_ident():
            if stream is None and self._streams:
                stream = self._streams.get(threading.get_ident())
            return self.default_stream if stream is None else stream
        if outside:
            raise CardError(f"{outside} cannot be recorded")
        if stream is not None:
            raise CardError("inside record() everything goes to the recording: give no stream")
        return recording.stream

    # -- checks --

    def _check(self, array):
        if array.memory.card is None:
            raise CardError(f"{array!r} was freed")
        if array.memory.card is not self:
            raise CardError(f"{array!r} is on {array.memory.card.name}, not on {self.name}")

    @staticmethod
    def _check_host(array, host):
        if host.shape != array.shape or host.dtype != array.dtype:
            raise CardError(f"host array {host.dtype.name}{list(host.shape)} does not match {array!r}")


class PlannedCard(Card):
    """Stands for a card in a plan: adds up what is allocated, from what is free there now, and does nothing else.

    `free_bytes` falls below 0 where more is asked for than there is. Whatever runs on a card runs here, too, as
    long as it looks at no result. Attributes that Card does not have are those of the card.
    """

    def __init__(self, card):
        super().__init__(card.name, card.cc, card.n_sms, card.memory_bytes, card.max_shared, card.cache_dir)
        self.card, self.kind, self.granule = card, card.kind, card.granule
        self.facts, self.describe = card.facts, card.describe
        self.default_stream = self.stream()
        self._free, self._end = card.free_bytes, ALIGNMENT
        self._small = 0                                  # bytes left of the granule that small arrays share

    def __getattr__(self, name):
        return getattr(self.__dict__["card"], name)

    @property
    def free_bytes(self):
        return self._free

    def _take(self, nbytes):
        if nbytes < self.granule // 2:                   # as drivers do it: several small ones in one granule
            if nbytes > self._small:
                self._free -= self.granule
                self._small = self.granule
            self._small -= nbytes
        else:
            self._free -= nbytes + -nbytes % self.granule
        ptr, self._end = self._end, self._end + nbytes
        return ptr, None

    def _give(self, memory):
        pass                                             # what a plan lists stays

    def pinned(self, shape, dtype):
        return np.empty(shape, dtype)

    def stream(self, name=""):
        return _PlannedStream(self)

    def launch(self, *_, **__):
        pass

    def synchronize(self):
        pass

    _upload_now = _fill_now = _copy_in = _copy_out = _copy = _fill = launch


class _PlannedStream(Stream):
    """Where nothing is ever queued, so that everything is done."""

    def __init__(self, card):
        self.card = card

    done = True                                          # it is its own event

    def record(self):
        return self

    def wait(self, event=None):
        return True

    synchronize = wait


class Configured:
    """`kernel[grid, block]`, which Numba's users write; a stream and bytes of shared memory may follow. Called with
    an Array it is `launch` on that array's card, emulated or not; without one it is Numba's own."""

    def __init__(self, kernel, grid, block, stream=0, shared=0):
        self.kernel, self.grid, self.block, self.stream, self.shared = kernel, grid, block, stream, shared

    def __call__(self, *args):
        array = next((value for value in args if type(value) is Array), None)
        if array is None:
            return self.kernel.configure(self.grid, self.block, self.stream, self.shared)(*args)
        if array.card is None:
            raise LaunchError(f"{self.kernel.__name__}: {array!r}")
        array.card.launch(self.kernel, self.grid, self.block, *args, shared=self.shared, stream=self.stream or None)


CUDADispatcher.__getitem__ = lambda kernel, configuration: Configured(kernel, *configuration)


def _source(kernel, types, cc, cache_dir, replaced, compile):
    """A Compiled with throttled instructions replaced; None where `compile`, of kernels/compile.py, gives None."""
    compiled = compile(kernel, types, cc, cache_dir)
    return compiled and replace(compiled, ptx=rewrite(compiled.ptx, replaced))


def _fill_caches(source, fill, block):
    """What a worker does: PTX and machine code of a kernel, into the caches on the disk."""
    fill(source(compiler.compile_kernel), block)


@lru_cache(maxsize=4096)
def _geometry(grid, block):
    """`grid` and `block`, int or tuple, as tuples of three. LaunchError when a card cannot have them."""
    blocks, threads = _three(grid), _three(block)
    if not (len(blocks) == 3 and 0 < blocks[0] < 2**31 and 0 < blocks[1] < 2**16 and 0 < blocks[2] < 2**16):
        raise LaunchError("a grid is 1 to 2147483647 by 1 to 65535 by 1 to 65535 blocks")
    if not (len(threads) == 3 and min(threads) > 0 and math.prod(threads) <= 1024 and threads[2] <= 64):
        raise LaunchError("a block is 1 to 1024 threads, at most 64 of them in z")
    return blocks, threads


def _three(extent):
    extent = (extent,) if isinstance(extent, (int, np.integer)) else extent
    return *(int(n) for n in extent), *(1,) * (3 - len(extent))


def show_bytes(n):
    """1536 → '1.5 KB'."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if n < 1024 or unit == "GB":
            return f"{n:.1f} {unit}" if unit != "bytes" else f"{n} bytes"
        n /= 1024


def open_cards(which=None, cache_dir=compiler.CACHE_DIR, **settings):
    """The cards to use, as a list.

    which: None (all real cards, or one emulated card where there are none), "cuda" (all real cards), "cuda:1",
    "cuda:0,2", or "emulated" and, after a colon, what `open_emulated_cards` takes: "emulated:3" (three of them),
    "emulated:cmp-100-210,v100" (one of each type), "emulated:3@0.25" (links of 0.25 GB/s). settings: see
    EmulatedCard. Raises CardError.
    """
    kind, _, choice = (which or "").partition(":")
    if kind not in ("", "cuda", "emulated") or (kind == "" and choice):
        raise CardError(f"unknown card {which!r}: say cuda, cuda:0, emulated, emulated:3 or emulated:v100,t4")
    if kind != "emulated":
        from kernels.nvidia import open_nvidia_cards
        try:
            numbers = [int(number) for number in choice.split(",")] if choice else None
        except ValueError:
            raise CardError(f"unknown card {which!r}: the numbers of cards follow the colon, cuda:0,2") from None
        cards = open_nvidia_cards(numbers, cache_dir, required=kind == "cuda")
        if cards:
            return cards
    from kernels.emulated.card import open_emulated_cards
    return open_emulated_cards(choice or "1", cache_dir, **settings)
