"""Writes LLVM IR as text: values, types and small operations, on one scalar or on the 32 lanes of a warp.

`w` is the width of an operation, 1 or 32: `ty("i32", 32)` is `<32 x i32>`. Values are LLVM names or constants
as text.
"""

from collections import Counter
from dataclasses import dataclass

from .nans import Results
from .ptx import SIZES, Imm, Symbol

WARP = 32
# For a float type: the number of floats in a register, the integer type as large as one float, the bits of infinity,
# and the bits of the card's NaN, which are also a mask of all bits but the sign. For a double, a new NaN is left as the
# processor makes it: 0xFFF8000000000000, the NaN of CUDA's math_constants.h.
_NAN = {"f32": (1, "i32", 0x7F800000, 0x7FFFFFFF), "f16": (1, "i16", 0x7C00, 0x7FFF),
        "f16x2": (2, "i16", 0x7C00, 0x7FFF)}


def llvm_type(ptx_type):
    """The LLVM type of a PTX type. A half is kept as an integer of 16 bits."""
    if ptx_type == "pred":
        return "i1"
    if ptx_type in ("f32", "f64"):
        return {"f32": "float", "f64": "double"}[ptx_type]
    return f"i{8 * SIZES[ptx_type]}"


def bits_of(t):
    return {"half": 16, "float": 32, "double": 64}.get(t) or int(t[1:])


def ty(t, w):
    return t if w == 1 else f"<{w} x {t}>"


def suffix(t, w):
    """How an overloaded intrinsic spells a type: f32, v32i8."""
    short = {"half": "f16", "float": "f32", "double": "f64", "ptr": "p0"}.get(t, t)
    return short if w == 1 else f"v{w}{short}"


def const(t, w, value):
    """An integer constant; for w = 32 it is on all lanes."""
    return str(value) if w == 1 else f"splat ({t} {value})"


def vector_const(t, values):
    return f"<{', '.join(f'{t} {v}' for v in values)}>"


