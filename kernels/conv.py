"""Causal depthwise convolution of width 4 with SiLU, its last three inputs carried from launch to launch.

    s[t, c] = w[c, 0] x[t - 3, c] + w[c, 1] x[t - 2, c] + w[c, 2] x[t - 1, c] + w[c, 3] x[t, c]
    y[t, c] = s[t, c] / (1 + exp(-s[t, c]))

    x, y      float32 [rows, channels]
    w         float32 [channels, 4], tap 3 on the current row: one 16-byte load gives a lane all it needs
    state     float32 [n_slots, 3, channels], oldest first: the x of the three rows before, zeros at the start
    row_slot  int32 [rows]

The rows of a launch are sequences of `length` consecutive tokens of one slot each: one row per slot in
decode, all rows one sequence in prefill. A thread walks one channel of one sequence from its first row to its
last, with the last three inputs in registers; it alone reads and writes the state of that channel, so
sequences may be of any length (also shorter than the state) and nothing races. Lanes hold neighbouring
channels, so every access of a warp is 128 contiguous bytes:

              channel  0 1 2 ... 31 | 32 ...
    state row 0 1 2    a b c        |            the window (a, b, c) moves down
    x row     0        |  |  |      v            eight rows are fetched before the first is used
              1        lanes

The order of operations for a row is the same wherever the launch began, so the bits do not depend on the cut.

Pipe: fp32 (4 multiply-adds, then about 25 operations of SiLU per value). Bytes: 8 per value, one read and one
write. Decode is bound by its launch. Prefill has channels / 32 warps in flight with 8 loads each, which for
10,240 channels is enough for about half of the copy bandwidth of a V100.
"""

from functools import partial

import numpy as np
from numba import cuda, float32, uint32

from kernels.bench import Case, main
from kernels.intrinsics import load_floats4, silu

THREADS = 64
AHEAD = 8   # rows fetched together
WINDOW = 3  # rows carried
TILE = WINDOW + AHEAD


def reference(x, state, w):
    """One sequence in float64: x [T, C], state [3, C], w [C, 4] -> (y [T, C], the next state [3, C])."""
    padded = np.concatenate([state, x]).astype(np.float64)
    s = sum(w[:, j] * padded[j:j + len(x)] for j in range(4))
    return s / (1.0 + np.exp(-s)), padded[len(x):]


@cuda.jit(device=True, inline="always")
def _tap4(w0, w1, w2, w3, x0, x1, x2, x3):
    return silu(cuda.fma(w3, x3, cuda.fma(w2, x2, cuda.fma(w1, x1, w0 * x0))))


