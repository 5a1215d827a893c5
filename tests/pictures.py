"""Pictures for tests, made by code: what they show, and files of every kind that the formats know."""

import contextlib
import functools
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

import qengine
from engine.images import PAD
from engine.sight import Eyes, limits_for

GREY, RGB, PALETTE, GREY_ALPHA, RGB_ALPHA = 0, 2, 3, 4, 6      # PNG's colour types


def scene(width: int, height: int, n_colours: int = 3, seed: int = 0) -> np.ndarray:
    """uint8 [height, width, n_colours]: smooth colours with edges and noise, different in each corner."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [x * 255 / width, y * 255 / height, 127 + 120 * np.sin(x / 9 + y / 5), 255 * (x * 3 > width)]
    shown = np.stack(waves[:n_colours], axis=-1)
    shown[:height // 4, :width // 4] = [250, 20, 60, 90][:n_colours]
    return np.clip(shown + random.normal(0, 9, shown.shape), 0, 255).astype(np.uint8)


def file_of(image: Image.Image | np.ndarray, format: str, **options) -> bytes:
    """The bytes of a file. options: Pillow's."""
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def png(samples: np.ndarray, colours: int, bits: int = 8, **chunks: bytes) -> bytes:
    """A PNG file, written without Pillow. samples: [height, width, samples of a pixel], whole numbers of `bits` bits.
    chunks: others that stand before the pixels, in their order."""
    height, width, _ = samples.shape
    rows = samples.reshape(height, -1)
    if bits == 16:
        packed = rows.astype(">u2").view(np.uint8)
    elif bits == 8:
        packed = rows.astype(np.uint8)
    else:
        single = (rows[..., None] >> np.arange(bits - 1, -1, -1)) & 1       # the highest bit first
        packed = np.packbits(single.reshape(height, -1).astype(np.uint8), axis=1)
    filtered = np.concatenate([np.zeros((height, 1), np.uint8), packed.reshape(height, -1)], axis=1)
    parts = [chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, 0))]
    parts += [chunk(name.encode(), data) for name, data in chunks.items()]
    parts += [chunk(b"IDAT", zlib.compress(filtered.tobytes())), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def exif(orientation: int) -> bytes:
    """What a camera says of how it was held, as a TIFF directory with one entry behind EXIF's name."""
    return b"Exif\0\0II*\0\x08\0\0\0\x01\0" + struct.pack("<HHII", 0x0112, 3, 1, orientation) + bytes(4)


class MadeUpTower:
    """A tower whose rows are made up from the digest of a picture. encoded: the pictures that it was asked for."""

    def __init__(self, hidden_dim: int):
        self.hidden_dim, self.encoded = hidden_dim, []

    def load(self, card, max_tokens):
        self.card = card
        return self

    def rehearse(self):
        """It has no kernels."""

    def encode(self, pictures, outs):
        for picture, out in zip(pictures, outs):
            self.encoded.append(picture)
            random = np.random.default_rng(list(picture.digest))
            self.card.copy_in(out, random.normal(size=(picture.n_tokens, self.hidden_dim)).astype(np.float32))
            yield

    def seconds(self, pictures, speed):
        return [0.01] * len(pictures)


@contextlib.contextmanager
def made_up_sight():
    """Models that are loaded inside have made-up eyes, if they are to see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qengine, "open_eyes", made_up_eyes)
        yield


def made_up_eyes(mmproj, image_tokens, opened):
    """In place of `open_eyes`, for models with a token for pictures."""
    if mmproj is None:
        return None
    limits = functools.partial(limits_for, image_tokens)
    return Eyes(MadeUpTower(opened.config.hidden_dim), limits, opened.tokenizer.control[PAD])
