"""One source of figures: what pages and notebooks quote from benchmarks/results.md is what stands there."""

import math
import re
from pathlib import Path

import nbformat
import pytest

from benchmarks import figures
from engine.gguf import GGUF
from engine.limits import DEFAULT_EYES, DEFAULT_MODEL

ROOT = Path(__file__).resolve().parents[1]
CARD = (ROOT / "models" / "README.md").read_text(encoding="utf-8")
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


# ---- the model card ----------------------------------------------------------------------------------------


def test_the_model_card_quotes_its_scores():
    """Those that results.md has. Two tables there have some of them: they say the same."""
    scores, kv = (figures.record(name)[1] for name in ("scores", "kv-scores"))
    assert [row for row in scores if f"<!-- = scores \\| {row} \\| now -->" not in CARD] == []
    for row in "facts", "tools", "recall, 1,000 tokens", "recall, 16,384 tokens":
        assert scores[row]["now"] == kv["float16"][re.sub(", (.*) tokens", r" \1", row)]
    for row, cells in scores.items():
        former, change = cells["2026-11-21"], cells["change since 2026-11-21"].strip("*")
        assert not former or "perplexity" in row or float(change) == round(float(cells["now"]) - float(former), 1)


def scores_of_the_card():
    """(name, {column: cell}) of each row of a score, without its quotes' marks. The name may say how many examples
    there were, and so may the head of its table."""
    text = re.sub("<!--.*?-->", "", CARD.partition("## Scores")[2].partition("\n## ")[0])
    for lines in re.findall(r"(?:^\|.*\n)+", text, re.M):
        head, _, *rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines.splitlines()]
        for name, *cells in rows:
            yield f"{name}; {head[0]}", dict(zip(head[1:], cells))


def n_examples(name, cells):
    """How many examples a score is of: "400", "30 of 50" of each language, or in the name."""
    halves = [re.fullmatch(r"\d+ of (\d+)", cells[language]) for language in ("English", "Korean")]
    said = cells.get("n") or re.findall(r"n = ([\d,]+)", name)[:1]
    return sum(int(half[1]) for half in halves) if all(halves) else int("".join(said).replace(",", ""))


def test_scores_of_the_model_card_agree_with_themselves():
    """Standard errors with the number of examples, languages with the whole, and goals with what is said of them."""
    n_errors = n_goals = 0
    for name, cells in scores_of_the_card():
        right, _, error = cells["right"].partition(" ± ")
        share = float(right) / 100
        if error:
            n_errors += 1
            n = n_examples(name, cells)
            wrong_by = 0.05 / 100           # what was rounded away
            assert any(figures.rounds_to(100 * math.sqrt(p * (1 - p) / n), error)
                       for p in (share - wrong_by, share, share + wrong_by)), name
        if re.fullmatch(r"[\d.]+", cells["English"]):
            halves = sorted(float(cells[language]) for language in ("English", "Korean"))
            assert halves[0] <= float(right) <= halves[1], name
        if re.fullmatch(r"[\d.]+", cells["goal"]):
            n_goals += 1
            assert cells["met"].startswith("yes") == (float(right) >= float(cells["goal"])), name
    assert n_errors >= 30 and n_goals >= 12


def test_the_model_card_describes_its_files():
    model, eyes = GGUF(DEFAULT_MODEL), GGUF(DEFAULT_EYES)
    n = {name: math.prod(tensor.shape) for name, tensor in model.tensors.items()}
    draft = sum(size for name, size in n.items() if name.startswith("blk.8."))
    tower = sum(math.prod(tensor.shape) for name, tensor in eyes.tensors.items()
                if name != "v.patch_embd.weight.1")         # two moments of a video: what is trained is their sum
    for said in (f"{sum(n.values()):,}: {sum(n.values()) - draft:,} of the model ({n['token_embd.weight']:,} of them",
                 f"and {draft:,} of the draft block", f"| {tower:,} parameters: 6 blocks",
                 f"`{DEFAULT_MODEL.name}`, {DEFAULT_MODEL.stat().st_size / 1e6:.1f} MB, Q8_0",
                 f"`{DEFAULT_EYES.name}`, {DEFAULT_EYES.stat().st_size / 1e6:.1f} MB,",
                 f"| {len(model.metadata['tokenizer.ggml.tokens']):,}: byte-level BPE",
                 f"| {model.get('qwen35.context_length', int):,} tokens; trained on"):
        assert said in CARD, said


# ---- the marks ---------------------------------------------------------------------------------------------


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
