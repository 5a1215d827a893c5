"""One answer, or a conversation, on the terminal. Answers go to stdout, all else to stderr."""

import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import qengine
from engine.images import PAD, Picture, Reader, prompt_fields
from engine.limits import DEFAULT_MODEL, DEFAULT_PICTURE
from engine.reply import Message, boundaries, check_budget, opening_of
from engine.request import ContextExceeded, ModelError, Request, RequestError
from engine.sight import BLIND, limits_for
from engine.talk import part_of, picture_of, pictures_in
from engine.tokenizer import encode_prompt
from kernels.card import show_bytes

from .engines import Wishes, load_engine, traced
from .interrupts import interruptible
from .terminal import answer_writer, line_editing, reading_line, remark

LOOK_SECONDS = 0.25         # between two looks how far a prompt is read
MOST_LOADED = 4 << 20       # bytes that the file of a conversation may have
LONGER = "--ctx N makes room for more"
WAYS_OUT = f"/clear begins anew; {LONGER}"


def print_answer(engine, request: Request, opening: str = "content", ways_out: str = LONGER) -> tuple[Message, bool]:
    """Generates and prints text as it comes, then the speed; returns (the answer, was it stopped by Ctrl-C?). Raises
    KeyboardInterrupt where Ctrl-C came before the first token. opening: how the answer begins, see engine/reply.py.
    ways_out: what helps where the context was full."""
    generation, writer = engine.submit(request), answer_writer(engine.tokenizer, opening)
    begun = interrupted = False
    try:
        with reading_line() as show:
            for delta in generation.listen(LOOK_SECONDS):
                begun = begun or bool(delta)
                show(0 if begun else generation.n_read, generation.n_prompt)
                if delta:
                    writer.push(delta)
    except KeyboardInterrupt:
        if not begun:
            raise
        interrupted = True
    finally:
        generation.cancel()
        writer.end()
    if begun:
        is_full = generation.n_prompt + generation.n_generated >= engine.n_ctx
        is_cut = generation.finish_reason == "length" and not generation.cause
        remark(speeds_of(generation) + "; stopped" * interrupted + "; cut at --max-tokens" * (is_cut and not is_full))
        if is_cut and is_full:
            remark(f"the answer was cut: the context of {engine.n_ctx:,} tokens is full ({ways_out})")
    return writer.said, interrupted


@contextlib.contextmanager
def naming(ways_out: str):
    """The sentence about a prompt that is too long, raised in the `with` body, also says what helps."""
    try:
        yield
    except ContextExceeded as error:
        raise RequestError(error.field, f"{error} ({ways_out})") from None


def speeds_of(generation) -> str:
    """Tokens and speeds of an answer that has at least one token. The prompt gives the first token, so the answer's
    speed is that of the other tokens; and the prompt's speed is that of the tokens that were not cached."""
    timings = generation.timings()
    cached = f" ({generation.n_cached} cached)" if generation.n_cached else ""
    said = [f"prompt {generation.n_prompt} tokens{cached}, {timings.prompt_speed:.1f} tokens/s",
            f"answer {generation.n_generated} tokens"]
    if timings.answer_speed is not None:
        said[1] += f", {timings.answer_speed:.1f} tokens/s"
    if (drafts := generation.drafts).share is not None:
        said[1] += f", {100 * drafts.share:.0f} % of {sum(drafts.n_checked)} drafts accepted"
    if generation.cause == "repetition":
        said.append("cut because it repeated itself")
    return "; ".join(said)


def opening_for(model, prompt: str, thinking: bool | None) -> str:
    """How the answer to a prompt of the model's chat template begins. model: an OpenModel or an Engine."""
    return opening_of(prompt, model.template.source, thinking)


def with_bounds(sampling: dict, model, opening: str) -> dict:
    """`sampling` and, where it limits thoughts, how an answer that begins so shows their end. model: an OpenModel or an
    Engine."""
    if "thinking_budget" not in sampling:
        return sampling
    bounds = boundaries(model.tokenizer.tags, opening)
    check_budget("--thinking-budget", opening, bounds)
    return sampling | bounds


