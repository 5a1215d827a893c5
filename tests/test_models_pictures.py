"""The pictures that the small model learns from: that they show what is said of them, and that nothing held out is
trained on."""

import hashlib
import inspect
import pickle
import random
import re
import string
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from models import tasks
from models.tasks import facts, judge, pictures, recall
from models.tasks.example import text_of
from models.tasks.pictures import canvas, charts, labels, plots, shapes, writing
from models.tasks.pictures.labels import FACTS
from models.tasks.pictures.questions import UNSEEN, Words, texts
from models.tasks.wide.besides import SEES, Besides
from models.tasks.words import LANGUAGES, Draw

KINDS = [kind for kind, table in texts().items() if "en" in table and "ask" in table["en"]]
IN_TRAINING_ALONE = ("colours_of", "shapes_of")      # kinds that are never judged, so that no wording is held out
MAKERS = [make for _, make in pictures.SCENES]
NOTED = [text for side in recall.NOTED for text in side]


@cache
def examples(held: bool, n: int = 600, seed: int = 1) -> list:
    rng = random.Random(seed)
    return [pictures.make(rng, held) for _ in range(n)]


@cache
def scenes(number: int, n: int = 40, held: bool = False) -> list:
    rng = random.Random(number)
    return [MAKERS[number](Draw(rng, held)) for _ in range(n)]


def look(height: int = 256, width: int = 256, dark: bool = False, seed: int = 0) -> canvas.Look:
    return canvas.Look(height, width, dark, seed)


# ------------------------------------------------------------------------------------------------------
# Wordings
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_question_has_many_wordings(kind, lang):
    table = texts()[kind][lang]
    held = table.get("held", ())
    assert len(set(table["ask"])) == len(table["ask"]) >= 12 and len(set(held)) == len(held)
    assert len(held) >= 3 or kind in IN_TRAINING_ALONE
    assert not {wording.lower() for wording in held} & {wording.lower() for wording in table["ask"]}
    assert {"short", "sentence"} <= set(table)


@cache
def asked(held_words: bool) -> dict:
    """(kind, language) -> questions of many scenes, in words."""
    rng, found = random.Random(4), {}
    for number in range(len(MAKERS)):
        for scene in scenes(number):
            for lang in LANGUAGES:
                found_here = pictures.questions(scene, rng, lang)
                if isinstance(scene, shapes.Shapes) and not held_words:
                    found_here += scene.several(lang)
                for question in found_here:
                    texts = found.setdefault((question.kind, lang), [])
                    texts += [(question, question.ask(rng, lang, held_words)) for _ in range(4)]
    return found


def test_every_kind_of_question_is_asked_in_both_languages():
    assert {kind for kind, _ in asked(False)} == set(KINDS) and len(asked(False)) == 2 * len(KINDS)


@pytest.mark.parametrize("kind, lang", [(kind, lang) for kind in KINDS for lang in LANGUAGES])
def test_every_wording_can_be_filled(kind, lang):
    table = texts()[kind][lang]
    for question, _ in asked(False)[kind, lang][:40]:
        more = *table.get("held", ()), *table.get("then", ())
        for wording in [*table["ask"], *more, table["short"], table["sentence"]]:
            slots = {name for _, name, _, _ in string.Formatter().parse(wording) if name}
            assert question.answer or slots <= set(question.slots), wording
            if slots <= set(question.slots):
                assert "{" not in question._fill(wording, lang)


def test_held_wordings_are_never_asked_in_training():
    trained = {text for texts in asked(False).values() for _, text in texts}
    held = {text for texts in asked(True).values() for _, text in texts}
    assert len(held) > 500 and not held & trained


def test_a_second_question_of_a_kind_may_be_a_follow_up():
    """Of such wordings at least one is not asked first."""
    for kind in KINDS:
        for lang in LANGUAGES:
            then = texts()[kind][lang].get("then")
            assert then is None or set(then) - set(texts()[kind][lang]["ask"])
    followed = [message["content"] for example in examples(False) for message in example.messages
                if message["role"] == "user" and isinstance(message["content"], str)]
    assert sum(text.startswith(("And ", "and ", "What about ", "그럼 ", "그리고 ")) for text in followed) > 40


