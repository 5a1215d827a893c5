"""Runs lines of PTX on arrays: the harness of the opcode tests."""

import re
import struct

import numpy as np

from kernels.emulated import native

SIZE = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4,
        "f16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8}


def module(body, params, registers="", variables=""):
    """The text of a module with one kernel `k`; params: PTX types of parameters p0, p1, ..."""
    listed = ", ".join(f".param .{t} p{i}" for i, t in enumerate(params))
    return f""".version 8.0
.target sm_70
.address_size 64
{variables}
.visible .entry k({listed})
{{
.reg .pred %p<16>;
.reg .b16 %h<32>;
.reg .b32 %r<64>;
.reg .f32 %f<32>;
.reg .b64 %rd<64>;
.reg .f64 %fd<32>;
{registers}
.loc 1 7 0
{body}
ret;
}}
"""


def launch(ptx, grid, block, *arguments, shared_bytes=0, target=None):
    """Runs a module's kernel on NumPy arrays (passed as pointers) and ints (passed as u32)."""
    params = b""
    for a in arguments:
        wide = isinstance(a, np.ndarray)
        params = params.ljust(-(-len(params) // 8) * 8, b"\0") if wide else params
        params += struct.pack("<Q", a.ctypes.data) if wide else struct.pack("<I", a)
    kernel = native.NativeKernel(ptx, None, target)
    native.execute([kernel.prepare(grid, block, params, shared_bytes)])


def elementwise(lines, kinds, result, inputs, uniform, target=None):
    """Applies `lines`, which compute %out from %in0, %in1, ..., to every element of the inputs.

    kinds: PTX types of the inputs; result: that of %out; both are the registers' types. uniform: one element per block,
    so that everything is computed once per warp; otherwise one element per lane."""
    n = len(inputs[0])
    assert n % 32 == 0
    names = [f".reg .{_register(k)} %in{i};" for i, k in enumerate(kinds)] + [f".reg .{_register(result)} %out;"]
    body = ["mov.u32 %r0, %ctaid.x;", "mov.u32 %r1, %tid.x;"]
    if uniform:
        body += ["mov.u32 %r2, %r0;"]
    else:
        body += ["mad.lo.s32 %r2, %r0, 32, %r1;"]
    for i, kind in enumerate((result, *kinds)):
        body += [f"ld.param.u64 %rd{i}, [p{i}];", f"mad.wide.u32 %rd{i + 8}, %r2, {SIZE[kind]}, %rd{i};"]
        if i:
            body += [f"ld.global.{_stored(kind)} %in{i - 1}, [%rd{i + 8}];"]
    body += [lines, f"st.global.{_stored(result)} [%rd8], %out;"]
    out = np.zeros(n, np.dtype(f"u{SIZE[result]}"))
    ptx = module("\n".join(body), ["u64"] * (1 + len(kinds)), "\n".join(names))
    launch(ptx, (n if uniform else n // 32,), (32,), out, *(np.ascontiguousarray(x) for x in inputs), target=target)
    return out


def _register(kind):
    return kind if kind in ("f32", "f64") else f"b{8 * max(SIZE[kind], 2)}"


def _stored(kind):
    return re.sub("f16x2", "b32", re.sub("^f16$", "b16", kind))
