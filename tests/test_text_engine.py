"""What an engine offers a server: the names of TextEngine, and no others."""

import inspect

import pytest

from engine.text_engine import TextEngine
from tests.clients import OFFERED, Offered
from tests.paced import PacedEngine
from tests.scripted import ScriptedEngine
from tests.tiny import tiny_engine


@pytest.mark.parametrize("make", [tiny_engine, ScriptedEngine, PacedEngine])
def test_engines_offer_what_a_server_uses(make):
    """Each of its own: nothing is inherited from TextEngine, which only describes. The tests of the protocols use
    engines behind `Offered`, so that a server that used more would be noticed there."""
    engine = make()
    assert TextEngine in type(engine).__mro__ and {"submit", "tokenizer", "reason", "count_pipes"} <= OFFERED
    for name in OFFERED:
        inspect.getattr_static(engine, name)
        described = vars(TextEngine).get(name)
        offered = inspect.getattr_static(type(engine), name, None)
        assert described is None or offered is not described, name
        if described is not None:
            assert inspect.signature(offered).parameters.keys() == inspect.signature(described).parameters.keys()


def test_a_server_that_uses_more_of_an_engine_is_noticed():
    engine = Offered(tiny_engine())
    assert engine.name == tiny_engine().name
    with pytest.raises(AssertionError, match="'scheduler'"):
        engine.scheduler.thread
