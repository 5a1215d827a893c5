"""The sockets under the Flask app: waitress, and what it lacks for streams that are left or not read."""

import contextlib
import json
import logging
import socket
import threading
import time

import flask
import waitress
import waitress.channel
import waitress.server
import waitress.task
from werkzeug.exceptions import HTTPException

from . import openai
from .errors import MAX_BODY, explain

READ_SECONDS = 60           # a client that takes nothing of what is there for it in so long is hung up on


def listen(host: str, port: int) -> list:
    """A listening socket for each address of `host`. Raises OSError where one address cannot be listened on; then none
    is."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.create_server(address[:2], family=family)) for family, _, _, _, address
                   in dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))]
        opened.pop_all()        # from here on the caller closes them
    return sockets


class MalformedRequest(waitress.task.ErrorTask):
    """Waitress's own answer to bytes that are no HTTP request, or too large a one. No path is known, so the answer has
    OpenAI's shape."""

    def execute(self):
        error = self.request.error
        refusal = HTTPException(f"{error.reason}: {error.body}")
        refusal.code = error.code
        body = json.dumps(openai.PROTOCOL.error_body(explain(refusal))).encode()
        self.status, self.content_length = f"{error.code} {error.reason}", len(body)
        self.response_headers.append(("Content-Type", "application/json"))
        self.set_close_on_finish()
        self.write(body)


class Connection(waitress.channel.HTTPChannel):
    """A client's connection."""

    error_task_class = MalformedRequest

    def writable(self):
        """Whether waitress should poll for room to write. Waitress asks at each poll, at least once a second."""
        if self.total_outbufs_len and self.is_stuck():
            self.hang_up()      # or its answer would hold a thread and a place of open requests for ever
        return super().writable()

    def is_stuck(self) -> bool:
        """Whether something is to be sent, and nothing could be sent for READ_SECONDS."""
        with self.outbuf_lock:      # a thread that has just put bytes there is about to send them
            return self.total_outbufs_len > 0 and time.time() - self.last_activity > READ_SECONDS

    def hang_up(self):
        """Closes the connection by way of the thread that polls it. That thread also wakes the one that waits to write
        to this connection."""
        with contextlib.suppress(OSError, AttributeError):      # the connection was closed meanwhile
            self.socket.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def serving(app: flask.Flask, host: str, port: int):
    """Answers HTTP on other threads while the `with` body runs; gives the port. Raises OSError: it cannot listen."""
    service = app.extensions["qengine"]
    try:
        sockets = listen(host, port)        # here, because waitress starts its threads before it listens
    except OSError:
        service.close()
        raise
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)     # waitress would warn of every request that waits
    watched = {}                                # what waitress polls, by the number of the socket
    server = waitress.create_server(
        app, watched, sockets=sockets, ident="qengine",
        threads=service.max_requests + 8,       # an open request holds a thread; 8 are left for /health and the like
        connection_limit=1000,                  # more than threads, or streams wait for a connection
        asyncore_use_poll=True,                 # select() cannot watch that many
        channel_request_lookahead=1,            # or waitress does not notice that a client hung up
        outbuf_high_watermark=100_000,          # bytes that an answer may be ahead of its reader
        max_request_body_size=4 * MAX_BODY)     # smaller ones Flask refuses, in the shape of the protocol
    listeners = [item for item in watched.values() if isinstance(item, waitress.server.BaseWSGIServer)]
    for listener in listeners:
        listener.channel_class = Connection
    thread = threading.Thread(target=server.run, name="http server", daemon=True)
    thread.start()
    try:
        yield getattr(server, "effective_port", port)       # missing where the host has several addresses
    finally:
        if not service.close():                 # a client does not read its answer
            hang_up(watched)
        server.task_dispatcher.shutdown()       # waits for the threads that write the last answers
        for listener in listeners:
            listener.close()
        thread.join(1.0)                        # time for written bytes to leave
        hang_up(watched)                        # on clients that are idle, and on those that do not read
        thread.join()


def hang_up(watched: dict):
    """Hangs up on every client among what waitress polls."""
    for connection in [item for item in list(watched.values()) if isinstance(item, Connection)]:
        connection.hang_up()
