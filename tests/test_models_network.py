"""The training code: the network against transformers and reference outputs, packing, checkpoints, export."""

import dataclasses
import itertools
import math
import os
import random
import re
import shutil
import types
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="models/requirements.txt is not installed: no torch")
pytest.importorskip("safetensors", reason="models/requirements.txt is not installed: no safetensors")

import gguf  # noqa: E402

import qengine  # noqa: E402
from engine.tokenizer import load_tokenizer
from models import data, evaluate, export, lessons, network, tasks, tower, train  # noqa: E402
from models.checkpoint import Checkpoint, load_checkpoint, save_checkpoint  # noqa: E402
from tests.oracle import oracle_npz, oracle_path  # noqa: E402
from tests.training import assert_same_mask, relative

SMALL = network.Shape(n_vocab=512, hidden=64, ffn=96, n_layers=4, n_heads=2)
TINY = network.Shape(n_vocab=512, hidden=32, ffn=64, n_layers=2, attention_interval=2, head_dim=32,
                     rope_dim=16, linear_head_dim=16)  # no file has such heads, but it learns fast
TINY_TOWER = tower.TowerShape(width=32, n_blocks=2, n_heads=2, ffn=64, side=4, hidden=32)
SHORT = data.Layout(2, 512, 0)     # no pictures: see tests/test_models_tower.py
PHASE = train.Phase(0.0, SHORT, 1, ((0, 200),), last=1.0)


def random_network(shape=SMALL, seed=0):
    """A network no layer of which is the identity, with norms that differ from 1."""
    torch.manual_seed(seed)
    net = network.Network(shape)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith(("ffn_down.weight", "ssm_out.weight", "attn_output.weight")):
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            elif name.endswith(("norm.weight", "ssm_log_a")):
                parameter.uniform_(0.5, 1.5)
    return net.eval()


# ---- the delta rule ------------------------------------------------------------------------------------


def delta_rule_inputs(length, n_k=2, n_v=4, dim=32, seed=0):
    torch.manual_seed(seed)
    q, k = (network.unit(torch.randn(1, length, n_k, dim, dtype=torch.float64) + 0.5) for _ in range(2))
    v = torch.randn(1, length, n_v, dim, dtype=torch.float64)
    g = -torch.rand(1, length, n_v, dtype=torch.float64) * torch.logspace(-3, 0.5, n_v, dtype=torch.float64)
    return [x.requires_grad_() for x in (q * dim ** -0.5, k, v, g, torch.rand_like(g.detach()))]


@pytest.mark.parametrize("length", [64, 192, 768])
def test_chunked_delta_rule_is_the_recurrence(length):
    """Of one chunk, of three that are a group, and of four groups of three."""
    inputs = delta_rule_inputs(length)
    o, state = network.chunked_delta_rule(*inputs)
    o_ref, state_ref = network.recurrent_delta_rule(*inputs)
    assert relative(o, o_ref) < 1e-13 and relative(state, state_ref) < 1e-13
    weight = torch.randn_like(o)
    gradients, gradients_ref = (torch.autograd.grad((x * weight).sum(), inputs) for x in (o, o_ref))
    for ours, reference in zip(gradients, gradients_ref, strict=True):
        assert relative(ours, reference) < 1e-12


def test_chunked_delta_rule_is_that_of_transformers():
    library = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    q, k, v, g, beta = (x.detach().float() for x in delta_rule_inputs(320, n_k=4))
    theirs, _ = library.torch_chunk_gated_delta_rule(q * 32 ** 0.5, k, v, g, beta)
    ours, _ = network.chunked_delta_rule(q, k, v, g, beta)
    assert relative(ours, theirs) < 2e-6


def test_inverse_where_keys_repeat():
    """All keys the same: the powers of L reach 1e18, and the inverse is 1 and -1 beside the diagonal."""
    lower = torch.ones(64, 64).tril(-1)
    inverse = network.UnitLowerInverse.apply(lower[None])[0]
    torch.testing.assert_close(inverse, torch.eye(64) - torch.eye(64).roll(1, 0).tril(-1))


