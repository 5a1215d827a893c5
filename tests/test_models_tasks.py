"""The examples that the small model learns from, their judges, and its chat template."""

import hashlib
import inspect
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import cache

import jinja2
import pytest

from engine.rendering import raise_exception, to_json
from engine.template import ChatTemplate
from models import evaluate, tasks
from models.tasks import facts, judge, objects, ordinary, people, pictures, reasoning, recall, structured, tools, words
from models.tasks.example import TEMPLATE, text_of, to_compact_json, to_json
from models.tasks.wide import asking, besides
from tests.oracle import oracle_path

CHATS = [name for name in tasks.TASKS if name != "text"]
TOOL = {"type": "function", "function": {"name": "book_room", "description": "방 예약", "parameters": {
    "type": "object", "required": ["guest", "nights"], "properties": {
        "guest": {"type": "string"}, "nights": {"type": "integer"}, "price": {"type": "number"},
        "quiet": {"type": "boolean"}, "tags": {"type": "array", "items": {"type": "string"}}}}}}


def examples(task: str, n: int, held: bool = False, length: int = 200, seed: int = 1) -> list:
    rng = random.Random(seed)
    return [tasks.TASKS[task][1](rng, held, length) for _ in range(n)]


@cache
def qengine_template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE.read_text("utf-8"), ("<|im_start|>", "<|im_end|>", "<|endoftext|>"))


def render(messages, **options) -> str:
    return qengine_template().render(messages, **options)


# ------------------------------------------------------------------------------------------------------
# Held out
# ------------------------------------------------------------------------------------------------------


@cache
def training() -> tuple:
    """Examples of all tasks, and the text they become."""
    rng = random.Random(2)
    made = [tasks.sample(rng, length=120) for _ in range(20_000)]
    return made, [tasks.render(example) for example in made]


def test_nothing_held_out_is_trained_on():
    made, texts = training()
    assert not any(tasks.is_held(content) for example in made for content in example.contents)
    seen = tokens("\n".join(texts))
    contents = {content.lower() for name in ("recall", "tools", "json")
                for example in examples(name, 300, held=True) for content in example.contents}
    assert len(contents) > 2000
    # Numbers and very short words come about in other ways as well, and single real words are not held out.
    real = tokens(" ".join(word for pair in words.dictionary() for word in pair))
    real |= {word + particle for word in real for both in words.PARTICLES.values() for particle in both}
    rare = {content for content in contents if len(content.encode()) > (3 if content.isascii() else 6)}
    rare = {content for content in rare if not content.isdigit()}
    assert len(rare - real) > 1000 and not rare & seen - real


def tokens(text: str) -> set[str]:
    return set(re.findall(r"[0-9a-z가-힣_@.-]+", text.lower()))


def functions_in(text: str) -> set[str]:
    """The names of the functions that a text calls or describes, the placeholder of the instructions aside."""
    return set(re.findall(r'<function=([^>]+)>|"function": {"name": "([^"]+)"', text)) - {("NAME", "")}


def test_no_text_of_training_names_a_held_out_tool():
    """As its letters are, whatever the examples say that they drew."""
    trained = {name for text in training()[1] for pair in functions_in(text) for name in pair if name}
    assert len(trained) > 5000 and not any(map(tasks.is_held, trained))
    spelled = set(map(words.spelled, trained))
    held = {name for example in examples("tools", 1000, held=True)
            for pair in functions_in(tasks.render(example)) for name in pair if name}
    assert len(held) > 1500 and all(map(tasks.is_held, held))
    assert not spelled & set(map(words.spelled, held))


def test_names_are_held_out_in_every_spelling():
    assert len({words.spelled(name) for name in ("read_book", "readBook", "book-read", "Book read")}) == 1
    assert all(map(tasks.is_held, ("order_pizza", "orderPizza", "pizza_order", "pizza-order", "Order pizza")))


SUM = re.compile(r"(\d+) ?(\+|-|\*|x|×|plus|minus|times|더하기|빼기|곱하기) ?(?=(\d+))")
SIGN = {"plus": "+", "더하기": "+", "minus": "-", "빼기": "-"}


def steps_in(text: str) -> list[tuple]:
    """(left, operator, right) of every sum, of longer ones step by step; whatever has no sign or word is a product."""
    steps, result, end = [], None, None
    for match in SUM.finditer(text):
        left, right = int(match[1]), int(match[3])
        if match.start() == end:
            left = result
        sign = match[2] if match[2] in "+-" else SIGN.get(match[2], "*")
        steps.append((left, sign, right))
        result, end = reasoning._APPLY[sign](left, right), match.end()
    return steps


def test_steps_are_found():
    assert steps_in("What is 12 + 5*3?") == [(12, "+", 5), (17, "*", 3)]
    assert steps_in("12 times 5 and 3 빼기 2") == [(12, "*", 5), (3, "-", 2)]
    assert steps_in("38 * 7 = 210 + 56 = 266") == [(38, "*", 7), (210, "+", 56)]


def sums_of(made: list) -> list[tuple]:
    """The steps that questions ask for and thoughts take, by the text: without thoughts a story's are not in it."""
    return [step for example in made for text in (example.messages[-2]["content"], thoughts_of(example))
            for step in steps_in(text)]


def thoughts_of(example) -> str:
    return example.messages[-1].get("reasoning_content", "")


def asked_for(example) -> list[tuple]:
    """The steps of a question, by the text: those of its signs, and what each line of the thoughts begins with."""
    lines = [line.split(" = ")[0] for line in thoughts_of(example).splitlines()]
    return [step for text in (example.messages[-2]["content"], *lines) for step in steps_in(text)]


