"""Facts: questions about what the project teaches, and about the model itself, from models/text/facts/*.toml.

A fact has an answer per language and some handwritten questions; held-out questions (`held_en`, `held_ko`)
are asked plainly and never trained on. For training a question gets what people put around it, loses words,
case or a letter, or the name of qengine, so that the answer hangs on its words and not on its exact form. A
question that could mean two facts is left whole. Some ask for the answer in the other language, and some
conversations change the language between turns: the answer has that of the last question.

A question may be a pattern, "(Can|Does) it run on (a Mac|macOS)?", which stands for all that it can become; behind a
Korean word {을} is the particle that fits. What newcomers ask (models/text/newcomers.toml) is never trained on; it has
key phrases of its own.

Examples to train on have more ways to ask than the turns that stand in examples to judge by: wordings of
models/text/wide/further.toml, what asking.py makes of any wording, and two questions at once. So whoever adds to them
leaves all examples to judge by as they are.
"""

import itertools
import random
import re
import tomllib
from dataclasses import dataclass
from functools import cache

from . import lists, reasoning
from .example import Example, chat, pick_lang
from .wide import asking
from .words import LANGUAGES, TEXT, Draw, Ko, Slots, is_held

FOLDER = TEXT / "facts"
SELF = "self-"  # ids of facts about the model itself begin with it
UNKNOWN = "self-unknown-"  # ids of what the model does not know; their answer is one and the same
UNKNOWN_SHARE = 0.2  # of the questions about the model are about anything in the world
NONSENSE, NONSENSE_SHARE = "self-nonsense", 0.03  # and so many are keys hit at random
DISTRESS, DISTRESS_SHARE = "self-distress", 0.09  # a message that must not be taken for another
IN_OTHER_LANGUAGE = 0.05  # of the conversations end with an answer in the other language
ABOUT_ME = 0.4  # of what stands before a question about the project says who asks
MIXED = 0.25  # of the conversations change the language between turns
MOST_OF_PATTERN = 24  # questions that a pattern becomes at most
WIDENED = 0.5  # of the questions to train on are put as somebody else might
FURTHER = 0.3  # of those for a fact with further wordings have one of these
TWO_AT_ONCE = 0.04  # of the conversations end with two questions in one message


@dataclass(frozen=True)
class Fact:
    """The dicts go from language to text, phrases or questions; `next` has the ids of what follows. `odds` are those of
    the questions `ask`, added up: all that one pattern becomes is asked as often as one question that is no pattern."""

    id: str
    answer: dict
    keys: dict
    ask: dict
    odds: dict
    held: dict
    follow: dict
    next: tuple

    def question(self, rng: random.Random, lang: str) -> str:
        """One of the questions to train on, as it is written."""
        return rng.choices(self.ask[lang], cum_weights=self.odds[lang])[0]

    def follow_ups(self, lang: str, held: bool) -> list[str]:
        return [question for question in self.follow[lang] if is_held(question) == held]