# ------------------------------------------------------------------------------------------------------
# Answers and their judge
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, lang", [(kind, lang) for kind in KINDS for lang in LANGUAGES])
def test_own_answers_are_right_in_either_form_and_those_to_others_are_not(kind, lang):
    """Another answer is wrong unless it says the same."""
    questions = [question for question, _ in asked(False)[kind, lang][::4]][:120]
    compared = 0
    for question, other in zip(questions, questions[1:] + questions[:1]):
        expect = question.expect(lang)
        judged = judge._JUDGES[expect["kind"]]
        for whole in (False, True):
            answer = question.say(lang, whole)
            assert judged(expect, answer), (answer, expect)
            assert not judged(expect, "")
            told = other.say(lang, whole)
            if told != answer and other.answer == question.answer is None and told not in question.say(lang, True):
                same = all(getattr(other, fact) == getattr(question, fact) for fact in ("right", "read", "number"))
                assert same or not judged(expect, told), (told, expect)
                compared += not same
    assert compared > 3 or kind == "kind"


@pytest.mark.parametrize("right, wrong, text, is_right", [
    ([["red"]], ["blue"], "Red.", True), ([["red"]], ["blue"], "The circle is red.", True),
    ([["red"]], ["blue"], "Blue.", False), ([["red"]], ["blue"], "Red and blue.", False),
    ([["red"]], [], "Bored.", False),
    ([["gray", "grey"]], ["red"], "grey", True),
    ([["top"]], ["top left", "left"], "At the top.", True), ([["top"]], ["top left", "left"], "Top left.", False),
    ([["top left", "upper left"]], ["top", "left"], "In the top left corner.", True),
    ([["top left", "upper left"]], ["top", "left"], "On the left.", False),
    ([["왼쪽"]], ["왼쪽 위", "위쪽"], "왼쪽 위", False), ([["왼쪽 위"]], ["왼쪽", "위쪽"], "왼쪽 위에 있습니다.", True),
    ([["빨간색", "빨강"]], ["파란색"], "원은 빨간색입니다.", True), ([["원"]], ["타원"], "타원", False),
    ([["red circle"], ["blue star"]], [], "A blue star and a red circle.", True),
    ([["2 red circles"]], [], "12 red circles", False), ([["red circle"], ["red star"]], [], "A red circle.", False),
    ([["A"]], ["B"], "A", True), ([["A"]], ["B"], "The longest bar is A.", True), ([["B"]], ["A"], "a B", True),
    ([["more red shapes", "more red"]], ["more blue shapes"], "There are more red shapes than blue shapes.", True),
    ([["more red shapes", "more red"]], ["more blue shapes"], "There are more blue shapes than red shapes.", False),
    ([["No"]], ["yes"], "No, there is no star.", True), ([["Yes"]], ["no"], "No.", False),
    ([["네"]], ["아니요"], "네, 원이 있습니다.", True), ([["네"]], ["아니요"], "네모", False)])
def test_what_is_seen_must_be_said_and_nothing_else(right, wrong, text, is_right):
    assert judge._seen({"right": right, "wrong": wrong}, text) == is_right


@pytest.mark.parametrize("word, text, is_right", [
    ("Kiwi", "Kiwi", True), ("Kiwi", "The word is Kiwi.", True), ("Kiwi", 'It says "Kiwi".', True),
    ("Kiwi", "kiwi", False), ("Kiwi", "Kiwis", False), ("Kiwi", "A Kiwi", False), ("Kiwi", "단어는 Kiwi입니다.", True),
    ("407", "The number is 407.", True), ("407", "4071", False), ("407", "1407", False),
    ("407", "The number is 1 407.", False), ("a, b", "a, b", True), ("a, b", "b, a", False), ("b", "a, b", False),
    ("407", "숫자는 407입니다.", True), ("407", "숫자는 4 407입니다.", False)])
def test_text_is_read_letter_by_letter(word, text, is_right):
    assert judge._read({"text": word}, text) == is_right


def test_sections_ask_what_they_are_named_for():
    for name, make in tasks.SIGHT.items():
        rng, langs = random.Random(name), Counter()
        for _ in range(60):
            example = make(rng, True)
            langs[example.lang] += 1
            assert len(example.pictures) == 1 and example.contents and all(map(tasks.is_held, example.contents))
            assert tasks.score(example, tasks.own_answer(example)) and not tasks.score(example, "")
        assert min(langs.values()) > 15
    rng = random.Random(5)
    counts = [pictures.SECTIONS["pictures, count to six"](rng, True).expect["number"] for _ in range(200)]
    assert set(counts) >= set(range(1, 7)) and max(counts) <= 6


