"""What the streams of all protocols have in common: answers as they come, signs of life, and events."""

import json
import time

from werkzeug.exceptions import ServiceUnavailable

from engine.request import deltas_of, read_of, share_read

READING_SECONDS = 1         # between two comments on how much of a prompt is read
SILENCE_SECONDS = 15        # proxies take a stream for dead that is silent for long, as it is while a prompt is read


def together(generations, is_stream=False):
    """The Deltas of generations as they come, each as (index, Delta); in a stream also None, now and then while none
    comes. Raises ServiceUnavailable when a generation ends without a finish reason: it was cancelled because the server
    is closing, since a client that has left does not read on."""
    finished = set()
    for said in deltas_of(generations, min(READING_SECONDS, SILENCE_SECONDS / 10) if is_stream else None):
        if said and said[1].finish_reason:
            finished.add(said[0])
        yield said
    if len(finished) < len(generations):
        raise ServiceUnavailable("the answer was cancelled: the server is shutting down", retry_after=5)


def whole(generation, is_stream=False):
    """What `together` gives of one generation, without the index."""
    return (said and said[1] for said in together([generation], is_stream))


def kept_alive(texts, sign: str, generations=()):
    """The texts that a stream writes, and `sign` wherever it has written nothing for SILENCE_SECONDS.

    texts: some may be "", which says that there is nothing to write but time may have passed. Many tokens may come
    before any of them is shown. generations: of a stream of server-sent events; comments say how much of their prompts
    is read, one in READING_SECONDS at most."""
    written, told = time.monotonic(), ""
    for text in texts:
        silence = time.monotonic() - written
        if not text and silence >= READING_SECONDS and (news := reading(generations)) not in ("", told):
            text = told = news
        if text or silence >= SILENCE_SECONDS:
            yield text or sign
            written = time.monotonic()


def reading(generations) -> str:
    """A comment in a stream of server-sent events: how much of the prompts is read. "" where none is being read."""
    n_read, n_prompt = read_of(generations)
    return f": reading {n_read} of {n_prompt} tokens\n\n" if 0 < n_read < n_prompt else ""


def cause_of(end) -> dict:
    """A field of our own. In it, every protocol says why an answer ended if the protocol's own words cannot say it.
    end: the last Delta, or the Generation."""
    return {"cause": end.cause} if end.cause else {}


def keys_read(generations, name: str = "keys_read") -> dict:
    """Another field of our own, for what every protocol counts: the share of the keys that sparse prompts have read.
    Of other prompts it says nothing."""
    share = share_read(generations)
    return {} if share is None else {name: round(share, 4)}


def sse(data: dict, name: str | None = None) -> str:
    """A server-sent event. It is ASCII, because some clients also break lines at U+0085 and U+2028."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n"