def test_no_text_of_training_has_a_step_of_a_held_out_sum():
    reasoned = examples("reasoning", 6000)
    trained = sums_of(reasoned)
    held = [step for example in examples("reasoning", 1000, held=True) for step in asked_for(example)]
    assert len(trained) > 5000 and len(held) > 800

    def pair(step):
        return min(step[0], step[2]), step[1], max(step[0], step[2])
    assert not set(map(pair, trained)) & set(map(pair, held))
    assert not any(reasoning.step_is_held(*step) for step in trained)
    assert all(reasoning.step_is_held(*step) for step in held)
    assert {(a, "*", b) for a in range(2, 11) for b in range(a, 11)} <= set(map(pair, trained))  # the table
    assert {(0, "+"), (1, "+"), (0, "*"), (1, "*")} <= {step[:2] for step in map(pair, trained)}
    solved = re.compile(r"(?<!\d)(?<![-+*] )(\d+) ([-+*]) (\d+) = \d")
    texts = [*training()[1], *map(tasks.render, reasoned)]
    anywhere = [(int(a), sign, int(b)) for text in texts for a, sign, b in solved.findall(text)]
    assert len(anywhere) > 1000 and not any(reasoning.step_is_held(*step) for step in anywhere)


def test_thoughts_work_products_out():
    assert reasoning._written_out(137, "*", 7, 959) == "137 * 7 = 700 + 210 + 49 = 910 + 49 = 959"
    assert reasoning._written_out(20, "*", 9, 180) == "20 * 9 = 180"
    lines = [line for held in (False, True) for example in examples("reasoning", 1000, held)
             for line in thoughts_of(example).splitlines()]
    assert sum(line.count(" = ") > 1 for line in lines) > 100
    for line in lines:
        assert len({value_of(side) for side in line.split(" = ")}) == 1, line


def value_of(side: str) -> int:
    """Of a number, or of numbers with a sign between each two, from left to right."""
    steps = steps_in(side)
    return reasoning._APPLY[steps[-1][1]](steps[-1][0], steps[-1][2]) if steps else int(side)


def names_in(example) -> set[str]:
    """The names of an example's tools, parameters and fields."""
    def of(schema):
        names = set(schema.get("properties", ()))
        return names.union(*map(of, schema.get("properties", {}).values()))
    tools = [tool["function"] for tool in example.tools or ()]
    return {tool["name"] for tool in tools}.union(
        of(example.expect.get("schema", {})), *(of(tool["parameters"]) for tool in tools))


def test_fields_and_tools_apart_are_never_named_in_training():
    apart = {name for section in ("tools, new words", "json, new fields") for seed in range(100)
             for name in names_in(tasks.NEW_WORDS[section](random.Random(seed), True))}
    assert len(apart) > 55 and all(map(tasks.is_held, apart))
    listed = {entry[0] for entry in words.entries("fields", "tools")} | {
        name for tool in tools._handwritten() for name in (tool["name"], *tool["parameters"])}
    trained = set().union(*map(names_in, examples("json", 1500) + examples("tools", 1500)))
    assert not set(map(words.spelled, apart)) & set(map(words.spelled, listed | trained))
    invented = {name for example in examples("json", 300) for name in names_in(example)} - listed
    assert len(invented) > 200


def test_handwritten_tools_are_told_by_descriptions():
    """No two have one in common, and most have another name than their own, on either side."""
    every = [text for tool in tools._trained() for text in tool["description"] + tool["description_ko"]]
    assert len(set(every)) == len(every) >= 4 * len(tools._trained()) > 4 * len(tools._handwritten())
    own = {tool["name"] for tool in tools._trained()}
    for held, least, most in ((False, 0.3, 0.6), (True, 0.02, 0.35)):
        rng, called = random.Random(3), []
        for _ in range(400):
            _, (call,), schemas = tools.natural(words.Draw(rng, held), "ko")
            called.append(call["name"] in own)
            assert sum(tool["function"]["description"] in every for tool in schemas) >= 1
        assert least < sum(called) / len(called) < most


def test_a_single_tool_is_for_calling():
    """Where training offers one tool, it is far more often called than refused: a model that does not know its words
    would refuse it."""
    asked = [example for example in examples("tools", 2000) if len(example.tools) == 1]
    refused = sum(example.messages[-1]["content"] in tools.NO_TOOL.values() for example in asked)
    called = sum("tool_calls" in example.messages[-1] for example in asked)
    assert len(asked) > 200 and called > 5 * refused > 0


def test_what_is_only_judged_by_is_answerable():
    for make in (tasks.LATER | tasks.NEW_WORDS | tasks.COMPACT | tasks.ENFORCED).values():
        rng = random.Random(8)
        for _ in range(100):
            example = make(rng, True)
            assert tasks.score(example, tasks.own_answer(example)) and not tasks.score(example, "")


def test_held_out_examples_draw_only_what_is_held_out():
    for name in tasks.TASKS:
        for example in examples(name, 100, held=True):
            assert all(map(tasks.is_held, example.contents))
        assert name in ("facts", "self", "text", "people") or example.contents


def test_held_out_questions_are_never_asked_in_training():
    held = facts.held_questions()
    asked = {facts.plain(message["content"]) for name in ("facts", "self") for example in examples(name, 3000)
             for message in example.messages if message["role"] == "user"}
    assert len(asked) > 3000 and not asked & held


def test_what_newcomers_ask_is_in_no_wording_of_training():
    """Not even as a part of one; of wordings by hand, and of a thousand questions as training varies them."""
    asked = {facts.plain(question[lang]) for question in facts.newcomers() for lang in words.LANGUAGES}
    assert len(facts.newcomers()) == 50 and len(asked) == 100
    wordings = {facts.plain(wording) for fact in facts.load_facts().values() for lang in words.LANGUAGES
                for wording in (*fact.ask[lang], *fact.follow[lang], *fact.held[lang])}
    wordings |= {facts.plain(wording) for questions in (*facts.further().values(), *facts.apart().values())
                 for lang in words.LANGUAGES for wording in questions[lang]}
    varied = {facts.plain(message["content"]) for name in ("facts", "self") for example in examples(name, 1500)
              for message in example.messages if message["role"] == "user"}
    assert len(wordings) > 10_000 and len(varied) > 1000
    assert not any(question in wording for question in asked for wording in wordings | varied)


