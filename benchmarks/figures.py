"""Figures of benchmarks/results.md by name, so that nobody needs to copy one by hand.

In results.md a comment above a table gives it a name, and says on what and when it was measured:

    <!-- figures: ladder-h100; NVIDIA H100 80GB HBM3, 2026-11-21 -->
    | | µs | TOPS |
    |---|---:|---:|
    | 3 registers | 587 | 58.5 |

`figure("ladder-h100", "3 registers", "TOPS")` is 58.5. A page that says this number quotes it, in one of two ways.
Readers do not see the comments, and tests/test_figures.py compares every quote with its source:

- in a sentence or a cell: `58.5<!-- = ladder-h100 | 3 registers | TOPS -->`. Of a cell with several numbers the n-th is
  meant by a fourth part, `| 2`. Inside a table the bars are written `\\|`, or they would end the cell. The quote may
  have fewer digits than the source: 59 or 58.5 for 58.49.
- a table, whole or a part of its rows and columns, under the comment `<!-- figures: ladder-h100 -->`. Its columns may
  come from several tables, `<!-- figures: kv-bytes + kv-kl -->`, in which they have different names. A cell is empty
  where its table has no such row.
"""

import re
from pathlib import Path

RESULTS = Path(__file__).with_name("results.md")
_MARK = re.compile(r"^<!-- figures: ([\w-]+(?: \+ [\w-]+)*)(?:; ([^\n]*?))? -->\n((?:\|.*\n?)+)", re.M)
_QUOTE = re.compile(r"(\d[\d,]*(?:\.\d+)?)\**<!-- = (.*?) -->")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def marked_tables(text):
    """[(name, where and when, {row: {column: cell}})] of the tables of a page that have a name."""
    found = []
    for name, source, lines in _MARK.findall(text):
        head, _, *rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines.splitlines()]
        found.append((name, source, {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}))
    return found


def record(name):
    """(where and when, {row: {column: cell}}) of a table of results.md. LookupError: there is none of this name."""
    for found, source, table in marked_tables(RESULTS.read_text(encoding="utf-8")):
        if found == name:
            return source, table
    raise LookupError(f"benchmarks/results.md has no table of figures named {name}")


def numbers(cell):
    """The numbers of a cell, as text: "3,378, in passes of 768" has "3,378" and "768"."""
    return [number.rstrip(",") for number in _NUMBER.findall(cell)]


def figure(name, row, column, n=1):
    """The n-th number of a cell of a table of results.md. LookupError: there is no such table, row, column or
    number."""
    _, table = record(name)
    try:
        return float(numbers(table[row][column])[n - 1].replace(",", ""))
    except (KeyError, IndexError):
        raise LookupError(f"the table {name} of benchmarks/results.md has no number {n} in row {row!r}, column "
                          f"{column!r}; its rows are {', '.join(table)}") from None


def wrong_quotes(text):
    """A sentence for each figure that a page quotes and that its source does not say."""
    wrong = []
    for quoted, what in _QUOTE.findall(text):
        quoted, (name, row, column, *n) = quoted.rstrip(","), [part.strip(" \\") for part in what.split("|")]
        true = figure(name, row, column, *map(int, n))
        if not rounds_to(true, quoted):
            wrong.append(f"{quoted} is quoted, but {what} is {true:,}")
    for name, _, table in marked_tables(text):
        sources = [record(one)[1] for one in name.split(" + ")]
        for row, cells in table.items():
            for column, cell in cells.items():
                true = true_cell(sources, row, column)
                if true != cell:
                    wrong.append(f"{cell!r} is quoted, but {name} | {row} | {column} is {true!r}")
    return wrong


def true_cell(sources, row, column):
    """The cell of the one of these tables that has such a column. None: no table has it, or the only table lacks the
    row."""
    for table in sources:
        if any(column in cells for cells in table.values()):
            return table.get(row, {}).get(column, "" if len(sources) > 1 else None)
    return None


def n_quotes(text):
    return len(_QUOTE.findall(text)) + len(marked_tables(text))


def rounds_to(true, quoted):
    """Whether a number, rounded to the digits of `quoted`, is `quoted`."""
    digits = len(quoted.partition(".")[2])
    return abs(true - float(quoted.replace(",", ""))) <= 0.5 * 10.0**-digits * (1 + 1e-9)
