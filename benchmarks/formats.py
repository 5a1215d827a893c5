"""What a format of weights costs: `python -m benchmarks.formats accuracy|load [--formats Q8_0 Q4_K ...] [--tokens N]`.

accuracy    The model that ships, its matrices rounded to each format by models/quantize.py. Weights and activations are
            float32 in all of these models, so that only the format tells.
            weights:  |w' - w| / |w| over all matrices that were rounded
            KL:       mean KL divergence in nats of the next token's probabilities from those of the file's weights
            same:     positions with the same likeliest token, per cent
            perplexity of the tokens. They are those of held-out conversations of every task.
load        A matrix of 4096 x 4096 of random blocks from a file in the page cache to an emulated card, beside Q8_0:
            bytes of the file, processor time of the whole process (the best of several loads), and what the kernel that
            repacks does: instructions for 32 weights, and its estimated time on a CMP 100-210 beside the time that the
            bytes take over that card's link.

Each prints a Markdown table for results.md. In `accuracy` the same matrices are rounded for every format: those whose
rows are whole blocks of 256. The weights w are those of the file, which are multiples of the scales of Q8_0. So the
error of Q8_0 itself is not measured but computed: steps that are d wide have errors of d / sqrt(12).
"""

import argparse
import contextlib
import itertools
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np

import qengine
from cli.perplexity import score_rows
from engine.gguf import GGUF
from engine.weights import FileWeights
from kernels.emulated.cards import CMP_100_210
from kernels.emulated.estimate import PIPES
from kernels.formats import FORMATS, dequantize, factors, random_raw
from kernels.open import open_cards
from models import evaluate, quantize

CONTEXT = 1024
EXAMPLE_TOKENS = 300        # about as many in each conversation
N, K = 4096, 4096
LOADS = 5


# ---- accuracy ----------------------------------------------------------------------------------------------


def held_out_ids(engine, n):
    """n tokens of held-out conversations, of all sections of tasks in turn."""
    sections = [(name, make) for name, (make, _) in evaluate.sections().items()]
    ids = []
    for round in itertools.count():
        for name, make in sections:
            example, = evaluate.held_out(name, make, EXAMPLE_TOKENS, 1, seed=round)
            said = example.messages, example.tools, example.thinking
            ids += engine.tokenizer.encode(engine.template.render(*said, add_generation_prompt=False))
            if len(ids) >= n:
                return ids[:n]


def logits_of(path, card, n):
    """(the token after each position, logits [n - 1, n_vocab]) of a model on the held-out tokens."""
    with contextlib.closing(qengine.load(str(path), card=card, ctx=CONTEXT, draft="off", progress=False)) as engine:
        ids = held_out_ids(engine, n)
        rows = [row for start in range(0, n - 1, CONTEXT)
                for row in engine.logit_rows(ids[start:min(start + CONTEXT, n - 1)])]
    return np.array(ids[1:]), np.concatenate(rows)


def is_chosen(tensor):
    return quantize.is_convertible(tensor, "Q4_K")      # the same for all formats: rows of whole blocks of 256


def rounded(name, path):
    """Writes the model in float32, its matrices with the values that they have in a format; returns |w' - w| / |w|."""
    format, sums = FORMATS[name], np.zeros(2)

    def convert(tensor, values):
        if not is_chosen(tensor):
            return values
        found = dequantize(format, quantize.quantize(name, values)).reshape(values.shape)
        error = np.square(found - values, dtype=np.float64).sum()
        if name == "Q8_0":
            _, d, _ = factors(format, quantize.quantize(name, values), np.float64)
            error = np.square(np.broadcast_to(d, (values.size // 32, 32))).sum() / 12
        sums[:] += error, np.square(values, dtype=np.float64).sum()
        return found

    quantize.rewrite(quantize.FILE, path, convert)
    return (sums[0] / sums[1])**0.5


def measure_accuracy(names, n_tokens):
    card, want = open_cards("emulated")[0], None
    print("| format | bits | weights, % | KL | same, % | perplexity |\n|---|---:|---:|---:|---:|---:|", flush=True)
    for name in dict.fromkeys(["Q8_0", *names]):        # Q8_0: the values of the file as it is
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.gguf"
            error = rounded(name, path)
            tokens, logits = logits_of(path, card, n_tokens)
        want = logits if want is None else want
        losses, _, divergences, same = score_rows(tokens, logits, want)
        print(f"| {name} | {bits(name):.2f} | {100 * error:.2f} | {divergences.mean():.4f} | {100 * same.mean():.1f} | "
              f"{np.exp(losses.mean()):.3f} |", flush=True)


def bits(name):
    """Of a weight in the file."""
    return 8 * FORMATS[name].file_bytes / FORMATS[name].file_block


# ---- load --------------------------------------------------------------------------------------------------


def write_matrix(path, format):
    """A file with one matrix of random blocks."""
    writer = gguf.GGUFWriter(str(path), "matrix")
    raw = random_raw(np.random.default_rng(0), format, N, K).reshape(N, -1)
    writer.add_tensor("w", raw, raw_dtype=gguf.GGMLQuantizationType(format.number))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_matrix(path, card):
    with FileWeights(GGUF(path)).loading(card) as loader:
        return loader.matrix("w")


def load_seconds(path, card):
    times = []
    for _ in range(1 + LOADS):      # the first compiles, and brings the file to the page cache
        start = time.process_time()
        load_matrix(path, card)
        times.append(time.process_time() - start)
    return min(times[1:])


def repacking(path, card):
    """(instructions of lanes for 32 weights, estimated seconds of a CMP 100-210) of the kernels of a load."""
    with card.counting() as log:
        load_matrix(path, card)
    launches = [launch for launch in log if "repack" in launch.kernel]
    instructions = sum(getattr(launch.counts, pipe) for launch in launches for pipe in PIPES if pipe != "move")
    return 32 * instructions / (N * K / 32), sum(launch.estimate(CMP_100_210).seconds for launch in launches)


def measure_load(names):
    card = open_cards("emulated")[0]
    print("| format | bytes | processor time | instructions for 32 weights | kernel, ms | link, ms |\n"
          "|---|---:|---:|---:|---:|---:|")
    first = None
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "matrix.gguf"
            write_matrix(path, FORMATS[name])
            seconds, (instructions, kernel) = load_seconds(path, card), repacking(path, card)
        size = N * K // FORMATS[name].file_block * FORMATS[name].file_bytes
        first = first or (size, seconds)
        link = size / CMP_100_210.link_bandwidth
        print(f"| {name} | {size / first[0]:.2f} | {seconds / first[1]:.2f} | {instructions:.0f} | "
              f"{1e3 * kernel:.2f} | {1e3 * link:.0f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description="What formats of weights cost.")
    parser.add_argument("what", choices=["accuracy", "load"])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS, metavar="FORMAT")
    parser.add_argument("--tokens", type=int, default=4097)
    options = parser.parse_args()
    if options.what == "accuracy":
        measure_accuracy(options.formats, options.tokens)
    else:
        measure_load(options.formats)


if __name__ == "__main__":
    main()
