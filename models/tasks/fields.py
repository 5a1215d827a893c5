"""Named, typed values: the parameters of tools and the fields of JSON answers, and how people say them.

Half of the fields are those of models/text/words.toml; the names of the others are drawn for the example,
so that names have to be read from the schema.
"""

from dataclasses import dataclass

from .filler import sentence
from .words import LANGUAGES, Draw, Ko, apart, english_number, entries, pairs

_TYPES = {"integer": "integer", "large": "integer", "year": "integer", "number": "number",
          "boolean": "boolean"}


@dataclass(frozen=True)
class Field:
    """name is what the schema says; labels what people say; properties the fields of an object."""

    name: str
    label: str
    label_ko: str
    schema: dict
    kind: str
    properties: tuple = ()

    def say(self, lang: str) -> str:
        return self.label if lang == "en" else self.label_ko


def draw_fields(draw: Draw, n: int, nested: bool = True) -> list[Field]:
    """n different fields; objects among them only where `nested`."""
    usable = [entry for entry in entries("fields", "tools") if nested or entry[2] != "object"]
    chosen = {}
    while len(chosen) < n:
        name, label_ko, kind = draw.rng.choice(usable)
        if draw.rng.random() < 0.5:  # another name for something of this kind
            label, label_ko = draw.term()
            name = label.replace(" ", "_") if draw.rng.random() < 0.9 else camel_case(label)
        else:
            label = name.replace("_", " ")
        chosen.setdefault(name, (label, label_ko, kind))
    return [_field(draw, name, *rest) for name, rest in chosen.items()]


def draw_fields_apart(draw: Draw, n: int) -> list[Field]:
    """n different fields of those that are never trained on."""
    chosen = draw.rng.sample([item.split() for item in apart()["fields"].split(",")], n)
    return [_field(draw, name, name.replace("_", " "), *rest) for name, *rest in chosen]


def plain_field(name: str, kind: str) -> Field:
    """A field of text that is called the same by everybody."""
    return Field(name, name.replace("_", " "), name.replace("_", " "), {"type": "string"}, kind)


def camel_case(words: str) -> str:
    first, *rest = words.split()
    return first + "".join(map(str.capitalize, rest))


def _field(draw: Draw, name: str, label: str, label_ko: str, kind: str) -> Field:
    properties = ()
    if kind == "enum":
        schema = {"type": "string", "enum": list(draw.rng.choice(entries("enums", "tools"))[0].split("/"))}
    elif kind in ("strings", "integers"):
        schema = {"type": "array", "items": {"type": kind[:-1]}}
    elif kind == "object":
        properties = tuple(draw_fields(draw, draw.rng.randint(2, 3), nested=False))
        schema = object_schema(properties)
    else:
        schema = {"type": type_of(kind)}
    return Field(name, label, label_ko, schema, kind, properties)


def type_of(kind: str) -> str:
    """JSON's type for a kind of single value."""
    return _TYPES.get(kind, "string")


def object_schema(fields, optional=()) -> dict:
    return {"type": "object", "properties": {field.name: field.schema for field in fields},
            "required": [field.name for field in fields if field not in optional]}


# ------------------------------------------------------------------------------------------------------
# Values
# ------------------------------------------------------------------------------------------------------


def _title(draw: Draw, lang: str) -> str:
    """A short phrase of invented words."""
    words = [draw.word(lang) for _ in range(draw.rng.randint(1, 3))]
    return " ".join(words).capitalize()


def _number(draw: Draw) -> float:
    rng = draw.rng
    return float(draw.keep(lambda: f"{rng.randint(0, 999)}.{rng.randint(1, 99)}".rstrip("0")))


def draw_value(draw: Draw, field: Field, lang: str):
    """A value of the field's schema. Small integers and choices are too few to be held out."""
    rng, kind = draw.rng, field.kind
    if kind == "object":
        return {one.name: draw_value(draw, one, lang) for one in field.properties}
    if kind == "enum":
        return rng.choice(field.schema["enum"])
    if kind == "strings":
        make = rng.choice((draw.word, draw.given, draw.city))
        return [make(lang) for _ in range(rng.randint(1, 4))]
    if kind == "integers":
        return [rng.randint(0, 10 ** rng.randint(1, 4)) for _ in range(rng.randint(2, 4))]
    return draw_kind(draw, kind, lang)


def draw_kind(draw: Draw, kind: str, lang: str):
    """A value of a kind that needs no more than its name."""
    return _MAKERS[kind](draw, lang)


_ROOMS = tuple(tuple(pair.rsplit(" ", 1)) for pair in (
    "kitchen 부엌,bedroom 침실,living room 거실,bathroom 욕실,hall 복도,cellar 지하실,attic 다락방,garage 차고,office 사무실,nursery 아기방,"
    "study 서재,guest room 손님방,dining room 식당,balcony 베란다,workshop 작업실,laundry room 세탁실,conference room 회의실").split(","))
_TONGUES = (("Korean", "한국어"), ("English", "영어"), ("German", "독일어"), ("French", "프랑스어"), ("Spanish", "스페인어"),
            ("Japanese", "일본어"), ("Chinese", "중국어"), ("Italian", "이탈리아어"), ("Dutch", "네덜란드어"), ("Thai", "태국어"))
