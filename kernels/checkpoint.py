"""Copies the states of the linear-attention layers from a slot to a checkpoint, or back, or clears them: one launch.

    memory  float32 [n_layers, n_rows, heads, 128, 128]     states of the delta rule
    conv    float32 [n_layers, n_rows, 4, channels]         the last inputs of the convolution

A row is what one layer remembers of a slot or of a checkpoint. The first rows belong to slots, where the other kernels
find them by the number of the slot; the rest are checkpoints. In every layer, row `to` becomes a copy of row `source`,
or a row becomes zeros, where a new sequence begins:

    memory, layer 0   | row 0 | row 1 |  ..  | row `to` |  ..  | row `source` |  ..  |
            layer 1   | row 0 | row 1 |  ..  | row `to` |  ..  | row `source` |  ..  |
            ..                                     ^------------------'

A block copies or clears a tile of 4,096 floats of one layer. Of a layer's blocks the first have the tiles of `memory`,
the others those of `conv`. Element offsets have 64 bits: 48 layers, 48 heads and 100 rows hold 2^32 elements.

Pipe: memory. A copy moves 8 bytes per float, half read and half written; clearing writes 4. A row has 52.7 MB in the 24
layers of a 9B model and 20.6 MB in the 18 layers of a 0.8B model. A warp that copies has four loads of 512 bytes in
flight before its first store. One launch replaces the 48 fills that clearing a 9B model layer by layer would take.
"""

from functools import partial

import numpy as np
from numba import cuda
from numba.types import uint32, uint64

from kernels.bench import Case, main
from kernels.intrinsics import load_words4, store_words4
from kernels.records import States

THREADS = 256
LOADS = 4                           # of 16 bytes, by each thread
AT_ONCE = 4 * THREADS               # floats that a block loads at once
TILE = LOADS * AT_ONCE
WORDS = 4 * LOADS                   # of a thread


# ---- reference ---------------------------------------------------------------------------------------------

def reference(states, to, source=None):
    """states [n_layers, n_rows, ...] after row `to` became a copy of row `source`, or zeros without a source."""
    after = states.copy()
    after[:, to] = 0 if source is None else states[:, source]
    return after


# ---- kernel ------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def row_start(n_floats, n_rows, row):
    """The element at which a row of the block's layer begins."""
    return uint64((uint64(uint64(cuda.blockIdx.y) * uint64(n_rows)) + uint64(row)) * n_floats)


@cuda.jit(device=True, forceinline=True)
def first_of_tile(tile):
    """The first float of the thread's part of a tile, counted from the start of the row."""
    return uint32(tile * uint32(TILE) + uint32(cuda.threadIdx.x) * uint32(4))


@cuda.jit(device=True, forceinline=True)
def copy_tile(states, n_floats, n_rows, to, source, tile):
    target, origin = row_start(n_floats, n_rows, to), row_start(n_floats, n_rows, source)
    first = first_of_tile(tile)
    words = cuda.local.array(WORDS, uint32)     # constant indices, so registers
    for i in range(uint32(LOADS)):
        at, word = uint32(first + uint32(i * uint32(AT_ONCE))), uint32(i * uint32(4))
        if at < n_floats:
            words[word], words[word + 1], words[word + 2], words[word + 3] = \
                load_words4(states, uint64(origin + uint64(at)))
    for i in range(uint32(LOADS)):
        at, word = uint32(first + uint32(i * uint32(AT_ONCE))), uint32(i * uint32(4))
        if at < n_floats:
            store_words4(states, uint64(target + uint64(at)), words[word], words[word + 1], words[word + 2],
                         words[word + 3])


@cuda.jit(device=True, forceinline=True)
def clear_tile(states, n_floats, n_rows, row, tile):
    target, first, zero = row_start(n_floats, n_rows, row), first_of_tile(tile), uint32(0)
    for i in range(uint32(LOADS)):
        at = uint32(first + uint32(i * uint32(AT_ONCE)))
        if at < n_floats:
            store_words4(states, uint64(target + uint64(at)), zero, zero, zero, zero)


