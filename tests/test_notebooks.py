"""Runs the notebooks and compares what they print with what they keep.

`python -m tests.test_notebooks` runs them all and keeps the new outputs, or those named: after a change that they
should show. Cells have tags:

    varies      their text depends on the machine or the compiler
    prediction  for the reader, with a blank for each `lab.predict`; their metadata say what fills the blanks here
    exercise    a task for the reader; as they are kept, they say that nothing is solved
    solution    folded; their checks must pass, and refuse something wrong
"""

import base64
import importlib.util
import io
import re
import subprocess
import sys
import time
from pathlib import Path

import nbclient
import nbconvert
import nbformat
import numpy as np
import PIL.Image
import pytest
from numba import cuda, float32, uint32

from kernels.card import LaunchError
from kernels.compile import CompileError
from kernels.emulated.card import EmulatedCard
from kernels.emulated.cards import CMP_100_210
from kernels.intrinsics import dp4a, exp, load_words4

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LESSONS = [path for path in NOTEBOOKS if path.stem != "00_tour"]
# A small one for each step of a ladder, and larger ones at the end. Of other lessons 2.
N_TASKS = {"03_gemv": 6, "04_gemm": 8, "05_attention": 4, "06_delta_rule": 4, "07_kv_bits": 4}
SECONDS = 600                           # for one cell: the first use of a kernel compiles it
PICTURE_BYTES = 120_000                 # of a lesson
WORDS, LINES = 140, 12                  # that are read in a minute
PREDICTION, TASK, LINE_OF_SOLUTION = 3, 8, 0.5        # minutes

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


def told(cell):
    """What lab.predict and lab.reveal show beside a bar of colour."""
    return [output.data["text/plain"] for output in cell.outputs
            if "text/html" in output.get("data", ()) and "border-left" in output.data["text/html"]]


def pictures(cell):
    """In base64."""
    found = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", ())]
    return ["".join(picture.split()) for picture in found]


@notebooks
def test_outputs_are_kept(path):
    cells = code_cells(read(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "not run from top to bottom"
    assert sum(len(pictures(cell)) for cell in cells), "no plot is kept"


def as_readers_do(notebook):
    """With every blank of a prediction filled in, and behind each solution a cell that attempts the task with it, as
    readers do who have found it themselves. Engines compile only what they launch, unlike those of readers: a lesson
    that looks into prompts alone never launches the kernels of answers."""
    code_cells(notebook)[0].source += "\n\nimport qengine\nqengine.Stage.needed_kernels = lambda stage: {}\n"
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if has(cell, "prediction"):
            for fill in cell.metadata.fill:
                cell.source = re.sub(r", None(?=[,)])", f", {fill}", cell.source, count=1)
        if has(cell, "solution"):
            (check, answer), = re.findall(r"^(check_\w+)\((.*)\)$", cell.source, re.M)
            attempt = nbformat.v4.new_code_cell(f"lab.attempt({check}, {answer})", metadata={"tags": ["attempt"]})
            cells.append(attempt)
    notebook.cells = cells
    return notebook


@notebooks
def test_runs_as_kept(path):
    kept, fresh = code_cells(read(path)), code_cells(run(as_readers_do(read(path)), path))
    attempts = [cell for cell in fresh if has(cell, "attempt")]
    assert [printed(cell) for cell in attempts] == ["solved\n"] * len(attempts)
    said = [words for cell in fresh for words in told(cell) if "You said " in words]
    assert len(said) == sum(len(cell.metadata.fill) for cell in kept if has(cell, "prediction"))
    assert [words for cell in fresh for words in told(cell)
            if "Put " in words or "please" in words or "no prediction" in words] == []
    for before, now in zip(kept, [cell for cell in fresh if not has(cell, "attempt")], strict=True):
        assert [output.get("name") for output in now.outputs if output.get("name") == "stderr"] == [], printed(now)
        if not has(now, "varies"):
            assert printed(now) == printed(before), f"stale (see the top of {Path(__file__).name}): {now.source}"
        assert len(pictures(now)) == len(pictures(before))


@lessons
def test_tasks_and_their_solutions(path):
    """As many as there should be, by turns, the solution folded."""
    cells = [cell for cell in code_cells(read(path)) if has(cell, "exercise") or has(cell, "solution")]
    assert [cell.metadata.tags[0] for cell in cells] == ["exercise", "solution"] * N_TASKS.get(path.stem, 2)
    for exercise, solution in zip(cells[::2], cells[1::2]):
        assert "lab.attempt(check_" in exercise.source and printed(exercise) == "not solved yet\n"
        assert "lab.refuses(check_" in solution.source and solution.metadata.jupyter.source_hidden


@notebooks
def test_predictions_are_the_readers(path):
    """Each is asked for in words, then entered in a cell with blanks, and only then revealed, once."""
    cells = read(path).cells
    asked = [i for i, cell in enumerate(cells) if cell.cell_type == "markdown" and "**Prediction" in cell.source]
    assert asked, "nothing is to be predicted"
    for i in asked:
        assert cells[i].source.count("**Prediction") == 1 and has(cells[i + 1], "prediction"), cells[i].source
    for i, cell in enumerate(cells):
        if not has(cell, "prediction"):
            continue
        names = re.findall(r"^(\w+) = lab\.predict\(.*, None", cell.source, re.M)
        assert i - 1 in asked and len(names) == len(cell.metadata.fill) == len(cell.source.strip().splitlines())
        for name in names:
            shown = [j for j, other in enumerate(cells) if j != i and re.search(rf"\b{name}\b", other.source)
                     and "lab.reveal(" in other.source]
            assert len(shown) == 1 and shown[0] > i, f"{name} is revealed in cells {shown}"
        assert cells[i + 1].cell_type == "code" or cells[i + 1].source.startswith("<details>")


@notebooks
def test_an_answer_has_a_cell_of_its_own(path):
    """So that nobody reads on in it, or over it."""
    folded = [cell.source for cell in read(path).cells if "<details>" in cell.source]
    assert folded and all(source.startswith("<details>") and source.endswith("</details>") for source in folded)


@lessons
def test_pictures_are_small(path):
    kept = [base64.b64decode(picture) for cell in code_cells(read(path)) for picture in pictures(cell)]
    assert sum(map(len, kept)) < PICTURE_BYTES


@notebooks
def test_pictures_are_told_in_words(path):
    """For readers who do not see them, with lab.show. They have no ground of their own, so that any page suits them."""
    outputs = [output for cell in code_cells(read(path)) for output in cell.outputs]
    shown = [output for output in outputs if "image/png" in output.get("data", ())]
    assert shown
    for output in shown:
        words = output.data["text/plain"]
        assert words == output.metadata["image/png"]["alt"] and len(words) > 100
        with PIL.Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))) as picture:
            assert picture.convert("RGBA").getpixel((0, 0))[3] == 0, f"not transparent: {words}"


