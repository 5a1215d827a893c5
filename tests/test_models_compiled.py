"""What a run compiles: each kind of block once, and nothing again in a later part."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="models/requirements.txt is not installed: no torch")
pytest.importorskip("safetensors", reason="models/requirements.txt is not installed: no safetensors")

from torch._dynamo.utils import counters  # noqa: E402
from torch._inductor import compile_fx  # noqa: E402
from torch._inductor.utils import fresh_cache  # noqa: E402

import tests.training  # noqa: E402, F401
from models import compiled, data, lessons, network, tower, train  # noqa: E402
from models.checkpoint import Checkpoint, save_checkpoint  # noqa: E402

SHAPE = network.Shape(n_vocab=512, hidden=32, ffn=32, n_layers=4, attention_interval=2, head_dim=32, rope_dim=16,
                      linear_head_dim=16)
TOWER = tower.TowerShape(width=32, n_blocks=3, n_heads=1, ffn=32, side=4, hidden=32)


@pytest.fixture(scope="module")
def tokenizer():
    return data.train_tokenizer(data.sample_texts(1, 200), 512)


@pytest.fixture
def graphs(monkeypatch):
    """What is handed to the compiler, which runs it as it is."""
    made = []

    def run_as_it_is(model, inputs, **options):
        made.append((model, options))
        return model.forward
    monkeypatch.setattr(compile_fx, "compile_fx", run_as_it_is)
    torch._dynamo.reset()
    yield made
    torch._dynamo.reset()


def test_a_run_compiles_each_kind_of_block_once(graphs, tokenizer):
    """A tower's block in lessons; two kinds of a network's and its head in conversations; and then no more, whatever
    rows come."""
    checkpoint = Checkpoint(network.Network(SHAPE), tokenizer, 1, tower=tower.Tower(TOWER), lessons=lessons.Lessons(32))
    compiled.compile_blocks(checkpoint)
    pupil = train.Pupil(checkpoint, "cpu")
    for unit in range(3):
        pupil.losses(data.lesson(1, unit, data.Layout(0, 128, 1)))[0].backward()
    assert len(graphs) == 1
    for unit in range(3):
        rows = data.pack(tokenizer, 1, unit, 200, data.Layout(2, 512, 2))
        train.weighted_losses(checkpoint, rows, "cpu")[0].backward()
    assert len(graphs) == 4
    # No kernel is timed in several forms.
    assert all(options["config_patches"] == compiled.OPTIONS for _, options in graphs)


def test_what_was_compiled_is_found_by_the_next_part(tmp_path):
    def fourfold(x):
        return (x * 4).sin().sum()

    def compile_anew() -> dict:
        """How often the compiler found something done and how often not."""
        torch._dynamo.reset()
        counters.clear()
        torch.compile(fourfold, dynamic=False, options=compiled.OPTIONS)(torch.ones(8))
        return {found: counters["inductor"][f"fxgraph_cache_{found}"] for found in ("hit", "miss")}
    file = tmp_path / "compiled.bin"
    compiled.find(file)         # nothing
    with fresh_cache():
        assert compile_anew() == {"hit": 0, "miss": 1}
        compiled.keep(file)
    with fresh_cache():
        compiled.find(file)
        found = compile_anew()
    assert found["miss"] == 0 and file.stat().st_size < 16_000_000 and list(tmp_path.iterdir()) == [file]


def test_a_writer_that_is_killed_leaves_the_former_file(tmp_path, monkeypatch):
    file = tmp_path / "compiled.bin"
    file.write_bytes(b"former")

    def write_half(path, content):
        with open(path, "wb") as out:
            out.write(content[:len(content) // 2])
        raise KeyboardInterrupt
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"artifacts", None))
    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(KeyboardInterrupt):
        compiled.keep(file)
    assert file.read_bytes() == b"former"


@pytest.fixture
def on_a_card(tmp_path, monkeypatch, tokenizer):
    """train.main with arguments, as on a card, which trains nothing. Returns what was read by the compiler."""
    read = []
    monkeypatch.chdir(tmp_path)
    checkpoint = Checkpoint(network.Network(SHAPE), tokenizer, 1, tower=tower.Tower(TOWER), lessons=lessons.Lessons(32))
    save_checkpoint("checkpoint", checkpoint)
    for module, name, value in (
            (torch.cuda, "is_available", lambda: True),
            (torch.compiler, "load_cache_artifacts", read.append),
            (torch.compiler, "save_cache_artifacts", lambda: (b"kept", None)),
            (compiled, "compile_blocks", lambda checkpoint: None), (train, "draw_history", lambda history, path: None),
            (train, "train", lambda checkpoint, *_, save, **__: save(checkpoint))):
        monkeypatch.setattr(module, name, value)

    def run(*options):
        monkeypatch.setattr("sys.argv", ["train.py", "--steps", "9", "--resume", "checkpoint", *options])
        train.main()
        return read
    return run


def test_what_lies_in_a_checkpoint_is_not_read_by_itself(on_a_card, tmp_path):
    """It holds pickles, and the checkpoint may be a stranger's."""
    (tmp_path / "checkpoint" / "compiled.bin").write_bytes(b"a stranger's")
    assert on_a_card("--part", "1", "--out", "next") == []
    assert not (tmp_path / "next" / "compiled.bin").exists()


def test_what_is_named_is_read_and_kept(on_a_card, tmp_path):
    assert on_a_card("--out", "first", "--compiled", "own.bin") == []
    assert (tmp_path / "own.bin").read_bytes() == b"kept"
    assert on_a_card("--out", "second", "--compiled", "own.bin") == [b"kept"]


@pytest.mark.parametrize("file", [".", "nowhere/own.bin"])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(on_a_card, capsys, file):
    with pytest.raises(SystemExit):
        on_a_card("--out", "next", "--compiled", file)
    assert f"--compiled {file} is no file, or in a folder that is not there" in capsys.readouterr().err


def test_the_file_says_that_it_can_run_programs(on_a_card, capsys):
    with pytest.raises(SystemExit):
        on_a_card("--help")
    assert "pickles, which can run any program: name only your own" in " ".join(capsys.readouterr().out.split())
