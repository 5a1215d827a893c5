"""Normalised and rotated queries: what stands between the query projection and attention.

Per token and head, with x the 256 values of the head and w the norm's weight:

    y = x / sqrt(mean(x^2) + eps) * w
    q[i]      = (y[i] cos a_i - y[i + 32] sin a_i) / 16       i = 0..31, the rotary pairs (i, i + 32)
    q[i + 32] = (y[i + 32] cos a_i + y[i] sin a_i) / 16
    q[j]      = y[j] / 16                                     j = 64..255 pass through
    a_i = position * inv_freq[i],   inv_freq[i] = base^(-2 i / 64)

The angle is a float32 product, as in the models' own code: at position 262,143 it is off by up to 2^-7 of a
radian (half an ulp of the position's ten bits before the point and the rounding of inv_freq), in every
implementation alike; `sincos` reduces it exactly enough to add nothing.

1/16 is attention's scale 256^-1/2, a power of two, so folding it in costs no rounding.

Interleaved M-RoPE: a token has three positions (time, height, width), equal for text. Frequency i follows
the height if i mod 3 = 1 and i < 3 s_h, the width if i mod 3 = 2 and i < 3 s_w, and the time otherwise;
(s_t, s_h, s_w) are the sections of the model file.

    projected float32 [rows, stride]       512 floats per head first: 256 query values, then 256 gate
                                           values, which attention reads
    q         float16 [rows, heads, 256]
    rope_pos  int32   [3, rows]            time, height, width
    inv_freq  float32 [32]

One warp per (row, head). Lane l holds dims l, l + 32, .. l + 224: both halves of rotary pair l, so the
rotation needs no exchange, and each access of the warp is 128 contiguous bytes:

        lane      0    1   ...  31
        x0      dim 0   1  ...  31     rotated together
        x1         32  33  ...  63
        x2         64  65  ...  95     pass through, as do x3 .. x7

The keys go the same way, straight into their cache page: kernels/kv_cache.py, which uses the device
functions below.

Pipe: fp32, about 120 instructions per lane, most of them the sine and cosine. Bytes: 1,024 read and 512
written per head and row. In decode a matter of its launch; in prefill bound by memory, 80 % of copy
bandwidth expected.
"""

import numpy as np
from numba import cuda
from numba.types import float16, float32, int32, uint32

from kernels.bench import Case, main
from kernels.intrinsics import rsqrt, sincos, warp_sum

HEAD_DIM = 256
ROTARY = 64            # dims 0..63 rotate
PAIRS = ROTARY // 2    # one per lane
QUERY_SCALE = HEAD_DIM ** -0.5


# ---- reference ---------------------------------------------------------------------------------------------

def inverse_frequencies(base):
    """float32 [32]: base^(-2 i / 64), from float64."""
    return (float(base) ** (-2.0 * np.arange(PAIRS) / ROTARY)).astype(np.float32)


def norm_rope_reference(x, w, rope_pos, inv_freq, sections, eps, scale=1.0):
    """x [rows, heads, 256], w [256], rope_pos int [3, rows], sections (s_t, s_h, s_w) -> float64 [rows,
    heads, 256]."""
    x = np.asarray(x, np.float64)
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * np.asarray(w, np.float64)
    i = np.arange(PAIRS)
    axis = np.where((i % 3 == 1) & (i < 3 * sections[1]), 1,
                    np.where((i % 3 == 2) & (i < 3 * sections[2]), 2, 0))
    angle = np.asarray(rope_pos)[axis].T * np.asarray(inv_freq, np.float64)           # [rows, 32]
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = y[..., :PAIRS].copy(), y[..., PAIRS:ROTARY].copy()
    y[..., :PAIRS] = first * cos - second * sin
    y[..., PAIRS:ROTARY] = second * cos + first * sin
    return y * scale


# ---- kernel ------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def load_head(x, at, lane):
    """Elements at + lane + 32 j of x: the lane's dims of a head."""
    at = uint32(at + lane)
    return (x[at], x[uint32(at + uint32(32))], x[uint32(at + uint32(64))], x[uint32(at + uint32(96))],
            x[uint32(at + uint32(128))], x[uint32(at + uint32(160))], x[uint32(at + uint32(192))],
            x[uint32(at + uint32(224))])


@cuda.jit(device=True, forceinline=True)
def norm_head(x, w, eps):
    """The lane's 8 normalised values; x and w: the tuples that `load_head` gave."""
    x0, x1, x2, x3, x4, x5, x6, x7 = x
    w0, w1, w2, w3, w4, w5, w6, w7 = w
    low = cuda.fma(x3, x3, cuda.fma(x2, x2, cuda.fma(x1, x1, x0 * x0)))
    high = cuda.fma(x7, x7, cuda.fma(x6, x6, cuda.fma(x5, x5, x4 * x4)))
    r = rsqrt(cuda.fma(warp_sum(low + high), float32(1.0 / HEAD_DIM), eps))
    return (x0 * r * w0, x1 * r * w1, x2 * r * w2, x3 * r * w3, x4 * r * w4, x5 * r * w5, x6 * r * w6,
            x7 * r * w7)


@cuda.jit(device=True, forceinline=True)
def rotation(row, n_positions, lane, rope_pos, inv_freq, height_section, width_section):
    """(sin, cos) of the angle of a row's rotary pair `lane`; n_positions: row length of rope_pos."""
    time, height = rope_pos[row], rope_pos[uint32(n_positions + row)]
    width = rope_pos[uint32(n_positions + n_positions + row)]
    axis = uint32(lane % uint32(3))
    position = height if axis == uint32(1) and lane < uint32(uint32(3) * height_section) else time
    position = width if axis == uint32(2) and lane < uint32(uint32(3) * width_section) else position
    return sincos(float32(int32(position)) * inv_freq[lane])


