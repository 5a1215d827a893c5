"""Messages to a prompt: the chat template that comes with a model."""

import itertools
import json
import re
from collections.abc import Iterator

from engine.gguf import GGUF
from engine.guard import GUARD, ControlTokens, unmarked
from engine.limits import OWN_NAMES
from engine.patience import Patience
from engine.request import DeadlineExceeded, EngineStopped, ModelError, RequestError
from engine.sandbox import Closed, Failed, LimitExceeded, OutOfPatience, Sandbox
from engine.tokenizer import Tokenizer

SECONDS = 10        # that a template may take; Qwen3.5's takes 0.9 s for 20,000 messages, and a request may hold 10,000
LONG_VALUES = 1 << 16       # letters of JSON from which on a conversation is long: rendering it takes more than 10 ms
# For all templates of this process. Long conversations have a process of their own, so that short ones need not wait.
RENDERING, RENDERING_LONG = (Sandbox("engine.rendering", 1 << 30) for _ in range(2))


def end_rendering():
    """Ends the templates that run now, which may hang. Whoever waits for one gets EngineStopped."""
    for room in RENDERING, RENDERING_LONG:
        room.close()


# The form in which random weights are talked to: the one of Qwen's models, with its switch for thinking.
SYNTHETIC_TEMPLATE = """\
{% for message in messages %}
<|im_start|>{{ message.role }}
{% if message.content is string %}
{{ message.content }}
{%- else %}
{% for part in message.content %}
{{ '<|image_pad|>' if part.type == 'image' else part.text }}
{%- endfor %}
{%- endif %}
<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
<think>
{% if enable_thinking is defined and not enable_thinking %}

</think>

{% endif %}
{% endif %}
"""


# OpenAI's words for how much a model is to think, from not at all to without a limit.
EFFORTS = "none", "minimal", "low", "medium", "high", "xhigh", "max"
EFFORT = "reasoning_effort"         # the variable in which templates take such a word


