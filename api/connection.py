"""A client's connection: waitress' own, with deadlines, TLS, and answers for what is no request.

Half-closed connections: a client that ends its sending side looks as one that has left, and generations must not run
for nobody. So its running generations are cancelled. Then it is sent the answer, if the endpoint does not generate, and
otherwise an error.
"""

import contextlib
import json
import socket
import time

import waitress.channel
import waitress.task
from waitress.utilities import BadRequest, Error
from werkzeug.exceptions import HTTPException

from . import openai
from .errors import explain
from .heads import RequestReader, RequestTimeout
from .tls import HANDSHAKE, RECORD, SecureSocket

READ_SECONDS = 60           # a client that takes nothing of what is there for it in so long is hung up on
REQUEST_SECONDS = 30        # for a head, and for the TLS handshake before it; a body gets more by its bytes
BODY_RATE = 1000            # bytes of a body per second, at least: each adds a thousandth of a second
IDLE_SECONDS = 120          # between an answer and the next request
MOMENT = 0.5                # seconds in which a new connection is to say something, and a reader to read on
LINGER_SECONDS = 2          # in which a client that is still sending can read that its request is refused
MOST_READ_OVER = 64         # records of a client that are read over when its connection is closed
MAX_MESSAGE = 300           # characters of waitress' own words that a client or a log gets to see


def in_one_line(text: str) -> str:
    """A text that bytes of a client may be part of, short and without control characters."""
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_MESSAGE])


class MalformedRequest(waitress.task.ErrorTask):
    """The answer to bytes that are no HTTP request, or too large a one. No path is known, so the answer has OpenAI's
    shape."""

    def execute(self):
        error = self.request.error
        refusal = HTTPException(in_one_line(f"{error.reason}: {error.body}"))
        refusal.code = error.code
        body = json.dumps(openai.PROTOCOL.error_body(explain(refusal))).encode()
        self.status, self.content_length = f"{error.code} {error.reason}", len(body)
        self.response_headers.append(("Content-Type", "application/json"))
        self.set_close_on_finish()
        self.channel.is_refused = True
        self.write(body)


class Answer(waitress.task.WSGITask):
    """The Flask app's answer to a request."""

    def build_response_header(self):
        if self.channel.server.service.is_draining:
            self.request.headers["CONNECTION"] = "close"    # another server is to get the client's next request
        return super().build_response_header()


