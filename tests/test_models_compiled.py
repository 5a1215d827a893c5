"""What a run compiles: each kind of block once, and nothing again in a later part."""

import pytest

torch = pytest.importorskip("torch", reason="models/requirements.txt is not installed: no torch")
pytest.importorskip("safetensors", reason="models/requirements.txt is not installed: no safetensors")

from torch._dynamo.utils import counters  # noqa: E402
from torch._inductor import compile_fx  # noqa: E402
from torch._inductor.utils import fresh_cache  # noqa: E402

import tests.training  # noqa: E402, F401
from models import compiled, data, lessons, network, tower, train  # noqa: E402
from models.checkpoint import Checkpoint  # noqa: E402

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
    compiled.find(tmp_path)     # nothing
    with fresh_cache():
        assert compile_anew() == {"hit": 0, "miss": 1}
        compiled.keep(tmp_path)
    with fresh_cache():
        compiled.find(tmp_path)
        found = compile_anew()
    assert found["miss"] == 0 and (tmp_path / compiled.FILE).stat().st_size < 16_000_000
