"""The card: memory, streams, launches. One interface for the emulated card and for NVIDIA's driver.

    from kernels.open import open_cards
    card = open_cards("emulated")[0]                     # or open_cards(): real cards when there are any
    x = card.upload(host, name="x")                      # Array: typed, C-contiguous memory of this card
    card.launch(kernel, grid, block, x, 5, 0.5)          # kernel: a lazy @cuda.jit function
    kernel[grid, block](x, 5, 0.5)                       # the same, as Numba writes it
    y = card.download(x)

Order. The operations of one stream run in the order in which they were queued. Only events order the operations of two
streams. `stream=None` means the card's default stream, which is a stream like any other. A thread inside `with
card.on(stream):` gets `stream` instead of the default stream. `upload` and `zeros` are done when they return;
`download`, `synchronize` and `free` wait; `copy_out` may wait (below); all other operations are only queued. There is
no current card: every Array belongs to one Card. A process may have several Cards and use each from any thread; Cards
do not know of each other.

Host memory. `copy_in` reads pageable memory during the call. It reads pinned memory (`card.pinned`) when the copy runs,
so pinned memory must stay alive and unchanged until the copy has run. `copy_out` into pageable memory returns when the
copy is done; `copy_out` into pinned memory returns at once. Kernels read and write pinned memory by its address:
`card.mapped` gives such memory as an Array and as a NumPy array, `card.attach` makes an Array of pinned memory.

Record and replay. Inside `with card.record() as recording`, the launches, fills and copies within the card that this
thread makes are recorded instead of run, with the arguments they have at that moment. `recording.replay()` runs all of
them, and costs the host about as much as one launch. `alloc`, `upload` and `zeros` act at once even inside `record()`;
copies to and from the host and events are refused there.

Observation. `with card.observed_by(observer)` tells an Observer of every operation. kernels/trace.py is built on it.
"""

import math
import struct
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import lru_cache, partial
from numbers import Real

import numpy as np

from kernels import compile as compiler
from kernels import workers
from kernels.throttled import rewrite

MAX_THREADS = 1024                                       # of a block of any kernel
ALIGNMENT = 256                                          # bytes; of every allocation, as on the real card
WORTH_WORKERS = 4                                        # missing kernels that are worth starting processes for
POISON = 0xFF                                            # filled with this byte, floats are NaN and integers are -1
UNOBSERVED = nullcontext()                               # the context manager of an operation without an observer


class CardError(Exception):
    """An operation on a card failed or was used wrongly. card: the Card at fault, None if it is unknown."""

    card = None


class OutOfMemory(CardError):
    """An allocation did not fit; the message names the array, its size and what is free."""


class LaunchError(CardError):
    """A kernel could not be launched or failed while it ran; the message names kernel, grid and block."""


class NoAnswer(CardError):
    """A card did not finish within the time that the caller was ready to wait."""

    def __init__(self, card, seconds):
        super().__init__(f"{card.name} has not answered for {seconds:g} s")


# ---- memory ------------------------------------------------------------------------------------------------

class Memory:
    """One allocation. `Card.free` frees it; otherwise it is freed when the last Array or queued operation that uses it
    is gone."""

    __slots__ = ("card", "ptr", "nbytes", "name", "backing", "__weakref__")

    def __init__(self, card, ptr, nbytes, name, backing):
        self.card, self.ptr, self.nbytes, self.name = card, ptr, nbytes, name
        self.backing = backing                           # the NumPy array with the bytes, on an emulated card

    def release(self):
        card, self.card = self.card, None
        if card is not None:
            card._return(self)

    __del__ = release


class Taken:
    """What the Arrays of a card and of its twins take of its memory, and the most that they may take (None: all that
    there is), in bytes."""

    __slots__ = ("nbytes", "limit")

    def __init__(self):
        self.nbytes, self.limit = 0, None


class Lent(Memory):
    """Bytes that belong to `backing`: host memory (`Card.attach`), or an allocation that arrays share (`Card.packed`).
    They are not freed with this Memory."""

    __slots__ = ()

    def release(self):
        card, self.card = self.card, None
        if card is not None:
            card._forget(self)
            self.backing = None

    __del__ = release


