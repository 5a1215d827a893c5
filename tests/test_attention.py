import numpy as np
import pytest

from kernels import attend_decode, attention, kv_cache, rope
from kernels.attention import (attend_prefill, attention_reference, gates, head_error, piece_of, sample_inputs,
                               upload_gates, upload_pages)
from kernels.kv_cache import Pages
from kernels.kv_formats import KV_FORMATS
from kernels.records import Places, Projected
from kernels.rope import QKV, Rotary, heads_of
from tests.kinds import of_formats
from tests.oracle import oracle_npz, oracle_path

FLOAT16 = KV_FORMATS["float16"]


@pytest.mark.parametrize("format, case", of_formats(attention.CASES, every=True), ids=str)
def test_attention_equals_the_reference(card, format, case):
    attention.check(card, format, case)


@pytest.mark.parametrize("case", attention.PACKED, ids=str)
def test_packed_parts_have_the_bits_of_parts_alone(card, case):
    attention.check_packed(card, case)


def prefill_in_parts(card, heads, inputs, cuts, format=FLOAT16, n_pages=8):
    """Attention output [n, heads * head_dim] of one sequence, its rows launched in parts that end at `cuts`.
    n_pages: of what is expanded at once."""
    q, projected, k, v = inputs
    n, pages = len(q), upload_pages(card, format, k, v)
    out = card.alloc((n, heads.n_heads * heads.head_dim), np.float32)
    card.poison(out)
    places = Places(card.upload(np.zeros(n, np.int32)), card.upload(np.arange(n, dtype=np.int32)))
    q, qkv, piece = card.upload(q), upload_gates(card, projected, heads), piece_of(card, format, heads, n, n_pages)
    for start, stop in zip([0, *cuts], [*cuts, n]):
        part = slice(start, stop)
        of_part = qkv._replace(products=qkv.products.rows_from(start))
        attend_prefill(card, out[part], q[part], of_part, pages, places.rows_from(start), stop - start, **piece)
    return card.download(out)


@pytest.mark.parametrize("format", KV_FORMATS.values(), ids=KV_FORMATS)
@pytest.mark.parametrize("shape", [rope.QWEN35, rope.QWEN3], ids=str)
def test_prefill_does_not_depend_on_the_cuts(card, shape, format):
    heads = heads_of(4, 2, shape)
    inputs = sample_inputs(heads, 200, 200)
    whole = prefill_in_parts(card, heads, inputs, [], format)
    for cuts, n_pages in ([64, 128], 1), ([1, 4, 35, 98, 161], 3), ([192], 2):
        np.testing.assert_array_equal(prefill_in_parts(card, heads, inputs, cuts, format, n_pages), whole)


@pytest.mark.parametrize("format", KV_FORMATS.values(), ids=KV_FORMATS)
def test_a_value_that_is_no_number_is_never_hidden(card, format):
    """No row that sees such a value has a finite output, however small its probability. Rows of the same tile before
    the value have none either: they multiply it by the probability 0."""
    heads = heads_of(4, 2)
    q, projected, k, v = sample_inputs(heads, 200, 200)
    v[130, 0] = np.nan
    found = np.isfinite(prefill_in_parts(card, heads, (q, projected, k, v), [64, 128], format, 1)).reshape(200, 4, 256)
    assert found[:128].all() and found[:, 2:].all() and not found[130:, :2].any()


@pytest.mark.parametrize("format", KV_FORMATS.values(), ids=KV_FORMATS)
@pytest.mark.parametrize("sizes, shape, n, at", [
    ((4, 2), rope.QWEN35, 200, 130), ((3, 1), rope.QWEN3, 205, 0), ((10, 2), rope.QWEN3, 131, 127),
    ((6, 2), rope.QWEN35, 77, 76)], ids=str)
def test_a_key_that_is_no_number_is_never_hidden(card, format, sizes, shape, n, at):
    """The key's value is finite, and no other score exceeds those of the first keys. All rows that see the key show it,
    and no other row does."""
    heads = heads_of(*sizes, shape)
    q, projected, k, v = sample_inputs(heads, n, n)
    k[:8] *= 8
    k[at, -1, 5] = np.nan
    found = prefill_in_parts(card, heads, (q, projected, k, v), [64], format, 1)
    found = np.isfinite(found).reshape(n, heads.n_kv_heads, heads.group, -1)
    assert found[:at].all() and found[:, :-1].all() and not found[at:, -1].any()


@pytest.mark.parametrize("shape", [rope.QWEN35, rope.QWEN3], ids=str)
def test_a_score_whose_products_overflow_is_never_hidden(card, shape):
    """Of finite queries, keys and values: infinity minus infinity."""
    heads, at = heads_of(4, 2, shape), 130
    q, projected, k, v = sample_inputs(heads, 200, 200)
    q[:, 1, :32], k[at, 0, :16], k[at, 0, 16:32] = 100, 3000, -3000
    found = np.isfinite(prefill_in_parts(card, heads, (q, projected, k, v), [64, 128])).reshape(200, 4, -1)
    assert found[:at].all() and found[:, [0, 2, 3]].all() and not found[at:, 1].any()


