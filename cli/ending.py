"""How a program ends: with an exit code and, where something is amiss, with one sentence instead of a traceback."""

import os
import signal
import sys

import qengine
from engine.request import EngineStopped, ModelError, RequestError
from kernels.card import CardError
from kernels.compile import CompileError

from .interrupts import end_process, interruptible


def ended(work, *arguments) -> int:
    """work(*arguments), which returns an exit code or None. Returns the exit code: 0 done; 1 the engine stopped, or the
    output could not be written; 2 the model, the request or the card cannot be used as asked; 130 Ctrl-C."""
    before = signal.getsignal(signal.SIGINT)
    interruptible()
    try:
        code = work(*arguments)
        sys.stdout.flush()
        return code or 0
    except (ModelError, RequestError, CardError, CompileError) as error:
        qengine.note(f"qengine: {error}")
        return 2
    except EngineStopped as error:
        qengine.note(f"qengine: {error}")
        return 1
    except KeyboardInterrupt:
        qengine.note("")
        return 130
    except OSError as error:        # whoever read our output has left, as `head` does; or a disk is full
        if not isinstance(error, BrokenPipeError):
            named = f"{error.filename}: " * bool(error.filename)
            qengine.note(f"qengine: {named}{error.strerror or error}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        signal.signal(signal.SIGINT, before)


def run_program(work, *arguments):
    """`ended` as a process: ends it with the exit code."""
    end_process(ended(work, *arguments))
