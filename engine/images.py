"""Pictures of a request: from files to pixels, and their places among the tokens of the prompt.

    bytes of a file ──Reader──> Picture ──engine/vision.py──> a vector for each of its tokens
                                   │
    prompt with one pad for it ──prompt_fields──> prompt with a pad for each of its tokens

A token of a picture stands for 32 x 32 pixels. The stretch to whole tokens is the published one (`stretched_size` in
engine/picture_files.py), so the number of tokens follows from a picture's width and height.
"""

import collections
import contextlib
import hashlib
import threading
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine import picture_files
from engine.limits import IMAGE_TOKENS
from engine.patience import ENDLESS, Patience
from engine.picture_files import BLOCK, PictureError
from engine.request import DeadlineExceeded, EngineStopped, RequestError
from engine.sandbox import Closed, Failed, LimitExceeded, OutOfPatience, Sandbox

PAD = "<|image_pad|>"       # the token that stands in a prompt for a token of a picture
FILE_BYTES = 32 << 20       # of a picture's file, at most
SECONDS = 20                # that reading a picture may take; one of 50 million pixels takes 1 to 6
MEMORY = 5 << 28            # bytes of address space of a process that reads; one of 50 million pixels takes .5 to 1 GB
PROCESSES = 2               # pictures that are read at the same time
LARGEST = 1 << 14           # tokens of a picture that the published rule allows at most: 4,096 x 4,096 pixels


