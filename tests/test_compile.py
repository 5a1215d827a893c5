"""Kernel compilation: what the PTX holds, what the cache key covers, and the cache itself under stress."""

import inspect
import linecache
import os
import re
import shutil
import struct
import subprocess
import sys
import textwrap
import threading
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from llvmlite import ir
from numba import cuda, float32, int32, uint32
from numba.cuda import descriptor
from numba.cuda.core import ir as numba_ir
from numba.cuda.core.targetconfig import ConfigStack
from numba.cuda.extending import intrinsic
from numba.cuda.flags import CUDAFlags

from kernels import compile as compiler
from kernels import quick_numba
from kernels.assembler import assemble
from kernels.compile import CompileError, cache_key, compile_kernel
from tests.kernels_to_compile import (HALF_SIGNATURE, OLDEST, SEVERAL, SIGNATURE, calls_device_function, half_sum,
                                      multiply_add)
from tests.until import PATIENCE

ROOT = Path(__file__).parents[1]
SM = "sm_%d%d" % OLDEST


# ---- the PTX -----------------------------------------------------------------------------------------------

def test_nothing_is_contracted(tmp_path):
    ptx = compile_kernel(multiply_add, SIGNATURE, OLDEST, tmp_path).ptx
    assert "mul.rn.f32" in ptx and "add.rn.f32" in ptx and "fma" not in ptx


def test_half_scalars_are_complete_and_rounded(tmp_path):
    ptx = compile_kernel(half_sum, HALF_SIGNATURE, OLDEST, tmp_path).ptx
    assert ".extern .func" not in ptx and sys.prefix not in ptx        # though its line table names a file of Numba
    called = set(re.findall(r"call\.uni \([^)]*\),\s*(\w+)", ptx))
    defined = set(re.findall(r"^\.func\s+\([^)]*\)\s*(\w+)\(", ptx, flags=re.M))
    assert called and called <= defined
    assert {"fma.rn.f16", "mul.rn.f16", "add.rn.f16"} <= set(re.findall(r"\w+(?:\.\w+)*\.f16\b", ptx))
    assert not re.findall(r"\b(?:add|sub|mul)\.(?:f16|f32|f64)", ptx)


def test_atomic_additions_assemble(tmp_path):
    """`atom.add.f32` has no rounding to name."""
    @cuda.jit
    def adds(x, y):
        shared = cuda.shared.array(1, float32)
        shared[uint32(0)] = x[uint32(1)]
        cuda.syncthreads()
        cuda.atomic.add(x, uint32(0), y[uint32(0)])
        cuda.atomic.add(y, uint32(0), 1.0)
        cuda.atomic.add(shared, uint32(0), x[uint32(2)])
        cuda.syncthreads()
        x[uint32(1)] = shared[uint32(0)] * shared[uint32(0)]

    compiled = compile_kernel(adds, ("float32[1]", "float64[1]"), OLDEST, tmp_path)
    assert "mul.rn.f32" in compiled.ptx and not re.findall(r"(?:atom|red)\S*\.rn\S*", compiled.ptx)
    assert assemble(compiled, OLDEST, tmp_path)


def test_entry_name_and_line_numbers(tmp_path):
    compiled = compile_kernel(multiply_add, SIGNATURE, OLDEST, tmp_path)
    assert (compiled.name, compiled.entry) == ("multiply_add", "kernel_multiply_add")
    assert re.findall(r"\.entry (\w+)\(", compiled.ptx) == [compiled.entry] and "NumbaEnv" not in compiled.ptx
    assert f".target {SM}" in compiled.ptx and ".loc" in compiled.ptx \
        and '"tests/kernels_to_compile.py"' in compiled.ptx


def test_device_functions_need_no_card(tmp_path):
    ptx = compile_kernel(calls_device_function, ("float32[1]", "uint32"), OLDEST, tmp_path).ptx
    assert "kernel_calls_device_function" in ptx


