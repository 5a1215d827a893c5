"""What people say of themselves, their pets and their friends in passing, asked for later in the conversation.

Somebody (the user, a relation such as "my cat", or a person by name) has some property: a name, a place, an age, a job.
It is told alone, with other things, or beside a question about something else; one question of ten asks for what was
not told, and in training one of five. Names and places are held out, and of the wordings every fifth.
"""

import re
from dataclasses import dataclass
from functools import cache

from . import facts
from .example import Example, chat, estimate_tokens, pick_lang
from .recall import NOT_SAID, NOT_SAID_SHARE, NOTED
from .words import LANGUAGES, Draw, Ko, is_held, pairs, with_an

RELATIONS = tuple(tuple(pair.rsplit(" ", 1)) for pair in (
    "cat 고양이,dog 강아지,dog 개,parrot 앵무새,rabbit 토끼,horse 말,hamster 햄스터,turtle 거북이,goldfish 금붕어,pony 조랑말,"
    "sister 누나,sister 여동생,brother 형,brother 남동생,friend 친구,best friend 단짝,boss 사장님,teacher 선생님,wife 아내,son 아들,"
    "daughter 딸,neighbour 이웃,colleague 동료,uncle 삼촌,aunt 이모,cousin 사촌,grandmother 할머니,grandfather 할아버지,"
    "roommate 룸메이트,girlfriend 여자친구,boyfriend 남자친구,doctor 의사,mother 어머니,father 아버지,niece 조카,coach 코치").split(","))


@dataclass(frozen=True)
class Property:
    """Templates for somebody, and of these in English other ones for the user; {s} is who has it, {v} what it is."""

    draw: object
    told: tuple
    asked: tuple
    answered: tuple
    told_me: tuple = ()
    asked_me: tuple = ()
    answered_me: str = ""


