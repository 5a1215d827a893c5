"""Whole models whose long prompts leave out keys: nothing but the setting moves bits, and what was made with one
setting never serves the other."""

import hashlib
import json
import logging
import sys

import numpy as np
import pytest

import qengine
from cli.engines import asked
from cli.options import build_parser
from engine.request import RequestError
from kernels import block_sparse
from kernels.kv_formats import KV_FORMATS
from kernels.open import open_cards
from kernels.rope import QWEN3, QWEN35
from tests.clients import app_of
from tests.kinds import KV_BY_KIND
from tests.models import TINY
from tests.oracle import DATA

RECORDED = DATA / "sparse.json"
RULE = block_sparse.Rule(dense=2, sinks=1, near=2, base=2, share=4, spare=6)
PROMPT = np.random.default_rng(0).integers(0, 250, 1200).tolist()
OTHER = PROMPT[:1100] + PROMPT[:77]         # what is kept of PROMPT serves its first 1,024 tokens


@pytest.fixture(autouse=True)
def few_pages(monkeypatch):
    """The rule of these tests, whose prompts are short."""
    monkeypatch.setattr(block_sparse, "RULE", RULE)


def loaded(card, sparse="on", **options):
    return qengine.load(TINY, card=card, progress=False, sparse=sparse,
                        **{"ctx": 1400, "chunk": 512, "draft": "off"} | options)


def answer(engine, prompt=PROMPT, sparse=None, n=8, **fields):
    """(tokens, Generation)"""
    generation = engine.submit(qengine.Request(prompt, max_tokens=n, ignore_eos=True, sparse=sparse, **fields))
    return [delta.token_id for delta in generation], generation


def said(card, times=1, **options):
    """(logits of PROMPT, tokens after it, share of the keys)."""
    engine = loaded(card, **options)
    tokens, generations = zip(*(answer(engine) for _ in range(times)))
    logits = engine.evaluate(PROMPT)
    engine.close()
    assert all(each == tokens[0] for each in tokens)
    return np.asarray(logits).view(np.uint32), tokens[0], generations[0].keys_read / (generations[0].keys_seen or 1)


@pytest.mark.parametrize("kv", ["float16", *KV_BY_KIND])
def test_neither_chunks_nor_cached_prefixes_nor_drafts_nor_cards_change_bits(card, kv):
    logits, tokens, share = said(card, kv=kv)
    assert 0.2 < share < 0.6
    for cards, times, options in ((card, 2, {"chunk": 64}), (card, 1, {"draft": 3, "slots": 2}),
                                  ([card.twin(), card.twin()], 1, {"split": (1, 2), "chunk": 256})):
        again = said(cards, times, kv=kv, **options)
        np.testing.assert_array_equal(again[0], logits)
        assert again[1:] == (tokens, share)
    assert (logits != said(card, kv=kv, sparse="off")[0]).any()


def hashes(card, names):
    """KV format -> hash of the bits of the logits of PROMPT."""
    return {kv: hashlib.sha256(said(card, kv=kv)[0].tobytes()).hexdigest() for kv in names}


@pytest.mark.parametrize("kv", ["float16", *KV_BY_KIND])
def test_recorded_bits(card, kv):
    """tests/data/sparse.json holds for every card, emulated or real; `python -m tests.test_sparse` prints what a card
    computes."""
    assert hashes(card, [kv])[kv] == json.loads(RECORDED.read_text())[kv]


def test_kernels_of_sparse_prompts_are_compiled_when_the_model_is_loaded(card):
    """And none while a request waits."""
    engine = loaded(card.twin(), sparse="ask")
    known = set(engine.cards[0]._functions)
    answer(engine, PROMPT, True)
    assert {kernel.__name__ for kernel, *_ in set(engine.cards[0]._functions) - known} == set()
    engine.close()


def test_few_bits_in_a_context_that_is_too_short_to_be_sparse(card, monkeypatch):
    """It has fewer pages than the page of queries with which the kernels are tried."""
    logits, tokens, _ = said(card, kv="q8", sparse="off")
    monkeypatch.setattr(block_sparse, "RULE", RULE._replace(dense=128))
    again = said(card, kv="q8")
    np.testing.assert_array_equal(again[0], logits)
    assert again[1:] == (tokens, 1)


