"""What each register looks like across the 32 lanes of a warp.

    uniform     one value, kept as a scalar
    pattern     a scalar plus a constant per lane: tid.x is 32 * warp + (0, 1, ..., 31); kept as the scalar
    loose       a 64-bit pattern that is right unless a 32-bit sum behind it wrapped around; kept both as the
                scalar, which only addresses use (an index that wraps is 2**32 elements away, outside any
                array), and as a vector
    varying     a vector of 32 values

Found by iterating over the instructions until nothing changes, from the most favourable assumption. A
register with several definitions (a loop variable) is the join of them; one that divergent control flow
divides is varying.
"""

from dataclasses import dataclass, replace

from .ptx import SIZES, Imm, Mem, Pack, Pair, Reg, Symbol, registers_of

WARP = 32
FLAT = (0,) * WARP
_SPREAD = 1 << 24                                   # patterns wider than this are no addresses


@dataclass(frozen=True)
class Shape:
    """What the lanes of a register hold: scalar + pattern[lane], modulo 2**bits. A pattern None means varying.

    const: the scalar, where it is known. tz: the scalar is a multiple of 2**tz. bound: the values of all lanes,
    unsigned, are below it.
    """
    pattern: tuple | None = FLAT
    exact: bool = True
    const: int | None = None
    tz: int = 0
    bound: int | None = None

    @property
    def varying(self):
        return self.pattern is None

    @property
    def uniform(self):
        return self.pattern == FLAT

    @property
    def disjoint(self):
        """The pattern fits in the bits that the scalar leaves zero, so scalar + pattern = scalar |
        pattern."""
        return self.pattern is not None and min(self.pattern) >= 0 and max(self.pattern) < 1 << self.tz


UNIFORM, VARYING = Shape(), Shape(None)


def constant(value, bits=64):
    value %= 1 << bits
    return Shape(const=value, tz=(value & -value).bit_length() - 1 if value else 64, bound=value + 1)


def patterned(pattern, **rest):
    """A shape with this pattern, or varying if the pattern is too wide."""
    if max(pattern) - min(pattern) >= _SPREAD or max(map(abs, pattern)) >= _SPREAD * 64:
        return VARYING
    return Shape(tuple(pattern), **rest)


def join(a, b):
    if a is None or b is None:
        return a or b
    if a.pattern != b.pattern or a.varying:
        return VARYING
    return Shape(a.pattern, a.exact and b.exact, a.const if a.const == b.const else None, min(a.tz, b.tz),
                 None if a.bound is None or b.bound is None else max(a.bound, b.bound))


def _limit(bound, bits):
    return bound if bound is not None and bound <= 1 << bits else None


def add(a, b, bits, sign=1):
    if a.varying or b.varying:
        return VARYING
    const = None if a.const is None or b.const is None else (a.const + sign * b.const) % (1 << bits)
    if const is not None and a.uniform and b.uniform:
        return constant(const, bits)
    bound = None if a.bound is None or b.bound is None or sign < 0 else _limit(a.bound + b.bound - 1, bits)
    return patterned([x + sign * y for x, y in zip(a.pattern, b.pattern)], exact=a.exact and b.exact,
                     const=const,
                     tz=min(a.tz, b.tz), bound=bound)


def multiply(a, b, bits):
    """The shape of a * b, modulo 2**bits."""
    if a.varying or b.varying:
        return VARYING
    if a.uniform and b.uniform:
        if a.const is not None and b.const is not None:
            return constant(a.const * b.const, bits)
        bound = None if a.bound is None or b.bound is None else \
            _limit((a.bound - 1) * (b.bound - 1) + 1, bits)
        return Shape(exact=a.exact and b.exact, tz=min(a.tz + b.tz, 64), bound=bound)
    if not b.uniform:
        a, b = b, a
    if b.const is None or not b.uniform:
        return VARYING
    factor = b.const - (1 << bits) if b.const >> (bits - 1) else b.const
    const = None if a.const is None else a.const * factor % (1 << bits)
    bound = None if a.bound is None or factor < 0 else _limit((a.bound - 1) * factor + 1, bits)
    return patterned([x * factor for x in a.pattern], exact=a.exact, const=const, tz=min(a.tz + b.tz, 64),
                     bound=bound)