ON_A_CARD = "this array is on a card: card.download(array) brings it to NumPy"
NAMES_OF_OTHERS = {"copy_to_host", "get"}                # by which arrays of Numba and CuPy come from a card


class Array:
    """A C-contiguous array in the memory of one card.

    Indexing and slicing of axis 0, `view` and `reshape` give Arrays that share its memory.
    Attributes: card, name, shape (tuple of int), dtype (NumPy), ndim, size (items), nbytes, ptr (address,
    int), type (its type string for compilation), memory (the allocation).
    """

    __slots__ = ("memory", "ptr", "shape", "dtype", "type", "name", "_words", "_forms")

    def __init__(self, memory, ptr, shape, dtype, name):
        self.memory, self.ptr, self.shape, self.dtype, self.name = memory, ptr, shape, dtype, name
        self.type = compiler.array_type(dtype, len(shape))
        self._words = None
        self._forms = {}                                 # dtype or shape -> Array: every launch asks for the same

    card = property(lambda self: self.memory.card)
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))
    nbytes = property(lambda self: math.prod(self.shape) * self.dtype.itemsize)

    @property
    def words(self):
        """The parameter bytes of this array, as a kernel receives them."""
        if self._words is None:
            self._words = compiler.array_words(self.ptr, self.shape, self.dtype.itemsize)
        return self._words

    def view(self, dtype):
        """An Array of the same bytes as items of `dtype`. The length of the last axis changes with the item size."""
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
        """An Array of the same items in another shape. One extent may be -1: it follows from the others."""
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
                return self                              # so that its cached words and forms are used again
            shape = (max(stop - start, 0), *self.shape[1:])
        else:
            start, shape = range(rows)[index], self.shape[1:]
        return Array(self.memory, self.ptr + start * row_bytes, shape, self.dtype, self.name)

    def __len__(self):
        return self.shape[0]

    def __array__(self, *_, **__):
        raise TypeError(ON_A_CARD)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = __array__
    __neg__ = __float__ = __int__ = __setitem__ = __lt__ = __le__ = __gt__ = __ge__ = __array__

    def __getattr__(self, name):
        known = hasattr(np.ndarray, name) or name in NAMES_OF_OTHERS
        why = f"no {name!r} here: {ON_A_CARD}" if known else f"an Array has no attribute {name!r}"
        raise AttributeError(why, name=name, obj=self)

    def __repr__(self):
        state = "" if self.card else ", freed"
        return f"<{self.name or 'array'}: {self.dtype.name}{list(self.shape)}{state}>"


class Pinned:
    """Page-locked host memory: the base of the arrays that `Card.pinned` gives. `release` is called when it ends."""

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
    """An in-order queue of one card. Attributes: card, name. Each kind of card implements `synchronize` and `record`.

    `synchronize()` waits until the queue is empty and raises what went wrong in it. `record()` returns an Event at the
    present end of the queue.
    """

    def wait(self, event):
        """What is queued from now on runs only after `event`, which may belong to another card."""
        self.card.target(self, "a wait")
        with self.card.observed("hold", self, event):
            self.card._hold(self, event)

    def keep(self, name, values):
        """A hook, called with the name and the arguments of each launch, fill and copy within the card. It does
        nothing; a Recording puts its own into its stream."""


class Event:
    """A point in a stream of `card`. Each kind of card implements `done` and `seconds_since`.

    `done` tells, without waiting, whether the stream has reached this point. `seconds_since(earlier)` is the time
    between two events, both of which must be done.
    """

    def synchronize(self):
        """Waits until the stream has reached this point. Raises what went wrong."""
        self.wait(None)

    def wait(self, seconds):
        """Waits for at most `seconds` (None: for ever). Whether the event is done then. Raises what went wrong."""
        with self.card.observed("host_wait", self):
            return self.card._await(self, seconds)


