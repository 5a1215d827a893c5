"""The turn of quantised keys and values: a signed Walsh-Hadamard transform of each 128 dims.

    y = H S x / sqrt(128)        S: fixed signs of the dims, H[i, j] = (-1)^(number of bits that i and j both have)
    x = S H y / sqrt(128)        since H H = 128

A key or value may have a few dims far larger than the others, and one scale for all dims would leave few levels to
the others. The turn spreads every dim over all dims, which then look like draws from one Gaussian. The turn keeps dot
products: the product of a turned query and a turned key is that of the query and the key. And a sum of turned values
is the turned sum. So attention turns its query once and its output back once, and no key or value is turned back.

H is 7 stages of butterflies, (a, b) -> (a + b, a - b), one for each bit of a dim's number. The device functions run
them in float32 in a fixed order: first the stages within a lane, then those between lanes. They leave the factor
128^-1/2 to the caller, who has a factor to multiply with anyway.

    who           a lane's dims of 128             bits in order            device function
    key, query    lane, + 32, + 64, + 96           5 6, then 0 1 2 3 4      turn
    output        4 or 8 neighbours                0 1 (2), then the rest   turn_back_function

Pipe: fp32, and 5 or 4 shuffles for each of the lane's dims. Signs: the binary digits of pi behind its point, which
nobody can have chosen to suit a test. Source: the idea is QuaRot's (arXiv 2404.00456); seed of this form: llama.cpp's
pull request 21038.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.types import float32, uint32

from kernels.intrinsics import float_as_word, word_as_float

BLOCK = 128                                                     # dims that are turned together
ROOT = BLOCK ** -0.5
SIGNS = 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344          # bit i % 32 of word i // 32: dim i changes its sign
EVERY_LANE = 0xFFFFFFFF


# ---- reference ---------------------------------------------------------------------------------------------

_SIGNED = np.where(np.unpackbits(np.array(SIGNS, "<u4").view(np.uint8), bitorder="little"), -1, 1)


def butterflies(x, bits):
    """H x of [..., 128], in the type of x: a stage for each of these bits of a dim's number, in this order."""
    shape = x.shape
    for bit in bits:
        x = x.reshape(*shape[:-1], -1, 2, 1 << bit)
        low, high = x[..., 0, :], x[..., 1, :]
        x = np.stack([low + high, low - high], axis=-2)
    return x.reshape(shape)


def turn_reference(x):
    """sqrt(128) times the turned x [..., a multiple of 128], in the type of x and in the order of `turn`."""
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    return butterflies(blocks * _SIGNED.astype(x.dtype), (5, 6, 0, 1, 2, 3, 4)).reshape(x.shape)


def turn_back_reference(y):
    """The x whose turn is y [..., a multiple of 128], float64."""
    blocks = np.asarray(y, np.float64).reshape(*y.shape[:-1], -1, BLOCK)
    return (butterflies(blocks, range(7)) * _SIGNED * ROOT).reshape(y.shape)


# ---- device functions --------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def _between_lanes(x, lane, distance):
    """A stage between lanes at this distance: the sum on the lower one, the difference on the upper one."""
    other = cuda.shfl_xor_sync(EVERY_LANE, x, distance)
    return other + (-x if (lane & uint32(distance)) != uint32(0) else x)


@cuda.jit(device=True, forceinline=True)
def _four_between_lanes(x, lane, distance):
    return (_between_lanes(x[0], lane, distance), _between_lanes(x[1], lane, distance),
            _between_lanes(x[2], lane, distance), _between_lanes(x[3], lane, distance))


@cuda.jit(device=True, forceinline=True)
def _within_four(x):
    """The two stages within a lane's 4 dims."""
    a, b, c, d = x[0] + x[1], x[0] - x[1], x[2] + x[3], x[2] - x[3]
    return a + c, b + d, a - c, b - d


