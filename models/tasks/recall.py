"""Recall: facts planted anywhere in a long context and asked for, in one message or over a conversation.

A needle says that some key (a person, or a place or thing) has some value of a kind (a code, a colour, ...).
Several needles of the same kind with other keys lie about, so that the key must be matched and not only the
kind. Half of the kinds are called by words drawn for the example. One question of ten asks for what was not
said. Keys, values and drawn words are held out. Between the sentences of the text stand passages of other tasks.
"""

import math
import string
from dataclasses import dataclass

from . import facts, lists, reasoning, structured, tools
from .example import Example, chat, estimate_tokens, pick_lang, to_json
from .filler import sentence
from .words import LANGUAGES, Draw, Ko

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
MINE_TOLD = (("My {kind} is {value}.", "By the way, my {kind} is {value}.", "my {kind} is {value}",
              "Please remember: my {kind} is {value}."),
             ("제 {kind:은} {value}입니다.", "참고로 제 {kind:은} {value:이에요}.", "기억해 주세요. 제 {kind:은} {value}입니다.",
              "내 {kind:은} {value:이야}.", "내 {kind:은} {value:이야}. 기억해 줘."))
MINE_ASKED = (("What is my {kind}?", "Do you remember my {kind}?", "Tell me my {kind}.", "what's my {kind}"),
              ("제 {kind:이} 뭐였죠?", "제 {kind:을} 기억하나요?", "제 {kind:은} 무엇인가요?", "내 {kind:이} 뭐야?",
               "내 {kind:이} 뭐라고 했지?", "제 {kind:이} 뭐예요?"))
NAME_TOLD = (("I am {value}.", "Hi, I am {value}.", "Call me {value}.", "Hello, my name is {value}."),
             ("저는 {value:이라고} 해요.", "나는 {value:이야}.", "안녕하세요, 저는 {value}입니다.", "저를 {value:이라고} 불러 주세요."))
MINE_ANSWERED = ("Your {kind} is {value}.", "{kind:은} {value}입니다.")
NOTED = (("Okay, noted.", "Got it.", "I will remember that."), ("네, 기억하겠습니다.", "알겠습니다.", "네, 기억해 둘게요."))
NAME = ("name", "이름")
NOT_SAID = ("That was not said.", "그것은 말하지 않았습니다.")
NOT_SAID_SHARE = 0.1
ALIKE = 0.35  # of the texts to train on have two needles that are easily mistaken for each other
PASSAGES = 0.06  # of the pieces of a text are a question of another task and its answer: about a quarter of its tokens
ALWAYS_MIXED = 4500  # tokens of context from which on scored texts have such passages; shorter ones are as they were
INTRODUCED = (("Read this text.\n\n", "Here is a text:\n\n", "", "Text:\n", "Use this text to answer.\n\n"),
              ("다음 글을 읽어 줘.\n\n", "아래는 글입니다.\n\n", "", "글:\n", "이 글을 보고 답해 주세요.\n\n"))


@dataclass(frozen=True)
class Needle:
    """kind: what it is called in English and Korean."""

    kind: tuple[str, str]
    key: str
    value: str

    def say(self, template: str, side: int) -> str:
        return template.format(kind=Ko(self.kind[side]), key=Ko(self.key), value=Ko(self.value))


def _kind(draw: Draw, lang: str) -> tuple:
    """English name, Korean name, and how values are drawn; half of the names are drawn, too."""
    kind = draw.rng.choice(list(KINDS.values()))
    return kind if draw.rng.random() < 0.5 else (*draw.term(lang), kind[2])


def _thing(draw: Draw, lang: str) -> str:
    english, korean = draw.term(lang)
    return f"the {english}" if lang == "en" else korean


KEYS = (Draw.name, Draw.name, Draw.given, Draw.given, Draw.city, _thing)


