"""Compiles LLVM IR to machine code, keeps it on disk, and executes launches on CPU threads without Python in between.

    kernel = load(ptx, cache_dir)                       # nothing is compiled yet
    launch = kernel.prepare(grid, block, params, shared_bytes)
    execute([launch, ...], n_workers)                   # one launch after the other; returns when all are done

All workers take a launch's blocks from one counter. The workers are the calling thread and helper threads; helpers
sleep on a semaphore between calls, and hold no Python lock while they work. runtime.ll is the code of the workers.
"""

import ctypes
import functools
import hashlib
import inspect
import json
import re
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

# Byte offsets in the structs that Python and the workers (runtime.ll) share.
LAUNCH = {"warp": 0, "params": 8, "grid": 16, "n_warps": 28, "n_blocks": 32, "next": 40, "done": 48,
          "share": 56, "dynamic": 64, "patience": 68, "partial": 72}
LAUNCH_BYTES = 80
PROGRAM = {"n": 0, "failed": 8, "launches": 16, "why": 24}
SCRATCH = {"shared": 0, "local": 8, "frames": 16, "states": 24}
POOL = {"semaphore": 0, "program": 64, "attached": 72, "n_helpers": 76, "awake": 80}
_VECTORS = {"grid", "ctaid", "nctaid"}          # fields of three 32-bit numbers, x, y, z


# Seconds after which a launch is given up, if the warps of a block do nothing but give way to each other.
PATIENCE = 10

# What `serve` of runtime.ll reads and writes (serving.py): the service, and its mail, where each side has lines of its
# own.
SERVICE = {"mail": 0, "table": 8, "n_layers": 16, "n_sizes": 20, "stop": 24, "served": 32, "products": 40, "busy": 48,
           "program": 56, "bring": 64, "wanted": 72, "places": 80}
SERVICE_BYTES = 128
MAIL = {"request": 0, "layer": 4, "size": 8, "products": 12, "trouble": 16, "answer": 128}
MAIL_BYTES = 256
# Nanoseconds for which a service looks for its next request without a pause, since a step often asks again after one to
# five layers; the share of the time since the last request that each pause has from then on; and the longest pause.
WAITING = {"spin": 200_000, "share": 256, "most_pause": 4_000_000}
AWAKE = 500_000                                 # nanoseconds for which its helpers look: to wake them takes longer


class KernelFault(RuntimeError):
    """A kernel has executed `trap`, or waits for ever. The message names the kernel."""


@functools.cache
def host():
    """The Target of this machine."""
    features = llvm.get_host_cpu_features()
    avx512 = all(features.get(f) for f in ("avx512f", "avx512bw", "avx512vl", "avx512dq"))
    return Target(llvm.get_process_triple(), llvm.get_host_cpu_name(), features.flatten(), bool(features.get("avx2")),
                  avx512, *(avx512 and bool(features.get(name)) for name in ("avx512vnni", "avx512fp16")))


@functools.cache
def avx512():
    """This machine without arithmetic of halves."""
    return replace(host(), features=_without("avx512fp16"), fp16=False)


@functools.cache
def avx2():
    """This machine without AVX-512."""
    return replace(host(), features=_without("avx512"), avx512=False, vnni=False, fp16=False)


@functools.cache
def plain():
    """This machine without AVX-512 and AVX2: the code path of other processors."""
    return replace(avx2(), features=_without("avx512", "avx2"), avx2=False)


def _without(*starts):
    """Features of this machine, less those whose names start so. What is switched off stands last: some features imply
    others."""
    off = [f"-{f}" for f in llvm.get_host_cpu_features() if f.startswith(starts)]
    return ",".join([host().features, *off])


# Functions that return a Target of this machine, one for each code path that it can execute. Tests run over them.
TARGETS = tuple({(target.avx2, target.avx512, target.vnni, target.fp16): of
                 for of in (plain, avx2, avx512, host) for target in [of()]}.values())


def target_machine(target, level=2):
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=level, jit=True, codemodel="jitdefault")


def compile_object(ir, target, level=2):
    """Optimises LLVM IR text, level 0 (not at all) to 2, and returns the machine code: the bytes of an object file."""
    module = llvm.parse_assembly(ir)
    machine = target_machine(target, level)
    options = llvm.create_pipeline_tuning_options(speed_level=level)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return machine.emit_object(module)


def _loaded(data, target):
    """An engine that holds an object file's code. It must live as long as anybody uses the addresses of the code."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine(target))
    engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    engine.finalize_object()
    return engine


# ---- the disk cache ----------------------------------------------------------------------------------------

# Files of this package that do not take part in the usual translation.
_WRITE_NO_CODE = ("card.py", "cards.py", "serving.py", "estimate.py", "watching.py", "counting.py", "checking.py")


@functools.cache
def _version(translator):
    """A digest of what decides the machine code beside the kernel and the target: this package and LLVM."""
    digest = hashlib.sha256(f"{translator.__name__} {llvmlite.__version__} {llvm.llvm_version_info}".encode())
    own = {inspect.getfile(part) for part in translator.__mro__[:-1]}
    for source in sorted(f for f in Path(__file__).parent.iterdir() if f.suffix in (".py", ".ll")):
        if source.name not in _WRITE_NO_CODE or str(source) in own:
            digest.update(source.read_bytes())
    return digest.hexdigest()


def _path(ptx, block, target, cache_dir, translator):
    key = hashlib.sha256("\0".join((ptx, str(block), str(target), _version(translator))).encode()).hexdigest()
    return Path(cache_dir) / f"{key}.o.z"


def is_cached(ptx, block, cache_dir, translator):
    """Whether a kernel's machine code for this machine and for blocks of this shape (x, y, z) is on the disk."""
    return _path(ptx, block, host(), cache_dir, translator).exists()


