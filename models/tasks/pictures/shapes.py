"""Shapes in colours: one, some different ones, or many to count."""

import math
import random
from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np

from .canvas import Area, Canvas, Look, colours_on, draw_look, tint
from .questions import ABSENT, EQUAL, NOTHING, Question, Words, side_by_side, texts

HOLLOW = 0.12               # share of the pictures whose shapes are only outlines
MOST = 9                    # shapes to count
FEW = 0.1                   # of what there is once: share that may be counted
GAP = 1.35                  # how many times as large as all others the largest shape is
APART = 0.17                # of the shorter side: what is that far to the left is to the left
UNCLEAR = 0.035             # of a side: how near to the border of two parts of a picture no shape lies
CELLS = [(column, row) for row in range(3) for column in range(3)]

# How far a shape may be turned in either direction, in degrees: a square stays a square and becomes no diamond.
TURNS = {"circle": 0, "square": 12, "triangle": 18, "star": 36, "heart": 18, "diamond": 8, "rectangle": 12, "oval": 12,
         "cross": 10, "moon": 40, "arrow": 180, "hexagon": 30}
UPRIGHT = ("rectangle", "oval")     # shapes that may stand on their shorter side


@cache
def outline(shape: str) -> tuple[tuple[float, float], ...]:
    """The corners of a shape around (0, 0), y down: its area is that of a circle of radius 0.8, and no corner is
    farther away than 1.2."""
    points = _CORNERS[shape]
    area = sum(x * to_y - to_x * y for (x, y), (to_x, to_y) in zip(points, points[1:] + points[:1])) / 2
    by = min(0.8 * math.sqrt(math.pi / abs(area)), 1.2 / max(math.hypot(*point) for point in points))
    return tuple((by * x, by * y) for x, y in points)


def _round(n: int, start: float = -90, radii=(1,)) -> list[tuple[float, float]]:
    """n corners around a circle, at these distances in turn."""
    angles = [math.radians(start + 360 * i / n) for i in range(n)]
    return [(radii[i % len(radii)] * math.cos(a), radii[i % len(radii)] * math.sin(a)) for i, a in enumerate(angles)]


def _heart() -> list[tuple[float, float]]:
    angles = [math.tau * i / 48 for i in range(48)]
    return [(16 * math.sin(t) ** 3 / 16, -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t)
                                         - math.cos(4 * t) + 2) / 16) for t in angles]


def _moon() -> list[tuple[float, float]]:
    """What a disc leaves of another one: the far side of the one, and back along the other."""
    far = [(math.cos(t), math.sin(t)) for t in np.linspace(math.radians(55), math.radians(305), 32)]
    middle = 0.45
    x, y = far[0][0] - middle, far[0][1]
    radius, end = math.hypot(x, y), math.atan2(y, x)
    near = [(middle + radius * math.cos(t), radius * math.sin(t)) for t in np.linspace(-end, end - math.tau, 24)]
    return [(px + 0.35, py) for px, py in far + near]


_CORNERS = {
    "circle": _round(48), "square": _round(4, -45), "triangle": _round(3), "star": _round(10, radii=(1, 0.42)),
    "heart": _heart(), "diamond": [(0, -1), (0.62, 0), (0, 1), (-0.62, 0)],
    "rectangle": [(-1, -0.5), (1, -0.5), (1, 0.5), (-1, 0.5)], "oval": [(x, 0.56 * y) for x, y in _round(48)],
    "cross": [(-0.3, -1), (0.3, -1), (0.3, -0.3), (1, -0.3), (1, 0.3), (0.3, 0.3), (0.3, 1), (-0.3, 1), (-0.3, 0.3),
              (-1, 0.3), (-1, -0.3), (-0.3, -0.3)],
    "moon": _moon(), "arrow": [(-1, -0.24), (0.15, -0.24), (0.15, -0.7), (1, 0), (0.15, 0.7), (0.15, 0.24), (-1, 0.24)],
    "hexagon": _round(6),
}
NAMES = tuple(_CORNERS)


@dataclass(frozen=True)
class Thing:
    """A shape with its middle at x and y, in shares of the width and the height. size: in shares of the shorter side,
    the radius of a circle of 1.25 times its area. turn: in degrees."""

    colour: str
    shape: str
    x: float
    y: float
    size: float
    turn: float

    @property
    def cell(self) -> tuple[int, int]:
        """Column and row of the part of the picture, of nine, that it is in."""
        return min(2, int(3 * self.x)), min(2, int(3 * self.y))

    @property
    def is_clear(self) -> bool:
        """Whether anyone would say that it is in this part."""
        return min(abs(at - border) for at in (self.x, self.y) for border in (1 / 3, 2 / 3)) > UNCLEAR


