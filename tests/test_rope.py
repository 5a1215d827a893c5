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
    rope.norm_rope_q(card, q, qg, weights[0], both[0], weights[1], 5, 4, rope.SECTIONS, rope.EPS)
    rope.norm_rope_q(card, alone, qg[3:4], weights[0], both[1], weights[1], 1, 4, rope.SECTIONS, rope.EPS)
    np.testing.assert_array_equal(card.download(q)[3:4], card.download(alone))
