"""An answer's tokens, as they come, cut into thoughts, text and calls of tools.

An answer is [<think>] thoughts </think> text <tool_call>call</tool_call> ... The prompt may already hold the first tag,
or both tags of thoughts. Where the vocabulary has a tag as one token, only that token is the tag, and the same letters
spelt out are text. Otherwise the letters are the tag.

Nothing is lost: text that cannot be read as a call comes out as text, with its tags. Text is held back only until it is
clear what it is. A call that obeys a grammar comes piece by piece; any other call comes when it is whole. Line breaks
around thoughts and calls belong to the form, not to the text.
"""

import collections
import uuid
from dataclasses import dataclass

from engine.request import Delta, RequestError
from engine.tokenizer import Tokenizer

TAGS = "<think>", "</think>", "<tool_call>", "</tool_call>"


class NotACall(Exception):
    """What followed <tool_call> is no call of a tool."""


@dataclass(frozen=True)
class Thought:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class CallStart:
    index: int              # 0, 1, ... within the answer
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass
class Call:
    """A whole call; arguments is JSON text, which the end of the answer may have cut."""

    id: str
    name: str
    arguments: str = ""


class Message:
    """An answer put together. blocks: a Thought or Content for each run of such parts, a Call for each call."""

    def __init__(self):
        self.blocks = []

    def add(self, part):
        match part:
            case CallStart(_, id, name):
                self.blocks.append(Call(id, name))
            case CallArguments(_, text):
                self.blocks[-1].arguments += text
            case _ if self.blocks and type(self.blocks[-1]) is type(part):
                self.blocks[-1] = type(part)(self.blocks[-1].text + part.text)
            case _:
                self.blocks.append(part)

    def text(self, kind) -> str:
        """The text of all blocks of one kind, Thought or Content."""
        return "".join(block.text for block in self.blocks if isinstance(block, kind))

    @property
    def calls(self) -> list[Call]:
        return [block for block in self.blocks if isinstance(block, Call)]

    def remembered(self) -> dict:
        """An answer without calls as a message of the conversation. Thoughts stand apart, so that the template decides
        whether the model sees them again."""
        thoughts = self.text(Thought).strip().removeprefix("<think>").strip()   # the prompt may have begun them, too
        return {"role": "assistant"} | ({"reasoning_content": thoughts} if thoughts else {}) | {
            "content": self.text(Content)}


def opening_of(prompt: str, template: str, thinking: bool | None) -> str:
    """How an answer to this prompt begins: in a "thought", with "content", or with "either"."""
    prompt = prompt.rstrip()
    if prompt.endswith("<think>"):
        return "thought"
    may_think = "</think>" in template and thinking is not False and not prompt.endswith("</think>")
    return "either" if may_think else "content"


def boundaries(tags: dict[str, int], opening: str, has_tools: bool = False) -> dict:
    """Arguments of Request: where thoughts end and calls begin."""
    has_both = opening == "either" and {"<think>", "</think>"} <= tags.keys()
    return {"stop_after": tags.get("</think>") if opening == "thought" or has_both else None,
            "stop_pause": tags["<think>"] if has_both else None,
            "stop_before": tags.get("<tool_call>") if has_tools else None}


def check_budget(field: str, opening: str, bounds: dict):
    """Raises RequestError where a model may think, and no single token ends its thoughts."""
    if opening != "content" and bounds["stop_after"] is None:
        raise RequestError(field, f"'{field}' needs a model that has </think> as one token, and this one has not")