@dataclass(frozen=True)
class Shapes:
    """A picture of things. content: what the held-out rule sees of it."""

    look: Look
    things: tuple[Thing, ...]
    hollow: bool
    kind = "shapes"

    @property
    def content(self) -> str:
        return " ".join(f"{thing.colour}{thing.shape}{thing.cell[0]}{thing.cell[1]}" for thing in self.things)

    @property
    def size(self) -> tuple[int, int]:
        return self.look.height, self.look.width

    def draw(self) -> np.ndarray:
        return self.paint().finish()

    def paint(self) -> Canvas:
        canvas, unit = Canvas(self.look), min(self.size)
        for thing in self.things:
            fill, turn = tint(canvas.rng, thing.colour), math.radians(thing.turn)
            scale = unit * thing.size
            points = [(self.look.width * thing.x + scale * (x * math.cos(turn) - y * math.sin(turn)),
                       self.look.height * thing.y + scale * (x * math.sin(turn) + y * math.cos(turn)))
                      for x, y in outline(thing.shape)]
            if self.hollow:
                canvas.polygon(points, outline=fill, width=max(3, 0.2 * scale))
            else:
                canvas.polygon(points, fill)
            middle = self.look.width * thing.x, self.look.height * thing.y
            canvas.notes.append(Area(points, self._facts(thing), middle))
        return canvas

    def _facts(self, thing: Thing) -> dict:
        """What labels.py says of it."""
        n = {"alike": (thing.colour, thing.shape), "of_colour": (thing.colour, None), "of_shape": (None, thing.shape),
             "all": (None, None)}
        facts = {"colour": thing.colour, "shape": thing.shape, "cell": thing.cell}
        facts |= {fact: len(self._named(*name)) for fact, name in n.items()}
        sizes = sorted(other.size for other in self.things)
        if len(sizes) > 1:
            is_most, is_least = thing.size / sizes[-2] > GAP, sizes[1] / thing.size > GAP
            facts["size"] = "most" if is_most else "least" if is_least else "between"
        return facts

    # ---- what can be asked of it ----------------------------------------------------------------------

    def questions(self, rng: random.Random, lang: str) -> list[Question]:
        words = Words(lang)
        found = [*self._of_each(words), *self._counts(words, rng), *self._places(words, rng), *self._absent(words, rng),
                 *self._sizes(words), *self._comparisons(words, rng), *self._everything(words)]
        return found + self._alone(words) if len(self.things) == 1 else found

    def _named(self, colour: str | None, shape: str | None) -> list[Thing]:
        return [thing for thing in self.things if colour in (None, thing.colour) and shape in (None, thing.shape)]

    def _only(self, thing: Thing) -> tuple[str | None, str | None] | None:
        """The fewest words, colour and shape, that mean this thing alone."""
        for name in ((None, thing.shape), (thing.colour, None), (thing.colour, thing.shape)):
            if len(self._named(*name)) == 1:
                return name
        return None

    def _alone(self, words: Words) -> list[Question]:
        thing, = self.things
        shape, name = words.one("shapes", thing.shape), words.thing(thing.colour, thing.shape)
        right = _right(words, thing)
        return [Question("what", {"thing": name, "a_thing": words.a(name)}, *right),
                words.named("shape", "shapes", thing.shape, shape=shape, a_shape=words.a(shape))]

    def _of_each(self, words: Words) -> list[Question]:
        """The colour of each shape that is there once, and the shape of each such colour."""
        found = []
        for thing in self.things:
            colour, shape = words.one("colours", thing.colour), words.one("shapes", thing.shape)
            if len(self._named(None, thing.shape)) == 1:
                found.append(words.coloured("colour", thing.colour, thing=shape))
            if len(self._named(thing.colour, None)) == 1:
                found.append(words.named("which", "shapes", thing.shape, shape=shape, colour=colour))
        return found

    def several(self, lang: str) -> list[Question]:
        """The colours of all things of a shape, where there are several, and the shapes of all of a colour; in the
        order of the table of their names."""
        words, found = Words(lang), []
        for shape in dict.fromkeys(thing.shape for thing in self.things):
            things = self._named(None, shape)
            if len(things) > 1:
                colours = {thing.colour for thing in things}
                found.append(self._all_of(words, "colours_of", "colours", colours, words.thing(None, shape),
                                          words.thing(None, shape, plural=True)))
        for colour in dict.fromkeys(thing.colour for thing in self.things):
            things = self._named(colour, None)
            if len(things) > 1:
                chosen = {thing.shape for thing in things}
                found.append(self._all_of(words, "shapes_of", "shapes", chosen, words.one("colours", colour),
                                          words.thing(colour, None, plural=True)))
        return found

    def _all_of(self, words: Words, kind: str, table: str, names: set[str], thing: str, things: str) -> Question:
        names = sorted(names, key=list(texts()[table]).index)
        def say(name):
            return words.thing(None, name, plural=True) if table == "shapes" else words.one(table, name)
        right = tuple([*words.all(table, name), say(name)] for name in names)
        wrong = (*words.others(table, *names), *(say(name) for name in texts()[table] if name not in names))
        slots = {"thing": thing, "things": things, "list": words.listing([*map(say, names)])}
        return Question(kind, slots, right, wrong)

    def _counts(self, words: Words, rng: random.Random) -> list[Question]:
        """How many there are of each kind, seldom of what there is only one of or none."""
        names = {(None, None), *((None, t.shape) for t in self.things), *((t.colour, None) for t in self.things),
                 *((t.colour, t.shape) for t in self.things)}
        chosen = [name for name in sorted(names, key=str) if len(self._named(*name)) > 1 or rng.random() < FEW]
        if rng.random() < FEW:
            chosen.append((None, rng.choice(NAMES)))
        return [self._count(words, *name) for name in chosen]

    def _count(self, words: Words, colour: str | None, shape: str | None) -> Question:
        n = len(self._named(colour, shape))
        things = words.thing(colour, shape, plural=True)
        return words.number("count", n, thing=words.thing(colour, shape), things=things,
                            are_n_things=f"is 1 {words.thing(colour, shape)}" if n == 1 else f"are {n} {things}")

    def _places(self, words: Words, rng: random.Random) -> list[Question]:
        found, clear = [], all(thing.is_clear for thing in self.things)
        for thing in self.things:
            if thing.is_clear and (name := self._only(thing)):
                found.append(_where(words, "where", thing.cell, thing=words.thing(*name)))
            if clear and [other.cell for other in self.things].count(thing.cell) == 1:
                name = words.thing(thing.colour, thing.shape)
                found.append(Question("at", {"thing": name, "a_thing": words.a(name)} | _place(words, thing.cell),
                                      *_right(words, thing)))
        empty = [cell for cell in CELLS if cell not in [thing.cell for thing in self.things]]
        if clear and empty and rng.random() < 0.3:
            found.append(Question("at", _place(words, rng.choice(empty)), (NOTHING[words.lang],), answer="nothing"))
        pairs = side_by_side([thing for thing in self.things if self._only(thing)])
        for a, b in rng.sample(pairs, min(4, len(pairs))):
            found += self._sides(words, rng, a, b)
        return found

    def _sides(self, words: Words, rng: random.Random, a: Thing, b: Thing) -> list[Question]:
        """On which side of b the thing a is, for each direction in which that is clear."""
        found, unit = [], min(self.size)
        across = words.pick(("to the left of", "to the right of"), ("왼쪽", "오른쪽"))
        along = words.pick(("above", "below"), ("위쪽", "아래쪽"))
        for away, sides in ((self.look.width * (a.x - b.x), across), (self.look.height * (a.y - b.y), along)):
            if abs(away) > APART * unit:
                side, other = sides[away > 0], sides[away <= 0]
                one, two = rng.sample(sides, 2)
                heads = [text.split()[-2] if text.startswith("to") else text for text in (side, other)]
                found.append(Question("side", {"a": words.thing(*self._only(a)), "b": words.thing(*self._only(b)),
                                               "one": one, "other": two, "side": side}, ([heads[0]],), (heads[1],)))
        return found

    def _absent(self, words: Words, rng: random.Random) -> list[Question]:
        """Yes and no, and questions about what is not there."""
        found = []
        for there in (True, False):
            thing = rng.choice(self.things)
            colour, shape = rng.choice(((thing.colour, thing.shape), (None, thing.shape), (thing.colour, None)))
            if not there:
                colour = colour and rng.choice(colours_on(self.look.dark))
                shape = shape and rng.choice(NAMES)
            n, name = len(self._named(colour, shape)), words.thing(colour, shape)
            yes, right, wrong = words.yes_or_no(n > 0)
            some_of_it = words.a(name) if n == 1 else f"more than one {name}" if n else f"no {name}"
            found.append(Question("exists", {"thing": name, "a_thing": words.a(name), "a_thing_or_none": some_of_it,
                                             "yes": yes, "there_is": "있습니다" if n else "없습니다"}, right, wrong))
        shape = rng.choice(NAMES)
        if not self._named(None, shape) and rng.random() < ABSENT:
            found.append(words.absent(rng.choice(("colour", "where")), words.one("shapes", shape)))
        return found

    def _sizes(self, words: Words) -> list[Question]:
        found, ordered = [], sorted(self.things, key=lambda thing: thing.size)
        if len(ordered) < 2:
            return found
        for at, next_to, names in ((-1, -2, ("largest", "큰")), (0, 1, ("smallest", "작은"))):
            extreme, (small, large) = ordered[at], sorted((ordered[at].size, ordered[next_to].size))
            ratio = large / small
            if ratio > GAP and len(self._named(extreme.colour, extreme.shape)) == 1:
                found.append(Question("size", {"thing": words.thing(extreme.colour, extreme.shape),
                                               "largest": words.pick(*names)}, *_right(words, extreme)))
        return found

    def _comparisons(self, words: Words, rng: random.Random) -> list[Question]:
        """Of two colours, or of two shapes, which are more."""
        found = []
        for table in ("colours", "shapes"):
            n = Counter(thing.colour if table == "colours" else thing.shape for thing in self.things)
            pairs = [(a, b) for a, b in side_by_side(list(n)) if n[a] + n[b] > 2]
            for a, b in rng.sample(pairs, min(2, len(pairs))):
                found.append(self._comparison(words, table, a, b, n))
        return found

    def _comparison(self, words: Words, table: str, a: str, b: str, n: Counter) -> Question:
        def name(which, plural):
            return words.thing(*((which, None) if table == "colours" else (None, which)), plural)
        slots = {"a": name(a, False), "b": name(b, False), "as": name(a, True), "bs": name(b, True)}
        if n[a] == n[b]:
            return Question("more", slots, (EQUAL[words.lang],), answer="equal")
        more, fewer = (a, b) if n[a] > n[b] else (b, a)
        right, wrong = ([words.pick(f"more {text}", text) for text in (name(which, True), *words.all(table, which))]
                        for which in (more, fewer))
        slots |= {"more": name(more, True), "fewer": name(fewer, True)}
        return Question("more", slots, (right,), (*wrong, *EQUAL[words.lang]))

    def _everything(self, words: Words) -> list[Question]:
        """All things, of each kind how many; from left to right where there is one of each."""
        if len(self.things) == 1:
            return []
        n = Counter((thing.colour, thing.shape) for thing in sorted(self.things, key=lambda thing: thing.x))
        if len(n) > 4:
            return []
        items = [f"{number} {words.thing(*name, plural=True)}" if number > 1 and words.lang == "en" else
                 words.a(words.thing(*name)) if words.lang == "en" else
                 f"{words.thing(*name)} {number}개" for name, number in n.items()]
        right = tuple([item.removeprefix("a ").removeprefix("an ")] for item in items)
        colours, shapes = zip(*n)
        wrong = words.others("colours", *colours) + words.others("shapes", *shapes)
        return [Question("everything", {"list": words.listing(items)}, right, tuple(wrong))]


