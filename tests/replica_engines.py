"""Makers of engines for replicas: engine/replicas/actor.py's Recipe names them."""

from tests.paced import PacedEngine
from tests.scripted import ScriptedEngine, ScriptedPooling


def scripted(**arguments):
    return ScriptedEngine(**arguments)


def paced(**arguments):
    return PacedEngine(**arguments)


def pooling(**arguments):
    return ScriptedPooling(**arguments)
