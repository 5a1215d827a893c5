"""What every picture is drawn on: a ground, colours that a person would name at once, text, and the wear of copies.

Coordinates and sizes are pixels of the finished picture, x to the right and y down. A canvas is SCALE times as large
in both directions and is reduced in the end, which smooths the edges. All that is random here follows from a seed, so
that equal descriptions become equal pixels.
"""

import colorsys
import io
import math
import random
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont, ImageOps

SCALE = 2
BLOCK = 32                  # pixels of a side of what becomes one token
NOISE, BLUR, JPEG = 0.3, 0.12, 0.25     # shares of the pictures that have such wear
SIDES = (192, 224, 256, 256, 288, 320)  # of pictures that are not square
FONTS = ("sans", "sans", "sans", "bold", "wide", "narrow", "typewriter")
TYPEWRITER = 11             # pixels of height of Pillow's bitmap font

# Ranges of hue in degrees, saturation and value. No two of them are near each other.
COLOURS = {
    "red": ((-6, 3), (0.85, 1), (0.78, 1)), "orange": ((25, 33), (0.9, 1), (0.95, 1)),
    "yellow": ((50, 57), (0.8, 1), (0.93, 1)), "green": ((105, 145), (0.6, 1), (0.5, 0.8)),
    "blue": ((208, 232), (0.7, 1), (0.7, 1)), "purple": ((268, 284), (0.6, 0.9), (0.55, 0.8)),
    "pink": ((325, 340), (0.35, 0.55), (0.97, 1)), "brown": ((18, 28), (0.65, 0.8), (0.38, 0.5)),
    "gray": ((0, 360), (0, 0.04), (0.47, 0.6)), "black": ((0, 360), (0, 0.2), (0, 0.08)),
    "white": ((0, 360), (0, 0.02), (0.98, 1)),
}
UNSEEN = {False: ("white",), True: ("black", "brown", "gray")}   # on light and on dark grounds


@dataclass(frozen=True)
class Look:
    """What a picture has beside its contents: pixels of height and width, whether the ground is dark, and a seed for
    all the rest."""

    height: int
    width: int
    dark: bool
    seed: int


def draw_look(rng: random.Random, sides=SIDES, square: float = 0.6, dark: float = 0.3) -> Look:
    """A look of 256 x 256 pixels in the share `square` of cases, else of any of these sides."""
    height, width = (256, 256) if rng.random() < square else (rng.choice(sides), rng.choice(sides))
    return Look(height, width, rng.random() < dark, rng.getrandbits(32))


def colours_on(dark: bool) -> list[str]:
    """The names of the colours that can be told from the ground."""
    return [name for name in COLOURS if name not in UNSEEN[dark]]


def tint(rng: random.Random, name: str) -> tuple[int, int, int]:
    """One of the tones that have this name."""
    hue, saturation, value = (rng.uniform(*span) for span in COLOURS[name])
    return _rgb(hue, saturation, value)


def _rgb(hue: float, saturation: float, value: float) -> tuple[int, int, int]:
    return tuple(round(255 * part) for part in colorsys.hsv_to_rgb(hue % 360 / 360, saturation, value))


@dataclass(frozen=True)
class Area:
    """Something with these points (x, y) around it, what is known of it, and where its middle is, if that is told."""

    points: list
    facts: dict
    middle: tuple | None = None


@dataclass(frozen=True)
class Text:
    """A text, the middles (x, y) of its letters with half of their widths, the height of a line, and what is known."""

    text: str
    middles: list
    height: float
    facts: dict


