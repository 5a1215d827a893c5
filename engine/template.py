"""Messages to a prompt: the chat template that comes with a model."""

import datetime
import json

import jinja2
import jinja2.ext
import jinja2.sandbox

from engine.gguf import GGUF
from engine.request import ModelError, RequestError
from engine.tokenizer import GUARD, Tokenizer, any_of

# The form in which random weights are talked to: the one of Qwen's models, with its switch for thinking.
SYNTHETIC_TEMPLATE = """\
{% for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
<think>
{% if enable_thinking is defined and not enable_thinking %}

</think>

{% endif %}
{% endif %}
"""


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks what to train on; here it only shows its content."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """`tojson` as chat templates expect it. Jinja's own sorts keys and escapes <, >, &, ' and all non-ASCII letters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def raise_exception(message):
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """A model's own Jinja template, which turns a list of messages into a prompt.

    source: the template's text. control: the names of control tokens; where a message contains one, `render`
    puts a `GUARD` inside, so that the text of a message is never taken for the structure around it.

    The template runs in a sandbox that keeps it from the file system and the interpreter, yet does not limit
    how long it runs: it comes from the operator's model file and must never come from a request.
    """

    def __init__(self, source: str, control=(), bos: str = "", eos: str = ""):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag])
        environment.filters["tojson"] = to_json
        environment.globals |= {
            "raise_exception": raise_exception, "bos_token": bos, "eos_token": eos,
            "strftime_now": lambda format: datetime.datetime.now().strftime(format)}
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # Jinja compiles to Python, whose compiler has complaints of its own
            raise ModelError(f"the chat template cannot be used: {error}") from None
        self.source = source
        self._control_pattern = any_of(control)

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
               add_generation_prompt: bool = True) -> str:
        """The prompt for a conversation.

        messages: {"role", "content"} with content a string, None, or a list of text parts; an assistant's may
        have "tool_calls", whose arguments may be JSON text. enable_thinking: None leaves it to the template.
        Raises RequestError, naming the field, for what the template does not take.
        """
        switches = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        messages = [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        try:
            return self._template.render(messages=self._guard(messages), tools=self._guard(tools),
                                         add_generation_prompt=add_generation_prompt, **switches)
        except Exception as error:  # a template is foreign code: whatever it raises is about this request
            raise RequestError("messages", f"the chat template refuses the messages: {error}") from None

    def _guard(self, value):
        """The value with every control token in its texts broken by a GUARD."""
        if isinstance(value, str):
            return self._control_pattern.sub(lambda match: match[0][0] + GUARD + match[0][1:], value)
        if isinstance(value, list):
            return [self._guard(item) for item in value]
        if isinstance(value, dict):
            return {key: self._guard(item) for key, item in value.items()}
        return value


def _template_message(message, where: str) -> dict:
    """A message as every template takes it: content one string, arguments of tool calls parsed."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(where, f"{where} is not an object with a role")
    message = message | {"content": _flat_content(message.get("content"), f"{where}.content")}
    if message.get("tool_calls") is not None:
        message["tool_calls"] = _parsed_calls(message["tool_calls"], f"{where}.tool_calls")
    return message


def _flat_content(content, where: str) -> str:
    """Content as one string: older templates know no lists of parts, and none knows null."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(where, f"{where} is neither a string nor a list of parts")
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{i}]", f"{where}[{i}] is not a part of type text, "
                                                "the only type that is supported")
    return "".join(part["text"] for part in content)


def _parsed_calls(calls, where: str) -> list[dict]:
    """Tool calls with their arguments parsed: clients send them as JSON text, templates expect an object."""
    parsed = []
    for i, call in enumerate(calls if isinstance(calls, list) else [calls]):
        field = f"{where}[{i}].function"
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise RequestError(field, f"{field} is not an object")
        arguments = call["function"].get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise RequestError(f"{field}.arguments", f"{field}.arguments is not a JSON object")
        parsed.append(call | {"function": call["function"] | {"arguments": arguments}})
    return parsed