# ---- the network against others ------------------------------------------------------------------------


def padded(ids, n=None):
    """ids [1, T'] filled up with zeros to whole chunks, and positions."""
    ids = torch.as_tensor(np.asarray(ids).astype(np.int64))[None]
    ids = torch.nn.functional.pad(ids, (0, -ids.shape[1] % network.CHUNK))
    return ids, torch.arange(ids.shape[1])[None]


def all_logits(net, ids):
    """Of one text the trunk's and the MTP block's logits [T, n_vocab], and the latter's hidden states."""
    n = len(ids)
    ids, position = padded(ids)
    mask = network.dense_mask(position)
    with torch.no_grad():
        hidden = net.hidden(ids, position, mask)
        draft = net.draft_hidden(ids, position, mask, hidden)
        return net.logits(hidden)[0, :n], net.logits(draft)[0, :n], draft[0, :n]


@pytest.fixture(scope="module")
def reference_network():
    return export.read_gguf(oracle_path("gguf/dense_mtp-Q8_0.gguf")).eval()


@pytest.mark.parametrize("prompt", ["short", "long"])
def test_reference_outputs(reference_network, prompt):
    z = oracle_npz("dense_mtp-Q8_0")
    logits, draft_logits, draft = all_logits(reference_network, z[f"{prompt}_ids"])
    rows = range(50) if prompt == "short" else z["long_logit_rows"]
    hidden_rows = range(50) if prompt == "short" else z["long_mtp_rows"]
    assert relative(logits[rows], z[f"{prompt}_hf_logits"]) < 1e-5
    assert relative(draft_logits[z[f"{prompt}_mtp_logit_rows"]], z[f"{prompt}_mtp_ref_logits"]) < 1e-5
    assert relative(draft[hidden_rows], z[f"{prompt}_mtp_ref_hidden"]) < 1e-5


@pytest.mark.parametrize("shape", [
    SMALL, dataclasses.replace(SMALL, tied=False, n_kv_heads=2, n_key_heads=4)])
def test_logits_are_those_of_transformers(shape):
    pytest.importorskip("transformers.models.qwen3_5")
    net = random_network(shape)
    ids = torch.randint(shape.n_vocab, (150,))
    with torch.no_grad():
        theirs = export.to_transformers(net)(ids[None]).logits[0]
    assert relative(all_logits(net, ids)[0], theirs) < 1e-5


# ---- documents -----------------------------------------------------------------------------------------


def test_packed_documents_do_not_see_each_other():
    net = random_network()
    documents = [torch.randint(512, (n,)) for n in (70, 1, 3, 118)]
    position = torch.cat([torch.arange(len(d)) for d in documents])[None]
    ids, mask = torch.cat(documents)[None], network.dense_mask(position)
    with torch.no_grad():
        hidden = net.hidden(ids, position, mask)
        draft = net.draft_hidden(ids, position, mask, hidden)
    packed = torch.stack([net.logits(hidden)[0], net.logits(draft)[0]]).split([len(d) for d in documents], 1)
    for document, (logits, drafts) in zip(documents, packed, strict=True):
        alone, drafts_alone, _ = all_logits(net, document)
        # Sums of log decays reach 100 where three documents begin in a chunk: in steps of 8e-6 in float32.
        assert relative(logits, alone) < 1e-5 and relative(drafts, drafts_alone) < 1e-5


@pytest.mark.parametrize("lengths", [(100, 28, 200, 56), (384,), (129, 127, 128), (1,) * 130 + (126, 128)])
def test_block_mask_is_the_dense_mask(lengths):
    position = torch.stack([torch.cat([torch.arange(n) for n in each]) for each in (lengths, lengths[::-1])])
    assert_same_mask(network.block_mask(position), network.dense_mask(position))


