"""The table of opcodes in the docstring of kernels/emulated says what the code does."""

import re

import kernels.emulated
from kernels.emulated.flow import ENDS_BLOCK, is_barrier
from kernels.emulated.ptx import Instr, parse
from kernels.emulated.translate import Translator
from tests.emulated.ptx_runner import module


def table():
    """file -> the opcodes in its row."""
    rows = kernels.emulated.__doc__.split("    file            opcodes\n")[1].split("\n\n")[0].splitlines()
    cells = [re.sub(r"\(.*\)", "", row).split() for row in rows]
    return {file: {opcode.split(".")[0] for opcode in opcodes} for file, *opcodes in cells}


def translated():
    """file -> the opcodes for which its class has a method, or which the walk over the blocks handles itself."""
    files = {}
    for part in Translator.__mro__[:-1]:
        methods = {name.removeprefix("op_") for name in vars(part) if name.startswith("op_")}
        files[part.__module__.rpartition(".")[2] + ".py"] = methods
    files["translate.py"] |= ENDS_BLOCK | {"bar", "barrier"}
    return files


def test_table_of_opcodes():
    assert all(is_barrier(Instr(name, (), ())) for name in ("bar", "barrier"))
    rows, files = table(), translated()
    replaced = rows.pop("ptx.py")
    assert len(rows["memory.py"]) > 10 and replaced
    assert rows == {file: opcodes for file, opcodes in files.items() if opcodes or file in rows}
    assert not replaced & set().union(*files.values())


def test_replaced_opcodes():
    """Those in the row of ptx.py are gone when a module has been read."""
    function = ".func nothing() {\nret; }"
    body = "call.uni nothing, (); ts: .branchtargets A, B; brx.idx %r1, ts; A: add.u32 %r1, %r1, 1; B:"
    text = module(body, [], variables=function)
    names = {getattr(item, "name", None) for item in parse(text).entry.body}
    for opcode in table()["ptx.py"]:
        assert re.search(rf"\b{opcode}\.", text) and opcode not in names
