"""How much faster texts are packed into passes than one by one, and whether their embeddings have the same bits.

    python -m benchmarks.embeddings [--card CARD] [MODEL ...]

MODEL: a file or a name like synthetic:qwen3-0.6b-embedding. Texts are random token ids. One by one, each text is a
request of its own, sent when the one before is answered; packed, all are one request. Medians of several turns, in
which both ways follow each other.
"""

import argparse
import time

import numpy as np

import qengine
from cli.ending import run_program

COUNT, REPEATS = 32, 5
LENGTHS = 23, 450
MODELS = ["synthetic:qwen3-0.6b-embedding"]


def measure(engine, n_tokens: int) -> tuple[float, float]:
    """Seconds of COUNT texts of n_tokens tokens, one by one and packed. AssertionError if their bits differ."""
    random = np.random.default_rng(n_tokens)
    texts = [random.integers(0, engine.config.n_vocab, n_tokens).tolist() for _ in range(COUNT)]
    ways = {"one by one": lambda: np.concatenate([engine.embed([text]) for text in texts]),
            "packed": lambda: engine.embed(texts)}
    seconds = {name: [] for name in ways}
    for turn in range(REPEATS + 1):             # the first one is not counted
        rows = []
        for name, embed in ways.items():
            started = time.perf_counter()
            rows.append(embed())
            seconds[name].append(time.perf_counter() - started)
        np.testing.assert_array_equal(*rows)
    return tuple(float(np.median(each[1:])) for each in seconds.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--card")
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    options, lines = parser.parse_args(), []
    for name in options.models:
        engine = qengine.load(name, card=options.card, ctx=1024)
        for n_tokens in LENGTHS:
            one, packed = measure(engine, n_tokens)
            lines.append(f"{name:<34}{n_tokens:>8}{1e3 * one / COUNT:>14.2f}{1e3 * packed / COUNT:>10.2f}"
                         f"{one / packed:>8.2f}{COUNT * n_tokens / packed:>12,.0f}")
        engine.close()
    head = f"{'model':<34}{'tokens':>8}{'one by one ms':>14}{'packed':>10}{'times':>8}{'tokens/s':>12}"
    print(head, *lines, sep="\n")


if __name__ == "__main__":
    run_program(main)