def test_no_answer_of_a_section_can_be_guessed():
    """Whoever says the most frequent answer is right less than half of the time."""
    for name, make in tasks.SIGHT.items():
        rng = random.Random(name)
        made = [make(rng, True) for _ in range(150)]
        answer, _ = Counter(example.messages[-1]["content"] for example in made).most_common(1)[0]
        assert sum(tasks.score(example, answer) for example in made) < 75, (name, answer)


# ------------------------------------------------------------------------------------------------------
# Conversations
# ------------------------------------------------------------------------------------------------------


def test_there_is_a_picture_for_each_place_of_one():
    numbers = Counter()
    for example in examples(False):
        parts = [part for message in example.messages if isinstance(message["content"], list)
                 for part in message["content"]]
        assert sum(part == {"type": "image"} for part in parts) == len(example.pictures)
        assert tasks.render(example).count("<|image_pad|>") == len(example.pictures)
        numbers[len(example.pictures)] += 1
    assert set(numbers) == {0, 1, 2} and numbers[1] > 450


def test_who_asks_about_no_picture_hears_that_there_is_none():
    blind = [example for example in examples(False, 1500) if not example.pictures]
    assert 30 < len(blind) < 120
    for example in blind:
        assert len(example.messages) == 2 and UNSEEN[example.lang][0] in example.messages[-1]["content"]
        assert tasks.score(example, tasks.own_answer(example)) and not tasks.score(example, "A red circle.")


def test_conversations_have_one_question_or_several():
    asked = [sum(message["role"] == "user" for message in example.messages) for example in examples(False)]
    assert asked.count(1) > 100 and sum(n > 2 for n in asked) > 150 and max(asked) > 6
    roles = {tuple(message["role"] for message in example.messages if message["role"] != "system")[:2]
             for example in examples(False)}
    assert roles == {("user", "assistant")}


@cache
def with_turns_besides() -> list[tuple]:
    """(example, its turns about other things) of all training examples of 2,000 that have any."""
    made, rng, turn = [], random.Random(3), Besides.turn

    def recorded(self, spelled):
        made[-1][1].append(turn(self, spelled))
        return made[-1][1][-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Besides, "turn", recorded)
        for _ in range(2000):
            made.append([None, []])
            made[-1][0] = pictures.make(rng)
    return [(example, turns) for example, turns in made if turns]


def said_in(example) -> list[str]:
    return [text_of(message["content"]) for message in example.messages if message["role"] != "system"]


def test_after_a_picture_other_things_are_asked_too():
    """At the end, where an answer is generated, and before more questions about the picture."""
    last, langs = Counter(), Counter()
    assert 400 < len(with_turns_besides()) < 600
    for example, turns in with_turns_besides():
        said = said_in(example)
        pairs = list(zip(said[::2], said[1::2], strict=True))
        assert all(turn[:2] in pairs for turn in turns)
        ends = pairs[-1] == turns[-1][:2]
        last[ends] += 1
        langs[example.lang] += 1
        if ends:
            assert example.expect == turns[-1][2] and tasks.score(example, tasks.own_answer(example))
            assert example.expect["kind"] != "number" or not example.thinking     # a sum without thoughts
    assert last[True] > 2 * last[False] > 100 and min(langs.values()) > 150


def test_what_is_asked_after_a_picture_is_of_all_kinds():
    turns = [turn for _, some in with_turns_besides() for turn in some]
    ids = {fact.answer[lang]: fact.id for fact in facts.load_facts().values() for lang in LANGUAGES}
    told = Counter(ids.get(answer) for _, answer, _ in turns)
    kinds = Counter(expect["kind"] for *_, expect in turns)
    assert len(told) > 200 and min(told["self-hello"], told["self-who"]) > 10
    assert SEES in ids.values() and not told[SEES]      # that may be asked of the picture at hand
    assert min(kinds[kind] for kind in ("keys", "number", "value", "exact")) > 60


def test_a_turn_besides_has_nothing_that_is_read_from_the_picture():
    """Else a word of its answer would be spelled in letters that nobody reads."""
    read = [(example, turns) for example, turns in with_turns_besides()
            if len(example.pictures) == 1 and example.spelled]
    assert len(read) > 50
    for example, turns in read:
        assert not any(text in said for *both, _ in turns for said in both for text in example.spelled)


