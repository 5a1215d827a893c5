"""Scripts of benchmarks/ run, and count what they say."""

import importlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import qengine
from benchmarks import emulated, expert_file, kv
from cli.bench import Bench
from cli.ending import ended
from engine import plan
from engine.request import RequestError
from kernels.emulated.card import EmulatedCard
from tests.models import TINY, load_tiny

MOE, MB = "synthetic:tiny-moe", 1 << 20


def test_logits_of_decode_steps_are_those_that_answers_are_chosen_by(monkeypatch):
    monkeypatch.setattr(kv, "READ", 100)
    engine = load_tiny("emulated", kv="q8+3")
    prompt = [7, 300, 77, 1024, 9] * 20
    asked = qengine.Request(prompt, max_tokens=40, ignore_eos=True)
    answer = [delta.token_id for delta in engine.submit(asked)]
    logits = kv.step_logits(engine, prompt + answer)
    assert logits.argmax(axis=1)[:-1].tolist() == answer[1:]
    assert engine.stats()["kv_pages_used"] == 0
    engine.close()


def test_a_table_of_formats_by_their_decode_steps(capsys, monkeypatch):
    monkeypatch.setattr(kv, "READ", 64)
    monkeypatch.setattr(kv, "STEPS", 20)
    kv.steps(SimpleNamespace(model=TINY, card="emulated", formats=["q8+3", "float16"], texts=2, random=True))
    coarse, same = (row.split("|")[1:-1] for row in capsys.readouterr().out.splitlines()[-2:])
    assert coarse[0].strip() == "q8+3" and 0 < float(coarse[1]) < float(coarse[2])
    assert [cell.strip() for cell in same] == ["float16", "0.000000", "0.0000", "100.00%"]


@pytest.mark.parametrize("hits", [None, 0.8])
def test_experts_in_a_file(capsys, monkeypatch, hits):
    """Each pair is counted once, and the page cache is empty before each step."""
    dropped, real = [], os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *rest: dropped.append(rest) or real(file, *rest))
    memory = plan.machine_bytes()
    parts = expert_file.run(MOE, EmulatedCard(), 2 * MB, 4 * MB, 10, hits)
    assert plan.machine_bytes() == memory
    config = qengine.Config.synthetic("tiny-moe")
    assert sum(part.n_tokens for part in parts) == 10 and len(parts) == expert_file.PARTS
    for part in parts:
        assert part.hits + part.misses == part.n_tokens * config.n_layers * config.n_used_experts
        assert part.n_read <= part.misses and part.seconds > 0
    read = [part for part in parts if part.n_read]
    assert read and len({part.n_bytes / part.n_read for part in read}) == 1     # of an expert
    assert dropped == [(0, 0, os.POSIX_FADV_DONTNEED)] * (expert_file.READS + 10)
    lines = capsys.readouterr().out.splitlines()
    assert "of experts in a file in" in lines[0] and lines[1] == expert_file.HEAD and len(lines) == 2 + len(parts)


def test_experts_that_lie_in_no_file_and_models_without():
    with pytest.raises(SystemExit, match="none lie in a file"):
        expert_file.run(MOE, EmulatedCard(), 64 * MB, 64 * MB, 4, None)
    with pytest.raises(RequestError, match="no experts to choose from"):
        expert_file.run("synthetic:tiny", EmulatedCard(), MB, MB, 4, None)


def test_weights_of_a_step():
    """What benchmarks.emulated reads beside a decode step is what the step must read: of experts those of one row."""
    for engine in qengine.load(MOE, card="emulated", ctx=64, progress=False), load_tiny("emulated"):
        arrays = emulated.weights_of_a_step(engine.pipeline.stages[0])
        bench = Bench(engine, [], 1, 1)
        whole = sum(m.values.nbytes + (m.scales.nbytes if m.is_quantized else 0) for m in bench.weights())
        assert sum(array.nbytes for array in arrays) == whole + bench.work().expert_bytes_read(1)
        assert (bench.work().expert_bytes > 0) == (engine.config.n_experts > 0)
        engine.close()


def test_a_part_that_fails_or_hangs_does_not_keep_others_from_running():
    say = "import sys, time; print('a\\nb'); sys.stdout.flush(); "
    parts = [kv.Part(name, ["-c", say + then], share, 1) for name, then, share in (
        ("hangs", "time.sleep(60)", 0.05), ("fails", "sys.exit(3)", 0.45), ("runs", "", 0.5))]
    shown = [text.splitlines() for text in kv.run_parts(parts, 60)]
    for part, how, (first, *rest) in zip(parts, ("STOPPED, too long", "FAILED, exit status 3", "done"), shown):
        assert re.fullmatch(f"== {part.name}: {how} after \\d+ s", first) and rest == ["b"]
    assert kv.run_parts(parts, 0) == [f"== {part.name}: left out, no time" for part in parts]


def test_the_parts_of_all_share_its_seconds(monkeypatch):
    """Parts that take all of their time end when the seconds are over; time that one part leaves over goes to the
    next."""
    now, limits = 0.0, {}

    def ended(part, limit):
        nonlocal now
        limits[part.name] = limit
        now += limit if len(limits) != 1 else 10.0
        return "done"

    monkeypatch.setattr(kv.time, "perf_counter", lambda: now)
    monkeypatch.setattr(kv, "ended", ended)
    kv.run_parts(kv.PARTS, 400)
    assert now == pytest.approx(400) and list(limits) == [part.name for part in kv.PARTS]
    first, second = kv.PARTS[:2]
    assert limits[second.name] == pytest.approx(400 * (first.share + second.share) - 10)


def test_a_part_ends_with_the_program(tmp_path):
    """One that went on would hold the card."""
    said = tmp_path / "process"
    part = f"import os, time; open({str(said)!r}, 'w').write(f'{{os.getpid()}}.'); time.sleep(60)"
    program = subprocess.Popen([sys.executable, "-c", "from benchmarks import kv\n"
                                f"kv.PARTS = [kv.Part('hangs', ['-c', {part!r}], 1, 1)]\nkv.main()", "all"])
    deadline = time.monotonic() + 60
    while not (said.exists() and said.read_text().endswith(".")) and time.monotonic() < deadline:
        time.sleep(0.1)
    program.terminate()
    program.wait(60)
    with pytest.raises(ProcessLookupError):
        os.kill(int(said.read_text()[:-1]), 0)


PROGRAMS = [file for file in Path(emulated.__file__).parent.glob("*.py") if "__main__" in file.read_text()]


@pytest.mark.parametrize("file", PROGRAMS, ids=lambda file: file.stem)
def test_every_program_ends_in_a_sentence(file):
    """By cli/ending.py, whose sentences the next test reads."""
    assert "run_program(main" in file.read_text().rpartition("__main__")[2]


@pytest.mark.parametrize("name", ["constraints", "embeddings", "engine", "fairness", "soak"])
def test_a_model_that_is_not_there_is_one_sentence(capsys, monkeypatch, name):
    monkeypatch.setattr(sys, "argv", [name, "/nowhere/model.gguf"])
    assert ended(importlib.import_module(f"benchmarks.{name}").main) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("qengine: /nowhere/model.gguf: ") and err.count("\n") == 1