@cuda.jit(device=True, forceinline=True)
def _flip(x, signs, bit):
    """x with the sign that this bit of a word of signs says."""
    return word_as_float(uint32(float_as_word(x) ^ uint32(uint32(uint32(signs >> bit) & uint32(1)) << uint32(31))))


@cuda.jit(device=True, forceinline=True)
def turn(x, lane):
    """sqrt(128) times the turned 128 dims; x: the lane's dims lane, lane + 32, lane + 64, lane + 96. All lanes of
    the warp must take part."""
    x = _within_four((_flip(x[0], uint32(SIGNS[0]), lane), _flip(x[1], uint32(SIGNS[1]), lane),
                      _flip(x[2], uint32(SIGNS[2]), lane), _flip(x[3], uint32(SIGNS[3]), lane)))
    x = _four_between_lanes(_four_between_lanes(x, lane, 1), lane, 2)
    return _four_between_lanes(_four_between_lanes(_four_between_lanes(x, lane, 4), lane, 8), lane, 16)


@cuda.jit(device=True, forceinline=True)
def _flip_four(x, signs, bit):
    return (_flip(x[0], signs, bit), _flip(x[1], signs, uint32(bit + uint32(1))),
            _flip(x[2], signs, uint32(bit + uint32(2))), _flip(x[3], signs, uint32(bit + uint32(3))))


@cuda.jit(device=True, forceinline=True)
def _signs_of(word):
    """A word of SIGNS, 0 to 3."""
    first = uint32(SIGNS[1]) if (word & uint32(1)) != uint32(0) else uint32(SIGNS[0])
    second = uint32(SIGNS[3]) if (word & uint32(1)) != uint32(0) else uint32(SIGNS[2])
    return second if word > uint32(1) else first


@cuda.jit(device=True, forceinline=True)
def _scale_four(x):
    return x[0] * float32(ROOT), x[1] * float32(ROOT), x[2] * float32(ROOT), x[3] * float32(ROOT)


@cache
def turn_back_function(n, near):
    """turn_back(y, lane, place): what was turned to y, `n` neighbouring dims of a lane, 4 or 8, from dim
    n * place of the 128 on. near: how far apart the lanes of neighbouring places are, 1 or 2; the lanes of a block of
    128 differ in the next 5 (n = 4) or 4 (n = 8) bits of their numbers from there on. All lanes must take part."""

    @cuda.jit(device=True, forceinline=True)
    def of_four(y, lane, place):
        y = _four_between_lanes(_four_between_lanes(_within_four(y), lane, near), lane, 2 * near)
        y = _four_between_lanes(_four_between_lanes(_four_between_lanes(y, lane, 4 * near), lane, 8 * near), lane,
                                16 * near)
        bit = uint32(uint32(place & uint32(7)) * uint32(4))
        return _scale_four(_flip_four(y, _signs_of(uint32(uint32(place >> uint32(3)) & uint32(3))), bit))

    @cuda.jit(device=True, forceinline=True)
    def half_of_eight(y, lane, signs, bit):
        y = _four_between_lanes(_four_between_lanes(y, lane, near), lane, 2 * near)
        y = _four_between_lanes(_four_between_lanes(y, lane, 4 * near), lane, 8 * near)
        return _scale_four(_flip_four(y, signs, bit))

    @cuda.jit(device=True, forceinline=True)
    def of_eight(y, lane, place):
        a, b = _within_four(y[:4]), _within_four(y[4:])
        first = a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]
        second = a[0] - b[0], a[1] - b[1], a[2] - b[2], a[3] - b[3]
        bit = uint32(uint32(place & uint32(3)) * uint32(8))
        signs = _signs_of(uint32(uint32(place >> uint32(2)) & uint32(3)))
        return half_of_eight(first, lane, signs, bit) + half_of_eight(second, lane, signs, uint32(bit + uint32(4)))

    return of_four if n == 4 else of_eight