def test_launch_bounds(tmp_path):
    @cuda.jit(launch_bounds=(128, 2))
    def bounded(x):
        x[uint32(0)] = 1

    ptx = compile_kernel(bounded, ("float32[1]",), OLDEST, tmp_path).ptx
    assert ".maxntid 128" in ptx and ".minnctapersm 2" in ptx


def test_errors_name_the_kernel(tmp_path):
    @cuda.jit
    def wrong(x):
        x.no_such_method()

    with pytest.raises(CompileError, match=rf"(?s)kernel wrong\(float32\[1\]\) for {SM}: .*no_such_method"):
        compile_kernel(wrong, ("float32[1]",), OLDEST, tmp_path)


@pytest.mark.parametrize("option", ["fastmath", "link", "max_registers"])
def test_options_that_change_arithmetic_are_refused(tmp_path, option):
    value = {"fastmath": True, "link": ["functions.o"], "max_registers": 32}[option]

    @cuda.jit(**{option: value})
    def fast(x):
        x[0] = 1

    with pytest.raises(CompileError, match=f"fast has option {option}; only launch_bounds"):
        compile_kernel(fast, ("float32[1]",), OLDEST, tmp_path)


def test_device_functions_have_no_fast_division(tmp_path):
    @cuda.jit(device=True, fastmath=True)
    def divide(x, y):
        return x / y

    @cuda.jit
    def divides(x):
        x[0] = divide(x[1], x[2])

    with pytest.raises(CompileError, match="kernel divides.*divide has option fastmath"):
        compile_kernel(divides, ("float32[1]",), OLDEST, tmp_path)


def test_assembles(tmp_path):
    """NVIDIA's assembler takes the text as it is, fp16 functions included."""
    from cuda.core import Linker, LinkerOptions, ObjectCode
    for kernel, signature in ((half_sum, HALF_SIGNATURE), (calls_device_function, ("float32[1]", "uint32"))):
        ptx = compile_kernel(kernel, signature, OLDEST, tmp_path).ptx
        Linker(ObjectCode.from_ptx(ptx.encode()), options=LinkerOptions(arch=SM)).link("cubin")


def test_a_toolkit_that_is_missing_is_told(monkeypatch):
    def missing():
        raise compiler.pathfinder.DynamicLibNotFoundError("no libnvrtc")

    monkeypatch.setattr(compiler.nvrtc, "nvrtcGetSupportedArchs", missing)
    with pytest.raises(CompileError, match="NVRTC, which compiles kernels, is not installed: say pip install"):
        compiler.supported_ccs.__wrapped__()


def test_capabilities():
    supported = compiler.supported_ccs()
    assert supported == sorted(supported) and compiler.target_cc(OLDEST) == OLDEST
    assert compiler.target_cc((99, 0)) == supported[-1]
    assert compiler.target_cc((8, 8)) == max(cc for cc in supported if cc <= (8, 8))
    with pytest.raises(CompileError, match="sm_30"):
        compiler.target_cc((3, 0))


# ---- device functions that are equal -----------------------------------------------------------------------

def family(factor, option="device"):
    """A kernel of a family, with device functions of its own."""
    @cuda.jit(device=True, forceinline=option == "forceinline")
    def scaled(x):
        return x * float32(factor)

    @cuda.jit
    def member(x):
        x[uint32(0)] = scaled(x[uint32(1)])
        x[uint32(2)] = scaled(float32(int32(x[uint32(3)])))

    return member


def test_equal_device_functions_are_compiled_once(tmp_path, monkeypatch):
    """And no others: with another constant, argument type or option a function is another one."""
    asked = []

    def counted(function, *rest, **options):
        asked.append(function.__name__)
        return compile_cuda(function, *rest, **options)

    compile_cuda = compiler.compile_cuda
    monkeypatch.setattr(compiler, "compile_cuda", counted)
    for known in "_functions", "_lowered":
        monkeypatch.setattr(compiler, known, {})

    def new(*which, types=("float32[1]",)):
        """How often `scaled` is compiled for a kernel, and the PTX."""
        asked.clear()
        compiler._lowered.clear()
        ptx = compile_kernel(family(*which), types, OLDEST, tmp_path / f"{len(list(tmp_path.iterdir()))}").ptx
        assert asked.count("member") == 1
        return asked.count("scaled"), ptx

    n, ptx = new(3)
    assert n == 1 and new(3) == (0, ptx) and "0f40400000" in ptx
    n, other = new(5)
    assert n == 1 and other == ptx.replace("0f40400000", "0f40A00000")
    assert new(3, "forceinline")[0] == 1 and new(3, types=("float64[1]",))[0] == 1


