"""Writes a model file anew with its matrices in another format of weights.

    python models/quantize.py Q4_K small.gguf                 # of the model that ships
    python models/quantize.py IQ3_S small.gguf FILE.gguf      # of another file

Matrices whose rows are no whole blocks of the format stay as they are, and so do vectors, convolutions and routers.

How weights are quantised: each block alone, by the sum of its squared errors. Every weight counts the same; there is no
importance matrix, so files that were made with one are better than these, most of all below 4 bits.

    Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, MXFP4                   by the gguf package
    TQ1_0, TQ2_0                                          the same, after step 1 for blocks of 256
    IQ4_NL, IQ4_XS, NVFP4, K-quants                       here: a part is the 16 or 32 weights that share a scale.
        1. For each part the best scale: of some scales, the codes that are nearest to the weights; for these codes the
           scale (and minimum) of least squares; of all these the one with the least error.
        2. The float scale of a block makes the largest scale of its parts the largest integer; others are rounded.
        3. For the scales as they are stored, the nearest code of each weight.
    IQ1, IQ2, IQ3                                         models/code_books.py

The idea of the steps 1 to 3 is that of quantize_row_*_ref of github.com/ggml-org/ggml, src/ggml-quants.c.
"""

import argparse
import sys
from collections import namedtuple
from pathlib import Path

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from engine.gguf import GGUF  # noqa: E402
from kernels import formats  # noqa: E402
from kernels.formats import FORMATS  # noqa: E402
from kernels.formats.codes import in_order, in_planes  # noqa: E402
from kernels.formats.tables import mini_floats  # noqa: E402
from models import code_books  # noqa: E402

FILE = Path(__file__).resolve().parent / "qengine-10m-Q8_0.gguf"
STAY_FLOAT = "ssm_conv1d", "ffn_gate_inp"       # in the names of tensors that are no matrices of a product in dp4a
TRIED = np.linspace(0.8, 1.2, 9)                # times the step that reaches just to the largest weight
TRIED_OF_TWO = np.linspace(0.6, 1.1, 11)        # the same of formats with a minimum
TRIED_OF_TERNARY = np.linspace(0.2, 0.7, 11)    # and of -1, 0, 1
TINY = np.finfo(np.float32).tiny

# ---- parts: their best scales ------------------------------------------------------------------------------------


def nearest(x, q):
    """The number of the nearest of the ascending numbers q, for each of x."""
    return np.searchsorted((q[:-1] + q[1:]) / 2, x)


def keep_best(best, cost, *found):
    """best: (cost [m, 1], ...) so far, which takes over what is found with a smaller cost."""
    if best is None:
        return cost, *found
    better = cost < best[0]
    return tuple(np.where(better, new, old) for new, old in zip((cost, *found), best, strict=True))


def fit_steps(parts, q, all_tried=TRIED):
    """float32 [m, w] -> steps [m, 1]: step * q is near the weights of a part. The step is negative where the largest
    weight is on the longer side of q with the other sign."""
    largest = np.take_along_axis(parts, abs(parts).argmax(axis=1)[:, None], axis=1)
    ends = (q[0], q[-1]) if q[0] != -q[-1] else (q[-1],)
    best = None
    for end in ends:
        for tried in all_tried:
            step = tried * largest / end
            chosen = q[nearest(parts / np.where(step == 0, 1, step), q)]
            squares = np.maximum((chosen**2).sum(axis=1, keepdims=True), TINY)
            step = (parts * chosen).sum(axis=1, keepdims=True) / squares
            best = keep_best(best, ((parts - step * chosen)**2).sum(axis=1, keepdims=True), step)
    return best[1]


def fit_steps_and_minima(parts, most):
    """float32 [m, w] -> (steps, minima) [m, 1], none below 0: step * q - minimum with q = 0 .. most is near the weights
    of a part."""
    least, width, best = np.minimum(parts.min(axis=1, keepdims=True), 0), parts.shape[1], None
    span = parts.max(axis=1, keepdims=True) - least
    for tried in TRIED_OF_TWO:
        step = tried * span / most
        chosen = np.clip(np.rint((parts - least) / np.where(step == 0, 1, step)), 0, most)
        total, squares = chosen.sum(axis=1, keepdims=True), np.maximum((chosen**2).sum(axis=1, keepdims=True), TINY)
        of_x, products = parts.sum(axis=1, keepdims=True), (parts * chosen).sum(axis=1, keepdims=True)
        spread = width * squares - total**2
        fitted = np.where(spread > 0, (width * products - of_x * total) / np.maximum(spread, TINY), step)
        minimum = (fitted * total - of_x) / width
        fitted, minimum = np.where(minimum < 0, products / squares, fitted), np.maximum(minimum, 0)
        fitted = np.maximum(fitted, 0)
        cost = ((parts - (fitted * chosen - minimum))**2).sum(axis=1, keepdims=True)
        best = keep_best(best, cost, fitted, minimum)
    return best[1:]


