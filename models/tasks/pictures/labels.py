"""What each block of a picture shows, as numbers: what a tower is taught before it is asked questions.

A canvas notes what is drawn on it and where, see Canvas.notes. Here these notes become a label for each fact of FACTS
and each block of 32 x 32 pixels, which is what one token of a picture stands for:

    colour  red         letter0 k    letter1 e    letter2 t
    shape   circle      group0  0    group1  0    group2  0       "ket", the first letters of a text
    alike   3           role    line 1            length  6

A fact is of what lies in the block: the last thing that was drawn there, unless another one has its middle there. Some
can only be known from the whole picture: how many things are alike, whether a bar is the longest. Letter i of a text is
told in place i modulo PLACES of the blocks that its middle is in or near, and in its group i // PLACES, so that each
place of a block has one letter at most, and which one of its text is known.
"""

import string

import numpy as np
from PIL import Image, ImageDraw

from .canvas import BLOCK, COLOURS, RANKS, Canvas, Text
from .shapes import CELLS, NAMES

PLACES = 6                  # letters of a text in one block
FINE = 8                    # pixels of the raster that tells which blocks an area covers
COVERED = 2                 # of the BLOCK / FINE squared points of a block make it covered
NEAR = 0.25                 # of a letter's width and height: how far around its middle it is told
NOTHING, UNUSED = 0, -1     # the label of a block where there is nothing of the kind, and of what is no block
LETTERS = string.digits + string.ascii_letters + " .-"
NUMBERS = tuple(range(10))
ROLES = ("line 0", "line 1", "line 2", "line 3", "label", "value", "axis", "title", "other")

# fact: what it may be. A label is 1 more than the place of the value here.
FACTS = {
    "colour": tuple(COLOURS), "shape": NAMES, "cell": tuple(CELLS), "middle": (True,), "size": RANKS,
    # How many things have its colour and shape, its colour, its shape, and how many there are; so for bars and lines.
    "alike": NUMBERS, "of_colour": NUMBERS, "of_shape": NUMBERS, "all": NUMBERS,
    **{f"letter{place}": tuple(LETTERS) for place in range(PLACES)},
    **{f"group{place}": (0, 1, 2) for place in range(PLACES)},
    "role": ROLES, "length": tuple(range(12)), "last": (True,),
    "number": NUMBERS,              # which line, bar or row it belongs to
    # Of a bar and its label the length; of a timeline's row the end, the start and the busy time; of roofs the height.
    "long": RANKS, "start": RANKS, "busy": RANKS, "tens": (*NUMBERS, 10), "ones": NUMBERS, "passes": NUMBERS,
    "bound": ("memory", "compute"),
}
SIZES = tuple(1 + len(values) for values in FACTS.values())
_NUMBERS = {fact: i for i, fact in enumerate(FACTS)}
_LABELS = {fact: {value: 1 + i for i, value in enumerate(values)} for fact, values in FACTS.items()}


def labelled(scene) -> tuple[np.ndarray, np.ndarray]:
    """The pixels of a scene, as draw() has them, and its labels int8 [blocks, facts], row after row."""
    canvas = scene.paint()
    return canvas.finish(), labels(canvas)


def labels(canvas: Canvas) -> np.ndarray:
    rows, columns = canvas.look.height // BLOCK, canvas.look.width // BLOCK
    table = np.zeros((rows, columns, len(FACTS)), np.int8)
    middles = []
    texts = [note for note in canvas.notes if isinstance(note, Text)]
    for note in canvas.notes:
        if isinstance(note, Text):
            continue
        values = _values(note.facts)
        for column, row in _covered(note.points, rows, columns):
            table[row, column] = values
        if note.middle:
            middles.append((_block(table, *note.middle), values))
    for note in sorted(texts, key=_weight):
        _write(table, note)
    for (row, column), values in middles:
        table[row, column] = values
        table[row, column, _NUMBERS["middle"]] = 1
    return table.reshape(rows * columns, len(FACTS))


def _weight(note: Text) -> int:
    """Where two texts share a block, the one of which more is asked is told."""
    return ("between", "least", "most").index(note.facts.get("long", "between"))


def _values(facts: dict) -> np.ndarray:
    values = np.zeros(len(FACTS), np.int8)
    for fact, value in facts.items():
        values[_NUMBERS[fact]] = _LABELS[fact].get(value, NOTHING)
    return values


def _block(table: np.ndarray, x: float, y: float) -> tuple[int, int]:
    """Row and column of the block at a point."""
    return min(max(int(y) // BLOCK, 0), len(table) - 1), min(max(int(x) // BLOCK, 0), table.shape[1] - 1)


def _covered(points: list, rows: int, columns: int) -> list[tuple[int, int]]:
    """Columns and rows of the blocks that an area covers."""
    mask = Image.new("L", (columns * BLOCK // FINE, rows * BLOCK // FINE))
    ImageDraw.Draw(mask).polygon([(x / FINE - 0.5, y / FINE - 0.5) for x, y in points], 1)
    n = BLOCK // FINE
    covered = np.asarray(mask).reshape(rows, n, columns, n).sum((1, 3), dtype=int) >= COVERED
    return [(column, row) for row, column in zip(*np.nonzero(covered))]


def _write(table: np.ndarray, note: Text):
    """Tells a text's letters; what the blocks said before is gone."""
    values = _values(note.facts | {"length": len(note.text)})
    told = {}       # block -> place -> letter's number
    for dx, dy in ((0, 0), (-2 * NEAR, 0), (2 * NEAR, 0), (0, NEAR), (0, -NEAR)):
        for i, (x, y, half) in enumerate(note.middles):
            places = told.setdefault(_block(table, x + dx * half, y + dy * note.height), {})
            places.setdefault(i % PLACES, i)        # middles come first
    for block, places in told.items():
        table[block] = values
        for place, i in places.items():
            table[block][_NUMBERS[f"letter{place}"]] = _LABELS[f"letter{place}"].get(note.text[i], NOTHING)
            table[block][_NUMBERS[f"group{place}"]] = _LABELS[f"group{place}"].get(i // PLACES, NOTHING)