def check_text(text: str):
    """Raises RequestError where text from the command line or the terminal was not valid UTF-8."""
    if any("\ud800" <= c <= "\udfff" for c in text):     # Python makes these of bytes that it cannot decode
        raise RequestError("prompt", "the prompt is not valid UTF-8")


def run_prompt(model: qengine.OpenModel, options, sampling: dict, wishes: Wishes) -> int:
    """Answers one text; returns the exit code. A text that cannot be answered is refused before the model is loaded."""
    check_text(text := piped_text() if options.prompt == "-" else options.prompt)
    if not (text.strip() or options.image or options.raw):
        raise RequestError("prompt", "the prompt is empty")
    n_ctx, opening = model.n_ctx(options.ctx), "content"
    wishes.check(model)
    if options.system and model.template is None:
        raise RequestError("system", "--system is for chat templates, and this model has none")
    limits = limits_for(options.image_tokens, n_ctx)
    with contextlib.closing(Reader(limits, model.tokenizer.control.get(PAD))) as eyes:
        messages = [message_of(text, [read_picture(path, eyes) for path in options.image])]
    if model.template is not None and not options.raw:
        text = wishes.render(model, with_system(options.system, messages))
        opening = opening_for(model, text, wishes.thinking)
        sampling = with_bounds(sampling, model, opening)
    with naming(LONGER):
        ids = encode_prompt(model.tokenizer, text, n_ctx)
        request = Request(**prompt_fields(ids, pictures_in(messages), eyes), **sampling)
        request.check(model.config.n_vocab, n_ctx)
    with contextlib.closing(load_engine(model, options)) as engine, traced(engine, options):
        _, interrupted = print_answer(engine, request, opening)
    return 130 if interrupted else 0


def piped_text() -> str:
    """All of stdin. The line break at its end is the shell's."""
    sys.stdin.reconfigure(errors="surrogateescape")     # bytes that are no text are refused, in a sentence
    return sys.stdin.read().removesuffix("\n")


def with_system(system: str | None, messages: list[dict]) -> list[dict]:
    """Messages behind the system's, if there is one."""
    return ([{"role": "system", "content": system}] if system else []) + messages


def read_picture(path: str, eyes: Reader) -> Picture:
    """The picture of a file, of which a line tells. Raises RequestError."""
    picture = picture_of(Path(os.path.expanduser(path)), eyes, path)
    height, width, _ = picture.pixels.shape
    qengine.note(f"picture: {path}, seen as {width} x {height} pixels, {picture.n_tokens} tokens")
    return picture


def message_of(text: str, pictures: list[Picture]) -> dict:
    """A message of the user, in which the pictures come first."""
    parts = [*map(part_of, pictures), {"type": "text", "text": text}]
    return {"role": "user", "content": parts if pictures else text}


def run_chat(model: qengine.OpenModel, options, sampling: dict, wishes: Wishes) -> int:
    """A conversation on the terminal, or with the lines of stdin; returns the exit code."""
    if model.template is None:
        raise ModelError("this model has no chat template: use -p TEXT --raw")
    wishes.check(model)
    check_text(options.system or "")
    with contextlib.closing(load_engine(model, options)) as engine, traced(engine, options), line_editing() as ask:
        return Chat(engine, sampling, wishes, options.system).run(ask)


