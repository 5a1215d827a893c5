"""Functions that run in a process of their own: what they may not do, and what they leave behind."""

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from engine.patience import Patience
from engine.sandbox import Failed, LimitExceeded, OutOfPatience, Sandbox
from tests.until import PATIENCE, wait_until

NASTY = """
    import os, sys, time

    def add(one, other):
        return one + other

    def fail(text):
        raise ValueError(text)

    def loop():
        while True:
            pass

    def take(n_bytes):
        return len(bytearray(n_bytes))

    def leave(status):
        os._exit(status)

    def doubled(data, n):
        return n, data + data, "é", b""

    def pid():
        return os.getpid()

    def modules():
        return sorted(sys.modules)
"""


@pytest.fixture
def sandbox(tmp_path, monkeypatch):
    (tmp_path / "nasty.py").write_text(textwrap.dedent(NASTY))
    monkeypatch.syspath_prepend(tmp_path)
    sandbox = Sandbox("nasty", 256 << 20)
    yield sandbox
    sandbox.close()


def test_values_and_errors_come_back(sandbox):
    assert sandbox.call("add", "é\ud800\0", ["x"][0], seconds=PATIENCE) == "é\ud800\0x"
    assert sandbox.call("add", [1], [{"a": None}], seconds=PATIENCE) == [1, {"a": None}]
    for text in ("so it is", "é\ud800"):
        with pytest.raises(Failed, match=text) as error:
            sandbox.call("fail", text, seconds=PATIENCE)
        assert error.value.kind == "ValueError"


def test_bytes_travel_as_they_are(sandbox):
    """Also megabytes, in whatever holds them, and nothing that a client writes is taken for them."""
    for data in b"", bytes(range(256)) * 4096, bytearray(5 << 20), memoryview(b"x" * (3 << 20)):
        assert sandbox.call("doubled", data, 5, seconds=PATIENCE) == (5, bytes(data) * 2, "é", b"")
    assert sandbox.call("add", [], [[]], seconds=PATIENCE) == [[]]
    with pytest.raises(Failed, match="add"):
        sandbox.call("add", b"x", seconds=PATIENCE)
    with pytest.raises(LimitExceeded, match="takes more than 256 MiB of memory"):
        sandbox.call("doubled", bytes(100 << 20), 1, seconds=PATIENCE)
    assert sandbox.call("doubled", b"x", 1, seconds=PATIENCE)[1] == b"xx"


@pytest.mark.parametrize("asked, seconds, said", [
    (("loop",), 0.2, "takes longer than 0.2 s"), (("take", 1 << 30), PATIENCE, "takes more than 256 MiB of memory"),
    (("leave", 5), PATIENCE, "ended its process, with status 5")])
def test_a_call_beyond_its_limits_ends_and_the_next_one_works(sandbox, asked, seconds, said):
    first = sandbox.call("pid", seconds=PATIENCE)
    with pytest.raises(LimitExceeded, match=said):
        sandbox.call(*asked, seconds=seconds)
    assert sandbox.call("pid", seconds=PATIENCE) != first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_the_process_dies_without_harm(sandbox):
    """As under the out-of-memory killer, between two calls and in the middle of one."""
    os.kill(sandbox.call("pid", seconds=PATIENCE), 9)
    wait_until(lambda: sandbox._process.poll() is not None)
    assert sandbox.call("add", 1, 2, seconds=PATIENCE) == 3
    said = []

    def loop():
        try:
            sandbox.call("loop", seconds=PATIENCE)
        except LimitExceeded as error:
            said.append(str(error))

    thread = threading.Thread(target=loop)
    thread.start()
    while thread.is_alive():                # again and again: the first may come before the call
        sandbox.close()
        thread.join(0.2)
    assert said == ["has been ended"]


def test_closing_ends_all_calls(sandbox):
    """Those that wait for others, too."""
    said = []

    def loop():
        with pytest.raises(LimitExceeded) as error:
            sandbox.call("loop", seconds=PATIENCE)
        said.append(error.value)

    threads = [threading.Thread(target=loop) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        sandbox.close()
        threads[0].join(0.2)
    assert len(said) == 8 and sandbox.call("add", 1, 2, seconds=PATIENCE) == 3


def test_calls_take_turns_and_none_waits_for_ever(sandbox):
    assert sandbox.call("add", 1, 1, seconds=PATIENCE) == 2
    with sandbox._lock, pytest.raises(OutOfPatience, match="has waited for others"):
        sandbox.call("add", 1, 1, seconds=PATIENCE, patience=Patience(0.1))
    sums = []
    threads = [threading.Thread(target=lambda n=n: sums.append(sandbox.call("add", n, n, seconds=PATIENCE)))
               for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(sums) == [2 * n for n in range(20)]


def test_the_process_imports_no_engine_and_ends_with_its_owner(sandbox, tmp_path):
    """Also an owner that is killed while a function loops for ever: the processor time is limited as well."""
    loaded = sandbox.call("modules", seconds=PATIENCE)
    assert "nasty" in loaded and not {"numpy", "numba", "qengine", "kernels"} & set(loaded)
    program = ("import sys; sys.path.insert(0, sys.argv[1]); from engine.sandbox import Sandbox; "
               "nasty = Sandbox('nasty', 1 << 28); print(nasty.call('pid', seconds=20), flush=True); "
               "nasty.call('loop', seconds=1)")
    owner = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True,
                             cwd=Path(__file__).parents[1])
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"                     # nobody may be there to collect the status of an orphan
