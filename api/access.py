"""Who may ask: API keys, and web pages of other origins (CORS).

A key comes as `Authorization: Bearer KEY` or as `x-api-key: KEY`, whichever the client's library sends. Without keys
everybody is let in. Browsers let a page of another origin read answers only if the server names that origin; before most
requests they ask by a preflight, which carries no key.
"""

import hmac
from pathlib import Path

import flask
from werkzeug.datastructures import WWWAuthenticate
from werkzeug.exceptions import Unauthorized

from qengine import RequestError

OPEN = {"/", "/health"}             # what needs no key: the chat page, which asks for one, and whether the server lives
PREFLIGHT_SECONDS = 600             # for so long a browser need not ask again
READABLE = "Retry-After, X-Request-Id"      # headers of answers that pages of other origins may read


class Access:
    """keys: those that open everything, or none where all is open. origins: "https://chat.example", ..., or "*"."""

    def __init__(self, keys=(), origins=()):
        self.keys = [key.encode() for key in keys]
        self.origins = frozenset(origins)

    def install(self, app: flask.Flask):
        app.before_request(self.admit)
        app.after_request(self.name_origin)

    def admit(self):
        """The answer to a preflight; else nothing, or Unauthorized."""
        request = flask.request
        asked = request.headers.get("Access-Control-Request-Method")
        if request.method == "OPTIONS" and asked and self.allowed_origin():
            return flask.Response(status=204, headers={
                "Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": PREFLIGHT_SECONDS,
                "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", "")})
        if self.keys and request.path not in OPEN:
            check_key(self.keys, request.headers)

    def name_origin(self, response: flask.Response) -> flask.Response:
        """Tells the browser that the page may read this answer, if it may."""
        if origin := self.allowed_origin():
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = READABLE
        if self.origins - {"*"}:
            response.vary.add("Origin")
        return response

    def allowed_origin(self) -> str | None:
        """What a page of the request's origin is to be told."""
        origin = flask.request.headers.get("Origin")
        return "*" if origin and "*" in self.origins else origin if origin in self.origins else None


def check_key(keys: list[bytes], headers):
    """Unauthorized, unless one of the keys was sent. Each is compared, in a time that says nothing of what was right."""
    scheme, _, bearer = headers.get("Authorization", "").partition(" ")
    sent = [key.strip().encode() for key in (bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))]
    if not any([hmac.compare_digest(key, one) for key in keys for one in sent]):        # a list: no early end
        what = "the API key is not one of this server's" if any(sent) else \
            "this server wants an API key, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        raise Unauthorized(what, www_authenticate=WWWAuthenticate("bearer"))


def read_keys(keys, path: str | None) -> list[str]:
    """The keys of the command line and those of a file, one per line. RequestError when one can be no key."""
    if path:
        try:
            lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError("api_key_file", f"{path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
        if not any(lines):
            raise RequestError("api_key_file", f"{path}: holds no key")
        keys = [*keys, *filter(None, lines)]
    for key in keys:
        if not key or not all("!" <= c <= "~" for c in key):
            raise RequestError("api_key", "an API key is of ASCII letters, digits and signs, without spaces")
    return list(keys)
