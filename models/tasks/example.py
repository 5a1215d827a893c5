"""One example of any task, the text it becomes, and what an answer consists of.

A picture in a conversation is two things: {"type": "image"} in the content of a message, where the text has one
<|image_pad|>, and a Picture in the example, which draws the pixels.
"""

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import jinja2
import numpy as np

TEMPLATE = Path(__file__).parent.parent / "chat_template.jinja"
TOKENS_PER_LETTER = 1 / 3.6  # of running text, as measured with the tokenizer that train.py makes
TOKENS_PER_SYLLABLE = 0.57   # of Korean
THINKING = 0.2  # of the examples that need no thoughts have thinking switched on
COMPACT = 0.5  # of the JSON in prompts to train on has no spaces


class Picture(Protocol):
    """The description of a picture: small, and cheap to send to another process. An equal one draws the same pixels."""

    def draw(self) -> np.ndarray:
        """uint8 [height, width, 3], red, green and blue; height and width are multiples of 32."""


@dataclass(frozen=True)
class Example:
    """A conversation whose last message is the right answer.

    messages  OpenAI's form; arguments of tool calls are dicts. Empty for a plain document
    tools     OpenAI's form, or None
    thinking  whether the answer comes after thoughts
    expect    what an answer is judged by: {"kind": ..., ...}, one kind per judge of tasks/judge.py
    task      the name in TASKS
    lang      "en" or "ko"
    contents  what was drawn under the held-out rule (tasks/words.py)
    document  the text of a plain document
    pictures  a Picture for each {"type": "image"} of the messages, in their order
    spelled   texts that answers read from pictures: their tokens are single letters, see data.encode
    enforced  whether generation holds the answer to be an object that nothing in the prompt calls for
    """

    messages: list
    tools: list | None
    thinking: bool
    expect: dict
    task: str
    lang: str
    contents: tuple = ()
    document: str | None = None
    pictures: tuple[Picture, ...] = ()
    spelled: tuple[str, ...] = ()
    enforced: bool = False


def chat(draw, lang: str, task: str, turns: list, expect: dict, system: str | None = None, tools=None,
         *, thought: str = "", thinking: bool | None = None, pictures: tuple = (), spelled: tuple = (),
         enforced: bool = False) -> Example:
    """An example from turns: strings, the user's and the assistant's in alternation, or whole messages.

    thought: what the assistant thinks first when it is told to think, nothing mostly.
    thinking: whether it is told to, by chance where not said.
    """
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": system}] if system else []
    messages += [turn if isinstance(turn, dict) else {"role": roles[i % 2], "content": turn}
                 for i, turn in enumerate(turns)]
    if thinking is None:
        thinking = draw.rng.random() < THINKING
    if thinking:
        messages[-1] = messages[-1] | {"reasoning_content": thought}
    return Example(messages, tools, thinking, expect, task, lang, tuple(draw.contents), pictures=tuple(pictures),
                   spelled=tuple(spelled), enforced=enforced)


def seen(*parts: str | None) -> list[dict]:
    """The content of a message with pictures: strings, and None where a picture stands."""
    return [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]


def text_of(content) -> str:
    """The text of a message's content, without its pictures."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def pick_lang(rng: random.Random, lang: str | None) -> str:
    return lang or rng.choice(("en", "ko"))


def estimate_tokens(text: str) -> float:
    """About as many tokens as the model's own tokenizer finds in running text."""
    syllables = (len(text.encode()) - len(text)) / 2  # a Korean syllable has three bytes
    return (len(text) - syllables) * TOKENS_PER_LETTER + syllables * TOKENS_PER_SYLLABLE


def to_json(value) -> str:
    """With a space behind commas and colons, as chat templates and Python write it."""
    return json.dumps(value, ensure_ascii=False)


def to_compact_json(value) -> str:
    """Without these spaces, as JavaScript's JSON.stringify writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def json_in_prompt(draw, value) -> str:
    """In one form or the other to train on; what is judged has spaces."""
    return to_compact_json(value) if not draw.held and draw.rng.random() < COMPACT else to_json(value)


def _raise(message):
    raise jinja2.TemplateError(message)


@cache
def _template() -> jinja2.Template:
    # The settings of qengine's ChatTemplate without the sandbox, which takes most of the time; tests compare.
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = _raise
    return environment.from_string(TEMPLATE.read_text("utf-8"))


def render(example: Example, for_generation: bool = False) -> str:
    """The example as text, without its last message and with a generation prompt where that is wanted."""
    if example.document is not None:
        return example.document + "<|endoftext|>"
    messages = example.messages[:-1] if for_generation else example.messages
    return _template().render(messages=messages, tools=example.tools, enable_thinking=example.thinking,
                              add_generation_prompt=for_generation)


def own_answer(example: Example) -> str:
    """What the model should generate: all that follows the generation prompt, with <|im_end|>."""
    whole, prompt = render(example), render(example, for_generation=True)
    if not whole.startswith(prompt):
        raise ValueError("the generation prompt is not how the rendered conversation goes on")
    return whole[len(prompt):].removesuffix("\n")
