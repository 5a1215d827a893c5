"""The tower in training: against the reference data and the engine, packed, with the network, exported."""

import dataclasses
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="models/requirements.txt is not installed: no torch")
pytest.importorskip("safetensors", reason="models/requirements.txt is not installed: no safetensors")

from engine.gguf import GGUF  # noqa: E402
from engine.images import Picture
from engine.sight import PromptPictures
from engine.vision import FileVisionWeights
from engine.vision import Tower as EngineTower
from kernels import patches
from models import data, evaluate, export, lessons, network, tasks, tower, train  # noqa: E402
from models.checkpoint import Checkpoint, load_checkpoint, save_checkpoint  # noqa: E402
from models.tasks.pictures import canvas
from models.tasks.pictures.labels import FACTS, UNUSED
from tests.oracle import oracle_npz, oracle_path  # noqa: E402
from tests.training import assert_same_mask, relative

SMALL = tower.TowerShape(width=64, n_blocks=2, n_heads=2, ffn=96, side=5, hidden=32)
LAYOUT = data.Layout(2, 1024, 1)


@dataclasses.dataclass(frozen=True)
class Square:
    """A picture of one colour with noise."""

    size: tuple
    colour: tuple
    seed: int = 0
    notes = ()

    @property
    def look(self):
        return canvas.Look(*self.size, False, self.seed)

    def paint(self):
        return self

    def finish(self):
        return self.draw()

    def draw(self):
        noise = np.random.default_rng(self.seed).integers(-40, 40, (*self.size, 3))
        return np.clip(np.array(self.colour) + noise, 0, 255).astype(np.uint8)


COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220), "white": (240, 240, 240)}


