"""Rows of the token table as float32.

    y[r, :] = table[ids[r], :]       of a quantised table (kernels/formats) the weights, rounded once each

    ids  int32 [rows], each 0 <= id < vocabulary: the host checks them as requests come in, not the kernel
    y    float32 [rows, k]
    table  [vocabulary, k] of a type of kernels/formats: one array of floats, or the two arrays of a format

A thread looks up one element of a table of floats, or a block of 32 quantised weights, which it stores by 16 bytes. All
threads of a block of threads belong to one row, so the id is uniform over the block. A row takes 4 k bytes written and
at most 4 k read: a few microseconds. Pipe: none to speak of; when decoding, the launch itself is the bound.

The embedding lets the next launch begin, but does not overlap with the launch before it. The kernels of the layers that
are `early` read values before they wait, and only launches before the embedding have written these values
(kernels/intrinsics.py). A decode step on one card begins with the embedding, so nothing is lost.
"""

from functools import cache, partial

import numpy as np
from numba import cuda
from numba.types import float32, int32, uint32

from kernels.bench import Case, main
from kernels.float_matmul import WEIGHT_AT, random_weights
from kernels.float_matmul import as_words as float_words
from kernels.formats import BLOCK, FLOATS, FORMATS, as_words, dequantize, on_card, random_raw
from kernels.intrinsics import let_next_begin, store_floats4, word_as_float

THREADS = 128


def float_kernel(weight_at):
    """The kernel whose table is read by the device function weight_at(table, index)."""

    @cuda.jit
    def embed_kernel(y, ids, table, k):
        let_next_begin()
        row = uint32(cuda.blockIdx.x)
        column = uint32(cuda.blockIdx.y * uint32(THREADS) + cuda.threadIdx.x)
        if column < k:
            y[uint32(row * k + column)] = weight_at(table, uint32(uint32(ids[row]) * k + column))

    return embed_kernel