class Limits(NamedTuple):
    """How many tokens pictures may take. The least is the published one. The published most is LARGEST, and a picture
    of so many tokens takes a card many times as long as four quarters of it; so 4,096 are the default."""

    min_tokens: int = IMAGE_TOKENS[0]           # of a picture: smaller ones are enlarged
    max_tokens: int = IMAGE_TOKENS[1]           # of a picture: larger ones are made smaller
    most_tokens: int = LARGEST  # of all pictures of a request together
    most_pictures: int = 64     # of a request

    @classmethod
    def of(cls, image_tokens: tuple[int, int] | None) -> "Limits":
        """Limits with (min_tokens, max_tokens), or the default. Raises RequestError."""
        if image_tokens is None:
            return cls()
        least, most = image_tokens
        if not 1 <= least <= most <= LARGEST:
            raise RequestError("image_tokens", f"a picture's tokens must be two numbers from 1 to {LARGEST:,}, the "
                                               f"smaller one first, not {least} and {most}")
        return cls(least, most)

    def check(self, pictures, field: str = "messages"):
        """Raises RequestError where the pictures of a request are too many, or one or all of them are too many tokens.
        Call it after each picture that is read: a request with a million pictures then ends at the first one too
        many."""
        if len(pictures) > self.most_pictures:
            raise RequestError(field, f"{field}: a request may have {self.most_pictures} pictures")
        if (largest := max((picture.n_tokens for picture in pictures), default=0)) > self.max_tokens:
            raise RequestError(field, f"{field}: a picture may have {self.max_tokens:,} tokens, and one has "
                                      f"{largest:,}")
        if (n_tokens := sum(picture.n_tokens for picture in pictures)) > self.most_tokens:
            longer = ", or give the model a longer context (--ctx)" if self.most_tokens < LARGEST else ""
            raise RequestError(field, f"{field}: the pictures of a request may have {self.most_tokens:,} tokens "
                                      f"together, and {len(pictures)} of them have {n_tokens:,}; send fewer, begin a "
                                      f"new chat{longer}")


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture as the model sees it.

    pixels: uint8 [BLOCK * rows, BLOCK * columns, 3], red, green and blue, which nobody changes. digest: 16 bytes of the
    SHA-256 of its shape and pixels; pictures with the same digest are the same.
    """

    pixels: np.ndarray
    digest: bytes

    @classmethod
    def of(cls, pixels: np.ndarray) -> "Picture":
        """A picture of these pixels, whose sides are multiples of BLOCK."""
        height, width, n_colours = pixels.shape
        if pixels.dtype != np.uint8 or n_colours != 3 or not height or not width or height % BLOCK or width % BLOCK:
            raise ValueError(f"{pixels.dtype} {pixels.shape} are no pixels of a picture")
        pixels = np.ascontiguousarray(pixels).view()
        pixels.flags.writeable = False
        seen = hashlib.sha256(f"{height} x {width} ".encode())
        seen.update(pixels)
        return cls(pixels, seen.digest()[:16])

    @property
    def rows(self) -> int:
        """Blocks, and so tokens, from top to bottom."""
        return self.pixels.shape[0] // BLOCK

    @property
    def columns(self) -> int:
        """Blocks from left to right."""
        return self.pixels.shape[1] // BLOCK

    @property
    def n_tokens(self) -> int:
        return self.rows * self.columns


def check_places(ids: list[int], n_pictures: int, pad: int, field: str = "messages"):
    """Raises RequestError where a prompt has not one pad for each picture: its chat template shows more or fewer."""
    if (n_pads := ids.count(pad)) != n_pictures:
        raise RequestError(field, f"the model's chat template does not show the pictures: the prompt has places for "
                                  f"{n_pads}, and {n_pictures} were sent")


def prompt_fields(ids: list[int], pictures, eyes: "Reader | None", field: str = "messages") -> dict:
    """Fields of a Request: the ids of a prompt, in which each picture has as many pads as tokens, and the pictures.

    ids: with one pad for each picture, in their order. eyes: None only without pictures. field: of the request that
    holds the pictures, for errors. Raises RequestError, see `Limits.check` and `check_places`.
    """
    if not pictures:
        return {"prompt_ids": ids}
    eyes.limits.check(pictures, field)
    check_places(ids, len(pictures), eyes.pad, field)
    expanded, left = [], iter(pictures)
    for token in ids:
        expanded += [token] * (next(left).n_tokens if token == eyes.pad else 1)
    return {"prompt_ids": expanded, "pictures": tuple(pictures)}


class Reader:
    """Reads the picture files of strangers, in processes of their own, with limits of seconds and memory. These
    processes start with the first picture.

    limits: of the pictures, and of those of a request. pad: the id of PAD in the model's vocabulary.
    """

    def __init__(self, limits: Limits = Limits(), pad: int | None = None):
        self.limits, self.pad = limits, pad
        self._rooms = [Sandbox("engine.picture_files", MEMORY) for _ in range(PROCESSES)]
        self._n_calls, self._lock = collections.Counter(), threading.Lock()     # calls of each room, also waiting ones

    def read(self, data: bytes, field: str, max_tokens: int | None = None, patience: Patience = ENDLESS) -> Picture:
        """The picture of a file, its first one if it has several. field: the part of the request that it is, for
        errors. max_tokens: of this picture, where it is to have fewer than the limits allow. patience: of the caller,
        if it may end before SECONDS.

        Raises RequestError in one sentence for a file that is no picture or takes too much, DeadlineExceeded, and
        EngineStopped if the reader was closed meanwhile.
        """
        if len(data) > FILE_BYTES:
            raise RequestError(field, f"{field}: the file has {len(data):,} bytes, and may have {FILE_BYTES:,}")
        try:
            with self._room() as room:
                rows, columns, pixels = room.call("read", data, *self._bounds(max_tokens), seconds=SECONDS,
                                                  patience=patience)
        except Failed as error:
            raise RequestError(field, f"{field}: {error}") from None
        except OutOfPatience:
            raise DeadlineExceeded(patience.why) from None
        except Closed:
            raise EngineStopped("the server is shutting down") from None
        except LimitExceeded as error:
            raise RequestError(field, f"{field}: reading the picture {error}") from None
        return Picture.of(np.frombuffer(pixels, np.uint8).reshape(rows * BLOCK, columns * BLOCK, 3))

    def of_image(self, image, field: str = "image", max_tokens: int | None = None) -> Picture:
        """A picture of a Pillow image, of whatever mode. Raises RequestError for one that is too narrow."""
        try:
            image.load()
            return Picture.of(np.asarray(picture_files.fitted(image, *self._bounds(max_tokens))))
        except (PictureError, OSError) as error:
            raise RequestError(field, f"{field}: {error}") from None

    def close(self):
        """End the processes, and all calls that run or wait. A later call starts another process."""
        for room in self._rooms:
            room.close()

    def _bounds(self, max_tokens: int | None) -> tuple[int, int]:
        most = min(max_tokens or self.limits.max_tokens, self.limits.max_tokens)
        return min(self.limits.min_tokens, most), most

    @contextlib.contextmanager
    def _room(self):
        """The process with the fewest calls."""
        with self._lock:
            at = min(range(PROCESSES), key=self._n_calls.__getitem__)
            self._n_calls[at] += 1
        try:
            yield self._rooms[at]
        finally:
            with self._lock:
                self._n_calls[at] -= 1
