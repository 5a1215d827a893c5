"""Bar charts with labels, standing or lying, with written values, with an axis, or with neither."""

import random
from dataclasses import dataclass

import numpy as np

from ..words import Draw
from .canvas import Canvas, Look, colours_on, draw_look, ranks, text_size, tint
from .questions import ABSENT, Question, Words, one_of, side_by_side
from .writing import NTH, word

TICKS = 5                   # parts of the axis; where values have to be read from it, they lie on its lines
LEAST_GAP = 0.06            # of the axis: how far the longest and the shortest bar are from the next ones
TEXT = 16                   # pixels of height of labels
APART = 5                   # pixels between two labels side by side, at least: labels that touch are read as one
FROM_SIDE = ("from left to right", "왼쪽부터"), ("from top to bottom", "위에서부터")
SIDES = (224, 256, 288, 320)
# English and Korean: what the longest bar is called, what has its value, and the longer of two.
LONGEST = ((("longest", "긴"), ("greatest", "큰")), (("largest", "큰"), ("largest", "큰")),
           (("highest", "높은"), ("highest", "큰")))
SHORTEST = ((("shortest", "짧은"), ("smallest", "작은")), (("smallest", "작은"), ("smallest", "작은")),
            (("lowest", "낮은"), ("lowest", "작은")))
LONGER = (("longer", "길어", "깁니다"), ("larger", "커", "큽니다"), ("higher", "높아", "높습니다"))
SHORTER = (("shorter", "짧아", "짧습니다"), ("smaller", "작아", "작습니다"), ("lower", "낮아", "낮습니다"))