def test_numba_lowers_a_kernel_once_for_all_capabilities(tmp_path, monkeypatch):
    """Unless what it refers to has changed in between."""
    lowered, settings = [], type(sys)("settings_of_a_project")

    def counted(*given, **options):
        lowered.append(settings.FACTOR)
        return compile_cuda(*given, **options)

    compile_cuda = compiler.compile_cuda
    monkeypatch.setattr(compiler, "compile_cuda", counted)
    source = "@cuda.jit\ndef kernel(x):\n    x[uint32(0)] = x[uint32(1)] * float32(settings.FACTOR)"
    kernel = kernel_from(source, tmp_path, settings=settings)
    kernel.py_func.__module__ = "kernels.made_up"
    for settings.FACTOR, cc, number in ((3, OLDEST, "40400000"), (3, (9, 0), "40400000"), (5, (8, 0), "40A00000")):
        ptx = compile_kernel(kernel, ("float32[1]",), cc, tmp_path).ptx
        assert f"0f{number}" in ptx and ".target sm_%d%d" % cc in ptx
    assert lowered == [3, 5]


def test_an_intrinsic_of_a_user_is_told_the_capability(tmp_path):
    @intrinsic
    def capability(_):
        def codegen(context, builder, signature, arguments):
            major, minor = ConfigStack().top().compute_capability
            return ir.Constant(ir.IntType(32), 10 * major + minor)
        return uint32(), codegen

    @cuda.jit
    def kernel(x):
        x[uint32(0)] = capability()

    for cc in (7, 5), (9, 0):
        assert re.search(r", %d%d;" % cc, compile_kernel(kernel, ("uint32[1]",), cc, tmp_path).ptx)


def test_what_is_kept_has_a_bound(tmp_path, monkeypatch):
    """Kernels that are made again and again, as by a notebook's cell, leave no more than that, and keys stay as they
    are."""
    before = [cache_key(family(factor), ("float32[1]",), OLDEST) for factor in range(4)]
    for table, most in (("_memory", "MOST_COMPILED"), ("_functions", "MOST_FUNCTIONS"), ("_lowered", "MOST_LOWERED"),
                        ("_codes", "MOST_CODES")):
        monkeypatch.setattr(compiler, table, {})
        monkeypatch.setattr(compiler, most, 2)
    kernels = [family(factor) for factor in range(4)]
    for kernel in kernels:
        compile_kernel(kernel, ("float32[1]",), OLDEST, tmp_path)
    assert [len(table) for table in (compiler._memory, compiler._functions, compiler._lowered, compiler._codes)] == [
        2, 2, 2, 2]
    assert [place[0] for place in compiler._memory] == kernels[2:]
    assert [cache_key(kernel, ("float32[1]",), OLDEST) for kernel in kernels] == before
    assert len(set(before)) == 4 and len(compiler._codes) == 2


def test_signatures_have_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(quick_numba, "_signatures", {})
    monkeypatch.setattr(quick_numba, "MOST_SIGNATURES", 3)
    source = "@cuda.jit\ndef kernel(x, y):\n    x[uint32(0)] = x[uint32(1)] * y + float32(y) - uint32(y) / x[uint32(2)]"
    compile_kernel(kernel_from(source, tmp_path), ("float32[1]", "float64"), OLDEST, tmp_path)
    assert 0 < len(quick_numba._signatures) <= 3