def _cached(ptx, block, target, cache_dir, translator):
    """(Translated without its IR, object file) of a kernel: from the disk, or else made and kept there."""
    path = _path(ptx, block, target, cache_dir, translator) if cache_dir else None
    content = compiler.load(path) if path else None
    if content is not None:
        header, data = content.split(b"\n", 1)
        return Translated(**{k: _tuples(v) for k, v in json.loads(header).items()}), data
    with compiler.without_collections():
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
    """A kernel. Its code for a block shape is made when a launch first needs it."""

    def __init__(self, ptx, cache_dir=None, target=None, translator=Translator):
        self.ptx, self.cache_dir, self.target, self.translator = ptx, cache_dir, target or host(), translator
        self._codes = {}

    def translated_by(self, translator):
        """The same kernel, translated by another Translator."""
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
        # A launch that is in the sequence twice becomes two: each counts its blocks.
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
    """The launches of a Program or of a list, in the order of their execution."""
    return launches.launches if isinstance(launches, Program) else launches


def explain(launch, why):
    """The message for a launch that failed because a block ended with `why`: -1, or the state of a warp that gave way
    for too long."""
    if why < 0:
        return f"{launch.name} stopped at a trap"
    line, text = next(spin[1:] for spin in launch.code.facts.spins if spin[0] == why & ~GIVES_WAY)
    return (f"{launch.name}, line {line}: waits for ever, for what no thread of a running block writes "
            f"(`{text}`). Blocks run one after the other, and lanes of a warp together")


def execute(launches, n_workers=1):
    """Runs a Program or a list of Launches to the end. If a launch fails, those after it do not run, and KernelFault
    is raised."""
    program = launches if isinstance(launches, Program) else Program(launches)
    _pool().execute(program, n_workers)


# ---- workers -----------------------------------------------------------------------------------------------

class _Scratch:
    """The memory that one worker needs to run blocks: shared and local memory, frames and the states of warps."""

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


@functools.cache
def _runtime():
    """The engine with the workers' functions."""
    return _loaded(compile_object(_runtime_ir(host()), host()), host())


class Pool:
    """A set of helper threads. One program runs at a time: a program that waits for another one must run in another
    pool. awake: nanoseconds for which helpers look for the next program, before they sleep."""

    def __init__(self, awake=0):
        self._lock = threading.Lock()
        address = _runtime().get_function_address
        self._run = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3, ctypes.c_int32)(address("run"))
        self._help = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 2)(address("help"))
        self._serve = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * 3)(address("serve"))
        self._close = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int32)(address("close"))
        self._struct = ctypes.create_string_buffer(128 + 64)
        self._address = -(-ctypes.addressof(self._struct) // 64) * 64
        ctypes.c_int64.from_address(self._address + POOL["awake"]).value = awake
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

    def serve(self, service, programs, n_workers):
        """Runs `serve` of runtime.ll with the struct at address `service`, until it returns. It may run `programs`."""
        with self._lock:
            self._hire(n_workers - 1)
            for scratch in self._scratch:
                scratch.fit(map(max, zip(*(program.needs for program in programs))))
            return self._serve(self._address, service, self._scratch[0].address)

    def close(self):
        """Ends the helper threads, once no program runs. The pool is of no use afterwards."""
        with self._lock:
            self._close(self._address, len(self._threads))
            for thread in self._threads:
                thread.join()

    def _hire(self, n):
        while len(self._threads) < n:
            self._scratch.append(_Scratch())
            thread = threading.Thread(target=self._help, args=(self._address, self._scratch[-1].address),
                                      daemon=True)
            thread.start()
            self._threads.append(thread)


@functools.cache
def _pool():
    return Pool()


def _runtime_ir(target):
    """LLVM IR of the workers' functions: runtime.ll, with a value for each `$placeholder`."""
    x86 = target.triple.startswith(("x86", "i386"))
    values = {"triple": target.triple, "context.bytes": CONTEXT_BYTES, "barriers.bytes": BARRIERS_BYTES,
              "gives_way": GIVES_WAY, "gives_way.number": GIVES_WAY - 1,
              "cpu_pause": "call void @llvm.x86.sse2.pause()" if x86 else "fence seq_cst",
              "declare_cpu_pause": "declare void @llvm.x86.sse2.pause()" if x86 else "",
              "clock.monotonic": 6 if "darwin" in target.triple else 1}
    structs = {"launch": LAUNCH, "program": PROGRAM, "scratch": SCRATCH, "pool": POOL, "context": CONTEXT,
               "service": SERVICE | WAITING, "mail": MAIL}
    for struct, offsets in structs.items():
        for field, offset in offsets.items():
            values[f"{struct}.{field}"] = offset
            if field in _VECTORS:
                values |= {f"{struct}.{field}.{axis}": offset + 4 * i for i, axis in enumerate("xyz")}
    template = Path(__file__).with_name("runtime.ll").read_text(encoding="utf-8")
    return re.sub(r"\$(\w+(?:\.\w+)*)", lambda placeholder: str(values[placeholder[1]]), template)
