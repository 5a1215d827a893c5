"""What this card's pipes can do, measured: `python -m kernels.probe`, or `python qengine.py --probe`.

Vendors slow single instructions of a card down, and no data sheet says which. A loop that touches nothing but
registers shows what one instruction really gives:

    for round in range(rounds):                 # about 20 ms
        512 × instruction                       # one block of inline PTX, so that no compiler rearranges it;
                                                # 8 chains, each of which feeds its result to its next step
    1,024 threads per SM on every SM: 8 warps in each of an SM's four partitions, 64 chains

    instructions per second = rounds · 512 · threads / seconds          of the events around the launch
    clock                   = clocks by the SM's own counter / seconds
    expected                = results per SM and clock (kernels/emulated/cards.py) · SMs · clock

The expected value uses the clock at which the card really ran, so a low clock does not explain a share below 100 %.
The probe also measures the bandwidth of memory, shared memory and link, and what a launch, a replayed launch and a
barrier of the whole grid cost. On the emulated card the figures are those of this machine's processor: there are no
expected values, and what the emulated card cannot run is skipped with the reason.

The tensor path is measured with `mma.sync`: on fp16 with fp16 accumulators, because some cards halve the rate of
float32 accumulators, and in each form by which kernels/tensor_gemm.py multiplies int8 (FORMS). kernels/products.py
measures whether that kernel is faster than the one of dp4a.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import math
import platform
import re
import sys
import time
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from cuda.bindings import nvrtc
from llvmlite import ir
from numba import cuda
from numba.core.types import UniTuple
from numba.cuda.extending import intrinsic
from numba.types import float32, uint32, uint64

from kernels.bench import OPS_PER_RESULT, model_of, replay_seconds, seconds_per_call
from kernels.card import CardError
from kernels.emulated.cards import CARDS, UNITS
from kernels.intrinsics import load_words4
from kernels.open import open_cards

UNROLLED = 512                                           # instructions of a round
EMULATED_UNROLLED = 32                                   # on the emulated card: one instruction becomes many
THREADS = 1024                                           # of a block; one block per SM
TARGET_SECONDS = 0.02                                    # length of a timed loop
REPEATS = 3                                              # of a measurement; the best counts
THROTTLED = 0.6                                          # a path below this share of its expected value is throttled
READ_THREADS, READ_BLOCKS = 512, 4                       # of a block, and per SM
FORMAT = 1                                               # of saved reports; reports of other formats are ignored


# ---- a block of inline PTX as a function of Numba ----------------------------------------------------------

def _unrolled(text, kind, n_words, n_lines, count):
    """step(c, x, y) -> c: `count` instructions, on the n_words numbers of `c`, a tuple of `kind`.

    text: n_lines instructions of one chain, where {c} is its number, or its numbers {c0}, {c1}, ...
    """
    number, letter = (ir.FloatType(), "f") if kind == float32 else (ir.IntType(32), "r")
    words_per_chain = len(set(re.findall(r"{c\d}", text))) or 1
    n_chains, lines = n_words // words_per_chain, []
    names = {"x": f"${2 * n_words}", "y": f"${2 * n_words + 1}"}
    for i in range(count // n_lines):
        first = i % n_chains * words_per_chain
        chain = {f"c{k}": f"${first + k}" for k in range(words_per_chain)}
        lines.append(text.format(c=f"${first}", **chain, **names))
    asm = "\n\t".join(lines)
    constraints = ",".join([f"={letter}"] * n_words + [str(i) for i in range(n_words)] + [letter] * 2)
    words = UniTuple(kind, n_words)

    def step(context, c, x, y):
        def codegen(context, builder, signature, values):
            c = [builder.extract_value(values[0], i) for i in range(n_words)]
            function = ir.FunctionType(ir.LiteralStructType([number] * n_words), [number] * (n_words + 2))
            results = builder.asm(function, asm, constraints, [*c, *values[1:]], True)
            c = [builder.extract_value(results, i) for i in range(n_words)]
            return context.make_tuple(builder, words, c)

        return words(words, kind, kind), codegen

    return intrinsic(step)


def _spread(kind, n_words):
    """spread(first) -> a tuple of n_words different numbers, so that no two chains compute the same."""
    words = UniTuple(kind, n_words)

    def spread(context, first):
        def codegen(context, builder, signature, values):
            add = builder.fadd if kind == float32 else builder.add
            unit = 1 / 8 if kind == float32 else 0x01010101
            numbers = [add(values[0], ir.Constant(values[0].type, i * unit)) for i in range(n_words)]
            return context.make_tuple(builder, words, numbers)

        return words(kind), codegen

    return intrinsic(spread)


def _reader(text):
    """clock() -> uint64 by the instruction `text`, which the compiler leaves in its place among the others."""
    def clock(context):
        def codegen(context, builder, signature, values):
            return builder.asm(ir.FunctionType(ir.IntType(64), []), text, "=l", [], True)

        return uint64(), codegen

    return intrinsic(clock)


@intrinsic
def _one_less(context, n):
    """n - 1, written so that the compiler cannot tell how many rounds a loop has. Otherwise it would repeat the body
    of the loop four times, and instruction caches are small."""
    def codegen(context, builder, signature, values):
        function = ir.FunctionType(ir.IntType(32), [ir.IntType(32)])
        return builder.asm(function, "sub.u32 $0, $1, 1;", "=r,r", values, False)

    return uint32(uint32), codegen


def _loop(name, step, spread, clock):
    """The kernel of a register-only loop. x, y: operands. Writes the clocks of block b to clocks[b]."""
    def loop(out, clocks, rounds, x, y):
        i = uint32(uint32(cuda.blockIdx.x) * uint32(cuda.blockDim.x) + uint32(cuda.threadIdx.x))
        c = spread(x)
        cuda.syncthreads()
        start = clock()
        left = uint32(rounds)
        while left > uint32(0):
            left = _one_less(left)
            c = step(c, x, y)
        cuda.syncthreads()
        end = clock()
        for number in c:
            out[i] = out[i] + number                     # otherwise the assembler would drop a chain
        if uint32(cuda.threadIdx.x) == uint32(0):
            clocks[uint32(cuda.blockIdx.x)] = end - start

    loop.__name__ = name
    return cuda.jit(loop)


# ---- the instructions --------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Pipe:
    """One instruction to measure.

    key: as in UNITS and OPS_PER_RESULT, or of FORMS. text: the n_lines instructions of a chain, see `_unrolled`; x, y:
    its operands, of type `kind`; n_words: numbers of all chains together. results: of one warp instruction as cards.py
    counts them, that is 32, or for mma.sync 32 for each 1,024 multiply-adds.
    """
    key: str
    name: str
    unit: str
    text: str
    kind: object = uint32
    x: object = 0x3A013A01
    y: object = 0x34023403
    n_words: int = 8
    n_lines: int = 1
    results: int = 32

    @property
    def ops_per_result(self):
        return OPS_PER_RESULT["tensor" if self.key in FORMS else self.key]


PIPES = (
    Pipe("dp4a", "dp4a", "TOPS", "dp4a.s32.s32 {c}, {c}, {x}, {y};"),
    Pipe("dp2a", "dp2a", "TOPS", "dp2a.lo.s32.s32 {c}, {c}, {x}, {y};"),
    Pipe("imad", "integer multiply-add, 32 bits", "TOPS", "mad.lo.u32 {c}, {c}, {x}, {y};"),
    Pipe("half2", "half2 FMA", "TFLOPS", "fma.rn.f16x2 {c}, {c}, {x}, {y};"),
    Pipe("ffma", "fp32 FMA", "TFLOPS", "fma.rn.f32 {c}, {c}, {x}, {y};", float32, 0.75, 0.125),
    Pipe("fp32", "fp32 multiply, then add", "TFLOPS",
         "mul.rn.f32 {c}, {c}, {x}; add.rn.f32 {c}, {c}, {y};", float32, 0.75, 0.125, n_lines=2),
)


def tensor_pipe(cc):
    """The Pipe of `mma.sync` on fp16 for compute capability `cc`, in its architecture's largest shape."""
    if cc >= (8, 0):
        shape, c, a, b, results = "m16n8k16", "{c0}, {c1}", "{x}, {y}, {x}, {y}", "{x}, {y}", 64
    elif cc >= (7, 5):
        shape, c, a, b, results = "m16n8k8", "{c0}, {c1}", "{x}, {y}", "{x}", 32
    else:
        shape, c, a, b, results = "m8n8k4", "{c0}, {c1}, {c2}, {c3}", "{x}, {y}", "{x}, {y}", 32
    operands = ", ".join("{{" + registers + "}}" for registers in (c, a, b, c))
    return Pipe("tensor", f"fp16 tensor, mma {shape}", "TFLOPS",
                f"mma.sync.aligned.{shape}.row.col.f16.f16.f16.f16 {operands};", n_words=16, results=results)


