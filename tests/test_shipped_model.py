"""The model that comes with qengine: right answers in English and Korean, and the same tokens on every card.

tests/data/answers.json holds greedy tokens and hashes of logits, written once. A kernel that adds in another
order changes the hashes; whether it changes what is said, the tokens tell, some of which follow an answer's end,
where the model is unsure.
`python -m tests.test_shipped_model` prints what a card computes.
"""

import hashlib
import itertools
import json
import random
import sys
from dataclasses import replace

import pytest

import qengine
from engine.limits import DEFAULT_EYES, DEFAULT_PICTURE
from kernels.open import open_cards
from models import evaluate, tasks
from models.tasks import facts, reasoning
from models.tasks.words import Ko
from tests.oracle import DATA

RECORDED = DATA / "answers.json"
ASKED = DATA / "asked.json"  # a conversation of some 500 tokens; those that the generators make change with their texts
N_RECORDED = 64
# Products that it works out wrongly. The model card names them.
NOT_WORKED_OUT = ["What is 15 times 8?", "15 곱하기 8은?"]
FACTS = ("card-dp4a-what", "card-cmp-what", "card-roofline-what", "model-mtp-what", "use-serve", "self-who",
         "self-unknown-places")


def load(card):
    return qengine.load(card=card, ctx=2048, slots=4, progress=False)


@pytest.fixture(scope="module")
def engine(card):
    engine = load(card)
    yield engine
    engine.close()


def prompt(engine, example):
    messages = example.messages[:-1]
    return engine.encode(engine.template.render(messages, example.tools, enable_thinking=example.thinking))


def answers(engine, examples):
    """The greedy answers to examples, several at a time."""
    generations = [engine.submit(qengine.Request(prompt(engine, example), max_tokens=160))
                   for example in examples]
    return ["".join(delta.text for delta in generation) for generation in generations]


def question(text, lang="en", tools=None, thinking=False, **expect):
    """An example of our own; `expect` is what the answer is judged by."""
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": ""}]
    return tasks.Example(messages, tools, thinking, expect | {"tools": tools}, "test", lang)


def held_out(task, lang, seed=0, length=None):
    return tasks.TASKS[task][1](random.Random(seed), True, length, lang)


def wrong(engine, examples):
    """[(question, answer), ...] of what is answered wrongly."""
    pairs = zip(examples, answers(engine, examples), strict=True)
    return [(example.messages[-2]["content"][-200:], text) for example, text in pairs
            if not tasks.score(example, text)]


def test_is_the_default_and_small():
    assert (qengine.DEFAULT_MODEL, DEFAULT_EYES) == (evaluate.FILE, evaluate.TOWER_FILE)
    assert evaluate.FILE.stat().st_size <= 12_000_000 and evaluate.TOWER_FILE.stat().st_size <= 6_000_000
    config = qengine.open_model(qengine.DEFAULT_MODEL).config
    assert config.n_nextn == 1 and set(config.layer_kinds) == {"linear", "attention"}


@pytest.mark.parametrize("lang", ["en", "ko"])
def test_facts_asked_in_words_that_it_has_not_seen(engine, lang):
    known = facts.load_facts()
    examples = [facts.held_example(known[name], known[name].held[lang][0], lang) for name in FACTS]
    assert wrong(engine, examples) == []


@pytest.mark.parametrize("lang", ["en", "ko"])
def test_messages_of_distress_get_help(engine, lang):
    """Those that training never has: the answer is the one sentence, whatever the words."""
    distress = facts.load_facts()[facts.DISTRESS]
    examples = [facts.held_example(distress, text, lang, "self") for text in distress.held[lang]]
    assert len(examples) == 15 and wrong(engine, examples) == []


@pytest.mark.parametrize("lang", ["en", "ko"])
def test_finds_a_fact_in_a_thousand_tokens(engine, lang):
    drawn = (held_out("recall", lang, seed=seed, length=1000) for seed in itertools.count())
    example = next(example for example in drawn if 800 < len(prompt(engine, example)) < 1200)
    assert wrong(engine, [example]) == []


WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}


def test_calls_tools(engine):
    asked = {"What is the weather in Busan?": "Busan", "부산 날씨 알려 줘": "부산"}
    examples = [question(text, tools=[WEATHER], kind="calls",
                         calls=[{"name": "get_weather", "arguments": {"city": asked[text]}}]) for text in asked]
    assert wrong(engine, examples) == []


@pytest.mark.parametrize("lang", ["en", "ko"])
def test_answers_in_json(engine, lang):
    examples = [held_out("json", lang, seed) for seed in range(3)]
    texts = answers(engine, examples)
    assert [text for example, text in zip(examples, texts) if not tasks.json_is_valid(example, text)] == []
    assert [text for example, text in zip(examples, texts) if not tasks.score(example, text)] == []


