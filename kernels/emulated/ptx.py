"""PTX text -> small dataclasses.

Only the grammar is known here, not what an instruction means, except which operands are results: a module is
functions and variables, a function is parameters, registers, variables and a list of instructions and labels.
Registers of nested scopes (inline assembly) get names of their own, calls of `.func` functions are replaced by
their bodies, and an instruction under a predicate becomes a branch around it, so that the later stages see one
flat list in which only `bra` is conditional. What an instruction does besides its operands is spelled out: the
carry flag is a register, a jump through a table is a chain of branches, and a barrier that reduces is followed
by a `barrier_result` that writes its register. `vprintf` is an instruction.
"""

import re
import struct
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property


class Unsupported(Exception):
    """The PTX contains something that the emulated card does not know. The message names the instruction and its
    line."""


@dataclass(frozen=True)
class Reg:
    """A register, or one component of a special register (`%tid.x`)."""
    name: str


@dataclass(frozen=True)
class Imm:
    """An immediate: `value` is an int (for `0f...`, `0d...` the bits, with `floating` = 32 or 64)."""
    value: int
    floating: int = 0


@dataclass(frozen=True)
class Symbol:
    """The address of a variable, or a label, or a parameter."""
    name: str


@dataclass(frozen=True)
class Mem:
    """[base + offset]"""
    base: Reg | Symbol | Imm
    offset: int = 0


@dataclass(frozen=True)
class Pack:
    """{a, b, ...}"""
    items: tuple


@dataclass(frozen=True)
class Pair:
    """a | b: two results of one instruction."""
    first: object
    second: object


# Instructions whose first operand is no result.
NO_RESULT = {"st", "bra", "bar", "barrier", "membar", "fence", "ret", "exit", "red", "trap", "brkpt",
             "nanosleep", "prefetch", "prefetchu", "discard", "pragma", "cp"}


@dataclass(frozen=True)
class Instr:
    """One instruction: name ("mad"), mods (("lo", "s32")), operands, guard (register, negated) and source
    line."""
    name: str
    mods: tuple
    operands: tuple
    guard: tuple | None = None
    line: int = 0
    text: str = ""

    @cached_property
    def written(self):
        """Names of the registers that it writes."""
        if self.name in NO_RESULT or not self.operands or isinstance(self.operands[0], Mem):
            return ()
        return tuple(r for r in registers_of(self.operands[0]) if r != "_")

    @cached_property
    def sources(self):
        """The operands that it reads."""
        return self.operands if self.name in NO_RESULT else self.operands[1:]

    @cached_property
    def reads(self):
        """Names of the registers that it reads."""
        operands = (self.guard[0], *self.sources) if self.guard else self.sources
        return tuple(r for o in operands for r in registers_of(o))

    def unsupported(self, why=""):
        """The exception that refuses this instruction."""
        why = why or "unknown instruction or modifier"
        return Unsupported(f"`{self.text}` (source line {self.line}): {why}")


@dataclass(frozen=True)
class Label:
    name: str


@dataclass
class Variable:
    """A variable in `space` (global, const, shared, local, param); size in bytes, None for extern (dynamic)
    shared."""
    name: str
    space: str
    type: str
    size: int | None
    align: int
    data: bytes | None = None


@dataclass
class Function:
    name: str
    is_entry: bool
    params: list = field(default_factory=list)
    returns: list = field(default_factory=list)
    registers: dict = field(default_factory=dict)   # name -> PTX type
    variables: list = field(default_factory=list)
    body: list = field(default_factory=list)        # Instr | Label


@dataclass
class Module:
    functions: dict
    variables: dict

    @property
    def entry(self):
        entries = [f for f in self.functions.values() if f.is_entry]
        if len(entries) != 1:
            raise Unsupported(f"a module with {len(entries)} kernels; exactly one is expected")
        return entries[0]


SIZES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4, "s32": 4,
         "f32": 4, "f16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "pred": 1}

CARRY = "%carry"                                    # the register that stands for the carry flag, CC.CF
_USE_CARRY = ("addc", "subc", "madc")

