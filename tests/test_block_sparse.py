"""Which pages of keys queries read, and attention that reads these alone."""

import numpy as np
import pytest

from kernels import attention, block_sparse
from kernels.attention import attend_prefill, head_error, piece_of, sample_inputs, upload_gates, upload_pages
from kernels.block_sparse import (BROKEN, FEW, RULE, Chooser, choose_pages, kept_reference, levels_reference,
                                  masses_reference, means_reference, sample_text, unpacked, upload_keys)
from kernels.card import CardError
from kernels.kv_expand import Piece
from kernels.kv_formats import KV_FORMATS, PAGE, turned_back
from kernels.records import Places
from kernels.rope import QWEN3, QWEN35, heads_of
from tests.kinds import KV_BY_KIND, of_formats

FLOAT16 = KV_FORMATS["float16"]


@pytest.mark.parametrize("format, case", of_formats(block_sparse.CASES))
def test_the_choice_equals_the_reference(card, format, case):
    block_sparse.check(card, format, case)


def chosen(card, format, heads, q, k, cuts, rule=FEW, start=0, more=1, slots=1):
    """(kept bool [query pages, n_kv, pages], counts) of rows that begin at `start`, chosen in parts that end at `cuts`.
    more: pages of the table behind the last one."""
    n, pages = start + len(q), upload_keys(card, format, k, more)
    kept = []
    chooser = Chooser.alloc(card, (heads.n_heads, heads.n_kv_heads, heads.head_dim), len(q),
                            pages.block_table.shape[1], slots)
    for array in chooser[:-2]:
        card.poison(array)
    piece = Piece.alloc(card, format, heads.n_kv_heads, heads.head_dim, 32)
    places = Places(card.upload(np.zeros(len(q), np.int32)), card.upload(np.arange(start, n, dtype=np.int32)))
    q = card.upload(q)
    for first, end in zip([0, *cuts], [*cuts, len(q)]):
        choose_pages(card, chooser, q[first:], heads, pages, places.rows_from(first), end - first, start + first,
                     rule=rule, piece=piece)
        found = card.download(chooser.kept)[:-(-(end - first) // PAGE)]
        kept += [[unpacked(of_head, -(-n // PAGE) - 1) & (np.arange(-(-n // PAGE)) <= (start + first) // PAGE + i)
                  for of_head in page] for i, page in enumerate(found)]
    return np.array(kept), card.download(chooser.counts)


@pytest.mark.parametrize("format", [FLOAT16, KV_FORMATS["q8+3"]], ids=str)
@pytest.mark.parametrize("shape", [QWEN35, QWEN3], ids=str)
def test_neither_cuts_nor_the_room_for_pages_change_the_choice(card, monkeypatch, format, shape):
    heads = heads_of(4, 2, shape)
    q, k = sample_text(heads, 2300, 2300)
    whole, counts = chosen(card, format, heads, q, k, [])
    assert 0.1 < counts[0, 0] / counts[0, 1] < 0.6
    for cuts, more in ([64, 128, 1024], 1), ([2048, 2240], 40):
        again, as_often = chosen(card, format, heads, q, k, cuts, more=more)
        np.testing.assert_array_equal(again, whole)
        np.testing.assert_array_equal(as_often, counts)
    monkeypatch.setattr(block_sparse, "TURN_ROWS", 128)
    np.testing.assert_array_equal(chosen(card, format, heads, q, k, [320])[0], whole)
    for start in 128, 1984:             # as behind cached pages
        np.testing.assert_array_equal(chosen(card, format, heads, q[start:], k, [], start=start)[0],
                                      whole[start // PAGE:])


def test_tokens_behind_a_page_of_queries_do_not_change_its_choice(card):
    heads = heads_of(4, 2)
    q, k = sample_text(heads, 1000, 1000)
    whole, _ = chosen(card, FLOAT16, heads, q, k, [])
    for n in 640, 1000 - 40:
        shorter, _ = chosen(card, FLOAT16, heads, q[:n], k[:n], [])
        np.testing.assert_array_equal(shorter[:n // PAGE], whole[:n // PAGE, :, :-(-n // PAGE)])


def test_a_page_that_matters_is_kept(card):
    """One key of 64 has a large score with the queries of one head of a group."""
    heads = heads_of(8, 2)
    q, k = sample_text(heads, 1280, 64)
    q[:], direction = 0, np.float32(0.125)
    q[:, 5, :64] = direction
    k[1000, 1, :64] = 1 / direction
    kept, _ = chosen(card, FLOAT16, heads, q, k, [], FEW._replace(share=20, base=4), start=1216)
    assert kept[0, 1, 1000 // PAGE] and kept[0, 1].sum() == 4


@pytest.mark.parametrize("format", [FLOAT16, KV_FORMATS["q8+3"]], ids=str)
@pytest.mark.parametrize("shape", [QWEN35, QWEN3], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_page_with_a_key_that_is_not_finite_is_always_kept(card, format, shape, value):
    """By all pages of queries behind it, of its KV head alone; what was kept before is kept as it was."""
    heads, n, at = heads_of(4, 2, shape), 1280, 400
    q, k = sample_text(heads, n, n)
    rule = FEW._replace(base=0, share=8)
    before, _ = chosen(card, format, heads, q, k, [], rule)
    page = at // PAGE
    assert not before[page + rule.near:, 1, page].all()
    k[at, 1, 5] = value
    kept, _ = chosen(card, format, heads, q, k, [], rule)
    assert kept[page:, 1, page].all()
    np.testing.assert_array_equal(kept[:, 0], before[:, 0])
    np.testing.assert_array_equal(kept[:page + 1, 1], before[:page + 1, 1])


@pytest.mark.parametrize("key, value", [(np.nan, np.nan), (np.nan, 0), (np.inf, 0), (-np.inf, 0)])
def test_attention_of_the_chosen_pages_shows_what_is_not_finite(card, key, value):
    """In the rows in which attention to all keys shows it: all behind a token whose key is NaN, those for whose queries
    an infinite key has the score inf."""
    heads, n, at = heads_of(4, 2, QWEN3), 1280, 400
    q, k = sample_text(heads, n, n)
    _, projected, _, v = sample_inputs(heads, n, n)
    k[at, 1, 5], v[at, 1] = key, value
    inputs = q, projected, k, v
    bits, _ = chosen(card, FLOAT16, heads, q, k, [], FEW._replace(base=0, share=8))
    words = np.zeros((*bits.shape[:2], 4), np.uint8)
    words[..., :-(-bits.shape[-1] // 8)] = np.packbits(bits, axis=-1, bitorder="little")
    dense, sparse = (np.isfinite(attended(card, FLOAT16, heads, inputs, kept)).reshape(n, heads.n_heads, -1)
                     for kept in (None, words.view(np.uint32)))
    np.testing.assert_array_equal(sparse, dense)
    assert dense[:at].all() and dense[:, :2].all()
    broken = q[at:, 2:, 5] * key > 0 if np.isinf(key) else np.ones((n - at, 2), bool)
    np.testing.assert_array_equal(~dense[at:, 2:].all(axis=2), broken)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_reference_of_a_key_that_is_not_finite(value):
    q, k = sample_text(heads_of(2, 1, QWEN3), 4 * PAGE, 16)
    k[70, 0, 3] = value
    levels = levels_reference(means_reference(q), k)[0]
    for found in levels, masses_reference(levels):
        assert np.isnan(found[:, 1]).all() and np.isfinite(np.delete(found, 1, axis=1)).all()


@pytest.mark.parametrize("masses, rule, want", [
    ([5, 9, 1, 1, 1, 9], FEW._replace(near=1, base=0, share=1), [0, 1, 2, 3, 4, 5, 6]),     # 1 / 64 of 26 is nothing
    ([64, 640, 1, 1, 1, 64], FEW._replace(near=1, base=0, share=1), [0, 1, 5, 6]),          # 1 / 64 of 771 is 12
    ([5, 9, 8, 7, 6, 9], FEW._replace(near=2, base=1, share=3), [0, 5, 6]),                 # no room
    ([5, 9, 8, 7, 6, 9], FEW._replace(near=1, base=2, share=3), [0, 1, 5, 6]),              # the largest of them
    ([5, 9, 9, 9, 6, 0], FEW._replace(near=1, base=2, share=3), [0, 6]),                    # three alike, room for two
    ([5, 10, 8, BROKEN, 6, 9], FEW._replace(near=1, base=2, share=3), [0, 1, 3, 6]),        # room for one more
    ([5, 9, BROKEN + 9, BROKEN, 6, BROKEN], FEW._replace(near=1, base=2, share=3), [0, 2, 3, 5, 6]),    # and none
    ([0] * 6, FEW._replace(near=1, base=2, share=3), [0, 6]), ([9] * 6, RULE, range(7))], ids=str)
def test_the_reference_of_a_rule(masses, rule, want):
    assert np.flatnonzero(kept_reference(np.array(masses, np.uint32), rule)).tolist() == list(want)


def test_no_page_of_queries_reads_more_than_its_budget():
    """Nor less, where all pages weigh the same and nothing is enough: `keys_worth` counts the keys of these pages."""
    rng = np.random.default_rng(0)
    for rule in FEW, RULE, FEW._replace(near=3, base=0, share=9, spare=20):
        for n in 1, rule.dense, rule.dense + 1, rule.dense + 40, 700:
            most = block_sparse.most_pages(n, rule)
            assert kept_reference(rng.integers(0, 1000, n - 1), rule).sum() <= most
            n_kept = kept_reference(np.arange(n - 1) + 10**6, rule._replace(spare=31)).sum()
            assert n_kept == most
            tokens = PAGE * (n - 1) + 5
            worth = min(n_kept * PAGE + int(block_sparse.CHOICE * tokens), tokens)
            assert block_sparse.keys_worth(tokens, rule) == worth


@pytest.mark.parametrize("number, spread, by_budget", [
    (127, 1, False), (128, 30, False), (255, 1, True), (256, 1, True), (256, 30, False), (4095, 1, True),
    (4095, 30, False)])
def test_the_default_rule_chooses_of_many_pages(card, number, spread, by_budget):
    """`keep_pages` alone, with levels that are made up, for queries of page `number`: pages are left out from 128 on, a
    thread has several from 256 on. Where levels are far apart, few pages have enough of the weight; elsewhere the
    budget decides."""
    n_kv, group, max_pages = 2, 4, number + 3
    chooser = Chooser.alloc(card, (n_kv * group, n_kv, 128), PAGE, max_pages, 1)
    for array in chooser[:-2]:
        card.poison(array)
    levels = np.random.default_rng(number).standard_normal(chooser.levels.shape, np.float32) * spread
    levels[1, 5, 70] = np.nan
    card.copy_in(chooser.levels, levels)
    places = card.zeros(PAGE, np.int32), card.upload(np.arange(PAGE * number, PAGE * (number + 1), dtype=np.int32))
    arrays = [array.reshape(-1) for array in (chooser.kept, chooser.masses, chooser.levels, chooser.counts)]
    card.launch(block_sparse.keep_pages, (1, n_kv), (32, block_sparse.KEEP_WARPS), *arrays, *places, 0, PAGE, n_kv,
                group, levels.shape[1], max_pages, chooser.kept.shape[-1], *RULE)
    masses, words, counts = map(card.download, (chooser.masses, chooser.kept, chooser.counts))
    kept, most = unpacked(words[0], number), block_sparse.most_pages(number + 1)
    for head in range(n_kv if number >= RULE.dense else 0):
        mine, whole = masses[0, head, :number], masses_reference(levels[head, :, :number]).sum(axis=0)
        np.testing.assert_array_equal(mine >= BROKEN, np.isnan(whole))
        assert np.nanmax(np.abs(whole - mine)) <= levels.shape[1] * block_sparse.UNIT * 2.0 ** -17
        np.testing.assert_array_equal(kept[head], kept_reference(mine, RULE))
        assert (kept[head].sum() == most) == by_budget and kept[head].sum() <= most
    assert kept[1, 70] and kept.all() == (number < RULE.dense)
    assert counts.tolist() == [[kept.sum(), n_kv * (number + 1)]]


def attended(card, format, heads, inputs, kept=None, n_pages=32):
    """Attention of a text's rows that reads the pages of `kept`, uint32 words; all, if None."""
    q, projected, k, v = inputs
    n = len(q)
    pages = upload_pages(card, format, k, v)
    places = Places(card.upload(np.zeros(n, np.int32)), card.upload(np.arange(n, dtype=np.int32)))
    out = card.alloc((n + 1, heads.n_heads * heads.head_dim), np.float32)
    card.poison(out)
    attend_prefill(card, out[:n], card.upload(q), upload_gates(card, projected, heads), pages, places, n,
                   kept=kept if kept is None else card.upload(kept), **piece_of(card, format, heads, n, n_pages))
    assert np.isnan(card.download(out)[n]).all()
    return card.download(out)[:n]


@pytest.mark.parametrize("format, case", of_formats([(4, 2, 300, QWEN35), (3, 1, 205, QWEN3), (24, 4, 140, QWEN35)]))
def test_attention_reads_the_kept_pages_alone(card, format, case):
    """As float64 does with the other keys left out; with all pages kept, the bits of dense attention."""
    n_heads, n_kv, n, shape = case
    heads, query_pages = heads_of(n_heads, n_kv, shape), -(-n // PAGE)
    q, projected, k, v = inputs = sample_inputs(heads, n, n, n)
    bits = np.random.default_rng(n).random((query_pages, n_kv, query_pages)) < 0.5
    bits[:, :, 0] = True
    bits[np.arange(query_pages), :, np.arange(query_pages)] = True
    words = np.packbits(bits, axis=-1, bitorder="little").astype(np.uint32)
    got = attended(card, format, heads, inputs, np.concatenate([words, np.full_like(words, 0xFFFFFFFF)], axis=-1))
    k, v = (turned_back(kind, kind.decode(kind.encode(x))) for kind, x in zip(format.kinds.values(), (k, v)))
    want, q = np.empty_like(got), turned_back(format, q)
    of_gate, group = attention.gates(projected, heads), heads.group
    for page in range(query_pages):
        rows = np.arange(page * PAGE, min((page + 1) * PAGE, n))
        for head in range(n_kv):
            keys = np.flatnonzero(bits[page, head].repeat(PAGE)[:n])
            own = slice(head * group, (head + 1) * group)
            seen = np.searchsorted(keys, rows, side="right") - 1
            part = attention.attention_reference(q[rows][:, own], k[keys][:, head:head + 1], v[keys][:, head:head + 1],
                                                 None if of_gate is None else of_gate[rows][:, own], seen)
            want[rows, head * group * heads.head_dim:(head + 1) * group * heads.head_dim] = part
    head_error(got, want, n_heads)
    np.testing.assert_array_equal(attended(card, format, heads, inputs, np.full_like(words, 0xFFFFFFFF)),
                                  attended(card, format, heads, inputs))


@pytest.mark.parametrize("format", KV_BY_KIND)
def test_attention_of_kept_pages_does_not_depend_on_pieces(card, format):
    """Pieces of 32 pages, of which one is kept nowhere, and all in one piece."""
    format, heads, n = KV_FORMATS[format], heads_of(2, 1, QWEN3), 72 * PAGE
    q, projected, k, v = sample_inputs(heads, n, n)
    bits = np.random.default_rng(0).random((72, 1, 96)) < 0.2
    bits[:, :, 32:64], bits[:, :, 0] = False, True
    bits[np.arange(72), :, np.arange(72)] = True
    words = np.packbits(bits, axis=-1, bitorder="little").view(np.uint32)
    inputs = q, projected, k, v
    np.testing.assert_array_equal(attended(card, format, heads, inputs, words),
                                  attended(card, format, heads, inputs, words, 96))


def test_heads_that_too_many_share_are_refused(card):
    with pytest.raises(CardError, match="the model has 17"):
        Chooser.alloc(card, (17, 1, 128), 64, 4, 1)
