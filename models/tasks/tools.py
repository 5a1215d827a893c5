"""Tool use: schemas of one to four tools in the prompt, and a request that needs one call, several, or none.

A tool is a verb and a noun, such as book_team_room(date, party_size), or one of a few handwritten ones (NATURAL) with
requests as people make them. Names of tools and the values to pass are held out. After a tool's result the right
answer tells what it says.
"""

from dataclasses import dataclass

from . import facts
from .example import NO_THOUGHT, Example, chat, compact, pick_lang
from .fields import Field, draw_fields, draw_value, object_schema, state
from .words import Draw, Ko, pairs, with_an


@dataclass(frozen=True)
class Tool:
    """verb and noun are (English, Korean) pairs; optional are the fields that a request may leave out."""

    name: str
    verb: tuple
    noun: tuple
    fields: tuple[Field, ...]
    optional: tuple[Field, ...]

    def schema(self, draw: Draw) -> dict:
        rng = draw.rng
        verb, noun = self.verb[0], self.noun[0]
        text = with_an(rng.choice((f"{verb.capitalize()} a {noun}.", f"{verb.capitalize()} the {noun}.",
                                   f"Can {verb} a {noun}.", f"{self.noun[1]} {self.verb[1]}")))
        parameters = object_schema(self.fields, self.optional)
        if rng.random() < 0.4:
            parameters["properties"] = {field.name: {**field.schema, "description": rng.choice((field.label, field.label_ko))}
                                        for field in self.fields}
        return {"type": "function",
                "function": {"name": self.name, "description": text, "parameters": parameters}}


# ------------------------------------------------------------------------------------------------------
# Tools, calls and requests
# ------------------------------------------------------------------------------------------------------


def _function_name(draw: Draw, verb: str, noun: str) -> str:
    words = f"{verb} {noun}".replace("_", " ").split()
    style = draw.rng.random()
    if style < 0.7:
        return "_".join(words)
    if style < 0.85:
        return words[0] + "".join(map(str.capitalize, words[1:]))
    return "_".join(words[1:] + words[:1]) if style < 0.95 else "-".join(words)


def _invent(draw: Draw, verb: tuple | None = None, noun: tuple | None = None) -> Tool:
    rng, chosen = draw.rng, {}

    def make():
        chosen["verb"], chosen["noun"] = verb or rng.choice(pairs("verbs", "tools")), noun or _noun(rng)
        return _function_name(draw, chosen["verb"][0], chosen["noun"][0])
    name = draw.keep(make)
    fields = tuple(draw_fields(draw, rng.choice((0, 1, 1, 2, 2, 3, 3, 4))))
    optional = tuple(field for field in fields if rng.random() < 0.25)
    return Tool(name, chosen["verb"], chosen["noun"], fields, optional)


def _noun(rng) -> tuple[str, str]:
    noun = rng.choice(pairs("nouns", "tools"))
    if rng.random() < 0.5:
        return noun
    qualifier = rng.choice(pairs("qualifiers", "tools"))
    return f"{qualifier[0]} {noun[0]}", f"{qualifier[1]} {noun[1]}"


def _invent_several(draw: Draw, n: int) -> list[Tool]:
    """n tools with different verbs or nouns; the others often share one of them with the first."""
    tools = [_invent(draw)]
    while len(tools) < n:
        share = draw.rng.random()
        tool = _invent(draw, tools[0].verb if share < 0.25 else None, tools[0].noun if 0.25 < share < 0.5 else None)
        if (tool.verb, tool.noun) not in [(other.verb, other.noun) for other in tools]:
            tools.append(tool)
    return tools


REQUEST = (("Please {verb} the {noun}", "{Verb} the {noun}", "I want to {verb} a {noun}", "Can you {verb} the {noun}",
            "{Verb} a {noun} for me", "I need to {verb} the {noun}"),
           ("{noun} {verb}해 줘", "{noun:을} {verb}해 주세요", "{noun} {verb} 부탁해요", "{noun:을} {verb}하고 싶어요",
            "{noun} {verb}해 주실래요", "{noun:을} {verb}해야 합니다"))
JOINED = (("{request} with {details}.", "{request}: {details}.", "{request}. {details}.", "{request}, {details}."),
          ("{request}. {details}.", "{request}: {details}.", "{request}. {details}", "{details}. {request}."))
