"""What a launch would cost on a card: instruction counts by pipe, and an estimate of the time from them.

    Counts (exact, by the emulated card) + grid, block, registers, shared memory + CardModel  →  Estimate

    t(unit)   = Σ over its pipes of  warp instructions · 32 / (results per clock · throttle)  · share / clock
    share     = the part of the launch that the busiest SM gets = ceil(blocks / SMs) / blocks
                (· 4 / resident warps when fewer than 4 warps leave some of the SM's four partitions idle)
    t(L2)     = 32 bytes · (sectors read + sectors written) / L2 bandwidth
    t(memory) = 32 bytes · distinct sectors / read bandwidth
    t         = launch overhead + the largest of all t(unit), t(L2), t(memory)

The part with the largest t limits the launch. t is a floor, not a forecast. It is wrong by construction where
 - latency is not hidden: few warps with long chains of dependent instructions or loads (see `occupancy`);
 - one PTX instruction becomes several machine instructions: 64-bit integers (2), division and square root
   (about 10), fp64 functions;
 - the assembler merges several PTX instructions into one: three-input adds and logic, address arithmetic;
 - data comes from L1, which is not modelled: t(L2) is then too long;
 - data is read again after it has left L2: t(memory) is then too short;
 - several atomics go to one address, or the clock falls under power limits.
"""

import re
from dataclasses import dataclass, fields
from itertools import takewhile
from math import prod

from kernels.assembler import find_assembler, run_assembler
from kernels.compile import Compiled, supported_ccs

SECTOR = 32                       # bytes: the unit of traffic between L1, L2 and memory
TENSOR_PASS = 1024                # multiply-adds of fp16: what cards.py calls an instruction of tensor cores
BANKS_WIDTH = 128                 # bytes per clock: 32 banks of 4 bytes; the path to L1 is as wide


# ---- counts ------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Counts:
    """What one launch did. Pipes count warp instructions: each counts 1, however many of its 32 lanes are active."""
    dp4a: int = 0
    dp2a: int = 0
    imad: int = 0                 # 32-bit integer multiply and multiply-add
    fp32: int = 0                 # float32 add, subtract, multiply
    ffma: int = 0                 # float32 fused multiply-add
    half2: int = 0                # packed fp16
    half: int = 0                 # scalar fp16, and fp16 -> float32
    fp64: int = 0
    tensor: int = 0               # mma of any size: `multiply_adds` has what they compute
    integer: int = 0              # add, logic, shift, compare, select, minimum, byte permute; float32 too
    special: int = 0              # reciprocal, exp2, log2, sine, square root; bit counts
    conversion: int = 0           # between integers and floats, and from float32 to fp16
    shuffle: int = 0
    vote: int = 0
    shared: int = 0
    global_: int = 0
    local: int = 0
    atomic: int = 0
    barrier: int = 0              # barriers and fences
    branch: int = 0
    move: int = 0                 # register moves, parameters, constants: mostly gone in machine code

    multiply_adds: int = 0        # of fp16 by tensor instructions; two of int8 take as long as one and count as one
    lane_dp4a: int = 0            # dp4a times active lanes, summed: N · K / 4 for a matrix-vector product
    read_sectors: int = 0         # 32-byte sectors, summed over the warp instructions of global memory
    written_sectors: int = 0
    distinct_sectors: int = 0     # each sector that the launch touches counts once: what memory must move
    read_bytes: int = 0           # asked for by active lanes; read_bytes / (32 · read_sectors) is the efficiency
    written_bytes: int = 0
    shared_passes: int = 0        # over the 32 banks; the lanes served in one pass use different banks or one word
    shared_replays: int = 0       # passes beyond the least: 1 per instruction (8-byte accesses 2, 16-byte ones 4)

    def __add__(self, other):
        """The Counts of two launches together."""
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


# The names that `pipe_of` gives: the fields of Counts up to "move".
PIPES = tuple(takewhile(lambda name: name != "multiply_adds", (f.name for f in fields(Counts))))


# ---- PTX instruction -> pipe -------------------------------------------------------------------------------