PLAIN_NUMBA = r"""
import hashlib
import re
import sys
from kernels import compile as compiler, quick_numba
from tests.kernels_to_compile import SEVERAL

if sys.argv[2:]:
    quick_numba._QUICK, compiler._LOWERED_FOR = (), (9, 0)
for kernel, signature in SEVERAL:
    ptx = compiler.compile_kernel(kernel, signature, (9, 0), sys.argv[1]).ptx
    ptx = re.sub(r"(?m)^ *\.b8 .*", "", ptx)       # names of functions, with Numba's options in them
    print(hashlib.sha256(ptx.encode()).hexdigest())
"""


def test_quick_numba_gives_the_ptx_of_numba(tmp_path):
    """Each in a process of its own, since Numba remembers device functions."""
    running = [subprocess.Popen([sys.executable, "-c", PLAIN_NUMBA, str(tmp_path / str(len(more))), *more], cwd=ROOT,
                                stdout=subprocess.PIPE, text=True) for more in ([], ["plain"])]
    quick, plain = (process.communicate(timeout=PATIENCE)[0].split() for process in running)
    assert len(quick) == len(SEVERAL) == len(set(quick)) and quick == plain


def test_quick_answers_are_those_of_numba():
    """Of options, set and not, and of sizes: those of a type with a name are asked for anew."""
    context, set_one = descriptor.cuda_target.target_context, CUDAFlags()
    set_one.forceinline = True
    types_ = ir.IntType(1), ir.DoubleType(), ir.LiteralStructType([ir.IntType(8), ir.IntType(64)])
    named = ir.Context().get_identified_type("named")
    named.set_body(ir.IntType(32))

    def answers():
        return [CUDAFlags().values(), set_one.values(), *map(context.get_abi_sizeof, types_ * 2)]

    plain = answers()
    with quick_numba.quickly():
        assert answers() == plain and plain[2:5] == [1, 8, 16]
        with pytest.raises(RuntimeError):
            context.get_abi_sizeof(named)       # of the modules that LLVM is given to read, none defines it
    assert answers() == plain


def test_quick_answers_about_functions_and_statements():
    """The parameters of functions, of which two have the same code, and the variables that statements name."""
    here, scope = numba_ir.Loc("kernel.py", 1), numba_ir.Scope(None, numba_ir.Loc("kernel.py", 1))
    a, b, c = (numba_ir.Var(scope, name, here) for name in "abc")
    call = numba_ir.Expr.call(a, (b,), [("key", c)], here)
    statements = [numba_ir.Assign(value, a, here) for value in (b, call, numba_ir.Expr.build_tuple([b, c], here))]
    statements += [numba_ir.SetItem(a, b, c, here), numba_ir.Del("a", here), numba_ir.Return(a, here)]
    functions = [function for i in range(2) for function in (lambda x, y: x, lambda x, y=i, *rest, key: x)]

    def answers():
        return ([inspect.signature(function) for function in functions],
                [[variable.name for variable in statement.list_vars()] for statement in statements])

    plain = answers()
    with quick_numba.quickly():
        assert answers() == answers() == plain
    assert [sorted(names) for names in plain[1][:3]] == [["a", "b"], ["a", "a", "b", "c"], ["a", "b", "c"]]


# ---- arguments ---------------------------------------------------------------------------------------------

def test_parameters_are_laid_out_as_the_ptx_says(tmp_path):
    """Sizes and natural alignment of the .param declarations of a kernel with every type of argument."""
    @cuda.jit
    def everything(a, b, c, d, e, f, g, h, i, j, k, l, m):
        a[uint32(0)] = b + c + d + e + f + g + h + i + j + k + l[uint32(0), uint32(0)] + m

    signature = ("float64[1]", "bool", "int8", "float64", "uint8", "int16", "uint16", "int32", "uint32",
                 "int64", "uint64", "float16[2]", "float32")
    ptx = compile_kernel(everything, signature, OLDEST, tmp_path).ptx
    offsets, end = [], 0
    for bits in re.findall(r"\.param \.[a-z](\d+) kernel_everything_param", ptx):
        size = int(bits) // 8
        offsets.append(end + -end % size)
        end = offsets[-1] + size
    assert compiler.parameter_layout(signature) == (offsets, end)
    words = compiler.array_words(256, (2, 3), 2)
    packed = compiler.packer(signature)(compiler.array_words(0, (4,), 8), True, *[1] * 9, words, 0.5)
    assert len(packed) == end and packed[-4:] == struct.pack("f", 0.5)
    assert words == struct.pack("9q", 0, 0, 6, 2, 256, 2, 3, 6, 2)


