"""What a format of keys and values costs, and what a long prompt takes.

    python -m benchmarks.kv speeds [MODEL] [--formats q8 q8+3 ...] [--contexts N ...] [--prompts N ...] [--card CARD]
    python -m benchmarks.kv long [MODEL] [--kv q8+3] [--tokens N] [--memory GB] [--card CARD]
    python -m benchmarks.kv steps [MODEL] [--random] [--formats q8 q8+3 ...] [--texts N] [--card CARD]
    python -m benchmarks.kv all [--seconds 400]

speeds      Tokens per second of decoding at these contexts, and of prompts of these lengths: float16 and another format
            in turns, so that both see the same clocks and neighbours. The best of the rounds, and how many times as
            fast as the best of float16 in these rounds.
long        A prompt of so many tokens, in so much memory of the card: tokens per second up to each quarter of it, and
            of its answer, and memory. Then another one, which is cancelled while it is read: seconds until it has
            ended, and until a short request behind it has its first token.
steps       How far the logits of decode steps are from those in float16, for the same tokens before: KL divergence in
            nats, mean and what 1 step in 1,000 exceeds, and how many likeliest tokens are the same. The texts are
            held-out ones of the model that comes along, which is also the default, or random tokens.
all         What a card is to be asked of long contexts, as much as fits into so many seconds: tests of the kernels, of
            all formats at 262,144 tokens first; that many tokens in 16 GB; bits of whole models; sparse prompts
            (benchmarks/sparse.py); speeds of all formats. A part that fails or takes too long does not keep the next
            ones from running. At the end, the last lines of each.

Contexts of speeds are made up, see cli/bench.py. Each but the last prints a Markdown table for results.md.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import numpy as np

import qengine
from cli.bench import Bench
from cli.ending import run_program
from cli.interrupts import endable
from cli.options import DECODE_STEPS
from cli.perplexity import score_rows
from engine.request import Request
from kernels.advance import answer_of
from kernels.card import show_bytes
from kernels.kv_formats import KV_FORMATS
from kernels.limits import FLOAT16, WISHES
from kernels.open import open_cards
from models import tasks

ROUNDS = 4
QUARTERS = 4
SECONDS_BEFORE_CANCEL = 3.0
ANSWER = 64                 # tokens
READ, STEPS = 512, 1536     # tokens of a text that are read as a prompt, and then as decode steps
PROCESSORS = 10             # that compile at a time in `all`: more of them ran into their limits


# ---- speeds ------------------------------------------------------------------------------------------------


class Timed:
    """An engine with keys and values in one format, and its best times so far."""

    def __init__(self, opened, card, kv: str, options):
        self.contexts, self.prompts, self.best = options.contexts, options.prompts, {}
        n_ctx = max(self.contexts + self.prompts) + DECODE_STEPS + 1
        self.engine = qengine.load(opened, card=card, ctx=n_ctx, kv_tokens=n_ctx, draft="off", checkpoint_memory=0,
                                   checkpoint_host_memory=0, kv=kv, products=options.products, progress=False)
        self.bench = Bench(self.engine, [], 1, 1)
        self.measure()
        self.best.clear()               # at first, steps are recorded

    def measure(self):
        """A round."""
        self.bench.pipeline.prepare_slot(0, Request([0]))
        found = {("decode", n): DECODE_STEPS / self.bench.steps(n) for n in self.contexts}
        found |= {("prompt", n): n / self.bench.prompt(n) for n in self.prompts}
        self.best = {key: max(speed, self.best.get(key, 0)) for key, speed in found.items()}


def speeds(options):
    """Prints a row for each format."""
    card, opened = open_cards(options.card)[0], qengine.open_model(options.model)
    print(f"{options.model} on {card.describe()}, products of prompts: {options.products}")
    heads = [f"decode at {n:,}" for n in options.contexts] + [f"prompt of {n:,}" for n in options.prompts]
    print(f"| format | {' | '.join(heads)} |\n|---|{'---:|' * len(heads)}", flush=True)
    plain = Timed(opened, card, FLOAT16, options)
    for kv in options.formats:
        other = Timed(opened, card, kv, options)
        plain.best.clear()              # of as many rounds as the other's
        for _ in range(ROUNDS):
            plain.measure()
            other.measure()
        other.engine.close()
        cells = [f"{speed:,.1f} ({speed / plain.best[key]:.3f})" for key, speed in other.best.items()]
        print(f"| {kv} | {' | '.join(cells)} |", flush=True)
    plain.engine.close()
    cells = [f"{speed:,.1f}" for speed in plain.best.values()]
    print(f"| {FLOAT16}, beside the last | {' | '.join(cells)} |", flush=True)


# ---- decoded tokens ----------------------------------------------------------------------------------------


def steps(options):
    """Prints a row for each format."""
    opened, n = qengine.open_model(options.model), options.texts * (READ + STEPS)
    kind = "random" if options.random else "held-out"
    print(f"{options.model}, {options.texts} {kind} texts, steps {READ + 1:,} to {READ + STEPS:,}\n"
          "| format | KL, mean | 99.9 % | same token |\n|---|---:|---:|---:|", flush=True)
    ids = (np.random.default_rng(0).integers(0, opened.config.n_vocab, n) if options.random else
           opened.tokenizer.encode(tasks.heldout_text(random.Random("steps"), 2 * n))[:n])
    texts, plain = np.reshape(ids, (options.texts, READ + STEPS)).tolist(), None
    for kv in FLOAT16, *options.formats:
        engine = qengine.load(opened, card=options.card, ctx=READ + STEPS, draft="off", kv=kv, progress=False)
        logits = np.concatenate([step_logits(engine, text) for text in texts])
        engine.close()
        if plain is None:
            plain = logits
            continue
        _, _, divergences, same = score_rows([0] * len(logits), logits, plain)
        print(f"| {kv} | {divergences.mean():.6f} | {np.percentile(divergences, 99.9):.4f} | {same.mean():.2%} |",
              flush=True)


def step_logits(engine, ids: list[int]) -> np.ndarray:
    """float32 [tokens behind READ, vocabulary]: logits of the decode steps whose tokens are those of the text."""
    pipeline, last, found = engine.pipeline, engine.pipeline.last, []
    with engine.scheduler.borrow_slot(len(ids)) as sequence:
        pipeline.prepare_slot(sequence.slot, sequence.generation.request)
        for start in range(0, READ, engine.chunk):
            pipeline.prefill(ids[start:min(start + engine.chunk, READ)], sequence.slot, start)
        for position in range(READ, len(ids)):
            pipeline.place([answer_of(ids[position], sequence.slot, position)])
            pipeline.forward(qengine.StepShape(1))
            found.append(last.worker.ask(last.card.download, last.model.logits[:1]).result())
    return np.concatenate(found)


# ---- long prompts ------------------------------------------------------------------------------------------


def long(options):
    """Prints a line for each quarter, then of memory and of a cancelled prompt."""
    card, rng = open_cards(options.card)[0], np.random.default_rng(0)
    memory = options.memory and int(options.memory * 2**30)
    free = memory or card.free_bytes        # with a limit, `free_bytes` is what is left of it
    engine = qengine.load(options.model, card=card, ctx=options.tokens + ANSWER, kv_tokens=options.tokens + ANSWER,
                          kv=options.kv, draft="off", memory=memory, products=options.products, progress=False)
    print(f"{options.model}, {options.kv}, {options.tokens:,} tokens on {card.describe()}, products of prompts: "
          f"{options.products}, passes of {engine.scheduler.chunk:,} tokens; {show_bytes(free - card.free_bytes)} "
          "taken", flush=True)
    ids = rng.integers(0, engine.config.n_vocab, (2, options.tokens)).tolist()
    generation = engine.submit(Request(ids[0], max_tokens=ANSWER, ignore_eos=True))
    for n, seconds in quarters(generation, options.tokens):
        print(f"| {n:,} | {n / seconds:,.0f} tokens/s | {seconds:.1f} s |", flush=True)
    times = generation.token_times
    print(f"decode behind them: {(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s")
    print(f"most memory taken: {show_bytes(free - card.free_bytes)}")
    ended, answered = cancelled(engine, ids[1])
    print(f"cancelled after {SECONDS_BEFORE_CANCEL:.0f} s: ended after {ended:.3f} s, a token of the next request "
          f"after {answered:.3f} s")
    engine.close()


def quarters(generation, n: int):
    """(tokens, seconds) of each quarter of a prompt of n tokens, by when its passes are queued, and of the whole with
    the first token of its answer."""
    marks = [n * i // QUARTERS for i in range(1, QUARTERS)]
    while not generation.wait(0.05):
        while marks and generation.n_read >= marks[0]:
            yield generation.n_read, time.perf_counter() - generation.started
            marks = [mark for mark in marks if mark > generation.n_read]
    if generation.error:
        raise generation.error
    yield n, generation.token_times[0] - generation.started


def cancelled(engine, ids: list[int]) -> tuple[float, float]:
    """Seconds from the cancellation of a prompt until it has ended, and until the next request has a token."""
    generation = engine.submit(Request(ids, max_tokens=1))
    generation.wait(SECONDS_BEFORE_CANCEL)
    generation.cancel()
    started = time.perf_counter()
    after = engine.submit(Request(ids[:8], max_tokens=1))
    generation.wait()
    ended = time.perf_counter() - started
    after.wait()
    return ended, after.token_times[0] - started


# ---- everything --------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A program of `all`."""

    name: str
    arguments: list[str]        # of python
    share: float                # of the seconds; what it leaves over, the next part may take, too
    n_lines: int                # of its output that are shown at the end


