"""Models of the Hugging Face Hub: which file a name means, and how it comes, from a small Hub on the loopback.

huggingface_hub reads its variables when it is imported, so most of these tests ask in a process of their own.
"""

import contextlib
import fcntl
import functools
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import qengine
from cli.main import main
from engine import hub as ours
from engine.gguf import File
from engine.hub import EYES, HEADER_BYTES, HubName, chosen, local_eyes, local_path, models_in
from engine.limits import DEFAULT_EYES, DEFAULT_MODEL
from engine.request import ModelError
from tests.clients import HI, app_of
from tests.models import TINY
from tests.small_hub import TOKEN, Repository, serving
from tests.test_house import arrows_of, reachable
from tests.test_split import split
from tests.tiny import tiny_engine
from tests.until import PATIENCE

MODEL = Path(TINY).read_bytes()
ROOT = Path(__file__).parents[1]


# Ctrl-C ends it also where the tests themselves run in the background of a shell, which lets processes ignore SIGINT.
PROGRAM = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); " \
          "from engine.hub import local_path; print(local_path(sys.argv[1], print))"


def environment(hub, home, **variables):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return kept | {"HF_ENDPOINT": hub.address, "HF_HOME": str(home)} | variables


def start(hub, home, name, stderr=subprocess.DEVNULL):
    """A process that asks for a model."""
    return subprocess.Popen([sys.executable, "-c", PROGRAM, name], cwd=ROOT, env=environment(hub, home), stdout=stderr,
                            stderr=stderr)


@functools.cache
def fork_server():
    return subprocess.Popen([sys.executable, "-m", "tests.fork_server"], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE)


@pytest.fixture(autouse=True, scope="module")
def end_of_fork_server():
    yield
    with fork_server() as server:
        server.stdin.close()
    fork_server.cache_clear()


