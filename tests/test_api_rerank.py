"""Reranking over HTTP, in the shapes of Cohere, Jina, vLLM and llama.cpp."""

import numpy as np
import pytest

from api import rerank as rerank_api
from engine.pooling import MOST_TEXTS
from tests.clients import app_of, assert_error, send, serving
from tests.oracle import NEAR_SCORE, server_said
from tests.scripted import ScriptedPooling

PATHS = "/v1/rerank", "/v2/rerank", "/rerank"
DOCUMENTS = ["a b c d e", "a", {"text": "a b c", "title": "T"}, "a"]
ASKED = {"model": "m", "query": "letters", "documents": DOCUMENTS}


@pytest.fixture
def engine():
    """The more tokens, the more relevant."""
    return ScriptedPooling("reranking", lambda ids: [1 - 1 / len(ids)])


@pytest.fixture
def web(engine):
    return app_of(engine).test_client()


def indices(answer):
    assert answer.status_code == 200, answer.text
    return [one["index"] for one in answer.json["results"]]


@pytest.mark.parametrize("path", PATHS)
def test_the_most_relevant_comes_first(web, engine, path):
    """Scores are the engine's; among equals the earlier document is first."""
    answer = web.post(path, json=ASKED)
    assert indices(answer) == [0, 2, 1, 3]
    texts = [document if isinstance(document, str) else document["text"] for document in DOCUMENTS]
    scores = engine.rerank("letters", texts)
    for one in answer.json["results"]:
        assert one.keys() == {"index", "relevance_score"}
        assert np.float32(one["relevance_score"]) == scores[one["index"]] and len(str(one["relevance_score"])) < 12
    n = engine.jobs[0].n_prompt
    assert answer.json["usage"] == {"prompt_tokens": n, "total_tokens": n}
    assert (answer.json["model"], answer.json["object"]) == (engine.name, "list")


@pytest.mark.parametrize("top_n, want", [(1, [0]), (3, [0, 2, 1]), (4, [0, 2, 1, 3]), (99, [0, 2, 1, 3]),
                                         (0, [0, 2, 1, 3]), (None, [0, 2, 1, 3])])
def test_top_n(web, top_n, want):
    assert indices(web.post("/v1/rerank", json=ASKED | {"top_n": top_n})) == want


def test_as_cohere_asks(web):
    """Version 1 with documents, and version 2: results with index and relevance_score, an id, tokens in meta."""
    said = web.post("/v1/rerank", json=ASKED | {"model": "rerank-v3.5", "top_n": 2, "return_documents": True,
                                                "rank_fields": ["text"]}).json
    assert [one["document"] for one in said["results"]] == [{"text": "a b c d e"}, {"text": "a b c", "title": "T"}]
    said = web.post("/v2/rerank", json=ASKED | {"priority": 0}).json
    assert said["id"] and said["meta"]["tokens"]["input_tokens"] == said["usage"]["prompt_tokens"] > 0


def test_as_jina_asks(web):
    said = web.post("/v1/rerank", json={"model": "jina-reranker-v2-base-multilingual", "query": "letters", "top_n": 1,
                                        "documents": ["a", "a b"], "return_documents": True}).json
    [result] = said["results"]
    assert (result["index"], result["document"]) == (1, {"text": "a b"}) and 0 < result["relevance_score"] < 1
    assert said["model"] and said["usage"]["total_tokens"] > 0
    said = web.post("/v1/rerank", json=ASKED | {"return_documents": False}).json
    assert not any("document" in one for one in said["results"])


def test_the_instruction(web, engine):
    web.post("/rerank", json=ASKED)
    web.post("/rerank", json=ASKED | {"instruction": "Find nothing"})
    default, own = (engine.tokenizer.decode(request.texts[1], special=True) for request in engine.requests)
    assert own == default.replace("Find it", "Find nothing") and own != default


def test_control_tokens_in_texts_are_text(web, engine):
    web.post("/rerank", json={"query": "<|im_end|>", "documents": ["<|im_end|>"], "instruction": "<|im_end|>"})
    [ids] = engine.requests[0].texts
    assert not set(ids) & set(engine.tokenizer.control.values())
    assert engine.tokenizer.decode(ids).count("<|im_end|>") == 3


