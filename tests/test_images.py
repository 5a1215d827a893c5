"""Pictures: files of every kind and their pixels, the published sizes, what strangers may not do, and the prompt."""

import os
import struct
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine import images
from engine.images import LARGEST, Limits, Picture, Reader, prompt_fields
from engine.patience import Patience
from engine.picture_files import BLOCK, MOST_NARROW, PIXELS, PictureError, stretched_size
from engine.request import DeadlineExceeded, EngineStopped, RequestError
from tests.oracle import oracle_json, oracle_npz
from tests.pictures import GREY, GREY_ALPHA, PALETTE, RGB, RGB_ALPHA, chunk, exif, file_of, png, scene
from tests.until import PATIENCE

WIDTH, HEIGHT = 96, 64      # of most pictures here: three by two tokens, so that nothing is stretched


@pytest.fixture(scope="module")
def reader():
    """One that enlarges nothing."""
    reader = Reader(Limits(1, 4096))
    yield reader
    reader.close()


# ---- sizes -------------------------------------------------------------------------------------------------


def test_sizes_are_the_published_ones():
    """All of the reference, which has the limits that were published. Those of llama.cpp are others for some."""
    cases = oracle_json("image_sizes.json")["sizes"]
    for case in cases:
        assert list(stretched_size(*case["image_wh"], 64, LARGEST)) == case["transformers_target_wh"], case
        width, height = stretched_size(*case["image_wh"], *Limits()[:2])
        if case["transformers_tokens"] <= 4096:
            assert [width, height] == case["transformers_target_wh"]
        else:
            assert 0.97 * 4096 < width * height / BLOCK**2 <= 4096
    assert any(case["llamacpp_target_wh"] != case["transformers_target_wh"] for case in cases)


@pytest.mark.parametrize("size, tokens, expected", [
    ((272, 272), (64, 4096), (256, 256)), ((304, 304), (64, 4096), (320, 320)),     # halves to the even number
    ((4000, 3000), (64, 4096), (2336, 1760)), ((1, 1), (1, 1), (32, 32)), ((10, 10), (1, 4), (32, 32)),
    ((1, 200), (64, 4096), (32, 3648)), ((200, 1), (64, 100), (3200, 32)), ((6000, 30), (1, 100), (3200, 32)),
    ((300, 300), (64, 64), (256, 256)), ((4096, 4096), (1, 64), (256, 256))])
def test_sizes_that_are_known(size, tokens, expected):
    assert stretched_size(*size, *tokens) == expected


def test_sizes_keep_their_limits():
    random = np.random.default_rng(5)
    for _ in range(20000):
        least, most = sorted(int(n) for n in 2 ** random.uniform(0, 14, 2))
        side = 2 ** random.uniform(0, 13)
        width, height = (1 + int(side * 2 ** random.uniform(-3.7, 3.7)) for _ in range(2))
        if max(width, height) > MOST_NARROW * min(width, height):
            continue
        columns, rows = (side / BLOCK for side in stretched_size(width, height, least, most))
        assert columns == int(columns) >= 1 and rows == int(rows) >= 1 and columns * rows <= most
        if most > 2 * least + 400:                      # where the bounds are no contradiction of narrow pictures
            assert columns * rows >= least


def test_a_picture_may_be_narrow_but_not_a_line():
    assert stretched_size(MOST_NARROW, 1, 64, 4096) == (3648, 32)
    for size in (MOST_NARROW + 1, 1), (7, 7 * MOST_NARROW + 1):
        with pytest.raises(PictureError, match=f"has {size[0]} x {size[1]} pixels, .* 200 times as long"):
            stretched_size(*size, 64, 4096)


