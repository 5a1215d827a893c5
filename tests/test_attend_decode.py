import numpy as np
import pytest

from kernels import attend_decode, attention, kv_cache, rope
from kernels.attend_decode import launcher, sample_case
from kernels.open import open_cards


@pytest.mark.parametrize("case", attend_decode.CASES, ids=str)
def test_decode_equals_the_reference(card, case):
    attend_decode.check(card, case)


def test_early_it_equals_the_reference(card, monkeypatch):
    """As on cards whose launches overlap; rows at the start, at the end and in the middle of a page."""
    monkeypatch.setattr(attend_decode, "launches_overlap", lambda cc: True)
    attend_decode.check(card, (4, 2, (0, 609, 63)))


def decode(card, heads, n_kv, case):
    launch, _ = launcher(card, heads, n_kv, case)
    out = card.alloc((len(case["row_pos"]), heads * 256), np.float32)
    card.poison(out)
    launch(out, None)
    return card.download(out)


def one_row(case, row, max_pages):
    """A row of a case, alone in slot 0 of a cache with another context size."""
    table = np.full((1, max_pages), -1, np.int32)
    held = case["row_pos"][row] // 64 + 1
    table[0, :held] = case["block_table"][row, :held]
    return case | {"projected": case["projected"][row:row + 1], "rope_pos": case["rope_pos"][:, row:row + 1],
                   "block_table": table, "row_slot": np.zeros(1, np.int32),
                   "row_pos": case["row_pos"][row:row + 1]}


def test_decode_depends_neither_on_the_batch_nor_on_the_context_size(card):
    case = sample_case(4, 2, (300, 5, 64))
    together = decode(card, 4, 2, case)
    for row in range(3):
        np.testing.assert_array_equal(together[row:row + 1], decode(card, 4, 2, one_row(case, row, 400)))


def test_a_second_launch_changes_nothing(card):
    case = sample_case(4, 2, (200,))
    launch, arrays = launcher(card, 4, 2, case)
    out = card.alloc((1, 1024), np.float32)
    launch(out, None)
    first = card.download(out)
    launch(out, None)                                     # the key is there already, and written again
    np.testing.assert_array_equal(card.download(out), first)


def test_the_new_row_is_stored_as_store_kv_does(card):
    case = sample_case(4, 2, (70, 64))
    launch, arrays = launcher(card, 4, 2, case)
    launch(card.alloc((2, 1024), np.float32), None)
    pages = [card.upload(case[name]) for name in ("k_pages", "v_pages")]
    names = "k_norm", "rope_pos", "inv_freq", "block_table", "row_slot", "row_pos"
    projected = arrays["projected"]
    kv_cache.store_kv(card, *pages, projected, projected.shape[1], 2048, 2048 + 512,
                      *(arrays[n] for n in names), 2, 2,
                      rope.SECTIONS, rope.EPS)
    for name, want in zip(("k_pages", "v_pages"), pages):
        np.testing.assert_array_equal(card.download(arrays[name]), card.download(want))


def test_a_replayed_launch_serves_every_length(card):
    case = sample_case(4, 2, (0,), max_pages=10) | {"block_table": np.arange(10, dtype=np.int32)[None]}
    for name in ("k_pages", "v_pages"):
        case[name] = np.full((10, 2, 64, 256), np.nan, np.float16)
    launch, arrays = launcher(card, 4, 2, case)
    out, rng = card.alloc((1, 1024), np.float32), np.random.default_rng(1)
    launch(out, None)
    with card.record() as recording:
        launch(out, None)
    for position in range(130):
        card.copy_in(arrays["row_pos"], np.array([position], np.int32))
        card.copy_in(arrays["projected"], rng.standard_normal(case["projected"].shape, np.float32))
        card.copy_in(arrays["rope_pos"], np.full((3, 1), position, np.int32))
        recording.replay()
    card.synchronize()
    assert np.isfinite(card.download(out)).all() and not card.download(arrays["arrived"]).any()
    pages = card.download(arrays["k_pages"])
    assert np.isfinite(pages[:2]).all() and np.isfinite(pages[2, :, :2]).all() and np.isnan(pages[2, :,
                                                                                                  2:]).all()


def test_a_large_score_takes_it_all(card):
    case = sample_case(2, 1, (70,))
    projected, table = case["projected"], case["block_table"]
    projected[0, :1024] = 0
    projected[0, 200], projected[0, 512 + 200] = 1, 1  # q: the norm's weight there, no rotation
    case["k_pages"][..., :] = np.where(np.isnan(case["k_pages"]), np.nan, 0)
    case["k_pages"][table[0, 0], 0, 40, 200] = 480
    projected[0, 1024:1280] = 1                              # the new key scores at most 1.5
    got = decode(card, 2, 1, case)
    np.testing.assert_allclose(got[0], np.tile(case["v_pages"][table[0, 0], 0, 40], 2) / 2, rtol=1e-6)


def test_too_many_heads_per_kv_head_are_refused(card):
    with pytest.raises(ValueError, match="up to 8 query heads"):
        decode(card, 18, 2, sample_case(18, 2, (3,)))


def test_neither_memory_error_nor_race():
    card = open_cards("emulated", checked=True)[0]
    attend_decode.check(card, (4, 2, (0, 65)))


def test_262_144_tokens(card):
    """64 units of 64 pages; all keys but those of the last page lie in 64 pages, so that the cache fits
    anywhere."""
    position = 262143
    case = sample_case(1, 1, (64 * 64 + 63,))
    table = case["block_table"][0]
    case["block_table"] = np.append(np.resize(table[:64], 4095), table[64]).astype(np.int32)[None]
    case["row_pos"], case["rope_pos"] = np.array([position], np.int32), np.full((3, 1), position, np.int32)
    launch, arrays = launcher(card, 1, 1, case)
    out = card.alloc((1, 256), np.float32)
    launch(out, None)
    rounded = np.float32(position) * case["inv_freq"]         # the angle, see kernels/rope.py
    want = attend_decode.expected(1, 1, case | {"inv_freq": rounded.astype(np.float64) / position},
                                  *(card.download(arrays[name]) for name in ("k_pages", "v_pages")))
    attention.head_error(card.download(out), want, 1)