def test_what_the_user_told_after_a_picture_is_asked_for_later():
    """And before anything else is told, which could be about the same."""
    n = 0
    for _, turns in with_turns_besides():
        kinds = ["told" if answer in NOTED else "asked" for _, answer, expect in turns
                 if answer in NOTED or expect["kind"] == "value"]
        assert kinds == ["told", "asked"] * (len(kinds) // 2) + ["told"] * (len(kinds) % 2)
        n += kinds.count("asked")
    assert n > 60


def test_a_held_out_question_comes_after_a_picture():
    rng, about = random.Random(3), Counter()
    own = {fact.answer[lang]: fact.id.startswith(facts.SELF) for fact in facts.load_facts().values()
           for lang in LANGUAGES}
    for _ in range(200):
        example = tasks.LATER["facts, after a picture"](rng, True)
        assert facts.plain(example.messages[-2]["content"]) in facts.held_questions()
        assert len(example.pictures) == 1 and example.contents and all(map(tasks.is_held, example.contents))
        assert 4 <= len(said_in(example)) <= 8 and not tasks.score(example, "A blue star and 3 red circles.")
        about[own[example.expect["answer"]]] += 1
    assert min(about[True], about[False]) > 60


# ------------------------------------------------------------------------------------------------------
# Held out
# ------------------------------------------------------------------------------------------------------


def test_no_scene_of_a_held_out_example_is_drawn_in_training():
    trained, held = (
        {scene.content for example in examples(side, 1500) for scene in example.pictures if hasattr(scene, "content")}
        for side in (False, True))
    assert len(trained) > 900 and len(held) > 900 and not trained & held
    assert not any(map(tasks.is_held, trained)) and all(map(tasks.is_held, held))


def test_no_text_of_a_held_out_picture_is_drawn_in_training():
    def texts_of(side):
        return {line.text.lower() for example in examples(side, 1500) for scene in example.pictures
                if isinstance(scene, writing.Writing) for line in scene.lines if len(line.text) > 1}
    assert len(texts_of(False)) > 300 and len(texts_of(True)) > 300 and not texts_of(False) & texts_of(True)


# ------------------------------------------------------------------------------------------------------
# Pixels
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(MAKERS)))
@pytest.mark.parametrize("held", [False, True])
def test_scenes_become_pixels(number, held):
    for scene in scenes(number, held=held):
        pixels = scene.draw()
        height, width = scene.size
        assert pixels.shape == (height, width, 3) and pixels.dtype == np.uint8
        assert height % canvas.BLOCK == width % canvas.BLOCK == 0
        assert 128 <= min(height, width) <= max(height, width) <= 384
        assert (pixels == pickle.loads(pickle.dumps(scene)).draw()).all()
        assert len(pickle.dumps(scene)) < 3000
        assert np.ptp(pixels.astype(int), axis=(0, 1)).max() > 60    # something is on it


def test_most_pictures_are_of_256_by_256_pixels():
    sizes = Counter(scene.size for example in examples(False) for scene in example.pictures)
    assert sizes[256, 256] > 0.5 * sizes.total() and len(sizes) > 20


@pytest.mark.parametrize("dark", [False, True])
def test_every_colour_is_nearest_to_its_own_name(dark):
    """By hue, saturation and value all tones of a name lie nearer to the name's middle than to any other name's."""
    rng = random.Random(3)
    names = canvas.colours_on(dark)
    middles = {name: np.mean([canvas.tint(rng, name) for _ in range(200)], axis=0) for name in names}
    right = sum(name == min(names, key=lambda other: np.abs(np.array(tone) - middles[other]).sum())
                for name in names for tone in [canvas.tint(rng, name) for _ in range(100)])
    assert right > 98 * len(names)


@pytest.mark.parametrize("name", [name for name in canvas.COLOURS if name not in canvas.UNSEEN[False]])
@pytest.mark.parametrize("hollow", [False, True])
def test_a_shape_is_where_it_is_said_to_be_in_its_colour(name, hollow):
    rng = random.Random(name)
    for seed in range(8):
        shape = rng.choice(shapes.NAMES)
        thing = shapes.Thing(name, shape, rng.choice((0.2, 0.5, 0.8)), rng.choice((0.2, 0.5, 0.8)), 0.14, 0.0)
        scene = shapes.Shapes(look(seed=seed), (thing,), hollow)
        pixels, ground = scene.draw().astype(int), shapes.Shapes(look(seed=seed), (), hollow)
        empty = ground.draw().astype(int)
        where = np.argwhere(np.abs(pixels - empty).sum(axis=2) > 60)
        middle = (where.min(axis=0) + where.max(axis=0)) / 2 / 256
        assert np.abs(middle - (thing.y, thing.x)).max() < 0.06
        tone = np.median(pixels[tuple(where.T)], axis=0)
        middles = {other: np.mean([canvas.tint(rng, other) for _ in range(99)], axis=0) for other in canvas.COLOURS}
        assert min(middles, key=lambda other: np.abs(tone - middles[other]).sum()) == name