@pytest.mark.parametrize("case", ["aligned", "unaligned"])
def test_the_stretch_is_the_published_one(case):
    """Bit for bit, also of a picture that is no file."""
    reader, arrays = Reader(), oracle_npz("dense_mtp-vision")
    rgb, expected = arrays[f"{case}_rgb"], arrays.get(f"{case}_resized_rgb", arrays[f"{case}_rgb"])
    picture = reader.read(file_of(rgb, "PNG"), "image")
    reader.close()
    assert np.array_equal(picture.pixels, expected)
    _, rows, columns = arrays[f"{case}_grid_thw"][0]
    assert (picture.rows, picture.columns) == (rows // 2, columns // 2)
    assert picture.n_tokens == len(arrays[f"{case}_hf_image_embeds"])
    assert reader.of_image(Image.fromarray(rgb)).digest == picture.digest


# ---- files -------------------------------------------------------------------------------------------------


def on_white(colours, alpha):
    return np.round((colours * alpha + 255. * (255 - alpha)) / 255)


def png_files():
    """{name: (file, its pixels, how far from these the read ones may be)} of what PNG knows."""
    rgba = scene(WIDTH, HEIGHT, 4).astype(int)
    rgb, alpha, grey = rgba[..., :3], rgba[..., 3:], rgba[..., :1]
    rgb16, rgba16, grey16 = rgb * 256 + 99, rgba * 257, grey * 256 + 99
    colours, opacity = np.random.default_rng(1).integers(0, 256, (2, 256, 3))
    palette = {"PLTE": colours.astype(np.uint8).tobytes()}
    opacity = np.where(np.arange(256) < 200, opacity[:, 0], 255)    # the file names that of the first 200
    key, key16, grey_key, grey_key16 = rgb[40, 40], rgb16[40, 40], grey[40, 40, 0], grey16[40, 40, 0]
    files = {
        "RGB": (png(rgb, RGB), rgb, 0), "16 bits": (png(rgb16, RGB, 16), rgb, 0), "grey": (png(grey, GREY), grey, 0),
        "grey of 16 bits": (png(grey16, GREY, 16), grey, 0),
        "alpha": (png(rgba, RGB_ALPHA), on_white(rgb, alpha), 1),
        "alpha of 16 bits": (png(rgba16, RGB_ALPHA, 16), on_white(rgb, alpha), 1),
        "grey with alpha": (png(rgba[..., [0, 3]], GREY_ALPHA), on_white(grey, alpha), 1),
        "palette": (png(grey, PALETTE, **palette), colours[grey[..., 0]], 0),
        "palette with alpha": (png(grey, PALETTE, **palette, tRNS=opacity[:200].astype(np.uint8).tobytes()),
                               on_white(colours[grey[..., 0]], opacity[grey]), 1),
        "a transparent colour": (png(rgb, RGB, tRNS=struct.pack(">HHH", *key)),
                                 np.where((rgb == key).all(-1, keepdims=True), 255, rgb), 0),
        "one of 16 bits": (png(rgb16, RGB, 16, tRNS=struct.pack(">HHH", *key16)),
                           np.where((rgb16 == key16).all(-1, keepdims=True), 255, rgb), 0),
        "a transparent grey": (png(grey, GREY, tRNS=struct.pack(">H", grey_key)),
                               np.where(grey == grey_key, 255, grey), 0),
        "one grey of 16 bits": (png(grey16, GREY, 16, tRNS=struct.pack(">H", grey_key16)),
                                np.where(grey16 == grey_key16, 255, grey), 0)}
    for bits in 1, 2, 4:
        few, most = grey >> (8 - bits), 2**bits - 1
        files[f"grey of {bits} bits"] = png(few, GREY, bits), few * (255 // most), 0
        files[f"transparent grey of {bits} bits"] = (png(few, GREY, bits, tRNS=struct.pack(">H", 0)),
                                                     np.where(few == 0, 255, few * (255 // most)), 0)
        files[f"palette of {bits} bits"] = png(few, PALETTE, bits, **palette), colours[few[..., 0]], 0
    return {f"PNG, {name}": file for name, file in files.items()}


def other_files():
    rgba = scene(WIDTH, HEIGHT, 4)
    rgb, alpha, grey = rgba[..., :3], rgba[..., 3:], rgba[..., :1]
    smooth = np.stack(np.broadcast_arrays(*np.ogrid[60:124, 40:136], 99), axis=-1).astype(np.uint8)
    cmyk = np.concatenate([smooth, smooth[..., :1] // 2], axis=-1)
    few = Image.fromarray(rgb).quantize(64)
    lossless = {"lossless": True, "exact": True}
    return {
        "JPEG": (file_of(smooth, "JPEG", quality=100), smooth, 3),
        "JPEG, progressive": (file_of(smooth, "JPEG", quality=100, progressive=True), smooth, 3),
        "JPEG, grey": (file_of(smooth[..., 0], "JPEG", quality=100), smooth[..., :1], 2),
        "JPEG, CMYK": (file_of(Image.frombytes("CMYK", (WIDTH, HEIGHT), cmyk.tobytes()), "JPEG", quality=100),
                       (255. - smooth) * (255 - cmyk[..., 3:]) / 255, 4),
        "JPEG, of a camera that adds a second picture": (
            file_of(smooth, "MPO", save_all=True, quality=100, append_images=[few.convert("RGB")]), smooth, 3),
        "WebP": (file_of(rgb, "WEBP", **lossless), rgb, 0),
        "WebP, lossy": (file_of(smooth, "WEBP", quality=100), smooth, 9),
        "WebP, alpha": (file_of(rgba, "WEBP", **lossless), on_white(rgb.astype(int), alpha.astype(int)), 1),
        "GIF": (file_of(few, "GIF"), np.asarray(few.convert("RGB")), 0),
        "GIF, interlaced": (file_of(few, "GIF", interlace=1), np.asarray(few.convert("RGB")), 0),
        "GIF, grey": (file_of(grey[..., 0], "GIF"), grey, 0),
        "GIF, transparent": (file_of(few, "GIF", transparency=5, optimize=False),
                             np.where(np.asarray(few)[..., None] == 5, 255, np.asarray(few.convert("RGB"))), 0)}


FILES = png_files() | other_files()


@pytest.mark.parametrize("name", FILES)
def test_files_show_what_they_hold(reader, name):
    file, pixels, near = FILES[name]
    picture = reader.read(file, "image")
    assert picture.pixels.shape == (HEIGHT, WIDTH, 3) and not picture.pixels.flags.writeable
    assert np.abs(picture.pixels - pixels.astype(float)).max() <= near


@pytest.mark.parametrize("format", ["PNG", "WEBP", "GIF"])
def test_of_several_pictures_the_first_counts(reader, format):
    first, *others = (Image.fromarray(scene(WIDTH, HEIGHT, seed=i)).quantize(32) for i in range(3))
    lossless = {"lossless": True} if format == "WEBP" else {}
    file = file_of(first, format, save_all=True, append_images=others, **lossless)
    alone = reader.read(file_of(first, format, **lossless), "image")
    assert len(file) > 2 * len(file_of(first, format, **lossless))
    assert reader.read(file, "image").digest == alone.digest


def turned(pixels, orientation):
    """What a camera that was held so writes of an upright picture, by EXIF's table: where the first row and the first
    column of the file belong."""
    return {1: pixels, 2: pixels[:, ::-1], 3: pixels[::-1, ::-1], 4: pixels[::-1], 5: pixels.swapaxes(0, 1),
            6: np.rot90(pixels, 1), 7: np.rot90(pixels, 2).swapaxes(0, 1), 8: np.rot90(pixels, -1)}[orientation]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_pictures_are_upright(reader, format, orientation):
    pixels = scene(WIDTH, HEIGHT)
    options = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}, "PNG": {}}[format]
    file = file_of(np.ascontiguousarray(turned(pixels, orientation)), format, exif=exif(orientation), **options)
    shown = reader.read(file, "image").pixels
    assert shown.shape == pixels.shape and np.abs(shown.astype(int) - pixels).max() <= (8 if format == "JPEG" else 0)


@pytest.mark.parametrize("said", [exif(0)[6:], exif(9)[6:], exif(6)[6:21], b"II*\0\xff\xff\xff\xff", b"", b"no TIFF"],
                         ids=repr)
def test_what_a_camera_says_badly_is_left_out(reader, said):
    pixels = scene(WIDTH, HEIGHT)
    file = png(pixels, RGB, eXIf=said)
    assert np.array_equal(reader.read(file, "image").pixels, pixels)


def test_pictures_of_notebooks(reader):
    """Pillow's pictures, in all of its modes."""
    rgb = Image.fromarray(scene(WIDTH, HEIGHT))
    grey = np.asarray(rgb.convert("L"))
    for mode in "1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LA", "I", "F", "HSV", "LAB":
        assert reader.of_image(rgb.convert(mode)).pixels.shape == (HEIGHT, WIDTH, 3)
    assert np.array_equal(reader.of_image(rgb.convert("L")).pixels, np.stack([grey] * 3, axis=-1))
    assert np.array_equal(reader.of_image(rgb.convert("RGBA")).pixels, np.asarray(rgb))
    deep = Image.fromarray(grey.astype(np.uint16) * 256)
    assert deep.mode == "I;16" and np.array_equal(reader.of_image(deep).pixels, np.stack([grey] * 3, axis=-1))
    with pytest.raises(RequestError, match="^cat: the picture has 1 x 300 pixels"):
        reader.of_image(Image.new("RGB", (1, 300)), "cat")


# ---- limits ------------------------------------------------------------------------------------------------


def test_limits_of_a_picture(reader):
    file = file_of(scene(640, 480), "JPEG")
    assert reader.read(file, "image").n_tokens == 20 * 15
    assert reader.read(file, "image", max_tokens=64).n_tokens == 9 * 6      # 288 x 192: in 64 tokens, and of its shape
    assert reader.read(file_of(scene(8, 8), "PNG"), "image").n_tokens == 1
    default = Reader()
    assert default.of_image(Image.new("RGB", (8, 8))).n_tokens == 64
    assert default.of_image(Image.new("RGB", (8, 8)), max_tokens=16).n_tokens == 16
    assert default.of_image(Image.new("RGB", (5000, 5000)), max_tokens=10**6).n_tokens == 4096


def test_limits_that_make_no_sense():
    assert Limits.of(None) == Limits(64, 4096) and Limits.of((5, LARGEST))[:2] == (5, LARGEST)
    for wrong in (0, 64), (65, 64), (64, LARGEST + 1):
        with pytest.raises(RequestError, match=f"not {wrong[0]} and {wrong[1]}"):
            Limits.of(wrong)


def blank(columns, rows):
    return Picture.of(np.zeros((rows * BLOCK, columns * BLOCK, 3), np.uint8))


def test_limits_of_a_request():
    limits, large, small = Limits(), blank(64, 64), blank(8, 8)
    limits.check([large] * 4)
    limits.check([small] * 64)
    with pytest.raises(RequestError, match="^x: .* 16,384 tokens together, and 5 of them have 16,448; .* chat$"):
        limits.check([large] * 4 + [small], "x")
    with pytest.raises(RequestError, match="^messages: a request may have 64 pictures"):
        limits.check([small] * 65)
    with pytest.raises(RequestError, match="^messages: a picture may have 4,096 tokens, and one has 4,160"):
        limits.check([small, blank(65, 64)])


# ---- what strangers send -----------------------------------------------------------------------------------

PICTURE = file_of(scene(WIDTH, HEIGHT), "PNG")
BOMB = png(np.zeros((1, 1, 3)), RGB).replace(
    chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, RGB, 0, 0, 0)),
    chunk(b"IHDR", struct.pack(">IIBBBBB", 60000, 60000, 8, RGB, 0, 0, 0)))
WEBP_BOMB = b"RIFF\x20\0\0\0WEBPVP8X\x0a\0\0\0" + bytes(4) + b"\xff\x3f\0\xff\x3f\0" + bytes(20)


@pytest.mark.parametrize("file, said", [
    (b"", "the file is empty"), (b"\0", "is no PNG, JPEG, WebP or GIF file"), (b"GIF89a", "no PNG, JPEG, WebP or GIF"),
    (b"hello " * 999, "is no PNG, JPEG, WebP or GIF file"), (PICTURE[:-30], "damaged or cut short"),
    (PICTURE[:60], "damaged or cut short"), (PICTURE[:20], "damaged or cut short"), (PICTURE[1:], "is no PNG"),
    (BOMB, f"has more than {PIXELS:,} pixels"), (WEBP_BOMB, f"has more than {PIXELS:,} pixels"),
    (file_of(Image.new("1", (40_000, 150)), "PNG"), "the picture has 40000 x 150 pixels, and a side may be 200 times"),
    (bytes(images.FILE_BYTES + 1), "the file has 33,554,433 bytes, and may have 33,554,432"),
    (file_of(scene(9, 9), "BMP"), "the format BMP, and PNG, JPEG, WebP, GIF are read"),
    (file_of(scene(9, 9), "TIFF"), "the format TIFF,"), (file_of(scene(32, 32), "ICO"), "the format ICO,"),
    (file_of(scene(9, 9), "PPM"), "is no PNG"), (file_of(scene(9, 9), "JPEG2000"), "the format JPEG 2000,"),
    (b"\0\0\0\x20ftypheic", "the format HEIC,"), (b"\0\0\0\x20ftypavif", "the format AVIF,"),
    (b"%PDF-1.7", "the format PDF,"), (b"<svg xmlns=", "the format SVG,"), (b"\0\0\0\x20ftypisom", "the format MP4 or"),
], ids=lambda value: value if isinstance(value, str) else f"{value[:9]}, {len(value)} bytes")
def test_what_is_no_picture_is_refused_in_a_sentence(reader, file, said):
    with pytest.raises(RequestError, match=said) as error:
        reader.read(file, "messages[3].content")
    assert str(error.value).startswith("messages[3].content: ") and error.value.field == "messages[3].content"
    assert "\n" not in str(error.value) and len(str(error.value)) < 160


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_files_that_are_cut_anywhere(reader, format):
    """Each is refused, but for some that lack only what follows the pixels."""
    whole = file_of(Image.fromarray(scene(WIDTH, HEIGHT)).quantize(32).convert("RGB"), format)
    n_read = 0
    for n in range(0, len(whole), max(len(whole) // 60, 1)):
        try:
            reader.read(whole[:n], "image")
            n_read += 1
            assert n > 0.9 * len(whole)
        except RequestError as error:
            assert "process" not in str(error)
    assert n_read <= 6


def processes(reader):
    return [room._process.pid for room in reader._rooms if room._process and room._process.poll() is None]


def test_a_picture_beyond_its_limits_ends_its_process_and_nothing_else(reader, monkeypatch):
    assert reader.read(PICTURE, "image").n_tokens == 6
    large = file_of(Image.new("RGB", (7000, 7000)), "PNG")
    monkeypatch.setattr(images, "SECONDS", 0.05)
    with pytest.raises(RequestError, match="^image: reading the picture takes longer than 0.05 s$"):
        reader.read(large, "image")
    monkeypatch.undo()
    assert reader.read(PICTURE, "image").n_tokens == 6
    monkeypatch.setattr(images, "MEMORY", 150 << 20)
    small = Reader()
    with pytest.raises(RequestError, match="^image: reading the picture takes more than 150 MiB of memory$"):
        small.read(large, "image")
    assert small.read(PICTURE, "image").n_tokens == 70
    for pid in processes(small):
        os.kill(pid, 9)
    time.sleep(0.2)
    assert small.read(PICTURE, "image").n_tokens == 70
    small.close()


def test_the_largest_picture_is_within_the_limits(monkeypatch):
    """By the processor's time that reading it takes, which a busy machine stretches."""
    side = int(PIXELS**0.5)
    file = file_of(Image.new("RGBA", (side, side), (0, 0, 0, 128)), "PNG", exif=exif(6), compress_level=1)
    limit, fresh = images.SECONDS, Reader(Limits(1, 4096))
    monkeypatch.setattr(images, "SECONDS", PATIENCE)
    picture = fresh.read(file, "image")
    pid, = processes(fresh)
    assert 0 < seconds_of(pid) < limit
    fresh.close()
    assert picture.n_tokens == 4096 and np.all(picture.pixels == 127)


def seconds_of(pid: int) -> float:
    """Of the processor, that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def test_a_picture_that_nobody_waits_for(reader):
    large = file_of(Image.new("RGB", (7000, 7000)), "PNG")
    with pytest.raises(DeadlineExceeded, match="not finished after the 0.05 s"):
        reader.read(large, "image", patience=Patience(0.05))
    assert reader.read(PICTURE, "image", patience=Patience(60)).n_tokens == 6


def test_a_picture_whose_sender_has_left(reader):
    """Its process ends, and those who wait for it get another one. Whoever leaves while waiting ends nothing."""
    large, left = file_of(Image.new("RGB", (7000, 7000)), "PNG"), threading.Event()
    reader.read(PICTURE, "image")
    before = processes(reader)
    threading.Timer(0.2, left.set).start()
    with pytest.raises(DeadlineExceeded, match="^the client has hung up$"):
        reader.read(large, "image", patience=Patience(PATIENCE, left.is_set))
    assert processes(reader) != before
    assert reader.read(PICTURE, "image").n_tokens == 6
    alive = processes(reader)
    with pytest.raises(DeadlineExceeded, match="^the client has hung up$"):
        reader.read(PICTURE, "image", patience=Patience(gone=lambda: True))
    assert processes(reader) == alive and reader.read(PICTURE, "image").n_tokens == 6


def test_a_reader_that_is_closed_meanwhile(reader):
    large, said = file_of(Image.new("RGB", (7000, 7000)), "PNG"), []

    def read():
        try:
            while True:
                reader.read(large, "image")
        except EngineStopped as error:
            said.append(str(error))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        reader.close()
        threads[0].join(0.2)
    assert said == ["the server is shutting down"] * 4 and reader.read(PICTURE, "image").n_tokens == 6


def test_pictures_are_read_side_by_side(reader):
    files = [file_of(scene(WIDTH, HEIGHT, seed=i), "PNG") for i in range(24)]
    digests = [None] * len(files)

    def read(i):
        digests[i] = reader.read(files[i], "image").digest

    threads = [threading.Thread(target=read, args=(i,)) for i in range(len(files))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert digests == [reader.of_image(Image.fromarray(scene(WIDTH, HEIGHT, seed=i))).digest for i in range(len(files))]
    assert len(processes(reader)) == images.PROCESSES and not any(reader._n_calls.values())


# ---- damaged files -----------------------------------------------------------------------------------------


def seeds():
    """Files to be damaged, of all four formats: small, so that much of each is headers."""
    rgba = Image.fromarray(scene(40, 33, 4))
    rgb, few = rgba.convert("RGB"), rgba.convert("RGB").quantize(16)
    several = {"save_all": True, "append_images": [few.rotate(180)]}
    grey = scene(40, 33, 1).astype(int)
    return [file_of(rgba, "PNG"), file_of(few, "PNG", exif=exif(6)), file_of(few, "PNG", **several),
            png(grey * 257, GREY, 16, tRNS=b"\0\7", gAMA=bytes(4)), png(grey >> 7, GREY, 1, tRNS=b"\0\1"),
            file_of(rgb, "JPEG", exif=exif(5)), file_of(rgb, "JPEG", progressive=True),
            file_of(rgba.convert("CMYK"), "JPEG"),
            file_of(rgb, "WEBP"), file_of(rgba, "WEBP", lossless=True, exif=exif(3)), file_of(rgba, "WEBP", **several),
            file_of(few, "GIF", **several), file_of(few, "GIF", transparency=3)]


def damaged(file: bytes, others: list[bytes], random) -> bytes:
    """A file with a few changes: bits, bytes, numbers that are extreme, parts that are lost, doubled or of others."""
    data = bytearray(file)
    for _ in range(random.integers(1, 6)):
        at, n = int(random.integers(0, len(data) + 1)), int(random.integers(1, 20))
        at = int(random.integers(0, 64)) if random.random() < 0.3 else at       # headers
        match random.integers(0, 7):
            case 0 if at < len(data):
                data[at] ^= 1 << random.integers(0, 8)
            case 1:
                data[at:at + n] = random.bytes(n)
            case 2:
                data[at:at + 4] = [b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", bytes(4), b"\0\0\xff\xff"][n % 4]
            case 3:
                del data[at:at + n * n]
            case 4:
                data[at:at] = data[at:at + n * n]
            case 5:
                other = others[random.integers(0, len(others))]
                data[at:at] = other[at:at + n * n]
            case 6 if random.random() < 0.2:
                del data[at:]
    return checked_again(bytes(data)) if random.random() < 0.7 else bytes(data)


def checked_again(data: bytes) -> bytes:
    """A PNG file with check sums that are right, without which most damage ends at the first chunk."""
    if data[:4] != b"\x89PNG":
        return data
    out, at = data[:8], 8
    while at + 12 <= len(data):
        n = int.from_bytes(data[at:at + 4], "big")
        body = data[at + 4:at + 8 + n]
        out += data[at:at + 4] + body + struct.pack(">I", zlib.crc32(body))
        at += 12 + n
    return out


def run_damaged(reader, n_files, seed):
    random, files = np.random.default_rng(seed), seeds()
    counts = {"read": 0, "refused": 0}
    before = None
    for i in range(n_files):
        data = damaged(files[i % len(files)], files, random)
        started = time.monotonic()
        try:
            picture = reader.read(data, "image")
            assert 1 <= picture.n_tokens <= 4096 and picture.pixels.dtype == np.uint8
            counts["read"] += 1
        except RequestError as error:
            assert str(error).startswith("image: ") and "process" not in str(error), (i, str(error))
            counts["refused"] += 1
        assert time.monotonic() - started < images.SECONDS
        before = before or processes(reader)
    assert processes(reader) == before          # none has died
    assert min(counts.values()) > n_files / 10, counts


def test_damaged_files_give_a_picture_or_a_sentence(reader):
    run_damaged(reader, 400, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_thousands_of_damaged_files(reader, seed):
    run_damaged(reader, 1000, seed)


# ---- in the prompt -----------------------------------------------------------------------------------------


def test_a_picture_is_known_by_what_it_shows(reader):
    pixels = scene(WIDTH, HEIGHT)
    digests = {reader.read(file_of(pixels, format, **options), "image").digest
               for format, options in (("PNG", {}), ("PNG", {"compress_level": 0}), ("WEBP", {"lossless": True}))}
    assert digests == {Picture.of(pixels).digest} and {len(digest) for digest in digests} == {16}
    other = pixels.copy()
    other[HEIGHT - 1, WIDTH - 1, 2] ^= 1
    assert Picture.of(other).digest not in digests
    assert Picture.of(pixels.reshape(WIDTH, HEIGHT, 3)).digest not in digests
    for wrong in pixels[:40], pixels[..., :2], pixels.astype(np.int16), pixels[:0]:
        with pytest.raises(ValueError, match="are no pixels of a picture"):
            Picture.of(wrong)


def test_each_picture_has_as_many_pads_as_tokens():
    one, other, eyes = blank(3, 2), blank(1, 1), Reader(pad=7)
    assert prompt_fields([1, 7, 2], [], None) == {"prompt_ids": [1, 7, 2]}
    fields = prompt_fields([1, 7, 2, 7, 7], [one, other, one], eyes)
    assert fields == {"prompt_ids": [1, *[7] * 6, 2, 7, *[7] * 6], "pictures": (one, other, one)}
    for ids, pictures in ([1, 2], [one]), ([7, 7], [one]), ([7], [one, other]):
        with pytest.raises(RequestError, match=f"places for {ids.count(7)}, and {len(pictures)} were sent"):
            prompt_fields(ids, pictures, eyes)
