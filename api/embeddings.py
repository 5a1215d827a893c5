"""OpenAI's embeddings: a row of numbers for each text.

    {"input": ["A text.", [5, 6, 7]]}  →  {"object": "list", "data": [{"index": 0, "embedding": [0.1, ...], ...}, ...]}

A text gets the tokens around it that the model's file wants; token ids are taken as they are. Numbers are written with
as many digits as give the same float32 again, so both encodings say the same.
"""

import base64
import functools

import flask
import numpy as np
from werkzeug.exceptions import ServiceUnavailable

from engine.pooling import MOST_TEXTS, TextsJob, TextsRequest, gathered
from engine.request import RequestError

from . import field_table
from .endpoint import Endpoint
from .field_table import fields_of
from .fields import SECONDS, TEXT, either, list_of, object_of, one_of
from .openai import ID, PROTOCOL

# ---- what may be sent ------------------------------------------------------------------------------------

INPUT = either(TEXT, list_of(either(TEXT, ID, list_of(ID, 1)), 1))
DIMENSIONS = {"type": "integer", "minimum": 1, "maximum": 1 << 20}
EMBEDDINGS = object_of(fields_of(field_table.EMBEDDINGS, {
    "model": TEXT, "input": INPUT, "encoding_format": one_of("float", "base64"), "dimensions": DIMENSIONS,
    "timeout": SECONDS}), ["input"])

# ---- the endpoint ----------------------------------------------------------------------------------------


def embeddings(service, body: dict):
    write = as_base64 if body.get("encoding_format") == "base64" else as_numbers
    return embed(service, body, "input", functools.partial(written, service.engine.name, write))


ENDPOINTS = [Endpoint("POST", "/v1/embeddings", "Embeddings of texts", embeddings, PROTOCOL, EMBEDDINGS,
                      generates=True, kind="embedding")]


def embed(service, body: dict, field: str, said):
    """The HTTP response to a request for embeddings. field: of the body, what is to be embedded. said(job, rows): the
    answer to a finished job, its rows float32 [texts, dimensions]."""
    engine, texts = service.engine, read_texts(body[field], field)

    def prepare():
        ids = gathered((engine.encode(text, field) if isinstance(text, str) else text for text in texts), field)
        return [TextsRequest(ids, body.get("dimensions"), body.get("timeout"), field)], Answer(said)

    return service.respond(1, prepare, False)


def read_texts(given: str | list, field: str) -> list[str | list[int]]:
    """The texts of a request, each as text or token ids. given: a text, the token ids of a text, or a list of such."""
    if isinstance(given, str):
        return [given]
    n_ids = sum(type(one) is int for one in given)
    if n_ids == len(given):
        return [given]
    if n_ids:
        raise RequestError(field, f"'{field}' must be a text, a list of token ids, or a list of such")
    if len(given) > MOST_TEXTS:
        raise RequestError(field, f"'{field}' must hold 1 to {MOST_TEXTS} texts, not {len(given)}")
    return given


# ---- what is answered ------------------------------------------------------------------------------------


class Answer:
    """The answer to a TextsJob, as Service.respond takes it. said(job, rows): what a protocol says of it."""

    def __init__(self, said):
        self.said = said

    def whole(self, jobs: list[TextsJob]):
        [job] = jobs
        rows = job.result()
        if rows is None:                # the client has gone, or the server closes
            raise ServiceUnavailable("the request was cancelled")
        return self.said(job, rows)


def written(model: str, write, job: TextsJob, rows: np.ndarray) -> flask.Response:
    """The answer, row by row: all of it may be a hundred megabytes of text. write(row): the JSON text of a row."""
    head = flask.json.dumps({"object": "list", "model": model, "usage": usage_of(job)})[:-1]

    def pieces():
        yield f'{head}, "data": ['
        for i, row in enumerate(rows):
            yield f'{", " if i else ""}{{"object": "embedding", "index": {i}, "embedding": {write(row)}}}'
        yield "]}\n"

    return flask.Response(pieces(), mimetype="application/json")


def usage_of(job: TextsJob) -> dict:
    return {"prompt_tokens": job.n_prompt, "total_tokens": job.n_prompt}


def as_numbers(row: np.ndarray) -> str:
    """A JSON list."""
    return f"[{', '.join(row.astype(str))}]"


def as_base64(row: np.ndarray) -> str:
    """A JSON text: little-endian float32 in base64."""
    return f'"{base64.b64encode(row.astype("<f4").tobytes()).decode()}"'
