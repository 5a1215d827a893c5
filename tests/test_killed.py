"""A server that is killed at any moment starts again and gives the same answers, whatever is left of its caches."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

from kernels.compile import CACHE_DIR
from tests.models import TINY
from tests.tiny import ROOT
from tests.until import PATIENCE

PROMPT = {"prompt": "The quick brown fox", "max_tokens": 16, "temperature": 0}


def start(cache):
    """The process of a server that keeps compiled kernels under `cache`."""
    command = [sys.executable, str(ROOT / "qengine.py"), "-m", TINY, "--card", "emulated", "--serve", "0"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                            env=os.environ | {"XDG_CACHE_HOME": str(cache)})


@contextmanager
def server(cache):
    """Its address when it serves, and the process; both are gone after."""
    process = start(cache)
    try:
        said = []
        while not said or "serving" not in said[-1]:
            said.append(process.stderr.readline())
            assert said[-1], "".join(said)
        yield next(word for word in said[-1].split() if word.startswith("http")), process
    finally:
        process.kill()
        process.communicate()


def post(address, **fields):
    """The open response to a request for a completion."""
    body = json.dumps(PROMPT | fields).encode()
    return urllib.request.urlopen(urllib.request.Request(
        address + "v1/completions", body, {"Content-Type": "application/json"}), timeout=PATIENCE)


def answer(address):
    with post(address) as response:
        return json.load(response)["choices"][0]["text"]


def copy_used(cache, since):
    """What was used since then of the kernels that this machine has, as the caches of their own that `cache` holds."""
    for folder in "ptx", "native":
        (cache / "qengine" / folder).mkdir(parents=True)
        for file in (CACHE_DIR / folder).iterdir():
            if file.stat().st_mtime >= since:
                shutil.copy2(file, cache / "qengine" / folder)


def damage(cache):
    """Something is wrong with the four smallest files of each folder: what they hold takes least to make anew. Nothing
    can be written but what is there, where the user is not root."""
    for folder in cache / "qengine" / "ptx", cache / "qengine" / "native":
        files = sorted(folder.iterdir(), key=lambda file: file.stat().st_size)
        assert len(files) > 20
        files[0].write_bytes(files[0].read_bytes()[:-7])
        files[1].write_bytes(b"\xff\xfenothing of ours\n")
        files[2].write_bytes(b"")
        files[3].unlink()
        files[3].mkdir()
        os.chmod(folder, 0o555)
    (cache / "qengine" / "probe").mkdir()
    (cache / "qengine" / "probe" / "emulated-card-0.json").write_bytes(b"\xff{")


def kill(process):
    process.kill()
    assert process.wait() == -signal.SIGKILL


def kill_amid_an_answer(address, process):
    with post(address, stream=True, max_tokens=1000, ignore_eos=True) as stream:
        assert stream.readline() and stream.readline()
        kill(process)


def test_a_server_that_is_killed(tmp_path):
    """Amid an answer, and while it loads from damaged caches: from those it starts, and answers as before."""
    started = time.time() - 1
    with server(CACHE_DIR.parent) as (address, process):
        want = answer(address)
        assert want and answer(address) == want
        kill_amid_an_answer(address, process)
    copy_used(tmp_path, started)
    damage(tmp_path)
    loading = start(tmp_path)
    assert loading.stderr.readline().startswith("card:")
    time.sleep(0.5)
    kill(loading)
    with server(tmp_path) as (address, _):
        assert answer(address) == want
