"""PTX to machine code with ptxas, the assembler of the CUDA toolkit. It needs no card and no driver.

Two things need it. A real card loads machine code (a cubin): a driver accepts machine code from any toolkit of its
own major version, but PTX only from toolkits that are no newer than the driver. And estimates need the number of
registers that a kernel takes, which ptxas prints.

nvJitLink would do without a program, but it assembles every kernel as a part of something larger: a shuffle becomes
a call, and gemv_q8_q8 grows from 11 to 18 KB on sm_70.
"""

import hashlib
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from cuda import pathfinder
from cuda.bindings import nvrtc

from kernels import compile as compiler
from kernels.card import CardError


@cache
def find_assembler():
    """(path of ptxas, the text of `ptxas --version`), or None.

    None: there is no ptxas, or it is not of the toolkit that compiles kernels to PTX.
    """
    program = pathfinder.find_nvidia_binary_utility("ptxas")
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout if program else ""
    _, *release = nvrtc.nvrtcVersion()
    return (program, version) if "release %d.%d," % tuple(release) in version else None


def cubin_path(compiled, cc, cache_dir):
    """The file in which `assemble` keeps a kernel's machine code; None where it cannot make any.

    That is where the toolkit has no assembler, or where the toolkit does not know compute capability `cc`.
    """
    assembler = find_assembler()
    if assembler is None or cc not in compiler.supported_ccs():
        return None
    key = hashlib.sha256(repr((assembler[1], cc, compiled.ptx)).encode()).hexdigest()[:40]
    return Path(cache_dir) / "cubin" / f"{key}.cubin.z"


def assemble(compiled, cc, cache_dir):
    """Machine code (a cubin) of a compiled kernel for compute capability `cc`, kept in `cache_dir` / "cubin".

    None where `cubin_path` is None. Raises CardError when the PTX is wrong.
    """
    path = cubin_path(compiled, cc, cache_dir)
    if path is None:
        return None
    cubin = compiler.load(path)
    if cubin is None:
        cubin, _ = run_assembler(find_assembler()[0], compiled, cc)
        compiler.store(path, cubin)
    return cubin


def run_assembler(program, compiled, cc):
    """(machine code, what ptxas prints on registers and spills). `program`: the path of ptxas."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(compiled.ptx, encoding="utf-8")
        command = [program, f"-arch=sm_{cc[0]}{cc[1]}", "-v", "-lineinfo", source, "-o", cubin]
        run = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if run.returncode:
            words = re.sub(r"\S*kernel\.ptx", "PTX", run.stderr).strip()
            raise CardError(f"{compiled.name} cannot be assembled for sm_{cc[0]}{cc[1]}: {words}")
        return cubin.read_bytes(), run.stderr