def _right(words: Words, thing: Thing) -> tuple[tuple, tuple]:
    """What an answer that names a thing says, and what it does not."""
    return ((words.all("colours", thing.colour), words.all("shapes", thing.shape)),
            (*words.others("colours", thing.colour), *words.others("shapes", thing.shape)))


def _place(words: Words, cell: tuple[int, int]) -> dict:
    place = words.one("places", f"{cell[0]} {cell[1]}")
    return {"place": place, "in_place": place}


def _where(words: Words, kind: str, cell: tuple[int, int], **slots) -> Question:
    name = f"{cell[0]} {cell[1]}"
    return Question(kind, _place(words, cell) | slots, (words.all("places", name)[words.lang == "en":],),
                    tuple(words.others("places", name)))


# ---- scenes ---------------------------------------------------------------------------------------------------


def _turn(rng: random.Random, shape: str) -> float:
    return rng.uniform(-TURNS[shape], TURNS[shape]) + (90 if shape in UPRIGHT and rng.random() < 0.4 else 0)


def _thing(rng: random.Random, colour: str, shape: str, x: float, y: float, size: float) -> Thing:
    return Thing(colour, shape, round(x, 4), round(y, 4), round(size, 4), round(_turn(rng, shape), 1))


def _scene(rng: random.Random, look: Look, things: list[Thing]) -> Shapes:
    return Shapes(look, tuple(things), rng.random() < HOLLOW)


