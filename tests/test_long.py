"""The last positions of a context of 262,144 tokens: addresses, angles, pages and states, against float64."""

import numpy as np
import pytest
from numba import cuda
from numba.types import uint32

from engine import prefix
from engine.prefix import PAGE_TOKENS, PrefixCache, checkpoint_positions
from kernels import attend_decode, attention, gdn, kv_cache
from kernels.kv_expand import PIECE_PAGES
from kernels.kv_formats import KV_FORMATS, PAGE, turned, turned_back
from kernels.limits import FLOAT16
from kernels.records import Places
from kernels.rope import QWEN3, QWEN35, TOLERANCE, heads_of, sample_qkv, upload_qkv

LONG = 262144
OTHERS = 61     # pages that come again and again: of no length that units of pages, or pieces of them, have


def at_positions(qkv, positions):
    """A QKV whose rows stand at other positions, int32 [3, rows]."""
    return qkv._replace(rotary=qkv.rotary._replace(positions=positions))


def in_float32_angles(qkv):
    """A QKV of one row whose angles are in float64 what the kernels define them to be: products rounded to float32
    (kernels/rope.py). Exact ones are up to 2^-6 away, so codes of a query in 8 bits would differ: in the case below 7
    of 256, which moves the query by 0.0039 of its length."""
    rotary, position = qkv.rotary, qkv.rotary.positions[0, 0]
    angles = (np.float32(position) * rotary.frequencies).astype(np.float64)
    return qkv._replace(rotary=rotary._replace(frequencies=angles / position))


@pytest.mark.parametrize("name", [name if name in (FLOAT16, "q8+3") else pytest.param(name, marks=pytest.mark.slow)
                                  for name in KV_FORMATS])
