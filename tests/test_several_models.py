"""Several models on the command line: how they are written, what a plan says, and real engines that come and go."""

import contextlib
import gc
import json
import math
import threading
import urllib.error
import urllib.request

import numpy as np
import pytest

import qengine
from api.service import create_app
from cli.main import main
from cli.models import Deck, load_models, open_models, plans
from cli.named import ModelArgument, model_argument
from cli.options import build_parser, check_options
from cli.serve import free, slots_of
from kernels.card import OutOfMemory
from kernels.emulated.card import EmulatedCard
from tests.clients import CHAT, HI
from tests.oracle import EMBEDDING, oracle_path
from tests.test_cli import run
from tests.until import PATIENCE, wait_until

pytestmark = pytest.mark.usefixtures("compiled_when_launched")

TINY, SMALL, ROWS = "synthetic:tiny", "synthetic:tiny:q4_k", "synthetic:qwen3-tiny-embedding"
COMPLETION = "/v1/completions"


def parsed(*arguments):
    parser = build_parser()
    options = parser.parse_args([*arguments, "--serve", "0", "--card", "emulated"])
    check_options(parser, options)
    return options


# ---- how they are written -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, meant", [
    ("a.gguf", ModelArgument("a.gguf")), ("hf:OWNER/NAME:Q4_K_M", ModelArgument("hf:OWNER/NAME:Q4_K_M")),
    ("folder=1/a.gguf", ModelArgument("1/a.gguf", "folder")), ("./folder=1/a.gguf", ModelArgument("./folder=1/a.gguf")),
    ("chat=a.gguf,ctx=16384,aliases=gpt-4o,default,idle=10m",
     ModelArgument("a.gguf", "chat", ("gpt-4o", "default"), 600, ("--ctx=16384",))),
    ("chat=a.gguf,card=cuda:0,1,split=3,5,idle=never",
     ModelArgument("a.gguf", "chat", (), math.inf, ("--card=cuda:0,1", "--split=3,5"))),
    ('b=c,chat-template-kwargs={"x": 1, "y": 2}',
     ModelArgument("c", "b", (), None, ('--chat-template-kwargs={"x": 1, "y": 2}',)))], ids=str)
def test_what_an_argument_says(text, meant):
    assert model_argument(text) == meant


def test_a_file_is_a_file_whatever_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b,c.gguf").touch()
    assert model_argument("a=b,c.gguf") == ModelArgument("a=b,c.gguf")
    long = "b" * 5000           # longer than the name of a file can be
    assert model_argument(f"a={long}") == ModelArgument(long, "a")


@pytest.mark.parametrize("arguments, words", [
    (["-m", f"a={TINY},port=3"], "a: 'port' is no option of a model"),
    (["-m", f"a={TINY},ctx"], "a: behind the file stands option=value, not 'ctx'"),
    (["-m", f"a={TINY},ctx=9,ctx=8"], "a: ctx is there twice"),
    (["-m", f"a={TINY},ctx=many"], "-m a: argument --ctx: must be a whole number"),
    (["-m", f"a={TINY},temperature=3"], "-m a: argument --temperature: must be from 0 to 2"),
    (["-m", f"a={TINY},idle=soon"], "a: idle is a time such as 30s, 10m or 2h, or never, not 'soon'"),
    (["-m", f"a={TINY},idle=0"], "a: idle is a time"),
    (["-m", f"a={TINY}", "-m", f"a={SMALL}"], "two models have the name a"),
    (["-m", f"a={TINY}", "-m", f"b={SMALL},aliases=c,a"], "two models have the name a"),
    (["-m", TINY, "-m", TINY], f"2 models have the name {TINY}"),
    (["-m", f"a={TINY}", "--go-on", "--serve", "0"], "--go-on is for one model"),
    (["-m", f"a={TINY}", "-m", f"b={SMALL},aliases=" + TINY, "-m", TINY], f"2 models have the name {TINY}"),
    (["-m", f"a={TINY}", "-m", "b=nothing.gguf"], "nothing.gguf")], ids=str)
def test_a_mistake_is_one_sentence(capsys, arguments, words):
    task = [] if "--serve" in arguments else ["--plan"]
    code, out, err = run(capsys, *arguments, *task, "--card", "emulated")
    assert code == 2 and words in err.splitlines()[-1] and "Traceback" not in err


@pytest.mark.parametrize("task", [["-p", "hi"], ["--chat"], ["--bench"], ["--perplexity", "x"]], ids=str)
@pytest.mark.parametrize("models", [["-m", f"a={TINY}"], ["-m", TINY, "-m", SMALL]], ids=str)
def test_several_models_are_for_servers_and_plans(capsys, task, models):
    code, out, err = run(capsys, *models, *task)
    assert (code, out) == (2, "") and "are for --serve and --plan" in err


