"""One answer, or a conversation, on the terminal. Answers go to stdout, all else to stderr."""

import contextlib
import sys
from pathlib import Path

import qengine
from engine.images import PAD, Picture, Reader, prompt_fields
from engine.request import ModelError, Request, RequestError
from engine.sight import BLIND, limits_for
from engine.talk import part_of, picture_of, pictures_in
from engine.tokenizer import encode_prompt

from .engines import Wishes, load_engine, traced
from .interrupts import interruptible


def print_answer(engine, request: Request) -> tuple[str, bool]:
    """Generates and prints text as it comes, then the speed; returns (text, was it stopped by Ctrl-C?)."""
    generation = engine.submit(request)
    pieces, interrupted = [], False
    try:
        for delta in generation:
            pieces.append(delta.text)
            print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        generation.cancel()
        print()
    if pieces:      # the prompt gives the first token, so the answer's speed is that of the other tokens
        n_prompt, times = generation.n_prompt, generation.token_times
        speeds = [f"prompt {n_prompt} tokens, {n_prompt / (times[0] - generation.started):.1f} tokens/s",
                  f"answer {len(times)} tokens"]
        if len(times) > 1:
            speeds[1] += f", {(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s"
        if (drafts := generation.drafts).share is not None:
            speeds[1] += f", {100 * drafts.share:.0f} % of {sum(drafts.n_checked)} drafts accepted"
        if generation.cause == "repetition":
            speeds.append("cut because it repeated itself")
        qengine.note("; ".join(speeds))
    return "".join(pieces), interrupted


def with_bounds(sampling: dict, model, prompt: str, thinking: bool | None) -> dict:
    """`sampling` and, where it limits thoughts, how the answer to this prompt shows their end. model: an OpenModel or
    an Engine."""
    if "thinking_budget" not in sampling:
        return sampling
    from api.chat import boundaries, check_budget   # here: imports that nothing else needs
    from api.reply import opening_of
    opening = opening_of(prompt, model.template.source, thinking)
    bounds = boundaries(model.tokenizer.tags, opening)
    check_budget("--thinking-budget", opening, bounds)
    return sampling | bounds


def remembered(answer: str) -> dict:
    """An answer as a message of the conversation. Thoughts stand apart, so that the template decides whether the model
    sees them again."""
    thoughts, tag, text = answer.partition("</think>")
    if not tag:
        return {"role": "assistant", "content": answer}
    thoughts = thoughts.strip().removeprefix("<think>").strip()
    return {"role": "assistant", "reasoning_content": thoughts, "content": text.lstrip("\n")}


def check_text(text: str):
    """Raises RequestError where text from the command line or the terminal was not valid UTF-8."""
    if any("\ud800" <= c <= "\udfff" for c in text):     # Python makes these of bytes that it cannot decode
        raise RequestError("prompt", "the prompt is not valid UTF-8")


def run_prompt(model: qengine.OpenModel, options, sampling: dict, wishes: Wishes) -> int:
    """Answers one text; returns the exit code. A text that cannot be answered is refused before the model is loaded."""
    check_text(text := options.prompt)
    n_ctx = model.n_ctx(options.ctx)
    wishes.check(model)
    limits = limits_for(options.image_tokens, n_ctx)
    with contextlib.closing(Reader(limits, model.tokenizer.control.get(PAD))) as eyes:
        messages = [message_of(text, [read_picture(path, eyes) for path in options.image])]
    if model.template is not None and not options.raw:
        text = wishes.render(model, messages)
        sampling = with_bounds(sampling, model, text, wishes.thinking)
    ids = encode_prompt(model.tokenizer, text, n_ctx)
    request = Request(**prompt_fields(ids, pictures_in(messages), eyes), **sampling)
    request.check(model.config.n_vocab, n_ctx)
    with contextlib.closing(load_engine(model, options)) as engine, traced(engine, options):
        _, interrupted = print_answer(engine, request)
    return 130 if interrupted else 0


def read_picture(path: str, eyes: Reader) -> Picture:
    """The picture of a file, of which a line tells. Raises RequestError."""
    picture = picture_of(Path(path).expanduser(), eyes, path)
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
    with contextlib.closing(load_engine(model, options)) as engine, traced(engine, options):
        return chat(engine, sampling, wishes)


def chat(engine, sampling: dict, wishes: Wishes) -> int:
    """The conversation itself; Ctrl-C ends the answer that is being written and nothing else."""
    sys.stdin.reconfigure(errors="surrogateescape")     # bytes that are no text are refused below, in a sentence
    if sys.stdin.isatty():
        try:
            import readline  # noqa: F401  gives input() line editing; not on every system
        except ImportError:
            pass
        pictures = ", /image FILE shows a picture with the next message" if engine.eyes else ""
        qengine.note(f"Ctrl-C stops an answer, Ctrl-D leaves{pictures}.")
    messages, waiting = [], []
    while True:
        interruptible()
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return 0
        except KeyboardInterrupt:               # it was meant for the answer, which ended just before
            if not sys.stdin.isatty():
                raise
            qengine.note("\nCtrl-D leaves.")
            continue
        if not text.strip():
            continue
        command, _, path = text.strip().partition(" ")
        if command == "/image":
            with contextlib.suppress(KeyboardInterrupt):        # while the picture is read
                waiting += picture_for_next(path.strip(), engine)
            continue
        messages.append(message_of(text, waiting))
        waiting = []
        try:
            check_text(text)
            prompt = wishes.render(engine, messages)
            bounded = with_bounds(sampling, engine, prompt, wishes.thinking)
            request = Request(**prompt_fields(engine.encode(prompt), pictures_in(messages), engine.eyes), **bounded)
            answer, _ = print_answer(engine, request)
        except RequestError as error:           # for example, the conversation has outgrown the context
            qengine.note(f"qengine: {error}")
            messages.pop()
        except KeyboardInterrupt:               # before the answer began
            messages.pop()
        else:
            messages.append(remembered(answer))


def picture_for_next(path: str, engine) -> list[Picture]:
    """The picture of /image, in a list; nothing, and a sentence for the user, where there is none. path: as a terminal
    writes it for a file that is dropped there, maybe between quotes."""
    if path[:1] in ("'", '"') and path[-1:] == path[:1]:
        path = path[1:-1]
    try:
        if engine.eyes is None:
            raise RequestError("image", f"/image: {BLIND}")
        if not path:
            raise RequestError("image", "/image needs the name of a file")
        return [read_picture(path, engine.eyes)]
    except RequestError as error:
        qengine.note(f"qengine: {error}")
        return []
