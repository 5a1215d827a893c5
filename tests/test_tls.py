"""Serving over https: what clients see of it, and files that are no certificate."""

import contextlib
import http.client
import json
import os
import ssl
import threading
import time
import urllib.request
import warnings

import openai
import pytest
import trustme

from api import connection as connection_api
from api.access import is_secret
from api.tls import HANDSHAKE, read_certificate
from cli.main import main
from engine.request import RequestError
from tests.clients import TEXT, app_of, assert_error, serving
from tests.paced import PacedEngine
from tests.test_cli import start
from tests.test_http import ANSWER, COMPLETION, HEALTH, connected, read_answer
from tests.until import PATIENCE, wait_until

AUTHORITY = trustme.CA()
ISSUED = AUTHORITY.issue_cert("127.0.0.1", "localhost")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The names of a certificate and of its key."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    certificate.write_bytes(b"".join(pem.bytes() for pem in ISSUED.cert_chain_pems))
    key.write_bytes(ISSUED.private_key_pem.bytes())
    key.chmod(0o600)
    return str(certificate), str(key)


@pytest.fixture(scope="module")
def tls(files):
    return read_certificate(*files)


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    AUTHORITY.configure_trust(context)
    return context


@contextlib.contextmanager
def secure_client(port, said=b""):
    """A connection whose handshake is done."""
    with connected(port) as plain, trusting().wrap_socket(plain, server_hostname="127.0.0.1") as client:
        client.sendall(said)
        yield client


def official(port):
    return openai.OpenAI(base_url=f"https://127.0.0.1:{port}/v1", api_key="none", max_retries=0,
                         http_client=openai.DefaultHttpxClient(verify=trusting()))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_official_client(tls, stream):
    with serving(app_of(PacedEngine(ANSWER)), tls) as (port, _), official(port) as client:
        for _ in range(3):          # on the same connection, where nothing is streamed
            answer = client.completions.create(model="m", prompt="hi", max_tokens=64, stream=stream)
            text = "".join(c.choices[0].text for c in answer) if stream else answer.choices[0].text
            assert text == ANSWER


def test_a_client_that_trusts_nobody_of_ours(tls):
    with serving(app_of(PacedEngine()), tls) as (port, _):
        with openai.OpenAI(base_url=f"https://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.APIConnectionError):
                client.models.list()
        with secure_client(port, HEALTH) as client:
            assert read_answer(client)[0] == 200


def test_a_hundred_at_once(tls):
    texts = []
    with serving(app_of(PacedEngine(ANSWER, pace=0.01), max_requests=128), tls) as (port, _), official(port) as client:
        def ask():
            stream = client.completions.create(model="m", prompt="hi", max_tokens=64, stream=True)
            texts.append("".join(chunk.choices[0].text for chunk in stream))

        threads = [threading.Thread(target=ask) for _ in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == [ANSWER] * 100


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_hangs_up(tls, stream):
    engine = PacedEngine(ANSWER * 20, pace=0.02)
    with serving(app_of(engine), tls) as (port, service):
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=PATIENCE, context=trusting())
        connection.request("POST", TEXT, json.dumps(COMPLETION | {"max_tokens": 1000, "stream": stream}))
        wait_until(lambda: engine.generations)
        connection.close()
        engine.generations[0].wait()
        assert engine.generations[0].cancelled
        wait_until(lambda: not service.open)


def test_large_bodies_and_large_answers(tls):
    """Longer than a record and than what a connection holds; the client reads slowly."""
    engine = PacedEngine()
    engine.name = "long" * 2_000_000
    with serving(app_of(engine), tls) as (port, _):
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=PATIENCE, context=trusting())
        connection.request("POST", "/tokenize", json.dumps({"content": "hi"}).encode().ljust(4_000_000))
        assert json.load(connection.getresponse())["tokens"]
        connection.request("GET", "/v1/models")
        answer, text = connection.getresponse(), b""
        time.sleep(0.3)
        while piece := answer.read(1 << 20):
            text += piece
            time.sleep(0.02)
        assert json.loads(text)["data"][0]["id"] == engine.name
        connection.close()


def test_pieces_of_any_size(tls):
    """A whole record may hold several requests, and a request may come byte by byte."""
    with serving(app_of(PacedEngine()), tls) as (port, _), secure_client(port, HEALTH + HEALTH) as client:
        read = client.makefile("rb")
        for _ in range(2):
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += read.readline()
            length = next(int(line.split(b":")[1]) for line in head.splitlines() if b"Content-Length" in line)
            assert b"200 OK" in head and json.loads(read.read(length))["status"] == "ok"
        for byte in HEALTH:
            client.send(bytes([byte]))
        assert read_answer(client)[0] == 200


def test_half_a_handshake_holds_nobody_up(tls, monkeypatch):
    with serving(app_of(PacedEngine(ANSWER)), tls) as (port, _), contextlib.ExitStack() as stack:
        beginnings = b"", HANDSHAKE, HANDSHAKE + b"\x03\x01\x02\x00\x01\x00", HANDSHAKE + b"nonsense" * 100
        halves = [stack.enter_context(connected(port, said)) for said in beginnings * 5]
        with secure_client(port, HEALTH) as client:
            assert read_answer(client)[0] == 200
        monkeypatch.setattr(connection_api, "REQUEST_SECONDS", 2)
        for half in halves:         # the server ends them all
            with contextlib.suppress(ConnectionError):
                while half.recv(1000):
                    pass


