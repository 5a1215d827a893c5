"""The house: which room imports which, what qengine offers by name, and what an engine offers a server."""

import ast
import inspect
import json
import re
from pathlib import Path

import pytest

import qengine
from engine.text_engine import TextEngine
from tests.clients import OFFERED, Offered
from tests.paced import PacedEngine
from tests.scripted import ScriptedEngine
from tests.tiny import ROOT, tiny_engine

# What each room may import of the others. `python qengine.py` hands over to cli: the one arrow upwards.
ARROWS = {"kernels": set(), "engine": {"kernels"}, "api": {"engine", "kernels"}, "qengine": {"engine", "kernels", "cli"},
          "cli": {"qengine", "api", "engine", "kernels"}}


def modules() -> dict[str, Path]:
    """The Python files of the rooms by their module names."""
    files = [ROOT / "qengine.py", *(file for room in ARROWS for file in (ROOT / room).rglob("*.py"))]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imports_of(name: str, file: Path, known) -> set[str]:
    """The modules of the house that a module imports, anywhere in its text."""
    found = set()
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[:len(package.split(".")) - (node.level - 1)] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:        # a module of the package, or a name in it
                found.add(f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base)
    return found & set(known)


def test_rooms_import_only_rooms_below_them():
    known = modules()
    for name, file in known.items():
        room = name.partition(".")[0]
        rooms = {one.partition(".")[0] for one in imports_of(name, file, known)} - {room}
        assert rooms <= ARROWS[room], name


def test_only_the_start_of_qengine_imports_cli():
    """It stands under `if __name__ == "__main__"`, before all else that is imported but Python's own."""
    body = ast.parse((ROOT / "qengine.py").read_text()).body
    first = next(i for i, node in enumerate(body) if isinstance(node, ast.If))
    assert ast.unparse(body[first].test) == "__name__ == '__main__'" and "cli.main" in ast.unparse(body[first])
    assert not any("cli" in ast.unparse(node) for i, node in enumerate(body)
                   if i != first and isinstance(node, ast.Import | ast.ImportFrom))
    assert [ast.unparse(node) for node in body[:first] if not isinstance(node, ast.Expr)] == [
        "import os", "import signal", "import sys"]


@pytest.mark.parametrize("room", ["api", "cli", "engine"])
def test_no_circles_of_imports(room):
    known = {name: file for name, file in modules().items() if name.partition(".")[0] == room}
    arrows = {name: imports_of(name, file, known) - {room} for name, file in known.items() if name != room}
    while free := [name for name, others in arrows.items() if not others & arrows.keys()]:
        for name in free:
            del arrows[name]
    assert arrows == {}


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


# ---- what an engine offers a server ------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tiny_engine, ScriptedEngine, PacedEngine])
def test_engines_offer_what_a_server_uses(make):
    """Each of its own: nothing is inherited from TextEngine, which only describes. The tests of the protocols use
    engines behind `Offered`, so that a server that used more would be noticed there."""
    engine = make()
    assert TextEngine in type(engine).__mro__ and {"submit", "tokenizer", "reason", "count_pipes"} <= OFFERED
    for name in OFFERED:
        inspect.getattr_static(engine, name)
        described = vars(TextEngine).get(name)
        offered = inspect.getattr_static(type(engine), name, None)
        assert described is None or offered is not described, name
        if described is not None:
            assert inspect.signature(offered).parameters.keys() == inspect.signature(described).parameters.keys()


def test_a_server_that_uses_more_of_an_engine_is_noticed():
    engine = Offered(tiny_engine())
    assert engine.name == tiny_engine().name
    with pytest.raises(AssertionError, match="'scheduler'"):
        engine.scheduler.thread
