"""Functions that run in a process of their own, with a limit of seconds and bytes.

They work on what a stranger wrote (a chat template, a picture's file), which may take for ever, or take all memory.
While such a function runs, this process's interpreter lock is free for other threads. And this process can take back at
any time what the function has taken: it ends the other process.

The process is Python started anew. So it shares no memory, no lock and no card with this one, and it imports nothing
but the module with the functions. It stays for later calls, which come one at a time. Arguments and results travel as
JSON: to unpickle what comes from a stranger would run it. Those that are bytes travel beside the JSON as they are: to
write megabytes as text and to parse them would hold the interpreter's lock.

Grammars are tried elsewhere (engine/trials.py), in a fork for each: several of them run at the same time, all need the
vocabulary, which takes long to prepare, and one that dies must not take the others along.
"""

import contextlib
import importlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import Connection, Pipe

from engine.patience import ENDLESS, Patience

START_SECONDS = 120         # for the process to start and to import its module, on a machine that is very busy
OUT_OF_MEMORY = 77          # the exit status that says so


class LimitExceeded(Exception):
    """A function did not end within its limits. The text says what the function did, as in "takes longer than 5 s"."""


class OutOfPatience(LimitExceeded):
    """The caller does not want to wait any longer."""


class Closed(LimitExceeded):
    """The sandbox was closed during the call."""


class Failed(Exception):
    """What a function raised. kind: the name of the exception's class."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


class Sandbox:
    """Runs functions of one module, one call at a time.

    module: its name. n_bytes: of address space that the process may have, the interpreter included. The process starts
    at the first call and is there for all later ones. A call that exceeds its limits ends it, and the next call starts
    another one.
    """

    def __init__(self, module: str, n_bytes: int):
        self.module, self.n_bytes = module, n_bytes
        self._lock = threading.Lock()           # one call at a time
        self._process = self._pipe = None
        self._n_closed = 0                      # how often `close` was called
        self._end = lambda: None                # ends the process, if there is one; called when this object dies, too

    def call(self, function: str, *arguments, seconds: float, patience: Patience = ENDLESS):
        """What the function returns. seconds: that the function may take. patience: of the caller, who also waits for
        calls that came first. An argument, and an item of a tuple that the function returns, may be bytes; what else
        there is must be fit for JSON. Raises Failed, LimitExceeded, OutOfPatience, Closed."""
        n_closed = self._n_closed
        if not patience.wait(lambda seconds: self._lock.acquire(timeout=seconds)):
            raise OutOfPatience("has waited for others")
        try:
            if self._n_closed != n_closed:
                raise Closed("has been ended")
            if not patience.left:               # the lock came at the last moment: no process is ended for that
                raise OutOfPatience("has waited for others")
            if self._process is None or self._process.poll() is not None:
                self._start()
            seconds = min(seconds, patience.left)
            said = self._ask(packed([function, seconds, *arguments]), seconds, patience)
        except LimitExceeded as error:
            if self._n_closed != n_closed:
                raise Closed("has been ended") from None
            if not patience.left:
                raise OutOfPatience(str(error)) from None
            raise
        finally:
            self._lock.release()
        kind, text, is_tuple, *values = unpacked(said)
        if kind is not None:
            raise Failed(kind, text)
        return tuple(values) if is_tuple else values[0]

    def close(self):
        """End the process, and all calls that run or wait, at once. A later call starts another process."""
        self._n_closed += 1
        if self._process is not None:
            self._process.kill()

    def _start(self):
        self._end()
        ours, theirs = Pipe()
        program = (f"import sys; sys.path[:] = {sys.path!r}; from engine.sandbox import serve; "
                   f"serve({theirs.fileno()}, {self.module!r}, {self.n_bytes})")
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", program], stdin=subprocess.DEVNULL,
                                             stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self._pipe, self._end = ours, weakref.finalize(self, _end, self._process, ours)
        self._ask([], START_SECONDS)

    def _ask(self, asked: list[bytes], seconds: float, patience: Patience = ENDLESS) -> list[bytes]:
        """Sends what is asked, if anything is, and returns the answer."""
        status = -signal.SIGXCPU                        # of a process that has used too much processor time
        try:
            send(self._pipe, asked)
            if patience.wait(self._pipe.poll, seconds):
                return receive(self._pipe)
        except (EOFError, OSError):
            status = self._process.wait()
        self._end()
        if status == -signal.SIGXCPU:
            raise LimitExceeded(f"takes longer than {seconds:g} s")
        if status == OUT_OF_MEMORY:
            raise LimitExceeded(f"takes more than {self.n_bytes >> 20} MiB of memory")
        raise LimitExceeded(f"has ended its process, with status {status}")


def _end(process: subprocess.Popen, pipe: Connection):
    process.kill()
    process.wait()
    pipe.close()


# ---- through the pipe ----------------------------------------------------------------------------------------------


def packed(values: list) -> list[bytes]:
    """Values as messages: JSON, in which [] stands for a value that is bytes, then a message for each of these. The
    first byte of all says how many there are, at most 255."""
    is_plain = [isinstance(value, bytes | bytearray | memoryview) for value in values]
    written = json.dumps([[] if plain else [value] for value, plain in zip(values, is_plain)]).encode()
    return [bytes([sum(is_plain)]) + written, *itertools.compress(values, is_plain)]


def unpacked(messages: list[bytes]) -> list:
    """The values that `packed` made messages of."""
    plain = iter(messages[1:])
    return [value[0] if value else next(plain) for value in json.loads(messages[0][1:])]


def send(pipe: Connection, messages: list[bytes]):
    for message in messages:
        pipe.send_bytes(message)


def receive(pipe: Connection) -> list[bytes]:
    first = pipe.recv_bytes()
    return [first, *(pipe.recv_bytes() for _ in range(first[0]))]


# ---- in the other process ----------------------------------------------------------------------------------------


def serve(descriptor: int, module: str, n_bytes: int):
    """Answers calls until nobody can call any more. Both limits hold even when the process that calls is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # Ctrl-C in a terminal reaches this process, too
    functions, pipe = importlib.import_module(module), Connection(descriptor)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))
    send(pipe, packed([]))                              # ready
    with contextlib.suppress(EOFError, OSError):
        while True:
            try:
                send(pipe, _answer(functions, receive(pipe)))
            except MemoryError:
                os._exit(OUT_OF_MEMORY)


def _answer(functions, asked: list[bytes]) -> list[bytes]:
    """The class and the text of what a function raised, if it did, and what it returned."""
    function, seconds, *arguments = unpacked(asked)
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 2, hard))
    try:
        said = getattr(functions, function)(*arguments)
    except MemoryError:
        raise
    except Exception as error:
        return packed([type(error).__name__, str(error), False])
    is_tuple = isinstance(said, tuple)
    return packed([None, None, is_tuple, *(said if is_tuple else [said])])
