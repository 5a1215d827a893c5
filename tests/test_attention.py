import numpy as np
import pytest

from kernels import attend_decode, attention, kv_cache, rope
from kernels.attention import attend_prefill, attention_reference, gates, head_error, paged, sample_inputs
from tests.oracle import oracle_npz, oracle_path


@pytest.mark.parametrize("case", attention.CASES, ids=str)
def test_attention_equals_the_reference(card, case):
    attention.check(card, case)


def prefill_in_pieces(card, inputs, cuts):
    """Attention output [n, heads * 256] of one sequence, its rows launched in pieces that end at `cuts`."""
    q, projected, k, v = inputs
    n, heads, n_kv = len(q), q.shape[1], k.shape[1]
    pages, table = [card.upload(paged([x])[0]) for x in (k, v)], card.upload(paged([k])[1])
    out = card.alloc((n, heads * 256), np.float32)
    card.poison(out)
    slots, positions = card.upload(np.zeros(n, np.int32)), card.upload(np.arange(n, dtype=np.int32))
    stride, q, projected = projected.shape[1], card.upload(q), card.upload(projected)
    for start, stop in zip([0, *cuts], [*cuts, n]):
        part = slice(start, stop)
        attend_prefill(card, out[part], q[part], projected[part], stride, *pages, table, slots[part],
                       positions[part],
                       stop - start, heads, n_kv)
    return card.download(out)


def test_prefill_does_not_depend_on_the_cuts(card):
    inputs = sample_inputs(4, 2, 200, 200)
    whole = prefill_in_pieces(card, inputs, [])
    for cuts in ([64, 128], [1, 4, 35, 98, 161], [192]):
        np.testing.assert_array_equal(prefill_in_pieces(card, inputs, cuts), whole)


def test_a_maximum_that_moves_late(card):
    """Keys that grow along the sequence: every step rescales; and keys that shrink: only the first does."""
    for order in (1, -1):
        q, projected, k, v = sample_inputs(2, 1, 200, 200)
        q[:] = np.abs(q)
        k = (np.abs(k) * np.linspace(0.02, 0.2, 200, dtype="f4")[::order, None, None]).astype(np.float16)
        got = prefill_in_pieces(card, (q, projected, k, v), [])
        head_error(got, attention_reference(q, k, v, gates(projected, 2), np.arange(200)), 2)


def test_262_144_tokens(card):
    """The last 3 rows; the keys lie in 64 pages that come again and again."""
    rows, n = 3, 262144
    q, projected, k, v = sample_inputs(1, 1, 64 * 64, rows)
    pages, table = [card.upload(x.reshape(64, 1, 64, 256)) for x in (k, v)], np.resize(np.arange(64), (1,
                                                                                                       4096))
    out, positions = card.alloc((rows, 256), np.float32), np.arange(n - rows, n, dtype=np.int32)
    attend_prefill(card, out, card.upload(q), card.upload(projected), projected.shape[1], *pages,
                   card.upload(table.astype(np.int32)), card.upload(np.zeros(rows, np.int32)),
                   card.upload(positions),
                   rows, 1, 1)
    k, v = (np.tile(x, (64, 1, 1)) for x in (k, v))
    head_error(card.download(out), attention_reference(q, k, v, gates(projected, 1), positions), 1)


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
    qg, k, v, q_norm, k_norm, want = oracle_block
    projected = np.concatenate([x.reshape(80, -1) for x in (qg, k, v)], axis=1)
    stride, k_column, v_column = projected.shape[1], 2048, 2560
    projected, q_norm, k_norm = map(card.upload, (projected, q_norm, k_norm))
    positions, frequencies = np.arange(80, dtype=np.int32), card.upload(rope.inverse_frequencies(1e7))
    rope_pos, slots = card.upload(np.stack([positions] * 3)), card.upload(np.zeros(80, np.int32))
    row_pos, table = card.upload(positions), card.upload(np.array([[2, 0]], np.int32))
    q, pages = card.alloc((80, 4, 256), np.float16), [card.alloc((3, 2, 64, 256), np.float16) for _ in "kv"]
    rope.norm_rope_q(card, q, projected, stride, q_norm, rope_pos, frequencies, 80, 4, (11, 11, 10), 1e-6)
    kv_cache.store_kv(card, *pages, projected, stride, k_column, v_column, k_norm, rope_pos, frequencies,
                      table, slots,
                      row_pos, 80, 2, (11, 11, 10), 1e-6)
    out, last = card.alloc((80, 1024), np.float32), card.alloc((1, 1024), np.float32)
    attend_prefill(card, out, q, projected, stride, *pages, table, slots, row_pos, 80, 4, 2)
    partials = card.alloc(attend_decode.partials_shape(1, 4), np.float32)
    attend_decode.attend_decode(card, last, None, projected[79:], stride, k_column, v_column, q_norm, k_norm,
                                card.upload(np.full((3, 1), 79, np.int32)), frequencies, *pages, table,
                                slots[79:],
                                row_pos[79:], partials, card.zeros(2, np.uint32), 1, 4, 2, (11, 11, 10), 1e-6)
    for got, expected in ((card.download(out), want), (card.download(last), want[79:])):
        assert np.linalg.norm(got - expected) <= 2e-3 * np.linalg.norm(expected)  # float16 q, k, v and p


def test_products_run_on_packed_half(card):
    """In the PTX of both families."""
    from kernels.compile import compile_kernel, target_cc
    tiles = ("float32[1]", "float16[1]", "float32[1]", *["float16[1]"] * 2, *["int32[1]"] * 3,
             *["uint32"] * 5)
    decode = ("int8[1]", *["float32[1]"] * 2, "uint32[1]", *["float32[1]"] * 3, "int32[1]", "float32[1]",
              *["float16[1]"] * 2, *["int32[1]"] * 3, *["uint32"] * 8, "float32")
    for kernel, signature in ((attention.attend_tiles, tiles), (attend_decode.attend_kernel(2, True, False),
                                                                decode)):
        ptx = compile_kernel(kernel, signature, target_cc(card.cc), card.cache_dir).ptx
        assert ptx.count("fma.rn.f16x2") > 80
        assert not any(word in ptx for word in (".local", ".f64", "approx", "mma"))
