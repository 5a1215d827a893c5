"""Rotary positions of a picture's patches, in two dimensions, over whole heads of queries and keys.

    angle[i]   = row * f[i]  for i < D / 4,   column * f[i - D / 4]  for D / 4 <= i < D / 2         D = head_dim
    f[i]       = 10000^(-2 i / (D / 2))
    a, b       = x[i], x[i + D / 2];      x[i], x[i + D / 2] <- a cos - b sin, b cos + a sin

Queries are multiplied by D^-1/2 log2(e) besides: then the softmax of scores is that of powers of 2.

    qkv     float16 [rows, 3 heads D]     | queries | keys | values | of each patch; changed in place
    places  int32 [2, rows]               row and column of each patch in its picture
    f       float32 [D / 4]               D a multiple of 8

A thread takes two neighbouring numbers of a head, i and i + 1, with their partners, of a query and of the key.

Pipe: fp32, two sines with cosines for 8 numbers. Bytes per number: 4. Below 1 % of a tower's time.
"""

import math
from functools import cache, partial

import numpy as np
from numba import cuda
from numba.types import float32, uint32

from kernels.bench import Case, main
from kernels.intrinsics import half2_high, half2_low, load_word, pack_half2, sincos, store_word

THREADS = 96
BASE = 10000.0


def frequencies(head_dim):
    """float32 [D / 4]."""
    return (BASE ** (-2.0 * np.arange(head_dim // 4) / (head_dim // 2))).astype(np.float32)


def score_scale(head_dim):
    """What queries are multiplied by."""
    return math.log2(math.e) / math.sqrt(head_dim)


def rotate_reference(x, places):
    """x [rows, heads, D], places [2, rows] -> float64 of the shape of x, not scaled."""
    x, d = np.asarray(x, np.float64), x.shape[-1]
    f = frequencies(d).astype(np.float64)
    angle = np.concatenate([at[:, None] * f for at in places], axis=1)[:, None]
    a, b = x[..., :d // 2], x[..., d // 2:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


@cuda.jit(device=True, forceinline=True)
def rotate_pairs(qkv, at, apart, c0, s0, c1, s1, scale):
    """Numbers at, at + 1 with partners `apart` further."""
    a, b = load_word(qkv, at), load_word(qkv, uint32(at + apart))
    a0, a1, b0, b1 = half2_low(a), half2_high(a), half2_low(b), half2_high(b)
    store_word(qkv, at, pack_half2((a0 * c0 - b0 * s0) * scale, (a1 * c1 - b1 * s1) * scale))
    store_word(qkv, uint32(at + apart), pack_half2((b0 * c0 + a0 * s0) * scale, (b1 * c1 + a1 * s1) * scale))


@cache
def rotate_kernel(head_dim):
    quarter = head_dim // 4

    @cuda.jit
    def rotate_patches_kernel(qkv, places, f, heads, n_rows, scale):
        row = uint32(cuda.blockIdx.x)
        pair = uint32(uint32(cuda.blockIdx.y) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        head, i = uint32(pair // uint32(quarter)), uint32(uint32(pair % uint32(quarter)) << uint32(1))
        if head < heads:
            place, j = places[row], i
            if i >= uint32(quarter):
                place, j = places[uint32(n_rows + row)], uint32(i - uint32(quarter))
            s0, c0 = sincos(float32(place) * f[j])
            s1, c1 = sincos(float32(place) * f[uint32(j + uint32(1))])
            width = uint32(heads * uint32(head_dim))
            at = uint32(uint32(row * uint32(3) * width) + head * uint32(head_dim) + i)
            rotate_pairs(qkv, at, uint32(head_dim // 2), c0, s0, c1, s1, scale)
            rotate_pairs(qkv, uint32(at + width), uint32(head_dim // 2), c0, s0, c1, s1, float32(1.0))

    return rotate_patches_kernel


# ---- launches: they write in place and never allocate -----------------------------------------------------

def rotate_patches(card, qkv, places, f, heads, rows, *, stream=None):
    """Rotates queries and keys of qkv float16 [rows, 3 heads D] in place, and scales the queries. places: int32
    [2, rows], exactly so many. f: float32 [D / 4]."""
    quarter = f.size
    grid = (rows, -(-heads * quarter // THREADS))
    card.launch(rotate_kernel(4 * quarter), grid, THREADS, qkv.reshape(-1), places.reshape(-1), f, heads, rows,
                score_scale(4 * quarter), stream=stream)


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [(1, 8, 1), (2, 72, 30), (16, 72, 5), (3, 128, 7)]         # heads, head_dim, rows


def check(card, heads, head_dim, rows):
    """Random queries and keys at random places; a row too many stays, and so do the values. Returns the largest error
    as a fraction of the rounding to half precision and 2^-20."""
    rng = np.random.default_rng((heads, head_dim, rows))
    qkv = rng.standard_normal((rows + 1, 3, heads, head_dim)).astype(np.float16)
    places = rng.integers(0, 1024, (2, rows)).astype(np.int32)
    on_card = card.upload(qkv)
    rotate_patches(card, on_card, card.upload(places), card.upload(frequencies(head_dim)), heads, rows)
    got = card.download(on_card)
    np.testing.assert_array_equal(got[rows], qkv[rows])
    np.testing.assert_array_equal(got[:rows, 2], qkv[:rows, 2])
    error = 0.0
    for j, scale in (0, score_scale(head_dim)), (1, 1.0):
        want = rotate_reference(qkv[:rows, j], places) * scale
        # 2^-11 of the result; an angle of up to 1023 is rounded to 2^-14 at most, so is what it turns
        bound = np.abs(want) * 2.0 ** -11 + 2.0 ** -14 * np.abs(qkv).max() * scale
        error = max(error, (np.abs(got[:rows, j] - want) / bound).max())
    assert error <= 1, f"error {error}"
    return error


def cases(card):
    """The checks, then the time of a picture of 2,304 patches."""
    for case in CASES:
        yield Case("{} heads of {}, {} rows".format(*case), partial(check, card, *case))
    qkv, places = card.zeros((2304, 3, 16, 72), np.float16), card.zeros((2, 2304), np.int32)
    yield Case("time of 2304 rows, 16 heads of 72", n_bytes=qkv.nbytes * 4 // 3, launch=partial(
        rotate_patches, card, qkv, places, card.upload(frequencies(72)), 16, 2304))


if __name__ == "__main__":
    main("Rotary positions of patches", cases)
