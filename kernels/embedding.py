"""Rows of the token table as float32.

    y[r, :] = table[ids[r], :]       Q8_0:  y[r, j] = q[id, j] * d[id, j / 32], exact (8 + 11 bits fit in 24)

    ids  int32 [rows], each 0 <= id < vocabulary: the host checks them as requests come in, not the kernel
    y    float32 [rows, k]
    table, one of   float32 [vocabulary, k]
                    float16 [vocabulary, k]
                    uint16  [vocabulary, k], the bits of bfloat16
                    int8    [vocabulary, k] with scales float16 [vocabulary, k / 32], k a multiple of 32

One thread per element; a block of threads stays within a row, so the id is uniform over it. 4 k bytes written
and k to 4 k read per row: a few microseconds, bound by its launch when decoding. Pipe: none to speak of.
"""

from functools import partial

import numpy as np
from numba import cuda
from numba.types import int32, uint32

from kernels.bench import Case, main
from kernels.float_matmul import WEIGHT_AT, as_words, random_weights
from kernels.intrinsics import BIAS_WORD, half_to_float, unbias
from kernels.q8_gemv import random_q8

THREADS = 256


def embedding_reference(ids, table, scales=None):
    """float32 [rows, k]; `table` as above, in NumPy's dtypes."""
    rows = table[ids]
    if table.dtype == np.int8:
        return rows.astype(np.float32) * np.repeat(scales[ids].astype(np.float32), 32, axis=1)
    if table.dtype == np.uint16:
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return rows.astype(np.float32)


@cuda.jit(device=True, inline="always")
def q8_at(table, scales, index):
    value = unbias(int32(int32(table[index]) + int32(BIAS_WORD)))
    return value * half_to_float(scales[uint32(index >> uint32(5))])


def without_scales(weight_at):
    @cuda.jit(device=True, inline="always")
    def element_at(table, scales, index):
        return weight_at(table, index)

    return element_at


def embedding_kernel(element_at):
    """The kernel whose table is read by the device function `element_at(table, scales, index)`."""

    @cuda.jit
    def embed_kernel(y, ids, table, scales, k):
        row = uint32(cuda.blockIdx.x)
        column = uint32(cuda.blockIdx.y * uint32(THREADS) + cuda.threadIdx.x)
        if column < k:
            y[uint32(row * k + column)] = element_at(table, scales, uint32(uint32(ids[row]) * k + column))

    return embed_kernel


KERNELS = {kind: embedding_kernel(without_scales(weight_at)) for kind, weight_at in WEIGHT_AT.items()}
KERNELS[np.dtype(np.int8)] = embedding_kernel(q8_at)


def embed(card, y, ids, table, scales, rows, k, stream=None):
    """y float32 [rows, k] <- rows `ids` (int32 [rows], unchecked) of `table`, whose dtype tells its kind;
    `scales` float16 for an int8 table, else None. Writes only y, never allocates."""
    words = as_words(table)
    scales = words if scales is None else as_words(scales)  # a kernel without scales ignores them
    card.launch(KERNELS[np.dtype(table.dtype)], (rows, -(-k // THREADS)), THREADS, y.reshape(-1), ids, words,
                scales, k, stream=stream)


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [(1, 1, 32), (3, 7, 320), (33, 100, 256), (65, 1000, 1024)]  # rows, vocabulary, k


def check(card, rows, vocabulary, k, kind):
    """Looks up random ids in a table of `kind` (np.int8 means Q8_0); the bits must be the reference's."""
    rng = np.random.default_rng((rows, vocabulary, k))
    scales = None
    if kind == np.int8:
        table, scales = random_q8(rng, vocabulary, k)
    else:
        table = random_weights(rng, kind, vocabulary, k)
    ids = rng.integers(0, vocabulary, rows).astype(np.int32)
    ids[0] = vocabulary - 1
    y = card.alloc((rows + 1, k), np.float32)
    card.poison(y)
    on_card = None if scales is None else card.upload(scales)
    embed(card, y[:rows], card.upload(ids), card.upload(table), on_card, rows, k)
    y = card.download(y)
    np.testing.assert_array_equal(y[:rows], embedding_reference(ids, table, scales))
    assert np.isnan(y[rows]).all(), "wrote past the end"
    return 0.0


def cases(card):
    """The checks for every kind of table, then times for one token and for a prompt's chunk."""
    for case in CASES:
        for kind in KERNELS:
            yield Case("{} of {} x {} {}".format(*case, kind.name), partial(check, card, *case, kind))
    table, scales = card.zeros((1000, 5120), np.int8), card.zeros((1000, 160), np.float16)
    for rows in (1, 512):
        y, ids = card.alloc((rows, 5120), np.float32), card.zeros(rows, np.int32)
        yield Case(f"time of {rows} rows of 5120 int8", n_bytes=5 * y.size,
                   launch=partial(embed, card, y, ids, table, scales, rows, 5120))


if __name__ == "__main__":
    main("Embedding rows", cases)