def _form(oldest, shape, unit, types, *operands, n_words=16, results=32):
    """(the oldest compute capability with it, the Pipe) of products of int8 on tensor cores. operands: c, a and b."""
    c, a, b = ("{{" + ", ".join(f"{{{name}}}" for name in names.split()) + "}}" for names in operands)
    name = f"{'int8 tensor' if 's8' in types else 'fp16 tensor with fp32 sums'}, mma {shape}"
    return oldest, Pipe(shape, name, unit, f"mma.sync.aligned.{shape}.row.col.{types} {c}, {a}, {b}, {c};",
                        n_words=n_words, results=results)


# Shape of an mma of kernels/tensor_gemm.py -> the same of its products. Float32 sums lie in registers of 32 bits.
FORMS = {
    "m16n8k32": _form((8, 0), "m16n8k32", "TOPS", "s32.s8.s8.s32", "c0 c1 c2 c3", "x y x y", "x y", results=128),
    "m8n8k16": _form((7, 5), "m8n8k16", "TOPS", "s32.s8.s8.s32", "c0 c1", "x", "y"),
    "m8n8k4": _form((7, 0), "m8n8k4", "TFLOPS", "f32.f16.f16.f32", "c0 c1 c2 c3 c4 c5 c6 c7", "x y", "x y", n_words=32),
}


