"""Attention of a decode step in each KV format, at long contexts: how fast it is on a card, and what binds it.

    python -m benchmarks.attend_decode [--formats q8+3 ...] [--contexts N ...] [--profile q8+3 ...] [--card CARD]

The kernels are compiled first, several at once. Then launches over all layers, one after the other, are recorded and
replayed; the fastest replay counts. GB/s counts each key and value once, and the per cent are of what a kernel
reaches here that only reads. --profile asks `ncu` for the counters of a launch at the longest context. The benchmark
prints Markdown tables for results.md.
"""

import argparse
import csv
import io
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from cli.ending import run_program
from kernels.assembler import cubin_path, find_assembler, run_assembler
from kernels.attend_decode import WARPS, Sample, Scratch, attend_decode, attend_kernel
from kernels.bench import model_of, replay_seconds
from kernels.compile import CACHE_DIR, compile_kernel, launches_overlap, store, supported_ccs
from kernels.emulated.estimate import blocks_per_sm
from kernels.kv_cache import Pages
from kernels.kv_formats import KV_FORMATS, PAGE
from kernels.open import open_cards
from kernels.probe import measure_memory
from kernels.records import Places
from kernels.rope import QWEN35, heads_of, sample_qkv, upload_qkv

CONTEXTS = 18_400, 131_072
COMPILERS = 10              # processes at once
ROUNDS = 3
TILE = 16                   # pages of random rows, repeated along the context


# ---- compilation -------------------------------------------------------------------------------------------


def compile_all(card, names, group: int) -> dict:
    """Format -> (registers, bytes of shared memory, bytes spilled) of its kernel; a process for each."""
    def one(name):
        numbers = group, *card.cc, int(launches_overlap(card.cc))
        command = [sys.executable, "-m", "benchmarks.attend_decode", "--compile", name, *map(str, numbers)]
        return subprocess.run(command, capture_output=True, text=True)

    with ThreadPoolExecutor(min(COMPILERS, os.cpu_count() or 1)) as pool:
        runs = dict(zip(names, pool.map(one, names)))
    found = {}
    for name, run in runs.items():
        numbers = re.findall(r"^sizes (\d+) (\d+) (\d+)$", run.stdout, re.M)
        if numbers:
            found[name] = tuple(map(int, numbers[-1]))
        else:
            print(f"{name}: {(run.stderr.strip().splitlines() or ['no words'])[-1]}", flush=True)
    return found


