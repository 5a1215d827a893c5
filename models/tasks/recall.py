"""Recall: facts planted anywhere in a long context and asked for, in one message or over a conversation.

A needle says that some key (a person) has some value of a kind (a code, a colour, ...). Several needles of
the same kind with other keys lie about, so that the key must be matched and not only the kind. Keys and
values are held out.
"""

import math
from dataclasses import dataclass

from . import facts
from .example import Example, chat, estimate_tokens, pick_lang
from .filler import sentence
from .words import Draw, Ko

# kind: English and Korean name, and how its values are drawn.
KINDS = {
    "code": ("pass code", "비밀번호", lambda draw, lang: draw.digits(4)),
    "long code": ("account number", "계좌번호", lambda draw, lang: draw.digits(8)),
    "serial": ("serial number", "일련번호", lambda draw, lang: draw.code()),
    "colour": ("favourite colour", "좋아하는 색", lambda draw, lang: draw.compound("shades", "colours", lang)),
    "city": ("home town", "고향", lambda draw, lang: draw.city(lang)),
    "pet": ("pet", "반려동물", lambda draw, lang: draw.word(lang).capitalize()),
    "dish": ("favourite dish", "좋아하는 음식", lambda draw, lang: draw.compound("flavours", "dishes", lang)),
    "phone": ("phone number", "전화번호", lambda draw, lang: draw.phone(lang)),
    "room": ("meeting room", "회의실", lambda draw, lang: draw.keep(
        lambda: f"{draw.rng.choice('ABCDEFGH')}-{draw.rng.randint(100, 999)}")),
    "store": ("warehouse number", "창고 번호", lambda draw, lang: draw.digits(4)),
    "time": ("arrival time", "도착 시각", lambda draw, lang: draw.time()),
    "word": ("secret word", "암호", lambda draw, lang: draw.word(lang)),
    "company": ("company", "회사", lambda draw, lang: draw.word(lang).capitalize()),
    "day": ("birth date", "생년월일", lambda draw, lang: draw.date()),
}

TOLD = (("The {kind} of {key} is {value}.", "The {kind} of {key} is {value}.", "{key}'s {kind} is {value}.",
         "Remember that the {kind} of {key} is {value}.", "As for {key}, the {kind} is {value}."),
        ("{key}의 {kind:은} {value}입니다.", "{key}의 {kind:은} {value}입니다.", "{key}의 {kind:은} {value:이에요}.",
         "{key}의 {kind:이} {value:이라는} 것을 기억하세요.", "{key:은} {kind:이} {value}입니다."))
ASKED = (("What is the {kind} of {key}?", "What is {key}'s {kind}?", "Tell me the {kind} of {key}.",
          "Do you know the {kind} of {key}?", "the {kind} of {key}?"),
         ("{key}의 {kind:은} 무엇인가요?", "{key}의 {kind:은} 뭐예요?", "{key}의 {kind:을} 알려 줘.", "{key}의 {kind:이} 뭐였죠?",
          "{key} {kind:은}?"))
SHORT = ((" Only the {kind}.", " Answer with the value only."), (" {kind}만 말해 줘.", " 값만 답해 줘."))
ANSWERED = ("The {kind} of {key} is {value}.", "{key}의 {kind:은} {value}입니다.")
MINE_TOLD = (("My {kind} is {value}.", "By the way, my {kind} is {value}.",
              "Please remember: my {kind} is {value}."),
             ("제 {kind:은} {value}입니다.", "참고로 제 {kind:은} {value:이에요}.", "기억해 주세요. 제 {kind:은} {value}입니다."))
MINE_ASKED = (("What is my {kind}?", "Do you remember my {kind}?", "Tell me my {kind}."),
              ("제 {kind:이} 뭐였죠?", "제 {kind:을} 기억하나요?", "제 {kind:은} 무엇인가요?"))
MINE_ANSWERED = ("Your {kind} is {value}.", "{kind:은} {value}입니다.")
NOTED = (("Okay, noted.", "Got it.", "I will remember that."), ("네, 기억하겠습니다.", "알겠습니다.", "네, 기억해 둘게요."))
NAME = {"en": "name", "ko": "이름"}
INTRODUCED = (("Read this text.\n\n", "Here is a text:\n\n", "", "Text:\n", "Use this text to answer.\n\n"),
              ("다음 글을 읽어 줘.\n\n", "아래는 글입니다.\n\n", "", "글:\n", "이 글을 보고 답해 주세요.\n\n"))