class Chat:
    """A conversation; Ctrl-C ends the answer that is being written and nothing else.

    messages: without the system's. waiting: pictures for the next message.
    """

    def __init__(self, engine, sampling: dict, wishes: Wishes, system: str | None = None):
        self.engine, self.sampling, self.wishes, self.system = engine, sampling, wishes, system
        self.messages, self.waiting = [], []

    def run(self, ask) -> int:
        """Answers each message of ask(prompt), until EOFError; returns the exit code."""
        sys.stdin.reconfigure(errors="surrogateescape")     # bytes that are no text are refused below, in a sentence
        is_typed = sys.stdin.isatty()
        if is_typed:
            picture = ", /image FILE shows a picture with the next message" if self.engine.eyes else ""
            qengine.note(f"Ctrl-C stops an answer, Ctrl-D leaves, /help lists commands{picture}.")
            if self.engine.eyes and DEFAULT_MODEL.name.startswith(self.engine.name):
                qengine.note(f"To try: /image {os.path.relpath(DEFAULT_PICTURE)}, then: How many circles are there?")
        while True:
            interruptible()
            try:
                text = ask("> " if is_typed else "")
            except EOFError:
                return 0
            except KeyboardInterrupt:               # it was meant for the answer, which ended just before
                if not is_typed:
                    raise
                qengine.note("\nCtrl-D leaves.")
                continue
            if not text.strip():
                continue
            line = text.rstrip()
            name, _, argument = line.partition(" ")
            name = ALIASES.get(name, name)
            if "\n" in line or not COMMAND.fullmatch(name):         # several lines were pasted, and are a message
                self.answer(text)
            elif name == "/exit":
                return 0
            else:
                with contextlib.suppress(KeyboardInterrupt):        # while a picture is read
                    self.obey(name, argument.strip())

    def answer(self, text: str):
        """Answers a message, which becomes a part of the conversation unless that fails."""
        engine, said = self.engine, message_of(text, self.waiting)
        shown, self.waiting = self.waiting, []
        messages = with_system(self.system, [*self.messages, said])
        try:
            check_text(text)
            prompt = self.wishes.render(engine, messages)
            opening = opening_for(engine, prompt, self.wishes.thinking)
            sampling = with_bounds(self.sampling, engine, opening)
            with naming(WAYS_OUT):
                ids = engine.encode(prompt)
                request = Request(**prompt_fields(ids, pictures_in(messages), engine.eyes), **sampling)
                answer, _ = print_answer(engine, request, opening, WAYS_OUT)
        except RequestError as error:           # for example, the conversation has outgrown the context
            qengine.note(f"qengine: {error}")
        except KeyboardInterrupt:               # before the answer began
            self.waiting = shown
            qengine.note("stopped; the message is taken back")
        else:
            self.messages += said, answer.remembered()

    # ---- commands ----

    def obey(self, name: str, argument: str):
        """Does what a command says; a sentence tells where that cannot be done."""
        try:
            if name not in COMMANDS:
                raise RequestError("command", f"there is no {name}: /help lists the commands; a message may begin with "
                                              "a space")
            COMMANDS[name].work(self, argument)
        except RequestError as error:
            qengine.note(f"qengine: {error}")
        except OSError as error:
            qengine.note(f"qengine: {argument}: {error.strerror}")

    def help(self, _):
        width = max(len(f"{name} {command.argument}") for name, command in COMMANDS.items())
        for name, command in COMMANDS.items():
            qengine.note(f"  {f'{name} {command.argument}':<{width}}   {command.meaning}")

    def set_system(self, text: str):
        if text:
            check_text(text)
            self.system = text
        qengine.note(f"system: {self.system}" if self.system else "There is no system message.")

    def set_thinking(self, said: str):
        if said not in ("", *THINKING):
            raise RequestError("thinking", "/thinking takes on or off")
        if said:
            self.wishes = dataclasses.replace(self.wishes, thinking=THINKING[said])
        now = {thinks: word for word, thinks in THINKING.items()}.get(self.wishes.thinking, "as the template has it")
        qengine.note(f"thinking: {now}")

    def clear(self, _):
        self.messages, self.waiting = [], []
        qengine.note("A new conversation.")

    def save(self, path: str):
        path = Path(os.path.expanduser(unquoted(path, "/save")))       # Path's own fails at an unknown ~name
        kind, text_of = ("JSON", as_json) if path.suffix.lower() == ".json" else ("Markdown", transcript)
        text = text_of(with_system(self.system, self.messages))
        if kind == "JSON" and len(text.encode(errors="replace")) > MOST_LOADED:
            raise RequestError("file", f"the conversation is longer than the {show_bytes(MOST_LOADED)} that /load "
                                       "takes; another name saves it as Markdown")
        with open(path, "x", encoding="utf-8", errors="replace") as file, kept_if_whole(path):
            file.write(text)            # an existing file stays as it is
            file.flush()
        qengine.note(f"saved as {kind}: {path}, {len(self.messages)} messages")

    def load(self, path: str):
        path = Path(os.path.expanduser(unquoted(path, "/load")))
        with open(path, "rb") as file:
            messages = from_json(file.read(MOST_LOADED + 1), path)
        self.system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
        self.messages, self.waiting = messages, []
        qengine.note(f"The conversation of {path}: {len(messages)} messages.")

    def show_picture(self, path: str):
        if self.engine.eyes is None:
            raise RequestError("image", f"/image: {BLIND}")
        self.waiting.append(read_picture(unquoted(path, "/image"), self.engine.eyes))


