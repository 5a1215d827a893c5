"""The body of a request: JSON, looked at for its parts before it is parsed.

`json.loads` keeps the interpreter's lock until it is done, so all answers of the server wait for it. A long text costs
it 1 ns a byte, but a list or a fraction costs up to 1,000 ns: without a limit, 4 MiB of "[]," hold the lock for 0.6 s.
So parts are counted first, by NumPy, which releases the lock. What is within the limits takes 0.1 s at most.
"""

import contextlib
import json
import re
import threading

import numpy as np

from engine.request import RequestError

MAX_PARTS = 80_000          # lists, objects and their properties together; 10,000 messages have up to 70,000
MAX_FRACTIONS = 20_000      # numbers with a point, an exponent, or both, which count twice
MAX_COMMAS = 1_100_000      # of a body, outside of its texts: as many tokens as a request for embeddings may have
MAX_DEPTH = 100             # of a body's nesting
MAX_DIGITS = 1 << 10        # of a number, less one: Python's time for a whole number goes with their square
MAX_ESCAPES = 1 << 22       # backslashes; base64 of 60 MiB has a million where its slashes are escaped
LARGE = 4 << 20             # bytes of a body from which on it is parsed alone: parsing takes six times its memory
PARSING = threading.Lock()  # held while a large body is parsed
HALF = re.compile(rb"\\u[dD][89a-fA-F]")        # half of a surrogate pair, escaped


def parse_body(data: bytes) -> dict:
    """The JSON object in a request body. Raises RequestError where there is none, where it is too large to be parsed at
    once, or where text is not Unicode."""
    with PARSING if len(data) > LARGE else contextlib.nullcontext():
        return parse_json(data)


def parse_json(data: bytes) -> dict:
    def refuse(constant):
        raise ValueError(f"{constant} is no JSON number")

    if (n := np.count_nonzero(np.frombuffer(data, np.uint8) == ord("\\"))) > MAX_ESCAPES:
        raise RequestError(None, f"the request body has {n} backslashes, and may have {MAX_ESCAPES}")
    unescaped = data.replace(rb"\\", b"__").replace(rb"\"", b"__")
    check_parts(outside_texts(unescaped))
    try:
        body = json.loads(data.decode("utf-8-sig"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise RequestError(None, f"the request body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError(None, "the request body must be a JSON object")
    if HALF.search(unescaped):
        check_texts(body)
    return body


def outside_texts(unescaped: bytes) -> np.ndarray:
    """uint8: what stands outside of the texts of a JSON body, and the quotation mark that ends each text. unescaped:
    the body, with other letters for escaped quotation marks. Where a body is no JSON, what follows the mistake may be
    anything; the parser does not read that either."""
    letters = np.frombuffer(unescaped, np.uint8)
    return letters[~np.logical_xor.accumulate(letters == ord('"'))]


def check_parts(outside: np.ndarray):
    """Raises RequestError if a body would take long to parse. outside: see `outside_texts`."""
    def count(letter):
        return np.count_nonzero(outside == ord(letter))

    def limit(n, most, what):
        if n > most:
            raise RequestError(None, f"the request body has {n} {what}, and may have {most}")

    digits = (outside >= ord("0")) & (outside <= ord("9"))
    exponents = np.count_nonzero(digits[:-1] & (outside[1:] | 32 == ord("e")))
    limit(sum(map(count, "[{:")), MAX_PARTS, "lists, objects and properties together")
    limit(count(".") + exponents, MAX_FRACTIONS, "points and exponents of numbers")
    limit(count(","), MAX_COMMAS, "commas between values")
    brackets = outside[np.isin(outside | 32, list(b"{}"))] | 32         # | 32 makes { and } of [ and ]
    if (np.cumsum(np.where(brackets == ord("{"), 1, -1)) > MAX_DEPTH).any():
        raise RequestError(None, f"the request body is nested more than {MAX_DEPTH} deep")
    n = 1
    while n < MAX_DIGITS:       # digits[i]: whether the n letters from i on are digits
        digits = digits[:-n] & digits[n:]
        n *= 2
    if digits.any():
        raise RequestError(None, f"the request body has a number of {MAX_DIGITS} digits or more")


def check_texts(body: dict):
    """Raises RequestError for a text with half of a surrogate pair, "\\ud800": that is legal JSON, but no Unicode, so
    the tokenizer cannot take it."""
    for name, value in body.items():
        try:
            for text in texts_of([name, value]):
                text.encode()
        except UnicodeEncodeError:
            name = name.encode(errors="replace").decode()
            raise RequestError(name, f"'{name}' holds half of a surrogate pair") from None


def texts_of(value):
    """All texts in a JSON value, names of properties too."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, list):
            left += one
        elif isinstance(one, dict):
            left += one
            left += one.values()
