"""Makers of engines for replicas: engine/replicas/actor.py's Recipe names them."""

import qengine
from engine.request import EngineStopped
from kernels import block_sparse
from tests.paced import PacedEngine
from tests.scripted import ScriptedEngine, ScriptedPooling


FEW_PAGES = block_sparse.Rule(dense=2, sinks=1, near=2, base=2, share=4, spare=6)   # for short sparse prompts


def scripted(**arguments):
    return ScriptedEngine(**arguments)


def paced(n_slots=2, **arguments):
    engine = PacedEngine(**arguments)
    engine.n_slots = n_slots
    return engine


def pooling(**arguments):
    return ScriptedPooling(**arguments)


def loaded(model, **arguments):
    return qengine.load(model, card="emulated", progress=False, **arguments)


def loaded_sparsely(**arguments):
    block_sparse.RULE = FEW_PAGES
    return loaded(**arguments)


def broken(error):
    raise RuntimeError(error)


class Failing(PacedEngine):
    """Stops after `n` requests, as an engine does whose card has failed."""

    def __init__(self, n, **arguments):
        super().__init__(**arguments)
        self.n_left = n

    def submit(self, request):
        if not self.n_left:
            self.reason = "the engine has stopped: the card is broken"
            raise EngineStopped(self.reason)
        self.n_left -= 1
        return super().submit(request)


def failing(**arguments):
    return Failing(**arguments)