def test_a_question_that_is_held_out_is_not_put_in_other_words(monkeypatch):
    """Where others would make it of a question of training, alone or behind a sentence, the question stays as it is."""
    rng = random.Random(0)
    for held in (facts.newcomers()[0]["en"], next(iter(facts.apart().values()))["en"][0]):
        monkeypatch.setattr(facts.asking, "widened", lambda rng, question, lang: held.upper())
        assert facts.widened(rng, "Does it run?", "en") == "Does it run?"
    monkeypatch.setattr(facts.asking, "widened", lambda *_: f"Hello. {facts.newcomers()[0]['en']}")
    assert facts.widened(rng, "Does it run?", "en") == "Does it run?"
    monkeypatch.setattr(facts.asking, "widened", lambda *_: "Will it go?")
    assert facts.widened(rng, "Does it run?", "en") == "Will it go?"


def test_questions_are_put_in_many_ways():
    """Names, options and numbers stay what they are."""
    rng, question = random.Random(1), "What is the option --ctx 4096 of qengine.py for on my card?"
    made = {asking.widened(rng, question, "en") for _ in range(300)}
    assert len(made) > 150 and all("--ctx 4096" in each and "qengine.py" in each for each in made)
    korean = {asking.widened(rng, "카드가 몇 장 필요한가요?", "ko") for _ in range(300)}
    assert len(korean) > 150 and all(any(part in each for each in korean) for part in ("그래픽카드", "궁금", "몇장"))


def test_nothing_of_training_alone_is_in_what_is_judged(monkeypatch):
    """Held-out examples are made without it, so that scores of two trainings are of the same examples."""
    def refuse(*_):
        raise AssertionError("a held-out example has what only training has")
    for module, name in ((asking, "texts"), (facts, "further"), (tools, "_trained"), (reasoning, "_drill"),
                         (recall, "_alike"), (pictures.shapes.Shapes, "several"), (structured, "_named_anew"),
                         (besides.Besides, "turn")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(people, "MORE_ASKED", dict.fromkeys(people.MORE_ASKED, (("unheard-of",),) * 3))
    for name, (make, length) in evaluate.sections().items():
        for example in evaluate.held_out(name, make, min(length, 1000), 60):
            assert "unheard-of" not in str(example.messages)
            assert name in tasks.COMPACT or to_compact_json not in forms_in(example)


def forms_in(example, role: str | None = None) -> list:
    """to_json or to_compact_json of each object in the prompt, in messages of this role, by the text: where an object
    of one entry has no place for a space, neither."""
    forms = []
    for message in example.messages[:-1]:
        text = text_of(message["content"])
        while role in (None, message["role"]) and (start := text.find('{"')) >= 0:
            value, end = json.JSONDecoder().raw_decode(text, start)
            forms += [form for form in (to_json, to_compact_json) if form(value) == text[start:end]]
            text = text[end:]
    return forms


@pytest.mark.parametrize("make, role", [(tools.make, "tool"), (tools.make, "user"), (structured.make, "user"),
                                        (objects.make, "user"), (objects.make, "system")])
def test_json_in_prompts_to_train_on_has_either_form(make, role):
    rng = random.Random(3)
    forms = Counter(form for _ in range(2000) for form in forms_in(make(rng), role))
    assert forms.total() > 50 and 0.35 < forms[to_compact_json] / forms.total() < 0.65
    assert set(forms) == {to_json, to_compact_json}


def test_arguments_may_be_given_as_json():
    """As the call has them, whatever their order."""
    rng, n = random.Random(3), 0
    for _ in range(400):
        request, (call,), _ = tools.one(words.Draw(rng, held=False), rng.choice(words.LANGUAGES))
        if '{"' in request:
            assert json.loads(request[request.index('{"'):]) == call["arguments"]
            n += 1
    assert 15 < n < 80


def test_the_model_sees_arguments_of_calls_in_one_form():
    """In which form a client sends them makes no difference, so there is but one to train on."""
    arguments = {"guest": "미나", "tags": ["가", "b"], "nights": 3}
    one, other = (render([USER, {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "book_room", "arguments": form(arguments)}}]}, USER], tools=[TOOL])
        for form in (to_json, to_compact_json))
    assert one == other and '["가", "b"]' in one


def test_compact_results_are_told():
    rng = random.Random(4)
    for _ in range(200):
        results = [message["content"] for message in tools.make_compact_results(rng).messages
                   if message["role"] == "tool"]
        objects_in = [text for text in results if text.startswith("{")]
        assert objects_in and all(text == to_compact_json(json.loads(text)) for text in objects_in)
    told = {"kind": "values", "values": [("sky", "clear"), ("temperature", "21")]}
    assert judge._values(told, "The temperature is 21, and the sky is clear.")
    assert not judge._values(told, "The temperature is 21, and the sky is emptyar.")


def test_two_questions_at_once_get_both_answers():
    answers = {lang: {fact.answer[lang] for fact in facts.load_facts().values()} for lang in words.LANGUAGES}
    both = [example for example in examples("facts", 1500) if "answer" not in example.expect]
    assert 30 < len(both) < 120
    for example in both:
        said = example.messages[-1]["content"]
        assert any(said.startswith(answer) and said.removeprefix(f"{answer} ") in answers[example.lang]
                   for answer in answers[example.lang])


def test_every_question_of_a_newcomer_is_answered_by_a_fact():
    for question in facts.newcomers():
        for lang in words.LANGUAGES:
            assert any(judge._keys({"keys": question[f"key_{lang}"]}, fact.answer[lang])
                       for fact in facts.load_facts().values()), question[lang]


