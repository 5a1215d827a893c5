"""The vision tower: against independent reference data, against NumPy for every type of weights, in company."""

import dataclasses
import itertools
import time

import numpy as np
import pytest

import qengine
from engine import vision
from engine.gguf import GGUF
from engine.images import Picture
from engine.request import ModelError
from engine.vision import (MERGED, PIECE, PIECE_ROWS, SHARE, TYPES, FileVisionWeights, OpenedTower,
                           SyntheticVisionWeights, Tower, VisionConfig, open_tower, passes_of)
from kernels import picture_attention
from kernels.card import PlannedCard
from kernels.emulated.card import EmulatedCard
from kernels.probe import Speed
from tests.oracle import oracle_json, oracle_npz, oracle_path
from tests.vision_files import EXPORTED, SMALL, picture, picture_of, write_tower
from tests.vision_reference import tower_reference

SPEED = Speed(dot=1e14, half2=1e14, read=1e12, link=1e9)
SMALLEST = 2 * PIECE_ROWS * (MERGED * SMALL.width) ** 2     # operations of the largest piece that cannot be cut: mm.0's
TOLERANCE = 2e-3            # relative L2 error of a picture's rows: half precision in products


def tower_of(card, path, max_tokens=128):
    return Tower(card, FileVisionWeights(GGUF(path)), max_tokens)


def outs_of(out, pictures):
    """The rows of each picture in an array, one picture behind the other."""
    ends = list(itertools.accumulate(each.n_tokens for each in pictures))
    return [out[end - each.n_tokens:end] for each, end in zip(pictures, ends)]


def encoded(tower, *pictures):
    """float32 [tokens, hidden]. The row behind them stays as it was."""
    card, n = tower.card, sum(each.n_tokens for each in pictures)
    out = card.alloc((n + 1, tower.config.hidden_dim), np.float32)
    card.poison(out)
    n_pieces = sum(1 for _ in tower.encode(pictures, outs_of(out, pictures)))
    assert n_pieces == len(tower.seconds(pictures, SPEED))
    rows = card.download(out)
    assert np.isnan(rows[n]).all()
    return rows[:n]


def error(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.fixture(scope="module")
def small(card, tmp_path_factory):
    """(its file, a tower on a card)."""
    path = write_tower(tmp_path_factory.mktemp("vision") / "mmproj.gguf")
    return path, tower_of(card, path)


@pytest.fixture(scope="module")
def reference(card):
    """(reference data, the tower of the reference model on a card)."""
    return (oracle_npz("dense_mtp-vision"), tower_of(card, oracle_path("gguf/dense_mtp-mmproj-F16.gguf")))


# ---- results -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("pixels, rows", [("aligned_rgb", "aligned_hf_image_embeds"),
                                          ("unaligned_resized_rgb", "unaligned_hf_image_embeds")])
def test_the_rows_of_the_reference_model(reference, pixels, rows):
    data, tower = reference
    want = data[rows]
    got = encoded(tower, picture_of(data[pixels]))
    assert error(got, want) <= TOLERANCE
    assert (np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)).max() <= 2 * TOLERANCE


def test_the_reference_in_numpy_is_right():
    """What the other tests compare with."""
    data, file = oracle_npz("dense_mtp-vision"), GGUF(oracle_path("gguf/dense_mtp-mmproj-F16.gguf"))
    want = data["aligned_hf_image_embeds"]
    assert error(tower_reference(file.floats, VisionConfig.from_gguf(file), data["aligned_rgb"]), want) <= 1e-5


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_of_weights(card, kind, tmp_path):
    path = write_tower(tmp_path / "mmproj.gguf", kind=kind)
    assert {tensor.type for tensor in GGUF(path).tensors.values()} >= {kind}
    given = picture(3, 5)
    want = tower_reference(GGUF(path).floats, SMALL, given.pixels)
    assert error(encoded(tower_of(card, path), given), want) <= TOLERANCE


def test_the_smallest_and_the_narrowest_pictures(small):
    path, tower = small
    for rows, columns in (1, 1), (1, 9), (9, 1):
        given = picture(rows, columns, 7)
        want = tower_reference(GGUF(path).floats, SMALL, given.pixels)
        assert error(encoded(tower, given), want) <= TOLERANCE


