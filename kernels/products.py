"""Which kernels multiply several rows on a card: those of dp4a, or those of tensor cores. Their bits are equal.

                rows of prompts           of those, experts         rows of decode steps
    dp4a        kernels/q8_gemm.py        kernels/expert_gemm.py    kernels/q8_gemv.py, decode_tile.py
    tensor      kernels/tensor_gemm.py    kernels/expert_gemm.py    kernels/decode_tensor.py
                from Volta on             from Volta on             from sm_80 on

A card's name does not say which of the two is faster: vendors slow single instructions down, dp4a on some cards,
tensor cores on others. So `measure_products` finds it out, once on each card and for each weight format:

    1  how many products of int8 a second both instructions make in loops on registers (kernels/probe.py). Where `mma`
       makes fewer than dp4a, tensor cores cannot win: nothing else is measured, and no product of theirs is compiled.
    2  whether a product of random matrices [N, K] and ROWS rows has the same bits by both kernels, and how long both
       take. They take turns, and the shortest time counts.

What was found is kept beside the report of the probe. Times are found anew when one of the two kernels has changed.

The engine's own products have other sizes. Each kernel's `relative_time` knows how its time depends on the size. The
time of tensor cores is multiplied by a factor of the card and the format. The factor makes the ratio of the two times
at [N, K] and ROWS the measured one. For each size, the kernel with the shorter time multiplies. Decode steps are not
measured: with enough rows and large matrices they use tensor cores if the measured product does. Products of experts
have the factor of the format. All experts of a layer share tiles of rows, so one pipe makes all their products.

Nothing depends on the choice but time. So it is harmless if a measurement was disturbed; `--probe` repeats it.
"""

import contextlib
import functools
import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kernels import decode_tensor, expert_gemm, probe, q8_gemm, synthetic, tensor_gemm
from kernels.card import CardError, OutOfMemory
from kernels.compile import CompileError
from kernels.formats import FORMATS
from kernels.operands import Matrix, Quantized

N, K, ROWS = 4096, 4096, 2048                            # sizes of the product that is measured
TURNS, AHEAD = 8, 6                                      # turns of each kernel; launches before the timed one
COMPARED = 64                                            # rows at each end of the product whose bits are compared
FILE_FORMAT = 1                                          # of the file in which measurements are kept


class Times(NamedTuple):
    """Seconds of the product that is measured, and whether both kernels have given the same bits."""
    dp4a: float
    tensor: float
    is_equal: bool


@dataclass
class Found:
    """What was measured on a card. rates: "dp4a", and a key of probe.FORMS -> 1e12 operations of int8 per second in a
    loop on registers. times: name of a weight format -> Times."""
    rates: dict = field(default_factory=dict)
    times: dict = field(default_factory=dict)

    def may_win(self, form):
        """Whether products of tensor cores may be faster."""
        return self.rates.get(form, 0.0) > self.rates.get("dp4a", math.inf)

    def gain(self, form):
        """How many times as fast as dp4a tensor cores are in these loops; 1 where that is not known."""
        return self.rates[form] / self.rates["dp4a"] if {form, "dp4a"} <= self.rates.keys() else 1.0


# ---- the choice --------------------------------------------------------------------------------------------------

def instruction_of(card):
    """The key of tensor_gemm.INSTRUCTIONS for a card, or None. An emulated card that is like another one takes that
    one's."""
    like = getattr(card, "like", None)
    if card.kind != "emulated" or like is None:
        return tensor_gemm.instruction_of(card)
    return next((key for key, (oldest, _) in tensor_gemm.INSTRUCTIONS.items() if like.cc >= oldest), None)


def form_of(instruction):
    """The key of probe.FORMS: the `mma` of an instruction, of which there may be several kernels."""
    return instruction.split()[0]


