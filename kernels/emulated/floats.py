"""Arithmetic of floating-point numbers, and what all of it shares: rounding modes, flushing, halves.

One method per PTX instruction, as in the files that build on this one: it reads the modifiers, refuses those
that it does not know, and describes the computation once, for width w (a scalar, some values, or 32 lanes);
`lift` chooses the width.
"""

import math
import struct

from .emit import WARP, Operands, bits_of, const, llvm_type, suffix, ty

DIRECTED = {"rz": 0, "rp": 2, "rm": 3}              # rounding modes, as llvm.set.rounding numbers them
_DOWN, _UP = "9", "10"                              # as an instruction of AVX-512 names them
_OF_HALVES = {"fma", "add", "sub", "mul"}           # arithmetic that some processors have for halves, too


def only(instr, *allowed):
    """Refuses modifiers other than these (and the type, the last one)."""
    for mod in instr.mods[:-1]:
        if mod not in allowed:
            raise instr.unsupported(f"modifier `.{mod}`")


def float32_holds(mask, ones, k):
    """Whether it is certain that float32 holds a * b + c for each half b, if a = ones | (x & mask) and c is b * k,
    rounded to half. mask, ones and k are the bits of halves.

    For finite b and c: let u be the unit of b's last place, so |b| < 2^11 u. The exponent of a is known, and so is the
    lowest bit s that any a can have: a b is a multiple of s u. Since |k| > 1, c is a multiple of u, and |c| <= 2 |k b|.
    So the sum is a multiple of min(s, 1) u, and less than 2^11 (|a| + 2 |k|) u. float32 holds it if these are 2^24
    multiples at most. If c is infinite or not a number, the sum is c or not a number. With k = 1 LLVM would leave out
    the product, and a NaN would keep the bits of b."""
    exponent, last = ones >> 10, (mask | ones | 1 << 10) & 0x7FF
    if not 0 < exponent < 31 or mask & ~ones & 0xFC00:
        return False
    s = min(2.0 ** (exponent - 25) * (last & -last), 1.0)
    k = abs(struct.unpack("<e", struct.pack("<H", k))[0])
    return 1 < k < math.inf and 2 ** 11 * (2.0 ** (exponent - 14) + 2 * k) <= 2 ** 24 * s


