"""Sentences without end: what facts are hidden between, and plain documents for the loss on running text."""

from functools import cache

from .words import LANGUAGES, TEXT, Draw, Ko, pairs, pool, with_an
from . import facts

_PAIRS = {"object": "objects", "animal": "animals", "food": "foods", "job": "jobs", "place": "places",
          "nature": "nature", "colour": "colours"}
FACT_SHARE = 0.12  # of the sentences come from answers about the project


@cache
def _templates(lang: str) -> tuple[str, ...]:
    return tuple((TEXT / f"filler_{lang}.txt").read_text("utf-8").splitlines())


class _Slots(dict):
    """What the templates' slots stand for, drawn anew each time one is asked for."""

    def __init__(self, draw: Draw, lang: str):
        super().__init__()
        self.draw, self.lang = draw, lang

    def __missing__(self, slot: str) -> str:
        return Ko(self._content(slot))

    def _content(self, slot: str) -> str:
        draw, lang, rng = self.draw, self.lang, self.draw.rng
        side = LANGUAGES.index(lang)
        if slot in _PAIRS:
            return rng.choice(pairs(_PAIRS[slot]))[side]
        if slot == "adj":
            return rng.choice(pairs("pairs", "adjectives"))[side]
        if slot == "n":
            return str(rng.randint(2, 99))
        if slot == "hour":
            return f"{rng.randint(1, 12)} o'clock" if lang == "en" else f"{rng.randint(1, 12)}시"
        if slot in ("day", "month", "weather"):
            return rng.choice(pool(f"{slot}_{lang}"))
        return getattr(draw, slot)(lang)


def sentence(draw: Draw, lang: str) -> str:
    rng = draw.rng
    if rng.random() < FACT_SHARE:
        return facts.turn(rng, lang)[1]
    # A draw of its own: a long text may name a city twice.
    text = rng.choice(_templates(lang)).format_map(_Slots(Draw(rng, draw.held), lang))
    return with_an(text) if lang == "en" else text
