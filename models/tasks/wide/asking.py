"""Questions asked in many more ways, for training alone: what newcomers write is in nobody's list of wordings.

A question gets other words of the same meaning, another Korean ending, slips of the fingers, and sentences around it
that have nothing to do with it, of any words that the generators know: so the model learns which words an answer
hangs on, and passes over the others. The texts are in models/text/wide/asking.toml. Examples to judge by never come
here.
"""

import random
import re
import tomllib
from functools import cache

from ..words import TEXT, Draw, Slots, is_held

SAME, ENDING = 0.3, 0.4     # shares: of the words that have others of the same meaning, and of Korean questions
BEFORE, AFTER = 0.35, 0.15  # of the questions that have something before and after them
SLIPS = (0, 0, 1, 1, 2)  # of the fingers in a question
SPACES = 0.25               # of the Korean questions lose spaces
NAMES = re.compile(r"\d|\w[/_=.:-]\w|--|\w?[A-Z]{2}")   # a slip in a word with one of these makes another name of it


@cache
def texts() -> dict:
    return tomllib.loads((TEXT / "wide" / "asking.toml").read_text("utf-8"))


def widened(rng: random.Random, question: str, lang: str) -> str:
    """The question as somebody else might put it."""
    question = _same(rng, question, lang)
    if lang == "ko" and rng.random() < ENDING:
        question = _ended(rng, question)
    question = _slipped(rng, question, lang)
    slots = Slots(Draw(rng, held=False), lang)
    if rng.random() < BEFORE:
        question = rng.choice(texts()[f"before_{lang}"]).format_map(slots) + question
    if rng.random() < AFTER:
        question += rng.choice(texts()[f"after_{lang}"]).format_map(slots)
    return question


@cache
def _others(lang: str) -> tuple[re.Pattern, dict]:
    """A pattern for all words that have others of the same meaning, and these."""
    others = {first: rest for first, *rest in (line.split("|") for line in texts()[f"same_{lang}"])}
    words = "|".join(map(re.escape, sorted(others, key=len, reverse=True)))
    if lang == "en":    # nothing of an option or a path, and no card that has a name of its own
        return re.compile(rf"(?<![\w./-])(?<!emulated )({words})(?![\w/-]|\.\w)"), others
    # A word of one syllable ends there, or before a particle: the beginning of a longer one is another word.
    one = "|".join(word for word in others if len(word) == 1)
    longer = "|".join(re.escape(word) for word in sorted(others, key=len, reverse=True) if len(word) > 1)
    return re.compile(rf"(?<![가-힣])(?<!가상 )({longer}|(?:{one})(?=[은는이가을를과와의도만에로]?(?![가-힣])))"), others


def _same(rng: random.Random, question: str, lang: str) -> str:
    pattern, others = _others(lang)
    return pattern.sub(lambda match: rng.choice(others[match[0]]) if rng.random() < SAME else match[0], question)


@cache
def _endings() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(ending, others), the longest first."""
    lines = [tuple(line.split("|")) for line in texts()["endings_ko"]]
    return tuple(sorted(((first, rest) for first, *rest in lines), key=lambda pair: -len(pair[0])))


def _ended(rng: random.Random, question: str) -> str:
    for ending, others in _endings():
        if question.endswith(ending):
            return question.removesuffix(ending) + rng.choice(others)
    return question


def _slipped(rng: random.Random, question: str, lang: str) -> str:
    """With wrong, missing and doubled letters, and without spaces, as it is typed in haste; names stay what they are.
    No word comes about that is held out: it may be an invented one."""
    typed = _typed(rng, question.split(" "), lang)
    return question if any(map(is_held, set(typed.split()) - set(question.split()))) else typed


def _typed(rng: random.Random, words: list[str], lang: str) -> str:
    for _ in range(rng.choice(SLIPS)):
        at = rng.randrange(len(words))
        if len(words[at]) > 3 and not NAMES.search(words[at]):
            words[at] = _slip(rng, words[at], lang)
    if lang == "ko" and rng.random() < SPACES:
        share = rng.choice((0.3, 0.6, 1))
        return words[0] + "".join(("" if rng.random() < share else " ") + word for word in words[1:])
    return " ".join(words)


def _slip(rng: random.Random, word: str, lang: str) -> str:
    at = rng.randrange(1, len(word) - 1)
    kind = rng.randrange(4)
    if kind == 0:
        return word[:at] + word[at + 1:]
    if kind == 1:
        return word[:at] + word[at] + word[at:]
    if kind == 2 or lang == "ko":
        return word[:at] + word[at + 1] + word[at] + word[at + 2:]
    return word[:at] + _beside(rng, word[at]) + word[at + 1:]


def _beside(rng: random.Random, letter: str) -> str:
    """A key beside the letter's."""
    for row in texts()["keys"]:
        at = row.find(letter.lower())
        if at >= 0:
            return row[at - 1] if at and rng.random() < 0.5 or at == len(row) - 1 else row[at + 1]
    return letter
