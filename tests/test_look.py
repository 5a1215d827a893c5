"""Looking into a model: attention maps against the attention kernel's own results, hidden states and logits against
`evaluate`, and patched hidden states."""

import numpy as np
import pytest
from PIL import Image

import qengine
from engine import look as looking
from engine.request import RequestError
from kernels.emulated.card import EmulatedCard
from kernels.kv_formats import KV_FORMATS
from tests.kinds import KV_KINDS
from tests.pictures import made_up_sight, scene

IDS = [(31 * i * i + 7 * i) % 1000 for i in range(150)]         # three passes of 64
MODELS = "synthetic:tiny", "synthetic:qwen3-tiny", "synthetic:tiny-moe"
ENGINES = [(model, "float16") for model in MODELS] + [(MODELS[0], kv) for kv in KV_KINDS]


def load(model="synthetic:tiny", cards=1, **options):
    cards = [EmulatedCard(number, memory_bytes=256 << 20) for number in range(cards)]
    return qengine.load(model, card=cards, ctx=256, chunk=64, progress=False, draft="off", **options)


@pytest.fixture(scope="module", params=ENGINES, ids=lambda param: " ".join(param))
def engine(request):
    model, kv = request.param
    engine = load(model, kv=kv)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tiny():
    engine = load()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def seeing():
    with made_up_sight():
        engine = load(mmproj="synthetic", image_tokens=(1, 64))
    yield engine
    engine.close()


def attention_layers(engine):
    return [i for i, kind in enumerate(engine.config.layer_kinds) if kind != "linear"]


def watch_attention(monkeypatch):
    """A list that gets (out, gates or None) of each call of the attention kernel, as NumPy arrays."""
    found, attend = [], qengine.attention.attend_prefill

    def attend_and_tell(card, out, q, qkv, pages, places, n, **options):
        attend(card, out, q, qkv, pages, places, n, **options)
        heads, columns = qkv.heads, qkv.products.stride
        products = card.download(qkv.products.values.reshape(-1)[:n * columns]).reshape(n, columns)
        queries = products[:, :heads.k_column].reshape(n, heads.n_heads, heads.query_width)
        found.append((card.download(out[:n]), queries[..., heads.head_dim:] if heads.gated else None))

    monkeypatch.setattr(qengine.attention, "attend_prefill", attend_and_tell)
    return found


def test_weights_give_what_the_kernel_gives(engine, monkeypatch):
    layers, kernel = attention_layers(engine), watch_attention(monkeypatch)
    seen = engine.look(IDS, [f"{kind} {i}" for i in layers for kind in ("attention", "values")])
    assert len(kernel) == 3 * len(layers)
    for place, i in enumerate(layers):
        weights, values = seen[f"attention {i}"], seen[f"values {i}"]
        np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)
        assert weights.min() >= 0 and np.all(np.triu(weights, 1) == 0)
        group = weights.shape[0] // values.shape[1]
        want = np.einsum("hrk,khd->rhd", weights, np.repeat(values, group, axis=1))
        outs, gates = zip(*kernel[place::len(layers)])
        if gates[0] is not None:
            want /= 1 + np.exp(-np.concatenate(gates))
        got = np.concatenate(outs)
        assert np.linalg.norm(got - want.reshape(got.shape)) < 2e-3 * np.linalg.norm(want)