def test_scalar_types():
    for value, name in ((True, "bool"), (7, "uint32"), (0.5, "float32"), (np.float64(1), "float64"),
                        (np.int8(1), "int8"), (np.uint64(1), "uint64"), (np.bool_(0), "bool"),
                        (np.float16(1), "float16")):
        assert compiler.scalar_type(value) == name
    for value, error in ((-1, OverflowError), (1 << 32, OverflowError), ("x", TypeError), (None, TypeError)):
        with pytest.raises(error):
            compiler.scalar_type(value)


# ---- the key -----------------------------------------------------------------------------------------------

def kernel_from(source, tmp_path, name="kernel", **given):
    """A kernel from source text in a file of its own, with the globals `given`."""
    file = tmp_path / "source.py"
    file.write_text("from numba import cuda, float32, uint32\n" + textwrap.dedent(source))
    namespace = {"__name__": "source", **given}
    exec(compile(file.read_text(), str(file), "exec"), namespace)
    return namespace[name]


PLAIN = """
    FACTOR = 2.0
    @cuda.jit(device=True)
    def helper(x):
        return x * float32(3)
    @cuda.jit
    def kernel(x):
        x[uint32(0)] = helper(x[uint32(1)]) * float32(FACTOR)
"""


def test_key_follows_everything_that_counts(tmp_path):
    def key(source=PLAIN, signature=("float32[1]",), cc=OLDEST, **given):
        return cache_key(kernel_from(source, tmp_path, **given), signature, cc)

    assert key() == key() and len(key()) == 40
    other = {key(), key(PLAIN.replace("2.0", "2.5")), key(PLAIN.replace("float32(3)", "float32(4)")),
             key(PLAIN.replace("uint32(1)", "uint32(2)")), key("\n" + PLAIN),
             key(PLAIN.replace("@cuda.jit\n", "@cuda.jit(launch_bounds=64)\n")),
             key(signature=("float16[1]",)), key(cc=(8, 0))}
    assert len(other) == 8
    assert key(PLAIN + "\n    UNUSED = 1") == key()


def test_key_follows_closures_arrays_and_modules(tmp_path):
    closure = """
        def make(tile, table):
            @cuda.jit
            def kernel(x):
                x[uint32(0)] = float32(tile) + table[0]
            return kernel
        kernel = make(TILE, TABLE)
    """
    table = np.arange(3, dtype=np.float32)
    keys = {cache_key(kernel_from(closure, tmp_path, TILE=t, TABLE=a), ("float32[1]",), OLDEST)
            for t in (1, 2) for a in (table, table + 1)}
    assert len(keys) == 4

    module = type(sys)("settings_of_a_project")
    through_module = "@cuda.jit\ndef kernel(x):\n    x[uint32(0)] = settings.DEPTH"
    keys = set()
    for module.DEPTH in (1, 2, 1):
        keys.add(cache_key(kernel_from(through_module, tmp_path, settings=module), ("float32[1]",), OLDEST))
    assert len(keys) == 2


def test_key_follows_the_file_of_an_intrinsic(tmp_path):
    source = """
        from numba.cuda import types
        from numba.cuda.extending import intrinsic
        TEXT = "mov.b32 $0, 1;"
        @intrinsic
        def one(context):
            return types.uint32(), lambda *a: None
        @cuda.jit
        def kernel(x):
            x[uint32(0)] = one()
    """
    keys = set()
    for text in (source, source.replace("0, 1;", "0, 2;")):
        linecache.clearcache()                           # as in a process started after the change
        keys.add(cache_key(kernel_from(text, tmp_path), ("uint32[1]",), OLDEST))
    assert len(keys) == 2


@intrinsic
def plus_one(context, x):
    return x(x), lambda _, builder, __, values: builder.add(values[0], values[0].type(1))