class Canvas:
    """rng draws all that a description leaves open; ink is a tone of gray that stands out from the ground."""

    def __init__(self, look: Look, plain: bool = False):
        """plain: without lines or clouds in the ground, which figures with fine lines of their own need."""
        self.look, self.rng = look, random.Random(look.seed)
        self.ink = (235, 235, 230) if look.dark else (30, 30, 35)
        self.image = self._ground(plain).resize((SCALE * look.width, SCALE * look.height), Image.Resampling.NEAREST)
        self.pen = ImageDraw.Draw(self.image)
        self.notes = []         # Areas and Texts: what is drawn, where it says something

    def _ground(self, plain: bool) -> Image.Image:
        rng, size = self.rng, (self.look.width, self.look.height)
        base = rng.uniform(0.04, 0.17) if self.look.dark else rng.uniform(0.9, 1)
        hue, saturation = rng.uniform(0, 360), rng.choice((0, 0, rng.uniform(0, 0.09)))
        self.paper = _rgb(hue, saturation, base)
        other = _rgb(hue, saturation, base + rng.choice((1, -1) if self.look.dark else (-1,)) * rng.uniform(0.02, 0.06))
        kind = "plain" if plain else rng.choice(("plain", "plain", "slope", "cloud", "grid", "stripes", "panel"))
        ground = Image.new("RGB", size, self.paper)
        if kind == "slope":
            shade = Image.linear_gradient("L").rotate(rng.choice((0, 90, 180, 270))).resize(size)
            return ImageOps.colorize(shade, self.paper, other)
        if kind == "cloud":
            shade = Image.frombytes("L", (7, 7), rng.randbytes(49)).resize(size, Image.Resampling.BICUBIC)
            return ImageOps.colorize(shade, self.paper, other)
        pen, step = ImageDraw.Draw(ground), rng.choice((16, 24, 40))
        if kind in ("grid", "stripes"):
            for x in range(rng.randrange(step), size[0], step):
                pen.line((x, 0, x, size[1]), other)
        if kind == "grid":
            for y in range(rng.randrange(step), size[1], step):
                pen.line((0, y, size[0], y), other)
        if kind == "panel":
            pen.rounded_rectangle((5, 5, size[0] - 6, size[1] - 6), rng.choice((0, 8, 20)), other)
        return ground

    @property
    def faint(self) -> tuple[int, int, int]:
        """The tone of lines that shall not be looked at."""
        return tuple(round(0.84 * paper + 0.16 * ink) for paper, ink in zip(self.paper, self.ink))

    def polygon(self, points, fill=None, outline=None, width: float = 0):
        points = [(SCALE * x, SCALE * y) for x, y in points]
        if fill:
            self.pen.polygon(points, fill)
        if outline:
            self.pen.line([*points, *points[:2]], outline, max(1, round(SCALE * width)), "curve")

    def line(self, points, colour, width: float = 1, dashed: bool = False):
        points = [(SCALE * x, SCALE * y) for x, y in points]
        if not dashed:
            self.pen.line(points, colour, max(1, round(SCALE * width)), "curve")
            return
        for (x, y), (to_x, to_y) in zip(points, points[1:]):
            n = max(1, round(math.dist((x, y), (to_x, to_y)) / (7 * SCALE)))
            for i in range(n):
                ends = [(x + (to_x - x) * part / n, y + (to_y - y) * part / n) for part in (i, i + 0.55)]
                self.pen.line(ends, colour, max(1, round(SCALE * width)))

    def box(self, left: float, top: float, right: float, bottom: float, fill, round_by: float = 0, *,
            facts: dict | None = None):
        corners = [round(SCALE * side) for side in (left, top, right, bottom)]
        self.pen.rounded_rectangle((*corners[:2], corners[2] - 1, corners[3] - 1), SCALE * round_by, fill)
        if facts is not None:
            self.notes.append(Area([(left, top), (right, top), (right, bottom), (left, bottom)], facts))

    def text(self, x: float, y: float, text: str, size: float, colour=None, font: str = "sans", turn: float = 0, *,
             anchor: tuple[float, float] = (0.5, 0.5), facts: dict | None = None):
        """Text with its box's point `anchor`, from (0, 0) at its upper left to (1, 1), at x and y. turn: degrees to the
        left. facts: what is noted of it, if anything."""
        mask = _written(text, round(SCALE * size), font)
        width, height = mask.width / SCALE, mask.height / SCALE
        if turn:
            mask = mask.rotate(turn, Image.Resampling.BILINEAR, expand=True)
        corner = round(SCALE * x - anchor[0] * mask.width), round(SCALE * y - anchor[1] * mask.height)
        self.image.paste(colour or self.ink, corner, mask)
        if facts is not None:
            middle = (corner[0] + mask.width / 2) / SCALE, (corner[1] + mask.height / 2) / SCALE
            self.notes.append(Text(text, _middles(text, width, font, middle, turn), height, facts))

    def finish(self) -> np.ndarray:
        """The pixels, uint8 [height, width, 3]."""
        rng, image = self.rng, self.image.reduce(SCALE)
        if rng.random() < BLUR:
            image = image.filter(ImageFilter.BoxBlur(rng.uniform(0.2, 0.7)))
        if rng.random() < JPEG:
            file = io.BytesIO()
            image.save(file, "jpeg", quality=rng.randint(45, 90))
            image = Image.open(file)
        pixels = np.asarray(image)
        if rng.random() < NOISE:
            noise = np.frombuffer(rng.randbytes(pixels.size), np.int8).astype(np.int16).reshape(pixels.shape)
            pixels = np.clip(pixels + (noise * rng.randint(2, 14) >> 7), 0, 255).astype(np.uint8)
        return pixels


RANKS = ("least", "most", "between")


def ranks(values) -> list[str]:
    """Whether each is the least of the values, the most, or neither."""
    return [RANKS[0] if value == min(values) else RANKS[1] if value == max(values) else RANKS[2] for value in values]


def text_size(text: str, size: float, font: str = "sans") -> tuple[float, float]:
    """Width and height of the box of a text."""
    mask = _written(text, round(SCALE * size), font)
    return mask.width / SCALE, mask.height / SCALE


@cache
def _sans(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)


def _middles(text: str, width: float, font: str, middle: tuple[float, float], turn: float) -> list[tuple]:
    """The middle (x, y) of each letter of a text of this width, with half of the letter's width."""
    letters = ImageFont.load_default_imagefont() if font == "typewriter" else _sans(32)
    ends = [letters.getlength(text[:i]) for i in range(len(text) + 1)]
    by, slope = width / ends[-1], math.radians(turn)
    middles = []
    for start, end in zip(ends, ends[1:]):
        along = by * (start + end - ends[-1]) / 2
        x, y = middle[0] + along * math.cos(slope), middle[1] - along * math.sin(slope)
        middles.append((x, y, by * (end - start) / 2))
    return middles


@lru_cache(64)
def _written(text: str, size: int, font: str) -> Image.Image:
    """The text as a mask, as high as letters with all their parts."""
    if font == "typewriter":
        letters = ImageFont.load_default_imagefont()
        mask = Image.new("L", letters.getbbox(text)[2:])
        ImageDraw.Draw(mask).text((0, 0), text, 255, letters)
        by = 1.25 * size / TYPEWRITER
        return mask.resize((round(by * mask.width), round(by * mask.height)), Image.Resampling.BICUBIC)
    letters, stroke = _sans(size), size / 34 if font == "bold" else 0
    mask = Image.new("L", (math.ceil(letters.getlength(text) + 4 * stroke) + 2, math.ceil(1.25 * size)))
    ImageDraw.Draw(mask).text((2 * stroke + 1, 0), text, 255, letters, stroke_width=stroke)
    if font in ("wide", "narrow"):
        mask = mask.resize((round(mask.width * (1.25 if font == "wide" else 0.78)), mask.height),
                           Image.Resampling.BILINEAR)
    return mask
