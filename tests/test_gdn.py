import numpy as np
import pytest

from kernels import conv, gdn, norm
from tests.oracle import oracle_npz


@pytest.mark.parametrize("case", gdn.PREFILL_CASES, ids=str)
def test_prefill_equals_the_reference(card, case):
    gdn.check_prefill(card, case)


@pytest.mark.parametrize("case", gdn.DECODE_CASES, ids=str)
def test_decode_equals_the_reference(card, case):
    gdn.check_decode(card, case)


@pytest.mark.parametrize("rows", [1, 3, 4, 65, 200])
def test_grouped_reference_equals_the_recurrence(rows):
    random = np.random.default_rng(rows)
    projected, *gates = gdn.random_inputs(random, rows, 2, 4)
    qkv, _, alpha, beta = gdn.split(projected, 2, 4)
    inputs, state = (qkv, alpha, beta, *gates, 2), random.standard_normal((4, 128, 128))
    for got, want in zip(gdn.reference_grouped(state, *inputs), gdn.reference(state, *inputs)):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


def prefill(card, projected, ssm_a, dt_bias, n_k, n_v, cuts, state=None, qkv=None):
    """One sequence from `state` (zeros), in launches of the given lengths -> (o, state)."""
    rows, stride = projected.shape
    qkv = card.upload(np.ascontiguousarray(gdn.split(projected, n_k, n_v)[0] if qkv is None else qkv))
    projected, ssm_a, dt_bias = map(card.upload, (projected, ssm_a, dt_bias))
    o, factors = (card.alloc(shape, np.float32) for shape in ((rows, n_v, 128), gdn.factors_shape(rows, n_v)))
    card.poison(o), card.poison(factors)
    state = card.upload(np.zeros((1, n_v, 128, 128), np.float32) if state is None else state[None])
    slot, start = card.zeros(rows, np.int32), 0
    for length in cuts:
        part = slice(start, start + length)
        gdn.gdn_prefill(card, o[part], state, factors, qkv[part], projected[part].reshape(-1), stride, ssm_a,
                        dt_bias, slot, length, n_k, n_v)
        start += length
    return card.download(o), card.download(state)[0]


@pytest.mark.parametrize("cuts", [[64, 64, 17], [64, 81], [4, 8, 133]], ids=str)
def test_bits_do_not_depend_on_the_cut(card, cuts):
    inputs = gdn.random_inputs(np.random.default_rng(0), 145, 2, 4)
    for got, want in zip(prefill(card, *inputs, 2, 4, cuts), prefill(card, *inputs, 2, 4, [145])):
        np.testing.assert_array_equal(got, want)


def test_a_row_does_not_depend_on_those_after_it(card):
    projected, *gates = gdn.random_inputs(np.random.default_rng(2), 12, 1, 2)
    want, _ = prefill(card, projected, *gates, 1, 2, [12])
    for rows in (1, 6, 11):
        got, _ = prefill(card, projected[:rows], *gates, 1, 2, [rows])
        np.testing.assert_array_equal(got, want[:rows])


def test_a_decoded_row_has_the_same_bits_alone_and_in_a_batch(card):
    random, n_k, n_v = np.random.default_rng(1), 1, 2
    projected, ssm_a, dt_bias = gdn.random_inputs(random, 5, n_k, n_v)
    shapes = (5, n_v, 128, 128), (5, 4, 512), (512, 4), 128
    states, rings, conv_w, norm_w = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    results = []
    for rows in ([0, 1, 2, 3, 4], [3]):
        y, state, ring = card.alloc((len(rows), n_v * 128), np.float32), card.upload(states), card.upload(rings)
        constants = map(card.upload, (conv_w, ssm_a, dt_bias, norm_w))
        places = (card.upload(np.asarray(a, np.int32)) for a in (rows, [7 + 3 * row for row in rows]))
        gdn.gdn_decode(card, y, state, ring, card.upload(projected[rows]).reshape(-1), projected.shape[1],
                       *constants, *places, len(rows), n_k, n_v, 1e-6)
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
    norm.gated_norm(card, y, o, flat[channels:], stride, constants[3], prompt, n_v, eps)
    for row in range(prompt, rows):
        gdn.gdn_decode(card, y[row], state, ring, flat[row * stride:], stride, *constants, slots,
                       positions[row:], 1, n_k, n_v, eps)
    for got, wanted in ((card.download(y), want), (card.download(state)[1], want_state)):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=gdn.TOLERANCE * np.abs(wanted).max())


def reference_model(part, n_k=2, n_v=4):
    """The kernel's inputs for `part` of the reference model's tokens, its gates turned back into projections.

    There value head h uses key head h // r; `order` lists them as the kernel (and GGUF) does, j mod n_k."""
    z, r = oracle_npz("operators"), n_v // n_k
    order = [j % n_k * r + j // n_k for j in range(n_v)]
    rows = z["gdn_g"][part].shape[0]
    qkv = np.concatenate([z["gdn_q"][part].reshape(rows, -1), z["gdn_k"][part].reshape(rows, -1),
                          z["gdn_v"][part][:, order].reshape(rows, -1)], axis=1)
    beta, g = z["gdn_beta"][part][:, order].astype(np.float64), z["gdn_g"][part][:, order].astype(np.float64)
    nothing = np.full((rows, n_v * 128), np.nan)  # z
    projected = np.concatenate([qkv, nothing, np.log(np.expm1(-g)), np.log(beta / (1 - beta))], axis=1)
    inputs = projected, -np.ones(n_v), np.zeros(n_v)
    return z, order, [a.astype(np.float32) for a in inputs]


@pytest.mark.parametrize("part, start, end", [
    (slice(0, 100), None, "gdn_state_after_100"), (slice(100, 160), "gdn_state_after_100", "gdn_state_end")])
def test_delta_rule_of_the_reference_model(card, part, start, end):
    z, order, inputs = reference_model(part)
    o, state = prefill(card, *inputs, 2, 4, [part.stop - part.start], z[start][order] if start else None)
    for got, want in ((o, z["gdn_out"][part][:, order]), (state, z[end][order])):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=gdn.TOLERANCE * np.abs(want).max())