def bitwise(name, a, b, bits):
    if a.varying or b.varying or not (a.exact and b.exact):
        return VARYING
    operate = {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}[name]
    if a.uniform and b.uniform:
        if a.const is not None and b.const is not None:
            return constant(operate(a.const, b.const), bits)
        if name == "and":
            bounds = [s.bound for s in (a, b) if s.bound is not None]
            if a.const is None:
                a, b = b, a
            if a.const is not None and b.bound is not None \
                    and a.const & (1 << (b.bound - 1).bit_length()) - 1 == 0:
                return constant(0)
            return Shape(tz=max(a.tz, b.tz), bound=min(bounds, default=None))
        return Shape(tz=min(a.tz, b.tz), bound=_or_bound(a, b))
    split = low_bits(a, b)
    if split is None:
        a, b = (a, b) if b.uniform else (b, a)
        return _masked(a, b.const, bits) if name == "and" and b.uniform else VARYING
    pattern = [operate(x, y) for x, y in zip(*split[1:])]
    low = (1 << split[0]) - 1
    highs = [None if s.const is None else s.const & ~low for s in (a, b)]
    if name == "and" and 0 in highs:
        return patterned(pattern, const=0, tz=64, bound=max(pattern) + 1)
    const = None if None in highs else operate(*highs)
    bounds = [s.bound for s in (a, b) if s.bound is not None]
    bound = min(bounds, default=None) if name == "and" else _or_bound(a, b)
    return patterned(pattern, const=const, tz=split[0], bound=bound)


def _masked(a, mask, bits):
    """a & mask where the mask keeps or clears the k lowest bits and the scalar is a multiple of 2**k, or where the
    scalar is known."""
    low = ((1 << bits) - mask if mask is not None and mask >> (bits - 1) else mask or 0)
    if mask and mask >> (bits - 1) and low & (low - 1) == 0 and low <= 1 << a.tz:
        return patterned([p & -low for p in a.pattern], const=a.const, tz=a.tz, bound=a.bound)
    if mask and mask & (mask + 1) == 0 and mask < 1 << a.tz:
        return patterned([p & mask for p in a.pattern], const=0, tz=64, bound=mask + 1)
    if mask and a.const is not None:
        scalar = a.const & mask
        return patterned([((a.const + p) % (1 << bits) & mask) - scalar for p in a.pattern], const=scalar,
                         tz=constant(scalar).tz, bound=mask + 1)
    return VARYING


def low_bits(a, b):
    """(k, low parts of a, of b) such that both scalars but for constants are multiples of 2**k and both
    patterns lie below 2**k; None if there is no such k. Then a bitwise operation acts on scalars and patterns
    separately."""
    k = min(64 if s.const is not None and s.uniform else s.tz for s in (a, b))
    parts = []
    for s in (a, b):
        if s.const is not None and s.uniform:
            parts.append([s.const & (1 << k) - 1] * WARP)
        elif s.disjoint and max(s.pattern) < 1 << k:
            parts.append(s.pattern)
        else:
            return None
    return k, *parts


def _or_bound(a, b):
    if a.bound is None or b.bound is None:
        return None
    return 1 << max(a.bound - 1, b.bound - 1).bit_length()


def shift_left(a, by, bits):
    if by.const is None or not by.uniform or by.const >= bits:
        return UNIFORM if a.uniform and by.uniform and a.exact else VARYING
    return multiply(a, constant(1 << by.const, bits + 1), bits) if by.const < bits - 1 else \
        (UNIFORM if a.uniform and a.exact else VARYING)


def shift_right(a, by, bits, signed):
    if not a.exact or a.varying or not by.uniform:
        return VARYING
    if by.const is None or not by.uniform or by.const >= bits:
        return UNIFORM if a.uniform else VARYING
    k = by.const
    positive = a.bound is not None and a.bound <= 1 << (bits - 1)
    if positive and a.bound <= 1 << k:
        return constant(0)
    if not a.uniform and not (a.disjoint and max(a.pattern) < 1 << (bits - signed)):    # a pattern of 16 bits may wrap
        return VARYING
    bound = ((a.bound - 1) >> k) + 1 if a.bound is not None and (positive or not signed) else None
    if a.const is not None and signed and a.const >> (bits - 1):
        return UNIFORM if a.uniform else VARYING
    return patterned([p >> k for p in a.pattern], const=None if a.const is None else a.const >> k,
                     tz=max(a.tz - k, 0), bound=bound)


