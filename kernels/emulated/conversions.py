"""Comparison, selection and conversion between types."""

from .bits import Bits
from .emit import WARP, bits_of, const, llvm_type, suffix, ty
from .floats import DIRECTED
from .ptx import Imm, Pair

_SIGNED = {"lt": "slt", "le": "sle", "gt": "sgt", "ge": "sge", "eq": "eq", "ne": "ne"}
_UNSIGNED = {"lt": "ult", "le": "ule", "gt": "ugt", "ge": "uge", "lo": "ult", "ls": "ule", "hi": "ugt",
             "hs": "uge", "eq": "eq", "ne": "ne"}
_FLOATING = {"eq": "oeq", "ne": "one", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge", "equ": "ueq",
             "neu": "une", "ltu": "ult", "leu": "ule", "gtu": "ugt", "geu": "uge", "num": "ord", "nan": "uno"}
_ROUND = {"rn": "roundeven", "rni": "roundeven", "rz": "trunc", "rzi": "trunc", "rm": "floor", "rmi": "floor",
          "rp": "ceil", "rpi": "ceil"}


class Conversions(Bits):
    """setp, set, selp, slct and cvt."""

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
            return self.cast("uitofp", "i1", t, w, result) if to == "f32" else \
                self.resize("i1", t, w, result, True)
        self.lift(instr, t, [(o, source) for o in instr.operands[1:]], compute)

    def op_selp(self, instr):
        t = llvm_type(instr.mods[-1])
        a, b, p = instr.operands[1:]
        self.lift(instr, t, [(p, "i1"), (a, t), (b, t)], lambda w, p, a, b: self.select(t, w, p, a, b))
        if t == "i32" and isinstance(a, Imm) and isinstance(b, Imm) and not self.uniform(p):
            self.choices[instr.operands[0].name] = self.vector(p, "i1"), a.value, b.value

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
        """Converts by the kinds of both types. An integer result is extended to a wider register."""
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
            self.lift(instr, own, [(operand, s)],
                      lambda w, a: self.resize(t, own, w, convert(w, a), to[0] == "s"))
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
        half = 1 << bits_of(t) - 1
        low, high = (-half, half - 1) if to[0] == "s" else (0, 2 * half - 1)
        a = self.resize(s, wide, w, a, of[0] == "s")
        a = self.intrinsic("smin", wide, w, self.intrinsic("smax", wide, w, a, const(wide, w, low)),
                           const(wide, w, high))
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
        """A float rounded to a smaller type. From double to half the way leads over float32. It is rounded to
        float32 in the direction of the whole conversion, or to odd if the half is rounded to nearest: so the two
        roundings act as one."""
        if mode not in ("rn", *DIRECTED):
            raise instr.unsupported("no rounding mode")
        if (s, t) == ("double", "half"):
            middle = self._rounded_to_odd(w, a) if mode == "rn" else \
                self._narrowed(instr, "float", s, mode, w, a)
            return self._narrowed(instr, t, "float", mode, w, middle)
        return self.cast("fptrunc", s, t, w, a) if mode == "rn" else \
            self.directed(mode, "fptrunc", s, t, w, a)

    def _rounded_to_odd(self, w, a):
        """A double as float32: truncated, with the last bit set if the truncation lost something."""
        cut = self.directed("rz", "fptrunc", "double", "float", w, a)
        lost = self.compare("one", "double", w, a, self.cast("fpext", "float", "double", w, cut))
        bits = self.cast("bitcast", "float", "i32", w, cut)
        odd = self.op("or", "i32", w, bits, self.resize("i1", "i32", w, lost))
        return self.cast("bitcast", "i32", "float", w, odd)

    def _int_to_float(self, instr, t, s, of, mods, w, a):
        """An integer as a float, converted directly or by way of double. A double holds 32 bits; of 64 bits it holds
        either half, and the sum of the halves is rounded in the same direction."""
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
            return self.cast("fptrunc", "float", t, w,
                             self.cast("sitofp" if of[0] == "s" else "uitofp", s, "float", w, a))
        return wide if t == "double" else self._narrowed(instr, t, "double", mode, w, wide)

    def _long_to_double(self, mode, of, w, a):
        high = self.op("ashr" if of[0] == "s" else "lshr", "i64", w, a, const("i64", w, 32))
        low = self.op("and", "i64", w, a, const("i64", w, 0xFFFFFFFF))
        high, low = (self.cast("sitofp", "i64", "double", w, part) for part in (high, low))
        return self.directed(mode, "fma", "double", "double", w, high, self.number("double", w, 2.0**32), low)

    def _float_to_int(self, instr, t, s, to, mods, w, a):
        """Rounds, then saturates. NaN becomes 0; but if either type has 64 bits, NaN becomes the top bit alone."""
        mode = next((m for m in mods if m in _ROUND), None)
        if mode is None:
            raise instr.unsupported("no rounding mode")
        if s == "half":
            a, s = self.cast("fpext", "half", "float", w, a), "float"
        rounded = self.intrinsic(_ROUND[mode], s, w, a) if _ROUND[mode] != "trunc" else a
        if w > 1 and s == "float" and bits_of(t) <= 32:
            return self._saturated(t, to[0] == "s", w, rounded)
        name = f"llvm.fpto{'si' if to[0] == 's' else 'ui'}.sat.{suffix(t, w)}.{suffix(s, w)}"
        result = self.call(name, ty(t, w), (ty(s, w), rounded))
        if "64" not in to and s != "double":
            return result
        nan = self.compare("uno", s, w, a, a)
        return self.select(t, w, nan, const(t, w, 1 << bits_of(t) - 1), result)

    def _saturated(self, t, signed, w, a):
        """Float32 values as integers of at most 32 bits, cut off at their limits; NaN becomes 0. LLVM's own saturating
        conversion goes lane by lane."""
        bits = bits_of(t) - signed
        lowest = -(1 << bits) if signed else 0
        low, high = (self.number("float", w, float(limit)) for limit in (lowest, 1 << bits))
        below, beyond = self.compare("olt", "float", w, a, low), self.compare("oge", "float", w, a, high)
        inside = self.op("and", "i1", w, *(self.compare(*limit) for limit in (("oge", "float", w, a, low),
                                                                              ("olt", "float", w, a, high))))
        inner = self.select("float", w, inside, a, self.number("float", w, 0.0))
        result = self.cast("fptosi" if signed else "fptoui", "float", t, w, inner)
        result = self.select(t, w, beyond, const(t, w, (1 << bits) - 1), result)
        return self.select(t, w, below, const(t, w, lowest), result)