ALSO = (" And ", " Also: ", " Then "), (" 그리고 ", " 또 ", " 그다음 ")


def _ask_for(draw: Draw, tool: Tool, lang: str) -> tuple[str, dict]:
    """A request for one call, and the call."""
    rng, side = draw.rng, lang == "ko"
    given = [field for field in tool.fields if field not in tool.optional or rng.random() < 0.5]
    values = {field.name: draw_value(draw, field, lang) for field in given}
    request = with_an(rng.choice(REQUEST[side]).format(verb=Ko(tool.verb[side]), noun=Ko(tool.noun[side]),
                                                       Verb=tool.verb[0].capitalize()))
    spoken = rng.sample(given, len(given)) if rng.random() < 0.5 else given
    if given:
        details = state(draw, spoken, values, lang)
        request = rng.choice(JOINED[side]).format(request=request, details=details)
    else:
        request += "."
    return request, {"name": tool.name, "arguments": values}


def call_message(calls: list[dict]) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call} for call in calls]}


def _schemas(draw: Draw, tools: list[Tool]) -> list[dict]:
    return [tool.schema(draw) for tool in draw.rng.sample(tools, len(tools))]


# What is asked, as (request, calls, schemas in the prompt).


def one(draw: Draw, lang: str) -> tuple[str, list, list]:
    tools = _invent_several(draw, draw.rng.randint(1, 4))
    request, call = _ask_for(draw, tools[0], lang)
    return request, [call], _schemas(draw, tools)


def several(draw: Draw, lang: str) -> tuple[str, list, list]:
    """Two or three calls at once, of one tool or of several."""
    rng = draw.rng
    tools = _invent_several(draw, rng.randint(1, 3))
    asked = [_ask_for(draw, rng.choice(tools), lang) for _ in range(rng.choice((2, 2, 3)))]
    calls = [call for i, (_, call) in enumerate(asked) if call not in [other for _, other in asked[:i]]]
    return rng.choice(ALSO[lang == "ko"]).join(text for text, _ in asked), calls, _schemas(draw, tools)


def natural(draw: Draw, lang: str) -> tuple[str, list, list]:
    """One call of a handwritten tool, others of both sorts beside it."""
    rng = draw.rng
    chosen = rng.sample(NATURAL, rng.randint(1, 3))
    others = _invent_several(draw, rng.randint(1, 4 - len(chosen)))
    schemas = [_natural_schema(*entry[:3]) for entry in chosen] + _schemas(draw, others)
    name, _, _, drawn, *requests = chosen[0]
    arguments = {key: make(draw, lang) for key, make in drawn.items()}
    request = rng.choice(requests[lang == "ko"]).format(**{key: Ko(value) for key, value in arguments.items()})
    rng.shuffle(schemas)
    return request, [{"name": name, "arguments": arguments}], schemas


def _natural_schema(name: str, description: str, properties: dict) -> dict:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {
        "type": "object", "properties": properties, "required": list(properties)}}}


def _any_request(draw: Draw, lang: str) -> tuple[str, list, list]:
    return draw.rng.choices((one, several, natural), (5, 3, 2))[0](draw, lang)


# ------------------------------------------------------------------------------------------------------
# Examples
# ------------------------------------------------------------------------------------------------------


def to_call(draw: Draw, lang: str) -> Example:
    """A request that the tools can fulfil, sometimes after other talk; the answer is the calls."""
    rng = draw.rng
    request, calls, schemas = _any_request(draw, lang)
    trained = Draw(rng, held=False)  # what was said before is not what is asked for
    before = [text for _ in range(rng.choices((0, 1, 2), (8, 1, 1))[0]) for text in facts.small_talk(trained, lang)[:2]]
    thought = (f"Tools: {', '.join(call['name'] for call in calls)}." if lang == "en" else
               f"도구: {', '.join(call['name'] for call in calls)}.")
    return chat(draw, lang, "tools", [*before, request, call_message(calls)],
                {"kind": "calls", "calls": calls, "tools": schemas}, facts.system(rng, lang), schemas, thought)


NO_TOOL = {"en": "None of the tools can do that.", "ko": "그 일을 할 수 있는 도구가 없습니다."}