_LINE_DIRECTIVES = (".version", ".target", ".address_size", ".file")
_DECLARATION = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*\.(?P<space>global|const|shared|local|param)\s+"
    r"(?:\.align\s+(?P<align>\d+)\s+)?"
    r"(?:\.ptr\s+)?\.(?P<type>\w+)\s+(?P<name>[\w$%.]+)\s*(?P<array>\[\s*\d*\s*\])?\s*(?:=\s*(?P<init>.*))?$",
    re.S)
_HEADER = re.compile(r"(?:\.(?:visible|extern|weak)\s+)*\.(?P<kind>entry|func)\s*"
                     r"(?:\((?P<returns>[^)]*)\)\s*)?"
                     r"(?P<name>[\w$]+)\s*(?:\((?P<params>[^)]*)\))?(?P<rest>.*)$", re.S)


def _statements(text):
    """Yields (statement, source line, terminator); terminator is one of `;`, `:`, `{`, `}`."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"(?m)^\s*\.section\s[^{]*\{[^}]*\}", "", text)           # debugging information
    pending, depth, line = "", 0, 0
    for raw in text.splitlines():
        raw = raw.split("//")[0].strip()
        if not raw:
            continue
        if raw.startswith((".loc ", ".loc\t")):
            line = _source_line(raw) or line
            continue
        if raw.startswith(_LINE_DIRECTIVES):
            continue
        for part in re.split(r"([;{}:])", raw):
            if part == "{" and (depth or pending.strip() and not _is_header(pending)):
                depth += 1
                pending += part
            elif part == "}" and depth:
                depth -= 1
                pending += part
            elif part in (";", "{", "}") or part == ":" and re.fullmatch(r"\s*[\w$]+\s*", pending):
                yield pending.strip(), line, part
                pending = ""
            else:
                pending += part
        pending += " "


def _source_line(directive):
    """The line in the kernel's file of `.loc file line column[, function_name ..., inlined_at file line column]`; 0
    if there is no such line."""
    words = directive.replace(",", " ").split()
    if words[1] != "1" and "inlined_at" in words:
        words = words[words.index("inlined_at"):]
    return int(words[2])


def _is_header(statement):
    return re.match(r"\s*(?:\.(?:visible|extern|weak)\s+)*\.(entry|func)\b", statement) is not None


def _declaration(statement):
    match = _DECLARATION.match(statement)
    if not match or match["type"] not in SIZES:
        raise Unsupported(f"declaration `{statement}`")
    element = SIZES[match["type"]]
    size, data = element, None
    if match["array"]:
        count = match["array"].strip("[] \t")
        size = int(count) * element if count else None
    if match["init"]:
        values = [int(v, 0) for v in match["init"].strip("{} \t").split(",")]
        data = b"".join((v % (1 << 8 * element)).to_bytes(element, "little") for v in values)
        data = data.ljust(size, b"\0")
    return Variable(match["name"], match["space"], match["type"], size, int(match["align"] or element), data)


_BRACKETS = re.compile(r"[][{}()]")


def _split(text):
    """Splits at commas that are not inside brackets or braces."""
    parts, depth, start = [], 0, 0
    if not _BRACKETS.search(text):
        return [part for p in text.split(",") if (part := p.strip())]
    for i, c in enumerate(text):
        depth += (c in "[{(") - (c in "]})")
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return [p.strip() for p in parts if p.strip()]


def _number(text):
    if text[:2] in ("0f", "0F"):
        return Imm(int(text[2:], 16), 32)
    if text[:2] in ("0d", "0D"):
        return Imm(int(text[2:], 16), 64)
    if re.fullmatch(r"-?\d+\.\d*", text):
        return Imm(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
    return Imm(int(text.rstrip("U"), 0))


@contextmanager
def _known_forms(instr):
    """Refuses an instruction if the code inside finds operands of another form than it expects."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise instr.unsupported("a statement of an unknown form") from error


