"""What the README promises: its links lead somewhere, and its commands and snippets do what it says."""

import contextlib
import io
import json
import re
import shlex
import sys
import urllib.request
from pathlib import Path

import pytest

import qengine
from api.http import serving
from api.service import create_app
from cli.main import main
from cli.options import build_parser
from kernels.formats import FORMATS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
# <!-- name --> and, on the next line, a block of code.
BLOCKS = dict(re.findall(r"^<!-- (\w+) -->\n```\w+\n(.*?)\n```$", README, re.M | re.S))


def qengine_arguments(command):
    """The arguments that a shell command gives to qengine.py."""
    return shlex.split(command.partition("qengine.py ")[2])


@pytest.fixture(scope="module")
def address():
    """A server of the README's model on a free port."""
    arguments = qengine_arguments(BLOCKS["serve"])
    options = build_parser().parse_args(arguments)
    engine = qengine.load(options.model, card="emulated", ctx=512, progress=False)
    assert f":{options.serve}/v1" in BLOCKS["openai"] and f":{options.serve}/v1" in BLOCKS["curl"]
    with serving(create_app(engine), options.host, 0) as port:
        yield f"http://{options.host}:{port}/v1"
    engine.close()


@pytest.mark.parametrize("path, at_least", [("README.md", 15), ("models/README.md", 6)])
def test_links(path, at_least):
    page = ROOT / path
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in target]
    assert len(targets) >= at_least
    assert [target for target in targets if not (page.parent / target.partition("#")[0]).exists()] == []


