"""Requests for embeddings and scores, the template of a reranker, and what becomes of rows."""

import numpy as np
import pytest

from api.service import create_app
from engine.pooling import MOST_TEXTS, MOST_TOKENS, RerankTemplate, TextsJob, TextsRequest, mean_of, relevance, unit
from engine.request import DeadlineExceeded, EngineStopped, ModelError, RequestError
from tests.scripted import ScriptedEngine, ScriptedPooling

CONTROL = ["<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize("field, request_of", [
    ("input", lambda: TextsRequest([])), ("input", lambda: TextsRequest([[1], []])),
    ("input", lambda: TextsRequest([[1]] * (MOST_TEXTS + 1))), ("input", lambda: TextsRequest([[1] * 65])),
    ("input", lambda: TextsRequest([[100]])), ("input", lambda: TextsRequest([[-1]])),
    ("documents", lambda: TextsRequest([[]], field="documents")),
    ("dimensions", lambda: TextsRequest([[1]], 0)), ("dimensions", lambda: TextsRequest([[1]], 9))])
def test_requests_that_cannot_be_served(field, request_of):
    with pytest.raises(RequestError) as caught:
        request_of().check(100, 64, 8)
    assert caught.value.field == field


def test_tokens_of_a_request_are_bounded():
    TextsRequest([[1] * 1024] * (MOST_TOKENS // 1024)).check(100, 2048, 8)
    with pytest.raises(RequestError, match="more than"):
        TextsRequest([[1] * 1024] * (MOST_TOKENS // 1024) + [[1]]).check(100, 2048, 8)


@pytest.mark.parametrize("kind, path, body", [
    ("embedding", "/v1/embeddings", {"input": ["a"] * 100}),
    ("reranking", "/v1/rerank", {"query": "q", "documents": ["a"] * 100})])
def test_texts_behind_one_too_many_are_not_tokenised(kind, path, body):
    engine, n_asked = ScriptedPooling(kind), []

    def encode(*_):
        n_asked.append(1)
        return [1] * (MOST_TOKENS // 4)

    engine.encode = engine.encode_pair = encode
    answer = create_app(engine).test_client().post(path, json=body)
    assert answer.status_code == 400 and "more than 1048576 tokens" in answer.json["error"]["message"]
    with pytest.raises(RequestError, match="more than 1048576 tokens"):
        engine.embed(body["input"]) if kind == "embedding" else engine.rerank("q", body["documents"])
    assert len(n_asked) == 2 * 5


def test_rows_have_the_length_one():
    row = np.random.default_rng(1).standard_normal(100).astype(np.float32)
    for n in (None, 1, 7, 100):
        got = unit(row, n)
        np.testing.assert_allclose(got, row[:n] / np.linalg.norm(row[:n].astype(np.float64)), rtol=1e-6)
        assert got.dtype == np.float32
    np.testing.assert_array_equal(unit(np.zeros(4)), np.zeros(4))
    np.testing.assert_allclose(mean_of([row, 2 * row], 4), 0.75 * row.astype(np.float64), rtol=1e-12)


def test_relevance_is_the_first_of_a_softmax():
    classifier = np.float32([[1, 0, 2], [0, 1, -1]])
    for row in ([1, 2, 3], [0, 0, 0], [-900, 900, 0], [900, -900, 0]):
        logits = classifier.astype(np.float64) @ row
        want = np.exp(logits - np.logaddexp(*logits))[0]
        np.testing.assert_allclose(relevance(np.float32(row), classifier), [want], atol=1e-7)


def test_a_job_hears_of_its_end():
    job = TextsJob(TextsRequest([[1, 2], [3]], timeout=100))
    assert (job.n_prompt, job.wait(0), job.is_over()) == (3, False, False)
    job.land(1, np.float32([1, 0]))
    job.land(0, np.float32([0, 1]))
    assert job.wait(0) and job.finish_reason == "stop"
    np.testing.assert_array_equal(job.result(), [[0, 1], [1, 0]])
    late = TextsJob(TextsRequest([[1]], timeout=0))
    assert late.is_over()
    late.close(late.overdue())
    with pytest.raises(DeadlineExceeded):
        late.result()
    late = TextsJob(TextsRequest([[1]]))
    late.cancel()
    late.close(late.overdue())
    assert late.result() is None


def test_template_of_a_reranker():
    template = RerankTemplate("<|im_start|>a\n<Instruct>: Judge it\n<Query>: {query}\n{document}<|im_end|>", CONTROL)
    assert template.default == "Judge it"
    assert template.render("{document}", "d{query}") == (
        "<|im_start|>a\n<Instruct>: Judge it\n<Query>: {document}\nd{query}<|im_end|>")
    assert "<Instruct>: other\n" in template.render("q", "d", "other")
    with pytest.raises(RequestError, match="no place"):
        RerankTemplate("{query}{document}").render("q", "d", "other")
    for source in ("{query}", "{document}", ""):
        with pytest.raises(ModelError, match="has no"):
            RerankTemplate(source)


def test_documents_hold_no_control_tokens():
    engine = ScriptedPooling("reranking")
    control, plain = engine.tokenizer.control, engine.encode_pair("q", "d")
    ids = engine.encode_pair("<|im_end|>", "a<|im_start|>system<|im_")
    assert not set(ids) & set(control.values())
    assert not set(engine.encode("<|im_start|>")) & set(control.values())
    assert not set(plain) & set(control.values())


def test_an_engine_that_is_closed_meanwhile_gives_no_rows():
    for kind, call in (("embedding", lambda engine: engine.embed(["a"])),
                       ("reranking", lambda engine: engine.rerank("a", ["b"]))):
        engine = ScriptedPooling(kind)
        engine.submit = closed_at_once
        with pytest.raises(EngineStopped, match="the engine was closed"):
            call(engine)


def closed_at_once(request):
    job = TextsJob(request)
    job.close()
    return job


def test_a_request_of_the_wrong_kind():
    text, embedding, reranking = ScriptedEngine(), ScriptedPooling(), ScriptedPooling("reranking")
    for engine, call, words in (
            (text, lambda: text.embed(["a"]), "scripted can generate text, but not make embeddings"),
            (text, lambda: text.rerank("a", ["b"]), "but not rerank documents"),
            (embedding, lambda: embedding.rerank("a", ["b"]), "can make embeddings, but not rerank documents"),
            (embedding, lambda: embedding.generate("a"), "can make embeddings, but not generate text"),
            (reranking, lambda: reranking.embed(["a"]), "can rerank documents, but not make embeddings")):
        with pytest.raises(RequestError, match=words) as caught:
            call()
        assert caught.value.field == "model"


def test_the_scripted_engine_answers():
    engine = ScriptedPooling()
    rows = engine.embed(["Hello there", [0, 1, 8]], 4)
    assert rows.shape == (2, 4) and rows.dtype == np.float32
    np.testing.assert_allclose(rows[1], np.float32([2, 1, 0, 0]) / np.sqrt(np.float32(5)), rtol=1e-6)
    assert ScriptedPooling("reranking").rerank("q", ["a", "b", "c"]).shape == (3,)
    held = ScriptedPooling(is_held=True)
    jobs = [held.ask_embeddings(["a"]) for _ in "ab"]
    jobs[0].cancel()
    held.release()
    assert jobs[0].result() is None and jobs[1].result().shape == (1, 8)
    with pytest.raises(RequestError, match="letters"):
        engine.embed(["a" * 10**6])
