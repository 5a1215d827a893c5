"""Checks a kernel against its reference and times it: the table of `python -m kernels.<name>`.

    if __name__ == "__main__":
        main("Q8_0 GEMV", cases)                         # cases(card) yields Case objects

The table has one line per case: the error that the check returned, the time of one call, bytes and operations per
second, and per cent of the card's memory bandwidth or of the pipe's peak. The last is empty where these are unknown;
kernels/emulated/cards.py has them, with their sources.

The time is that of the card, without Python: calls are recorded, the recording is replayed between two events, and the
shortest of several replays counts. Data that fit in a cache stay there from call to call, so a case that measures
memory needs more data than that.
"""

import argparse
import math
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from kernels.card import CardError
from kernels.emulated.cards import CARDS
from kernels.open import open_cards

# Operations per result of a pipe; a warp instruction has 32 results (kernels/emulated/cards.py). A multiplication and
# an addition are two operations. An instruction of the tensor path does 1,024 of each.
OPS_PER_RESULT = {"dp4a": 8, "dp2a": 4, "imad": 2, "half2": 4, "ffma": 2, "fp32": 1, "tensor": 64}
TARGET_SECONDS = 0.05                                    # length of one timed replay
MAX_CALLS = 500                                          # in one recording
REPLAYS = 3
NAME_WIDTH = 36


@dataclass(frozen=True)
class Case:
    """One line of the table. A column is empty where the case has nothing for it.

    name: the shape. check(): compares with the reference, returns the largest error, raises AssertionError.
    launch(): queues one call on the default stream; it may be called any number of times. n_bytes: bytes of global
    memory that one call must move. n_ops: operations of one call on `pipe`, a key of OPS_PER_RESULT; a multiplication
    and an addition are two.
    """
    name: str
    check: Callable | None = None
    launch: Callable | None = None
    n_bytes: int = 0
    n_ops: int = 0
    pipe: str = ""


@dataclass(frozen=True)
class Result:
    """What a case gave. error, seconds (per call): nan where not asked for; failure: the words of the failed check."""
    case: Case
    error: float = math.nan
    seconds: float = math.nan
    failure: str = ""


def main(title, cases):
    """The command line of a kernel's file: checks and times `cases(card)` on each card. Exits with 1 on failure."""
    parser = argparse.ArgumentParser(description=f"{title}: check against the reference, and time.")
    parser.add_argument("--card", help="emulated, cuda or cuda:0 (default: real cards, else emulated)")
    parser.add_argument("--check", action="store_true", help="check only, as under a tool that makes kernels slow")
    choice = parser.parse_args()

    def chosen(card):
        return (replace(case, launch=None) for case in cases(card) if case.check) if choice.check else cases(card)

    try:
        results = [result for card in open_cards(choice.card) for result in bench(card, title, chosen(card))]
    except CardError as error:
        sys.exit(str(error))
    sys.exit(1 if any(result.failure for result in results) else 0)


def bench(card, title, cases):
    """Checks, times and prints each Case of `cases`, and returns the Results.

    A generator of cases keeps the arrays of only one case at a time.
    """
    print(f"{title} on {card.describe()}\n")
    print(f"{'case':{NAME_WIDTH}}  max error       time     GB/s     TOPS  of peak")
    results = []
    for case in cases:
        results.append(run(card, case))
        print(line(results[-1], model_of(card)), flush=True)
    print()
    return results


def run(card, case):
    """Checks and times one case. The Result does not hold the case's functions, nor the arrays that they use."""
    shown = replace(case, check=None, launch=None)
    try:
        error = case.check() if case.check else math.nan
    except AssertionError as failure:
        return Result(shown, failure=" ".join(str(failure).split())[:200] or "check failed")
    return Result(shown, error, seconds_per_call(card, case.launch) if case.launch else math.nan)


