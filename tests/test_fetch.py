"""Pictures of the web: what is fetched, and that nothing makes the server ask its own network."""

import contextlib
import http.server
import socket
import ssl
import threading
import time
from types import SimpleNamespace

import pytest
import trustme
from werkzeug.exceptions import TooManyRequests

from api import fetch, pictures
from api.fetch import Fetcher, connect_outside, is_public
from api.pictures import Pictures, Sent
from engine.images import Reader
from engine.patience import ENDLESS, Patience
from engine.request import DeadlineExceeded, RequestError
from tests.clients import CHAT, app_of
from tests.pictures import file_of, scene
from tests.scripted import ScriptedEngine
from tests.until import PATIENCE, wait_until

PUBLIC, PRIVATE = "93.184.216.34", "10.0.0.1"
PICTURE = file_of(scene(256, 256), "PNG")


class Web(http.server.BaseHTTPRequestHandler):
    """A web of one server on the loopback, whatever its names. Paths say what it answers."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.asked.append((self.headers["Host"], self.path))
        kind, _, place = self.path.removeprefix("/").partition("?")
        if kind == "slow":
            with contextlib.suppress(OSError):
                for _ in range(10_000):         # until its client leaves
                    self.wfile.write(b"H")
                    time.sleep(0.05)
            return
        self.send_response({"gone": 404, "to": 302}.get(kind, 200))
        if kind == "to":
            self.send_header("Location", place)
        body = {"picture": PICTURE, "large": bytes(1 << 20), "cut": PICTURE}.get(kind, b"")
        if kind == "chunks":
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(len(body) + 9 * (kind == "cut")))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n" if kind == "chunks" else body)
        self.close_connection = kind == "cut"

    def log_message(self, *_):
        pass


class Names:
    """A name service, and connections to the pretended web. addresses: of each name, one list for each time that it is
    asked for. asked, connected: so far."""

    def __init__(self, port: int, addresses: dict):
        self.port, self.addresses, self.asked, self.connected = port, addresses, [], []

    def resolve(self, host, port, type):
        self.asked.append(host)
        found = self.addresses[host]
        found = found.pop(0) if found and isinstance(found[0], list) else found
        return [(socket.AF_INET, type, 6, "", (address, port)) for address in found]

    def connect(self, address, timeout):
        assert address[0] == PUBLIC         # whatever a name means: the address that was checked
        self.connected.append(address)
        return socket.create_connection(("127.0.0.1", self.port), timeout)


@pytest.fixture(scope="module")
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def web(server):
    """web(**addresses) of names: (Fetcher, Names)"""
    server.asked = []

    def make(**addresses):
        names = Names(server.server_port, {f"{name}.example": found for name, found in addresses.items()})
        return Fetcher(names.resolve, names.connect), names

    return make


def got(fetcher, url, seconds=PATIENCE, patience=ENDLESS):
    with fetcher(url, "images[0]", seconds, patience) as data:
        return data


@pytest.mark.parametrize("url, host", [
    ("http://a.example/picture", "a.example"), ("http://a.example:8000/picture", "a.example:8000"),
    ("http://a.example/to?/picture", "a.example"), ("http://a.example/to?http://b.example/picture", "b.example")])
def test_pictures_are_fetched(url, host, web, server):
    get, names = web(a=[PUBLIC], b=[PUBLIC])
    assert got(get, url) == PICTURE
    assert server.asked[-1] == (host, "/picture") and len(names.asked) == len(names.connected) == len(server.asked)


def test_a_body_in_chunks(web):
    assert got(web(a=[PUBLIC])[0], "http://a.example/chunks") == b"abcdefg"


@pytest.mark.parametrize("url, says", [
    ("http://a.example/gone", "status 404"), ("http://a.example/cut", "breaks off"),
    ("http://a.example/to?/to?/to?/to?/to?/picture", "redirects more than 3 times"),
    ("http://a.example/to?file:///etc/passwd", "not of the form"),
    ("http://a.example/to?ftp://a.example/", "not of the form"),
    ("http://me@a.example/picture", "not of the form"), ("http:///picture", "not of the form"),
    ("http://a.example:99999/picture", "cannot be read"), ("http://[::1/picture", "cannot be read"),
    ("http://b.example/picture", "not a public one"),
    ("http://a.example/to?http://b.example/picture", "not a public one"),
    ("http://both.example/picture", "not a public one"), ("http://none.example/picture", "not a public one")])
def test_what_is_not_fetched(url, says, web, server):
    get, names = web(a=[PUBLIC], b=[PRIVATE], both=[PUBLIC, PRIVATE], none=[])
    with pytest.raises(RequestError, match=says) as error:
        got(get, url)
    assert error.value.field == "images[0]" and "b.example" not in {host for host, _ in server.asked}
    assert len(names.connected) == len(server.asked)


def test_a_name_that_changes_its_address_is_asked_for_once(web):
    """DNS rebinding: the second answer would be the loopback. What was checked is what is connected to."""
    get, names = web(a=[[PUBLIC], ["127.0.0.1"]])
    assert got(get, "http://a.example/picture") == PICTURE
    assert names.asked == ["a.example"] and names.connected == [(PUBLIC, 80)]
    with pytest.raises(RequestError, match="not a public one"):
        got(get, "http://a.example/picture")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f.1", "0.0.0.0",
                                  "[::ffff:127.0.0.1]"])
def test_the_loopback_by_all_of_its_names(host, server):
    """With the machine's own resolver."""
    server.asked = []
    with pytest.raises(RequestError, match="not a public one|cannot be reached"):
        got(Fetcher(), f"http://{host}:{server.server_port}/picture")
    assert not server.asked


