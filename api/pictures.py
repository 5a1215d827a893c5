"""Pictures in requests: how protocols name them, and how they are read.

A protocol makes a `Sent` of each part of a content that is a picture: base64, a data: URL, or an address of the web.
Nothing of it is looked at then. `Pictures.read` decodes the base64, or fetches the file (api/fetch.py), and has the
engine's eyes read it (engine/images.py).

Clients send the pictures of a conversation anew with each turn. So `Pictures` keeps those that were read last.
"""

import binascii
import collections
import contextlib
import hashlib
import threading
import time
from dataclasses import dataclass

from werkzeug.exceptions import TooManyRequests

from engine.images import Picture, Reader
from engine.patience import Patience
from engine.request import DeadlineExceeded, RequestError
from engine.template import has_picture

from .fetch import SECONDS, Fetcher

READING = 60                # seconds that a request gets for reading its pictures, those of the web included
MAX_KEPT = 128 << 20        # bytes of pixels that are kept; a picture of 4,096 tokens has 12.6 MB
MAX_HELD = 1 << 30          # bytes of pixels that all requests hold: 85 such pictures. A request may have 50 MB
SLICE = 1 << 20             # letters of base64 that are decoded at once: the interpreter's lock is held for 3 ms
MAX_HEAD = 256              # letters of a data: URL before its base64


@dataclass(eq=False)
class Sent:
    """A picture as a request has it. text: base64, or a URL where `is_url` says so. field: of the request, for errors.
    detail: OpenAI's word for how large the model is to see it; "low" for the fewest tokens. picture: once it is read,
    since the prompt of one request may be made several times."""

    text: str
    field: str
    is_url: bool = False
    detail: str = "auto"
    picture: Picture | None = None

    @property
    def part(self) -> dict:
        """The part of a content that stands for the picture; chat templates see its type alone."""
        return {"type": "image", "sent": self}


def content_of(pieces: list, between: str = "") -> str | list[dict]:
    """The content of a message from its texts and pictures (Sent), as chat templates take it: one string, or parts
    where there are pictures. Texts that follow one another are joined with `between`."""
    parts = []
    for piece in pieces:
        if isinstance(piece, Sent):
            parts.append(piece.part)
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += between + piece
        else:
            parts.append({"type": "text", "text": piece})
    return parts if has_picture(parts) else "".join(part["text"] for part in parts)


def sent_in(messages: list[dict]) -> list[Sent]:
    """The pictures of a conversation, in the order in which its prompt shows them."""
    return [part["sent"] for message in messages if has_picture(message.get("content"))
            for part in message["content"] if part["type"] == "image"]


def patience_for(timeout: float | None, gone) -> Patience:
    """How long the pictures of a request are waited for. timeout: seconds that the request allows, if it says so.
    gone(): whether its client has hung up."""
    if timeout is not None and timeout <= READING:
        return Patience(timeout, gone)
    return Patience(READING, gone, f"reading the pictures takes longer than the {READING} s that the server allows")