@cuda.jit
def conv_silu_kernel(y, x, state, w, row_slot, length, channels):
    channel = uint32(cuda.blockIdx.x * uint32(THREADS) + cuda.threadIdx.x)
    if channel >= channels:
        return
    first = uint32(cuda.blockIdx.y * length)
    carried = uint32(uint32(uint32(row_slot[first]) * uint32(WINDOW)) * channels + channel)
    w0, w1, w2, w3 = load_floats4(w, uint32(channel * uint32(4)))
    rows = cuda.local.array(TILE, float32)  # carried, then fetched; constant indices, so registers
    for i in range(uint32(WINDOW)):
        rows[i] = state[uint32(carried + i * channels)]

    at = uint32(first * channels + channel)
    whole = uint32(length // uint32(AHEAD))
    for _ in range(whole):
        for i in range(uint32(AHEAD)):
            rows[uint32(i + uint32(WINDOW))] = x[uint32(at + i * channels)]
        for i in range(uint32(AHEAD)):
            y[uint32(at + i * channels)] = _tap4(w0, w1, w2, w3, rows[i], rows[uint32(i + uint32(1))],
                                                 rows[uint32(i + uint32(2))], rows[uint32(i + uint32(3))])
        for i in range(uint32(WINDOW)):
            rows[i] = rows[uint32(i + uint32(AHEAD))]
        at = uint32(at + uint32(AHEAD) * channels)
    for _ in range(uint32(length - whole * uint32(AHEAD))):
        newest = x[at]
        y[at] = _tap4(w0, w1, w2, w3, rows[0], rows[1], rows[2], newest)
        rows[0], rows[1], rows[2] = rows[1], rows[2], newest
        at = uint32(at + channels)

    for i in range(uint32(WINDOW)):
        state[uint32(carried + i * channels)] = rows[i]


def conv_silu(card, y, x, state, w, row_slot, rows, channels, length=1, stream=None):
    """y [rows, channels] <- silu(conv(x)); the state of each slot in row_slot moves on by `length` rows.

    Shapes and types as above. `rows` is a multiple of `length`; rows i * length ... are one sequence of slot
    row_slot[i * length], and no slot may own two sequences of a launch. Writes y and state, never allocates.
    """
    grid = -(-channels // THREADS), rows // length
    card.launch(conv_silu_kernel, grid, THREADS, y.reshape(-1), x.reshape(-1), state.reshape(-1),
                w.reshape(-1), row_slot, length, channels, stream=stream)


# ---- check and bench ---------------------------------------------------------------------------------------

CASES = [(1, 1, 32), (1, 3, 1024), (2, 1, 63), (3, 2, 65), (8, 1, 1024), (9, 1, 500), (33, 2, 1024),
         (500, 1, 1024)]

# s is four roundings on the sum of |w x|, and silu' < 1.1; silu itself is 4 roundings.
ROUNDING = 2.0 ** -24  # relative


def check(card, case):
    """case = (length, sequences, channels): random inputs, slots out of order, an idle slot that must
    keep its state and a row too many that must stay poisoned. Returns the largest error in units of the
    tolerance."""
    length, sequences, channels = case
    rows, n_slots, random = length * sequences, sequences + 1, np.random.default_rng(sum(case))
    x, state, w = (random.standard_normal(shape).astype(np.float32) for shape in
                   ((rows, channels), (n_slots, WINDOW, channels), (channels, 4)))
    slots = np.arange(sequences, 0, -1)  # slot 0 stays idle
    card_state, y = card.upload(state), card.alloc((rows + 1, channels), np.float32)
    card.poison(y)
    conv_silu(card, y[:rows], card.upload(x), card_state, card.upload(w),
              card.upload(np.repeat(slots, length).astype(np.int32)), rows, channels, length)
    got, got_state, worst = card.download(y), card.download(card_state), 0.0
    for i, slot in enumerate(slots):
        part = slice(i * length, (i + 1) * length)
        want, want_state = reference(x[part], state[slot], w)
        padded = np.concatenate([state[slot], x[part]])
        terms = sum(np.abs(w[:, j] * padded[j:j + length]) for j in range(4))
        tolerance = ROUNDING * (4 * 1.1 * terms + 4 * np.abs(want))
        worst = max(worst, np.max(np.abs(got[part] - want) / tolerance))
        np.testing.assert_array_equal(got_state[slot], want_state)
    assert worst <= 1, f"{worst} times the tolerance"
    np.testing.assert_array_equal(got_state[0], state[0])
    assert np.isnan(got[rows]).all(), "wrote past its rows"
    return worst


def cases(card):
    """The checks (error in units of the tolerance), then times at the shapes of a small and a 27B model."""
    for case in CASES:
        yield Case("length {} x {}, {} channels".format(*case), partial(check, card, case))
    for name, sequences, length, channels in (("decode", 1, 1, 1024), ("decode", 8, 1, 10240),
                                              ("prefill", 1, 512, 1024), ("prefill", 1, 512, 10240)):
        yield _timed(card, name, sequences, length, channels)


def _timed(card, name, sequences, length, channels):
    rows = sequences * length
    x, y = card.zeros((rows, channels), np.float32), card.alloc((rows, channels), np.float32)
    state, w = card.zeros((sequences, WINDOW, channels), np.float32), card.zeros((channels, 4), np.float32)
    slots = card.upload(np.repeat(np.arange(sequences, dtype=np.int32), length))
    return Case(f"{name} {sequences} x {length}, {channels} channels",
                launch=partial(conv_silu, card, y, x, state, w, slots, rows, channels, length),
                n_bytes=x.nbytes + y.nbytes + 2 * state.nbytes + w.nbytes)


if __name__ == "__main__":
    main("Causal convolution and SiLU", cases)
