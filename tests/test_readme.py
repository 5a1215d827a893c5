"""What README.md and the pages in docs/ promise: links lead somewhere, commands and snippets do what they say, and
tables of --plan are those of today. Their figures are compared by tests/test_figures.py."""

import base64
import contextlib
import io
import json
import re
import shlex
import sys
import urllib.request
from pathlib import Path

import pytest
from PIL import Image

import qengine
from api.errors import MAX_SEEING
from api.http import serving
from api.service import create_app
from cli.main import main
from cli.options import build_parser
from kernels.formats import FORMATS

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8")
         for file in (README, *sorted((ROOT / "docs").glob("*.md")))}
RESULTS = (ROOT / "benchmarks" / "results.md").read_text(encoding="utf-8")
LINKED = PAGES | {name: (ROOT / name).read_text(encoding="utf-8")
                  for name in ("models/README.md", "notebooks/README.md", "notebooks/glossary.md", "api/FIELDS.md",
                               "benchmarks/results.md")}
# <!-- name --> and, on the next line, a block of code; of every page.
FOUND = re.findall(r"^<!-- (\w+) -->\n```\w+\n(.*?)\n```$", "\n".join(PAGES.values()), re.M | re.S)
BLOCKS = dict(FOUND)
TESTED = {"tests", "generate", "transcript", "serve", "curl", "sees", "openai", "schema", "tools", "notebook", "plan",
          "planned", "engine", "look", "patch", "counting", "approximate"}


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


# ---- pages and links ---------------------------------------------------------------------------------------


def test_marked_blocks_have_names_of_their_own_and_tests():
    assert len(FOUND) == len(BLOCKS) and BLOCKS.keys() == TESTED


def test_the_readme_is_short_and_names_every_page():
    assert len(PAGES["README.md"].splitlines()) <= 398
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)", PAGES["README.md"]))
    assert linked == PAGES.keys() - {"README.md"} and len(linked) >= 6


def test_the_picture_of_the_page_is_there_in_light_and_dark():
    names = re.findall(r'src(?:set)?="([^"]+)"', PAGES["README.md"])
    sizes = [Image.open(ROOT / name).size for name in names]
    assert len(names) == 2 and sizes[0] == sizes[1] and sizes[0][0] >= 1000
    assert all((ROOT / name).stat().st_size < 150_000 for name in names)


def targets_of(path):
    """What a page links to in this repository, as (file, heading or ""); the file "" is the page itself."""
    found = [target.partition("#") for target in re.findall(r"\]\(([^)\s]+)\)", LINKED[path]) if "://" not in target]
    return [(file, heading) for file, _, heading in found]


@pytest.mark.parametrize("path", LINKED)
def test_links(path):
    folder = (ROOT / path).parent
    assert [file for file, _ in targets_of(path) if not (folder / file).exists()] == []


@pytest.mark.parametrize("path, at_least", [("README.md", 25), ("models/README.md", 6), ("benchmarks/results.md", 30)])
def test_there_are_links(path, at_least):
    assert len(targets_of(path)) >= at_least