class Pictures:
    """Reads pictures for a server. fetch: a Fetcher; None: nothing is fetched from the web."""

    def __init__(self, fetch: Fetcher | None = None):
        self.fetch, self.lock = fetch, threading.Lock()     # the lock guards what follows
        self.kept = collections.OrderedDict()       # (SHA-256 of a file, most tokens) -> Picture, the latest used last
        self.n_bytes = 0                            # of the pixels of these
        self.held = {}                              # holder -> the pictures of a request, until it has ended

    def read(self, eyes: Reader, sent: list[Sent], patience: Patience | None = None, holder=None) -> list[Picture]:
        """The pictures of a request. holder: what stands for the request; `release` says that it has ended.

        Raises RequestError for what is no picture and for too many, DeadlineExceeded, and TooManyRequests where the
        pictures of all requests have too many pixels.
        """
        patience, end, pictures = patience or patience_for(None, None), time.monotonic() + SECONDS, []
        for one in sent:
            if not patience.left:
                raise DeadlineExceeded(patience.why)
            one.picture = one.picture or self.read_one(eyes, one, patience, end)
            pictures.append(one.picture)
            eyes.limits.check(pictures, one.field)
            one.picture = pictures[-1] = self.hold(one.picture, holder)
        return pictures

    def hold(self, picture: Picture, holder) -> Picture:
        """Counts a picture until its request has ended. Returns it, or the one with the same pixels that a request
        holds already: those count once. Raises TooManyRequests where it is one too many."""
        with self.lock:
            together = {each.digest: each for pictures in self.held.values() for each in pictures}
            picture = together.setdefault(picture.digest, picture)
            if sum(each.pixels.nbytes for each in together.values()) > MAX_HELD:
                raise TooManyRequests(f"too many pictures: those of all requests may have {MAX_HELD >> 20} MiB of "
                                      "pixels together", retry_after=1)
            self.held.setdefault(holder, set()).add(picture)
        return picture

    def release(self, holder):
        """A request has ended."""
        with self.lock:
            self.held.pop(holder, None)

    def read_one(self, eyes: Reader, sent: Sent, patience: Patience, end: float) -> Picture:
        """end: until when a file of the web may be waited for, by time.monotonic()."""
        most = eyes.limits.min_tokens if sent.detail == "low" else None
        with self.file_of(sent, patience, end) as data:
            key = hashlib.sha256(data).digest(), most
            with self.lock:
                if key in self.kept:
                    self.kept.move_to_end(key)
                    return self.kept[key]
            picture = eyes.read(data, sent.field, most, patience)
        self.keep(key, picture)
        return picture

    def keep(self, key: tuple, picture: Picture):
        with self.lock:
            if key in self.kept:                    # another request was faster
                return
            self.kept[key] = picture
            self.n_bytes += picture.pixels.nbytes
            while self.n_bytes > MAX_KEPT:
                self.n_bytes -= self.kept.popitem(last=False)[1].pixels.nbytes

    def file_of(self, sent: Sent, patience: Patience, end: float):
        """A context manager that gives the bytes of a picture's file."""
        if not sent.is_url:
            return contextlib.nullcontext(decoded(sent.text, sent.field))
        scheme = sent.text[:MAX_HEAD].partition(":")[0].lower()
        if scheme == "data":
            return contextlib.nullcontext(decoded(data_of(sent.text, sent.field), sent.field))
        if scheme not in ("http", "https"):
            raise RequestError(sent.field, f"'{sent.field}' must be a data: URL, or an address that begins with "
                                           "https:// or http://")
        if self.fetch is None:
            raise RequestError(sent.field, f"'{sent.field}' is an address of the web, and this server fetches nothing "
                                           "from there: a data: URL holds the picture itself (--allow-image-urls)")
        return self.fetch(sent.text, sent.field, max(0, end - time.monotonic()), patience)


def data_of(url: str, field: str) -> str:
    """The base64 in a data: URL. Which format the URL names does not matter: the file itself shows it."""
    head = url[:MAX_HEAD].partition(",")
    if not (head[1] and head[0].lower().endswith(";base64")):
        raise RequestError(field, f"'{field}' is a data: URL without base64: data:image/png;base64,... is one")
    return url[len(head[0]) + 1:]


def decoded(text: str, field: str) -> bytes:
    """The bytes that a base64 text stands for. Line breaks in it do not count."""
    if "\n" in text:
        text = text.replace("\n", "").replace("\r", "")
    try:
        if not text:
            raise ValueError("it is empty")
        if len(text) % 4 or 0 <= text.find("=") < len(text) - 2:        # which the slices below would not notice
            raise ValueError("the padding at its end is not right")
        return b"".join(binascii.a2b_base64(text[start:start + SLICE], strict_mode=True)
                        for start in range(0, len(text), SLICE))
    except ValueError as error:
        raise RequestError(field, f"'{field}' is not base64: {str(error)[:80]}") from None