def ask(hub, home, name, before="", **variables):
    """(the path, None) or (None, the sentence that says why not); and what was written on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        question = {"name": name, "environ": environment(hub, home, **variables), "before": before, "out": str(out),
                    "err": str(err)}
        print(json.dumps(question), file=fork_server().stdin, flush=True)
        code = int(fork_server().stdout.readline())
        said = err.read_text()
        assert code in (0, 2), said
        return (None, said.strip().rpartition("\n")[2], said) if code else (Path(out.read_text().strip()), None, said)


@pytest.fixture(scope="module")
def hub():
    parts = {f"big/M-Q8_0-0000{i}-of-00002.gguf": bytes([i]) * 100 for i in (1, 2)}
    with serving({
            "us/Tiny-GGUF": Repository({"Tiny-Q4_K_M.gguf": MODEL, "Tiny-Q8_0.gguf": MODEL + b"8", "README.md": b"r",
                                        "mmproj-Q8_0.gguf": b"mm"}, revisions=("main", "refs/pr/1")),
            "us/Parts-GGUF": Repository(parts | {"M-Q6_K.gguf": b"six"}),
            "us/Gated": Repository({"G-Q8_0.gguf": b"gated"}, "gated"),
            "us/Private": Repository({"P-Q8_0.gguf": b"private"}, "private"),
            "us/Safe": Repository({"model.safetensors": b"s", "mmproj.gguf": b"m"}),
            "us/Lies": Repository({"L-Q8_0.gguf": b"l"}, absent=("L-Q4_K_M.gguf",))}) as hub:
        yield hub


@pytest.fixture(autouse=True)
def nothing_was_asked(request):
    if "hub" in request.fixturenames:
        hub = request.getfixturevalue("hub")
        hub.asked.clear(), hub.tokens.clear(), hub.cuts.clear()
        hub.spoilt, hub.status, hub.slow, hub.takes_ranges = (), None, 0, True


# ---- which file a name means -----------------------------------------------------------------------------------


def choice(wish, *files, name="hf:us/model"):
    return chosen(HubName.of(name + (f":{wish}" if wish else "")), dict.fromkeys(files, 5_000_000_000))


QUANTS = "Q-Q4_K_M.gguf", "Q-Q8_0.gguf", "Q-IQ4_XS.gguf", "Q-UD-Q4_K_XL.gguf", "mmproj-Q-BF16.gguf", "imatrix.gguf"


@pytest.mark.parametrize("wish, files, found", [
    (None, QUANTS, "Q-Q4_K_M.gguf"), ("Q8_0", QUANTS, "Q-Q8_0.gguf"), ("q8_0", QUANTS, "Q-Q8_0.gguf"),
    ("IQ4_XS", QUANTS, "Q-IQ4_XS.gguf"), ("Q4_K_XL", QUANTS, "Q-UD-Q4_K_XL.gguf"),
    ("UD-Q4_K_XL", QUANTS, "Q-UD-Q4_K_XL.gguf"), ("Q-Q8_0.gguf", QUANTS, "Q-Q8_0.gguf"),
    (None, ("only-Q2_K.gguf", "mmproj-F16.gguf"), "only-Q2_K.gguf"), (None, ("model.GGUF",), "model.GGUF"),
    ("Q4_K_M", ("a.Q4_K_M.gguf", "a.i1-Q4_K_M.gguf", "a-imatrix-Q4_K_M.gguf"), "a.Q4_K_M.gguf"),
    ("Q4_K_M", ("a-imat-Q4_K_M.gguf", "a-Q4_0.gguf"), "a-imat-Q4_K_M.gguf"),
    ("BF16", ("BF16/model.gguf", "Q8_0/model.gguf", "mmproj-BF16.gguf"), "BF16/model.gguf"),
    ("Q8_0", ("m-Q8_0.GGUF", "m-Q6_K.GGUF"), "m-Q8_0.GGUF"),
    ("m.gguf", ("sub/m.gguf", "n.gguf"), "sub/m.gguf"), ("m.gguf", ("sub/m.gguf", "m.gguf"), "m.gguf"),
])
def test_the_file_that_a_name_means(wish, files, found):
    assert choice(wish, *files) == [found]


EYE_FILES = "mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf", "M-Q4_K_M.gguf", "imatrix-mmproj.gguf"


@pytest.mark.parametrize("wish, files, found", [
    (None, EYE_FILES, "mmproj-F16.gguf"), ("BF16", EYE_FILES, "mmproj-BF16.gguf"),
    ("f32", EYE_FILES, "mmproj-F32.gguf"), ("mmproj-BF16.gguf", EYE_FILES, "mmproj-BF16.gguf"),
    (None, ("m.mmproj-Q8_0.gguf", "m-F16.gguf"), "m.mmproj-Q8_0.gguf"), (None, ("a/MMPROJ.gguf",), "a/MMPROJ.gguf"),
    (None, ("mmproj-M-f32.gguf", "mmproj-M-bf16.gguf"), "mmproj-M-bf16.gguf")])
def test_the_file_of_a_models_eyes(wish, files, found):
    name = HubName.of("hf:us/model" + (f":{wish}" if wish else ""))
    assert chosen(name, dict.fromkeys(files, 1), EYES) == [found]


@pytest.mark.parametrize("wish, files, words", [
    (None, ("a/mmproj-F16.gguf", "b/mmproj-F16.gguf"), "2 mmproj files are in F16 or BF16 or F32 or Q8_0; name one as "
                                                       "in --mmproj hf:us/model:FILE: a/mmproj-F16.gguf "),
    ("Q4_0", EYE_FILES, "no mmproj file is Q4_0; name one"), (None, ("M-F16.gguf",), "there is no GGUF mmproj file in"),
    ("M-Q4_K_M.gguf", EYE_FILES, "no mmproj file is M-Q4_K_M.gguf; name one"),
    (None, ("mmproj-a.gguf", "mmproj-b.gguf"), "none of several mmproj files is in F16 or BF16 or F32 or Q8_0; name")])
def test_eyes_that_are_none_or_several(wish, files, words):
    with pytest.raises(ModelError, match=f"^hf:us/model: {words}"):
        chosen(HubName.of("hf:us/model" + (f":{wish}" if wish else "")), dict.fromkeys(files, 1), EYES)


def test_a_model_in_parts_is_all_of_them():
    files = [f"Q8_0/M-Q8_0-0000{i}-of-00003.gguf" for i in (3, 1, 2)] + ["M-Q4_K_M.gguf"]
    for wish in "Q8_0", "q8_0", files[0], "M-Q8_0-00002-of-00003.gguf":
        assert choice(wish, *files) == sorted(files[:3])
    with pytest.raises(ModelError, match="has Q8_0/M-Q8_0-00001-of-00003.gguf, and lacks its part .*-00002-of-00003"):
        choice("Q8_0", files[0], files[1])
    with pytest.raises(ModelError, match="lacks its part .*-00001-of-00003"):
        choice(None, files[0], files[2])


def test_names_of_files_that_strangers_chose():
    """A name may claim any number of parts, none too, or hold letters that move the cursor of a terminal."""
    files = dict.fromkeys([f"{i}-Q8_0-{k:05}-of-99999.gguf" for i in range(500) for k in (1, 2)], 1)
    models = models_in(files)
    assert len(models) == 500 and sum(map(len, models.values())) == 1500
    assert choice("Q4_K_M", "x-00001-of-00000.gguf", "y-Q4_K_M.gguf") == ["y-Q4_K_M.gguf"]
    with pytest.raises(ModelError, match="lacks its part x-00001-of-00000.gguf"):
        choice("x", "x-00002-of-00000.gguf")
    assert choice(None, "\x1b[2Jx.gguf", "y.gguf") == ["y.gguf"]


@pytest.mark.parametrize("wish, files, words", [
    (None, ("a-Q8_0.gguf", "a-Q6_K.gguf"), "none of several models is in Q4_K_M; put one behind a colon: a-Q6_K.gguf "
                                           r"\(4.7 GB\), a-Q8_0.gguf"),
    ("Q3_K_M", QUANTS, "no model is Q3_K_M; put one behind a colon: Q-Q4_K_M.gguf"),
    ("Q-Q8_1.gguf", QUANTS, "no model is Q-Q8_1.gguf; put one behind a colon: .*Q-Q8_0.gguf"),
    ("F32", QUANTS, "no model is F32; put one behind a colon: Q-IQ4_XS.gguf .*, Q-Q4_K_M.gguf .*, Q-Q8_0.gguf"),
    ("Q4_0", QUANTS, "no model is Q4_0"), ("mmproj-Q-BF16.gguf", QUANTS, "no model is mmproj-Q-BF16.gguf"),
    ("BF16", QUANTS, "no model is BF16"),
    ("Q8_0", ("a-Q8_0.gguf", "b-Q8_0.gguf"), "2 models are in Q8_0; put one behind a colon: a-Q8_0.gguf .* b-Q8_0"),
    ("m.gguf", ("a/m.gguf", "b/m.gguf"), "2 models are in m.gguf; put one .*: a/m.gguf .*, b/m.gguf"),
    (None, [f"{i:02}.gguf" for i in range(30)], r"19.gguf \(4.7 GB\) and 10 more$"),
])
def test_names_that_mean_no_file_or_several(wish, files, words):
    with pytest.raises(ModelError, match=words) as error:
        choice(wish, *files)
    assert str(error.value).startswith("hf:us/model: ") and "mmproj-Q-BF16.gguf (" not in str(error.value)


@pytest.mark.parametrize("text, parts", [
    ("hf:o/n", ("o/n", None, None)), ("hf:o/n.2-x:Q8_0", ("o/n.2-x", None, "Q8_0")),
    ("hf:o/n@main", ("o/n", "main", None)), ("hf:o/n@refs/pr/1:a/b.gguf", ("o/n", "refs/pr/1", "a/b.gguf"))])
def test_names(text, parts):
    name = HubName.of(text)
    assert (name.repository, name.revision, name.wish) == parts
    assert str(name) + (f":{name.wish}" if name.wish else "") == text


@pytest.mark.parametrize("text", ["hf:", "hf:name", "hf:a/b/c", "hf:a/b:", "hf:a/b@", "hf:/b", "hf:a b/c"])
def test_names_that_are_none(text):
    with pytest.raises(ModelError, match="a model of the Hub is hf:OWNER/NAME"):
        qengine.open_model(text)


@pytest.mark.parametrize("text", ["hf:../x", "hf:a/..", "hf:a--b/c", "hf:a/b.git"])
def test_names_that_the_hub_does_not_allow(text):
    with pytest.raises(ModelError, match="the Hub has no repositories of such names"):
        qengine.open_model(text)


@pytest.mark.parametrize("text, name", [
    ("us/Tiny:a.gguf", "us/Tiny:a.gguf"), ("https://huggingface.co/us/Tiny/tree/main", "us/Tiny"),
    ("https://huggingface.co/us/Tiny/blob/main/sub/a.gguf", "us/Tiny:sub/a.gguf"),
    ("hf.co/us/Tiny/resolve/v2/a.gguf?download=true", "us/Tiny@v2:a.gguf"),
    ("us/Tiny-GGUF", "us/Tiny-GGUF"), ("us/Tiny:Q8_0", "us/Tiny:Q8_0"), ("us/Tiny:a.b", "us/Tiny:a.b"),
    ("https://huggingface.co/us/Tiny-GGUF", "us/Tiny-GGUF"), ("https://huggingface.co/us/Tiny/", "us/Tiny")])
def test_a_name_without_hf_is_answered_with_how_to_say_it(text, name, capsys):
    assert main(["-m", text, "-p", "Hello"]) == 2
    assert capsys.readouterr().err == (f"qengine: {text}: there is no such file; the Hub's repository of this name is "
                                       f"hf:{name}\n")


def test_names_that_are_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    shutil.copyfile(TINY, tmp_path / "a" / "model")
    assert qengine.open_model("a/model").config.name == "tiny"
    for path in "a/b.gguf", "../b":
        with pytest.raises(ModelError, match=f"^{path}: cannot be opened: No such file"):
            qengine.open_model(path)


# ---- how it comes ----------------------------------------------------------------------------------------------


def test_a_file_comes_once_and_is_found_again(hub, tmp_path):
    path, _, said = ask(hub, tmp_path, "hf:us/Tiny-GGUF")
    assert path.read_bytes() == MODEL and path.name == "Tiny-Q4_K_M.gguf"
    assert "downloading Tiny-Q4_K_M.gguf of hf:us/Tiny-GGUF, 3.7 MB" in said
    assert hub.files_asked() == ["us/Tiny-GGUF/Tiny-Q4_K_M.gguf"] and hub.tokens == [None]
    path, _, said = ask(hub, tmp_path, "hf:us/Tiny-GGUF:q8_0")
    assert path.read_bytes() == MODEL + b"8" and len(hub.files_asked()) == 2
    hub.asked.clear()
    again, _, said = ask(hub, tmp_path, "hf:us/Tiny-GGUF:Q8_0")
    assert again == path and hub.files_asked() == [] and "model file: Tiny-Q8_0.gguf of hf:us/Tiny-GGUF" in said


def test_a_terminal_shows_a_bar(hub, tmp_path):
    terminal, end = os.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    with start(hub, tmp_path, "hf:us/Tiny-GGUF:Q8_0", end) as process, open(terminal, "rb", buffering=0) as shown:
        os.close(end)
        said = b""
        with contextlib.suppress(OSError):      # what Linux raises where the other end is closed
            while some := shown.read(1 << 16):
                said += some
        assert process.wait(PATIENCE) == 0 and b"Tiny-Q8_0.gguf: 100%" in said


def test_all_parts_come(hub, tmp_path):
    path, _, said = ask(hub, tmp_path, "hf:us/Parts-GGUF:Q8_0")
    assert path.name == "M-Q8_0-00001-of-00002.gguf" and "and 1 more parts of hf:us/Parts-GGUF" in said
    assert [each.read_bytes() for each in sorted(path.parent.iterdir())] == [b"\1" * 100, b"\2" * 100]
    assert hub.files_asked() == [f"us/Parts-GGUF/big/M-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]


def test_a_revision(hub, tmp_path):
    path, _, _ = ask(hub, tmp_path, "hf:us/Tiny-GGUF@refs/pr/1:Q8_0")
    assert path.read_bytes() == MODEL + b"8"
    _, said, _ = ask(hub, tmp_path, "hf:us/Tiny-GGUF@v9:Q8_0")
    assert said == "hf:us/Tiny-GGUF@v9: the repository has no revision 'v9'"


@pytest.mark.parametrize("offline", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, {}],
                         ids=["told to be", "no connection", "the Hub is down"])
def test_without_the_hub_the_cache_answers(hub, tmp_path, offline):
    known, _, _ = ask(hub, tmp_path, "hf:us/Tiny-GGUF:Q8_0")
    hub.status = None if offline else 503
    for name in "hf:us/Tiny-GGUF:Q8_0", "hf:us/Tiny-GGUF", "hf:us/Tiny-GGUF:Tiny-Q8_0.gguf":
        path, said, _ = ask(hub, tmp_path, name, **offline)
        assert path == known, said
    _, said, _ = ask(hub, tmp_path, "hf:us/Tiny-GGUF:Q4_K_M", **offline)
    assert said.startswith("hf:us/Tiny-GGUF: no model is Q4_K_M; put one behind a colon: Tiny-Q8_0.gguf")
    _, said, _ = ask(hub, tmp_path, "hf:us/Parts-GGUF", **offline)
    assert said.startswith("hf:us/Parts-GGUF: ") and "the cache" in said
    assert ("HF_HUB_OFFLINE forbids" in said) == ("HF_HUB_OFFLINE" in offline)


def ask_for_eyes(hub, home, model, mmproj=None, **variables):
    """As `ask`, for the eyes of a model."""
    before = ("import sys, engine.hub as ours; sys.modules['__main__'].local_path = "
              f"lambda name, note: ours.local_eyes({mmproj!r}, name, note)")
    return ask(hub, home, model, before, **variables)


def test_the_eyes_of_a_model_of_the_hub_are_found(hub, tmp_path):
    model, eyes = "hf:us/Tiny-GGUF@refs/pr/1:Q4_K_M", "us/Tiny-GGUF/mmproj-Q8_0.gguf"
    path, _, said = ask_for_eyes(hub, tmp_path, model)
    assert path.read_bytes() == b"mm" and hub.files_asked() == [eyes]
    assert "downloading mmproj-Q8_0.gguf of hf:us/Tiny-GGUF@refs/pr/1, 2 bytes" in said
    again, _, said = ask_for_eyes(hub, tmp_path, model)
    assert again == path and hub.files_asked() == [eyes]
    assert "mmproj file: mmproj-Q8_0.gguf of hf:us/Tiny-GGUF" in said
    assert ask_for_eyes(hub, tmp_path, model, HF_HUB_OFFLINE="1")[0] == path
    assert ask_for_eyes(hub, tmp_path, "us.gguf", "hf:us/Tiny-GGUF@refs/pr/1:q8_0")[0] == path


@pytest.mark.parametrize("model, mmproj", [
    ("hf:us/Parts-GGUF", None), ("hf:us/Tiny-GGUF", "none"), ("hf:us/Nobody", "none"), ("us.gguf", None)])
def test_a_model_without_eyes(hub, tmp_path, model, mmproj):
    path, _, said = ask_for_eyes(hub, tmp_path, model, mmproj)
    assert (str(path), said, hub.files_asked()) == ("None", "", [])


def test_eyes_that_are_named_must_be_there(hub, tmp_path):
    _, said, _ = ask_for_eyes(hub, tmp_path, "us.gguf", "hf:us/Parts-GGUF")
    assert said == "hf:us/Parts-GGUF: there is no GGUF mmproj file in this repository"
    _, said, _ = ask_for_eyes(hub, tmp_path, "us.gguf", "us/Tiny-GGUF")
    assert said == "us/Tiny-GGUF: there is no such file; the Hub's repository of this name is hf:us/Tiny-GGUF"
    _, said, _ = ask_for_eyes(hub, tmp_path, "hf:us/Private")
    assert "HF_TOKEN" in said
    assert local_eyes("somewhere/mmproj.gguf", "hf:us/Tiny-GGUF", print) == "somewhere/mmproj.gguf"


def test_the_model_that_comes_with_qengine_sees_by_itself():
    """However its path is written, unless someone wants it blind; a copy of it elsewhere has no eyes."""
    for name in DEFAULT_MODEL, str(DEFAULT_MODEL), os.path.relpath(DEFAULT_MODEL):
        assert local_eyes(None, name, print) == DEFAULT_EYES
    assert local_eyes("none", DEFAULT_MODEL, print) is None
    assert local_eyes(None, "elsewhere/" + DEFAULT_MODEL.name, print) is None
    assert DEFAULT_EYES.exists()


@pytest.mark.parametrize("name", ["us/Gated", "us/Private"])
def test_who_may_not_read_is_told_of_the_token(hub, tmp_path, name):
    for variables in {}, {"HF_TOKEN": "hf_other"}:
        _, said, _ = ask(hub, tmp_path, f"hf:{name}", **variables)
        assert said.startswith(f"hf:{name}: ") and "HF_TOKEN" in said and "\n" not in said
        assert ("gated: accept its terms on" in said) == (name == "us/Gated")
    path, _, _ = ask(hub, tmp_path, f"hf:{name}", HF_TOKEN=TOKEN)
    assert path.read_bytes() == name.removeprefix("us/").lower().encode()
    assert hub.tokens == [None]         # the bytes come from another host, which the token is not for


def test_what_is_not_there(hub, tmp_path):
    _, said, _ = ask(hub, tmp_path, "hf:us/Tini")
    assert said.startswith("hf:us/Tini: the Hub has no such repository, or not for you: where it is private, see that "
                           "HF_TOKEN holds a token")
    _, said, _ = ask(hub, tmp_path, "hf:them/Tiny-GGUF")
    assert "near it are us/Tiny-GGUF" in said
    _, said, _ = ask(hub, tmp_path, "hf:us/Tiny-GGUF:Tiny-Q4_K_S.gguf")
    assert said.startswith("hf:us/Tiny-GGUF: no model is Tiny-Q4_K_S.gguf; put one behind a colon: Tiny-Q4_K_M.gguf")
    _, said, _ = ask(hub, tmp_path, "hf:us/Safe")
    assert said.startswith("hf:us/Safe: there is no GGUF model in this repository")
    _, said, _ = ask(hub, tmp_path, "hf:us/Lies")
    assert said == "hf:us/Lies: the Hub lists the file, and does not have it"


def disk_of(n_bytes):
    """A statement by which the disk has so many bytes left."""
    return f"import shutil; shutil.disk_usage = lambda path: shutil._ntuple_diskusage(9, 9, {n_bytes})"


def made_up(n):
    return random.Random(3).randbytes(n)


@contextlib.contextmanager
def serving_large():
    """A Hub with a file of 22 MB; huggingface_hub writes pieces of 10 MB."""
    with serving({"us/Large": Repository({"L-Q8_0.gguf": made_up(22 << 20)})}) as hub:
        yield hub


def test_a_download_goes_on_after_a_cut(tmp_path):
    with serving_large() as hub:
        hub.cuts = [15 << 20]
        path, _, said = ask(hub, tmp_path, "hf:us/Large")
        assert path.read_bytes() == made_up(22 << 20)
        assert hub.files_asked() == ["us/Large/L-Q8_0.gguf", "us/Large/L-Q8_0.gguf bytes=10485760-"]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_another_process_goes_on_with_a_download(tmp_path, end):
    with serving_large() as hub:
        hub.slow = 0.1                  # 16 s for what is left when the first 10 MB are written
        process = start(hub, tmp_path, "hf:us/Large")
        deadline = time.monotonic() + PATIENCE
        while sum(path.stat().st_size for path in tmp_path.rglob("*.incomplete")) < 10 << 20:
            assert time.monotonic() < deadline and process.poll() is None, process.returncode
            time.sleep(0.02)
        process.send_signal(end)
        process.communicate(timeout=PATIENCE)
        assert process.returncode != 0 and not list(tmp_path.rglob("*.gguf"))
        hub.slow = 0
        hub.asked.clear()
        path, _, _ = ask(hub, tmp_path, "hf:us/Large", disk_of(16 << 20))      # less than all of it
        assert path.read_bytes() == made_up(22 << 20)
        asked, = hub.files_asked()
        assert int(asked.partition(" bytes=")[2].rstrip("-")) >= 10 << 20
        assert not list(tmp_path.rglob("*.incomplete"))


def test_a_connection_that_is_always_cut(tmp_path):
    with serving_large() as hub:
        hub.cuts = [1000] * 20
        _, said, _ = ask(hub, tmp_path, "hf:us/Large", "import time; time.sleep = lambda seconds: None")
        assert said.startswith("hf:us/Large: the download broke off (") and said.endswith("goes on where it was")


def test_bytes_that_are_not_the_hubs(hub, tmp_path):
    hub.spoilt = "Tiny-Q8_0.gguf",
    _, said, _ = ask(hub, tmp_path, "hf:us/Tiny-GGUF:Q8_0")
    assert said.startswith("Tiny-Q8_0.gguf: what was downloaded is not what the Hub has")
    hub.spoilt = ()
    path, _, _ = ask(hub, tmp_path, "hf:us/Tiny-GGUF:Q8_0")
    assert path.read_bytes() == MODEL + b"8"


def test_a_disk_that_is_full(hub, tmp_path):
    """Known before, or when it happens: a limit of file sizes stands for a disk that fills up."""
    _, said, _ = ask(hub, tmp_path, "hf:us/Tiny-GGUF:Q8_0", disk_of(1_000_000))
    assert said.startswith("hf:us/Tiny-GGUF: 3.7 MB are to be downloaded, and ")
    assert "976.6 KB left" in said
    assert hub.files_asked() == []
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))"
    _, said, _ = ask(hub, tmp_path, "hf:us/Tiny-GGUF:Q8_0", limit)
    assert said.startswith("hf:us/Tiny-GGUF: it cannot be kept in ") and "File too large" in said
    (tmp_path / "file").write_text("")
    _, said, _ = ask(hub, tmp_path / "file", "hf:us/Tiny-GGUF:Q8_0")
    assert said.startswith("hf:us/Tiny-GGUF: it cannot be kept in ") and "Not a directory" in said


# ---- where such names may stand --------------------------------------------------------------------------------


def test_the_command_line_takes_names_of_the_hub(tmp_path, capsys):
    """A model in parts answers, without a word of where it is."""
    paths = split(TINY, tmp_path, 2)
    asked = ["--card", "emulated", "--ctx", "256", "-p", "Hello", "--max-tokens", "3", "--temperature", "0",
             "--thinking", "off"]
    files = {f"T-Q8_0-0000{i}-of-00002.gguf": path.read_bytes() for i, path in enumerate(paths, 1)}
    with serving({"us/Tiny": Repository(files)}) as hub:
        answer = subprocess.run([sys.executable, "qengine.py", "-m", "hf:us/Tiny", *asked], cwd=ROOT, text=True,
                                env=environment(hub, tmp_path / "home"), capture_output=True, timeout=PATIENCE)
    assert main(["-m", TINY, *asked]) == 0
    assert answer.stdout == capsys.readouterr().out, answer.stderr


# ---- headers ---------------------------------------------------------------------------------------------------


def test_a_plan_of_a_model_of_the_hub_downloads_nothing(tmp_path, capsys):
    """It reads the headers, and says what it says of the files. Nothing is left of them."""
    files = {f"M-Q8_0-0000{i}-of-00002.gguf": path for i, path in enumerate(split(DEFAULT_MODEL, tmp_path, 2), 1)}
    files["mmproj-Q8_0.gguf"] = DEFAULT_EYES
    asked = ["--plan", "--card", "emulated:cmp-100-210"]
    with serving({"us/M": Repository({name: path.read_bytes() for name, path in files.items()})}) as hub:
        for folder in "home", "temporary":
            (tmp_path / folder).mkdir()
        variables = environment(hub, tmp_path / "home", TMPDIR=str(tmp_path / "temporary"))
        answers = [subprocess.run([sys.executable, "qengine.py", "-m", "hf:us/M", *what], cwd=ROOT, env=variables,
                                  text=True, capture_output=True, timeout=PATIENCE)
                   for what in (asked, ["--print-config"])]
        read = [f"us/M/{name} bytes=0-{min(path.stat().st_size, HEADER_BYTES) - 1}" for name, path in files.items()]
        assert hub.files_asked() == read + read[:2]
        assert max(path.stat().st_size for path in files.values()) > HEADER_BYTES
    assert main(["-m", str(DEFAULT_MODEL), *asked]) == 0
    assert answers[0].stdout == capsys.readouterr().out, answers[0].stderr
    assert main(["-m", str(DEFAULT_MODEL), "--print-config"]) == 0
    assert [a for a in answers[1].stdout.splitlines() if not a.startswith("name =")] == [
        a for a in capsys.readouterr().out.splitlines() if not a.startswith("name =")]
    assert "reading the header of M-Q8_0-00001-of-00002.gguf and 1 more parts of hf:us/M; " in answers[0].stderr
    assert list((tmp_path / "temporary").iterdir()) == [] and list((tmp_path / "home").rglob("*.gguf")) == []


LOOK = """
import json, os, sys
from engine import gguf, hub as ours

