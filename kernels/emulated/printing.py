"""`print` in a kernel: the instruction `vprintf`, which the compiled code hands to Python lane by lane.

What a kernel prints appears at once, not when the card is synchronized; lanes in order, warps and blocks as
they run.
"""

import ctypes
import re
import struct
import sys

import llvmlite.binding as llvm

from .memory import Memory

# A directive of C: flags, width and precision; size; letter.
_DIRECTIVE = re.compile(r"%([-+ #0]*\d*(?:\.\d+)?)(hh|h|ll|l|z|j|t)?([diouxXeEfFgGcsp%])")


class Printing(Memory):
    """The instruction `vprintf result, format, values`."""

    def op_vprintf(self, instr):
        result, *texts = instr.operands
        form, values = (self.pointer(32, self.vector(text, "i64")) for text in texts)
        self.put(result, "i32", 32, self.each_lane("i32", lambda lane: self._print(form, values, lane)))

    def _print(self, form, values, lane):
        arguments = [self.let(f"extractelement <32 x ptr> {pointers}, i32 {lane}")
                     for pointers in (form, values)]
        return self.call("qengine_print", "i32", *(("ptr", a) for a in arguments))


def formatted(form, values):
    """The text that C's printf makes of `form`; values: the address of the arguments, each aligned to its
    size."""
    at = values

    def directive(match):
        nonlocal at
        options, size, letter = match.groups()
        if letter == "%":
            return "%"
        wide = letter in "eEfFgGsp" or size in ("ll", "l", "z", "j", "t")
        at = -(-at // 8) * 8 if wide else -(-at // 4) * 4
        raw = ctypes.string_at(at, 8 if wide else 4)
        at += len(raw)
        if letter in "eEfFgG":
            return f"%{options}{letter}" % struct.unpack("d", raw)
        value = int.from_bytes(raw, "little", signed=letter in "di")
        if letter == "s":
            return f"%{options}s" % ctypes.string_at(value).decode(errors="replace")
        return f"%{options}{letter}" % value if letter != "p" else hex(value)
    return _DIRECTIVE.sub(directive, form)


@ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
def _print(form, values):
    """vprintf: writes to sys.stdout; the result is the number of values, as on a card."""
    form = ctypes.string_at(form).decode(errors="replace")
    sys.stdout.write(formatted(form, values))
    return sum(match[3] != "%" for match in _DIRECTIVE.finditer(form))


llvm.add_symbol("qengine_print", ctypes.cast(_print, ctypes.c_void_p).value)
