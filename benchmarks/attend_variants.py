"""Ways to go through keys and values of few bits in a decode step: the same bits, and how fast each is on a card.

    python -m benchmarks.attend_variants [--formats q8+3 ...] [--contexts N ...] [--variants staged ...] [--card CARD]
    ncu --set full python -m benchmarks.attend_variants --once staged --formats q8+3 --contexts 131040

staged      kernels/attend_staged.py: what the engine launches
registers   benchmarks/attend_registers.py, what it launched before: a lane loads the words of its own dims, 4 bytes at
            a time, and keeps them in registers; 32 lanes share each sum of a score
rolled      staged, but the keys of a warp stay a loop in machine code: less code, in case warps wait for instructions
halved      staged, with two blocks for each KV head, for half the query heads each: twice the warps, and keys and
            values come twice, the second time from the second-level cache

First the kernels are compiled, several at once. Then launches over all layers, one after the other, are recorded and
replayed in turns; the best round counts. Before that, the bits of each are compared with those of `staged`, which is
always among them; at last, each is compared with float64 at odd lengths. GB/s counts each key and value once, and the
per cent are of what a kernel reaches here that only reads. At 131,072 tokens units grow from 32 pages to 64, and there
are half as many blocks: the two longer contexts lie on both sides of that.
"""

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np

from benchmarks import attend_registers
from cli.ending import run_program
from kernels import attend_decode, attend_staged
from kernels.assembler import find_assembler, run_assembler
from kernels.attend_decode import ALONE, WARPS, Sample
from kernels.bench import model_of, replay_seconds
from kernels.compile import compile_kernel, supported_ccs
from kernels.emulated.estimate import blocks_per_sm
from kernels.kv_cache import Pages
from kernels.kv_formats import KV_FORMATS, PAGE
from kernels.limits import FLOAT16
from kernels.open import open_cards
from kernels.probe import measure_memory
from kernels.records import Places
from kernels.rope import QWEN35, heads_of, sample_qkv, upload_qkv

FORMATS = [name for name, format in KV_FORMATS.items() if format.expands]
CONTEXTS = 18_400, 131_040, 131_104
CHECKED = ((4, 1, (0, 609, 63)), QWEN35), ((3, 1, (130, 4157)), QWEN35)     # odd lengths; units of one page and of two
COMPILERS = 10              # processes at once
ROUNDS = 3
TILE = 16                   # pages of random rows, repeated along the context


# ---- variants ----------------------------------------------------------------------------------------------


VARIANTS = {"staged": (attend_staged.walk_of, 1), "registers": (attend_registers.walk_of, 1),
            "rolled": (partial(attend_staged.walk_of, rolled=True), 1), "halved": (attend_staged.walk_of, 2)}


@contextmanager
def launching(variant: str):
    """Inside, attend_decode launches this variant."""
    walk_of, parts = VARIANTS[variant]
    make, shares_of = attend_decode.attend_kernel, attend_decode.shares_of
    kernels = KERNELS.setdefault(variant, {})

    def attend_kernel(*args):
        if args not in kernels:
            kernels[args] = make.__wrapped__(*args)
        return kernels[args]

    attend_decode.walk_of, attend_decode.attend_kernel = walk_of, attend_kernel
    attend_decode.shares_of = lambda group: parts if group % parts == 0 and group <= ALONE else shares_of(group)
    try:
        yield attend_kernel
    finally:
        attend_decode.walk_of, attend_decode.attend_kernel = attend_staged.walk_of, make
        attend_decode.shares_of = shares_of


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
    """Compiles what a job needs, into the cache of kernels, and prints its sizes."""
    cc, (kernel, types) = (major, minor), kernel_of(KV_FORMATS[name], variant, group, bool(early))
    compiled = compile_kernel(kernel, types, cc)
    if find_assembler() is None or cc not in supported_ccs():
        raise SystemExit("nothing to assemble it with")
    _, words = run_assembler(find_assembler()[0], compiled, cc)
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

    def bits(self, variant: str) -> list:
        """The outputs of all layers as words, stored on poisoned memory."""
        found = []
        with launching(variant):
            for layer in self.layers:
                for array in (*self.out, self.scratch.partials):
                    self.card.poison(array)
                attend_decode.attend_decode(self.card, self.out, *layer, self.scratch, 1, early=True)
                found += [self.card.download(array).view(np.uint8).tobytes() for array in self.out]
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


def rows_of(card, name: str, heads, context: int, options, sizes: dict, read: float):
    """Lines of the table of a format at a context."""
    timed = Timed(card, KV_FORMATS[name], heads, context, options.layers)
    variants = ["staged"] if name == FLOAT16 else options.variants
    wanted, same = timed.bits("staged"), {}
    for variant in variants:
        try:
            same[variant] = timed.bits(variant) == wanted
            timed.record(variant)
        except Exception as error:
            print(f"{name}, {variant}: {type(error).__name__}: {str(error).strip()[:200]}", flush=True)
    for _ in range(ROUNDS):
        timed.measure()
    n_bytes = KV_FORMATS[name].token_bytes(heads.n_kv_heads, heads.head_dim) * (context + 1)
    for variant, seconds in timed.best.items():
        n_registers, n_shared, spilled = sizes.get((name, variant), (0, 0, 0))
        cells = (f"{context:,}", name, variant, "yes" if same[variant] else "NO", f"{1e6 * seconds:.1f}",
                 f"{n_bytes / seconds / 1e9:,.0f}", f"{n_bytes / seconds / read:.0%}", n_registers, spilled,
                 resident(card, n_registers, n_shared))
        yield f"| {' | '.join(map(str, cells))} |"


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
    parser.add_argument("--card")
    parser.add_argument("--compile", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        name, variant, *numbers = options.compile
        return compile_one(name, variant, *map(int, numbers))
    options.variants = list(dict.fromkeys(["staged", *options.variants]))
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
    jobs = [(FLOAT16, "staged"), *((name, variant) for name in options.formats for variant in options.variants)]
    sizes = compile_all(card, [(*job, heads.group, *card.cc, early) for job in jobs]) if card.kind == "cuda" else {}
    read = 1e9 * measure_memory(card)[0].value
    print(f"{heads.n_heads}/{heads.n_kv_heads} heads, {options.layers} layers, {card.describe()}, "
          f"a kernel that only reads: {read / 1e9:,.0f} GB/s", flush=True)
    lines = []
    for context in options.contexts:
        for name in (FLOAT16, *options.formats):
            try:
                lines += rows_of(card, name, heads, context, options, sizes, read)
                print(lines[-1], flush=True)
            except Exception as error:
                print(f"{name} at {context}: {type(error).__name__}: {str(error).strip()[:200]}", flush=True)
    for name in options.formats:
        check(card, name, options.variants)
    print("\n| tokens | format | variant | same bits | us of a layer | GB/s | of reading | registers | spilled | "
          "blocks an SM |\n|---:|---|---|---|---:|---:|---:|---:|---:|---:|")
    print("\n".join(lines))


if __name__ == "__main__":
    run_program(main)