class Floats(Operands):
    """fma, quotients, roots, approximations and the like."""

    def floating(self, instr, operands, compute):
        """Writes compute(t, w, mods, *values). It computes f32 and f64 in their own type, f16 as f32 with one
        rounding to half, and f16x2 likewise for each half. What the processor does on halves it does in line, and what
        `find_short_sums` has found.

        Other operations on halves are calls of functions. In line they would make the machine code faster and its
        translation much slower (benchmarks/results.md).
        """
        kind = instr.mods[-1]
        mods = instr.mods[:-1]
        if "ftz" in mods and kind != "f32" and not (kind == "f64" and "approx" in mods):
            raise instr.unsupported("modifier `.ftz`")
        if kind in ("f32", "f64"):
            t = llvm_type(kind)
            self.lift(instr, t, [(o, t) for o in operands],
                      lambda w, *a: self._finish(t, w, mods, compute, a))
        elif kind in ("f16", "f16x2"):
            t, emit = ("half", self._half) if kind == "f16" else ("i32", self._half2)
            name, typed = ".".join([instr.name, *instr.mods]), [(o, t) for o in operands]
            if id(instr) in self.in_line or self._has_halves(mods):
                return self.lift(instr, t, typed, lambda w, *a: emit(w, mods, compute, a))
            self.lift(instr, t, typed, lambda w, *a: self.outlined(
                f"{name}.{w}", ty(t, w), lambda *v: emit(w, mods, compute, v), *((ty(t, w), v) for v in a)))
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
        """A denormal becomes zero of the same sign. Only `.approx.ftz.f64` flushes float64, and it also clears the
        lower half of the mantissa: these instructions read and write upper halves."""
        i = f"i{bits_of(t)}"
        exponents, signs = {"float": (0x7F800000, 1 << 31), "double": (0x7FF << 52, 1 << 63)}[t]
        bits = self.cast("bitcast", t, i, w, value)
        if t == "double":
            bits = self.op("and", i, w, bits, const(i, w, -1 << 32))
        denormal = self.compare("eq", i, w, self.op("and", i, w, bits, const(i, w, exponents)),
                                const(i, w, 0))
        sign = self.op("and", i, w, bits, const(i, w, signs))
        return self.cast("bitcast", i, t, w, self.select(i, w, denormal, sign, bits))

    def _saturate(self, t, w, value):
        """Clamps to [0, 1]; NaN and -0 become +0."""
        one, zero = self.number(t, w, 1.0), self.number(t, w, 0.0)
        positive = self.compare("ogt", t, w, value, zero)
        value = self.select(t, w, positive, value, zero)
        return self.select(t, w, self.compare("ogt", t, w, value, one), one, value)

    def number(self, t, w, value):
        bits, = struct.unpack("<Q", struct.pack("<d", value))          # how LLVM writes any float exactly
        return const(t, w, f"0x{bits:016X}")

    def _has_halves(self, mods):
        """Whether the processor does this operation on halves, with one rounding."""
        return self.cpu_halves and self.instr.name in _OF_HALVES and set(mods) <= {"rn"}

    def _half(self, w, mods, compute, values):
        """Computes on halves, where the processor cannot through float32. For +, -, *, / and sqrt, one operation of
        float32 on halves that is rounded again to half equals one rounding (24 >= 2 * 11 + 2). The sum of an fma can
        be longer, so fma rounds to odd first (`_odd_fma`)."""
        if self._has_halves(mods):
            return compute("half", w, mods, *values)
        wide = [self.cast("fpext", "half", "float", w, v) for v in values]
        result = self._finish("float", w, mods + ("half",), compute, wide)
        return self.cast("fptrunc", "float", "half", w, result)

    def _half2(self, w, mods, compute, values):
        """Computes on both halves of each word side by side, as they lie in memory: on twice as many values."""
        halves = [self.cast("bitcast", ty("i32", w), ty("half", 2 * w), 1, v) for v in values]
        result = self._half(2 * w, mods, compute, halves)
        return self.cast("bitcast", ty("half", 2 * w), ty("i32", w), 1, result)

    def _operation(self, name):
        """The function (t, w, mods, *values) that does a floating-point operation of LLVM's name in the rounding
        mode in mods."""
        def compute(t, w, mods, *values):
            mode = next((m for m in mods if m in DIRECTED), None)
            if mode and "half" in mods:
                raise self.instr.unsupported(f"rounding `.{mode}` of a half")
            if mode:
                return self.directed(mode, name, t, t, w, *values)
            emit = self.intrinsic if name in ("fma", "sqrt") else self.op
            return emit(name, t, w, *values)
        return compute

    def directed(self, mode, name, t, result, w, *values):
        """An operation of LLVM's constrained kind, from type t to type `result`, in a rounding mode other than to
        nearest. It is a function of its own, because the rounding mode is a state of the processor."""
        if result == "half" and w > 8:              # LLVM 20 cannot narrow more at a time
            parts = [self.directed(mode, name, t, result, 8,
                                   self.shuffle(t, w, values[0], [lane if lane < w else None
                     for lane in range(start, start + 8)])) for start in range(0, WARP, 8)]
            return self.shuffle(result, WARP, self.concatenate(result, 8, parts), range(w))
        function = f"{name}.{mode}.{suffix(result, w)}.{suffix(t, w)}"
        types = suffix(result, w) + ("" if t == result else f".{suffix(t, w)}")
        constrained = f"llvm.experimental.constrained.{name}.{types}"
        listed = ", ".join([ty(t, w)] * len(values))
        self.declarations["llvm.set.rounding"] = "declare void @llvm.set.rounding(i32)"
        self.declarations[constrained] = \
            f"declare {ty(result, w)} @{constrained}({listed}, metadata, metadata)"

        def body(*operands):
            self.do(f"call void @llvm.set.rounding(i32 {DIRECTED[mode]}) #1")
            named = ", ".join(f"{ty(t, w)} {v}" for v in operands)
            value = self.let(f"call {ty(result, w)} @{constrained}({named}, metadata !\"round.dynamic\","
                             f" metadata !\"fpexcept.ignore\") #1")
            self.do("call void @llvm.set.rounding(i32 1) #1")
            return value
        return self.outlined(function, ty(result, w), body, *((ty(t, w), v) for v in values),
                             attributes="#1")

    def op_fma(self, instr):
        only(instr, "rn", *DIRECTED, "sat", "ftz")
        fma, is_short = self._operation("fma"), id(instr) in self.in_line
        self.floating(instr, instr.operands[1:], lambda t, w, mods, *values:
                      self._odd_fma(w, *values) if "half" in mods and not is_short else fma(t, w, mods, *values))

    def find_short_sums(self, instrs):
        """Finds each `fma.rn.f16x2` of a block whose sums a * b + c float32 holds: rounding them to half is the only
        rounding. It looks for the way in which kernels make halves of codes, with constants ones, mask and k:

            a = ones | (x & mask)       c = b * k, rounded to half

        Sets in_line: the ids of these sums and products."""
        self.in_line, made = set(), {}       # made: register -> (place, instruction) that wrote it last
        for place, instr in enumerate(instrs):
            if instr.name == "fma" and instr.mods == ("rn", "f16x2"):
                product = self._short_product(made, *instr.operands[1:])
                self.in_line |= {id(product), id(instr)} if product else set()
            made |= dict.fromkeys(instr.written, (place, instr))

    def _short_product(self, made, a, b, c):
        """The instruction that has made c, if a * b + c is short. made: as above, at the place of the fma."""
        def maker(operand, *words, end=math.inf):
            """(place, instruction) that wrote an operand last, if that was before `end` and in these words."""
            place, instr = made.get(getattr(operand, "name", None), (-1, None))
            is_meant = instr and place < end and words in ((), (instr.name, *instr.mods))
            return (place, instr) if is_meant else (-1, None)

        joined_at, joined = maker(a, "or", "b32")
        product_at, product = maker(c, "mul", "rn", "f16x2")
        if not joined or not product or product.operands[1] != b or maker(b)[0] > product_at:
            return None
        _, chosen = maker(joined.operands[1], "and", "b32", end=joined_at)
        words = [self.constant(each.operands[2]) for each in (chosen, joined, product) if each]
        holds = chosen and None not in words and all(
            float32_holds(*(word >> shift & 0xFFFF for word in words)) for shift in (0, 16))
        return product if holds else None

    def _odd_fma(self, w, a, b, c):
        """a * b + c of halves in float32, rounded to odd: the exact sum if float32 holds it, else that of its two
        neighbours whose last bit is set. When the result is rounded to half later, the outcome is as after one
        rounding."""
        if not self.cpu_rounds or w % 16:
            return self._odd_by_error(w, a, b, c)
        parts = [[self.shuffle("float", w, v, range(start, start + 16)) for v in (a, b, c)]
                 for start in range(0, w, 16)]
        return self.concatenate("float", 16, [self._odd_of_two(*part) for part in parts])

    def _odd_of_two(self, *values):
        """16 sums, rounded to odd by rounding them both down and up, with the CPU's instructions that name their
        rounding. Where both are alike, the sum is exact; where they differ, one of them is odd. For x - x it takes
        the sum rounded up, which is +0 as in rounding to nearest."""
        values = [("<16 x float>", v) for v in values]
        down, up = (self.call("llvm.x86.avx512.vfmadd.ps.512", "<16 x float>", *values, ("i32", mode))
                    for mode in (_DOWN, _UP))
        last = self.op("and", "i32", 16, self.cast("bitcast", "float", "i32", 16, down), const("i32", 16, 1))
        even = self.compare("eq", "i32", 16, last, const("i32", 16, 0))
        return self.select("float", 16, even, up, down)

    def _odd_by_error(self, w, a, b, c):
        """The exact product plus c, rounded to odd: where the sum is inexact and its last bit is even, it goes one
        step towards the exact value."""
        product = self.op("fmul", "float", w, a, b)                    # 22 bits: exact
        total = self.op("fadd", "float", w, product, c)
        back = self.op("fsub", "float", w, total, product)             # TwoSum: error = product + c - total
        error = self.op("fadd", "float", w,
                        self.op("fsub", "float", w, product, self.op("fsub", "float", w, total, back)),
                        self.op("fsub", "float", w, c, back))
        bits = self.cast("bitcast", "float", "i32", w, total)
        inexact = self.compare("one", "float", w, error, self.number("float", w, 0.0))
        even = self.compare("eq", "i32", w, self.op("and", "i32", w, bits, const("i32", w, 1)),
                            const("i32", w, 0))
        signs = self.op("xor", "i32", w, bits, self.cast("bitcast", "float", "i32", w, error))
        step = self.op("or", "i32", w, self.op("ashr", "i32", w, signs, const("i32", w, 31)),
                       const("i32", w, 1))
        moved = self.op("add", "i32", w, bits, step)
        change = self.op("and", "i1", w, inexact, even)
        return self.cast("bitcast", "i32", "float", w, self.select("i32", w, change, moved, bits))

    def op_rcp(self, instr):
        only(instr, "rn", *DIRECTED, "approx", "ftz")
        divide = self._operation("fdiv")
        self.floating(instr, instr.operands[1:],
                      lambda t, w, mods, a: divide(t, w, mods, self.number(t, w, 1.0), a))

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
        classes = {"nan": 3, "finite": 0x1F8, "infinite": 0x204, "number": 0x3FC, "normal": 0x108,
                   "subnormal": 0x90}
        if what not in classes:
            raise instr.unsupported()
        self.lift(instr, "i1", [(instr.operands[1], t)],
                  lambda w, a: self.call(f"llvm.is.fpclass.{suffix(t, w)}", ty("i1", w), (ty(t, w), a),
                                         ("i32", str(classes[what]))))
