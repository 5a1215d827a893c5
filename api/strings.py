"""What a JSON schema demands of a string, as regular expressions of the whole string: for values that are written as
they are, without quotes, where llguidance's own JSON Schema does not reach.

minLength, maxLength, pattern and format are enforced, as far as llguidance takes the pattern (no look-around, no
back-references, no anchors within a group) and FORMATS has the format. What is not enforced is overlooked, or refused
for strict tools; so are keywords that say by other schemas what a string must be: allOf, oneOf, not, if, and anyOf or
$ref beside others. Lengths cost: a lexer that counts has another state at each letter, so that the mask of a token takes
0.3 to 0.6 ms with a vocabulary of 6,144 (2 us in free text, 0.06 ms in a string of JSON with a length).
"""

import functools
import json
import re

from llguidance import LLMatcher

from qengine import is_within

from .tools import BY_SCHEMAS

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
    for one in top_level(pattern):
        end = one.endswith("$") and (len(one) - len(one[:-1].rstrip("\\"))) % 2 == 1
        inner = one[one.startswith("^"):len(one) - end]
        parts.append(("" if one.startswith("^") else "(?s:.*)") + f"(?:{inner})" + ("" if end else "(?s:.*)"))
    expression = "|".join(parts)
    grammar = LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {between_slashes(expression)}")
    return None if LLMatcher.validate_grammar(grammar) else expression


def top_level(pattern: str) -> list[str]:
    """The alternatives of a regular expression that are not within a group."""
    parts, depth, is_class = [""], 0, False
    for piece in re.findall(r"\\.|.", pattern, re.DOTALL):
        if piece == "|" and depth == 0 and not is_class:
            parts.append("")
            continue
        depth += 0 if is_class else (piece == "(") - (piece == ")")
        is_class = piece != "]" if is_class else piece == "["
        parts[-1] += piece
    return parts


def verbatim(text: str) -> str:
    """The regular expression of this text alone."""
    return re.sub(r"[][.^$*+?{}()|\\]", r"\\\g<0>", text)


def between_slashes(expression: str) -> str:
    """A regular expression as Lark has it."""
    written = {"/": r"\/", "\n": r"\n"}
    return "/" + re.sub(r"\\.|[/\n]", lambda piece: written.get(piece[0], piece[0]), expression, flags=re.DOTALL) + "/"