def weight_functions(format):
    """(load_block, weights_at) for a format of quantised tables. load_block(w, scales, raw, wq, wd, row, blocks, b,
    book) fills local memory from block b of a row of so many blocks; book is as in a Format. weights_at(w, scales, i)
    gives weights 4 i .. 4 i + 3 of the block."""
    starts, fetch, unpack = format.starts, format.fetch, format.unpack
    minima, halves, float_scales = format.minima, format.halves, format.float_scales
    first_minimum = format.n_scales - minima

    @cuda.jit(device=True, inline="always")
    def weight(word, byte, scale, least):
        value = float32(int32(word << uint32(24 - 8 * byte)) >> int32(24))
        return cuda.fma(value, scale, least)

    @cuda.jit(device=True, inline="always")
    def load_block(w, scales, raw, wq, wd, row, blocks, b, book):
        q_from, d_from = starts(row, blocks)
        fetch(raw, wq, wd, q_from, d_from, blocks, b)
        unpack(w, scales, raw, book)

    @cuda.jit(device=True, inline="always")
    def weights_at(w, scales, i):
        least, scale = float32(-0.0), word_as_float(scales[i // 4 * (float_scales - 1)])
        if minima:
            least = word_as_float(scales[first_minimum + i // 4 * (minima - 1)])
        if halves:
            scale = scale * float32(int32(scales[1 + i // 4]))
        return (weight(w[i], 0, scale, least), weight(w[i], 1, scale, least), weight(w[i], 2, scale, least),
                weight(w[i], 3, scale, least))

    return load_block, weights_at


def quantized_kernel(format):
    """The kernel for a format of quantised tables."""
    (load_block, weights_at), raw_words, n_scales = weight_functions(format), format.raw_words, format.n_scales
    load_book = format.load_book

    @cuda.jit
    def embed_kernel(y, ids, wq, wd, k):
        let_next_begin()
        row = uint32(cuda.blockIdx.x)
        b, blocks = uint32(cuda.blockIdx.y * uint32(THREADS) + cuda.threadIdx.x), uint32(k >> uint32(5))
        book = load_book(uint32(cuda.threadIdx.x), uint32(THREADS))
        if b >= blocks:
            return
        raw, w = cuda.local.array(raw_words, uint32), cuda.local.array(8, uint32)
        scales = cuda.local.array(n_scales, uint32)
        load_block(w, scales, raw, wq, wd, uint32(ids[row]), blocks, b, book)
        at = uint32(row * k + uint32(b << uint32(5)))
        for i in range(8):
            w0, w1, w2, w3 = weights_at(w, scales, i)
            store_floats4(y, uint32(at + uint32(4 * i)), w0, w1, w2, w3)

    return embed_kernel


@cache
def kernel(kind):
    """The kernel for a table of this type, by the name that GGUF has for it."""
    return float_kernel(WEIGHT_AT[np.dtype(FLOATS[kind].dtype)]) if kind in FLOATS else quantized_kernel(FORMATS[kind])


def embed(card, kind, y, ids, table, scales, rows, k, *, stream=None):
    """y float32 [rows, k] <- rows `ids` (int32 [rows], unchecked) of a table of type `kind` ("F16", "Q8_0", ...): one
    array, `scales` being None, or the two of a quantised format. Writes only y, never allocates."""
    if kind in FLOATS:
        arrays, per_row = [float_words(table)], k
    else:
        arrays, per_row = [table.reshape(-1), as_words(scales)], k // BLOCK
    card.launch(kernel(kind), (rows, -(-per_row // THREADS)), THREADS, y.reshape(-1), ids, *arrays, k, stream=stream)


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [(1, 1, 1), (3, 7, 3), (33, 100, 8), (65, 1000, 5)]  # rows, vocabulary, blocks of the table in a row


def check(card, rows, vocabulary, blocks, kind):
    """Looks up random ids in a table of type `kind`; the bits must be the reference's."""
    rng = np.random.default_rng((rows, vocabulary, blocks))
    scales = None
    if kind in FLOATS:
        k = blocks * BLOCK
        values = random_weights(rng, np.dtype(FLOATS[kind].dtype), vocabulary, k)
        table = card.upload(values)
        want = FLOATS[kind].widen(values)
    else:
        k = blocks * FORMATS[kind].file_block
        raw = random_raw(rng, FORMATS[kind], vocabulary, k)
        table, scales = on_card(card, FORMATS[kind], raw, vocabulary, k)
        want = dequantize(FORMATS[kind], raw).reshape(vocabulary, k)
    ids = rng.integers(0, vocabulary, rows).astype(np.int32)
    ids[0] = vocabulary - 1
    y = card.alloc((rows + 1, k), np.float32)
    card.poison(y)
    embed(card, kind, y[:rows], card.upload(ids), table, scales, rows, k)
    y = card.download(y)
    np.testing.assert_array_equal(y[:rows], want[ids])
    assert np.isnan(y[rows]).all(), "wrote past the end"
    return 0.0


def cases(card):
    """The checks for every kind of table, then times for one token and for a prompt's chunk."""
    for case in CASES:
        for kind in (*FLOATS, *FORMATS):
            yield Case("{} of {} x {} blocks {}".format(*case, kind), partial(check, card, *case, kind))
    k = 5120
    for kind in ("Q8_0", "Q6_K"):
        table, scales = (card.zeros(*array) for array in FORMATS[kind].arrays(1000, k))
        for rows in (1, 512):
            y, ids = card.alloc((rows, k), np.float32), card.zeros(rows, np.int32)
            yield Case(f"time of {rows} rows of {k} {kind}", n_bytes=4 * y.size + rows * FORMATS[kind].q_row(k),
                       launch=partial(embed, card, kind, y, ids, table, scales, rows, k))


if __name__ == "__main__":
    main("Embedding rows", cases)