def test_patterns_become_all_that_they_stand_for():
    assert facts.expanded("(Can|Does) it (run|go)?") == ["Can it run?", "Can it go?", "Does it run?", "Does it go?"]
    assert facts.expanded("It runs (by itself).") == ["It runs (by itself)."]
    many = facts.expanded("(a|b|c) (a|b|c) (a|b|c) (a|b|c)")
    assert len(set(many)) == facts.MOST_OF_PATTERN and many == facts.expanded("(a|b|c) (a|b|c) (a|b|c) (a|b|c)")
    read = facts._read({"id": "x", "en": "", "ko": "", "key_en": [], "key_ko": [], "ask_ko": ["(책|카드){을} 줘"]})
    assert read.ask["ko"] == ["책을 줘", "카드를 줘"]


def test_a_pattern_is_asked_as_often_as_a_question_that_is_none():
    read = facts._read({"id": "x", "en": "", "ko": "", "key_en": [], "key_ko": [],
                        "ask_en": ["(a|b|c|d|e|f|g|h|i) (a|b)?", "Why?"]})
    rng = random.Random(0)
    drawn = [read.question(rng, "en") for _ in range(1000)]
    assert 450 < drawn.count("Why?") < 550 and len(set(drawn)) == 19


def test_an_answer_has_the_language_of_the_last_question():
    """Also where turns before it had the other one."""
    def korean(message):
        return re.search("[가-힣]", message["content"]) is not None
    made = [example for example in examples("facts", 2000) if len(example.messages) > 3]
    turns = [[korean(message) for message in example.messages if message["role"] != "system"] for example in made]
    mixed = [(example, turn) for example, turn in zip(made, turns) if len(set(turn[:-1:2])) == 2]
    assert len(mixed) > 100
    # A few ask for the other language.
    assert sum(turn[-2] == turn[-1] for _, turn in mixed) > 0.85 * len(mixed)
    assert all(turn[-1] == (example.lang == "ko") for example, turn in mixed)
    rng = random.Random(10)
    for _ in range(50):
        spoken = [korean(message) for message in facts.make_switched(rng).messages if message["role"] != "system"]
        assert spoken[-1] == spoken[-2] and len(set(spoken)) == 2


def test_later_questions_are_held_out_and_come_later():
    rng, held = random.Random(9), facts.held_questions()
    follow_ups = {question for fact in facts.load_facts().values() for lang in words.LANGUAGES
                  for question in fact.follow_ups(lang, held=True)}
    asked = [[message["content"] for message in facts.make_later(rng).messages if message["role"] == "user"]
             for _ in range(200)]
    assert all(len(questions) > 1 and facts.plain(questions[-1]) in held for questions in asked)
    assert not held & {facts.plain(question) for questions in asked for question in questions[:-1]}
    assert 70 < sum(questions[-1] in follow_ups for questions in asked) < 130


def test_no_question_of_a_fact_is_trained_and_held_out():
    for fact in facts.load_facts().values():
        for lang in words.LANGUAGES:
            trained = map(facts.plain, (*fact.ask[lang], *fact.follow_ups(lang, held=False)))
            assert not facts.held_questions() & set(trained), fact.id


def test_people_are_told_of_and_asked_for():
    """What is asked for was told in that very conversation, or nobody told it."""
    for held in (False, True):
        unsaid = 0
        for example in examples("people", 300, held):
            before = " ".join(message["content"] for message in example.messages[:-1])
            if example.expect["kind"] == "unsaid":
                unsaid += 1
            else:
                assert all(value in before for value in (example.expect["value"], *example.expect["others"]))
        assert 10 < unsaid < 60


def test_no_held_out_wording_about_people_is_trained():
    text = "\n".join(tasks.render(example) for example in examples("people", 3000))
    # Templates that begin with words of their own can be found by these.
    starts = {template.split("{")[0] for kind in people.PROPERTIES.values()
              for template in (*kind.told_me, *kind.asked_me) if tasks.is_held(template)}
    starts = {start for start in starts if len(start) > 8}
    assert len(starts) >= 4 and not [start for start in starts if start in text]


@pytest.mark.parametrize("who, kind, lang, asked", [
    ("저", "name", "ko", "제 이름"), ("나", "age", "ko", "내 나이"), ("저", "place", "ko", "제가 사는 곳은?")])
def test_korean_for_oneself(who, kind, lang, asked):
    template = {"name": "{s} 이름", "age": "{s} 나이", "place": "{s:이} 사는 곳은?"}[kind]
    assert people._say(template, who, "", lang) == asked


def test_objects_end_and_say_what_is_known():
    answers = set(objects.ANSWERS)
    seen, known = 0, 0
    free = [example for example in examples("objects", 500) if example.expect["kind"] == "object"]
    assert 320 < len(free) < 430
    for example in free:
        value, schema = json.loads(example.messages[-1]["content"]), example.expect["schema"]
        assert judge.fits(value, schema) and tasks.estimate_tokens(example.messages[-1]["content"]) < 200
        shown = any(form(schema) in message["content"] for form in (to_json, to_compact_json)
                    for message in example.messages[:-1])
        seen += shown
        known += any(value[name] not in objects.UNKNOWN for name in answers & set(value))
    assert 0.55 < seen / len(free) < 0.75 and known > 60
    assert all(json.dumps(example.expect["schema"], ensure_ascii=False) in tasks.render(example, for_generation=True)
               for example in examples("objects", 100, held=True))  # what is scored shows the schema


def test_an_enforced_schema_is_nowhere_in_the_prompt():
    rng = random.Random(12)
    for _ in range(100):
        example = objects.make_enforced(rng)
        prompt = tasks.render(example, for_generation=True)
        assert "properties" not in prompt and "JSON" not in prompt and not example.thinking


def test_an_object_that_does_not_end_is_wrong():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    expect = {"schema": schema, "most_tokens": 400}
    assert judge._object(expect, '{"a": "anything"}')
    for text in ('{"a": 3}', '{"b": "x"}', '{"a": "x', "[]", "", '{"a": "%s"}' % ("again and " * 200)):
        assert not judge._object(expect, text)