# One entry for English, one for Korean, in every tuple; where the user speaks of himself, Korean needs no other words
# than "저는" and, in answers, none.
PROPERTIES = {
    "place": Property(
        lambda draw, lang: draw.city(lang),
        (("{S} lives in {v}.", "{S} lives in {v} now.", "{S} moved to {v} last year.", "{S} has a flat in {v}.",
          "By the way, {s} lives in {v}.", "{S} has been living in {v} for years.", "You know, {s} lives in {v}.",
          "{S} lives over in {v}, quite far away."),
         ("{s:은} {v}에 살아요.", "{s:은} {v}에 살아.", "{s:은} 작년에 {v:으로} 이사했어요.", "{s:은} 지금 {v}에 살고 있어요.",
          "참, {s:은} {v}에 살아요.", "{s} 집은 {v}에 있어요.", "{s:은} {v}에 산 지 오래됐어.", "{s:이} 사는 곳은 {v:이에요}.")),
        (("Where does {s} live?", "In which city does {s} live?", "Do you remember where {s} lives?",
          "Which city is {s} in?",
          "Tell me where {s} lives.", "Where is {s}'s home?", "where does {s} live"),
         ("{s:은} 어디에 살아?", "{s:은} 어디 살아요?", "{s:은} 어느 도시에 사나요?", "{s:이} 어디에 사는지 기억해?", "{s:이} 사는 곳은?",
          "{s:은} 어디 산다고 했죠?", "{s} 집이 어디라고 했지?")),
        ("{S} lives in {v}.", "{s:은} {v}에 삽니다."),
        ("I live in {v}.", "I am living in {v} at the moment.", "I moved to {v} last year.", "My home is in {v}.",
         "Greetings from {v}, where I live.", "I live in {v}, by the way.", "I come from {v} and live there, too."),
        ("Where do I live?", "Which city do I live in?", "Do you remember where I live?", "Where is my home?",
         "where do i live", "Tell me where I live."),
        "You live in {v}."),
    "age": Property(
        lambda draw, lang: str(draw.rng.randint(2, 99)),
        (("{S} is {v} years old.", "{S} is {v}.", "{S} turned {v} last week.", "{S} just turned {v}.",
          "{S} will stay {v} until May.",
          "Last month {s} celebrated the age of {v}.", "Can you believe it, {s} is already {v} years old."),
         ("{s:은} {v}살이에요.", "{s:은} {v}살이야.", "{s:은} 올해 {v}살이 됐어요.", "{s} 나이는 {v}살이에요.", "{s:은} 벌써 {v}살이야.",
          "지난주에 {s:이} {v}살이 되었어요.")),
        (("How old is {s}?", "What is {s}'s age?", "Do you remember how old {s} is?", "What age is {s}?",
          "how old is {s}",
          "Tell me the age of {s}."),
         ("{s:은} 몇 살이야?", "{s:은} 몇 살이에요?", "{s} 나이가 어떻게 돼?", "{s:이} 몇 살인지 기억해?", "{s} 나이는?", "{s:은} 몇 살이라고 했죠?")),
        ("{S} is {v} years old.", "{s:은} {v}살입니다."),
        ("I am {v} years old.", "I'm {v}.", "I turned {v} last week.", "I am already {v} years old.",
         "At {v} I am not so young anymore.",
         "My age is {v}."),
        ("How old am I?", "What is my age?", "Do you remember how old I am?", "how old am i", "Tell me my age."),
        "You are {v} years old."),
    "job": Property(
        lambda draw, lang: draw.rng.choice(pairs("jobs"))[LANGUAGES.index(lang)],
        (("{S} works as a {v}.", "{S} is a {v}.", "{S} became a {v}.", "{S} earns money as a {v}.",
          "By profession {s} is a {v}.",
          "Since last year {s} works as a {v}."),
         ("{s:은} {v:이에요}.", "{s:은} {v:으로} 일해요.", "{s} 직업은 {v}입니다.", "{s:은} {v:이} 됐어요.", "{s:은} 작년부터 {v:으로} 일해.",
          "{s:은} {v:이야}.")),
        (("What does {s} do for a living?", "What is {s}'s job?", "What does {s} work as?",
          "Do you remember {s}'s job?",
          "Which job does {s} have?", "What is the profession of {s}?"),
         ("{s} 직업이 뭐야?", "{s:은} 무슨 일을 해요?", "{s:은} 뭐 하는 사람이야?", "{s} 직업은?", "{s:이} 무슨 일을 하는지 기억해?",
          "{s} 직업이 뭐라고 했죠?")),
        ("{S} works as a {v}.", "{s} 직업은 {v}입니다."),
        ("I work as a {v}.", "I am a {v}.", "I'm a {v} by profession.", "I became a {v}.", "My job is that of a {v}."),
        ("What do I do for a living?", "What is my job?", "What do I work as?", "Do you remember my job?",
         "What's my profession?"),
        "You work as a {v}."),
    "name": Property(
        lambda draw, lang: draw.given(lang),
        (("{S} is called {v}.", "{S} is {v}.", "{S}'s name is {v}.", "The name of {s} is {v}.", "{v} is {s}.",
          "We call {s} {v}.",
          "This morning {s}, {v}, woke me up.", "I went for a walk with {s}, {v}.", "{v}, {s}, is ill today.",
          "{S} has the name {v}.", "{S} is named {v}.", "Everybody calls {s} {v}."),
         ("{s} 이름은 {v:이에요}.", "{s} 이름은 {v:이야}.", "{s:은} {v:이야}.", "{v:은} {s:이에요}.", "{s} 이름을 {v:이라고} 지었어.",
          "오늘 {s} {v:이} 아파서 병원에 갔어요.", "아침에 {s} {v} 때문에 깼어요.", "{s:을} {v:이라고} 불러요.", "{s:은} {v:이라고} 해요.",
          "{s} {v:과} 산책했어.")),
        (("What is {s} called?", "What is {s}'s name?", "What's the name of {s}?", "Do you remember {s}'s name?",
          "Who is {s}?",
          "How is {s} called?", "what's {s}'s name", "Tell me the name of {s}."),
         ("{s} 이름이 뭐야?", "{s} 이름이 뭐예요?", "{s} 이름 기억해?", "{s:은} 이름이 뭐라고 했죠?", "{s} 이름은?", "{s:이} 누구야?",
          "{s:을} 뭐라고 불러요?", "{s} 이름을 말해 줘.")),
        ("{S} is called {v}.", "{s} 이름은 {v}입니다."),
        ("I am {v}.", "My name is {v}.", "I'm {v}.", "Call me {v}.", "{v} is my name.", "People call me {v}.",
         "{v} here.",
         "This is {v} speaking.", "Hi, {v} here.", "my name's {v}", "You can call me {v}.",
         "Hi, I am {v}.", "Hi, I'm {v}.", "Hello, I'm {v}!", "Hello! My name is {v}.", "Hi there, my name is {v}.",
         "Hey, I'm {v}.", "hi i'm {v}", "hi, my name is {v}", "hello, {v} here", "I'm {v}, nice to meet you.",
         "Good morning, I am {v}.", "I am {v}, and who are you?", "My name's {v}, hello!",
         "Hey there, {v} is my name."),
        ("What is my name?", "What's my name?", "Who am I?", "Do you remember my name?", "What am I called?",
         "who am i",
         "Do you know who I am?"),
        "Your name is {v}."),
}
ME_TOLD_NAME_KO = ("저는 {v:이에요}.", "내 이름은 {v:이야}.", "제 이름은 {v}입니다.", "나 {v:이야}.", "내 이름은 {v}", "저는 {v:이라고} 해요.",
                   "{v:이라고} 불러 줘.", "저, {v:이에요}.", "난 {v:이야}.", "안녕, 나는 {v:이야}.", "{v}입니다.",
                   "안녕하세요, 저는 {v:이에요}.", "안녕하세요! 제 이름은 {v}입니다.", "안녕! 내 이름은 {v:이야}.", "저는 {v:이에요}, 반가워요.",
                   "저는 {v}입니다. 만나서 반갑습니다.", "안녕 난 {v:이야}", "안녕하세요 {v}입니다", "처음 뵙겠습니다, {v:이라고} 합니다.",
                   "제 이름은 {v:이에요}", "나는 {v:이라고} 해", "이름은 {v:이에요}.", "반가워, 나는 {v:이야}.")
