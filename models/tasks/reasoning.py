"""Sums of one step or two, told as stories or asked plainly, in signs or words.

The steps are thought first, or the answer is given at once. Each step is held out by its two numbers, whatever
their order, and what is done with them; steps of two numbers up to ten are the tables, which have to be known:
they are all trained on and never asked for in held-out examples. Thoughts work a product beyond the tables out of
the places of its first number, 15 * 8 = 80 + 40 = 120; no sum in training's thoughts is held out either.
"""

from functools import cache

from .example import Example, chat, pick_lang
from .words import Draw, Ko, is_held, pairs

# Each story: one operator or two and the texts. a op1 b, then the result op2 c.
STORIES = (
    ("-", "{name} has {a} {things} and gives {b} away. How many are left?",
     "{name:은} {thing:을} {a}개 가지고 있었는데 {b}개를 주었습니다. 몇 개 남았나요?"),
    ("-", "There were {a} {things}. {name} used up {b}. How many remain?",
     "{thing:이} {a}개 있었습니다. {name:이} {b}개를 썼습니다. 남은 것은 몇 개인가요?"),
    ("+", "{name} has {a} {things} and gets {b} more. How many are that?",
     "{name:은} {thing:을} {a}개 가지고 있고 {b}개를 더 받았습니다. 모두 몇 개인가요?"),
    ("*", "{a} bags hold {b} {things} each. How many {things} are that?",
     "봉투 {a}개에 {thing:이} {b}개씩 들어 있습니다. 모두 몇 개인가요?"),
    ("+-", "{name} has {a} {things} and buys {b} more. Then {c} are given away. How many {things} are left?",
     "{name:은} {thing:을} {a}개 가지고 있고 {b}개를 더 샀습니다. 그 뒤 {c}개를 나눠 주었습니다. 몇 개가 남았나요?"),
    ("++", "{name} found {a} {things} on Monday, {b} on Tuesday and {c} on Wednesday. How many in all?",
     "{name:은} 월요일에 {thing:을} {a}개, 화요일에 {b}개, 수요일에 {c}개 찾았습니다. 모두 몇 개인가요?"),
    ("-+", "There are {a} {things} in a shop. {b} are sold and {c} new ones arrive. How many are there now?",
     "가게에 {thing:이} {a}개 있습니다. {b}개가 팔리고 {c}개가 새로 들어왔습니다. 지금 몇 개인가요?"),
    ("--", "{name} had {a} {things}, lost {b} and gave {c} to a friend. How many are left?",
     "{name:은} {thing:이} {a}개 있었는데 {b}개를 잃어버리고 {c}개를 친구에게 주었습니다. 몇 개 남았나요?"),
    ("*+", "{a} boxes hold {b} {things} each, and {c} more lie beside them. How many {things} are there?",
     "상자 {a}개에 {thing:이} {b}개씩 들어 있고 옆에 {c}개가 더 있습니다. {thing:은} 모두 몇 개인가요?"),
    ("*-", "{name} packs {a} bags with {b} {things} each. Then {c} fall out. How many are still in the bags?",
     "{name:은} 봉투 {a}개에 {thing:을} {b}개씩 담았습니다. 그중 {c}개가 빠졌습니다. 봉투에 몇 개 남았나요?"),
    ("+*", "A row has {a} red and {b} blue {things}. How many {things} are in {c} such rows?",
     "한 줄에 빨간 {thing} {a}개와 파란 {thing} {b}개가 있습니다. 이런 줄이 {c}개면 {thing:은} 모두 몇 개인가요?"),
    ("-*", "A set of {a} {things} loses {b}. How many {things} are in {c} such sets?",
     "{thing} {a}개 묶음에서 {b}개를 뺍니다. 이런 묶음 {c}개에는 몇 개가 있나요?"),
)
PLAIN = (("What is {sum}?", "{sum} = ?", "Compute {sum}.", "How much is {sum}?", "{sum}", "what's {sum}",
          "{sum}="),
         ("{sum:은} 얼마예요?", "{sum} = ?", "{sum:을} 계산해 줘.", "{sum:은}?", "{sum}", "{sum:은} 뭐야?", "{sum}="))
PLAIN_OPERATORS = ("+", "-", "*", "+", "-", "*", "++", "+-", "--", "*+", "*-")
SIGNS = ({"+": " + ", "-": " - ", "*": " * "}, {"+": "+", "-": "-", "*": "*"}, {"+": "+", "-": "-", "*": "x"},
         {"+": " + ", "-": " - ", "*": " × "}, {"+": "+", "-": "-", "*": "×"})
WORDS = ({"+": " plus ", "-": " minus ", "*": " times "}, {"+": " 더하기 ", "-": " 빼기 ", "*": " 곱하기 "})
_APPLY = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
TABLE = 10
DRILLS = 0.35   # of the examples to train on are single sums of larger numbers


def _numbers(draw: Draw, operators: str, least: int) -> list[int]:
    """Operands from `least` to 100, small where something is multiplied; every step is on the right side, none below
    zero."""
    rng = draw.rng
    while True:
        limit = rng.choice((10, 30, 100))
        numbers = [rng.randint(least, min(limit, 20) if operators[0] == "*" else limit)]
        numbers += [rng.randint(least, TABLE if operator == "*" else limit) for operator in operators]
        steps = _steps(numbers, operators)
        if all(0 <= step[-1] <= 1000 and _on_side(step, draw.held) for step in steps):
            draw.contents += [step_name(*step[:3]) for step in steps if not _in_table(*step[:3])]
            return numbers


