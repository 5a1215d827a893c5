"""Endpoints with the names and fields of llama.cpp's server: the tokenizer, the chat template, and the server's
health. Those of the tokenizer also have vLLM's fields, which lm-eval sends: prompt, messages, return_token_strs."""

import datetime
import json
import time

import flask

from engine import images
from engine.guard import GUARD
from engine.request import Fault, RequestError
from engine.served import Served

from . import chat, openai
from .endpoint import Endpoint
from .errors import MAX_BODY
from .fields import BOOL, TEXT, list_of, object_of
from .log import experts_used
from .models import OF_MODEL
from .openai import PROTOCOL


MAX_BYTES = 1 << 20         # of a text, as UTF-8, that is cut into tokens: a book
MAX_PIECES = 1 << 19        # tokens of a text that are told together with their pieces
MAX_IDS = 1 << 20           # tokens that are put together to a text: those of the longest text above
BLOCK = 1 << 12             # tokens that are written at once


def tokenize(service, body: dict):
    field, text, sent = text_of(service, body)
    engine = service.engine
    if (n_bytes := len(text.encode())) > MAX_BYTES:
        raise RequestError(field, f"'{field}' has {n_bytes} bytes as UTF-8, and may have {MAX_BYTES}")
    add_special = body.get("add_special", False) if field == "content" else body.get("add_special_tokens", True)
    ids, pieces = engine.tokenizer.encode(text, body.get("parse_special", True), add_special), engine.tokenizer.pieces
    ids = chat.with_pictures(service, ids, sent)["prompt_ids"]
    for wish in "with_pieces", "return_token_strs":
        if body.get(wish) and len(ids) > MAX_PIECES:
            raise RequestError(wish, f"'{field}' has {len(ids)} tokens, and '{wish}' tells of up to {MAX_PIECES}")
    shown = (lambda token: {"id": token, "piece": text_or_bytes(pieces[token])}) if body.get("with_pieces") else int
    parts = {"tokens": written(ids, shown), "count": len(ids), "max_model_len": engine.n_ctx}
    if body.get("return_token_strs"):
        parts["token_strs"] = written(ids, lambda token: pieces[token].decode("utf-8", "replace"))
    text = ",".join(f'"{name}":{part}' for name, part in parts.items())
    return flask.Response(f"{{{text}}}\n", mimetype="application/json")


def text_of(service, body: dict) -> tuple[str, str, list]:
    """What is to be cut into tokens: the field that holds it, the text, and the pictures in it."""
    given = [name for name in ("content", "prompt", "messages") if name in body]
    if len(given) != 1:
        raise RequestError(given[1] if given else "content",
                           "one of 'content', 'prompt' and 'messages' must be there, and only one")
    field, = given
    if field != "messages":
        return field, body[field], []
    prompt = chat.render(service, openai.read_conversation(body))
    if prompt.sent and not body.get("parse_special", True):
        raise RequestError("parse_special", "'parse_special' must be true where there are pictures, which are control "
                                            "tokens of a prompt")
    return field, prompt.text, prompt.sent


def written(ids: list[int], shown) -> str:
    """The JSON text of a list: shown(token) for each token. The interpreter's lock is held for a block of tokens at a
    time; json.dumps holds it until it is done."""
    blocks = (list(map(shown, ids[start:start + BLOCK])) for start in range(0, len(ids), BLOCK))
    return f"[{','.join(json.dumps(block)[1:-1] for block in blocks)}]"


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
        text = tokenizer.decode(ids, special=True)
    except RequestError as error:
        raise RequestError("tokens", str(error)) from None
    return {"content": text, "prompt": text}                # llama.cpp's name and vLLM's


def tokenizer_info(service):
    """The tokenizer in the words of a tokenizer_config.json, as vLLM's endpoint of this name has it."""
    engine = service.engine
    tokenizer, template = engine.tokenizer, engine.template

    def text(ids):
        return tokenizer.decode(ids, special=True) if ids else None

    return {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": engine.n_ctx,
            "bos_token": text(tokenizer.prefix[:1]), "eos_token": text([min(tokenizer.eos_ids)]),
            "pad_token": None, "unk_token": None, "additional_special_tokens": list(tokenizer.control),
            "add_bos_token": bool(tokenizer.prefix), "add_eos_token": bool(tokenizer.suffix),
            "clean_up_tokenization_spaces": False, "chat_template": template.source if template else None}