def test_no_shape_is_cut_off_or_touches_another():
    for number in range(3):
        for scene in scenes(number, 150):
            unit = min(scene.size)
            height, width = scene.size
            for thing in scene.things:
                reach = 1.2 * thing.size * unit
                assert reach <= width * thing.x <= width - reach and reach <= height * thing.y <= height - reach
            for a in scene.things:
                for b in scene.things:
                    apart = np.hypot(width * (a.x - b.x), height * (a.y - b.y))
                    assert a is b or apart > 0.8 * (a.size + b.size) * 1.2 * unit


def test_outlines_have_one_area_and_are_all_different():
    outlines = {name: np.array(shapes.outline(name)) for name in shapes.NAMES}
    for points in outlines.values():
        x, y = points.T
        area = abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2
        assert 0.6 * np.pi * 0.64 < area < 1.001 * np.pi * 0.64 and np.hypot(x, y).max() < 1.2001
    assert len({points.tobytes() for points in outlines.values()}) == len(shapes.NAMES) >= 8


def test_text_is_not_too_small_and_fits():
    for number in (3, 4, 5):
        for scene in scenes(number):
            margin = 0.04 * min(scene.size)
            widest = max(canvas.text_size(line.text, scene.height, scene.font)[0] for line in scene.lines)
            by = min(1, (scene.size[1] - 2 * margin - 8 - 0.4 * abs(scene.turn)) / widest)
            assert by * scene.height >= 17, scene


def test_a_chart_is_as_its_values_say():
    """The longest bar of the pixels is that of the largest value."""
    for scene in scenes(6, 60):
        if scene.lying or len(set(scene.colours)) > 1 or scene.colours[0] in ("black", "gray", "white", "brown"):
            continue
        pixels = scene.draw().astype(int)
        coloured = (pixels.max(axis=2) - pixels.min(axis=2)) > 70
        columns = coloured.sum(axis=0)
        parts = np.array_split(columns[columns.nonzero()[0][0]:columns.nonzero()[0][-1] + 1], len(scene.values))
        assert np.argmax([part.max() for part in parts]) == np.argmax(scene.values)


def test_labels_side_by_side_do_not_touch():
    """Labels that run into each other are read as one, by people too."""
    found = 0
    for scene in scenes(6, 300):
        if not scene.lying:
            notes = [note for note in scene.paint().notes if isinstance(note, canvas.Text)]
            ends = [(note.middles[0][0] - note.middles[0][2], note.middles[-1][0] + note.middles[-1][2])
                    for note in notes if note.facts["role"] == "label"]
            assert all(end + 2 < start for (_, end), (start, _) in zip(ends, ends[1:])), scene
            found += max(map(len, scene.labels)) > 2
    assert found > 40


def test_mixed_shapes_are_of_several_kinds():
    numbers = Counter()
    for scene in scenes(10, 100):
        kinds = Counter((thing.colour, thing.shape) for thing in scene.things)
        assert 3 <= len(kinds) <= 6 and 4 <= len(scene.things) <= shapes.MOST
        numbers[max(kinds.values())] += 1
    assert numbers[1] < 30 and max(numbers) >= 4


def test_values_that_are_asked_for_can_be_read():
    for scene in scenes(6, 100):
        questions = [question for question in scene.questions(random.Random(1), "en") if question.kind == "value"
                     and not question.answer]
        assert bool(questions) == (scene.written or scene.axis)
        step = scene.top // charts.TICKS
        assert scene.written or not scene.axis or all(value % step == 0 for value in scene.values)
        ordered = sorted(scene.values)
        assert min(ordered[1] - ordered[0], ordered[-1] - ordered[-2]) >= charts.LEAST_GAP * scene.top


def test_bars_of_a_timeline_are_apart():
    for scene in scenes(7, 100):
        for row in scene.rows:
            times = [time for span in row for time in span]
            assert times == sorted(times) and times[0] >= 0 and times[-1] <= plots.STEPS
            assert all(end - start >= 3 for start, end in row)
            assert all(start - end >= 2 for (_, end), (start, _) in zip(row, row[1:]))


