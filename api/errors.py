"""What a client hears of an error, before a protocol gives it its shape."""

import logging
from typing import NamedTuple

import flask
from werkzeug.exceptions import GatewayTimeout, HTTPException, ServiceUnavailable

from engine.request import DeadlineExceeded, EngineStopped, RequestError

MAX_BODY = 4 << 20          # bytes of one request: the longest context, as token ids or as escaped text
PASSED_ON = "Allow", "Retry-After", "WWW-Authenticate"     # headers of HTTP errors that clients are sent


class NotStored(RequestError):
    """A request names a response that the server does not keep, or keeps no longer."""

    def __init__(self, field: str | None, id: str, status: int, code: str | None = None):
        super().__init__(field, f"the response {id[:80]!r} is not stored: it never was, or it had to make room")
        self.status, self.code = status, code


class ErrorAnswer(NamedTuple):
    """An error as HTTP knows it; each protocol has a shape of its own for it."""

    status: int
    message: str
    field: str | None = None                # of the request, where one is at fault
    headers: dict = {}
    code: str | None = None                 # OpenAI's name for what went wrong, where it has one


def explain(error: Exception) -> ErrorAnswer:
    """What a client hears of an error. The text of an unforeseen error is logged, and the client does not hear it."""
    for kind, told_as in (EngineStopped, ServiceUnavailable), (DeadlineExceeded, GatewayTimeout):
        if isinstance(error, kind):
            error = told_as(str(error))
    if isinstance(error, NotStored):
        return ErrorAnswer(error.status, str(error), error.field, code=error.code)
    if isinstance(error, RequestError):
        return ErrorAnswer(400, str(error), error.field)
    if isinstance(error, HTTPException):
        message = error.description
        if error.code in (404, 405):
            message = f"{flask.request.method} {flask.request.path[:80]} is not served; /openapi.json says what is"
        if error.code == 413:
            message = f"the request body is larger than {MAX_BODY} bytes"
        headers = {name: value for name, value in error.get_headers() if name in PASSED_ON}
        return ErrorAnswer(error.code, message, None, headers)
    logging.getLogger("qengine").error("a request failed", exc_info=error)
    return ErrorAnswer(500, "internal error")
