"""Copies the states of the linear-attention layers from a slot to a checkpoint, or back, or clears them: one launch.
During a decode step it saves the states of answers that have reached the place of a checkpoint: one launch, too.

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

`keep_states` begins a decode step. Where the position of an answer's first row is a multiple of 64, it writes what the
layers remember of the tokens before this position to the slot's target row, if it has one. Rows that are still pending
(kernels/records.py) are applied on the way, in the order and with the rounding of kernels/gdn_decode.py. The slot
itself stays as it is. A block takes one value head of one layer after the other, as kernels/gdn_decode.py does it.
Where no answer is due, the blocks end when they have read the positions.
"""

from functools import partial

import numpy as np
from numba import cuda
from numba.types import float32, uint32, uint64

from kernels.bench import Case, main
from kernels.conv import ring_index
from kernels.gdn import HEAD
from kernels.gdn_decode import ROWS, SUMS, Chain, apply_pending, assert_same_bits, inputs_before
from kernels.gdn_decode import THREADS as HEAD_THREADS
from kernels.gdn_decode import load_pending, load_state, store_state
from kernels.intrinsics import load_words4, store_words4
from kernels.kv_formats import PAGE
from kernels.records import CHECK_ROWS, VECTORS, Pending, Places, States

RECORD = VECTORS * HEAD
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


@cuda.jit(device=True, forceinline=True)
def keep_head(memory, ring, vectors, keeps, slot, position, n_pending, kept, layer, head, sizes, staged):
    """Of one head of one layer: row `kept` <- the state and the inputs of the convolution of a slot, with its pending
    rows. sizes: n_rows, n_slots, n_k, n_v. A head shares its q and k with others, one of which writes their inputs."""
    n_rows, n_slots, n_k, n_v = sizes
    thread = uint32(cuda.threadIdx.x)
    source, target = uint32(layer * n_rows + slot), uint32(layer * n_rows + kept)
    of_slot = uint32(layer * n_slots + slot)
    s = cuda.local.array((ROWS, 4), float32)
    at = uint32(uint32(thread >> uint32(5)) * uint32(ROWS * HEAD) + uint32(thread & uint32(31)) * uint32(4))
    origin = uint64(uint64(uint64(source) * uint64(n_v)) + uint64(head)) * uint64(HEAD * HEAD)
    words = load_pending(vectors, keeps, of_slot, head, n_v, n_pending, thread)
    load_state(s, memory, origin + uint64(at))
    cuda.syncthreads()              # `staged` may still be read for the head before
    apply_pending(s, words, n_pending, staged, thread)
    origin = uint64(uint64(uint64(target) * uint64(n_v)) + uint64(head)) * uint64(HEAD * HEAD)
    store_state(s, memory, origin + uint64(at))

    kind, element = uint32(thread >> uint32(7)), uint32(thread & uint32(HEAD - 1))
    if kind == uint32(2) or (kind < uint32(2) and head < n_k):
        channels, step = uint32((n_k + n_k + n_v) * uint32(HEAD)), uint32(n_v * uint32(RECORD))
        channel = uint32(uint32(n_k * kind + head) * uint32(HEAD) + element)
        record = uint32(uint32(uint32(of_slot * uint32(CHECK_ROWS - 1)) * n_v + head) * uint32(RECORD) + thread)
        x0, x1, x2 = inputs_before(ring, vectors, source, position, channel, channels, n_pending, record, step)
        oldest = ring[ring_index(source, position, channel, channels)]
        if n_pending > uint32(3):
            oldest = vectors[uint32(record + uint32(n_pending - uint32(4)) * step)]
        ring[ring_index(target, position, channel, channels)] = oldest
        ring[ring_index(target, uint32(position + uint32(1)), channel, channels)] = x0
        ring[ring_index(target, uint32(position + uint32(2)), channel, channels)] = x1
        ring[ring_index(target, uint32(position + uint32(3)), channel, channels)] = x2