def make(rng, held=False, length=None, lang=None):
    """What colour one to three squares have."""
    names = rng.choices(list(COLOURS), k=rng.choice((1, 1, 2, 3)))
    squares = tuple(Square((32 * rng.randint(1, 3), 32 * rng.randint(1, 3)), COLOURS[name], rng.randrange(1000))
                    for name in names)
    content = [{"type": "image"} for _ in squares] + [{"type": "text", "text": "What colours?"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": " ".join(names)}]
    return tasks.Example(messages, None, False, {"kind": "exact", "answer": " ".join(names)}, "squares", "en",
                         pictures=squares)


def make_text(rng, held=False, length=None, lang=None):
    """An example without pictures."""
    words = " ".join(rng.choices(list(COLOURS), k=rng.randint(5, 20)))
    messages = [{"role": "user", "content": f"Say {words}"}, {"role": "assistant", "content": words}]
    return tasks.Example(messages, None, False, {"kind": "exact", "answer": words}, "text", "en")


@pytest.fixture()
def squares(monkeypatch):
    """Tasks of this file alone, so that what the model is trained on may change."""
    monkeypatch.setattr(data.tasks, "TASKS", {"squares": (3, make), "text": (1, make_text)})


@pytest.fixture(scope="module")
def tokenizer():
    rng = random.Random(0)
    return data.train_tokenizer([tasks.render(make_of(rng)) for make_of in (make, make_text) * 100], 512)


def random_tower(shape=SMALL, seed=0):
    """A tower no block of which is the identity."""
    torch.manual_seed(seed)
    made = tower.Tower(shape)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith(("ln1.weight", "ln2.weight", "post_ln.weight")):
                parameter.uniform_(0.5, 1.5)
            elif parameter.ndim == 1:
                parameter.normal_(std=0.2)
            else:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return made.eval()


def patches_of(*pictures):
    """(patches [1, P, 768], grid [1, P, 5]) of arrays of pixels."""
    parts = []
    for number, pixels in enumerate(pictures):
        cut, places = data.cut(pixels)
        size = np.broadcast_to(np.array(pixels.shape[:2]) // 16, places.shape)
        parts.append((cut, np.concatenate([places, size, np.full((len(cut), 1), number)], 1)))
    return [torch.from_numpy(np.concatenate(each))[None] for each in zip(*parts)]


def rows_of(made, *pictures):
    with torch.no_grad():
        return made(*patches_of(*pictures))[0]


def pixels(rows, columns, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (32 * rows, 32 * columns, 3), np.uint8)


# ---- the tower against others --------------------------------------------------------------------------


@pytest.mark.parametrize("case, rgb", [("aligned", "aligned_rgb"), ("unaligned", "unaligned_resized_rgb")])
def test_reference_outputs(case, rgb):
    """Rows of pictures, and logits of the text behind them."""
    z = oracle_npz("dense_mtp-vision")
    rows = rows_of(export.read_tower(oracle_path("gguf/dense_mtp-mmproj-F16.gguf")), z[rgb])
    assert relative(rows, z[f"{case}_hf_image_embeds"]) < 1e-5
    net = export.read_gguf(oracle_path("gguf/dense_mtp-Q8_0.gguf")).eval()
    ids = torch.from_numpy(z[f"{case}_ids"].astype(np.int64))
    rope = torch.from_numpy(z[f"{case}_positions_thw"].astype(np.int64))
    pad = ids.unique()[ids.unique(return_counts=True)[1].argmax()]
    seen = network.Seen(filled(rope)[None], (ids == pad).nonzero()[:, 0], rows)
    position = torch.arange(len(filled(ids)))[None]
    with torch.no_grad():
        logits = net.logits(net.hidden(filled(ids)[None], position, network.dense_mask(position), seen=seen))[0]
    tail = z[f"{case}_hf_logits_tail"]
    assert relative(logits[len(ids) - len(tail):len(ids)], tail) < 1e-5


def test_block_mask_of_pictures_is_the_dense_mask():
    """Also with patches of no picture behind the last one."""
    picture = torch.tensor([[0] * 100 + [1] * 156 + [2] * 128, [3] * 256 + [4] * 4 + [-1] * 124, [-1] * 384])
    grid = picture[..., None].expand(-1, -1, 5)
    assert_same_mask(tower.block_picture_mask(grid), tower.dense_picture_mask(grid))


def test_pictures_and_logits_are_those_of_transformers():
    """Two pictures between text: rows, rotary positions and what follows."""
    pytest.importorskip("transformers.models.qwen3_5")
    torch.manual_seed(1)
    shape = network.Shape(n_vocab=512, hidden=64, ffn=96, n_layers=4, n_heads=2)
    net, made = network.Network(shape).eval(), random_tower(dataclasses.replace(SMALL, hidden=64))
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith(("ffn_down.weight", "ssm_out.weight", "attn_output.weight")):
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    pictures, pad = [pixels(2, 5, 1), pixels(3, 1, 2)], 511
    ids = [5, 6, *[pad] * 10, 7, *[pad] * 3, *range(8, 40)]
    rope = torch.from_numpy(PromptPictures(ids, list(map(Picture.of, pictures)), pad).rope).long()
    with torch.no_grad():
        model = export.to_transformers_that_sees(net, made, pad)
        theirs = model(torch.tensor([ids]), **export.transformers_pictures(pictures, ids, pad)).logits[0]
        seen = network.Seen(filled(rope)[None], (torch.tensor(ids) == pad).nonzero()[:, 0], rows_of(made, *pictures))
        position = torch.arange(64)[None]
        given = filled(torch.tensor(ids))[None]
        ours = net.logits(net.hidden(given, position, network.dense_mask(position), seen=seen))[0, :len(ids)]
    assert relative(ours, theirs) < 1e-5


def filled(x):
    """Filled up to whole chunks."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % network.CHUNK))


def test_patches_are_cut_as_the_engine_cuts_them():
    given = pixels(3, 5)
    cut, places = data.cut(given)
    np.testing.assert_allclose(cut / 127.5 - 1, patches.patches_reference(given), atol=1e-12)
    np.testing.assert_array_equal(places.T, patches.places_of(3, 5))


def test_positions_are_those_of_the_engine():
    table = np.random.default_rng(0).standard_normal((25, 8))
    for rows, columns in (3, 5), (1, 1), (9, 2):
        ours = tower.positions(torch.from_numpy(table).float(), patches_of(pixels(rows, columns))[1])[0]
        theirs = patches.positions_reference(table, patches.grid_of([(rows, columns)], 5))
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_picture_has_the_same_rows_in_company():
    made, pictures = random_tower(), [pixels(*size, seed) for seed, size in enumerate([(3, 5), (1, 1), (2, 9)])]
    together = rows_of(made, *pictures).split([15, 1, 18])
    for rows, picture in zip(together, pictures, strict=True):
        assert relative(rows, rows_of(made, picture)) < 1e-6


def test_exported_tower_runs(card, tmp_path):
    """The engine's rows against PyTorch's with the file's weights, and these against what was written."""
    made, path = random_tower(), tmp_path / "mmproj.gguf"
    export.write_tower(path, made)
    read = export.read_tower(path).eval()
    assert read.shape == dataclasses.replace(SMALL, norm_eps=np.float32(1e-6).item())
    for name, values in made.named_parameters():
        is_matrix = values.ndim == 2 and name not in ("v.position_embd.weight", "v.patch_embd.weight")
        assert relative(read.get_parameter(name), values) < (1e-2 if is_matrix else 1e-6)
    given = Picture.of(pixels(3, 5))
    engine_tower = EngineTower(card, FileVisionWeights(GGUF(path)), 16)
    out = card.alloc((given.n_tokens, SMALL.hidden), np.float32)
    card.poison(out)
    for _ in engine_tower.encode([given], [out]):
        pass
    assert relative(card.download(out), rows_of(read, given.pixels)) < 2e-3


def test_scores_of_pictures(tokenizer, tmp_path, monkeypatch, capsys):
    """qengine sees them, and is asked nothing that it cannot see or hold."""
    shape = network.Shape(n_vocab=512, hidden=64, ffn=96, n_layers=4, n_heads=2, context=2048)
    template = (export.ROOT / "chat_template.jinja").read_text("utf-8")
    export.write_gguf(tmp_path / "small.gguf", network.Network(shape), tokenizer, template)
    export.write_tower(tmp_path / "mmproj.gguf", random_tower(dataclasses.replace(SMALL, hidden=64)))
    monkeypatch.setattr(evaluate, "SECTIONS", {"squares": make, "recall": tasks.TASKS["recall"][1]})
    monkeypatch.setattr(evaluate, "RECALL_LENGTHS", (16_384,))
    monkeypatch.setattr(evaluate, "MAX_ANSWER", 4)
    seen = []

    def judged(judge, examples, texts):
        seen.extend(zip(examples, texts, strict=True))
        return {}
    monkeypatch.setattr(evaluate, "judged", judged)
    asked = []
    request_of = evaluate.request_of
    monkeypatch.setattr(evaluate, "request_of", lambda *given: asked.append(request_of(*given)) or asked[-1])
    scores = evaluate.engine_scores(tmp_path / "small.gguf", 3, mmproj=tmp_path / "mmproj.gguf", card="emulated")
    assert list(scores) == ["squares"] and len(seen) == 3
    assert "recall 16,384 is left out: a context beyond this model" in capsys.readouterr().err
    for request, (example, _) in zip(asked, seen, strict=True):
        drawn = [picture.draw() for picture in example.pictures]
        assert len(drawn) == len(request.pictures)
        assert all(np.array_equal(ours.pixels, theirs) for ours, theirs in zip(request.pictures, drawn))
        pad = tokenizer.token_to_id(data.PAD)
        assert request.prompt_ids == data.document_of(tokenizer, example, 0).ids.tolist()[:len(request.prompt_ids)]
        assert request.prompt_ids.count(pad) == sum(map(data.size_of, example.pictures))
    assert not evaluate.engine_scores(tmp_path / "small.gguf", 1, ["squares"], card="emulated")
    assert "squares is left out: pictures beyond this model" in capsys.readouterr().err
    assert set(evaluate.torch_scores(network.Network(shape), tokenizer, 1, ["squares"])) == {"perplexity"}


def test_the_tower_of_the_model_fits_its_file(tmp_path):
    export.write_tower(tmp_path / "mmproj.gguf", tower.Tower(tower.TowerShape()))
    assert (tmp_path / "mmproj.gguf").stat().st_size <= 6_000_000


def test_answers_to_pictures_continue_as_the_whole_would(tokenizer, squares):
    """Prompts with pictures in a batch, token by token from the cache, against a pass over all of each."""
    torch.manual_seed(2)
    net, made = network.Network(dataclasses.replace(TINY, n_layers=4)).eval(), random_tower()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    rng = random.Random(1)
    prompts = [data.prompt_of(tokenizer, example) for example in (make(rng), make_text(rng), make(rng), make(rng))]
    assert sum(len(prompt.pictures) for prompt in prompts) > 3
    answers = evaluate.generate(net, prompts, end=-1, max_tokens=6, tower=made)
    for prompt, answer in zip(prompts, answers, strict=True):
        n = len(prompt.ids)
        ids = torch.tensor([prompt.ids.tolist() + answer + [0] * (-(n + len(answer)) % network.CHUNK)])
        position = torch.arange(ids.shape[1])[None]
        rope = np.concatenate([prompt.rope, np.tile(prompt.rope[:, -1:] + 1 + np.arange(ids.shape[1] - n), (1, 1))], 1)
        seen = [(start + torch.arange(data.size_of(picture)), evaluate.look_at(made, picture))
                for start, picture in prompt.pictures]
        places, rows = zip(*seen) if seen else ((torch.zeros(0, dtype=torch.int64),), (torch.zeros(0, TINY.hidden),))
        with torch.no_grad():
            hidden = net.hidden(ids, position, network.dense_mask(position), None,
                                network.Seen(torch.from_numpy(rope)[None], torch.cat(places), torch.cat(rows)))
            greedy = net.logits(hidden)[0].argmax(1).tolist()
        assert greedy[n - 1:n - 1 + len(answer)] == answer


# ---- packing -------------------------------------------------------------------------------------------


def test_documents_with_pictures_are_what_the_engine_makes_of_them(tokenizer, squares):
    rng, pad = random.Random(3), tokenizer.token_to_id(data.PAD)
    for _ in range(20):
        example = make(rng)
        document = data.document_of(tokenizer, example, 0)
        pictures = [Picture.of(picture.draw()) for picture in example.pictures]
        prompt = PromptPictures(document.ids.tolist(), pictures, pad)
        assert prompt.starts == [start for start, _ in document.pictures]
        np.testing.assert_array_equal(prompt.rope, document.rope)
        assert (document.ids == pad).sum() == sum(picture.n_tokens for picture in pictures)
        assert (document.kinds[document.ids == pad] == data.PADDING).all()


def test_packed_pictures_stand_at_their_tokens(tokenizer, squares):
    """Two units: each place is a pad's, in the order of its picture, and its pixels are that picture's."""
    units = [data.pack(tokenizer, 1, unit, 200, LAYOUT) for unit in range(2)]
    rows, pad = data.Rows.join(units), tokenizer.token_to_id(data.PAD)
    ids, places = rows.ids.reshape(-1), rows.places.reshape(-1)
    used = places[places >= 0]
    assert len(used) > 100 and sorted(used) == np.flatnonzero(ids == pad).tolist()
    numbers = rows.grid[:, ::4, 4].reshape(-1)
    rope = rows.rope.transpose(0, 2, 1).reshape(-1, 3)
    for unit in range(2):
        half = slice(unit * len(places) // 2, (unit + 1) * len(places) // 2)
        for number in set(numbers[half]) - {-1}:
            at = np.flatnonzero(numbers[half] == number) + half.start
            first = places[at[0]]
            np.testing.assert_array_equal(places[at], range(first, first + len(at)))
            blocks = rows.grid.reshape(-1, 5)[at * 4, :2] // 2
            np.testing.assert_array_equal(rope[places[at]] - rope[first], np.c_[np.zeros(len(at)), blocks])
    rng, drawn = random.Random("1 0"), []
    while len(drawn) < 300:
        example, _ = data.draw(rng, 200)
        drawn += [data.cut(picture.draw())[0].tobytes() for picture in example.pictures]
    n = len(units[0].grid[0])
    for number in set(units[0].grid[0, :, 4]) - {-1}:
        found = units[0].patches[0, :n][units[0].grid[0, :, 4] == number]
        assert found.tobytes() in drawn


def test_pictures_without_room_do_not_end_a_unit(tokenizer, monkeypatch):
    """Text fills the rows beside the few pictures that fit."""
    def large(rng, *_):
        return dataclasses.replace(make(rng), pictures=(Square((384, 384), COLOURS["red"]),), messages=[
            {"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "red"}])
    monkeypatch.setattr(data.tasks, "TASKS", {"squares": (1, large), "text": (4, make_text)})
    rows = data.pack(tokenizer, 1, 0, 200, data.Layout(2, 2048, 1))
    assert (rows.places >= 0).sum() == data.PICTURE_ROW             # four of 144 tokens
    assert (rows.ids != 0).mean() > 0.9


# ---- training ------------------------------------------------------------------------------------------

TINY = network.Shape(n_vocab=512, hidden=32, ffn=64, n_layers=2, attention_interval=2, head_dim=32, rope_dim=16,
                     linear_head_dim=16)


def new_checkpoint(tokenizer):
    torch.manual_seed(0)
    made = dataclasses.replace(SMALL, width=32, ffn=64)
    return Checkpoint(network.Network(TINY), tokenizer, 1, tower=tower.Tower(made),
                      lessons=lessons.Lessons(TINY.hidden))


def test_what_a_picture_shows_changes_what_follows_it_alone(tokenizer, squares):
    checkpoint = new_checkpoint(tokenizer)
    net = checkpoint.network.eval()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith(("ffn_down.weight", "ssm_out.weight", "attn_output.weight")):
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    rows = data.pack(tokenizer, 1, 0, 200, LAYOUT)
    other = rows.patches.copy()
    other[0, rows.grid[0, :, 4] == 1] ^= 255

    def hidden(patches):
        ids, position = (torch.from_numpy(each).long() for each in (rows.ids, rows.position))
        seen = train.seen_by(checkpoint.tower, rows._replace(patches=patches), "cpu")
        with torch.no_grad():
            trunk = net.hidden(ids, position, network.dense_mask(position), seen=seen)
            return trunk, net.draft_hidden(ids, position, network.dense_mask(position), trunk * 0, seen)
    (before, draft), (after, draft_after) = hidden(rows.patches), hidden(other)
    # Sums of log decays are rounded as what came before them is, see tests/test_models_network.py: other documents of
    # a chunk differ by up to 2e-5, and what a picture changes by 0.5 to 3.
    changed = ((before - after).abs().amax(2) > 1e-3).flatten().numpy()
    first = rows.places.reshape(-1)[np.flatnonzero(rows.grid[0, ::4, 4] == 1)[0]]
    begin = first - rows.position.reshape(-1)[first]
    end = begin + 1 + np.flatnonzero(rows.position.reshape(-1)[begin + 1:] == 0)[0]
    assert changed[first:end].all() and not changed[:first].any() and not changed[end:].any()
    assert torch.equal(draft, draft_after)          # of the picture itself the draft block sees its tokens alone


def test_lessons_teach_a_tower(tokenizer):
    """What labels say is told of other pictures, too, by rows as long as they are to be."""
    units = [data.lesson(1, unit, data.Layout(0, 128, 1)) for unit in range(2)]
    assert (units[0].places == -1).all() and not units[0].ids.size
    again = data.lesson(1, 0, data.Layout(0, 128, 1))
    assert all(map(np.array_equal, units[0], again)) and not np.array_equal(units[0].patches, units[1].patches)
    used = units[0].grid[:, ::4, 4] >= 0
    assert ((units[0].labels[..., 0] != UNUSED) == used).all() and (units[0].labels > 0).any((0, 1)).mean() > 0.6
    checkpoint = new_checkpoint(tokenizer)
    pupil, lengths = train.Pupil(checkpoint, "cpu"), []
    optimizer, losses = train.Optimizer(checkpoint.tower, checkpoint.lessons), []
    for step in range(12):
        loss, sums = pupil.losses(units[step % 2])
        loss.backward()
        optimizer.step(1e-2)
        losses.append(sums.lesson.item())
        lengths.append(pupil.made.detach()[0][torch.from_numpy(used[0])].square().mean(1).sqrt().mean().item())
    right, of = np.array(pupil.right()).sum(0)
    assert losses[-1] < 0.75 * losses[0] and 0 < right < of and len(pupil.kept) == 12
    assert checkpoint.lessons.length < lengths[-1] < 0.9 * lengths[0]


def test_what_shows_nothing_counts_little_and_what_is_no_block_nothing():
    torch.manual_seed(0)
    made, rows = lessons.Lessons(8, 2.0), 2 * torch.nn.functional.normalize(torch.randn(1, 6, 8), dim=2) * 8 ** 0.5
    labels = torch.zeros(1, 6, len(FACTS), dtype=torch.int64)
    labels[0, 0, 0], labels[0, 3:] = 2, UNUSED
    logits = made.tell(rows)
    losses = torch.stack([
        torch.nn.functional.cross_entropy(part, labels.flatten(0, 1)[:, i].clamp(min=0), reduction="none")
        for i, part in enumerate(logits.split(lessons.SIZES, 1))], 1)
    weights = torch.full((3, len(FACTS)), 0.05)
    weights[0, 0] = 1
    assert made(rows, labels).item() == pytest.approx(((losses[:3] * weights).sum() / weights.sum()).item(), rel=1e-5)
    longer = made(3 * rows, labels).item() - made(rows, labels).item()
    assert longer == pytest.approx(4 * lessons.LENGTH_WEIGHT, rel=1e-4)     # (3 - 1) squared
    assert made.right(rows, labels)[:, 1].tolist() == [1] + [0] * (len(FACTS) - 1)


def test_colours_are_learnt(tokenizer, squares, monkeypatch):
    """An even guess has 1.4 nats a word. What is learnt is in the pictures: other pictures are answered wrongly."""
    monkeypatch.setattr(data, "PICTURE_ROW", 144)
    units = [data.pack(tokenizer, 1, unit, 200, data.Layout(1, 1024, 1)) for unit in range(9)]
    checkpoint = new_checkpoint(tokenizer)
    optimizer = train.Optimizer(checkpoint.network, checkpoint.tower, checkpoint.lessons)

    def losses(rows):
        loss, sums = train.weighted_losses(checkpoint, rows, "cpu")
        return loss, (sums.tasks[0] / sums.tasks[1])[0].item()
    for step in range(150):
        losses(units[step % 8])[0].backward()
        optimizer.step(1e-2)
    with torch.no_grad():
        unseen, wrong = (losses(rows)[1] for rows in (units[8], units[8]._replace(patches=255 - units[8].patches)))
    assert unseen < 0.9 and wrong > 2 * unseen      # 0.62 and 1.96


def test_a_trial_trains_and_goes_on(tmp_path, monkeypatch, capsys):
    """The command of a trial, with a small network, and again from the checkpoint that it left."""
    monkeypatch.setattr(train, "Shape", lambda: TINY)
    monkeypatch.setattr(train, "TowerShape", lambda hidden: dataclasses.replace(SMALL, hidden=hidden))
    monkeypatch.setattr(data, "sample_many_texts", lambda seed, n, workers: data.sample_texts(seed, 200))

    def run(*options):
        monkeypatch.setattr("sys.argv", ["train.py", "--trial", "--out", str(tmp_path / "checkpoint"), *options])
        train.main()
        return load_checkpoint(tmp_path / "checkpoint")
    first = run("--steps", "4", "--part", "3")
    second = run("--steps", "4", "--resume", str(tmp_path / "checkpoint"))
    assert (first.step, second.step) == (3, 4) and second.history[:2] == first.history
    assert [(point["step"], point["tokens"]) for point in second.history] == [(2, 0), (3, 1024), (4, 2048)]
    assert [bool(point["loss"]) for point in second.history] == [False, True, True]     # lessons first
    assert second.history[0]["pictures"] > 0 < second.history[0]["lesson"]
    assert second.tower.shape.hidden == TINY.hidden and "waiting for data" in capsys.readouterr().out
    save_checkpoint(tmp_path / "blind", dataclasses.replace(second, tower=None, lessons=None))
    with pytest.raises(SystemExit):
        run("--steps", "5", "--resume", str(tmp_path / "blind"), "--out", str(tmp_path / "other"))
    assert "no tower" in capsys.readouterr().err


def test_a_run_starts_from_the_shipped_files():
    """With all of their weights and tokens, and room for rows as long as those of the run."""
    made = train.new_checkpoint(1, 1, start=evaluate.FILE, tower=evaluate.TOWER_FILE)
    files = export.read_gguf(evaluate.FILE), export.read_tower(evaluate.TOWER_FILE)
    for ours, theirs in zip((made.network, made.tower), files, strict=True):
        for name, values in theirs.named_parameters():
            assert torch.equal(ours.get_parameter(name), values)
    assert made.tokenizer.to_str() == export.read_tokenizer(evaluate.FILE).to_str()
    assert made.network.shape.context >= train.PHASES[-1].layout.n_tokens
    untrained = train.new_checkpoint(1, 1, start=evaluate.FILE).tower
    assert not torch.equal(untrained.mm["2"].weight, made.tower.mm["2"].weight)
    assert untrained.mm["2"].weight.shape == made.tower.mm["2"].weight.shape


def test_checkpoints_keep_the_tower(tokenizer, tmp_path):
    checkpoint = new_checkpoint(tokenizer)
    checkpoint.optimizer = train.Optimizer(checkpoint.network, checkpoint.tower, checkpoint.lessons).tensors()
    save_checkpoint(tmp_path / "seeing", checkpoint)
    save_checkpoint(tmp_path / "blind", dataclasses.replace(checkpoint, tower=None, lessons=None))
    loaded = load_checkpoint(tmp_path / "seeing")
    assert loaded.tower.shape == checkpoint.tower.shape and loaded.optimizer.keys() == checkpoint.optimizer.keys()
    for name, values in checkpoint.tower.named_parameters():
        assert relative(loaded.tower.get_parameter(name), values) < 1e-3 if values.any() else True
    assert relative(loaded.lessons.told.weight, checkpoint.lessons.told.weight) < 1e-3
    assert load_checkpoint(tmp_path / "blind").tower is None is load_checkpoint(tmp_path / "blind").lessons