@cache
def load_facts() -> dict[str, Fact]:
    """All facts by id, in the order of the files' names; [[more]] has wordings for a fact of any file."""
    files = [tomllib.loads(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.toml"))]
    tables = [table for file in files for table in file["fact"]]
    by_id = {table["id"]: table for table in tables}
    if len(by_id) < len(tables):
        raise ValueError(f"two facts in {FOLDER} have the same id")
    for more in itertools.chain.from_iterable(file.get("more", ()) for file in files):
        for lang in LANGUAGES:
            by_id[more["id"]][f"ask_{lang}"] += more[f"ask_{lang}"]
    return {id: _read(table) for id, table in by_id.items()}


_CHOICE, _PARTICLE = re.compile(r"\(([^()|]*(?:\|[^()|]*)+)\)"), re.compile(r"(\S+)\{(\w+)\}")


def expanded(pattern: str) -> list[str]:
    """All that a pattern becomes, or MOST_OF_PATTERN of that, the same ones every time."""
    pieces = _CHOICE.split(pattern)  # every second one is a choice
    choices = [piece.split("|") if i % 2 else [piece] for i, piece in enumerate(pieces)]
    every = list(map("".join, itertools.product(*choices)))
    return random.Random(pattern).sample(every, MOST_OF_PATTERN) if len(every) > MOST_OF_PATTERN else every


def _read(table: dict) -> Fact:
    def patterns(name):
        return {lang: [[_PARTICLE.sub(lambda match: format(Ko(match[1]), match[2]), question)
                        for question in expanded(pattern)] for pattern in table.get(f"{name}_{lang}", ())]
                for lang in LANGUAGES}

    def questions(of_pattern):
        return {lang: [*itertools.chain.from_iterable(of_pattern[lang])] for lang in LANGUAGES}

    answer, keys = ({lang: table[name.format(lang)] for lang in LANGUAGES} for name in ("{}", "key_{}"))
    ask, held, follow = map(patterns, ("ask", "held", "follow"))
    odds = {lang: tuple(itertools.accumulate(1 / len(each) for each in ask[lang] for _ in each)) for lang in LANGUAGES}
    return Fact(table["id"], answer, keys, questions(ask), odds, questions(held), questions(follow),
                tuple(table.get("next", ())))


@cache
def _of_task(task: str) -> tuple[Fact, ...]:
    return tuple(fact for fact in load_facts().values() if fact.id.startswith(SELF) == (task == "self"))


@cache
def _wordings(task: str) -> tuple[float, ...]:
    """How often each fact of a task is asked for, added up: one of many wordings more often, but not as much more."""
    return tuple(itertools.accumulate(len(fact.ask["en"]) ** 0.5 for fact in _of_task(task)))


@cache
def further() -> dict[str, dict]:
    """More questions to train on, by the id of a fact and the language."""
    asked = tomllib.loads((TEXT / "wide" / "further.toml").read_text("utf-8"))
    return {id: {lang: questions[lang] for lang in LANGUAGES} for id, questions in asked.items()}


@cache
def apart() -> dict[str, dict]:
    """Questions of one more hand that nothing is trained on, by the id of a fact and the language."""
    return tomllib.loads((TEXT / "wide" / "apart.toml").read_text("utf-8"))


def expect_of(fact: Fact, lang: str) -> dict:
    """The key phrases, the answer, and those of other facts, none of which may be nearer."""
    return {"kind": "keys", "keys": fact.keys[lang], "answer": fact.answer[lang],
            "others": _answers(lang) - {fact.answer[lang]}}


@cache
def _answers(lang: str) -> frozenset:
    return frozenset(fact.answer[lang] for fact in load_facts().values())


# ------------------------------------------------------------------------------------------------------
# Questions as people ask them
# ------------------------------------------------------------------------------------------------------


@cache
def frames() -> dict:
    return tomllib.loads((TEXT / "frames.toml").read_text("utf-8"))


@cache
def _droppable() -> frozenset:
    return frozenset(frames()["droppable_en"].split())


@cache
def _unneeded() -> frozenset:
    return _droppable() | frozenset(frames()["unneeded_en"].split())


def system(rng: random.Random, lang: str) -> str | None:
    """A short system message, mostly none."""
    return rng.choice(frames()[f"systems_{lang}"]) if rng.random() < 0.3 else None


def plain(question: str) -> str:
    """The question without case, spaces and punctuation, to compare it."""
    return re.sub(r"\W+", "", question.lower())


@cache
def held_questions() -> frozenset:
    of_facts = [question for fact in load_facts().values() for lang in LANGUAGES
                for question in (*fact.held[lang], *fact.follow_ups(lang, held=True))]
    of_others = [question for asked in apart().values() for lang in LANGUAGES for question in asked[lang]]
    return frozenset(map(plain, of_facts + of_others)) | _asked_by_newcomers()


@cache
def _asked_by_newcomers() -> frozenset:
    return frozenset(plain(asked[lang]) for asked in newcomers() for lang in LANGUAGES)


def keywords(question: str) -> list[str]:
    """The words of a question that carry it: what keyword queries consist of."""
    words = re.sub(r"[?.!,]+(\s|$)", r"\1", question).split()
    return [word for word in words if word.lower() not in _unneeded()]


@cache
def _facts_by_keywords() -> dict:
    table = {}
    for fact in load_facts().values():
        for question in (*fact.ask["en"], *fact.held["en"], *fact.ask["ko"], *fact.held["ko"]):
            table.setdefault(frozenset(map(str.lower, keywords(question))), set()).add(fact.id)
    return table


def _is_clear(question: str, fact: Fact) -> bool:
    """Whether the key words of a question belong to this fact alone."""
    return _facts_by_keywords().get(frozenset(map(str.lower, keywords(question)))) == {fact.id}


def _is_no_others(question: str, fact: Fact) -> bool:
    """Whether a question still has some key words, and these are not those of another fact."""
    words = frozenset(map(str.lower, keywords(question)))
    owners = _facts_by_keywords().get(words, {fact.id})
    return len(words) > 1 and owners == {fact.id} and not fact.id.startswith(SELF)


def vary(rng: random.Random, question: str, fact: Fact, lang: str) -> str:
    """The question in one of the forms that people give it; never one that is held out."""
    varied = _reworded(rng, question, fact, lang)
    if plain(varied) in held_questions():  # also where something will stand around it
        varied = question
    if rng.random() < 0.35:
        about_me = rng.random() < ABOUT_ME and not fact.id.startswith(SELF)
        varied = rng.choice(frames()[f"{'about_me' if about_me else 'before'}_{lang}"]) + varied
    if rng.random() < 0.12:
        varied += rng.choice(frames()[f"after_{lang}"])
    if rng.random() < 0.25:
        varied = varied.lower()
    if rng.random() < 0.2:
        varied = varied.rstrip("?.!")
    if len(varied) > 4 and rng.random() < 0.05:
        typed = _typo(rng, varied)
        if not any(map(is_held, set(typed.split()) - set(varied.split()))):    # or it may be a held-out invented word
            varied = typed
    return question if plain(varied) in held_questions() else varied


def widened(rng: random.Random, question: str, lang: str) -> str:
    """The question as somebody else might put it; never one that is held out, and no newcomer's anywhere in it."""
    other = asking.widened(rng, question, lang)
    bare = plain(other)
    if bare in held_questions() or any(asked in bare for asked in _asked_by_newcomers()):
        return question
    return other


def _reworded(rng: random.Random, question: str, fact: Fact, lang: str) -> str:
    """With contractions, without the name of qengine, or shortened."""
    if lang == "en" and rng.random() < 0.3:
        question = contracted(question)
    if rng.random() < 0.2 and _is_no_others(without := _without_name(question), fact):
        return without
    if rng.random() < 0.35 and _is_clear(question, fact):
        return _shorten(rng, question, lang)
    return question


_CONTRACTED = [(re.compile(rf"\b{long}\b", re.I), short) for long, short in (
    (r"(I) am", r"\1'm"), (r"(what|who|where|how|that|it) is", r"\1's"), (r"(can)(?:not| not)", r"\1't"),
    (r"(do|does|did|is|are|was|should|would|could) not", r"\1n't"), (r"(I|you|we) will", r"\1'll"),
    (r"(I|you|we|they) have (?=\w+ed\b)", r"\1've "), (r"any more", "anymore"))]


def contracted(text: str) -> str:
    """English as it is typed: "I'm", "what's", "can't"."""
    for long, short in _CONTRACTED:
        text = long.sub(short, text)
    return text


def typed(draw: Draw, request: str) -> str:
    """A request as it is typed: in training with contractions now and then."""
    return contracted(request) if not draw.held and draw.rng.random() < 0.3 else request


def _without_name(question: str) -> str:
    """The question without the name of qengine, as one asks who thinks it goes without saying."""
    question = re.sub(r" (?:in|of|with|by|for) qengine\b|\bqengine(?:[은는이가을를의]|에서는?|에) ", "", question)
    return re.sub(r"\bqengine\b(?!['-])", "it", question)


def _shorten(rng: random.Random, question: str, lang: str) -> str:
    if rng.random() < 0.35:
        words = keywords(question)
        if lang == "en" and rng.random() < 0.2:
            rng.shuffle(words)
        return " ".join(words) or question
    words = question.split()
    if lang == "en":
        return " ".join(word for word in words if word.lower() not in _droppable() or rng.random() < 0.5)
    return " ".join(re.sub(r"(?<=[가-힣]{2})[은는이가을를]$", "", word) if rng.random() < 0.5 else word
                    for word in words)


def _typo(rng: random.Random, text: str) -> str:
    """Two letters swapped, or one lost or doubled. Numbers stay what they are."""
    at = rng.randrange(len(text) - 1)
    if not text[at:at + 2].isalpha():
        return text
    middle = rng.choice((text[at + 1] + text[at], text[at + 1], text[at] * 2 + text[at + 1]))
    return text[:at] + middle + text[at + 2:]


# ------------------------------------------------------------------------------------------------------
# Conversations
# ------------------------------------------------------------------------------------------------------


def turn(rng: random.Random, lang: str, task: str = "facts", after: Fact | None = None, wide: bool = False) -> tuple:
    """One question, its answer, what it is judged by and its fact; `after` is the fact just told. wide: whether it may
    be asked in all ways that there are to train on."""
    follow = [load_facts()[id] for id in after.next] if after else []
    follow = [fact for fact in follow if fact.follow_ups(lang, held=False)]
    if follow and rng.random() < 0.6:
        question, fact = _follow_up(rng, lang, follow)
    elif task == "self" and rng.random() < UNKNOWN_SHARE:
        question, fact = off_topic(rng, lang)
    elif task == "self" and rng.random() < NONSENSE_SHARE:
        question, fact = _nonsense(rng, lang), load_facts()[NONSENSE]
    else:
        distress = task == "self" and rng.random() < DISTRESS_SHARE
        fact = load_facts()[DISTRESS] if distress else _any_fact(rng, task)
        more = further()[fact.id][lang] if wide and fact.id in further() and rng.random() < FURTHER else None
        question = vary(rng, rng.choice(more) if more else fact.question(rng, lang), fact, lang)
    if wide and rng.random() < WIDENED and fact.id not in (NONSENSE, DISTRESS):
        question = widened(rng, question, lang)
    return question, fact.answer[lang], expect_of(fact, lang), fact


def _any_fact(rng: random.Random, task: str) -> Fact:
    return rng.choices(_of_task(task), cum_weights=_wordings(task))[0]


def _follow_up(rng: random.Random, lang: str, follow: list[Fact]) -> tuple[str, Fact]:
    """A question that only what was told before makes clear, now and then as short as "Why?"."""
    reasons = [fact for fact in follow if fact.id.endswith("-why")]
    if rng.random() < 0.2:
        if reasons and rng.random() < 0.5:
            return rng.choice(frames()[f"why_{lang}"]), reasons[0]
        return rng.choice(frames()[f"more_{lang}"]), follow[0]
    fact = rng.choice(follow)
    return rng.choice(fact.follow_ups(lang, held=False)), fact


def off_topic(rng: random.Random, lang: str) -> tuple[str, Fact]:
    """A question about anything in the world, and the fact that it is not known."""
    fact = next(fact for fact in _of_task("self") if fact.id.startswith(UNKNOWN))
    while True:
        question = rng.choice(frames()[f"unknown_{lang}"]).format_map(Slots(Draw(rng, held=False), lang))
        if plain(question) not in held_questions():
            return question, fact


_KEYS = {"en": ("asdfghjkl", "qwertyuiop", "zxcvbnm", "?!.,", "asdfghjklqwertyuiopzxcvbnm;'"),
         "ko": ("ㅁㄴㅇㄹㅎㅗㅓㅏㅣ", "ㅂㅈㄷㄱㅅㅛㅕㅑ", "ㅋㅌㅊㅍㅠㅜㅡ", "ㅋㅎ", "ㅁㄴㅇㄹㅂㅈㄷㄱㅋㅌㅊㅍ")}


def _nonsense(rng: random.Random, lang: str) -> str:
    """Keys of a row of the keyboard hit at random."""
    while True:
        text = "".join(rng.choices(rng.choice(_KEYS[lang]), k=rng.randint(3, 12)))
        if text not in (question for fact in load_facts().values() for question in fact.held[lang]):
            return text


def small_talk(draw: Draw, lang: str) -> tuple:
    """A turn of anything short: what stands between the turns that matter."""
    kind = draw.rng.choices(("facts", "self", "lists", "reasoning"), (6, 2, 2, 1))[0]
    if kind in ("facts", "self"):
        return turn(draw.rng, lang, kind)[:3]
    return lists.turn(draw, lang) if kind == "lists" else reasoning.turn(draw, lang)


def make(rng: random.Random, held: bool = False, length: int | None = None, lang: str | None = None,
         task: str = "facts") -> Example:
    lang = pick_lang(rng, lang)
    if held:
        question, fact = held_question(rng, lang, task)
        return held_example(fact, question, lang, task)
    draw, turns, fact, mixed = Draw(rng, held=False), [], None, rng.random() < MIXED
    for _ in range(rng.choices((0, 1, 2, 3), (11, 5, 3, 2))[0] or mixed):
        spoken = pick_lang(rng, None if mixed else lang)
        if rng.random() < 0.7:
            question, answer, _, fact = turn(rng, spoken, task, fact, wide=True)
        else:
            (question, answer, _), fact = small_talk(draw, spoken), None
        turns += [question, answer]
    question, answer, expect, fact = turn(rng, lang, task, fact, wide=True)
    if task == "facts" and rng.random() < TWO_AT_ONCE:
        more, told, _, other = turn(rng, lang, task, wide=True)
        question, answer = f"{question} {more}", f"{answer} {told}"
        expect = {"kind": "keys", "keys": [*fact.keys[lang], *other.keys[lang]]}
        return chat(draw, lang, task, [*turns, question, answer], expect, system(rng, lang))
    if rng.random() < IN_OTHER_LANGUAGE:
        if rng.random() < 0.6:
            question = rng.choice(frames()[f"other_before_{lang}"]) + question
        else:
            question += rng.choice(frames()[f"other_after_{lang}"])
        lang = "ko" if lang == "en" else "en"
        answer, expect = fact.answer[lang], expect_of(fact, lang)
    return chat(draw, lang, task, [*turns, question, answer], expect, system(rng, lang))


def held_question(rng: random.Random, lang: str, task: str = "facts") -> tuple[str, Fact]:
    """To judge with: a question that nothing is trained on, and the fact that answers it."""
    fact = rng.choice([fact for fact in _of_task(task) if fact.held[lang]])
    return rng.choice(fact.held[lang]), fact


def make_self(rng, held: bool = False, length: int | None = None, lang: str | None = None) -> Example:
    return make(rng, held, length, lang, "self")


def make_later(rng, held: bool = True, length: int | None = None, lang: str | None = None) -> Example:
    """To judge with: a held-out question after other turns, half of the time a follow-up to the last."""
    lang, before = pick_lang(rng, lang), []
    draw = Draw(rng, held=False)  # what was said before is not what is asked for
    for _ in range(rng.randint(0, 2)):
        before += small_talk(draw, lang)[:2]
    if rng.random() < 0.5:
        first, fact = rng.choice(_followed(lang))
        before += [first.question(rng, lang), first.answer[lang]]
        question = rng.choice(fact.follow_ups(lang, held=True))
    else:
        before += turn(rng, lang)[:2]
        question, fact = held_question(rng, lang)
    return chat(Draw(rng, held=True), lang, "facts", [*before, question, fact.answer[lang]],
                expect_of(fact, lang), system(rng, lang))


def make_switched(rng, held: bool = True, length: int | None = None, lang: str | None = None) -> Example:
    """To judge with: a held-out question after turns in the other language."""
    lang, before = pick_lang(rng, lang), []
    other, draw = "ko" if lang == "en" else "en", Draw(rng, held=False)
    for _ in range(rng.randint(1, 3)):
        before += small_talk(draw, other)[:2]
    question, fact = held_question(rng, lang)
    return chat(Draw(rng, held=True), lang, "facts", [*before, question, fact.answer[lang]],
                expect_of(fact, lang), system(rng, lang))


@cache
def newcomers() -> tuple[dict, ...]:
    """What newcomers ask, in both languages, with the key phrases of a right answer."""
    asked = tomllib.loads((TEXT / "newcomers.toml").read_text("utf-8"))
    return tuple(itertools.chain.from_iterable(asked.values()))


def make_newcomer(rng, held: bool = True, length: int | None = None, lang: str | None = None) -> Example:
    """To judge with: the first question of a newcomer. The answer here is no more than the key phrases."""
    lang, asked = pick_lang(rng, lang), rng.choice(newcomers())
    keys = asked[f"key_{lang}"]
    answer = ", ".join(key.split("|")[0] for key in keys)
    return chat(Draw(rng, held=True), lang, "facts", [asked[lang], answer], {"kind": "keys", "keys": keys})


def make_apart(rng, held: bool = True, length: int | None = None, lang: str | None = None) -> Example:
    """To choose a training by: a question of one more hand, as the first of a conversation."""
    lang, id = pick_lang(rng, lang), rng.choice(list(apart()))
    return held_example(load_facts()[id], rng.choice(apart()[id][lang]), lang)


@cache
def _followed(lang: str) -> tuple:
    """(fact, fact that is asked for after it) where a way to ask for it is held out."""
    return tuple((fact, load_facts()[id]) for fact in _of_task("facts") for id in fact.next
                 if load_facts()[id].follow_ups(lang, held=True))


def held_example(fact: Fact, question: str, lang: str, task: str = "facts") -> Example:
    draw = Draw(random.Random(0), held=True)
    return chat(draw, lang, task, [question, fact.answer[lang]], expect_of(fact, lang))


def asks_in_trained_words(example: Example) -> bool:
    """Whether all key words of a held-out question are in one trained question about the same fact."""
    asked = _content_words(example.messages[-2]["content"], example.lang)
    return any(asked <= words for words in _trained_words(example.lang)[example.messages[-1]["content"]])


def _content_words(question: str, lang: str) -> frozenset:
    """Its key words; in Korean all words but the last, the predicate, without particles."""
    words = [word.lower() for word in keywords(question)]
    if lang == "ko":
        words = [re.sub(r"(?<=\w)([은는이가을를의에도]|에서|으?로)$", "", word) for word in words[:-1]]
    return frozenset(words)


@cache
def _trained_words(lang: str) -> dict:
    """Answer -> the key words of each trained question that it answers."""
    table = {}
    for fact in load_facts().values():
        words = {_content_words(question, lang) for question in fact.ask[lang]}
        table.setdefault(fact.answer[lang], set()).update(words)
    return table