_ENDS = "txt md py csv json pdf png jpg docx log yaml toml html js zip mp3".split()


def _room(draw: Draw, lang: str) -> str:
    return draw.rng.choice(_ROOMS)[lang == "ko"] if draw.rng.random() < 0.7 else draw.word(lang)


def _file(draw: Draw, lang: str) -> str:
    """An ordinary name or an invented one: old_ticket.pdf, notes2.txt, kelvu.csv."""
    rng = draw.rng
    if rng.random() < 0.5:
        return f"{draw.word('en')}.{rng.choice(_ENDS)}"
    stem = rng.choice(pairs(rng.choice(("objects", "animals", "places", "compute"))))[0].replace(" ", "_")
    first = rng.choice(("", "", "new_", "my-", "old_", f"{rng.randint(1, 2030)}-"))
    return f"{first}{stem}{rng.choice(('', '', str(rng.randint(1, 99))))}.{rng.choice(_ENDS)}"


def _phrase(draw: Draw, lang: str) -> str:
    """A few real words, a sentence of them, or invented ones."""
    rng, side = draw.rng, LANGUAGES.index(lang)
    chance = rng.random()
    if chance < 0.6:
        things = pairs(rng.choice(("objects", "animals", "foods", "places", "jobs", "compute", "nature")))
        return f"{rng.choice(pairs('pairs', 'adjectives'))[side]} {rng.choice(things)[side]}"
    # Quotation marks would end the value.
    return sentence(draw, lang).replace('"', "") if chance < 0.8 else _title(draw, lang)


_MAKERS = {
    "room": _room,
    "file": _file,
    "phrase": _phrase,
    "language": lambda draw, lang: draw.rng.choice(_TONGUES)[lang == "ko"],
    "person": lambda draw, lang: (draw.name if draw.rng.random() < 0.6 else draw.given)(lang),
    "city": lambda draw, lang: draw.city(lang),
    "title": _title,
    "word": lambda draw, lang: draw.word(lang),
    "id": lambda draw, lang: draw.code() if draw.rng.random() < 0.6 else draw.digits(draw.rng.randint(4, 7)),
    "path": lambda draw, lang: f"{draw.word('en')}.{draw.rng.choice(['txt', 'py', 'md', 'csv', 'json'])}",
    "date": lambda draw, lang: draw.date(),
    "time": lambda draw, lang: draw.time(),
    "phone": lambda draw, lang: draw.phone(lang),
    "email": lambda draw, lang: f"{draw.word('en')}@{draw.word('en')}.{draw.rng.choice(['com', 'kr'])}",
    "currency": lambda draw, lang: draw.rng.choice(("USD", "EUR", "JPY", "KRW", "GBP", "CNY")),
    "integer": lambda draw, lang: draw.rng.randint(0, 10 ** draw.rng.randint(1, 3)),
    "large": lambda draw, lang: draw.rng.randint(2, 10 ** draw.rng.randint(2, 5)),
    "year": lambda draw, lang: draw.rng.randint(1950, 2040),
    "number": lambda draw, lang: _number(draw),
    "boolean": lambda draw, lang: draw.rng.random() < 0.5,
}


# ------------------------------------------------------------------------------------------------------
# Words for values
# ------------------------------------------------------------------------------------------------------

_TRUTH = {"en": (("yes", "no"), ("true", "false"), ("on", "off")),
          "ko": (("예", "아니요"), ("참", "거짓"), ("네", "아니요"))}
_STATED = {"en": ("{label} {value}", "{label}: {value}", "{label} = {value}", "the {label} is {value}",
                  "{label} is {value}", "{value} as {label}"),
           "ko": ("{label} {value}", "{label}: {value}", "{label:은} {value}", "{label}={value}",
                  "{label:이} {value}")}


def say_value(draw: Draw, field: Field, value, lang: str) -> str:
    rng = draw.rng
    if isinstance(value, bool):
        return rng.choice(_TRUTH[lang])[not value]
    if isinstance(value, dict):
        inner = [f"{one.say(lang)} {say_value(draw, one, value[one.name], lang)}" for one in field.properties]
        return f"({', '.join(inner)})"
    if isinstance(value, list):
        return _joined([str(item) for item in value], lang, rng.random() < 0.5)
    if isinstance(value, int) and value <= 12 and lang == "en" and rng.random() < 0.2:
        return english_number(value)
    if isinstance(value, str) and " " in value and rng.random() < 0.5:
        return f'"{value}"'
    return str(value)


def _joined(items: list[str], lang: str, plain: bool) -> str:
    if plain or len(items) == 1:
        return ", ".join(items)
    return ", ".join(items[:-1]) + (" and " if lang == "en" else " 그리고 ") + items[-1]


def state(draw: Draw, fields, values: dict, lang: str) -> str:
    """The values of some fields in one run of words, all in the same way: "party size 4; date 2026-03-04"."""
    rng, template = draw.rng, draw.rng.choice(_STATED[lang])
    parts = [template.format(label=Ko(field.say(lang)),
                             value=say_value(draw, field, values[field.name], lang)) for field in fields]
    with_commas = any(field.kind in ("strings", "integers") for field in fields)
    return rng.choice(("; ", ". ") if with_commas else (", ", "; ", ". ")).join(parts)