def test_a_picture_has_the_same_bits_in_company(small):
    _, tower = small
    pictures = [picture(*size, seed) for seed, size in enumerate([(3, 5), (1, 1), (8, 8), (2, 9), (7, 3), (5, 8)])]
    assert len(passes_of(pictures, 128)) == 2
    together, first = encoded(tower, *pictures), 0
    for each in pictures:
        np.testing.assert_array_equal(together[first:first + each.n_tokens], encoded(tower, each))
        first += each.n_tokens


@pytest.mark.parametrize("piece", [1, 3e6, 1e8])
def test_no_bit_depends_on_the_pieces(small, monkeypatch, piece):
    """A piece is as small as it may be, or has about so many operations; more have only the smallest ones."""
    _, tower = small
    pictures = [picture(*size, seed) for seed, size in enumerate([(3, 5), (1, 1), (8, 8), (2, 9)])]
    whole, n_whole = encoded(tower, *pictures), len(tower.seconds(pictures, SPEED))
    monkeypatch.setattr(vision, "PIECE", piece / tower.card.threads)
    seconds = tower.seconds(pictures, SPEED)
    assert len(seconds) > n_whole and max(seconds) * SHARE * SPEED.half2 <= 1.001 * max(piece, SMALLEST)
    np.testing.assert_array_equal(encoded(tower, *pictures), whole)


def test_a_large_picture_is_in_short_pieces_on_an_emulated_card_alone(small, monkeypatch):
    """4,000 x 3,000 pixels are 39 x 52 blocks. The least of attention is a tile, with all heads."""
    path, tower = small
    tower = tower_of(tower.card, path, max_tokens=2048)
    seconds = tower.seconds([picture(39, 52)], SPEED)
    tile = 4 * SMALL.width * picture_attention.block_rows(SMALL.head_dim) * MERGED * 39 * 52
    assert max(seconds) * SHARE * SPEED.half2 <= 1.001 * max(PIECE * tower.card.threads, tile)
    monkeypatch.setattr(tower.card, "kind", "cuda")
    on_cuda = tower.seconds([picture(39, 52)], SPEED)
    assert len(on_cuda) == 3 + 4 * SMALL.n_blocks and sum(on_cuda) == pytest.approx(sum(seconds))


def test_an_mlp_takes_no_more_memory_than_attention(card, tmp_path):
    """Its inner rows come in pieces, on every card, where all of them would; and no bit depends on that."""
    config = dataclasses.replace(SMALL, ffn_dim=1800)
    path, given = write_tower(tmp_path / "mmproj.gguf", config), picture(8, 16)
    little, much = (tower_of(card, path, max_tokens) for max_tokens in (128, 512))
    assert little.scratch.wide.size == MERGED * 128 * 3 * config.width
    assert len(little.seconds([given], SPEED)) == len(much.seconds([given], SPEED)) + 2 * config.n_blocks
    np.testing.assert_array_equal(encoded(little, given), encoded(much, given))


def test_a_picture_too_large_is_refused(small):
    with pytest.raises(ValueError, match="a picture of 132 tokens, and the tower has room for 128"):
        encoded(small[1], picture(12, 11))


def test_values_beyond_half_precision_are_not_hidden(card, tmp_path, small):
    """The scheduler ends a request with such rows, see tests/test_sight.py."""
    path = write_tower(tmp_path / "mmproj.gguf",
                       change=lambda name, values: values + 6e4 * (name == "v.blk.1.ffn_up.bias"))
    assert not np.isfinite(encoded(tower_of(card, path), picture(2, 2))).all(axis=1).any()
    assert np.isfinite(encoded(small[1], picture(2, 2))).all()


def test_passes_are_few_and_of_about_the_same_length():
    sizes = lambda *passes: [[each.n_tokens for each in part] for part in passes]
    eight = [picture(2, 2)] * 8
    assert sizes(*passes_of(eight, 28)) == [[4] * 4, [4] * 4]
    assert sizes(*passes_of(eight, 32)) == [[4] * 8]
    assert sizes(*passes_of([picture(1, n) for n in (5, 1, 5, 1, 1)], 6)) == [[5], [1, 5], [1, 1]]
    assert sizes(*passes_of([picture(1, n) for n in (4, 3, 4)], 6)) == [[4], [3], [4]]
    assert passes_of([], 6) == []


def test_a_picture_takes_less_than_a_second(reference):
    """Of 256 x 256 pixels, on the emulated card as on any other. An emulated card takes so long of each of its
    processors, which other work there does not stretch."""
    _, tower = reference
    is_emulated = tower.card.kind == "emulated"
    clock, n_clocks = (time.process_time, tower.card.threads) if is_emulated else (time.perf_counter, 1)
    encoded(tower, picture(8, 8))
    seconds = []
    for seed in range(3):
        begin = clock()
        encoded(tower, picture(8, 8, seed))
        seconds.append((clock() - begin) / n_clocks)
    assert min(seconds) < 1.0


