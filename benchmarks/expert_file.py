"""How fast a model decodes whose experts lie in a file: `python -m benchmarks.expert_file [MODEL] [--card CARD]
[--expert-memory GB] [--host-memory GB] [--tokens N] [--expert-hits P]`.

MODEL is a synthetic mixture of experts, synthetic:35b-a3b:q4_k unless another is named. The plan is told that this
machine has no more than --host-memory. So the engine writes all experts into its file without a name
(engine/expert_file.py), in the folder of its cache, and keeps those that were needed last in a window. The file has as
many bytes as the experts, and is gone at the end.

The table has a line for each part of the answer. Before each step, what the page cache has of the file is dropped: so
what is read comes from the disk. That is not timed. A step is timed by itself, until its token is on the host.

    hits        of the pairs of a row and an expert, those whose expert is in the card's memory; and of the others
                those whose expert is in the window
    disk        bytes of experts that a token brings into the window
    bound       tokens/s if a step were nothing but these reads, at the disk's rate. The rate is measured before the
                answer, with reads like those of a step: as many experts of a layer as a token uses, chosen by chance
"""

import argparse
import contextlib
import os
import time
from dataclasses import dataclass
from unittest import mock

import numpy as np

import qengine
from cli.bench import Bench, check_expert_hits
from cli.ending import run_program
from engine import plan
from engine.expert_store import ExpertStore
from kernels.card import show_bytes
from kernels.open import open_cards

MODEL, EXPERT_MEMORY, HOST_MEMORY = "synthetic:35b-a3b:q4_k", 4.0, 6.0      # GB
TOKENS, PARTS = 64, 4               # of the answer; lines of the table
READS = 64                          # layers whose experts are read to measure the disk, in several rounds if need be


@dataclass(frozen=True)
class Part:
    """Some decode steps of one answer, one after the other."""

    n_tokens: int
    seconds: float
    hits: int               # pairs whose expert the card had
    misses: int             # pairs whose expert it had not
    n_read: int             # experts that came from the disk
    n_bytes: int            # their bytes
    disk_rate: float        # bytes per second

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.seconds

    @property
    def bound(self) -> float:
        """Tokens/s at most; infinite where nothing was read."""
        return self.n_tokens * self.disk_rate / self.n_bytes if self.n_bytes else float("inf")

    def __str__(self):
        pairs, missed = self.hits + self.misses, max(self.misses, 1)
        return (f"{self.n_tokens:>6}{self.tokens_per_s:>11.2f}{self.hits / pairs:>10.1%}"
                f"{1 - min(self.n_read / missed, 1):>11.1%}{self.n_bytes / self.n_tokens / 1e6:>13.1f}"
                f"{self.n_bytes / self.seconds / 1e6:>11.0f}{self.disk_rate / 1e6:>11.0f}{self.bound:>10.2f}"
                f"{self.tokens_per_s / self.bound:>9.1%}")


HEAD = (f"{'tokens':>6}{'tokens/s':>11}{'on card':>10}{'in window':>11}{'MB / token':>13}{'MB/s':>11}"
        f"{'disk MB/s':>11}{'bound':>10}{'reached':>9}")


@contextlib.contextmanager
def machine_of(n_bytes: int):
    """Inside, plans find a machine with so much memory, all of it free."""
    with mock.patch.multiple(plan, machine_bytes=lambda: n_bytes, free_memory=lambda: n_bytes):
        yield


def drop_page_cache(store: ExpertStore):
    """What was written to the file is on the disk then, and nothing of it in memory."""
    file = store.file.file.fileno()
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def disk_rate(store: ExpertStore, random: np.random.Generator) -> float:
    """Bytes per second of reads like those of a step."""
    n_bytes, seconds, layers = 0, 0.0, store.window.layers
    for i in range(READS):
        matrices = layers[i % len(layers)]
        n_experts = len(matrices[0].places) - 1
        chosen = random.choice(n_experts, store.n_used, replace=False)
        wanted = [(each.start + int(expert) * each.record.nbytes, np.empty(each.record.nbytes, np.uint8))
                  for expert in chosen for each in matrices]
        drop_page_cache(store)
        started = time.perf_counter()
        store.file.read(wanted)
        seconds += time.perf_counter() - started
        n_bytes += sum(into.size for _, into in wanted)
    return n_bytes / seconds


