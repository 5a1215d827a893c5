"""LLVM IR -> machine code, cached on disk; and launches, executed on CPU threads without Python in between.

    kernel = load(ptx, cache_dir)                       # nothing is compiled yet
    launch = kernel.prepare(grid, block, params, shared_bytes)
    execute([launch, ...], n_workers)                   # in order, each after the one before; until all are done

A launch's blocks are taken from a counter by all workers: the calling thread, and helper threads that sleep
on a semaphore between calls and hold no Python lock while they work.
"""

import ctypes
import functools
import hashlib
import inspect
import json
import threading
from dataclasses import asdict, replace
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

from kernels import compile as compiler

from .translate import (BARRIERS_BYTES, CONTEXT, CONTEXT_BYTES, GIVES_WAY, Target, Translated, Translator,
                        static_shared_bytes,
                        translate)

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()

# Byte offsets in the structs that Python and the worker share.
LAUNCH = {"warp": 0, "params": 8, "grid": 16, "n_warps": 28, "n_blocks": 32, "next": 40, "done": 48,
          "share": 56, "dynamic": 64, "patience": 68, "partial": 72}
LAUNCH_BYTES = 80
PROGRAM = {"n": 0, "failed": 8, "launches": 16, "why": 24}
SCRATCH = {"shared": 0, "local": 8, "frames": 16, "states": 24}
POOL = {"semaphore": 0, "program": 64, "attached": 72, "n_helpers": 76}


# Seconds in which all warps of a block do nothing but give way to each other until the launch is given up.
PATIENCE = 10


class KernelFault(RuntimeError):
    """A kernel executed `trap`, or waits for ever. The message names the kernel."""


@functools.cache
def host():
    """The Target of this machine."""
    features = llvm.get_host_cpu_features()
    avx512 = all(features.get(f) for f in ("avx512f", "avx512bw", "avx512vl", "avx512dq"))
    return Target(llvm.get_process_triple(), llvm.get_host_cpu_name(), features.flatten(), avx512,
                  avx512 and bool(features.get("avx512vnni")))


@functools.cache
def generic():
    """This machine without AVX-512: the code path of older CPUs."""
    off = ",".join(f"-{f}" for f in llvm.get_host_cpu_features() if f.startswith("avx512"))
    return replace(host(), features=f"{host().features},{off}" if off else host().features, avx512=False,
                   vnni=False)


def target_machine(target, level=2):
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=level, jit=True, codemodel="jitdefault")


def compile_object(ir, target, level=2):
    """Optimises LLVM IR text, 0 not at all to 2, and returns the machine code as an object file's bytes."""
    module = llvm.parse_assembly(ir)
    machine = target_machine(target, level)
    options = llvm.create_pipeline_tuning_options(speed_level=level)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return machine.emit_object(module)