class Command(NamedTuple):
    argument: str           # as the help names it
    meaning: str
    work: Callable          # work(chat, argument)


COMMAND = re.compile(r"/([a-z]+|\?)")
ALIASES = {"/quit": "/exit", "/bye": "/exit", "/?": "/help"}        # what other programs call them
THINKING = {"on": True, "off": False}
COMMANDS = {"/help": Command("", "list the commands", Chat.help),
            "/system": Command("TEXT", "set the system message, or show it", Chat.set_system),
            "/thinking": Command("on|off", "say whether the model thinks from now on, or show it", Chat.set_thinking),
            "/image": Command("FILE", "show a picture with the next message", Chat.show_picture),
            "/clear": Command("", "begin a new conversation; the system message stays", Chat.clear),
            "/save": Command("FILE", "write the conversation into a new file: Markdown, or .json for /load", Chat.save),
            "/load": Command("FILE", "go on with a conversation of a .json file, in place of this one", Chat.load),
            "/exit": Command("", "leave, as Ctrl-D does", None)}


def unquoted(path: str, command: str) -> str:
    """The file that a command names, as a terminal writes it for a file that is dropped there, maybe between quotes.
    Raises RequestError."""
    if path[:1] in ("'", '"') and path[-1:] == path[:1]:
        path = path[1:-1]
    if not path or "\0" in path:
        raise RequestError("file", f"{command} needs the name of a file")
    return path


@contextlib.contextmanager
def kept_if_whole(path: Path):
    """Removes a new file if it cannot be written to its end."""
    try:
        yield
    except OSError:
        path.unlink(missing_ok=True)
        raise


def transcript(messages: list[dict]) -> str:
    """A conversation as Markdown. Thoughts are quoted."""
    said = []
    for message in messages:
        said.append(f"## {message['role']}")
        if thoughts := message.get("reasoning_content"):
            said.append("\n".join(f"> {line}".rstrip() for line in thoughts.splitlines()))
        said.append(words_of(message))
    return "\n\n".join(said) + "\n"


def words_of(message: dict) -> str:
    """The content of a message as a text. Of a picture its size is told."""
    parts = message["content"]
    return "\n\n".join("[picture: {1} x {0} pixels]".format(*part["picture"].pixels.shape) if "picture" in part
                       else part["text"] for part in (parts if isinstance(parts, list) else [{"text": parts}]))


def as_json(messages: list[dict]) -> str:
    """A conversation as `from_json` reads it."""
    return json.dumps([message | {"content": words_of(message)} for message in messages], ensure_ascii=False, indent=1)


def from_json(data: bytes, path: Path) -> list[dict]:
    """The messages of a file: a list of objects, each with a role, a content that is a text and maybe thoughts, as
    `reasoning_content`. Only the first may be the system's. Raises RequestError."""
    if len(data) > MOST_LOADED:
        raise RequestError("file", f"{path} is longer than the {show_bytes(MOST_LOADED)} of a conversation")
    try:
        given = json.loads(data)
        messages = [{name: message[name] for name in ("role", "reasoning_content", "content") if name in message}
                    for message in given]
        roles = [message["role"] for message in messages]
        texts = [text for message in messages for text in message.values()]
        if not isinstance(given, list) or not all("content" in each for each in messages) or \
                not set(roles) - {"system"} <= {"user", "assistant"} or "system" in roles[1:] or \
                not all(isinstance(text, str) for text in texts):
            raise ValueError
        for text in texts:
            text.encode()               # JSON may have halves of letters
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RequestError("file", f"{path} holds no conversation: it is a JSON list, as /save NAME.json writes it"
                           ) from None
    return messages
