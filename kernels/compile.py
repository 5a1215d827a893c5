"""Compiles Python kernels to PTX text, without a GPU, and keeps the PTX on disk.

    kernel (lazy @cuda.jit) + argument types + compute capability  →  Compiled, with PTX text

Numba and libNVVM compile each kernel. Contraction of a·b + c is switched off, so every float operation in the PTX
carries `.rn` and rounds as the Python source says, on every card. Arithmetic on `cuda.fp16` scalars calls functions
that numba-cuda keeps in CUDA C. NVRTC compiles these functions, and their PTX is put into the kernel's PTX text.

Numba's part takes longest, and quick_numba.py makes it shorter. For kernels of this folder it is done once for all
compute capabilities. The part of libNVVM is done for each.

Argument types are short strings, e.g. ``"float32[2]"`` for a C-contiguous array of two dimensions and
``"uint32"`` for a scalar. A Python int is passed as uint32, a Python float as float32, a bool as boolean; NumPy
scalars keep their type.

The cache key covers everything that can change the PTX: the kernel's bytecode, constants, line numbers,
closure and the globals it names, device functions included (for an intrinsic its whole source file), the
argument types, the compute capability, this file, quick_numba.py, and the versions of Python, numba, numba-cuda,
llvmlite, libNVVM and NVRTC. Neither the key nor the PTX contains the folder of the project or of the Python
environment: source files of the project are named relative to its root (`portable_file`), so that all checkouts and
environments on a machine share one cache.
"""

import dis
import gc
import hashlib
import importlib.metadata
import linecache
import marshal
import os
import re
import struct
import sys
import tempfile
import threading
import types as python_types
import warnings
import zlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numba
import numba.cuda
import numpy as np
from cuda import pathfinder
from cuda.bindings import nvrtc
from llvmlite import ir
from numba.cuda import dispatcher, types
from numba.cuda.compiler import compile_cuda, kernel_fixup
from numba.cuda.core.errors import NumbaDebugInfoWarning
from numba.cuda.cudadrv import nvvm
from numba.cuda.np.numpy_support import from_dtype

from kernels import quick_numba

CACHE_DIR = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qengine"

n_compiled = 0                                  # kernels that this process has compiled, not found in the cache
_lock = threading.RLock()                       # Numba compiles one kernel at a time
_memory = {}                                    # (kernel, types, cc, folder) -> Compiled
_functions = {}                                 # (digest, types, options) -> Numba's result for a device function
_lowered = {}                                   # `cache_key` -> _Lowered
_codes = {}                                     # id of a code object -> (it, `_portable` bytes, names that it loads)
# How many each of these tables keeps (`_keep`). Whoever runs a notebook's cell again makes its functions anew.
MOST_COMPILED, MOST_FUNCTIONS, MOST_LOWERED, MOST_CODES = 1024, 2048, 512, 8192


def _keep(table, most, place, value):
    """Puts `value` into a table, from which the oldest entry goes if there are `most`. Returns it."""
    if len(table) >= most:
        del table[next(iter(table))]
    table[place] = value
    return value


class CompileError(Exception):
    """A kernel could not be compiled; the message names the kernel and its argument types."""


@dataclass(frozen=True)
class Compiled:
    """PTX of one kernel for one set of argument types."""
    name: str                                   # of the Python function
    signature: tuple                            # type strings of the arguments
    entry: str                                  # the .entry symbol in the PTX
    ptx: str


# ---- arguments ---------------------------------------------------------------------------------------------

_SCALAR_CODES = {"bool": "?", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint8": "B",
                 "uint16": "H", "uint32": "I", "uint64": "Q", "float16": "e", "float32": "f", "float64": "d"}
_SCALARS = {np.dtype(name).type: name for name in _SCALAR_CODES}
_SCALARS |= {bool: "bool", float: "float32", int: "uint32"}


