"""The server without its sockets: its models, open requests, their clients, and the Flask app over them.

The files of the protocols (openai.py, anthropic.py, ...) translate HTTP bodies into Requests, and Deltas into answers;
the engine does the rest. One place chooses the engine (endpoint.py), by the `model` of a request. The code that answers
the request sees the service as an `Answering` with this one engine.
"""

import contextlib
import functools
import threading
import time

import flask
from werkzeug.exceptions import ServiceUnavailable, TooManyRequests

from engine.images import Picture
from engine.patience import too_late
from engine.pooling import PoolingEngine
from engine.request import DeadlineExceeded, EngineStopped
from engine.served import Defaults, Models, Served
from engine.template import end_rendering
from engine.text_engine import ABILITIES, TextEngine, sees

from . import log, metrics, openapi
from .access import Access
from .errors import MAX_BODY, MAX_SEEING, NotFound, explain
from .fetch import Fetcher
from .pictures import Pictures, Sent, patience_for
from .stored import Stored

MAX_WAITING = 64            # requests that may wait beside the running ones; one more is answered 429
POLL_SECONDS = 0.05         # between two looks for clients that hung up
MAX_LARGE = 4 * MAX_SEEING  # bytes of all bodies together that are larger than MAX_BODY

# The option of the command line that names a model of each kind.
NAMED_BY = {"text": "-m", "embedding": "--embedding-model", "reranking": "--reranking-model"}


# The protocols say that the temperature is 1. Request's own defaults are for experiments: greedy, never cut short.
SAMPLING_DEFAULTS = {"temperature": 1.0, "repetition_guard": True}