@notebooks
def test_becomes_a_page(path):
    page = "".join(nbconvert.HTMLExporter().from_filename(str(path))[0].split())
    assert all(picture in page for cell in code_cells(read(path)) for picture in pictures(cell))


def minutes(notebook):
    """(for text, code and predictions; for the tasks), counted."""

    def n_lines(cells):
        return sum(bool(line.strip()) for cell in cells for line in cell.source.splitlines())

    words = sum(len(cell.source.split()) for cell in notebook.cells if cell.cell_type == "markdown")
    predictions, solutions = (code_cells(notebook, tag) for tag in ("prediction", "solution"))
    seen = [cell for cell in code_cells(notebook) if cell not in predictions + solutions
            and "lab.show(" not in cell.source]        # nobody reads how a picture is drawn
    reading = words / WORDS + n_lines(seen) / LINES + PREDICTION * sum(len(cell.metadata.fill) for cell in predictions)
    return reading, TASK * len(code_cells(notebook, "exercise")) + LINE_OF_SOLUTION * n_lines(solutions)


def test_the_plan_of_the_course():
    """Every notebook is in it, in its order, with times that are within a quarter of what is counted."""
    rows = re.findall(r"^\| (\d+) \| \[(.*?)\]\((\w+)\.ipynb\) \|.*?\| (\d+) \| (\d*) ?\|$",
                      (FOLDER / "README.md").read_text(), re.M)
    assert [name for _, _, name, _, _ in rows] == [path.stem for path in NOTEBOOKS]
    for number, title, name, *said in rows:
        notebook = read(FOLDER / f"{name}.ipynb")
        assert int(number) == int(name[:2]) and title in notebook.cells[0].source
        for stated, counted in zip((int(time or 0) for time in said), minutes(notebook)):
            assert abs(stated - counted) <= 5 + 0.25 * counted, f"{name}: {stated} minutes, counted {counted:.0f}"
        head = notebook.cells[0].source
        assert re.findall(r"\d+", re.search(r"\*\*Time:\*\* (.*?)\.", head)[1]) == [time for time in said if time]
        assert "**Before:**" in head and "](glossary.md)" in head and "](README.md)" in head


