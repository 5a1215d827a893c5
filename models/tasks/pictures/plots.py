"""Plots as in the notebooks of this project: timelines of cards, and rooflines with kernels under them."""

import random
from dataclasses import dataclass

import numpy as np

from ..words import Draw
from .canvas import Area, Canvas, Look, draw_look, ranks, text_size
from .questions import Question, Words, one_of

SIDES = (224, 256, 288, 320, 384)
TEXT = 16
# The colours of notebooks/lab.py.
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = ("#2f6fb5", "#e08214", "#2e9e6b", "#c8483d", "#8a63b8", "#8c8c8c")
CLEAR = 0.06                # of the width of a timeline: by how much the last card ends after the others
STEPS = 50                  # in which times are drawn
# What a card may be called by its times, English and Korean; see _extremes.
LAST = (("finishes last", "가장 늦게 끝나는"), ("is busy last", "마지막까지 바쁜"), ("ends last", "맨 나중에 끝나는"))
FIRST = (("starts first", "가장 먼저 시작하는"), ("begins first", "맨 먼저 시작하는"),
         ("is busy first", "처음으로 바쁜"))
LATE = (("starts last", "가장 늦게 시작하는"), ("begins last", "맨 나중에 시작하는"))
EARLY = (("finishes first", "가장 먼저 끝나는"), ("ends first", "맨 먼저 끝나는"))
IDLE = (("is idle most", "가장 많이 쉬는"), ("is idle the longest", "가장 오래 쉬는"),
        ("works least", "가장 적게 일하는"))
BUSY = (("is busy most", "가장 바쁜"), ("works most", "가장 많이 일하는"), ("is busy the longest", "가장 오래 일하는"))
CARDS = ("card A, card B, card C, card D", "card 0, card 1, card 2, card 3", "CMP 0, CMP 1, CMP 2, CMP 3",
         "GPU 0, GPU 1, GPU 2, GPU 3", "A, B, C, D", "V100, T4, CMP, P100")
PIPES = ("dp4a", "half2", "fp32", "fp16", "int8", "tensor")
MEMORY = {"en": ("memory", ["memory", "memory-bound", "memory bandwidth"]), "ko": ("메모리", ["메모리"])}
COMPUTE = {"en": ("compute", ["compute", "compute-bound", "computation"]), "ko": ("연산", ["연산", "계산"])}


def _mixed(colour: str, paper: tuple, share: float) -> tuple[int, int, int]:
    """A colour of lab.py as transparent as matplotlib's alpha makes it."""
    parts = (int(colour[i:i + 2], 16) for i in (1, 3, 5))
    return tuple(round(share * part + (1 - share) * under) for part, under in zip(parts, paper))


# ---- timelines ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timeline:
    """A row for each card and in it a bar (start, end) for each pass, in steps of a 50th of the width."""

    look: Look
    labels: tuple[str, ...]
    rows: tuple[tuple[tuple[int, int], ...], ...]
    kind = "timeline"

    @property
    def content(self) -> str:
        return " ".join("s".join(f"{start}e{end}" for start, end in row) for row in self.rows)

    @property
    def size(self) -> tuple[int, int]:
        return self.look.height, self.look.width

    def draw(self) -> np.ndarray:
        return self.paint().finish()

    def paint(self) -> Canvas:
        canvas = Canvas(self.look, plain=True)
        rng = canvas.rng
        left = 12 + max(text_size(label, TEXT)[0] for label in self.labels)
        right, top = self.look.width - 12, rng.choice((10, 28))
        bottom = self.look.height - 42
        if top > 20:
            canvas.text((left + right) / 2, 14, rng.choice(("Measured", "Timeline", "Predicted", "Passes", "Busy")), 16)
        most = rng.choice((1, 2, 5, 10, 50, 100))
        for tick in range(6):
            x = left + (right - left) * tick / 5
            canvas.line([(x, top), (x, bottom)], canvas.faint)
            if tick % 2 == 0 or right - left > 180:
                canvas.text(x, bottom + 3, f"{most * tick / 5:g}", 14, anchor=(0.5, 0))
        canvas.text((left + right) / 2, self.look.height - 12, rng.choice(("seconds", "ms", "s", "time")), 15)
        same, step = rng.random() < 0.5, (bottom - top) / len(self.rows)
        for i, (label, row) in enumerate(zip(self.labels, self.rows)):
            colour, y = BLUE if same else (BLUE, ORANGE, GREEN, PURPLE, RED)[i], top + (i + 0.5) * step
            facts = self._facts(i)
            canvas.text(left - 5, y, label, TEXT, anchor=(1, 0.5), facts=facts | {"role": "label"})
            for number, (start, end) in enumerate(row):
                x, to_x = (left + (right - left) * at / STEPS for at in (start, end))
                tone = _mixed(colour, canvas.paper, (0.65, 1)[number % 2])
                canvas.box(x, y - 0.37 * step, to_x, y + 0.37 * step, tone, facts=facts)
        canvas.polygon([(left, top), (right, top), (right, bottom), (left, bottom)], outline=canvas.ink)
        return canvas

    def _facts(self, i: int) -> dict:
        """What labels.py says of a row."""
        ends, starts, busy = self._times()
        return {"long": ranks(ends)[i], "start": ranks(starts)[i], "busy": ranks(busy)[i], "number": i + 1,
                "passes": len(self.rows[i]), "all": len(self.rows)}

    def _times(self) -> tuple[list[int], list[int], list[int]]:
        """When each row ends and starts, and for how long it is busy."""
        return ([row[-1][1] for row in self.rows], [row[0][0] for row in self.rows],
                [sum(end - start for start, end in row) for row in self.rows])

    def questions(self, rng: random.Random, lang: str) -> list[Question]:
        words = Words(lang)
        found = [words.number("rows", len(self.rows)), *self._extremes(words, rng)]
        return found + [words.number("passes", len(row), label=label) for label, row in zip(self.labels, self.rows)]

    def _extremes(self, words: Words, rng: random.Random) -> list[Question]:
        ends, starts, busy = self._times()
        found = []
        for least, most, by in ((EARLY, LAST, ends), (FIRST, LATE, starts), (IDLE, BUSY, busy)):
            ordered = sorted(range(len(by)), key=by.__getitem__)
            for names, at, next_to in ((least, *ordered[:2]), (most, *ordered[:-3:-1])):
                if abs(by[at] - by[next_to]) >= CLEAR * STEPS:
                    english, korean = rng.choice(names)
                    found.append(one_of("ends", self.labels, self.labels[at], finishes_last=english, last=korean))
        return found


