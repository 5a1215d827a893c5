"""A timeline of what cards do, for Chrome's and Perfetto's viewers: kernels, copies and waits by card and stream.

    with tracing(cards) as trace:
        ...                                              # what cards and threads do meanwhile
    trace.write("trace.json")                            # open it in ui.perfetto.dev or chrome://tracing
    python -m kernels.trace trace.json overlap.svg span,copy     # or draw it, or some kinds of spans

While tracing, events are recorded around each operation of a stream; without it nothing here costs anything. A
replayed recording is one operation, whose kernels are in its arguments. `card.span(name)` makes a row above the
streams that tells what they are at. Waits of host threads for events are rows of their own.

Clocks. The events of a card tell seconds since the card's first one, which the host waited for and then read its own
clock: so the rows of different cards are as exact to each other as that wait, and drift apart as the clocks do.

What it costs: two events per operation, so kernels no longer overlap with the one before them, and short ones take
longer than they do without.

The file has the object form of the Trace Event Format: complete events ("X": ts and dur in µs), metadata ("M") that
names a process per card and a thread per stream. Threads have numbers of their own in the whole file, since viewers
mix up equal ones of different processes.
"""

import json
import sys
import threading
import time
from collections import Counter, deque
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kernels.card import CardError, NoAnswer

MOST = 300_000                                           # operations that are kept, the last ones; 45 MB of a file
LEFT_OUT = "left out"                                    # the fact of how many were not
LAST_WAIT = 10.0                                         # seconds that what is queued at the end may take
SHOWN_WAIT = 2e-6                                        # seconds: shorter waits of the host are none
HOST = "host"


@dataclass(frozen=True)
class Span:
    """One bar. process, row: card and stream, or HOST and thread. kind: kernel (copies within the card, too), replay,
    copy (over the link), wait or span. start, end: seconds of the host's time.perf_counter. facts: what else there is.
    """
    process: str
    row: str
    name: str
    kind: str
    start: float
    end: float
    facts: dict


class Trace:
    """What was recorded; `spans` is complete when `tracing` has ended."""

    def __init__(self):
        self.spans, self.facts, self.n_marks = [], {}, 0
        self.marks = deque(maxlen=MOST)                  # (row, name, kind, facts, start and end Event)
        self.waits = deque(maxlen=MOST)                  # (thread, name, start, end)

    def mark(self, *what):
        self.marks.append(what)
        self.n_marks += 1

    def write(self, path):
        Path(path).write_text(json.dumps(self.to_dict()) + "\n", encoding="utf-8")

    def to_dict(self):
        """The trace as viewers read it. Times begin at the first span."""
        first = min((span.start for span in self.spans), default=0.0)
        processes = _numbered(span.process for span in self.spans)
        rows = _numbered((span.process, span.row) for span in self.spans)
        events = [_metadata("process_name", pid, 0, name=name) for name, pid in processes.items()]
        events += [_metadata("process_sort_index", pid, 0, sort_index=pid) for pid in processes.values()]
        for (process, row), tid in rows.items():
            events.append(_metadata("thread_name", processes[process], tid, name=row))
            events.append(_metadata("thread_sort_index", processes[process], tid, sort_index=tid))
        for span in self.spans:
            events.append({"name": span.name, "cat": span.kind, "ph": "X", "ts": round(1e6 * (span.start - first), 3),
                           "dur": round(1e6 * (span.end - span.start), 3), "pid": processes[span.process],
                           "tid": rows[span.process, span.row], "args": span.facts})
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": self.facts}


def _numbered(things):
    """A number for each of the different things, from 1: 0 is the idle process of viewers."""
    return {thing: i for i, thing in enumerate(dict.fromkeys(things), 1)}


def _metadata(what, pid, tid, **args):
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


# ---- recording ---------------------------------------------------------------------------------------------

