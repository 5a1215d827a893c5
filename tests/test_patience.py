"""How long somebody waits, and why they stop."""

import threading
import time

import pytest

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
    patience = Patience(30, gone)
    started = time.monotonic()
    assert patience.wait(there.wait) and patience.wait(there.wait, 0) and patience.wait(soon.wait)
    assert 0.1 < time.monotonic() - started < 10 and patience.left > 20
    assert ENDLESS.wait(there.wait) and Patience(0, gone).wait(there.wait)      # also at the last moment


@pytest.mark.parametrize("gone", [None, lambda: False], ids=["alone", "watched"])
def test_seconds_end_the_wait(gone):
    patience = Patience(0.3, gone)
    assert 0.1 <= seconds_of(patience.wait, NEVER, 0.1) < 0.25 and patience.left > 0
    assert seconds_of(patience.wait, NEVER, 60) < 5 and patience.left == 0
    assert patience.why == "not finished after the 0.3 s that the request allows"
    assert Patience(0.1, gone, "too long").why == "too long"


def test_whoever_leaves_waits_no_longer():
    left = threading.Event()
    patience = Patience(60, left.is_set)
    threading.Timer(0.2, left.set).start()
    assert seconds_of(patience.wait, NEVER) < 5 and patience.left == 0
    assert patience.why == "the client has hung up" and seconds_of(patience.wait, NEVER) < 1


def test_somebody_who_may_leave_is_looked_for_often():
    asked = []
    assert not Patience(0.3, lambda: False).wait(lambda seconds: asked.append(seconds) or NEVER(seconds))
    assert max(asked) <= LOOK_SECONDS and len(asked) >= 4
