"""Ways to go through keys and values in a decode step, and how fast each is on a card.

    python -m benchmarks.attend_variants [--formats q8+3 ...] [--contexts N ...] [--variants even ...] [--card CARD]
    python -m benchmarks.attend_variants --profile q8+3 --contexts 131072
    ncu --set full python -m benchmarks.attend_variants --once even --formats q8+3 --contexts 131072

former      benchmarks/attend_former.py: what the engine launches; a unit is a power of two of pages
short       the same bits by fewer instructions: kernels/attend_staged.py and kernels/kv_formats.py as they are now
even        short, and a unit is so many pages, the same number for all units, that there are at most 64. At 131,072
            tokens that is 252 blocks instead of 132, at 18,400 it is 232 instead of 144. Up to 4,096 tokens it has the
            same bits, beyond that its own, the same on every card
registers   benchmarks/attend_registers.py, before `former`: a lane loads the words of its own dims, 4 bytes at a time,
            and keeps them in registers; 32 lanes share each sum of a score
rolled      even, but the keys of a warp stay a loop in machine code: less code, in case warps wait for instructions
halved      short, with two blocks for each KV head, for half the query heads each: twice the warps, and keys and
            values come twice, the second time from the second-level cache

First the kernels are compiled, several at once. Then launches over all layers, one after the other, are recorded and
replayed in turns; the best round counts. Before that, the bits of each are compared with those of the first variant
that cuts a sequence in the same way, and the numbers of the others with `former`: a row's largest difference, as a
share of its largest magnitude. GB/s counts each key and value once, and the per cent are of what a kernel reaches here
that only reads. --check compares each with float64 at odd lengths, too. --profile asks `ncu` what binds the first
variant and the fastest one of a format at the longest context.
"""

import argparse
import csv
import io
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.types import uint32

from benchmarks import attend_former, attend_registers
from cli.ending import run_program
from kernels import attend_decode, attend_staged
from kernels.assembler import cubin_path, find_assembler, run_assembler
from kernels.attend_decode import ALONE, UNITS, WARPS, Sample
from kernels.bench import model_of, replay_seconds
from kernels.compile import CACHE_DIR, compile_kernel, store, supported_ccs
from kernels.emulated.estimate import blocks_per_sm
from kernels.kv_cache import Pages
from kernels.kv_formats import KV_FORMATS, PAGE
from kernels.limits import FLOAT16
from kernels.open import open_cards
from kernels.probe import measure_memory
from kernels.records import Places
from kernels.rope import QWEN35, heads_of, sample_qkv, upload_qkv

FORMATS = [name for name, format in KV_FORMATS.items() if format.expands]
CONTEXTS = 18_400, 131_072
THOROUGH = "q8+3", "q3"     # formats that all variants are asked for
CHECKED = ((4, 1, (0, 609, 63)), QWEN35), ((3, 1, (130, 4157)), QWEN35)     # odd lengths; units of one page and of two
COMPILERS = 10              # processes at once
ROUNDS = 3
TILE = 16                   # pages of random rows, repeated along the context


