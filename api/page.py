"""GET /: the chat page, one document that asks only the server it came from; and what it asks for beside answers:
GET /pipes and GET /experts, for the lines below an answer, and GET /waiting, for a request that waits."""

import base64
import functools
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

import flask
from werkzeug.exceptions import NotFound

from .endpoint import Endpoint
from .fields import TEXT
from .log import experts_used
from .models import OF_MODEL, is_open, n_slots
from .openai import PROTOCOL

FOLDER = Path(__file__).with_name("web")        # page.html, what it consists of, and libraries of others in vendor/


class Document(NamedTuple):
    """The whole page, and the header that says what may run in it."""

    text: str
    policy: str


def page(service):
    said = flask.Response(document().text, mimetype="text/html", headers={
        "Content-Security-Policy": document().policy, "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer"})
    said.add_etag()         # a browser that has the page asks whether it is still the same
    return said.make_conditional(flask.request)


@functools.cache
def document() -> Document:
    """page.html with the files that its comments name. Styles and scripts take effect only if their hashes are in the
    header: so a script in markup that slipped in does not run. And scripts cannot have a text read as HTML."""
    hashes = {"style": [], "script": []}

    def part(match):
        tag, text = "style" if match[1].endswith(".css") else "script", part_of_page(match[1])
        hashes[tag].append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
        return f"<{tag}>{text}</{tag}>"

    text = re.sub(r"^<!-- (\S+\.(?:css|js)) -->$", part, part_of_page("page.html"), flags=re.MULTILINE)
    return Document(text, (
        f"default-src 'none'; style-src {' '.join(hashes['style'])}; script-src {' '.join(hashes['script'])}; "
        "connect-src 'self'; img-src data:; require-trusted-types-for 'script'; trusted-types 'none'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"))


def part_of_page(name: str) -> str:
    """The text of a file. In a script "<!--" would begin a comment of HTML, so it is escaped there, in a form that
    regular expressions with the flag u understand, too."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    return text.replace("<!--", r"\x3C!--") if name.endswith(".js") else text


def pipes(service):
    """What a decode step did on an emulated card: the next step, or the one that was counted last. 204 before the first
    counted step, 404 where steps cannot be counted."""
    engine = service.engine
    if not (engine.kind == "text" and engine.counts_pipes):
        raise NotFound()
    counted = engine.count_pipes()
    return flask.Response(status=204) if counted is None else counted


def experts(service):
    """How many experts decode steps have used since the start, and how many of these lay on cards. 404 if all do."""
    used = experts_used(service.engine)
    if used is None:
        raise NotFound()
    return dict(zip(("hits", "used"), used))


def waiting(service, request: str = ""):
    """How many requests its engine takes before the one of this id: it takes them in the order of their arrival. 204
    where none of this id is open."""
    with service.changed:
        rows = [(exchange.engine, exchange.id) for generation, _, exchange in service.open.values()
                if is_open(generation)]
    engine = next((engine for engine, id in rows if id == request), None)
    if engine is None:
        return flask.Response(status=204)
    ids = [id for other, id in rows if other is engine]
    return {"ahead": max(0, ids.index(request) + 1 - n_slots(engine))}


ENDPOINTS = [Endpoint("GET", "/", "The chat page", page, PROTOCOL),
             Endpoint("GET", "/pipes", "What each pipe of an emulated card did in a step", pipes, PROTOCOL,
                      query=OF_MODEL, asks="loaded"),
             Endpoint("GET", "/experts", "How many experts of answers lay on the cards", experts, PROTOCOL,
                      query=OF_MODEL, asks="loaded"),
             Endpoint("GET", "/waiting", "How many requests are before one that waits", waiting, PROTOCOL,
                      query={"request": TEXT})]
