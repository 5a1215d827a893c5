"""The checking mode: memory errors and races of kernels, found without a GPU.

    card = open_cards("emulated", checked=True)[0]       # every launch of this card is checked
    with card.checking():                                # or, on any emulated card, those inside
        ...

Every access is checked before it happens. The first error breaks the card (until the end of the `with`), with a
message that tells kernel, source line, block, thread, address and instruction.

Global and local memory: an access lies within one live array and is aligned to its size. Freed memory is not
used again for a while, and arrays lie far apart, so that a wrong address is most likely in no array; one that
has strayed into another live array is not found. Nor is a constant index beyond a `cuda.local.array`, since the
compiler leaves such an access out. In shared memory an array begins at an odd multiple of its own
alignment, so that an access that needs a larger one is found, wherever an assembler may put the array.

Shared memory: an access lies within the block's shared memory. Two accesses of different threads to one
place, at least one of them a write and not both atomic, are ordered: by a barrier between them or, in one
warp, by a `syncwarp` between them. Running in lockstep orders nothing, nor do shuffles. One instruction may
write to one place from several lanes if all write the same value.

Copies (`cp.async`): from its start until the thread has waited for its group, a copy may write to its place
at any moment. So no thread may access that place, not even the one that started the copy. Where the wait ends, the
copy is a write of this thread, and ordered as such. The place of a copy that is never waited for stays closed.

Barriers: all lanes of a warp that have not returned take part, in a `syncwarp` for all lanes, too, and all warps that
have not returned are at the same barrier. A barrier of a part of the block orders the accesses of all threads.

Blocks, and between barriers the warps of a block, run one at a time, in an order drawn from a seed. Shared
and local memory start as 0xFF bytes.
"""

import ctypes
import linecache
import re
import struct
import threading
import time

import llvmlite.binding as llvm
import numpy as np
from numba import cfunc, njit

from kernels.compile import current_file

from . import native
from .emit import WARP, llvm_type
from .flow import is_barrier
from .native import LAUNCH, KernelFault
from .ptx import SIZES, Imm, Mem, Pack
from .translate import BARRIERS_BYTES, CONTEXT, CONTEXT_BYTES, GIVES_WAY
from .watching import ATOMIC, COPY, LOCAL, OBSERVER, SHARED, WRITE, Watch, Watching, find_row

# The arrays of @watch: the addresses of the lanes; STATE; the live arrays as (start, end, 0); the values that the lanes
# store, each as many bytes as the access has; how often each warp has executed `syncwarp`; a row of SHADOW numbers for
# each granule of shared memory; and how many groups of copies each thread has committed. A granule is as large as the
# kernel's smallest access.
LANES, STATE, ARRAYS, VALUES, PHASES, SHADOWS, GROUPS = range(7)
(N_ARRAYS, SHARED_BYTES, GRANULE_BITS, LOCAL_START, LOCAL_BYTES, WARP_NUMBER, EPOCH, CLOCK, LATEST,
 ERROR, ACCESS, LANE, ADDRESS, OTHER_THREAD, OTHER_ACCESS, N_STATE) = range(16)
# In a row: the granule's last write and two reads. Each of them is thread + 1, the epoch (a number for each stretch
# between barriers of a block), the warp's phase, and the access. The write also has its time and whether it was atomic.
# A copy that may still be on its way is a write with the epoch ON_ITS_WAY, and has its group in place of the phase.
WRITER, READER, OTHER_READER, TIME_OF_WRITE, ATOMIC_WRITE, SHADOW = 0, 4, 8, 12, 13, 14
ON_ITS_WAY = -1
MISALIGNED, OUTSIDE, RACE, DIVERGENT, ENDLESS = 1, 2, 3, 4, 5
# What goes beyond is taken for a loop that never ends: accesses and rounds of loops of a warp between two barriers,
# some ten seconds of checks, and barriers of a block.
MOST_ACCESSES, MOST_BARRIERS = 1 << 26, 1 << 17
FAR = 1 << 24                   # bytes from an array, beyond which an address has nothing to do with it
# Kinds beside those of watching.py. BARRIER: the mask is the missing lanes. WAIT: for all groups of copies but as many
# as the size says. ROUND: of a loop.
BARRIER, COMMIT, WAIT, ROUND = 64, 128, 256, 512


# ---- the code that checks ----------------------------------------------------------------------------------