def test_a_rehearsal_knows_all_kernels(card, tmp_path):
    tower = tower_of(card, write_tower(tmp_path / "mmproj.gguf"))
    with card.collecting() as rehearsed:
        tower.rehearse()
    for sizes in [(1, 1)], [(8, 16)], [(3, 3), (7, 9)]:
        with card.collecting() as needed:
            out = card.alloc((128, SMALL.hidden_dim), np.float32)
            pictures = [picture(*size) for size in sizes]
            list(tower.encode(pictures, outs_of(out, pictures)))
        assert needed.keys() <= rehearsed.keys()


# ---- memory ------------------------------------------------------------------------------------------------

def test_bytes_on_paper_are_those_on_the_card():
    card = EmulatedCard()                   # its own, of which nothing else takes or frees memory
    opened, paper, free = OpenedTower(SyntheticVisionWeights(SMALL)), PlannedCard(card), card.free_bytes
    opened.load(paper, 128)
    tower = opened.load(card, 128)
    assert card.free_bytes == paper.free_bytes < free
    del tower


def test_the_rows_must_fit_the_text_model(tmp_path):
    path = write_tower(tmp_path / "mmproj.gguf")
    assert open_tower(path, SMALL.hidden_dim).weights.config.hidden_dim == SMALL.hidden_dim
    with pytest.raises(ModelError, match="rows of 20 numbers, and the text model takes 24"):
        open_tower(path, 24)


def test_the_tower_of_the_real_size():
    config = VisionConfig.synthetic(4096)
    n = sum(int(np.prod(shape)) for shape in config.shapes().values())
    assert config.head_dim == 72 and 455e6 < n < 457e6      # as in the published files


# ---- files -------------------------------------------------------------------------------------------------

def without(name):
    return lambda each, values: None if each == name else values


def with_values(name, function):
    return lambda each, values: function(values) if each == name else values


def test_keys_and_tensors_that_mean_nothing_here_are_read_over(card, tmp_path):
    """A file as other tools write it, with keys that are younger than this engine, and with ears beside the eyes."""
    plain = write_tower(tmp_path / "plain.gguf")
    other = write_tower(tmp_path / "other.gguf", keys=EXPORTED, more=["a.blk.0.attn_q.weight", "mm.a.fc.weight"])
    assert len(EXPORTED) > 20 and GGUF(other).metadata.keys() >= EXPORTED.keys()
    given = picture(2, 3)
    np.testing.assert_array_equal(encoded(tower_of(card, other), given), encoded(tower_of(card, plain), given))


def test_the_projector_may_be_named_under_vision_alone(tmp_path):
    """As newer tools do, where a file has more than eyes."""
    keys = {"clip.projector_type": None, "clip.vision.projector_type": "qwen3vl_merger"}
    plain, other = (GGUF(write_tower(tmp_path / f"{name}.gguf", keys=each)) for name, each in (("a", {}), ("b", keys)))
    assert VisionConfig.from_gguf(other) == VisionConfig.from_gguf(plain)


@pytest.mark.parametrize("name, words", [
    ("v.deepstack.8.fc1.weight", "deepstack"),
    ("v.blk.0.ls1.weight", "has a tensor 'v.blk.0.ls1.weight', which cannot be run"),
    ("v.pre_ln.weight", "has a tensor 'v.pre_ln.weight'"), ("mm.4.weight", "has a tensor 'mm.4.weight'"),
    ("v.blk.2.ln1.weight", "has a tensor 'v.blk.2.ln1.weight'")])
