"""Runs the notebooks and compares what they print with what they keep.

`python -m tests.test_notebooks` runs them all and keeps the new outputs, or those named: after a change that they
should show. Cells have tags:

    varies      their text depends on the machine or the compiler
    exercise    for the reader; as they are kept, they say that nothing is solved
    solution    folded; their checks must pass, and refuse something wrong
"""

import base64
import importlib.util
import re
import sys
from pathlib import Path

import nbclient
import nbconvert
import nbformat
import numpy as np
import pytest
from numba import cuda, uint32

from kernels.emulated.card import EmulatedCard
from kernels.emulated.cards import CMP_100_210

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LESSONS = [path for path in NOTEBOOKS if path.stem != "00_tour"]
N_EXERCISES = {"04_gemm": 4}            # of other lessons 2
SECONDS = 600                           # for one cell: the first use of a kernel compiles it
PICTURE_BYTES = 120_000                 # of a lesson

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
lessons = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def execute(path):
    """The notebook with fresh outputs. Raises CellExecutionError where a cell fails."""
    return run(read(path), path)


def run(notebook, path):
    nbclient.NotebookClient(notebook, timeout=SECONDS, record_timing=False, coalesce_streams=True,
                            resources={"metadata": {"path": str(path.parent)}}).execute()
    return notebook


def code_cells(notebook, tag=None):
    return [cell for cell in notebook.cells if cell.cell_type == "code" and (not tag or has(cell, tag))]


def has(cell, tag):
    return tag in cell.metadata.get("tags", ())


def printed(cell):
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def pictures(cell):
    """In base64."""
    found = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", ())]
    return ["".join(picture.split()) for picture in found]


