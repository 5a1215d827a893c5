"""Pictures that the project draws, and conversations about them in English and Korean.

    shapes.py     shapes in colours: what, which, where, how many
    writing.py    printed digits and words, large and small
    charts.py     bar charts
    plots.py      the timelines and rooflines of the notebooks
    canvas.py     what they are drawn on
    labels.py     what each block of a picture shows, as a tower is taught it
    questions.py  questions, answers, and how an answer is judged; the words are those of models/text/pictures.toml

A scene is a small description with draw(), size, kind, and questions(rng, lang). What is seen is held out by the rule
of words.py: shapes with their colours and parts of the picture, numbers of two digits and more, words, labels with
their values, times of a timeline, places under a roofline. Colours, shapes and single digits are few: all are trained
on.

`python -m models.tasks.pictures OUT.png` draws forty examples.
"""

import random
from collections.abc import Callable

from .. import facts
from ..example import Example, chat, pick_lang, seen
from ..wide.besides import Besides
from ..words import Draw
from . import charts, plots, shapes, writing
from .labels import FACTS, labelled
from .questions import UNSEEN, Question, Words, texts

NO_PICTURE = 0.04           # share of the examples that ask without any picture
TWO_PICTURES = 0.12         # of those that have a second one later
SMALL_TALK, SYSTEM = 0.12, 0.2      # of those with a few words before the picture, and with a system message
TOGETHER = 0.12             # of the messages that ask two questions at once
SENTENCE = 0.2              # of the questions that want a whole sentence
OF_KIND = 0.2               # of the pictures that may be asked of which kind they are
AFTER = 0.2                 # of the pictures that stand behind their question
BESIDES = 0.3               # of the conversations to train on have turns about other things after a picture:
BETWEEN, BEHIND = 0.3, 0.7  # behind a question about it, and behind the last one
# How often a kind of question is asked, where it can be, when others are asked once.
OFTEN = {"number": 5, "word": 5, "words": 4, "count": 3, "what": 2, "colour": 2, "top": 4, "value": 2, "bound": 2,
         "labels": 2, "line": 2}
# And in training, which has kinds of its own (models/text/wide/pictures.toml) and more of what is learnt last.
OFTEN_IN_TRAINING = OFTEN | {"top": 5, "value": 4, "line": 4, "tinted": 2, "colours_of": 3}
N_QUESTIONS = (1, 1, 2, 4, 6, 8, 10)


def _kept(make: Callable) -> Callable:
    """A scene drawn until its content is on the right side of the rule."""
    def scene(draw: Draw):
        while not draw.keep_if((made := make(draw.rng)).content):
            pass
        return made
    return scene


# How often, and what draws the scene.
SCENES = ((10, _kept(shapes.one)), (20, _kept(shapes.some)), (18, _kept(shapes.many)), (20, writing.number),
          (18, writing.one_word), (10, writing.lines), (40, charts.chart), (7, plots.timeline), (6, plots.roofline),
          (18, writing.small), (20, _kept(shapes.mixed)))


# How often in lessons, which have no questions: letters take longest to learn, and small ones longer. A picture of
# small print has three times as many as a chart.
LESSONS = (4, 8, 16, 14, 20, 24, 46, 5, 5, 50, 20)


def draw_scene(draw: Draw, weights: tuple | None = None):
    often, makers = zip(*SCENES)
    return draw.rng.choices(makers, weights or often)[0](draw)


def questions(scene, rng: random.Random, lang: str) -> list[Question]:
    """All that can be asked of a scene now, sometimes also what kind of picture it is."""
    words, found = Words(lang), scene.questions(rng, lang)
    if rng.random() < OF_KIND:
        kind = words.one("pictures", scene.kind)
        found.append(words.named("kind", "pictures", scene.kind, kind=kind, a_kind=kind))
    return found


def choose(found: list[Question], rng: random.Random, n: int, often: dict = OFTEN) -> list[Question]:
    """n different questions at most; half of the time those of a kind together."""
    kinds, chosen = {}, []
    for question in found:
        kinds.setdefault(question.kind, []).append(question)
    while kinds and len(chosen) < n:
        kind, = rng.choices(list(kinds), [often.get(kind, 1) for kind in kinds])
        question = rng.choice(kinds[kind])
        chosen.append(question)
        kinds[kind] = [other for other in kinds[kind] if other != question]
        if not kinds[kind]:
            del kinds[kind]
    if rng.random() < 0.5:
        order = {question.kind: i for i, question in reversed(list(enumerate(chosen)))}
        chosen.sort(key=lambda question: order[question.kind])
    return chosen