def forms_of(cc):
    """The Pipes of FORMS that compute capability `cc` has, the largest first. Of these, only Volta has m8n8k4; later
    cards make it of other instructions."""
    return [pipe for key, (oldest, pipe) in FORMS.items() if cc >= oldest and (key != "m8n8k4" or cc < (7, 5))]


@cache
def loop_kernel(pipe, unrolled=UNROLLED, with_clock=True):
    """The kernel of a Pipe: (out kind[threads], clocks uint64[blocks], rounds, x, y).

    with_clock: whether the card has a clock register; the emulated card has none.
    """
    clock = _reader("mov.u64 $0, %clock64;" if with_clock else "mov.u64 $0, 0;")
    step = _unrolled(pipe.text, pipe.kind, pipe.n_words, pipe.n_lines, unrolled)
    return _loop(f"probe_{pipe.key}", step, _spread(pipe.kind, pipe.n_words), clock)


# ---- the other kernels -------------------------------------------------------------------------------------

N_SHARED_LOADS = 64                                      # of a round
N_SHARED_WORDS = N_SHARED_LOADS * 128                    # 32 lanes of 16 bytes each


@intrinsic
def _read_shared(context, array, lane):
    """The exclusive or of all words that N_SHARED_LOADS loads of 16 bytes by each lane read from a shared array.

    Each load of a warp reads 512 bytes without bank conflicts. All words enter the result because ptxas drops unused
    loads, volatile ones too.
    """
    def codegen(context, builder, signature, values):
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        loads = [f"ld.shared.v4.u32 {{a, b, c, d}}, [s+{512 * i}]; xor.b32 w, w, a; xor.b32 x, x, b; "
                 "xor.b32 y, y, c; xor.b32 z, z, d;" for i in range(N_SHARED_LOADS)]
        asm = "\n\t".join(["{ .reg .b32 a, b, c, d, w, x, y, z, t; .reg .b64 s, o;",
                           "mov.u32 w, 0; mov.u32 x, 0; mov.u32 y, 0; mov.u32 z, 0;", "shl.b32 t, $2, 4;",
                           "cvta.to.shared.u64 s, $1; cvt.u64.u32 o, t; add.u64 s, s, o;", *loads,
                           "xor.b32 w, w, x; xor.b32 y, y, z; xor.b32 $0, w, y; }"])
        function = ir.FunctionType(ir.IntType(32), [ir.IntType(64), ir.IntType(32)])
        address = builder.ptrtoint(data, ir.IntType(64))
        return builder.asm(function, asm, "=r,l,r", [address, values[1]], True)

    return uint32(array, uint32), codegen