def test_micro_batches_change_no_bit(card, monkeypatch):
    """As on a real card: parts of a pass in streams of their own, the last one of some rows."""
    logits, tokens, _ = said(card)
    monkeypatch.setattr(qengine.StageCosts, "micro_batches",
                        lambda self, n: [rows for rows in (128, 192, n - 320) if rows > 0] if n > 320 else [n])
    again = said(card)
    np.testing.assert_array_equal(again[0], logits)
    assert again[1] == tokens


def test_short_prompts_are_those_of_dense_attention(card, monkeypatch):
    monkeypatch.setattr(block_sparse, "RULE", RULE._replace(dense=19))
    logits, tokens, share = said(card)
    assert share == 1
    dense = said(card, sparse="off")
    np.testing.assert_array_equal(dense[0], logits)
    assert dense[1] == tokens


def test_a_page_never_serves_the_other_setting(card):
    """Each prompt finds what was kept of its own kind, whatever came before, and answers as in an engine of its own."""
    dense, sparse = loaded(card, sparse="off"), loaded(card, sparse="on")
    want = {False: answer(dense, OTHER)[0], True: answer(sparse, OTHER)[0]}
    dense.close(), sparse.close()
    engine = loaded(card, sparse="ask", slots=2)
    found = []
    for is_sparse in (None, True, False, True, None):
        prompt = PROMPT if len(found) < 2 else OTHER
        tokens, generation = answer(engine, prompt, is_sparse)
        found.append(generation.n_cached)
        assert generation.is_sparse == bool(is_sparse)
        assert (generation.keys_seen > 0) == bool(is_sparse)
        if prompt is OTHER:
            assert tokens == want[bool(is_sparse)]
    assert found[:2] == [0, 0] and all(n >= 1024 for n in found[2:])
    assert engine.stats()["keys_seen"] > engine.stats()["keys_read"] > 0
    engine.close()


def test_prompts_of_both_kinds_run_side_by_side(card):
    engines = {False: loaded(card, sparse="off"), True: loaded(card, sparse="on")}
    want = {kind: answer(engine)[0] for kind, engine in engines.items()}
    for engine in engines.values():
        engine.close()
    engine = loaded(card, sparse="ask", slots=4)
    running = [engine.submit(qengine.Request(PROMPT, max_tokens=8, ignore_eos=True, sparse=i % 2 == 0))
               for i in range(6)]
    for i, generation in enumerate(running):
        assert [delta.token_id for delta in generation] == want[i % 2 == 0]
    engine.close()


def test_a_checkpoint_in_host_memory_and_an_answer_go_on_sparsely(card):
    """A second turn goes on behind an answer, whose tokens were decoded with all keys, from a checkpoint that was in
    host memory meanwhile."""
    def talk(between):
        engine = loaded(card, slots=1, checkpoint_memory=1 << 20, checkpoint_host_memory=1 << 26, kv_tokens=8192)
        tokens, _ = answer(engine, n=100)
        for i in range(between):
            answer(engine, [i + 1] + PROMPT[:500])
        turn, generation = answer(engine, PROMPT + tokens + OTHER[-40:])
        spilled = engine.stats()["checkpoints_spilled"]
        engine.close()
        return tokens, turn, generation.n_cached, spilled

    once, again = talk(0), talk(8)
    assert once[:3] == again[:3] and once[2] >= 1216 and again[3] > 0


def test_cancelled_prompts_leave_no_count_behind(card):
    engine = loaded(card, chunk=64)
    _, alone = answer(engine)
    for _ in range(2):
        generation = engine.submit(qengine.Request([7] + PROMPT, max_tokens=8))
        generation.cancel()
        generation.wait()
    engine.clear_cache()
    _, again = answer(engine)
    assert (again.keys_read, again.keys_seen) == (alone.keys_read, alone.keys_seen)
    n_pages = 19                        # one KV head, one attention layer
    assert alone.keys_seen == n_pages * (n_pages + 1) // 2
    engine.close()