@pytest.mark.parametrize("shape", [rope.QWEN35, rope.QWEN3], ids=str)
def test_a_maximum_that_moves_late(card, shape):
    """Keys that grow along the sequence: every page rescales; and keys that shrink: only the first does."""
    heads = heads_of(2, 1, shape)
    for order in (1, -1):
        q, projected, k, v = sample_inputs(heads, 200, 200)
        q[:] = np.abs(q)
        k = (np.abs(k) * np.linspace(0.02, 0.2, 200, dtype="f4")[::order, None, None]).astype(np.float16)
        v = v.astype(np.float16)
        got = prefill_in_parts(card, heads, (q, projected, k, v), [])
        head_error(got, attention_reference(q, k, v, gates(projected, heads), np.arange(200)), 2)


def test_262_144_tokens(card):
    """The last 3 rows; the keys lie in 64 pages that come again and again."""
    rows, n, heads = 3, 262144, heads_of(1, 1)
    q, projected, k, v = sample_inputs(heads, 64 * 64, rows)
    k, v, table = k.astype(np.float16), v.astype(np.float16), np.resize(np.arange(64), (1, 4096)).astype(np.int32)
    pages = Pages(FLOAT16, *(card.upload(x.reshape(64, 1, 64, 256)) for x in (k, v)), card.upload(table))
    out, positions = card.alloc((rows, 256), np.float32), np.arange(n - rows, n, dtype=np.int32)
    attend_prefill(card, out, card.upload(q), upload_gates(card, projected, heads), pages,
                   Places(card.upload(np.zeros(rows, np.int32)), card.upload(positions)), rows)
    k, v = (np.tile(x, (64, 1, 1)) for x in (k, v))
    head_error(card.download(out), attention_reference(q, k, v, gates(projected, heads), positions), 1)


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
    projected, heads = np.concatenate([x.reshape(80, -1) for x in (qg, k, v)], axis=1), heads_of(4, 2)
    assert projected.shape[1] == heads.n_columns
    positions, frequencies = np.arange(80, dtype=np.int32), card.upload(rope.inverse_frequencies(1e7, 64))
    rotary = Rotary(card.upload(np.stack([positions] * 3)), frequencies, (11, 11, 10))
    qkv = QKV(Projected(card.upload(projected).reshape(-1), heads.n_columns), heads, card.upload(q_norm),
              card.upload(k_norm), rotary)
    places = Places(card.upload(np.zeros(80, np.int32)), card.upload(positions))
    pages = Pages(FLOAT16, *(card.alloc((3, 2, 64, 256), np.float16) for _ in "kv"),
                  card.upload(np.array([[2, 0]], np.int32)))
    q = card.alloc((80, 4, 256), np.float16)
    rope.norm_rope_q(card, q, qkv, 80)
    kv_cache.store_kv(card, pages, qkv, places, 80)
    out, last = card.alloc((80, 1024), np.float32), card.alloc((1, 1024), np.float32)
    attend_prefill(card, out, q, qkv, pages, places, 80)
    of_last = qkv._replace(products=qkv.products.rows_from(79),
                           rotary=rotary._replace(positions=card.upload(np.full((3, 1), 79, np.int32))))
    scratch = attend_decode.Scratch.alloc(card, 1, 4, 256)
    attend_decode.attend_decode(card, (last, None), of_last, pages, places.rows_from(79), scratch, 1)
    for got, expected in ((card.download(out), want), (card.download(last), want[79:])):
        assert np.linalg.norm(got - expected) <= 2e-3 * np.linalg.norm(expected)  # float16 q, k, v and p


@pytest.mark.parametrize("shape", [rope.QWEN35, rope.QWEN3], ids=str)
@pytest.mark.parametrize("format", KV_FORMATS.values(), ids=KV_FORMATS)
def test_products_run_on_packed_half(card, format, shape):
    """In the PTX of both families; scores of 8-bit keys on dp4a."""
    from kernels.compile import compile_kernel, target_cc
    (head_dim, rotary, gated), page = shape, f"{np.dtype(format.keys.dtype).name}[1]"
    halves = ("float16[1]",) * 2
    tiles = ("float32[1]", "float16[1]", "float32[1]", *halves, *["int32[1]"] * 5, "float32[1]", *["uint32"] * 8)
    decode = ("int8[1]", *["float32[1]"] * 2, "uint32[1]", *["float32[1]"] * 3, "int32[1]", "float32[1]", page, page,
              *["int32[1]"] * 3, *["uint32"] * 10, "float32")
    for kernel, signature in (
            (attention.tiles_kernel(format.expands, head_dim, gated, False), tiles),
            (attend_decode.attend_kernel(format, 2, head_dim, rotary, gated, True, False, 1), decode)):
        ptx = compile_kernel(kernel, signature, target_cc(card.cc), card.cache_dir).ptx
        products = ptx.count("fma.rn.f16x2") + (ptx.count("dp4a.") if format.keys.by_codes else 0)
        assert products > 80 * head_dim // 256
        assert not any(word in ptx for word in (".local", ".f64", "approx", "mma"))
