"""Endpoints with the names and fields of llama.cpp's server: the tokenizer, the chat template, and the server's
health."""

import datetime

from engine.guard import GUARD
from engine.request import Fault, RequestError

from . import chat, openai
from .endpoint import Endpoint
from .fields import BOOL, TEXT, list_of, object_of
from .openai import PROTOCOL


def tokenize(service, body: dict):
    tokenizer = service.engine.tokenizer
    ids = tokenizer.encode(body["content"], body.get("parse_special", True), body.get("add_special", False))
    if body.get("with_pieces"):
        pieces = [tokenizer.pieces[token] for token in ids]
        return {"tokens": [{"id": token, "piece": text_or_bytes(piece)} for token, piece in zip(ids, pieces)]}
    return {"tokens": ids}


def text_or_bytes(piece: bytes) -> str | list[int]:
    """The text of a token, or the values of its bytes where they are part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def detokenize(service, body: dict):
    try:
        return {"content": service.engine.tokenizer.decode(body["tokens"], special=True)}
    except RequestError as error:
        raise RequestError("tokens", str(error)) from None


def apply_template(service, body: dict):
    """The prompt that the engine is given for a chat request with these fields."""
    prompt, _ = chat.render(service, openai.read_conversation(body))
    return {"prompt": prompt.replace(GUARD, "")}


def health(service):
    """Whether the server can answer, and why not. Of each card: its name, and its first and last layer."""
    engine = service.engine
    lost = {"lost": [told_of(fault) for fault in service.lost]} if service.lost else {}
    if service.is_draining:
        return {"status": "draining"}, 503
    if engine is None or service.is_loading:
        return {"status": "loading", **lost}, 503
    if engine.reason is not None:
        return {"status": "error", "error": engine.reason, **told_of(engine.fault)}, 503
    cards = [{"name": card.describe(), "layers": [layers.start, layers.stop - 1]}      # the first and the last
             for card, layers in zip(engine.cards, engine.layers)]
    return {"status": "ok", "model": engine.name, "cards": cards, **lost,
            "counts_pipes": engine.counts_pipes}


def told_of(fault: Fault) -> dict:
    """The card at fault, if there is one, and since when, as /health has them."""
    since = datetime.datetime.fromtimestamp(fault.since, datetime.timezone.utc)
    return ({"card": fault.card} if fault.card else {}) | {"since": since.isoformat(timespec="seconds")}


CONVERSATION = {name: openai.CHAT["properties"][name]
                for name in ("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs",
                             "reasoning_effort")}
ENDPOINTS = [
    Endpoint("POST", "/tokenize", "Token ids of a text", tokenize, PROTOCOL, object_of(
        {"content": TEXT, "add_special": BOOL, "parse_special": BOOL, "with_pieces": BOOL}, ["content"])),
    Endpoint("POST", "/detokenize", "The text of token ids", detokenize, PROTOCOL, object_of(
        {"tokens": list_of({"type": "integer"})}, ["tokens"])),
    Endpoint("POST", "/apply-template", "The prompt of a conversation", apply_template, PROTOCOL, object_of(
        CONVERSATION, ["messages"])),
    Endpoint("GET", "/health", "Whether the server can answer", health, PROTOCOL)]