class Service:
    """What the HTTP endpoints share.

    models: those that answer. None while they are loaded at the start; the answer is then 503. max_requests: how many
    requests may be open at once. fetches: whether pictures of the web are fetched for clients.
    """

    def __init__(self, models: Models | None, max_requests: int, fetches: bool = False):
        self.models, self.max_requests = models, max_requests
        self.started = int(time.time())
        self.changed = threading.Condition()        # guards what follows
        self.open = {}      # id -> (Generation or TextsJob, function: has its client hung up?, its Exchange)
        self.n_entering = 0                         # places taken by `places` for requests that are not in `open`
        self.n_large = 0                            # bytes of bodies that `memory_for` keeps memory for
        self.is_draining = False                    # requests with a body are refused; the open ones go on
        self.closing = False
        self.is_loading = False                     # another engine is being loaded, because the first one has failed
        self.lost = []                              # the Faults of the cards that the server goes on without
        self.stored = Stored()                      # responses, for /v1/responses
        self.pictures = Pictures(Fetcher() if fetches else None)    # those of requests
        self.log = self.metrics = None              # a RequestLog and Metrics, set by create_app
        threading.Thread(target=self.watch, name="client watcher", daemon=True).start()

    # ---- models -------------------------------------------------------------------------------------------

    @property
    def engine(self) -> TextEngine | PoolingEngine | None:
        """That of the first model; None while it is not loaded."""
        return self.models and self.models.first.engine

    @property
    def engines(self) -> list:
        """Of the models that are loaded."""
        return self.models.engines if self.models else []

    def ready(self) -> Models:
        """The models. Raises ServiceUnavailable where the server has just been started, or loads another engine after a
        failure; EngineStopped where all models have failed."""
        if self.models is None or self.is_loading:
            raise ServiceUnavailable("the model is still loading", retry_after=5)
        if all(served.state == "failed" for served in self.models.served):
            raise EngineStopped(self.models.first.engine.reason)
        return self.models

    def choose(self, kind: str | None, name: str | None) -> Served:
        """The model that a request means, see `Models.choose`. Raises NotFound if no model is of the kind."""
        served = self.ready().choose(kind, name)
        if served is None:
            raise NotFound("model", f"no model of this server can {ABILITIES[kind]}: {NAMED_BY[kind]} names one",
                           "model_not_found")
        return served

    def lend(self, served: Served, timeout: float | None = None) -> "Answering":
        """The service for the current HTTP request, with the engine of a model, which is loaded if need be. The model
        stays until the last byte of the answer is written. timeout: seconds that the request allows. Raises as
        `Models.lend` does; DeadlineExceeded."""
        begun, gone, exchange = time.perf_counter(), client_watch(), flask.g.exchange
        exchange.model = served.name if len(self.models.served) > 1 else None

        def go_on():
            if self.closing or gone():
                raise ServiceUnavailable("the client has gone, or the server is shutting down")
            if timeout is not None and time.perf_counter() - begun > timeout:
                raise DeadlineExceeded(too_late(timeout))

        engine = self.models.lend(served, go_on)
        exchange.served = served
        return Answering(self, served, engine, begun)

    @contextlib.contextmanager
    def borrow(self, name: str | None):
        """The service with the engine of the model of this name, as it is loaded, while the `with` body runs."""
        served = self.choose(None, name)
        engine = self.models.borrow(served)
        try:
            yield Answering(self, served, engine, time.perf_counter())
        finally:
            self.models.give_back(served, is_use=False)

    def give_back(self, exchange: log.Exchange):
        """An HTTP request has ended, and needs its model no longer."""
        if exchange.served is not None:
            self.models.give_back(exchange.served)

    def text_of(self, ids, engine=None) -> str:
        """The text of token ids, special ones included, with one token for each picture. engine: whose they are, by
        default that of the first model."""
        engine = engine or self.engine
        if sees(engine):
            ids = [token for token, before in zip(ids, [None, *ids]) if not token == before == engine.eyes.pad]
        return engine.tokenizer.decode(ids, special=True)

    @property
    def max_body(self) -> int:
        """Bytes that a request may have: more where a model sees, since a picture has megabytes."""
        return MAX_SEEING if self.models and any(one.facts.sees for one in self.models.served) else MAX_BODY

    # ---- open requests ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def places(self, n: int):
        """Takes n of the max_requests places while the `with` body runs. The body prepares n requests, or is itself
        long work that counts as n requests. Raises TooManyRequests if fewer places are left, and ServiceUnavailable if
        the server is draining or closing."""
        with self.changed:
            if self.is_draining or self.closing:
                raise ServiceUnavailable("the server is shutting down", retry_after=5)
            n_open = len(self.open) + self.n_entering
            if n_open + n > self.max_requests:
                raise TooManyRequests(f"too many requests: {n_open} of {self.max_requests} are open already",
                                      retry_after=1)
            self.n_entering += n
        try:
            yield
        finally:
            with self.changed:
                self.n_entering -= n
                self.changed.notify_all()

    @contextlib.contextmanager
    def memory_for(self, n_bytes: int):
        """Keeps memory for a body of so many bytes while the `with` body runs. Raises TooManyRequests where large
        bodies have too much of it already."""
        n_bytes = n_bytes if n_bytes > MAX_BODY else 0
        with self.changed:
            if self.n_large + n_bytes > MAX_LARGE:
                raise TooManyRequests(f"too many large requests: they have {self.n_large} bytes together already",
                                      retry_after=1)
            self.n_large += n_bytes
        try:
            yield
        finally:
            with self.changed:
                self.n_large -= n_bytes

    def follow(self, generations: list, gone, exchange: log.Exchange):
        """From now on generations of an exchange are open, and their client is watched. gone(): has it hung up?"""
        with self.changed:
            self.open |= {id(generation): (generation, gone, exchange) for generation in generations}
            if self.closing:
                self.release(generations)
            self.changed.notify_all()

    def release(self, generations):
        """Ends generations, whether they have finished or not, and gives their places back."""
        with self.changed:
            for generation in generations:
                generation.cancel()
                self.open.pop(id(generation), None)
            self.changed.notify_all()

    def watch(self):
        """Cancels generations whose clients hung up. Their handlers cannot notice that: they wait for a token. Logs how
        much of long prompts is read."""
        while not self.closing:
            with self.changed:
                self.changed.wait_for(lambda: self.open or self.closing)
                gone = [generation for generation, is_gone, _ in self.open.values() if is_gone()]
                exchanges = list(dict.fromkeys(exchange for *_, exchange in self.open.values()))
            for generation in gone:
                generation.cancel()
            if exchanges:
                self.log.tell(exchanges)
            time.sleep(POLL_SECONDS)

    def drain(self, seconds: float) -> bool:
        """Refuses new requests from now on, and lets the open ones go on for so long.

        Returns whether all have ended.
        """
        with self.changed:
            self.is_draining = True
            return self.changed.wait_for(lambda: not (self.open or self.n_entering), seconds)

    def close(self, timeout=5.0) -> bool:
        """Refuses new requests, cancels the open ones and waits for their end, `timeout` seconds at most.

        Returns whether all have ended.
        """
        with self.changed:
            self.closing = True
            self.changed.notify_all()
            for generation, *_ in self.open.values():
                generation.cancel()
            end = time.monotonic() + timeout
            while (self.open or self.n_entering) and (left := end - time.monotonic()) > 0:
                if self.n_entering:             # again and again: the next one may begin after this
                    end_rendering()
                    for engine in filter(sees, self.engines):
                        engine.eyes.close()
                self.changed.wait(min(left, POLL_SECONDS))
            return not (self.open or self.n_entering)