@contextmanager
def tracing(cards):
    """Records what `cards` do inside; yields the Trace, complete at the end."""
    trace, cards = Trace(), list(cards)
    clocks = [_Clock(card) for card in cards]
    try:
        with ExitStack() as stack:
            for card in cards:
                stack.enter_context(_traced(card, trace))
            yield trace
    finally:
        kept, waits, n_marks = list(trace.marks), list(trace.waits), trace.n_marks     # a thread may still add some
        for card, clock in zip(cards, clocks):
            trace.facts[card.name] = card.describe()
            marks = [mark for mark in kept if mark[0][0] == card.name]
            try:
                _wait(card, marks)
            except CardError as error:                   # what was done before is what is wanted now
                trace.facts[f"{card.name} failed"] = str(error)
            trace.spans += _spans_of(card, clock, marks)
        if n_marks > len(kept):
            trace.facts[LEFT_OUT] = f"the first {n_marks - len(kept):,} operations"
        trace.spans += [Span(HOST, thread, name, "wait", start, end, {}) for thread, name, start, end in waits]
        trace.marks.clear()
        trace.waits.clear()


def _wait(card, marks):
    """Until what `marks` tell of is done. Raises what went wrong with it; a card that hangs must hold nobody."""
    end = time.monotonic() + LAST_WAIT
    for last in {row: mark[-1] for row, *mark in marks}.values():
        if not last.wait(max(end - time.monotonic(), 0)):
            raise NoAnswer(card, LAST_WAIT)


class _Clock:
    """The host's time of a card's events."""

    def __init__(self, card):
        self.event = card.default_stream.record()
        self.event.synchronize()
        self.seconds = time.perf_counter()

    def of(self, event):
        return self.seconds + event.seconds_since(self.event)


def _spans_of(card, clock, marks):
    """Of a row no span begins before the last has ended, as the rounding of times could have it."""
    spans, ends = [], {}
    for (process, row), name, kind, facts, start, end in marks:
        try:
            start, end = clock.of(start), clock.of(end)
        except CardError:                                # it never came to that
            continue
        start = max(start, ends.get(row, start))
        end = ends[row] = max(start, end)
        if "bytes" in facts and end > start:
            facts = facts | {"GB/s": round(facts["bytes"] / (end - start) / 1e9, 3)}
        spans.append(Span(process, row, name, kind, start, end, facts))
    return sorted(spans, key=lambda span: (span.kind != "span", span.row != "default", span.row))


@contextmanager
def _traced(card, trace):
    """Puts something that records around the methods of `card` through which all its operations go."""
    names = {}                                           # streams without a name get numbers

    def row_of(stream):
        number = names.setdefault(stream, len(names))
        return card.name, getattr(stream, "name", "") or f"stream {number}"

    @contextmanager
    def between(stream, row, name, kind, **facts):
        is_recorded = card._recording is not None and stream is card._recording.stream
        if is_recorded:
            yield
            return
        start = stream.record()
        yield
        trace.mark(row, name, kind, facts, start, stream.record())

    def around(method, describe):
        """`method`, whose operations are told of as describe(its arguments) says: stream, name, kind and facts."""
        def traced(*args):
            stream, name, kind, facts = describe(*args)
            with between(stream, row_of(stream), name, kind, **facts):
                return method(*args)
        return traced

    def awaited(event, timeout):
        start = time.perf_counter()
        try:
            return wait(event, timeout)
        finally:
            end = time.perf_counter()
            if end - start > SHOWN_WAIT:
                trace.waits.append((threading.current_thread().name, f"for {event.card.name}", start, end))

    def span(name):
        return between(card.default_stream, (card.name, "work"), name, "span")

    described = {
        "_enqueue": lambda stream, function, grid, block, shared, *_: (
            stream, function.name, "kernel", {"grid": grid, "block": block, "shared bytes": shared}),
        "_copy_in": lambda dst, host, pinned, stream: (stream, f"in: {dst.name}", "copy", {"bytes": dst.nbytes}),
        "_copy_out": lambda host, src, pinned, stream: (stream, f"out: {src.name}", "copy", {"bytes": src.nbytes}),
        "_copy": lambda dst, src, stream: (stream, f"copy: {src.name}", "kernel", {"bytes": 2 * src.nbytes}),
        "_fill": lambda array, byte, stream: (stream, f"fill: {array.name}", "kernel", {"bytes": array.nbytes}),
        "_hold": lambda stream, event: (stream, f"for {event.card.name}", "wait", {}),
        "_replay": lambda recording, stream: (
            stream, recording.name or "recording", "replay", {"kernels": dict(Counter(recording.operations))}),
    }
    wait = card._await
    vars(card).update({name: around(getattr(card, name), describe) for name, describe in described.items()},
                      _await=awaited, span=span)
    try:
        yield
    finally:
        for name in (*described, "_await", "span"):
            delattr(card, name)