@pytest.mark.parametrize("change, param", [
    ({"query": None}, "query"), ({"query": 5}, "query"), ({"query": ["a"]}, "query"),
    ({"documents": None}, "documents"), ({"documents": []}, "documents"), ({"documents": "a"}, "documents"),
    ({"documents": [5]}, "documents"),
    ({"documents": [["a"]]}, "documents"), ({"documents": [{}]}, "documents"),
    ({"documents": [{"image": "x"}]}, "documents"), ({"documents": [{"text": 5}]}, "documents"),
    ({"documents": ["a"] * (MOST_TEXTS + 1)}, "documents"), ({"documents": ["a b " * 400]}, "documents"),
    ({"query": "a " * 600}, "documents"), ({"top_n": -1}, "top_n"), ({"top_n": "1"}, "top_n"),
    ({"top_n": True}, "top_n"), ({"return_documents": "yes"}, "return_documents"), ({"instruction": 5}, "instruction"),
    ({"query": "\ud800"}, "query"), ({"rank_fields": ["title"]}, "rank_fields"), ({"texts": ["a"]}, "texts"),
    ({"max_tokens_per_doc": 0}, "max_tokens_per_doc"), ({"max_tokens_per_doc": "5"}, "max_tokens_per_doc"),
    ({"max_chunks_per_doc": 2}, "max_chunks_per_doc"), ({"truncation": "yes"}, "truncation"),
    ({"truncation": False, "documents": ["a b " * 400]}, "documents"),
    ({"max_tokens_per_doc": 510, "documents": ["a b " * 400]}, "documents"),
    ({"truncation": True, "query": "a " * 600}, "documents"), ({"return_embeddings": True}, "return_embeddings"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"), ({"topn": 5}, "topn")],
    ids=lambda value: str(value)[:40])
def test_what_is_refused(engine, change, param):
    with serving(app_of(engine)) as (port, service):
        answer = send(port, "POST", "/v1/rerank", ASKED | change)
        assert_error(answer, 400, param)
        assert len(answer[2]["error"]["message"]) < 300 and not service.open and not service.n_entering


def test_a_template_without_a_place_for_an_instruction(engine):
    engine.template = type(engine.template)("{query} {document}")
    answer = app_of(engine).test_client().post("/rerank", json=ASKED | {"instruction": "x"})
    assert answer.status_code == 400 and answer.json["error"]["param"] == "instruction"


@pytest.mark.parametrize("body", [{"query": "a" * 3000, "documents": ["b"] * MOST_TEXTS},
                                  {"query": "a", "documents": ["b"] * MOST_TEXTS, "instruction": "c" * 3000}])
def test_a_small_body_that_asks_for_gigabytes(web, engine, body, monkeypatch):
    """The query stands before each document, so it counts as often. Nothing is cut into tokens for such a request."""
    monkeypatch.setattr(engine, "encode_pair", lambda *_: pytest.fail("it was cut into tokens"))
    answer = web.post("/rerank", json=body)
    assert answer.status_code == 400 and answer.json["error"]["param"] == "documents"
    assert str(rerank_api.MAX_LETTERS) in answer.json["error"]["message"]


def test_as_many_documents_as_may_be(web):
    assert len(indices(web.post("/rerank", json={"query": "a", "documents": ["b"] * MOST_TEXTS}))) == MOST_TEXTS


# ---- documents that are cut --------------------------------------------------------------------------------------

LONG = ["a b c d e f g h", "a b", "대한민국의 수도는 서울입니다.", {"text": "😀😀😀 x", "title": "T"}, ""]


def read_of(engine):
    """The documents of the last request, as the model reads them."""
    return [engine.tokenizer.decode(ids).partition("<Document>: ")[2] for ids in engine.requests[-1].texts]


@pytest.mark.parametrize("most", [1, 2, 3, 5, 400])
def test_documents_are_cut_to_so_many_tokens(web, engine, most):
    """At their end, between characters; the answer counts them, and repeats the documents as they were sent."""
    answer = web.post("/v2/rerank", json={"query": "letters", "documents": LONG, "max_tokens_per_doc": most,
                                          "return_documents": True, "return_embeddings": False}).json
    texts = [one if isinstance(one, str) else one["text"] for one in LONG]
    ids = [engine.tokenizer.encode(text, allow_special=False) for text in texts]
    left_out = [len(each) - most for each in ids if len(each) > most]
    for text, each, read in zip(texts, ids, read_of(engine), strict=True):
        assert text.startswith(read) and read == engine.tokenizer.decode(each[:most]).rstrip("\ufffd")
    warnings = [f"documents that were cut: {len(left_out)}, by {sum(left_out)} tokens together"] if left_out else None
    assert answer["meta"].get("warnings") == warnings and bool(left_out) == (most < 400)
    assert answer["meta"]["tokens"]["input_tokens"] == sum(map(len, engine.requests[-1].texts))
    documents = {one["index"]: one["document"] for one in answer["results"]}
    assert [documents[i] for i in range(5)] == [{"text": one} if isinstance(one, str) else one for one in LONG]


@pytest.mark.parametrize("text", ["a b " * 400, "😀" * 700, "é" * 600, "a"])
@pytest.mark.parametrize("most", [None, 5, 10**6])
def test_documents_are_cut_until_they_fit(web, engine, text, most):
    """Without another token's room, unless fewer tokens were asked for."""
    limit = {} if most is None else {"max_tokens_per_doc": most}
    answer = web.post("/v1/rerank", json={"query": "q", "documents": [text, "b"], "truncation": True} | limit)
    ids, short = engine.requests[-1].texts
    n, n_whole = len(ids), len(engine.encode_pair("q", text))
    assert indices(answer) and n <= engine.n_ctx and short == engine.encode_pair("q", "b")
    assert ("warnings" in answer.json["meta"]) == (n < n_whole) == (text != "a")
    if most != 5 and n < n_whole:
        assert n > engine.n_ctx - 4             # an emoji has four tokens
    assert text.startswith(read_of(engine)[0])


# ---- the reference -------------------------------------------------------------------------------------------------


def test_as_llama_server_answers(reranker):
    """The same requests as llama-server was sent: the same shape and counts, and nearly the same scores."""
    with serving(app_of(reranker)) as (port, _):
        for path, request, want in server_said("rerank"):
            status, _, said = send(port, "POST", path, request)
            assert status == 200 and said["usage"] == want["usage"] and said["object"] == want["object"]
            assert said.keys() - want.keys() == {"id", "meta"} and len(said["results"]) == len(want["results"])
            scores = {each["index"]: each["relevance_score"] for each in want["results"]}
            for each in said["results"]:
                assert each["relevance_score"] == pytest.approx(scores[each["index"]], abs=NEAR_SCORE)
            found = [each["relevance_score"] for each in said["results"]]
            assert found == sorted(found, reverse=True)
            assert found == sorted(reranker.rerank(request["query"], request["documents"]).astype(
                str).astype(float).tolist(), reverse=True)[:len(found)]
