"""Words, names and numbers to make examples of, and the rule that holds some of them out.

The rule: `is_held(content)` is true for every fifth string, by the hash of its words, whatever their case,
order and what stands between them: read_book, readBook and book-read are one. Training examples draw only
contents for which it is false, held-out examples only contents for which it is true, through the same
generators; so no list has to be kept, and any of millions of names is on the same side on every machine.
Names of models/text/apart.toml are held out as well: ordinary fields and tools to judge by.
"""

import hashlib
import random
import re
import tomllib
from functools import cache
from pathlib import Path

TEXT = Path(__file__).parent.parent / "text"

LANGUAGES = ("en", "ko")


def spelled(content: str) -> str:
    """Its words in the one spelling that the rule knows: "book read" for readBook."""
    return " ".join(sorted(_WORD.findall(_HUMP.sub(" ", content).lower())))


_WORD, _HUMP = re.compile(r"[^\W_]+"), re.compile(r"(?<=[a-z])(?=[A-Z])")


def is_held(content: str) -> bool:
    content = spelled(content)
    return content in apart_names() or hashlib.sha256(content.encode()).digest()[0] % 5 == 0


@cache
def apart() -> dict:
    """Ordinary fields and tools that no training example may name."""
    return tomllib.loads((TEXT / "apart.toml").read_text("utf-8"))


@cache
def apart_names() -> frozenset:
    """The names of these fields, tools and parameters, `spelled`."""
    names = [item.split()[0] for item in apart()["fields"].split(",")]
    for tool in apart()["tool"]:
        names += [tool["name"], *tool["parameters"]]
    return frozenset(map(spelled, names))


# ------------------------------------------------------------------------------------------------------
# Pools: lists of words from models/text/words.toml
# ------------------------------------------------------------------------------------------------------


@cache
def _words_file() -> dict:
    return tomllib.loads((TEXT / "words.toml").read_text("utf-8"))


@cache
def pool(name: str, section: str = "lists") -> tuple[str, ...]:
    return tuple(_words_file()[section][name].split())


@cache
def pairs(name: str, section: str = "pairs") -> tuple[tuple[str, str], ...]:
    """(English, Korean) pairs. Only the English side may have spaces."""
    return tuple(tuple(item.strip().rsplit(" ", 1)) for item in _words_file()[section][name].split(","))


@cache
def entries(name: str, section: str) -> tuple[tuple[str, ...], ...]:
    """The fields of every entry between two commas."""
    return tuple(tuple(item.split()) for item in _words_file()[section][name].split(","))


@cache
def dictionary() -> tuple[tuple[str, str], ...]:
    """All pairs of which neither word has a second meaning in the lists."""
    every = [pair for name in _words_file()["pairs"] for pair in pairs(name)]
    english, korean = ([pair[side] for pair in every] for side in (0, 1))
    return tuple(pair for pair in every if english.count(pair[0]) == korean.count(pair[1]) == 1)


@cache
def _side(words: tuple[str, ...], held: bool) -> tuple[str, ...]:
    return tuple(word for word in words if is_held(word) == held)


# ------------------------------------------------------------------------------------------------------
# Articles, Korean particles and number words
# ------------------------------------------------------------------------------------------------------

PARTICLES = {"은": ("은", "는"), "이": ("이", "가"), "을": ("을", "를"), "과": ("과", "와"), "으로": ("으로", "로"),
             "이에요": ("이에요", "예요"), "이고": ("이고", "고"), "이라는": ("이라는", "라는"),
             "이었": ("이었", "였"), "이야": ("이야", "야"), "이라고": ("이라고", "라고"), "입니다": ("입니다", "입니다")}
_DIGITS_WITH_FINAL = "013678"
_LETTERS_WITH_FINAL = "lmnr"


