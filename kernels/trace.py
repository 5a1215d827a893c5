"""A timeline of what cards do, for Chrome's and Perfetto's viewers: kernels, copies and waits by card and stream.

    with tracing(cards) as trace:
        ...                                              # work on the cards, by any thread
    trace.write("trace.json")                            # open it in ui.perfetto.dev or chrome://tracing
    python -m kernels.trace trace.json overlap.svg span,copy     # or draw it; the last word chooses kinds of spans

While tracing, an Observer (kernels/card.py) records an event before and after each operation of a stream. A replayed
recording is one operation; the arguments of its bar list its kernels. `card.span(name)` makes a bar in a row of its
own, "work", above the streams. Waits of host threads for events have a row for each thread.

Clocks. When tracing begins, the host waits for a first event of each card and then reads its own clock. The card tells
the time of later events in seconds since that first one. So the rows of two cards agree as exactly as the host noticed
the first events, and drift apart as the clocks do.

What it costs: two events per operation. Kernels no longer overlap with the kernel before them, and short kernels take
longer than untraced.

The file has the object form of the Trace Event Format: complete events ("X": ts and dur in µs), and metadata ("M") that
names a process for each card and a thread for each stream. Every thread of the file has a number of its own, because
viewers confuse threads of different processes that have the same number.
"""

import json
import sys
import threading
import time
from collections import Counter, deque
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kernels.card import CardError, NoAnswer, Observer

MOST = 300_000                                           # operations kept, the last ones: 45 MB of a file
LEFT_OUT = "left out"                                    # the key in Trace.facts that tells how many are missing
LAST_WAIT = 10.0                                         # seconds that the end of tracing waits for queued operations
SHOWN_WAIT = 2e-6                                        # seconds; shorter waits of the host are not shown
HOST = "host"                                            # the process of the rows of host threads


@dataclass(frozen=True)
class Span:
    """One bar of the timeline.

    process, row: names of card and stream, or HOST and the name of a thread. kind: "kernel" (copies within the card
    as well), "replay", "copy" (over the link), "wait" or "span". start, end: seconds of the host's time.perf_counter.
    facts: further facts by name, which viewers show as the bar's arguments.
    """
    process: str
    row: str
    name: str
    kind: str
    start: float
    end: float
    facts: dict


class Trace:
    """What `tracing` found: spans, a list of Span, and facts by name. Both are complete when `tracing` has ended."""

    def __init__(self):
        self.spans, self.facts, self.n_marks = [], {}, 0
        self.marks = deque(maxlen=MOST)                  # ((process, row), name, kind, facts, start Event, end Event)
        self.waits = deque(maxlen=MOST)                  # of the host: (thread, name, start, end)

    def mark(self, *what):
        self.marks.append(what)
        self.n_marks += 1

    def write(self, path):
        Path(path).write_text(json.dumps(self.to_dict()) + "\n", encoding="utf-8")

    def replayed(self):
        """The operations of each replay, a list of Counter. Decode steps are replays."""
        return [Counter(span.facts["kernels"]) for span in self.spans if span.kind == "replay"]

    def to_dict(self):
        """The trace in the form that viewers read. Time 0 is the start of the first span."""
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
    """{thing: number} for the different things, from 1 on, because viewers take process 0 for the idle one."""
    return {thing: i for i, thing in enumerate(dict.fromkeys(things), 1)}


def _metadata(what, pid, tid, **args):
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


# ---- recording ---------------------------------------------------------------------------------------------

@contextmanager
def tracing(cards):
    """Records what `cards` do inside. Yields the Trace, which is complete when the block has ended."""
    trace, cards = Trace(), list(cards)
    clocks = [_Clock(card) for card in cards]
    try:
        with ExitStack() as stack:
            for card in cards:
                stack.enter_context(card.observed_by(_CardObserver(card, trace)))
            yield trace
    finally:
        kept, waits, n_marks = list(trace.marks), list(trace.waits), trace.n_marks     # a thread may still add some
        for card, clock in zip(cards, clocks):
            trace.facts[card.name] = card.describe()
            marks = [mark for mark in kept if mark[0][0] == card.name]
            try:
                _wait(card, marks)
            except CardError as error:                   # the operations before the failure are still shown
                trace.facts[f"{card.name} failed"] = str(error)
            trace.spans += _spans_of(card, clock, marks)
        if n_marks > len(kept):
            trace.facts[LEFT_OUT] = f"the first {n_marks - len(kept):,} operations"
        trace.spans += [Span(HOST, thread, name, "wait", start, end, {}) for thread, name, start, end in waits]
        trace.marks.clear()
        trace.waits.clear()


