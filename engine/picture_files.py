"""Picture files to pixels: PNG, JPEG, WebP and GIF, read by Pillow.

The files come from strangers. So engine/images.py calls `read` in a process of its own, with a limit of seconds and
memory, and this file imports little, because that process starts with it. A mistake of a decoder then ends that process
and nothing else. Sizes are compared with PIXELS before anything is decoded: a file of a few kilobytes may claim
gigabytes of pixels.

A picture becomes what the model was trained on: 8 bits per colour, red, green and blue; turned as the camera was held;
stretched, so that each side is a whole number of BLOCKs of pixels. `stretched_size` is the published rule for the
sides. Transparent pixels show white: the rule leaves them open, and most such pictures are drawings for white pages.
"""

import io
import math

from PIL import Image, WebPImagePlugin  # noqa: F401  Pillow loads the other three formats by itself

BLOCK = 32                  # pixels of a token's side: 2 x 2 patches of 16 x 16
PIXELS = 50_000_000         # that a picture may have: those of a phone's camera, and 20 bytes each while it is read
MOST_NARROW = 200           # how many times longer than the other a side may be; the published rule allows this much
FORMATS = "PNG", "JPEG", "WebP", "GIF"

# What other files begin with, to name them: (at this byte, these bytes, the format).
FOREIGN = [(0, b"BM", "BMP"), (0, b"II*\0", "TIFF"), (0, b"MM\0*", "TIFF"), (0, b"%PDF", "PDF"), (0, b"<svg", "SVG"),
           (0, b"<?xml", "SVG or other XML"), (0, b"\0\0\1\0", "ICO"), (0, b"8BPS", "PSD"), (0, b"\xff\x0a", "JPEG XL"),
           (4, b"JXL ", "JPEG XL"), (4, b"jP  ", "JPEG 2000"), (4, b"ftypavi", "AVIF"), (4, b"ftypmif1", "HEIF"),
           (4, b"ftyphe", "HEIC"), (4, b"ftyp", "MP4 or its like")]

# How the camera was held, as the orientation of EXIF says it, and what turns the picture upright.
UPRIGHT = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
           5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
           8: Image.Transpose.ROTATE_90}
ORIENTATION = 0x0112
BITS = 24                   # the byte of a PNG file that says how many bits a colour has


class PictureError(Exception):
    """A file that is no picture for us, in a sentence."""


def read(data: bytes, min_tokens: int, max_tokens: int) -> tuple[int, int, bytes]:
    """(rows, columns, pixels) of a file's picture, its first one if it has several. rows, columns: in BLOCKs. pixels:
    uint8 [rows * BLOCK, columns * BLOCK, 3]. Raises PictureError."""
    Image.MAX_IMAGE_PIXELS = PIXELS // 2        # Pillow refuses twice as many; set here, for this process alone
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            stretched_size(*image.size, min_tokens, max_tokens)     # raises before the picture is decoded in vain
            image.load()
            if image.format == "PNG":
                mend_transparent_colour(image, bits=data[BITS])
            stretched = fitted(image, min_tokens, max_tokens)
    except (PictureError, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise PictureError(f"the picture has more than {PIXELS:,} pixels") from None
    except Image.UnidentifiedImageError:
        raise PictureError(unknown(data)) from None
    except Exception:           # Pillow raises almost anything for a file that is damaged
        raise PictureError("the picture is damaged or cut short") from None
    return stretched.height // BLOCK, stretched.width // BLOCK, stretched.tobytes()


def unknown(data: bytes) -> str:
    """The sentence for a file that begins as none of FORMATS does."""
    if not data:
        return "the file is empty"
    for at, magic, name in FOREIGN:
        if data[at:at + len(magic)] == magic:
            return f"this is a file in the format {name}, and {', '.join(FORMATS)} are read"
    return f"this is no {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file, or its beginning is damaged"


def mend_transparent_colour(image: Image.Image, bits: int):
    """Makes 8 bits of the transparent colour that a PNG file may name, as Pillow does of the pixels. bits: that a
    colour has in the file."""
    colour = image.info.get("transparency")
    if colour is None or bits == 8 or image.mode not in ("L", "I;16", "RGB"):   # a palette has no such colour
        return
    if image.mode == "RGB":
        image.info["transparency"] = tuple(value >> 8 for value in colour)
    else:
        image.info["transparency"] = colour >> 8 if bits == 16 else colour * 255 // (2**bits - 1)


def fitted(image: Image.Image, min_tokens: int, max_tokens: int) -> Image.Image:
    """A loaded picture of any mode as the model sees it: RGB, upright and stretched."""
    turn = UPRIGHT.get(orientation(image))
    image = flat(image)
    if turn is not None:
        image = image.transpose(turn)
    return image.resize(stretched_size(*image.size, min_tokens, max_tokens), Image.Resampling.BICUBIC)


def orientation(image: Image.Image) -> int:
    """How the camera was held; 1, upright, where the file does not say it or says it in a damaged way."""
    try:
        return image.getexif().get(ORIENTATION, 1)
    except MemoryError:
        raise
    except Exception:
        return 1


def flat(image: Image.Image) -> Image.Image:
    """A picture of any mode as RGB, on white where it is transparent. Of 16 bits the upper 8 stay."""
    if image.mode.startswith("I;16"):
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image)
    return white


def stretched_size(width: int, height: int, min_tokens: int, max_tokens: int) -> tuple[int, int]:
    """(width, height) in pixels to which a picture is stretched: multiples of BLOCK near its own sides, so that it has
    min_tokens to max_tokens blocks. Raises PictureError for a side that is more than MOST_NARROW times the other.

    The rule is `smart_resize` of the image processor that was published with the models (in transformers,
    image_processing_qwen2_vl): sides are rounded to whole blocks, a half to the even number. If these are too many or
    too few, the picture is scaled so that its area meets the bound, and sides are rounded down or up. That rule exceeds
    small bounds, since a side has one block at least and others are rounded up; here the longer side then loses blocks.
    """
    if max(width, height) > MOST_NARROW * min(width, height):
        raise PictureError(f"the picture has {width} x {height} pixels, and a side may be {MOST_NARROW} times as long "
                           "as the other at most")
    least, most, area = min_tokens * BLOCK**2, max_tokens * BLOCK**2, width * height
    columns, rows = round(width / BLOCK), round(height / BLOCK)
    if columns * rows > max_tokens:
        scale = math.sqrt(area / most) * BLOCK
        columns, rows = max(1, math.floor(width / scale)), max(1, math.floor(height / scale))
    elif columns * rows < min_tokens:
        scale = math.sqrt(least / area)
        columns, rows = math.ceil(width * scale / BLOCK), math.ceil(height * scale / BLOCK)
    if columns * rows > max_tokens:
        short = min(columns, rows, max_tokens)
        long = max_tokens // short
        columns, rows = (long, short) if columns > rows else (short, long)
    return columns * BLOCK, rows * BLOCK
