"""What counts as an HTTP request: waitress' parser, and what that parser lets pass.

A request that a proxy and this server could read in two ways lets a client smuggle a second request past the proxy
(RFC 9112, section 11.2): such a request is refused, and its connection is closed.
"""

import re

from waitress.parser import HTTPRequestParser
from waitress.utilities import BadRequest, Error, RequestEntityTooLarge, RequestHeaderFieldsTooLarge

MAX_HEAD = 64 << 10         # bytes of a request's first line and headers
MAX_LINES = 200             # of a head
MAX_DIGITS = 18             # of a Content-Length
MAX_FRAMING = 256 << 10     # bytes that a chunked body may hold beside its content, if it has less content than that

METHOD = re.compile(rb"[A-Z-]{1,32}")
TARGET = re.compile(rb"[\x21-\x7e\x80-\xff]+")
VERSION = re.compile(rb"HTTP/[0-9]\.[0-9]")
BARE_LINE_FEED = re.compile(rb"(?<=[^\r])\n")


class VersionNotSupported(Error):
    code, reason = 505, "HTTP Version Not Supported"


class RequestTimeout(Error):
    code, reason = 408, "Request Timeout"


class Refused(Exception):
    """A request cannot be read. error: what waitress is to tell the client."""

    def __init__(self, error: Error):
        super().__init__(error.body)
        self.error = error


class RequestReader(HTTPRequestParser):
    """A request whose bytes come piece by piece. Once it is refused, `error` is not None."""

    version = "1.1"         # of the answer, where a request is refused before its version is known
    path = ""               # waitress names it in its log, also where a request is refused before its path is known

    def received(self, data: bytes) -> int:
        """Takes bytes from the connection; returns how many of them belong to this request."""
        try:
            if self.body_rcv is None:
                check_line_ends(self.header_plus[-3:] + data)
            n = super().received(data)
            if self.chunked and not self.completed:
                check_framing(self.body_bytes_received, len(self.body_rcv))
        except Refused as refused:
            self.error = refused.error
        except ValueError:          # of urllib, at "http://[" for example
            self.error = BadRequest("the request target is not valid")
        if self.empty:
            self.empty, self.error = False, BadRequest("there is an empty line where a request should begin")
        if self.error:
            self.completed, n = True, len(data)     # nothing that follows is read as a request
        if self.completed:
            self.expect_continue = False            # or waitress would ask for a body that nobody reads
        return n

    def parse_header(self, head: bytes):
        """Raises Refused, waitress' own exceptions, or ValueError."""
        first, *lines = head.rstrip(b"\r\n").split(b"\r\n")
        if len(lines) >= MAX_LINES:
            raise Refused(RequestHeaderFieldsTooLarge(f"the head has more than {MAX_LINES} lines"))
        check_first_line(first)
        check_body_length(first, lines)
        if len(values_of(b"host", lines)) > 1:
            raise Refused(BadRequest("the header Host comes twice"))
        super().parse_header(head)


def check_line_ends(data: bytes):
    """Raises Refused where a line of the head ends without a carriage return: such a head would never be whole."""
    if BARE_LINE_FEED.search(data.partition(b"\r\n\r\n")[0]):
        raise Refused(BadRequest("a line of the head ends in a line feed without a carriage return"))


def check_first_line(line: bytes):
    """Raises Refused unless a request begins so. Lines that hold control characters would spoil the log."""
    method, target, version, *more = [*line.split(b" "), b"", b""]
    if not VERSION.fullmatch(version) or any(more):
        raise Refused(BadRequest("the first line is not a method, a target and HTTP/1.1"))
    if version not in (b"HTTP/1.0", b"HTTP/1.1"):
        raise Refused(VersionNotSupported("this server speaks HTTP/1.1"))
    if not METHOD.fullmatch(method):
        raise Refused(BadRequest("the method is not one to 32 capital letters"))
    if not TARGET.fullmatch(target):
        raise Refused(BadRequest("the request target holds control characters"))


def check_body_length(first: bytes, lines: list[bytes]):
    """Raises Refused where two readers could disagree on where the body ends."""
    if any(line[:1] in (b" ", b"\t") for line in lines):
        raise Refused(BadRequest("a header goes on in a second line"))
    lengths, codings = values_of(b"content-length", lines), values_of(b"transfer-encoding", lines)
    if codings and lengths:
        raise Refused(BadRequest("Content-Length and Transfer-Encoding exclude each other"))
    if codings and first.endswith(b"HTTP/1.0"):
        raise Refused(BadRequest("HTTP/1.0 has no Transfer-Encoding"))
    if len(codings) > 1 or b"," in b"".join(codings):
        raise Refused(BadRequest("Transfer-Encoding names several codings"))
    if len(lengths) > 1:
        raise Refused(BadRequest("the header Content-Length comes twice"))
    if lengths and len(lengths[0]) > MAX_DIGITS and lengths[0].isdigit():       # too long for Python's int()
        raise Refused(RequestEntityTooLarge(f"Content-Length has more than {MAX_DIGITS} digits"))


def values_of(name: bytes, lines: list[bytes]) -> list[bytes]:
    """The values of the headers of this name, which is in small letters."""
    named = (line.partition(b":") for line in lines)
    return [value.strip(b" \t") for given, _, value in named if given.strip(b" \t").lower() == name]


def check_framing(n_bytes: int, n_content: int):
    """Raises Refused where a chunked body consists mainly of the sizes of its chunks: reading them takes long."""
    if n_bytes - n_content > max(n_content, MAX_FRAMING):
        raise Refused(BadRequest("the chunks of the body are too small"))
