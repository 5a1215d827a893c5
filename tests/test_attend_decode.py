import itertools

import numpy as np
import pytest

from kernels import attend_decode, attention, kv_cache, rope
from kernels.attend_decode import Sample, launcher, sample_case, upload_case
from kernels.kv_formats import KV_FORMATS
from kernels.open import open_cards
from kernels.records import Places
from kernels.rope import heads_of
from tests.kinds import KV_KINDS, of_formats

FLOAT16 = KV_FORMATS["float16"]
SHAPES = [rope.QWEN35, rope.QWEN3]


# Kernels with int8 output differ from those with float32 output in their last lines alone. So not every case has both:
# in float16 the first of each shape of heads, and one whose KV heads have several blocks; one in few bits.
FIRST_OF_SHAPE = [*{case[1]: case for case in reversed(attend_decode.CASES)}.values()]
SHARED = next(case for case in attend_decode.CASES if case[0][0] // case[0][1] > attend_decode.MAX_HEADS)
QUANTIZED = [*itertools.product(["float16"], [*FIRST_OF_SHAPE, SHARED]), (KV_KINDS[0], attend_decode.CASES[0])]


def plain_cases():
    """(format, case, whether with int8 output, too)"""
    for each in of_formats(attend_decode.CASES, every=True):
        format, case = getattr(each, "values", each)
        if not hasattr(each, "marks"):
            yield format, case, (format.name, case) in QUANTIZED
        if hasattr(each, "marks") or (format.name, case) not in QUANTIZED:
            yield pytest.param(format, case, True, marks=pytest.mark.slow)


@pytest.mark.parametrize("format, case, quantized", [*plain_cases()], ids=str)
def test_decode_equals_the_reference(card, format, case, quantized):
    attend_decode.check(card, format, case, quantized)


# Numbers of heads that put arrays of shared memory at odd places. At position 4157 units have two pages: rows of the
# second overwrite those of the first.
CHECKED = [*(((2, 1, (0, 70)), shape) for shape in SHAPES), ((3, 1, (70,)), SHAPES[0]), ((2, 1, (4157,)), SHAPES[0])]


@pytest.mark.parametrize("name", ["float16", *KV_KINDS])
@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_no_access_is_out_of_place(name, case):
    """No access leaves its array, or comes before another lane has finished with what it overwrites: each access is
    checked."""
    card, = open_cards("emulated")
    with card.checking():
        attend_decode.check(card, KV_FORMATS[name], case, quantized=(name, case) == ("float16", CHECKED[0]))


EARLY_CASES = [((4, 2, (0, 609, 63)), shape) for shape in SHAPES]
FEW_BITS = [("q8+3", EARLY_CASES[0])]         # in every run
EARLY_OF_FORMATS = [
    (format, case) if format is FLOAT16 or (format.name, case) in FEW_BITS
    else pytest.param(format, case, marks=pytest.mark.slow) for format in KV_FORMATS.values() for case in EARLY_CASES]


@pytest.mark.parametrize("format, case", EARLY_OF_FORMATS, ids=str)
def test_early_it_equals_the_reference(card, monkeypatch, format, case):
    """As on cards whose launches overlap; rows at the start, at the end and in the middle of a page."""
    monkeypatch.setattr(attend_decode, "launches_overlap", lambda cc: True)
    attend_decode.check(card, format, case, quantized=False)


# An early kernel differs from the other in the order of its loads alone, and what it loads is decided by the width of
# the heads.
EARLY_CHECKS = [(FLOAT16, next(case for case in attend_decode.CHECKS if case[1] == shape)) for shape in SHAPES]
# In every run, each in a format of few bits: groups of 3 query heads and of 1, whose blocks are the smallest.
SMALL_GROUPS = list(zip(KV_KINDS, [case for case in attend_decode.CHECKS if case[0][0] // case[0][1] in (3, 1)]))


def checks():
    """(format, case, whether early, whether with both kinds of output), as `of_formats` has them and what is above. The
    others are slow tests, and so is a second kind of output."""
    for is_early, each in itertools.product((False, True), of_formats(attend_decode.CHECKS)):
        format, case = getattr(each, "values", each)
        if (format, case) in EARLY_CHECKS if is_early else (
                not hasattr(each, "marks") or (format.name, case) in SMALL_GROUPS):
            yield format, case, is_early, False
        if format is FLOAT16 or not is_early:
            yield pytest.param(format, case, is_early, True, marks=pytest.mark.slow)


@pytest.mark.parametrize("format, case, is_early, both", [*checks()], ids=str)
def test_a_check_equals_plain_steps(card, monkeypatch, format, case, is_early, both):
    """In the kernel for few answers, then in that for many, with blocks of one row and (few SMs) of several. Output is
    int8 and float32 by turns: where a case has int8 from the first kernel, it has float32 from the second, if that is
    another one, and the next case and the next format have float32 from the first."""
    monkeypatch.setattr(attend_decode, "launches_overlap", lambda cc: is_early)
    turn, (n_heads, n_kv, answers, width) = attend_decode.CHECKS.index(case) + [*KV_FORMATS].index(format.name), case[0]
    group = heads_of(n_heads, n_kv, case[1]).group
    for many, n_sms in (1 << 20, 1), (1, 1 << 20), (1, 0):
        monkeypatch.setattr(attend_decode, "MANY_ANSWERS", many)
        monkeypatch.setattr(card, "n_sms", n_sms)
        is_another = attend_decode.rows_of_block(format, group, len(answers), width) > 1
        attend_decode.check_rows(card, format, case, (False, True) if both else [turn % 2 != is_another])


@pytest.mark.parametrize("is_early", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_value_that_is_infinite_stays_out_of_the_rows_before(card, monkeypatch, is_early):
    """The value of a draft is above the largest half. A block of several rows has it, too, when it does those before,
    for which its probability is 0."""
    monkeypatch.setattr(attend_decode, "launches_overlap", lambda cc: is_early)
    monkeypatch.setattr(attend_decode, "MANY_ANSWERS", 1)
    monkeypatch.setattr(card, "n_sms", 0)
    case = attend_decode.sample_check(FLOAT16, heads_of(4, 2, rope.QWEN3), ((61, 3),), 3)
    heads = case.qkv.heads
    case.qkv.products.values[2, heads.v_column:] = 1e6
    launch, *_ = launcher(card, case, width=3)
    out = card.alloc((3, heads.n_heads * heads.head_dim), np.float32)
    card.poison(out)
    launch((out, None), early=True)
    got = card.download(out)
    assert np.isfinite(got[:2]).all() and not np.isfinite(got[2]).any()


def decode(card, case):
    launch, *_ = launcher(card, case)
    heads = case.qkv.heads
    out = card.alloc((len(case.places.positions), heads.n_heads * heads.head_dim), np.float32)
    card.poison(out)
    launch((out, None))
    return card.download(out)


def one_row(case, row, max_pages):
    """A row of a case, alone in slot 0 of a cache with another context size."""
    table, one = np.full((1, max_pages), -1, np.int32), slice(row, row + 1)
    held = case.places.positions[row] // 64 + 1
    table[0, :held] = case.pages.block_table[row, :held]
    qkv, positions = case.qkv, case.qkv.rotary.positions[:, one]
    qkv = qkv._replace(products=qkv.products._replace(values=qkv.products.values[one]),
                       rotary=qkv.rotary._replace(positions=positions))
    return Sample(qkv, case.pages._replace(block_table=table),
                  Places(np.zeros(1, np.int32), case.places.positions[one]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_depends_neither_on_the_batch_nor_on_the_context_size(card, shape):
    case = sample_case(FLOAT16, heads_of(4, 2, shape), (300, 5, 64))
    together = decode(card, case)
    for row in range(3):
        np.testing.assert_array_equal(together[row:row + 1], decode(card, one_row(case, row, 400)))


def test_a_second_launch_changes_nothing(card):
    launch, *_ = launcher(card, sample_case(FLOAT16, heads_of(4, 2), (200,)))
    out = card.alloc((1, 1024), np.float32)
    launch((out, None))
    first = card.download(out)
    launch((out, None))                                   # the key is there already, and written again
    np.testing.assert_array_equal(card.download(out), first)


# With heads of 128, the first format in which each kind of rows is that of keys. Values are written in the same way.
OF_KEYS = {format.keys.name: format for format in reversed(KV_FORMATS.values())}.values()
STORED = [(format, shape) if shape == SHAPES[0] or format in OF_KEYS
          else pytest.param(format, shape, marks=pytest.mark.slow)
          for format, shape in itertools.product(KV_FORMATS.values(), SHAPES)]


@pytest.mark.parametrize("format, shape", STORED, ids=str)
def test_the_new_row_is_stored_as_store_kv_does(card, format, shape):
    case = sample_case(format, heads_of(4, 2, shape), (70, 64))
    launch, there, _ = launcher(card, case)
    launch((card.alloc((2, 4 * case.qkv.heads.head_dim), np.float32), None))
    qkv, want, places = upload_case(card, case)
    kv_cache.store_kv(card, want, qkv, places, 2)
    for name in "k", "v":
        got, expected = (card.download(getattr(pages, name)) for pages in (there.pages, want))
        np.testing.assert_array_equal(got, expected)


def test_a_replayed_launch_serves_every_length(card):
    case = sample_case(FLOAT16, heads_of(4, 2), (0,), max_pages=10)
    nothing = np.full((10, 2, 64, 256), np.nan, np.float16)
    case = case._replace(pages=case.pages._replace(k=nothing, v=nothing,
                                                   block_table=np.arange(10, dtype=np.int32)[None]))
    launch, (qkv, pages, places), scratch = launcher(card, case)
    out, rng = card.alloc((1, 1024), np.float32), np.random.default_rng(1)
    launch((out, None))
    with card.record() as recording:
        launch((out, None))
    for position in range(130):
        card.copy_in(places.positions, np.array([position], np.int32))
        card.copy_in(qkv.products.values, rng.standard_normal(qkv.products.values.shape, np.float32))
        card.copy_in(qkv.rotary.positions, np.full((3, 1), position, np.int32))
        recording.replay()
    card.synchronize()
    assert np.isfinite(card.download(out)).all() and not card.download(scratch.arrived).any()
    k = card.download(pages.k)
    assert np.isfinite(k[:2]).all() and np.isfinite(k[2, :, :2]).all() and np.isnan(k[2, :, 2:]).all()


def test_a_large_score_takes_it_all(card):
    case = sample_case(FLOAT16, heads_of(2, 1), (70,))
    projected, (_, k, v, table) = case.qkv.products.values, case.pages
    projected[0, :1024] = 0
    projected[0, 200], projected[0, 512 + 200] = 1, 1  # q: the norm's weight there, no rotation
    k[...] = np.where(np.isnan(k), np.nan, 0)
    k[table[0, 0], 0, 40, 200] = 480
    projected[0, 1024:1280] = 1                              # the new key scores at most 1.5
    np.testing.assert_allclose(decode(card, case)[0], np.tile(v[table[0, 0], 0, 40], 2) / 2, rtol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_neither_memory_error_nor_race(shape):
    card = open_cards("emulated", checked=True)[0]
    attend_decode.check(card, FLOAT16, ((4, 2, (0, 65)), shape), quantized=False)


def test_neither_memory_error_nor_race_where_blocks_share_a_kv_head():
    card = open_cards("emulated", checked=True)[0]
    attend_decode.check(card, FLOAT16, ((10, 1, (0, 65)), rope.QWEN3), quantized=False)


def test_neither_memory_error_nor_race_in_blocks_of_several_rows(monkeypatch):
    card = open_cards("emulated", checked=True)[0]
    monkeypatch.setattr(attend_decode, "MANY_ANSWERS", 1)
    monkeypatch.setattr(card, "n_sms", 0)
    attend_decode.check_rows(card, FLOAT16, ((4, 2, ((62, 2), (64, 3)), 3), rope.QWEN3), [False])


@pytest.mark.parametrize("heads", [(9, 1), (18, 2)], ids=str)
def test_blocks_of_several_rows_that_share_a_kv_head(card, monkeypatch, heads):
    monkeypatch.setattr(attend_decode, "MANY_ANSWERS", 1)
    monkeypatch.setattr(card, "n_sms", 0)
    made = []
    monkeypatch.setattr(attend_decode, "attend_kernel", lambda *args, make=attend_decode.attend_kernel:
                        made.append(args[-2:]) or make(*args))
    attend_decode.check_rows(card, FLOAT16, ((*heads, ((60, 4), (0, 3), (130, 1)), 4), rope.QWEN3), [False])
    assert (2, 3) in made


def test_262_144_tokens(card):
    """64 units of 64 pages; all keys but those of the last page lie in 64 pages, so that the cache fits
    anywhere."""
    position = 262143
    case = sample_case(FLOAT16, heads_of(1, 1), (64 * 64 + 63,))
    table = case.pages.block_table[0]
    table = np.append(np.resize(table[:64], 4095), table[64]).astype(np.int32)[None]
    rotary = case.qkv.rotary._replace(positions=np.full((3, 1), position, np.int32))
    case = Sample(case.qkv._replace(rotary=rotary), case.pages._replace(block_table=table),
                  case.places._replace(positions=np.array([position], np.int32)))
    launch, there, _ = launcher(card, case)
    out = card.alloc((1, 256), np.float32)
    launch((out, None))
    angle = (np.float32(position) * rotary.frequencies).astype(np.float64)        # rounded, see kernels/rope.py
    rounded = case._replace(qkv=case.qkv._replace(rotary=rotary._replace(frequencies=angle / position)))
    want = attend_decode.expected(rounded, card.download(there.pages.k), card.download(there.pages.v))
    attention.head_error(card.download(out), want, 1)
