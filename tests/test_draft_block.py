"""The draft block against the reference: hidden rows, logits, chains; and its passes against each other."""

import numpy as np
import pytest

import qengine
from engine.draft_block import DraftBlock
from engine.micro_batches import Alone
from engine.plan import CacheSizes
from kernels.advance import COUNT, END, N_ANSWER, N_OUTCOME, NEXT_DRAFTS, POSITION, SLOT, TOKENS
from kernels.norm import rms_norm_reference
from kernels.records import LISTED
from tests.models import write_as_float32
from tests.oracle import DATA, oracle_json, oracle_npz, oracle_path

# Of the mixture of experts with float weights alone: with 8-bit activations a router in doubt chooses other experts,
# and the reference says how much in doubt the routers of the layers are, but not that of the block.
ORACLES = [("dense_mtp-Q8_0", "float"), ("dense_mtp-Q8_0", "Q8_0"), ("moe_mtp-Q8_0", "float")]
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
        self.model.allocate(ROWS, 8 * SLOTS, MAX_PAGES)
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
        run = qengine.PromptPass(qengine.rows_of(self.inputs, n), (), (), False, Alone, None)
        if start == 0:
            self.cache.reset(slot)
            self.block.forget(slot)
        self.model.forward(run, self.cache)
        self.block.prefill(self.model, run, self.cache)

    def draft(self, answers, n_drafts, width=1, x=None):
        """answers: (slot, position of row 0, tokens chosen, most tokens) each. x: the rows that the model has computed,
        float32 on the card; by default the last one of the prompt of the first answer's slot. Returns the drafts,
        int32 [n, 7]."""
        n, x = len(answers), self.block.hidden[answers[0][0]:] if x is None else x
        records, outcomes = np.zeros((n, N_ANSWER), np.int32), np.full((n, N_OUTCOME), 9, np.int32)
        for answer, outcome, (slot, position, tokens, end) in zip(records, outcomes, answers):
            answer[[SLOT, POSITION, END]], outcome[COUNT] = (slot, position, end), len(tokens)
            outcome[TOKENS:TOKENS + len(tokens)] = tokens
        there = self.card.upload(outcomes)
        self.block.draft(self.model, x, there, self.card.upload(records), (n, width, n_drafts), self.cache)
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


@pytest.fixture(scope="module", params=ORACLES, ids="-".join)
def oracle(request):
    """(name of the reference, kind of weights)."""
    return request.param


@pytest.fixture(scope="module")
def reference(oracle):
    return oracle_npz(oracle[0])


@pytest.fixture(scope="module")
def oracle_bench(card, oracle, tmp_path_factory):
    name, kind = oracle
    path = oracle_path(f"gguf/{name}.gguf")
    if kind == "float":
        path, shipped = tmp_path_factory.mktemp("model") / "float.gguf", path
        write_as_float32(shipped, path)
    return kind, Bench(card, str(path))


@pytest.fixture(scope="module")
def tiny(card):
    return Bench(card, str(DATA / "tiny-Q8_0.gguf"))


def distance(got, want):
    """Relative L2."""
    return np.linalg.norm(got - want) / np.linalg.norm(want)


# ---- the reference -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("prompt", ["short", "long"])
def test_hidden_rows_and_logits_of_the_reference(oracle, oracle_bench, reference, prompt):
    """Teacher-forced: at each slot the text's own token. Keys and values of earlier slots come from the prompt's pass;
    slot 0 has h = 0."""
    (kind, bench), ids = oracle_bench, reference[f"{prompt}_ids"].tolist()
    bench.prompt(ids, 1)
    x, hidden, logits = bench.model.scratch.x, [], {}
    zeros = bench.card.zeros((1, bench.config.hidden_dim), np.float32)
    rows = reference["long_mtp_rows"] if prompt == "long" else range(len(ids))
    for t in rows:
        bench.draft([(1, t - 1, [ids[t]], ROWS)], 1, x=x[t - 1:] if t else zeros)
        hidden.append(bench.normed()[0])
        logits[t] = bench.card.download(bench.block.logits)[0]
    # With 8-bit activations: what they cost llama.cpp on the logits of all rows. Ours are only those of some rows, and
    # hidden rows.
    llama = oracle_json("manifest.json")["models"][oracle[0]]["agreement"][prompt]
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
    got = bench.draft([(1, len(ids) - 1, [first], ROWS)], 4)
    assert got.tolist() == [[*want, -1, -1, -1]]


# ---- passes against each other -----------------------------------------------------------------------------

def text(n, seed=0):
    return np.random.default_rng(seed).integers(0, 3000, n).tolist()