# The pipe of an arithmetic instruction depends on the type of its operands: integers first, then _FLOATS.
_FLOATS = ("f32", "f16", "f16x2", "f64")
_BY_TYPE = {
    "add sub": ("integer", "fp32", "half", "half2", "fp64"),
    "mul": ("imad", "fp32", "half", "half2", "fp64"),
    "mad fma": ("imad", "ffma", "half", "half2", "fp64"),
    "min max abs neg set setp": ("integer", "integer", "half", "half2", "fp64"),
    "selp slct": ("integer", "integer", "integer", "integer", "integer"),
    "div rem rcp sqrt rsqrt": ("special", "special", "special", "special", "fp64"),
    "ex2 lg2 sin cos tanh": ("special", "special", "special", "special", "special"),
}
_BY_NAME = {
    "dp4a": "dp4a",
    "dp2a": "dp2a",
    "mul24 mad24 madc": "imad",
    "addc subc sad and or xor not cnot lop3 shl shr shf bfe bfi": "integer",
    "bmsk szext prmt testp copysign isspacep": "integer",
    "popc clz brev bfind fns": "special",
    "shfl": "shuffle",
    "vote activemask match redux elect": "vote",
    "atom red": "atomic",
    "bar barrier membar fence": "barrier",
    "bra brx ret exit call vprintf trap brkpt nanosleep": "branch",
    "mov cvta barrier_result cp": "move",
    "prefetch prefetchu discard": "global_",
    "mma wmma wgmma": "tensor",
    "ldmatrix stmatrix": "shared",
}
_PIPE_BY_TYPE = {name: row for names, row in _BY_TYPE.items() for name in names.split()}
_PIPE_BY_NAME = {name: pipe for names, pipe in _BY_NAME.items() for name in names.split()}
_PIPE_OF_SPACE = {"shared": "shared", "local": "local", "param": "move", "const": "move"}


def pipe_of(opcode, types=()):
    """The pipe (a name in PIPES) of a PTX instruction: `opcode` "mad", `types` its modifiers, ("lo", "s32").

    ValueError: an opcode that is in no table.
    """
    if opcode in ("ld", "ldu", "st"):
        return next((_PIPE_OF_SPACE[t] for t in types if t in _PIPE_OF_SPACE), "global_")
    if opcode == "cvt":
        return _pipe_of_cvt(*[t for t in types if t.lstrip("usbf")[:1].isdigit()][-2:])
    if opcode in _PIPE_BY_NAME:
        return _PIPE_BY_NAME[opcode]
    if opcode not in _PIPE_BY_TYPE:
        raise ValueError(f"no pipe is known for the PTX instruction {'.'.join((opcode, *types))}")
    kind = types[-1] if types else ""
    return _PIPE_BY_TYPE[opcode][1 + _FLOATS.index(kind) if kind in _FLOATS else 0]


def _pipe_of_cvt(to, of):
    """Integers convert on the alu; fp16 -> float32 is an addition on the half unit (HADD2.F32)."""
    if "f" not in to and "f" not in of:
        return "integer"
    return "half" if (to, of) == ("f32", "f16") else "conversion"


def multiply_adds(types):
    """What an mma with these modifiers adds to Counts.multiply_adds."""
    rows, columns, depth = map(int, re.search(r"\bm(\d+)n(\d+)k(\d+)\b", " ".join(types)).groups())
    together = 4 if (rows, columns, depth) == (8, 8, 4) else 1      # a warp makes four of the smallest
    return together * rows * columns * depth // (2 if "s8" in types else 1)


# ---- occupancy ---------------------------------------------------------------------------------------------

def registers_used(ptx, cc):
    """Registers per thread that a kernel takes when ptxas assembles its PTX for compute capability `cc`.

    That is the code which a card loads. Where the toolkit no longer knows `cc`, the oldest architecture that it knows
    stands for it. Needs no GPU. RuntimeError: there is no ptxas.
    """
    assembler = find_assembler()
    if assembler is None:
        raise RuntimeError("registers cannot be counted: ptxas is missing; "
                           "pip install the nvcc of this CUDA version")
    cc = max(tuple(cc), supported_ccs()[0])
    ptx = re.sub(r"^\.target sm_\d+", f".target sm_{cc[0]}{cc[1]}", ptx, flags=re.M)    # older ones lack instructions
    _, said = run_assembler(assembler[0], Compiled("a kernel", (), "", ptx), cc)
    return int(re.search(r"Used (\d+) registers", said)[1])


