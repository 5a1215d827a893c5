"""Ctrl-C on the command line."""

import os
import signal


def interruptible():
    """From now on Ctrl-C raises KeyboardInterrupt, once. Ctrl-C pressed again, before the next call of this function,
    ends the process at once: it could only interrupt the clean-up."""
    signal.signal(signal.SIGINT, interrupt)


def interrupt(*_):
    signal.signal(signal.SIGINT, leave)
    raise KeyboardInterrupt


def leave(*_):
    os._exit(130)
