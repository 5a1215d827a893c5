"""Questions about pictures: their wordings, the answers, and what an answer is judged by.

A scene (shapes.py, writing.py, charts.py, plots.py) knows what can be asked of it and the facts of each answer. The
words come from models/text/pictures.toml, by the kind of the question and the language.
"""

import random
import tomllib
from dataclasses import dataclass, field
from functools import cache

from ..words import TEXT, Ko, with_an


@cache
def texts() -> dict:
    """With the kinds of question that training alone has."""
    files = (TEXT / "pictures.toml", TEXT / "wide" / "pictures.toml")
    return {name: table for file in files for name, table in tomllib.loads(file.read_text("utf-8")).items()}


ABSENT = 0.3                # of the pictures that are asked for something that is not there
NOTHING = {"en": ["no", "not", "none", "nothing"], "ko": ["없습니다", "없어요", "없음"]}
UNSEEN = {"en": ["see no picture", "see no image", "no picture"], "ko": ["보이지 않습니다", "없습니다", "안 보입니다"]}
EQUAL = {"en": ["equally many", "the same number"], "ko": ["똑같이", "똑같습니다"]}


@dataclass(frozen=True)
class Question:
    """Something to ask of a picture.

    kind    the table of pictures.toml with its wordings
    slots   what the wordings and the answers have in place of their {slots}
    right   what a right answer says: groups of words of which each must occur, in one of its alternatives
    wrong   what no right answer says beside that
    read    the text that has to be read, in place of right and wrong
    number  or the number that has to be told
    answer  the answer, where it is none of those of the kind: a key of [answers]
    """

    kind: str
    slots: dict = field(default_factory=dict)
    right: tuple = ()
    wrong: tuple = ()
    read: str | None = None
    number: int | None = None
    answer: str | None = None

    def ask(self, rng: random.Random, lang: str, held: bool = False, follows: bool = False) -> str:
        """The question in words: in ones that training never has, or in those of a second question of this kind."""
        wordings = texts()[self.kind][lang]
        if follows and "then" in wordings and rng.random() < 0.7:
            return self._fill(rng.choice(wordings["then"]), lang)
        return self._fill(rng.choice(wordings["held" if held else "ask"]), lang)

    def say(self, lang: str, whole: bool = False) -> str:
        """The right answer, in a whole sentence where that is wanted."""
        form = texts()[self.kind][lang]["sentence" if whole else "short"]
        if self.answer:
            form = texts()["answers"][f"{self.answer}_{lang}"]
        text = self._fill(form, lang)
        if lang == "en" and form.endswith(".") and not form.startswith("{label}"):      # labels stay as they are
            return text[0].upper() + text[1:]
        return text

    def _fill(self, text: str, lang: str) -> str:
        filled = text.format(**{slot: Ko(value) for slot, value in self.slots.items()})
        return filled[0].upper() + filled[1:] if text[0] == "{" and text[-1] == "?" and "label" not in text else filled

    @property
    def spelled(self) -> list[str]:
        """What the answer has read from the picture, where that is more than one letter."""
        read = [self.slots.get(slot, "") for slot in ("text", "label")]
        return [text for text in read if len(text) > 1 and self.number is None]

    def expect(self, lang: str) -> dict:
        """What the judge of tasks/judge.py wants."""
        if self.number is not None:
            return {"kind": "number", "number": self.number}
        if self.read is not None:
            return {"kind": "read", "text": self.read}
        return {"kind": "seen", "right": [list(group) for group in self.right], "wrong": list(self.wrong)}


class Words:
    """Names of colours, shapes, places and the like in one language, and every way to say each."""

    def __init__(self, lang: str):
        self.lang, self.side = lang, lang == "ko"

    def all(self, table: str, name: str) -> list[str]:
        """Every way to say it, the one of our own answers first."""
        return texts()[table][name][self.side].split("|")

    def one(self, table: str, name: str) -> str:
        return self.all(table, name)[0]

    def others(self, table: str, *names: str) -> list[str]:
        """All words of a table but those for these names."""
        right = {word for name in names for word in self.all(table, name)}
        return [word for name in texts()[table] if name not in names for word in self.all(table, name)
                if word not in right]

    def thing(self, colour: str | None, shape: str | None, plural: bool = False) -> str:
        """A red circle without "a", red shapes, circles; in Korean one form for one and many."""
        noun = self.one("shapes", shape) if shape else ("도형" if self.side else "shape")
        if plural and not self.side:
            noun += "es" if noun.endswith("s") else "s"
        return f"{self.one('colours', colour)} {noun}" if colour else noun

    def a(self, thing: str) -> str:
        return with_an(f"a {thing}")

    def listing(self, items: list[str]) -> str:
        if len(items) == 1:
            return items[0]
        if self.side:
            return ", ".join(items)
        return f"{', '.join(items[:-1])} and {items[-1]}"

    def pick(self, english, korean):
        return korean if self.side else english

    def named(self, kind: str, table: str, name: str, /, **slots) -> Question:
        """A question whose answer is one of the names of a table."""
        return Question(kind, slots, (self.all(table, name),), tuple(self.others(table, name)))

    def coloured(self, kind: str, colour: str, /, **slots) -> Question:
        return self.named(kind, "colours", colour, colour=self.one("colours", colour), **slots)

    def absent(self, kind: str, thing: str, /, **slots) -> Question:
        """A question of this kind about something that is not there."""
        return Question(kind, {"thing": thing} | slots, (NOTHING[self.lang],), answer="absent")

    def number(self, kind: str, n: int, /, **slots) -> Question:
        """A question whose answer is a number."""
        return Question(kind, {"n": str(n)} | slots, number=n)

    def yes_or_no(self, yes: bool) -> tuple[str, tuple, tuple]:
        """The word, and what is right and wrong beside it."""
        words = self.pick(("Yes", "No"), ("네", "아니요"))
        wrong = self.pick((["no", "not"], ["yes"]), (["아니요", "없습니다", "없어요"], ["네", "있습니다", "있어요"]))
        return words[not yes], ([words[not yes]],), tuple(wrong[not yes])


def one_of(kind: str, labels, label: str, /, **slots) -> Question:
    """A question whose answer is one of these labels."""
    return Question(kind, {"label": label} | slots, ([label],), tuple(other for other in labels if other != label))


def side_by_side(items: list) -> list[tuple]:
    """All pairs of two different ones, in either order."""
    return [(a, b) for a in items for b in items if a != b]