def test_kernels_lie_clearly_under_one_roof():
    sides = Counter()
    for scene in scenes(8, 200):
        corners = [height - scene.slope for _, height in scene.roofs]
        for _, x, y in scene.kernels:
            assert all(abs(x - corner) >= 7 for corner in corners) and y <= min(x + scene.slope, scene.roofs[0][1])
            assert (x < min(corners)) or (x > max(corners))
            sides[x < min(corners)] += 1
    assert min(sides.values()) > 0.25 * sides.total()


# ------------------------------------------------------------------------------------------------------
# What is told of a scene
# ------------------------------------------------------------------------------------------------------


def answers(scene, kind: str, lang: str = "en", seed: int = 0) -> dict:
    """Question -> answer of this kind, of several draws."""
    rng = random.Random(seed)
    return {question._fill(texts()[kind][lang]["ask"][0], lang): question.say(lang)
            for _ in range(20) for question in scene.questions(rng, lang) if question.kind == kind}


def scene_of(*things) -> shapes.Shapes:
    return shapes.Shapes(look(), tuple(shapes.Thing(*thing, 0) for thing in things), False)


THREE = scene_of(("red", "circle", 0.17, 0.17, 0.1), ("blue", "star", 0.83, 0.5, 0.07),
                 ("red", "star", 0.5, 0.83, 0.13))


def test_what_is_told_of_shapes():
    assert answers(THREE, "colour").items() >= {("What colour is the circle?", "Red.")}
    assert "What colour is the star?" not in answers(THREE, "colour")
    assert answers(THREE, "which") == {"Which shape is blue?": "The star."}
    counted = answers(THREE, "count")
    assert counted.items() >= {("How many stars are there?", "2"), ("How many red shapes are there?", "2"),
                               ("How many shapes are there?", "3"), ("How many red stars are there?", "1")}
    assert answers(THREE, "where").items() >= {("Where is the circle?", "In the top left corner."),
                                               ("Where is the blue shape?", "On the right.")}
    assert answers(THREE, "at")["What is at the bottom?"] == "A red star."
    assert answers(THREE, "size") == {"Which shape is the smallest?": "The blue star."}
    assert answers(THREE, "everything") == {"What do you see?": "A red circle, a red star and a blue star."}
    more = answers(THREE, "more")
    assert set(more.values()) == {"More red shapes.", "More stars."} and len(more) == 4
    sides = answers(THREE, "side")
    assert all("left" in answer for asked, answer in sides.items() if re.match("Is the circle .*(left|right)", asked))
    assert any("left" in answer for answer in sides.values())


def test_what_is_told_of_shapes_in_korean():
    assert answers(THREE, "colour", "ko")["원은 무슨 색이야?"] == "빨간색"
    assert answers(THREE, "count", "ko")["별은 몇 개야?"] == "2개"
    assert answers(THREE, "everything", "ko") == {"뭐가 보여?": "빨간색 원 1개, 빨간색 별 1개, 파란색 별 1개"}
    assert answers(THREE, "where", "ko")["원은 어디에 있어?"] == "왼쪽 위"


def test_what_is_told_of_text():
    scene = writing.Writing(look(), (writing.Line("407", "red"),), "sans", 40, 0, 0.5, 0.5, None)
    assert answers(scene, "number") == {"What number is this?": "407"}
    assert answers(scene, "length") == {"How many digits does it have?": "3"}
    assert answers(scene, "nth") == {f"What is the {nth} digit?": digit for nth, digit in zip(
        ("first", "second", "last"), "407")}
    assert answers(scene, "ink") == {"What colour is the number?": "Red."}
    lines = tuple(writing.Line(*line) for line in (("kiwi", "red"), ("LAMP", "blue")))
    scene = writing.Writing(look(), lines, "sans", 40, 0, 0.5, 0.5, None)
    assert answers(scene, "words") == {"What does it say?": "kiwi, LAMP"}
    assert answers(scene, "line").items() >= {("What is the last word?", "LAMP"), ("What is the first word?", "kiwi")}
    assert answers(scene, "tinted") == {"Which word is red?": "kiwi", "Which word is blue?": "LAMP"}


