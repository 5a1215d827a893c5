"""How long somebody waits, and why they stop."""

import threading
import time
from types import SimpleNamespace

import pytest

from engine import patience as room
from engine.patience import ENDLESS, LOOK_SECONDS, Patience

NEVER = threading.Event().wait


def seconds_of(function, *arguments) -> float:
    """How long a call takes, which must come to nothing."""
    started = time.monotonic()
    assert function(*arguments) is False
    return time.monotonic() - started


@pytest.mark.parametrize("gone", [None, lambda: False], ids=["alone", "watched"])
def test_what_comes_ends_the_wait(gone):
    there, soon = threading.Event(), threading.Event()
    there.set()
    threading.Timer(0.2, soon.set).start()
    patience = Patience(300, gone)
    started = time.monotonic()
    assert patience.wait(there.wait) and patience.wait(there.wait, 0) and patience.wait(soon.wait)
    assert time.monotonic() - started > 0.1 and patience.left > 0
    assert ENDLESS.wait(there.wait) and Patience(0, gone).wait(there.wait)      # also at the last moment


@pytest.fixture
def asked(monkeypatch):
    """The seconds that were waited for what never comes, by a clock that goes on only while `nothing` waits."""
    waited = []
    monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda: sum(waited)))
    return waited


def nothing(asked):
    return lambda seconds: asked.append(seconds) or False


@pytest.mark.parametrize("gone", [None, lambda: False], ids=["alone", "watched"])
def test_seconds_end_the_wait(gone, asked):
    patience = Patience(0.3, gone)
    assert not patience.wait(nothing(asked), 0.1)
    assert sum(asked) == pytest.approx(0.1) and patience.left == pytest.approx(0.2)
    assert not patience.wait(nothing(asked), 60)
    assert sum(asked) == pytest.approx(0.3) and patience.left == 0
    assert patience.why == "not finished after the 0.3 s that the request allows"
    assert Patience(0.1, gone, "too long").why == "too long"


@pytest.mark.parametrize("gone", [None, lambda: False], ids=["alone", "watched"])
def test_the_clock_ends_the_wait(gone):
    assert 0.1 <= seconds_of(lambda: Patience(0.1, gone).wait(NEVER, 60)) < 30


def test_whoever_leaves_waits_no_longer():
    left = threading.Event()
    patience = Patience(60, left.is_set)
    threading.Timer(0.2, left.set).start()
    assert seconds_of(patience.wait, NEVER) < 30 and patience.left == 0
    assert patience.why == "the client has hung up" and seconds_of(patience.wait, NEVER) < 30


def test_somebody_who_may_leave_is_looked_for_often(asked):
    assert not Patience(0.3, lambda: False).wait(nothing(asked))
    assert max(asked) <= LOOK_SECONDS and sum(asked) == pytest.approx(0.3)
