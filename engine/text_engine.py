"""What an engine offers a server: api/ uses these names of an engine and no others."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from engine.details import ModelDetails
from engine.images import Reader
from engine.request import Answer, Fault, Request, RequestError
from engine.template import ChatTemplate
from engine.tokenizer import Tokenizer


ABILITIES = {"text": "generate text", "embedding": "make embeddings", "reranking": "rerank documents"}   # by kind


def wrong_kind(engine, wanted: str) -> RequestError:
    """The error of a request to an engine whose `kind` is not the wanted one."""
    return RequestError("model", f"the model {engine.name} can {ABILITIES[engine.kind]}, but not {ABILITIES[wanted]}")


def sees(engine) -> bool:
    """Whether the model of an engine, of any kind, takes pictures."""
    return engine.kind == "text" and engine.eyes is not None


class TextOnly:
    """How an engine of text answers calls that only other kinds of engines serve (engine/pooling.py), and what it says
    of eyes and caches that it does not have."""

    kind = "text"
    eyes = None
    replicas = ()

    def marks(self) -> list[int]:
        """Nothing is kept."""
        return []

    def embed(self, *_, **__):
        """Raises RequestError."""
        raise wrong_kind(self, "embedding")

    def rerank(self, *_, **__):
        """Raises RequestError."""
        raise wrong_kind(self, "reranking")


class TextEngine(Protocol):
    """What an engine offers a server: all that api/ uses of one. `qengine.Engine` implements it, and so do engines of
    the tests that answer with given texts."""

    kind: str                           # "text"; engine/pooling.py has engines of other kinds
    name: str                           # of the model, as clients see it
    details: ModelDetails               # what the model's file says of it
    n_ctx: int                          # tokens of a context, prompt and answer together
    n_slots: int                        # answers that are generated at the same time
    tokenizer: Tokenizer
    template: ChatTemplate | None       # None: the model knows no conversations
    cards: Sequence                     # in the order of their layers; each has describe(), a line for people
    layers: Sequence[range]             # the layers of each card
    reason: str | None                  # why the engine has stopped, a sentence; None while it works
    fault: Fault | None                 # what stopped it: card, text and time; None while it works
    counts_pipes: bool                  # whether `count_pipes` works
    eyes: Reader | None                 # reads pictures, `pad` is their token; None: the model reads text alone
    replicas: Sequence                  # where it runs, if not in this process alone: of engine/replicas/table.py

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt. Raises RequestError if its letters alone cannot fit into the context."""

    @abstractmethod
    def submit(self, request: Request) -> Answer:
        """Start a request; return at once. Raises RequestError or EngineStopped."""

    @abstractmethod
    def stats(self) -> dict[str, int | tuple[int, ...]]:
        """Counts for /metrics. Of this moment: requests_running, requests_waiting, kv_pages, kv_pages_used,
        checkpoints, checkpoints_on_card. Since the start: prompt_tokens, of those cached_tokens, generated_tokens,
        checkpoints_spilled, checkpoints_fetched, checkpoints_dropped; and tuples with a count for each position of a
        draft in its check, drafts_checked and drafts_accepted. If cards hold only some of the experts of a model,
        also those of engine/expert_store.py (Counts), each with "expert_" before its name."""

    @abstractmethod
    def count_pipes(self) -> dict | None:
        """The work of a decode step by execution pipe, on an emulated card, as `engine.pipes.PipeMeter.count` has it;
        None before the first step that was counted."""

    @abstractmethod
    def marks(self) -> list[int]:
        """The marks (engine/prefix.py's `marks_of`) of the beginnings of prompts that later prompts need not compute
        again here."""
