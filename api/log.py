"""A line per request in the log, and on a terminal a line for each that runs, with its speed.

    id=5c0e... client=10.1.2.3 method=POST path=/v1/chat/completions status=200 seconds=0.942 prompt=160 cached=128
    generated=42 first_token=0.031 tokens_per_s=46.1 drafts=36 accepted=0.69 finish=stop

`client` is the address that the connection comes from: behind a proxy the proxy's, since anybody may send a header that
names another.
`accepted` is the share of the drafts that were right; both stand only where drafts were checked. Of a sparse prompt,
`keys_read` is the share of the keys that its queries have read (kernels/block_sparse.py). Of a model whose
experts do not all lie on the cards, `expert_hits` is the share that decode steps found there while the request ran, in
steps of all requests. The line is written when the last byte of the answer is written, or when the client has gone.
The id is taken from the request's header X-Request-Id, if that is a sensible one, and sent back in the same header.
Where a request has several answers, the counts and tokens_per_s are of all answers together. Where several models are
served, `model` is the one that answers. Of a request that is refused, `error` says why, because many clients hide the
answer. Where a field is at fault, `param` names it instead, for the sentence may quote the text of the field; text of
prompts is logged only with --log-prompts. While a long prompt is read, a line every few seconds says how much of it is
read:

    id=5c0e... client=10.1.2.3 method=POST path=/v1/chat/completions seconds=10.112 prompt=131072 read=32768
"""

import contextlib
import json
import logging
import re
import sys
import threading
import time
import urllib.parse
import uuid

import flask
import tqdm

from engine.pooling import TextsRequest
from engine.request import read_of, share_read

from .errors import ErrorAnswer

REFRESH_SECONDS = 0.25
READING_SECONDS = 5         # between two lines about the reading of a prompt
MAX_LINES = 8               # of running requests
MAX_PARAM = 200             # letters of a field's path
SANE_ID = re.compile(r"[\w.:-]{1,100}", re.ASCII)
POLLED = {"/health", "/metrics", "/pipes", "/experts", "/waiting"}      # asked often, so not logged
NO_NEWS = {200, 204, 503}                       # when answered so: all is well, or the model is still loading

logger = logging.getLogger("qengine.requests")


class Exchange:
    """An HTTP request, from its arrival to the last byte of its answer."""

    def __init__(self, request: flask.Request):
        given = request.headers.get("X-Request-Id", "")
        self.id = given if SANE_ID.fullmatch(given) else uuid.uuid4().hex
        self.client, self.method, self.path = request.remote_addr, request.method, request.path
        self.status, self.started, self.ended = None, time.perf_counter(), None
        self.refusal = None             # an ErrorAnswer
        self.generations, self.engine = [], None        # Generations or TextsJobs, and whose
        self.served = None                              # the model that is lent to this request
        self.model = None                               # its name, where there are several
        self.told = self.started        # when a line was last written, or the request came
        self.experts_before = None

    def follow(self, engine, generations: list):
        """The request has become generations of an engine."""
        self.generations += generations
        if self.engine is None:
            self.engine, self.experts_before = engine, experts_used(engine)

    def __str__(self):
        fields = self.origin | {"status": self.status, "seconds": f"{self.ended - self.started:.3f}"}
        if self.model:
            fields["model"] = urllib.parse.quote(self.model)
        if self.generations:
            fields |= self.counts()
        if self.refusal:
            fields |= reason_of(self.refusal)
        return written(fields)

    @property
    def origin(self) -> dict:
        """The fields with which every line begins."""
        return {"id": self.id, "client": self.client, "method": self.method,
                "path": urllib.parse.quote(self.path[:200])}

    def reading(self) -> str | None:
        """The line on how much of its prompts is read; None where none is being read, or where the last line is not
        long ago."""
        now, (n_read, n_prompt) = time.perf_counter(), read_of(self.generations)
        if now - self.told < READING_SECONDS or not 0 < n_read < n_prompt:
            return None
        self.told = now
        fields = self.origin | {"seconds": f"{now - self.started:.3f}", "prompt": n_prompt, "read": n_read}
        return written(fields)

    def counts(self) -> dict:
        """The fields of the line that are about tokens, of all generations together."""
        generations = self.generations
        counts = {"prompt": sum(g.n_prompt for g in generations), "cached": sum(g.n_cached for g in generations),
                  "generated": sum(g.n_generated for g in generations)}
        if first := min((g.token_times[0] for g in generations if g.token_times), default=None):
            counts["first_token"] = f"{first - self.started:.3f}"
        if (speed := self.tokens_per_s()) is not None:
            counts["tokens_per_s"] = f"{speed:.1f}"
        if n_checked := sum(sum(g.drafts.n_checked) for g in generations):
            n_accepted = sum(sum(g.drafts.n_accepted) for g in generations)
            counts |= {"drafts": n_checked, "accepted": f"{n_accepted / n_checked:.2f}"}
        if (share := share_read(generations)) is not None:
            counts["keys_read"] = f"{share:.3f}"
        if self.experts_before:
            hits, used = (now - before for now, before in zip(experts_used(self.engine), self.experts_before))
            counts |= {"expert_hits": f"{hits / used:.2f}"} if used else {}
        return counts | {"finish": ",".join(dict.fromkeys(map(finish_of, generations)))}

    def tokens_per_s(self) -> float | None:
        """Tokens per second after the first token, which the prompt gives; None before there are two tokens."""
        times = sorted(time for g in self.generations for time in g.token_times[:1] + g.token_times[-1:])
        n = sum(len(g.token_times) - 1 for g in self.generations if g.token_times)
        return n / (times[-1] - times[0]) if n > 0 else None