def _needles(draw: Draw, lang: str, n: int) -> list[Needle]:
    """n needles of one kind or two; the first is the one to ask for."""
    kinds = [_kind(draw, lang), _kind(draw, lang)]
    chosen = [kinds[0]] + [kinds[draw.rng.random() < 0.25] for _ in range(n - 1)]
    make_key = draw.rng.choice(KEYS)
    needles = [Needle(kind[:2], make_key(draw, lang), kind[2](draw, lang)) for kind in chosen]
    if n > 1 and not draw.held and draw.rng.random() < ALIKE:
        needles[1] = _alike(draw, lang, needles[0], kinds[0][2])
    return needles


def _alike(draw: Draw, lang: str, needle: Needle, make_value) -> Needle:
    """What is easily taken for a needle: another thing about the same key, or the same of a key that is nearly its."""
    if draw.rng.random() < 0.5:
        return Needle(_other_kind(draw, lang, [needle]), needle.key, make_value(draw, lang))
    return Needle(needle.kind, _nearly(draw, needle.key), make_value(draw, lang))


def _nearly(draw: Draw, key: str) -> str:
    """The key with one letter, or one Korean syllable, in place of another."""
    first = len("the ") if key.startswith("the ") else 0
    places = [i for i in range(first, len(key)) if key[i].islower() or "가" <= key[i] <= "힣"]

    def make():
        at = draw.rng.choice(places)
        letters = "가나다라마바사아자차카타하고노도로모보소오조호기니리미시이지" if key[at] > "z" else string.ascii_lowercase
        return key[:at] + draw.rng.choice(letters.replace(key[at], "")) + key[at + 1:]
    return draw.keep(make)


def _unsaid(draw: Draw, lang: str, needles: list[Needle]) -> Needle:
    """What none of the needles says: of a kind of theirs with another key, or the other way round."""
    if needles and draw.rng.random() < 0.5:
        return Needle(needles[0].kind, draw.rng.choice(KEYS)(draw, lang), "")
    key = needles[0].key if needles else draw.rng.choice(KEYS)(draw, lang)
    return Needle(_other_kind(draw, lang, needles), key, "")


def _other_kind(draw: Draw, lang: str, needles: list[Needle]) -> tuple[str, str]:
    while (kind := _kind(draw, lang)[:2]) in [needle.kind for needle in needles]:
        pass
    return kind


def _length(rng, length: int | None) -> float:
    """Tokens of context: short ones mostly, since they teach as much and cost less."""
    return length or math.exp(rng.uniform(math.log(60), math.log(3900)))


def _expect(asked: Needle, others: list[Needle], side: int) -> dict:
    about = [asked.kind[side], asked.key] if asked.key else [asked.kind[side]]
    return {"kind": "value", "about": about, "value": asked.value,
            "others": [other.value for other in others]}


def _expect_unsaid(side: int) -> dict:
    return {"kind": "unsaid", "answer": NOT_SAID[side]}


def document(draw: Draw, lang: str, length: float, count) -> Example:
    """Needles in a text, which is the system's or in the user's message before or after the question."""
    rng, side = draw.rng, lang == "ko"
    needles = _needles(draw, lang, rng.choice((1, 2, 3, 4, 4, 5, 6, 8)))
    planted = [_sentence(needle.say(rng.choice(TOLD[side]), side)) for needle in needles]
    sentences, n = [], sum(map(count, planted)) + 40
    is_mixed = length > ALWAYS_MIXED or not draw.held
    while n < length:
        sentences.append(_passage(rng, lang) if is_mixed and rng.random() < PASSAGES else sentence(draw, lang))
        n += count(sentences[-1])
    for needle in planted:
        sentences.insert(rng.randint(0, len(sentences)), needle)
    text = "".join(one + (" " if rng.random() < 0.85 else "\n") for one in sentences).strip()
    question, answer, expect = _question(draw, lang, needles)
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
        question, answer, expect = _question(draw, lang, needles[1:] + needles[:1])
        turns += [question, answer]
    return chat(draw, lang, "recall", turns, expect, system)


