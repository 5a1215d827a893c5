"""What every kernel of the engine must be on the target hardware: no instruction that throttled cards lack the pipe for
(tensor, fp64), none that differs between cards (approximate), and no register spilled on sm_70."""

import re
from types import SimpleNamespace

import pytest

import qengine
from kernels import compile as compiler
from kernels import nvidia, q8_gemv
from kernels.formats import FORMATS
from kernels.quant_gemv import PACKED, decoder
from tests.models import write_as_float32
from tests.oracle import DATA
from tests.tiny import tiny_engine

FORBIDDEN = {
    "tensor core": r"\b(mma|wmma|ldmatrix)\b",
    "fp64": r"\.f64\b",
    "approximate": r"\.approx\b",
    "contracted by the assembler": r"\b(add|sub|mul)(\.sat)?\.f(16|32)(x2)?\b",  # without .rn ptxas may fuse them
}
TARGET = (7, 0)
Q8_0 = FORMATS["Q8_0"]


def engine_kernels(directory):
    """(kernel, argument types) of every launch of Q8_0 and float models, greedy and drawn, prompt and answer."""
    small = directory / "float.gguf"
    write_as_float32(DATA / "tiny-Q8_0.gguf", small)
    loaded = [qengine.load(str(file), card="emulated", ctx=256, progress=False)
              for file in (DATA / "tiny-Q8_0.gguf", small)]
    used = set()
    for engine in (tiny_engine(), *loaded):
        for temperature in (0.0, 1.0):
            request = qengine.Request(list(range(70)), max_tokens=3, temperature=temperature, seed=1)
            engine.submit(request).wait()
        engine.evaluate(list(range(9)))
        used |= set(engine.cards[0]._functions)
    for engine in loaded:
        engine.close()
    return sorted(used, key=lambda key: (key[0].__name__, key[1:]))


def products_of_real_cards(format, columns, widths):
    """The decode products of a format in the shapes that the emulated card does not use: of 1, 2, .. `columns` columns
    for a warp and, after the norm, of rows of these widths."""
    card, fmt = SimpleNamespace(kind="cuda"), decoder(format)
    w = "int8[1]" if format.bits == 8 else "uint8[1]", "uint16[1]"
    x, y, norm = ("int8[1]", "float32[1]"), ("float32[1]", "uint32"), ("float32[1]", "float32[1]", "float32")
    for n in range(1, columns + 1):
        kernel = q8_gemv.gemv_kernel(fmt, n, q8_gemv.shape_for(card, fmt, n, 4096), False)
        yield kernel, *y, *w, *x, *["uint32"] * 6, "bool"
        kernel = q8_gemv.swiglu_kernel(fmt, n, q8_gemv.shape_for(card, fmt, n, 4096, True), False)
        yield kernel, *x, *w, *x, *["uint32"] * 4
    for k in widths:
        kernel = q8_gemv.gemv_kernel(fmt, 1, q8_gemv.shape_for(card, fmt, 1, k), True)
        yield kernel, *y, *w, *norm, *["uint32"] * 4
    kernel = q8_gemv.swiglu_kernel(fmt, 1, q8_gemv.shape_for(card, fmt, 1, 4096, True), True)
    yield kernel, *x, *w, *norm, *["uint32"] * 2


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    if TARGET not in compiler.supported_ccs():
        pytest.skip("the installed CUDA toolkit cannot compile for sm_70")
    packed = [kernel for format in PACKED for kernel in products_of_real_cards(format, 2, [4096])]
    return [*engine_kernels(tmp_path_factory.mktemp("models")), *products_of_real_cards(Q8_0, 4, [4096, 5120]), *packed]


def test_the_pipes_of_the_engine(kernels):
    assert len(kernels) > 20
    everything = ""
    for kernel, *types in kernels:
        ptx = compiler.compile_kernel(kernel, tuple(types), TARGET).ptx
        for what, pattern in FORBIDDEN.items():
            found = re.search(pattern, ptx)
            assert not found, f"{kernel.__name__}: {what}: {ptx[found.start() - 20:found.end() + 40]!r}"
        everything += ptx
    assert "dp4a.s32.s32" in everything and "fma.rn.f16x2" in everything


def test_no_register_is_spilled_on_sm_70(kernels):
    if not nvidia.find_assembler():
        pytest.skip("ptxas of the toolkit is not installed")
    program, _ = nvidia.find_assembler()
    for kernel, *types in kernels:
        compiled = compiler.compile_kernel(kernel, tuple(types), TARGET)
        _, words = nvidia.run_assembler(program, compiled, TARGET)
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", words)]
        assert spills and not any(spills), f"{kernel.__name__}{types}: {words}"