ME_ASKED_NAME_KO = ("내 이름이 뭐야?", "제 이름이 뭐예요?", "내 이름 기억해?", "내가 누구야?", "제가 누구라고 했죠?", "내 이름은?", "나 누구게?")
ME_ANSWERED_KO = {"place": "{v}에 사십니다.", "age": "{v}살이십니다.", "job": "직업은 {v}입니다.", "name": "이름은 {v}입니다."}
# Of training alone: more ways to ask, by kind. For somebody, in English and in Korean, for the user, and in Korean for
# his name. What is held out of them is dropped.
MORE_ASKED = {
    "place": (("Where does {s} live now?", "Remind me, where does {s} live?", "{S} lives where?",
               "Where did I say {s} lives?", "Name the city of {s}.", "What city does {s} live in?",
               "So where is {s} at home?"),
              ("{s:은} 어디 사는지 알려 줘.", "{s:이} 사는 도시가 어디야?", "{s:은} 어디에 사나요?", "{s:은} 사는 데가 어디죠?",
               "{s:이} 어디 사는지 말했었죠?", "{s} 사는 곳이 어디예요?", "{s:은} 어디서 살아요?"),
              ("Where did I say I live?", "What city am I in?", "My city is which?", "Remind me where I live.",
               "Where do I live again?", "Name my city.")),
    "age": (("How many years old is {s}?", "And how old is {s} now?", "Say how old {s} is.", "{S} is how old?",
             "What did I say about the age of {s}?", "The age of {s}?"),
            ("{s} 나이를 알려 줘.", "{s:은} 나이가 몇이에요?", "{s:이} 몇 살이죠?", "{s:은} 몇 살인가요?", "{s} 나이가 몇이야?",
             "{s:이} 몇 살인지 알려 주세요."),
            ("How many years old am I?", "My age?", "How old did I say I am?", "Remind me of my age.",
             "Say how old I am.")),
    "job": (("What work does {s} do?", "How does {s} earn money?", "What is {s} by profession?", "Tell me {s}'s job.",
             "Remind me what {s} does for work.", "What does {s} do?", "As what does {s} work?"),
            ("{s:은} 하는 일이 뭐예요?", "{s} 직업을 알려 줘.", "{s:은} 무슨 직업이야?", "{s:은} 어떤 일을 하죠?", "{s:은} 무슨 일을 하나요?",
             "{s} 직업이 뭔지 말해 줘."),
            ("What work do I do?", "How do I earn my money?", "What did I say my job is?", "My job?",
             "What am I by profession?", "What do I do?", "As what do I work?", "Tell me my job.")),
    "name": (("How do we call {s}?", "Which name does {s} have?", "{S} is called what?",
              "Remind me, what is {s}'s name?", "And what's {s} called?", "Say the name of {s}.",
              "What name did I give for {s}?", "Do you know what {s} is called?"),
             ("{s:이} 누구예요?", "{s:이} 누구죠?", "{s:은} 누구야?", "{s:이} 누구였지?", "{s:이} 누군지 알아?", "{s:은} 이름이 뭐야?",
              "{s} 이름을 알려 줘.", "{s} 이름이 뭐였죠?", "{s} 이름이 뭐라고 했지?", "{s:은} 뭐라고 불러?", "{s} 이름을 아세요?"),
             ("What did I say my name is?", "Say my name.", "How am I called?", "My name?", "Do you recall my name?",
              "Tell me who I am.", "You know my name?")),
}
MORE_ASKED_NAME_KO = ("내가 누구예요?", "내가 누구죠?", "제가 누구예요?", "내 이름을 말해 봐.", "제 이름을 아세요?", "내 이름이 뭐였지?",
                      "내 이름이 뭐라고 했어?", "제 이름을 알려 주세요.", "나는 누구야?")