def test_ordinary_tools_are_many_and_have_names_on_both_sides():
    tools_of = {held: {" ".join(pair) for things, actions in ordinary.kinds() for thing in things for action in actions
                       for pair in ordinary._names(thing, action, held)} for held in (False, True)}
    assert len(tools_of[False]) > 2000 and len(tools_of[True]) > 500
    assert len({verb for _, actions in ordinary.kinds() for action in actions for verb in action.verbs}) > 150
    assert len({thing.stem for things, _ in ordinary.kinds() for thing in things}) > 200
    for stem in ("weather", "light", "file", "mail"):
        assert all(any(name.endswith(f" {stem}") for name in names) for names in tools_of.values()), stem


def test_ordinary_tools_can_be_told_apart():
    """Names within an example differ; what has no name that says anything is described."""
    for held in (False, True):
        for invented in (False, True):
            rng = random.Random(11)
            for _ in range(300):
                draw = words.Draw(rng, held)
                made = ordinary.several(draw, rng.choice(words.LANGUAGES), rng.randint(1, 5), invented)
                assert len({tool.name for tool in made}) == len(made) > 0
                for tool in made:
                    function = tool.schema()["function"]
                    assert not invented or "description" in function
                    assert len(function["parameters"]["properties"]) == len(tool.action.parameters)
                    request, call = tool.ask_for(draw)
                    assert set(call["arguments"]) == set(function["parameters"]["required"]) and "{" not in request


def test_one_string_of_five_is_held_out():
    share = sum(tasks.is_held(f"word {i}") for i in range(10_000)) / 10_000
    assert 0.18 < share < 0.22


# ------------------------------------------------------------------------------------------------------
# Judges
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("held", [False, True])
def test_the_own_answer_is_right_and_another_ones_is_not(name, held):
    made = examples(name, 200, held)
    answers = [tasks.own_answer(example) for example in made]
    assert all(answer.endswith("<|im_end|>") for answer in answers)
    wrong = 0
    for example, answer, other in zip(made, answers, answers[1:] + answers[:1]):
        assert tasks.score(example, answer) and tasks.score(example, answer.removesuffix("<|im_end|>"))
        assert not tasks.score(example, "<|im_end|>") and not tasks.score(example, "")
        wrong += answer == other or not tasks.score(example, other)
    # Another fact's answer may be as near, and two sums may have one result.
    assert wrong >= (200 if name in ("json", "recall") else 180)