TESTS = ["-m", "pytest", "-q", "-n", str(PROCESSORS), "--dist", "load"]
PARTS = [Part("tests of 262,144 tokens", [*TESTS, "-m", "", "tests/test_long.py"], 0.15, 12),
         Part("tests of kernels", [*TESTS, "tests/test_attend_decode.py", "tests/test_attention.py",
                                   "tests/test_block_sparse.py"], 0.2, 12),
         Part("262,144 tokens in 16 GB", ["-m", "benchmarks.kv", "long", "--memory", "16"], 0.325, 8),
         Part("tests of models", [*TESTS, "tests/test_sparse.py", "tests/test_kv_models.py"], 0.1, 12),
         Part("sparse prompts", ["-m", "benchmarks.sparse", "speed"], 0.125, 9),
         Part("speeds", ["-m", "benchmarks.kv", "speeds", "--contexts", "18400", "131072",
                         "--formats", "q4", "q8+4", "q8+3", "q8", "q3"], 0.1, 9)]


def all_of_it(options):
    """Runs PARTS, and prints the last lines of each."""
    endable()
    if hasattr(os, "sched_setaffinity"):        # the parts inherit it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:PROCESSORS])
    print("\n\n".join(run_parts(PARTS, options.seconds)))


def run_parts(parts: list[Part], seconds: float) -> list[str]:
    """What to show of each part, when all have ended, or `seconds` are over."""
    end, found = time.perf_counter(), []
    for part in parts:
        end += part.share * seconds
        limit = end - time.perf_counter()
        found.append(f"== {part.name}: {ended(part, limit) if limit > 0 else 'left out, no time'}")
        print(found[-1].partition("\n")[0], file=sys.stderr, flush=True)
    return found