def anchors(text):
    """The names by which GitHub's pages link to headings: of each heading, but for blocks of code."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", LINKED)
def test_links_to_headings(path):
    folder = (ROOT / path).parent
    assert [(file, heading) for file, heading in targets_of(path) if heading and heading not in anchors(
        (folder / file).read_text(encoding="utf-8") if file else LINKED[path])] == []


def test_sections_of_the_results_that_are_named_exist():
    """Docstrings refer to sections of benchmarks/results.md by their names."""
    sections = anchors(RESULTS)
    named = {name for folder in ("kernels", "engine") for file in (ROOT / folder).rglob("*.py")
             for name in re.findall(r"results\.md,\s+(?:sections?\s+)?(\w+)", file.read_text())}
    assert len(named) >= 6 and named <= sections


@pytest.mark.parametrize("text", PAGES.values(), ids=PAGES)
def test_files_named_in_text_exist(text):
    named = re.findall(r"`((?:kernels|models|tests|notebooks)/[\w./]+)`", text)
    modules = re.findall(r"python -m ((?:kernels|benchmarks)\.\w+)", text)
    files = named + [f"{module.replace('.', '/')}.py" for module in modules]
    assert [name for name in files if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("text", PAGES.values(), ids=PAGES)
def test_every_option_is_known(text):
    """No page mentions an option that --help does not."""
    known = build_parser().format_help()
    assert [option for option in re.findall(r"`(--[\w-]+)", text) if option not in known] == []


def test_commands_for_several_machines_are_taken():
    lines = [line for text in PAGES.values() for line in re.findall(r"^.*qengine\.py .* --ray .*$", text, re.M)]
    assert {"auto", "local"} == {build_parser().parse_args(qengine_arguments(line)).ray for line in lines}


def test_the_unit_and_the_proxy_of_the_page_on_serving():
    """Their options are taken, and their times and sizes are those of the server."""
    text = PAGES["docs/serving.md"]
    unit = dict(re.findall(r"^(\w+)=(.*)$", text, re.M))
    options = build_parser().parse_args(qengine_arguments(unit["ExecStart"]))
    assert options.api_key_file == "${CREDENTIALS_DIRECTORY}/keys" and unit["LoadCredential"].startswith("keys:")
    assert int(unit["TimeoutStopSec"]) == options.drain + 15
    assert unit["Environment"] == f"XDG_CACHE_HOME=/var/cache/{unit['CacheDirectory']}"
    assert f"proxy_pass http://{options.host}:{options.serve}/;" in text
    assert f"client_max_body_size {MAX_SEEING >> 20}m;" in text


def test_names_that_pages_and_notebooks_use_are_offered():
    """`__all__` says what a user of the module may rely on."""
    texts = [*PAGES.values(), (ROOT / "notebooks" / "lab.py").read_text()]
    for file in (ROOT / "notebooks").glob("*.ipynb"):
        texts += ["".join(cell["source"]) for cell in json.loads(file.read_text())["cells"]]
    used = {name for text in texts for name in re.findall(r"\bqengine\.([A-Za-z_]\w*)", text)}
    assert used - {"py"} <= set(qengine.__all__)
    assert len(set(qengine.__all__)) == len(qengine.__all__)
    assert all(hasattr(qengine, name) for name in qengine.__all__)


# ---- tables ------------------------------------------------------------------------------------------------


def table_rows(text):
    """The rows of Markdown tables: lists of cells."""
    lines = [line.strip("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def section_of(text, title):
    """The text under the heading that begins with these words, up to the next heading."""
    return re.split(r"^#+ ", text.split(f"# {title}", 1)[1], maxsplit=1, flags=re.M)[0]


def marked_table(page, name):
    """The rows of the table under the comment <!-- name -->, without its head."""
    return table_rows(PAGES[page].partition(f"<!-- {name} -->")[2].partition("\n\n")[0])[1:]


def test_the_suite_on_a_real_card_is_that_of_the_results():
    """A section of benchmarks/results.md is the source of the figures and of their date."""
    date, passed, skipped = re.search(r"tests that use a card ran on an H100 \(([\d-]+)\)[^.]*: ([\d,]+) passed, "
                                      r"(\d+)\s+were\s+skipped", re.sub(r"\s+", " ", PAGES["README.md"])).groups()
    source, = (section for section in RESULTS.split("\n## ") if f"{passed} passed, {skipped} skipped" in section)
    assert date in source


def test_prompts_on_tensor_cores_are_those_of_the_results():
    """The figures of each row, whose names say the same in other words."""
    rows = table_rows(section_of(PAGES["docs/performance.md"], "Tensor cores where they are whole"))[1:]
    source = [row[1:] for row in table_rows(section_of(RESULTS, "Prompts on tensor cores"))]
    assert len(rows) == 4 and all(row[1:] in source for row in rows)


def test_the_table_of_formats_is_that_of_the_results():
    """A row for each format: bits, error and KL from one section of benchmarks/results.md, speed from another."""
    accuracy, _, _ = section_of(RESULTS, "What a format costs").partition("**Loading**")
    errors = {cells[0]: cells[1:4] for cells in table_rows(accuracy)}
    speeds = {cells[0]: cells[1:] for cells in table_rows(section_of(RESULTS, "A 9B in every format"))}
    by_name = {cells[0]: cells[1:] for cells in marked_table("docs/models.md", "formats") if cells[0] in FORMATS}
    assert by_name.keys() == FORMATS.keys()
    for name, format in FORMATS.items():
        bits = f"{8 * format.file_bytes / format.file_block:.2f}"
        assert by_name[name] == [*errors[name], *speeds[name]]
        assert by_name[name][0] == bits


FITS = marked_table("README.md", "fits")


def test_there_are_rows_of_what_fits():
    assert len(FITS) >= 6


@pytest.mark.parametrize("row", FITS, ids=lambda row: row[1])
def test_what_fits_is_what_plan_says(capsys, row):
    """The weights of each card, and the longest context with halves and with the format that the head of the table
    names."""
    n_cards, model, weights, *contexts = row
    assert main(["-m", model.strip("`"), "--plan", "--memory", "15.5", "--card",
                 f"emulated:{','.join(['cmp-100-210'] * int(n_cards))}"]) == 0
    said = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in said.splitlines() if line}
    found = re.findall(r"^emulated card \d+ +\d+ - \d+ +([\d.]+) GB", said, re.M)
    assert " + ".join(found) + " GB" == weights
    assert [lines["float16"][-1], lines["q8+3"][-1]] == contexts


def test_plan(capsys):
    assert main(qengine_arguments(BLOCKS["plan"])) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == BLOCKS["planned"].splitlines()


# ---- commands and snippets ---------------------------------------------------------------------------------


def test_setup_is_the_same_for_generating_and_testing():
    setup = "python3 -m venv .venv && .venv/bin/pip install -q -r requirements.txt && .venv/bin/python "
    assert BLOCKS["tests"] == setup + "-m pytest"
    assert " ".join(BLOCKS["generate"].split()) == setup + "qengine.py --chat"


def test_conversation(capsys, monkeypatch):
    """The first command gives the answers of the transcript to its questions."""
    monkeypatch.chdir(ROOT)
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


def test_snippets_of_the_page_on_python(capsys, monkeypatch):
    """One after the other, as a reader runs them."""
    monkeypatch.setattr("engine.own_products.ANSWER_TOKENS", 8)
    names, card = {}, 'card="emulated", progress=False, '
    try:
        exec(BLOCKS["engine"].replace("ctx=512", card + "ctx=512"), names)
        exec(BLOCKS["look"], names)
        n, hidden = names["seen"]["layer 2"].shape
        assert hidden == names["engine"].config.hidden_dim and names["seen"]["logits"].shape[0] == n
        exec(BLOCKS["patch"], names)
        assert abs(names["changed"]["logits"] - names["seen"]["logits"]).max() > 0
        exec(BLOCKS["counting"], names)
        exec(BLOCKS["approximate"], names)
    finally:
        names["engine"].close()
    said = capsys.readouterr().out
    for words in "<qengine synthetic:tiny on", "warp instructions", "error of gemm_tiled", "the same text":
        assert words in said


def test_openai_snippet(address, capsys):
    exec(re.sub(r"http://[^\"]+", address, BLOCKS["openai"]), {})
    assert "어텐션" in capsys.readouterr().out


def printed(capsys, name, address):
    """The lines that a snippet for a server at port 8080 prints."""
    exec(BLOCKS[name].replace("http://127.0.0.1:8080/v1", address), {})
    return capsys.readouterr().out.splitlines()


def test_schema_snippet(address, capsys):
    """The schema has to stand in the message: without it, the answer is what the page says."""
    assert printed(capsys, "schema", address) == ['{"name": "Tom", "age": 41}']
    shown = r'\n" + json.dumps(schema)}'
    assert BLOCKS["schema"].count(shown) == 1
    blind = BLOCKS["schema"].replace(shown, '"}').replace("http://127.0.0.1:8080/v1", address)
    exec(blind, {})
    assert json.loads(capsys.readouterr().out)["name"] == "unknown"


def test_tools_snippet(address, capsys):
    call, answer = printed(capsys, "tools", address)
    assert call == str([("get_weather", '{"city": "Seoul"}')])
    assert "21" in answer and "clear" in answer


def with_files(command):
    """A shell command with each file in place of the $(base64 -w0 FILE) that reads it."""
    return re.sub(r"\$\(base64 -w0 ([\w./-]+)\)",
                  lambda found: base64.b64encode((ROOT / found[1]).read_bytes()).decode(), command)


@pytest.mark.parametrize("name, words", [("curl", "8-bit integers"), ("sees", "3")])
def test_curl(address, name, words):
    command = shlex.split(with_files(BLOCKS[name]))
    url, header, body = command[1], command[command.index("-H") + 1], command[command.index("-d") + 1]
    request = urllib.request.Request(re.sub("http://.*/v1", address, url), body.encode(),
                                     dict([header.split(": ")]))
    with contextlib.closing(urllib.request.urlopen(request)) as answer:
        assert words in json.load(answer)["choices"][0]["message"]["content"]