def test_a_decoded_token_sees_4096_pages(card, name):
    """In 64 units of 64 pages. The last page is its own. The tolerance is that of any position, as its roundings do not
    grow with the context (kernels/attention.py): a query whose angles are those of the kernel has its codes, too. So
    has its key, which attention's reference reads from the page."""
    case = attend_decode.sample_case(KV_FORMATS[name], heads_of(2, 1, QWEN3), ((OTHERS + 1) * PAGE - 1,))
    pages = case.pages.block_table[:, :OTHERS + 1]
    table, positions = np.resize(pages[:, :OTHERS], (1, LONG // PAGE)), np.full((3, 1), LONG - 1, np.int32)
    table[0, -1] = pages[0, -1]
    case = case._replace(qkv=at_positions(case.qkv, positions), pages=case.pages._replace(block_table=table),
                         places=case.places._replace(positions=positions[0]))
    launch, there, _ = attend_decode.launcher(card, case)
    out = card.alloc((1, 2 * 128), np.float32)
    card.poison(out)
    launch((out, None))
    exact = case._replace(qkv=in_float32_angles(case.qkv))
    k, v = card.download(there.pages.k), card.download(there.pages.v)
    attention.head_error(card.download(out), attend_decode.expected(exact, k, v), 2)
    (key, value), format, at = kv_cache.kv_reference(exact.qkv), case.pages.format, (table[0, -1], slice(None), -1)
    key = turned(format.keys, key[0])
    error = np.max(np.abs(format.keys.decode(k[at]) - key)) / np.max(np.abs(key))
    assert error <= TOLERANCE - 2.0 ** -11 + format.keys.tolerance
    np.testing.assert_array_equal(v[at], format.values.encode(value[0]))


@pytest.mark.parametrize("format", KV_FORMATS.values(), ids=KV_FORMATS)
def test_the_end_of_a_long_prompt_sees_4096_pages(card, format):
    """In 16 pieces, if the format has pieces."""
    heads, rows = heads_of(2, 1, QWEN3), 9
    q, projected, k, v = attention.sample_inputs(heads, OTHERS * PAGE, rows)
    pages, positions = attention.upload_pages(card, format, k, v), np.arange(LONG - rows, LONG, dtype=np.int32)
    table = np.resize(card.download(pages.block_table)[:, :OTHERS], (1, LONG // PAGE))
    out = card.alloc((rows, heads.n_heads * heads.head_dim), np.float32)
    card.poison(out)
    attention.attend_prefill(card, out, card.upload(q), attention.upload_gates(card, projected, heads),
                             pages._replace(block_table=card.upload(table)),
                             Places(card.zeros(rows, np.int32), card.upload(positions)), rows,
                             **attention.piece_of(card, format, heads, rows, PIECE_PAGES))
    k, v = (np.resize(turned_back(kind, kind.decode(kind.encode(x))), (LONG, *x.shape[1:]))
            for kind, x in zip(format.kinds.values(), (k, v)))
    want = attention.attention_reference(turned_back(format, q), k, v, None, positions)
    attention.head_error(card.download(out), want, heads.n_heads)


def test_heads_of_pages_beyond_32_bits(card):
    """A cache of several long contexts has more elements than 32 bits count, and `head_of_page` is a factor of them."""
    @cuda.jit
    def write_number(found, table, max_pages, slot, page, kv_head, n_kv):
        found[0] = kv_cache.head_of_page(table, uint32(max_pages), uint32(slot), uint32(page), uint32(kv_head),
                                         uint32(n_kv))

    table, found = np.full((3, LONG // PAGE), -1, np.int32), card.zeros(1, np.uint64)
    table[2, -1] = 2 ** 31 - 2
    card.launch(write_number, 1, 1, found, card.upload(table).reshape(-1), LONG // PAGE, 2, LONG // PAGE - 1, 3, 4)
    want = int(table[2, -1]) * 4 + 3
    assert card.download(found)[0] == want > 2 ** 32


@pytest.mark.parametrize("shape", [QWEN35, QWEN3], ids=str)
def test_keys_of_the_last_positions(card, shape):
    """Stored in the last page, rotated by the float32 product of position and frequency (kernels/rope.py)."""
    rows, n_kv, format = 65, 2, KV_FORMATS["float16"]
    heads, positions = heads_of(n_kv, n_kv, shape), np.arange(LONG - rows, LONG, dtype=np.int32)
    qkv = sample_qkv(np.random.default_rng(3), heads, np.stack([positions] * 3))
    table = np.full((1, LONG // PAGE), -1, np.int32)
    table[0, -2:] = 1, 0
    arrays = [card.alloc(*array) for array in format.arrays(2, n_kv, heads.head_dim).values()]
    for array in arrays:
        card.poison(array)
    kv_cache.store_kv(card, kv_cache.Pages(format, *arrays, card.upload(table)), upload_qkv(card, qkv),
                      Places(card.zeros(rows, np.int32), card.upload(positions)), rows)
    got = card.download(arrays[0])[table[0, positions // PAGE], :, positions % PAGE].astype(np.float64)
    for row in 0, 1, rows - 1:
        one = qkv._replace(products=qkv.products._replace(values=qkv.products.values[row:row + 1]))
        want, _ = kv_cache.kv_reference(in_float32_angles(at_positions(one, qkv.rotary.positions[:, row:row + 1])))
        assert np.max(np.abs(got[row] - want[0])) <= TOLERANCE * np.max(np.abs(want[0]))


def test_the_delta_rule_after_a_long_text(card):
    """The state forgets its own roundings: after 16,384 tokens the tolerance is that of short texts."""
    rows, part = 16384, 4096
    projected, ssm_a, dt_bias = gdn.random_inputs(np.random.default_rng(5), rows, 1, 1)
    qkv, _, alpha, beta = gdn.split(projected, 1, 1)
    o, factors = card.alloc((part, 1, 128), np.float32), card.alloc(gdn.factors_shape(part, 1), np.float32)
    decay = gdn.Decay(card.upload(ssm_a), card.upload(dt_bias))
    state, slot = card.zeros((1, 1, 128, 128), np.float32), card.zeros(part, np.int32)
    for start in range(0, rows, part):
        some = slice(start, start + part)
        gdn.gdn_prefill(card, o, state, card.upload(np.ascontiguousarray(qkv[some])),
                        gdn.Projected(card.upload(projected[some]).reshape(-1), projected.shape[1]), decay, slot,
                        gdn.LinearHeads(1, 1), rows=part, factors=factors)
    want_o, want = gdn.reference(np.zeros((1, 128, 128)), qkv, alpha, beta, ssm_a, dt_bias, 1)
    assert gdn.error_by_largest(card.download(state)[0], want) <= gdn.TOLERANCE
    assert gdn.error_by_largest(card.download(o)[-1], want_o[-1]) <= gdn.TOLERANCE


# ---- on the host -------------------------------------------------------------------------------------------

class NoStore:
    """Counts the pages that a card is told of."""

    n_told = 0

    def set_pages(self, slot, pages):
        self.n_told += len(pages)


def test_the_tree_looks_at_each_page_of_a_long_prompt_a_few_times(monkeypatch):
    """What the host does for a long prompt grows with its length, and not with its square."""
    looks = 0

    def path(node, original=prefix.Node.path):
        nonlocal looks
        for each in original(node):
            looks += 1
            yield each

    monkeypatch.setattr(prefix.Node, "path", path)
    cache = PrefixCache(store := NoStore(), LONG // PAGE_TOKENS, 300, 0)
    tokens = np.random.default_rng(0).integers(0, 1000, LONG).tolist()
    branch = prefix.Branch(0, tokens, cache.roots[0])
    branch.has_begun = True
    marks = set(checkpoint_positions(tokens, None, 0, 0))
    for end in range(2048, LONG + 1, 2048):
        branch.pages += cache.take_pages(2048 // PAGE_TOKENS)
        nodes = cache.join(branch, end)
        for at in sorted(marks & nodes.keys()):
            cache.keep(nodes[at], cache.take_number())
    cache.leave(branch)
    assert cache.find(tokens[:-1], cache.roots[0])[0].depth == LONG // PAGE_TOKENS - 1 and len(marks) == 256
    assert looks < 4 * LONG // PAGE_TOKENS and store.n_told == 0