def _shared_loop(clock):
    def probe_shared(out, clocks, rounds):
        words = cuda.shared.array(N_SHARED_WORDS, uint32)
        thread = uint32(cuda.threadIdx.x)
        for i in range(uint32(N_SHARED_WORDS // THREADS)):
            place = uint32(uint32(i) * uint32(THREADS) + thread)
            words[place] = uint32(place * place)
        cuda.syncthreads()
        start, last, left = clock(), uint32(0), uint32(rounds)
        while left > uint32(0):
            left = _one_less(left)
            last = uint32(last ^ _read_shared(words, uint32(uint32(thread ^ left) & uint32(31))))
        cuda.syncthreads()
        end = clock()
        out[uint32(uint32(cuda.blockIdx.x) * uint32(cuda.blockDim.x) + thread)] = last
        if thread == uint32(0):
            clocks[uint32(cuda.blockIdx.x)] = end - start

    return cuda.jit(probe_shared)


@cache
def shared_kernel(with_clock=True):
    """The kernel of the shared-memory loop: (out uint32[threads], clocks uint64[blocks], rounds)."""
    return _shared_loop(_reader("mov.u64 $0, %clock64;" if with_clock else "mov.u64 $0, 0;"))


@cuda.jit
def probe_read(out, x, rounds):
    """Reads all of x, 16 bytes at a time: rounds · 4 · threads of the grid · 16 bytes."""
    stride = uint32(uint32(cuda.gridDim.x) * uint32(cuda.blockDim.x))
    thread = uint32(uint32(cuda.blockIdx.x) * uint32(cuda.blockDim.x) + uint32(cuda.threadIdx.x))
    first, step = uint32(uint32(4) * thread), uint32(uint32(4) * stride)
    total = uint32(0)
    for j in range(uint32(rounds)):
        i = uint32(first + uint32(uint32(uint32(4) * uint32(j)) * step))
        a0, a1, a2, a3 = load_words4(x, i)
        b0, b1, b2, b3 = load_words4(x, uint32(i + step))
        c0, c1, c2, c3 = load_words4(x, uint32(i + uint32(uint32(2) * step)))
        d0, d1, d2, d3 = load_words4(x, uint32(i + uint32(uint32(3) * step)))
        total ^= a0 ^ a1 ^ a2 ^ a3 ^ b0 ^ b1 ^ b2 ^ b3 ^ c0 ^ c1 ^ c2 ^ c3 ^ d0 ^ d1 ^ d2 ^ d3
    out[thread] = total


@cuda.jit
def probe_nothing(x):
    """A kernel that does nothing, to measure what a launch costs by itself."""
    if uint32(cuda.threadIdx.x) == uint32(1 << 31):
        x[uint32(0)] = uint32(1)


@intrinsic
def _read_volatile(context, array):
    """The first word of an array, read from memory at every call."""
    def codegen(context, builder, signature, values):
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        function = ir.FunctionType(ir.IntType(32), [ir.IntType(64)])
        address = builder.ptrtoint(data, ir.IntType(64))
        return builder.asm(function, "ld.volatile.global.u32 $0, [$1];", "=r,l,~{memory}", [address], True)

    return uint32(array), codegen


@cuda.jit
def probe_grid_sync(arrived, rounds):
    """`rounds` barriers of the whole grid, whose blocks must all run at once. arrived: uint32[1], 0 at the start."""
    target = uint32(0)
    for _ in range(uint32(rounds)):
        target = uint32(target + uint32(cuda.gridDim.x))
        cuda.syncthreads()
        if uint32(cuda.threadIdx.x) == uint32(0):
            cuda.threadfence()
            cuda.atomic.add(arrived, uint32(0), uint32(1))
            while _read_volatile(arrived) < target:
                pass
            cuda.threadfence()
        cuda.syncthreads()


# ---- the report --------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Row:
    """A line of the table. value: in `unit`, None where skipped; expected: in the same unit, None where unknown.

    clock: Hz of the SMs during the measurement, None where it was not read. note: where the expected value comes from,
    or why there is none.
    """
    key: str
    name: str
    value: float | None
    unit: str = ""
    expected: float | None = None
    clock: float | None = None
    note: str = ""

    @property
    def share(self):
        """value / expected; None where one of them is missing."""
        return self.value / self.expected if self.value is not None and self.expected else None

    def cells(self):
        share = "" if self.share is None else f"{100 * self.share:.0f} %"
        return self.name, show(self.value, self.unit), show(self.expected, self.unit), share, self.note


def show(value, unit):
    """Three digits and the unit, "" for None."""
    if value is None:
        return ""
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{digits}f} {unit}"


HEAD = "what", "measured", "expected", "of it", "remarks"


@dataclass(frozen=True)
class Report:
    """What `measure` found. card: Card.facts(); versions: of the software; date: ISO 8601, UTC; rows: of Row."""
    card: dict
    versions: dict
    date: str
    rows: tuple

    def row(self, key):
        """The Row of that key, or None."""
        return next((row for row in self.rows if row.key == key), None)

    def value(self, key):
        row = self.row(key)
        return row.value if row else None

    @property
    def clock(self):
        """Hz of the SMs during the dp4a loop; None on the emulated card."""
        return self.row("dp4a").clock

    @property
    def dp4a_peak(self):
        """int8 operations per second; a multiplication and an addition are two. The value that is expected at the
        measured clock, or where none is expected (the emulated card) the measured one."""
        row = self.row("dp4a")
        return 1e12 * (row.expected or row.value)

    @property
    def read_bandwidth(self):
        """Bytes per second, measured."""
        return 1e9 * self.value("read")

    def throttled(self):
        """The Rows whose value is less than THROTTLED of the expected one."""
        return [row for row in self.rows if row.share is not None and row.share < THROTTLED]

    def findings(self):
        """A sentence for each throttled path, and sentences on what the engine uses instead."""
        lines = [f"throttled: {row.name} gives {show(row.value, row.unit)}, 1/{1 / row.share:.1f} of what "
                 "its units and clock allow" for row in self.throttled()]
        if not lines and any(row.expected for row in self.rows):
            lines = ["no path is throttled"]
        return [*lines, f"products of int8: {fastest_dot(self)}",
                *(f"the engine's kernels use {new} instead of {old} on this card"
                  for old, new in replacements(self))]

    def table(self):
        """For the terminal."""
        rows = [HEAD, *(row.cells() for row in self.rows)]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        head = f"probe of {self.card['name']}"
        if self.clock:
            head += f"; SM clock {self.clock / 1e9:.3f} GHz"
        lines = []
        for name, *figures, note in rows:
            columns = [f"{figure:>{width}}" for figure, width in zip(figures, widths[1:])]
            lines.append("  ".join([f"{name:{widths[0]}}", *columns, note]).rstrip())
        return "\n".join([head, "", *lines, "", *self.findings()])

    def markdown(self):
        """For an issue tracker: card, software and the same table."""
        said = self.card | self.versions | {"date": self.date}
        facts = [f"- {name}: {value}" for name, value in said.items()]
        lines = ["### qengine probe", "", *facts, "", f"| {' | '.join(HEAD)} |", "|---|---:|---:|---:|---|"]
        lines += [f"| {' | '.join(row.cells())} |" for row in self.rows]
        return "\n".join([*lines, "", *(f"- {line}" for line in self.findings())])

    def to_dict(self):
        """For JSON."""
        return {"format": FORMAT} | dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data):
        """ValueError, KeyError or TypeError: `data` is no report of this FORMAT."""
        if data["format"] != FORMAT:
            raise ValueError("another format")
        return cls(data["card"], data["versions"], data["date"], tuple(Row(**row) for row in data["rows"]))


