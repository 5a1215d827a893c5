"""TLS, by Python's ssl module: the files of a certificate, and connections that are encrypted."""

import contextlib
import errno
import os
import socket
import ssl
import threading
from pathlib import Path

from engine.request import RequestError

HANDSHAKE = b"\x16"         # the first byte of a TLS connection; no HTTP request begins with it
RECORD = 16 << 10           # bytes of content of a TLS record, at most


def read_certificate(certificate: str, key: str) -> ssl.SSLContext:
    """What a server needs to prove that it is the one of this certificate. Both files are in PEM form; the
    certificate's may go on with those of its authorities. Raises RequestError: a file cannot be used."""
    check_pem("tls_cert", certificate, "certificate", "BEGIN CERTIFICATE-")
    check_pem("tls_key", key, "private key", "PRIVATE KEY-")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION      # a client could keep the server busy with it
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=refuse_password)
    except Encrypted:
        raise RequestError("tls_key", f"{key}: asks for a password, which this server cannot be given") from None
    except ssl.SSLError as error:
        reason = f"{key}: is not the key of {certificate}" if error.reason == "KEY_VALUES_MISMATCH" else \
            f"{certificate} or {key}: damaged, or too weak ({(error.reason or 'PEM').replace('_', ' ').lower()})"
        raise RequestError("tls_key", reason) from None
    return context


def check_pem(option: str, path: str, what: str, mark: str):
    """Raises RequestError unless a file holds the first line of such a thing in PEM form."""
    try:
        text = Path(path).read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise RequestError(option, f"{path}: {error.strerror}") from None
    if mark not in text:
        raise RequestError(option, f"{path}: holds no {what} in PEM form")


class Encrypted(Exception):
    """A key asks for a password."""


def refuse_password():
    raise Encrypted


class SecureSocket:
    """The server's side of a TLS connection, used as a socket that never blocks. The handshake happens within `recv`.
    Several threads may use it at the same time.

    is_full: whether `recv` waits for room to write, as it may during a handshake.
    """

    def __init__(self, plain: socket.socket, context: ssl.SSLContext):
        """Takes the plain socket over. Raises OSError or ValueError: its client has gone."""
        self.secure = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        self.is_full = False
        self.turns = threading.Lock()       # OpenSSL's connections are for one thread at a time
        self.fileno, self.getsockopt = self.secure.fileno, self.secure.getsockopt

    def recv(self, size: int) -> bytes:
        """Bytes of one record. With a size of RECORD or more nothing stays behind that poll() would not see."""
        with self.turn():
            self.is_full = False
            return self.secure.recv(size)

    def send(self, data: bytes) -> int:
        with self.turn():
            return self.secure.send(data)

    @contextlib.contextmanager
    def turn(self):
        """OpenSSL for the calling thread alone. Raises OSError as a plain socket does."""
        with self.turns:
            try:
                yield
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                self.is_full = isinstance(error, ssl.SSLWantWriteError)
                raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK)) from None

    def shutdown(self, how: int):
        """Tells the client that nothing follows, and shuts the TCP connection down. Raises OSError."""
        self.say_goodbye()
        with self.turn():
            self.secure.shutdown(how)

    def close(self):
        self.say_goodbye()
        with self.turn():
            self.secure.close()

    def say_goodbye(self):
        """Sends the alert that shows that the connection was not cut, and does not wait for the client's own."""
        with contextlib.suppress(OSError, ValueError), self.turn():
            self.secure.unwrap()