def test_plain_http_is_told_to_speak_tls(tls):
    with serving(app_of(PacedEngine()), tls) as (port, _), connected(port, HEALTH) as client:
        answer = read_answer(client)
        assert_error(answer, 400)
        assert "https://" in answer[2]["error"]["message"] and client.recv(1) == b""


def test_old_versions_are_refused(tls):
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    AUTHORITY.configure_trust(old)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    with serving(app_of(PacedEngine()), tls) as (port, _), connected(port) as plain:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            old.wrap_socket(plain, server_hostname="127.0.0.1")


def test_the_end_is_told(tls):
    """A client can tell an answer that has ended from one that was cut."""
    said = b"GET /health HTTP/1.0\r\n\r\n"
    with serving(app_of(PacedEngine()), tls) as (port, _), connected(port) as plain:
        with trusting().wrap_socket(plain, server_hostname="127.0.0.1", suppress_ragged_eofs=False) as client:
            client.sendall(said)
            while client.recv(1000):        # raises SSLEOFError where a connection is cut
                pass


@pytest.mark.parametrize("origin, status", [("https://{}", 200), ("https://evil.example", 403)])
def test_pages_of_the_server_itself_may_ask(tls, origin, status):
    with serving(app_of(PacedEngine()), tls) as (port, _):
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=PATIENCE, context=trusting())
        connection.request("GET", "/v1/models", headers={"Origin": origin.format(f"127.0.0.1:{port}")})
        assert connection.getresponse().status == status
        connection.close()


def test_idle_connections_keep_nobody_out(tls, monkeypatch):
    monkeypatch.setattr("api.http.CONNECTIONS", 50)
    with serving(app_of(PacedEngine(ANSWER)), tls) as (port, _), contextlib.ExitStack() as stack:
        for i in range(150):
            stack.enter_context(connected(port, HANDSHAKE * (i % 2)))
        with official(port) as client:
            assert client.completions.create(model="m", prompt="hi", max_tokens=64).choices[0].text == ANSWER


# ---- files -------------------------------------------------------------------------------------------------


def encrypted_key() -> bytes:
    from cryptography.hazmat.primitives import serialization
    key = serialization.load_pem_private_key(ISSUED.private_key_pem.bytes(), None)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                             serialization.BestAvailableEncryption(b"secret"))


@pytest.mark.parametrize("certificate, key, words", [
    (None, "", "cert.pem: No such file"), ("", None, "key.pem: No such file"),
    (b"nonsense", "", "cert.pem: holds no certificate"), ("", b"\xff\xfe", "key.pem: holds no private key"),
    ("", lambda: trustme.CA().issue_cert("localhost").private_key_pem.bytes(), "key.pem: is not the key of"),
    ("", encrypted_key, "asks for a password"),
    (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "", "damaged"),
    ("", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "damaged"),
], ids=["no cert", "no key", "cert", "key", "other", "encrypted", "damaged cert", "damaged key"])
def test_files_that_are_no_certificate(capsys, tmp_path, files, certificate, key, words):
    """"": the right file; None: no file."""
    named = []
    for right, given, name in zip(files, (certificate, key), ("cert.pem", "key.pem")):
        named.append(right if given == "" else str(tmp_path / name))
        if given:
            (tmp_path / name).write_bytes(given() if callable(given) else given)
    assert main(["--serve", "0", "--tls-cert", named[0], "--tls-key", named[1]]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err


@pytest.mark.parametrize("option", ["--tls-cert", "--tls-key"])
def test_one_file_is_not_enough(capsys, files, option):
    with pytest.raises(SystemExit):
        main(["--serve", "0", option, files[0]])
    assert "--tls-cert and --tls-key go together" in capsys.readouterr().err


def test_a_key_that_others_can_read(tmp_path):
    key = tmp_path / "key.pem"
    key.write_bytes(ISSUED.private_key_pem.bytes())
    for mode, secret in (0o600, True), (0o400, True), (0o640, False), (0o604, False):
        os.chmod(key, mode)
        assert is_secret(str(key)) == secret


def test_serving_over_https_as_a_process(tmp_path, files):
    key = tmp_path / "key.pem"
    key.write_bytes(ISSUED.private_key_pem.bytes())
    key.chmod(0o644)
    process = start("--serve", "0", "--tls-cert", files[0], "--tls-key", str(key))
    said = []
    while not said or not said[-1].startswith("serving "):
        said.append(process.stderr.readline())
        assert said[-1], said
    address = next(word for word in said[-1].split() if word.startswith("https://"))
    with urllib.request.urlopen(address + "health", context=trusting()) as answer:
        assert json.load(answer)["status"] == "ok"
    process.terminate()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and sum("other users of this machine can read" in line for line in said) == 1


def test_a_folder_is_no_certificate(tmp_path, files):
    with pytest.raises(RequestError, match="directory"):
        read_certificate(str(tmp_path), files[1])