def test_a_public_address_of_this_machine(server):
    """Such an address passes the list of public addresses, but no firewall stands between it and this machine."""
    server.asked = []
    get = Fetcher(lambda host, port, type: [(socket.AF_INET, type, 6, "", (PUBLIC, port))],
                  lambda address, timeout: connect_outside(("127.0.0.1", server.server_port), timeout))
    with pytest.raises(RequestError, match="not a public one"):
        got(get, "http://a.example/picture")
    assert not server.asked


@pytest.mark.parametrize("address", [
    "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254",
    "100.64.0.1", "100.100.100.200", "168.63.129.16", "192.0.0.0", "192.0.0.9", "192.0.0.192", "192.0.2.1",
    "192.31.196.1", "192.52.193.1", "192.88.99.0", "192.88.99.255", "192.175.48.6", "198.18.0.1", "198.19.255.255",
    "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255", "::1", "::",
    "fe80::1", "fe80::1%lo", "fc00::1", "fd12::1", "fd00:ec2::254", "fec0::1", "ff02::1", "::ffff:127.0.0.1",
    "::ffff:8.8.8.8", "::ffff:a9fe:a9fe", "::7f00:1", "64:ff9b::7f00:1", "64:ff9b::8.8.8.8", "64:ff9b:1::a9fe:a9fe",
    "2002:7f00:1::1", "2002:a9fe:a9fe::", "2001::1", "2001:1::1", "2001:2::1", "2001:10::1", "2001:20::1",
    "2001:1ff:ffff::1", "2001:db8::1", "3fff::1", "2620:4f:8000::1", "100::1", "5f00::1", "4000::1", "nonsense", ""])
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", [
    PUBLIC, "1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "168.63.129.15", "172.15.255.255", "172.32.0.0",
    "192.0.1.0", "192.88.98.255", "192.88.100.0", "198.17.255.255", "198.20.0.0", "223.255.255.255",
    "2001:200::1", "2003::1", "2606:4700:4700::1111", "2a00:1450:4001::200e", "3ffe:ffff::1"])
def test_public_addresses(address):
    assert is_public(address)


def test_limits(web, monkeypatch):
    get, _ = web(a=[PUBLIC])
    monkeypatch.setattr(fetch, "MAX_BYTES", 1 << 20)
    assert len(got(get, "http://a.example/large")) == 1 << 20
    monkeypatch.setattr(fetch, "MAX_BYTES", (1 << 20) - 1)
    with pytest.raises(RequestError, match="more than 1048575 bytes"):
        got(get, "http://a.example/large")


def test_whoever_dawdles_is_left(web):
    """A server that sends a letter now and then, and a name service that never answers."""
    get, names = web(a=[PUBLIC])
    never = threading.Event()
    for one in get, Fetcher(lambda *_, **__: never.wait(), names.connect):
        started = time.monotonic()
        with pytest.raises(RequestError, match="may take 10 s together"):
            got(one, "http://a.example/slow", 0.3)
        assert time.monotonic() - started < 60
    never.set()


def fetching():
    """Threads that fetch."""
    return sum(thread.name == "picture of the web" for thread in threading.enumerate())


def test_whoever_hangs_up_is_no_longer_waited_for(web):
    get, _ = web(a=[PUBLIC])
    left = threading.Event()
    threading.Timer(0.2, left.set).start()
    with pytest.raises(DeadlineExceeded, match="^the client has hung up$"):
        got(get, "http://a.example/slow", patience=Patience(PATIENCE, left.is_set))
    wait_until(lambda: not fetching(), 60)