class _Reader:
    """Reads the statements of a module in order."""

    def __init__(self, text):
        self.module = Module({}, {})
        self.function = None
        self.scopes = []                            # of the open braces: written name -> own Reg or Symbol
        self.n_scopes = 0
        self.tables = {}                            # label of a `.branchtargets` -> labels
        self.label = None                           # the label just read
        for statement, line, end in _statements(text):
            with _known_forms(Instr("", (), (), line=line, text=statement)):
                self.read(statement, line, end)

    def read(self, statement, line, end):
        if end == "{":
            if statement:
                self.function = self.header(statement)
                self.scopes = [{}]
            else:
                self.n_scopes += 1
                self.scopes.append({})
        elif end == "}":
            self.scopes.pop()
            self.n_scopes += 1
            if not self.scopes:
                self.function = None
        elif end == ":":
            self.label = statement
            self.function.body.append(Label(statement))
        elif not statement or statement.startswith(".pragma"):
            return
        elif self.function is None:
            if not _is_header(statement):           # a prototype needs nothing
                variable = _declaration(statement)
                self.module.variables[variable.name] = variable
        elif statement.startswith(".reg"):
            self.registers(statement)
        elif statement.startswith(".branchtargets"):
            self.tables[self.label] = [Symbol(t) for t in _split(statement.split(None, 1)[1])]
        elif statement.startswith((".shared", ".local", ".param", ".extern")):
            self.variable(_declaration(statement))
        else:
            self.function.body += self.spelled_out(self.instruction(statement, line))

    def spelled_out(self, instr):
        """The instructions that do what this one does, all of whose effects are on their operands."""
        if "cc" in instr.mods or instr.name in _USE_CARRY:
            self.function.registers[CARRY] = "pred"
            result, *sources = instr.operands
            result = Pair(result, Reg(CARRY)) if "cc" in instr.mods else result
            sources += [Reg(CARRY)] if instr.name in _USE_CARRY else []
            return [replace(instr, operands=(result, *sources))]
        if instr.name in ("bar", "barrier") and "red" in instr.mods:
            result, *sources = instr.operands
            return [replace(instr, operands=tuple(sources)),
                    replace(instr, name="barrier_result", operands=(result,))]
        if instr.name == "cp":
            return self.copy(instr)
        return [instr]

    def copy(self, instr):
        """A copy that a thread need not wait for is made at once, by a load and a store. The checking mode knows that
        it may have been made later."""
        if instr.mods in (("async", "commit_group"), ("async", "wait_group"), ("async", "wait_all")):
            return [instr]
        if instr.mods[:1] + instr.mods[2:] != ("async", "shared", "global") or len(instr.operands) != 3:
            raise instr.unsupported()
        to, source, size = instr.operands
        if (instr.mods[1], size.value) not in (("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)):
            raise instr.unsupported()
        words = tuple(Reg(f"copied@{i}") for i in range(size.value // 4))
        self.function.registers |= {word.name: "u32" for word in words}
        what = ("u32",) if len(words) == 1 else (f"v{len(words)}", "u32")
        held = words[0] if len(words) == 1 else Pack(words)
        return [replace(instr, name="ld", mods=("global", *what), operands=(held, source)),
                replace(instr, name="st", mods=("async", "shared", *what), operands=(to, held))]

    def header(self, statement):
        match = _HEADER.match(statement)
        if not match:
            raise Unsupported(f"function header `{statement}`")
        function = Function(match["name"], match["kind"] == "entry")
        function.params = [_declaration(p) for p in _split(match["params"] or "")]
        function.returns = [_declaration(p) for p in _split(match["returns"] or "")]
        self.module.functions[function.name] = function
        return function

    def own_name(self, name):
        """A name that no other scope has. Scopes are numbered; a scope gets a new number when it opens and when an
        inner one closes."""
        return name if len(self.scopes) == 1 else f"{name}@{self.n_scopes}"

    def variable(self, variable):
        own = self.own_name(variable.name)
        self.scopes[-1][variable.name] = Symbol(own)
        self.function.variables.append(replace(variable, name=own))

    def registers(self, statement):
        kind, names = re.match(r"\.reg\s*\.(\w+)\s+(.*)$", statement, re.S).groups()
        if kind not in SIZES:
            raise Unsupported(f"register type `.{kind}`")
        for name in _split(names):
            numbered = re.fullmatch(r"([\w$%]+)<(\d+)>", name)
            for n in [f"{numbered[1]}{i}" for i in range(int(numbered[2]))] if numbered else [name]:
                own = self.own_name(n)
                self.scopes[-1][n] = Reg(own)
                self.function.registers[own] = kind

    def instruction(self, statement, line):
        text = statement = " ".join(statement.split())
        guard = None
        if statement.startswith("@") and (match := re.match(r"@(!?)([\w$%]+) (.*)$", statement)):
            guard, statement = (self.operand(match[2]), match[1] == "!"), match[3]
        opcode, _, rest = statement.partition(" ")
        if opcode.split(".")[0] == "call":
            operands = tuple(Pack(tuple(map(self.operand, _split(o.strip("() "))))) if o.startswith("(") else
                             self.operand(o) for o in _split(rest))
        else:
            operands = tuple(self.operand(o) for o in _split(rest))
        name, *mods = opcode.split(".")
        return Instr(name, tuple(m for m in mods if m), operands, guard, line, text[:200])

    def operand(self, text):
        text = text.strip()
        if text.startswith("{"):
            return Pack(tuple(self.operand(t) for t in _split(text[1:-1])))
        if text.startswith("["):
            base, sign, offset = re.fullmatch(r"\[\s*([\w$%.@]+)\s*(?:([+])\s*(-?\w+))?\s*\]", text).groups()
            return Mem(self.operand(base), int(offset, 0) if sign else 0)
        if "|" in text:
            return Pair(*(self.operand(t) for t in text.split("|")))
        if re.match(r"-?\d", text):
            return _number(text)
        if text.startswith("!"):
            raise Unsupported(f"negated operand `{text}`")
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        return Reg(text) if text.startswith("%") or text in ("_", "WARP_SZ") else Symbol(text)


def registers_of(operand):
    """All registers that an operand mentions."""
    if isinstance(operand, Reg):
        return [operand.name]
    if isinstance(operand, Mem):
        return registers_of(operand.base)
    if isinstance(operand, Pack):
        return [r for item in operand.items for r in registers_of(item)]
    if isinstance(operand, Pair):
        return registers_of(operand.first) + registers_of(operand.second)
    return []


def _renamed(operand, registers, symbols):
    if isinstance(operand, Reg):
        return Reg(registers.get(operand.name, operand.name))
    if isinstance(operand, Symbol):
        return Symbol(symbols.get(operand.name, operand.name))
    if isinstance(operand, Mem):
        return Mem(_renamed(operand.base, registers, symbols), operand.offset)
    if isinstance(operand, Pack):
        return Pack(tuple(_renamed(i, registers, symbols) for i in operand.items))
    if isinstance(operand, Pair):
        return Pair(_renamed(operand.first, registers, symbols), _renamed(operand.second, registers, symbols))
    return operand


def _inline_calls(module, function, active=()):
    """Replaces each call by the body of its function. The function's parameters become `.param` variables of the
    caller."""
    body, n_calls = [], 0
    for item in function.body:
        if isinstance(item, Label) or item.name != "call":
            body.append(item)
            continue
        with _known_forms(item):
            operands = list(item.operands)
            results = operands.pop(0).items if isinstance(operands[0], Pack) else ()
            name, arguments = operands[0].name, operands[1].items if len(operands) > 1 else ()
        if name == "vprintf":
            body.append(replace(item, name=name, mods=(), operands=(*results, *arguments)))
            continue
        callee = module.functions.get(name)
        if name in active:
            raise item.unsupported("recursion")
        if name.startswith("cudaCG"):
            raise item.unsupported("a grid that synchronizes: not all its blocks run at the same time here")
        if callee is None or item.guard:
            raise item.unsupported("a call of an unknown function")
        _inline_calls(module, callee, active + (callee.name,))
        n_calls += 1
        tag = f"@{callee.name}.{n_calls}"
        symbols = {p.name: a.name for p, a in zip(callee.params + callee.returns, (*arguments, *results))}
        symbols |= {i.name: i.name + tag for i in callee.body if isinstance(i, Label)}
        symbols |= {v.name: v.name + tag for v in callee.variables}
        registers = {r: r + tag for r in callee.registers}
        function.registers |= {r + tag: t for r, t in callee.registers.items()}
        function.variables += [replace(v, name=v.name + tag) for v in callee.variables]
        end = "return" + tag
        for i in callee.body:
            if isinstance(i, Label):
                body.append(Label(i.name + tag))
            elif i.name == "ret":
                body.append(Instr("bra", (), (Symbol(end),), _renamed_guard(i.guard, registers), i.line,
                                  i.text))
            else:
                body.append(replace(i, operands=tuple(_renamed(o, registers, symbols) for o in i.operands),
                                    guard=_renamed_guard(i.guard, registers)))
        body.append(Label(end))
    function.body = body


def _renamed_guard(guard, registers):
    return guard and (_renamed(guard[0], registers, {}), guard[1])


def _branch_by_comparison(function, tables):
    """`brx.idx i, table` -> `i == 0: bra first; i == 1: bra second; ...; bra last`"""
    body = []
    for item in function.body:
        if isinstance(item, Label) or item.name != "brx":
            body.append(item)
            continue
        with _known_forms(item):
            index, table = item.operands
        if item.guard or table.name not in tables:
            raise item.unsupported("a table of an unknown form")
        *targets, last = tables[table.name]
        for i, target in enumerate(targets):
            chosen = Reg(f"%chosen{len(body)}")
            function.registers[chosen.name] = "pred"
            body += [replace(item, name="setp", mods=("eq", "u32"), operands=(chosen, index, Imm(i))),
                     replace(item, name="bra", mods=(), operands=(target,), guard=(chosen, False))]
        body.append(replace(item, name="bra", mods=(), operands=(last,)))
    function.body = body


def _branch_around_guards(function):
    """`@p op` -> `@!p bra past; op; past:`"""
    body = []
    for item in function.body:
        if isinstance(item, Label) or item.guard is None or item.name == "bra":
            body.append(item)
            continue
        past = f"past@{len(body)}"
        body.append(Instr("bra", (), (Symbol(past),), (item.guard[0], not item.guard[1]), item.line,
                          item.text))
        body += [replace(item, guard=None), Label(past)]
    function.body = body


def _params_to_registers(function):
    """The `.param` variables of inlined calls become registers, and `st.param` and `ld.param` become moves to and
    from them."""
    own = {p.name for p in function.params}
    body = []
    for item in function.body:
        if isinstance(item, Instr) and item.name == "vprintf":
            for place, kind in zip(item.operands, ("b32", "b64", "b64")):
                function.registers.setdefault(place.name + "+0", kind)
            item = replace(item, operands=tuple(Reg(place.name + "+0") for place in item.operands))
        operands = item.operands if isinstance(item, Instr) else ()
        place = next((o for o in operands if isinstance(o, Mem)), None)
        if place is None or "param" not in item.mods or getattr(place.base, "name", None) in own:
            body.append(item)
            continue
        with _known_forms(item):
            body += _moves(function, item, place)
    function.body = body


def _moves(function, item, place):
    """The moves between registers that do what a `ld.param` or `st.param` does."""
    kind = item.mods[-1]
    size = SIZES[kind]
    other = item.operands[0] if item.name == "ld" else item.operands[1]
    for i, register in enumerate(other.items if isinstance(other, Pack) else (other,)):
        name = f"{place.base.name}+{place.offset + i * size}"
        if SIZES[function.registers.setdefault(name, f"b{8 * size}")] != size:
            raise item.unsupported("a parameter that is read in another size than it was written")
        pair = (register, Reg(name)) if item.name == "ld" else (Reg(name), register)
        yield replace(item, name="mov", mods=(f"b{8 * size}",), operands=pair)


def parse(text):
    """PTX text of one kernel -> Module whose entry function has calls inlined and guards on `bra` only."""
    reader = _Reader(text)
    module = reader.module
    for function in module.functions.values():
        _branch_by_comparison(function, reader.tables)
    _inline_calls(module, module.entry)
    _params_to_registers(module.entry)
    _branch_around_guards(module.entry)
    return module