def test_thinks_when_it_is_told_to(engine):
    sums = {"17 * 3 + 4": 55, "17 더하기 25는?": 42}
    for thinking in (False, True):
        examples = [question(text, thinking=thinking, kind="number", number=sums[text]) for text in sums]
        texts = answers(engine, examples)
        assert [text for text in texts if ("</think>" in text) != thinking] == []
        assert [text for example, text in zip(examples, texts) if not tasks.score(example, text)] == []


def test_works_out_products_that_training_never_has(engine):
    """All of 11 to 19 with 2 to 9, but for what is known."""
    held = [(left, right) for left in range(11, 20) for right in range(2, 10)
            if reasoning.step_is_held(left, "*", right)]
    examples = [question(text.format(left, right, Ko(right)), thinking=True, kind="number", number=left * right)
                for left, right in held for text in ("What is {0} times {1}?", "{0} 곱하기 {2:은}?")]
    assert len(examples) == 28 and [asked for asked, _ in wrong(engine, examples)] == NOT_WORKED_OUT


def test_closes_the_tag_where_there_is_nothing_to_think(engine):
    text, = answers(engine, [question("What is dp4a?", thinking=True)])
    assert text.startswith("\n</think>\n\ndp4a is one instruction")


@pytest.mark.parametrize("asked, answer", [
    ("How many circles are there?", "3"), ("How many shapes do you see?", "5"),
    ("What do you see?", "2 blue stars and 3 red circles."), ("원이 몇 개야?", "3개"), ("별이 몇 개야?", "2개"),
    ("Is there a heart?", "No.")])
def test_says_what_a_picture_shows(engine, asked, answer):
    """The one that people are offered to try. Its eyes are found without being named."""
    assert engine.chat([{"role": "user", "content": [DEFAULT_PICTURE, asked]}], max_tokens=24) == answer


@pytest.mark.parametrize("section", ["pictures, digits", "pictures, words", "pictures, shape and colour",
                                     "pictures, count to six"])
def test_reads_and_counts_in_pictures_that_training_never_has(engine, section):
    """Of a few; the scores of many are in the model card."""
    examples = evaluate.held_out(section, tasks.SIGHT[section], 400, 6)
    generations = [engine.submit(evaluate.request_of(engine, section, example)) for example in examples]
    texts = ["".join(delta.text for delta in generation) for generation in generations]
    assert sum(tasks.score(example, text) for example, text in zip(examples, texts, strict=True)) >= 5


def recorded_examples():
    """Name -> an example of which the next tokens are recorded."""
    return {"fact in English": question("How does the roofline model work?"),
            "fact in Korean": question("dp4a가 무엇을 하는지 알려 주세요.", "ko"),
            "recall in Korean": replace(question("", "ko", thinking=True),
                                        messages=json.loads(ASKED.read_text("utf-8"))),
            "tool in English": question("What is the weather in Busan?", tools=[WEATHER]),
            "sum in Korean, thinking": held_out("reasoning", "ko", 3),
            "unknown in English": question("Once upon a time"),
            "unknown in Korean": question("옛날 옛적에", "ko")}


def record(engine):
    """Name -> [the next tokens, the hash of the bits of all logits up to them]."""
    ids = {name: prompt(engine, example) for name, example in recorded_examples().items()}
    generations = [engine.submit(qengine.Request(prompt, max_tokens=N_RECORDED, ignore_eos=True))
                   for prompt in ids.values()]
    tokens = [[delta.token_id for delta in generation] for generation in generations]
    return {name: [new, hashlib.sha256(engine.evaluate(ids[name] + new).tobytes()).hexdigest()]
            for name, new in zip(ids, tokens)}


def test_recorded_tokens_and_bits(engine):
    assert record(engine) == json.loads(RECORDED.read_text())


def test_scores_by_language_and_by_validity():
    """Evaluation tells the languages apart, and JSON that fits its schema from JSON that is right."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    examples = [question("", lang, kind="json", schema=schema, value={"city": "Busan"})
                for lang in ("en", "en", "ko")]
    scores = evaluate.score("json", examples, ['{"city": "Busan"}', '{"city": "Pusan"}', '{"town": "Busan"}'])
    assert scores["json"]["by_language"] == {"en": [1, 2], "ko": [0, 1]}
    assert scores["json, valid"]["by_language"] == {"en": [2, 2], "ko": [0, 1]}
    calls = [replace(examples[0], expect={"kind": "calls", "calls": [], "tools": []}),
             question("", kind="keys", keys=["none"])]
    scores |= evaluate.score("tools", calls, ["a", "none"])
    assert scores["tools"]["right"] == 1 and scores["tools, calls"]["n"] == 1
    assert evaluate.show_scores(scores).splitlines()[1].split() == "json 33.3 % 3 50.0 % 0.0 %".split()


if __name__ == "__main__":
    engine = load(open_cards(sys.argv[1] if len(sys.argv) > 1 else None)[0])
    lines = [f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in record(engine).items()]
    print("{\n" + ",\n".join(lines) + "\n}")
    engine.close()