@dataclass(frozen=True)
class Chart:
    """A bar for each label, on an axis from 0 to top.

    colours: one for each bar. lying: the bars run to the right. written: each bar has its value at its end. axis: the
    axis has lines and numbers. title: above it all, or None.
    """

    look: Look
    labels: tuple[str, ...]
    values: tuple[int, ...]
    top: int
    colours: tuple[str, ...]
    lying: bool
    written: bool
    axis: bool
    title: str | None
    kind = "chart"

    @property
    def content(self) -> str:
        return " ".join(f"{label.lower()}{value}" for label, value in zip(self.labels, self.values))

    @property
    def size(self) -> tuple[int, int]:
        return self.look.height, self.look.width

    def draw(self) -> np.ndarray:
        return self.paint().finish()

    def paint(self) -> Canvas:
        canvas = Canvas(self.look, plain=True)
        rng, widest = canvas.rng, max(text_size(label, TEXT)[0] for label in self.labels)
        shown = [tint(rng, self.colours[0])] * len(self.labels) if len(set(self.colours)) == 1 else [
            tint(rng, name) for name in self.colours]
        left = 8 + (widest + 4 if self.lying else text_size(str(self.top), TEXT)[0] + 4 if self.axis else 4)
        bottom = self.look.height - (28 if not self.lying or self.axis else 10)
        top, right = (30 if self.title else 10), self.look.width - 12
        if self.written:
            top, right = (top + (0 if self.lying else 18)), right - (26 if self.lying else 0)
        elif self.axis:
            right -= 8 * self.lying
        frame = left, top, right, bottom
        self._draw_axis(canvas, frame)
        fat = rng.uniform(0.55, 0.8)
        for i, (label, value, colour) in enumerate(zip(self.labels, self.values, shown)):
            self._draw_bar(canvas, frame, i, label, value, colour, fat)
        if self.title:
            canvas.text((left + right) / 2, 15, self.title, 19, facts={"role": "title"})
        return canvas

    def _facts(self, i: int) -> dict:
        """What labels.py says of a bar, its label and its written value."""
        tens, ones = divmod(self.values[i], 10)
        return {"colour": self.colours[i], "long": ranks(self.values)[i], "number": i + 1, "all": len(self.values),
                "tens": tens, "ones": ones}

    def _draw_axis(self, canvas: Canvas, frame: tuple):
        left, top, right, bottom = frame
        for tick in range(TICKS + 1 if self.axis else 0):
            share, number = tick / TICKS, str(self.top * tick // TICKS)
            if self.lying:
                x = left + share * (right - left)
                canvas.line([(x, top), (x, bottom)], canvas.faint)
                canvas.text(x, bottom + 4, number, TEXT - 1, anchor=(0.5, 0), facts={"role": "axis"})
            else:
                y = bottom - share * (bottom - top)
                canvas.line([(left, y), (right, y)], canvas.faint)
                canvas.text(left - 4, y, number, TEXT - 1, anchor=(1, 0.5), facts={"role": "axis"})
        canvas.line([(left, top), (left, bottom)] if self.lying else [(left, bottom), (right, bottom)], canvas.ink, 1.5)

    def _draw_bar(self, canvas: Canvas, frame: tuple, i: int, label: str, value: int, colour: tuple, fat: float):
        left, top, right, bottom = frame
        long, facts = value / self.top, self._facts(i)
        of_label, of_value = facts | {"role": "label"}, facts | {"role": "value"}
        if self.lying:
            step = (bottom - top) / len(self.labels)
            y, end = top + (i + 0.5) * step, left + long * (right - left)
            canvas.box(left, y - fat * step / 2, end, y + fat * step / 2, colour, facts=facts)
            canvas.text(left - 5, y, label, TEXT, anchor=(1, 0.5), facts=of_label)
            if self.written:
                canvas.text(end + 3, y, str(value), TEXT, anchor=(0, 0.5), facts=of_value)
        else:
            step = (right - left) / len(self.labels)
            x, end = left + (i + 0.5) * step, bottom - long * (bottom - top)
            canvas.box(x - fat * step / 2, end, x + fat * step / 2, bottom, colour, facts=facts)
            canvas.text(x, bottom + 4, label, TEXT, anchor=(0.5, 0), facts=of_label)
            if self.written:
                canvas.text(x, end - 1, str(value), TEXT, anchor=(0.5, 1), facts=of_value)

    # ---- what can be asked of it ----------------------------------------------------------------------

    def questions(self, rng: random.Random, lang: str) -> list[Question]:
        words, n = Words(lang), len(self.labels)
        found = [words.number("bars", n), *self._extremes(words, rng), *self._pairs(words, rng), *self._labels(words)]
        if self.written or self.axis:
            found += [words.number("value", value, label=label) for label, value in zip(self.labels, self.values)]
        if self.title:
            found.append(Question("title", {"text": self.title}, read=self.title))
        if len(set(self.colours)) > 1:
            found += [words.coloured("colour", colour, thing=words.pick(f"bar {label}", f"막대 {label}"))
                      for label, colour in zip(self.labels, self.colours)]
        other = rng.choice("ABCDEFGHKMPRTX")
        if other not in self.labels and rng.random() < ABSENT:
            found.append(words.absent("value", words.pick(f"bar {other}", f"막대 {other}"), label=other))
        return found

    def _labels(self, words: Words) -> list[Question]:
        """What the bars are called: all of them, and one by its place."""
        side, text = words.pick(*FROM_SIDE[self.lying]), ", ".join(self.labels)
        found, n = [Question("labels", {"text": text, "from_side": side}, read=text)], len(self.labels)
        for at, nth in ((0, NTH[0]), (1, NTH[1]), (2, NTH[2]), (n - 1, NTH[3])):
            if at < n:
                found.append(Question("bar_at", {"nth": words.pick(*nth), "label": self.labels[at], "from_side": side},
                                      read=self.labels[at]))
        return found

    def _extremes(self, words: Words, rng: random.Random) -> list[Question]:
        found, ordered = [], sorted(range(len(self.values)), key=self.values.__getitem__)
        for names, at in ((LONGEST, ordered[-1]), (SHORTEST, ordered[0])):
            longest, greatest = rng.choice(names[:2] if self.lying else names)
            found.append(one_of("top", self.labels, self.labels[at], longest=words.pick(*longest),
                                greatest=words.pick(*greatest)))
        return found

    def _pairs(self, words: Words, rng: random.Random) -> list[Question]:
        found, places = [], dict(zip(self.labels, range(len(self.labels))))
        pairs = side_by_side(list(self.labels))
        for a, b in rng.sample(pairs, min(3, len(pairs))):
            one, other = self.values[places[a]], self.values[places[b]]
            if abs(one - other) < LEAST_GAP * self.top:
                continue
            is_longer = rng.random() < 0.6
            english, korean, korean_is = rng.choice((LONGER if is_longer else SHORTER)[:2 if self.lying else 3])
            label = a if (one > other) == is_longer else b
            longer = words.pick(english, korean)
            found.append(one_of("higher", (a, b), label, a=a, b=b, longer=longer, longer_is=korean_is))
        return found


# ---- contents -------------------------------------------------------------------------------------------------


def _labels(draw: Draw, n: int, lying: bool, room: float) -> list[str]:
    """Letters, years, numbers or short words. room: pixels of width that a label has."""
    rng, kind = draw.rng, draw.rng.random()
    if kind < 0.35 or room < 2 * TEXT:
        first = rng.choice("ABCDKPQ")
        return [chr(ord(first) + i) for i in range(n)] if rng.random() < 0.6 else rng.sample("ABCDEFGHKLMNPRSTUXYZ", n)
    if kind < 0.5:
        first = rng.randint(1, 12) if rng.random() < 0.5 or n > 4 else rng.randint(1990, 2030)
        return [str(first + i) for i in range(n)]
    case = str.upper if rng.random() < 0.25 and lying else str.lower if rng.random() < 0.5 else str.capitalize
    return [_fitting(draw, case, 6 if lying else 5, room) for _ in range(n)]


def _fitting(draw: Draw, case, longest: int, room: float) -> str:
    """A word for which there is room."""
    while text_size(text := case(word(draw, 3, longest)), TEXT)[0] > room:
        draw.contents.pop()
    return text


def _values(rng: random.Random, n: int, top: int, on_lines: bool) -> list[int]:
    """n values of which the largest and the smallest stand out from the others."""
    step = top // TICKS if on_lines else 1
    while True:
        values = [step * rng.randint(1, top // step) for _ in range(n)]
        ordered = sorted(values)
        if min(ordered[-1] - ordered[-2], ordered[1] - ordered[0]) >= max(LEAST_GAP * top, 1):
            return values


def chart(draw: Draw) -> Chart:
    """Two to seven bars; labels with their values are held out together."""
    while True:
        n_contents, made = len(draw.contents), _chart(draw)
        if draw.keep_if(made.content):
            return made
        del draw.contents[n_contents:]


def _chart(draw: Draw) -> Chart:
    rng = draw.rng
    look, lying = draw_look(rng, sides=SIDES), rng.random() < 0.45
    n = rng.randint(2, 7 if look.height >= 256 or not lying else 6)
    top, written = rng.choice((10, 20, 50, 100)), rng.random() < 0.45
    axis = rng.random() < (0.35 if written else 0.75)
    n = min(n, 5) if axis and not written else n
    room = look.width if lying else (look.width - (52 if axis else 24)) / n - APART     # beside the numbers of the axis
    labels, usable = _labels(draw, n, lying, room), colours_on(look.dark)
    colours = rng.sample(usable, n) if rng.random() < 0.35 else [rng.choice(usable)] * n
    title = word(draw, 3, 8).capitalize() if rng.random() < 0.35 else None
    values = _values(rng, n, top, axis and not written)
    return Chart(look, tuple(labels), tuple(values), top, tuple(colours), lying, written, axis, title)