def test_generation_continues_as_the_whole_text_would():
    """Prompts of several lengths in a batch, token by token from the cache, against a pass over all of it."""
    net = random_network()
    prompts = [torch.randint(512, (n,)).tolist() for n in (5, 64, 130)]
    documents = [data.Document(np.array(ids), None, np.tile(np.arange(len(ids)), (3, 1)), 0, ()) for ids in prompts]
    answers = evaluate.generate(net, documents, end=-1, max_tokens=12)
    for prompt, answer in zip(prompts, answers, strict=True):
        greedy = all_logits(net, prompt + answer)[0].argmax(1).tolist()
        assert greedy[len(prompt) - 1:-1] == answer


# ---- training ------------------------------------------------------------------------------------------


def test_orthogonalized():
    """Five steps bring all singular values between about 0.7 and 1.2."""
    torch.manual_seed(0)
    for size in ((3, 40, 100), (2, 100, 40)):
        values = torch.linalg.svdvals(train.orthogonalize(torch.randn(size)))
        assert 0.6 < values.min() and values.max() < 1.3


@pytest.fixture(scope="module")
def tokenizer():
    return data.train_tokenizer(data.sample_texts(1, 200), SMALL.n_vocab)


def test_answers_are_what_the_loss_is_about(tokenizer):
    text = ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
            "<|im_start|>user\n1+1?<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n1 and 1\n</think>\n\n2<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\nYes<|im_end|>\n")
    ids, kinds = data.encode(tokenizer, text, thinking=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    runs = itertools.groupby(zip(ids, kinds, strict=True), key=lambda pair: pair[1])
    answers = [tokenizer.decode([i for i, _ in run], skip_special_tokens=False)
               for kind, run in runs if kind == data.TARGET]
    assert answers == ["Hello!<|im_end|>", "1 and 1\n</think>\n\n2<|im_end|>", "Yes<|im_end|>"]


def test_examples_begin_with_the_tokens_of_their_prompt(tokenizer):
    """As an engine makes them, and all that follows is part of the answer."""
    rng, n_thinking = random.Random(5), 0
    for example in (data.draw(rng, 300)[0] for _ in range(400)):
        if example.document is None:
            ids, kinds = data.encode(tokenizer, tasks.render(example), example.thinking)    # not spelled
            prompt = tokenizer.encode(tasks.render(example, for_generation=True), add_special_tokens=False).ids
            assert ids[:len(prompt)] == prompt
            answer = tokenizer.encode(tasks.own_answer(example), add_special_tokens=False).ids
            assert ids[len(prompt):][:len(answer)] == answer
            assert set(kinds[len(prompt):][:len(answer)]) == {data.TARGET} and kinds[len(prompt) - 1] == data.TEXT
            n_thinking += example.thinking
    assert n_thinking > 40


def test_the_first_brace_of_an_enforced_object_is_no_target(tokenizer):
    """Generation forces it: a model that has learnt it begins objects where nobody wants one. The rest is learnt."""
    rng, found = random.Random(8), 0
    for _ in range(200):
        example = tasks.TASKS["objects"][1](rng)
        document = data.document_of(tokenizer, example, 0)
        ids, kinds = data.encode(tokenizer, tasks.render(example), example.thinking)
        changed = np.flatnonzero(document.kinds != kinds)
        assert len(changed) == example.enforced and document.ids.tolist() == ids
        if example.enforced:
            found += 1
            targets = np.flatnonzero(np.array(kinds) == data.TARGET)
            assert tokenizer.decode([ids[changed[0]]])[0] == "{" and document.kinds[changed[0]] == data.PADDING
            before = tokenizer.decode(document.ids[targets[0]:changed[0]])
            assert before in (["", "\n</think>\n\n"][example.thinking:][:1]), before
        assert example.enforced == ("properties" not in tasks.render(example, for_generation=True))
    assert 20 < found < 80


def test_rows_hold_whole_documents(tokenizer):
    layout = data.Layout(3, 1024, 1)
    rows = data.pack(tokenizer, 1, 5, 300, layout)
    again = data.pack(tokenizer, 1, 5, 300, layout)
    assert all(map(np.array_equal, rows, again))
    assert rows.ids.shape == (3, 1024) and (rows.kind != data.PADDING).mean() > 0.7
    rng, drawn = random.Random("1 5"), []
    for _ in range(200):  # more than three rows hold
        document = data.document_of(tokenizer, *data.draw(rng, 300))
        drawn.append((tuple(document.ids), tuple(document.kinds), document.task))
    for ids, position, kind, task in zip(*rows[:4], strict=True):
        starts = [*np.flatnonzero(position == 0), 1024]
        for start, end in zip(starts, starts[1:]):
            found = tuple(ids[start:end]), tuple(kind[start:end]), task[start]
            if ids[start:end].any():            # else it is the rest of the row
                assert found in drawn and (task[start:end] == task[start]).all()


class NoWorkers:
    def __init__(self, tokenizer, n):
        self.n = n

    def close(self):
        pass


@pytest.fixture()
def few_rows(monkeypatch, tokenizer):
    """Batches of two short rows, made in this process: eight that repeat."""
    units = [data.pack(tokenizer, 1, unit, 200, SHORT) for unit in range(8)]

    class Batches:
        def __init__(self, workers, seed, first_step, n_units, *_):
            self.step, self.n_units = first_step, n_units

        def __next__(self):
            self.step += 1
            return data.Rows.join([units[self.step % 8]] * self.n_units)

        def close(self):
            pass
    monkeypatch.setattr(data, "Batches", Batches)
    monkeypatch.setattr(data, "Workers", NoWorkers)
    monkeypatch.setattr(train, "REPORT_STEPS", 2)
    monkeypatch.setattr(train, "WARM_UP_STEPS", 4)


def new_checkpoint(tokenizer, seed=3):
    torch.manual_seed(seed)
    return Checkpoint(network.Network(TINY), tokenizer, seed, tower=tower.Tower(TINY_TOWER),
                      lessons=lessons.Lessons(TINY.hidden))


def run(checkpoint, part=math.inf):
    """40 steps: five times the eight batches, after which the losses have fallen by more than one nat."""
    train.train(checkpoint, 40, None, phases=(PHASE,), rate=1e-2, log=lambda line: None, part=part)


def mean_losses(checkpoint):
    return [np.mean(list(point["loss"].values())) for point in checkpoint.history]


def test_learns_and_resumes(few_rows, tokenizer, tmp_path):
    """In one go, and in two parts of which only the checkpoint's folder survives: losses as good as the same."""
    whole, part = new_checkpoint(tokenizer), new_checkpoint(tokenizer)
    run(whole)
    run(part, part=20)
    save_checkpoint(tmp_path, part)
    resumed = load_checkpoint(tmp_path)
    assert resumed.step == 20 and resumed.history == part.history and resumed.minutes == part.minutes > 0
    run(resumed)
    assert mean_losses(whole)[-1] < mean_losses(whole)[0] - 1
    np.testing.assert_allclose(mean_losses(resumed), mean_losses(whole), rtol=2e-3)
    without = dataclasses.replace(load_checkpoint(tmp_path), optimizer={})
    run(without)
    assert not np.allclose(mean_losses(without), mean_losses(whole), rtol=2e-3)  # the check would notice


def test_a_run_that_is_killed_while_it_saves_leaves_the_former_checkpoint(tokenizer, tmp_path, monkeypatch):
    """Whatever file it was at; and the next save leaves no file of those that came to nothing."""
    checkpoint = new_checkpoint(tokenizer)
    checkpoint.optimizer = {"muon.1x1": torch.ones(1, 1, 1)}
    save_checkpoint(tmp_path, checkpoint)
    names = {path.name for path in tmp_path.iterdir()}
    former = {name: parameter.clone() for name, parameter in load_checkpoint(tmp_path).network.named_parameters()}
    replace = os.replace
    for killed_at in names:
        with torch.no_grad():
            checkpoint.network.output_norm.weight += 1
        checkpoint.step += 1
        changed = re.sub(r"-0-", f"-{checkpoint.step}-", killed_at)

        def fails(source, target):
            if Path(target).name == changed:
                raise KeyboardInterrupt
            replace(source, target)
        monkeypatch.setattr(os, "replace", fails)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, checkpoint)
        there = load_checkpoint(tmp_path)
        assert there.step == 0 and there.optimizer.keys() == checkpoint.optimizer.keys()
        assert all(torch.equal(parameter, former[name]) for name, parameter in there.network.named_parameters())
    monkeypatch.setattr(os, "replace", replace)
    save_checkpoint(tmp_path, checkpoint)
    assert load_checkpoint(tmp_path).step == checkpoint.step == len(names)
    assert {re.sub(r"-\d+-", "-0-", path.name) for path in tmp_path.iterdir()} == names
    for path in tmp_path.glob("optimizer-*"):
        path.unlink()
    assert load_checkpoint(tmp_path).optimizer == {}