def _loaded(data, target):
    """An engine that holds an object file's code; it must outlive every use of its addresses."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine(target))
    engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    engine.finalize_object()
    return engine


# ---- the disk cache ----------------------------------------------------------------------------------------

# Files that change nothing about the usual translation.
_WRITE_NO_CODE = ("card.py", "cards.py", "estimate.py", "watching.py", "counting.py", "checking.py")


@functools.cache
def _version(translator):
    """Everything but the kernel and the target that decides the machine code: this package and LLVM."""
    digest = hashlib.sha256(f"{translator.__name__} {llvmlite.__version__} {llvm.llvm_version_info}".encode())
    own = {inspect.getfile(part) for part in translator.__mro__[:-1]}
    for source in sorted(Path(__file__).parent.glob("*.py")):
        if source.name not in _WRITE_NO_CODE or str(source) in own:
            digest.update(source.read_bytes())
    return digest.hexdigest()


def _path(ptx, block, target, cache_dir, translator):
    key = hashlib.sha256("\0".join((ptx, str(block), str(target), _version(translator))).encode()).hexdigest()
    return Path(cache_dir) / f"{key}.o"


def is_cached(ptx, block, cache_dir, translator):
    """Whether the machine code of a kernel for this machine and blocks of three extents is on the disk."""
    return _path(ptx, block, host(), cache_dir, translator).exists()


def _cached(ptx, block, target, cache_dir, translator):
    """(Translated without its IR, object file) of a kernel, from the disk where possible."""
    path = _path(ptx, block, target, cache_dir, translator) if cache_dir else None
    content = compiler.load(path) if path else None
    if content is not None:
        header, data = content.split(b"\n", 1)
        return Translated(**{k: _tuples(v) for k, v in json.loads(header).items()}), data
    translated = translate(ptx, block, target, translator)
    data = compile_object(translated.ir, target, translator.level)
    translated = replace(translated, ir="")
    if path:
        compiler.store(path, json.dumps(asdict(translated)).encode() + b"\n" + data)
    return translated, data


def _tuples(value):
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


# ---- kernels and launches ----------------------------------------------------------------------------------

class Code:
    """Machine code of one kernel for one block shape."""

    def __init__(self, kernel, block):
        self.kernel = kernel
        self.facts, data = _cached(kernel.ptx, block, kernel.target, kernel.cache_dir, kernel.translator)
        self._engine = _loaded(data, kernel.target)
        self.address = self._engine.get_function_address("warp")
        self.n_warps = -(-block[0] * block[1] * block[2] // 32)

    def variable(self, name):
        """The address of a variable that the code defines."""
        return self._engine.get_global_value_address(name)


class Launch:
    """A kernel with its grid and arguments, ready to execute any number of times."""

    def __init__(self, code, grid, params, shared_bytes):
        facts = code.facts
        if len(params) != facts.params_bytes:
            raise ValueError(f"{facts.name}: {len(params)} bytes of parameters, "
                             f"{facts.params_bytes} expected")
        self.code, self.name = code, facts.name.removeprefix("kernel_")
        self.grid, self.params, self.dynamic = grid, params, shared_bytes
        self.shared_bytes = facts.shared_bytes + shared_bytes
        self.local_bytes = facts.local_bytes * 32 * code.n_warps
        self.frame_bytes = facts.frame_bytes * code.n_warps
        self.n_blocks = grid[0] * grid[1] * grid[2]
        self._params = ctypes.create_string_buffer(bytes(params), max(len(params), 1))
        self.buffer = ctypes.create_string_buffer(LAUNCH_BYTES)
        self.address = ctypes.addressof(self.buffer)
        for name, kind, values in (("warp", ctypes.c_int64, [code.address]),
                                   ("params", ctypes.c_int64, [ctypes.addressof(self._params)]),
                                   ("grid", ctypes.c_int32, grid),
                                   ("n_warps", ctypes.c_int32, [code.n_warps]),
                                   ("n_blocks", ctypes.c_int64, [self.n_blocks]),
                                   ("dynamic", ctypes.c_int32, [shared_bytes]),
                                   ("patience", ctypes.c_int32, [PATIENCE]),
                                   ("partial", ctypes.c_int32, [facts.partial_barriers])):
            (kind * len(values)).from_buffer(self.buffer, LAUNCH[name])[:] = values

    def with_code(self, code):
        """The same launch of another translation of the kernel."""
        return Launch(code, self.grid, self.params, self.dynamic)


class NativeKernel:
    """A kernel of which code is made for each block shape on first use."""

    def __init__(self, ptx, cache_dir=None, target=None, translator=Translator):
        self.ptx, self.cache_dir, self.target, self.translator = ptx, cache_dir, target or host(), translator
        self._codes = {}

    def translated_by(self, translator):
        """The same kernel in another translation."""
        return load(self.ptx, self.cache_dir, self.target, translator)

    @functools.cached_property
    def static_shared(self):
        """Bytes of static shared memory per block."""
        return static_shared_bytes(self.ptx)

    def code(self, block):
        block = (tuple(block) + (1, 1))[:3]
        if block not in self._codes:
            self._codes[block] = Code(self, block)
        return self._codes[block]

    def prepare(self, grid, block, params, shared_bytes=0):
        """A Launch. grid, block: tuples of up to 3; params: bytes of the parameter buffer; shared_bytes:
        dynamic."""
        return Launch(self.code(block), (tuple(grid) + (1, 1))[:3], params, shared_bytes)


@functools.lru_cache(maxsize=4096)
def load(ptx, cache_dir=None, target=None, translator=Translator):
    """The NativeKernel of a PTX module with one kernel; machine code is kept under cache_dir, if given."""
    return NativeKernel(ptx, cache_dir, target, translator)


class Program:
    """A sequence of launches, executed in order."""

    def __init__(self, launches):
        # Each place in the sequence counts its own blocks, also where one launch stands twice.
        self.launches = [x if x not in launches[:i] else x.with_code(x.code)
                         for i, x in enumerate(launches)] \
            if len(set(launches)) < len(launches) else list(launches)
        self._list = (ctypes.c_void_p * max(len(self.launches), 1))(*[x.address for x in self.launches])
        self.buffer = (ctypes.c_int64 * 4)(len(self.launches), 0, ctypes.addressof(self._list), 0)
        self.address = ctypes.addressof(self.buffer)
        need = lambda name: max((getattr(x, name) for x in self.launches), default=0)
        self.needs = (need("shared_bytes"), need("local_bytes"), need("frame_bytes"),
                      4 * max((x.code.n_warps for x in self.launches), default=0))
        # Waking a helper costs about as much as running this many warps of a small kernel.
        self.parallel = any(x.n_blocks > 1 for x in self.launches) and \
            sum(x.n_blocks * x.code.n_warps for x in self.launches) >= 32


def in_order(launches):
    """The launches of a Program or list, one by one."""
    return launches.launches if isinstance(launches, Program) else launches


def explain(launch, why):
    """What a launch says whose block ended with `why`: -1, or what a warp returned that gave way too
    often."""
    if why < 0:
        return f"{launch.name} stopped at a trap"
    line, text = next(spin[1:] for spin in launch.code.facts.spins if spin[0] == why & ~GIVES_WAY)
    return (f"{launch.name}, line {line}: waits for ever, for what no thread of a running block writes "
            f"(`{text}`). Blocks run one after the other, and lanes of a warp together")


def execute(launches, n_workers=1):
    """Runs a Program or a list of Launches to the end. Raises KernelFault if one traps; those after it do not
    run."""
    program = launches if isinstance(launches, Program) else Program(launches)
    _pool().execute(program, n_workers)


# ---- workers -----------------------------------------------------------------------------------------------

class _Scratch:
    """What one worker needs to run blocks: shared and local memory, frames and the states of warps."""

    def __init__(self):
        self.pointers = (ctypes.c_int64 * 4)()
        self.sizes = [-1] * 4
        self.memory = [None] * 4
        self.address = ctypes.addressof(self.pointers)

    def fit(self, needs):
        for i, n in enumerate(needs):
            if n > self.sizes[i]:
                self.memory[i] = ctypes.create_string_buffer(n + 128)
                self.pointers[i] = -(-ctypes.addressof(self.memory[i]) // 64) * 64
                self.sizes[i] = n


class _Pool:
    """The helper threads of this process. One program runs at a time."""

    def __init__(self):
        self._lock = threading.Lock()
        self._engine = _loaded(compile_object(_runtime_ir(host()), host()), host())
        address = self._engine.get_function_address
        self._run = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3, ctypes.c_int32)(address("run"))
        self._help = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 2)(address("help"))
        self._struct = ctypes.create_string_buffer(128 + 64)
        self._address = -(-ctypes.addressof(self._struct) // 64) * 64
        ctypes.CFUNCTYPE(None, ctypes.c_int64)(address("prepare_pool"))(self._address)
        self._scratch = [_Scratch()]
        self._threads = []

    def execute(self, program, n_workers):
        with self._lock:
            helpers = n_workers - 1 if program.parallel else 0
            self._hire(helpers)
            for scratch in self._scratch[:helpers + 1] if helpers == len(self._threads) else self._scratch:
                scratch.fit(program.needs)
            self._run(self._address, program.address, self._scratch[0].address, helpers)
            failed, program.buffer[1] = program.buffer[1], 0
        if failed:
            raise KernelFault(explain(program.launches[failed - 1], program.buffer[3]))

    def _hire(self, n):
        while len(self._threads) < n:
            self._scratch.append(_Scratch())
            thread = threading.Thread(target=self._help, args=(self._address, self._scratch[-1].address),
                                      daemon=True)
            thread.start()
            self._threads.append(thread)


@functools.cache
def _pool():
    return _Pool()


def _runtime_ir(target):
    """The worker, as LLVM IR: runs a launch's blocks, a block's warps between barriers, and launches in
    order."""
    x86 = target.triple.startswith(("x86", "i386"))
    pause = "call void @llvm.x86.sse2.pause()" if x86 else "fence seq_cst"
    declare = "declare void @llvm.x86.sse2.pause()" if x86 else ""
    at = lambda base, offset: f"getelementptr i8, ptr {base}, i64 {offset}"
    return f"""target triple = "{target.triple}"