def apply_template(service, body: dict):
    """The prompt that the engine is given for a chat request with these fields."""
    return {"prompt": chat.render(service, openai.read_conversation(body)).text.replace(GUARD, "")}


def health(service):
    """Whether the first model can answer, and why not. Of each card: its name, and its first and last layer. Of the
    models beside it the same, under `side`; where one has failed, the others go on. sees: how many pixels of a picture
    a model takes, and how many pictures of a request, if it takes any. replicas: of a model on several machines. A
    model that is not loaded has no cards; `refused` says why its last load has just failed, if it has."""
    lost = {"lost": [told_of(fault) for fault in service.lost]} if service.lost else {}
    if service.is_draining:
        return {"status": "draining"}, 503
    if service.models is None or service.is_loading:
        return {"status": "loading", **lost}, 503
    with service.models.held():
        return health_of(*service.models.served, lost=lost)


def health_of(first: Served, *others: Served, lost: dict):
    """The same of models that stay as they are meanwhile, of a server that works."""
    engine, beside = first.engine, {"side": [described(one) for one in others]} if others else {}
    if engine is not None and engine.reason is not None:
        return {"status": "error", **described(first), **beside}, 503
    return {"status": "ok", **described(first), **beside, **lost}


def described(served: Served) -> dict:
    """What a model is, whether it is loaded, and where, or why it could not be loaded a moment ago; what it sees, and
    what can be counted of its answers."""
    engine = served.engine
    where = {"cards": [], **refusal_of(served)} if engine is None else {"cards": cards_of(engine), **failure_of(engine)}
    if engine is not None and engine.replicas:
        where["replicas"] = [replica_told(one) for one in engine.replicas]
    if limits := served.facts.limits:
        where["sees"] = {"pixels": limits.max_tokens * images.BLOCK**2, "pictures": limits.most_pictures}
    return {"model": served.name, "kind": served.kind, "state": served.state, **where,
            "counts_pipes": engine is not None and engine.kind == "text" and engine.counts_pipes,
            "counts_experts": engine is not None and experts_used(engine) is not None}


def refusal_of(served: Served) -> dict:
    return {"refused": served.refusal} if served.refused_until > time.monotonic() else {}


def replica_told(one) -> dict:
    """A Replica of engine/replicas/table.py: where it runs, in which state, and how many requests are open there."""
    return {"id": one.id, "node": one.node, "host": one.hostname, "state": one.state, "open": one.n_open,
            "cards": list(one.facts.get("cards", ()))} | ({"error": one.reason} if one.reason else {})


def cards_of(engine) -> list[dict]:
    return [{"name": card.describe(), "layers": [layers.start, layers.stop - 1]}      # the first and the last
            for card, layers in zip(engine.cards, engine.layers)]


def failure_of(engine) -> dict:
    """Why an engine has stopped, where, and since when; nothing while it works."""
    return {} if engine.reason is None else {"error": engine.reason, **told_of(engine.fault)}


def told_of(fault: Fault) -> dict:
    """The card at fault, if there is one, and since when, as /health has them."""
    since = datetime.datetime.fromtimestamp(fault.since, datetime.timezone.utc)
    return ({"card": fault.card} if fault.card else {}) | {"since": since.isoformat(timespec="seconds")}


CONVERSATION = {name: openai.CHAT["properties"][name]
                for name in ("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs",
                             "reasoning_effort", "documents", "add_generation_prompt", "continue_final_message")}
ENDPOINTS = [
    Endpoint("POST", "/tokenize", f"Token ids of a text of up to {MAX_BYTES} bytes", tokenize, PROTOCOL, object_of(
        {"content": TEXT, "add_special": BOOL, "parse_special": BOOL, "with_pieces": BOOL, "prompt": TEXT,
         "model": TEXT, "add_special_tokens": BOOL, "return_token_strs": BOOL, **CONVERSATION}), may_show=True),
    Endpoint("POST", "/detokenize", "The text of token ids", detokenize, PROTOCOL, object_of(
        {"tokens": list_of({"type": "integer"}, 0, MAX_IDS), "model": TEXT}, ["tokens"])),
    Endpoint("GET", "/tokenizer_info", "Special tokens and the chat template", tokenizer_info, PROTOCOL,
             query=OF_MODEL, asks="loaded"),
    Endpoint("POST", "/apply-template", "The prompt of a conversation", apply_template, PROTOCOL, object_of(
        CONVERSATION | {"model": TEXT}, ["messages"]), kind="text", may_show=True),
    Endpoint("GET", "/health", "Whether the server can answer", health, PROTOCOL)]
