"""Products of small matrices whose elements lie spread over the lanes of a warp: mma, and ldmatrix, which spreads them.

Which lane holds which elements: kernels/intrinsics.py. A product of int8 is exact. A card adds products of halves in an
order and with a rounding of its own. So the emulated card accepts only what is exact in any order, and stops the kernel
elsewhere: the factors and what they are added to are integers, and the magnitudes that make up a sum add up to less
than 2**24.
"""

from .dots import Dots
from .emit import WARP, const, vector_const

# Form of an mma of int8 -> (blocks of 8 rows, blocks of 16 bytes of k).
_BYTES = {"m16n8k32": (2, 2), "m16n8k16": (2, 1), "m8n8k16": (1, 1)}
_EXACT = "1.6777216e+07"


class Tensor(Dots):
    """mma and ldmatrix."""

    def op_ldmatrix(self, instr):
        if instr.mods != ("sync", "aligned", "m8n8", "x4", "shared", "b16") or len(instr.operands[0].items) != 4:
            raise instr.unsupported()
        registers, place = instr.operands[0].items, instr.operands[1]
        self._need_all_lanes()
        self.note_access(instr, place, 16)
        rows = self.vector(place.base, "i64")
        rows = self.op("add", "i64", WARP, rows, const("i64", WARP, place.offset)) if place.offset else rows
        words = vector_const("i64", [lane % 4 * 4 for lane in range(WARP)])
        for i, register in enumerate(registers):
            own = self.shuffle("i64", WARP, rows, [8 * i + lane // 4 for lane in range(WARP)])
            pointers = self.pointer(WARP, self.op("add", "i64", WARP, own, words))
            self.put(register, "i32", WARP, self.gather("i32", 4, pointers))

    def op_mma(self, instr):
        how, shape, kinds = instr.mods[:2] + instr.mods[3:5], instr.mods[2], instr.mods[5:]
        if how != ("sync", "aligned", "row", "col"):
            raise instr.unsupported()
        if shape in _BYTES and kinds == ("s32", "s8", "s8", "s32"):
            t, n_words, product = "i32", self._words_of(*_BYTES[shape]), self._product_of_bytes(*_BYTES[shape])
        elif (shape, kinds) == ("m8n8k4", ("f32", "f16", "f16", "f32")):
            t, n_words, product = "float", (8, 2, 2, 8), self._product_of_halves
        else:
            raise instr.unsupported()
        packs = [pack.items for pack in instr.operands]
        if tuple(map(len, packs)) != n_words:
            raise instr.unsupported("another number of registers")
        kinds = [t if pack is packs[3] else "i32" for pack in packs[1:] for _ in pack]
        operands = [o for pack in packs[1:] for o in pack]
        whole, lanes = [f"<{WARP} x {t}>"] * n_words[0] + ["i1"], f"<{WARP} x i32>"
        result = f"{{ {', '.join(whole)} }}"
        arguments = [(f"<{WARP} x {kind}>" if kind != "i32" else lanes, self.vector(o, kind))
                     for o, kind in zip(operands, kinds)]
        made = self.outlined(".".join([instr.name, *instr.mods]), result,
                             lambda *values: self._struct(result, whole, product(*values)), *arguments)
        *numbers, exact = (self.let(f"extractvalue {result} {made}, {i}") for i in range(len(whole)))
        self._need_all_lanes()
        self._go_on_if(exact)
        for register, value in zip(packs[0], numbers):
            self.put(register, t, WARP, value)

    def _words_of(self, rows, depth):
        """Registers of the result, of a, of b and of c."""
        return 2 * rows, rows * depth, depth, 2 * rows

    def _struct(self, result, kinds, values):
        made = "poison"
        for i, (kind, value) in enumerate(zip(kinds, values)):
            made = self.let(f"insertvalue {result} {made}, {kind} {value}, {i}")
        return made

    def _need_all_lanes(self):
        if self.mask is not None:
            self._go_on_if(self.compare("eq", "i32", 1, self.mask, "-1"))

    def _go_on_if(self, right):
        """Stops the kernel unless `right`."""
        self.n += 1
        tag = f"tensor{self.n}"
        self.do(f"br i1 {right}, label %{tag}.on, label %{tag}.stop")
        self.label(f"{tag}.stop")
        self.do("ret i32 -1")
        self.label(f"{tag}.on")

    def _product_of_bytes(self, rows, depth):
        """A function of the vectors of a, b and c: the sums, and true."""
        def product(*words):
            a, b, c = words[:rows * depth], words[rows * depth:(rows + 1) * depth], words[(rows + 1) * depth:]
            fours = [(h, t) for h in range(depth) for t in range(4)]     # of bytes in k
            left = {(i, h, t): self._spread_rows(a[i + rows * h], t) for i in range(rows) for h, t in fours}
            right = {(j, h, t): self._spread_columns(b[h], t, j) for j in range(2) for h, t in fours}
            sums = [self._add_dots(c[2 * i + j], [(left[i, *four], right[j, *four]) for four in fours])
                    for i in range(rows) for j in range(2)]
            return *sums, "true"
        return product

    def _spread_rows(self, words, t):
        """To each lane the word of lane t among the four of its own row."""
        return self.shuffle("i32", WARP, words, [lane // 4 * 4 + t for lane in range(WARP)])

    def _spread_columns(self, words, t, j):
        """To each lane the word of lane t among the four of its column j."""
        return self.shuffle("i32", WARP, words, [lane % 4 * 8 + 4 * j + t for lane in range(WARP)])

    def _add_dots(self, total, pairs):
        """total + the dot products of the signed bytes of pairs of words."""
        if self.vnni:
            return self._multiply_add(WARP, total, pairs)
        for a, b in pairs:
            total = self.dot4(WARP, True, True, a, b, total)
        return total

    def _product_of_halves(self, *words):
        """The sums in increasing order of k, and whether they are exact in any order."""
        a, b = ([self._element_of_half(word, i) for word in pair for i in range(2)] for pair in (words[:2], words[2:4]))
        c, exact, sums = words[4:], "splat (i1 true)", []
        for value in (*a, *b, *c):
            whole = self.compare("oeq", "float", WARP, value, self.intrinsic("rint", "float", WARP, value))
            exact = self.op("and", "i1", WARP, exact, whole)
        for i, total in enumerate(c):
            rows = [lane % 16 // 4 * 4 + lane % 2 + i // 2 % 2 * 2 + lane // 16 * 16 for lane in range(WARP)]
            columns = [lane % 16 // 4 * 4 + lane // 2 % 2 * 2 + i % 2 + i // 4 * 16 for lane in range(WARP)]
            size = self.intrinsic("fabs", "float", WARP, total)
            for x, y in zip(a, b):
                product = self.op("fmul", "float", WARP, self.shuffle("float", WARP, x, rows),
                                  self.shuffle("float", WARP, y, columns))
                total = self.op("fadd", "float", WARP, total, product)
                size = self.op("fadd", "float", WARP, size, self.intrinsic("fabs", "float", WARP, product))
            fits = self.compare("olt", "float", WARP, size, self.splat("float", _EXACT))
            exact = self.op("and", "i1", WARP, exact, fits)
            sums.append(total)
        every = self.compare("eq", "i32", 1, self.mask_bits(exact), "-1")
        return *sums, every

    def _element_of_half(self, word, i):
        """Element i of half2 words, as float32."""
        word = self.op("lshr", "i32", WARP, word, const("i32", WARP, 16)) if i else word
        bits = self.cast("trunc", "i32", "i16", WARP, word)
        return self.cast("fpext", "half", "float", WARP, self.cast("bitcast", "i16", "half", WARP, bits))
