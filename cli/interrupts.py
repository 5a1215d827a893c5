"""Signals: Ctrl-C on the command line, and those that end a server."""

import os
import signal
import sys


def interruptible():
    """From now on Ctrl-C raises KeyboardInterrupt, once. Ctrl-C pressed again, before the next call of this function,
    ends the process at once: it could only interrupt the clean-up."""
    signal.signal(signal.SIGINT, interrupt)


def interrupt(*_):
    signal.signal(signal.SIGINT, leave)
    raise KeyboardInterrupt


def leave(*_):
    os._exit(130)


def end_process(code: int):
    """Ends the process with an exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)    # nothing is left to interrupt but Python's own end
    sys.exit(code)


ENDING = signal.SIGTERM, signal.SIGHUP


def endable():
    """From now on SIGTERM and SIGHUP raise SystemExit, once. A second one, before the next call of this function, ends
    the process at once. What is ignored stays ignored: under nohup SIGHUP is."""
    handle_ending(end)


def end(*_):
    handle_ending(leave_ended)
    raise SystemExit(0)


def leave_ended(number, _):
    os._exit(128 + number)


def handle_ending(handler):
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
