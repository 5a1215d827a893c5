"""Printed digits and words: one number, one word, words in lines, or small print, in colours."""

import random
from dataclasses import dataclass
from functools import cache

import numpy as np

from ..words import Draw, dictionary, is_held
from .canvas import FONTS, Canvas, Look, colours_on, draw_look, text_size, tint
from .questions import ABSENT, Question, Words

FAINT = {False: ("yellow",), True: ("blue", "purple")}      # colours in which small letters cannot be read
DARK_PLATES = ("blue", "purple", "brown", "red", "green", "black")
PLATE = 0.2                 # share of the pictures whose text stands on a plate
SHORTEST, LONGEST = 2, 8    # letters of a word
MOST_DIGITS, MOST_LINES = 6, 4
SMALL = 14, 22              # pixels of height of small print
PITCH = 36                  # pixels between two lines of small print: more than a block, so that each block has one
SAME_IN_BOTH_CASES = set("cosuvwxz")
CASES = (str.lower, str.lower, str.upper, str.upper, str.capitalize)
NTH = (("first", "첫 번째"), ("second", "두 번째"), ("third", "세 번째"), ("last", "마지막"))


@dataclass(frozen=True)
class Line:
    """A text and the name of its colour."""

    text: str
    colour: str


@dataclass(frozen=True)
class Writing:
    """Lines of text. height: pixels of a line, or less where the longest line would not fit. turn: in degrees.

    x, y: where in the free space the text is, from 0 to 1. plate: the colour of what the text stands on, if any.
    pitch: heights of a line from one line to the next.
    """

    look: Look
    lines: tuple[Line, ...]
    font: str
    height: float
    turn: float
    x: float
    y: float
    plate: str | None
    pitch: float = 1.25

    @property
    def kind(self) -> str:
        return "number" if self.is_number else "words"

    @property
    def size(self) -> tuple[int, int]:
        return self.look.height, self.look.width

    @property
    def is_number(self) -> bool:
        return self.lines[0].text.isdigit()

    def draw(self) -> np.ndarray:
        return self.paint().finish()

    def paint(self) -> Canvas:
        canvas, look = Canvas(self.look), self.look
        margin = 0.04 * min(self.size) + 0.2 * abs(self.turn)
        free = look.width - 2 * margin - 8, look.height - 2 * margin - 8
        widest = max(text_size(line.text, self.height, self.font)[0] for line in self.lines)
        by = min(1, free[0] / widest, free[1] / (self.pitch * self.height * len(self.lines)))
        height, widest = by * self.height, by * widest
        step = self.pitch * height
        left = margin + 4 + self.x * (free[0] - widest)
        top = margin + 4 + self.y * (free[1] - step * len(self.lines))
        if self.plate:
            canvas.box(left - 7, top - 5, left + widest + 7, top + step * len(self.lines) + 5,
                       tint(canvas.rng, self.plate), 6)
        for i, line in enumerate(self.lines):
            role = f"line {i}" if i < MOST_LINES else "other"
            facts = {"role": role, "colour": line.colour, "number": i + 1, "all": len(self.lines)}
            if i == len(self.lines) - 1:
                facts["last"] = True
            canvas.text(left + widest / 2, top + step * (i + 0.5), line.text, height, tint(canvas.rng, line.colour),
                        self.font, self.turn, facts=facts)
        return canvas

    # ---- what can be asked of it ----------------------------------------------------------------------

    def questions(self, rng: random.Random, lang: str) -> list[Question]:
        words = Words(lang)
        found = self._whole(words) if len(self.lines) == 1 else self._lines(words)
        if rng.random() < ABSENT:
            found.append(words.absent("colour", words.one("shapes", rng.choice(("circle", "square", "star", "heart")))))
        return found

    def _whole(self, words: Words) -> list[Question]:
        text, colour = self.lines[0].text, self.lines[0].colour
        reading = Question("number" if self.is_number else "word", {"text": text}, read=text)
        signs = words.pick(("letter", "digit"), ("글자", "숫자"))[self.is_number]
        unit = words.pick(signs + "s" * (len(text) > 1), ("글자", "자리")[self.is_number])
        what = words.pick(("word", "number"), ("단어", "숫자"))[self.is_number]
        found = [reading, words.number("length", len(text), signs=unit), words.coloured("ink", colour, what=what)]
        for at, nth in ((0, NTH[0]), (1, NTH[1]), (len(text) - 1, NTH[3])):
            if at < len(text) > 2:
                found.append(Question("nth", {"nth": words.pick(*nth), "sign": signs, "one": text[at]}, read=text[at]))
        return found

    def _lines(self, words: Words) -> list[Question]:
        text, colours = ", ".join(line.text for line in self.lines), [line.colour for line in self.lines]
        found = [Question("words", {"text": text}, read=text)] if len(self.lines) <= MOST_LINES else []
        for i, line in enumerate(self.lines):
            is_last = i == len(self.lines) - 1
            for nth in NTH[3:] * is_last + NTH[i:i + 1] * (i < 3):
                found.append(Question("line", {"nth": words.pick(*nth), "text": line.text}, read=line.text))
            if colours.count(line.colour) == 1:
                colour = words.one("colours", line.colour)
                found.append(Question("tinted", {"colour": colour, "text": line.text}, read=line.text))
        return found