declare i32 @sem_init(ptr, i32, i32)
declare i32 @sem_post(ptr)
declare i32 @sem_wait(ptr)
declare i32 @sched_yield()
declare i32 @llvm.ctlz.i32(i32, i1)
declare i64 @llvm.umax.i64(i64, i64)
declare i64 @time(ptr)
{declare}

; Runs one block: every warp until its first barrier, then every warp that waits, until none waits. Warps that
; have given way run before those at a barrier. -1 after a trap, and where all only give way for too long what
; the last of them returned.
define internal i32 @block(ptr %launch, i64 %number, ptr %scratch) {{
entry:
  %context = alloca [{CONTEXT_BYTES} x i8], align 64
  %params.from = {at("%launch", LAUNCH["params"])}
  %params = load ptr, ptr %params.from
  store ptr %params, ptr %context
  %partial.from = {at("%launch", LAUNCH["partial"])}
  %partial = load i32, ptr %partial.from
  %whole = icmp eq i32 %partial, 0
  br i1 %whole, label %prepare, label %partial.barriers
partial.barriers:
  %barriers = {at("%context", CONTEXT["barriers"])}
  store <{BARRIERS_BYTES} x i8> zeroinitializer, ptr %barriers, align 64
  br label %prepare
prepare:
  %shared = load ptr, ptr %scratch
  %shared.to = {at("%context", CONTEXT["shared"])}
  store ptr %shared, ptr %shared.to
  %local.from = {at("%scratch", SCRATCH["local"])}
  %local = load ptr, ptr %local.from
  %local.to = {at("%context", CONTEXT["local"])}
  store ptr %local, ptr %local.to
  %frames.from = {at("%scratch", SCRATCH["frames"])}
  %frames = load ptr, ptr %frames.from
  %frames.to = {at("%context", CONTEXT["frames"])}
  store ptr %frames, ptr %frames.to
  %states.from = {at("%scratch", SCRATCH["states"])}
  %states = load ptr, ptr %states.from
  %gx.from = {at("%launch", LAUNCH["grid"])}
  %gy.from = {at("%launch", LAUNCH["grid"] + 4)}
  %gz.from = {at("%launch", LAUNCH["grid"] + 8)}
  %gx = load i32, ptr %gx.from
  %gy = load i32, ptr %gy.from
  %gz = load i32, ptr %gz.from
  %gx.to = {at("%context", CONTEXT["nctaid"])}
  %gy.to = {at("%context", CONTEXT["nctaid"] + 4)}
  %gz.to = {at("%context", CONTEXT["nctaid"] + 8)}
  store i32 %gx, ptr %gx.to
  store i32 %gy, ptr %gy.to
  store i32 %gz, ptr %gz.to
  %gx64 = zext i32 %gx to i64
  %gy64 = zext i32 %gy to i64
  %first.row = icmp ult i64 %number, %gx64
  br i1 %first.row, label %place.known, label %divide
divide:                                             ; rare and slow: 64-bit divisions
  %rows = udiv i64 %number, %gx64
  %x.divided = urem i64 %number, %gx64
  %y.divided = urem i64 %rows, %gy64
  %z.divided = udiv i64 %rows, %gy64
  br label %place.known
place.known:
  %x = phi i64 [%number, %prepare], [%x.divided, %divide]
  %y = phi i64 [0, %prepare], [%y.divided, %divide]
  %z = phi i64 [0, %prepare], [%z.divided, %divide]
  %x32 = trunc i64 %x to i32
  %y32 = trunc i64 %y to i32
  %z32 = trunc i64 %z to i32
  %x.to = {at("%context", CONTEXT["ctaid"])}
  %y.to = {at("%context", CONTEXT["ctaid"] + 4)}
  %z.to = {at("%context", CONTEXT["ctaid"] + 8)}
  store i32 %x32, ptr %x.to
  store i32 %y32, ptr %y.to
  store i32 %z32, ptr %z.to
  %dynamic.from = {at("%launch", LAUNCH["dynamic"])}
  %dynamic = load i32, ptr %dynamic.from
  %dynamic.to = {at("%context", CONTEXT["dynamic"])}
  store i32 %dynamic, ptr %dynamic.to
  %n.from = {at("%launch", LAUNCH["n_warps"])}
  %n = load i32, ptr %n.from
  %warp = load ptr, ptr %launch
  br label %start
start:
  %i = phi i32 [0, %place.known], [%i.next, %started]
  %all = phi i32 [0, %place.known], [%all.next, %started]
  %s = call i32 %warp(ptr %context, i32 %i, i32 0)
  %trapped = icmp slt i32 %s, 0
  br i1 %trapped, label %fault, label %started
started:
  %i64 = zext i32 %i to i64
  %place = getelementptr i32, ptr %states, i64 %i64
  store i32 %s, ptr %place
  %all.next = or i32 %all, %s
  %i.next = add i32 %i, 1
  %more = icmp ult i32 %i.next, %n
  br i1 %more, label %start, label %again
again:
  %seen = phi i32 [%all.next, %started], [%any.next, %rest], [%any.next, %patience]
  %since = phi i64 [0, %started], [0, %rest], [%waited, %patience]
  %over = icmp eq i32 %seen, 0
  br i1 %over, label %end, label %choose
choose:                                             ; all that wait go on, or only those that gave way
  %some.spin = and i32 %seen, {GIVES_WAY}
  %none.spins = icmp eq i32 %some.spin, 0
  %which = select i1 %none.spins, i32 -1, i32 {GIVES_WAY}
  br label %round
round:
  %w = phi i32 [0, %choose], [%w.next, %stepped]
  %any = phi i32 [0, %choose], [%any.next, %stepped]
  %spinner = phi i32 [0, %choose], [%spinner.next, %stepped]
  %moved = phi i1 [%none.spins, %choose], [%moved.next, %stepped]
  %w64 = zext i32 %w to i64
  %w.place = getelementptr i32, ptr %states, i64 %w64
  %state = load i32, ptr %w.place
  %chosen = and i32 %state, %which
  %runs = icmp ne i32 %chosen, 0
  br i1 %runs, label %resume, label %stepped
resume:
  %from = and i32 %state, {GIVES_WAY - 1}
  %r = call i32 %warp(ptr %context, i32 %w, i32 %from)
  store i32 %r, ptr %w.place
  %r.trapped = icmp slt i32 %r, 0
  br i1 %r.trapped, label %fault, label %stepped
stepped:
  %now = phi i32 [%state, %round], [%r, %resume]
  %any.next = or i32 %any, %now
  %still = and i32 %now, {GIVES_WAY}
  %spins = icmp ne i32 %still, 0
  %spinner.next = select i1 %spins, i32 %now, i32 %spinner
  %arrived = xor i1 %spins, %runs                    ; it ran, and does not give way
  %moved.next = or i1 %moved, %arrived
  %w.next = add i32 %w, 1
  %w.last = icmp eq i32 %w.next, %n
  br i1 %w.last, label %rest, label %round
rest:
  br i1 %moved.next, label %again, label %patience
patience:
  %ignored = call i32 @sched_yield()
  %time = call i64 @time(ptr null)
  %first = icmp eq i64 %since, 0
  %waited = select i1 %first, i64 %time, i64 %since
  %seconds = sub i64 %time, %waited
  %most.from = {at("%launch", LAUNCH["patience"])}
  %most = load i32, ptr %most.from
  %most64 = zext i32 %most to i64
  %tired = icmp ugt i64 %seconds, %most64
  br i1 %tired, label %stuck, label %again
stuck:
  ret i32 %spinner.next
end:
  ret i32 0
fault:
  ret i32 -1
}}

