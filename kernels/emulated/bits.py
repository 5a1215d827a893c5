"""Instructions on the bits of words."""

from .emit import WARP, bits_of, const, llvm_type, suffix, ty
from .integers import Integers
from .ptx import Imm


class Bits(Integers):
    """Logic, shifts, counts, fields and bytes."""

    def _bitwise(self, instr, name):
        t = llvm_type(instr.mods[-1])
        operands = list(instr.operands[1:])
        shapes = [self.lanes.of(o, bits_of(t)) for o in operands]

        def compute(w, a, b):
            if w == 1 and name != "and" and not self.uniform(*operands):
                # A constant's low bits went into the pattern.
                low = (1 << min(64 if s.const is not None and s.uniform else s.tz for s in shapes)) - 1
                a, b = (str(s.const & ~low) if s.const is not None and s.uniform else v
                        for s, v in zip(shapes, (a, b)))
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
        """Shifts by the whole value of a register: a shift by the type's size or more moves all bits out."""
        t = llvm_type(instr.mods[-1])
        bits = bits_of(t)
        value, by = instr.operands[1:]
        known = self.constant(by)
        if known is not None and known < bits:
            return self.integer(instr, t, [(value, t)], lambda w, a: self.op(name, t, w, a, const(t, w, known)))

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
        self.lift(instr, "i32", [(instr.operands[1], t)],
                  lambda w, a: self.resize(t, "i32", w, compute(t, w, a)))

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
        """`length` bits from bit `start` on. For signed types the result is extended with the field's last bit
        (clamped to the top bit)."""
        kind = instr.mods[-1]
        t = llvm_type(kind)
        bits = bits_of(t)

        def compute(w, a, start, length):
            start, length = (self.op("and", "i32", w, v, const("i32", w, 255)) for v in (start, length))
            start, length = (self.resize("i32", t, w, v) for v in (start, length))
            if kind[0] == "s":
                # Shift the field to the top (bits above the register read as the sign), then back with its
                # sign.
                a2 = self.op("ashr", t, w, a, self.intrinsic("umin", t, w, start, const(t, w, bits - 1)))
                room = self.op("sub", t, w, const(t, w, bits),
                               self.intrinsic("umin", t, w, length, const(t, w, bits)))
                empty = self.compare("eq", t, w, length, const(t, w, 0))
                room = self.select(t, w, empty, const(t, w, 0), room)
                field = self.op("ashr", t, w, self.op("shl", t, w, a2, room), room)
                return self.select(t, w, empty, const(t, w, 0), field)
            inside = self.compare("ult", t, w, start, const(t, w, bits))
            start = self.intrinsic("umin", t, w, start, const(t, w, bits - 1))
            a2 = self.select(t, w, inside, self.op("lshr", t, w, a, start), const(t, w, 0))
            return self.op("and", t, w, a2, self._ones(t, w, length))
        a, start, length = instr.operands[1:]
        self.lift(instr, t, [(a, t), (start, "i32"), (length, "i32")], compute)

    def _ones(self, t, w, length):
        """A word whose `length` lowest bits are set; all bits, for lengths from the width on."""
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
        choice = self.choices.get(getattr(selector, "name", None))
        if choice:
            return self._prmt_of_choice(instr.operands[0], a, b, choice)
        known = self.constant(selector)
        self.lift(instr, "i32", [(a, "i32"), (b, "i32"), (selector, "i32")],
                  lambda w, a, b, s: self._chosen_bytes(w, a, b, s, known))

    def _prmt_of_choice(self, target, a, b, choice):
        """prmt with one of two constant selectors in each lane: chooses between two results."""
        lanes, *selectors = choice
        w = 1 if self.uniform(a, b) else WARP
        a, b = (self.get(o, "i32", w) for o in (a, b))
        results = [self._chosen_bytes(w, a, b, None, selector) for selector in selectors]
        results = [self.splat("i32", result) for result in results] if w == 1 else results
        self.put(target, "i32", WARP, self.select("i32", WARP, lanes, *results))

    def _chosen_bytes(self, w, a, b, s, known):
        """prmt. known: the selector, if it is a constant."""
        both = self.op("or", "i64", w, self.resize("i32", "i64", w, a),
                       self.op("shl", "i64", w, self.resize("i32", "i64", w, b), const("i64", w, 32)))
        total = None
        for i in range(4):
            byte = self._chosen_byte(w, both, a, b, s, i, known)
            byte = self.op("shl", "i32", w, byte, const("i32", w, 8 * i)) if i else byte
            total = self.op("or", "i32", w, total, byte) if i else byte
        return total

    def _chosen_byte(self, w, both, a, b, s, i, known):
        """One byte of prmt. Three bits of the selector choose one of 8 bytes; with the fourth bit the result is the
        chosen byte's sign in every bit."""
        if known is not None:
            nibble = known >> 4 * i & 15
            word = self.op("lshr", "i32", w, (a, b)[nibble >> 2 & 1], const("i32", w, 8 * (nibble & 3)))
            byte = self.op("and", "i32", w, word, const("i32", w, 255))
            return self._byte_sign(w, byte) if nibble & 8 else byte
        nibble = self.op("lshr", "i32", w, s, const("i32", w, 4 * i))
        which = self.op("and", "i32", w, nibble, const("i32", w, 7))
        by = self.op("shl", "i64", w, self.resize("i32", "i64", w, which), const("i64", w, 3))
        byte = self.resize("i64", "i32", w, self.op("lshr", "i64", w, both, by))
        byte = self.op("and", "i32", w, byte, const("i32", w, 255))
        signs = self.compare("ne", "i32", w, self.op("and", "i32", w, nibble, const("i32", w, 8)),
                             const("i32", w, 0))
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