class Recording:
    """A recorded sequence of launches, fills and copies. The arrays that it uses live as long as the recording does.

    Attributes: card, name, operations (the names of the kernels and copies, in order).
    """

    def __init__(self, card, stream):
        self.card, self.name, self.operations = card, "", []
        self.stream = stream                             # a stream that records operations instead of running them
        self.thread = threading.get_ident()
        self.used = used = {}                            # allocation -> an Array of it
        self.n_freed = card.n_freed
        operations = self.operations                     # a local: with a reference to self, `keep` would make a cycle

        def keep(name, values):
            operations.append(name)
            used.update((x.memory, x) for x in values if type(x) is Array)

        stream.keep = keep

    def replay(self, stream=None):
        """Queues the whole sequence on `stream`. Raises CardError when an array that it uses was freed."""
        stream = self.card.target(stream, "a replay")
        self.check()
        with self.card.observed("replay", stream, self):
            self.card._replay(self, stream)

    def check(self):
        """Raises CardError when an array that a replay uses was freed."""
        if self.n_freed == self.card.n_freed:            # nothing was freed since the last check: skip the search
            return
        for memory, array in self.used.items():
            if memory.card is None:
                self.card._check(array)
        self.n_freed = self.card.n_freed


# ---- who looks on ------------------------------------------------------------------------------------------

class Observer:
    """Is told of the operations of a card, see `Card.observed_by`. This one takes no notice of anything.

    Each method returns a context manager. The card enters it before the operation is queued and leaves it afterwards,
    in the thread that asked for the operation. `stream` is the Stream that the operation goes to.
    """

    def launch(self, stream, function, grid, block, shared):
        """A kernel. function: a Function; grid, block: tuples of 3; shared: bytes of dynamic shared memory."""
        return UNOBSERVED

    def copy_in(self, stream, dst):
        """Host → Array `dst`."""
        return UNOBSERVED

    def copy_out(self, stream, src):
        """Array `src` → host."""
        return UNOBSERVED

    def copy(self, stream, dst, src):
        """Array `src` → Array `dst`, within the card."""
        return UNOBSERVED

    def fill(self, stream, array):
        """Every byte of `array` is set."""
        return UNOBSERVED

    def replay(self, stream, recording):
        """All operations of a Recording."""
        return UNOBSERVED

    def hold(self, stream, event):
        """`stream` waits for `event`."""
        return UNOBSERVED

    def host_wait(self, event):
        """The calling thread waits for `event`; the context manager is left when the wait is over."""
        return UNOBSERVED

    def span(self, name):
        """A part of the program that its author named with `Card.span`."""
        return UNOBSERVED


# ---- the card ----------------------------------------------------------------------------------------------

class Function:
    """A kernel, compiled and loaded for one set of argument types. Only the kind of card knows what `handle` is."""

    __slots__ = ("name", "pack", "handle", "max_shared", "max_threads")

    def __init__(self, name, pack, handle, max_shared, max_threads):
        self.name, self.pack, self.handle = name, pack, handle
        self.max_shared, self.max_threads = max_shared, max_threads