# ---- a picture ---------------------------------------------------------------------------------------------

COLOURS = {"span": "#8c8c8c", "kernel": "#2f6fb5", "replay": "#2f6fb5", "copy": "#e08214", "wait": "#c9c9c4"}
BACKGROUND = "#fbfbf9"                                   # opaque and light: readable on a dark page, too
SHARPNESS = 2000                                         # bars closer than this part of the width are one bar


def draw(trace, picture, kinds=tuple(COLOURS)):
    """Draws the spans of these kinds, of what `Trace.to_dict` gave, into a file, SVG by its name or PNG: a row per card
    and stream."""
    import matplotlib.pyplot as plt                      # here: only a picture needs it

    events = trace["traceEvents"]
    named = {(event["name"], event["pid"], event["tid"]): event["args"].get("name")
             for event in events if event["ph"] == "M"}
    bars = [event for event in events if event["ph"] == "X" and event["cat"] in kinds]
    rows = list(dict.fromkeys((bar["pid"], bar["tid"]) for bar in bars))
    width = max(bar["ts"] + bar["dur"] for bar in bars)
    figure, axes = plt.subplots(figsize=(9, 1 + 0.32 * len(rows)), facecolor=BACKGROUND, layout="constrained")
    axes.set_facecolor(BACKGROUND)
    for place, (pid, tid) in enumerate(rows):
        for kind, colour in COLOURS.items():
            mine = [(bar["ts"], bar["ts"] + bar["dur"]) for bar in bars if (bar["tid"], bar["cat"]) == (tid, kind)]
            gap = 0 if kind == "span" else width / SHARPNESS
            spans = [((start / 1e3), (end - start) / 1e3) for start, end in joined(mine, gap)]
            axes.broken_barh(spans, (place - 0.4, 0.8), facecolors=colour, linewidth=0.3 if kind == "span" else 0,
                             edgecolor=BACKGROUND)
    axes.set_yticks(range(len(rows)), [f"{named['process_name', pid, 0]}: {named['thread_name', pid, tid]}"
                                       for pid, tid in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, width / 1e3)
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    meanings = {"span": "a pass", "kernel": "kernels", "copy": "copies over the link", "wait": "waits"}
    handles = {meanings[kind]: plt.Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in meanings if kind in kinds}
    figure.legend(handles.values(), handles, loc="outside upper right", ncols=len(handles), frameon=False)
    figure.savefig(picture, dpi=160)
    plt.close(figure)


def joined(spans, gap):
    """(start, end) pairs without those whose ends lie closer to the next start than `gap`, as one."""
    result = []
    for start, end in sorted(spans):
        if result and start - result[-1][1] < gap:
            result[-1][1] = max(result[-1][1], end)
        else:
            result.append([start, end])
    return result


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(f"usage: python -m kernels.trace trace.json picture.svg [{','.join(COLOURS)}]")
    draw(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2], *(kinds.split(",") for kinds in sys.argv[3:]))