def test_each_model_has_the_options_of_all_and_its_own():
    options = parsed("-m", f"a={TINY},ctx=512,temperature=0.5,thinking=off", "-m", f"b={TINY},slots=3", "--ctx", "1024",
                     "--slots", "2", "--temperature", "0.75")
    a, b = open_models(options)
    assert [(one.model.name, one.arguments["ctx"], one.arguments["slots"]) for one in (a, b)] == [
        ("a", 512, 2), ("b", 1024, 3)]
    assert [one.defaults.sampling["temperature"] for one in (a, b)] == [0.5, 0.75]
    assert [one.defaults.thinking for one in (a, b)] == [False, None] and slots_of(options) == 5


def test_what_is_said_for_all_is_for_those_whom_it_concerns():
    variables = "--chat-template-kwargs", '{"enable_thinking": false, "more": 1}'
    chat, rows = open_models(parsed("-m", f"a={TINY}", "-m", f"b={ROWS}", *variables))
    assert chat.defaults.thinking is False and chat.defaults.template_kwargs == {"more": 1}


def test_a_model_without_cards_of_its_own_takes_those_of_all(monkeypatch):
    """As alone: the first one if it fits there, although another model names its cards."""
    opened = {None: [EmulatedCard(0, 1 << 28), EmulatedCard(1, 1 << 28)]}
    opened["cuda:1"] = opened[None][1:]
    monkeypatch.setattr(qengine, "open_cards", lambda which=None: opened[which])
    options = build_parser().parse_args(["-m", f"a={TINY},card=cuda:1", "-m", f"b={TINY}", "--plan"])
    check_options(build_parser(), options)
    a, b = open_models(options)
    deck = Deck(a)
    assert [card.number for card in a.planner(deck.of(a)).cards] == [1]
    assert [card.number for card in b.planner(deck.of(b)).cards] == [0]
    assert deck.of(b)[1] is deck.of(a)[0]


# ---- plans ----------------------------------------------------------------------------------------------------------


def needed(*arguments):
    """Bytes that each model takes of a card with plenty."""
    return [one.planner([EmulatedCard(0, 1 << 30)]).plan.stages[0].total for one in open_models(parsed(*arguments))]


def test_a_plan_says_what_is_loaded_together_and_what_in_turns(capsys, monkeypatch):
    models = ["-m", f"a={TINY},ctx=512", "-m", f"b={TINY},ctx=512,idle=1m", "-m", f"c={TINY},ctx=512,idle=1m"]
    several = ["checkpoint-memory=1", "kv-tokens=512"]
    models = [",".join([one, *several]) if "=" in one else one for one in models]
    each = needed(*models)[0]
    for room, told in ((3.5, ""), (2.5, "have to go"), (1.5, None)):
        monkeypatch.setattr(qengine, "open_cards", lambda which=None: [EmulatedCard(0, int(room * each))])
        code = main([*models, "--plan"])
        out, err = capsys.readouterr()
        heads = [line for line in out.splitlines() if line.endswith(":")]
        assert heads[0] == "a, text:"
        if told is None:
            assert code == 2 and "b does not fit" in err
            continue
        assert code == 0 and heads[1] == "b, text, loaded at its first request:"
        assert heads[2] == "c, text, loaded at its first request" + (
            ", for which others that nobody asks have to go" if told else "") + ":"


def test_a_plan_of_an_idle_model_counts_on_what_it_takes_itself(monkeypatch):
    """Its longest context is that of the same model on the same cards, always loaded, in every KV format."""
    of, first = f"{TINY},ctx=16384,checkpoint-memory=1,kv-tokens=16384", f"a={TINY},ctx=512,checkpoint-memory=1"
    room = int(1.2 * needed("-m", f"b={of}")[0] + needed("-m", first)[0])
    monkeypatch.setattr(qengine, "open_cards", lambda which=None: [EmulatedCard(0, room)])
    always, idle = (list(plans(open_models(parsed("-m", first, "-m", f"b={of}{more}"))))[1].partition(":\n")[2]
                    for more in ("", ",idle=1m"))
    assert always == idle and "none fits" not in idle and "the longest that fits has 16,384" in idle


@pytest.mark.parametrize("idle", ["", ",idle=1m"])
def test_a_plan_says_where_others_drive_experts_off_the_card(monkeypatch, idle):
    """And only there: not where all experts fit beside the others, nor where they do not fit alone."""
    settings = "ctx=512,checkpoint-memory=1,kv-tokens=512"
    models = ["-m", f"a={TINY},{settings}", "-m", f"m=synthetic:tiny-moe,{settings}{idle}"]
    first, mixture = needed(*models)
    for arguments, room, is_moved, is_told in ((models, first + mixture - 2_000_000, True, True),
                                               (models, first + mixture + 200_000, False, False),
                                               (models[2:], mixture - 2_000_000, True, False)):
        monkeypatch.setattr(qengine, "open_cards", lambda which=None: [EmulatedCard(0, room)])
        text = list(plans(open_models(parsed(*arguments))))[-1]
        assert ("experts of each layer lie on the card" in text) == is_moved
        assert ("alone all its experts would fit: kv-tokens= and checkpoint-memory=" in text) == is_told


