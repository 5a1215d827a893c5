"""Random kernels, each with an independent evaluation in NumPy, to be compared bit for bit on any card.

A seed gives a `Program`: statements over a few variables of four types (int32, uint32, float32, half2 words),
with nested loops and branches, uniform or not, trip counts that depend on data, break, continue and early
return, shared memory, barriers, shuffles and votes, global and local memory, atomics. The program is

    source()     the text of a @cuda.jit kernel
    expected()   evaluated by NumPy: every thread of the grid is one element of every vector, flow is masks

The two share the table of operations below (a template of source text beside a NumPy function), nothing else.
Seeds from RECORDED on also hold the operations of LATER_OPS and matches.
Only operations with one right answer occur: no approximate instructions; the bits of a NaN are made canonical
where they could be seen; threads exchange data through barriers and atomics that commute.

    python -m tests.emulated.random_kernels --card cuda:0 --seeds 0:300

runs the kernels on a card and prints how many agree, and a hash over all their outputs to compare cards by.
"""

import argparse
import hashlib
import linecache
import random
from dataclasses import dataclass, field
from math import prod
from typing import Callable

import numpy as np
from numba import cuda
from numba.cuda import libdevice
from numba.types import float32, int32, uint32

from kernels import intrinsics
from kernels.open import open_cards
from tests.emulated.arithmetic import (count_bits, dot_bytes, dot_words, float_word, fma, half2, half_fma,
                                       halves, larger, leading_zeros, permute_bytes, reverse_bits,
                                       round_to_odd_sum, to_int, towards)

TABLE = 1024                                # elements of each input array; a power of two
SLOTS = 24                                  # words of `out` per thread
SCATTER = 8                                 # words of `scatter` per thread, and of the local array
BINS = 16                                   # words of `sums`
N_PERMUTED = 4                              # arrays written at permuted indices
SHARED = 256                                # elements of a shared array: no block is larger
OUTPUTS = {"out": SLOTS, "scatter": SCATTER, "permuted": None, "sums": None}    # words per thread

DTYPE = {"i": np.int32, "u": np.uint32, "f": np.float32, "h": np.uint32, "b": np.bool_}
NUMBA = {"i": "int32", "u": "uint32", "f": "float32", "h": "uint32"}
RECORDED = 300                  # seeds below make the kernels of benchmarks/results.md; later ones hold more
VARIABLES = {"i": ("i0", "i1", "i2"), "u": ("u0", "u1", "u2"), "f": ("f0", "f1", "f2"), "h": ("h0", "h1")}


# ---- what the kernels call beside the intrinsics: NaN in one form ------------------------------------------

@cuda.jit(device=True)
def word_of(x):
    """The bits of a float32, those of any NaN as 0x7FC00000."""
    return intrinsics.float_as_word(x) if x == x else uint32(0x7FC00000)


@cuda.jit(device=True)
def canonical(w):
    """A half2 word with any NaN in it as 0x7E00."""
    low, high = uint32(w & uint32(0xFFFF)), uint32(w >> uint32(16))
    low = uint32(0x7E00) if uint32(low & uint32(0x7FFF)) > uint32(0x7C00) else low
    high = uint32(0x7E00) if uint32(high & uint32(0x7FFF)) > uint32(0x7C00) else high
    return uint32(low | uint32(high << uint32(16)))


@cuda.jit(device=True)
def fold4(words, index):
    """Four words from one 16-byte load, mixed into one."""
    a, b, c, d = intrinsics.load_words4(words, uint32(index * uint32(4)))
    return uint32(a ^ uint32(b + c) ^ uint32(d << uint32(1)))


GLOBALS = {"cuda": cuda, "libdevice": libdevice, "int32": int32, "uint32": uint32, "float32": float32,
           "word_of": word_of, "canonical": canonical, "fold4": fold4,
           **{name: getattr(intrinsics, name) for name in
              ("dp4a", "dp2a_lo", "dp2a_hi", "prmt", "hfma2", "hadd2", "hmul2", "pack_half2", "half2_low",
               "half2_high", "div_rn", "sqrt_rn", "round_to_int", "float_max", "float_min", "word_as_float")}}


# ---- operations --------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Op:
    """An operation: types of the result and the arguments, source text, value(machine, *arguments)."""
    result: str
    arguments: str
    text: str
    value: Callable


def _pure(function):
    return lambda machine, *arguments: function(*arguments)


OPS = []
for _t, _cast in (("i", "int32"), ("u", "uint32")):
    for _sign, _f in (("+", np.add), ("-", np.subtract), ("*", np.multiply), ("&", np.bitwise_and),
                      ("|", np.bitwise_or), ("^", np.bitwise_xor)):
        OPS.append(Op(_t, _t + _t, f"{_cast}({{}} {_sign} {{}})", _pure(_f)))
    OPS += [
        Op(_t, _t + "u", f"{_cast}({{}} << ({{}} & 31))", _pure(lambda a, b: a << (b & 31).astype(a.dtype))),
        Op(_t, _t + "u", f"{_cast}({{}} >> ({{}} & 31))", _pure(lambda a, b: a >> (b & 31).astype(a.dtype))),
        Op(_t, _t + _t, "min({}, {})", _pure(np.minimum)),
        Op(_t, _t + _t, "max({}, {})", _pure(np.maximum)),
        Op(_t, _t, f"{_cast}(~{{}})", _pure(np.invert)),
    ]