def compile_one(name: str, group: int, major: int, minor: int, early: int):
    """Compiles the kernel of a plain step into the caches of kernels, and prints its sizes."""
    cc, format = (major, minor), KV_FORMATS[name]
    x, i, page = "float32[1]", ("int32[1]",) * 3, (f"{np.dtype(format.keys.dtype).name}[1]",) * 2
    types = "int8[1]", x, x, "uint32[1]", x, x, x, "int32[1]", x, *page, *i, *["uint32"] * 10, "float32"
    compiled = compile_kernel(attend_kernel(format, group, *QWEN35, True, bool(early), 1), types, cc)
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
    """Layers of keys and values in one format at one context."""

    def __init__(self, card, format, heads, context, n_layers):
        rng, width = np.random.default_rng(0), heads.n_heads * heads.head_dim
        self.card, self.n_layers = card, n_layers
        self.layers = [layer_of(card, format, heads, context, rng) for _ in range(n_layers)]
        self.scratch = Scratch.alloc(card, 1, heads.n_heads, heads.head_dim)
        self.out = card.alloc((1, width), np.int8), card.alloc((1, width // 32), np.float32)

    def launch(self):
        """All layers, one after the other."""
        for layer in self.layers:
            attend_decode(self.card, self.out, *layer, self.scratch, 1, early=True)

    def measure(self) -> float:
        """Seconds of a layer."""
        self.launch()
        with self.card.record() as recording:
            self.launch()
        recording.replay()
        return min(replay_seconds(self.card, recording) for _ in range(ROUNDS)) / self.n_layers


def row_of(card, name: str, heads, context: int, n_layers: int, sizes: tuple, read: float) -> str:
    """A line of the table."""
    seconds = Timed(card, KV_FORMATS[name], heads, context, n_layers).measure()
    n_bytes = KV_FORMATS[name].token_bytes(heads.n_kv_heads, heads.head_dim) * (context + 1)
    n_registers, n_shared, spilled = sizes
    cells = (f"{context:,}", name, f"{1e6 * seconds:.1f}", f"{n_bytes / seconds / 1e9:,.0f}",
             f"{n_bytes / seconds / read:.0%}", n_registers, spilled, resident(card, n_registers, n_shared))
    return f"| {' | '.join(map(str, cells))} |"


def resident(card, n_registers: int, n_shared: int) -> str:
    """Blocks that an SM of the card holds, where it is known."""
    model = model_of(card)
    return str(blocks_per_sm(32 * WARPS, n_registers, n_shared, model)) if model and n_registers else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--formats", nargs="+", choices=KV_FORMATS, default=list(KV_FORMATS))
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--heads", nargs=2, type=int, default=(16, 4), metavar=("QUERY", "KV"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--profile", nargs="+", choices=KV_FORMATS, default=(), help="ask ncu about these")
    parser.add_argument("--card")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compile", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        name, *numbers = options.compile
        return compile_one(name, *map(int, numbers))
    (card, *_), heads = open_cards(options.card), heads_of(*options.heads)
    if options.once:                # for ncu
        Timed(card, KV_FORMATS[options.formats[0]], heads, options.contexts[0], 2).launch()
        return card.synchronize()
    sizes = compile_all(card, options.formats, heads.group) if card.kind == "cuda" else {}
    read = 1e9 * measure_memory(card)[0].value
    print(f"{heads.n_heads}/{heads.n_kv_heads} heads, {options.layers} layers, {card.describe()}, "
          f"a kernel that only reads: {read / 1e9:,.0f} GB/s\n\n"
          "| tokens | format | us of a layer | GB/s | of reading | registers | spilled | blocks an SM |\n"
          "|---:|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for context in options.contexts:
        for name in options.formats:
            print(row_of(card, name, heads, context, options.layers, sizes.get(name, (0, 0, 0)), read), flush=True)
    show_profiles([(name, profiled(name, options.contexts[-1], options.heads)) for name in options.profile])


# ---- counters ----------------------------------------------------------------------------------------------


SECTIONS = "SpeedOfLight", "ComputeWorkloadAnalysis", "SchedulerStats", "WarpStateStats", "MemoryWorkloadAnalysis"
COUNTERS = re.compile("|".join((
    r"gpu__time_duration\.sum", r"(gpu__)?dram_\w+\.(avg\.pct|sum)\S*", r"smsp__inst_(executed|issued)\.sum",
    r"smsp__issue_active\.avg.*", r"smsp__warps_(active|eligible)\.avg.*", r"sm__cycles_active\.avg",
    r"sm__(inst_executed_)?pipe_\w+\.avg\.pct_of_peak_sustained_active",
    r"l1tex__data_(pipe_lsu_wavefronts|bank_conflicts)\w*\.avg(\.pct.*)?",
    r"smsp__average_warps?_\w*issue_stalled_(?!.*not_issued)\w+\.ratio")))
PROFILE_SECONDS = 60


def profiled(name: str, context: int, heads) -> dict:
    """Of one launch: counter -> value, as ncu gives them."""
    command = ["ncu", "--csv", "--page", "raw", "--clock-control", "none", "--kernel-name", "regex:attend",
               "--launch-skip", "1", "--launch-count", "1", *(f"--section={section}" for section in SECTIONS),
               sys.executable, "-m", "benchmarks.attend_decode", "--once", "--formats", name, "--contexts",
               str(context), "--heads", *map(str, heads)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=PROFILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"ncu, {name}: {str(error)[:300]}")
        return {}
    rows = list(csv.reader(io.StringIO("".join(line for line in run.stdout.splitlines(True) if line.startswith('"')))))
    if len(rows) < 3:
        print(f"ncu, {name}: {(run.stdout + run.stderr)[-600:]}")
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