def changed(value):
    """A value of the same type that is another."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value[:-1] + ("x" if value[-1] != "x" else "y")
    if isinstance(value, list):
        return [*value[:-1], changed(value[-1])]
    return {key: changed(one) for key, one in value.items()}


def test_a_call_with_a_changed_or_missing_argument_is_wrong():
    n = 0
    for example in examples("tools", 200, held=True):
        for i, call in enumerate(example.expect.get("calls", ())):
            for key in call["arguments"]:
                arguments = call["arguments"]
                for worse in (arguments | {key: changed(arguments[key])},
                              {name: value for name, value in arguments.items() if name != key}):
                    calls = [dict(each) for each in example.expect["calls"]]
                    calls[i] = {"name": call["name"], "arguments": worse}
                    last = {"role": "assistant", "tool_calls": [{"function": each} for each in calls]}
                    text = tasks.own_answer(replace(example, messages=[*example.messages[:-1], last]))
                    assert not tasks.score(example, text)
                    n += 1
    assert n > 300


def test_a_json_answer_with_a_changed_value_is_valid_but_wrong():
    valid = 0
    for example in examples("json", 100):
        value = example.expect["value"]
        for key in value:
            text = json.dumps(value | {key: changed(value[key])}, ensure_ascii=False)
            assert not tasks.score(example, text)
            valid += tasks.json_is_valid(example, text)
        less = json.dumps({key: value[key] for key in list(value)[1:]})
        assert not tasks.json_is_valid(example, less)
        assert not tasks.json_is_valid(example, json.dumps(value) + "}")
    assert valid > 100


def test_a_recalled_value_must_be_the_one_asked_for():
    for example in said(examples("recall", 200, held=True)):
        answer = tasks.own_answer(example)
        value = example.expect["value"]
        assert not tasks.score(example, answer.replace(value, changed(value)))
        for other in example.expect["others"]:
            assert not tasks.score(example, f"{answer.removesuffix('<|im_end|>')} {other}")


def said(made: list) -> list:
    return [example for example in made if example.expect["kind"] == "value"]


def test_a_recalled_value_must_be_said_of_what_was_asked_for():
    expect = {"value": "7391", "about": ["pass code", "Bob"], "others": []}
    for text in ("The pass code of Bob is 7391.", "Bob's pass code: 7391", "7391", "It is 7391."):
        assert judge._value(expect, text)
    for text in ("The phone of Bob is 7391.", "The pass code of Nobody is 7391.", "Tell me: 7391"):
        assert not judge._value(expect, text)
    for example in said(examples("recall", 200, held=True)):
        answer = tasks.own_answer(example)
        for name in example.expect["about"]:
            if name.lower() in answer.lower():
                assert not tasks.score(example, re.sub(re.escape(name), "nothing", answer, flags=re.I))


def test_an_echo_is_no_answer():
    for name in ("facts", "self"):
        for example in examples(name, 200, held=True):
            assert not tasks.score(example, example.messages[-2]["content"])


def test_what_was_not_said():
    made = examples("recall", 1500)
    unsaid = [example for example in made if example.expect["kind"] == "unsaid"]
    assert 0.05 < len(unsaid) / len(made) < 0.15
    for example in unsaid:
        assert not tasks.score(example, "The pass code of Bob is 1111.")
        assert example.messages[-1]["content"] == recall.NOT_SAID[example.lang == "ko"]
        assert not tasks.score(example, recall.NOT_SAID[example.lang == "en"])
    assert any(len(tasks.render(example)) < 250 for example in unsaid)  # where nothing at all was said


@pytest.mark.parametrize("value, text, right", [
    ("7391", "The pass code is 7391.", True), ("7391", "it is not 7391", False),
    ("7391", "7391 or 8264", False),
    ("7391", "It is 7391.55.", False), ("A-123", "The room is H-A-123-9.", False),
    ("A-123", "방은 A-123입니다.", True),
    ("수미", "이름은 수미입니다.", True), ("수미", "수미라고 합니다", True), ("수미", "제수미란입니다", False),
    ("서울", "서울부터입니다.", False), ("서울", "서울부터 갑니다.", True), ("민수", "민수이며", True),
    ("가나", "가나다라시", False), ("가나", "가나, 다라", True), ("서울", "서울이에요.", True), ("책", "책이었어요", True)])
def test_a_value_has_borders(value, text, right):
    assert judge._value({"value": value, "about": [], "others": []}, text) == right


@pytest.mark.parametrize("text, right", [
    ("The owner is Lucy, and the sender is Freya.", True),
    ("The owner is Freya, and the sender is Lucy.", False),
    ("The owner is not Lucy, and the sender is Freya.", False), ("Lucy, Freya", False),
    ("The owner is Lucy. The owner is Freya. The sender is Freya.", False),
    ("The owner is Lucy, and the sender is Freya. The sender is not Freya.", False)])
def test_results_are_told_with_their_labels(text, right):
    assert judge._values({"values": [("owner", "Lucy"), ("sender", "Freya")]}, text) == right


@pytest.mark.parametrize("text, number, right", [
    ("The answer is 1,068.", 1068, True), ("The answer is 1,068.", 68, False), ("3.5", 5, False),
    ("12 - 19 = -7", -7, True), ("It is 68.0.", 68, True)])
def test_numbers_have_decimals_and_thousands(text, number, right):
    assert judge._number({"number": number}, text) == right


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "NaN", "[Infinity]", "-Infinity"])
def test_what_is_no_json(text):
    with pytest.raises(ValueError):
        judge.strict_json(text)


def test_another_facts_answer_is_wrong():
    known = facts.load_facts()
    for lang in words.LANGUAGES:
        expect = facts.expect_of(known["card-dp4a-why"], lang)
        assert judge._keys(expect, known["card-dp4a-why"].answer[lang])
        for fact in known.values():
            assert fact.id == "card-dp4a-why" or not judge._keys(expect, fact.answer[lang])
            assert judge._keys(facts.expect_of(fact, lang), fact.answer[lang])


@pytest.mark.parametrize("text, right", [
    ("It has 32 lanes.", True), ("It has 132 lanes.", False), ("It has 32.5 lanes.", False),
    ("1,32 lanes", False), ("32", False)])
def test_numbers_in_key_phrases_are_whole(text, right):
    assert judge._keys({"keys": ["32", "lane"]}, text) == right


def test_a_garbled_answer_to_something_else_is_wrong():
    known = facts.load_facts()
    asked, other = (known[id].answer["en"] for id in ("card-dp4a-why", "card-dp4a-what"))
    expect = facts.expect_of(known["card-dp4a-why"], "en")
    keys = " ".join(key.split("|")[0] for key in expect["keys"])
    assert judge._keys(expect, asked.replace("in the time", "within the time"))
    garbled = f"{other} {keys}"
    assert judge._keys({"keys": expect["keys"]}, garbled) and not judge._keys(expect, garbled)


def test_contractions():
    for text, typed in (("I am lost.", "I'm lost."), ("I cannot go on any more.", "I can't go on anymore."),
                        ("What is dp4a?", "What's dp4a?"), ("it does not work", "it doesn't work"),
                        ("This is fine.", "This is fine.")):
        assert facts.contracted(text) == typed


def test_a_tool_without_parameters():
    bare = {"type": "function", "function": {"name": "stop", "description": "Stop."}}
    text = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
    assert tasks.parse_tool_calls(text, [bare])[1] == [{"name": "stop", "arguments": {}}]
    with pytest.raises(ValueError):
        tasks.parse_tool_calls(text.replace("</f", "<parameter=a>\n1\n</parameter>\n</f"), [bare])


@pytest.mark.parametrize("name", [name for name in CHATS if name != "reasoning"])
def test_thinking_is_closed_at_once_where_there_is_nothing_to_think(name):
    made = examples(name, 300)
    thinking = [example for example in made if example.thinking]
    assert 0.12 < len(thinking) / len(made) < 0.28
    assert all(tasks.own_answer(example).startswith("\n</think>\n\n") for example in thinking)


def test_the_last_number_of_a_sum_counts_and_thinking_must_end():
    example = next(example for example in examples("reasoning", 50) if example.thinking)
    result = example.expect["number"]
    assert tasks.score(example, f"1 + 1 = 2\n</think>\n\nThe answer is {result}.")
    assert not tasks.score(example, f"The answer is {result}.")
    assert not tasks.score(example, f"{result}\n</think>\n\nThe answer is {result + 1}.")


def test_fits_agrees_with_jsonschema():
    jsonschema = pytest.importorskip("jsonschema", exc_type=ImportError)
    compared = {True: 0, False: 0}
    for example in examples("json", 40):
        schema, value = example.expect["schema"], example.expect["value"]
        validator = jsonschema.Draft202012Validator(closed(schema))
        for key in value:
            for other in (value[key], "red", 3, 2.5, True, [1], ["a"], {"a": 1}, None):
                candidate = value | {key: other}
                valid = validator.is_valid(candidate)
                assert judge.fits(candidate, schema) == valid
                compared[valid] += 1
    assert min(compared.values()) > 150


def closed(schema: dict) -> dict:
    """The schema with no other properties than its own, as `fits` wants it."""
    if schema["type"] != "object":
        return schema
    properties = {key: closed(inner) for key, inner in schema["properties"].items()}
    return schema | {"properties": properties, "additionalProperties": False}


# ------------------------------------------------------------------------------------------------------
# Tool calls
# ------------------------------------------------------------------------------------------------------

CALL = ("<tool_call>\n<function=book_room>\n<parameter=guest>\nMina\n</parameter>\n"
        "<parameter=nights>\n3\n</parameter>\n</function>\n</tool_call>")


def test_calls_are_parsed_with_the_types_of_the_schema():
    more = '<parameter=tags>\n["a", "나"]\n</parameter>\n<parameter=quiet>\ntrue\n</parameter>\n'
    text = CALL.replace("</function>", more + "</function>")
    before, calls = tasks.parse_tool_calls(f"Wait.\n\n{text}\n{CALL}", [TOOL])
    assert before == "Wait."
    few = {"guest": "Mina", "nights": 3}
    assert calls == [{"name": "book_room", "arguments": few | {"tags": ["a", "나"], "quiet": True}},
                     {"name": "book_room", "arguments": few}]
    assert tasks.parse_tool_calls("Nothing to call.", [TOOL]) == ("Nothing to call.", [])
    lines = CALL.replace("Mina", "two\nlines")
    assert tasks.parse_tool_calls(lines, [TOOL])[1][0]["arguments"]["guest"] == "two\nlines"


@pytest.mark.parametrize("change", [
    ("\n3\n", "\nthree\n"), ("\n3\n", "\n3.5\n"), ("\n3\n", "\ntrue\n"), ("\n3\n", "\n\"3\"\n"),
    ("\nMina\n", "Mina"), ("book_room", "book_rooms"), ("=nights", "=night"), ("=nights", "=guest"),
    ("</function>", ""),
    ("</tool_call>", "</tool_call> Done."), ("</tool_call>", "</tool_call>\n\n"),
    ("<parameter=guest>\nMina\n</parameter>\n", "")])
def test_calls_that_are_not_quite_right_are_refused(change):
    with pytest.raises(ValueError):
        tasks.parse_tool_calls(CALL.replace(*change), [TOOL])


# ------------------------------------------------------------------------------------------------------
# Facts, words, lengths
# ------------------------------------------------------------------------------------------------------


def test_facts_are_answerable():
    known, owner = facts.load_facts(), {}
    for fact in known.values():
        assert set(fact.next) <= set(known), fact.id
        for lang in words.LANGUAGES:
            assert judge._keys({"keys": fact.keys[lang]}, fact.answer[lang]), (fact.id, lang)
            assert len(fact.ask[lang]) >= 3, fact.id
            for question in (*fact.ask[lang], *fact.held[lang]):
                assert owner.setdefault(facts.plain(question), fact.id) == fact.id, question


def test_questions_lose_words_only_where_they_stay_clear():
    fact = next(iter(facts.load_facts().values()))
    unclear = replace(fact, id="another", ask={"en": ["What was it?"], "ko": ["뭐예요?"]})
    rng = random.Random(3)
    assert not facts._is_clear("What was it?", unclear)
    assert all("whatwasit" in facts.plain(facts.vary(rng, "What was it?", unclear, "en")) for _ in range(3))
    assert facts._is_clear(fact.ask["en"][0], fact)
    assert len({facts.vary(rng, fact.ask["en"][0], fact, "en") for _ in range(100)}) > 20


@pytest.mark.parametrize("lang", ["en", "ko"])
@pytest.mark.parametrize("length", [200, 1000, 4000, 16384])
def test_recall_has_the_length_that_is_asked_for(length, lang):
    rng = random.Random(4)
    for _ in range(10):
        example = recall.make(rng, held=True, length=length, lang=lang)
        assert example.lang == lang
        # A control token is one token, and has the letters of three.
        text = re.sub(r"<\|im_(start|end)\|>", "----", tasks.render(example))
        assert 0.8 * length < tasks.estimate_tokens(text) < 1.2 * length + 400


def test_recall_plants_needles_everywhere():
    places = []
    for example in said(examples("recall", 330, length=1000)):
        text = tasks.render(example, for_generation=True)
        places.append(text.index(example.expect["value"]) / len(text))
    assert min(places) < 0.1 and max(places) > 0.9
    assert all(sum(low <= place < low + 0.25 for place in places) > 30 for low in (0, 0.25, 0.5, 0.75))


@pytest.mark.parametrize("n, english, korean", [
    (0, "zero", "영"), (7, "seven", "칠"), (10, "ten", "십"), (19, "nineteen", "십구"), (40, "forty", "사십"),
    (111, "one hundred eleven", "백십일"), (1000, "one thousand", "천"),
    (2026, "two thousand twenty-six", "이천이십육"), (7391, "seven thousand three hundred ninety-one", "칠천삼백구십일"),
    (9999, "nine thousand nine hundred ninety-nine", "구천구백구십구")])
def test_number_words(n, english, korean):
    assert words.english_number(n) == english and words.korean_number(n) == korean


@pytest.mark.parametrize("word, topic, subject, by", [
    ("책", "책은", "책이", "책으로"), ("카드", "카드는", "카드가", "카드로"), ("서울", "서울은", "서울이", "서울로"),
    ("7391", "7391은", "7391이", "7391로"), ("4812", "4812는", "4812가", "4812로"),
    ("320", "320은", "320이", "320으로"), ("GPU", "GPU는", "GPU가", "GPU로"), ("URL", "URL은", "URL이", "URL로")])
def test_particles(word, topic, subject, by):
    word = words.Ko(word)
    assert (f"{word:은}", f"{word:이}", f"{word:으로}", f"{word}") == (topic, subject, by, str(word))


def test_heldout_text_is_of_all_tasks():
    text = tasks.heldout_text(random.Random(5), 120_000)
    assert 120_000 < tasks.estimate_tokens(text) < 122_000
    for sign in ("<tool_call>", "<|endoftext|>", "<think>\n\n</think>", '{"type"', "니다."):
        assert sign in text


# ------------------------------------------------------------------------------------------------------
# The same examples everywhere, and fast
# ------------------------------------------------------------------------------------------------------

def digest() -> str:
    rng = random.Random(6)
    return hashlib.sha256("".join(tasks.render(tasks.sample(rng)) for _ in range(200)).encode()).hexdigest()


DIGEST = "import hashlib, random\nfrom models import tasks\n" + inspect.getsource(digest) + "print(digest())"


def test_the_same_seed_gives_the_same_examples():
    for seed in "12":  # of Python's own hashes, which order sets
        there = subprocess.run([sys.executable, "-c", DIGEST], capture_output=True, text=True, check=True,
                               cwd=TEMPLATE.parent.parent, env={"PYTHONHASHSEED": seed})
        assert there.stdout.strip() == digest()


def test_a_core_makes_thousands_of_short_examples_a_second():
    """Of this process, by its own time: other work on the machine does not count."""
    rng = random.Random(7)
    start = time.thread_time()
    for _ in range(1000):
        tasks.render(tasks.sample(rng, length=200))
    assert time.thread_time() - start < 1  # about 0.25 s where this was written


# ------------------------------------------------------------------------------------------------------
# The chat template
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHATS)
def test_qengine_renders_examples_to_the_same_text(name):
    for example in examples(name, 60):
        for messages, prompt in ((example.messages, False), (example.messages[:-1], True)):
            assert tasks.render(example, prompt) == render(
                messages, tools=example.tools, enable_thinking=example.thinking, add_generation_prompt=prompt)


USER = {"role": "user", "content": "Hi"}


def test_thinking_is_off_unless_asked_for():
    start = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert render([USER]) == render([USER], enable_thinking=False) == start + "\n</think>\n\n"
    assert render([USER], enable_thinking=True) == start
    assert render([USER], add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_only_the_last_answer_keeps_its_thoughts():
    thought = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    within = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}
    for first in (thought, within):
        text = render([USER, first, USER, thought], add_generation_prompt=False)
        assert text == ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
                        "<|im_start|>user\nHi<|im_end|>\n"
                        "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nYes.<|im_end|>\n")


def test_the_system_message_comes_after_the_tools():
    system = {"role": "system", "content": " Be brief. "}
    assert render([system, USER]).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi")
    text = render([system, USER], tools=[TOOL])
    tool = json.dumps(TOOL, ensure_ascii=False)
    assert text.startswith(f"<|im_start|>system\n<tools>\n{tool}\n</tools>\nTo use a tool")
    assert "</tool_call>\n\nBe brief.<|im_end|>\n<|im_start|>user\nHi" in text


def test_calls_and_results():
    call = {"type": "function", "function": {"name": "book_room", "arguments": {
        "guest": "미나", "nights": 3, "price": 2.5, "quiet": True, "tags": ["가", "b"]}}}
    messages = [USER, {"role": "assistant", "content": "Wait.", "tool_calls": [call, call]},
                {"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
    text = render(messages, tools=[TOOL])
    body = ("<tool_call>\n<function=book_room>\n<parameter=guest>\n미나\n</parameter>\n"
            "<parameter=nights>\n3\n</parameter>\n<parameter=price>\n2.5\n</parameter>\n"
            "<parameter=quiet>\ntrue\n</parameter>\n"
            '<parameter=tags>\n["가", "b"]\n</parameter>\n</function>\n</tool_call>')
    assert text.endswith(
        f"<|im_start|>assistant\n<think>\n\n</think>\n\nWait.\n\n{body}\n{body}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n"
        "<tool_response>\ntwo\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert tasks.parse_tool_calls(f"{body}\n{body}", [TOOL])[1] == [
        {"name": "book_room", "arguments": call["function"]["arguments"]}] * 2
    plain = {"role": "assistant", "content": None, "tool_calls": [
        {"function": {"name": "stop", "arguments": None}}]}
    call = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
    assert f"</think>\n\n{call}<|im_end|>" in render([USER, plain])


def template() -> jinja2.Template:
    """The bare template: qengine itself takes only text."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = to_json
    return environment.from_string(TEMPLATE.read_text("utf-8"))