class Card:
    """A card. Attributes: name, cc (compute capability), n_sms, memory_bytes, free_bytes, default_stream, n_done.

    n_done counts the operations that are known to be finished. While it grows, the card is slow but does not hang.

    Each kind of card implements
        memory         `_take`, `_give`, `unused_bytes`, `pinned`
        copies         `_upload_now`, `_fill_now`, `_copy_in`, `_copy_out`, `_copy`, `_fill`
        launches       `_load`, `_enqueue`, `_begin_recording`, `_end_recording`, `_replay`
        order          `stream`, `synchronize`, `_hold` (a stream waits for an event),
                       `_await` (the host waits for an event, for a limited time)
        machine code   `_is_cached(compiled, block)`; `_make_ready(function, block)`; `_cache_filler()`, which returns
                       a function of (compiled, block), for other processes, that fills the cache on the disk
        words          `describe`
        itself         `twin`, another Card of the same device and memory, with streams and recordings of its own: each
                       engine needs a Card that no other one gives work
    """

    kind = "cuda"                                        # as `open_cards` calls it
    granule = ALIGNMENT                                  # bytes; memory is taken in multiples of it

    def __init__(self, name, cc, n_sms, memory_bytes, max_shared, cache_dir):
        self.name, self.cc, self.n_sms, self.memory_bytes = name, cc, n_sms, memory_bytes
        self.max_shared = max_shared                     # bytes of shared memory that one block may have
        self.cache_dir = cache_dir
        self.allocations = {}                            # start address -> (bytes, name) of everything alive
        self.taken = Taken()                             # twins share it, and the lock of memory
        self._room = None                                # (Memory, next address, end) of arrays that are `packed`
        self.n_freed = 0                                 # calls of `free`
        self.hangs = False                               # such a card frees nothing: the driver would never return
        self.observer = None                             # an Observer, see `observed_by`
        # Two locks: a finalizer frees memory in whatever thread it interrupts, even in one that holds `_loading`.
        self._memory_lock, self._loading = threading.RLock(), threading.Lock()
        self._functions = {}                             # (kernel, *argument types) -> Function
        self._replaced = ()                              # pairs of instructions, see `replace`
        self._recording = None
        self._collecting = {}                            # thread -> the dict that its `collecting` yielded
        self._streams = {}                               # thread -> the stream of its `on`

    def __repr__(self):
        return f"<{self.describe()}>"

    def facts(self):
        """What a report should say of this card: a dict of texts and numbers, "name" among them."""
        return {"name": self.describe()}

    # -- memory --

    @property
    def free_bytes(self):
        """Bytes for further Arrays."""
        taken = self.taken
        return self.unused_bytes if taken.limit is None else min(self.unused_bytes, taken.limit - taken.nbytes)

    def limit(self, nbytes):
        """From now on, the Arrays of this card and of its twins take no more than nbytes together; None: all there is.
        What a driver takes for itself does not count."""
        self.taken.limit = nbytes

    def _held(self, nbytes):
        """Bytes that an allocation counts for. In drivers, small ones share a granule."""
        return nbytes if nbytes < self.granule // 2 else nbytes + -nbytes % self.granule

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
                ptr, backing = self._take_within(nbytes)
            except MemoryError:
                limit = self.taken.limit
                free = show_bytes(max(self.free_bytes, 0))
                total = show_bytes(self.memory_bytes if limit is None else min(limit, self.memory_bytes))
                what = f"{name or 'an array'} ({dtype.name}{list(shape)})"
                raise OutOfMemory(f"{what} needs {show_bytes(nbytes)}, but {free} of {total} are free on "
                                  f"{self.name}") from None
            self.allocations[ptr] = math.prod(shape) * dtype.itemsize, name
        kind = Lent if isinstance(backing, Memory) else Memory
        return Array(kind(self, ptr, nbytes, name, backing), ptr, shape, dtype, name)

    @contextmanager
    def packed(self, nbytes):
        """The arrays that the `with` body allocates lie side by side in one allocation of nbytes, as far as they have
        room there. In a driver, each large one takes whole granules otherwise. The memory is free when all are gone."""
        if nbytes and self.granule > ALIGNMENT:          # else nothing is saved, and a check finds more between arrays
            with self._memory_lock, suppress(MemoryError):      # the first array that has no room says so
                ptr, backing = self._take_within(nbytes)
                self._room = Memory(self, ptr, nbytes, "packed arrays", backing), ptr, ptr + nbytes
        try:
            yield
        finally:
            self._room = None

    def in_one_allocation(self, make, *arguments):
        """make(card, *arguments) for this card. The arrays that it allocates share an allocation (`packed`), whose
        bytes are counted on paper before."""
        planned = PlannedCard(self)
        with planned.packed():
            make(planned, *arguments)
        with self.packed(planned.packed_bytes):
            return make(self, *arguments)

    def _take_within(self, nbytes):
        """`_take` within the limit, or from what `packed` has taken. Raises MemoryError."""
        if self._room:
            memory, ptr, end = self._room
            if nbytes <= end - ptr:
                self._room = memory, ptr + nbytes, end
                return ptr, memory
        taken, held = self.taken, self._held(nbytes)
        if taken.limit is not None and taken.nbytes + held > taken.limit:
            raise MemoryError
        found = self._take(nbytes)
        taken.nbytes += held
        return found

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
        """Waits for the card, then gives the allocation of `array` back. Using `array` afterwards raises CardError."""
        self._check(array)
        if array.ptr != array.memory.ptr:
            raise CardError(f"{array!r} is part of a larger array: free that one")
        self.synchronize()
        self.n_freed += 1
        array.memory.release()

    def attach(self, host, name=""):
        """An Array over the bytes of `host`, a NumPy array of this machine's memory: kernels read and write them by
        their address, over the link. On a real card `host` must be page-locked (`pinned`): such memory has one address
        for the host and for all cards. Raises CardError. What the card writes is there for the host when the kernel
        has ended, or when the kernel says so with `publish` (kernels/intrinsics.py)."""
        if not (host.flags.c_contiguous and host.nbytes):
            raise CardError(f"{name or 'host memory'} must be contiguous, and not empty")
        if not self._reaches(host):
            raise CardError(f"{self.name} reads host memory only if it is page-locked; {name or 'this'} is not")
        ptr = host.ctypes.data
        with self._memory_lock:
            self.allocations[ptr] = host.nbytes, name
        return Array(Lent(self, ptr, host.nbytes, name, host), ptr, host.shape, host.dtype, name)

    def mapped(self, shape, dtype, name=""):
        """(Array, ndarray) of the same new bytes, zeros, in page-locked host memory: see `attach`."""
        host = self.pinned(shape, dtype)
        host.fill(0)
        return self.attach(host, name), host

    def _reaches(self, host):
        """Whether kernels of this card can read the memory of a NumPy array."""
        return is_pinned(host)

    def _return(self, memory):
        with self._memory_lock:
            self.allocations.pop(memory.ptr, None)
            self.taken.nbytes -= self._held(memory.nbytes)
            self._give(memory)

    def _forget(self, memory):
        with self._memory_lock:
            self.allocations.pop(memory.ptr, None)

    # -- copies --

    def download(self, array, stream=None):
        """Waits for all that is queued on `stream` now, and returns the contents of `array` as a new NumPy array."""
        host = np.empty(array.shape, array.dtype)
        self.copy_out(host, array, stream)
        return host

    def copy_in(self, dst, host, stream=None):
        """Host → card. `host` has the shape and dtype of `dst`. When `host` is read: see the top of this file."""
        self._check(dst)
        self._check_host(dst, host)
        pinned = is_pinned(host) and host.flags.c_contiguous
        stream = self.target(stream, "copy_in")
        if dst.nbytes:
            with self.observed("copy_in", stream, dst):
                self._copy_in(dst, host, pinned, stream)

    def copy_out(self, host, src, stream=None):
        """Card → host. `host` is C-contiguous and has the shape and dtype of `src`."""
        self._check(src)
        self._check_host(src, host)
        if not (host.flags.c_contiguous and host.flags.writeable):
            raise CardError(f"{src!r} needs contiguous and writeable host memory")
        stream = self.target(stream, "copy_out")
        if src.nbytes:
            with self.observed("copy_out", stream, src):
                self._copy_out(host, src, is_pinned(host), stream)

    def copy(self, dst, src, stream=None):
        """Card → card, within this card. The arrays have equally many bytes and do not overlap."""
        self._check(dst)
        self._check(src)
        if dst.nbytes != src.nbytes:
            raise CardError(f"cannot copy {src!r} into {dst!r}: {src.nbytes} and {dst.nbytes} bytes")
        stream = self.target(stream)
        stream.keep("copy", (dst, src))
        if dst.nbytes:
            with self.observed("copy", stream, dst, src):
                self._copy(dst, src, stream)

    def fill(self, array, byte, stream=None):
        """Sets every byte of `array` to `byte` (0 to 255)."""
        self._check(array)
        if not 0 <= byte <= 255:
            raise CardError(f"{array!r}: {byte} is no byte to fill with")
        stream = self.target(stream)
        stream.keep("fill", (array,))
        if array.nbytes:
            with self.observed("fill", stream, array):
                self._fill(array, byte, stream)

    def poison(self, array, stream=None):
        """Fills `array` with NaN or -1, which shows where a kernel fails to write."""
        self.fill(array, POISON, stream)

    # -- launches --

    def launch(self, kernel, grid, block, *args, shared=0, stream=None):
        """Queues `kernel` with `grid` blocks of `block` threads, each an int or a tuple of up to 3.

        shared: bytes of dynamic shared memory. An argument is an Array of this card, an int (passed as uint32), a
        float (as float32), a bool, or a NumPy scalar (as its own type). Raises LaunchError, and at the first launch
        with these types of arguments CompileError.
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
            if math.prod(threads) > function.max_threads:
                raise LaunchError(f"its launch bounds allow blocks of {function.max_threads} threads")
            params = function.pack(*values)
        except (CardError, TypeError, OverflowError, ValueError, struct.error) as error:
            raise LaunchError(f"{kernel.__name__}, grid {grid}, block {block}: {error}") from error
        stream = self.target(stream)
        stream.keep(function.name, args)
        if self.observer is None:                        # not `observed`: launches sit in hot loops
            self._enqueue(stream, function, blocks, threads, shared, params, args)
            return
        with self.observed("launch", stream, function, blocks, threads, shared):
            self._enqueue(stream, function, blocks, threads, shared, params, args)

    def _function(self, types):
        """The Function of types = (kernel, *types of its arguments)."""
        with self._loading:
            function = self._functions.get(types)
            if function is None:
                compiled = self._source(*types)(compiler.compile_kernel)
                handle, static_shared = self._load(compiled)
                pack = compiler.packer(types[1:])
                function = Function(compiled.name, pack, handle, self.max_shared - static_shared,
                                    most_threads(types[0]))
                self._functions[types] = function
        return function

    def _source(self, kernel, *types):
        """A function that can be pickled and gives the Compiled of a kernel for this card, or None.

        Its argument is `compile_kernel` of kernels/compile.py, or `find_kernel`, which looks into caches only.
        """
        return partial(_source, kernel, types, compiler.target_cc(self.cc), self.cache_dir, self._replaced)

    def replace(self, instead):
        """Kernels loaded from now on have instructions replaced. What is recorded already stays as it is.

        instead: pairs as `throttled.rewrite` takes them. Returns the pairs that held until now.
        """
        with self._loading:
            before, self._replaced = self._replaced, tuple(instead)
            self._functions.clear()
        return before

    # -- many kernels at once --

    @contextmanager
    def collecting(self):
        """Launches that this thread makes inside are not run. Yields a dict, which gets a key (types, block) for each
        kernel that the launches need. `compile_kernels` takes the dict, `load_kernel` one key."""
        thread = threading.get_ident()
        needed = self._collecting[thread] = {}
        try:
            yield needed
        finally:
            del self._collecting[thread]

    def compile_kernels(self, needed, on_done=lambda name: None, tell=None):
        """Compiles those of the kernels in `needed` (from `collecting`) that no cache has, and fills the caches.

        Several processes share the work if many are missing. on_done(name) is called for each kernel, tell(sentence)
        before and after they are compiled, if there is a `tell`. All this needs processors only, not the card.
        """
        jobs = {}
        for types, block in needed:
            source = self._source(*types)
            compiled = source(compiler.find_kernel)
            if compiled is None or not self._is_cached(compiled, block):
                jobs[types, block] = partial(_fill_caches, source, self._cache_filler(), block)
        for types, block in needed:
            if (types, block) not in jobs:
                on_done(types[0].__name__)
        tell = jobs and tell or (lambda sentence: None)
        began, kernels = time.perf_counter(), f"{len(jobs)} kernel{'s' * (len(jobs) > 1)}"
        kept = ("; later starts find what is compiled now" if jobs and compiler.can_store(self.cache_dir) else
                f", again at each start: nothing can be kept in {self.cache_dir}")
        tell(f"compiling {kernels}, which may take minutes{kept}")
        if len(jobs) >= WORTH_WORKERS and workers.own_processors() > 1:
            workers.run(jobs, lambda need: on_done(need[0][0].__name__))
        else:
            for (types, _), job in jobs.items():
                job()
                on_done(types[0].__name__)
        tell(f"compiled {kernels} in {time.perf_counter() - began:.1f} s")

    def load_kernel(self, types, block):
        """Loads a kernel that `collecting` found, so that its first launch need not. Raises CompileError."""
        self._make_ready(self._function(types), block)

    # -- record and replay --

    @contextmanager
    def record(self, name=""):
        """Yields a Recording of the launches, fills and copies within the card that this thread makes inside."""
        if self._recording is not None:
            raise CardError("a recording is being made on this card already")
        recording = self._recording = self._begin_recording()
        recording.name = name
        try:
            yield recording
        finally:
            self._recording = None
            self._end_recording(recording)

    @property
    def defers(self):
        """Whether launches of this thread are now recorded or collected, instead of run."""
        thread, recording = threading.get_ident(), self._recording
        return thread in self._collecting or recording is not None and recording.thread == thread

    @contextmanager
    def on(self, stream):
        """Operations that this thread queues inside without naming a stream go to `stream`."""
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

    def target(self, stream, outside=None):
        """The stream of an operation that was given `stream`. For None it is the recording, this thread's `on`, or the
        default stream.

        outside: the name of the operation, if it cannot be recorded; it is then refused inside `record()`.
        """
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

    # -- observation --

    @contextmanager
    def observed_by(self, observer):
        """`observer`, an Observer, is told of every operation that any thread gives this card inside."""
        if self.observer is not None:
            raise CardError(f"{self.name} is observed already")
        self.observer = observer
        try:
            yield
        finally:
            self.observer = None

    def observed(self, operation, *about):
        """The context manager for an operation: that of the observer's method `operation`, or, without an observer, one
        that does nothing."""
        observer = self.observer
        return UNOBSERVED if observer is None else getattr(observer, operation)(*about)

    def span(self, name):
        """Surrounds operations of the default stream that belong together. A trace shows them under `name`."""
        return self.observed("span", name)

    # -- checks --

    def _check(self, array):
        if array.memory.card is None:
            raise CardError(f"{array!r} was freed")
        if array.memory.card is not self:
            other = array.memory.card.name
            other = f"another card of the name {other}" if other == self.name else f"{other}, not on {self.name}"
            raise CardError(f"{array!r} is on {other}")

    @staticmethod
    def _check_host(array, host):
        if host.shape != array.shape or host.dtype != array.dtype:
            raise CardError(f"host array {host.dtype.name}{list(host.shape)} does not match {array!r}")


class PlannedCard(Card):
    """Stands for `card` in a plan. It adds up what is allocated, and does nothing else.

    `free_bytes` starts at what is free on `card` now, and falls below 0 if more is allocated than that. Code that runs
    on a card runs on a PlannedCard as well, as long as it looks at no result. Other attributes (link_gbs, like, ...)
    are read from `card`.
    """

    def __init__(self, card):
        super().__init__(card.name, card.cc, card.n_sms, card.memory_bytes, card.max_shared, card.cache_dir)
        self.card, self.kind, self.granule = card, card.kind, card.granule
        self.facts, self.describe = card.facts, card.describe
        self.default_stream = self.stream()
        self._free, self._end = card.free_bytes, ALIGNMENT
        self._small = 0                                  # bytes left of the granule that small arrays share
        self.packed_bytes = 0                            # see `packed`

    def __getattr__(self, name):
        return getattr(self.__dict__["card"], name)

    @property
    def free_bytes(self):
        return self._free

    unused_bytes = free_bytes

    def limit(self, nbytes):
        """Does nothing: `free_bytes` began within the limit of the card that this one stands for."""

    def set_aside(self, nbytes):
        """Counts as taken from now on."""
        self._free -= nbytes

    @contextmanager
    def packed(self, nbytes=0):
        """Counts what arrays take that share an allocation: afterwards, `packed_bytes` says how many bytes that has."""
        free, granule, self.granule = self._free, self.granule, ALIGNMENT
        try:
            yield
        finally:
            self.granule, self.packed_bytes = granule, free - self._free
            self._free -= -self.packed_bytes % granule

    def in_one_allocation(self, make, *arguments):
        """Counts in one go what a card counts first and then takes. `packed_bytes` stays as `packed` has left it."""
        before = self.packed_bytes
        with self.packed():
            made = make(self, *arguments)
        self.packed_bytes = before
        return made

    def _take(self, nbytes):
        if nbytes < self.granule // 2:                   # as in drivers, small allocations share a granule
            if nbytes > self._small:
                self._free -= self.granule
                self._small = self.granule
            self._small -= nbytes
        else:
            self._free -= nbytes + -nbytes % self.granule
        ptr, self._end = self._end, self._end + nbytes
        return ptr, None

    def _give(self, memory):
        pass                                             # a plan lists what was allocated, freed or not

    def pinned(self, shape, dtype):
        return np.empty(shape, dtype)

    def _reaches(self, host):
        return True

    def stream(self, name=""):
        return _PlannedStream(self)

    def launch(self, *_, **__):
        pass

    def synchronize(self):
        pass

    _upload_now = _fill_now = _copy_in = _copy_out = _copy = _fill = launch


class _PlannedStream(Stream):
    """A stream in which nothing is ever queued, so that everything is done. It serves as its own event."""

    def __init__(self, card):
        self.card = card

    done = True

    def record(self):
        return self

    def wait(self, event=None):
        return True

    synchronize = wait


def _source(kernel, types, cc, cache_dir, replaced, compile):
    """The Compiled of a kernel with throttled instructions replaced.

    compile: `compile_kernel` or `find_kernel` of kernels/compile.py. Returns None if `compile` does.
    """
    compiled = compile(kernel, types, cc, cache_dir)
    return compiled and replace(compiled, ptx=rewrite(compiled.ptx, replaced))


def _fill_caches(source, fill, block):
    """The job of a worker: puts PTX and machine code of a kernel into the caches on the disk."""
    fill(source(compiler.compile_kernel), block)


def most_threads(kernel):
    """Threads of a block for which a kernel is compiled: its launch bounds, or as many as any card takes."""
    bounds = kernel.targetoptions.get("launch_bounds") or MAX_THREADS
    return bounds if isinstance(bounds, int) else bounds[0]


@lru_cache(maxsize=4096)
def _geometry(grid, block):
    """`grid` and `block`, each an int or a tuple, as tuples of three. LaunchError: no card can launch them."""
    blocks, threads = _three(grid), _three(block)
    if not (len(blocks) == 3 and 0 < blocks[0] < 2**31 and 0 < blocks[1] < 2**16 and 0 < blocks[2] < 2**16):
        raise LaunchError("a grid is 1 to 2147483647 by 1 to 65535 by 1 to 65535 blocks")
    if not (len(threads) == 3 and min(threads) > 0 and math.prod(threads) <= MAX_THREADS and threads[2] <= 64):
        raise LaunchError(f"a block is 1 to {MAX_THREADS} threads, at most 64 of them in z")
    return blocks, threads


def _three(extent):
    extent = extent if isinstance(extent, (tuple, list)) else (extent,)
    if not all(isinstance(n, Real) and n % 1 == 0 for n in extent):
        raise LaunchError("blocks and threads are whole numbers")
    return *(int(n) for n in extent), *(1,) * (3 - len(extent))


def show_bytes(n):
    """1536 → '1.5 KB'."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if n < 1024 or unit == "GB":
            return f"{n:.1f} {unit}" if unit != "bytes" else f"{n} bytes"
        n /= 1024