def path_of(card):
    """The file of a card's report. It is named by the card's UUID, or by the card's name where there is none."""
    name = card.facts().get("uuid") or card.name
    return Path(card.cache_dir) / "probe" / (re.sub(r"[^\w-]+", "-", name) + ".json")


def save(card, report):
    path = path_of(card)
    write_json(path, report.to_dict())
    return path


def write_json(path, data):
    """Keeps `data` for later starts. Readers take a file that is half written for none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def load(card):
    """The saved Report on a card, or None."""
    try:
        return Report.from_dict(json.loads(path_of(card).read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def saved_or_measured(card):
    """The saved Report on a card. Where there is none, the card is measured and the Report saved."""
    report = load(card)
    if report is None:
        report = measure(card)
        save(card, report)
    return report


# ---- what follows from a report ----------------------------------------------------------------------------------

DOT_INSTRUCTIONS = {"dp4a": 1, "dp2a": 2, "imad": 4}     # how many give the sum of 4 products of int8


def fastest_dot(report):
    """The instruction for products of int8 on the card of a Report: a key of DOT_INSTRUCTIONS.

    That is "dp4a" unless it is throttled, else the one that multiplies most pairs per second. 4 pairs take one dp4a,
    two dp2a (whose first operand has 16-bit numbers) or four multiply-adds. Unpacking the bytes for the latter two runs
    on another pipe and is not counted. Among equals dp4a is chosen, which needs no unpacking.
    """
    if report.row("dp4a") not in report.throttled():
        return "dp4a"
    rates = dot_rates(report)
    return max(rates, key=rates.get)


def dot_rates(report):
    """{instruction: TOPS of products of int8} for DOT_INSTRUCTIONS; a multiplication and an addition are two."""
    return {key: OPS_PER_RESULT["dp4a"] * report.value(key) / (OPS_PER_RESULT[key] * n)
            for key, n in DOT_INSTRUCTIONS.items()}


def replacements(report):
    """Pairs (throttled instruction, replacement) for the card of a Report, as `throttled.rewrite` takes them."""
    dot, pairs = fastest_dot(report), []
    if dot != "dp4a":
        pairs.append(("dp4a", dot))
    if report.row("ffma") in report.throttled() and report.value("fp32") > report.value("ffma"):
        pairs.append(("ffma", "fp32"))
    return tuple(pairs)


def saved_replacements(card):
    """The `replacements` that a card's saved report asks for; none where the card was never probed."""
    report = load(card)
    return replacements(report) if report else ()