class Checking(Watching):
    """A translation that calls `check_access` before each access.

    Its notes: (source file,), (bits of a granule,), the sizes of the kernel's constants in bytes, the numbers and
    lines of its barriers, (start, bytes) of its arrays in shared memory, those of a launch without bytes, and then
    (line, instruction, bytes, state space or "") of each access.
    """

    observer = "qengine_check_access"

    def __init__(self, ptx, block, target):
        super().__init__(ptx, block, target)
        file = re.search(r'\.file\s+1\s+"([^"]*)"', ptx)
        self.file = file[1] if file else "unknown file"
        self.smallest = 16                      # bytes of the smallest access that may be to shared memory
        self.barriers = []

    def notes(self):
        accesses = [(instr.line, instr.text, access_bytes(instr), space_of(instr)) for instr in self.accesses]
        sizes = tuple(variable.size for variable in self.globals)
        variables = (*self.module.variables.values(), *self.function.variables)
        shared = tuple((self.places[v.name], v.size) for v in variables if isinstance(self.places.get(v.name), int))
        return (self.file,), (self.smallest.bit_length() - 1,), sizes, tuple(self.barriers), shared, *accesses

    def shared_start(self, end, align):
        """At an odd multiple of its alignment, the worst place that an assembler may give it."""
        start = super().shared_start(end, align)
        return start + align if align < 16 and start % (2 * align) == 0 else start

    def _global_lines(self):
        yield from super()._global_lines()
        addresses = ", ".join(f"i64 ptrtoint (ptr @g{i} to i64)" for i in range(len(self.globals)))
        yield f"@constants = global [{len(self.globals)} x i64] [{addresses}]"

    def _body(self):
        return [*super()._body(), "wrong:", "  ret i32 -1"]

    def note_access(self, instr, place, size):
        if not {"global", "local", "const"} & set(instr.mods):
            self.smallest = min(self.smallest, size)
            if instr.name == "st":
                self._show_values(instr)
        super().note_access(instr, place, size)

    def _show_values(self, instr):
        items = next(o for o in instr.operands if not isinstance(o, Mem))
        t, items = llvm_type(instr.mods[-1]), items.items if isinstance(items, Pack) else (items,)
        values = self.interleave(t, [self.vector(item, t) for item in items])
        self.do(f"store <{WARP * len(items)} x {t}> {values}, ptr {self.watched(VALUES)}, align 8")

    def tell_observer(self, instr, size, kind, mask):
        """Stops the warp where the observer says so."""
        stop = super().tell_observer(instr, size, kind, mask)
        self.n += 1
        fine = self.compare("eq", "i32", 1, stop, "0")
        self.do(f"br i1 {fine}, label %fine{self.n}, label %wrong")
        self.label(f"fine{self.n}")

    def _block(self, index):
        self.at = self.flow.blocks[index]
        super()._block(index)

    def op_bar(self, instr):
        """`bar.warp.sync`: a new phase of the warp. One for all lanes orders nothing if a lane is elsewhere."""
        mask = instr.operands[-1]
        if isinstance(mask, Imm) and mask.value & 0xFFFFFFFF == 0xFFFFFFFF:
            self._check_everyone_is_here(self.at, instr)
        phase = self.let(f"getelementptr i64, ptr {self.watched(PHASES)}, i32 %warp")
        count = self.op("add", "i64", 1, self.let(f"load i64, ptr {phase}"), "1")
        self.do(f"store i64 {count}, ptr {phase}")

    def op_cp(self, instr):
        """The end of a group of copies, or a wait for groups. `wait_all` waits also for the one that has no end yet."""
        waits = {"commit_group": None, "wait_all": -1}
        groups = waits[instr.mods[1]] if instr.mods[1] in waits else instr.operands[0].value
        kind, size = (COMMIT, 0) if groups is None else (WAIT, groups)
        self.tell_observer(instr, size, kind, self.mask or "-1")

    def note_partial_barrier(self, complete):
        """Such a barrier orders all accesses before it and after it, also those of warps that have no part in it."""
        epoch = self.let(f"getelementptr i64, ptr {self.watched(STATE)}, i64 {EPOCH}")
        count = self.op("add", "i64", 1, self.let(f"load i64, ptr {epoch}"),
                        self.resize("i1", "i64", 1, complete))
        self.do(f"store i64 {count}, ptr {epoch}")

    def _terminate(self, block):
        if block.end is not None and is_barrier(block.end):
            self.barriers.append((len(self.resumes) + 1, block.end.line))
            self._check_everyone_is_here(block, block.end)
        if block.index in self.flow.loops:
            self.tell_observer(block.end or block.instrs[-1], 1, ROUND, self.mask or "-1")
        super()._terminate(block)

    def _check_everyone_is_here(self, block, instr):
        """Checks at a barrier in a block that no lane waits elsewhere, except where it has only to return."""
        places = {i for i in self.flow.waiting[block.index] if not self._returns(i)}
        missing = "0"
        for other in sorted(places & self.flow.masked):
            missing = self.op("or", "i32", 1, missing, self.let(f"load i32, ptr %waiting{other}"))
        if places - self.flow.masked and self.mask:     # a place where all lanes meet: none has returned
            absent = self.op("xor", "i32", 1, self.start_mask or "-1", self.mask)
            missing = self.op("or", "i32", 1, missing, absent)
        if missing != "0":
            self.tell_observer(instr, 1, BARRIER, missing)

    def _returns(self, index):
        block = self.flow.blocks[index]
        return not block.instrs and not block.targets and block.end.name in ("ret", "exit")


