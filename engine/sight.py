"""What a prompt sees: where its pictures stand, what the layers take in place of their tokens, and rotary positions.

    prompt      | text | one token for each block of a picture | text |
                   │                    │                      │
    embedding   the table     rows of the tower             the table       (engine/vision.py has the tower)
                              (`Sight` keeps them, `Gallery` accounts for them)

All tokens of a picture have the same id, that of engine/images.py's PAD. So the prefix tree cannot go by ids: a
picture's tokens get `keys` that no other picture's tokens have. A prompt that repeats a picture then goes on behind it,
and the picture is neither encoded nor read again.

Rotary positions have three axes. A picture of rows x columns blocks behind p positions has

    time p        height p + row        width p + column        the text behind it goes on at p + max(rows, columns)

(Qwen's M-RoPE.) So after a picture, rotary positions are smaller than positions in the sequence. The `lag` of a prompt
is the difference; a decode step subtracts it (kernels/advance.py).

The draft block takes the embedding of PAD for the tokens of pictures. That changes what it guesses, and no token.
"""

import bisect
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from engine.images import PAD, Limits, Picture, Reader
from engine.request import ModelError, RequestError
from engine.vision import open_tower
from kernels.finite import find_nonfinite

FIRST_KEY = 1 << 32         # keys of pictures' tokens are above all ids
KEYS = 1 << 16              # of a picture; more than it has tokens
NAN_ROWS = "the rows that the vision tower makes of a picture of the request hold infinity or NaN"
NAN_UNKNOWN = "the request makes a NaN, and the rows of its pictures are no longer there to tell whether they hold one"
BLIND = "the model has no eyes: it was loaded without an mmproj file"


class View(NamedTuple):
    """A part of a picture in a pass: its tokens first .. first + n - 1 are the rows from `row` on."""

    picture: Picture
    row: int
    first: int
    n: int


class Seen(NamedTuple):
    """What the cards must know of a pass that has pictures in it or before it."""

    rope: np.ndarray        # int32 [3, rows]: the rotary positions
    copies: list            # (row of the pass, row of the Sight, rows) of what takes the place of embeddings


def lag_of(picture: Picture) -> int:
    """How many fewer rotary positions a picture has than tokens."""
    return picture.n_tokens - max(picture.rows, picture.columns)


class PromptPictures:
    """The pictures of a prompt."""

    def __init__(self, ids: list[int], pictures=(), pad: int | None = None):
        """ids: of the prompt; each picture is a run of pads in it, as many as the picture has tokens. Raises
        RequestError where a run is missing, or where the last token of the prompt is a picture's."""
        self.pictures, self.starts, end = tuple(pictures), [], 0
        for number, picture in enumerate(self.pictures, 1):
            start = next((at for at in range(end, len(ids)) if ids[at] == pad), len(ids))
            end = start + picture.n_tokens
            if ids[start:end].count(pad) < picture.n_tokens:
                raise RequestError("pictures", f"the prompt has no {picture.n_tokens} tokens for picture {number}")
            self.starts.append(start)
        if self.pictures and end == len(ids):
            raise RequestError("pictures", "the prompt ends with a picture; text must follow")
        self.rope = self._rope(len(ids)) if self.pictures else None

    def __bool__(self):
        return bool(self.pictures)

    @property
    def lag(self) -> int:
        """By how much rotary positions after the last picture are smaller than positions."""
        return sum(map(lag_of, self.pictures))

    def _rope(self, n: int) -> np.ndarray:
        rope = np.tile(np.arange(n, dtype=np.int32), (3, 1))
        for start, picture in zip(self.starts, self.pictures):
            end = start + picture.n_tokens
            rope[:, start:end] = rope[0, start]
            rope[1:, start:end] += np.divmod(np.arange(picture.n_tokens, dtype=np.int32), picture.columns)
            rope[:, end:] -= lag_of(picture)
        return rope

    def keys(self, ids: list[int]) -> list[int]:
        """The ids, with numbers in place of those of pictures that tell the pictures apart."""
        keys = list(ids)
        for start, picture in zip(self.starts, self.pictures):
            first = FIRST_KEY + int.from_bytes(picture.digest, "big") * KEYS
            keys[start:start + picture.n_tokens] = range(first, first + picture.n_tokens)
        return keys

    def views(self, start: int, end: int) -> list[View]:
        """What a pass over the tokens start .. end - 1 shows."""
        found = []
        for at, picture in zip(self.starts, self.pictures):
            first, last = max(start, at), min(end, at + picture.n_tokens)
            if first < last:
                found.append(View(picture, first - start, first - at, last - first))
        return found

    def place(self, start: int, end: int, gallery: "Gallery", ahead=()) -> list[tuple[Picture, int]]:
        """What is to be encoded before a pass over the tokens start .. end - 1, see `Gallery.place`."""
        return gallery.place([view.picture for view in self.views(start, end)], ahead)

    def seen(self, start: int, end: int, gallery: "Gallery") -> Seen | None:
        """What the cards must know of a pass over the tokens start .. end - 1; None without pictures."""
        if not self:
            return None
        copies = [(view.row, gallery.first_row(view.picture) + view.first, view.n) for view in self.views(start, end)]
        return Seen(self.rope[:, start:end], copies)

    def after(self, start: int) -> list[Picture]:
        """The pictures that have tokens from `start` on."""
        ends = [at + picture.n_tokens for at, picture in zip(self.starts, self.pictures)]
        return list(self.pictures[bisect.bisect_right(ends, start):])