def step_name(left: int, operator: str, right: int) -> str:
    return f"{left}{WORDS[0][operator]}{right}"


def step_is_held(left: int, operator: str, right: int) -> bool:
    return not _in_table(left, operator, right) and is_held(step_name(left, operator, right))


def _on_side(step: tuple, held: bool) -> bool:
    """Whether an example of this side may have the step, and in training the sums that it is worked out by."""
    sums = [] if held else _sums(_places(*step))
    return step_is_held(*step[:3]) == held and not any(step_is_held(*one[:3]) for one in sums)


def _in_table(left: int, operator: str, right: int) -> bool:
    return max(left, right) <= TABLE


def _steps(numbers: list[int], operators: str) -> list[tuple]:
    """(left, operator, right, result) one after another, from left to right."""
    steps, left = [], numbers[0]
    for operator, right in zip(operators, numbers[1:], strict=True):
        steps.append((left, operator, right, _APPLY[operator](left, right)))
        left = steps[-1][-1]
    return steps


def _places(left: int, operator: str, right: int, result: int) -> list[int]:
    """What adds up to the result: of a product beyond the tables the products of the places of `left`."""
    if operator != "*" or _in_table(left, operator, right):
        return [result]
    return [int(digit) * 10 ** i * right for i, digit in list(enumerate(reversed(str(left))))[::-1] if digit != "0"]


def _sums(numbers: list[int]) -> list[tuple]:
    """The steps of adding up the numbers."""
    return _steps(numbers, "+" * (len(numbers) - 1))


def _written_out(left: int, operator: str, right: int, result: int) -> str:
    """A step as it is thought: 7 + 5 = 12, or 137 * 7 = 700 + 210 + 49 = 910 + 49 = 959."""
    sides, places = [f"{left} {operator} {right}"], _places(left, operator, right, result)
    while len(places) > 1:
        sides.append(" + ".join(map(str, places)))
        places = [places[0] + places[1], *places[2:]]
    return " = ".join([*sides, str(result)])


@cache
def _things() -> tuple:
    """Objects whose plural takes a plain s."""
    return tuple(pair for pair in pairs("objects") if not pair[0].endswith(("s", "x", "f", "fe", "ch", "sh")))


def _story(draw: Draw, lang: str) -> tuple:
    operators, english, korean = draw.rng.choice(STORIES)
    numbers = _numbers(draw, operators, least=2)
    thing, thing_ko = draw.rng.choice(_things())
    slots = dict(zip("abc", numbers), name=Ko(draw.given(lang)), things=thing + "s", thing=Ko(thing_ko))
    return (english if lang == "en" else korean).format(**slots), _steps(numbers, operators)


def _plain(draw: Draw, lang: str) -> tuple:
    operators = draw.rng.choice(PLAIN_OPERATORS)
    numbers = _numbers(draw, operators, least=0)
    written = draw.rng.choice((SIGNS[0], *SIGNS, *[WORDS[lang == "ko"]] * 2))
    rest = "".join(f"{written[sign]}{number}" for sign, number in zip(operators, numbers[1:], strict=True))
    question = draw.rng.choice(PLAIN[lang == "ko"]).format(sum=Ko(f"{numbers[0]}{rest}"))
    return question, _steps(numbers, operators)


def _problem(draw: Draw, lang: str) -> tuple:
    """Question, thoughts, answer, and what it is judged by."""
    return _with_answer(*(_story if draw.rng.random() < 0.6 else _plain)(draw, lang), lang)


def _with_answer(question: str, steps: list[tuple], lang: str) -> tuple:
    """The same of a question and its steps."""
    thoughts = "\n".join(_written_out(*step) for step in steps)
    result = steps[-1][-1]
    answer = f"The answer is {result}." if lang == "en" else f"답은 {result}입니다."
    return question, thoughts, answer, {"kind": "number", "number": result}


def turn(draw: Draw, lang: str) -> tuple:
    """Question, answer, and what it is judged by, without thinking."""
    question, _, answer, expect = _problem(draw, lang)
    return question, answer, expect


def _drill(draw: Draw, lang: str) -> tuple:
    """A single sum as it comes about within longer ones, asked plainly: its first number is a result already."""
    operator = draw.rng.choice("++--*")
    while True:
        most = 30 if operator == "*" else draw.rng.choice((30, 200, 200, 500))
        left, right = draw.rng.randint(2, most), draw.rng.randint(2, TABLE if operator == "*" else 100)
        step = (left, operator, right, _APPLY[operator](left, right))
        if step[-1] >= 0 and _on_side(step, draw.held):
            break
    written = draw.rng.choice((*SIGNS, *[WORDS[lang == "ko"]] * 2))
    question = draw.rng.choice(PLAIN[lang == "ko"]).format(sum=Ko(f"{left}{written[operator]}{right}"))
    return _with_answer(question, [step], lang)


def make(rng, held: bool = False, length: int | None = None, lang: str | None = None) -> Example:
    lang, draw = pick_lang(rng, lang), Draw(rng, held)
    thinking = rng.random() < 0.6
    is_drill = not held and rng.random() < DRILLS
    question, thoughts, answer, expect = (_drill if is_drill else _problem)(draw, lang)
    return chat(draw, lang, "reasoning", [question, answer], expect, thought=thoughts, thinking=thinking)
