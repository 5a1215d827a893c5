"""The kernels of the vision tower, each against its reference, and what their results must not depend on."""

from types import SimpleNamespace

import numpy as np
import pytest

from kernels import half_gemm, layer_norm, patch_rope, patches, picture_attention
from kernels.half_gemm import ENDINGS, SHAPES, HalfMatrix, gemm_half


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("case", half_gemm.CASES, ids=str)
def test_products_are_within_the_rounding(card, case, ending):
    half_gemm.check(card, *case, ending)


@pytest.mark.parametrize("module", [layer_norm, patch_rope, patches, picture_attention], ids=lambda each: each.__name__)
def test_kernels_equal_their_references(card, module):
    for case in module.CASES:
        module.check(card, *case)


def product(card, w, bias, x, shape=None):
    y = card.alloc((len(x), len(w)), np.float32)
    card.poison(y)
    gemm_half(card, y, HalfMatrix(card.upload(w), card.upload(bias)), card.upload(x), len(x), "float", shape=shape)
    return card.download(y)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_in_any_tile(card, shape):
    """And for any number of rows and columns."""
    rng = np.random.default_rng(1)
    w, x = (rng.standard_normal(size, np.float32).astype(np.float16) for size in ((148, 168), (140, 168)))
    bias = rng.standard_normal(148, np.float32)
    together = product(card, w, bias, x)
    np.testing.assert_array_equal(product(card, w, bias, x, shape), together)
    for first, rows in (0, 1), (7, 3), (60, 33), (65, 65):
        part = slice(first, first + rows)
        np.testing.assert_array_equal(product(card, w, bias, x[part], shape), together[part])
    np.testing.assert_array_equal(product(card, w[100:104], bias[100:104], x, shape), together[:, 100:104])


def test_gelu_far_from_zero(card):
    """In both forms: 0 on the left, x on the right, and NaN stays."""
    given = np.array([-6e4, -50, -12, 0, 12, 50, 6e4, np.nan], np.float32)
    for ending in "gelu", "exact gelu":
        y = card.alloc((1, 8), np.float16)
        zeros = HalfMatrix(card.zeros((8, 8), np.float16), card.upload(given))
        gemm_half(card, y, zeros, card.zeros((1, 8), np.float16), 1, ending)
        np.testing.assert_array_equal(card.download(y)[0], np.where(given > 0, given, given * 0).astype(np.float16))


def test_sizes_that_no_product_takes(card):
    y, x = card.zeros((1, 8), np.float16), card.zeros((1, 8), np.float16)
    for n, k, ending in (6, 8, "half"), (8, 12, "half"), (8, 8, "add"):
        matrix = HalfMatrix(card.zeros((n, k), np.float16), card.zeros(n, np.float32))
        with pytest.raises(ValueError, match="no product"):
            gemm_half(card, y, matrix, x, 1, ending)
    with pytest.raises(ValueError, match="multiple of 8 dims, at most 128"):
        picture_attention.attend_pictures(card, y, x, x, 1, 136)
    with pytest.raises(ValueError, match="multiple of 4"):
        layer_norm.layer_norm(card, None, None, card.zeros(6, np.float32), None, 1, 1e-6)


def test_a_maximum_that_moves_late(card):
    """Keys that grow along the picture: every tile rescales; and keys that shrink: only the first does."""
    for order in 1, -1:
        qkv = np.abs(picture_attention.sample(2, 72, 200).astype(np.float32))
        qkv[:, 1] *= np.linspace(0.02, 0.4, 200, dtype=np.float32)[::order, None, None]
        qkv = qkv.astype(np.float16)
        got = picture_attention.attended(card, qkv, (200,))[:-1]
        want = picture_attention.picture_attention_reference(qkv, (200,))
        assert np.linalg.norm(got - want) <= picture_attention.TOLERANCE_ALL * np.linalg.norm(want)


@pytest.mark.parametrize("head_dim, at", [(72, 150), (72, 0), (128, 63), (8, 99)])
@pytest.mark.parametrize("wrong", [np.nan, "overflow"])
def test_a_score_that_is_no_number_is_never_hidden(card, head_dim, at, wrong):
    """Its value is finite, and no other score exceeds those of the first keys. All rows of the head see it and show it;
    no other head and no other picture does. wrong: NaN, or products of finite numbers that overflow both ways."""
    lengths = 160, 40
    qkv = picture_attention.sample(2, head_dim, sum(lengths))
    qkv[:8, 1] *= 8
    if wrong == "overflow":
        qkv[:160, 0, 1], qkv[at, 1, 1, ::2], qkv[at, 1, 1, 1::2] = 3000, 3000, -3000
    else:
        qkv[at, 1, 1, 5] = wrong
    found = np.isfinite(picture_attention.attended(card, qkv, lengths)[:-1]).reshape(-1, 2, head_dim)
    assert found[:, 0].all() and found[160:].all() and not found[:160, 1].any()


def test_positions_reach_the_corners():
    """The corners of a picture have the rows of the table's corners, whatever its size."""
    side = 7
    for rows, columns in (1, 1), (3, 8), (16, 2):
        grid = patches.grid_of([(rows, columns)], side)
        for place, corner in {(0, 0): 0, (0, 2 * columns - 1): side - 1, (2 * rows - 1, 0): side * (side - 1),
                              (2 * rows - 1, 2 * columns - 1): side * side - 1}.items():
            at = np.flatnonzero((grid.places == np.array(place)[:, None]).all(axis=0))
            weight = grid.weights[:, at[0]][grid.corners[:, at[0]] == corner].sum()
            assert len(at) == 1 and weight == 1


def test_pictures_of_16_384_patches_have_their_tiles():
    tiles = picture_attention.tiles_of([16384, 4, 300], 72)
    each = picture_attention.block_rows(72)
    assert tiles[:, 1].tolist() == [16384] * -(-16384 // each) + [300] * -(-300 // each) + [4]
    assert tiles[-1].tolist() == [16384, 4, 0] and tiles[0].tolist() == [0, 16384, 0]
    assert tiles[-1 - -(-300 // each):-1].tolist() == [[16388, 300, row] for row in range(0, 300, each)]


def test_tiles_fill_the_card():
    tall, small = SHAPES
    card = SimpleNamespace(kind="cuda", n_sms=132)
    assert [half_gemm.shape_of(card, 1152, rows) for rows in (256, 2304, 9216)] == [small, small, tall]
    assert half_gemm.shape_of(card, 4304, 2304) == tall and half_gemm.shape_of(card, 4608, 576) == small
