"""The draft block against the reference: hidden rows, logits, chains; and its passes against each other."""

import contextlib
import copy

import numpy as np
import pytest

import qengine
from engine.plan import CacheSizes
from engine.scratch import Scratch
from kernels.advance import COUNT, END, N_ANSWER, N_OUTCOME, NEXT_DRAFTS, POSITION, SLOT, TOKENS
from kernels.norm import rms_norm_reference
from tests.models import write_as_float32
from tests.oracle import DATA, oracle_json, oracle_npz, oracle_path

ORACLE = "dense_mtp-Q8_0"
ROWS, SLOTS, MAX_PAGES = 640, 2, 11
# Relative L2 of hidden rows and logits with float weights: half precision in attention and its cache.
FLOAT_LIMIT = 1e-3


class Bench:
    """A model with its cache on a card, and the memory of a pass: the layers without an engine around them."""

    def __init__(self, card, path):
        opened = qengine.open_model(path)
        self.card, self.config = card, opened.config
        with opened.weights.loading(card) as loader:
            self.model = qengine.Model(loader, self.config, range(self.config.n_layers))
        self.model.allocate(ROWS, SLOTS)
        self.block = self.model.block
        self.cache = qengine.Cache(card, self.config, self.model.numbers,
                                   CacheSizes(SLOTS, MAX_PAGES, SLOTS * MAX_PAGES + 1, 2, 0))
        self.inputs = card.alloc(7 * ROWS, np.int32)
        numbers = np.random.default_rng(0).permutation(SLOTS * MAX_PAGES)
        for slot in range(SLOTS):
            self.cache.set_pages(slot, numbers[slot * MAX_PAGES:(slot + 1) * MAX_PAGES].tolist())
        self.pages = self.cache.kept[self.config.n_layers]
        for array in self.pages.k, self.pages.v:
            card.fill(array, 0xFF)              # what the block reads without having written it becomes NaN

    def prompt(self, ids, slot, start=0):
        """A pass over a part of a prompt."""
        n = len(ids)
        qengine.set_rows(self.inputs, ids, [slot] * n, range(start, start + n))
        run = qengine.PromptPass(qengine.rows_of(self.inputs, n), (), False, contextlib.nullcontext)
        if start == 0:
            self.cache.reset(slot)
            self.block.forget(slot)
        self.model.forward(run, self.cache)
        self.block.prefill(self.model, run, self.cache)

    def draft(self, answers, n_drafts, width=1, residual=None, after_prompt=False):
        """answers: (slot, position of row 0, tokens chosen, most tokens) each. residual: the rows that the model has
        computed, as float32 on the card; by default those of its last pass. Returns the drafts, int32 [n, 7]."""
        n = len(answers)
        records, outcomes = np.zeros((n, N_ANSWER), np.int32), np.full((n, N_OUTCOME), 9, np.int32)
        for answer, outcome, (slot, position, tokens, end) in zip(records, outcomes, answers):
            answer[[SLOT, POSITION, END]], outcome[COUNT] = (slot, position, end), len(tokens)
            outcome[TOKENS:TOKENS + len(tokens)] = tokens
        model, there = copy.copy(self.model), self.card.upload(outcomes)
        if residual is not None:
            model.scratch = Scratch(model.scratch.arrays | {"x": residual})
        self.block.draft(model, there, self.card.upload(records), n, width, n_drafts, self.cache,
                         after_prompt)
        return self.card.download(there)[:, NEXT_DRAFTS:]

    def normed(self, rows=1):
        """What the head for drafts reads."""
        weight = self.card.download(self.block.head_norm)
        return rms_norm_reference(self.card.download(self.block.x)[:rows], weight, self.config.norm_eps)

    def kv(self, slot, n):
        """The block's keys and values of the first n tokens of a slot, float32 [2, n, heads, 256]."""
        table = self.card.download(self.cache.block_table)[slot]
        at = table[np.arange(n) // 64], slice(None), np.arange(n) % 64
        return np.stack([self.card.download(array)[at] for array in (self.pages.k, self.pages.v)]).astype(np.float32)


@pytest.fixture(scope="module")
def reference():
    return oracle_npz(ORACLE)


@pytest.fixture(scope="module", params=["float", "Q8_0"])
def oracle_bench(request, card, tmp_path_factory):
    path = oracle_path(f"gguf/{ORACLE}.gguf")
    if request.param == "float":
        path, shipped = tmp_path_factory.mktemp("model") / "float.gguf", path
        write_as_float32(shipped, path)
    return request.param, Bench(card, str(path))


@pytest.fixture(scope="module")
def tiny(card):
    return Bench(card, str(DATA / "tiny-Q8_0.gguf"))


def distance(got, want):
    """Relative L2."""
    return np.linalg.norm(got - want) / np.linalg.norm(want)


# ---- the reference -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("prompt", ["short", "long"])
def test_hidden_rows_and_logits_of_the_reference(oracle_bench, reference, prompt):
    """Teacher-forced: at each slot the text's own token. Keys and values of earlier slots come from the prompt's pass;
    slot 0 has h = 0."""
    (kind, bench), ids = oracle_bench, reference[f"{prompt}_ids"].tolist()
    bench.prompt(ids, 1)
    bench.block.forget(1)
    x, hidden, logits = bench.model.scratch.x, [], {}
    rows = reference["long_mtp_rows"] if prompt == "long" else range(len(ids))
    for t in rows:
        bench.draft([(1, t - 1, [ids[t]], ROWS)], 1, residual=x[max(t - 1, 0):], after_prompt=bool(t == 0))
        hidden.append(bench.normed()[0])
        logits[t] = bench.card.download(bench.block.logits)[0]
    # With 8-bit activations: what they cost llama.cpp on the logits of all rows. Ours are only those of some rows, and
    # hidden rows.
    llama = oracle_json("manifest.json")["models"][ORACLE]["agreement"][prompt]
    limit = FLOAT_LIMIT if kind == "float" else llama["mtp_llamacpp_quantised__vs__reference"]["rel_l2"] * 1.05
    assert distance(hidden, reference[f"{prompt}_mtp_ref_hidden"]) <= limit
    asked = reference[f"{prompt}_mtp_logit_rows"]
    assert distance([logits[t] for t in asked], reference[f"{prompt}_mtp_ref_logits"]) <= limit


@pytest.mark.parametrize("prompt", ["short", "long"])
def test_chain_of_the_reference(oracle_bench, reference, prompt):
    """The first token after the prompt, then drafts of drafts."""
    (_, bench), ids = oracle_bench, reference[f"{prompt}_ids"].tolist()
    bench.prompt(ids[:-30], 1)
    bench.prompt(ids[-30:], 1, len(ids) - 30)
    first, *want = reference[f"{prompt}_mtp_draft"].tolist()
    got = bench.draft([(1, len(ids) - 1, [first], ROWS)], 4, after_prompt=True)
    assert got.tolist() == [[*want, -1, -1, -1]]