class Reply:
    """Reads one answer.

    opening: how the answer begins, see `opening_of`. form: XMLCall or JSONCall of api/tools.py. tools: those on offer,
    by name; None: `<tool_call>` is text. ruled: whether a grammar makes sure that calls are well-formed, so that they
    may go out piece by piece. special: whether the text has control tokens, as Request.special says.

    n_calls, n_thinking: calls and tokens of thoughts so far. in_content: whether the last token was of the text.
    stopped_by(strings): which of the stop strings ended the answer, if one did.
    """

    def __init__(self, tokenizer: Tokenizer, opening: str, form=None, tools: dict | None = None,
                 ruled: bool = False, special: bool = False):
        self.form, self.tools, self.ruled = form, tools, ruled
        self.thinking = opening == "thought"
        self.n_calls = self.n_thinking = 0
        self.in_content = False
        self._cutter = Cutter(tokenizer, special)
        self._call, self._written = None, ""    # the call that is being read, and its whole text so far
        self._started = False                   # whether the start of that call is out
        self._gap = ""                  # line breaks that are part of the text only if more text follows
        self._skips = self.thinking     # whether the next line breaks belong to a tag
        self._silent = True             # nothing was said yet

    def push(self, delta: Delta) -> list:
        """The parts that are certain after another token."""
        was_content = not self.thinking and self._call is None
        self.n_thinking += self.thinking
        parts = []
        for piece, is_tag in self._cutter.push(delta):
            parts += self._read_tag(piece) if is_tag else self._read_text(piece)
        self.in_content = was_content and self._call is None
        return parts + self._end() if delta.finish_reason else parts

    def stopped_by(self, strings) -> str | None:
        """The stop string that ended the answer, None where none did. Of two that begin alike it is the shorter,
        which was complete first."""
        return min((string for string in strings if self._cutter.unseen.startswith(string)), key=len, default=None)

    def _read_tag(self, tag: str) -> list:
        if self._call is not None:
            return self._close_call() if tag == "</tool_call>" else self._read_text(tag)
        if tag == "<tool_call>" and self.tools is not None:
            self._call, self._written, self._started = self.form(self.tools, self.ruled), tag, False
            return []
        if tag == "</think>" and self.thinking:
            self._leave_thoughts()
            return []
        if tag == "<think>" and self._silent and not self.thinking:
            self.thinking = self._skips = True
            return []
        return self._say(tag)

    def _leave_thoughts(self):
        self.thinking, self._gap, self._skips = False, "", True

    def _read_text(self, text: str) -> list:
        if self._call is None:
            return self._say(text)
        self._written += text
        try:
            arguments = self._call.push(text)
        except NotACall:
            return self._no_call(text)
        return self._go_on(arguments) if self.ruled and self._call.name else []

    def _go_on(self, arguments: str) -> list:
        """The next piece of the arguments of a call, after the call's start if that is not out yet."""
        parts = []
        if not self._started:
            self._leave_thoughts()      # a call among thoughts ends them
            parts.append(CallStart(self.n_calls, f"call_{uuid.uuid4().hex[:24]}", self._call.name))
            self.n_calls += 1
            self._started, self._silent = True, False
        return parts + [CallArguments(self.n_calls - 1, arguments)] if arguments else parts

    def _close_call(self, tag: str = "</tool_call>") -> list:
        try:
            arguments = self._call.close()
        except NotACall:
            self._written += tag
            return self._no_call(tag)
        parts = [] if self._started else self._go_on(arguments)
        self._call = None
        return parts

    def _no_call(self, last: str) -> list:
        """Text that was taken for a call, as text, without the part that is out already."""
        self._call = None
        return self._say(last if self._started else self._written)

    def _say(self, text: str) -> list:
        text = self._gap + text
        if self._skips:
            text = text.lstrip("\n")
        self._skips = self._skips and not text
        said = text.rstrip("\n") if self.thinking or self.tools is not None else text
        self._gap = text[len(said):]
        if not said:
            return []
        self._silent = False
        return [Thought(said) if self.thinking else Content(said)]

    def _end(self) -> list:
        parts = self._read_text(rest) if (rest := self._cutter.flush()) else []
        if self._call is not None and not self._started:
            parts += self._close_call("")
        if self._gap:
            parts.append(Thought(self._gap) if self.thinking else Content(self._gap))
        return parts


class Cutter:
    """Cuts the text of an answer at its tags, as far as Deltas show the text.

    unseen: text of tokens that no Delta has shown: a stop string and what follows it, or what may become one.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False):
        self._names = {tokenizer.tags[tag]: tag for tag in TAGS if tag in tokenizer.tags}
        self._spelt = [tag for tag in TAGS if tag not in tokenizer.tags]
        self._decoder, self.unseen = tokenizer.stream_decoder(special), ""
        self._text, self._start = "", 0         # text that is shown and not cut yet, and where in the answer it starts
        self._marks = collections.deque()       # (start in the answer, tag) of tokens that are tags

    def push(self, delta: Delta):
        """Pieces of text and tags: (letters, is it a tag?)."""
        self.unseen += self._decoder.push(delta.token_id)
        tag = self._names.get(delta.token_id)
        if tag is not None:
            self._marks.append((self._start + len(self._text) + len(self.unseen) - len(tag), tag))
        self._text += delta.text
        self.unseen = self.unseen[len(delta.text):]
        while True:
            at, tag = self._next_tag()
            if at:
                yield self._take(at), False
            if tag is None:
                return
            if self._marks and self._marks[0][0] == self._start:
                self._marks.popleft()
            yield self._take(len(tag)), True

    def flush(self) -> str:
        """What is left at the end of the answer."""
        return self._take(len(self._text))

    def _take(self, n: int) -> str:
        text, self._text = self._text[:n], self._text[n:]
        self._start += n
        return text

    def _next_tag(self) -> tuple[int, str | None]:
        """Where the first tag begins, and the tag; or how much is certain to be text, and None."""
        found = [(at, tag) for tag in self._spelt if (at := self._text.find(tag)) >= 0]
        certain = len(self._text) - max((overlap(self._text, tag) for tag in self._spelt), default=0)
        if self._marks:
            at, tag = self._marks[0][0] - self._start, self._marks[0][1]
            certain = min(certain, at)
            if at + len(tag) <= len(self._text):
                found.append((at, tag))
        return min(found, default=(certain, None))


def overlap(text: str, marker: str) -> int:
    """How many letters at the end of a text may be the start of a marker."""
    return next(n for n in range(min(len(marker), len(text)), -1, -1) if text.endswith(marker[:n]))
