"""Bytes of files, read so that a fault is an exception.

To touch a mapped page that the disk cannot bring, or that the file has lost, ends the process (SIGBUS). `os.preadv`
says what is wrong instead, and lets go of Python's lock meanwhile, so that several threads read at once.
"""

import os

import numpy as np


def read_into(file: int, start: int, into: np.ndarray):
    """Fills `into`, a contiguous array, with the bytes of a file from `start` on. file: its descriptor. Raises OSError,
    and EOFError if the file ends before."""
    left = memoryview(into).cast("B")
    while left:
        if not (n := os.preadv(file, [left], start)):
            raise EOFError
        left, start = left[n:], start + n
