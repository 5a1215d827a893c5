"""Conversations with pictures, as the command line and notebooks hold them.

A message's content is a text or a list of parts, and a part is a text or a picture. `shown` reads the pictures, chat
templates then write a token for each, and `prompt_fields` (engine/images.py) gives each as many tokens as it needs:

    messages ──shown──> messages with Pictures ──chat template──> text ──prompt_fields──> fields of a Request
"""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from engine.images import FILE_BYTES, Picture, Reader, prompt_fields
from engine.request import Request, RequestError
from engine.sight import BLIND
from engine.text_engine import TextEngine


def chat(engine: TextEngine, messages: list[dict], thinking: bool | None = None, template_kwargs: dict | None = None,
         **sampling) -> str:
    """The answer to a conversation, as the model writes it.

    messages: as `ChatTemplate.render` takes them, whose parts may also be texts, pictures of Pillow, paths and bytes of
    picture files: [{"role": "user", "content": ["What is this?", Path("cat.jpg")]}]. thinking, template_kwargs: for
    the chat template. sampling: fields of Request.

    Raises RequestError for what is no list of messages, for what is no picture, and where the model has no eyes or no
    chat template.
    """
    return "".join(stream(engine, messages, thinking, template_kwargs, **sampling))


def stream(engine: TextEngine, messages: list[dict], thinking: bool | None = None,
           template_kwargs: dict | None = None, **sampling) -> Iterator[str]:
    """The answer of `chat`, in pieces as they come. Whoever stops reading ends the answer."""
    generation = engine.submit(Request(**prompt_of(engine, messages, thinking, template_kwargs), **sampling))
    return pieces_of(generation)


def pieces_of(generation) -> Iterator[str]:
    """The text of a Generation, which ends when nobody reads on."""
    try:
        yield from (delta.text for delta in generation if delta.text)
    finally:
        generation.cancel()


def generate(engine: TextEngine, prompt: str | list[int], **sampling) -> str:
    """The text that follows a prompt, given as text or token ids. sampling: the other fields of Request. Raises
    RequestError. Warns where a model of conversations says nothing to a text that is no conversation."""
    if is_conversation(prompt) or isinstance(prompt, dict):
        raise RequestError("prompt", "generate takes a text or token ids; for messages: engine.chat(messages)")
    ids = engine.encode(prompt) if isinstance(prompt, str) else list(prompt)
    text = "".join(pieces_of(engine.submit(Request(ids, **sampling))))
    if not text and isinstance(prompt, str) and engine.template is not None:
        warnings.warn("the model said nothing. It knows conversations, and the prompt is none: "
                      'try engine.chat([{"role": "user", "content": prompt}])', stacklevel=2)
    return text


def prompt_of(engine: TextEngine, messages: list[dict], thinking: bool | None = None,
              template_kwargs: dict | None = None) -> dict:
    """The fields of a Request that a conversation fills, see `chat`. Raises RequestError."""
    if engine.template is None:
        raise RequestError("messages", "this model has no chat template: use generate")
    if not isinstance(messages, list | tuple):
        raise RequestError("messages", "chat takes a list of messages; for a text: "
                                       'engine.chat([{"role": "user", "content": text}])')
    messages = shown(messages, engine.eyes)
    text = engine.template.render(messages, enable_thinking=thinking, template_kwargs=template_kwargs)
    return prompt_fields(engine.encode(text), pictures_in(messages), engine.eyes)


def is_conversation(prompt) -> bool:
    """Whether a prompt is a list of messages, and no text or token ids."""
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], dict)


def shown(messages: list[dict], eyes: Reader | None) -> list[dict]:
    """Messages whose pictures are read: each is a part {"type": "image", "picture": Picture}. Raises RequestError."""
    return [message | {"content": [shown_part(part, eyes, f"messages[{i}].content[{j}]")
                                   for j, part in enumerate(message["content"])]}
            if isinstance(message, dict) and isinstance(message.get("content"), list) else message
            for i, message in enumerate(messages)]


def shown_part(part, eyes: Reader | None, field: str) -> dict:
    """A part of a content as templates take it, with its picture if it is one. part: a text, a picture in whatever
    form, or {"type": "image", "image": a picture}; other dicts stay as they are."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict):
        if part.get("type") != "image" or "picture" in part:
            return part
        part = part.get("image")
        part = Path(part) if isinstance(part, str) else part
    if eyes is None:
        raise RequestError(field, f"{field}: {BLIND}")
    return part_of(picture_of(part, eyes, field))


def part_of(picture: Picture) -> dict:
    return {"type": "image", "picture": picture}


def picture_of(source, eyes: Reader, field: str) -> Picture:
    """The picture of a file, by its path or its bytes, or of a picture of Pillow. Raises RequestError."""
    if isinstance(source, Picture):
        return source
    if isinstance(source, bytes | bytearray | memoryview):
        return eyes.read(source, field)
    if isinstance(source, os.PathLike):
        return eyes.read(read_file(source), str(source))
    if isinstance(source, Image.Image):
        return eyes.of_image(source, field)
    raise RequestError(field, f"{field}: a picture is a path, the bytes of a file or a picture of Pillow, and not "
                              f"a {type(source).__name__}")


def read_file(path: str | os.PathLike) -> bytes:
    """The bytes of a picture's file, and no more than show that it is too long. Raises RequestError."""
    try:
        with open(path, "rb") as file:
            return file.read(FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise RequestError(str(path), f"{path}: {getattr(error, 'strerror', None) or error}") from None


def pictures_in(messages: list[dict]) -> list[Picture]:
    """The pictures of messages that `shown` has made, in the order in which a prompt shows them."""
    return [part["picture"] for message in messages if isinstance(message.get("content"), list)
            for part in message["content"] if part.get("type") == "image"]
