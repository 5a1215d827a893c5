"""GET /: the chat page, one file that asks only the server it came from; GET /pipes, which its live bar shows; and GET
/experts, for the line below an answer."""

import base64
import functools
import hashlib
import re
from pathlib import Path

import flask
from werkzeug.exceptions import NotFound

from .endpoint import Endpoint
from .log import experts_used
from .openai import PROTOCOL


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
    """What a decode step did on an emulated card: the next step, or the one that was counted last. 204 before the first
    counted step, 404 where steps cannot be counted."""
    engine = service.ready()
    if not (engine.kind == "text" and engine.counts_pipes):
        raise NotFound()
    counted = engine.count_pipes()
    return flask.Response(status=204) if counted is None else counted


def experts(service):
    """How many experts decode steps have used since the start, and how many of these lay on cards. 404 if all do."""
    used = experts_used(service.ready())
    if used is None:
        raise NotFound()
    return dict(zip(("hits", "used"), used))


ENDPOINTS = [Endpoint("GET", "/", "The chat page", page, PROTOCOL),
             Endpoint("GET", "/pipes", "What each pipe of an emulated card did in a step", pipes, PROTOCOL),
             Endpoint("GET", "/experts", "How many experts of answers lay on the cards", experts, PROTOCOL)]
