"""A small Hugging Face Hub on the loopback: the endpoints that huggingface_hub asks for lists and files of models."""

import contextlib
import functools
import hashlib
import threading
import time
from dataclasses import dataclass, field

import flask
from werkzeug.serving import WSGIRequestHandler, make_server

TOKEN = "hf_secret"
FAST_BYTES = 12 << 20


@dataclass
class Repository:
    """files: path -> bytes. lock: "gated" or "private"; only who sends TOKEN reads it then."""

    files: dict[str, bytes]
    lock: str | None = None
    revisions: tuple[str, ...] = ("main",)
    unlisted: tuple[str, ...] = ()          # files that are not in the list
    absent: tuple[str, ...] = ()            # files that only are in the list

    @functools.cached_property
    def sha(self) -> str:
        return hashlib.sha1(b"".join(hashlib.sha1(data).digest() for data in self.files.values())).hexdigest()


@dataclass
class Hub:
    """asked: "METHOD path" of every request, with the Range that it named. cuts: how many bytes an answer with a file
    has before its connection breaks, one item for each answer, None for a whole one; then all are whole. spoilt: files
    whose bytes arrive changed. status: what every request is answered with, if anything. tokens: Authorization of
    requests for the bytes of files, which come from another host name. slow: seconds before each 64 kB behind the first
    FAST_BYTES of an answer. takes_ranges: or whole files come, whatever is asked."""

    repositories: dict[str, Repository]
    port: int = 0
    asked: list[str] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    cuts: list[int | None] = field(default_factory=list)
    spoilt: tuple[str, ...] = ()
    status: int | None = None
    slow: float = 0
    takes_ranges: bool = True

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def files_asked(self) -> list[str]:
        """The files whose bytes were sent, each with what was left out at its beginning."""
        return [text.partition("/cdn/")[2] for text in self.asked if text.startswith("GET /cdn/")]


def refused(status: int, code: str):
    return flask.Response(code, status, {"X-Error-Code": code, "X-Error-Message": code})


def app_of(hub: Hub) -> flask.Flask:
    app = flask.Flask(__name__)

    @app.before_request
    def count():
        begin = flask.request.headers.get("Range", "")
        hub.asked.append(f"{flask.request.method} {flask.request.full_path.rstrip('?')} {begin}".strip())
        return flask.Response("no", hub.status) if hub.status else None

    def find(name, revision, opens):
        """The repository; or the response that says why there is none. opens: whether terms have to be accepted."""
        repository = hub.repositories.get(name)
        may = flask.request.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or repository.lock == "private" and not may:
            return refused(401, "RepoNotFound")
        if repository.lock == "gated" and opens and not may:
            return refused(401 if "Authorization" not in flask.request.headers else 403, "GatedRepo")
        return repository if revision in (*repository.revisions, repository.sha) else refused(404, "RevisionNotFound")

    @app.get("/api/models")
    def search():
        words = flask.request.args["search"].lower().split()
        return [{"id": name} for name in hub.repositories if any(word in name.lower() for word in words)]

    @app.get("/api/models/<owner>/<name>", defaults={"revision": "main"})
    @app.get("/api/models/<owner>/<name>/revision/<path:revision>")
    def model(owner, name, revision):
        found = find(f"{owner}/{name}", revision, False)
        if not isinstance(found, Repository):
            return found
        listed = [{"rfilename": path, "size": len(data)} for path, data in found.files.items()
                  if path not in found.unlisted]
        return {"id": f"{owner}/{name}", "sha": found.sha,
                "siblings": listed + [{"rfilename": path, "size": 9} for path in found.absent]}

    @app.route("/<owner>/<name>/resolve/<path:rest>", methods=["GET", "HEAD"])
    def resolve(owner, name, rest):
        revision, _, path = rest.partition("/")
        found = find(f"{owner}/{name}", revision, True)
        if not isinstance(found, Repository):
            return found
        if path not in found.files:
            return refused(404, "EntryNotFound")
        data = found.files[path]
        return flask.Response("", 302, {
            "Location": f"http://localhost:{hub.port}/cdn/{owner}/{name}/{path}", "X-Repo-Commit": found.sha,
            "X-Linked-ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Linked-Size": str(len(data)),
            "Content-Length": "0"})

    @app.get("/cdn/<owner>/<name>/<path:path>")
    def bytes_of(owner, name, path):
        data = hub.repositories[f"{owner}/{name}"].files[path]
        hub.tokens.append(flask.request.headers.get("Authorization"))
        if path in hub.spoilt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        wish = flask.request.headers.get("Range") if hub.takes_ranges else None
        first, _, last = (wish or "bytes=0-").removeprefix("bytes=").partition("-")
        first, last = int(first), min(int(last or len(data)), len(data) - 1)
        cut = hub.cuts.pop(0) if hub.cuts else None
        return flask.Response(pieces(hub, data[first:last + 1], cut), 206 if wish else 200, {
            "Content-Length": str(last + 1 - first), "Content-Range": f"bytes {first}-{last}/{len(data)}"})

    return app


def pieces(hub, data, cut):
    if cut is not None:
        yield data[:cut]
        raise ConnectionAbortedError        # werkzeug closes the connection
    for at in range(0, len(data), 1 << 16):
        if at >= FAST_BYTES:
            time.sleep(hub.slow)
        yield data[at:at + (1 << 16)]


class Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, type, message, *args):
        pass


@contextlib.contextmanager
def serving(repositories: dict[str, Repository]):
    """Gives a Hub that answers while the `with` body runs."""
    hub = Hub(repositories)
    server = make_server("127.0.0.1", 0, app_of(hub), threaded=True, request_handler=Quiet)
    hub.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
