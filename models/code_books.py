"""Quantises to the code-book types (kernels/formats/code_books.py), which the gguf package only reads.

For each group of weights the nearest entry of the book; of the integer scales that a part can have the best; and for d
one factor for a whole matrix: which of some factors gives a sample of its blocks the least error. All entries are
tried, so what a group gets is the best for its scale.
"""

import numba
import numpy as np

from kernels.formats import code_books, dequantize
from kernels.formats.code_books import Parts

GROUPS = 1 << 9     # that are searched at once: what is computed for them then fits a processor's cache
SAMPLE = 32         # blocks of 256 on which factors are tried
FACTORS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)    # of the d with which the largest entry reaches the largest weight


def quantize(format, values):
    """float32 [n, k] -> uint8 [n, bytes of a row]."""
    rows = values.reshape(-1, 256)
    sample = rows[np.linspace(0, len(rows) - 1, min(SAMPLE, len(rows))).astype(int)]
    factor = min(FACTORS, key=lambda factor: _error(format, sample, factor))
    groups = rows.reshape(-1, 8)
    raw = [FILES[format.name](_parts(format, groups[start:start + GROUPS], factor))
           for start in range(0, len(groups), GROUPS)]
    return np.concatenate(raw).reshape(len(values), -1)


def _error(format, rows, factor):
    raw = FILES[format.name](_parts(format, rows.reshape(-1, 8), factor))
    return np.linalg.norm(dequantize(format, raw).reshape(rows.shape) - rows)