def chosen(bench, ids, start, counts, n_drafts, end=ROWS):
    """Decode steps of slot 1 that have chosen so many tokens of `ids` each, from position `start` on. Slot 0 has had
    all of them as a prompt, and the model's residual stream of that is still there. Returns the last drafts, the hidden
    row they came from, and the block's keys and values."""
    x = bench.model.scratch.x
    for count in counts:
        drafts = bench.draft([(1, start - 1, ids[start:start + count], end)], n_drafts, max(counts), x[start - 1:])
        start += count
    return drafts, bench.normed(), bench.kv(1, start)


@pytest.mark.parametrize("start", [20, 59])         # without and with the end of a page among the tokens
def test_tokens_chosen_together_and_one_by_one_have_the_same_bits(tiny, start):
    ids, found = text(90), []
    for counts in (8,), (1,) * 8, (3, 5), (2, 4, 1, 1):
        tiny.prompt(ids[:start], 1)
        tiny.prompt(ids, 0)
        found.append(chosen(tiny, ids, start, counts, 1))
    for each in found[1:]:
        for a, b in zip(found[0], each, strict=True):
            np.testing.assert_array_equal(a, b)
    assert np.isfinite(found[0][2]).all() and found[0][0][0, 0] >= 0 and (found[0][0][0, 1:] == -1).all()


def test_keys_and_values_of_prompts_and_of_steps_are_alike(tiny):
    """They are computed by different families of kernels from the same rows."""
    ids = text(150)
    tiny.prompt(ids[:60], 1)
    tiny.prompt(ids, 0)
    *_, stepped = chosen(tiny, ids, 60, (8,) * 11, 2)
    prompted = tiny.kv(0, 148)
    np.testing.assert_array_equal(stepped[:, :60], prompted[:, :60])
    assert 0 < distance(stepped[:, 60:], prompted[:, 60:]) < 1e-3


def test_pieces_and_passes_of_a_prompt_make_no_difference(tiny, monkeypatch):
    """Keys and values have the same bits however a prompt is cut: the row before a pass is kept for it."""
    ids, found = text(150), []
    for cuts, piece in ([150], 512), ([150], 33), ([64, 64, 22], 512), ([64, 86], 50):
        monkeypatch.setattr("engine.draft_block.PIECE", piece)
        for start, n in zip(np.cumsum([0, *cuts]), cuts):
            tiny.prompt(ids[start:start + n], 1, int(start))
        found.append(tiny.kv(1, 150))
    assert np.isfinite(found[0]).all()
    for each in found[1:]:
        np.testing.assert_array_equal(each, found[0])


def test_an_answer_has_the_same_drafts_alone_and_beside_another(tiny):
    ids = text(100), text(100, 1)
    x = tiny.card.alloc((8 * 2, tiny.config.hidden_dim), np.float32)
    hosts, alone = [], []
    for slot in (0, 1):
        tiny.prompt(ids[slot][:70], slot)
        hosts.append(tiny.card.download(tiny.model.scratch.x)[69:77])
    answers = (0, 69, [5, 6, 7], ROWS), (1, 69, [8], ROWS)
    for slot, answer in enumerate(answers):
        tiny.card.copy_in(x[:8], hosts[slot])
        alone.append(tiny.draft([answer], 4, 3, x))
    tiny.card.copy_in(x, np.stack(hosts, 1).reshape(16, -1))
    np.testing.assert_array_equal(tiny.draft(answers, 4, 3, x), np.concatenate(alone))
    assert alone[0].tolist() != alone[1].tolist()


@pytest.mark.parametrize("position, end, n", [(58, 640, 4), (62, 640, 0), (63, 640, 7), (30, 36, 3), (30, 33, 0),
                                              (55, 62, 4)])