@intrinsic
def plus_two(context, x):
    return x(x), lambda _, builder, __, values: builder.add(values[0], values[0].type(2))


def plus(n, cell):
    """An intrinsic that knows its number from a closure, through whatever `cell` makes of it."""
    held = cell(n)

    @intrinsic
    def plus_n(context, x):
        number = held if isinstance(held, int) else held[-1]
        return x(x), lambda _, builder, __, values: builder.add(values[0], values[0].type(number))

    return plus_n


def applies(*functions):
    a, b, c = (*functions, *functions[:1] * 2)[:3]

    @cuda.jit
    def kernel(x):
        x[uint32(0)] = a(x[uint32(0)])
        x[uint32(1)] = b(x[uint32(1)])
        x[uint32(2)] = c(x[uint32(2)])

    return kernel


def test_key_tells_intrinsics_of_one_file_apart():
    functions = [plus_one, plus_two] + [plus(n, cell) for n in (1, 2) for cell in (int, lambda n: (0, n))]
    assert len({cache_key(applies(f), ("int32[1]",), OLDEST) for f in functions}) == len(functions)


def test_key_tells_which_function_comes_again():
    @cuda.jit(device=True)
    def f(x):
        return x + 1

    @cuda.jit(device=True)
    def g(x):
        return x * 10

    orders = [(f, g, f), (f, g, g), (f, f, g), (g, f, g)]
    assert len({cache_key(applies(*order), ("int32[1]",), OLDEST) for order in orders}) == len(orders)


def test_key_follows_the_names_in_a_tuple(tmp_path):
    source = "@cuda.jit\ndef kernel(x):\n    x[uint32(0)] = PAIR.a"
    pairs = [namedtuple("Pair", fields)(1, 2) for fields in ("a b", "b a")]
    keys = [cache_key(kernel_from(source, tmp_path, PAIR=pair), ("int32[1]",), OLDEST) for pair in pairs]
    assert keys[0] != keys[1]


def test_key_takes_no_attribute_for_a_global(tmp_path):
    """As in a notebook: `x` is an array of the session, threadIdx.x is not."""
    source = "@cuda.jit\ndef kernel(y):\n    i = uint32(cuda.threadIdx.x)\n    y[i] = i"
    keys = {cache_key(kernel_from(source, tmp_path, x=x), ("float32[1]",), OLDEST)
            for x in (object(), np.zeros(3), np.ones(3))}
    assert len(keys) == 1


@pytest.mark.parametrize("file", ["/tmp/ipykernel_{}/123.py", "<ipython-input-{}-123>"])
def test_notebook_cells_are_found_again_after_a_restart(tmp_path, file):
    """Their files lie in a folder that is named after the process, or are named after how many cells ran before."""
    text = "from numba import cuda\n@cuda.jit\ndef kernel(x):\n    x[0] = (lambda: 1)()\n"
    kernels = []
    for process in (111, 222):
        namespace = {}
        exec(compile(text, file.format(process), "exec"), namespace)
        kernels.append(namespace["kernel"])
    assert len({cache_key(kernel, ("float32[1]",), OLDEST) for kernel in kernels}) == 1
    session = "ipykernel_333"
    (tmp_path / session).mkdir()
    cell = kernel_from("@cuda.jit\ndef kernel(x):\n    x[0] = 1", tmp_path / session)
    ptx = compile_kernel(cell, ("float32[1]",), OLDEST, tmp_path).ptx
    assert session not in ptx and '"source.py"' in ptx


def test_key_refuses_what_it_cannot_see_through(tmp_path):
    class Opaque:
        pass

    kernel = kernel_from("@cuda.jit\ndef kernel(x):\n    x[uint32(0)] = THING.size", tmp_path, THING=Opaque())
    with pytest.raises(TypeError, match="Opaque"):
        cache_key(kernel, ("float32[1]",), OLDEST)


# ---- the cache ---------------------------------------------------------------------------------------------