; Works on a program until all its launches are done. Blocks are taken in shares: neighbours often read memory
; in a row, which the processor fetches ahead.
define internal void @work(ptr %program, ptr %scratch) {{
entry:
  %n = load i64, ptr %program
  %failed = {at("%program", PROGRAM["failed"])}
  %list.from = {at("%program", PROGRAM["launches"])}
  %list = load ptr, ptr %list.from
  %none = icmp eq i64 %n, 0
  br i1 %none, label %end, label %launch
launch:
  %i = phi i64 [0, %entry], [%i.next, %finished]
  %place = getelementptr ptr, ptr %list, i64 %i
  %l = load ptr, ptr %place
  %blocks.from = {at("%l", LAUNCH["n_blocks"])}
  %blocks = load i64, ptr %blocks.from
  %next = {at("%l", LAUNCH["next"])}
  %done = {at("%l", LAUNCH["done"])}
  %share.from = {at("%l", LAUNCH["share"])}
  %share = load i64, ptr %share.from
  br label %take
take:
  %first = atomicrmw add ptr %next, i64 %share seq_cst
  %some = icmp ult i64 %first, %blocks
  br i1 %some, label %mine, label %wait
mine:
  %beyond = add i64 %first, %share
  %last = icmp ult i64 %blocks, %beyond
  %stop = select i1 %last, i64 %blocks, i64 %beyond
  br label %check
check:
  %b = phi i64 [%first, %mine], [%b.next, %count]
  %bad = load atomic i64, ptr %failed monotonic, align 8
  %skip = icmp ne i64 %bad, 0
  br i1 %skip, label %count, label %go
go:
  %r = call i32 @block(ptr %l, i64 %b, ptr %scratch)
  %fault = icmp ne i32 %r, 0
  br i1 %fault, label %note, label %count
note:
  %why = {at("%program", PROGRAM["why"])}
  %r64 = sext i32 %r to i64
  store i64 %r64, ptr %why
  %number = add i64 %i, 1
  store atomic i64 %number, ptr %failed monotonic, align 8
  br label %count
count:
  %b.next = add i64 %b, 1
  %goes.on = icmp ult i64 %b.next, %stop
  br i1 %goes.on, label %check, label %counted
counted:
  %mine.done = sub i64 %stop, %first
  %before = atomicrmw add ptr %done, i64 %mine.done seq_cst
  br label %take
wait:
  %spins = phi i64 [0, %take], [%spins.next, %spin]
  %finished.blocks = load atomic i64, ptr %done seq_cst, align 8
  %all = icmp uge i64 %finished.blocks, %blocks
  br i1 %all, label %finished, label %pause
pause:
  {pause}
  %spins.next = add i64 %spins, 1
  %patient = icmp ult i64 %spins.next, 2000
  br i1 %patient, label %spin, label %yield
yield:
  %ignored = call i32 @sched_yield()
  br label %spin
spin:
  br label %wait
finished:
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, %n
  br i1 %more, label %launch, label %end
end:
  ret void
}}

