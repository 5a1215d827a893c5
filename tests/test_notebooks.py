"""Runs the notebooks and compares what they print with what they keep.

`python tests/test_notebooks.py` runs them all and keeps the new outputs: after a change that they should show.
"""

from pathlib import Path

import nbclient
import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SECONDS = 300                           # for one cell: the first use of a kernel compiles it
VARIES = "varies"                       # tag of the cells whose text depends on the machine or the compiler


def execute(path):
    """The notebook with fresh outputs. Raises CellExecutionError where a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=SECONDS, record_timing=False,
                            resources={"metadata": {"path": str(path.parent)}}).execute()
    return notebook


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell):
    """What the cell prints; None where that may differ."""
    if VARIES in cell.metadata.get("tags", ()):
        return None
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def n_pictures(cell):
    return sum("image/png" in output.get("data", ()) for output in cell.outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_kept(path):
    cells = code_cells(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "not run from top to bottom"
    assert sum(map(n_pictures, cells)), "no plot is kept"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_as_kept(path):
    kept, fresh = code_cells(nbformat.read(path, as_version=4)), code_cells(execute(path))
    for before, now in zip(kept, fresh, strict=True):
        assert printed(now) == printed(before), f"stale (see the top of {Path(__file__).name}): {now.source}"
        assert n_pictures(now) == n_pictures(before)


if __name__ == "__main__":
    for path in NOTEBOOKS:
        nbformat.write(execute(path), path)
        print(path)