class Connection(waitress.channel.HTTPChannel):
    """A client's connection. Its methods are called by the thread that polls, except where they say otherwise.

    began: when its current request began or, between two requests, when the last answer was written (time.monotonic).
    is_idle: it is between two requests. has_left: the client sends nothing more. is_refused: what the client sends is
    no request; it is told so and not read further. lingers_until: see `linger`. secure: the socket of an encrypted
    connection.
    """

    parser_class, task_class, error_task_class = RequestReader, Answer, MalformedRequest

    def __init__(self, *arguments, **options):
        self.began = time.monotonic()
        self.is_idle = self.has_left = self.is_refused = False
        self.lingers_until = self.secure = None
        super().__init__(*arguments, **options)

    # ---- reading ------------------------------------------------------------------------------------------

    def readable(self) -> bool:
        return self.lingers_until is not None or not self.has_left and super().readable()

    def handle_read(self):
        try:
            if self.server.tls and not self.secure and not self.is_refused and not self.greet():
                return
            data = self.socket.recv(RECORD)
        except BlockingIOError:         # of TLS: a record is not whole, or the handshake goes on
            return
        except (OSError, ValueError):
            self.handle_close()
            return
        if data and not self.is_refused:
            self.take(data)
        elif not data and self.requests:
            self.has_left = True
        elif not data:
            self.handle_close()

    def take(self, data: bytes):
        """Reads bytes as requests. Those that are whole get into the queue for waitress' threads."""
        if self.is_idle:
            self.is_idle, self.began = False, time.monotonic()
        self.last_activity = time.time()
        self.received(data)
        self.is_idle = self.request is None

    def greet(self) -> bool:
        """Looks at the first byte of a client of a TLS port; returns whether there is anything to read. A client that
        speaks plain HTTP is told to speak TLS."""
        first = self.socket.recv(1, socket.MSG_PEEK)
        if first == HANDSHAKE:
            self.socket = self.secure = SecureSocket(self.socket, self.server.tls)
            self.sendbuf_len = RECORD       # one record at a time: OpenSSL says only of a whole `send` that it is done
        elif first:
            self.refuse(BadRequest("this port speaks TLS: the address begins with https://"))
        return first == HANDSHAKE or not first

    def refuse(self, error: Error):
        """Has waitress answer with an error and close the connection, whatever of a request has come."""
        with self.requests_lock:
            if self.will_close or self.close_when_flushed:
                return
            request, self.request = self.request or self.parser_class(self.adj), None
            request.error, request.completed, self.is_refused = error, True, True
            self.requests.append(request)
            if len(self.requests) == 1:
                self.server.add_task(self)

    def service(self):
        """Answers a request, on one of waitress' threads."""
        super().service()
        self.began = time.monotonic()

    def check_client_disconnected(self) -> bool:
        return self.has_left or super().check_client_disconnected()

    # ---- writing and closing ------------------------------------------------------------------------------

    def writable(self) -> bool:
        if self.has_left and not self.requests:
            self.close_when_flushed = True
        return bool(self.secure and self.secure.is_full) or super().writable()

    def handle_write(self):
        if self.secure and self.secure.is_full:
            self.handle_read()
        if self.is_refused and self.close_when_flushed and not self.total_outbufs_len:
            self.linger()
        elif self.connected:
            super().handle_write()

    def linger(self):
        """Ends the sending side. The other side stays open for a while: a client that is still sending when its
        connection is closed loses the answer (RFC 9112, section 9.6)."""
        self.close_when_flushed, self.lingers_until = False, time.monotonic() + LINGER_SECONDS
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def hang_up(self):
        """Closes the connection by way of the thread that polls it. That thread also wakes the one that waits to write
        to this connection."""
        self.will_close = True          # also where a request waits for a thread that has ended
        with contextlib.suppress(OSError, AttributeError):      # the connection was closed meanwhile
            self.socket.shutdown(socket.SHUT_RDWR)

    def handle_close(self):
        """Closes the connection. What the client has sent meanwhile is read over first: the kernel would not send what
        was written to a client of whom it has bytes that nobody has read."""
        with contextlib.suppress(OSError, ValueError, AttributeError):      # of a socket that is closed already, too
            for _ in range(MOST_READ_OVER):
                if not self.socket.recv(RECORD):
                    break
        super().handle_close()

    def leave(self):
        """Closes the connection when all is sent that was written: nothing more will be."""
        if self.connected and self.total_outbufs_len:
            self.close_when_flushed = True
        else:
            self.hang_up()

    # ---- deadlines ----------------------------------------------------------------------------------------

    def since(self) -> float:
        """When the connection's request would have begun, had its body come at BODY_RATE. Bytes of heads do not count,
        so a client cannot look busy by sending one of them now and then."""
        return self.began + (self.request.body_bytes_received / BODY_RATE if self.request else 0)

    def keep_time(self):
        """Ends the connection if its client takes too long. Called every second."""
        now = time.monotonic()
        if self.lingers_until is not None:
            if now > self.lingers_until:
                self.handle_close()
        elif self.total_outbufs_len:
            if self.is_stuck():
                self.handle_close()     # or its answer would hold a thread and a place of open requests for ever
        elif not self.requests and now - self.since() > (IDLE_SECONDS if self.is_idle else REQUEST_SECONDS):
            if self.request is None:
                self.handle_close()
            else:
                self.refuse(RequestTimeout("the request did not come fast enough"))

    def is_stuck(self) -> bool:
        """Whether something is to be sent, and nothing could be sent for READ_SECONDS."""
        with self.outbuf_lock:      # a thread that has just put bytes there is about to send them
            return self.total_outbufs_len > 0 and time.time() - self.last_activity > READ_SECONDS

    def may_go(self) -> bool:
        """Whether the connection may be closed to make room for others: no request is running, and its client has not
        taken a part of an answer a moment ago."""
        reads = self.total_outbufs_len > 0 and time.time() - self.last_activity < MOMENT
        return self.connected and not self.requests and not reads

    def usefulness(self) -> tuple:
        """Where room is short, the connection with the least usefulness goes first. In this order: those that have been
        unfinished or idle for more than a moment; those whose answer nobody reads; those that have just begun. Among
        equals, the one that began first."""
        has_answer, is_new = self.total_outbufs_len > 0, time.monotonic() - self.began < MOMENT
        return is_new and not has_answer, has_answer, self.since()

    def give_way(self):
        """Closes the connection, unless a request has just become whole."""
        with self.requests_lock:
            if self.may_go():
                self.handle_close()
