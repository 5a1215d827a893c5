"""Endpoints with the names and fields of llama.cpp's server: the tokenizer, the chat template, and the server's
health."""

import datetime
import json

import flask

from engine.guard import GUARD
from engine.request import Fault, RequestError

from . import chat, openai
from .endpoint import Endpoint
from .errors import MAX_BODY
from .fields import BOOL, TEXT, list_of, object_of
from .openai import PROTOCOL


MAX_BYTES = 1 << 20         # of a text, as UTF-8, that is cut into tokens: a book
MAX_PIECES = 1 << 19        # tokens of a text that are told together with their pieces
MAX_IDS = 1 << 20           # tokens that are put together to a text: those of the longest text above
BLOCK = 1 << 12             # tokens that are written at once


def tokenize(service, body: dict):
    """The interpreter's lock is held for a block of tokens at a time; json.dumps holds it until it is done."""
    tokenizer, n_bytes = service.engine.tokenizer, len(body["content"].encode())
    if n_bytes > MAX_BYTES:
        raise RequestError("content", f"'content' has {n_bytes} bytes as UTF-8, and may have {MAX_BYTES}")
    ids = tokenizer.encode(body["content"], body.get("parse_special", True), body.get("add_special", False))
    blocks = (ids[start:start + BLOCK] for start in range(0, len(ids), BLOCK))
    if body.get("with_pieces"):
        if len(ids) > MAX_PIECES:
            raise RequestError("with_pieces", f"'content' has {len(ids)} tokens, and 'with_pieces' tells of up to "
                                              f"{MAX_PIECES}")
        blocks = ([{"id": token, "piece": text_or_bytes(tokenizer.pieces[token])} for token in block]
                  for block in blocks)
    return flask.Response(f"""{{"tokens":[{",".join(json.dumps(block)[1:-1] for block in blocks)}]}}\n""",
                          mimetype="application/json")


def text_or_bytes(piece: bytes) -> str | list[int]:
    """The text of a token, or the values of its bytes where they are part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def detokenize(service, body: dict):
    tokenizer, ids = service.engine.tokenizer, body["tokens"]
    n_bytes = sum(len(tokenizer.pieces[token]) for token in ids if 0 <= token < tokenizer.n_vocab)
    if n_bytes > MAX_BODY:
        raise RequestError("tokens", f"the text of 'tokens' has {n_bytes} bytes, and may have {MAX_BODY}")
    try:
        return {"content": tokenizer.decode(ids, special=True)}
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
                             "reasoning_effort", "documents", "add_generation_prompt", "continue_final_message")}
ENDPOINTS = [
    Endpoint("POST", "/tokenize", f"Token ids of a text of up to {MAX_BYTES} bytes", tokenize, PROTOCOL, object_of(
        {"content": TEXT, "add_special": BOOL, "parse_special": BOOL, "with_pieces": BOOL}, ["content"])),
    Endpoint("POST", "/detokenize", "The text of token ids", detokenize, PROTOCOL, object_of(
        {"tokens": list_of({"type": "integer"}, 0, MAX_IDS)}, ["tokens"])),
    Endpoint("POST", "/apply-template", "The prompt of a conversation", apply_template, PROTOCOL, object_of(
        CONVERSATION, ["messages"])),
    Endpoint("GET", "/health", "Whether the server can answer", health, PROTOCOL)]