def one(rng: random.Random) -> Shapes:
    """A single shape, anywhere and of any size that fits."""
    look = draw_look(rng, sides=(128, 160, 192, 256, 320))
    size = rng.uniform(0.11, 0.4)
    x, y = (0.5, 0.5) if rng.random() < 0.25 else (rng.random(), rng.random())
    x, y = _inside(look, x, y, size)
    return _scene(rng, look, [_thing(rng, rng.choice(colours_on(look.dark)), rng.choice(NAMES), x, y, size)])


def _inside(look: Look, x: float, y: float, size: float) -> tuple[float, float]:
    """The nearest place where nothing of a shape is cut off."""
    unit = min(look.height, look.width)
    edges = [min(0.5, (1.22 * size * unit + 2) / side) for side in (look.width, look.height)]
    return tuple(min(max(at, edge), 1 - edge) for at, edge in zip((x, y), edges))


def some(rng: random.Random) -> Shapes:
    """Two to five shapes in different parts of the picture, of different shapes and colours for the most part."""
    look = draw_look(rng, sides=(224, 256, 288, 320))
    n, colours = rng.choice((2, 2, 3, 3, 4, 5)), colours_on(look.dark)
    alike = rng.random()
    chosen_colours = rng.sample(colours, n) if alike > 0.2 else [rng.choice(colours) for _ in range(n)]
    chosen_shapes = rng.sample(NAMES, n) if alike < 0.8 else [rng.choice(NAMES) for _ in range(n)]
    sizes = [rng.uniform(0.09, 0.13)] * n
    if rng.random() < 0.5:
        sizes = [rng.uniform(0.07, 0.09) for _ in range(n)]
        sizes[rng.randrange(n)] = rng.uniform(0.125, 0.135)
    things = []
    for (column, row), colour, shape, size in zip(rng.sample(CELLS, n), chosen_colours, chosen_shapes, sizes):
        x, y = (at + 1 / 6 + rng.uniform(-0.02, 0.02) for at in (column / 3, row / 3))
        things.append(_thing(rng, colour, shape, *_inside(look, x, y, size), size))
    return _scene(rng, look, things)