def test_pictures_and_videos_become_their_tokens():
    parts = [{"type": "text", "text": "See "}, {"type": "image_url", "image_url": {"url": "a"}},
             {"type": "video"}, {"type": "image"}, {"type": "text", "text": "."}]
    messages = [{"role": "user", "content": parts}]
    image, video = (f"<|vision_start|><|{tag}_pad|><|vision_end|>" for tag in ("image", "video"))
    assert template().render(messages=messages) == f"<|im_start|>user\nSee {image}{video}{image}.<|im_end|>\n"
    assert template().render(messages=messages, add_vision_id=True) == (
        f"<|im_start|>user\nSee Picture 1: {image}Video 1: {video}Picture 2: {image}.<|im_end|>\n")


@pytest.mark.parametrize("messages, complaint", [
    ([], "no messages"), ([{"role": "system", "content": "x"}], "asks anything"),
    ([USER, {"role": "system", "content": "x"}], "must be the first"),
    ([USER, {"role": "root", "content": "x"}], "role"), ([{"role": "user", "content": 3}], "text or a list"),
    ([{"role": "user", "content": [{"type": "sound"}]}], "neither"),
    ([{"role": "system", "content": [{"type": "image"}]}, USER], "cannot hold images")])
def test_what_the_template_refuses(messages, complaint):
    with pytest.raises(jinja2.TemplateError, match=complaint):
        template().render(messages=messages)


def test_the_template_behaves_as_the_familys():
    """The same structure, thinking aside: only the text about tools and how booleans are written differ."""
    theirs = ChatTemplate(oracle_path("templates/Qwen3.5-4B.jinja").read_text("utf-8"))
    for name in CHATS:
        for example in examples(name, 40):
            if not example.tools:
                for prompt in (False, True):
                    messages = example.messages[:-1] if prompt else example.messages
                    assert tasks.render(example, prompt) == theirs.render(
                        messages, enable_thinking=example.thinking, add_generation_prompt=prompt)