class Code:
    """The growing text of one function's body, and the declarations that it needs."""

    def __init__(self):
        self.lines, self.declarations, self.n = [], {}, 0

    def name(self):
        self.n += 1
        return f"%t{self.n}"

    def do(self, text):
        self.lines.append("  " + text)

    def let(self, text):
        result = self.name()
        self.lines.append(f"  {result} = {text}")
        return result

    def label(self, name):
        self.lines.append(f"{name}:")

    # ---- operations of width w ----

    def op(self, name, t, w, *args):
        """Binary instruction (add, fmul, shl, ...) on operands of one type."""
        return self.let(f"{name} {ty(t, w)} {', '.join(args)}")

    def compare(self, predicate, t, w, a, b):
        kind = "fcmp" if t in ("float", "double", "half") else "icmp"
        return self.let(f"{kind} {predicate} {ty(t, w)} {a}, {b}")

    def select(self, t, w, condition, a, b):
        return self.let(f"select {ty('i1', w)} {condition}, {ty(t, w)} {a}, {ty(t, w)} {b}")

    def cast(self, how, source, target, w, a):
        return a if source == target else self.let(f"{how} {ty(source, w)} {a} to {ty(target, w)}")

    def resize(self, source, target, w, a, signed=False):
        """A value of one integer type as another integer type, truncated or extended."""
        if source == target:
            return a
        return self.cast("trunc" if bits_of(target) < bits_of(source) else "sext" if signed else "zext",
                         source, target, w, a)

    def call(self, name, result, *args):
        """Calls a function and returns its result. The function is external or an intrinsic, unless it is
        `outlined`; args are (type, value)."""
        types = [t for t, _ in args]
        self.declarations.setdefault(name, f"declare {result} @{name}({', '.join(types)})")
        text = f"call {result} @{name}({', '.join(f'{t} {v}' for t, v in args)})"
        return self.do(text) if result == "void" else self.let(text)

    def outlined(self, name, result, body, *args, attributes="#2"):
        """Calls a function that this module defines. The function returns what body(*its parameters) computes; args
        are (type, value)."""
        if name not in self.declarations:
            outside, self.lines = self.lines, []
            value = body(*(f"%{i}" for i in range(len(args))))
            types = ", ".join(t for t, _ in args)
            self.declarations[name] = "\n".join([f"define internal {result} @{name}({types}) {attributes} {{",
                                                 *self.lines, f"  ret {result} {value}", "}"])
            self.lines = outside
        return self.call(name, result, *args)

    def intrinsic(self, name, t, w, *args):
        """Calls llvm.<name>, whose operands and result have one type."""
        return self.call(f"llvm.{name}.{suffix(t, w)}", ty(t, w), *((ty(t, w), a) for a in args))

    def splat(self, t, value, n=WARP):
        first = self.let(f"insertelement <{n} x {t}> poison, {t} {value}, i64 0")
        return self.let(f"shufflevector <{n} x {t}> {first}, <{n} x {t}> poison, <{n} x i32> zeroinitializer")

    def shuffle(self, t, n, a, indices, b=None):
        """Elements of the vector a (and of b, both n long), chosen by constant indices. An index None takes any
        element."""
        mask = ", ".join("i32 poison" if i is None else f"i32 {i}" for i in indices)
        return self.let(f"shufflevector <{n} x {t}> {a}, <{n} x {t}> {b or 'poison'}, "
                        f"<{len(indices)} x i32> <{mask}>")

    def concatenate(self, t, length, parts):
        """One vector made of several vectors of equal length; their number is a power of two."""
        while len(parts) > 1:
            parts = [self.shuffle(t, length, a, range(2 * length), b)
                     for a, b in zip(parts[::2], parts[1::2])]
            length *= 2
        return parts[0]

    def spread(self, t, value, pattern):
        """The vector scalar + pattern."""
        whole = self.splat(t, value)
        return self.op("add", t, WARP, whole, vector_const(t, pattern)) if any(pattern) else whole

    def pointer(self, w, address):
        return self.let(f"inttoptr {ty('i64', w)} {address} to {ty('ptr', w)}")

    def mask_bits(self, lanes):
        """<32 x i1> -> i32"""
        return self.let(f"bitcast <{WARP} x i1> {lanes} to i32")

    def mask_lanes(self, bits):
        """i32 -> <32 x i1>"""
        return self.let(f"bitcast i32 {bits} to <{WARP} x i1>")


@dataclass(frozen=True)
class Repeat:
    """A vector whose 32 lanes are n values: lane i has number lanes[i]."""
    value: str                                             # of n elements of type t
    t: str
    n: int
    lanes: tuple