@notebooks
def test_outputs_are_kept(path):
    cells = code_cells(read(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "not run from top to bottom"
    assert sum(len(pictures(cell)) for cell in cells), "no plot is kept"


def with_attempts(notebook):
    """Behind each solution a cell that attempts the exercise with it, as readers do who have found it themselves."""
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if has(cell, "solution"):
            (check, answer), = re.findall(r"^(check_\w+)\((.*)\)$", cell.source, re.M)
            attempt = nbformat.v4.new_code_cell(f"lab.attempt({check}, {answer})", metadata={"tags": ["attempt"]})
            cells.append(attempt)
    notebook.cells = cells
    return notebook


@notebooks
def test_runs_as_kept(path):
    kept, fresh = code_cells(read(path)), code_cells(run(with_attempts(read(path)), path))
    attempts = [cell for cell in fresh if has(cell, "attempt")]
    assert [printed(cell) for cell in attempts] == ["solved\n"] * len(attempts)
    for before, now in zip(kept, [cell for cell in fresh if not has(cell, "attempt")], strict=True):
        assert [output.get("name") for output in now.outputs if output.get("name") == "stderr"] == [], printed(now)
        if not has(now, "varies"):
            assert printed(now) == printed(before), f"stale (see the top of {Path(__file__).name}): {now.source}"
        assert len(pictures(now)) == len(pictures(before))


@lessons
def test_exercises_and_their_solutions(path):
    """As many as there should be, by turns, the solution folded."""
    cells = [cell for cell in code_cells(read(path)) if has(cell, "exercise") or has(cell, "solution")]
    assert [cell.metadata.tags[0] for cell in cells] == ["exercise", "solution"] * N_EXERCISES.get(path.stem, 2)
    for exercise, solution in zip(cells[::2], cells[1::2]):
        assert "lab.attempt(check_" in exercise.source and printed(exercise) == "not solved yet\n"
        assert "lab.refuses(check_" in solution.source and solution.metadata.jupyter.source_hidden


@lessons
def test_pictures_are_small(path):
    kept = [base64.b64decode(picture) for cell in code_cells(read(path)) for picture in pictures(cell)]
    assert sum(map(len, kept)) < PICTURE_BYTES


@pytest.mark.parametrize("path", [FOLDER / "02_roofline.ipynb", FOLDER / "04_gemm.ipynb"], ids=lambda path: path.stem)
def test_pictures_are_told_in_words(path):
    """For readers who do not see them: with lab.show. The other notebooks show theirs without."""
    outputs = [output for cell in code_cells(read(path)) for output in cell.outputs]
    shown = [output for output in outputs if "image/png" in output.get("data", ())]
    assert shown
    for output in shown:
        assert output.data["text/plain"] == output.metadata["image/png"]["alt"] and len(output.data["text/plain"]) > 100


@notebooks
def test_becomes_a_page(path):
    page = "".join(nbconvert.HTMLExporter().from_filename(str(path))[0].split())
    assert all(picture in page for cell in code_cells(read(path)) for picture in pictures(cell))


@pytest.fixture(scope="module")
def lab():
    spec = importlib.util.spec_from_file_location("lab", FOLDER / "lab.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures_on_record(lab, tmp_path, monkeypatch):
    """They are read from the section that is named, and nothing is found where nothing is."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "results.md").write_text("""# Measured
## One, 2026-11-23
| size | us |
|---|---|
| 4096 x 4096 | 1,234.5 | 6 |
| 8192 | 7 |

A loop makes 12.5 of
13. It was 14.
### one_kernel
A loop makes 1: 2 with luck.
""")
    monkeypatch.setattr(lab, "ROOT", tmp_path)
    assert lab.measured("One", "| 4096 x 4096") == [1234.5, 6] and lab.measured("One", "| 8192") == [7]
    assert lab.measured("One", "A loop makes") == [12.5, 13] and lab.measured("one_kernel", "A loop makes") == [1]
    for section, words in (("one_kernel", "| 8192"), ("Two", "A loop makes")):
        with pytest.raises(LookupError):
            lab.measured(section, words)


@cuda.jit
def copy_shifted(y, x, shift):
    i = uint32(cuda.grid(1))
    y[i] = x[uint32(i + shift)]


def test_attempts_that_touch_what_they_must_not(lab, capsys):
    """A kernel that would end this Python is told with its line; what is not a number, why."""
    card, n = EmulatedCard(0), 16                       # n: results that are looked at; 16 are written

    def check(shift):
        y, x = card.zeros(32, np.float32, "y"), card.upload(np.arange(32, dtype=np.float32), "x")
        card.poison(y)
        lab.count(card, lambda: copy_shifted[1, 16](y, x, shift), CMP_100_210)
        wrong = abs(card.download(y)[:n] - np.arange(n)).max()
        if not wrong == 0:
            raise AssertionError(f"wrong by {wrong}")

    lab.attempt(check, 1 << 29)
    told = capsys.readouterr().out
    assert told.startswith("not right yet: copy_shifted") and "y[i] = x[uint32(i + shift)]" in told
    n = 32
    lab.attempt(check, 0)
    assert capsys.readouterr().out.startswith("not right yet: wrong by nan\n(nan: ")
    n = 16
    lab.attempt(check, 0)
    assert capsys.readouterr().out == "solved\n"


def test_attempts(lab, capsys):
    """None is no answer; what a check asserts is told, and any other error is the reader's to see."""

    def check(answer):
        if answer() != 4:
            raise AssertionError(f"{answer()} is not 4")

    for answer in (None, lambda: 5, lambda: 4):
        lab.attempt(check, answer)
    assert capsys.readouterr().out == "not solved yet\nnot right yet: 5 is not 4\nsolved\n"
    with pytest.raises(ZeroDivisionError):
        lab.attempt(check, lambda: 1 / 0)
    lab.refuses(check, lambda: 5)
    with pytest.raises(RuntimeError):
        lab.refuses(check, lambda: 4)


if __name__ == "__main__":
    for path in [FOLDER / f"{name}.ipynb" for name in sys.argv[1:]] or NOTEBOOKS:
        nbformat.write(execute(path), path)
        print(path)
