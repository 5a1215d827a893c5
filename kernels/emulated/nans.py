"""Which values must have the card's NaN.

The card's arithmetic makes one NaN only, 0x7FFFFFFF in float32 and 0x7FFF in halves; the processor makes
others, and hands on those that it is given. Inside arithmetic this makes no difference. So results are corrected
where their bits become visible: where they are stored, read as integers and so on. Only results are corrected, because
a copy of a NaN keeps its bits. A copy shows nothing if arithmetic alone reads it, whatever else its register holds:
examples are a sum in a loop that begins with loaded numbers, and the halves of a word that become float32. A float64
NaN keeps its bits on the card too, and a new one is the processor's. Not corrected: a NaN computed into a register that
is also loaded or moved from memory (a sum that goes on from y[i]), and one that an atomic addition leaves in memory:
these may have the processor's bits.
"""

from .ptx import SIZES, Imm, Pack, Pair, Reg, registers_of

KINDS = ("f32", "f16", "f16x2")
_ARITHMETIC = {"add", "sub", "mul", "fma", "mad", "div", "rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos",
               "tanh", "min", "max", "neg", "abs"}
_COMPARISONS = {"setp", "set", "testp"}
_READERS = _ARITHMETIC | _COMPARISONS | {"cvt"}
_COPIES = {"mov": slice(1, None), "selp": slice(1, 3), "shfl": slice(1, 2)}


def _computes(instr):
    """The type of float that an instruction computes; None if it does not."""
    mods = ("", "", *instr.mods)
    return mods[-2] if instr.name == "cvt" else mods[-1] if instr.name in _ARITHMETIC else None


def _understands(instr):
    """The type of float as which an instruction reads its operands; None if it does not."""
    return ("", *instr.mods)[-1] if instr.name in _READERS else None


def _copied(instr):
    """The operands of which a result is a copy; `shfl` copies from another lane."""
    return instr.operands[_COPIES[instr.name]] if instr.name in _COPIES else ()


def _copies(instr, kind):
    """(registers, their type) that an instruction makes copies of operands of this type: one register, or two halves.
    None if it does something else."""
    target = instr.operands[0] if instr.operands else None
    target = target.first if isinstance(target, Pair) else target
    if _copied(instr) and isinstance(target, Reg):
        return {target.name}, kind
    if _copied(instr) and isinstance(target, Pack) and kind == "f16x2":
        return set(registers_of(target)), "f16"
    return None


class Results:
    """Registers of a function, for each type of float.

    of      they hold only results of float arithmetic, or copies of such results
    shown   their bits are visible: others than float arithmetic of this type read them, or copies of them
    """

    def __init__(self, instrs, types):
        self.shown = {}
        for kind in KINDS:                          # f16 comes before f16x2, whose halves it is
            self._find_shown(instrs, kind)
        written = [(r, i) for i in instrs for r in i.written]
        self.of = {}
        for kind in KINDS:
            names = {r for r, t in types.items() if SIZES[t] == SIZES[kind]}
            while unfit := {r for r, i in written if r in names and not self._fits(i, kind, names)}:
                names -= unfit
            self.of[kind] = names & {r for r, _ in written}

    def _fits(self, instr, kind, names):
        """Whether an instruction writes a result of this kind, given that the registers `names` hold such results."""
        copied = _copied(instr)
        if not copied:
            return _computes(instr) == kind
        return all(isinstance(o, Reg) and o.name in names or isinstance(o, Imm) and not _is_nan(o, kind)
                   for o in copied)

    def _find_shown(self, instrs, kind):
        shown, copies = self.shown.setdefault(kind, set()), []
        for instr in instrs:
            if _understands(instr) != kind:
                copied = {o.name for o in _copied(instr) if isinstance(o, Reg)} if _copies(instr, kind) else set()
                shown.update(r for r in instr.reads if r not in copied)
                copies += [(r, *_copies(instr, kind)) for r in copied]
        while more := {r for r, targets, of in copies if targets & self.shown[of]} - shown:
            shown |= more

    def leaving(self, instr):
        """The registers with such results whose bits become visible in an instruction: name -> type."""
        found, understood = {}, _understands(instr)
        mentioned = [r for o in instr.operands for r in registers_of(o)]
        for kind, names in self.of.items():
            targets, of = _copies(instr, kind) or (set(), kind)
            stays = targets and (targets <= self.of[of] or not targets & self.shown[of])
            if not stays and understood != kind:
                found |= {r: kind for r in mentioned if r in names}
        return found


def _is_nan(number, kind):
    """Whether an immediate may be a NaN."""
    return kind != "f32" or number.value & 0x7FFFFFFF > 0x7F800000