def test_weights_are_those_of_the_queries_and_keys(tiny):
    seen = tiny.look(IDS, ["queries 3", "keys 3", "attention 3"], rows=[70])
    q, k = seen["queries 3"][0], np.repeat(seen["keys 3"], tiny.config.n_heads // tiny.config.n_kv_heads, axis=1)
    scores = np.einsum("hd,khd->hk", q[...].astype(np.float64), k[:71])
    want = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(seen["attention 3"][:, 0, :71], want, rtol=1e-4, atol=1e-7)
    assert not seen["attention 3"][:, 0, 71:].any()


@pytest.mark.parametrize("kv", KV_KINDS)
def test_few_bits_show_what_float16_shows_to_within_their_errors(tiny, kv):
    """Layer 3 is the first with attention, so what enters it has the same bits."""
    names, coarse = ["queries 3", "keys 3", "values 3"], load(kv=kv)
    want, got = tiny.look(IDS, names), coarse.look(IDS, names)
    coarse.close()
    for name, most in zip(names, (1e-3, KV_FORMATS[kv].keys.error, KV_FORMATS[kv].values.error)):
        assert 0 < np.linalg.norm(got[name] - want[name]) < 1.1 * most * np.linalg.norm(want[name])


def test_states_and_logits_are_those_of_evaluate(engine):
    states = {}

    def tap(name, x):
        states.setdefault(name, []).append(x.card.download(x[:64]))

    logits = engine.evaluate(IDS, tap)
    seen = engine.look(IDS, [*states, "logits"])
    assert list(seen) == [*states, "logits"] and len(states) == 1 + engine.config.n_layers
    np.testing.assert_array_equal(seen["logits"], logits)
    for name, parts in states.items():
        np.testing.assert_array_equal(seen[name], np.concatenate(parts)[:len(IDS)])


def test_rows_in_any_order(tiny):
    names = ["layer 1", "attention 3", "queries 3", "keys 3", "logits"]
    all_of_it, some = tiny.look(IDS, names), tiny.look(IDS, names, rows=[-1, 3, 64])
    assert some.rows.tolist() == [149, 3, 64]
    np.testing.assert_array_equal(some["layer 1"], all_of_it["layer 1"][[149, 3, 64]])
    np.testing.assert_allclose(some["attention 3"], all_of_it["attention 3"][:, [149, 3, 64]], rtol=1e-5, atol=1e-9)
    np.testing.assert_array_equal(some["queries 3"], all_of_it["queries 3"][[149, 3, 64]])
    np.testing.assert_array_equal(some["keys 3"], all_of_it["keys 3"])
    np.testing.assert_array_equal(some["logits"], all_of_it["logits"][[149, 3, 64]])


def test_two_cards_show_the_same(tiny):
    names, two = ["layer 1", "layer 2", "attention 3", "logits"], load(cards=2, split=(2, 2))
    one, other = tiny.look(IDS, names), two.look(IDS, names)
    two.close()
    for name in names:
        np.testing.assert_array_equal(one[name], other[name])


def test_texts_messages_and_answers(tiny):
    assert tiny.look("Hello").ids == tiny.encode("Hello")
    messages = [{"role": "user", "content": "Hello"}]
    asked = tiny.look(messages, "embedding", then="Yes")
    assert asked.ids == tiny.encode(tiny.template.render(messages)) + tiny.encode("Yes")
    assert "".join(asked.tokens).endswith("Yes") and len(asked.tokens) == len(asked.ids)
    assert repr(asked) == f"a look at {len(asked.ids)} of {len(asked.ids)} tokens\n  embedding: float32 " + str(
        list(asked["embedding"].shape))


# ---- patches -----------------------------------------------------------------------------------------------


def test_a_patch_that_changes_nothing_changes_no_bit(tiny):
    seen = tiny.look(IDS, ["layer 2", "logits"], patch={"embedding": lambda x, at: x, "layer 1": lambda x, at: x})
    plain = tiny.look(IDS, ["layer 2", "logits"])
    for name in plain:
        np.testing.assert_array_equal(seen[name], plain[name])


def test_all_of_another_texts_states_give_its_logits(tiny):
    other = [(token + 1) % 1000 for token in IDS]
    kept = tiny.look(other, ["layer 1", "logits"])
    seen = tiny.look(IDS, ["layer 1", "logits"], patch={"layer 1": lambda x, at: kept["layer 1"][at]})
    for name in kept:
        np.testing.assert_array_equal(seen[name], kept[name])


def test_a_patched_token_changes_what_is_behind_it(tiny):
    def change(x, positions):
        x[positions == 100] += 1.0
        return x

    plain, seen = tiny.look(IDS, ["layer 0", "logits"]), tiny.look(IDS, ["layer 0", "logits"],
                                                                   patch={"layer 0": change})
    differs = (plain["logits"] != seen["logits"]).any(axis=1)
    assert not differs[:100].any() and differs[100:].all()
    assert np.flatnonzero((plain["layer 0"] != seen["layer 0"]).any(axis=1)).tolist() == [100]


def test_a_patch_leaves_nothing_behind(tiny):
    want, before = tiny.generate(IDS, max_tokens=8), tiny.evaluate(IDS)
    tiny.look(IDS, patch={"layer 0": lambda x, at: np.zeros_like(x)})
    np.testing.assert_array_equal(tiny.evaluate(IDS), before)
    assert tiny.generate(IDS, max_tokens=8) == want


# ---- pictures ----------------------------------------------------------------------------------------------


def test_attention_on_a_picture(seeing):
    image = Image.fromarray(scene(96, 64))
    messages = [{"role": "user", "content": [image, "How many circles?"]}]
    seen = seeing.look(messages, ["attention 3", "layer 3"], then="two", rows=[-1])
    (span,), (picture,) = seen.spans, seen.pictures
    assert [seen.ids[at] for at in span] == [seeing.eyes.pad] * 6 and (picture.rows, picture.columns) == (2, 3)
    on_picture = seen.on_picture("attention 3")
    assert on_picture.shape == (seeing.config.n_heads, 2, 3)
    np.testing.assert_array_equal(on_picture.reshape(-1, 6), seen["attention 3"][:, 0, span.start:span.stop])
    other = [{"role": "user", "content": [Image.fromarray(scene(96, 64, seed=1)), "How many circles?"]}]
    assert (seeing.look(other, "layer 3", then="two", rows=[-1])["layer 3"] != seen["layer 3"]).any()


# ---- mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments, said", [
    ({"at": "attention 0"}, "^there is no 'attention 0': embedding, layer 0 to 3, logits, .* attention layer 3$"),
    ({"at": ["layer 4"]}, "^there is no 'layer 4'"), ({"patch": {"logits": None}}, "^'logits' cannot be patched"),
    ({"at": 3}, "^there is no 3: embedding"), ({"at": ["logits", None]}, "^there is no None: embedding"),
    ({"patch": 0}, r'^patch is \{"layer 2": change\}, where'), ({"patch": {"layer 1": 0}}, "^patch is .* a function$"),
    ({"rows": 3}, "^rows must be positions of the 150 tokens, as a list$"),
    ({"rows": [150]}, "^rows must be positions of the 150 tokens, as a list$")], ids=str)