def look(name, note):
    model = gguf.GGUF(ours.local_path(ours.HeadersOf(name), note))
    found = {"path": model.path, "bytes": bytes(model.files[0].bytes).hex()[:2_000_000], "tensors": repr(model.tensors),
             "n_read": len(read), "metadata": repr(model.metadata), "refusal": ""}
    try:
        model.data(next(iter(model.tensors)))
    except (ours.ModelError, StopIteration) as error:
        found["refusal"] = str(error)
    with open(os.path.join(os.environ["HF_HOME"], "found.json"), "w") as file:
        json.dump(found, file)
    return file.name

def noted(*given, place=gguf.File._place):
    place(*given)
    read.append(given)

read, gguf.File._place = [], noted          # the last that is done with a header
ours.HEADER_BYTES, ours.MOST_HEADER_BYTES, sys.modules["__main__"].local_path = 1000, LIMIT, look
"""


def ask_for_headers(hub, home, name, most=1 << 28, **variables):
    """As `ask`, for the headers of a model, of which 1,000 bytes are asked for at first: (what was found there, None)
    or (None, the sentence that says why not)."""
    home.mkdir(exist_ok=True)
    path, said, _ = ask(hub, home, name, LOOK.replace("LIMIT", str(most)), TMPDIR=str(home), **variables)
    return path and SimpleNamespace(**json.loads(path.read_text())), said


@pytest.mark.parametrize("takes_ranges", [True, False])
def test_of_a_header_as_much_is_read_as_it_has(hub, tmp_path, takes_ranges):
    """Its tensors cannot be read."""
    hub.takes_ranges = takes_ranges
    found, said = ask_for_headers(hub, tmp_path, "hf:us/Tiny-GGUF")
    whole, end = File(TINY), 1000 * 2**(len(hub.files_asked()) - 1)
    assert 1000 < end < len(MODEL) and File(TINY, header_bytes=end)
    with pytest.raises(ModelError, match="ends early"):
        File(TINY, header_bytes=end // 2)
    assert found.tensors == repr(whole.tensors) and found.path == "Tiny-Q4_K_M.gguf"
    assert found.bytes == (MODEL[:end] + bytes(len(MODEL) - end)).hex()[:2_000_000]
    assert "only the header of this file was fetched" in found.refusal and found.n_read == 1


def test_headers_of_what_is_in_the_cache_are_read_there(hub, tmp_path):
    path, _, _ = ask(hub, tmp_path, "hf:us/Tiny-GGUF")
    found, _ = ask_for_headers(hub, tmp_path, "hf:us/Tiny-GGUF")
    assert (found.path, found.refusal, found.n_read) == (str(path), "", 1)


KILLED = """
import os, signal, sys
from engine import hub as ours