# ---- variants ----------------------------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def cut_evenly(last_page):
    """As `cut` of kernels/attend_decode.py."""
    pages = uint32(uint32(last_page // uint32(UNITS)) + uint32(1))
    return pages, uint32(last_page // pages)


class Variant(NamedTuple):
    """What attend_decode is to launch."""

    walk_of: object
    cut: object = attend_decode.cut
    parts: int = 1              # blocks of a KV head
    everywhere: bool = True     # whether every format has it
    halves: bool = False        # whether float16 has it

    def serves(self, name: str) -> bool:
        """Whether it is something of its own in this format."""
        if name == FLOAT16:
            return self.halves
        return (self.everywhere or name in THOROUGH) and not (name == "q8" and self is VARIANTS["short"])


VARIANTS = {"former": Variant(attend_former.walk_of, halves=True), "short": Variant(attend_staged.walk_of),
            "even": Variant(attend_staged.walk_of, cut_evenly, halves=True),
            "registers": Variant(attend_registers.walk_of, everywhere=False),
            "rolled": Variant(partial(attend_staged.walk_of, rolled=True), cut_evenly, everywhere=False),
            "halved": Variant(attend_staged.walk_of, parts=2, everywhere=False)}


@contextmanager
def launching(name: str):
    """Inside, attend_decode launches this variant."""
    variant, former = VARIANTS[name], {}
    make, shares_of = attend_decode.attend_kernel, attend_decode.shares_of
    kernels = KERNELS.setdefault(name, {})

    def attend_kernel(*args):
        if args not in kernels:
            kernels[args] = make.__wrapped__(*args)
        return kernels[args]

    def shares(group):
        parts = variant.parts
        return parts if parts > 1 and group % parts == 0 and group <= ALONE else shares_of(group)

    changed = {"walk_of": variant.walk_of, "cut": variant.cut, "attend_kernel": attend_kernel, "shares_of": shares}
    for attribute, value in changed.items():
        former[attribute] = getattr(attend_decode, attribute)
        setattr(attend_decode, attribute, value)
    try:
        yield attend_kernel
    finally:
        for attribute, value in former.items():
            setattr(attend_decode, attribute, value)


KERNELS = {}                # of each variant, by their arguments


def kernel_of(format, variant: str, group: int, early: bool, quantized=True):
    """(the kernel of a plain step, its argument types)."""
    x, i, page = "float32[1]", ("int32[1]",) * 3, (f"{np.dtype(format.keys.dtype).name}[1]",) * 2
    with launching(variant) as attend_kernel:
        parts = attend_decode.shares_of(group)
        kernel = attend_kernel(format, group // parts, *QWEN35, quantized, early, 1, 1, parts)
    return kernel, ("int8[1]" if quantized else x, x, x, "uint32[1]", x, x, x, "int32[1]", x, *page, *i,
                    *["uint32"] * 10, "float32")


# ---- compilation -------------------------------------------------------------------------------------------


def compile_all(card, jobs) -> dict:
    """(format, variant) -> (registers, bytes of shared memory, bytes spilled) of what is timed; a process for each."""
    def one(job):
        command = [sys.executable, "-m", "benchmarks.attend_variants", "--compile", *map(str, job)]
        return subprocess.run(command, capture_output=True, text=True)

    with ThreadPoolExecutor(min(COMPILERS, os.cpu_count() or 1)) as pool:
        runs = list(pool.map(one, jobs))
    found = {}
    for job, run in zip(jobs, runs):
        numbers = re.findall(r"^sizes (\d+) (\d+) (\d+)$", run.stdout, re.M)
        if numbers:
            found[job[:2]] = tuple(map(int, numbers[-1]))
        else:
            print(f"{job[0]}, {job[1]}: {(run.stderr.strip().splitlines() or ['no words'])[-1]}", flush=True)
    return found


def compile_one(name: str, variant: str, group: int, major: int, minor: int, early: int):
    """Compiles what a job needs, into the caches of kernels, and prints its sizes."""
    cc, (kernel, types) = (major, minor), kernel_of(KV_FORMATS[name], variant, group, bool(early))
    compiled = compile_kernel(kernel, types, cc)
    if find_assembler() is None or cc not in supported_ccs():
        raise SystemExit("nothing to assemble it with")
    code, words = run_assembler(find_assembler()[0], compiled, cc)
    store(cubin_path(compiled, cc, CACHE_DIR), code)
    n_registers, n_shared = re.search(r"Used (\d+) registers", words), re.search(r"(\d+) bytes smem", words)
    print("sizes", n_registers[1], n_shared[1], sum(map(int, re.findall(r"(\d+) bytes spill", words))))


# ---- timing ------------------------------------------------------------------------------------------------


def random_rows(kind, rng, shape):
    """Rows of random codes, or random halves, in the shape [pages, KV heads, 64, elements]."""
    if not kind.expands:
        return rng.standard_normal(shape, np.float32).astype(np.float16)
    rows = rng.integers(0, 1 << 32, shape, np.uint32)
    rows[..., -1] = int(np.float16(0.02 if kind.by_codes else 0.5).view(np.uint16)) * 0x10001
    return rows


def layer_of(card, format, heads, context, rng):
    """The Sample of one answer at position `context`, on a card, with pages of its own in a random order."""
    n = context // PAGE + 1
    table = rng.permutation(n).astype(np.int32)[None]
    k, v = (np.resize(random_rows(kind, rng, (min(n, TILE), heads.n_kv_heads, PAGE, kind.row(heads.head_dim))),
                      (n, heads.n_kv_heads, PAGE, kind.row(heads.head_dim))) for kind in format.kinds.values())
    positions = np.array([context], np.int32)
    qkv = upload_qkv(card, sample_qkv(rng, heads, np.array([positions] * 3, np.int32), scale=1))
    return Sample(qkv, Pages(format, card.upload(k), card.upload(v), card.upload(table)),
                  Places(card.zeros(1, np.int32), card.upload(positions)))


class Timed:
    """Layers of keys and values in one format at one context, through which variants are launched."""

    def __init__(self, card, format, heads, context, n_layers):
        rng = np.random.default_rng(0)
        self.card, self.context, self.n_layers = card, context, n_layers
        self.layers = [layer_of(card, format, heads, context, rng) for _ in range(n_layers)]
        self.scratch = attend_decode.Scratch.alloc(card, 1, heads.n_heads, heads.head_dim)
        self.width = heads.n_heads * heads.head_dim
        self.out = card.alloc((1, self.width), np.int8), card.alloc((1, self.width // 32), np.float32)
        self.best, self.recordings = {}, {}

    def launch(self):
        """All layers, one after the other."""
        for layer in self.layers:
            attend_decode.attend_decode(self.card, self.out, *layer, self.scratch, 1, early=True)

    def outputs(self, variant: str) -> list:
        """Of all layers: int8 numbers and scales, stored on poisoned memory."""
        found = []
        with launching(variant):
            for layer in self.layers:
                for array in (*self.out, self.scratch.partials):
                    self.card.poison(array)
                attend_decode.attend_decode(self.card, self.out, *layer, self.scratch, 1, early=True)
                found.append([self.card.download(array) for array in self.out])
        return found

    def record(self, variant: str):
        with launching(variant), self.card.record() as recording:
            self.launch()
        self.recordings[variant], self.best[variant] = recording, float("inf")

    def measure(self):
        """A round: each variant once, after a replay that warms it up."""
        for variant, recording in self.recordings.items():
            recording.replay()
            seconds = min(replay_seconds(self.card, recording) for _ in range(3)) / self.n_layers
            self.best[variant] = min(self.best[variant], seconds)


def check(card, name: str, variants):
    """Prints a line for each variant whose results are wrong."""
    for variant in variants:
        for case in CHECKED:
            try:
                with launching(variant):
                    attend_decode.check(card, KV_FORMATS[name], case)
            except Exception as error:
                print(f"{name}, {variant}, {case}: {type(error).__name__}: {str(error).strip()[:200]}", flush=True)


def likeness(got, wanted) -> str:
    """Whether outputs have the same bits, else their largest difference as a share of the largest magnitude."""
    if all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for pair in zip(got, wanted) for x, y in zip(*pair)):
        return "same"
    x, y = (np.array([q.reshape(-1, 32) * d.reshape(-1, 1) for q, d in each], np.float64) for each in (got, wanted))
    return f"{np.abs(x - y).max() / np.abs(y).max():.1e}"


def rows_of(card, name: str, heads, context: int, options, sizes: dict, read: float):
    """(seconds of a layer by variant, lines of the table) of a format at a context."""
    timed = Timed(card, KV_FORMATS[name], heads, context, options.layers)
    first, likely = {}, {}
    for variant in (each for each in options.variants if VARIANTS[each].serves(name)):
        try:
            got = timed.outputs(variant)
            like = first.setdefault(VARIANTS[variant].cut, (variant, got))
            other = like if like[0] != variant else next(iter(first.values()))
            likely[variant] = f"{likeness(got, other[1])} as {other[0]}" if other[0] != variant else ""
            timed.record(variant)
        except Exception as error:
            print(f"{name}, {variant}: {type(error).__name__}: {str(error).strip()[:200]}", flush=True)
    for _ in range(ROUNDS):
        timed.measure()
    n_bytes, lines = KV_FORMATS[name].token_bytes(heads.n_kv_heads, heads.head_dim) * (context + 1), []
    for variant, seconds in timed.best.items():
        n_registers, n_shared, spilled = sizes.get((name, variant), (0, 0, 0))
        cells = (f"{context:,}", name, variant, likely[variant], f"{1e6 * seconds:.1f}",
                 f"{n_bytes / seconds / 1e9:,.0f}", f"{n_bytes / seconds / read:.0%}", n_registers, spilled,
                 resident(card, n_registers, n_shared))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return timed.best, lines


def resident(card, n_registers: int, n_shared: int) -> str:
    """Blocks that an SM of the card holds, where it is known."""
    model = model_of(card)
    return str(blocks_per_sm(32 * WARPS, n_registers, n_shared, model)) if model and n_registers else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--heads", nargs=2, type=int, default=(16, 4), metavar=("QUERY", "KV"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--once", choices=VARIANTS, help="launch this variant, for a profiler, and end")
    parser.add_argument("--check", action="store_true", help="compare each with float64, too")
    parser.add_argument("--profile", nargs="+", choices=FORMATS, default=(), help="ask ncu about these")
    parser.add_argument("--card")
    parser.add_argument("--compile", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        name, variant, *numbers = options.compile
        return compile_one(name, variant, *map(int, numbers))
    (card, *_), heads = open_cards(options.card), heads_of(*options.heads)
    if options.once:
        for name in options.formats:
            with launching(options.once):
                Timed(card, KV_FORMATS[name], heads, options.contexts[0], 2).launch()
        return card.synchronize()
    measure(card, heads, options)


def measure(card, heads, options):
    """Prints the table."""
    early = int(attend_decode.launches_overlap(card.cc))
    names = (FLOAT16, *options.formats)
    jobs = [(name, variant) for name in names for variant in options.variants if VARIANTS[variant].serves(name)]
    sizes = compile_all(card, [(*job, heads.group, *card.cc, early) for job in jobs]) if card.kind == "cuda" else {}
    read = 1e9 * measure_memory(card)[0].value
    print(f"{heads.n_heads}/{heads.n_kv_heads} heads, {options.layers} layers, {card.describe()}, "
          f"a kernel that only reads: {read / 1e9:,.0f} GB/s", flush=True)
    lines, best = [], {}
    for context in options.contexts:
        for name in names:
            try:
                best[name], new = rows_of(card, name, heads, context, options, sizes, read)
                lines += new
                print("\n".join(new), flush=True)
            except Exception as error:
                print(f"{name} at {context}: {type(error).__name__}: {str(error).strip()[:200]}", flush=True)
    if options.check:
        for name in options.formats:
            check(card, name, [variant for variant in options.variants if VARIANTS[variant].serves(name)])
    columns = []
    for name in options.profile:
        fastest = min(best.get(name) or options.variants, key=lambda variant: best.get(name, {}).get(variant, 0))
        for variant in dict.fromkeys([options.variants[0], fastest]):
            columns.append((f"{name} {variant}", profiled(name, variant, options.contexts[-1])))
    show_profiles(columns)
    print("\n| tokens | format | variant | bits | us of a layer | GB/s | of reading | registers | spilled | "
          "blocks an SM |\n|---:|---|---|---|---:|---:|---:|---:|---:|---:|")
    print("\n".join(lines))


# ---- counters ----------------------------------------------------------------------------------------------


SECTIONS = "SpeedOfLight", "ComputeWorkloadAnalysis", "SchedulerStats", "WarpStateStats", "MemoryWorkloadAnalysis"
COUNTERS = re.compile("|".join((
    r"gpu__time_duration\.sum", r"dram__throughput.*pct.*", r"dram__bytes_read\.sum", r"smsp__inst_executed\.sum",
    r"smsp__issue_active.*", r"smsp__warps_(active|eligible).*", r"sm__warps_active.*", r"sm__cycles_active\.avg",
    r"sm__inst_executed_pipe_\w+\.\w+\.pct_of_peak_sustained_active", r"sm__pipe_\w+\.pct_of_peak_sustained_active",
    r"l1tex__data_(pipe_lsu_wavefronts|bank_conflicts)\w*\.\w+(\.pct.*)?",
    r"smsp__average_warps?_\w*issue_stalled_(?!.*not_issued)\w+\.ratio")))
PROFILE_SECONDS = 60


def profiled(name: str, variant: str, context: int) -> dict:
    """Of one launch: counter -> value, as ncu gives them."""
    program = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    command = [program, "--csv", "--page", "raw", "--clock-control", "none", "--kernel-name", "regex:attend",
               "--launch-skip", "1", "--launch-count", "1", *(f"--section={section}" for section in SECTIONS),
               sys.executable, "-m", "benchmarks.attend_variants", "--once", variant, "--formats", name, "--contexts",
               str(context)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=PROFILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"ncu, {name} {variant}: {str(error)[:300]}")
        return {}
    rows = list(csv.reader(io.StringIO("".join(line for line in run.stdout.splitlines(True) if line.startswith('"')))))
    if len(rows) < 3:
        print(f"ncu, {name} {variant}: {(run.stdout + run.stderr)[-600:]}")
        return {}
    return {counter: f"{value} {unit}" for counter, unit, value in zip(*rows[:3]) if COUNTERS.fullmatch(counter)}


def show_profiles(columns):
    """Prints counters side by side; none that is zero everywhere."""
    if not any(found for _, found in columns):
        return
    print(f"\n| counter of ncu | {' | '.join(name for name, _ in columns)} |\n|---|{'---:|' * len(columns)}")
    for counter in sorted({counter for _, found in columns for counter in found}):
        values = [found.get(counter, "") for _, found in columns]
        if any(re.search("[1-9]", value) for value in values):
            print(f"| {counter} | {' | '.join(values)} |")


if __name__ == "__main__":
    run_program(main)