def _parts(format, groups, factor):
    """Parts of rows of 256, float32 [8 rows of 4 groups, 8]."""
    name, book = format.name, code_books.grid(format.name).astype(np.float32)
    unit, n_scales = code_books.UNITS[name], 2 if format.halves else 1
    integers = 2 * np.arange(8 if book.min() < 0 else 16, dtype=np.float32) + 1
    largest = (abs(book).max() + (0.125 if book.min() < 0 else 0)) * (8 if book.min() < 0 else 1)
    d = abs(groups.reshape(-1, 256)).max(axis=1) * factor / (largest * integers[-1] * unit)
    d = d.astype(np.float16)
    steps = np.repeat(d.astype(np.float32), 32)[:, None] * unit * integers      # [groups, scales]
    if book.min() < 0:
        tables, marks = (8 * book + 1, 8 * book - 1), None
        costs, codes = zip(*(_nearest(groups, table, steps) for table in tables))
        costs, codes = np.stack(costs, axis=2), np.stack(codes, axis=2)         # [groups, scales, shifts]
    else:
        marks = _signs(groups, even=name in SEVEN)
        signed = groups * (1 - 2 * np.unpackbits(marks, bitorder="little").reshape(-1, 8).astype(np.float32))
        costs, codes = _nearest(signed, book, steps)
        costs, codes = costs[:, :, None], codes[:, :, None]
    if name == "IQ1_S":     # one shift for the four groups of a block
        costs = np.repeat(costs.reshape(-1, 4, *costs.shape[1:]).sum(axis=1), 4, axis=0)
    shift = costs.argmin(axis=2)[:, :, None]
    cost = np.take_along_axis(costs, shift, axis=2)[..., 0].reshape(-1, 4 // n_scales, len(integers))
    s = np.repeat(cost.sum(axis=1).argmin(axis=1), 4 // n_scales)[:, None, None]
    shift = np.take_along_axis(shift, s, axis=1)[:, 0, 0]
    codes = np.take_along_axis(codes, s[..., None], axis=1)[np.arange(len(s)), 0, shift]
    dtype, marks = np.uint8 if len(book) == 256 else np.uint16, shift.astype(np.uint8) if marks is None else marks
    return Parts(codes.astype(dtype).reshape(len(d), 8, -1), marks.reshape(len(d), 8, 4),
                 s.astype(np.uint8).reshape(len(d), 8, 4)[:, :, ::4 // n_scales], d)


SEVEN = "IQ2_XXS", "IQ2_XS", "IQ3_XXS"


def _signs(groups, even):
    """uint8 [groups]: bit n is set where weight n is negative; where their number must be even and is not, the smallest
    weight's sign is wrong."""
    negative = groups < 0
    if even:
        odd = negative.sum(axis=1) % 2 == 1
        negative[odd, abs(groups[odd]).argmin(axis=1)] ^= True
    return np.packbits(negative, axis=1, bitorder="little")[:, 0]


def _nearest(groups, table, steps):
    """(squared errors [groups, scales], codes [groups, scales, codes of a group]) for every scale."""
    each = 8 // table.shape[1]
    x = groups.reshape(-1, table.shape[1])
    costs, codes = _search(2 * (x @ table.T), (table**2).sum(axis=1), np.repeat(steps, each, axis=0))
    costs += (x**2).sum(axis=1, keepdims=True)
    return costs.reshape(len(groups), each, -1).sum(axis=1), codes.reshape(len(groups), each, -1).swapaxes(1, 2)


@numba.njit(fastmath={"reassoc", "nnan", "ninf", "nsz"})
def _search(products, squares, steps):
    """The least step * (step * square - product) over the entries of a book, and its entry, both [groups, scales]."""
    costs, codes = np.empty_like(steps), np.empty(steps.shape, np.int64)
    found = np.empty_like(squares)
    for g in range(len(steps)):
        for s in range(steps.shape[1]):
            step, least = steps[g, s], np.float32(np.finfo(np.float32).max)
            for e in range(len(squares)):       # two loops, because a compiler makes vectors of each
                value = step * squares[e] - products[g, e]
                found[e] = value
                least = value if value < least else least
            code = 0
            while found[code] != least:
                code += 1
            costs[g, s], codes[g, s] = step * least, code
    return costs, codes


# ---- the inverses of the functions parts_*: uint8 [rows, bytes] of Parts ---------------------------------------------

def _row(*fields):
    return np.concatenate([np.ascontiguousarray(f).reshape(len(f), -1).view(np.uint8) for f in fields], axis=1)


def _joined(fields, step, dtype):
    """Fields [.., m] -> [..]: next to each other, `step` bits each."""
    shifts = np.arange(fields.shape[-1], dtype=dtype) * dtype(step)
    return np.bitwise_or.reduce(fields.astype(dtype) << shifts, axis=-1)


def _nibbles(scales):
    return _joined(scales.reshape(len(scales), -1, 2), 4, np.uint8)


def _words(p):
    return _joined(p.marks & 127, 7, np.uint32) | p.scales[..., 0].astype(np.uint32) << 28


def _low(p):
    return p.codes.astype(np.uint8)


def _upper(p, step, dtype):
    return _joined(p.codes >> 8, step, dtype)


def _iq1_m(p):
    words = _joined(p.scales.reshape(-1, 4, 4), 3, np.uint16)
    d = p.d[:, None].view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16) << 12
    nibbles = (p.codes >> 8).astype(np.uint8) | p.marks << 3
    return _row(_low(p), _joined(nibbles.reshape(len(nibbles), 16, 2), 4, np.uint8), words | d)


FILES = {
    "IQ2_XXS": lambda p: _row(p.d, np.concatenate([_low(p), _words(p)[..., None].view(np.uint8)], axis=2)),
    "IQ2_XS": lambda p: _row(p.d, p.codes | (p.marks & 127).astype(np.uint16) << 9, _nibbles(p.scales)),
    "IQ2_S": lambda p: _row(p.d, _low(p), p.marks, _upper(p, 2, np.uint8), _nibbles(p.scales)),
    "IQ3_XXS": lambda p: _row(p.d, _low(p), _words(p)),
    "IQ3_S": lambda p: _row(p.d, _low(p), _upper(p, 1, np.uint8), p.marks, _nibbles(p.scales)),
    "IQ1_S": lambda p: _row(p.d, _low(p), _upper(p, 3, np.uint16) | p.scales[..., 0].astype(np.uint16) << 12
                            | p.marks[..., 0].astype(np.uint16) << 15),
    "IQ1_M": _iq1_m,
}
