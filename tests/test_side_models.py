"""Models beside the main one on the command line: where they go, what a plan says, and a server of all three kinds."""

import json
import threading
import urllib.request

import numpy as np
import pytest

import qengine
from cli.main import main
from cli.models import Deck, Wanted, load_models, open_models, open_side
from cli.options import build_parser, check_options
from cli.serve import free, go_on
from api.service import create_app
from kernels.card import OutOfMemory, PlannedCard
from kernels.emulated.card import EmulatedCard
from tests.test_cli import run, start
from tests.until import PATIENCE

CHAT, EMBEDDING, RERANKER = "synthetic:tiny", "synthetic:qwen3-tiny-embedding", "synthetic:qwen3-tiny-reranker"
SIDE = "--embedding-model", EMBEDDING, "--reranking-model", RERANKER


def parsed(*arguments):
    parser = build_parser()
    options = parser.parse_args(["-m", CHAT, "--serve", "0", "--card", "emulated", "--ctx", "512", *arguments])
    check_options(parser, options)
    return options


# ---- cards -----------------------------------------------------------------------------------------------------------


def test_a_twin_shares_the_memory_and_nothing_else():
    card = EmulatedCard(3, 1 << 20)
    twin, before = card.twin(), card.free_bytes
    array = twin.zeros(1000, np.float32)
    assert card.free_bytes == twin.free_bytes < before and card.name == twin.name
    with card.record(), twin.record():          # a card makes one recording at a time
        pass
    with pytest.raises(OutOfMemory):
        card.alloc(1 << 20, np.uint8)
    twin.free(array)
    assert card.free_bytes == before
    assert card.default_stream is not twin.default_stream


def test_the_cards_of_a_side_model():
    deck = Deck(Wanted(None, {"memory": None}, "emulated:2"), PlannedCard)

    def cards(name):
        return deck.of(Wanted(None, {}, name, is_side=True))

    assert cards(None) == deck.first[:1]
    assert cards("emulated:2") == deck.first and deck.of(Wanted(None, {}, "emulated:2")) is deck.first
    found = cards("emulated:3")
    assert found[:2] == deck.first and isinstance(found[2], PlannedCard)
    assert cards("emulated:3")[2] is found[2]           # a second model counts on the same one


def test_a_candidate_is_still_taken_alone(monkeypatch):
    """Opening the cards before a plan is made does not change where the model goes."""
    monkeypatch.setattr(qengine, "open_cards", lambda which=None: [EmulatedCard(0, 1 << 28), EmulatedCard(1, 1 << 28)])
    opened = qengine.open_model(CHAT)
    for cards in None, qengine.open_named(None):
        planner = qengine.make_planner(opened, cards, opened.demand(512))
        assert len(planner.cards) == 1 and len(planner.spare) == 1
        planner = qengine.make_planner(opened, cards, opened.demand(512, split=(2, 2)))
        assert len(planner.cards) == 2


# ---- engines ---------------------------------------------------------------------------------------------------------


def test_three_engines_on_one_card_at_once():
    """Each gives what it gives alone, while the others work."""
    options = parsed(*SIDE)
    engine, *side = load_models(open_models(options), free).engines
    embedder, reranker = side
    assert [one.kind for one in (engine, *side)] == ["text", "embedding", "reranking"]
    assert len({one.cards[0].name for one in (engine, *side)}) == 1 and len({id(one.cards[0]) for one in (
        engine, *side)}) == 3
    asked = {"text": lambda: engine.generate([1, 2, 3], max_tokens=20, ignore_eos=True),
             "rows": lambda: embedder.embed(["one", "another text"] * 8).tolist(),
             "scores": lambda: reranker.rerank("a", ["one", "another text"] * 8).tolist()}
    alone, together = {name: ask() for name, ask in asked.items()}, {}
    threads = [threading.Thread(target=lambda name=name, ask=ask: together.update({name: ask()}))
               for name, ask in asked.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    for one in (engine, *side):
        one.close()


def test_a_server_goes_on_with_its_side_models():
    """A model on a card that is lost moves; the main model has the memory that is left."""
    cards = [EmulatedCard(0, 1 << 28), EmulatedCard(1, 1 << 28)]
    engine = qengine.load(CHAT, cards, ctx=512, split=(2, 2), progress=False)
    side = [qengine.load(EMBEDDING, card.twin(), progress=False) for card in cards]
    rows = side[0].embed(["a"])
    app = create_app(engine, side)
    service = app.extensions["qengine"]
    cards[0].error = RuntimeError("it burns")
    with pytest.raises(qengine.EngineStopped):
        engine.generate([1, 2, 3], max_tokens=4)
    assert go_on(service, parsed("--go-on", "--embedding-model", EMBEDDING))
    assert service.engine.cards == cards[1:] and service.engines[2] is side[1]
    assert service.engines[1] is not side[0] and service.engines[1].cards[0].name == cards[1].name
    np.testing.assert_array_equal(service.engines[1].embed(["a"]), rows)
    assert app.test_client().get("/health").status_code == 200
    for one in service.engines:
        one.close()


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments, words", [
    (["-p", "hi", "--embedding-model", EMBEDDING], "--embedding-model goes with --serve or --plan"),
    (["--plan", "--embedding-card", "cuda"], "--embedding-card goes with --embedding-model"),
    (["--plan", "--reranking-card", "cuda", "--embedding-model", EMBEDDING], "--reranking-card goes with"),
    (["--plan", "--embedding-model", CHAT], "can generate text, but not make embeddings"),
    (["--plan", "--reranking-model", EMBEDDING], "can make embeddings, but not rerank documents"),
    (["--serve", "0", "--reranking-model", EMBEDDING], "can make embeddings, but not rerank documents"),
    (["--plan", "--embedding-model", "nothing.gguf"], "nothing.gguf"),
    (["--plan", "--embedding-model", EMBEDDING, "--embedding-card", "abacus"], "abacus")], ids=str)
