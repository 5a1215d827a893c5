import numpy as np
import pytest

from kernels import attention, kv_cache, rope
from kernels.attention import attend_decode, attend_prefill, paged, sample_inputs, scratch_shape
from tests.oracle import oracle_npz, oracle_path


@pytest.mark.parametrize("case", attention.CASES, ids=str)
def test_attention_equals_the_reference(card, case):
    attention.check(card, case)


def prefill_in_pieces(card, inputs, cuts):
    """Attention output [n, heads * 256] of one sequence, its rows launched in pieces that end at `cuts`."""
    q, qg, k, v = inputs
    n, heads, n_kv = len(q), q.shape[1], k.shape[1]
    pages, table = [card.upload(paged([x])[0]) for x in (k, v)], card.upload(paged([k])[1])
    out = card.alloc((n, heads * 256), np.float32)
    card.poison(out)
    slots, positions = card.upload(np.zeros(n, np.int32)), card.upload(np.arange(n, dtype=np.int32))
    q, qg = card.upload(q), card.upload(qg)
    for start, stop in zip([0, *cuts], [*cuts, n]):
        part = slice(start, stop)
        attend_prefill(card, out[part], q[part], qg[part], *pages, table, slots[part], positions[part],
                       stop - start, heads,
                       n_kv)
    return card.download(out)


def test_prefill_does_not_depend_on_the_cuts(card):
    inputs = sample_inputs(4, 2, 200, np.arange(200))
    whole = prefill_in_pieces(card, inputs, [])
    for cuts in ([64, 128], [1, 4, 35, 98, 161], [192]):
        np.testing.assert_array_equal(prefill_in_pieces(card, inputs, cuts), whole)


def decode(card, inputs, positions, max_pages=12):
    """One row per sequence of `inputs` at its position: [batch, heads * 256]."""
    heads, n_kv, batch = inputs[0][0].shape[1], inputs[0][2].shape[1], len(inputs)
    pages, table = [paged([x[i] for x in inputs])[0] for i in (2, 3)], np.full((batch, max_pages), -1,
                                                                               np.int32)
    held = paged([x[2] for x in inputs])[1]
    table[:, :held.shape[1]] = held
    out = card.alloc((batch, heads * 256), np.float32)
    scratch = card.alloc(scratch_shape(batch, heads, max_pages), np.float32)
    card.poison(out), card.poison(scratch)
    arrays = [np.concatenate([x[i] for x in inputs]) for i in (0, 1)]
    arrays += [*pages, table, np.arange(batch, dtype=np.int32), np.array(positions, np.int32)]
    attend_decode(card, out, *map(card.upload, arrays), scratch, batch, heads, n_kv)
    return card.download(out)


def test_decode_depends_neither_on_the_batch_nor_on_the_context_size(card):
    positions = [300, 5, 64]
    inputs = [sample_inputs(4, 2, p + 1, [p], seed) for seed, p in enumerate(positions)]
    together = decode(card, inputs, positions)
    for i, position in enumerate(positions):
        alone = decode(card, inputs[i:i + 1], [position], max_pages=400)  # more splits than blocks, too
        np.testing.assert_array_equal(together[i:i + 1], alone)


def test_blocks_take_several_splits_each(card, monkeypatch):
    inputs = [sample_inputs(4, 2, 600, [599])]
    many = decode(card, inputs, [599])
    monkeypatch.setattr(attention, "SPLIT_BLOCKS", 1)
    np.testing.assert_array_equal(decode(card, inputs, [599]), many)


def test_a_large_score_takes_it_all(card):
    q, qg, k, v = sample_inputs(4, 2, 70, [69])
    q[:], k[:] = 0, 0
    q[..., 0], k[40, :, 0] = 8, 60  # a score of 480 for key 40, 0 for the others
    got = decode(card, [(q, qg, k, v)], [69])
    want = np.repeat(v[40].astype(np.float64), 2, axis=0) / (1 + np.exp(-qg[0, :, 256:].astype(np.float64)))
    np.testing.assert_allclose(got[0], want.ravel(), rtol=1e-6)


@pytest.fixture(scope="module")
def oracle_block():
    """Layer 3 of the reference model: projections of 80 tokens (made here, in NumPy), norm weights, and what
    comes before the output projection."""
    from gguf import GGUFReader, dequantize
    z = oracle_npz("operators")
    tensors = {t.name: t for t in GGUFReader(oracle_path("gguf/dense_mtp-Q8_0.gguf")).tensors}

    def weight(name):
        tensor = tensors[f"blk.3.{name}.weight"]
        return dequantize(tensor.data, tensor.tensor_type)

    qg, k, v = (z["att_in"] @ weight(name).T for name in ("attn_q", "attn_k", "attn_v"))
    return (qg.reshape(80, 4, 512), k.reshape(80, 2, 256), v.reshape(80, 2, 256), weight("attn_q_norm"),
            weight("attn_k_norm"), z["att_gated_before_o_proj"])


def test_attention_block_of_the_reference_model(card, oracle_block):
    *inputs, want = oracle_block
    qg, k, v, q_norm, k_norm = map(card.upload, inputs)
    positions, frequencies = np.arange(80, dtype=np.int32), card.upload(rope.inverse_frequencies(1e7))
    rope_pos, slots = card.upload(np.stack([positions] * 3)), card.upload(np.zeros(80, np.int32))
    row_pos, table = card.upload(positions), card.upload(np.array([[2, 0]], np.int32))
    q, pages = card.alloc((80, 4, 256), np.float16), [card.alloc((3, 2, 64, 256), np.float16) for _ in "kv"]
    rope.norm_rope_q(card, q, qg, q_norm, rope_pos, frequencies, 80, 4, (11, 11, 10), 1e-6)
    kv_cache.store_kv(card, *pages, k, v, k_norm, rope_pos, frequencies, table, slots, row_pos, 80, 2,
                      (11, 11, 10), 1e-6)
    out, last = card.alloc((80, 1024), np.float32), card.alloc((1, 1024), np.float32)
    attend_prefill(card, out, q, qg, *pages, table, slots, row_pos, 80, 4, 2)
    scratch = card.alloc(scratch_shape(1, 4, 2), np.float32)
    attend_decode(card, last, q[79:], qg[79:], *pages, table, slots[79:], row_pos[79:], scratch, 1, 4, 2)
    for got, expected in ((card.download(out), want), (card.download(last), want[79:])):
        assert np.linalg.norm(got - expected) <= 2e-3 * np.linalg.norm(expected)  # float16 q, k, v and p


def test_products_run_on_packed_half(card):
    """In the PTX of both families."""
    from kernels.compile import compile_kernel, target_cc
    split = ("float32[1]", *["float16[1]"] * 3, *["int32[1]"] * 3, *["uint32"] * 3)
    tiles = ("float32[1]", "float16[1]", "float32[1]", *split[2:7], *["uint32"] * 4)
    for kernel, signature in ((attention.attend_tiles, tiles), (attention.split_kernel(2), split)):
        ptx = compile_kernel(kernel, signature, target_cc(card.cc), card.cache_dir).ptx
        assert ptx.count("fma.rn.f16x2") > 100
        assert not any(word in ptx for word in (".local", ".f64", "approx", "mma"))