@pytest.mark.parametrize("idle", ["", ",idle=1m"])
def test_a_model_that_fits_alone_is_told_what_makes_room(monkeypatch, idle):
    first, second = f"a={TINY},ctx=512,checkpoint-memory=1,kv-tokens=65536", f"b={TINY},ctx=512{idle}"
    large, small = needed("-m", first, "-m", f"{second},checkpoint-memory=1,kv-tokens=512")
    sentence = "\nalone it would fit: kv-tokens= and checkpoint-memory= of the others make room"
    for room, models, is_told in ((large + small // 2, [first, second], True), (large // 2, [first, second], False),
                                  (small // 2, [second], False)):
        monkeypatch.setattr(qengine, "open_cards", lambda which=None: [EmulatedCard(0, room)])
        wanted = open_models(parsed(*(word for model in models for word in ("-m", model))))
        for work in (lambda: list(plans(wanted))), (lambda: load_models(wanted, free)):
            with pytest.raises(OutOfMemory, match="does not fit") as caught:
                work()
            assert (sentence in str(caught.value)) == is_told


@pytest.mark.parametrize("numbers, is_told", [((0,), False), ((0, 0), True), ((0, 1), False)])
def test_others_make_room_only_on_cards_that_they_are_on(monkeypatch, numbers, is_told):
    """The last model's card has less memory than it says: what else runs on this machine takes it."""
    cards, load = [EmulatedCard(number, 1 << 30) for number in (0, 1)], qengine.load
    monkeypatch.setattr(qengine, "open_cards", lambda which: [cards[int(which[-1])]])

    def load_all_but_the_last(model, *arguments, **options):
        if model.name == f"m{len(numbers) - 1}":
            raise OutOfMemory("cuMemAlloc of 1.0 GB: out of memory")
        return load(model, *arguments, **options)
    monkeypatch.setattr(qengine, "load", load_all_but_the_last)
    settings = "ctx=512,checkpoint-memory=1,kv-tokens=512"
    wanted = open_models(parsed(*(word for i, number in enumerate(numbers)
                                  for word in ("-m", f"m{i}={TINY},{settings},card=cuda:{number}"))))
    with pytest.raises(OutOfMemory, match="cuMemAlloc") as caught:
        load_models(wanted, free)
    assert ("alone it would fit" in str(caught.value)) == is_told


def test_checkpoints_of_one_model_of_several_make_room_for_it(monkeypatch):
    """Its share of the card is the most that it takes, unless the command line says it."""
    first, second = f"a={TINY},ctx=512,checkpoint-memory=1,kv-tokens=512", f"b={TINY},ctx=512,kv-tokens=16384"
    large, small = needed("-m", first, "-m", f"{second},checkpoint-memory=0")
    room = large + small + (1 << 20)
    monkeypatch.setattr(qengine, "open_cards", lambda which=None: [EmulatedCard(0, room)])
    with pytest.raises(OutOfMemory, match="no --checkpoint-memory"):
        list(plans(open_models(parsed("-m", first, "-m", f"{second},checkpoint-memory={(room >> 20) // 16}"))))
    a, b = open_models(parsed("-m", first, "-m", second))
    assert len(list(plans([a, b]))) == 2
    with served(monkeypatch, room, "-m", first, "-m", second) as (group, app, card):
        assert 2 <= group.served[1].engine.scheduler.cache.n_checkpoints < 5 and ask(app, "b")


# ---- engines that come and go ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(monkeypatch, memory, *arguments):
    """(Models, a client, the card) of a server of these models on one card."""
    card = EmulatedCard(0, memory)
    monkeypatch.setattr(qengine, "open_cards", lambda which=None: [card])
    models = load_models(open_models(parsed(*arguments)), free)
    app = create_app(models=models)
    try:
        yield models, app, card
    finally:
        app.extensions["qengine"].close()
        models.close()
        gc.unfreeze()


def ask(app, model, prompt="one two three", n=8):
    answer = app.test_client().post(COMPLETION, buffered=True, json={
        "model": model, "prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True})
    return answer.json["choices"][0]["text"] if answer.status_code == 200 else answer


def row_of(app):
    return app.test_client().post("/v1/embeddings", json={"input": "a"}, buffered=True).json["data"][0]["embedding"]


def test_models_take_turns_on_a_card_with_room_for_one(monkeypatch):
    """Each gives what it gives alone, and gives back all of its memory when it goes."""
    monkeypatch.setattr("engine.served.LOADS_SECONDS", 3600.0)     # longer than this test takes on any machine
    of = ",ctx=512,kv-tokens=512,checkpoint-memory=1,idle=never"
    models = ["-m", f"a={TINY}{of}", "-m", f"b={SMALL}{of}"]
    alone = {}
    for name, source in ("a", TINY), ("b", SMALL):
        engine = qengine.load(source, card="emulated", ctx=512, progress=False)
        app = create_app(engine)
        alone[name] = ask(app, name)
        app.extensions["qengine"].close()
        engine.close()
    with served(monkeypatch, int(1.4 * max(needed(*models))), *models) as (group, app, card):
        empty, left = card.free_bytes, {}
        for name in "a", "b", "a", "b":
            assert ask(app, name) == alone[name]
            assert [one.name for one in group.served if one.state == "loaded"] == [name]
            assert card.free_bytes == left.setdefault(name, card.free_bytes) < empty
        refused = ask(app, "a")                     # four loads are the most within that time
        assert refused.status_code == 503 and 60 < int(refused.headers["Retry-After"]) <= 3600
        assert ask(app, "b") == alone["b"]


def test_what_fits_is_loaded_together_and_runs_together(monkeypatch):
    of = ",ctx=512,idle=never"
    models = ["-m", f"a={TINY}{of}", "-m", f"b={SMALL}{of}", "-m", f"rows={ROWS},idle=never"]
    with served(monkeypatch, 1 << 28, *models) as (group, app, card):
        alone = {name: ask(app, name, n=40) for name in "ab"}
        row = row_of(app)
        together, threads = {}, []
        for name in "ab":
            threads.append(threading.Thread(target=lambda name=name: together.update({name: ask(app, name, n=40)})))
            threads[-1].start()
        again = row_of(app)
        for thread in threads:
            thread.join()
        assert together == alone and again == row and alone["a"] != alone["b"]
        assert [one.n_loads for one in group.served] == [1, 1, 1]
        assert group.served[0].engine.cards[0] is not group.served[1].engine.cards[0]


def test_an_idle_model_gives_its_memory_back(monkeypatch):
    models = ["-m", f"a={TINY},ctx=512", "-m", f"b={SMALL},ctx=512,idle=500ms"]
    with served(monkeypatch, 1 << 28, *models) as (group, app, card):
        before, left, put_away = card.free_bytes, [], group.put_away
        group.put_away = lambda engine: (left.append(card.free_bytes), put_away(engine))
        assert isinstance(ask(app, "b"), str)
        wait_until(lambda: group.served[1].state == "unloaded" and left and card.free_bytes == before)
        assert left[0] < before and group.served[0].state == "loaded"


# ---- a server -------------------------------------------------------------------------------------------------------


def post(port, path, body):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)


def test_a_server_of_the_shipped_model_and_one_for_embeddings():
    """As a process of its own: the second model is loaded when it is asked for; SIGTERM ends it."""
    from tests.test_cli import start
    rows = oracle_path(f"gguf/{EMBEDDING}.gguf")
    process = start("--serve", "0", ctx=512, model=("-m", f"chat={qengine.DEFAULT_MODEL},aliases=gpt-4o", "-m",
                                                    f"rows={rows},idle=never"))
    try:
        said = ""
        for line in process.stderr:
            said += line
            if line.startswith("beside it: "):
                break
        assert "beside it: rows, embedding, loaded when asked for\n" in said
        port = said.partition("127.0.0.1:")[2].partition("/")[0]
        answer = post(port, CHAT, {"model": "gpt-4o", "messages": [HI], "max_tokens": 4})
        assert answer["model"] == "chat" and answer["usage"]["completion_tokens"] >= 1
        assert len(post(port, "/v1/embeddings", {"model": "rows", "input": "a"})["data"][0]["embedding"]) > 8
        assert "can make embeddings" in post(port, CHAT, {"model": "rows", "messages": [HI]})["error"]["message"]
    finally:
        process.terminate()
        _, rest = process.communicate(timeout=PATIENCE)
    assert process.returncode in (0, 143, -15) and "loaded model=rows seconds=" in rest and "Traceback" not in rest


def test_rows_of_a_model_that_was_away_are_the_same(monkeypatch):
    with served(monkeypatch, 1 << 28, "-m", f"rows={ROWS},idle=never") as (group, app, card):
        found = []
        for _ in range(2):
            answer = app.test_client().post("/api/embed", json={"model": "rows", "input": "a b", "keep_alive": 0},
                                            buffered=True)
            found.append(answer.json["embeddings"])
            wait_until(lambda: group.first.state == "unloaded")
        np.testing.assert_array_equal(*found)
        assert group.first.n_loads == 2