for _sign, _f in (("+", np.add), ("-", np.subtract), ("*", np.multiply)):
    OPS.append(Op("f", "ff", f"({{}} {_sign} {{}})", _pure(_f)))
for _t in "iuf":
    for _sign, _f in (("<", np.less), ("<=", np.less_equal), ("==", np.equal), ("!=", np.not_equal),
                      (">", np.greater)):
        OPS.append(Op("b", _t + _t, f"({{}} {_sign} {{}})", _pure(_f)))
for _t in "iufh":
    OPS.append(Op(_t, "b" + _t + _t, "({1} if {0} else {2})", _pure(np.where)))
OPS += [
    Op("b", "bb", "({} and {})", _pure(np.logical_and)),
    Op("b", "bb", "({} or {})", _pure(np.logical_or)),
    Op("b", "b", "(not {})", _pure(np.logical_not)),
    Op("i", "u", "int32({})", _pure(lambda a: a.view(np.int32))),
    Op("u", "i", "uint32({})", _pure(lambda a: a.view(np.uint32))),
    Op("u", "h", "{}", _pure(lambda a: a)),
    Op("h", "u", "canonical({})", _pure(lambda a: half2(halves(a)))),
    Op("u", "f", "word_of({})", _pure(float_word)),
    Op("f", "u", "word_as_float({})", _pure(lambda a: a.view(np.float32))),
    Op("f", "i", "float32({})", _pure(lambda a: a.astype(np.float32))),
    Op("f", "u", "float32({})", _pure(lambda a: a.astype(np.float32))),
    Op("i", "f", "round_to_int({})", _pure(to_int)),
    Op("f", "fff", "cuda.fma({}, {}, {})", _pure(fma)),
    Op("f", "ff", "div_rn({}, {})", _pure(np.divide)),
    Op("f", "f", "sqrt_rn({})", _pure(np.sqrt)),
    Op("f", "ff", "float_max({}, {})", _pure(larger)),
    Op("f", "ff", "float_min({}, {})", _pure(lambda a, b: -larger(-a, -b))),
    Op("f", "f", "(-{})", _pure(np.negative)),
    Op("f", "f", "abs({})", _pure(np.abs)),
    Op("h", "hhh", "canonical(hfma2({}, {}, {}))", _pure(half_fma)),
    Op("h", "hh", "canonical(hadd2({}, {}))", _pure(lambda a, b: half2(halves(a) + halves(b)))),
    Op("h", "hh", "canonical(hmul2({}, {}))", _pure(lambda a, b: half2(halves(a) * halves(b)))),
    Op("h", "ff", "canonical(pack_half2({}, {}))",
       _pure(lambda a, b: half2(np.stack([a, b], 1).astype(np.float16)))),
    Op("f", "h", "half2_low({})", _pure(lambda a: halves(a)[:, 0].astype(np.float32))),
    Op("f", "h", "half2_high({})", _pure(lambda a: halves(a)[:, 1].astype(np.float32))),
    Op("i", "uui", "dp4a({}, {}, {})", _pure(dot_bytes)),
    Op("i", "uui", "dp2a_lo({}, {}, {})", _pure(lambda a, b, c: dot_words(a, b, c, 0))),
    Op("i", "uui", "dp2a_hi({}, {}, {})", _pure(lambda a, b, c: dot_words(a, b, c, 2))),
    Op("u", "uuu", "prmt({}, {}, {})", _pure(permute_bytes)),
    Op("u", "u", "uint32(cuda.popc({}))", _pure(count_bits)),
    Op("u", "u", "uint32(cuda.clz({}))", _pure(leading_zeros)),
    Op("u", "u", "uint32(cuda.brev({}))", _pure(reverse_bits)),
    Op("u", "u", "uint32({} // 7)", _pure(lambda a: a // np.uint32(7))),
    Op("u", "u", "uint32({} % 100)", _pure(lambda a: a % np.uint32(100))),
    # Memory. Every index is in range whatever its argument.
    Op("u", "u", f"words[uint32({{}} & {TABLE - 1})]", lambda m, a: m.words[a & (TABLE - 1)]),
    Op("f", "u", f"floats[uint32({{}} & {TABLE - 1})]", lambda m, a: m.floats[a & (TABLE - 1)]),
    Op("i", "u", f"int32(bytes_[uint32({{}} & {TABLE - 1})])",
       lambda m, a: m.bytes[a & (TABLE - 1)].astype(np.int32)),
    Op("u", "u", f"fold4(words, uint32({{}} & {TABLE // 4 - 1}))",
       lambda m, a: m.fold4(a & (TABLE // 4 - 1))),
    Op("u", "u", f"scatter[uint32(gid * {SCATTER} + ({{}} & {SCATTER - 1}))]",
       lambda m, a: m.scatter[m.gid * SCATTER + (a & (SCATTER - 1))]),
    Op("u", "u", f"local[uint32({{}} & {SCATTER - 1})]", lambda m, a: m.local[m.gid, a & (SCATTER - 1)]),
]
LATER_OPS = [
    Op("f", "ff", "libdevice.fadd_rz({}, {})",
       _pure(lambda a, b: towards(0, round_to_odd_sum(a.astype(np.float64), b.astype(np.float64))))),
    Op("f", "ff", "libdevice.fmul_ru({}, {})", _pure(lambda a, b: towards(np.inf, a.astype(np.float64) * b))),
    Op("f", "fff", "libdevice.fmaf_rz({}, {}, {})",
       _pure(lambda a, b, c: towards(0, round_to_odd_sum(a.astype(np.float64) * b, c.astype(np.float64))))),
    Op("i", "f", "libdevice.float2int_rz({})", _pure(lambda a: to_int(np.trunc(a)))),
    Op("f", "u", "libdevice.uint2float_rd({})", _pure(lambda a: towards(-np.inf, a.astype(np.float64)))),
    Op("i", "iii", "int32(libdevice.sad({}, {}, {}))",
       _pure(lambda a, b, c: (np.maximum(a, b) - np.minimum(a, b)) + c)),
    Op("i", "ii", "int32(libdevice.mulhi({}, {}))",
       _pure(lambda a, b: (a.astype(np.int64) * b >> 32).astype(np.int32))),
]
OPS_OF, LATER_OPS_OF = ({t: [op for op in ops if op.result == t] for t in "iufhb"} for ops in (OPS, OPS + LATER_OPS))

# At the lanes' own place: these are proved to be contiguous by a translator that is clever.
LEAVES = {
    "u": [("tid", lambda m: m.tid), ("bid", lambda m: m.bid), ("gid", lambda m: m.gid),
          ("lane", lambda m: m.lane),
          ("p0", lambda m: m.uniform(0)), ("p1", lambda m: m.uniform(1)),
          ("words[gid]", lambda m: m.words[m.gid]),
          ("words[uint32(gid + p0)]", lambda m: m.words[m.gid + m.uniform(0)])],
    "f": [("floats[gid]", lambda m: m.floats[m.gid]), ("floats[uint32(gid * 2 & 1023)]",
                                                       lambda m: m.floats[m.gid * 2 & 1023])],
    "i": [("int32(bytes_[gid])", lambda m: m.bytes[m.gid].astype(np.int32)),
          ("int32(tid)", lambda m: m.tid.view(np.int32))],
    "h": [("canonical(words[uint32(gid + 1)])", lambda m: half2(halves(m.words[m.gid + 1])))],
}

EDGES = {
    "i": [0, 1, -1, 2, 7, -128, 127, 255, 32768, 2**31 - 1, -2**31, 0x4B400000],
    "u": [0, 1, 2, 3, 31, 32, 255, 0x80808080, 0x7F7F7F7F, 2**31, 2**32 - 1, 0x3210, 0x7654, 0x4B400000],
    "f": [0.0, 1.0, -1.0, 0.5, 1.5, 3.0, 12582912.0, 65504.0, 1e-40, 1e-45, 3e38, -2.5, 0.1, 1 / 3, 2.0**-24],
    "h": [0x00000000, 0x3C003C00, 0x80000001, 0x7BFF0400, 0xBC003555, 0x7C00FC00],
}


# ---- expressions: (text, value), built from the leaves up --------------------------------------------------

@dataclass(frozen=True)
class Expr:
    """Source text, and a function from the machine to the vector of values."""
    text: str
    value: Callable


def variable(name):
    return Expr(name, lambda m: m.values[name])


def constant(kind, number):
    dtype = DTYPE[kind]
    exact = dtype(number)
    text = repr(float(exact)) if kind == "f" else str(int(exact))
    return Expr(f"{NUMBA[kind]}({text})", lambda m: np.full(m.n, exact))


TRUE = Expr("True", lambda m: np.full(m.n, True))


def apply(op, arguments):
    return Expr(op.text.format(*[a.text for a in arguments]),
                lambda m: np.asarray(op.value(m, *[a.value(m) for a in arguments]), DTYPE[op.result]))


# ---- statements: text by lines, and `run(machine, mask)` -> mask of the threads that go on -----------------

def indented(body):
    return ["    " + line for statement in body for line in statement.lines()] or ["    pass"]


def run_all(body, machine, mask):
    for statement in body:
        if not mask.any():
            return mask
        mask = statement.run(machine, mask)
    return mask


@dataclass
class Assign:
    name: str
    expr: Expr

    def lines(self):
        return [f"{self.name} = {self.expr.text}"]

    def run(self, machine, mask):
        machine.assign(self.name, self.expr.value(machine), mask)
        return mask


@dataclass
class Store:
    """array[index] = word; no two threads write one place."""
    array: str
    index: Expr
    word: Expr

    def lines(self):
        return [f"{self.array}[{self.index.text}] = {self.word.text}"]

    def run(self, machine, mask):
        index, word = self.index.value(machine), self.word.value(machine)
        getattr(machine, self.array).reshape(-1)[index[mask]] = word[mask]
        return mask


@dataclass
class StoreLocal:
    index: Expr
    word: Expr

    def lines(self):
        return [f"local[{self.index.text}] = {self.word.text}"]

    def run(self, machine, mask):
        index, word = self.index.value(machine), self.word.value(machine)
        machine.local[machine.gid[mask], index[mask]] = word[mask]
        return mask


@dataclass
class Atomic:
    """sums[bin] = operation(sums[bin], word), one kind of operation in each bin, so that no order matters."""
    operation: str
    index: Expr
    word: Expr

    def lines(self):
        return [f"cuda.atomic.{self.operation}(sums, {self.index.text}, {self.word.text})"]

    def run(self, machine, mask):
        function = {"add": np.add, "max": np.maximum, "min": np.minimum}[self.operation]
        function.at(machine.sums, self.index.value(machine)[mask], self.word.value(machine)[mask])
        return mask


@dataclass
class If:
    condition: Expr
    body: list
    otherwise: list

    def lines(self):
        tail = ["else:", *indented(self.otherwise)] if self.otherwise else []
        return [f"if {self.condition.text}:", *indented(self.body), *tail]

    def run(self, machine, mask):
        condition = self.condition.value(machine)
        went_on = run_all(self.body, machine, mask & condition)
        return went_on | run_all(self.otherwise, machine, mask & ~condition)


@dataclass
class Loop:
    """`for` over `trips` steps if there is a trip count, else `while` a condition, at most `limit` steps."""
    counter: str
    limit: int
    trips: Expr | None
    condition: Expr | None
    body: list = field(default_factory=list)

    def lines(self):
        n, body = self.counter, indented(self.body)
        if self.trips is not None:
            return [f"for step_{n} in range({self.trips.text}):", f"    {n} = uint32(step_{n})", *body]
        return [f"{n} = uint32(0)", f"while {n} < {self.limit} and {self.condition.text}:",
                f"    {n} = uint32({n} + 1)", *body]

    def run(self, machine, mask):
        trips = self.trips.value(machine) if self.trips is not None else None
        active = mask.copy()
        if trips is None:
            machine.assign(self.counter, np.zeros(machine.n, np.uint32), mask)
        for step in range(self.limit):
            active &= machine.alive & (trips > step if trips is not None else self.condition.value(machine))
            if not active.any():
                break
            machine.assign(self.counter, np.full(machine.n, step + (trips is None), np.uint32), active)
            machine.broken.append(np.zeros(machine.n, bool))
            run_all(self.body, machine, active)
            active &= ~machine.broken.pop()
        return mask & machine.alive


@dataclass
class Leave:
    """break, continue or return under a condition."""
    word: str
    condition: Expr

    def lines(self):
        return [f"if {self.condition.text}:", f"    {self.word}"]

    def run(self, machine, mask):
        leaving = mask & self.condition.value(machine)
        if self.word == "break":
            machine.broken[-1] |= leaving
        if self.word == "return":
            machine.alive &= ~leaving
        return mask & ~leaving


@dataclass
class ReturnTogether:
    """Early return where barriers, shuffles and votes follow: `mask` then names the lanes that are left."""
    condition: Expr

    def lines(self):
        ballot = Vote("mask", "ballot", "0xFFFFFFFF", TRUE)
        return [f"if {self.condition.text}:", "    return", *ballot.lines()]

    def run(self, machine, mask):
        return Leave("return", self.condition).run(machine, mask)


@dataclass
class Exchange:
    """Each thread writes its element of a shared array and, after a barrier, reads another's."""
    target: str
    array: str
    word: Expr
    index: Expr

    def lines(self):
        return [f"{self.array}[tid] = {self.word.text}", "cuda.syncthreads()",
                f"{self.target} = {self.array}[{self.index.text}]", "cuda.syncthreads()"]

    def run(self, machine, mask):
        array, index = getattr(machine, self.array), self.index.value(machine)
        array[machine.bid[mask], machine.tid[mask]] = self.word.value(machine)[mask]
        machine.assign(self.target, array[machine.bid, index], mask)
        return mask


@dataclass
class Shuffle:
    """target = the value of another lane; the own value where that lane does not exist or is gone."""
    target: str
    how: str
    members: str                            # "mask" or all 32: lanes that are gone may be named
    word: Expr
    operand: Expr

    def lines(self):
        other = {"idx": "at", "xor": "lane ^ at", "up": "lane - at if lane >= at else lane",
                 "down": "lane + at if lane + at < 32 else lane"}[self.how]
        call = "shfl_sync" if self.how == "idx" else f"shfl_{self.how}_sync"
        cast = NUMBA[self.target[0]]
        return [f"at = uint32({self.operand.text} & 31)", f"own = {self.word.text}",
                f"got = {cast}(cuda.{call}({self.members}, own, at))", f"other = uint32({other})",
                f"{self.target} = got if (mask >> other) & 1 else own"]

    def run(self, machine, mask):
        at, own = self.operand.value(machine) & 31, self.word.value(machine)
        lane = machine.lane
        other = {"idx": at, "xor": lane ^ at, "up": np.where(lane >= at, lane - at, lane),
                 "down": np.where(lane + at < 32, lane + at, lane)}[self.how]
        source = machine.gid - lane + other
        there = (machine.tid - lane + other < machine.block_size) & mask[np.minimum(source, machine.n - 1)]
        machine.assign(self.target, np.where(there, own[np.minimum(source, machine.n - 1)], own), mask)
        return mask


@dataclass
class Vote:
    """target = the ballot of the warp, or 1 or 0 for all, any and eq."""
    target: str
    how: str
    members: str
    condition: Expr

    def lines(self):
        call = f"cuda.{self.how}_sync({self.members}, {self.condition.text})"
        return [f"{self.target} = uint32({call})" if self.how == "ballot" else
                f"{self.target} = uint32(1) if {call} else uint32(0)"]

    def run(self, machine, mask):
        condition = self.condition.value(machine)
        warp = machine.bid * ((machine.block_size + 31) // 32) + machine.tid // 32
        yes, members = np.zeros(warp.max() + 1, np.uint32), np.zeros(warp.max() + 1, np.uint32)
        bit = np.uint32(1) << machine.lane
        np.bitwise_or.at(members, warp[mask], bit[mask])
        np.bitwise_or.at(yes, warp[mask & condition], bit[mask & condition])
        result = {"ballot": yes, "all": yes == members, "any": yes != 0,
                  "eq": (yes == members) | (yes == 0)}[self.how]
        machine.assign(self.target, result.astype(np.uint32)[warp], mask)
        return mask


@dataclass
class Match:
    """target = the lanes of the warp, or of a part of it named lane by lane, with the same word."""
    target: str
    step: int                               # the part: lanes that are equal modulo this power of two
    word: Expr

    def lines(self):
        part = sum(1 << lane for lane in range(0, 32, self.step))
        return [f"part = uint32(mask & ({part} << (lane & {self.step - 1})))",
                f"{self.target} = uint32(cuda.match_any_sync(part, int32({self.word.text})))",
                f"{self.target} = uint32({self.target} * uint32(31) "
                f"+ uint32(cuda.ballot_sync(part, {self.target} == part)))"]

    def run(self, machine, mask):
        word, warp = self.word.value(machine), machine.bid * 64 + machine.tid // 32
        part = warp * 32 + (machine.lane & np.uint32(self.step - 1))
        bit = np.uint32(1) << machine.lane
        gather = lambda pairs: np.array([bit[mask & pairs(i)].sum() for i in range(machine.n)], np.uint32)
        same = gather(lambda i: (part == part[i]) & (word == word[i]))
        alone = same == gather(lambda i: part == part[i])
        ballot = gather(lambda i: (part == part[i]) & alone)
        machine.assign(self.target, same * np.uint32(31) + ballot, mask)
        return mask


# ---- the machine that evaluates them -----------------------------------------------------------------------

class Machine:
    """All threads of a launch at once: `gid` numbers them block by block, values are vectors over them."""

    def __init__(self, program):
        self.n, self.block_size = program.n_threads, prod(program.block)
        self.gid = np.arange(self.n, dtype=np.uint32)
        self.tid, self.bid = self.gid % np.uint32(self.block_size), self.gid // np.uint32(self.block_size)
        self.lane = self.tid % np.uint32(32)
        self.parameters = program.parameters
        self.words, self.floats, self.bytes = program.inputs()
        self.out, self.scatter, self.permuted, self.sums = program.blank()
        self.local = np.zeros((self.n, SCATTER), np.uint32)
        self.shared_u = np.zeros((prod(program.grid), SHARED), np.uint32)
        self.shared_f = np.zeros((prod(program.grid), SHARED), np.float32)
        self.values = {}
        self.alive = np.ones(self.n, bool)
        self.broken = []                    # of the loops around the statement, the threads that broke off

    def uniform(self, i):
        return np.full(self.n, self.parameters[i], np.uint32)

    def fold4(self, index):
        a, b, c, d = self.words.reshape(-1, 4)[index].T
        return a ^ (b + c) ^ (d << np.uint32(1))

    def assign(self, name, value, mask):
        self.values[name] = np.where(mask, value, self.values[name]) if name in self.values else value


# ---- the generator -----------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Place:
    """Where a statement stands: how deep, whether all threads of the block come here together, in a loop, in
    the last part (where nothing waits for other threads any more)."""
    depth: int = 0
    together: bool = True
    loop: bool = False
    last: bool = False
    counters: tuple = ()                    # loop counters in scope
    uniform: tuple = ()                     # those of them that are equal in all threads of a block

    def inside(self, together, loop=False, counter=()):
        together = self.together and together
        return Place(self.depth + 1, together, loop or self.loop, self.last, self.counters + counter,
                     self.uniform + (counter if together else ()))


class Program:
    """The random kernel of one seed: `block`, `grid` (tuples), `parameters`, `body`."""

    def __init__(self, seed, n_statements=6):
        self.seed, self.random = seed, random.Random(seed)
        pick = self.random.choice
        self.block = pick([(32,), (64,), (96,), (128,), (33,), (50,), (95,), (7,), (130,), (200,), (1,),
                           (8, 9), (16, 12)])
        self.grid = pick([(1,), (2,), (3,), (2, 2)])
        self.n_threads = prod(self.block) * prod(self.grid)
        self.parameters = (self.random.randrange(8), self.random.randrange(2**32))
        self.n_loops = 0
        self.n_stores = sum(map(len, VARIABLES.values()))   # the first words of `out` are the variables
        self.permuted_used = 0
        self.body = self.statements(n_statements, Place())
        self.body += self.statements(n_statements // 2, Place(last=True))

    # -- expressions
    def expr(self, kind, depth, place):
        """A random expression of a type; deeper ones are rarer."""
        if kind == "b" or depth > 0 and self.random.random() < 0.75:
            shallow = [op for op in OPS_OF["b"] if "b" not in op.arguments]
            ops = OPS_OF if self.seed < RECORDED else LATER_OPS_OF
            op = self.random.choice(ops[kind] if depth > 0 else shallow)
            return apply(op, [self.expr(t, depth - 1, place) for t in op.arguments])
        leaf = self.random.random()
        if leaf < 0.1:
            return constant(kind, self.random.choice(EDGES[kind]))
        if leaf < 0.25:
            return Expr(*self.random.choice(LEAVES[kind]))
        return variable(self.random.choice(VARIABLES[kind] + (place.counters if kind == "u" else ())))

    def uniform_expr(self, place):
        """A uint32 that is equal in all threads of the block."""
        names = ["p0", "p1", "bid", *place.uniform]
        leaves = [dict(LEAVES["u"]).get(n) or variable(n).value for n in names]
        a, b = (Expr(*self.random.choice(list(zip(names, leaves)))) for _ in range(2))
        op = self.random.choice([o for o in OPS if o.result == "u" and o.arguments == "uu"])
        return apply(op, [a, b])

    def condition(self, place, uniform=False):
        if not uniform:
            return self.expr("b", 2, place)
        op = self.random.choice([o for o in OPS if o.result == "b" and o.arguments == "uu"])
        small = self.masked(self.uniform_expr(place), 3)
        return apply(op, [small, constant("u", self.random.randrange(1, 3))])

    def masked(self, expr, mask):
        return Expr(f"uint32({expr.text} & {mask})", lambda m: expr.value(m) & np.uint32(mask))

    def word(self, place):
        """A random expression of any type, as a uint32 to be stored."""
        kind = self.random.choice("iuufh")
        expr = self.expr(kind, 2, place)
        if kind in "uh":
            return expr
        return apply(next(o for o in OPS if o.result == "u" and o.arguments == kind), [expr])

    # -- statements
    def statements(self, n, place):
        return [self.statement(place) for _ in range(n)]

    def statement(self, place):
        kinds = {self.assign: 8, self.store: 2, self.scatter: 1, self.store_local: 1, self.atomic: 1}
        if place.depth < 3:
            kinds |= {self.branch: 3, self.loop: 3}
        if place.together and not place.last:
            kinds |= {self.exchange: 2, self.shuffle: 3, self.vote: 1}
            kinds |= {self.match: 1} if self.seed >= RECORDED else {}
        if place.loop and not place.together:
            kinds[self.leave_loop] = 2
        if place.last and place.depth or place.together and not place.depth and not place.last:
            kinds[self.leave_kernel] = 0.5
        make, = self.random.choices(list(kinds), list(kinds.values()))
        return make(place)

    def assign(self, place):
        kind = self.random.choice("iufh")
        return Assign(self.random.choice(VARIABLES[kind]), self.expr(kind, 3, place))

    def store(self, place):
        if self.random.random() < 0.3 and self.permuted_used < N_PERMUTED:
            row, flip = self.permuted_used, self.random.randrange(self.n_permuted)
            self.permuted_used += 1
            index = Expr(f"uint32({row * self.n_permuted} + (gid ^ {flip}))",
                         lambda m: row * self.n_permuted + (m.gid ^ np.uint32(flip)))
            return Store("permuted", index, self.word(place))
        if self.n_stores == SLOTS:
            return self.scatter(place)
        slot = self.n_stores
        self.n_stores += 1
        return Store("out", self.slot(slot), self.word(place))

    def slot(self, slot):
        return Expr(f"uint32(first + {slot})", lambda m: m.gid * SLOTS + slot)

    def scatter(self, place):
        at = self.expr("u", 1, place)
        index = Expr(f"uint32(gid * {SCATTER} + ({at.text} & {SCATTER - 1}))",
                     lambda m: m.gid * SCATTER + (at.value(m) & (SCATTER - 1)))
        return Store("scatter", index, self.word(place))

    def store_local(self, place):
        return StoreLocal(self.masked(self.expr("u", 1, place), SCATTER - 1), self.word(place))

    def atomic(self, place):
        operation = self.random.choice(["add", "max", "min"])
        base = {"add": 0, "max": BINS // 2, "min": 3 * BINS // 4}[operation]
        at = self.masked(self.expr("u", 1, place), BINS // 4 - 1)
        index = Expr(f"uint32({at.text} + {base})", lambda m: at.value(m) + np.uint32(base))
        return Atomic(operation, index, self.word(place))

    def branch(self, place):
        uniform = self.random.random() < 0.4
        inner = place.inside(together=uniform)
        n = self.random.randint(1, 3)
        return If(self.condition(place, uniform), self.statements(n, inner),
                  self.statements(self.random.randint(1, 2), inner) if self.random.random() < 0.5 else [])

    def loop(self, place):
        uniform = self.random.random() < 0.4
        counter = f"n{self.n_loops}"
        self.n_loops += 1
        inner = place.inside(uniform, True, (counter,))
        if uniform:
            loop = Loop(counter, 4, self.masked(self.uniform_expr(place), 3), None)
        elif self.random.random() < 0.6:
            loop = Loop(counter, 8, self.masked(self.expr("u", 2, place), 7), None)
        else:
            loop = Loop(counter, 5, None, self.condition(place))
        loop.body = self.statements(self.random.randint(1, 4), inner)
        return loop

    def leave_loop(self, place):
        return Leave(self.random.choice(["break", "continue"]), self.expr("b", 1, place))

    def leave_kernel(self, place):
        condition = self.expr("b", 1, place)
        rare = apply(next(o for o in OPS if o.text == "({} and {})"),
                     [condition, Expr("((tid & 3) == 1)", lambda m: m.tid & 3 == 1)])
        return Leave("return", rare) if place.last else ReturnTogether(rare)

    def exchange(self, place):
        kind = self.random.choice("uf")
        n = prod(self.block)
        at = self.expr("u", 2, place)
        index = Expr(f"uint32({at.text} % {n})", lambda m: at.value(m) % np.uint32(n))
        target = self.random.choice(VARIABLES[kind])
        return Exchange(target, f"shared_{kind}", self.expr(kind, 2, place), index)

    def shuffle(self, place):
        kind = self.random.choice("if")
        how = self.random.choice(["idx", "xor", "up", "down"])
        # Deltas of up and down and the lane mask of xor are the same in all lanes, as usual; idx may differ.
        step = constant("u", self.random.choice([1, 2, 3, 4, 8, 16, 31]))
        operand = self.expr("u", 1, place) if how == "idx" else step
        target = self.random.choice(VARIABLES[kind])
        return Shuffle(target, how, self.members(), self.expr(kind, 2, place), operand)

    def vote(self, place):
        return Vote(self.random.choice(VARIABLES["u"]), self.random.choice(["ballot", "all", "any", "eq"]),
                    self.members(), self.expr("b", 1, place))

    def match(self, place):
        return Match(self.random.choice(VARIABLES["u"]), self.random.choice([1, 2, 8]),
                     self.masked(self.expr("u", 2, place), 3))

    def members(self):
        return self.random.choice(["mask", "0xFFFFFFFF"])

    # -- what comes out
    @property
    def n_permuted(self):
        """Elements of one permuted array: the threads, rounded up to a power of two."""
        return 1 << (self.n_threads - 1).bit_length()

    def prologue(self):
        """Assignments of the first values of the variables."""
        first = {"i": [LEAVES["i"][0],
                       ("int32(words[uint32(gid + 9)])", lambda m: m.words[m.gid + 9].view(np.int32)),
                       LEAVES["i"][1]],
                 "u": [LEAVES["u"][6], LEAVES["u"][2], LEAVES["u"][5]],
                 "f": [LEAVES["f"][0], ("floats[uint32(gid + 5)]", lambda m: m.floats[m.gid + 5]),
                       ("float32(gid)", lambda m: m.gid.astype(np.float32))],
                 "h": [LEAVES["h"][0], ("uint32(1006648320)", lambda m: np.full(m.n, 0x3C003C00, np.uint32))]}
        return [Assign(name, Expr(*leaf))
                for kind, names in VARIABLES.items() for name, leaf in zip(names, first[kind])]

    def epilogue(self):
        """Stores of all variables."""
        names = [(kind, name) for kind, all_names in VARIABLES.items() for name in all_names]
        as_word = {"i": "uint32({})", "u": "{}", "f": "word_of({})", "h": "{}"}
        value = {"i": lambda a: a.view(np.uint32), "u": lambda a: a, "f": float_word, "h": lambda a: a}
        words = [Expr(as_word[k].format(v), lambda m, k=k, v=v: value[k](m.values[v])) for k, v in names]
        return [Store("out", self.slot(i), word) for i, word in enumerate(words)]

    def source(self):
        """The text of the kernel."""
        size = prod(self.block)
        head = ["def kernel(words, floats, bytes_, p0, p1, out, scatter, permuted, sums):",
                f"    shared_u = cuda.shared.array({SHARED}, uint32)",
                f"    shared_f = cuda.shared.array({SHARED}, float32)",
                f"    local = cuda.local.array({SCATTER}, uint32)",
                f"    for k in range({SCATTER}):",
                "        local[k] = uint32(0)",
                f"    tid = uint32(cuda.threadIdx.x + cuda.threadIdx.y * {self.block[0]})",
                f"    bid = uint32(cuda.blockIdx.x + cuda.blockIdx.y * {self.grid[0]})",
                f"    gid = uint32(bid * {size} + tid)",
                f"    first = uint32(gid * {SLOTS})",
                "    lane = uint32(tid & 31)",
                *indented([Vote("mask", "ballot", "0xFFFFFFFF", TRUE)]),
                "    shared_u[tid] = uint32(0)",
                "    shared_f[tid] = float32(0)",
                "    cuda.syncthreads()"]
        return "\n".join(head + indented(self.prologue() + self.body + self.epilogue())) + "\n"

    def kernel(self):
        """A lazy @cuda.jit function; its source stands in linecache, for error messages and the debugger."""
        text, name = self.source(), f"<random kernel {self.seed}>"
        linecache.cache[name] = len(text), None, text.splitlines(True), name
        scope = dict(GLOBALS)
        exec(compile(text, name, "exec"), scope)
        return cuda.jit(scope["kernel"])

    def inputs(self):
        """(words, floats, bytes): random, a quarter of the words and floats edge values."""
        draw = np.random.default_rng(self.seed)
        edge = draw.random(TABLE) < 0.25
        words = draw.integers(0, 2**32, TABLE, dtype=np.uint32)
        floats = np.where(draw.random(TABLE) < 0.5, draw.standard_normal(TABLE).astype(np.float32) * 100,
                          draw.integers(0, 2**32, TABLE, dtype=np.uint32).view(np.float32))
        words[edge] = draw.choice(np.array(EDGES["u"], np.uint32), edge.sum())
        special = EDGES["f"] + [np.inf, -np.inf, np.nan, -0.0]
        floats[edge] = draw.choice(np.array(special, np.float32), edge.sum())
        return words, floats, draw.integers(-128, 128, TABLE, dtype=np.int8)

    def blank(self):
        """(out, scatter, permuted, sums) before the launch."""
        full = [np.full(n, 0xA5A5A5A5, np.uint32) for n in
                (self.n_threads * SLOTS, self.n_threads * SCATTER, N_PERMUTED * self.n_permuted)]
        return *full, np.repeat(np.array([0, 0, 0, 2**32 - 1], np.uint32), BINS // 4)

    def expected(self):
        """The four outputs by NumPy."""
        machine = Machine(self)
        with np.errstate(all="ignore"):
            everyone = np.ones(self.n_threads, bool)
            run_all(self.prologue() + self.body + self.epilogue(), machine, everyone)
        return machine.out, machine.scatter, machine.permuted, machine.sums

    def run(self, card):
        """The four outputs on a card."""
        inputs = [card.upload(a, name=n) for a, n in zip(self.inputs(), ("words", "floats", "bytes"))]
        parameters = [np.uint32(p) for p in self.parameters]
        outputs = [card.upload(a, name=n) for a, n in zip(self.blank(), OUTPUTS)]
        card.launch(self.kernel(), self.grid, self.block, *inputs, *parameters, *outputs)
        return tuple(card.download(a) for a in outputs)

    def differences(self, got):
        """One line for each output that is not as expected: the first place and the two values."""
        lines = []
        for (name, width), a, b in zip(OUTPUTS.items(), got, self.expected()):
            wrong = np.flatnonzero(a != b)
            if len(wrong):
                i = int(wrong[0])
                where = f"thread {i // width} word {i % width}" if width else f"word {i}"
                lines.append(f"seed {self.seed}: {name}: {len(wrong)} of {len(a)} words differ, "
                             f"first {where}: {a[i]:#010x}, expected {b[i]:#010x}")
        return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--card", default="emulated", help="emulated, cuda:0, ... (default: %(default)s)")
    parser.add_argument("--seeds", default="0:40", help="first:end (default: %(default)s)")
    parser.add_argument("--show", action="store_true", help="print the source of each kernel that differs")
    options = parser.parse_args()
    card = open_cards(options.card)[0]
    digest, failed = hashlib.sha256(), []
    seeds = range(*map(int, options.seeds.split(":")))
    for seed in seeds:
        program = Program(seed)
        got = program.run(card)
        for array in got:
            digest.update(array.tobytes())
        differences = program.differences(got)
        if differences:
            failed.append(seed)
            print("\n".join(differences + ([program.source()] if options.show else [])))
    n_right = len(seeds) - len(failed)
    print(f"{card.name}: {n_right} of {len(seeds)} random kernels agree bit for bit with NumPy"
          f"{f'; seeds that do not: {failed}' if failed else ''}")
    print(f"sha256 of all outputs of seeds {options.seeds}: {digest.hexdigest()}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