# ---- contents -------------------------------------------------------------------------------------------------


def word(draw: Draw, shortest: int = SHORTEST, longest: int = LONGEST) -> str:
    """A real word, an invented one or some letters, whose case can be seen. Training has more letters: who knows words
    guesses what he cannot read."""
    source, longest_letters = draw.rng.random(), min(longest, 5) if draw.held else longest
    real, invented = (0.45, 0.8) if draw.held else (0.25, 0.5)
    if source < real:
        text = draw.keep(lambda: draw.rng.choice(_real(shortest, longest, draw.held)))
    elif source < invented and longest >= 4:
        while not shortest <= len(text := draw.word("en")) <= longest:
            draw.contents.remove(text)
    else:
        text = draw.keep(lambda: "".join(draw.rng.choices("abcdefghijklmnopqrstuvwxyz", k=draw.rng.randint(
            shortest, longest_letters))))
    case = draw.rng.choice(CASES)
    return text.upper() if set(text) <= SAME_IN_BOTH_CASES | {"i", "l"} else case(text)


@cache
def _real(shortest: int, longest: int, held: bool) -> list[str]:
    return [english for english, _ in dictionary() if english.isascii() and english.isalpha() and english.islower()
            and shortest <= len(english) <= longest and is_held(english) == held]


def _colours(rng: random.Random, look: Look, n: int, plate: str | None) -> list[str]:
    if plate:
        return [rng.choice(("white", "yellow") if plate in DARK_PLATES else ("black",))] * n
    usable = [name for name in colours_on(look.dark) if name not in FAINT[look.dark]]
    if rng.random() < 0.4:
        usable = ["white"] if look.dark else ["black"]
    return rng.sample(usable, n) if len(usable) >= n and rng.random() < 0.7 else [rng.choice(usable)] * n


def _writing(rng: random.Random, texts: list[str]) -> Writing:
    is_short = len(texts) == 1 and len(texts[0]) < 6
    look = draw_look(rng, sides=(128, 160, 192, 256, 320) if is_short else (192, 256, 320, 384))
    plate = rng.choice([name for name in colours_on(look.dark) if name != "gray"]) if rng.random() < PLATE else None
    lines = tuple(map(Line, texts, _colours(rng, look, len(texts), plate)))
    turn = 0 if len(texts) > 1 or plate or rng.random() < 0.5 else rng.uniform(-8, 8)
    height = rng.uniform(26, 80 if len(texts) == 1 else 46)
    x, y = round(rng.random(), 3), round(rng.random(), 3)
    return Writing(look, lines, rng.choice(FONTS), round(height, 1), round(turn, 1), x, y, plate)


def number(draw: Draw) -> Writing:
    """One to six digits; the ten single digits are all trained on."""
    n = draw.rng.randint(2 if draw.held else 1, MOST_DIGITS)
    make = lambda: "".join(draw.rng.choices("0123456789", k=n))     # noqa: E731
    return _writing(draw.rng, [make() if n == 1 else draw.keep(make)])


def one_word(draw: Draw) -> Writing:
    return _writing(draw.rng, [word(draw)])


def lines(draw: Draw) -> Writing:
    return _writing(draw.rng, [word(draw, longest=7) for _ in range(draw.rng.randint(2, MOST_LINES))])


def small(draw: Draw) -> Writing:
    """Lines of small print, as small as the labels of charts and far more of it."""
    rng = draw.rng
    look, font = draw_look(rng, sides=(224, 256, 288, 320)), rng.choice([name for name in FONTS if name != "narrow"])
    height = round(rng.uniform(*SMALL), 1)
    n = rng.randint(2, look.height // PITCH - 1)
    texts = [_small_line(draw, height, font, look.width - PITCH) for _ in range(n)]
    lines = tuple(map(Line, texts, _colours(rng, look, len(texts), None)))
    return Writing(look, lines, font, height, 0, round(rng.random(), 3), round(rng.random(), 3), None, PITCH / height)


def _small_line(draw: Draw, height: float, font: str, room: float) -> str:
    """A word, and joined to it another one or a number where there is room: at most the 18 signs that are labelled."""
    first, more = word(draw, 3, 8), draw.rng.random()
    if more < 0.3:
        return first
    second = word(draw, 3, 8) if more < 0.8 else draw.keep(lambda: str(draw.rng.randint(10, 99999)))
    if text_size(joined := f"{first}-{second}", height, font)[0] > room:
        draw.contents.pop()
        return first
    return joined