class ChatTemplate:
    """A model's own Jinja template, which turns a list of messages into a prompt.

    source: the template's text. control: the names of control tokens. Only those that the template itself writes are
    control tokens of the prompt; whatever else looks like one has a GUARD inside (engine/guard.py).
    variables: the names that the template asks for. efforts: those of EFFORTS that it has, none where it does not ask
    for any.

    The template may be a stranger's, so it runs in a process of its own, with a limit of time and memory.
    """

    def __init__(self, source: str, control=(), bos: str = "", eos: str = ""):
        self.source = source
        self._template = [source, bos, eos, list(control)]
        try:
            self.variables = frozenset(RENDERING.call("check", self._template, seconds=SECONDS))
            self.efforts, self._known_words = [], None
            if EFFORT in self.variables:
                self.efforts, self._known_words = RENDERING.call("taken", self._template, EFFORT, EFFORTS,
                                                                 seconds=SECONDS)
        except Failed as error:
            raise ModelError(f"the chat template cannot be used: {error}") from None
        except LimitExceeded as error:
            raise ModelError(f"the chat template cannot be used: it {error}") from None

    @classmethod
    def from_gguf(cls, gguf: GGUF, tokenizer: Tokenizer) -> "ChatTemplate | None":
        """The file's own template, or None where it has none."""
        source = gguf.get("tokenizer.chat_template", str, None)
        if source is None:
            return None
        names = {}
        for role in ("bos", "eos"):
            token = gguf.get(f"tokenizer.ggml.{role}_token_id", int, None)
            names[role] = "" if token is None else tokenizer.decode([token], special=True)
        try:
            return cls(source, tokenizer.control, **names)
        except ModelError as error:
            raise ModelError(f"{gguf.path}: {error}") from None

    def render(self, messages: list[dict], tools: list | None = None, enable_thinking: bool | None = None,
               add_generation_prompt: bool = True, template_kwargs: dict | None = None,
               timeout: float | None = None) -> str:
        """The prompt for a conversation.

        messages: {"role", "content"} with content a string, None, or a list of parts, which are texts or pictures; an
        assistant's may have "tool_calls", whose arguments may be JSON text. enable_thinking: None leaves it to the
        template. template_kwargs: further variables of the template. timeout: seconds that it may take, if fewer than
        SECONDS.

        Raises RequestError, naming the field, for what the template does not take, DeadlineExceeded, and EngineStopped
        if RENDERING was closed meanwhile.
        """
        if taken := sorted(OWN_NAMES & (template_kwargs or {}).keys()):
            raise RequestError("chat_template_kwargs", f"'chat_template_kwargs' may not set '{taken[0]}'")
        self._check_effort((template_kwargs or {}).get(EFFORT))
        switches = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        spare = marks_to_spare()
        values = (template_kwargs or {}) | switches | {
            "messages": [_template_message(message, f"messages[{i}]", spare) for i, message in enumerate(messages)],
            "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            written = unmarked(json.dumps(values, ensure_ascii=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError("messages", f"the messages cannot be written as JSON: {error}") from None
        return self._run(written, timeout)

    def effort(self, word: str) -> str | None:
        """The template's own word for one of EFFORTS: the same, or else the next higher that it has, or else the next
        lower. None where it has none."""
        at = EFFORTS.index(word)
        higher, lower = ([each for each in some if each in self.efforts] for some in (EFFORTS[at:], EFFORTS[:at]))
        return higher[0] if higher else lower[-1] if lower else None

    def _check_effort(self, word):
        """Raises RequestError for a word that the template would ignore. The template itself refuses other words."""
        if word is not None and self.efforts and self._known_words is not None and word not in self._known_words:
            raise RequestError("chat_template_kwargs", f"the model's chat template has no {EFFORT} {str(word)[:80]!r}, "
                                                       f"only {', '.join(self.efforts)}")

    def guarded(self, text: str) -> str:
        """A client's text as it may follow a prompt: neither it nor its beginning together with the end of the prompt
        is a control token."""
        return GUARD + ControlTokens(self._template[3]).settle(unmarked(text))

    def _run(self, values: str, timeout: float | None) -> str:
        patience = Patience(timeout)
        room = RENDERING_LONG if len(values) > LONG_VALUES else RENDERING
        try:
            return room.call("render", self._template, values, seconds=SECONDS, patience=patience)
        except Failed as error:
            raise RequestError("messages", f"the chat template refuses the messages: {error}") from None
        except OutOfPatience:
            raise DeadlineExceeded(patience.why) from None
        except Closed:
            raise EngineStopped("the server is shutting down") from None
        except LimitExceeded as error:
            raise RequestError("messages", f"the chat template of the model file {error}") from None


def _template_message(message, where: str, spare: Iterator) -> dict:
    """A message as every template takes it: content one string unless there are pictures, arguments of tool calls
    parsed."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(where, f"{where} is not an object with a role")
    message = message | {"content": _template_content(message.get("content"), f"{where}.content")}
    if message.get("tool_calls") is not None:
        message["tool_calls"] = _parsed_calls(message["tool_calls"], f"{where}.tool_calls", spare)
    return message


def has_picture(content) -> bool:
    """Whether one of the parts of a content is a picture: {"type": "image"}, and what else its sender keeps there."""
    return isinstance(content, list) and any(isinstance(part, dict) and part.get("type") == "image" for part in content)


def _template_content(content, where: str) -> str | list[dict]:
    """Content as one string, or as parts of the types text and image where a picture is among them. Only templates of
    models that see are shown such a list."""
    if not has_picture(content):
        return flat_content(content, where)
    return [{"type": "image"} if has_picture([part]) else {"type": "text", "text": _text_of(part, f"{where}[{i}]")}
            for i, part in enumerate(content)]


def flat_content(content, where: str) -> str:
    """Content as one string: older templates know no lists of parts, and none knows null."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(where, f"{where} is neither a string nor a list of parts")
    return "".join(_text_of(part, f"{where}[{i}]") for i, part in enumerate(content))


def _text_of(part, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise RequestError(where, f"{where} is not a part of type text, the only type that is taken there")
    return part["text"]


def _parsed_calls(calls, where: str, spare: Iterator) -> list[dict]:
    """Tool calls with their arguments parsed: clients send them as JSON text, templates expect an object."""
    parsed = []
    for i, call in enumerate(calls if isinstance(calls, list) else [calls]):
        field = f"{where}[{i}].function"
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise RequestError(field, f"{field} is not an object")
        arguments = parsed_arguments(call["function"].get("arguments") or {}, spare)
        parsed.append(call | {"function": call["function"] | {"arguments": arguments}})
    return parsed


def parsed_arguments(arguments, spare: Iterator) -> dict:
    """The arguments of a call as an object, which every template takes.

    JSON text that an end of the answer has cut, '{"city": "Par', gets its end, so that the model sees again what it
    wrote. What is no object even so, or takes more marks than there are to spare, becomes the only argument, as the
    client sent it.
    """
    if isinstance(arguments, dict):
        return arguments
    if isinstance(arguments, str):
        for text in (arguments, *completed(arguments, spare)):
            try:
                if isinstance(value := json.loads(text), dict):
                    return value
            except (ValueError, RecursionError):
                pass
    return {"arguments": arguments}


# A string, one that the end has cut, or a letter of the structure. Possessive: a text has one reading.
JSON_MARKS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|(?P<cut>\\?\Z))|[{}\[\],]', re.DOTALL)
LONGEST_CUT = 1 << 16       # letters of a cut text that is completed; they take 2 ms
MOST_MARKS = 1 << 13        # in all cut texts of a conversation together; they take Python 10 ms


def marks_to_spare() -> Iterator:
    """Gives an item for each mark that may be looked at while a conversation's cut texts are completed."""
    return itertools.repeat(True, MOST_MARKS)


def completed(text: str, spare: Iterator):
    """The texts that a JSON text, cut at any letter, may have been the beginning of: with all that it holds, or without
    what the cut made unreadable. None where the text has more marks than `spare`, see marks_to_spare, has items left.
    """
    if len(text) > LONGEST_CUT:
        return
    opened, kept, ends, n_sound = (), (0, ()), "", len(text)   # opened: (the innermost closer, those around it)
    for mark in JSON_MARKS.finditer(text):
        if not next(spare, False):
            return
        match mark[0]:
            case "{" | "[" as opener:
                opened = {"{": "}", "[": "]"}[opener], opened
                kept = mark.end(), opened
            case "}" | "]":
                opened = opened[1] if opened else ()
            case ",":
                kept = mark.start(), opened
            case _ if mark["cut"] is not None:
                ends, n_sound = '"', max(mark.start() + 1, text.rfind("\\"))        # \u00e9 may be cut
    if opened:
        closers, (n_kept, around) = spelt(opened), kept
        yield from (text + ends + closers, text[:n_sound] + ends + closers, text[:n_kept] + spelt(around))


def spelt(opened: tuple) -> str:
    """The closers of `completed`, the innermost first."""
    closers = []
    while opened:
        closer, opened = opened
        closers.append(closer)
    return "".join(closers)