def test_what_is_told_of_charts():
    scene = charts.Chart(look(), ("A", "B", "C"), (7, 2, 10), 10, ("red", "blue", "green"), False, True, False, "Rain")
    assert answers(scene, "bars") == {"How many bars are there?": "3"}
    assert set(answers(scene, "top").values()) == {"C", "B"}
    assert answers(scene, "value").items() >= {("What is the value of A?", "7"), ("What is the value of C?", "10")}
    assert answers(scene, "title") == {"What is the title of the chart?": "Rain"}
    assert answers(scene, "labels") == {"Read the labels from left to right.": "A, B, C"}
    assert answers(scene, "bar_at") == {f"What is the {nth} bar called?": label for nth, label in zip(
        ("first", "second", "third", "last"), "ABCC")}
    assert answers(scene, "colour")["What colour is the bar B?"] == "Blue."
    higher = answers(scene, "higher")
    assert higher["Which is higher, A or C?"] == "C" == higher["Which is larger, C or B?"]


def test_what_is_told_of_plots():
    scene = plots.Timeline(look(), ("card A", "card B"), (((0, 10), (12, 30)), ((5, 45),)))
    ends = answers(scene, "ends", seed=2)
    assert ends["Which card finishes last?"] == ends["Which card is busy most?"] == "card B"
    assert ends["Which card starts first?"] == ends["Which card is idle most?"] == "card A"
    assert answers(scene, "rows") == {"How many cards are there?": "2"}
    assert answers(scene, "passes")["How many bars does card A have?"] == "2"
    scene = plots.Roofline(look(), 20, (("dp4a", 80), ("fp32", 60)), (("A", 20, 40), ("B", 80, 60)))
    assert set(answers(scene, "bound").values()) == {"Memory.", "Compute."}
    assert answers(scene, "bound_by") == {"Which kernel is bound by memory?": "A",
                                          "Which kernel is bound by compute?": "B"}
    assert answers(scene, "roof") == {"Which is the highest roof?": "dp4a", "Which is the lowest roof?": "fp32"}


def test_names_have_both_languages():
    for lang in LANGUAGES:
        words = Words(lang)
        for table, names in (("colours", canvas.COLOURS), ("shapes", shapes.NAMES)):
            every = [word for name in names for word in words.all(table, name)]
            assert len(set(every)) == len(every) and set(texts()[table]) == set(names)


# ------------------------------------------------------------------------------------------------------
# The same pictures everywhere
# ------------------------------------------------------------------------------------------------------


def digest() -> str:
    rng, found = random.Random(6), hashlib.sha256()
    for _ in range(60):
        example = pictures.make(rng)
        found.update(tasks.render(example).encode())
        for scene in example.pictures:
            found.update(scene.draw().tobytes())
    return found.hexdigest()


DIGEST = ("import hashlib, random\nfrom models import tasks\nfrom models.tasks import pictures\n"
          + inspect.getsource(digest) + "print(digest())")


def test_the_same_seed_gives_the_same_pictures():
    there = subprocess.run([sys.executable, "-c", DIGEST], capture_output=True, text=True, check=True,
                           cwd=Path(tasks.__file__).parents[2], env={"PYTHONHASHSEED": "1"})
    assert there.stdout.strip() == digest()


def test_a_message_of_a_picture_has_its_question():
    for example in examples(True):
        for message in example.messages:
            if isinstance(message["content"], list):
                assert text_of(message["content"]).strip() and len(message["content"]) == 2


def test_the_sheet_is_drawn(tmp_path):
    out = tmp_path / "sheet.png"
    subprocess.run([sys.executable, "-m", "models.tasks.pictures", str(out)], check=True,
                   cwd=Path(tasks.__file__).parents[2])
    assert out.stat().st_size > 100_000


# ------------------------------------------------------------------------------------------------------
# Labels
# ------------------------------------------------------------------------------------------------------


