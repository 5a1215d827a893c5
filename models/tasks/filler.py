"""Sentences without end: what facts are hidden between, and plain documents for the loss on running text."""

from functools import cache

from . import facts
from .words import TEXT, Draw, Slots, with_an

FACT_SHARE = 0.12  # of the sentences come from answers about the project


@cache
def _templates(lang: str) -> tuple[str, ...]:
    return tuple((TEXT / f"filler_{lang}.txt").read_text("utf-8").splitlines())


def sentence(draw: Draw, lang: str) -> str:
    rng = draw.rng
    if rng.random() < FACT_SHARE:
        return facts.turn(rng, lang)[1]
    # A draw of its own: a long text may name a city twice.
    text = rng.choice(_templates(lang)).format_map(Slots(Draw(rng, draw.held), lang))
    return with_an(text) if lang == "en" else text