class Answering:
    """The service as one HTTP request sees it: with the engine that answers it, and the defaults of its model. What is
    not here is the service's.

    begun: when the request's time began, by time.perf_counter().
    """

    def __init__(self, service: Service, served: Served, engine: TextEngine | PoolingEngine, begun: float):
        self._service, self.served, self.engine, self.begun = service, served, engine, begun
        self.sampling = SAMPLING_DEFAULTS | served.defaults.sampling
        self.thinking, self.template_kwargs = served.defaults.thinking, served.defaults.template_kwargs

    def __getattr__(self, name):
        return getattr(self._service, name)

    def respond(self, n: int, prepare, stream: bool):
        """Submits n requests and returns the HTTP response to them.

        prepare() gives (requests, answer). It is called after the n places were taken, since it may take long. answer
        writes what a protocol says of the generations: answer.whole(generations) gives a JSON object,
        answer.events(generations) the server-sent events of a stream, errors included.
        """
        generations, answer = self.submit(n, prepare)
        if stream:
            response = flask.Response(answer.events(generations), mimetype="text/event-stream", headers={
                "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})    # nginx passes each event on at once
            # A `finally` in events() would not do: a generator that was never started does not run its `finally`.
            response.call_on_close(lambda: self.release(generations))
            return response
        with contextlib.ExitStack() as stack:
            stack.callback(self.release, generations)
            said = answer.whole(generations)
            if not isinstance(said, flask.Response):
                return flask.jsonify(said)
            said.call_on_close(stack.pop_all().close)       # its text is written row by row, and takes seconds
            return said

    def submit(self, n: int, prepare) -> tuple:
        """Hands n requests to the engine, all of them or none; returns (generations, answer). From then on their
        generations are open, and their client is watched. prepare: see `respond`."""
        generations = []
        try:
            with self.places(n):
                requests, answer = prepare()        # a grammar takes long, here and in the engine
                for request in requests:
                    generations.append(self.engine.submit(request))
                    if request.timeout is not None:     # it counts loading and what `prepare` took, too
                        generations[-1].deadline = self.begun + request.timeout
        except BaseException as error:
            self.release(generations)
            if isinstance(error, Exception):
                raise
            raise RuntimeError(f"a library failed: {error!r}") from error   # a panic in Rust
        flask.g.exchange.follow(self.engine, generations)
        self.follow(generations, client_watch(), flask.g.exchange)
        return generations, answer

    def read_pictures(self, sent: list[Sent], timeout: float | None) -> list[Picture]:
        """The pictures of the current HTTP request, as `Pictures.read` has them. timeout: seconds that it may take."""
        patience = patience_for(timeout, client_watch())
        return self.pictures.read(self.engine.eyes, sent, patience, flask.g.exchange)


def client_watch():
    """A function that says whether the client of the current HTTP request has hung up."""
    return flask.request.environ.get("waitress.client_disconnected", lambda: False)


def create_app(engine: TextEngine | PoolingEngine | None = None, side=(), *, sampling: dict | None = None,
               thinking: bool | None = None, template_kwargs: dict | None = None, max_requests: int = MAX_WAITING,
               keys=(), origins=(), host: str = "127.0.0.1", log_prompts: bool = False,
               fetches: bool = False, models: Models | None = None) -> flask.Flask:
    """The Flask app over `engine`; app.extensions["qengine"] is its Service.

    Without an engine the app answers 503 until its service is given `models`, so it may listen while they load.
    side: engines of models beside the first. sampling, thinking, template_kwargs: the Defaults of all these. models: to
    be given instead of engines. max_requests, fetches: see `Service`. keys: API keys; where there are any, a request
    must bring one. origins: of web pages that may ask, "*" for all. host: the address that the server is going to
    listen on. log_prompts: put the text of prompts into the log of requests.
    """
    if engine is not None:
        defaults = Defaults(sampling or {}, thinking, template_kwargs or {})
        models = Models([Served(one, defaults=defaults) for one in (engine, *side)])
    service = Service(models, max_requests, fetches)
    app = flask.Flask("qengine", static_folder=None)
    app.extensions["qengine"] = service
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY         # Endpoint.answer allows more where pictures may come
    app.json.sort_keys = False

    service.metrics = metrics.Metrics(service)
    observers = [service.pictures.release, service.give_back, service.metrics.observe]
    service.log = log.RequestLog(observers, service.text_of if log_prompts else None)
    service.log.install(app)
    Access(keys, origins, host).install(app)
    for endpoint in openapi.ENDPOINTS:
        app.add_url_rule(endpoint.rule, endpoint.name, functools.partial(endpoint.answer, service),
                         methods=[endpoint.method])

    @app.errorhandler(Exception)
    def failed(error):
        answer = explain(error)
        flask.g.exchange.refusal = answer
        protocol = openapi.protocol_of(flask.request.endpoint, flask.request.path)
        return protocol.error_body(answer), answer.status, answer.headers

    return app