def test_the_glossary():
    """In alphabetical order, a line for each term, and each term is one that the notebooks use."""
    terms = re.findall(r"^- \*\*(.*?)\*\*: .{15,}\.$", (FOLDER / "glossary.md").read_text(), re.M)
    assert len(terms) > 80 and len(terms) == (FOLDER / "glossary.md").read_text().count("\n- ")
    assert terms == sorted(terms, key=lambda term: re.sub(r"\W", "", term).lower())
    text = " ".join(cell.source for path in NOTEBOOKS for cell in read(path).cells).lower()
    assert [term for term in terms for word in term.split(", ")
            if word.lower().replace("block of numbers", "block of 32") not in text] == []


@pytest.fixture(scope="module")
def run_cells():
    """Runs cells in a Jupyter that these tests share, since its start takes longest: run_cells(cells). No cell knows a
    name of the tests before. Errors are outputs."""
    client = nbclient.NotebookClient(nbformat.v4.new_notebook(), timeout=SECONDS, allow_errors=True,
                                     resources={"metadata": {"path": str(FOLDER)}})

    def run(cells):
        client.nb.cells = [nbformat.v4.new_code_cell("%reset -f"), *cells]
        client.execute(cleanup_kc=False)
        assert errors(client.nb.cells[0]) == []

    with client.setup_kernel():
        yield run


def errors(cell):
    """What the errors of a cell show."""
    return ["\n".join(output.traceback) for output in cell.outputs if output.output_type == "error"]


