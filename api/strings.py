"""What a JSON schema demands of a string, as regular expressions of the whole string: for values that are written as
they are, without quotes, where llguidance's own JSON Schema does not reach.

minLength, maxLength, pattern and format are enforced, as far as llguidance takes the pattern (no look-around, no
back-references, no anchors within a group) and FORMATS has the format. What is not enforced is overlooked, or refused
for strict tools; so are keywords that say by other schemas what a string must be: allOf, not, if, a oneOf of more than
one string that are not listed, and anyOf or $ref beside others. Lengths cost: a lexer that counts has another state at
each letter, so that the mask of a token takes 0.3 to 0.6 ms with a vocabulary of 6,144 (2 us in free text, 0.06 ms in a
string of JSON with a length).
"""

import functools
import json
import math
import re

from llguidance import LLMatcher

from engine.constraints import GRAMMAR_LIMITS
from engine.request import is_within

from .tools import BY_SCHEMAS, MAX_DEPTH, resolve

MONTH_AND_DAY = (r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"
                 r"02-(?:0[1-9]|[12][0-9]))")
DATE = f"[0-9]{{4}}-{MONTH_AND_DAY}"
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
WORD = "[A-Za-z0-9!#$%&'*+/=?^_{|}~-]+"
FORMATS = {         # RFC 3339 (without leap seconds, with a leap day each year), 9562, 791, 3986; 5322 without quotes
    "date": DATE, "time": TIME, "date-time": f"{DATE}T{TIME}",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", "ipv4": rf"{BYTE}(?:\.{BYTE}){{3}}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[!#-;=?-Z_a-z~\[\]]+",
    "email": rf"{WORD}(?:\.{WORD})*@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*"}
MAX_PATTERN = 10_000        # letters
MAX_LENGTH = 10**9          # llguidance counts so far
MAX_WAYS = 1 << 13          # in which patterns may meet: half a second's work
MAX_NAME_PATTERNS = 512     # letters of patternProperties, each of which is compared with each
FORMAT_WAYS = 16            # of a format of llguidance's


class GrammarError(Exception):
    """A schema that cannot be enforced. The text names the keyword."""


def expressions_of(schema: dict, strict: bool) -> list[str]:
    """Regular expressions, in llguidance's syntax, that all have to fit the strings of a schema.
    GrammarError: strict, and something would be overlooked."""
    found, failed = {}, sorted(BY_SCHEMAS & schema.keys())      # found: each once
    for keyword, expression in _expressions(schema):
        if expression is None:
            failed.append(keyword)
        else:
            found[expression] = keyword
    if strict and failed:
        raise GrammarError(f"{failed[0]} of a string: {json.dumps(schema[failed[0]])[:80]}")
    return list(found)


def _expressions(schema: dict):
    """(keyword, its regular expression, or None where there can be none)"""
    for keyword in ("minLength", "maxLength"):
        if keyword in schema:
            yield keyword, length_between(schema.get("minLength", 0), schema.get("maxLength", ""))
    if "pattern" in schema:
        is_sane = isinstance(schema["pattern"], str) and len(schema["pattern"]) <= MAX_PATTERN
        yield "pattern", whole(schema["pattern"]) if is_sane else None
    if "format" in schema:
        yield "format", FORMATS.get(schema["format"]) if isinstance(schema["format"], str) else None


def length_between(least, most) -> str | None:
    """most: "" where there is no end."""
    is_range = is_within(int, least, 0, MAX_LENGTH) and (most == "" or is_within(int, most, least, MAX_LENGTH))
    return f"(?s:.{{{least},{most}}})" if is_range else None


@functools.lru_cache(maxsize=256)
def whole(pattern: str) -> str | None:
    """What is looked for anywhere in a string, as a regular expression of the whole string; None where llguidance takes
    no such one."""
    parts = []
    for one in top_level(in_ascii(pattern)):
        end = one.endswith("$") and (len(one) - len(one[:-1].rstrip("\\"))) % 2 == 1
        inner = one[one.startswith("^"):len(one) - end]
        parts.append(("" if one.startswith("^") else "(?s:.*)") + f"(?:{inner})" + ("" if end else "(?s:.*)"))
    expression = "|".join(parts)
    grammar = LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {between_slashes(expression)}")
    return None if LLMatcher.validate_grammar(grammar, limits=GRAMMAR_LIMITS) else expression


# What ECMA-262, whose regular expressions JSON Schema has, means by these: in Lark's they are of all Unicode.
ASCII = {r"\d": "0-9", r"\D": r"\x00-/:-\x{10FFFF}", r"\w": "0-9A-Z_a-z", r"\W": r"\x00-/:-@\[-^`{-\x{10FFFF}"}


def in_ascii(pattern: str) -> str:
    """A regular expression with the classes of ASCII written out."""
    letters = list(pieces(pattern))
    written = []
    for i, (piece, is_class) in enumerate(letters):
        if piece in ASCII:
            piece = ASCII[piece] if is_class else f"[{ASCII[piece]}]"
        elif piece == "-" and is_class and any(one in ASCII for one, _ in letters[max(i - 1, 0):i + 2]):
            piece = r"\-"       # there is no range from or to a class: it stands for itself
        written.append(piece)
    return "".join(written)


def pieces(pattern: str):
    """The letters of a regular expression, escaped ones as one, each with whether it stands within a class."""
    is_class = False
    for piece in re.findall(r"\\.|.", pattern, re.DOTALL):
        yield piece, is_class
        is_class = piece != "]" if is_class else piece == "["


def top_level(pattern: str) -> list[str]:
    """The alternatives of a regular expression that are not within a group."""
    parts, depth = [""], 0
    for piece, is_class in pieces(pattern):
        if piece == "|" and depth == 0 and not is_class:
            parts.append("")
            continue
        depth += 0 if is_class else (piece == "(") - (piece == ")")
        parts[-1] += piece
    return parts


def verbatim(text: str) -> str:
    """The regular expression of this text alone."""
    return re.sub(r"[][.^$*+?{}()|\\]", r"\\\g<0>", text)


def between_slashes(expression: str) -> str:
    """A regular expression as Lark has it."""
    written = {"/": r"\/", "\n": r"\n"}
    return "/" + re.sub(r"\\.|[/\n]", lambda piece: written.get(piece[0], piece[0]), expression, flags=re.DOTALL) + "/"


# ---- patterns that meet --------------------------------------------------------------------------------------

ATOM = re.compile(r"\{[0-9,]*\}|(\\.|\[(?:\\.|[^]])*\]|[^(){}|*+?^$])", re.DOTALL)


def check_meetings(schema: dict):
    """GrammarError where patterns meet in one string, through allOf or references, in more than MAX_WAYS.

    llguidance looks for a string that fits them all, and for each letter of it tries every way to go on with the one
    pattern beside every way to go on with the others: all of these before it looks at its limits. That bounds nothing
    (20 patterns "[a-z]{n}" took 15 s and 400 MB, two of 1,000 alternatives 4 s), so it is counted here."""
    ways_of(schema, schema, {})


def ways_of(schema, root: dict, known: dict, depth: int = 0) -> int:
    """At most so many ways lead on within one value, in a string of it or in what it is made of; MAX_WAYS + 1 stands
    for more. root: where references point; known: what those seen so far have; depth: as in `types_of`."""
    if not isinstance(schema, dict):
        return 1
    if depth > MAX_DEPTH:
        return MAX_WAYS + 1
    each = functools.partial(ways_of, root=root, known=known, depth=depth + 1)
    factors = [each(one) for one in listed(schema, "allOf")]
    factors += [sum(map(each, listed(schema, key))) for key in ("anyOf", "oneOf") if listed(schema, key)]
    factors += [max(1, len(listed(schema, "enum"))), ways_of_pattern(schema.get("pattern")),
                FORMAT_WAYS if "format" in schema else 1]
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in known:
            known[reference] = 1            # while that is being found out
            known[reference] = each(resolve(reference, root))
        factors.append(known[reference])
    factors.append(max(ways_within(schema, each), default=1))
    ways = math.prod(factors)
    if ways > MAX_WAYS and sum(factor > 1 for factor in factors) > 1:
        raise GrammarError("too many patterns or alternatives meet in one value, through 'allOf', 'anyOf' or '$ref'")
    return min(ways, MAX_WAYS + 1)


def ways_within(schema: dict, each):
    """The ways of what is in an object or an array; `each` finds those of a schema."""
    for key in ("items", "additionalItems", "additionalProperties"):
        yield each(schema.get(key))
    yield from map(each, listed(schema, "prefixItems") + listed(schema, "items"))
    patterns = schema.get("patternProperties")
    yield from map(each, patterns.values() if isinstance(patterns, dict) else ())
    names = list(map(ways_of_pattern, patterns)) if isinstance(patterns, dict) else []
    if len(names) > 1 and sum(names) > MAX_NAME_PATTERNS:
        raise GrammarError("too many or too long 'patternProperties'")
    properties = schema.get("properties")
    yield from map(each, properties.values() if isinstance(properties, dict) else ())


def ways_of_pattern(pattern) -> int:
    """One for each letter or class of it, and one for the text before."""
    return 1 + sum(map(bool, ATOM.findall(pattern))) if isinstance(pattern, str) else 1


def listed(schema: dict, key: str) -> list:
    return schema[key] if isinstance(schema.get(key), list) else []