def _final(word: str) -> int:
    """The final consonant of the last syllable as Unicode counts them, 0 for none; 8 is ㄹ."""
    last = next((char for char in reversed(word.lower()) if char.isalnum()), "a")
    if "가" <= last <= "힣":
        return (ord(last) - ord("가")) % 28
    if last in "178lr":
        return 8
    return 1 if last in _DIGITS_WITH_FINAL or last in _LETTERS_WITH_FINAL else 0


class Ko(str):
    """A Korean word that takes the fitting particle when formatted: f"{Ko('책'):을}" is 책을."""

    def __format__(self, particle: str) -> str:
        if not particle:
            return str(self)
        with_final, without = PARTICLES[particle]
        final = _final(self)
        return self + (without if final == 0 or particle == "으로" and final == 8 else with_final)


def with_an(text: str) -> str:
    """English text with "a" before a vowel turned into "an"."""
    return re.sub(r"\b([Aa]) (?=[aeio])", r"\1n ", text)


_ONES = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
         "sixteen seventeen eighteen nineteen").split()
_TENS = "- - twenty thirty forty fifty sixty seventy eighty ninety".split()
_KOREAN_ONES = ("", *"일이삼사오육칠팔구")


def english_number(n: int) -> str:
    """0 to 9,999 in words: 7391 is seven thousand three hundred ninety-one."""
    if n < 20:
        return _ONES[n]
    if n < 100:
        return _TENS[n // 10] + (f"-{_ONES[n % 10]}" if n % 10 else "")
    size, name = (1000, "thousand") if n >= 1000 else (100, "hundred")
    return f"{_ONES[n // size]} {name}" + (f" {english_number(n % size)}" if n % size else "")


def korean_number(n: int) -> str:
    """0 to 9,999 in Sino-Korean words: 7391 is 칠천삼백구십일."""
    words = ""
    for size, name in ((1000, "천"), (100, "백"), (10, "십"), (1, "")):
        digit, n = divmod(n, size)
        if digit:
            words += ("" if digit == 1 and name else _KOREAN_ONES[digit]) + name
    return words or "영"


# ------------------------------------------------------------------------------------------------------
# Draw: contents of one example
# ------------------------------------------------------------------------------------------------------

_ONSETS = "b br c ch d dr f fl g gr h j k kr l m n p pl pr qu r s sh sk st t th tr v w y z".split()
_VOWELS = "a e i o u a e i o u ai ea ee ia io ou".split()
_CODAS = [""] * 9 + "n n r r l l s t m nd ck th rn x".split()
_SYLLABLES_KO = ("가 거 고 구 그 기 나 너 노 누 니 다 더 도 두 디 라 러 로 루 리 마 머 모 무 미 바 버 보 부 비 사 서 소 수 시 아 어 오 우 이 "
                 "자 저 조 주 지 차 초 카 코 쿠 타 토 투 티 파 포 피 하 호 후 간 건 곤 단 달 돈 란 랑 론 림 만 멜 몬 반 벨 본 산 샬 손 "
                 "안 엘 온 잔 젤 준 탄 텔 톤 판 펠 폰 한 헬 혼").split()
# Three invented words in ten are of any letters or syllables, or of pieces of real words: whoever copies only what is
# common cannot copy "Kiel" or "삼척".
RARE = 0.3
_LETTERS = {"c": "bcdfghjklmnpqrstvwxz", "v": "aeiouy"}
_PATTERNS = "cvvc cvcv vccvc cvccv cvvcv vcvcc cvcvc cvccvc cvvcvc ccvcvc cvcvcv cvcvccv".split()
_CAPITALS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


class Draw:
    """Draws contents of one side of the held-out rule, and no content twice within an example.

    rng   the example's generator of random numbers
    held  whether held-out contents are wanted
    contents  everything drawn under the rule so far, in order
    """

    def __init__(self, rng: random.Random, held: bool):
        self.rng, self.held, self.contents = rng, held, []

    def keep(self, make) -> str:
        """Calls make() until what it returns is on the right side and new."""
        while not self.keep_if(content := make()):
            pass
        return content

    def keep_if(self, content: str) -> bool:
        """Keeps a content that is on the right side and new; otherwise false."""
        if is_held(content) != self.held or content in self.contents:
            return False
        self.contents.append(content)
        return True

    def known(self, kind: str, lang: str) -> str:
        """A real word of a pool of which every fifth is held out, or an invented one if drawn before."""
        word = self.rng.choice(_side(pool(f"{kind}_{lang}"), self.held))
        return word if self.keep_if(word) else self.word(lang).capitalize()

    def word(self, lang: str) -> str:
        """A word that nobody knows."""
        return self.keep(lambda: self._invented(lang))

    def name(self, lang: str) -> str:
        """Given name and surname; Korean the other way round."""
        rng = self.rng
        if lang == "en":
            given = self.known("given", "en") if rng.random() < 0.5 else self.word("en").capitalize()
            return f"{given} {self.word('en').capitalize()}"
        syllables = pool("given_syllable_ko")
        surnames = pool("surname_ko")
        return self.keep(lambda: _unwritten(
            lambda: rng.choice(surnames) + rng.choice(syllables) + rng.choice(syllables)))

    def given(self, lang: str) -> str:
        """A first name."""
        rng = self.rng
        if lang == "en":
            return self.known("given", "en") if rng.random() < 0.5 else self.word("en").capitalize()
        syllables = pool("given_syllable_ko")
        return self.keep(lambda: _unwritten(lambda: rng.choice(syllables) + rng.choice(syllables)))

    def city(self, lang: str) -> str:
        if self.rng.random() < 0.5:
            return self.known("city", lang)
        return self.word("en").capitalize() if lang == "en" else self.keep(lambda: self._invented("ko") + "시")

    def digits(self, n: int) -> str:
        return self.keep(lambda: str(self.rng.randrange(10 ** (n - 1), 10 ** n)))

    def term(self, lang: str | None = None) -> tuple[str, str]:
        """What a thing is called, in English and Korean: one word or two, of the dictionary or invented.

        Invented words are the same in both languages, those of `lang` or English ones.
        """
        rng, chosen = self.rng, []

        def make():
            chosen[:] = [self._new_word(lang or "en") if rng.random() < 0.5 else rng.choice(dictionary())
                         for _ in range(rng.choice((1, 1, 2)))]
            return " ".join(english for english, _ in chosen)
        return self.keep(make), " ".join(korean for _, korean in chosen)

    def _new_word(self, lang: str) -> tuple[str, str]:
        """The same invented word for both languages, on the right side by itself as well."""
        while is_held(word := self._invented(lang)) != self.held:
            pass
        return word, word

    def name_with(self, *words: str) -> str:
        """A name, such as of a tool, of an invented word and these words in any order."""
        def make():
            parts = [self._new_word("en")[0], *words]
            self.rng.shuffle(parts)
            return "_".join(parts)
        return self.keep(make)

    def code(self) -> str:
        """Letters and digits in one of several patterns: KQ-4821, b7f03a, QX71-B."""
        rng = self.rng
        pattern = rng.choice(("AA-0000", "A000", "xxxxxx", "AA00-A", "A-000", "AAA00", "00-AA-00"))
        kinds = {"A": _CAPITALS, "0": "0123456789", "x": "0123456789abcdef"}
        return self.keep(lambda: "".join(rng.choice(kinds.get(char, char)) for char in pattern))

    def phone(self, lang: str) -> str:
        pattern = "010-{:04}-{:04}" if lang == "ko" else "555-{:03}-{:04}"
        return self.keep(lambda: pattern.format(self.rng.randrange(100, 1000), self.rng.randrange(10000)))

    def time(self) -> str:
        return self.keep(lambda: f"{self.rng.randrange(24):02}:{self.rng.randrange(60):02}")

    def date(self) -> str:
        rng = self.rng
        return self.keep(lambda: f"{rng.randrange(2020, 2036)}-{rng.randrange(1, 13):02}-"
                                 f"{rng.randrange(1, 29):02}")

    def compound(self, first: str, second: str, lang: str) -> str:
        """Two words that go together, such as a shade and a colour; the combination is the content."""
        side = LANGUAGES.index(lang)
        seconds = pairs(second) if second == "colours" else pairs(second, "adjectives")
        return self.keep(lambda: f"{self.rng.choice(pairs(first, 'adjectives'))[side]} "
                                 f"{self.rng.choice(seconds)[side]}")

    def _invented(self, lang: str) -> str:
        rng = self.rng
        rare = rng.random() < RARE

        def make():
            if lang == "ko":
                syllables = _every_syllable() if rare else _SYLLABLES_KO
                return "".join(rng.choice(syllables) for _ in range(rng.choice((2, 3, 3, 4))))
            if rare and rng.random() < 0.5:
                return "".join(rng.choice(_LETTERS[kind]) for kind in rng.choice(_PATTERNS))
            if rare:
                return _spliced(rng)
            return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
                           for _ in range(rng.choice((2, 2, 3))))
        return _unwritten(make)