@pytest.fixture(scope="module")
def lab():
    spec = importlib.util.spec_from_file_location("lab", FOLDER / "lab.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_banks_are_drawn_as_they_are_counted(lab):
    """Lanes wait for each other where they want different words of a bank; all may have the same word at once."""
    _, axes = lab.plt.subplots()
    thread = np.arange(32)
    for words, turns in ((thread % 8 * 64 + thread // 8, 8), (thread % 8 * 68 + thread // 8, 1), (4 * thread, 4),
                         (0 * thread + 7, 1), (thread // 2 * 32, 16)):
        assert lab.draw_banks(words, "", axes) == turns
    lab.plt.close()


def test_bars_of_one_kernel(lab, monkeypatch):
    """As of a reader who has run an earlier cell again."""
    shown = []
    monkeypatch.setattr(lab, "show", shown.append)
    card = EmulatedCard(0)
    counted = lab.count(card, lambda: copy_shifted[1, 16](card.zeros(32, np.float32), card.zeros(32, np.float32), 0),
                        CMP_100_210)
    lab.plot_estimates({"alone": counted}, CMP_100_210)
    lab.plt.close()
    assert "The longest: alone: issue" in shown[0]


def test_figures_on_record(lab, capsys):
    lab.on_record("course-gemm", "TOPS")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("on record (benchmarks/results.md): NVIDIA H100") and lines[1].split() == ["TOPS"]
    assert lines[2].split()[-1] == f"{lab.figure('course-gemm', '1 naive', 'TOPS')}"


@pytest.mark.parametrize("said, found, verdict", [
    (100, 101, "Right."), (0, 0, "Right."), (110, 100, "Close: 10% too high."),
    (50, 100, "The right size, 2.0 times too low."), (1, 100, "100 times too low: a surprise"),
    (-1, 5, "Another size"), (3, 0, "Another size"), ("slower", "slower", "Right."),
    ("slower", "faster", "It is another one. The folded lines behind the prediction, or the text below, say why.")])
def test_predictions_are_judged_kindly(lab, said, found, verdict):
    assert lab.judge(said, found)[1].startswith(verdict)


def test_a_choice_is_right_or_wrong(lab):
    """However near its number is."""
    assert lab.judge(8, 8, is_choice=True)[1] == "Right."
    assert lab.judge(10, 8, is_choice=True)[1].startswith("It is another one.")


def test_a_share_in_place_of_per_cent(lab):
    assert lab.judge(0.23, 23.5, is_percent=True)[1].endswith("Is it in per cent?")
    assert lab.judge(23, 2300, is_percent=False)[1].endswith("Which factor is missing?")


def test_predictions_that_are_none(lab, monkeypatch):
    """They are not taken, and the reader is asked again."""
    shown = []
    monkeypatch.setattr(lab, "display", lambda data, raw: shown.append(data["text/plain"]))
    for guess, *more in (("many",), (True,), ("no", ["yes", "maybe"]), (3, 9), (71, 303, 168), (None, 5),
                         (float("nan"),), (1e30,), (10**400,)):
        prediction = lab.predict("how many", guess, *more)
        assert prediction.guess is None and prediction.is_refused
    assert all("please; yours is" in words for words in shown) and len(shown) == 9
    assert shown[4] == "how many? A number without commas, as 1234.5, please; yours is 71, 303, 168."
    for guess, *more in ((3,), (np.float32(0.5),), (np.int64(4),), ("maybe", ["yes", "maybe"]), (8, [16, 8]),
                         ("18",), ("1e3 ",)):
        assert lab.predict("how many", guess, *more).guess == (guess if more else float(guess))
    assert lab.predict("which", " Maybe", ["yes", "maybe"]).guess == "maybe" and len(shown) == 9
    lab.reveal(prediction, 5)
    assert shown[-1] == "how many: 5. Your prediction was refused."
    lab.reveal(lab.predict("tokens", "98820"), 98821.5)
    assert shown[-1].startswith("tokens: 9.882e+04. You said 98,820. ")


@cuda.jit
def copy_shifted(y, x, shift):
    i = uint32(cuda.grid(1))
    y[i] = x[uint32(i + shift)]


@cuda.jit
def in_float64(y):
    y[uint32(cuda.threadIdx.x)] += 0.1


def test_what_is_counted_may_not_be_what_is_meant(lab, monkeypatch):
    """The reader is told if float64 was counted, and if the arrays are on another card."""
    shown, cards = [], [EmulatedCard(0) for _ in range(2)]
    monkeypatch.setattr(lab, "display", lambda data, raw: shown.append(data["text/plain"]))
    y = cards[0].zeros(32, np.float32)
    lab.count(cards[0], lambda: in_float64[1, 32](y), CMP_100_210)
    told, = shown
    assert "instructions computed in float64" in told and "0.0 is a float64" in told
    with pytest.raises(AssertionError, match="0 kernels ran on this emulated card 0 .* Are the arrays on another"):
        lab.count(cards[1], lambda: in_float64[1, 32](y), CMP_100_210)


def test_attempts_that_touch_what_they_must_not(lab, capsys):
    """A kernel that would end this Python is reported with its line, and a result that is not a number with the
    reason."""
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


@cuda.jit
def without_syncwarp(y):
    tile = cuda.shared.array(32, float32)
    lane = uint32(cuda.threadIdx.x)
    tile[lane] = y[lane]
    y[lane] = tile[uint32(lane ^ uint32(1))]


@cuda.jit
def far_away(y):
    y[uint32(cuda.threadIdx.x)] = float32(2.0)
    y[uint32(uint32(cuda.threadIdx.x) << uint32(27))] = float32(1.0)


@pytest.mark.parametrize("kernel, told", [(without_syncwarp, "a race with thread"),
                                          (far_away, "thread (1, 0, 0): writes")])
def test_what_is_counted_is_checked_before(lab, kernel, told):
    """A wrong kernel is told with line and thread, and has changed nothing."""
    card = EmulatedCard(0)
    y = card.upload(np.ones(32, np.float32), "y")
    with pytest.raises(LaunchError, match=r"line \d+\), block \(0, 0, 0\), thread") as caught:
        lab.count(card, lambda: kernel[1, 32](y), CMP_100_210)
    assert told in str(caught.value)
    assert (card.download(y) == 1).all()


def test_what_is_counted_runs_once(lab):
    """The run that checks leaves memory as it was."""
    @cuda.jit
    def one_more(y):
        y[uint32(cuda.threadIdx.x)] += float32(1.0)

    card = EmulatedCard(0)
    y = card.zeros(32, np.float32)
    lab.count(card, lambda: one_more[1, 32](y), CMP_100_210)
    assert (card.download(y) == 1).all()


def test_compile_errors_are_short(lab):
    """They say which line, and in one sentence what the compiler did not understand."""
    @cuda.jit
    def unknown_name(y):
        y[uint32(0)] = such_a_name(3)  # noqa: F821

    @cuda.jit
    def unknown_attribute(y):
        y[uint32(0)] = y.such_a_name

    @cuda.jit
    def unknown_call(y):
        y[uint32(0)] = y["such_a_name"]

    card = EmulatedCard(0)
    for kernel in unknown_name, unknown_attribute, unknown_call:
        with pytest.raises(CompileError) as caught:
            kernel[1, 1](card.zeros(1, np.float32))
        told = lab.brief(caught.value)
        assert told.startswith(f"{kernel.__name__}, line ") and len(told.splitlines()) == 2, told
        assert "such_a_name" in told.splitlines()[1]


@cuda.jit(device=True, forceinline=True)
def without_return(x):
    x + uint32(1)


def of_python(x):
    return x


def test_slips_of_newcomers_are_told_in_plain_words(lab):
    @cuda.jit
    def returning(y):
        return 3

    @cuda.jit
    def open_shape(y):
        tile = cuda.shared.array((2, y.size), uint32)
        y[uint32(0)] = tile[0, 0]

    @cuda.jit
    def four_for_one(y):
        y[uint32(0)] = uint32(load_words4(y, uint32(0)))

    @cuda.jit
    def list_of_python(y):
        y[uint32(0)] = uint32([].append(3))

    @cuda.jit
    def nothing_for_one(y):
        y[uint32(0)] = without_return(y[uint32(0)])

    @cuda.jit
    def undecorated(y):
        y[uint32(0)] = of_python(y[uint32(0)])

    @cuda.jit
    def without_step(y):
        for b in range(y.size):
            i, total = 0, uint32(0)
            while i < 8:
                total += y[uint32(b + i)]
            y[b] = total

    @cuda.jit
    def without_sum(y):
        y[uint32(0)] = dp4a(y[uint32(0)], y[uint32(1)])

    @cuda.jit
    def sum_of_list(y):
        parts = [y[uint32(0)], y[uint32(1)]]
        y[uint32(0)] = sum(parts)

    @cuda.jit
    def of_float64(y):
        total = 0.0
        for i in range(8):
            total += y[uint32(i)]
        y[uint32(0)] = exp(total)

    @cuda.jit
    def list_made(y):
        parts = [1, 2]
        y[uint32(0)] = parts[1]

    @cuda.jit
    def trying(y):
        try:
            y[uint32(0)] = 1
        except Exception:
            y[uint32(0)] = 2

    @cuda.jit
    def zeros_of_numpy(y):
        sums = np.zeros(8, np.int32)
        y[uint32(0)] = sums[0]

    @cuda.jit
    def ones_of_numpy(y):
        sums = np.ones(8)
        y[uint32(0)] = sums[0]

    @cuda.jit
    def like_another(y):
        sums = np.zeros_like(y)
        y[uint32(0)] = sums[0]

    @cuda.jit
    def list_of_range(y):
        y[uint32(0)] = list(range(8))[3]

    @cuda.jit
    def list_repeated(y):
        sums = [0] * 8
        y[uint32(0)] = sums[0]

    @cuda.jit
    def dot_of_numpy(y):
        y[uint32(0)] = np.dot(y, y)

    card = EmulatedCard(0)
    for kernel, line in ((without_step, "while i < 8:"), (without_sum, "dp4a(y["), (sum_of_list, "sum(parts)"),
                         (of_float64, "exp(total)"), (list_made, "parts = [1, 2]")):
        with pytest.raises(CompileError) as caught:
            kernel[1, 1](card.zeros(8, np.uint32))
        assert line in lab.brief(caught.value).splitlines()[1]
    for kernel, words in (
            (without_step, "a loop never ends"), (without_sum, "an argument is missing: 'c'"),
            (returning, "a kernel returns nothing"), (open_shape, "the shape of a shared array is a constant"),
            (four_for_one, "4 of uint32 stand where one is wanted"), (list_of_python, "a kernel has no lists"),
            (nothing_for_one, "does a function lack its `return`?"),
            (undecorated, "is @cuda.jit(device=True) above it?"),
            (of_float64, "a float32 is wanted, not a float64: is a float32(...) missing? 0.0 is a float64"),
            *((kernel, "a kernel has no lists and makes no arrays: cuda.local.array") for kernel in (
                list_made, zeros_of_numpy, ones_of_numpy, like_another, list_of_range, list_repeated)),
            (dot_of_numpy, "a kernel has no products of matrices"),
            (trying, "a kernel has no `try`")):
        with pytest.raises(CompileError) as caught:
            kernel[1, 1](card.zeros(8, np.uint32))
        told = lab.brief(caught.value)
        assert words in told.splitlines()[0] and len(told.splitlines()) <= 2 and "<" not in told.splitlines()[0], told


WRONG_KERNELS = {
    "far": ("03_gemv", "cell-9", "wq[uint32(32 * block + j)]", "wq[uint32((32 * block + j) << uint32(12))]",
            "gemv_thread (line 10), block (", "reads 1 byte at"),
    "syncwarp": ("06_delta_rule", "cell-7", "cuda.syncwarp()\n        said", "said",
                 "gdn_token (line ", "a race with thread"),
    "name": ("03_gemv", "cell-9", "half_to_float(", "half_to_flaot(", "line 11, cannot be compiled", "half_to_flaot"),
    "unknown": ("04_gemm", "cell-7", "lab.reveal(mb_1, 32", "lab.reveal(mb_1, bytes_of",
                "NameError: name 'bytes_of' is not defined", "was the cell run that defines it"),
    "double": ("05_attention", "cell-5", "s = float32(0.0)", "s = 0.0", "attend_float, line 19, cannot be compiled",
               "a float32 is wanted, not a float64"),
    "bare": ("05_attention", "cell-5", "attend_float[1, 32](out", "attend_float[1, 64](out", "attend_float (line 5), "
             "block (0, 0, 0), thread (32, 0, 0)", "reads 16 bytes at"),
    "across": ("08_across_cards", "cell-9", "](y, sums, t)", "](y, sums, t << 24)", "checksum (line 1", "bytes at"),
    "share": ("05_attention", "cell-9", " * float32(0.25) ", " ", "AssertionError: version 2: ",
              " of 256 results are wrong"),
    "number": ("04_gemm", "cell-7", "(n // 32, rows // 8), (32, 8)", "(n // 32, rows // 8), (32, 4)",
               "1 naive: 139,264 of 278,528 results are wrong; [4, 0] is nan, not ", "put the old one back"),
}


@pytest.mark.parametrize("notebook, cell, right, wrong, place, what", WRONG_KERNELS.values(), ids=WRONG_KERNELS)
def test_wrong_kernels_in_the_text_are_told(notebook, cell, right, wrong, place, what, run_cells):
    """With line and thread and in a few lines, and Python lives on."""
    cells = read(FOLDER / f"{notebook}.ipynb").cells
    end = next(i for i, other in enumerate(cells) if other.id == cell)
    assert right in cells[end].source
    cells[end].source = cells[end].source.replace(right, wrong)
    cells = [*cells[:end + 1], nbformat.v4.new_code_cell("print('alive')")]
    run_cells(cells)
    shown, = errors(cells[end])
    assert place in shown and what in shown and len(shown.splitlines()) <= 3, shown
    assert printed(cells[-1]) == "alive\n"


BARE = """import lab, numpy as np
from numba import cuda, float32, uint32
from kernels.emulated.card import EmulatedCard
from kernels.open import open_cards
from kernels.card import LaunchError

@cuda.jit
def far(y, distance):
    y[uint32(cuda.grid(1) * distance)] = float32(1)

@cuda.jit
def racing(y):
    tile = cuda.shared.array(64, float32)
    lane = uint32(cuda.threadIdx.x)
    tile[lane] = y[lane]
    y[lane] = tile[uint32(63 - lane)]

card, late = open_cards("emulated")[0], EmulatedCard(1, late=True)
y, z = card.zeros(64, np.float32, "y"), late.zeros(64, np.float32, "z")
far[1, 64](y, 1)                # 1: right
far[1, 64](z, 1)
far[1, 64](z, 1)
lab.microseconds(card, lambda: far[1, 64](y, 1))
assert late.default_stream.pushed > late.default_stream.done, "a launch that is known is done late"
far[2, 64](late.zeros(128, np.float32), 1)"""
TIMED_DIFFERENTLY = """distances = iter([1, 1 << 22])
lab.microseconds(card, lambda: far[1, 64](y, next(distances)))"""
BARE_LAUNCHES = {
    "blocks": ("far[16, 64](y, 1)", "far (line 9), block (", "writes 4 bytes at"),
    "number": ("far[1, 64](y, 4096)", "far (line 9), block (0, 0, 0), thread (", "writes 4 bytes at"),
    "barrier": ("racing[1, 64](y)", "racing (line 15)", "a race with thread"),
    "late": ("far[16, 64](z, 1)", "far (line 9), block (", "writes 4 bytes at"),
    "number, late": ("far[1, 64](z, 1 << 22)", "far (line 9), block (", "writes 4 bytes at"),
    "number, timed": ("lab.timed()\nfar[1, 64](y, 1)\nfar[1, 64](y, np.uint32(1 << 22))", "far (line 9), block (",
                      "writes 4 bytes at"),
    "numbers, timed": (TIMED_DIFFERENTLY, "LaunchError: far: its launches differ", "the same blocks, threads, shapes"),
}


@pytest.mark.parametrize("source, place, what", BARE_LAUNCHES.values(), ids=BARE_LAUNCHES)
def test_launches_of_a_cell_are_checked(source, place, what, run_cells):
    """kernel[blocks, threads](...) without lab: what it must not touch is told, nothing is written, and Python and card
    live on."""
    cells = [nbformat.v4.new_code_cell(text) for text in (
        BARE, source, source, "far[1, 64](y, 1)\nfar[1, 64](z, 1)\nlate.synchronize()\nprint(card.download(y).sum())")]
    run_cells(cells)
    assert errors(cells[0]) == []
    for cell in cells[1:3]:             # the second time, too
        shown, = errors(cell)
        assert place in shown and what in shown and len(shown.splitlines()) <= 3, shown
    assert printed(cells[3]) == "64.0\n"


ENDLESS = """import lab, json, os, signal, threading
import numpy as np
from numba import cuda, uint32
from kernels.open import open_cards

@cuda.jit
def endless(y, n):
    b = uint32(0)
    while b < n:
        y[uint32(0)] += uint32(1)

card = open_cards("emulated")[0]
y = card.zeros(1, np.uint32)"""
INTERRUPTED = """card.launch(endless, 1, 1, y, 1)
threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
card.synchronize()"""
REFUSED = """from engine import own_products
own_products.check_arguments(endless)"""


@pytest.mark.parametrize("source, said", [(INTERRUPTED, "KeyboardInterrupt: the kernels that ran were ended"),
                                          (REFUSED, "ValueError: endless is a kernel; a product of yours is a "),
                                          ("int('x')", "Traceback"), ("3 + 'x'", "Traceback"),
                                          ("(lambda y: y)[1, 1](y)", "TypeError: a kernel is launched as "),
                                          ("endless(y, 1)", "ValueError: a kernel is launched with its blocks and th"),
                                          ("endless[1](y, 1)", "LaunchError: endless[1]: a kernel is launched with"),
                                          ("np.allclose(y, 0)", "TypeError: this array is on a card: card.download("),
                                          ("y + np.float32(1)", "TypeError: this array is on a card: card.download("),
                                          ("y.mean()", "AttributeError: no 'mean' here: this array is on a card: card"),
                                          ("y.nothing", "Traceback"), ("json.loads('[')", "Traceback")],
                         ids=["interrupt", "product", "value", "type", "decorator", "bare", "blocks alone", "NumPy",
                              "sum", "mean", "attribute", "kind of value"])
def test_what_ends_a_cell_is_told_briefly(source, said, run_cells):
    """An interrupted kernel and a refused product, without the frames behind them; other errors as Python shows
    them."""
    cells = [nbformat.v4.new_code_cell(text) for text in (ENDLESS, source, "print('on')")]
    run_cells(cells)
    shown, = errors(cells[1])
    assert said in shown and ("Traceback" in said or len(shown.splitlines()) == 1), shown
    assert printed(cells[2]) == "on\n"


def test_arrays_of_numpy_are_refused_where_no_driver_is(monkeypatch):
    """In a sentence that says what a kernel takes."""
    monkeypatch.setattr("kernels.configured.is_available", lambda: False)
    EmulatedCard(0)
    with pytest.raises(LaunchError, match=r"^far_away: none of its arguments is an array of a .*card\.upload\(x\)$"):
        far_away[1, 32](np.zeros(32, np.float32))


@pytest.mark.skipif(cuda.is_available(), reason="a driver is here")
def test_the_way_of_numba_asks_for_a_driver(run_cells):
    """What its tutorials teach is told in a sentence."""
    cells = [nbformat.v4.new_code_cell(text) for text in (
        "import lab, numpy as np\nfrom numba import cuda", "cuda.to_device(np.zeros(3))", "cuda.synchronize()",
        "@cuda.jit('void(float32[:])')\ndef typed(x):\n    x[0] = 1")]
    run_cells(cells)
    for cell in cells[1:]:
        shown, = errors(cell)
        assert "no NVIDIA driver is here" in shown and "card.upload(x)" in shown and len(shown.splitlines()) == 1


def test_a_prediction_that_was_skipped_stops_nothing(run_cells):
    """If its cell was not run, there is no prediction, and the answer is revealed all the same."""
    told_of = nbformat.v4.new_code_cell("lab.reveal(mb_1, 626, 'MB')\nprint('on')")
    run_cells([nbformat.v4.new_code_cell("import lab"), told_of])
    assert errors(told_of) == [] and printed(told_of) == "on\n"
    assert told(told_of) == ["mb 1: 626 MB. You have made no prediction."]


def test_results_that_are_expected(lab):
    wanted = np.arange(6.0).reshape(2, 3)
    lab.expect("a kernel", wanted + 0.9, wanted, 1)
    lab.expect("a kernel", wanted, wanted, 0.1 * (1 + wanted))
    found = wanted.copy()
    found[1, 1:] = np.nan, 7
    with pytest.raises(AssertionError, match=r"a kernel: 2 of 6 results are wrong; \[1, 1\] is nan, not 4\."):
        lab.expect("a kernel", found, wanted, 1)


def test_disturbed_times_are_told(lab, monkeypatch):
    """Once, below the cell that has taken them, where other programs kept the processors busy meanwhile."""
    shown, used = [], iter([(10.0, 50.0, 5.0), (14.0, 57.0, 6.0), (20.0, 60.0, 7.0), (24.0, 64.0, 11.0)])
    monkeypatch.setattr(lab, "display", lambda data, raw: shown.append(data["text/plain"]))
    monkeypatch.setattr(lab, "_used", lambda: np.array(next(used)))
    lab._tell_disturbance(None)             # behind a cell that has taken no times
    lab.timed()
    lab.timed()
    lab._tell_disturbance(None)
    assert len(shown) == 1 and shown[0].startswith("Other programs, those of a container's host too, used 1.5 of ")
    lab.timed()
    lab._tell_disturbance(None)
    assert len(shown) == 1                  # nobody else was there


def test_what_other_programs_use_is_counted(lab):
    before = lab._used()
    worker = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(1.5)
    finally:
        worker.kill()
        worker.wait()
    clock, everyone, own = lab._used() - before
    assert 1.5 <= clock < 60 and own < 0.5 and everyone - own > 0.3


def test_processors_of_others_are_not_counted(lab, monkeypatch, tmp_path):
    """In a container: 4 processors are the machine's, 2 of them ours, and there are others on all four."""
    shown, stat = [], tmp_path / "stat"
    monkeypatch.setattr(lab, "display", lambda data, raw: shown.append(data["text/plain"]))
    monkeypatch.setattr(lab, "STAT", stat)
    monkeypatch.setattr(lab.os, "sysconf", lambda name: 100)
    lines = [f"cpu{n} {100 * seconds} 0 0 900 0 0 0 0 0 0" for n, seconds in enumerate((5, 6, 7, 8))]
    stat.write_text("\n".join(["cpu 2600 0 0 3600 0 0 0 0 0 0", *lines, "intr 12 0 0"]))
    for ours, seconds in ({1, 3}, 6 + 8), ({5, 9}, 5 + 6 + 7 + 8):      # of 5 and 9 a container sees other numbers
        monkeypatch.setattr(lab.os, "sched_getaffinity", lambda process, ours=ours: ours)
        assert lab._used()[1] == seconds
        lab.disturbed_by(1.5)
    assert [re.search(r"used (.*) processors", words)[1] for words in shown] == ["1.5 of 2", "1.5 of 4"]


@notebooks
def test_cells_that_take_times_say_what_disturbed_them(path):
    """With lab.timed, which lab.microseconds and lab.tokens_per_second call, or a function that another cell
    defines."""
    cells = code_cells(read(path))
    takes = re.compile(r"perf_counter\(|token_times|probe\.(saved_or_)?measure")
    own = [name for cell in cells if "lab.timed()" in cell.source
           for name in re.findall(r"^def (\w+)", cell.source, re.M)]
    told = re.compile("|".join([r"lab\.(timed|microseconds|tokens_per_second)\(", *(rf"\b{name}\(" for name in own)]))
    assert [cell.id for cell in cells if has(cell, "varies") and takes.search(cell.source)
            and not told.search(cell.source)] == []


def calls(function):
    """A check that calls its answer in a kernel."""
    @cuda.jit
    def calling(y):
        y[uint32(0)] = function(y[uint32(0)])

    calling[1, 1](EmulatedCard(0).zeros(1, np.uint32))


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
    with pytest.raises(TypeError, match="unsupported operand"):
        lab.attempt(check, lambda: None + 1)
    lab.attempt(check, lambda: None)
    assert capsys.readouterr().out == "not right yet: <lambda> returns nothing: is there a `return`?\n"
    lab.attempt(lambda kernel: kernel[1, 32](), lambda: 4)
    assert capsys.readouterr().out.endswith("this is none. Is @cuda.jit above it?\n")
    lab.attempt(calls, of_python)
    assert capsys.readouterr().out == ("not right yet: calling cannot be compiled: it calls a function of Python: is "
                                       "@cuda.jit(device=True) above that one?\n")
    with pytest.raises(TypeError, match="'int' object is not subscriptable"):       # a slip in Python, no kernel
        lab.attempt(check, lambda: [part[0] for part in [1, 2]])
    lab.attempt(check, lambda levels: 4)
    assert capsys.readouterr().out == ("not right yet: <lambda> is called with 0 arguments: missing a required "
                                       "argument: 'levels'\n")
    lab.attempt(lambda n: check(lambda: n), " 4")
    assert capsys.readouterr().out == "solved\n"
    lab.attempt(check, 4)
    assert capsys.readouterr().out == "not right yet: a function is wanted, and 4 is none\n"
    lab.refuses(check, lambda: 5)
    with pytest.raises(RuntimeError):
        lab.refuses(check, lambda: 4)


if __name__ == "__main__":
    for path in [FOLDER / f"{name}.ipynb" for name in sys.argv[1:]] or NOTEBOOKS:
        nbformat.write(execute(path), path)
        print(path)
