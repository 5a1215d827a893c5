import numpy as np
import pytest

from kernels import conv, gdn, gdn_decode, norm
from kernels.gdn import Decay, LinearHeads
from kernels.gdn_decode import LinearWeights
from kernels.records import CHECK_ROWS, Places, Projected, States


@pytest.mark.parametrize("case", gdn_decode.CASES, ids=str)
def test_equals_the_reference(card, case):
    gdn_decode.check(card, case)


@pytest.mark.parametrize("case", gdn_decode.CHAINS, ids=str)
def test_checks_have_the_bits_of_single_tokens(card, case):
    gdn_decode.check_chain(card, case)


def test_early_it_equals_the_reference(card, monkeypatch):
    """As on cards whose launches overlap."""
    monkeypatch.setattr(gdn_decode, "launches_overlap", lambda cc: True)
    gdn_decode.check(card, (3, 2, 6))


def test_checks_with_an_sm_for_each_block_have_the_bits_of_single_tokens(card, monkeypatch):
    """As on cards whose launches overlap."""
    monkeypatch.setattr(gdn_decode, "launches_overlap", lambda cc: True)
    monkeypatch.setattr(card, "n_sms", 132)
    made = []
    monkeypatch.setattr(gdn_decode, "decode_kernel", lambda *args, make=gdn_decode.decode_kernel:
                        made.append(args) or make(*args))
    gdn_decode.check_chain(card, (2, 2, 4))
    assert (False, False, True, CHECK_ROWS, True) in made


def test_a_decoded_row_has_the_same_bits_alone_and_in_a_batch(card):
    random, n_k, n_v = np.random.default_rng(1), 1, 2
    projected, ssm_a, dt_bias = gdn.random_inputs(random, 5, n_k, n_v)
    shapes = (5, n_v, 128, 128), (5, 4, 512), (512, 4), 128
    states, rings, conv_w, norm_w = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    results = []
    for rows in ([0, 1, 2, 3, 4], [3]):
        y = card.alloc((len(rows), n_v * 128), np.float32)
        state, ring, flat = map(card.upload, (states, rings, projected[rows].reshape(-1)))
        weights = LinearWeights(card.upload(conv_w), Decay(card.upload(ssm_a), card.upload(dt_bias)),
                                card.upload(norm_w))
        places = Places(*(card.upload(np.asarray(a, np.int32)) for a in (rows, [7 + 3 * row for row in rows])))
        gdn_decode.gdn_decode(card, y, States(ring, state), Projected(flat, projected.shape[1]), weights, places,
                              LinearHeads(n_k, n_v), rows=len(rows), eps=1e-6)
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
    flat = card.upload(projected.reshape(-1))
    weights = LinearWeights(card.upload(conv_w), Decay(card.upload(ssm_a), card.upload(dt_bias)), card.upload(norm_w))
    places = Places(card.upload(np.ones(rows, np.int32)), card.upload(np.arange(rows, dtype=np.int32)))
    inputs, heads, states = Projected(flat, stride), LinearHeads(n_k, n_v), States(ring, state)
    conv.conv_silu(card, mixed, inputs, ring, weights.conv, places, prompt, channels)
    gdn.gdn_prefill(card, o, state, mixed, inputs, weights.decay, places.slots, heads, rows=prompt, factors=factors)
    norm.gated_norm(card, y, norm.GatedInput(o, flat[channels:], stride, n_v, weights.norm, eps), prompt)
    for row in range(prompt, rows):
        gdn_decode.gdn_decode(card, y[row], states, inputs.rows_from(row), weights, places.rows_from(row), heads,
                              rows=1, eps=eps)
    for got, wanted in ((card.download(y), want), (card.download(state)[1], want_state)):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=gdn.TOLERANCE * np.abs(wanted).max())
