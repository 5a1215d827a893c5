"""GET /: the chat page, one file that asks only the server it came from; and GET /pipes, which its live bar shows."""

import base64
import functools
import hashlib
import re
from pathlib import Path

import flask
from werkzeug.exceptions import NotFound

from .fields import Endpoint


def page(service):
    return flask.Response(source(), mimetype="text/html", headers={
        "Content-Security-Policy": policy(), "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer"})


@functools.cache
def source() -> str:
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")


@functools.cache
def policy() -> str:
    """The page's style and script run, by their hashes, and no other: so not even markup that slipped in could."""
    def hashed(tag):
        text = re.search(f"<{tag}>(.*?)</{tag}>", source(), re.DOTALL)[1]
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (f"default-src 'none'; style-src {hashed('style')}; script-src {hashed('script')}; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


def pipes(service):
    """What a decode step of an emulated card did, counted now if there is one to count; 204 before the first."""
    engine = service.ready()
    if not service.pipes.can_count(engine):
        raise NotFound()
    counted = service.pipes.count(engine)
    return flask.Response(status=204) if counted is None else counted


ENDPOINTS = [Endpoint("GET", "/", "The chat page", page),
             Endpoint("GET", "/pipes", "What each pipe of an emulated card did in a step", pipes)]