def test_names_that_are_never_found_take_no_more_threads_than_places(web, monkeypatch):
    """All requests of a full server ask for such a name. Those that get no place hear so; later ones get one."""
    monkeypatch.setattr(fetch, "AT_ONCE", 4)
    _, names = web(a=[PUBLIC])
    never, said, most = threading.Event(), [], []
    get = Fetcher(lambda *given, **type: never.wait() and names.resolve(*given, **type), names.connect)

    def ask():
        try:
            got(get, "http://a.example/picture", 0.3)
        except Exception as error:
            said.append(error)

    for _ in range(2):                                  # those of the first round hang when the second one comes
        asking = [threading.Thread(target=ask) for _ in range(20)]
        for thread in asking:
            thread.start()
        while any(thread.is_alive() for thread in asking):
            most.append(fetching())
            time.sleep(0.02)
        most.append(fetching())
    refused = [error for error in said if isinstance(error, TooManyRequests)]
    assert max(most) == 4 and len(refused) == 36 and len(said) == 40
    assert refused[0].description == "too many pictures of the web: 4 are being fetched already"
    never.set()
    wait_until(lambda: not fetching())
    assert got(get, "http://a.example/picture") == PICTURE


def test_the_wait_for_a_place_counts(web, monkeypatch):
    """By a clock that has a place come after half a second."""
    get, _ = web(a=[PUBLIC])
    get.resolve, never = lambda *given, **type: never.wait(), threading.Event()
    clock, waits = iter((100.0, 100.5)), []
    monkeypatch.setattr(fetch, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    class Noted(Patience):
        def wait(self, comes, seconds):
            waits.append(seconds)
            return super().wait(comes, seconds)

    with pytest.raises(RequestError, match="may take 10 s together"):
        got(get, "http://a.example/picture", 0.6, Noted())
    assert waits == pytest.approx([0.6, 0.1])
    never.set()


def test_a_file_keeps_its_place_until_it_is_read(web, monkeypatch):
    """So files in memory are bounded, too, and not only those on their way."""
    monkeypatch.setattr(fetch, "AT_ONCE", 1)
    get, _ = web(a=[PUBLIC])
    with get("http://a.example/picture", "images[0]", PATIENCE) as data:
        assert data == PICTURE
        with pytest.raises(TooManyRequests):
            got(get, "http://a.example/picture", 0.2)
    assert got(get, "http://a.example/picture") == PICTURE


def test_a_connection_that_comes_after_its_job_was_given_up(web):
    """There was no socket to end then. It must not be waited for: the other side could dawdle as long as it likes."""
    get, names = web(a=[PUBLIC])
    connecting, slow, connect = threading.Event(), threading.Event(), get.connect
    get.connect = lambda *given: (connecting.set(), slow.wait(), connect(*given))[-1]

    class UntilItConnects(Patience):
        def wait(self, comes, seconds):
            return comes(0) or connecting.wait(PATIENCE) and super().wait(comes, 0)     # the place, then the file

    with pytest.raises(RequestError, match="may take 10 s together"):
        got(get, "http://a.example/slow", PATIENCE, UntilItConnects())
    slow.set()
    wait_until(lambda: not fetching(), 60)
    assert names.connected


def test_all_pictures_of_a_request_have_one_time(web, monkeypatch):
    """By a clock on which each takes 7 seconds."""
    left = []
    monkeypatch.setattr(pictures, "time", SimpleNamespace(monotonic=lambda: 7.0 * len(left)))

    @contextlib.contextmanager
    def fetcher(url, field, seconds, patience):
        left.append(seconds)
        yield PICTURE

    with contextlib.closing(Reader()) as eyes:
        Pictures(fetcher).read(eyes, [Sent("http://a.example/picture", "images", is_url=True) for _ in range(3)])
    assert left == [10, 3, 0]


def test_certificates_are_checked(web, monkeypatch):
    """A certificate must be for the name in the URL, and of an authority that this machine knows."""
    authority, make = trustme.CA(), ssl.create_default_context
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        server.asked, tls = [], ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("a.example").configure_cert(tls)
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        get, names = web(a=[PUBLIC], b=[PUBLIC])
        names.port = server.server_port

        def refused(url):
            with pytest.raises(RequestError, match="SSLCertVerificationError"):
                got(get, url)

        refused("https://a.example/picture")
        monkeypatch.setattr(ssl, "create_default_context", lambda: knowing(make(), authority))
        assert got(get, "https://a.example/picture") == PICTURE and server.asked == [("a.example", "/picture")]
        assert names.connected[-1] == (PUBLIC, 443)
        refused("https://b.example/picture")
        server.shutdown()


def knowing(context: ssl.SSLContext, authority: trustme.CA) -> ssl.SSLContext:
    authority.configure_trust(context)
    return context


@pytest.mark.parametrize("fetches", [True, False])
def test_only_where_the_command_line_says_so(fetches, web):
    engine, (get, names) = ScriptedEngine("Seen.", sees=True), web(a=[PUBLIC])
    app = app_of(engine, fetches=fetches)
    service = app.extensions["qengine"]
    assert (service.pictures.fetch is not None) == fetches
    service.pictures.fetch = get if fetches else None
    answer = app.test_client().post(CHAT, json={"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "http://a.example/picture"}}]}]})
    assert answer.status_code == (200 if fetches else 400) and len(names.connected) == fetches
    assert fetches == (len(engine.requests) == 1 and engine.requests[0].pictures[0].n_tokens == 64)
    engine.eyes.close()
