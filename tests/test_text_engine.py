"""What an engine offers a server: the names of TextEngine, and no others."""

import inspect
import os

import pytest

import qengine
from engine.details import ModelDetails
from engine.text_engine import TextEngine
from tests.clients import OFFERED, Offered
from tests.models import TINY
from tests.paced import PacedEngine
from tests.scripted import ScriptedEngine
from tests.tiny import tiny_engine


@pytest.mark.parametrize("make", [tiny_engine, ScriptedEngine, PacedEngine])
def test_engines_offer_what_a_server_uses(make):
    """Each of its own: nothing is inherited from TextEngine, which only describes. The tests of the protocols use
    engines behind `Offered`, so that a server that used more would be noticed there."""
    engine = make()
    offered = OFFERED[TextEngine]
    assert TextEngine in type(engine).__mro__ and {"submit", "tokenizer", "reason", "count_pipes"} <= offered
    for name in offered:
        inspect.getattr_static(engine, name)
        described = vars(TextEngine).get(name)
        own = inspect.getattr_static(type(engine), name, None)
        assert described is None or own is not described, name
        if described is not None:
            assert inspect.signature(own).parameters.keys() == inspect.signature(described).parameters.keys()


def test_a_server_that_uses_more_of_an_engine_is_noticed():
    engine = Offered(tiny_engine())
    assert engine.name == tiny_engine().name
    with pytest.raises(AssertionError, match="'scheduler'"):
        engine.scheduler.thread


def test_what_a_file_says_of_a_model():
    gguf, details = qengine.GGUF(TINY), ModelDetails.of(qengine.open_model(TINY).weights)
    assert details.n_bytes == sum(tensor.nbytes for tensor in gguf.tensors.values())
    assert details.format == "Q8_0" and details.modified == os.path.getmtime(TINY)
    assert details.metadata["general.architecture"] == "qwen35" and "tokenizer.ggml.tokens" not in details.metadata


def test_what_is_known_of_random_weights():
    details = ModelDetails.of(qengine.open_model("synthetic:0.8b:q4_k").weights)
    assert round(details.n_parameters / 1e6, 2) == 752.39 and details.format == "Q4_K"
    assert details.n_bytes < details.n_parameters and details.metadata == {"general.architecture": "qwen35"}
    details = ModelDetails.of(qengine.open_model("synthetic:qwen3-4b-embedding").weights)
    assert details.metadata == {"general.architecture": "qwen3"}