@cuda.jit(device=True, forceinline=True)
def rotate(x0, x1, sin, cos):
    """A rotary pair, turned."""
    return cuda.fma(x0, cos, -(x1 * sin)), cuda.fma(x1, cos, x0 * sin)


@cuda.jit(device=True, forceinline=True)
def norm_rotate(x, w, sin, cos, eps):
    """The lane's 8 values of a normalised and rotated head; x and w: the tuples that `load_head` gave."""
    x0, x1, x2, x3, x4, x5, x6, x7 = norm_head(x, w, eps)
    x0, x1 = rotate(x0, x1, sin, cos)
    return x0, x1, x2, x3, x4, x5, x6, x7


@cuda.jit(device=True, forceinline=True)
def store_query(q, at, lane, x, w, sin, cos, eps):
    """The query at element `at` of q from the tuples of values and weights that `load_head` gave."""
    x0, x1, x2, x3, x4, x5, x6, x7 = norm_rotate(x, w, sin, cos, eps)
    s = float32(QUERY_SCALE)
    store_head(q, at, lane, (x0 * s, x1 * s, x2 * s, x3 * s, x4 * s, x5 * s, x6 * s, x7 * s))


@cuda.jit(device=True, forceinline=True)
def store_head(out, at, lane, x):
    """Writes a lane's 8 values as float16 to dims lane + 32 j of the head at element `at` (uint32 or uint64)
    of `out`."""
    at = at + lane
    out[at] = float16(x[0])
    out[at + uint32(32)] = float16(x[1])
    out[at + uint32(64)] = float16(x[2])
    out[at + uint32(96)] = float16(x[3])
    out[at + uint32(128)] = float16(x[4])
    out[at + uint32(160)] = float16(x[5])
    out[at + uint32(192)] = float16(x[6])
    out[at + uint32(224)] = float16(x[7])


@cuda.jit
def norm_rope(q, projected, w, rope_pos, inv_freq, stride, n_positions, heads, height_section, width_section,
              eps):
    """Grid (rows, heads), one warp each."""
    lane, row, head = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
    sin, cos = rotation(row, n_positions, lane, rope_pos, inv_freq, height_section, width_section)
    x = load_head(projected, uint32(uint32(row * stride) + head * uint32(2 * HEAD_DIM)), lane)
    at = uint32(uint32(uint32(row * heads) + head) * uint32(HEAD_DIM))
    store_query(q, at, lane, x, load_head(w, uint32(0), lane), sin, cos, eps)


def norm_rope_q(card, q, projected, stride, w, rope_pos, inv_freq, rows, heads, sections, eps, stream=None):
    """q float16 [rows, heads, 256] <- projected float32 [rows, stride], of which a row begins with 512 floats
    per head, w float32 [256], rope_pos int32 [3, >= rows], inv_freq float32 [32], sections (s_t, s_h, s_w).
    Writes q only, never allocates."""
    card.launch(norm_rope, (rows, heads), 32, q.reshape(-1), projected.reshape(-1), w, rope_pos.reshape(-1),
                inv_freq,
                stride, rope_pos.shape[1], heads, sections[1], sections[2], float(eps), stream=stream)


# ---- check -------------------------------------------------------------------------------------------------

CASES = [(1, 4), (3, 16), (31, 2), (65, 24)]  # rows, heads
SECTIONS, EPS = (11, 11, 10), 1e-6

# Of the largest |q|: rounding to half 2^-11 of a value; the float32 steps before, some 20 roundings of 2^-24
# and the angle's, 2^-24 of up to 700 radians here, together less than 2^-13.
TOLERANCE = 2.0 ** -11 + 2.0 ** -13


def sample_positions(rng, rows):
    """rope_pos int32 [3, rows]: three different positions per row."""
    return rng.integers(0, 700, (3, rows)).astype(np.int32)


def check(card, case):
    """Compares with float64, one row too many must stay poisoned. Returns the largest error, of the largest
    |q|."""
    rows, heads = case
    rng = np.random.default_rng(rows * heads)
    stride = heads * 2 * HEAD_DIM + 12
    projected = rng.standard_normal((rows, stride), np.float32) * 3
    w = rng.uniform(0.5, 1.5, HEAD_DIM).astype(np.float32)
    rope_pos, inv_freq = sample_positions(rng, rows), inverse_frequencies(1e7)
    q = card.alloc((rows + 1, heads, HEAD_DIM), np.float16)
    card.poison(q)
    norm_rope_q(card, q[:rows], card.upload(projected), stride, *map(card.upload, (w, rope_pos, inv_freq)),
                rows, heads,
                SECTIONS, EPS)
    got = card.download(q).astype(np.float64)
    queries = projected[:, :stride - 12].reshape(rows, heads, 2, HEAD_DIM)[:, :, 0]
    want = norm_rope_reference(queries, w, rope_pos, inv_freq, SECTIONS, EPS, QUERY_SCALE)
    error = np.max(np.abs(got[:rows] - want)) / np.max(np.abs(want))
    assert error <= TOLERANCE, f"error {error}"
    assert np.isnan(got[rows]).all(), "wrote on"
    return error


def cases(card):
    """The checked cases."""
    for case in CASES:
        yield Case(f"{case[0]} rows, {case[1]} heads", lambda case=case: check(card, case))


if __name__ == "__main__":
    main("Rotary queries", cases)
