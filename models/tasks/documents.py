"""Plain documents without a chat: paragraphs of filler and facts, so that perplexity means something."""

from . import facts
from .example import Example, estimate_tokens, pick_lang
from .filler import sentence
from .words import Draw


def make(rng, held: bool = False, length: int | None = None, lang: str | None = None) -> Example:
    """About `length` tokens of text, 100 to 400 where it is not said."""
    lang, draw = pick_lang(rng, lang), Draw(rng, held)
    length = length or rng.randint(100, 400)
    write = sentence if rng.random() < 0.7 else lambda draw, lang: facts.turn(draw.rng, lang)[1]
    paragraphs, n = [[]], 0
    while n < length:
        if len(paragraphs[-1]) >= 3 and rng.random() < 0.3:
            paragraphs.append([])
        paragraphs[-1].append(write(draw, lang))
        n += estimate_tokens(paragraphs[-1][-1])
    text = "\n\n".join(map(" ".join, paragraphs))
    return Example([], None, False, {"kind": "document"}, "text", lang, tuple(draw.contents), text)
