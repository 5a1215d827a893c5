import numpy as np
import pytest

from kernels import gdn
from tests.oracle import oracle_npz


@pytest.mark.parametrize("case", gdn.CASES, ids=str)
def test_equals_the_reference(card, case):
    gdn.check(card, case)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200])
def test_chunked_reference_equals_the_recurrence(rows):
    random = np.random.default_rng(rows)
    inputs, state = gdn.random_inputs(random, rows, 2, 4), random.standard_normal((4, 128, 128))
    for got, want in zip(gdn.reference_chunked(state, *inputs, 2), gdn.reference(state, *inputs, 2)):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


def run(card, inputs, n_k, n_v, cuts, state=None):
    """One sequence from `state` (zeros), in launches of the given lengths -> (o, state)."""
    qkv, alpha, beta, ssm_a, dt_bias = map(card.upload, inputs)
    rows, start = sum(cuts), 0
    o, factors = card.alloc((rows, n_v, 128), np.float32), card.alloc((rows, n_v, 4), np.float32)
    card.poison(o), card.poison(factors)
    state = card.upload(np.zeros((1, n_v, 128, 128), np.float32) if state is None else state[None])
    slot = card.zeros(rows, np.int32)
    for length in cuts:
        part = slice(start, start + length)
        gdn.gated_delta_rule(card, o[part], state, factors, qkv[part], alpha[part], beta[part], ssm_a,
                             dt_bias, slot, length, n_k, n_v, length)
        start += length
    return card.download(o), card.download(state)[0]


@pytest.mark.parametrize("cuts", [[1] * 12, [7, 1, 4]], ids=str)
def test_bits_do_not_depend_on_the_cut(card, cuts):
    inputs = gdn.random_inputs(np.random.default_rng(0), 12, 2, 4)
    for got, want in zip(run(card, inputs, 2, 4, cuts), run(card, inputs, 2, 4, [12])):
        np.testing.assert_array_equal(got, want)


def test_a_decoded_row_has_the_same_bits_alone_and_in_a_batch(card):
    random = np.random.default_rng(1)
    qkv, alpha, beta, ssm_a, dt_bias = map(card.upload, gdn.random_inputs(random, 5, 1, 2))
    states = random.standard_normal((5, 2, 128, 128)).astype(np.float32)
    results = []
    for rows in (slice(0, 5), slice(3, 4)):
        count = rows.stop - rows.start
        o, factors = card.zeros((count, 2, 128), np.float32), card.zeros((count, 2, 4), np.float32)
        state, slots = card.upload(states), card.upload(np.arange(5, dtype=np.int32)[rows])
        gdn.gated_delta_rule(card, o, state, factors, qkv[rows], alpha[rows], beta[rows], ssm_a, dt_bias,
                             slots, count, 1, 2)
        results.append((card.download(o)[3 if count == 5 else 0], card.download(state)[3]))
    for together, alone in zip(*results):
        np.testing.assert_array_equal(together, alone)


def reference_model(part, n_k=2, n_v=4):
    """The kernel's inputs for `part` of the reference model's tokens, its gates turned back into projections.

    There value head h uses key head h // r; `order` lists them as the kernel (and GGUF) does, j mod n_k."""
    z, r = oracle_npz("operators"), n_v // n_k
    order = [j % n_k * r + j // n_k for j in range(n_v)]
    rows = z["gdn_g"][part].shape[0]
    qkv = np.concatenate([z["gdn_q"][part].reshape(rows, -1), z["gdn_k"][part].reshape(rows, -1),
                          z["gdn_v"][part][:, order].reshape(rows, -1)], axis=1)
    beta, g = z["gdn_beta"][part][:, order].astype(np.float64), z["gdn_g"][part][:, order].astype(np.float64)
    ssm_a, dt_bias = -np.ones(n_v), np.zeros(n_v)
    gates = np.log(np.expm1(-g)), np.log(beta / (1 - beta)), ssm_a, dt_bias
    return z, order, [qkv, *(a.astype(np.float32) for a in gates)]


@pytest.mark.parametrize("part, start, end", [
    (slice(0, 100), None, "gdn_state_after_100"), (slice(100, 160), "gdn_state_after_100", "gdn_state_end")])
def test_delta_rule_of_the_reference_model(card, part, start, end):
    z, order, inputs = reference_model(part)
    o, state = run(card, inputs, 2, 4, [part.stop - part.start], z[start][order] if start else None)
    for got, want in ((o, z["gdn_out"][part][:, order]), (state, z[end][order])):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=gdn.TOLERANCE * np.abs(want).max())