def blocks_per_sm(block_size, registers, shared_bytes, card):
    """How many blocks one SM of a CardModel holds at a time; `registers` per thread, `shared_bytes` per block.

    A warp gets registers in portions of 256, that is 8 per thread, and each of the SM's partitions has a quarter of the
    SM's registers. A block gets shared memory in portions of 256 bytes. ValueError: not even one block fits.
    """
    warps = -(-block_size // 32)
    per_warp = 32 * (-(-max(registers, 1) // 8) * 8)
    warps_by_registers = 4 * (card.registers // 4 // per_warp)
    shared = max(1, -(-shared_bytes // 256) * 256 + card.shared_reserved)
    fitting = {
        f"{block_size} threads": card.max_warps // warps if block_size <= 1024 else 0,
        f"{registers} registers for each of {block_size} threads": warps_by_registers // warps,
        f"{shared_bytes} bytes of shared memory":
            card.shared_per_sm // shared if shared_bytes <= card.shared_per_block else 0,
    }
    for what, n in fitting.items():
        if n == 0:
            raise ValueError(f"a block with {what} does not fit an SM of the {card.name}")
    return min(card.max_blocks, *fitting.values())


# ---- estimate ----------------------------------------------------------------------------------------------

@dataclass(frozen=True, repr=False)
class Estimate:
    """An estimated time. per_pipe_seconds: the seconds that each unit, "L2" and "memory" would take alone."""
    card: object
    seconds: float
    limiting: str
    per_pipe_seconds: dict
    blocks_per_sm: int
    occupancy: float              # resident warps / the most an SM holds
    waves: float                  # all blocks / the blocks that the card holds at once

    def __repr__(self):
        return (f"estimate for {self.card.name}: {1e6 * self.seconds:.2f} µs, limited by {self.limiting} "
                f"({self.blocks_per_sm} blocks per SM, occupancy {self.occupancy:.0%}, "
                f"{self.waves:.2f} waves)")


def estimate(counts, grid, block, registers, shared_bytes, card):
    """The Estimate of one launch on `card` by the formula at the top of this file.

    grid, block: int or tuple. registers: per thread, 32 bits each, see `registers_used`. shared_bytes: per
    block, static and dynamic. ValueError: the block does not fit an SM.
    """
    n_blocks, block_size = prod(_tuple(grid)), prod(_tuple(block))
    if not n_blocks or not block_size:
        raise ValueError(f"an empty launch: grid {grid}, block {block}")
    warps = -(-block_size // 32)
    resident = blocks_per_sm(block_size, registers, shared_bytes, card)
    busiest = -(-n_blocks // card.n_sms)  # how many blocks the busiest SM runs in all
    partitions = min(4, warps * min(resident, busiest))

    seconds = {}
    for unit in card.units:
        clocks = _clocks(unit, counts, card) * busiest / n_blocks
        seconds[unit.name] = clocks * (4 / partitions if unit.per_partition else 1) / card.clock
    seconds["L2"] = SECTOR * (counts.read_sectors + counts.written_sectors) / card.l2_bandwidth
    seconds["memory"] = SECTOR * counts.distinct_sectors / card.read_bandwidth
    limiting = max(seconds, key=seconds.get)
    total = card.launch_seconds + seconds[limiting]
    if seconds[limiting] < card.launch_seconds:
        limiting = "launch"
    return Estimate(card, total, limiting, seconds, resident, warps * resident / card.max_warps,
                    n_blocks / (resident * card.n_sms))


def _clocks(unit, counts, card):
    """Clocks that the whole launch would keep one SM's `unit` busy."""
    return sum(_passes(unit, pipe, counts) * 32 / (unit.per_clock * card.throttle.get(pipe, 1.0))
               for pipe in unit.pipes)


def _passes(unit, pipe, counts):
    """Warp instructions of `pipe`, or the passes that the load/store unit needs for them if these are more. On tensor
    cores, a pass is as many multiply-adds as cards.py gives an instruction."""
    instructions = getattr(counts, pipe)
    if unit.name == "tensor":
        return counts.multiply_adds / TENSOR_PASS
    if unit.name == "lsu" and pipe == "shared":
        return max(instructions, counts.shared_passes)
    if unit.name == "lsu" and pipe == "global_":
        return max(instructions, SECTOR * (counts.read_sectors + counts.written_sectors) / BANKS_WIDTH)
    return instructions


def _tuple(n):
    return n if isinstance(n, tuple) else (n,)


# ---- report ------------------------------------------------------------------------------------------------

def report(title, counts, estimates):
    """A table as text: what the launch did, then the estimated µs of each part, a column per estimate."""
    lines = [title, ""]
    for name in [f.name for f in fields(Counts) if getattr(counts, f.name)]:
        lines.append(f"  {name.rstrip('_'):<18}{getattr(counts, name):>16,}")
    lines += ["", "  estimated µs      " + "".join(f"{e.card.name:>18}" for e in estimates)]
    parts = [p for e in estimates for p, t in e.per_pipe_seconds.items() if t]
    for part in dict.fromkeys(parts):
        cells = [(e.per_pipe_seconds.get(part), " ◄" if part == e.limiting else "  ") for e in estimates]
        lines.append(f"  {part:<18}" + "".join(f"{'-' if t is None else f'{1e6 * t:.2f}':>16}{mark}"
                                               for t, mark in cells))
    marks = [" ◄" if e.limiting == "launch" else "  " for e in estimates]
    lines.append(f"  {'with launch':<18}" + "".join(f"{1e6 * e.seconds:>16.2f}{mark}"
                                                   for e, mark in zip(estimates, marks)))
    lines.append(f"  {'occupancy':<18}" + "".join(f"{e.occupancy:>16.0%}  " for e in estimates))
    return "\n".join(lines)