@cuda.jit(launch_bounds=HEAD_THREADS)
def keep_states_kernel(memory, ring, accepted, vectors, keeps, row_slot, row_pos, targets, answers, n_layers,
                       n_rows, n_slots, n_k, n_v):
    """Any number of blocks."""
    staged = cuda.shared.array(SUMS, float32, alignment=16)
    lane, n_heads, first = uint32(cuda.threadIdx.x & 31), uint32(n_layers * n_v), uint32(0)
    while first < answers:
        position = uint32(1)
        if uint32(first + lane) < answers:
            position = uint32(row_pos[uint32(first + lane)])
        due = uint32(cuda.ballot_sync(0xFFFFFFFF, uint32(position & uint32(PAGE - 1)) == uint32(0)))
        answer = first              # a void row, at -1, is not due
        while due != uint32(0):
            if due & uint32(1) != uint32(0):
                slot = uint32(row_slot[answer])
                target = targets[slot]
                head = uint32(cuda.blockIdx.x)
                while head < n_heads and target >= 0:
                    layer = uint32(head // n_v)
                    keep_head(memory, ring, vectors, keeps, slot, uint32(row_pos[answer]), uint32(accepted[slot]),
                              uint32(target), layer, uint32(head - layer * n_v),
                              (n_rows, n_slots, n_k, n_v), staged)
                    head = uint32(head + uint32(cuda.gridDim.x))
            due, answer = uint32(due >> uint32(1)), uint32(answer + uint32(1))
        first = uint32(first + uint32(32))


def copy_states(card, states: States, to, source, stream=None):
    """Row `to` of every layer <- row `source`. states: of all layers, with rows that are multiples of 4 floats. Never
    allocates."""
    _launch(card, copy_states_kernel, states, to, source, stream=stream)


def clear_states(card, states: States, row, stream=None):
    """The row of every layer <- zeros, as above."""
    _launch(card, clear_states_kernel, states, row, stream=stream)


def keep_states(card, states: States, pending: Pending, places: Places, targets, n, stream=None):
    """Row targets[s] of every layer <- what slot s remembers of the tokens before its next position, for those of n
    slots whose next position is a multiple of 64. places: these slots and positions. targets: int32 [n_slots]; -1:
    none. states, pending: of all layers. Never allocates."""
    n_layers, n_rows, n_v = states.memory.shape[:3]
    n_k = (states.conv.shape[-1] // HEAD - n_v) // 2
    blocks = min(card.n_sms, n_layers * n_v)
    card.launch(keep_states_kernel, blocks, HEAD_THREADS, states.memory.reshape(-1), states.conv.reshape(-1),
                *(array.reshape(-1) for array in pending), *places, targets, n, n_layers, n_rows,
                pending.vectors.shape[1], n_k, n_v, stream=stream)


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


KEEPS = [(1, 1, 1), (3, 1, 3), (5, 2, 4)]                  # answers, n_k, n_v


def check_keep(card, case):
    """case = (answers, n_k, n_v): after a check of 8 rows of two layers, of which random numbers are accepted, the
    target rows of all answers but the last must have the bits of plain steps, and nothing else may change. The slot in
    front has no target."""
    chains = [Chain(card, *case, seed) for seed in range(2)]
    slots, random, n_slots = chains[0].slots, chains[0].random, len(chains[0].memory)
    takes = random.integers(1, CHECK_ROWS + 1, n_slots)
    first = PAGE * random.integers(1, 9, n_slots) - takes
    first[slots[-1]] += len(slots) > 1
    for chain in chains:
        chain.first = first
    wants = [chain.plain(CHECK_ROWS) for chain in chains]
    memory, ring = (np.stack([np.concatenate([array, np.full_like(array, np.nan)]) for array in arrays])
                    for arrays in zip(*((chain.memory, chain.ring) for chain in chains)))
    states = States(card.upload(ring), card.upload(memory))
    pending = Pending.allocate(card, 2, n_slots, chains[0].heads)
    for layer, chain in enumerate(chains):
        rows = [(j if j < takes[slot] else None, slot, first[slot] + j)
                for j in range(CHECK_ROWS) for slot in slots]
        chain.run(states.layer(layer), rows, CHECK_ROWS, pending.layer(layer))
    before = [card.download(array) for array in states]
    pending = pending._replace(accepted=card.upload((takes - 1).astype(np.int32)))
    positions = [first[slot] + takes[slot] for slot in slots]
    places = Places(*(card.upload(np.asarray(column, np.int32)) for column in (slots, positions)))
    targets = n_slots + random.permutation(n_slots).astype(np.int32)
    targets[slots[0]] = -1
    keep_states(card, states, pending, places, card.upload(targets), len(slots))
    for layer, (_, want_memory, want_rings) in enumerate(wants):
        for slot in slots[1:-1]:
            before[0][layer, targets[slot]] = want_rings[takes[slot]][slot]
            before[1][layer, targets[slot]] = want_memory[takes[slot]][slot]
    for got, want in zip(states, before):
        assert_same_bits(card.download(got), want)
    return 0.0


def cases(card):
    """The checks, then times at the shapes of a 0.8B, a 9B and a 27B model."""
    for case in KEEPS:
        yield Case("keep of {} answers, heads {}/{}".format(*case), partial(check_keep, card, case))
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
