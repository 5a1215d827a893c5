"""The sockets of the server: who is let in where room is short, deadlines, bytes that are no request, clients that
leave, and a server that drains."""

import contextlib
import errno
import fcntl
import http.client
import json
import logging
import random
import resource
import select
import socket
import struct
import termios
import threading
import time

import openai
import pytest
import waitress.task
import waitress.trigger

from api import connection as connection_api
from api import http as http_api
from api.heads import MAX_HEAD
from tests.clients import TEXT, app_of, assert_error, official_client, send, serving
from tests.clock import Clock
from tests.paced import PacedEngine
from tests.until import PATIENCE, wait_until

ANSWER = "a b c d e f g h i j k l m n o p"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
PIECE = b"GET /health HTTP/1.1\r\nHost: local"            # of a head
COMPLETION = {"prompt": "hi", "max_tokens": 64}
ASKING = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (
    TEXT.encode(), len(json.dumps(COMPLETION)), json.dumps(COMPLETION).encode())


def connected(port, said=b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    client.sendall(said)
    return client


@contextlib.contextmanager
def crowd(port, n, said=b""):
    """n clients that have said something and then say nothing more."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(connected(port, said)) for _ in range(n)]


def read_answer(client):
    """(status, headers, decoded body) of the answer that comes next."""
    answer = http.client.HTTPResponse(client)
    answer.begin()
    return answer.status, answer.headers, json.loads(answer.read())


def is_open(client) -> bool:
    """Whether the server has left this connection open. Takes what it has sent."""
    client.setblocking(False)
    try:
        return client.recv(1 << 16) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


# ---- room --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, limit", [(300, 100), pytest.param(1005, 1000, marks=pytest.mark.slow),
                                      pytest.param(5000, 1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("said", [b"", PIECE, HEALTH], ids=["nothing", "piece", "health"])
def test_idle_connections_keep_nobody_out(monkeypatch, n, limit, said):
    monkeypatch.setattr(http_api, "CONNECTIONS", limit)
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if allowed < 2 * n + 500:
        pytest.skip(f"only {allowed} files may be open")
    with serving(app_of(PacedEngine(ANSWER))) as (port, _), crowd(port, n, said) as clients:
        for _ in range(5):
            assert send(port, "GET", "/health")[0] == 200
            assert send(port, "POST", TEXT, COMPLETION)[2]["choices"][0]["text"] == ANSWER
        wait_until(lambda: sum(map(is_open, clients)) <= limit)


class Polled:
    """What poll_all watches, with something to read. handle: called when that is read."""

    def __init__(self, handle):
        self.handle, self.n_asked = handle, 0

    def readable(self) -> bool:
        self.n_asked += 1
        return True

    def writable(self) -> bool:
        return False

    def handle_read_event(self):
        self.handle(self)


def test_news_of_a_closed_socket_is_not_taken_for_that_of_the_next_one():
    """Of two connections with news the first one closes the other, whose number a new one gets."""
    with contextlib.ExitStack() as stack:
        pairs = [[stack.enter_context(one) for one in socket.socketpair()] for _ in range(2)]
        told, watched = [], {}

        def replace_other(polled):
            told.append(polled)
            for number, item in list(watched.items()):
                if item is polled:
                    del watched[number]
                else:
                    watched[number] = new

        def stop(polled):
            told.append(polled)
            watched.clear()

        new = Polled(stop)
        for one, other in pairs:
            other.sendall(b"news")
            watched[one.fileno()] = Polled(replace_other)
        http_api.poll_all(watched)
    assert len(told) == 2 and told[1] is new
    assert new.n_asked == 1, "it got news of a poll in which it was not asked for"


def test_a_byte_now_and_then_keeps_no_place(monkeypatch):
    """Those that began first go first, whether or not they have just sent a byte."""
    monkeypatch.setattr(http_api, "CONNECTIONS", 20)
    with serving(app_of(PacedEngine())) as (port, _), crowd(port, 10, PIECE) as dribblers:
        time.sleep(0.1)
        with crowd(port, 5) as silent:
            time.sleep(0.1)
            for client in dribblers:
                client.sendall(b"h")
            with crowd(port, 12) as newer:
                wait_until(lambda: not any(map(is_open, dribblers[:5])))
                assert send(port, "GET", "/health")[0] == 200
                assert all(map(is_open, silent)) and all(map(is_open, newer))


def test_running_requests_are_never_closed_for_others(monkeypatch):
    monkeypatch.setattr(http_api, "CONNECTIONS", 50)
    go_on = threading.Event()
    engine = PacedEngine(lambda prompt: go_on.wait(PATIENCE) and ANSWER, pace=0.02)
    with serving(app_of(engine)) as (port, _), official_client(port) as client:
        texts = []

        def ask(stream):
            answer = client.completions.create(model="m", prompt="hi", max_tokens=64, stream=stream)
            texts.append("".join(c.choices[0].text for c in answer) if stream else answer.choices[0].text)

        threads = [threading.Thread(target=ask, args=(i % 2 == 0,)) for i in range(8)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(engine.generations) == len(threads))
        with crowd(port, 100, PIECE):
            go_on.set()
            with crowd(port, 100, PIECE):           # while they are written, too
                for thread in threads:
                    thread.join()
    assert texts == [ANSWER] * 8


@pytest.mark.parametrize("n_listeners", [1, 2])
def test_clients_wait_for_a_place_where_all_are_busy(monkeypatch, n_listeners):
    """As many as there is room for are let in, by all listeners together, and none is closed."""
    monkeypatch.setattr(http_api, "CONNECTIONS", 11 + 2 * n_listeners)      # each counts, and what wakes it
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n_listeners)]
    monkeypatch.setattr(http_api, "listen", lambda host, port: sockets)
    tend, most, go_on = http_api.Listener.tend, [], threading.Event()
    monkeypatch.setattr(http_api.Listener, "tend",
                        lambda self: (most.append(len(http_api.connections(self._map))), tend(self)))
    app = app_of(PacedEngine(lambda prompt: go_on.wait(PATIENCE) and ANSWER), max_requests=64)
    service, clients = app.extensions["qengine"], []
    with http_api.serving(app, "127.0.0.1", 0), contextlib.ExitStack() as stack:
        for i in range(60):
            port = sockets[i % n_listeners].getsockname()[1]
            clients.append(stack.enter_context(connected(port, ASKING)))
            wait_until(lambda: len(service.open) == min(len(clients), 11))
        time.sleep(0.2)                             # in which the server would let in more, or close them
        assert max(most) == len(service.open) == 11
        go_on.set()
        assert [read_answer(client)[0] for client in clients] == [200] * 60


def test_silent_clients_hold_nobody_up_where_few_places_are_left(monkeypatch):
    """They give way at once, and not at the server's next look, of which there is one each second."""
    monkeypatch.setattr(http_api, "CONNECTIONS", 12)
    go_on, began = threading.Event(), time.monotonic()
    with serving(app_of(PacedEngine(lambda prompt: go_on.wait(PATIENCE) and ANSWER))) as (port, service):
        with crowd(port, 9, ASKING):
            wait_until(lambda: len(service.open) == 9)
            with crowd(port, 90):
                assert send(port, "GET", "/health")[0] == 200
                assert time.monotonic() - began < 60            # 90 looks would take longer
            go_on.set()


class LongModelList(PacedEngine):
    """Its list of models takes a while, and is as long as what one connection can hold of an answer."""

    @property
    def name(self):
        time.sleep(0.2)
        return "long" * 1_000_000


def n_arrived(client) -> int:
    """Bytes that a client could read at once."""
    return struct.unpack("i", fcntl.ioctl(client, termios.FIONREAD, b"1234"))[0]


def stand_still(clients, seconds) -> bool:
    """Whether nothing arrives at any of the clients for so long."""
    before = list(map(n_arrived, clients))
    time.sleep(seconds)
    return before == list(map(n_arrived, clients))


def test_answers_that_nobody_reads_keep_nobody_out(monkeypatch):
    """A client that comes while the answers are still made or on their way would have to give way to them."""
    monkeypatch.setattr(http_api, "CONNECTIONS", 12)
    with serving(app_of(LongModelList())) as (port, service), \
            crowd(port, 12, b"GET /v1/models HTTP/1.1\r\n\r\n") as clients:
        wait_until(lambda: len(select.select(clients, [], [], 0)[0]) == len(clients) and not service.log.running)
        wait_until(lambda: stand_still(clients, 2 * connection_api.MOMENT))     # then it is certain that nobody reads
        assert sum(map(n_arrived, clients)) > 1_000_000
        assert send(port, "GET", "/openapi.json")[0] == 200


def test_no_file_is_left_for_a_connection(monkeypatch):
    """The server does not try again and again, and lets clients in as soon as it can."""
    tries, accept, is_full = [], http_api.Listener.accept, True

    def accept_or_fail(listener):
        tries.append(time.monotonic())
        if is_full:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    with serving(app_of(PacedEngine())) as (port, _):
        monkeypatch.setattr(http_api.Listener, "accept", accept_or_fail)
        with connected(port, HEALTH) as client:
            wait_until(lambda: len(tries) == 2)
            assert tries[1] - tries[0] >= http_api.PAUSE_SECONDS
            is_full = False
            assert read_answer(client)[0] == 200


def test_a_connection_goes_when_no_file_is_left(monkeypatch):
    with serving(app_of(PacedEngine())) as (port, _), connected(port, HEALTH) as old:
        assert read_answer(old)[0] == 200
        accept = http_api.Listener.accept

        def accept_or_fail(listener):
            if is_open(old):
                raise OSError(errno.EMFILE, "Too many open files")
            return accept(listener)

        monkeypatch.setattr(http_api.Listener, "accept", accept_or_fail)
        with connected(port, HEALTH) as new:
            assert read_answer(new)[0] == 200


@pytest.mark.parametrize("soft, hard, room, raised", [
    (1024, 4096, 1000, 2256), (1024, resource.RLIM_INFINITY, 1000, 2256), (1024, 1024, 384, 1024), (64, 64, 16, 64),
    (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1000, None), (1 << 20, 1 << 20, 1000, None)])
def test_connections_fit_the_limit_of_open_files(monkeypatch, soft, hard, room, raised):
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    assert http_api.room_for_connections() == room
    assert limits == ([(raised, hard)] if raised else [])


# ---- deadlines ---------------------------------------------------------------------------------------------

# The server looks at its deadlines once a second, so a deadline of one second is met within two; the tests wait ten.


def dribble(client, byte):
    """Sends bytes one at a time until the server answers."""
    while not select.select([client], [], [], 0.1)[0]:
        client.sendall(byte)


def test_a_head_that_does_not_come(monkeypatch):
    monkeypatch.setattr(connection_api, "REQUEST_SECONDS", 1)
    with serving(app_of(PacedEngine())) as (port, _), connected(port) as silent, connected(port, PIECE) as client:
        dribble(client, b"h")
        assert_error(read_answer(client), 408)
        assert client.recv(1) == silent.recv(1) == b""


@pytest.mark.parametrize("head", [b"Content-Length: 100000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n186a0\r\n"],
                         ids=["length", "chunks"])
def test_a_body_that_does_not_come(monkeypatch, head):
    monkeypatch.setattr(connection_api, "REQUEST_SECONDS", 1)
    head = b"POST /v1/completions HTTP/1.1\r\n" + head
    with serving(app_of(PacedEngine())) as (port, _), connected(port, head) as client:
        dribble(client, b" ")
        assert_error(read_answer(client), 408)


def test_a_slow_client_gets_its_answer(monkeypatch):
    """It takes longer than the time for a head, but sends faster than BODY_RATE."""
    monkeypatch.setattr(connection_api, "REQUEST_SECONDS", 1)
    monkeypatch.setattr(connection_api, "BODY_RATE", 100)
    body = json.dumps(COMPLETION).encode().ljust(30_000)
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    with serving(app_of(PacedEngine(ANSWER))) as (port, _), connected(port, head) as client:
        for at in range(0, len(body), 1000):
            client.sendall(body[at:at + 1000])
            time.sleep(0.1)
        assert read_answer(client)[2]["choices"][0]["text"] == ANSWER


@pytest.mark.parametrize("said", [b"", PIECE], ids=["nothing", "piece"])
def test_between_two_requests(monkeypatch, said):
    """An idle connection is closed without a word, and a request that has begun is answered."""
    with serving(app_of(PacedEngine())) as (port, _), connected(port, HEALTH) as client:
        assert read_answer(client)[0] == 200
        monkeypatch.setattr(connection_api, "REQUEST_SECONDS" if said else "IDLE_SECONDS", 1)
        client.sendall(said)
        if said:
            assert read_answer(client)[0] == 408
        assert client.recv(1) == b""


def test_a_long_answer_meets_no_deadline(monkeypatch):
    clock = Clock(monkeypatch, connection_api)

    def script(prompt):
        clock.ahead += 10 * connection_api.IDLE_SECONDS
        return ANSWER

    with serving(app_of(PacedEngine(script, delay=2.5))) as (port, _):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        connection.request("POST", TEXT, json.dumps(COMPLETION))
        assert json.load(connection.getresponse())["choices"][0]["text"] == ANSWER
        time.sleep(1.5)                                 # the server looks at its deadlines
        connection.request("GET", "/health")            # the time between two requests begins with the answer's end
        assert connection.getresponse().read()
        connection.close()


# ---- what is no request ------------------------------------------------------------------------------------

POST, GET = b"POST /v1/completions HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\n"
MALFORMED = {       # name: (what a client sends, status, words of the answer)
    "both lengths": (POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "exclude"),
    "both, other order": (POST + b"transfer-encoding:chunked\r\ncontent-length:0\r\n\r\n0\r\n\r\n", 400, "exclude"),
    "two lengths": (POST + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\n1234", 400, "twice"),
    "equal lengths": (POST + b"Content-Length: 4\r\nContent-Length: 4\r\n\r\n1234", 400, "twice"),
    "listed lengths": (POST + b"Content-Length: 4, 4\r\n\r\n1234", 400, "Content-Length"),
    "long length": (POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", 413, "larger"),
    "negative length": (POST + b"Content-Length: -5\r\n\r\n", 400, "Content-Length"),
    "signed length": (POST + b"Content-Length: +5\r\n\r\n12345", 400, "Content-Length"),
    "hexadecimal length": (POST + b"Content-Length: 0x5\r\n\r\n12345", 400, "Content-Length"),
    "empty length": (POST + b"Content-Length:\r\n\r\n", 400, "Content-Length"),
    "huge length": (POST + b"Content-Length: 1000000000000\r\n\r\n", 413, "larger"),
    "expected length": (POST + b"Expect: 100-continue\r\nContent-Length: 1000000000000\r\n\r\n", 413, "larger"),
    "two codings": (POST + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n0\r\n\r\n", 400, "codings"),
    "listed codings": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400, "codings"),
    "unknown coding": (POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501, "Transfer-Encoding"),
    "coding in 1.0": (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "HTTP/1.0"),
    "space before colon": (POST + b"Content-Length : 5\r\n\r\n12345", 400, "header"),
    "folded": (POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", 400, "second line"),
    "folded first": (POST + b" x: y\r\n\r\n", 400, "second line"),
    "chunk size": (POST + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n12345\r\n", 400, "hunk"),
    "chunk end": (POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\n12345\r\n", 400, "hunk"),
    "small chunks": (POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 70_000, 400, "too small"),
    "chunk size line": (POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 300_000, 400, "too small"),
    "line feeds": (b"GET /health HTTP/1.1\nHost: localhost\n\n", 400, "line feed"),
    "one line feed": (GET + b"Host: localhost\nX: y\r\n\r\n", 400, "line feed"),
    "carriage return": (GET + b"X: y\rz\r\n\r\n", 400, "CR"),
    "NUL in a header": (GET + b"X: y\0z\r\n\r\n", 400, "header"),
    "NUL in the target": (b"GET /hea\0lth HTTP/1.1\r\n\r\n", 400, "control"),
    "escape in the target": (b"GET /\x1b[31m HTTP/1.1\r\n\r\n", 400, "control"),
    "NULs": (bytes(100) + b"\r\n\r\n", 400, "first line"),
    "no colon": (GET + b"nonsense\r\n\r\n", 400, "header"),
    "empty lines": (b"\r\n\r\n" + GET + b"\r\n", 400, "empty line"),
    "long method": (b"A" * 100_000 + b" / HTTP/1.1\r\n\r\n", 431, str(MAX_HEAD)),
    "longish method": (b"A" * 5_000 + b" / HTTP/1.1\r\n\r\n", 400, "method"),
    "small letters": (b"get / HTTP/1.1\r\n\r\n", 400, "method"),
    "no version": (b"GET /health\r\n\r\n", 400, "first line"),
    "version 2.0": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "HTTP/1.1"),
    "version 0.9": (b"GET / HTTP/0.9\r\n\r\n", 505, "HTTP/1.1"),
    "version 1.10": (b"GET / HTTP/1.10\r\n\r\n", 400, "first line"),
    "bad address": (b"GET http://[/ HTTP/1.1\r\n\r\n", 400, "target"),
    "spaces": (b"GET /a b HTTP/1.1\r\n\r\n", 400, "first line"),
    "two hosts": (GET + b"Host: a\r\nHost: b\r\n\r\n", 400, "Host"),
    "many lines": (GET + b"a: b\r\n" * 5_000 + b"\r\n", 431, "lines"),
    "100,000 lines": (GET + b"a: b\r\n" * 100_000 + b"\r\n", 431, str(MAX_HEAD)),
    "an endless line": (GET + b"X: " + b"x" * 1_000_000, 431, str(MAX_HEAD)),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, ""),
}


@pytest.fixture(scope="module")
def quiet():
    """The port of a server; at its end nothing was logged that is long, of several lines, or a traceback."""
    records, handler = [], logging.Handler()
    handler.emit = records.append
    logging.getLogger().addHandler(handler)
    with serving(app_of(PacedEngine(ANSWER))) as (port, _):
        yield port
    logging.getLogger().removeHandler(handler)
    for record in records:
        assert record.getMessage().isprintable() and len(record.getMessage()) < 600 and not record.exc_info, record


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_request_is_answered_and_the_connection_closed(quiet, name):
    said, status, words = MALFORMED[name]
    with connected(quiet) as client:
        with contextlib.suppress(ConnectionError):      # the server may have had enough before all is sent
            client.sendall(said)
        answer = read_answer(client)
        assert_error(answer, status)
        assert words in answer[2]["error"]["message"] and len(answer[2]["error"]["message"]) < 400
        assert answer[1]["Connection"] == "close" and client.recv(1) == b""


@pytest.mark.parametrize("said, status", [
    (GET + b"\r\n", 200), (b"\r\n" + GET + b"\r\n", 200), (b"GET /health HTTP/1.0\r\n\r\n", 200),
    (b"GET http://localhost/health HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
    (b"GET /health HTTP/1.1\r\nX: " + b"x" * 8000 + b"\r\n\r\n", 200),
    (b"GET /health?a=%00%0a HTTP/1.1\r\n\r\n", 200), (b"GET /%0a%0dnews HTTP/1.1\r\n\r\n", 404),
    (b"GET /\xff HTTP/1.1\r\n\r\n", 400), (b"OPTIONS * HTTP/1.1\r\n\r\n", 404),
    (b"CONNECT a:443 HTTP/1.1\r\n\r\n", 404),
    (GET + b"Expect: 100-continue\r\n\r\n", 200), (b"ABCDEFGHIJ /health HTTP/1.1\r\n\r\n", 405),
], ids=lambda value: str(value)[:40])
def test_unusual_requests_are_answered(quiet, said, status):
    with connected(quiet, said) as client:
        assert read_answer(client)[0] == status
    assert send(quiet, "GET", "/health")[0] == 200


def test_a_client_that_expects_to_be_asked_for_the_body(quiet):
    body = json.dumps(COMPLETION).encode()
    with connected(quiet, POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)) as client:
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert read_answer(client)[2]["choices"][0]["text"] == ANSWER


def test_a_refused_request_hides_no_other(quiet):
    """What follows it on the connection may be part of it, and is not answered."""
    with connected(quiet, MALFORMED["both lengths"][0] + HEALTH) as client:
        assert read_answer(client)[0] == 400 and client.recv(1) == b""


def test_a_client_that_is_still_sending_reads_that_its_body_is_too_large(quiet):
    with connected(quiet, POST + b"Content-Length: 64000000\r\n\r\n") as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(bytes(8_000_000))
        assert_error(read_answer(client), 413)


def mutated(rng, said: bytes) -> bytes:
    """Bytes with some of them changed, left out, put elsewhere or repeated."""
    said = bytearray(said)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(said) + 1)
        end = min(len(said), at + rng.choice([1, 1, 2, 8, 40]))
        said[at:end] = rng.choice([
            b"", said[at:end] * rng.choice([2, 50]), rng.randbytes(end - at), b"\r\n", b"\n", b"\0", b": ", b"\r\n\r\n",
            b"9" * 20, b"Content-Length: 7\r\n", b"\r\n ", b"HTTP/1.1"])
    return bytes(said)


@pytest.mark.parametrize("n", [600, pytest.param(5000, marks=pytest.mark.slow)])
def test_bytes_made_up_at_random(quiet, n):
    rng = random.Random(n)
    body = json.dumps(COMPLETION).encode()
    seeds = [HEALTH, *(said[:2000] for said, _, _ in MALFORMED.values()),
             POST + b"Host: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body,
             POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)]
    for i in range(n):
        with connected(quiet, mutated(rng, rng.choice(seeds))) as client:
            if i % 50 == 0:
                assert send(quiet, "GET", "/health")[0] == 200
            if i % 2:                   # every other client leaves at once
                client.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionError):
                    while client.recv(1 << 16):
                        pass


# ---- clients that leave ------------------------------------------------------------------------------------


def test_a_client_that_ends_its_sending_side_is_answered(quiet):
    with connected(quiet, HEALTH) as client:
        client.shutdown(socket.SHUT_WR)
        assert read_answer(client)[0] == 200 and client.recv(1) == b""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_ends_its_sending_side_ends_its_generations(stream):
    engine = PacedEngine(ANSWER * 200, pace=0.02)
    body = json.dumps(COMPLETION | {"stream": stream, "max_tokens": 3000}).encode()
    with serving(app_of(engine)) as (port, service):
        with connected(port, POST + b"Content-Length: %d\r\n\r\n" % len(body) + body) as client:
            wait_until(lambda: engine.generations)
            client.shutdown(socket.SHUT_WR)
            wait_until(lambda: not service.open)
            said = b""
            while piece := client.recv(1 << 16):
                said += piece
        assert engine.generations[0].cancelled and b"cancelled" in said


# ---- draining ----------------------------------------------------------------------------------------------


def test_a_server_that_drains():
    """Open requests go on, new ones go elsewhere, and /health says why."""
    with serving(app_of(PacedEngine(ANSWER, pace=0.1))) as (port, service), official_client(port) as client:
        idle = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        idle.request("GET", "/health")
        assert idle.getresponse().read()
        stream = iter(client.completions.create(model="m", prompt="hi", max_tokens=64, stream=True))
        text = next(stream).choices[0].text
        drained = []
        thread = threading.Thread(target=lambda: drained.append(service.drain(30)))
        thread.start()
        wait_until(lambda: service.is_draining)
        status, headers, body = send(port, "GET", "/health")
        assert (status, body, headers["Connection"]) == (503, {"status": "draining"}, "close")
        idle.request("POST", TEXT, json.dumps(COMPLETION))
        answer = idle.getresponse()
        assert_error((answer.status, answer.headers, json.load(answer)), 503)
        assert answer.headers["Retry-After"] and answer.headers["Connection"] == "close"
        assert text + "".join(chunk.choices[0].text for chunk in stream) == ANSWER
        thread.join()
        assert drained == [True]


def test_the_end_of_a_drain_tells_the_clients():
    with serving(app_of(PacedEngine(ANSWER * 20, pace=0.05))) as (port, service), official_client(port) as client:
        stream = iter(client.completions.create(model="m", prompt="hi", max_tokens=500, stream=True))
        next(stream)
        assert not service.drain(0.2)
        service.close()
        with pytest.raises(openai.APIError, match="cancelled"):
            list(stream)


def test_the_end_of_a_server_waits_for_no_look(monkeypatch):
    """Also where a client leaves at the same moment: looks are far apart here."""
    monkeypatch.setattr(http_api, "POLL_MS", 60_000)
    for _ in range(20):
        with serving(app_of(PacedEngine())) as (port, _):
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
            client.request("GET", "/health")
            assert client.getresponse().read()
            started = time.monotonic()
            client.close()
        assert time.monotonic() - started < 30


@pytest.mark.parametrize("step", ["set_thread_count", "shutdown"])
def test_a_request_that_comes_while_a_server_ends_delays_nothing(monkeypatch, step):
    """Its last threads have ended: before waitress gives up what waits, and behind that."""
    monkeypatch.setattr(http_api, "LAST_SECONDS", 60)
    workers, end = waitress.task.ThreadedTaskDispatcher, getattr(waitress.task.ThreadedTaskDispatcher, step)

    def ended(workers, *given):
        end(workers, *given)
        if given in ((0,), ()):
            wait_until(lambda: not workers.threads)
            late.append(stack.enter_context(connected(port, HEALTH)))
            wait_until(lambda: workers.queue)

    monkeypatch.setattr(workers, step, ended)
    late = []
    with contextlib.ExitStack() as stack:
        with serving(app_of(PacedEngine())) as (port, _):
            started = time.monotonic()
        assert time.monotonic() - started < 30
        assert not is_open(late[0])


def test_a_server_ends_when_its_last_answer_is_read(monkeypatch):
    """And not before: the answer is longer than what a connection holds."""
    monkeypatch.setattr(http_api, "LAST_SECONDS", 60)
    with contextlib.ExitStack() as stack:
        with serving(app_of(LongModelList())) as (port, service):
            client = stack.enter_context(connected(port, b"GET /v1/models HTTP/1.1\r\n\r\n"))
            wait_until(lambda: n_arrived(client) and not service.log.running)
            answers, started = [], time.monotonic()
            reader = threading.Timer(0.5, lambda: answers.append(read_answer(client)))
            reader.start()
        assert time.monotonic() - started < 30
        reader.join()
        assert answers[0][2]["data"][0]["id"] == LongModelList().name


def test_an_answer_that_is_read_while_a_server_ends_is_whole(monkeypatch):
    """Also where the client reads slowly, and has already sent its next request, which nobody reads any more."""
    monkeypatch.setattr(http_api, "LAST_SECONDS", 60)

    def read(pieces):
        while pieces[-1:] != [b""]:
            time.sleep(0.002)
            pieces.append(client.recv(1 << 16))

    with contextlib.ExitStack() as stack:
        with serving(app_of(LongModelList())) as (port, service):
            client = stack.enter_context(connected(port, b"GET /v1/models HTTP/1.1\r\n\r\n"))
            wait_until(lambda: n_arrived(client) and not service.log.running)
            client.sendall(HEALTH)
            reader = threading.Thread(target=read, args=(pieces := [],))
            reader.start()
        reader.join()
        assert json.loads(b"".join(pieces).partition(b"\r\n\r\n")[2])["data"][0]["id"] == LongModelList().name


def test_something_else_wakes_a_server_that_ends(monkeypatch):
    """Before the byte that tells it is written: its trigger is not closed until then."""
    def pull(trigger, write=waitress.trigger.trigger._physical_pull):
        write(trigger)
        time.sleep(0.1)
        write(trigger)

    monkeypatch.setattr(waitress.trigger.trigger, "_physical_pull", pull)
    with serving(app_of(PacedEngine())):
        pass
