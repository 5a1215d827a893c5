"""Arithmetic: one method per PTX instruction that computes registers from registers.

A method reads the instruction's modifiers, refuses those it does not know, and describes the computation once, for
width w (a scalar or 32 lanes); `lift` and `integer` choose the width.
"""

import struct

from .emit import WARP, Operands, bits_of, const, llvm_type, suffix, ty, vector_const
from .ptx import SIZES, Imm, Pack, Pair, Reg

_SIGNED = {"lt": "slt", "le": "sle", "gt": "sgt", "ge": "sge", "eq": "eq", "ne": "ne"}
_UNSIGNED = {"lt": "ult", "le": "ule", "gt": "ugt", "ge": "uge", "lo": "ult", "ls": "ule", "hi": "ugt", "hs": "uge",
             "eq": "eq", "ne": "ne"}
_FLOATING = {"eq": "oeq", "ne": "one", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge", "equ": "ueq", "neu": "une",
             "ltu": "ult", "leu": "ule", "gtu": "ugt", "geu": "uge", "num": "ord", "nan": "uno"}
_ROUND = {"rn": "roundeven", "rni": "roundeven", "rz": "trunc", "rzi": "trunc", "rm": "floor", "rmi": "floor",
          "rp": "ceil", "rpi": "ceil"}
DIRECTED = {"rz": 0, "rp": 2, "rm": 3}              # rounding modes, as llvm.set.rounding numbers them


def only(instr, *allowed):
    """Refuses modifiers other than these (and the type, the last one)."""
    for mod in instr.mods[:-1]:
        if mod not in allowed:
            raise instr.unsupported(f"modifier `.{mod}`")


