"""What a JSON schema demands of a string, as regular expressions of the whole string.

They are for strings that models write without quotes, as in the XML form of calls: llguidance's own JSON Schema knows
only strings in quotes.

minLength, maxLength, pattern and format are enforced where llguidance takes the pattern (no look-around, no
back-references, no anchors within a group) and STRING_FORMATS has the format. Not enforced are keywords that describe a
string by other schemas: allOf, not, if, a oneOf of more than one string that are not listed, and anyOf or $ref beside
others. Where a keyword cannot be enforced, it is overlooked; for a strict tool it is refused.

Lengths cost time: a lexer that counts has another state at each letter. The mask of a token then takes 0.3 to 0.6 ms
with a vocabulary of 6,144; it takes 2 us in free text, and 0.06 ms in a string of JSON with a length.
"""

import functools
import json
import math
import re

from llguidance import LLMatcher

from engine.request import is_within
from engine.trials import LIMITS

from .tools import BY_SCHEMAS, MAX_DEPTH, resolve

MONTH_AND_DAY = (r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"
                 r"02-(?:0[1-9]|[12][0-9]))")
DATE = f"[0-9]{{4}}-{MONTH_AND_DAY}"
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
WORD = "[A-Za-z0-9!#$%&'*+/=?^_{|}~-]+"
STRING_FORMATS = {  # RFC 3339 (without leap seconds, with a leap day each year), 9562, 791, 3986; 5322 without quotes
    "date": DATE, "time": TIME, "date-time": f"{DATE}T{TIME}",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", "ipv4": rf"{BYTE}(?:\.{BYTE}){{3}}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[!#-;=?-Z_a-z~\[\]]+",
    "email": rf"{WORD}(?:\.{WORD})*@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*"}
MAX_PATTERN = 10_000        # letters
MAX_LENGTH = 10**9          # llguidance counts so far
MAX_WAYS = 1 << 13          # of patterns to meet in a value (see `check_meetings`): half a second's work
MAX_NAME_PATTERNS = 512     # letters of all patternProperties, which llguidance compares pair by pair
FORMAT_WAYS = 16            # the ways of one of llguidance's formats


class GrammarError(Exception):
    """A schema that cannot be enforced. The text names the keyword."""


def expressions_of(schema: dict, strict: bool) -> list[str]:
    """Regular expressions in llguidance's syntax; a string of the schema has to fit all of them. Raises GrammarError
    where strict is true and a keyword would be overlooked."""
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
    """Pairs (keyword, its regular expression); None where the keyword has no regular expression."""
    for keyword in ("minLength", "maxLength"):
        if keyword in schema:
            yield keyword, length_between(schema.get("minLength", 0), schema.get("maxLength", ""))
    if "pattern" in schema:
        is_sane = isinstance(schema["pattern"], str) and len(schema["pattern"]) <= MAX_PATTERN
        yield "pattern", whole(schema["pattern"]) if is_sane else None
    if "format" in schema:
        yield "format", STRING_FORMATS.get(schema["format"]) if isinstance(schema["format"], str) else None


def length_between(least, most) -> str | None:
    """A regular expression of strings of `least` to `most` letters, most: "" for any number; None where these are no
    lengths."""
    is_range = is_within(int, least, 0, MAX_LENGTH) and (most == "" or is_within(int, most, least, MAX_LENGTH))
    return f"(?s:.{{{least},{most}}})" if is_range else None


@functools.lru_cache(maxsize=256)
def whole(pattern: str) -> str | None:
    """A regular expression of the whole string, of a pattern that may fit anywhere in a string, as JSON Schema has it.
    None where llguidance does not take it."""
    parts = []
    for one in top_level(in_ascii(pattern)):
        end = one.endswith("$") and (len(one) - len(one[:-1].rstrip("\\"))) % 2 == 1
        inner = one[one.startswith("^"):len(one) - end]
        parts.append(("" if one.startswith("^") else "(?s:.*)") + f"(?:{inner})" + ("" if end else "(?s:.*)"))
    expression = "|".join(parts)
    grammar = LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {between_slashes(expression)}")
    return None if LLMatcher.validate_grammar(grammar, limits=LIMITS) else expression


# What these mean in ECMA-262, whose regular expressions JSON Schema uses. In Lark they stand for all of Unicode.
ASCII = {r"\d": "0-9", r"\D": r"\x00-/:-\x{10FFFF}", r"\w": "0-9A-Z_a-z", r"\W": r"\x00-/:-@\[-^`{-\x{10FFFF}"}


def in_ascii(pattern: str) -> str:
    """A regular expression with the classes in ASCII written out, so that they do not stand for all of Unicode."""
    letters = list(pieces(pattern))
    written = []
    for i, (piece, is_class) in enumerate(letters):
        if piece in ASCII:
            piece = ASCII[piece] if is_class else f"[{ASCII[piece]}]"
        elif piece == "-" and is_class and any(one in ASCII for one, _ in letters[max(i - 1, 0):i + 2]):
            piece = r"\-"       # a range cannot begin or end with a class, so the hyphen stands for itself
        written.append(piece)
    return "".join(written)


def pieces(pattern: str):
    """The letters of a regular expression, an escaped letter with its backslash, each with whether it is in a class."""
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
    """Raises GrammarError where patterns meet in one string, through allOf or references, in more than MAX_WAYS ways.

    llguidance looks for a string that fits all the patterns. For each letter it tries every way to go on in one pattern
    with every way to go on in the others, and looks at its limits only afterwards. So its limits do not bound the work
    (20 patterns "[a-z]{n}" took 15 s and 400 MB, two of 1,000 alternatives 4 s), and the ways are counted here."""
    ways_of(schema, schema, {})


def ways_of(schema, root: dict, known: dict, depth: int = 0) -> int:
    """An upper bound of the ways in which patterns and alternatives meet in one value, in a string or a part of it;
    MAX_WAYS + 1 stands for any larger number. root: the schema that references point into. known: the ways of the
    references seen so far. depth: as in `types_of`."""
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
            known[reference] = 1            # until the next line has found it, should it refer to itself
            known[reference] = each(resolve(reference, root))
        factors.append(known[reference])
    factors.append(max(ways_within(schema, each), default=1))
    ways = math.prod(factors)
    if ways > MAX_WAYS and sum(factor > 1 for factor in factors) > 1:
        raise GrammarError("too many patterns or alternatives meet in one value, through 'allOf', 'anyOf' or '$ref'")
    return min(ways, MAX_WAYS + 1)


def ways_within(schema: dict, each):
    """The ways of the parts of an object or an array; each(schema) gives the ways of one part."""
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
    """The ways of one pattern: one for each letter or class, and one for the text before."""
    return 1 + sum(map(bool, ATOM.findall(pattern))) if isinstance(pattern, str) else 1


def listed(schema: dict, key: str) -> list:
    return schema[key] if isinstance(schema.get(key), list) else []
