"""benchmarks/sparse_tokens.py: the rule in PyTorch is that of the kernels, and a prompt read whole is the network's."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="models/requirements.txt is not installed: no torch")

import qengine  # noqa: E402
from benchmarks import sparse_tokens  # noqa: E402
from kernels import block_sparse  # noqa: E402
from kernels.block_sparse import (FEW, PAGE, RULE, kept_reference, levels_reference, masses_reference,  # noqa: E402
                                  means_reference, sample_text)
from kernels.rope import QWEN3, heads_of  # noqa: E402
from models import network  # noqa: E402
from tests.models import load_tiny  # noqa: E402
from tests.training import relative  # noqa: E402

SHAPE = network.Shape(n_vocab=512, hidden=64, ffn=96, n_layers=4, n_heads=2)
IDS = np.random.default_rng(0).integers(0, 512, 700).tolist()


@pytest.fixture(scope="module")
def net():
    """A network no layer of which is the identity."""
    torch.manual_seed(0)
    made = network.Network(SHAPE)
    with torch.inference_mode():
        for name, parameter in made.named_parameters():
            if name.endswith(("ffn_down.weight", "ssm_out.weight", "attn_output.weight")):
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return made.eval()


@pytest.mark.parametrize("rule", [FEW, FEW._replace(near=1, base=0, share=9, spare=20), FEW._replace(spare=2)])
def test_the_rule_keeps_the_pages_that_kernels_keep(rule):
    heads = heads_of(2, 1, QWEN3)
    q, k = sample_text(heads, 20 * PAGE, 20 * PAGE)
    q, k = q.astype(np.float64), k.astype(np.float64)
    for page in 0, 1, 2, 3, 7, 19:
        rows = slice(page * PAGE, page * PAGE + (PAGE if page < 19 else 37))
        masses = np.zeros(0)
        if page:
            masses = masses_reference(levels_reference(means_reference(q[rows]), k[:page * PAGE])[0]).sum(axis=0)
        found = sparse_tokens.kept_pages(torch.tensor(q[rows]).transpose(0, 1), torch.tensor(k[:, 0]), page, rule)
        np.testing.assert_array_equal(found.numpy(), kept_reference(masses.astype(np.uint32), rule))


@torch.inference_mode()
def test_a_prompt_that_is_read_whole_is_the_networks(net):
    """With the tokens that do not count in front of it; and so are the tokens of its answer."""
    text, ids, answer = sparse_tokens.Text(net, IDS), list(IDS), []
    while len(answer) < 5:
        row = torch.tensor([ids + [0] * (-len(ids) % network.CHUNK)])
        position = torch.arange(row.shape[1])[None]
        hidden = net.hidden(row, position, network.dense_mask(position))[0]
        if not answer:
            assert relative(text.hidden, hidden[:len(IDS)]) < 1e-5
        ids.append(int(net.logits(hidden[len(ids) - 1]).argmax()))
        answer.append(ids[-1])
    assert text.answer(-1)[:5] == answer and text.answer(answer[0]) == answer[:1]
    n_pages = len(IDS) // PAGE + 1
    assert text.counts == [n_pages * (n_pages + 1) // 2] * 2


@torch.inference_mode()
def test_what_a_rule_changes_is_counted(net):
    """A rule that leaves nothing out changes nothing; another one does, behind the pages that it reads whole."""
    whole, few = FEW._replace(dense=99), FEW._replace(dense=4)
    found = sparse_tokens.compared(net, IDS, -1, {"whole": whole, "few": few})
    assert found["whole"]["read"] == found["whole"]["seen"] and found["whole"]["rows"] == 0
    assert found["whole"]["same_answer"] == found["whole"]["answer"] == sparse_tokens.ANSWER
    assert found["whole"]["same_beginning"] == sparse_tokens.ANSWER
    few_found = found["few"]
    assert few_found["read"] < few_found["seen"] == found["whole"]["seen"]
    assert few_found["rows"] == -(-len(IDS) // sparse_tokens.STRIDE) - 4 * PAGE // sparse_tokens.STRIDE
    assert 0 < few_found["divergence"] and few_found["same"] < few_found["rows"]
    same = sparse_tokens.Text(net, IDS, few).hidden[:4 * PAGE]
    assert torch.equal(same, sparse_tokens.Text(net, IDS).hidden[:4 * PAGE])
    assert "| recall, 1 | few |" in sparse_tokens.show("few", "recall", [few_found])


def test_the_engine_says_what_it_reads_and_changes(monkeypatch):
    """Of a text in two passes, with a rule that leaves nothing out, and with one that leaves much out."""
    monkeypatch.setattr(sparse_tokens, "ANSWER", 4)
    engine = load_tiny("emulated", ctx=1024, sparse="ask")
    whole, few = FEW._replace(dense=99), FEW._replace(dense=4)
    found = sparse_tokens.compared_by_engine(engine, IDS, {"whole": whole, "few": few})
    assert found["whole"]["read"] == found["whole"]["seen"] == found["few"]["seen"] > found["few"]["read"]
    assert found["whole"]["rows"] == 0 and found["whole"]["same_answer"] == found["whole"]["answer"] == 4
    assert found["whole"]["same_beginning"] == 4 >= found["few"]["same_answer"] >= found["few"]["same_beginning"]
    assert found["few"]["rows"] == -(-len(IDS) // sparse_tokens.STRIDE) - 4 * PAGE // sparse_tokens.STRIDE
    assert 0 < found["few"]["divergence"] and found["few"]["same"] < found["few"]["rows"]
    assert engine.sparse == "ask" and block_sparse.RULE is RULE
    engine.close()


@pytest.mark.parametrize("wrong", [(), (0,), (1, 2), (3,), (0, 1, 2, 3)])
def test_what_follows_a_token_that_differs_is_counted(wrong):
    """Some tokens of an answer are not the likeliest; those behind them are, where the answer is given."""
    engine = load_tiny("emulated", ctx=1024, sparse="ask")
    answer, given = [], IDS[:100]
    for place in range(4):
        request = qengine.Request(given + answer, max_tokens=1, sparse=True)
        token = next(iter(engine.submit(request))).token_id
        answer.append((token + 1) % 250 if place in wrong else token)
    assert sparse_tokens.likeliest_of(engine, given, answer) == 4 - len(wrong)
    engine.close()