def ended(part: Part, limit: float) -> str:
    """How a part has ended within so many seconds, and its last lines. It ends, too, when this program is asked to."""
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        program = subprocess.Popen([sys.executable, *part.arguments], stdout=output, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        try:
            status = program.wait(limit)
            how = f"FAILED, exit status {status}" if status else "done"
        except subprocess.TimeoutExpired:
            how = "STOPPED, too long"
        finally:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)      # with the processes that it has started
                program.wait()
        output.seek(0)
        lines = [line for line in output.read().replace("\r", "\n").splitlines() if line.strip()]
    return "\n".join([f"{how} after {time.perf_counter() - started:.0f} s", *lines[-part.n_lines:]])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = parser.add_subparsers(required=True)
    many = [name for name in KV_FORMATS if name != FLOAT16]
    for name, function, model in (("steps", steps, qengine.DEFAULT_MODEL), ("speeds", speeds, "synthetic:9b"),
                                  ("long", long, "synthetic:9b")):
        part = parts.add_parser(name)
        part.set_defaults(function=function)
        part.add_argument("model", nargs="?", default=model)
        part.add_argument("--card")
        if function is not steps:
            part.add_argument("--products", choices=WISHES, default="auto")
        if function is not long:
            part.add_argument("--formats", nargs="+", choices=many, default=many)
    steps_part, speeds_part, long_part = (parts.choices[name] for name in ("steps", "speeds", "long"))
    steps_part.add_argument("--random", action="store_true", help="random tokens")
    steps_part.add_argument("--texts", type=int, default=4)
    speeds_part.add_argument("--contexts", nargs="*", type=int, default=[4620, 18_400, 131_072])
    speeds_part.add_argument("--prompts", nargs="*", type=int, default=[18_400])
    long_part.add_argument("--kv", choices=KV_FORMATS, default="q8+3")
    long_part.add_argument("--tokens", type=int, default=262_136)
    long_part.add_argument("--memory", type=float, metavar="GB")
    all_parts = parts.add_parser("all")
    all_parts.set_defaults(function=all_of_it)
    all_parts.add_argument("--seconds", type=float, default=400)
    options = parser.parse_args()
    options.function(options)


if __name__ == "__main__":
    run_program(main)
