"""An endpoint: where clients ask, what they may send, who answers, and in which protocol they hear of errors."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import flask

from .errors import ErrorAnswer
from .fields import check, parse_body


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

    path: as OpenAPI writes it. A part {id} is given to the view as an argument of this name, and may hold slashes.
    body: the description of the request's body, as api/fields.py has it; None: there is no body.
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

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def parameters(self) -> list[str]:
        """The names of the parts of the path that vary."""
        return re.findall(r"{(\w+)}", self.path)

    @property
    def rule(self) -> str:
        """The path as Flask writes it."""
        return re.sub(r"{(\w+)}", r"<path:\1>", self.path)

    def answer(self, service, **parts):
        """The response to the current HTTP request. parts: of the path. RequestError names what is wrong with the
        body."""
        if self.body is None:
            return self.view(service, **parts)
        service.ready()
        with service.places(1):
            body = parse_body(flask.request.get_data())
            check(body, self.body)
            body = {name: value for name, value in body.items() if value is not None}
            if not self.generates:
                return flask.jsonify(self.view(service, body, **parts))
        return self.view(service, body, **parts)
