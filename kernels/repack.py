"""From the bytes of a model file to arrays that kernels read: Q8_0 taken apart, and a look at every number.

Q8_0, a block of 32 weights in the file (34 bytes: no block but every second one is aligned to anything):

    raw      s s q q q q ... q      float16 scale, 32 int8 quants; weight = scale * quant
    quants   q q q ... q            int8 [n, k], row-major            scales   s   float16 [n, k / 32]

A warp takes 32 blocks: eight lanes write a block's quants, a word each, from two 2-byte loads; then every lane moves
the scale of one block. A scale that is not a finite number leaves 1 in `bad`, and so does a value of a tensor of
floats in `find_nonfinite`: the file is damaged, and somebody has to say so.

Pipe: none; 34 bytes read and written per block, far beyond what the link brings.
"""

from functools import partial

import numpy as np
from numba import cuda
from numba.types import uint32

from kernels.bench import Case, main

WARPS = 4
BLOCK_BYTES, BLOCK_HALVES, BLOCK_WORDS = 34, 17, 8      # of Q8_0, and words of its quants
EXPONENTS = {"float16": 0x7C00, "uint16": 0x7F80, "float32": 0x7F800000}    # all ones: infinite or NaN
ITEMS = 8                                               # of a thread of find_nonfinite


def split_q8_0_reference(raw, n, k):
    """(quants int8 [n, k], scales float16 [n, k / 32]) of n * k / 32 blocks of 34 bytes (uint8, any shape)."""
    blocks = raw.reshape(-1).view(np.dtype([("scale", "<f2"), ("quants", "i1", 32)]))
    return blocks["quants"].reshape(n, k), blocks["scale"].reshape(n, k // 32)


@cuda.jit
def split_blocks(quants, scales, raw, bad, first, n_blocks):
    lane = uint32(cuda.threadIdx.x)
    start = uint32(uint32(uint32(cuda.blockIdx.x) * uint32(WARPS) + uint32(cuda.threadIdx.y)) * uint32(32))
    word = uint32(lane & uint32(7))
    for j in range(uint32(8)):
        block = uint32(start + uint32(4) * uint32(j) + uint32(lane >> uint32(3)))
        if block < n_blocks:
            at = uint32(block * uint32(BLOCK_HALVES) + uint32(2) * word + uint32(1))
            low, high = uint32(raw[at]), uint32(raw[uint32(at + uint32(1))])
            to = uint32(uint32(first + block) * uint32(BLOCK_WORDS) + word)
            quants[to] = uint32(low | uint32(high << uint32(16)))
    block = uint32(start + lane)
    if block < n_blocks:
        scale = raw[uint32(block * uint32(BLOCK_HALVES))]
        scales[uint32(first + block)] = scale
        if uint32(scale) & uint32(0x7C00) == uint32(0x7C00):
            bad[uint32(0)] = uint32(1)


@cuda.jit
def find_nonfinite_kernel(words, bad, n, exponent):
    start = uint32(uint32(cuda.blockIdx.x) * uint32(32 * WARPS * ITEMS) + uint32(cuda.threadIdx.x))
    for j in range(uint32(ITEMS)):
        i = uint32(start + uint32(32 * WARPS) * uint32(j))
        if i < n:
            if uint32(words[i]) & exponent == exponent:
                bad[uint32(0)] = uint32(1)


# ---- launches: written in place, none allocates ------------------------------------------------------------

def split_q8_0(card, quants, scales, raw, bad, first, stream=None):
    """Blocks `first`, first + 1, ... of quants int8 [n, k] and scales float16 [n, k / 32] <- raw uint8, whole blocks
    of 34 bytes. bad uint32 [1] becomes 1 where a scale is not finite. n * k below 2**34."""
    n_blocks = raw.size // BLOCK_BYTES
    card.launch(split_blocks, -(-n_blocks // (32 * WARPS)), (32, WARPS), quants.reshape(-1).view(np.uint32),
                scales.reshape(-1).view(np.uint16), raw.view(np.uint16), bad, first, n_blocks, stream=stream)


def find_nonfinite(card, values, bad, stream=None):
    """bad uint32 [1] becomes 1 where one of values is infinite or NaN: float16, float32 or uint16 (the bits of
    bfloat16), any shape."""
    exponent = EXPONENTS[values.dtype.name]
    words = values.reshape(-1).view(np.uint32 if values.dtype == np.float32 else np.uint16)
    card.launch(find_nonfinite_kernel, -(-words.size // (32 * WARPS * ITEMS)), 32 * WARPS, words, bad, words.size,
                exponent, stream=stream)


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [(1, 32), (3, 64), (33, 320), (7, 1024)]        # n, k


def check(card, case):
    """Random blocks in two pieces, the bits of the reference and nothing beyond; then a damaged scale. case: n, k."""
    n, k = case
    random = np.random.default_rng(k)
    raw = random.integers(0, 256, n * k // 32 * BLOCK_BYTES, np.uint8)
    raw[1::BLOCK_BYTES] &= 0xFB                         # no exponent of ones
    quants, scales = card.alloc((n + 1, k), np.int8), card.alloc((n + 1, k // 32), np.float16)
    card.poison(quants)
    card.poison(scales)
    bad, cut = card.zeros(1, np.uint32), n * k // 64
    for part, first in ((raw[:cut * BLOCK_BYTES], 0), (raw[cut * BLOCK_BYTES:], cut)):
        if part.size:
            split_q8_0(card, quants[:n], scales[:n], card.upload(part), bad, first)
    want_quants, want_scales = split_q8_0_reference(raw, n, k)
    np.testing.assert_array_equal(card.download(quants)[:n], want_quants)
    np.testing.assert_array_equal(card.download(scales)[:n].view(np.uint16), want_scales.view(np.uint16))
    assert (card.download(quants)[n] == -1).all() and np.isnan(card.download(scales)[n]).all(), "wrote past its rows"
    assert card.download(bad)[0] == 0
    raw[-BLOCK_BYTES + 1] |= 0x7C
    split_q8_0(card, quants[:n], scales[:n], card.upload(raw), bad, 0)
    assert card.download(bad)[0] == 1, "a scale that is no number was not seen"
    return 0.0


def check_nonfinite(card, dtype):
    """One infinite value, or NaN, at the ends and within; and the largest finite ones."""
    for n, place in ((1, 0), (1025, 1024), (5000, 4097)):
        for word, is_bad in ((EXPONENTS[dtype], 1), (EXPONENTS[dtype] | 1, 1), (EXPONENTS[dtype] - 1, 0)):
            words = np.zeros(n, np.uint32 if dtype == "float32" else np.uint16)
            words[place] = word
            bad = card.zeros(1, np.uint32)
            find_nonfinite(card, card.upload(words.view(dtype)), bad)
            assert card.download(bad)[0] == is_bad, f"{dtype}: {word:#x} at {place} of {n}"
    return 0.0


def cases(card):
    """The checks, then the time of a piece of a file."""
    for case in CASES:
        yield Case("{} x {}".format(*case), partial(check, card, case))
    for dtype in EXPONENTS:
        yield Case(f"finite, {dtype}", partial(check_nonfinite, card, dtype))
    n, k = 4096, 3840
    raw = card.zeros(n * k // 32 * BLOCK_BYTES, np.uint8)
    quants, scales, bad = card.alloc((n, k), np.int8), card.alloc((n, k // 32), np.float16), card.zeros(1, np.uint32)
    yield Case("16 MB of Q8_0", launch=partial(split_q8_0, card, quants, scales, raw, bad, 0), n_bytes=2 * raw.nbytes)


if __name__ == "__main__":
    main("From a file's bytes to arrays", cases)