def timeline(draw: Draw) -> Timeline:
    """Two to four cards with one to six passes each; the times are held out together."""
    rng = draw.rng
    look, n = draw_look(rng, sides=SIDES, square=0.4, dark=0.15), rng.choice((2, 3, 3, 4))
    labels = tuple(rng.choice(CARDS).split(", ")[:n])
    while not draw.keep_if((made := Timeline(look, labels, tuple(_row(rng) for _ in range(n)))).content):
        pass
    return made


def _row(rng: random.Random) -> tuple[tuple[int, int], ...]:
    """One to six bars with gaps between them that can be seen."""
    start, end = rng.choice((0, 0, rng.randint(1, 14))), rng.randint(32, STEPS)
    n = rng.randint(1, min(6, (end - start) // 6))
    free = end - start - 3 * n - 2 * (n - 1)        # what is left when bars are 3 long and gaps 2
    cuts = sorted(rng.randint(0, free) for _ in range(2 * n - 2))
    parts = [b - a for a, b in zip([0, *cuts], [*cuts, free])]
    row, at = [], start
    for i in range(n):
        row.append((at, at + 3 + parts[2 * i]))
        at = row[-1][1] + 2 + (parts[2 * i + 1] if i < n - 1 else 0)
    return tuple(row)


# ---- rooflines ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Roofline:
    """Flat roofs over a slanted one, and kernels as dots; both axes logarithmic, from 0 to 100.

    slope: where the slanted roof begins, on the left border. roofs: (name, height), the highest first.
    kernels: (name, x, y) with an empty name for the only one.
    """

    look: Look
    slope: int
    roofs: tuple[tuple[str, int], ...]
    kernels: tuple[tuple[str, int, int], ...]
    kind = "roofline"

    @property
    def content(self) -> str:
        roofs = " ".join(f"{name}{height}" for name, height in self.roofs)
        return f"{roofs} r{self.slope} " + " ".join(f"k{x}y{y}" for _, x, y in self.kernels)

    @property
    def size(self) -> tuple[int, int]:
        return self.look.height, self.look.width

    def draw(self) -> np.ndarray:
        return self.paint().finish()

    def paint(self) -> Canvas:
        canvas = Canvas(self.look, plain=True)
        rng, named = canvas.rng, len(self.roofs) > 1
        left, top, bottom = 14 + 14 * (rng.random() < 0.5), 12, self.look.height - 30
        right = self.look.width - (14 + max(text_size(name, TEXT)[0] for name, _ in self.roofs) if named else 12)

        def at(x, y):
            return left + (right - left) * x / 100, bottom - (bottom - top) * y / 100
        for line in range(0, 101, 20):
            canvas.line([at(line, 0), at(line, 100)], canvas.faint)
            canvas.line([at(0, line), at(100, line)], canvas.faint)
        canvas.polygon([at(0, 0), at(100, 0), at(100, 100), at(0, 100)], outline=canvas.ink)
        colours = (RED, PURPLE, GREEN, BLUE) if named or rng.random() < 0.5 else (BLUE,)
        for (name, height), colour in reversed(list(zip(self.roofs, colours))):
            tone = _mixed(colour, canvas.paper, 1)
            canvas.line([at(0, self.slope), at(height - self.slope, height), at(100, height)], tone, 2.5)
            if named:
                highest, lowest = height == self.roofs[0][1], height == self.roofs[-1][1]
                facts = {"role": "label", "long": "most" if highest else "least" if lowest else "between"}
                canvas.text(right + 5, at(0, height)[1], name, TEXT, tone, anchor=(0, 0.5), facts=facts)
        for name, x, y in self.kernels:
            bound = "memory" if self._bound(x) is MEMORY else "compute"
            self._draw_kernel(canvas, *at(x, y), name, rng, {"bound": bound, "all": len(self.kernels)})
        canvas.text((left + right) / 2, self.look.height - 13, "operations per byte", 15)
        return canvas

    def _draw_kernel(self, canvas: Canvas, x: float, y: float, name: str, rng: random.Random, facts: dict):
        radius, dot = 5.5, rng.random() < 0.6
        corners = [(-1, 0), (-0.7, -0.7), (0, -1), (0.7, -0.7), (1, 0), (0.7, 0.7), (0, 1), (-0.7, 0.7)]
        corners = corners if dot else [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)]
        points = [(x + radius * a, y + radius * b) for a, b in corners]
        canvas.polygon(points, _mixed(ORANGE, canvas.paper, 1), canvas.ink, 1)
        canvas.notes.append(Area(points, facts, (x, y)))
        if name:
            canvas.text(x + 9, y + 11, name, 17, facts=facts | {"role": "other"})

    # ---- what can be asked of it ----------------------------------------------------------------------

    def _bound(self, x: int) -> dict:
        """The words for what bounds a kernel: all lie left of all corners or right of them."""
        return MEMORY if x < self.roofs[-1][1] - self.slope else COMPUTE

    def questions(self, rng: random.Random, lang: str) -> list[Question]:
        words, found = Words(lang), []
        bounds = [self._bound(x) for _, x, _ in self.kernels]
        for (name, _, _), bound in zip(self.kernels, bounds):
            kernel = words.pick(*((f"kernel {name}", f"커널 {name}") if name else ("the marked kernel", "표시된 커널")))
            by, right = bound[lang]
            wrong = (COMPUTE if bound is MEMORY else MEMORY)[lang][1]
            found.append(Question("bound", {"kernel": kernel, "by": by}, (right,), tuple(wrong)))
            if name and bounds.count(bound) == 1:
                found.append(one_of("bound_by", [other for other, _, _ in self.kernels], name, by=by))
        names = [name for name, _ in self.roofs]
        for at, highest in ((0, ("highest", "높은")), (-1, ("lowest", "낮은"))) if len(names) > 1 else ():
            found.append(one_of("roof", names, names[at], highest=words.pick(*highest)))
        return found


def roofline(draw: Draw) -> Roofline:
    """One to three flat roofs and one to three kernels; places and heights are held out together."""
    look = draw_look(draw.rng, sides=SIDES, square=0.5, dark=0.15)
    while not draw.keep_if((made := _roofline(draw.rng, look)).content):
        pass
    return made


def _roofline(rng: random.Random, look: Look) -> Roofline:
    slope, highest = rng.randint(8, 30), rng.randint(72, 92)
    heights = [highest - 17 * i - rng.randint(0, 3) for i in range(rng.choice((1, 1, 2, 3)))]
    names = rng.sample(PIPES, len(heights))
    n, corner = rng.choice((1, 1, 2, 3)), heights[-1] - slope
    spots = {"memory": range(6, corner - 7), "compute": range(heights[0] - slope + 8, 95)}
    kernels, used = [], []
    for i in range(n):
        side = rng.choice([name for name, xs in spots.items() if len(xs)])
        x = rng.choice(spots[side])
        if any(abs(x - other) < 14 for other in used):
            continue
        used.append(x)
        roof = x + slope if side == "memory" else rng.choice(heights)
        below = rng.choice((0, 0, rng.randint(4, 22))) if len(heights) == 1 else 0
        kernels.append((x, max(6, roof - below)))
    letters = "ABC" if len(kernels) > 1 else [""]
    named = tuple((name, *spot) for name, spot in zip(letters, kernels))
    return Roofline(look, slope, tuple(zip(names, heights)), named)