@cuda.jit
def copy_states_kernel(memory, ring, n_memory, n_ring, n_memory_tiles, n_rows, to, source):
    """Grid (tiles of a row of both arrays, n_layers)."""
    tile = uint32(cuda.blockIdx.x)
    if tile < n_memory_tiles:
        copy_tile(memory, n_memory, n_rows, to, source, tile)
    else:
        copy_tile(ring, n_ring, n_rows, to, source, uint32(tile - n_memory_tiles))


@cuda.jit
def clear_states_kernel(memory, ring, n_memory, n_ring, n_memory_tiles, n_rows, row):
    """Grid (tiles of a row of both arrays, n_layers)."""
    tile = uint32(cuda.blockIdx.x)
    if tile < n_memory_tiles:
        clear_tile(memory, n_memory, n_rows, row, tile)
    else:
        clear_tile(ring, n_ring, n_rows, row, uint32(tile - n_memory_tiles))


def copy_states(card, states: States, to, source, stream=None):
    """Row `to` of every layer <- row `source`. states: of all layers, with rows that are multiples of 4 floats. Never
    allocates."""
    _launch(card, copy_states_kernel, states, to, source, stream=stream)


def clear_states(card, states: States, row, stream=None):
    """The row of every layer <- zeros, as above."""
    _launch(card, clear_states_kernel, states, row, stream=stream)


def _launch(card, kernel, states, *rows, stream):
    n_layers, n_rows = states.memory.shape[:2]
    n_memory, n_ring = (array[0].size // n_rows for array in (states.memory, states.conv))
    tiles = [-(-n // TILE) for n in (n_memory, n_ring)]
    card.launch(kernel, (sum(tiles), n_layers), THREADS, states.memory.reshape(-1), states.conv.reshape(-1),
                n_memory, n_ring, tiles[0], n_rows, *rows, stream=stream)


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [(1, 2, 4, 8), (3, 5, TILE, 4), (2, 4, TILE + 4, AT_ONCE - 4), (4, 3, 3 * TILE - 8, 2 * AT_ONCE)]


def check(card, case):
    """case = (layers, rows, floats of a row of memory, of a row of conv): random rows; one layer more and all other
    rows must not change."""
    n_layers, n_rows, *widths = case
    random = np.random.default_rng(sum(case))
    before = [random.standard_normal((n_layers + 1, n_rows, n)).astype(np.float32) for n in widths]
    copies = [(copy_states, n_rows - 1, 0), (copy_states, 0, n_rows - 1)]
    for run, *rows in *copies, *((clear_states, row) for row in range(n_rows)):
        arrays = [card.upload(states) for states in before]
        memory, conv = (array[:-1] for array in arrays)                     # all layers but the last
        run(card, States(conv, memory), *rows)
        for array, states in zip(arrays, before):
            want = np.concatenate([reference(states[:-1], *rows), states[-1:]])
            np.testing.assert_array_equal(card.download(array).view(np.uint32), want.view(np.uint32))
    return 0.0


def cases(card):
    """The checks, then times at the shapes of a 0.8B, a 9B and a 27B model."""
    for case in CASES:
        yield Case("check {} layers, {} rows of {} + {}".format(*case), partial(check, card, case))
    for n_layers, n_heads in (18, 16), (24, 32), (48, 48):
        states = States(conv=card.zeros((n_layers, 2, 4 * (32 + n_heads) * 128), np.float32),
                        memory=card.zeros((n_layers, 2, n_heads * 128 * 128), np.float32))
        n_bytes, name = sum(array.nbytes for array in states), f"{n_layers} layers of {n_heads} heads"
        yield Case(name, launch=partial(copy_states, card, states, 1, 0), n_bytes=n_bytes)
        yield Case(f"{name}, cleared", launch=partial(clear_states, card, states, 0), n_bytes=n_bytes // 2)


if __name__ == "__main__":
    main("States to a checkpoint", cases)
