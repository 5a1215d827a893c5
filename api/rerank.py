"""Reranking, as Cohere, Jina and vLLM have it: how relevant each of some documents is for a query.

    {"query": "...", "documents": ["...", {"text": "..."}], "top_n": 1}
    →  {"results": [{"index": 1, "relevance_score": 0.98}], "usage": {...}, ...}

The most relevant document comes first; among equals the earlier one. A score is what the model says, from 0 to 1.
Documents are cut only where the request asks for that, and the answer says how many were, in Cohere's `meta.warnings`.
"""

import uuid

from engine.pooling import MOST_TEXTS, PoolingEngine, TextsJob, TextsRequest, gathered
from engine.request import RequestError
from engine.tokenizer import Tokenizer

from . import field_table
from .embeddings import Answer, usage_of
from .endpoint import Endpoint
from .errors import MAX_BODY
from .field_table import fields_of
from .fields import BOOL, SECONDS, TEXT, either, list_of, object_of
from .openai import PROTOCOL

DOCUMENT = object_of({"text": TEXT}, ["text"], others=True)
RERANK = object_of(fields_of(field_table.RERANK, {
    "model": TEXT, "query": TEXT, "documents": list_of(either(TEXT, DOCUMENT), 1, MOST_TEXTS),
    "top_n": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, "return_documents": BOOL, "instruction": TEXT,
    "max_tokens_per_doc": {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}, "truncation": BOOL,
    "timeout": SECONDS}), ["query", "documents"])
MAX_LETTERS = MAX_BODY      # of all pairs: each holds the query, so a small body may ask for gigabytes


def rerank(service, body: dict):
    engine = service.engine
    query, instruction, documents = body["query"], body.get("instruction"), body["documents"]
    texts = [document if isinstance(document, str) else document["text"] for document in documents]
    check_letters(query + (instruction or ""), texts)

    def prepare():
        scissors = Scissors(engine, query, instruction, body.get("max_tokens_per_doc"), body.get("truncation", False))
        ids = gathered(map(scissors.encode, texts), "documents")
        request = TextsRequest(ids, timeout=body.get("timeout"), field="documents")
        return [request], Answer(lambda job, rows: answer(engine.name, body, job, rows[:, 0], scissors.warnings()))

    return service.respond(1, prepare, False)


class Scissors:
    """Makes token ids of a query and a document, which is cut if the request allows that. most: tokens of a document,
    None: any number. is_fitted: whether a document is cut until it and the query fit the model's context."""

    def __init__(self, engine: PoolingEngine, query: str, instruction: str | None, most: int | None, is_fitted: bool):
        self.engine, self.query, self.instruction = engine, query, instruction
        self.most, self.is_fitted = most, is_fitted
        if is_fitted:
            room = engine.n_ctx - len(engine.encode_pair(query, "", instruction))
            self.most = max(0, room if most is None else min(most, room))
        self.left_out = []              # of each document that was cut: tokens that nobody reads

    def encode(self, text: str) -> list[int]:
        """What the reranker reads. Raises RequestError."""
        most = self.most
        while True:
            kept, n_out = (text, 0) if most is None else beginning(self.engine.tokenizer, text, most)
            ids = self.engine.encode_pair(self.query, kept, self.instruction)
            if not (self.is_fitted and most and len(ids) > self.engine.n_ctx):
                break
            most -= 1                   # where the text was cut, its letters may make more tokens than before
        if n_out:
            self.left_out.append(n_out)
        return ids

    def warnings(self) -> dict:
        """What `meta` says of the documents that were cut; nothing where none was."""
        if not self.left_out:
            return {}
        return {"warnings": [f"documents that were cut: {len(self.left_out)}, by {sum(self.left_out)} tokens together"]}


def beginning(tokenizer: Tokenizer, text: str, most: int) -> tuple[str, int]:
    """The first tokens of a text, as text, and how many others it has. A character that the cut splits is left out."""
    ids = tokenizer.encode(text, allow_special=False)
    if len(ids) <= most:
        return text, 0
    return tokenizer.bytes_of(ids[:most]).decode("utf-8", "ignore"), len(ids) - most


def check_letters(before: str, texts: list[str]):
    """Raises RequestError if the pairs are too long together. before: what stands before each document."""
    n = len(before) * len(texts) + sum(map(len, texts))
    if n > MAX_LETTERS:
        raise RequestError("documents", f"'query' and 'documents' make texts of {n} letters together, more than "
                                        f"{MAX_LETTERS}: the query stands before each document")


def answer(model: str, body: dict, job: TextsJob, scores, warnings: dict) -> dict:
    """What is said of the documents. scores: float32, of each document. warnings: a part of `meta`."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[:body.get("top_n") or None]
    return {"id": f"rerank-{uuid.uuid4().hex}", "object": "list", "model": model, "usage": usage_of(job),
            "meta": {"tokens": {"input_tokens": job.n_prompt}, **warnings},         # Cohere's names
            "results": [result(i, scores[i], body) for i in order]}


def result(index: int, score, body: dict) -> dict:
    said = {"index": index, "relevance_score": float(str(score))}       # as many digits as the float32 has
    if body.get("return_documents"):
        document = body["documents"][index]
        said["document"] = {"text": document} if isinstance(document, str) else document
    return said


ENDPOINTS = [Endpoint("POST", path, f"How relevant documents are for a query{whose}", rerank, PROTOCOL, RERANK,
                      generates=True, kind="reranking")
             for path, whose in (("/v1/rerank", ""), ("/v2/rerank", " (Cohere)"), ("/rerank", " (vLLM)"))]