def widen(a, source, target, signed):
    """Sign or zero extension from `source` to `target` bits."""
    if a.varying or not a.exact:
        return VARYING
    positive = a.bound is not None and a.bound <= 1 << (source - 1)
    if a.const is not None and a.uniform:
        value = a.const - (1 << source) if signed and a.const >> (source - 1) else a.const
        return constant(value, target)
    bound = a.bound if positive or not signed else None
    if a.uniform or a.disjoint and a.tz < source or positive and a.bound and _cannot_wrap(a):
        return replace(a, const=None if a.const is None or signed and a.const >> (source - 1) else a.const,
                       bound=bound)
    if source == 32 and target == 64:
        return replace(a, exact=False, const=None, bound=None)
    return VARYING


def _cannot_wrap(a):
    """Whether scalar + pattern cannot wrap around: all lanes are bounded, and the scalar is itself the value of some
    lane (its pattern is 0)."""
    return min(a.pattern) == 0


def narrow(a, bits):
    """The shape of the low `bits` of a value. It is exact even for a loose 64-bit shape when bits <= 32."""
    if a.varying:
        return VARYING
    if a.const is not None and a.uniform:
        return constant(a.const, bits)
    return replace(a, exact=True, const=None if a.const is None else a.const % (1 << bits),
                   bound=_limit(a.bound, bits))


