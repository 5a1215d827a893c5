"""What crosses the network between a front and its replicas: bytes and tuples, since Ray is fastest with these.

    request     bytes of a pickled Request or TextsRequest, from a front, once for each answer
    events      [(id, n_before, counts, deltas or rows, end)], from a replica, of each answer that has news; n_before:
                so many deltas or rows of it came before, so a front sees where some are missing
    report      what a replica says of itself, at least once every REPORT_SECONDS

Pickles are read only of a request, by a replica, and come from a front of the same cluster: whoever can reach Ray's
ports may run whatever code they like anyway, so these ports are for trusted networks (docs/several-machines.md).
"""

import hashlib
import pickle

from engine.pooling import TextsRequest
from engine.request import ContextExceeded, DeadlineExceeded, Delta, EngineStopped, Request, RequestError

REPORT_SECONDS = 1.0        # between two messages of a replica, at most
GAP = 0.04                  # seconds between messages with nothing urgent: each costs both ends about a millisecond
NEXT_SECONDS = 2.0          # after which a front asks for the next stream, and so says that it lives
WHOLE = "ended"             # the end of an answer that did not fail
UNHEARD = "unheard", None, "it had not heard of this front for long"       # as `error_told` has errors
# Of an Answer, as engine/request.py has them. TIMES are seconds since its replica has got it.
TIMES = "waited", "first_after", "last_after"
COUNTS = "n_read", "n_cached", "keys_read", "keys_seen", *TIMES


def packed(request: Request | TextsRequest) -> bytes:
    return pickle.dumps(request, pickle.HIGHEST_PROTOCOL)


def unpacked(data: bytes) -> Request | TextsRequest:
    return pickle.loads(data)


def counts_told(job) -> tuple:
    """COUNTS of a job of any kind; and behind them, if there are drafts, (checked, accepted), each by position, or
    else None."""
    drafts = getattr(job, "drafts", None)
    has_some = drafts is not None and any(drafts.n_checked)
    return (*(getattr(job, name, 0) for name in COUNTS),
            (tuple(drafts.n_checked), tuple(drafts.n_accepted)) if has_some else None)


def delta_told(delta: Delta) -> tuple:
    return (delta.token_id, delta.text, delta.finish_reason, delta.logprob, delta.top_logprobs, delta.cause,
            delta.prompt_logprobs)


def error_told(error: BaseException) -> tuple:
    """An error as (kind, field, text). A replica whose engine has stopped is told from a request that is at fault."""
    if isinstance(error, ContextExceeded):
        return "context", (error.n_prompt, error.n_ctx), str(error)
    if isinstance(error, RequestError):
        return "request", error.field, str(error)
    if isinstance(error, DeadlineExceeded):
        return "late", None, str(error)
    return "stopped", None, str(error) if isinstance(error, EngineStopped) else "the replica has made a mistake"


def error_heard(told: tuple) -> Exception:
    kind, field, text = told
    if kind == "context":
        return ContextExceeded(*field)
    return RequestError(field, text) if kind == "request" else {"late": DeadlineExceeded}.get(kind, EngineStopped)(text)


def fingerprint(tokenizer) -> str:
    """What tells a vocabulary from others."""
    digest = hashlib.sha256(repr(sorted(tokenizer.control.items())).encode())
    for piece in tokenizer.pieces:
        digest.update(len(piece).to_bytes(4) + piece)
    return digest.hexdigest()