def test_a_part_may_end_where_a_phase_does(tokenizer):
    """What the optimisers of lessons remember is none of conversations', which have more matrices."""
    def with_gradients(*networks):
        for parameter in (each for network in networks for each in network.parameters()):
            parameter.grad = torch.ones_like(parameter)
        return train.Optimizer(*networks)
    shape = tower.TowerShape(width=64, n_blocks=1, n_heads=1, ffn=64, hidden=64)
    net, eyes = network.Network(SMALL), tower.Tower(shape)
    of_lessons = with_gradients(eyes)
    of_lessons.step(1e-3)
    remembered = of_lessons.tensors()
    assert with_gradients(eyes).load(remembered, 1) and not with_gradients(eyes).load({}, 1)
    assert not with_gradients(eyes, net).load(remembered, 1)


def test_a_run_saves_as_it_goes(few_rows, tokenizer, monkeypatch):
    """Every two minutes of a clock by which a step takes one, and at the end, also that of an error."""
    checkpoint, saved = new_checkpoint(tokenizer), []
    monkeypatch.setattr(train, "time", types.SimpleNamespace(monotonic=lambda: 60 * checkpoint.step))

    def save(each):
        saved.append(each.step)
        assert each.optimizer
    train.train(checkpoint, None, 5, phases=(PHASE,), log=lambda line: None, save=save)
    assert saved == [2, 4, 5]
    monkeypatch.setattr(data.Batches, "__next__", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train.train(checkpoint, None, 9, phases=(PHASE,), log=lambda line: None, save=save)
    assert saved == [2, 4, 5, 5]


@pytest.mark.parametrize("unit", ["steps", "minutes"])
def test_parts_have_one_schedule(unit, few_rows, tokenizer, monkeypatch):
    """Of six steps, and of six minutes of a clock by which a step takes one."""
    monkeypatch.setattr(train, "REPORT_STEPS", 1)
    length = {"steps": None, "minutes": None} | {unit: 6}

    def rates(*parts):
        checkpoint = new_checkpoint(tokenizer)
        monkeypatch.setattr(train, "time", types.SimpleNamespace(monotonic=lambda: 60 * checkpoint.step))
        for part in parts:
            train.train(checkpoint, **length, phases=(dataclasses.replace(PHASE, last=0.0),), log=lambda line: None,
                        part=part)
        return [point["rate"] for point in checkpoint.history]
    assert rates(4, 99) == rates(99) and len(rates(99)) == 6
    assert max(rates(99)) > rates(99)[-1] > 0


def test_progress_counts_tokens_and_reports_the_last_steps(few_rows, tokenizer):
    checkpoint, lines = new_checkpoint(tokenizer), []
    train.train(checkpoint, 3, None, phases=(PHASE,), log=lines.append)
    assert [point["step"] for point in checkpoint.history] == [2, 3]
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 2", "step 3"]
    two = dataclasses.replace(PHASE, units=2)
    train.train(checkpoint, 4, None, phases=(two,), log=lines.append)  # other batches from here on
    assert [point["tokens"] for point in checkpoint.history] == [2048, 3072, 5120]


def test_batches_are_units_in_their_order(tokenizer):
    """With their pictures; then units of another kind by the same workers."""
    workers, layout = data.Workers(tokenizer, 1), data.Layout(2, 512, 1)
    batches = data.Batches(workers, 1, 3, 2, lambda step: 200, layout)
    rows = [next(batches) for _ in range(3)]
    batches.close()
    lessons = data.Batches(workers, 1, 0, 1, None, data.Layout(0, 128, 1))
    first = next(lessons)
    workers.close()
    lessons.close()
    for step, found in enumerate(rows, 3):
        units = [data.pack(tokenizer, 1, unit, 200, layout) for unit in (2 * step, 2 * step + 1)]
        assert found.ids.shape == (4, 512) and all(map(np.array_equal, found, data.Rows.join(units)))
    assert any(found.patches.any() for found in rows)
    assert all(map(np.array_equal, first, data.lesson(1, 0, data.Layout(0, 128, 1))))


def test_phases_change_the_rows_in_a_run(tokenizer, monkeypatch):
    """At half of it, and a part that begins there knows no other phase."""
    made = []

    class Batches:
        def __init__(self, workers, seed, step, units, longest, layout):
            self.layout = layout
            made.append((step, layout.n_tokens, longest(step)))

        def __next__(self):
            return data.pack(tokenizer, 1, 0, 100, self.layout)

        def close(self):
            made.append("closed")
    monkeypatch.setattr(data, "Batches", Batches)
    monkeypatch.setattr(data, "Workers", NoWorkers)
    phases = (train.Phase(0, SHORT, 1, ((0, 100), (1, 200))),
              train.Phase(0.5, data.Layout(1, 1024, 0), 1, ((0, 900),)))
    checkpoint = new_checkpoint(tokenizer)
    train.train(checkpoint, 4, None, phases=phases, log=lambda line: None, part=3)
    assert made == [(0, 512, 100), "closed", (2, 1024, 900), "closed"]
    train.train(checkpoint, 4, None, phases=phases, log=lambda line: None)
    assert made[4:] == [(3, 1024, 900), "closed"]


def test_the_phases_of_the_run():
    """Lessons first, whose steps have as many rows of pictures, so that the tower is compiled once; and rows with room
    for their contexts and what stands around."""
    lessons = [phase for phase in train.PHASES if phase.contexts is None]
    assert train.PHASES[0] is lessons[0] and lessons[0].start == 0
    assert [phase.start for phase in train.PHASES] == sorted(phase.start for phase in train.PHASES)
    for phase in set(train.PHASES) - set(lessons):
        for lesson in lessons:
            assert phase.layout.picture_rows * phase.units == 2 * lesson.layout.picture_rows * lesson.units
        longest = max(length for _, length in phase.contexts)
        assert phase.layout.n_tokens % 128 == 0
        assert 1.2 * longest + 100 < phase.layout.n_tokens <= network.Shape().context


@pytest.mark.parametrize("options, complaint", [
    ([], "--minutes or --steps"), (["--steps", "2", "--resume", "x", "--start", "y"], "--start"),
    (["--steps", "2", "--tower", "x"], "--tower"),
    (["--steps", "2", "--resume", "x", "--seed", "1"], "seed"),
    (["--steps", "2", "--compiled", "own.bin"], "--compiled is for a GPU"),
    (["--steps", "2", "--out", "."], "exists")])
def test_options_that_are_refused(options, complaint, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["train.py", *options])
    with pytest.raises(SystemExit):
        train.main()
    assert complaint in capsys.readouterr().err


def change_gguf(path, to, rename=(), **fields):
    """A copy of a file with texts of as many bytes in place of others, and with other numbers in fields."""
    shutil.copy(path, to)
    reader = gguf.GGUFReader(str(to), "r+")
    for name, value in fields.items():
        reader.fields[name.replace("__", ".")].parts[-1][0] = value
    del reader
    for old, new in rename:
        content = to.read_bytes()
        assert old in content and len(old) == len(new)
        to.write_bytes(content.replace(old, new))
    return str(to)


def make_file(path, content=None, of=None, **changes):
    """With this content, or a changed copy of the shipped file whose name in export.py is `of`; or none."""
    if content is not None:
        path.write_bytes(content)
    elif of is not None:
        change_gguf(getattr(export, of), path, **changes)


@pytest.mark.parametrize("made, complaint", [
    ({}, "is not there"), ({"content": b""}, "cannot be read as GGUF"), ({"content": b"no model" * 99}, "as GGUF"),
    ({"of": "TOWER_FILE"}, "has the architecture clip, and qwen35 is needed"),
    ({"qwen35__nextn_predict_layers": 0}, "draft block"),
    ({"rename": [(b"<|im_end|>", b"<|im_fin|>")]}, "lacks <|im_end|>"),
    ({"rename": [(b"<|image_pad|>", b"<|image_bad|>"), (b"<|vision_end|>", b"<|vision_fin|>")]},
     "lacks <|image_pad|>, <|vision_end|>")], ids=str)
def test_files_that_no_run_can_start_from(made, complaint, tmp_path, monkeypatch, capsys):
    """One sentence before anything is made."""
    file = tmp_path / "start.gguf"
    make_file(file, **{"of": "FILE"} | made if made else {})
    refused(monkeypatch, capsys, complaint, "--start", str(file))


@pytest.mark.parametrize("made, complaint", [
    ({}, "is not there"), ({"content": b"GGUF"}, "cannot be read as GGUF"),
    ({"of": "FILE"}, "has the architecture qwen35, and clip is needed"),
    ({"rename": [(export.PROJECTOR.encode(), export.PROJECTOR.upper().encode())]}, "of the kind QWEN3VL_MERGER"),
    ({"clip__vision__projection_dim": 255}, "makes rows of 255 numbers, and the network of")], ids=str)
def test_towers_that_no_run_can_start_from(made, complaint, tmp_path, monkeypatch, capsys):
    file = tmp_path / "tower.gguf"
    make_file(file, **{"of": "TOWER_FILE"} | made if made else {})
    refused(monkeypatch, capsys, complaint, "--start", str(export.FILE), "--tower", str(file))


def refused(monkeypatch, capsys, complaint, *options):
    monkeypatch.setattr(train, "new_checkpoint", lambda *_: pytest.fail("began"))
    monkeypatch.setattr("sys.argv", ["train.py", "--steps", "2", "--out", "not-there", *options])
    with pytest.raises(SystemExit):
        train.main()
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("train.py: error: ") and complaint in said and options[-1] in said


def test_the_shipped_files_can_start_a_run():
    assert train.complaint_of_start(str(export.FILE)) is None
    assert train.complaint_of_tower(str(export.TOWER_FILE), str(export.FILE)) is None


def test_cooldown():
    factors = [train.rate_factor(done, 0, 0.4) for done in (0, 0.5, 0.6, 0.8, 1)]
    np.testing.assert_allclose(factors, [1, 1, 1, 0.5, 0], atol=1e-9)
    factors = [train.rate_factor(done, 0.2, 0.4) for done in (0, 0.6, 0.8, 1)]
    np.testing.assert_allclose(factors, [1, 1, 0.6, 0.2], atol=1e-9)


# ---- export --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "small.gguf"
    net = random_network()
    export.write_gguf(path, net, tokenizer, "{{ messages[0].content }}")
    return net, path


def test_exported_tensors(exported):
    """Q8_0 is off by half a step of 1/127 of a block's largest value; vectors are exact."""
    net, path = exported
    stored = dict(export.read_gguf(path).named_parameters())
    for name, values in net.named_parameters():
        is_matrix = values.ndim == 2 and "conv1d" not in name
        assert relative(stored[name], values) < (1e-2 if is_matrix else 1e-6)
    assert export.read_gguf(path).shape == dataclasses.replace(SMALL, norm_eps=np.float32(1e-6).item())


def test_exported_tokenizer(exported, tokenizer):
    theirs = load_tokenizer(qengine.GGUF(exported[1]))
    rng = random.Random(4)
    letters = [chr(rng.choice([rng.randrange(32, 1000), rng.randrange(0xac00, 0xd7a4)])) for _ in range(500)]
    for text in [*data.sample_texts(2, 20), "".join(letters)]:
        assert theirs.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids
    assert theirs.decode(theirs.eos_ids & {theirs.control["<|im_end|>"]}, special=True) == "<|im_end|>"


def test_a_files_tokenizer_and_network_can_be_scored(exported, tokenizer, monkeypatch):
    net, read, tower_read = evaluate.load(exported[1])
    assert tower_read is None
    for text in data.sample_texts(2, 20):
        ids = evaluate.to_ids(tokenizer, text)
        assert evaluate.to_ids(read, text) == ids
        assert evaluate.to_text(read, ids) == evaluate.to_text(tokenizer, ids)
    monkeypatch.setattr(evaluate, "MAX_ANSWER", 4)
    scores = evaluate.torch_scores(net, read, 2, ["self", "json, new fields"])
    assert {"self", "json, new fields", "json, new fields, valid", "perplexity"} == set(scores)
    assert scores["self"]["drafted"] > 0 and 0 <= scores["self"]["accepted"] <= scores["self"]["drafted"]
    assert "drafts" in evaluate.show_scores(scores) and "perplexity" in evaluate.show_scores(scores)


def test_processes_share_sections(exported, capfd):
    """The scores are those of one process; what is not done in time, or fails, is named and left out."""
    names, written = ["self", "json, new fields", "pictures, digits"], []
    files = exported[1], ""
    scores = evaluate.scores_of_processes(files, 2, names, 2, write=lambda scores: written.append(len(scores)))
    assert scores == evaluate.torch_scores(*evaluate.load(*files)[:2], 2, names)
    assert written == sorted(written) and written[-1] == len(scores)
    assert "pictures need a tower" in capfd.readouterr().err
    assert evaluate.scores_of_processes(files, 2, ["self"], 1, within=0) == {}
    assert "self is left out: not done within 0 s" in capfd.readouterr().err
    assert evaluate.scores_of_processes((str(files[0]) + ".not", ""), 2, ["self"], 1) == {}
    assert "self failed: FileNotFoundError" in capfd.readouterr().err
    former = scores | {"self": scores["self"] | {"right": 1}}
    assert "50.0 %" in evaluate.show_scores({"self": scores["self"] | {"right": 2}}, former).splitlines()[1]


def test_perplexity_is_that_of_the_whole_text(tokenizer, monkeypatch):
    net = random_network()
    monkeypatch.setattr(evaluate, "WINDOW", 128)
    ids = evaluate.to_ids(tokenizer, evaluate.tasks.heldout_text(random.Random("perplexity"), 100))
    losses = []
    for start in range(0, len(ids) - 127, 127):
        logits = all_logits(net, ids[start:start + 128])[0]
        targets = torch.tensor(ids[start + 1:start + 128])
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], targets))
    assert evaluate.perplexity(net, tokenizer, 100) == pytest.approx(float(torch.stack(losses).mean().exp()),
                                                                    rel=1e-4)


