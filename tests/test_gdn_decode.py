import numpy as np
import pytest

from kernels import conv, gdn, gdn_decode, norm


@pytest.mark.parametrize("case", gdn_decode.CASES, ids=str)
def test_equals_the_reference(card, case):
    gdn_decode.check(card, case)


def test_early_it_equals_the_reference(card, monkeypatch):
    """As on cards whose launches overlap."""
    monkeypatch.setattr(gdn_decode, "launches_overlap", lambda cc: True)
    gdn_decode.check(card, (3, 2, 6))


def test_a_decoded_row_has_the_same_bits_alone_and_in_a_batch(card):
    random, n_k, n_v = np.random.default_rng(1), 1, 2
    projected, ssm_a, dt_bias = gdn.random_inputs(random, 5, n_k, n_v)
    shapes = (5, n_v, 128, 128), (5, 4, 512), (512, 4), 128
    states, rings, conv_w, norm_w = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    results = []
    for rows in ([0, 1, 2, 3, 4], [3]):
        y = card.alloc((len(rows), n_v * 128), np.float32)
        state, ring, flat = map(card.upload, (states, rings, projected[rows].reshape(-1)))
        constants = map(card.upload, (conv_w, ssm_a, dt_bias, norm_w))
        places = (card.upload(np.asarray(a, np.int32)) for a in (rows, [7 + 3 * row for row in rows]))
        gdn_decode.gdn_decode(card, y, state, ring, flat, projected.shape[1], *constants, *places, len(rows),
                              n_k, n_v, 1e-6)
        results.append((card.download(y)[rows.index(3)], card.download(state)[3], card.download(ring)[3]))
    for together, alone in zip(*results):
        np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("prompt", [1, 2, 3, 66])
def test_an_answer_goes_on_where_its_prompt_ended(card, prompt):
    """Convolution, delta rule and gated norm of a prompt, then of five tokens one by one, from a new slot."""
    n_k, n_v, rows, eps, random = 1, 2, prompt + 5, 1e-6, np.random.default_rng(prompt)
    projected, ssm_a, dt_bias = gdn.random_inputs(random, rows, n_k, n_v)
    stride, channels = projected.shape[1], (2 * n_k + n_v) * 128
    conv_w, norm_w = random.standard_normal((channels, 4)).astype(np.float32), np.ones(128, np.float32)
    qkv, z, alpha, beta = gdn.split(projected, n_k, n_v)
    convolved = conv.reference(qkv, np.zeros((3, channels)), conv_w)
    o, want_state = gdn.reference(np.zeros((n_v, 128, 128)), convolved, alpha, beta, ssm_a, dt_bias, n_k)
    want = norm.gated_norm_reference(o, z.reshape(o.shape), norm_w, eps).reshape(rows, -1)

    ring, state = card.zeros((2, 4, channels), np.float32), card.zeros((2, n_v, 128, 128), np.float32)
    mixed, y, o = (card.alloc((rows, width), np.float32) for width in (channels, n_v * 128, n_v * 128))
    factors = card.alloc(gdn.factors_shape(prompt, n_v), np.float32)
    for output in (mixed, y, o, factors):
        card.poison(output)
    flat, *constants = map(card.upload, (projected.reshape(-1), conv_w, ssm_a, dt_bias, norm_w))
    slots, positions = card.upload(np.ones(rows, np.int32)), card.upload(np.arange(rows, dtype=np.int32))
    conv.conv_silu(card, mixed, flat, stride, ring, constants[0], slots, positions, prompt, channels)
    gdn.gdn_prefill(card, o, state, factors, mixed, flat, stride, *constants[1:3], slots, prompt, n_k, n_v)
    norm.gated_norm(card, y, norm.GatedInput(o, flat[channels:], stride, n_v, constants[3], eps), prompt)
    for row in range(prompt, rows):
        gdn_decode.gdn_decode(card, y[row], state, ring, flat[row * stride:], stride, *constants, slots,
                       positions[row:], 1, n_k, n_v, eps)
    for got, wanted in ((card.download(y), want), (card.download(state)[1], want_state)):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=gdn.TOLERANCE * np.abs(wanted).max())
