"""Patches of pictures: what enters the first product of a vision tower, and what is added to its results.

    u[p]       = 2 x / 255 - 1 for the 16 x 16 pixels x of patch p, all of red, then green, then blue, in rows
    x[p]      += sum over 4 corners c of weight[c, p] * table[corner[c, p]]

A picture is a grid of blocks of 32 x 32 pixels. Its patches come block after block, in rows; in each block the upper
left, upper right, lower left and lower right one. The four patches of a block become one token.

The table of learned positions is a square of side x side rows. It is stretched over the picture so that its corners are
those of the picture; in between, the four nearest rows are mixed (bilinear interpolation).

    pixels    uint8 [pixels, 3]      pictures one behind the other, each [32 rows, 32 columns, 3]
    places    int32 [2, patches]     row and column of each patch in its picture
    pictures  int32 [2, patches]     of the picture: its first pixel, and pixels in a row of it
    u         float16 [patches, 768] x  float32 [patches, width]     table  float32 [side^2, width]
    corners   int32 [4, patches]     weights  float32 [4, patches]

Pipe: none; memory. Below 1 % of a tower's time.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.types import float32, uint32

from kernels.bench import Case, main
from kernels.card import Array
from kernels.intrinsics import load_floats4, pack_half2, store_floats4, store_word

SIZE = 16                # of a patch
COLOURS = 3
VALUES = COLOURS * SIZE * SIZE      # of a patch
BLOCK = 2                # patches of a block, across and down: one token
THREADS = 128


class Grid(NamedTuple):
    """Where the patches of some pictures are: NumPy arrays on the host, or their copies on a card."""

    places: Array        # int32 [2, patches]
    pictures: Array      # int32 [2, patches]
    corners: Array       # int32 [4, patches]
    weights: Array       # float32 [4, patches]


def places_of(rows, columns):
    """int32 [2, patches]: row and column of each patch of a picture of rows x columns blocks."""
    at = np.arange(BLOCK * BLOCK * rows * columns)
    block, inside = at // (BLOCK * BLOCK), at % (BLOCK * BLOCK)
    return np.stack([BLOCK * (block // columns) + inside // BLOCK,
                     BLOCK * (block % columns) + inside % BLOCK]).astype(np.int32)


def between(at, n, side):
    """Numbers `at` from 0 to n - 1, stretched to 0 to side - 1: (the integer below, the one above, how far the number
    is from the lower one, float32)."""
    far = at * (side - 1)
    low = far // (n - 1)
    return low, np.minimum(low + 1, side - 1), ((far - low * (n - 1)) / (n - 1)).astype(np.float32)


def grid_of(sizes, side):
    """The Grid of pictures of these sizes, (rows, columns) in blocks; side: of the table of positions."""
    parts, first = [], 0
    for rows, columns in sizes:
        places = places_of(rows, columns)
        pictures = np.broadcast_to(np.array([[first], [BLOCK * SIZE * columns]], np.int32), places.shape)
        above, below, down = between(places[0].astype(np.int64), BLOCK * rows, side)
        left, right, across = between(places[1].astype(np.int64), BLOCK * columns, side)
        corners = np.stack([above * side + left, above * side + right, below * side + left, below * side + right])
        one = np.float32(1)
        weights = np.stack([(one - down) * (one - across), (one - down) * across, down * (one - across), down * across])
        parts.append((places, pictures, corners.astype(np.int32), weights))
        first += (BLOCK * SIZE) ** 2 * rows * columns
    return Grid(*(np.ascontiguousarray(np.concatenate(each, axis=1)) for each in zip(*parts)))


# ---- reference ---------------------------------------------------------------------------------------------

def patches_reference(pixels):
    """uint8 [32 rows, 32 columns, 3] -> float64 [patches, 768]."""
    columns = pixels.shape[1] // (BLOCK * SIZE)
    parts = pixels.reshape(-1, BLOCK, SIZE, columns, BLOCK, SIZE, COLOURS).transpose(0, 3, 1, 4, 6, 2, 5)
    return parts.reshape(-1, VALUES) / 127.5 - 1


def positions_reference(table, grid):
    """float64 [patches, width]."""
    return np.einsum("cp,cpw->pw", grid.weights.astype(np.float64), np.asarray(table, np.float64)[grid.corners])


# ---- kernels -----------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def scaled(byte):
    """Multiplied, not divided: within half a unit of the last place of float32, far below the rounding to half."""
    return cuda.fma(float32(byte), float32(2.0 / 255.0), float32(-1.0))


@cuda.jit
def cut_patches_kernel(u, pixels, places, pictures, n):
    patch, pair = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x)     # of neighbouring pixels
    row, column = uint32(places[patch]), uint32(places[uint32(n + patch)])
    first, width = uint32(pictures[patch]), uint32(pictures[uint32(n + patch)])
    y, x = uint32(row * uint32(SIZE) + uint32(pair >> uint32(3))), uint32(
        column * uint32(SIZE) + uint32(uint32(pair & uint32(7)) << uint32(1)))
    at = uint32(uint32(first + uint32(y * width) + x) * uint32(COLOURS))
    for c in range(COLOURS):
        a, b = scaled(pixels[uint32(at + uint32(c))]), scaled(pixels[uint32(at + uint32(c + COLOURS))])
        to = uint32(uint32(patch * uint32(VALUES)) + uint32(SIZE * SIZE * c) + uint32(pair << uint32(1)))
        store_word(u, to, pack_half2(a, b))


@cuda.jit
def add_positions_kernel(x, table, corners, weights, n, width):
    patch = uint32(cuda.blockIdx.x)
    i = uint32(uint32(uint32(cuda.blockIdx.y) * uint32(THREADS) + uint32(cuda.threadIdx.x)) << uint32(2))
    if i < width:
        at = uint32(uint32(patch * width) + i)
        x0, x1, x2, x3 = load_floats4(x, at)
        for c in range(4):
            listed = uint32(uint32(c) * n + patch)
            f = weights[listed]
            t0, t1, t2, t3 = load_floats4(table, uint32(uint32(uint32(corners[listed]) * width) + i))
            x0, x1, x2, x3 = cuda.fma(f, t0, x0), cuda.fma(f, t1, x1), cuda.fma(f, t2, x2), cuda.fma(f, t3, x3)
        store_floats4(x, at, x0, x1, x2, x3)


# ---- launches: they write in place and never allocate -----------------------------------------------------

def cut_patches(card, u, pixels, grid, *, stream=None):
    """u float16 [patches, 768] or more rows <- the patches of pictures, uint8. grid: a Grid on the card, whose arrays
    have exactly as many columns as there are patches."""
    n = grid.places.shape[1]
    card.launch(cut_patches_kernel, n, SIZE * SIZE // 2, u.reshape(-1), pixels.reshape(-1), grid.places.reshape(-1),
                grid.pictures.reshape(-1), n, stream=stream)


def add_positions(card, x, table, grid, *, stream=None):
    """x float32 [patches, width] or more rows, plus the positions of the patches. width: a multiple of 4."""
    n, width = grid.corners.shape[1], table.shape[1]
    card.launch(add_positions_kernel, (n, -(-width // (4 * THREADS))), THREADS, x.reshape(-1), table.reshape(-1),
                grid.corners.reshape(-1), grid.weights.reshape(-1), n, width, stream=stream)


# ---- check and time ----------------------------------------------------------------------------------------

CASES = [(((1, 1),), 4, 8), (((3, 5), (1, 1), (2, 7)), 24, 144), (((9, 2),), 1, 20)]     # sizes, side, width


def random_pictures(sizes, seed=0):
    """uint8 [32 rows, 32 columns, 3] for each size in blocks."""
    random, edge = np.random.default_rng(seed), BLOCK * SIZE
    return [random.integers(0, 256, (edge * rows, edge * columns, COLOURS), np.uint8) for rows, columns in sizes]


def check(card, sizes, side, width):
    """Checks both kernels for several pictures in one launch; a row too many stays poisoned. Returns the largest error
    as a fraction of what rounding may do."""
    random = np.random.default_rng(side)
    grid, pictures = grid_of(sizes, side), random_pictures(sizes)
    on_card = Grid(*map(card.upload, grid))
    n = grid.places.shape[1]
    u = card.alloc((n + 1, VALUES), np.float16)
    card.poison(u)
    cut_patches(card, u, card.upload(np.concatenate([each.reshape(-1) for each in pictures])), on_card)
    got, want = card.download(u), np.concatenate([patches_reference(each) for each in pictures])
    assert np.isnan(got[n]).all(), "wrote elsewhere"
    error = (np.abs(got[:n] - want) / (np.abs(want) * 2.0 ** -11 + 2.0 ** -22)).max()
    table, before = random.standard_normal((side * side, width), np.float32), random.standard_normal((n, width),
                                                                                                     np.float32)
    x = card.upload(np.pad(before, ((0, 1), (0, 0)), constant_values=np.nan))
    add_positions(card, x, card.upload(table), on_card)
    got, want = card.download(x), before + positions_reference(table, grid)
    assert np.isnan(got[n]).all(), "wrote elsewhere"
    bound = 5 * 2.0 ** -24 * (np.abs(before) + positions_reference(np.abs(table), grid))
    error = max(error, (np.abs(got[:n] - want) / bound).max())
    assert error <= 1, f"error {error}"
    return error


def cases(card):
    """The checks, then the times of a picture of 2,304 patches."""
    for case in CASES:
        yield Case("{}, side {}, width {}".format(*case), partial(check, card, *case))
    sizes, width, n = ((24, 24),), 1152, 2304
    grid, x = Grid(*map(card.upload, grid_of(sizes, 48))), card.zeros((n, width), np.float32)
    pixels, u = card.upload(random_pictures(sizes)[0]), card.zeros((n, VALUES), np.float16)
    yield Case("time of cutting 2304 patches", launch=partial(cut_patches, card, u, pixels, grid),
               n_bytes=pixels.nbytes + u.nbytes)
    table = card.zeros((48 * 48, width), np.float32)
    yield Case("time of positions, 2304 patches", launch=partial(add_positions, card, x, table, grid),
               n_bytes=2 * x.nbytes + table.nbytes)


if __name__ == "__main__":
    main("Patches of pictures", cases)