NO_PICTURES = PromptPictures([])


class Gallery:
    """Which pictures have rows in the Sight of the first card, and where they begin. It only keeps accounts.

    What was used least recently makes room.
    """

    def __init__(self, n_rows: int, most: int):
        """most: tokens of the pictures that are encoded together."""
        self.n_rows, self.most = n_rows, most
        self.kept: dict[bytes, tuple[int, int]] = {}        # digest -> (first row, rows), the latest used last

    def first_row(self, picture: Picture) -> int:
        return self.kept[picture.digest][0]

    def place(self, now: list[Picture], ahead=()) -> list[tuple[Picture, int]]:
        """(picture, first row) of what is to be encoded now: pictures of `now` without rows, all of which must fit; and
        if there are any, as many of `ahead` as fit beside them."""
        needed = {picture.digest: picture for picture in now}
        for digest in needed.keys() & self.kept.keys():
            self.kept[digest] = self.kept.pop(digest)
        missing = [picture for digest, picture in needed.items() if digest not in self.kept]
        if not missing:
            return []
        placed, left = [], self.most - sum(picture.n_tokens for picture in missing)
        for picture in missing:
            if not self._keep(picture, needed, placed):
                self.clear()                    # free rows lie scattered between those of `now`: begin anew
                return self.place(now, ahead)
        for picture in ahead:
            if picture.digest not in self.kept and picture.n_tokens <= left:
                needed[picture.digest] = picture
                left -= picture.n_tokens if self._keep(picture, needed, placed) else 0
        return placed

    def forget(self, placed: list[tuple[Picture, int]]):
        """Call it if what `place` has returned is not encoded to its end."""
        for picture, _ in placed:
            del self.kept[picture.digest]

    def clear(self):
        """No rows are there any more."""
        self.kept.clear()

    def _keep(self, picture: Picture, needed: dict, placed: list) -> bool:
        """Finds rows for a picture. Others make room, but for those that are needed."""
        while (row := self._gap(picture.n_tokens)) is None:
            oldest = next((digest for digest in self.kept if digest not in needed), None)
            if oldest is None:
                return False
            del self.kept[oldest]
        self.kept[picture.digest] = row, picture.n_tokens
        placed.append((picture, row))
        return True

    def _gap(self, n: int) -> int | None:
        end = 0
        for first, size in sorted(self.kept.values()):
            if first - end >= n:
                return end
            end = first + size
        return end if self.n_rows - end >= n else None


class Eyes:
    """The tower of an mmproj file, opened but on no card yet, and what reads pictures for it.

    tower: has load(card, max_tokens), which gives what `Sight` needs. limits(n_ctx): of pictures in a context of so
    many tokens; a plan tries other contexts, and their eyes take other memory. pad: the id of PAD.
    """

    def __init__(self, tower, limits: Callable[[int], Limits], pad: int):
        self.tower, self.limits, self.pad = tower, limits, pad

    def reader(self, n_ctx: int) -> Reader:
        return Reader(self.limits(n_ctx), self.pad)

    def load(self, card, hidden_dim: int, n_ctx: int) -> "Sight":
        max_tokens = self.limits(n_ctx).max_tokens
        return Sight(self.tower.load(card, max_tokens), hidden_dim, max_tokens)