class Products:
    """The products of several rows, of prompts and of decode steps, on one card.

    wish: "dp4a" and "tensor" name the kernels; "auto" takes for each size those that are faster, by what
    `measure_products` has found. On a card where nothing was measured, that is dp4a. found: a Found, or None.
    CardError: "tensor" on a card that has no tensor cores.
    """

    def __init__(self, card, wish="auto", found=None):
        self.card, self.wish, self.found = card, wish, found or Found()
        if wish == "tensor" and instruction_of(card) is None:
            raise CardError(f"{card.name} has no tensor cores that multiply int8")
        self.uses_tensor, self.experts_use_tensor = map(functools.cache, (self.uses_tensor, self.experts_use_tensor))

    def __repr__(self):
        return f"<products of prompts on {self.card.name}: {self.describe() or 'dp4a'}>"

    @classmethod
    def of(cls, card, wish="auto"):
        """With what was found on a card."""
        return cls(card, wish, None if wish == "dp4a" else load(card))

    def multiply(self, y, stride, w, x, rows, add=False, *, concurrent=False):
        """y <- (y +) x . w^T, as `gemm` of kernels/q8_gemm.py."""
        arguments = self.card, y, stride, w, x, rows, add
        if self.uses_tensor(w.format, w.n, w.k, (rows, rows) if concurrent else (rows,)):
            tensor_gemm.gemm(*arguments, concurrent=concurrent, instruction=instruction_of(self.card))
        else:
            q8_gemm.gemm(*arguments, concurrent=concurrent)

    def uses_tensor(self, format, n, k, sizes):
        """Whether tensor cores make a product. sizes: its rows; or those of several that run side by side."""
        if self.wish != "auto":
            return self.wish == "tensor"
        if format not in self.factors:
            return False
        on_tensor = tensor_gemm.relative_time(self.card, n, k, sizes, FORMATS[format])
        return on_tensor * self.factors[format] < q8_gemm.relative_time(self.card, n, k, sizes)

    def takes(self, w, columns, swiglu=False):
        """Whether tensor cores make a product of a decode step. swiglu: of gate and up, quantised together. Emulated
        cards are faster without."""
        form = instruction_of(self.card) or ""
        return (form.startswith("m16n8k32") and self.card.kind != "emulated"
                and decode_tensor.takes(self.card, FORMATS[w.format], w.n, w.k, columns, swiglu)
                and self.uses_tensor(w.format, N, K, (ROWS,)))

    def gemv(self, y, stride, w, x, columns, add=False, *, stream=None):
        """A product that it `takes`, as `gemv` of kernels/q8_gemv.py."""
        decode_tensor.tensor_gemv(self.card, y, stride, w, x, columns, add, converts=self.converts, stream=stream)

    def gemv_swiglu(self, out, w, x, columns, *, stream=None):
        """The same of gate and up: out <- quantised silu(gate . x) * (up . x)."""
        decode_tensor.tensor_gemv_swiglu(self.card, out, w, x, columns, converts=self.converts, stream=stream)

    @property
    def converts(self):
        """Whether the card converts integers fast."""
        return "mixed" in instruction_of(self.card)

    def tiles_of_experts(self, experts, n_pairs):
        """The expert_gemm.Tiles of a layer's products. experts: the Experts of each product."""
        n_experts, products = len(experts[0].places), tuple((each.format, each.n, each.k) for each in experts)
        on_tensor = self.experts_use_tensor(products, n_experts, n_pairs)
        return expert_gemm.tiles_for(n_pairs, n_experts, instruction_of(self.card) if on_tensor else None)

    def experts_use_tensor(self, products, n_experts, n_pairs):
        """Whether tensor cores make the products of a layer's experts. products: (format, n, k) of each."""
        if self.wish != "auto":
            return self.wish == "tensor" and all(format in FORMATS for format, _, _ in products)
        if not all(format in self.factors for format, _, _ in products):
            return False
        times = [(expert_gemm.relative_time(self.card, n, k, n_experts, (n_pairs,)),
                  expert_gemm.relative_time(self.card, n, k, n_experts, (n_pairs,), instruction_of(self.card))
                  * self.factors[format]) for format, n, k in products]
        by_dp4a, on_tensor = map(sum, zip(*times))
        return on_tensor < by_dp4a

    @functools.cached_property
    def factors(self):
        """Name of each format that was measured -> what the relative times of tensor cores are multiplied by. Formats
        with wrong bits are left out."""
        expected = q8_gemm.relative_time(self.card, N, K, [ROWS])
        return {name: times.tensor / times.dp4a * expected
                / tensor_gemm.relative_time(self.card, N, K, [ROWS], FORMATS[name])
                for name, times in self.found.times.items() if times.is_equal}

    def relative_time(self, n, k, sizes):
        """The time of a product, in the unit of q8_gemm.relative_time. sizes: the rows of all micro-batches."""
        return self.shorter(functools.partial(q8_gemm.relative_time, self.card, n, k, sizes),
                            functools.partial(tensor_gemm.relative_time, self.card, n, k, sizes))

    def relative_time_of_experts(self, n, k, n_experts, sizes):
        """The same of a product of experts. sizes: the pairs of all micro-batches."""
        time = functools.partial(expert_gemm.relative_time, self.card, n, k, n_experts, sizes)
        return self.shorter(time, lambda: time(instruction_of(self.card)))

    def shorter(self, by_dp4a, on_tensor):
        """The time of a product by the kernel that makes it. by_dp4a(), on_tensor(): the relative times. Plans do not
        know the format of a product: the mean of all formats that were measured stands for it."""
        found, time = list(self.factors.values()), by_dp4a()
        if self.wish == "dp4a" or self.wish == "auto" and not found:
            return time
        if not found:                               # "tensor", as asked: the loops on registers must tell
            return time / self.found.gain(form_of(instruction_of(self.card)))
        other = on_tensor() * sum(found) / len(found)
        return other if self.wish == "tensor" else min(other, time)

    def describe(self, formats=None):
        """Which kernels multiply and why, for people. formats: the names of those that count, by default all that were
        measured. None where there was nothing to choose from."""
        found, instruction = self.found, instruction_of(self.card)
        if formats is not None and not formats:
            return None
        form = instruction and form_of(instruction)
        on_tensor = f"tensor cores (mma {form})"
        if self.wish != "auto":
            return f"{on_tensor if self.wish == 'tensor' else 'dp4a'}, as asked"
        if not found.rates:
            return None if self.card.kind == "emulated" else "dp4a; tensor cores were not measured"
        if not found.may_win(form):
            return (f"dp4a with {found.rates['dp4a']:.1f} TOPS on registers; {on_tensor} give "
                    f"{found.rates.get(form, 0.0):.1f}")
        counted = {name: times for name, times in found.times.items() if formats is None or name in formats}
        if not counted:
            return f"dp4a; the products of {on_tensor} were not measured"
        figures = [f"{name} {1e3 * times.tensor:.2f} and {1e3 * times.dp4a:.2f}" if times.is_equal else
                   f"{name} dp4a alone, for other bits" for name, times in counted.items()]
        wins = any(self.uses_tensor(name, N, K, (ROWS,)) for name in counted)
        return (f"{on_tensor + ' where they are faster' if wins else f'dp4a, mostly faster than {on_tensor}'}; "
                f"ms for {N} x {K} x {ROWS} by them and by dp4a: {', '.join(figures)}")