def killed(*given, read=ours.read_range):
    read(*given)
    os.kill(os.getpid(), signal.SIGKILL)

ours.read_range = killed
ours.local_path(ours.HeadersOf(sys.argv[1]), print)
"""


def test_headers_leave_nothing_on_the_disk(hub, tmp_path):
    """Not even of a process that is killed while it reads them."""
    for folder in "home", "temporary":
        (tmp_path / folder).mkdir()
    variables = environment(hub, tmp_path / "home", TMPDIR=str(tmp_path / "temporary"))
    ended = subprocess.run([sys.executable, "-c", KILLED, "hf:us/Tiny-GGUF"], cwd=ROOT, env=variables, text=True,
                           capture_output=True, timeout=120)
    assert (ended.returncode, len(hub.files_asked())) == (-signal.SIGKILL, 1), ended.stderr
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.fixture(scope="module")
def odd():
    """Files whose headers are odd: a vocabulary alone, of 59 bytes; one key that claims 60 million texts; no byte."""
    def header(n_keys, *values):
        return b"GGUF" + struct.pack("<IQQ", 3, 0, n_keys) + b"".join(values)

    texts = struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 60_000_000)
    keys = header(1, struct.pack("<Q9sII", 9, b"somewhere", 4, 7))
    with serving({"us/Keys": Repository({"K-Q8_0.gguf": keys}),
                  "us/Hole": Repository({"H-Q8_0.gguf": header(1, texts) + bytes(480_000_000)}),
                  "us/None": Repository({"N-Q8_0.gguf": b""})}) as hub:
        yield hub


@pytest.mark.parametrize("takes_ranges", [True, False])
def test_a_header_without_tensors_is_asked_for_once(odd, tmp_path, takes_ranges):
    odd.takes_ranges, odd.asked = takes_ranges, []
    found, said = ask_for_headers(odd, tmp_path, "hf:us/Keys")
    assert found.metadata == "{'somewhere': 7}", said
    assert len(odd.files_asked()) == 1


def test_a_header_is_not_read_beyond_what_was_fetched(odd, tmp_path):
    """Zeros in the hole behind it are no texts."""
    odd.takes_ranges, odd.asked = True, []
    _, said = ask_for_headers(odd, tmp_path, "hf:us/Hole", most=16_000)
    assert said.startswith("H-Q8_0.gguf: the file ends early: key 'k' claims 60000000 strings")
    assert odd.files_asked()[-1] == "us/Hole/H-Q8_0.gguf bytes=8000-15999"
    _, said = ask_for_headers(odd, tmp_path, "hf:us/None")
    assert said == "N-Q8_0.gguf: the Hub says that it has 0 bytes"


def test_a_place_for_headers_that_cannot_be_written_is_named(hub, tmp_path):
    before = ("import sys, tempfile, engine.hub as ours; tempfile.tempdir = '/proc/nowhere'; "
              "sys.modules['__main__'].local_path = lambda name, note: ours.local_path(ours.HeadersOf(name), note)")
    _, said, _ = ask(hub, tmp_path, "hf:us/Tiny-GGUF", before)
    assert said.startswith("headers cannot be kept in /proc/nowhere: ")
    assert said.endswith("TMPDIR may name another place")


def test_headers_that_never_end_and_files_without_any(hub, tmp_path):
    _, said = ask_for_headers(hub, tmp_path, "hf:us/Tiny-GGUF", most=4000)
    assert said.startswith("Tiny-Q4_K_M.gguf: the file ends early")
    assert hub.files_asked()[-1] == "us/Tiny-GGUF/Tiny-Q4_K_M.gguf bytes=2000-3999"
    _, said = ask_for_headers(hub, tmp_path, "hf:us/Parts-GGUF:Q6_K")
    assert said.startswith("M-Q6_K.gguf: ")
    hub.cuts[:] = [10] * 20
    _, said = ask_for_headers(hub, tmp_path, "hf:us/Tiny-GGUF")
    assert said.startswith("hf:us/Tiny-GGUF: the download broke off")


REQUESTS = {
    "/v1/chat/completions": {"messages": [HI]}, "/v1/completions": {"prompt": "hi"}, "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [HI], "max_tokens": 2}, "/api/chat": {"messages": [HI], "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False}, "/api/show": {}, "/api/pull": {}, "/v1/models/hf:us/Tiny": None}


@pytest.mark.parametrize("path", REQUESTS)
def test_no_request_to_the_server_downloads_anything(monkeypatch, path):
    """A model that a request names only selects among those that are served."""
    asked = []
    monkeypatch.setattr(ours, "download", lambda *what: asked.append(what))
    local_path("hf:us/Tiny", print)
    assert asked.pop()                  # so a request would be noticed
    client, body = app_of(tiny_engine(), sampling={"max_tokens": 2}).test_client(), REQUESTS[path]
    answer = client.get(path) if body is None else client.post(path, json=body | {"model": "hf:us/Tiny"})
    assert answer.status_code in (200, 404) and asked == []


def test_the_server_cannot_reach_the_hub():
    arrows, _ = arrows_of(ROOT)
    assert [name for name in arrows if name.startswith("api") and "engine.hub" in reachable(arrows, name)] == []