def no_call(draw: Draw, lang: str) -> Example:
    """A question that needs no tool, or a request that no tool fits."""
    rng = draw.rng
    tools = _invent_several(draw, rng.randint(2, 4))
    schemas = _schemas(draw, tools[1:])
    if rng.random() < 0.5 and not draw.held:
        question, answer, expect = facts.turn(rng, lang, rng.choice(("facts", "facts", "self")))[:3]
    else:
        question, answer = _ask_for(draw, tools[0], lang)[0], NO_TOOL[lang]
        expect = {"kind": "keys", "keys": ["None of the tools" if lang == "en" else "도구가 없습니다"]}
    return chat(draw, lang, "tools", [question, answer], expect, facts.system(rng, lang), schemas, NO_THOUGHT)


# ------------------------------------------------------------------------------------------------------
# Results
# ------------------------------------------------------------------------------------------------------

FAILED = {"en": "The call failed: {error}.", "ko": "호출이 실패했습니다: {error}."}
ERRORS = "not found, no access, timed out, out of stock, already exists, invalid date, too many requests, offline".split(", ")


def to_tell(draw: Draw, lang: str) -> Example:
    """A request, its calls, the tools' results, and the answer that tells the results."""
    request, calls, schemas = _any_request(draw, lang)
    results = [_result(draw, lang) for _ in calls]
    turns = [request, call_message(calls), *({"role": "tool", "content": compact(result)} for result, *_ in results),
             {"role": "assistant", "content": " ".join(answer for _, answer, _ in results)}]
    values = [value for *_, values in results for value in values]
    return chat(draw, lang, "tools", turns, {"kind": "values", "values": values}, None, schemas, NO_THOUGHT)


def _result(draw: Draw, lang: str) -> tuple[dict, str, list[str]]:
    """What a tool returns, the sentence that tells it, and the values that have to be in it."""
    rng = draw.rng
    if rng.random() < 0.1:
        error = rng.choice(ERRORS)
        return {"error": error}, FAILED[lang].format(error=error), [error]
    fields = draw_fields(draw, rng.randint(1, 3), nested=False)
    result = {field.name: draw_value(draw, field, lang) for field in fields}
    told = {name: _told(value) for name, value in result.items()}
    return result, _tell(fields, told, lang), list(told.values())


def _told(value) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else value if isinstance(value, str) else compact(value)


def _tell(fields: list[Field], told: dict, lang: str) -> str:
    if lang == "en":
        text = ", and ".join(f"the {field.label} is {told[field.name]}" for field in fields)
        return f"{text[0].upper()}{text[1:]}."
    text = ", ".join(f"{Ko(field.label_ko):은} {told[field.name]}" for field in fields)
    return f"{text}입니다."


# ------------------------------------------------------------------------------------------------------
# Handwritten tools
# ------------------------------------------------------------------------------------------------------

