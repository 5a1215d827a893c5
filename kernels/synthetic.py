"""Random weights made on the card, so that a model of any size can be timed without a file.

    bits(i, seed) = mix(i + mix(seed + 0x9E3779B9))     one uint32 per index, the 32-bit finaliser of MurmurHash3
    quants        4 bytes of bits(word index), each cut to 7 bits and sign-extended: uniform in [-64, 63]
    scales        (0.5 + bits / 2**32) / (36.95 sqrt(k)): with quants of deviation 36.95 a row product of unit inputs is
                  of order 1, whatever k
    uniform       low + (high - low) * bits / 2**32

Layout: quants int8 [n, k], scales float16 [n, k / 32], row-major; thread i writes word i (4 quants), scale i or value i.
Cost: 34 bytes written per 32 weights and about 12 integer instructions per word, so writing bandwidth is the limit.
"""

import math
from functools import partial

import numpy as np
from numba import cuda
from numba.types import float32, uint32

from kernels.bench import Case, main
from kernels.intrinsics import half_bits, store_word

THREADS = 256
QUANT_DEVIATION = 36.95  # of a uniform integer in [-64, 63]


def mix_reference(words):
    """MurmurHash3's 32-bit finaliser (Austin Appleby, public domain) on an array of uint32."""
    h = words.astype(np.uint32)
    for multiplier, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        h = (h ^ (h >> np.uint32(shift))) * np.uint32(multiplier)
    return h ^ (h >> np.uint32(16))


def bits_reference(count, seed):
    """bits(i, seed) for i < count."""
    start = mix_reference(np.array([(seed + 0x9E3779B9) & 0xFFFFFFFF], np.uint32))
    return mix_reference(np.arange(count, dtype=np.uint32) + start)


def random_q8_reference(n, k, seed):
    """(quants int8 [n, k], scales float16 [n, k/32])."""
    h = bits_reference(n * k // 4, seed)
    sign = h & np.uint32(0x40404040)
    quants = ((h & np.uint32(0x3F3F3F3F)) | sign | (sign << np.uint32(1))).view(np.int8).reshape(n, k)
    unit = bits_reference(n * k // 32, seed + 1).astype(np.float32) * np.float32(2.0 ** -32)
    scales = (np.float32(0.5) + unit) * np.float32(1.0 / (QUANT_DEVIATION * math.sqrt(k)))
    return quants, scales.astype(np.float16).reshape(n, k // 32)


def random_uniform_reference(count, low, high, seed):
    """float32 [count]."""
    unit = bits_reference(count, seed).astype(np.float32) * np.float32(2.0 ** -32)
    return np.float32(low) + np.float32(high - low) * unit


@cuda.jit(device=True, inline="always")
def mix(h):
    """One round of `mix_reference`."""
    h = uint32(uint32(h ^ uint32(h >> uint32(16))) * uint32(0x85EBCA6B))
    h = uint32(uint32(h ^ uint32(h >> uint32(13))) * uint32(0xC2B2AE35))
    return uint32(h ^ uint32(h >> uint32(16)))


@cuda.jit
def random_words(out, n_words, seed):
    i = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
    if i < n_words:
        h = mix(uint32(i + mix(uint32(seed + uint32(0x9E3779B9)))))
        sign = uint32(h & uint32(0x40404040))
        word = uint32(uint32(h & uint32(0x3F3F3F3F)) | uint32(sign | uint32(sign << uint32(1))))
        store_word(out, uint32(i * uint32(4)), word)


@cuda.jit(device=True, inline="always")
def unit_float(i, seed):
    """bits(i, seed) / 2**32 as float32 in [0, 1]."""
    h = mix(uint32(i + mix(uint32(seed + uint32(0x9E3779B9)))))
    return float32(h) * float32(2.0 ** -32)


@cuda.jit
def random_scales(out, count, seed, unit):
    i = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
    if i < count:
        out[i] = half_bits((float32(0.5) + unit_float(i, seed)) * unit)


@cuda.jit
def random_floats(out, count, seed, low, width):
    i = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
    if i < count:
        out[i] = low + width * unit_float(i, seed)


def random_q8(card, quants, scales, n, k, seed):
    """Fills quants int8 [n, k] and scales float16 [n, k/32]; k a multiple of 32, n * k below 2**32."""
    words = n * k // 4
    card.launch(random_words, -(-words // THREADS), THREADS, quants.reshape(n * k), words, seed)
    card.launch(random_scales, -(-n * k // 32 // THREADS), THREADS, scales.view(np.uint16).reshape(n * k // 32),
                n * k // 32, seed + 1, 1.0 / (QUANT_DEVIATION * math.sqrt(k)))


def random_uniform(card, out, low, high, seed):
    """Fills a float32 array of any shape with values uniform in [low, high]."""
    card.launch(random_floats, -(-out.size // THREADS), THREADS, out.reshape(out.size), out.size, seed,
                float(low), float(high - low))


# ---- check and time -------------------------------------------------------------------------------------------------

CASES = [(1, 32), (3, 64), (31, 320), (65, 1024)]  # n, k


def check(card, case):
    """Both fills against their references: the same bits, and nothing written beyond the end. case = (n, k)."""
    n, k = case
    quants, scales = card.alloc((n + 1, k), np.int8), card.alloc((n + 1, k // 32), np.float16)
    floats = card.alloc((n + 1, k), np.float32)
    for array in (quants, scales, floats):
        card.poison(array)
    random_q8(card, quants[:n], scales[:n], n, k, seed=7)
    random_uniform(card, floats[:n], -0.5, 1.5, seed=9)
    want_quants, want_scales = random_q8_reference(n, k, 7)
    np.testing.assert_array_equal(card.download(quants)[:n], want_quants)
    np.testing.assert_array_equal(card.download(scales)[:n], want_scales)
    np.testing.assert_array_equal(card.download(floats)[:n].ravel(), random_uniform_reference(n * k, -0.5, 1.5, 9))
    assert (card.download(quants)[n] == -1).all() and np.isnan(card.download(floats)[n]).all(), "wrote past its rows"
    return 0.0


def cases(card):
    """The checks, then the time of a matrix of 16 M weights."""
    for case in CASES:
        yield Case("{} x {}".format(*case), partial(check, card, case))
    n = k = 4096
    quants, scales = card.alloc((n, k), np.int8), card.alloc((n, k // 32), np.float16)
    yield Case(f"random Q8_0 {n} x {k}", launch=partial(random_q8, card, quants, scales, n, k, 1),
               n_bytes=quants.nbytes + scales.nbytes)


if __name__ == "__main__":
    main("Random weights", cases)
