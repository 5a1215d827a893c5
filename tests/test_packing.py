"""Engines of pooling models: the oracle's embeddings and scores, texts packed into passes, and jobs."""

import threading

import numpy as np
import pytest

import qengine
from cli.main import main
from engine.packing import CLASSIFIER, TEXTS
from engine.plan import StageCosts
from engine.pooling import TextsRequest, relevance, unit
from engine.request import DeadlineExceeded, EngineStopped, ModelError, RequestError
from kernels.card import CardError
from kernels.open import open_cards
from tests.models import as_stored, rewrite
from tests.oracle import (COSINE, EMBEDDING, NEAR_SCORE, RERANKER, oracle_json, oracle_npz, oracle_path, server_cosine,
                          server_said)

TINY = "synthetic:qwen3-tiny-embedding"
LENGTHS = [1, 23, 64, 65, 200, 7, 128, 130, 63, 300]      # tokens of the texts


def texts_of(lengths):
    random = np.random.default_rng(5)
    return [random.integers(0, 1024, n).tolist() for n in lengths]


def load(model, card, **options):
    return qengine.load(model, card=card, progress=False, **{"ctx": 512} | options)


@pytest.fixture(scope="module")
def engine(card):
    engine = load(TINY, card, chunk=192)
    yield engine
    engine.close()


def split(ids, lengths):
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


# ---- the oracle --------------------------------------------------------------------------------------------------


def test_embeddings_of_the_reference(embedder):
    """The tokenizer adds the end token."""
    reference, texts = oracle_npz(EMBEDDING), oracle_json("manifest.json")["models"][EMBEDDING]["embedding_texts"]
    ids = split(reference["embd_ids"], reference["embd_ids_len"])
    assert [embedder.encode(text) for text in texts] == ids
    rows = embedder.embed(texts)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    assert ((rows * reference["embd_hf"]).sum(axis=1) >= COSINE).all()
    np.testing.assert_array_equal(embedder.embed(ids), rows)
    assert (embedder.embed([each[:-1] for each in ids]) != rows).any(axis=1).all()     # token ids are taken as they are


def test_embeddings_of_a_server(embedder):
    for _, request, response in server_said("embed", "/v1/embeddings"):
        texts = request["input"]
        rows, wanted = embedder.embed(texts), response["data"]
        for row, want in zip(rows, wanted, strict=True):
            want = np.array(want["embedding"])
            assert row @ want / np.linalg.norm(want) >= server_cosine()
        job = embedder.ask_embeddings([texts] if isinstance(texts, str) else texts)
        assert job.n_prompt == response["usage"]["prompt_tokens"]
        job.wait()


def test_fewer_dimensions(embedder):
    rows, few = embedder.embed(["one text", "another"]), embedder.embed(["one text", "another"], 32)
    assert few.shape == (2, 32)
    for row, cut in zip(rows, few):
        np.testing.assert_allclose(cut, row[:32] / np.linalg.norm(row[:32]), atol=1e-6)


def test_scores_of_the_reference(reranker):
    reference, pairs = oracle_npz(RERANKER), oracle_json("manifest.json")["models"][RERANKER]["rerank_pairs"]
    ids = split(reference["rerank_ids"], reference["rerank_ids_len"])
    assert [reranker.encode_pair(*pair) for pair in pairs] == ids
    scores = [reranker.rerank(query, [document])[0] for query, document in pairs]
    np.testing.assert_allclose(scores, reference["rerank_hf_score"], atol=0.01)


def test_scores_of_a_server(reranker):
    for _, request, response in server_said("rerank"):
        scores = reranker.rerank(request["query"], request["documents"])
        for result in response["results"]:
            assert abs(scores[result["index"]] - result["relevance_score"]) <= NEAR_SCORE
    other = reranker.rerank(request["query"], request["documents"], "Retrieve what contradicts the query")
    assert (other != scores).any()


@pytest.mark.parametrize("pooling, number", [("mean", 1), ("cls", 2), ("last", 3)])
def test_every_way_of_pooling(card, tmp_path, pooling, number):
    """Against the rows of the same model, which a reference gives: those that the oracle has of a whole text."""
    source, path, reference = oracle_path(f"gguf/{EMBEDDING}.gguf"), tmp_path / "pooled.gguf", oracle_npz(EMBEDDING)
    rewrite(source, path, as_stored(source), {"qwen3.pooling_type": number})
    engine, ids, rows = load(path, card), reference["short_ids"].tolist(), reference["short_hf_hidden"][-1]
    want = unit({"mean": rows.mean(axis=0), "cls": rows[0], "last": rows[-1]}[pooling])
    assert engine.config.pooling == pooling and engine.embed([ids])[0] @ want >= COSINE
    long = (ids * 4)[:150]
    alone, packed = engine.embed([long]), engine.embed([ids, long, ids])
    np.testing.assert_array_equal(packed[1:2], alone)
    np.testing.assert_array_equal(packed[0], packed[2])
    engine.close()


