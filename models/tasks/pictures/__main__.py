"""Draws forty examples with a question and its answer under each: python -m models.tasks.pictures OUT.png [SEED]"""

import random
import sys

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..example import text_of
from . import make

COLUMNS, ROWS, CELL, TEXT = 8, 5, 264, 92


def sheet(seed: int) -> Image.Image:
    rng, page = random.Random(seed), Image.new("RGB", (COLUMNS * CELL, ROWS * (CELL + TEXT)), "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(13)
    for i in range(COLUMNS * ROWS):
        while not (example := make(rng, held=i % 2 == 1, lang="en")).pictures:
            pass
        x, y = i % COLUMNS * CELL, i // COLUMNS * (CELL + TEXT)
        picture = Image.fromarray(np.asarray(example.pictures[0].draw()))
        picture.thumbnail((CELL - 8, CELL - 8))
        page.paste(picture, (x + 4, y + 4))
        for row, (asked, answer) in enumerate(_pairs(example)[:3]):
            pen.text((x + 4, y + CELL - 2 + 28 * row), f"{asked[:44]}\n   {answer[:42]}", "black", font, spacing=0)
    return page


def _pairs(example) -> list[tuple[str, str]]:
    """Questions about the first picture, and their answers."""
    contents = [message["content"] for message in example.messages]
    starts = [i for i, content in enumerate(contents) if isinstance(content, list)] + [len(contents)]
    texts = [text_of(content).replace("\n", " ") for content in contents[starts[0]:starts[1]]]
    return list(zip(texts[::2], texts[1::2]))


if __name__ == "__main__":
    sheet(int(sys.argv[2]) if len(sys.argv) > 2 else 0).save(sys.argv[1])
