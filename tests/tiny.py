"""The small model that the tests of the server and of the command line share, on the emulated card."""

import functools
from pathlib import Path

import qengine

ROOT = Path(__file__).parents[1]
MODEL = "synthetic:tiny"
CONTEXT = 2048


@functools.cache
def tiny_engine() -> "qengine.Engine":
    return qengine.load(MODEL, card="emulated", ctx=CONTEXT, slots=2, progress=False)
