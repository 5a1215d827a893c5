"""Jobs in processes of their own, and kernels that are compiled there."""

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numba import cuda
from numba.types import uint32

from kernels import card as cards
from kernels import workers
from kernels.compile import CompileError
from kernels.emulated.card import EmulatedCard
from tests.until import PATIENCE


def write(path, text):
    Path(path).write_text(f"{text} {os.getpid()}")


def test_jobs_are_done_by_other_processes(tmp_path):
    done = []
    workers.run({name: partial(write, tmp_path / name, name) for name in "abcdef"}, done.append, n_workers=2)
    assert sorted(done) == list("abcdef")
    words = [(tmp_path / name).read_text().split() for name in "abcdef"]
    assert [word for word, _ in words] == list("abcdef")
    assert {int(process) for _, process in words}.isdisjoint({os.getpid()})


def test_failures_and_deaths_leave_the_others(tmp_path):
    jobs = {"fails": partial(int, "x"), "dies": partial(os._exit, 1), "works": partial(write, tmp_path / "w", "w")}
    done = []
    workers.run(jobs, done.append, n_workers=2)
    assert set(done) >= {"fails", "works"} and (tmp_path / "w").exists()


def test_an_interrupt_ends_the_workers(tmp_path):
    """As Ctrl-C does, which arrives in the thread that waits."""
    def interrupt(name):
        raise KeyboardInterrupt

    started = time.monotonic()
    jobs = {"short": partial(write, tmp_path / "process", "w"), **{i: partial(time.sleep, 600) for i in range(3)}}
    with pytest.raises(KeyboardInterrupt):
        workers.run(jobs, interrupt, n_workers=1)
    assert time.monotonic() - started < PATIENCE
    process = int((tmp_path / "process").read_text().split()[1])
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


# ---- kernels -----------------------------------------------------------------------------------------------


def kernel(factor):
    """Kernels that no import finds, as the factories of the engine make them."""
    @cuda.jit
    def multiply(y, x, n):
        i = uint32(cuda.threadIdx.x)
        if i < n:
            y[i] = x[i] * factor
    return multiply


def needs(card, *kernels):
    x = card.zeros(4, np.float32)
    with card.collecting() as needed:
        for each in kernels:
            card.launch(each, 1, 32, x, x, 4)
    return needed


def load(card, needed, on_done=lambda name: None):
    card.compile_kernels(needed, on_done)
    for each in needed:
        card.load_kernel(*each)


def test_collected_launches_do_not_run(tmp_path):
    card, double = EmulatedCard(cache_dir=tmp_path), kernel(2)
    x = card.upload(np.ones(4, np.float32))
    with card.collecting() as needed:
        card.launch(double, 1, 32, x, x, 4)
        card.launch(double, 3, 32, x, x, 2)
        card.launch(double, 1, 64, x, x, 4)
    assert list(needed) == [((double, "float32[1]", "float32[1]", "uint32"), (threads, 1, 1)) for threads in (32, 64)]
    assert card.download(x).tolist() == [1] * 4 and not card._functions and not list(tmp_path.iterdir())


def test_what_compiling_tells(tmp_path):
    """How much there is to compile, and how long it took; nothing where all is compiled already."""
    card, told = EmulatedCard(cache_dir=tmp_path), []
    needed = needs(card, kernel(2), kernel(3))
    card.compile_kernels(needed, tell=told.append)
    assert told[0] == "compiling 2 kernels, which may take minutes; later starts find what is compiled now"
    assert re.fullmatch(r"compiled 2 kernels in \d+\.\d s", told[1])
    card.compile_kernels(needed, tell=told.append)
    assert len(told) == 2


def test_what_compiling_tells_where_nothing_can_be_kept(tmp_path):
    (tmp_path / "file").write_text("")
    folder, told = tmp_path / "file" / "qengine", []
    card = EmulatedCard(cache_dir=folder)
    with pytest.warns(UserWarning, match="compiled kernel not kept in .*/file/qengine"):
        card.compile_kernels(needs(card, kernel(4)), tell=told.append)
    assert told[0] == ("compiling 1 kernel, which may take minutes, again at each start: nothing can be kept in "
                       f"{folder}")


def test_other_threads_are_not_collected():
    card, double = EmulatedCard(), kernel(2)
    x = card.upload(np.ones(4, np.float32))
    with card.collecting() as needed, ThreadPoolExecutor(1) as other:
        other.submit(card.launch, double, 1, 32, x, x, 4).result()
    assert not needed and card.download(x).tolist() == [2] * 4


@pytest.mark.parametrize("count, processors", [(2, 2), (5, 2), (5, 1)])
def test_kernels_are_compiled_once_and_elsewhere_if_many(tmp_path, monkeypatch, count, processors):
    monkeypatch.setattr(workers, "own_processors", lambda: processors)
    elsewhere = count >= cards.WORTH_WORKERS and processors > 1
    ran, run = [], workers.run
    monkeypatch.setattr(workers, "run", lambda jobs, on_done: ran.append(len(jobs)) or run(jobs, on_done))
    for _ in range(2):
        card, kernels, done = EmulatedCard(cache_dir=tmp_path), [kernel(factor) for factor in range(count)], []
        load(card, needs(card, *kernels), done.append)
        assert done == ["multiply"] * count
        monkeypatch.setattr(cards.compiler, "_compile", None)           # all that follows finds them
        x, y = card.upload(np.arange(4, dtype=np.float32)), card.alloc(4, np.float32)
        for factor, each in enumerate(kernels):
            card.launch(each, 1, 32, y, x, 4)
            assert card.download(y).tolist() == [factor * i for i in range(4)]
        if not elsewhere:
            monkeypatch.undo()
            break
    assert ran == ([count] if elsewhere else [])


def test_a_kernel_that_cannot_be_compiled_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "own_processors", lambda: 2)

    @cuda.jit
    def wrong(y, x, n):
        y[0] = x.no_such_thing

    card = EmulatedCard(cache_dir=tmp_path)
    with pytest.raises(CompileError, match="(?s)kernel wrong.*no_such_thing"):
        load(card, needs(card, wrong, *[kernel(factor) for factor in range(cards.WORTH_WORKERS)]))
