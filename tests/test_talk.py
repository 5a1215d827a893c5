"""Conversations with pictures: in notebooks, with -p and in --chat, by a model whose tower is made up."""

import io
import re
import sys
from pathlib import Path

import pytest
from PIL import Image

import qengine
from engine.images import PAD, Limits, Reader, prompt_fields
from engine.request import RequestError
from engine.talk import chat, pictures_in, shown
from tests.pictures import exif, file_of, made_up_sight, scene
from tests.test_cli import GREEDY, run
from tests.tiny import CONTEXT, MODEL, tiny_engine

TOKENS = (1, 64)            # of a picture: fewer than usual, so that prompts are short


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with pictures: one of 3 x 2 blocks, the same as WebP, another one, and a file that is none."""
    folder = tmp_path_factory.mktemp("my pictures")
    (folder / "cat.png").write_bytes(file_of(scene(96, 64), "PNG"))
    (folder / "cat.webp").write_bytes(file_of(scene(96, 64), "WEBP", lossless=True))
    (folder / "dog.jpg").write_bytes(file_of(scene(64, 96, seed=1), "JPEG", exif=exif(6)))
    (folder / "text.png").write_bytes(b"a text")
    return folder


@pytest.fixture(scope="module")
def eyes():
    reader = Reader(Limits(*TOKENS), qengine.open_model(MODEL).tokenizer.control[PAD])
    yield reader
    reader.close()


@pytest.fixture(scope="module")
def seeing():
    with made_up_sight():
        engine = qengine.load(MODEL, card="emulated", ctx=CONTEXT, progress=False, mmproj="synthetic",
                              image_tokens=TOKENS)
    yield engine
    engine.close()


# ---- messages ----------------------------------------------------------------------------------------------


def test_a_picture_in_whatever_form(files, eyes):
    path, image = files / "cat.png", Image.open(files / "cat.png")
    picture = eyes.of_image(image)
    forms = [path, path.read_bytes(), bytearray(path.read_bytes()), image, picture,
             {"type": "image", "image": str(path)}, {"type": "image", "image": image},
             {"type": "image", "picture": picture}, files / "cat.webp"]
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": ["Look:", *forms, "?"]}]
    first, second = shown(messages, eyes)
    assert first == messages[0] and messages[1]["content"][0] == "Look:"        # nobody's messages are changed
    assert second["content"][0] == {"type": "text", "text": "Look:"} and len(second["content"]) == 2 + len(forms)
    pictures = pictures_in([first, second])
    assert {each.digest for each in pictures} == {picture.digest} and len(pictures) == len(forms)
    assert shown([second], eyes) == [second]


@pytest.mark.parametrize("part, said", [
    (Path("nowhere.png"), "^nowhere.png: No such file or directory$"), (Path("/"), "^/: Is a directory$"),
    (Path("a\0b"), "^a\0b: embedded null byte$"), (b"a text", r"^messages\[0\].content\[1\]: this is no PNG"),
    (7, r"^messages\[0\].content\[1\]: a picture is a path, .* and not a int$"),
    ({"type": "image"}, "and not a NoneType$"), ({"type": "image", "image": "x.png"}, "^x.png: No such file")], ids=str)
def test_what_is_no_picture(eyes, part, said):
    with pytest.raises(RequestError, match=said):
        shown([{"role": "user", "content": ["Look:", part]}], eyes)


def test_messages_that_hold_no_pictures_are_left_to_the_template(eyes):
    messages = [{"role": "user", "content": None}, {"role": "user", "content": [{"type": "text", "text": "a"}]}, "no"]
    assert shown(messages, None) == messages and pictures_in(messages[:2]) == []
    assert prompt_fields([1, 2], [], None) == {"prompt_ids": [1, 2]}


def test_a_template_that_shows_no_pictures(files, eyes):
    messages = shown([{"role": "user", "content": [files / "cat.png"]}], eyes)
    with pytest.raises(RequestError, match="has places for 0, and 1 were sent"):
        prompt_fields([1, 2, 3], pictures_in(messages), eyes)
    many = shown([{"role": "user", "content": [files / "cat.png"] * 65}], eyes)
    with pytest.raises(RequestError, match="a request may have 64 pictures"):
        prompt_fields([1, *[eyes.pad] * 65, 3], pictures_in(many), eyes)


# ---- in notebooks ------------------------------------------------------------------------------------------


def test_a_notebook_talks_about_pictures(seeing, files):
    cat, dog = ([{"role": "user", "content": ["What is this?", files / name]}] for name in ("cat.png", "dog.jpg"))
    answer = seeing.chat(cat, thinking=False, max_tokens=8)
    picture = seeing.eyes.read((files / "cat.png").read_bytes(), "cat")
    text = seeing.template.render([{"role": "user", "content": [{"type": "text", "text": "What is this?"},
                                                                {"type": "image"}]}], enable_thinking=False)
    assert text.count(PAD) == 1 and f"What is this?{PAD}" in text
    at = seeing.encode(text).index(seeing.eyes.pad)
    ids = seeing.encode(text)[:at] + [seeing.eyes.pad] * 6 + seeing.encode(text)[at + 1:]
    other = seeing.chat(dog, thinking=False, max_tokens=8)
    assert answer == seeing.generate(ids, max_tokens=8, pictures=(picture,)) != other
    assert seeing.chat([{"role": "user", "content": "hi"}], thinking=False, max_tokens=4) == seeing.generate(
        seeing.template.render([{"role": "user", "content": "hi"}], enable_thinking=False), max_tokens=4)


def test_a_user_writes_the_name_of_the_pictures_token(seeing):
    """It stays text, so nothing waits for a picture there."""
    assert seeing.chat([{"role": "user", "content": f"What is {PAD}?"}], thinking=False, max_tokens=2)


def test_a_notebook_with_a_model_that_reads_text_alone(files):
    with pytest.raises(RequestError, match="the model has no eyes"):
        chat(tiny_engine(), [{"role": "user", "content": ["?", files / "cat.png"]}])


# ---- on the command line -----------------------------------------------------------------------------------


@pytest.fixture
def loads(monkeypatch, seeing):
    """main() uses the shared engine. The list has what it was asked for."""
    asked = []

    def load(model, **options):
        asked.append(options)
        return seeing

    monkeypatch.setattr(qengine, "load", load)
    monkeypatch.setattr(seeing, "close", lambda: None)
    return asked


def type_in(monkeypatch, *lines):
    text = "".join(f"{line}\n" for line in lines)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))


SEES = ["-m", MODEL, "--mmproj", "synthetic", "--image-tokens", "1,64", "--max-tokens", "8", *GREEDY]
SAYS = [*SEES, "--thinking", "off"]         # what it writes is no thought then


def test_pictures_with_a_prompt(capsys, loads, seeing, files):
    both = ["--image", str(files / "cat.png"), "--image", str(files / "dog.jpg")]
    code, out, err = run(capsys, *SAYS, "-p", "What is this?", *both)
    assert code == 0 and "cat.png, seen as 96 x 64 pixels, 6 tokens\n" in err
    content = [files / "cat.png", files / "dog.jpg", "What is this?"]
    assert out == seeing.chat([{"role": "user", "content": content}], thinking=False, max_tokens=8) + "\n"
    assert loads[0]["mmproj"] == "synthetic" and loads[0]["image_tokens"] == TOKENS


def test_without_pictures_no_eyes_are_loaded(capsys, loads, monkeypatch):
    assert run(capsys, "-m", MODEL, "-p", "hi", "--max-tokens", "2")[0] == 0
    assert loads[0]["mmproj"] == "none"
    type_in(monkeypatch, "")
    assert run(capsys, "-m", MODEL, "--chat")[0] == 0
    assert loads[1]["mmproj"] is None               # of a model of the Hub the one beside it


@pytest.mark.parametrize("arguments, said", [
    (["-p", "hi", "--image", "{}/cat.png"], "--image is for models with eyes, and synthetic:tiny has none: --mmproj"),
    (["-p", "hi", "--image", "{}/cat.png", "--mmproj", "none"], "--image is for models with eyes"),
    (["--plan", "--image-tokens", "1,64"], "--image-tokens is for models with eyes, and synthetic:tiny has none"),
    ([*SEES, "-p", "hi", "--image", "{}/nowhere.png"], "/nowhere.png: No such file or directory"),
    ([*SEES, "-p", "hi", "--image", "{}/text.png"], "/text.png: this is no PNG, JPEG, WebP or GIF file"),
    ([*SEES, "-p", "hi", "--image", "{}"], ": Is a directory"),
    ([*SEES, "-p", "hi", "--raw", "--image", "{}/cat.png"], "--image is for chat templates, and --raw uses none"),
    ([*SEES, "-p", "hi"], "--mmproj goes with --image or --chat or --serve or --plan"),
    (["--chat", "--image", "{}/cat.png"], "--image goes with -p"),
    (["--chat", "--image-tokens", "64"], "must be the fewest and the most, as in 64,4096"),
    (["--chat", "--image-tokens", "64,32"], "two numbers from 1 to 16,384, the smaller one first, not 64 and 32"),
    (["--chat", "--image-tokens", "a,b"], "--image-tokens"),
    ([*SEES, "-p", "hi", *["--image", "{}/cat.png"] * 65], "a request may have 64 pictures"),
    ([*SEES, "-p", "hi", "--ctx", "32", "--image", "{}/cat.png"], "32 tokens. However, your prompt resulted in"),
], ids=lambda value: value if isinstance(value, str) else f"{len(value)} arguments")
def test_a_mistake_with_pictures_is_one_sentence(capsys, monkeypatch, files, arguments, said):
    monkeypatch.setattr(qengine, "load", lambda *_, **__: pytest.fail("was loaded"))
    given = [argument.replace("{}", str(files)) for argument in arguments]
    code, out, err = run(capsys, *(given if "-m" in given else ["-m", MODEL, *given]))
    assert (code, out) == (2, "") and "Traceback" not in err
    *before, sentence = err.splitlines()
    assert sentence.startswith("qengine: ") and said in sentence
    assert all(line.startswith("picture: ") for line in before)


def test_pictures_in_a_chat(capsys, loads, seeing, files, monkeypatch):
    cat, dog = files / "cat.png", files / "dog.jpg"
    type_in(monkeypatch, f"/image {cat}", "What is this?", "/image", f"/image {files}/nowhere.png", f"/image '{dog}'",
            f"/image {cat}", "And these?", "Well")
    code, out, err = run(capsys, *SAYS, "--chat")
    assert code == 0 and err.count("picture: ") == 3
    assert "qengine: /image needs the name of a file\n" in err and "nowhere.png: No such file or directory\n" in err
    messages, expected = [], ""
    for content in [cat, "What is this?"], [dog, cat, "And these?"], "Well":
        messages.append({"role": "user", "content": content})
        answer = seeing.chat(messages, thinking=False, max_tokens=8)
        messages.append({"role": "assistant", "content": answer})
        expected += answer + "\n"
    assert out == expected
    first, second, third = map(int, re.findall(r"prompt (\d+) tokens", err))
    assert first > 6 and second > first + 12 and third > second     # pictures of earlier messages stay in the prompt


def test_a_chat_with_a_model_that_reads_text_alone(capsys, monkeypatch, files):
    engine = tiny_engine()
    monkeypatch.setattr(qengine, "load", lambda *_, **__: engine)
    monkeypatch.setattr(engine, "close", lambda: None)
    type_in(monkeypatch, f"/image {files}/cat.png")
    code, out, err = run(capsys, "-m", MODEL, "--chat")
    assert (code, out) == (0, "") and err == ("qengine: /image: the model has no eyes: it was loaded without an mmproj "
                                              "file\n")


def test_what_a_model_takes_with_its_eyes(capsys, monkeypatch):
    """--plan opens the eyes, and --mmproj none leaves them."""
    opened = []
    monkeypatch.setattr(qengine, "open_eyes", lambda mmproj, tokens, *_: opened.append((mmproj, tokens)))
    for arguments, expected in ([], (None, None)), (["--mmproj", "none"], (None, None)), (
            ["--mmproj", "eyes.gguf", "--image-tokens", "8,99"], ("eyes.gguf", (8, 99))):
        assert run(capsys, "-m", MODEL, "--plan", "--card", "emulated", *arguments)[0] == 0
        assert opened.pop() == expected
