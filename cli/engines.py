"""What the options of a command line ask of the engines, and the files that they name."""

import contextlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import qengine
from engine.hub import eyes_file
from engine.request import RequestError
from engine.served import Defaults
from kernels.trace import LEFT_OUT, tracing

SHOWN_KERNELS = 8           # that the sentence about a trace names


@dataclass(frozen=True)
class Wishes:
    """What the command line asks of chat templates. thinking: None leaves it to the template. template_kwargs: its
    other variables."""

    thinking: bool | None
    template_kwargs: dict

    @classmethod
    def of(cls, options) -> "Wishes":
        template_kwargs = dict(options.chat_template_kwargs or {})
        said = template_kwargs.pop("enable_thinking", None)
        return cls({None: said, "on": True, "off": False}[options.thinking], template_kwargs)

    def defaults(self, sampling: dict) -> Defaults:
        """What a server's answers obey. sampling: fields of Request."""
        return Defaults(sampling, self.thinking, self.template_kwargs)

    def render(self, model, messages: list[dict]) -> str:
        """The prompt of a conversation. model: an OpenModel or an Engine. Raises RequestError."""
        return model.template.render(messages, enable_thinking=self.thinking, template_kwargs=self.template_kwargs)

    def check(self, model: "qengine.OpenModel"):
        """Raises RequestError where the template refuses its variables, and tells of those that it does not use."""
        if not self.template_kwargs:
            return
        if model.template is None or model.kind != "text":
            raise RequestError("chat_template_kwargs", "--chat-template-kwargs is for chat templates, and this model "
                                                       "has none")
        if unused := sorted(self.template_kwargs.keys() - model.template.variables):
            qengine.note(f"warning: the chat template of this model does not use {', '.join(unused)}")
        self.render(model, [{"role": "user", "content": "Hello"}])


def asked(options) -> dict:
    """What the command line asks of `qengine.load`. A single text needs no checkpoints, and one that is scored needs no
    drafts, so none are asked for."""
    is_single = not (options.chat or options.plan or options.serve is not None)
    on_card, on_host = (0 if is_single else size and size << 20
                        for size in (options.checkpoint_memory, options.checkpoint_host_memory))
    draft = "off" if options.perplexity is not None else "auto" if options.draft is None else options.draft
    return {"ctx": options.ctx, "slots": options.slots, "kv_tokens": options.kv_tokens, "checkpoint_memory": on_card,
            "checkpoint_host_memory": on_host, "split": options.split, "draft": draft,
            **memories(options), "products": options.products, "sparse": options.sparse,
            "image_tokens": options.image_tokens,
            "mmproj": options.mmproj if shows_pictures(options) else "none"}


def shows_pictures(options) -> bool:
    """Whether the model may be shown pictures, and needs its eyes for them."""
    return bool(options.image or options.chat or options.plan or options.serve is not None)


def check_eyes(options, model: "qengine.OpenModel"):
    """Raises RequestError where the command line has something for a model's eyes, and the model has none; ModelError
    where the file with them cannot be had."""
    wish = "--image" if options.image else "--image-tokens" if options.image_tokens else None
    if wish and eyes_file(options.mmproj, model, qengine.note) is None:
        raise RequestError(wish, f"{wish} is for models with eyes, and {model.name} has none: --mmproj names the file "
                                 "with them, if there is one for this model")


def memories(options) -> dict[str, int | None]:
    """--memory and --expert-memory in bytes, as arguments of `qengine.load`."""
    return {name: None if (size := getattr(options, name)) is None else int(size * 2**30)
            for name in ("memory", "expert_memory")}


def load_engine(model: "qengine.OpenModel", options) -> "qengine.Engine":
    """The engine that the options ask for."""
    return qengine.load(model, card=options.card, **asked(options))


@contextlib.contextmanager
def traced(engine: "qengine.Engine", options):
    """Writes the file that --trace names: what the engine's cards did while the `with` body ran."""
    if not options.trace:
        yield
        return
    try:
        with tracing(engine.cards) as trace:
            yield
    finally:
        trace.write(options.trace)
        qengine.note(f"trace: {options.trace}, {len(trace.spans):,} bars; open it in ui.perfetto.dev or "
                     "chrome://tracing")
        if steps := trace.replayed():
            kernels = sum(steps, Counter())
            named = ", ".join(f"{n:,} {name}" for name, n in kernels.most_common(SHOWN_KERNELS))
            qengine.note(f"decode steps: {len(steps):,} replays ran {kernels.total():,} operations: {named}"
                         + ", ..." * (len(kernels) > SHOWN_KERNELS))
        if LEFT_OUT in trace.facts:
            qengine.note(f"qengine: {options.trace} lacks {trace.facts[LEFT_OUT]}")


def check_files(options):
    """Raises RequestError where results cannot be written, so that none are lost because of a mistyped folder."""
    for option, path in ("--trace", options.trace), ("--json", options.json):
        if path:
            try:
                open(path, "ab").close()        # what an earlier run wrote stays until there is more
            except OSError as error:
                raise RequestError(option, f"{option} {path}: {error.strerror}") from None


def write_json(path: str, data):
    """Raises OSError where the file cannot be written; `main` makes a sentence of it."""
    Path(path).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