def seconds_per_call(card, launch):
    """Seconds that one call of `launch` takes on the card when it is queued among other calls."""
    launch()                                             # compiles
    n_calls, seconds = 1, 0.0
    while True:
        with card.record() as recording:
            for _ in range(n_calls):
                launch()
        seconds = min(replay_seconds(card, recording) for _ in range(REPLAYS))
        if seconds >= TARGET_SECONDS / 2 or n_calls == MAX_CALLS:
            return seconds / n_calls
        n_calls = min(MAX_CALLS, max(2 * n_calls, int(n_calls * TARGET_SECONDS / max(seconds, 1e-9))))


def replay_seconds(card, recording):
    """Seconds of one replay on the default stream."""
    stream = card.default_stream
    start = stream.record()
    recording.replay()
    end = stream.record()
    end.synchronize()
    return end.seconds_since(start)


@contextmanager
def launches_of(card):
    """Yields a list that is filled with the launches and copies within the card made inside: (name, function that
    queues the operation again)."""
    found, launch, copy = [], card.launch, card.copy

    def listed_launch(kernel, *args, **options):
        found.append((kernel.__name__, partial(launch, kernel, *args, **options)))
        launch(kernel, *args, **options)

    def listed_copy(*args):
        found.append(("copy", partial(copy, *args)))
        copy(*args)

    card.launch, card.copy = listed_launch, listed_copy
    try:
        yield found
    finally:
        del card.launch, card.copy


def operation_seconds(card, work, into=None):
    """{name: [launches, seconds]} of the operations that work() queues, added to `into`.

    For each kernel, a recording of its launches alone, in their order, is replayed and timed. A launch thus reads the
    same data as in the whole, but comes after a launch of its own kind, so the sum differs a little from the time of
    the whole.
    """
    with launches_of(card) as launches, card.record():
        work()
    times = {} if into is None else into
    for name in dict.fromkeys(name for name, _ in launches):
        again = [call for other, call in launches if other == name]
        with card.record() as recording:
            for call in again:
                call()
        known = times.setdefault(name, [0, 0.0])
        known[0] += len(again)
        known[1] += min(replay_seconds(card, recording) for _ in range(REPLAYS))
    return times


def line(result, model=None):
    """The line of a Result in the table. model: the CardModel whose peaks are 100 %, or None."""
    case, seconds = result.case, result.seconds
    if result.failure:
        return f"{case.name:{NAME_WIDTH}}  FAILED: {result.failure}"
    columns = [f"{result.error:9.2e}" if result.error == result.error else f"{'':9}",
               show_time(seconds) if seconds == seconds else f"{'':9}",
               f"{case.n_bytes / seconds / 1e9:7.1f}" if case.n_bytes and seconds == seconds else f"{'':7}",
               f"{case.n_ops / seconds / 1e12:7.2f}" if case.n_ops and seconds == seconds else f"{'':7}",
               fraction_of_peak(case, seconds, model)]
    return f"{case.name:{NAME_WIDTH}}  {'  '.join(columns)}".rstrip()


def fraction_of_peak(case, seconds, model):
    """The share of memory bandwidth or of the pipe's peak, whichever is larger: "91 % memory"; "" where unknown."""
    if model is None or seconds != seconds:
        return ""
    shares = [(case.n_bytes / seconds / model.read_bandwidth, "memory")]
    if case.n_ops and case.pipe:
        shares.append((case.n_ops / seconds / (OPS_PER_RESULT[case.pipe] * model.rate(case.pipe)), case.pipe))
    share, name = max(shares)
    return f"{share:.0%} {name}".replace("%", " %") if share else ""


def model_of(card):
    """The CardModel of a real card. None for a card that is not in the table, and for the emulated card."""
    words = getattr(card, "model", "").replace("-", " ").split()
    return next((model for model in CARDS if model.name.replace("-", " ").split()[0] in words
                 and (model.name[:3] != "CMP" or "CMP" in words)), None)


def show_time(seconds):
    """0.0000123 → ' 12.30 µs', always nine characters wide."""
    for unit, scale in (("s ", 1), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1 or unit == "µs":
            return f"{seconds * scale:6.2f} {unit}"