def dot_speed(card):
    """Operations per second of products of int8 that a real card can do, by its saved report.

    Without a report: the dp4a results per clock of its architecture (64 where that is unknown) at the card's highest
    clock, which a throttled card does not reach.
    """
    if report := load(card):
        return 1e12 * dot_rates(report)[fastest_dot(report)]
    return (expected_per_clock(card.cc, "dp4a") or 64) * card.n_sms * card.clock * OPS_PER_RESULT["dp4a"]


class Speed(NamedTuple):
    """What a card can do in a second."""
    dot: float                      # operations of int8 products; a multiplication and an addition are two
    half2: float                    # operations of half2
    read: float                     # bytes read from its memory
    link: float                     # bytes between host and card, in one direction


def speed_of(card):
    """The Speed of a card.

    Of a real card: by its saved report, else by the table of cards, else by the results per clock of its architecture
    at the card's highest clock. Of an emulated card: that of the type which it is like, or of the first type in the
    table, with the link that the emulated card itself has.
    """
    if card.kind == "emulated":
        link = card.link_gbs * 1e9 if card.link_gbs else math.inf
        return _speed_of_model(card.like or CARDS[0])._replace(link=link)
    if report := load(card):
        link = min(report.value("to_card"), report.value("from_card"))
        return Speed(dot_speed(card), 1e12 * report.value("half2"), report.read_bandwidth, 1e9 * link)
    if model := model_of(card):
        return _speed_of_model(model)
    facts = card.facts()
    half2 = (expected_per_clock(card.cc, "half2") or 64) * card.n_sms * card.clock * OPS_PER_RESULT["half2"]
    return Speed(dot_speed(card), half2, 1e9 * facts.get("memory GB/s", 300), 1e9 * facts.get("link GB/s", 0.25))


def _speed_of_model(model):
    dot, half2 = (model.rate(pipe) * OPS_PER_RESULT[pipe] for pipe in ("dp4a", "half2"))
    return Speed(dot, half2, model.read_bandwidth, model.link_bandwidth)


# ---- measurement -------------------------------------------------------------------------------------------

def measure(card):
    """The Report on a card. It takes some seconds, in which the card should have nothing else to do."""
    before = card.replace(())           # otherwise the loops would measure the replacements of instructions
    try:
        rows = [measure_pipe(card, pipe) for pipe in PIPES]
        rows += [measure_tensor(card), *measure_forms(card), measure_shared(card), *measure_memory(card),
                 *measure_launches(card), measure_grid_sync(card), *measure_link(card), peer_access(card)]
    finally:
        card.replace(before)
    return Report(card.facts(), versions(), now(), tuple(rows))