CITY, WHO = {"type": "string"}, {"type": "string"}
INTEGER, NUMBER = {"type": "integer"}, {"type": "number"}
# name, description, properties, optional ones, how each is drawn, requests in English and in Korean.
NATURAL = (
    ("get_weather", "Current weather of a city.", {"city": CITY},
     {"city": lambda draw, lang: draw.city(lang)},
     ("What is the weather in {city}?", "How is the weather in {city} today?", "Is it raining in {city}?", "weather {city}"),
     ("{city} 날씨 어때?", "오늘 {city} 날씨 알려 줘.", "{city}에 비가 오나요?", "{city}의 날씨를 알려 주세요.")),
    ("get_time", "Local time of a city.", {"city": CITY},
     {"city": lambda draw, lang: draw.city(lang)},
     ("What time is it in {city}?", "Tell me the time in {city}.", "current time in {city}"),
     ("{city:은} 지금 몇 시야?", "{city}의 현재 시각을 알려 주세요.", "지금 {city} 시간 알려 줘.")),
    ("set_timer", "Start a timer.", {"minutes": INTEGER},
     {"minutes": lambda draw, lang: draw.rng.randint(1, 90)},
     ("Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.", "Start a {minutes} minute timer."),
     ("{minutes}분 타이머 맞춰 줘.", "{minutes}분 뒤에 알려 줘.", "타이머 {minutes}분으로 설정해 주세요.")),
    ("send_message", "Send a message to a person.", {"to": WHO, "text": {"type": "string"}},
     {"to": lambda draw, lang: draw.given(lang), "text": lambda draw, lang: f"{draw.word(lang)} {draw.word(lang)}"},
     ("Tell {to}: {text}", 'Send {to} the message "{text}".', "Write to {to}: {text}"),
     ('{to}에게 "{text}"라고 보내 줘.', "{to}한테 메시지 보내 줘: {text}", "{to}에게 이렇게 전해 주세요: {text}")),
    ("multiply", "Multiply two numbers.", {"a": INTEGER, "b": INTEGER},
     {"a": lambda draw, lang: draw.rng.randint(2, 9999), "b": lambda draw, lang: draw.rng.randint(2, 9999)},
     ("What is {a} times {b}?", "Multiply {a} by {b}.", "{a} * {b}"),
     ("{a} 곱하기 {b:은} 얼마야?", "{a:과} {b:을} 곱해 줘.", "{a} * {b}")),
    ("add", "Add two numbers.", {"a": INTEGER, "b": INTEGER},
     {"a": lambda draw, lang: draw.rng.randint(2, 9999), "b": lambda draw, lang: draw.rng.randint(2, 9999)},
     ("What is {a} plus {b}?", "Add {a} and {b}.", "{a} + {b}"),
     ("{a} 더하기 {b:은} 얼마야?", "{a:과} {b:을} 더해 줘.", "{a} + {b}")),
    ("convert_currency", "Convert an amount of money.", {"amount": INTEGER, "from": CITY, "to": CITY},
     {"amount": lambda draw, lang: draw.rng.randint(1, 5000), "from": lambda draw, lang: draw.rng.choice(("USD", "EUR", "JPY")),
      "to": lambda draw, lang: draw.rng.choice(("KRW", "GBP", "CNY"))},
     ("How much is {amount} {from} in {to}?", "Convert {amount} {from} to {to}.", "{amount} {from} in {to}"),
     ("{amount} {from:은} {to:으로} 얼마야?", "{amount} {from:을} {to:으로} 바꿔 줘.", "{amount} {from:이} {to:으로} 얼마인가요?")),
    ("search_web", "Search the web.", {"query": CITY},
     {"query": lambda draw, lang: f"{draw.word(lang)} {draw.word(lang)}"},
     ("Search the web for {query}.", "Look up {query}.", "Google {query}", "Find pages about {query}."),
     ("{query:을} 검색해 줘.", "인터넷에서 {query:을} 찾아 주세요.", "{query} 검색")),
    ("play_music", "Play a song.", {"title": CITY, "artist": WHO},
     {"title": lambda draw, lang: draw.word(lang).capitalize(), "artist": lambda draw, lang: draw.name(lang)},
     ("Play {title} by {artist}.", 'I want to hear "{title}" by {artist}.', "Put on {title} by {artist}."),
     ("{artist}의 {title} 틀어 줘.", "{artist:이} 부른 {title:을} 듣고 싶어요.", "{artist}의 {title:을} 재생해 주세요.")),
    ("add_event", "Put an event into the calendar.", {"title": CITY, "date": CITY, "time": CITY},
     {"title": lambda draw, lang: draw.word(lang), "date": lambda draw, lang: draw.date(), "time": lambda draw, lang: draw.time()},
     ("Put {title} into my calendar on {date} at {time}.", "I have {title} on {date} at {time}, write it down.",
      "Add {title}, {date}, {time}."),
     ("{date} {time}에 {title} 일정 넣어 줘.", "{date} {time}에 {title:이} 있으니 적어 둬.", "일정 추가: {title}, {date}, {time}")),
    ("set_temperature", "Set the temperature of a room.", {"room": CITY, "degrees": NUMBER},
     {"room": lambda draw, lang: draw.word(lang), "degrees": lambda draw, lang: draw.rng.randint(28, 60) / 2},
     ("Set the {room} room to {degrees} degrees.", "Make it {degrees} degrees in the {room} room."),
     ("{room}방을 {degrees}도로 맞춰 줘.", "{room}방 온도를 {degrees}도로 해 주세요.")),
)


FORMS = (to_call, no_call, to_tell)
WEIGHTS = (70, 15, 15)


def make(rng, held: bool = False, length: int | None = None, lang: str | None = None) -> Example:
    lang, draw = pick_lang(rng, lang), Draw(rng, held)
    return rng.choices(FORMS, WEIGHTS)[0](draw, lang)
