"""The cards that estimates are made for: what each part can do per clock, and where the figure comes from.

A *pipe* is a class of instructions (`PIPES` in estimate.py). A *unit* is a piece of hardware that the instructions of
one or more pipes pass through. The times of pipes that share a unit add up. A pipe may pass through several units, and
each of them can be the limit.

The table gives results per clock of one SM's unit. A warp instruction has 32 results, one per lane, so it takes
32 / (results per clock) clocks:

    unit       GV100  TU104  GH100   pipes
    issue        128    128    128   all
    fma           64     64    128   dp4a dp2a imad fp32 ffma
    fma heavy      -      -     64   dp4a dp2a imad
    alu           64     64     64   integer vote
    half          64     64    128   half2 half
    special       16     16     16   special, and conversion but on GH100 (64)
    fp64          32      2     64   fp64
    lsu           32     32     32   shared global_ local shuffle atomic

Trailing comments say where a figure comes from:
    measured     by this project on the card itself, or by the author named
    spec         NVIDIA's data sheet or white paper
    guide        CUDA C++ Programming Guide, table "Throughput of Native Arithmetic Instructions"
    Jia          Z. Jia et al., Dissecting the NVIDIA Volta GPU (arXiv 1804.06826), Turing T4 GPU (1903.07486)
    computed     from figures above
    (recalled)   quoted from memory and not read again: doubt these first
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Unit:
    """A piece of an SM that the instructions of `pipes` pass through."""
    name: str
    per_clock: int                  # results
    pipes: frozenset
    per_partition: bool = True      # whether each of the SM's four partitions has a quarter; a warp stays in one


def _unit(name, per_clock, pipes, per_partition=True):
    return Unit(name, per_clock, frozenset(pipes.split()), per_partition)


# Each of the 4 partitions issues one instruction of 32 results per clock: spec, all of these cards. The pipe `move`
# passes through no unit, because the assembler leaves almost nothing of it.
_ISSUE = _unit("issue", 128, "dp4a dp2a imad fp32 ffma integer vote half2 half special conversion fp64 "
                             "tensor shuffle shared global_ local atomic barrier branch")
_ALU = _unit("alu", 64, "integer vote")                    # guide; vote 64 (recalled)
_LSU = _unit("lsu", 32, "shared global_ local shuffle atomic", per_partition=False)    # guide: shuffle; spec
_SPECIAL = _unit("special", 16, "special conversion")      # guide: special functions 16, float conversions 16

VOLTA = (
    _ISSUE,
    _unit("fma", 64, "dp4a dp2a imad fp32 ffma"),          # guide; dp4a on the FMA pipe: NVIDIA forum 302018
    _ALU,
    _unit("half", 64, "half2 half"),                       # guide: 128 half results
    _SPECIAL,
    _unit("fp64", 32, "fp64"),                             # guide
    _unit("tensor", 16, "tensor"),                         # spec: 512 fma; one instruction is 1,024 of them
    _LSU,
)

TURING = tuple(_unit("fp64", 2, "fp64") if u.name == "fp64" else u for u in VOLTA)    # guide, 7.5

HOPPER = (
    _ISSUE,
    _unit("fma", 128, "dp4a dp2a imad fp32 ffma"),         # measured: fp32 fma 126
    _unit("fma heavy", 64, "dp4a dp2a imad"),              # measured: dp4a 63.6, dp2a and imad 63.7
    _ALU,
    _unit("half", 128, "half2 half"),                      # measured: 126
    _unit("special", 16, "special"),                       # guide
    _unit("conversion", 64, "conversion"),                 # guide (recalled)
    _unit("fp64", 64, "fp64"),                             # guide
    _unit("tensor", 64, "tensor"),                         # computed from spec, 989 TFLOPS dense fp16
    _LSU,
)


def _ampere(fma, half, fp64, tensor):
    return (
        _ISSUE,
        _unit("fma", fma, "dp4a dp2a imad fp32 ffma"),     # guide
        _unit("fma heavy", 64, "dp4a dp2a imad"),          # guide: imad; dp4a beside it: NVIDIA forum 302018
        _ALU,
        _unit("half", half, "half2 half"),                 # white papers: fp16 4 x fp32 on GA100, else 1 x
        _SPECIAL,
        _unit("fp64", fp64, "fp64"),                       # guide
        _unit("tensor", tensor, "tensor"),                 # computed from the white papers' dense fp16 peaks
        _LSU,
    )


UNITS = {(7, 0): VOLTA, (7, 5): TURING, (8, 0): _ampere(64, 128, 32, 32), (8, 6): _ampere(128, 64, 2, 16),
         (8, 9): _ampere(128, 64, 2, 16), (9, 0): HOPPER}    # by compute capability


@dataclass(frozen=True)
class CardModel:
    """What one card can do. Clock in Hz, sizes in bytes, speeds in bytes per second."""
    name: str
    cc: tuple                           # compute capability
    n_sms: int
    clock: float
    units: tuple                        # of Unit
    memory: int
    read_bandwidth: float               # global memory, reads only
    l2: int
    l2_bandwidth: float
    link_bandwidth: float               # host to card, one direction
    shared_per_sm: int
    shared_per_block: int
    max_warps: int                      # resident on one SM
    max_blocks: int                     # resident on one SM
    launch_seconds: float               # from one kernel of a recorded sequence to the next
    shared_reserved: int = 0            # of each block's shared memory, taken by the system
    registers: int = 65_536             # guide, per SM, all of these cards; 32 bits each
    throttle: Mapping = field(default_factory=dict, hash=False)   # pipe -> fraction of its rate that is left

    @property
    def key(self):
        """Its name on a command line: "cmp-100-210", "v100"."""
        words = self.name.lower().split()
        return "-".join(words if words[0] == "cmp" else words[:1])

    def rate(self, pipe):
        """Results per second of one pipe alone on the whole card, throttle included."""
        per_clock = min(u.per_clock for u in self.units if pipe in u.pipes)
        return per_clock * self.throttle.get(pipe, 1.0) * self.n_sms * self.clock

    def dp4a_tops(self):
        """int8 peak in 1e12 operations per second: 4 multiplications and 4 additions per result."""
        return 8 * self.rate("dp4a") / 1e12


_KB, _MB, _GB = 1 << 10, 1 << 20, 1 << 30
_GRAPH_LAUNCH = 1.4e-6                  # measured on the H100, graph replay; an assumption for the others

CMP_100_210 = CardModel(
    name="CMP 100-210", cc=(7, 0), units=VOLTA,
    n_sms=68,                           # measured (seed project, issue "CMP vs V100?"); 80 elsewhere is wrong
    clock=1380e6,                       # measured there; it is locked
    memory=16 * _GB,                    # spec
    read_bandwidth=818e9,               # measured there, copy 760; 829 computed from 810 MHz x 4096 bit
    l2=6 * _MB,                         # spec of the GV100; not verified on this card
    l2_bandwidth=2155e9,                # as the V100 at equal clock: not verified on this card
    link_bandwidth=0.25e9,              # PCIe 1.0 x1
    shared_per_sm=96 * _KB, shared_per_block=96 * _KB, max_warps=64, max_blocks=32,    # guide, 7.0
    launch_seconds=_GRAPH_LAUNCH,
    throttle={
        "tensor": 1 / 16,               # measured there: 5.7 to 6.4 TFLOPS of 96
        "fp64": 1 / 16,                 # measured there: 0.38 TFLOPS of 6.0
        "dp4a": 1.0,                    # disputed: without throttle 48 TOPS, but that author's bench shows 17
        "ffma": 1.0,                    # measured there: 9.9 of 12.0 TFLOPS
    },
)

V100 = CardModel(
    name="V100 PCIe 16 GB", cc=(7, 0), units=VOLTA,
    n_sms=80, clock=1380e6,             # spec: boost
    memory=16 * _GB,                    # spec
    read_bandwidth=830e9,               # class of what users measure; spec 897
    l2=6 * _MB,                         # spec
    l2_bandwidth=2155e9,                # Jia (recalled)
    link_bandwidth=15.75e9,             # PCIe 3.0 x16, computed
    shared_per_sm=96 * _KB, shared_per_block=96 * _KB, max_warps=64, max_blocks=32,    # guide, 7.0
    launch_seconds=_GRAPH_LAUNCH,
)

T4 = CardModel(
    name="T4", cc=(7, 5), units=TURING,
    n_sms=40, clock=1590e6,             # spec: boost; at 70 W the clock sags well below it
    memory=16 * _GB,                    # spec
    read_bandwidth=320e9,               # spec, an upper bound; Jia measures 220 (recalled)
    l2=4 * _MB,                         # spec
    l2_bandwidth=1270e9,                # Jia (recalled)
    link_bandwidth=15.75e9,             # PCIe 3.0 x16, computed
    shared_per_sm=64 * _KB, shared_per_block=64 * _KB, max_warps=32, max_blocks=16,    # guide, 7.5
    launch_seconds=_GRAPH_LAUNCH,
)

H100 = CardModel(
    name="H100 SXM 80 GB", cc=(9, 0), units=HOPPER,
    n_sms=132,                          # spec
    clock=1980e6,                       # measured: 133 TOPS of dp4a in a register-only loop
    memory=80 * _GB,                    # spec
    read_bandwidth=2970e9,              # measured, read-only kernel; copy 2,780; spec 3,350
    l2=50 * _MB,                        # spec
    l2_bandwidth=5500e9,                # Chips and Cheese on the PCIe card (recalled)
    link_bandwidth=63e9,                # PCIe 5.0 x16, computed
    shared_per_sm=228 * _KB, shared_per_block=227 * _KB, max_warps=64, max_blocks=32,  # guide, 9.0
    shared_reserved=_KB,                # guide, 8.0 and later
    launch_seconds=_GRAPH_LAUNCH,
)

CARDS = (CMP_100_210, V100, T4, H100)
