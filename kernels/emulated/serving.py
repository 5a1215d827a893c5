"""Programs that a card asks for, run by this machine's processor while the card waits: without Python, so that no lock
of the interpreter delays an answer, and on threads of their own, so that the card may be an emulated one.

Card and service write words of a small piece of memory that both reach, the mail (`mapped` in kernels/card.py):

    the card      layer, size, products; then request = a number that is not the last one
    the service   runs the program of (layer, size); then answer = the number of the request

size: which of the layer's programs. products: how many products the request needs; the number is only added up. An
answer with FAILED among its bits says that no answer will come any more. The loop is `serve` in runtime.ll. It enters
Python only where a request wants data that must be fetched first, see Supply.
"""

import ctypes
import sys
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .native import AWAKE, MAIL, MAIL_BYTES, SERVICE, SERVICE_BYTES, Pool, explain

MAIL_WORDS = MAIL_BYTES // 4
WORD = {name: offset // 4 for name, offset in MAIL.items()}          # places of the words in the mail
FAILED = 1 << 31
THREAD = "service of a card"                    # the name of the thread
PR_SET_TIMERSLACK, TIMER_SLACK = 29, 1000       # Linux's name for it; ns that a sleep may take longer
UNKNOWN = "a request has come for which there is no program"
BRING = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_uint32] * 2)


class Supply(NamedTuple):
    """Data that programs read and that are not always there.

    wanted: int32 array; a request wants what has the first `products` numbers in it. places: for each layer, the
    address of uint64 [n, 2]; data are there if the line of their number does not begin with 0. bring(layer, numbers)
    fetches what is not there and fills in the places, before the program runs; what it raises ends the service.
    """

    wanted: np.ndarray
    places: list[int]
    bring: Callable


class Service:
    """Answers the requests in `mail`, uint32 [MAIL_WORDS] in memory that the card reaches, from `start` on.

    programs: (layer, size) -> native.Program. n_threads: processor threads. supply: a Supply, if the programs need one.
    Attributes: failure, the words for what went wrong, or "".
    """

    def __init__(self, mail, programs, n_threads, supply=None):
        self.mail, self.failure, self._supply = mail, "", supply
        self._programs, self._n_threads = list(programs.values()), n_threads
        n_layers, n_sizes = (1 + max(numbers) for numbers in zip(*programs))
        self._table = np.zeros((n_layers, n_sizes, 2), np.int64)
        for (layer, size), program in programs.items():
            self._table[layer, size] = program.address, n_threads - 1 if program.parallel else 0
        self._struct = ctypes.create_string_buffer(SERVICE_BYTES)
        for name, kind, value in (("mail", ctypes.c_int64, mail.ctypes.data),
                                  ("table", ctypes.c_int64, self._table.ctypes.data),
                                  ("n_layers", ctypes.c_int32, n_layers), ("n_sizes", ctypes.c_int32, n_sizes)):
            kind.from_buffer(self._struct, SERVICE[name]).value = value
        if supply:
            self._bring_function = BRING(self._bring)
            self._lines = np.array(supply.places, np.int64)
            for name, value in (("bring", ctypes.cast(self._bring_function, ctypes.c_void_p).value),
                                ("wanted", supply.wanted.ctypes.data), ("places", self._lines.ctypes.data)):
                ctypes.c_int64.from_buffer(self._struct, SERVICE[name]).value = value
        self._pool, self._thread = Pool(AWAKE), None

    def start(self):
        """Begins to answer. What is in the mail by now counts as answered."""
        self.mail[WORD["answer"]] = self.mail[WORD["request"]]
        self._thread = threading.Thread(target=self._serve, name=THREAD, daemon=True)
        self._thread.start()
        self._at_exit = weakref.finalize(self, _stop, self._struct, self._thread)

    def _serve(self):
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, TIMER_SLACK)
        why = self._pool.serve(ctypes.addressof(self._struct), self._programs, self._n_threads)
        if why in (1, 2):
            self.failure = UNKNOWN if why == 2 else self._explain()
        self.mail[WORD["answer"]] |= np.uint32(FAILED)

    def _bring(self, layer, n):
        """Called by `serve`. Returns 0, or 1 where that failed."""
        try:
            self._supply.bring(layer, self._supply.wanted[:n])
        except Exception as error:
            self.failure = str(error) or type(error).__name__
            return 1
        return 0

    def _explain(self):
        address = self._number("program")
        program = next(program for program in self._programs if program.address == address)
        return explain(program.launches[program.buffer[1] - 1], program.buffer[3])

    def _number(self, name):
        return ctypes.c_int64.from_buffer(self._struct, SERVICE[name]).value

    @property
    def is_busy(self):
        """Whether a request is under way."""
        return bool(self._number("program"))

    @property
    def served(self):
        """Requests that were answered."""
        return self._number("served")

    @property
    def products(self):
        """Their products."""
        return self._number("products")

    @property
    def busy(self):
        """Seconds that these took."""
        return self._number("busy") * 1e-9

    def close(self):
        """Answers the request under way, and no other. A card that waits is told so."""
        if self._thread is not None:
            self._at_exit()
            self._pool.close()
            self._thread = None
        self._bring_function = self._supply = None      # which refer to the window, and through `self` in a circle


def _stop(struct, thread):
    ctypes.c_int32.from_buffer(struct, SERVICE["stop"]).value = 1
    thread.join()
