"""Dot products of bytes: dp4a and dp2a, and whole chains of them at once where the CPU multiplies and adds neighbours:
bytes with VNNI, 16-bit numbers with AVX2."""

from .conversions import Conversions
from .emit import WARP, const, vector_const
from .ptx import Reg

_LONGEST = 124  # words of a chain: 256 times the sum of 127 dot products of four bytes still fits int32
_HALVES = 8     # words of a register of AVX2


class Dots(Conversions):
    """dp4a and dp2a."""

    def op_dp4a(self, instr):
        kinds = instr.mods
        if len(kinds) != 2 or not set(kinds) <= {"u32", "s32"}:
            raise instr.unsupported()
        if id(instr) in self.inner_dots:            # computed where its chain ends
            return
        chain = self.dot_chains.get(id(instr), [instr])
        varying = not self.uniform(*(o for i in chain for o in i.operands[1:]))
        if self.chains_dots and kinds == ("s32", "s32") and varying:
            return self.put(instr.operands[0], "i32", WARP, self._dot_chain(chain))
        for link in chain:
            self.lift(link, "i32", [(o, "i32") for o in link.operands[1:]],
                      lambda w, a, b, c: self.dot4(w, kinds[0] == "s32", kinds[1] == "s32", a, b, c))

    def dot4(self, w, signed_a, signed_b, a, b, c):
        """c + sum over the 4 bytes of a * b."""
        if self.vnni and w == WARP and signed_a != signed_b:
            return self.dpbusd(WARP, c, *((b, a) if signed_a else (a, b)))
        if self.avx2 and w == WARP:
            return self._dot4_of_halves(signed_a, signed_b, a, b, c)
        for i in range(4):
            x, y = (self._element(w, v, 8, i, signed) for v, signed in ((a, signed_a), (b, signed_b)))
            c = self.op("add", "i32", w, c, self.op("mul", "i32", w, x, y))
        return c

    def find_dot_chains(self, instrs):
        """Finds chains in a block: signed dp4a, each the only reader of the sum before it. Sets dot_chains (last of
        a chain -> all of it) and inner_dots."""
        dots = {i.operands[0].name: i for i in instrs if i.name == "dp4a" and i.mods == ("s32", "s32")}
        self.dot_chains, self.inner_dots = {}, set()
        places, written = {id(i): place for place, i in enumerate(instrs)}, {}
        for place, instr in enumerate(instrs):
            for register in instr.written:
                written.setdefault(register, []).append(place)

        def waits(instr, end):
            """Whether `instr` may be computed at the place of `end` instead: no other instruction reads its sum, and
            its operands still have their values there."""
            name, start = instr.operands[0].name, places[id(instr)]
            return start < end and self.n_uses[name] == self.n_definitions[name] == 1 and not any(
                start <= place < end for o in instr.operands[1:] if isinstance(o, Reg)
                for place in written.get(o.name, ()))

        for instr in dots.values():
            before = dots.get(getattr(instr.operands[3], "name", None))
            chain = self.dot_chains.get(id(before), [before]) if before else []
            if before and self.chains_dots and len(chain) < _LONGEST and id(before) not in self.inner_dots \
                    and all(waits(i, places[id(instr)]) for i in chain):
                self.inner_dots.add(id(before))
                self.dot_chains.pop(id(before), None)
                self.dot_chains[id(instr)] = [*chain, instr]
        self._plan_dots()

    def _plan_dots(self):
        """Decides two things. swap_dots: there are fewer first operands than second ones. sort_dots: it is cheaper
        to sort words by lane. Sorting takes shuffles for each operand, and `_sum_fours` takes instructions for each
        pair: with VNNI 8 and 9 for 4 words of 16 lanes, with AVX2 16 and 8 for those of 8 lanes."""
        chains = [chain for chain in self.dot_chains.values() if len(chain) >= 4]
        firsts, seconds = (len({chain[0].operands[i] for chain in chains}) for i in (1, 2))
        self.swap_dots = firsts < seconds
        sort, sum_fours = (8, 9) if self.vnni else (16, 8)
        self.sort_dots = sum_fours * len(chains) > sort * (firsts + seconds)

    def _dot_chain(self, chain):
        """The value that a chain starts with plus the sum of all its dot products."""
        start = chain[0].operands[3]
        quads, pairs = self._quads([self._cheaper_first(*instr.operands[1:3]) for instr in chain])
        if not self.vnni:
            return self._chain_of_halves(start, quads, pairs)
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

    def _cheaper_first(self, a, b):
        """The operands of a dot product in the order in which `_multiply_add` and `_sums_of_halves` take them. A
        second operand needs more instructions, once for all chains, so the operands of which there are fewer go
        second. A uniform operand goes first: then the other one may stay in memory."""
        swap = self.uniform(b) or self.swap_dots and not self.uniform(a)
        return (b, a) if swap else (a, b)

    def _multiply_add(self, n, total, pairs):
        """total + the dot products of the bytes of pairs of vectors (a, b), of n words. The CPU multiplies unsigned
        by signed bytes, so it is given a + 128, and 128 * sum(b) is subtracted. That sum is the same for all chains
        with these b, and computed once."""
        correction, flip = const("i32", n, 0), const("i32", n, 0x80808080)
        for _, b in pairs:
            correction = self.dpbusd(n, correction, flip, b)
        total = self.op("sub", "i32", n, total, correction)
        for a, b in pairs:
            total = self.dpbusd(n, total, self.op("xor", "i32", n, a, flip), b)
        return total

    def _quads(self, pairs):
        """(quads, the other pairs). A quad multiplies all 4 words of two 16-byte loads, in the order in which they
        were loaded."""
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

    def note_quad(self, registers, whole):
        """Remembers that the registers of a 16-byte load are every fourth word of `whole`."""
        for i, register in enumerate(registers):
            self.quads[register.name] = (whole, i)

    def _every_fourth(self, operand):
        """4 words per lane, side by side: the first is this uniform operand, the others are 0."""
        first = self.let(f"insertelement <4 x i32> zeroinitializer, i32 {self.scalar(operand, 'i32')}, i64 0")
        return self.shuffle("i32", 4, first, [i % 4 for i in range(4 * WARP)])

    def _sum_fours(self, words):
        """The sums over the 4 words of each lane, which lie side by side. For few chains this is cheaper than
        sorting words by lane. The first step stays within the quarters of a CPU's registers, the second one puts the
        lanes in order."""
        quarters = [32 * (i // 16) + 16 * (i // 2 % 2) + 4 * (i // 4 % 4) + i % 2 * 2
                    for i in range(2 * WARP)]
        in_order = [16 * (lane // 8) + 4 * (lane % 4) + 2 * (lane % 8 // 4) for lane in range(WARP)]
        for length, places in ((4 * WARP, quarters), (2 * WARP, in_order)):
            first, second = (self.shuffle("i32", length, words, [i + odd for i in places]) for odd in (0, 1))
            words = self.op("add", "i32", length // 2, first, second)
        return words

    def dpbusd(self, n, c, a, b):
        """c + dot products of unsigned bytes of a and signed bytes of b, on n words: 16 at a time."""
        parts = []
        for start in range(0, n, 16):
            x = [v if "splat" in v else self.shuffle("i32", n, v, range(start, start + 16))
                 for v in (c, a, b)]
            x = [x[0]] + [self.let(f"bitcast <16 x i32> {v} to <64 x i8>") for v in x[1:]]
            parts.append(self.call("llvm.x86.avx512.vpdpbusd.512", "<16 x i32>", ("<16 x i32>", x[0]),
                                   ("<64 x i8>", x[1]), ("<64 x i8>", x[2])))
        return self.concatenate("i32", 16, parts)

    # ---- with AVX2 ----

    def _chain_of_halves(self, start, quads, pairs):
        """The value that a chain starts with plus the sum of all its dot products, for 8 lanes at a time: of quads
        the 4 words of each lane lie side by side, in 4 registers."""
        pairs = [tuple(self.vector(o, "i32") for o in pair) for pair in pairs]
        sums = []
        for lane in range(0, WARP, _HALVES):
            total = None
            if quads:
                total = self._sum_fours_of_halves([self._sums_of_halves(4 * WARP, first, quads)
                                                   for first in range(4 * lane, 4 * lane + 4 * _HALVES, _HALVES)])
            if pairs:
                total = self._sums_of_halves(WARP, lane, pairs, total)
            sums.append(self.op("ashr", "i32", _HALVES, total, const("i32", _HALVES, 8)))
        return self.op("add", "i32", WARP, self.concatenate("i32", _HALVES, sums), self.vector(start, "i32"))

    def _sums_of_halves(self, n, first, pairs, total=None):
        """256 times the dot products of the signed bytes of pairs of vectors (a, b), of n words: those of 8 words from
        `first` on. The CPU multiplies 16-bit numbers. A byte of a in the upper half of such a number is 256 times the
        byte; bytes of b are extended."""
        for a, b in pairs:
            a, b = (self._words(n, first, v) for v in (a, b))
            for x, y in zip(self._upper_halves(a), self._extended(b, True)):
                total = self._madd(x, y, total)
        return total

    def _words(self, n, first, value):
        """8 words of a vector of n, from `first` on, as 16-bit numbers."""
        if "splat" not in value:
            value = self.shuffle("i32", n, value, range(first, first + _HALVES))
        return self.let(f"bitcast <8 x i32> {value} to <16 x i16>")

    def _upper_halves(self, value):
        """(even bytes, odd bytes) of 16-bit numbers, each times 256."""
        return (self.op("shl", "i16", 16, value, const("i16", 16, 8)),
                self.op("and", "i16", 16, value, const("i16", 16, 0xFF00)))

    def _extended(self, value, signed):
        """(even bytes, odd bytes) of 16-bit numbers. Signed bytes are multiplied by 1 and their neighbours by 0: that
        takes the CPU's multipliers, which have more time here than its shifters."""
        if not signed:
            return (self.op("and", "i16", 16, value, const("i16", 16, 0xFF)),
                    self.op("lshr", "i16", 16, value, const("i16", 16, 8)))
        value = self.let(f"bitcast <16 x i16> {value} to <32 x i8>")
        ones = [vector_const("i8", [int(i % 2 == odd) for i in range(32)]) for odd in (0, 1)]
        return [self.call("llvm.x86.avx2.pmadd.ub.sw", "<16 x i16>", ("<32 x i8>", one), ("<32 x i8>", value))
                for one in ones]

    def _madd(self, x, y, total):
        """total + the sums of two neighbouring products of 16-bit numbers; total None is 0."""
        sums = self.call("llvm.x86.avx2.pmadd.wd", "<8 x i32>", ("<16 x i16>", x), ("<16 x i16>", y))
        return self.op("add", "i32", _HALVES, total, sums) if total else sums

    def _sum_fours_of_halves(self, words):
        """The sums over the 4 words of each of 8 lanes, which lie side by side in 4 vectors. The shuffles stay within
        the halves of the CPU's registers, and bring no neighbours together: LLVM would write sums of neighbours as
        `vphaddd`, which takes longer. At the end the lanes are put in order."""
        pairs = [self._sum_of_shuffles(*two, [0, 8, 1, 9], [2, 10, 3, 11]) for two in zip(words[::2], words[1::2])]
        return self.shuffle("i32", _HALVES, self._sum_of_shuffles(*pairs, [0, 1, 8, 9], [2, 3, 10, 11]),
                            [0, 4, 1, 5, 2, 6, 3, 7])

    def _sum_of_shuffles(self, a, b, *places):
        """The sum of two shuffles of the vectors a and b, the same in both halves of 4 words."""
        first, second = (self.shuffle("i32", _HALVES, a, [half + i for half in (0, 4) for i in four], b)
                         for four in places)
        return self.op("add", "i32", _HALVES, first, second)

    def _dot4_of_halves(self, signed_a, signed_b, a, b, c):
        """c + sum over the 4 bytes of a * b, of either sign, on all lanes."""
        sums = []
        for lane in range(0, WARP, _HALVES):
            total = None
            for x, y in zip(*(self._extended(self._words(WARP, lane, v), signed)
                              for v, signed in ((a, signed_a), (b, signed_b)))):
                total = self._madd(x, y, total)
            sums.append(total)
        return self.op("add", "i32", WARP, self.concatenate("i32", _HALVES, sums), c)

    # ---- one byte after the other ----

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
