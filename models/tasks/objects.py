"""JSON objects for questions that do not hold the values: a schema, a free question, and an object that ends.

A server may force an answer to be an object of a schema, whatever was asked. Then the model has to fill fields of
which it knows nothing, and each string has to end. What it says is always the same: the answer to the question where a
field wants text, the subject where one wants a name, and else the fallback of the type ("unknown", 0, false, the first
choice). In some examples the text says some of the values, and some are sentences about a person that say all of them.
The schema stands in the prompt, or nowhere, as where a server alone knows it. Then the first brace is not learnt: what
generates forces it, and a model that has learnt it begins objects where nobody wants one.
"""

from . import facts, people
from .example import Example, chat, json_in_prompt, pick_lang, to_json
from .facts import system
from .fields import Field, draw_fields, draw_value, object_schema, plain_field, state
from .words import LANGUAGES, Draw, Ko, pairs, with_an

ABOUT = (("Tell me about a {thing}.", "Describe a {thing}.", "Give me the facts about a {thing}.",
          "Say something about a {thing}.",
          "Make up a {thing}.", "What do you know about a {thing}?", "An example of a {thing}, please.", "{thing}",
          "Create a record for a {thing}.", "Write down what a {thing} is like."),
         ("{thing}에 대해 말해 줘.", "{thing:을} 설명해 줘.", "{thing}에 관한 사실을 알려 주세요.", "{thing} 이야기를 해 줘.",
          "{thing:을} 하나 지어내 줘.", "{thing}에 대해 뭘 알아?", "{thing}의 예를 하나 들어 주세요.", "{thing}",
          "{thing} 기록을 하나 만들어 줘.", "{thing:이} 어떤지 적어 주세요."))
THINGS = ("animals", "objects", "foods", "jobs", "places", "nature")
SCHEMA_SAID = (("{question}\n\nAnswer as JSON with this schema: {schema}",
                "Answer in JSON. Schema: {schema}\n\n{question}", "{question} Use this JSON schema: {schema}",
                "{question}\nReply with one object of this schema: {schema}",
                "Schema of the answer: {schema}\n{question}"),
               ("{question}\n\n다음 스키마의 JSON으로 답해 줘: {schema}", "JSON으로 답하세요. 스키마: {schema}\n\n{question}",
                "{question} 이 JSON 스키마를 써 줘: {schema}", "{question}\n이 스키마의 객체 하나로 답해 줘: {schema}",
                "답의 스키마: {schema}\n{question}"))
SYSTEM_SAID = (("Answer only with JSON of this schema: {schema}", "You answer in JSON. Schema: {schema}"),
               ("이 스키마의 JSON으로만 답하세요: {schema}", "JSON으로 답합니다. 스키마: {schema}"))
# Names of fields that want the answer as text, and of those that want the subject.
ANSWERS = "answer text reply description summary explanation content response message_text result_text details".split()
SUBJECTS = "name title subject topic thing label animal item word what".split()
UNKNOWN = ("unknown", "모름")
UNSEEN = 0.35  # of the examples do not show the schema
OFF_TOPIC = 0.35  # of the questions without a subject are about anything; far more of these have plain answers
PARTLY = 0.3   # of the others say some of the values in the text
LISTS = 0.6    # of the objects to train on may get a list more
PERSONS = 0.25  # of the examples are sentences about a person
# What the fields of what is told of people may be called.
OF_PERSON = {"place": ("city", "location", "lives_in", "home", "address_city"), "age": ("age", "years", "age_in_years"),
             "job": ("job", "profession", "works_as", "work", "role"), "name": ("name", "person", "first_name", "who")}
MOST_TOKENS = 400  # of an answer; a longer one has run away


def _fallback(field: Field, lang: str):
    """What a field gets of which nothing is known."""
    if field.kind == "object":
        return {one.name: _fallback(one, lang) for one in field.properties}
    schema = field.schema
    if "enum" in schema:
        return schema["enum"][0]
    empty = {"string": UNKNOWN[lang == "ko"], "integer": 0, "number": 0, "boolean": False, "array": []}
    return empty[schema["type"]]


def _schema(draw: Draw, fields: list[Field], lang: str) -> dict:
    """An object's schema, now and then with what tools write into it."""
    rng, schema = draw.rng, object_schema(fields)
    if rng.random() < 0.3:
        schema["additionalProperties"] = False
    if rng.random() < 0.2:
        schema["properties"] = {field.name: field.schema | {"description": field.say(lang)} for field in fields}
    return schema