# ---- what is kept ------------------------------------------------------------------------------------------------

@functools.cache
def fingerprint():
    """A hash of the source of both kernels: times of other versions do not count."""
    texts = [Path(module.__file__).read_bytes() for module in (q8_gemm, tensor_gemm)]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def path_of(card):
    """The file that keeps what was found on a card."""
    report = probe.path_of(card)
    return report.with_name(f"{report.stem}-products.json")


def save(card, found):
    probe.write_json(path_of(card), {"format": FILE_FORMAT, "kernels": fingerprint(), **asdict(found)})


def load(card):
    """The Found that is kept of a card, or None. It has no times if they are of other versions of the kernels."""
    try:
        data = json.loads(path_of(card).read_text())
        found = Found({key: positive(rate) for key, rate in data["rates"].items()},
                      {name: Times(positive(dp4a), positive(tensor), is_equal is True)
                       for name, (dp4a, tensor, is_equal) in data["times"].items() if name in FORMATS})
        if data["format"] != FILE_FORMAT:
            return None
        return found if data["kernels"] == fingerprint() else Found(found.rates)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):      # of whatever is no such file
        return None


def positive(number):
    """The number. ValueError: it is none, or not above zero, or has no end."""
    if not isinstance(number, (int, float)) or not 0 < number < math.inf:
        raise ValueError(f"{number!r} is no rate or time")
    return number