class _Talk:
    """The turns of a conversation as they come about, and what the last answer is judged by."""

    def __init__(self, draw: Draw, lang: str, held_words: bool = False, besides: Besides | None = None):
        self.draw, self.rng, self.lang, self.held_words, self.besides = draw, draw.rng, lang, held_words, besides
        self.turns, self.pictures, self.expect, self.spelled = [], [], None, set()
        self.thinking = None

    def show(self, scene, chosen: list[Question]):
        """A picture, and questions about it one after the other; sometimes two at once, but never in the end."""
        rng, waiting, before, first = self.rng, list(chosen), None, True
        self.spelled.update(text for question in chosen for text in question.spelled)
        while waiting:
            question = waiting.pop(0)
            whole = rng.random() < SENTENCE
            asked, answer = self._pair(question, whole, before)
            before = question.kind
            if len(waiting) > 1 and rng.random() < TOGETHER:
                other, before = waiting.pop(0), None
                more, told = self._pair(other, whole, question.kind)
                asked += rng.choice(texts()["frames"][f"between_{self.lang}"]) + more
                answer = f"{answer.removesuffix('.')}{', ' if self.lang == 'ko' and not whole else '. '}{told}"
            if whole:
                asked += rng.choice(texts()["frames"][f"in_a_sentence_{self.lang}"])
            parts = [asked, None] if rng.random() < AFTER else [None, asked]
            self.turns += [{"role": "user", "content": seen(*parts)} if first else asked, answer]
            self.expect, self.thinking, first = question.expect(self.lang), None, False
            if self.besides and rng.random() < (BETWEEN if waiting else BEHIND):
                self._talk_besides()
                before = None
        self.pictures.append(scene)

    def _talk_besides(self):
        self.besides.fact = None
        for _ in range(self.rng.randint(1, 3)):
            self.say(*self.besides.turn(self.spelled))
        if self.expect["kind"] == "number":     # a sum, and this one comes without thoughts
            self.thinking = False

    def say(self, asked: str, answer: str, expect: dict):
        """A turn without a picture."""
        self.turns += [asked, answer]
        self.expect = expect

    def _pair(self, question: Question, whole: bool, before: str | None) -> tuple[str, str]:
        asked = question.ask(self.rng, self.lang, self.held_words, follows=question.kind == before)
        return asked, question.say(self.lang, whole)

    def example(self) -> Example:
        system = facts.system(self.rng, self.lang) if self.rng.random() < SYSTEM else None
        return chat(self.draw, self.lang, "pictures", self.turns, self.expect, system, thinking=self.thinking,
                    pictures=self.pictures, spelled=sorted(self.spelled))


def _unseen(draw: Draw, lang: str) -> Example:
    """A question about a picture that is not there."""
    question = draw.rng.choice(questions(draw_scene(draw), draw.rng, lang))
    answer = texts()["answers"][f"unseen_{lang}"]
    expect = {"kind": "seen", "right": [UNSEEN[lang]], "wrong": []}
    return chat(draw, lang, "pictures", [question.ask(draw.rng, lang), answer], expect)


def make(rng, held: bool = False, length: int | None = None, lang: str | None = None) -> Example:
    """A conversation about a picture or two; without any one time in 25."""
    lang, draw = pick_lang(rng, lang), Draw(rng, held)
    if rng.random() < NO_PICTURE:
        return _unseen(draw, lang)
    talk = _Talk(draw, lang, besides=Besides(draw, lang) if not held and rng.random() < BESIDES else None)
    if rng.random() < SMALL_TALK:
        talk.turns += facts.small_talk(Draw(rng, held=False), lang)[:2]
    for _ in range(2 if rng.random() < TWO_PICTURES else 1):
        scene = draw_scene(draw)
        found = questions(scene, rng, lang)
        if not held and isinstance(scene, shapes.Shapes):
            found += scene.several(lang)
        talk.show(scene, choose(found, rng, rng.choice(N_QUESTIONS), OFTEN if held else OFTEN_IN_TRAINING))
    return talk.example()


def make_fact_after(rng, held: bool = True, length: int | None = None, lang: str | None = None) -> Example:
    """To judge with: a held-out question about the project or the model, after one to three about a picture."""
    lang, draw = pick_lang(rng, lang), Draw(rng, held)
    talk, scene = _Talk(draw, lang), draw_scene(draw)
    talk.show(scene, choose(questions(scene, rng, lang), rng, rng.randint(1, 3)))
    question, fact = facts.held_question(rng, lang, rng.choice(("facts", "self")))
    talk.say(question, fact.answer[lang], facts.expect_of(fact, lang))
    return talk.example()


# ---- to judge with: one picture, one question of these kinds --------------------------------------------------


def _section(scenes: tuple, kinds: tuple[str, ...] | None, held_words: bool = False) -> Callable:
    def make_one(rng, held: bool = True, length: int | None = None, lang: str | None = None) -> Example:
        lang, draw = pick_lang(rng, lang), Draw(rng, held)
        found = []
        while not found:
            scene = rng.choice(scenes)(draw) if scenes else draw_scene(draw)
            found = [question for question in questions(scene, rng, lang) if kinds is None or question.kind in kinds]
        talk = _Talk(draw, lang, held_words)
        talk.show(scene, choose(found, rng, 1))
        return talk.example()
    return make_one


_few = _kept(lambda rng: shapes.many(rng, 6))
SECTIONS = {
    "pictures, shape and colour": _section((_kept(shapes.one), _kept(shapes.some)),
                                           ("what", "shape", "colour", "which")),
    "pictures, count to six": _section((_few,), ("count",)),
    "pictures, count among many kinds": _section((_kept(shapes.mixed),), ("count",)),
    "pictures, places": _section((_kept(shapes.some),), ("where", "at", "side", "size")),
    "pictures, digits": _section((writing.number,), ("number",)),
    "pictures, words": _section((writing.one_word,), ("word",)),
    "pictures, largest bar": _section((charts.chart,), ("top",)),
    "pictures, small print": _section((writing.small,), ("line",)),
    "pictures, values of bars": _section((charts.chart,), ("value",)),
    "pictures, plots": _section((plots.timeline, plots.roofline), ("rows", "ends", "bound", "bound_by")),
    "pictures, other words": _section((), None, held_words=True),
}
