"""Reranking, as Cohere, Jina and vLLM have it: how relevant each of some documents is for a query.

    {"query": "...", "documents": ["...", {"text": "..."}], "top_n": 1}
    →  {"results": [{"index": 1, "relevance_score": 0.98}], "usage": {...}, ...}

The most relevant document comes first; among equals the earlier one. A score is what the model says, from 0 to 1.
"""

import uuid

from engine.pooling import MOST_TEXTS, TextsJob, TextsRequest, gathered
from engine.request import RequestError

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
    "timeout": SECONDS}), ["query", "documents"])
MAX_LETTERS = MAX_BODY      # of all pairs: each holds the query, so a small body may ask for gigabytes


def rerank(service, body: dict):
    engine = service.ready("reranking", body.get("model"))
    query, instruction, documents = body["query"], body.get("instruction"), body["documents"]
    texts = [document if isinstance(document, str) else document["text"] for document in documents]
    check_letters(query + (instruction or ""), texts)

    def prepare():
        ids = gathered((engine.encode_pair(query, text, instruction) for text in texts), "documents")
        request = TextsRequest(ids, timeout=body.get("timeout"), field="documents")
        return [request], Answer(lambda job, rows: answer(engine.name, body, job, rows[:, 0]))

    return service.respond(1, prepare, False, engine)


def check_letters(before: str, texts: list[str]):
    """Raises RequestError if the pairs are too long together. before: what stands before each document."""
    n = len(before) * len(texts) + sum(map(len, texts))
    if n > MAX_LETTERS:
        raise RequestError("documents", f"'query' and 'documents' make texts of {n} letters together, more than "
                                        f"{MAX_LETTERS}: the query stands before each document")


def answer(model: str, body: dict, job: TextsJob, scores) -> dict:
    """What is said of the documents. scores: float32, of each document."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[:body.get("top_n") or None]
    return {"id": f"rerank-{uuid.uuid4().hex}", "object": "list", "model": model, "usage": usage_of(job),
            "meta": {"tokens": {"input_tokens": job.n_prompt}},         # Cohere's name for it
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
