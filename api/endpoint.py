"""An endpoint: where clients ask, what they may send, who answers, and in which protocol they hear of errors."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import flask

from .body import parse_body
from .errors import ErrorAnswer
from .fields import check, read_query


@dataclass(frozen=True)
class WireProtocol:
    """A protocol, as far as the server itself speaks it: in errors.

    prefix: how the paths of this protocol begin. An error at an unknown path has the shape of the protocol with the
    longest fitting prefix. error_body: makes the JSON object that tells of an error.
    """

    prefix: str
    error_body: Callable[[ErrorAnswer], dict]


@dataclass(frozen=True)
class Endpoint:
    """A path, what may be sent there, and the function that answers: view(service), or view(service, body).

    path: as OpenAPI writes it. The view gets a part like {id} as the argument of this name. The last part of a
    path may hold slashes.
    body: the description of the request's body, as api/fields.py has it; None: there is no body.
    kind: of the model that answers, "text", "embedding" or "reranking"; None: the first model, whatever it is.
    asks: what the view gets for `service`. "server": the Service. "model": an Answering with the model that the body
    names (`name_of`), which is loaded if need be. "loaded": the same with the model that the query string names, if it
    is loaded. None: "model" where there is a body, "server" where there is none. A function gives one of these words
    for a body.
    name_of: name_of(service, body) gives the name of the model that a body means.
    query: descriptions of the parameters of the query string, by name. The view gets those that were sent as arguments.
    may_show: whether the body may hold pictures, and so be larger.
    generates: whether the view itself asks for places of open requests (see `Service.submit`). Every other request with
    a body holds one place until it is answered, because megabytes of JSON take seconds.
    """

    method: str
    path: str
    summary: str
    view: Callable
    protocol: WireProtocol
    body: dict | None = None
    generates: bool = False
    query: dict = field(default_factory=dict)
    kind: str | None = None
    may_show: bool = False
    asks: str | Callable[[dict], str] | None = None
    name_of: Callable = lambda service, body: body.get("model")

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def rule(self) -> str:
        """The path as Flask writes it."""
        return re.sub(r"{(\w+)}", r"<\1>", re.sub(r"{(\w+)}$", r"<path:\1>", self.path))

    @property
    def path_names(self) -> list[str]:
        """The names of the parts of the path that a client fills in."""
        return re.findall(r"{(\w+)}", self.path)

    def answer(self, service, **arguments):
        """The response to the current HTTP request. arguments: parts of its path. RequestError names what is wrong with
        its body or its query string."""
        arguments |= read_query(flask.request.args, self.query)
        if self.asks == "loaded":
            with service.borrow(arguments.pop("model", None)) as answering:
                return self.view(answering, **arguments)
        if self.body is None:
            return self.view(service, **arguments)
        service.choose(self.kind, None)                 # early: what it raises needs no body
        if self.may_show:
            flask.request.max_content_length = service.max_body
        with service.memory_for(flask.request.content_length or 0):
            with service.places(1):
                body = parse_body(flask.request.get_data(cache=False))
                check(body, self.body)
                body = {name: value for name, value in body.items() if value is not None}
                asks = self.asks(body) if callable(self.asks) else self.asks
                if asks != "server":
                    served = service.choose(self.kind, self.name_of(service, body))
                    service = service.lend(served, body.get("timeout"))
                if not self.generates:
                    said = self.view(service, body, **arguments)
                    return said if isinstance(said, flask.Response) else flask.jsonify(said)
            return self.view(service, body, **arguments)