def counts_of(stage: qengine.Stage) -> np.ndarray:
    """Hits, misses, experts and bytes that came from the disk, up to the last step that has ended."""
    stage.worker.ask(stage.store.before_step).result()          # takes in its choices
    counts, window = stage.store.counts, stage.store.window
    return np.array([counts.hits, counts.misses, window.n_read, window.bytes_read])


def decode(bench: Bench, n_tokens: int, rate: float) -> Part:
    """The next steps, of n_tokens tokens."""
    stage, seconds = bench.stages[0], 0.0
    before = counts_of(stage)
    for _ in range(n_tokens):
        drop_page_cache(stage.store)
        started = time.perf_counter()
        bench.pipeline.step(qengine.StepShape(1), 0).read()
        seconds += time.perf_counter() - started
    return Part(n_tokens, seconds, *(counts_of(stage) - before).tolist(), rate)


def run(model: str, card, expert_memory: int, host_memory: int, n_tokens: int, hits: float | None) -> list[Part]:
    """Loads the model and prints what its decode does. Memory in bytes. Raises RequestError if `hits` is not for this
    model; SystemExit if its experts would not lie in a file."""
    opened = qengine.open_model(model)
    check_expert_hits(opened)
    started = time.perf_counter()
    with machine_of(host_memory):
        engine = qengine.load(opened, card=[card], ctx=n_tokens + 64, slots=1, draft="off", checkpoint_memory=0,
                              checkpoint_host_memory=0, expert_memory=expert_memory)
    with contextlib.closing(engine):
        store = engine.pipeline.stages[0].store
        if not (store and store.file):
            raise SystemExit(f"{opened.name}: its experts fit {show_bytes(host_memory)} of host memory or the card, so "
                             "none lie in a file: give it less --host-memory and --expert-memory")
        print(f"{opened.name}: {show_bytes(store.file.nbytes)} of experts in a file in {store.file.folder}, loaded in "
              f"{time.perf_counter() - started:.1f} s; {store}")
        bench = Bench(engine, [], 1, 1, hits)
        bench.prompt(1)
        rate = disk_rate(store, bench.random)
        bench.place_step(1)
        bench.pipeline.step(qengine.StepShape(1), 0).read()     # what is new is recorded
        print(HEAD)
        parts = []
        for i in range(PARTS):
            parts.append(decode(bench, n_tokens * (i + 1) // PARTS - n_tokens * i // PARTS, rate))
            print(parts[-1], flush=True)
    return parts


def main():
    parser = argparse.ArgumentParser(description="Decode with experts in a file.")
    parser.add_argument("model", nargs="?", default=MODEL, help=f"a synthetic mixture of experts (default: {MODEL})")
    parser.add_argument("--card", help="cuda:0, emulated, ... (default: a real card, else the emulated one)")
    parser.add_argument("--expert-memory", metavar="GB", type=float, default=EXPERT_MEMORY,
                        help="memory of the card for experts (default: %(default)s)")
    parser.add_argument("--host-memory", metavar="GB", type=float, default=HOST_MEMORY,
                        help="memory that plans find on this machine (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the answer (default: %(default)s)")
    parser.add_argument("--expert-hits", metavar="P", type=float,
                        help="make up the experts: each is with the chance P one of a few hot ones of its layer "
                             "(default: the random router chooses, evenly)")
    choice = parser.parse_args()
    memory = (int(size * 2**30) for size in (choice.expert_memory, choice.host_memory))
    run(choice.model, open_cards(choice.card)[0], *memory, choice.tokens, choice.expert_hits)


if __name__ == "__main__":
    run_program(main)