def access_bytes(instr):
    """The bytes that one lane reads or writes."""
    size = SIZES.get(instr.mods[-1], 1) if instr.mods else 1
    return size * (4 if "v4" in instr.mods else 2 if "v2" in instr.mods else 1)


def space_of(instr):
    """The state space that an access names, or ""."""
    return next((space for space in ("shared", "local") if space in instr.mods), "")


@njit
def fail(state, error, access, lane, address):
    state[ERROR], state[ACCESS], state[LANE], state[ADDRESS] = error, access, lane, address
    return 1


@njit
def unordered(shadow, at, state, phases, thread):
    """Whether the access at shadow[at:] was by a thread other than `thread`, and nothing orders an access by
    `thread` now after it."""
    other = shadow[at] - 1
    if other >= 0 and shadow[at + 1] == ON_ITS_WAY:
        return True
    if other < 0 or other == thread or shadow[at + 1] != state[EPOCH]:
        return False
    return other // WARP != thread // WARP or shadow[at + 2] == phases[thread // WARP]


@njit
def record(shadow, at, state, phases, thread, access):
    shadow[at], shadow[at + 1], shadow[at + 2] = thread + 1, state[EPOCH], phases[thread // WARP]
    shadow[at + 3] = access


@njit
def record_read(shadow, row, state, phases, thread, access):
    """Keeps the last read, and one by another warp if there was any. Two reads are enough: of reads by two warps,
    every later write races with at least one."""
    last, other = row + READER, row + OTHER_READER
    last_warp = (shadow[last] - 1) // WARP
    if shadow[last + 1] == state[EPOCH] and shadow[last] - 1 != thread:
        keep = last_warp == thread // WARP and shadow[other + 1] == state[EPOCH] \
            and (shadow[other] - 1) // WARP != last_warp
        if not keep:
            for i in range(4):
                shadow[other + i] = shadow[last + i]
    record(shadow, last, state, phases, thread, access)


@njit
def same_value(values, size, start, end, lane, address, other, other_address):
    """Whether two lanes of one instruction store the same bytes at start:end."""
    for byte in range(start, end):
        a, b = lane * size + byte - address, other * size + byte - other_address
        if (values[a >> 3] >> 8 * (a & 7) ^ values[b >> 3] >> 8 * (b & 7)) & 255:
            return False
    return True


@njit
def check_shared(watch, access, size, kind, lane, thread, shared):
    """Whether a lane's access is ordered after all recorded accesses that conflict with it. If it is, it is
    recorded."""
    lanes, state, phases, shadow = watch[LANES], watch[STATE], watch[PHASES], watch[SHADOWS]
    bits, address = state[GRANULE_BITS], lanes[lane] - shared
    for granule in range(address >> bits, (address + size - 1 >> bits) + 1):
        row, against = granule * SHADOW, -1
        if unordered(shadow, row + WRITER, state, phases, thread):
            if shadow[row + TIME_OF_WRITE] == state[CLOCK]:
                other = (shadow[row + WRITER] - 1) % WARP
                same = same_value(watch[VALUES], size, granule << bits, granule + 1 << bits, lane, address,
                                  other, lanes[other] - shared)
                if not kind & ATOMIC and not same:
                    against = row + WRITER
            elif not (kind & ATOMIC and shadow[row + ATOMIC_WRITE]):
                against = row + WRITER
        if kind & WRITE:
            for reader in (row + READER, row + OTHER_READER):
                if unordered(shadow, reader, state, phases, thread):
                    against = reader
        if against >= 0:
            state[OTHER_THREAD], state[OTHER_ACCESS] = shadow[against] - 1, shadow[against + 3]
            return False
        if kind & WRITE:
            record(shadow, row + WRITER, state, phases, thread, access)
            shadow[row + TIME_OF_WRITE], shadow[row + ATOMIC_WRITE] = state[CLOCK], kind & ATOMIC
            if kind & COPY:
                shadow[row + WRITER + 1], shadow[row + WRITER + 2] = ON_ITS_WAY, watch[GROUPS][thread]
        else:
            record_read(shadow, row, state, phases, thread, access)
    return True


@njit
def finish_copies(watch, mask, n_left):
    """The running lanes have waited: their copies are writes of this moment, but not those of each lane's last `n_left`
    groups."""
    state, shadow, groups = watch[STATE], watch[SHADOWS], watch[GROUPS]
    warp = state[WARP_NUMBER]
    for granule in range((state[SHARED_BYTES] >> state[GRANULE_BITS]) + 1):
        at = granule * SHADOW + WRITER
        thread = shadow[at] - 1
        if shadow[at + 1] == ON_ITS_WAY and thread // WARP == warp and mask >> thread % WARP & 1 \
                and shadow[at + 2] < groups[thread] - n_left:
            shadow[at + 1], shadow[at + 2] = state[EPOCH], watch[PHASES][warp]


@cfunc(OBSERVER, cache=True)
def check_access(watch, access, size, kind, mask, shared):
    """Checks one instruction of a warp; the first error is written to STATE."""
    lanes, state, arrays = watch[LANES], watch[STATE], watch[ARRAYS]
    state[CLOCK] += 1
    if kind & WAIT:
        finish_copies(watch, mask, size)
        return 0
    row = -1
    for lane in range(WARP):
        if not mask >> lane & 1:
            continue
        if state[CLOCK] > state[LATEST]:
            return fail(state, ENDLESS, access, lane, 0)
        if kind & ROUND:
            return 0
        if kind & BARRIER:
            return fail(state, DIVERGENT, access, lane, 0)
        address = lanes[lane]
        thread = state[WARP_NUMBER] * WARP + lane
        if kind & COMMIT:
            watch[GROUPS][thread] += 1
            continue
        own = state[LOCAL_START] + thread * state[LOCAL_BYTES]
        if address & (size - 1):
            return fail(state, MISALIGNED, access, lane, address)
        if shared <= address and address + size <= shared + state[SHARED_BYTES]:
            if not check_shared(watch, access, size, kind, lane, thread, shared):
                return fail(state, RACE, access, lane, address)
        elif own <= address and address + size <= own + state[LOCAL_BYTES]:
            continue
        elif kind & (SHARED | LOCAL):
            return fail(state, OUTSIDE, access, lane, address)
        else:
            if row < 0 or not arrays[row] <= address < arrays[row + 1]:
                row = find_row(arrays, state[N_ARRAYS], address)
            if row < 0 or address + size > arrays[row + 1]:
                return fail(state, OUTSIDE, access, lane, address)
    return 0


llvm.add_symbol(Checking.observer, check_access.address)


# ---- running it --------------------------------------------------------------------------------------------

_lock = threading.Lock()                        # a kernel's @watch belongs to one launch at a time


def run(launch, card):
    """Executes a native.Launch on an EmulatedCard, checking. Raises KernelFault, which says what is wrong where."""
    with _lock:
        _Run(launch, card).run()


class _Run:
    """One launch."""

    def __init__(self, launch, card):
        code = launch.code.kernel.translated_by(Checking).code(launch.code.facts.block)
        launch = launch.with_code(code)
        self.launch, self.card, self.code = launch, card, code
        (file,), (granule_bits,), sizes, barriers, shared, *self.accesses = self.code.facts.notes
        self.file = current_file(file)          # the notes may come from another checkout
        self.barriers = dict(barriers)
        self.shared_arrays = [(start, launch.dynamic if size is None else size) for start, size in shared]
        form = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
        self.warp = form(self.code.address)
        constants = (ctypes.c_int64 * len(sizes)).from_address(self.code.variable("constants"))
        self.arrays = dict(card.allocations)    # start -> (bytes, name)
        self.arrays |= {start: (nbytes, "a constant") for start, nbytes in zip(constants, sizes)}
        live = sorted((start, start + nbytes, 0) for start, (nbytes, _) in self.arrays.items()) or [(0, 0, 0)]
        self.shared, self.local, self.frames = map(
            _aligned, (launch.shared_bytes, launch.local_bytes, launch.frame_bytes))
        self.state = np.zeros(N_STATE, np.int64)
        self.state[[N_ARRAYS, SHARED_BYTES, GRANULE_BITS]] = len(live), launch.shared_bytes, granule_bits
        self.state[[LOCAL_START, LOCAL_BYTES]] = self.local.ctypes.data, self.code.facts.local_bytes
        self.watch = Watch(self.code)
        self.watch.set(LANES, np.zeros(WARP, np.int64))
        self.watch.set(STATE, self.state)
        self.watch.set(ARRAYS, np.array(live, np.int64))
        self.watch.set(VALUES, np.zeros(WARP * 16 // 8, np.int64))
        self.watch.set(PHASES, np.zeros(self.code.n_warps, np.int64))
        self.shadows = np.zeros(((launch.shared_bytes >> granule_bits) + 1, SHADOW), np.int64)
        self.watch.set(SHADOWS, self.shadows)
        self.watch.set(GROUPS, np.zeros(WARP * self.code.n_warps, np.int64))
        self.context = ctypes.create_string_buffer(CONTEXT_BYTES)
        self._tell("params", "q", ctypes.c_int64.from_buffer(launch.buffer, LAUNCH["params"]).value)
        for name in ("shared", "local", "frames"):
            self._tell(name, "q", getattr(self, name).ctypes.data)
        self._tell("nctaid", "3i", *launch.grid)
        self._tell("dynamic", "i", launch.dynamic)

    def _tell(self, name, form, *values):
        struct.pack_into(form, self.context, CONTEXT[name], *values)

    def run(self):
        n_blocks = self.launch.n_blocks
        for number in self.card.random.sample(range(n_blocks), n_blocks):
            self.block(number)

    def block(self, number):
        """Runs every warp until its next barrier, in random order, and so on until all warps have returned."""
        x, y, _ = self.launch.grid
        self.number = (number % x, number // x % y, number // (x * y))
        self._tell("ctaid", "3i", *self.number)
        self._tell("barriers", f"{BARRIERS_BYTES}x")
        self.shared[:], self.local[:], self.shadows[:] = 0xFF, 0xFF, 0
        at = dict.fromkeys(range(self.code.n_warps), 0)     # warp -> the barrier it waits at; 0: none yet
        last_epoch = self.state[EPOCH] + MOST_BARRIERS
        while at:
            if self.state[EPOCH] > last_epoch:
                raise KernelFault(f"{self.explain_barriers(at)}, and was at {MOST_BARRIERS:,} before: "
                                  "does its loop end?")
            self.state[EPOCH] += 1
            for warp in self.card.random.sample(list(at), len(at)):
                at[warp] = self.step(warp, at[warp])
            self.finish_spinning(at)
            at = {warp: barrier for warp, barrier in at.items() if barrier}
            if len(set(at.values())) > 1:
                raise KernelFault(self.explain_barriers(at))

    def step(self, warp, resume):
        """Runs a warp on from `resume`; what the warp returns."""
        self.state[[WARP_NUMBER, LATEST]] = warp, self.state[CLOCK] + MOST_ACCESSES
        result = self.warp(self.context, warp, resume & ~GIVES_WAY)
        if result < 0:
            raise KernelFault(self.explain())
        return result

    def finish_spinning(self, at):
        """Runs the warps that have given way on, one after another, until all are at a barrier or have returned."""
        moved = time.monotonic()
        while spinning := [warp for warp, resume in at.items() if resume & GIVES_WAY]:
            for warp in self.card.random.sample(spinning, len(spinning)):
                at[warp] = self.step(warp, at[warp])
                moved = moved if at[warp] & GIVES_WAY else time.monotonic()
            if time.monotonic() - moved > native.PATIENCE:
                raise KernelFault(native.explain(self.launch, at[warp]))

    # -- words --

    def explain(self):
        """The message for the error in STATE."""
        error, access, lane, address, other, other_access = self.state[ERROR:N_STATE].tolist()
        if not error:
            return f"{self.launch.name}, block {self.number}: stopped at a trap"
        line, text, nbytes, space = self.accesses[access]
        thread = self.thread(WARP * int(self.state[WARP_NUMBER]) + lane)
        head = f"{self.launch.name} ({self.file}, line {line}), block {self.number}, thread {thread}"
        if error == DIVERGENT:
            return f"{head}: does not take part in a barrier at which other lanes of its warp wait (`{text}`)"
        if error == ENDLESS:
            return (f"{head}: is still here after {MOST_ACCESSES:,} accesses and rounds: does the loop end?\n"
                    f"    line {line}: {source_line(self.file, line)}")
        what = f"{_verb(text)} {nbytes} byte{'s' * (nbytes > 1)} at {address:#x}, {self.where(address, space)}"
        if error == MISALIGNED:
            what += f": not a multiple of {nbytes}"
        elif error == RACE:
            return f"{head}: {what}: {self.explain_race(access, self.thread(other), other_access)}"
        return f"{head}: {what} (`{text}`)\n    line {line}: {source_line(self.file, line)}"

    def explain_race(self, access, other, other_access):
        """Who else was there, doing what in which line. The lines tell more of it than their instructions."""
        line, text, *_ = self.accesses[access]
        other_line, other_text, *_ = self.accesses[other_access]
        who = f"a race with {'a copy of ' * (_verb(other_text) == 'copies')}thread {other}, which "
        at_once = other_access == access and _verb(text) == "writes"
        who += "writes there at the same time" if at_once else f"{_verb(other_text)} there in line {other_line}"
        if line == other_line and not at_once and "(" in source_line(self.file, line):     # PTX does not say which
            who += ", or in a device function that this line calls"
        return "\n    line ".join([who, *(f"{number}: {source_line(self.file, number)}"
                                        for number in dict.fromkeys((line, other_line)))])

    def explain_barriers(self, at):
        waiting = ", ".join(f"warp {warp} in line {self.barriers[at[warp]]}" for warp in sorted(at))
        where = f"{self.launch.name} ({self.file}), block {self.number}"
        return f"{where}: waits at {'different barriers' if len(set(at.values())) > 1 else 'a barrier'}, {waiting}"

    def thread(self, number):
        """(x, y, z) of a thread of the block."""
        x, y, _ = self.code.facts.block
        return number % x, number // x % y, number // (x * y)

    def where(self, address, space):
        """What lies at an address, or nearest to it, in words. space: which the access names, or ""."""
        offset = address - self.shared.ctypes.data
        if space == "shared" or 0 <= offset < len(self.shared):
            return self.where_in_shared(offset)
        if space == "local":
            return f"not in the thread's {self.code.facts.local_bytes} bytes of local memory"
        for start, nbytes, name in self.card.freed():
            if start <= address < start + nbytes:
                return f"byte {address - start} of {name or 'an array'}, which was freed"
        if not self.arrays:
            return "where no array is"
        start = min(self.arrays, key=lambda s: max(s - address, address - s - self.arrays[s][0]))
        nbytes, name = self.arrays[start]
        if not -FAR < address - start < nbytes + FAR:
            return "far from every array"
        return f"byte {address - start} of {name or 'an array'} ({nbytes} bytes)"

    def where_in_shared(self, offset):
        """The same for a byte of the block's shared memory, or beyond."""
        if not self.shared_arrays:
            return "where no shared array is"
        start, nbytes = min(self.shared_arrays, key=lambda a: max(a[0] - offset, offset - a[0] - a[1] + 1))
        return f"byte {offset - start} of a shared array ({nbytes} bytes)"


def source_line(file, number):
    """The text of a line of a file. PTX names a notebook's cell without its folder (kernels/compile.py), so it is
    looked up among the files that Python knows."""
    names = (name for name in linecache.cache if name.rpartition("/")[2] == file)
    return linecache.getline(next(names, file), number).strip()


def _verb(text):
    opcode = text.split()[1 if text.startswith("@") else 0]
    return {"ld": "reads", "st": "writes", "cp": "copies"}.get(opcode.split(".")[0], "updates")


def _aligned(nbytes):
    """`nbytes` of memory that start at a multiple of 256."""
    memory = np.empty(nbytes + 256, np.uint8)
    start = -memory.ctypes.data % 256
    return memory[start:start + nbytes]