def now():
    """ISO 8601, UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def versions():
    """{name: version} of the software that compiles the kernels."""
    toolkit = "%d.%d" % tuple(nvrtc.nvrtcVersion()[1:])
    names = "numba-cuda", "numba", "llvmlite", "numpy"
    return {"CUDA toolkit": toolkit, "Python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in names}}


def event_seconds(card, launch):
    """Seconds between events around what `launch()` queues on the default stream."""
    start = card.default_stream.record()
    launch()
    end = card.default_stream.record()
    end.synchronize()
    return end.seconds_since(start)


def timed_rounds(card, launch):
    """(rounds, seconds) of the fastest of REPEATS launches of about TARGET_SECONDS. launch(rounds) queues one."""
    rounds = 1
    event_seconds(card, partial(launch, rounds))         # compiles
    while (seconds := event_seconds(card, partial(launch, rounds))) < TARGET_SECONDS / 4:
        rounds = min(rounds * 64, max(2 * rounds, int(rounds * TARGET_SECONDS / max(seconds, 1e-6))))
    return rounds, min(event_seconds(card, partial(launch, rounds)) for _ in range(REPEATS))


def has_clock(card):
    """Whether a card has the clock register. The emulated card refuses it, and tensor instructions."""
    return card.kind != "emulated"


def loop_seconds(card, kernel, out, *arguments):
    """(rounds per second of every thread, clock in Hz or None) of a loop kernel on one block per SM."""
    clocks = card.zeros(card.n_sms, np.uint64, "clocks")

    def launch(rounds):
        card.launch(kernel, card.n_sms, THREADS, out, clocks, rounds, *arguments)

    rounds, seconds = timed_rounds(card, launch)
    clock = int(card.download(clocks).max()) / seconds if has_clock(card) else None
    return rounds / seconds, clock


def measure_pipe(card, pipe):
    """The Row of a Pipe."""
    out = card.zeros(card.n_sms * THREADS, np.float32 if pipe.kind == float32 else np.uint32, "results")
    unrolled = UNROLLED if has_clock(card) else EMULATED_UNROLLED
    kernel = loop_kernel(pipe, unrolled, has_clock(card))
    per_second, clock = loop_seconds(card, kernel, out, pipe.x, pipe.y)
    ops = pipe.results / 32 * pipe.ops_per_result / 1e12
    value = per_second * unrolled * card.n_sms * THREADS * ops
    if clock is None:
        return Row(pipe.key, pipe.name, value, pipe.unit)
    per_clock = expected_per_clock(card.cc, pipe.key)
    if per_clock is None:
        note = f"no figure for sm_{card.cc[0]}{card.cc[1]} is known"
        return Row(pipe.key, pipe.name, value, pipe.unit, None, clock, note)
    width = f"{per_clock:g} lanes" if pipe.ops_per_result != OPS_PER_RESULT["tensor"] else f"{32 * per_clock:,.0f} FMA"
    expected = per_clock * card.n_sms * clock * pipe.ops_per_result / 1e12
    return Row(pipe.key, pipe.name, value, pipe.unit, expected, clock,
               f"{width} per SM and clock, {clock / 1e9:.3f} GHz")


# What mma.sync reaches of the tensor peak, where wgmma reaches it: Luo et al., arXiv 2402.13499 (recalled)
MMA_SYNC = {(9, 0): 0.62}
INT8_RATE = {(7, 5): 2, (8, 0): 2, (8, 6): 2, (8, 9): 2}    # relative to fp16, by the white papers; unknown elsewhere


def expected_per_clock(cc, pipe):
    """Results of a pipe per SM and clock by kernels/emulated/cards.py, which names the sources; None where unknown."""
    cc, unit_pipe, rate = tuple(cc), "tensor" if pipe in FORMS else pipe, 1
    if pipe in FORMS and pipe != "m8n8k4":
        rate = INT8_RATE.get(cc)
    widths = [unit.per_clock for unit in UNITS.get(cc, ()) if unit_pipe in unit.pipes]
    return min(widths) * rate * (MMA_SYNC.get(cc, 1) if unit_pipe == "tensor" else 1) if widths and rate else None


def measure_tensor(card):
    pipe = tensor_pipe(card.cc)
    if not has_clock(card):
        return Row("tensor", "fp16 tensor", None, note="skipped: the emulated card has no such instructions")
    return measure_pipe(card, pipe)


def measure_forms(card):
    """The Rows of the card's forms of products of int8 on tensor cores."""
    return [measure_pipe(card, pipe) for pipe in forms_of(card.cc)] if has_clock(card) else []


def measure_shared(card):
    """The Row of reads of shared memory; 32 banks of 4 bytes give 128 bytes per SM and clock everywhere."""
    out = card.zeros(card.n_sms * THREADS, np.uint32, "results")
    per_second, clock = loop_seconds(card, shared_kernel(has_clock(card)), out)
    value = per_second * N_SHARED_LOADS * 16 * card.n_sms * THREADS / 1e9
    expected = 128 * card.n_sms * clock / 1e9 if clock else None
    return Row("shared", "shared memory, read", value, "GB/s", expected, clock,
               f"128 bytes per SM and clock, {clock / 1e9:.3f} GHz" if clock else "")