def _passage(rng, lang: str) -> str:
    """A question of another task with its answer, in one run of words. It is no place for what is held out."""
    example = rng.choice((lists.make, reasoning.make, structured.make, tools.make))(rng, False, lang=lang)
    answer = example.messages[-1]
    said = answer["content"] or to_json([call["function"] for call in answer["tool_calls"]])
    return f"{example.messages[-2]['content']} {said}"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _question(draw: Draw, lang: str, needles: list[Needle]) -> tuple[str, str, dict]:
    """A question for the first needle or for what was not said, its answer and what it is judged by."""
    rng, side = draw.rng, lang == "ko"
    unsaid = rng.random() < NOT_SAID_SHARE
    asked = _unsaid(draw, lang, needles) if unsaid else needles[0]
    question, answer = asked.say(rng.choice(ASKED[side]), side), _sentence(asked.say(ANSWERED[side], side))
    if rng.random() < 0.25:
        question, answer = question + asked.say(rng.choice(SHORT[side]), side), asked.value
    if unsaid:
        return question, NOT_SAID[side], _expect_unsaid(side)
    return question, answer, _expect(asked, needles[1:], side)


def conversation(draw: Draw, lang: str, length: float, count) -> Example:
    """Something said about oneself or another in one turn and asked for many turns later.

    What one says about oneself may be told in one language and asked for in the other.
    """
    rng = draw.rng
    mine, unsaid = rng.random() < 0.5, rng.random() < NOT_SAID_SHARE
    told_in = rng.choice(LANGUAGES) if mine and rng.random() < 0.4 else lang
    side = told_in == "ko"
    told = _mine(draw, told_in) if mine else _needles(draw, lang, rng.randint(1, 5))
    if unsaid and rng.random() < 0.5:  # nothing was said at all, perhaps not even other things
        told = []
        if not draw.held:  # what is scored has the length asked for
            length *= rng.random() < 0.5
    says, asks, answers = ((MINE_TOLD, MINE_ASKED, MINE_ANSWERED) if mine else (TOLD, ASKED, ANSWERED))
    pieces = [[_sentence(needle.say(rng.choice(NAME_TOLD[side] if needle.kind == NAME and rng.random() < 0.4
                                               else says[side]), side)), rng.choice(NOTED[side])]
              for needle in told]
    n = sum(count(text) for piece in pieces for text in piece) + 40
    between, is_mixed = [], not draw.held and rng.random() < facts.MIXED
    trained = Draw(rng, held=False)  # what stands between is not what is asked for
    while n < length:
        question, answer, _ = facts.small_talk(trained, pick_lang(rng, None) if is_mixed else told_in)
        between.append([question, answer])
        n += count(question) + count(answer) + 8
    for piece in pieces:
        between.insert(rng.randint(0, len(between)), piece)
    side = lang == "ko"
    if unsaid:
        asked = (_mine_unsaid if mine else _unsaid)(draw, lang, told)
        answer, expect = NOT_SAID[side], _expect_unsaid(side)
    else:
        asked = told[0]
        answer, expect = _sentence(asked.say(answers[side], side)), _expect(asked, told[1:], side)
    turns = [text for piece in between for text in piece] + [asked.say(rng.choice(asks[side]), side), answer]
    return chat(draw, lang, "recall", turns, expect, facts.system(rng, lang))


def _mine(draw: Draw, lang: str) -> list[Needle]:
    """What someone says about himself, each of another kind; the name is what is asked for most."""
    rng, needles = draw.rng, []
    if rng.random() < 0.4:
        needles.append(Needle(NAME, "", draw.given(lang)))
    for _ in range(rng.randint(not needles, 3)):
        kind = _kind(draw, lang)
        if kind[:2] not in [needle.kind for needle in needles]:
            needles.append(Needle(kind[:2], "", kind[2](draw, lang)))
    return needles


def _mine_unsaid(draw: Draw, lang: str, told: list[Needle]) -> Needle:
    if draw.rng.random() < 0.4 and NAME not in [needle.kind for needle in told]:
        return Needle(NAME, "", "")
    return Needle(_other_kind(draw, lang, told), "", "")


def make(rng, held: bool = False, length: int | None = None, lang: str | None = None,
         count=estimate_tokens) -> Example:
    """length: tokens of context, as `count` counts them."""
    lang, draw = pick_lang(rng, lang), Draw(rng, held)
    form = document if rng.random() < 0.7 else conversation
    return form(draw, lang, _length(rng, length), count)
