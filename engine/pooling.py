"""Embeddings and scores of texts: what a caller of such an engine says and hears.

A pooling model makes one row of numbers of a text. Of all rows that its layers have computed, it takes one or the mean
(`Config.pooling`):

    embedding   "last": the row of the last token; "cls": of the first; "mean": the mean of all. Its length becomes 1
    reranking   "rank": the row of the last token of a query and a document together. A classifier makes two numbers of
                it, and the first element of their softmax says how relevant the document is

A caller gives token ids or text. The tokenizer adds the tokens that the model file wants around a text, such as an end
token; token ids are taken as they are. A control token's name in a text is plain text.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.details import ModelDetails
from engine.gguf import GGUF
from engine.guard import ControlTokens, unmarked
from engine.request import EngineStopped, Fault, Job, ModelError, RequestError
from engine.speculate import Drafts
from engine.text_engine import wrong_kind
from engine.tokenizer import Tokenizer

MOST_TEXTS = 2048           # of a request
MOST_TOKENS = 1 << 20       # of a request, all texts together


@dataclass
class TextsRequest:
    """Texts, as token ids; a pooling engine is to make one row of each text. field: how errors name the texts.
    dimensions: how many numbers of an embedding are wanted, from the first one on; None: all."""

    texts: list[list[int]]
    dimensions: int | None = None
    timeout: float | None = None        # seconds from `submit` on, after which it ends with DeadlineExceeded
    field: str = "input"

    def check(self, n_vocab: int, n_ctx: int, n_dims: int):
        """Raises RequestError for the first thing that cannot be served."""
        if not 1 <= len(self.texts) <= MOST_TEXTS:
            raise RequestError(self.field, f"'{self.field}' must hold 1 to {MOST_TEXTS} texts, not {len(self.texts)}")
        for i, ids in enumerate(self.texts):
            where = f"'{self.field}[{i}]'"
            if not ids:
                raise RequestError(self.field, f"{where} is empty")
            if len(ids) > n_ctx:
                raise RequestError(self.field, f"{where} has {len(ids)} tokens, and the model's context holds {n_ctx}")
            bad = next((token for token in ids if not 0 <= token < n_vocab), None)
            if bad is not None:
                raise RequestError(self.field, f"{where} has the token id {bad}, outside 0 .. {n_vocab - 1}")
        gathered(self.texts, self.field)
        if self.dimensions is not None and not 1 <= self.dimensions <= n_dims:
            raise RequestError("dimensions", f"'dimensions' must be a whole number from 1 to {n_dims}")


def gathered(texts: Iterable[list[int]], field: str) -> list[list[int]]:
    """The token ids of texts. Raises RequestError at the first that is one too many: tokens take 40 times the memory of
    their letters, so the texts behind it are not tokenised."""
    found, n_left = [], MOST_TOKENS
    for ids in texts:
        n_left -= len(ids)
        if n_left < 0:
            raise RequestError(field, f"'{field}' has more than {MOST_TOKENS} tokens")
        found.append(ids)
    return found


def rows_of(job: "TextsJob") -> np.ndarray:
    """The result of a job that nobody has cancelled. Raises what the job failed with; EngineStopped if the engine was
    closed before the end of the job."""
    if (rows := job.result()) is None:
        raise EngineStopped("the engine was closed")
    return rows


class TextsJob(Job):
    """A TextsRequest on its way through an engine. It is finished ("stop") when all rows are there. It also has what
    logs ask of a Generation."""

    n_generated = n_cached = n_read = 0
    token_times = ()
    drafts = Drafts()
    cause = None

    def __init__(self, request: TextsRequest):
        super().__init__(request, sum(map(len, request.texts)))
        self.rows: list = [None] * len(request.texts)   # of each text, once it is computed
        self.n_missing = len(request.texts)

    def result(self) -> np.ndarray | None:
        """Waits for the rows and returns them, float32 [texts, numbers of a row], in the order of the texts. None if
        the job was cancelled. Raises what it failed with; EngineStopped if the engine failed."""
        self.wait()
        if self.error is not None:
            raise self.error
        return np.stack(self.rows) if self.finish_reason else None

    def land(self, index: int, row: np.ndarray):
        """The engine has computed the row of a text. After the last one the job is finished."""
        self.rows[index] = row
        self.n_missing -= 1
        if not self.n_missing:
            self.finish_reason = "stop"
            self.close()

    def close(self, error: Exception | None = None):
        """No more rows come."""
        self.error = error
        self._done.set()


# What random weights are given to read.
SYNTHETIC_RERANK = "<Instruct>: Find what answers the query\n<Query>: {query}\n<Document>: {document}"


class RerankTemplate:
    """The text that a reranker reads: a query and a document, between words of its own. In the file's template they are
    {query} and {document}. The line that begins with <Instruct>: holds an instruction, which a request may replace. In
    templates that have {instruction} the request's stands there; its default is empty.

    control: the names of control tokens. Only those of the template itself are control tokens of the text."""

    VALUES = re.compile(r"\{(query|document|instruction)\}")
    INSTRUCTION = re.compile(r"(?<=<Instruct>: )[^\n{}]+(?=\n)")

    def __init__(self, source: str, control=()):
        self.source, self.control = source, ControlTokens(control)
        default = self.INSTRUCTION.search(source)
        self.default = default and default[0]
        self.parts = self.VALUES.split(self.INSTRUCTION.sub("{instruction}", source, count=1))
        if missing := {"query", "document"} - set(self.parts[1::2]):
            raise ModelError(f"the template for reranking has no {{{min(missing)}}}")

    @classmethod
    def from_gguf(cls, gguf: GGUF, tokenizer: Tokenizer) -> "RerankTemplate":
        try:
            return cls(gguf.get("tokenizer.chat_template.rerank", str), tokenizer.control)
        except ModelError as error:
            raise ModelError(str(error) if gguf.path in str(error) else f"{gguf.path}: {error}") from None

    def render(self, query: str, document: str, instruction: str | None = None) -> str:
        """The text for a query and a document. Raises RequestError if there is no place for the instruction."""
        if instruction is not None and "instruction" not in self.parts[1::2]:
            raise RequestError("instruction", "the model's template has no place for an instruction")
        values = {"query": query, "document": document,
                  "instruction": (self.default or "") if instruction is None else instruction}
        return self.control.settle("".join(
            unmarked(values[part]) if i % 2 else self.control.mark(part) for i, part in enumerate(self.parts)))


# ---- from rows to what is wanted ---------------------------------------------------------------------------------
# On the host, in float64 and with sums that are rounded once, so that all machines compute the same bits.


def unit(row: np.ndarray, dimensions: int | None = None) -> np.ndarray:
    """The first `dimensions` numbers of a row as float32, with the length 1. A row of zeros stays as it is."""
    cut = np.asarray(row, np.float64)[:dimensions]
    length = math.sqrt(math.fsum(cut * cut))
    return (cut / (length or 1.0)).astype(np.float32)


def mean_of(sums: list[np.ndarray], n_tokens: int) -> np.ndarray:
    """The mean of the rows of a text, float64, from the sums over its pages, added in their order."""
    total = np.zeros(sums[0].shape, np.float64)
    for each in sums:
        total += each
    return total / n_tokens


def relevance(row: np.ndarray, classifier: np.ndarray) -> np.ndarray:
    """float32 [1]: the first element of softmax(classifier . row). classifier: float32 [2, numbers of a row]."""
    yes, no = (math.fsum(weights * np.asarray(row, np.float64)) for weights in classifier.astype(np.float64))
    return np.array([1 / (1 + math.exp(min(no - yes, 700.0)))], np.float32)


# ---- the engine ----------------------------------------------------------------------------------------------------


class PoolingEngine(ABC):
    """What an engine of a pooling model offers a server and a notebook: all that api/ uses of one, and what all such
    engines do alike. engine/packing.py has the one that computes; tests have one that answers with given rows."""

    kind: str                           # "embedding" or "reranking"
    name: str                           # of the model, as clients see it
    details: ModelDetails               # what the model's file says of it
    n_ctx: int                          # tokens of a text, at most
    n_dims: int                         # numbers of an embedding
    tokenizer: Tokenizer
    template: RerankTemplate | None     # of a reranker
    cards: Sequence                     # in the order of their layers; each has describe(), a line for people
    layers: Sequence[range]             # the layers of each card
    reason: str | None                  # why the engine has stopped, a sentence; None while it works
    fault: Fault | None                 # what stopped it: card, text and time; None while it works
    replicas: Sequence = ()             # where it runs, if not in this process alone: of engine/replicas/table.py

    @abstractmethod
    def submit(self, request: TextsRequest) -> TextsJob:
        """Start a request; return at once. Raises RequestError or EngineStopped."""

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Counts for /metrics. Of this moment: requests_running, requests_waiting, kv_pages, kv_pages_used. Since the
        start: requests, texts, prompt_tokens, passes."""

    def encode(self, text: str, field: str = "input") -> list[int]:
        """Token ids of a text, with the tokens around it that the file wants. Raises RequestError for `field`, also if
        its letters alone cannot fit into the context."""
        self._check_letters(text, field)
        return self.tokenizer.encode(text, allow_special=False, ends=True)

    def encode_pair(self, query: str, document: str, instruction: str | None = None) -> list[int]:
        """Token ids of what a reranker reads. Raises RequestError."""
        text = self.template.render(query, document, instruction)
        self._check_letters(text, "documents")
        return self.tokenizer.encode(text)

    def _check_letters(self, text: str, field: str):
        if len(text) > self.n_ctx * self.tokenizer.max_token_bytes:
            raise RequestError(field, f"'{field}' holds a text of {len(text)} letters, too many for the model's "
                                      f"context of {self.n_ctx} tokens")

    def ask_embeddings(self, texts: "list[str | list[int]]", dimensions: int | None = None,
                       timeout: float | None = None) -> TextsJob:
        """Start the embeddings of texts, each given as text or token ids; return at once. The job's result is float32
        [texts, dimensions]. Raises RequestError or EngineStopped."""
        self._check_kind("embedding")
        ids = gathered((self.encode(text) if isinstance(text, str) else list(text) for text in texts), "input")
        return self.submit(TextsRequest(ids, dimensions, timeout))

    def ask_scores(self, query: str, documents: list[str], instruction: str | None = None,
                   timeout: float | None = None) -> TextsJob:
        """Start the scores of documents, from 0 to 1; return at once. The job's result is float32 [documents, 1], in
        the order of the documents. Raises RequestError or EngineStopped."""
        self._check_kind("reranking")
        ids = gathered((self.encode_pair(query, document, instruction) for document in documents), "documents")
        return self.submit(TextsRequest(ids, timeout=timeout, field="documents"))

    def embed(self, texts: "list[str | list[int]]", dimensions: int | None = None) -> np.ndarray:
        """Embeddings of texts, float32 [texts, dimensions], each of length 1. `dimensions`: how many numbers, from the
        first on, by default all. Raises RequestError or EngineStopped."""
        return rows_of(self.ask_embeddings([texts] if isinstance(texts, str) else texts, dimensions))

    def rerank(self, query: str, documents: list[str], instruction: str | None = None) -> np.ndarray:
        """How relevant each document is for a query, float32 [documents], from 0 to 1. instruction: what makes a
        document relevant, in words; by default what the file says. Raises RequestError or EngineStopped."""
        return rows_of(self.ask_scores(query, documents, instruction))[:, 0]

    def generate(self, *_, **__):
        """Pooling models generate no text: raises RequestError."""
        self._check_kind("text")

    def _check_kind(self, wanted: str):
        if self.kind != wanted:
            raise wrong_kind(self, wanted)
