import numpy as np
import pytest

from kernels import gdn
from kernels.gdn import Decay, LinearHeads
from kernels.records import Projected
from tests.oracle import oracle_npz


@pytest.mark.parametrize("case", gdn.CASES, ids=str)
def test_equals_the_reference(card, case):
    gdn.check(card, case)


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
    projected, decay = card.upload(projected), Decay(card.upload(ssm_a), card.upload(dt_bias))
    o, factors = (card.alloc(shape, np.float32) for shape in ((rows, n_v, 128), gdn.factors_shape(rows, n_v)))
    card.poison(o), card.poison(factors)
    state = card.upload(np.zeros((1, n_v, 128, 128), np.float32) if state is None else state[None])
    slot, start = card.zeros(rows, np.int32), 0
    for length in cuts:
        part = slice(start, start + length)
        gdn.gdn_prefill(card, o[part], state, qkv[part], Projected(projected[part].reshape(-1), stride), decay, slot,
                        LinearHeads(n_k, n_v), rows=length, factors=factors)
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