def _spliced(rng: random.Random) -> str:
    """The beginning of one real word and the end of another: tokens that else stand in few words, in a new order."""
    first, second = rng.choice(_real()), rng.choice(_real())
    return first[:rng.randint(2, 4)] + second[-rng.randint(2, 4):]


@cache
def _real() -> tuple[str, ...]:
    names = [name.lower() for kind in ("given_en", "city_en") for name in pool(kind)]
    return tuple(word for word in [*names, *(english for english, _ in dictionary())] if word.isalpha())


@cache
def _every_syllable() -> tuple[str, ...]:
    """The 2,350 Korean syllables of the standard KS X 1001, which has nearly all that text is written with."""
    every = map(chr, range(ord("가"), ord("힣") + 1))
    return tuple(syllable for syllable in every if len(syllable.encode("euc_kr")) == 2)


@cache
def _written() -> frozenset:
    """All words of the handwritten texts and the generators, but for those of training alone: more of these must not
    change what is invented."""
    files = [path for path in TEXT.rglob("*.t*") if path.parent.name != "wide"] + [*Path(__file__).parent.glob("*.py")]
    texts = (path.read_text("utf-8") for path in files)
    return frozenset(word for text in texts for word in _WORD.findall(text.lower()))


def _unwritten(make) -> str:
    """Calls make() until the word is in no handwritten text: an invented one that means something is known already."""
    while (word := make()) in _written():
        pass
    return word


_SLOT_PAIRS = {"object": "objects", "animal": "animals", "food": "foods", "job": "jobs", "place": "places",
          "nature": "nature", "colour": "colours"}


class Slots(dict):
    """What {name}, {city}, {object} and the like stand for, drawn anew each time one is asked for."""

    def __init__(self, draw: Draw, lang: str):
        super().__init__()
        self.draw, self.lang = draw, lang

    def __missing__(self, slot: str) -> str:
        return Ko(self._content(slot))

    def _content(self, slot: str) -> str:
        draw, lang, rng = self.draw, self.lang, self.draw.rng
        side = LANGUAGES.index(lang)
        if slot in _SLOT_PAIRS:
            return rng.choice(pairs(_SLOT_PAIRS[slot]))[side]
        if slot == "adj":
            return rng.choice(pairs("pairs", "adjectives"))[side]
        if slot == "n":
            return str(rng.randint(2, 99))
        if slot == "hour":
            return f"{rng.randint(1, 12)} o'clock" if lang == "en" else f"{rng.randint(1, 12)}시"
        if slot in ("day", "month", "weather"):
            return rng.choice(pool(f"{slot}_{lang}"))
        return getattr(draw, slot)(lang)