def test_where_drafts_end(tiny, position, end, n):
    """A check has no row at the next multiple of 64 above the newest token, nor one that could only choose a token
    beyond the end."""
    tiny.prompt(text(position + 1), 1)
    drafts = tiny.draft([(1, position, [5], end)], 7)[0]
    assert (drafts >= 0).tolist() == [j < n for j in range(7)]
    newest = position + 1
    limit = min(newest // 64 * 64 + 64, end - 1)
    assert n == min(max(limit - newest - 1, 0), 7)


def test_no_draft_of_logits_that_are_no_numbers(tiny):
    tiny.prompt(text(10), 1)
    x = tiny.card.alloc((1, tiny.config.hidden_dim), np.float32)
    tiny.card.poison(x)
    assert (tiny.draft([(1, 9, [5], ROWS)], 3, x=x) == -1).all()


def test_a_recording_gives_what_the_launches_give(tiny):
    tiny.prompt(text(40), 1)
    want = tiny.draft([(1, 39, [5], ROWS)], 4)
    records, outcomes = np.zeros((1, N_ANSWER), np.int32), np.zeros((1, N_OUTCOME), np.int32)
    records[0, [SLOT, POSITION, END]], outcomes[0, [COUNT, TOKENS]] = (1, 39, ROWS), (1, 5)
    there, answers = tiny.card.upload(outcomes), tiny.card.upload(records)
    with tiny.card.record() as recording:
        tiny.block.draft(tiny.model, tiny.block.hidden[1:], there, answers, (1, 1, 4), tiny.cache)
    for _ in range(2):
        recording.replay()
        np.testing.assert_array_equal(tiny.card.download(there)[:, NEXT_DRAFTS:], want)


def part_of(tiny):
    """The block of the same weights, with a head for drafts of 500 low ids, 512 last ones, and lists."""
    with qengine.open_model(str(DATA / "tiny-Q8_0.gguf")).weights.loading(tiny.card) as loader:
        part = DraftBlock(qengine.Tensors(loader, tiny.config.n_layers), tiny.block.layer, tiny.model.head,
                          tiny.block.pass_of, low_rows=500)
    part.allocate(tiny.card, tiny.config.hidden_dim, ROWS, 8 * SLOTS)
    return part


def test_a_part_of_the_head(tiny, monkeypatch):
    """Its logits are those of the whole head, and the draft is the likeliest of its tokens. A slot's list has tokens of
    the prompt, and gets those that are chosen."""
    part = part_of(tiny)
    tiny.prompt(text(40), 1)
    part.forget(1, [5, 600, 700, 600, 4090])
    drafts, listed, n_vocab = [], [600, 700], tiny.config.n_vocab
    for token in range(480, 540, 5):
        tiny.draft([(1, 39, [token], ROWS)], 1)
        whole = tiny.card.download(tiny.block.logits)[0]
        tiny.card.copy(part.hidden, tiny.block.hidden)
        monkeypatch.setattr(tiny, "block", part)
        drafts.append(int(tiny.draft([(1, 39, [token], ROWS)], 1)[0, 0]))
        monkeypatch.undo()
        listed += [token] * (token >= 500)
        known, logits = np.r_[0:500, n_vocab - 512:n_vocab, listed], tiny.card.download(part.logits)[0]
        np.testing.assert_array_equal(logits[:1012], whole[known[:1012]])
        np.testing.assert_allclose(logits[1012:known.size], whole[listed], rtol=0, atol=1e-5 * np.abs(whole).max())
        assert np.isneginf(logits[known.size:]).all() and drafts[-1] == known[logits[:known.size].argmax()]
    assert part.known.columns == 1012 + LISTED and tiny.block.known.columns == n_vocab


def test_a_listed_token_is_drafted(tiny, monkeypatch):
    """The likeliest token of all is found if the slot's prompt had it."""
    part = part_of(tiny)
    tiny.prompt(text(40), 1)
    best = []
    for token in range(6):
        best.append(int(tiny.draft([(1, 39, [token], ROWS)], 1)[0, 0]))
        part.forget(1, best[-1:])
        tiny.card.copy(part.hidden, tiny.block.hidden)
        monkeypatch.setattr(tiny, "block", part)
        assert tiny.draft([(1, 39, [token], ROWS)], 1)[0, 0] == best[-1]
        monkeypatch.undo()
    assert any(500 <= token < tiny.config.n_vocab - 512 for token in best)


def test_where_the_block_lives(card):
    """On the card with the last layers, beside an embedding table. Without drafts, or without a block in the file,
    nothing is there."""
    opened = qengine.open_model(str(DATA / "tiny-Q8_0.gguf"))
    n = opened.config.n_layers
    with opened.weights.loading(card) as loader:
        first, last = (qengine.Model(loader, opened.config, layers) for layers in (range(0, 2), range(2, n)))
        without = qengine.Model(loader, opened.config, range(n), drafts=False)
    assert first.block is None and first.numbers == range(0, 2)
    assert last.block and last.embeddings is not None and last.numbers == range(2, n + 1)
    assert without.block is None and without.numbers == range(n)
    assert last.work().page_bytes == 2 * without.work().page_bytes == 2 * sum(
        layer.work.page_bytes for layer in last.layers)


def test_drafts_of_the_small_model_are_often_right(card):
    """Its block is trained. On its own greedy answer, by chance a draft would be right once in thousands."""
    engine = qengine.load(card=card, ctx=512, progress=False)
    prompt = engine.encode("Once upon a time, there was a little")
    answer = [delta.token_id for delta in engine.submit(qengine.Request(prompt, max_tokens=60, ignore_eos=True))]
    engine.close()
    bench, ids = Bench(card, str(qengine.DEFAULT_MODEL)), prompt + answer
    bench.prompt(ids, 1)
    right = np.zeros(3, int)
    for at in range(len(prompt), len(ids) - 3):
        drafts = bench.draft([(1, at - 1, [ids[at]], ROWS)], 3, x=bench.model.scratch.x[at - 1:])[0]
        right += np.cumprod(drafts[:3] == ids[at + 1:at + 4])
    print("of", len(answer) - 3, "chains, as many drafts were right:", right)
    assert right[0] > 0.4 * len(answer)