@dataclass(frozen=True)
class Needle:
    kind: str
    key: str
    value: str

    def say(self, template: str) -> str:
        return template.format(kind=Ko(self.kind), key=Ko(self.key), value=Ko(self.value))


def _needles(draw: Draw, lang: str, n: int) -> list[Needle]:
    """n needles of one kind or two; the first is the one to ask for."""
    rng, side = draw.rng, lang == "ko"
    kinds = rng.sample(list(KINDS.values()), 2)
    chosen = [kinds[0]] + [kinds[rng.random() < 0.25] for _ in range(n - 1)]
    make_key = rng.choice((draw.name, draw.given))
    return [Needle(kind[side], make_key(lang), kind[2](draw, lang)) for kind in chosen]


def _length(rng, length: int | None) -> float:
    """Tokens of context: short ones mostly, since they teach as much and cost less."""
    return length or math.exp(rng.uniform(math.log(60), math.log(3900)))


def _expect(asked: Needle, others: list[Needle]) -> dict:
    return {"kind": "value", "value": asked.value, "others": [other.value for other in others]}


def document(draw: Draw, lang: str, length: float, count) -> Example:
    """Needles in a text, which is the system's or in the user's message before or after the question."""
    rng, side = draw.rng, lang == "ko"
    needles = _needles(draw, lang, rng.choice((1, 2, 3, 4, 4, 5, 6, 8)))
    planted = [needle.say(rng.choice(TOLD[side])) for needle in needles]
    sentences, n = [], sum(map(count, planted)) + 40
    while n < length:
        sentences.append(sentence(draw, lang))
        n += count(sentences[-1])
    for needle in planted:
        sentences.insert(rng.randint(0, len(sentences)), needle)
    text = "".join(one + (" " if rng.random() < 0.85 else "\n") for one in sentences).strip()
    question, answer = needles[0].say(rng.choice(ASKED[side])), needles[0].say(ANSWERED[side])
    if rng.random() < 0.25:
        question, answer = question + needles[0].say(rng.choice(SHORT[side])), needles[0].value
    introduced = rng.choice(INTRODUCED[side])
    where, system = rng.random(), None
    if where < 0.1:
        system = text
    elif where < 0.25:
        question = f"{question}\n\n{introduced}{text}"
    else:
        question = f"{introduced}{text}\n\n{question}"
    turns = [question, answer]
    if where >= 0.25 and len(needles) > 1 and rng.random() < 0.3:  # one more question about the same text
        turns += [needles[1].say(rng.choice(ASKED[side])), needles[1].say(ANSWERED[side])]
        needles[0], needles[1] = needles[1], needles[0]
    return chat(draw, lang, "recall", turns, _expect(needles[0], needles[1:]), system,
                thought=needles[0].say(ASKED[side][0]))


def conversation(draw: Draw, lang: str, length: float, count) -> Example:
    """Something said about oneself or another in one turn and asked for many turns later."""
    rng, side = draw.rng, lang == "ko"
    if mine := rng.random() < 0.5:
        kinds = [(NAME["en"], NAME["ko"], lambda draw, lang: draw.given(lang)), *KINDS.values()]
        told = [Needle(kind[side], "", kind[2](draw, lang)) for kind in rng.sample(kinds, rng.randint(1, 4))]
    else:
        told = _needles(draw, lang, rng.randint(1, 5))
    says, asks, answers = ((MINE_TOLD, MINE_ASKED, MINE_ANSWERED) if mine else (TOLD, ASKED, ANSWERED))
    pieces = [[needle.say(rng.choice(says[side])), rng.choice(NOTED[side])] for needle in told]
    n = sum(count(text) for piece in pieces for text in piece) + 40
    between = []
    trained = Draw(rng, held=False)  # what stands between is not what is asked for
    while n < length:
        question, answer, _ = facts.small_talk(trained, lang)
        between.append([question, answer])
        n += count(question) + count(answer) + 8
    for piece in pieces:
        between.insert(rng.randint(0, len(between)), piece)
    question, answer = told[0].say(rng.choice(asks[side])), told[0].say(answers[side])
    turns = [text for piece in between for text in piece] + [question, answer]
    return chat(draw, lang, "recall", turns, _expect(told[0], told[1:]), facts.system(rng, lang),
                thought=told[0].say(asks[side][0]))


def make(rng, held: bool = False, length: int | None = None, lang: str | None = None,
         count=estimate_tokens) -> Example:
    """length: tokens of context, as `count` counts them."""
    lang, draw = pick_lang(rng, lang), Draw(rng, held)
    form = document if rng.random() < 0.7 else conversation
    return form(draw, lang, _length(rng, length), count)
