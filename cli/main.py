"""The command line: from its words to an exit code. What the help does not need is imported when the words are read."""

import os
import signal
import sys
import warnings

from .interrupts import end_process
from .options import TASKS, build_parser, check_options, given, option_name


def main(arguments=None) -> int:
    """The command line. Returns the exit code, see cli/ending.py. Help and mistakes in options leave by SystemExit."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = build_parser()
    options = parser.parse_args(arguments)
    if not set(TASKS) & set(given(parser, options)):
        if not sys.stdin.isatty():
            parser.error(f"say what to do: {', '.join(map(option_name, TASKS))}")
        options.chat = True
    check_options(parser, options)
    from . import tasks             # here: imports that take seconds
    from .ending import ended
    return ended(tasks.run, options)


def warn_plainly():
    """From now on a warning is a line for the person at the terminal, without the line of the program that gives it,
    and comes once: a folder that cannot be written has one for each kernel."""
    told = set()

    def show(message, *_, **__):
        if (text := str(message)) not in told:
            told.add(text)
            print(f"warning: {text}", file=sys.stderr, flush=True)
    warnings.showwarning = show


def run_process():
    """Runs `main` and ends the process with its exit code."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))      # imports take seconds: Ctrl-C meanwhile is quiet
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):     # None: whoever started Python closed it
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    warn_plainly()
    sys.stdout.reconfigure(errors="replace")        # a terminal that lacks a letter shows a question mark
    end_process(main())