def test_a_mistake_is_one_sentence(capsys, arguments, words):
    code, out, err = run(capsys, "-m", CHAT, "--card", "emulated", *arguments)
    assert (code, out) == (2, "") and words in err.splitlines()[-1] and "Traceback" not in err


def test_a_plan_counts_all_models(capsys):
    """The main model's card has what the others leave, and the plan of each says what it takes."""
    assert main(["-m", CHAT, "--plan", "--card", "emulated:h100", *SIDE]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.endswith(":")] == [
        f"{EMBEDDING}, embedding:", f"{RERANKER}, reranking:", f"{CHAT}, text:"]
    rows = [line.split() for line in out.splitlines() if line.startswith("emulated card 0")]
    free = [float(row[-2]) for row in rows]
    assert len(rows) == 3 and free[0] >= free[1] >= free[2]
    assert main(["-m", CHAT, "--plan", "--card", "emulated:h100"]) == 0
    alone = capsys.readouterr().out
    assert not alone.startswith(CHAT)


def test_a_plan_is_what_is_taken():
    """Loaded beside each other, the models take what their plans say, to the byte."""
    options, card = parsed(*SIDE), EmulatedCard(0, 1 << 28)
    planned, real = PlannedCard(card), card.free_bytes
    loaded = []
    for one in open_side(options):
        planned.set_aside(one.planner([planned]).plan.stages[0].total)
        loaded.append(one.load([card.twin()], progress=False))
        assert real - card.free_bytes == real - planned.free_bytes
    main_model = qengine.open_model(CHAT)
    demand = {"ctx": 512, "slots": 2}
    assert (qengine.make_planner(main_model, [planned], main_model.demand(**demand)).plan.stages
            == qengine.make_planner(main_model, [card], main_model.demand(**demand)).plan.stages)
    for engine in loaded:
        engine.close()


def test_a_main_model_that_does_not_fit_beside_the_others(capsys, monkeypatch):
    """It would fit alone, and so would the others."""
    def needed(path, **wishes):
        opened = qengine.open_model(path)
        planner = qengine.make_planner(opened, EmulatedCard(0, 1 << 20), opened.demand(**wishes))
        return planner.plan.stages[0].total

    least = max(needed(CHAT, ctx=512), needed(EMBEDDING) + needed(RERANKER)) + (1 << 20)
    monkeypatch.setattr(qengine, "open_cards", lambda which=None: [EmulatedCard(0, least)])
    for side, code in ((), 0), (SIDE, 2):
        assert main(["-m", CHAT, "--plan", "--ctx", "512", *side]) == code
    out, err = capsys.readouterr()
    assert f"{CHAT} does not fit" in err and f"{RERANKER}, reranking:" in out


def ask(port, path, body):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


def test_a_server_of_all_three(tmp_path):
    """As a process of its own; SIGTERM ends it."""
    process = start("--serve", "0", *SIDE, ctx=512)
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("beside it: ") and "reranking" in line:
                break
        text = "".join(said)
        port = text.partition("127.0.0.1:")[2].partition("/")[0]
        assert f"beside it: {EMBEDDING}, embedding\n" in text, text
        assert len(ask(port, "/v1/embeddings", {"input": "a"})["data"][0]["embedding"]) == 256
        assert len(ask(port, "/rerank", {"query": "a", "documents": ["b", "c"]})["results"]) == 2
        assert ask(port, "/v1/completions", {"prompt": "a", "max_tokens": 2})["choices"]
    finally:
        process.terminate()
        process.wait(PATIENCE)
    assert process.returncode in (0, 143, -15)