def test_tensors_that_would_change_what_is_computed_are_refused(tmp_path, name, words):
    with pytest.raises(ModelError, match=words) as caught:
        VisionConfig.from_gguf(GGUF(write_tower(tmp_path / "mmproj.gguf", more=[name])))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keys, change, words", [
    ({"general.architecture": "qwen35"}, None, "no vision tower"),
    ({"clip.has_vision_encoder": False}, None, "no vision tower"),
    ({"clip.projector_type": "mlp"}, None, "projector type 'mlp'"),
    ({"clip.vision.patch_size": 14}, None, "16 x 16 pixels"),
    ({"clip.vision.image_mean": [0.5, 0.4, 0.5]}, None, "image_mean"),
    ({"clip.vision.is_deepstack_layers": [False, True]}, None, "deepstack"),
    ({"clip.vision.is_deepstack_layers": [0, 1]}, None, "deepstack"),
    ({"clip.vision.n_wa_pattern": 8}, None, "windows"), ({"clip.vision.wa_layer_indexes": [7, 15]}, None, "windows"),
    ({"clip.use_gelu": False}, None, "activation"), ({"clip.use_silu": True}, None, "activation"),
    ({"clip.vision.block_count": 3}, None, "'v.blk.2.attn_qkv.weight' of the vision tower is missing"),
    ({"clip.vision.block_count": 0}, None, "is 0, not a sensible size"),
    ({"clip.vision.attention.head_count": 5}, None, "5 heads in 288"),
    ({"clip.vision.attention.head_count": 2}, None, "2 heads in 288"),
    ({"clip.vision.feed_forward_length": None}, None, "feed_forward_length"),
    ({"clip.vision.projection_dim": 24}, None, "'mm.2.weight' has the shape"),
    ({}, without("mm.0.bias"), "'mm.0.bias' of the vision tower is missing"),
    ({}, with_values("v.post_ln.weight", lambda values: values[:-1]), "'v.post_ln.weight' has the shape"),
])
def test_files_that_cannot_be_run_are_refused(tmp_path, keys, change, words):
    path = write_tower(tmp_path / "mmproj.gguf", keys=keys, change=change)
    with pytest.raises(ModelError, match=words) as caught:
        FileVisionWeights(GGUF(path))
    assert "\n" not in str(caught.value) and path in str(caught.value)


@pytest.mark.parametrize("kind, value, words", [
    ("F16", np.inf, "not a finite number"), ("F32", np.nan, "not a finite number"),
    ("F32", 1e5, "half precision ends at 65504")])
def test_values_that_no_tower_has_are_refused(card, tmp_path, kind, value, words):
    def change(name, values):
        if name == "v.blk.1.attn_out.weight":
            values[3, 5] = value
        return values

    path = write_tower(tmp_path / "mmproj.gguf", kind=kind, change=change)
    with pytest.raises(ModelError, match=f"'v.blk.1.attn_out.weight' holds .*{words}"):
        tower_of(card, path)


def test_a_tensor_of_another_type_is_refused(tmp_path):
    path = write_tower(tmp_path / "mmproj.gguf", kind="Q4_0")
    with pytest.raises(ModelError, match="is of type Q4_0; those of a vision tower may be .*Q8_0"):
        FileVisionWeights(GGUF(path))


def test_progress_goes_around_the_blocks(card):
    seen = []

    def progress(blocks):
        for block in blocks:
            yield block
            seen.append(block)

    Tower(card, SyntheticVisionWeights(dataclasses.replace(SMALL, n_blocks=3)), 8, progress)
    assert seen == [0, 1, 2]


# ---- a model that sees -------------------------------------------------------------------------------------

def test_a_model_with_its_tower(card):
    """From the pixels of the reference's pictures to logits behind them: within the band of 8-bit activations, and
    greedy tokens of the reference until a margin is below its noise."""
    data = oracle_npz("dense_mtp-vision")
    band = oracle_json("manifest.json")["models"]["dense_mtp-Q8_0"]["agreement"]["long"]
    band = band["llamacpp_quantised_f16kv__vs__hf_f32"]
    engine = qengine.load(str(oracle_path("gguf/dense_mtp-Q8_0.gguf")), card=card, progress=False, ctx=256,
                          mmproj=str(oracle_path("gguf/dense_mtp-mmproj-F16.gguf")))
    try:
        for case, pixels in ("aligned", "aligned_rgb"), ("unaligned", "unaligned_resized_rgb"):
            ids, seen, want = data[f"{case}_ids"].tolist(), Picture.of(data[pixels]), data[f"{case}_hf_logits_tail"]
            tail = engine.evaluate(ids, pictures=[seen])[-len(want):]
            assert np.linalg.norm(tail - want) <= band["rel_l2"] * np.linalg.norm(want)
            greedy, margin = data[f"{case}_hf_greedy"].tolist(), data[f"{case}_hf_greedy_margin"]
            request = qengine.Request(ids, max_tokens=len(greedy), pictures=(seen,), ignore_eos=True)
            found = [delta.token_id for delta in engine.submit(request)]
            first = next((i for i, pair in enumerate(zip(found, greedy)) if pair[0] != pair[1]), None)
            assert first is None or margin[first] <= band["max_abs"]
    finally:
        engine.close()