def anchors(text):
    """The names by which GitHub's pages link to headings: of each heading, but for blocks of code."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path, at_least", [("README.md", 4), ("benchmarks/results.md", 30)])
def test_links_to_headings(path, at_least):
    page = ROOT / path
    found = re.findall(r"\]\(([^)]*#[^)]*)\)", page.read_text())
    targets = [target.split("#") for target in found if "://" not in target]
    assert len(targets) >= at_least
    assert [[file, name] for file, name in targets
            if name not in anchors((page.parent / file if file else page).read_text())] == []


def test_sections_of_the_results_that_are_named_exist():
    """Docstrings refer to sections of benchmarks/results.md by their names."""
    sections = anchors((ROOT / "benchmarks" / "results.md").read_text())
    named = {name for folder in ("kernels", "engine") for file in (ROOT / folder).rglob("*.py")
             for name in re.findall(r"results\.md,\s+(?:section\s+)?(\w+)", file.read_text())}
    assert len(named) >= 6 and named <= sections


def test_the_suite_on_a_real_card_is_that_of_the_results():
    """A section of benchmarks/results.md is the source of the figures and of their date."""
    sections = (ROOT / "benchmarks" / "results.md").read_text().split("\n## ")
    date, passed, skipped = re.search(r"tests that use a card ran on an H100 \(([\d-]+)\)[^.]*: ([\d,]+) passed, "
                                      r"(\d+)\s+were\s+skipped", README).groups()
    source, = (section for section in sections if f"{passed} passed, {skipped} skipped" in section)
    assert date in source


def table_rows(text):
    """The rows of Markdown tables: lists of cells."""
    lines = [line.strip("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def section_of(text, title):
    """The text under the heading that begins with these words, up to the next heading."""
    return re.split(r"^#+ ", text.split(f"# {title}", 1)[1], maxsplit=1, flags=re.M)[0]


def test_prompts_on_tensor_cores_are_those_of_the_results():
    """The figures of each row, whose names say the same in other words."""
    results = (ROOT / "benchmarks" / "results.md").read_text()
    rows = table_rows(section_of(README, "Tensor cores where they are whole"))[1:]
    source = [row[1:] for row in table_rows(section_of(results, "Prompts on tensor cores"))]
    assert len(rows) == 4 and all(row[1:] in source for row in rows)


def test_the_table_of_formats_is_that_of_the_results():
    """A row for each format: bits, error and KL from one section of benchmarks/results.md, speed from another."""
    results = (ROOT / "benchmarks" / "results.md").read_text()
    accuracy, _, _ = section_of(results, "What a format costs").partition("**Loading**")
    errors = {cells[0]: cells[1:4] for cells in table_rows(accuracy)}
    speeds = {cells[0]: cells[1:] for cells in table_rows(section_of(results, "A 9B in every format"))}
    found = table_rows(README.partition("<!-- formats -->")[2].partition("\n\n")[0])
    by_name = {cells[0]: cells[1:] for cells in found if cells[0] in FORMATS}
    assert by_name.keys() == FORMATS.keys()
    for name, format in FORMATS.items():
        bits = f"{8 * format.file_bytes / format.file_block:.2f}"
        assert by_name[name] == [*errors[name], *speeds[name]]
        assert by_name[name][0] == bits


def test_files_named_in_text_exist():
    named = re.findall(r"`((?:kernels|models|tests|notebooks)/[\w./]+)`", README)
    modules = [f"{module.replace('.', '/')}.py" for module in re.findall(r"python -m (kernels\.\w+)", README)]
    assert [name for name in named + modules if not (ROOT / name).exists()] == []


def test_setup_is_the_same_for_generating_and_testing():
    setup = "python3 -m venv .venv && .venv/bin/pip install -q -r requirements.txt && .venv/bin/python "
    assert BLOCKS["tests"] == setup + "-m pytest"
    assert BLOCKS["generate"] == setup + "qengine.py --chat"


def test_conversation(capsys, monkeypatch):
    """The first command gives the answers of the transcript to its questions."""
    lines = BLOCKS["transcript"].splitlines()
    questions = [line.removeprefix("> ") for line in lines if line.startswith("> ")]
    typed = io.TextIOWrapper(io.BytesIO("\n".join(questions).encode()), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", typed)
    assert main(qengine_arguments(BLOCKS["generate"])) == 0
    assert capsys.readouterr().out.splitlines() == [line for line in lines if not line.startswith("> ")]


def test_notebook_snippet(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    names = {}
    exec(BLOCKS["notebook"], names)
    names["engine"].close()
    assert "bandwidth" in capsys.readouterr().out


def test_openai_snippet(address, capsys):
    exec(re.sub(r"http://[^\"]+", address, BLOCKS["openai"]), {})
    assert "어텐션" in capsys.readouterr().out


def test_curl(address):
    command = shlex.split(BLOCKS["curl"])
    url, header, body = command[1], command[command.index("-H") + 1], command[command.index("-d") + 1]
    request = urllib.request.Request(re.sub("http://.*/v1", address, url), body.encode(),
                                     dict([header.split(": ")]))
    with contextlib.closing(urllib.request.urlopen(request)) as answer:
        assert "8-bit integers" in json.load(answer)["choices"][0]["message"]["content"]


def test_plan(capsys):
    assert main(qengine_arguments(BLOCKS["plan"])) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == BLOCKS["planned"].splitlines()


def test_every_option_is_known():
    """The README mentions no option that --help does not."""
    text = build_parser().format_help()
    mentioned = set(re.findall(r"`(--[\w-]+)", README))
    assert mentioned and [option for option in mentioned if option not in text] == []


def test_names_that_the_readme_and_the_notebooks_use_are_offered():
    """`__all__` says what a user of the module may rely on."""
    used = set()
    for file in (ROOT / "README.md", ROOT / "notebooks" / "lab.py"):
        used |= set(re.findall(r"\bqengine\.([A-Za-z_]\w*)", file.read_text()))
    for file in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in json.loads(file.read_text())["cells"]:
            used |= set(re.findall(r"\bqengine\.([A-Za-z_]\w*)", "".join(cell["source"])))
    assert used - {"py"} <= set(qengine.__all__)
    assert len(set(qengine.__all__)) == len(qengine.__all__)
    assert all(hasattr(qengine, name) for name in qengine.__all__)