define void @prepare_pool(ptr %pool) {{
  %r = call i32 @sem_init(ptr %pool, i32 0, i32 0)
  ret void
}}

; A helper's life: sleep, join the program that is open, if any, and leave it.
define void @help(ptr %pool, ptr %scratch) {{
entry:
  %open = {at("%pool", POOL["program"])}
  %attached = {at("%pool", POOL["attached"])}
  br label %sleep
sleep:
  %ignored = call i32 @sem_wait(ptr %pool)
  %in = atomicrmw add ptr %attached, i32 1 seq_cst
  %program = load atomic ptr, ptr %open seq_cst, align 8
  %none = icmp eq ptr %program, null
  br i1 %none, label %leave, label %join
join:
  call void @work(ptr %program, ptr %scratch)
  br label %leave
leave:
  %out = atomicrmw sub ptr %attached, i32 1 seq_cst
  br label %sleep
}}

; Runs a program with `helpers` helpers; returns when all is done and no helper looks at it any more.
define void @run(ptr %pool, ptr %program, ptr %scratch, i32 %helpers) {{
entry:
  %open = {at("%pool", POOL["program"])}
  %attached = {at("%pool", POOL["attached"])}
  %n = load i64, ptr %program
  %list.from = {at("%program", PROGRAM["launches"])}
  %list = load ptr, ptr %list.from
  %leading = call i32 @llvm.ctlz.i32(i32 %helpers, i1 false)
  %bits = sub i32 36, %leading                      ; at least 16 shares for each worker
  %bits64 = zext i32 %bits to i64
  br label %reset
reset:
  %i = phi i64 [0, %entry], [%i.next, %clear]
  %some = icmp ult i64 %i, %n
  br i1 %some, label %clear, label %publish
clear:
  %place = getelementptr ptr, ptr %list, i64 %i
  %l = load ptr, ptr %place
  %next = {at("%l", LAUNCH["next"])}
  %done = {at("%l", LAUNCH["done"])}
  store i64 0, ptr %next
  store i64 0, ptr %done
  %blocks.from = {at("%l", LAUNCH["n_blocks"])}
  %blocks = load i64, ptr %blocks.from
  %part = lshr i64 %blocks, %bits64
  %share = call i64 @llvm.umax.i64(i64 %part, i64 1)
  %share.to = {at("%l", LAUNCH["share"])}
  store i64 %share, ptr %share.to
  %i.next = add i64 %i, 1
  br label %reset
publish:
  %alone = icmp eq i32 %helpers, 0
  br i1 %alone, label %only, label %announce
only:
  call void @work(ptr %program, ptr %scratch)
  ret void
announce:
  store atomic ptr %program, ptr %open seq_cst, align 8
  br label %wake
wake:
  %k = phi i32 [0, %announce], [%k.next, %wake]
  %ignored = call i32 @sem_post(ptr %pool)
  %k.next = add i32 %k, 1
  %again = icmp ult i32 %k.next, %helpers
  br i1 %again, label %wake, label %self
self:
  call void @work(ptr %program, ptr %scratch)
  store atomic ptr null, ptr %open seq_cst, align 8
  br label %quiet
quiet:
  %busy = load atomic i32, ptr %attached seq_cst, align 4
  %still = icmp ne i32 %busy, 0
  br i1 %still, label %yield, label %end
yield:
  %ignored2 = call i32 @sched_yield()
  br label %quiet
end:
  ret void
}}
"""
