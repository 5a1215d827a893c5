"""How a newly trained model takes the place of the one that ships."""

import json
import subprocess

import pytest

from models import replace
from tests.test_notebooks import NOTEBOOKS
from tests.test_readme import BLOCKS

TALK = "> Who are you?\nA model.\n> /image cat.png\n> 뭐가 보여?\n고양이"


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A repository in miniature, whose commands do nothing but are noted; the chat answers in capitals."""
    said = []

    def run(*command, **options):
        said.append(command)
        asked = options.get("input", "").splitlines()
        answer = '{"a": 1}' if "tests.test_shipped_model" in command else "\n".join(
            line.upper() for line in asked if not line.startswith("/"))
        return subprocess.CompletedProcess(command, 0, answer)
    monkeypatch.setattr(replace, "ROOT", tmp_path)
    monkeypatch.setattr(replace, "run", run)
    for folder in ("models", "tests/data", "checkpoint"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "README.md").write_text(f"# A\n\n<!-- transcript -->\n```text\n{TALK}\n```\n\nB\n", encoding="utf-8")
    (tmp_path / "checkpoint" / "loss.png").write_bytes(b"curve")
    (tmp_path / "checkpoint" / "state.json").write_text("{}")
    return tmp_path, said


def replaced(house, monkeypatch, *options):
    monkeypatch.setattr("sys.argv", ["replace.py", str(house[0] / "checkpoint"), *options])
    replace.main()


def test_everything_in_its_order(house, monkeypatch, capsys):
    root, said = house
    replaced(house, monkeypatch)
    assert [command[:2] for command in said] == [
        ("models/export.py", str(root / "checkpoint")), ("-m", "tests.test_shipped_model"), ("qengine.py", "--chat"),
        ("-m", "tests.test_notebooks"), ("-m", "pytest")]
    assert (root / "models" / "loss.png").read_bytes() == b"curve"
    assert json.loads((root / "tests" / "data" / "answers.json").read_text()) == {"a": 1}
    assert (root / "README.md").read_text(encoding="utf-8").splitlines()[4:9] == [
        "> Who are you?", "WHO ARE YOU?", "> /image cat.png", "> 뭐가 보여?", "뭐가 보여?"]
    assert "models/README.md" in capsys.readouterr().out


def test_it_goes_on_from_a_step(house, monkeypatch):
    replaced(house, monkeypatch, "--from", "notebooks")
    assert [command[1] for command in house[1]] == ["tests.test_notebooks", "pytest"]


def test_what_is_no_checkpoint_is_refused(house, monkeypatch, capsys):
    (house[0] / "checkpoint" / "state.json").unlink()
    with pytest.raises(SystemExit):
        replaced(house, monkeypatch)
    assert "is no checkpoint" in capsys.readouterr().err and house[1] == []


def test_answers_that_are_not_whole_change_nothing(house, monkeypatch):
    """Neither a record that was cut off nor a conversation with other lines than its questions."""
    root, _ = house
    before = (root / "README.md").read_text(encoding="utf-8")
    monkeypatch.setattr(replace, "run", lambda *command, **_: subprocess.CompletedProcess(command, 0, '{"a": '))
    with pytest.raises(json.JSONDecodeError):
        replace.answers(root)
    with pytest.raises(ValueError, match="2 questions of the transcript have 1 lines"):
        replace.transcript(root)
    assert not (root / "tests" / "data" / "answers.json").exists()
    assert (root / "README.md").read_text(encoding="utf-8") == before


def test_it_names_what_there_is():
    """All notebooks but the one without a model, tests that exist, and the transcript of README.md, which stays as it
    is where the answers do."""
    assert {path.stem for path in NOTEBOOKS} - set(replace.NOTEBOOKS) == {"01_probe"}
    assert all((replace.ROOT / "tests" / f"{name}.py").exists() for name in replace.TESTS)
    now = BLOCKS["transcript"]
    assert replace.TRANSCRIPT.search((replace.ROOT / "README.md").read_text(encoding="utf-8"))[0] == now
    questions = replace.questions_of(now)
    answers = "\n".join(line for line in now.splitlines() if not line.startswith("> "))
    assert replace.conversation(questions, answers) == now