def told(scene) -> list[dict]:
    """Of each block of a scene what its labels say."""
    pixels, table = pictures.labelled(scene)
    assert np.array_equal(pixels, scene.draw()) and table.shape == (pixels.size // 3 // 32 ** 2, len(FACTS))
    return [{fact: values[label - 1] for (fact, values), label in zip(FACTS.items(), row) if label} for row in table]


def read_of(blocks: list[dict], **facts) -> str:
    """The text whose letters are in the blocks that say this."""
    letters = {}
    for block in blocks:
        if facts.items() <= block.items():
            for place in range(labels.PLACES):
                if f"letter{place}" in block:
                    number = place + labels.PLACES * block[f"group{place}"]
                    letters.setdefault(number, set()).add(block[f"letter{place}"])
    assert all(len(each) == 1 for each in letters.values()) and sorted(letters) == list(range(len(letters)))
    return "".join(letters[i].pop() for i in range(len(letters)))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_labels_say_of_each_thing_what_it_is_and_how_many_are_like_it(number):
    for scene in scenes(number, 30):
        blocks, n = told(scene), len(scene.things)
        middles = [block for block in blocks if block.get("middle")]
        assert n - 1 <= len(middles) <= n       # two of them may share a block
        kinds = Counter((thing.colour, thing.shape) for thing in scene.things)
        for block in middles:
            kind = block["colour"], block["shape"]
            assert block["all"] == n and block["alike"] == kinds[kind]
            assert block["of_colour"] == sum(times for (colour, _), times in kinds.items() if colour == kind[0])
            assert block["of_shape"] == sum(times for (_, shape), times in kinds.items() if shape == kind[1])
        assert {(block["colour"], block["shape"]) for block in blocks if block} == set(kinds)


def test_labels_say_where_a_thing_is():
    thing = shapes.Thing("red", "circle", 0.8, 0.2, 0.1, 0)
    blocks = told(shapes.Shapes(look(256, 320), (thing,), False))
    shown = [divmod(i, 10) for i, block in enumerate(blocks) if block]
    assert [divmod(i, 10) for i, block in enumerate(blocks) if block.get("middle")] == [(1, 8)]
    assert (1, 8) in shown and len(shown) in range(4, 10)
    assert all(abs(row - 1) < 2 > abs(column - 8) for row, column in shown)
    assert blocks[18]["cell"] == (2, 0)


@pytest.mark.parametrize("number", [3, 4, 5])
def test_labels_spell_what_is_written(number):
    for scene in scenes(number, 30):
        blocks, last = told(scene), len(scene.lines) - 1
        for i, line in enumerate(scene.lines):
            if scene.height > 30 or len(scene.lines) == 1:      # lower lines share blocks
                of_line = [block for block in blocks if block.get("role") == f"line {i}"]
                assert {block["length"] for block in of_line} == {len(line.text)}
                assert {block["colour"] for block in of_line} == {line.colour}
                assert all(block.get("last", False) == (i == last) for block in of_line)
        if len(scene.lines) == 1:
            assert read_of(blocks, role="line 0") == scene.lines[0].text


def test_labels_spell_small_print():
    """Of each line all letters, in blocks of its own: far more of them than a chart has."""
    n = 0
    for scene in scenes(9):
        blocks = told(scene)
        assert all(14 <= scene.height <= 22 and len(line.text) <= 3 * labels.PLACES for line in scene.lines)
        for i, line in enumerate(scene.lines):
            assert read_of(blocks, number=i + 1) == line.text
            n += sum(map(str.isalnum, line.text))
    assert n > 30 * len(scenes(9))


def test_labels_tell_the_longest_bar():
    read = 0
    for scene in scenes(6):
        blocks, values = told(scene), dict(zip(scene.labels, scene.values))
        label = max(values, key=values.get)
        longest = [block for block in blocks if block.get("long") == "most" and block.get("role") == "label"]
        assert longest and {(10 * block["tens"] + block["ones"]) for block in longest} == {values[label]}
        assert all(block["all"] == len(values) for block in longest)
        read += read_of(blocks, long="most", role="label") == label
    assert read == len(scenes(6))


def test_labels_of_plots():
    for scene in scenes(7):
        ends = [row[-1][1] for row in scene.rows]
        last = {block["number"] - 1 for block in told(scene) if block.get("long") == "most"}
        assert last <= {i for i, end in enumerate(ends) if end == max(ends)} and last
    for scene in scenes(8):
        bounds = {block["bound"] for block in told(scene) if "bound" in block}
        assert bounds == {"memory" if scene._bound(x) is plots.MEMORY else "compute" for _, x, _ in scene.kernels}


def test_answers_spell_what_they_read():
    seen = Counter()
    for example in examples(False):
        for text in example.spelled:
            assert len(text) > 1 and any(text in text_of(message["content"]) for message in example.messages)
            seen[text.isdigit()] += 1
        if example.expect["kind"] == "read" and len(example.expect["text"]) > 1:
            assert example.expect["text"] in example.spelled
    assert min(seen.values()) > 50 and len(seen) == 2