# ---- packing -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows_alone(engine):
    return np.concatenate([engine.embed([text]) for text in texts_of(LENGTHS)])


def test_packed_texts_have_the_bits_that_they_have_alone(engine, rows_alone):
    before = engine.stats()
    np.testing.assert_array_equal(engine.embed(texts_of(LENGTHS)), rows_alone)
    after = engine.stats()
    assert after["passes"] - before["passes"] == -(-sum(LENGTHS) // 192)       # and so every pass but the last is full
    assert after["prompt_tokens"] - before["prompt_tokens"] == sum(LENGTHS)
    assert (after["kv_pages_used"], after["requests_running"], after["requests_waiting"]) == (0, 0, 0)


@pytest.mark.parametrize("options", [{"chunk": 64}, {"chunk": 512, "kv_tokens": 512}, {"split": (1, 3)},
                                     {"split": (2, 1, 1), "chunk": 128}], ids=str)
def test_bits_depend_neither_on_passes_nor_on_cards(card, rows_alone, options):
    other = load(TINY, f"emulated:{len(options['split'])}" if "split" in options else card, **options)
    np.testing.assert_array_equal(other.embed(texts_of(LENGTHS)), rows_alone)
    np.testing.assert_array_equal(other.embed(texts_of(LENGTHS)[::-1]), rows_alone[::-1])
    other.close()


def test_bits_do_not_depend_on_micro_batches(card, rows_alone, monkeypatch):
    """They are cut at rows of the pass, which are no positions of pages in its texts."""
    cuts = []

    def micro_batches(costs, n):
        sizes = [64] * min(n // 128, 3)
        cuts.append(len(sizes))
        return [*sizes, n - sum(sizes)]

    monkeypatch.setattr(StageCosts, "micro_batches", micro_batches)
    engine = load(TINY, card, chunk=512)
    np.testing.assert_array_equal(engine.embed(texts_of(LENGTHS)), rows_alone)
    assert max(cuts) == 3
    engine.close()


def test_more_texts_than_slots(engine):
    texts = texts_of([3] * (TEXTS + 5))
    rows = engine.embed(texts)
    for i in (0, TEXTS - 1, TEXTS, TEXTS + 4):
        np.testing.assert_array_equal(engine.embed([texts[i]])[0], rows[i])


def test_requests_of_several_threads(engine, rows_alone):
    found = {}

    def ask(i):
        found[i] = engine.embed(texts_of(LENGTHS)[i:] + texts_of(LENGTHS)[:i])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, rows in found.items():
        np.testing.assert_array_equal(rows, np.roll(rows_alone, -i, axis=0))
    assert len(found) == 4 and engine.stats()["kv_pages_used"] == 0


def test_a_short_request_does_not_wait_for_a_long_one(engine):
    """The last texts of the long one come after the short one's, which came later."""
    order, texts = [], texts_of([150] * 20)
    with engine.scheduler.between_steps():              # both are there before a round begins
        long, short = engine.ask_embeddings(texts), engine.ask_embeddings(texts_of([5]))
        for name, job in ("long", long), ("short", short):
            landed = job.land
            job.land = lambda *row, name=name, landed=landed: (order.append(name), landed(*row))
    long.result(), short.result()
    assert order.index("short") == 1 and len(order) == 21


def test_cancelled_and_late_jobs_free_what_they_hold(engine):
    texts = texts_of([300] * 10)
    with engine.scheduler.between_steps():
        cancelled, late = engine.ask_embeddings(texts), engine.ask_embeddings(texts, timeout=0)
        kept = engine.ask_embeddings(texts[:2])
        engine.scheduler.run_round()                    # a pass of each is on its way
        cancelled.cancel()
    assert cancelled.result() is None and cancelled.finish_reason is None
    with pytest.raises(DeadlineExceeded):
        late.result()
    np.testing.assert_array_equal(kept.result(), engine.embed(texts[:2]))
    stats = engine.stats()
    assert (stats["kv_pages_used"], stats["requests_running"], len(engine.scheduler.free_slots)) == (0, 0, TEXTS)


def test_requests_that_cannot_be_served(engine):
    for texts, words in (([[1] * 513], "513 tokens"), ([], "1 to 2048 texts"), ([[1024]], "token id 1024"),
                         (["a" * 10**6], "letters"), ([[]], "is empty")):
        with pytest.raises(RequestError, match=words) as caught:
            engine.embed(texts)
        assert caught.value.field == "input"
    with pytest.raises(RequestError, match="from 1 to 256"):
        engine.embed(["a"], 257)
    with pytest.raises(RequestError, match="can make embeddings, but not rerank documents"):
        engine.rerank("a", ["b"])
    assert engine.embed([[1] * 512]).shape == (1, 256)      # no answer needs room


def test_a_closed_engine(card):
    engine = load(TINY, card)
    job = engine.ask_embeddings(texts_of([100] * 3))
    engine.close(grace=60)
    assert job.result().shape == (3, 256)
    with pytest.raises(EngineStopped, match="closed"):
        engine.embed([[1]])


def test_a_card_that_fails_ends_every_job(card, monkeypatch):
    engine, job = load(TINY, card), None
    with engine.scheduler.between_steps():
        monkeypatch.setattr(engine.pipeline.last, "launch_sums", lambda n: (_ for _ in ()).throw(CardError("it burns")))
        job = engine.ask_embeddings(texts_of([10]))
    with pytest.raises(EngineStopped, match="it burns"):
        job.result()
    with pytest.raises(EngineStopped, match="it burns"):
        engine.submit(TextsRequest([[1]]))
    assert "it burns" in engine.reason and engine.fault.what
    engine.close()


def test_rows_that_are_no_numbers_end_the_engine(card, monkeypatch):
    engine = load(TINY, card)
    with engine.scheduler.between_steps():
        stage = engine.pipeline.last
        monkeypatch.setattr(stage, "launch_sums", lambda n: stage.card.poison(stage.sums))
        job = engine.ask_embeddings(texts_of([10]))
    with pytest.raises(EngineStopped, match="NaN"):
        job.result()
    engine.close()


# ---- random weights, plans, files ---------------------------------------------------------------------------------


def test_a_reranker_of_random_weights(card):
    engine = load("synthetic:qwen3-tiny-reranker", card)
    scores = engine.rerank("a query", ["one", "two", "one"])
    assert scores.shape == (3,) and scores[0] == scores[2] != scores[1] and (0 < scores).all() and (scores < 1).all()
    engine.close()


@pytest.mark.parametrize("model", ["synthetic:qwen3-0.6b-embedding", "synthetic:qwen3-0.6b-reranker"])
def test_plans(capfd, model):
    """A plan has a context of pages, whatever the slots, and no head."""
    assert main(["-m", model, "--card", "emulated:h100", "--ctx", "8192", "--plan"]) == 0
    assert "context: 8,192 tokens, pages for 8,192; the longest that fits has 40,960" in capfd.readouterr().out


def test_what_a_plan_says_is_what_is_taken():
    (card,) = open_cards("emulated")            # a real one may have other users
    opened = qengine.open_model(TINY)
    planner = qengine.make_planner(opened, card, opened.demand(512))
    free = card.free_bytes
    engine = qengine.load(opened, card=card, ctx=512, progress=False)
    assert free - card.free_bytes == planner.plan.stages[0].total
    engine.close()


def test_files_that_are_refused(tmp_path):
    source, path = oracle_path(f"gguf/{RERANKER}.gguf"), tmp_path / "wrong.gguf"
    keep = as_stored(source)
    for keys, words in (({"tokenizer.chat_template.rerank": "{query}"}, "has no {document}"),
                        ({"tokenizer.chat_template.rerank": None}, "template.rerank' is missing"),
                        ({"qwen3.classifier.output_labels": ["no", "yes"]}, r"output_labels' is \['no', 'yes'\], not"),
                        ({"qwen3.pooling_type": 3}, "'cls.output.weight' is not part of the qwen3 architecture")):
        rewrite(source, path, keep, keys)
        with pytest.raises(ModelError, match=words) as caught:
            qengine.open_model(path)
        assert str(caught.value).startswith(str(path)) and str(caught.value).count(str(path)) == 1
    rewrite(source, path, lambda tensor, values: None if tensor.name == CLASSIFIER else keep(tensor, values))
    with pytest.raises(ModelError, match="'cls.output.weight' is missing"):
        qengine.open_model(path)
    assert relevance(np.ones(256), qengine.GGUF(source).floats(CLASSIFIER)).shape == (1,)