@cache
def array_type(dtype, ndim):
    """The type string of a C-contiguous array, e.g. ``float16[3]``. TypeError: a card cannot hold such items."""
    if dtype.kind not in "biufc" or not dtype.isnative:
        raise TypeError(f"the items of a card's array are numbers in native byte order, not {dtype}")
    return f"{dtype.name}[{ndim}]"


def array_words(pointer, shape, itemsize):
    """The bytes that stand for an array in a kernel's parameters: 5 + 2·ndim words of 8 bytes, laid out as by Numba.

    The words are: meminfo, parent (both null), number of items, item size, data pointer, shape, strides in bytes.
    """
    strides, step = [], itemsize
    for extent in reversed(shape):
        strides.insert(0, step)
        step *= extent
    return struct.pack(f"{5 + 2 * len(shape)}q", 0, 0, step // itemsize, itemsize, pointer, *shape, *strides)


def scalar_type(value):
    """The type string of a scalar argument.

    TypeError: a kernel cannot take such a value. OverflowError: a Python int that does not fit uint32.
    """
    name = _SCALARS.get(type(value))
    if name is None:
        raise TypeError(f"a kernel argument cannot be a {type(value).__name__}")
    if type(value) is int and not 0 <= value < 2**32:
        raise OverflowError(f"Python int {value} does not fit uint32; pass a NumPy scalar to choose the type")
    return name


def packer(signature):
    """A function that packs a kernel's arguments of these types, naturally aligned, into the bytes of its parameters.

    An array is given as its `array_words`.
    """
    fields = [f"0q{8 * _n_words(t)}s" if t.endswith("]") else _SCALAR_CODES[t] for t in signature]
    return struct.Struct("".join(fields)).pack


def parameter_layout(signature):
    """(offsets, size) in bytes: where each of a kernel's parameters begins, and how many bytes all of them take.

    Each word of an array is a parameter of its own.
    """
    fields = "".join("q" * _n_words(t) if t.endswith("]") else _SCALAR_CODES[t] for t in signature)
    ends = [struct.calcsize(fields[:i + 1]) for i in range(len(fields))]
    return [end - struct.calcsize("=" + code) for end, code in zip(ends, fields)], struct.calcsize(fields)


def _n_words(array_type):
    return 5 + 2 * int(array_type[array_type.index("[") + 1:-1])


def _numba_type(name):
    if name.endswith("]"):
        dtype, ndim = name[:-1].split("[")
        return types.Array(from_dtype(np.dtype(dtype)), int(ndim), "C")
    return from_dtype(np.dtype(name))


# ---- compilation -------------------------------------------------------------------------------------------

def compile_kernel(kernel, signature, cc, cache_dir=CACHE_DIR):
    """The Compiled of `kernel` for argument types `signature` (tuple of strings) and compute capability `cc` =
    (major, minor).

    It is looked for in this process, then in `cache_dir` / "ptx"; where it is in neither, the kernel is compiled.
    Several threads and processes may call this at once. Raises CompileError.
    """
    return _find(kernel, signature, cc, cache_dir, _compile)


def find_kernel(kernel, signature, cc, cache_dir=CACHE_DIR):
    """What `compile_kernel` returns, or None where the kernel would have to be compiled."""
    return _find(kernel, signature, cc, cache_dir, None)


def _find(kernel, signature, cc, cache_dir, compile):
    place = (kernel, signature, cc, cache_dir)
    with _lock:
        if place in _memory:
            return _memory[place]
        compiled = _load_or_compile(kernel, signature, cc, Path(cache_dir) / "ptx", compile)
        return compiled and _keep(_memory, MOST_COMPILED, place, compiled)


def _load_or_compile(kernel, signature, cc, folder, compile):
    global n_compiled
    name = kernel.__name__
    entry = "kernel_" + name                    # bare names such as `add` are reserved words of PTX
    try:
        key = cache_key(kernel, signature, cc)
        ptx = load(folder / f"{key}.ptx.z")
        if ptx is not None:
            return Compiled(name, signature, entry, ptx.decode())
        if compile is None:
            return None
        ptx = compile(kernel, signature, cc, entry)
        n_compiled += 1
        store(folder / f"{key}.ptx.z", ptx.encode())
        return Compiled(name, signature, entry, ptx)
    except Exception as error:
        raise CompileError(f"kernel {name}({', '.join(signature)}) for sm_{cc[0]}{cc[1]}: {error}") from error


def _compile(kernel, signature, cc, entry):
    """The complete PTX text of a kernel.

    Only this function and those that it calls use Numba's inner interfaces: its public ones cannot switch contraction
    off.
    """
    lowered = _lower(kernel, signature, cc)
    ptx = nvvm.compile_ir(lowered.texts(), opt=3, fma=False, arch=f"compute_{cc[0]}{cc[1]}").decode()
    ptx = _portable_line_table(ptx.strip("\0").strip())
    # Numba declares environment objects that kernels never use. Their names depend on what was compiled before.
    ptx = re.sub(r"\.common \.global \.align 8 \.u64 _ZN08NumbaEnv\w*;\n", "", ptx).replace(lowered.symbol, entry)
    for file in lowered.files:
        ptx = _link(ptx, _compile_cuda_c(file, cc))
    # The assembler may contract a bare `add.f16`, as NVIDIA's headers write it: it becomes `add.rn.f16`.
    # `atom.add.f32` stays as it is, because PTX knows no rounding for it.
    bare = r"(?<![.\w])(add|sub|mul)((?:\.ftz)?(?:\.sat)?\.(?:f16x2|f16|f32|f64))\b"
    ptx = re.sub(bare, r"\1.rn\2", ptx)
    if not launches_overlap(cc):
        ptx = FROM_HOPPER_ON.sub("", ptx)
    return ptx + "\n"


@dataclass(frozen=True)
class _Lowered:
    """What Numba makes of a kernel: LLVM IR of the kernel and of the functions that it calls."""
    symbol: str                                 # the kernel's name in the IR
    packed: bytes                               # IR of the kernel, compressed: other capabilities may never ask for it
    called: list                                # IR of each function
    files: list                                 # source texts in CUDA C that belong to it

    def texts(self):
        return [zlib.decompress(self.packed).decode(), *self.called]


# The highest capability that Numba is told for kernels of this folder. Of later instructions it knows only some that
# are not exact, which no kernel may have, and no intrinsic of this folder asks for the capability. So its work is done
# once for all later cards. An intrinsic of a user's may ask.
_LOWERED_FOR = (7, 0)


def _lower(kernel, signature, cc):
    """The _Lowered of a kernel for argument types `signature` and cards of `cc`: Numba's part of the work."""
    if (kernel.py_func.__module__ or "").partition(".")[0] == __package__:
        cc = min(cc, _LOWERED_FOR)
    place = cache_key(kernel, signature, cc)    # what a kernel refers to may have changed in between
    if place in _lowered:
        return _lowered[place]
    with warnings.catch_warnings(), _lowering_for(cc), without_collections():
        warnings.simplefilter("ignore", NumbaDebugInfoWarning)
        result = compile_cuda(kernel.py_func, types.void, tuple(_numba_type(t) for t in signature),
                              lineinfo=True, nvvm_options={"opt": 3, "fma": False}, cc=cc)
        library, symbol = result.library, result.fndesc.llvm_func_name
        function = library.get_function(symbol)
        kernel_fixup(function, False)
        nvvm.set_launch_bounds(function, kernel.targetoptions.get("launch_bounds"))
        if any(getattr(file, "kind", None) != "cu" for file in library._linking_files):
            raise ValueError("a kernel can be linked with functions in CUDA C only")
        _forget_objects(library)
        # A function that several others call is there several times.
        called = list(dict.fromkeys(str(module) for module in library.modules if module is not function.module))
        packed = zlib.compress(_without_variables(function.module).encode(), COMPRESSION)
        files = sorted(file.data for file in library._linking_files)
    return _keep(_lowered, MOST_LOWERED, place, _Lowered(symbol, packed, called, files))


@dataclass(frozen=True)
class _Text:
    """LLVM IR of a device function in place of the thousands of objects that Numba made for it: collections would look
    through these, and many kernels ask for their text."""
    text: str
    functions = ()                              # that Numba may still change

    def __str__(self):
        return self.text


def _forget_objects(library):
    """Of all functions that this one calls, directly or by way of others. External ones have none."""
    for called in getattr(library, "_linking_libraries", ()):
        if isinstance(getattr(called, "_module", None), ir.Module):
            called._module = _Text(_without_variables(called._module))
        _forget_objects(called)


def _without_variables(module):
    """LLVM IR of a module, without the calls that tell a debugger where variables are: nobody needs them here, and
    libNVVM 12.9 fails on some of them."""
    return re.sub(r'(?m)^.*call void @"llvm\.dbg\..*$', "", str(module))


# Instructions that only hide time: overlapping launches and `prefetch` (kernels/intrinsics.py). Cards older than
# Hopper get PTX without them.
FROM_HOPPER_ON = re.compile(r"\b(griddepcontrol|prefetch)\.[^;]*;")


def launches_overlap(cc):
    """Whether a launch may begin while the one before it still runs (kernels/intrinsics.py): from Hopper on."""
    return cc >= (9, 0)


@contextmanager
def _lowering_for(cc):
    """Tells Numba the compute capability for which device functions are lowered (it would ask the driver), and has it
    lower equal ones once."""
    before, owner = (dispatcher.get_current_device, dispatcher.compile_cuda), threading.get_ident()

    def compile_function(*arguments, **options):    # a thread of a user's may compile kernels of its own meanwhile
        return (_compile_device_function if threading.get_ident() == owner else compile_cuda)(*arguments, **options)

    dispatcher.get_current_device = lambda: python_types.SimpleNamespace(compute_capability=cc)
    dispatcher.compile_cuda = compile_function
    try:
        with quick_numba.quickly():
            yield
    finally:
        dispatcher.get_current_device, dispatcher.compile_cuda = before


def _compile_device_function(function, return_type, args, **options):
    """Numba's `compile_cuda`, which is asked once for all equal functions: those with the same code, closure and
    globals, as the kernels of a family have them, each made anew by the same lines."""
    digest = hashlib.sha256()
    _feed(digest, function, {})
    place = digest.digest(), return_type, args, repr(sorted(options.items()))
    if place in _functions:
        return _functions[place]
    result = compile_cuda(function, return_type, args, **options)
    result.fndesc.typemap = result.fndesc.calltypes = None      # as large as the function; callers ask for neither
    return _keep(_functions, MOST_FUNCTIONS, place, result._replace(type_annotation=None, metadata={}))


@contextmanager
def without_collections():
    """Python's collector rests: a compiler makes millions of small objects and few circles."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _compile_cuda_c(source, cc):
    """PTX of the CUDA C functions that compute with `cuda.fp16` scalars."""
    code = source.encode() if isinstance(source, str) else source
    ours = Path(numba.cuda.__file__).parent / "include" / str(_check(nvrtc.nvrtcVersion())[0])
    toolkit = [pathfinder.locate_nvidia_header_directory(part) for part in ("cudart", "cccl")]
    folders = [ours] + [found.abs_path for found in toolkit if found]
    options = [f"--gpu-architecture=compute_{cc[0]}{cc[1]}", "--relocatable-device-code=true", "--fmad=false"]
    options = [o.encode() for o in options + [f"--include-path={f}" for f in folders]]
    program = _check(nvrtc.nvrtcCreateProgram(code, b"fp16.cu", 0, None, None))
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), options)[0]:
            log = bytearray(_check(nvrtc.nvrtcGetProgramLogSize(program)))
            _check(nvrtc.nvrtcGetProgramLog(program, log))
            raise ValueError(f"NVRTC: {log.decode().rstrip(chr(0)).strip()}")
        ptx = bytearray(_check(nvrtc.nvrtcGetPTXSize(program)))
        _check(nvrtc.nvrtcGetPTX(program, ptx))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return ptx.decode().rstrip("\0")


def _link(ptx, library):
    """`ptx` with its `.extern .func` declarations replaced by the definitions in the PTX text `library`."""
    body = library[re.search(r"\.address_size \d+\n", library).end():].strip()
    body = re.sub(r"^\s*// \.globl.*\n", "", body, flags=re.M).replace(".visible .func", ".func")
    defined = set(re.findall(r"^\.func\s+(?:\([^)]*\)\s*)?(\w+)\(?$", body, flags=re.M))

    def cut(declaration):
        return "" if declaration[1] in defined else declaration[0]

    ptx = re.sub(r"\.extern \.func\s+(?:\([^)]*\)\s*)?(\w+)\s*\([^)]*\)\s*;\n?", cut, ptx)
    head = re.search(r"\.address_size \d+\n", ptx).end()
    return f"{ptx[:head]}\n{body}\n{ptx[head:]}"


def _check(result):
    """The values that an NVRTC call returns, without its status. ValueError: the status is not success."""
    status, *values = result
    if status:
        raise ValueError(f"NVRTC: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


@cache
def supported_ccs():
    """Compute capabilities that the installed CUDA toolkit compiles for, ascending, as (major, minor). CompileError:
    there is none."""
    try:
        return sorted(divmod(arch, 10) for arch in _check(nvrtc.nvrtcGetSupportedArchs()))
    except pathfinder.DynamicLibNotFoundError:
        raise CompileError("NVRTC, which compiles kernels, is not installed: say pip install -r requirements.txt in "
                           "the environment of this Python") from None


def target_cc(cc):
    """The highest compute capability that the toolkit knows and a card of `cc` runs. CompileError: there is none."""
    known = [c for c in supported_ccs() if c <= tuple(cc)]
    if not known:
        lowest = "sm_%d%d" % supported_ccs()[0]
        raise CompileError(f"this CUDA toolkit starts at {lowest} and does not support sm_{cc[0]}{cc[1]}: "
                           "numba-cuda with its CUDA 12 extra supports sm_70")
    return known[-1]


# ---- the key -----------------------------------------------------------------------------------------------

# What a kernel takes from these modules is covered by the versions in the key.
_VERSIONED = {"builtins", "llvmlite", "math", "numba", "numpy", "operator"}


def cache_key(kernel, signature, cc):
    """A hexadecimal name for the PTX of `kernel`. Two processes get the same name if, and only if, everything that
    makes the PTX is the same.

    TypeError: the kernel refers to an object whose contents cannot be known.
    ValueError: the kernel or a device function has an option that changes its arithmetic or what is linked.
    """
    digest = hashlib.sha256(repr((_versions(), signature, tuple(cc))).encode())
    _feed(digest, kernel, {})
    return digest.hexdigest()[:40]


@cache
def _versions():
    packages = [f"{p} {importlib.metadata.version(p)}" for p in ("numba", "numba-cuda", "llvmlite", "numpy")]
    return (sys.version, *packages, nvvm.NVVM().get_ir_version(), _libnvvm(), _check(nvrtc.nvrtcVersion()),
            *(Path(file).read_bytes() for file in (__file__, quick_numba.__file__)))


def _libnvvm():
    """The PTX text that libNVVM makes of an empty module: its head names the release and build of libNVVM.

    Its version number, 2.0, never changes. Its path and date differ between Python environments.
    """
    module = ir.Module()
    module.triple, module.data_layout = "nvptx64-nvidia-cuda", nvvm.NVVM().data_layout
    nvvm.add_ir_version(module)
    return nvvm.compile_ir(str(module)).decode()


# The options of @cuda.jit that are allowed. The others change the arithmetic (fastmath) or what is linked, or would
# be ignored.
_OPTIONS = {"device", "forceinline", "inline", "launch_bounds", "lineinfo", "lto", "opt"}
# The "files" of notebook cells: they lie in a folder that is new at every start, or, in older notebooks, have a name
# with the number of the cell. A match begins where a name may: tried at every character of a table of constants, which
# is one long line, it would take seconds.
_NOTEBOOK = re.compile(r'(?<![^"\n])[^"\n]*(?:/ipykernel_\d+/|<ipython-input-\d+-)')
# Folders whose files have the same name on every machine, and the beginning of that name in keys and PTX.
ROOT = Path(os.path.abspath(__file__)).parents[1]
_FOLDERS = {f"{Path(numba.__file__).parent}/": "numba/", f"{Path(numba.cuda.__file__).parents[1]}/": "numba/",
            f"{ROOT}/": ""}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype, types.Type)


def _feed(digest, value, seen):
    """Adds `value` to `digest`: everything in it that can change the PTX of a function that refers to it.

    seen: the functions added so far, id -> number; functions may refer to each other in circles.
    """
    if isinstance(value, _PLAIN):
        digest.update(f"{type(value).__name__} {value!r};".encode())
    elif isinstance(value, np.ndarray):
        digest.update(f"array {value.dtype!r} {value.shape} {value.strides};".encode() + value.tobytes())
    elif isinstance(value, (tuple, list)):
        fields = getattr(value, "_fields", "")  # of a named tuple
        digest.update(f"{type(value).__name__} {len(value)} {fields};".encode())
        for item in value:
            _feed(digest, item, seen)
    elif _top_module(value) in _VERSIONED and not hasattr(value, "py_func") and not hasattr(value, "_defn"):
        digest.update(f"{getattr(value, '__module__', '')} {_name(value)};".encode())
    elif id(value) in seen:
        digest.update(f"again {seen[id(value)]};".encode())
    else:
        seen[id(value)] = len(seen)
        _feed_code(digest, value, seen)


def _feed_code(digest, value, seen):
    if hasattr(value, "_defn"):                 # an intrinsic: it may take PTX text from anywhere in its file
        _feed(digest, _source(value._defn), seen)
        _feed_function(digest, value._defn, seen)
    elif hasattr(value, "py_func"):             # a kernel or a device function
        options = sorted((name, repr(option)) for name, option in value.targetoptions.items() if option)
        wrong = {name for name, _ in options} - _OPTIONS
        if wrong:
            raise ValueError(f"{_name(value)} has option {min(wrong)}; only launch_bounds and inline may be")
        _feed(digest, options, seen)
        _feed(digest, value.py_func, seen)
    elif isinstance(value, python_types.FunctionType):
        _feed_function(digest, value, seen)
        names, attributes = _facts(value.__code__)[2]
        for name in sorted(names & value.__globals__.keys()):
            _feed_global(digest, name, value.__globals__[name], attributes, seen)
    else:
        raise TypeError(f"cannot tell what {_name(value)} of type {type(value).__name__} compiles to; "
                        "kernels may refer to numbers, strings, tuples, arrays, types, functions and modules")


def _feed_function(digest, function, seen):
    digest.update(_facts(function.__code__)[1])
    _feed(digest, function.__defaults__, seen)
    _feed(digest, [cell.cell_contents for cell in function.__closure__ or ()], seen)


def _feed_global(digest, name, value, attributes, seen):
    digest.update(f"{name}=".encode())
    if isinstance(value, python_types.ModuleType) and _top_module(value) not in _VERSIONED:
        for attribute in sorted(attributes & vars(value).keys()):
            _feed_global(digest, attribute, vars(value)[attribute], attributes, seen)
    else:
        _feed(digest, value, seen)


def _facts(code):
    """(`code`, its bytes as keys have them, its `_names`). While it is kept it stays alive, so that no other object
    gets its id."""
    if id(code) in _codes:
        return _codes[id(code)]
    portable = marshal.dumps(_portable(code), 2)        # version 2: later ones depend on refcounts
    return _keep(_codes, MOST_CODES, id(code), (code, portable, _names(code)))


def _portable(code):
    """`code` as another checkout, or another session of the same notebook, has it."""
    nested = [_portable(x) if isinstance(x, python_types.CodeType) else x for x in code.co_consts]
    return code.replace(co_filename=portable_file(code.co_filename), co_consts=tuple(nested))


def portable_file(file):
    """The name of a source file in keys and PTX.

    Files of the project are named relative to its root, and cells of a notebook without their folder. Files of
    other projects keep their absolute path.
    """
    if not file.startswith("<"):                # not a file: <stdin>, <string>
        file = os.path.abspath(file)            # as Numba does; kernels run as a script have a relative path
        for folder, name in _FOLDERS.items():
            if file.startswith(folder):
                file = name + file.removeprefix(folder)
                break
    return _NOTEBOOK.sub("", file)


def _portable_line_table(ptx):
    """`ptx` with its source files, `.file 1 "/home/ada/qengine/kernels/norm.py"`, named by `portable_file`."""
    for folder, name in _FOLDERS.items():
        ptx = ptx.replace(f'"{_quoted(folder)}', f'"{name}')
    return _NOTEBOOK.sub("", ptx)


def _quoted(path):
    """A path between the quotes of a string in PTX."""
    path = path.replace("\\", r"\\").replace('"', r'\"')
    return "".join(chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}" for byte in os.fsencode(path))


def current_file(name):
    """The path in this checkout of a file that PTX names, for messages; `name` where the checkout has no such file."""
    path = ROOT / name
    return str(path) if path.is_file() else name


def _names(code):
    """The names of globals, and of globals and attributes, in `code` and the code objects nested in it."""
    loads = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    attributes = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, python_types.CodeType):
            nested = _names(constant)
            loads, attributes = loads | nested[0], attributes | nested[1]
    return loads, attributes


def _top_module(value):
    is_module = isinstance(value, python_types.ModuleType)
    name = value.__name__ if is_module else getattr(value, "__module__", None)
    return (name or "").partition(".")[0]


def _name(value):
    return getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or repr(value)


def _source(function):
    file = function.__code__.co_filename
    text = "".join(linecache.getlines(file))
    if not text:
        raise TypeError(f"no source text for the intrinsic {function.__qualname__} in {file}")
    return text


# ---- files -------------------------------------------------------------------------------------------------

MOST_BYTES = 256 << 20                          # in a folder of the cache; files used longest ago are deleted
LOOKS = 64                                      # times that a folder is looked at while MOST_BYTES are written
COMPRESSION = 1                                 # zlib's fastest level: PTX shrinks fourfold, machine code threefold


def load(path):
    """The bytes that `store` was given for `path`. None: there is no such file, or it is damaged."""
    try:
        content = Path(path).read_bytes()
    except OSError:
        return None
    with suppress(OSError):
        os.utime(path)                          # `_make_room` keeps what was used last
    digest, packed = content[:32], content[32:]
    return zlib.decompress(packed) if hashlib.sha256(packed).digest() == digest else None


def store(path, data):
    """Writes a checksum and `data`, compressed by zlib, to `path`. Other processes see the whole file or none. A full
    disk is only a warning."""
    path, packed = Path(path), zlib.compress(data, COMPRESSION)
    digest = hashlib.sha256(packed).digest()
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(digest + packed)
        os.replace(temporary, path)
        # A look at thousands of files takes as long as a small kernel: it is due once in MOST_BYTES / LOOKS that all
        # processes write. The digest is as good as chance.
        if int.from_bytes(digest[:4], "big") / 2**32 * MOST_BYTES < LOOKS * len(packed):
            _make_room(path.parent)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        warnings.warn(f"compiled kernel not kept in {path.parent}: {error}")


def can_store(folder) -> bool:
    """Whether files can be written into a folder, which is made if need be."""
    with suppress(OSError):
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    return False


def _make_room(folder):
    """Deletes the files of a folder that were used longest ago, until at most MOST_BYTES are left. Other processes may
    do the same at the same time."""
    total = 0
    with suppress(OSError):
        for file, facts in sorted(((Path(f), f.stat()) for f in os.scandir(folder)), key=lambda f: -f[1].st_mtime_ns):
            total += facts.st_size
            if total > MOST_BYTES:
                file.unlink(missing_ok=True)