def test_plans_of_passes_know_what_sparse_prompts_read(card, monkeypatch):
    """So parts of long sparse passes are as long as those of dense ones, and as far as all keys are read, the same."""
    engine = loaded(card, sparse="ask", ctx=256)
    seconds = engine.pipeline.piece_seconds
    for rows, start in (64, 0), (64, 64 * (RULE.dense - 1)):
        assert seconds(rows, start, True) == seconds(rows, start)
    dense, sparse = (np.subtract(seconds(512, 131_072, is_sparse), seconds(512, 0)) for is_sparse in (False, True))
    assert dense.max() > 0 and np.allclose(sparse, dense * (1 / RULE.share + block_sparse.CHOICE), rtol=0.01)
    asked = []
    monkeypatch.setattr(engine.pipeline, "piece_seconds",
                        lambda rows, start, is_sparse: asked.append(is_sparse) or seconds(rows, start, is_sparse))
    for is_sparse in True, False:
        answer(engine, PROMPT[:100], is_sparse)
        assert asked and set(asked) == {is_sparse}
        asked.clear()
    engine.close()


def test_who_may_ask(card):
    engine = loaded(card, sparse="off", ctx=256)
    with pytest.raises(RequestError, match="loaded without --sparse"):
        answer(engine, PROMPT[:9], True)
    assert answer(engine, PROMPT[:9], False)[1].keys_seen == 0
    for wrong in "yes", 1, 0.0:
        with pytest.raises(RequestError, match="true or false"):
            answer(engine, PROMPT[:9], wrong)
    engine.close()
    with pytest.raises(RequestError, match="sparse must be off, ask, on"):
        loaded(card, sparse="maybe")
    with pytest.raises(RequestError, match="read texts whole"):
        qengine.load("synthetic:qwen3-tiny-embedding", card=card, sparse="on", progress=False)


def post(web, body):
    """The answer to a request for text, when all is written of it."""
    with web.post("/v1/completions", json=body) as response:
        return response.json


def test_a_server_tells_what_was_read(card, caplog):
    """In the usage and in the log of a sparse request, and in the sums for Prometheus; of others it says nothing."""
    engine = loaded(card, sparse="ask")
    with caplog.at_level(logging.INFO, "qengine.requests"):
        web, body = app_of(engine).test_client(), {"model": "m", "prompt": PROMPT, "max_tokens": 4}
        told = [post(web, body | more)["usage"]["prompt_tokens_details"]
                for more in ({}, {"sparse": True}, {"sparse": False})]
        wrong = post(web, body | {"sparse": 1})
        lines = web.get("/metrics").text.splitlines()
    counts = engine.stats()
    share = counts["keys_read"] / counts["keys_seen"]
    assert [details.get("keys_read") for details in told] == [None, round(share, 4), None] and share < 0.6
    said = [record.getMessage() for record in caplog.records if "/v1/completions" in record.getMessage()]
    assert [f"keys_read={share:.3f}" in line for line in said] == [False, True, False, False]
    for name in "keys_read", "keys_seen":
        assert any(line.startswith(f"qengine:sparse_{name}_total") and float(line.split()[-1]) == counts[name]
                   for line in lines)
    assert "'sparse' must be true or false" in wrong["error"]["message"]
    engine.close()


def test_a_server_without_the_option_refuses_the_request(card):
    engine = loaded(card, sparse="off", ctx=256)
    refused = post(app_of(engine).test_client(), {"model": "m", "prompt": PROMPT[:9], "sparse": True})
    assert "--sparse" in refused["error"]["message"] and refused["error"]["param"] == "sparse"
    engine.close()


@pytest.mark.parametrize("said, wish", [([], "off"), (["--sparse"], "on"), (["--sparse", "ask"], "ask"),
                                        (["--sparse=off"], "off")])
def test_the_command_line(said, wish):
    assert asked(build_parser().parse_args(["-p", "hi", *said]))["sparse"] == wish


@pytest.mark.parametrize("heads, most", [((16, 4, QWEN35[0]), 50e6), ((32, 2, QWEN35[0]), 80e6),
                                         ((4, 4, QWEN3[0]), 20e6)])
def test_the_workspace_of_262_144_tokens(card, heads, most):
    """For passes of 8,192 rows."""
    chooser = block_sparse.Chooser.alloc(card, heads, 8192, 4096, 1)
    assert sum(array.nbytes for array in chooser[:-1]) < most


if __name__ == "__main__":
    block_sparse.RULE = RULE
    print(json.dumps(hashes(open_cards(sys.argv[1] if len(sys.argv) > 1 else None)[0], KV_FORMATS), indent=2))
