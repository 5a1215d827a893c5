"""Moves, and the arithmetic of integers; where a name serves integers and floats, it starts here."""

from .emit import WARP, bits_of, const, llvm_type, suffix, ty
from .floats import DIRECTED, Floats, only
from .ptx import SIZES, Pack, Reg


class Integers(Floats):
    """mov, add to max, with carries."""


    def integer(self, instr, result, operands, compute):
        """Like `lift`, but a patterned result is computed on the scalars (and on vectors too where it is
        loose and its vector is needed)."""
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
        """A wider integer. The scalar of a pattern is extended by way of the lane that a wrap-around leaves
        right: with index tid - 3 the highest lanes are elements of an array, and the lowest, at 2**32 - 3,
        are none."""
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

    # ---- arithmetic ----

    def _arithmetic(self, instr, name):
        kind = instr.mods[-1]
        operands = instr.operands[1:]
        if kind[0] in "us":
            only(instr, "sat")
            t = llvm_type(kind)
            if "sat" in instr.mods:
                saturating = f"{kind[0]}{name}.sat"
                return self.lift(instr, t, [(o, t) for o in operands],
                                 lambda w, *a: self.intrinsic(saturating, t, w, *a))
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
        """Sums that write the carry (`.cc`), read it (the names that end in c; it is their last operand), or
        both. After a difference the carry is the borrow."""
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
        return self.resize(self._wide(t), t, w,
                           self.op("lshr", self._wide(t), w, whole, const(self._wide(t), w, bits_of(t))))

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
        self.lift(instr, t, [(o, t) for o in instr.operands[1:]],
                  lambda w, a, b: self._divided(kind, "rem", w, a, b))

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
            return self.lift(instr, t, [(instr.operands[1], t)],
                             lambda w, a: self.op("sub", t, w, const(t, w, 0), a))
        only(instr, "ftz")
        self._sign_bit(instr, "xor", lambda bits, signs: signs)

    def op_abs(self, instr):
        kind = instr.mods[-1]
        t = llvm_type(kind)
        if kind[0] == "s":
            return self.lift(instr, t, [(instr.operands[1], t)],
                             lambda w, a: self.call(f"llvm.abs.{suffix(t, w)}", ty(t, w), (ty(t, w), a),
                                                    ("i1", "false")))
        only(instr, "ftz")
        self._sign_bit(instr, "and", lambda bits, signs: signs ^ (1 << bits) - 1)

    def _sign_bit(self, instr, operation, mask):
        """Floats of any size: acts on the sign bits alone."""
        kind = instr.mods[-1]
        t = f"i{8 * SIZES[kind]}"
        bits = bits_of(t)
        signs = 0x80008000 if kind == "f16x2" else 1 << (bits - 1)
        self.lift(instr, t, [(instr.operands[1], t)],
                  lambda w, a: self.op(operation, t, w, a, const(t, w, mask(bits, signs))))

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
