"""Who may ask: API keys, and web pages of other origins (CORS).

A key comes as `Authorization: Bearer KEY` or as `x-api-key: KEY`, whichever the client's library sends. A server
without keys lets every program in, but no foreign web page: such a page would act through the browser of somebody who
may ask.

A browser names the origin of a page in the header `Origin`. It lets the page read an answer only if the answer names
that origin, too. Before most requests of a foreign page it sends a preflight, which carries no key.

DNS rebinding: an attacker's page may give its own name the address 127.0.0.1. To the browser that page and this server
then have the same origin. A server on loopback sees it in the header `Host`, which holds the page's name, and refuses.
A server on another address may have any name, so it cannot tell, and should have keys. Through an SSH tunnel the server
is a port of localhost, as it is without the tunnel. Behind a proxy the server's own page has the origin of the proxy:
--cors has to name that origin, unless there are keys.
"""

import hmac
import ipaddress
import os
import re
import stat
import urllib.parse
from pathlib import Path

import flask
from werkzeug.datastructures import WWWAuthenticate
from werkzeug.exceptions import Forbidden, Unauthorized

from engine.request import RequestError

OPEN = {"/", "/health"}             # paths that need no key: the chat page, which asks for one, and /health
PREFLIGHT_SECONDS = 600             # for so long a browser need not ask again
READABLE = "Retry-After, X-Request-Id, Request-Id"      # headers of answers that pages of other origins may read


class Access:
    """keys: API keys, each of which opens everything; if there are none, all is open. origins: "https://chat.example",
    ..., or "*". host: the address that the server listens on."""

    def __init__(self, keys, origins, host):
        self.keys = [key.encode() for key in keys]
        self.origins = frozenset(origins)
        self.host = host

    def install(self, app: flask.Flask):
        app.before_request(self.admit)
        app.after_request(self.name_origin)

    def admit(self):
        """The answer to a preflight; None for every other request that is let in. Raises Unauthorized or Forbidden."""
        request = flask.request
        origin, host = request.headers.get("Origin"), request.headers.get("Host")
        is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if is_preflight and self.allowed_origin():
            return flask.Response(status=204, headers={
                "Access-Control-Allow-Methods": "GET, POST, DELETE", "Access-Control-Max-Age": PREFLIGHT_SECONDS,
                "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", "")})
        if is_preflight or not self.keys:       # a preflight carries no key, and is not refused for that
            self.check_page(origin, host)
        if not self.keys:
            self.check_name(host)
        elif request.path not in OPEN:
            flask.g.key = check_key(self.keys, request.headers)

    def check_page(self, origin: str | None, host: str | None):
        """Raises Forbidden for a web page that is neither the server's own nor of an origin that may ask. host: the
        name of the server in the request; None: no browser asks."""
        own = {f"{scheme}://{host}" for scheme in ("http", "https")}
        if origin and origin not in own and not self.allowed_origin():
            raise Forbidden(f"pages of {origin[:80]} may not ask this server: --cors {origin[:80]} lets them")

    def check_name(self, host: str | None):
        """Raises Forbidden where a page may be asking that has its own name lead to this machine (DNS rebinding)."""
        if not host or not is_loopback(self.host) or "*" in self.origins:
            return
        if not is_loopback(name := name_of("//" + host)) and name not in map(name_of, self.origins):
            raise Forbidden(f"this server listens on {self.host} and not as {host[:80]}: if that is its name behind "
                            "a proxy, --cors lets pages of that origin ask, and --api-key whoever has a key")

    def name_origin(self, response: flask.Response) -> flask.Response:
        """Tells the browser that the page may read this answer, if it may."""
        if origin := self.allowed_origin():
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = READABLE
        if self.origins - {"*"}:
            response.vary.add("Origin")
        return response

    def allowed_origin(self) -> str | None:
        """The origin that the answer names, so that a page of the request's origin may read it; None: it may not."""
        origin = flask.request.headers.get("Origin")
        return "*" if origin and "*" in self.origins else origin if origin in self.origins else None


def name_of(origin: str) -> str:
    """The host of an origin, in small letters, or "" where the origin has none."""
    try:
        return (urllib.parse.urlsplit(origin).hostname or "").rstrip(".")
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_key(keys: list[bytes], headers) -> bytes:
    """The one of the keys that was sent. Raises Unauthorized where none was. Every key is compared, in a time that does
    not depend on how much of it was right."""
    scheme, _, bearer = headers.get("Authorization", "").partition(" ")
    bearer = bearer if scheme.lower() == "bearer" else ""
    sent = [key.strip().encode() for key in (bearer, headers.get("x-api-key", ""))]
    found = [key for key in keys for one in sent if hmac.compare_digest(key, one)]      # a list: no early end
    if not found:
        what = "the API key is not one of this server's" if any(sent) else \
            "this server wants an API key, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        raise Unauthorized(what, www_authenticate=WWWAuthenticate("bearer"))
    return found[0]


def read_keys(keys, path: str | None) -> list[str]:
    """The keys of the command line and those of a file, one per line; a line that begins with # is a comment. Raises
    RequestError where one cannot be a key."""
    for key in keys:
        check_form(key, "api_key", "")
    return [*keys, *(read_key_file(path) if path else ())]


def read_key_file(path: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise RequestError("api_key_file", f"{path}: {reason}") from None
    keys = {n: key for n, line in enumerate(lines, start=1) if (key := line.strip()) and not key.startswith("#")}
    if not keys:
        raise RequestError("api_key_file", f"{path}: holds no key")
    for n, key in keys.items():
        check_form(key, "api_key_file", f"{path}, line {n}: ")
    return list(keys.values())


def is_secret(path: str) -> bool:
    """Whether only the owner of a file can read it."""
    return not os.stat(path).st_mode & (stat.S_IRGRP | stat.S_IROTH)


def check_form(key: str, field: str, where: str):
    if not re.fullmatch("[!-~]+", key):
        raise RequestError(field, f"{where}an API key is of ASCII letters, digits and signs, without spaces")


PORTS = {"http": 80, "https": 443}      # those that browsers leave out


def read_origin(text: str) -> str:
    """An origin of the command line as browsers send it: https://chat.example, without a slash at the end, in small
    letters, without the port that its scheme has anyway. Raises RequestError where that is not clear."""
    def refuse(reason):
        raise RequestError("cors", f"--cors {text}: {reason}")

    if text in ("*", "null"):           # null: pages of files, and pages in sandboxes
        return text
    try:
        parts = urllib.parse.urlsplit(text.strip())
        host, port = (parts.hostname or "").encode("idna").decode(), parts.port
    except ValueError:                  # also of IDNA
        refuse("this is no origin, such as https://chat.example")
    if not text.strip().lower().startswith(f"{parts.scheme}://") or not parts.scheme:
        refuse(f"an origin begins with its scheme, as https://{text.strip()[:80]} does")
    if not re.fullmatch(r"[a-z0-9._-]+|[0-9a-f:.]+", host) or "@" in parts.netloc:
        refuse("an origin is one scheme, one host and perhaps a port: https://chat.example:8443, say")
    shown = f"[{host}]" if ":" in host else host
    origin = f"{parts.scheme}://{shown}" + ("" if port in (None, PORTS.get(parts.scheme)) else f":{port}")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        refuse(f"an origin has no path, and browsers would send {origin}")
    return origin
