"""What the options of a command line ask of the engine, and the files that they name."""

import contextlib
import json
from pathlib import Path

import qengine
from kernels.trace import LEFT_OUT, tracing


def asked(options) -> dict:
    """What the command line asks of `qengine.load`. A single text needs no checkpoints, and one that is scored needs no
    drafts, so none are asked for."""
    is_single = not (options.chat or options.plan or options.serve is not None)
    on_card, on_host = (0 if is_single else size and size << 20
                        for size in (options.checkpoint_memory, options.checkpoint_host_memory))
    draft = "off" if options.perplexity is not None else "auto" if options.draft is None else options.draft
    return {"ctx": options.ctx, "slots": options.slots, "kv_tokens": options.kv_tokens, "checkpoint_memory": on_card,
            "checkpoint_host_memory": on_host, "split": options.split, "draft": draft}


def load_engine(model: "str | qengine.OpenModel", options) -> "qengine.Engine":
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
        if LEFT_OUT in trace.facts:
            qengine.note(f"qengine: {options.trace} lacks {trace.facts[LEFT_OUT]}")


def write_json(path: str, data):
    """Raises OSError where the file cannot be written; `main` makes a sentence of it."""
    Path(path).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