def reason_of(refusal: ErrorAnswer) -> dict:
    """Why a request was refused: the fields of its line."""
    if refusal.field is None:
        return {"error": json.dumps(refusal.message)}
    return ({"code": refusal.code} if refusal.code else {}) | {"param": json.dumps(refusal.field[:MAX_PARAM])}


def written(fields: dict) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items())


def experts_used(engine) -> tuple[int, int] | None:
    """How many experts rows of decode steps found on the cards, and how many they used; None if all experts are
    there."""
    counts = engine.stats()
    return (counts["expert_hits"], counts["expert_hits"] + counts["expert_misses"]) if "expert_hits" in counts else None


def finish_of(generation) -> str:
    """How a generation ended: "stop", "length", "repetition", "error", or "abort" where the client left or the server
    closed."""
    return generation.cause or generation.finish_reason or ("error" if generation.error else "abort")


def prompts_of(request) -> list[list[int]]:
    """Token ids of all that a request wants read."""
    return request.texts if isinstance(request, TextsRequest) else [request.prompt_ids]


class RequestLog:
    """Follows the requests of an app.

    observers: functions that are called with each Exchange when it has ended. text_of: gives the text of token ids of
    an engine; None: the text of prompts is not logged.
    """

    def __init__(self, observers=(), text_of=None):
        self.observers, self.text_of = observers, text_of
        self.running = {}                   # id(exchange) -> Exchange, in the order of their arrival

    def install(self, app: flask.Flask):
        app.before_request(self.begin)
        app.after_request(self.answered)

    def begin(self):
        flask.g.exchange = Exchange(flask.request)

    def answered(self, response: flask.Response) -> flask.Response:
        """Called when the head of the answer is known. The body of a stream is written later."""
        exchange = flask.g.exchange
        exchange.status = response.status_code
        for name in "X-Request-Id", "Request-Id":       # where OpenAI's clients look for it, and Anthropic's
            response.headers[name] = exchange.id
        self.running[id(exchange)] = exchange
        response.call_on_close(lambda: self.end(exchange))
        return response

    def end(self, exchange: Exchange):
        del self.running[id(exchange)]
        exchange.ended = time.perf_counter()
        try:
            self.write(exchange)
        finally:                        # observers free what the exchange holds
            for observe in self.observers:
                observe(exchange)

    def tell(self, exchanges):
        """Logs lines of those of these exchanges whose prompts are being read."""
        for line in filter(None, (exchange.reading() for exchange in exchanges)):
            logger.info(line)

    def write(self, exchange: Exchange):
        """Logs the line of an exchange that has ended."""
        quiet = exchange.path in POLLED and exchange.status in NO_NEWS
        line = str(exchange)
        if self.text_of:
            prompts = dict.fromkeys(tuple(ids) for g in exchange.generations for ids in prompts_of(g.request))
            line += "".join(f" text={json.dumps(self.text_of(ids, exchange.engine))}" for ids in prompts)
        logger.log(logging.DEBUG if quiet else logging.INFO, line)


# ---- on a terminal -----------------------------------------------------------------------------------------


class Console(logging.Handler):
    """Log lines on stderr, above the lines of running requests."""

    def emit(self, record):
        tqdm.tqdm.write(self.format(record), file=sys.stderr)


class Progress:
    """While the `with` body runs, the terminal shows a line for each running request below everything else."""

    def __init__(self, log: RequestLog):
        self.log, self.lines, self.over = log, {}, threading.Event()
        self.thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

    def _run(self):
        while not self.over.wait(REFRESH_SECONDS):
            self.show([exchange for exchange in self.log.running.copy().values() if exchange.generations][:MAX_LINES])
        self.show([])

    def show(self, exchanges):
        """Shows a line for each of these exchanges and for no other."""
        for exchange in self.lines.keys() - set(exchanges):
            self.lines.pop(exchange).close()
        for exchange in exchanges:
            if exchange not in self.lines:
                self.lines[exchange] = tqdm.tqdm(bar_format="{desc}", leave=False, file=sys.stderr)
            self.lines[exchange].set_description_str(progress_line(exchange))


def progress_line(exchange: Exchange) -> str:
    generations = exchange.generations
    n, speed = sum(g.n_generated for g in generations), exchange.tokens_per_s()
    n_read, n_prompt = read_of(generations)
    said = f"prompt of {n_prompt} tokens" + f", {n_read} read" * (0 < n_read < n_prompt)
    if n:
        said = f"{n} tokens" + (f", {speed:.1f} tokens/s" if speed else "")
    return f"  {exchange.id[:8]}  {said}"


@contextlib.contextmanager
def on_stderr(log: RequestLog):
    """While the `with` body runs, the log goes to stderr, with the time. On a terminal, running requests are shown
    below it."""
    console = Console()
    console.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(console)
    logger.setLevel(logging.INFO)
    try:
        with Progress(log) if sys.stderr.isatty() else contextlib.nullcontext():
            yield
    finally:
        logger.removeHandler(console)
        logger.setLevel(logging.NOTSET)