# ---- blocks: headers as on the card, codes, and back to the file ----------------------------------------------------


def share(steps, most):
    """Steps of the parts of blocks [rows, parts] -> (d float16 [rows, 1], integers [rows, parts] up to +-most)."""
    d = (abs(steps).max(axis=1, keepdims=True) / most).astype(np.float16)
    width = np.where(d == 0, 1, d).astype(np.float32)
    return d, np.clip(np.rint(steps / width), -most, most).astype(int)


def header_of_bytes(steps, most):
    """An int8 for each part, then d."""
    d, integers = share(steps, most)
    return joined(integers.astype(np.int8), d)


def header_of_half(steps, most):
    return joined(steps.astype(np.float16))


def header_of_mini_floats(steps, most):
    return nearest(abs(steps), mini_floats(np.arange(most + 1))).astype(np.uint8)     # the codes reach as far below 0


def header_of_pairs(steps, minima, most):
    """(s, m) of each part, then d and dmin."""
    (d, s), (dmin, m) = share(steps, most), share(minima, most)
    return joined(np.stack([s, m], axis=2).astype(np.uint8), d, dmin)


def header_of_nibbles(steps, minima, most):
    """s | m << 4 of each part, then d and dmin."""
    (d, s), (dmin, m) = share(steps, most), share(minima, most)
    return joined((s | m << 4).astype(np.uint8), d, dmin)


def joined(*fields):
    return np.concatenate([np.ascontiguousarray(f).reshape(len(f), -1).view(np.uint8) for f in fields], axis=1)


# width: weights of a part. most: the largest integer of a scale. header: a function of steps [rows, parts], the minima
# if there are some, and `most`: the bytes of headers as they lie on a card.
Scheme = namedtuple("Scheme", "width most header")
SCHEMES = {
    "IQ4_NL": Scheme(32, None, header_of_half), "NVFP4": Scheme(16, 126, header_of_mini_floats),
    "IQ4_XS": Scheme(32, 31, header_of_bytes), "Q3_K": Scheme(16, 31, header_of_bytes),
    "Q6_K": Scheme(16, 127, header_of_bytes), "Q4_K": Scheme(32, 63, header_of_pairs),
    "Q5_K": Scheme(32, 63, header_of_pairs), "Q2_K": Scheme(16, 15, header_of_nibbles),
}


def by_parts(format, values):
    """float32, whole blocks -> uint8 [rows, bytes of a block of the file]."""
    scheme, order = SCHEMES[format.name], np.argsort(format.values, kind="stable")
    q, rows = format.values[order].astype(np.float32), values.reshape(-1, format.file_block)
    parts = rows.reshape(-1, scheme.width)
    fitted = fit_steps_and_minima(parts, q[-1]) if format.minima else (fit_steps(parts, q),)
    header = scheme.header(*(part.reshape(len(rows), -1) for part in fitted), scheme.most)
    no_codes = np.zeros((len(rows) * format.per_unit, sum(format.planes)), np.uint8)
    _, scale, minimum = formats.factors(format, in_file(format, no_codes, header), np.float32)
    blocks, scale = rows.reshape(-1, formats.BLOCK), np.where(scale == 0, 1, scale)
    codes = order[nearest((blocks + minimum) / scale, q)].astype(np.uint8)
    return in_file(format, in_order(codes) if format.in_order else in_planes(codes, format.bits), header)


def ternary(values):
    """float32, whole blocks of 256 -> the same with a step and its negative in each block, and zeros."""
    q, parts = np.float32([-1, 0, 1]), values.reshape(-1, 256)
    steps = fit_steps(parts, q, TRIED_OF_TERNARY)
    return (steps * q[nearest(parts / np.where(steps == 0, 1, steps), q)]).reshape(values.shape)


