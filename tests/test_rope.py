import numpy as np
import pytest

from kernels import rope


@pytest.mark.parametrize("case", rope.CASES, ids=str)
def test_queries_equal_the_reference(card, case):
    rope.check(card, case)


def test_equal_positions_are_plain_rotary():
    x, positions = np.random.default_rng(0).standard_normal((7, 2, 256)), np.arange(7) * 100
    frequencies = rope.inverse_frequencies(1e6, 64)
    got = rope.norm_rope_reference(x, np.ones(256), np.stack([positions] * 3), frequencies, (11, 11, 10), 0)
    unit = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True))
    z = (unit[..., :32] + 1j * unit[..., 32:64]) * np.exp(1j * positions[:, None, None] * frequencies)
    np.testing.assert_allclose(got[..., :32], z.real, atol=1e-12)
    np.testing.assert_allclose(got[..., 32:64], z.imag, atol=1e-12)
    np.testing.assert_allclose(got[..., 64:], unit[..., 64:], atol=1e-12)


def test_sections_pick_the_axis():
    x = np.random.default_rng(0).standard_normal((1, 1, 256))
    rotated = lambda positions: rope.norm_rope_reference(x, np.ones(256), positions,
                                                         rope.inverse_frequencies(1e6, 64), (11, 11, 10), 0)[0, 0, :32]
    still = rotated(np.zeros((3, 1)))
    moved = [np.flatnonzero(rotated(np.eye(3)[:, axis:axis + 1]) != still).tolist() for axis in range(3)]
    assert moved == [[i for i in range(32) if i % 3 == 0], list(range(1, 32, 3)), list(range(2, 30, 3))]


def test_a_row_has_the_same_bits_alone_and_in_a_batch(card):
    rng, heads = np.random.default_rng(1), rope.heads_of(4, 1)
    host = rope.sample_qkv(rng, heads, rope.sample_positions(rng, 5))
    qkv = rope.upload_qkv(card, host)
    of_one = qkv._replace(products=qkv.products.rows_from(3), rotary=qkv.rotary._replace(
        positions=card.upload(host.rotary.positions[:, 3:4])))
    q, alone = card.alloc((5, 4, 256), np.float16), card.alloc((1, 4, 256), np.float16)
    rope.norm_rope_q(card, q, qkv, 5)
    rope.norm_rope_q(card, alone, of_one, 1)
    np.testing.assert_array_equal(card.download(q)[3:4], card.download(alone))


@pytest.mark.parametrize("shape", [rope.QWEN35, rope.QWEN3], ids=str)
def test_large_positions_add_nothing_to_the_rounding_of_the_angle(card, shape):
    """At the end of 256 K tokens; the angle is the float32 product that it is said to be."""
    rng, position, heads = np.random.default_rng(2), 262143, rope.heads_of(1, 1, shape)
    positions = np.full((3, 1), position, np.int32)
    qkv = rope.sample_qkv(rng, heads, positions, scale=1)._replace(q_norm=np.ones(heads.head_dim, np.float32))
    q = card.alloc((1, 1, heads.head_dim), np.float16)
    rope.norm_rope_q(card, q, rope.upload_qkv(card, qkv), 1)
    frequencies = qkv.rotary.frequencies
    angle = (np.float32(position) * frequencies).astype(np.float64)
    want = rope.query_reference(qkv._replace(rotary=qkv.rotary._replace(frequencies=angle / position)))
    assert np.max(np.abs(card.download(q) - want)) <= rope.TOLERANCE * np.max(np.abs(want))
    pairs = heads.rotary // 2
    assert np.max(np.abs(angle - position * 1e7 ** (-np.arange(pairs) / pairs))) < 2.0 ** -7 + 2.0 ** -7


@pytest.mark.parametrize("shape, sentence", [
    ((64, 64, False), "attention takes heads of 256 or 128 values, not 64"),
    ((128, 32, False), "attention rotates 64 or 128 dims of a head, not 32"),
    ((256, 256, True), "attention rotates 64 or 128 dims of a head, not 256"),
])
def test_heads_that_the_kernels_cannot_take_are_refused(shape, sentence):
    with pytest.raises(ValueError, match=sentence):
        rope.heads_of(4, 2, shape)
    with pytest.raises(ValueError, match="5 query heads do not share 2 KV heads evenly"):
        rope.heads_of(5, 2)


def test_columns_of_a_row_of_products():
    gated, plain = rope.heads_of(4, 2), rope.heads_of(4, 2, rope.QWEN3)
    assert (gated.group, gated.k_column, gated.v_column, gated.n_columns) == (2, 2048, 2560, 3072)
    assert (plain.group, plain.k_column, plain.v_column, plain.n_columns) == (2, 512, 768, 1024)