def thread_index(axis, block):
    """The shape of %tid.<axis> for a block of (x, y, z) threads; varying where rows do not line up with
    warps."""
    stride = 1
    for n in block[:axis]:
        stride *= n
    n = block[axis]
    if n == 1:
        return constant(0)
    if stride % WARP == 0:
        return Shape(bound=n)                       # the same for a whole warp
    if WARP % (n * stride) == 0:
        return Shape(tuple(lane // stride % n for lane in range(WARP)), const=0, tz=64, bound=n)
    if WARP % stride == 0 and (n * stride) % WARP == 0:
        lanes = [lane // stride for lane in range(WARP)]
        return Shape(tuple(lanes), tz=(WARP // stride).bit_length() - 1, bound=n)
    if stride * n * (block[axis + 1] if axis < 2 else 1) * (block[2] if axis == 0 else 1) <= WARP:
        return Shape(tuple(lane // stride % n for lane in range(WARP)), const=0, tz=64, bound=n)
    return VARYING


def special(name, block):
    """The shape of a special register; None for another one."""
    if name.startswith("%tid."):
        return thread_index("xyz".index(name[-1]), block)
    if name.startswith("%ntid."):
        return constant(block["xyz".index(name[-1])])
    if name.startswith(("%ctaid.", "%nctaid.")):
        return Shape(bound=1 << 31 if name[-1] == "x" else 1 << 16)
    if name == "%laneid":
        return Shape(tuple(range(WARP)), const=0, tz=64, bound=WARP)
    if name.startswith("%lanemask"):
        return VARYING
    if name == "WARP_SZ":
        return constant(WARP)
    if name in ("%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid", "%clock", "%clock64", "%globaltimer",
                "%dynamic_smem_size", "%total_smem_size"):
        return UNIFORM
    return None


class Rule:
    """What an instruction's results are found by."""

    def __init__(self, lanes, instr):
        self.instr, self.compute = instr, getattr(lanes, "_" + instr.name, None)
        self.bits = 8 * SIZES.get(instr.mods[-1], 8) if instr.mods else 64
        self.before = None                          # the shapes of the operands at the last time
        self.operands = [self._source(lanes, o, self.bits if instr.name != "cvt" else 64) for o in instr.sources]

    @staticmethod
    def _source(lanes, operand, bits):
        """Of an operand its shape, if that never changes; the name of a register; else (operand, bits)."""
        operand = operand.base if isinstance(operand, Mem) else operand
        if isinstance(operand, (Imm, Symbol)):
            return lanes.of(operand, bits)
        if isinstance(operand, Reg):
            return special(operand.name, lanes.block) or operand.name
        return operand, bits

    def operand_shapes(self, lanes):
        shapes = lanes.shapes
        return [shapes.get(s) if type(s) is str else s if type(s) is Shape else lanes.of(*s) for s in self.operands]


class Lanes:
    """Shapes of all registers of a function, and the divergent branches (told to `flow`).

    divided: registers that need a masked write. scalar(r), vector(r): which of the two storages a register
    has.
    """

    def __init__(self, function, flow, block, symbols):
        self.types = function.registers
        self.flow, self.block, self.symbols = flow, block, symbols
        self.shapes, self.divided = {}, set()
        self.instrs = [i for b in flow.blocks for i in b.instrs]
        self.every = self.instrs + [b.end for b in flow.blocks if b.end]
        self.rules = [Rule(self, i) for i in self.instrs if i.written]
        written = {r for i in self.every for r in i.written}
        self.shapes |= {r: UNIFORM for i in self.every
                        for r in i.reads if r in self.types and r not in written}
        self._settle()
        self.needs_vector = self._vector_uses()

    # ---- the iteration ----

    def _settle(self):
        while True:
            self._iterate()
            new = [b for b in self.flow.blocks if b.end is not None and b.end.guard
                   and b.index not in self.flow.branches
                   and self.of(b.end.guard[0]).varying and b.targets[0] != b.targets[1]]
            if not new:
                return
            for b in new:
                self.divided |= self.flow.diverge(b.index)

    def _iterate(self):
        """Goes over the instructions until nothing changes. After a few rounds it drops bounds that still grow."""
        for r in self.divided:
            self.shapes[r] = VARYING
        changed, rounds = True, 0
        while changed:
            changed, rounds = False, rounds + 1
            for rule in self.rules:
                for r, shape in self._results(rule):
                    if r in self.divided:
                        continue
                    old = self.shapes.get(r)
                    new = join(old, shape)
                    if new != old:
                        if rounds > 4:
                            new = replace(new, bound=None, const=None)
                        changed |= new != old
                        self.shapes[r] = new

    def of(self, operand, bits=64):
        """The shape of an operand; None while nothing is known."""
        if isinstance(operand, Imm):
            return UNIFORM if operand.floating else constant(operand.value, bits)
        if isinstance(operand, Reg):
            return self.shapes.get(operand.name) or special(operand.name, self.block)
        if isinstance(operand, Symbol):
            return self.symbols.get(operand.name, UNIFORM)
        if isinstance(operand, Mem):
            return self.of(operand.base)
        shapes = [self.of(i, bits)
                  for i in (operand.items if isinstance(operand, Pack) else (operand.first, operand.second))]
        if None in shapes:
            return None
        return UNIFORM if all(s.uniform and s.exact for s in shapes) else VARYING

    def _results(self, rule):
        """[(register, shape)] that an instruction writes: [] while an operand is unknown, and where no operand has
        another shape than before, since to join the same results again changes nothing."""
        instr, shapes = rule.instr, rule.operand_shapes(self)
        if shapes == rule.before:
            return []
        rule.before = shapes
        if None in shapes:
            return []
        try:
            shape = rule.compute(instr, shapes, rule.bits) if rule.compute else None
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise instr.unsupported(f"{type(error).__name__}: {error}") from error
        if shape is None:
            same = all(s.uniform and s.exact for s in shapes)
            shape = UNIFORM if same and instr.name != "atom" else VARYING
        return [(r, self._fit(r, instr, shape)) for r in instr.written]

    def _fit(self, register, instr, shape):
        """A shape as a register can have it: only integer registers have patterns, and a pattern is dropped where it
        moves between registers of different widths."""
        integer = self.types.get(register, "pred")[0] in "bus" and "f" not in self.types[register]
        if integer or shape.uniform or shape.varying:
            return shape if integer or not shape.uniform else UNIFORM
        return VARYING

    # ---- rules: (instruction, operand shapes, bits) -> shape, or None for "uniform if all operands are" ----

    def _mov(self, instr, shapes, bits):
        if any(isinstance(o, Pack) for o in instr.operands[:2]) or instr.mods[0][0] == "f":
            return None
        source = instr.operands[1]
        if isinstance(source, Reg) and self.types.get(source.name, "u32")[0] == "f":
            return None
        return shapes[0]

    def _cvta(self, instr, shapes, bits):
        return shapes[0]

    def _integer(self, instr):
        return instr.mods[-1][0] in "bus"

    def _add(self, instr, shapes, bits):
        return add(*shapes, bits) if self._plain(instr) else None

    def _sub(self, instr, shapes, bits):
        return add(*shapes, bits, -1) if self._plain(instr) else None

    def _plain(self, instr):
        return self._integer(instr) and not {"cc", "sat"} & set(instr.mods)

    def _mul(self, instr, shapes, bits):
        if not self._integer(instr) or instr.mods[0] not in ("lo", "wide"):
            return None
        if instr.mods[0] == "lo":
            return multiply(*shapes, bits)
        wide = [widen(s, bits, 2 * bits, instr.mods[-1][0] == "s") for s in shapes]
        return multiply(*wide, 2 * bits)

    def _mad(self, instr, shapes, bits):
        if not self._plain(instr) or instr.mods[0] not in ("lo", "wide"):
            return None
        product = self._mul(instr, shapes[:2], bits)
        return add(product, shapes[2], bits if instr.mods[0] == "lo" else 2 * bits)

    def _and(self, instr, shapes, bits):
        return bitwise(instr.name, *shapes, bits) if instr.mods[0] != "pred" else None

    _or = _xor = _and

    def _shl(self, instr, shapes, bits):
        return shift_left(*shapes, bits)

    def _shr(self, instr, shapes, bits):
        return shift_right(*shapes, bits, instr.mods[0][0] == "s")

    def _cvt(self, instr, shapes, bits):
        target, source = instr.mods[-2:]
        if target[0] not in "us" or source[0] not in "us" or len(instr.mods) != 2:
            return None
        to, of = 8 * SIZES[target], 8 * SIZES[source]
        register = instr.operands[1].name if isinstance(instr.operands[1], Reg) else None
        if register and 8 * SIZES[self.types.get(register, source)] != of:
            return None                             # reads part of a register
        if 8 * SIZES[self.types[instr.operands[0].name]] != to:
            return None                             # fills more than it converts
        if to > of:
            return widen(shapes[0], of, to, source[0] == "s")
        return narrow(shapes[0], to) if to <= 32 or to == of else None

    def _ld(self, instr, shapes, bits):
        return UNIFORM if "param" in instr.mods or shapes[0].uniform else VARYING

    def _shfl(self, instr, shapes, bits):
        source = shapes[1]
        return UNIFORM if "idx" in instr.mods and source.uniform and shapes[2].const == 31 \
            or shapes[0].uniform and shapes[0].exact and not isinstance(instr.operands[0], Pair) else VARYING

    def _mma(self, instr, shapes, bits):
        return VARYING

    _ldmatrix = _mma

    def _vote(self, instr, shapes, bits):
        members = shapes[1]
        return UNIFORM if members.uniform and members.exact else VARYING

    def _activemask(self, instr, shapes, bits):
        return UNIFORM

    def _barrier_result(self, instr, shapes, bits):
        return UNIFORM

    # ---- storage ----

    def scalar(self, register):
        return not self.shapes.get(register, UNIFORM).varying

    def vector(self, register):
        return not self.scalar(register) or register in self.needs_vector

    def address_registers(self, instr):
        """Registers that an instruction uses only as scalar + pattern, if they are loose."""
        if instr.name in ("ld", "st", "atom", "red"):
            return [r for o in instr.operands if isinstance(o, Mem) and isinstance(o.base, Reg)
                    for r in [o.base.name]]
        return []

    def _vector_uses(self):
        """The loose registers whose vector is needed: instructions read them other than as an address, or compute
        from them a register whose vector is needed."""
        loose = {r for r, s in self.shapes.items() if not s.varying and not s.exact}
        needed, changed = set(), True
        while changed:
            changed = False
            for instr in self.instrs:
                used = (set(instr.reads) & loose) - needed
                if not used:
                    continue
                results = instr.written
                keeps = results and all(r in loose and r not in needed for r in results) \
                    or instr.name == "cvt" and all(self.shapes[r].exact and not self.shapes[r].varying
                                                   for r in results)
                if not keeps:
                    used -= set(self.address_registers(instr)) - {r for r in used if self._stored(instr, r)}
                    if used:
                        needed |= used
                        changed = True
        return needed

    def _stored(self, instr, register):
        return any(register in registers_of(o) for o in instr.operands if not isinstance(o, Mem))
