"""Normalised and rotated queries: what stands between the query projection and attention.

Per token and head, with x the D = head_dim values of the head, w the norm's weight and R = rotary width:

    y = x / sqrt(mean(x^2) + eps) * w
    q[i]         = (y[i] cos a_i - y[i + R/2] sin a_i) / sqrt(D)     i = 0 .. R/2 - 1: rotary pairs (i, i + R/2)
    q[i + R/2]   = (y[i + R/2] cos a_i + y[i] sin a_i) / sqrt(D)
    q[j]         = y[j] / sqrt(D)                                    j = R .. D - 1 pass through
    a_i = position * inv_freq[i],   inv_freq[i] = base^(-2 i / R)

The kernels take D = 256 or 128 and R = 64 or 128; Qwen3.5 has D = 256, R = 64, a plain Qwen3 D = R = 128.

The angle is a float32 product, as in the models' own code. At position 262,143 it is off by up to 2^-6 of a radian in
every implementation: 2^-7 by the rounding of the product, and 2^-7 by that of inv_freq. `sincos` reduces the angle
exactly enough to add nothing. 1 / sqrt(D) is attention's scale; 1/16 is exact, 128^-1/2 is rounded.

Interleaved M-RoPE: a token has three positions (time, height, width), which are equal for text. Frequency i follows
the height if i mod 3 = 1 and i < 3 s_h, the width if i mod 3 = 2 and i < 3 s_w, and the time otherwise;
(s_t, s_h, s_w) are the sections of the model file.

    projected float32 [rows, stride]       a row begins with the queries of all heads, D values each; where the heads
                                           are gated, the D gate values of a head follow its query
    q         float16 [rows, heads, D]
    positions int32   [3, rows]            time, height, width
    inv_freq  float32 [R / 2]

One warp per (row, head). Lane l holds dims l, l + 32, l + 64, ...: both halves of a rotary pair, so the rotation
needs no exchange between lanes, and each access of the warp is 128 contiguous bytes:

    D = 256, R = 64:   lane      0    1   ...  31            D = 128, R = 128:
                       x0      dim 0   1  ...  31   rotated with x1            x0 rotated with x2
                       x1         32  33  ...  63                              x1 rotated with x3
                       x2 .. x7   pass through

The kernel that stores keys (kernels/kv_cache.py) and the one that attends in a decode step
(kernels/attend_decode.py) use the device functions below.

Pipe: fp32, about 120 instructions per lane, most of them the sine and cosine. Bytes: 4 D read and 2 D written per
head and row. In decode bound by its launch; in prefill by memory, 80 % of copy bandwidth expected.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.types import float16, float32, int32, uint32

from kernels.bench import Case, main
from kernels.card import Array
from kernels.hadamard import ROOT, turn, turn_reference
from kernels.intrinsics import rsqrt, sincos, warp_sum
from kernels.records import Projected

HEAD_DIMS = 256, 128    # widths of a head that attention's kernels take,
ROTARY_DIMS = 64, 128   # and of its rotated part


# ---- records -----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer. ValueError: the kernels cannot take heads like these."""

    n_heads: int            # of queries; query head h reads KV head h // (n_heads / n_kv_heads)
    n_kv_heads: int
    head_dim: int           # values of a query, key or value
    rotary: int             # leading dims of a head that are rotated
    gated: bool             # every query is followed by a gate
    eps: float              # of the norms of queries and keys

    def __post_init__(self):
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"attention takes heads of 256 or 128 values, not {self.head_dim}")
        if self.rotary not in ROTARY_DIMS or self.rotary > self.head_dim:
            raise ValueError(f"attention rotates 64 or 128 dims of a head, not {self.rotary}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"{self.n_heads} query heads do not share {self.n_kv_heads} KV heads evenly")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.n_heads // self.n_kv_heads

    @property
    def query_width(self) -> int:
        """Columns of a head's query in a row of products, its gate included."""
        return self.head_dim * (2 if self.gated else 1)

    @property
    def k_column(self) -> int:
        """Column where the keys begin in a row of products: after the queries."""
        return self.n_heads * self.query_width

    @property
    def v_column(self) -> int:
        return self.k_column + self.n_kv_heads * self.head_dim

    @property
    def n_columns(self) -> int:
        """Of a row of products: queries with their gates, keys, values."""
        return self.v_column + self.n_kv_heads * self.head_dim


class Rotary(NamedTuple):
    """The rotation of the rows of a pass."""

    positions: Array        # int32 [3, >= rows]: time, height, width of each row
    frequencies: Array      # float32 [rotary / 2], see `inverse_frequencies`
    sections: tuple         # (s_t, s_h, s_w)


class QKV(NamedTuple):
    """Queries, gates, keys and values of a pass as the projections gave them, with all that norm and rotation need."""

    products: Projected     # queries and gates of all heads, keys, values: see the columns of `Heads`
    heads: Heads
    q_norm: Array           # float32 [head_dim], the weights of the norms
    k_norm: Array
    rotary: Rotary


# ---- reference ---------------------------------------------------------------------------------------------

def inverse_frequencies(base, rotary):
    """float32 [rotary / 2]: base^(-2 i / rotary), from float64."""
    return (float(base) ** (-2.0 * np.arange(rotary // 2) / rotary)).astype(np.float32)


def norm_rope_reference(x, w, rope_pos, inv_freq, sections, eps, scale=1.0):
    """x [rows, heads, D], w [D], rope_pos int [3, rows], inv_freq [R / 2], sections (s_t, s_h, s_w) -> float64 [rows,
    heads, D]."""
    x, pairs = np.asarray(x, np.float64), len(inv_freq)
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * np.asarray(w, np.float64)
    i = np.arange(pairs)
    axis = np.where((i % 3 == 1) & (i < 3 * sections[1]), 1,
                    np.where((i % 3 == 2) & (i < 3 * sections[2]), 2, 0))
    angle = np.asarray(rope_pos)[axis].T * np.asarray(inv_freq, np.float64)           # [rows, R / 2]
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = y[..., :pairs].copy(), y[..., pairs:2 * pairs].copy()
    y[..., :pairs] = first * cos - second * sin
    y[..., pairs:2 * pairs] = second * cos + first * sin
    return y * scale


# ---- device functions --------------------------------------------------------------------------------------
# A lane's values of a head are a tuple: dims lane, lane + 32, lane + 64, ... They are handled in fours: a head of 128
# is one four, a head of 256 two. The functions named ..._function give the device function for a width of heads.

@cuda.jit(device=True, forceinline=True)
def load_four(x, at):
    return x[at], x[uint32(at + uint32(32))], x[uint32(at + uint32(64))], x[uint32(at + uint32(96))]


@cuda.jit(device=True, forceinline=True)
def scale_four(x, r, w):
    return x[0] * r * w[0], x[1] * r * w[1], x[2] * r * w[2], x[3] * r * w[3]


@cuda.jit(device=True, forceinline=True)
def multiply_four(x, s):
    return x[0] * s, x[1] * s, x[2] * s, x[3] * s


@cuda.jit(device=True, forceinline=True)
def sum_squares(x):
    return cuda.fma(x[3], x[3], cuda.fma(x[2], x[2], cuda.fma(x[1], x[1], x[0] * x[0])))


@cuda.jit(device=True, forceinline=True)
def store_four(out, at, x):
    out[at] = float16(x[0])
    out[at + uint32(32)] = float16(x[1])
    out[at + uint32(64)] = float16(x[2])
    out[at + uint32(96)] = float16(x[3])


@cache
def load_function(head_dim):
    """load(x, at, lane): the lane's values of the head that begins at element `at` of x."""

    @cuda.jit(device=True, forceinline=True)
    def load_128(x, at, lane):
        return load_four(x, uint32(at + lane))

    @cuda.jit(device=True, forceinline=True)
    def load_256(x, at, lane):
        at = uint32(at + lane)
        return load_four(x, at) + load_four(x, uint32(at + uint32(128)))

    return load_256 if head_dim == 256 else load_128


@cache
def store_function(head_dim):
    """store(out, at, lane, x): the lane's values x, as float16, to the head that begins at element `at` (uint32 or
    uint64) of `out`."""

    @cuda.jit(device=True, forceinline=True)
    def store_128(out, at, lane, x):
        store_four(out, at + lane, x)

    @cuda.jit(device=True, forceinline=True)
    def store_256(out, at, lane, x):
        at = at + lane
        store_four(out, at, x[:4])
        store_four(out, at + uint32(128), x[4:])

    return store_256 if head_dim == 256 else store_128


@cache
def norm_function(head_dim):
    """norm(x, w, eps): the lane's values after the norm; x and w: tuples as `load` gives them."""

    @cuda.jit(device=True, forceinline=True)
    def norm_128(x, w, eps):
        return scale_four(x, rsqrt(cuda.fma(warp_sum(sum_squares(x)), float32(1.0 / 128), eps)), w)

    @cuda.jit(device=True, forceinline=True)
    def norm_256(x, w, eps):
        total = warp_sum(sum_squares(x[:4]) + sum_squares(x[4:]))
        r = rsqrt(cuda.fma(total, float32(1.0 / 256), eps))
        return scale_four(x[:4], r, w[:4]) + scale_four(x[4:], r, w[4:])

    return norm_256 if head_dim == 256 else norm_128


@cuda.jit(device=True, forceinline=True)
def angle_of_pair(row, n_positions, pair, rope_pos, inv_freq, height_section, width_section):
    """(sin, cos) of the angle of a row's rotary pair; n_positions: row length of rope_pos."""
    time, height = rope_pos[row], rope_pos[uint32(n_positions + row)]
    width = rope_pos[uint32(n_positions + n_positions + row)]
    axis = uint32(pair % uint32(3))
    position = height if axis == uint32(1) and pair < uint32(uint32(3) * height_section) else time
    position = width if axis == uint32(2) and pair < uint32(uint32(3) * width_section) else position
    return sincos(float32(int32(position)) * inv_freq[pair])


@cuda.jit(device=True, forceinline=True)
def angles_of_two_pairs(row, n_positions, lane, rope_pos, inv_freq, height_section, width_section):
    """(sin, cos, sin, cos) of a row's rotary pairs `lane` and lane + 32."""
    first = angle_of_pair(row, n_positions, lane, rope_pos, inv_freq, height_section, width_section)
    return first + angle_of_pair(row, n_positions, uint32(lane + uint32(32)), rope_pos, inv_freq, height_section,
                                 width_section)


@cuda.jit(device=True, forceinline=True)
def rotate_pair(x0, x1, sin, cos):
    return cuda.fma(x0, cos, -(x1 * sin)), cuda.fma(x1, cos, x0 * sin)


@cuda.jit(device=True, forceinline=True)
def rotate_64(x, angles):
    """Rotates x[0] with x[1]."""
    return rotate_pair(x[0], x[1], angles[0], angles[1]) + x[2:]


@cuda.jit(device=True, forceinline=True)
def rotate_128(x, angles):
    """Rotates x[0] with x[2] and x[1] with x[3]."""
    x0, x2 = rotate_pair(x[0], x[2], angles[0], angles[1])
    x1, x3 = rotate_pair(x[1], x[3], angles[2], angles[3])
    return (x0, x1, x2, x3) + x[4:]


def angles_function(rotary):
    """angles(row, n_positions, lane, rope_pos, inv_freq, height_section, width_section): sine and cosine of the
    lane's rotary pairs, what `norm_rotate` takes."""
    return angle_of_pair if rotary == 64 else angles_of_two_pairs


@cache
def norm_rotate_function(head_dim, rotary):
    """norm_rotate(x, w, angles, eps): the lane's values of a normalised and rotated head; x and w: tuples as `load`
    gives them."""
    norm, rotate = norm_function(head_dim), rotate_64 if rotary == 64 else rotate_128

    @cuda.jit(device=True, forceinline=True)
    def norm_rotate(x, w, angles, eps):
        return rotate(norm(x, w, eps), angles)

    return norm_rotate


@cache
def store_query_function(head_dim, rotary, turned=False):
    """store_query(q, at, lane, x, w, angles, eps): the query made of values x and weights w, to element `at` of q.
    turned: for keys that kernels/hadamard.py has turned."""
    norm_rotate, store, query_scale = norm_rotate_function(head_dim, rotary), store_function(head_dim), head_dim ** -0.5
    query_scale *= ROOT if turned else 1

    @cuda.jit(device=True, forceinline=True)
    def store_128(q, at, lane, x, w, angles, eps):
        x = norm_rotate(x, w, angles, eps)
        if turned:
            x = turn(x, lane)
        store(q, at, lane, multiply_four(x, float32(query_scale)))

    @cuda.jit(device=True, forceinline=True)
    def store_256(q, at, lane, x, w, angles, eps):
        x, s = norm_rotate(x, w, angles, eps), float32(query_scale)
        if turned:
            x = turn(x[:4], lane) + turn(x[4:], lane)
        store(q, at, lane, multiply_four(x[:4], s) + multiply_four(x[4:], s))

    return store_256 if head_dim == 256 else store_128


# ---- kernel ------------------------------------------------------------------------------------------------

@cache
def query_kernel(head_dim, rotary, gated, turned=False):
    """The kernel for heads of this shape."""
    load, angles_of = load_function(head_dim), angles_function(rotary)
    store_query = store_query_function(head_dim, rotary, turned)
    query_width = 2 * head_dim if gated else head_dim

    @cuda.jit
    def norm_rope(q, projected, w, rope_pos, inv_freq, stride, n_positions, heads, height_section, width_section,
                  eps):
        """Grid (rows, heads), one warp each."""
        lane, row, head = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
        angles = angles_of(row, n_positions, lane, rope_pos, inv_freq, height_section, width_section)
        x = load(projected, uint32(uint32(row * stride) + head * uint32(query_width)), lane)
        at = uint32(uint32(uint32(row * heads) + head) * uint32(head_dim))
        store_query(q, at, lane, x, load(w, uint32(0), lane), angles, eps)

    return norm_rope


def norm_rope_q(card, q, qkv, rows, *, turned=False, stream=None):
    """q float16 [rows, heads, head_dim] <- the queries of the first `rows` rows of `qkv`; turned: for keys that
    kernels/hadamard.py has turned. Writes q only, never allocates."""
    heads, rotary = qkv.heads, qkv.rotary
    kernel = query_kernel(heads.head_dim, heads.rotary, heads.gated, turned)
    card.launch(kernel, (rows, heads.n_heads), 32, q.reshape(-1), qkv.products.values.reshape(-1), qkv.q_norm,
                rotary.positions.reshape(-1), rotary.frequencies, qkv.products.stride, rotary.positions.shape[1],
                heads.n_heads, *rotary.sections[1:], float(heads.eps), stream=stream)


# ---- check -------------------------------------------------------------------------------------------------

QWEN35, QWEN3 = (256, 64, True), (128, 128, False)    # head_dim, rotary, gated
SHAPES = [QWEN35, QWEN3, (128, 64, True), (256, 128, False)]
CASES = [((1, 4), QWEN35), ((3, 16), QWEN35), ((31, 2), QWEN35), ((65, 24), QWEN35),    # (rows, heads), shape
         *(((5, 3), shape) for shape in SHAPES[1:])]
SECTIONS, EPS = {64: (11, 11, 10), 128: (24, 20, 20)}, 1e-6     # the sections of published models, by rotary width

# Of the largest |q|: rounding to half 2^-11 of a value; the float32 steps before, some 20 roundings of 2^-24
# and the angle's, 2^-24 of up to 700 radians here, together less than 2^-13.
TOLERANCE = 2.0 ** -11 + 2.0 ** -13


def heads_of(n_heads, n_kv_heads, shape=QWEN35):
    """Heads of one of the shapes above."""
    return Heads(n_heads, n_kv_heads, *shape, EPS)


def sample_positions(rng, rows):
    """rope_pos int32 [3, rows]: three different positions per row."""
    return rng.integers(0, 700, (3, rows)).astype(np.int32)


def sample_qkv(rng, heads, rope_pos, scale=3):
    """A QKV of host arrays, random; its rows are 12 numbers longer than the columns of the heads."""
    n_columns = heads.n_columns + 12
    projected = rng.standard_normal((rope_pos.shape[1], n_columns), np.float32) * np.float32(scale)
    norms = [rng.uniform(0.5, 1.5, heads.head_dim).astype(np.float32) for _ in "qk"]
    rotary = Rotary(rope_pos, inverse_frequencies(1e7, heads.rotary), SECTIONS[heads.rotary])
    return QKV(Projected(projected, n_columns), heads, *norms, rotary)


def upload_qkv(card, qkv):
    """The same with its arrays on a card."""
    rotary = qkv.rotary._replace(positions=card.upload(qkv.rotary.positions),
                                 frequencies=card.upload(qkv.rotary.frequencies))
    products = qkv.products._replace(values=card.upload(qkv.products.values).reshape(-1))
    return qkv._replace(products=products, rotary=rotary, q_norm=card.upload(qkv.q_norm),
                        k_norm=card.upload(qkv.k_norm))


def queries_of(qkv):
    """Queries [rows, heads, D] of a QKV of host arrays."""
    heads = qkv.heads
    both = qkv.products.values[:, :heads.k_column].reshape(-1, heads.n_heads, heads.query_width)
    return both[..., :heads.head_dim]


def query_reference(qkv):
    """What `norm_rope_q` makes of a QKV of host arrays, float64 [rows, heads, D], before it is rounded."""
    heads = qkv.heads
    return norm_rope_reference(queries_of(qkv), qkv.q_norm, *qkv.rotary, heads.eps, heads.head_dim ** -0.5)


def check(card, case, turned=False):
    """Compares with float64, one row too many must stay poisoned. Returns the largest error, of the largest
    |q|."""
    (rows, n_heads), shape = case
    rng, heads = np.random.default_rng(rows * n_heads), heads_of(n_heads, 1, shape)
    qkv = sample_qkv(rng, heads, sample_positions(rng, rows))
    q = card.alloc((rows + 1, n_heads, heads.head_dim), np.float16)
    card.poison(q)
    norm_rope_q(card, q[:rows], upload_qkv(card, qkv), rows, turned=turned)
    got, want = card.download(q).astype(np.float64), query_reference(qkv)
    if turned:
        want = turn_reference(want) * ROOT
    error = np.max(np.abs(got[:rows] - want)) / np.max(np.abs(want))
    assert error <= TOLERANCE, f"error {error}"
    assert np.isnan(got[rows]).all(), "wrote on"
    return error


def cases(card):
    """The checked cases."""
    for case in CASES:
        (rows, n_heads), shape = case
        for turned in False, True:
            yield Case(f"{rows} rows, {n_heads} heads {shape}{', turned' if turned else ''}",
                       lambda case=case, turned=turned: check(card, case, turned))


if __name__ == "__main__":
    main("Rotary queries", cases)
