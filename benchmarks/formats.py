"""What a format of weights costs.

    python -m benchmarks.formats accuracy [--formats Q8_0 Q4_K ...] [--tokens N]
    python -m benchmarks.formats load [--formats Q8_0 Q4_K ...] [--card CARD]

accuracy    The model that ships, its matrices rounded to each format by models/quantize.py. Weights and activations are
            float32 in all of these models, so that they differ in the format alone.
            weights:  |w' - w| / |w| over all matrices that were rounded
            KL:       mean KL divergence in nats of the next token's probabilities from those of the file's weights
            same:     positions with the same likeliest token, per cent
            perplexity of the tokens. They are those of held-out conversations of every task.
load        Matrices of random blocks from a file in the page cache to a card, beside Q8_0; the best of several loads.
            Emulated card: a matrix of 4096 x 4096. Bytes of the file, processor time of the whole process, and what the
            kernel that repacks does: instructions for 32 weights, and its estimated time on a CMP 100-210 beside the
            time that the bytes take over that card's link.
            Real card (--card cuda): the matrices of a layer of a 9B, so that the times relate as those of whole files
            do. Bytes of the file, its seconds from the first read to the last repacked block, and bytes per second.

Each prints a Markdown table for results.md; a table of loads begins with Q8_0, which the others are compared with. In
`accuracy` the same matrices are rounded for every format: those whose rows are whole blocks of 256. The weights w are
those of the file, which are multiples of the scales of Q8_0. So the error of Q8_0 itself is not measured but computed:
steps that are d wide have errors of d / sqrt(12).
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
from cli.ending import run_program
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
LAYER = (8192, 4096), (4096, 4096), (4096, 4096), (12288, 4096), (12288, 4096), (4096, 12288)   # of a 9B
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


def write_matrices(path, format, shapes):
    """A file with matrices of these shapes, all of the same random blocks. Returns the bytes of the matrices."""
    writer, n_bytes = gguf.GGUFWriter(str(path), "matrices"), 0
    blocks = random_raw(np.random.default_rng(0), format, N, K)
    for i, (n, k) in enumerate(shapes):
        raw = np.resize(blocks, (n * k // format.file_block, format.file_bytes)).reshape(n, -1)
        writer.add_tensor(f"w{i}", raw, raw_dtype=gguf.GGMLQuantizationType(format.number))
        n_bytes += raw.nbytes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return n_bytes


def load_matrices(path, card):
    """Seconds until the matrices of a file are on the card, once its buffers are there."""
    with FileWeights(GGUF(path)).loading(card) as loader:
        start = time.perf_counter()
        matrices = [loader.matrix(name) for name in loader.shapes]
        card.synchronize()
        seconds = time.perf_counter() - start
        del matrices        # until now they keep their memory, as in an engine
    return seconds


def processor_seconds(path, card):
    """Of all threads, for a load with all that belongs to it."""
    start = time.process_time()
    load_matrices(path, card)
    return time.process_time() - start


def best(seconds, path, card):
    """Of several loads. A load before them compiles, and brings the file to the page cache."""
    return min([seconds(path, card) for _ in range(1 + LOADS)][1:])


def repacking(path, card):
    """(instructions of lanes for 32 weights, estimated seconds of a CMP 100-210) of the kernels of a load."""
    with card.counting() as log:
        load_matrices(path, card)
    launches = [launch for launch in log if "repack" in launch.kernel]
    instructions = sum(getattr(launch.counts, pipe) for launch in launches for pipe in PIPES if pipe != "move")
    return 32 * instructions / (N * K / 32), sum(launch.estimate(CMP_100_210).seconds for launch in launches)


def emulated_loads(names, card, folder):
    """Rows of the table of an emulated card."""
    first = None
    for name in names:
        path = folder / name
        size = write_matrices(path, FORMATS[name], [(N, K)])
        seconds, (instructions, kernel) = best(processor_seconds, path, card), repacking(path, card)
        first = first or (size, seconds)
        yield (name, f"{size / first[0]:.2f}", f"{seconds / first[1]:.2f}", f"{instructions:.0f}",
               f"{1e3 * kernel:.2f}", f"{1e3 * size / CMP_100_210.link_bandwidth:.0f}")


def real_loads(names, card, folder):
    """Rows of the table of a real card."""
    first = None
    for name in names:
        path = folder / name
        size = write_matrices(path, FORMATS[name], LAYER)
        seconds = best(load_matrices, path, card)
        path.unlink()       # a folder in memory need not hold all of them
        first = first or (size, seconds)
        yield (name, f"{size / 1e6:.0f}", f"{size / first[0]:.2f}", f"{1e3 * seconds:.1f}",
               f"{size / seconds / 1e9:.1f}", f"{seconds / first[1]:.2f}")


TABLES = {"emulated": (emulated_loads, "bytes", "processor time", "instructions for 32 weights", "kernel, ms",
                       "link, ms"),
          "cuda": (real_loads, "MB", "bytes", "ms", "GB/s", "time")}


def measure_load(names, which):
    card = open_cards(which)[0]
    rows, *columns = TABLES[card.kind]
    print(f"{card.name}\n\n| format | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(dict.fromkeys(["Q8_0", *names]), card, Path(folder)):
            print(f"| {' | '.join(row)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description="What formats of weights cost.")
    parser.add_argument("what", choices=["accuracy", "load"])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS, metavar="FORMAT")
    parser.add_argument("--tokens", type=int, default=4097, help="of accuracy")
    parser.add_argument("--card", default="emulated", help="of load")
    options = parser.parse_args()
    if options.what == "accuracy":
        measure_accuracy(options.formats, options.tokens)
    else:
        measure_load(options.formats, options.card)


if __name__ == "__main__":
    run_program(main)
