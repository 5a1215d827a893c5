"""`pip install -e .`: what pyproject.toml says, and, with -m slow, an installation in an environment of its own.

    python -m pytest -m slow tests/test_install.py
"""

import subprocess
import tomllib
import venv
from pathlib import Path

import numpy
import pytest

from engine.limits import VERSION
from tests.tiny import ROOT


def settings():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_command_is_the_command_line():
    from cli.main import run_process
    module, _, function = settings()["project"]["scripts"]["qengine"].partition(":")
    assert (module, function) == (run_process.__module__, run_process.__name__)


def test_what_is_needed_to_run_is_what_requirements_say():
    running = (ROOT / "requirements.txt").read_text().partition("# Tests and the notebooks")[0]
    lines = [line.partition("#")[0].strip() for line in running.splitlines()]
    assert settings()["project"]["dependencies"] == [line for line in lines if line]


def test_every_room_that_runs_is_installed():
    found = settings()["tool"]["setuptools"]
    rooms = {pattern.removesuffix("*") for pattern in found["packages"]["find"]["include"]}
    assert rooms == {"api", "cli", "engine", "kernels"} and found["py-modules"] == ["qengine"]
    for room in rooms:
        folders = {file.parent for file in (ROOT / room).rglob("*.py")}
        assert all((folder / "__init__.py").exists() for folder in folders), room
    assert found["dynamic"]["version"]["attr"] == "engine.limits.VERSION"


@pytest.mark.slow
def test_an_installation_gives_the_command_everywhere(tmp_path):
    """In a fresh environment that sees this one's libraries, so that pip downloads only what it builds with."""
    venv.create(tmp_path / "venv", with_pip=True)
    python, libraries = tmp_path / "venv" / "bin" / "python", Path(numpy.__file__).parents[1]

    def run(*command):
        return subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.PIPE, text=True).stdout

    run(python, "-m", "pip", "install", "--no-deps", "-q", "-e", ROOT)
    assert run(tmp_path / "venv" / "bin" / "qengine", "--version") == f"qengine {VERSION}\n"
    code = f"import site; site.addsitedir({str(libraries)!r}); import qengine"
    told = run(python, "-c", f"{code}; print(qengine.__file__, qengine.DEFAULT_MODEL.exists())")
    assert told == f"{ROOT / 'qengine.py'} True\n"