class Arithmetic(Operands):
    """The instructions without memory, lanes or control flow."""

    def integer(self, instr, result, operands, compute):
        """Like `lift`, but a patterned result is computed on the scalars (and on vectors too where it is loose and
        its vector is needed)."""
        register = instr.operands[0]
        if self.uniform(*(o for o, _ in operands)) or not self.lanes.scalar(register.name):
            return self.lift(instr, result, operands, compute)
        scalars = [self.scalar(o, t) for o, t in operands]
        self.patterns = {v: self.lanes.of(o).pattern for v, (o, _) in zip(scalars, operands)}
        self.put_scalar(register, result, compute(1, *scalars))
        self.patterns = {}
        if self.lanes.vector(register.name):
            self.put_vector(register, result, compute(WARP, *(self.vector(o, t) for o, t in operands)))

    def extend(self, t, wide, w, a, signed):
        """A wider integer. The scalar of a pattern is extended by way of the lane that a wrap-around leaves right: with
        index tid - 3 the highest lanes are elements of an array, and the lowest, at 2**32 - 3, are none."""
        pattern = self.patterns.get(a) if w == 1 else None
        if not pattern or not any(pattern):
            return self.resize(t, wide, w, a, signed)
        anchor = min(pattern) if signed else max(pattern)
        lane = self.resize(t, wide, 1, self.op("add", t, 1, a, str(anchor)), signed)
        return self.op("sub", wide, 1, lane, str(anchor))

    # ---- moves ----

    def op_mov(self, instr):
        target, source = instr.operands
        t = llvm_type(instr.mods[0])
        if isinstance(target, Pack):
            self._unpack(instr, target.items, source, t)
        elif isinstance(source, Pack):
            self._pack(instr, target, source.items, t)
        else:
            if isinstance(source, Reg) and source.name in self.registers:
                t = self.type_of(source.name)
            self.integer(instr, t, [(source, t)], lambda w, a: a)

    def _unpack(self, instr, parts, source, t):
        part = f"i{bits_of(t) // len(parts)}"
        whole = f"i{bits_of(t)}"
        w = 1 if self.uniform(source) else WARP
        value = self.get(source, whole, w)
        for i, register in enumerate(parts):
            shifted = self.op("lshr", whole, w, value, const(whole, w, i * bits_of(part))) if i else value
            self.put(register, part, w, self.resize(whole, part, w, shifted))

    def _pack(self, instr, target, parts, t):
        part, whole = f"i{bits_of(t) // len(parts)}", f"i{bits_of(t)}"

        def compute(w, *values):
            total = None
            for i, value in enumerate(values):
                value = self.resize(part, whole, w, value)
                if i:
                    value = self.op("shl", whole, w, value, const(whole, w, i * bits_of(part)))
                    total = self.op("or", whole, w, total, value)
                else:
                    total = value
            return total
        self.lift(instr, whole, [(p, part) for p in parts], compute)

    def op_cvta(self, instr):
        self.integer(instr, "i64", [(instr.operands[1], "i64")], lambda w, a: a)

    # ---- arithmetic: integers, floats, halves ----

    def _arithmetic(self, instr, name):
        kind = instr.mods[-1]
        operands = instr.operands[1:]
        if kind[0] in "us":
            only(instr, "sat")
            t = llvm_type(kind)
            if "sat" in instr.mods:
                saturating = f"{kind[0]}{name}.sat"
                return self.lift(instr, t, [(o, t) for o in operands], lambda w, *a: self.intrinsic(saturating, t, w, *a))
            return self.integer(instr, t, [(o, t) for o in operands], lambda w, *a: self.op(name, t, w, *a))
        only(instr, "rn", *DIRECTED, "sat", "ftz")
        self.floating(instr, operands, self._operation("f" + name))

    def op_add(self, instr):
        if "cc" in instr.mods:
            return self._with_carry(instr, "add")
        self._arithmetic(instr, "add")

    def op_sub(self, instr):
        if "cc" in instr.mods:
            return self._with_carry(instr, "sub")
        self._arithmetic(instr, "sub")

    def op_addc(self, instr):
        self._with_carry(instr, "add")

    def op_subc(self, instr):
        self._with_carry(instr, "sub")

    def op_madc(self, instr):
        self._with_carry(instr, "mad")

    def _with_carry(self, instr, name):
        """Sums that write the carry (`.cc`), read it (the names that end in c; it is their last operand), or both. After
        a difference the carry is the borrow."""
        kind, target = instr.mods[-1], instr.operands[0]
        t = llvm_type(kind)
        if kind not in ("u32", "s32", "u64", "s64"):
            raise instr.unsupported()
        only(instr, "cc", *(["lo", "hi"] if name == "mad" else []))
        operands = [(o, t) for o in instr.operands[1:]]
        if instr.name != name:
            operands[-1] = (operands[-1][0], "i1")
        w = 1 if self.uniform(*(o for o, _ in operands)) else WARP
        a, b, *rest = (self.get(o, t, w) for o, t in operands)
        if name == "mad":
            a, (b, *rest) = self._multiplied(instr, kind, w, a, b), rest
        operation, total, carry = "sub" if name == "sub" else "add", a, None
        for part in [b] + [self.resize("i1", t, w, c) for c in rest]:
            before, total = total, self.op(operation, t, w, total, part)
            over = self.compare("ult", t, w, *((before, part) if name == "sub" else (total, part)))
            carry = self.op("or", "i1", w, carry, over) if carry else over
        if "cc" in instr.mods:
            target, flag = target.first, target.second
            self.put(flag, "i1", w, carry)
        self.put(target, t, w, total)

    def op_mul(self, instr):
        kind = instr.mods[-1]
        if kind[0] == "f":
            return self._arithmetic(instr, "mul")
        t = llvm_type(kind)
        operands = [(o, t) for o in instr.operands[1:]]
        if instr.mods[0] == "wide":
            self.integer(instr, self._wide(t), operands, lambda w, a, b: self._product(kind, w, a, b))
        else:
            self.integer(instr, t, operands, lambda w, a, b: self._multiplied(instr, kind, w, a, b))

    def _wide(self, t):
        return f"i{2 * bits_of(t)}"

    def _product(self, kind, w, a, b):
        """The whole product, twice as wide."""
        t = llvm_type(kind)
        a, b = (self.extend(t, self._wide(t), w, x, kind[0] == "s") for x in (a, b))
        return self.op("mul", self._wide(t), w, a, b)

    def _multiplied(self, instr, kind, w, a, b):
        t, which = llvm_type(kind), instr.mods[0]
        if which == "lo":
            return self.op("mul", t, w, a, b)
        if which != "hi":
            raise instr.unsupported()
        whole = self._product(kind, w, a, b)
        return self.resize(self._wide(t), t, w, self.op("lshr", self._wide(t), w, whole, const(self._wide(t), w, bits_of(t))))

    def op_mad(self, instr):
        kind = instr.mods[-1]
        if kind[0] == "f":
            return self.op_fma(instr)
        if "cc" in instr.mods:
            return self._with_carry(instr, "mad")
        if "sat" in instr.mods:
            raise instr.unsupported()
        t = llvm_type(kind)
        result = self._wide(t) if instr.mods[0] == "wide" else t
        a, b, c = instr.operands[1:]

        def compute(w, a, b, c):
            product = self._product(kind, w, a, b) if result != t else self._multiplied(instr, kind, w, a, b)
            return self.op("add", result, w, product, c)
        self.integer(instr, result, [(a, t), (b, t), (c, result)], compute)

    def op_div(self, instr):
        kind = instr.mods[-1]
        t = llvm_type(kind)
        if kind[0] in "us":
            return self.lift(instr, t, [(o, t) for o in instr.operands[1:]],
                             lambda w, a, b: self._divided(kind, "div", w, a, b))
        only(instr, "rn", *DIRECTED, "full", "approx", "ftz")
        self.floating(instr, instr.operands[1:], self._operation("fdiv"))

    def op_rem(self, instr):
        kind = instr.mods[-1]
        t = llvm_type(kind)
        self.lift(instr, t, [(o, t) for o in instr.operands[1:]], lambda w, a, b: self._divided(kind, "rem", w, a, b))

    def _divided(self, kind, what, w, a, b):
        """Integer division; x / 0 is all ones and x % 0 is x, as on the card, and the lowest / -1 wraps."""
        t, signed = llvm_type(kind), kind[0] == "s"
        zero = self.compare("eq", t, w, b, const(t, w, 0))
        divisor = self.select(t, w, zero, const(t, w, 1), b)
        if signed:
            minus = self.compare("eq", t, w, divisor, const(t, w, -1))
            safe = self.select(t, w, minus, const(t, w, 1), divisor)
            result = self.op("s" + what, t, w, a, safe)
            negated = self.op("sub", t, w, const(t, w, 0), a) if what == "div" else const(t, w, 0)
            result = self.select(t, w, minus, negated, result)
        else:
            result = self.op("u" + what, t, w, a, divisor)
        return self.select(t, w, zero, const(t, w, -1) if what == "div" else a, result)

    def op_sad(self, instr):
        """|a - b| + c"""
        kind = instr.mods[-1]
        t = llvm_type(kind)
        only(instr)

        def compute(w, a, b, c):
            larger, smaller = (self.intrinsic(kind[0] + name, t, w, a, b) for name in ("max", "min"))
            return self.op("add", t, w, c, self.op("sub", t, w, larger, smaller))
        self.lift(instr, t, [(o, t) for o in instr.operands[1:]], compute)

    def op_neg(self, instr):
        kind = instr.mods[-1]
        t = llvm_type(kind)
        if kind[0] == "s":
            return self.lift(instr, t, [(instr.operands[1], t)], lambda w, a: self.op("sub", t, w, const(t, w, 0), a))
        only(instr, "ftz")
        self._sign_bit(instr, "xor", lambda bits, signs: signs)

    def op_abs(self, instr):
        kind = instr.mods[-1]
        t = llvm_type(kind)
        if kind[0] == "s":
            return self.lift(instr, t, [(instr.operands[1], t)],
                             lambda w, a: self.call(f"llvm.abs.{suffix(t, w)}", ty(t, w), (ty(t, w), a), ("i1", "false")))
        only(instr, "ftz")
        self._sign_bit(instr, "and", lambda bits, signs: signs ^ (1 << bits) - 1)

    def _sign_bit(self, instr, operation, mask):
        """Floats of any size: acts on the sign bits alone."""
        kind = instr.mods[-1]
        t = f"i{8 * SIZES[kind]}"
        bits = bits_of(t)
        signs = 0x80008000 if kind == "f16x2" else 1 << (bits - 1)
        self.lift(instr, t, [(instr.operands[1], t)], lambda w, a: self.op(operation, t, w, a, const(t, w, mask(bits, signs))))

    def _extreme(self, instr, name):
        kind = instr.mods[-1]
        t = llvm_type(kind)
        if kind[0] in "us":
            only(instr)
            return self.lift(instr, t, [(o, t) for o in instr.operands[1:]],
                             lambda w, a, b: self.intrinsic(kind[0] + name, t, w, a, b))
        only(instr, "ftz", "NaN")
        which = f"{name}imum" if "NaN" in instr.mods else f"{name}imumnum"

        def compute(t, w, mods, a, b):
            return self.intrinsic(which, t, w, a, b)
        self.floating(instr, instr.operands[1:], compute)

    def op_min(self, instr):
        self._extreme(instr, "min")

    def op_max(self, instr):
        self._extreme(instr, "max")

    # ---- floats ----

    def floating(self, instr, operands, compute):
        """compute(t, w, mods, *values) on f32 or f64, on f16 as f32 rounded once, on f16x2 for each half."""
        kind = instr.mods[-1]
        mods = instr.mods[:-1]
        if "ftz" in mods and kind != "f32" and not (kind == "f64" and "approx" in mods):
            raise instr.unsupported("modifier `.ftz`")
        if kind in ("f32", "f64"):
            t = llvm_type(kind)
            self.lift(instr, t, [(o, t) for o in operands], lambda w, *a: self._finish(t, w, mods, compute, a))
        elif kind == "f16":
            self.lift(instr, "half", [(o, "half") for o in operands], lambda w, *a: self._half(w, mods, compute, a))
        elif kind == "f16x2":
            self.lift(instr, "i32", [(o, "i32") for o in operands], lambda w, *a: self._half2(w, mods, compute, a))
        else:
            raise instr.unsupported(f"type `.{kind}`")

    def _finish(self, t, w, mods, compute, values):
        if "ftz" in mods:
            values = [self._flush(t, w, v) for v in values]
        result = compute(t, w, mods, *values)
        if "ftz" in mods:
            result = self._flush(t, w, result)
        return self._saturate(t, w, result) if "sat" in mods else result

    def _flush(self, t, w, value):
        """Denormal -> zero of the same sign. Of a float64, which only `.approx.ftz.f64` flushes, also the lower half of
        the mantissa goes: these instructions read and write upper halves."""
        i = f"i{bits_of(t)}"
        exponents, signs = {"float": (0x7F800000, 1 << 31), "double": (0x7FF << 52, 1 << 63)}[t]
        bits = self.cast("bitcast", t, i, w, value)
        if t == "double":
            bits = self.op("and", i, w, bits, const(i, w, -1 << 32))
        denormal = self.compare("eq", i, w, self.op("and", i, w, bits, const(i, w, exponents)), const(i, w, 0))
        sign = self.op("and", i, w, bits, const(i, w, signs))
        return self.cast("bitcast", i, t, w, self.select(i, w, denormal, sign, bits))

    def _saturate(self, t, w, value):
        """Clamps to [0, 1]; NaN and -0 become +0."""
        one, zero = self.number(t, w, 1.0), self.number(t, w, 0.0)
        positive = self.compare("ogt", t, w, value, zero)
        value = self.select(t, w, positive, value, zero)
        return self.select(t, w, self.compare("ogt", t, w, value, one), one, value)

    def number(self, t, w, value):
        bits = struct.unpack("<Q", struct.pack("<d", value))[0]        # how LLVM writes floats of any size exactly
        return const(t, w, f"0x{bits:016X}")

    def _half(self, w, mods, compute, values):
        """Half operands through float32. One operation of float32 on halves, rounded again to half, equals one rounding
        (24 >= 2 * 11 + 2) for +, -, *, /, sqrt; fma, whose sum can be longer, rounds to odd first (`_ffma`)."""
        wide = [self.cast("fpext", "half", "float", w, v) for v in values]
        result = self._finish("float", w, mods + ("half",), compute, wide)
        return self.cast("fptrunc", "float", "half", w, result)

    def _half2(self, w, mods, compute, values):
        halves = []
        for shift in (0, 16):
            parts = [self.op("lshr", "i32", w, v, const("i32", w, 16)) if shift else v for v in values]
            parts = [self.cast("bitcast", "i16", "half", w, self.resize("i32", "i16", w, p)) for p in parts]
            result = self.cast("bitcast", "half", "i16", w, self._half(w, mods, compute, parts))
            halves.append(self.resize("i16", "i32", w, result))
        return self.op("or", "i32", w, halves[0], self.op("shl", "i32", w, halves[1], const("i32", w, 16)))

    def _operation(self, name):
        """The function (t, w, mods, *values) that does a floating-point operation, named as LLVM does, in the rounding
        mode in mods."""
        def compute(t, w, mods, *values):
            mode = next((m for m in mods if m in DIRECTED), None)
            if mode and "half" in mods:
                raise self.instr.unsupported(f"rounding `.{mode}` of a half")
            if mode:
                return self.directed(mode, name, t, t, w, *values)
            return self.intrinsic(name, t, w, *values) if name in ("fma", "sqrt") else self.op(name, t, w, *values)
        return compute

    def directed(self, mode, name, t, result, w, *values):
        """An operation of LLVM's constrained kind, from type t to type `result`, in a mode other than to nearest: a
        function of its own, because the mode is a state of the processor."""
        if result == "half" and w > 8:              # LLVM 20 cannot narrow more at a time
            parts = [self.directed(mode, name, t, result, 8, self.shuffle(t, w, values[0], [lane if lane < w else None
                     for lane in range(start, start + 8)])) for start in range(0, WARP, 8)]
            return self.shuffle(result, WARP, self.concatenate(result, 8, parts), range(w))
        function = f"{name}.{mode}.{suffix(result, w)}.{suffix(t, w)}"
        types = suffix(result, w) + ("" if t == result else f".{suffix(t, w)}")
        constrained = f"llvm.experimental.constrained.{name}.{types}"
        listed = ", ".join([ty(t, w)] * len(values))
        named = ", ".join(f"{ty(t, w)} %{i}" for i in range(len(values)))
        self.declarations["llvm.set.rounding"] = "declare void @llvm.set.rounding(i32)"
        self.declarations[constrained] = f"declare {ty(result, w)} @{constrained}({listed}, metadata, metadata)"
        self.declarations[function] = (
            f"define internal {ty(result, w)} @{function}({listed}) #1 {{\n"
            f"  call void @llvm.set.rounding(i32 {DIRECTED[mode]}) #1\n"
            f"  %result = call {ty(result, w)} @{constrained}({named}, metadata !\"round.dynamic\","
            f" metadata !\"fpexcept.ignore\") #1\n"
            f"  call void @llvm.set.rounding(i32 1) #1\n  ret {ty(result, w)} %result\n}}")
        arguments = ", ".join(f"{ty(t, w)} {v}" for v in values)
        return self.let(f"call {ty(result, w)} @{function}({arguments})")

    def op_fma(self, instr):
        only(instr, "rn", *DIRECTED, "sat", "ftz")
        fma = self._operation("fma")
        self.floating(instr, instr.operands[1:], lambda t, w, mods, *values:
                      self._odd_fma(w, *values) if "half" in mods else fma(t, w, mods, *values))

    def _odd_fma(self, w, a, b, c):
        """a * b + c of halves in float32, rounded to odd: the exact product plus c, and where that sum was inexact and
        its last bit is even, one step towards the exact value. Rounding it to half later is then a single rounding."""
        product = self.op("fmul", "float", w, a, b)                    # 22 bits: exact
        total = self.op("fadd", "float", w, product, c)
        back = self.op("fsub", "float", w, total, product)             # TwoSum: error = product + c - total
        error = self.op("fadd", "float", w,
                        self.op("fsub", "float", w, product, self.op("fsub", "float", w, total, back)),
                        self.op("fsub", "float", w, c, back))
        bits = self.cast("bitcast", "float", "i32", w, total)
        inexact = self.compare("one", "float", w, error, self.number("float", w, 0.0))
        even = self.compare("eq", "i32", w, self.op("and", "i32", w, bits, const("i32", w, 1)), const("i32", w, 0))
        signs = self.op("xor", "i32", w, bits, self.cast("bitcast", "float", "i32", w, error))
        step = self.op("or", "i32", w, self.op("ashr", "i32", w, signs, const("i32", w, 31)), const("i32", w, 1))
        moved = self.op("add", "i32", w, bits, step)
        change = self.op("and", "i1", w, inexact, even)
        return self.cast("bitcast", "i32", "float", w, self.select("i32", w, change, moved, bits))

    def op_rcp(self, instr):
        only(instr, "rn", *DIRECTED, "approx", "ftz")
        divide = self._operation("fdiv")
        self.floating(instr, instr.operands[1:], lambda t, w, mods, a: divide(t, w, mods, self.number(t, w, 1.0), a))

    def op_sqrt(self, instr):
        only(instr, "rn", *DIRECTED, "approx", "ftz")
        self.floating(instr, instr.operands[1:], self._operation("sqrt"))

    def op_rsqrt(self, instr):
        only(instr, "approx", "ftz")

        def compute(t, w, mods, a):
            return self.op("fdiv", t, w, self.number(t, w, 1.0), self.intrinsic("sqrt", t, w, a))
        self.floating(instr, instr.operands[1:], compute)

    def _function(self, instr, name):
        only(instr, "approx", "ftz")
        self.floating(instr, instr.operands[1:], lambda t, w, mods, a: self.intrinsic(name, t, w, a))

    def op_ex2(self, instr):
        self._function(instr, "exp2")

    def op_lg2(self, instr):
        self._function(instr, "log2")

    def op_sin(self, instr):
        self._function(instr, "sin")

    def op_cos(self, instr):
        self._function(instr, "cos")

    def op_tanh(self, instr):
        self._function(instr, "tanh")

    def op_copysign(self, instr):
        t = llvm_type(instr.mods[-1])
        a, b = instr.operands[1:]
        self.lift(instr, t, [(b, t), (a, t)], lambda w, *v: self.intrinsic("copysign", t, w, *v))

    def op_testp(self, instr):
        t, what = llvm_type(instr.mods[-1]), instr.mods[0]
        classes = {"nan": 3, "finite": 0x1F8, "infinite": 0x204, "number": 0x3FC, "normal": 0x108, "subnormal": 0x90}
        if what not in classes:
            raise instr.unsupported()
        self.lift(instr, "i1", [(instr.operands[1], t)],
                  lambda w, a: self.call(f"llvm.is.fpclass.{suffix(t, w)}", ty("i1", w), (ty(t, w), a),
                                         ("i32", str(classes[what]))))

    # ---- bits ----

    def _bitwise(self, instr, name):
        t = llvm_type(instr.mods[-1])
        operands = list(instr.operands[1:])
        shapes = [self.lanes.of(o, bits_of(t)) for o in operands]

        def compute(w, a, b):
            if w == 1 and name != "and" and not self.uniform(*operands):
                # A constant's low bits went into the pattern.
                low = (1 << min(64 if s.const is not None and s.uniform else s.tz for s in shapes)) - 1
                a, b = (str(s.const & ~low) if s.const is not None and s.uniform else v for s, v in zip(shapes, (a, b)))
            return self.op(name, t, w, a, b)
        self.integer(instr, t, [(o, t) for o in operands], compute)

    def op_and(self, instr):
        self._bitwise(instr, "and")

    def op_or(self, instr):
        self._bitwise(instr, "or")

    def op_xor(self, instr):
        self._bitwise(instr, "xor")

    def op_not(self, instr):
        t = llvm_type(instr.mods[-1])
        ones = "true" if t == "i1" else -1
        self.lift(instr, t, [(instr.operands[1], t)], lambda w, a: self.op("xor", t, w, a, const(t, w, ones)))

    def op_cnot(self, instr):
        t = llvm_type(instr.mods[-1])
        self.lift(instr, t, [(instr.operands[1], t)],
                  lambda w, a: self.resize("i1", t, w, self.compare("eq", t, w, a, const(t, w, 0))))

    def _shift(self, instr, name):
        """Shifts by the register's whole value: by 32 or more (64, 16) all bits leave."""
        t = llvm_type(instr.mods[-1])
        bits = bits_of(t)
        value, by = instr.operands[1:]
        known = self.lanes.of(by, 32)
        if known.const is not None and known.uniform and known.const < bits:
            return self.integer(instr, t, [(value, t)], lambda w, a: self.op(name, t, w, a, const(t, w, known.const)))

        def compute(w, a, n):
            inside = self.compare("ult", "i32", w, n, const("i32", w, bits))
            n = self.select("i32", w, inside, n, const("i32", w, bits - 1))
            shifted = self.op(name, t, w, a, self.resize("i32", t, w, n))
            return shifted if name == "ashr" else self.select(t, w, inside, shifted, const(t, w, 0))
        self.lift(instr, t, [(value, t), (by, "i32")], compute)

    def op_shl(self, instr):
        self._shift(instr, "shl")

    def op_shr(self, instr):
        self._shift(instr, "ashr" if instr.mods[-1][0] == "s" else "lshr")

    def op_shf(self, instr):
        direction, mode = instr.mods[0], instr.mods[1]
        if direction not in ("l", "r") or mode not in ("wrap", "clamp"):
            raise instr.unsupported()
        low, high, by = instr.operands[1:]

        def compute(w, low, high, n):
            if mode == "wrap":
                return self.intrinsic("fsh" + direction, "i32", w, high, low, n)
            inside = self.compare("ult", "i32", w, n, const("i32", w, 32))
            return self.select("i32", w, inside, self.intrinsic("fsh" + direction, "i32", w, high, low, n),
                               low if direction == "l" else high)
        self.lift(instr, "i32", [(low, "i32"), (high, "i32"), (by, "i32")], compute)

    def _counted(self, instr, compute):
        """Bit counts: operand of the instruction's type, 32-bit result."""
        t = llvm_type(instr.mods[-1])
        self.lift(instr, "i32", [(instr.operands[1], t)], lambda w, a: self.resize(t, "i32", w, compute(t, w, a)))

    def op_popc(self, instr):
        self._counted(instr, lambda t, w, a: self.intrinsic("ctpop", t, w, a))

    def op_clz(self, instr):
        self._counted(instr, self._leading_zeros)

    def _leading_zeros(self, t, w, a):
        return self.call(f"llvm.ctlz.{suffix(t, w)}", ty(t, w), (ty(t, w), a), ("i1", "false"))

    def op_brev(self, instr):
        t = llvm_type(instr.mods[-1])
        self.lift(instr, t, [(instr.operands[1], t)], lambda w, a: self.intrinsic("bitreverse", t, w, a))

    def op_bfind(self, instr):
        kind = instr.mods[-1]

        def compute(t, w, a):
            if kind[0] == "s":
                a = self.op("xor", t, w, a, self.op("ashr", t, w, a, const(t, w, bits_of(t) - 1)))
            zeros = self._leading_zeros(t, w, a)
            if "shiftamt" not in instr.mods:
                return self.op("sub", t, w, const(t, w, bits_of(t) - 1), zeros)
            none = self.compare("eq", t, w, a, const(t, w, 0))
            return self.select(t, w, none, const(t, w, -1), zeros)
        self._counted(instr, compute)

    def op_bfe(self, instr):
        """`length` bits from bit `start`; for signed types extended by the field's last bit (clamped to the top bit)."""
        kind = instr.mods[-1]
        t = llvm_type(kind)
        bits = bits_of(t)

        def compute(w, a, start, length):
            start, length = (self.op("and", "i32", w, v, const("i32", w, 255)) for v in (start, length))
            start, length = (self.resize("i32", t, w, v) for v in (start, length))
            if kind[0] == "s":
                # Shift the field to the top (bits above the register read as the sign), then back with its sign.
                a2 = self.op("ashr", t, w, a, self.intrinsic("umin", t, w, start, const(t, w, bits - 1)))
                room = self.op("sub", t, w, const(t, w, bits), self.intrinsic("umin", t, w, length, const(t, w, bits)))
                empty = self.compare("eq", t, w, length, const(t, w, 0))
                room = self.select(t, w, empty, const(t, w, 0), room)
                field = self.op("ashr", t, w, self.op("shl", t, w, a2, room), room)
                return self.select(t, w, empty, const(t, w, 0), field)
            a2 = self.select(t, w, self.compare("ult", t, w, start, const(t, w, bits)),
                             self.op("lshr", t, w, a, self.intrinsic("umin", t, w, start, const(t, w, bits - 1))), const(t, w, 0))
            return self.op("and", t, w, a2, self._ones(t, w, length))
        a, start, length = instr.operands[1:]
        self.lift(instr, t, [(a, t), (start, "i32"), (length, "i32")], compute)

    def _ones(self, t, w, length):
        """`length` low bits set; all for lengths from the width on."""
        inside = self.compare("ult", t, w, length, const(t, w, bits_of(t)))
        n = self.select(t, w, inside, length, const(t, w, 0))
        ones = self.op("sub", t, w, self.op("shl", t, w, const(t, w, 1), n), const(t, w, 1))
        return self.select(t, w, inside, ones, const(t, w, -1))

    def op_bfi(self, instr):
        t = llvm_type(instr.mods[-1])
        bits = bits_of(t)

        def compute(w, a, b, start, length):
            start, length = (self.op("and", "i32", w, v, const("i32", w, 255)) for v in (start, length))
            start, length = (self.resize("i32", t, w, v) for v in (start, length))
            inside = self.compare("ult", t, w, start, const(t, w, bits))
            start = self.select(t, w, inside, start, const(t, w, 0))
            field = self.op("shl", t, w, self._ones(t, w, length), start)
            field = self.select(t, w, inside, field, const(t, w, 0))
            moved = self.op("and", t, w, self.op("shl", t, w, a, start), field)
            kept = self.op("and", t, w, b, self.op("xor", t, w, field, const(t, w, -1)))
            return self.op("or", t, w, moved, kept)
        a, b, start, length = instr.operands[1:]
        self.lift(instr, t, [(a, t), (b, t), (start, "i32"), (length, "i32")], compute)

    def op_prmt(self, instr):
        if len(instr.mods) != 1:
            raise instr.unsupported()
        a, b, selector = instr.operands[1:]
        known = self.lanes.of(selector, 32)

        def compute(w, a, b, s):
            both = self.op("or", "i64", w, self.resize("i32", "i64", w, a),
                           self.op("shl", "i64", w, self.resize("i32", "i64", w, b), const("i64", w, 32)))
            total = None
            for i in range(4):
                byte = self._chosen_byte(w, both, a, b, s, i, known)
                byte = self.op("shl", "i32", w, byte, const("i32", w, 8 * i)) if i else byte
                total = self.op("or", "i32", w, total, byte) if i else byte
            return total
        self.lift(instr, "i32", [(a, "i32"), (b, "i32"), (selector, "i32")], compute)

    def _chosen_byte(self, w, both, a, b, s, i, known):
        """Byte i of prmt: three bits of the selector choose one of 8 bytes, the fourth replicates its sign."""
        if known.const is not None and known.uniform:
            nibble = known.const >> 4 * i & 15
            word = self.op("lshr", "i32", w, (a, b)[nibble >> 2 & 1], const("i32", w, 8 * (nibble & 3)))
            byte = self.op("and", "i32", w, word, const("i32", w, 255))
            return self._byte_sign(w, byte) if nibble & 8 else byte
        nibble = self.op("lshr", "i32", w, s, const("i32", w, 4 * i))
        which = self.op("and", "i32", w, nibble, const("i32", w, 7))
        by = self.op("shl", "i64", w, self.resize("i32", "i64", w, which), const("i64", w, 3))
        byte = self.resize("i64", "i32", w, self.op("lshr", "i64", w, both, by))
        byte = self.op("and", "i32", w, byte, const("i32", w, 255))
        signs = self.compare("ne", "i32", w, self.op("and", "i32", w, nibble, const("i32", w, 8)), const("i32", w, 0))
        return self.select("i32", w, signs, self._byte_sign(w, byte), byte)

    def _byte_sign(self, w, byte):
        negative = self.compare("ugt", "i32", w, byte, const("i32", w, 127))
        return self.select("i32", w, negative, const("i32", w, 255), const("i32", w, 0))

    def op_lop3(self, instr):
        table = instr.operands[4]
        if instr.mods != ("b32",) or not isinstance(table, Imm):
            raise instr.unsupported()

        def compute(w, a, b, c):
            total = const("i32", w, 0)
            for i in range(8):
                if table.value >> i & 1:
                    terms = [v if i >> k & 1 else self.op("xor", "i32", w, v, const("i32", w, -1))
                             for v, k in ((a, 2), (b, 1), (c, 0))]
                    term = self.op("and", "i32", w, self.op("and", "i32", w, *terms[:2]), terms[2])
                    total = self.op("or", "i32", w, total, term)
            return total
        self.lift(instr, "i32", [(o, "i32") for o in instr.operands[1:4]], compute)

    # ---- comparison and selection ----

    def _compared(self, instr, comparison, kind, w, a, b):
        if kind[0] == "f":
            table, t = _FLOATING, "half" if kind == "f16" else llvm_type(kind)
        else:
            table, t = _SIGNED if kind[0] == "s" else _UNSIGNED, llvm_type(kind)
        if comparison not in table or kind == "f16x2":
            raise instr.unsupported()
        if t == "half":                             # a comparison of vectors of half would go lane by lane
            a, b = (self.cast("fpext", "half", "float", w, v) for v in (a, b))
            t = "float"
        return self.compare(table[comparison], t, w, a, b)

    def op_setp(self, instr):
        mods = [m for m in instr.mods if m != "ftz"]
        kind, comparison = mods[-1], mods[0]
        combine = mods[1] if len(mods) == 3 else None
        if len(mods) > 3 or combine not in (None, "and", "or", "xor") or "ftz" in instr.mods:
            raise instr.unsupported()
        target = instr.operands[0]
        first, second = (target.first, target.second) if isinstance(target, Pair) else (target, None)
        t = "half" if kind == "f16" else llvm_type(kind)
        sources = [(o, t) for o in instr.operands[1:3]] + [(o, "i1") for o in instr.operands[3:]]
        w = 1 if self.uniform(*(o for o, _ in sources)) else WARP
        a, b, *c = (self.get(o, t, w) for o, t in sources)
        result = self._compared(instr, comparison, kind, w, a, b)
        opposite = self.op("xor", "i1", w, result, const("i1", w, "true"))
        for register, value in ((first, result), (second, opposite)):
            if register is not None:
                self.put(register, "i1", w, self.op(combine, "i1", w, value, c[0]) if combine else value)

    def op_set(self, instr):
        if len(instr.mods) != 3:
            raise instr.unsupported()
        comparison, to, kind = instr.mods
        t, source = llvm_type(to), "half" if kind == "f16" else llvm_type(kind)

        def compute(w, a, b):
            result = self._compared(instr, comparison, kind, w, a, b)
            return self.cast("uitofp", "i1", t, w, result) if to == "f32" else self.resize("i1", t, w, result, True)
        self.lift(instr, t, [(o, source) for o in instr.operands[1:]], compute)

    def op_selp(self, instr):
        t = llvm_type(instr.mods[-1])
        a, b, p = instr.operands[1:]
        self.lift(instr, t, [(p, "i1"), (a, t), (b, t)], lambda w, p, a, b: self.select(t, w, p, a, b))

    def op_slct(self, instr):
        t, kind = llvm_type(instr.mods[-2]), instr.mods[-1]
        a, b, c = instr.operands[1:]
        ct = llvm_type(kind)

        def compute(w, a, b, c):
            zero = const(ct, w, 0) if kind == "s32" else self.number(ct, w, 0.0)
            return self.select(t, w, self.compare("sge" if kind == "s32" else "oge", ct, w, c, zero), a, b)
        self.lift(instr, t, [(a, t), (b, t), (c, ct)], compute)

    # ---- conversion ----

    def op_cvt(self, instr):
        """Conversion by the kinds of both types; an integer result fills a wider register by extension."""
        to, of = instr.mods[-2:]
        mods = instr.mods[:-2]
        allowed = {*_ROUND, "sat", "ftz"} if to == of == "f32" else {*_ROUND, "sat"}
        if not set(mods) <= allowed or "f16x2" in (to, of):
            raise instr.unsupported()
        t, s = ("half" if kind == "f16" else llvm_type(kind) for kind in (to, of))
        register, operand = instr.operands
        own = self.type_of(register.name)
        convert = self._conversion(instr, to, of, t, s, mods)
        if to[0] in "us" and bits_of(own) > bits_of(t):
            self.lift(instr, own, [(operand, s)], lambda w, a: self.resize(t, own, w, convert(w, a), to[0] == "s"))
        else:
            self.integer(instr, t, [(operand, s)], convert)

    def _conversion(self, instr, to, of, t, s, mods):
        """The function (w, value) -> value that converts PTX type `of` (LLVM s) to PTX type `to` (LLVM t)."""
        if to[0] in "us" and of[0] in "us":
            if "sat" in mods:
                return lambda w, a: self._clamped(to, of, w, a)
            widens = bits_of(t) > bits_of(s)
            return lambda w, a: self.extend(s, t, w, a, of[0] == "s") if widens else self.resize(s, t, w, a)
        if to[0] == "f" and of[0] == "f":
            return lambda w, a: self._float_to_float(instr, t, s, mods, w, a)
        if to[0] == "f":
            return lambda w, a: self._int_to_float(instr, t, s, of, mods, w, a)
        return lambda w, a: self._float_to_int(instr, t, s, to, mods, w, a)

    def _clamped(self, to, of, w, a):
        """Integer to integer with saturation."""
        t, s = llvm_type(to), llvm_type(of)
        wide = "i128" if max(bits_of(t), bits_of(s)) == 64 else "i64"
        low, high = (-(1 << bits_of(t) - 1), (1 << bits_of(t) - 1) - 1) if to[0] == "s" else (0, (1 << bits_of(t)) - 1)
        a = self.resize(s, wide, w, a, of[0] == "s")
        a = self.intrinsic("smin", wide, w, self.intrinsic("smax", wide, w, a, const(wide, w, low)), const(wide, w, high))
        return self.resize(wide, t, w, a)

    def _float_to_float(self, instr, t, s, mods, w, a):
        mode = next((m for m in mods if m in _ROUND), None)
        if "ftz" in mods:
            a = self._flush("float", w, a)
        if t == s:
            wide = "float" if mode and s == "half" else s
            a = self.cast("fpext", s, wide, w, a)
            a = self.intrinsic(_ROUND[mode], wide, w, a) if mode else a
            a = self.cast("fptrunc", wide, s, w, a)
        elif bits_of(t) > bits_of(s):
            a = self.cast("fpext", s, t, w, a)
        else:
            a = self._narrowed(instr, t, s, mode, w, a)
        return self._saturate(t, w, a) if "sat" in mods else a

    def _narrowed(self, instr, t, s, mode, w, a):
        """A float rounded to a smaller type. From double to half by way of float32, rounded there in the same direction,
        or to odd if the half is to be the nearest: then the second rounding acts as the only one."""
        if mode not in ("rn", *DIRECTED):
            raise instr.unsupported("no rounding mode")
        if (s, t) == ("double", "half"):
            middle = self._rounded_to_odd(w, a) if mode == "rn" else self._narrowed(instr, "float", s, mode, w, a)
            return self._narrowed(instr, t, "float", mode, w, middle)
        return self.cast("fptrunc", s, t, w, a) if mode == "rn" else self.directed(mode, "fptrunc", s, t, w, a)

    def _rounded_to_odd(self, w, a):
        """A double as float32: cut off, and where that lost something with the last bit set."""
        cut = self.directed("rz", "fptrunc", "double", "float", w, a)
        lost = self.compare("one", "double", w, a, self.cast("fpext", "float", "double", w, cut))
        bits = self.cast("bitcast", "float", "i32", w, cut)
        odd = self.op("or", "i32", w, bits, self.resize("i1", "i32", w, lost))
        return self.cast("bitcast", "i32", "float", w, odd)

    def _int_to_float(self, instr, t, s, of, mods, w, a):
        """At once, or by way of double: 32 bits fit; of 64 the halves do, and their sum is rounded in the same direction."""
        mode = next((m for m in mods if m in _ROUND), None)
        if mode is None:
            raise instr.unsupported("no rounding mode")
        if mode == "rn" and t != "half":
            return self.cast("sitofp" if of[0] == "s" else "uitofp", s, t, w, a)
        if bits_of(s) < 64:
            wide = self.cast("sitofp" if of[0] == "s" else "uitofp", s, "double", w, a)
        elif mode in DIRECTED:
            wide = self._long_to_double(mode, of, w, a)
        else:                                       # what float32 does not hold exactly is no finite half
            return self.cast("fptrunc", "float", t, w, self.cast("sitofp" if of[0] == "s" else "uitofp", s, "float", w, a))
        return wide if t == "double" else self._narrowed(instr, t, "double", mode, w, wide)

    def _long_to_double(self, mode, of, w, a):
        high = self.op("ashr" if of[0] == "s" else "lshr", "i64", w, a, const("i64", w, 32))
        low = self.op("and", "i64", w, a, const("i64", w, 0xFFFFFFFF))
        high, low = (self.cast("sitofp", "i64", "double", w, part) for part in (high, low))
        return self.directed(mode, "fma", "double", "double", w, high, self.number("double", w, 2.0**32), low)

    def _float_to_int(self, instr, t, s, to, mods, w, a):
        """Rounds, then saturates. NaN becomes 0, but where 64 bits are on either side the top bit alone."""
        mode = next((m for m in mods if m in _ROUND), None)
        if mode is None:
            raise instr.unsupported("no rounding mode")
        if s == "half":
            a, s = self.cast("fpext", "half", "float", w, a), "float"
        rounded = self.intrinsic(_ROUND[mode], s, w, a) if _ROUND[mode] != "trunc" else a
        name = f"llvm.fpto{'si' if to[0] == 's' else 'ui'}.sat.{suffix(t, w)}.{suffix(s, w)}"
        result = self.call(name, ty(t, w), (ty(s, w), rounded))
        if "64" not in to and s != "double":
            return result
        nan = self.compare("uno", s, w, a, a)
        return self.select(t, w, nan, const(t, w, 1 << bits_of(t) - 1), result)

    # ---- dot products ----

    def op_dp4a(self, instr):
        kinds = instr.mods
        if len(kinds) != 2 or not set(kinds) <= {"u32", "s32"}:
            raise instr.unsupported()
        if id(instr) in self.inner_dots:            # its chain is computed at its end
            return
        chain = self.dot_chains.get(id(instr), [instr])
        a, b, c = instr.operands[1:]
        if self.vnni and kinds == ("s32", "s32") and not self.uniform(*(o for i in chain for o in i.operands[1:])):
            return self.put(instr.operands[0], "i32", WARP, self._dot_chain(chain))
        self.lift(instr, "i32", [(a, "i32"), (b, "i32"), (c, "i32")],
                  lambda w, a, b, c: self.dot4(w, kinds[0] == "s32", kinds[1] == "s32", a, b, c))

    def dot4(self, w, signed_a, signed_b, a, b, c):
        """c + sum over the 4 bytes of a * b."""
        if self.vnni and w == WARP and signed_a != signed_b:
            return self.dpbusd(WARP, c, *((b, a) if signed_a else (a, b)))
        for i in range(4):
            x, y = (self._element(w, v, 8, i, signed) for v, signed in ((a, signed_a), (b, signed_b)))
            c = self.op("add", "i32", w, c, self.op("mul", "i32", w, x, y))
        return c

    def find_dot_chains(self, instrs):
        """Finds, in a block, signed dp4a whose sum only goes on into the next: dot_chains (last -> all), inner_dots."""
        dots = {i.operands[0].name: i for i in instrs if i.name == "dp4a" and i.mods == ("s32", "s32")}
        self.dot_chains, self.inner_dots = {}, set()
        once = lambda o: isinstance(o, Imm) or self.n_definitions.get(o.name) == 1
        for instr in dots.values():
            before = dots.get(getattr(instr.operands[3], "name", None))
            chain = self.dot_chains.get(id(before), [before]) if before else []
            if before and self.n_uses[before.operands[0].name] == 1 and self.vnni and id(before) not in self.inner_dots \
                    and all(once(o) for i in (*chain, instr) for o in i.operands):
                self.inner_dots.add(id(before))
                self.dot_chains.pop(id(before), None)
                self.dot_chains[id(instr)] = [*chain, instr]
        self._plan_dots()

    def _plan_dots(self):
        """swap_dots: there are fewer first operands than second ones. sort_dots: it is cheaper to sort words by
        lane; per 4 words and 16 lanes that takes 8 shuffles for each operand, `_sum_fours` 9 instructions for
        each pair."""
        chains = [chain for chain in self.dot_chains.values() if len(chain) >= 4]
        firsts, seconds = (len({chain[0].operands[i] for chain in chains}) for i in (1, 2))
        self.swap_dots = firsts < seconds
        self.sort_dots = 9 * len(chains) > 8 * (firsts + seconds)

    def _dot_chain(self, chain):
        """The start of a chain + the sum of all its dot products."""
        start = chain[0].operands[3]
        quads, pairs = self._quads([self._unsigned_first(*instr.operands[1:3]) for instr in chain])
        total = None
        if quads:
            starts = self.uniform(start)
            words = self._every_fourth(start) if starts else const("i32", 4 * WARP, 0)
            total = self._sum_fours(self._multiply_add(4 * WARP, words, quads))
            if not starts:
                total = self.op("add", "i32", WARP, total, self.vector(start, "i32"))
        if pairs:
            words = [tuple(self.vector(o, "i32") for o in pair) for pair in pairs]
            total = self._multiply_add(WARP, total or self.vector(start, "i32"), words)
        return total

    def _unsigned_first(self, a, b):
        """The operands of a dot product in the order of `_multiply_add`: it needs a correction for each second
        one, so that is the one of which there are fewer. A uniform operand goes first: the other may then stay
        in memory."""
        swap = self.uniform(b) or self.swap_dots and not self.uniform(a)
        return (b, a) if swap else (a, b)

    def _multiply_add(self, n, total, pairs):
        """total + dot products of the bytes of pairs of vectors (a, b), of n words. The CPU multiplies unsigned
        by signed bytes, so a goes in as (a + 128) * b - 128 * sum(b); the last sum is the same for all chains
        with these b, and computed once."""
        correction, flip = const("i32", n, 0), const("i32", n, 0x80808080)
        for _, b in pairs:
            correction = self.dpbusd(n, correction, flip, b)
        total = self.op("sub", "i32", n, total, correction)
        for a, b in pairs:
            total = self.dpbusd(n, total, self.op("xor", "i32", n, a, flip), b)
        return total

    def _quads(self, pairs):
        """(quads, the other pairs): a quad multiplies all 4 words of two 16-byte loads, the vectors as loaded."""
        groups, quads = {}, []
        for pair in pairs if not self.sort_dots else ():
            a, b = (self.quads.get(getattr(o, "name", None)) for o in pair)
            if a and b and a[1] == b[1]:
                groups.setdefault((a[0], b[0]), {})[a[1]] = pair
        for wholes, parts in groups.items():
            if len(parts) == 4:
                quads.append(wholes)
                for pair in parts.values():
                    pairs.remove(pair)
        return quads, pairs

    def note_quad(self, instr, whole):
        """Remembers that the registers of a 16-byte load are every fourth word of `whole`."""
        for i, register in enumerate(instr.operands[0].items):
            if self.n_definitions.get(register.name) == 1:
                self.quads[register.name] = (whole, i)

    def _every_fourth(self, operand):
        """4 words per lane, side by side: the first is this uniform operand, the others are 0."""
        first = self.let(f"insertelement <4 x i32> zeroinitializer, i32 {self.scalar(operand, 'i32')}, i64 0")
        return self.shuffle("i32", 4, first, [i % 4 for i in range(4 * WARP)])

    def _sum_fours(self, words):
        """Sums over the 4 words of each lane, side by side: in few chains cheaper than to sort words by lane.
        The first step stays within the quarters of a CPU's registers, the second puts lanes in order."""
        quarters = [32 * (i // 16) + 16 * (i // 2 % 2) + 4 * (i // 4 % 4) + i % 2 * 2 for i in range(2 * WARP)]
        in_order = [16 * (lane // 8) + 4 * (lane % 4) + 2 * (lane % 8 // 4) for lane in range(WARP)]
        for length, places in ((4 * WARP, quarters), (2 * WARP, in_order)):
            first, second = (self.shuffle("i32", length, words, [i + odd for i in places]) for odd in (0, 1))
            words = self.op("add", "i32", length // 2, first, second)
        return words

    def dpbusd(self, n, c, a, b):
        """c + dot products of unsigned bytes of a and signed bytes of b, on n words: 16 at a time."""
        parts = []
        for start in range(0, n, 16):
            x = [v if "splat" in v else self.shuffle("i32", n, v, range(start, start + 16)) for v in (c, a, b)]
            x = [x[0]] + [self.let(f"bitcast <16 x i32> {v} to <64 x i8>") for v in x[1:]]
            parts.append(self.call("llvm.x86.avx512.vpdpbusd.512", "<16 x i32>", ("<16 x i32>", x[0]),
                                   ("<64 x i8>", x[1]), ("<64 x i8>", x[2])))
        return self.concatenate("i32", 16, parts)

    def _element(self, w, value, bits, i, signed):
        """Field i of `bits` bits of a word, extended to 32."""
        if signed:
            left = 32 - bits * (i + 1)
            value = self.op("shl", "i32", w, value, const("i32", w, left)) if left else value
            return self.op("ashr", "i32", w, value, const("i32", w, 32 - bits))
        value = self.op("lshr", "i32", w, value, const("i32", w, bits * i)) if i else value
        return self.op("and", "i32", w, value, const("i32", w, (1 << bits) - 1))

    def op_dp2a(self, instr):
        half, *kinds = instr.mods
        if half not in ("lo", "hi") or len(kinds) != 2 or not set(kinds) <= {"u32", "s32"}:
            raise instr.unsupported()
        first = 2 if half == "hi" else 0

        def compute(w, a, b, c):
            for i in range(2):
                x = self._element(w, a, 16, i, kinds[0] == "s32")
                y = self._element(w, b, 8, first + i, kinds[1] == "s32")
                c = self.op("add", "i32", w, c, self.op("mul", "i32", w, x, y))
            return c
        self.lift(instr, "i32", [(o, "i32") for o in instr.operands[1:]], compute)

    # ---- special registers ----

    def special_scalar(self, name):
        """(value, type) of the scalar of a special register."""
        if name.startswith(("%ctaid.", "%nctaid.")):
            return self.let(f"load i32, ptr %{name[1:]}.place"), "i32"
        if name.startswith("%ntid."):
            return str(self.lanes.block["xyz".index(name[-1])]), "i32"
        if name.startswith("%tid."):
            return self._thread_index("xyz".index(name[-1]), 1, "%first_thread"), "i32"
        if name == "%laneid":
            return "0", "i32"
        if name == "WARP_SZ":
            return "32", "i32"
        if name == "%warpid":
            return "%warp", "i32"
        if name == "%nwarpid":
            x, y, z = self.lanes.block
            return str(-(-x * y * z // WARP)), "i32"
        if name in ("%clock", "%clock64"):
            counter = "readcyclecounter" if self.x86 else "readsteadycounter"
            clock = self.call(f"llvm.{counter}", "i64")
            return (clock, "i64") if name == "%clock64" else (self.resize("i64", "i32", 1, clock), "i32")
        if name == "%dynamic_smem_size":
            return self.let("load i32, ptr %dynamic.place"), "i32"
        raise self.instr.unsupported(f"special register `{name}`")

    def special_vector(self, name):
        if name.startswith("%tid."):
            thread = self.spread("i32", "%first_thread", range(WARP))
            return self._thread_index("xyz".index(name[-1]), WARP, thread), "i32"
        if name.startswith("%lanemask_"):
            ones = {"eq": lambda i: 1 << i, "lt": lambda i: (1 << i) - 1, "le": lambda i: (2 << i) - 1,
                    "gt": lambda i: -(2 << i) % (1 << 32), "ge": lambda i: -(1 << i) % (1 << 32)}[name[10:]]
            return vector_const("i32", [ones(i) for i in range(WARP)]), "i32"
        raise self.instr.unsupported(f"special register `{name}`")

    def _thread_index(self, axis, w, thread):
        """Index along an axis of the thread with this number in the block."""
        x, y, z = self.lanes.block
        stride = (1, x, x * y)[axis]
        value = self.op("udiv", "i32", w, thread, const("i32", w, stride)) if stride > 1 else thread
        return self.op("urem", "i32", w, value, const("i32", w, (x, y, z)[axis]))
