"""An endpoint: where clients ask, what they may send, who answers, and in which protocol they hear of errors."""

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

    def answer(self, service):
        """The response to the current HTTP request. RequestError names what is wrong with its body."""
        if self.body is None:
            return self.view(service)
        service.ready()
        with service.places(1):
            body = parse_body(flask.request.get_data())
            check(body, self.body)
            body = {name: value for name, value in body.items() if value is not None}
            if not self.generates:
                return flask.jsonify(self.view(service, body))
        return self.view(service, body)