def test_mistakes_are_refused_before_anything_runs(tiny, monkeypatch, arguments, said):
    monkeypatch.setattr(looking, "passes", lambda *_: pytest.fail("ran"))
    with pytest.raises(RequestError, match=said):
        tiny.look(IDS, **arguments)


@pytest.mark.parametrize("prompt", [None, 3, [1.5]], ids=str)
def test_what_is_looked_at_is_a_text(tiny, prompt):
    with pytest.raises(RequestError, match=r"^a prompt is a text or a list of token ids, and not "):
        tiny.look(prompt)


def test_what_was_not_looked_at(tiny):
    seen = tiny.look(IDS, "layer 1", rows=[-1])
    with pytest.raises(RequestError, match="^'layer 2' was not looked at, only layer 1$"):
        seen["layer 2"]
    with pytest.raises(RequestError, match="^there is no picture 0: the text has 0$"):
        seen.on_picture("layer 1")


def test_the_help_lists_the_names():
    """`help(engine.look)` tells what can be looked at, as the docstring of the file does not reach it."""
    words = qengine.Engine.look.__doc__
    assert all(f'"{name}' in words
               for name in ("embedding", "logits", "layer ", *(f"{kind} " for kind in looking.HEADS)))


def test_a_patch_of_another_shape(tiny):
    with pytest.raises(ValueError, match=r"^the patch of layer 1 made \[64, 2\] of \[64, 256\]$"):
        tiny.look(IDS, patch={"layer 1": lambda x, at: x[:, :2]})
    with pytest.raises(ValueError, match=r"^the patch of layer 1 returns nothing$"):
        tiny.look(IDS, patch={"layer 1": lambda x, at: None})
    assert tiny.look(IDS, "layer 0")["layer 0"].shape == (150, 256)