def _fields(draw: Draw) -> list[Field]:
    """One to five fields; most have one for text or for a name among them, in any place."""
    rng = draw.rng
    fields = draw_fields(draw, rng.randint(0, 3))
    if not draw.held and rng.random() < LISTS:      # one of which nothing is known ends at once
        fields += [field for field in draw_fields(draw, 2, nested=False) if field.schema["type"] == "array"]
    for names, share in ((ANSWERS, 0.5), (SUBJECTS, 0.6)):
        name = rng.choice(names)
        if (rng.random() < share or not fields) and name not in [field.name for field in fields]:
            fields.insert(rng.randint(0, len(fields)), plain_field(name, "free"))
    return fields


def make(rng, held: bool = False, length: int | None = None, lang: str | None = None) -> Example:
    lang, draw = pick_lang(rng, lang), Draw(rng, held)
    if rng.random() < PERSONS:
        return _of_person(draw, lang)
    return _free(draw, lang, seen=held or rng.random() > UNSEEN)


def make_enforced(rng, held: bool = True, length: int | None = None, lang: str | None = None) -> Example:
    """To judge with: the prompt has no word of the schema, so whoever generates the answer has to enforce it."""
    lang, draw = pick_lang(rng, lang), Draw(rng, held)
    return _free(draw, lang, seen=False, thinking=False)


def _free(draw: Draw, lang: str, seen: bool, thinking: bool | None = None) -> Example:
    """A question that does not hold the values. seen: whether the prompt shows the schema."""
    rng, fields = draw.rng, _fields(draw)
    # Without a schema in sight the question is any question: otherwise its words alone would call for an object.
    question, subject, answer = (_about if draw.held or seen and rng.random() < 0.7 else _asked)(draw, lang)
    value = {field.name: _fallback(field, lang) for field in fields}
    for field in fields:
        if field.kind == "free":
            value[field.name] = (subject or UNKNOWN[lang == "ko"]) if field.name in SUBJECTS else answer
    told = [field for field in fields if field.kind != "free" and rng.random() < 0.5]
    if seen and told and rng.random() < PARTLY:
        known = {field.name: draw_value(draw, field, lang) for field in told}
        value |= known
        question += " " + state(draw, told, known, lang) + "."
    schema = _schema(draw, fields, lang)
    said, side = system(rng, lang), lang == "ko"
    if seen and rng.random() < 0.3:
        said = rng.choice(SYSTEM_SAID[side]).format(schema=json_in_prompt(draw, schema))
    elif seen:
        question = rng.choice(SCHEMA_SAID[side]).format(question=question, schema=json_in_prompt(draw, schema))
    expect = {"kind": "object", "schema": schema, "most_tokens": MOST_TOKENS}
    return chat(draw, lang, "objects", [question, to_json(value)], expect, said, thinking=thinking, enforced=not seen)


def _of_person(draw: Draw, lang: str) -> Example:
    """Free sentences about a person, and an object of what they say."""
    rng, name = draw.rng, draw.given(lang)
    told = [people.Told((name, name), kind, people.PROPERTIES[kind].draw(draw, lang))
            for kind in rng.sample(("place", "age", "job"), rng.randint(1, 3))]
    text = " ".join(people.tell(draw, one, lang) for one in told)
    told.append(people.Told((name, name), "name", name))
    fields = {rng.choice(OF_PERSON[one.kind]): one for one in rng.sample(told, len(told))}
    value = {field: int(one.value) if one.kind == "age" else one.value for field, one in fields.items()}
    properties = {field: {"type": "integer" if one.kind == "age" else "string"} for field, one in fields.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    question = rng.choice(SCHEMA_SAID[lang == "ko"]).format(question=text, schema=json_in_prompt(draw, schema))
    expect = {"kind": "json", "schema": schema, "value": value}
    return chat(draw, lang, "objects", [question, to_json(value)], expect, system(rng, lang))


def _about(draw: Draw, lang: str) -> tuple[str, str, str]:
    """A question about a thing, of the dictionary or invented, what the thing is called, and the answer."""
    rng, side = draw.rng, LANGUAGES.index(lang)
    thing = rng.choice(pairs(rng.choice(THINGS)))[side] if rng.random() < 0.6 and not draw.held else draw.word(lang)
    if rng.random() < 0.2:
        thing = f"{rng.choice(pairs('pairs', 'adjectives'))[side]} {thing}"
    question = rng.choice(ABOUT[side]).format(thing=Ko(thing))
    return with_an(question) if lang == "en" else question, thing, UNKNOWN[side]


def _asked(draw: Draw, lang: str) -> tuple[str, None, str]:
    """A question that the model knows, or knows that it cannot answer."""
    if draw.rng.random() < OFF_TOPIC:
        question, fact = facts.off_topic(draw.rng, lang)
        return question, None, fact.answer[lang]
    question, answer, *_ = facts.turn(draw.rng, lang, draw.rng.choice(("facts", "facts", "self", "self", "self")))
    return question, None, answer
