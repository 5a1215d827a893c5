"""Small exercises: copy, list, count, reverse, sort, numbers in words, translate, repeat and the like.

Each exercise is a function of a Draw and a language that returns question and answer; contents are drawn
under the held-out rule: invented words one by one, lists of dictionary words and numbers as a whole.
"""

from .example import Example, chat, pick_lang
from .words import Draw, Ko, dictionary, english_number, korean_number


def _ask(draw: Draw, lang: str, english: tuple, korean: tuple, **slots) -> str:
    return draw.rng.choice(english if lang == "en" else korean).format(**slots)


def _known_words(draw: Draw, lang: str, low: int, high: int) -> list[str]:
    """A list of dictionary words that is on the right side as a whole."""
    side, rng = (0 if lang == "en" else 1), draw.rng
    n = rng.randint(low, high)
    return draw.keep(lambda: ", ".join(pair[side] for pair in rng.sample(dictionary(), n))).split(", ")


def _items(draw: Draw, lang: str) -> list[str]:
    rng = draw.rng
    if rng.random() < 0.4:
        return _known_words(draw, lang, 3, 6)
    make = rng.choice((draw.word, draw.name, lambda lang: draw.digits(rng.randint(2, 4))))
    return [make(lang) for _ in range(rng.randint(3, 6))]


def _strings(draw: Draw, lang: str) -> str:
    rng = draw.rng
    kind = rng.randrange(7)
    if kind == 0:
        return draw.code()
    if kind == 1:
        return draw.digits(rng.randint(5, 12))
    if kind in (2, 3):  # names, which consist of any tokens
        make = rng.choice((draw.name, draw.given, draw.city))
        return ", ".join(make(lang) for _ in range(rng.randint(1, 4)))
    if kind == 4:
        words = _known_words(draw, lang, 2, 4)
        return f"{' '.join(words)} {rng.randint(2, 999)}"
    return " ".join(draw.word(lang) for _ in range(rng.randint(1, 5)))


def copy(draw: Draw, lang: str) -> tuple:
    text = _strings(draw, lang)
    return _ask(draw, lang,
                ("Copy this: {text}", "Repeat exactly: {text}", "Write this again: {text}", "Say {text}",
                 "Repeat after me: {text}", "Say it after me: {text}", "Type exactly this: {text}", "Echo: {text}",
                 "Give this back to me: {text}", 'Write "{text}".', "Copy: {text}", "The same text, please: {text}"),
                ("이것을 그대로 써 줘: {text}", "그대로 따라 써 주세요: {text}", "다음을 복사해 줘: {text}", "똑같이 말해 줘: {text}",
                 "따라 해 봐: {text}", "내 말을 따라 하세요: {text}", "이대로 입력해 줘: {text}", '"{text}"라고 써 줘.', "그대로 돌려줘: {text}",
                 "복사: {text}", "같은 글을 다시 보여 줘: {text}"),
                text=text), text


def spell(draw: Draw, lang: str) -> tuple:
    """The letters of a word one by one: whoever spells a word knows of what its tokens consist."""
    word = draw.rng.choice((draw.word, draw.given, draw.city))(lang)
    return _ask(draw, lang,
                ("Spell {word}.", "How is {word} spelled?", "Which letters does {word} have?",
                 "Write {word} letter by letter."),
                ("{word:을} 한 글자씩 써 줘.", "{word:은} 어떻게 써?", "{word}의 글자를 하나씩 말해 주세요."), word=Ko(word)), \
        "-".join(word)


def one_per_line(draw: Draw, lang: str) -> tuple:
    items = _items(draw, lang)
    return _ask(draw, lang, ("List these, one per line: {items}", "Make a list with dashes: {items}"),
                ("한 줄에 하나씩 나열해 줘: {items}", "목록으로 만들어 주세요: {items}"), items=", ".join(items)), \
        "\n".join(f"- {item}" for item in items)


def count(draw: Draw, lang: str) -> tuple:
    items = _items(draw, lang)
    question = _ask(draw, lang, ("How many items are in this list? {items}", "Count these: {items}",
                                 "How many are there: {items}?"),
                    ("다음 목록에는 몇 개가 있나요? {items}", "개수를 세어 줘: {items}", "모두 몇 개인가요: {items}"),
                    items=", ".join(items))
    return question, f"{len(items)}" if lang == "en" else f"{len(items)}개"


def reverse(draw: Draw, lang: str) -> tuple:
    items = _items(draw, lang)
    question = _ask(draw, lang, ("Reverse this list: {items}", "Write these in reverse order: {items}"),
                    ("순서를 거꾸로 써 줘: {items}", "이 목록을 뒤집어 주세요: {items}"), items=", ".join(items))
    return question, ", ".join(reversed(items))


def sort(draw: Draw, lang: str) -> tuple:
    rng = draw.rng
    numbers = draw.keep(lambda: ", ".join(map(str, rng.sample(range(100), rng.randint(3, 5)))))
    down = rng.random() < 0.3
    question = _ask(draw, lang,
                    ("Sort these numbers, {en} first: {numbers}", "Put in order, {en} first: {numbers}",
                     "Sort {numbers}, {en} first.", "{en} to the front: {numbers}"),
                    ("{ko} 수부터 정렬해 줘: {numbers}", "{ko} 것부터 차례로 써 주세요: {numbers}", "{numbers}, {ko} 수부터 정렬해 줘."),
                    en="largest" if down else "smallest", ko="큰" if down else "작은", numbers=numbers)
    return question, ", ".join(sorted(numbers.split(", "), key=int, reverse=down))