def many(rng: random.Random, most: int = MOST) -> Shapes:
    """One to nine shapes of one to three kinds, to be counted, anywhere but apart from each other."""
    look, n = draw_look(rng, sides=(224, 256, 288, 320)), rng.randint(1, most)
    colours, shapes = rng.sample(colours_on(look.dark), 2), rng.sample(NAMES, 2)
    kinds = rng.choice((
        [(colours[0], shapes[0])], [(colours[0], shapes[0]), (colours[1], shapes[0])],
        [(colours[0], shapes[0]), (colours[0], shapes[1])], [(colours[0], shapes[0]), (colours[1], shapes[1])],
        [(colour, shape) for colour in colours for shape in shapes]))
    return _scattered(rng, look, [rng.choice(kinds) for _ in range(n)])


def mixed(rng: random.Random) -> Shapes:
    """Four to nine shapes of three to six kinds, several of most, so that much else is there beside what is counted."""
    look, n = draw_look(rng, sides=(224, 256, 288, 320)), rng.randint(4, MOST)
    colours, shapes = rng.sample(colours_on(look.dark), rng.randint(2, 3)), rng.sample(NAMES, rng.randint(2, 4))
    every = [(colour, shape) for colour in colours for shape in shapes]
    kinds = rng.sample(every, min(rng.randint(3, 6), len(every), n))
    things = kinds + [rng.choice(kinds[:3]) for _ in range(n - len(kinds))]
    return _scattered(rng, look, rng.sample(things, n))


def _scattered(rng: random.Random, look: Look, kinds: list[tuple[str, str]]) -> Shapes:
    """Shapes of these colours and names, of about one size, anywhere but apart from each other."""
    size = rng.uniform(0.065, 0.1 if len(kinds) < 7 else 0.085)
    spots = zip(kinds, _spots(rng, look, len(kinds), 1.22 * size))
    return _scene(rng, look, [_thing(rng, *kind, x, y, size * rng.uniform(0.9, 1)) for kind, (x, y) in spots])


def _spots(rng: random.Random, look: Look, n: int, radius: float) -> list[tuple[float, float]]:
    """n middles of discs that do not touch; radius in shares of the shorter side."""
    unit = min(look.height, look.width)
    wide, high = look.width / unit, look.height / unit
    while True:
        spots = []
        for _ in range(40 * n):
            x, y = rng.uniform(radius, wide - radius), rng.uniform(radius, high - radius)
            if all(math.hypot(x - other[0], y - other[1]) > 2.15 * radius for other in spots):
                spots.append((x, y))
                if len(spots) == n:
                    return [(x / wide, y / high) for x, y in spots]