def _wait(card, marks):
    """Waits until the operations of `marks` are done. Raises what went wrong, NoAnswer after LAST_WAIT seconds."""
    end = time.monotonic() + LAST_WAIT
    for last in {row: mark[-1] for row, *mark in marks}.values():
        if not last.wait(max(end - time.monotonic(), 0)):
            raise NoAnswer(card, LAST_WAIT)


class _Clock:
    """Converts the times of a card's events to the host's time."""

    def __init__(self, card):
        self.event = card.default_stream.record()
        self.event.synchronize()
        self.seconds = time.perf_counter()

    def of(self, event):
        return self.seconds + event.seconds_since(self.event)


def _spans_of(card, clock, marks):
    """The Spans of `marks`. In a row no span starts before the last one has ended, whatever rounded times say."""
    spans, ends = [], {}
    for (process, row), name, kind, facts, start, end in marks:
        try:
            start, end = clock.of(start), clock.of(end)
        except CardError:                                # the operation was never done
            continue
        start = max(start, ends.get(row, start))
        end = ends[row] = max(start, end)
        if "bytes" in facts and end > start:
            facts = facts | {"GB/s": round(facts["bytes"] / (end - start) / 1e9, 3)}
        spans.append(Span(process, row, name, kind, start, end, facts))
    return sorted(spans, key=lambda span: (span.kind != "span", span.row != "default", span.row))


class _CardObserver(Observer):
    """Adds to `trace` what `card` does: events around every operation of a stream, and the host's times of waits."""

    def __init__(self, card, trace):
        self.card, self.trace = card, trace
        self.names = {}                                  # stream -> the number in the name of its row

    def launch(self, stream, function, grid, block, shared):
        return self._between(stream, function.name, "kernel", {"grid": grid, "block": block, "shared bytes": shared})

    def copy_in(self, stream, dst):
        return self._between(stream, f"in: {dst.name}", "copy", {"bytes": dst.nbytes})

    def copy_out(self, stream, src):
        return self._between(stream, f"out: {src.name}", "copy", {"bytes": src.nbytes})

    def copy(self, stream, dst, src):
        return self._between(stream, f"copy: {src.name}", "kernel", {"bytes": 2 * src.nbytes})

    def fill(self, stream, array):
        return self._between(stream, f"fill: {array.name}", "kernel", {"bytes": array.nbytes})

    def replay(self, stream, recording):
        kernels = dict(Counter(recording.operations))
        return self._between(stream, recording.name or "recording", "replay", {"kernels": kernels})

    def hold(self, stream, event):
        return self._between(stream, f"for {event.card.name}", "wait", {})

    @contextmanager
    def host_wait(self, event):
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            if end - start > SHOWN_WAIT:
                self.trace.waits.append((threading.current_thread().name, f"for {event.card.name}", start, end))

    def span(self, name):
        return self._between(self.card.default_stream, name, "span", {}, "work")

    @contextmanager
    def _between(self, stream, name, kind, facts, row=None):
        """Records an event before and one after the operation. row: by default that of the stream."""
        row, recording = row or self._row_of(stream), self.card._recording
        if recording is not None and stream is recording.stream:         # kept, not run
            yield
            return
        start = stream.record()
        yield
        self.trace.mark((self.card.name, row), name, kind, facts, start, stream.record())

    def _row_of(self, stream):
        number = self.names.setdefault(stream, len(self.names))
        return getattr(stream, "name", "") or f"stream {number}"


# ---- a picture ---------------------------------------------------------------------------------------------

COLOURS = {"span": "#8c8c8c", "kernel": "#2f6fb5", "replay": "#2f6fb5", "copy": "#e08214", "wait": "#c9c9c4"}
BACKGROUND = "#fbfbf9"                                   # opaque and light: readable on a dark page, too
SHARPNESS = 2000                                         # bars with gaps below width / SHARPNESS are drawn as one bar


def draw(trace, picture, kinds=tuple(COLOURS)):
    """Draws the spans of these kinds into the file `picture`, SVG or PNG by its name: a row per card and stream.

    trace: what `Trace.to_dict` gave.
    """
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
    """(start, end) pairs, sorted; pairs that are less than `gap` apart are joined into one."""
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
