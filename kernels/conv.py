"""Causal depthwise convolution of width 4 with SiLU, its last inputs carried from launch to launch.

    s[t, c] = w[c, 0] x[t - 3, c] + w[c, 1] x[t - 2, c] + w[c, 2] x[t - 1, c] + w[c, 3] x[t, c]
    y[t, c] = s[t, c] / (1 + exp(-s[t, c]))

    x        float32 [rows, >= channels], rows `stride` apart: the first columns of a layer's projections
    y        float32 [rows, channels]
    w        float32 [channels, 4], tap 3 on the current row; a lane loads its four taps as 16 bytes
    ring     float32 [n_slots, 4, channels]: the input of position p is in row p mod 4; zeros at the start
    row_slot, row_pos  int32 [rows]

All rows of a launch are consecutive positions of one slot. The ring lets several blocks of the decode kernel
(kernels/gdn_decode.py) convolve the same channel at once: position p reads the ring rows of p - 3 .. p - 1 and is
itself written to row p mod 4, which no block reads.

    ring row       0      1      2      3
    position       4      5     (2)     3       position 6 reads 3, 4 and 5, and replaces 2

A block takes 4 rows of 128 channels. A thread takes one channel and keeps its last inputs in registers. Lanes have
neighbouring channels, so every access of a warp is 128 contiguous bytes. The block of the first rows also writes the
ring after it has read it; each thread touches the ring of its own channel only.

A row is computed in the same order of operations wherever the launch began, so its bits do not depend on the cut.

Pipe: fp32 (4 multiply-adds, then about 25 operations of SiLU per value). Bytes: 8 per value, one read and one write;
three of seven rows are read twice, from the first- or second-level cache. 512 rows of 6,144 channels take 12.4 us on an
H200, 2.0 TB/s, bound by the latency of SiLU (benchmarks/results.md, section conv).
"""

from functools import partial

import numpy as np
from numba import cuda, float32, uint32

from kernels.bench import Case, main
from kernels.intrinsics import load_floats4, silu
from kernels.records import Places, Projected

THREADS = 128
WIDTH = 4           # taps, and rows of the ring
BEFORE = WIDTH - 1  # earlier rows that a row needs
TILE = 4            # rows of a block
INPUTS = BEFORE + TILE  # rows that a block reads


def reference(x, before, w):
    """One sequence in float64: x [T, C], the three rows before [3, C], w [C, 4] -> y [T, C]."""
    padded = np.concatenate([before, x]).astype(np.float64)
    s = sum(w[:, j] * padded[j:j + len(x)] for j in range(WIDTH))
    return s / (1.0 + np.exp(-s))


@cuda.jit(device=True, inline="always")
def convolve(w0, w1, w2, w3, x0, x1, x2, x3):
    """s of one channel; weights and inputs from the oldest to the newest."""
    return cuda.fma(w3, x3, cuda.fma(w2, x2, cuda.fma(w1, x1, w0 * x0)))


@cuda.jit(device=True, inline="always")
def ring_index(slot, position, channel, channels):
    """Index in the ring of the input at `position`, which may be an earlier position that wrapped around 2**32."""
    return uint32(uint32(uint32(slot * uint32(WIDTH)) + (position & uint32(WIDTH - 1))) * channels + channel)


@cuda.jit
def conv_silu_kernel(y, x, stride, ring, w, row_slot, row_pos, rows, channels):
    channel = uint32(cuda.blockIdx.x * uint32(THREADS) + cuda.threadIdx.x)
    if channel >= channels:
        return
    first = uint32(cuda.blockIdx.y * uint32(TILE))
    slot, position, last = uint32(row_slot[0]), uint32(row_pos[0]), uint32(rows - uint32(1))
    w0, w1, w2, w3 = load_floats4(w, uint32(channel * uint32(WIDTH)))
    inputs = cuda.local.array(INPUTS, float32)  # constant indices, so registers
    for i in range(uint32(BEFORE)):
        back = uint32(uint32(BEFORE) - i)
        if first == uint32(0):
            inputs[i] = ring[ring_index(slot, uint32(position - back), channel, channels)]
        else:
            inputs[i] = x[uint32(uint32(first - back) * stride + channel)]
    for i in range(uint32(TILE)):  # rows past the end repeat the last one
        row = uint32(min(uint32(first + i), last))
        inputs[uint32(i + uint32(BEFORE))] = x[uint32(row * stride + channel)]
    for i in range(uint32(TILE)):
        row = uint32(first + i)
        if row < rows:
            y[uint32(row * channels + channel)] = silu(convolve(
                w0, w1, w2, w3, inputs[i], inputs[uint32(i + uint32(1))], inputs[uint32(i + uint32(2))],
                inputs[uint32(i + uint32(3))]))
    if first == uint32(0):
        for i in range(uint32(1), uint32(WIDTH + 1)):
            if i <= rows:
                row = uint32(rows - i)
                to = ring_index(slot, uint32(position + row), channel, channels)
                ring[to] = x[uint32(row * stride + channel)]