PROCESS = """
import sys
from kernels import compile as compiler
from kernels import quick_numba
from kernels.compile import compile_kernel
from tests.kernels_to_compile import (HALF_SIGNATURE, OLDEST, SIGNATURE, calls_device_function, half_sum,
                                      multiply_add)

folder = sys.argv[1]
for kernel, signature in ((multiply_add, SIGNATURE), (half_sum, HALF_SIGNATURE),
                          (calls_device_function, ("float32[1]", "uint32"))):
    compile_kernel(kernel, signature, OLDEST, folder)
print(compiler.n_compiled)
"""


def in_processes(folder, seeds, **environment):
    """Runs PROCESS once per hash seed, all at once; the number of kernels that each compiled."""
    running = [subprocess.Popen([sys.executable, "-c", PROCESS, str(folder)], cwd=ROOT, text=True,
                                stdout=subprocess.PIPE, env=os.environ | environment | {"PYTHONHASHSEED": seed})
               for seed in seeds]
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in running]
    assert all(process.returncode == 0 for process in running)
    return [int(output) for output in outputs]


def test_second_start_compiles_nothing(tmp_path):
    assert set(in_processes(tmp_path, seeds=["1", "2"])) <= {0, 1, 2, 3}      # at once, in one folder
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert in_processes(tmp_path, seeds=["3"], **ascii_only) == [0]       # whatever the locale
    assert len(list((tmp_path / "ptx").iterdir())) == 3


OVERRUN = """
from numba import cuda, float32, uint32
from numba.types import float16


@cuda.jit(device=True)
def scaled(x):
    return float16(x) * float16(2)


@cuda.jit
def overrun(y):
    i = uint32(cuda.threadIdx.x)
    y[i] = float32(scaled(y[i]))
"""
CHECKOUT = """
import sys
import numpy as np
from kernels import changed, compile as compiler, overrun
from kernels.card import LaunchError
from kernels.open import open_cards
from kernels.assembler import assemble

folder = sys.argv[1]
card = open_cards("emulated", cache_dir=folder)[0]
with card.checking():
    card.launch(overrun.overrun, 1, 8, card.upload(np.ones(8, np.float32), "y"))
try:
    with card.checking():
        card.launch(overrun.overrun, 1, 8, card.zeros(7, np.float32, "y"))
except LaunchError as error:
    print(error)
card.launch(overrun.overrun, 1, 8, card.zeros(8, np.float32))
card.synchronize()
compiled = compiler.compile_kernel(overrun.overrun, ("float32[1]",), card.cc, folder)
assemble(compiled, compiler.supported_ccs()[-1], folder)
print(compiler.n_compiled)
compiler.compile_kernel(changed.overrun, ("float32[1]",), card.cc, folder)
print(compiler.n_compiled, str(compiler.ROOT) in compiled.ptx, compiler.ROOT)
"""