def on_card(format, raw):
    """uint8 [rows, bytes]: what lies on a card of each block of the file, planes and header."""
    planes, wd = formats.split(format, raw)
    rows = raw.size // format.file_bytes
    return np.concatenate([planes.reshape(rows, -1), wd.view(np.uint8).reshape(rows, -1)], axis=1)


def in_file(format, planes, headers):
    """The inverse of `on_card`, found by trying: every bit on the card is one bit of the file, or its opposite."""
    one_bit_each = np.packbits(np.eye(8 * format.file_bytes, dtype=np.uint8), axis=1, bitorder="little")
    of_zeros = on_card(format, np.zeros(format.file_bytes, np.uint8))
    at, found = np.nonzero(np.unpackbits(on_card(format, one_bit_each) ^ of_zeros, axis=1))
    wanted = np.concatenate([planes.reshape(len(headers), -1), headers], axis=1) ^ of_zeros
    bits = np.zeros((len(headers), 8 * format.file_bytes), np.uint8)
    bits[:, at] = np.unpackbits(wanted, axis=1)[:, found]
    return np.packbits(bits, axis=1, bitorder="little")


def quantize(kind, values):
    """float32 [n, k] as a GGUF file stores it in one of FORMATS: uint8 [n, bytes of a row]."""
    if kind in SCHEMES:
        return by_parts(FORMATS[kind], values).reshape(len(values), -1)
    if kind in code_books.FILES:
        return code_books.quantize(FORMATS[kind], values)
    values = ternary(values) if FORMATS[kind].random.codes == "ternary" else values
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])


# ---- files -------------------------------------------------------------------------------------------------------


def rewrite(source, path, convert, keys=None, more=None):
    """Writes the GGUF file `source` to `path` with other tensors: convert(tensor, values) takes a TensorInfo and its
    values as float32, and returns an array to store, or (bytes, GGMLQuantizationType) for a type NumPy lacks, or None
    for none. keys: metadata that is changed, added, or left out where the value is None. more: further tensors, by
    name."""
    source, reader, keys = GGUF(source), gguf.GGUFReader(str(source)), dict(keys or {})
    writer = gguf.GGUFWriter(str(path), source.get("general.architecture", str))
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            if (value := keys.pop(key, field.contents())) is not None:
                writer.add_key_value(key, value, field.types[0], sub_type)
    for key, value in keys.items():
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in source.tensors.items():
        if (stored := convert(tensor, source.floats(name))) is not None:
            array, kind = stored if isinstance(stored, tuple) else (stored, None)
            writer.add_tensor(name, array, raw_dtype=kind)
    for name, array in (more or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def is_convertible(tensor, kind):
    """Whether a tensor is a matrix, or one for each expert, that can be in this format."""
    return len(tensor.shape) > 1 and tensor.shape[-1] % FORMATS[kind].file_block == 0 and not any(
        name in tensor.name for name in STAY_FLOAT)


def export(source, path, kind, chosen=is_convertible):
    """Writes the model file `source` to `path` with the matrices in a format that are chosen(tensor, kind)."""
    source, number = GGUF(source), gguf.GGMLQuantizationType[kind]

    def convert(tensor, values):
        if chosen(tensor, kind):
            raw = quantize(kind, values.reshape(-1, values.shape[-1]))
            return raw.reshape(*values.shape[:-1], -1), number
        return values if tensor.type == "F32" else (source.data(tensor.name).view(np.uint8),
                                                    gguf.GGMLQuantizationType[tensor.type])

    file_type = getattr(gguf.LlamaFileType, f"MOSTLY_{kind}", None)
    rewrite(source.path, path, convert, {"general.file_type": None if file_type is None else int(file_type)})


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Writes a model file with its matrices in another format.")
    parser.add_argument("format", choices=FORMATS, metavar="FORMAT", help=", ".join(FORMATS))
    parser.add_argument("path", type=Path, metavar="OUT.gguf")
    parser.add_argument("source", type=Path, nargs="?", default=FILE, metavar="FILE.gguf")
    options = parser.parse_args(arguments)
    if options.path.exists() and options.path.samefile(options.source):
        parser.error("a file cannot be written over itself")
    export(options.source, options.path, options.format)
    print(f"{options.path}: {options.path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