AND = (" And ", " 그리고 ")
ASIDE = (" By the way, ", " But tell me: ", " Now, "), (" 그런데 ", " 그건 그렇고, ", " 아무튼 ")
IN_HASTE = 0.25  # of what the user says of himself, in small letters and without a full stop; of his names, too
ONE_MESSAGE, ONE_MESSAGE_IN_TRAINING = 0.3, 0.45    # of what is told alone is asked for in the same message
NOT_SAID_IN_TRAINING = 0.2   # of the questions: it is what a model makes up otherwise
NEVER_KNOWN = ("place", "age", "job")  # what to ask for that was not told, of somebody whose name is known
ME = "me"


@dataclass(frozen=True)
class Told:
    """who: ME, or what English and Korean users and answers call somebody: said, heard."""

    who: object
    kind: str
    value: str


@cache
def _side(templates: tuple, held: bool) -> tuple:
    """The wordings of one side of the held-out rule; all of them where that side has none."""
    return tuple(template for template in templates if is_held(template) == held) or templates


def _pick(draw: Draw, templates: tuple, more: tuple = ()) -> str:
    """A wording of the draw's side, which is a content like any other. more: what training has beside the templates."""
    usable = _side(templates, draw.held)
    template = draw.rng.choice(usable if draw.held else usable + tuple(text for text in more if not is_held(text)))
    draw.keep_if(template)
    return template


_OWN = {"저가": "제가", "나가": "내가", "저 ": "제 ", "나 ": "내 "}  # Korean words for "I" before what they have or do


def _say(template: str, who: str, value: str, lang: str) -> str:
    text = template.format(s=Ko(who), S=who[:1].upper() + who[1:], v=Ko(value))
    if lang == "en":
        return with_an(text)
    return re.sub(r"(?<!\S)(저가|나가|저 |나 )", lambda match: _OWN[match[1]], text) if who in ("저", "나") else text


def tell(draw: Draw, told: Told, lang: str) -> str:
    """A sentence of the user's that tells it; in training what he says of himself is typed in haste now and then."""
    text = _tell(draw, told, lang)
    if draw.held or told.who != ME or draw.rng.random() > IN_HASTE:
        return text
    before, value, after = text.rpartition(told.value)
    return before.lower() + value + after.lower().rstrip(".!")


def _tell(draw: Draw, told: Told, lang: str) -> str:
    kind = PROPERTIES[told.kind]
    if told.who == ME and lang == "en":
        return _say(_pick(draw, kind.told_me), "", told.value, lang)
    if told.who == ME and told.kind == "name":
        return _say(_pick(draw, ME_TOLD_NAME_KO), "", told.value, lang)
    who = "저" if told.who == ME else told.who[0]
    return _say(_pick(draw, kind.told[lang == "ko"]), who, told.value, lang)


def _ask(draw: Draw, told: Told, lang: str) -> str:
    kind, more, mine = PROPERTIES[told.kind], MORE_ASKED[told.kind], told.who == ME
    if mine and lang == "en":
        return _say(_pick(draw, kind.asked_me, more[2]), "", "", lang)
    if mine and told.kind == "name":
        return _pick(draw, ME_ASKED_NAME_KO, MORE_ASKED_NAME_KO)
    who = draw.rng.choice(("저", "나")) if mine else told.who[0]
    return _say(_pick(draw, kind.asked[lang == "ko"], more[lang == "ko"]), who, "", lang)


def passing(draw: Draw, lang: str) -> list[tuple]:
    """Two turns, each with what it is judged by: in one the user tells something, in the other he asks for it."""
    told, noted = _story(draw, lang)[0], draw.rng.choice(NOTED[lang == "ko"])
    return [(tell(draw, told, lang), noted, {"kind": "exact", "answer": noted}),
            (_ask(draw, told, lang), _answer(told, lang),
             {"kind": "value", "about": [], "value": told.value, "others": []})]


def _answer(told: Told, lang: str) -> str:
    if told.who == ME:
        mine = PROPERTIES[told.kind].answered_me if lang == "en" else ME_ANSWERED_KO[told.kind]
        return _say(mine, "", told.value, lang)
    return _say(PROPERTIES[told.kind].answered[lang == "ko"], told.who[1], told.value, lang)