def test_checkouts_share_one_cache(tmp_path):
    """A second checkout, run in a Python environment with another path, finds all that the first one compiled. It
    compiles only changed.py, the one file whose text differs."""
    cache, link = tmp_path / "cache", tmp_path / "environment"
    link.symlink_to(sys.prefix)
    pythons = sys.executable, str(link / Path(sys.executable).relative_to(sys.prefix))
    roots, found = (tmp_path / "größer", tmp_path / "second"), []
    for root, python, factor in zip(roots, pythons, "23"):
        shutil.copytree(ROOT / "kernels", root / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
        (root / "kernels" / "overrun.py").write_text(OVERRUN)
        (root / "kernels" / "changed.py").write_text(OVERRUN.replace("float16(2)", f"float16({factor})"))
        before = set(cache.rglob("*.*"))
        run = subprocess.run([python, "-c", CHECKOUT, str(cache)], cwd=root, text=True, capture_output=True,
                             timeout=PATIENCE)
        assert run.returncode == 0, run.stderr
        *message, n_compiled, last = run.stdout.splitlines()
        assert f"overrun ({root / 'kernels' / 'overrun.py'}, line 14), block (0, 0, 0), thread (7, 0, 0)" in message[0]
        assert message[-1].endswith("line 14: y[i] = float32(scaled(y[i]))")
        n_all, names_root, at = last.split(" ", 2)
        assert (names_root, at) == ("False", str(root))
        new = [file.parent.name for file in set(cache.rglob("*.*")) - before]
        found.append((int(n_compiled), int(n_all), len(new), set(new) - {"cubin"}))
    assert found[0][:2] == (1, 2) and found[0][3] == {"ptx", "native"}
    assert found[1] == (0, 1, 1, {"ptx"})


def test_files_outside_the_project_keep_their_path(tmp_path, monkeypatch):
    """Two files of one text are two kernels there: messages name the file."""
    source = "@cuda.jit\ndef kernel(x):\n    x[0] = 1"
    folders = tmp_path / "a", tmp_path / 'b "ß'
    [folder.mkdir() for folder in folders]
    assert len({cache_key(kernel_from(source, f), ("float32[1]",), OLDEST) for f in folders}) == 2
    monkeypatch.chdir(tmp_path)
    assert compiler.portable_file("kernels/norm.py") == str(tmp_path / "kernels" / "norm.py")
    for name in ("/else/where.py", "<stdin>"):
        assert compiler.portable_file(name) == name
    assert compiler.current_file("/else/where.py") == "/else/where.py"


def test_damaged_entries_are_made_again(tmp_path):
    def fresh():
        compiler._memory.clear()
        return compile_kernel(multiply_add, SIGNATURE, OLDEST, tmp_path).ptx

    before, text = compiler.n_compiled, fresh()
    file, = (tmp_path / "ptx").iterdir()
    whole = file.read_bytes()
    for damage in (whole[:-1], whole[:10], b"", whole[:50] + b"?" + whole[51:]):
        file.write_bytes(damage)
        assert fresh() == text and file.read_bytes() == whole
    assert compiler.n_compiled == before + 5
    assert fresh() == text and compiler.n_compiled == before + 5


def test_what_was_used_longest_ago_makes_room(tmp_path, monkeypatch):
    noise = os.urandom(2500)                    # no smaller when compressed
    compiler.store(tmp_path / "one", noise[:1000])
    monkeypatch.setattr(compiler, "MOST_BYTES", 3 * (tmp_path / "one").stat().st_size)
    folder = tmp_path / "native"
    for age, name in enumerate("abc"):
        compiler.store(folder / name, noise[:1000])
        os.utime(folder / name, (1000 + age, 1000 + age))
    assert compiler.load(folder / "a") == noise[:1000]
    compiler.store(folder / "d", noise[:1000])
    assert {file.name for file in folder.iterdir()} == {"a", "c", "d"}
    compiler.store(folder / "e", noise)
    assert {file.name for file in folder.iterdir()} == {"e"}


def test_a_look_for_room_comes_once_in_many_files(tmp_path, monkeypatch):
    """And it comes: files of a 6400th of what a folder may hold cause one in a hundred."""
    looks = []
    monkeypatch.setattr(compiler, "_make_room", looks.append)
    monkeypatch.setattr(compiler, "MOST_BYTES", 6400 * 120)
    for i in range(500):
        compiler.store(tmp_path / "file", b"%100d" % i + np.random.default_rng(i).bytes(100))
    assert 1 <= len(looks) <= 15


def test_files_are_small(tmp_path):
    """A suite's kernels must fit MOST_BYTES, or a second run compiles again what the first one threw out."""
    ptx = compile_kernel(calls_device_function, ("float32[1]", "uint32"), OLDEST, tmp_path).ptx
    file, = (tmp_path / "ptx").iterdir()
    assert compiler.load(file) == ptx.encode() and file.stat().st_size < len(ptx) / 2


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    compiler._memory.clear()
    with pytest.warns(UserWarning, match="not kept"):
        assert compile_kernel(multiply_add, SIGNATURE, OLDEST, tmp_path / "file").ptx


def test_threads_compile_once(tmp_path):
    compiler._memory.clear()
    before, results = compiler.n_compiled, []

    def work():
        results.append(compile_kernel(multiply_add, SIGNATURE, OLDEST, tmp_path))

    threads = [threading.Thread(target=work) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(set(map(id, results))) == 1 and len(results) == 8 and compiler.n_compiled == before + 1