def conv_silu(card, y, x: Projected, ring, w, places: Places, rows, channels, *,
              stream=None):
    """y [rows, channels] <- silu(conv(x)); the ring of the slot then holds the last inputs.

    Shapes and types as above. All rows belong to slot places.slots[0] and follow position places.positions[0]. Writes y
    and ring, never allocates.
    """
    card.launch(conv_silu_kernel, (-(-channels // THREADS), -(-rows // TILE)), THREADS, y.reshape(-1), *x,
                ring.reshape(-1), w.reshape(-1), *places, rows, channels, stream=stream)


# ---- check and bench ---------------------------------------------------------------------------------------

CASES = [(1, 0, 32), (1, 7, 1024), (2, 64, 63), (3, 5, 65), (8, 64, 1024), (9, 2, 500), (33, 128, 1024),
         (500, 64, 1024)]  # rows, position of the first, channels

# s has four roundings on the sum of |w x|, and silu' < 1.1; silu itself has 4 roundings.
ROUNDING = 2.0 ** -24  # relative


def ring_of(before, position):
    """The ring [4, C] that holds the three inputs before `position`, [3, C]; its fourth row is NaN."""
    ring = np.full((WIDTH, before.shape[1]), np.nan, np.float32)
    for i, x in enumerate(before):
        ring[(position + i - BEFORE) % WIDTH] = x
    return ring


def check(card, case):
    """case = (rows, position, channels): random inputs of a slot between two others that must keep their rings, and a
    row too many that must stay poisoned. Returns the largest error in units of the tolerance."""
    (rows, position, channels), random = case, np.random.default_rng(sum(case))
    stride = channels + 12
    x, before, w = (random.standard_normal(shape).astype(np.float32) for shape in
                    ((rows, stride), (BEFORE, channels), (channels, WIDTH)))
    rings = np.stack([random.standard_normal((WIDTH, channels)), ring_of(before, position),
                      random.standard_normal((WIDTH, channels))]).astype(np.float32)
    card_ring, y = card.upload(rings), card.alloc((rows + 1, channels), np.float32)
    card.poison(y)
    positions = np.arange(position, position + rows, dtype=np.int32)
    places = Places(card.upload(np.ones(rows, np.int32)), card.upload(positions))
    conv_silu(card, y, Projected(card.upload(x).reshape(-1), stride), card_ring, card.upload(w), places, rows, channels)
    y, got_ring, x = card.download(y), card.download(card_ring), x[:, :channels]
    padded = np.concatenate([before, x])
    want, terms = reference(x, before, w), sum(np.abs(w[:, j] * padded[j:j + rows]) for j in range(WIDTH))
    worst = np.max(np.abs(y[:rows] - want) / (ROUNDING * (4 * 1.1 * terms + 4 * np.abs(want))))
    assert worst <= 1, f"{worst} times the tolerance"
    for i in range(1, BEFORE + 1):
        np.testing.assert_array_equal(got_ring[1][(position + rows - i) % WIDTH], padded[-i])
    np.testing.assert_array_equal(got_ring[::2], rings[::2])
    assert np.isnan(y[rows]).all(), "wrote past its rows"
    return worst


def cases(card):
    """The checks (error in units of the tolerance), then times at the shapes of a small and a 27B model."""
    for case in CASES:
        yield Case("{} rows from {}, {} channels".format(*case), partial(check, card, case))
    for rows, channels in ((64, 1024), (512, 6144), (512, 10240)):
        yield _timed(card, rows, channels)


def _timed(card, rows, channels):
    x, y = card.zeros(rows * channels, np.float32), card.alloc((rows, channels), np.float32)
    ring, w = card.zeros((1, WIDTH, channels), np.float32), card.zeros((channels, WIDTH), np.float32)
    zeros = card.zeros(rows, np.int32)
    return Case(f"{rows} rows, {channels} channels",
                launch=partial(conv_silu, card, y, Projected(x, channels), ring, w, Places(zeros, zeros), rows,
                               channels),
                n_bytes=x.nbytes + y.nbytes)


if __name__ == "__main__":
    main("Causal convolution and SiLU", cases)
