"""JSON answers: a schema and a text in the prompt, one JSON object with the text's values as the answer."""

from dataclasses import replace

from .example import Example, chat, json_in_prompt, pick_lang, to_json
from .facts import system
from .fields import Field, draw_fields, draw_fields_apart, draw_value, object_schema, state
from .filler import sentence
from .words import Draw

ASKED = (("Answer as JSON with this schema: {schema}\n\n{text}",
          "{text}\n\nAnswer as JSON with this schema: {schema}",
          "Extract the values as JSON. Schema: {schema}\nText: {text}",
          "Fill this JSON schema from the text.\n{schema}\n{text}"),
         ("다음 스키마에 맞는 JSON으로 답해 줘: {schema}\n\n{text}", "{text}\n\n다음 스키마의 JSON으로 답하세요: {schema}",
          "글에서 값을 뽑아 JSON으로 써 주세요. 스키마: {schema}\n글: {text}", "이 JSON 스키마를 글의 내용으로 채워 줘.\n{schema}\n{text}"))

NAMED_ANEW = 0.4    # of the Korean examples to train on have fields whose Korean words are invented


def make(rng, held: bool = False, length: int | None = None, lang: str | None = None) -> Example:
    lang, draw = pick_lang(rng, lang), Draw(rng, held)
    fields, described = draw_fields(draw, rng.randint(1, 5)), rng.random() < 0.3
    if lang == "ko" and not held and rng.random() < NAMED_ANEW:
        fields, described = [_named_anew(draw, field) for field in fields], True
    return _of_fields(draw, lang, fields, described)


def _named_anew(draw: Draw, field: Field) -> Field:
    """The field under a Korean word that nobody knows, half of the time: the schema alone says that it means it."""
    return replace(field, label_ko=draw.word("ko")) if draw.rng.random() < 0.5 else field


def make_new_fields(rng, held: bool = True, length: int | None = None, lang: str | None = None) -> Example:
    """To judge with: only fields that no training example has."""
    lang, draw = pick_lang(rng, lang), Draw(rng, held)
    # It cannot know what these are called in Korean.
    return _of_fields(draw, lang, draw_fields_apart(draw, rng.randint(1, 4)), described=lang == "ko")


def _of_fields(draw: Draw, lang: str, fields: list, described: bool) -> Example:
    """described: whether the schema says what the text calls a field."""
    rng = draw.rng
    value = {field.name: draw_value(draw, field, lang) for field in fields}
    schema = object_schema(fields)
    if described:
        schema["properties"] = {field.name: field.schema | {"description": field.say(lang)}
                                for field in fields}
    stated = state(draw, rng.sample(fields, len(fields)), value, lang)
    sentences = [sentence(draw, lang) for _ in range(rng.choice((0, 0, 1, 2)))]
    sentences.insert(rng.randint(0, len(sentences)), stated + ".")
    question = rng.choice(ASKED[lang == "ko"]).format(schema=json_in_prompt(draw, schema), text=" ".join(sentences))
    expect = {"kind": "json", "schema": schema, "value": value}
    return chat(draw, lang, "json", [question, to_json(value)], expect, system(rng, lang))