def _whom(draw: Draw, lang: str, known: list):
    """The user, a relation of his, or somebody by name; a relation is told of once."""
    rng, chance = draw.rng, draw.rng.random()
    if chance < 0.3:
        return ME
    if chance < 0.5:
        name = draw.given(lang)
        return name, name
    while True:
        word = rng.choice(RELATIONS)[lang == "ko"]
        who = (f"my {word}", f"your {word}") if lang == "en" else (f"{rng.choice(('내', '우리', '제'))} {word}", word)
        if who[1] not in [other[1] for other in known if other != ME]:
            return who


def _story(draw: Draw, lang: str) -> list[Told]:
    """One to four things of one to three people, each thing once and no value twice; the first is asked for."""
    rng, story, people = draw.rng, [], []
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        if not people or rng.random() < 0.7:
            who = _whom(draw, lang, people)
            if who not in people:
                people.append(who)
        who = rng.choice(people)
        # Who is called by name has no other.
        kinds = [kind for kind in PROPERTIES if kind != "name" or who == ME or who[0] != who[1]]
        kind = "name" if kinds[-1] == "name" and rng.random() < 0.45 else rng.choice(kinds)
        value = PROPERTIES[kind].draw(draw, lang)
        if (who, kind) == (ME, "name") and not draw.held and rng.random() < IN_HASTE:
            value = value.lower()
        if (who, kind) not in [(one.who, one.kind) for one in story] and value not in [one.value for one in story]:
            story.append(Told(who, kind, value))
    rng.shuffle(story)
    return story


def _unsaid(draw: Draw, lang: str, story: list[Told]) -> Told:
    """What nobody told: another property of somebody of the story, or a property of somebody else."""
    while True:
        who = draw.rng.choice(story).who if draw.rng.random() < 0.6 else _whom(draw, lang, [one.who for one in story])
        kind = draw.rng.choice(NEVER_KNOWN)
        if (who, kind) not in [(one.who, one.kind) for one in story]:
            return Told(who, kind, "")


def make(rng, held: bool = False, length: int | None = None, lang: str | None = None) -> Example:
    """length: tokens of the talk between telling and asking, at most."""
    lang, draw = pick_lang(rng, lang), Draw(rng, held)
    side, story, trained = lang == "ko", _story(draw, lang), Draw(rng, held=False)
    unsaid = rng.random() < (NOT_SAID_SHARE if held else NOT_SAID_IN_TRAINING)
    alone = ONE_MESSAGE if held else ONE_MESSAGE_IN_TRAINING
    asked = _unsaid(draw, lang, story) if unsaid else story[0]
    turns, at_once = _told_turns(draw, trained, rng.sample(story, len(story)), lang)
    if at_once and len(story) == 1 and rng.random() < alone:  # told and asked for in one message
        question = f"{turns[0]} {_ask(draw, asked, lang)}"
        turns = []
    else:
        n, longest = 0, rng.uniform(0, min(length or 400, 600))
        while rng.random() < 0.6 and n < longest:
            question, answer, _ = facts.small_talk(trained, lang)
            turns += [question, answer]
            n += estimate_tokens(question + answer)
        question = _ask(draw, asked, lang)
    if unsaid:
        answer, expect = NOT_SAID[side], {"kind": "unsaid", "answer": NOT_SAID[side]}
    else:
        answer = _answer(asked, lang)
        expect = {"kind": "value", "about": [], "value": asked.value,
                  "others": [one.value for one in story if one is not asked]}
    return chat(draw, lang, "people", [*turns, question, answer], expect, facts.system(rng, lang))


def _told_turns(draw: Draw, trained: Draw, story: list[Told], lang: str) -> tuple[list[str], bool]:
    """The turns that tell a story, and whether they are one message with nothing else in it."""
    rng, side = draw.rng, lang == "ko"
    said = [tell(draw, one, lang) for one in story]
    if rng.random() < 0.5:  # all in one message
        said = [rng.choice((" ", AND[side])).join(said) if len(said) == 2 else " ".join(said)]
    turns, alone = [], len(said) == 1
    for text in said:
        if rng.random() < 0.3:  # beside a question about something else
            question, answer, _ = facts.small_talk(trained, lang)
            turns += [text + rng.choice((" ", *ASIDE[side])) + question, answer]
            alone = False
        else:
            turns += [text, rng.choice(NOTED[side])]
    return turns, alone