class Operands(Code):
    """Code that reads and writes PTX registers, each in the storage that its Shape asks for."""

    def __init__(self, lanes, variables):
        super().__init__()
        self.lanes, self.variables = lanes, variables      # variables: name -> scalar i64 value
        self.registers = lanes.types
        self.slots = {r: f"%r{i}" for i, r in enumerate(self.registers)}
        self.mask = None                                   # i32 of the running lanes; None: all 32, always
        self.divided = frozenset()
        self.patterns = {}                                 # of scalars for patterned operands, see `integer`
        self.repeats = {}                                  # in this block, register -> Repeat
        self.fours = {}                                    # register -> (the four that it belongs to, its place there)
        self.results = Results(lanes.every, self.registers)
        self.leaving = {}                                  # registers whose NaN the current instruction shows
        self.n_definitions = Counter(r for i in lanes.every for r in i.written)
        self.n_uses = Counter(r for i in lanes.every for r in i.reads)

    def type_of(self, register):
        return llvm_type(self.registers[register])

    def uniform(self, *operands):
        return all((s := self.lanes.of(o)) is not None and s.uniform and s.exact for o in operands)

    def constant(self, operand):
        """The number that all lanes have in an operand of 32 bits, if it is known; else None."""
        shape = self.lanes.of(operand, 32)
        return shape.const if shape.uniform else None

    def scalar(self, operand, t):
        """The scalar (of a uniform, patterned or loose operand) as type t."""
        if isinstance(operand, Imm):
            return self._immediate(operand, t)
        if isinstance(operand, Symbol):
            return self.variables[operand.name] if operand.name in self.variables else self.unknown(operand)
        if operand.name not in self.registers:
            return self._convert(*self.special_scalar(operand.name), t, 1)
        own = self.type_of(operand.name)
        value = self.let(f"load {own}, ptr {self.slots[operand.name]}.s")
        return self._convert(self._settled(operand, own, 1, value), own, t, 1)

    def vector(self, operand, t):
        """All lanes of an operand as <32 x t>."""
        if isinstance(operand, Imm):
            return self.splat(t, self._immediate(operand, t))
        if isinstance(operand, Symbol):
            shape = self.lanes.of(operand)
            return self.spread("i64", self.scalar(operand, "i64"), shape.pattern)
        shape = self.lanes.of(operand)
        if operand.name not in self.registers:
            if shape is None:
                self.unknown(operand)
            if shape.varying:
                return self._convert(*self.special_vector(operand.name), t, WARP)
            value, own = self.special_scalar(operand.name)
            return self._convert(self.spread(own, value, shape.pattern), own, t, WARP)
        own = self.type_of(operand.name)
        if self.lanes.vector(operand.name):
            value = self._load_vector(operand.name, own)
            return self._convert(self._settled(operand, own, WARP, value), own, t, WARP)
        value = self.let(f"load {own}, ptr {self.slots[operand.name]}.s")
        value = self._settled(operand, own, 1, value)
        same = shape is None or shape.uniform
        whole = self.splat(own, value) if same else self.spread(own, value, shape.pattern)
        return self._convert(whole, own, t, WARP)

    def _load_vector(self, name, t):
        if name in self.fours:
            four, i = self.fours[name]
            return self.shuffle(t, 4 * WARP, self.load_four(four), range(i, 4 * WARP, 4))
        return self.let(f"load <{WARP} x {t}>, ptr {self.slots[name]}.v, align 64")

    def holder(self, name):
        """(the register in whose storage a register's vector is, number of values there)"""
        return (self.fours[name][0][0], 4 * WARP) if name in self.fours else (name, WARP)

    def load_four(self, four):
        """4 registers, side by side for each lane, as Memory.find_fours keeps them."""
        return self.let(f"load <{4 * WARP} x {self.type_of(four[0])}>, ptr {self.slots[four[0]]}.v, align 64")

    def store_four(self, four, value):
        self.do(f"store <{4 * WARP} x {self.type_of(four[0])}> {value}, ptr {self.slots[four[0]]}.v, align 64")

    def _settled(self, operand, own, w, value):
        """A register's value. It has the card's NaN if the current instruction makes its bits visible (nans.py)."""
        kind = self.leaving.get(operand.name)
        return value if kind is None else self.canonical(own, w, value, kind)

    def canonical(self, t, w, value, kind):
        """A float of PTX type `kind`, or two of them, given and returned in LLVM type t, with every NaN replaced by
        the card's."""
        n, part, infinity, nan = _NAN[kind]
        bits = self.cast("bitcast", ty(t, w), ty(part, w * n), 1, value)
        size = self.op("and", part, w * n, bits, const(part, w * n, nan))
        is_nan = self.compare("ugt", part, w * n, size, const(part, w * n, infinity))
        return self.cast("bitcast", ty(part, w * n), ty(t, w), 1,
                         self.select(part, w * n, is_nan, const(part, w * n, nan), bits))

    def get(self, operand, t, w):
        return self.scalar(operand, t) if w == 1 else self.vector(operand, t)

    def unknown(self, operand):
        raise self.instr.unsupported(f"unknown operand `{operand.name}`")

    def _immediate(self, operand, t):
        if t in ("float", "double", "half"):
            if operand.floating == 64 and t == "float":
                return self.cast("fptrunc", "double", "float", 1, self._immediate(operand, "double"))
            return self.let(f"bitcast i{bits_of(t)} {operand.value} to {t}")
        return str(operand.value % (1 << bits_of(t)) if t != "i1" else operand.value & 1)

    def _convert(self, value, own, t, w):
        """A register's bits as another type of the same size, or its low bits as a smaller one."""
        if own == t:
            return value
        if bits_of(own) == bits_of(t):
            return self.cast("bitcast", own, t, w, value)
        if own[0] == "i" and bits_of(own) > bits_of(t):
            narrow = self.cast("trunc", own, f"i{bits_of(t)}", w, value)
            return self.cast("bitcast", f"i{bits_of(t)}", t, w, narrow)
        raise self.instr.unsupported(f"a {bits_of(own)}-bit register read as {bits_of(t)} bits")

    # ---- results ----

    def put(self, register, t, w, value, signed=False):
        """Writes a value of width w to a register; a smaller integer is extended to the register's size."""
        name = register.name
        if name == "_":
            return
        if name not in self.registers:
            self.unknown(register)
        own = self.type_of(name)
        if bits_of(own) == bits_of(t):
            value = self.cast("bitcast", t, own, w, value)
        elif own[0] == "i" and bits_of(own) > bits_of(t) > 1:
            value = self.resize(f"i{bits_of(t)}", own, w, self.cast("bitcast", t, f"i{bits_of(t)}", w, value),
                                signed)
        else:
            raise self.instr.unsupported(f"a {bits_of(t)}-bit result in a {bits_of(own)}-bit register")
        if self.lanes.scalar(name) and w == 1:
            self.do(f"store {own} {value}, ptr {self.slots[name]}.s")
        if self.lanes.vector(name):
            self._put_vector(name, own, value if w == WARP else self.splat(own, value))

    def put_scalar(self, register, t, value):
        """Writes only the scalar of a patterned or loose register."""
        self.do(f"store {t} {value}, ptr {self.slots[register.name]}.s")

    def put_vector(self, register, t, value):
        self._put_vector(register.name, t, value)

    def _put_vector(self, name, t, value):
        slot = f"{self.slots[name]}.v"
        if name in self.divided and self.mask is not None:
            old = self.let(f"load <{WARP} x {t}>, ptr {slot}, align 64")
            value = self.select(t, WARP, self.mask_lanes(self.mask), value, old)
        if name in self.fours:
            four, own = self.fours[name]
            wide = self.shuffle(t, WARP, value, [i // 4 for i in range(4 * WARP)])
            places = [i + 4 * WARP * (i % 4 == own) for i in range(4 * WARP)]
            return self.store_four(four, self.shuffle(t, 4 * WARP, self.load_four(four), places, wide))
        self.do(f"store <{WARP} x {t}> {value}, ptr {slot}, align 64")

    def lift(self, instr, result, operands, compute):
        """The common case of an instruction: takes operands [(operand, type)], and writes compute(w, *values), of
        type `result`. It computes on scalars if all operands are uniform; on few values if all operands that are not
        uniform repeat these values over the lanes in one way (as `x[lane // 2]` does); and else on vectors."""
        repeats = {o: self.repeats.get(getattr(o, "name", None)) for o, _ in operands if not self.uniform(o)}
        ways = {r and (r.n, r.lanes) for r in repeats.values()}
        if len(ways) == 1 and None not in ways:
            (n, lanes), = ways
            values = [self._few(o, repeats[o], t) if o in repeats else
                      self.splat(t, self.scalar(o, t), n) for o, t in operands]
            return self.put_repeat(instr.operands[0], Repeat(compute(n, *values), result, n, lanes))
        w = WARP if repeats else 1
        value = compute(w, *(self.get(o, t, w) for o, t in operands))
        self.put(instr.operands[0], result, w, value)

    def _few(self, operand, repeat, t):
        """The values of a Repeat as type t."""
        return self._convert(self._settled(operand, repeat.t, repeat.n, repeat.value), repeat.t, t, repeat.n)

    def put_repeat(self, register, repeat, signed=False):
        """Writes a Repeat to a register, and remembers the Repeat for what is computed from the register."""
        value, name = self.shuffle(repeat.t, repeat.n, repeat.value, repeat.lanes), register.name
        self.put(register, repeat.t, WARP, value, signed)
        if self.n_definitions.get(name) == 1 and bits_of(self.type_of(name)) == bits_of(repeat.t):
            self.repeats[name] = repeat