def measure_memory(card):
    """The Rows of reading and of copying memory, on more of it than any cache holds."""
    threads = READ_BLOCKS * READ_THREADS * card.n_sms
    per_round = 4 * threads * 16
    wanted = min(1 << 30, card.free_bytes // 4) if has_clock(card) else 64 << 20
    rounds = max(1, wanted // per_round)
    x, y = (card.zeros(rounds * per_round // 4, np.uint32, "memory to read") for _ in range(2))
    out = card.zeros(threads, np.uint32, "sums")
    blocks = READ_BLOCKS * card.n_sms
    read = seconds_per_call(card, lambda: card.launch(probe_read, blocks, READ_THREADS, out, x, rounds))
    copied = seconds_per_call(card, lambda: card.copy(y, x))
    expected = card.facts().get("memory GB/s")
    note = "memory clock × 2 × bus width" if expected else ""
    return (Row("read", "memory, read", x.nbytes / read / 1e9, "GB/s", expected, note=note),
            Row("copy", "memory, copy (read + written)", 2 * x.nbytes / copied / 1e9, "GB/s", expected,
                note=note))


def measure_launches(card, n=500):
    """The Rows of a launch: what it costs the host, and in a replayed recording the card."""
    x = card.zeros(1, np.uint32)
    launch = partial(card.launch, probe_nothing, 1, 32, x)
    launch()
    card.synchronize()
    start = time.perf_counter()
    for _ in range(n):
        launch()
    host = (time.perf_counter() - start) / n
    card.synchronize()
    with card.record() as recording:
        for _ in range(n):
            launch()
    replay = min(replay_seconds(card, recording) for _ in range(REPEATS)) / n
    return (Row("launch", "launch from Python", host * 1e6, "µs"),
            Row("replay", "launch in a replayed recording", replay * 1e6, "µs"))


def measure_grid_sync(card, rounds=1000):
    """The Row of a barrier of the whole grid: one block per SM, which an idle card runs all at once."""
    if not has_clock(card):
        note = "skipped: emulated blocks do not run all at once"
        return Row("grid_sync", "barrier of the grid", None, note=note)
    arrived = card.zeros(1, np.uint32)
    card.launch(probe_grid_sync, card.n_sms, 32, arrived, 1)

    def barriers():
        card.fill(arrived, 0)
        card.launch(probe_grid_sync, card.n_sms, 32, arrived, rounds)

    seconds = min(event_seconds(card, barriers) for _ in range(REPEATS)) / rounds
    return Row("grid_sync", "barrier of the grid", seconds * 1e6, "µs")


def measure_link(card, n_bytes=32 << 20):
    """The Rows of copies between pinned host memory and the card."""
    host, array = card.pinned(n_bytes, np.uint8), card.zeros(n_bytes, np.uint8)
    host[:] = 1
    into = min(event_seconds(card, partial(card.copy_in, array, host)) for _ in range(REPEATS))
    out = min(event_seconds(card, partial(card.copy_out, host, array)) for _ in range(REPEATS))
    facts = card.facts()                                 # read now, because an idle link may run slower
    expected, note = facts.get("link GB/s"), facts.get("link", "")
    return (Row("to_card", "pinned memory to card", n_bytes / into / 1e9, "GB/s", expected, note=note),
            Row("from_card", "card to pinned memory", n_bytes / out / 1e9, "GB/s", expected, note=note))


def peer_access(card):
    """A Row without a figure, whose note says which other cards this card can read directly."""
    others = [other for other in open_cards("cuda") if other.name != card.name] if has_clock(card) else []
    reached = [other.name for other in others if card.can_access(other)]
    missing = f"none, to {len(others)} other card{'s' * (len(others) != 1)}"
    note = f"to {', '.join(reached)}" if reached else missing
    return Row("peer", "peer access", None, note=note)


# ---- command line ------------------------------------------------------------------------------------------

def probe_cards(cards):
    """Measures cards. Prints for each its table and a text to paste."""
    reports = []
    for card in cards:
        reports.append(report := measure(card))
        print(report.table())
        print(f"\nsaved in {save(card, report)}\n\nto paste into a report:\n\n{report.markdown()}\n",
              flush=True)
    return reports


def main():
    parser = argparse.ArgumentParser(description="Measures what the pipes of this machine's cards can do.")
    parser.add_argument("--card", help="emulated, cuda or cuda:0 (default: real cards, else emulated)")
    try:
        probe_cards(open_cards(parser.parse_args().card))
    except CardError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
