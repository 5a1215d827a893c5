import numpy as np
import pytest

from kernels import rope


@pytest.mark.parametrize("case", rope.CASES, ids=str)
def test_queries_equal_the_reference(card, case):
    rope.check(card, case)


def test_equal_positions_are_plain_rotary():
    x, positions = np.random.default_rng(0).standard_normal((7, 2, 256)), np.arange(7) * 100
    frequencies = rope.inverse_frequencies(1e6)
    got = rope.norm_rope_reference(x, np.ones(256), np.stack([positions] * 3), frequencies, (11, 11, 10), 0)
    unit = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True))
    z = (unit[..., :32] + 1j * unit[..., 32:64]) * np.exp(1j * positions[:, None, None] * frequencies)
    np.testing.assert_allclose(got[..., :32], z.real, atol=1e-12)
    np.testing.assert_allclose(got[..., 32:64], z.imag, atol=1e-12)
    np.testing.assert_allclose(got[..., 64:], unit[..., 64:], atol=1e-12)


def test_sections_pick_the_axis():
    x = np.random.default_rng(0).standard_normal((1, 1, 256))
    turn = lambda positions: rope.norm_rope_reference(x, np.ones(256), positions,
                                                      rope.inverse_frequencies(1e6), (11, 11, 10), 0)
    still = turn(np.zeros((3, 1)))[0, 0, :32]
    moved = [np.flatnonzero(turn(np.eye(3)[:, axis:axis + 1])[0, 0,
                                                              :32] != still).tolist() for axis in range(3)]
    assert moved == [[i for i in range(32) if i % 3 == 0], list(range(1, 32, 3)), list(range(2, 30, 3))]


def test_a_row_has_the_same_bits_alone_and_in_a_batch(card):
    rng = np.random.default_rng(1)
    qg, w = rng.standard_normal((5, 4, 512), np.float32), np.ones(256, np.float32)
    positions = rope.sample_positions(rng, 5)
    weights = card.upload(w), card.upload(rope.inverse_frequencies(1e7))
    q, alone = card.alloc((5, 4, 256), np.float16), card.alloc((1, 4, 256), np.float16)
    qg, both = card.upload(qg), [card.upload(positions), card.upload(positions[:, 3:4])]
    rope.norm_rope_q(card, q, qg, 2048, weights[0], both[0], weights[1], 5, 4, rope.SECTIONS, rope.EPS)
    rope.norm_rope_q(card, alone, qg[3:4], 2048, weights[0], both[1], weights[1], 1, 4, rope.SECTIONS, rope.EPS)
    np.testing.assert_array_equal(card.download(q)[3:4], card.download(alone))


def test_large_positions_add_nothing_to_the_rounding_of_the_angle(card):
    """At the end of 256 K tokens; the angle is the float32 product that it is said to be."""
    rng, position = np.random.default_rng(2), 262143
    projected, frequencies = rng.standard_normal((1, 512), np.float32), rope.inverse_frequencies(1e7)
    q, positions = card.alloc((1, 1, 256), np.float16), np.full((3, 1), position, np.int32)
    w = np.ones(256, np.float32)
    rope.norm_rope_q(card, q, card.upload(projected), 512, *map(card.upload, (w, positions, frequencies)), 1, 1,
                     rope.SECTIONS, rope.EPS)
    angle = (np.float32(position) * frequencies).astype(np.float64)
    want = rope.norm_rope_reference(projected[:, None, :256], w, positions, angle / position, rope.SECTIONS, rope.EPS,
                                    rope.QUERY_SCALE)
    assert np.max(np.abs(card.download(q) - want)) <= rope.TOLERANCE * np.max(np.abs(want))
    assert np.max(np.abs(angle - position * 1e7 ** (-np.arange(32) / 32))) < 2.0 ** -7 + 2.0 ** -7
