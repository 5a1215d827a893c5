"""One source of figures: what pages and notebooks quote from benchmarks/results.md is what stands there."""

from pathlib import Path

import nbformat
import pytest

from benchmarks import figures

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(path for pattern in ("*.md", "docs/**/*.md", "models/*.md", "notebooks/*.md", "notebooks/*.ipynb")
               for path in ROOT.glob(pattern))


def text_of(path):
    """What readers read: of a notebook its text cells."""
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    return "\n\n".join(cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "markdown")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_quotes(path):
    assert figures.wrong_quotes(text_of(path)) == []


def test_there_are_quotes():
    assert sum(figures.n_quotes(text_of(path)) for path in PAGES) >= 20


def test_tables_have_names_of_their_own():
    """And each says on what it was measured, and when."""
    tables = figures.marked_tables(figures.RESULTS.read_text(encoding="utf-8"))
    names = [name for name, _, _ in tables]
    assert len(names) >= 8 and len(set(names)) == len(names)
    assert [name for name, source, _ in tables if "20" not in source] == []


@pytest.fixture
def results(tmp_path, monkeypatch):
    file = tmp_path / "results.md"
    file.write_text("""# Measured
<!-- figures: loop; a card, 2026-11-21 -->
| | µs | TOPS |
|---|---:|---:|
| first | 1,234.5 | 6, then 7.25 |
| second | 8 | |

Words.

<!-- figures: sizes; by count, 2026-11-21 -->
| | bytes |
|---|---:|
| first | 16 |
""", encoding="utf-8")
    monkeypatch.setattr(figures, "RESULTS", file)


def test_figures_by_name(results):
    assert figures.figure("loop", "first", "µs") == 1234.5
    assert figures.figure("loop", "first", "TOPS", 2) == 7.25
    for place in (("lop", "first", "µs"), ("loop", "third", "µs"), ("loop", "first", "GB"), ("loop", "second", "TOPS"),
                  ("loop", "first", "TOPS", 3)):
        with pytest.raises(LookupError):
            figures.figure(*place)


def test_wrong_quotes_are_found(results):
    right = """It takes 1,234.5<!-- = loop | first | µs --> µs, or **1,235**<!-- = loop | first | µs -->, with
7.3<!-- = loop | first | TOPS | 2 --> TOPS.

<!-- figures: loop -->
| | TOPS |
|---|---|
| first | 6, then 7.25 |
"""
    assert figures.wrong_quotes(right) == [] and figures.n_quotes(right) == 4
    for old, new in (("1,234.5", "1,234.6"), ("1,235", "1,236"), ("7.3<", "7.1<"), ("then 7.25 |", "then 7.3 |"),
                     ("| first | 6", "| firs | 6"), ("| | TOPS", "| | GB")):
        assert len(figures.wrong_quotes(right.replace(old, new))) == 1, new


def test_a_table_of_columns_of_several_tables(results):
    right = """<!-- figures: loop + sizes -->
| | bytes | µs |
|---|---|---|
| first | 16 | 1,234.5 |
| second | | 8 |
"""
    assert figures.wrong_quotes(right) == [] and figures.n_quotes(right) == 1
    for old, new in (("16", "17"), ("| 8", "| 9"), ("| |", "| 4 |"), ("bytes", "GB"), ("second", "third")):
        assert figures.wrong_quotes(right.replace(old, new)), new


@pytest.mark.parametrize("true, quoted, right", [(1.712, "1.71", True), (1.715, "1.71", True), (1.716, "1.71", False),
                                                 (58.5, "59", True), (58.5, "58", True), (58.4, "59", False),
                                                 (1234.0, "1,234", True), (0.96, "1", True)])
def test_rounding(true, quoted, right):
    assert figures.rounds_to(true, quoted) == right