def sort_words(draw: Draw, lang: str) -> tuple:
    words = _known_words(draw, lang, 2, 5)
    return _ask(draw, lang,
                ("Sort these words: {words}", "Sort these: {words}", "Put in alphabetical order: {words}",
                 "Bring these words into order: {words}", "{words}: sort them."),
                ("가나다순으로 정렬해 줘: {words}", "이 낱말들을 차례대로 써 줘: {words}", "사전 순서로 놓아 주세요: {words}",
                 "정렬해 줘: {words}"), words=", ".join(words)), ", ".join(sorted(words))


def extreme(draw: Draw, lang: str) -> tuple:
    rng = draw.rng
    numbers = draw.keep(lambda: ", ".join(map(str, rng.sample(range(1000), rng.randint(2, 5)))))
    largest = rng.random() < 0.5
    question = _ask(draw, lang, ("Which number is the {en}: {numbers}?", "What is the {en} of {numbers}?"),
                    ("{numbers} 중 가장 {ko} 수는?", "다음에서 가장 {ko} 수를 골라 줘: {numbers}"),
                    en="largest" if largest else "smallest", ko="큰" if largest else "작은", numbers=numbers)
    return question, str((max if largest else min)(map(int, numbers.split(", "))))


def number_words(draw: Draw, lang: str) -> tuple:
    rng = draw.rng
    n = int(draw.keep(lambda: str(rng.randint(1, 10 ** rng.randint(1, 4) - 1))))
    forms = {"digits": str(n), "english": english_number(n), "korean": korean_number(n)}
    source, target = rng.sample(list(forms), 2)
    asked = {"digits": ("in digits", "숫자로"), "english": ("in English words", "영어로"),
             "korean": ("in Korean words", "한글로")}
    return _ask(draw, lang, ("Write {n} {en}.", "What is {n} {en}?", "{n} {en}", "Say '{n}' {en}.",
                             "How do you write {n} {en}?"),
                ("{n:을} {ko} 써 줘.", "{n:을} {ko} 쓰면?", "{n} {ko}", "'{n}'을 {ko} 말해 줘.", "{n:은} {ko} 뭐야?"),
                n=Ko(forms[source]), en=asked[target][0], ko=asked[target][1]), forms[target]


def translate(draw: Draw, lang: str) -> tuple:
    rng = draw.rng
    to_korean = rng.random() < 0.5
    # The dictionary has to be known, so single words are all trained on; only lists of them are held out.
    n = rng.choice((2, 3) if draw.held else (1, 1, 2, 3))
    while True:
        chosen = rng.sample(dictionary(), n)
        if n == 1 or draw.keep_if(", ".join(english for english, _ in chosen)):
            break
    source, target = (", ".join(pair[side] for pair in chosen) for side in ((0, 1) if to_korean else (1, 0)))
    return _ask(draw, lang, ("Translate into {en}: {text}", "What is {text} in {en}?", "{text} in {en}",
                             "Say '{text}' in {en}.", "How do you say {text} in {en}?", "{en} for {text}"),
                ("{ko}로 번역해 줘: {text}", "{text:은} {ko}로 뭐예요?", "{text} {ko}로", "'{text}'을 {ko}로 말해 줘.",
                 "{ko}로 {text:을} 뭐라고 해?"),
                en="Korean" if to_korean else "English", ko="한국어" if to_korean else "영어",
                text=Ko(source)), target


def repeat(draw: Draw, lang: str) -> tuple:
    word, n = draw.word(lang), draw.rng.randint(2, 6)
    return _ask(draw, lang, ("Write {word} {n} times.", "Repeat the word {word} {n} times."),
                ("{word:을} {n}번 써 줘.", "단어 {word:을} {n}번 반복해 주세요."), word=Ko(word), n=n), " ".join([word] * n)


def first_letters(draw: Draw, lang: str) -> tuple:
    words = [draw.word(lang) for _ in range(draw.rng.randint(1, 4))]
    return _ask(draw, lang, ("What is the first letter of each word: {words}?", "First letters of: {words}"),
                ("각 단어의 첫 글자는 무엇인가요: {words}", "첫 글자만 써 줘: {words}"), words=", ".join(words)), \
        ", ".join(word[0] for word in words)


def uppercase(draw: Draw, lang: str) -> tuple:
    text = " ".join(draw.word("en") for _ in range(draw.rng.randint(1, 2)))
    return _ask(draw, lang, ("Write in capital letters: {text}", "Uppercase {text}"),
                ("대문자로 바꿔 줘: {text}", "{text:을} 대문자로 써 주세요."), text=Ko(text)), text.upper()


def nth_item(draw: Draw, lang: str) -> tuple:
    items = _items(draw, lang)
    at = draw.rng.randrange(min(len(items), 4))
    english, korean = ("first", "second", "third", "fourth")[at], ("첫", "두", "세", "네")[at]
    return _ask(draw, lang, ("What is the {en} item of this list? {items}", "Give me the {en} one: {items}"),
                ("다음 목록의 {ko} 번째는? {items}", "{ko} 번째 것을 말해 줘: {items}"),
                en=english, ko=korean, items=", ".join(items)), items[at]


EXERCISES = (copy, copy, copy, spell, sort_words,
             one_per_line, count, reverse, sort, extreme, repeat, first_letters, uppercase, nth_item,
             *[number_words] * 3, *[translate] * 2)


def turn(draw: Draw, lang: str) -> tuple:
    """Question, answer, and what it is judged by."""
    question, answer = draw.rng.choice(EXERCISES)(draw, lang)
    return question, answer, {"kind": "exact", "answer": answer}


def make(rng, held: bool = False, length: int | None = None, lang: str | None = None) -> Example:
    lang, draw = pick_lang(rng, lang), Draw(rng, held)
    question, answer, expect = turn(draw, lang)
    return chat(draw, lang, "lists", [question, answer], expect)
