"""Conversations with pictures, as the command line and notebooks hold them.

A message's content is a text or a list of parts, and a part is a text or a picture. `shown` reads the pictures, chat
templates then write a token for each, and `prompt_fields` (engine/images.py) gives each as many tokens as it needs:

    messages ──shown──> messages with Pictures ──chat template──> text ──prompt_fields──> fields of a Request
"""

import contextlib
import dataclasses
import difflib
import os
import reprlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Set
from numbers import Integral
from pathlib import Path

from PIL import Image

from engine.images import FILE_BYTES, Picture, Reader, prompt_fields
from engine.reply import Content, Reply, boundaries, check_budget, opening_of
from engine.request import Generation, Request, RequestError
from engine.sight import BLIND
from engine.text_engine import TextEngine

FIELDS = [field.name for field in dataclasses.fields(Request)]


class Said(str):
    """The text of an answer. thoughts: what the model thought before it, "" if nothing."""

    thoughts = ""


def chat(engine: TextEngine, messages: list[dict], thinking: bool | None = None, template_kwargs: dict | None = None,
         **sampling) -> Said:
    """The answer to a conversation, its thoughts apart (engine/reply.py).

    messages: as `ChatTemplate.render` takes them, whose parts may also be texts, pictures of Pillow, paths and bytes of
    picture files: [{"role": "user", "content": ["What is this?", Path("cat.jpg")]}]. thinking, template_kwargs: for
    the chat template; None: as the template has it. sampling: fields of Request.

    Raises RequestError for what is no list of messages, for what is no picture, and where the model has no eyes or no
    chat template. Warns where the answer has ended among its thoughts.
    """
    thoughts = []
    said = Said("".join(stream(engine, messages, thinking, template_kwargs, thoughts.append, **sampling)))
    said.thoughts = "".join(thoughts)
    if thoughts and not said:
        warnings.warn("the answer ended among its thoughts, which its .thoughts are. It needs more max_tokens, or none "
                      "of them: thinking=False", stacklevel=2)
    return said


def stream(engine: TextEngine, messages: list[dict], thinking: bool | None = None,
           template_kwargs: dict | None = None, on_thought: Callable[[str], object] | None = None,
           **sampling) -> Iterator[str]:
    """The answer of `chat`, in pieces as they come. The call begins the answer, and raises what `chat` raises. Whoever
    stops reading, or never reads, ends the answer. on_thought: called with each piece of the thoughts, which are no
    part of what is yielded."""
    text, pictures = rendered(engine, messages, thinking, template_kwargs)
    opening = opening_of(text, engine.template.source, thinking)
    bounds = boundaries(engine.tokenizer.tags, opening)
    if sampling.get("thinking_budget") is not None:
        check_budget("thinking_budget", opening, bounds)
    request = asked(prompt_fields(engine.encode(text), pictures, engine.eyes), bounds | sampling)
    pieces = pieces_of(engine.submit(request), Reply(engine.tokenizer, opening, special=request.special), on_thought)
    next(pieces)        # a generator that has not begun ends nothing when it is closed
    return pieces


def pieces_of(generation: Generation, reply: Reply, on_thought: Callable[[str], object] | None) -> Iterator[str]:
    """The text of a Generation, after a first "". See `stream`."""
    with ending(generation):
        yield ""
        for delta in generation:
            for part in reply.push(delta):
                if isinstance(part, Content):
                    yield part.text
                elif on_thought:
                    on_thought(part.text)


@contextlib.contextmanager
def ending(generation: Generation):
    """The Generation ends with the `with` body."""
    try:
        yield generation
    finally:
        generation.cancel()


def asked(prompt: dict, sampling: dict) -> Request:
    """A Request of the fields that a prompt fills, and those that a caller names. Raises RequestError."""
    unknown = [name for name in sampling if name not in FIELDS or name in prompt]
    if unknown:
        near = "".join(f"; is {name} meant?" for name in difflib.get_close_matches(unknown[0], FIELDS, 1))
        raise RequestError(unknown[0], f"{unknown[0]} is no field of a request{near}")
    return Request(**prompt, **sampling)


def generate(engine: TextEngine, prompt: str | list[int], **sampling) -> str:
    """The text that follows a prompt, given as text or token ids. sampling: the other fields of Request. Raises
    RequestError. Warns where a model of conversations says nothing to a text that is no conversation."""
    if is_conversation(prompt) or isinstance(prompt, dict):
        raise RequestError("prompt", "generate takes a text or token ids; for messages: engine.chat(messages)")
    request = asked({"prompt_ids": ids_of(engine, prompt)}, sampling)
    with ending(engine.submit(request)) as generation:
        text = "".join(delta.text for delta in generation)
    if not text and isinstance(prompt, str) and engine.template is not None:
        warnings.warn("the model said nothing. It knows conversations, and the prompt is none: "
                      'try engine.chat([{"role": "user", "content": prompt}])', stacklevel=2)
    return text


def ids_of(engine: TextEngine, prompt: str | list[int]) -> list[int]:
    """Token ids of a prompt, given as text or token ids. Raises RequestError."""
    if isinstance(prompt, str):
        return engine.encode(prompt)
    is_ordered = isinstance(prompt, Iterable) and not isinstance(prompt, bytes | bytearray | memoryview | Set)
    ids = list(prompt) if is_ordered else [None]
    if not all(isinstance(token, Integral) for token in ids):
        raise RequestError("prompt", f"a prompt is a text or a list of token ids, and not {reprlib.repr(prompt)}")
    return ids


def prompt_of(engine: TextEngine, messages: list[dict], thinking: bool | None = None,
              template_kwargs: dict | None = None) -> dict:
    """The fields of a Request that a conversation fills, see `chat`. Raises RequestError."""
    text, pictures = rendered(engine, messages, thinking, template_kwargs)
    return prompt_fields(engine.encode(text), pictures, engine.eyes)


def rendered(engine: TextEngine, messages: list[dict], thinking: bool | None,
             template_kwargs: dict | None) -> tuple[str, list[Picture]]:
    """The text of a conversation by the model's chat template, and its pictures. Raises RequestError."""
    if engine.template is None:
        raise RequestError("messages", "this model has no chat template: use generate")
    if not isinstance(messages, list | tuple):
        raise RequestError("messages", "chat takes a list of messages; for a text: "
                                       'engine.chat([{"role": "user", "content": text}])')
    if not (thinking is None or isinstance(thinking, bool)):
        raise RequestError("thinking", f"thinking is True, False or None, and not {thinking!r}")
    for i, message in enumerate(messages):
        if isinstance(message, dict) and message.get("content") is None and not message.get("tool_calls"):
            raise RequestError(f"messages[{i}].content", f"messages[{i}] has no content; it has "
                                                         f"{', '.join(map(str, message)) or 'nothing'}")
    messages = shown(messages, engine.eyes)
    text = engine.template.render(messages, enable_thinking=thinking, template_kwargs=template_kwargs)
    return text, pictures_in(messages)


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
    """The bytes of a picture's file; if it is too long, just enough of them to show that. Raises RequestError."""
    try:
        with open(path, "rb") as file:
            return file.read(FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise RequestError(str(path), f"{path}: {getattr(error, 'strerror', None) or error}") from None


def pictures_in(messages: list[dict]) -> list[Picture]:
    """The pictures of messages that `shown` has made, in the order in which a prompt shows them."""
    return [part["picture"] for message in messages if isinstance(message.get("content"), list)
            for part in message["content"] if part.get("type") == "image"]