def test_facts_are_told_apart_by_their_wording():
    examples = evaluate.held_out("facts", evaluate.SECTIONS["facts"], 200, 100)
    trained = sum(map(evaluate.tasks.asks_in_trained_words, examples))
    assert 10 < trained < 90
    scores = evaluate.score("facts", examples, [example.messages[-1]["content"] for example in examples])
    counts = [scores[f"facts, {kind}"]["n"] for kind in ("trained words", "other words")]
    assert counts == [trained, 100 - trained]
    assert all(result["right"] == result["n"] for result in scores.values())


def test_metadata(exported):
    fields = qengine.GGUF(exported[1]).metadata
    assert fields["tokenizer.ggml.tokens"][fields["tokenizer.ggml.bos_token_id"]] == "<|endoftext|>"
    assert fields["general.size_label"] == f"{export.n_parameters(exported[0]) / 1e6:.0f}M"
    assert export.n_parameters(network.Network(network.Shape())) == 9_742_384


def test_exported_file_runs(exported, card):
    """qengine's logits against PyTorch's with the file's weights: 8-bit activations cost a few per cent."""
    engine = qengine.load(exported[1], card=card, ctx=256, progress=False)
    ids = random.Random(0).choices(range(256), k=100)
    reference = all_logits(export.read_gguf(exported[1]).eval(), ids)[0]
    assert relative(engine.evaluate(ids), reference) < 0.05
    engine.close()
