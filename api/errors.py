"""What a client hears of an error, before a protocol gives it its shape."""

import difflib
import logging
from typing import NamedTuple

import flask
from werkzeug.exceptions import GatewayTimeout, HTTPException, ServiceUnavailable

from engine.request import ContextExceeded, DeadlineExceeded, EngineStopped, RequestError
from engine.served import NotLoaded

MAX_BODY = 4 << 20          # bytes of one request: the longest context, as token ids or as escaped text
MAX_SEEING = 64 << 20       # bytes of one request to a model that sees, where pictures may stand in it
WITHOUT_TOOLS = "Without 'tools' it would fit"     # is said of a prompt that is too long for its tools
SETS_CONTEXT = "--ctx of the server sets this length"
PASSED_ON = "Allow", "Retry-After", "WWW-Authenticate"     # headers of HTTP errors that clients are sent


class NotFound(RequestError):
    """A request names something that is not here; code: what, as clients know it ("model_not_found", ...). status: that
    of the answer."""

    def __init__(self, field: str | None, message: str, code: str, status: int = 404):
        super().__init__(field, message)
        self.code, self.status = code, status


class ErrorAnswer(NamedTuple):
    """An error as HTTP knows it; each protocol has a shape of its own for it.

    code: a word for programs, where there is one ("context_length_exceeded", ...). counts: n_prompt_tokens and n_ctx,
    where the prompt is too long."""

    status: int
    message: str
    field: str | None = None                # of the request, where one is at fault
    headers: dict = {}
    code: str | None = None
    counts: dict = {}


def way_out(request: flask.Request) -> str:
    """What is said behind "is not served": the endpoint that was probably meant, or where all are listed."""
    served = {rule.rule: sorted(rule.methods - {"HEAD", "OPTIONS"}) for rule in flask.current_app.url_map.iter_rules()}
    path = request.path[:80]
    meant = [path, f"/v1{path}", f"/v1{path}s", path.removeprefix("/v1"),
             *difflib.get_close_matches(path, served, 1, cutoff=0.9)]
    found = next((one for one in meant if one in served and not request.url_rule), None)
    return f": did you mean {served[found][0]} {found}?" if found else "; /openapi.json says what is"


def explain(error: Exception) -> ErrorAnswer:
    """What a client hears of an error. The text of an unforeseen error is logged, and the client does not hear it."""
    if isinstance(error, NotLoaded):
        error = ServiceUnavailable(str(error), retry_after=error.retry_after)
    for kind, told_as in (EngineStopped, ServiceUnavailable), (DeadlineExceeded, GatewayTimeout):
        if isinstance(error, kind):
            error = told_as(str(error))
    if isinstance(error, ContextExceeded):
        counts = {"n_prompt_tokens": error.n_prompt, "n_ctx": error.n_ctx}
        return ErrorAnswer(400, f"{error} {SETS_CONTEXT}.", error.field, code="context_length_exceeded", counts=counts)
    if isinstance(error, NotFound):
        return ErrorAnswer(error.status, str(error), error.field, code=error.code)
    if isinstance(error, RequestError):
        return ErrorAnswer(400, str(error), error.field)
    if isinstance(error, HTTPException):
        message = error.description
        if error.code in (404, 405):
            message = f"{flask.request.method} {flask.request.path[:80]} is not served{way_out(flask.request)}"
        if error.code == 413:
            is_read = flask.has_request_context()       # or the connection itself has refused it
            most = f"{flask.request.max_content_length} bytes" if is_read else "the server takes"
            message = f"the request body is larger than {most}"
        headers = {name: value for name, value in error.get_headers() if name in PASSED_ON}
        return ErrorAnswer(error.code, message, None, headers, "invalid_api_key" if error.code == 401 else None)
    logging.getLogger("qengine").error("a request failed", exc_info=error)
    return ErrorAnswer(500, "internal error")
