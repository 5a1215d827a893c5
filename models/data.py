"""From examples to training rows: the tokenizer and its training, documents packed into rows of tokens, and their
pictures packed into rows of patches.

A unit of rows is a function of the seed, its number and its sizes alone, so that training resumes where it stopped,
whatever the number of worker processes. This file needs no PyTorch.
"""

import collections
import functools
import itertools
import math
import multiprocessing
import os
import random
import re
import tempfile
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers

from models import tasks
from models.tasks.pictures.labels import UNUSED
from models.tasks.words import Draw

# How text is cut before byte pairs are merged: the pre-tokenizer that GGUF files call "qwen35".
PATTERN = (r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
           r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# The family's special tokens. The second list is tags that an answer may contain: they are shown as text.
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
           "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>",
           "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
           "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
           "<|repo_name|>", "<|file_sep|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

# The generation prompt and the answer that follows it, up to the end of the turn; and the prompt with thinking on,
# where closing the tag belongs to the answer, also if there are no thoughts.
ANSWER = re.compile(r"(<\|im_start\|>assistant\n(?:<think>\n(?:\n</think>\n\n)?)?)(.*?<\|im_end\|>)",
                    re.DOTALL)
THINKING_PROMPT = "<|im_start|>assistant\n<think>\n"

PAD = "<|image_pad|>"        # stands for a picture in the text, and for each 32 x 32 pixels of it in a row
# What a token is to the loss: nothing, such as padding, a picture or what is forced; text; a part of an answer.
PADDING, TEXT, TARGET = 0, 1, 2
SHORTEST_CONTEXT = 200
PICTURE_ROW = 576            # tokens of a row of pictures: as many as four of 384 x 384 pixels have
SIZE, MERGE = 16, 2          # pixels of a patch and patches of a token, across and down
MISSES = 4                   # examples that find no room, after which a unit counts as full


# ---- tokenizer -----------------------------------------------------------------------------------------


def byte_level_tokenizer(model: tokenizers.models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def train_tokenizer(texts, n_vocab: int) -> Tokenizer:
    """A byte-level BPE tokenizer of at most n_vocab tokens, the special ones last, from the texts alone."""
    tokenizer = byte_level_tokenizer(tokenizers.models.BPE())
    tags = re.compile("|".join(map(re.escape, CONTROL + TAGS)))
    tokenizer.train_from_iterator(
        (tags.sub("\n", text) for text in texts),
        tokenizers.trainers.BpeTrainer(
            vocab_size=n_vocab - len(CONTROL) - len(TAGS), min_frequency=2, show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TAGS])
    return tokenizer


def sample_texts(seed, n: int) -> list[str]:
    """The rendered text of n training examples, to train the tokenizer on."""
    rng = random.Random(f"tokenizer {seed}")
    return [tasks.render(draw(rng, 600)[0]) for _ in range(n)]


def sample_many_texts(seed: int, n: int, n_workers: int) -> list[str]:
    """The same by several processes, a thousand each; how many processes makes no difference."""
    with multiprocessing.get_context("spawn").Pool(n_workers) as pool:
        seeds = [(f"{seed} {part}", 1000) for part in range(n // 1000)]
        parts = pool.starmap(sample_texts, seeds, chunksize=1)
    return [text for part in parts for text in part]


def encode(tokenizer: Tokenizer, text: str, thinking: bool, spelled: tuple = ()) -> tuple[list[int], list[int]]:
    """Token ids of a rendered example and what each is to the loss. Answers are encoded apart, as they will be
    generated: the prompt's "<think>" and newline stay two tokens, whatever the answer begins with.

    spelled: texts that answers write letter by letter, because the model reads them from pictures. A picture shows
    letters, and does not show which of them are one token in a word."""
    pieces, kinds, end = [], [], 0
    answers = [match.span(2) for match in ANSWER.finditer(text)]
    if thinking:
        answers[-1] = text.rindex(THINKING_PROMPT) + len(THINKING_PROMPT), answers[-1][1]
    for start, stop in answers:
        answer = _letters(text[start:stop], spelled)
        pieces += [text[end:start], *answer]
        kinds += [TEXT, *[TARGET] * len(answer)]
        end = stop
    pieces.append(text[end:])
    kinds.append(TEXT)
    encodings = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
    ids = [token for encoding in encodings for token in encoding.ids]
    return ids, [kind for kind, encoding in zip(kinds, encodings) for _ in encoding.ids]


def _letters(answer: str, spelled: tuple) -> list[str]:
    """An answer in pieces: each letter of the texts that it has `spelled`, and what stands between them."""
    if not spelled:
        return [answer]
    texts = sorted(map(re.escape, spelled), key=len, reverse=True)
    parts = re.split(rf"({'|'.join(texts)})", answer)
    return [piece for i, part in enumerate(parts) for piece in (part if i % 2 else [part]) if piece]


# ---- packing -------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """The sizes of a unit of rows."""

    n_rows: int
    n_tokens: int       # of a row
    picture_rows: int   # of PICTURE_ROW tokens, 4 patches each


class Rows(NamedTuple):
    """Packed documents and their pictures."""

    ids: np.ndarray       # int32 [rows, tokens], as the next three
    position: np.ndarray  # within the document
    kind: np.ndarray      # PADDING, TEXT or TARGET
    task: np.ndarray      # index in tasks.TASKS
    rope: np.ndarray      # int32 [rows, 3, tokens]: rotary positions of time, height and width
    patches: np.ndarray   # uint8 [picture rows, P, 768]: all of red, then green, then blue
    grid: np.ndarray      # int16 [picture rows, P, 5], see models/tower.py
    labels: np.ndarray    # int8 [picture rows, P / 4, facts] of each block, see tasks/pictures/labels.py
    places: np.ndarray    # int32 [picture rows, P / 4]: of each token of the pictures among those of all rows, or -1

    @staticmethod
    def join(parts: list["Rows"]) -> "Rows":
        *arrays, places = zip(*parts)
        n_tokens = parts[0].ids.size
        moved = [np.where(place < 0, -1, place + i * n_tokens) for i, place in enumerate(places)]
        return Rows(*map(np.concatenate, arrays), np.concatenate(moved).astype(np.int32))


class Document(NamedTuple):
    """A tokenized example. The tokens of a picture are a run of pads."""

    ids: np.ndarray         # [n], as `kinds`
    kinds: np.ndarray
    rope: np.ndarray        # [3, n]
    task: int
    pictures: tuple         # (first token, Picture) each


def draw(rng: random.Random, longest: int) -> tuple["tasks.Example", int]:
    """A training example of a random task, and the task's index. longest: tokens of the longest context."""
    weights = [weight for weight, _ in tasks.TASKS.values()]
    index = rng.choices(range(len(weights)), weights)[0]
    length = math.exp(rng.uniform(math.log(SHORTEST_CONTEXT), math.log(max(longest, SHORTEST_CONTEXT))))
    _, make = list(tasks.TASKS.values())[index]
    return make(rng, False, int(length)), index


def document_of(tokenizer: Tokenizer, example: "tasks.Example", task: int) -> Document:
    """An example to train on. An enforced object's first token, {" mostly, is no target."""
    ids, kinds = encode(tokenizer, tasks.render(example), example.thinking, example.spelled)
    if example.enforced:
        first = next(i for i, kind in enumerate(kinds) if kind == TARGET and tokenizer.id_to_token(ids[i])[0] == "{")
        kinds[first] = PADDING
    return _with_pictures(tokenizer, ids, kinds, example, task)


def prompt_of(tokenizer: Tokenizer, example: "tasks.Example") -> Document:
    """An example up to its answer."""
    ids = tokenizer.encode(tasks.render(example, for_generation=True), add_special_tokens=False).ids
    return _with_pictures(tokenizer, ids, [TEXT] * len(ids), example, 0)


def _with_pictures(tokenizer: Tokenizer, ids: list, kinds: list, example: "tasks.Example", task: int) -> Document:
    """Behind p rotary positions a picture of rows x columns tokens has time p, height p + row and width p + column, and
    what follows goes on at p + max(rows, columns), as engine/sight.py has it."""
    ids, kinds = np.array(ids, np.int32), np.array(kinds, np.int32)
    if not example.pictures:
        return Document(ids, kinds, np.broadcast_to(np.arange(len(ids)), (3, len(ids))), task, ())
    sizes = [[side // (SIZE * MERGE) for side in picture.size] for picture in example.pictures]
    pads, repeats = np.flatnonzero(ids == tokenizer.token_to_id(PAD)), np.ones_like(ids)
    if len(pads) != len(sizes):
        raise ValueError(f"a text with {len(pads)} places for pictures, and there are {len(sizes)}")
    repeats[pads] = [rows * columns for rows, columns in sizes]
    kinds[pads] = PADDING
    ids, kinds, starts = ids.repeat(repeats), kinds.repeat(repeats), (repeats.cumsum() - repeats)[pads]
    rope = np.tile(np.arange(len(ids)), (3, 1))
    for start, (rows, columns) in zip(starts, sizes):
        end = start + rows * columns
        rope[:, start:end] = rope[0, start]
        rope[1:, start:end] += np.divmod(np.arange(rows * columns), columns)
        rope[:, end:] -= rows * columns - max(rows, columns)
    return Document(ids, kinds, rope, task, tuple(zip(starts.tolist(), example.pictures)))


class Shelves:
    """Rows that fill up: each thing goes into the first row with room."""

    def __init__(self, n_rows: int, size: int):
        self.size, self.free = size, [size] * n_rows

    def find(self, sizes: list[int]) -> list[tuple[int, int]] | None:
        """(row, place in it) of each of the sizes, or None where one finds no room."""
        free, found = list(self.free), []
        for size in sizes:
            row = next((i for i, room in enumerate(free) if room >= size), None)
            if row is None:
                return None
            found.append((row, self.size - free[row]))
            free[row] -= size
        return found

    def take(self, found: list[tuple[int, int]], sizes: list[int]):
        for (row, _), size in zip(found, sizes, strict=True):
            self.free[row] -= size


def pack(tokenizer: Tokenizer, seed: int, unit: int, longest: int, layout: Layout) -> Rows:
    """One unit of rows, full when MISSES documents have found no room for their tokens. A document whose pictures find
    none is left out; that is no sign of a full unit, until there are ten times as many."""
    rng = random.Random(f"{seed} {unit}")
    rows, n_pictures = _empty(layout), 0
    texts, pictures = Shelves(layout.n_rows, layout.n_tokens), Shelves(layout.picture_rows, PICTURE_ROW)
    misses = crowded = 0
    while misses < MISSES and crowded < 10 * MISSES:
        document = document_of(tokenizer, *draw(rng, longest))
        length, sizes = [len(document.ids)], [size_of(picture) for _, picture in document.pictures]
        spot, seats = texts.find(length), pictures.find(sizes)
        if spot is None or seats is None:
            misses, crowded = misses + (spot is None), crowded + (seats is None)
            continue
        texts.take(spot, length)
        pictures.take(seats, sizes)
        (row, start), = spot
        _put(rows, document, row, start)
        for (first, picture), seat in zip(document.pictures, seats):
            _put_picture(rows, picture, seat, row * layout.n_tokens + start + first, n_pictures)
            n_pictures += 1
    for row, room in enumerate(texts.free):     # the rest of a row is a document of zeros that counts for nothing
        rows.position[row, layout.n_tokens - room:] = rows.rope[row, :, layout.n_tokens - room:] = range(room)
    return rows


def lesson(seed: int, unit: int, layout: Layout) -> Rows:
    """Rows of pictures alone, with their labels. Full when MISSES of them have found no room."""
    rng = random.Random(f"lesson {seed} {unit}")
    rows, shelves = _empty(layout), Shelves(layout.picture_rows, PICTURE_ROW)
    misses = number = 0
    while misses < MISSES:
        picture = tasks.pictures.draw_scene(Draw(rng, held=False), tasks.pictures.LESSONS)
        seats = shelves.find(size := [size_of(picture)])
        if seats is None:
            misses += 1
            continue
        shelves.take(seats, size)
        _put_picture(rows, picture, seats[0], None, number)
        number += 1
    return rows


def size_of(picture) -> int:
    """Tokens of a picture."""
    height, width = picture.size
    return height * width // (SIZE * MERGE) ** 2


def _empty(layout: Layout) -> Rows:
    tokens, patches = (layout.n_rows, layout.n_tokens), (layout.picture_rows, PICTURE_ROW * MERGE ** 2)
    grid = np.full((*patches, 5), -1, np.int16)     # patches of no picture see only each other
    rope = np.zeros((layout.n_rows, 3, layout.n_tokens), np.int32)
    pixels = np.zeros((*patches, 3 * SIZE ** 2), np.uint8)
    labels = np.full((layout.picture_rows, PICTURE_ROW, len(tasks.pictures.FACTS)), UNUSED, np.int8)
    return Rows(*(np.zeros(tokens, np.int32) for _ in range(4)), rope, pixels, grid, labels,
                np.full((layout.picture_rows, PICTURE_ROW), -1, np.int32))


def _put(rows: Rows, document: Document, row: int, start: int):
    place = slice(start, start + len(document.ids))
    rows.ids[row, place], rows.kind[row, place], rows.task[row, place] = document.ids, document.kinds, document.task
    rows.position[row, place] = range(len(document.ids))
    rows.rope[row, :, place] = document.rope


def _put_picture(rows: Rows, picture, seat: tuple[int, int], first: int | None, number: int):
    """first: the place of the picture's first token among those of all rows, if it has one."""
    row, at = seat
    pixels, labels = tasks.pictures.labelled(picture)
    patches, places = cut(pixels)
    span = slice(at * MERGE ** 2, at * MERGE ** 2 + len(patches))
    rows.patches[row, span] = patches
    rows.grid[row, span, :2], rows.grid[row, span, 2:4] = places, np.array(pixels.shape[:2]) // SIZE
    rows.grid[row, span, 4] = number
    rows.labels[row, at:at + size_of(picture)] = labels
    if first is not None:
        rows.places[row, at:at + size_of(picture)] = range(first, first + size_of(picture))


def cut(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The patches [n, 768] of a picture uint8 [height, width, 3], block after block of 2 x 2 (kernels/patches.py), and
    their places [n, 2], row and column."""
    height, width = (side // (SIZE * MERGE) for side in pixels.shape[:2])
    blocks = (height, MERGE, SIZE, width, MERGE, SIZE, 3)
    patches = pixels.reshape(blocks).transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3 * SIZE * SIZE)
    places = np.stack(np.mgrid[:height * MERGE, :width * MERGE], 2)
    return patches, places.reshape(height, MERGE, width, MERGE, 2).swapaxes(1, 2).reshape(-1, 2)


# ---- workers -------------------------------------------------------------------------------------------

_tokenizer = None


def _start_worker(tokenizer: str):
    global _tokenizer
    os.environ["RAYON_NUM_THREADS"] = "1"  # each worker's tokenizers library would start a thread per core
    _tokenizer = Tokenizer.from_str(tokenizer)


def _make_in_worker(seed: int, unit: int, longest: int | None, layout: Layout, slot: tuple) -> Rows:
    """A unit whose patches lie in a slot of a file: pixels are too many for a pipe."""
    rows = lesson(seed, unit, layout) if longest is None else pack(_tokenizer, seed, unit, longest, layout)
    file, shape, number = slot
    _slots(file, shape)[number] = rows.patches
    return rows._replace(patches=None)


@functools.lru_cache(1)
def _slots(file: str, shape: tuple) -> np.ndarray:
    return np.memmap(file, np.uint8, "r+", shape=shape)


class Workers:
    """Processes that make units."""

    def __init__(self, tokenizer: Tokenizer, n: int):
        self.n = n
        self.pool = multiprocessing.get_context("spawn").Pool(n, _start_worker, [tokenizer.to_str()])

    def close(self):
        self.pool.terminate()
        self.pool.join()


class Batches:
    """Iterates over batches of n_units units of rows, made ahead by workers.

    longest: function of the step -> tokens of the longest context, roughly; or None for lessons.
    """

    def __init__(self, workers: Workers, seed: int, first_step: int, n_units: int, longest, layout: Layout):
        self.pool, self.seed, self.n_units, self.longest, self.layout = workers.pool, seed, n_units, longest, layout
        self.units = itertools.count(first_step * n_units)
        n_ahead = 2 * n_units + 2 * workers.n
        self.file = tempfile.NamedTemporaryFile()
        self.shape = n_ahead, layout.picture_rows, PICTURE_ROW * MERGE ** 2, 3 * SIZE ** 2
        self.file.truncate(math.prod(self.shape))
        self.slots = np.memmap(self.file.name, np.uint8, "r+", shape=self.shape)
        self.pending = collections.deque(self._submit(slot) for slot in range(n_ahead))

    def _submit(self, slot: int) -> tuple:
        unit = next(self.units)
        longest = self.longest and self.longest(unit // self.n_units)
        place = self.file.name, self.shape, slot
        return self.pool.apply_async(_make_in_worker, (self.seed, unit, longest, self.layout, place)), slot

    def __next__(self) -> Rows:
        parts = []
        for _ in range(self.n_units):
            made, slot = self.pending.popleft()
            parts.append(made.get()._replace(patches=self.slots[slot].copy()))
            self.pending.append(self._submit(slot))
        return Rows.join(parts) if len(parts) > 1 else parts[0]

    def close(self):
        """What the workers still make for it is made, and thrown away."""
        self.file.close()