# ---- measurement -------------------------------------------------------------------------------------------------

def measure_products(card, formats=("Q8_0",), anew=False):
    """Finds out what is not known yet of a card, for weights in these formats, and keeps it. anew: also what is known.
    Returns whether anything was measured.

    It takes a tenth of a second for each format, after the kernels are compiled, and about 100 MB of the card's memory.
    The card should have nothing else to do. Where memory is too short for that, or a kernel does not compile, times
    stay unknown, and products go by dp4a. An emulated card is not measured: its processor does not multiply faster by
    tensor cores.
    """
    instruction, before = instruction_of(card), load(card) or Found()
    if card.kind == "emulated" or instruction is None or not formats:
        return False
    if anew:
        formats, before = {*formats, *before.times}, Found()
    found = Found(before.rates or measure_rates(card, form_of(instruction)), dict(before.times))
    missing = sorted(set(formats) - found.times.keys())
    if missing and found.may_win(form_of(instruction)):
        with contextlib.suppress(OutOfMemory, CompileError):
            found.times |= measure_times(card, missing, instruction)
    if found == before:
        return False
    with contextlib.suppress(OSError):              # then it is measured again at the next start
        save(card, found)
    return True


def measure_rates(card, form):
    """The `rates` of a Found: from the report of the probe, or from a loop of each instruction."""
    report = probe.load(card)
    if report and report.value(form):
        return {"dp4a": probe.dot_rates(report)[probe.fastest_dot(report)], form: report.value(form)}
    return {pipe.key: probe.measure_pipe(card, pipe).value for pipe in (probe.PIPES[0], probe.FORMS[form][1])}


def measure_times(card, formats, instruction):
    """{format: Times} of the product [N, K] and ROWS rows with random weights in each of these formats."""
    x = random_rows(card)
    ys = [card.alloc((ROWS, N), np.float32) for _ in range(2)]
    weights = {name: Matrix(name, N, K, *(card.alloc(*array) for array in FORMATS[name].arrays(N, K)))
               for name in formats}
    launches = {name: (functools.partial(q8_gemm.gemm, card, ys[0], N, w, x, ROWS),
                       functools.partial(tensor_gemm.gemm, card, ys[1], N, w, x, ROWS, instruction=instruction))
                for name, w in weights.items()}
    with card.collecting() as needed:
        for both in launches.values():
            for launch in both:
                launch()
    card.compile_kernels(needed)                    # several at a time
    found = {}
    for name, w in weights.items():
        synthetic.random_matrix(card, FORMATS[name], w.values, w.scales, N, K, 3)
        seconds = seconds_in_turn(card, launches[name])
        found[name] = Times(*seconds, have_equal_ends(card, *ys))
    return found


def random_rows(card):
    """Quantized [ROWS, K] of random numbers."""
    x, n_words, threads = Quantized(card.alloc((ROWS, K), np.int8), card.alloc((ROWS, K // 32), np.float32)), \
        ROWS * K // 4, synthetic.THREADS
    card.launch(synthetic.random_words, -(-n_words // threads), threads, x.q.reshape(-1), n_words, 1, False, False)
    synthetic.random_uniform(card, x.d, 0.5, 1.5, 2)
    return x


def have_equal_ends(card, *arrays):
    """Whether the first and the last COMPARED rows of two arrays of float32 have the same bits."""
    ends = slice(0, COMPARED), slice(max(ROWS - COMPARED, 0), ROWS)
    return all(np.array_equal(*(card.download(array[end]).view(np.uint32) for array in arrays)) for end in ends)


def seconds_in_turn(card, launches):
    """The shortest seconds of each launch. The host queues the timed launch while the card is busy with AHEAD others: a
    busy host may take longer to queue a launch than the card takes to run it, and then the host would be timed."""
    best = [math.inf] * len(launches)
    for _ in range(TURNS):
        for i, launch in enumerate(launches):
            for _ in range(AHEAD):
                launch()
            best[i] = min(best[i], probe.event_seconds(card, launch))
    return best