class Sight:
    """The eyes of a model on its first card: the tower, and the rows of pictures that it has made."""

    def __init__(self, tower, hidden_dim: int, max_tokens: int):
        self.tower, self.hidden_dim, self.max_tokens = tower, hidden_dim, max_tokens

    def allocate(self, card, chunk: int) -> Gallery:
        """Takes memory for the rows that a pass of `chunk` tokens may show: a picture may begin before the pass, and
        another one end behind it. Returns their account."""
        n_rows, self.card = chunk + 2 * self.max_tokens, card
        self.rows = card.alloc((n_rows, self.hidden_dim), np.float32, "rows of pictures")
        self.bad = card.zeros(1, np.uint32, "whether a picture's rows are not finite")
        return Gallery(n_rows, self.max_tokens)

    def launch(self, placed: list[tuple[Picture, int]]):
        """Encodes pictures into their rows. A generator: yields after each piece that is queued."""
        outs = [self.rows[row:row + picture.n_tokens] for picture, row in placed]
        yield from self.tower.encode([picture for picture, _ in placed], outs)

    def rehearse(self):
        """Launches every kernel that encoding may need, for `Card.collecting`."""
        self.tower.rehearse()

    def seconds(self, placed: list[tuple[Picture, int]], speed) -> list[float]:
        """About how long each of these pieces takes on a card of this Speed (kernels/probe.py)."""
        return self.tower.seconds([picture for picture, _ in placed], speed)

    def blame(self, pictures: PromptPictures, gallery: Gallery, placed) -> RequestError | None:
        """The error that ends a request whose logits hold a NaN; None where its pictures are not at fault, since all of
        their rows are finite. placed: what `Gallery.place` has returned and is not encoded yet."""
        digests = {picture.digest for picture in pictures.pictures}
        known = digests & gallery.kept.keys() - {picture.digest for picture, _ in placed}
        self.card.copy_in(self.bad, np.zeros(1, np.uint32))
        for first, n in map(gallery.kept.get, known):
            find_nonfinite(self.card, self.rows[first:first + n], self.bad)
        if self.card.download(self.bad)[0]:
            return RequestError("pictures", NAN_ROWS)
        return None if known == digests else RequestError("pictures", NAN_UNKNOWN)

    def shown(self, copies: list, start: int, n: int) -> tuple:
        """(row, its Array) of what takes the place of embeddings in the rows start .. start + n - 1 of a pass, which
        has these `copies` (see Seen)."""
        found = []
        for row, at, size in copies:
            first, last = max(row, start), min(row + size, start + n)
            if first < last:
                found.append((first - start, self.rows[at + first - row:at + last - row]))
        return tuple(found)


def limits_for(image_tokens: tuple[int, int] | None, n_ctx: int) -> Limits:
    """Of pictures in a context of so many tokens. By default a picture takes half of it at most, so that a large photo
    leaves room for words. What no context could hold is refused before it is read. Raises RequestError."""
    limits = Limits.of(image_tokens)
    most = limits.max_tokens if image_tokens else max(min(limits.max_tokens, n_ctx // 2), limits.min_tokens)
    return limits._replace(max_tokens=most, most_tokens=min(limits.most_tokens, max(n_ctx, most)))


def open_eyes(mmproj, image_tokens: tuple[int, int] | None, opened) -> Eyes | None:
    """The eyes of a model: those of a file, random ones for "synthetic", or none for None. opened: has config and
    tokenizer. Raises ModelError, RequestError."""
    if mmproj is None:
        return None
    pad = opened.tokenizer.control.get(PAD)
    if opened.config.pooling or pad is None:
        raise ModelError(f"{opened.config.name} cannot see: it is no model for text, or has no token {PAD}")
    Limits.of(image_tokens)     # refuses what no context allows
    return Eyes(open_tower(mmproj, opened.config.hidden_dim), functools.partial(limits_for, image_tokens), pad)


def pictures_of(ids: list[int], pictures, eyes: Reader | None) -> PromptPictures:
    """The pictures of a prompt. Raises RequestError for a model without eyes, for too many pictures, and as
    PromptPictures does."""
    if not pictures:
        return NO_PICTURES
    if eyes is None:
        raise RequestError("pictures", BLIND)
    eyes.limits.check(pictures, "pictures")
    return PromptPictures(ids, pictures, eyes.pad)
